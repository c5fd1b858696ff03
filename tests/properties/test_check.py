"""Does the harness see a wrong program? Break right ones wherever a mistake of the compiler's would show.

A mutant changes one call of a body, as a wrong rule or pass would: a collective left out, a bound off by one, a mean
over the wrong count. `judge` must find every mutant that changes anything, in programs that are well-conditioned and in
ones where a gradient is nothing but rounding, for which what it allows is widest. Not all do: a mask may be needless
because the other factor of a product is masked too, and softmax takes any shift for the maximum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, fx

from shardc.api import complete_inputs, model_state
from shardc.compiler import driver
from shardc.compiler.pass_pipeline import Options
from shardc.frontend.trace import trace
from shardc.ir.graph import Graph, info, op_name
from shardc.ir.mesh import Mesh
from shardc.ir.ops import local
from shardc.ir.ops.attention import SDPA, SDPA_BWD
from shardc.ir.ops.collectives import all_gather, all_reduce, all_to_all, permute_ranks, reduce_scatter
from shardc.runtime.oracle.rounding import Coarse, rounding
from tests.properties.check import Refused, check, compiled, judge
from tests.properties.grower import Program

aten = torch.ops.aten
FORMER = 1e-11  # what `check` once allowed every output
SAME = 1e-14


class Case(NamedTuple):
    program: Program
    mesh: Mesh
    plan: dict[str, dict[str, str]]


def program(body: str, shapes: dict[str, tuple[int, ...]], bounds: dict[str, int] | None = None) -> Program:
    """A program from its lines; `w0`, ... are parameters, anything else inputs, `atN` places to annotate."""
    named = [(name, shape) for name, shape in shapes.items() if name.startswith("w")]
    fed = [(name, shape, (bounds or {}).get(name, 0)) for name, shape in shapes.items() if name[0] in "xi"]
    at = [(name, shape) for name, shape in shapes.items() if name.startswith("at")]
    return Program(tuple(body.strip().splitlines()), tuple(named), tuple(fed), tuple(at))


CASES = {
    # Norms, products in both directions, a mean, a vocabulary of 7 over 2 and a batch of 3 over 2.
    "classifier": Case(
        program(
            """
v0 = self.at0(F.layer_norm(x0, [8], self.w0, self.w1))
v1 = self.at1(F.gelu(F.linear(v0, self.w2)))
v2 = x0 + F.linear(v1, self.w3)
loss = F.cross_entropy(F.linear(v2, self.w4).reshape(12, 7), i0.reshape(12)) + 0.1 * v2.square().mean()
""",
            {"x0": (3, 4, 8), "i0": (3, 4), "w0": (8,), "w1": (8,), "w2": (6, 8), "w3": (8, 6), "w4": (7, 8)}
            | {"at0": (3, 4, 8), "at1": (3, 4, 6)},
            {"i0": 7},
        ),
        Mesh(dp=2, tp=2),
        {"params": {"w2": "tp, -", "w4": "tp, -"}, "inputs": {"x0": "dp, -, -", "i0": "dp, -"}},
    ),
    # An embedding by rows of the vocabulary, heads sharded, and the residual over the sequence.
    "attention": Case(
        program(
            """
v0 = self.at0(F.embedding(i0, self.w0))
q, k, v = F.linear(v0, self.w1).view(2, 5, 3, 4, 3).transpose(1, 3).unbind(2)
v1 = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 5, 12)
v2 = self.at1(v0 + F.dropout(F.linear(v1, self.w2), 0.5))
loss = (v2 * torch.arange(120).reshape(2, 5, 12).cos()).square().sum()
""",
            {"i0": (2, 5), "w0": (9, 12), "w1": (36, 12), "w2": (12, 12), "at0": (2, 5, 12), "at1": (2, 5, 12)},
            {"i0": 9},
        ),
        Mesh(dp=2, tp=2),
        {
            "params": {"w0": "tp, -", "w2": "-, tp"},
            "inputs": {"i0": "dp, -"},
            "activations": {"at0": "dp, tp, -", "at1": "dp, tp, -"},
        },
    ),
    # Layouts that change: from one dim to another, from one axis to another, and back to whole.
    "layouts": Case(
        program(
            """
