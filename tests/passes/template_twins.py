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
        whole = kind in ("full", "mask", "flag")
        tensors[name] = x.expand(kernel.space).reshape(match.rows, match.cols) if whole else x.reshape(-1)
    return tensors, numbers


def results(match: Match, o: Operands, n: dict[str, float]) -> Results:
    return TWINS[match.template.name](o, n, match.template.options.get("act", ""))


def _sum(o: Operands, *names: str) -> Tensor:
    return torch.stack([o[name].expand_as(o[names[0]]) for name in names if name in o]).sum(0)


def _layer_norm(o: Operands, n: dict[str, float], act: str) -> Results:
    h = _sum(o, "x", "before", "residual")
    y, mean, rstd = reference.layer_norm(h, o.get("weight"), o.get("bias"), n["eps"])
    return {"y": y, "sum": h, "mean": mean, "rstd": rstd}


def _rms_norm(o: Operands, n: dict[str, float], act: str) -> Results:
    h = _sum(o, "x", "before", "residual")
    y, rstd = reference.rms_norm(h, o.get("weight"), n["eps"])
    return {"y": y, "sum": h, "squares": h.square().sum(-1), "rstd": rstd}


def _backward(o: Operands, n: dict[str, float], act: str) -> Results:
    dy = _sum(o, "dy", "more")
    weight = o.get("weight", torch.ones(dy.shape[1], dtype=dy.dtype))
    dx, dw, db = reference.layer_norm_backward(dy, o["x"], weight, o["mean"], o["rstd"], o.get("residual"))
    assert dw is not None
    assert db is not None
    return {"dx": dx, "dweight": dw, "dbias": db, "dbefore": dx.sum(0)}


def _gelu(o: Operands, n: dict[str, float], act: str) -> Results:
    return {"y": reference.bias_gelu(o["x"], o.get("bias"), act)}


def _gelu_backward(o: Operands, n: dict[str, float], act: str) -> Results:
    dx, _ = reference.bias_gelu_backward(o["dy"], o["x"], o.get("bias"), act)
    return {"dx": dx, "dbias": dx.sum(0)}


def _gated(o: Operands, n: dict[str, float], act: str) -> Results:
    return {"y": reference.gated(o["gate"], o["up"], act)}


def _gated_backward(o: Operands, n: dict[str, float], act: str) -> Results:
    dgate, dup = reference.gated_backward(o["dy"], o["gate"], o["up"], act)
    assert dup is not None
    return {"dgate": dgate, "dup": dup}


def _cross_entropy(o: Operands, n: dict[str, float], act: str) -> Results:
    logits, target = _sum(o, "logits", "bias"), o["target"].long()
    scale = o["scale"] if "scale" in o else 1 / o["count"]
    loss, lse, dlogits = reference.cross_entropy(logits, target, scale.reshape(()), int(n["ignore"]))
    top = logits.amax(-1)
    return {"dlogits": dlogits, "total": (lse - top).exp(), "picked": lse - loss - top}


def _softmax(o: Operands, n: dict[str, float], act: str) -> Results:
    """Of a mask that is added: those that fill are the business of the templates' own test."""
    assert "fill" not in n
    return {"y": torch.softmax(o["x"] * n["scale"] + o.get("mask", torch.zeros(())), -1)}


def _softmax_backward(o: Operands, n: dict[str, float], act: str) -> Results:
    return {"dx": reference.softmax_backward(o["dy"], o["y"], n["scale"])}


TWINS: dict[str, Callable[[Operands, dict[str, float], str], Results]] = {
    "layer_norm": _layer_norm,
    "add_layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "add_rms_norm": _rms_norm,
    "layer_norm_backward": _backward,
    "bias_gelu": _gelu,
    "bias_gelu_backward": _gelu_backward,
    "squared_relu": _gelu,
    "squared_relu_backward": _gelu_backward,
    "gated": _gated,
    "gated_backward": _gated_backward,
    "cross_entropy": _cross_entropy,
    "softmax": _softmax,
    "softmax_backward": _softmax_backward,
}
