"""Extremes and orders along divided dims, of NaN, infinities and ties: values, indices and gradients are eager's.

Which of several equal elements is eager's, and how they share a gradient (`amax` among all, `max` to one), a reduction
of ranks' own results does not know by itself. Each op is compiled alone, so that no other gathers the dim for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc

Op = Callable[[Tensor, int], Any]
ROWS, WIDTH = 4, 3
NAN, INF = float("nan"), float("inf")
OPS: dict[str, Op] = {
    "max": lambda y, d: y.max(d),
    "min": lambda y, d: y.min(d),
    "amax": lambda y, d: y.amax(d),
    "amin": lambda y, d: y.amin(d, keepdim=True),
    "amax of two dims": lambda y, d: y.amax((d, (d + 1) % 3)),
    "argmax": lambda y, d: y.argmax(d),
    "argmin": lambda y, d: y.argmin(d, keepdim=True),
    "cummax": lambda y, d: y.cummax(d),
    "cummin": lambda y, d: y.cummin(d),
    "topk": lambda y, d: y.topk(2, d),
    "smallest": lambda y, d: y.topk(2, d, largest=False),
    "sort": lambda y, d: y.sort(dim=d, stable=True),
    "sort down": lambda y, d: y.sort(dim=d, descending=True, stable=True),
    "argsort": lambda y, d: y.argsort(dim=d, stable=True),
    "kthvalue": lambda y, d: y.kthvalue(2, d),
    "median": lambda y, d: y.median(d),
    "nanmedian": lambda y, d: y.nanmedian(d),
    "mode": lambda y, d: y.mode(d),
    "aminmax": lambda y, d: torch.aminmax(y, dim=d),
    "max of all": lambda y, d: y.max(),
    "amin of all": lambda y, d: y.amin(),
    "argmax of all": lambda y, d: y.argmax(),
    "maximum": lambda y, d: torch.maximum(y, y.flip(d)),
    "logsumexp": lambda y, d: y.logsumexp(d),
    "logcumsumexp": lambda y, d: y.logcumsumexp(d),
    "norm": lambda y, d: torch.linalg.vector_norm(y, INF, d),
    "smallest norm": lambda y, d: torch.linalg.vector_norm(y, -INF, d),
    "of truth values": lambda y, d: (y > 0).max(d),
    "of whole numbers": lambda y, d: torch.where(y.isfinite(), y, 0).long().max(d),
}
LAYOUTS = {
    "cp2": ("cp=2", "-, cp", "none"),
    "cp2 zigzag": ("cp=2", "-, cp", "zigzag"),
    "cp4": ("cp=4", "-, cp", "none"),
    "cp4 zigzag": ("cp=4", "-, cp", "zigzag"),
    "dp2 cp2 zigzag": ("dp=2, cp=2", "dp, cp", "zigzag"),
    "dp2": ("dp=2", "dp", "none"),
    "tp3": ("tp=3", "-, -, tp", "none"),
}


class Extremes(nn.Module):
    """Outputs of the op; in training a loss in which each element, and each of the results, weighs otherwise."""

    def __init__(self, op: Op, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        self.shift = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))
        self.op, self.dim = op, dim

    def forward(self, x: Tensor, z: Tensor) -> Any:
        """`z * shift` is 0 and changes no tie; by its gradient elements of equal x are told apart."""
        results = self.op(x * self.scale + z * self.shift, self.dim)
        results = [results] if isinstance(results, Tensor) else list(results)
        if not self.training:
            return {str(i): result for i, result in enumerate(results)}
        loss = 0 * self.scale.sum()
        for result in results:
            weights = torch.arange(1.0, result.numel() + 1, dtype=torch.float64).view(result.shape).sin()
            loss = loss + (result * weights).sum()
        return loss


def batches(length: int) -> dict[str, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ties = torch.randint(-2, 3, (ROWS, length, WIDTH), generator=generator).double()
    z = torch.randn(ROWS, length, WIDTH, generator=generator, dtype=torch.float64)
    nan, infinite = ties.clone(), ties.clone()
    nan[0, 5, 0] = nan[1, length - 2, 1] = nan[1, 3, 1] = NAN
    infinite[2, :, 2] = infinite[3, length - 1, 2] = -INF
    infinite[3, 4, 0] = infinite[0, 2, 1] = infinite[0, length - 3, 1] = INF
    kinds = {"ties": ties, "nan": nan, "infinite": infinite, "all the same": torch.ones_like(ties)}
    return {kind: {"x": x, "z": z} for kind, x in kinds.items()}


def same(a: Tensor, b: Tensor) -> bool:
    return (a.shape, a.dtype) == (b.shape, b.dtype) and torch.allclose(a.double(), b.double(), 1e-12, 1e-12, True)


@pytest.mark.sampled(30)
@pytest.mark.parametrize("length", [16, 17])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPS)
def test_as_eager(name: str, layout: str, length: int) -> None:
    if name == "aminmax" and torch.__version__ < "2.13":
        pytest.skip("this torch has no derivative of aminmax")
    mesh, inputs, balance = LAYOUTS[layout]
    plan: dict[str, Any] = {"inputs": {"x": inputs, "z": inputs}}
    if "cp" in mesh:
        plan["context"] = {"balance": balance}
    dim = {"dp2": 0, "tp3": 2}.get(layout, 1)
    own, evaluated, kinds = Extremes(OPS[name], dim), Extremes(OPS[name], dim).eval(), batches(length)
    evaluation = shardc.compile(evaluated, kinds["ties"], mesh=mesh, plan=plan, mode="eval")
    program = shardc.compile(own, kinds["ties"], mesh=mesh, plan=plan)
    assert evaluation.verify().ok
    assert program.verify().ok
    for kind, batch in kinds.items():
        outputs = evaluation.simulate(batch).outputs
        with torch.no_grad():
            exact = evaluated(**batch)
        for key, value in exact.items():
            assert same(outputs[key].full(), value), (kind, key)
        step = program.simulate(batch)
        own.zero_grad()
        loss = own(**batch)
        loss.backward()
        assert same(step.loss, loss.detach()), kind
        for key, parameter in own.named_parameters():
            assert parameter.grad is None or same(step.grads[key], parameter.grad), (kind, key)
