"""The compiled loops of ``NumbaKernels`` that move rows: to experts, through them and home again.

Rows stay where they lie: segments are lists of addresses, so own rows and those of peers are
computed in one pass, each into its own place. No result of a row depends on the other rows.
"""

import numpy as np

from coterie.experts.kernels.numba_cache import kernel
from coterie.experts.kernels.numba_ops import L1_BYTES, matmul, silu_mul_row, widened_bytes
from coterie.experts.kernels.vector_ir import (
    TILE,
    fma,
    read_bf16,
    read_f32,
    read_i32,
    read_i64,
    write_bf16,
    write_f32,
    write_i32,
    write_i64,
)

EXPERT_ROWS = 128  # rows of one expert computed at a time
SEGMENT_WORDS = 5  # addresses of hidden_states, topk_ids, topk_weights, out; num_tokens
PARTIAL_WORDS = 3  # addresses of sums, index; num_tokens


@kernel
def route(
    hidden: int,
    ids: int,
    weights: int,
    num_tokens: int,
    size: int,
    top_k: int,
    table: int,
    to_bf16: int,
    to_hidden: int,
    to_ids: int,
    to_weights: int,
    index: int,
) -> int:
    """Copy the rows with an expert in ``table``, rounded and with physical ids; their number."""
    count = 0
    for t in range(num_tokens):
        found = False
        for j in range(top_k):
            logical = np.int64(read_i32(ids, t * top_k + j))
            physical = np.int32(-1)
            if logical >= 0:
                physical = read_i32(table, logical)
            if physical >= 0:
                found = True
            write_i32(to_ids, count * top_k + j, physical)
        if not found:
            continue  # the next row overwrites it
        for j in range(top_k):
            write_f32(to_weights, count * top_k + j, read_f32(weights, t * top_k + j))
        source = hidden + t * size * 4
        if to_bf16:
            place = to_hidden + count * size * 2
            for i in range(size):
                write_bf16(place, i, read_f32(source, i))
        else:
            place = to_hidden + count * size * 4
            for i in range(size):
                write_f32(place, i, read_f32(source, i))
        write_i32(index, count, np.int32(t))
        count += 1
    return count


@kernel
def _zero(out: int, size: int) -> None:
    for i in range(size):
        write_f32(out, i, np.float32(0.0))


@kernel
def combine(partials: int, num_partials: int, num_tokens: int, size: int, out: int) -> None:
    """Add partial sums in the order of the list ``[num_partials, PARTIAL_WORDS]`` int64."""
    _zero(out, num_tokens * size)
    for p in range(num_partials):
        sums = read_i64(partials, p * PARTIAL_WORDS)
        index = read_i64(partials, p * PARTIAL_WORDS + 1)
        for r in range(read_i64(partials, p * PARTIAL_WORDS + 2)):
            source, to = sums + r * size * 4, out + np.int64(read_i32(index, r)) * size * 4
            for i in range(size):
                write_f32(to, i, read_f32(to, i) + read_f32(source, i))


@kernel
def _rows_of(
    expert: int,
    segments: int,
    num_segments: int,
    top_k: int,
    hidden: int,
    is_bf16: int,
    sources: int,
    targets: int,
    row_weights: int,
) -> int:
    """Where the rows of one expert lie and belong, in the order of segments and rows."""
    count = 0
    source_bytes = hidden * 2 if is_bf16 else hidden * 4
    for s in range(num_segments):
        source = read_i64(segments, s * SEGMENT_WORDS)
        ids = read_i64(segments, s * SEGMENT_WORDS + 1)
        weights = read_i64(segments, s * SEGMENT_WORDS + 2)
        out = read_i64(segments, s * SEGMENT_WORDS + 3)
        for t in range(read_i64(segments, s * SEGMENT_WORDS + 4)):
            for j in range(top_k):
                if read_i32(ids, t * top_k + j) == expert:
                    write_i64(sources, count, source + t * source_bytes)
                    write_i64(targets, count, out + t * hidden * 4)
                    write_f32(row_weights, count, read_f32(weights, t * top_k + j))
                    count += 1
                    break
    return count


