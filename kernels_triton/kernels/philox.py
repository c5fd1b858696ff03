"""Random numbers by counter: the words of Philox4x32-10, and what `shardc::random_uniform` makes of them."""

import triton
import triton.language as tl


@triton.jit
def philox(c0, c1, c2, c3, seed):
    """The first word. Words are uint32, scalars where they are the same for all: what a round makes of scalars is one.

    Written out rather than `tl.philox`, whose high and low halves of a product are two multiplications; of a 64-bit
    product the compiler makes one (IMAD.WIDE), of a quarter of the rate of others. (High words from the float64 units,
    by a fused multiply-add that rounds towards zero, were tried: exact, and slower.)
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
    return c0


@triton.jit
def philox_uniform(seed, op_id, index):
    """`shardc::random_uniform`'s numbers, float32 in [0, 1), for int64 element indices; bit for bit.

    The counter is (index low, op, index high, 0), and the word is read as `tl.rand` reads it.
    """
    op_word = (tl.zeros((), tl.int64) + op_id).to(tl.uint32)
    none = tl.zeros((), tl.uint32)
    return tl.uint_to_uniform_float(philox(index.to(tl.uint32), op_word, (index >> 32).to(tl.uint32), none, seed))
