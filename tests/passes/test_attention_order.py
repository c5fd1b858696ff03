"""What attention reads is stored as [batch, rows, heads, head]: the same numbers at other places."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import shardc
from benchmarks.measured_models import Decoder, Sizes
from kernels_triton.ir import reference
from kernels_triton.ir.text import parse, text
from kernels_triton.match.op import kernel_of
from shardc.ir.graph import Graph, info, producer
from shardc.ir.ops.attention import SDPA, SDPA_BWD
from shardc.ir.storages import layouts
from shardc.passes.fusion.emit import attention_order
from shardc.passes.fusion.emit.attention_order import reordered

SIZES = Sizes(layers=2, width=64, heads=4, kv_heads=2, hidden=96, sequence=16, vocabulary=64, gated=True)
HALVES = (
    "rope[2,4,16|8](bf16[2,16,64]@0:1024,16,64,1, bf16[2,16,64]@8:1024,16,64,1, bf16[16,8]@0:0,0,8,1)"
    "{%3=mul(%0, %2); %4=neg(%1); %5=add(%3, %4); %6=mul(%1, %2); %7=add(%6, %0)}"
    "->bf16[2,4,16,16]=%5@0:1024,256,16,1+%7@8:1024,256,16,1, bf16[2,4,16,8]=%3"
)


def program(**plan: Any) -> shardc.Program:
    torch.manual_seed(0)
    model = Decoder(SIZES).bfloat16()
    batch = {name: torch.randint(64, (2, 16)) for name in ("tokens", "targets")}
    return shardc.compile(model, batch, mesh="tp=1", plan={"fuse": True, **plan})


def lies_by_rows(graph: Graph, value: fx.Node) -> bool:
    operand = layouts(graph).operands[value]
    return torch.empty_strided(operand.shape, operand.strides, device="meta").transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("plan", [{}, {"recompute": "full"}], ids=str)
def test_queries_and_keys_of_a_rotary_model(plan: dict[str, Any]) -> None:
    body = program(**plan).body
    calls = [*body.calls_of(SDPA), *body.calls_of(SDPA_BWD)]
    assert len(calls) >= 4
    for call in calls:
        for value in call.args[: 3 if call.target is SDPA else 4]:
            assert lies_by_rows(body, value), info(value).name  # type: ignore[arg-type]


def test_the_numbers_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = program()
    monkeypatch.setattr(attention_order, "_reorder", lambda *_: None)
    before = program()
    assert before.text() != compiled.text()
    batch = {name: torch.randint(64, (2, 16)) for name in ("tokens", "targets")}
    found, expected = (each.launch() for each in (compiled, before))
    assert found.step(batch).loss == expected.step(batch).loss
    for name, gradient in expected.gather_grads().items():
        assert gradient.equal(found.gather_grads()[name]), name
    assert compiled.verify().ok
    assert shardc.Program.from_json(compiled.to_json()).text() == compiled.text()


class Seen(nn.Module):
    """Queries that a product reads, too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.weight
        q, k = x.transpose(1, 2) * 2 + 1, x.transpose(1, 2).exp() - 1
        y = F.scaled_dot_product_attention(q, k, x.transpose(1, 2), is_causal=True)
        return y.square().sum() + (q @ self.weight).square().sum()


def test_other_readers_find_values_where_they_were() -> None:
    body = shardc.compile(Seen(), (torch.randn(2, 16, 4, 8),), mesh="dp=1", plan={"fuse": True}).body
    q, k, _ = body.calls_of(SDPA)[0].args[:3]
    assert kernel_of(producer(q)[0].target, producer(q)[0].args) is not None  # type: ignore[arg-type]
    assert not lies_by_rows(body, q)  # type: ignore[arg-type]
    assert lies_by_rows(body, k)  # type: ignore[arg-type]


def test_a_kernel_stores_elsewhere() -> None:
    kernel = parse(HALVES)
    changed = reordered(kernel, 0)
    assert changed is not None
    assert changed.space == (2, 16, 4, 8)
    assert text(parse(text(changed))) == text(changed)
    inputs = [torch.randn(x.shape).to(x.dtype) for x in kernel.inputs]
    before, after = reference.run(kernel, inputs), reference.run(changed, inputs)
    assert after[0].shape == (2, 16, 4, 16)
    assert after[0].transpose(1, 2).equal(before[0])
    assert after[1].equal(before[1])


def test_kernels_that_stay() -> None:
    flat = parse("twice[|1024](bf16[2,4,16,8]){%1=mul(%0, 2.0)}->bf16[2,4,16,8]=%1")
    assert reordered(flat, 0) is None  # one dim of its space goes through all
    one_head = parse("twice[2,1,16|8](bf16[2,1,16,8]){%1=mul(%0, 2.0)}->bf16[2,1,16,8]=%1")
    assert reordered(one_head, 0) is None
    merged = parse("twice[8,16|8](bf16[2,4,16,8]){%1=mul(%0, 2.0)}->bf16[2,4,16,8]=%1")
    assert reordered(merged, 0) is None  # batch and heads are one dim of its space
    sums = parse("sums[2,4,16|8](bf16[2,4,16,8]){%1=rsum(%0); %2=div(%0, %1)}->bf16[2,4,16,8]=%2")
    changed = reordered(sums, 0)
    assert changed is not None
    assert changed.space == sums.space  # only where it stores
    assert replace(changed, outputs=sums.outputs) == sums
