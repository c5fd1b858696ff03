"""A graph, a tensor and a diagnostic as plain data (dicts, lists, strings, numbers), and back: what program files hold.

    {"name": "fc.mm", "call": "mm", "args": [{"ref": "x"}, {"ref": "w1"}], "type": "f32[4@dp, 12@tp]"}

Every field of a node's `ValueInfo` survives exactly; those at their default are left out, and origins are a table of
the graph. A file of before has no such table, and causes as text: `derive_provenance` reads both. What is not a number,
string or list in an argument is a dict of one key that says what it is. Ops are looked up by name among aten's and
shardc's. What only compiling needs (seeds, priorities) is not kept.

What is read is taken for nothing: each field must be of its kind, and of what a file holds beyond that nothing is kept
but an error.
"""

from __future__ import annotations

import base64
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, astuple, fields
from typing import Any, cast, get_args

import torch
from torch import fx

from shardc.ir.derive_provenance import cause_of_text, derive_origins, parameter_of_state
from shardc.ir.diagnostic import CODES, Diagnostic, Severity, ShardcError, error
from shardc.ir.graph import Graph, Phase, Port, Role, Tokens, ValueInfo, info, op_name, set_info, update
from shardc.ir.mesh import Mesh
from shardc.ir.microbatch import checked_count, checked_halves, checked_once
from shardc.ir.provenance import Cause, Derivation, DerivationKind, Requirement, RequirementKind
from shardc.ir.schema import WORDS, find_op, unfit, word_of
from shardc.ir.types import DTYPE_NAMES, DTYPES, TensorType

Plain = dict[str, Any]
_DEFAULTS: Plain = {
    f.name: None if f.default is MISSING else f.default for f in fields(ValueInfo) if f.name != "origin"
}


def graph_to_plain(graph: Graph) -> Plain:
    nodes = [_node(node) for node in graph.fx.nodes if node.op != "output"]
    infos = [info(node) for node in graph.fx.nodes if node.op != "output"]
    assert len({node["name"] for node in nodes}) == len(nodes), "values of one graph have different names"
    alive = set(graph.fx.nodes)
    return {
        "name": graph.name,
        "mesh": mesh_to_plain(graph.mesh),
        "microbatches": graph.microbatches,
        **({"halves": graph.halves} if graph.halves > 1 else {}),
        **({"gathers_once": True} if graph.gathers_once else {}),
        "tokens": None if graph.tokens is None else asdict(graph.tokens),
        "inputs": [asdict(port) for port in graph.inputs],
        "outputs": [asdict(port) for port in graph.outputs],
        "nodes": nodes,
        "origins": {about.name: [about.origin.kind, about.origin.of] for about in infos if about.origin is not None},
        "returns": [info(value).name for value in graph.output_values],
        # A pass may have erased the value that a module's name stood for.
        "activations": {fqn: info(v).name for fqn, v in graph.activations.items() if v in alive},
        **beside(graph),
    }


def beside(graph: Graph) -> Plain:
    """Which values are the gradients that the optimizer consumes, and how inputs are stored; only what there is."""
    alive = set(graph.fx.nodes)
    gradients = [[name, info(node).name] for name, node in graph.gradients.items() if node in alive]
    stored = [[info(node).name, [list(axes) for axes in p]] for node, p in graph.stored.items() if node in alive]
    return {**({"gradients": gradients} if gradients else {}), **({"stored": stored} if stored else {})}


GRAPH = (
    *(
        "name",
        "mesh",
        "microbatches",
        "halves",
        "gathers_once",
        "tokens",
        "inputs",
        "outputs",
        "nodes",
        "origins",
        "returns",
        "activations",
        "gradients",
        "stored",
    ),
)


