"""What one rank of the tests in `test_pipeline.py` does: `python pipeline_worker.py SCENARIO FOLDER`.

Programs come from the folder, compiled by the test; values too, so that every rank and the test begin with the same.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardc
from shardc.ir.diagnostic import ShardcError
from shardc.runtime.execute.batch import Inputs
from shardc.runtime.train.trainer import Trainer
from shardc.schedule.instructions import Backward, Forward

RANK = int(os.environ["RANK"])
FOLDER = Path(sys.argv[2])
STEPS = 5
LIMIT = 8.0
ALL = ("param", "buffer", "state")


@cache
def program(name: str) -> shardc.Program:
    return shardc.Program.load(FOLDER / f"{name}.json")


def trainer_of(name: str, timeout: float = 60.0) -> Trainer:
    state: dict[str, torch.Tensor] = torch.load(FOLDER / f"{name}.state", mmap=True)
    return program(name).launch(state=state, timeout=timeout)


def batches(name: str) -> list[Inputs]:
    return [Inputs(batch) for batch in torch.load(FOLDER / f"{name}.batches")]


def train(name: str) -> dict[str, Any]:
    """Some steps; what they gave, what this rank holds and how much of it, and when every instruction ran."""
    given = batches(name)
    with trainer_of(name) as trainer:
        results = [trainer.step(given[k % len(given)]) for k in range(STEPS)]
        timeline = trainer.timeline(given[0])
        timeline.to_svg(FOLDER / f"{name}.{RANK}.svg")
        timeline.to_trace(FOLDER / f"{name}.{RANK}.trace")
        whole = trainer.state_dict(ALL)
        if RANK == 0:
            torch.save(whole, FOLDER / f"{name}.trained")
        return {
            "losses": [float(one.loss) for one in results],
            "norms": [float(one.grad_norm) for one in results if one.grad_norm is not None],
            "held": sorted(trainer.state),
            "bytes": sum(
                t.numel() * t.element_size() for n, t in trainer.state.items() if trainer._kept[n][0].role == "param"
            ),
            "counted": trainer.parameter_bytes,
            "sum": float(sum(value.double().sum() for value in whole.values())),
            "instructions": [(one.rank, str(one.instruction)) for one in timeline.events],
            "spans": [(one.start, one.end) for one in timeline.events],
            "makespan": timeline.makespan,
        }


def moves() -> dict[str, Any]:
    """Checkpoints from a pipeline to a program without one, to another pipeline, and back; what the next step gives."""
    given = batches("pp2tp2")
    found: dict[str, Any] = {}
    before: dict[str, torch.Tensor] | None = None
    for name in ("pp2tp2", "dp2tp2", "pp4", "pp2tp2"):
        trainer = trainer_of(name)
        if before is None:
            for batch in given:
                trainer.step(batch)
        else:
            found["extra"] = trainer.load(FOLDER / "checkpoint")
            assert same(before, trainer.state_dict(ALL)), name
        saving = trainer.save(FOLDER / "checkpoint", extra={"by": name}, asynchronous=name == "pp4")
        before = trainer.state_dict(ALL)
        saving.wait()
        found.setdefault("next", []).append(float(trainer.step(given[0]).loss))
        if name == "pp4":
            trainer.load(FOLDER / "checkpoint")
            trainer.export_safetensors(FOLDER / "hf")
            found["steps"] = trainer.steps
        dist.barrier()
        trainer.close()
    if RANK == 0:
        torch.save(before, FOLDER / "moved")
    return found


def resumes() -> list[float]:
    """The loop, stopped and started again by another trainer: the losses of all steps."""
    given = batches("pp4")
    losses: list[float] = []
    for steps in (2, 4):
        with trainer_of("pp4") as trainer:
            path = FOLDER / "run"
            losses += [m.loss for m in trainer.train(given * 2, steps, checkpoint=path, progress=False)]
            dist.barrier()
    return losses


def plain_gradients() -> dict[str, Any]:
    """A step without an optimizer: all gradients on every rank, and plain descent with them."""
    (batch, *_) = batches("grads")
    with trainer_of("grads") as trainer:
        assert trainer.gather_grads() == {}
        first = float(trainer.step(batch).loss)
        grads = trainer.gather_grads()
        trainer.sgd(0.1)
        second = float(trainer.step(batch).loss)
        if RANK == 0:
            torch.save(grads, FOLDER / "grads.found")
    return {"losses": [first, second], "sum": sum(float(g.double().sum()) for g in grads.values()), "count": len(grads)}


def norms() -> dict[str, Any]:
    """Batch norms in every stage: what a microbatch leaves in a buffer is what the next begins with.

    Then a batch that is infinite: no rank takes the step, and each says the same.
    """
    (batch, *_) = batches("norms")
    found: dict[str, Any] = {}
    with trainer_of("norms") as trainer:
        found["losses"] = [float(trainer.step(batch).loss) for _ in range(2)]
        state = trainer.state_dict()
        if RANK == 0:
            torch.save(state, FOLDER / "norms.found")
        try:
            trainer.step(Inputs({name: x / 0 for name, x in batch.items()}))
        except ShardcError as failure:
            found["raised"] = str(failure)
        assert same(state, trainer.state_dict())
    return found


def schedules() -> dict[str, Any]:
    """Every schedule, twelve microbatches: a step's loss, and a number made of all gradients."""
    found: dict[str, Any] = {}
    for name in sorted(path.stem for path in FOLDER.glob("by *.json")):
        with trainer_of(name) as trainer:
            losses = [float(trainer.step(batch).loss) for batch in batches(name)]
            grads = trainer.gather_grads()
            found[name] = {"losses": losses, "sum": sum(float(grad.double().abs().sum()) for grad in grads.values())}
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def four() -> dict[str, Any]:
    dist.init_process_group("gloo")
    acts: dict[str, Callable[[], Any]] = {
        "pp4": lambda: train("pp4"),
        "pp2tp2": lambda: train("pp2tp2"),
        "moves": moves,
        "resumed": resumes,
        "grads": plain_gradients,
        "norms": norms,
        "schedules": schedules,
    }
    found: dict[str, Any] = {}
    for name, act in acts.items():
        started = time.monotonic()
        found[name] = act()
        print(f"{name}: {time.monotonic() - started:.1f} s", flush=True)
    return found


