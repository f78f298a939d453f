"""Text to token ids and back, and the bytes each token stands for.

Wraps transformers' fast tokenizer of one local folder; never touches a network and never runs
code from the folder (chat templates render in transformers' Jinja sandbox). Called by the engine
(prompts), the detokenizer (``token_bytes``) and the API (chat, logprobs). transformers is
imported by ``load`` only, so that importing this module stays cheap.
"""

import json
from pathlib import Path
from typing import Any, Self

from coterie.errors import ConfigError, InvalidRequest

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
_SPACE_MARK = "\u2581"  # sentencepiece's visible space


def _byte_alphabet() -> dict[str, int]:
    """The character each byte is written as in a byte-level BPE vocabulary (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


class Tokenizer:
    """One model's tokenizer. Safe to call from several threads: nothing is changed after load.

    Attributes:
        special_ids: ids that ``skip_special_tokens`` leaves out of text.
        strips_first_space: the decoder drops one space at the start of a text (sentencepiece).
    """

    def __init__(self, fast: Any) -> None:
        self._fast = fast
        self._backend = fast.backend_tokenizer
        # A tokenizer.json may carry truncation or padding of its training days.
        self._backend.no_truncation()
        self._backend.no_padding()
        self.special_ids = frozenset(
            {i for i, t in fast.added_tokens_decoder.items() if t.special}
            | set(fast.all_special_ids)
        )
        state = self._backend.decoder
        decoder = json.loads(state.__getstate__()) if state is not None else None
        self._byte_level = _mentions(decoder, "ByteLevel")
        self._spaces = _mentions(decoder, "Metaspace") or _replaces_space_mark(decoder)
        self._byte_fallback = _mentions(decoder, "ByteFallback")
        self.strips_first_space = self._spaces and (
            _mentions(decoder, "Strip") or _prepends_space(decoder)
        )
        self._alphabet = _byte_alphabet()

    @classmethod
    def load(cls, model_dir: str | Path) -> Self:
        """Read the tokenizer of a folder.

        Raises:
            ConfigError: the folder holds no fast tokenizer that can be read.
        """
        folder = Path(model_dir)
        check_folder(folder)
        return cls(_load_fast(folder))

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return len(self._fast)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._fast.chat_template)

    @property
    def eos_token_id(self) -> int | None:
        value = self._fast.eos_token_id
        return None if value is None else int(value)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        try:
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except UnicodeEncodeError as error:  # lone surrogates, as JSON allows them
            raise InvalidRequest(f"the text is not valid Unicode: {error}", "prompt") from error

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence; unknown ids are left out."""
        return str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))

    def apply_chat_template(
        self, messages: list[dict[str, Any]], *, add_special_tokens: bool = False, **kw: Any
    ) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer.

        Args:
            messages: ``{"role", "content"}`` dicts, content a string.
            add_special_tokens: add the tokenizer's own beside those the template writes.
            **kw: passed to the template (``add_generation_prompt`` is True unless given).

        Raises:
            InvalidRequest: the model has no chat template, or its template refuses the messages.
        """
        if not self.has_chat_template:
            raise InvalidRequest(
                "this model has no chat template; use /v1/completions", param="messages"
            )
        from jinja2 import TemplateError

        kw.setdefault("add_generation_prompt", True)
        try:
            text = self._fast.apply_chat_template(messages, tokenize=False, **kw)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise InvalidRequest(f"the chat template refused: {error}", "messages") from error
        return self.encode(str(text), add_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Text of one token alone; bytes that are no character become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes that this token adds to a text; empty for unknown ids."""
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if self._byte_level:
            mapped = [self._alphabet.get(char) for char in piece]
            # A piece with any other character is an added token: plain text.
            plain = any(byte is None for byte in mapped)
            return piece.encode() if plain else bytes(b for b in mapped if b is not None)
        if self._byte_fallback and len(piece) == 6 and piece[:3] == "<0x" and piece[5] == ">":
            try:
                return bytes([int(piece[3:5], 16)])
            except ValueError:
                return piece.encode()
        if self._spaces:
            return piece.replace(_SPACE_MARK, " ").encode()
        return self._backend.decode([token_id], skip_special_tokens=False).encode()


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a tokenizer, readable or not."""
    return any((folder / name).exists() for name in _FILES)


def check_folder(folder: Path) -> None:
    """Find what is wrong with a tokenizer folder without the seconds that ``load`` takes.

    Raises:
        ConfigError: no folder, no tokenizer in it, or a file that cannot be read.
    """
    if not folder.is_dir():
        raise ConfigError(f"no such tokenizer folder: {folder}")
    if not has_tokenizer(folder):
        raise ConfigError(
            f"{folder} has no tokenizer.json; name a folder that has one with --tokenizer, "
            "or serve token ids only with --skip-tokenizer-init"
        )
    try:
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            path = folder / name
            if path.exists() and not isinstance(json.loads(path.read_bytes()), dict):
                raise ValueError(f"{name} is no JSON object")
        path = folder / "tokenizer.json"
        if path.exists():
            from tokenizers import Tokenizer as Backend

            Backend.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception for bad files
        raise ConfigError(f"cannot read the tokenizer in {folder}: {error}") from error


def _load_fast(folder: Path) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer_json = folder / "tokenizer.json"
    try:
        if (folder / "tokenizer_config.json").exists() or not tokenizer_json.exists():
            fast = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False, use_fast=True
            )
        else:
            fast = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_json))
    except Exception as error:  # transformers and tokenizers raise bare Exception for bad files
        raise ConfigError(f"cannot read the tokenizer in {folder}: {error}") from error
    if not getattr(fast, "is_fast", False):
        raise ConfigError(f"the tokenizer in {folder} has no fast form (tokenizer.json)")
    return fast


def _parts(decoder: Any) -> list[dict[str, Any]]:
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") == "Sequence":
        return [part for inner in decoder["decoders"] for part in _parts(inner)]
    return [decoder]


def _mentions(decoder: Any, kind: str) -> bool:
    return any(part.get("type") == kind for part in _parts(decoder))


def _replaces_space_mark(decoder: Any) -> bool:
    return any(
        part.get("type") == "Replace" and part.get("pattern", {}).get("String") == _SPACE_MARK
        for part in _parts(decoder)
    )


def _prepends_space(decoder: Any) -> bool:
    return any(
        part.get("type") == "Metaspace" and part.get("prepend_scheme", "always") != "never"
        for part in _parts(decoder)
    )
