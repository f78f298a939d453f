"""Requests as users state them: sampling parameters, prompts, outputs. No torch."""

from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from coterie.errors import InvalidRequest

FinishReason = Literal["stop", "length", "abort", "error"]
MAX_LOGPROBS = 20


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are chosen and when generation ends; names and defaults as in vLLM.

    Raises:
        InvalidRequest: from ``validate`` when a value is out of range.
    """

    n: int = 1
    temperature: float = 1.0
    """0 = greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1 = off."""
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = 16
    """None: up to max_model_len."""
    min_tokens: int = 0
    """No EOS or stop token before this many output tokens."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    """Number of alternatives per output token; the sampled token's logprob always comes too."""
    skip_special_tokens: bool = True
    logit_bias: dict[int, float] | None = None

    def validate(self, vocab_size: int) -> None:
        """Check everything.

        Raises:
            InvalidRequest: names the field, what it got and what is allowed.
        """
        self.check_ranges()
        check_token_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        check_token_ids("logit_bias", self.logit_bias or (), vocab_size)

    def check_ranges(self) -> None:
        """The part of ``validate`` that needs no model.

        Raises:
            InvalidRequest: as ``validate``.
        """
        for name, good, allowed in _RANGES:
            if not good(self):
                value = getattr(self, name)
                raise InvalidRequest(f"{name} must be {allowed}, got {value!r}", param=name)


def check_token_ids(
    name: str, token_ids: Iterable[int], vocab_size: int, param: str | None = None
) -> None:
    """Check that ids are in the vocabulary.

    Args:
        name: of what holds them, for the message.
        param: for the error; default ``name``.

    Raises:
        InvalidRequest: names the first id that is not.
    """
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"{name} must be between 0 and {vocab_size - 1}, got {token}", param or name
            )


_RANGES: tuple[tuple[str, Callable[[SamplingParams], bool], str], ...] = (
    ("n", lambda p: 1 <= p.n <= 128, "between 1 and 128"),
    ("temperature", lambda p: 0 <= p.temperature <= 100, "between 0 and 100"),
    ("top_p", lambda p: 0 < p.top_p <= 1, "in (0, 1]"),
    ("top_k", lambda p: p.top_k >= -1, "-1 or 0 (off), or positive"),
    ("min_p", lambda p: 0 <= p.min_p <= 1, "in [0, 1]"),
    ("presence_penalty", lambda p: -2 <= p.presence_penalty <= 2, "in [-2, 2]"),
    ("frequency_penalty", lambda p: -2 <= p.frequency_penalty <= 2, "in [-2, 2]"),
    ("repetition_penalty", lambda p: 0 < p.repetition_penalty < float("inf"), "positive"),
    ("max_tokens", lambda p: p.max_tokens is None or p.max_tokens >= 1, "at least 1"),
    (
        "min_tokens",
        lambda p: 0 <= p.min_tokens <= (p.min_tokens if p.max_tokens is None else p.max_tokens),
        "between 0 and max_tokens",
    ),
    (
        "logprobs",
        lambda p: p.logprobs is None or 0 <= p.logprobs <= MAX_LOGPROBS,
        f"between 0 and {MAX_LOGPROBS}",
    ),
    ("seed", lambda p: p.seed is None or -(2**63) <= p.seed < 2**63, "a 64-bit integer"),
    ("stop", lambda p: all(p.stop) and len(p.stop) <= 16, "at most 16 non-empty strings"),
)


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities at one output position, of the raw logits before temperature."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []
    """(token id, logprob) of the most likely tokens, best first."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request as it enters the engine. Exactly one of the two prompts is set."""

    request_id: str
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    sampling_params: SamplingParams = SamplingParams()
    deadline_s: float | None = None
    """Seconds from arrival after which the request fails with DeadlineExceeded."""
    data_parallel_rank: int | None = None
    """Attention rank that must serve it (index, not seat); None: the coordinator chooses."""
    refuse_cut: bool = False
    """Refuse max_tokens that do not fit after the prompt, instead of cutting them."""


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """News of one choice of a request: a delta, never the whole."""

    request_id: str
    index: int
    """Choice, 0..n-1."""
    text: str
    """New text; may be empty while a character or a possible stop string is incomplete."""
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id or stop string that matched; None for EOS."""
    prompt_token_ids: list[int] | None = None
    """Only in the first output of each choice."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""