v0 = self.at0(x0 * self.w0)
v1 = self.at1(v0.tanh() + 1.0)
v2 = self.at2(v1 * self.w1)
v3 = self.at3(torch.softmax(v2.cumsum(1), 0))
loss = (v3 * torch.arange(30).reshape(6, 5).cos()).sum() + v2.amax(1).square().mean()
""",
            {"x0": (6, 5), "w0": (5,), "w1": (6, 1), "at0": (6, 5), "at1": (6, 5), "at2": (6, 5), "at3": (6, 5)},
        ),
        Mesh(dp=2, tp=2),
        {
            "inputs": {"x0": "dp, tp"},
            "activations": {"at0": "dp, tp", "at1": "tp, dp", "at2": "-, tp.dp", "at3": "tp.dp, -"},
        },
    ),
    # w0's gradient is 0 but for the norm's epsilon: known to 2e-12.
    "epsilon": Case(
        program(
            """
v0 = self.at0(F.rms_norm(F.gelu(F.gelu(x0)) * self.w0, [4]))
loss = (v0 * torch.arange(4).cos()).sum() + ((F.gelu(x0) + self.w1) * torch.arange(4).sin()).square().sum()
""",
            {"x0": (4,), "w0": (), "w1": (4,), "at0": (4,)},
        ),
        Mesh(dp=2),
        {"inputs": {"x0": "dp"}},
    ),
    # w0's gradient is 0, and there is no other: all of it is rounding.
    "zero": Case(
        program(
            """
