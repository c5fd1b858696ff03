"""Generated kernels against the templates of the same computation, in one run on one GPU.

A line is one kernel at one shape, in bfloat16: microseconds of the template and of the generated kernel (CUDA-graph
replay in turns, the L2 cache flushed before: benchmarks/replays.py), of a plain elementwise kernel of as many bytes
(`copy`), and `ratio`, generated over template. Kernels that graphs give to templates are taken from the graphs of small
models, forward and backward, so that no template is left out; of ops that only `kernels_triton.ops` has, the kernel is
that of `kernels_triton/gate/corpus.py`. Last comes the geometric mean of the ratios, and of each template's.

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
from torch import Tensor, nn
from torch.nn import functional

import shardc
from benchmarks import replays
from benchmarks.kernel_cases import BF16, COLS, DEVICE, EPS, draw
from kernels_triton import ops
from kernels_triton.codegen.schedules import choose_plan
from kernels_triton.gate.corpus import CORPUS, rope
from kernels_triton.generated.launcher import launcher
from kernels_triton.ir.kernel import Kernel
from kernels_triton.launch import launch
from kernels_triton.match.launcher import launcher as template_launcher
from kernels_triton.match.match import Match, match_template
from kernels_triton.match.op import OPS, kernel_of

SEED = 7
HEAD = 128  # of rotary embeddings: as wide
VOCABULARIES = (32000, 50304, 128256)
WIDTH = 256  # of layers beside those that are measured

Call = Callable[[], Any]


@dataclass(frozen=True)
class Pair:
    """One computation at one shape, by a template and by a generated kernel."""

    op: str
    shape: tuple[int, int]
    kernel: Kernel
    inputs: list[Tensor]
    template: Call
    generated: Call


class Norms(nn.Module):
    """A layer norm, alone and after a residual, between products: with the products' biases, and without."""

    def __init__(self, cols: int, bias: bool) -> None:
        super().__init__()
        self.first, self.last = nn.LayerNorm(cols, bias=bias), nn.LayerNorm(cols, bias=bias)
        self.up, self.down = nn.Linear(cols, WIDTH, bias=bias), nn.Linear(WIDTH, cols, bias=bias)
        self.head = nn.Linear(cols, 16, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(torch.tanh(self.up(self.first(x))))
        return self.head(self.last(x + h)).square().mean()


class Classifier(nn.Module):
    def __init__(self, vocabulary: int, bias: bool) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, vocabulary, bias=bias)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(x).float(), target)


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def models(rows: int, cols: tuple[int, ...]) -> Iterator[tuple[str, Callable[[], nn.Module], dict[str, Tensor]]]:
    """A name that tells of its templates, the model, and its batch."""
    for n in cols:
        for bias in (True, False):
            yield "layer_norm", lambda n=n, bias=bias: Norms(n, bias), {"x": _meta(rows, n)}
    for n in VOCABULARIES:
        for bias in (False, True):
            batch = {"x": _meta(rows, WIDTH), "target": _meta(rows, dtype=torch.int64)}
            yield "cross_entropy", lambda n=n, bias=bias: Classifier(n, bias), batch


def matched(rows: int, cols: tuple[int, ...], wanted: Callable[[str], bool]) -> Iterator[tuple[Kernel, Match]]:
    """Every distinct kernel of the models' graphs that a template computes."""
    seen = set[Kernel]()
    for name, model, batch in models(rows, cols):
        if not wanted(name):
            continue
        with torch.device("meta"):
            module = model()
        program = shardc.compile(module, batch, mesh="dp=1", plan={"precision": "bf16", "fuse": True})
        for node in program.body.calls():
            kernel = kernel_of(node.target, node.args) if node.target in OPS.values() else None
            if kernel is not None and kernel not in seen:
                seen.add(kernel)
                match = match_template(kernel)
                assert match is not None, f"{name}: {kernel.name} has a template's op and no match"
                yield kernel, match


def drawn(kernel: Kernel, match: Match) -> list[Tensor]:
    """Inputs for a kernel; what is divided by is positive."""
    inputs = [draw(*given.shape).to(given.dtype) for given in kernel.inputs]
    if isinstance(at := match.binding.get("target"), int):
        inputs[at] = torch.randint(0, match.cols, inputs[at].shape, device=DEVICE)
    if isinstance(at := match.binding.get("rstd"), int):
        inputs[at] = inputs[at].abs() + 0.5
    return inputs


