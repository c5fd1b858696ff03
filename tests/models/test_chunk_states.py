"""Recurrences written over chunks, as Mamba2's: ranks have chunks of a sequence, and one state each travels.

Loss and every gradient are those of eager PyTorch. The published code's sums over earlier chunks are one op.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import shardc
from shardc.ir.ops.carried_states import CARRIED_STATES, CHUNK_TOTALS, STATES_BEHIND, carried_states
from shardc.ir.ops.collectives import all_gather
from shardc.ir.ops.scan_parts import SCAN_PART, SCAN_PART_BACKWARD
from shardc.ir.ops.shift import REGROUP, SHIFT_JOIN
from shardc.ir.parse import parse
from shardc.ir.schema import given as arguments
from shardc.ir.text import print_graph
from shardc.passes.type_check import type_faults
from tests.models.eagerly import eager, gap
from tests.models.test_recurrences import model_of
from tests.models.test_sequence_scans import WIDTH, Recurrent, assert_equals_eager, compiled, of
from tests.models.test_unequal_blocks import (
    VOCABULARY,
    bamba,
    falcon_h1,
    mamba2,
    of_library,
    placements,
    qwen3_next,
    zamba2,
)

CHUNK = 4


def segment_sum(x: Tensor, diagonal: int = -1) -> Tensor:
    size = x.shape[-1]
    x = x[..., None].expand(*x.shape, size)
    x = x.masked_fill(~torch.tril(torch.ones(size, size, dtype=torch.bool), diagonal=diagonal), 0)
    return x.cumsum(-2).masked_fill(~torch.tril(torch.ones(size, size, dtype=torch.bool)), -torch.inf)


class Chunked(Recurrent):
    """`h = a * h + x` over chunks of 4, from a state that is a parameter; what is behind the last step is read too."""

    diagonal = -1

    def states(self, decays: Tensor, states: Tensor) -> Tensor:
        return torch.einsum("bwcz,bzw->bcw", decays, states)

    def recur(self, x: Tensor, a: Tensor, h: Tensor) -> Tensor:
        batch, steps, _ = x.shape
        pad = (0, 0, 0, -steps % CHUNK)
        x, a = (F.pad(t, pad).reshape(batch, -1, CHUNK, WIDTH) for t in (x, a.log()))
        a = a.permute(0, 3, 1, 2)
        sums = a.cumsum(-1)
        within = torch.einsum("bwcls,bcsw->bclw", segment_sum(a).exp(), x)
        of_chunks = torch.einsum("bwcl,bclw->bcw", (sums[..., -1:] - sums).exp(), x)
        decays = segment_sum(F.pad(sums[..., -1], (1, 0)), self.diagonal).exp()
        states = self.states(decays, torch.cat([h[:, None], of_chunks], 1))
        before, last = states[:, :-1], states[:, -1]
        y = (within + torch.einsum("bcw,bwcl->bclw", before, sums.exp())).reshape(batch, -1, WIDTH)
        return y[:, :steps] + last[:, None]


class Both(Chunked):
    """From the front, and from the back."""

    def recur(self, x: Tensor, a: Tensor, h: Tensor) -> Tensor:
        return super().recur(x, a, h) + super().recur(x.flip(1), a.flip(1), h).flip(1)


class Other(Chunked):
    """Decays that are no sums of all chunks between two: as it is written."""

    diagonal = 0


class Summed(Chunked):
    """The same as a sum of products: as it is written."""

    def states(self, decays: Tensor, states: Tensor) -> Tensor:
        return (decays.permute(0, 3, 2, 1) * states[:, :, None]).sum(1)


class GatedDelta(Recurrent):
    """A gated delta rule over chunks, as Qwen3-Next's: within a chunk a triangular system, and a loop over chunks."""

    def recur(self, x: Tensor, a: Tensor, h: Tensor) -> Tensor:
        batch, steps, _ = x.shape
        keys, values = (F.pad(t, (0, 0, 0, -steps % CHUNK)).reshape(batch, -1, CHUNK, WIDTH) for t in (x, a))
        sums = F.pad(a[..., 0].log(), (0, -steps % CHUNK)).reshape(batch, -1, CHUNK).cumsum(-1)
        above = torch.ones(CHUNK, CHUNK, dtype=torch.bool).triu(1)
        decays = (sums[..., :, None] - sums[..., None, :]).masked_fill(above, -torch.inf).exp()
        within = (keys @ keys.transpose(-1, -2)) * decays
        read = keys * sums.exp()[..., None]
        new, of_state = (
            torch.linalg.solve_triangular(0.3 * within, t, upper=False, unitriangular=True) for t in (values, read)
        )
        keys, decay = keys * (sums[..., -1:] - sums).exp()[..., None], sums[..., -1].exp()[..., None, None]
        state, y = h[:, :, None] * h[:, None, :], torch.zeros_like(new)
        for i in range(new.shape[1]):
            v = new[:, i] - of_state[:, i] @ state
            y[:, i] = read[:, i] @ state + within[:, i] @ v
            state = state * decay[:, i] + keys[:, i].transpose(-1, -2) @ v
        y = y.reshape(batch, -1, WIDTH)[:, :steps]
        return torch.tanh(y.reshape(-1, WIDTH)).reshape(batch, steps, WIDTH)


