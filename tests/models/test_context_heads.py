"""all_to_all over one axis that divides heads of keys and query heads at once, or none of them evenly."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import shardc
from shardc import Program
from shardc.ir.graph import type_of
from shardc.ir.ops.attention_heads import GROUP_HEADS, REPEAT_HEADS, SUM_HEADS, UNGROUP_HEADS
from shardc.ir.ops.collectives import permute_ranks
from shardc.passes.type_check import type_faults
from tests.decoder import DECODER
from tests.models.test_context import Attention, exact

SMALL: dict[str, Any] = {**DECODER, "intermediate_size": 24, "vocab_size": 37}
BALANCES = ("none", "zigzag")


@cache
def model_of(name: str, heads: int = 8, kv: int = 2) -> nn.Module:
    import transformers as hf

    sizes = {"hidden_size": 4 * heads, "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": 4}
    small: dict[str, Any] = {**SMALL, **sizes}
    kinds = ["sliding_attention", "full_attention"]
    torch.manual_seed(0)
    match name:
        case "llama":
            return hf.LlamaForCausalLM(hf.LlamaConfig(**small))
        case "qwen3":
            return hf.Qwen3ForCausalLM(hf.Qwen3Config(**small))
        case "gemma2":
            return hf.Gemma2ForCausalLM(hf.Gemma2Config(**small, sliding_window=5, layer_types=kinds))
        case "gemma3":
            return hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**small, sliding_window=5, layer_types=kinds))
        case "gpt2":
            return hf.GPT2LMHeadModel(
                hf.GPT2Config(vocab_size=37, n_positions=64, n_embd=24, n_layer=2, n_head=heads, use_cache=False,
                              resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
            )  # fmt: skip
        case _:
            raise AssertionError(name)


def compiled(model: nn.Module, mesh: str, length: int, balance: str, rows: str = "-, cp", **said: Any) -> Program:
    tokens = torch.randint(1, 37, (4, length), generator=torch.Generator().manual_seed(1))
    context = {"attention": "all_to_all", "balance": balance}
    plan = {"mesh": mesh, "inputs": {"input_ids": rows, "labels": rows}, "context": context, **said}
    return shardc.compile(model, {"input_ids": tokens, "labels": tokens}, plan=plan)


def ways(program: Program) -> set[str]:
    return {said[2] for said in program.plan.get("context", [])}


def calls(program: Program, op: Any) -> list[Any]:
    return [node for node in program.body.calls() if node.target is op]


@pytest.mark.sampled(20)
@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize(("mesh", "length"), [("cp=4", 16), ("cp=4", 50), ("cp=2", 17)])
@pytest.mark.parametrize(
    ("name", "heads", "kv"),
    [("llama", 8, 2), ("llama", 8, 1), ("llama", 6, 2), ("qwen3", 8, 2), ("gemma2", 8, 2), ("gemma3", 4, 2),
     ("gpt2", 6, 6)],
)  # fmt: skip
def test_models(name: str, heads: int, kv: int, mesh: str, length: int, balance: str) -> None:
    program = compiled(model_of(name, heads, kv), mesh, length, balance)
    if name != "gemma2":  # whose attention is written out
        assert ways(program) == {"all_to_all"}
        assert not [d for d in program.diagnostics if d.code == "SC240"]
    exact(program)


TP = {
    "**.q_proj.weight": "tp, -",
    "**.k_proj.weight": "tp, -",
    "**.v_proj.weight": "tp, -",
    "**.o_proj.weight": "-, tp",
}


@pytest.mark.sampled(16)
@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize(
    ("heads", "kv", "mesh", "rows", "said"),
    [
        (4, 1, "dp=2, cp=2", "dp, cp", {}),
        (8, 2, "dp=2, cp=4", "dp, cp", {"storage": {"zero": 3, "axes": ["dp", "cp"]}, "bucket": True}),
        (8, 2, "cp=4, tp=2", "-, cp", {"params": TP}),
        (16, 4, "cp=4, tp=2", "-, cp", {"params": TP}),
        (16, 4, "cp=4, tp=2", "-, cp", {"params": TP, "activations": {"**.o_proj": "-, cp.tp, -"}}),
        (8, 1, "cp=4, tp=2", "-, cp", {"params": TP}),
        (12, 4, "cp=4, tp=2", "-, cp", {"params": TP}),
        (8, 2, "cp=4, pp=2", "-, cp", {"pipeline": {"axis": "pp", "microbatches": 2}}),
        (8, 2, "cp=4", "-, cp", {"recompute": "full", "fuse": True}),
        (6, 2, "cp=4", "-, cp", {"accumulate": 2, "recompute": "selective"}),
    ],
)
def test_with_everything_else(heads: int, kv: int, mesh: str, rows: str, said: dict[str, Any], balance: str) -> None:
    program = compiled(model_of("llama", heads, kv), mesh, 18, balance, rows, **said)
    assert ways(program) == {"all_to_all"}
    exact(program)


def attention(heads: int, kv: int, mesh: str, length: int, balance: str = "none", **said: Any) -> Program:
    plan = {"mesh": mesh, "inputs": {"x": "-, cp, -"}, "context": {"attention": "all_to_all", "balance": balance}}
    return shardc.compile(Attention(heads, kv, 4, **said), torch.randn(2, length, 16), plan=plan)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("said", [{}, {"causal": False}, {"window": 5}], ids=str)
@pytest.mark.parametrize(("heads", "kv", "ranks"), [(28, 4, 8), (12, 4, 6), (6, 6, 4), (6, 2, 4), (6, 1, 4), (5, 5, 2)])
def test_heads_that_divide_by_nothing(heads: int, kv: int, ranks: int, said: dict[str, Any], balance: str) -> None:
    exact(attention(heads, kv, f"cp={ranks}", 2 * ranks + 5, balance, **said))


@pytest.mark.parametrize(
    ("heads", "kv", "ranks", "of_queries", "of_keys"),
    [(8, 2, 4, 2, 1), (4, 2, 4, 1, 1), (28, 4, 8, 4, 1), (6, 6, 4, 2, 2), (16, 4, 8, 2, 1), (6, 2, 4, 2, 1)],
)
def test_a_rank_is_sent_the_heads_that_it_reads(heads: int, kv: int, ranks: int, of_queries: int, of_keys: int) -> None:
    """Of rows of the other ranks: its query heads, and each head of keys once."""
    program = attention(heads, kv, f"cp={ranks}", 4 * ranks)
    one = 2 * 4 * (ranks - 1) * 4 * 4  # a head: samples, rows, ranks, width, bytes
    sent = [c.bytes_per_rank for c in program.collectives() if c.kind == "all_to_all" and c.phase == "fwd"]
    assert sorted(sent) == sorted([of_queries * one] * 2 + [of_keys * one] * 2)
    kinds = {c.kind for c in program.collectives() if "weight" not in c.value and c.phase == "fwd"}
    assert "all_gather" not in kinds


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("heads", "kv", "ranks"), [(8, 2, 4), (6, 2, 4), (8, 1, 4), (6, 6, 4)])
def test_the_account_is_what_is_sent(heads: int, kv: int, ranks: int) -> None:
    program = attention(heads, kv, f"cp={ranks}", 4 * ranks)
    (said,) = program.plan.get("context", [])
    (stated,) = [sent for name, sent, *_ in said[3] if name == "all_to_all"]
    of_weights = {"all_reduce"}
    assert stated >= sum(c.bytes_per_rank for c in program.collectives() if c.kind not in of_weights)
    assert stated * 0.7 <= sum(c.bytes_per_rank for c in program.collectives() if c.kind not in of_weights)


@pytest.mark.parametrize("balance", BALANCES)
def test_hierarchical(balance: str) -> None:
    """Heads along the inner axis, in groups, while their keys go round the outer one."""
    context = {"attention": "hierarchical", "balance": balance}
    plan = {"mesh": "out=2, in=4", "inputs": {"x": "-, out.in, -"}, "context": context}
    program = shardc.compile(Attention(8, 2, 4), torch.randn(2, 35, 16), plan=plan)
    kinds = {(c.kind, c.axes) for c in program.collectives()}
    assert {("permute", ("out",)), ("all_to_all", ("in",))} <= kinds
    assert ways(program) == {"hierarchical"}
    exact(program)


def test_auto_takes_groups_of_heads_where_these_cost_least() -> None:
    """The heads of Qwen3-30B-A3B, 32 and 4, over 8 ranks."""
    plan = {"mesh": "cp=8", "inputs": {"x": "-, cp, -"}, "hardware": "h200-nvlink"}
    x = torch.empty(1, 2**14, 16, device="meta", dtype=torch.bfloat16)
    program = shardc.compile(Attention(32, 4, 128).to("meta", torch.bfloat16), x, plan=plan)
    assert ways(program) == {"all_to_all"}
    assert calls(program, REPEAT_HEADS)


# ---------------------------------------------------------------------- masks
@pytest.mark.sampled(48)
@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("shape", [(2, 1, 18, 18), (2, 8, 18, 18), (8, 1, 18), (18, 18), (2, 1, 1, 18)])
@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
@pytest.mark.parametrize(("heads", "kv"), [(8, 2), (8, 1), (8, 8), (8, 4)])
def test_masks(heads: int, kv: int, kind: torch.dtype, shape: tuple[int, ...], balance: str) -> None:
    """Of documents, of padding, of heads, with rows that see nothing; of 5 and 3 ranks some have padding
    in place of a head."""
    seen = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.6
    seen[..., :3] = False
    mask = seen if kind == torch.bool else torch.zeros(shape).masked_fill(~seen, float("-inf"))
    lies = ["-"] * len(shape)
    if shape[-2] > 1:
        lies[-2] = "cp"
    for ranks in (4, 5, 3):
        context = {"attention": "all_to_all", "balance": balance}
        inputs = {"x": "-, cp, -", "mask": ", ".join(lies)}
        plan = {"mesh": f"cp={ranks}", "inputs": inputs, "context": context}
        program = shardc.compile(Attention(heads, kv, 4), {"x": torch.randn(2, 18, 16), "mask": mask}, plan=plan)
        assert ways(program) == {"all_to_all"}
        exact(program)


class Biased(nn.Module):
    """A bias for each head, which is learned: its gradient is a sum over samples, where each head lies."""

    def __init__(self, heads: int, kv: int) -> None:
        super().__init__()
        self.attention, self.bias = Attention(heads, kv, 4), nn.Parameter(torch.randn(heads, 14, 14))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, self.bias)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize(("heads", "kv", "ranks"), [(8, 2, 4), (6, 2, 4), (6, 6, 4), (6, 1, 4)])
def test_a_bias_of_heads(heads: int, kv: int, ranks: int, balance: str) -> None:
    context = {"attention": "all_to_all", "balance": balance}
    plan = {"mesh": f"cp={ranks}", "inputs": {"x": "-, cp, -"}, "context": context}
    exact(shardc.compile(Biased(heads, kv), torch.randn(2, 14, 16), plan=plan))


# ---------------------------------------------------------------------- mutants
def _turn(program: Program) -> None:
    """Each rank gets the head of keys of the next."""
    (key,) = calls(program, REPEAT_HEADS)[0].users
    readers = list(key.users)
    with program.body.fx.inserting_after(key):
        moved = program.body.call(permute_ranks, (key, ["cp"], [1, 2, 3, 0]), like=key, type=type_of(key), name="moved")
    for reader in readers:
        reader.replace_input_with(key, moved)


def _tile(program: Program) -> None:
    """Heads of keys in turns, 0 1 0 1, and not each as often as it has groups."""
    repeated = calls(program, REPEAT_HEADS)[0]
    repeated.target, repeated.args = torch.ops.aten.repeat.default, (repeated.args[0], [1, 2, 1, 1])


def _keep_one(program: Program) -> None:
    """Of the gradients of two copies of a head, the first alone."""
    total = calls(program, SUM_HEADS)[0]
    total.target, total.args = torch.ops.aten.slice.Tensor, (total.args[0], 1, 0, 2**62, 2)


@pytest.mark.parametrize("mutate", [_turn, _tile, _keep_one])
def test_a_head_at_the_wrong_rank_is_seen(mutate: Callable[[Program], None]) -> None:
    program = attention(8, 2, "cp=4", 8)
    assert len(calls(program, GROUP_HEADS)) == len(calls(program, UNGROUP_HEADS)) == 2
    exact(program)
    mutate(program)
    assert type_faults(program.body) or not program.verify().ok


def test_another_number_of_copies_is_no_type_of_it() -> None:
    program = attention(8, 2, "cp=4", 8)
    repeated = calls(program, REPEAT_HEADS)[0]
    repeated.args = (repeated.args[0], 4)
    assert type_faults(program.body)
