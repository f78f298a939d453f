"""Requests of the OpenAI API as pydantic models, and how they become ours.

A field of a wrong type is refused, and so is one that asks for something that is not built (see
``unsupported``). Fields that nobody knows are ignored. vLLM's extra fields keep vLLM's names.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from coterie.errors import InvalidRequest
from coterie.runtime.api.unsupported import CHAT_NEUTRAL, COMPLETION_NEUTRAL, refuse_unsupported
from coterie.runtime.request import SamplingParams

TokenIds = list[Annotated[int, Field(ge=0)]]


class _Lenient(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)


class StreamOptions(_Lenient):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """vLLM's: with include_usage, every chunk carries the usage so far."""


class ResponseFormat(_Lenient):
    type: str


class SamplingFields(_Lenient):
    """What both endpoints take. None = the default."""

    # Kept in model_extra, so that those we know and cannot serve are refused.
    model_config = ConfigDict(extra="allow", strict=True)
    own_unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    user: str | None = None

    # vLLM's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None

    # ours
    deadline_s: Annotated[float, Field(gt=0)] | None = None
    """Seconds from arrival after which the request fails with 504."""
    data_parallel_rank: int | None = None
    """Also as header X-data-parallel-rank."""

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )

    @property
    def limits_output(self) -> bool:
        """Whether the caller said how many tokens, rather than leaving it to the default."""
        return self.max_tokens is not None

    def check(self) -> None:
        """Refuse what is not built.

        Raises:
            InvalidRequest: names the field.
        """
        refuse_unsupported(self.model_extra or {}, self.own_unsupported)
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream=true", "stream_options")
        if self.response_format is not None and self.response_format.type != "text":
            raise InvalidRequest(
                f"response_format {self.response_format.type!r} is not supported; only 'text' is",
                "response_format",
            )

    def sampling_params(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """Our parameters; ranges are checked by the engine, which knows the vocabulary.

        Raises:
            InvalidRequest: a ``logit_bias`` that is not token id to -100..100.
        """
        stop = self.stop if self.stop is not None else ()
        given = {name: value for name in _SAME_NAME if (value := getattr(self, name)) is not None}
        return SamplingParams(
            **given,
            max_tokens=max_tokens,
            logprobs=logprobs,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logit_bias=_logit_bias(self.logit_bias),
        )


_SAME_NAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
)


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    if not bias:
        return None
    if not all(key.isascii() and key.isdigit() for key in bias):
        raise InvalidRequest("logit_bias keys must be token ids", "logit_bias")
    if not all(-100.0 <= value <= 100.0 for value in bias.values()):
        raise InvalidRequest("logit_bias values must be between -100 and 100", "logit_bias")
    return {int(key): float(value) for key, value in bias.items()}


class CompletionRequest(SamplingFields):
    own_unsupported = COMPLETION_NEUTRAL

    prompt: str | list[str] | TokenIds | list[TokenIds]
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | None = None

    def check(self) -> None:
        super().check()
        if self.suffix:
            raise InvalidRequest("suffix is not supported", "suffix")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidRequest("best_of is not supported unless it equals n", "best_of")
        if self.echo and self.logprobs is not None:
            raise InvalidRequest("echo together with logprobs is not supported", "echo")
        if self.prompt == [] or any(prompt == [] for prompt in self.prompt):
            raise InvalidRequest("prompt must not be empty", "prompt")

    def prompts(self) -> list[str | list[int]]:
        """One entry a prompt, each text or token ids."""
        prompt: Any = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        return [prompt] if isinstance(prompt[0], int) else list(prompt)

    def to_sampling_params(self) -> SamplingParams:
        max_tokens = 16 if self.max_tokens is None else self.max_tokens
        return self.sampling_params(max_tokens, self.logprobs)


class ContentPart(_Lenient):
    type: str
    text: str | None = None


class ChatMessage(_Lenient):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None
    function_call: Any = None

    def plain(self, position: int) -> dict[str, Any]:
        """``{"role", "content"}``, and ``name`` if there is one, for a chat template.

        Raises:
            InvalidRequest: a part that is not text, or a tool's message.
        """
        param = f"messages[{position}]"
        if self.role in ("tool", "function") or self.tool_calls or self.function_call:
            raise InvalidRequest("tool messages are not supported", param)
        role = "system" if self.role == "developer" else self.role
        if self.content is None:
            raise InvalidRequest("a message needs content", f"{param}.content")
        message = {"role": role, "content": self._text(f"{param}.content")}
        return message if self.name is None else message | {"name": self.name}

    def _text(self, param: str) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        for part in self.content:
            if part.type != "text":
                raise InvalidRequest(
                    f"content parts of type {part.type!r} are not supported; only 'text' is", param
                )
            if part.text is None:
                raise InvalidRequest("a content part of type 'text' needs text", param)
        return "".join(part.text or "" for part in self.content)


class ChatRequest(SamplingFields):
    own_unsupported = CHAT_NEUTRAL

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    modalities: list[str] | None = None
    audio: Any = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        super().check()
        if self.functions or (self.tools and self.tool_choice != "none"):
            raise InvalidRequest(
                "tools are not supported; leave them out or set tool_choice to 'none'", "tools"
            )
        if self.tool_choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice other than 'none' is not supported", "tool_choice")
        if self.audio is not None or any(m != "text" for m in self.modalities or ()):
            raise InvalidRequest("only the modality 'text' is supported", "modalities")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs=true", "top_logprobs")

    @property
    def limits_output(self) -> bool:
        return self.max_tokens is not None or self.max_completion_tokens is not None

    def plain_messages(self) -> list[dict[str, Any]]:
        return [message.plain(index) for index, message in enumerate(self.messages)]

    def template_kwargs(self) -> dict[str, Any]:
        kwargs = dict(self.chat_template_kwargs or {})
        if self.add_generation_prompt is not None:
            kwargs["add_generation_prompt"] = self.add_generation_prompt
        return kwargs

    def to_sampling_params(self) -> SamplingParams:
        max_tokens = self.max_completion_tokens
        if max_tokens is None:
            max_tokens = self.max_tokens
        return self.sampling_params(max_tokens, (self.top_logprobs or 0) if self.logprobs else None)
