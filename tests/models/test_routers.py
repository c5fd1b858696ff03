"""Routers of `transformers`, unmodified, over dp2 x ep2: the loss and every gradient are eager PyTorch's in float64. So
is the balance of experts, a product of two means over the *global* batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.ir.collectives import collectives
from tests.models import test_experts
from tests.models.eagerly import eager, gap
from tests.models.test_experts import compiled, groupings, model_of, over_ep

pytestmark = test_experts.pytestmark

# How tokens choose their experts.
ROUTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax, top-k, normalised": ("Mixtral", {}),
    "softmax, top-k": ("Qwen3Moe", {"norm_topk_prob": False}),
    "softmax, top-k, a shared expert": ("Qwen2Moe", {}),
    "top-k, softmax, biased": ("GptOss", {}),
    "top-k, softmax": ("GraniteMoe", {}),
    "sigmoid, groups, correction": ("DeepseekV3", {"norm_topk_prob": True, "routed_scaling_factor": 2.5}),
    "sigmoid, one group": ("DeepseekV3", {"norm_topk_prob": False, "n_group": 1, "topk_group": 1}),
}
BALANCED = [name for name in ROUTERS if "sigmoid" not in name]


def routed(name: str, **options: Any) -> nn.Module:
    of, arguments = ROUTERS[name]
    model = model_of(of, **(arguments | options))
    generator = torch.Generator().manual_seed(3)
    for key, value in (*model.named_parameters(), *model.named_buffers()):
        if "gate.weight" in key or "router" in key or "e_score_correction_bias" in key:
            value.data.normal_(0, 0.5, generator=generator)  # spread scores, so that a correction changes the choice
    return model


@pytest.mark.sampled(18)
@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_is_eager_pytorchs(name: str) -> None:
    model = routed(name)
    program = compiled(model, {"mesh": "dp=2, ep=2", "params": over_ep(model)})
    assert groupings(program) == 1
    assert not program.diagnostics
    assert gap(program, eager(model, program.sample)) < 1e-12


def test_the_correction_decides_who_is_chosen_and_has_no_gradient() -> None:
    model = routed("sigmoid, groups, correction")
    before = eager(model, (sample := compiled(model, {"mesh": "ep=2", "params": over_ep(model)}).sample))
    (bias,) = (b for name, b in model.named_buffers() if name.endswith("e_score_correction_bias"))
    assert not any(name.endswith("e_score_correction_bias") for name in before)
    bias.data.neg_()
    assert not torch.equal(before["loss"], eager(model, sample)["loss"])


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", BALANCED)
def test_the_balance_of_experts_is_the_global_batchs(name: str) -> None:
    """Counts of experts are summed over ranks, once for all layers; the ids themselves are not gathered."""
    model = routed(name, output_router_logits=True, router_aux_loss_coef=1.0)
    program = compiled(model, {"mesh": "dp=2, ep=2", "params": over_ep(model)})
    wanted = eager(model, program.sample)
    assert gap(program, wanted) < 1e-12
    assert {c.kind for c in collectives(program.body)} == {"all_reduce"}
    assert not program.diagnostics
    halves = [eager(model, {k: v[i : i + 2] for k, v in program.sample.items()})["loss"] for i in (0, 2)]
    assert abs(float(sum(halves) / 2 - wanted["loss"])) > 1e-4  # each rank's own balance would be another loss


def test_padding_does_not_count_in_the_balance() -> None:
    model = routed("softmax, top-k, normalised", output_router_logits=True, router_aux_loss_coef=1.0)
    tokens = torch.randint(3, 64, (4, 8), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[0, 5:], mask[3, 3:] = 0, 0
    batch = {"input_ids": tokens, "labels": tokens.masked_fill(mask == 0, -100), "attention_mask": mask}
    plan = {"mesh": "dp=2, ep=2", "params": over_ep(model), "inputs": dict.fromkeys(batch, "dp")}
    program = shardc.compile(model, batch, plan=plan)
    assert gap(program, eager(model, batch)) < 1e-12


def test_rows_that_do_not_divide_over_ranks_count_once() -> None:
    """Padding of a rank's ids would be counted as expert 0."""
    model = routed("softmax, top-k, normalised", output_router_logits=True, router_aux_loss_coef=1.0)
    tokens = torch.randint(3, 64, (3, 8), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens}
    plan = {"mesh": "dp=2, ep=2", "params": over_ep(model), "inputs": dict.fromkeys(batch, "dp")}
    program = shardc.compile(model, batch, plan=plan)
    assert gap(program, eager(model, batch)) < 1e-12


class WithZLoss(nn.Module):
    """A model, and the mean square of its routers' log-partition function."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        out = self.model(input_ids=input_ids, labels=labels, output_router_logits=True)
        z = torch.stack([logits.logsumexp(-1).square().mean() for logits in out.router_logits]).mean()
        out.loss = out.loss + 0.1 * z
        return out


def test_z_loss() -> None:
    """Microbatches are of equally many tokens: the mean of their z-losses is the batch's, and `verify` says nothing."""
    model = WithZLoss(routed("softmax, top-k, normalised", router_aux_loss_coef=0.0))
    program = compiled(model, {"mesh": "dp=2, ep=2", "params": over_ep(model)})
    assert gap(program, eager(model, program.sample)) < 1e-12
    accumulated = compiled(model, {"mesh": "dp=2, ep=2", "params": over_ep(model), "accumulate": 2})
    report = accumulated.verify()
    assert report.ok
    assert not report.diagnostics


SPLIT: dict[str, dict[str, Any]] = {
    "accumulated": {"mesh": "dp=2, ep=2", "accumulate": 2},
    "pipeline": {"mesh": "pp=2, ep=2", "pipeline": {"axis": "pp", "microbatches": 2}},
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize("coefficient", [0.02, 0.001, 0.0])
def test_the_balance_is_each_microbatchs_and_verify_says_so(name: str, coefficient: float) -> None:
    options = {"output_router_logits": True, "router_aux_loss_coef": coefficient, "num_hidden_layers": 2}
    model = routed("softmax, top-k, normalised", **options)
    program = compiled(model, SPLIT[name] | {"params": over_ep(model)})
    report = program.verify()
    assert report.ok
    assert [d.code for d in report.diagnostics] == (["SC225"] if coefficient else [])
    assert all("balance of experts" in (d.hint or "") for d in report.diagnostics)
