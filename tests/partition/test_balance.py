"""Where cuts are put: against brute force, on real costs, and where a plan says."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import accumulate, combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import shardc
from shardc.ir.diagnostic import ShardcError
from shardc.ir.graph import Graph, info
from shardc.ir.hardware import DEFAULT
from shardc.ir.links import Group
from shardc.ir.ops.accumulate import ACCUMULATE_WGRAD
from shardc.ir.ops.linear import LINEAR_WGRAD
from shardc.partition.balance import (
    balanced_starts,
    choose_starts,
    costs_by_kind,
    cut_bytes,
    divide_large_layers,
    unit_costs,
)
from shardc.partition.cut import cut
from shardc.partition.fused_costs import fused_call_costs
from shardc.partition.step_analysis import StepAnalysis
from shardc.passes.fusion.fuse import Fuse
from shardc.passes.sum_products import separate_terms
from shardc.plan.hardware import hardware
from tests.partition.whole import compiled, step


def terms_apart(body: Graph) -> Graph:
    """As `cut` cuts it: products of gradients of weights add to no sum themselves."""
    graph = body.copy()
    separate_terms(graph)
    return graph


def brute_force(costs: list[float], crossing: list[float], stages: int) -> float:
    """The least maximum over all contiguous partitions."""
    before = [0.0, *accumulate(costs)]
    sent = [0.0, *crossing[1:]]
    cuts = combinations(range(1, len(costs)), stages - 1)
    return min(
        max(before[b] - before[a] + sent[a] for a, b in zip((0, *inner), (*inner, len(costs)), strict=True))
        for inner in cuts
    )


def dearest(costs: list[float], crossing: list[float], starts: tuple[int, ...]) -> float:
    ends = zip(starts, (*starts[1:], len(costs)), strict=True)
    return max(sum(costs[a:b]) + (crossing[a] if a else 0.0) for a, b in ends)


@settings(max_examples=200)
@given(st.data())
def test_as_good_as_brute_force(data: st.DataObject) -> None:
    costs = data.draw(st.lists(st.integers(0, 50).map(float), min_size=1, max_size=9))
    crossing = data.draw(st.lists(st.integers(0, 9).map(float), min_size=len(costs), max_size=len(costs)))
    stages = data.draw(st.integers(1, len(costs)))
    best = brute_force(costs, crossing, stages)
    starts = balanced_starts(costs, crossing, stages, slack=0.0)
    assert starts[0] == 0
    assert len(set(starts)) == stages
    assert dearest(costs, crossing, starts) <= best
    loose = balanced_starts(costs, crossing, stages, slack=0.5)
    assert dearest(costs, crossing, loose) <= best * 1.5
    assert sum(crossing[at] for at in loose[1:]) <= sum(crossing[at] for at in starts[1:])


def test_units_count_the_products_of_weights_gradients() -> None:
    """Also where these add to their sums themselves: such a body is not analysed before its terms are values."""
    body = step(Stages(), torch.ones(8, 16), 4).body
    with pytest.raises(AssertionError, match="adds to its sum itself"):
        StepAnalysis(body)
    analysis = StepAnalysis(terms_apart(body))
    products = {call for call in analysis.calls if call.target is LINEAR_WGRAD}
    assert len(products) == len(body.calls_of(ACCUMULATE_WGRAD)) == 10
    costs = unit_costs(analysis, costs={call: float(call in products) for call in analysis.calls})
    of_units = zip(analysis.units, costs, strict=True)
    assert {unit.name: cost for unit, cost in of_units if unit.name} == {"stages.0": 2, "stages.1": 8}


@pytest.mark.long
def test_24_layers_with_a_vocabulary_of_128k() -> None:
    """The head costs as much as several layers; the balance is within 3 % of what brute force finds."""
    start = time.perf_counter()
    config = GPT2Config(
        n_layer=24, n_head=16, n_embd=1024, n_positions=1024, vocab_size=128_000, use_cache=False,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        model, tokens = GPT2LMHeadModel(config), torch.zeros(4, 1024, dtype=torch.long)
    program = step(model, {"input_ids": tokens, "labels": tokens}, 4)
    analysis = StepAnalysis(terms_apart(program.body))
    costs = unit_costs(analysis)
    units = list(zip(analysis.units, costs, strict=True))
    crossing = [DEFAULT.flops_per_sent_byte(()) * size for size in cut_bytes(analysis)]
    head = sum(
        cost for unit, cost in zip(analysis.units, costs, strict=True) if not unit.name.startswith("transformer")
    )
    layer = next(cost for unit, cost in units if unit.name == "transformer.h.5")
    assert head > 4 * layer
    for stages in (2, 4, 5):
        starts = choose_starts(analysis, stages)
        assert dearest(costs, crossing, starts) <= 1.03 * brute_force(costs, crossing, stages)
        # Of cuts as good, one that sends the residual stream and nothing else.
        assert max(cut_bytes(analysis)[at] for at in starts[1:]) == 2 * 1024 * 1024 * 4
    staged = cut(program.body, 4)
    times = [cost.forward + cost.dgrad + cost.wgrad for cost in staged.costs.stages]
    assert max(times) <= 1.03 * brute_force(costs, crossing, 4)
    assert max(times) <= 1.03 * brute_force(costs, [0.0] * len(costs), 4)
    assert time.perf_counter() - start < 30


@pytest.mark.sampled(3)
@pytest.mark.parametrize("split", [["h.1", "h.2"], ["transformer.h.1", "transformer.ln_f"], ["lm_head"]])
def test_named_split(split: list[str]) -> None:
    staged = cut(compiled("gpt2", "tp2", 1)[0].body, split=split)
    assert len(staged.stages) == len(split) + 1
    for name, stage in zip(split, staged.stages[1:], strict=True):
        first = next(call for call in stage.forward.calls() if not info(call).constant)
        assert name in info(first).fqn


def test_a_layer_is_not_divided() -> None:
    with pytest.raises(ShardcError, match=r"'h\.1\.mlp' begins in the middle of transformer\.h\.1"):
        cut(compiled("gpt2", "tp2", 1)[0].body, split=["h.1.mlp"])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.mlp[1](torch.tanh(self.mlp[0](x))))


class Stages(nn.Module):
    """As Swin's: lists of blocks of a list of stages, one of them with most of the work."""

    def __init__(self) -> None:
        super().__init__()
        stages = (nn.Sequential(*(Block() for _ in range(count))) for count in (1, 4))
        self.stages = nn.ModuleList(nn.ModuleDict({"blocks": blocks}) for blocks in stages)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage["blocks"](x)
        return x.pow(2).mean()


