"""Experts with a capacity: what ranks drop, and that loss and gradients are those of a model in which it weighs 0."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import shardc
from shardc.api import Program
from shardc.cli.summary import host_reads
from shardc.cost.memory import memory
from shardc.ir.collectives import collectives
from shardc.ir.diagnostic import ShardcError
from shardc.ir.graph import Port, type_of
from shardc.ir.mesh import Mesh
from shardc.ir.ops.exchange import DISPATCH_ROWS, EXCHANGE_COUNTS
from shardc.ir.ops.expert_capacity import LIMIT_ROWS, capacity_of, layout_of
from shardc.ir.parse import parse
from shardc.ir.text import print_graph
from shardc.ir.types import TensorType
from shardc.runtime.oracle.verify import reference_step
from tests.experts import routed
from tests.passes.test_dispatch import CHOSEN, GATHERED, MESHES, TOKENS, Moved, mean_of_squares, moves, routings

ZIGZAG = {  # of the tokens of a row, `~`
    "zigzag": ("ep=2", "-, ep~", {"*": "ep"}),
    "zigzag, batch over dp": ("dp=2, ep=2", "dp, ep~", {"*": "ep"}),
    "zigzag, experts whole": ("cp=2", "-, cp~", {"*": "-"}),
}
PLACES = {
    **MESHES,
    **{name: case[:3] for name, case in GATHERED.items()},
    "experts whole": ("dp=2", "dp", {"*": "-"}),
    **ZIGZAG,
}


def length_of(name: str) -> int:
    """How many tokens a row has: two chunks a rank in a zigzag, of which the last is shorter."""
    return 7 if name in ZIGZAG else TOKENS


@cache
def program(name: str, factor: float = 1.0, batch: int = 4, experts: int = 4, dispatch: str = "all_to_all") -> Program:
    torch.manual_seed(0)
    mesh, tokens, placements = PLACES[name]
    sample = routed(torch.randint(0, experts, (batch, length_of(name), CHOSEN)))
    params = {f"experts.{key}": placement for key, placement in placements.items()}
    said = {"dispatch": dispatch, "capacity": factor}
    inputs = dict.fromkeys(sample, tokens.replace("~", ""))
    plan: dict[str, Any] = {"mesh": mesh, "params": params, "inputs": inputs, "experts": said}
    plan |= {"context": {"balance": "zigzag"}} if name in ZIGZAG else {}
    return shardc.compile(Moved(experts, bias=True), sample, plan=plan, loss=mean_of_squares)


# ------------------------------------------------------------------------------------------ what it must equal
def ranks_of(size: int, axes: str, mesh: Mesh) -> list[int]:
    """For each index of a dim, the part of it that a rank has: axis by axis, the first is the major one."""
    if axes.endswith("~"):
        ranks = mesh.size(axes[:-1])
        chunk = -(-size // (2 * ranks))
        return [min(i // chunk, 2 * ranks - 1 - i // chunk) for i in range(size)]
    places, parts = list(range(size)), [0] * size
    for axis in axes.split(".") if axes.strip(" -") else []:
        chunk = -(-size // mesh.size(axis))
        parts = [part * mesh.size(axis) + place // chunk for part, place in zip(parts, places, strict=True)]
        places, size = [place % chunk for place in places], chunk
    return parts


def kept_of(ids: Tensor, tokens: str, mesh: Mesh, factor: float, experts: int) -> Tensor:
    """Which assignments experts take, counted one by one: of each rank's rows, in the order of its tokens."""
    dims = [*map(str.strip, tokens.split(",")), "-"][:2]
    over = [ranks_of(size, axes, mesh) for size, axes in zip(ids.shape, dims, strict=False)]
    local = [max(Counter(parts).values()) for parts in over]
    most = capacity_of(local[0] * local[1] * ids.shape[2], experts, factor)
    taken: Counter[tuple[int, int, int]] = Counter()
    kept = torch.zeros(ids.shape, dtype=torch.bool)
    for b, t, k in itertools.product(*map(range, ids.shape)):
        key = over[0][b], over[1][t], int(ids[b, t, k])
        kept[b, t, k] = taken[key] < most
        taken[key] += 1
    return kept


