"""Loops over experts: one grouped product where experts are alike, else all tokens for each; what is refused.

Longer than 400 lines: each form is compared by the same few functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import shardc
from shardc.api import Program
from shardc.ir.collectives import collectives
from shardc.ir.graph import op_name
from shardc.ir.ops.experts import EXPERT_MM, GROUP_ROWS
from tests.expert_loops import (
    CHOSEN,
    EXPERTS,
    GROUPED,
    HIDDEN,
    LitGpt,
    Mixtral,
    Mixture,
    Regularised,
    Stacked,
    Unlike,
    rows,
)

DP2: dict[str, Any] = {"mesh": "dp=2", "inputs": {"x": "dp"}}
EP: dict[str, Any] = {"params": {"up": "ep", "down": "ep", "bias": "ep"}}
WIDE: dict[str, Any] = {
    "params": {"experts.*.w1.weight": "tp, -", "experts.*.w3.weight": "tp, -", "experts.*.w2.weight": "-, tp"}
}
LAYOUTS: dict[str, tuple[type[Mixture], dict[str, Any]]] = {
    "ep2": (Stacked, {"mesh": "ep=2", **EP}),
    "dp2 x ep2": (Stacked, {**DP2, **EP, "mesh": "dp=2, ep=2"}),
    "all to all": (Stacked, {"mesh": "ep=2", "inputs": {"x": "ep"}, **EP, "experts": "all_to_all"}),
    "capacity": (Stacked, {"mesh": "ep=2", "inputs": {"x": "ep"}, **EP, "experts": {"capacity": 4.0}}),
    "tp2": (Mixtral, {"mesh": "tp=2", **WIDE}),
    "dp2 x tp2": (LitGpt, {**DP2, **WIDE, "mesh": "dp=2, tp=2"}),
    "pipeline": (Mixtral, {"mesh": "pp=2", "pipeline": {"microbatches": 2}}),
    "fuse": (Mixtral, DP2 | {"fuse": True}),
    "accumulate": (Mixtral, DP2 | {"accumulate": 2}),
    "recompute": (LitGpt, DP2 | {"recompute": "full"}),
    "zero3": (Mixtral, DP2 | {"storage": {"zero": 3, "axes": ["dp"]}}),
}


def model_of(kind: type[nn.Module]) -> Any:
    torch.manual_seed(0)
    return kind().double()


def compiled(model: nn.Module, plan: dict[str, Any] | None = None, **options: Any) -> Program:
    return shardc.compile(model, {"x": rows()}, plan=plan or DP2, **options)


def is_grouped(program: Program) -> bool:
    return any(call.target is GROUP_ROWS for call in program.body.calls())


def codes(program: Program) -> set[str]:
    return {diagnostic.code for diagnostic in program.diagnostics}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", GROUPED)
def test_experts_that_are_alike_are_grouped(kind: type[Mixture]) -> None:
    model = model_of(kind)
    program = compiled(model)
    products = [call for call in program.body.calls() if call.target is EXPERT_MM]
    assert len(products) == (4 if kind is Stacked else 6)  # forward, and the gradients of rows
    assert not [c for c in program.body.calls() if op_name(c.target) in ("shardc.grouped_mm", "sort", "index_add")]
    assert {c.kind for c in collectives(program.body)} == {"all_reduce"}
    assert "SC129" not in codes(program)
    report = program.verify()
    assert report.ok, str(report)
    assert report.eager_error is not None
    assert report.eager_error < 1e-12


@pytest.mark.sampled(6)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_on_every_layout_five_steps_are_eagers(layout: str) -> None:
    kind, plan = LAYOUTS[layout]
    model = model_of(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    program = compiled(model, plan, optimizer=optimizer)
    assert program.verify().ok
    twin = model_of(kind)
    other = torch.optim.AdamW(twin.parameters(), lr=1e-2, eps=1e-3)
    with program.launch() as trainer:
        for seed in range(5):
            batch = rows(seed)
            other.zero_grad()
            loss = twin(batch)
            loss.backward()
            other.step()
            assert float(trainer.step({"x": batch}).loss) == pytest.approx(float(loss.detach()), rel=1e-12)
        for name, p in twin.named_parameters():
            torch.testing.assert_close(trainer.state[name], p.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", ["all to all", "ep2", "dp2 x ep2"])
def test_no_expert_weight_is_gathered(layout: str) -> None:
    program = compiled(model_of(LAYOUTS[layout][0]), LAYOUTS[layout][1])
    assert not codes(program) & {"SC203", "SC209", "SC129"}
    assert "all_gather" not in {c.kind for c in collectives(program.body)}


def test_an_axis_for_the_number_of_experts_that_are_modules_says_what_it_does() -> None:
    plan: dict[str, Any] = {"mesh": "ep=2", "inputs": {"x": "ep"}}
    program = compiled(model_of(Mixtral), plan | {"params": {"experts.*.*.weight": "ep"}, "experts": "all_to_all"})
    said = {d.code: d for d in program.diagnostics}
    assert "width of each expert" in said["SC231"].message
    assert said["SC231"].tensor == "experts.0.w1.weight"
    assert "modules" in said["SC229"].message
    assert "stack the weights" in (said["SC229"].hint or "")
    assert program.verify().ok
    for params in ({}, {name: text.replace("tp", "ep") for name, text in WIDE["params"].items()}):
        assert "SC231" not in codes(compiled(model_of(Mixtral), plan | {"params": params}))
    assert "SC231" not in codes(compiled(model_of(Stacked), LAYOUTS["all to all"][1]))


def test_dropout_draws_the_same_on_all_layouts() -> None:
    model = model_of(Regularised)
    program = compiled(model)
    assert is_grouped(program)
    assert program.verify().ok
    one = shardc.compile(model_of(Regularised), {"x": rows()}, mesh="dp=1")
    losses = [float(p.launch().step({"x": rows()}).loss) for p in (program, one)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    quiet = shardc.compile(Regularised(0.0).double(), {"x": rows()}, plan=DP2).verify()
    assert quiet.ok
    assert quiet.eager_error is not None
    assert quiet.eager_error < 1e-12


# ------------------------------------------------------------------------------------------ masked
def test_unlike_experts_compute_all_tokens_and_it_is_said() -> None:
    program = compiled(model_of(Unlike))
    assert not is_grouped(program)
    (note,) = [d for d in program.diagnostics if d.code == "SC129"]
    assert note.severity == "note"
    assert f"{EXPERTS} experts" in note.message
    assert f"{EXPERTS // CHOSEN} times" in note.message
    assert note.hint
    assert note.location
    report = program.verify()
    assert report.ok
    assert report.eager_error is not None
    assert report.eager_error < 1e-12


class Fixed(Mixture):
    """Experts that the batch chooses: a token may choose one twice, or none."""

    adds = True

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        h = self.inner(x)
        out = torch.zeros_like(h)
        for e in range(EXPERTS):
            token, choice = torch.where(ids == e)
            rows = self.experts[e](h[token]) * (choice + 1).to(h.dtype).unsqueeze(-1)
            if self.adds:
                out.index_add_(0, token, rows)
            else:
                out[token] += rows
        return (h + out).square().mean()


@settings(max_examples=15, deadline=None)
@given(st.data())
def check_routings(program: Program, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(-1, EXPERTS), min_size=16, max_size=16))
    batch = {"x": rows(3, 8, 1)[:, 0], "ids": torch.tensor(ids).view(8, 2)}
    report = program.verify(batch)
    assert report.ok, str(report)
    assert report.eager_error is not None
    assert report.eager_error < 1e-12


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mesh", ["dp=2", "dp=3"])
def test_any_routing_is_as_in_eager_pytorch(mesh: str) -> None:
    """Experts without tokens, tokens of none, and of one expert twice; ids that are of no expert."""
    sample = {"x": rows(3, 8, 1)[:, 0], "ids": torch.randint(0, EXPERTS, (8, 2))}
    plan = {"mesh": mesh, "inputs": {"*": "dp"}}
    program = shardc.compile(model_of(Fixed), sample, plan=plan)
    assert "SC129" not in codes(program)
    check_routings(program)


# ------------------------------------------------------------------------------------------ what is read and written
class Sequential(Mixture):
    """Each expert reads what those before it have added."""

    def moe(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, HIDDEN)
        weights, ids = self.route(flat)
        flat = flat.clone()
        for e in range(EXPERTS):
            token, choice = torch.where(ids == e)
            flat.index_add_(0, token, self.experts[e](flat[token]) * weights[token, choice, None])
        return flat.view_as(x)


class Watched(Mixture):
    """The sum is read in the middle of the loop."""

    def moe(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, HIDDEN)
        weights, ids = self.route(flat)
        out, seen = torch.zeros_like(flat), torch.zeros((), dtype=flat.dtype)
        for e in range(EXPERTS):
            token, choice = torch.where(ids == e)
            out.index_add_(0, token, self.experts[e](flat[token]) * weights[token, choice, None])
            seen = seen + out.clone().square().sum()
        return out.view_as(x) * seen.sigmoid()


class Scaled(Mixture):
    """What experts read is written to behind the loop, before the sum is read."""

    def moe(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, HIDDEN)
        weights, ids = self.route(flat)
        flat = flat.clone()
        out = torch.zeros_like(flat)
        for e in range(EXPERTS):
            token, choice = torch.where(ids == e)
            out.index_add_(0, token, self.experts[e](flat[token]) * weights[token, choice, None])
        flat.mul_(2)
        return (out + flat).view_as(x)


class Changing(Mixture):
    """What experts read changes between them."""

    def moe(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, HIDDEN)
        weights, ids = self.route(flat)
        flat = flat.clone()
        out = torch.zeros_like(flat)
        for e in range(EXPERTS):
            token, choice = torch.where(ids == e)
            out.index_add_(0, token, self.experts[e](flat[token]) * weights[token, choice, None])
            flat.mul_(0.5)
        return out.view_as(x)


class Reduced(Mixture):
    """Rows meet a number that is computed of all rows of their expert."""

    def __init__(self, of: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.of = of

    def moe(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, HIDDEN)
        weights, ids = self.route(flat)
        out = torch.zeros_like(flat)
        for e in range(EXPERTS):
            token, choice = torch.where(ids == e)
            out.index_add_(0, token, self.of(self.experts[e](flat[token])) * weights[token, choice, None])
        return out.view_as(x)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "of",
    [lambda y: y * (y == y.amax()), lambda y: y * (y <= y.max().detach()), lambda y: y - y.mean()],
    ids=["equals", "exceeds", "mean"],
)
def test_rows_that_meet_a_number_of_all_rows_are_compared_with_it_exactly(of: Callable[[Tensor], Tensor]) -> None:
    """In the grouped form they would be rounded otherwise than those that the number was computed of."""
    program = compiled(Reduced(of).double())
    assert "SC129" in {d.code for d in program.diagnostics}
    report = program.verify()
    assert report.ok, str(report)
    assert report.eager_error is not None
    assert report.eager_error < 1e-12


class Detached(Mixture):
    """A part of each expert that no gradient goes through."""

    def moe(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, HIDDEN)
        weights, ids = self.route(flat)
        out = torch.zeros_like(flat)
        for e in range(EXPERTS):
            token, choice = torch.where(ids == e)
            given = flat[token]
            with torch.no_grad():
                size = self.experts[e](given).abs().amax(-1, keepdim=True) + 1
            out.index_add_(0, token, self.experts[e](given) / size * weights[token, choice, None].detach())
        return out.view_as(x)


class Twice(Mixture):
    """Each expert gives twice, to two tensors that are the same in the end."""

    def moe(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, HIDDEN)
        weights, ids = self.route(flat)
        one, two = torch.zeros_like(flat), torch.ones_like(flat)
        for e in range(EXPERTS):
            token, choice = torch.where(ids == e)
            y = self.experts[e](flat[token])
            one.index_add_(0, token, y * weights[token, choice, None])
            one.index_add_(0, token, y.tanh())
            two[token] += y.sigmoid()
        return (one * two).view_as(x)


class Permuted(Mixture):
    """Loops backwards, over other experts than their numbers say."""

    def moe(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, HIDDEN)
        weights, ids = self.route(flat)
        out = torch.zeros_like(flat)
        for e in reversed(range(EXPERTS)):
            token, choice = torch.where(ids == e)
            out = out.index_add(0, token, self.experts[(e + 1) % EXPERTS](flat[token]) * weights[token, choice, None])
        return out.view_as(x)


class Some(Mixture):
    """Only some experts are in the loop."""

    def moe(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, HIDDEN)
        weights, ids = self.route(flat)
        out = torch.zeros_like(flat)
        for e in (1, 3):
            token, choice = torch.where(ids == e)
            out.index_add_(0, token, self.experts[e](flat[token]) * weights[token, choice, None])
        return out.view_as(x)


class First(Some):
    """The first ones alone: rows of others are of none."""

    def moe(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, HIDDEN)
        weights, ids = self.route(flat)
        out = torch.ones_like(flat)
        for e in range(EXPERTS - 1):
            token, choice = torch.where(ids == e)
            out.index_add_(0, token, self.experts[e](flat[token]) * weights[token, choice, None])
        return out.view_as(x)


class Adapted(Mixture):
    """Frozen experts with low-rank additions, one of whose halves all experts share; weights of two are one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts.requires_grad_(False)
        self.experts[3].w1.weight = self.experts[1].w1.weight
        self.shared = nn.Linear(HIDDEN, 3, bias=False)
        self.own = nn.ModuleList([nn.Linear(3, HIDDEN, bias=False) for _ in range(EXPERTS)])
        self.register_buffer("scales", torch.arange(1.0, EXPERTS + 1))

    def moe(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, HIDDEN)
        weights, ids = self.route(flat)
        out = torch.zeros_like(flat)
        for e in range(EXPERTS):
            token, choice = torch.where(ids == e)
            h = flat[token]
            y = self.experts[e](h) + self.own[e](self.shared(h)) * self.scales[e]
            out.index_add_(0, token, y * weights[token, choice, None])
        return out.view_as(x)


