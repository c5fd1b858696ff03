"""What a cut makes of a step: what crosses, what is kept, what runs twice (nothing), and models that are no chains."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardc.ir.diagnostic import ShardcError
from shardc.ir.graph import Graph, info
from shardc.ir.parse import parse
from shardc.ir.text import print_graph
from shardc.ir.verify import violations
from shardc.partition.cut import CutStep, cut
from shardc.partition.staged_program import scheduled
from shardc.partition.step_analysis import StepAnalysis
from shardc.runtime.oracle.simulate import run_reference, simulate
from shardc.schedule.build import build
from shardc.schedule.instructions import Backward, Forward, Free, Send
from shardc.schedule.lists import RankLists
from shardc.schedule.pipeline import Pipeline
from shardc.schedule.prove import prove
from tests.models.zoo import make
from tests.partition.whole import agree, compiled, staged, step
from tests.replanned import replanned


def calls(graph: Graph) -> Counter[str]:
    return Counter(info(call).name for call in graph.calls())


def sent(staged: CutStep) -> set[str]:
    """The values that leave their stage."""
    own = staged.pipeline.producers
    stages = enumerate(staged.pipeline.stages)
    read = [(at, name) for at, s in stages for part in (s.forward, s.dgrad, s.wgrad) for name in part.reads]
    return {name for at, name in read if own[name] != at}


# ---------------------------------------------------------------------- split backward
@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("model", "variant", "microbatches"),
    [("gpt2", "alone", 3), ("gpt2", "zero1", 8), ("llama", "tp2", 1), ("t5", "tp2", 3), ("resnet", "alone", 8)],
)
def test_dgrad_and_wgrad_are_the_unsplit_backward(model: str, variant: str, microbatches: int) -> None:
    """Node for node: every call of backward is in one of the two, and in no other stage; nothing runs twice."""
    found = staged(model, variant, microbatches, 4)
    free = {info(call).name for call in StepAnalysis(found.body).replicable}
    everywhere: Counter[str] = Counter()
    for stage in found.stages:
        assert calls(stage.dgrad) + calls(stage.wgrad) == calls(stage.backward)
        assert max(calls(stage.backward).values()) == 1
        everywhere += calls(stage.forward) + calls(stage.backward)
    once = {info(call).name for call in StepAnalysis(found.body).calls} - free
    assert {name: count for name, count in everywhere.items() if name not in free} == dict.fromkeys(once, 1)


def test_first_stage_has_no_dgrad() -> None:
    found = staged("gpt2", "tp2", 1, 4)
    assert not list(found.stages[0].dgrad.calls())
    assert found.pipeline.stages[0].dgrad.makes == ()
    assert all(list(stage.dgrad.calls()) for stage in found.stages[1:])
    assert all(list(stage.wgrad.calls()) for stage in found.stages)


# ---------------------------------------------------------------------- what crosses
def test_a_chain_sends_the_residual_stream() -> None:
    """One value a cut in each direction, sharded as it is: of 8 sequences a microbatch, with 4 tokens of 16 floats."""
    found = staged("gpt2", "dp2", 3, 4)
    assert len(sent(found)) == 2 * 3
    assert {found.pipeline.bytes[name] for name in sent(found)} == {8 * 4 * 16 * 4 // 2}


def crossing(staged: CutStep) -> dict[tuple[int, int], dict[str, int]]:
    """By maker and reader: the values that go from one stage to another, with their bytes a microbatch."""
    own, found = staged.pipeline.producers, dict[tuple[int, int], dict[str, int]]()
    for at, s in enumerate(staged.pipeline.stages):
        for name in (*s.forward.reads, *s.dgrad.reads, *s.wgrad.reads):
            if own.get(name, at) != at:
                found.setdefault((own[name], at), {})[name] = staged.pipeline.bytes[name]
    return found


RECOMPUTE = ["full", "selective", {"budget": 30000}, {"mode": "full", "collectives": True}]


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("mode", "mesh"), [*((mode, "") for mode in ("none", *RECOMPUTE)), ("full", "dp=2"), ("selective", "tp=2")], ids=str
)
def test_recomputation_sends_nothing_gpt2(mode: Any, mesh: str) -> None:
    """One activation forward and one gradient back at every boundary, the head's too; sharded over dp."""
    model, batch, _ = make("gpt2", batch=4, seq=4, layers=3, vocab=32, width=16)
    plan: dict[str, Any] = {"inputs": {"input_ids": "dp, -", "labels": "dp, -"}} if mesh == "dp=2" else {}
    if mesh == "tp=2":
        plan = {"params": {"**.attn.c_attn.weight": "-, 3*tp", "**.mlp.c_fc.weight": "-, tp"}}
    program = step(model, batch, 2, mesh, recompute=mode, **plan)
    size = 2 * 4 * 16 * 4 // (2 if mesh == "dp=2" else 1)
    for split in (["h.1", "h.2", "ln_f"], ["h.0", "h.2", "lm_head"]):
        found = crossing(cut(program.body, split=split))
        assert found.keys() == {(a, b) for a, b in product(range(4), range(4)) if abs(a - b) == 1}
        assert all(list(values.values()) == [size] for values in found.values()), found


