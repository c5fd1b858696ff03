"""Rows sent to experts over an axis of their tokens: any routing, mesh and size as on one device; what is refused.

Longer than 400 lines: routings, meshes and what is refused share one small mixture.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import shardc
from shardc.api import Program
from shardc.cli.summary import dispatches, host_reads
from shardc.cost.flops import flops
from shardc.ir.collectives import collectives
from shardc.ir.graph import Graph, info, set_info, type_of, update
from shardc.ir.ops.exchange import COMBINE_ROWS, DISPATCH_ROWS, EXCHANGE_COUNTS, EXCHANGED_PERM, GROUP_ENDS
from shardc.ir.ops.experts import EXPERT_MM, GATHER_ROWS, GROUP_ROWS, UNGROUP_ROWS
from shardc.ir.parse import parse
from shardc.ir.text import print_graph
from shardc.passes.sharding.dispatch import Choice
from shardc.passes.type_check import type_faults
from shardc.passes.verify_groups import groups_agree
from shardc.runtime.oracle.simulate import simulate
from tests.experts import Experts, routed

HIDDEN, WIDTH, CHOSEN, TOKENS = 6, 8, 2, 3
TP = {"up": "ep, 2*tp, -", "down": "ep, -, tp", "up_bias": "ep, 2*tp", "down_bias": "ep, -"}
MESHES: dict[str, tuple[str, str, dict[str, str]]] = {  # mesh, where tokens lie, parameters
    "ep2": ("ep=2", "ep", {"*": "ep"}),
    "ep3": ("ep=3", "ep", {"*": "ep"}),
    "ep4": ("ep=4", "ep", {"*": "ep"}),
    "dp2 x ep2": ("dp=2, ep=2", "dp.ep", {"*": "ep"}),
    "ep2 x dp2": ("ep=2, dp=2", "dp.ep", {"*": "ep"}),
    "dp2 x ep3": ("dp=2, ep=3", "dp.ep", {"*": "ep"}),
    "experts over both": ("dp=2, ep=2", "dp.ep", {"*": "dp.ep"}),
    "experts over both, the other way": ("dp=2, ep=2", "dp.ep", {"*": "ep.dp"}),
    "batch over dp, positions over ep": ("dp=2, ep=2", "dp, ep", {"*": "ep"}),
    "ep2 x tp2": ("ep=2, tp=2", "ep", TP),
    "dp2 x ep2 x tp2": ("dp=2, ep=2, tp=2", "dp.ep", TP),
}
GATHERED = {  # where rows cannot be sent
    "interleaved": ("ep=2", "ep", {"*": "2*ep"}, "experts lie as 2 "),
    "over more axes": ("dp=2, ep=2", "dp", {"*": "dp.ep"}, "and tokens over dp"),
    "uneven": ("dp=2, ep=2", "ep.dp", {"*": "ep"}, "5 rows do not divide"),
}


def mean_of_squares(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return (out * out).mean()


class Moved(nn.Module):
    """Experts behind a layer, so that rows have gradients, which are sent too."""

    def __init__(self, experts: int, *, bias: bool) -> None:
        super().__init__()
        self.before = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.experts = Experts(experts, HIDDEN, WIDTH, bias=bias)

    def forward(self, x: Tensor, ids: Tensor, scale: Tensor) -> Tensor:
        return self.experts(self.before(x), ids, scale)


@cache
def program(name: str, batch: int = 4, experts: int = 4, *, bias: bool = True, dispatch: str = "all_to_all") -> Program:
    torch.manual_seed(0)
    mesh, tokens, placements = {**MESHES, **{key: value[:3] for key, value in GATHERED.items()}}[name]
    sample = routed(torch.randint(0, experts, (batch, TOKENS, CHOSEN)))
    params = {f"experts.{key}": placement for key, placement in placements.items() if bias or "bias" not in key}
    plan = {"mesh": mesh, "params": params, "inputs": dict.fromkeys(sample, tokens), "experts": dispatch}
    return shardc.compile(Moved(experts, bias=bias), sample, plan=plan, loss=mean_of_squares)


def routings(batch: int, experts: int, length: int = TOKENS) -> st.SearchStrategy[Tensor]:
    """Routings of a batch: to all experts, to few, and to one."""
    count = batch * length * CHOSEN

    def some(chosen: set[int]) -> st.SearchStrategy[list[int]]:
        return st.lists(st.sampled_from(sorted(chosen)), min_size=count, max_size=count)

    chosen = st.sets(st.integers(0, experts - 1), min_size=1)
    return chosen.flatmap(some).map(lambda ids: torch.tensor(ids).view(batch, length, CHOSEN))


def moves(graph: Graph) -> Counter[object]:
    return Counter(node.target for node in graph.calls() if node.target in (DISPATCH_ROWS, COMBINE_ROWS))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", MESHES)
def test_any_routing_and_size_is_as_on_one_device(name: str) -> None:
    """Batches and experts that ranks do not divide are padded; padding is of no expert, and is not sent."""

    @settings(max_examples=12, deadline=None)
    @given(st.data(), st.integers(0, 99))
    def check(data: st.DataObject, seed: int) -> None:
        batch, experts = data.draw(st.sampled_from([(4, 4), (3, 5) if "both" not in name else (3, 8)]))
        compiled = program(name, batch, experts)
        assert moves(compiled.body) == {DISPATCH_ROWS: 2, COMBINE_ROWS: 2}
        report = compiled.verify(routed(data.draw(routings(batch, experts)), seed=seed))
        assert report.ok, str(report)
        assert report.eager_error is not None
        assert report.eager_error < 1e-12

    check()


@pytest.mark.parametrize("name", GATHERED)
def test_where_rows_cannot_be_sent_tokens_are_gathered_and_it_is_said(name: str) -> None:
    compiled = program(name, 5 if name == "uneven" else 4)
    assert not moves(compiled.body)
    (said,) = [d for d in compiled.diagnostics if d.code == "SC229"]
    assert GATHERED[name][3] in said.message
    assert said.hint
    assert said.location
    report = compiled.verify()
    assert report.ok, str(report)


@pytest.mark.parametrize("dispatch", ["auto", "all_gather"])
def test_otherwise_tokens_are_gathered(dispatch: str) -> None:
    compiled = program("ep2", dispatch=dispatch)
    assert not moves(compiled.body)
    assert not [d for d in compiled.diagnostics if d.code == "SC229"]


@pytest.mark.parametrize(
    ("tokens", "experts", "why"),
    [("ep", "-", "no experts lie over an axis"), ("-", "ep", "no experts lie over an axis"), ("ep", "-, ep", "no exp")],
)
def test_a_plan_that_sends_nothing_is_told_so(tokens: str, experts: str, why: str) -> None:
    sample = routed(torch.randint(0, 4, (4, TOKENS, CHOSEN)))
    params = {} if experts == "-" else {"experts.up": experts}
    inputs = {} if tokens == "-" else dict.fromkeys(sample, tokens)
    plan = {"mesh": "ep=2", "params": params, "inputs": inputs, "experts": "all_to_all"}
    compiled = shardc.compile(Moved(4, bias=False), sample, plan=plan, loss=mean_of_squares)
    assert not moves(compiled.body)
    (said,) = [d for d in compiled.diagnostics if d.code == "SC229"]
    assert f"no rows are sent: {why}" in said.message
    assert said.location
    assert said.hint


def test_a_model_without_experts_is_told_that_nothing_is_sent() -> None:
    plan = {"mesh": "ep=2", "inputs": {"input": "ep"}, "experts": "all_to_all"}
    compiled = shardc.compile(nn.Linear(4, 4), {"input": torch.ones(4, 4)}, plan=plan, loss=mean_of_squares)
    (said,) = [d for d in compiled.diagnostics if d.code == "SC229"]
    assert "no rows are grouped by expert" in said.message


# ------------------------------------------------------------------------------------------ what is sent
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["ep2", "ep4", "dp2 x ep2", "experts over both", "dp2 x ep2 x tp2"])
def test_rows_are_sent_twice_each_way_and_no_weight_is_moved(name: str) -> None:
    compiled = program(name, 8, bias=False)
    mesh = compiled.mesh
    ranks, group = mesh.size([a for a in mesh.names if a != "tp"]), 4 if name in ("ep4", "experts over both") else 2
    tokens = 8 * TOKENS // ranks
    sent = [c for c in collectives(compiled.body) if c.kind == "all_to_all"]
    rows = 4 * tokens * CHOSEN * HIDDEN * (group - 1) // group
    assert [(c.phase, c.bytes_per_rank) for c in sent] == [
        ("fwd", 4 * 4 * (group - 1) // group), ("fwd", rows), ("fwd", rows), ("bwd", rows), ("bwd", rows)
    ]  # fmt: skip
    others = {c.kind for c in collectives(compiled.body)} - {"all_to_all"}
    assert others == {"all_reduce"}  # of the loss and gradients, and of the width of experts over tp
    assert not {"SC203", "SC209"} & {d.code for d in compiled.diagnostics}


def test_with_even_routing_ranks_send_exactly_that() -> None:
    """Counted where all ranks run: T k (ep - 1) / ep rows."""
    compiled, seen = program("ep4", 8), list[list[int]]()
    ids = (torch.arange(8 * TOKENS * CHOSEN) % 4).view(8, TOKENS, CHOSEN)

    def observe(node: fx.Node, values: Sequence[Tensor]) -> None:
        if node.target is EXCHANGE_COUNTS:
            seen.append([int(counts.sum() - counts[:, rank].sum()) for rank, counts in enumerate(values)])

    simulate(compiled.body, compiled.inputs(routed(ids)), observe=observe)
    assert seen == [[2 * TOKENS * CHOSEN * 3 // 4] * 4]


@pytest.mark.parametrize("name", ["ep2", "dp2 x ep2", "ep2 x tp2"])
def test_a_rank_computes_its_share(name: str) -> None:
    compiled = program(name, 8, bias=False)
    total = flops(compiled.reference).of_op("shardc.expert_mm"), flops(compiled.reference).of_op("shardc.expert_wgrad")
    share = flops(compiled.body).of_op("shardc.expert_mm"), flops(compiled.body).of_op("shardc.expert_wgrad")
    assert tuple(n * compiled.mesh.world_size for n in share) == total


def test_gradients_of_experts_are_reduced_over_the_other_axes_of_tokens() -> None:
    def over(name: str) -> set[tuple[str, ...]]:
        reduced = [
            c for c in collectives(program(name).body) if c.value.startswith("d.experts.") and "wgrad" in c.value
        ]
        return {c.axes for c in reduced}

    assert over("dp2 x ep2") == {("dp",)}
    assert over("ep2") == over("experts over both") == set()


def test_counts_are_exchanged_once_and_biases_need_no_perm_of_their_own() -> None:
    calls = Counter(node.target for node in program("ep2").body.calls())
    assert calls[EXCHANGE_COUNTS] == calls[GROUP_ENDS] == calls[EXCHANGED_PERM] == 1


def test_a_summary_counts_what_the_host_reads() -> None:
    assert host_reads(program("ep2")) == ["the host reads how many rows go to experts, 1 times a step"]
    assert host_reads(program("ep2", dispatch="all_gather")) == []


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MESHES)
def test_text_is_read_again(name: str) -> None:
    text = print_graph(program(name).body, comments=False)
    assert print_graph(parse(text), comments=False) == text


def test_a_saved_program_is_the_same(tmp_path: Path) -> None:
    compiled = program("dp2 x ep2")
    compiled.save(tmp_path / "program.json")
    loaded = shardc.Program.load(tmp_path / "program.json")
    assert loaded.text() == compiled.text()
    assert loaded.verify().ok


@pytest.mark.sampled(3)
@pytest.mark.parametrize("index", range(5))
def test_each_exchange_is_explained(index: int) -> None:
    compiled = program("dp2 x ep2", bias=False)
    sent = [i for i, c in enumerate(collectives(compiled.body)) if c.kind == "all_to_all"]
    said = str(compiled.explain(sent[index]))
    assert "all_to_all over ep (2 ranks)" in said
    assert "experts." in said


# ------------------------------------------------------------------------------------------ what is refused
def changed(edit: Callable[[Graph], None], name: str = "dp2 x ep2") -> list[str]:
    graph = program(name).body.copy()
    edit(graph)
    return [*groups_agree(graph), *(fault.message for fault in type_faults(graph))]


def first(graph: Graph, target: object) -> fx.Node:
    return next(node for node in graph.calls() if node.target is target)


def another(graph: Graph) -> fx.Node:
    """The offsets of a second grouping of the same ids, and the place behind them."""
    grouping = first(graph, GROUP_ROWS)
    offs = next(user for user in grouping.users if user.args[1] == 1)
    with graph.fx.inserting_after(offs):
        other = graph.call(
            GROUP_ROWS, grouping.args, dict(grouping.kwargs), like=grouping, type=None, results=info(grouping).results
        )
    with graph.fx.inserting_after(other):
        ends = graph.fx.call_function(operator.getitem, (other, 1))
        set_info(ends, replace(info(offs), name=graph.unique("other.offs")))
    return ends


@pytest.mark.parametrize("name", MESHES)
def test_the_body_itself_has_no_fault(name: str) -> None:
    assert changed(lambda graph: None, name) == []


def test_counts_of_another_grouping_are_refused() -> None:
    def swap(graph: Graph) -> None:
        counts, ends = first(graph, EXCHANGE_COUNTS), another(graph)
        with graph.fx.inserting_after(ends):
            others = graph.call(EXCHANGE_COUNTS, (ends, *counts.args[1:]), like=counts, type=type_of(counts))
        dispatch = first(graph, DISPATCH_ROWS)
        dispatch.args = (*dispatch.args[:2], others, *dispatch.args[3:])

    assert any("reads rows of" in fault for fault in changed(swap))


def test_offsets_of_another_grouping_are_refused() -> None:
    def swap(graph: Graph) -> None:
        combine, ends = first(graph, COMBINE_ROWS), another(graph)
        combine.args = (combine.args[0], ends, *combine.args[2:])

    assert any("reads rows of" in fault for fault in changed(swap))


def test_a_dropped_combine_is_refused() -> None:
    def drop(graph: Graph) -> None:
        combine = first(graph, COMBINE_ROWS)
        combine.replace_all_uses_with(combine.args[0])  # type: ignore[arg-type]
        graph.fx.erase_node(combine)

    assert any("rows at their tokens and rows at their experts" in fault for fault in changed(drop))


def test_rows_ungrouped_at_their_experts_are_refused() -> None:
    """By types alone it would be the partial sum of experts over ep, as where tokens are replicated there."""

    def ungroup(graph: Graph) -> None:
        product = [node for node in graph.calls() if node.target is EXPERT_MM][1]
        perm, ends = first(graph, EXCHANGED_PERM), first(graph, GROUP_ENDS)
        back = first(graph, UNGROUP_ROWS)
        rows = replace(type_of(product), dims=type_of(product).dims[:-1], ragged=0, partial=(("ep", "sum"),))
        with graph.fx.inserting_after(product):
            graph.call(UNGROUP_ROWS, (product, perm, ends), like=back, type=rows)

    assert any("have not come back from their experts" in fault for fault in changed(ungroup))


def test_an_exchange_over_the_wrong_axis_is_refused() -> None:
    def turn(graph: Graph, target: object) -> None:
        node = first(graph, target)
        node.args = tuple(["dp"] if arg == ["ep"] else arg for arg in node.args)

    for target in (EXCHANGE_COUNTS, DISPATCH_ROWS, COMBINE_ROWS):
        assert changed(lambda graph, target=target: turn(graph, target)), target


def test_rows_that_are_sent_the_wrong_way_are_refused() -> None:
    def turn(graph: Graph) -> None:
        first(graph, DISPATCH_ROWS).target = COMBINE_ROWS

    assert any("there already" in fault for fault in changed(turn))


def test_a_dispatch_that_is_left_out_is_refused() -> None:
    def drop(graph: Graph) -> None:
        dispatch = first(graph, DISPATCH_ROWS)
        dispatch.replace_all_uses_with(dispatch.args[0])  # type: ignore[arg-type]
        graph.fx.erase_node(dispatch)

    assert changed(drop)


@pytest.mark.parametrize("each", [0, 1, 3, 4])
def test_tokens_of_another_number_of_rows_are_refused(each: int) -> None:
    """By their dims alone the types would fit: each row would be taken from another token."""

    def change(graph: Graph) -> None:
        gather = first(graph, GATHER_ROWS)
        assert gather.args[2] == CHOSEN
        gather.args = (*gather.args[:2], each)

    assert any(f"tokens of {each} rows each are not" in fault for fault in changed(change))


def test_too_little_room_is_refused() -> None:
    def shrink(graph: Graph) -> None:
        dispatch = first(graph, DISPATCH_ROWS)
        dispatch.args = (*dispatch.args[:4], 1)
        update(dispatch, name="short")

    assert changed(shrink)


# ------------------------------------------------------------------------------------------ the choice by bytes
def chosen(name: str, batch: int, experts: object, **hardware: float) -> Program:
    torch.manual_seed(0)
    mesh, tokens, placements = MESHES[name]
    sample = routed(torch.randint(0, 4, (batch, TOKENS, CHOSEN)))
    params = {f"experts.{key}": placement for key, placement in placements.items() if "bias" not in key}
    plan = {"mesh": mesh, "params": params, "inputs": dict.fromkeys(sample, tokens), "experts": experts}
    model = Moved(4, bias=False)
    return shardc.compile(model, sample, plan=plan | {"hardware": hardware}, loss=mean_of_squares)


@pytest.mark.parametrize("name", ["ep4", "ep2", "dp2 x ep2"])
def test_what_either_form_sends_is_known_before(name: str) -> None:
    """To the byte, as the programs of both forms send it."""
    sent, gathered = (chosen(name, 8, form) for form in ("all_to_all", "all_gather"))
    said = [Choice(*program.plan["dispatch"][0]) for program in (sent, gathered)]
    assert said[0][2:] == said[1][2:]
    assert [c.form for c in said] == ["all_to_all", "all_gather"]
    moved = [c.bytes_per_rank for c in collectives(sent.body) if c.kind == "all_to_all"]
    assert said[0].sent == sum(moved)
    apart = {"all_gather", "reduce_scatter"}
    assert said[0].gathered == sum(c.bytes_per_rank for c in collectives(gathered.body) if c.kind in apart)


def test_auto_sends_rows_where_that_is_less_than_gathering_and_the_hosts_read() -> None:
    """Of few tokens the host's read takes longer than what gathering sends more; a capacity has no read."""
    forms = {
        case: bool(moves(chosen("ep4", 8, experts, **hardware).body))
        for case, experts, hardware in (
            ("few tokens", "auto", {}),
            ("a host that reads at once", "auto", {"collective_start_seconds": 1e-9}),
            ("a capacity", {"capacity": 1.0}, {}),
            ("a capacity that sends more", {"capacity": 4.0}, {}),
        )
    }
    assert forms == {
        "few tokens": False, "a host that reads at once": True, "a capacity": True, "a capacity that sends more": False
    }  # fmt: skip


def test_a_summary_says_which_form_and_what_the_other_would_send() -> None:
    (line,) = dispatches(chosen("ep4", 8, "all_to_all"))
    assert line.startswith("to experts of experts: all_to_all ")
    assert "all_gather would send" in line
    assert line.endswith(", with even routing")
    (line,) = dispatches(chosen("ep4", 8, {"dispatch": "all_to_all", "capacity": 1.5}))
    assert "even routing" not in line


def test_an_explanation_says_what_its_bytes_are_of() -> None:
    exact, limited = chosen("ep2", 8, "all_to_all"), chosen("ep2", 8, {"dispatch": "all_to_all", "capacity": 1.5})
    said = [
        str(p.explain(next(c.value for c in collectives(p.body) if "dispatch" in c.value))) for p in (exact, limited)
    ]
    assert "all_gather would send" in said[0]
    assert "its bytes are of even routing" in said[0]
    assert "blocks of 9 rows for each expert, filled or not" in said[1]
