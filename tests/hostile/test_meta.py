"""Each hostile module, built on the meta device: with the values of a real one it trains as that one, or is refused.

Never does a tensor begin as zeros, or as whatever lay in memory: `init` makes NaN of all that it is asked for.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.ir.diagnostic import ShardcError
from tests.hostile import test_hostile  # the cases
from tests.hostile.harness import CASES, Case

assert test_hostile
REFUSED = {"meta": {"SC561", "SC104"}, "meta_parameters": {"SC104"}}  # tensors that are neither may lie there, too
TOGETHER = {"AContextVariableCounts"}  # two models of it count in one place
NAMES = [name for name, case in CASES.items() if case.code("dp2") is None and not case.random and name not in TOGETHER]


def nan(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def program_of(case: Case, model: nn.Module) -> shardc.Program:
    loss = None if case.loss is None else case.loss(model)
    return shardc.compile(model, case.batches()[0].clone(), mesh="dp=2", plan={"inputs": {"x": "dp"}}, loss=loss)


def built(case: Case, how: str) -> nn.Module | None:
    """On the meta device in whole, or its parameters alone; None for a module that needs values while it is made."""
    try:
        with torch.device("meta") if how == "meta" else shardc.meta_parameters():
            return case.model()
    except (RuntimeError, NotImplementedError, ValueError, TypeError):
        return None


@pytest.mark.sampled(100)
@pytest.mark.parametrize("how", ["meta", "meta_parameters"])
@pytest.mark.parametrize("name", NAMES)
def test_begins_as_the_model_does(name: str, how: str) -> None:
    case = CASES[name]
    model = built(case, how)
    if model is None:
        pytest.skip("needs values while it is made")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        real = case.model()
        expected = program_of(case, real).launch()
        try:
            trainer = program_of(case, model).launch(state=real.state_dict(), init=nan)
        except ShardcError as refusal:
            code = refusal.code
        else:
            code = None
        if code is not None:
            assert code in REFUSED[how]
            return
        for batch in case.batches():
            losses = [of.step(batch.clone()).loss for of in (trainer, expected)]
            torch.testing.assert_close(*losses, rtol=0, atol=0, equal_nan=True)
        found, wanted = (
            trainer.state_dict(("param", "buffer", "state")),
            expected.state_dict(("param", "buffer", "state")),
        )
        assert list(found) == list(wanted)
        for key, t in found.items():
            if isinstance(t, Tensor):
                torch.testing.assert_close(t, wanted[key], rtol=0, atol=0, equal_nan=True)
        try:
            trainer.sync_to(model)
        except ShardcError as refusal:  # held by a view or a hook, so that no memory can be put in its place
            code = refusal.code
        if code is not None:
            assert code == "SC563"
            model.to_empty(device="cpu")
            trainer.sync_to(model)
        assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))


class Plain(nn.Module):
    """A table that is no buffer; `to` hides from torch that it lies elsewhere."""

    def __init__(self, hidden: bool) -> None:
        super().__init__()
        self.fc, self.table, self.hidden = nn.Linear(4, 4), torch.arange(4.0), hidden

    def forward(self, x: Tensor) -> Tensor:
        return (self.fc(x) * (self.table.to(x.device) if self.hidden else self.table)).square().mean()


@pytest.mark.parametrize("hidden", [True, False])
def test_a_table_that_is_no_buffer(hidden: bool) -> None:
    x = torch.ones(4, 4)
    state = nn.Linear(4, 4).state_dict()
    with torch.device("meta"):
        model = Plain(hidden)
    with pytest.raises(ShardcError) as caught:
        shardc.compile(model, x, mesh="dp=2", plan={"inputs": {"x": "dp"}}).launch(init=nan)
    assert caught.value.code in ("SC561", "SC104")
    assert "shardc.meta_parameters()" in str(caught.value)
    assert "register_buffer" in str(caught.value)
    with shardc.meta_parameters():
        model = Plain(hidden)
    trainer = shardc.compile(model, x, mesh="dp=2", plan={"inputs": {"x": "dp"}}).launch(
        state={f"fc.{key}": t for key, t in state.items()}
    )
    real = Plain(hidden)
    real.fc.load_state_dict(state)
    assert float(trainer.step(x).loss) == pytest.approx(float(real(x).detach()), rel=1e-6)
