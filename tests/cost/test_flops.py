"""FLOPs of a body against formulas written by hand, and against torch's own counter of the eager model."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import shardc
from shardc.cost.flops import Flops, human_flops
from tests.models.zoo import PLANS, make

BATCH, SEQ, WIDTH, LAYERS, VOCAB = 8, 16, 64, 2, 256
TOKENS = BATCH * SEQ
LINEAR = LAYERS * 12 * WIDTH**2 + WIDTH * VOCAB  # weights that meet every token: four of attention, eight of the MLP
SCORES = BATCH * SEQ * SEQ * WIDTH * LAYERS  # multiplications of one product of all heads


def counted(plan: str, mesh: str, **arguments: Any) -> Flops:
    model, batch, loss = make(plan.removesuffix("_sp"), **arguments)
    return shardc.compile(model, batch, plan=PLANS / f"{plan}.yaml", loss=loss, mesh=mesh).flops()


def test_gpt2_by_hand() -> None:
    """2 N T forward and 4 N T backward; causal attention, 2 products forward and 5 backward, half of each."""
    done = counted("gpt2", "dp=1, tp=1")
    assert done.of_phase("fwd") == 2 * LINEAR * TOKENS + 2 * SCORES * 2 // 2
    assert done.of_phase("bwd") == 4 * LINEAR * TOKENS + 2 * SCORES * 5 // 2
    assert done.total == done.of_phase("fwd") + done.of_phase("bwd")
    assert done.of_op("shardc.sdpa") == 2 * SCORES


def test_six_n_t() -> None:
    """The rule of thumb, on a model whose attention and embeddings are small beside its matrices."""
    model, batch, _ = make("gpt2", width=128, vocab=64)
    weights = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and "wpe" not in n)
    done = shardc.compile(model, batch, plan=PLANS / "gpt2.yaml").flops()
    assert done.total * 4 == pytest.approx(6 * weights * TOKENS, rel=0.05)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("plan", ["gpt2", "gpt2_sp", "llama"])
@pytest.mark.parametrize("mesh", ["dp=2, tp=1", "dp=2, tp=2", "dp=4, tp=2"])
def test_ranks_share_the_work(plan: str, mesh: str) -> None:
    size = shardc.Mesh.parse(mesh).world_size
    assert counted(plan, mesh).total * size == counted(plan, "dp=1, tp=1").total


def test_replicated_work_is_counted_on_each_rank() -> None:
    model, batch, _ = make("gpt2")
    alone = shardc.compile(model, batch, plan={"inputs": {"input_ids": "-, -"}}, mesh="dp=2").flops()
    assert alone.total == counted("gpt2", "dp=1, tp=1").total


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["cnn", "resnet"])
def test_convolutions_agree_with_torch(name: str) -> None:
    model, batch, loss = make(name)
    assert loss is None
    counter = FlopCounterMode(display=False)
    with counter:
        output = model(**batch)
        (output if isinstance(output, torch.Tensor) else output.loss).backward()
    assert counted(name, "dp=1, tp=1").total == counter.get_total_flops()


@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_and_transposed_convolutions(transposed: bool) -> None:
    kind = torch.nn.ConvTranspose2d if transposed else torch.nn.Conv2d
    with torch.device("meta"):
        model = torch.nn.Sequential(kind(8, 12, 3, stride=2, groups=2, bias=False))
        x = torch.zeros(4, 8, 9, 9)
    program = shardc.compile(model, (x,), plan={}, mesh="dp=1", loss=lambda y, _: y.sum())
    positions = 9 * 9 if transposed else 4 * 4
    assert program.flops().of_phase("fwd") == 2 * 4 * positions * 8 * 12 // 2 * 9
    assert program.flops().of_phase("bwd") == 2 * 4 * positions * 8 * 12 // 2 * 9, "the input wants no gradient"


def test_words() -> None:
    assert human_flops(12) == "12 FLOP"
    assert human_flops(22_500_000) == "22.5 MFLOP"
    assert human_flops(3 * 10**18) == "3e+03 PFLOP"
