"""Small programs of a model under one way of placing its layers: compiled once each, and read for their costs.

    Inner(tp=8, cp=1, ep=1, sequence=True, recompute="none", rows=1)       the model's few layers, a microbatch of 1 row

What depends on data parallelism, the pipeline and storage is not part of it (`step_costs`), so that a few of these
serve thousands of plans. Traces are shared by all programs whose microbatch has as many rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from shardc.compiler.binding import bind, bind_passes, bind_precision, collect_plan
from shardc.compiler.compiled import compiled
from shardc.compiler.driver import accumulated, distribute, finish_body, localized, single_device
from shardc.compiler.pass_pipeline import Options
from shardc.compiler.request import Request, rows_of
from shardc.cost.call_seconds import call_costs
from shardc.frontend.trace import Traced, trace
from shardc.ir.diagnostic import ShardcError
from shardc.ir.graph import Graph, info, type_of
from shardc.ir.hardware import Hardware
from shardc.ir.mesh import Mesh
from shardc.passes.communication.report_gathers import ReportGathers
from shardc.plan.schema import Plan
from shardc.planner.inner import Inner
from shardc.planner.inner_placement import Placements, inner_plan
from shardc.planner.layer_costs import LayerCosts, layer_costs
from shardc.planner.numbers import Numbers
from shardc.planner.reduced_model import Run, equal_runs, reduced
from shardc.runtime.execute.batch import leaves_of

MICROBATCHES = 2  # of a small program: what runs once a step is told from what runs once a microbatch


@dataclass
class Subject:
    """The model to plan for: a sample batch, a loss, and what the user pins. Costs are found once, and kept."""

    model: nn.Module
    batch: Any
    loss: Callable[[Any, Any], Tensor] | None
    hardware: Hardware
    kept: Plan
    optimizer: Callable[[nn.Module], Any]
    widest: int = 8  # the ranks of tp that placements over it are found for
    runs: tuple[Run, ...] = ()
    known: dict[Inner, LayerCosts | ShardcError] = field(default_factory=dict[Inner, "LayerCosts | ShardcError"])
    traces: dict[int, Traced] = field(default_factory=dict[int, Traced])
    references: dict[int, Graph] = field(default_factory=dict[int, Graph])  # by rows
    sharded: dict[Inner, Graph] = field(default_factory=dict[Inner, Graph])  # without recomputation
    compiles: int = 0

    def __post_init__(self) -> None:
        self.runs = equal_runs(self.model)
        if self.runs:
            try:
                self._traced(1)
            except ShardcError:  # forward asks for a layer by its number: then all of them are traced
                self.runs = ()
                self.__dict__.pop("small", None)

    @cached_property
    def small(self) -> nn.Module:
        return reduced(self.model, self.runs)

    @cached_property
    def placements(self) -> Placements:
        return Placements(self._traced, self.hardware, collect_plan(self.small, self.kept), self.widest)

    def rows(self, count: int) -> Any:
        """The sample batch with so many rows: see `resized`."""
        return resized(self.batch, count)

    def costs(self, inner: Inner) -> LayerCosts | ShardcError:
        """What a microbatch costs under this way; or why the model cannot be placed so.

        Compiled for 1, 4, 16 ... rows; between those a microbatch costs what a line through both neighbours says.
        """
        low = 4 ** (math.floor(math.log(inner.rows, 4) + 1e-9))
        below = self._known(replace(inner, rows=low))
        if inner.rows == low or isinstance(below, ShardcError):
            return below
        above = self._known(replace(inner, rows=4 * low))
        if isinstance(above, ShardcError):
            return above
        if inner not in self.known:
            self.known[inner] = below.blended(above, (inner.rows - low) / (3 * low))
        return self.known[inner]

    def _known(self, inner: Inner) -> LayerCosts | ShardcError:
        if inner not in self.known:
            try:
                self.known[inner] = self._found(inner)
            except ShardcError as refused:
                self.known[inner] = refused
        return self.known[inner]

    def _found(self, inner: Inner) -> LayerCosts:
        body = self.body(inner)
        return layer_costs(body, self.runs, self.hardware, body.mesh)

    def body(self, inner: Inner) -> Graph:
        """The localized body of a small program: what it is before recomputation is kept, and shared by all levels."""
        self.compiles += 1
        plan = collect_plan(self.small, inner_plan(self.placements, inner, self.kept))
        options = self._options(plan, inner.mesh)
        if (placed := replace(inner, recompute="")) not in self.sharded:
            rows = inner.rows * inner.ep
            reference = self._reference(rows).copy()
            reference.mesh = inner.mesh
            bound = bind(plan, self.traces[rows], inner.mesh)
            self.sharded[placed] = distribute(reference, bound, options, last=ReportGathers)
        return finish_body(localized(self.sharded[placed], options), options)

    def _options(self, plan: Plan, mesh: Mesh) -> Options:
        precision, _ = bind_precision(plan)
        reduce = None if precision is None else precision.reduce
        options = Options(strict=plan.strict, verify=False, reduce=reduce)
        return bind_passes(plan, plan.hardware.value.on(mesh), options)

    def _reference(self, rows: int) -> Graph:
        """The normalised step of so many rows a microbatch, which no mesh has divided yet."""
        if rows not in self.references:
            traced, mesh = self._traced(rows), Inner().mesh
            options = self._options(collect_plan(self.small, self.kept), mesh)
            self.references[rows] = accumulated(single_device(traced, mesh, options), MICROBATCHES, options)
        return self.references[rows]

    @cached_property
    def numbers(self) -> Numbers:
        """Bytes of weights, gradients and state, and what the update takes: read off the program of one rank."""
        plan = inner_plan(self.placements, Inner(), self.kept)
        plan = plan.model_copy(update={"accumulate": MICROBATCHES, "pipeline": None, "mesh": Inner().mesh})
        batch, optimizer = self.rows(MICROBATCHES), self.optimizer(self.small)
        request = Request(
            self.small, batch, Inner().mesh, plan, self.loss, optimizer, traced=self._traced(1), checked=False
        )
        body = compiled(request).graphs.body
        sizes: dict[str, int] = {"param": 0, "state": 0}
        elements = tensors = 0
        for port, node in zip(body.inputs, body.placeholders, strict=True):
            if port.role in sizes:
                sizes[port.role] += type_of(node).local_bytes(body.mesh)
            if port.role == "param" and port.trainable:
                elements, tensors = elements + type_of(node).numel(), tensors + 1
        costs = call_costs(body, self.hardware)
        updating = [cost for call, cost in costs.items() if info(call).phase == "opt"]
        seconds = sum(cost.total for cost in updating) / max(1, elements)
        launched = self.hardware.kernel_launch_seconds * sum(c.launches for c in updating) / max(1, tensors)
        stored, precision = sizes["param"] / max(1, elements), bind_precision(self.kept)[0]
        computed = stored if precision is None else precision.compute.itemsize
        return Numbers(stored, computed, stored, sizes["state"] / max(1, elements), seconds, launched)

    def _traced(self, rows: int) -> Traced:
        if rows not in self.traces:
            precision, _ = bind_precision(self.kept)
            self.traces[rows] = trace(
                self.small, self.rows(rows), self.loss, microbatches=MICROBATCHES, precision=precision
            )
        return self.traces[rows].copy()


def resized(batch: Any, rows: int) -> Any:
    """The batch with another dim 0, of every tensor that is as long as the first.

    Numbers that `forward` may ask for, integers, are those of the batch, row after row and from the first again; others
    are on the meta device.
    """
    size = rows_of(batch)

    def change(value: Any) -> Any:
        if isinstance(value, Tensor):
            by_rows = value.dim() > 0 and value.shape[0] == size
            if value.is_floating_point() or value.is_complex() or value.is_meta:
                shape = (rows, *value.shape[1:]) if by_rows else value.shape
                return torch.empty(shape, dtype=value.dtype, device="meta")
            return value[torch.arange(rows, device=value.device) % size] if by_rows else value
        if isinstance(value, Mapping):
            return {key: change(v) for key, v in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(change(v) for v in value))
        if isinstance(value, list | tuple):
            return type(value)(change(v) for v in value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return dataclasses.replace(
                value, **{f.name: change(getattr(value, f.name)) for f in dataclasses.fields(value)}
            )
        return value

    return change(batch)


def elements_a_row(batch: Any) -> int:
    """Tokens of a row: of the first tensor of whole numbers with two dims; 1 where there is none."""
    tensors: Sequence[Tensor] = [leaf for _, leaf in leaves_of(batch) if isinstance(leaf, Tensor)]
    return next((t.shape[1] for t in tensors if t.dim() == 2 and not t.is_floating_point()), 1)
