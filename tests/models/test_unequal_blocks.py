"""Fused weights of unequal blocks, sharded over tp: no gather and no all-to-all, and the numbers of eager PyTorch.

Libraries' models, and small ones of each form: blocks that padding fills, that every rank has, that are joined again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardc
from shardc.ir.diagnostic import ShardcError
from shardc.ir.graph import type_of
from shardc.ir.types import TensorType

LAYERS, VOCABULARY = 2, 64
IDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8}
COMMON = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": LAYERS, **IDS}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64}


def of_library(name: str, **options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers", minversion="5.24")
    config = getattr(transformers, f"{name}Config")(**COMMON, **options)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def phi3() -> nn.Module:
    return of_library("Phi3", **HEADS, original_max_position_embeddings=64)


def mamba2() -> nn.Module:
    return of_library("Mamba2", state_size=8, num_heads=8, head_dim=8, expand=2, n_groups=1, chunk_size=8)


def bamba() -> nn.Module:
    return of_library("Bamba", **HEADS, **MAMBA, attn_layer_indices=[1])


def falcon_h1() -> nn.Module:
    return of_library("FalconH1", **HEADS, **MAMBA, mamba_d_ssm=64)


def falcon() -> nn.Module:
    return of_library("Falcon", num_attention_heads=4, multi_query=True, new_decoder_architecture=False)


def zamba2() -> nn.Module:
    mamba = {"n_mamba_heads": 8, "mamba_headdim": 8, "mamba_ngroups": 1, "mamba_d_state": 8, "chunk_size": 8}
    layers = {"layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1, "adapter_rank": 4}
    return of_library("Zamba2", **HEADS | {"num_key_value_heads": 4}, **mamba, **layers)


def qwen3_next() -> nn.Module:
    heads = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
    layers = {"layer_types": ["linear_attention", "full_attention"], "num_experts": 0}
    return of_library("Qwen3Next", **HEADS, head_dim=8, **heads, linear_value_head_dim=8, **layers)


COLUMNS = ("qkv_proj", "gate_up_proj", "in_proj", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
COLUMNS += ("query_key_value", "dense_h_to_4h", "in_proj_qkvz", "in_proj_ba")
ROWS = ("o_proj", "down_proj", "out_proj", "dense", "dense_4h_to_h")


def placements(model: nn.Module) -> dict[str, str]:
    of: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        module = name.split(".")[-2]
        if module in COLUMNS:
            of[name] = "tp, -" if parameter.dim() == 2 else "tp"
        elif module in ROWS and parameter.dim() == 2:
            of[name] = "-, tp"
    return of


# model -> the fused weight as it is sharded, and the all-reduces over tp of a step forward: of each row-parallel
# product, and of each mean over what a rank has a share of
LIBRARY: dict[str, tuple[Callable[[], nn.Module], str, int]] = {
    "phi3": (phi3, "[32, 16, 16]*tp", 4),
    "mamba2": (mamba2, "[64, 64, -8, -8, 8]*tp", 4),
    "bamba": (bamba, "[64, 64, -8, -8, 8]*tp", 5),
    "falcon_h1": (falcon_h1, "[64, 64, -8, -8, 8]*tp", 4),
    "falcon": (falcon, "[32, -8, -8]*tp", 2),
    "zamba2": (zamba2, "[64, 64, -8, -8, 8]*tp", 6),
    "qwen3_next": (qwen3_next, "", 4),  # what it fuses lies head by head: equal blocks
}


@pytest.mark.parametrize("name", LIBRARY)
@pytest.mark.sampled(12)
def test_models_of_the_library(name: str) -> None:
    make, blocks, forward = LIBRARY[name]
    torch.manual_seed(0)
    model = make().double()
    ids = torch.randint(VOCABULARY, (4, 16))
    plan = {"params": placements(model), "inputs": {"input_ids": "dp, -", "labels": "dp, -"}}
    program = shardc.compile(model, {"input_ids": ids, "labels": ids}, mesh="dp=2, tp=2", plan=plan)
    over_tp = [c for c in program.collectives() if "tp" in c.axes]
    assert {c.kind for c in over_tp} == {"all_reduce"}
    assert sum(c.phase == "fwd" for c in over_tp) == forward
    assert not blocks or any(f"is sharded as {blocks}" in d.message for d in program.diagnostics)
    assert not [d for d in program.diagnostics if d.severity != "note"]
    assert program.verify().ok


class Attention(nn.Module):
    """Queries, keys, values and an MLP's inner width, in one product; and both results, in another one."""

    def __init__(self, heads: int = 4, kv: int = 2, width: int = 0, dim: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.heads, self.kv, self.width, self.dim = heads, kv, width, dim
        self.qkv = nn.Linear(hidden, (heads + 2 * kv) * dim + width)
        self.o = nn.Linear(heads * dim + width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        sizes = [self.heads * self.dim, self.kv * self.dim, self.kv * self.dim, self.width]
        q, k, v, inner = self.qkv(x).split(sizes, -1)
        q, k, v = (t.unflatten(-1, (-1, self.dim)).transpose(1, 2) for t in (q, k, v))
        if self.kv == 1:
            k, v = k.expand_as(q), v.expand_as(q)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv > 1).transpose(1, 2).flatten(2)
        return self.o(torch.cat([y, F.gelu(inner)], -1) if self.width else y).square().mean()


class StateSpace(nn.Module):
    """A gate, channels, the state's two sides that all heads share, and steps: a convolution is over three of them."""

    def __init__(self, heads: int = 4, dim: int = 4, state: int = 6, hidden: int = 16) -> None:
        super().__init__()
        self.heads, self.dim, self.state = heads, dim, state
        inner = heads * dim
        self.proj = nn.Linear(hidden, 2 * inner + 2 * state + heads)
        self.conv = nn.Conv1d(inner + 2 * state, inner + 2 * state, 3, groups=inner + 2 * state, padding=2)
        self.out = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner, length = self.heads * self.dim, x.shape[1]
        z, u, dt = self.proj(x).split([inner, inner + 2 * self.state, self.heads], -1)
        u = F.silu(self.conv(u.transpose(1, 2))[..., :length].transpose(1, 2))
        u, b, c = u[..., :inner], u[..., inner : inner + self.state], u[..., inner + self.state :]
        held = torch.einsum("bth,bthd,btn->bthdn", F.softplus(dt), u.unflatten(-1, (-1, self.dim)), b).cumsum(1)
        return self.out(torch.einsum("bthdn,btn->bthd", held, c).flatten(2) * F.silu(z)).square().mean()


FUSED = {"qkv.weight": "tp, -", "qkv.bias": "tp", "o.weight": "-, tp"}
SPACE = {"proj.weight": "tp, -", "proj.bias": "tp", "out.weight": "-, tp"}
FORMS: dict[str, tuple[Callable[[], nn.Module], dict[str, str]]] = {
    "grouped": (Attention, FUSED),
    "one head of keys": (lambda: Attention(kv=1), FUSED),
    "with an MLP": (lambda: Attention(width=12), FUSED),
    "padded": (lambda: Attention(heads=5, kv=1, width=9), FUSED),
    "state space": (StateSpace, SPACE),
}
PLANS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"clip_grad_norm": 0.1},  # a norm counts a block that every rank has once
    "zero 1": {"storage": {"zero": 1, "axes": ["dp"]}},
    "zero 3": {"storage": {"zero": 3, "axes": ["dp"]}, "clip_grad_norm": 0.1},
    "all at once": {"accumulate": 2, "recompute": "full", "bucket": True, "fuse": True},
    "mixed": {"precision": "bf16", "storage": {"zero": 1, "axes": ["dp"]}},
}


