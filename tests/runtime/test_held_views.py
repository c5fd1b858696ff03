"""Views of what is held are made once, and never of what was held before: a rank's steps against the simulation's.

The simulation interprets the graph and makes nothing once. Both are in float64, and between steps the same is done to
both: whatever users do to parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import shardc
from benchmarks.gpt import GPT
from shardc.ir import arena
from shardc.runtime.execute import held_views
from shardc.runtime.execute.held_views import HeldViews
from shardc.runtime.train.trainer import Trainer
from tests.ports import free_port


def batch_of(rows: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randint(32, (rows, 16), generator=generator) for name in ("input_ids", "labels")}


def program_of(model: GPT, **plan: Any) -> shardc.Program:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return shardc.compile(model, batch_of(4), mesh="dp=1", plan={"fuse": True, **plan}, optimizer=optimizer)


def model_of(seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT(32, 32, 2, 2, 16).double()


@cache
def program(accumulate: int = 1) -> shardc.Program:
    return program_of(model_of(), **({"accumulate": accumulate} if accumulate > 1 else {}))


Launch = Callable[..., tuple[Trainer, Trainer]]


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    """A program's trainer as a job of one rank, whose results all lie in its arena, and simulated."""
    monkeypatch.setattr(arena, "SPARE", 0)
    opened: list[Trainer] = []

    def launched(program: shardc.Program) -> tuple[Trainer, Trainer]:
        simulated = program.launch()
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        with monkeypatch.context() as within:
            for key, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", **place}.items():
                within.setenv(key, value)
            job = program.launch(device="cpu", timeout=60)
        opened.append(job)
        return job, simulated

    yield launched
    for trainer in reversed(opened):
        trainer.close()


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def step(trainers: tuple[Trainer, Trainer], rows: int = 4, seed: int = 0) -> None:
    job, simulated = (trainer.step(batch_of(rows, seed)) for trainer in trainers)
    close(job.loss, simulated.loss)


def same_state(trainers: tuple[Trainer, Trainer]) -> None:
    job, simulated = (trainer.state for trainer in trainers)
    assert job.keys() == simulated.keys()
    for name, x in job.items():
        close(x, simulated[name])


def matrices(trainer: Trainer) -> list[str]:
    return [name for name, x in trainer.state.items() if x.dim() == 2 and "." in name]


def replaced(trainer: Trainer) -> None:
    for name in matrices(trainer):
        trainer.state[name] = trainer.state[name] * 0.5


def moved(trainer: Trainer) -> None:
    for x in trainer.state.values():
        x.data = x.data * 0.5 if x.is_floating_point() else x.data.clone()


def transposed(trainer: Trainer) -> None:
    """The same memory, read otherwise."""
    for name in matrices(trainer):
        x = trainer.state[name]
        if x.shape[0] == x.shape[1]:
            x.data = x.data.t()


def written(trainer: Trainer) -> None:
    for name in matrices(trainer):
        trainer.state[name].mul_(0.5)


def swapped(trainer: Trainer) -> None:
    """Two parameters of one shape in each other's place."""
    one, other = "blocks.0.mlp.0.weight", "blocks.1.mlp.0.weight"
    names = [name for name in trainer.state if name in (one, other)] or matrices(trainer)
    pairs = [(a, b) for a in names for b in names if a < b and trainer.state[a].shape == trainer.state[b].shape]
    a, b = pairs[0]
    trainer.state[a], trainer.state[b] = trainer.state[b], trainer.state[a]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("change", [replaced, moved, transposed, written, swapped])
def test_what_is_held_changes_between_steps(change: Callable[[Trainer], None], accumulate: int, launch: Launch) -> None:
    trainers = launch(program(accumulate))
    step(trainers)
    step(trainers, seed=1)
    for trainer in trainers:
        change(trainer)
    step(trainers, seed=2)
    step(trainers, seed=3)
    same_state(trainers)


