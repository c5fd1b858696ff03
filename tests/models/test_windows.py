"""Windows of attention over an axis: keys that no row of a rank sees are neither sent to it nor computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardc
from shardc import Program
from shardc.explain.collective import explain
from shardc.ir.blocks import zigzag
from shardc.ir.graph import Graph, type_of
from shardc.ir.mesh import Mesh
from shardc.ir.ops.attention_rows import NEXT_KEYS, REACH_ROWS, REACH_SUM, SDPA_ROWS, SDPA_ROWS_BWD, reach
from shardc.ir.schema import given
from shardc.passes.type_check import type_faults
from tests.models.test_context import BATCH, STRATEGIES, TP, Attention, attention_flops, compiled, exact

WINDOWS = (1, 2, 5, 9, 24, 99)


def alone(window: int, length: int, mesh: str, context: Any, mask: bool = False, **said: Any) -> Program:
    """Attention alone, of four query heads and two of keys."""
    generator = torch.Generator().manual_seed(0)
    batch: dict[str, Any] = {"x": torch.randn(2, length, 16, generator=generator)}
    inputs = {"x": "-, cp, -"}
    if mask:
        keep = torch.ones(2, 1, 1, length, dtype=torch.bool)
        keep[0, :, :, : length // 3] = False  # rows of padding see nothing
        keep[1, :, :, length // 2] = False
        batch["mask"], inputs["mask"] = keep, "-, -, -, -"
    plan = {"mesh": mesh, "inputs": inputs, "context": context, **said}
    return shardc.compile(Attention(4, 2, 4, window=window), batch, plan=plan)


@pytest.mark.sampled(32)
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("balance", ["none", "zigzag"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("length", "mesh"), [(16, "cp=2"), (17, "cp=2"), (50, "cp=4"), (7, "cp=4")])
@pytest.mark.parametrize("window", WINDOWS)
def test_every_window(window: int, length: int, mesh: str, strategy: str, balance: str, mask: bool) -> None:
    """Of one key, of less than a rank's and of more, of none that divides, and longer than the sequence."""
    exact(alone(window, length, mesh, {"attention": strategy, "balance": balance}, mask))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("balance", ["none", "zigzag"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_models_with_windows(name: str, strategy: str, balance: str) -> None:
    """All layers, or every other one, which then lie alike."""
    exact(compiled(name, "cp=4", 50, context={"attention": strategy, "balance": balance}))


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("mesh", "rows", "said"),
    [
        ("dp=2, cp=2", "dp, cp", {"storage": {"zero": 3, "axes": ["dp", "cp"]}, "bucket": True}),
        ("cp=2, tp=2", "-, cp", {"params": TP, "activations": {"**.o_proj": "-, cp.tp, -"}}),
        ("cp=2, pp=2", "-, cp", {"pipeline": {"axis": "pp", "microbatches": 2}, "recompute": "full"}),
        ("cp=2", "-, cp", {"accumulate": 2, "recompute": "full", "fuse": True}),
    ],
)
def test_with_everything_else(mesh: str, rows: str, said: dict[str, Any]) -> None:
    exact(compiled("mistral", mesh, 18, rows, context="ring", **said))


@pytest.mark.parametrize("keys", [2, 1])
@pytest.mark.parametrize("length", [16, 18])
def test_hierarchical(length: int, keys: int) -> None:
    """Of one key head, its query heads are divided: gradients of keys are pending sums over them while they travel."""
    plan = {"mesh": "out=2, in=2", "inputs": {"x": "-, out.in, -"}, "context": "hierarchical"}
    program = shardc.compile(Attention(4, keys, 4, window=5), torch.randn(2, length, 16), plan=plan)
    gathers = {"all_gather", "reduce_scatter"} if keys == 1 else set[str]()
    assert {c.kind for c in program.collectives() if c.kind != "all_reduce"} == {"permute", "all_to_all"} | gathers
    exact(program)
    assert not type_faults(program.body)


# ---------------------------------------------------------------------- what is sent and computed
@pytest.mark.parametrize(("window", "hops"), [(1, []), (2, [1]), (5, [4]), (9, [8]), (12, [8, 3]), (99, [8, 8, 8])])
def test_a_rank_is_sent_what_its_window_reaches(window: int, hops: list[int]) -> None:
    program = alone(window, 32, "cp=4", {"attention": "ring", "balance": "none"})
    each = 2 * 2 * 2 * 4 * 4  # keys and values: batch, heads, width, bytes
    assert sent_keys(program, "fwd") == [each // 2 * rows for rows in hops for _ in range(2)]
    assert sum(sent_keys(program, "bwd")) == 2 * each * sum(hops)
    assert not [c for c in program.collectives() if c.kind in ("all_gather", "reduce_scatter")]


def sent_keys(program: Program, phase: str) -> list[int]:
    return [c.bytes_per_rank for c in program.collectives() if c.phase == phase and c.kind == "permute"]


def test_alternating_layers_send_each_their_own() -> None:
    """A zigzag, for the layers without a window: those with one get a few keys for each of a rank's two runs."""
    program = compiled("gemma3", "cp=4", 32, context="ring")
    one = BATCH * 2 * 2 * 4 * 4  # a key of two heads, for four samples
    windowed, full = (
        sum(c.bytes_per_step for c in program.collectives() if f"layers.{i}.self_attn" in c.fqn and c.phase == "fwd")
        for i in (0, 1)
    )
    assert full == 2 * 3 * 8 * one
    # Chunks of four keys, of which each row sees four before its own: of the rank before, and of the one behind.
    assert windowed == 2 * 2 * 4 * one


@pytest.mark.parametrize("balance", ["none", "zigzag"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("length", [16, 17, 50])
def test_reach_is_what_rows_see(length: int, window: int, ranks: int, balance: str) -> None:
    """By counting: the keys that a rank's rows see and that are of the rank so many places before."""
    from shardc.ir.ops.attention_rows import before, layout, reached

    mesh = Mesh(cp=ranks)
    rows = str(zigzag(length, "cp", ranks) if balance == "zigzag" else length)
    held = [{i for run in layout(rows, ("cp",), mesh, {"cp": r}) for i in range(run.start, run.start + run.extent)}
            for r in range(ranks)]  # fmt: skip
    for places in range(1, ranks):
        most = 0
        for r in range(ranks):
            needs = {j for i in held[r] for j in range(max(0, i - window + 1), i)} & held[(r - places) % ranks]
            parts = reached(rows, ("cp",), places, [1 - window, 0], mesh, {"cp": r})
            known = {j for part in parts for j in range(part.start, part.start + part.extent)}
            assert known == needs
            assert before(("cp",), places, mesh, {"cp": r}) == {"cp": (r - places) % ranks}
            most = max(most, len(needs))
        assert reach(rows, ("cp",), [1 - window, 0], mesh).get(places, 0) == most


def test_what_a_window_hides_is_not_computed() -> None:
    """On one device: of 256 keys each row sees 16, of which a block of rows reads less than twice as many."""
    dense = attention_flops(alone(0, 256, "cp=1", {}))
    program = alone(16, 256, "cp=1", {})
    assert attention_flops(program) == dense * (16 * 256 - 120) * 2 // 256**2
    for strategy in ("ring", "all_gather"):
        divided = alone(16, 256, "cp=4", {"attention": strategy, "balance": "none"})
        assert sum(attention_flops(divided, rank) for rank in range(4)) == attention_flops(program)
        assert attention_flops(divided) <= 1.1 * attention_flops(program) / 4


def test_balance_is_for_layers_without_a_window() -> None:
    """Rows of a short window have equally much to do wherever they lie, and in one run they need fewer keys."""
    for name, turned in (("mistral", False), ("gemma3", True)):
        tokens = compiled(name, "cp=4", 64).body.input_nodes()["input_ids"]
        assert ("~cp" in str(type_of(tokens))) == turned


def test_auto_knows_what_a_window_sends() -> None:
    plan = {"mesh": "cp=8", "inputs": {"x": "-, cp, -"}}
    model, x = Attention(8, 8, 128, window=1024), torch.empty(1, 2**15, 16, device="meta")
    (said,) = shardc.compile(model, x, plan=plan).plan["context"]
    costs = {cost[0]: cost for cost in said[3]}
    assert said[2] == "ring"
    assert costs["ring"][1] == 3 * 2 * 1023 * 8 * 128 * 4


# ---------------------------------------------------------------------- mutants
def calls(graph: Graph, target: Any) -> list[Any]:
    return [node for node in graph.calls() if node.target is target]


def change(node: Any, **changes: Any) -> None:
    node.args, node.kwargs = tuple((given(node) | changes).values()), {}


def _wrong_way(program: Program) -> None:
    change(calls(program.body, NEXT_KEYS)[0], places=-1)


def _not_sent_back(program: Program) -> None:
    total = calls(program.body, REACH_SUM)[0]
    change(total, parts=[given(part)["x"] for part in given(total)["parts"]])


def _left_out(program: Program) -> None:
    last = calls(program.body, SDPA_ROWS_BWD)[-1]
    change(last, dk=None)


def _other_keys(program: Program) -> None:
    keys, values = (given(calls(program.body, SDPA_ROWS)[1])[name] for name in ("k", "v"))
    change(calls(program.body, SDPA_ROWS)[1], k=values, v=keys)


def _fewer(program: Program) -> None:
    for sent in calls(program.body, REACH_ROWS):
        change(sent, window=[given(sent)["window"][0] + 1, 0])


def _missing(program: Program) -> None:
    last = calls(program.body, SDPA_ROWS)[-1]
    first = calls(program.body, SDPA_ROWS)[0]
    change(last, o=given(first)["o"], lse=given(first)["lse"])


def _shorter(program: Program) -> None:
    for step in calls(program.body, SDPA_ROWS):
        change(step, window=[-1, 0])


@pytest.mark.parametrize("mutate", [_wrong_way, _not_sent_back, _left_out, _other_keys, _fewer, _missing, _shorter])
def test_a_broken_exchange_is_refused(mutate: Callable[[Program], None]) -> None:
    program = alone(5, 16, "cp=4", {"attention": "ring", "balance": "none"})
    assert program.prove().ok
    assert not type_faults(program.body)
    mutate(program)
    assert not program.prove().ok
    assert type_faults(program.body)


def test_explain_says_what_a_window_reaches() -> None:
    program = alone(5, 16, "cp=4", {"attention": "ring", "balance": "none"})
    for phase in ("fwd", "bwd"):
        moved = next(c for c in program.collectives() if c.kind == "permute" and c.phase == phase)
        text = str(explain(program, moved.value, seconds=0))
        assert "rows attend to the 5 up to their own" in text
        assert "those of other ranks that its window reaches" in text
