"""Every op that has a sharding rule has a time: of its examples, and of products and attention by their shapes."""

import math
import operator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

import shardc
from examples.llama import llama
from shardc.cost.call_seconds import KINDS, CallCost, _Costs, call_costs
from shardc.cost.flops import node_flops
from shardc.ir.attention_rings import SO_FAR
from shardc.ir.graph import Graph, Port, ValueInfo, results, set_info, type_of, update
from shardc.ir.hardware import DEFAULT, Hardware
from shardc.ir.mesh import Mesh
from shardc.ir.ops.attention_rows import SDPA_ROWS
from shardc.ir.ops.host_copies import ENDS
from shardc.ir.schema import given
from shardc.ir.storages import layouts
from shardc.ir.types import TensorType
from shardc.plan.hardware import named
from shardc.rules import all_rules
from shardc.rules.registry import OpRule
from tests.handmade import Builder, aten
from tests.rules.harness import as_list, call_of

WITH_EXAMPLES = [rule for rule in sorted(all_rules(), key=lambda r: str(r.op)) if rule.examples and not rule.ragged]
FLAT = Hardware(memory_bytes_per_second=1e12, bf16_flops_per_second=1e12, fp32_flops_per_second=1e12)
OPS = torch.ops.shardc


def graph_of(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Graph, fx.Node]:
    """A graph of one call, all of whose results are used."""
    graph, inputs = fx.Graph(), list[Port]()

    def value(tensor: torch.Tensor) -> fx.Node:
        node = graph.placeholder(f"x{len(inputs)}")
        set_info(node, ValueInfo(node.name, TensorType.of(tensor)))
        inputs.append(Port("input", node.name))
        return node

    def lifted(argument: Any) -> Any:
        if isinstance(argument, (list, tuple)):
            return [lifted(item) for item in argument]
        return value(argument) if isinstance(argument, torch.Tensor) else argument

    lifted_args, lifted_kwargs = tuple(map(lifted, args)), {name: lifted(x) for name, x in kwargs.items()}
    results = op(*args, **kwargs)
    node = graph.call_function(op, lifted_args, lifted_kwargs)
    if isinstance(results, torch.Tensor):
        set_info(node, ValueInfo("y", TensorType.of(results)))
        values = [node]
    else:
        types = tuple(TensorType.of(r) if isinstance(r, torch.Tensor) else None for r in as_list(results))
        set_info(node, ValueInfo("y", None, types))
        values = []
        for index, type in enumerate(types):
            if type is not None:
                values.append(graph.call_function(operator.getitem, (node, index)))
                set_info(values[-1], ValueInfo(f"y{index}", type))
    graph.output(tuple(values))
    return Graph(graph, Mesh(one=1), inputs, [Port("output", f"y{i}") for i in range(len(values))]), node


@pytest.mark.parametrize("hardware", [FLAT, named("h200-nvlink"), DEFAULT], ids=["flat", "h200", "default"])
@pytest.mark.parametrize("fuse", [False, True])
def test_a_call_costs_what_it_costs_by_itself(hardware: Hardware, fuse: bool) -> None:
    """The costs of a graph, in which equal calls are looked at once, are those of its calls one by one."""
    plan = {"params": {"**.q_proj.weight": "tp, -"}, "inputs": {"*": "dp, -"}, "fuse": fuse}
    body = shardc.compile(*llama(layers=3), mesh="dp=2,tp=2", plan=plan).body
    known, one_by_one = layouts(body), dict[fx.Node, CallCost]()
    costs = _Costs(body, hardware, body.mesh, known)
    for node in body.calls():
        if costs.cache is not None:
            costs.cached = costs._use(node, costs.cache)
        cost = costs.of(node)
        one_by_one[node] = costs._called(node, cost) if costs.calls.first else cost
    assert call_costs(body, hardware, known=known) == one_by_one
    assert len({id(cost) for cost in call_costs(body, hardware).values()}) < len(one_by_one) or costs.calls.first


def test_an_operand_that_is_read_twice_is_not_two() -> None:
    costs: list[float] = []
    for order in (("a", "b"), ("b", "a")):

        def joined(b: Builder, order: tuple[str, ...] = order) -> fx.Node:
            x, y = (b.input(name, "f32[4096, 64]", "input") for name in ("x", "y"))
            pairs = {"a": [x, y], "b": [x, x]}
            nodes = {name: b.call(name, "f32[4096, 128]", aten.cat.default, pairs[name], 1) for name in order}
            update(y, type=type_of(x))  # one object
            update(nodes["a"], type=type_of(nodes["b"]))
            return nodes["b"]

        costs.append(cost_of(joined).seconds)
    assert costs[0] == costs[1] == pytest.approx(3 * 4096 * 64 * 4 / 1e12)


