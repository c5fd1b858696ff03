"""Mixtures of experts of `transformers`, unmodified: experts over ep, tokens over dp, no expert is gathered.

Those that do not go through the library's interface are in `test_library_experts.py`.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardc
from shardc import Plan
from shardc.api import Program
from shardc.cost.flops import flops
from shardc.ir.collectives import collectives
from shardc.ir.graph import info
from shardc.ir.ops.exchange import EXCHANGE_COUNTS
from shardc.ir.ops.experts import GROUP_ROWS

T = pytest.importorskip("transformers")
# Earlier ones mask the slots of their own expert parallelism between products, which leaves them as they are written.
pytestmark = pytest.mark.skipif(
    "_is_expert_parallel" not in inspect.getsource(T.integrations.moe), reason="transformers before 5.24"
)
SMALL = {
    "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 24, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "max_position_embeddings": 32,
}  # fmt: skip
FOUR = {"num_experts": 4, "num_experts_per_tok": 2}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4,
    "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": LOCAL,
    "Qwen2Moe": FOUR | {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8},
    "Qwen3Moe": FOUR | {"moe_intermediate_size": 8, "head_dim": 4},
    "Olmoe": FOUR,
    "GraniteMoe": LOCAL,
    "DeepseekV3": LATENT | {"moe_intermediate_size": 8},
    "DeepseekV2": LATENT | {"moe_intermediate_size": 8, "topk_method": "group_limited_greedy"},
    "GptOss": LOCAL | {"head_dim": 4},
    "Jamba": FOUR
    | {
        "num_hidden_layers": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "use_mamba_kernels": False,
        "mamba_d_state": 4,
        "mamba_d_conv": 2,
    },
}


def model_of(name: str, form: str = "eager", **options: Any) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(T, f"{name}Config")(**(SMALL | MODELS[name] | options))
    config._experts_implementation = form
    return getattr(T, f"{name}ForCausalLM")(config)


def compiled(model: nn.Module, plan: dict[str, Any], **options: Any) -> Program:
    tokens = torch.randint(3, 64, (4, 8), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens}
    inputs = dict.fromkeys(batch, "dp") if "dp" in plan["mesh"] else {}
    return shardc.compile(model, batch, plan=Plan.model_validate({"inputs": inputs, **plan}), **options)


def over_ep(model: nn.Module) -> dict[str, str]:
    """All weights and biases of experts, by their leading dim."""
    return {name: "ep" for name, _ in model.named_parameters() if ".experts." in name}


def counted(program: Program) -> Counter[str]:
    return Counter(f"{c.kind} {'.'.join(c.axes)} {c.phase}" for c in collectives(program.body))


def groupings(program: Program) -> int:
    return sum(node.target is GROUP_ROWS for node in program.body.calls())


@pytest.mark.sampled(18)
@pytest.mark.parametrize("name", MODELS)
def test_experts_over_ep_and_tokens_over_dp(name: str) -> None:
    model = model_of(name)
    program = compiled(model, {"mesh": "dp=2, ep=2", "params": over_ep(model)})
    assert groupings(program) == 1
    assert {c.kind for c in collectives(program.body)} == {"all_reduce"}
    assert not program.diagnostics
    assert program.verify().ok


MESHES: dict[str, dict[str, str]] = {
    "dp=4": {},
    "ep=4": {"gate_up_proj": "ep", "down_proj": "ep"},
    "ep=2, tp=2": {"gate_up_proj": "ep, 2*tp, -", "down_proj": "ep, -, tp"},
    "dp=2, ep=2, tp=2": {"gate_up_proj": "ep, 2*tp, -", "down_proj": "ep, -, tp"},
}


@pytest.fixture(scope="module")
def mixtral() -> nn.Module:
    return model_of("Mixtral")


def placed(mesh: str) -> dict[str, str]:
    return {f"**.experts.{name}": placement for name, placement in MESHES[mesh].items()}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mesh", MESHES)
def test_mixtral_is_as_on_one_device(mesh: str, mixtral: nn.Module) -> None:
    program = compiled(mixtral, {"mesh": mesh, "params": placed(mesh)})
    assert program.verify().ok
    kinds = counted(program)
    assert not any(kind.startswith(("all_gather", "all_to_all")) for kind in kinds)
    if mesh == "dp=4":
        assert all("dp" in kind for kind in kinds)
        assert kinds["all_reduce dp fwd"] == 2  # of the loss, and of the tokens that it is a mean of
        assert flops(program.body).total * 4 == flops(program.reference).total
    experts = flops(program.body).of_op("shardc.expert_mm"), flops(program.body).of_op("shardc.expert_wgrad")
    whole = flops(program.reference).of_op("shardc.expert_mm"), flops(program.reference).of_op("shardc.expert_wgrad")
    assert tuple(n * program.mesh.world_size for n in experts) == whole


def test_sequence_parallelism_gathers_tokens_and_scatters_results() -> None:
    """Each way, no more than the residual stream, and what the router says of each token."""
    model, both = model_of("Mixtral", num_key_value_heads=4), placed("ep=4")
    attention = {f"**.{name}_proj.weight": "ep, -" for name in "qkv"} | {"**.o_proj.weight": "-, ep"}
    plan = {"mesh": "dp=2, ep=2", "params": both | attention, "activations": {"model.layers.*": "dp, ep, -"}}
    program = compiled(model, plan)
    assert program.verify().ok
    stream, routing = 4 * (4 // 2) * 8 * 16, 4 * (4 // 2) * 8 * 2
    moved = [c for c in collectives(program.body) if "mlp" in c.value and c.axes == ("ep",)]
    assert {(c.kind, c.phase): 0 for c in moved} == {
        ("all_gather", "fwd"): 0, ("reduce_scatter", "fwd"): 0, ("reduce_scatter", "bwd"): 0
    }  # fmt: skip
    assert max(c.payload_bytes for c in moved) == stream
    assert sum(c.payload_bytes for c in moved if c.payload_bytes < stream) <= 4 * routing


def test_gradients_of_experts_are_reduced_over_dp_alone(mixtral: nn.Module) -> None:
    program = compiled(mixtral, {"mesh": "dp=2, ep=2", "params": placed("ep=4"), "bucket": False})
    gradients = [c for c in collectives(program.body) if "wgrad" in c.value and ".experts." in c.value]
    assert [(c.kind, c.axes, c.payload_bytes) for c in gradients] == [
        ("all_reduce", ("dp",), 4 * (4 // 2) * 16 * 24),
        ("all_reduce", ("dp",), 4 * (4 // 2) * 48 * 16),
    ]


def test_the_axis_of_experts_is_a_part_of_the_batchs(mixtral: nn.Module) -> None:
    """As Megatron folds it: tokens over dp.ep, experts over ep, whose gradients are reduced over dp alone."""
    inputs = dict.fromkeys(("input_ids", "labels"), "dp.ep")
    plan = {"mesh": "dp=2, ep=2", "params": placed("ep=4"), "inputs": inputs, "bucket": False}
    program = compiled(mixtral, plan)
    assert program.verify().ok
    moved = [c for c in collectives(program.body) if ".mlp." in c.value and ".gate." not in c.value]
    assert Counter((c.kind, c.axes) for c in moved) == {
        ("reduce_scatter", ("ep",)): 3, ("all_reduce", ("dp",)): 2
    }  # fmt: skip
    assert not program.diagnostics


PLANS: dict[str, dict[str, Any]] = {
    "ZeRO-3": {"mesh": "dp=2, ep=2", "storage": {"zero": 3, "axes": "dp"}},
    "fused": {"mesh": "dp=2, ep=2", "fuse": True},
    "recomputed": {"mesh": "dp=2, ep=2", "recompute": "full"},
    "accumulated": {"mesh": "dp=2, ep=2", "accumulate": 2},
    "pipeline": {"mesh": "pp=2, ep=2", "pipeline": {"axis": "pp", "microbatches": 2, "schedule": "zb-h1"}},
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", PLANS)
def test_steps_of_adamw(name: str, mixtral: nn.Module) -> None:
    model = model_of("Mixtral", num_hidden_layers=2) if name == "pipeline" else mixtral
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    program = compiled(model, PLANS[name] | {"params": placed("ep=4")}, optimizer=adamw)
    assert program.verify().ok


SENT: dict[str, tuple[str, dict[str, str]]] = {  # mesh -> the axes of tokens, and parameters
    "ep=2": ("ep", MESHES["ep=4"]),
    "ep=4": ("ep", MESHES["ep=4"]),
    "dp=2, ep=2": ("dp.ep", MESHES["ep=4"]),
    "ep=2, tp=2": ("ep", MESHES["ep=2, tp=2"]),
    "dp=2, ep=2, tp=2": ("dp.ep", MESHES["ep=2, tp=2"]),
}


def sent(model: nn.Module, mesh: str, plan: dict[str, Any] | None = None, **options: Any) -> Program:
    """Compiled with tokens over the axis of experts too, and rows sent there."""
    tokens = torch.randint(3, 64, (8, 8), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens}
    axes, params = SENT.get(mesh, ("ep", MESHES["ep=4"]))
    params = {f"**.experts.{name}": placement for name, placement in params.items()}
    said = {"mesh": mesh, "params": params, "inputs": dict.fromkeys(batch, axes), "experts": "all_to_all"}
    return shardc.compile(model, batch, plan=Plan.model_validate(said | (plan or {})), **options)


def exchanged(program: Program) -> Counter[str]:
    return Counter(c.phase for c in collectives(program.body) if c.kind == "all_to_all")


@pytest.mark.sampled(6)
@pytest.mark.parametrize("mesh", SENT)
def test_rows_are_sent_to_their_experts(mesh: str, mixtral: nn.Module) -> None:
    """T k h (ep - 1) / ep elements each of dispatch and combine, forward and backward; no expert is gathered."""
    program = sent(mixtral, mesh)
    assert not program.diagnostics
    report = program.verify()  # in float64, within 1e-12; its own router computes in float32
    assert report.ok, str(report)
    assert {c.kind for c in collectives(program.body)} == {"all_to_all", "all_reduce"}
    ep = program.mesh.size("ep")
    tokens = 8 * 8 // (program.mesh.size("dp") if "dp" in mesh else 1) // ep
    rows = 4 * tokens * 2 * 16 * (ep - 1) // ep
    counts = 4 * 4 * (ep - 1) // ep
    moved = [(c.phase, c.bytes_per_rank) for c in collectives(program.body) if c.kind == "all_to_all"]
    assert moved == [("fwd", counts), ("fwd", rows), ("fwd", rows), ("bwd", rows), ("bwd", rows)]
    experts = [c for c in collectives(program.body) if "wgrad" in c.value and ".experts." in c.value]
    assert {c.axes for c in experts} == ({("dp",)} if "dp" in mesh else set())


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", [name for name in MODELS if name != "Mixtral"])
def test_rows_of_every_model_are_sent(name: str) -> None:
    model = model_of(name)
    program = sent(model, "ep=2", {"params": over_ep(model)})
    assert exchanged(program) == {"fwd": 3, "bwd": 2}
    assert not program.diagnostics
    assert program.verify().ok


PLANS_OF_SENT: dict[str, tuple[str, dict[str, Any]]] = {
    "ZeRO-3": ("dp=2, ep=2", {"storage": {"zero": 3, "axes": "dp"}}),
    "ZeRO-1 over both": ("dp=2, ep=2", {"storage": {"zero": 1, "axes": ["dp", "ep"]}}),
    "fused": ("dp=2, ep=2", {"fuse": True, "bucket": True}),
    "recomputed": ("dp=2, ep=2", {"recompute": "full"}),
    "recomputed with collectives": ("dp=2, ep=2", {"recompute": {"mode": "full", "collectives": True}}),
    "accumulated": ("dp=2, ep=2", {"accumulate": 2}),
    "bf16": ("dp=2, ep=2", {"precision": "bf16"}),
    "pipeline": ("pp=2, ep=2", {"pipeline": {"axis": "pp", "microbatches": 2, "schedule": "zb-h1"}}),
    "1f1b": ("pp=2, ep=2", {"pipeline": {"axis": "pp", "microbatches": 4}}),
}


@pytest.mark.sampled(18)
@pytest.mark.parametrize("name", PLANS_OF_SENT)
def test_steps_of_adamw_with_rows_sent(name: str, mixtral: nn.Module) -> None:
    mesh, plan = PLANS_OF_SENT[name]
    model = model_of("Mixtral", num_hidden_layers=2) if "pipeline" in plan else mixtral
    program = sent(model, mesh, plan, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))
    layers = 2 if "pipeline" in plan else 1
    again = 3 if name == "recomputed with collectives" else 0
    assert exchanged(program) == {"fwd": 3 * layers, "bwd": 2 * layers + again}
    assert program.verify().ok


@pytest.mark.sampled(12)
@pytest.mark.parametrize("factor", [1.0, 4.0])  # with 4, an expert may take all
@pytest.mark.parametrize("name", PLANS_OF_SENT)
def test_steps_of_adamw_with_a_capacity(name: str, factor: float, mixtral: nn.Module) -> None:
    """Under every plan as with exact counts: what is dropped, the single device drops too."""
    mesh, plan = PLANS_OF_SENT[name]
    model = model_of("Mixtral", num_hidden_layers=2) if "pipeline" in plan else mixtral
    plan = plan | {"experts": {"dispatch": "all_to_all", "capacity": factor}}
    program = sent(model, mesh, plan, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))
    assert {node.args[3] for node in program.body.calls() if node.target is EXCHANGE_COUNTS} == {False}
    report = program.verify()
    assert report.ok, str(report)
    assert [d.code for d in report.diagnostics] == ["SC513"] * (factor == 1.0)
    assert program.simulate().load is not None


@pytest.mark.sampled(4)
@pytest.mark.parametrize("form", ["eager", "batched_mm", "grouped_mm"])
def test_every_form_is_the_grouped_one_and_put_back(form: str) -> None:
    model = model_of("Mixtral", form)
    program = compiled(model, {"mesh": "ep=2", "params": placed("ep=4")})
    assert model.config._experts_implementation == form  # type: ignore[union-attr]
    assert groupings(program) == 1
    assert not any(info(node).name.endswith("nonzero") for node in program.body.calls())


def test_a_form_of_the_users_own_is_traced_as_it_is() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    calls: list[Callable[..., Any]] = []

    def own(self: nn.Module, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        calls.append(own)
        return x * weights.sum(-1, keepdim=True)

    ALL_EXPERTS_FUNCTIONS.register("own", own)
    model = model_of("Mixtral", "own")
    program = compiled(model, {"mesh": "dp=2"})
    assert calls
    assert groupings(program) == 0
