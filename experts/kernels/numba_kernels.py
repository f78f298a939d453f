"""``NumbaKernels``: the CPU fast path, compiled by numba, no compiler needed at the user's side.

Weights are used where they lie (row-major, bfloat16 or float32); only an input dim that is not a
multiple of 16 costs a padded copy. One object per compute thread: it owns the scratch memory.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from coterie.experts.kernels import numba_ops as ops
from coterie.experts.kernels import numba_rows as rows
from coterie.experts.kernels.numba_cache import one_compiles
from coterie.experts.kernels.scratch import Scratch, address
from coterie.experts.rows import Partial, RowBuffer, Rows

WEIGHT_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """Weights of one linear, ready for ``matmul``."""

    weight: torch.Tensor
    """``[out_features, in_features padded to 16]``."""
    bias: torch.Tensor | None
    """``[out_features]`` float32."""
    in_features: int


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """Weights of the local experts of one layer."""

    w13: torch.Tensor
    """``[num_local, 2 * width, hidden padded to 16]``."""
    w2: torch.Tensor
    """``[num_local, hidden, width padded to 16]``."""
    hidden: int
    width: int


def _pad_last_dim(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros up to a multiple of 16; no copy where there is nothing to add."""
    missing = -tensor.shape[-1] % 16
    return (F.pad(tensor, (0, missing)) if missing else tensor).contiguous()


