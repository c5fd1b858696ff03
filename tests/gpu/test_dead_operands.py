"""On a GPU: the gradient of logits written over them has the bits that it has elsewhere. Gradients of embeddings."""

from __future__ import annotations

import pytest
import torch

import shardc
from benchmarks.measured_models import Decoder, Sizes
from kernels_triton.ir.row_padding import padded_columns
from kernels_triton.ir.text import parse
from kernels_triton.match.launcher import launcher
from shardc.runtime.execute.direct_call import EMBEDDING_GRADIENT, LARGE, embedding_gradient

pytestmark = pytest.mark.gpu

LOSS = (
    "cross_entropy[{n}|{c}]({t}[{n},{w}]@0:{w},1, i64[{n}]@0:1,0, f32[]@0:0,0){{%3=rmax(%0); %4=sub(%0, %3); "
    "%5=exp(%4); %6=rsum(%5); %7=iota{{1}}(); %8=eq(%7, %1); %9=where(%8, %4, 0.0); %10=rsum(%9); %11=div(1.0, %2); "
    "%12=ne(%1, -100); %13=where(%12, %11, 0.0); %14=div(%13, %6); %15=mul(%5, %14); %16=where(%8, %13, 0.0); "
    "%17=sub(%15, %16); %18=cast.{t}(%17)}}->f32[{n},1]=%6@0:1,0, f32[{n},1]=%10@0:1,0, {t}[{n},{w}]=%18@0:{w},1{z}"
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("columns", [1000, 4096, 50257, 50304, 128256])
def test_over_the_logits(columns: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows, wide = 300, padded_columns(columns)
    name, zeros = {torch.bfloat16: "bf16", torch.float32: "f32"}[dtype], "+0" if wide > columns else ""
    kernel = parse(LOSS.format(n=rows, c=columns, w=wide, t=name, z=zeros))
    logits = torch.randn(rows, wide, device="cuda").to(dtype)
    target = torch.randint(columns, (rows,), device="cuda")
    target[7] = -100
    count = torch.tensor(float(rows - 1), device="cuda")
    expected = launcher(kernel)([logits.clone(), target, count])
    for _ in range(2):
        over = logits.clone()
        found = launcher(kernel)([over, target, count], out=[None, None, over])
        assert found[2] is over
        assert all(a.equal(b) for a, b in zip(found, expected, strict=True))
    assert all(a.equal(b) for a, b in zip(launcher(kernel)([logits, target, count]), expected, strict=True))


def test_a_step_holds_its_logits_once() -> None:
    """And has the gradients that it has where nothing is written over."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Decoder(Sizes(2, 256, 4, 2, 512, 256, 50304, gated=True)).bfloat16()
    batch = {name: torch.randint(50304, (8, 256), device="cuda") for name in ("tokens", "targets")}
    program = shardc.compile(model, batch, mesh="tp=1", plan={"fuse": True})
    trainer = program.launch(device="cuda")
    for _ in range(3):
        trainer.step(batch)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = trainer.step(batch)
    torch.cuda.synchronize()
    logits = 8 * 256 * 50304 * 2
    assert torch.cuda.max_memory_allocated() - before < 2 * logits
    loss = model(**batch)
    loss.backward()
    assert abs(float(result.loss) / float(loss.detach()) - 1) < 1e-3
    found = trainer.gather_grads()
    for name in ("tok.weight", "head.weight", "blocks.0.attn.q.weight", "blocks.1.attn.k.weight"):
        theirs = model.get_parameter(name).grad
        assert theirs is not None
        assert (found[name].to(theirs.device) - theirs).float().norm() < 0.03 * theirs.float().norm(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("most", [3, 700, 50304])
def test_an_embeddings_gradient(most: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    index = torch.randint(most, (4, 2048), device="cuda")
    g = torch.randn(4, 2048, 1032, device="cuda").to(dtype)
    assert g.numel() >= LARGE
    found = embedding_gradient(g, index, 50304, 2, False)
    assert found.equal(embedding_gradient(g, index, 50304, 2, False))
    exact = EMBEDDING_GRADIENT(g.double(), index, 50304, 2, False)
    assert (found - exact).norm() < (4e-3 if dtype == torch.bfloat16 else 1e-6) * exact.norm()
    assert not found[2].any()
