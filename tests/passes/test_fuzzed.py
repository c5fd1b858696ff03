"""What fuzzing found (tests/properties), each cut down to the least model that shows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardc
from shardc.ir.graph import type_of
from shardc.ir.mesh import Mesh
from shardc.ir.types import TensorType
from shardc.passes.sharding.reshard_steps import plan as steps_between
from shardc.rules.notation import Notation, fit
from shardc.rules.projection import overlay


class Model(nn.Module):
    """`step(model, x)` is the loss; parameters by name and shape; `at` is a module whose output plans can place."""

    def __init__(self, step: Callable[[Any, Tensor], Tensor], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.step = step
        self.at = nn.Identity()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) * 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self, x)


def check(model: nn.Module, x: Tensor, mesh: str, plan: dict[str, Any]) -> shardc.Program:
    program = shardc.compile(model, x, mesh=mesh, plan=plan)
    report = program.verify()
    assert report.ok, str(report)
    return program


def test_an_axis_of_one_rank_on_a_dim_of_one_shards_nothing() -> None:
    model = Model(lambda m, x: (x * m.w).square().sum(), w=(1,))
    check(model, torch.randn(3), "dp=1, tp=2", {"params": {"w": "dp"}})


def test_an_open_dim_gives_up_the_axes_that_fixed_dims_take() -> None:
    """The input brings dp to dim 0, which is open; the annotation wants dp on dim 1."""
    model = Model(lambda m, x: (m.at(x * m.w) ** 2).sum(), w=(4,))
    check(model, torch.randn(4, 4), "dp=2", {"inputs": {"x": "dp, -"}, "activations": {"at": "?, dp"}})


@pytest.mark.parametrize("step", [lambda y: 1.0 - y, lambda y: y + 1.0, lambda y: 2.0 / (y + 9.0)])
def test_a_number_is_not_added_once_a_shard(step: Callable[[Tensor], Tensor]) -> None:
    """x @ w is a pending sum; of `1 - y` the number is an operand too, and no pending sum."""
    model = Model(lambda m, x: F.linear(step(x @ m.w), m.v).square().sum(), w=(6, 4), v=(4, 4))
    check(model, torch.randn(3, 6), "dp=2, tp=2", {"params": {"w": "dp, tp", "v": "tp, dp"}})


def test_padding_is_not_zero_after_one_minus_x() -> None:
    """Three of a dim over four ranks: the sum must not see the padding, which `1 - x` made 1."""
    model = Model(lambda m, x: (1.0 - x).sum(-1).square().sum() * m.w.sum(), w=(2,))
    check(model, torch.randn(2, 3), "tp=4", {"inputs": {"x": "-, tp"}})


def test_dropout_of_a_scalar() -> None:
    model = Model(lambda m, x: F.dropout((x * m.w).sum(), 0.5), w=(4,))
    check(model, torch.randn(4), "dp=2", {"inputs": {"x": "dp"}})


def test_a_gradient_is_factored_as_its_parameter_where_cuts_do_not_nest() -> None:
    """The activation falls into (3 4 2), the annotation cuts the weight into (2 12)."""

    def step(m: Any, x: Tensor) -> Tensor:
        y = m.at(F.linear(x, m.w))
        q, k, v = (t.reshape(3, 3, 4, 2).transpose(1, 2) for t in y.split(8, 2))
        return F.scaled_dot_product_attention(q, k, v).square().sum() + F.linear(y, m.v).square().sum()

    check(Model(step, w=(24, 8), v=(12, 24)), torch.randn(3, 3, 8), "dp=1, tp=2", {"params": {"v": "-, 2*dp"}})


def test_a_factor_that_is_cut_two_ways_does_not_take_its_neighbours_along() -> None:
    """a b -> (a b), b cut into (3 2) on one side and (2 3) on the other: a still passes through."""
    rule = fit(Notation("a b -> (a b)"), ((4, 6),), ((24,),))
    laid = overlay(rule, [TensorType.parse("f32[4, (3 2)]")], [TensorType.parse("f32[(4 2 3)]")])
    a = laid.operands[0][0]
    assert laid.results[0][0] == a
    assert a not in laid.blocked
    assert set(laid.operands[0][1:]) | set(laid.results[0][1:]) <= laid.blocked


def test_a_view_of_what_comes_out_in_other_strides_without_mutation() -> None:
    """maximum's backward masks in place; retraced without mutation its gradient is contiguous, and the view a copy."""

    def step(m: Any, x: Tensor) -> Tensor:
        q, k, v = (F.linear(x, w).view(2, 2, 3, 2).transpose(1, 2) for w in (m.a, m.b, m.c))
        return F.scaled_dot_product_attention(q, k, v).square().sum() + torch.maximum(k, v).square().sum()

    check(Model(step, a=(6, 3), b=(6, 3), c=(6, 3)), torch.randn(2, 2, 3), "tp=3", {"params": {"a": "tp, -"}})