@pytest.mark.long  # GPT-2's is ordinary, and `passes/test_recompute.py` has the memory
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("model", "split", "sizes"),
    [
        # The cuts go through layers, which are recomputed as one.
        ("resnet", ["stages.0.layers.0.layer.1", "stages.1.layers.0.layer.2"], {"blocks": 1, "size": 16}),
        ("t5", ["encoder.block.0.layer.1", "decoder.block.0.layer.1", "decoder.block.1.layer.2"], {"layers": 2}),
    ],
)
def test_recomputation_sends_nothing(model: str, split: list[str], sizes: dict[str, int]) -> None:
    module, batch, loss = make(model, batch=4, **sizes)
    traced = step(module, batch, 2, loss=loss)
    plain, inputs = cut(traced.body, split=split), traced.inputs()
    expected = run_reference(traced.reference, inputs, dtype=torch.float64)
    for mode in RECOMPUTE:
        program = replanned(traced, recompute=mode)
        found = cut(program.body, split=split)
        assert crossing(found) == crossing(plain), mode
        again = sum(info(call).is_recomputed for stage in found.stages for call in stage.backward.calls())
        assert again or mode == RECOMPUTE[2]
        for schedule in ("1f1b", "zb-h1"):
            agree(scheduled(found, schedule), inputs, expected, seed=len(schedule))


@pytest.mark.long  # GPT-2's is ordinary, and `passes/test_recompute.py` has the memory
def test_recomputation_holds_less() -> None:
    """Each stage keeps what it is given, and makes the rest of its part of a layer again."""
    module, batch, loss = make("t5", batch=4, layers=2)
    split = ["encoder.block.0.layer.1", "decoder.block.0.layer.1", "decoder.block.1.layer.2"]
    kept: dict[str, list[float]] = {}
    traced = step(module, batch, 2, "", loss)
    for mode in ("none", "full"):
        staged = cut(replanned(traced, recompute=mode).body, split=split)
        kept[mode] = [stage.activation for stage in staged.costs.stages]
    assert all(less < more for less, more in zip(kept["full"], kept["none"], strict=True))


def test_the_tied_weight_is_summed_once_a_step() -> None:
    found = staged("gpt2", "tp2", 1, 4)
    (name,) = (name for name, group in found.sum_stages.items() if len(group) > 1)
    assert found.sum_stages[name] == (0, 3)
    assert [("transformer.wte.weight" in stage.held) for stage in found.stages] == [True, False, False, True]
    text = str(build(found.pipeline, "1f1b", 1))
    assert text.count(f"ReduceGrads {name} over {{0, 3}}") == 2


