"""The compiled loops of ``NumbaKernels``: matrix products, norms, gating.

Arguments are addresses in bytes and sizes; ``NumbaKernels`` checks shapes and owns the memory.
No result of a row depends on the other rows: rows are only ever grouped, never added together.
"""

from typing import Any

import numpy as np

from coterie.experts.kernels.numba_cache import kernel
from coterie.experts.kernels.vector_ir import (
    TILE,
    dot,
    exp,
    fma,
    read_f32,
    read_i32,
    tile,
    widen,
    write_f32,
    write_i32,
)

# The largest tile, and those for the rows and columns that are left over.
_bf16_full, _bf16_two, _bf16_row, _bf16_one = (
    tile(m, n, True) for m, n in ((TILE, TILE), (2, TILE), (1, TILE), (1, 1))
)
_f32_full, _f32_two, _f32_row, _f32_one = (
    tile(m, n, False) for m, n in ((TILE, TILE), (2, TILE), (1, TILE), (1, 1))
)

WIDE_ROWS = 20  # from here on it pays to widen weights once and read them as float32
L1_BYTES = 32 << 10  # of widened weights that are used while they are in the first cache
L2_BYTES = 1 << 20  # of activations that are used while they are in the second cache


def widened_bytes(k: int) -> int:
    """Room ``matmul`` needs for widened weights of ``k`` columns."""
    return max(L1_BYTES, TILE * k * 4)


@kernel
def _block(
    x: int,
    x_stride: int,
    num_rows: int,
    w: int,
    k: int,
    num_cols: int,
    is_bf16: int,
    out: int,
    out_stride: int,
    ahead: int,
    ahead_stride: int,
) -> None:
    """A few weight rows, already in the first cache or on their way, against all rows of x."""
    steps = k // 16
    w_stride = k * 2 if is_bf16 else k * 4
    m = 0
    while m < num_rows:
        left = num_rows - m
        rows = TILE if left >= TILE else (2 if left >= 2 else 1)
        xm, om = x + m * x_stride, out + m * out_stride
        n = 0
        while n < num_cols:
            wn, on, pn = w + n * w_stride, om + n * 4, ahead + n * steps * ahead_stride // TILE
            if num_cols - n < TILE:
                for r in range(rows):
                    xr, to = xm + r * x_stride, on + r * out_stride
                    if is_bf16:
                        _bf16_one(xr, x_stride, wn, w_stride, steps, to, out_stride, pn, 0)
                    else:
                        _f32_one(xr, x_stride, wn, w_stride, steps, to, out_stride, pn, 0)
                n += 1
                continue
            if is_bf16:
                if rows == TILE:
                    _bf16_full(xm, x_stride, wn, w_stride, steps, on, out_stride, pn, ahead_stride)
                elif rows == 2:
                    _bf16_two(xm, x_stride, wn, w_stride, steps, on, out_stride, pn, ahead_stride)
                else:
                    _bf16_row(xm, x_stride, wn, w_stride, steps, on, out_stride, pn, ahead_stride)
            elif rows == TILE:
                _f32_full(xm, x_stride, wn, w_stride, steps, on, out_stride, pn, ahead_stride)
            elif rows == 2:
                _f32_two(xm, x_stride, wn, w_stride, steps, on, out_stride, pn, ahead_stride)
            else:
                _f32_row(xm, x_stride, wn, w_stride, steps, on, out_stride, pn, ahead_stride)
            n += TILE
        ahead_stride = 0  # the next weights were asked for during the first rows
        m += rows


