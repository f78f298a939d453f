"""Token ids to text, piece by piece: UTF-8 safe, with stop strings. One state machine.

Used by the engine for every request, streamed or not, so both see the same text. Works on bytes:
an incomplete character is held back until it is complete (or the request ends), and nothing of
the prompt can leak because the prompt's text is never produced. Knows nothing about requests.
"""

import msgspec

from coterie.errors import InvalidRequest
from coterie.runtime.request import SamplingParams
from coterie.runtime.tokenizer import Tokenizer


class TextDelta(msgspec.Struct, frozen=True):
    """What one push adds."""

    text: str
    """New text that can no longer change."""
    stop_string: str | None = None
    """The stop string that ended the text, once."""
    num_tokens: int = 0
    """How many of the pushed tokens were read; fewer than pushed only after a stop string."""


def incomplete_tail(data: bytes) -> int:
    """Length of the unfinished UTF-8 character at the end of ``data``: 0 to 3 bytes."""
    for back in range(1, min(3, len(data)) + 1):
        lead = data[-back]
        if lead & 0xC0 == 0x80:
            continue
        try:
            data[-back:].decode("utf-8")
        except UnicodeDecodeError as error:
            return back if error.reason == "unexpected end of data" else 0
        return 0
    return 0


class Utf8Stream:
    """Bytes to text; an incomplete character waits for its rest.

    Args:
        borrowed: the unfinished character at the end of the prompt. If the first output bytes
            complete it, that character is emitted; otherwise these bytes are forgotten.
    """

    def __init__(self, borrowed: bytes = b"") -> None:
        self._pending = borrowed
        self._num_borrowed = len(borrowed)

    def push(self, data: bytes) -> str:
        if not data:
            return ""
        pending = self._pending + data
        if self._num_borrowed:
            if incomplete_tail(pending) == len(pending):
                self._pending = pending
                return ""
            pending = self._settle(pending)
        cut = len(pending) - incomplete_tail(pending)
        self._pending = pending[cut:]
        return pending[:cut].decode("utf-8", "replace")

    def finish(self) -> str:
        """U+FFFD for a character that never became complete."""
        rest, self._pending = self._pending[self._num_borrowed :], b""
        self._num_borrowed = 0
        return rest.decode("utf-8", "replace")

    def _settle(self, pending: bytes) -> bytes:
        """Decide whether the prompt's unfinished character was completed; drop it if not."""
        count, self._num_borrowed = self._num_borrowed, 0
        for length in range(count + 1, min(4, len(pending)) + 1):
            try:
                pending[:length].decode("utf-8")
            except UnicodeDecodeError:
                continue
            return pending
        return pending[count:]


class StopMatcher:
    """Finds the stop string that completes first, whatever way the text is cut into pieces.

    Each stop string has a Knuth-Morris-Pratt automaton; the largest state is how many characters
    must be held back. Of two that complete at the same character the longer one wins.
    """

    def __init__(self, stops: tuple[str, ...], include_in_output: bool) -> None:
        self._stops = stops
        self._include = include_in_output
        self._failure = [_failure_table(stop) for stop in stops]
        self._states = [0] * len(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that is safe to emit, the stop string that matched or None)."""
        if not self._stops:
            return text, None
        buffer = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            matched = self._advance(char)
            if matched is not None:
                self._held = ""
                return buffer[: end if self._include else end - len(matched)], matched
        cut = len(buffer) - max(self._states)
        self._held = buffer[cut:]
        return buffer[:cut], None

    def finish(self) -> str:
        """The text held back; no stop string came of it."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        best: str | None = None
        for index, stop in enumerate(self._stops):
            failure, state = self._failure[index], self._states[index]
            while state and stop[state] != char:
                state = failure[state - 1]
            state += stop[state] == char
            if state == len(stop):
                if best is None or len(stop) > len(best):
                    best = stop
                state = failure[state - 1]
            self._states[index] = state
        return best


def _failure_table(stop: str) -> list[int]:
    """Per position, the length of the longest proper prefix that is also a suffix there."""
    table = [0] * len(stop)
    state = 0
    for index in range(1, len(stop)):
        while state and stop[state] != stop[index]:
            state = table[state - 1]
        state += stop[state] == stop[index]
        table[index] = state
    return table


class Detokenizer:
    """The text of one choice of one request.

    Args:
        tokenizer: None serves ids only; every text is empty.
        prompt_token_ids: only the last few are looked at.
        params: ``stop``, ``include_stop_str_in_output``, ``min_tokens``, ``skip_special_tokens``.

    Raises:
        InvalidRequest: stop strings without a tokenizer.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, prompt_token_ids: list[int], params: SamplingParams
    ) -> None:
        if tokenizer is None and params.stop:
            raise InvalidRequest("stop strings need a tokenizer (--skip-tokenizer-init)", "stop")
        self._tokenizer = tokenizer
        self._skip_special = params.skip_special_tokens
        self._min_tokens = params.min_tokens
        self._matcher = StopMatcher(params.stop, params.include_stop_str_in_output)
        self._num_tokens = 0
        self._done = False
        self._strip_space = False
        borrowed = b""
        if tokenizer is not None:
            special = tokenizer.special_ids
            # A whole text that starts here loses its first space; a continuation keeps it.
            self._strip_space = tokenizer.strips_first_space and all(
                token in special for token in prompt_token_ids
            )
            tail = b"".join(self._bytes(token) for token in prompt_token_ids[-4:])
            borrowed = tail[len(tail) - incomplete_tail(tail) :]
        self._utf8 = Utf8Stream(borrowed)

    def push(self, token_ids: list[int], finished: bool) -> TextDelta:
        """Add committed tokens.

        Args:
            token_ids: new tokens; a stop token that must not show is left out by the caller.
            finished: no more will come; whatever was held back is emitted.
        """
        if self._done or self._tokenizer is None:
            return TextDelta(text="", num_tokens=0 if self._done else len(token_ids))
        pieces: list[str] = []
        for count, token in enumerate(token_ids, start=1):
            self._num_tokens += 1
            text, stop = self._match(self._utf8.push(self._bytes(token)))
            pieces.append(text)
            if stop is not None:
                self._done = True
                return TextDelta(text="".join(pieces), stop_string=stop, num_tokens=count)
        stop = None
        if finished:
            self._done = True
            text, stop = self._match(self._utf8.finish())
            pieces.append(text)
            if stop is None:
                pieces.append(self._matcher.finish())
        return TextDelta(text="".join(pieces), stop_string=stop, num_tokens=len(token_ids))

    def _match(self, text: str) -> tuple[str, str | None]:
        # Text of the first min_tokens tokens is never searched.
        if self._num_tokens <= self._min_tokens:
            return text, None
        return self._matcher.push(text)

    def _bytes(self, token_id: int) -> bytes:
        assert self._tokenizer is not None
        if self._skip_special and token_id in self._tokenizer.special_ids:
            return b""
        data = self._tokenizer.token_bytes(token_id)
        if self._strip_space and data:
            self._strip_space = False
            return data.removeprefix(b" ")
        return data
