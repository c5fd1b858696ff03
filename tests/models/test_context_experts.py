"""Mixtures of experts along a sequence in zigzag: each rank groups its own rows, and they come back in their order."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardc
from shardc import Program
from shardc.cost.flops import flops
from shardc.ir.graph import info, type_of
from shardc.ir.ops.exchange import DISPATCH_ROWS
from shardc.ir.ops.experts import GROUP_ROWS, UNGROUP_ROWS
from shardc.runtime.oracle.simulate import simulate
from tests import expert_loops
from tests.experts import Experts
from tests.models import test_experts, test_library_experts
from tests.models.eagerly import eager, gap

pytestmark = test_experts.pytestmark
aten = torch.ops.aten
ATTENTION = ("shardc.sdpa", "shardc.sdpa_bwd", "shardc.sdpa_rows", "shardc.sdpa_rows_bwd")


def tokens(batch: int, length: int, **more: Any) -> dict[str, Tensor]:
    ids = torch.randint(3, 64, (batch, length), generator=torch.Generator().manual_seed(1), **more)
    return {"input_ids": ids, "labels": ids}


def compiled(model: nn.Module, batch: dict[str, Tensor], **plan: Any) -> Program:
    return shardc.compile(model, batch, plan={"context": {"balance": "zigzag"}, **plan})


def in_zigzag(program: Program) -> bool:
    """Do ranks have tokens of both ends of the sequence?"""
    return any("~cp" in str(type_of(node)) for node in program.body.placeholders)


# ---------------------------------------------------------------------- work
@pytest.mark.parametrize("name", ["Mixtral", "Jamba"])
def test_causal_work_is_equal_beside_experts(name: str) -> None:
    """Attention of the fullest of four ranks, over their mean; nothing has to be asked for."""
    with torch.device("meta"):
        model = test_experts.model_of(name, max_position_embeddings=256)
    batch = {key: value.to("meta") for key, value in tokens(1, 256).items()}
    program = compiled(model, batch, mesh="cp=4", inputs={"*": "-, cp"}, context={})
    assert in_zigzag(program)
    each = [flops(program.body, program.mesh.coordinate(rank)) for rank in range(4)]
    work = [sum(of_rank.of_op(op) for op in ATTENTION) for of_rank in each]
    assert max(work) * 4 <= 1.01 * sum(work)
    assert sum(work) > 0
    assert len({of_rank.of_op("shardc.expert_mm") for of_rank in each}) == 1


# ---------------------------------------------------------------------- results
HEADS = {f"**.{name}_proj.weight": "tp, -" for name in "qkv"} | {"**.o_proj.weight": "-, tp"}
WIDTHS = {"**.experts.gate_up_proj": "-, 2*tp, -", "**.experts.down_proj": "-, -, tp"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "cp2": {"mesh": "cp=2"},
    "cp4": {"mesh": "cp=4"},
    "dp2 x cp2": {"mesh": "dp=2, cp=2", "inputs": {"*": "dp, cp"}},
    "cp2, experts along it, gathered": {"mesh": "cp=2", "params": {"**.experts.*_proj": "cp"}},
    "cp2, experts along it, sent": {"mesh": "cp=2", "params": {"**.experts.*_proj": "cp"}, "experts": "all_to_all"},
    "cp2 x ep2": {"mesh": "cp=2, ep=2", "params": {"**.experts.*_proj": "ep"}},
    "cp2 x ep2 of the batch, sent": {
        "mesh": "cp=2, ep=2",
        "inputs": {"*": "ep, cp"},
        "params": {"**.experts.*_proj": "ep"},
        "experts": "all_to_all",
    },
    "cp2 x tp2": {"mesh": "cp=2, tp=2", "params": HEADS | WIDTHS},
    "cp2 x tp2, sequence parallel": {
        "mesh": "cp=2, tp=2",
        "params": HEADS | WIDTHS,
        "activations": {"model.layers.*": "-, cp.tp, -"},
    },
}


@pytest.mark.sampled(56)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        (name, layout)
        for name in ("Mixtral", "Qwen3Moe", "DeepseekV3", "Jamba", "GptOss")
        for layout in LAYOUTS
        if name == "Mixtral" or "tp" not in layout  # whose placements are Mixtral's
    ],
)
@pytest.mark.parametrize("length", [16, 19])
def test_loss_and_gradients(name: str, layout: str, length: int) -> None:
    heads: dict[str, Any] = {"num_key_value_heads": 4} if name == "Mixtral" else {}
    model = test_experts.model_of(name, **heads)
    program = compiled(model, tokens(2, length), **{"inputs": {"*": "-, cp"}} | LAYOUTS[layout])
    assert in_zigzag(program)
    assert any(node.target is DISPATCH_ROWS for node in program.body.calls()) == ("sent" in layout)
    assert gap(program, eager(model, program.sample)) < 1e-12


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", test_library_experts.MODELS)
@pytest.mark.parametrize("dispatch", ["all_gather", "all_to_all"])
def test_experts_of_other_interfaces(name: str, dispatch: str) -> None:
    model = test_library_experts.model_of(name)
    params = {key: "cp" for key, _ in test_library_experts.experts(model)}
    said: dict[str, Any] = {"params": params, "experts": dispatch}
    program = compiled(model, tokens(2, 18), mesh="cp=2", inputs={"*": "-, cp"}, **said)
    assert in_zigzag(program)
    assert gap(program, eager(model, program.sample)) < 1e-12


LOOPS = {
    name: kind
    for name, kind in inspect.getmembers(expert_loops, inspect.isclass)
    if issubclass(kind, expert_loops.Mixture) and kind is not expert_loops.Mixture
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", LOOPS)
def test_loops_over_experts(name: str) -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(2, 19, expert_loops.HIDDEN)}
    program = compiled(LOOPS[name](), batch, mesh="cp=2", inputs={"x": "-, cp, -"})
    assert in_zigzag(program)
    report = program.verify()
    assert report.ok, str(report)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "Jamba"])
@pytest.mark.parametrize("padded", [False, True])
def test_losses_of_routers(name: str, padded: bool) -> None:
    """A mean over all tokens, or over those that a mask leaves."""
    model, batch = test_experts.model_of(name, output_router_logits=True), tokens(2, 19)
    if padded:
        mask = torch.ones_like(batch["input_ids"])
        mask[0, -7:] = 0
        batch |= {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}
    program = compiled(model, batch, mesh="cp=2", inputs={"*": "-, cp"})
    assert in_zigzag(program)
    assert gap(program, eager(model, program.sample)) < 1e-12


# ---------------------------------------------------------------------- order
@pytest.mark.parametrize("dispatch", ["all_gather", "all_to_all"])
def test_rows_in_another_order_are_other_results(dispatch: str) -> None:
    """What comes back from experts, with a rank's two chunks exchanged: the tests above would see it."""
    model = test_experts.model_of("Mixtral")
    said: dict[str, Any] = {"params": {"**.experts.*_proj": "cp"}, "experts": dispatch}
    program = compiled(model, tokens(1, 16), mesh="cp=2", inputs={"*": "-, cp"}, **said)
    wanted = eager(model, program.sample)
    assert gap(program, wanted) < 1e-12
    graph = program.body.copy()
    rows = next(node for node in graph.calls() if node.target is UNGROUP_ROWS and info(node).phase == "fwd")
    readers, count = list(rows.users), type_of(rows).local_shape(graph.mesh)[0]
    with graph.fx.inserting_after(rows):
        turned = graph.call(aten.roll.default, (rows, [count // 2], [0]), like=rows, type=type_of(rows))
    for reader in readers:
        reader.replace_input_with(rows, turned)
    found = {port.name: value for port, value in simulate(graph, program.inputs(), dtype=torch.float64).items()}
    assert float((found["loss"] - wanted["loss"]).abs()) > 1e-6


class Dropped(nn.Module):
    """Masks of dropout are of rows in the order of experts: of all ranks' rows."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 4), Experts()

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(2)
        return (x + self.experts(x, ids, weights)).square().mean()


@pytest.mark.parametrize("balance", ["none", "zigzag"])
def test_what_is_of_sorted_rows_has_all_of_them(balance: str, monkeypatch: pytest.MonkeyPatch) -> None:
    silu: Callable[[Tensor], Tensor] = F.silu
    monkeypatch.setattr("tests.experts.F.silu", lambda x, inplace=False: F.dropout(silu(x), 0.5, True))
    torch.manual_seed(0)
    batch = {"x": torch.randn(2, 18, 6)}
    program = compiled(Dropped(), batch, mesh="cp=2", inputs={"x": "-, cp, -"}, context={"balance": balance})
    assert not any(node.target is GROUP_ROWS for node in program.body.calls())
    assert any(d.code == "SC203" for d in program.diagnostics)
    report = program.verify()
    assert report.ok, str(report)
