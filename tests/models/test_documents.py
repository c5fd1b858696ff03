"""Attention whose mask is of the batch or is learned, over an axis: packed documents, biases, capped scores, sinks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardc
from shardc import Program
from shardc.ir.graph import type_of
from shardc.ir.ops.attention import SDPA
from shardc.ir.ops.attention_rows import NEXT_KEYS
from shardc.ir.schema import given
from shardc.runtime.oracle.simulate import run_reference, simulate
from tests.decoder import DECODER
from tests.models.test_context import STRATEGIES, Attention, exact

LENGTHS = [(16, "cp=2"), (17, "cp=2"), (50, "cp=4")]


class Packed(nn.Module):
    """Causal attention within documents, which positions that restart tell, or where each ends."""

    def __init__(self, by: str, window: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.by, self.window = by, window
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x: Tensor, where: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        n = torch.arange(x.shape[1])
        if self.by == "position_ids":
            document = (where == 0).cumsum(1)
        else:  # cu_seqlens: the ends of documents
            document = torch.searchsorted(where, n, right=True).expand(x.shape[0], -1)
        seen = (document[:, None, :, None] == document[:, None, None, :]) & (n[None, :] <= n[:, None])
        if self.window:
            seen = seen & (n[:, None] - n[None, :] < self.window)
        return F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True).square().mean()


def packed(by: str, length: int, mesh: str, context: Any, window: int = 0) -> Program:
    generator = torch.Generator().manual_seed(3)
    restarts = torch.tensor([0, 3, 4, length // 2, length - 2])
    positions = torch.stack([torch.arange(length), torch.arange(length)])
    for start in restarts:
        positions[0, start:] = torch.arange(length - int(start))
    by_positions = by == "position_ids"
    batch = {"x": torch.randn(2, length, 16, generator=generator), "where": positions if by_positions else restarts[1:]}
    inputs = {"x": "-, cp, -", "where": "-, cp" if by_positions else "-"}
    return shardc.compile(Packed(by, window), batch, plan={"mesh": mesh, "inputs": inputs, "context": context})


@pytest.mark.sampled(40)
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("balance", ["none", "zigzag"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("length", "mesh"), LENGTHS)
@pytest.mark.parametrize("by", ["position_ids", "cu_seqlens"])
def test_packed_documents(by: str, length: int, mesh: str, strategy: str, balance: str, window: int) -> None:
    program = packed(by, length, mesh, {"attention": strategy, "balance": balance}, window)
    (said,) = [given(node) for node in program.reference.calls() if node.target is SDPA]
    assert said["causal"]
    assert list(said.get("window", [])) == ([1 - window, 0] if window else [])
    assert type_of(said["mask"]).shape[-2:] == (length, length)
    exact(program)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("length", [17, 50])
def test_a_library_packs_by_positions(strategy: str, length: int) -> None:
    """Llama's positions restart with each document; it sees all of the row, as the library has it where it traces."""
    import transformers as hf

    torch.manual_seed(0)
    small: dict[str, Any] = {**DECODER, "hidden_size": 16, "intermediate_size": 24, "vocab_size": 37}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**small))
    tokens = torch.randint(1, 37, (2, length), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(7), torch.arange(length - 7)]).expand(2, -1).contiguous()
    batch = {"input_ids": tokens, "labels": tokens, "position_ids": positions}
    inputs = dict.fromkeys(batch, "-, cp")
    exact(shardc.compile(model, batch, plan={"mesh": "cp=2", "inputs": inputs, "context": strategy}))


# ---------------------------------------------------------------------- masks with a gradient
class Biased(nn.Module):
    """A bias of scores that is learned."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bias = nn.Parameter(torch.randn(shape))
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v, self.bias, enable_gqa=True).square().mean()


@pytest.mark.sampled(24)
@pytest.mark.parametrize("balance", ["none", "zigzag"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("length", "mesh"), LENGTHS)
@pytest.mark.parametrize("shape", ["every pair", "every head", "every key", "every row"])
def test_a_learned_bias(shape: str, length: int, mesh: str, strategy: str, balance: str) -> None:
    n = length
    sizes = {"every pair": (n, n), "every head": (1, 4, n, n), "every key": (1, 1, 1, n), "every row": (4, n, 1)}
    plan = {"mesh": mesh, "inputs": {"x": "-, cp, -"}, "context": {"attention": strategy, "balance": balance}}
    program = shardc.compile(Biased(sizes[shape]), torch.randn(2, n, 16), plan=plan)
    assert any(node.target is NEXT_KEYS for node in program.body.calls()) == (strategy == "ring")
    exact(program)


# ---------------------------------------------------------------------- how gradients of keys are summed
@pytest.mark.parametrize("window", [0, 40])
def test_gradients_of_keys_travel_in_float32(window: int) -> None:
    """Of a ring in bfloat16 they are rounded once, at their owner: no worse than those of one device."""
    model = Attention(2, 2, 8, window=window).bfloat16()
    x = torch.randn(1, 64, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    plan = {"inputs": {"x": "-, cp, -"}, "context": {"attention": "ring", "balance": "none"}}
    ring = shardc.compile(model, x, plan={**plan, "mesh": "cp=4"})
    moved = [type_of(node).dtype for node in ring.body.calls() if node.target is NEXT_KEYS]
    assert {*moved} == {torch.float32, torch.bfloat16}  # sums of gradients; keys and values
    truth = {p.name: v for p, v in run_reference(ring.reference, ring.inputs(), dtype=torch.float64).items()}
    alone = {p.name: v for p, v in run_reference(ring.reference, ring.inputs()).items()}
    found = {p.name: v for p, v in simulate(ring.body, ring.inputs()).items()}
    for name in ("k.weight", "v.weight"):
        error, own = ((values[name].double() - truth[name]).norm() for values in (found, alone))
        assert error <= 1.5 * own + 1e-3 * truth[name].norm(), name


# ---------------------------------------------------------------------- attention that is written out
@pytest.mark.sampled(8)
@pytest.mark.parametrize("strategy", ["auto", "ring"])
@pytest.mark.parametrize(("length", "mesh"), LENGTHS)
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_capped_scores_and_sinks(name: str, length: int, mesh: str, strategy: str) -> None:
    """Libraries write these out, so keys are gathered; each layer's window is a part of its scores."""
    import transformers as hf

    torch.manual_seed(0)
    small: dict[str, Any] = {**DECODER, "hidden_size": 16, "intermediate_size": 24, "vocab_size": 37}
    small |= {"head_dim": 4, "sliding_window": 5, "attn_implementation": "eager"}
    kinds = ["sliding_attention", "full_attention"]
    if name == "gemma2":
        config: Any = hf.Gemma2Config(**small, layer_types=kinds, attn_logit_softcapping=2.0)
        model: nn.Module = hf.Gemma2ForCausalLM(config)
    else:
        config = hf.GptOssConfig(**small, layer_types=kinds, num_local_experts=2, num_experts_per_tok=1)
        model = hf.GptOssForCausalLM(config)
    tokens = torch.randint(1, 37, (2, length), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens}
    plan = {"mesh": mesh, "inputs": dict.fromkeys(batch, "-, cp"), "context": strategy}
    program = shardc.compile(model, batch, plan=plan)
    assert not [node for node in program.body.calls() if node.target is SDPA]
    exact(program)