def on_one_device(model: Moved, batch: dict[str, Tensor], kept: Tensor) -> dict[str, Tensor]:
    """The loss and all gradients in float64, each token's experts multiplied one by one; what is dropped weighs 0."""
    params = {n: p.detach().double().requires_grad_() for n, p in model.named_parameters()}
    e = {n.removeprefix("experts."): p for n, p in params.items()}
    x = batch["x"].double() @ e["before.weight"].t()
    scale = batch["scale"].double() * kept
    out = torch.zeros_like(x)
    for b, t, k in itertools.product(*map(range, batch["ids"].shape)):
        i = batch["ids"][b, t, k]
        gate, up = (e["up"][i] @ x[b, t] + e["up_bias"][i]).chunk(2)
        y = e["down"][i] @ (torch.nn.functional.silu(gate) * up) + e["down_bias"][i]
        row = torch.zeros(out.shape[:2], dtype=out.dtype)
        row[b, t] = 1
        out = out + row[..., None] * scale[b, t, k] * y
    loss = (out * out).mean()
    gradients = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
    found = {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(params.items(), gradients, strict=True)}
    return {"loss": loss.detach(), **found}


def check(compiled: Program, name: str, ids: Tensor, factor: float, seed: int = 0) -> int:
    """Ranks equal the graph on one device, and that equals the model above. Returns how many rows were dropped."""
    batch, experts = routed(ids, seed=seed), compiled.model.experts.experts  # type: ignore[union-attr]
    kept = kept_of(ids, PLACES[name][1], compiled.mesh, factor, experts)
    report = compiled.verify(batch)
    assert report.equal, str(report)
    assert report.ok, str(report)
    exact = on_one_device(compiled.model, batch, kept)  # type: ignore[arg-type]
    outputs = reference_step(compiled.reference, compiled.inputs(batch), torch.float64)
    for port, value in outputs.items():
        if port.role in ("loss", "grad"):
            gap = (value - exact[port.name]).abs().max()
            assert gap <= 1e-12 * max(1.0, float(exact[port.name].abs().max())), (port.name, float(gap))
    dropped = int((~kept).sum())
    load = outputs[Port("output", "experts:load")]
    assert load[0].tolist() == [*torch.bincount(ids.flatten(), minlength=experts).tolist(), dropped]
    told = [d for d in report.diagnostics if d.code == "SC513"]
    assert bool(told) == bool(dropped)
    assert (report.eager_error is None) == bool(dropped)
    return dropped


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", PLACES)
def test_any_routing_is_as_where_dropped_rows_weigh_nothing(name: str) -> None:
    """To all experts, few or one, with ties; with batches and experts that ranks do not divide."""

    @settings(max_examples=6, deadline=None)
    @given(st.data(), st.integers(0, 99))
    def run(data: st.DataObject, seed: int) -> None:
        sizes = [(4, 4), (3, 5) if "both" not in name else (3, 8)] if name not in GATHERED else [(4, 4)]
        batch, experts = data.draw(st.sampled_from(sizes))
        factor = data.draw(st.sampled_from([1.0, 1.25, 2.0]))
        check(
            program(name, factor, batch, experts),
            name,
            data.draw(routings(batch, experts, length_of(name))),
            factor,
            seed,
        )

    run()


