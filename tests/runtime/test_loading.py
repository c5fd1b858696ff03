"""Loaders over epochs: batches go on in their order wherever a checkpoint was made, and none is fetched too many."""

from __future__ import annotations

import json
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from shardc.ir.diagnostic import ShardcError
from shardc.runtime.train.loader_state import decode, encode
from shardc.runtime.train.loading import Fetched, Loading, kept, resumed

ROWS = list(range(10))
EPOCHS = 3


def stateful(**options: Any) -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    return module.StatefulDataLoader(ROWS, batch_size=3, **options)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


class Stream(IterableDataset[int]):
    """Rows in an order of the epoch, without a length."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from (int(i) for i in torch.randperm(10, generator=torch.Generator().manual_seed(self.epoch)))


class Counted:
    """Other batches in each pass: only its passes say which."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        yield from range(10 * self.passes, 10 * self.passes + 4)


def torch_s_own() -> Any:
    torch.manual_seed(5)
    return DataLoader(ROWS, batch_size=3, shuffle=True)  # type: ignore[arg-type]


LOADERS: dict[str, Callable[[], Any]] = {
    "list": lambda: [[1], [2], [3], [4]],
    "counted": Counted,
    "sequential": lambda: DataLoader(ROWS, batch_size=3),  # type: ignore[arg-type]
    "generator": lambda: DataLoader(ROWS, batch_size=3, shuffle=True, generator=generator()),  # type: ignore[arg-type]
    "torch's generator": torch_s_own,
    "sampler": lambda: DataLoader(ROWS, batch_size=2, sampler=DistributedSampler(ROWS, 2, 1, seed=4)),  # type: ignore[arg-type]
    "stream": lambda: DataLoader(Stream(), batch_size=3),
    "stateful": lambda: stateful(shuffle=True, generator=generator()),
    "stateful workers": lambda: stateful(shuffle=True, generator=generator(), num_workers=1),
    "stateful sampler": lambda: stateful(sampler=DistributedSampler(ROWS, 2, 1, seed=4)),  # type: ignore[arg-type]
}
WITH_STATE = {"stateful", "stateful workers", "stateful sampler"}
SAME_EPOCHS = {"list", "sequential"}


def plain(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def taken(loading: Loading, limit: int | None = None) -> list[Any]:
    return [plain(fetched.batch) for fetched in loading.take(limit)]


@pytest.mark.parametrize("name", LOADERS)
def test_a_run_goes_on_with_the_very_batches_wherever_it_stopped(name: str) -> None:
    whole: list[Any] = []
    positions: list[str] = []
    loading = Loading(LOADERS[name](), EPOCHS, keeps=True)
    for fetched in loading.take(None):
        whole.append(plain(fetched.batch))
        positions.append(json.dumps(kept(loading.position)))  # as a checkpoint has it
    positions.append(json.dumps(kept(loading.position)))
    count = len(whole) // EPOCHS
    assert count >= 2
    assert (whole[:count] == whole[count : 2 * count]) == (name in SAME_EPOCHS)
    assert all(("state" in text) == (name in WITH_STATE) for text in positions)
    stops = range(len(whole)) if "workers" not in name else (1, count - 1, count, 2 * count - 2)
    for stop in stops:
        batches = LOADERS[name]()
        rest = Loading(batches, EPOCHS, resumed(json.loads(positions[stop]), 0, 1, batches), keeps=True)
        assert taken(rest) == whole[stop + 1 :], stop
    batches = LOADERS[name]()
    assert taken(Loading(batches, EPOCHS, resumed(json.loads(positions[-1]), 0, 1, batches))) == []


@pytest.mark.parametrize("passed", [0, 3, 4, 6, 11])
def test_an_earlier_checkpoint_says_how_many_batches_there_were(passed: int) -> None:
    data = [[0], [1], [2], [3]]
    assert taken(Loading(data, EPOCHS, passed)) == (3 * data)[passed:]
    assert taken(Loading(data, None, passed)) == data[passed:]


def test_no_more_is_fetched_than_is_asked_for() -> None:
    """An iterator's owner may go on with it."""
    numbers = iter(range(10))
    assert taken(Loading(numbers, None), 4) == [0, 1, 2, 3]
    assert next(numbers) == 4
    fetched = Loading(numbers, None, ahead=True).take(2)
    next(fetched)
    assert next(numbers) == 6
    fetched.close()  # type: ignore[attr-defined]
    loader = Counted()
    loading = Loading(loader, 2, ahead=True)
    seen = 0
    for _ in loading.take(4):
        seen += 1
        loading.look_ahead()
        assert loading.position == {"epoch": 0, "batch": seen}  # of what was trained on, not of what was fetched
    assert (seen, loader.passes) == (4, 1)


def test_what_is_fetched_ahead_comes_in_order_and_its_error_in_its_turn() -> None:
    before = threading.active_count()

    class Failing:
        def __iter__(self) -> Iterator[int]:
            yield from (1, 2)
            raise LookupError("no third row")

    loading = Loading(Failing(), 1, ahead=True)
    seen: list[int] = []

    def run() -> None:
        for fetched in loading.take(None):
            seen.append(fetched.batch)
            loading.look_ahead()
            loading.look_ahead()  # one batch ahead, not two
            assert len(seen) < 2 or not loading._wants_more or seen == [1, 2]  # pyright: ignore[reportPrivateUsage]

    with pytest.raises(LookupError, match="no third row") as caught:
        run()
    assert seen == [1, 2]
    assert "raise LookupError" in "".join(traceback.format_exception(caught.value))  # where it was raised
    assert threading.active_count() == before
    twice = Loading([1, 2, 3], 2, ahead=True)
    order: list[Any] = []
    for fetched in twice.take(None):
        order.append(fetched.batch)
        twice.look_ahead()
    assert order == [1, 2, 3, 1, 2, 3]


def test_batches_are_copied_as_they_are_fetched() -> None:
    loading = Loading([1, 2], 1, copy=lambda batch: 10 * batch)
    assert [(f.batch, f.for_step) for f in loading.take(None)] == [(1, 10), (2, 20)]
    assert Fetched(1, 2, {}).for_step == 2


@pytest.mark.parametrize("name", ["list", "sampler", "stream", "counted"])
def test_how_many_batches_there_will_be(name: str) -> None:
    total = Loading(LOADERS[name](), EPOCHS).total
    assert total == {"list": 12, "sampler": 9}.get(name)
    assert Loading(LOADERS[name](), None).total is None


def test_an_epoch_without_batches_is_refused() -> None:
    for batches in (iter([1, 2]), []):
        with pytest.raises(ShardcError, match="of train has no batch") as caught:
            taken(Loading(batches, 3))
        assert caught.value.code == "SC553"

    class Once:
        """It has a state, and ends for good."""

        def __init__(self) -> None:
            self.rows = iter([1, 2])

        def __iter__(self) -> Iterator[int]:
            yield from self.rows

        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    with pytest.raises(ShardcError, match="epoch 1 of train has no batch"):
        taken(Loading(Once(), 3, keeps=True))


def test_loaders_of_other_parts_do_not_go_on() -> None:
    sampler, data = LOADERS["sampler"](), kept({}, [{"epoch": 1, "batch": 2}] * 2)
    assert resumed(data, 1, 2, sampler) == {"epoch": 1, "batch": 2}
    assert resumed(data, 3, 4, sampler) == {"epoch": 1, "batch": 2}  # the same rows, dealt to four
    with pytest.raises(ShardcError, match="brought 2 parts of a batch, these bring 4") as caught:
        resumed(data, 3, 4, [[1]])
    assert caught.value.code == "SC557"
    stateful_data = kept({}, [{"epoch": 0, "batch": 2, "state": {}}] * 2)
    with pytest.raises(ShardcError, match="SC557"):
        resumed(stateful_data, 0, 1, sampler)
    with pytest.raises(ShardcError, match="has the state of a loader, and this one, a list, takes none"):
        Loading([[1]], 2, resumed(stateful_data, 0, 2, [[1]]))


@pytest.mark.parametrize("bad", [None, {}, {"positions": []}, {"positions": [{"epoch": -1, "batch": 0}]}, [1], "x"])
def test_what_is_no_position_is_refused(bad: object) -> None:
    with pytest.raises(ShardcError, match="SC557"):
        resumed(bad, 0, 1, [])


# ---------------------------------------------------------------------- states as plain data
def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, np.ndarray | np.generic):
        return np.asarray(a).dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