def chunked(kind: type[Recurrent] = Chunked) -> Recurrent:
    torch.manual_seed(0)
    return kind().double()


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("wide", [(), (4,)])
def test_the_op_is_a_loop_over_chunks(wide: tuple[int, ...], reverse: bool) -> None:
    torch.manual_seed(0)
    first, addends = torch.randn(2, 3, *wide).double(), torch.randn(2, 3, 5, *wide).double()
    decay = -torch.rand(2, 3, 5).double()
    tensors = (first.requires_grad_(), decay.requires_grad_(), addends.requires_grad_())

    def op(first: Tensor, decay: Tensor, addends: Tensor) -> Any:
        return carried_states(first, decay, addends, reverse)

    before, last = op(*tensors)
    state = first
    for c in reversed(range(5)) if reverse else range(5):
        torch.testing.assert_close(before[:, :, c], state)
        state = decay[:, :, c].view(2, 3, *(1 for _ in wide)).exp() * state + addends[:, :, c]
    torch.testing.assert_close(last, state)
    assert torch.autograd.gradcheck(op, tensors)
    assert torch.autograd.gradgradcheck(op, tensors)


LAYOUTS = [("cp=2", 16, "none"), ("cp=4", 17, "none"), ("cp=2", 16, "zigzag"), ("cp=4", 50, "zigzag"),
           ("dp=2, cp=2", 18, "zigzag"), ("cp=8", 9, "none"), ("cp=4", 6, "none"), ("cp=2", 3, "none")]  # fmt: skip


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("mesh", "length", "balance"), LAYOUTS)
@pytest.mark.parametrize("kind", [Chunked, Both])
def test_equals_eager(kind: type[Recurrent], mesh: str, length: int, balance: str) -> None:
    """Of 6 rows over 4 ranks are two chunks, and of 9 over 8 three: ranks have none. 3 rows are less than a chunk."""
    model = chunked(kind)
    program = compiled(model, length, mesh, context={"balance": balance})
    assert_equals_eager(model, program)
    assert not type_faults(program.body)
    if kind is Chunked and length > CHUNK:
        assert of(program, STATES_BEHIND)
        assert not of(program, CARRIED_STATES)
        assert not [d for d in program.diagnostics if d.severity == "warning"]
        assert ("~cp" in print_graph(program.body)) == (balance == "zigzag")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("mesh", "length", "balance"),
    [("cp=2", 64, "none"), ("cp=4", 50, "zigzag"), ("cp=4", 50, "none"), ("dp=2, cp=2", 45, "zigzag")],
)
def test_a_loop_over_chunks(mesh: str, length: int, balance: str) -> None:
    """Ranks have whole chunks, and states go from run to run of them. Rows are sent to their chunk, none to all."""
    model = chunked(GatedDelta)
    program = compiled(model, length, mesh, context={"balance": balance})
    assert_equals_eager(model, program)
    assert not type_faults(program.body)
    assert of(program, SCAN_PART, SCAN_PART_BACKWARD)
    assert {c.kind for c in program.collectives() if "cp" in c.axes} == {"permute", "all_reduce"}
    assert not [d for d in program.diagnostics if d.severity == "warning"]
    assert ("~cp@" in print_graph(program.body)) == (balance == "zigzag")


