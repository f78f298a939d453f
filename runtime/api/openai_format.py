"""Our outputs in OpenAI's response shapes, whole and in chunks. Plain dicts, no I/O."""

import time
from dataclasses import dataclass, field
from typing import Any

from coterie.runtime.request import RequestOutput, TokenLogprob
from coterie.runtime.tokenizer import Tokenizer


@dataclass(slots=True)
class Choice:
    """One choice, collected."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, output: RequestOutput) -> None:
        self.text.append(output.text)
        self.token_ids.extend(output.token_ids)
        self.logprobs.extend(output.logprobs or ())
        if output.prompt_token_ids is not None:
            self.prompt_token_ids = output.prompt_token_ids
        if output.finish_reason is not None:
            self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason


@dataclass(slots=True)
class Usage:
    """Tokens of one HTTP request; a prompt counts once, however many choices it has."""

    prompt: dict[int, int] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    completion: int = 0

    def add(self, position: int, output: RequestOutput) -> None:
        if output.num_prompt_tokens:
            self.prompt[position] = output.num_prompt_tokens
        if output.num_cached_tokens:
            self.cached[position] = output.num_cached_tokens
        self.completion += len(output.token_ids)

    def body(self) -> dict[str, Any]:
        prompt = sum(self.prompt.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.completion,
            "total_tokens": prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
        }


class CompletionFormat:
    """Shapes of /v1/completions."""

    def __init__(
        self, request_id: str, model: str, tokenizer: Tokenizer | None, return_token_ids: bool
    ) -> None:
        self._head = {"id": request_id, "created": int(time.time()), "model": model}
        self._tokenizer = tokenizer
        self._return_token_ids = return_token_ids
        self._offsets: dict[int, int] = {}

    def whole(self, choices: list[Choice], echoes: list[str], usage: Usage) -> dict[str, Any]:
        bodies = [
            self._choice(
                index,
                echoes[index] + "".join(choice.text),
                choice.token_ids,
                choice.logprobs or None,
                choice.prompt_token_ids,
                choice.finish_reason,
                choice.stop_reason,
            )
            for index, choice in enumerate(choices)
        ]
        return self._head | {"object": "text_completion", "choices": bodies, "usage": usage.body()}

    def chunk(self, index: int, output: RequestOutput, echo: str) -> dict[str, Any]:
        choice = self._choice(
            index,
            echo + output.text,
            output.token_ids,
            output.logprobs,
            output.prompt_token_ids,
            output.finish_reason,
            output.stop_reason,
        )
        return self._head | {"object": "text_completion", "choices": [choice]}

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return self._head | {"object": "text_completion", "choices": [], "usage": usage.body()}

    def _choice(
        self,
        index: int,
        text: str,
        token_ids: list[int],
        logprobs: list[TokenLogprob] | None,
        prompt_token_ids: list[int] | None,
        finish_reason: str | None,
        stop_reason: int | str | None,
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, logprobs) if logprobs is not None else None,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }
        if self._return_token_ids:
            body["token_ids"] = token_ids
            body["prompt_token_ids"] = prompt_token_ids
        return body

    def _logprobs(self, index: int, entries: list[TokenLogprob]) -> dict[str, Any]:
        tokens = [token_text(self._tokenizer, entry.token_id) for entry in entries]
        offset, offsets = self._offsets.get(index, 0), []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        self._offsets[index] = offset
        tops = []
        for entry, token in zip(entries, tokens, strict=True):
            top = {token_text(self._tokenizer, i): value for i, value in reversed(entry.top)}
            tops.append(dict(reversed(top.items())) | {token: entry.logprob})
        return {
            "tokens": tokens,
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": tops,
            "text_offset": offsets,
        }


class ChatFormat:
    """Shapes of /v1/chat/completions."""

    def __init__(
        self, request_id: str, model: str, tokenizer: Tokenizer | None, return_token_ids: bool
    ) -> None:
        self._head = {"id": request_id, "created": int(time.time()), "model": model}
        self._tokenizer = tokenizer
        self._return_token_ids = return_token_ids

    def whole(self, choices: list[Choice], usage: Usage) -> dict[str, Any]:
        bodies = []
        for index, choice in enumerate(choices):
            message = {"role": "assistant", "content": "".join(choice.text), "refusal": None}
            body: dict[str, Any] = {
                "index": index,
                "message": message,
                "logprobs": self._logprobs(choice.logprobs or None),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            if self._return_token_ids:
                body["token_ids"] = choice.token_ids
            bodies.append(body)
        whole = self._head | {"object": "chat.completion", "choices": bodies, "usage": usage.body()}
        if self._return_token_ids:
            whole["prompt_token_ids"] = choices[0].prompt_token_ids
        return whole

    def role_chunk(self, index: int, prompt_token_ids: list[int] | None) -> dict[str, Any]:
        chunk = self._chunk(index, {"role": "assistant", "content": ""})
        if self._return_token_ids and prompt_token_ids is not None:
            chunk["prompt_token_ids"] = prompt_token_ids
        return chunk

    def delta_chunk(self, output: RequestOutput) -> dict[str, Any]:
        chunk = self._chunk(output.index, {"content": output.text})
        chunk["choices"][0]["logprobs"] = self._logprobs(output.logprobs)
        if self._return_token_ids:
            chunk["choices"][0]["token_ids"] = output.token_ids
        return chunk

    def final_chunk(self, output: RequestOutput) -> dict[str, Any]:
        chunk = self._chunk(output.index, {})
        chunk["choices"][0] |= {
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        return chunk

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return self._head | {
            "object": "chat.completion.chunk",
            "choices": [],
            "usage": usage.body(),
        }

    def _chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._head | {"object": "chat.completion.chunk", "choices": [choice]}

    def _logprobs(self, entries: list[TokenLogprob] | None) -> dict[str, Any] | None:
        if entries is None:
            return None
        return {"content": [self._entry(entry) for entry in entries], "refusal": None}

    def _entry(self, entry: TokenLogprob) -> dict[str, Any]:
        top = [self._token(token_id, logprob) for token_id, logprob in entry.top]
        return self._token(entry.token_id, entry.logprob) | {"top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = b"" if self._tokenizer is None else self._tokenizer.token_bytes(token_id)
        return {
            "token": token_text(self._tokenizer, token_id),
            "logprob": logprob,
            "bytes": list(data),
        }


def token_text(tokenizer: Tokenizer | None, token_id: int) -> str:
    """A token as logprobs show it."""
    return f"token_id:{token_id}" if tokenizer is None else tokenizer.token_text(token_id)
