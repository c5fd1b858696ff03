"""Experts that do not go through the library's interface: DBRX, JetMoE, LongCat-Flash, Llama 4, Switch; and one's own.

They are traced in the grouped form, so tokens go over dp and experts over ep as in any other mixture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.api import Program
from shardc.ir.collectives import collectives
from shardc.ir.ops.experts import GROUP_ROWS

T = pytest.importorskip("transformers")
SMALL = {
    "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 24, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "max_position_embeddings": 32,
}  # fmt: skip
FOUR = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4,
    "num_key_value_heads": 4, "ffn_hidden_size": 24, "expert_ffn_hidden_size": 8, "n_routed_experts": 4,
    "moe_topk": 2, "num_layers": 1, "head_dim": 4, "num_hidden_layers": 2,
}  # fmt: skip


def dbrx() -> nn.Module:
    attention = {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}
    ffn = {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 16}
    sizes = {"d_model": 16, "n_heads": 4, "n_layers": 1, "max_seq_len": 32, "vocab_size": 64, "pad_token_id": 2}
    return T.DbrxForCausalLM(T.DbrxConfig(**sizes, attn_config=attention, ffn_config=ffn))


def llama4(k: int) -> nn.Module:
    sizes = SMALL | {"intermediate_size_mlp": 24, "num_local_experts": 4, "num_experts_per_tok": k, "head_dim": 4}
    return T.Llama4ForCausalLM(T.Llama4TextConfig(**sizes))


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # and how many groupings it has
    "dbrx": (dbrx, 1),
    "jetmoe": (lambda: T.JetMoeForCausalLM(T.JetMoeConfig(**SMALL, **FOUR, kv_channels=4)), 2),
    "llama4": (lambda: llama4(1), 1),
    "llama4, two a token": (lambda: llama4(2), 1),
    "longcat": (lambda: T.LongcatFlashForCausalLM(T.LongcatFlashConfig(**SMALL | LATENT, zero_expert_num=0)), 1),
}


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    try:
        model = MODELS[name][0]()
    except AttributeError:
        pytest.skip("this transformers has no such model")
    for _, p in experts(model):
        nn.init.normal_(p, std=0.1)  # some are made of zeros, or of memory that nobody wrote
    return model


def experts(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Weights that are stacked by expert; DBRX's have the experts' rows one behind the other."""
    stacked = [(n, p) for n, p in model.named_parameters() if p.ndim == 3]
    return stacked or [(n, p) for n, p in model.named_parameters() if ".experts." in n]


