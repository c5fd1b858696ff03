"""Models whose sequence lies over an axis: every strategy of attention, on every mesh, against eager PyTorch.

Labels lie as their tokens do, but where a test says otherwise. Longer than 400 lines: all strategies are compared by
the same few functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardc
from shardc import Program
from shardc.cost.flops import flops
from shardc.ir.graph import type_of
from shardc.ir.ops.attention_rows import NEXT_KEYS, SDPA_ROWS, SDPA_ROWS_BWD, SUM_KEYS
from shardc.ir.schema import given
from shardc.passes.type_check import type_faults
from tests.decoder import DECODER

BATCH = 2


@cache
def model_of(name: str) -> nn.Module:
    """One small model of a family, with two layers or one of each kind."""
    import transformers as hf

    small: dict[str, Any] = {**DECODER, "hidden_size": 16, "intermediate_size": 24, "vocab_size": 37}
    torch.manual_seed(0)
    match name:
        case "llama":
            return hf.LlamaForCausalLM(hf.LlamaConfig(**small))
        case "llama_mqa":
            return hf.LlamaForCausalLM(hf.LlamaConfig(**{**small, "num_key_value_heads": 1}))
        case "llama_mha":
            return hf.LlamaForCausalLM(hf.LlamaConfig(**{**small, "num_key_value_heads": 4, "num_hidden_layers": 1}))
        case "qwen3":
            return hf.Qwen3ForCausalLM(hf.Qwen3Config(**small, head_dim=4))
        case "mistral":
            return hf.MistralForCausalLM(hf.MistralConfig(**small, sliding_window=5))
        case "gemma3":
            kinds = ["sliding_attention", "full_attention"]
            return hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**small, head_dim=4, sliding_window=5, layer_types=kinds))
        case "gpt2":
            return hf.GPT2LMHeadModel(
                hf.GPT2Config(vocab_size=37, n_positions=64, n_embd=16, n_layer=2, n_head=4, use_cache=False,
                              resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
            )  # fmt: skip
        case "bert":
            return hf.BertForMaskedLM(
                hf.BertConfig(vocab_size=37, hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
                              intermediate_size=24, max_position_embeddings=64, hidden_dropout_prob=0.0,
                              attention_probs_dropout_prob=0.0)
            )  # fmt: skip
        case "t5":
            return hf.T5ForConditionalGeneration(
                hf.T5Config(vocab_size=37, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4, dropout_rate=0.0,
                            decoder_start_token_id=0, use_cache=False)
            )  # fmt: skip
    raise AssertionError(name)


CAUSAL = ("llama", "llama_mqa", "llama_mha", "qwen3", "mistral", "gemma3", "gpt2")
STRATEGIES = ("all_gather", "ring", "all_to_all")


def compiled(name: str, mesh: str, length: int, rows: str = "-, cp", **said: Any) -> Program:
    tokens = torch.randint(1, 37, (BATCH * 2, length), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens}
    plan = {"mesh": mesh, "inputs": {"input_ids": rows, "labels": rows}, **said}
    return shardc.compile(model_of(name), batch, plan=plan)


def exact(program: Program) -> None:
    report = program.verify()
    assert report.ok, str(report)
    assert program.prove().ok
    assert not type_faults(program.body)


@pytest.mark.sampled(28)
@pytest.mark.parametrize("mesh", ["cp=2", "cp=4"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", CAUSAL)
def test_causal_models(name: str, strategy: str, mesh: str) -> None:
    exact(compiled(name, mesh, 16, context=strategy))


@pytest.mark.sampled(18)
@pytest.mark.parametrize(("length", "mesh"), [(17, "cp=2"), (50, "cp=4"), (7, "cp=4")])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_lengths_that_do_not_divide(name: str, strategy: str, length: int, mesh: str) -> None:
    exact(compiled(name, mesh, length, context=strategy))


TP = {
    "**.q_proj.weight": "tp, -",
    "**.k_proj.weight": "tp, -",
    "**.v_proj.weight": "tp, -",
    "**.o_proj.weight": "-, tp",
}


@pytest.mark.sampled(16)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("mesh", "rows", "said"),
    [
        ("dp=2, cp=2", "dp, cp", {}),
        ("dp=2, cp=2", "dp, cp", {"storage": {"zero": 3, "axes": ["dp", "cp"]}, "bucket": True}),
        ("cp=2, tp=2", "-, cp", {"params": TP}),
        ("cp=2, tp=2", "-, cp", {"params": TP, "activations": {"**.o_proj": "-, cp.tp, -"}}),
        ("cp=2, pp=2", "-, cp", {"pipeline": {"axis": "pp", "microbatches": 2}}),
        ("cp=2, tp=2, pp=2", "-, cp", {"params": TP, "pipeline": {"axis": "pp", "microbatches": 2}}),
        ("cp=2", "-, cp", {"recompute": "full", "fuse": True}),
        ("cp=2", "-, cp", {"accumulate": 2, "recompute": "selective"}),
    ],
)
def test_with_everything_else(mesh: str, rows: str, said: dict[str, Any], strategy: str) -> None:
    exact(compiled("llama", mesh, 12, rows, context=strategy, **said))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("length", [16, 18])
@pytest.mark.parametrize("name", ["llama", "llama_mha", "llama_mqa"])
def test_hierarchical(name: str, length: int) -> None:
    program = compiled(name, "out=2, in=2", length, "-, out.in", context="hierarchical")
    kinds = {(c.kind, c.axes) for c in program.collectives() if "attn" in c.value and c.kind != "all_reduce"}
    assert {("permute", ("out",)), ("all_to_all", ("in",))} <= kinds
    exact(program)


@pytest.mark.parametrize("balance", ["none", "zigzag"])
@pytest.mark.parametrize("length", [16, 18])
def test_two_axes_divide_two_factors_of_the_heads(length: int, balance: str) -> None:
    """Two heads of keys, of which each goes to two ranks; nothing is gathered."""
    context = {"attention": "all_to_all", "balance": balance}
    plan = {"mesh": "out=2, in=2", "inputs": {"x": "-, out.in, -"}, "context": context}
    program = shardc.compile(Attention(4, 2, 4), torch.randn(2, length, 16), plan=plan)
    exact(program)
    sent = [(c.kind, c.axes) for c in program.collectives() if c.phase == "fwd"][:8]
    assert sent.count(("all_to_all", ("in",))) == 4
    assert sent.count(("all_to_all", ("out",))) == 4


@pytest.mark.sampled(12)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mesh", ["cp=2", "cp=4"])
def test_bert_sees_both_ways(strategy: str, mesh: str) -> None:
    exact(compiled("bert", mesh, 18, context=strategy))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("strategy", ["auto", "all_to_all", "ring"])
def test_t5_with_a_bias_that_is_learned_and_cross_attention(strategy: str) -> None:
    tokens = torch.randint(1, 37, (BATCH, 12), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens[:, :8].contiguous()}
    plan = {"mesh": "cp=2", "inputs": {"input_ids": "-, cp", "labels": "-, -"}, "context": strategy}
    exact(shardc.compile(model_of("t5"), batch, plan=plan))


# ---------------------------------------------------------------------- what is sent, computed and held
def sent(program: Program, phase: str, kinds: tuple[str, ...]) -> int:
    """Bytes of a rank's collectives of a kind, for attention alone."""
    of_attention = (c for c in program.collectives() if "attn" in c.fqn and c.phase == phase and c.kind in kinds)
    return sum(c.bytes_per_step for c in of_attention)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "heads"), [("llama", 2), ("llama_mqa", 1)])
