"""The compile gate: templates, generated kernels and bucket kernels must not spill, and must move 16 bytes at a time.

They are compiled for NVIDIA GPUs on a machine without one. Ops run on `meta` tensors while their launches are recorded,
in every variant of the registry and in those that only graphs launch (`match/variants.py`). Each distinct kernel is
then compiled ahead of time, by one process a core, and its machine code is read. Local-memory accesses are spills
(ptxas' register count does not show them); none is allowed on either architecture. The instruction has the width of a
global access. Accesses to a full-size tensor must have 128 bits (with dtypes of several sizes, the narrower dtypes have
as many elements). PTX shows the tensor of an access (`access_width.py`). Accesses that belong to a row or to a program
(statistics, targets, neighbours in partial sums) are counted as `narrow`, and bounded.

Unpadded rows of an odd number of columns cannot be moved 16 bytes at a time. For these (`odd`) only spills are refused;
compiling on a CPU cannot show how slow they are.

    python -m kernels_triton.gate.gate [--arch 90 --arch 80] [--quick]   # JSON lines; exits 1 on a failure

`--quick` is what CI compiles (tests/kernels/test_gate.py): for sm_90 each template in each dtype and variant, its
kernels for long rows, each plan of the generator and two buckets, and one in three of these for sm_80. The full gate
also compiles every width and every combination of operands.
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

from kernels_triton.codegen.schedules import choose_plan, column_sums
from kernels_triton.gate.access_width import narrow_accesses
from kernels_triton.gate.bucket_corpus import LAYOUTS, copy_on_meta
from kernels_triton.gate.corpus import CORPUS
from kernels_triton.gate.gate_rules import DEVICES, problems
from kernels_triton.generated.launcher import launcher
from kernels_triton.ir.row_padding import padded_columns
from kernels_triton.launch import launch, register_limits
from kernels_triton.launch.machine_code import disassemble, machine_code
from kernels_triton.match.variants import variants
from kernels_triton.ops.registry import TEMPLATES, TemplateOp

POINTER_TYPES = {
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
# Vocabularies of an odd number of columns, in rows that `align` has padded: all accesses stay wide.
UNEVEN = [(cols, dtype) for cols in (50257, 128255) for dtype in (torch.bfloat16, torch.float32)]
# Unpadded rows of an odd number of columns, by part of a template's name; below, those for CI.
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
OTHER_COLS = (1024, 8192, 12288, 50304)  # for calls with other operands
NARROW_AND_WIDE = (torch.bfloat16, torch.float32)
SAMPLE = {80: 3}  # `--quick` compiles one kernel in so many
NEARLY = 4  # a full-size tensor has at least 1 / NEARLY of the largest tensor's elements
BATCH = 32  # kernels for one call of the disassembler
SIZES = {"rows": 8192, "batch": 8, "heads": 32, "dim": 128, "half": 64, "channels": 256, "groups": 32}


@dataclass(frozen=True)
class CompileJob:
    """One compilation: a kernel, the types of its arguments, and its constants."""

    template: str
    kernel: str
    cols: int
    signature: tuple[tuple[str, str], ...]
    aligned: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]
    warps: int
    registers: int = 0
    full_size: tuple[str, ...] = ()  # the tensors of nearly the largest size
    odd: bool = False  # unaligned rows: access widths are not judged


def compile_jobs(arch: int, quick: bool = False) -> Iterator[CompileJob]:
    """Every distinct kernel of the registry, of graphs, of the generated corpus and of buckets; with `quick`, fewer."""
    jobs = _distinct_jobs(arch, quick)
    return islice(jobs, 0, None, SAMPLE.get(arch, 1)) if quick else jobs


def _distinct_jobs(arch: int, quick: bool) -> Iterator[CompileJob]:
    distinct_jobs: set[CompileJob] = set()
    odd = (replace(job, odd=True) for job in _odd_jobs(arch, quick))
    for job in chain(_launched_jobs(arch, quick), odd):
        anonymous = replace(job, template="", cols=0)
        if anonymous not in distinct_jobs:
            distinct_jobs.add(anonymous)
            yield job
    plans: set[tuple[str, bool]] = set()
    for name, build in CORPUS.items():
        for cols, dtype in GENERATED:
            kernel = build(SIZES["rows"], cols, dtype)
            plan = (choose_plan(kernel, DEVICES[arch]).style, bool(column_sums(kernel)))
            # Other widths change kernels of the plans rows and loops only. With `quick`, each plan is compiled once.
            wanted = (cols, dtype) == GENERATED[0] or plan not in plans
            if wanted or (not quick and (cols in (64, 4096) or plan[0] in ("rows", "loops"))):
                plans.add(plan)
                yield from generated_jobs(name, cols, dtype, arch)
    for name in list(LAYOUTS)[: 2 if quick else None]:
        yield from bucket_jobs(name, arch)


def _launched_jobs(arch: int, quick: bool) -> Iterator[CompileJob]:
    """The launches of templates from plain calls, and from graphs."""
    yield from _template_jobs(arch, quick)
    for template in TEMPLATES.values():
        for other in template.calls[len(template.variants) :]:
            widths = (512,) if template.name in SHAPED else (1024,) if quick else OTHER_COLS
            for cols in widths:
                for dtype in NARROW_AND_WIDE[: 1 if quick else None]:
                    yield from template_jobs(template, cols, dtype, other, arch)
    for variant in variants():
        if variant.in_ci or not quick:
            for cols in variant.widths[: 1 if quick else None]:
                for dtypes in islice(variant.dtypes(), 1 if quick else None):
                    with _recording(variant.template, cols, arch) as jobs:
                        variant.launch(cols, *dtypes)
                    yield from jobs


def _odd_jobs(arch: int, quick: bool) -> Iterator[CompileJob]:
    """Rows whose columns are moved one by one."""
    for template in TEMPLATES.values():
        cases = ODD.get(template.name, ())
        if not quick and template.name not in SHAPED:
            widths = next((widths for part, widths in ODD_COLS.items() if part in template.name), (1001,))
            cases = tuple(product(widths, NARROW_AND_WIDE))
        for cols, dtype in cases:
            for variant in template.variants[: None if "softmax" in template.name and not quick else 1]:
                yield from template_jobs(template, cols, dtype, variant, arch)
    for variant_of_graph in () if quick else variants():
        for cols, dtype in product(variant_of_graph.odd_widths, NARROW_AND_WIDE):
            with _recording(variant_of_graph.template, cols, arch) as jobs:
                variant_of_graph.launch(cols, dtype, torch.float32)
            yield from jobs


def _template_jobs(arch: int, quick: bool) -> Iterator[CompileJob]:
    for number, template in enumerate(TEMPLATES.values()):
        reduces = any(word in template.name for word in ROW_REDUCTIONS)
        if quick:
            # Other dtypes at a narrow width: the same source, an eighth of the compiler's work.
            picked = [(4096 if dtype == torch.bfloat16 else 1024, dtype) for dtype in template.dtypes]
            picked += [(ROW_COLS[-1], template.dtypes[number % len(template.dtypes)])] * reduces
            variants = template.variants
            calls = [(cols, dtype, variants[position % len(variants)]) for position, (cols, dtype) in enumerate(picked)]
        else:
            calls = [(*case, variant) for case in cases(template, reduces) for variant in template.variants]
        for cols, dtype, variant in calls:
            yield from template_jobs(template, cols, dtype, variant, arch)
        if "cross_entropy" in template.name:
            for cols, dtype in UNEVEN[: 1 if quick else None]:
                yield from template_jobs(template, cols, dtype, template.variants[0], arch, wide=True)


def cases(template: TemplateOp, reduces: bool) -> list[tuple[int, torch.dtype]]:
    """The widths and dtypes that give distinct kernels. Only row reductions need wide rows; float16 is as bfloat16."""
    widths = (512,) if template.name in SHAPED else ROW_COLS if reduces else TILE_COLS
    if "cross_entropy" in template.name:  # vocabularies are larger
        widths = tuple(cols for cols in widths if cols >= 1024)
    return [
        (cols, dtype) for cols in widths for dtype in template.dtypes if dtype != torch.float16 or cols in (512, 4096)
    ]


def template_jobs(
    template: TemplateOp, cols: int, dtype: torch.dtype, variant: Mapping[str, Any], arch: int = 90, wide: bool = False
) -> list[CompileJob]:
    """The launches of one call on `meta` tensors. `wide`: its rows are aligned to 16 bytes."""
    call = template.call(variant, sizes(cols), dtype, "meta")
    if wide:
        logits = call["logits"]
        call["logits"] = logits.new_empty((logits.shape[0], padded_columns(cols)))[:, :cols]
        call |= {"padded": True} if "padded" in signature(template.op).parameters else {}
    with _recording(template.name, cols, arch) as jobs:
        template.op(**call)
    return jobs


@contextmanager
def _recording(template: str, cols: int, arch: int) -> Generator[list[CompileJob]]:
    """Records the launches of the calls in this context, for a GPU of this architecture."""
    jobs: list[CompileJob] = []
    with (
        launch.assuming(DEVICES[arch]),
        launch.recording(lambda record: jobs.append(job_of_launch(template, cols, record))),
    ):
        yield jobs


def sizes(cols: int) -> dict[str, int]:
    """A group norm's columns are the positions of a channel."""
    return {**SIZES, "cols": cols, "space": cols}


