"""Which random stream a microbatch of a step draws from: the 64-bit key of `random_uniform`, out of seed, step, number.

    key of step s            fold_in(fold_in(0, seed), s)
    key of its microbatch k  fold_in(key of the step, k)

Sums would overlap: steps 1, 2, 3 of seed 0 would be steps 0, 1, 2 of seed 1. `fold_in` is the mixing function of
SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) on a key and a word.
For a given key it is one to one in the word, so that the steps of a run, and the microbatches of a step, never share a
key; other pairs share one with a chance of 2^-64. The op is a word of the generator's counter, apart from the key.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def fold_in(key: int, word: int) -> int:
    """A key of its own for every word, of 64 bits each; keys are signed, as in an int64 tensor."""
    mixed = _mix(_mix((word + _GOLDEN) & _MASK) ^ ((key * _GOLDEN + 1) & _MASK))
    return mixed - (1 << 64) if mixed >> 63 else mixed


def step_key(seed: int, step: int) -> int:
    """The key of a step, from which those of its microbatches are made."""
    return fold_in(fold_in(0, seed), step)


def token_key(seed: int) -> int:
    """The key of the tokens that are drawn in generation: that of no step, so that none is a mask's number."""
    return step_key(seed, -1)


def _mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)
