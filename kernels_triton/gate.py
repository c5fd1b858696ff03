"""The compile gate: every template, and corpora of generated kernels and of buckets, compiled for NVIDIA GPUs on a
machine without one, must not spill and must move its data 16 bytes at a time.

Ops run on `meta` tensors while their launches are recorded, in every variant of the registry and in those that graphs
alone launch (`templates/variants.py`); each distinct kernel is then compiled ahead of time, by as many processes as
there are cores, and its machine code read: local-memory accesses are spills (ptxas' register count does not show them),
of which none is let pass on either architecture, and the width of global accesses is in the instruction. A full-size
tensor may have no access narrower than 128 bits (of dtypes of several sizes, the others as many elements): whose an
access is, PTX tells (`moved.py`). What belongs to a row or to a program (statistics, targets, partial sums' neighbours)
is counted as `narrow` and bounded.

Rows of an odd number of columns, which nobody has padded, cannot be moved 16 bytes at a time: of them only spills are
refused (`odd`), and a CPU that compiles them cannot tell how slow they are.

    python -m kernels_triton.gate [--arch 90 --arch 80] [--quick]      # JSON lines, one a kernel; exits 1 on a failure

`--quick` is what CI compiles (tests/kernels/test_gate.py): for sm_90 each template in each dtype and variant, its
kernels for long rows, each plan of the generator and two buckets, and one in three of these for sm_80. All of it goes
through every width, and every combination of operands, as well.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import re
import sys
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from inspect import signature
from itertools import chain, islice, product
from typing import Any

import torch
from torch import Tensor

from kernels_triton import launch, spills
from kernels_triton.bucket.corpus import LAYOUTS, launched
from kernels_triton.fused.behind import end
from kernels_triton.fused.corpus import CORPUS
from kernels_triton.fused.launcher import launcher
from kernels_triton.fused.schedules import choose, column_sums
from kernels_triton.machine_code import disassembled, machine_code
from kernels_triton.moved import short
from kernels_triton.registry import TEMPLATES, Template
from kernels_triton.templates.variants import variants
from kernels_triton.verdict import DEVICES, problems

POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.bool: "*i1",
}
ROW_COLS = (64, 1024, 4096, 8192, 12288, 16384, 50304, 131072)
TILE_COLS = (64, 1024, 4096)
GENERATED = [
    (cols, dtype) for cols in (4096, 64, 1024, 8192, 12288, 50304) for dtype in (torch.bfloat16, torch.float32)
]
# Vocabularies of an odd number of columns, in rows that `align` has padded: nothing is narrower for it.
UNEVEN = [(cols, dtype) for cols in (50257, 128255) for dtype in (torch.bfloat16, torch.float32)]
# Rows that nobody has padded: of templates by a part of their names, and of some for CI.
ODD_COLS = {"cross_entropy": (32001, 50257, 128257), "norm": (1001, 8191, 11001), "softmax": (1001, 8191, 11001)}
ODD = {
    "cross_entropy": ((32001, torch.bfloat16), (128257, torch.bfloat16)),
    "layer_norm_backward": ((11001, torch.bfloat16),),
    "rms_norm_backward": ((8191, torch.float32),),
    "add_layer_norm": ((8191, torch.bfloat16),),
    "softmax": ((11001, torch.bfloat16),),
}
SHAPED = ("rope", "adamw")  # ops whose shapes have no columns
ROW_REDUCTIONS = ("norm", "softmax", "cross_entropy")
OTHER_COLS = (1024, 8192, 12288, 50304)  # of calls with other operands
NARROW_AND_WIDE = (torch.bfloat16, torch.float32)
SAMPLE = {80: 3}  # one in so many is compiled quickly
NEARLY = 4  # of the largest tensor, a full-size one has one element in so many
BATCH = 32  # kernels that are disassembled at once
SIZES = {"rows": 8192, "batch": 8, "heads": 32, "dim": 128, "half": 64, "channels": 256, "groups": 32}


@dataclass(frozen=True)
class Source:
    """What one compilation needs: a kernel, the types of its arguments, and its constants."""

    template: str
    kernel: str
    cols: int
    signature: tuple[tuple[str, str], ...]
    aligned: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]
    warps: int
    registers: int = 0
    full: tuple[str, ...] = ()  # the tensors that are as large as the largest, nearly
    odd: bool = False  # rows begin anywhere: how widely they are moved is not judged


def sources(arch: int, quick: bool = False) -> Iterator[Source]:
    """Every distinct kernel of the registry, of graphs, of the generator's corpus, of buckets; quickly, fewer."""
    found = _distinct(arch, quick)
    return islice(found, 0, None, SAMPLE.get(arch, 1)) if quick else found


