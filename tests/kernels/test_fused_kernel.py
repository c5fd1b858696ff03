"""A kernel as data: its text, malformed kernels, merged dims, the library op, and the reference in lifted dtypes."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from random_kernel import arguments, kernels
from torch._subclasses import FakeTensorMode

from kernels_triton.codegen.schedules import choose_plan, column_sums, inplace_pairs
from kernels_triton.gate.corpus import CORPUS, Draft
from kernels_triton.gate.tune_generated import tune
from kernels_triton.generated.launcher import check_out, source
from kernels_triton.generated.op import FUSED
from kernels_triton.ir import reference
from kernels_triton.ir.access_map import AccessMap
from kernels_triton.ir.kernel import Kernel
from kernels_triton.ir.naming import fused_kernel_name
from kernels_triton.ir.text import parse, text
from kernels_triton.launch import tables
from kernels_triton.launch.launch import A100, H200, Device
from kernels_triton.transform.simplify import order_rows, simplify
from shardc import ShardcError

bf16, f32 = torch.bfloat16, torch.float32


@settings(max_examples=max(40, settings().max_examples), deadline=None, suppress_health_check=list(HealthCheck))
@given(kernel=kernels())
def test_text_is_read_back_and_fewer_dims_compute_the_same(kernel: Kernel) -> None:
    assert parse(text(kernel)) == kernel
    smaller = simplify(kernel)
    assert len(smaller.space) <= len(kernel.space)
    assert parse(text(smaller)) == smaller
    given_ = arguments(kernel, 0)
    for a, b in zip(reference.run(kernel, given_), reference.run(smaller, given_), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert source(kernel) == source(kernel)


@pytest.mark.parametrize("name", CORPUS)
def test_the_corpus_is_read_back(name: str) -> None:
    kernel = CORPUS[name](24, 64, bf16)
    assert parse(text(kernel)) == kernel
    assert "\n" not in text(kernel)
    assert compile(source(kernel), "generated", "exec")
    assert compile(source(kernel, A100), "generated", "exec")


def test_dims_that_are_walked_as_one_become_one() -> None:
    k = Draft((8, 128, 64))
    x, b = k.full(bf16), k.col(bf16)
    k.out(k("add", x, b), bf16)
    assert simplify(k.kernel("bias")).space == (1024, 64)
    k = Draft((8, 128, 64))
    k.out(k("neg", k.full(bf16)), bf16)
    assert simplify(k.kernel("flat")).space == (65536,)
    k = Draft((8, 128, 64))  # positions repeat, sums over rows keep the columns
    x, p = k.full(bf16), k.input(bf16, (128, 64))
    k.out_col(k("csum", k("add", x, p)), f32)
    assert simplify(k.kernel("positions")).space == (8, 128, 64)


@settings(max_examples=max(25, settings().max_examples), deadline=None, suppress_health_check=list(HealthCheck))
@given(kernel=kernels())
def test_rows_in_another_order_compute_the_same(kernel: Kernel) -> None:
    other, given_ = order_rows(kernel), arguments(kernel, 1)
    assert sorted(other.space) == sorted(kernel.space)
    for a, b in zip(reference.run(kernel, given_), reference.run(other, given_), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_transposed_tensor_is_read_along_its_rows() -> None:
    """[head, feature, position] from [position, head, feature]: positions are the columns, features the tiles' rows."""
    k = Draft((12, 64, 16, 64))
    x = k.input(bf16, (1024, 768), AccessMap(0, (64, 1, 64 * 768, 768)))
    k.out(x, bf16)
    kernel = order_rows(k.kernel("fused_transpose"))
    assert kernel.space == (12, 16, 64, 64)
    assert kernel.inputs[0].access_map.strides == (64, 64 * 768, 1, 768)


@pytest.mark.parametrize("device", [H200, A100], ids=lambda device: device.name)
@pytest.mark.parametrize("name", CORPUS)
def test_plans_fit_the_device(name: str, device: Device) -> None:
    for cols in (1, 7, 64, 768, 4096, 12288, 50304):
        for rows in (1, 100, 65536):
            kernel = CORPUS[name](rows, cols, bf16)
            plan = choose_plan(kernel, device)
            s = plan.schedule
            assert all(1 <= n < 1 << 31 for n in plan.grid)
            assert s.rows <= 2 * kernel.rows
            assert s.block <= 2 * kernel.cols
            elements = s.rows * s.block * max(1, s.chunks)
            assert elements / (32 * s.warps) <= 32, "more values a thread than it has registers for"
            if plan.style == "rows":
                assert s.block * s.chunks >= kernel.cols
            for _ in column_sums(kernel):
                assert plan.programs <= 16 * device.sms


