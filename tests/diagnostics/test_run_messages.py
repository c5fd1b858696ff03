"""What a running job says when it cannot go on, word for word. (Batches of the wrong shape: `test_bad_input.py`.)"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardc
from examples.mlp import mlp
from shardc.ir.diagnostic import ShardcError
from shardc.ir.mesh import Mesh
from shardc.ir.types import TensorType
from shardc.plan.schema import Plan
from shardc.runtime.execute import monitor
from shardc.runtime.execute.monitor import Monitor
from shardc.runtime.oracle.simulate import simulate
from shardc.runtime.train import replicas
from shardc.runtime.train.agreement import agree
from tests.handmade import Builder

NAMES = ["%fc.mm (mlp.py:5)", "%act (mlp.py:6)", "%proj.all_reduce (mlp.py:8)"]


class Named:
    def name(self, rank: int, counter: int) -> str:
        return NAMES[counter]

    def waits(self, rank: int, counter: int) -> bool:
        return False


def program(meta: bool = False) -> shardc.Program:
    with torch.device("meta" if meta else "cpu"):
        model, batch, *rest = mlp()
    return shardc.compile(model, batch, plan="configs/plans/mlp.yaml", mesh="dp=2, tp=2", loss=(*rest, None)[0])


def launched(world: int) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "0")
        patch.setenv("WORLD_SIZE", str(world))
        return program().launch()


@contextmanager
def watching(rank: int, others: dict[int, str]) -> Iterator[Monitor]:
    """Rank `rank`'s monitor, stopped at the all-reduce; of the other ranks, whether they beat on, or what they say."""
    store = dist.HashStore()
    own = Monitor(store, rank, len(others) + 1, Named())
    rest = {other: Monitor(store, other, len(others) + 1, Named()) for other in others}
    try:
        for other, how in others.items():
            rest[other].begin(7)
            rest[other].counter = 1
            if how == "dead":
                rest[other]._bell.stop()
                rest[other]._thread.join()
                rest[other]._publish()
            elif how.startswith("blames "):
                rest[other]._publish(failed=True, blamed=int(how.split()[1]))
            elif how == "left":
                rest[other].close()
            elif how != "late":
                rest[other].report_own_failure(how)
        own.begin(7)
        own.counter = 2
        yield own
    finally:
        for one in (own, *rest.values()):
            one._reports_error = False
            one.close()


def blamed(**others: str) -> None:
    with watching(0, {int(name.removeprefix("rank")): how for name, how in others.items()}) as own:
        raise own.blame(RuntimeError("[pair.cc:553] Connection closed by peer"))


def nonfinite_step() -> None:
    model, batch, *rest = mlp()
    plan = Plan.load("configs/plans/mlp.yaml").merge(Plan.of(nonfinite="raise"))
    trainer = shardc.compile(model, batch, plan=plan, mesh="dp=2, tp=1", loss=(*rest, None)[0]).launch()
    trainer.step(batch)
    trainer.step({"x": batch["x"] * float("inf")})


class Scaled(nn.Module):
    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.fc = nn.Linear(size, size)
        self.register_buffer("scale", torch.arange(float(size)), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.fc(x) * self.scale).square().mean()


def scaled(device: str = "cpu") -> shardc.Program:
    with torch.device(device):
        model = Scaled()
    return shardc.compile(model, torch.ones(4, 4), mesh="dp=2", plan={"inputs": {"x": "dp"}})


def refusing_op() -> None:
    b = Builder(Mesh(tp=2))
    x = b.input("x", "f32[4@tp]", "input")
    b.output("output", "y", b.call("h.0.view", "f32[5]", torch.ops.aten.view.default, x, [5]))
    simulate(b.graph(), {"x": torch.ones(4)})


def differing() -> None:
    """Two ranks come to the launch; the plans are those of a seed by rank."""
    store, limit = dist.HashStore(), timedelta(seconds=20)
    plans = [f"seed: {rank}\nmesh: dp=2" for rank in range(2)]
    with ThreadPoolExecutor(2) as ranks:
        meeting = [ranks.submit(agree, store, rank, 2, {"plan": plans[rank]}, limit) for rank in range(2)]
        for ended in meeting:
            ended.result()


def another_batch() -> None:
    """What rank 1 is given, as every rank reports it after the comparison of hashes."""
    x = replicas.Item("x", "input", TensorType.parse("f32[8, 16]"), None)
    raise ShardcError(*replicas._diagnostics([(x, [1])], "before step 0", False))


CASES: dict[str, tuple[str, Callable[[], object]]] = {
    "world_size": ("SC506", lambda: launched(8)),
    "missing_parameter": ("SC504", lambda: program(meta=True).launch()),
    "missing_parameter_in_state": ("SC504", lambda: program(meta=True).launch(state={"up.wieght": torch.zeros(1)})),
    "no_weights_file": ("SC504", lambda: program(meta=True).launch(state="no/such/model.safetensors")),
    "uncomputed_buffer": ("SC561", lambda: scaled("meta").launch(state=Scaled().state_dict())),
    "no_export": ("SC562", lambda: scaled().launch().export_hf("out")),
    "model_mismatch": ("SC563", lambda: scaled().launch().sync_to(Scaled(5))),
    "dead_rank": ("SC502", lambda: blamed(rank1="late", rank2="dead")),
    "dead_rank_that_another_found": ("SC502", lambda: blamed(rank1="blames 2", rank2="late")),
    "no_timeline": ("SC510", lambda: program().launch().timeline(mlp()[1])),
    "rank_that_closed": ("SC502", lambda: blamed(rank1="left")),
    "rank_with_an_error": ("SC502", lambda: blamed(rank1="late", rank2="ValueError: no such file, in %act")),
    "nonfinite": ("SC509", lambda: nonfinite_step()),
    "refusing_op": ("SC511", refusing_op),
    "ranks_differ": ("SC541", differing),
    "replicas_differ": ("SC542", another_batch),
    "absent_rank": ("SC543", lambda: agree(dist.HashStore(), 0, 2, {}, timedelta(seconds=0.2))),
    "late_rank": ("SC503", lambda: blamed(rank1="late")),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_message(case: str, golden: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "BEAT", 0.1)
    monkeypatch.setattr(monitor, "SILENCE", 1.0)
    monkeypatch.setattr(monitor, "this_process", lambda: None)  # all ranks are this process
    code, act = CASES[case]
    with pytest.raises(ShardcError) as raised:
        act()
    assert raised.value.code == code
    assert raised.value.diagnostics[0].hint
    golden(f"run/{case}.txt", str(raised.value))


class _Gone:
    """The store of a job whose rank 0 has ended."""

    def __getattr__(self, name: str) -> object:
        raise ConnectionError("connection reset by peer")


def test_rank_0_does_not_take_its_reason_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the store: it stays until the others have read what it failed of."""
    monkeypatch.setattr(monitor, "BEAT", 0.1)
    store = dist.HashStore()
    first, other = (Monitor(store, rank, 2, Named()) for rank in range(2))
    first.begin(7)
    first.counter = 1
    other.counter = 2
    first.close(ValueError("no such file"))
    other._store = _Gone()
    said = str(other.blame(RuntimeError("[pair.cc:553] Connection closed by peer")))
    assert "rank 0 died, of an error of its own: ValueError: no such file" in said
    assert "instruction %act (mlp.py:6) of step 7" in said
    for one in (first, other):
        one._reports_error = False
        one._store = dist.HashStore()
        one.close()
