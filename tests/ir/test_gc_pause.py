import gc
import weakref
from contextlib import nullcontext

import pytest
import torch

import shardc
from examples.mlp import mlp
from shardc.ir.gc_pause import all_objects_seen, count_as_old, gc_paused, made_old
from shardc.torch_compat import Recorded


@gc_paused()
def fail() -> None:
    with gc_paused():
        assert not gc.isenabled()
    assert not gc.isenabled()
    raise ValueError("of the caller")


@pytest.mark.parametrize("on", [True, False])
def test_the_collector_runs_afterwards_as_before(on: bool) -> None:
    was_on = gc.isenabled()
    try:
        (gc.enable if on else gc.disable)()
        with pytest.raises(ValueError, match="of the caller"):
            fail()
        assert gc.isenabled() is on
    finally:
        (gc.enable if was_on else gc.disable)()


def test_nothing_is_collected_during_a_compile_and_a_launch() -> None:
    during: list[bool] = []

    def init(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        during.append(gc.isenabled())
        return torch.zeros(shape, dtype=dtype)

    with torch.device("meta"):
        model, batch, *rest = mlp()
    program = shardc.compile(
        model,
        batch,
        plan="configs/plans/mlp.yaml",
        mesh="dp=2, tp=2",
        loss=(*rest, None)[0],
        watch=lambda *_: during.append(gc.isenabled()),
    )
    compiled = len(during)
    program.launch(init=init)
    assert 0 < compiled < len(during)
    assert set(during) == {False}
    assert gc.isenabled()


@pytest.mark.parametrize("frozen", [False, True], ids=["", "set_aside_before"])
def test_objects_that_were_set_aside_are_seen_and_are_so_afterwards(frozen: bool) -> None:
    earlier = [object()]
    were_frozen = gc.get_freeze_count() > 0
    try:
        gc.unfreeze()
        if frozen:
            gc.freeze()
            assert earlier not in gc.get_referrers(earlier[0])
        with all_objects_seen():
            assert any(place is earlier for place in gc.get_referrers(earlier[0]))
        assert (gc.get_freeze_count() > 0) is frozen
    finally:
        gc.unfreeze()
        if were_frozen:
            gc.freeze()


@pytest.mark.parametrize(("old", "collected"), [(False, [0]), (True, [0, 2])], ids=["young", "old"])
def test_tensors_in_garbage_are_not_held(old: bool, collected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """All objects of a process are looked at only for what is no garbage of the compile itself."""
    seen: list[int] = []
    collect = gc.collect
    monkeypatch.setattr(gc, "collect", lambda generation: seen.append(generation) or collect(generation))
    recorded = Recorded()
    with gc_paused():
        tensor = torch.zeros(2)
        recorded._tensors = [weakref.ref(tensor)]  # pyright: ignore[reportPrivateUsage]
        circle: list[object] = [tensor]
        circle.append(circle)
        if old:
            collect()  # what lives grows old by it
        assert recorded.held(but=[tensor]) == []
        assert seen == []
        del tensor, circle
        assert recorded.held(but=[]) == []
    assert seen == collected


def in_garbage() -> weakref.ref[torch.Tensor]:
    tensor = torch.zeros(2)
    circle: list[object] = [tensor]
    circle.append(circle)
    return weakref.ref(tensor)


@pytest.mark.parametrize("aside", [False, True], ids=["", "set_aside_before"])
def test_what_counts_as_old_is_no_young_garbage(aside: bool) -> None:
    were_aside = gc.get_freeze_count() > 0
    try:
        gc.unfreeze()
        with gc_paused():
            if aside:
                gc.freeze()
            alive = [in_garbage()]
            count_as_old()
            alive.append(in_garbage())
            assert (gc.get_freeze_count() > 0) is aside
            gc.collect(0)
            assert [reference() is not None for reference in alive] == [not aside, False]
            gc.collect()
            assert [reference() is not None for reference in alive] == [False, False]
    finally:
        gc.unfreeze()
        if were_aside:
            gc.freeze()


@pytest.mark.parametrize("paused", [False, True])
def test_what_is_made_to_stay_is_not_looked_at(paused: bool) -> None:
    """Garbage from before goes, and what is made in the context is old: neither is left to the next collection."""
    was_on, were_aside = gc.isenabled(), gc.get_freeze_count() > 0
    try:
        gc.unfreeze()
        gc.collect()
        gc.enable()
        with gc_paused() if paused else nullcontext():
            before = in_garbage()
            with made_old():
                assert (before() is None) is paused
                kept: list[object] = [[]]
            assert any(young is kept for young in [*gc.get_objects(0), *gc.get_objects(1)]) is not paused
    finally:
        if were_aside:
            gc.freeze()
        if not was_on:
            gc.disable()