def test_split_sums_leave_a_body_that_computes_the_same() -> None:
    program, inputs, expected = compiled("t5", "tp2", 3)
    found = simulate(staged("t5", "tp2", 3, 4).body, inputs, dtype=torch.float64)
    for port, value in simulate(program.body, inputs, dtype=torch.float64).items():
        torch.testing.assert_close(found[port], value, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found[port], expected[port], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("model", ["gpt2", "t5"])
def test_bodies_are_graphs_like_any_other(model: str) -> None:
    found = staged(model, "tp2", {"gpt2": 1, "t5": 3}[model], 4)
    finish = found.epilogue_of([0, 3])
    bodies = [stage[part] for stage in found.stages for part in ("forward", "backward", "dgrad", "wgrad")]
    for graph in (*bodies, finish.norm, finish.update):
        assert violations(graph) == []
        text = print_graph(graph, comments=False)
        assert print_graph(parse(text), comments=False) == text


def test_text_of_a_stage(golden: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    program = step(model, torch.randn(4, 4), 2, loss=lambda y, _: (y * y).mean())
    found = scheduled(cut(program.body, 2), "zb-h1")
    golden("stages.txt", "\n".join(found.text(rank, comments=False) for rank in range(2)))


# ---------------------------------------------------------------------- no chains
class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x)))


