"""Attention between two sequences that lie over the same axes, as a decoder's rows and an encoder's keys: in a ring,
where keys are more than rows or fewer, and by all that a plan may choose instead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc import Program
from shardc.cost.flops import flops
from shardc.ir.ops.attention_rows import NEXT_KEYS, SDPA_ROWS, SDPA_ROWS_BWD
from shardc.ir.schema import given
from shardc.passes.type_check import type_faults
from tests.models.test_context import model_of
from tests.models.test_context_keys import Cross

BOUND = 1e-12
WAYS = ("ring", "all_gather", "all_to_all")
LENGTHS = ((8, 12), (17, 14), (14, 17), (4, 20), (20, 6), (16, 16))
BALANCES = pytest.mark.parametrize("balance", ["none", "zigzag"])


def compiled(
    model: nn.Module, rows: int, keys: int, mesh: str = "cp=2", lies: str = "-, cp, -", **said: Any
) -> Program:
    """`said`: the rest of the plan, and `mask` and how it lies."""
    generator = torch.Generator().manual_seed(3)
    batch: dict[str, Any] = {
        name: torch.randn(4, length, 16, generator=generator, dtype=torch.float64)
        for name, length in (("x", rows), ("memory", keys))
    }
    inputs = dict.fromkeys(batch, lies)
    if (mask := said.pop("mask", None)) is not None:
        batch["mask"], inputs["mask"] = mask
    return shardc.compile(model.double(), batch, plan={"mesh": mesh, "inputs": inputs} | said)


def exact(program: Program) -> None:
    report = program.verify()
    assert report.ok, str(report)
    assert max(max(row.error, row.eager_error or 0.0) for row in report.rows) < BOUND
    assert program.prove().ok
    assert not type_faults(program.body)


def way_of(program: Program) -> list[str]:
    return [strategy for _, _, strategy, _ in program.plan["context"]]


# ---------------------------------------------------------------------- values
@pytest.mark.sampled(48)
@pytest.mark.parametrize("causal", [False, True])
@BALANCES
@pytest.mark.parametrize("mesh", ["cp=2", "cp=4"])
@pytest.mark.parametrize(("rows", "keys"), LENGTHS)
@pytest.mark.parametrize("kv", [4, 1])
def test_a_ring_of_other_keys(rows: int, keys: int, kv: int, mesh: str, balance: str, causal: bool) -> None:
    context = {"attention": "ring", "balance": balance}
    program = compiled(Cross(4, kv, causal=causal), rows, keys, mesh, context=context)
    assert way_of(program) == ["ring"]
    moves = sum(node.target is NEXT_KEYS for node in program.body.calls())
    assert moves == 6 * (int(mesh[-1]) - 1)
    exact(program)


@pytest.mark.sampled(16)
@BALANCES
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("mesh", "lies", "said"),
    [
        ("dp=2, cp=2", "dp, cp, -", {}),
        ("dp=2, cp=2", "dp, cp, -", {"storage": {"zero": 3, "axes": ["dp", "cp"]}, "recompute": "full"}),
        ("cp=2, tp=2", "-, cp, -", {"params": {"q.*": "tp", "k.*": "tp", "v.*": "tp"}}),
        ("cp=2", "-, cp, -", {"accumulate": 2, "fuse": True}),
    ],
)
def test_with_everything_else(mesh: str, lies: str, said: dict[str, Any], way: str, balance: str) -> None:
    program = compiled(Cross(), 9, 14, mesh, lies, context={"attention": way, "balance": balance}, **said)
    assert way_of(program) == [way]
    exact(program)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(4, 1, 9, 14), (9, 14), (4, 1, 1, 14)])
@pytest.mark.parametrize("kind", ["bool", "float", "learned"])
def test_masks(kind: str, shape: tuple[int, ...], way: str) -> None:
    """With rows that see nothing; of a learned mask each element has a gradient, at a rank's rows and all keys."""
    generator = torch.Generator().manual_seed(2)
    mask = torch.rand(shape, generator=generator) < 0.6
    mask[..., :3, :] &= shape[-2] == 1
    lies = ", ".join(["-"] * (len(shape) - 2) + ["cp" if shape[-2] > 1 else "-", "-"])
    model: nn.Module = Cross()
    if kind == "learned":
        model = Biased(torch.randn(shape, generator=generator))
        program = compiled(model, 9, 14, context=way)
    else:
        float_mask = torch.zeros(shape, dtype=torch.float64).masked_fill(~mask, float("-inf"))
        program = compiled(model, 9, 14, context=way, mask=(mask if kind == "bool" else float_mask, lies))
    assert way_of(program) == [way]
    exact(program)


class Biased(Cross):
    """With a mask that is a parameter."""

    def __init__(self, bias: Tensor) -> None:
        super().__init__()
        self.bias = nn.Parameter(bias.double())

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, memory, self.bias.sin())


@pytest.mark.sampled(8)
@BALANCES
@pytest.mark.parametrize("heads", [4, 8])
def test_hierarchical(heads: int, balance: str) -> None:
    context = {"attention": "hierarchical", "balance": balance}
    program = compiled(Cross(heads, heads), 18, 30, "out=2, in=2", "-, out.in, -", context=context)
    kinds = {(c.kind, c.axes) for c in program.collectives() if c.kind != "all_reduce"}
    assert {("permute", ("out",)), ("all_to_all", ("in",))} <= kinds
    exact(program)


