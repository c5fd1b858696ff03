"""Rows too long for registers: a tile of rows is read by blocks of columns, once for each dependent reduction.

Pass p computes the row reductions whose operands depend on p others. Their accumulators are as wide as a block and are
reduced after the pass. (A softmax's sum does not wait for its maximum: it is rescaled as the maximum grows.) A
compensated mean takes one more pass (`compensated_means`). The last pass recomputes everything and stores. Values that
vary along rows only are computed between passes, once. A program's sums over rows are kept in its own line of partial
sums, which it reads and writes once a tile.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from kernels_triton.codegen.compensated_mean import (
    compensated_means,
    distance_from_mean,
    put_correction,
    put_nearest_mean,
)
from kernels_triton.codegen.expressions import WORDS
from kernels_triton.codegen.schedules import column_sums, live_values
from kernels_triton.codegen.writer import FunctionWriter
from kernels_triton.ir.kernel import value_operands
from kernels_triton.ir.table import OPS, Op, neutral_literal


def put_passes(w: FunctionWriter) -> None:
    """Pass p computes the row reductions whose operands depend on p others; the last pass stores."""
    kernel = w.kernel
    alive = live_values(kernel)
    levels = {v: kernel.level[v] for v in alive if not kernel.in_epilogue[v]}
    reductions = [v for v in sorted(levels) if (step := kernel.step(v)) and OPS[step.op].reduces == "row"]
    sums = [v for v in column_sums(kernel) if kernel.varies[v][-1]]
    scalars = [v for v in column_sums(kernel) if not kernel.varies[v][-1]]
    online = online_sums(w, reductions)
    for depth in range(max(levels.values(), default=0)):
        reduced = [v for v in reductions if levels[v] == depth + 1 and (v, 0) not in w.scope]
        by_column = [v for v in reduced if kernel.varies[kernel.values_read(v)[0]][-1]]
        roots = {read for v in by_column for read in kernel.values_read(v)}
        with put_pass(
            w,
            roots,
            [accumulator(w, v) for v in (*by_column, *(online[v][0] for v in by_column if v in online))],
            by_column,
        ) as inside:
            for value in inside:
                w.put_step(value)
            for value in by_column:
                put_accumulation(w, value, online[value][0] if value in online else None)
        for value in by_column:
            w.define(value, 0, w.reduction_of(value, [f"sum_{value}"]), w.compute_type_of(value))
            if value in online:
                total, shift = online[value]
                w.put_step(shift)
                scale = f"tl.exp(sum_{value} - {w.variable(shift, 0).name})"
                w.define(total, 0, w.reduction_of(total, [f"sum_{total} * {scale}"]), "f32")
        summed = {*by_column, *(online[v][0] for v in by_column if v in online)}
        for value in compensated_means(kernel):
            if value in alive and kernel.values_read(value)[0] in summed and not put_nearest_mean(w, value):
                _put_mean(w, value)
    stored = {
        s.value.index for output in kernel.outputs for s in output.stores if not kernel.in_epilogue[s.value.index]
    }
    ready = {v for v in stored if not kernel.varies[v][-1]}
    for value in w.pending_values(ready | {kernel.values_read(v)[0] for v in scalars}):
        w.put_loads([value] if value < len(kernel.inputs) else [])
        w.put_step(value)
    for value in sorted(ready):
        w.put_stores(value)
    for value in scalars:
        put_partial_sums(w, value)
    roots = {v for v in stored if kernel.varies[v][-1]} | {kernel.values_read(v)[0] for v in sums}
    if roots or sums:
        with put_pass(w, roots, [], []) as inside:
            for value in inside:
                w.put_step(value)
                if value in stored:
                    w.put_stores(value)
            for value in sums:
                put_partial_sums(w, value)
    if sums or scalars:
        w.put("tl.debug_barrier()")  # writes this tile's partial sums before the next tile reads them


def _put_mean(w: FunctionWriter, value: int) -> None:
    """The correction of a mean, in one more pass."""
    w.put_step(value)
    differences = f"apart_{value}"
    rows = w.plan.schedule.rows if w.kernel.varies_by_row(value) else 1
    zero = f"{differences} = tl.zeros(({rows}, {w.plan.schedule.block}), tl.float32)"
    with put_pass(w, {compensated_means(w.kernel)[value]}, [zero], [value]) as inside:
        for each in inside:
            w.put_step(each)
        w.put(f"{differences} += {distance_from_mean(w, value, 0)}")
    put_correction(w, value, differences)


@contextmanager
def put_pass(w: FunctionWriter, roots: set[int], before: list[str], accumulated: list[int]) -> Generator[list[int]]:
    """A loop over the columns. Row values that it needs are computed before it. Yields the values to compute inside."""
    kernel, s = w.kernel, w.plan.schedule
    closure = w.pending_values(roots)
    for value in closure:
        if not kernel.varies[value][-1]:
            w.put_loads([value] if value < len(kernel.inputs) else [])
            w.put_step(value)
    if not roots and not accumulated:
        yield []
        return
    for line in before:
        w.put(line)
    outer = dict(w.scope)
    with w.block(f"for start in tl.range(0, {kernel.cols}, {s.block}):"):
        w.put_columns("start")
        inside = [v for v in closure if kernel.varies[v][-1]]
        w.put_loads(v for v in inside if v < len(kernel.inputs))
        yield inside
    w.scope = outer


def accumulator(w: FunctionWriter, value: int) -> str:
    step = w.kernel.step(value)
    assert step is not None
    word = WORDS[w.compute_type_of(value)]
    op = OPS[step.op]
    start = "0" if op.neutral == 0 else neutral_literal(op)
    rows = w.plan.schedule.rows if w.kernel.varies_by_row(value) else 1  # as many rows as the reduction's operand has
    return f"sum_{value} = tl.full(({rows}, {w.plan.schedule.block}), {start}, {word})"


def put_accumulation(w: FunctionWriter, value: int, online: int | None) -> None:
    step = w.kernel.step(value)
    assert step is not None
    term = w.masked_term(step, 0, rows=False)
    if online is None:
        w.put_combined(OPS[step.op], f"sum_{value}", term)
        return
    chosen = OPS[step.op].combine.format(f"sum_{value}", term)
    w.put(f"top_{value} = {chosen}")
    w.put(f'top_{value}_or_0 = tl.where(top_{value} == float("-inf"), 0.0, top_{value})')
    before, here = f"tl.exp(sum_{value} - top_{value}_or_0)", f"tl.exp({term} - top_{value}_or_0)"
    w.put(f"sum_{online} = sum_{online} * {before} + {here}")
    w.put(f"sum_{value} = top_{value}")


def online_sums(w: FunctionWriter, reductions: list[int]) -> dict[int, tuple[int, int]]:
    """`m = rmax(x)` -> `rsum(exp(x - m))`: summed in the same pass, and rescaled whenever the running maximum grows.

    The result also has the subtracted value: m, or `maximum(m, number)`, which is never -inf.
    """
    kernel, sums = w.kernel, dict[int, tuple[int, int]]()
    for value in reductions:
        step = kernel.step(value)
        power = kernel.step(value_operands(step)[0]) if step and step.op == "rsum" else None
        inner = kernel.step(value_operands(power)[0]) if power and power.op == "exp" else None
        if inner is None or inner.op != "sub" or len(value_operands(inner)) != 2:
            continue
        x, shift = value_operands(inner)
        shift_step = kernel.step(shift)
        maximum = (
            value_operands(shift_step)[0]
            if shift_step is not None and shift_step.op == "maximum" and len(value_operands(shift_step)) == 1
            else shift
        )
        highest = kernel.step(maximum)
        if highest is not None and highest.op == "rmax" and value_operands(highest) == (x,) and kernel.varies[x][-1]:
            sums.setdefault(maximum, (value, shift))
    return sums


def put_partial_sums(w: FunctionWriter, value: int) -> None:
    """In loops: adds to this program's line of partial sums, which no other program touches."""
    step = w.kernel.step(value)
    assert step is not None
    op, varies_by_column = OPS[step.op], w.kernel.varies[value][-1]
    cols = w.kernel.cols if varies_by_column else 1
    term = w.masked_term(step, 0, columns=False)
    zeros = f"tl.zeros(({w.plan.schedule.rows}, {w.plan.schedule.block if varies_by_column else 1}), tl.float32)"
    widened = f"{zeros} + {term}"
    w.put(f"part_{value} = {op.triton.format(f'({widened})' if op.combine != Op.combine else widened)}")
    column = "c" if varies_by_column else "tl.zeros((1, 1), tl.int32)"
    w.put(f"line_{value} = {w.pointer(f'P{value}')} + {w.partial_sum_line} * {cols} + {column}")
    mask = w.mask((False, varies_by_column), 0)
    if w.plan.programs < -(-w.kernel.rows // w.plan.schedule.rows):
        later = f"(tl.zeros((1, 1), tl.int32) + t != {w.program})"  # the first tile has no sums to read
        loaded = " & ".join([later, *([mask] if mask else [])])
        w.put_combined(op, f"part_{value}", f"tl.load(line_{value}, mask={loaded}, other={neutral_literal(op)})")
        w.put("tl.debug_barrier()")
    w.put(f"tl.store(line_{value}, part_{value}{f', mask={mask}' if mask else ''})")
