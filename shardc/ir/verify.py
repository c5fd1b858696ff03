"""What every graph must be, whatever pass made it: well typed, well named, well formed. (Rules are `passes.verify`'s.)

Each check takes a graph and returns one line a violation. A violation is our own bug, or a program file's: never the
user's. `violations` runs them all; the first finds what would make the others stumble.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx
from torch._ops import OpOverload

from shardc.ir.graph import KEY, Graph, ValueInfo, info, op_name
from shardc.ir.microbatch import crossing
from shardc.ir.schema import find_op, schema_of, yields_one_tensor
from shardc.ir.sums import shared_sums
from shardc.ir.types import TensorType
from shardc.torch_compat import args_of, inputs_of

INPUT_ROLES = {"param", "buffer", "input", "seed", "share", "state", "hyper", "value", "sum"}
OUTPUT_ROLES = {"loss", "grad", "output", "param", "buffer", "state", "value", "sum"}
REDUCTIONS = {"sum", "max", "min", "softmax"}
TENSORS = (fx.Node, int, float, complex)  # torch wraps numbers
VALUES: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "str": (str,),
    "float": (int, float),
    "number": (bool, int, float, complex),
    # torch's dtypes, layouts and memory formats are ints to a schema
    "int": (int, torch.dtype, torch.layout, torch.memory_format),
}
Kind = type | frozenset["Kind"]  # the class of an argument; of a list the set of its items' kinds


# Of a graph the axes of its mesh, and of its nodes what checks of single nodes have read that held. Nothing of it is
# changed in place: as long as it is the same objects, these checks are not made again. A pass changes few nodes.
_held: WeakKeyDictionary[Graph, tuple[tuple[str, ...], dict[fx.Node, tuple[object, ...]]]] = WeakKeyDictionary()


def violations(graph: Graph) -> list[str]:
    """Everything that is wrong with the structure of a graph."""
    changed = _changed(graph)
    if faults := formed(graph, changed):
        return faults
    calls = [node for node in changed if _is_call(node)]
    # Results are declared by a call, and taken by its getitems.
    taken = [value for node in changed if node.target is operator.getitem for value in node.all_input_nodes]
    faults = [
        *types_sound(graph, changed),
        *(line for check in CHECKS for line in check(graph)),
        *arguments_fit(calls),
        *(line for call in dict.fromkeys((*calls, *filter(_is_call, taken))) for line in _results_fit(call)),
    ]
    if not faults:
        axes, held = _held[graph]
        held = {node: changed.get(node) or held[node] for node in _nodes(graph)} if held else changed
        _held[graph] = (axes, held)
    return faults


def _changed(graph: Graph) -> dict[fx.Node, tuple[object, ...]]:
    """The nodes that are not as they were when all held, and what is read of each."""
    if graph not in _held or _held[graph][0] != graph.mesh.names:
        _held[graph] = (graph.mesh.names, {})
    held = _held[graph][1]
    changed: dict[fx.Node, tuple[object, ...]] = {}
    for node in graph.fx.nodes:
        if node.op == "output":
            continue
        known, about = held.get(node), node.meta.get(KEY)
        # One comparison after the other: there are hundreds of thousands of them.
        if (
            known is None
            or known[0] is not about
            or known[1] is not args_of(node)
            or known[2] is not node.target
            or known[3] is not node.kwargs
        ):
            changed[node] = (about, args_of(node), node.target, node.kwargs)
    return changed


def formed(graph: Graph, nodes: Collection[fx.Node] | None = None) -> list[str]:
    """Every node is an input, a call of an op of ours or aten's, a getitem of one, or the one output at the end; of
    some `nodes`, or of all."""
    faults: list[str] = []
    order = list(graph.fx.nodes)
    if not order or order[-1].op != "output" or not isinstance(order[-1].args[0], list | tuple):
        return ["V0 the graph does not end in an output of a tuple"]
    kinds = [node.op for node in order]
    inputs = kinds.count("placeholder")
    if "output" in kinds[:-1] or "placeholder" in kinds[inputs:]:
        first = next(index for index, kind in enumerate(kinds) if kind != "placeholder")
        for index, node in enumerate(order[:-1]):
            if node.op == "output":
                faults.append(f"V0 {node.name} is an output before the end")
            if node.op == "placeholder" and index > first:
                faults.append(f"V0 {node.name} is an input after a call")
    for node in _nodes(graph) if nodes is None else nodes:
        if node.op not in ("placeholder", "call_function"):
            faults.append(f"V0 {node.name} is a {node.op}")
        elif not isinstance(node.meta.get("shardc"), ValueInfo):
            faults.append(f"V0 {node.name} has no ValueInfo")
        elif _is_call(node) and not _known(node.target):
            faults.append(f"V0 {info(node).name} calls {node.target}, which is no op of aten or shardc")
    return faults


def types_sound(graph: Graph, nodes: Collection[fx.Node] | None = None) -> list[str]:
    """V1: in one value, an axis of the mesh shards one atom, once, or is pending; atoms are larger than 1. Of some
    `nodes`, or of all."""
    axes = frozenset(graph.mesh.names)
    faults: list[str] = []
    sound: set[int] = set()  # types by identity, of which equal ones of a graph have few
    for node in _nodes(graph) if nodes is None else nodes:
        about = info(node)
        for type in (about.type, *about.results) if about.results else (about.type,):
            if type is not None and id(type) not in sound:
                if wrong := _type_fault(type, axes):
                    faults.append(f"V1 {about.name}: {type} {wrong}")
                else:
                    sound.add(id(type))
        if not (about.assignment or about.passes):
            continue
        split = [axis for _, over in about.assignment for axis in over] + list(about.passes)
        if not axes.issuperset(split):
            faults.append(
                f"V1 {about.name}: its assignment names axes that the mesh lacks: {sorted(set(split) - axes)}"
            )
        if len(set(split)) != len(split):
            faults.append(f"V1 {about.name}: its assignment uses an axis twice")
    return faults


def names_unique(graph: Graph) -> list[str]:
    """No two nodes have one name, none has none."""
    names = [info(node).name for node in _nodes(graph)]
    if len(set(names)) == len(names) and all(names):
        return []
    counts = Counter(names)
    return [f"the name {name!r} is {count} nodes'" for name, count in counts.items() if count > 1 or not name]


def ports_match(graph: Graph) -> list[str]:
    """One port a placeholder and one an output, with roles that fit, under different names."""
    faults: list[str] = []
    for side, ports, values, roles in (
        ("input", graph.inputs, graph.placeholders, INPUT_ROLES),
        ("output", graph.outputs, graph.output_values, OUTPUT_ROLES),
    ):
        if len(ports) != len(values):
            faults.append(f"{len(values)} {side}s have {len(ports)} ports")
        faults += [f"{side} {p.name!r} has the role {p.role!r}" for p in ports if p.role not in roles]
        counts = Counter((p.role, name) for p in ports for name in {p.name, *p.aliases})
        faults += [f"{count} {side}s are {role} {name!r}" for (role, name), count in counts.items() if count > 1]
    for port, value in zip(graph.outputs, graph.output_values, strict=False):
        if not isinstance(value, fx.Node) or info(value).type is None:  # pyright: ignore[reportUnnecessaryIsInstance]
            faults.append(f"output {port.name!r} is no tensor")
    return faults


def arguments_fit(calls: Iterable[fx.Node]) -> list[str]:
    """Every call gives its op's schema what it asks for, tensors where it says Tensor and there alone."""
    faults: list[str] = []
    for node in calls:
        args = args_of(node)
        if not node.kwargs and _positional_fit(node.target, tuple(map(_kind, args))):
            continue  # most calls: nothing by name, nothing left out
        names = [name for name, _, _ in _arguments(node.target)]
        bound = dict(zip(names, args, strict=False)) | dict(node.kwargs)
        if len(args) > len(names) or not set(node.kwargs) <= set(names[len(args) :]):
            faults.append(f"{info(node).name}: the arguments are not those of {schema_of(node.target)}")
            continue
        for name, kind, required in _arguments(node.target):
            if name not in bound:
                if required:
                    faults.append(f"{info(node).name}: {op_name(node.target)} lacks {name!r}")
            elif not _kind_fits(_kind(bound[name]), kind):
                faults.append(f"{info(node).name}: {name!r} is {bound[name]!r}, the schema wants {kind}")
    return faults