def _distinct(arch: int, quick: bool) -> Iterator[Source]:
    seen: set[Source] = set()
    odd = (replace(source, odd=True) for source in _odd(arch, quick))
    for source in chain(_launched(arch, quick), odd):
        anonymous = replace(source, template="", cols=0)
        if anonymous not in seen:
            seen.add(anonymous)
            yield source
    plans: set[tuple[str, bool]] = set()
    for name, build in CORPUS.items():
        for cols, dtype in GENERATED:
            kernel = build(SIZES["rows"], cols, dtype)
            plan = (choose(kernel, DEVICES[arch]).style, bool(column_sums(kernel)))
            # Of other widths only rows and loops over them are other kernels; quickly, what no kernel was before.
            wanted = (cols, dtype) == GENERATED[0] or plan not in plans
            if wanted or (not quick and (cols in (64, 4096) or plan[0] in ("rows", "loops"))):
                plans.add(plan)
                yield from generated(name, cols, dtype, arch)
    for name in list(LAYOUTS)[: 2 if quick else None]:
        yield from bucketed(name, arch)


def _launched(arch: int, quick: bool) -> Iterator[Source]:
    """What templates launch: by plain calls, and by graphs."""
    yield from _templates(arch, quick)
    for template in TEMPLATES.values():
        for other in template.calls[len(template.variants) :]:
            widths = (512,) if template.name in SHAPED else (1024,) if quick else OTHER_COLS
            for cols in widths:
                for dtype in NARROW_AND_WIDE[: 1 if quick else None]:
                    yield from recorded(template, cols, dtype, other, arch)
    for one in variants():
        if one.shown or not quick:
            for cols in one.widths[: 1 if quick else None]:
                for dtypes in islice(one.dtypes(), 1 if quick else None):
                    with _recording(one.template, cols, arch) as found:
                        one.launch(cols, *dtypes)
                    yield from found


def _odd(arch: int, quick: bool) -> Iterator[Source]:
    """Rows whose columns are moved one by one."""
    for template in TEMPLATES.values():
        cases = ODD.get(template.name, ())
        if not quick and template.name not in SHAPED:
            widths = next((widths for part, widths in ODD_COLS.items() if part in template.name), (1001,))
            cases = tuple(product(widths, NARROW_AND_WIDE))
        for cols, dtype in cases:
            for variant in template.variants[: None if "softmax" in template.name and not quick else 1]:
                yield from recorded(template, cols, dtype, variant, arch)
    for one in () if quick else variants():
        for cols, dtype in product(one.odd, NARROW_AND_WIDE):
            with _recording(one.template, cols, arch) as found:
                one.launch(cols, dtype, torch.float32)
            yield from found


def _templates(arch: int, quick: bool) -> Iterator[Source]:
    for number, template in enumerate(TEMPLATES.values()):
        reduces = any(word in template.name for word in ROW_REDUCTIONS)
        if quick:
            # Of the other dtypes narrower ones: as many lines of source, an eighth of the work for the compiler.
            picked = [(4096 if dtype == torch.bfloat16 else 1024, dtype) for dtype in template.dtypes]
            picked += [(ROW_COLS[-1], template.dtypes[number % len(template.dtypes)])] * reduces
            variants = template.variants
            calls = [(cols, dtype, variants[at % len(variants)]) for at, (cols, dtype) in enumerate(picked)]
        else:
            calls = [(*case, variant) for case in cases(template, reduces) for variant in template.variants]
        for cols, dtype, variant in calls:
            yield from recorded(template, cols, dtype, variant, arch)
        if "cross_entropy" in template.name:
            for cols, dtype in UNEVEN[: 1 if quick else None]:
                yield from recorded(template, cols, dtype, template.variants[0], arch, wide=True)


