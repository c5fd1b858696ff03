"""Loaders that draw from generators of their samplers, or share one with an evaluation, go on in the same order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from shardc.ir.diagnostic import ShardcError
from shardc.runtime.train.loading import Loading, kept, resumed
from tests.runtime.looped import batch, started

ROWS: Any = [{"x": row} for seed in range(3) for row in batch(seed)["x"]]
SAMPLERS: dict[str, Callable[[torch.Generator | None], Any]] = {
    "random": lambda g: RandomSampler(ROWS, generator=g),
    "weighted": lambda g: WeightedRandomSampler([1.0] * len(ROWS), len(ROWS), generator=g),
    "subset": lambda g: SubsetRandomSampler(range(len(ROWS)), generator=g),
}


def own() -> torch.Generator:
    return torch.Generator().manual_seed(4)


def stateful(*args: Any, **options: Any) -> Any:
    return pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader(*args, **options)


def made(kind: str, how: str) -> Any:
    """A loader as a script makes it when it starts."""
    torch.manual_seed(9)
    sampler = SAMPLERS[kind](None if how == "of torch" else own())
    if how == "in batches":
        return DataLoader(ROWS, batch_sampler=BatchSampler(sampler, 4, drop_last=False))
    if how == "of torch":
        return DataLoader(ROWS, 4, sampler=sampler, generator=own())
    return (stateful if how == "stateful" else DataLoader)(ROWS, 4, sampler=sampler)


def batches(loader: Any, position: Any = 0, stop: int = 0) -> tuple[list[Any], Any]:
    """Those of three epochs, from a position up to a batch, and where that is."""
    loading, found = Loading(loader, 3, position, keeps=True), list[Any]()
    taken = loading.take(None)
    for fetched in taken:
        found.append(fetched.batch["x"].tolist())
        if len(found) == stop:
            break
    return found, kept(loading.position)


@pytest.mark.parametrize("how", ["plain", "in batches", "of torch", "stateful"])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_sampler_s_own_generator_goes_on(kind: str, how: str) -> None:
    whole, _ = batches(made(kind, how))
    assert len(whole) == 9
    assert whole[:3] != whole[3:6]
    for stop in range(1, 9):
        first, data = batches(made(kind, how), stop=stop)
        loader = made(kind, how)
        rest, _ = batches(loader, resumed(data, 0, 1, loader))
        assert first + rest == whole, stop


def test_other_samplers_are_refused() -> None:
    _, data = batches(made("random", "plain"), stop=2)
    loader = DataLoader(ROWS, 4)
    with pytest.raises(ShardcError, match=r"SC557.*1 samplers' generators, these draw from 0"):
        batches(loader, resumed(data, 0, 1, loader))
    with pytest.raises(ShardcError, match=r"SC557.*brought 1 part of a batch, these bring 2"):
        resumed(data, 0, 2, loader)


def losses(make: Callable[[], tuple[Any, Any]], folder: Path, stop: int = 0) -> list[float]:
    (given, evaluated), found = make(), list[float]()
    trainer, _ = started()
    options: dict[str, Any] = {} if evaluated is None else {"evaluate": evaluated, "evaluate_every": 1}
    with trainer:
        for metrics in trainer.train(given, epochs=2, checkpoint=folder, progress=False, **options):
            found.append(metrics.loss)
            if metrics.step == stop:
                break
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["the same", "shared", "shared, stateful"])
def test_an_evaluation_draws_nothing_of_the_training_s_order(kind: str, tmp_path: Path) -> None:
    def loaders(evaluates: bool = True) -> tuple[Any, Any]:
        generator, of = own(), stateful if "stateful" in kind else DataLoader
        given = of(ROWS, 4, shuffle=True, generator=generator)
        beside = given if kind == "the same" else of(ROWS, 4, shuffle=True, generator=generator)
        return given, beside if evaluates else None

    whole = losses(lambda: loaders(False), tmp_path / "alone")
    assert losses(loaders, tmp_path / "whole") == whole
    assert losses(loaders, tmp_path / "run", stop=2) + losses(loaders, tmp_path / "run") == whole


def test_a_loader_with_a_state_is_not_evaluated_while_it_is_trained_on() -> None:
    trainer, _ = started()
    loader: Any = stateful(ROWS, 4)
    with pytest.raises(ShardcError, match=r"SC553.*the very StatefulDataLoader that it trains on"):
        next(trainer.train(loader, epochs=1, evaluate=loader, progress=False))
    assert trainer.steps == 0