@kernel
def matmul(
    x: int,
    num_rows: int,
    k: int,
    w: int,
    num_cols: int,
    is_bf16: int,
    out: int,
    out_stride: int,
    widened: int,
    following: int,
) -> None:
    """out[m, n] = sum over k of x[m, k] * w[n, k].

    ``x [num_rows, k]`` float32 and ``w [num_cols, k]`` are contiguous, k a multiple of 16.
    ``following``: address of what will be read next, touched ahead of time.
    """
    item = 2 if is_bf16 else 4
    wide = num_rows >= WIDE_ROWS
    group = TILE
    if wide:
        group = max(TILE, min(16, L1_BYTES // (4 * k) // TILE * TILE))
    rows_at_once = max(TILE, L2_BYTES // (4 * k) // TILE * TILE)
    ahead_stride = TILE * item * 16
    for m in range(0, num_rows, rows_at_once):
        rows = min(rows_at_once, num_rows - m)
        for n in range(0, num_cols, group):
            cols = min(group, num_cols - n)
            at = w + n * k * item
            ahead = at + group * k * item
            if n + group >= num_cols:
                ahead = following
            source, narrow = at, is_bf16
            if wide and is_bf16:
                widen(at, widened, cols * k // 16, ahead)
                source, narrow = widened, 0
            _block(
                x + m * k * 4,
                k * 4,
                rows,
                source,
                k,
                cols,
                narrow,
                out + m * out_stride + n * 4,
                out_stride,
                ahead,
                ahead_stride,
            )


@kernel
def silu_mul_row(gate: int, up: int, width: int, out: int) -> None:
    one = np.float32(1.0)
    for i in range(width):
        g = read_f32(gate, i)
        write_f32(out, i, g / (one + exp(-g)) * read_f32(up, i))


@kernel
def silu_mul(gate_up: int, num_rows: int, width: int, out: int) -> None:
    """``[num_rows, 2 * width] -> [num_rows, width]``."""
    for r in range(num_rows):
        gate = gate_up + r * width * 8
        silu_mul_row(gate, gate + width * 4, width, out + r * width * 4)


@kernel
def sum_of_squares(x: int, size: int) -> Any:
    """Of ``size`` float32, in an order that depends on ``size`` alone."""
    total = np.float32(0.0)
    if size >= 16:
        total = dot(x, x, size // 16)
    for i in range(size // 16 * 16, size):
        v = read_f32(x, i)
        total = fma(v, v, total)
    return total


@kernel
def normalise_row(x: int, size: int, weight: int, eps: float, out: int) -> None:
    """RMS norm of one row; ``out`` may be ``x``."""
    mean = sum_of_squares(x, size) / np.float32(size)
    scale = np.float32(1.0) / np.sqrt(mean + np.float32(eps))
    for i in range(size):
        write_f32(out, i, read_f32(x, i) * scale * read_f32(weight, i))


@kernel
def rms_norm(x: int, num_rows: int, size: int, weight: int, eps: float, out: int) -> None:
    """Of ``x [num_rows, size]``."""
    for r in range(num_rows):
        normalise_row(x + r * size * 4, size, weight, eps, out + r * size * 4)


@kernel
def add_rms_norm(
    residual: int, x: int, scale: float, num_rows: int, size: int, weight: int, eps: float, out: int
) -> None:
    """``residual += scale * x``, then its norm."""
    factor = np.float32(scale)
    for r in range(num_rows):
        row, add = residual + r * size * 4, x + r * size * 4
        for i in range(size):
            write_f32(row, i, fma(factor, read_f32(add, i), read_f32(row, i)))
        normalise_row(row, size, weight, eps, out + r * size * 4)


@kernel
def topk_softmax(
    logits: int,
    num_rows: int,
    num_experts: int,
    top_k: int,
    renormalize: int,
    weights: int,
    ids: int,
) -> None:
    """Softmax over all experts, the ``top_k`` largest (ties: lowest id), largest first."""
    chosen = np.zeros(num_experts, np.bool_)
    for r in range(num_rows):
        row, first = logits + r * num_experts * 4, r * top_k
        chosen[:] = False
        for j in range(top_k):
            best = -1
            for e in range(num_experts):
                if not chosen[e] and (best < 0 or read_f32(row, e) > read_f32(row, best)):
                    best = e
            chosen[best] = True
            write_i32(ids, first + j, np.int32(best))
        top = read_f32(row, np.int64(read_i32(ids, first)))
        total = np.float32(0.0)
        if not renormalize:
            for e in range(num_experts):
                total += exp(read_f32(row, e) - top)
        for j in range(top_k):
            p = exp(read_f32(row, np.int64(read_i32(ids, first + j))) - top)
            write_f32(weights, first + j, p)
            if renormalize:
                total += p
        for j in range(top_k):
            write_f32(weights, first + j, read_f32(weights, first + j) / total)
