"""Frozen user configuration, one dataclass per concern; field names follow vLLM's flags.

Nothing found out at run time (number of blocks, EOS ids) is ever written back here.
"""

from dataclasses import dataclass, field
from typing import Literal

from coterie.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelArgs:
    """Which model, and how it is loaded."""

    model: str = "smollm2-moe"
    """Folder in Hugging Face layout, or the name of a pulled demo model."""
    served_model_name: str | None = None
    """Name in the API; default: the folder's name."""
    tokenizer: str | None = None
    """Folder of the tokenizer; default: the model's."""
    skip_tokenizer_init: bool = False
    """Serve token ids only."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Dtype of weights and KV cache; auto: what config.json says, float16 read as bfloat16."""
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    """dummy: seeded random weights, no files but config.json needed."""
    max_model_len: int | None = None
    """Most tokens of prompt plus output; default: the model's own limit."""
    seed: int = 0
    """Seeds requests without a seed of their own and dummy weights."""
    kernels: Literal["auto", "numba", "torch"] = "auto"
    """Compute backend; auto: numba on CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """The paged KV cache of each attention rank."""

    block_size: int = 16
    """Tokens per KV block."""
    kv_cache_memory_bytes: int | None = None
    """Bytes of KV cache per attention rank; default: a share of free memory."""
    num_kv_blocks: int | None = None
    """Blocks per attention rank; overrides kv_cache_memory_bytes."""
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise ConfigError(f"--block-size must be a power of two, got {self.block_size}")
        for name in ("kv_cache_memory_bytes", "num_kv_blocks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be positive, got {value}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """The layout as the user asked for it; None = decide (see cluster.layout)."""

    data_parallel_size: int | None = None
    attention_ranks: int | None = None
    expert_ranks: int | None = None
    disaggregate: bool = False
    enable_expert_parallel: bool = False
    """Accepted for vLLM's sake; experts are always expert-parallel here."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    num_redundant_experts: int = 0
    """Extra physical experts per layer, spread over the expert ranks."""
    distributed_executor_backend: Literal["ray", "mp"] = "ray"
    """What launches the ranks: Ray actors or plain processes of this host."""
    ray_address: str | None = None
    """An existing Ray cluster, never stopped by us; default: an own one."""
    transport: Literal["auto", "shared_memory", "gloo"] = "auto"
    """How rounds travel between ranks; auto: shared_memory on one host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Limits of one attention rank's scheduler."""

    max_num_seqs: int = 64
    """Most running requests per attention rank."""
    max_num_batched_tokens: int = 2048
    """Most rows of one step."""
    prefill_budget_ms: float = 400.0
    """Predicted time of the prefill rows of one step while others decode, milliseconds."""
    max_waiting: int = 1024
    """Most requests waiting in the engine's queue before 429 / RESOURCE_EXHAUSTED."""

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1 or self.max_num_batched_tokens < 1:
            raise ConfigError("--max-num-seqs and --max-num-batched-tokens must be positive")


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeoutConfig:
    """Every wait has a deadline; these are they, seconds."""

    start_s: float = 300.0
    """From launching ranks until all are ready."""
    fault_s: float = 5.0
    """A rank that makes no progress for this long inside a step is suspected."""
    orphan_grace_s: float = 10.0
    """How long ranks and the own Ray head outlive a killed engine."""
    shutdown_s: float = 30.0
    """Drain and teardown together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Everything an engine needs to start."""

    model: ModelArgs = field(default_factory=ModelArgs)
    cache: CacheConfig = field(default_factory=CacheConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    timeouts: TimeoutConfig = field(default_factory=TimeoutConfig)