class UNet(nn.Module):
    """Skips from every level to its mirror image; a mask of the batch that all levels read; an auxiliary loss."""

    def __init__(self, levels: int = 3, width: int = 4) -> None:
        super().__init__()
        self.down = nn.ModuleList(Block(width) for _ in range(levels))
        self.up = nn.ModuleList(Block(width) for _ in range(levels))
        self.scale = nn.Parameter(torch.ones(width, 1))

    def forward(self, x: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        mask = (torch.arange(x.shape[-1]) < lengths[:, None])[:, None]
        skips: list[Tensor] = []
        aux = x.new_zeros(())
        for block in self.down:
            x = block(x * self.scale) * mask
            skips.append(x)
            aux = aux + 0.1 * x.pow(2).mean()
        for block in self.up:
            x = block(x + skips.pop() * self.scale) * mask
        return {"loss": x.pow(2).mean() + aux, "y": x}


def unet(microbatches: int, mesh: str = "", **plan: Any) -> Any:
    torch.manual_seed(0)
    batch = {"x": torch.randn(12, 4, 8), "lengths": torch.randint(1, 9, (12,))}
    return step(UNet(), batch, microbatches, mesh, **plan)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize(("stages", "schedule", "virtual"), [(2, "1f1b", 1), (6, "zb-h1", 1), (6, "zb-v", 2)])
def test_skips_masks_and_shared_parameters(microbatches: int, stages: int, schedule: str, virtual: int) -> None:
    program = unet(microbatches, "dp=2", inputs={"x": "dp, -, -", "lengths": "dp"}, outputs={"y": "dp, -, -"})
    inputs = program.inputs()
    found = cut(program.body, stages)
    expected = run_reference(program.reference, inputs, dtype=torch.float64)
    agree(scheduled(found, schedule, virtual), inputs, expected, seed=stages)
    assert stages < 6 or max(len(group) for group in found.sum_stages.values()) > 2  # `scale`, in most stages
    assert not any("arange" in name or "lt" in name for name in sent(found))  # each stage makes its own mask


def test_skips_go_straight_to_where_they_are_read() -> None:
    """Level 0's output is read by the next level and before the last, and passes no stage between."""
    found = cut(unet(1).body, split=["down.1", "down.2", "up.0", "up.1", "up.2"])
    lists = build(found.pipeline, "1f1b", 1)
    skip = next(name for name in found.pipeline.stages[0].forward.makes if not name.startswith("kept"))
    assert [i.peer for i in lists.ranks[0] if isinstance(i, Send)] == [1, 4]
    assert [at for at, stage in enumerate(found.pipeline.stages) if skip in stage.forward.reads] == [1, 4]


class Odd(nn.Module):
    """One layer used three times, dropout, a frozen weight, and a bias that two sums share the gradient of."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))
        self.b.weight.requires_grad_(False)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(torch.tanh(self.a(x)))
        x = torch.tanh(self.b(x)) + x
        x = self.drop(torch.tanh(self.a(x)))
        x = torch.tanh(self.c(x)) + self.d.bias
        return self.d(self.drop(self.a(x)))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("optimizer", [None, "sgd"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_shared_layers_random_draws_frozen_weights(optimizer: str | None, recompute: str) -> None:
    torch.manual_seed(0)
    model, batch = Odd(), torch.randn(12, 6)
    update = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) if optimizer else None
    clip = {"clip_grad_norm": 0.01} if optimizer else {}
    program = step(
        model, batch, 3, "dp=2", lambda y, _: (y * y).mean(), update, inputs={"x": "dp, -"},
        recompute={"mode": recompute}, **clip,
    )  # fmt: skip
    inputs = program.inputs()
    expected = run_reference(program.reference, inputs, dtype=torch.float64)
    for stages, schedule in ((2, "1f1b"), (3, "zb-h1"), (5, "gpipe")):
        agree(scheduled(cut(program.body, stages), schedule), inputs, expected, seed=stages)


# ---------------------------------------------------------------------- what is refused
def test_forwards_in_order_where_buffers_go_on() -> None:
    """A batch norm's statistics pass from microbatch to microbatch: lists that swap two forwards are no proof."""
    found = cut(unet(3).body, 2)
    assert all(stage.ordered for stage in found.pipeline.stages)
    lists = build(found.pipeline, "gpipe", 3)
    swap = {Forward(1, 0): Forward(1, 1), Forward(1, 1): Forward(1, 0)}
    ranks = (lists.ranks[0], tuple(swap.get(i, i) for i in lists.ranks[1]))  # type: ignore[call-overload]
    codes = {wrong.code for wrong in prove(RankLists(lists.pipeline, 3, ranks)).errors}
    assert "SC525" in codes
    assert not cut(compiled("gpt2", "tp2", 1)[0].body, 2).pipeline.stages[0].ordered


class Shares(nn.Module):
    """A buffer that one layer changes and another reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.seen.mul_(0.9).add_(x.detach().mean(0))
        return self.last(x) * self.seen


def test_a_changing_buffer_lives_in_one_stage() -> None:
    torch.manual_seed(0)
    program = step(Shares(), torch.randn(4, 4), 2, loss=lambda y, _: (y * y).mean())
    inputs = program.inputs()
    expected = run_reference(program.reference, inputs, dtype=torch.float64)
    agree(scheduled(cut(program.body, split=["last"]), "1f1b"), inputs, expected)


def test_lists_of_another_number_of_microbatches() -> None:
    found = staged("gpt2", "alone", 3, 2)
    lists = build(found.pipeline, "1f1b", 2)
    program = scheduled(found, "1f1b")
    with pytest.raises(ShardcError, match="2 microbatches cannot run a step of 3"):
        agree(replace(program, lists=lists), *compiled("gpt2", "alone", 3)[1:])


def test_use_after_free_is_refused() -> None:
    program = scheduled(staged("gpt2", "alone", 3, 2), "1f1b")
    first = list(program.lists.ranks[0])
    at = next(at for at, i in enumerate(first) if isinstance(i, Free))
    first.insert(at - 1, first.pop(at))  # before the send of what it frees
    lists = replace(program.lists, ranks=(tuple(first), *program.lists.ranks[1:]))
    with pytest.raises(ShardcError, match="after it is freed") as refused:
        agree(replace(program, lists=lists), *compiled("gpt2", "alone", 3)[1:])
    assert refused.value.code == "SC524"


def test_plain_pipelines_keep_their_bytes() -> None:
    """What is kept is counted once: a stage holds less than all values that its backward reads."""
    found = staged("gpt2", "tp2", 1, 4)
    pipeline: Pipeline = found.pipeline
    assert all(size > 0 for name, size in pipeline.bytes.items() if name.startswith("kept"))
    assert sum(isinstance(i, Backward) for i in build(pipeline, "1f1b", 1).ranks[0]) == 1
