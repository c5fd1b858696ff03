"""Ops under Triton's interpreter, in a worker process: an access out of bounds may kill it, and then fails one test.

The worker surrounds every tensor, given or allocated, with sentinels, and fills what an op allocates with NaN: a store
out of bounds breaks a sentinel, a load out of bounds or an element not written shows as NaN in a result.

    worker = Interpreter()
    y, mean, rstd = worker("layer_norm", x, w, b, 1e-5)       # as ops.layer_norm(x, w, b, 1e-5)
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels_triton.launch.row_schedule import Schedule

PAD = 256  # elements on either side
ROOT = Path(__file__).parents[2]


class Interpreter:
    """Calls an op by name; returns its results, and with `changed` also its arguments as they are afterwards.

    `schedule`: what the op runs with, (its name among schedules, the schedule), in place of what its sizes ask for.
    """

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def __call__(
        self, op: str, *args: Any, changed: bool = False, schedule: tuple[str, Schedule] | None = None, **kwargs: Any
    ) -> Any:
        if self.process is None or self.process.poll() is not None:
            path = os.pathsep.join((str(ROOT), *filter(None, sys.path)))
            environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
            )
        assert self.process.stdin
        assert self.process.stdout
        try:
            pickle.dump((op, args, kwargs, schedule), self.process.stdin)
            self.process.stdin.flush()
            problem, results, after = pickle.load(self.process.stdout)
        except (EOFError, BrokenPipeError) as end:
            raise AssertionError(f"{op} killed the interpreter: an access far out of bounds") from end
        assert problem is None, problem
        return (results, after) if changed else results

    def close(self) -> None:
        if self.process is not None and self.process.stdin and self.process.stdout:
            self.process.stdin.close()
            self.process.wait()
            self.process.stdout.close()


# ------------------------------------------------------------------------------------------------- in the worker
class Fenced:
    """Tensors in the middle of larger buffers."""

    def __init__(self, device: str = "cpu") -> None:
        self.fences: list[tuple[str, Tensor, Tensor]] = []
        self.device = device

    def buffer(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        whole = torch.empty(size + 2 * PAD, dtype=dtype, device=self.device)
        whole.fill_(float("nan") if dtype.is_floating_point else 1 if dtype == torch.bool else 0x5A)
        self.fences += [(name, part, part.clone()) for part in (whole[:PAD], whole[PAD + size :])]
        return whole

    def empty(self, shape: Any, dtype: torch.dtype, like: Tensor) -> Tensor:
        size = torch.Size(tuple(shape))
        return self.buffer("an output", size.numel(), dtype)[PAD : PAD + size.numel()].view(size)

    def copy(self, name: str, x: Tensor) -> Tensor:
        storage = x.untyped_storage().nbytes() // x.element_size()
        whole = self.buffer(name, storage, x.dtype)
        whole[PAD : PAD + storage] = x.as_strided((storage,), (1,), 0)
        return whole.as_strided(x.shape, x.stride(), x.storage_offset() + PAD)

    def broken(self) -> str | None:
        for name, part, before in self.fences:
            if not torch.equal(part.view(torch.uint8), before.view(torch.uint8)):
                return f"{name} was written out of bounds"
        return None


def serve() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not print into the answers
    sys.path.insert(0, str(Path(__file__).parent))
    import shim  # noqa: F401

    torch.set_num_threads(1)
    import generated

    from kernels_triton import ops
    from kernels_triton.launch import launch, row_schedule

    while True:
        try:
            op, args, kwargs, schedule = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        fenced = Fenced()
        launch.empty = fenced.empty
        problem, results, after = None, None, None
        launches: list[launch.Launch] = []
        try:
            args = [fenced.copy(f"argument {i}", a) if isinstance(a, Tensor) else a for i, a in enumerate(args)]
            kwargs = {k: fenced.copy(k, a) if isinstance(a, Tensor) else a for k, a in kwargs.items()}

            def both(one: launch.Launch, launches: list[launch.Launch] = launches) -> None:
                launches.append(one)
                one()

            with launch.recording(both), row_schedule.trying(*schedule) if schedule else nullcontext():
                results = (getattr(ops, op, None) or getattr(generated, op))(*args, **kwargs)
            problem = fenced.broken() if launches else f"{op} launched nothing"
            results = _plain(results)
            after = [_plain(a) for a in (*args, *kwargs.values())]
        except Exception as caught:
            import traceback

            problem = f"{op}: {caught!r}\n{traceback.format_exc()}"
        pickle.dump((problem, results, after), answers)
        answers.flush()


def _plain(value: Any) -> Any:
    """Tensors without the buffers around them."""
    if isinstance(value, Tensor):
        return value.contiguous().clone()
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value


if __name__ == "__main__":
    serve()
