"""Linears, norms, gating and experts: numba against torch, and rows independent bit for bit."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from coterie.errors import ConfigError
from coterie.experts.dense_mlp import DenseMLP
from coterie.experts.grouped import GroupedExperts
from coterie.experts.kernels.base import Kernels
from coterie.experts.kernels.numba_kernels import NumbaKernels
from coterie.experts.kernels.select import select_kernels
from coterie.experts.kernels.torch_kernels import TorchKernels
from coterie.experts.rows import Partial, RowBuffer, Rows

DTYPES = [torch.bfloat16, torch.float32]
TORCH = TorchKernels()


@pytest.fixture(scope="module")
def numba_kernels() -> NumbaKernels:
    kernels = NumbaKernels()
    kernels.warm_up(torch.bfloat16)
    return kernels


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, 33])
@pytest.mark.parametrize(("size", "out"), [(8, 3), (1, 1), (40, 17), (64, 50), (576, 21)])
@pytest.mark.parametrize("biased", [False, True])
def test_linear(
    numba_kernels: NumbaKernels, dtype: torch.dtype, rows: int, size: int, out: int, biased: bool
) -> None:
    x, weight = randn(rows, size), randn(out, size, dtype=dtype) / size**0.5
    bias = randn(out, dtype=dtype) if biased else None
    actual = numba_kernels.linear(x, numba_kernels.pack_linear(weight, bias))
    assert actual.shape == (rows, out)
    close(actual, TORCH.linear(x, TORCH.pack_linear(weight, bias)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "out"), [(40, 17), (2048, 9)])
def test_linear_rows_are_independent(
    numba_kernels: NumbaKernels, dtype: torch.dtype, size: int, out: int
) -> None:
    x = randn(150, size)
    packed = numba_kernels.pack_linear(randn(out, size, dtype=dtype))
    whole = numba_kernels.linear(x, packed)
    for count in (1, 2, 3, 5, 19, 20, 33):
        for first in (0, 1, 150 - count):
            piece = numba_kernels.linear(x[first : first + count], packed)
            assert torch.equal(piece, whole[first : first + count]), (count, first)


def test_linear_columns_are_independent(numba_kernels: NumbaKernels) -> None:
    x, weight = randn(6, 64), randn(19, 64, dtype=torch.bfloat16)
    whole = numba_kernels.linear(x, numba_kernels.pack_linear(weight))
    part = numba_kernels.linear(x, numba_kernels.pack_linear(weight[3:9]))
    assert torch.equal(part, whole[:, 3:9])


def test_linear_uses_weights_where_they_lie(numba_kernels: NumbaKernels) -> None:
    weight = randn(5, 32, dtype=torch.bfloat16)
    assert numba_kernels.pack_linear(weight).weight.data_ptr() == weight.data_ptr()


def test_linear_keeps_nan_in_its_row(numba_kernels: NumbaKernels) -> None:
    x, weight = randn(5, 32), randn(7, 32, dtype=torch.bfloat16)
    packed = numba_kernels.pack_linear(weight)
    clean = numba_kernels.linear(x, packed)
    x[2, 3] = float("nan")
    dirty = numba_kernels.linear(x, packed)
    assert dirty[2].isnan().all()
    keep = [0, 1, 3, 4]
    assert torch.equal(dirty[keep], clean[keep])


@pytest.mark.parametrize("size", [3, 8, 16, 24, 576])
@pytest.mark.parametrize("rows", [0, 1, 33])
def test_norms(numba_kernels: NumbaKernels, size: int, rows: int) -> None:
    x, residual, weight = randn(rows, size), randn(rows, size) + 1, randn(size)
    close(numba_kernels.rms_norm(x, weight, 1e-5), TORCH.rms_norm(x, weight, 1e-5))
    mine, theirs = residual.clone(), residual.clone()
    actual = numba_kernels.add_rms_norm(mine, x, 0.22, weight, 1e-5)
    close(actual, TORCH.add_rms_norm(theirs, x, 0.22, weight, 1e-5))
    close(mine, theirs)
    for r in range(rows):
        alone = residual[r : r + 1].clone()
        normed = numba_kernels.add_rms_norm(alone, x[r : r + 1], 0.22, weight, 1e-5)
        assert torch.equal(normed[0], actual[r])
        assert torch.equal(alone[0], mine[r])


def test_norm_of_heads(numba_kernels: NumbaKernels) -> None:
    x, weight = randn(4, 3, 24), randn(24)
    close(numba_kernels.rms_norm(x, weight, 1e-6), TORCH.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("width", [1, 17, 96])
def test_silu_mul(numba_kernels: NumbaKernels, width: int) -> None:
    x = randn(33, 2 * width) * 4
    x[0, 0], x[1, 0] = 1000.0, -1000.0
    actual = numba_kernels.silu_mul(x)
    close(actual, TORCH.silu_mul(x))
    assert torch.equal(numba_kernels.silu_mul(x[7:8])[0], actual[7])


@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (5, 5), (128, 8), (3, 1)])
@pytest.mark.parametrize("renormalize", [False, True])
def test_topk_softmax(
    numba_kernels: NumbaKernels, num_experts: int, top_k: int, renormalize: bool
) -> None:
    logits = randn(33, num_experts) * 3
    logits[4] = 1.0  # all tied
    weights, ids = numba_kernels.topk_softmax(logits, top_k, renormalize)
    expected_weights, expected_ids = TORCH.topk_softmax(logits, top_k, renormalize)
    assert ids.dtype == torch.int32
    assert torch.equal(ids, expected_ids)
    assert ids[4].tolist() == list(range(top_k))
    close(weights, expected_weights)
    one_weights, one_ids = numba_kernels.topk_softmax(logits[9:10], top_k, renormalize)
    assert torch.equal(one_weights[0], weights[9])
    assert torch.equal(one_ids[0], ids[9])


def test_topk_softmax_gives_distinct_ids_for_nan(numba_kernels: NumbaKernels) -> None:
    _, ids = numba_kernels.topk_softmax(torch.full((1, 4), float("nan")), 3, True)
    assert len(set(ids[0].tolist())) == 3


def routed(rows: int, num_local: int, top_k: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Local ids with -1 for experts that are elsewhere, and weights."""
    rng = np.random.default_rng(rows + num_local)
    if kind == "all":
        top_k = num_local
    ids = np.array(
        [rng.permutation(num_local + 3)[:top_k] for _ in range(rows)], dtype=np.int32
    ).reshape(rows, top_k)
    ids[ids >= num_local] = -1
    if kind == "one":
        ids[:] = -1
        ids[:, -1] = num_local - 1
    if kind == "none":
        ids[:] = -1
    if kind == "all":
        ids[:] = np.arange(num_local)
    return torch.from_numpy(ids), randn(rows, top_k).abs()