def cases(template: Template, reduces: bool) -> list[tuple[int, torch.dtype]]:
    """The widths and dtypes that make other kernels: wide rows only where a row is reduced, float16 is as bfloat16."""
    widths = (512,) if template.name in SHAPED else ROW_COLS if reduces else TILE_COLS
    if "cross_entropy" in template.name:  # no vocabulary is so small
        widths = tuple(cols for cols in widths if cols >= 1024)
    return [
        (cols, dtype) for cols in widths for dtype in template.dtypes if dtype != torch.float16 or cols in (512, 4096)
    ]


def recorded(
    template: Template, cols: int, dtype: torch.dtype, variant: Mapping[str, Any], arch: int = 90, wide: bool = False
) -> list[Source]:
    """The launches of one call on `meta` tensors. `wide`: its rows begin with 16 bytes."""
    call = template.call(variant, sizes(cols), dtype, "meta")
    if wide:
        logits = call["logits"]
        call["logits"] = logits.new_empty((logits.shape[0], end(cols)))[:, :cols]
        call |= {"padded": True} if "padded" in signature(template.op).parameters else {}
    with _recording(template.name, cols, arch) as found:
        template.op(**call)
    return found


@contextmanager
def _recording(template: str, cols: int, arch: int) -> Generator[list[Source]]:
    """The launches of what is called within, as for a GPU of this architecture."""
    found: list[Source] = []
    with launch.assuming(DEVICES[arch]), launch.recording(lambda one: found.append(source_of(template, cols, one))):
        yield found


def sizes(cols: int) -> dict[str, int]:
    """A group norm's columns are the positions of a channel."""
    return {**SIZES, "cols": cols, "space": cols}


def generated(name: str, cols: int, dtype: torch.dtype, arch: int = 90) -> list[Source]:
    """The launches of one generated kernel of the corpus."""
    with _recording(name, cols, arch) as found:
        kernel = CORPUS[name](SIZES["rows"], cols, dtype)
        launcher(kernel)([torch.empty(one.shape, dtype=one.dtype, device="meta") for one in kernel.inputs])
    return found


def bucketed(name: str, arch: int = 90) -> list[Source]:
    """The launches of one bucket of the corpus."""
    with _recording(f"bucket, {name}", 0, arch) as found:
        launched(LAYOUTS[name]())
    return found


def source_of(template: str, cols: int, one: launch.Launch) -> Source:
    names = launch.kernel(one.name).arg_names
    signature: dict[str, str] = {}
    constants: dict[str, Any] = dict(one.constants)
    aligned: list[str] = []
    for name, value in zip(names, one.args, strict=False):
        if value is None or (type(value) is int and value == 1):  # as Triton's launcher specialises
            constants[name] = value
        elif isinstance(value, Tensor):
            signature[name] = POINTERS[value.dtype]
            if value.storage_offset() * value.element_size() % 16 == 0:
                aligned.append(name)
        elif isinstance(value, int):
            signature[name] = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
            if value % 16 == 0:
                aligned.append(name)
        else:
            signature[name] = "fp32"
    signature |= dict.fromkeys(constants, "constexpr")
    ordered = tuple((name, signature[name]) for name in names)
    elements = {
        name: _elements(value)
        for name, value in zip(names, one.args, strict=False)
        if name in signature and isinstance(value, Tensor)
    }
    full = tuple(name for name, count in elements.items() if NEARLY * count >= max(elements.values()))
    told = (ordered, tuple(aligned), tuple(sorted(constants.items())), one.warps, one.registers, full)
    return Source(template, one.name, cols, *told)


def _elements(x: Tensor) -> int:
    """That lie in different places."""
    return math.prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride)


# Constants that a schedule chooses; other flags and words are of what is computed.
SCHEDULED = ("AGAIN", "HOLD", "ONCE", "PAIRS")
Variant = tuple[str, tuple[tuple[str, str], ...], tuple[tuple[str, Any], ...]]


def variant_of(source: Source) -> Variant:
    """The kernel less its sizes: which tensors of which dtype there are, and what flags and words its constants are."""
    tensors = tuple((name, kind) for name, kind in source.signature if kind.startswith("*"))
    words = [(name, value) for name, value in source.constants if isinstance(value, (bool, str))]
    return source.kernel, tensors, tuple((name, value) for name, value in words if name not in SCHEDULED)


def known(arch: int = 90) -> set[Variant]:
    """The variants of templates that all of the gate compiles."""
    return {variant_of(source) for source in _launched(arch, quick=False)}


