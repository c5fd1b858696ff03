"""Counter-based random numbers: the words of Philox4x32-10, as `shardc::random_uniform` uses them.

Element i has word i & 3 of the four words of counter i >> 2. The code says exactly that: each element computes all four
words and selects one. In tiles whose last dim is within one counter or a few (`group`), the compiler sees that a
thread's elements share the computation, and which words they select. One Philox for four elements remains, with no
selection and no exchange between threads.
"""

import triton
import triton.language as tl


@triton.jit
def philox(c0, c1, c2, c3, seed):
    """All four words. Words are uint32, and scalars where all elements share them: rounds of scalars are computed once.

    This is written out because `tl.philox` uses two multiplications for the high and low half of a product. The
    compiler turns a 64-bit product into one (IMAD.WIDE), at a quarter of the usual rate. (High words from the float64
    units, by a fused multiply-add that rounds towards zero, were tried: exact, and slower.)
    """
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        p0 = c0.to(tl.uint64) * 0xD2511F53
        p1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (p1 >> 32).to(tl.uint32) ^ (c1 ^ k0)
        c2 = (p0 >> 32).to(tl.uint32) ^ (c3 ^ k1)
        c1 = p1.to(tl.uint32)
        c3 = p0.to(tl.uint32)
        k0 = (k0 + 0x9E3779B9).to(tl.uint32)
        k1 = (k1 + 0xBB67AE85).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def _words(seed, op_id, low, high):
    op_word = (tl.zeros((), tl.int64) + op_id).to(tl.uint32)
    return philox(low, op_word, high, tl.zeros((), tl.uint32), seed)


@triton.jit
def _one_of(w0, w1, w2, w3, at):
    odd = (at & 1) != 0
    return tl.where((at & 2) != 0, tl.where(odd, w3, w2), tl.where(odd, w1, w0))


@triton.jit
def word_of(seed, op_id, low, high, at):
    """Word `at & 3` of the counter (low, high), the halves of an index divided by 4."""
    w0, w1, w2, w3 = _words(seed, op_id, low, high)
    return _one_of(w0, w1, w2, w3, at)


@triton.jit
def aligned_word(seed, op_id, first, group, at):
    """The word of element first + 4 * group + (at & 3), `first` a multiple of 4."""
    counter = (first >> 2) + group
    return word_of(seed, op_id, counter.to(tl.uint32), (counter >> 32).to(tl.uint32), at)


@triton.jit
def strided_word(seed, op_id, index):
    """The word of an element at any position."""
    return word_of(seed, op_id, (index >> 2).to(tl.uint32), (index >> 34).to(tl.uint32), index)


@triton.jit
def shifted_word(seed, op_id, first, group, at):
    """As `aligned_word`, for any `first`: a group's four elements belong to two counters.

    The counters are computed one after the other, in a loop, which needs few more registers than a single counter.
    """
    counter = (first >> 2) + group
    later = ((first & 3) + (at & 3)) >= 4
    word = tl.zeros((counter + at).shape, tl.uint32)
    for turn in tl.range(0, 2, loop_unroll_factor=1):
        now = counter + turn
        w0, w1, w2, w3 = _words(seed, op_id, now.to(tl.uint32), (now >> 32).to(tl.uint32))
        # `at` says which an element's is if `first` is a multiple of 4, and `first` how many further.
        v0 = _one_of(w0, w1, w2, w3, at)
        v1 = _one_of(w1, w2, w3, w0, at)
        v2 = _one_of(w2, w3, w0, w1, at)
        v3 = _one_of(w3, w0, w1, w2, at)
        word = tl.where(later == (turn == 1), _one_of(v0, v1, v2, v3, first), word)
    return word


@triton.jit
def at_least(word, least):
    """Whether a word, read as signed and folded to 31 bits (-1 - word where negative), is at least `least`."""
    least = (tl.zeros((), tl.int64) + least).to(tl.uint32)
    # Those that are not are the 2 * least around 0; 2^31 is more than any.
    return ((word + least).to(tl.uint32) >= (least + least).to(tl.uint32)) & (least < 0x80000000)


@triton.jit
def zero(x):
    """The bits above those of x, which are 0. A tile of numbers that do not depend on loads may be computed by other
    threads than hold the loaded tile, and be exchanged. With this added, the same threads compute it."""
    if x.dtype.primitive_bitwidth == 1:
        x = x.to(tl.int8)
    if x.dtype.primitive_bitwidth == 8:
        above = x.to(tl.uint8, bitcast=True).to(tl.uint32) >> 8
    elif x.dtype.primitive_bitwidth == 16:
        above = x.to(tl.uint16, bitcast=True).to(tl.uint32) >> 16
    elif x.dtype.primitive_bitwidth == 32:
        above = (x.to(tl.uint32, bitcast=True).to(tl.uint64) >> 32).to(tl.uint32)
    else:
        low = x.to(tl.uint64, bitcast=True).to(tl.uint32)
        above = (low.to(tl.uint64) >> 32).to(tl.uint32)
    return above


@triton.jit
def philox_word(seed, op_id, offset, row, start, like, BLOCK: tl.constexpr, STEP: tl.constexpr, ALIGNED: tl.constexpr):
    """The words of elements offset + row + STEP * (start + 0..BLOCK-1), in int64.

    `row`: a tile of one column. `start`: a multiple of BLOCK. `like`: a loaded tile, or None. `ALIGNED`: row offsets
    are multiples of 4, so `offset` decides whether four neighbours share a counter.
    """
    first = offset + row
    if STEP == 1 and BLOCK % 4 == 0:
        at = tl.arange(0, 4)[None, None, :]
        if like is not None:
            at += zero(tl.reshape(like, (like.shape[0], BLOCK // 4, 4))).to(tl.int32)
        group = (start >> 2) + tl.arange(0, BLOCK // 4)[None, :, None] + (at >> 2)
        first = tl.expand_dims(first, 2)
        if ALIGNED:
            if (tl.max(tl.zeros((1, 1), tl.int64) + offset) & 3) == 0:
                word = aligned_word(seed, op_id, first, group, at)
            else:
                word = shifted_word(seed, op_id, first, group, at)
        else:
            word = shifted_word(seed, op_id, first, group, at)
        word = tl.reshape(word, (word.shape[0], BLOCK))
    else:
        column = start + tl.arange(0, BLOCK)[None, :]
        word = strided_word(seed, op_id, first + STEP * column.to(tl.int64))
    return word
