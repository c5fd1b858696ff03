"""Is a kernel a template? Then it is run by the template's kernels, and is the template's op in the graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from kernels_triton.fused.kernel import Kernel, Output, Walk, whole
from kernels_triton.launch import DTYPES
from kernels_triton.rows import leading, leading_three
from kernels_triton.templates.algebra import Values, kind_of
from kernels_triton.templates.pattern import Bound, Search
from kernels_triton.templates.table import TEMPLATES, Template

MOST_STEPS = 48  # a template has fewer
PADDED = {"dlogits"}  # results whose rows may go on with zeros
HELD = {"before", "more", "dbefore"}  # a norm's, which registers have room for on rows up to
WIDEST = 8192  # columns


@dataclass(frozen=True)
class Match:
    """What each operand's name stands for, and which result each output of the kernel is."""

    template: Template
    bound: Bound
    results: tuple[str, ...]
    rows: int
    cols: int


@lru_cache(maxsize=4096)
def found(kernel: Kernel) -> Match | None:
    """The template that computes just what a kernel does, if there is one."""
    if len(kernel.steps) > MOST_STEPS or kernel.batch:
        return None
    tensors = (*kernel.inputs, *kernel.outputs)
    if any(one.dtype.is_floating_point and one.dtype not in DTYPES for one in tensors):
        return None
    size = _rows_and_cols(kernel)
    if size is None:
        return None
    values = Values(kernel)
    for template in TEMPLATES:
        if template.needs <= values.ops and len(kernel.outputs) <= len(template.results):
            for bound, results in _readings(Search(values), template, kernel.outputs, {}, ()):
                named = tuple(name.removesuffix("?") for name in results)
                match = Match(template, bound, named, *size)
                if template.required <= set(results) and not _too_wide(match) and _lies_well(kernel, match):
                    return match
    return None


def _too_wide(match: Match) -> bool:
    """Has it so much to hold for each column that the generator does better on long rows?"""
    there = {name for name, at in match.bound.items() if at is not None} | set(match.results)
    return match.cols > WIDEST and not there.isdisjoint(HELD)


def _readings(
    search: Search, template: Template, outputs: Sequence[Output], bound: Bound, taken: tuple[str, ...]
) -> Iterator[tuple[Bound, tuple[str, ...]]]:
    if not outputs:
        yield bound, taken
        return
    made = outputs[0]
    if len(made.stores) != 1:
        return
    for result, formula in template.results.items():
        if result not in taken:
            for reading in search.value(template.formulas[formula], made.stores[0].value.index, bound):
                yield from _readings(search, template, outputs[1:], reading, (*taken, result))


def _rows_and_cols(kernel: Kernel) -> tuple[int, int] | None:
    """A flat kernel is one of rows as long as the last dim of what it reads."""
    if len(kernel.space) > 1:
        return (kernel.rows, kernel.cols) if kernel.rows > 1 and kernel.cols > 1 else None
    shape = kernel.inputs[0].shape
    if not shape or shape[-1] < 2 or kernel.cols % shape[-1]:
        return None
    return kernel.cols // shape[-1], shape[-1]


def _lies_well(kernel: Kernel, match: Match) -> bool:
    """Whole tensors in order, or rows at one distance; numbers of rows and columns one after another."""
    for name, at in match.bound.items():
        if isinstance(at, int) and not isinstance(at, bool) and match.template.operands[name].rstrip("?") != "number":
            kind = match.template.operands[name].removesuffix("?")
            if not _well(kernel, kernel.inputs[at].walk, kind, inside=True):
                return False
    for result, made in zip(match.results, kernel.outputs, strict=True):
        kind = kind_of(kernel, made.stores[0].value.index)
        if not made.padded and not _well(kernel, made.stores[0].walk, kind, inside=False):
            return False
        if made.padded and (result not in PADDED or row_stride(kernel, made.stores[0].walk) is None):
            return False
    drawn = [step for step in kernel.steps if step.op == "uniform"]
    return all(place(match, kernel, step.attributes[1:]) is not None for step in drawn)


def place(match: Match, kernel: Kernel, strides: Sequence[int]) -> tuple[int, int, int, int] | None:
    """Of numbers with these strides: the size of the inner of two leading dims, and the strides of both and of columns.
    None if there are more leading dims."""
    shape = kernel.space if len(kernel.space) > 1 else (match.rows, match.cols)
    steps = strides if len(kernel.space) > 1 else (strides[0] * match.cols, strides[0])
    found = leading(shape, steps)
    return None if found is None or not steps[-1] else (*found, steps[-1])


def _well(kernel: Kernel, walk: Walk, kind: str, inside: bool) -> bool:
    space = kernel.space
    match kind:
        case "mask" | "flag":
            return walk.strides[-1] == 1 and leading_three(space, walk.strides) is not None
        case "full" if inside and len(space) > 1:
            return row_stride(kernel, walk) is not None
        case "full":
            return walk == whole(space)
        case "row":
            return walk == Walk(0, (*whole(space[:-1]).strides, 0))
        case "col":
            return walk == Walk(0, (*[0] * (len(space) - 1), 1))
        case _:
            return walk.offset == 0
    return False


def row_stride(kernel: Kernel, walk: Walk) -> int | None:
    """How far rows are apart; None where they are not all as far, or columns are apart."""
    strides = [(s, n) for s, n in zip(walk.strides[:-1], kernel.space[:-1], strict=True) if n > 1]
    if walk.strides[-1] != 1 or any(s <= 0 for s, _ in strides):
        return None
    for (outer, _), (inner, count) in pairwise(strides):
        if outer != inner * count:
            return None
    return strides[-1][0]
