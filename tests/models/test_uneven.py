"""Sizes that no axis divides: stored as ceil-shares, padded on the last ranks, and as exact as the even ones."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

import shardc
from shardc.api import Program
from shardc.ir.graph import op_name, operands, type_of
from tests.models.zoo import PLANS, make

TP, DP = "dp=1, tp=4", "dp=2, tp=1"


def compiled(name: str, plan: str, mesh: str, **arguments: Any) -> Program:
    model, batch, loss = make(name, **arguments)
    program = shardc.compile(model, batch, loss=loss, plan=PLANS / f"{plan}.yaml", mesh=mesh)
    report = program.verify()
    assert report.ok, str(report)
    return program


def stored(program: Program, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A parameter's shape on one rank, and whole."""
    type = type_of(program.body.input_nodes()[name])
    return type.local_shape(program.mesh), type.shape


@pytest.mark.sampled(4)
@pytest.mark.parametrize("tp", [2, 4])
def test_vocabulary(tp: int) -> None:
    program = compiled("gpt2", "gpt2", f"dp=2, tp={tp}", batch=2, seq=6, layers=1, vocab=50257, width=16)
    assert stored(program, "transformer.wte.weight") == ((math.ceil(50257 / tp), 16), (50257, 16))
    assert program.parameter_bytes().per_rank < program.parameter_bytes().whole / tp * 1.2


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "column"), [("gpt2", 1), ("llama", 0)])
def test_heads(name: str, column: int) -> None:
    extra = {"kv_heads": 6} if name == "llama" else {}
    program = compiled(name, name, TP, batch=2, seq=6, heads=6, width=48, **extra)
    # 6 heads of 8 over 4: two each, the last rank's are padding.
    if name == "gpt2":
        assert stored(program, "transformer.h.0.attn.c_attn.weight") == ((48, 3 * 2 * 8), (48, 3 * 48))
        assert stored(program, "transformer.h.0.attn.c_proj.weight") == ((2 * 8, 48), (48, 48))
    else:
        assert stored(program, "model.layers.0.self_attn.q_proj.weight") == ((2 * 8, 48), (48, 48))
        assert stored(program, "model.layers.0.self_attn.o_proj.weight") == ((48, 2 * 8), (48, 48))
    others = [c.value for c in program.collectives() if c.kind != "all_reduce"]
    assert [value.startswith("amax.all_gather") for value in others] == [True]


@pytest.mark.sampled(20)
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "vit", "resnet", "whisper", "encoder", "cnn", "mlp"])
def test_batch(name: str) -> None:
    program = compiled(name, name, "dp=2, tp=2", batch=3)
    sharded = [
        type_of(v) for p, v in zip(program.body.inputs, program.body.placeholders, strict=True) if p.role == "input"
    ]
    assert any(t.dims[0] and t.dims[0][0].axes == ("dp",) and t.local_shape(program.mesh)[0] == 2 for t in sharded)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("mesh", ["dp=1, tp=2", "dp=2, tp=4"])
def test_sequence(name: str, mesh: str) -> None:
    program = compiled(
        name, f"{name}_sp", mesh, batch=3, seq=17, heads=4, **({"kv_heads": 4} if name == "llama" else {})
    )
    block = type_of(program.body.activations["transformer.h.0" if name == "gpt2" else "model.layers.0"])
    tp = program.mesh.size("tp")
    assert block.dims[1][0].axes == ("tp",)
    assert block.local_shape(program.mesh)[1] == math.ceil(17 / tp)
    kinds = {c.kind for c in program.collectives() if c.axes == ("tp",)}
    assert kinds - {"all_reduce"} == {"all_gather", "reduce_scatter"}


def test_everything_at_once() -> None:
    compiled("gpt2", "gpt2_sp", "dp=2, tp=4", batch=3, seq=17, heads=6, width=42, vocab=101)


def test_fewer_heads_of_keys_than_ranks() -> None:
    """Two heads over four ranks: tp becomes tp:0, which shards keys and values, and tp:1, which copies them."""
    program = compiled("llama", "llama", "dp=2, tp=4", heads=4, kv_heads=2, seq=32)
    assert program.mesh.names == ("dp", "tp:0", "tp:1")
    assert stored(program, "model.layers.0.self_attn.q_proj.weight") == ((16, 64), (64, 64))
    assert stored(program, "model.layers.0.self_attn.k_proj.weight") == ((16, 64), (32, 64))
    calls = [n for n in program.body.calls() if op_name(n.target) == "shardc.sdpa"]
    assert len(calls) == 2
    for call in calls:
        q, k, v = (type_of(x) for x in operands(call)[:3])
        assert q.local_shape(program.mesh)[1] == k.local_shape(program.mesh)[1] == v.local_shape(program.mesh)[1] == 1
    # What could not be honoured is said, once a pattern; nothing is gathered for it.
    said = [d for d in program.diagnostics if d.code == "SC209"]
    assert {(d.severity, (d.tensor or "").rpartition(".")[0].rpartition(".")[2]) for d in said} == {
        ("note", "k_proj"),
        ("note", "v_proj"),
    }
    assert [d.also for d in said] == [f"model.layers.1.self_attn.{name}.weight" for name in ("k_proj", "v_proj")]
    assert not [d for d in program.diagnostics if d.severity == "warning"], "so that strict allows it"
    others = [c.value for c in program.collectives() if c.kind != "all_reduce"]
    assert [value.startswith("amax.all_gather") for value in others] == [True]
    # Per layer two all-reduces of activations each way, and the copied weights' gradients once, in a bucket.
    counts = Counter((c.phase, c.axes) for c in program.collectives() if c.axes != ("dp",))
    assert counts == {("fwd", ("tp",)): 2 * 2 + 2, ("bwd", ("tp",)): 2 * 2 + 1, ("bwd", ("dp", "tp:1")): 1}
