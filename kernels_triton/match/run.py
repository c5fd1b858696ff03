"""How each template is launched: operands as rows of columns, results into given memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from torch import Tensor

from kernels_triton.ir.kernel import Kernel
from kernels_triton.launch import launch
from kernels_triton.match.match import Match
from kernels_triton.ops import activation, norm
from kernels_triton.ops.cross_entropy import cross_entropy_into
from kernels_triton.ops.softmax import softmax_backward_into, softmax_into


class Operands:
    """Operands by name: tensors, numbers, and None for absent ones. `kernel` has what is not an operand."""

    def __init__(
        self, kernel: Kernel, match: Match, tensors: Mapping[str, Tensor], numbers: Mapping[str, float]
    ) -> None:
        self.kernel, self.match, self.tensors, self.numbers = kernel, match, tensors, numbers
        self.options = match.template.options

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def get(self, name: str) -> Tensor | None:
        return self.tensors.get(name)


Run = Callable[[str, Operands, Mapping[str, Tensor]], None]


def _norm(name: str, o: Operands, out: Mapping[str, Tensor]) -> None:
    x, squares, mean = o["x"], "squares" in out, out.get("mean")
    float32 = launch.DTYPES[-1]
    if mean is None and "layer_norm" in name:
        mean = launch.empty(x.shape[:1], float32, x)
    rstd = out.get("rstd")
    if rstd is None:
        rstd = out["squares"] if squares else launch.empty(x.shape[:1], float32, x)
    columns = (o.get("weight"), o.get("bias"), o.numbers["eps"])
    norm.forward_into(
        name, x, o.get("residual"), *columns, out["y"], out.get("sum"), mean, rstd, o.get("before"), squares
    )


def _norm_backward(name: str, o: Operands, out: Mapping[str, Tensor]) -> None:
    norm.backward_into(
        *(name, o["dy"], o["x"], o.get("weight"), o["mean"], o["rstd"], o.get("residual")),
        *(out["dx"], out.get("dweight"), out.get("dbias"), out.get("dbefore"), o.get("more")),
    )


def _activation(name: str, o: Operands, out: Mapping[str, Tensor]) -> None:
    activation.forward_into(name, o["x"], o.get("bias"), out["y"], o.options["act"])


def _activation_backward(name: str, o: Operands, out: Mapping[str, Tensor]) -> None:
    act = o.options["act"]
    activation.backward_into(name, o["dy"], o["x"], o.get("bias"), out["dx"], out.get("dbias"), act)


def _gated(name: str, o: Operands, out: Mapping[str, Tensor]) -> None:
    activation.gated_into(o["gate"], o["up"], out["y"], o.options["act"])


def _gated_backward(name: str, o: Operands, out: Mapping[str, Tensor]) -> None:
    activation.gated_backward_into(o["dy"], o["gate"], o["up"], out["dgate"], out["dup"], o.options["act"])


def _cross_entropy(name: str, o: Operands, out: Mapping[str, Tensor]) -> None:
    logits, count = o["logits"], o.get("count")
    per_row = [
        launch.empty(logits.shape[:1], launch.DTYPES[-1], logits) if key not in out else out[key] for key in PARTS
    ]
    scale = o.get("scale") if count is None else count
    picked, total = per_row
    cross_entropy_into(
        *(logits, o["target"], scale, int(o.numbers["ignore"]), picked, total, out["dlogits"]),
        parts=True,
        inverse=count is not None,
        bias=o.get("bias"),
        padded=any(output.padded for output in o.kernel.outputs),
    )


def _softmax(name: str, o: Operands, out: Mapping[str, Tensor]) -> None:
    fill = o.numbers.get("fill", -math.inf)
    hides = o.options.get("filled") == "where"
    softmax_into(o["x"], o.get("mask"), out["y"], o.numbers["scale"], fill, hides)


def _softmax_backward(name: str, o: Operands, out: Mapping[str, Tensor]) -> None:
    softmax_backward_into(o["dy"], o["y"], out["dx"], o.numbers["scale"])


PARTS = ("picked", "total")
RUN: dict[str, Run] = {
    "layer_norm": _norm,
    "add_layer_norm": _norm,
    "rms_norm": _norm,
    "add_rms_norm": _norm,
    "layer_norm_backward": _norm_backward,
    "bias_gelu": _activation,
    "bias_gelu_backward": _activation_backward,
    "squared_relu": _activation,
    "squared_relu_backward": _activation_backward,
    "gated": _gated,
    "gated_backward": _gated_backward,
    "cross_entropy": _cross_entropy,
    "softmax": _softmax,
    "softmax_backward": _softmax_backward,
}
