"""Experts over any mesh, for any routing: all tokens to one expert, none to some, as many to each.

Longer than 400 lines: routings, meshes and altered programs are of one small layer.
"""

from __future__ import annotations

import copy
import operator
import re
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
from shardc import Plan
from shardc.api import Program
from shardc.cost.flops import flops
from shardc.ir.collectives import collectives
from shardc.ir.diagnostic import ShardcError
from shardc.ir.graph import Graph, info, set_info, type_of
from shardc.ir.ops import collectives as collective_ops
from shardc.ir.ops.experts import EXPERT_MM, GROUP_ROWS
from shardc.ir.parse import parse
from shardc.ir.text import print_graph
from shardc.passes.type_check import type_faults
from shardc.passes.verify_groups import groups_agree
from shardc.runtime.oracle.simulate import run_reference, simulate
from tests.experts import Experts, routed

BATCH, TOKENS, CHOSEN, EXPERTS = 4, 3, 2, 4
SHARDED = {  # mesh -> parameters; a name before the mesh tells plans of one mesh apart
    "dp=2": {},
    "folded: dp=2": {"*": "dp"},
    "folded: dp=3": {"*": "dp"},
    "dp=3": {},
    "ep=4": {"*": "ep"},
    "ep=3": {"*": "ep"},
    "dp=2, ep=2": {"*": "ep"},
    "dp=3, ep=3": {"*": "ep"},
    "interleaved: dp=3, ep=2": {"*": "2*ep"},
    "tp=2": {"up": "-, 2*tp, -", "down": "-, -, tp", "up_bias": "-, 2*tp"},
    "dp=2, ep=2, tp=2": {"up": "ep, 2*tp, -", "down": "ep, -, tp", "up_bias": "ep, 2*tp", "down_bias": "ep, -"},
}


