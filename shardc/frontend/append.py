"""Appending to a finished graph what happens at the end of a step: inputs after its inputs, calls before its output."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from shardc.ir.graph import Graph, Port, ValueInfo, info, op_name, set_info, update
from shardc.ir.types import TensorType
from shardc.passes.normalize.decompositions.table import infer

aten = torch.ops.aten


@dataclass
class Append:
    """Appends calls of phase "opt". Their names are `opt.` and the parameter that they belong to."""

    graph: Graph
    last: fx.Node = field(init=False)  # placeholder
    constants: dict[Hashable, fx.Node] = field(default_factory=dict[Hashable, fx.Node])

    def __post_init__(self) -> None:
        self.last = self.graph.placeholders[-1]
        self.end = self.graph.output_node

    def input(self, port: Port, type: TensorType, fqn: str = "") -> fx.Node:
        with self.graph.fx.inserting_after(self.last):
            self.last = node = self.graph.fx.placeholder(f"{port.role}_{len(self.graph.inputs)}")
        set_info(node, ValueInfo(self.graph.unique(port.name), type, fqn=fqn))
        self.graph.inputs = (*self.graph.inputs, port)
        return node

    def call(
        self, name: str, fqn: str, target: Any, *args: Any, type: TensorType | None = None, constant: bool = False,
        **kwargs: Any,
    ) -> fx.Node:  # fmt: skip
        if type is None:
            result_type = infer(target, args, kwargs)
            assert isinstance(result_type, TensorType), f"{target} has several results"
            type = result_type
        with self.graph.fx.inserting_before(self.end):
            node = self.graph.fx.call_function(target, args, kwargs)
        unique_name = self.graph.unique(f"{name}.{op_name(target).removeprefix('shardc.').partition('.')[0]}")
        set_info(node, ValueInfo(unique_name, type, fqn=fqn, phase="opt", constant=constant))
        return node

    def instance(self, body: Graph, values: tuple[fx.Node, ...], name: str) -> list[fx.Node]:
        """Append a copy of a small graph, applied to `values`. Returns its results."""
        of = dict(zip(body.placeholders, values, strict=True))
        self.copies(list(body.calls()), of, f"opt.{name}", module_of(name))
        return [of[node] for node in body.output_values]

    def copies(
        self, calls: Sequence[fx.Node], of: dict[fx.Node, fx.Node], name: str, fqn: str, optimizer: str = ""
    ) -> None:
        """Append copies of calls of another graph. `of` has the copies of what they read, and then theirs too."""
        for node in calls:
            args = fx.map_arg(node.args, of.__getitem__)
            kwargs = fx.map_arg(node.kwargs, of.__getitem__)
            about = info(node)
            key = (node.target, repr((args, kwargs)))
            if about.constant and key in self.constants:
                of[node] = self.constants[key]
                continue
            of[node] = copied = self.call(
                name, fqn, node.target, *args, type=about.type, constant=about.constant, **kwargs
            )
            if optimizer:
                update(copied, optimizer=optimizer)
            if about.constant:
                self.constants[key] = copied

    def cast(self, name: str, fqn: str, value: fx.Node, dtype: torch.dtype) -> fx.Node:
        """The value in the given dtype. Returns the value itself if it has that dtype."""
        type = info(value).type
        assert type is not None
        if type.dtype == dtype:
            return value
        return self.call(name, fqn, aten._to_copy.default, value, dtype=dtype)


def module_of(parameter: str) -> str:
    return parameter.rpartition(".")[0]
