"""What a rank's own code holds at each of its lines: every storage that any op allocates, for as long as it is there.

The rank is alone in its process. Its process groups are torch's fake ones, over which `ProcessGroupCommunicator`
allocates what it allocates in a job; collectives begin and are waited for where a job's are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels_triton.base.library import kernel_for
from shardc.ir.arena import planned
from shardc.ir.graph import Graph, type_of
from shardc.ir.group_axes import axes_used
from shardc.ir.ops.host_copies import BEGIN_OFFLOAD
from shardc.runtime.execute import prepared_collective
from shardc.runtime.execute.arena import Arena
from shardc.runtime.execute.body_code import BodyCode
from shardc.runtime.execute.instructions import rank_context
from shardc.runtime.execute.overlap import begin
from shardc.runtime.execute.prepared_code import CodeLine, _arrived_in, _wait_into
from shardc.runtime.execute.process_groups import ProcessGroupCommunicator

CPU = torch.device("cpu")
TO_HOST = kernel_for(BEGIN_OFFLOAD, CPU)
Key = tuple[str, int]  # what a line does (run, begin, wait), and the number of its call


class Allocated(TorchDispatchMode):
    """Bytes of the storages that ops have made and that are still there, whoever holds them; apart, of those that stand
    for memory of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.given: set[int] = set()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0
        self.most_first = 0  # in the first of several microbatches
        self.within = False
        self.on_host: set[int] = set()
        self.most_on_host = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and (at := value.untyped_storage().data_ptr()) and at not in self.given:
                if at not in self.alive or self.alive[at][0].expired():
                    self.on_host.discard(at)  # of memory that was there before
                self.alive[at] = (StorageWeakRef(value.untyped_storage()), value.untyped_storage().nbytes())
        if self.within:
            self.look()
        return result

    def look(self) -> int:
        self.most = max(self.most, self.bytes)
        return self.most

    @property
    def bytes(self) -> int:
        self.alive = {at: (ref, size) for at, (ref, size) in self.alive.items() if not ref.expired()}
        self.on_host &= self.alive.keys()
        self.most_on_host = max(self.most_on_host, sum(self.alive[at][1] for at in self.on_host))
        return sum(size for at, (_, size) in self.alive.items() if at not in self.on_host)


@contextmanager
def fake_job(rank: int, size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def action_of(line: CodeLine) -> Key:
    at, call = line[0], line[1]
    kinds = {begin: "begin", _wait_into: "wait", _arrived_in: "wait"}
    kind = kinds.get(call.func, "run") if isinstance(call, partial) else "run"
    if getattr(call, "__module__", "") == prepared_collective.__name__:
        kind = "begin" if call.__name__.startswith("begin") else "wait"
    if kind == "wait" and line[3] == ():
        kind = "free"
    return kind, at


def metered(code: list[CodeLine], meter: Allocated, note: Callable[[Key, int], None]) -> list[CodeLine]:
    """The same code. Each line notes what there is once it has run, its operands included; a wait, the most until then:
    what a collective held is gone as soon as it has ended."""

    def watched(key: Key, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            meter.most, meter.within = meter.bytes if key[0] == "wait" else 0, key[0] == "wait"
            result = call(*args, **kwargs)
            meter.within = False
            if call is TO_HOST:
                meter.on_host.add(result.untyped_storage().data_ptr())
            note(key, meter.look())
            return result

        return run

    found: list[CodeLine] = []
    key: Key = ("run", -1)
    for line in code:
        # A result that is then copied over what is held belongs to the line before.
        key = key if line[1] is torch.Tensor.copy_ and key[1] == line[0] else action_of(line)
        found.append((line[0], watched(key, line[1]), *line[2:]))
    return found


def held_by_a_rank(body: Graph, *, placed: bool) -> tuple[dict[Key, int], int]:
    """Bytes beside the rank's inputs while each line runs, of several microbatches in the last; and the most on the
    host."""
    inputs = {
        port.name: torch.ones(type_of(n).local_shape(body.mesh), dtype=type_of(n).dtype)
        for port, n in zip(body.inputs, body.placeholders, strict=True)
    }
    feeds = [{n: x.clone() for n, x in inputs.items()} for _ in range(body.microbatches)]
    meter, held = Allocated(), dict[Key, int]()

    def note(key: Key, size: int) -> None:
        held[key] = max(held.get(key, 0), size)

    def first_of_several(_: Key, size: int) -> None:
        meter.most_first = max(meter.most_first, size)

    meter.given = {x.untyped_storage().data_ptr() for x in (*inputs.values(), *(x for f in feeds for x in f.values()))}
    with fake_job(0, body.mesh.world_size), meter:
        comm = ProcessGroupCommunicator(body.mesh, 0, axes_used(body), timedelta(seconds=9))
        arena = Arena({body: planned(body)}, CPU) if placed else None
        executor = BodyCode(body, rank_context(body.mesh, 0, comm), 0, CPU, arena)
        first = note if body.microbatches == 1 else first_of_several
        executor._before = metered(executor._before, meter, note)
        executor._first_microbatch = metered(executor._first_microbatch, meter, first)
        executor._later_microbatches = metered(executor._later_microbatches, meter, note)
        executor._once_per_step = metered(executor._once_per_step, meter, note)
        executor.run(inputs, feeds)
    assert meter.most_first <= max(held.values()), "the last of several microbatches holds most"
    return held, meter.most_on_host