v0 = self.at0(torch.softmax(x0, 1) - self.w0)
loss = (v0.std([0, 2]) * torch.arange(3).cos()).sum()
""",
            {"x0": (8, 3, 12), "w0": (), "at0": (8, 3, 12)},
        ),
        Mesh(dp=2, tp=3),
        {"inputs": {"x0": "dp, -, tp"}},
    ),
}


Mutation = Callable[[fx.Node], None]


class Compiled(NamedTuple):
    body: Graph
    reference: Graph
    inputs: dict[str, Tensor]


@cache
def made(name: str) -> Compiled:
    case = CASES[name]
    model, batch = case.program.model(), case.program.batch()
    traced = trace(model, batch)
    reference = driver.single_device(traced, case.mesh, Options())
    body = compiled(reference, case.plan, case.mesh)
    assert not isinstance(body, Refused)
    given: dict[str, Any] = {**traced.constants, **model_state(model), **batch}
    return Compiled(body, reference, complete_inputs(reference, given, seed=3))


# ---------------------------------------------------------------------- mutants
def _left_out(node: fx.Node) -> None:
    node.target, node.args = aten.clone.default, node.args[:1]


def _argument(at: int, change: Callable[[Any], Any]) -> Mutation:
    def mutate(node: fx.Node) -> None:
        node.args = (*node.args[:at], change(node.args[at]), *node.args[at + 1 :])

    return mutate


def _then(target: Any, *args: Any) -> Mutation:
    """One more call, on what this one yields."""

    def mutate(node: fx.Node) -> None:
        with node.graph.inserting_after(node):
            changed = node.graph.call_function(target, (node, *args))
        changed.meta.update(node.meta)
        node.replace_all_uses_with(changed, lambda user: user is not changed)

    return mutate


def mutations(node: fx.Node) -> Iterator[tuple[str, Mutation]]:
    """The ways in which one call of a body can be wrong."""
    target, args = node.target, node.args
    if target is all_reduce:
        yield "left out", _left_out
        yield "another reduction", _argument(1, lambda op: "max" if op == "sum" else "sum")
        if len(args[2]) > 1:
            yield "over one axis of two", _argument(2, lambda axes: axes[:1])
    if target is reduce_scatter:
        yield "another reduction", _argument(1, lambda op: "max" if op == "sum" else "sum")
    if target is permute_ranks:
        yield "from oneself", _argument(2, lambda source: sorted(source))
    if target in (all_gather, reduce_scatter, all_to_all, permute_ranks, local.shard_slice):
        yield "an element further", _then(aten.roll.default, [1])
    if target is local.mask_pad:
        yield "left out", _left_out
        yield "filled with 1", _argument(5, lambda fill: 1.0)
    if target is local.axis_offset:
        yield "an element further", _argument(1, lambda strides: [n + 1 for n in strides])
    if target in (aten.ge.Scalar, aten.lt.Scalar):
        yield "off by one", _argument(1, lambda bound: bound + 1)
    if target in (aten.div.Tensor, aten.div.Scalar) and isinstance(args[1], (int, float)):
        yield "a count too many", _argument(1, lambda n: n + 1)
    if target is SDPA or target is SDPA_BWD:
        yield "causal or not", _argument(4 if target is SDPA else 7, lambda causal: not causal)


def barely(node: fx.Node) -> Iterator[tuple[str, Mutation]]:
    """The smallest mistake: a value times 1 + 1e-10."""
    type = info(node).type
    if type is not None and type.dtype.is_floating_point:
        yield "off by 1e-10", _then(aten.mul.Tensor, 1 + 1e-10)


class Verdict(NamedTuple):
    kind: str
    where: str
    error: float
    found: bool

    def __str__(self) -> str:
        return f"{self.where} {self.kind}: {self.error:.1e}"


def verdicts(name: str, ways: Callable[[fx.Node], Iterator[tuple[str, Mutation]]], every: int = 1) -> list[Verdict]:
    """The mutants of a case, judged: of each call, or `every` so many."""
    body, reference, inputs = made(name)
    judged: list[Verdict] = []
    for i, node in enumerate(body.calls()):
        if i % every:
            continue
        for kind, mutate in ways(node):
            wrong = body.copy()
            mutate(list(wrong.calls())[i])
            report, found = judge(wrong, reference, inputs)
            judged.append(
                Verdict(kind, f"{op_name(node.target)} %{info(node).name}", report.max_rel_error, bool(found))
            )
    return judged


# ------------------------------------------------------------------------ tests
@pytest.mark.parametrize("name", CASES)
def test_a_right_program_is_right(name: str) -> None:
    check(*made(name))


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("name", "least"), [("classifier", 38), ("attention", 30), ("layouts", 40), ("epsilon", 12), ("zero", 12)]
)
def test_every_mutant_that_changes_anything_is_found(name: str, least: int) -> None:
    judged = verdicts(name, mutations)
    missed = [str(one) for one in judged if not one.found and not one.error <= SAME]
    assert not missed
    assert sum(one.found for one in judged) >= least


def test_errors_of_1e_12_are_found_where_rounding_does_not_explain_them() -> None:
    judged = verdicts("classifier", barely, every=4)
    assert all(one.found == (one.error > 1e-12) for one in judged), [str(one) for one in judged]
    assert sum(one.found for one in judged) > 12
    assert any(one.found and one.error < FORMER for one in judged)


def test_rounding_is_known_from_the_reference_alone() -> None:
    for name, unsure in {"classifier": set[str](), "layouts": set[str](), "epsilon": {"w0"}, "zero": {"w0"}}.items():
        _, reference, inputs = made(name)
        allowed = rounding(reference, inputs)
        assert {port.name for port, most in allowed.items() if most > 1e-12} == unsure, name


def test_a_coarse_number_is_the_nearest_of_its_kind() -> None:
    few = Coarse(bits=20)
    x = torch.cat([torch.randn(1000, dtype=torch.float64), torch.arange(-9.0, 9.0, dtype=torch.float64)])
    y = few.cast(x)
    assert 0 < float(((x - y) / x).abs().nan_to_num().max()) <= 2.0 ** (20 - 53)
    assert torch.equal(few.cast(y), y), "once is enough"
    assert torch.equal(y[-18:], x[-18:]), "integers are exact"
    order = x.argsort()
    assert bool((y[order].diff() >= 0).all()), "nothing changes places"
    top = torch.finfo(torch.float64).max
    odd = torch.tensor([math.inf, -math.inf, math.nan, top, -top, 0.0, 5e-324], dtype=torch.float64)
    assert torch.equal(few.cast(odd)[:2], odd[:2])
    assert bool(few.cast(odd)[2].isnan())
    assert torch.equal(few.cast(odd)[3:5], odd[3:5]), "no mask becomes infinite"
    assert torch.equal(few.cast(torch.arange(5)), torch.arange(5))