@pytest.mark.parametrize("rule", WITH_EXAMPLES, ids=lambda rule: str(rule.op))
def test_every_op_has_a_time(rule: OpRule) -> None:
    for example in rule.examples:
        call = call_of(rule, example, 0)
        try:
            graph, node = graph_of(call.op, call.args, call.kwargs)
        except (NotImplementedError, RuntimeError) as missing:
            pytest.skip(f"cannot be run here: {str(missing).partition(chr(10))[0]}")
        for hardware in (FLAT, named("h200-nvlink")):
            cost = call_costs(graph, hardware)[node]
            assert cost.kind in KINDS
            assert math.isfinite(cost.total)
            assert cost.total >= 0
            assert cost.launches > 0 or cost.total == 0, cost
            waits = call.op in ENDS  # for a copy, which has a time
            assert cost.total > 0 or waits or cost.kind in ("view", "product", "attention"), cost  # of no elements


def cost_of(build: Any, hardware: Hardware = FLAT) -> CallCost:
    b = Builder(Mesh(tp=2))
    node = build(b)
    b.output("output", "y", node)
    graph = b.graph()
    return call_costs(graph, hardware)[node]


def test_a_kernel_takes_as_long_as_what_it_reads_and_writes() -> None:
    def of(target: Any, result: str, *operands: str, more: tuple[Any, ...] = ()) -> CallCost:
        return cost_of(
            lambda b: b.call("y", result, target, *(b.input(f"x{i}", t) for i, t in enumerate(operands)), *more)
        )

    x = 1024 * 512 * 4
    assert of(aten.relu.default, "f32[1024, 512]", "f32[1024, 512]").seconds == pytest.approx(2 * x / 1e12)
    assert of(aten.add.Tensor, "f32[1024, 512]", "f32[1024, 512]", "f32[512]").seconds == pytest.approx(
        (2 * x + 512 * 4) / 1e12
    )
    # Sharded: what one rank has.
    assert of(aten.relu.default, "f32[1024@tp, 512]", "f32[1024@tp, 512]").seconds == pytest.approx(x / 1e12)
    # Long rows of a softmax are read three times, short ones once.
    assert of(aten._softmax.default, "f32[8, 4096]", "f32[8, 4096]", more=(1, False)).seconds == pytest.approx(
        4 * 8 * 4096 * 4 / 1e12
    )
    assert of(aten._softmax.default, "f32[8, 512]", "f32[8, 512]", more=(1, False)).seconds == pytest.approx(
        2 * 8 * 512 * 4 / 1e12
    )
    # Of a table, the rows that are picked.
    assert of(aten.embedding.default, "f32[64, 512]", "f32[50000, 512]", "i64[64]").seconds == pytest.approx(
        (2 * 64 * 512 * 4 + 64 * 8) / 1e12
    )
    transposed = of(aten.transpose.int, "f32[512, 1024]", "f32[1024, 512]", more=(0, 1))
    assert (transposed.kind, transposed.total, transposed.launches) == ("view", 0.0, 0)


def test_products_by_their_shapes() -> None:
    def linear(b: Builder) -> fx.Node:
        x, w = b.input("x", "f32[4, 64, 32]"), b.input("w", "f32[96@tp, 32]")
        return b.call("y", "f32[4, 64, 96@tp]", OPS.linear.default, x, w)

    assert cost_of(linear).seconds == pytest.approx(2 * 256 * 48 * 32 / 1e12)
    assert cost_of(linear).kind == "product"

    def wgrad(b: Builder) -> fx.Node:
        g, x = b.input("g", "f32[4, 64, 96@tp]"), b.input("x", "f32[4, 64, 32]")
        return b.call("y", "f32[96@tp, 32]", OPS.linear_wgrad.default, g, x)

    assert cost_of(wgrad).seconds == pytest.approx(2 * 48 * 32 * 256 / 1e12)


