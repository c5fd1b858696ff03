"""Rows that do not fit: a tile of rows, read by blocks of columns, once for each reduction that waits for another.

Pass p computes the reductions of rows whose operands wait for p others, in accumulators of a block's width that are
reduced when the pass is over (a softmax's sum does not wait for its maximum: it is rescaled as the maximum grows); a
mean that has to be exact takes one pass more (`means`); the last pass computes everything again and stores. What varies
along rows alone is computed between passes, once. A program's sums over rows live in its own line of the partial sums,
which it reads and writes once a tile.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from kernels_triton.fused.expressions import WORDS
from kernels_triton.fused.kernel import reads
from kernels_triton.fused.means import distance, means, nearest, put_exact
from kernels_triton.fused.schedules import column_sums, needed
from kernels_triton.fused.table import OPS, Op, neutral
from kernels_triton.fused.writer import Writer


def passes(w: Writer) -> None:
    """Pass p computes the row reductions whose operands wait for p others; the last one stores."""
    kernel = w.kernel
    alive = needed(kernel)
    levels = {v: kernel.level[v] for v in alive if not kernel.late[v]}
    reductions = [v for v in sorted(levels) if (step := kernel.step(v)) and OPS[step.op].reduces == "row"]
    sums = [v for v in column_sums(kernel) if kernel.varies[v][-1]]
    scalars = [v for v in column_sums(kernel) if not kernel.varies[v][-1]]
    online = rescaled_sums(w, reductions)
    for turn in range(max(levels.values(), default=0)):
        here = [v for v in reductions if levels[v] == turn + 1 and (v, 0) not in w.scope]
        spread = [v for v in here if kernel.varies[kernel.values_read(v)[0]][-1]]
        roots = {read for v in spread for read in kernel.values_read(v)}
        with pass_over(
            w, roots, [accumulator(w, v) for v in (*spread, *(online[v][0] for v in spread if v in online))], spread
        ) as inside:
            for value in inside:
                w.compute(value)
            for value in spread:
                accumulate(w, value, online[value][0] if value in online else None)
        for value in spread:
            w.name(value, 0, w.reduced(value, [f"sum_{value}"]), w.type_of(value))
            if value in online:
                total, shift = online[value]
                w.compute(shift)
                scale = f"tl.exp(sum_{value} - {w.find(shift, 0).name})"
                w.name(total, 0, w.reduced(total, [f"sum_{total} * {scale}"]), "f32")
        summed = {*spread, *(online[v][0] for v in spread if v in online)}
        for value in means(kernel):
            if value in alive and kernel.values_read(value)[0] in summed and not nearest(w, value):
                _put_mean(w, value)
    stored = {s.value.index for made in kernel.outputs for s in made.stores if not kernel.late[s.value.index]}
    ready = {v for v in stored if not kernel.varies[v][-1]}
    for value in w.closure(ready | {kernel.values_read(v)[0] for v in scalars}):
        w.load([value] if value < len(kernel.inputs) else [])
        w.compute(value)
    for value in sorted(ready):
        w.store(value)
    for value in scalars:
        add_partials(w, value)
    roots = {v for v in stored if kernel.varies[v][-1]} | {kernel.values_read(v)[0] for v in sums}
    if roots or sums:
        with pass_over(w, roots, [], []) as inside:
            for value in inside:
                w.compute(value)
                if value in stored:
                    w.store(value)
            for value in sums:
                add_partials(w, value)
    if sums or scalars:
        w.put("tl.debug_barrier()")  # this turn's partial sums, before the next turn reads them


def _put_mean(w: Writer, value: int) -> None:
    """In one more pass."""
    w.compute(value)
    apart = f"apart_{value}"
    rows = w.plan.schedule.rows if w.kernel.of_rows(value) else 1
    zero = f"{apart} = tl.zeros(({rows}, {w.plan.schedule.block}), tl.float32)"
    with pass_over(w, {means(w.kernel)[value]}, [zero], [value]) as inside:
        for each in inside:
            w.compute(each)
        w.put(f"{apart} += {distance(w, value, 0)}")
    put_exact(w, value, apart)


@contextmanager
def pass_over(w: Writer, roots: set[int], before: list[str], kept: list[int]) -> Generator[list[int]]:
    """A loop over the columns; what it needs of rows is computed before it. Yields what to compute inside."""
    kernel, s = w.kernel, w.plan.schedule
    closure = w.closure(roots)
    for value in closure:
        if not kernel.varies[value][-1]:
            w.load([value] if value < len(kernel.inputs) else [])
            w.compute(value)
    if not roots and not kept:
        yield []
        return
    for line in before:
        w.put(line)
    outer = dict(w.scope)
    with w.block(f"for start in tl.range(0, {kernel.cols}, {s.block}):"):
        w.put_columns("start")
        inside = [v for v in closure if kernel.varies[v][-1]]
        w.load(v for v in inside if v < len(kernel.inputs))
        yield inside
    w.scope = outer


def accumulator(w: Writer, value: int) -> str:
    step = w.kernel.step(value)
    assert step is not None
    word = WORDS[w.type_of(value)]
    op = OPS[step.op]
    start = "0" if op.neutral == 0 else neutral(op)
    rows = w.plan.schedule.rows if w.kernel.of_rows(value) else 1  # as many as the reduction's operand has
    return f"sum_{value} = tl.full(({rows}, {w.plan.schedule.block}), {start}, {word})"


def accumulate(w: Writer, value: int, online: int | None) -> None:
    step = w.kernel.step(value)
    assert step is not None
    term = w.masked_term(step, 0, rows=False)
    if online is None:
        w.add(OPS[step.op], f"sum_{value}", term)
        return
    chosen = OPS[step.op].both.format(f"sum_{value}", term)
    w.put(f"top_{value} = {chosen}")
    w.put(f'top_{value}_or_0 = tl.where(top_{value} == float("-inf"), 0.0, top_{value})')
    before, here = f"tl.exp(sum_{value} - top_{value}_or_0)", f"tl.exp({term} - top_{value}_or_0)"
    w.put(f"sum_{online} = sum_{online} * {before} + {here}")
    w.put(f"sum_{value} = top_{value}")


def rescaled_sums(w: Writer, reductions: list[int]) -> dict[int, tuple[int, int]]:
    """`m = rmax(x)` to `rsum(exp(x - m))`: summed in the same pass, rescaled whenever the maximum so far grows.

    With it what is subtracted: m, or `maximum(m, number)`, which is never -inf.
    """
    kernel, found = w.kernel, dict[int, tuple[int, int]]()
    for value in reductions:
        step = kernel.step(value)
        power = kernel.step(reads(step)[0]) if step and step.op == "rsum" else None
        inner = kernel.step(reads(power)[0]) if power and power.op == "exp" else None
        if inner is None or inner.op != "sub" or len(reads(inner)) != 2:
            continue
        x, shift = reads(inner)
        least = kernel.step(shift)
        top = reads(least)[0] if least is not None and least.op == "maximum" and len(reads(least)) == 1 else shift
        highest = kernel.step(top)
        if highest is not None and highest.op == "rmax" and reads(highest) == (x,) and kernel.varies[x][-1]:
            found.setdefault(top, (value, shift))
    return found


def add_partials(w: Writer, value: int) -> None:
    """In loops: into this program's line of partial sums, which nobody else touches."""
    step = w.kernel.step(value)
    assert step is not None
    op, varies = OPS[step.op], w.kernel.varies[value][-1]
    cols = w.kernel.cols if varies else 1
    term = w.masked_term(step, 0, columns=False)
    spread = f"tl.zeros(({w.plan.schedule.rows}, {w.plan.schedule.block if varies else 1}), tl.float32)"
    w.put(f"part_{value} = {op.triton.format(f'({spread} + {term})' if op.both != Op.both else f'{spread} + {term}')}")
    column = "c" if varies else "tl.zeros((1, 1), tl.int32)"
    w.put(f"line_{value} = {w.pointer(f'P{value}')} + {w.line} * {cols} + {column}")
    mask = w.mask((False, varies), 0)
    if w.plan.programs < -(-w.kernel.rows // w.plan.schedule.rows):
        later = f"(tl.zeros((1, 1), tl.int32) + t != {w.program})"  # the first turn finds no sums yet
        loaded = " & ".join([later, *([mask] if mask else [])])
        w.add(op, f"part_{value}", f"tl.load(line_{value}, mask={loaded}, other={neutral(op)})")
        w.put("tl.debug_barrier()")
    w.put(f"tl.store(line_{value}, part_{value}{f', mask={mask}' if mask else ''})")
