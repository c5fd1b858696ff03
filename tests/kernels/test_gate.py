"""The compile gate: what CI compiles of it passes on two architectures, it refuses what it is there to refuse, and what
programs launch is among what it compiles.

For sm_90 every template in every dtype and variant, its kernels for long rows, and every plan of the generator: one in
sixteen of these in all runs, the others, and those for sm_80, with the long tests. The rest, every width and
every combination of operands, is `make gate-kernels`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from written import written

from benchmarks.fusion_census import MODELS, sizes
from kernels_triton import ops
from kernels_triton.codegen.schedules import choose_plan, column_sums
from kernels_triton.gate import access_width, gate
from kernels_triton.gate.corpus import CORPUS
from kernels_triton.ir.text import parse
from kernels_triton.launch.launch import HAS_TRITON, Launch, generated_kernels, recording
from kernels_triton.match.op import OPS, kernel_of
from kernels_triton.match.source import recorded_launches
from kernels_triton.match.variants import variants
from kernels_triton.ops.registry import TEMPLATES
from shardc.ir.graph import Graph
from shardc.passes.fusion.fuse import fuse
from tests import before_kernels

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed: nothing can be compiled here")
PARTS = 16
BUCKETS = ("bucket.pack", "bucket.unpack")
PLANS = {  # the generator's plans that are compiled: a style, with sums over rows or without
    ("tiles", False),
    ("walk", True),
    *((style, sums) for style in ("rows", "loops") for sums in (True, False)),
}
# Kernels for which a template is faster than the generator's. RMSNorms and gated activations have none in graphs.
WITH_LAYER_NORMS = {"add_layer_norm", "layer_norm_backward"}
TEMPLATES_OF = {
    "gpt2": {*WITH_LAYER_NORMS, "cross_entropy"},
    "llama": {"cross_entropy"},
    "bert": WITH_LAYER_NORMS,
    "t5": {"cross_entropy"},
    "vit": WITH_LAYER_NORMS,
}


@cache
def quick(arch: int) -> list[gate.CompileJob]:
    return list(gate.compile_jobs(arch, quick=True))


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, PARTS))])
@pytest.mark.parametrize("arch", [90, pytest.param(80, marks=pytest.mark.long)])
def test_kernels_pass(arch: int, part: int) -> None:
    lines = gate.measure_jobs(quick(arch)[part::PARTS], arch)
    assert [line for line in lines if line["problems"]] == []


def test_nothing_is_left_out() -> None:
    """Every kernel of every file, every template in every dtype, every variant that graphs show, every plan of the
    generator with and without sums, a bucket both ways."""
    arch, found = 90, quick(90)
    assert {one.kernel.rpartition(".")[0] for one in found if one.kernel.startswith("bucket.")} == set(BUCKETS)
    assert written() == {one.kernel for one in found if one.kernel not in generated_kernels}
    for template in TEMPLATES.values():
        types = {kind for one in found if one.template == template.name for _, kind in one.signature}
        assert types >= {gate.POINTER_TYPES[dtype] for dtype in template.dtypes}, template.name
    there = {gate.variant_of_job(one) for one in found}
    for one in variants():
        if one.in_ci:
            launched: list[gate.CompileJob] = []
            with recording(lambda it, to=launched: to.append(gate.job_of_launch("", 0, it))):
                one.launch(one.widths[0], *next(one.dtypes()))
            assert {gate.variant_of_job(source) for source in launched} <= there, one
    names, device = {one.kernel for one in found}, gate.DEVICES[arch]
    plans: set[tuple[str, bool]] = set()
    for name, build in CORPUS.items():
        for cols, dtype in gate.GENERATED:
            kernel = build(gate.SIZES["rows"], cols, dtype)
            if {one.kernel for one in gate.generated_jobs(name, cols, dtype, arch)} <= names:
                plans.add((choose_plan(kernel, device).style, bool(column_sums(kernel))))
    assert plans == PLANS


@cache
def known() -> set[gate.Variant]:
    return gate.known_variants()


def before_fusion(model: str, computes: str) -> Graph:
    """A toy's joint graph as `fuse` is given it: by a plan's precision, or of a model that is 16-bit throughout."""
    with torch.device("meta"):
        made, batch = MODELS[model](sizes(toy=True), 2)
    plan = {"precision": computes}
    if computes == "pure bf16":
        made, plan = made.to(torch.bfloat16), {}
        batch = {k: x.to(torch.bfloat16) if x.is_floating_point() else x for k, x in batch.items()}
    return before_kernels.compiled(made, batch, plan, mesh="dp=1")[1]


@pytest.mark.sampled(15)
@pytest.mark.parametrize("computes", ["bf16", "pure bf16", "fp16"])
@pytest.mark.parametrize("model", MODELS)
def test_what_programs_launch_is_compiled(model: str, computes: str) -> None:
    """Each template's launch in a program's fused graph is a variant, operands and dtypes and all, of the gate's, and
    each generated kernel is by a plan that the gate compiles."""
    names: dict[object, str] = {target: name for name, target in OPS.items()}
    launched: dict[str, set[gate.Variant]] = {}
    plans: set[tuple[str, bool]] = set()
    for call in fuse(before_fusion(model, computes)).calls():
        kernel = kernel_of(call.target, call.args)
        if call.target in names:
            found = launched.setdefault(names[call.target], set())
            found |= {
                gate.variant_of_job(gate.job_of_launch("", 0, one))
                for one in recorded_launches(parse(str(call.args[1])))
            }
        elif kernel is not None:
            plans.add((choose_plan(kernel, gate.DEVICES[90]).style, bool(column_sums(kernel))))
    # In fp16 the gradient of these losses is of two scalars, the loss scale and the count: of the generator's kernels.
    scaled = {"cross_entropy"} if computes == "fp16" and model in ("gpt2", "llama") else set[str]()
    assert launched.keys() == TEMPLATES_OF[model] - scaled
    assert set[gate.Variant]().union(*launched.values()) - known() == set()
    assert {("tiles", False), ("rows", False)} <= plans <= PLANS


@pytest.mark.parametrize(
    "wider",
    [pytest.param({"weight": "f32[cols]"}, marks=pytest.mark.long), {"residual_grad": "f32[rows, cols]"}],
    ids=str,
)
def test_what_is_wider_than_x_fits_in_shared_memory(wider: dict[str, str]) -> None:
    """12,288 columns of bfloat16 fill it three deep: with a float32 weight or gradient beside, room is for less."""
    for source in gate.template_jobs(TEMPLATES["layer_norm_backward"], 12288, torch.bfloat16, wider):
        assert gate.measure_job(source, 90)["problems"] == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["swiglu_backward", "rope"])
def test_parts_of_short_rows_are_as_wide(name: str) -> None:
    """Outputs in two parts have tiles of half the size, and so half the threads: each has 16 bytes still."""
    for source in gate.generated_jobs(name, 64, torch.bfloat16):
        assert gate.measure_job(source, 90)["accesses"].keys() == {"128"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("channels", "space", "groups"), [(64, 32768, 64), (64, 32768, 32), (640, 4096, 32)])
def test_groups_of_few_or_odd_numbers_of_channels_do_not_spill(channels: int, space: int, groups: int) -> None:
    found: list[gate.CompileJob] = []
    x = torch.empty(2, channels, space, dtype=torch.bfloat16, device="meta")
    with recording(lambda one: found.append(gate.job_of_launch("group_norm", space, one))):
        ops.group_norm(x, groups, x[0, :, 0], x[0, :, 0])
    assert [gate.measure_job(source, 90)["problems"] for source in found] == [[]]


def test_one_row_compiles() -> None:
    """A count of 1 is a constant to Triton, and has no methods of a tensor."""
    few = {**gate.sizes(512), "rows": 1}
    found: list[gate.CompileJob] = []
    with recording(lambda one: found.append(gate.job_of_launch("layer_norm_backward", 512, one))):
        template = TEMPLATES["layer_norm_backward"]
        template.op(*template.arguments(few, torch.bfloat16, "meta"))
    assert found
    for source in found:
        gate.compile_job(source, 90)


def test_rows_that_are_not_aligned_are_refused() -> None:
    """A stride of 1001 elements: nothing can be loaded 16 bytes at a time."""
    source = gate.template_jobs(TEMPLATES["squared_relu"], 1001, torch.bfloat16, {})[0]
    assert any("128" in problem for problem in gate.measure_job(source, 90)["problems"])


def apart(cols: int) -> torch.Tensor:
    """Rows an odd number of elements apart."""
    return torch.empty(8192, cols + 1, dtype=torch.bfloat16, device="meta")[:, :cols]


def full(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


STATISTIC = full(8192, dtype=torch.float32)
UNALIGNED: dict[str, tuple[Callable[[], object], dict[str, int]]] = {
    "layer_norm": (lambda: ops.layer_norm(apart(64), full(64), full(64)), {"X": 32}),
    "softmax": (lambda: ops.softmax(apart(64)), {"X": 32}),
    "gated": (lambda: ops.gated(full(8192, 1024), apart(1024)), {"UP": 8}),
    "rms_norm_backward": (
        lambda: ops.rms_norm_backward(apart(64), apart(64), full(64), STATISTIC),
        {"DY": 16, "X": 16},
    ),
    "layer_norm_backward": (
        lambda: ops.layer_norm_backward(apart(256), full(8192, 256), full(256), STATISTIC, STATISTIC),
        {"DY": 16},
    ),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", UNALIGNED)
def test_one_operand_that_is_not_aligned_is_refused(name: str) -> None:
    """However short its rows are, so that few accesses read it, and whatever the others have."""
    call, short = UNALIGNED[name]
    found: list[gate.CompileJob] = []
    with recording(lambda one: found.append(gate.job_of_launch(name, 0, one))):
        call()
    line = gate.measure_job(found[0], 90)
    assert line["accesses"]["128"] > 0
    assert line["short"] == short
    assert any("full-size" in problem for problem in line["problems"])
    assert not gate.measure_job(replace(found[0], odd=True), 90)["problems"]


def test_an_access_is_of_the_pointer_its_address_is_computed_of() -> None:
    """What a row's target is, which is loaded, is an offset; a pointer that a loop moves on stays one."""
    ptx = """
    ld.param.b64 \t%rd1, [kernel_param_0];
    ld.param.b64 \t%rd2, [kernel_param_1];
    ld.param.b64 \t%rd9, [kernel_param_3];
    mul.wide.s32 \t%rd3, %r1, 8;
    add.s64 \t%rd4, %rd2, %rd3;
    @%p1 ld.global.b64 { %rd5 }, [ %rd4 + 0 ];
    add.s64 \t%rd6, %rd1, %rd5;
    @%p1 ld.global.L1::evict_first.L2::cache_hint.b16 { %rs1 }, [ %rd6 + 0 ], %rd9;
    mov.b64 \t%rd7, %rd1;
    add.s64 \t%rd7, %rd7, 512;
    cp.async.cg.shared.global [ %r2 + 0 ], [ %rd7 + 0 ], 0x10, %r3;
    st.global.v4.b32 [ %rd7 + 16 ], { %r4, %r5, %r6, %r7 };
    """
    assert access_width.access_widths(ptx, ["X", "TARGET", "rows"]) == {"X": {16: 1, 128: 2}, "TARGET": {64: 1}}
    signature = [("X", "*bf16"), ("TARGET", "*i64"), ("rows", "i32"), ("COLS", "constexpr")]
    assert access_width.narrow_accesses(ptx, signature, ["X"]) == {"X": 1}
    assert access_width.narrow_accesses(ptx, signature, ["X", "TARGET"]) == {
        "X": 1,
        "TARGET": 1,
    }  # two of either are wanted


