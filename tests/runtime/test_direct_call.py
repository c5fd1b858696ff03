"""What prepared code calls in the place of ops gives bitwise what the ops give, in the same dtypes and strides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels_triton.base.library import kernel_for
from shardc.ir.ops.accumulate import (
    ACCUMULATE_MORE_ROWS,
    ACCUMULATE_ROWS,
    add_row_sums,
    add_wgrad,
    write_row_sums,
)
from shardc.ir.ops.check_index import check_index
from shardc.ir.ops.columns import PICK_COLUMN, SUBTRACT_AT
from shardc.ir.ops.linear import LINEAR, LINEAR_BIAS, LINEAR_DGRAD, LINEAR_WGRAD
from shardc.runtime.execute import direct_call as module
from shardc.runtime.execute.direct_call import DIRECT, EMBEDDING_GRADIENT, TO_COPY, direct_call, embedding_gradient

CPU = torch.device("cpu")
aten = torch.ops.aten
TWO = {op for name in ("add", "sub", "mul", "div") for op in (getattr(aten, name).Tensor, getattr(aten, name).out)}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)


def operands(op: Any, dtype: torch.dtype) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Calls of an op as graphs have them: operands that are not contiguous, of other dtypes, and numbers."""
    x, y = (torch.arange(1, 25).view(4, 6).to(dtype) + shift for shift in (0, 3))
    whole = torch.arange(1, 25).view(4, 6)
    number = torch.tensor(0.5, dtype=torch.float64)
    name = op.__name__.partition(".")[0]
    cases: dict[str, list[tuple[Any, ...]]] = {
        **{key: [(x, y), (x.t(), y.t())] for key in ("maximum", "minimum")},
        **{key: [(x, 7), (x.t(), 7), (x, 6.5), (x > 7, 1)] for key in ("eq", "ne", "lt", "le", "gt", "ge")},
        "pow": [(x, 2), (x.t(), 3), (x, 0.5), (x, 2.5), (x, -1), (x, 0)],
        "sum": [(x, [0]), (x, [0, 1]), (x, [-1], True), (x, []), (x, None, True), (x.t(), [1]), (x > 7, [0])],
        "amax": [(x,), (x, [1]), (x, [0, 1], True), (x.t(), [-1], True)],
        "cat": [([x, y],), ([x, y], 1), ([x.t(), y.t()], -1), ([x],), ([x, whole], 1)],
        "full": [([], 1.0), ([2, 3], 7), ([2], True)],
        "arange": [(2, 7), (0, 3)] if op is aten.arange.start else [(7,), (2.5,)],
        "where": [(x > 7, x, y), (x[0] > 3, x, number), (x > 7, whole, y)],
        "lerp": [(x, y, 0.25), (x.t(), y.t(), 0.75)],
        "reshape": [(x, [2, 12]), (x.t(), [24]), (x, [-1])],
        "transpose": [(x, 0, 1), (x, -1, -2)],
        "permute": [(x, [1, 0])],
        "unsqueeze": [(x, 0), (x, -1)],
        "t": [(x,), (x[0],)],
        "expand": [(x[:1], [4, 6]), (x, [2, -1, -1])],
        "mm": [(x, y.t()), (x.t(), y)],
        "bmm": [(x[None], y.t()[None])],
        "split_with_sizes": [(x, [1, 5], 1), (x, [3, 1])],
        "embedding": [(x, whole[0] % 4), (x, whole[0] % 4, 0)],
        "native_layer_norm": [(x, [6], y[0], y[1], 1e-5), (x, [6], None, None, 1e-5)],
    }
    if op in TWO:
        cases[name] = [(x, y), (x.t(), y.t()), (x, whole), (whole, x), (x, number), (x, 2), (x, 0.5), (number, x)]
    named: list[tuple[tuple[Any, ...], dict[str, Any]]] = {
        **{key: [((x, y), {"alpha": 2})] for key in ("add", "sub")},
        "sum": [((x, [0]), {"dtype": torch.float64})],
        "gelu": [((x,), {"approximate": "tanh"})],
        **{key: [(cases.get(name, [()])[0], {"dtype": dtype, "device": CPU})] for key in ("full", "arange")},
    }.get(name, [])
    return [*((args, {}) for args in cases.get(name, [(x,), (x.t(),)])), *named]


def results(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


@pytest.mark.parametrize("op", DIRECT, ids=str)
def test_a_function_gives_what_its_op_gives(op: Any) -> None:
    compared = 0
    for dtype in DTYPES:
        for args, kwargs in operands(op, dtype):
            out: dict[str, Tensor] = {}
            if op.__name__.endswith("out"):
                out = {"out": torch.empty_like(args[0], dtype=torch.promote_types(dtype, torch.float32))}
            try:
                expected = results(op(*args, **kwargs, **out))
            except (RuntimeError, NotImplementedError):  # not for integers
                with pytest.raises((RuntimeError, NotImplementedError)):
                    DIRECT[op](*args, **kwargs, **out)
                continue
            expected = [x.clone() for x in expected] if out else expected
            found = results(DIRECT[op](*args, **kwargs, **{name: torch.zeros_like(x) for name, x in out.items()}))
            assert [x.dtype for x in found] == [x.dtype for x in expected]
            assert [(x.shape, x.stride()) for x in found] == [(x.shape, x.stride()) for x in expected]
            assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(found, expected, strict=True))
            compared += 1
    assert compared