def test_a_pending_sum_is_not_gathered_over_another_axis_before_it_is_resolved() -> None:
    """The atom must lose b before a can be scattered on it: gathering all that is pending would cost more."""
    before, after = TensorType.parse("f64[5, (3@b 4)] |sum a"), TensorType.parse("f64[5, (3@a 4)]")
    planned = steps_between(before, after, Mesh(a=2, b=3))
    assert planned is not None
    assert [step.kind for step in planned[0]] == ["all_reduce", "all_gather", "slice"]


class Branches(nn.Module):
    """Two convolutions that may both be pending sums, and their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 6, 3, padding=1, bias=False)
        self.conv = nn.Conv2d(6, 8, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(6, 8, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first(x))
        return (self.conv(y) + self.shortcut(y)).square().mean()


@pytest.mark.parametrize(
    "plan",
    [
        {"activations": {"first": "-, tp, -, dp", "shortcut": "-, tp, -, dp"}},
        {"params": {"shortcut.weight": "-, tp, -, dp"}, "activations": {"shortcut": "tp, -, dp, -"}},
        {
            "params": {"conv.weight": "tp, 3*dp, -, -"},
            "activations": {"first": "-, -, tp, -", "shortcut": "-, tp, -, dp"},
        },
    ],
    ids=str,
)
def test_what_is_annotated_is_resolved_at_birth_and_read_so(plan: dict[str, Any]) -> None:
    """conv + shortcut could run on two pending sums; the annotated one is none any more."""
    check(Branches(), torch.randn(4, 4, 4, 4), "dp=4, tp=2", plan)


class Fork(nn.Module):
    """Backward, one pending sum enters `narrow`'s backward, and meets another behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 8, 1, bias=False)
        self.narrow = nn.Conv2d(8, 2, 3, padding=1, bias=False)
        self.left = nn.Conv2d(2, 8, 1, bias=False)
        self.right = nn.Conv2d(8, 8, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        return self.left(self.narrow(y)).square().mean() + self.right(y).square().mean()


def test_results_of_one_call_are_all_pending_or_none() -> None:
    """Resolving the small gradient before `narrow`'s backward spares its weight's, which is large."""
    plan = {"params": {"left.weight": "tp, -, -, -", "right.weight": "tp, -, -, -"}}
    check(Fork(), torch.randn(1, 2, 2, 2), "tp=2", plan)


def test_what_is_smaller_than_its_kernel_stays_when_its_reader_goes() -> None:
    """`u` is a quarter of a row of the kernel that broadcasts it; backward then makes that again for itself."""

    def step(m: Any, x: Tensor) -> Tensor:
        v = F.gelu(F.linear(x, m.a))
        u = F.gelu(F.gelu(x + F.linear(v, m.b)).unsqueeze(0).expand(2, 2))
        loss = 0.0 + (F.gelu(v) * torch.arange(2).cos()).sum()
        return loss + F.mse_loss(u, torch.arange(4).view(2, 2).cos())

    check(Model(step, a=(2, 2), b=(2, 2)), torch.randn(2), "dp=2", {"params": {"a": "dp, -"}, "fuse": True})


def test_the_sum_of_a_vector_is_no_sum_over_rows() -> None:
    """Both are numbers, and no kernel has them at one time: the one is there before the rows, the other after them."""

    def step(m: Any, x: Tensor) -> Tensor:
        return (x * m.a).square().sum() + m.a.square().sum()

    plan = {"precision": "bf16", "fuse": True}
    check(Model(step, a=(8,)), torch.randn(6, 5, 8), "dp=1", plan)


@pytest.mark.parametrize("causal", [False, True])
def test_a_ring_does_not_count_keys_that_every_rank_has_once_a_rank(causal: bool) -> None:
    """The first of six rows is on both ranks."""

    def step(m: Any, x: Tensor) -> Tensor:
        q, k, v = (F.linear(x, w).unflatten(-1, (2, 4)).transpose(1, 2) for w in (m.q, m.k, m.v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).square().sum()

    model = Model(step, q=(8, 8), k=(8, 8), v=(8, 8))
    plan = {"inputs": {"x": "-, [-1, 5]*cp, -"}, "context": "ring"}
    program = check(model, torch.randn(2, 6, 8), "cp=2", plan)
    (said,) = [d for d in program.diagnostics if d.code == "SC240"]
    assert "each rank has a block of its keys" in said.message


@pytest.mark.parametrize("placement", ["-, dp", "dp, -"])
def test_a_parameters_cast_may_have_fewer_atoms_than_it(placement: str) -> None:
    """Backward cuts the rows of w into (2 2 3), while its cast is (3 4), as b says."""

    def step(m: Any, x: Tensor) -> Tensor:
        y = torch.tanh(F.linear(x, m.w, m.b))
        return (F.linear(y, m.u) * F.linear(y, m.v)).square().mean()

    model = Model(step, w=(12, 12), b=(12,), u=(8, 12), v=(8, 12))
    plan = {"params": {"w": placement, "b": "3*dp", "u": "-, 4*dp", "v": "-, 2*dp"}, "precision": "bf16"}
    program = check(model, torch.randn(24, 12), "dp=2", plan)
    sizes = {type_of(value).sizes for value in program.body.values()}
    assert {((2, 2, 3), (12,)), ((3, 4), (12,))} <= sizes
