"""Recurrences along a sequence that ranks have parts of: loss and every gradient as eager PyTorch has them.

Only states travel: gathered as a factor and an addend where a step is that, else from rank to rank. Longer than 400
lines: every cell is compared by the same few functions.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import shardc
from shardc.ir.graph import info
from shardc.ir.ops.collectives import all_gather
from shardc.ir.ops.halo import NEIGHBOUR_ROWS
from shardc.ir.ops.scan import SCAN
from shardc.ir.ops.scan_parts import (
    SCAN_PART,
    SCAN_PART_BACKWARD,
    SCAN_SUMMARY,
    SCAN_SUMMARY_BACKWARD,
    SCAN_TURN,
    SCAN_TURN_BACKWARD,
)
from shardc.ir.parse import parse
from shardc.ir.schema import given as arguments
from shardc.ir.text import print_graph
from shardc.passes.type_check import type_faults
from shardc.runtime.oracle.simulate import simulate
from tests.models.eagerly import eager, gap
from tests.models.test_recurrences import IN_COLUMNS, model_of

VOCAB, WIDTH, STATE = 16, 4, 3


class Recurrent(nn.Module):
    """Tokens, a recurrence, and a loss; the state at the start is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.decay, self.start = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def recur(self, x: Tensor, a: Tensor, h: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids)
        y = self.recur(x, torch.sigmoid(self.decay(x)), self.start.expand(ids.shape[0], WIDTH))
        return F.cross_entropy(self.head(x + y).flatten(0, 1), labels.flatten())


class Linear(Recurrent):
    """A factor and an addend."""

    def recur(self, x: Tensor, a: Tensor, h: Tensor) -> Tensor:
        ys = []
        for t in range(x.shape[1]):
            h = a[:, t] * h + x[:, t]
            ys.append(torch.tanh(h) * x[:, t])
        return torch.stack(ys, 1)


class Signs(Recurrent):
    """A factor and an addend, written otherwise."""

    def recur(self, x: Tensor, a: Tensor, h: Tensor) -> Tensor:
        ys = []
        for t in range(x.shape[1]):
            h = x[:, t] - (-(h * 0.5 + a[:, t]) / (1.0 + a[:, t]) - 1.5 * h)
            h = h * 0.3
            ys.append(h)
        return torch.stack(ys, 1)


class Tanh(Recurrent):
    """Each element by itself, but no factor."""

    def recur(self, x: Tensor, a: Tensor, h: Tensor) -> Tensor:
        ys = []
        for t in range(x.shape[1]):
            h = torch.tanh(a[:, t] * h + x[:, t])
            ys.append(h)
        return torch.stack(ys, 1)


class Elman(Recurrent):
    """Elements of the state meet."""

    def recur(self, x: Tensor, a: Tensor, h: Tensor) -> Tensor:
        ys = []
        for t in range(x.shape[1]):
            h = torch.tanh(h @ self.mix + x[:, t])
            ys.append(h)
        return torch.stack(ys, 1)


class TwoStates(Recurrent):
    """One state reads the other."""

    def recur(self, x: Tensor, a: Tensor, h: Tensor) -> Tensor:
        ys = []
        m = torch.zeros_like(h)
        for t in range(x.shape[1]):
            m = a[:, t] * m + x[:, t]
            h = 0.7 * h + m * x[:, t]
            ys.append(h - m)
        return torch.stack(ys, 1)


class Apart(Recurrent):
    """Two states that know nothing of each other, one of which is wider; the last ones are used behind the loop."""

    def recur(self, x: Tensor, a: Tensor, h: Tensor) -> Tensor:
        ys = []
        s = x.new_zeros(x.shape[0], WIDTH, WIDTH)
        for t in range(x.shape[1]):
            h = a[:, t] * h + x[:, t]
            s = s * a[:, t, :, None] + x[:, t, :, None] * a[:, t, None, :]
            ys.append((s * h[:, None, :]).sum(-1))
        return torch.stack(ys, 1) + (h * h)[:, None, :] + s.mean(-1)[:, None, :]


class Delta(Recurrent):
    """A delta rule: the state is corrected by what it says of a key."""

    def recur(self, x: Tensor, a: Tensor, h: Tensor) -> Tensor:
        ys = []
        s = x.new_zeros(x.shape[0], WIDTH, WIDTH)
        for t in range(x.shape[1]):
            s = s * a[:, t, 0][:, None, None]
            said = (s * x[:, t, :, None]).sum(1)
            s = s + x[:, t, :, None] * (a[:, t] - said)[:, None, :] * 0.3
            ys.append((s * x[:, t, :, None]).sum(1))
        return torch.stack(ys, 1)


