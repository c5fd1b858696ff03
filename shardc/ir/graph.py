"""The IR: an `fx.Graph` whose nodes carry one `ValueInfo` each. The only file that touches `node.meta`.

Values are fx nodes that hold one tensor: placeholders, single-result calls, and `getitem`s of a
multi-result call. Names come from the module's FQN (`h.0.attn.c_attn.linear`, in backward
`d.h.0.attn.c_attn.linear_dgrad`), so an edit in layer 0 does not renumber layer 1.

Shapes in types are global until `localize`; from then on, arguments are per-rank and the types
still say which global tensor the value is a shard of. Passes edit a graph in place and return it.
Longer than 400 lines: who reads or writes `node.meta` stands here.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass, replace
from functools import lru_cache
from itertools import takewhile
from typing import Any, Literal

from torch import fx

from shardc.ir.diagnostic import Diagnostic
from shardc.ir.layers import layer_of
from shardc.ir.mesh import Mesh
from shardc.ir.provenance import NO_CAUSE, Cause, Derivation, Requirement
from shardc.ir.types import Axes, TensorType
from shardc.ir.units import Units
from shardc.torch_compat import add_node, args_of, kwargs_of

KEY = "shardc"
DERIVED = "shardc.derived"
Phase = Literal["fwd", "bwd", "opt"]


@dataclass(frozen=True, slots=True)
class ValueInfo:
    """What the compiler knows of one node."""

    name: str
    type: TensorType | None  # None on a multi-result call: its getitems carry the types
    results: tuple[TensorType | None, ...] = ()  # of a multi-result call; None where it yields no tensor
    fqn: str = ""
    source: str = ""  # "model.py:11" of the user's line
    source_text: str = ""
    phase: Phase = "fwd"
    constant: bool = False  # computed from no input: the same on every rank until sliced
    assignment: tuple[tuple[str, Axes], ...] = ()  # factor of the op's rule -> axes it is split over
    passes: Axes = ()  # axes on which the op runs on pending sums
    fallback: tuple[tuple[str, str], ...] = ()  # axis -> factor the op takes if its pending sums are resolved before it
    cause: Cause = NO_CAUSE  # what asks for the placement, or for the collective
    origin: Derivation | None = None  # the node that this one was derived from
    optimizer: str = ""  # of a call that works on whole matrices: the optimizer whose update it is part of

    @property
    def layer(self) -> str:
        """The layer that the module lies in; "" for none. It follows from the FQN (`ir/layers.py`)."""
        return layer_of(self.fqn)

    @property
    def is_recomputed(self) -> bool:
        """Does it run a call of forward again, or belong to such a call?"""
        return self.origin is not None and self.origin.kind == "recomputed"

    @property
    def is_repeated(self) -> bool:
        """Does it run a call of the graph before it once more, in backward or of a second half?"""
        return self.origin is not None and self.origin.kind in ("recomputed", "half")


# "share" is what a microbatch's loss counts in the step's (Tokens, below). "value" and "sum" are of a pipeline's parts:
# what one makes of a microbatch for another, and what a step adds up.
Role = Literal["param", "buffer", "input", "seed", "share", "state", "hyper", "loss", "grad", "output", "value", "sum"]


@dataclass(frozen=True, slots=True)
class Port:
    """One input or output of a graph: its role and the user's name for it."""

    role: Role = field(hash=False)
    name: str  # the hash is that of the name, which a string computes once: each step returns tensors by port
    aliases: tuple[str, ...] = field(default=(), hash=False)
    trainable: bool = field(default=True, hash=False)
    parameter: str = field(default="", hash=False)  # of the optimizer's state: the parameter that it belongs to


