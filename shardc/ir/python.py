"""A graph as Python source: one function, one line a call, that runs as it stands inside a rank's context.

    def step(x, w1, w2):
        fc_mm = aten.mm.default(x, w1)  # f32[4@dp, 12@tp]

Arguments and results are in the order of the graph's ports. Names are the graph's, with underscores for dots.
"""

from __future__ import annotations

import builtins
import keyword
import math
import operator
import re
from typing import Any

import torch
from torch import fx

from shardc.ir.graph import Graph, Port, info, producer
from shardc.ir.schema import yields_one_tensor

RESERVED = {*keyword.kwlist, *dir(builtins), "torch", "aten", "shardc", "register_ops"}


def emit_python(graph: Graph) -> str:
    """Source that defines one function of the graph's name."""
    names = _Names(graph)
    inputs = zip(graph.inputs, graph.placeholders, strict=True)
    outputs = zip(graph.outputs, graph.output_values, strict=True)
    lines = [
        f"# {graph.name!r} for mesh({graph.mesh}), written by shardc. Every rank runs it, on its own shards.",
        "",
        "import torch",
        "",
        "from shardc.ir.schema import register_ops",
        "",
        "register_ops()",
        "aten, shardc = torch.ops.aten, torch.ops.shardc",
        "",
        "",
        f"def {names.function}(",
        *(f"    {names.of[node]},  # {_port(port)}: {info(node).type}" for port, node in inputs),
        "):",
    ]
    phase = "fwd"
    for node in graph.calls():
        if info(node).phase != phase:
            phase = info(node).phase
            lines.append(f"    # {phase}")
        lines.append(f"    {names.call(node)}")
    lines += ["    return (", *(f"        {names.value(value)},  # {_port(port)}" for port, value in outputs), "    )"]
    return "\n".join(lines) + "\n"


def _port(port: Port) -> str:
    return f"{port.role} {port.name!r}"


class _Names:
    """A Python identifier for every value."""

    def __init__(self, graph: Graph) -> None:
        self.taken = set(RESERVED)
        self.function = self.fresh(graph.name)
        self.of: dict[fx.Node, str] = {n: self.fresh(info(n).name) for n in graph.fx.nodes if n.op != "output"}

    def fresh(self, name: str) -> str:
        base = candidate = re.sub(r"\W", "_", re.sub(r"^(?=\d)", "_", name), flags=re.ASCII)
        count = 0
        while candidate in self.taken:
            count += 1
            candidate = f"{base}_{count}"
        self.taken.add(candidate)
        return candidate

    def value(self, node: fx.Node) -> str:
        call, index = producer(node)
        if call is node:
            return self.of[node]
        return self.of[next(u for u in call.users if u.target is operator.getitem and u.args[1] == index)]

    def call(self, node: fx.Node) -> str:
        about = info(node)
        arguments = [self.argument(arg) for arg in node.args]
        arguments += [f"{name}={self.argument(arg)}" for name, arg in node.kwargs.items()]
        right = f"{node.target}({', '.join(arguments)})"
        if yields_one_tensor(node.target):  # type: ignore[arg-type]
            return f"{self.of[node]} = {right}  # {about.type}"
        used = {user.args[1]: user for user in reversed(node.users) if user.target is operator.getitem}
        targets = [self.of[used[i]] if i in used else "_" for i in range(len(about.results))]
        types = [str(info(used[i]).type) if i in used else "_" for i in range(len(about.results))]
        return f"[{', '.join(targets)}] = {right}  # {', '.join(types)}"

    def argument(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self.value(value)
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(self.argument, value))}]"
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        if isinstance(value, torch.device):
            return f'torch.device("{value}")'
        return repr(value)
