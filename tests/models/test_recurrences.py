"""Models with recurrences of `transformers`, unmodified: one scan a layer, as many calls for 128 steps as for 16."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import shardc
from shardc.api import Program
from shardc.cost.flops import flops
from shardc.ir.collectives import collectives
from shardc.ir.ops.scan import SCAN, SCAN_BACKWARD
from shardc.ir.parse import parse
from shardc.ir.text import print_graph
from shardc.runtime.oracle.simulate import simulate
from tests.models.eagerly import eager, gap
from tests.replanned import replanned

T = pytest.importorskip("transformers")
SMALL = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "use_cache": False}
STATE_SPACE = {"state_size": 4, "time_step_rank": 4}
ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 16}
HYBRID = {"mamba_d_state": 4, "mamba_dt_rank": 4, "num_experts": 2, "num_experts_per_tok": 1} | {
    f"{kind}_layer_{word}": n for kind in ("attn", "expert") for word, n in (("period", 2), ("offset", 1))
}
MODELS: dict[str, dict[str, Any]] = {
    "Mamba": STATE_SPACE,
    "FalconMamba": STATE_SPACE,
    "Jamba": ATTENTION | HYBRID | {"num_hidden_layers": 2},  # of which one is attention
    "Rwkv": {"attention_hidden_size": 16, "num_hidden_layers": 2},  # its initialization divides by one less
    "RecurrentGemma": ATTENTION | {"num_key_value_heads": 1, "lru_width": 16, "attention_window_size": 256},
}
SCANS = {"Rwkv": 2}
IN_COLUMNS = {"**.in_proj.weight": "2*tp, -", "**.out_proj.weight": "-, tp"}


def model_of(name: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(T, f"{name}Config")(**(SMALL | MODELS[name] | options))
    config._experts_implementation = "eager"
    return getattr(T, f"{name}ForCausalLM")(config).train()


def compiled(model: nn.Module, plan: dict[str, Any], steps: int = 16) -> Program:
    tokens = torch.randint(32, (4, steps), generator=torch.Generator().manual_seed(1))
    inputs = {"*": "dp, -"} if "dp" in plan["mesh"] else {}
    return shardc.compile(model, {"input_ids": tokens, "labels": tokens}, plan={"inputs": inputs, **plan})


def calls(program: Program) -> Counter[Any]:
    return Counter(node.target for node in program.body.calls())


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", MODELS)
def test_as_many_calls_for_any_number_of_steps(name: str) -> None:
    model = model_of(name)
    programs = [compiled(model, {"mesh": "dp=2"}, steps) for steps in (16, 128)]
    for program in programs:
        assert calls(program)[SCAN] == calls(program)[SCAN_BACKWARD] == SCANS.get(name, 1)
        assert {c.kind for c in collectives(program.body)} == {"all_reduce"}
    assert calls(programs[0]) == calls(programs[1])
    assert gap(programs[0], eager(model, programs[0].sample)) < 1e-12


LAYERS = 2  # a stage of a pipeline each


@pytest.fixture(scope="module")
def mamba() -> nn.Module:
    return model_of("Mamba", num_hidden_layers=LAYERS)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mesh", ["tp=2", "dp=2, tp=2"])
def test_mamba_over_tp(mesh: str, mamba: nn.Module) -> None:
    """Each way two sums a layer: of what the state space reads of the channels, and of the stream."""
    program = compiled(mamba, {"mesh": mesh, "params": IN_COLUMNS})
    assert not program.diagnostics
    assert program.verify().ok
    assert gap(program, eager(mamba, program.sample)) < 1e-12
    over_tp = Counter(c.phase for c in collectives(program.body) if c.axes == ("tp",))
    assert over_tp == {"fwd": 2 * LAYERS, "bwd": 2 * LAYERS}
    assert {c.kind for c in collectives(program.body)} == {"all_reduce"}
    lines = [line for line in print_graph(program.body).splitlines() if " = shardc.scan" in line]
    assert len(lines) == 2 * LAYERS
    assert all("d: tp" in line for line in lines)
    whole = [flops(program.reference).of_op(f"shardc.{op}") for op in ("scan", "scan_backward")]
    parts = [flops(program.body).of_op(f"shardc.{op}") for op in ("scan", "scan_backward")]
    assert [part * program.mesh.world_size for part in parts] == whole
    assert whole[1] == 3 * whole[0] > 0


PLANS: dict[str, dict[str, Any]] = {
    "pipeline": {"mesh": "pp=2", "pipeline": {"axis": "pp", "microbatches": 2}},
    "zb-h1": {"mesh": "pp=2, tp=2", "pipeline": {"axis": "pp", "microbatches": 2, "schedule": "zb-h1"},
              "params": IN_COLUMNS},
    "zero 3": {"mesh": "dp=2, tp=2", "params": IN_COLUMNS, "storage": {"zero": 3, "axes": ["dp"]}},
    "accumulate": {"mesh": "dp=2", "accumulate": 2},
    "uneven": {"mesh": "tp=3", "params": {"**.in_proj.weight": "2*tp, -", "**.out_proj.weight": "-, tp"}},
}  # fmt: skip


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", PLANS)
def test_mamba_as_on_one_device(name: str, mamba: nn.Module) -> None:
    program = compiled(mamba, PLANS[name])
    report = program.verify()
    assert report.ok, str(report)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "said",
    [{"fuse": True, "recompute": "full"}, {"fuse": True}, {"recompute": "full"}, {"recompute": "selective"}],
    ids=str,
)
def test_mamba_recomputed_and_fused(said: dict[str, Any], mamba: nn.Module) -> None:
    plain = compiled(mamba, {"mesh": "dp=2, tp=2", "params": IN_COLUMNS})
    program = replanned(plain, **said)
    assert program.verify().ok
    assert calls(program)[SCAN] == (2 * LAYERS if said.get("recompute") == "full" else LAYERS)
    if said == {"recompute": "full"}:
        assert program.memory().row("activations").most < plain.memory().row("activations").most


def test_mamba_in_half_precision(mamba: nn.Module) -> None:
    program = compiled(mamba, {"mesh": "dp=2, tp=2", "params": IN_COLUMNS, "precision": {"compute": "bf16"}})
    assert program.verify().ok


def test_text_and_json(mamba: nn.Module) -> None:
    program = compiled(mamba, {"mesh": "dp=2, tp=2", "params": IN_COLUMNS})
    text = print_graph(program.body, comments=False)
    assert print_graph(parse(text), comments=False) == text
    read = Program.from_json(program.to_json())
    assert print_graph(read.body, comments=False) == text
    first, second = (simulate(p.body, program.inputs(), dtype=torch.float64) for p in (program, read))
    for (port, value), (other, same) in zip(first.items(), second.items(), strict=True):
        assert port.name == other.name
        assert torch.equal(value, same)