def graph_from_plain(data: Plain) -> Graph:
    """Raises ShardcError (SC402, SC403) with the instruction that cannot be read, ValueError for all else."""
    fields_known(data, GRAPH)
    fx_graph = fx.Graph()
    values: dict[str, fx.Node] = {}
    for item in listed(data["nodes"]):
        name = text_of(item["name"])
        try:
            if name in values:
                raise ValueError("there are two instructions of this name")
            node = _make(fx_graph, item, values)
            set_info(node, _info(item))
        except ShardcError:
            raise
        except Exception as wrong:
            what = f"the instruction cannot be read ({type(wrong).__name__}: {str(wrong)[:200]})"
            hint = "compile the program anew, and save it"
            raise error("SC402", what, tensor=name, location=str(item.get("source", "")) or None, hint=hint) from wrong
        values[name] = node
    fx_graph.output(tuple(values[text_of(name)] for name in listed(data["returns"])))
    inputs, outputs = ([_port(port) for port in listed(data[side])] for side in ("inputs", "outputs"))
    graph = Graph(fx_graph, mesh_from_plain(data["mesh"]), inputs, outputs, text_of(data["name"]))
    graph.activations = {fqn: values[name] for fqn, name in data["activations"].items()}
    if "origins" in data:
        for name, origin in data["origins"].items():
            if name not in values:
                what = "an origin is given for it, and the program has no such value"
                raise error("SC402", what, tensor=text_of(name), hint="compile the program anew, and save it")
            update(values[name], origin=_derivation(origin))
    else:
        derive_origins(graph)
    graph.microbatches = checked_count(data["microbatches"])
    graph.halves = checked_halves(data.get("halves", 1))
    graph.gathers_once = checked_once(data.get("gathers_once", False))
    graph.tokens = _tokens(data["tokens"]) if data.get("tokens") else None  # absent from files of before there was one
    graph.gradients = {text_of(name): values[value] for name, value in map(texts_of, listed(data.get("gradients", [])))}
    graph.stored = {values[name]: _stored(axes, graph) for name, axes in map(listed, listed(data.get("stored", [])))}
    return graph


def _stored(axes: Any, graph: Graph) -> tuple[tuple[str, ...], ...]:
    """The axes of each dim. Raises ValueError for one that the mesh does not have."""
    stored = tuple(texts_of(dim) for dim in listed(axes))
    if unknown := {axis for dim in stored for axis in dim} - {*graph.mesh.names}:
        raise ValueError(f"an input is stored along {min(unknown)!r}, which is no axis of the mesh")
    return stored


# ---------------------------------------------------------------------- of what kind data must be
def fields_known(data: Any, allowed: Sequence[str]) -> None:
    """ValueError for what is no dict, or has other keys than these."""
    if not isinstance(data, dict):
        raise ValueError(f"{str(data)[:40]!r} is no table")
    if more := data.keys() - set(allowed):
        raise ValueError(f"{', '.join(map(repr, sorted(more)))} is unknown")


def listed(data: Any) -> list[Any]:
    if not isinstance(data, list | tuple):
        raise ValueError(f"{str(data)[:40]!r} is no list")
    return list(cast("Sequence[Any]", data))


def text_of(data: Any) -> str:
    if not isinstance(data, str):
        raise ValueError(f"{str(data)[:40]!r} is no text")
    return data


def texts_of(data: Any) -> tuple[str, ...]:
    return tuple(text_of(item) for item in listed(data))


def whole_of(data: Any) -> int:
    """A count, or a size in bytes."""
    if type(data) is not int or not 0 <= data < 2**63:
        raise ValueError(f"{str(data)[:40]!r} is no whole number from 0")
    return data


def _tokens(data: Plain) -> Tokens:
    fields_known(data, ("input", "ignore", "shift"))
    if type(data["ignore"]) is not int or abs(data["ignore"]) >= 2**63:
        raise ValueError(f"{str(data['ignore'])[:40]} is no token")
    return Tokens(text_of(data["input"]), data["ignore"], whole_of(data["shift"]))


def mesh_to_plain(mesh: Mesh) -> list[Any]:
    return [[name, size] for name, size in mesh.axes]


def mesh_from_plain(data: list[Any]) -> Mesh:
    return Mesh((text_of(name), size) for name, size in map(listed, listed(data)))


