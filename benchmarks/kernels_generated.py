"""Generated kernels against the templates of the same computation, in one run on one GPU.

A line is one op at one shape, in bfloat16: microseconds of the template and of the generated kernel (CUDA-graph replay
in turns, the L2 cache flushed before: benchmarks/replays.py), of a plain elementwise kernel of as many bytes (`copy`),
and `ratio`, generated over template. The last line is the geometric mean of the ratios.

    python -m benchmarks.kernels_generated [--rows 8192] [--cols 1024 4096 8192 12288] [--ops norm ...] [--warm I/N]

`--warm I/N`, run N at once, only compiles the I-th of N parts.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import replays
from benchmarks.kernel_cases import BF16, COLS, DEVICE, EPS, draw
from kernels_triton import ops
from kernels_triton.codegen.schedules import choose_plan
from kernels_triton.gate.corpus import CORPUS, rope
from kernels_triton.generated.launcher import launcher
from kernels_triton.ir.kernel import Kernel
from kernels_triton.launch import launch

SEED = 7
HEAD = 128  # of rotary embeddings: as wide


@dataclass(frozen=True)
class Pair:
    """`inputs` are the kernel's; the template is called with tensors of the same shapes."""

    op: str
    kernel: Kernel
    inputs: list[torch.Tensor]
    template: Callable[[], Any]

    @property
    def generated(self) -> Callable[[], Any]:
        run, inputs = launcher(self.kernel), self.inputs
        return lambda: run(inputs)


def pairs(rows: int, cols: int) -> Iterator[Pair]:
    x, residual, dy, beside = (draw(rows, cols) for _ in range(4))
    w, b = draw(cols), draw(cols)
    seed, offset = torch.tensor(SEED, device=DEVICE), torch.zeros((), dtype=torch.int64, device=DEVICE)
    _, mean, rstd = ops.layer_norm(x, w, b, EPS)
    _, rrms = ops.rms_norm(x, w, EPS)
    y = torch.softmax(x.float(), -1).to(BF16)
    packed = torch.cat((x, residual), -1)

    def pair(op: str, inputs: list[torch.Tensor], template: Callable[[], Any]) -> Pair:
        return Pair(op, CORPUS[op](rows, cols, BF16), inputs, template)

    yield pair("add_layer_norm", [x, residual, w, b], lambda: ops.add_layer_norm(x, residual, w, b, EPS))
    ours = lambda: ops.layer_norm_backward(dy, x, w, mean, rstd, beside)  # noqa: E731
    yield pair("layer_norm_backward", [dy, x, beside, w, mean, rstd], ours)
    yield pair("rms_norm", [x, w], lambda: ops.rms_norm(x, w, EPS))
    yield pair("rms_norm_backward", [dy, x, w, rrms], lambda: ops.rms_norm_backward(dy, x, w, rrms))
    yield pair("softmax_backward", [dy, y], lambda: ops.softmax_backward(dy, y, 0.125))
    yield pair("bias_gelu", [x, b], lambda: ops.bias_gelu(x, b))
    yield pair("bias_gelu_backward", [dy, x, b], lambda: ops.bias_gelu_backward(dy, x, b))
    yield pair("swiglu_backward", [dy, packed, packed], lambda: ops.gated_backward(dy, packed))
    ours = lambda: ops.bias_dropout_residual(x, None, residual, 0.1, seed, 3, None, offset)  # noqa: E731
    yield pair("dropout_add", [x, residual, seed, offset], ours)
    heads = x.view(rows, cols // HEAD, HEAD)
    angles = torch.rand(rows, 1, HEAD // 2, device=DEVICE)
    cos, sin = angles.cos(), angles.sin()
    ours = lambda: ops.rope(heads[None], cos[:, 0], sin[:, 0])  # noqa: E731
    turned = rope(heads.shape[0] * heads.shape[1], HEAD // 2, BF16, heads.shape[1])
    yield Pair("rope", turned, [heads, heads, cos, sin], ours)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=(8192,))
    parser.add_argument("--cols", type=int, nargs="*", default=COLS)
    parser.add_argument("--ops", nargs="*", help="what an op's name has to contain")
    parser.add_argument("--warm", help="I/N: compile the I-th of N parts, and time nothing")
    options = parser.parse_args()
    index, of = map(int, (options.warm or "0/1").split("/"))
    ratios: list[float] = []
    number = 0
    for rows in options.rows:
        for cols in options.cols:
            for one in pairs(rows, cols):
                number += 1
                if options.ops and not any(part in one.op for part in options.ops):
                    continue
                if options.warm:
                    if number % of == index:
                        one.template()
                        one.generated()
                    continue
                size = one.kernel.bytes_moved
                calls = {"template": one.template, "generated": one.generated, "copy": replays.copy(size)}
                spent, failed = replays.times(calls, size)
                for why in failed.values():
                    raise why
                template, generated = spent["template"], spent["generated"]
                plan = choose_plan(one.kernel, launch.device_of(one.inputs[0]))
                ratios.append(generated / template)
                figures = {"template_us": template, "generated_us": generated}
                line: dict[str, Any] = {name: round(us, 2) for name, us in figures.items()}
                line["copy_us"] = round(spent["copy"], 2)
                line["ratio"] = round(generated / template, 3)
                print(json.dumps({"op": one.op, "shape": (rows, cols), **line, "plan": plan.style}), flush=True)
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(json.dumps({"summary": "generated over template", "lines": len(ratios), "mean": round(mean, 3)}))


if __name__ == "__main__":
    main()
