"""Intrinsics on 64 values or bits at a time, missing in numba, and the random stream of `raysim.codecs.draws`.

They are LLVM instructions, portable to every processor; with vector registers, comparing 64 values takes a few instructions.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_WORD = ir.IntType(64)
GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _compare_64(relation):
    """Make an intrinsic that compares 64 magnitudes with a bound; bit i of its result belongs to value i."""

    @intrinsic
    def compare(typingctx, array, start, mask, bound):
        if not isinstance(array, types.Array) or not isinstance(array.dtype, types.Integer):
            return None
        element = array.dtype

        def codegen(context, builder, signature, arguments):
            data, index, keep, limit = arguments
            lane = context.get_value_type(element)
            pointer = builder.gep(context.make_array(signature.args[0])(context, builder, data).data, [index])
            vector = ir.VectorType(lane, 64)
            values = builder.load(builder.bitcast(pointer, vector.as_pointer()), align=element.bitwidth // 8)

            def spread(value, given):
                value = context.cast(builder, value, given, element)
                single = builder.insert_element(
                    ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0)
                )
                return builder.shuffle_vector(
                    single, ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(ir.IntType(32), 64), [0] * 64)
                )

            magnitudes = builder.and_(values, spread(keep, signature.args[2]))
            answers = builder.icmp_signed(relation, magnitudes, spread(limit, signature.args[3]))
            return builder.bitcast(answers, _WORD)

        return types.uint64(array, types.intp, mask, bound), codegen

    return compare


at_least_64 = _compare_64(">=")
greater_64 = _compare_64(">")


@intrinsic
def hadamard_64(typingctx, array, start):
    """Multiply 64 values of an array by the unnormalised Hadamard matrix, in place, without bounds checks."""
    element = array.dtype

    def codegen(context, builder, signature, arguments):
        data, index = arguments
        vector, lanes = ir.VectorType(context.get_value_type(element), 64), ir.VectorType(ir.IntType(32), 64)
        pointer = builder.gep(context.make_array(signature.args[0])(context, builder, data).data, [index])
        pointer = builder.bitcast(pointer, vector.as_pointer())
        values, none = builder.load(pointer, align=element.bitwidth // 8), ir.Constant(vector, ir.Undefined)
        for step in (32, 16, 8, 4, 2, 1):
            partners = builder.shuffle_vector(values, none, ir.Constant(lanes, [i ^ step for i in range(64)]))
            sums, differences = builder.add(values, partners), builder.sub(partners, values)
            chosen = [i + 64 if i & step else i for i in range(64)]
            values = builder.shuffle_vector(sums, differences, ir.Constant(lanes, chosen))
        builder.store(values, pointer, align=element.bitwidth // 8)
        return context.get_dummy_value()

    return (types.void(array, types.intp), codegen) if isinstance(element, types.Integer) else None


def _of_word(build):
    """Make an intrinsic from uint64 to uint64, with the instruction appended by `build`."""

    @intrinsic
    def compute(typingctx, word):
        def codegen(context, builder, signature, arguments):
            return build(builder, arguments[0])

        return types.uint64(types.uint64), codegen

    return compute


ones = _of_word(lambda builder, word: builder.ctpop(word))  # number of set bits
reversed_bits = _of_word(lambda builder, word: builder.bitreverse(word))
# number of trailing and leading zeros of a nonzero word
trailing_zeros = _of_word(lambda builder, word: builder.cttz(word, cgutils.true_bit))
leading_zeros = _of_word(lambda builder, word: builder.ctlz(word, cgutils.true_bit))


def _bytes_at(context, builder, array_type, array, index):
    """Return a pointer to the eight bytes from `index` on, as an unaligned word."""
    pointer = builder.gep(context.make_array(array_type)(context, builder, array).data, [index])
    return builder.bitcast(pointer, _WORD.as_pointer())


@intrinsic
def load_word(typingctx, array, index):
    """Return eight bytes of a uint8 array as a big-endian uint64, without bounds checks."""

    def codegen(context, builder, signature, arguments):
        return builder.bswap(builder.load(_bytes_at(context, builder, signature.args[0], *arguments), align=1))

    return types.uint64(array, types.intp), codegen


@intrinsic
def store_word(typingctx, array, index, word):
    """Write a uint64 to eight bytes of a uint8 array, big-endian, without bounds checks."""

    def codegen(context, builder, signature, arguments):
        data, at, value = arguments
        builder.store(builder.bswap(value), _bytes_at(context, builder, signature.args[0], data, at), align=1)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.uint64), codegen


@njit(cache=True, nogil=True, inline="always")
def mixed(state):
    """Return the 64 random bits of a stream state."""
    z = (state ^ (state >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


@njit(cache=True, nogil=True, inline="always")
def uniform_at(state):
    """Return the random number in [0, 1) of a stream state."""
    return np.float64(np.int64(mixed(state) >> np.uint64(11))) * 2.0**-53


@njit(cache=True, nogil=True)
def fill(key, shift, mask, out):
    """Write (number >> shift) & mask for the stream of `key`, in the dtype of `out`."""
    state = np.uint64(key)
    for i in range(len(out)):
        state += GAMMA
        out[i] = (mixed(state) >> shift) & mask
