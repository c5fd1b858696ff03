"""Functions on tensors as graphs of calls, and the single kernel that fuses them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from kernels_triton.generated.op import FUSED
from kernels_triton.ir.kernel import Kernel
from kernels_triton.ir.text import parse
from shardc.ir.graph import Graph, info, operands, update
from shardc.ir.mesh import Mesh
from shardc.ir.types import DTYPE_NAMES
from shardc.passes.fusion.fuse import fuse
from tests.handmade import Builder


def graph_of(function: Callable[..., Any], given: Sequence[Tensor]) -> Graph:
    """Inputs are called x0, x1, ..."""
    traced = make_fx(function)(*[torch.empty_like(x, device="meta") for x in given])
    b, of = Builder(Mesh()), dict[fx.Node, fx.Node]()
    for node in traced.graph.nodes:
        if node.op == "output":
            results = node.args[0] if isinstance(node.args[0], (list, tuple)) else [node.args[0]]
            for at, result in enumerate(results):
                b.output("output", f"y{at}", of[result])
            continue
        value = node.meta["val"]
        kinds = [_kind(one) for one in value] if isinstance(value, (list, tuple)) else []
        if node.op == "placeholder":
            of[node] = b.input(f"x{len(of)}", _kind(value), "input")
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), of.__getitem__)
        of[node] = b.call(node.name, None if kinds else _kind(value), node.target, *args, **kwargs)
        if kinds:
            update(of[node], results=tuple(map(b.type, kinds)))
    return b.graph()


def _kind(value: Tensor) -> str:
    return f"{DTYPE_NAMES[value.dtype]}[{', '.join(map(str, value.shape))}]"


def fused_results(function: Callable[..., Any], given: Sequence[Tensor]) -> tuple[list[Tensor], list[str]]:
    """The results of a function's fused graph, call by call, and the texts of its kernels."""
    graph = fuse(graph_of(function, given))
    found: dict[fx.Node, Any] = {x: given[int(info(x).name[1:])] for x in graph.placeholders}
    for node in graph.fx.nodes:
        if node.op == "call_function":
            kept = {key: arg for key, arg in node.kwargs.items() if key != "device"}  # which is that of the trace
            args, kwargs = fx.map_arg((node.args, kept), found.__getitem__)
            found[node] = node.target(*args, **kwargs)
    return [found[v] for v in graph.output_values], [str(c.args[1]) for c in graph.calls() if c.target is FUSED]


def kernel_of(function: Callable[..., Any], given: Sequence[Tensor]) -> tuple[Kernel, list[Tensor]]:
    """The only kernel of a function, and what it reads."""
    (call,) = (node for node in fuse(graph_of(function, given)).calls() if node.target is FUSED)
    return parse(str(call.args[1])), [given[int(info(x).name[1:])] for x in operands(call)]
