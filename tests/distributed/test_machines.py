"""Jobs over machines: two agents of torchrun, in working folders of their own; one is killed in the middle.

Its return, or going on without it, ends in the losses of the job that nobody interrupted.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.distributed.machines_worker import STEPS, batches, program
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).parent / "machines_worker.py"
LIMIT = 150.0  # seconds, of a busy machine
RENDEZVOUS = "join_timeout=90,last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=2"  # seconds
BACK = 6.0  # seconds until a machine is up again; torchrun needs 2 to see that it was gone


class Machines:
    """Agents that share a folder, and nothing else."""

    def __init__(self, folder: Path, nodes: str) -> None:
        self.port = free_port()
        self.folder, self.nodes = folder, nodes
        self.agents: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, node: int) -> None:
        own = self.folder / f"machine{node}"
        own.mkdir(exist_ok=True)
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", self.nodes, "--nproc-per-node", "1"),
            *("--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-id", "job"),
            *("--rdzv-endpoint", f"127.0.0.1:{self.port}", "--local-addr", "127.0.0.1"),
            *("--rdzv-conf", f"is_host={node == 0},{RENDEZVOUS}"),
            *(str(WORKER), str(self.folder)),
        ]
        # With a shared store, torch's survivor of a round never tells a newcomer where it is: both wait for 60 seconds.
        own_env = {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]), "OMP_NUM_THREADS": "1"}
        env = {**os.environ, **own_env, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with (self.folder / f"log.{node}").open("ab") as log:
            self.agents[node] = subprocess.Popen(command, env=env, cwd=own, stdout=log, stderr=log)

    def kill(self, node: int) -> None:
        """A machine that loses its power: the agent, and the rank that it started."""
        agent = self.agents[node]
        ranks = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        agent.kill()
        agent.wait()
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(int(rank), signal.SIGKILL)

    def losses(self) -> list[tuple[int, int, float]]:
        path = self.folder / "losses"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [(int(step), int(ranks), float(loss)) for step, ranks, loss in (line.split() for line in lines)]

    def wait_for(self, step: int, ranks: int) -> None:
        deadline = time.monotonic() + LIMIT
        while not any(done >= step and by == ranks for done, by, _ in self.losses()):
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.1)

    def logs(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in sorted(self.folder.glob("log.*")))


@contextmanager
def machines(folder: Path, nodes: str) -> Generator[Machines]:
    found = Machines(folder, nodes)
    try:
        for node in range(2):
            found.start(node)
        yield found
    finally:
        for agent in found.agents.values():
            agent.terminate()
            with suppress(subprocess.TimeoutExpired):
                agent.wait(40)
            agent.kill()


def uninterrupted() -> list[float]:
    with program(2).launch() as trainer:
        return [metrics.loss for metrics in trainer.train(batches(), STEPS, progress=False)]


def check(machine: Machines, after: int) -> None:
    """The job ended well, went on from a checkpoint after the kill, and every step's loss is the right one."""
    assert machine.agents[0].wait(LIMIT) == 0, machine.logs()
    losses, wanted = machine.losses(), uninterrupted()
    assert {step for step, _, _ in losses} == set(range(1, STEPS + 1))
    for step, ranks, loss in losses:
        assert loss == pytest.approx(wanted[step - 1], rel=1e-9), (step, ranks, machine.logs())
    # Steps that were made twice: none but what came after the newest checkpoint.
    repeated = [step for step in range(1, STEPS + 1) if sum(done == step for done, _, _ in losses) > 1]
    assert min(repeated, default=STEPS) >= after - 2, losses


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks of an agent in /proc")
def test_a_machine_that_is_lost_and_comes_back_goes_on(tmp_path: Path) -> None:
    with machines(tmp_path, "2") as job:
        job.wait_for(4, ranks=2)
        job.kill(1)
        killed_at = max(step for step, _, _ in job.losses())
        time.sleep(BACK)
        job.start(1)
        check(job, killed_at)
        assert {ranks for _, ranks, _ in job.losses()} == {2}
        assert job.agents[1].wait(LIMIT) == 0, job.logs()
        assert "died, without an error of its own" in (tmp_path / "log.0").read_text()


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks of an agent in /proc")
def test_a_job_goes_on_with_the_machines_that_are_left(tmp_path: Path) -> None:
    with machines(tmp_path, "1:2") as job:
        job.wait_for(4, ranks=2)
        job.kill(1)
        killed_at = max(step for step, _, _ in job.losses())
        check(job, killed_at)
        by = {step: ranks for step, ranks, _ in job.losses()}
        assert by[STEPS] == 1
        assert 2 in by.values()
