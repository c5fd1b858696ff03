"""Recompute: the same numbers bit for bit, as much less memory as reported, and nothing run again that may not be."""

import itertools
import time
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

import shardc
from shardc.cost.flops import COUNTS, flops
from shardc.cost.memory import memory
from shardc.ir.collectives import KINDS, collective, human_bytes
from shardc.ir.graph import Graph, Port, info, op_name, operands, producer, results, type_of
from shardc.ir.storages import storages
from shardc.passes.memory.recompute import Recompute
from shardc.passes.memory.recompute_choice import Call, Storage, Tradeoff, cheapest, fewest_bytes, hull, nothing_again
from shardc.passes.memory.rerun_cost import rerun_cost
from shardc.plan.hardware import hardware
from shardc.runtime.oracle.simulate import simulate
from tests.handmade import mlp, mlp_inputs
from tests.models.zoo import PLANS, make
from tests.replanned import replanned

COLLECTIVE = {"mode": "full", "collectives": True}
DROPOUT = (("dropout", 0.1),)
CASES: list[tuple[str, tuple[tuple[str, Any], ...]]] = [
    ("gpt2", DROPOUT),
    ("gpt2", (*DROPOUT, ("batch", 7), ("seq", 15))),
    ("gpt2_sp", DROPOUT),
    ("llama", ()),
    ("resnet", ()),
]


def compiled(
    name: str, recompute: Any = "none", arguments: Sequence[tuple[str, Any]] = (), **plan: Any
) -> shardc.Program:
    model, batch, loss = make(name.removesuffix("_sp"), **dict(arguments))
    wanted = shardc.Plan.load(PLANS / f"{name}.yaml").merge(
        shardc.Plan.from_dict({"recompute": recompute, "bucket": False, **plan})
    )
    return shardc.compile(model, batch, plan=wanted, loss=loss)


def run(program: shardc.Program) -> tuple[dict[Port, torch.Tensor], int, int]:
    """Outputs, and the most bytes that live tensors of rank 0 hold: beyond inputs, and beyond outputs as well."""
    body = program.body
    storage = storages(body)
    inputs = {storage[n] for n in body.placeholders}
    outputs = {storage[n] for n in body.output_values}
    alive: list[tuple[weakref.ref[torch.Tensor], bool]] = []
    most = activations = 0

    def observe(node: fx.Node, values: Sequence[torch.Tensor]) -> None:
        nonlocal alive, most, activations
        if storage[node] not in inputs:
            alive.append((weakref.ref(values[0]), storage[node] in outputs))
        alive = [(tensor, returned) for tensor, returned in alive if tensor() is not None]
        homes = {
            t.untyped_storage().data_ptr(): (t.untyped_storage().nbytes(), r)
            for w, r in alive
            if (t := w()) is not None
        }
        most = max(most, sum(size for size, _ in homes.values()))
        activations = max(activations, sum(size for size, returned in homes.values() if not returned))

    found = simulate(body, program.inputs(), observe=observe)
    return found, most, activations


@cache
def plain(name: str, arguments: tuple[tuple[str, Any], ...]) -> tuple[shardc.Program, dict[Port, torch.Tensor], int]:
    program = compiled(name, "none", arguments)
    found, _, activations = run(program)
    return program, found, activations


def again(program: shardc.Program) -> list[fx.Node]:
    return [n for n in program.body.calls() if info(n).is_recomputed]


def names_of_collectives(program: shardc.Program) -> list[str]:
    return [info(n).name for n in program.body.calls() if op_name(n.target) in KINDS]


def crossing(body: Graph) -> set[fx.Node]:
    """What layers make in forward and backward reads, by the value whose storage it is."""
    storage = storages(body)
    found = {storage[v].value for n in body.calls() if info(n).phase == "bwd" for v in operands(n)}
    return {v for v in found if v.op != "placeholder" and info(v).phase == "fwd" and info(v).layer}