def generated_jobs(name: str, cols: int, dtype: torch.dtype, arch: int = 90) -> list[CompileJob]:
    """The launches of one generated kernel of the corpus."""
    with _recording(name, cols, arch) as jobs:
        kernel = CORPUS[name](SIZES["rows"], cols, dtype)
        launcher(kernel)([torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in kernel.inputs])
    return jobs


def bucket_jobs(name: str, arch: int = 90) -> list[CompileJob]:
    """The launches of one bucket of the corpus."""
    with _recording(f"bucket, {name}", 0, arch) as jobs:
        copy_on_meta(LAYOUTS[name]())
    return jobs


def job_of_launch(template: str, cols: int, record: launch.Launch) -> CompileJob:
    names = launch.kernel(record.name).arg_names
    signature: dict[str, str] = {}
    constants: dict[str, Any] = dict(record.constants)
    aligned: list[str] = []
    for name, value in zip(names, record.args, strict=False):
        if value is None or (type(value) is int and value == 1):  # as Triton's launcher specialises it
            constants[name] = value
        elif isinstance(value, Tensor):
            signature[name] = POINTER_TYPES[value.dtype]
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
        for name, value in zip(names, record.args, strict=False)
        if name in signature and isinstance(value, Tensor)
    }
    full = tuple(name for name, count in elements.items() if NEARLY * count >= max(elements.values()))
    launch_arguments = (ordered, tuple(aligned), tuple(sorted(constants.items())), record.warps, record.registers, full)
    return CompileJob(template, record.name, cols, *launch_arguments)


