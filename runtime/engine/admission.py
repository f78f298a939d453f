"""From a request as the user states it to choices that can run: checks, prompt ids, seeds.

Pure but for the tokenizer and the seeds of unseeded requests.
"""

import asyncio
import random
from collections.abc import Callable

import msgspec

from coterie.errors import InvalidRequest
from coterie.runtime.detokenizer import Detokenizer
from coterie.runtime.engine.choice import Choice
from coterie.runtime.engine.request_stream import RequestStream
from coterie.runtime.request import GenerateRequest, SamplingParams, check_token_ids
from coterie.runtime.tokenizer import Tokenizer

THREAD_CHARS = 16_384
"""A longer prompt is tokenized off the event loop."""
TOO_LONG = "context_length_exceeded"
"""OpenAI's code, for every request that is too long."""
_SEED_BITS = 63


class Admission:
    """Checks requests against one model and one cache size.

    Args:
        max_total_tokens: most tokens of prompt plus output that one choice can have.
        seed: seeds what is drawn for requests without a seed.
    """

    def __init__(
        self,
        *,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        max_model_len: int,
        max_cache_tokens: int,
        attention_seats: tuple[int, ...],
        seed: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._max_model_len = max_model_len
        self._max_cache_tokens = max_cache_tokens
        self._attention_seats = attention_seats
        self._random = random.Random(seed)

    async def prompt_token_ids(self, request: GenerateRequest) -> list[int]:
        """The prompt's ids.

        Raises:
            InvalidRequest: no prompt or two, no tokenizer, ids out of range, or too long.
        """
        request.sampling_params.validate(self._vocab_size)
        ids = request.prompt_token_ids
        if (request.prompt is None) == (ids is None):
            raise InvalidRequest("give a prompt or prompt_token_ids, not both", param="prompt")
        if ids is None:
            assert request.prompt is not None
            ids = await self._encode(request.prompt)
        else:
            check_token_ids("prompt_token_ids", ids, self._vocab_size, param="prompt")
        if not ids:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        self._check_length(len(ids), request)
        return list(ids)

    async def _encode(self, text: str) -> list[int]:
        if self._tokenizer is None:
            raise InvalidRequest("this engine has no tokenizer; give token ids", param="prompt")
        if len(text) > THREAD_CHARS:
            return await asyncio.to_thread(self._tokenizer.encode, text)
        return self._tokenizer.encode(text)

    def _check_length(self, num_prompt: int, request: GenerateRequest) -> None:
        wanted = request.sampling_params.max_tokens or 1
        needed = num_prompt + (wanted if request.refuse_cut else 1)

        def too_long(limit: int, message: str) -> InvalidRequest:
            param = "prompt" if num_prompt + 1 > limit else "max_tokens"
            return InvalidRequest(f"{message} Please reduce the {param}.", param, TOO_LONG)

        if needed > self._max_model_len:
            raise too_long(
                self._max_model_len,
                f"This model's maximum context length is {self._max_model_len} tokens. However, "
                f"you requested {num_prompt + wanted} tokens ({num_prompt} in the prompt, "
                f"{wanted} in the completion).",
            )
        if needed > self._max_cache_tokens:
            raise too_long(
                self._max_cache_tokens,
                f"You requested {num_prompt + wanted} tokens ({num_prompt} in the prompt), but the "
                f"KV cache of a rank holds {self._max_cache_tokens} tokens; --num-kv-blocks or "
                "--kv-cache-memory-bytes of the server make it larger.",
            )

    def choices(
        self,
        request: GenerateRequest,
        prompt_token_ids: list[int],
        stream: RequestStream,
        hashes: Callable[[list[int]], list[bytes]],
    ) -> list[Choice]:
        """One choice per ``n``; they differ in index only, which their randomness depends on.

        Raises:
            InvalidRequest: stop strings without a tokenizer, or no such rank.
        """
        wanted_seat = self._wanted_seat(request.data_parallel_rank)
        params = self._resolved(request.sampling_params, len(prompt_token_ids))
        block_hashes = hashes(prompt_token_ids)
        return [
            Choice(
                choice_id=f"{request.request_id}-{index}",
                index=index,
                prompt_token_ids=prompt_token_ids,
                params=params,
                eos_token_ids=[] if params.ignore_eos else self._eos_token_ids,
                detokenizer=Detokenizer(self._tokenizer, prompt_token_ids, params),
                stream=stream,
                block_hashes=block_hashes,
                wanted_seat=wanted_seat,
            )
            for index in range(request.sampling_params.n)
        ]

    def _wanted_seat(self, rank: int | None) -> int | None:
        if rank is None:
            return None
        if not 0 <= rank < len(self._attention_seats):
            raise InvalidRequest(
                f"data_parallel_rank must be below {len(self._attention_seats)}, got {rank}",
                param="data_parallel_rank",
            )
        return self._attention_seats[rank]

    def _resolved(self, params: SamplingParams, num_prompt: int) -> SamplingParams:
        room = min(self._max_model_len, self._max_cache_tokens) - num_prompt
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        seed = self._random.getrandbits(_SEED_BITS) if params.seed is None else params.seed
        return msgspec.structs.replace(
            params,
            n=1,
            seed=seed,
            max_tokens=max_tokens,
            min_tokens=min(params.min_tokens, max_tokens),
        )
