"""Prefix sums, products, log-sum-exps and extremes along a dim that ranks have parts of: exact for every layout."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.nn import functional as F

from shardc.frontend.op_overrides import cumprod_backward
from shardc.frontend.trace import trace
from shardc.ir.blocks import truncated
from shardc.ir.graph import Graph, Port, ValueInfo, info, set_info, update
from shardc.ir.mesh import Mesh
from shardc.ir.ops.collectives import all_gather
from shardc.ir.ops.cumulative import CUMULATIVE, CUMULATIVE_PART, CUMULATIVE_TOTALS
from shardc.ir.ops.cumulative_extremes import (
    CUMULATIVE_EXTREME,
    CUMULATIVE_EXTREME_PART,
    EXTREME_GRADIENT,
    EXTREME_GRADIENT_PART,
    EXTREME_SPILLS,
    EXTREME_TOTALS,
)
from shardc.ir.schema import given as arguments
from shardc.ir.types import Atom, TensorType
from shardc.passes.sharding.localize import Localize
from shardc.passes.type_check import type_faults
from shardc.rules.projection import project
from shardc.runtime.oracle.simulate import simulate
from tests.models.test_long_sequences import compiled
from tests.rules.test_shift import Layout, atoms

KINDS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sum": torch.cumsum,
    "prod": torch.cumprod,
    "logsumexp": torch.logcumsumexp,
}


def of_all_ranks(target: Any, values: Sequence[Tensor], args: tuple[Any, ...], atom: Atom, mesh: Mesh) -> list[Tensor]:
    """A call along dim 1 of values that lie so, made local; and what all ranks compute together."""
    types = [TensorType(v.dtype, ((Atom(v.shape[0]),), (atom,), (Atom(v.shape[2]),))) for v in values]
    made = fx.Graph()
    nodes = [made.placeholder(f"x{i}") for i in range(len(values))]
    for i, (node, type) in enumerate(zip(nodes, types, strict=True)):
        set_info(node, ValueInfo(f"x{i}", type))
    call, (first, *_) = made.call_function(target, (*nodes, *args)), types
    results = [call]
    if target is CUMULATIVE_EXTREME:
        pair = (first, first.with_dtype(torch.int64))
        set_info(call, ValueInfo("y", None, results=pair))
        results = [made.call_function(operator.getitem, (call, i)) for i in range(2)]
        for i, (node, type) in enumerate(zip(results, pair, strict=True)):
            set_info(node, ValueInfo(f"y.{i}", type))
    else:
        set_info(call, ValueInfo("y", first))
    made.output(tuple(results))
    ports = [Port("output", f"y{i}") for i in range(len(results))]
    graph = Graph(made, mesh, [Port("input", f"x{i}") for i in range(len(values))], ports)
    projection = project(call)
    assert not projection.blocked & projection.operand_pieces
    split = dict(zip(projection.operands[0], first.placement, strict=True))
    update(call, assignment=tuple((projection.names[p], axes) for p, axes in split.items() if axes))
    local = Localize().run(graph)
    assert not type_faults(local)
    return list(simulate(local, {f"x{i}": v for i, v in enumerate(values)}).values())


def lies(layout: Layout, less: int) -> tuple[Atom, Mesh]:
    size, axes, mesh = layout
    part = truncated(size, int(size) - less) if less and int(size) - less > 1 else None
    return Atom(size if part is None else part, axes), mesh


def random(atom: Atom, seed: int, kind: str) -> Tensor:
    """Numbers with ties, zeros, infinities and NaN, as `kind` says."""
    torch.manual_seed(seed)
    x = torch.randn(2, int(atom.size), 3, dtype=torch.float64)
    if kind == "ties":
        return x.mul(2).round()
    if kind == "zeros":
        return torch.where(torch.rand_like(x) < 0.15, 0.0, x)
    if kind == "odd":
        odd = torch.tensor([math.nan, math.inf, -math.inf])[torch.randint(0, 3, x.shape)]
        return torch.where(torch.rand_like(x) < 0.15, odd.double(), x)
    return x


@given(
    atoms(), st.integers(0, 3), st.sampled_from([*KINDS]), st.booleans(), st.sampled_from(["", "zeros", "odd"]),
    st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_sums_and_products_over_any_layout(
    layout: Layout, less: int, kind: str, reverse: bool, numbers: str, seed: int
) -> None:
    atom, mesh = lies(layout, less)
    x = random(atom, seed, numbers)
    (found,) = of_all_ranks(CUMULATIVE, [x], (1, kind, reverse), atom, mesh)
    expected = KINDS[kind](x.flip(1), 1).flip(1) if reverse else KINDS[kind](x, 1)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
    whole = torch.randint(-4, 5, x.shape)
    if kind != "logsumexp":
        (found,) = of_all_ranks(CUMULATIVE, [whole], (1, kind, reverse), atom, mesh)
        assert torch.equal(found, KINDS[kind](whole.flip(1), 1).flip(1) if reverse else KINDS[kind](whole, 1))


@given(atoms(), st.integers(0, 3), st.booleans(), st.sampled_from(["", "ties", "odd"]), st.integers(0, 99))
@settings(max_examples=200, deadline=None)
def test_extremes_and_their_gradients_over_any_layout(
    layout: Layout, less: int, largest: bool, numbers: str, seed: int
) -> None:
    atom, mesh = lies(layout, less)
    x = random(atom, seed, numbers)
    values, places = of_all_ranks(CUMULATIVE_EXTREME, [x], (1, largest), atom, mesh)
    expected = x.cummax(1) if largest else x.cummin(1)
    assert torch.equal(places, expected.indices)
    torch.testing.assert_close(values, expected.values, rtol=0, atol=0, equal_nan=True)
    g = random(atom, seed + 100, "")
    (found,) = of_all_ranks(EXTREME_GRADIENT, [g, places], (1,), atom, mesh)
    torch.testing.assert_close(found, torch.zeros_like(g).scatter_add(1, places, g), rtol=1e-12, atol=1e-12)


FAR: dict[str, list[float]] = {
    "0 of the first rank, which others do not revive": [1e-200] * 4 + [1e200] * 4 + [1e200] * 4 + [1.0] * 4,
    "what one rank overflows by, and one before makes up for": [1e-100] * 3 + [1.0] + [1e100] * 4 + [1e-50] * 8,
    "what one rank loses, and one before makes up for": [1e75] * 4 + [1e-100] * 4 + [1e50] * 2 + [1.0] * 6,
    "infinite": [1e200] * 4 + [1e-200] * 12,
    "zero times infinite": [0.0] * 4 + [math.inf] * 4 + [1.0] * 8,
    "least numbers": [5e-324] + [1.0] * 3 + [2.0] * 4 + [2.0**200] * 4 + [1.0] * 4,
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", FAR)
def test_products_that_are_out_of_reach(name: str, dtype: torch.dtype) -> None:
    x = torch.tensor(FAR[name], dtype=torch.float64).view(1, 16, 1).expand(2, 16, 3)
    if dtype == torch.float32:
        x = (x.sign() * x.abs().log2().div(8).exp2()).to(dtype)
    (found,) = of_all_ranks(CUMULATIVE, [x], (1, "prod", False), Atom(16, ("cp",)), Mesh(cp=4))
    expected = [x[:, 0]]  # factor by factor: on CPUs torch multiplies in float64, and rounds what it yields
    for row in range(1, 16):
        expected.append(expected[-1] * x[:, row])
    rtol = 1e-12 if dtype == torch.float64 else 1e-4  # least numbers have few digits
    torch.testing.assert_close(found, torch.stack(expected, 1), rtol=rtol, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_halves_are_rounded_once(kind: str, dtype: torch.dtype) -> None:
    """The error against float64 is at most twice that of eager PyTorch in the same dtype."""
    torch.manual_seed(0)
    for atom, mesh in ((Atom(64, ("cp",)), Mesh(cp=4)), (Atom(50, ("cp",)), Mesh(cp=4))):
        x = torch.randn(4, int(atom.size), 8).to(dtype)
        x = (1 + x / 16) if kind == "prod" else x
        (found,) = of_all_ranks(CUMULATIVE, [x], (1, kind, False), atom, mesh)
        exact = KINDS[kind](x.double(), 1)
        eager = KINDS[kind](x, 1) if kind != "logsumexp" else KINDS[kind](x.float(), 1).to(dtype)
        assert found.dtype == dtype
        assert (found.double() - exact).abs().max() <= 2 * (eager.double() - exact).abs().max()
        assert (found.double() - exact).abs().mean() <= 1.1 * (eager.double() - exact).abs().mean()


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("share", [0.0, 0.15, 0.6, 1.0])
@pytest.mark.parametrize("dtypes", [(torch.float64, torch.float64), (torch.float32, torch.float64)], ids=str)
def test_gradients_of_products(dim: int, share: float, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """With no zeros, with one and with many; a row of zeros alone; one number; and what is infinite or no number."""
    for seed, odd in [(s, odd) for s in range(4) for odd in (False, True)]:
        torch.manual_seed(seed)
        for shape in ((5, 7, 3), (1, 4), (4, 1), (1,)):
            x = torch.randn(shape, dtype=dtypes[0])
            x = torch.where(torch.rand(shape) < share, torch.tensor([0.0, -0.0])[torch.randint(0, 2, shape)], x)
            if odd:
                x = torch.where(torch.rand(shape) < 0.05, math.nan, x)
            x, dim = x.requires_grad_(), dim % x.dim()
            y = x.to(dtypes[1]).cumprod(dim)
            g = torch.randn_like(y)
            (expected,) = torch.autograd.grad(y, x, g)
            with torch.no_grad():
                found = cumprod_backward(g.to(x.dtype), x, dim, y).to(x.dtype)
            rtol = 1e-12 if x.dtype == torch.float64 else 1e-5
            torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol, equal_nan=True)


def test_gradients_of_products_take_no_product_for_each_element() -> None:
    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(64, 3))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.w).cumprod(0).sum()

    traced = trace(Products(), torch.ones(64, 3))
    targets = [node.target for node in traced.graph.nodes]
    assert targets.count(torch.ops.aten.cumprod.default) == 2
    assert targets.count(torch.ops.aten.cumsum.default) == 3


# ------------------------------------------------------------------------------------------------ models
class Prefixes(nn.Module):
    """Prefixes of values that want a gradient, and of numbers that want none."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.tokens, self.gate, self.head = nn.Embedding(24, width), nn.Linear(width, width), nn.Linear(width, 24)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids)
        gate = torch.sigmoid(self.gate(x))
        seen = (labels != 3).cumsum(1).to(gate.dtype)[..., None]
        x = x + gate.cumsum(1) / 3 / (1 + seen) + torch.where(gate > 0.7, 0.0, gate).cumprod(1) + x.logcumsumexp(1)
        greatest = x.cummax(1)
        x = greatest.values + gate.cummin(1).values - greatest.indices / 7
        return F.cross_entropy(self.head(torch.tanh(x).to(gate.dtype)).flatten(0, 1), labels.flatten())