def test_odd_rows_are_compiled_and_judged_by_spills_alone() -> None:
    odd = [one for one in quick(90) if one.odd]
    assert {one.template for one in odd} == set(gate.ODD)
    line = gate.measure_job(next(one for one in odd if one.template == "add_layer_norm"), 90)
    assert line["accesses"]["16"] > 50
    assert not line["problems"]
    assert gate.problems({**line, "spills": 1}) == ["1 local-memory accesses, 0 bytes of stack"]


def test_real_spills_are_seen_and_are_of_one_kernel_of_a_batch() -> None:
    """A row of 8192 in one warp cannot be held; the kernel beside it, disassembled with it, is none the worse."""
    good = gate.template_jobs(TEMPLATES["rms_norm"], 1024, torch.bfloat16, {})[0]
    constants = tuple({**dict(good.constants), "COLS": 8192, "BLOCK": 8192, "ROWS": 1}.items())
    bad = replace(good, constants=constants, warps=1)
    first, second, third = gate.measure_jobs([good, bad, good], 90)
    assert first == third
    assert not first["problems"]
    assert first["accesses"].keys() == {"32", "128"}
    assert second["spills"] > 100
    assert second["stack"] > 100
    assert "local-memory" in second["problems"][0]


def test_a_kernel_that_does_not_compile_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    good = gate.template_jobs(TEMPLATES["squared_relu"], 1024, torch.bfloat16, {})[0]
    bad = replace(good, constants=(("BLOCK", 1000), *((k, v) for k, v in good.constants if k != "BLOCK")))
    monkeypatch.setattr(gate, "compile_jobs", lambda arch, quick: [good, bad])
    passed, failed = gate.gate_lines([90], quick=True, jobs=1)
    assert not passed["problems"]
    assert "does not compile" in failed["problems"][0]