def eight() -> dict[str, Any]:
    return {"pp2dp2tp2": train("pp2dp2tp2")}


def gathered() -> dict[str, Any]:
    return {name: train(name) for name in ("zero3-bfs", "zero3-zb-h1")}


def broken(how: str) -> dict[str, Any]:
    """The last rank dies, fails or sleeps in the middle of a step; the others report what they are told."""
    name = f"mlp{os.environ['WORLD_SIZE']}"
    given = batches(name)
    trainer = trainer_of(name, timeout=LIMIT)
    trainer.step(given[0])
    if int(os.environ["WORLD_SIZE"]) - 1 == RANK:
        executor = trainer.engine.executor  # type: ignore[attr-defined]
        kind = Backward if how == "dead" else Forward
        at = next(
            k
            for k, i in enumerate(executor.program.lists.ranks[executor.c])
            if isinstance(i, kind) and i.microbatch == 1
        )
        part = executor._parts[id(executor.program.stages[executor.c][kind.__name__.lower()])]._code
        code = list(part.code)
        place, _, *rest = code[5]

        def fail(*args: Any, **kwargs: Any) -> None:
            if trainer.engine.monitor.counter >> 20 != at:  # type: ignore[attr-defined]
                return real(*args, **kwargs)
            if how == "dead":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "stuck":
                time.sleep(120)
            raise MemoryError("no memory for this")

        real: Callable[..., Any] = code[5][1]
        code[5] = (place, fail, *rest)
        part.code = code  # code that has run is not looked at again
    started = time.monotonic()
    try:
        trainer.step(given[0])
    except ShardcError as failure:
        return {"error": str(failure), "code": failure.code, "seconds": time.monotonic() - started}
    except MemoryError as failure:
        return {"own": str(failure), "notes": failure.__notes__}
    return {"error": None}


def main() -> None:
    torch.set_num_threads(1)
    scenario = sys.argv[1]
    run = {"four": four, "eight": eight, "gathered": gathered}.get(scenario)
    found = run() if run else broken(scenario)
    (FOLDER / f"{RANK}.json").write_text(json.dumps(found))
    # A dead peer would make an orderly shutdown wait.
    os._exit(0)


main()
