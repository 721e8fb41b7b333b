"""Reading and writing the bits of a float inside a Numba kernel, in the float's own width.

Numba widens 32-bit integer arithmetic to 64 bits, which halves the vector width, and has no scalar
bit cast.  These intrinsics emit single LLVM instructions instead, for float32 and float64 alike,
so one kernel body serves both types.  Nothing here rounds.

Editing this file does not invalidate the cached kernels of files that import it: run
``make clean``.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

# type -> (integer type, mantissa bits stored, exponent field mask, exponent bias)
_LAYOUT: dict[Any, tuple[Any, int, int, int]] = {
    types.float32: (types.int32, 23, 0x7F800000, 127),
    types.float64: (types.int64, 52, 0x7FF0000000000000, 1023),
}


def _to_bits(builder: Any, value: Any, width: int) -> Any:
    return builder.bitcast(value, ir.IntType(width))


def _clear_sign(builder: Any, bits: Any, width: int) -> Any:
    return builder.and_(bits, ir.Constant(ir.IntType(width), 2 ** (width - 1) - 1))


@intrinsic
def magnitude_bits(typingctx: Any, value: Any) -> Any:
    """Bit pattern of |value| as a signed integer: ordered like |value|, NaN above Inf above all.

    ``value`` may be such a pattern already.
    """
    integer = _LAYOUT[value][0] if value in _LAYOUT else value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        width = integer.bitwidth
        return _clear_sign(builder, _to_bits(builder, args[0], width), width)

    return integer(value), codegen


@intrinsic
def binade(typingctx: Any, value: Any) -> Any:
    """The power of two at or below |value|; 0 for zero and subnormals, Inf for Inf and NaN."""
    integer, _, exponent_mask, _ = _LAYOUT[value]

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = _to_bits(builder, args[0], integer.bitwidth)
        kept = builder.and_(bits, ir.Constant(ir.IntType(integer.bitwidth), exponent_mask))
        return builder.bitcast(kept, context.get_value_type(value))

    return value(value), codegen


@intrinsic
def with_sign(typingctx: Any, magnitude: Any, sign_of: Any) -> Any:
    """``magnitude`` (its sign bit clear) with the sign bit of ``sign_of``; both of one type."""
    integer = _LAYOUT[magnitude][0]

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        width = integer.bitwidth
        sign = ir.Constant(ir.IntType(width), -(2 ** (width - 1)))
        bits = builder.or_(
            _to_bits(builder, args[0], width),
            builder.and_(_to_bits(builder, args[1], width), sign),
        )
        return builder.bitcast(bits, context.get_value_type(magnitude))

    return magnitude(magnitude, magnitude), codegen


@intrinsic
def from_bits(typingctx: Any, bits: Any, like: Any) -> Any:
    """The float of ``like``'s type whose bit pattern is the integer ``bits``."""
    integer = _LAYOUT[like][0]

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(like))

    return like(integer, like), codegen


@intrinsic
def normal_exponent(typingctx: Any, value: Any) -> Any:
    """floor(log2 |value|) as int64, for normal finite values only."""
    integer, man_bits, exponent_mask, bias = _LAYOUT[value]

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.IntType(integer.bitwidth)
        bits = builder.and_(
            _to_bits(builder, args[0], integer.bitwidth), ir.Constant(kind, exponent_mask)
        )
        field = builder.lshr(bits, ir.Constant(kind, man_bits))
        exponent = builder.sub(field, ir.Constant(kind, bias))
        wide = ir.IntType(64)
        return exponent if kind == wide else builder.sext(exponent, wide)

    return types.int64(value), codegen


@intrinsic
def power_of_two(typingctx: Any, exponent: Any, like: Any) -> Any:
    """2**exponent in ``like``'s type, for exponents of normal numbers only (int64 exponent)."""
    integer, man_bits, _, bias = _LAYOUT[like]

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.IntType(integer.bitwidth)
        exponent_ = args[0] if integer.bitwidth == 64 else builder.trunc(args[0], kind)
        field = builder.add(exponent_, ir.Constant(kind, bias))
        bits = builder.shl(field, ir.Constant(kind, man_bits))
        return builder.bitcast(bits, context.get_value_type(like))

    return like(types.int64, like), codegen


@intrinsic
def power_of_two_at(typingctx: Any, shifted: Any) -> Any:
    """2**n from n + 1.5 * 2**man_bits, the sum that rounds n to a whole number (man_bits 23 or 52).

    The sum's low bits hold n.  n must be the exponent of a normal number; a NaN gives some number.
    """
    integer, man_bits, _, bias = _LAYOUT[shifted]

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.IntType(integer.bitwidth)
        base = ((bias + man_bits) << man_bits) + (1 << (man_bits - 1))  # bits of 1.5 * 2**man_bits
        n = builder.sub(_to_bits(builder, args[0], integer.bitwidth), ir.Constant(kind, base))
        field = builder.add(n, ir.Constant(kind, bias))
        bits = builder.shl(field, ir.Constant(kind, man_bits))
        return builder.bitcast(bits, context.get_value_type(shifted))

    return shifted(shifted), codegen


@intrinsic
def unit_fraction(typingctx: Any, bits: Any, like: Any) -> Any:
    """The upper 24 of a uint32's bits as a fraction in [0, 1) of ``like``'s type, exactly."""
    value = ir.IntType(32)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = context.get_value_type(like)
        upper = builder.lshr(args[0], ir.Constant(value, 8))
        return builder.fmul(builder.sitofp(upper, kind), ir.Constant(kind, 2.0**-24))

    return like(types.uint32, like), codegen


@intrinsic
def largest_of_32(typingctx: Any, values: Any, start: Any) -> Any:
    """Largest magnitude_bits of values[start : start + 32], floats or bits, C-contiguous.

    One vector load and one reduction: LLVM turns the loop that says the same into scalar code,
    which takes longer than the rest of the quantizer.  The caller keeps start + 32 in range.
    """
    integer = _LAYOUT[values.dtype][0] if values.dtype in _LAYOUT else values.dtype

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        width = integer.bitwidth
        kind, vector = ir.IntType(width), ir.VectorType(ir.IntType(width), 32)
        array = context.make_array(signature.args[0])(context, builder, value=args[0])
        pointer = builder.gep(array.data, [args[1]])
        bits = builder.load(builder.bitcast(pointer, vector.as_pointer()), align=width // 8)
        magnitudes = builder.and_(bits, ir.Constant(vector, [2 ** (width - 1) - 1] * 32))
        name = f"llvm.vector.reduce.smax.v32i{width}"
        reduction = builder.module.globals.get(name) or ir.Function(
            builder.module, ir.FunctionType(kind, [vector]), name
        )
        return builder.call(reduction, [magnitudes])

    return integer(values, types.intp), codegen
