"""Programs of ordinary models are kept: no value that users put into their modules is refused without need."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import pydantic
import pytest
import torch
from torch import nn

import shardc
from shardc.program_cache.key import key_of
from shardc.program_cache.origins import UncacheableError
from tests.program_cache import everyday
from tests.program_cache.everyday import Frozen, FrozenChecked, Named, Net, of


def test_ordinary_models_have_the_same_keys_in_each_process() -> None:
    """Of another seed of hashes too, by which sets have another order."""

    def keys(seed: str) -> dict[str, str]:
        env = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-m", "tests.program_cache.everyday"]
        root = Path(shardc.__file__).parents[1]
        return json.loads(subprocess.run(command, env=env, cwd=root, capture_output=True, check=True).stdout)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(keys, ("1", "2"))
    assert not {name: key for name, key in first.items() if key.startswith("none")}
    assert first == second
    assert len({*first.values()}) == len(everyday.MODELS)


@pytest.mark.parametrize("name", ["a dataclass with a method that writes", "arrays, paths, loggers", "attention"])
def test_ordinary_models_are_kept(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What compiling does stands against none of them: methods that write files are watched, and not called."""
    monkeypatch.setenv("SHARDC_CACHE", str(tmp_path))

    def cached() -> str:
        torch.manual_seed(0)
        request = everyday.MODELS[name]()
        return shardc.compile(request.model, request.batch, mesh="dp=2").cached

    assert [cached() for _ in range(2)] == ["stored", "hit"]


VALUES: dict[str, Callable[[], Iterator[Any]]] = {
    "a frozen dataclass": lambda: (Frozen(name=name) for name in ("a", "b")),
    "a named tuple": lambda: (Named(name=name) for name in ("a", "b")),
    "a namespace": lambda: (SimpleNamespace(width=16, name=name) for name in ("a", "b")),
    "a model of pydantic": lambda: (everyday.Checked(names=[name]) for name in ("a", "b")),
    "a frozen model of pydantic": lambda: (FrozenChecked(width=width) for width in (16, 18)),
    "a path": lambda: (Path(name) for name in ("a", "b")),
    "a path of another kind": lambda: (PurePosixPath(name) for name in ("a", "b")),
    "an array": lambda: (np.array([0.5, last]) for last in (1.0, 2.0)),
    "the layout of an array": lambda: iter((np.ones((2, 3)), np.asfortranarray(np.ones((2, 3))))),
    "the shape of an array": lambda: iter((np.ones(6), np.ones((2, 3)))),
    "a number of numpy's": lambda: iter((np.float32(2), np.float32(3), np.float64(3), np.float16(2))),
    "a dtype of numpy's": lambda: iter((np.dtype("f4"), np.dtype("f8"), np.dtype([("a", "f4")]))),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_counts_with_all_that_it_holds(name: str) -> None:
    keys: list[str] = []
    for value in VALUES[name]():
        for _ in range(2):
            model = nn.Linear(16, 16)
            model.held = value
            torch.manual_seed(0)
            keys.append(key_of(of(model)).digest)
    assert keys[::2] == keys[1::2]
    assert len({*keys}) == len(keys) // 2


def test_a_field_of_a_named_tuple_counts_by_its_place() -> None:
    """`first` and `second` of one class, exchanged in another that is called the same."""
    keys: set[str] = set()
    for names in ("first second", "second first"):
        kind: Any = __import__("collections").namedtuple("Pair", names, module=__name__)
        model = nn.Linear(16, 16)
        model.held = kind(1, 1)
        torch.manual_seed(0)
        keys.add(key_of(of(model)).digest)
    assert len(keys) == 2


# ---------------------------------------------------------------------- what stays refused
class Read(nn.Linear):
    held: Any

    def __init__(self, read: Callable[[Any], float], held: Any = None) -> None:
        super().__init__(16, 16)
        self.read, self.held = read, held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.read(self.held)


class Hashed:
    """Its hash is another in each process."""

    def __hash__(self) -> int:
        return hash("a text")


class Asked(pydantic.BaseModel):
    """A validator runs where forward makes an object, and is not named there."""

    width: int

    @pydantic.field_validator("width")
    @classmethod
    def check(cls, width: int) -> int:
        return width * everyday.WIDTH


@pytest.mark.parametrize(
    ("read", "held", "reason"),
    [
        (lambda held: float(hash(held) % 7), Frozen(), r"hash\(\)"),
        (lambda held: float(held.__hash__() % 7), Frozen(), "__hash__"),
        (lambda held: float(hash(held) % 7), Hashed(), r"hash\(\)"),
        (lambda held: float(held.exists()), Path("somewhere"), "ask the disk"),
        (lambda held: float(held.stat().st_size), Path("somewhere"), "ask the disk"),
        (lambda held: float(held[0]()), np.array([object()]), "no plain array"),
        (lambda held: float(held.sum()), np.ma.masked_array([1.0], mask=[True]), "held"),
    ],
    ids=["hash", "its method", "a hash of a text", "a file's being there", "a file's size", "objects", "a mask"],
)
def test_what_is_another_in_each_process_has_no_key(read: Callable[[Any], float], held: Any, reason: str) -> None:
    with pytest.raises(UncacheableError, match=reason):
        key_of(of(Read(read, held)))


def test_a_path_that_only_an_idle_method_asks_the_disk_for_is_watched() -> None:
    class Saving(nn.Linear):
        folder = Path("runs")

        def latest(self) -> bool:
            return self.folder.exists()

    assert "latest" in {function.__name__ for function in key_of(of(Saving(16, 16))).unknown}


def test_what_a_validator_of_pydantic_reads_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[str] = []
    for width in (16, 18):
        torch.manual_seed(0)
        keys.append(key_of(of(Read(lambda _: float(Asked(width=1).width)))).digest)
        monkeypatch.setattr(everyday, "WIDTH", width + 2)
    assert keys[0] != keys[1]


def test_a_frozen_dataclass_may_be_a_key() -> None:
    """Forward looks it up by its hash, which no result shows."""
    torch.manual_seed(0)
    factors = {Frozen(): 2.0}
    assert key_of(of(Net(Frozen()))).digest
    assert key_of(of(Read(lambda held: factors[held], Frozen()))).digest