class NumbaKernels:
    """See ``Kernels``; every row's result is bit-identical whatever other rows are in the call."""

    name = "numba"

    def __init__(self) -> None:
        self._scratch = Scratch()

    def warm_up(self, dtype: torch.dtype = torch.bfloat16) -> None:
        """Compile or load everything, so that no step waits for it.

        Blocks: seconds on the first start of a machine, a fraction of one afterwards.
        """
        with one_compiles():
            self._run_everything(dtype)

    def _run_everything(self, dtype: torch.dtype) -> None:
        x = torch.ones(2, 16)
        weight = torch.ones(16, 16, dtype=dtype)
        self.linear(x, self.pack_linear(weight))
        self.rms_norm(x, torch.ones(16), 1e-6)
        self.add_rms_norm(x.clone(), x, 1.0, torch.ones(16), 1e-6)
        self.silu_mul(x)
        weights, ids = self.topk_softmax(x, 2, True)
        packed = self.pack_experts(weight.expand(2, 16, 16), weight[:, :8].expand(2, 16, 8))
        table, buffer = torch.arange(16, dtype=torch.int32), RowBuffer.empty(2, 16, 2, dtype)
        index = torch.empty(2, dtype=torch.int32)
        routed = self.route(x, ids, weights, table, buffer, index)
        counts = torch.zeros(2, dtype=torch.int64)
        self.experts([Rows(buffer, routed)], table[:2], packed, 0, 2, counts)
        self.combine([Partial(buffer.out, index, routed)], 2)

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        assert weight.dim() == 2, weight.shape
        assert weight.dtype in WEIGHT_DTYPES, weight.dtype
        return PackedLinear(
            weight=_pad_last_dim(weight),
            bias=None if bias is None else bias.float(),
            in_features=weight.shape[1],
        )

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        num_rows, size = x.shape
        num_cols, k = packed.weight.shape
        assert size == packed.in_features, (x.shape, packed.in_features)
        out = torch.empty(num_rows, num_cols)
        if num_rows == 0 or num_cols == 0:
            return out
        if size != k:
            x = F.pad(x, (0, k - size))
        ops.matmul(
            address(x, torch.float32),
            num_rows,
            k,
            packed.weight.data_ptr(),
            num_cols,
            int(packed.weight.dtype is torch.bfloat16),
            out.data_ptr(),
            num_cols * 4,
            self._scratch.reserve(ops.widened_bytes(k)),
            packed.weight.data_ptr(),
        )
        if packed.bias is not None:
            out += packed.bias
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        size = x.shape[-1]
        assert weight.shape == (size,), (x.shape, weight.shape)
        out = torch.empty_like(x)
        ops.rms_norm(
            address(x, torch.float32),
            x.numel() // size,
            size,
            address(weight, torch.float32),
            float(eps),
            out.data_ptr(),
        )
        return out

    def add_rms_norm(
        self,
        residual: torch.Tensor,
        x: torch.Tensor,
        scale: float,
        weight: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        size = x.shape[-1]
        assert residual.shape == x.shape, (residual.shape, x.shape)
        assert weight.shape == (size,), (x.shape, weight.shape)
        out = torch.empty_like(x)
        ops.add_rms_norm(
            address(residual, torch.float32),
            address(x, torch.float32),
            float(scale),
            x.numel() // size,
            size,
            address(weight, torch.float32),
            float(eps),
            out.data_ptr(),
        )
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        num_rows, both = gate_up.shape
        assert both % 2 == 0, gate_up.shape
        out = torch.empty(num_rows, both // 2)
        ops.silu_mul(address(gate_up, torch.float32), num_rows, both // 2, out.data_ptr())
        return out

    def topk_softmax(
        self, router_logits: torch.Tensor, top_k: int, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_rows, num_experts = router_logits.shape
        assert 1 <= top_k <= num_experts, (top_k, num_experts)
        weights = torch.empty(num_rows, top_k)
        ids = torch.empty(num_rows, top_k, dtype=torch.int32)
        ops.topk_softmax(
            address(router_logits, torch.float32),
            num_rows,
            num_experts,
            top_k,
            int(renormalize),
            weights.data_ptr(),
            ids.data_ptr(),
        )
        return weights, ids

    def pack_experts(self, w13: torch.Tensor, w2: torch.Tensor) -> PackedExperts:
        num_local, both, hidden = w13.shape
        width = both // 2
        assert w2.shape == (num_local, hidden, width), (w13.shape, w2.shape)
        assert w13.dtype is w2.dtype, (w13.dtype, w2.dtype)
        assert w13.dtype in WEIGHT_DTYPES, w13.dtype
        return PackedExperts(
            w13=_pad_last_dim(w13), w2=_pad_last_dim(w2), hidden=hidden, width=width
        )

    def experts(
        self,
        segments: Sequence[Rows],
        physical_ids: torch.Tensor,
        packed: PackedExperts,
        first: int,
        last: int,
        counts: torch.Tensor,
    ) -> None:
        num_local, _, hidden_padded = packed.w13.shape
        width_padded = packed.w2.shape[2]
        assert 0 <= first <= last <= num_local, (first, last)
        assert len(physical_ids) == len(counts) == num_local, (len(physical_ids), num_local)
        num_tokens, top_k, words = 0, 0, array("q")
        for buffer, count in segments:
            assert buffer.hidden_states.dtype is packed.w13.dtype, buffer.hidden_states.dtype
            assert buffer.hidden_size == packed.hidden, (buffer.hidden_size, packed.hidden)
            assert count <= buffer.capacity, (count, buffer.capacity)
            assert top_k in (0, buffer.top_k), "segments differ in top_k"
            top_k = buffer.top_k
            num_tokens += count
            words.extend(buffer.addresses)
            words.append(count)
        scratch = rows.experts_scratch_bytes(num_tokens, hidden_padded, width_padded)
        rows.experts(
            words.buffer_info()[0],
            len(segments),
            num_tokens,
            top_k,
            packed.hidden,
            hidden_padded,
            packed.width,
            width_padded,
            packed.w13.data_ptr(),
            packed.w2.data_ptr(),
            int(packed.w13.dtype is torch.bfloat16),
            address(physical_ids, torch.int32),
            address(counts, torch.int64),
            first,
            last,
            self._scratch.reserve(scratch),
        )

    def route(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        table: torch.Tensor,
        into: RowBuffer,
        index: torch.Tensor,
    ) -> int:
        num_tokens, hidden_size = hidden_states.shape
        assert hidden_size == into.hidden_size, (hidden_size, into.hidden_size)
        assert topk_ids.shape == topk_weights.shape == (num_tokens, into.top_k), topk_ids.shape
        assert num_tokens <= min(into.capacity, len(index)), (num_tokens, into.capacity)
        to_hidden, to_ids, to_weights, _ = into.addresses
        return rows.route(
            address(hidden_states, torch.float32),
            address(topk_ids, torch.int32),
            address(topk_weights, torch.float32),
            num_tokens,
            hidden_size,
            into.top_k,
            address(table, torch.int32),
            int(into.hidden_states.dtype is torch.bfloat16),
            to_hidden,
            to_ids,
            to_weights,
            address(index, torch.int32),
        )

    def combine(self, partials: Sequence[Partial], num_tokens: int) -> torch.Tensor:
        hidden_size = partials[0].sums.shape[1]
        words = array("q")
        for sums, index, count in partials:
            assert count <= min(len(sums), len(index)), (count, len(sums), len(index))
            words.extend((address(sums, torch.float32), address(index, torch.int32), count))
        out = torch.empty(num_tokens, hidden_size)
        rows.combine(words.buffer_info()[0], len(partials), num_tokens, hidden_size, out.data_ptr())
        return out
