"""Attention whose rows, or keys, lie over axes, drawn: strategy, balance, mesh, length, heads, mask, window, dropout,
dtype together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardc
from tests.models.test_context import Attention
from tests.models.test_context_keys import Cross
from tests.models.test_look_ahead import Seeing

STRATEGIES = ("auto", "all_gather", "ring", "all_to_all", "hierarchical")
MESHES = {"cp=2": "cp", "cp=3": "cp", "cp=4": "cp", "a=2, b=2": "a.b", "cp=2, tp=2": "cp"}
TP = {"q.*": "tp", "k.*": "tp", "v.*": "tp"}


@pytest.mark.slow
@given(st.data())
def test_drawn_attention_equals_one_device(data: st.DataObject) -> None:
    mesh = data.draw(st.sampled_from(sorted(MESHES)), label="mesh")
    heads = data.draw(st.sampled_from(((4, 4), (4, 2), (4, 1), (6, 3), (2, 2))), label="heads")
    causal = data.draw(st.booleans(), label="causal")
    dropout = data.draw(st.sampled_from((0.0, 0.0, 0.25)), label="dropout")
    length = data.draw(st.integers(4, 19), label="length")
    strategy = data.draw(st.sampled_from(STRATEGIES), label="strategy")
    balance = data.draw(st.sampled_from(("auto", "none", "zigzag")), label="balance")
    dtype = data.draw(st.sampled_from((torch.float32, torch.bfloat16)), label="dtype")
    mask = data.draw(st.sampled_from(("", "rows", "one row")), label="mask")
    recompute = data.draw(st.sampled_from(("none", "full")), label="recompute")
    window = data.draw(st.sampled_from((0, 0, 1, 2, 3, 5, 8, 18, 40)), label="window")

    model = Attention(*heads, 4, dropout, causal, window).to(dtype)
    generator = torch.Generator().manual_seed(0)
    batch: dict[str, Any] = {"x": torch.randn(2, length, 16, generator=generator).to(dtype)}
    rows = MESHES[mesh]
    inputs = {"x": f"-, {rows}, -"}
    if mask:
        seen = torch.rand((2, 1, length if mask == "rows" else 1, length), generator=generator) < 0.6
        batch["mask"], inputs["mask"] = seen, f"-, -, {rows if mask == 'rows' else '-'}, -"
    context = {"attention": strategy, "balance": balance, "axis": rows}
    if strategy == "hierarchical" and "." not in rows:
        del context["axis"]
    plan = {"mesh": mesh, "inputs": inputs, "params": TP if "tp" in mesh else {}, "context": context}
    program = shardc.compile(model, batch, plan=plan | {"recompute": recompute})
    report = program.verify()
    assert report.ok, str(report)
    assert program.prove().ok


@pytest.mark.slow
@given(st.data())
def test_drawn_windows_equal_one_device(data: st.DataObject) -> None:
    """Back and ahead, and in chunks; rows may see nothing, of their own chunk or of any."""
    mesh = data.draw(st.sampled_from(sorted(MESHES)), label="mesh")
    heads = data.draw(st.sampled_from(((4, 4), (4, 2), (4, 1), (6, 3))), label="heads")
    length = data.draw(st.integers(2, 37), label="length")
    first = data.draw(st.integers(-40, 6), label="first")
    window = [first, data.draw(st.integers(max(first, -6), 40), label="last")]
    if data.draw(st.booleans(), label="in chunks"):
        size = data.draw(st.integers(1, 24), label="chunk")
        near = st.sampled_from((0, 0, 0, 1, 2))
        window += [size, data.draw(st.integers(0, size - 1), label="shift")]
        window += [data.draw(near, label="earlier"), data.draw(near, label="later")]
    strategy = data.draw(st.sampled_from(STRATEGIES), label="strategy")
    balance = data.draw(st.sampled_from(("auto", "none", "zigzag")), label="balance")
    dropout = data.draw(st.sampled_from((0.0, 0.0, 0.0, 0.25)), label="dropout")
    mask = data.draw(st.sampled_from(("", "rows", "one row")), label="mask")
    recompute = data.draw(st.sampled_from(("none", "full")), label="recompute")

    generator = torch.Generator().manual_seed(0)
    batch: dict[str, Any] = {"x": torch.randn(2, length, 16, generator=generator)}
    rows = MESHES[mesh]
    inputs = {"x": f"-, {rows}, -"}
    if mask:
        seen = torch.rand((2, 1, length if mask == "rows" else 1, length), generator=generator) < 0.6
        batch["mask"], inputs["mask"] = seen, f"-, -, {rows if mask == 'rows' else '-'}, -"
    context = {"attention": strategy, "balance": balance} | ({} if strategy == "hierarchical" else {"axis": rows})
    plan = {"mesh": mesh, "inputs": inputs, "params": TP if "tp" in mesh else {}, "context": context}
    program = shardc.compile(Seeing(window, *heads, 4, dropout), batch, plan=plan | {"recompute": recompute})
    report = program.verify()
    assert report.ok, str(report)
    assert program.prove().ok


@pytest.mark.slow
@given(st.data())
def test_drawn_attention_to_sharded_keys_equals_one_device(data: st.DataObject) -> None:
    mesh = data.draw(st.sampled_from(sorted(MESHES)), label="mesh")
    heads = data.draw(st.sampled_from(((4, 4), (4, 2), (4, 1), (6, 3))), label="heads")
    how = data.draw(st.sampled_from(("", "", "written")), label="how")
    causal = data.draw(st.booleans(), label="causal") and not how
    dropout = data.draw(st.sampled_from((0.0, 0.0, 0.25)), label="dropout")
    rows, keys = data.draw(st.integers(1, 9), label="rows"), data.draw(st.integers(2, 19), label="keys")
    dtype = data.draw(st.sampled_from((torch.float32, torch.bfloat16)), label="dtype")
    mask = "" if causal else data.draw(st.sampled_from(("", "rows", "keys", "bias")), label="mask")
    mask = "rows" if how and mask == "bias" else mask
    mask_lies, rows_lie = data.draw(st.booleans(), label="mask lies"), data.draw(st.booleans(), label="rows lie")
    balance = data.draw(st.sampled_from(("auto", "zigzag")), label="balance")
    chosen = data.draw(st.sampled_from(("auto", "merge", "merge", "all_gather")), label="strategy")
    recompute = data.draw(st.sampled_from(("none", "full")), label="recompute")

    model = Cross(*heads, 4, causal=causal, dropout=dropout, how=how).to(dtype)
    generator = torch.Generator().manual_seed(0)
    axes = MESHES[mesh]
    batch: dict[str, Any] = {
        "x": torch.randn(2, rows, 16, generator=generator).to(dtype),
        "memory": torch.randn(2, keys, 16, generator=generator).to(dtype),
    }
    inputs = {"memory": f"-, {axes}, -"} | ({"x": f"-, {axes}, -"} if rows_lie and rows > 1 else {})
    if mask:
        scores = torch.randn((2, 1, 1 if mask == "keys" else rows, keys), generator=generator)
        batch["mask"] = scores.to(dtype) if mask == "bias" else scores < 0
        inputs |= {"mask": f"-, -, -, {axes}"} if mask_lies else {}
    plan = {"mesh": mesh, "inputs": inputs, "params": TP if "tp" in mesh else {}}
    plan |= {"context": {"keys": chosen, "balance": balance}, "recompute": recompute}
    program = shardc.compile(model, batch, plan=plan)
    report = program.verify()
    assert report.ok, str(report)
    assert program.prove().ok