def mean_of_squares(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return (out * out).mean()


@cache
def program(mesh: str, *, bias: bool = True) -> Program:
    torch.manual_seed(0)
    model = Experts(EXPERTS, bias=bias)
    params = {name: p for name, p in SHARDED[mesh].items() if bias or "bias" not in name}
    batch = routed(torch.randint(0, EXPERTS, (BATCH, TOKENS, CHOSEN)))
    inputs = dict.fromkeys(batch, "dp") if "dp" in mesh else {}
    said = {"mesh": mesh.rpartition(": ")[2], "params": params, "inputs": inputs, "bucket": False}
    plan = Plan.model_validate(said)
    return shardc.compile(model, batch, plan=plan, loss=mean_of_squares)


def routings() -> st.SearchStrategy[Tensor]:
    """Routings of a batch: even ones, and those of few experts."""
    count = BATCH * TOKENS * CHOSEN

    def batch(ids: list[int]) -> Tensor:
        return torch.tensor(ids).view(BATCH, TOKENS, CHOSEN)

    some = st.sets(st.integers(0, EXPERTS - 1), min_size=1).flatmap(
        lambda experts: st.lists(st.sampled_from(sorted(experts)), min_size=count, max_size=count)
    )
    return some.map(batch)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mesh", SHARDED)
def test_any_routing_is_as_on_one_device(mesh: str) -> None:
    @settings(max_examples=12)
    @given(routings(), st.integers(0, 99))
    def check(ids: Tensor, seed: int) -> None:
        report = program(mesh).verify(routed(ids, seed=seed))
        assert report.ok, str(report)

    check()


def by_expert(model: Experts, batch: dict[str, Tensor]) -> Tensor:
    """What experts yield, token by token."""
    out = torch.zeros_like(batch["x"])
    for place in torch.cartesian_prod(*map(torch.arange, batch["ids"].shape)):
        token, expert = tuple(place[:-1].tolist()), int(batch["ids"][tuple(place)])
        up = model.up[expert] @ batch["x"][token]
        gate, up = (up if model.up_bias is None else up + model.up_bias[expert]).chunk(2)
        down = model.down[expert] @ (torch.nn.functional.silu(gate) * up)
        down = down if model.down_bias is None else down + model.down_bias[expert]
        out[token] = out[token] + down * batch["scale"][tuple(place)]
    return out


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("ids", ["even", "one expert"])
def test_the_single_device_is_as_experts_one_by_one(ids: str, bias: bool) -> None:
    compiled = program("dp=2", bias=bias)
    chosen = torch.arange(BATCH * TOKENS * CHOSEN) % EXPERTS if ids == "even" else torch.full((24,), 2)
    batch = routed(chosen.view(BATCH, TOKENS, CHOSEN))
    model = compiled.model
    assert isinstance(model, Experts)
    loss = mean_of_squares(by_expert(model, batch), batch)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    inputs = compiled.inputs(batch)
    got = run_reference(compiled.reference, inputs, dtype=torch.float64)
    gradients = {port.name: value for port, value in got.items() if port.role == "grad"}
    for (name, _), gradient in zip(model.named_parameters(), expected, strict=True):
        torch.testing.assert_close(gradients[name], gradient.double(), rtol=1e-4, atol=1e-6)


def sent(mesh: str) -> Counter[str]:
    return Counter(f"{c.kind} {'.'.join(c.axes)} {c.phase}" for c in collectives(program(mesh, bias=False).body))


def test_tokens_over_dp_send_gradients_alone() -> None:
    assert sent("dp=2") == {"all_reduce dp fwd": 1, "all_reduce dp bwd": 2}  # of the loss; of both weights


def test_experts_over_ep_are_reduced_once_and_never_gathered() -> None:
    assert sent("ep=4") == {"all_reduce ep fwd": 1}
    assert sent("dp=2, ep=2") == {"all_reduce ep fwd": 1, "all_reduce dp fwd": 1, "all_reduce dp bwd": 2}
    assert sent("dp=2, ep=2, tp=2") == {"all_reduce ep.tp fwd": 1, "all_reduce dp fwd": 1, "all_reduce dp bwd": 2}


def test_tokens_come_to_experts_over_their_own_axis() -> None:
    """What is sent are tokens, their routing, what experts yield and its gradient; no weight, and no weight's."""
    forward = {"all_gather dp fwd": 3, "reduce_scatter dp fwd": 1, "all_reduce dp fwd": 1}
    assert sent("folded: dp=2") == forward | {"all_gather dp bwd": 1}
    of = [c.value for c in collectives(program("folded: dp=2", bias=False).body) if c.kind == "all_gather"]
    assert set(of[:3]) == {"x.all_gather", "ids.all_gather", "scale.all_gather"}
    assert of[3].startswith("d.")


@pytest.mark.parametrize("mesh", ["dp=2", "folded: dp=2", "ep=4", "tp=2", "dp=2, ep=2", "dp=2, ep=2, tp=2"])
def test_a_rank_computes_its_share(mesh: str) -> None:
    """Of two products in forward; in backward two for weights and one for rows, of which none needs a gradient."""
    compiled = program(mesh, bias=False)
    total = flops(compiled.reference).total
    assert total == 2 * BATCH * TOKENS * CHOSEN * (3 * 6 * 8) * 2 + 2 * BATCH * TOKENS * CHOSEN * 6 * 8
    assert flops(compiled.body).total * compiled.mesh.world_size == total


@pytest.mark.parametrize("mesh", SHARDED)
def test_text_and_files_know_ragged_types(mesh: str) -> None:
    body = program(mesh).body
    text = print_graph(body, comments=False)
    assert re.search(r"; (4|\(2 2)", text)
    assert print_graph(parse(text), comments=False) == text


def test_a_saved_program_is_the_same(tmp_path: Path) -> None:
    program("dp=2, ep=2").save(tmp_path / "program.json")
    assert Program.load(tmp_path / "program.json").text() == program("dp=2, ep=2").text()


# ------------------------------------------------------------------------------------------ what is refused
def changed(edit: Callable[[Graph], None]) -> list[str]:
    graph = program("dp=2, ep=2").body.copy()
    edit(graph)
    return [*groups_agree(graph), *(fault.message for fault in type_faults(graph))]


def rows_of(graph: Graph) -> list[fx.Node]:
    return [node for node in graph.calls() if info(node).type is not None and type_of(node).ragged]


def test_the_body_itself_has_no_fault() -> None:
    assert changed(lambda graph: None) == []


def test_rows_of_another_grouping_are_refused() -> None:
    def swap(graph: Graph) -> None:
        (first,) = [node for node in graph.calls() if node.target is GROUP_ROWS]
        product = next(node for node in graph.calls() if node.target is EXPERT_MM)
        with graph.fx.inserting_before(product):
            other = graph.call(
                GROUP_ROWS, first.args, dict(first.kwargs), like=first, type=None, results=info(first).results
            )
            offs = graph.fx.call_function(operator.getitem, (other, 1))
            set_info(offs, replace(info(product.args[2]), name="other"))  # type: ignore[arg-type]
        product.args = (*product.args[:2], offs)

    assert any("reads rows of" in fault for fault in changed(swap))


def test_rows_are_not_gathered() -> None:
    def gather(graph: Graph) -> None:
        rows = rows_of(graph)[0]
        whole = type_of(rows).place([() for _ in type_of(rows).atoms])
        with graph.fx.inserting_after(rows):
            new = graph.call(collective_ops.all_gather, (rows, ["dp"], [2, 3, 2, 1], 0, 4, [24]), like=rows, type=whole)
        assert new.args[0] is rows

    assert any("moves rows" in fault for fault in changed(gather))


def test_the_sum_over_experts_is_not_dropped() -> None:
    def drop(graph: Graph) -> None:
        reduce = next(n for n in graph.calls() if n.target is collective_ops.all_reduce and n.args[2] == ["ep"])
        reduce.replace_all_uses_with(reduce.args[0])  # type: ignore[arg-type]
        graph.fx.erase_node(reduce)

    assert changed(drop)


def test_rows_summed_over_all_experts_stay_as_they_are_written() -> None:
    """A sum over rows is of no expert: what is not understood is not rewritten, and still right."""

    class Shared(Experts):
        def forward(self, x: Tensor, ids: Tensor, scale: Tensor) -> Tensor:
            ordered, perm = torch.sort(ids.reshape(-1))
            rows = x.flatten(0, -2)[perm // ids.shape[-1]]
            counts = torch.histc(ordered.float(), bins=self.experts, min=0, max=self.experts - 1)
            offs = torch.cumsum(counts, dim=0, dtype=torch.int32)
            return torch.nn.functional.grouped_mm(rows, self.up.transpose(-2, -1), offs=offs).cumsum(0)

    batch = routed(torch.randint(0, EXPERTS, (BATCH, TOKENS, CHOSEN)))
    compiled = shardc.compile(Shared(EXPERTS), batch, plan=Plan.model_validate({"mesh": "ep=2"}), loss=mean_of_squares)
    assert not any(node.target is GROUP_ROWS for node in compiled.body.calls())
    assert compiled.verify().ok


# ------------------------------------------------------------------------------------------ rows of no expert
class Dropping(nn.Module):
    """Two experts of four are chosen; of a token slot of little weight none is, as over a capacity."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.kept = kept
        self.up = nn.Parameter(torch.randn(EXPERTS, 16, 6))
        self.down = nn.Parameter(torch.randn(EXPERTS, 6, 8))
        self.router = nn.Linear(6, EXPERTS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens).softmax(-1).topk(CHOSEN)
        weights, chosen = weights.reshape(-1), chosen.reshape(-1)
        is_kept = weights > 0.3
        if self.kept != "all":
            chosen = torch.where(is_kept, chosen, EXPERTS)
        ordered, perm = torch.sort(chosen)
        rows = tokens[perm // CHOSEN]
        counts = torch.histc(ordered.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        offs = torch.cumsum(counts, dim=0, dtype=torch.int32)
        gate, up = torch.nn.functional.grouped_mm(rows, self.up.transpose(-2, -1), offs=offs).chunk(2, dim=-1)
        y = torch.nn.functional.grouped_mm(torch.tanh(gate) * up, self.down.transpose(-2, -1), offs=offs)
        if self.kept == "as they are":
            y = torch.where(is_kept[perm].unsqueeze(-1), y, rows)
        elif self.kept in ("all", "with a residual"):
            y = y + rows
        y = y * weights[perm].unsqueeze(-1)
        inverse = torch.empty_like(perm)
        inverse[perm] = torch.arange(perm.size(0))
        return y[inverse].view(-1, CHOSEN, 6).sum(1).view(x.shape)


def slot_by_slot(model: Dropping, x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for i, j in torch.cartesian_prod(*map(torch.arange, x.shape[:2])).tolist():
        weights, chosen = model.router(x[i, j]).softmax(-1).topk(CHOSEN)
        for weight, expert in zip(weights, chosen.tolist(), strict=True):
            is_kept = model.kept == "all" or weight > 0.3
            gate, up = (model.up[expert] @ x[i, j]).chunk(2)
            y = model.down[expert] @ (torch.tanh(gate) * up) if is_kept else torch.zeros_like(x[i, j])
            if model.kept in ("all", "with a residual") or (model.kept == "as they are" and not is_kept):
                y = y + x[i, j]
            out[i, j] = out[i, j] + weight * y
    return out


@pytest.mark.parametrize(
    ("kept", "mesh"),
    [("all", "ep=3"), ("as zeros", "ep=3"), ("as they are", "dp=2"), ("with a residual", "dp=2")],
)
def test_dropped_rows_are_what_the_model_makes_of_them(kept: str, mesh: str) -> None:
    """Where something is kept of a dropped row, the grouping stays as it is written."""
    torch.manual_seed(0)
    model = Dropping(kept)
    x = torch.randn(BATCH, TOKENS, 6)
    params = {"up": "ep", "down": "ep"} if mesh == "ep=3" else {}
    plan = Plan.model_validate({"mesh": mesh, "params": params, "inputs": {"x": "dp"} if mesh == "dp=2" else {}})
    compiled = shardc.compile(model, {"x": x}, plan=plan, loss=mean_of_squares)
    assert any(node.target is GROUP_ROWS for node in compiled.body.calls()) == (mesh == "ep=3")
    report = compiled.verify()
    assert report.ok, str(report)
    assert report.eager_error is not None, report.absent  # in float64, and of rows 6 wide, which PyTorch refuses
    assert report.eager_error < 1e-12
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        is_kept = exact.router(x.double()).softmax(-1).topk(CHOSEN)[0] > 0.3
    assert is_kept.any()
    assert not is_kept.all()
    expected = torch.autograd.grad(mean_of_squares(slot_by_slot(exact, x.double()), {}), list(exact.parameters()))
    got = run_reference(compiled.reference, compiled.inputs({"x": x}), dtype=torch.float64)
    gradients = {port.name: value for port, value in got.items() if port.role == "grad"}
    for (name, _), gradient in zip(model.named_parameters(), expected, strict=True):
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-10, atol=1e-12)


class Projected(nn.Module):
    """One product for each expert; a token of the last id has none."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, 6, 8))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        ordered, perm = torch.sort(ids.reshape(-1))
        counts = torch.histc(ordered.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        offs = torch.cumsum(counts, dim=0, dtype=torch.int32)
        rows = torch.nn.functional.grouped_mm(x[perm], self.up, offs=offs)
        inverse = torch.empty_like(perm)
        inverse[perm] = torch.arange(perm.size(0))
        return rows[inverse]


def test_what_pads_experts_sees_no_row_of_no_expert() -> None:
    """Four experts over three ranks: of the last rank's, which are padding, the first would have the id 4. In a job
    what pads a parameter stays on its rank, so its gradient must be zero."""
    torch.manual_seed(0)
    batch = {"x": torch.randn(10, 6), "ids": torch.arange(10) % (EXPERTS + 1)}
    plan = Plan.model_validate({"mesh": "ep=3", "params": {"up": "ep"}})
    compiled = shardc.compile(Projected(), batch, plan=plan, loss=mean_of_squares)
    assert compiled.verify().ok
    ends: list[list[int]] = []

    def observe(node: fx.Node, values: Sequence[Tensor]) -> None:
        if info(node).type is not None and type_of(node).dtype == torch.int32 and type_of(node).ragged:
            ends.extend(value.tolist() for value in values)

    simulate(compiled.body, compiled.inputs(batch), observe=observe)
    assert ends == [[2, 4], [2, 4], [0, 0]]


# ------------------------------------------------------------------------------------------ annotated rows
class Activated(nn.Module):
    """Experts that call a module between their products."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, 6, 8))
        self.down = nn.Parameter(torch.randn(EXPERTS, 8, 6))
        self.act = act

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        ordered, perm = torch.sort(ids.reshape(-1))
        counts = torch.histc(ordered.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        offs = torch.cumsum(counts, dim=0, dtype=torch.int32)
        rows = torch.nn.functional.grouped_mm(x.flatten(0, -2)[perm // CHOSEN], self.up, offs=offs)
        rows = torch.nn.functional.grouped_mm(self.act(rows), self.down, offs=offs)
        inverse = torch.empty_like(perm)
        inverse[perm] = torch.arange(perm.size(0))
        return rows[inverse].view(-1, CHOSEN, 6).sum(1).view(x.shape)


def annotated(placement: str, act: nn.Module | None = None) -> Program:
    torch.manual_seed(0)
    batch = routed(torch.randint(0, EXPERTS, (BATCH, TOKENS, CHOSEN)))
    del batch["scale"]
    inputs, params = dict.fromkeys(batch, "dp"), {"*": "ep"}
    plan = {"mesh": "dp=2, ep=2", "params": params, "inputs": inputs, "activations": {"act": placement}}
    return shardc.compile(Activated(act or nn.SiLU()), batch, plan=Plan.model_validate(plan), loss=mean_of_squares)


def test_an_annotation_that_agrees_with_the_grouping_is_taken() -> None:
    compiled = annotated("dp, -")
    assert compiled.verify().ok
    assert any(node.target is GROUP_ROWS for node in compiled.body.calls())


@pytest.mark.parametrize("placement", ["-, -", "ep, -", "dp, ep"])
def test_an_annotation_that_would_move_rows_is_refused(placement: str) -> None:
    with pytest.raises(ShardcError, match=r"SC207.*the rows of act are in the order of their experts") as refused:
        annotated(placement)
    assert f'act = "{placement}"' in str(refused.value)
    assert "hint:" in str(refused.value)


def test_what_keeps_experts_from_an_axis_is_said() -> None:
    """The gradient of a weight that experts share is a sum over all rows."""
    with pytest.raises(
        ShardcError, match=r"(?s)SC207.*grouped_mm needs it whole.*no weight or bias that experts share"
    ):
        annotated("dp, -", nn.RMSNorm(8))


class Features(nn.Module):
    """A norm and a softmax of each row's features, which are split unevenly: their padding is masked."""

    def forward(self, rows: Tensor) -> Tensor:
        return (rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 0.1)).softmax(-1)


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("mesh", ["tp=2", "dp=2, tp=3"])
def test_reductions_of_a_rows_features(mesh: str, fuse: bool) -> None:
    torch.manual_seed(0)
    batch = routed(torch.randint(0, EXPERTS, (BATCH, TOKENS, CHOSEN)))
    del batch["scale"]
    inputs = dict.fromkeys(batch, "dp") if "dp" in mesh else {}
    params = {"up": "-, -, tp", "down": "-, tp, -"}
    plan = Plan.model_validate({"mesh": mesh, "params": params, "inputs": inputs, "fuse": fuse})
    compiled = shardc.compile(Activated(Features()), batch, plan=plan, loss=mean_of_squares)
    assert any(node.target is GROUP_ROWS for node in compiled.body.calls())
    report = compiled.verify()
    assert report.ok, str(report)
    assert report.eager_error is not None