@pytest.mark.sampled(15)
@pytest.mark.parametrize("mode", ["selective", "full", COLLECTIVE], ids=["selective", "full", "collectives"])
@pytest.mark.parametrize(("name", "arguments"), CASES, ids=lambda v: v if isinstance(v, str) else dict(v).get("batch"))
def test_same_numbers_in_less_memory(name: str, arguments: tuple[tuple[str, Any], ...], mode: Any) -> None:
    before, expected, held = plain(name, arguments)
    program = replanned(before, recompute=mode)
    found, most, activations = run(program)
    assert all(torch.equal(found[port], value) for port, value in expected.items())
    assert activations < 0.9 * held
    assert max(memory(program.body).timeline) == pytest.approx(most, rel=0.05)
    assert again(program)
    if mode is not COLLECTIVE:  # a gather of backward's own may serve what runs again: it has the name that it had
        assert sorted(names_of_collectives(program)) == sorted(names_of_collectives(before))
    if mode == "selective":
        ops = {op_name(n.target) for n in again(program)}
        assert not ops & (set(COUNTS) - {"bmm", "shardc.sdpa"})


@pytest.mark.slow
@pytest.mark.long
def test_full_recompute_of_24_layers() -> None:
    """Late gradients hold what they read of layers that have run again, but only where the peak leaves room."""
    arguments = (("layers", 24), ("batch", 32), *DROPOUT)
    none, expected, _ = plain("gpt2", arguments)
    (_, _, held), (_, most, activations) = (
        run(replanned(none, recompute=mode, overlap={"late_gradients": False})) for mode in ("none", "full")
    )
    assert held >= 5 * activations
    found, late, _ = run(program := replanned(none, recompute="full"))
    report = memory(program.body)
    assert report.stored + late <= 1.05 * (report.stored + most)
    assert max(report.timeline) == pytest.approx(late, rel=0.05)
    assert all(torch.equal(found[port], value) for port, value in expected.items())


def test_full_keeps_the_inputs_of_layers() -> None:
    body = compiled("gpt2", COLLECTIVE, DROPOUT).body
    kept = crossing(body)
    assert {info(v).layer for v in kept} == {"transformer.h.0", "transformer.h.1"}
    for value in kept:
        readers = {info(n).layer for n in body.calls() if info(n).phase == "fwd" and value in operands(n)}
        assert readers - {info(value).layer}


def test_full_keeps_what_collectives_made() -> None:
    made = {op_name(producer(v)[0].target) for v in crossing(compiled("gpt2", "full", DROPOUT).body)}
    assert made & set(KINDS) or "add.Tensor" in made
    assert not made & {"mm", "tanh", "native_layer_norm", "shardc.sdpa", "_softmax", "bmm"}


def test_selective_runs_attention_again_but_keeps_its_output() -> None:
    """As Megatron-LM's does: scores and softmax are large and cheap, the product with v has few elements a FLOP."""
    arguments = (("seq", 2048), ("batch", 2), ("layers", 1), ("heads", 2), *DROPOUT)
    model, batch, _ = make("gpt2", **dict(arguments))
    wanted = shardc.Plan.load(PLANS / "gpt2.yaml").merge(shardc.Plan.of(recompute="selective"))
    program = shardc.compile(model.to("meta"), batch, plan=wanted)
    products = [info(n).name for n in again(program) if op_name(n.target) == "bmm"]
    assert len(products) == 1
    assert {"_softmax", "ge.Scalar"} <= {op_name(n.target) for n in again(program)}
    draws = [info(n).phase for n in program.body.calls() if op_name(n.target) == "shardc.random_uniform"]
    assert draws.count("bwd") == draws.count("fwd") == 4  # the embedding's, and a layer's three


def test_a_model_without_layers_is_one_segment() -> None:
    graph = Recompute("full").run(mlp())
    names = [info(n).name for n in graph.calls()]
    assert {"r.fc.mm", "r.act"} <= set(names)
    assert names.index("r.fc.mm") > names.index("loss.all_reduce")
    expected = simulate(mlp(), mlp_inputs())
    assert all(torch.equal(value, expected[port]) for port, value in simulate(graph, mlp_inputs()).items())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["gpt2", "gpt2_sp"])