def ordered(graph: Graph) -> list[str]:
    """Values are defined before they are used; calls of several results are used through getitems alone."""
    faults: list[str] = []
    tensors, several = set[fx.Node](), set[fx.Node]()  # what is defined: values of one tensor, calls of several
    for node in graph.fx.nodes:
        read, getitem = inputs_of(node), node.target is operator.getitem
        if not (several if getitem else tensors).issuperset(read):
            for value in read:
                if value not in tensors and value not in several:
                    faults.append(f"{_name(node)} uses {value.name} before it is defined")
                elif getitem is (value in tensors):
                    name = info(value).name
                    how = f"takes a result of {name}, a tensor" if getitem else f"uses {name} whole"
                    faults.append(f"{_name(node)} {how}")
        if node.op != "output":
            (tensors if info(node).type is not None else several).add(node)
    return faults


CHECKS: tuple[Callable[[Graph], list[str]], ...] = (
    names_unique,
    ports_match,
    ordered,
    crossing,
    shared_sums,
)


def _name(node: fx.Node) -> str:
    return "the output" if node.op == "output" else info(node).name


def _is_call(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is not operator.getitem


def _nodes(graph: Graph) -> Iterable[fx.Node]:
    return (node for node in graph.fx.nodes if node.op != "output")


@lru_cache(maxsize=4096)
def _known(target: Any) -> bool:
    return isinstance(target, OpOverload) and find_op(op_name(target)) is target


@lru_cache(maxsize=65536)
def _type_fault(type: TensorType, axes: frozenset[str]) -> str:
    """Few types fill a graph of thousands of values, so each is looked at once."""
    used = [axis for atom in type.atoms for axis in atom.axes] + [axis for axis, _ in type.partial]
    if not axes.issuperset(used):
        return f"names axes that the mesh lacks: {sorted(set(used) - axes)}"
    if len(set(used)) != len(used):
        return "uses an axis twice"
    if any(atom.size == 1 for atom in type.atoms):
        return "has an atom of size 1"
    unknown = {kind for _, kind in type.partial} - REDUCTIONS
    return f"is pending by {sorted(unknown)}" if unknown else ""


def _results_fit(node: fx.Node) -> list[str]:
    """The type or results that a call declares against its schema and its getitems."""
    about = info(node)
    if yields_one_tensor(node.target) != (about.type is not None):  # type: ignore[arg-type]
        return [f"{about.name}: type {about.type} and {len(about.results)} results for {op_name(node.target)}"]
    if about.type is not None:
        return []
    faults: list[str] = []
    read_indices: set[int] = set()
    for user in node.users:
        if user.target is not operator.getitem:
            continue
        index: Any = user.args[1]
        type = info(user).type
        declared = about.results[index] if isinstance(index, int) and 0 <= index < len(about.results) else None
        if declared is None or type is None:
            faults.append(f"{info(user).name} takes result {index} of {about.name}, which is no tensor")
        elif (declared.shape, declared.dtype) != (type.shape, type.dtype):
            faults.append(f"{info(user).name} is {type}, {about.name} declares {declared}")
        if index in read_indices:
            faults.append(f"{info(user).name} takes result {index} of {about.name} a second time")
        read_indices.add(index)
    return faults


@lru_cache(maxsize=4096)
def _arguments(op: OpOverload) -> tuple[tuple[str, str, bool], ...]:
    """Name, type and necessity of each argument of a schema."""
    return tuple((a.name, str(a.type), not a.has_default_value()) for a in schema_of(op).arguments)


@lru_cache(maxsize=65536)
def _positional_fit(op: OpOverload, kinds: tuple[Kind, ...]) -> bool:
    """Do positional arguments of such kinds fit a schema, and leave none out that has no default?"""
    arguments = _arguments(op)
    required = max((i + 1 for i, (_, _, required) in enumerate(arguments) if required), default=0)
    pairs = zip(arguments, kinds, strict=False)
    return required <= len(kinds) <= len(arguments) and all(_kind_fits(kind, wanted) for (_, wanted, _), kind in pairs)


def _kind(value: Any) -> Kind:
    return frozenset(map(_kind, value)) if isinstance(value, list | tuple) else type(value)


def _kind_fits(kind: Kind, wanted: str) -> bool:
    """Is an argument what a schema says? Types that graphs hold little of (generators, storages) are not looked at."""
    if wanted.startswith("Optional["):
        return kind is type(None) or _kind_fits(kind, wanted.removeprefix("Optional[").removesuffix("]"))
    if wanted.startswith("List["):  # `int[2] stride` takes one int for both, and so on
        item = wanted.removeprefix("List[").removesuffix("]")
        return all(_kind_fits(each, item) for each in kind) if isinstance(kind, frozenset) else _kind_fits(kind, item)
    types = TENSORS if wanted == "Tensor" else VALUES.get(wanted)
    if types is None:
        return isinstance(kind, frozenset) or not issubclass(kind, fx.Node)
    return not isinstance(kind, frozenset) and issubclass(kind, types)
