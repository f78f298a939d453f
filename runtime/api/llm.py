"""``coterie.LLM``: an engine in this process for offline use, driven by plain blocking calls.

The engine lives on an event loop in a thread of its own; ranks are plain processes unless Ray is
asked for. What is not shut down ends with the interpreter.
"""

import asyncio
import itertools
import reprlib
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeGuard, TypeVar

from coterie.errors import EngineDead, InvalidRequest
from coterie.runtime.cluster.supervisor import ProgressCallback
from coterie.runtime.engine.engine import AsyncEngine
from coterie.runtime.engine.loop_thread import LoopThread
from coterie.runtime.engine_args import engine_config_from_flags
from coterie.runtime.request import (
    FinishReason,
    GenerateRequest,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
)
from coterie.runtime.tokenizer import Tokenizer

Prompt = str | Sequence[int]
_T = TypeVar("_T")
ACCEPTED = (
    "prompts is a text, a list of token ids, or a list of such; prompt_token_ids is a list of "
    "token ids, or a list of such lists"
)


@dataclass(slots=True)
class CompletionOutput:
    """One choice, complete."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprob] | None = None


@dataclass(slots=True)
class CompletionResult:
    """Everything that came of one prompt."""

    request_id: str
    prompt: str | None
    """None when token ids were given."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    """By index, ``n`` of them."""
    num_cached_tokens: int = 0


class LLM:
    """Load a model and generate.

    End it with ``with`` or ``shutdown``; otherwise it ends when the interpreter does.

    Args:
        model: folder in Hugging Face layout, or the name of a pulled demo model.
        progress: called from the engine's thread with (stage, done, total) while loading.
        **flags: as ``coterie serve``'s, with underscores (``data_parallel_size=2``).

    Raises:
        TypeError: an unknown flag.
        ConfigError, RuntimeFailure: it cannot be started; nothing is left running.

    Blocks: until the model is loaded.
    """

    def __init__(
        self,
        model: str = "smollm2-moe",
        *,
        progress: ProgressCallback | None = None,
        **flags: Any,
    ) -> None:
        flags.setdefault("distributed_executor_backend", "mp")
        config = engine_config_from_flags(model=model, **flags)
        self._ids = itertools.count()
        self._closed = False
        self._engine: AsyncEngine | None = None
        self._thread = LoopThread("coterie-engine", self._at_exit)
        try:
            self._engine = self._thread.run(AsyncEngine.start(config, progress))
        except BaseException:
            self._closed = True
            self._thread.close()
            raise
        # Prompts of one call beyond this wait here instead of being refused.
        self._max_submitted = max(1, config.scheduler.max_waiting)

    @property
    def engine(self) -> AsyncEngine:
        """The engine; its coroutines belong to this object's own event loop."""
        assert self._engine is not None
        return self._engine

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.engine.tokenizer

    def generate(
        self,
        prompts: str | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
    ) -> list[CompletionResult]:
        """Complete prompts.

        Args:
            prompts: one text, or a list of texts and lists of token ids.
            sampling_params: for all prompts, or one each.
            prompt_token_ids: one list of token ids, or a list of such; instead of ``prompts``.

        Returns:
            One result per prompt, in order.

        Raises:
            InvalidRequest: a prompt is none of these, or cannot be served.
            RequestError: a prompt failed; the others are aborted.

        Blocks: until all are done.
        """
        items = _as_prompts(prompts, prompt_token_ids)
        params = _per_prompt(sampling_params, len(items))
        return self._run(self._generate(items, params))

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template: Any,
    ) -> list[CompletionResult]:
        """Answer one conversation (a list of messages) or several.

        Args:
            **template: passed to the chat template.

        Raises:
            InvalidRequest: no tokenizer or no chat template, or no conversation.

        Blocks: until all are done.
        """
        if self.tokenizer is None:
            raise InvalidRequest("chat needs a tokenizer (skip_tokenizer_init=True)", "messages")
        conversations = _as_conversations(messages)
        ids = [
            self.tokenizer.apply_chat_template(conversation, **template)
            for conversation in conversations
        ]
        return self.generate(ids, sampling_params)

    async def _generate(
        self, prompts: list[Prompt], params: list[SamplingParams]
    ) -> list[CompletionResult]:
        largest = max((p.n for p in params), default=1)
        slots = asyncio.Semaphore(max(1, self._max_submitted // largest))
        tasks = [
            asyncio.create_task(self._complete(prompt, p, slots))
            for prompt, p in zip(prompts, params, strict=True)
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _complete(
        self, prompt: Prompt, params: SamplingParams, slots: asyncio.Semaphore
    ) -> CompletionResult:
        text = prompt if isinstance(prompt, str) else None
        request = GenerateRequest(
            request_id=f"llm-{next(self._ids)}",
            prompt=text,
            prompt_token_ids=None if isinstance(prompt, str) else list(prompt),
            sampling_params=params,
        )
        result = CompletionResult(
            request.request_id, text, [], [CompletionOutput(i) for i in range(params.n)]
        )
        async with slots:
            stream = await self.engine.submit(request)
            try:
                async for output in stream:
                    _add(result, output)
            finally:
                await stream.aclose()
        return result

    def shutdown(self) -> None:
        """End ranks and the engine. Safe to call twice. Blocks: up to ``shutdown_s``."""
        if not self._closed:
            self._closed = True
            try:
                self._thread.run(self.engine.shutdown())
            finally:
                self._thread.close()

    def _at_exit(self) -> None:
        if self._engine is None:  # a daemon thread is still starting it
            self._thread.cancel_calls()
            self._thread.close()
        else:
            self.shutdown()

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        if self._closed:
            work.close()
            raise EngineDead("this LLM was shut down")
        return self._thread.run(work)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()


def _add(result: CompletionResult, output: RequestOutput) -> None:
    choice = result.outputs[output.index]
    choice.text += output.text
    choice.token_ids.extend(output.token_ids)
    if output.logprobs is not None:
        choice.logprobs = [*(choice.logprobs or []), *output.logprobs]
    if output.finish_reason is not None:
        choice.finish_reason, choice.stop_reason = output.finish_reason, output.stop_reason
    if output.prompt_token_ids is not None:
        result.prompt_token_ids = output.prompt_token_ids
    result.num_cached_tokens = max(result.num_cached_tokens, output.num_cached_tokens)


def _as_prompts(
    prompts: str | Sequence[Prompt] | None,
    prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None,
) -> list[Prompt]:
    """One entry per prompt.

    Raises:
        InvalidRequest: it is nothing that ``generate`` accepts.
    """
    if (prompts is None) == (prompt_token_ids is None):
        raise InvalidRequest(f"give either prompts or prompt_token_ids: {ACCEPTED}", "prompt")
    name = "prompts" if prompts is not None else "prompt_token_ids"
    given: Any = prompts if prompts is not None else prompt_token_ids
    kinds = (str,) if prompts is not None else ()
    if isinstance(given, kinds):
        return [given]
    if _is_ids(given) and len(given):
        return [list(given)]
    if not _is_list(given):
        raise InvalidRequest(f"{name} cannot be {_shown(given)}: {ACCEPTED}", "prompt")
    for index, item in enumerate(given):
        if not isinstance(item, kinds) and not _is_ids(item):
            where = f"{name}[{index}]"
            raise InvalidRequest(f"{where} cannot be {_shown(item)}: {ACCEPTED}", "prompt")
    return [item if isinstance(item, str) else list(item) for item in given]


def _as_conversations(messages: Any) -> list[list[dict[str, Any]]]:
    """One list of messages per conversation.

    Raises:
        InvalidRequest: it is nothing that ``chat`` accepts.
    """
    single = _is_list(messages) and bool(messages) and isinstance(messages[0], dict)
    conversations: Any = [messages] if single else messages
    if not _is_list(conversations) or not all(
        _is_list(one) and one and all(isinstance(message, dict) for message in one)
        for one in conversations
    ):
        raise InvalidRequest(
            "messages is a conversation, which is a list of dicts with role and content, or a list "
            f"of conversations, not {_shown(messages)}",
            "messages",
        )
    return [list(one) for one in conversations]


def _is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _is_ids(value: Any) -> TypeGuard[Sequence[int]]:
    return _is_list(value) and all(type(item) is int for item in value)


def _shown(value: Any) -> str:
    return f"{reprlib.repr(value)} ({type(value).__name__})"


def _per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if not _is_list(params) or not all(isinstance(one, SamplingParams) for one in params):
        raise InvalidRequest(
            f"sampling_params is a SamplingParams or a list, one per prompt, not {_shown(params)}"
        )
    if len(params) != count:
        raise InvalidRequest(f"{count} prompts but {len(params)} sampling_params")
    return list(params)