@dataclass(frozen=True, slots=True)
class Seed:
    """An annotation bound to a value's atoms."""

    placement: tuple[Axes, ...]  # a flat atom
    fixed: tuple[bool, ...]  # a flat atom: propagation may not add to it
    priority: int  # 0 parameters and inputs, 1 activations and outputs
    cause: Requirement  # the annotation
    copied: Axes = ()  # asked for, but the ranks along them share one kv-head: ops on it are done by each of them


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a microbatch's share in the step's loss goes by: how many elements of a batch's input are not `ignore`, the
    first `shift` positions of its last dim left out."""

    input: str
    ignore: int = -100
    shift: int = 0


class Graph:
    """A joint graph with typed values and named inputs and outputs.

    `inputs` pairs with the placeholders in order, `outputs` with the elements of the output node.
    """

    def __init__(
        self, graph: fx.Graph, mesh: Mesh, inputs: Sequence[Port], outputs: Sequence[Port], name: str = "step"
    ):
        self.fx = graph
        self.mesh = mesh
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.name = name
        self.microbatches = 1  # of a step: see ir.microbatch
        self.halves = 1  # of a microbatch, interleaved: see passes/communication/split_batch.py
        self.gathers_once = False  # weights, by the first microbatch for all of them: see ir.microbatch
        self.tokens: Tokens | None = None  # what their losses are weighted by; None: the step's is their mean
        self.units: tuple[Units, ...] = ()  # of equal layers that it has few of: see ir/equal_layers.py
        self.activations: dict[str, fx.Node] = {}  # module FQN -> the value it outputs
        self.gradients: dict[str, fx.Node] = {}  # parameter -> its gradient, where the optimizer consumes it
        self.stored: dict[fx.Node, tuple[Axes, ...]] = {}  # input -> how it is stored, where ops use it otherwise
        self.seeds: dict[fx.Node, Seed] = {}  # annotated values
        self.priorities: dict[fx.Node, dict[tuple[int, str], int]] = {}  # value -> (flat atom, axis) -> of its seed
        self.diagnostics: list[Diagnostic] = []
        self._names: dict[str, int] = {}
        for node in graph.nodes:
            if KEY in node.meta:
                self._names.setdefault(info(node).name, 0)

    # ------------------------------------------------------------------ reading
    @property
    def is_forward_only(self) -> bool:
        """Is it a program for evaluation: without gradients, and without an update?"""
        return all(port.role not in ("grad", "param", "state") for port in self.outputs)

    @property
    def placeholders(self) -> list[fx.Node]:
        return list(takewhile(lambda n: n.op == "placeholder", self.fx.nodes))  # they lead

    @property
    def output_node(self) -> fx.Node:
        return next(iter(reversed(self.fx.nodes)))

    @property
    def output_values(self) -> list[fx.Node]:
        return list(self.output_node.args[0])  # type: ignore[arg-type]

    def calls(self) -> Iterator[fx.Node]:
        """Operations in topological order, getitems left out."""
        return (n for n in self.fx.nodes if n.op == "call_function" and n.target is not operator.getitem)

    def calls_of(self, target: Any) -> list[fx.Node]:
        """The calls of one op in topological order, found without a walk over all calls."""
        return self.fx.find_nodes(op="call_function", target=target)

    def values(self) -> Iterator[fx.Node]:
        """Nodes that hold one tensor, in topological order."""
        return (n for n in self.fx.nodes if n.op in ("placeholder", "call_function") and info(n).type is not None)

    def input_nodes(self) -> dict[str, fx.Node]:
        """The placeholder of each input, by the port's name."""
        return {p.name: n for p, n in zip(self.inputs, self.placeholders, strict=True)}

    def by_name(self, name: str) -> fx.Node:
        """The node of that name; KeyError when there is none."""
        for node in self.fx.nodes:
            if node.op != "output" and info(node).name == name:
                return node
        raise KeyError(name)

    def copy(self, table: dict[fx.Node, fx.Node] | None = None) -> Graph:
        """An independent graph; node infos are frozen and shared. `table` is given the copy of each node."""
        table = {} if table is None else table
        copied = Graph(fx.Graph(), self.mesh, self.inputs, self.outputs, self.name)
        for node in self.fx.nodes:
            if node.op != "output":
                copied.append_copy(node, table)
                copied._names.setdefault(info(node).name, 0)
        copied.finish_copy(self, table)
        return copied

    def emptied(self) -> tuple[Graph, dict[fx.Node, fx.Node]]:
        """A graph with this one's inputs, and with its names taken, but without calls; and the copies of the inputs. It
        is for `append_copy` and other insertions, and then for `finish_copy`."""
        emptied = Graph(fx.Graph(), self.mesh, self.inputs, self.outputs, self.name)
        emptied._names = {info(node).name: 0 for node in self.fx.nodes if node.op != "output"}
        table: dict[fx.Node, fx.Node] = {}
        for node in self.placeholders:
            emptied.append_copy(node, table)
        return emptied, table

    def append_copy(self, node: fx.Node, table: dict[fx.Node, fx.Node]) -> fx.Node:
        """Add a copy of another graph's node at the end. `table` has the copies of its operands, and then its own."""
        args = fx.map_arg(args_of(node), table.__getitem__)
        kwargs = fx.map_arg(kwargs_of(node), table.__getitem__) if kwargs_of(node) else {}
        table[node] = copied = add_node(self.fx, node.op, node.target, args, kwargs, node.name)
        copied.meta[KEY] = node.meta[KEY]
        return copied

    def finish_copy(self, other: Graph, table: Mapping[fx.Node, fx.Node]) -> None:
        """Return what another graph does, and know of values what it knows."""
        self.fx.output(fx.map_arg(other.output_node.args[0], lambda n: table[n]))
        # Passes may have erased values that these tables still hold.
        self.activations = {name: table[n] for name, n in other.activations.items() if n in table}
        self.gradients = {name: table[n] for name, n in other.gradients.items() if n in table}
        self.stored = {table[n]: placement for n, placement in other.stored.items()}
        self.seeds = {table[n]: seed for n, seed in other.seeds.items() if n in table}
        self.priorities = {table[n]: p for n, p in other.priorities.items() if n in table}
        self.diagnostics = list(other.diagnostics)
        self.microbatches, self.halves, self.tokens = other.microbatches, other.halves, other.tokens
        self.gathers_once, self.units = other.gathers_once, other.units

    # ------------------------------------------------------------------ editing
    def unique(self, name: str) -> str:
        """`name`, or `name_1`, `name_2`, ... if taken."""
        if name not in self._names:
            self._names[name] = 0
            return name
        while True:
            self._names[name] += 1
            candidate = f"{name}_{self._names[name]}"
            if candidate not in self._names:
                self._names[candidate] = 0
                return candidate

    @property
    def taken(self) -> dict[str, int]:
        """The names that are taken, those of erased values too, each with the number of the last that `unique` made."""
        return dict(self._names)

    @taken.setter
    def taken(self, names: Mapping[str, int]) -> None:
        self._names = dict(names)

    def call(
        self,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        *,
        like: fx.Node,
        type: TensorType | None,
        name: str | None = None,
        **fields: Any,
    ) -> fx.Node:
        """Insert a call at the insertion point; its info is that of `like` with `type`, `name`, `fields` changed."""
        node = insert(self.fx, target, args, kwargs)
        set_info(node, self.info_like(like, target, type, name, **fields))
        return node

    def info_like(
        self, like: fx.Node, target: Any, type: TensorType | None, name: str | None = None, **fields: Any
    ) -> ValueInfo:
        """The info of a new call of `target`: that of `like` with `type`, `name` and `fields` changed.

        The default name is that of `like`'s module followed by the op's. What belongs to a recomputed call is
        recomputed; of the other kinds of origin the caller says which the new call has.
        """
        base = info(like)
        origin = base.origin if base.is_recomputed else None
        if name is None:
            prefix = f"d.{base.fqn}" if base.phase == "bwd" and base.fqn else "d" if base.phase == "bwd" else base.fqn
            name = ".".join(filter(None, (prefix, op_name(target).removeprefix("shardc.").partition(".")[0])))
        fields = {"assignment": (), "passes": (), "fallback": (), "results": (), "origin": origin, **fields}
        return replace(base, name=self.unique(name), type=type, **fields)

    def replace_value(self, old: fx.Node, new: fx.Node) -> None:
        """Let one value stand for another to its readers, and where outputs of modules and gradients are named."""
        old.replace_all_uses_with(new, lambda user: user is not new)
        for table in (self.activations, self.gradients):
            table.update({name: new for name, value in table.items() if value is old})

    def erase_dead(self) -> None:
        """Remove calls that nothing uses; placeholders stay."""
        for node in reversed(list(self.fx.nodes)):
            if node.op == "call_function" and not node.users:
                if node.target is operator.getitem:
                    keep_atoms(producer(node)[0], node)
                self.fx.erase_node(node)