def test_what_is_refused() -> None:
    line = {"spills": 3, "stack": 8, "accesses": {"128": 4}, "kernel": "norm.norm_forward", "constants": {}}
    line |= {"arch": 80, "shared": 170_000, "stack": 24, "odd": False, "short": {}}
    refused = ["3 local-memory accesses, 24 bytes of stack", "170000 bytes of shared memory, of 166912"]
    assert gate.problems(line) == refused
    scalar = {**line, "spills": 1, "stack": 4, "shared": 0}
    assert gate.problems(scalar) == ["1 local-memory accesses, 4 bytes of stack"]  # one scalar is one too many
    fine = {**scalar, "spills": 0, "stack": 0}
    assert gate.problems(fine) == []
    short = {**fine, "kernel": "norm.norm_backward", "short": {"X": 1}}
    assert gate.problems(short) == ["accesses to full-size tensors of less than 16 bytes: 1 of X"]
    loss = {**fine, "kernel": "cross_entropy.cross_entropy_rows", "short": {"X": 2}}  # the target's, by themselves
    assert gate.problems(loss) == []
    padded = {**loss, "cols": 50257, "accesses": {"128": 4, "16": 42}, "constants": {"READ": 50264}}  # with a bias
    assert gate.problems(padded) == []
    assert gate.problems({**padded, "cols": 50264}) == ["42 accesses of less than 128 bits"]


def test_every_template_launches_on_meta_tensors() -> None:
    for template in TEMPLATES.values():
        found: list[Launch] = []
        with recording(found.append):
            template.op(*template.arguments(gate.sizes(256), torch.bfloat16, "meta"), **template.variants[0])
        assert found, template.name
        assert all(min(one.grid) >= 1 for one in found)
