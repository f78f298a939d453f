"""Building blocks of the numba kernels, emitted as explicit LLVM vector code.

All vectors have 16 float32 lanes, on every CPU; LLVM splits them where registers are narrower.
What is written here is what is computed, in this order: every output of ``tile`` is one chain of
fused multiply-adds per lane over k, then one fixed tree over the lanes, the same for every tile
shape. That is why a row's result never depends on the rows beside it.

Addresses and strides are int64 bytes. Nothing is checked here; callers pass what they own.
"""

from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LANES = 16
_F32, _I8, _I16, _I32, _I64 = ir.FloatType(), *(ir.IntType(n) for n in (8, 16, 32, 64))
_VF = ir.VectorType(_F32, LANES)
_VI16 = ir.VectorType(_I16, LANES)
_VI32 = ir.VectorType(_I32, LANES)
_VOID = ir.VoidType()


def _host_has_avx512() -> bool:
    chosen = numba.config.CPU_FEATURES
    if chosen is not None:
        return "+avx512f" in chosen
    return bool(llvmlite.binding.get_host_cpu_features().get("avx512f", False))


TILE = 4 if _host_has_avx512() else 2
"""Rows and columns of the largest tile: TILE * TILE accumulators stay in registers."""


# -- helpers of code generation ----------------------------------------------------------------


def _function(b: ir.IRBuilder, name: str, ret: ir.Type, args: list[ir.Type]) -> Any:
    module = b.module
    return module.globals.get(name) or ir.Function(module, ir.FunctionType(ret, args), name)


def _splat(kind: ir.Type, value: float) -> ir.Constant:
    if isinstance(kind, ir.VectorType):
        return ir.Constant(kind, [value] * kind.count)
    return ir.Constant(kind, value)


def _fma(b: ir.IRBuilder, x: Any, y: Any, z: Any) -> Any:
    suffix = "v16f32" if x.type == _VF else "f32"
    return b.call(_function(b, f"llvm.fma.{suffix}", x.type, [x.type] * 3), [x, y, z])


def _load(b: ir.IRBuilder, address: Any, kind: ir.Type, align: int) -> Any:
    return b.load(b.inttoptr(address, kind.as_pointer()), align=align)


def _store(b: ir.IRBuilder, value: Any, address: Any) -> None:
    b.store(value, b.inttoptr(address, value.type.as_pointer()), align=4)


def _prefetch(b: ir.IRBuilder, address: Any) -> None:
    pointer = _I8.as_pointer()
    touch = _function(b, "llvm.prefetch.p0", _VOID, [pointer, _I32, _I32, _I32])
    b.call(touch, [b.inttoptr(address, pointer), _I32(0), _I32(3), _I32(1)])


def _broadcast(b: ir.IRBuilder, scalar: Any) -> Any:
    undefined = ir.Constant(_VF, ir.Undefined)
    one = b.insert_element(undefined, scalar, _I32(0))
    return b.shuffle_vector(one, undefined, ir.Constant(_VI32, [0] * LANES))


def _load_weights(b: ir.IRBuilder, address: Any, is_bf16: bool) -> Any:
    if not is_bf16:
        return _load(b, address, _VF, 4)
    bits = b.zext(_load(b, address, _VI16, 2), _VI32)
    return b.bitcast(b.shl(bits, _splat(_VI32, 16)), _VF)


def _shuffle(b: ir.IRBuilder, u: Any, v: Any, lanes: list[int]) -> Any:
    return b.shuffle_vector(u, v, ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))


def _fold(b: ir.IRBuilder, vectors: list[Any], combine: Callable[[Any, Any], Any]) -> Any:
    """Reduce up to 16 vectors at once; lane i of the result is the reduction of ``vectors[i]``.

    Each is folded by halves (lane i with lane i + 8, then + 4, + 2, + 1), whatever its partners.
    """
    half = LANES // 2
    while half:
        first = [g + i for g in range(0, LANES, 2 * half) for i in range(half)]
        low = first + [LANES + i for i in first]
        high = [i + half for i in low]
        pairs = [(u, vectors[i + 1] if i + 1 < len(vectors) else u)
                 for i, u in enumerate(vectors) if i % 2 == 0]  # fmt: skip
        vectors = [combine(_shuffle(b, u, v, low), _shuffle(b, u, v, high)) for u, v in pairs]
        half //= 2
    return vectors[0]


