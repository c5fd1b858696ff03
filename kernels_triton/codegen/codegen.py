"""Triton source from a kernel and its grid plan: one function over the rows, and a second one for sums over rows.

    c = tl.arange(0, 4096)[None, :]                  # columns of the tile
    for t in ...:                                    # tiles of rows
        r = t * ROWS + tl.arange(0, ROWS)[:, None]
        loads; steps in order; stores; sums over rows into accumulators
    accumulators to this program's line of partial sums, or the epilogue if no other program has a partial sum

Independent outputs (`transform/independent_outputs.py`) are separate parts: each part has its own `if`, on
`tl.program_id(1)`.

An output may overwrite an input if each stored element is computed from the element that it replaces
(`schedules.inplace_pairs`). The load comes first in any order of the lines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass

from kernels_triton.codegen import addresses, row_in_registers, row_looped
from kernels_triton.codegen import column_sums as finish
from kernels_triton.codegen.expressions import library_functions
from kernels_triton.codegen.schedules import GridPlan, column_sums, live_values
from kernels_triton.codegen.writer import FunctionWriter
from kernels_triton.ir.kernel import Kernel
from kernels_triton.launch.row_schedule import Schedule
from kernels_triton.transform.independent_outputs import values_of_outputs


@dataclass(frozen=True)
class KernelSource:
    """The functions `NAME` and, if programs share sums over rows, `NAME_finish`, with their arguments.

    Arguments are inputs `X0`.., outputs `Y0`.., and `P7`, the lines of partial sums of value %7. `partials` gives, for
    each such value, the columns of a program's lines, over all points of the batch dims.
    """

    text: str
    digest: str
    arguments: tuple[str, ...]
    finish_arguments: tuple[str, ...]
    finish_blocks: int
    partials: tuple[tuple[int, int], ...]


def generate(kernel: Kernel, plan: GridPlan) -> KernelSource:
    main = FunctionWriter(kernel, plan)
    put_main(main)
    sums = column_sums(kernel)
    block = finish.column_block(plan.programs, kernel.cols)
    late_columns = any(kernel.varies[v][-1] for v in live_values(kernel) if kernel.in_epilogue[v])
    blocks = -(-kernel.cols // block) if late_columns else 1
    second = FunctionWriter(kernel, GridPlan("tiles", Schedule(block), blocks), finishing=True)
    body = main.function(kernel.name, _docstring(kernel, plan))
    two = bool(sums) and not plan.sums_in_one_program
    if two:
        finish.put_final_sums(second, plan.programs, blocks)
        about = f"The {plan.programs} lines of partial sums, added in order, and what follows from the sums."
        body += ["", "", *second.function(f"{kernel.name}_finish", about)]
    title = f"{kernel.name} over {' x '.join(map(str, kernel.space))}: {kernel.bytes_moved:,} bytes at least."
    head = [f'"""{title}"""', "", "import triton", "import triton.language as tl", ""]
    if called := sorted(library_functions(kernel) | main.functions_called):
        head += [f"from kernels_triton.library.kernels.functions import {', '.join(called)}", ""]
    whole = "\n".join([*head, "", *body, ""])
    digest = hashlib.sha256(whole.encode()).hexdigest()[:12]
    lines = [(v, kernel.batches * (kernel.cols if kernel.varies[v][-1] else 1)) for v in sums if two]
    return KernelSource(
        whole, digest, main.arguments, second.arguments if two else (), blocks * kernel.batches, tuple(lines)
    )


def _docstring(kernel: Kernel, plan: GridPlan) -> str:
    s = plan.schedule
    if plan.style == "loops":
        return f"{plan.style}: tiles of {s.rows} x {kernel.cols}, {s.block} columns at a time, {s.warps} warps."
    parts = f"{len(plan.parts)} parts, " if len(plan.parts) > 1 else ""
    return f"{plan.style}: {parts}tiles of {s.rows} x {s.block * max(1, s.chunks)}, {s.warps} warps."


def put_main(w: FunctionWriter) -> None:
    """The first function: columns, then tiles of rows, one tile or a loop of tiles."""
    kernel, plan, s = w.kernel, w.plan, w.plan.schedule
    tiles = -(-kernel.rows // s.rows)
    wide = ".to(tl.int64)" if kernel.cols > addresses.INT32_MAX else ""
    w.put_batch(plan.blocks if plan.style == "walk" else plan.blocks * plan.programs)
    if plan.style == "tiles":
        blocks = plan.blocks
        if blocks > 1:
            block = w.batch_program if tiles == 1 else f"({w.batch_program} % {blocks})"
            w.put_columns(f"{block}{wide} * {s.block}")
        else:
            w.put_columns("")
        tile = "0" if tiles == 1 else f"{w.batch_program} // {blocks}" if blocks > 1 else w.batch_program
        w.put(f"t = {tile}")
        put_row_tile(w)
        return
    if plan.style == "walk":
        w.put_columns(f"{w.batch_program}{wide} * {s.block}" if plan.blocks > 1 else "")
    elif plan.style == "rows":
        w.put_columns("")
    sums = column_sums(kernel)
    if plan.style != "loops":
        if plan.style != "rows" or row_in_registers.column_values_fit(w):
            w.put_loads(v for v in range(len(kernel.inputs)) if not kernel.varies_by_row(v))
        for value in sums:
            rows, block = s.rows, s.block if kernel.varies[value][-1] else 1
            for chunk in w.chunks_of(value):
                name = f"total_{value}{w.suffix(chunk)}"
                w.put(f"{name} = {w.neutral(w.reduction(value), f'({rows}, {block})')}")
    if plan.programs >= tiles:
        w.put(f"t = {w.program}")
        put_row_tile(w)
    else:
        stages = f", num_stages={s.stages}" if s.stages > 1 and plan.style != "loops" else ""
        with w.block(f"for t in tl.range({w.program}, {tiles}, {plan.programs}{stages}):"):
            put_row_tile(w)
    if sums and plan.sums_in_one_program:
        put_results(w)
    elif plan.style != "loops":
        for value in sums:
            put_partials(w, value)


def put_row_tile(w: FunctionWriter) -> None:
    """One tile of rows."""
    kernel, s = w.kernel, w.plan.schedule
    outer = dict(w.scope)
    rows = f"tl.arange(0, {s.rows})[:, None]"
    wide = ".to(tl.int64)" if kernel.rows > addresses.INT32_MAX else ""
    first = f"t{wide}" if s.rows == 1 else f"t{wide} * {s.rows}"
    w.put(f"r = {first} + {rows}" if kernel.rows > 1 else f"r = {rows}")
    if w.rows_masked:
        w.put(f"rm = r < {kernel.rows}")
    w.put_indices("r")
    if w.plan.style == "loops":
        row_looped.put_passes(w)
    elif w.plan.style == "rows":
        row_in_registers.put_phases(w)
    elif len(w.plan.parts) > 1:
        before = dict(w.scope)
        for number, outputs in enumerate(w.plan.parts):
            with w.block(f"if tl.program_id(1) == {number}:"):
                put_straight_line(w, values_of_outputs(kernel, outputs), outputs)
            w.scope = dict(before)
    else:
        put_straight_line(w, live_values(kernel))
    w.scope = outer


def put_straight_line(w: FunctionWriter, wanted: Collection[int], outputs: Collection[int] | None = None) -> None:
    """Loads, steps in order, and their stores: to some outputs or to all."""
    alive = sorted(v for v in wanted if not w.kernel.in_epilogue[v] or w.is_sum(v))
    w.put_loads(v for v in alive if v < len(w.kernel.inputs))
    for value in alive:
        w.put_step(value)
        w.put_stores(value, outputs=outputs)


def put_partials(w: FunctionWriter, value: int) -> None:
    """Stores an accumulator's sum over the tile to this program's line."""
    varies_by_column = w.kernel.varies[value][-1]
    cols = w.kernel.cols if varies_by_column else 1
    for chunk in w.chunks_of(value):
        column = w.column_names(chunk)[0] if varies_by_column else "tl.zeros((1, 1), tl.int32)"
        mask = w.mask((False, varies_by_column), chunk)
        total = w.reduction(value).triton.format(f"total_{value}{w.suffix(chunk)}")
        address = f"{w.pointer(f'P{value}')} + {w.partial_sum_line} * {cols} + {column}"
        w.put(f"tl.store({address}, {total}{f', mask={mask}' if mask else ''})")


def put_results(w: FunctionWriter) -> None:
    """The finished sums and the epilogue, if no other program has a partial sum."""
    w.finishing = True
    for value in column_sums(w.kernel):
        for chunk in w.chunks_of(value):
            w.define(value, chunk, w.reduction(value).triton.format(f"total_{value}{w.suffix(chunk)}"), "f32")
        w.put_stores(value)
    finish.put_epilogue(w)
