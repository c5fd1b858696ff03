import gc

import pytest
import torch

import shardc
from examples.mlp import mlp
from shardc.ir.gc_pause import gc_paused


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