def batch() -> dict[str, Tensor]:
    tokens = torch.randint(3, 64, (4, 8), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


def groupings(program: Program) -> int:
    return sum(call.target is GROUP_ROWS for call in program.body.calls())


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dispatch", ["all_gather", "all_to_all"])
def test_tokens_over_dp_and_experts_over_ep(name: str, dispatch: str) -> None:
    model = model_of(name)
    params = {n: "ep" for n, _ in experts(model)}
    rows = "dp" if dispatch == "all_gather" else "dp.ep"
    plan: Any = {"mesh": "dp=2, ep=2", "inputs": {"*": rows}, "params": params, "experts": dispatch}
    program = shardc.compile(model, batch(), plan=plan)
    assert groupings(program) == MODELS[name][1]
    kinds = {f"{c.kind} {'.'.join(c.axes)}" for c in collectives(program.body)}
    assert not {kind for kind in kinds if kind.startswith("all_gather")}
    assert ("all_to_all_uneven ep" in kinds or "all_to_all ep" in kinds) == (dispatch == "all_to_all")
    assert not {d.code for d in program.diagnostics} & {"SC203", "SC209"}
    report = program.verify()
    assert report.ok
    assert report.eager_error is not None
    assert report.eager_error < 1e-5


def test_experts_that_hand_a_token_on() -> None:
    torch.manual_seed(0)
    model = T.LongcatFlashForCausalLM(T.LongcatFlashConfig(**SMALL | LATENT, zero_expert_num=2))
    for _, p in experts(model):
        nn.init.normal_(p, std=0.1)
    program = shardc.compile(model, batch(), mesh="dp=2", plan={"inputs": {"*": "dp"}})
    assert groupings(program) == 1
    assert {c.kind for c in collectives(program.body)} == {"all_reduce"}
    assert program.verify().ok


class Switch(nn.Module):
    """The library's experts behind a router that sends some tokens to none of them."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersExperts

        torch.manual_seed(0)
        config = T.SwitchTransformersConfig(d_model=16, d_ff=24, num_experts=4, dropout_rate=0.0)
        self.router, self.experts = nn.Linear(16, 4), SwitchTransformersExperts(config)

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).max(-1, keepdim=True)
        selected = nn.functional.one_hot(chosen[:, 0], 4) * x[:, :1].gt(-1).long()
        return self.experts(x, selected[:, None], weight).square().sum()


def test_experts_of_a_module_each() -> None:
    rows = torch.randn(12, 16, generator=torch.Generator().manual_seed(2))
    assert rows[:, 0].lt(-1).any()
    program = shardc.compile(Switch(), {"x": rows}, mesh="dp=2", plan={"inputs": {"x": "dp"}})
    assert groupings(program) == 1
    assert {c.kind for c in collectives(program.body)} == {"all_reduce"}
    assert program.verify().ok


def test_the_librarys_forward_is_put_back_and_a_changed_one_stays() -> None:
    from transformers.models.dbrx.modeling_dbrx import DbrxExpertGLU, DbrxExperts

    forward = DbrxExperts.forward
    model = model_of("dbrx")
    shardc.compile(model, batch(), mesh="dp=2", plan={"inputs": {"*": "dp"}})
    assert DbrxExperts.forward is forward
    hooked = next(m for m in model.modules() if isinstance(m, DbrxExpertGLU))
    hooked.register_forward_hook(lambda module, given, out: out * 2)
    program = shardc.compile(model, batch(), mesh="dp=2", plan={"inputs": {"*": "dp"}})
    assert DbrxExperts.forward is forward
    assert groupings(program) == 1  # its mask has room for an expert whom no token can choose
    assert program.verify().ok


class Added(nn.Module):
    """A mixture of one's own, whose rows are added where they came from."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(16, 4)
        self.w1, self.w2 = (nn.Parameter(torch.randn(4, *shape) / 4) for shape in ((16, 24), (24, 16)))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2)
        ordered, perm = ids.flatten().sort()
        ends = torch.histc(ordered.float(), bins=4, min=0, max=3).cumsum(0, dtype=torch.int32)
        inner = nn.functional.grouped_mm(x.index_select(0, perm // 2), self.w1, offs=ends).relu()
        rows = nn.functional.grouped_mm(inner, self.w2, offs=ends) * weights.flatten()[perm, None]
        return torch.zeros_like(x).index_add(0, perm // 2, rows).square().sum()


@pytest.mark.parametrize("mesh", ["dp=2, ep=2", "ep=4"])
def test_rows_that_are_added_to_their_tokens(mesh: str) -> None:
    rows = torch.randn(8, 16, generator=torch.Generator().manual_seed(2))
    plan = {"inputs": {"x": "dp" if "dp" in mesh else "-"}, "params": {"w1": "ep", "w2": "ep"}}
    program = shardc.compile(Added(), {"x": rows}, mesh=mesh, plan=plan)
    assert groupings(program) == 1
    assert {c.kind for c in collectives(program.body)} == {"all_reduce"}
    assert not {d.code for d in program.diagnostics} & {"SC203", "SC209"}
    assert program.verify().ok


@pytest.mark.parametrize(
    "start",
    [lambda x: torch.ones_like(x), lambda x: torch.zeros(9, 16)[1:], lambda x: x * 0],
    ids=["ones", "part", "x"],
)
def test_rows_that_are_added_to_something_else_stay_as_they_are_written(start: Callable[[Tensor], Tensor]) -> None:
    class Other(Added):
        def forward(self, x: Tensor) -> Tensor:
            weights, ids = self.router(x).softmax(-1).topk(2)
            ordered, perm = ids.flatten().sort()
            ends = torch.histc(ordered.float(), bins=4, min=0, max=3).cumsum(0, dtype=torch.int32)
            inner = nn.functional.grouped_mm(x[perm // 2], self.w1, offs=ends).relu()
            rows = nn.functional.grouped_mm(inner, self.w2, offs=ends) * weights.flatten()[perm, None]
            return start(x).index_add(0, perm // 2, rows).square().sum()

    rows = torch.randn(8, 16, generator=torch.Generator().manual_seed(2))
    program = shardc.compile(Other(), {"x": rows}, mesh="dp=2", plan={"inputs": {"x": "dp"}})
    assert program.verify().ok