def test_a_layer_of_more_than_a_stages_share_is_divided() -> None:
    analysis = StepAnalysis(terms_apart(step(Stages(), torch.ones(8, 16), 1).body))
    layers = [unit.name for unit in analysis.units if unit.name]
    assert layers == ["stages.0", "stages.1"]
    assert divide_large_layers(analysis, 1).divided == frozenset()
    half = divide_large_layers(analysis, 2)
    assert half.divided == {"stages.1"}, "its blocks are small enough, though there are lists in them"
    blocks = [f"stages.1.blocks.{i}" for i in range(4)]
    assert [unit.name for unit in half.units if unit.name] == ["stages.0", *blocks]
    assert divide_large_layers(analysis, 20).divided == {"stages.0", "stages.1", "stages.0.blocks.0", *blocks}
    (second,) = choose_starts(half, 2)[1:]
    assert half.units[second].name in blocks


@pytest.mark.long  # a layer is not divided: an ordinary test of another model
def test_blocks_of_t5_stay_whole() -> None:
    body = terms_apart(compiled("t5", "alone", 1)[0].body)
    analysis = divide_large_layers(StepAnalysis(body), 3)
    assert analysis.divided == frozenset()
    assert {"encoder.block.0", "decoder.block.1"} <= {unit.name for unit in analysis.units}