STATES = [
    {"a": 1, "b": [1.5, None, True, "x"], "c": (1, (2, "y")), "d": b"\x00\xff", "e": {3, 4}, "f": frozenset({"z"})},
    {1: "one", (2, 3): {"!": "not ours"}, "": [[], {}, ()]},
    [torch.arange(6).view(2, 3).t(), torch.tensor(2.5, dtype=torch.bfloat16), torch.zeros(0, 4), torch.tensor([True])],
    {
        "numpy": np.random.default_rng(1).bit_generator.state,
        "random": np.arange(5, dtype=">i4"),
        "one": np.float32(2.5),
    },
    {"complex": torch.randn(3, dtype=torch.complex64), "big": 2**200, "generator": generator().get_state()},
]


@pytest.mark.parametrize("state", STATES)
def test_a_state_comes_back_as_it_was(state: Any) -> None:
    written = encode(state)
    assert same(state, decode(json.loads(json.dumps(written))))


def test_a_state_is_a_copy() -> None:
    state: dict[str, Any] = {"x": [1], "t": torch.zeros(2)}
    written = encode(state)
    state["x"].append(2)
    state["t"] += 1
    assert same(decode(written), {"x": [1], "t": torch.zeros(2)})


@pytest.mark.parametrize("bad", [object(), torch.float32, np.array(["text"]), torch.zeros(2, device="meta"), len])
def test_a_state_that_needs_code_is_refused_with_its_place(bad: object) -> None:
    with pytest.raises(ShardcError, match=r"SC557.*sampler\.1\.rng") as caught:
        encode({"sampler": [0, {"rng": bad}]})
    assert "state_dict() return numbers" in str(caught.value)


TENSOR = encode(torch.arange(3))
BAD = [
    {"!": "tensor"},
    {"!": "code", "data": "", "shape": []},
    {**TENSOR, "shape": [4]},
    {**TENSOR, "shape": [-3]},
    {**TENSOR, "dtype": "load"},
    {**TENSOR, "data": "?"},
    {"!": "array", "dtype": "O", "shape": [1], "data": ""},
    {"!": "set", "items": [[1]]},
    {"!": "dict", "items": [[{}, 1]]},
    {"!": ["tensor"]},
    [[[{"!": "bytes", "data": 3}]]],
    1j,
]


@pytest.mark.parametrize("bad", BAD)
def test_what_is_no_state_is_refused(bad: object) -> None:
    with pytest.raises(ShardcError, match="SC557"):
        decode(bad)


def test_a_state_that_nests_without_an_end_is_refused() -> None:
    nested: list[Any] = []
    for _ in range(100):
        nested = [nested]
    with pytest.raises(ShardcError, match="SC557"):
        decode(nested)
