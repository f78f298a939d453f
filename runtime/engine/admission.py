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
from coterie.runtime.request import GenerateRequest, SamplingParams
from coterie.runtime.tokenizer import Tokenizer

THREAD_CHARS = 16_384
"""A longer prompt is tokenized off the event loop."""
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
        elif any(not 0 <= token < self._vocab_size for token in ids):
            raise InvalidRequest(
                f"prompt_token_ids must be below the vocabulary size {self._vocab_size}",
                param="prompt",
            )
        if not ids:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        self._check_length(len(ids), request.sampling_params)
        return list(ids)

    async def _encode(self, text: str) -> list[int]:
        if self._tokenizer is None:
            raise InvalidRequest("this engine has no tokenizer; give token ids", param="prompt")
        if len(text) > THREAD_CHARS:
            return await asyncio.to_thread(self._tokenizer.encode, text)
        return self._tokenizer.encode(text)

    def _check_length(self, num_prompt: int, params: SamplingParams) -> None:
        if num_prompt + 1 > self._max_model_len:
            requested = params.max_tokens or 1
            raise InvalidRequest(
                f"This model's maximum context length is {self._max_model_len} tokens. However, "
                f"you requested {num_prompt + requested} tokens ({num_prompt} in the prompt, "
                f"{requested} in the completion). Please reduce the length of the prompt.",
                param="prompt",
            )
        if num_prompt + 1 > self._max_cache_tokens:
            raise InvalidRequest(
                f"The prompt has {num_prompt} tokens, but the KV cache of a rank holds "
                f"{self._max_cache_tokens} tokens of prompt and output. Please reduce the length "
                "of the prompt, or start the server with a larger cache (--num-kv-blocks, "
                "--kv-cache-memory-bytes).",
                param="prompt",
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