def run_experts(
    kernels: Kernels,
    weights: tuple[torch.Tensor, torch.Tensor],
    x: torch.Tensor,
    ids: torch.Tensor,
    topk_weights: torch.Tensor,
    cuts: list[int],
    bounds: Sequence[int] = (),
) -> torch.Tensor:
    """Local expert n is called n + 7; ``bounds`` divide the rows into segments."""
    num_local = len(weights[0])
    packed, counts = kernels.pack_experts(*weights), torch.zeros(num_local, dtype=torch.int64)
    physical = torch.where(ids >= 0, ids + 7, ids)
    out = torch.full(x.shape, float("nan"))
    ends = [0, *bounds, len(x)]
    segments = [
        Rows(RowBuffer(x[a:b], physical[a:b], topk_weights[a:b], out[a:b]), b - a)
        for a, b in zip(ends, ends[1:], strict=False)
    ]
    names = torch.arange(7, 7 + num_local, dtype=torch.int32)
    for first, last in zip(cuts, cuts[1:], strict=False):
        kernels.experts(segments, names, packed, first, last, counts)
    assert counts.tolist() == [int((ids == n).sum()) for n in range(num_local)]
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hidden", "width"), [(16, 8), (40, 24), (72, 33)])
@pytest.mark.parametrize("rows", [0, 1, 5, 33, 300])
@pytest.mark.parametrize("kind", ["some", "one", "none", "all"])
def test_experts(
    numba_kernels: NumbaKernels, dtype: torch.dtype, hidden: int, width: int, rows: int, kind: str
) -> None:
    num_local = 5
    weights = (
        randn(num_local, 2 * width, hidden, dtype=dtype) / hidden**0.5,
        randn(num_local, hidden, width, dtype=dtype) / width**0.5,
    )
    x = randn(rows, hidden, dtype=dtype)
    ids, topk_weights = routed(rows, num_local, 3, kind)
    actual = run_experts(numba_kernels, weights, x, ids, topk_weights, [0, num_local])
    close(actual, run_experts(TORCH, weights, x, ids, topk_weights, [0, num_local]))
    pieces = run_experts(numba_kernels, weights, x, ids, topk_weights, [0, 1, 3, 3, 5])
    assert torch.equal(pieces, actual)
    if rows > 4:
        bounds = (1, 1, 4)
        merged = run_experts(numba_kernels, weights, x, ids, topk_weights, [0, num_local], bounds)
        assert torch.equal(merged, actual)
    for r in range(0, rows, 9):
        one = slice(r, r + 1)
        alone = run_experts(
            numba_kernels, weights, x[one], ids[one], topk_weights[one], [0, num_local]
        )
        assert torch.equal(alone[0], actual[r])


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_experts(numba_kernels: NumbaKernels, dtype: torch.dtype) -> None:
    """Six physical experts, of which this rank has 1, 2 and 4."""
    weights = (randn(3, 16, 24, dtype=dtype), randn(3, 24, 8, dtype=dtype))
    experts = GroupedExperts(numba_kernels, [1, 2, 4], 6, [numba_kernels.pack_experts(*weights)])
    assert (experts.num_layers, experts.num_local, experts.physical_ids) == (1, 3, (1, 2, 4))
    x = randn(3, 24, dtype=dtype)
    ids = torch.tensor([[1, -1], [4, 2], [0, 5]], dtype=torch.int32)
    topk_weights = torch.tensor([[0.5, 0.5], [0.25, 0.75], [1.0, 1.0]])
    buffer = RowBuffer(x, ids, topk_weights, torch.ones(3, 24))
    for first, last in ((0, 2), (2, None)):
        experts.forward(0, [Rows(buffer, 3)], first, last)
    local = torch.tensor([[0, -1], [2, 1], [-1, -1]], dtype=torch.int32)
    expected = run_experts(TORCH, weights, x, local, topk_weights, [0, 3])
    torch.testing.assert_close(buffer.out, expected, rtol=1e-4, atol=1e-4)
    assert not buffer.out[2].any()
    assert experts.tokens == [1, 1, 1]
    experts.forward(0, [Rows(buffer, 0)])
    assert experts.tokens == [1, 1, 1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_route(numba_kernels: NumbaKernels, dtype: torch.dtype, rows: int) -> None:
    x, topk_weights = randn(rows, 21) * 3, randn(rows, 3)
    rng = np.random.default_rng(rows)
    ids = torch.from_numpy(rng.integers(-1, 6, (rows, 3)).astype(np.int32))
    for table in ([3, -1, 0, -1, -1, 8], [-1] * 6, list(range(6))):
        results = []
        for kernels in (numba_kernels, TORCH):
            into, index = RowBuffer.empty(12, 21, 3, dtype), torch.empty(12, dtype=torch.int32)
            places = torch.tensor(table, dtype=torch.int32)
            count = kernels.route(x, ids, topk_weights, places, into, index)
            routed = Rows(into, count)
            results.append((routed.hidden_states, routed.topk_ids, routed.topk_weights))
            results[-1] += (index[:count],)
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_combine(numba_kernels: NumbaKernels) -> None:
    indexes = [torch.tensor(i, dtype=torch.int32) for i in ([0, 2, 3], [1, 2], [0, 1, 2, 3], [])]
    partials = [
        Partial(randn(6, 19 + n)[:, :19].contiguous(), index.clone(), len(index))
        for n, index in enumerate(indexes)
    ]
    for chosen in (partials, partials[:1], partials[1::-1]):
        actual = numba_kernels.combine(chosen, 5)
        assert torch.equal(actual, TORCH.combine(chosen, 5))
        assert not actual[4].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_dense_mlp(numba_kernels: NumbaKernels, dtype: torch.dtype) -> None:
    gate_up, down = randn(34, 24, dtype=dtype) / 5, randn(24, 17, dtype=dtype) / 5
    x = randn(4, 24)
    actual = DenseMLP(numba_kernels, gate_up, down).forward(x)
    close(actual, DenseMLP(TORCH, gate_up, down).forward(x))


def test_select_kernels() -> None:
    assert select_kernels("auto").name == "numba"
    assert select_kernels("torch").name == "torch"
    with pytest.raises(ConfigError, match="triton"):
        select_kernels("triton")
    with pytest.raises(ConfigError, match="cuda"):
        select_kernels("auto", "cuda")
