"""Reads composed with reads: what is read in parts or in another order is made there, or stored if that is less."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import shardc
from kernels_triton.match.op import kernel_of
from shardc.ir.graph import Graph, info, op_name
from shardc.passes.fusion.analysis.iteration_space import StridedRuns
from shardc.passes.fusion.clustering.producer_inlining import compose_runs

sizes = st.integers(1, 4)
orders = st.lists(st.tuples(sizes, st.sampled_from((0, 1, 2, 3, 4, 6, 8, 12))), min_size=1, max_size=4).map(tuple)


def elements(read: StridedRuns, offset: int) -> list[int]:
    return [
        offset + sum(i * s for i, (_, s) in zip(at, read, strict=True)) for at in product(*(range(n) for n, _ in read))
    ]


@given(orders, orders, st.integers(0, 3), st.integers(0, 8))
@settings(max_examples=400)
def test_a_composed_read_is_the_one_after_the_other(
    inner: StridedRuns, outer: StridedRuns, start: int, offset: int
) -> None:
    table = elements(inner, start)
    wanted = elements(outer, offset)
    found = compose_runs(inner, start, outer, offset)
    if found is not None:
        assert elements(*found) == [table[at] for at in wanted]


def test_parts_and_other_orders_are_composed() -> None:
    rows = ((4, 100), (64, 1))
    assert compose_runs(rows, 5, ((4, 64), (32, 1)), 32) == (((4, 100), (32, 1)), 37)
    assert compose_runs(((256, 1),), 0, ((8, 4), (4, 32), (4, 1)), 0) == (((8, 4), (4, 32), (4, 1)), 0)
    assert compose_runs(((4, 0), (64, 1)), 0, ((64, 1), (4, 64)), 0) == (((64, 1), (4, 0)), 0)  # a bias, transposed


def test_what_runs_from_one_row_into_the_next_is_not() -> None:
    assert compose_runs(((4, 100), (64, 1)), 0, ((2, 64), (64, 1)), 32) is None
    assert compose_runs(((4, 100), (64, 1)), 0, ((85, 3),), 0) is None


def calls(body: Graph) -> list[str]:
    return [op_name(node.target) for node in body.calls()]


def program(forward: Any, *sizes: int) -> shardc.Program:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 32), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            return forward(self, x).square().mean()

    torch.manual_seed(0)
    return shardc.compile(Model(), torch.randn(*sizes, 16), mesh="dp=1", plan={"fuse": True})


def halves(model: Any, x: Tensor) -> Tensor:
    """Biases are added where the halves are read, in backward too."""
    a, b = model.up(x).chunk(2, -1)
    return model.down(a * b)


def stored(model: Any, x: Tensor) -> Tensor:
    """The whole is read by a product too, so that it has to be there."""
    y = model.up(x)
    a, b = y.chunk(2, -1)
    return model.down(a * b) + (y @ y.transpose(-1, -2)).sum()


@pytest.mark.parametrize(("forward", "whole"), [(halves, False), (stored, True)])
def test_halves_are_made_where_they_are_read(forward: Any, whole: bool) -> None:
    made = program(forward, 6, 4)
    assert ("up.add" in {info(value).name for value in made.body.values()}) == whole
    assert made.verify().ok, str(made.verify())


@pytest.mark.parametrize("dims", [8, 4, 2])
def test_some_dims_of_a_head_turn(dims: int) -> None:
    """All of 8, half of them, a quarter: by halves where the dims that turn are, and the others as they come."""

    def forward(model: Any, x: Tensor) -> Tensor:
        heads = model.up(x).view(6, 4, 4, 8).transpose(1, 2)
        turned, rest = heads[..., :dims], heads[..., dims:]
        angles = torch.arange(4.0)[:, None] * torch.arange(1.0, 1 + dims // 2)
        cos, sin = (torch.cat((t, t), -1) for t in (angles.cos(), angles.sin()))
        a, b = turned[..., : dims // 2], turned[..., dims // 2 :]
        turned = turned * cos + torch.cat((-b, a), -1) * sin
        return model.down(torch.cat((turned, rest), -1).transpose(1, 2).reshape(6, 8, 16))

    made = program(forward, 6, 4)
    assert "neg" not in calls(made.body)
    assert made.verify().ok, str(made.verify())


def test_a_transposed_value_is_not_copied() -> None:
    """Heads that are put together again: a kernel makes what would be a copy of another's result."""
    made = program(lambda m, x: m.down(torch.tanh(m.up(x)[..., :16]).transpose(0, 1).reshape(4, 6, 16)), 6, 4)
    assert "_unsafe_view" not in calls(made.body)
    assert "clone" not in calls(made.body)
    assert made.verify().ok, str(made.verify())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mesh", ["dp=1", "dp=2,tp=2"])
def test_rotary_embeddings_go_back_in_one_kernel_each(mesh: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(num_hidden_layers=1, hidden_size=32, intermediate_size=48, vocab_size=64,
                         num_attention_heads=4, num_key_value_heads=2, use_cache=False)  # fmt: skip
    tokens = torch.randint(64, (4, 8))
    plan: dict[str, Any] = {"inputs": {"input_ids": "dp, -", "labels": "dp, -"}, "fuse": True}
    if "tp" in mesh:
        plan["params"] = {"**.q_proj.weight": "tp, -", "**.k_proj.weight": "tp, -", "**.v_proj.weight": "tp, -"}
    else:
        del plan["inputs"]
    made = shardc.compile(LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens}, mesh=mesh, plan=plan)
    names = calls(made.body)
    assert "neg" not in names
    assert "slice_backward" not in names
    assert "mul.Tensor" not in names
    between = names[names.index("shardc.sdpa_bwd") + 1 :]
    assert sum(name == "shardc.fused" for name in between[: between.index("embedding_dense_backward")]) <= 4
    kernels = [k for node in made.body.calls() if (k := kernel_of(node.target, node.args))]
    (sines,) = (k for k in kernels if any(step.op == "sin" for step in k.steps))
    assert math.prod(sines.space) <= 8 * 8  # of a head: no other computes them again
    turned = [k for k in kernels if len(k.outputs[-1].stores) == 2]
    assert len(turned) == 4
    for kernel in turned:  # queries and keys, there and back: of each pair both are read once and written once
        pairs, stores = math.prod(kernel.space), kernel.outputs[-1].stores
        read = [one.access_map for one in kernel.inputs if math.prod(one.shape) == 2 * pairs]
        assert sorted(walk.offset for walk in read) == sorted(store.access_map.offset for store in stores) == [0, 4]
        assert all(n == 1 or stride for walk in read for n, stride in zip(kernel.space, walk.strides, strict=True))
    assert made.verify().ok, str(made.verify())