@pytest.mark.parametrize(
    ("dtype", "share"),
    [(torch.float32, 1), (torch.complex64, 4), (torch.complex128, 8), (torch.int64, 1)],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_products_of_what_is_not_real_have_a_time(dtype: torch.dtype, share: int) -> None:
    """A complex product is four real ones; those of float64 are half as fast here."""
    x, w = torch.ones(8, 16, dtype=dtype), torch.ones(16, 32, dtype=dtype)
    half = replace(FLAT, fp64_flops_per_second=5e11)
    for op, operands in ((aten.mm.default, (x, w)), (aten.bmm.default, (x[None], w[None]))):
        graph, node = graph_of(op, operands, {})
        assert call_costs(graph, half)[node].seconds == pytest.approx(share * 2 * 8 * 16 * 32 / 1e12)
        cost = call_costs(graph, named("h200-nvlink"))[node]
        assert cost.kind == "product"
        assert 0 < cost.total < 1e-3


def test_a_collective_packs_what_does_not_lie_in_rows_of_its_ranks() -> None:
    """Of dim 1, chunks are put in order afterwards: the gathered tensor is read and written once more, nothing else."""
    for dim, copied in ((0, 0), (1, 2 * 64 * 64 * 4 / 1e12)):
        sharded = "f32[64@tp, 64]" if dim == 0 else "f32[64, 64@tp]"
        local = [32, 64] if dim == 0 else [64, 32]

        def gather(b: Builder, sharded: str = sharded, local: list[int] = local, dim: int = dim) -> fx.Node:
            x = b.input("x", sharded)
            return b.call("y", "f32[64, 64]", OPS.all_gather.default, x, ["tp"], local, dim, 64, [64, 64])

        cost = cost_of(gather)
        assert cost.kind == "collective"
        assert cost.after == pytest.approx(copied)
        assert cost.before == 0  # it is sent as it lies
        assert cost.seconds == pytest.approx(20e-6 + 64 * 64 * 4 / 2 / 5e11)


def test_ops_that_compute_for_longer_than_they_move() -> None:
    """By the table's seconds of an element, and no less than by memory."""
    quick, slow = (Hardware.of({"elements": {"gelu": each}, "memory_bytes_per_second": 1e12}) for each in (1e-13, 1e-9))

    def gelu(b: Builder) -> fx.Node:
        return b.call("y", "f32[64, 64]", aten.gelu.default, b.input("x", "f32[64, 64]", "input"))

    def neg(b: Builder) -> fx.Node:
        return b.call("y", "f32[64, 64]", aten.neg.default, b.input("x", "f32[64, 64]", "input"))

    moving = 2 * 4 * 64 * 64 / 1e12
    assert cost_of(gelu, quick).seconds == pytest.approx(moving)
    assert cost_of(gelu, slow).seconds == pytest.approx(1e-9 * 64 * 64)
    assert cost_of(neg, slow).seconds == pytest.approx(moving)


def test_gelu_by_its_approximation() -> None:
    """By the entry of its approximation where there is one, in forward and backward."""
    both = Hardware.of({"elements": {"gelu": 1e-9, "gelu_tanh": 5e-9, "gelu_backward": 2e-9}})

    def forward(b: Builder) -> fx.Node:
        return b.call("y", "f32[64, 64]", aten.gelu.default, b.input("x", "f32[64, 64]", "input"), approximate="tanh")

    def backward(b: Builder) -> fx.Node:
        x = b.input("x", "f32[64, 64]", "input")
        return b.call("y", "f32[64, 64]", aten.gelu_backward.default, x, x, approximate="tanh")

    assert cost_of(forward, both).seconds == pytest.approx(5e-9 * 64 * 64)
    assert cost_of(backward, both).seconds == pytest.approx(2e-9 * 64 * 64), "as exact gelu: no entry is known"


def test_parts_of_attention_are_put_together_in_memory() -> None:
    """A ring's steps write their results, and read those of its steps before."""
    model, batch = llama()
    program = shardc.compile(model, batch, mesh="cp=2", plan={"inputs": {"*": "-, cp"}})
    costs, steps = call_costs(program.body, FLAT), set[int]()
    for node in program.body.calls():
        if node.target not in SO_FAR:
            continue
        arguments, backward = given(node), node.target is not SDPA_ROWS
        keys, width = (type_of(arguments[name]).shape for name in ("k", "q"))
        computed = FLAT.attention_seconds(
            node_flops(program.body, node),
            torch.float32,
            backward=backward,
            sequence=keys[-2] // 2,
            width=width[-1],
        )
        made = sum(type_of(v).local_bytes(program.mesh) for v in results(node) if v is not None)
        known = [arguments[name] for name in SO_FAR[node.target] if arguments.get(name) is not None]
        assert bool(known) == (arguments["step"] != (1 if backward else 0))
        before = sum(type_of(v).local_bytes(program.mesh) for v in known)
        assert costs[node].seconds == pytest.approx(computed + (2 * made + before) / 1e12)
        steps.add(arguments["step"])
    assert steps == {0, 1}


class Causal(torch.nn.Module):
    """An attention that is causal, of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).square().mean()


@pytest.mark.parametrize(("attention", "kernels"), [("all_gather", [3, 3]), ("ring", [1, 1, 1, 1])])
def test_each_tile_of_attention_starts_anew(attention: str, kernels: list[int]) -> None:
    """Of a sequence whose first and last parts a rank has: both diagonals, and what the last one sees before them."""
    start, rate = 1e-3, {"dtypes": ["float32"], "flops_per_second": 1e12}
    rates = [{**rate, "backward": backward} for backward in (False, True)]
    plan = {"inputs": {"*": "-, cp"}, "context": {"attention": attention, "balance": "zigzag"}}
    body = shardc.compile(Causal(), torch.randn(2, 16, 8), mesh="cp=2", plan=plan).body
    at_once, started = (
        call_costs(body, Hardware.of({"attention": [{**rate, "start_seconds": s} for rate in rates]}))
        for s in (0.0, start)
    )
    calls = [node for node in body.calls() if node.target in SO_FAR]
    more = [started[node].seconds - at_once[node].seconds for node in calls]
    assert more == [pytest.approx(count * start) for count in kernels]
    launches = [1 + count for count in kernels[: len(kernels) // 2]]  # and what puts them together
    assert [at_once[node].launches for node in calls] == [*launches, *(3 * n for n in launches)]
