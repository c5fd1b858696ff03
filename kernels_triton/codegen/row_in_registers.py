"""Rows held in registers: phases from one row reduction to the next, each phase chunk after chunk.

    phase 0      for each chunk: load, compute what depends on no reduction, add the terms of the first reductions
                 one exchange between threads for all sums of the phase
    phase 1      for each chunk: compute what depends on those sums, store results; correct means (`put_correction`)

A chunk's values are used immediately, so that only inputs and values that later phases read stay live.
"""

from __future__ import annotations

from kernels_triton.codegen.compensated_mean import (
    compensated_means,
    distance_from_mean,
    put_correction,
    put_nearest_mean,
)
from kernels_triton.codegen.schedules import live_values
from kernels_triton.codegen.writer import FunctionWriter
from kernels_triton.ir.kernel import Kernel
from kernels_triton.ir.table import OPS

HELD_VALUES = 16  # values of one input's columns that a thread can keep in registers across tiles


def put_phases(w: FunctionWriter) -> None:
    kernel = w.kernel
    alive = sorted(v for v in live_values(kernel) if not kernel.in_epilogue[v] or w.is_sum(v))
    loaded = [v for v in alive if v < len(kernel.inputs)]
    stored = {s.value.index for output in kernel.outputs for s in output.stores}
    persistent = w.plan.programs < -(-kernel.rows // w.plan.schedule.rows)
    if not persistent:  # persistent programs prefetch, and registers are scarce
        w.put_loads(loaded)
    w.put_loads(v for v in loaded if v in stored)
    for value in loaded:
        w.put_stores(value)
    phases = phase_of_steps(kernel, alive)
    for phase in range(max(phases.values(), default=0) + 1):
        in_phase = [v for v in alive if v in phases and phases[v] == phase]
        reductions = [v for v in in_phase if _reduces(kernel, v) and _operand_varies_by_column(kernel, v)]
        for value in in_phase:
            if not kernel.varies[value][-1] and value not in reductions:
                _put_operand_loads(w, value)
                if value in compensated_means(kernel):
                    _put_mean(w, value)
                w.put_step(value)
                w.put_stores(value)
        for chunk in range(w.chunks):
            for value in in_phase:
                if value in reductions:
                    _put_operand_loads(w, value, chunk)
                    put_chunk_term(w, value, chunk)
                elif kernel.varies[value][-1]:
                    _put_operand_loads(w, value, chunk)
                    w.put_step(value, chunk)
                    w.put_stores(value, chunk)
        put_reductions(w, reductions)
        if persistent and not column_values_fit(w):
            for value in loaded:
                if not kernel.varies_by_row(value) and kernel.varies[value][-1]:
                    for chunk in range(w.chunks):
                        w.scope.pop((value, chunk), None)


def _put_mean(w: FunctionWriter, value: int) -> None:
    if put_nearest_mean(w, value):
        return
    w.put_step(value)
    _put_operand_loads(w, *w.kernel.values_read(value))  # the operand of the sum
    for chunk in range(w.chunks):
        w.put(f"apart_{value} {'+=' if chunk else '='} {distance_from_mean(w, value, chunk)}")
    put_correction(w, value, f"apart_{value}")


def column_values_fit(w: FunctionWriter) -> bool:
    """Whether a thread has registers to keep, across rows, the values that are the same in every row."""
    s = w.plan.schedule
    return s.block * w.chunks <= HELD_VALUES * 32 * s.warps


def phase_of_steps(kernel: Kernel, alive: list[int]) -> dict[int, int]:
    """For each step its phase. A reduction is in the phase of its last term. A step that only later phases read is in
    the first of these."""
    phases: dict[int, int] = {}
    stored = {s.value.index for output in kernel.outputs for s in output.stores}
    first_use: dict[int, int] = {}  # the phase in which a value is first used
    for value in reversed([v for v in alive if v >= len(kernel.inputs)]):
        if _reduces(kernel, value):
            phases[value] = kernel.level[value] - _operand_varies_by_column(kernel, value)
        elif value in stored or value not in first_use:
            phases[value] = kernel.level[value]
        else:
            phases[value] = first_use[value]
        for read in kernel.values_read(value):
            first_use[read] = min(first_use.get(read, phases[value]), phases[value])
    return phases


def put_chunk_term(w: FunctionWriter, value: int, chunk: int) -> None:
    """Adds a chunk's term of a row reduction to the terms of earlier chunks."""
    step = w.kernel.step(value)
    assert step is not None
    term, name = w.masked_term(step, chunk, rows=False), f"part_{value}"
    if not chunk:
        w.put(f"{name} = {term}")
    else:
        w.put_combined(OPS[step.op], name, term)


def put_reductions(w: FunctionWriter, values: list[int]) -> None:
    """Reduces the terms; two sums at a time share an exchange between threads."""
    kernel, done = w.kernel, set[int]()
    sums = [v for v in values if _is_float_row_sum(kernel, v)]
    for first, second in zip(sums[::2], sums[1::2], strict=False):
        w.functions_called.add("row_sums")
        w.put(f"sum_{first}, sum_{second} = row_sums(part_{first}, part_{second})")
        done |= {first, second}
    for value in values:
        right = f"sum_{value}" if value in done else w.reduction_of(value, [f"part_{value}"])
        w.define(value, 0, right, w.compute_type_of(value))
        w.put_stores(value)


def _put_operand_loads(w: FunctionWriter, value: int, chunk: int | None = None) -> None:
    w.put_loads((v for v in w.kernel.values_read(value) if v < len(w.kernel.inputs)), chunk)


def _op_of(kernel: Kernel, value: int) -> str:
    step = kernel.step(value)
    return "" if step is None else step.op


def _reduces(kernel: Kernel, value: int) -> bool:
    step = kernel.step(value)
    return step is not None and OPS[step.op].reduces == "row"


def _operand_varies_by_column(kernel: Kernel, value: int) -> bool:
    """Whether a reduction's operand varies along the columns."""
    return kernel.varies[kernel.values_read(value)[0]][-1]


def _is_float_row_sum(kernel: Kernel, value: int) -> bool:
    """Whether the value is a float sum that differs from row to row."""
    varies_by_row = kernel.varies_by_row(kernel.values_read(value)[0])
    return _op_of(kernel, value) == "rsum" and kernel.classes[value] == "f" and varies_by_row
