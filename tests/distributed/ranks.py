"""Ranks as real processes: forked from a server that has imported torch and shardc, which costs each several seconds.

    found = start("train", 4, tmp_path)         `worker.py train FOLDER` in four processes; what each wrote

The server has one thread and no process group when it forks, so that a rank is what a fresh process is: it has its own
environment, output and exit.
"""

import json
import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Mapping
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from torch.multiprocessing import start_processes

from tests.ports import free_port

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).parent / "worker.py"
METHOD = "forkserver" if sys.platform == "linux" else "spawn"  # macOS's libraries do not outlive a fork
PRELOADED = [
    "shardc",
    "torch.distributed.checkpoint",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "examples.gpt2",
    "tests.handmade",
    "tests.ir.test_ops",
    "tests.distributed.warm",
]


def start(
    scenario: str, ranks: int, folder: Path, limit: float = 90.0, worker: Path = WORKER, all_end: bool = True
) -> list[dict[str, Any] | None]:
    """Run a scenario in `ranks` processes; what each wrote, None for one that died before, if not `all_end` well."""
    port = free_port()
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    if worker.parent.name != "gpu":
        env["CUDA_VISIBLE_DEVICES"] = ""  # a job on CPUs, on a host with GPUs too
    serve()
    context = multiprocessing.get_context(METHOD)
    processes = [
        context.Process(
            target=run,
            args=([str(worker), scenario, str(folder)], env | {"RANK": str(r), "LOCAL_RANK": str(r)}),
            daemon=True,
        )
        for r in range(ranks)
    ]
    deadline = time.monotonic() + limit
    # A stuck rank would sleep on; it is killed with the rest.
    waited = processes[:-1] if scenario == "stuck" else processes
    try:
        for process in processes:
            process.start()
        for process in waited:
            process.join(max(0.1, deadline - time.monotonic()))
        late = [rank for rank, process in enumerate(waited) if process.is_alive()]
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
    logs = "\n".join(path.read_text()[-3000:] for rank in range(ranks) if (path := folder / f"{rank}.log").exists())
    assert not late, f"ranks {late} still run after {limit} s\n{logs}"
    results = [folder / f"{rank}.json" for rank in range(ranks)]
    assert not all_end or any(path.exists() for path in results), logs
    assert scenario in ("dead", "stuck", "own") or not all_end or all(path.exists() for path in results), logs
    return [json.loads(path.read_text()) if path.exists() else None for path in results]


def cases_of(request: pytest.FixtureRequest) -> list[str]:
    """The cases of a module that this run is of: a fixture that runs all in one job runs no others."""
    mine = (item for item in request.session.items if item.path == request.path)
    params = (item.callspec.params for item in mine if hasattr(item, "callspec"))  # type: ignore[attr-defined]
    return sorted({each["case"] for each in params if "case" in each})


def serve() -> None:
    """Start the server, if it does not run: it finds the tests' modules, and computes in one thread."""
    needed = {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]), "OMP_NUM_THREADS": "1"}
    before = {name: os.environ.get(name) for name in needed}
    os.environ.update(needed)
    try:
        forkserver.set_forkserver_preload(PRELOADED)
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def fork_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a test the processes of `shardc run --nproc` too are forked, which are started anew otherwise."""
    serve()
    monkeypatch.setattr("torch.multiprocessing.spawn", partial(start_processes, start_method=METHOD))


def run(arguments: list[str], env: Mapping[str, str]) -> None:
    """In a rank: the worker, as a script."""
    os.environ.update(env)
    log = os.open(Path(arguments[2]) / f"{env['RANK']}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(ROOT)
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")
