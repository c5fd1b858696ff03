"""The second function of a kernel with sums over rows: it adds the programs' lines, always in the same order."""

from __future__ import annotations

from kernels_triton.fused.schedules import column_sums, needed
from kernels_triton.fused.table import neutral
from kernels_triton.fused.writer import Writer
from kernels_triton.ops.sums import TILE
from kernels_triton.rows import power_of_two

MOST = 512  # lines of partial sums in a tile


def block(lines: int, cols: int) -> int:
    """Columns of a tile, which has all lines at once where they are no more than `MOST`."""
    return min(power_of_two(cols), max(8, min(64, TILE // min(MOST, power_of_two(lines)))))


def write(w: Writer, lines: int, blocks: int) -> None:
    """Blocks of columns; each sums the programs' lines in a fixed order and computes what is late."""
    kernel, width = w.kernel, w.plan.schedule.block
    w.put_batch(blocks)
    w.put_columns(f"{w.first} * {width}")
    for value in column_sums(kernel):
        varies = kernel.varies[value][-1]
        pointer = w.pointer(f"P{value}")
        columns = width if varies else 1
        rows = min(MOST if varies else 1024, power_of_two(lines))
        op = w.reduction(value)
        w.put(f"total_{value} = {w.neutral(op, f'({rows}, {columns})')}")
        with w.block(f"for start in tl.range(0, {lines}, {rows}):"):
            w.put(f"p = start + tl.arange(0, {rows})[:, None]")
            masks = [
                *(["p < " + str(lines)] if lines % rows else []),
                *(["cm"] if varies and w.columns_masked(0) else []),
            ]
            mask = " & ".join(f"({m})" if " " in m else m for m in masks)
            line = (f"(b * {lines} + p)" if kernel.batch else "p") + w.wide(lines)
            at = f"{line} * {kernel.cols} + c" if varies else line
            other = f", mask={mask}, other={neutral(op)}" if mask else ""
            w.add(op, f"total_{value}", f"tl.load({pointer} + {at}{other})")
        w.name(value, 0, op.triton.format(f"total_{value}"), "f32")
        w.store(value)
    follow(w)


def follow(w: Writer) -> None:
    """What is computed from sums, and stored."""
    kernel = w.kernel
    late = [v for v in needed(kernel) if kernel.late[v] and not w.is_sum(v)]
    for value in w.closure(late):
        w.load([value] if value < len(kernel.inputs) else [])
        w.compute(value)
        if kernel.late[value]:
            w.store(value)
