"""The compiled loops of ``NumbaAttention``: rotary embedding and paged attention.

Arguments are addresses in bytes and sizes; ``NumbaAttention`` checks shapes and owns the memory.
Every row goes through its context in the same order of tokens, alone or in a tile of rows: scores
are independent, the softmax sums by position, and V is added token by token from position 0.
"""

import numpy as np

from coterie.experts.kernels.numba_cache import kernel
from coterie.experts.kernels.numba_ops import matmul, normalise_row
from coterie.experts.kernels.vector_ir import (
    TILE,
    exp_minus_max,
    read_f32,
    read_i32,
    read_i64,
    weighted_sum,
    widen,
    write_bf16,
    write_f32,
)

_sum_full, _sum_row, _sum_narrow, _sum_one = (
    weighted_sum(m, j) for m, j in ((TILE, TILE), (1, TILE), (TILE, 1), (1, 1))
)

TILE_ROWS = 16  # rows of one request that share a pass over its context
SCORE_BYTES = 1 << 20  # of scores held at a time, unless one row needs more


@kernel
def _store_head(x: int, size: int, cache: int, is_bf16: int) -> None:
    if is_bf16:
        for i in range(size):
            write_bf16(cache, i, read_f32(x, i))
    else:
        for i in range(size):
            write_f32(cache, i, read_f32(x, i))


@kernel
def _rotate(x: int, cos_sin: int, size: int, out: int) -> None:
    half = size // 2
    for i in range(half):
        c, s = read_f32(cos_sin, i), read_f32(cos_sin, half + i)
        a, b = read_f32(x, i), read_f32(x, half + i)
        write_f32(out, i, a * c - b * s)
        write_f32(out, half + i, b * c + a * s)


@kernel
def rope_and_cache(
    qkv: int,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    positions: int,
    slot_mapping: int,
    cos_sin: int,
    max_len: int,
    k_cache: int,
    v_cache: int,
    is_bf16: int,
    num_blocks: int,
    block_size: int,
    columns: int,
    q_norm: int,
    k_norm: int,
    eps: float,
    q_out: int,
    scratch: int,
) -> bool:
    """See ``AttentionBackend.rope_and_cache``; ``q_norm`` and ``k_norm`` are 0 for None.

    ``scratch``: room for two heads of float32. Returns False, having written nothing, if a
    position or a slot is out of range.
    """
    for t in range(num_tokens):
        if not 0 <= read_i64(positions, t) < max_len:
            return False
        if read_i64(slot_mapping, t) >= num_blocks * block_size:
            return False
    size, item = head_dim * 4, (2 if is_bf16 else 4)
    normed, rotated = scratch, scratch + size
    for t in range(num_tokens):
        row = qkv + t * (num_heads + 2 * num_kv_heads) * size
        angles = cos_sin + read_i64(positions, t) * size
        slot = read_i64(slot_mapping, t)
        for h in range(num_heads):
            source = row + h * size
            if q_norm != 0:
                normalise_row(source, head_dim, q_norm, eps, normed)
                source = normed
            _rotate(source, angles, head_dim, q_out + (t * num_heads + h) * size)
        if slot < 0:
            continue
        block, offset = slot // block_size, slot % block_size
        for h in range(num_kv_heads):
            at = ((block * num_kv_heads + h) * block_size + offset) * columns * item
            source = row + (num_heads + h) * size
            if k_norm != 0:
                normalise_row(source, head_dim, k_norm, eps, normed)
                source = normed
            _rotate(source, angles, head_dim, rotated)
            _store_head(rotated, head_dim, k_cache + at, is_bf16)
            _store_head(
                row + (num_heads + num_kv_heads + h) * size, head_dim, v_cache + at, is_bf16
            )
    return True


@kernel
def _add_values(
    p: int, p_stride: int, num_rows: int, v: int, columns: int, count: int, out: int
) -> None:
    """out[m] += sum over ``count`` (>= 1) tokens t of p[m, t] * v[t]; all float32."""
    stride, vectors = columns * 4, columns // 16
    m = 0
    while m < num_rows:
        rows = TILE if num_rows - m >= TILE else 1
        pm, om = p + m * p_stride, out + m * stride
        j = 0
        while j < vectors:
            vj, oj = v + j * 64, om + j * 64
            if vectors - j >= TILE:
                if rows == TILE:
                    _sum_full(pm, p_stride, vj, stride, count, oj, stride)
                else:
                    _sum_row(pm, p_stride, vj, stride, count, oj, stride)
                j += TILE
            else:
                if rows == TILE:
                    _sum_narrow(pm, p_stride, vj, stride, count, oj, stride)
                else:
                    _sum_one(pm, p_stride, vj, stride, count, oj, stride)
                j += 1
        m += rows


