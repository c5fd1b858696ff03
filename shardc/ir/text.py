"""The text of a graph, which `parse` reads back: one line a call, named as in the model, its type at the end.

    graph @step mesh(dp=2, tp=2) {
      %w = param "mlp.weight" aliases("head.weight") : f32[64, 32@tp]
      %x = input "x" : f32[8@dp, 64]
      %mlp.mm = mm(%x, %w) {m: dp, n: tp} : f32[8@dp, 32@tp]
      %ln.0, _, _ = native_layer_norm(%mlp.mm, ...) : f32[8@dp, 32], f32[8, 1], _
    bwd:
      %d.mlp.out = shardc.all_reduce(%g, op="sum", axes=["tp"]) : f32[8@dp, 64]    # 4 KiB/rank, bwd, model.py:11
      return loss "loss" = %l, grad "mlp.weight" = %d.mlp.mm
    }

A step of several microbatches says so in the head, `mesh(dp=2, tp=2) microbatches(4)`; if each is two interleaved
halves, `halves(2)`; if the first gathers weights for all of them, `gathers(1)`; and if their losses count by tokens,
`tokens("labels", ignore=-100, shift=1)`. A call of several results lists them all: `_` for one that nothing uses, with
the type `_` if it is no tensor. A label (`fwd:`, `bwd:`, `opt:`) sets the phase of the lines below it. After a call
come, where they are set, the assignment `{factor: axes}`, `passes axes` and `fallback {axis: factor}`; after the type
`!const`. Defaults and devices are left out. Comments are for the reader: fqn, source and cause survive in JSON, not
here. What does survive is the executable graph (ops, arguments, types, ports, phases, assignments), and the text
itself.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from shardc.ir.collectives import collective, human_bytes
from shardc.ir.fold import Between, Line, folded_text
from shardc.ir.graph import Graph, Phase, Port, ValueInfo, info, op_name, producer
from shardc.ir.layers import layer_of
from shardc.ir.schema import given, schema_of, word_of
from shardc.ir.types import TensorType

BARE_NAME = re.compile(r"[A-Za-z0-9_.\-/]+")
WIDTH = 120
IN_MODULES = ("param", "buffer", "state", "grad")  # roles of what has the name of a module's tensor


def print_graph(
    graph: Graph, *, comments: bool = True, keep: Callable[[fx.Node], bool] | None = None, fold: bool = False
) -> str:
    """The graph as text; with `keep`, only the calls that it is true of, and with `fold`, equal layers once: either is
    for reading and not for `parse`."""
    text: list[str] = []
    between: Between = {}
    for lines in sections(graph, comments, keep):
        text += folded_text(lines, between) if fold else [line.text for line in lines]
    return "\n".join([*text, "}"]) + "\n"


def sections(
    graph: Graph, comments: bool = True, keep: Callable[[fx.Node], bool] | None = None
) -> Iterator[list[Line]]:
    """The lines of head and inputs, of each phase, and of what is returned, each with the layer that it belongs to."""
    repeated = f" microbatches({graph.microbatches})" if graph.microbatches > 1 else ""
    repeated += f" halves({graph.halves})" if graph.halves > 1 else ""
    repeated += " gathers(1)" if graph.gathers_once else ""
    by = graph.tokens
    counted = "" if by is None else f" tokens({json.dumps(by.input)}, ignore={by.ignore}, shift={by.shift})"
    lines = [Line(f"graph @{_bare(graph.name)} mesh({graph.mesh}){repeated}{counted} {{")]
    ports = dict(zip(graph.placeholders, graph.inputs, strict=True))
    phase: Phase = "fwd"
    source = ""
    for node in graph.fx.nodes:
        if node.op == "output" or node.target is operator.getitem:
            continue
        if keep is not None and node.op != "placeholder" and not keep(node):
            continue
        about = info(node)
        if about.phase != phase:
            phase = about.phase
            yield lines
            lines = [Line(f"{phase}:")]
        if node.op == "placeholder":
            port = ports[node]
            text = f"  {value_name(node)} = {_port(port)} : {about.type}{_marks(about.constant)}"
            lines.append(Line(text, _layer(port)))
            continue
        if node.prev.op == "placeholder":
            yield lines
            lines = []
        line = f"  {_call(node)}"
        if comments and (note := _comment(graph, node, source)):
            line = f"{line}    # {' '.join(note.split())}"  # a file's name may hold anything
            source = about.source
        lines.append(Line(line, layer_of(about.fqn)))
    yield lines
    returned = [(p, f"{_port(p)} = {value_name(v)}") for p, v in zip(graph.outputs, graph.output_values, strict=True)]
    flat = f"  return {', '.join(text for _, text in returned)}"
    if len(flat) <= WIDTH:
        yield [Line(flat)]
    else:
        commas = [*("," for _ in returned[1:]), ""]
        items = [Line(f"    {t}{comma}", _layer(p)) for (p, t), comma in zip(returned, commas, strict=True)]
        yield [Line("  return"), *items]


def _layer(port: Port) -> str:
    """The layer that a parameter, a buffer, or what belongs to one lies in."""
    return layer_of(port.name.partition(":")[0]) if port.role in IN_MODULES else ""


def value_name(value: fx.Node) -> str:
    """`%h.0.mlp.mm`; a name with other characters is quoted. Several getitems of one result go by one name."""
    call, index = producer(value)
    if call is not value:
        value = next(u for u in call.users if u.target is operator.getitem and u.args[1] == index)
    return f"%{_bare(info(value).name)}"


def format_argument(value: Any) -> str:
    """An argument as the text writes it; the parser's `argument` is its inverse."""
    if isinstance(value, fx.Node):
        return value_name(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(format_argument, value))}]"
    if isinstance(value, str):
        return json.dumps(value)
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    word = word_of(value)
    assert word is not None, f"{value!r} is no argument that a graph can hold"
    return word