ODD = (Sequential, Watched, Scaled, Changing, Detached, Twice, Permuted, Some, First, Adapted)
ALIKE = (Detached, Twice, Permuted, First, Adapted)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ODD)
def test_reads_and_writes_keep_their_order(kind: type[Mixture]) -> None:
    program = compiled(model_of(kind))
    report = program.verify()
    assert report.ok, str(report)
    assert report.eager_error is not None
    assert report.eager_error < 1e-12
    assert is_grouped(program) == (kind in ALIKE)


# ------------------------------------------------------------------------------------------ what is refused
class Counts(Mixture):
    """A number of Python that depends on which experts have tokens."""

    def moe(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, HIDDEN)
        weights, ids = self.route(flat)
        out, busy = torch.zeros_like(flat), 0
        for e in range(EXPERTS):
            token, choice = torch.where(ids == e)
            if token.numel() == 0:
                continue
            busy += 1
            out.index_add_(0, token, self.experts[e](flat[token]) * weights[token, choice, None])
        return out.view_as(x) / max(busy, 1)


class Lengths(Mixture):
    def moe(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, HIDDEN)
        _, ids = self.route(flat)
        out = torch.zeros_like(flat)
        for e in range(EXPERTS):
            token, _ = torch.where(ids == e)
            out.index_add_(0, token, self.experts[e](flat[token]) / len(token))
        return out.view_as(x)


