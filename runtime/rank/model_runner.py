"""The compute side of one rank: loads its weights and cache, runs steps, samples.

Built by the rank while it is warming, on the thread that will run the step loop. Kernels are
compiled here, before the rank counts as loaded: a member never pauses for them.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch

from coterie.attention.backend import select_attention
from coterie.attention.decoder import Decoder
from coterie.attention.kv_cache import PagedKVCache
from coterie.attention.models.checkpoint import WeightSource, open_weights
from coterie.attention.models.config import ModelConfig
from coterie.attention.models.loader import load_decoder, load_experts
from coterie.errors import ConfigError, RequestError
from coterie.experts.grouped import GroupedExperts
from coterie.experts.kernels.base import Kernels
from coterie.experts.kernels.select import select_kernels
from coterie.router.token_router import TokenRouter
from coterie.runtime.rank.input_batch import make_forward_batch
from coterie.runtime.rank.requests import SampledToken
from coterie.runtime.rank.sampler import sample
from coterie.runtime.rank.scheduler import SchedulerOutput
from coterie.runtime.spec import RankSpec

MAX_DEFAULT_KV_BYTES = 2 << 30
DEFAULT_KV_SHARE = 0.25
"""Of the memory available on the host, for the KV caches of all its ranks together."""
Progress = Callable[[str, int, int], None]


def model_dtype(spec: RankSpec, model: ModelConfig) -> torch.dtype:
    """Dtype of weights, KV cache and dispatched activations."""
    named = {"auto": model.dtype, "bfloat16": torch.bfloat16, "float32": torch.float32}
    return named[spec.config.model.dtype]


def num_kv_blocks(
    spec: RankSpec, bytes_per_block: int, num_ranks_here: int, available_bytes: int
) -> int:
    """Blocks of this rank's KV cache.

    Args:
        num_ranks_here: attention ranks that share this host's memory.
        available_bytes: memory of the host that is free to take.

    Raises:
        ConfigError: not even one block fits.
    """
    cache, limits = spec.config.cache, spec.config.scheduler
    if cache.num_kv_blocks is not None:
        return cache.num_kv_blocks
    size = cache.kv_cache_memory_bytes
    if size is None:
        share = int(available_bytes * DEFAULT_KV_SHARE) // num_ranks_here
        most = limits.max_num_seqs * -(-spec.max_model_len // cache.block_size)
        size = min(MAX_DEFAULT_KV_BYTES, share, most * bytes_per_block)
    if size < bytes_per_block:
        raise ConfigError(
            f"seat {spec.seat}: {size} bytes of KV cache hold no block of {bytes_per_block} bytes; "
            "raise --kv-cache-memory-bytes or free memory"
        )
    return size // bytes_per_block


class LocalModel:
    """What one rank holds of the model, epoch after epoch; roles decide which parts."""

    def __init__(self, spec: RankSpec, config: ModelConfig) -> None:
        self.spec = spec
        self.config = config
        self.dtype = model_dtype(spec, config)
        self.kernels: Kernels = select_kernels(spec.config.model.kernels)
        self.experts: GroupedExperts | None = None
        args = spec.config.model
        self._checkpoint: WeightSource = open_weights(
            spec.model_dir, config, args.load_format, args.seed
        )

    def load_experts(self, progress: Progress) -> None:
        """Read this seat's experts, if it has any. Blocks: seconds."""
        placement = self.spec.placement
        if "experts" in self.spec.roles and placement is not None:
            self.experts = load_experts(
                self.config,
                self._checkpoint,
                self.kernels,
                placement,
                self.spec.seat,
                self.dtype,
                progress,
            )
        self.kernels.warm_up(self.dtype)

    def load_runner(
        self, router: TokenRouter, num_ranks_here: int, progress: Progress
    ) -> "ModelRunner":
        """Read the decoder, take memory for the KV cache, compile. Blocks: seconds."""
        spec, model = self.spec, self.config
        block_size = spec.config.cache.block_size
        backend = select_attention(spec.config.model.kernels)
        bytes_per_block = PagedKVCache.bytes_per_block(
            num_layers=model.num_layers,
            block_size=block_size,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=self.dtype,
        )
        available_bytes = psutil.virtual_memory().available
        num_blocks = num_kv_blocks(spec, bytes_per_block, num_ranks_here, available_bytes)
        kv_cache = PagedKVCache(
            num_layers=model.num_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=self.dtype,
        )
        decoder = load_decoder(
            model,
            self._checkpoint,
            self.kernels,
            backend,
            kv_cache,
            router,
            self.dtype,
            progress,
            max_model_len=spec.max_model_len,
        )
        backend.warm_up(self.dtype, model.head_dim)
        return ModelRunner(decoder, block_size, num_blocks, model.vocab_size)


@dataclass(frozen=True, slots=True)
class StepHandle:
    """A submitted step."""

    output: SchedulerOutput
    sampled: list[SampledToken | RequestError]
    forward_s: float
    sample_s: float


class ModelRunner:
    """Runs one step at a time; nothing of a step outlives it but K and V in its own slots."""

    def __init__(self, decoder: Decoder, block_size: int, num_blocks: int, vocab_size: int) -> None:
        self.decoder = decoder
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.vocab_size = vocab_size

    def submit(self, output: SchedulerOutput, poll: Callable[[], None]) -> StepHandle:
        """Start a step. On CPU it is complete when this returns.

        Args:
            poll: serves waiting rounds of other ranks; called while sampling.

        Raises:
            RankDied, EpochChanged: the step may be run again from its start.

        Blocks: for the step, serving other ranks meanwhile.
        """
        start = time.perf_counter()
        batch = make_forward_batch(output, self.block_size)
        logits = self.decoder.forward(batch)
        computed = time.perf_counter()
        sampled = sample(logits, output.sampled, poll)
        return StepHandle(output, sampled, computed - start, time.perf_counter() - computed)

    def collect(self, handle: StepHandle) -> list[SampledToken | RequestError]:
        """Results of a submitted step, one per request of ``output.sampled``."""
        return handle.sampled