class Held(Recurrent):
    """The state is what the step before has read: nothing of a state goes further."""

    def recur(self, x: Tensor, a: Tensor, h: Tensor) -> Tensor:
        ys = []
        for t in range(x.shape[1]):
            ys.append(h * a[:, t])
            h = x[:, t]
        return torch.stack(ys, 1)


class LastOnly(Recurrent):
    """Of all steps only the last state is read."""

    def recur(self, x: Tensor, a: Tensor, h: Tensor) -> Tensor:
        for t in range(x.shape[1]):
            h = a[:, t] * h + x[:, t]
        return h[:, None, :].expand(x.shape)


class Counted(Recurrent):
    """A step reads its number, and the loop is as it was."""

    def recur(self, x: Tensor, a: Tensor, h: Tensor) -> Tensor:
        ys = []
        for t in range(x.shape[1]):
            h = a[:, t] * h + x[:, t] * (t + 1)
            ys.append(h)
        return torch.stack(ys, 1)


class Backwards(Recurrent):
    """From the last step to the first."""

    def recur(self, x: Tensor, a: Tensor, h: Tensor) -> Tensor:
        ys = [h] * x.shape[1]
        for t in reversed(range(x.shape[1])):
            h = a[:, t] * h + x[:, t]
            ys[t] = h
        return torch.stack(ys, 1)


class Flipped(Linear):
    """From the last step to the first, of a sequence that is turned round, and back."""

    def recur(self, x: Tensor, a: Tensor, h: Tensor) -> Tensor:
        return super().recur(x.flip(1), a.flip(1), h).flip(1)


class Memory(Recurrent):
    """A state has a row for each token, so that a step reads the sequence as a whole, too."""

    def recur(self, x: Tensor, a: Tensor, h: Tensor) -> Tensor:
        ys = []
        s = h[:, None] * x
        for t in range(x.shape[1]):
            s = 0.5 * s + x[:, t, None] * a
            ys.append(s.sum(1))
        return torch.stack(ys, 1)


class Twice(Linear):
    """Two scans, of which one begins where the other ends."""

    def recur(self, x: Tensor, a: Tensor, h: Tensor) -> Tensor:
        y = super().recur(x, a, h)
        for t in range(x.shape[1]):
            h = a[:, t] * h + y[:, t]
        return super().recur(y, a, h)


ROLLED: dict[str, type[Recurrent]] = {
    cls.__name__: cls for cls in (Linear, Signs, Tanh, Elman, TwoStates, Apart, Delta, Held, LastOnly, Flipped, Twice)
}
AS_WRITTEN: dict[str, type[Recurrent]] = {cls.__name__: cls for cls in (Counted, Backwards)}
# Whether states are gathered (or go by turns), forward and backward.
GATHERED = {"Linear": (1, 1), "Signs": (1, 1), "Tanh": (0, 1), "Elman": (0, 0), "TwoStates": (0, 0), "Apart": (1, 1),
            "Delta": (0, 0), "Held": (1, 1), "LastOnly": (1, 1), "Flipped": (1, 1), "Twice": (1, 1)}  # fmt: skip


def compiled(model: nn.Module, length: int, mesh: str, **plan: Any) -> shardc.Program:
    generator = torch.Generator().manual_seed(0)
    ids, labels = torch.randint(0, VOCAB, (2, 4, length), generator=generator)
    placed = "dp, cp" if "dp" in mesh else "-, cp"
    plan = {"inputs": {"ids": placed, "labels": placed}, **plan}
    return shardc.compile(model, {"ids": ids, "labels": labels}, mesh=mesh, plan=plan)