def prefixes(length: int, mesh: str, balance: str, **plan: Any) -> Any:
    torch.manual_seed(0)
    model = Prefixes() if "precision" in plan else Prefixes().double()
    return compiled(model, length, mesh, balance, **plan)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("balance", ["zigzag", "none"])
@pytest.mark.parametrize("length", [16, 17, 50])
@pytest.mark.parametrize("mesh", ["cp=2", "cp=4", "dp=2, cp=2", "cp=2, tp=2"])
def test_models_equal_eager(mesh: str, length: int, balance: str) -> None:
    params = {"gate.weight": "tp, -", "gate.bias": "tp"} if "tp" in mesh else {}
    program = prefixes(length, mesh, balance, params=params)
    assert program.verify().ok
    assert not [d for d in program.diagnostics if d.code == "SC203" and d.severity == "warning"]
    ranks, runs = program.mesh.size("cp"), 2 if balance == "zigzag" else 1
    samples = 4 // (2 if "dp" in mesh else 1)
    for c in program.collectives():
        if c.kind == "all_gather" and "cp" in c.axes:  # two rows of 8 bytes a number for each run, at most
            assert c.bytes_per_rank <= 2 * 8 * 6 * samples * runs * (ranks - 1), c.value


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "plan", [{"fuse": True, "accumulate": 2}, {"precision": "bf16"}, {"recompute": "full"}], ids=str
)
def test_models_with_other_plans(plan: dict[str, Any]) -> None:
    assert prefixes(17, "dp=2, cp=2", "zigzag", **plan).verify().ok