@kernel
def _scores(
    q: int,
    num_rows: int,
    kv: tuple[int, ...],
    columns: int,
    is_bf16: int,
    block_size: int,
    out: int,
    stride: int,
    room: int,
) -> None:
    """out[m, t] = q[m] . k[t] for the first ``length`` tokens of one request and head."""
    k, v, table, first, pitch, length = kv
    last = (length - 1) // block_size
    for j in range(last + 1):
        count = min(block_size, length - j * block_size)
        keys = k + first + read_i32(table, j) * pitch
        if j < last:
            following = k + first + read_i32(table, j + 1) * pitch
        else:
            following = v + first + read_i32(table, 0) * pitch
        if is_bf16:
            widen(keys, room, count * columns // 16, following)
            keys = room
        to = out + j * block_size * 4
        matmul(q, num_rows, columns, keys, count, 0, to, stride, room, following)


@kernel
def _values(
    p: int,
    stride: int,
    num_rows: int,
    group: int,
    kv: tuple[int, ...],
    columns: int,
    is_bf16: int,
    block_size: int,
    out: int,
    room: int,
) -> None:
    """Add V by the probabilities, row by row up to its own last token.

    Row ``r * group + g`` sees one token more than the rows of ``r - 1``; the last ones see all.
    """
    _, v, table, first, pitch, length = kv
    shortest = length - num_rows // group + 1
    last = (length - 1) // block_size
    for j in range(last + 1):
        start = j * block_size
        count = min(block_size, length - start)
        values = v + first + read_i32(table, j) * pitch
        if is_bf16:
            following = v + first + read_i32(table, min(j + 1, last)) * pitch
            widen(values, room, count * columns // 16, following)
            values = room
        common = max(0, min(count, shortest - start))
        if common > 0:
            _add_values(p + start * 4, stride, num_rows, values, columns, common, out)
        for r in range(num_rows // group):
            extra = min(count, shortest + r - start) - common
            if extra > 0:
                own = p + r * group * stride + (start + common) * 4
                rest = values + common * columns * 4
                to = out + r * group * columns * 4
                _add_values(own, stride, group, rest, columns, extra, to)


@kernel
def _softmax(scores: int, stride: int, num_rows: int, group: int, shortest: int) -> None:
    """Turn each row's scores into probabilities over its own context."""
    for m in range(num_rows):
        row, context = scores + m * stride, shortest + m // group
        steps = (context + 15) // 16
        for i in range(context, steps * 16):
            write_f32(row, i, np.float32(-np.inf))
        inverse = np.float32(1.0) / exp_minus_max(row, steps)
        for i in range(context):
            write_f32(row, i, read_f32(row, i) * inverse)


@kernel
def _in_range(table: int, num_used: int, table_width: int, num_blocks: int) -> bool:
    if num_used > table_width:
        return False
    for j in range(num_used):  # noqa: SIM110, numba has no all()
        if not 0 <= read_i32(table, j) < num_blocks:
            return False
    return True


def scratch_bytes(
    num_heads: int, num_kv_heads: int, columns: int, block_size: int, capacity: int
) -> int:
    """Room ``attend`` needs for contexts of up to ``capacity`` tokens."""
    group = num_heads // num_kv_heads
    rows = TILE_ROWS * group
    scores = max(SCORE_BYTES, group * (capacity + 16) * 4)
    return scores + 2 * rows * columns * 4 + block_size * columns * 4


@kernel
def _attend_tile(
    q: int,
    num_rows: int,
    heads: tuple[int, ...],
    kv: tuple[int, ...],
    is_bf16: int,
    block_size: int,
    scale: float,
    out: int,
    scratch: int,
    scores_bytes: int,
) -> None:
    """Consecutive rows of one request; ``q`` and ``out`` are those of the first."""
    num_heads, num_kv_heads, head_dim, columns = heads
    k, v, table, length = kv
    group, size = num_heads // num_kv_heads, head_dim * 4
    rows, stride = num_rows * group, (length + 15) // 16 * 64
    pitch = num_kv_heads * block_size * columns * (2 if is_bf16 else 4)
    scores, queries = scratch, scratch + scores_bytes
    sums = queries + TILE_ROWS * group * columns * 4
    room = sums + TILE_ROWS * group * columns * 4
    for h in range(num_kv_heads):
        for m in range(rows):
            source = q + ((m // group) * num_heads + h * group + m % group) * size
            to = queries + m * columns * 4
            for i in range(head_dim):
                write_f32(to, i, read_f32(source, i) * np.float32(scale))
            for i in range(head_dim, columns):
                write_f32(to, i, np.float32(0.0))
        for i in range(rows * columns):
            write_f32(sums, i, np.float32(0.0))
        one_head = (k, v, table, h * (pitch // num_kv_heads), pitch, length)
        _scores(queries, rows, one_head, columns, is_bf16, block_size, scores, stride, room)
        _softmax(scores, stride, rows, group, length - num_rows + 1)
        _values(scores, stride, rows, group, one_head, columns, is_bf16, block_size, sums, room)
        for m in range(rows):
            to = out + ((m // group) * num_heads + h * group + m % group) * size
            source = sums + m * columns * 4
            for i in range(head_dim):
                write_f32(to, i, read_f32(source, i))


@kernel
def attend(
    q: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    columns: int,
    k: int,
    v: int,
    is_bf16: int,
    num_blocks: int,
    block_size: int,
    block_table: int,
    table_width: int,
    query_start_loc: int,
    num_reqs: int,
    positions: int,
    scale: float,
    out: int,
    first_row: int,
    last_row: int,
    scratch: int,
    scores_bytes: int,
) -> bool:
    """See ``AttentionBackend.forward``. Returns False if a context does not fit its blocks."""
    group, pitch = num_heads // num_kv_heads, num_heads * head_dim * 4
    heads = (num_heads, num_kv_heads, head_dim, columns)
    for request in range(num_reqs):
        start = max(read_i32(query_start_loc, request), first_row)
        end = min(read_i32(query_start_loc, request + 1), last_row)
        if start >= end:
            continue
        table = block_table + request * table_width * 4
        used = read_i64(positions, end - 1) // block_size + 1
        if not _in_range(table, used, table_width, num_blocks):
            return False
        while start < end:
            shortest = read_i64(positions, start) + 1
            widest = group * (shortest + TILE_ROWS + 15) * 4
            num = max(1, min(scores_bytes // widest, min(TILE_ROWS, end - start)))
            kv = (k, v, table, shortest + num - 1)
            at = start * pitch
            _attend_tile(
                q + at, num, heads, kv, is_bf16, block_size, scale, out + at, scratch, scores_bytes
            )
            start += num
    return True