@pytest.mark.long
@pytest.mark.parametrize(("mesh", "length"), [("cp=4", 601), ("dp=2, cp=2", 577), ("cp=2, tp=2", 650)])
def test_qwen3_next(mesh: str, length: int) -> None:
    """Its chunks are 64 rows long. Beside them attention is balanced."""
    torch.manual_seed(0)
    model = qwen3_next()
    tokens = torch.randint(VOCABULARY, (4, length), generator=torch.Generator().manual_seed(1))
    placed = "dp, cp" if "dp" in mesh else "-, cp"
    plan: dict[str, Any] = {"inputs": {"input_ids": placed, "labels": placed}, "context": "ring"}
    if "tp" in mesh:
        plan["params"] = placements(model)
    program = shardc.compile(model, {"input_ids": tokens, "labels": tokens}, mesh=mesh, plan=plan)
    assert gap(program, eager(model, program.sample)) < 1e-12
    assert not type_faults(program.body)
    assert of(program, SCAN_PART)
    assert {c.kind for c in program.collectives() if "cp" in c.axes} == {"permute", "all_reduce"}
    assert "~cp@" in print_graph(program.body)


@pytest.mark.parametrize("kind", [Other, Summed])
def test_what_is_of_another_form_is_right(kind: type[Recurrent]) -> None:
    model = chunked(kind)
    program = compiled(model, 18, "cp=2")
    assert not of(program, CARRIED_STATES, STATES_BEHIND)
    assert_equals_eager(model, program)


def test_over_two_axes() -> None:
    model = chunked()
    for length in (32, 18):
        program = compiled(model, length, "a=2, b=2", inputs={"ids": "-, a.b", "labels": "-, a.b"})
        assert_equals_eager(model, program)
        assert of(program, STATES_BEHIND)


def test_only_a_state_of_each_run_travels() -> None:
    """Of a batch of 4 a state and a decay have 16 elements each; a zigzag has two runs. Whole chunks stay."""
    torch.manual_seed(0)
    for balance, runs in (("none", 1), ("zigzag", 2)):
        for length in (32, 128):
            program = compiled(Chunked(), length, "cp=4", context={"balance": balance})
            sent = [c for c in program.collectives() if c.kind != "all_reduce" and "labels" not in c.value]
            assert {(c.kind, c.bytes_per_rank) for c in sent} == {("all_gather", 3 * runs * 4 * WIDTH * 4)}
            assert len(sent) == 4, "decays and states, each way"