# ------------------------------------------------------------------------------------------------ what is refused
MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "another kind of totals": (CUMULATIVE_TOTALS, "kind", "logsumexp"),
    "a total too many": (CUMULATIVE_TOTALS, "blocks", 3),
    "another layout of totals": (CUMULATIVE_TOTALS, "source", "17"),
    "another kind": (CUMULATIVE_PART, "kind", "logsumexp"),
    "another layout": (CUMULATIVE_PART, "source", "16/17"),
    "the least": (EXTREME_TOTALS, "largest", False),
    "the least behind": (CUMULATIVE_EXTREME_PART, "largest", False),
    "extremes of another layout": (CUMULATIVE_EXTREME_PART, "source", "17"),
    "extremes along another dim": (EXTREME_TOTALS, "dim", 2),
    "spills of another layout": (EXTREME_SPILLS, "source", "17"),
    "a spill too many": (EXTREME_SPILLS, "blocks", 3),
    "gradients of another layout": (EXTREME_GRADIENT_PART, "source", "17"),
}


def _set(node: fx.Node, name: str, value: Any) -> None:
    args = {**arguments(node), name: value}
    assert arguments(node)[name] != value
    node.args, node.kwargs = tuple(args[a.name] for a in node.target._schema.arguments), {}  # type: ignore[union-attr]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("balance", ["zigzag", "none"])
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_call_is_refused(name: str, balance: str) -> None:
    target, argument, value = MUTATIONS[name]
    body = prefixes(16, "cp=4", balance).body.copy()
    assert not type_faults(body)
    _set(next(n for n in body.calls() if n.target is target), argument, value)
    assert type_faults(body)