@pytest.mark.parametrize("strategy", ["all_gather", "ring"])
def test_keys_are_sent_at_their_own_width(name: str, heads: int, strategy: str) -> None:
    cp, length, layers, width = 4, 32, 2, 4
    keys = 2 * BATCH * 2 * length * heads * width * 4  # k and v, of four samples in float32
    share = layers * keys * (cp - 1) // cp
    program = compiled(name, f"cp={cp}", length, context=strategy)
    kinds = ("all_gather", "permute", "reduce_scatter")
    assert sent(program, "fwd", kinds) == share
    assert sent(program, "bwd", kinds) == 2 * share


def test_heads_are_sent_once_each_way() -> None:
    cp, length, layers, width = 4, 32, 1, 16
    one = BATCH * 2 * length * width * 4 // cp * (cp - 1) // cp  # of q, k, v or the result, of a rank
    program = compiled("llama_mha", f"cp={cp}", length, context="all_to_all")
    assert sent(program, "fwd", ("all_to_all",)) == 4 * layers * one
    assert sent(program, "bwd", ("all_to_all",)) == 5 * layers * one  # the result again, and four gradients
    assert not sent(program, "bwd", ("all_gather", "permute"))


ATTENTION = ("shardc.sdpa", "shardc.sdpa_bwd", "shardc.sdpa_rows", "shardc.sdpa_rows_bwd")


