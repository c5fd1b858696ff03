"""What 8-bit rounding does to each product: beside the same product of the operands before they were rounded.

    up fwd scaled_linear: f8e4m3 x f8e4m3, error 0.036
      x                   rounded 0.026, saturated 0, underflown 0.0001
      up.weight.cast      rounded 0.026, saturated 0, underflown 0

Rounding alone makes relative errors of about 2^-5 with three bits of a mantissa, and of 2^-4 with two. More comes of
elements below the smallest 8-bit number: one element that is far larger than the others takes the scale for itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from shardc.ir.graph import Graph, info, op_name, operands, type_of
from shardc.ir.ops.scaled import PRODUCTS, QUANTIZE
from shardc.ir.types import DTYPE_NAMES
from shardc.runtime.oracle.simulate import run_reference


@dataclass(frozen=True)
class RoundedOperand:
    """An operand of a product. `rounded` is the relative error of its 8-bit numbers, in the 2-norm; `saturated` and
    `underflown` are the shares of its elements that are cut at the largest 8-bit number, or become zero."""

    name: str
    format: str
    rounded: float
    saturated: float
    underflown: float


@dataclass(frozen=True)
class RoundedProduct:
    """A product of 8-bit floats. `error` is that of its result, in the 2-norm, over all microbatches."""

    module: str
    phase: str
    op: str
    error: float
    operands: tuple[RoundedOperand, RoundedOperand]

    def __str__(self) -> str:
        formats = " x ".join(operand.format for operand in self.operands)
        lines = [f"{self.module} {self.phase} {self.op}: {formats}, error {self.error:.2g}"]
        lines += [
            f"  {o.name:30} rounded {o.rounded:.2g}, saturated {o.saturated:.2g}, underflown {o.underflown:.2g}"
            for o in self.operands
        ]
        return "\n".join(lines)


@dataclass
class _Sums:
    """What is added up over microbatches: squares of differences and of values, and elements."""

    difference: float = 0.0
    size: float = 0.0
    saturated: int = 0
    underflown: int = 0
    elements: int = 0

    def add(self, found: Tensor, wanted: Tensor) -> None:
        self.difference += float((found.double() - wanted.double()).square().sum())
        self.size += float(wanted.double().square().sum())
        self.elements += wanted.numel()

    @property
    def error(self) -> float:
        return (self.difference / self.size) ** 0.5 if self.size else 0.0

    def share(self, count: int) -> float:
        return count / self.elements if self.elements else 0.0


@dataclass
class _Observer:
    """Sees the values of a run, and keeps those that a product is compared with."""

    values: dict[fx.Node, Tensor] = field(default_factory=dict[fx.Node, Tensor])
    sums: dict[fx.Node, _Sums] = field(default_factory=dict[fx.Node, _Sums])

    def see(self, node: fx.Node, values: Sequence[Tensor]) -> None:
        if node.target in PRODUCTS:
            wide = [self._wide(operand) for operand in operands(node)[:2]]
            one = torch.ones(())
            wanted = node.target(*wide, one, one, torch.float32)  # type: ignore[operator]
            self.sums.setdefault(node, _Sums()).add(values[0], wanted)
        if node.target is QUANTIZE or any(user.target is QUANTIZE for user in node.users):
            self.values[node] = values[0]
        if node.target is QUANTIZE:
            self._round(node)

    def _round(self, node: fx.Node) -> None:
        wide, scale, q = (self.values[v] for v in (*operands(node), node))
        sums = self.sums.setdefault(node, _Sums())
        sums.add(q.float() * scale, wide)
        most = torch.finfo(q.dtype).max
        sums.saturated += int((wide.float().abs() > most * scale).sum())
        sums.underflown += int(((q.float() == 0) & (wide != 0)).sum())

    def _wide(self, operand: fx.Node) -> Tensor:
        """An operand as it would be, had it not been rounded: the same views of what was rounded."""
        if operand.target is QUANTIZE:
            return self.values[operands(operand)[0]].float()
        (source,) = operands(operand)
        x = self._wide(source).contiguous()
        args, kwargs = fx.map_arg((operand.args, operand.kwargs), lambda _: x)
        return operand.target(*args, **kwargs)  # type: ignore[operator]


def rounded_products(reference: Graph, inputs: Mapping[str, Tensor]) -> list[RoundedProduct]:
    """The 8-bit products of a graph from before sharding, in order, as they are on these inputs."""
    seen = _Observer()
    run_reference(reference, inputs, observe=seen.see)
    return [_product(node, seen.sums) for node in reference.calls() if node.target in PRODUCTS]


def _product(node: fx.Node, sums: Mapping[fx.Node, _Sums]) -> RoundedProduct:
    first, second = (_operand(operand, sums) for operand in operands(node)[:2])
    of = info(node)
    return RoundedProduct(
        of.fqn, of.phase, op_name(node.target).removeprefix("shardc."), sums[node].error, (first, second)
    )


def _operand(node: fx.Node, sums: Mapping[fx.Node, _Sums]) -> RoundedOperand:
    while node.target is not QUANTIZE:
        (node,) = operands(node)
    of, source = sums[node], operands(node)[0]
    name, dtype = info(source).name, type_of(node).dtype
    return RoundedOperand(name, DTYPE_NAMES[dtype], of.error, of.share(of.saturated), of.share(of.underflown))
