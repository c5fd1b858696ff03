"""Rows of embeddings that are added in float32 to the sums over microbatches, by our kernel: each row in one order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import shardc
from examples.gpt2 import gpt2
from shardc.ir.ops.accumulate import (
    ACCUMULATE_MORE_ROWS,
    ACCUMULATE_ROWS,
    ADDS,
    add_row_sums,
    write_row_sums,
)
from shardc.passes.sum_products import SumProducts
from shardc.runtime.execute import direct_call as module
from shardc.runtime.execute.direct_call import EMBEDDING_GRADIENT, direct_call
from tests.gpu.test_sum_products import step

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
LAYOUTS = ["rows", "batches", "sliced", "transposed", "expanded", "one token", "empty"]
CLASSES = 50


def operands(layout: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A gradient and positions as backward has them: few of many tokens, and many of one."""
    torch.manual_seed(0)
    match layout:
        case "rows":
            g = torch.randn(700, 96)
        case "batches":
            g = torch.randn(4, 300, 96)
        case "sliced":
            g = torch.randn(4, 300, 200).to(CUDA, dtype)[..., 5:101]
        case "transposed":  # columns that are not next to each other
            g = torch.randn(96, 700).to(CUDA, dtype).t()
        case "expanded":  # the gradient of a sum
            g = torch.ones(1, 1).to(CUDA, dtype).expand(700, 96)
        case "one token":
            g = torch.randn(96)
        case _:
            g = torch.randn(0, 96)
    index = torch.randint(CLASSES // 2, g.shape[:-1])
    if index.numel() > 1:
        index.view(-1)[: index.numel() // 2] = 7
    return g.to(CUDA, dtype), index.to(CUDA)


def exact(g: Tensor, index: Tensor, padding: int) -> Tensor:
    return EMBEDDING_GRADIENT(g.double().contiguous(), index, CLASSES, padding, False)


@pytest.mark.parametrize("ours", [False, True], ids=["torch", "kernel"])
@pytest.mark.parametrize("padding", [-1, 3, 7])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_made_written_and_added(
    layout: str, dtype: torch.dtype, padding: int, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SMALL", 0 if ours else 1 << 62)
    g, index = operands(layout, dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    made, written, added = (direct_call(op, CUDA) for op in (ACCUMULATE_ROWS, write_row_sums, add_row_sums))
    more = direct_call(ACCUMULATE_MORE_ROWS, CUDA)
    assert more is added
    sizes = g.double().abs().reshape(-1, 96).sum(0)
    right, most = exact(g, index, padding), 1e-5 * float(sizes.max()) + 1e-6

    term = made(g, index, CLASSES, padding, wide)
    assert (term.dtype, term.is_contiguous(), term.shape) == (wide, True, (CLASSES, 96))
    assert (term.double() - right).abs().max() <= most
    assert term.equal(made(g, index, CLASSES, padding, wide))

    flat = torch.full((term.numel() + 8,), 7.0, dtype=wide, device=CUDA)  # from an odd element on, as in a bucket
    place = flat[3:-5].view(term.shape)
    assert written(g, index, CLASSES, padding, wide, out=place).data_ptr() == place.data_ptr()
    assert place.equal(term)
    for count in (2, 3):
        assert added(place, g, index, padding).data_ptr() == place.data_ptr()
        assert (place.double() - count * right).abs().max() <= count * most
    assert place[CLASSES // 2 :].eq(0).all()
    assert flat[:3].eq(7).all()
    assert flat[-5:].eq(7).all()


def test_the_gradient_of_an_embedding_that_lies_in_other_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernel moves columns that are next to each other."""
    monkeypatch.setattr(module, "LARGE", 0)
    gradient = direct_call(EMBEDDING_GRADIENT, CUDA)
    for layout in ("transposed", "expanded", "sliced"):
        g, index = operands(layout, torch.float32)
        found = gradient(g, index, CLASSES, -1, False)
        torch.testing.assert_close(found.double(), exact(g, index, -1), rtol=1e-5, atol=1e-4)


def test_only_the_rows_of_tokens_are_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is NaN there and has no tokens stays so, and no memory is taken for the table."""
    monkeypatch.setattr(module, "SMALL", 0)
    total = torch.full((200_000, 256), float("nan"), device=CUDA)
    total[:10] = 0
    g, index = torch.randn(64, 256, device=CUDA, dtype=torch.bfloat16), torch.arange(64, device=CUDA) % 10
    add = direct_call(add_row_sums, CUDA)
    add(total, g, index, -1)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    add(total, g, index, -1)
    assert torch.cuda.max_memory_allocated() - before < total.numel()  # a byte for each number
    assert total[10:].isnan().all()
    assert total[:10].isfinite().all()


def test_captured_rows_are_added_at_each_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALL", 0)
    g, index = operands("batches", torch.bfloat16)
    total, add = torch.zeros(CLASSES, 96, device=CUDA), direct_call(add_row_sums, CUDA)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        add(total, g, index, -1)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add(total, g, index, -1)
    total.zero_()
    graph.replay()
    graph.replay()
    torch.testing.assert_close(total.double(), 2 * exact(g, index, -1), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("precision", "most"), [(None, 1e-4), ("bf16", 3e-2), ("fp16", 1e-2)])
@pytest.mark.parametrize("vocab", [128, 125])
@pytest.mark.parametrize("fuse", [False, True])
def test_a_step_of_several_microbatches_is_the_cpus(
    fuse: bool, vocab: int, precision: str | None, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-2's tied embedding and its positions; each gradient by its relative error, also beside terms that are made
    and then added."""
    monkeypatch.setattr(module, "SMALL", 0)

    def compiled(**more: Any) -> shardc.Program:
        model, batch = gpt2(batch=8, seq=32, layers=2, vocab=vocab, heads=4, width=64)
        plan = {"accumulate": 4, "precision": precision, "fuse": fuse, **more}
        return shardc.compile(model, batch, mesh="dp=1", plan=plan)

    program = compiled()
    assert len(program.body.calls_of(ACCUMULATE_ROWS)) == len(program.body.calls_of(ACCUMULATE_MORE_ROWS)) == 1
    here, there = step(program, torch.device("cpu")), step(program, CUDA)
    monkeypatch.setattr(SumProducts, "run", lambda _, graph: graph)
    plain = compiled()
    assert not [call for op in ADDS for call in plain.body.calls_of(op)]
    added = step(plain, CUDA)
    assert here.keys() == there.keys() == added.keys()
    for name, right in here.items():
        for found in (there[name], added[name]):
            error = float((found.double() - right.double()).norm() / (right.double().norm() + 1e-6))
            assert error < most, f"{name}: {error:.2g}"