def attention_flops(program: Program, rank: int | None = None) -> int:
    coordinate = None if rank is None else program.mesh.coordinate(rank)
    done = flops(program.body, coordinate)
    return sum(done.of_op(op) for op in ATTENTION)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_together_compute_what_one_device_does(strategy: str) -> None:
    alone = attention_flops(compiled("llama_mha", "cp=1", 256))
    program = compiled("llama_mha", "cp=4", 256, context={"attention": strategy, "balance": "none"})
    assert sum(attention_flops(program, rank) for rank in range(4)) == alone
    fullest = max(attention_flops(program, rank) for rank in range(4))
    assert attention_flops(program) == fullest
    assert fullest == (alone // 4 if strategy == "all_to_all" else alone * 7 // 16)


# ---------------------------------------------------------------------- how auto chooses, and what it says
class Attention(nn.Module):
    """Attention alone, with more heads than keys have, and a window, if asked."""

    def __init__(
        self, heads: int = 8, keys: int = 8, width: int = 8, dropout: float = 0.0, causal: bool = True, window: int = 0
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.keys, self.width, self.dropout, self.causal = heads, keys, width, dropout, causal
        self.window = window
        self.q = nn.Linear(16, heads * width)
        self.k, self.v = nn.Linear(16, keys * width), nn.Linear(16, keys * width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if self.window:
            i, j = torch.arange(x.shape[1])[:, None], torch.arange(x.shape[1])
            seen = (j <= i) & (i - j < self.window)
            if mask is not None:
                seen = seen & mask if mask.dtype == torch.bool else mask.masked_fill(~seen, float("-inf"))
            mask = seen
        causal = self.causal and mask is None
        p = self.dropout if self.training else 0.0
        o = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=p, is_causal=causal, enable_gqa=True)
        return o.square().mean()


def chosen(plan: Mapping[str, Any], model: nn.Module, length: int, meta: bool = False) -> Any:
    x = torch.empty(1, length, 16, device="meta") if meta else torch.randn(1, length, 16)
    (said,) = shardc.compile(model, x, plan=plan).plan["context"]
    return said


def test_auto_divides_heads_where_that_sends_less() -> None:
    plan = {"mesh": "cp=8", "inputs": {"x": "-, cp, -"}, "context": {"balance": "none"}}
    assert chosen(plan, Attention(8, 8, 128), 2**15, meta=True)[2] == "all_to_all"
    assert chosen(plan, Attention(8, 1, 128, causal=False), 2**15, meta=True)[2] != "all_to_all"


def test_auto_sends_in_a_ring_what_computation_covers() -> None:
    plan = {"mesh": "cp=8", "inputs": {"x": "-, cp, -"}, "context": {"balance": "none"}}
    assert chosen(plan, Attention(4, 1, 128, causal=False), 2**17, meta=True)[2] == "ring"
    assert chosen(plan, Attention(4, 1, 128, causal=False), 2**8, meta=True)[2] == "all_gather"


@pytest.mark.parametrize("machine", ["h100-nvlink+ib", "h200-nvlink"])
def test_auto_takes_what_was_measured_to_be_fastest(machine: str) -> None:
    """Of 32,768 tokens over 4 H100s, with the heads of Llama-3-8B: `benchmarks/README.md`."""
    plan = {"mesh": "cp=4", "inputs": {"x": "-, cp, -"}, "hardware": machine}
    x = torch.empty(1, 2**15, 16, device="meta", dtype=torch.bfloat16)
    model = Attention(32, 8, 128).to("meta", torch.bfloat16)
    (said,) = shardc.compile(model, x, plan=plan).plan["context"]
    waits = {strategy: us for strategy, _, us, why in said[3] if not why}
    assert sorted(waits, key=lambda name: waits[name]) == ["all_to_all", "all_gather", "ring"]
    assert said[2] == "all_to_all"


@pytest.mark.parametrize(
    ("strategy", "heads", "why"),
    [("all_to_all", 1, "the heads of a rank, 1, are too few for 2"), ("hierarchical", 4, "")],
)
def test_what_cannot_be_is_said(strategy: str, heads: int, why: str) -> None:
    plan = {"mesh": "cp=2", "inputs": {"x": "-, cp, -"}, "context": strategy}
    program = shardc.compile(Attention(heads, heads), torch.randn(1, 8, 16), plan=plan)
    (said,) = [d for d in program.diagnostics if d.code == "SC240"]
    assert said.location
    assert said.hint
    assert why in said.message
    exact(program)


def test_a_strategy_of_nothing_is_said() -> None:
    plan = {"mesh": "cp=2", "inputs": {"x": "cp, -, -"}, "context": "ring"}
    program = shardc.compile(Attention(), torch.randn(2, 8, 16), plan=plan)
    (said,) = [d for d in program.diagnostics if d.code == "SC240"]
    assert "no rows of attention lie over its axes" in said.message


@pytest.mark.sampled(4)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("causal", [True, False])
def test_dropout_drops_the_same(strategy: str, causal: bool) -> None:
    """With dropout attention is written out: its masks are those of one device, whatever the strategy."""
    model = Attention(4, 2, 4, dropout=0.3, causal=causal)
    plan = {"mesh": "cp=2", "inputs": {"x": "-, cp, -"}, "context": strategy}
    exact(shardc.compile(model, torch.randn(2, 10, 16), plan=plan))


@pytest.mark.sampled(10)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("shape", [(2, 1, 10, 10), (1, 1, 10, 10), (10, 10), (2, 1, 1, 10)])
@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_masks(strategy: str, shape: tuple[int, ...], kind: torch.dtype) -> None:
    """Of documents, of padding, with rows that see nothing; its rows lie as those of the sequence."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.6
    mask[..., :3] = False
    given = mask if kind == torch.bool else torch.zeros(shape).masked_fill(~mask, float("-inf"))
    lies = ["-"] * len(shape)
    if shape[-2] > 1:
        lies[-2] = "cp"
    plan = {"mesh": "cp=2", "inputs": {"x": "-, cp, -", "mask": ", ".join(lies)}, "context": strategy}
    batch = {"x": torch.randn(2, 10, 16), "mask": given}
    exact(shardc.compile(Attention(4, 2, 4), batch, plan=plan))


# ---------------------------------------------------------------------- mutants
def steps(program: Program, target: Any) -> list[Any]:
    return [node for node in program.body.calls() if node.target is target]


def _skip(program: Program) -> None:
    last = steps(program, SDPA_ROWS)[-1]
    before = last.args[4].args[0]  # the step that it continues
    last.args = (*last.args[:4], *before.args[4:6], *last.args[6:])


def _stay(program: Program) -> None:
    last = steps(program, SDPA_ROWS)[-1]
    last.args = (last.args[0], last.args[1].args[0], *last.args[2:])


def _keep(program: Program) -> None:
    last = steps(program, SDPA_ROWS_BWD)[-1]
    assert last.args[17] == 0
    last.args = (*last.args[:8], last.args[8].args[0], *last.args[9:])


def _rename(program: Program) -> None:
    step = steps(program, SDPA_ROWS)[0]
    step.args = (*step.args[:-2], 1, step.args[-1])


def _turn(program: Program) -> None:
    from shardc.ir.ops.collectives import permute_ranks

    key = steps(program, SDPA_ROWS)[1].args[1]
    key.target, key.args = permute_ranks, (key.args[0], key.args[1], [1, 2, 3, 0])


def _leak(program: Program) -> None:
    moved = steps(program, SDPA_ROWS)[1].args[1]
    own = moved.args[0]
    reader = next(user for user in own.users if user.target is SDPA_ROWS_BWD)
    reader.args = tuple(moved if arg is own else arg for arg in reader.args)


def _forget(program: Program) -> None:
    """What the step before the last has found travels on without what had arrived."""
    moved = steps(program, SDPA_ROWS_BWD)[-1].args[8]
    moved.args = (moved.args[0].args[0], moved.args[1])


def _add_another(program: Program) -> None:
    """A sum has values' gradients for keys'."""
    first, second, *_ = steps(program, SUM_KEYS)
    first.args = (second.args[0], first.args[1])


def _add_twice(program: Program) -> None:
    """A step in the middle begins with what has arrived, which is added to its result as well."""
    early, late = steps(program, SDPA_ROWS_BWD)[1:3]
    assert given(early)["step"] == 2
    arrived = steps(program, SUM_KEYS)[0].args[1]
    early.args = (*early.args[:8], arrived, *early.args[9:])
    assert late.args[8] is None


def _return(program: Program) -> None:
    """A sum that is under way is read by what is no part of the ring."""
    total, other = steps(program, SUM_KEYS)[0], steps(program, SDPA_ROWS_BWD)[-1]
    other.args = (*other.args[:9], total, *other.args[10:])


def _others_rows(program: Program) -> None:
    """All steps read the rows of the rank before."""
    every = steps(program, SDPA_ROWS)
    rows = every[0].args[0]
    with program.body.fx.inserting_before(every[0]):
        moved = program.body.call(NEXT_KEYS, (rows, ["cp"]), like=every[0], type=type_of(rows), name="rows")
    for step in every:
        step.args = (moved, *step.args[1:])


@pytest.mark.parametrize(
    "mutate", [_skip, _stay, _keep, _rename, _turn, _leak, _forget, _add_another, _add_twice, _return, _others_rows]
)
def test_a_broken_ring_is_refused(mutate: Callable[[Program], None]) -> None:
    plan = {"mesh": "cp=4", "inputs": {"x": "-, cp, -"}, "context": "ring"}
    program = shardc.compile(Attention(2, 2, 4), torch.randn(1, 8, 16), plan=plan)
    assert program.prove().ok
    assert not type_faults(program.body)
    mutate(program)
    assert not program.prove().ok
    assert type_faults(program.body)
