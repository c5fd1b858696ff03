"""A graph, a tensor and a diagnostic as plain data (dicts, lists, strings, numbers), and back: what program files hold.

    {"name": "fc.mm", "call": "mm", "args": [{"ref": "x"}, {"ref": "w1"}], "type": "f32[4@dp, 12@tp]"}

Every field of a node's `ValueInfo` survives exactly; those at their default are left out. What is not a number, string
or list in an argument is a dict of one key that says what it is. Ops are looked up by name among aten's and shardc's.
What only compiling needs (seeds, priorities) is not kept.
"""

from __future__ import annotations

import base64
import math
import operator
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any

import torch
from torch import fx

from shardc.ir.diagnostic import Diagnostic, error
from shardc.ir.graph import Graph, Port, Tokens, ValueInfo, info, op_name, set_info
from shardc.ir.mesh import Mesh
from shardc.ir.microbatch import checked_count
from shardc.ir.schema import WORDS, find_op, unfit, word_of
from shardc.ir.types import DTYPE_NAMES, DTYPES, TensorType

Plain = dict[str, Any]
_DEFAULTS: Plain = {f.name: None if f.default is MISSING else f.default for f in fields(ValueInfo)}


def graph_to_plain(graph: Graph) -> Plain:
    nodes = [_node(node) for node in graph.fx.nodes if node.op != "output"]
    assert len({node["name"] for node in nodes}) == len(nodes), "values of one graph have different names"
    alive = set(graph.fx.nodes)
    return {
        "name": graph.name,
        "mesh": mesh_to_plain(graph.mesh),
        "microbatches": graph.microbatches,
        "tokens": None if graph.tokens is None else asdict(graph.tokens),
        "inputs": [asdict(port) for port in graph.inputs],
        "outputs": [asdict(port) for port in graph.outputs],
        "nodes": nodes,
        "returns": [info(value).name for value in graph.output_values],
        # A pass may have erased the value that a module's name stood for.
        "activations": {fqn: info(v).name for fqn, v in graph.activations.items() if v in alive},
    }


def graph_from_plain(data: Plain) -> Graph:
    made = fx.Graph()
    values: dict[str, fx.Node] = {}
    for item in data["nodes"]:
        values[item["name"]] = node = _make(made, item, values)
        set_info(node, _info(item))
    made.output(tuple(values[name] for name in data["returns"]))
    inputs, outputs = ([_port(port) for port in data[side]] for side in ("inputs", "outputs"))
    graph = Graph(made, mesh_from_plain(data["mesh"]), inputs, outputs, data["name"])
    graph.activations = {fqn: values[name] for fqn, name in data["activations"].items()}
    graph.microbatches = checked_count(data["microbatches"])
    graph.tokens = Tokens(**data["tokens"]) if data.get("tokens") else None  # absent from files of before there was one
    return graph


def mesh_to_plain(mesh: Mesh) -> list[Any]:
    return [[name, size] for name, size in mesh.axes]


def mesh_from_plain(data: list[Any]) -> Mesh:
    return Mesh((name, size) for name, size in data)


def tensor_to_plain(tensor: torch.Tensor) -> Plain:
    """Raw little-endian bytes in base64, whatever the dtype."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    dtype = DTYPE_NAMES[tensor.dtype]
    return {"dtype": dtype, "shape": list(tensor.shape), "bytes": base64.b64encode(raw).decode("ascii")}


def tensor_from_plain(data: Plain) -> torch.Tensor:
    dtype, shape = DTYPES[data["dtype"]], data["shape"]
    raw = base64.b64decode(data["bytes"], validate=True)
    if len(raw) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(raw)} bytes are no {data['dtype']} of shape {shape}")
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape) if raw else torch.empty(shape, dtype=dtype)


def diagnostic_to_plain(diagnostic: Diagnostic) -> Plain:
    return {key: value for key, value in asdict(diagnostic).items() if value is not None}


def diagnostic_from_plain(data: Plain) -> Diagnostic:
    return Diagnostic(**data)


def _port(data: Plain) -> Port:
    return Port(data["role"], data["name"], tuple(data["aliases"]), data["trainable"])


# ---------------------------------------------------------------------- nodes
def _node(node: fx.Node) -> Plain:
    about = info(node)
    data: Plain = {"name": about.name}
    if node.target is operator.getitem:
        data["item"] = [info(node.args[0]).name, node.args[1]]  # type: ignore[arg-type]
    elif node.op == "call_function":
        data["call"] = op_name(node.target)
        data["args"] = [_argument(arg) for arg in node.args]
        if node.kwargs:
            data["kwargs"] = {name: _argument(arg) for name, arg in node.kwargs.items()}
    for name, default in _DEFAULTS.items():
        value = getattr(about, name)
        if value != default and name != "name":
            data[name] = _field(value)
    return data


def _field(value: Any) -> Any:
    if isinstance(value, TensorType):
        return str(value)
    return [_field(item) for item in value] if isinstance(value, tuple) else value


def _info(data: Plain) -> ValueInfo:
    known: Plain = {name: _tuples(data[name]) for name in _DEFAULTS if name in data}
    if "type" in known:
        known["type"] = TensorType.parse(known["type"])
    if "results" in known:
        known["results"] = tuple(None if text is None else TensorType.parse(text) for text in known["results"])
    known.setdefault("type", None)
    return ValueInfo(**known)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _make(made: fx.Graph, data: Plain, values: Mapping[str, fx.Node]) -> fx.Node:
    if "item" in data:
        call, index = data["item"]
        return made.call_function(operator.getitem, (values[call], index))
    if "call" not in data:
        return made.placeholder(f"in_{len(values)}")
    op = find_op(data["call"])
    if op is None:
        hint = f"this is torch {torch.__version__}; a program may call ops of torch.ops.aten and torch.ops.shardc only"
        raise error("SC403", f"the program calls '{data['call']}', which is no op here", tensor=data["name"], hint=hint)
    if reason := unfit(op):
        message = f"the program calls '{data['call']}', which {reason}: no program may"
        raise error("SC402", message, tensor=data["name"], hint="a program's ops are functions of tensors")
    args = tuple(_value(arg, values) for arg in data["args"])
    return made.call_function(op, args, {name: _value(arg, values) for name, arg in data.get("kwargs", {}).items()})


# ---------------------------------------------------------------------- arguments
def _argument(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return {"ref": info(value).name}
    if isinstance(value, list | tuple):
        return [_argument(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}  # JSON has no word for it
    if isinstance(value, complex):
        return {"complex": repr(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": DTYPE_NAMES[value]}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    word = word_of(value)
    assert word is not None, f"{value!r} is no argument that a graph can hold"
    return {"torch": word}


def _value(data: Any, values: Mapping[str, fx.Node]) -> Any:
    if isinstance(data, list):
        return [_value(item, values) for item in data]
    if not isinstance(data, dict):
        return data
    ((kind, what),) = data.items()
    match kind:
        case "ref":
            return values[what]
        case "float":
            return float(what)
        case "complex":
            return complex(what)
        case "dtype":
            return DTYPES[what]
        case "device":
            return torch.device(what)
        case "torch":
            return WORDS[what]
        case _:
            raise ValueError(f"'{kind}' is no kind of argument")