def _elements(x: Tensor) -> int:
    """The number of distinct elements in memory."""
    return math.prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride)


# Flags that a schedule chooses; other flags and strings belong to the computation.
SCHEDULED = ("AGAIN", "HOLD", "ONCE", "PAIRS")
Variant = tuple[str, tuple[tuple[str, str], ...], tuple[tuple[str, Any], ...]]


def variant_of_job(job: CompileJob) -> Variant:
    """The kernel without its sizes: its tensors with their dtypes, and its constants that are flags or strings."""
    tensors = tuple((name, kind) for name, kind in job.signature if kind.startswith("*"))
    words = [(name, value) for name, value in job.constants if isinstance(value, (bool, str))]
    return job.kernel, tensors, tuple((name, value) for name, value in words if name not in SCHEDULED)


def known_variants(arch: int = 90) -> set[Variant]:
    """The variants of templates that the full gate compiles."""
    return {variant_of_job(job) for job in _launched_jobs(arch, quick=False)}


def compile_job(job: CompileJob, arch: int) -> Any:
    """Triton's compiled kernel, with the register limit of a launch. The GPU need not be present."""
    triton, backends, compiler = (import_module(f"triton{part}") for part in ("", ".backends.compiler", ".compiler"))
    function = launch.kernel(job.kernel)
    attributes = {(function.arg_names.index(name),): [["tt.divisibility", 16]] for name in job.aligned}
    program = compiler.ASTSource(function, dict(job.signature), dict(job.constants), attributes)
    target = backends.GPUTarget("cuda", arch, 32)

    def built(registers: int) -> Any:
        return triton.compile(program, target=target, options=launch.compile_options(job.warps, registers))

    return register_limits.compile_without_spills(built, job.warps, job.registers)[0]


