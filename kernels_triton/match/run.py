"""How each template is launched: operands as rows of columns, results into given memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from kernels_triton.ir.kernel import Kernel
from kernels_triton.launch import launch
from kernels_triton.match.match import Match
from kernels_triton.ops import norm
from kernels_triton.ops.cross_entropy import cross_entropy_into


class Operands:
    """Operands by name: tensors, numbers, and None for absent ones. `kernel` has what is not an operand."""

    def __init__(
        self, kernel: Kernel, match: Match, tensors: Mapping[str, Tensor], numbers: Mapping[str, float]
    ) -> None:
        self.kernel, self.match, self.tensors, self.numbers = kernel, match, tensors, numbers

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def get(self, name: str) -> Tensor | None:
        return self.tensors.get(name)


Run = Callable[[str, Operands, Mapping[str, Tensor]], None]


def _norm(name: str, o: Operands, out: Mapping[str, Tensor]) -> None:
    x = o["x"]
    mean, rstd = (
        launch.empty(x.shape[:1], launch.DTYPES[-1], x) if (wanted := out.get(key)) is None else wanted
        for key in ("mean", "rstd")
    )
    columns = (o.get("weight"), o.get("bias"), o.numbers["eps"])
    norm.forward_into(name, x, o.get("residual"), *columns, out["y"], out.get("sum"), mean, rstd, o.get("before"))


def _norm_backward(name: str, o: Operands, out: Mapping[str, Tensor]) -> None:
    norm.backward_into(
        *(name, o["dy"], o["x"], o.get("weight"), o["mean"], o["rstd"], o.get("residual")),
        *(out["dx"], out.get("dweight"), out.get("dbias"), out.get("dbefore"), o.get("more")),
    )


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


PARTS = ("picked", "total")
RUN: dict[str, Run] = {
    "layer_norm": _norm,
    "add_layer_norm": _norm,
    "layer_norm_backward": _norm_backward,
    "cross_entropy": _cross_entropy,
}