@pytest.mark.parametrize("name", ["ep2", "dp2 x ep2", "experts whole"])
def test_all_rows_to_one_expert(name: str) -> None:
    """It takes a quarter of what ranks have, those of the first tokens."""
    dropped = check(program(name), name, torch.full((4, TOKENS, CHOSEN), 2), 1.0)
    ranks = 4 if name == "dp2 x ep2" else 2
    assert dropped == 24 - ranks * capacity_of(24 // ranks, 4, 1.0)


def test_nothing_is_dropped_with_room_for_all() -> None:
    """Then eager PyTorch is asked, and there is nothing to say."""
    compiled = program("ep2", 4.0)
    report = compiled.verify(routed(torch.zeros(4, TOKENS, CHOSEN, dtype=torch.long)))
    assert report.ok
    assert report.eager_error is not None
    assert report.eager_error < 1e-12
    assert not report.diagnostics


def test_what_is_dropped_is_the_same_whether_rows_are_sent_or_gathered() -> None:
    ids = torch.randint(0, 4, (4, TOKENS, CHOSEN), generator=torch.Generator().manual_seed(3))
    sent, gathered = (program("ep2", dispatch=form).simulate(routed(ids)) for form in ("all_to_all", "all_gather"))
    assert int(sent.dropped) > 0  # type: ignore[arg-type]
    assert torch.equal(sent.load, gathered.load)  # type: ignore[arg-type]
    assert torch.allclose(sent.loss, gathered.loss)
    assert not moves(program("ep2", dispatch="all_gather").body)


@pytest.mark.parametrize(
    ("rows", "experts", "factor", "most"),
    [(256, 4, 1.25, 80), (10, 1, 1.1, 10), (100, 10, 1.1, 11), (7, 4, 1.0, 2), (8, 4, 100.0, 8), (5, 8, 1.0, 1)],
)
def test_a_capacity_is_rounded_up_and_no_more_than_all(rows: int, experts: int, factor: float, most: int) -> None:
    assert capacity_of(rows, experts, factor) == most


IN_ZIGZAG = [
    "i64[(4@dp 8|8~ep@ep 2)]",
    "i64[(3@dp 8|5~ep@ep 2)]",
    "i64[(2 8|7~ep@ep.dp 2)]",
    "i64[8|6/8~dp@dp.ep]",
]


@pytest.mark.parametrize(
    "text", ["i64[(8@dp.ep 3 2)]", "i64[(8@dp 3@ep 2)]", "i64[(5@ep.dp 3 2)]", "i64[30]", *IN_ZIGZAG]
)
def test_groups_are_the_rows_of_ranks(text: str) -> None:
    """Each rank limits its own, as `shard` gives them to it, and one device the same."""
    from shardc.runtime.execute.layout import assemble, shard

    type, mesh = TensorType.parse(text), Mesh(dp=2, ep=2)
    ids = torch.randint(0, 3, type.shape, generator=torch.Generator().manual_seed(0))
    whole = LIMIT_ROWS(ids, 3, 0.75, layout_of(type, mesh))
    uneven = bool(type.uneven_atoms(mesh))
    shards = {rank: shard(ids if not uneven else ids + 1, type, mesh, rank) for rank in range(4)}
    parts = {rank: LIMIT_ROWS(part - 1 if uneven else part, 3, 0.75, []) for rank, part in shards.items()}
    assert torch.equal(assemble(parts, type, mesh), whole)
    assert (whole == -1).any()


# ------------------------------------------------------------------------------------------ what is sent, and held
@pytest.mark.parametrize("factor", [1.0, 1.25, 2.0])
def test_blocks_are_sent_and_the_host_reads_nothing(factor: float) -> None:
    """T k h (ep - 1) / ep elements times the factor, each way."""
    compiled = program("ep4", factor, 16)
    rows = 16 * TOKENS * CHOSEN // 4
    moved = [c.bytes_per_rank for c in collectives(compiled.body) if c.kind == "all_to_all" and c.payload_bytes > 16]
    assert moved == [4 * 3 * capacity_of(rows, 4, factor) * 6] * 4
    assert host_reads(compiled) == []
    exact = program("ep4", 1.0, 16, dispatch="all_gather")
    assert host_reads(exact) == []
    assert [node.args[3] for node in compiled.body.calls() if node.target is EXCHANGE_COUNTS] == [False]


def test_room_at_the_experts_is_for_the_capacity() -> None:
    compiled = program("ep4", 1.25, 16)
    (dispatch, *_) = (node for node in compiled.body.calls() if node.target is DISPATCH_ROWS)
    rows = 16 * TOKENS * CHOSEN
    assert type_of(dispatch).local_shape(compiled.mesh)[0] == 4 * capacity_of(rows // 4, 4, 1.25) < rows
    assert str(type_of(dispatch)).startswith("f32[(16 3 2)<=")
    torch.manual_seed(0)
    mesh, tokens, placements = PLACES["ep4"]
    sample = routed(torch.randint(0, 4, (16, TOKENS, CHOSEN)))
    params = {f"experts.{key}": placement for key, placement in placements.items()}
    plan = {"mesh": mesh, "params": params, "inputs": dict.fromkeys(sample, tokens), "experts": "all_to_all"}
    exact = shardc.compile(Moved(4, bias=True), sample, plan=plan, loss=mean_of_squares)
    assert memory(compiled.body).peak < 0.6 * memory(exact.body).peak


def test_what_is_dropped_is_counted_in_one_sum() -> None:
    counted = [c for c in collectives(program("dp2 x ep2").body) if "load" in c.value]
    assert [(c.kind, c.axes, c.payload_bytes) for c in counted] == [("all_reduce", ("dp", "ep"), 8 * 5)]


@pytest.mark.parametrize("name", ["ep2", "dp2 x ep3", "dp2 x ep2 x tp2", "uneven"])
def test_text_is_read_again(name: str) -> None:
    compiled = program(name, batch=5 if name == "uneven" else 4)
    for graph in (compiled.body, compiled.reference):
        text = print_graph(graph, comments=False)
        assert print_graph(parse(text), comments=False) == text


def test_a_saved_program_is_the_same(tmp_path: Path) -> None:
    compiled = program("dp2 x ep2")
    compiled.save(tmp_path / "program.json")
    loaded = shardc.Program.load(tmp_path / "program.json")
    assert loaded.text() == compiled.text()
    assert loaded.plan["experts"] == [["experts", [4], [2]]]
    ids = torch.zeros(4, TOKENS, CHOSEN, dtype=torch.long)
    assert loaded.verify(routed(ids)).ok
    assert torch.equal(loaded.simulate(routed(ids)).load, compiled.simulate(routed(ids)).load)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------ steps
def trained(overflow: str = "drop", factor: float | str = 1.0, **more: Any) -> tuple[Program, Any]:
    torch.manual_seed(0)
    sample = routed(torch.arange(24).view(4, TOKENS, CHOSEN) % 4)
    model = Moved(4, bias=True)
    said = {"dispatch": "all_to_all", "capacity": factor, "overflow": overflow}
    plan = {"mesh": "ep=2", "params": {"experts.*": "ep"}, "inputs": dict.fromkeys(sample, "ep"), "experts": said}
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    compiled = shardc.compile(model, sample, plan=plan | more, loss=mean_of_squares, optimizer=adamw)
    return compiled, compiled.launch()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "more", [{}, {"precision": "fp16"}, {"nonfinite": "raise"}, {"clip_grad_norm": 1.0}, {"accumulate": 2}]
)
def test_a_step_that_overflows_fails_and_changes_nothing(more: dict[str, Any]) -> None:
    _, trainer = trained("error", **more)
    even, full = routed(torch.arange(24).view(4, TOKENS, CHOSEN) % 4), routed(torch.zeros(4, TOKENS, CHOSEN).long())
    assert bool(trainer.step(even).fits)
    before = {name: value.clone() for name, value in trainer.state.items()}
    dropped = 16 if "accumulate" in more else 18
    said = rf"step 1: .* {dropped} of 24 rows were dropped: {dropped} in experts"
    with pytest.raises(ShardcError, match=said) as refused:
        trainer.step(full)
    (wrong,) = refused.value.diagnostics
    assert wrong.code == "SC513"
    assert wrong.hint
    assert trainer.steps == 1
    assert all(torch.equal(value, before[name]) for name, value in trainer.state.items())
    trainer.step(even)
    assert trainer.steps == 2
    assert not all(torch.equal(value, before[name]) for name, value in trainer.state.items())


def test_a_program_that_fails_steps_is_verified_by_what_it_leaves() -> None:
    """Parameters and state stay on every rank, as they do on one device."""
    compiled, _ = trained("error")
    report = compiled.verify(routed(torch.zeros(4, TOKENS, CHOSEN).long()))
    assert report.ok, str(report)
    assert [d.code for d in report.diagnostics] == ["SC513"]


def test_steps_that_drop_train_on_and_say_what() -> None:
    _, trainer = trained("drop")
    full = routed(torch.zeros(4, TOKENS, CHOSEN).long())
    (metrics,) = trainer.train([full], 1, progress=False)
    assert metrics.experts is not None
    assert (metrics.experts.dropped, metrics.experts.routed, metrics.experts.imbalance) == (18, 24, 2.0)
    assert metrics.value("experts.dropped") == 18
    assert metrics.value("experts.imbalance") == 2.0
    assert "dropped 18 of 24 rows" in str(metrics)
    assert metrics.experts.layers["experts"].of_ranks == (24, 0)


def test_an_evaluation_drops_nothing() -> None:
    """A capacity is of training: what is evaluated, or generated, does not depend on what else is in the batch."""
    full = routed(torch.zeros(4, TOKENS, CHOSEN).long())
    losses = [trained(factor=factor)[1].evaluate([full]).loss for factor in (1.0, "exact")]
    assert losses[0] == losses[1]