def compiled(model: nn.Module, plan: dict[str, Any], mesh: str = "dp=2, tp=2", *, train: bool = True) -> shardc.Program:
    batch = {"x": torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(0)).double()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01) if train else None
    inputs = {"inputs": {"x": "dp"}} if "dp" in mesh else {}
    return shardc.compile(model, batch, mesh=mesh, plan=inputs | plan, optimizer=optimizer)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.sampled(20)
def test_every_form_under_every_plan(form: str, plan: str) -> None:
    make, params = FORMS[form]
    torch.manual_seed(0)
    program = compiled(make().double(), {"params": params, **PLANS[plan]})
    assert {c.kind for c in program.collectives() if "tp" in c.axes} == {"all_reduce"}
    assert program.verify().ok


@pytest.mark.parametrize("mesh", ["tp=3", "tp=4"])
@pytest.mark.parametrize("form", ["one head of keys", "with an MLP", "padded", "state space"])
@pytest.mark.sampled(6)
def test_shares_of_other_numbers_of_ranks(form: str, mesh: str) -> None:
    make, params = FORMS[form]
    torch.manual_seed(0)
    assert compiled(make().double(), {"params": params}, mesh, train=False).verify().ok


@pytest.mark.parametrize(
    ("text", "held"),
    [("tp, -", "f64[4*8|2*8|2*8@tp, 16]"), ("[32, 16, 16]*tp, -", "f64[4*8|2*8|2*8@tp, 16]")],
)
def test_what_a_rank_holds(text: str, held: str) -> None:
    program = compiled(Attention().double(), {"params": FUSED | {"qkv.weight": text}}, "tp=2", train=False)
    found = type_of(program.body.input_nodes()["qkv.weight"])
    assert found.local_shape(program.body.mesh) == TensorType.parse(held).local_shape(program.body.mesh) == (32, 16)
    assert "|" in str(found)