def _loop(
    b: ir.IRBuilder, count: Any, start: list[Any], body: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """Emit ``for i in range(count): state = body(i, state)``; ``count`` is at least 1."""
    entry = b.block
    block, after = b.append_basic_block("loop"), b.append_basic_block("after")
    b.branch(block)
    b.position_at_end(block)
    index = b.phi(_I64)
    state = [b.phi(value.type) for value in start]
    index.add_incoming(_I64(0), entry)
    for phi, value in zip(state, start, strict=True):
        phi.add_incoming(value, entry)
    result = body(index, list(state))
    following = b.add(index, _I64(1))
    index.add_incoming(following, b.block)
    for phi, value in zip(state, result, strict=True):
        phi.add_incoming(value, b.block)
    b.cbranch(b.icmp_signed("<", following, count), block, after)
    b.position_at_end(after)
    return result


def _exp(b: ir.IRBuilder, x: Any) -> Any:
    """e**x of a scalar or vector, x clamped to [-87, 88]; relative error below 2e-7 (Cephes)."""
    kind, ints = x.type, (_VI32 if x.type == _VF else _I32)
    low, high, magic = _splat(kind, -87.0), _splat(kind, 88.0), _splat(kind, 12582912.0)
    x = b.select(b.fcmp_ordered("<", x, low), low, x)
    x = b.select(b.fcmp_ordered(">", x, high), high, x)
    # Adding 1.5 * 2**23 rounds to an integer and leaves it in the low bits.
    shifted = _fma(b, x, _splat(kind, 1.44269504088896341), magic)
    n = b.fsub(shifted, magic)
    r = _fma(b, n, _splat(kind, -0.693359375), x)
    r = _fma(b, n, _splat(kind, 2.12194440e-4), r)
    p = _splat(kind, 1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = _fma(b, p, r, _splat(kind, c))
    p = b.fadd(_fma(b, p, b.fmul(r, r), r), _splat(kind, 1.0))
    exponent = b.add(b.bitcast(shifted, ints), _splat(ints, 127))
    return b.fmul(p, b.bitcast(b.shl(exponent, _splat(ints, 23)), kind))


# -- matrix tiles ------------------------------------------------------------------------------


def tile(num_rows: int, num_cols: int, is_bf16: bool) -> Any:
    """``(x, x_stride, w, w_stride, steps, out, out_stride, prefetch, prefetch_stride)``.

    out[m, n] = sum over k of x[m, k] * w[n, k], with k = 16 * steps, steps >= 1. Per step it
    prefetches two cache lines half a ``prefetch_stride`` apart, starting at ``prefetch``.
    """

    @intrinsic
    def multiply(_, x, xs, w, ws, steps, out, outs, ahead, aheads):  # type: ignore[no-untyped-def]
        def generate(context, b, signature, args):  # type: ignore[no-untyped-def]
            x, xs, w, ws, steps, out, outs, ahead, aheads = args
            rows = [b.add(x, b.mul(xs, _I64(m))) for m in range(num_rows)]
            cols = [b.add(w, b.mul(ws, _I64(n))) for n in range(num_cols)]
            halfway = b.lshr(aheads, _I64(1))

            def step(i: Any, state: list[Any]) -> list[Any]:
                at, sums = state[0], state[1:]
                _prefetch(b, at)
                _prefetch(b, b.add(at, halfway))
                xo, wo = b.shl(i, _I64(6)), b.shl(i, _I64(5 if is_bf16 else 6))
                ws_now = [_load_weights(b, b.add(c, wo), is_bf16) for c in cols]
                for m, row in enumerate(rows):
                    xv = _load(b, b.add(row, xo), _VF, 4)
                    for n, wv in enumerate(ws_now):
                        sums[m * num_cols + n] = _fma(b, xv, wv, sums[m * num_cols + n])
                return [b.add(at, aheads), *sums]

            zeros = [_splat(_VF, 0.0)] * (num_rows * num_cols)
            sums = _loop(b, steps, [ahead, *zeros], step)[1:]
            total = _fold(b, sums, b.fadd)
            for m in range(num_rows):
                lanes = list(range(m * num_cols, (m + 1) * num_cols))
                _store(b, _shuffle(b, total, total, lanes), b.add(out, b.mul(outs, _I64(m))))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), generate

    return multiply


def weighted_sum(num_rows: int, num_vectors: int) -> Any:
    """``(p, p_stride, v, v_stride, num_tokens, out, out_stride)``, all float32.

    out[m, d] += p[m, t] * v[t, d], one chain over t = 0 .. num_tokens - 1 (>= 1), for
    ``16 * num_vectors`` columns d.
    """

    @intrinsic
    def accumulate(_, p, ps, v, vs, count, out, outs):  # type: ignore[no-untyped-def]
        def generate(context, b, signature, args):  # type: ignore[no-untyped-def]
            p, ps, v, vs, count, out, outs = args
            rows = [b.add(p, b.mul(ps, _I64(m))) for m in range(num_rows)]
            places = [
                b.add(b.add(out, b.mul(outs, _I64(m))), _I64(64 * j))
                for m in range(num_rows)
                for j in range(num_vectors)
            ]

            def step(i: Any, state: list[Any]) -> list[Any]:
                at, sums = state[0], state[1:]
                values = [_load(b, b.add(at, _I64(64 * j)), _VF, 4) for j in range(num_vectors)]
                for m, row in enumerate(rows):
                    weight = _broadcast(b, _load(b, b.add(row, b.shl(i, _I64(2))), _F32, 4))
                    for j, value in enumerate(values):
                        k = m * num_vectors + j
                        sums[k] = _fma(b, weight, value, sums[k])
                return [b.add(at, vs), *sums]

            start = [_load(b, place, _VF, 4) for place in places]
            sums = _loop(b, count, [v, *start], step)[1:]
            for place, value in zip(places, sums, strict=True):
                _store(b, value, place)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), generate

    return accumulate