def tensor_to_plain(tensor: torch.Tensor) -> Plain:
    """Raw little-endian bytes in base64, whatever the dtype."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    dtype = DTYPE_NAMES[tensor.dtype]
    return {"dtype": dtype, "shape": list(tensor.shape), "bytes": base64.b64encode(raw).decode("ascii")}


def tensor_from_plain(data: Plain) -> torch.Tensor:
    fields_known(data, ("dtype", "shape", "bytes"))
    dtype, shape = DTYPES[data["dtype"]], [whole_of(n) for n in listed(data["shape"])]
    raw = base64.b64decode(data["bytes"], validate=True)
    if len(raw) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(raw)} bytes are no {data['dtype']} of shape {shape}")
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape) if raw else torch.empty(shape, dtype=dtype)


def diagnostic_to_plain(diagnostic: Diagnostic) -> Plain:
    return {key: value for key, value in asdict(diagnostic).items() if value is not None}


def diagnostic_from_plain(data: Plain) -> Diagnostic:
    fields_known(data, tuple(f.name for f in fields(Diagnostic)))
    if data["code"] not in CODES or data.get("severity", "error") not in get_args(Severity):
        raise ValueError(f"{str(data)[:40]} is no diagnostic")
    arguments: Plain = {key: text_of(value) for key, value in data.items()}
    return Diagnostic(**arguments)


def _port(data: Plain) -> Port:
    fields_known(data, ("role", "name", "aliases", "trainable", "parameter"))
    if data["role"] not in get_args(Role) or not isinstance(data["trainable"], bool):
        raise ValueError(f"{str(data)[:80]} is no input or output")
    name = text_of(data["name"])
    derived = parameter_of_state(name) if data["role"] == "state" else ""
    parameter = data.get("parameter", derived)  # absent from files of before
    return Port(data["role"], name, texts_of(data["aliases"]), data["trainable"], text_of(parameter))


def _derivation(data: Any) -> Derivation:
    kind, of = texts_of(data)
    if kind not in get_args(DerivationKind):
        raise ValueError(f"{kind[:40]!r} is no kind of derivation")
    return Derivation(cast(DerivationKind, kind), of)


def _cause(data: Any) -> Cause:
    """A cause of a node, after `_tuples`; a text in a file of before."""
    if isinstance(data, str):
        return cause_of_text(data)
    requirements, through, others = data
    read: list[Requirement] = []
    for kind, *about in map(texts_of, requirements):
        if kind not in get_args(RequirementKind):
            raise ValueError(f"{kind[:40]!r} is no kind of requirement")
        requirement = Requirement(cast(RequirementKind, kind), *about)
        try:
            _ = requirement.axes
        except ShardcError:
            raise ValueError(f"'{requirement.placement[:40]}' is no placement") from None
        read.append(requirement)
    return Cause(tuple(read), text_of(through), whole_of(others))


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
    if isinstance(value, Cause):
        return [[list(astuple(requirement)) for requirement in value.requirements], value.through, value.others]
    return [_field(item) for item in value] if isinstance(value, tuple) else value


def _info(data: Plain) -> ValueInfo:
    present: Plain = {name: _tuples(data[name]) for name in _DEFAULTS if name in data}
    for name, value in present.items():
        if not _KINDS[name](value):
            raise ValueError(f"{name} is {str(value)[:80]!r}")
    if "type" in present:
        present["type"] = TensorType.parse(present["type"])
    if "results" in present:
        present["results"] = tuple(None if text is None else TensorType.parse(text) for text in present["results"])
    if "cause" in present:
        present["cause"] = _cause(present["cause"])
    present.setdefault("type", None)
    return ValueInfo(**present)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _text(value: object) -> bool:
    return isinstance(value, str)


def _texts(value: object) -> bool:
    return isinstance(value, tuple) and all(map(_text, value))


def _pairs(value: object, second: Callable[[object], bool]) -> bool:
    """Pairs of a text and something."""
    pairs = isinstance(value, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value)
    return pairs and all(_text(pair[0]) and second(pair[1]) for pair in cast("tuple[Any, ...]", value))


_KINDS: Mapping[str, Callable[[object], bool]] = {
    **dict.fromkeys(("name", "type", "fqn", "source", "source_text", "optimizer"), _text),
    "cause": lambda value: isinstance(value, str | tuple),
    "results": lambda value: isinstance(value, tuple) and all(v is None or _text(v) for v in value),
    "phase": lambda value: value in get_args(Phase),
    "constant": lambda value: isinstance(value, bool),
    "assignment": lambda value: _pairs(value, _texts),
    "passes": _texts,
    "fallback": lambda value: _pairs(value, _text),
}
assert _KINDS.keys() == _DEFAULTS.keys()


def _make(fx_graph: fx.Graph, data: Plain, values: Mapping[str, fx.Node]) -> fx.Node:
    fields_known(data, (*_DEFAULTS, "item", "call", "args", "kwargs"))
    if "item" in data:
        call, index = data["item"]
        whole_of(index)
        return fx_graph.call_function(operator.getitem, (values[call], index))
    if "call" not in data:
        fields_known(data, tuple(_DEFAULTS))
        return fx_graph.placeholder(f"in_{len(values)}")
    op = find_op(text_of(data["call"]))
    if op is None:
        hint = f"this is torch {torch.__version__}; a program may call ops of torch.ops.aten and torch.ops.shardc only"
        raise error("SC403", f"the program calls '{data['call']}', which is no op here", tensor=data["name"], hint=hint)
    if reason := unfit(op):
        message = f"the program calls '{data['call']}', which {reason}: no program may"
        raise error("SC402", message, tensor=data["name"], hint="a program's ops are functions of tensors")
    args = tuple(_value(arg, values) for arg in listed(data["args"]))
    return fx_graph.call_function(op, args, {name: _value(arg, values) for name, arg in data.get("kwargs", {}).items()})


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
        if type(data) is int and abs(data) >= 2**63:
            raise ValueError("a number has more than 64 bits")
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