def _bare(name: str) -> str:
    return name if BARE_NAME.fullmatch(name) else json.dumps(name)


def _port(port: Port) -> str:
    aliases = f" aliases({', '.join(map(json.dumps, port.aliases))})" if port.aliases else ""
    return f"{port.role} {json.dumps(port.name)}{aliases}{'' if port.trainable else ' frozen'}"


def _marks(constant: bool) -> str:
    return " !const" if constant else ""


def _call(node: fx.Node) -> str:
    about = info(node)
    targets, types = _results(node)
    parts = [f"{', '.join(targets)} = {op_name(node.target)}({', '.join(_arguments(node))})", *_placed(about)]
    return f"{' '.join(parts)} : {', '.join(types)}{_marks(about.constant)}"


def _results(node: fx.Node) -> tuple[list[str], list[str]]:
    """Names and types of a call's results; the types that nothing uses are the declared ones."""
    about = info(node)
    if about.type is not None:
        return [value_name(node)], [str(about.type)]
    used: dict[int, fx.Node] = {}
    for user in node.users:
        if user.target is operator.getitem:
            used.setdefault(user.args[1], user)  # type: ignore[arg-type]
    names = [value_name(used[i]) if i in used else "_" for i in range(len(about.results))]
    types: list[TensorType | None] = [
        info(used[i]).type if i in used else declared for i, declared in enumerate(about.results)
    ]
    return names, ["_" if t is None else str(t) for t in types]


def _placed(about: ValueInfo) -> list[str]:
    parts: list[str] = []
    if about.assignment:
        parts.append(_braced({name: ".".join(axes) or "-" for name, axes in about.assignment}))
    if about.passes:
        parts.append(f"passes {'.'.join(about.passes)}")
    if about.fallback:
        parts.append(f"fallback {_braced(dict(about.fallback))}")
    return parts


def _braced(entries: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{key}: {value}" for key, value in entries.items()) + "}"


def _arguments(node: fx.Node) -> list[str]:
    """By position what needs no name to be understood: leading tensors, and up to two further required ones of aten."""
    arguments = schema_of(node.target).arguments
    required = [arg for arg in arguments if not arg.has_default_value() and not arg.kwarg_only]
    leading = next((i for i, arg in enumerate(required) if "Tensor" not in str(arg.type)), len(required))
    plain = node.target.namespace == "aten" and len(required) - leading <= 2  # type: ignore[union-attr]
    unnamed = {arg.name for arg in (required if plain else required[:leading])}
    defaults = {arg.name: arg.default_value for arg in arguments if arg.has_default_value()}
    written: list[str] = []
    for i, (name, value) in enumerate(given(node).items()):
        text = "" if isinstance(value, torch.device) else format_argument(value)
        if not text or (name in defaults and text == _default(defaults[name])):
            continue
        in_place = name in unnamed and arguments[i].name == name and len(written) == i
        written.append(text if in_place else f"{name}={text}")
    return written


def _default(value: Any) -> str:
    return "" if isinstance(value, torch.device) else format_argument(value)


def _comment(graph: Graph, node: fx.Node, source: str) -> str:
    """Bytes and phase of a collective; the user's line where it is another than the one last written."""
    about = info(node)
    transfer = collective(graph, node)
    if transfer is None:
        return about.source if about.source != source else ""
    return ", ".join(filter(None, (f"{human_bytes(transfer.bytes_per_rank)}/rank", about.phase, about.source)))
