"""One program runs batches of eight sizes: with loss and gradients of compiling for each, and of eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc import Plan, Program
from shardc.runtime.oracle.simulate import simulate
from tests.models.eagerly import eager
from tests.models.zoo import make
from tests.symbolic.families import FAMILIES, TOKENS
from tests.symbolic.test_instances import fixed, same

Batch = dict[str, Tensor]
Size = tuple[int, int]
VOCAB = 37  # or more
LAYOUT = Plan.of(mesh="dp=2, tp=2")


class Case(NamedTuple):
    build: Callable[[], nn.Module]
    plan: Plan
    batch: Callable[[int, int], Batch]


def drawn(rows: int, *shape: int, most: int = VOCAB) -> Tensor:
    return torch.randint(most, (rows, *shape), generator=torch.Generator().manual_seed(97 * rows + sum(shape)))


def tokens(rows: int, length: int) -> Batch:
    ids = drawn(rows, length)
    return {"input_ids": ids, "labels": ids}


def masked(rows: int, length: int) -> Batch:
    """With padding at the end of every other row."""
    mask = torch.ones(rows, length, dtype=torch.int64)
    mask[1::2, -1] = 0
    return {"input_ids": drawn(rows, length), "attention_mask": mask, "labels": drawn(rows, length)}


def two_lengths(rows: int, length: int) -> Batch:
    """An encoder's, and a decoder's."""
    return {"input_ids": drawn(rows, length), "labels": drawn(rows, length // 2 + 3)}


def images(rows: int, _: int) -> Batch:
    pixels = torch.randn(rows, 3, 16, 16, generator=torch.Generator().manual_seed(rows))
    return {"pixel_values": pixels, "labels": drawn(rows, most=8)}


def of_family(name: str, batch: Callable[[int, int], Batch] = tokens, symbols: Mapping[str, str] = TOKENS) -> Case:
    build, plan = FAMILIES[name]
    return Case(lambda: build(2), plan.merge(Plan.of(symbols=symbols)).merge(LAYOUT), batch)


def of_example(name: str, batch: Callable[[int, int], Batch], symbols: Mapping[str, Any]) -> Case:
    plan = Plan.load(f"shardc:{name}").merge(Plan.of(symbols=symbols))
    return Case(lambda: make(name)[0], plan.merge(LAYOUT), batch)


LENGTHS = [(4, 24), (16, 6), (6, 34), (32, 32), (8, 48), (2, 16), (10, 10), (4, 4)]
ROWS = [(rows, 0) for rows in (2, 4, 6, 10, 12, 16, 22, 64)]
CASES = {
    "gpt2": of_family("gpt2"),
    "llama_sp": of_family("llama_sp"),
    "vit": of_family("vit", images, {"B": "pixel_values.0"}),
    "mixtral": of_family("mixtral"),
    "bert": of_example("bert", masked, TOKENS),
    "t5": of_example("t5", two_lengths, {"B": "input_ids.0", "S": "input_ids.1", "T": "labels.1"}),
}


@cache
def program(name: str) -> tuple[nn.Module, Program]:
    torch.manual_seed(0)
    case = CASES[name]
    model = case.build()
    return model, shardc.compile(model, case.batch(8, 16), plan=case.plan)


def long(name: str, sizes: list[Size]) -> Any:
    return pytest.param(name, sizes, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("vit", ROWS[2:3]),
        *(long(name, ROWS if name == "vit" else LENGTHS) for name in CASES),
    ],
)  # fmt: skip
def test_each_is_its_own_compile_and_eager(name: str, sizes: list[Size]) -> None:
    model, of_all = program(name)
    for size in sizes:
        batch = CASES[name].batch(*size)
        other, own = of_all.resized(batch), shardc.compile(model, batch, plan=CASES[name].plan)
        assert not fixed(other), size
        wanted = eager(model, {n: t.double() if t.is_floating_point() else t for n, t in batch.items()})
        for one in [other] if same(other, own) else [other, own]:  # a choice by costs may be another
            assert gap(one, wanted) < 1e-12, size


def gap(of: Program, wanted: Mapping[str, Tensor]) -> float:
    """The greatest error of the ranks' loss or gradients, relative to the greatest gradient: that of a key's bias is 0
    but for rounding."""
    found = {port.name: value for port, value in simulate(of.body, of.inputs(), dtype=torch.float64).items()}
    assert found.keys() == wanted.keys()
    scale = max(float(w.abs().max()) for n, w in wanted.items() if n != "loss")
    return max(float((found[n] - w).abs().max()) for n, w in wanted.items()) / scale