@kernel
def _gather(sources: int, count: int, is_bf16: int, size: int, padded: int, out: int) -> None:
    for r in range(count):
        source, to = read_i64(sources, r), out + r * padded * 4
        if is_bf16:
            for i in range(size):
                write_f32(to, i, read_bf16(source, i))
        else:
            for i in range(size):
                write_f32(to, i, read_f32(source, i))
        for i in range(size, padded):
            write_f32(to, i, np.float32(0.0))


def experts_scratch_bytes(num_tokens: int, hidden: int, width: int) -> int:
    """Room ``experts`` needs; ``hidden`` and ``width`` padded to multiples of 16."""
    rows = min(num_tokens, EXPERT_ROWS)
    lists = 20 * (num_tokens + 16)
    return widened_bytes(max(hidden, width)) + 4 * rows * (2 * hidden + 3 * width) + lists


@kernel
def experts(
    segments: int,
    num_segments: int,
    num_tokens: int,
    top_k: int,
    hidden: int,
    hidden_padded: int,
    width: int,
    width_padded: int,
    w13: int,
    w2: int,
    is_bf16: int,
    physical_ids: int,
    counts: int,
    first: int,
    last: int,
    scratch: int,
) -> None:
    """out[t] += weight * down(silu(gate(x)) * up(x)), experts ascending; out = 0 before the first.

    ``w13 [num_local, 2 * width, hidden_padded]``, ``w2 [num_local, hidden, width_padded]``.
    ``segments``: ``[num_segments, SEGMENT_WORDS]`` int64 with ``num_tokens`` rows in all.
    """
    item = 2 if is_bf16 else 4
    room = min(num_tokens, EXPERT_ROWS)
    x = scratch + max(L1_BYTES, TILE * max(hidden_padded, width_padded) * 4)
    gate_up = x + room * hidden_padded * 4
    act = gate_up + room * width * 8
    y = act + room * width_padded * 4
    sources = (y + room * hidden * 4 + 7) // 8 * 8
    targets = sources + num_tokens * 8
    row_weights = targets + num_tokens * 8
    if first == 0:
        for s in range(num_segments):
            rows = read_i64(segments, s * SEGMENT_WORDS + 4)
            _zero(read_i64(segments, s * SEGMENT_WORDS + 3), rows * hidden)
    for e in range(first, last):
        expert = np.int64(read_i32(physical_ids, e))
        count = _rows_of(
            expert, segments, num_segments, top_k, hidden, is_bf16, sources, targets, row_weights
        )
        write_i64(counts, e, read_i64(counts, e) + count)
        w13_e = w13 + e * 2 * width * hidden_padded * item
        w2_e = w2 + e * hidden * width_padded * item
        w13_next = w13_e + 2 * width * hidden_padded * item
        for s in range(0, count, EXPERT_ROWS):
            m = min(EXPERT_ROWS, count - s)
            _gather(sources + s * 8, m, is_bf16, hidden, hidden_padded, x)
            matmul(
                x, m, hidden_padded, w13_e, 2 * width, is_bf16, gate_up, width * 8, scratch, w2_e
            )
            for r in range(m):
                gate, to = gate_up + r * width * 8, act + r * width_padded * 4
                silu_mul_row(gate, gate + width * 4, width, to)
                for i in range(width, width_padded):
                    write_f32(to, i, np.float32(0.0))
            matmul(act, m, width_padded, w2_e, hidden, is_bf16, y, hidden * 4, scratch, w13_next)
            for r in range(m):
                to = read_i64(targets, s + r)
                factor, source = read_f32(row_weights, s + r), y + r * hidden * 4
                for i in range(hidden):
                    write_f32(to, i, fma(factor, read_f32(source, i), read_f32(to, i)))
