"""The decoder of each family against transformers, on tiny random models in one process.

Chunked prefill, prefix hits, other requests in the batch and big steps change nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from coterie.attention.backend import select_attention
from coterie.attention.kv_cache import PagedKVCache
from coterie.attention.metadata import ForwardBatch
from coterie.attention.models.checkpoint import Checkpoint
from coterie.attention.models.config import ModelConfig
from coterie.attention.models.loader import load_decoder, load_experts
from coterie.experts.kernels.select import select_kernels
from coterie.experts.placement import ExpertPlacement
from coterie.router.token_router import TokenRouter
from coterie.router.transports.local import LocalTransport

BLOCK_SIZE = 4
NUM_BLOCKS = 96
BACKENDS = ("torch", "numba")

# Odd on purpose: head_dim apart from hidden / heads, 1 KV head, top_k 1 and all, biases, 3 experts.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 24, "num_key_value_heads": 1, "attention_bias": True}),
    "llama-tied-mlp-bias": ("llama", {"tie_word_embeddings": True, "mlp_bias": True}),
    "llama-llama3-rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "llama-linear-rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0}},
    ),
    "mixtral-3-experts": ("mixtral", {"num_local_experts": 3, "head_dim": 24}),
    "mixtral-top1-tied": (
        "mixtral",
        {"num_experts_per_tok": 1, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "qwen3-dense-layer": ("qwen3_moe", {"num_hidden_layers": 3, "mlp_only_layers": [1]}),
    "qwen3-all-experts-bias": (
        "qwen3_moe",
        {
            "num_experts": 3,
            "num_experts_per_tok": 3,
            "attention_bias": True,
            "norm_topk_prob": False,
            "head_dim": 40,
            "num_key_value_heads": 1,
        },
    ),
    "granite": ("granite_moe", {"num_local_experts": 3, "attention_bias": True}),
    "granite-tied-top1": (
        "granite_moe",
        {"num_experts_per_tok": 1, "tie_word_embeddings": True, "hidden_size": 48},
    ),
}
ONE_PER_FAMILY = ("llama", "mixtral-3-experts", "qwen3-dense-layer", "granite")


@dataclass
class Sequence:
    """A request: its tokens, the blocks it may use, and how many tokens are computed."""

    token_ids: list[int]
    blocks: list[int]
    num_computed: int = 0


@dataclass
class SingleRank:
    """One attention rank with all experts, driven by hand."""

    model_dir: Path
    backend: str
    dtype: torch.dtype = torch.float32
    step: int = 0
    progress: list[tuple[str, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = ModelConfig.from_hf(self.model_dir)
        checkpoint = Checkpoint.open(self.model_dir)
        checkpoint.validate(config)
        kernels = select_kernels(self.backend)
        placement = experts = None
        if config.moe is not None:
            placement = ExpertPlacement.contiguous(config.moe.num_experts, [0])
            experts = load_experts(
                config, checkpoint, kernels, placement, 0, self.dtype, self._note
            )
        self.router = TokenRouter(
            seat=0,
            placement=placement,
            attention_seats=(0,),
            transport=LocalTransport(0),
            experts=experts,
            kernels=kernels,
            moe=config.moe,
            dtype=self.dtype,
            fault_s=5.0,
        )
        kv_cache = PagedKVCache(
            config.num_layers,
            NUM_BLOCKS,
            BLOCK_SIZE,
            config.num_kv_heads,
            config.head_dim,
            self.dtype,
        )
        self.decoder = load_decoder(
            config,
            checkpoint,
            kernels,
            select_attention(self.backend),
            kv_cache,
            self.router,
            self.dtype,
            self._note,
        )

    def _note(self, stage: str, done: int, total: int) -> None:
        self.progress.append((stage, done, total))

    def forward(
        self, work: list[tuple[Sequence, int]], *, all_rows: bool = False, big: bool = False
    ) -> torch.Tensor:
        """Compute the next ``count`` tokens of each sequence; logits of the last row of each."""
        batch = make_batch(work, all_rows=all_rows, big=big)
        self.step += 1
        self.router.begin_step(self.step, big=big)
        logits = self.decoder.forward(batch)
        self.router.end_step(more_work=False)
        for sequence, count in work:
            sequence.num_computed += count
        return logits

    def greedy(self, sequence: Sequence, count: int) -> list[int]:
        """Prefill what is missing, then append ``count`` greedy tokens."""
        start = len(sequence.token_ids)
        while len(sequence.token_ids) < start + count:
            pending = len(sequence.token_ids) - sequence.num_computed
            logits = self.forward([(sequence, pending)])
            sequence.token_ids.append(int(logits[-1].argmax()))
        return sequence.token_ids[start:]


def make_batch(
    work: list[tuple[Sequence, int]], *, all_rows: bool = False, big: bool = False
) -> ForwardBatch:
    input_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    loc = [0]
    for sequence, count in work:
        first = sequence.num_computed
        for position in range(first, first + count):
            input_ids.append(sequence.token_ids[position])
            positions.append(position)
            block = sequence.blocks[position // BLOCK_SIZE]
            slots.append(block * BLOCK_SIZE + position % BLOCK_SIZE)
        loc.append(len(input_ids))
    width = max((len(sequence.blocks) for sequence, _ in work), default=1)
    table = [s.blocks + [0] * (width - len(s.blocks)) for s, _ in work]
    wanted = list(range(len(input_ids))) if all_rows else [end - 1 for end in loc[1:]]
    return ForwardBatch(
        input_ids=torch.tensor(input_ids, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        query_start_loc=torch.tensor(loc, dtype=torch.int32),
        seq_lens=torch.tensor([s.num_computed + n for s, n in work], dtype=torch.int32),
        block_table=torch.tensor(table, dtype=torch.int32).reshape(len(work), width),
        logits_rows=torch.tensor(wanted, dtype=torch.int64),
        big=big,
    )


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (length,), generator=generator).tolist()


@pytest.fixture(scope="module")
def rank(tiny_model_dir: Callable[..., Path]) -> Callable[[str, str], SingleRank]:
    """``rank(model, backend)``, cached; sequences bring their own blocks."""
    cache: dict[tuple[str, str], SingleRank] = {}

    def build(model: str, backend: str) -> SingleRank:
        if (model, backend) not in cache:
            family, overrides = MODELS[model]
            cache[model, backend] = SingleRank(tiny_model_dir(family, **overrides), backend)
        return cache[model, backend]

    return build


def scattered_blocks(count: int, seed: int = 0) -> list[int]:
    """Blocks in no order, so that a forgotten block table shows."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(NUM_BLOCKS, generator=generator)[:count].tolist()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model", MODELS)
