"""A rank that is not as the others is named, with what differs, before it can spoil a step: on every rank the same."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardc.ir.diagnostic import ShardcError
from shardc.runtime.train.agreement import agree
from tests.distributed.ranks import start

WORKER = Path(__file__).parent / "agreement_worker.py"
SAID = {
    "seed": "SC541 ranks-differ]: rank 1 has another random seed than rank 0",
    "rate": "SC541 ranks-differ]: rank 1 has other learning rates than rank 0",
    "rate_later": "SC542 replicas-differ]: before step 2: rank 1 has another learning rate than the other ranks",
    "plan": "SC541 ranks-differ]: rank 1 has another plan than rank 0",
    "version": "SC541 ranks-differ]: rank 1 has another version of shardc than rank 0",
    "data": "SC542 replicas-differ]: before step 0: rank 1 was given another batch than the other ranks",
    "data_pipeline": "SC542 replicas-differ]: before step 0: rank 1 was given another batch than the other ranks",
    "optimizer": "SC541 ranks-differ]: rank 1 has another program than rank 0",
    "weights": "SC542 replicas-differ]: at the launch: rank 1 starts from other values than the other ranks",
    "weights_sharded": "SC542 replicas-differ]: at the launch: rank 1 starts from other values than the other ranks",
    "forward": "SC541 ranks-differ]: rank 1 has another program than rank 0",
    "written": "SC542 replicas-differ]: before step 1: rank 1 holds other values than the other ranks",
    "kind": "SC541 ranks-differ]: rank 1 has another program than rank 0",
    "nan": "SC542 replicas-differ]: at the launch: rank 1 starts from other values than the other ranks",
    "nan_later": "SC542 replicas-differ]: before step 1: rank 1 holds other values than the other ranks",
    "moved": "SC542 replicas-differ]: before step 1: rank 1 is at another step or random seed than the other ranks",
}
CAUSES = {
    "rate_later": "different: learning rate lr.0",
    "plan": "rank 1, line 3: clip_grad_norm: 2.0",
    "data": "different: input x",
    "optimizer": 'mul.Tensor(%"up.weight:momentum_buffer", 0.8)',
    "weights": "different: param up.weight, param up.bias, param down.weight and 1 more",
    "forward": "%tanh = tanh(%up.add)",
    "written": "different: param up.weight",
    "kind": "exp_avg",
    "nan": "different: param up.weight",
    "nan_later": "different: param up.weight",
}


def test_a_rank_that_differs_is_named_by_every_rank(tmp_path: Path) -> None:
    first, second = start("agree", 2, tmp_path, worker=WORKER)
    assert first is not None
    assert second is not None
    alike = [name for name in first if name.startswith("alike")]
    assert sorted(first) == sorted([*alike, *SAID, "rounded"])
    for name in alike:
        assert len(first[name]["losses"]) == 4, first[name]
        assert first[name] == {**second[name], "warnings": []}
    assert first["alike"]["losses"] == pytest.approx(first["alike_sharded"]["losses"], rel=1e-5)
    for name, said in SAID.items():
        assert said in first[name]["error"], first[name]
        assert CAUSES.get(name, "") in first[name]["error"], first[name]
        if name != "moved":  # each says at which step it is itself
            assert first[name]["error"] == second[name]["error"]
    assert len(first["rounded"]["losses"]) == 4
    assert (
        "before step 1: rank 1 and the others differ in what they hold of up.weight" in first["rounded"]["warnings"][0]
    )


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", [*SAID, "twice"])
def test_a_job_of_ranks_that_differ_ends_by_itself(case: str, tmp_path: Path) -> None:
    """Each of the scripts ends by its error; `start` fails where one still runs."""
    first, second = start(case, 2, tmp_path, limit=60, worker=WORKER)
    assert first is not None
    assert second is not None
    if case == "twice":
        assert first["error"] is None
        assert second["code"] == "SC502"
        assert "rank 0 closed its trainer, and rank 1 was waiting for it" in second["error"]
        return
    assert SAID[case] in first["error"]
    assert first["code"] == second["code"] == SAID[case][:5]
    if case != "moved":
        assert first["error"] == second["error"]


class SlowStore:
    """A store that a rank reads from late, as one does that gets no processor for a while."""

    def __init__(self, store: Any, seconds: float) -> None:
        self._store, self._seconds = store, seconds

    def get(self, key: str) -> bytes:
        time.sleep(self._seconds)
        value: bytes = self._store.get(key)
        return value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_a_slow_rank_reads_what_differs_before_the_store_ends() -> None:
    """Rank 0 holds the store, which is gone once it has raised its error."""
    limit = timedelta(seconds=20)
    server: Any = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, 2, is_master=False)

    def meet(store: Any, rank: int) -> str:
        with pytest.raises(ShardcError, match="SC541") as caught:
            agree(store, rank, 2, {"random seed": str(rank)}, limit)
        return str(caught.value)

    with ThreadPoolExecutor(1) as other:
        second = other.submit(meet, SlowStore(client, 0.5), 1)
        first = meet(server, 0)
        del server
        assert second.result() == first


def test_the_end_of_the_store_is_an_error_that_says_so() -> None:
    server: Any = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, 2, is_master=False)
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(agree, client, 1, 2, {"random seed": "0"}, timedelta(seconds=20))
        server.wait(["launch/0/hashes/1"], timedelta(seconds=20))
        del server
        with pytest.raises(ShardcError, match=r"SC543.*the process that holds the job's store ended"):
            waiting.result()


def test_no_rank_goes_on_alone() -> None:
    """A rank that gave up after it left its hashes confirms nothing: the round is broken, and the next one is not."""
    store, limit = dist.HashStore(), timedelta(seconds=0.5)
    gave_up = store.add("launches", 1)
    store.set("launch/0/hashes/0", json.dumps({}))
    assert gave_up == 1
    with pytest.raises(ShardcError, match="SC543"):
        agree(store, 1, 2, {}, limit)
    with ThreadPoolExecutor(2) as ranks:
        launches = [ranks.submit(agree, store, rank, 2, {"random seed": "0"}, timedelta(seconds=20)) for rank in (0, 1)]
        assert [launch.result() for launch in launches] == ["launch/1", "launch/1"]
