"""Random models as hypothesis strategies: a start and a list of steps, each an op's name and three numbers.

A step that cannot be is left out, so any list of steps is a program, and hypothesis shrinks to few and plain ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from tests.properties.grower import Grower, Impossible, Program, Shape
from tests.properties.ops import OPS, SIZES

Step = tuple[str, int, int, int]

# Ops that compositions turn on come up more often.
COMMON = [
    "linear",
    "linear",
    "matmul",
    "combine",
    "combine",
    "weighted",
    "view",
    "reduce",
    "unary",
    "attention",
    "branches",
    "branches",
]


def grow(start: Shape, steps: Sequence[Step]) -> Program:
    g = Grower()
    g.input(start)
    for name, a, b, c in steps:
        tried = g.copy()
        try:
            OPS[name](tried, a, b, c)
        except Impossible:
            continue
        g = tried
    return g.finish()


numbers = st.integers(0, 255)
steps = st.tuples(st.sampled_from([*OPS, *COMMON]), st.integers(0, 7), numbers, numbers)
starts = st.lists(st.sampled_from(SIZES[:-1]), min_size=1, max_size=4).map(tuple)


@st.composite
def programs(draw: st.DrawFn, max_steps: int = 7) -> Program:
    """A model of at least one parameter and one value."""
    return grow(draw(starts), draw(st.lists(steps, min_size=1, max_size=max_steps)))
