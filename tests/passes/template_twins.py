"""What a template computes, by its reference and in float64, of a kernel that was found to be one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels_triton.ir.kernel import Kernel
from kernels_triton.ir.reference import strided_view
from kernels_triton.library import reference
from kernels_triton.match.match import Match

Operands = dict[str, Tensor]
Results = dict[str, Tensor]


def operands(kernel: Kernel, match: Match, inputs: list[Tensor]) -> tuple[Operands, dict[str, float]]:
    """By name: [rows, cols], [rows] or [cols], and the numbers."""
    tensors: Operands = {}
    numbers: dict[str, float] = {}
    for name, at in match.binding.items():
        kind = match.template.operands[name].removesuffix("?")
        if at is None:
            continue
        if kind == "number":
            numbers[name] = float(at)
            continue
        x = strided_view(inputs[int(at)], kernel.inputs[int(at)].access_map, kernel.space)
        whole = kind == "full"
        tensors[name] = x.expand(kernel.space).reshape(match.rows, match.cols) if whole else x.reshape(-1)
    return tensors, numbers


def results(match: Match, o: Operands, n: dict[str, float]) -> Results:
    return TWINS[match.template.name](o, n)


def _sum(o: Operands, *names: str) -> Tensor:
    return torch.stack([o[name].expand_as(o[names[0]]) for name in names if name in o]).sum(0)


def _layer_norm(o: Operands, n: dict[str, float]) -> Results:
    h = _sum(o, "x", "before", "residual")
    y, mean, rstd = reference.layer_norm(h, o.get("weight"), o.get("bias"), n["eps"])
    return {"y": y, "sum": h, "mean": mean, "rstd": rstd}


def _backward(o: Operands, n: dict[str, float]) -> Results:
    dy = _sum(o, "dy", "more")
    weight = o.get("weight", torch.ones(dy.shape[1], dtype=dy.dtype))
    dx, dw, db = reference.layer_norm_backward(dy, o["x"], weight, o["mean"], o["rstd"], o.get("residual"))
    assert dw is not None
    assert db is not None
    return {"dx": dx, "dweight": dw, "dbias": db, "dbefore": dx.sum(0)}


def _cross_entropy(o: Operands, n: dict[str, float]) -> Results:
    logits, target = _sum(o, "logits", "bias"), o["target"].long()
    scale = o["scale"] if "scale" in o else 1 / o["count"]
    loss, lse, dlogits = reference.cross_entropy(logits, target, scale.reshape(()), int(n["ignore"]))
    top = logits.amax(-1)
    return {"dlogits": dlogits, "total": (lse - top).exp(), "picked": lse - loss - top}


TWINS: dict[str, Callable[[Operands, dict[str, float]], Results]] = {
    "layer_norm": _layer_norm,
    "add_layer_norm": _layer_norm,
    "layer_norm_backward": _backward,
    "cross_entropy": _cross_entropy,
}
