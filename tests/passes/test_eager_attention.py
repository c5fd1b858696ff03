"""Attention written out: scale, mask, softmax, cast and dropout are one kernel forward, and one backward."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import shardc
from kernels_triton.ir.kernel import Kernel
from shardc.cost.memory import memory
from shardc.ir.graph import Graph, info, op_name
from shardc.ir.verify import violations
from shardc.passes.fusion.analysis.traffic import node_bytes
from shardc.passes.fusion.fuse import fuse
from shardc.runtime.oracle.simulate import run_reference, simulate
from tests.passes.eager_attention import HEADS, MODELS, SEQ, Filled, causal, chains

SCORES = 2 * HEADS * SEQ * SEQ


@cache
def compiled(name: str, precision: str = "bf16") -> shardc.Program:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    return shardc.compile(model, batch, mesh="dp=1", plan={"precision": precision} if precision else {})


def large(kernel: Kernel) -> tuple[list[int], list[int]]:
    """Bytes an element of what is read and of what is written that is as large as the scores."""
    given = [one.dtype.itemsize for one in kernel.inputs if math.prod(one.shape) == SCORES]
    return given, [one.dtype.itemsize for one in kernel.outputs if math.prod(one.shape) == SCORES]


# Read and written, forward and backward. Where the probabilities are not kept, backward makes them from the scores.
CHAINS: dict[str, tuple[list[int], list[int], list[int], list[int]]] = {
    "gpt2": ([2], [2], [2, 2], [2]),
    "gpt2, no dropout": ([2], [2], [2, 2], [2]),  # they are kept: the product with the values reads them
    "need_weights": ([2], [2], [2, 2], [2]),
    "masked_fill": ([2], [2], [2, 2], [2]),
}


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.sampled(4)
def test_one_kernel_forward_and_one_backward(name: str) -> None:
    program = compiled(name)
    body = fuse(program.body, templates=())
    assert not violations(body)
    assert memory(body).peak <= memory(program.body).peak
    forward, backward = chains(body)
    assert (*large(forward), *large(backward)) == CHAINS[name]
    assert not [n for n in body.calls() if "softmax" in op_name(n.target)]
    if "dropout" not in name:
        # Statistics, two numbers a row; and the mean of all heads' weights.
        assert [len(one.outputs) for one in (forward, backward)] == [3 + (name == "need_weights"), 1]
    assert moved(program.body) > 2.2 * sum(one.bytes_moved for one in (forward, backward))


def moved(graph: Graph) -> int:
    """Bytes of the calls that read or write values as large as the scores, beside products and views."""
    total = 0
    for node in graph.calls():
        types = [one for v in (*node.all_input_nodes, node) if (one := info(v).type) is not None]
        sizes = [math.prod(one.shape) for one in types]
        if SCORES in sizes and op_name(node.target) not in ("bmm", "view", "transpose.int", "expand", "permute"):
            total += node_bytes(graph, node, [node])
    return total


@pytest.mark.long  # a bias is added as the masks of `test_any_mask` are
def test_a_relative_bias_is_read_in_the_same_kernel() -> None:
    """T5: encoder, decoder, and the decoder's look at the encoder; three softmaxes."""
    body = fuse(compiled("t5").body, templates=())
    found = [large(one) for one in chains(body)]
    assert found == [([2], [2])] * 3 + [([2, 2], [2])] * 3


def test_a_causal_mask_is_made_of_positions() -> None:
    """The kernel reads nothing but the scores and the seed."""
    forward, backward = chains(fuse(compiled("gpt2").body))
    for one in (forward, backward):
        assert {step.attributes for step in one.steps if step.op == "iota"} == {(1,), (2,)}
    assert [len(forward.inputs), len(backward.inputs)] == [2, 5]  # backward: statistics and the gradient too


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", MODELS)
def test_values_are_the_single_devices(name: str) -> None:
    program = compiled(name, "")
    report = replace(program, body=fuse(program.body)).verify()
    assert report.ok, str(report)


def test_it_stays_a_call_if_a_plan_says_so() -> None:
    body = fuse(compiled("gpt2").body, exclude=("_softmax",))
    assert [op_name(n.target) for n in body.calls()].count("_softmax") == 1


class Drawn(nn.Module):
    """Attention with any mask; `x` is as large as it likes."""

    def __init__(self, mask: Tensor, how: str, scale: float, dropout: float, dim: int) -> None:
        super().__init__()
        self.register_buffer("mask", mask)
        self.how, self.scale, self.dim = how, scale, dim
        self.weight, self.drop = nn.Parameter(torch.randn(6, 6)), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        scores = (x @ self.weight) * self.scale
        mask = self.mask
        assert isinstance(mask, Tensor)
        match self.how:
            case "added":
                scores = scores + torch.zeros(()).masked_fill(~mask, -torch.inf)
            case "lowest":
                scores = scores.masked_fill(~mask, torch.finfo(torch.float32).min)
            case "filled":
                scores = scores.masked_fill(~mask, -torch.inf)
            case "causal":
                seen = torch.arange(scores.shape[-1]) <= torch.arange(scores.shape[-2])[:, None]
                scores = torch.where(seen, scores, -torch.inf)
            case _:
                pass
        return (self.drop(scores.softmax(self.dim)) @ self.weight).square().sum()


@settings(max_examples=max(5, settings().max_examples // 4), deadline=None)
@given(data=st.data())
def test_any_mask(data: st.DataObject) -> None:
    """Rows of which nothing is left are NaN or even, as in torch; forward and backward, in float64."""
    torch.manual_seed(data.draw(st.integers(0, 99)))
    shape = [data.draw(st.sampled_from([1, n])) for n in (2, 3, 4)]
    mask = torch.rand(*shape, 6) < data.draw(st.sampled_from([0.9, 0.5, 0.1]))
    how = data.draw(st.sampled_from(["none", "added", "lowest", "filled", "causal"]))
    rest = (data.draw(st.sampled_from([1.0, 0.3])), data.draw(st.sampled_from([0.0, 0.25])))
    model = Drawn(mask, how, *rest, data.draw(st.sampled_from([-1, -1, -1, -2])))
    program = shardc.compile(model.train(), torch.randn(2, 3, 4, 6) * 5, mesh="dp=1")
    body, inputs = fuse(program.body), program.inputs()
    expected = run_reference(program.reference, inputs, dtype=torch.float64)
    for port, value in simulate(body, inputs, dtype=torch.float64).items():
        torch.testing.assert_close(value, expected[port], rtol=1e-12, atol=1e-13, equal_nan=True)


def test_a_row_of_which_nothing_is_left() -> None:
    """In float32 as kernels compute: NaN for -inf, the mean of the values for a number."""
    seen = causal()
    seen[0, 3] = False
    for fill in (-torch.inf, -1e30):
        torch.manual_seed(0)
        model = Filled(fill)
        x = torch.randn(2, SEQ, 64)
        program = shardc.compile(model, (x, seen), mesh="dp=1", plan={"fuse": True})
        found = {port.role: value for port, value in simulate(program.body, program.inputs()).items()}
        torch.testing.assert_close(found["loss"], model(x, seen).detach(), equal_nan=True)
        assert found["loss"].isnan() == (fill == -torch.inf)
