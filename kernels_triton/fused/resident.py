"""Rows in registers: phases, from one reduction of a row to the next, and in each phase chunk after chunk.

    phase 0      for each chunk: load, compute what waits for no reduction, add up the terms of the first reductions
                 one exchange between threads for all sums of the phase
    phase 1      for each chunk: compute what waits for those, store what is done; means once more, exactly (`means`)

What a phase computes of a chunk is used at once, so that only inputs and what later phases read stay alive.
"""

from __future__ import annotations

from kernels_triton.fused.kernel import Kernel
from kernels_triton.fused.means import distance, means, nearest, put_exact
from kernels_triton.fused.schedules import needed
from kernels_triton.fused.table import OPS
from kernels_triton.fused.writer import Writer

HELD = 16  # columns' values of one input that a thread has registers for, from tile to tile


def phases(w: Writer) -> None:
    kernel = w.kernel
    alive = sorted(v for v in needed(kernel) if not kernel.late[v] or w.is_sum(v))
    loaded = [v for v in alive if v < len(kernel.inputs)]
    stored = {s.value.index for made in kernel.outputs for s in made.stores}
    persistent = w.plan.programs < -(-kernel.rows // w.plan.schedule.rows)
    if not persistent:  # else the stages ahead are loaded already, and registers are what is short
        w.load(loaded)
    w.load(v for v in loaded if v in stored)
    for value in loaded:
        w.store(value)
    at = turns(kernel, alive)
    for turn in range(max(at.values(), default=0) + 1):
        here = [v for v in alive if v in at and at[v] == turn]
        ending = [v for v in here if _reduces(kernel, v) and _wide(kernel, v)]
        for value in here:
            if not kernel.varies[value][-1] and value not in ending:
                _load(w, value)
                if value in means(kernel):
                    _put_mean(w, value)
                w.compute(value)
                w.store(value)
        for chunk in range(w.chunks):
            for value in here:
                if value in ending:
                    _load(w, value, chunk)
                    add_term(w, value, chunk)
                elif kernel.varies[value][-1]:
                    _load(w, value, chunk)
                    w.compute(value, chunk)
                    w.store(value, chunk)
        put_reduced(w, ending)
        if persistent and not columns_held(w):
            for value in loaded:
                if not kernel.of_rows(value) and kernel.varies[value][-1]:
                    for chunk in range(w.chunks):
                        w.scope.pop((value, chunk), None)


def _put_mean(w: Writer, value: int) -> None:
    if nearest(w, value):
        return
    w.compute(value)
    _load(w, *w.kernel.values_read(value))  # what is summed
    for chunk in range(w.chunks):
        w.put(f"apart_{value} {'+=' if chunk else '='} {distance(w, value, chunk)}")
    put_exact(w, value, f"apart_{value}")


def columns_held(w: Writer) -> bool:
    """Do a thread's registers have room for what is the same in every row, from row to row?"""
    s = w.plan.schedule
    return s.block * w.chunks <= HELD * 32 * s.warps


def turns(kernel: Kernel, alive: list[int]) -> dict[int, int]:
    """Of each step the phase in which it is computed: a reduction's is that of its last term, and what only later
    phases read waits for them."""
    found: dict[int, int] = {}
    stored = {s.value.index for made in kernel.outputs for s in made.stores}
    first: dict[int, int] = {}  # the phase of a value's first use
    for value in reversed([v for v in alive if v >= len(kernel.inputs)]):
        if _reduces(kernel, value):
            found[value] = kernel.level[value] - _wide(kernel, value)
        elif value in stored or value not in first:
            found[value] = kernel.level[value]
        else:
            found[value] = first[value]
        for read in kernel.values_read(value):
            first[read] = min(first.get(read, found[value]), found[value])
    return found


def add_term(w: Writer, value: int, chunk: int) -> None:
    """A chunk's term of a row's reduction, to those of the chunks before."""
    step = w.kernel.step(value)
    assert step is not None
    term, name = w.masked_term(step, chunk, rows=False), f"part_{value}"
    if not chunk:
        w.put(f"{name} = {term}")
    else:
        w.add(OPS[step.op], name, term)


def put_reduced(w: Writer, values: list[int]) -> None:
    """Of sums two at a time are exchanged between threads."""
    kernel, done = w.kernel, set[int]()
    sums = [v for v in values if _sums_rows(kernel, v)]
    for one, two in zip(sums[::2], sums[1::2], strict=False):
        w.called.add("row_sums")
        w.put(f"sum_{one}, sum_{two} = row_sums(part_{one}, part_{two})")
        done |= {one, two}
    for value in values:
        right = f"sum_{value}" if value in done else w.reduced(value, [f"part_{value}"])
        w.name(value, 0, right, w.type_of(value))
        w.store(value)


def _load(w: Writer, value: int, chunk: int | None = None) -> None:
    w.load((v for v in w.kernel.values_read(value) if v < len(w.kernel.inputs)), chunk)


def _op(kernel: Kernel, value: int) -> str:
    step = kernel.step(value)
    return "" if step is None else step.op


def _reduces(kernel: Kernel, value: int) -> bool:
    step = kernel.step(value)
    return step is not None and OPS[step.op].reduces == "row"


def _wide(kernel: Kernel, value: int) -> bool:
    """Does a reduction's operand vary along the columns?"""
    return kernel.varies[kernel.values_read(value)[0]][-1]


def _sums_rows(kernel: Kernel, value: int) -> bool:
    """Is it a sum of floats that differ from row to row?"""
    of_rows = kernel.of_rows(kernel.values_read(value)[0])
    return _op(kernel, value) == "rsum" and kernel.classes[value] == "f" and of_rows