def test_wide_rows_with_sums_stay_in_registers_and_exchange_their_sums_once() -> None:
    kernel = CORPUS["rms_norm_backward"](8192, 12288, bf16)
    plan = choose_plan(kernel, H200)
    assert (plan.style, plan.schedule.chunks, plan.schedule.stages) == ("rows", 3, 3)
    lines = source(kernel).splitlines()
    terms = [at for at, line in enumerate(lines) if "+=" in line and ("part_" in line or "total_" in line)]
    loads = [at for at, line in enumerate(lines) if "tl.load(X0" in line]
    assert len(loads) == 3
    assert loads[1] < terms[1] < loads[2], "a chunk's terms are added up before the next is read"
    twice = source(CORPUS["layer_norm_backward"](8192, 4096, bf16))
    assert twice.count("row_sums(") == 1
    assert "tl.sum(part_" not in twice


def test_programs_of_one_row_are_neighbours_in_a_walk() -> None:
    plan = choose_plan(CORPUS["bias_gelu_backward"](8192, 4096, bf16), H200)
    assert plan.style == "walk"
    assert plan.grid == (plan.blocks, plan.programs)
    assert plan.blocks == 4


def test_a_measured_schedule_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timer likes so many warps; the table that this makes is what `choose` then goes by, in its widths."""
    liked = {"fused_rms_norm": 4, "fused_bias_gelu": 2}
    table = tune(H200, lambda kernel, s: 0.5 if s.warps == liked[kernel.name] else 1.0, only=["rms_norm", "bias_gelu"])
    assert {name.rsplit("_", 1)[0] for name in table} == {"fused_rows", "fused_tiles"}
    monkeypatch.setattr(tables, "schedules", lambda device: table)
    for cols in (700, 1024):
        plan = choose_plan(CORPUS["rms_norm"](8192, cols, bf16), H200)
        assert plan.schedule.warps == 4
        assert plan.schedule.block * plan.schedule.chunks >= cols
    table["fused_rows_3"][0]["schedule"]["block"] = 512  # measured for other rows: never used where columns would go
    assert choose_plan(CORPUS["rms_norm"](8192, 1000, bf16), H200).schedule.block == 1024


def test_float64_is_exact_where_the_text_says_bfloat16() -> None:
    kernel = CORPUS["add_layer_norm"](16, 32, bf16)
    torch.manual_seed(0)
    x, residual, w, b = (torch.randn(given.shape, dtype=torch.float64) for given in kernel.inputs)
    h, y, mean, rstd = torch.ops.shardc.fused([x, residual, w, b], text(kernel))
    assert {t.dtype for t in (h, y, mean, rstd)} == {torch.float64}
    expected = torch.nn.functional.layer_norm(x + residual, (32,), w, b, 1e-5)
    torch.testing.assert_close(y, expected, rtol=1e-13, atol=1e-13)
    with FakeTensorMode() as mode:
        fakes = torch.ops.shardc.fused([mode.from_tensor(t) for t in (x, residual, w, b)], text(kernel))
    assert [(f.shape, f.dtype, f.stride()) for f in fakes] == [
        (t.shape, t.dtype, t.stride()) for t in (h, y, mean, rstd)
    ]


def test_operands_in_any_layout() -> None:
    kernel = CORPUS["bias_gelu"](6, 8, f32)
    x, b = torch.randn(8, 6).T, torch.randn(16)[::2]
    (found,) = FUSED([x, b], text(kernel))
    (expected,) = FUSED([x.contiguous(), b.contiguous()], text(kernel))
    assert torch.equal(found, expected)


def test_what_may_be_written_over_what() -> None:
    adamw = CORPUS["adamw"](4, 8, bf16)  # p, m and v over themselves; the copy of p over the gradient
    assert inplace_pairs(adamw) == {(0, 0), (0, 2), (0, 3), (1, 2), (2, 3), (3, 1)}
    # dx over dy, h or the residual's gradient; never dw over w, which every row reads.
    assert inplace_pairs(CORPUS["layer_norm_backward"](4, 8, bf16)) == {(0, 0), (0, 1), (0, 2)}
    assert inplace_pairs(CORPUS["transposed_add"](4, 8, bf16)) == {(0, 0)}
    assert inplace_pairs(CORPUS["rope"](16, 8, bf16)) == {(0, 0), (0, 1)}  # each half over itself
    # The gradient of up is not made from up: its store would not wait for up's load.
    assert inplace_pairs(CORPUS["swiglu_backward"](8, 8, bf16)) == {(0, 1)}


def test_names() -> None:
    assert fused_kernel_name(["add.Tensor", "native_layer_norm", "_to_copy"]) == "fused_add_layer_norm"
    assert fused_kernel_name(["shardc.random_uniform", "mul.Tensor", "mul.Scalar"]) == "fused_random_uniform_mul"
    assert fused_kernel_name(["view"]) == "fused_cast"
    assert fused_kernel_name(f"op{i}" for i in range(99)).endswith("_etc")


def wrong(change: Callable[[Draft], object], space: tuple[int, ...] = (4, 8)) -> str:
    k = Draft(space)
    change(k)
    with pytest.raises(ShardcError, match="SC531") as caught:
        k.kernel("fused_wrong")
    return str(caught.value)


def test_what_makes_no_sense_is_refused() -> None:
    def late_row(k: Draft) -> None:
        x = k.full(f32)
        k.out(k("add", x, k("csum", x)), f32)

    def two_in_one_place(k: Draft) -> None:
        k.out(k.full(f32), f32, (8,))

    def partly(k: Draft) -> None:
        x = k.full(f32)
        k.joined(f32, (4, 16), (x, AccessMap(0, (16, 1))))

    def twice(k: Draft) -> None:
        x = k.full(f32)
        k.joined(f32, (4, 8), (x, AccessMap(0, (1, 1))))

    def out_of(k: Draft) -> None:
        k.out(k.input(f32, (4, 8), AccessMap(1, (8, 1))), f32)

    def two_reductions(k: Draft) -> None:
        x, w = k.full(f32), k.col(f32)
        k.out_col(k("add", k("csum", x), k("rsum", w)), f32)

    assert "meets a value of rows" in wrong(late_row)
    assert "meets a reduction of a row" in wrong(two_reductions)
    assert "one place for several values" in wrong(two_in_one_place)
    assert "written in part" in wrong(partly)
    assert "written twice" in wrong(twice)
    assert "walked out of its 32 elements" in wrong(out_of)
    for lines in ("[4,48]=%0@0:48,1+0", "[4,40]=%0@0:33,1+0", "[4,33]=%0+0", "[8,40]=%0@0:40,1+0"):
        with pytest.raises(ShardcError, match="no rows that end with zeros"):
            parse(f"fused_wrong[4|33](f32[4,33]){{}}->f32{lines}")
    assert "no inputs" in wrong(lambda k: k.out(k("iota", attributes=(0,)), f32))
    assert "of class f" in wrong(lambda k: k.out(k("and", k.full(f32), True), f32))
    for line in ("", "x[2|3](f32[2,3]){}->f32[2,3]=%0 ", "x[2|3](f32[2,3]){%1=no(%0)}->f32[2,3]=%1"):
        with pytest.raises(ShardcError, match="SC531"):
            parse(line)


def test_an_output_lies_over_an_input_element_by_element_or_not_at_all() -> None:
    """Over its neighbours it would change what other programs have yet to read."""
    kernel = parse("a[|16](f32[16]){%1=mul(%0, 2)}->f32[16]=%1")
    memory = torch.zeros(24)
    given = memory[:16]
    check_out(kernel, [given], [given])
    check_out(kernel, [given], [torch.empty(16)])
    for out in (memory[4:20], memory[8:], torch.empty(16, dtype=torch.float64), torch.empty(32)[::2]):
        with pytest.raises(ShardcError, match="SC530"):
            check_out(kernel, [given], [out])


def test_what_several_rows_read_no_row_writes() -> None:
    """A value of columns is as well read by the rows that come later as the first row writes its new one."""
    kernel = parse("a[4|8](f32[8]@0:0,1, f32[4,8]){%2=mul(%0, 2); %3=add(%1, %0)}->f32[8]=%2@0:0,1, f32[4,8]=%3")
    assert inplace_pairs(kernel) == {(1, 1)}