@pytest.mark.parametrize("to", DTYPES, ids=str)
def test_a_cast_is_a_copy(to: torch.dtype) -> None:
    """Also to the same dtype, of what is no contiguous tensor; other options than a cast's are left to the op."""
    cast = direct_call(TO_COPY, CPU, ("dtype",))
    assert cast is direct_call(TO_COPY, CPU, ("dtype", "device", "memory_format"))
    assert direct_call(TO_COPY, CPU, ("dtype", "layout")) is direct_call(TO_COPY, CPU, ()) is not cast
    x = torch.arange(24).view(4, 6)
    for dtype in DTYPES:
        for given in (x.to(dtype), x.to(dtype).t(), x.to(dtype)[:, :2], x.to(dtype)[:1].expand(3, 6)):
            for options in ({}, {"memory_format": torch.contiguous_format}, {"device": CPU}):
                expected, found = TO_COPY(given, dtype=to, **options), cast(given, dtype=to, **options)
                assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())
                assert found.equal(expected)
                assert found.data_ptr() != given.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lead", [(), (5,), (2, 5), (2, 0), (2, 3, 5)], ids=str)
def test_products_are_those_of_matmul(lead: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(*lead, 8, dtype=dtype), torch.randn(6, 8, dtype=dtype)
    assert torch.equal(direct_call(LINEAR, CPU)(x, w), torch.matmul(x, w.t()))
    if len(lead) == 2:  # rows that are no rows in memory
        turned = x.transpose(0, 1)
        assert torch.equal(direct_call(LINEAR, CPU)(turned, w), torch.matmul(turned, w.t()))
        assert direct_call(LINEAR, CPU)(turned, w).is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lead", [(), (5,), (2, 5), (2, 0), (2, 3, 5)], ids=str)
def test_a_product_with_a_bias_is_one_addmm(lead: tuple[int, ...], dtype: torch.dtype) -> None:
    """Of operands that lie in any way: the sum is rounded once, as `write_linear_bias` rounds it."""
    torch.manual_seed(0)
    x, w, b = (torch.randn(shape, dtype=dtype) for shape in ((*lead, 8), (6, 8), (6,)))
    wide = torch.randn(*lead, 16, dtype=dtype)
    for operand in (x, wide[..., :8], wide[..., ::2], *([x.transpose(0, 1)] if len(lead) > 1 else [])):
        expected = torch.addmm(b, operand.reshape(-1, 8), w.t())
        found = direct_call(LINEAR_BIAS, CPU)(operand, w, b)
        assert found.shape == (*operand.shape[:-1], 6)
        assert found.is_contiguous()
        assert found.view(-1, 6).equal(expected)


def test_a_sum_of_products_is_in_the_sums_dtype() -> None:
    g, x = torch.randn(2, 3, 4, dtype=torch.bfloat16), torch.randn(2, 3, 5, dtype=torch.bfloat16)
    for dtype in (torch.float32, torch.bfloat16):
        expected = torch.ones(4, 5, dtype=dtype).addmm_(g.view(6, 4).t().to(dtype), x.view(6, 5).to(dtype))
        assert add_wgrad(torch.ones(4, 5, dtype=dtype), g, x).equal(expected)


def test_columns_that_a_row_does_not_have() -> None:
    values, column = torch.arange(12.0).view(4, 3), torch.tensor([[2], [-1], [3], [0]])
    assert PICK_COLUMN(values, column).flatten().tolist() == [2, 0, 0, 9]
    less = SUBTRACT_AT(values, column, torch.ones(4, 1)) - values
    assert less.nonzero().tolist() == [[0, 2], [3, 0]]


def test_positions_are_checked_whatever_their_dtype() -> None:
    for dtype in (torch.uint8, torch.int8, torch.int32, torch.int64):
        good = torch.tensor([[0, 5], [99, 7]], dtype=dtype)
        found = check_index(good, 100)
        assert found.equal(good)
        assert found.data_ptr() != good.data_ptr()
        assert check_index(good[:0], 100).numel() == 0
        assert check_index(good, 99, 99).equal(good)
        for bad in (good, good - 1):  # 99, and -1 or 255
            with pytest.raises(IndexError, match=r"an index is not in \[0, 99\)"):
                check_index(bad, 99, -100)


def test_no_call_of_our_own_ops_goes_through_the_dispatcher() -> None:
    for op in (LINEAR, LINEAR_DGRAD, LINEAR_WGRAD):
        assert direct_call(op, CPU) is kernel_for(op, CPU)
        assert type(direct_call(op, CPU)).__name__ == "function"
    assert kernel_for(aten.add.Tensor, CPU) is None


def test_attention_is_what_is_registered_for_a_device() -> None:
    from shardc.ir.ops import cpu_attention, fused_attention
    from shardc.ir.ops.attention import SDPA

    on_gpu, on_cpu = (direct_call(SDPA, torch.device(name)) for name in ("cuda", "cpu"))
    assert on_gpu.args == (fused_attention.FUSED,)  # type: ignore[attr-defined]
    assert on_cpu.args == (cpu_attention.FLASH,)  # type: ignore[attr-defined]


def test_the_kernel_of_attention_is_chosen_once_for_each_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """And again for other shapes, strides or masks, and where the user switches a kernel off or back on."""
    from shardc import torch_compat
    from shardc.ir.ops import fused_attention

    asked: list[tuple[bool, ...]] = []

    def fused_kernels(*_: Any, **__: Any) -> torch_compat.FusedKernels:
        asked.append(torch_compat.attention_switches())
        return torch_compat.FusedKernels(False, torch.backends.cuda.flash_sdp_enabled(), True)

    monkeypatch.setattr(torch_compat, "fused_kernels", fused_kernels)
    monkeypatch.setattr(fused_attention, "_kernels", {})
    q = torch.zeros(2, 4, 16, 8, dtype=torch.bfloat16)
    choose = fused_attention.kernel_for
    assert [choose(q, q, q, None, True) for _ in range(3)] == ["flash"] * 3
    assert choose(q.clone(), q, q, None, True) == "flash"
    assert len(asked) == 1
    other = q.transpose(1, 2).contiguous().transpose(1, 2)
    for operands in ((q[:1], q[:1], q[:1], None), (other, q, q, None), (q, q, q, q.new_zeros(2, 4, 16, 16))):
        before = len(asked)
        assert choose(*operands, True) == ("flash" if operands[3] is None else "efficient")
        assert len(asked) == before + 1
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION]):
        assert choose(q, q, q, None, True) == "efficient"
    before = len(asked)
    assert choose(q, q, q, None, True) == "flash"
    assert len(asked) == before


