"""A cache of which operations have an iteration space: layers repeat, and most kernels of one differ in names only."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from shardc.passes.fusion.analysis.iteration_space import Prim, SpaceConstraint, find_space, structure


class SpaceCache:
    """Which operations have a space. Layers repeat: those that differ in names only are asked of once."""

    def __init__(self) -> None:
        self.answers: dict[Hashable, bool] = {}

    def has_space(self, prims: Sequence[Prim], constraint: SpaceConstraint) -> bool:
        """Does `find_space` find one?"""
        return self.answer((constraint, structure(prims, {})), lambda: prims, constraint)

    def answer(self, key: Hashable, prims: Callable[[], Sequence[Prim]], constraint: SpaceConstraint) -> bool:
        """The same for operations that `key` identifies but for names."""
        answer = self.answers.get(key)
        if answer is None:
            answer = self.answers[key] = find_space(prims(), constraint) is not None
        return answer
