"""The templates on a GPU: each element against float64 references, twice bitwise the same, and past 2^31 elements."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from closeness import by_rows, relative
from torch import Tensor

from kernels_triton import ops
from kernels_triton.launch import launch, register_limits
from kernels_triton.launch.machine_code import MachineCode
from kernels_triton.ops.registry import TEMPLATES

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 4e-6}  # of the largest element of its row
SHAPES = ((1, 1), (70, 513), (300, 4096), (64, 12288), (5, 131072))
WHOLE = {"batch": 2, "heads": 5, "dim": 64, "half": 24, "channels": 64, "groups": 32, "space": 77}


def sane(name: str, call: dict[str, Any], like: torch.dtype) -> dict[str, Any]:
    """Operands that belong together, where a signature alone does not say so."""
    if name in ("softmax_backward",):
        call["y"] = torch.softmax(call["y"].float(), -1).to(like)
    return call


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_against_float64(name: str, dtype: torch.dtype) -> None:
    template = TEMPLATES[name]
    for rows, cols in SHAPES:
        torch.manual_seed(rows)
        for variant in template.calls:
            given = sane(name, template.call(variant, {**WHOLE, "rows": rows, "cols": cols}, dtype, "cuda"), dtype)
            if variant.get("causal") and cols > 16384:
                continue
            wide = {k: a.double() if torch.is_tensor(a) and a.is_floating_point() else a for k, a in given.items()}
            again = {k: a.clone() if torch.is_tensor(a) else a for k, a in given.items()}
            assert launch.runs_on_triton(next(iter(given.values())))
            found, second = template.op(**given), template.op(**again)
            expected = template.reference(**wide)
            if name == "adamw":
                found, second, expected = ([*call.values()] for call in (given, again, wide))
            told = [one.name for one in template.results_of_call(variant)]
            for at, (mine, repeated, theirs) in enumerate(
                zip(tensors(found), tensors(second), tensors(expected), strict=True)
            ):
                assert torch.equal(mine, repeated), f"{name} {variant} {rows}x{cols} is not deterministic"
                # A mean near 0 has the roundings of what it is the mean of: numbers around 1.
                terms = torch.ones_like(theirs) if told[at : at + 1] == ["mean"] else None
                error = by_rows(mine, theirs) if terms is None else relative(mine, theirs, terms)
                assert error < TOLERANCE[dtype], f"{name} {variant} {rows}x{cols}: an element is off by {error:.1e}"


def tensors(value: Any) -> list[Tensor]:
    return [v for v in (value if isinstance(value, (tuple, list)) else (value,)) if torch.is_tensor(v)]


# Of other templates a row's results depend on its number, or on other rows.
ROWWISE = [
    name
    for name, template in TEMPLATES.items()
    if all("rows" in one.dims for one in (template.operands[0], *template.results[:1]))
    and name not in ("rope", "bias_dropout_residual")
]


@pytest.mark.parametrize("name", ROWWISE)
def test_offsets_beyond_32_bits(name: str) -> None:
    """2.3e9 elements: the last rows lie past 2^31, and are those of a call of their own."""
    template = TEMPLATES[name]
    sizes, variant = {**WHOLE, "rows": 280_000, "cols": 8192}, template.variants[-1]
    torch.manual_seed(0)
    arguments = template.arguments(sizes, torch.bfloat16, "cuda")
    last = list(arguments)
    for given, x in zip(template.operands, [a for a in arguments if torch.is_tensor(a)], strict=True):
        if "rows" in given.dims:
            dim = given.dims.index("rows")
            at = next(i for i, a in enumerate(arguments) if a is x)
            last[at] = x.narrow(dim, sizes["rows"] - 3, 3).clone()
    expected, found = tensors(template.op(*last, **variant)), tensors(template.op(*arguments, **variant))
    for result, mine, theirs in zip(template.results, found, expected, strict=True):
        if "rows" in result.dims:
            assert torch.equal(mine[-3:], theirs), result.name
        else:
            assert torch.isfinite(mine).all(), result.name


@pytest.mark.parametrize("name", ROWWISE)
def test_rows_that_lie_far_apart(name: str) -> None:
    """A stride of 2^30: the third row lies past 2^31."""
    template = TEMPLATES[name]
    torch.manual_seed(0)
    arguments = template.arguments({**WHOLE, "rows": 3, "cols": 96}, torch.bfloat16, "cuda")
    whole = torch.empty((2 << 30) + 4096, dtype=torch.bfloat16, device="cuda")
    for variant in template.variants:
        given, apart = list(arguments), list(arguments)
        for at, x in enumerate(arguments):
            if torch.is_tensor(x) and x.shape == (3, 96):
                given[at], apart[at] = x.clone(), whole.as_strided((3, 96), (1 << 30, 1), 256 * at).copy_(x)
        found, expected = tensors(template.op(*apart, **variant)), tensors(template.op(*given, **variant))
        for mine, theirs in zip(found, expected, strict=True):
            assert torch.equal(mine, theirs)


def test_a_kernel_that_would_spill_gets_a_limit_of_more_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the assembler had spilled, whichever it is; and the second launch compiles nothing."""
    x, weight = torch.randn(70, 1512, device="cuda"), torch.randn(1512, device="cuda")
    expected = ops.rms_norm(x, weight, 1e-5)
    codes: list[MachineCode] = []

    def read(cubin: bytes, real: Any = register_limits.machine_code) -> MachineCode:
        codes.append(real(cubin))
        return replace(codes[-1], stack=0 if len(codes) > 1 else 8)

    monkeypatch.setattr(register_limits, "machine_code", read)
    monkeypatch.setattr(launch, "_register_limits", {})
    made: list[Any] = []
    for _ in range(2):
        with launch.recording(lambda one: made.append(one())):
            torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), expected)
    first = codes[0].registers
    assert len(codes) == 2
    assert [one.metadata.maxnreg for one in made] == [(first // 8 + 1) * 8] * 2
