"""Passes of ours that are switched off, or on, one at a time, so that it is known what a step owes each of them.

A contestant `FORM-SWITCH` is `FORM` without one pass, or with one that is off by default. Where the plan has a word for
it, the word is used. What no plan turns off is replaced in shardc's own module while the contestant compiles and runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from torch import fx

from shardc.ir import microbatch
from shardc.ir.ops import collectives
from shardc.partition import gather_hoisting


@dataclass(frozen=True)
class Switch:
    """`off` is what is switched off, or `on`. `plan` is merged into a form's plan; of each of `places`, a module and a
    name in it, the value is replaced. `runs`: the program is the same, and runs otherwise."""

    off: str = ""
    plan: Mapping[str, Any] = field(default_factory=dict[str, Any])
    places: tuple[tuple[ModuleType, str, object], ...] = ()
    runs: bool = False
    on: bool = False

    @contextmanager
    def active(self) -> Iterator[None]:
        before = [(module, name, getattr(module, name)) for module, name, _ in self.places]
        try:
            for module, name, value in self.places:
                setattr(module, name, value)
            yield
        finally:
            for module, name, value in before:
                setattr(module, name, value)


ALL_ON = Switch()


def _none_narrowed(*_: object) -> set[fx.Node]:
    return set()


SWITCHES = {
    "no-late": Switch("late weight gradients", {"overlap": {"late_gradients": False}}),
    "no-prefetch": Switch("prefetch", {"overlap": {"prefetch": False}}),
    "no-bucket": Switch("bucket", {"bucket": False}),
    "no-early-casts": Switch(
        "casts of weights once a step",
        places=tuple((module, "narrowed_weights", _none_narrowed) for module in (microbatch, gather_hoisting)),
    ),
    "no-pieces": Switch(
        "sequence-parallel collectives in pieces", places=((collectives, "MOST_PIECES", 0),), runs=True
    ),
    "plain": Switch("fuse", {"fuse": False}),
    "decomposed": Switch("decomposed products", {"overlap": {"decompose": True}}, on=True),
    "split": Switch("a batch in two halves", {"overlap": {"split": 2}}, on=True),
}
SWITCHED = {  # the switches of each form that change its program
    "ours-tp": ("no-late", "plain", "split"),
    "ours-tp-sp": ("no-late", "no-bucket", "no-pieces", "decomposed", "split"),
    "ours-dp": ("no-bucket", "no-early-casts", "plain"),
    "ours-zero3": ("no-prefetch", "no-bucket", "plain"),
    "ours-pp-1f1b": ("no-early-casts",),
}
OFF = {f"{form}-{name}": (form, SWITCHES[name]) for form, names in SWITCHED.items() for name in names}
