"""Rows of what collectives take among the processes of a job, and how they and products slow each other.

Every rank times the same calls in the same order. Budgets are the first rank's, told to the others, so that all take as
many samples and leave out the same sizes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardc.runtime.calibrate.device import ALL_OPERANDS, MOST_OPERANDS
from shardc.runtime.calibrate.timing import (
    LEAST_SAMPLES,
    Call,
    Together,
    coarse_first,
    once_on_cpu,
    once_on_gpu,
    replayed,
    timed,
)
from shardc.torch_compat import all_gather_single, reduce_scatter_single

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "ring_shift", "p2p")
CPU_SIZES = [2**n for n in range(10, 27, 2)]
GPU_SIZES = [2**n for n in range(12, 31, 2)]
MOST_CAPTURED = 2**24  # bytes up to which collectives are measured in CUDA graphs, too
CONTENDED = 2**28  # bytes of the collective
# Rows, columns and depth of products beside it: from one round of tiles on 132 units to sixteen.
SHAPES = (
    *((4096, 4096, 4096), (2048, 2048, 4096), (4096, 2048, 8192), (4096, 8192, 2048), (2048, 8192, 4096)),
    *((4096, 6144, 2048), (2048, 6144, 4096), (8192, 8192, 4096)),
)
BESIDE = 2**12, 2**17, 2**19, 2**21, 2**23  # bytes of collectives beside work on a CPU
PIECES = {"cpu": (1, 4, 16), "cuda": (4, 16, 64, 256)}  # of work between two meetings: 0.9 ms each, on a GPU 0.2
TURN = 0.1  # seconds of work that meets, in a round
BEHIND = 3  # collectives in the background
BACKGROUND = "all_reduce", "all_gather", "ring_shift"
BACKGROUND_OPERANDS = 2**25  # bytes of all operands of one of these, which are held together
ROUND, AGAIN = 0.02, 5  # seconds of work of one collective's samples in a round, and how many these are at most
MET = 2**10, 2**18  # bytes of the collectives that ranks meet at
SHARE = 0.6  # of the time: collectives; the rest is for contention


def group_sizes(world: int) -> list[int]:
    """2, 4, 8 ... and all."""
    sizes = [2**n for n in range(1, 21) if 2**n < world]
    return [*sizes, world] if world > 1 else []


class Beside(NamedTuple):
    """Seconds alone, and beside the other."""

    work: tuple[float, float]
    collective: tuple[float, float]


class _Background(NamedTuple):
    """A collective that runs behind work: what begins one, and how often the work runs meanwhile."""

    op: str
    size: int
    alone: float  # seconds
    begin: Callable[[], Any]
    runs: int

    def sample(self, work: Call, together: Together) -> tuple[float, float]:
        """Seconds of the work, and of it with `BEHIND` collectives behind it."""
        working = once_on_cpu(work, self.runs, together) * self.runs
        together.barrier()
        begin = time.perf_counter()
        pending = [self.begin() for _ in range(BEHIND)]
        once_on_cpu(work, self.runs)
        for one in pending:
            one.wait()
        return working, time.perf_counter() - begin


class _Both(list[Any]):
    """Works that are waited for together."""

    def wait(self) -> None:
        for work in self:
            work.wait()


class Peers:
    """This process's place in the job, whose default group has a backend for tensors of `device`."""

    def __init__(self, device: str) -> None:
        self.device, self.rank, self.world = device, dist.get_rank(), dist.get_world_size()
        # Every rank makes every group, in one order. The second of each is for agreeing, outside of the GPU's streams.
        self.groups: dict[int, tuple[Any, Any]] = {
            size: (dist.new_group(list(range(size))), dist.new_group(list(range(size)), backend="gloo"))
            for size in group_sizes(self.world)
        }

    def told(self, value: float, control: Any) -> float:
        """The first rank's."""
        number = torch.tensor([value], dtype=torch.float64)
        dist.broadcast(number, 0, group=control)
        return float(number)

    def together(self, group: Any, control: Any) -> Together:
        if self.device != "cuda":
            return Together(control)
        one = torch.ones(1, device=self.device)
        return Together(control, lambda: dist.all_reduce(one, group=group))

    # ------------------------------------------------------------------ collectives
    def rows(self, seconds: float) -> Iterator[dict[str, Any]]:
        """Rows of all kinds and groups; those that a rank is in no group of, it only waits for."""
        sizes = GPU_SIZES if self.device == "cuda" else CPU_SIZES
        end = time.perf_counter() + seconds * SHARE
        wanted = [(size, op) for size in self.groups for op in OPS if op != "p2p" or size == 2]
        for index, (group_size, op) in enumerate(wanted):
            if self.rank < group_size:
                left = max(0.0, end - time.perf_counter()) / (len(wanted) - index)
                yield from self._series(op, group_size, sizes, left)
            dist.barrier(self.groups[self.world][1])
        left = max(0.5, seconds * (1 - SHARE))
        if self.device == "cuda":
            yield from self._contention(left / 2)
        else:
            yield from self._neighbours(left / 10)
            yield from self._cores(left * 2 / 5)
        yield from self._meetings(left / 2)

    def _series(self, op: str, group_size: int, sizes: list[int], seconds: float) -> Iterator[dict[str, Any]]:
        group, control = self.groups[group_size]
        together = self.together(group, control)
        end = time.perf_counter() + self.told(seconds, control)
        for index, size in enumerate(coarse_first(sizes)):
            budget = self.told((end - time.perf_counter()) / (len(sizes) - index), control)
            if budget <= 0 and index > 2:
                return
            try:
                call = self.call(op, size, group_size, group)
                times = timed(call, budget, self.device, together)
            except (RuntimeError, NotImplementedError):  # the backend has no such collective: none of the ranks can
                return
            about = {"kind": "collective", "op": op, "group": group_size, "bytes": size}
            yield {**about, **times.row(), "graph": False}
            if self.device == "cuda" and size <= MOST_CAPTURED:
                yield {**about, **replayed(call, budget, together).row(), "graph": True}

    def call(self, op: str, size: int, group_size: int, group: Any) -> Call:
        """One collective of a message of so many bytes, as `ir.collectives` counts them."""
        return self._in_turn(size, lambda: self._call(op, size, group_size, group))

    def _in_turn(
        self, size: int, made: Callable[[], Callable[[], Any]], together: int = ALL_OPERANDS
    ) -> Callable[[], Any]:
        """Calls of operands of their own, of so many bytes each. On a CPU there are several, in turn: in a step none
        finds what the one before has left in the caches."""
        times = max(BEHIND + 1, min(MOST_OPERANDS, together // size)) if self.device == "cpu" else 1
        turns = cycle([made() for _ in range(times)])
        return lambda: next(turns)()

    def _call(self, op: str, size: int, group_size: int, group: Any) -> Callable[[], Any]:
        count = max(group_size, size // 4 // group_size * group_size)
        whole, other = (torch.ones(count, device=self.device) for _ in range(2))
        part = torch.ones(count // group_size, device=self.device)

        def ring() -> None:
            _Both(dist.batch_isend_irecv(self._ring(whole, other, group))).wait()

        def send() -> None:
            if self.rank == 0:
                dist.send(whole, 1, group=group)
            elif self.rank == 1:
                dist.recv(other, 0, group=group)

        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: dist.all_reduce(whole, group=group),
            "all_gather": lambda: all_gather_single(whole, part, group),
            "reduce_scatter": lambda: reduce_scatter_single(part, whole, dist.ReduceOp.SUM, group),
            "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
            "ring_shift": ring,
            "p2p": send,
        }
        return calls[op]

    # ------------------------------------------------------------------ contention
    def _contention(self, seconds: float) -> Iterator[dict[str, Any]]:
        """Products, an elementwise kernel and an all-reduce on GPUs, alone, and beside each other."""
        group, control = self.groups[self.world]
        together, seconds = self.together(group, control), self.told(seconds, control)
        x = torch.ones(CONTENDED // 4, device=self.device)
        vector = torch.ones_like(x)
        share = seconds / (2 * len(SHAPES) + 3)
        collective = timed(lambda: dist.all_reduce(x, group=group), share, self.device, together).median
        times = max(3, min(20, int(share / (BEHIND * collective))))

        def against(work: Call) -> Beside:
            typical = timed(work, share, self.device, together).median
            # All of them end before the collectives do, which they begin after.
            runs = max(1, int((BEHIND - 1) * collective / typical))
            return self._beside(work, runs, x, group, together, times)

        for rows, columns, depth in SHAPES:
            a = torch.randn(rows, depth, device=self.device, dtype=torch.bfloat16)
            b = torch.randn(depth, columns, device=self.device, dtype=torch.bfloat16)
            took = against(partial(torch.mm, a, b, out=a.new_empty(rows, columns)))
            shape = {"rows": rows, "columns": columns, "depth": depth}
            yield _ratio("product", *took.work) | shape
            yield _ratio("attention", *took.work)  # which is bound by the same units
            yield _ratio("collective", *took.collective)
        yield _ratio("memory", *against(partial(torch.neg, vector, out=vector)).work)

    def _beside(self, work: Call, runs: int, x: torch.Tensor, group: Any, together: Together, times: int) -> Beside:
        """Work alone, a collective alone, and both, in turn: a GPU that has long been at work is slower, for want of
        power."""
        side = torch.cuda.Stream()
        working: dict[int, list[float]] = {0: [], BEHIND: []}
        sending: dict[int, list[float]] = {0: [], runs: []}
        for behind, count in ((0, runs), (BEHIND, 0), (BEHIND, runs)) * times:
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            torch.cuda.synchronize()
            together.barrier()
            with torch.cuda.stream(side):
                dist.all_reduce(x, group=group)  # by its end all ranks have come
                events[0].record()
                for _ in range(behind):
                    dist.all_reduce(x, group=group)
                events[1].record()
            torch.cuda.current_stream().wait_event(events[0])
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(count):
                work()
            end.record()
            torch.cuda.synchronize()
            if count:
                working[behind].append(begin.elapsed_time(end) * 1e-3 / count)
            if behind:
                sending[count].append(events[0].elapsed_time(events[1]) * 1e-3 / behind)
        alone, beside, sent_alone, sent_beside = (
            _middle(together.slowest(of)) for of in (*working.values(), *sending.values())
        )
        return Beside((alone, beside), (sent_alone, sent_beside))

    # ------------------------------------------------------------------ ranks that meet
    def _work(self) -> Call:
        """A piece of a step: a product and an elementwise kernel."""
        sizes = (512, 384, 384, 2**17) if self.device == "cpu" else (4096, 2048, 8192, 2**22)
        dtype = torch.float32 if self.device == "cpu" else torch.bfloat16
        rows, depth, columns, count = sizes
        a, b, x = (
            torch.randn(shape, device=self.device, dtype=dtype) for shape in ((rows, depth), (depth, columns), count)
        )

        def call() -> None:
            torch.mm(a, b)
            torch.neg(x)

        return call

    def _cores(self, seconds: float) -> Iterator[dict[str, Any]]:
        """Collectives in the background of work, by each of which alone: threads of gloo run on cores that compute.
        Samples of the work, and of both, are taken in rounds, so that what else runs on the cores hits them alike."""
        group, control = self.groups[self.world]
        together, work = Together(control), self._work()
        seconds = self.told(seconds, control)  # so that all take as many samples
        end = time.perf_counter() + seconds
        typical = timed(work, seconds / 20, "cpu", together).median
        cases = list[_Background]()
        for size, op in product(BESIDE, BACKGROUND):
            call = self.call(op, size, self.world, group)
            alone = timed(call, seconds / 4 / (len(BESIDE) * len(BACKGROUND)), "cpu", together).median
            runs = max(1, round(2 * BEHIND * alone / typical))  # so that collectives end before the work
            cases.append(_Background(op, size, alone, self.begun(op, size, group), runs))
        samples: list[list[tuple[float, float]]] = [[] for _ in cases]
        while len(samples[0]) < LEAST_SAMPLES or self.told(end - time.perf_counter(), control) > 0:
            for case, taken in zip(cases, samples, strict=True):
                for _ in range(max(1, min(AGAIN, round(ROUND / (case.runs * typical))))):
                    taken.append(case.sample(work, together))
        for case, taken in zip(cases, samples, strict=True):
            working, both = (_middle(together.slowest(list(of))) for of in zip(*taken, strict=True))
            times = {"work_us": working * 1e6, "collective_us": BEHIND * case.alone * 1e6, "both_us": both * 1e6}
            yield {"kind": "cores", "what": case.op, "bytes": case.size, "times": BEHIND, **times}

    def _neighbours(self, seconds: float) -> Iterator[dict[str, Any]]:
        """The first rank's work while all compute, and while the others wait for it, in rounds."""
        control, work = self.groups[self.world][1], self._work()
        together, seconds = Together(control), self.told(seconds, control)  # so that all take as many samples
        end = time.perf_counter() + seconds
        typical = self.told(timed(work, seconds / 5, "cpu", together).median, control)
        runs = max(1, round(TURN / typical))
        samples: list[tuple[float, float]] = []
        while len(samples) < LEAST_SAMPLES or self.told(end - time.perf_counter(), control) > 0:
            beside = once_on_cpu(work, runs, together)
            together.barrier()
            samples.append((beside, once_on_cpu(work, runs) if self.rank == 0 else beside))
            together.barrier()
        beside, alone = (_middle(list(of)) for of in zip(*samples, strict=True))
        yield {"kind": "neighbours", "alone_us": alone * 1e6, "beside_us": beside * 1e6}

    def begun(self, op: str, size: int, group: Any) -> Callable[[], Any]:
        """Begins a collective, and gives what is waited for."""

        def one() -> Callable[[], Any]:
            part = torch.ones(size // 4 // self.world)
            whole = torch.ones(part.numel() * self.world)
            if op == "all_reduce":
                return lambda: dist.all_reduce(whole, group=group, async_op=True)
            if op == "ring_shift":
                return lambda: _Both(dist.batch_isend_irecv(self._ring(whole, torch.empty_like(whole), group)))
            return lambda: all_gather_single(whole, part, group, async_op=True)

        return self._in_turn(size, one, BACKGROUND_OPERANDS)

    def _ring(self, sent: torch.Tensor, received: torch.Tensor, group: Any) -> list[dist.P2POp]:
        """To the next rank of a group, from the one before."""
        size = group.size()
        after, before = (self.rank + 1) % size, (self.rank - 1) % size
        return [dist.P2POp(dist.isend, sent, after, group), dist.P2POp(dist.irecv, received, before, group)]

    def _meetings(self, seconds: float) -> Iterator[dict[str, Any]]:
        """Pieces of work with a collective after each, by the work and the collective alone. Samples of the work, and
        of both, are taken in rounds: a device changes its speed, and others use its cores."""
        group, control = self.groups[self.world]
        together, work = self.together(group, control), self._work()
        once = once_on_gpu if self.device == "cuda" else once_on_cpu
        seconds = self.told(seconds, control)  # so that all take as many samples
        end = time.perf_counter() + seconds
        typical = timed(work, seconds / 20, self.device, together).median
        cases: list[tuple[int, int, Call, float, list[tuple[float, float]]]] = []
        for pieces, size in product(PIECES[self.device], MET):
            call = self.call("all_reduce", size, self.world, group)
            collective = timed(call, seconds / 5 / (len(PIECES[self.device]) * len(MET)), self.device, together).median
            cases.append((pieces, size, call, collective, []))
        while len(cases[0][4]) < LEAST_SAMPLES or self.told(end - time.perf_counter(), control) > 0:
            for pieces, _, call, _, taken in cases:
                count = round(self.told(max(3.0, min(50.0, TURN / (pieces * typical))), control))

                def piece(pieces: int = pieces) -> None:
                    for _ in range(pieces):
                        work()

                def met(piece: Call = piece, call: Call = call) -> None:
                    piece()
                    call()

                # A rank by itself: the mean, since each waits for the other.
                computed, took = (self.mean(once(of, count, together), control) for of in (piece, met))
                taken.append((computed, took - computed))
        for _, size, _, collective, taken in cases:
            computed = _middle([work for work, _ in taken])
            more = _middle([more for _, more in taken])
            times = {
                "computed_us": computed * 1e6,
                "alone_us": (computed + collective) * 1e6,
                "together_us": (computed + more) * 1e6,
            }
            yield {"kind": "meeting", "bytes": size, **times}

    def mean(self, seconds: float, control: Any) -> float:
        """Over the ranks."""
        value = torch.tensor([seconds / self.world], dtype=torch.float64)
        dist.all_reduce(value, group=control)
        return float(value)


def _ratio(what: str, alone: float, beside: float) -> dict[str, Any]:
    return {"kind": "contention", "what": what, "alone_us": alone * 1e6, "beside_us": beside * 1e6}


def _middle(samples: list[float]) -> float:
    return sorted(samples)[len(samples) // 2]