def compiled(source: Source, arch: int) -> Any:
    """Triton's compiled kernel for a GPU that need not be there, with the limit of registers that a launch gives it."""
    triton, backends, compiler = (import_module(f"triton{part}") for part in ("", ".backends.compiler", ".compiler"))
    function = launch.kernel(source.kernel)
    attributes = {(function.arg_names.index(name),): [["tt.divisibility", 16]] for name in source.aligned}
    program = compiler.ASTSource(function, dict(source.signature), dict(source.constants), attributes)
    target = backends.GPUTarget("cuda", arch, 32)

    def built(registers: int) -> Any:
        return triton.compile(program, target=target, options=launch.options(source.warps, registers))

    return spills.without(built, source.warps, source.registers)[0]


def measure(source: Source, arch: int) -> dict[str, Any]:
    return measured([source], arch)[0]


def measured(batch: Sequence[Source], arch: int) -> list[dict[str, Any]]:
    """The gate's lines: registers, spills, shared memory, global accesses by width, and what is wrong."""
    kernels = [compiled(source, arch) for source in batch]
    codes = [machine_code(kernel.asm["cubin"]) for kernel in kernels]
    lines: list[dict[str, Any]] = []
    texts = disassembled([made.code for made in codes], arch)
    for source, kernel, made, instructions in zip(batch, kernels, codes, texts, strict=True):
        names = [name for line in instructions for name in re.findall(r"\b(?:LDL|STL|LDG|STG|LDGSTS)\b[\w.]*", line)]
        widths = Counter(_width(name) for name in names if name[:3] not in ("LDL", "STL"))
        line = {
            "template": source.template,
            "kernel": source.kernel,
            "arch": arch,
            "cols": source.cols,
            "types": sorted({kind[1:] for _, kind in source.signature if kind.startswith("*")}),
            "constants": {k: v for k, v in source.constants if v is not None and k.isupper() and k != "COLS"},
            "warps": source.warps,
            "registers": made.registers,
            "limit": kernel.metadata.maxnreg or 0,
            "stack": made.stack,
            "spills": sum(name[:3] in ("LDL", "STL") for name in names),
            "shared": kernel.metadata.shared,
            "accesses": {str(width): widths[width] for width in sorted(widths)},
            "short": short(kernel.asm["ptx"], source.signature, source.full),
            "odd": source.odd,
        }
        lines.append({**line, "problems": problems(line)})
    return lines


def _width(kind: str) -> int:
    for text, bits in ((".128", 128), (".64", 64), (".U16", 16), (".S16", 16), (".U8", 8), (".S8", 8)):
        if text in kind:
            return bits
    return 32


def lines(archs: Iterable[int], quick: bool, jobs: int) -> Iterator[dict[str, Any]]:
    """Every kernel's, those of a batch in order. Processes are forked: what the generator wrote is in memory."""
    todo: list[tuple[list[Source], int]] = []
    for arch in archs:
        found = list(sources(arch, quick))
        todo += [(found[at : at + BATCH], arch) for at in range(0, len(found), BATCH)]
    if jobs <= 1:
        for batch in todo:
            yield from _batch(batch)
        return
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        for found in pool.imap(_batch, todo):
            yield from found


def _batch(batch: tuple[list[Source], int]) -> list[dict[str, Any]]:
    """A kernel that does not compile fails alone."""
    try:
        return measured(*batch)
    except Exception:
        return [one for source in batch[0] for one in _alone(source, batch[1])]


def _alone(source: Source, arch: int) -> list[dict[str, Any]]:
    try:
        return measured([source], arch)
    except Exception as refused:
        told = {"template": source.template, "kernel": source.kernel, "arch": arch, "cols": source.cols}
        return [{**told, "problems": [f"does not compile: {refused!r}"[:400]]}]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--arch", type=int, action="append", choices=(90, 80), help="both by default")
    parser.add_argument("--quick", action="store_true", help="what CI compiles")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes; one a core by default")
    options = parser.parse_args()
    failed = total = 0
    for line in lines(options.arch or (90, 80), options.quick, options.jobs):
        print(json.dumps(line), flush=True)
        total += 1
        failed += bool(line["problems"])
    print(json.dumps({"kernels": total, "failed": failed}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