def test_an_old_view_would_be_seen(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above fails where views are not compared with what is held."""
    kept: dict[tuple[int, int], Any] = {}

    def fill_once(self: HeldViews, env: list[Any]) -> None:
        for source, calls in self._calls.items():
            if (id(self), source) not in kept:
                kept[id(self), source] = held_views._views(env, env[source], calls)[0]
            for slot, view in kept[id(self), source]:
                env[slot] = view

    monkeypatch.setattr(HeldViews, "fill", fill_once)
    trainers = launch(program())
    step(trainers)
    for trainer in trainers:
        replaced(trainer)
    with pytest.raises(AssertionError):
        step(trainers)


def test_views_are_made_in_the_first_step_alone(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    plain = held_views._views

    def counted(*args: Any) -> Any:
        made.append(1)
        return plain(*args)

    monkeypatch.setattr(held_views, "_views", counted)
    job, _ = launch(program())
    job.step(batch_of(4))
    first = len(made)
    assert first >= 6  # products of two layers that have no bias of their own
    job.step(batch_of(4, 1))
    assert len(made) == first


def test_evaluations_and_batches_of_other_sizes_come_between(launch: Launch) -> None:
    trainers = launch(program())
    for rows in (4, 2, 4, 3, 2, 4):
        step(trainers, rows, seed=rows)
        job, simulated = (trainer.evaluate([batch_of(4, 7), batch_of(4, 8)]).loss for trainer in trainers)
        assert job == pytest.approx(simulated, rel=1e-9)
    same_state(trainers)


def test_two_programs_share_a_module_and_a_third_has_its_copy(launch: Launch) -> None:
    """Their steps alternate; each trainer has tensors of its own."""
    model = model_of()
    one, other, third = (launch(program_of(m)) for m in (model, model, copy.deepcopy(model)))
    for seed in range(3):
        for trainers in (one, other, third):
            step(trainers, seed=seed)
    for trainers in (one, other, third):
        same_state(trainers)
    for name, x in one[0].state.items():
        close(x, third[0].state[name])


def test_the_module_is_changed_under_a_trainer(launch: Launch) -> None:
    """A trainer holds tensors of its own: `load_state_dict`, `to` and writes to the module do not reach them. What the
    trainer is given, it uses: `sync_to` and a checkpoint's values."""
    model = model_of()
    trainers = launch(program_of(model))
    step(trainers)
    model.load_state_dict(model_of(5).state_dict())
    step(trainers, seed=1)
    with torch.no_grad():
        next(iter(model.parameters())).zero_()
    step(trainers, seed=2)
    same_state(trainers)


def test_a_checkpoint_is_loaded_between_steps(launch: Launch, tmp_path: Any) -> None:
    trainers = launch(program())
    step(trainers)
    for number, trainer in enumerate(trainers):
        trainer.save(tmp_path / str(number))
    step(trainers, seed=1)
    for number, trainer in enumerate(trainers):
        trainer.load(tmp_path / str(number))
    step(trainers, seed=2)
    step(trainers, seed=3)
    same_state(trainers)


def test_a_step_that_raises_is_made_again(launch: Launch) -> None:
    trainers = launch(program())
    step(trainers)
    bad = batch_of(4)
    bad["labels"][0, 0] = 99
    for trainer in trainers:
        with pytest.raises(shardc.ShardcError, match="SC507"):
            trainer.step(bad)
    step(trainers, seed=1)
    same_state(trainers)


# ---------------------------------------------------------------------- alone
def test_a_view_that_is_a_copy_is_made_in_each_run() -> None:
    views = HeldViews({0: [(lambda env: env[0].reshape(-1), ((None, 1),))]})
    x = torch.arange(6.0).view(2, 3).t()  # to be flattened, it is copied
    env: list[Any] = [x, None]
    views.fill(env)
    x += 1
    views.fill(env)
    assert torch.equal(env[1], x.reshape(-1))


def test_results_of_several_views_are_those_of_the_same_tensor() -> None:
    views = HeldViews({0: [(lambda env: env[0].split(1), ((0, 1), (1, 2))), (lambda env: env[1].t(), ((None, 3),))]})
    x, y = torch.arange(6.0).view(2, 3), torch.zeros(2, 3)
    first: list[Any] = [x, None, None, None]
    views.fill(first)
    again: list[Any] = [x, None, None, None]
    views.fill(again)
    assert all(a is b for a, b in zip(first, again, strict=True))
    other: list[Any] = [y, None, None, None]
    views.fill(other)
    assert all(part.untyped_storage().data_ptr() == y.untyped_storage().data_ptr() for part in other)
    views.fill(again)
    assert torch.equal(again[3], x[:1].t())