def pairs(rows: int, cols: tuple[int, ...], wanted: Callable[[str], bool]) -> Iterator[Pair]:
    for kernel, match in matched(rows, cols, wanted):
        inputs, ours, other = drawn(kernel, match), template_launcher(kernel), launcher(kernel)
        shape, op = (match.rows, match.cols), match.template.name
        yield Pair(op, shape, kernel, inputs, lambda i=inputs, f=ours: f(i), lambda i=inputs, f=other: f(i))
    for n in cols:
        for op, kernel, inputs, template in plain_ops(rows, n):
            if wanted(op):
                run = launcher(kernel)
                yield Pair(op, (rows, n), kernel, inputs, template, lambda i=inputs, f=run: f(i))


def plain_ops(rows: int, cols: int) -> Iterator[tuple[str, Kernel, list[Tensor], Call]]:
    """Those that no graph gives to a template: the generated kernels are as fast, or fuse more."""
    x, residual, dy = (draw(rows, cols) for _ in range(3))
    w, b = draw(cols), draw(cols)
    seed, offset = torch.tensor(SEED, device=DEVICE), torch.zeros((), dtype=torch.int64, device=DEVICE)
    _, rrms = ops.rms_norm(x, w, EPS)
    y, packed = torch.softmax(x.float(), -1).to(BF16), torch.cat((x, residual), -1)

    def of_corpus(op: str, inputs: list[Tensor], template: Call) -> tuple[str, Kernel, list[Tensor], Call]:
        return op, CORPUS[op](rows, cols, BF16), inputs, template

    yield of_corpus("rms_norm", [x, w], lambda: ops.rms_norm(x, w, EPS))
    yield of_corpus("rms_norm_backward", [dy, x, w, rrms], lambda: ops.rms_norm_backward(dy, x, w, rrms))
    yield of_corpus("softmax_backward", [dy, y], lambda: ops.softmax_backward(dy, y, 0.125))
    yield of_corpus("bias_gelu", [x, b], lambda: ops.bias_gelu(x, b))
    yield of_corpus("bias_gelu_backward", [dy, x, b], lambda: ops.bias_gelu_backward(dy, x, b))
    yield of_corpus("swiglu_backward", [dy, packed, packed], lambda: ops.gated_backward(dy, packed))
    dropped: Call = lambda: ops.bias_dropout_residual(x, None, residual, 0.1, seed, 3, None, offset)  # noqa: E731
    yield of_corpus("dropout_add", [x, residual, seed, offset], dropped)
    heads, angles = x.view(rows, cols // HEAD, HEAD), torch.rand(rows, 1, HEAD // 2, device=DEVICE)
    cos, sin = angles.cos(), angles.sin()
    turned = rope(heads.shape[0] * heads.shape[1], HEAD // 2, BF16, heads.shape[1])
    yield "rope", turned, [heads, heads, cos, sin], lambda: ops.rope(heads[None], cos[:, 0], sin[:, 0])


def measure(one: Pair) -> dict[str, Any]:
    size = one.kernel.bytes_moved
    calls = {"template": one.template, "generated": one.generated, "copy": replays.copy(size)}
    spent, failed = replays.times(calls, size)
    if failed:
        return {"op": one.op, "shape": one.shape, "failed": {name: str(why) for name, why in failed.items()}}
    plan = choose_plan(one.kernel, launch.device_of(one.inputs[0]))
    line: dict[str, Any] = {"op": one.op, "shape": one.shape, "results": len(one.kernel.outputs)}
    line |= {f"{name}_us": round(us, 2) for name, us in spent.items()}
    return line | {"ratio": round(spent["generated"] / spent["template"], 4), "plan": plan.style}


def mean(ratios: list[float]) -> float:
    return round(math.exp(sum(map(math.log, ratios)) / len(ratios)), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--cols", type=int, nargs="*", default=COLS)
    parser.add_argument("--ops", nargs="*", help="what a model's or an op's name has to contain")
    parser.add_argument("--warm", help="I/N: compile the I-th of N parts, and time nothing")
    options = parser.parse_args()
    index, of = map(int, (options.warm or "0/1").split("/"))
    ratios: dict[str, list[float]] = {}
    wanted = lambda name: not options.ops or any(part in name for part in options.ops)  # noqa: E731
    for number, one in enumerate(pairs(options.rows, tuple(options.cols), wanted)):
        if options.warm:
            if number % of == index:
                one.template()
                one.generated()
            continue
        line = measure(one)
        if "failed" not in line:
            ratios.setdefault(one.op, []).append(line["ratio"])
        print(json.dumps(line), flush=True)
    if ratios:
        each = {op: mean(found) for op, found in ratios.items()}
        every = [ratio for found in ratios.values() for ratio in found]
        print(json.dumps({"summary": "generated over template", "lines": len(every), "mean": mean(every), **each}))


if __name__ == "__main__":
    main()