class Across(Mixture):
    """Rows of one expert that depend on each other."""

    def moe(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, HIDDEN)
        _, ids = self.route(flat)
        out = torch.zeros_like(flat)
        for e in range(EXPERTS):
            token, _ = torch.where(ids == e)
            out.index_add_(0, token, self.experts[e](flat[token]).cumsum(0))
        return out.view_as(x)


@pytest.mark.parametrize("kind", [Counts, Lengths, Across])
def test_what_depends_on_how_many_tokens_an_expert_has_is_refused(kind: type[Mixture]) -> None:
    with pytest.raises(shardc.ShardcError) as refused:
        compiled(model_of(kind))
    assert refused.value.code == "SC101"
    assert refused.value.diagnostics[0].hint
    assert refused.value.diagnostics[0].location


def test_a_split_by_numbers_of_rows_says_what_to_write() -> None:
    class Split(Mixture):
        def moe(self, x: Tensor) -> Tensor:
            flat = x.reshape(-1, HIDDEN)
            _, ids = self.route(flat)
            order = ids.flatten().argsort()
            counts = torch.bincount(ids.flatten(), minlength=EXPERTS).tolist()
            parts = flat[order // CHOSEN].split(counts)
            given = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
            return torch.zeros_like(flat).index_add(0, order // CHOSEN, given).view_as(x)

    with pytest.raises(shardc.ShardcError) as refused:
        compiled(model_of(Split))
    assert refused.value.code == "SC101"
    assert "split of rows" in str(refused.value)
    assert "index_add_" in (refused.value.diagnostics[0].hint or "")


def test_a_token_that_may_choose_an_expert_twice_is_not_written_once() -> None:
    model = model_of(Fixed)
    model.adds = False
    sample = {"x": rows(3, 8, 1)[:, 0], "ids": torch.randint(0, EXPERTS, (8, 2))}
    with pytest.raises(shardc.ShardcError) as refused:
        shardc.compile(model, sample, plan={"mesh": "dp=2", "inputs": {"*": "dp"}})
    assert refused.value.code == "SC101"
    assert "twice" in str(refused.value)


def test_rows_of_an_expert_are_no_rows_of_another() -> None:
    class Mixed(Mixture):
        def moe(self, x: Tensor) -> Tensor:
            flat = x.reshape(-1, HIDDEN)
            _, ids = self.route(flat)
            first, second = torch.where(ids == 0)[0], torch.where(ids == 1)[0]
            return torch.zeros_like(flat).index_add(0, first, self.experts[1](flat[second])).view_as(x)

    with pytest.raises(shardc.ShardcError) as refused:
        compiled(model_of(Mixed))
    assert refused.value.code == "SC101"


def test_losses_of_rows_keep_their_masks() -> None:
    """What of an expert's rows is reduced is masked, also beside rows that are given back."""

    class Balanced(Mixture):
        def forward(self, x: Tensor) -> Tensor:
            flat = self.inner(x).reshape(-1, HIDDEN)
            weights, ids = self.route(flat)
            out, loss = torch.zeros_like(flat), torch.zeros((), dtype=flat.dtype)
            for e in range(EXPERTS):
                token, choice = torch.where(ids == e)
                y = self.experts[e](flat[token])
                loss = loss + F.mse_loss(y, flat[token], reduction="sum") / flat.shape[0]
                out.index_add_(0, token, y * weights[token, choice, None])
            return out.square().mean() + loss

    report = compiled(model_of(Balanced)).verify()
    assert report.ok
    assert report.eager_error is not None
    assert report.eager_error < 1e-12
