"""The registry of templates: the operands and results of each, with shapes and dtypes, and its reference.

A signature is text over named sizes. `T` is the dtype of the call, `?` marks an operand that may be None, and square
brackets hold a shape: `x: T[rows, cols], weight: T[cols]? -> y: T[rows, cols], rstd: f32[rows]`. Sizes are names,
numbers, or products of both. `arguments` makes the operands of a signature: on `meta` for the compile gate, with random
values for a benchmark. `variants` has one entry for each choice of options. `other_calls` are calls with other operands
than the signature's: `{"weight": None, "mask": "bool[rows, cols]"}`; `call` makes their arguments. Launches from graphs
that go beyond these are in `match/variants.py`.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels_triton import ops
from kernels_triton.launch.launch import DTYPES
from kernels_triton.library import reference

KINDS = {"f32": torch.float32, "i64": torch.int64, "u8": torch.uint8, "bool": torch.bool}


@dataclass(frozen=True)
class Operand:
    """`kind` is T, or a dtype's short name; `optional` operands may be None."""

    name: str
    kind: str
    dims: tuple[str, ...]
    optional: bool

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(math.prod(_size(factor, sizes) for factor in dim.split("*")) for dim in self.dims)

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if self.kind == "T" else KINDS[self.kind]


@dataclass(frozen=True)
class TemplateOp:
    """One op of `kernels_triton.ops`, with its reference in `kernels_triton.library.reference`."""

    name: str
    signature: str
    variants: tuple[Mapping[str, Any], ...] = ({},)
    dtypes: tuple[torch.dtype, ...] = DTYPES
    scalars: tuple[tuple[int, Any], ...] = ()  # (position, value) of arguments that are not tensors
    other_calls: tuple[Mapping[str, Any], ...] = ()  # operands and options by name; text with brackets is a tensor

    @property
    def op(self) -> Callable[..., Any]:
        return getattr(ops, self.name)

    @property
    def reference(self) -> Callable[..., Any]:
        return getattr(reference, self.name)

    @property
    def operands(self) -> tuple[Operand, ...]:
        return _operands(self.signature.partition("->")[0])

    @property
    def results(self) -> tuple[Operand, ...]:
        return _operands(self.signature.partition("->")[2])

    def arguments(self, sizes: Mapping[str, int], dtype: torch.dtype, device: torch.device | str) -> list[Any]:
        """The positional arguments of a call: every operand, with values from torch's generator."""
        arguments: list[Any] = [_random_operand(operand, sizes, dtype, device) for operand in self.operands]
        for position, value in self.scalars:
            arguments.insert(position, value)
        return arguments

    @property
    def calls(self) -> tuple[Mapping[str, Any], ...]:
        """All calls: `variants`, and `other_calls` with the options of the first variant."""
        return (*self.variants, *({**self.variants[0], **overrides} for overrides in self.other_calls))

    def call(
        self, options: Mapping[str, Any], sizes: Mapping[str, int], dtype: torch.dtype, device: torch.device | str
    ) -> dict[str, Any]:
        """The arguments, by name, of one of `calls`."""
        parameters = list(inspect.signature(self.op).parameters)
        arguments = dict(zip(parameters, self.arguments(sizes, dtype, device), strict=False))
        for name, value in options.items():
            if name in parameters:
                parsed = _operands(f"{name}: {value}") if isinstance(value, str) and "[" in value else ()
                arguments[name] = _random_operand(parsed[0], sizes, dtype, device) if parsed else value
        return arguments

    def results_of_call(self, options: Mapping[str, Any]) -> tuple[Operand, ...]:
        """As `results`, with the shapes and dtypes that one of `calls` overrides."""
        texts = {name: text for name, text in options.items() if isinstance(text, str) and "[" in text}
        overridden = {name: _operands(f"{name}: {text}")[0] for name, text in texts.items()}
        return tuple(overridden.get(result.name, result) for result in self.results)


def _operands(text: str) -> tuple[Operand, ...]:
    matches = re.findall(r"(\w+): (\w+)\[([^\]]*)\](\?)?", text)
    return tuple(
        Operand(name, kind, tuple(d.strip() for d in dims.split(",") if d.strip()), bool(optional))
        for name, kind, dims, optional in matches
    )


