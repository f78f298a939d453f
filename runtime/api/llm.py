"""``coterie.LLM``: an engine in this process for offline use, driven by plain blocking calls.

The engine lives on an event loop in a thread of its own; ranks are plain processes unless Ray is
asked for.
"""

import asyncio
import itertools
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

import uvloop

from coterie.errors import EngineDead, InvalidRequest
from coterie.runtime.cluster.supervisor import ProgressCallback
from coterie.runtime.engine.engine import AsyncEngine
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
UNDO_S = 15.0
"""How long an interrupted call may take to end what it had started."""


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
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="coterie-engine", daemon=True
        )
        self._thread.start()
        try:
            self.engine = self._run(AsyncEngine.start(config, progress))
        except BaseException:
            self._end_loop()
            raise
        # Prompts of one call beyond this wait here instead of being refused.
        self._max_submitted = max(1, config.scheduler.max_waiting)

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
            RequestError: a prompt cannot be served; the others are aborted.

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
            InvalidRequest: no tokenizer or no chat template.

        Blocks: until all are done.
        """
        if self.tokenizer is None:
            raise InvalidRequest("chat needs a tokenizer (skip_tokenizer_init=True)", "messages")
        single = bool(messages) and isinstance(messages[0], dict)
        conversations: Any = [messages] if single else messages
        ids = [
            self.tokenizer.apply_chat_template(list(conversation), **template)
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
                self._run(self.engine.shutdown(), closing=True)
            finally:
                self._end_loop()

    def _run(self, work: Coroutine[Any, Any, _T], closing: bool = False) -> _T:
        if self._closed and not closing:
            work.close()
            raise EngineDead("this LLM was shut down")
        ended = threading.Event()

        async def watched() -> _T:
            try:
                return await work
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(watched(), self._loop)
        try:
            return future.result()
        except BaseException:
            # KeyboardInterrupt included: what was begun is undone before the caller goes on.
            future.cancel()
            ended.wait(UNDO_S)
            raise

    def _end_loop(self) -> None:
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        if not self._thread.is_alive():
            self._loop.close()

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
    given = prompts if prompts is not None else prompt_token_ids
    if given is None or (prompts is not None and prompt_token_ids is not None):
        raise InvalidRequest("give prompts or prompt_token_ids, not both", param="prompt")
    if isinstance(given, str):
        return [given]
    items: list[Any] = list(given)
    if items and isinstance(items[0], int):
        return [items]
    return items


def _per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise InvalidRequest(f"{count} prompts but {len(params)} sampling_params")
    return list(params)