def assert_equals_eager(model: nn.Module, program: shardc.Program) -> None:
    model.zero_grad()
    loss = model(**program.sample)
    loss.backward()
    found = {port.name: x for port, x in simulate(program.body, program.inputs(), dtype=torch.float64).items()}
    wanted = {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def of(program: shardc.Program, *targets: Any) -> list[Any]:
    return [node for node in program.body.calls() if node.target in targets]


def recurrent(name: str) -> Recurrent:
    torch.manual_seed(0)
    return (ROLLED | AS_WRITTEN)[name]().double()


@pytest.mark.sampled(36)
@pytest.mark.parametrize(
    ("mesh", "length", "balance"),
    [("cp=2", 16, "none"), ("cp=4", 17, "none"), ("dp=2, cp=2", 10, "none"), ("cp=8", 9, "none"),
     ("cp=2", 16, "zigzag"), ("cp=4", 17, "zigzag"), ("dp=2, cp=2", 11, "zigzag"), ("cp=3", 13, "zigzag")],
)  # fmt: skip
@pytest.mark.parametrize("name", ROLLED)
def test_equals_eager(name: str, mesh: str, length: int, balance: str) -> None:
    """17 over 4 are 5, 5, 5 and 2 steps; of 9 over 8, ranks have two steps, one, or none. As a zigzag 17 are chunks of
    3, 3, 3, 3 and 2, 2, 1 and 0, and 13 over 3 are 3, 3, 3 and 2, 2, 0."""
    model = recurrent(name)
    program = compiled(model, length, mesh, context={"balance": balance})
    assert_equals_eager(model, program)
    assert not type_faults(program.body)
    assert ("~cp@" in print_graph(program.body)) == (balance == "zigzag")
    if name == "Flipped" and length % (program.mesh.size("cp") * (1 + (balance == "zigzag"))):
        return  # ranks have unequal parts, and turn all rows
    assert of(program, SCAN_PART)
    assert not of(program, SCAN)
    forward, backward = GATHERED[name]
    assert bool(of(program, SCAN_SUMMARY)) == bool(forward) == (not of(program, SCAN_TURN))
    if of(program, SCAN_PART_BACKWARD):
        assert bool(of(program, SCAN_SUMMARY_BACKWARD)) == bool(backward) == (not of(program, SCAN_TURN_BACKWARD))
    assert not [d for d in program.diagnostics if d.code == "SC203" and d.severity == "warning"]


@pytest.mark.parametrize("name", AS_WRITTEN)
def test_loops_as_they_were_are_right(name: str) -> None:
    model = recurrent(name)
    program = compiled(model, 9, "cp=2")
    assert not of(program, SCAN, SCAN_PART)
    assert_equals_eager(model, program)


@pytest.mark.parametrize("name", ["Linear", "Elman"])
def test_only_states_travel(name: str) -> None:
    """Of a batch of 4 a state has 16 elements of 4 bytes: gathered are two of each, of turns one goes each way."""
    torch.manual_seed(0)
    for ranks, length in ((2, 16), (4, 64), (4, 128)):
        program = compiled(ROLLED[name](), length, f"cp={ranks}")
        state = 4 * WIDTH * 4
        sent = Counter[tuple[str, str]]()
        for c in program.collectives():
            if c.kind != "all_reduce":
                sent[c.phase, c.kind] += c.bytes_per_rank
        each = (ranks - 1) * state
        if name == "Linear":
            assert sent == {("fwd", "all_gather"): 2 * each, ("bwd", "all_gather"): 2 * each}
        else:
            assert sent == {("fwd", "permute"): each, ("bwd", "permute"): each}


class Attending(Recurrent):
    """Causal attention over what a recurrence yields."""

    def recur(self, x: Tensor, a: Tensor, h: Tensor) -> Tensor:
        ys = []
        for t in range(x.shape[1]):
            h = self.step(a[:, t], h, x[:, t])
            ys.append(h)
        y = torch.stack(ys, 1)
        return F.scaled_dot_product_attention(x, y, y, is_causal=True)

    def step(self, a: Tensor, h: Tensor, x: Tensor) -> Tensor:
        return a * h + x


class Turning(Attending):
    """The same of a recurrence whose elements meet."""

    def step(self, a: Tensor, h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(h @ self.mix + x * a)


@pytest.mark.parametrize("kind", [Attending, Turning])
def test_beside_causal_attention_steps_are_in_zigzag(kind: type[Recurrent]) -> None:
    """Attention is equal work on both ranks, and states go to rank 1, stay there, and come back."""
    torch.manual_seed(0)
    model = kind().double()
    program = compiled(model, 16, "cp=2")
    assert_equals_eager(model, program)
    assert "8|8~cp@cp" in print_graph(program.body)
    (part,) = of(program, SCAN_PART)
    assert arguments(part)["segments"] == [4, 4]
    hops = [arguments(node)["shift"] for node in of(program, NEIGHBOUR_ROWS) if "scan" in info(node).name]
    assert hops == ([] if kind is Attending else [1, -1, 1, -1])
    turns = [arguments(node)["turn"] for node in of(program, SCAN_TURN, SCAN_TURN_BACKWARD)]
    assert turns == ([] if kind is Attending else [0, 1, 2, 3, 2, 1])


PLANS: dict[str, dict[str, Any]] = {
    "fuse": {"fuse": True},
    "accumulate": {"accumulate": 2},
    "recompute": {"recompute": "full"},
    "zero 3": {"storage": {"zero": 3, "axes": ["dp", "cp"]}},
    "mixed": {"precision": "bf16"},
    "all of them": {"fuse": True, "accumulate": 2, "recompute": "full", "bucket": True, "precision": "bf16"},
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["Apart", "Tanh", "TwoStates"])
def test_with_other_plans(name: str, plan: str) -> None:
    model = recurrent(name).float() if "precision" in PLANS[plan] else recurrent(name)
    program = compiled(model, 18, "dp=2, cp=2", **PLANS[plan])
    assert program.verify().ok
    assert of(program, SCAN_PART)


def test_over_two_axes() -> None:
    """Ranks of two axes have as many steps each, or not: 18 are 5, 4, 5 and 4, or a zigzag of 3, 2, 3, 2 and 2 each."""
    for name, length, balance in (("Linear", 16, "none"), ("Elman", 18, "none"), ("Elman", 18, "zigzag")):
        model = recurrent(name)
        plan = {"inputs": {"ids": "-, a.b", "labels": "-, a.b"}, "context": {"balance": balance}}
        program = compiled(model, length, "a=2, b=2", **plan)
        assert_equals_eager(model, program)
        assert of(program, SCAN_PART)
        assert ("~a@" in print_graph(program.body)) == (balance == "zigzag")


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, int, int, int, str]:
    name = draw(st.sampled_from(sorted(ROLLED)))
    ranks, balance = draw(st.sampled_from([2, 3, 4, 5])), draw(st.sampled_from(["none", "zigzag"]))
    return name, draw(st.integers(8, 30)), ranks, draw(st.sampled_from([1, 2])), balance


@given(cases())
@settings(max_examples=12, deadline=None)
def test_any_length_over_any_ranks(case: tuple[str, int, int, int, str]) -> None:
    name, length, ranks, dp, balance = case
    model = recurrent(name)
    mesh = f"dp={dp}, cp={ranks}" if dp > 1 else f"cp={ranks}"
    program = compiled(model, length, mesh, context={"balance": balance})
    assert_equals_eager(model, program)
    assert not type_faults(program.body)


@pytest.mark.parametrize(("mesh", "length"), [("cp=2", 16), ("cp=4", 17), ("dp=2, cp=2", 10)])
def test_a_state_with_a_row_for_each_token(mesh: str, length: int) -> None:
    """Its rows are whole on each rank, and gathered; the steps are a rank's own."""
    torch.manual_seed(0)
    model = Memory().double()
    program = compiled(model, length, mesh)
    assert_equals_eager(model, program)
    assert not type_faults(program.body)
    assert of(program, SCAN_PART)


def test_more_than_a_block_of_steps() -> None:
    """A rank's 75 steps are two blocks: of 64, and of 11 or fewer. As a zigzag, 261 are 66, 66 and 65, 64."""
    for name, length, balance in (("Linear", 149, "none"), ("Elman", 149, "none"), ("Elman", 261, "zigzag")):
        model = recurrent(name)
        program = compiled(model, length, "cp=2", context={"balance": balance})
        assert_equals_eager(model, program)
        assert of(program, SCAN_PART)


# ------------------------------------------------------------------------------------------------ models
@pytest.mark.sampled(8)
@pytest.mark.parametrize(("mesh", "length"), [("cp=2", 16), ("cp=4", 17), ("cp=2, tp=2", 10), ("dp=2, cp=2", 50)])
@pytest.mark.parametrize("name", ["Mamba", "Rwkv", "Jamba"])
def test_models_equal_eager(name: str, mesh: str, length: int) -> None:
    model = model_of(name)
    tokens = torch.randint(32, (4, length), generator=torch.Generator().manual_seed(1))
    placed = "dp, cp" if "dp" in mesh else "-, cp"
    plan: dict[str, Any] = {"mesh": mesh, "inputs": {"input_ids": placed, "labels": placed}}
    if "tp" in mesh and name == "Mamba":
        plan["params"] = IN_COLUMNS
    program = shardc.compile(model, {"input_ids": tokens, "labels": tokens}, plan=plan)
    assert gap(program, eager(model, program.sample)) < 1e-12
    assert not type_faults(program.body)
    assert of(program, SCAN_PART)
    if name == "Mamba":
        kept = [c for c in program.collectives() if c.kind == "all_gather"]
        assert len(kept) == 2, "the states, each way"
        assert not [d for d in program.diagnostics if d.severity == "warning"]


# ------------------------------------------------------------------------------------------------ what is refused
MUTATIONS: dict[str, tuple[str, Any, str, Any]] = {
    "a zigzag as it were none": ("Elman", SCAN_PART, "source", lambda source: "16"),
    "other segments": ("Elman", SCAN_PART, "segments", lambda segments: [3, 1]),
    "a turn left out": ("Elman", SCAN_PART, "before", lambda before: before[:-1]),
    "turns in another order": ("Elman", SCAN_PART, "before", lambda before: before[::-1]),
    "another turn": ("Elman", SCAN_TURN, "turn", lambda turn: turn + 1),
    "a turn that continues none": ("Elman", SCAN_TURN, "before", lambda before: None),
    "the wrong way": ("Elman", NEIGHBOUR_ROWS, "shift", lambda shift: -shift),
    "too far": ("Elman", NEIGHBOUR_ROWS, "shift", lambda shift: 2 * shift),
    "gathered where a step is no factor": ("Elman", SCAN_PART, "affine", lambda affine: True),
    "by turns where states are gathered": ("Linear", SCAN_PART, "affine", lambda affine: False),
    "another layout": ("Linear", SCAN_PART, "source", lambda source: "17"),
    "another body": ("Linear", SCAN_SUMMARY, "body", lambda body: body.replace("mul", "add")),
    "nothing of others": ("Linear", SCAN_PART, "before", lambda before: []),
    "a turn left out, backward": ("Elman", SCAN_PART_BACKWARD, "before", lambda before: before[1:]),
    "another turn, backward": ("Elman", SCAN_TURN_BACKWARD, "turn", lambda turn: turn - 1),
    "gathered where elements meet": ("Elman", SCAN_PART_BACKWARD, "affine", lambda affine: True),
    "other gradients": ("Linear", SCAN_SUMMARY_BACKWARD, "given", lambda given: [given[0] + 1]),
}


@pytest.mark.sampled(len(MUTATIONS))
@pytest.mark.parametrize("balance", ["none", "zigzag"])
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_part_is_refused(name: str, balance: str) -> None:
    make, target, argument, change = MUTATIONS[name]
    if "zigzag" in name and balance == "none":
        return
    body = compiled(recurrent(make), 16, "cp=4", context={"balance": balance}).body.copy()
    assert not type_faults(body)
    node = next(n for n in body.calls() if n.target is target)
    args = arguments(node)
    value = change(args[argument])
    args[argument] = [args["carried"][0]] if value is None else value
    node.args = tuple(args.values())
    assert type_faults(body)


def test_states_of_some_ranks_are_refused() -> None:
    body = compiled(recurrent("Linear"), 16, "cp=4").body.copy()
    part = next(n for n in body.calls() if n.target is SCAN_PART)
    gathered = next(n for n in body.calls() if n.target is all_gather)
    args = arguments(part)
    args["before"] = [arguments(gathered)["x"]]
    part.args = tuple(args.values())
    assert type_faults(body)


@pytest.mark.parametrize(("name", "balance"), [("Linear", "none"), ("Elman", "zigzag")])
def test_text_keeps_the_parts(name: str, balance: str) -> None:
    text = print_graph(compiled(recurrent(name), 17, "cp=2", context={"balance": balance}).body, comments=False)
    assert "shardc.scan_part(" in text
    assert print_graph(parse(text), comments=False) == text


def test_explain_tells_why_states_travel() -> None:
    program = compiled(recurrent("Linear"), 16, "cp=4")
    told = str(program.explain(next(c.value for c in program.collectives() if c.kind == "all_gather")))
    assert "a factor and an addend for each element of its states are gathered" in told
    assert 'ids = "-, cp"' in told or 'labels = "-, cp"' in told
    program = compiled(recurrent("Elman"), 16, "cp=4")
    moved = [c.value for c in program.collectives() if c.kind == "permute"]
    assert "its states go from rank to rank" in str(program.explain(moved[0]))
    assert "gradients of its states go from rank to rank" in str(program.explain(moved[-1]))


class _Marked(nn.Module):
    """Row 0 gets a number that is no float."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        before = torch.cat([torch.full((ids.shape[0], 1), 2**53 + 1), ids[:, :-1]], 1)
        return (self.tokens(ids) * (before % 10)[..., None]).pow(2).mean() + 0 * labels.sum()


def test_a_number_that_is_no_float_is_put_before_rows() -> None:
    torch.manual_seed(0)
    model = _Marked().double()
    assert_equals_eager(model, compiled(model, 10, "cp=2"))
