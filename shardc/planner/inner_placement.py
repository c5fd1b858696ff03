"""Placements of weights, the batch and activations that all ways of placing a layer share, found once in the graph.

    placements.found[True]     {"params": {"h.*.q.weight": "tp, -", ...}, "activations": {"h.*": "dp.ep, cp.tp, -"}}
    placements.found[False]    the same, the residual stream whole over tp
    only("dp.ep, cp.tp, -", ("dp", "tp"))     "dp, tp, -"

They are solved for (`candidates`) on one mesh that has every axis, and written by pattern, so that a plan for another
mesh is theirs without the axes that it lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardc.frontend.trace import Traced
from shardc.ir.hardware import Hardware
from shardc.ir.mesh import Mesh
from shardc.plan.schema import Plan
from shardc.planner.candidates import candidate_plans
from shardc.planner.inner import Inner

SLOW = {
    "bf16_flops_per_second": 1e9,
    "fp32_flops_per_second": 1e9,
    "fp64_flops_per_second": 1e9,
    "fp8_flops_per_second": 1e9,
    "memory_bytes_per_second": 1e9,
    "collective_start_seconds": 1e-9,
}
KINDS = ("params", "inputs", "activations")
Maps = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class Placements:
    """By whether the residual stream is sharded over `tp` too. `trace` gives a fresh trace of so many rows."""

    trace: Callable[[int], Traced]
    hardware: Hardware
    pinned: Plan
    tp: int  # what placements over tp are solved for

    @cached_property
    def found(self) -> dict[bool, Maps]:
        mesh = Mesh((("dp", 1), ("ep", 1), ("cp", 1), ("tp", self.tp)))
        pinned = self.pinned.model_copy(
            update={"storage": Plan().storage, "pipeline": None, "budget": {}, "mesh": None}
        )
        best: dict[bool, Maps] = {}
        best_without: Maps = {}
        # Layers that are too small for tp on this hardware are placed as if computing took all the time: the search
        # then says what they lose.
        for hardware in (self.hardware, Hardware.of(SLOW)):
            for candidate in candidate_plans(self.trace(4), mesh, hardware, pinned=pinned, top=5):
                maps: dict[str, dict[str, str]] = {kind: dict(candidate.plan.get(kind, {})) for kind in KINDS}
                if any("tp" in axes_of(text) for text in maps["params"].values()):
                    best.setdefault(any("tp" in axes_of(text) for text in maps["activations"].values()), maps)
                best_without = best_without or maps
            if best:
                break
        if not best:
            return {False: best_without}
        best.setdefault(False, {**best[True], "activations": {}} if True in best else {})
        return best

    def has(self, axis: str) -> bool:
        """Whether something beside the batch is placed over the axis."""
        maps, kept = self.found[False], self.pinned
        texts = maps["inputs" if axis == "cp" else "params"].values()
        said = [a for kind in (kept.params, kept.inputs, kept.activations) for a in kind.values()]
        return any(axis in axes_of(text) for text in texts) or any(axis in a.placement.axes for a in said)

    @property
    def streams(self) -> bool:
        """Whether the residual stream may be sharded over `tp`: sequence parallelism."""
        return True in self.found

    def plan(self, inner: Inner, data: Collection[str]) -> Plan:
        """The plan of a way of placing layers, rows of the batch being divided over the axes `data`."""
        axes = {*data, *(axis for axis in ("ep", "cp", "tp") if getattr(inner, axis) > 1)}
        maps = self.found.get(inner.sequence) or self.found[False]
        written: dict[str, Any] = {}
        for kind in KINDS:
            texts = {pattern: only(text, axes) for pattern, text in maps.get(kind, {}).items()}
            if texts := {pattern: text for pattern, text in texts.items() if axes_of(text)}:
                written[kind] = texts
        return Plan.from_dict(written)


def inner_plan(placements: Placements, inner: Inner, kept: Plan, data: Collection[str] = ("ep",)) -> Plan:
    """The plan of a way of placing layers, with its recomputation, what is kept merged over it."""
    plan = placements.plan(inner, data)
    recompute = Plan.of(recompute=inner.recompute).recompute
    outer = {"mesh": None, "storage": Plan().storage, "pipeline": None, "accumulate": 1, "budget": {}}
    return plan.merge(kept.model_copy(update=outer)).model_copy(update={"recompute": recompute})


def only(text: str, axes: Collection[str]) -> str:
    """A placement's text without other axes. Where data is divided over dp_replicate too, it goes before dp."""
    dims: list[str] = []
    for dim in text.split(","):
        blocks, star, names = dim.strip().rpartition("*")
        every = [part for name in names.split(".") for part in (("dp_replicate", name) if name == "dp" else (name,))]
        left = [name for name in every if name in axes]
        dims.append(f"{blocks}{star}{'.'.join(left)}" if left else "-")
    return ", ".join(dims)


def axes_of(text: str) -> set[str]:
    """The axes that a placement's text names."""
    return {name for dim in text.split(",") for name in dim.strip().rpartition("*")[2].split(".") if name not in "-"}
