"""The plans for tensor and expert parallelism that `transformers` brings, read by `Plan.from_hf`."""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

import shardc
from shardc import Plan
from shardc.ir.collectives import collectives
from shardc.ir.diagnostic import ShardcError
from shardc.ir.graph import type_of
from shardc.plan.hugging_face import SHARDED, UNPLACED
from tests.models import test_experts
from tests.models.test_experts import MODELS, compiled, groupings, model_of

T = pytest.importorskip("transformers")
parallel = pytest.importorskip("transformers.distributed.parallel_utils")
pytestmark = test_experts.pytestmark

# The axes of tp_plan and of ep_plan, and the mesh.
AXES: dict[str, tuple[str, str | None, str | None]] = {
    "ep": ("dp=2, ep=2", None, "ep"),
    "tp": ("dp=2, tp=2", "tp", None),
    "one axis for both": ("dp=2, tp=2", "tp", "tp"),
    "an axis each": ("tp=2, ep=2", "tp", "ep"),
}


def planned(model: nn.Module, of: str) -> shardc.Program:
    mesh, axis, experts = AXES[of]
    plan = Plan.from_hf(model, axis, experts=experts)
    return compiled(model, {"mesh": mesh, "params": plan.params})


@pytest.mark.sampled(32)
@pytest.mark.parametrize("of", AXES)
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "GptOss", "DeepseekV3"])
def test_the_librarys_own_plan(name: str, of: str) -> None:
    """No expert is gathered. What is, where the vocabulary is split, is a scalar of each token, in the loss."""
    model = model_of(name)
    program = planned(model, of)
    assert program.verify().ok
    assert groupings(program) == 1
    assert not program.diagnostics
    gathered = [c.value for c in collectives(program.body) if c.kind not in ("all_reduce", "reduce_scatter")]
    assert gathered == ([] if of == "ep" else ["amax.all_gather"])


def test_a_rank_holds_its_share_of_the_experts() -> None:
    model = model_of("Mixtral")
    experts = {name: p.numel() for name, p in model.named_parameters() if ".experts." in name}
    for of in AXES:
        graph = planned(model, of).body
        held = {
            p.name: math.prod(type_of(graph.input_nodes()[p.name]).local_shape(graph.mesh))
            for p in graph.inputs
            if p.name in experts
        }
        assert {name: 2 * n for name, n in held.items()} == experts, of


def test_what_the_plan_of_experts_places_is_not_placed_by_the_other() -> None:
    params = Plan.from_hf(model_of("Mixtral"), experts="dp.ep").params
    placed = {pattern.rpartition(".")[2]: str(a.placement) for pattern, a in params.items() if "experts" in pattern}
    assert placed == {"gate_up_proj": "dp.ep, -, -", "down_proj": "dp.ep, -, -"}
    assert str(params["model.layers.*.self_attn.q_proj.weight"].placement) == "tp, -"


def styles() -> Iterator[tuple[str, str]]:
    """Every style that a configuration of the library names, and where."""
    for module in pkgutil.iter_modules(T.models.__path__):
        try:
            configuration = importlib.import_module(f"transformers.models.{module.name}.configuration_{module.name}")
        except ModuleNotFoundError:
            continue
        for value in vars(configuration).values():
            for kind in ("tp", "ep"):
                for name, style in (getattr(value, f"base_model_{kind}_plan", None) or {}).items():
                    yield style, f"{module.name}: {name}"


def test_every_style_of_the_library_is_known() -> None:
    known = SHARDED.keys() | UNPLACED
    assert {style: where for style, where in styles() if style not in known} == {}
    assert set(parallel.ALL_PARALLEL_STYLES) - known == set()


def test_every_plan_of_experts_shards_their_first_dim() -> None:
    for name in MODELS:
        model = model_of(name)
        annotations = Plan.from_hf(model, None, experts="ep").params.values()
        experts = {name for name, _ in model.named_parameters() if ".experts." in name}
        placed = {name for name in experts if any(a.matches(name) for a in annotations)}
        assert experts == placed, name
        assert {str(a.placement).partition(",")[0] for a in annotations} == {"ep"}


def test_a_routers_style_of_earlier_versions_places_nothing() -> None:
    model: Any = model_of("Mixtral")
    model._ep_plan = {
        "model.layers.*.mlp.gate": "ep_router",
        "model.layers.*.mlp.experts.gate_up_proj": "grouped_gemm",
        "model.layers.*.mlp.experts": "moe_tp_experts",
    }
    params = Plan.from_hf(model, None, experts="ep").params
    assert {name: str(a.placement) for name, a in params.items()} == {
        "model.layers.*.mlp.experts.gate_up_proj": "ep, -, -"
    }


@pytest.mark.parametrize(
    ("plan", "arguments", "message"),
    [
        ({"model.layers.*.mlp.experts": "by_moon"}, {"experts": "ep"}, "unknown expert-parallel style 'by_moon'"),
        ({}, {"experts": "ep"}, "MixtralForCausalLM brings no ep_plan"),
        ({"model.layers.*.mlp.experts": "grouped_gemm"}, {}, "from_hf is given no axis"),
    ],
)
def test_refused(plan: dict[str, str], arguments: dict[str, str], message: str) -> None:
    model: Any = model_of("Mixtral")
    model._ep_plan = plan
    with pytest.raises(ShardcError, match=message) as refused:
        Plan.from_hf(model, None, **arguments)
    (diagnostic,) = refused.value.diagnostics
    assert diagnostic.code == "SC208"
    assert diagnostic.hint
