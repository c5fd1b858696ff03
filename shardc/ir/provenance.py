"""Where a node comes from, as data: the node that it was derived from, and what asks for its placement.

    %r.h.0.mlp.act               origin   Derivation("recomputed", "h.0.mlp.act")
    %h.0.mlp.c_proj.all_reduce   cause    Cause((Requirement("annotation", "h.0.mlp.c_fc.weight", "-, tp"),))

A name is for the reader. No pass reads it to learn what a node is: a user's module may be called `r`, `bucket` or
`all_gather`. Graphs that lack these fields (a graph's text, a file of before) get them in `derive_provenance.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from shardc.ir.placement import Placement

DerivationKind = Literal[
    "recomputed",  # a call of backward that runs a call of forward again
    "moved",  # a step of bringing a value into another placement
    "replacement",  # a collective that does the work of another one
    "bucket",  # a collective for several; of the one in whose place it is
    "stage_term",  # one stage's part of a sum over stages
    "copy",  # a copy of a buffer, from before it changes
    "half",  # the second half's call, of the first half's
]
RequirementKind = Literal["annotation", "storage", "optimizer", "text"]


@dataclass(frozen=True, slots=True)
class Derivation:
    """The node that another was derived from, by the name that it has or had: later passes may erase it."""

    kind: DerivationKind
    of: str


@dataclass(frozen=True, slots=True)
class Requirement:
    """One thing that asks for a placement: an annotation of a tensor, the storage of parameters over an axis, or an
    optimizer (named by `tensor`) that needs matrices whole.

    Of the kind "text" `tensor` is all that is known: a cause as a file of before has it.
    """

    kind: RequirementKind
    tensor: str = ""
    placement: str = ""
    location: str = ""  # of the annotation: "configs/plans/gpt2.yaml:9"

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that it names."""
        if self.kind == "annotation":
            return _axes_of(self.placement)
        return (self.placement,) if self.placement else ()

    def __str__(self) -> str:
        """As diagnostics cite it: `w = "-, tp"   (plan.yaml:9)`."""
        if self.kind == "annotation":
            return f'{self.tensor} = "{self.placement}"' + (f"   ({self.location})" if self.location else "")
        if self.kind == "optimizer":
            return f"{self.tensor} updates by whole matrices, shared out over {self.placement}"
        return f"storage over {self.placement}" if self.kind == "storage" else self.tensor


@lru_cache(maxsize=4096)
def _axes_of(placement: str) -> tuple[str, ...]:
    return Placement.parse(placement).axes


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a value is placed as it is, or why a collective exists. It is false where nothing is known."""

    requirements: tuple[Requirement, ...] = ()  # of a collective, those of its axes
    through: str = ""  # the call that handed the placement on
    others: int = 0  # further causes: those of other members of a bucket

    @classmethod
    def joined(cls, causes: Iterable[Cause]) -> Cause:
        """One cause of everything that several causes require."""
        return cls(tuple(dict.fromkeys(requirement for cause in causes for requirement in cause.requirements)))

    @classmethod
    def of_bucket(cls, causes: Iterable[Cause]) -> Cause:
        """The first cause, and how many more there are."""
        first, *others = dict.fromkeys(filter(None, causes)) or (cls(),)
        return replace(first, others=len(others))

    def __bool__(self) -> bool:
        return bool(self.requirements)

    def __str__(self) -> str:
        text = "; ".join(map(str, self.requirements))
        text += f" <- {self.through}" if self.through else ""
        return text + (f", and {self.others} more" if self.others else "")


NO_CAUSE = Cause()
