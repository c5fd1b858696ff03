"""Random graphs for round trips: calls drawn from a table, types drawn freely. They are well formed, not meaningful."""

from __future__ import annotations

import operator
from typing import Any, get_args

import torch
from hypothesis import strategies as st
from torch import fx

from shardc.ir.blocks import Blocks
from shardc.ir.derive_provenance import parameter_of_state
from shardc.ir.graph import Graph, Port, ValueInfo, set_info
from shardc.ir.mesh import Mesh
from shardc.ir.provenance import Cause, Derivation, DerivationKind, Requirement
from shardc.ir.schema import register_ops, yields_one_tensor
from shardc.ir.types import DTYPE_NAMES, Atom, TensorType

register_ops()
aten, lib = torch.ops.aten, torch.ops.shardc
MESH = Mesh((("dp", 2), ("tp:0", 2), ("tp:1", 2)))

# op -> arguments, in which "x" stands for some value; kwargs in a last dict
CALLS: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.mm.default, ("x", "x")),
    (aten.add.Tensor, ("x", 1.5)),
    (aten.add.Tensor, ("x", "x", {"alpha": 2})),
    (aten.mul.Tensor, ("x", float("inf"))),
    (aten.where.self, ("x", "x", "x")),
    (aten.cat.default, (["x", "x", "x"], 1)),
    (aten.sum.dim_IntList, ("x", [0, -1], True)),
    (aten.sum.dim_IntList, ("x", [], False, {"dtype": torch.float32})),
    (aten._to_copy.default, ("x", {"dtype": torch.bfloat16, "device": torch.device("cpu")})),
    (aten.clone.default, ("x", {"memory_format": torch.contiguous_format})),
    (aten.full.default, ([2, 3], float("nan"), {"dtype": torch.bool, "pin_memory": False})),
    (aten.slice.Tensor, ("x", 1, None, 9223372036854775807)),
    (aten.index.Tensor, ("x", [None, "x"])),
    (aten.gelu.default, ("x", {"approximate": 'a "quoted" \\ tanh\n'})),
    (aten.convolution.default, ("x", "x", None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)),
    (aten.native_layer_norm.default, ("x", [32], "x", None, 1e-05)),
    (aten.split.Tensor, ("x", 2, 1)),
    (aten.topk.default, ("x", 3)),
    (lib.all_reduce.default, ("x", "sum", ["dp"])),
    (lib.all_gather.default, ("x", ["tp:0", "tp:1"], [4, 2], 1, 8, [4, 8])),
    (lib.gather_blocks.default, ("x", ["dp"], [4], 0, [3, 4], [1, 1], [7], ["", "dp"])),
    (lib.axis_offset.default, (["dp"], [4])),
    (lib.sdpa.default, ("x", "x", "x", None, True, 0.125, False)),
]

names = st.text('ab0._:/ "\\é', min_size=1, max_size=6)
words = st.sampled_from(["", "h.0.mlp", "model.py:11", 'a "quoted"\n# line', "é"])
axes = st.lists(st.sampled_from(MESH.names), unique=True, max_size=2).map(tuple)
some_axes = st.lists(st.sampled_from(MESH.names), unique=True, min_size=1, max_size=3).map(tuple)
requirements = st.one_of(
    st.builds(Requirement, st.just("annotation"), words, st.sampled_from(["-, tp", "3*dp", "dp.tp, -"]), words),
    st.builds(Requirement, st.just("storage"), placement=words),
    st.builds(Requirement, st.just("text"), words),
)
causes = st.builds(Cause, st.lists(requirements, max_size=2).map(tuple), words, st.integers(0, 2))
factors = st.sampled_from(["m", "k", "~0", "n.1", "?5", "3"])


@st.composite
def types(draw: st.DrawFn) -> TensorType:
    free = list(MESH.names)

    def take() -> tuple[str, ...]:
        count = draw(st.integers(0, len(free)))
        return tuple(free.pop() for _ in range(count))

    atoms = st.lists(st.sampled_from([0, 2, 3, 17, 64, Blocks.parse("8*2|-3|1"), Blocks.parse("5|7~tp")]), max_size=3)
    dims = tuple(tuple(Atom(size, take()) for size in draw(atoms)) for _ in range(draw(st.integers(0, 3))))
    partial = tuple(sorted((axis, draw(st.sampled_from(["sum", "max"]))) for axis in take()))
    return TensorType(draw(st.sampled_from(list(DTYPE_NAMES))), dims, partial)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    made = fx.Graph()
    taken: set[str] = set()
    phase = "fwd"

    def describe(node: fx.Node, type: TensorType | None, **fields: Any) -> fx.Node:
        name = draw(names.filter(lambda n: n not in taken))
        taken.add(name)
        fields |= {"fqn": draw(words), "source": draw(words), "source_text": draw(words), "cause": draw(causes)}
        fields["origin"] = draw(st.none() | st.builds(Derivation, st.sampled_from(get_args(DerivationKind)), words))
        set_info(node, ValueInfo(name, type, phase=phase, **fields))  # type: ignore[arg-type]
        return node

    inputs: list[Port] = []
    values: list[fx.Node] = []
    for i in range(draw(st.integers(1, 3))):
        values.append(describe(made.placeholder(f"in_{i}"), draw(types()), constant=draw(st.booleans())))
        role = draw(st.sampled_from(["param", "buffer", "input", "seed", "state"]))
        aliases = tuple(f"{i}{alias}" for alias in draw(st.lists(words, max_size=2, unique=True)))
        name = f"{i}.{draw(words)}"
        parameter = parameter_of_state(name) if role == "state" else ""
        inputs.append(Port(role, name, aliases, draw(st.booleans()), parameter))

    def argument(item: Any) -> Any:
        if isinstance(item, list):
            return [argument(one) for one in item]
        return draw(st.sampled_from(values)) if item == "x" else item

    for op, template in draw(st.lists(st.sampled_from(CALLS), max_size=8)):
        phase = draw(st.sampled_from(["fwd", "bwd", "opt"]))
        kwargs = template[-1] if isinstance(template[-1], dict) else {}
        node = made.call_function(op, tuple(argument(a) for a in template if a is not kwargs), kwargs)
        placed: dict[str, Any] = {
            "assignment": tuple(draw(st.dictionaries(factors, axes, max_size=3)).items()),
            "passes": draw(axes),
            "fallback": tuple(draw(st.dictionaries(st.sampled_from(MESH.names), factors, max_size=2)).items()),
            "constant": draw(st.booleans()),
        }
        if yields_one_tensor(op):
            values.append(describe(node, draw(types()), **placed))
            continue
        found = draw(st.lists(st.none() | types(), min_size=1, max_size=4))
        describe(node, None, results=tuple(None if t is None else t.replicated() for t in found), **placed)
        for i, type in enumerate(found):
            if type is not None and draw(st.booleans()):
                item = made.call_function(operator.getitem, (node, i))
                values.append(describe(item, type, constant=placed["constant"]))
    returned = draw(st.lists(st.sampled_from(values), max_size=3))
    made.output(tuple(returned))
    outputs = [Port("grad", f"{i}") for i in range(len(returned))]
    graph = Graph(made, MESH, inputs, outputs, draw(names))
    graph.activations = {f"m{i}": value for i, value in enumerate(returned)}
    return graph