# ---------------------------------------------------------------------- node helpers
def insert(graph: fx.Graph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
    """A call, at the graph's insertion point."""
    return add_node(graph, "call_function", target, args, kwargs or {})


def info(node: fx.Node) -> ValueInfo:
    return node.meta[KEY]


def info_of(values: Iterable[Any]) -> ValueInfo:
    """As `ValueInfo(*values)`, of all fields: that sets each by a call, and so takes four times as long."""
    draft: Any = _Draft(*values)
    draft.__class__ = ValueInfo
    return draft


def set_info(node: fx.Node, value: ValueInfo) -> None:
    node.meta.clear()
    node.meta[KEY] = value


def update(node: fx.Node, **fields: Any) -> None:
    """Replace some fields of the node's info."""
    known = dict(zip(FIELDS, FIELD_VALUES(node.meta[KEY]), strict=True))  # `replace` takes three times as long
    node.meta[KEY] = info_of({**known, **fields}.values())


def derived(node: fx.Node) -> dict[str, Any]:
    """What was derived from a node, to be kept with it. It may refer to nodes: a dict with weak keys would then keep
    the graph, and so itself."""
    return node.meta.setdefault(DERIVED, {})


def type_of(node: fx.Node) -> TensorType:
    """The type of a value; asserts that the node is one."""
    type = node.meta[KEY].type
    assert type is not None, f"{info(node).name} is a multi-result call, not a value"
    return type


def keep_atoms(call: fx.Node, value: fx.Node) -> None:
    """Note on a call how a result lies that nothing reads any more: its rule is laid over all results. The result may
    be that of a call which this one is a copy of."""
    declared, type = list(info(call).results), type_of(value)
    declared[producer(value)[1]] = type.place(type.placement)
    update(call, results=tuple(declared))


LITERALS = {int, float, bool, str, type(None)}
FIELDS = tuple(field.name for field in fields(ValueInfo))
FIELD_VALUES = operator.attrgetter(*FIELDS)
_Draft: Any = make_dataclass("_Draft", FIELDS, slots=True)  # laid out as a ValueInfo is, and not frozen


def operands(node: fx.Node) -> list[fx.Node]:
    """Tensor operands in order of appearance in args then kwargs, lists flattened, repeats kept."""
    collected: list[fx.Node] = []
    for arg in args_of(node):
        if type(arg) is fx.Node:
            collected.append(arg)
        elif type(arg) not in LITERALS:
            _collect(arg, collected)
    if kwargs := kwargs_of(node):
        for arg in kwargs.values():
            _collect(arg, collected)
    return collected


def _collect(arg: Any, collected: list[fx.Node]) -> None:
    if isinstance(arg, fx.Node):
        collected.append(arg)
    elif isinstance(arg, (list, tuple)):
        for item in arg:  # pyright: ignore[reportUnknownVariableType]
            if type(item) not in LITERALS:  # pyright: ignore[reportUnknownArgumentType]
                _collect(item, collected)


def replace_operands(node: fx.Node, new: Sequence[fx.Node]) -> None:
    """Put `new` in the places that `operands` lists."""
    if all(a is b for a, b in zip(operands(node), new, strict=True)):
        return
    it = iter(new)
    node.args = tuple(fx.map_arg(a, lambda _: next(it)) for a in node.args)
    node.kwargs = {k: fx.map_arg(a, lambda _: next(it)) for k, a in node.kwargs.items()}


def results(node: fx.Node) -> list[fx.Node | None]:
    """The tensors a call yields, in order; None where nothing uses one. Results that are no tensor are left out."""
    if node.meta[KEY].type is not None:
        return [node]
    by_index: dict[int, fx.Node] = {}
    for user in node.users:
        assert user.target is operator.getitem, f"{info(node).name} used whole"
        by_index[int(user.args[1])] = user  # type: ignore[arg-type]
    return [by_index.get(i) for i, t in enumerate(info(node).results) if t is not None]


def producer(value: fx.Node) -> tuple[fx.Node, int]:
    """The call that yields a value and the position among its results; a placeholder yields itself."""
    if value.op == "call_function" and value.target is operator.getitem:
        return value.args[0], int(value.args[1])  # type: ignore[return-value,arg-type]
    return value, 0


@lru_cache(maxsize=65536)
def op_name(target: Any) -> str:
    """`mm`, `add.Tensor`, `shardc.all_reduce`: the short name an op prints with."""
    if target is operator.getitem:
        return "getitem"
    namespace, _, short_name = str(target).partition(".")
    short_name = short_name.removesuffix(".default")
    return short_name if namespace == "aten" else f"{namespace}.{short_name}"


def cited(call: fx.Node) -> str:
    """How an error names a call: `%act (mlp.py:6)`."""
    about = info(call)
    return f"%{about.name}" + (f" ({about.source})" if about.source else "")
