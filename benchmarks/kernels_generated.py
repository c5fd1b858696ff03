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
KEYS = (512, 1024, 2048, 4096)  # of a softmax
HEADS = 16
WIDTH = 256  # beside what is measured: of hidden layers, or of inner ones

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


class Mlp(nn.Module):
    """A norm, a product, an activation or a gated one, a product, a residual and a norm."""

    def __init__(self, act: str, norm: type[nn.LayerNorm | nn.RMSNorm], hidden: int, inner: int, gated: bool) -> None:
        super().__init__()
        self.act, self.first, self.last = act, norm(hidden), norm(hidden)
        self.up, self.down, self.head = (
            nn.Linear(hidden, inner, bias=not gated),
            nn.Linear(inner, hidden),
            nn.Linear(hidden, 16),
        )
        self.gate = nn.Linear(hidden, inner, bias=False) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        up = self.up(h)
        match self.act:
            case "silu":
                value: Callable[[Tensor], Tensor] = functional.silu
            case "relu2":
                value = lambda u: functional.relu(u).square()  # noqa: E731
            case _:
                value = lambda u: functional.gelu(u, approximate=self.act)  # noqa: E731
        acted = value(up) if self.gate is None else value(self.gate(h)) * up
        return self.head(self.last(x + self.down(acted))).square().mean()


class Attention(nn.Module):
    """Attention that is written out, of `rows` rows of `keys` scores, under a mask that is added, filled, or none."""

    def __init__(self, mask: str) -> None:
        super().__init__()
        self.mask, self.qkv = mask, nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT * (WIDTH // 4) ** -0.5
        if self.mask == "added":
            scores = scores + mask
        elif self.mask == "filled":
            scores = scores.masked_fill(mask, -math.inf)
        return (scores.softmax(-1) @ v).square().mean()


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
        for name, norm in (("layer_norm", nn.LayerNorm), ("rms_norm", nn.RMSNorm)):
            yield name, lambda n=n, norm=norm: Mlp("silu", norm, n, WIDTH, gated=True), {"x": _meta(rows, n)}
        for act in ("silu", "none", "tanh", "relu2"):
            for gated in (False, True):
                made = lambda n=n, act=act, gated=gated: Mlp(act, nn.LayerNorm, WIDTH, n, gated)  # noqa: E731
                yield f"{act} {'gated' if gated else 'activation'}", made, {"x": _meta(rows, WIDTH)}
    for n in VOCABULARIES:
        for bias in (False, True):
            target = _meta(rows, dtype=torch.int64)
            batch = {"x": _meta(rows, WIDTH), "target": target}
            yield "cross_entropy", lambda n=n, bias=bias: Classifier(n, bias), batch
    for n in KEYS:
        for mask in ("none", "added", "filled"):
            batch = max(1, rows * HEADS // n // 4)
            given = _meta(batch, 1, n, n, dtype=torch.bool if mask == "filled" else torch.float32)
            yield "softmax", lambda mask=mask: Attention(mask), {"x": _meta(batch, n, WIDTH), "mask": given}


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
    inputs = [
        draw(*given.shape).to(given.dtype) if given.dtype.is_floating_point else draw(*given.shape) > 0
        for given in kernel.inputs
    ]
    if isinstance(at := match.binding.get("target"), int):
        inputs[at] = torch.randint(0, match.cols, inputs[at].shape, device=DEVICE)
    if isinstance(at := match.binding.get("rstd"), int):
        inputs[at] = inputs[at].abs() + 0.5
    return inputs


def pairs(rows: int, cols: tuple[int, ...], wanted: Callable[[str], bool]) -> Iterator[Pair]:
    for kernel, match in matched(rows, cols, wanted):
        inputs, act = drawn(kernel, match), match.template.options.get("act", "")
        ours, other = template_launcher(kernel), launcher(kernel)
        shape, op = (match.rows, match.cols), f"{match.template.name} {act}".strip()
        yield Pair(op, shape, kernel, inputs, lambda i=inputs, f=ours: f(i), lambda i=inputs, f=other: f(i))
    for n in cols:
        for op, kernel, inputs, template in plain_ops(rows, n):
            if wanted(op):
                run = launcher(kernel)
                yield Pair(op, (rows, n), kernel, inputs, template, lambda i=inputs, f=run: f(i))


def plain_ops(rows: int, cols: int) -> Iterator[tuple[str, Kernel, list[Tensor], Call]]:
    """Those that no graph gives to a template: the generated kernels are as fast, or fuse more."""
    x, residual, dy = (draw(rows, cols) for _ in range(3))
    w = draw(cols)
    seed, offset = torch.tensor(SEED, device=DEVICE), torch.zeros((), dtype=torch.int64, device=DEVICE)
    _, rrms = ops.rms_norm(x, w, EPS)
    ours: Call = lambda: ops.rms_norm_backward(dy, x, w, rrms)  # noqa: E731
    yield "rms_norm_backward", CORPUS["rms_norm_backward"](rows, cols, BF16), [dy, x, w, rrms], ours
    ours = lambda: ops.bias_dropout_residual(x, None, residual, 0.1, seed, 3, None, offset)  # noqa: E731
    yield "dropout_add", CORPUS["dropout_add"](rows, cols, BF16), [x, residual, seed, offset], ours
    heads, angles = x.view(rows, cols // HEAD, HEAD), torch.rand(rows, 1, HEAD // 2, device=DEVICE)
    cos, sin = angles.cos(), angles.sin()
    ours = lambda: ops.rope(heads[None], cos[:, 0], sin[:, 0])  # noqa: E731
    turned = rope(heads.shape[0] * heads.shape[1], HEAD // 2, BF16, heads.shape[1])
    yield "rope", turned, [heads, heads, cos, sin], ours


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
