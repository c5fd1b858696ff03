"""Every kernel of every template under the interpreter, in every dtype it has, against float64: rows with a stride,
sizes that no block divides, sentinels around every buffer and NaN in every output."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from closeness import by_rows
from interpreter import Interpreter
from torch import Tensor
from written import written

from kernels_triton.launch import launch
from kernels_triton.launch.launch import HAS_TRITON
from kernels_triton.launch.row_schedule import Schedule, trying
from kernels_triton.ops.registry import TEMPLATES, TemplateOp

SIZES = {"rows": 5, "cols": 70, "batch": 1, "heads": 3, "dim": 22, "half": 9, "channels": 64, "groups": 32, "space": 35}
LOOSE = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 4e-6}
LOOPED = Schedule(32, 0, rows=2, warps=1, waves=1)  # rows that registers do not hold
LOOPS = ("norm", "softmax")
BLOCKS = Schedule(32, 3, rows=1, warps=1)  # of a causal row, one block after the other
AGAIN = Schedule(32, 3, rows=2, warps=1, again=True)  # rows that are read twice
PARTS = Schedule(32, 2, rows=1, warps=1)  # of a group, whose programs wait for each other


def named(template: TemplateOp, variant: Any) -> str:
    """As its schedules are."""
    return f"causal_{template.name}" if variant.get("causal") else template.name


def calls(template: TemplateOp) -> Iterator[tuple[torch.dtype, Any, tuple[str, Schedule] | None]]:
    """(dtype, variant, schedule): all dtypes, all variants and other operands, and loops over rows."""
    for number, dtype in enumerate(template.dtypes):
        one = template.variants[number % len(template.variants)]
        for variant in template.calls if dtype == torch.bfloat16 else (one,):
            yield dtype, variant, None
        if any(word in template.name for word in LOOPS) and dtype != torch.float16:
            yield dtype, one, (named(template, one), LOOPED)
        if dtype == torch.float16 and any(word in template.name for word in LOOPS):
            yield dtype, one, (named(template, one), AGAIN)
        if "group_norm" in template.name and dtype != torch.float16:
            yield dtype, one, (template.name, PARTS)
        if "softmax" in template.name:
            causal = template.variants[-1]
            yield dtype, causal, (named(template, causal), BLOCKS)


def drawn(template: TemplateOp, variant: Any, dtype: torch.dtype) -> dict[str, Any]:
    """Operands by name; of what is rows, each is part of longer ones."""
    torch.manual_seed(0)
    made = template.call(variant, SIZES, dtype, "cpu")
    rows = {id(x) for x in made.values() if isinstance(x, Tensor) and x.dim() == 2 and x.shape[1] == SIZES["cols"]}
    return {k: torch.cat((x, x[:, :5]), 1)[:, : x.shape[1]] if id(x) in rows else x for k, x in made.items()}


def tensors(value: Any) -> list[Tensor]:
    return [v for v in (value if isinstance(value, (tuple, list)) else (value,)) if isinstance(v, Tensor)]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", TEMPLATES)
def test_against_float64(interpreted: Interpreter, name: str) -> None:
    template = TEMPLATES[name]
    for dtype, variant, schedule in calls(template):
        given = drawn(template, variant, dtype)
        call = {k: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in given.items()}
        exact = template.reference(**call)
        found, after = interpreted(name, **given, changed=True, schedule=schedule)
        if name == "adamw":
            found, exact = after, tuple(call.values())
        pairs = list(zip(tensors(found), tensors(exact), strict=True))
        assert pairs
        for mine, theirs in pairs:
            assert by_rows(mine, theirs) < LOOSE[dtype], (dtype, variant, schedule)


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed: ops do not launch here")
def test_no_kernel_is_left_out() -> None:
    """What the calls above launch is every kernel that there is."""
    launches: list[launch.Launch] = []
    for template in TEMPLATES.values():
        for dtype, variant, schedule in calls(template):
            with launch.recording(launches.append), trying(*(schedule or ("none", LOOPED))):
                template.op(**template.call(variant, SIZES, dtype, "meta"))
    assert {one.name for one in launches} == written()