def _size(name: str, sizes: Mapping[str, int]) -> int:
    name = name.strip()
    if name == "bytes":  # a bit for each column
        return -(-sizes["cols"] // 8)
    return int(name) if name.isdigit() else sizes[name]


def _random_operand(
    operand: Operand, sizes: Mapping[str, int], dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    shape, kind = operand.shape(sizes), operand.dtype(dtype)
    if torch.device(device).type == "meta":
        return torch.empty(shape, dtype=kind, device=device)
    if kind == torch.int64:
        scalar = torch.ones((), dtype=kind, device=device)  # a step or a seed
        return torch.randint(0, sizes["cols"], shape, device=device) if shape else scalar
    if kind == torch.uint8:
        return torch.randint(0, 256, shape, device=device).to(kind)
    if kind == torch.bool:
        return torch.rand(shape, device=device) < 0.7
    if operand.name in ("skip", "step"):
        return torch.full(shape, float(operand.name == "step"), dtype=kind, device=device)
    values = torch.randn(shape, dtype=torch.float32, device=device)
    return (values.abs() + 0.1 if operand.name in POSITIVE else values).to(kind)


GROUPS = 32
POSITIVE = ("rstd", "exp_avg_sq", "lr", "stats", "grad_scale")
X = "x: T[rows, cols]"
STATS = "mean: f32[rows], rstd: f32[rows]"
ACTS = tuple({"act": act} for act in ("gelu_tanh", "gelu"))
GATES = tuple({"act": act} for act in ("silu", "gelu_tanh", "gelu"))
REST = tuple({"act": act} for act in ("silu", "relu2"))
BARE = {"weight": None, "bias": None}
MASTER = {"weight": "f32[cols]", "bias": "f32[cols]"}  # float32 parameters and gradients, for any dtype of x
MASTER_GRADS = {"weight": "f32[cols]", "dweight": "f32[cols]", "dbias": "f32[cols]"}

TEMPLATES: dict[str, TemplateOp] = {
    template.name: template
    for template in (
        TemplateOp(
            "layer_norm",
            f"{X}, weight: T[cols]?, bias: T[cols]? -> y: T[rows, cols], {STATS}",
            other_calls=(BARE, MASTER, {"bias": None}),
        ),
        TemplateOp(
            "rms_norm",
            f"{X}, weight: T[cols]? -> y: T[rows, cols], rstd: f32[rows]",
            other_calls=({"weight": None}, {"weight": "f32[cols]"}),
        ),
        TemplateOp(
            "add_layer_norm",
            f"{X}, residual: T[rows, cols], weight: T[cols]?, bias: T[cols]? -> "
            f"y: T[rows, cols], sum: T[rows, cols], {STATS}",
            other_calls=(BARE, MASTER, {"bias": None}),
        ),
        TemplateOp(
            "add_rms_norm",
            f"{X}, residual: T[rows, cols], weight: T[cols]? -> y: T[rows, cols], sum: T[rows, cols], rstd: f32[rows]",
            other_calls=({"weight": None}, {"weight": "f32[cols]"}),
        ),
        TemplateOp(
            "layer_norm_backward",
            f"dy: T[rows, cols], {X}, weight: T[cols]?, {STATS}, residual_grad: T[rows, cols]? -> "
            "dx: T[rows, cols], dweight: T[cols]?, dbias: T[cols]?",
            other_calls=(
                {"residual_grad": None},
                {"weight": None, "residual_grad": None, "with_bias": False},
                {"with_bias": False},
                MASTER_GRADS,
            ),
        ),
        TemplateOp(
            "rms_norm_backward",
            f"dy: T[rows, cols], {X}, weight: T[cols]?, rstd: f32[rows], residual_grad: T[rows, cols]? -> "
            "dx: T[rows, cols], dweight: T[cols]?",
            other_calls=({"residual_grad": None}, {"weight": None, "residual_grad": None}, MASTER_GRADS),
        ),
        TemplateOp(
            "softmax",
            f"{X} -> y: T[rows, cols]",
            variants=({}, {"scale": 0.125}, {"scale": 0.125, "causal": True}),
            other_calls=(
                {"scale": 0.125, "mask": "bool[rows, cols]"},
                {"scale": 0.125, "mask": "T[rows, cols]"},
                {"scale": 0.125, "mask": "bool[1, cols]", "causal": True},
                {"scale": 0.125, "mask": "T[cols]", "causal": True},
            ),
        ),
        TemplateOp(
            "softmax_backward",
            "dy: T[rows, cols], y: T[rows, cols] -> dx: T[rows, cols]",
            variants=({"scale": 0.125}, {"scale": 0.125, "causal": True}),
        ),
        TemplateOp(
            "bias_gelu",
            f"{X}, bias: T[cols]? -> y: T[rows, cols]",
            ACTS,
            other_calls=({"bias": None}, {"bias": "f32[cols]"}, *REST),
        ),
        TemplateOp(
            "bias_gelu_backward",
            f"dy: T[rows, cols], {X}, bias: T[cols]? -> dx: T[rows, cols], dbias: T[cols]?",
            ACTS,
            other_calls=({"bias": None}, {"bias": "f32[cols]", "dbias": "f32[cols]"}, *REST),
        ),
        TemplateOp("squared_relu", f"{X} -> y: T[rows, cols]"),
        TemplateOp("squared_relu_backward", f"dy: T[rows, cols], {X} -> dx: T[rows, cols]"),
        TemplateOp(
            "gated",
            "gate: T[rows, cols], up: T[rows, cols]? -> y: T[rows, cols]",
            GATES,
            other_calls=({"gate": "T[rows, 2*cols]", "up": None},),
        ),
        TemplateOp(
            "gated_backward",
            "dy: T[rows, cols], gate: T[rows, cols], up: T[rows, cols]? -> dgate: T[rows, cols], dup: T[rows, cols]?",
            GATES,
            other_calls=({"gate": "T[rows, 2*cols]", "up": None, "dgate": "T[rows, 2*cols]"},),
        ),
        TemplateOp(
            "bias_dropout_residual",
            f"{X}, bias: T[cols]?, residual: T[rows, cols]?, seed: i64[] -> y: T[rows, cols], keep: u8[rows, bytes]",
            scalars=((3, 0.1), (5, 7)),
            other_calls=({"bias": None, "residual": None}, {"bias": "f32[cols]", "offset": "i64[]"}),
        ),
        TemplateOp(
            "bias_dropout_residual_backward",
            "dy: T[rows, cols], keep: u8[rows, bytes], bias: T[cols]? -> dx: T[rows, cols], dbias: T[cols]?",
            scalars=((2, 0.1),),
            other_calls=({"bias": None}, {"bias": "f32[cols]", "dbias": "f32[cols]"}),
        ),
        TemplateOp(
            "cross_entropy",
            "logits: T[rows, cols], target: i64[rows], grad_scale: f32[]? -> "
            "loss: f32[rows], lse: f32[rows], dlogits: T[rows, cols]",
            variants=({}, {"in_place": True}),
            other_calls=({"grad_scale": None},),
        ),
        TemplateOp("cross_entropy_stats", "logits: T[rows, cols], target: i64[rows] -> stats: f32[rows, 3]"),
        TemplateOp(
            "cross_entropy_finish",
            "logits: T[rows, cols], target: i64[rows], stats: f32[4, rows, 3] -> "
            "loss: f32[rows], lse: f32[rows], dlogits: T[rows, cols]",
            variants=({"classes": 1 << 18, "start": 0},),
            other_calls=({"grad_scale": "f32[]"},),
        ),
        TemplateOp(
            "embedding_backward",
            "grad: T[160, cols], index: i64[160] -> y: T[1000, cols]",
            scalars=((2, 1000),),
            variants=({}, {"padding": 1}),
            other_calls=({"total": "f32[1000, cols]", "y": "f32[1000, cols]"},),
        ),
        TemplateOp(
            "rope",
            "x: T[batch, rows, heads, dim], cos: f32[rows, half], sin: f32[rows, half] -> "
            "y: T[batch, rows, heads, dim]",
            variants=({}, {"in_place": True}, {"inverse": True, "in_place": True}, {"interleaved": True}),
            other_calls=(
                {"cos": "T[rows, half]", "sin": "T[rows, half]"},
                {"cos": "f32[batch, rows, half]", "sin": "f32[batch, rows, half]"},
            ),
        ),
        TemplateOp(
            "adamw",
            "param: f32[rows*cols], grad: T[rows*cols], exp_avg: f32[rows*cols], exp_avg_sq: f32[rows*cols], "
            "lr: f32[], step: i64[] ->",
            other_calls=(
                {"grad_scale": "f32[]", "skip": "f32[]", "copy": "T[rows*cols]"},
                {"param": "T[rows*cols]", "exp_avg": "T[rows*cols]", "exp_avg_sq": "T[rows*cols]", "step": "f32[]"},
            ),
        ),
        TemplateOp(
            "group_norm",
            "x: T[batch, channels, space], weight: T[channels]?, bias: T[channels]? -> "
            "y: T[batch, channels, space], mean: f32[batch, groups], rstd: f32[batch, groups]",
            scalars=((1, GROUPS),),
            other_calls=(BARE, {"weight": "f32[channels]", "bias": "f32[channels]"}),
        ),
        TemplateOp(
            "group_norm_backward",
            "dy: T[batch, channels, space], x: T[batch, channels, space], weight: T[channels]?, "
            "mean: f32[batch, groups], rstd: f32[batch, groups] -> "
            "dx: T[batch, channels, space], dweight: T[channels]?, dbias: T[channels]?",
            scalars=((2, GROUPS),),
            other_calls=(
                {"weight": None, "with_bias": False},
                {"weight": "f32[channels]", "dweight": "f32[channels]", "dbias": "f32[channels]"},
            ),
        ),
    )
}
