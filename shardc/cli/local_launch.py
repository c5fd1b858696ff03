"""Run a program as real processes on this machine: one a rank, under torchrun's environment, gloo on CPUs.

What the ranks need goes through a folder of its own: the program as a file, the batch, and the model's parameters as a
file that each rank maps and reads its shards of. A rank that fails writes why before it ends, so that the caller gets
the diagnostic and not a child's traceback.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor

from shardc.api import Program, model_state
from shardc.ir.diagnostic import Diagnostic, ShardcError, error
from shardc.ir.graph import type_of
from shardc.runtime.execute.batch import Inputs, batch_inputs
from shardc.runtime.execute.data_parts import data_parts_of
from shardc.torch_compat import hosted_store

POLL = 0.2  # seconds
STATE = "state.pt"  # the parameters and buffers that ranks begin with
Report = Callable[[int, float], None]  # a step and its loss
Act = Callable[..., None]  # of a folder, a rank, and what more it is given; a function of a module


def run_processes(program: Program, batch: Any, *, nproc: int, steps: int, lr: float, report: Report) -> None:
    """Train for some steps on one batch in `nproc` processes; `report` is called in this one, after each step."""
    with ranks_of(program, nproc) as ranks:
        program.save(ranks.folder / "program.json")
        torch.save(dict(step_inputs(program, batch)), ranks.folder / "batch.pt")
        torch.save(state_of(program), ranks.folder / STATE)
        reported = 0

        def pass_on() -> None:
            nonlocal reported
            reported = _report(ranks.folder, reported, report)

        ranks.run(_train, (steps, lr), pass_on)


@dataclass(frozen=True)
class Ranks:
    """As many processes of this machine as a program has ranks, and the folder that they share."""

    folder: Path
    count: int
    variables: dict[str, str]  # where they meet, as torchrun would say

    def run(self, act: Act, arguments: tuple[Any, ...], watch: Callable[[], None] = lambda: None) -> None:
        """Call `act(folder, rank, *arguments)` in each, and `watch` here from time to time, also at the end.

        Raises ShardcError: the diagnostic of the first rank that failed; SC502 for one that died.
        """
        job = mp.spawn(_rank, (self, act, arguments), self.count, join=False)
        assert job is not None
        try:
            while not job.join(timeout=POLL):
                watch()
        except (mp.ProcessExitedException, mp.ProcessRaisedException) as failure:
            raise _why(self.folder, failure) from None
        watch()


@contextmanager
def ranks_of(program: Program, nproc: int) -> Generator[Ranks]:
    """The ranks of a program. Raises ShardcError (SC506) where it has another number of them."""
    if nproc != program.mesh.world_size:
        message = (
            f"{nproc} processes were asked for, the program's mesh ({program.mesh}) has {program.mesh.world_size} ranks"
        )
        raise error("SC506", message, hint=f"write --nproc {program.mesh.world_size}, or another --mesh")
    with tempfile.TemporaryDirectory(prefix="shardc-") as name, hosted_store() as variables:
        yield Ranks(Path(name), nproc, variables)


def step_inputs(program: Program, batch: Any) -> Inputs:
    """The batch by the program's input names; without one, random values that any model takes."""
    ports = [(p, type_of(v)) for p, v in zip(program.body.inputs, program.body.placeholders, strict=True)]
    types = {port.name: type for port, type in ports if port.role == "input"}
    if batch is not None:
        tensors = batch_inputs(batch, list(types), program.plan.get("batch"))
        return Inputs({name: t.detach().clone() for name, t in tensors.items()})
    generator = torch.Generator().manual_seed(0)
    # Whole numbers are indices more often than not: 0 and 1 are in any table.
    count, split = program.body.microbatches, program.plan.get("split", ())
    shapes = {n: (count * t.shape[0], *t.shape[1:]) if n in split else t.shape for n, t in types.items()}
    return Inputs({name: _random(shapes[name], type.dtype, 1.0, generator) for name, type in types.items()})


def state_of(program: Program) -> dict[str, Tensor]:
    """Parameters and buffers: the model's, or where it has none (a loaded program, a meta model) small random ones."""
    state = {name: t.clone() for name, t in {**program.constants, **model_state(program.model)}.items()}
    generator = torch.Generator().manual_seed(0)
    for port, value in zip(program.body.inputs, program.body.placeholders, strict=True):
        if port.role in ("param", "buffer") and not any(name in state for name in (port.name, *port.aliases)):
            type = type_of(value)
            state[port.name] = _random(type.shape, type.dtype, 0.1, generator)
    return state


def _random(shape: tuple[int, ...], dtype: torch.dtype, scale: float, generator: torch.Generator) -> Tensor:
    if dtype.is_floating_point:
        return (torch.rand(shape, generator=generator) * scale).to(dtype)
    return torch.randint(2, shape, generator=generator).to(dtype)


def _rank(rank: int, ranks: Ranks, act: Act, arguments: tuple[Any, ...]) -> None:
    """One process, with what torchrun would set."""
    os.environ.update(ranks.variables, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks.count))
    torch.set_num_threads(max(1, torch.get_num_threads() // ranks.count))
    try:
        act(ranks.folder, rank, *arguments)
    except ShardcError as problem:
        text = json.dumps([asdict(d) for d in problem.diagnostics])
        leave(ranks.folder / f"error.{rank}", text)
        sys.exit(1)


def _train(folder: Path, rank: int, steps: int, lr: float) -> None:
    program = Program.load(folder / "program.json")
    batch = Inputs(torch.load(folder / "batch.pt"))
    state: dict[str, Tensor] = torch.load(folder / STATE, mmap=True)
    parts = data_parts_of(program.plan, program.body)
    with program.launch(state=state) as trainer:
        if parts is not None:
            batch = Inputs(parts.part(batch, trainer.data_rank))
        for _ in range(steps):
            loss = float(trainer.step(batch).loss)
            if not trainer.updates:
                trainer.sgd(lr)
            if rank == 0:
                with (folder / "losses").open("a", encoding="utf-8") as file:
                    file.write(f"{loss!r}\n")


def leave(path: Path, text: str) -> None:
    """Write a file that is whole or not there."""
    draft = path.with_name(f"draft.{path.name}")
    draft.write_text(text, encoding="utf-8")
    draft.rename(path)


def _report(folder: Path, reported: int, report: Report) -> int:
    """Pass on the losses that rank 0 has written since; how many there are now."""
    path = folder / "losses"
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    for step, line in enumerate(lines[reported:], reported):
        report(step, float(line))
    return len(lines)


def _why(folder: Path, failure: mp.ProcessExitedException | mp.ProcessRaisedException) -> ShardcError:
    """The diagnostic that the first rank to fail has left; of one that was killed, that it is dead."""
    for path in sorted(folder.glob("error.*"), key=lambda p: p.stat().st_mtime_ns):
        records: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        return ShardcError(*(Diagnostic(**fields) for fields in records))
    first, _, rest = str(failure).strip().partition("\n")
    cause = rest.strip().rsplit("\n", 1)[-1] or None
    return error("SC502", f"rank {failure.error_index} died: {first}", cause=cause)