@intrinsic
def widen(_, source, target, steps, ahead):  # type: ignore[no-untyped-def]
    """Convert ``16 * steps`` bfloat16 (steps >= 1) to float32; touch as many bytes at ``ahead``."""

    def generate(context, b, signature, args):  # type: ignore[no-untyped-def]
        source, target, steps, ahead = args

        def step(i: Any, state: list[Any]) -> list[Any]:
            offset = b.shl(i, _I64(5))
            _prefetch(b, b.add(ahead, offset))
            value = _load_weights(b, b.add(source, offset), True)
            _store(b, value, b.add(target, b.shl(i, _I64(6))))
            return []

        _loop(b, steps, [], step)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def dot(_, x, y, steps):  # type: ignore[no-untyped-def]
    """Dot product of ``16 * steps`` (steps >= 1) float32 at two addresses."""

    def generate(context, b, signature, args):  # type: ignore[no-untyped-def]
        x, y, steps = args

        def step(i: Any, state: list[Any]) -> list[Any]:
            offset = b.shl(i, _I64(6))
            u, v = _load(b, b.add(x, offset), _VF, 4), _load(b, b.add(y, offset), _VF, 4)
            return [_fma(b, u, v, state[0])]

        total = _loop(b, steps, [_splat(_VF, 0.0)], step)
        return b.extract_element(_fold(b, total, b.fadd), _I32(0))

    return types.float32(*[types.int64] * 3), generate