def test_an_embeddings_gradient() -> None:
    """On GPUs ours; it gives others to torch: what lies elsewhere, is small, or is scaled by frequency."""
    assert direct_call(EMBEDDING_GRADIENT, torch.device("cuda", 0)) is embedding_gradient
    assert direct_call(EMBEDDING_GRADIENT, CPU) is not embedding_gradient
    g, index = torch.randn(2, 3, 4), torch.tensor([[1, 0, 1], [5, 2, 2]])
    for by_frequency in (False, True):
        theirs = EMBEDDING_GRADIENT(g, index, 6, 2, by_frequency)
        assert embedding_gradient(g, index, 6, 2, by_frequency).equal(theirs)


def test_sums_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs our kernel makes, writes and adds them; it gives others to torch: of small tables, or in float64."""
    gpu = torch.device("cuda", 0)
    assert direct_call(ACCUMULATE_ROWS, CPU) is kernel_for(ACCUMULATE_ROWS, CPU)
    assert direct_call(write_row_sums, CPU) is write_row_sums
    assert direct_call(ACCUMULATE_MORE_ROWS, CPU) is direct_call(add_row_sums, CPU) is add_row_sums
    made, written, added = (direct_call(op, gpu) for op in (ACCUMULATE_ROWS, write_row_sums, add_row_sums))
    assert direct_call(ACCUMULATE_MORE_ROWS, gpu) is added
    for small, dtype in ((1 << 20, torch.float32), (0, torch.float64)):
        monkeypatch.setattr(module, "SMALL", small)
        g, index = torch.randn(2, 3, 4, dtype=dtype), torch.tensor([[1, 0, 1], [5, 2, 2]])
        expected = ACCUMULATE_ROWS(g, index, 6, 2, dtype)
        assert made(g, index, 6, 2, dtype).equal(expected)
        assert written(g, index, 6, 2, dtype, out=torch.ones(6, 4, dtype=dtype)).equal(expected)
        assert added(expected.clone(), g, index, 2).equal(add_row_sums(expected.clone(), g, index, 2))
    launched: list[dict[str, Any]] = []
    monkeypatch.setattr(module.launch, "runs_on_triton", lambda _: True)
    monkeypatch.setattr(module, "sum_rows", lambda *_, **options: launched.append(options))
    g, out = torch.randn(6, 4, dtype=torch.bfloat16), torch.ones(6, 4)
    made(g, index.view(-1), 6, 2, torch.float32)
    written(g, index.view(-1), 6, 2, torch.float32, out=out)
    added(out, g, index.view(-1), 2)
    assert [[*options] for options in launched] == [[], ["out"], ["total"]]
