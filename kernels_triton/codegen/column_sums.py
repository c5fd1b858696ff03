"""The second function of a kernel with sums over rows: it adds the programs' lines, always in the same order."""

from __future__ import annotations

from kernels_triton.codegen.schedules import column_sums, live_values
from kernels_triton.codegen.writer import FunctionWriter
from kernels_triton.ir.table import neutral_literal
from kernels_triton.launch.partial_sums import TILE
from kernels_triton.launch.row_schedule import power_of_two

MOST_LINES = 512  # lines of partial sums in a tile


def column_block(lines: int, cols: int) -> int:
    """The columns of a tile. A tile holds all lines at once if there are at most `MOST_LINES`."""
    return min(power_of_two(cols), max(8, min(64, TILE // min(MOST_LINES, power_of_two(lines)))))


def put_final_sums(w: FunctionWriter, lines: int, blocks: int) -> None:
    """For each block of columns, sums the programs' lines in a fixed order and computes the epilogue."""
    kernel, width = w.kernel, w.plan.schedule.block
    w.put_batch(blocks)
    w.put_columns(f"{w.batch_program} * {width}")
    for value in column_sums(kernel):
        varies_by_column = kernel.varies[value][-1]
        pointer = w.pointer(f"P{value}")
        columns = width if varies_by_column else 1
        rows = min(MOST_LINES if varies_by_column else 1024, power_of_two(lines))
        op = w.reduction(value)
        w.put(f"total_{value} = {w.neutral(op, f'({rows}, {columns})')}")
        with w.block(f"for start in tl.range(0, {lines}, {rows}):"):
            w.put(f"p = start + tl.arange(0, {rows})[:, None]")
            masks = [
                *(["p < " + str(lines)] if lines % rows else []),
                *(["cm"] if varies_by_column and w.columns_masked(0) else []),
            ]
            mask = " & ".join(f"({m})" if " " in m else m for m in masks)
            line = (f"(b * {lines} + p)" if kernel.batch else "p") + w.wide_line(lines)
            offset = f"{line} * {kernel.cols} + c" if varies_by_column else line
            other = f", mask={mask}, other={neutral_literal(op)}" if mask else ""
            w.put_combined(op, f"total_{value}", f"tl.load({pointer} + {offset}{other})")
        w.define(value, 0, op.triton.format(f"total_{value}"), "f32")
        w.put_stores(value)
    put_epilogue(w)


def put_epilogue(w: FunctionWriter) -> None:
    """The epilogue: values computed from the sums, and their stores."""
    kernel = w.kernel
    epilogue = [v for v in live_values(kernel) if kernel.in_epilogue[v] and not w.is_sum(v)]
    for value in w.pending_values(epilogue):
        w.put_loads([value] if value < len(kernel.inputs) else [])
        w.put_step(value)
        if kernel.in_epilogue[value]:
            w.put_stores(value)