@intrinsic
def exp_minus_max(_, row, steps):  # type: ignore[no-untyped-def]
    """Replace ``16 * steps`` float32 (steps >= 1) by exp(value - max); return their sum.

    -inf becomes exactly 0, so a row is padded with it.
    """

    def generate(context, b, signature, args):  # type: ignore[no-untyped-def]
        row, steps = args

        def larger(u: Any, v: Any) -> Any:
            return b.select(b.fcmp_ordered(">", u, v), u, v)

        def maximum(i: Any, state: list[Any]) -> list[Any]:
            return [larger(_load(b, b.add(row, b.shl(i, _I64(6))), _VF, 4), state[0])]

        top = _loop(b, steps, [_splat(_VF, float("-inf"))], maximum)
        top = _broadcast(b, b.extract_element(_fold(b, top, larger), _I32(0)))

        def exponential(i: Any, state: list[Any]) -> list[Any]:
            place = b.add(row, b.shl(i, _I64(6)))
            x = b.fsub(_load(b, place, _VF, 4), top)
            tiny = b.fcmp_ordered("<", x, _splat(_VF, -87.0))
            value = b.select(tiny, _splat(_VF, 0.0), _exp(b, x))
            _store(b, value, place)
            return [b.fadd(state[0], value)]

        total = _loop(b, steps, [_splat(_VF, 0.0)], exponential)
        return b.extract_element(_fold(b, total, b.fadd), _I32(0))

    return types.float32(types.int64, types.int64), generate


# -- scalars: plain loops over these are vectorised by LLVM -------------------------------------


def _reader(kind: ir.Type, result: Any) -> Any:
    @intrinsic
    def read(_, address, index):  # type: ignore[no-untyped-def]
        def generate(context, b, signature, args):  # type: ignore[no-untyped-def]
            place = b.gep(b.inttoptr(args[0], kind.as_pointer()), [args[1]], source_etype=kind)
            return b.load(place)

        return result(types.int64, types.int64), generate

    return read


def _writer(kind: ir.Type, value_type: Any) -> Any:
    @intrinsic
    def write(_, address, index, value):  # type: ignore[no-untyped-def]
        def generate(context, b, signature, args):  # type: ignore[no-untyped-def]
            place = b.gep(b.inttoptr(args[0], kind.as_pointer()), [args[1]], source_etype=kind)
            b.store(args[2], place)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, value_type), generate

    return write


read_f32, write_f32 = _reader(_F32, types.float32), _writer(_F32, types.float32)
read_i32, write_i32 = _reader(_I32, types.int32), _writer(_I32, types.int32)
read_i64, write_i64 = _reader(_I64, types.int64), _writer(_I64, types.int64)


@intrinsic
def read_bf16(_, address, index):  # type: ignore[no-untyped-def]
    """The bfloat16 at ``address + 2 * index`` as float32."""

    def generate(context, b, signature, args):  # type: ignore[no-untyped-def]
        place = b.gep(b.inttoptr(args[0], _I16.as_pointer()), [args[1]], source_etype=_I16)
        return b.bitcast(b.shl(b.zext(b.load(place), _I32), _I32(16)), _F32)

    return types.float32(types.int64, types.int64), generate


@intrinsic
def write_bf16(_, address, index, value):  # type: ignore[no-untyped-def]
    """Round a float32 to nearest even and store it as bfloat16."""

    def generate(context, b, signature, args):  # type: ignore[no-untyped-def]
        place = b.gep(b.inttoptr(args[0], _I16.as_pointer()), [args[1]], source_etype=_I16)
        bits = b.bitcast(args[2], _I32)
        odd = b.and_(b.lshr(bits, _I32(16)), _I32(1))
        rounded = b.lshr(b.add(bits, b.add(odd, _I32(0x7FFF))), _I32(16))
        nan = b.fcmp_unordered("uno", args[2], args[2])
        b.store(b.trunc(b.select(nan, _I32(0x7FC0), rounded), _I16), place)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), generate


@intrinsic
def exp(_, x):  # type: ignore[no-untyped-def]
    """e**x of one float32, see ``_exp``."""

    def generate(context, b, signature, args):  # type: ignore[no-untyped-def]
        return _exp(b, args[0])

    return types.float32(types.float32), generate


@intrinsic
def fma(_, x, y, z):  # type: ignore[no-untyped-def]
    """x * y + z with one rounding."""

    def generate(context, b, signature, args):  # type: ignore[no-untyped-def]
        return _fma(b, *args)

    return types.float32(types.float32, types.float32, types.float32), generate