@pytest.mark.parametrize("target", [CUMULATIVE_PART, CUMULATIVE_EXTREME_PART, EXTREME_GRADIENT_PART])
def test_totals_of_others_are_needed(target: Any) -> None:
    """Totals that are not gathered, or that are those of another value, are no totals."""
    body = prefixes(16, "cp=4", "none").body.copy()
    reader = next(n for n in body.calls() if n.target is target)
    name = {CUMULATIVE_PART: "totals", CUMULATIVE_EXTREME_PART: "values", EXTREME_GRADIENT_PART: "spilled"}[target]
    gathered = arguments(reader)[name]
    assert gathered.target is all_gather
    others = [n for n in body.calls() if n.target is all_gather and n is not gathered]
    for other in (arguments(gathered)["x"], *others):
        changed = body.copy()
        named = {(info(n).name, n.target): n for n in changed.fx.nodes if n.op != "output"}
        node, value = named[info(reader).name, target], named[info(other).name, other.target]
        _set(node, name, value)
        assert type_faults(changed)


def test_explain_tells_why_totals_are_gathered() -> None:
    class Greatest(Prefixes):
        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            return super().forward(ids, labels) + self.tokens(ids).max(1).values.mean()

    program = compiled(Greatest(), 16, "cp=2", "none")
    told = "\n".join(str(program.explain(c.value)) for c in program.collectives() if c.kind == "all_gather")
    for what in ("sum", "product", "log-sum-exp", "extreme"):
        assert f"those of other ranks come as one {what}" in told
    assert "its greatest or least row is found of one of each rank" in told
    assert "what those of a rank leave to another one comes as one sum" in told
    assert 'ids = "-, cp"' in told or 'labels = "-, cp"' in told
