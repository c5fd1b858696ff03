"""A trainer's steps on batches of other sizes of the plan's symbols: those of programs that are compiled for them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc import Plan, Trainer, api
from shardc.symbolic.instances import Template
from tests.symbolic.test_instances import PLAN, Net, wide

SIZES = [(8, 16), (4, 10), (8, 16), (6, 10), (4, 9), (2, 22), (6, 16), (2, 4), (12, 5)]


class Dropping(Net):
    """Its masks go by the step."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.25, self.training))


class Fixing(Net):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 12:  # asks
            x = x * 2
        return super().forward(x)


def trainer(plan: Plan, model: type[nn.Module] = Dropping, sample: tuple[int, int] = (8, 16)) -> Trainer:
    torch.manual_seed(0)
    own = model().double()
    optimizer = torch.optim.AdamW(own.parameters(), lr=1e-2)
    return shardc.compile(own, wide(*sample), plan=plan, optimizer=optimizer).launch()


def without_symbols(plan: Plan) -> Plan:
    return plan.model_copy(update={"symbols": Plan().symbols})


def steps(of: Trainer, sizes: Sequence[tuple[int, int]]) -> list[float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [float(of.step(wide(*size)).loss) for size in sizes]


def same_state(one: Trainer, other: Trainer) -> None:
    """Up to the order of sums: with one row a rank, compiling may choose other collectives. Adam divides the gradient
    of a key's bias, which is 0 but for rounding, by its size."""
    torch.testing.assert_close(one.state, other.state, rtol=1e-12, atol=1e-11)


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The batches that steps are compiled for, by the trainer."""
    every: list[Any] = []
    of_request = api._program  # pyright: ignore[reportPrivateUsage]

    def noted(request: Any) -> Any:
        every.append(tuple(request.batch["x"].shape[:2]))
        return of_request(request)

    monkeypatch.setattr(api, "_program", noted)
    return every


@pytest.mark.parametrize(
    "more",
    [{}, *(pytest.param(m, marks=pytest.mark.long) for m in (
        {"storage": {"zero": 3, "axes": ["dp"]}}, {"accumulate": 2}, {"clip_grad_norm": 0.5, "nonfinite": "skip"},
        {"recompute": "full"}))],
)  # fmt: skip
def test_steps_of_other_sizes(more: dict[str, Any], compiles: list[Any]) -> None:
    plan = PLAN.merge(Plan.of(**more))
    sizes = [(4 * rows // 2, length) for rows, length in SIZES] if "accumulate" in more else SIZES
    ours, other = trainer(plan, sample=sizes[0]), trainer(without_symbols(plan), sample=sizes[0])
    compiles.clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        losses = [float(ours.step(wide(*size)).loss) for size in sizes]
    assert compiles[:1] == sizes[1:2]  # the second other size has a template made
    # Under ZeRO-3 instructions stand in another order at some sizes: no one program is for all.
    each = "accumulate" in more or "storage" in more
    assert len(compiles) <= (len(set(sizes[1:]) - {sizes[0]}) if each else 1)
    assert any("for each shape" in str(w.message) for w in said) == each
    assert losses == pytest.approx(steps(other, sizes), rel=1e-12)
    same_state(ours, other)


def test_a_checkpoint_between_sizes(tmp_path: Path) -> None:
    first = trainer(PLAN)
    losses = steps(first, SIZES[:3])
    first.save(tmp_path / "saved")
    losses += steps(first, SIZES[3:5])
    again = trainer(PLAN, sample=(6, 12))
    again.load(tmp_path / "saved")
    assert losses[3:] == pytest.approx(steps(again, SIZES[3:5]), rel=1e-12)
    same_state(first, again)


def test_the_last_smaller_batch_of_an_epoch(compiles: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compiled for alone: other sizes are not, and nothing is said of them."""
    monkeypatch.setattr(Template, "of", lambda _: pytest.fail("sizes are compiled that no batch has"))
    batches = [wide(8, 16), wide(8, 16), wide(2, 16)]
    ours = trainer(PLAN)
    compiles.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seen = [m.loss for m in ours.train(batches, epochs=2, progress=False)]
    assert compiles == [(2, 16)]
    other = trainer(without_symbols(PLAN))
    assert seen == pytest.approx([m.loss for m in other.train(batches, epochs=2, progress=False)], rel=1e-12)
    same_state(ours, other)


def test_what_fixes_a_size_is_said() -> None:
    own = trainer(PLAN, Fixing)
    with pytest.warns(UserWarning, match=r"S > 12(.|\n)*# asks"):
        own.step(wide(8, 10))
    steps(other := trainer(without_symbols(PLAN), Fixing), [(8, 10)])
    same_state(own, other)


@pytest.mark.long
def test_fp16_at_other_sizes() -> None:
    """Bit by bit, with the scale of its loss, where a rank has two rows or more: see `same_state`."""
    plan = PLAN.merge(Plan.of(precision="fp16"))
    sizes = [size for size in SIZES if size[0] > 2]
    own, other = trainer(plan, sample=(8, 16)), trainer(without_symbols(plan), sample=(8, 16))
    assert steps(own, sizes) == steps(other, sizes)
    torch.testing.assert_close(own.state, other.state, rtol=0, atol=0)