PLANS: dict[str, dict[str, Any]] = {
    "fuse": {"fuse": True},
    "accumulate": {"accumulate": 2},
    "recompute": {"recompute": "full"},
    "zero 3": {"storage": {"zero": 3, "axes": ["dp", "cp"]}},
    "all of them": {"fuse": True, "accumulate": 2, "recompute": "full", "bucket": True, "precision": "bf16"},
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("plan", PLANS)
def test_with_other_plans(plan: str) -> None:
    model = chunked().float() if "precision" in PLANS[plan] else chunked()
    program = compiled(model, 18, "dp=2, cp=2", **PLANS[plan])
    assert program.verify().ok
    assert of(program, STATES_BEHIND)


@given(st.integers(4, 40), st.sampled_from([2, 3, 4, 5]), st.sampled_from(["none", "zigzag"]))
@settings(max_examples=6, deadline=None, phases=[Phase.explicit, Phase.generate])
def test_any_length_over_any_ranks(length: int, ranks: int, balance: str) -> None:
    model = chunked()
    program = compiled(model, length, f"cp={ranks}", context={"balance": balance})
    assert_equals_eager(model, program)
    assert not type_faults(program.body)


# ------------------------------------------------------------------------------------------------ models
def nemotron_h() -> nn.Module:
    mamba = {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 1, "ssm_state_size": 8, "chunk_size": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48}
    return of_library("NemotronH", **heads, **mamba, layers_block_type=["mamba", "attention"])


MODELS = {"mamba2": mamba2, "bamba": bamba, "zamba2": zamba2, "falcon_h1": falcon_h1, "nemotron_h": nemotron_h}


@pytest.mark.sampled(16)
@pytest.mark.parametrize(
    ("mesh", "length", "balance"),
    [("cp=2", 32, "auto"), ("cp=4", 50, "auto"), ("cp=4", 50, "zigzag"), ("dp=2, cp=2", 17, "none"),
     ("cp=2, tp=2", 50, "auto")],
)  # fmt: skip
@pytest.mark.parametrize("name", MODELS)
def test_models_of_the_library(name: str, mesh: str, length: int, balance: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    tokens = torch.randint(VOCABULARY, (4, length), generator=torch.Generator().manual_seed(1))
    placed = "dp, cp" if "dp" in mesh else "-, cp"
    plan: dict[str, Any] = {"inputs": {"input_ids": placed, "labels": placed}, "context": {"balance": balance}}
    if "tp" in mesh:
        plan["params"] = placements(model)
    program = shardc.compile(model, {"input_ids": tokens, "labels": tokens}, mesh=mesh, plan=plan)
    assert gap(program, eager(model, program.sample)) < 1e-12
    assert not type_faults(program.body)
    assert of(program, STATES_BEHIND)
    assert not of(program, CARRIED_STATES)
    if name == "mamba2":
        gathers = {c.value for c in program.collectives() if c.kind == "all_gather"}
        assert all("carried_states" in value for value in gathers)
        assert not [d for d in program.diagnostics if d.severity == "warning"]


@pytest.mark.parametrize("name", ["mamba2", "Mamba"])
def test_in_a_pipeline(name: str) -> None:
    torch.manual_seed(0)
    model = mamba2() if name == "mamba2" else model_of(name)
    tokens = torch.randint(32, (4, 18))
    plan = {
        "inputs": {"input_ids": "-, cp", "labels": "-, cp"},
        "pipeline": {"axis": "pp", "microbatches": 2, "schedule": "1f1b"},
    }
    program = shardc.compile(model, {"input_ids": tokens, "labels": tokens}, mesh="pp=2, cp=2", plan=plan)
    assert program.verify().ok


def test_chunks_in_zigzag_with_attention_send_no_rows() -> None:
    """Attention is balanced, and whole chunks lie as the sequence does."""
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (4, 64))
    plan = {"inputs": {"input_ids": "-, cp", "labels": "-, cp"}, "context": {"attention": "all_gather"}}
    program = shardc.compile(bamba(), {"input_ids": tokens, "labels": tokens}, mesh="cp=2", plan=plan)
    assert "~cp" in print_graph(program.body)
    moved = [c.value for c in program.collectives() if c.kind == "permute"]
    assert all("transpose" in value or "silu_backward" in value or "labels" in value for value in moved), moved


# ------------------------------------------------------------------------------------------------ what is refused
MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "another layout": (CHUNK_TOTALS, "source", "5"),
    "a total too many": (CHUNK_TOTALS, "blocks", 2),
    "totals of the other way": (CHUNK_TOTALS, "reverse", True),
    "the other way": (STATES_BEHIND, "reverse", True),
    "another layout behind": (STATES_BEHIND, "source", "2|2~cp"),
    "over no axes": (STATES_BEHIND, "axes", []),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_wrong_parts_are_refused(name: str) -> None:
    target, argument, value = MUTATIONS[name]
    body = compiled(chunked(), 16, "cp=2", context={"balance": "none"}).body.copy()
    assert not type_faults(body)
    node = next(n for n in body.calls() if n.target is target)
    args = arguments(node)
    args[argument] = value
    node.args = tuple(args.values())
    assert type_faults(body)


@pytest.mark.parametrize("change", ["swapped", "own"])
def test_totals_that_are_others_are_refused(change: str) -> None:
    body = compiled(chunked(), 16, "cp=2").body.copy()
    node = next(n for n in body.calls() if n.target is STATES_BEHIND)
    args = arguments(node)
    if change == "swapped":
        args["sums"], args["totals"] = args["totals"], args["sums"]
    else:
        assert args["totals"].target is all_gather
        args["totals"] = arguments(args["totals"])["x"]
    node.args = tuple(args.values())
    assert type_faults(body)


def test_text_and_explanations() -> None:
    program = compiled(chunked(), 18, "cp=2", context={"balance": "none"})
    text = print_graph(program.body, comments=False)
    assert "shardc.states_behind(" in text
    assert print_graph(parse(text), comments=False) == text
    gathered = next(c.value for c in program.collectives() if c.kind == "all_gather")
    assert "each chunk's state has all chunks before it" in str(program.explain(gathered))
    moved = next(c.value for c in program.collectives() if c.kind == "permute" and "labels" not in c.value)
    assert "rows go to their chunks" in str(program.explain(moved))
    assert of(program, SHIFT_JOIN)
    assert not of(program, REGROUP)
