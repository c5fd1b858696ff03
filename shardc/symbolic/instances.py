"""One program for batches of many sizes: compiled at a few of them, and filled with the numbers of any other.

    template    reference and body, with an expression of the extents where compiles differ in a number (`template`)
    guards      what forward asks of sizes (`frontend.size_guards`): an instance is for sizes that answer alike
    calls       those that forward makes of ATen: run with the sizes of an instance, it makes the template's
    instance    the template at one size, checked like a program that was read from a file; kept by size

A size for which a guard does not hold, a shard would be uneven or a number not whole has no instance: the caller
compiles for it. Nor has a model whose forward cannot be run with symbols: it is not known what it asks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shardc.compiler.compiled import Compiled
from shardc.compiler.request import Request
from shardc.frontend.sample_call import Call
from shardc.ir.diagnostic import Diagnostic, ShardcError
from shardc.ir.graph import Graph, info
from shardc.ir.plain import Plain, graph_from_plain, graph_to_plain
from shardc.passes.type_check import type_faults
from shardc.symbolic.calls import Calls
from shardc.symbolic.expression import Fitter, Point
from shardc.symbolic.samples import Samples
from shardc.symbolic.template import expressions, filled, generalised, whole


@dataclass(frozen=True)
class Instance:
    reference: Graph
    body: Graph
    sample: Compiled  # at another size: what of it is no size is this one's too


@dataclass(frozen=True)
class Template:
    """Graphs and calls with expressions of the extents, and one of the compiles that they were taken from."""

    reference: Plain
    body: Plain
    calls: Calls
    sample: Compiled

    @classmethod
    def of(cls, samples: Samples) -> Template:
        """Raises ShardcError (SC232) with what fixes a size."""
        points = [{**point, **samples.axes} for point in samples.points(samples.units, samples.ranges())]
        compiles = [samples.at(point) for point in points]
        fitter = Fitter(points, list(samples.extents))
        reference = generalised([graph_to_plain(c.graphs.reference) for c in compiles], fitter)
        body = generalised([graph_to_plain(c.graphs.body) for c in compiles], fitter)
        if (fixed := _other_constants(compiles)) is not None:
            raise ShardcError(fixed)
        return cls(reference, body, Calls.of(samples, points), compiles[0])


@dataclass(frozen=True)
class Instances:
    """The instances of a request's program, whose template is compiled when it is first needed."""

    samples: Samples
    made: dict[tuple[tuple[str, int], ...], Instance] = field(default_factory=dict[Any, Instance])
    compiled: list[Point] = field(default_factory=list[Point])  # the sizes, one at most, that went without a template

    @classmethod
    def of(cls, request: Request) -> Instances:
        """Raises ShardcError (SC208) for symbols that the batch does not have."""
        return cls(Samples.of(request))

    @cached_property
    def template(self) -> Template | Diagnostic:
        """Or what stands against one."""
        try:
            return Template.of(self.samples)
        except ShardcError as wrong:
            return wrong.diagnostics[0]

    def is_single(self, batch: Any) -> bool:
        """Is this the only size that was asked for up to now? To compile it alone takes less than the template does. A
        guard that is against an instance makes it none."""
        request = self.samples.request
        sizes = self.samples.sizes_of(Call(request.model, batch, request.loss))
        if "template" in vars(self) or self._against(sizes) is not None:
            return False
        if not self.compiled:
            self.compiled.append(sizes)
        return self.compiled == [sizes]

    def at(self, batch: Any) -> Instance | Diagnostic:
        """The instance for a batch; or what stands against one, with the line of the model that does."""
        request = self.samples.request
        sizes = self.samples.sizes_of(Call(request.model, batch, request.loss))
        key = tuple(sorted(sizes.items()))
        if key in self.made:
            return self.made[key]
        if (why := self._against(sizes)) is not None:
            return why
        if isinstance(self.template, Diagnostic):
            return self.template
        template, like = self.template, self.template.sample.graphs
        try:
            instance = Instance(
                filled_graph(template.reference, sizes, like.reference),
                filled_graph(template.body, sizes, like.body),
                template.sample,
            )
        except ValueError as wrong:
            return Diagnostic("SC232", f"no program has these sizes ({_said(sizes)}): {wrong}")
        if (why := template.calls.other(self.samples, sizes)) is not None:
            return why
        if faults := [*type_faults(instance.body), *type_faults(instance.reference)]:
            return faults[0].diagnostic("it is compiled for itself")
        if (name := _uneven(instance.body, like.body)) is not None:
            return Diagnostic("SC232", f"%{name} would be uneven for {_said(sizes)}", hint="it is compiled for itself")
        self.made[key] = instance
        return instance

    def _against(self, sizes: Point) -> Diagnostic | None:
        if unknown := self.samples.guards.unknown("each size is compiled for itself"):
            return unknown
        if odd := [name for name, count in self.samples.parts.items() if sizes[name] % count]:
            return Diagnostic("SC232", f"{odd[0]}={sizes[odd[0]]} is not so many equal microbatches")
        guard = self.samples.guards.broken(sizes)
        return None if guard is None else guard.diagnostic(sizes)


def filled_graph(template: Plain, sizes: Point, like: Graph) -> Graph:
    """A graph of these sizes, which knows of its values what the other knows. Raises ValueError where a number is not
    whole, or an atom would have one element, which types do not have."""
    for expression in {e for e in expressions(_types(template)) if not e.is_constant}:
        if whole(expression, sizes) < 2:
            raise ValueError(f"{expression} is {whole(expression, sizes)}")
    graph = graph_from_plain(filled(template, sizes))
    by_name = {info(node).name: node for node in graph.fx.nodes if node.op != "output"}
    graph.gradients = {
        name: by_name[info(node).name] for name, node in like.gradients.items() if info(node).name in by_name
    }
    graph.stored = {
        by_name[info(node).name]: placed for node, placed in like.stored.items() if info(node).name in by_name
    }
    return graph


def _types(template: Plain) -> list[Any]:
    return [[node.get("type"), node.get("results")] for node in template["nodes"]]


def _uneven(body: Graph, like: Graph) -> str | None:
    """The first value with an atom that axes divide evenly in one body, and not in the other."""
    for value, other in zip(body.values(), like.values(), strict=True):
        type, known = info(value).type, info(other).type
        assert type is not None
        assert known is not None
        for a, b in zip(type.atoms, known.atoms, strict=True):
            if a.axes and a.uneven(body.mesh) != b.uneven(like.mesh):
                return info(value).name
    return None


def _other_constants(compiles: Sequence[Compiled]) -> Diagnostic | None:
    """What says that a constant tensor of the program differs from size to size."""
    first = compiles[0].traced.constants
    for other in compiles[1:]:
        for name, value in first.items():
            if not _same(value, other.traced.constants.get(name)):
                return Diagnostic("SC232", f"a constant of the program, {name}, depends on the size of the batch")
    return None


def _same(a: Tensor, b: Tensor | None) -> bool:
    return b is not None and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def _said(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())
