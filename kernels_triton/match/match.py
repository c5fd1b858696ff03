"""The match of a kernel with a template. A kernel with a match is run by the template, and its graph node is the
template's op.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from kernels_triton.ir.access_map import AccessMap, contiguous_map
from kernels_triton.ir.kernel import Kernel, Output
from kernels_triton.launch.launch import DTYPES
from kernels_triton.match.algebra import KernelValues, kind_of
from kernels_triton.match.pattern import Binding, PatternSearch
from kernels_triton.match.table import TEMPLATES, TemplatePattern

MOST_STEPS = 48  # every template has fewer steps
PADDED_RESULTS = {"dlogits"}  # results whose rows may end with zero padding
REGISTER_OPERANDS = {"before", "more", "dbefore"}  # operands of a norm that fit into registers up to WIDEST columns
WIDEST = 8192


@dataclass(frozen=True)
class Match:
    """`binding` maps operand names to inputs or numbers; `results` names the result of each output."""

    template: TemplatePattern
    binding: Binding
    results: tuple[str, ...]
    rows: int
    cols: int


@lru_cache(maxsize=4096)
def match_template(kernel: Kernel) -> Match | None:
    """The template that computes exactly what a kernel does; None if there is none."""
    if len(kernel.steps) > MOST_STEPS or kernel.batch:
        return None
    tensors = (*kernel.inputs, *kernel.outputs)
    if any(tensor.dtype.is_floating_point and tensor.dtype not in DTYPES for tensor in tensors):
        return None
    size = _rows_and_cols(kernel)
    if size is None:
        return None
    values = KernelValues(kernel)
    for template in TEMPLATES:
        if template.needs <= values.ops and len(kernel.outputs) <= len(template.results):
            for bound, results in _bindings(PatternSearch(values), template, kernel.outputs, {}, ()):
                named = tuple(name.removesuffix("?") for name in results)
                match = Match(template, bound, named, *size)
                if template.required <= set(results) and not _is_too_wide(match) and _access_maps_fit(kernel, match):
                    return match
    return None


def _is_too_wide(match: Match) -> bool:
    """Whether the match has so many operands for each column that the generated kernel is faster on long rows."""
    present = {name for name, operand in match.binding.items() if operand is not None} | set(match.results)
    return match.cols > WIDEST and not present.isdisjoint(REGISTER_OPERANDS)


def _bindings(
    search: PatternSearch,
    template: TemplatePattern,
    outputs: Sequence[Output],
    binding: Binding,
    named: tuple[str, ...],
) -> Iterator[tuple[Binding, tuple[str, ...]]]:
    if not outputs:
        yield binding, named
        return
    output = outputs[0]
    if len(output.stores) != 1:
        return
    for result, formula in template.results.items():
        if result not in named:
            for reading in search.match_value(template.formulas[formula], output.stores[0].value.index, binding):
                yield from _bindings(search, template, outputs[1:], reading, (*named, result))


def _rows_and_cols(kernel: Kernel) -> tuple[int, int] | None:
    """The rows and columns. A flat kernel has rows as long as the last dim of its first input."""
    if len(kernel.space) > 1:
        return (kernel.rows, kernel.cols) if kernel.rows > 1 and kernel.cols > 1 else None
    shape = kernel.inputs[0].shape
    if not shape or shape[-1] < 2 or kernel.cols % shape[-1]:
        return None
    return kernel.cols // shape[-1], shape[-1]


def _access_maps_fit(kernel: Kernel, match: Match) -> bool:
    """Whether full tensors are in order, or have rows at one stride, and row and column values are contiguous."""
    for name, operand in match.binding.items():
        if (
            isinstance(operand, int)
            and not isinstance(operand, bool)
            and match.template.operands[name].rstrip("?") != "number"
        ):
            kind = match.template.operands[name].removesuffix("?")
            if not _access_map_fits(kernel, kernel.inputs[operand].access_map, kind, inside=True):
                return False
    for result, output in zip(match.results, kernel.outputs, strict=True):
        kind = kind_of(kernel, output.stores[0].value.index)
        if not output.padded and not _access_map_fits(kernel, output.stores[0].access_map, kind, inside=False):
            return False
        if output.padded and (result not in PADDED_RESULTS or row_stride(kernel, output.stores[0].access_map) is None):
            return False
    return True


def _access_map_fits(kernel: Kernel, access_map: AccessMap, kind: str, inside: bool) -> bool:
    space = kernel.space
    match kind:
        case "full" if inside and len(space) > 1:
            return row_stride(kernel, access_map) is not None
        case "full":
            return access_map == contiguous_map(space)
        case "row":
            return access_map == AccessMap(0, (*contiguous_map(space[:-1]).strides, 0))
        case "col":
            return access_map == AccessMap(0, (*[0] * (len(space) - 1), 1))
        case _:
            return access_map.offset == 0
    return False


def row_stride(kernel: Kernel, access_map: AccessMap) -> int | None:
    """The stride between rows; None if it is not constant, or columns are not contiguous."""
    strides = [(s, n) for s, n in zip(access_map.strides[:-1], kernel.space[:-1], strict=True) if n > 1]
    if access_map.strides[-1] != 1 or any(s <= 0 for s, _ in strides):
        return None
    for (outer, _), (inner, count) in pairwise(strides):
        if outer != inner * count:
            return None
    return strides[-1][0]