def measure_job(job: CompileJob, arch: int) -> dict[str, Any]:
    return measure_jobs([job], arch)[0]


def measure_jobs(batch: Sequence[CompileJob], arch: int) -> list[dict[str, Any]]:
    """The gate's lines: registers, spills, shared memory, global accesses by width, and problems."""
    kernels = [compile_job(job, arch) for job in batch]
    codes = [machine_code(kernel.asm["cubin"]) for kernel in kernels]
    lines: list[dict[str, Any]] = []
    texts = disassemble([code.code for code in codes], arch)
    for job, kernel, code, instructions in zip(batch, kernels, codes, texts, strict=True):
        names = [name for line in instructions for name in re.findall(r"\b(?:LDL|STL|LDG|STG|LDGSTS)\b[\w.]*", line)]
        widths = Counter(_access_bits(name) for name in names if name[:3] not in ("LDL", "STL"))
        line = {
            "template": job.template,
            "kernel": job.kernel,
            "arch": arch,
            "cols": job.cols,
            "types": sorted({kind[1:] for _, kind in job.signature if kind.startswith("*")}),
            "constants": {k: v for k, v in job.constants if v is not None and k.isupper() and k != "COLS"},
            "warps": job.warps,
            "registers": code.registers,
            "limit": kernel.metadata.maxnreg or 0,
            "stack": code.stack,
            "spills": sum(name[:3] in ("LDL", "STL") for name in names),
            "shared": kernel.metadata.shared,
            "accesses": {str(width): widths[width] for width in sorted(widths)},
            "short": narrow_accesses(kernel.asm["ptx"], job.signature, job.full_size),
            "odd": job.odd,
        }
        lines.append({**line, "problems": problems(line)})
    return lines


def _access_bits(kind: str) -> int:
    for text, bits in ((".128", 128), (".64", 64), (".U16", 16), (".S16", 16), (".U8", 8), (".S8", 8)):
        if text in kind:
            return bits
    return 32


def gate_lines(archs: Iterable[int], quick: bool, jobs: int) -> Iterator[dict[str, Any]]:
    """The lines of all kernels; those of a batch in order. Worker processes are forked, so generated kernels are in
    memory."""
    todo: list[tuple[list[CompileJob], int]] = []
    for arch in archs:
        results = list(compile_jobs(arch, quick))
        todo += [(results[start : start + BATCH], arch) for start in range(0, len(results), BATCH)]
    if jobs <= 1:
        for batch in todo:
            yield from _measure_batch(batch)
        return
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        for results in pool.imap(_measure_batch, todo):
            yield from results


def _measure_batch(batch: tuple[list[CompileJob], int]) -> list[dict[str, Any]]:
    """A kernel that does not compile fails alone, not with its batch."""
    try:
        return measure_jobs(*batch)
    except Exception:
        return [line for job in batch[0] for line in _measure_alone(job, batch[1])]


def _measure_alone(job: CompileJob, arch: int) -> list[dict[str, Any]]:
    try:
        return measure_jobs([job], arch)
    except Exception as refused:
        description = {"template": job.template, "kernel": job.kernel, "arch": arch, "cols": job.cols}
        return [{**description, "problems": [f"does not compile: {refused!r}"[:400]]}]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--arch", type=int, action="append", choices=(90, 80), help="both by default")
    parser.add_argument("--quick", action="store_true", help="what CI compiles")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes; one a core by default")
    options = parser.parse_args()
    failed = total = 0
    for line in gate_lines(options.arch or (90, 80), options.quick, options.jobs):
        print(json.dumps(line), flush=True)
        total += 1
        failed += bool(line["problems"])
    print(json.dumps({"kernels": total, "failed": failed}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
