"""From a kernel and a plan to Triton's source: one function over the rows, and a second for sums over rows.

    c = tl.arange(0, 4096)[None, :]                  # columns of the tile
    for t in ...:                                    # tiles of rows
        r = t * ROWS + tl.arange(0, ROWS)[:, None]
        loads; steps in order; stores; sums over rows into accumulators
    accumulators to this program's line of partial sums, or what follows from them where no other program has any

What has nothing in common is apart (`apart.py`): each part of it is in an `if` of its own, by `tl.program_id(1)`.

An output may lie over an input where each element that is stored is computed from the very element that it replaces
(`schedules.in_place`): whatever the order of the lines, its load comes first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass

from kernels_triton.fused import addresses, finish, loops, resident
from kernels_triton.fused.apart import values
from kernels_triton.fused.expressions import functions
from kernels_triton.fused.kernel import Kernel
from kernels_triton.fused.schedules import Plan, column_sums, needed
from kernels_triton.fused.writer import Writer
from kernels_triton.rows import Schedule


@dataclass(frozen=True)
class Source:
    """The functions `NAME` and, with sums over rows that programs share, `NAME_finish`, and what each is called with.

    Arguments: inputs `X0`.., outputs `Y0`.., and `P7`, the lines of partial sums of value %7. `partials` says of each
    such value how many columns a program's lines have, those of all points of the batch dims together.
    """

    text: str
    digest: str
    arguments: tuple[str, ...]
    finish_arguments: tuple[str, ...]
    finish_blocks: int
    partials: tuple[tuple[int, int], ...]


def generate(kernel: Kernel, plan: Plan) -> Source:
    main = Writer(kernel, plan)
    write(main)
    sums = column_sums(kernel)
    block = finish.block(plan.programs, kernel.cols)
    late_columns = any(kernel.varies[v][-1] for v in needed(kernel) if kernel.late[v])
    blocks = -(-kernel.cols // block) if late_columns else 1
    second = Writer(kernel, Plan("tiles", Schedule(block), blocks), finishing=True)
    body = main.function(kernel.name, _docstring(kernel, plan))
    two = bool(sums) and not plan.alone
    if two:
        finish.write(second, plan.programs, blocks)
        about = f"The {plan.programs} lines of partial sums, added in order, and what follows from the sums."
        body += ["", "", *second.function(f"{kernel.name}_finish", about)]
    title = f"{kernel.name} over {' x '.join(map(str, kernel.space))}: {kernel.bytes_moved:,} bytes at least."
    head = [f'"""{title}"""', "", "import triton", "import triton.language as tl", ""]
    if called := sorted(functions(kernel) | main.called):
        head += [f"from kernels_triton.kernels.functions import {', '.join(called)}", ""]
    whole = "\n".join([*head, "", *body, ""])
    digest = hashlib.sha256(whole.encode()).hexdigest()[:12]
    lines = [(v, kernel.batches * (kernel.cols if kernel.varies[v][-1] else 1)) for v in sums if two]
    return Source(whole, digest, main.arguments, second.arguments if two else (), blocks * kernel.batches, tuple(lines))


def _docstring(kernel: Kernel, plan: Plan) -> str:
    s = plan.schedule
    if plan.style == "loops":
        return f"{plan.style}: tiles of {s.rows} x {kernel.cols}, {s.block} columns at a time, {s.warps} warps."
    parts = f"{len(plan.parts)} parts, " if len(plan.parts) > 1 else ""
    return f"{plan.style}: {parts}tiles of {s.rows} x {s.block * max(1, s.chunks)}, {s.warps} warps."


def write(w: Writer) -> None:
    """The first function: columns, then tiles of rows, one or in a loop."""
    kernel, plan, s = w.kernel, w.plan, w.plan.schedule
    tiles = -(-kernel.rows // s.rows)
    wide = ".to(tl.int64)" if kernel.cols > addresses.LIMIT else ""
    w.put_batch(plan.blocks if plan.style == "walk" else plan.blocks * plan.programs)
    if plan.style == "tiles":
        blocks = plan.blocks
        if blocks > 1:
            block = w.first if tiles == 1 else f"({w.first} % {blocks})"
            w.put_columns(f"{block}{wide} * {s.block}")
        else:
            w.put_columns("")
        tile = "0" if tiles == 1 else f"{w.first} // {blocks}" if blocks > 1 else w.first
        w.put(f"t = {tile}")
        row_body(w)
        return
    if plan.style == "walk":
        w.put_columns(f"{w.first}{wide} * {s.block}" if plan.blocks > 1 else "")
    elif plan.style == "rows":
        w.put_columns("")
    sums = column_sums(kernel)
    if plan.style != "loops":
        if plan.style != "rows" or resident.columns_held(w):
            w.load(v for v in range(len(kernel.inputs)) if not kernel.of_rows(v))
        for value in sums:
            rows, block = s.rows, s.block if kernel.varies[value][-1] else 1
            for chunk in w.chunks_of(value):
                name = f"total_{value}{w.suffix(chunk)}"
                w.put(f"{name} = {w.neutral(w.reduction(value), f'({rows}, {block})')}")
    if plan.programs >= tiles:
        w.put(f"t = {w.program}")
        row_body(w)
    else:
        stages = f", num_stages={s.stages}" if s.stages > 1 and plan.style != "loops" else ""
        with w.block(f"for t in tl.range({w.program}, {tiles}, {plan.programs}{stages}):"):
            row_body(w)
    if sums and plan.alone:
        put_results(w)
    elif plan.style != "loops":
        for value in sums:
            put_partials(w, value)


def row_body(w: Writer) -> None:
    """One tile of rows."""
    kernel, s = w.kernel, w.plan.schedule
    outer = dict(w.scope)
    rows = f"tl.arange(0, {s.rows})[:, None]"
    wide = ".to(tl.int64)" if kernel.rows > addresses.LIMIT else ""
    first = f"t{wide}" if s.rows == 1 else f"t{wide} * {s.rows}"
    w.put(f"r = {first} + {rows}" if kernel.rows > 1 else f"r = {rows}")
    if w.rows_masked:
        w.put(f"rm = r < {kernel.rows}")
    w.put_indices("r")
    if w.plan.style == "loops":
        loops.passes(w)
    elif w.plan.style == "rows":
        resident.phases(w)
    elif len(w.plan.parts) > 1:
        before = dict(w.scope)
        for number, outputs in enumerate(w.plan.parts):
            with w.block(f"if tl.program_id(1) == {number}:"):
                straight(w, values(kernel, outputs), outputs)
            w.scope = dict(before)
    else:
        straight(w, needed(kernel))
    w.scope = outer


def straight(w: Writer, wanted: Collection[int], outputs: Collection[int] | None = None) -> None:
    """Loads; steps in order, and what is stored of them, in some outputs or in all."""
    alive = sorted(v for v in wanted if not w.kernel.late[v] or w.is_sum(v))
    w.load(v for v in alive if v < len(w.kernel.inputs))
    for value in alive:
        w.compute(value)
        w.store(value, outputs=outputs)


def put_partials(w: Writer, value: int) -> None:
    """An accumulator's sum over the tile, as this program's line."""
    varies = w.kernel.varies[value][-1]
    cols = w.kernel.cols if varies else 1
    for chunk in w.chunks_of(value):
        column = w.column_names(chunk)[0] if varies else "tl.zeros((1, 1), tl.int32)"
        mask = w.mask((False, varies), chunk)
        total = w.reduction(value).triton.format(f"total_{value}{w.suffix(chunk)}")
        at = f"{w.pointer(f'P{value}')} + {w.line} * {cols} + {column}"
        w.put(f"tl.store({at}, {total}{f', mask={mask}' if mask else ''})")


def put_results(w: Writer) -> None:
    """The sums themselves, where no other program has a part of them, and what follows from them."""
    w.finishing = True
    for value in column_sums(w.kernel):
        for chunk in w.chunks_of(value):
            w.name(value, chunk, w.reduction(value).triton.format(f"total_{value}{w.suffix(chunk)}"), "f32")
        w.store(value)
    finish.follow(w)