def test_gathers_of_backward_serve_what_runs_again(name: str) -> None:
    """ZeRO-3 gathers weights anew in backward, sequence parallelism activations: no gather more, none kept."""
    storage = {"zero": 3, "axes": ["dp"]}
    before = compiled(name, "none", DROPOUT, storage=storage)
    program = replanned(before, recompute="full")
    assert len(program.collectives()) == len(before.collectives())
    expected = simulate(before.body, before.inputs())
    assert all(torch.equal(v, expected[port]) for port, v in simulate(program.body, program.inputs()).items())
    weights = [n for n in crossing(program.body) if n.target is torch.ops.shardc.all_gather.default]
    assert all(len(info(n).type.shape) == 1 for n in weights)  # type: ignore[union-attr]  # biases: backward wants none


def test_the_optimizer_is_left_alone() -> None:
    found: list[tuple[list[str], dict[Port, torch.Tensor]]] = []
    model, batch, _ = make("gpt2", dropout=0.1)
    said = {"clip_grad_norm": 1.0, "storage": {"zero": 2, "axes": ["dp"]}}
    wanted = shardc.Plan.load(PLANS / "gpt2.yaml").merge(shardc.Plan.from_dict(said))
    none = shardc.compile(model, batch, plan=wanted, optimizer=torch.optim.AdamW(model.parameters()))
    for program in (none, replanned(none, recompute="full")):
        updates = [info(n).name for n in program.body.calls() if info(n).phase == "opt"]
        found.append((updates, simulate(program.body, program.inputs())))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[1][1][port], value) for port, value in found[0][1].items())


# ---------------------------------------------------------------------------------------------------- budgets
@pytest.mark.parametrize("shares", [(1.0, 0.6), pytest.param((1.0, 0.8, 0.6, 0.45), marks=pytest.mark.long)])
def test_a_budget_is_kept_with_few_flops(shares: tuple[float, ...]) -> None:
    arguments = (("layers", 4),)
    none, expected, held = plain("gpt2", arguments)
    spent: list[int] = []
    for share in shares:
        program = replanned(none, recompute={"budget": int(share * held)})
        found, _, activations = run(program)
        assert activations <= share * held
        assert not [d for d in program.diagnostics if d.code == "SC214"]
        assert all(torch.equal(found[port], value) for port, value in expected.items())
        spent.append(flops(program.body).total)
    assert spent == sorted(spent)
    assert spent[0] == flops(none.body).total
    full = replanned(none, recompute="full")
    assert spent[shares.index(0.6)] < flops(full.body).total


def test_calls_cost_what_the_hardware_says() -> None:
    machine, body = hardware("h200"), mlp()
    for node in body.calls():
        moved = [*operands(node), *(v for v in results(node) if v is not None)]
        memory_seconds = machine.memory_seconds(sum(type_of(v).local_bytes(body.mesh) for v in dict.fromkeys(moved)))
        if op_name(node.target) == "mm":
            (rows, depth), (_, columns) = (type_of(v).local_shape(body.mesh) for v in operands(node))
            dtype = type_of(node).dtype
            expected = max(memory_seconds, machine.product_seconds(1, rows, columns, depth, dtype))
        elif (sent := collective(body, node)) is not None:
            group = machine.group_of(body.mesh, sent.axes)
            expected = machine.collective_seconds(sent.kind, sent.payload_bytes, group, graph=True)
        else:
            expected = memory_seconds
        assert rerun_cost(body, node, machine) == max(1, round(expected * machine.bf16_flops_per_second))


def test_a_budget_spends_time_and_not_flops() -> None:
    """Where products are quick and memory is slow, products run again; the other way round, what memory bounds."""
    arguments = (("layers", 4),)
    _, _, held = plain("gpt2", arguments)
    machines = {
        "products": {"bf16_flops_per_second": 1e18, "fp32_flops_per_second": 1e18, "memory_bytes_per_second": 1e9},
        "memory": {"bf16_flops_per_second": 1e9, "fp32_flops_per_second": 1e9, "memory_bytes_per_second": 1e15},
    }
    again: dict[str, int] = {}
    for name, machine in machines.items():
        program = compiled("gpt2", {"budget": int(0.6 * held)}, arguments, hardware=machine)
        assert not [d for d in program.diagnostics if d.code == "SC214"]
        again[name] = flops(program.body).total
    assert again["memory"] < again["products"]


