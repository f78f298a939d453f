"""Payloads of the RPC methods, shared by service and client. No torch, no transformers, no ray.

Method names are ``coterie.<Name>``. Streams carry ``runtime.request.RequestOutput``.
"""

from typing import Any

import msgspec

from coterie.runtime.request import SamplingParams, TokenLogprob

GENERATE = "coterie.Generate"
CHAT = "coterie.Chat"
TOKENIZE = "coterie.Tokenize"
DETOKENIZE = "coterie.Detokenize"
STATUS = "coterie.Status"
HEALTH = "coterie.Health"
MODELS = "coterie.Models"
ABORT = "coterie.Abort"


class GenerateCall(msgspec.Struct, frozen=True, kw_only=True):
    """Exactly one of the two prompts."""

    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    sampling_params: SamplingParams = SamplingParams()
    request_id: str | None = None
    """For Abort from elsewhere; default: the server makes one."""
    deadline_s: float | None = None
    data_parallel_rank: int | None = None


class ChatCall(msgspec.Struct, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    sampling_params: SamplingParams = SamplingParams(max_tokens=None)
    chat_template_kwargs: dict[str, Any] = {}
    request_id: str | None = None
    deadline_s: float | None = None
    data_parallel_rank: int | None = None


class TokenizeCall(msgspec.Struct, frozen=True, kw_only=True):
    """Exactly one of text and messages."""

    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True


class TokenizeReply(msgspec.Struct, frozen=True, kw_only=True):
    token_ids: list[int]


class DetokenizeCall(msgspec.Struct, frozen=True, kw_only=True):
    token_ids: list[int]
    skip_special_tokens: bool = True


class DetokenizeReply(msgspec.Struct, frozen=True, kw_only=True):
    text: str


class AbortCall(msgspec.Struct, frozen=True, kw_only=True):
    request_id: str


class Nothing(msgspec.Struct, frozen=True):
    """Payload of methods that take, or answer, nothing."""


class GeneratedChoice(msgspec.Struct, kw_only=True):
    """One choice as ``Client.generate`` returns it."""

    index: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Generation(msgspec.Struct, kw_only=True):
    """The whole answer of one request."""

    request_id: str
    prompt_token_ids: list[int] = []
    outputs: list[GeneratedChoice] = []
    num_cached_tokens: int = 0

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[0].finish_reason