# ---------------------------------------------------------------------- models
@cache
def bart() -> nn.Module:
    import transformers as hf

    torch.manual_seed(0)
    layers = {
        f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in (("layers", 1), ("attention_heads", 4))
    }
    drop = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "encoder_layerdrop"), 0.0)
    sizes: Any = {"vocab_size": 37, "d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "use_cache": False}
    config = hf.BartConfig(**sizes, **layers, **drop, max_position_embeddings=64)
    return hf.BartForConditionalGeneration(config).double()


@pytest.mark.sampled(24)
@BALANCES
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("mesh", "lengths"), [("cp=2", (17, 9)), ("cp=4", (50, 22)), ("dp=2, cp=2", (10, 17))])
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_an_encoder_and_a_decoder(name: str, way: str, mesh: str, lengths: tuple[int, int], balance: str) -> None:
    generator = torch.Generator().manual_seed(1)
    source, target = (torch.randint(3, 37, (4, n), generator=generator) for n in lengths)
    batch = {"input_ids": source, "labels": target, "attention_mask": torch.ones_like(source)}
    batch["attention_mask"][0, -4:] = 0
    placed = "dp, cp" if "dp" in mesh else "-, cp"
    model = bart() if name == "bart" else model_of("t5").double()
    context = {"attention": way, "balance": balance}
    program = shardc.compile(
        model, batch, plan={"mesh": mesh, "inputs": dict.fromkeys(batch, placed), "context": context}
    )
    chosen = {fqn: strategy for fqn, _, strategy, _ in program.plan["context"]}
    crossed = [strategy for fqn, strategy in chosen.items() if "EncDec" in fqn or "encoder_attn" in fqn]
    assert crossed
    assert {*crossed} == {way}
    exact(program)


# ---------------------------------------------------------------------- what is sent and computed, and the choice
@pytest.mark.parametrize(("rows", "keys"), [(8, 32), (32, 16)])
def test_keys_are_sent_at_their_own_width_and_length(rows: int, keys: int) -> None:
    cp, kv, width, size = 4, 2, 4, 8
    program = compiled(Cross(4, kv, width), rows, keys, f"cp={cp}", context="ring")
    whole = 2 * 4 * keys * kv * width * size  # k and v, of four samples
    sent = Counter[str]()
    for moved in program.collectives():
        if moved.kind == "permute":
            sent[moved.phase] += moved.bytes_per_step
    assert sent == {"fwd": whole * (cp - 1) // cp, "bwd": 2 * whole * (cp - 1) // cp}
    assert not [c for c in program.collectives() if c.kind in ("all_gather", "reduce_scatter", "all_to_all")]


def test_a_rank_computes_its_share() -> None:
    def of_attention(mesh: str, rank: int) -> int:
        program = compiled(Cross(), 16, 24, mesh, context="ring" if mesh != "cp=1" else "auto")
        done = flops(program.body, program.mesh.coordinate(rank))
        return sum(done.of_op(f"shardc.{op}") for op in ("sdpa", "sdpa_bwd", "sdpa_rows", "sdpa_rows_bwd"))

    assert [4 * of_attention("cp=4", rank) for rank in range(4)] == [of_attention("cp=1", 0)] * 4


def test_auto_takes_the_ring_where_products_cover_what_is_sent() -> None:
    batch = {name: torch.empty(1, n, 16, device="meta") for name, n in (("x", 2**16), ("memory", 2**17))}
    plan = {"mesh": "cp=8", "inputs": dict.fromkeys(batch, "-, cp, -")}
    said = shardc.compile(Cross(4, 1, 128).to("meta"), batch, plan=plan).plan["context"]
    assert way_of_all(said) == ["ring"]
    few = {"x": batch["x"][:, :64], "memory": batch["memory"][:, :256]}
    assert way_of_all(shardc.compile(Cross(4, 1, 128).to("meta"), few, plan=plan).plan["context"]) != ["ring"]


def way_of_all(said: Any) -> list[str]:
    return [strategy for _, _, strategy, _ in said]


def test_a_decoder_is_a_sequence_of_its_own() -> None:
    """Its causal rows are in zigzag although an encoder's are longer, and each rank has as many of them."""
    generator = torch.Generator().manual_seed(1)
    source, target = (torch.randint(3, 37, (2, n), generator=generator) for n in (32, 24))
    batch = {"input_ids": source, "labels": target}
    plan = {"mesh": "cp=4", "inputs": dict.fromkeys(batch, "-, cp"), "context": "ring"}
    program = shardc.compile(bart(), batch, plan=plan)
    rows = {given(node)["rows"] for node in program.body.calls() if node.target in (SDPA_ROWS, SDPA_ROWS_BWD)}
    assert rows == {"12|12~cp", "32"}


# ---------------------------------------------------------------------- mutants
def steps(program: Program, target: Any = SDPA_ROWS) -> list[Any]:
    return [node for node in program.body.calls() if node.target is target]


def _told(program: Program, name: str, value: Any) -> None:
    for node in (*steps(program), *steps(program, SDPA_ROWS_BWD)):
        names = [argument.name for argument in node.target._schema.arguments]
        at = names.index(name)
        node.args = (*node.args[:at], value, *node.args[at + 1 :])


MUTANTS: dict[str, Callable[[Program], None]] = {
    "other lengths": lambda p: _told(p, "keys", "13"),
    "in zigzag": lambda p: _told(p, "keys", "8|6~cp"),
    "as the rows": lambda p: _told(p, "keys", ""),
    "with a window": lambda p: _told(p, "window", [-2, 0]),
    "another row": lambda p: _told(p, "rows", "14"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_ring_is_refused(name: str) -> None:
    program = compiled(Cross(), 9, 14, context="ring")
    assert program.prove().ok
    assert not type_faults(program.body)
    MUTANTS[name](program)
    assert type_faults(program.body)