def test_an_impossible_budget() -> None:
    program = compiled("gpt2", {"budget": "1 KiB"})
    said = [d for d in program.diagnostics if d.code == "SC214"]
    assert len(said) == 1
    assert said[0].severity == "warning"
    assert "the budget is 1 KiB" in said[0].message
    assert run(program)[2] <= run(replanned(program, recompute="full"))[2]
    with pytest.raises(shardc.ShardcError, match="SC214"):
        compiled("gpt2", {"budget": "1 KiB"}, strict=True)


def test_the_warning_counts_what_the_memory_report_calls_activations() -> None:
    least = compiled("gpt2", {"budget": "1 KiB"})
    held = memory(least.body).row("activations").most
    (said,) = [d for d in least.diagnostics if d.code == "SC214"]
    assert f"activations take {human_bytes(held)} a rank" in said.message
    for budget in (held, held - 1):
        enough = replanned(least, recompute={"budget": budget})
        assert memory(enough.body).row("activations").most == held
        assert ("SC214" in {d.code for d in enough.diagnostics}) == (budget < held)


@st.composite
def tradeoffs(draw: st.DrawFn) -> Tradeoff:
    """Calls in order, each making one or two storages from earlier ones."""
    calls: list[Call] = []
    count = 0
    for _ in range(draw(st.integers(1, 5))):
        reads = draw(st.lists(st.integers(0, count - 1), unique=True, max_size=2)) if count else []
        makes = draw(st.integers(1, 2))
        cost = draw(st.one_of(st.none(), st.integers(0, 9)))
        calls.append(Call(cost, tuple(reads), tuple(range(count, count + makes))))
        count += makes
    made = [Storage(draw(st.integers(0, 9)), draw(st.booleans())) for _ in range(count)]
    return Tradeoff(tuple(calls), tuple(made))


def all_choices(t: Tradeoff) -> list[tuple[int, int]]:
    """(bytes, FLOPs) of every set of storages that one could keep, by trying them all."""
    found: list[tuple[int, int]] = []
    maker = {s: call for call in t.calls for s in call.makes}
    for kept in itertools.product((False, True), repeat=len(t.storages)):
        todo = [s for s, one in enumerate(t.storages) if one.needed and not kept[s]]
        rerun: set[Call] = set()
        while todo:
            call = maker[todo.pop()]
            if call not in rerun:
                rerun.add(call)
                todo += [s for s in call.reads if not kept[s]]
        costs = [call.flops for call in rerun]
        if None not in costs:
            size = sum(one.bytes for one, k in zip(t.storages, kept, strict=True) if k)
            found.append((size, sum(c for c in costs if c is not None)))
    return found


@given(tradeoffs(), st.integers(0, 5), st.integers(0, 5))
def test_a_cut_is_the_best_choice(t: Tradeoff, byte: int, flop: int) -> None:
    choices = all_choices(t)
    found = cheapest(t, byte, flop)
    assert byte * found.bytes + flop * found.flops == min(byte * size + flop * work for size, work in choices)
    assert fewest_bytes(t).bytes == min(size for size, _ in choices)


@given(tradeoffs())
def test_the_hull_is_convex_and_nothing_lies_below_it(t: Tradeoff) -> None:
    points = hull(t)
    assert points[0] == nothing_again(t)
    assert points[-1].bytes == fewest_bytes(t).bytes
    for one, two in itertools.pairwise(points):
        assert one.bytes > two.bytes
        byte, flop = two.flops - one.flops, one.bytes - two.bytes
        line = byte * one.bytes + flop * one.flops
        assert all(byte * size + flop * work >= line for size, work in all_choices(t))


@pytest.mark.long  # how time grows, not what is computed
def test_time_is_linear_in_layers() -> None:
    def seconds(layers: int) -> float:
        graphs: list[Graph] = []
        model, batch, _ = make("gpt2", layers=layers)
        shardc.compile(
            model,
            batch,
            plan=PLANS / "gpt2.yaml",
            watch=lambda p, g, _: graphs.append(g.copy()) if p.name == "combine" else None,
        )
        times: list[float] = []
        for mode in ("full", "full", "full"):
            graph = graphs[0].copy()
            start = time.process_time()
            Recompute(mode).run(graph)
            times.append(time.process_time() - start)
        return min(times)

    assert seconds(8) < 8 * seconds(2)