@pytest.mark.parametrize(
    "text", ["[32, 32]*tp", "[32, 16, 8, 8]*tp", "[32, 16, 17]*tp", "[32, -16, -16]*tp", "[48, 16]*tp"]
)
def test_blocks_that_the_model_does_not_have(text: str) -> None:
    with pytest.raises(ShardcError, match="does not fall into") as refused:
        compiled(Attention().double(), {"params": FUSED | {"qkv.weight": text}}, "tp=2", train=False)
    (found,) = refused.value.diagnostics
    assert found.code == "SC203"
    assert found.tensor == "qkv.weight"


@pytest.mark.parametrize("text", ["[6, 4, 2]*tp", "[6, -2, 4]*tp", "[5, 7]*tp", "[5, -1, 6]*dp.tp"])
def test_blocks_that_nothing_takes_apart(text: str) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 12, bias=False), nn.Linear(12, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x))).square().mean()

    torch.manual_seed(0)
    assert compiled(Plain().double(), {"params": {"a.weight": text}, "clip_grad_norm": 0.1}).verify().ok


def test_a_program_of_blocks_is_read_back(tmp_path: Path) -> None:
    program = compiled(Attention(kv=1).double(), {"params": FUSED, "clip_grad_norm": 0.1})
    program.save(tmp_path / "program.json")
    again = shardc.Program.load(tmp_path / "program.json")
    assert again.text() == program.text()
    assert shardc.parse(program.text()) is not None


OTHERS = [(FUSED, "tp=3", {}), ({}, "tp=2", {}), (FUSED, "dp=2, tp=2", {"storage": {"zero": 3, "axes": ["dp"]}})]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("params", "mesh", "plan"), OTHERS, ids=["other ranks", "whole", "zero 3"])
def test_a_checkpoint_goes_on_under_another_plan(
    params: dict[str, str], mesh: str, plan: dict[str, Any], tmp_path: Path
) -> None:
    def trainer(params: dict[str, str], mesh: str, plan: dict[str, Any]) -> Any:
        torch.manual_seed(0)
        return compiled(Attention(heads=5, kv=1, width=9).double(), {"params": params, **plan}, mesh).launch()

    batch = {"x": torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(0)).double()}
    first, other = trainer(FUSED, "tp=2", {}), trainer(params, mesh, plan)
    first.step(batch)
    first.save(tmp_path / "saved")
    other.load(str(tmp_path / "saved"))
    losses = [[float(t.step(batch).loss) for _ in range(2)] for t in (first, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