# ---------------------------------------------------------------------- the account of a machine
class Ends(nn.Module):
    """Blocks between an embedding and a head that costs as much as several of them."""

    def __init__(self, blocks: int = 5, width: int = 512, vocabulary: int = 16384) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.Linear(4 * width, width)) for _ in range(blocks)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(torch.nn.functional.layer_norm(x, x.shape[-1:]))
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


class Images(nn.Module):
    """Residual blocks of convolutions and group norms, which spend most of their time in memory."""

    def __init__(self, blocks: int = 6, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(8, width), nn.GELU(), nn.Conv2d(width, width, 1)
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3))).float().square().mean()


def batch_of(model: nn.Module) -> torch.Tensor:
    if isinstance(model, Images):
        return torch.zeros(64, 3, 64, 64, dtype=torch.bfloat16)
    return torch.zeros(8, 1024, dtype=torch.long)


def piped(
    pipeline: dict[str, object],
    hardware: object,
    mesh: str = "pp=2",
    of: type[nn.Module] = Ends,
    *,
    fuse: bool = True,
    more: Mapping[str, object] | None = None,
) -> shardc.Program:
    with torch.device("meta"):
        model = of().to(torch.bfloat16)
        batch = batch_of(model)
    plan = {"hardware": hardware, "fuse": fuse, "pipeline": {"microbatches": 8, **pipeline}, **(more or {})}
    return shardc.compile(model, batch, mesh=mesh, plan=plan)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize(("of", "blocks"), [(Ends, 5), (Images, 6)])
def test_no_other_cut_is_predicted_to_be_faster(of: type[nn.Module], blocks: int, fuse: bool) -> None:
    """Of an H200: embeddings move memory, the head is one large product and a loss of float32."""
    chosen = piped({}, "h200", of=of, fuse=fuse).predict("h200").step_ms
    cuts = [piped({"split": [f"blocks.{at}"]}, "h200", of=of, fuse=fuse) for at in range(1, blocks)]
    others = [program.predict("h200").step_ms for program in cuts]
    assert chosen <= 1.02 * min(others)
    assert max(others) > 1.1 * chosen, "the cut matters"


def test_a_body_that_will_be_fused_is_cut_as_its_kernels_weigh() -> None:
    """The loss of float32 is many calls and few kernels: the last stage has room for another block."""
    blocks: dict[bool, int] = {}
    for fuse in (False, True):
        last = piped({}, "h200", fuse=fuse).staged.stages[1].forward
        names = (info(call).fqn.split(".") for call in last.calls())
        blocks[fuse] = len({name[1] for name in names if name[0] == "blocks"})
    assert blocks == {False: 1, True: 2}


def test_of_equal_layers_one_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Deep(Ends):
        def __init__(self, blocks: int) -> None:
            super().__init__(blocks, 64, 128)

    fused: dict[int, int] = {}
    for blocks in (6, 12):
        with torch.device("meta"):
            model, tokens = Deep(blocks).to(torch.bfloat16), torch.zeros(8, 64, dtype=torch.long)
        body = terms_apart(step(model, tokens, 8).body)
        runs = list[Graph]()
        monkeypatch.setattr(Fuse, "run", lambda _, graph, runs=runs: runs.append(graph) or graph)
        fused_call_costs(StepAnalysis(body), costs_by_kind(body, DEFAULT), Fuse(), DEFAULT)
        fused[blocks] = len(runs)
    assert 0 < fused[6] == fused[12] < 16


def test_schedules_are_searched_with_the_latency_of_links() -> None:
    found = {name: piped({"schedule": "auto"}, name).staged.costs for name in ("h200", "default")}
    costs, rate = found["h200"], hardware("h200").bf16_flops_per_second
    sent = costs.crossing
    assert sent in (1024 * 512 * 2, 2 * 1024 * 512 * 2)  # a sequence's residual stream, and a branch beside it
    seconds = hardware("h200").collective_seconds("send", sent, Group((2,)), graph=True)
    assert costs.transfer_seconds(sent) == pytest.approx(seconds * rate)
    assert found["default"].latency == 0
    auto, plain = (piped({"schedule": name}, "h200").predict("h200").step_ms for name in ("auto", "1f1b"))
    assert auto <= plain