def test_logits_and_greedy_ids_equal_transformers(
    model: str,
    backend: str,
    rank: Callable[[str, str], SingleRank],
    hf_model: Callable[[Path], Any],
) -> None:
    single = rank(model, backend)
    reference = hf_model(single.model_dir)
    prompt = prompt_of(23)
    blocks = scattered_blocks(22)

    logits = single.forward([(Sequence(prompt, blocks), len(prompt))], all_rows=True)
    with torch.no_grad():
        expected = reference(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)

    sequence = Sequence(list(prompt), blocks)
    tokens = single.greedy(sequence, 64)
    # By induction: each token is the argmax after those before it.
    with torch.no_grad():
        expected = reference(torch.tensor([sequence.token_ids])).logits[0]
    assert tokens == expected[len(prompt) - 1 : -1].argmax(dim=-1).tolist()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model", ONE_PER_FAMILY)
def test_chunks_prefix_hits_neighbours_and_big_steps_change_nothing(
    model: str, backend: str, rank: Callable[[str, str], SingleRank]
) -> None:
    """Bit for bit with numba kernels; within rounding with the torch reference."""
    single = rank(model, backend)
    tolerance = 0.0 if backend == "numba" else 1e-4

    def check(logits: torch.Tensor) -> None:
        torch.testing.assert_close(logits, whole, rtol=tolerance, atol=tolerance)

    prompt = prompt_of(90, seed=1)
    first, second, other_blocks = (scattered_blocks(72, seed=2)[i : i + 24] for i in (0, 24, 48))
    whole = single.forward([(Sequence(prompt, first), 90)])[-1]

    chunked = Sequence(prompt, second)
    for count in (1, 6, 33, 50):
        logits = single.forward([(chunked, count)])[-1]
    check(logits)

    shared = Sequence(prompt, first[:10] + second[10:], num_computed=40)
    check(single.forward([(shared, 50)])[-1])

    other = Sequence(prompt_of(30, seed=3), other_blocks)
    single.forward([(other, 20)])
    late = Sequence(prompt, first, num_computed=70)
    check(single.forward([(other, 1), (late, 20), (other_at(other, 21), 5)])[1])

    big = Sequence(prompt, second)
    check(single.forward([(big, 90)], big=True)[-1])


def other_at(sequence: Sequence, position: int) -> Sequence:
    return Sequence(sequence.token_ids, sequence.blocks, num_computed=position)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens_and_no_logits(backend: str, rank: Callable[[str, str], SingleRank]) -> None:
    single = rank("mixtral-3-experts", backend)
    assert single.forward([]).shape == (0, 261)
    sequence = Sequence(prompt_of(9), scattered_blocks(3))
    batch = make_batch([(sequence, 5)])
    unwanted = ForwardBatch(
        **{
            name: getattr(batch, name)
            for name in ForwardBatch.__dataclass_fields__
            if name != "logits_rows"
        },
        logits_rows=torch.empty(0, dtype=torch.int64),
    )
    single.router.begin_step(1000, big=False)
    assert single.decoder.forward(unwanted).shape == (0, 261)
    single.router.end_step(more_work=False)


def test_big_steps_poll_and_loading_reports_progress(
    rank: Callable[[str, str], SingleRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    single = rank("qwen3-dense-layer", "numba")
    assert [p for p in single.progress if p[0] == "experts"] == [
        ("experts", 1, 2),
        ("experts", 2, 2),
    ]
    assert [p for p in single.progress if p[0] == "decoder"][-1] == ("decoder", 3, 3)

    polls = 0

    def count() -> None:
        nonlocal polls
        polls += 1

    monkeypatch.setattr(single.router, "poll", count)
    single.forward([(Sequence(prompt_of(90), scattered_blocks(24)), 90)])
    small, polls = polls, 0
    single.forward([(Sequence(prompt_of(90), scattered_blocks(24)), 90)], big=True)
    # Three layers: two pieces of qkv and of o_proj, three of attention; two of the dense MLP.
    assert polls - small >= 3 * 7 + 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_stays_close(
    backend: str, tiny_model_dir: Callable[..., Path], hf_model: Callable[[Path], Any]
) -> None:
    """bfloat16 weights and cache, float32 activations: near a float32 run of the same weights."""
    model_dir = tiny_model_dir("mixtral", dtype="bfloat16", num_experts_per_tok=4)
    single = SingleRank(model_dir, backend, dtype=torch.bfloat16)
    prompt = prompt_of(30)
    logits = single.forward([(Sequence(prompt, list(range(8))), 30)], all_rows=True)
    with torch.no_grad():
        expected = hf_model(model_dir)(torch.tensor([prompt])).logits[0]
    assert (logits - expected).abs().mean() < 0.02 * expected.std()
