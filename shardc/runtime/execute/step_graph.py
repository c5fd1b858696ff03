"""A rank's step as a CUDA graph: captured once, and replayed with one call instead of a launch a kernel.

    steps 0, 1, 2    run as without a graph, on the static tensors that stand for feeds, seeds and rates
    step 3           is captured, and replayed; so is every later step, after the static tensors got its values

A graph has the addresses of what it was captured with. Parameters, buffers and state are updated in place, and before
each replay their addresses are compared: what was replaced, loaded or moved makes the step be captured anew. Results
lie in the graph's memory, which the next replay writes over, so they are copied out.

A replay does not enter Python: no instruction counts, and NCCL's own watchdog does not see its collectives. `Watch` is
told what asks whether a replay has ended, and names the rank that holds it up.

The method: Nguyen, Carilli, Eryilmaz et al., "Accelerating PyTorch with CUDA Graphs" (2021), whole-network capture.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from shardc.ir.caller import warn
from shardc.ir.diagnostic import Diagnostic
from shardc.ir.gc_pause import gc_paused
from shardc.ir.graph import Port
from shardc.ir.ops.exchange import EXCHANGE_COUNTS
from shardc.ir.schema import given
from shardc.partition.staged_program import StagedProgram
from shardc.runtime.execute.executor import Executor
from shardc.runtime.execute.microbatches import Feed
from shardc.runtime.execute.monitor import RunMonitor

WARM_UP = 3  # steps: kernels are compiled in the first, and calls prepared for their addresses after it

Outputs = dict[Port, Tensor]
Run = Callable[[Mapping[str, Tensor], Sequence[Feed], RunMonitor | None], Outputs]


class Recorder(Protocol):
    """Records what a function launches, and replays it on the same memory."""

    def capture(self, act: Callable[[], Outputs]) -> Outputs:
        """What `act` returns. Nothing that it launches runs. What it raises is raised, and nothing is recorded."""
        ...

    def replay(self) -> Callable[[], bool]:
        """Run what was recorded. The returned function says whether it has ended."""
        ...


class Watch(Protocol):
    """What is told of replays that are under way."""

    def replays(self, ended: Callable[[], bool]) -> None: ...


class CudaRecorder:
    """A CUDA graph. Graphs of one `pool` never run at once, and share the memory of what lives within them."""

    def __init__(self, device: torch.device, pool: Any) -> None:
        self._device, self._pool = device, pool
        self._graph: torch.cuda.CUDAGraph | None = None
        self._ended = torch.cuda.Event()

    @staticmethod
    def new_pool() -> Any:
        return torch.cuda.graph_pool_handle()

    def capture(self, act: Callable[[], Outputs]) -> Outputs:
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        side = torch.cuda.Stream(self._device)
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()
        side.wait_stream(current)
        outputs: Outputs = {}
        failure: BaseException | None = None
        with gc_paused(), torch.cuda.stream(side):
            # Other threads may use the device: they copy the next batch, and ask whether collectives have ended.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = act()
            except BaseException as error:
                failure = error
            try:
                graph.capture_end()
            except RuntimeError as error:
                failure = failure or error
        current.wait_stream(side)
        if failure is not None:
            raise failure
        self._graph = graph
        return outputs

    def replay(self) -> Callable[[], bool]:
        assert self._graph is not None
        self._graph.replay()
        self._ended.record()
        return self._ended.query


RECORDERS: dict[str, type[CudaRecorder]] = {"cuda": CudaRecorder}  # by type of device


class StepGraph:
    """`run` is a step of the executor. `rates` are the names of held tensors that are other tensors in every step.

    A step that cannot be captured runs as it would without a graph, and a warning (SC518) says why, once.
    """

    def __init__(
        self, run: Run, rates: Collection[str], recorder: Callable[[], Recorder], watch: Watch | None = None
    ) -> None:
        self._run, self._rates, self._new_recorder, self._watch = run, frozenset(rates), recorder, watch
        self.refusal = ""  # why the step is not captured
        self._fed: list[Feed] = []  # static
        self._given: dict[str, Tensor] = {}  # static rates
        self.forget()

    @property
    def captured(self) -> bool:
        return self._recorder is not None

    def run(self, state: Mapping[str, Tensor], fed: Sequence[Feed], monitor: RunMonitor | None) -> Outputs:
        """One step, as the executor's `run`. Results are the caller's: no later step writes over them."""
        if self.refusal:
            return self._run(state, fed, monitor)
        held = {name: x for name, x in state.items() if name not in self._rates}
        if self._held and not self._at_the_same_addresses(held):
            self.forget()
        if not self._stage(state, fed):
            self.forget()
        state = {**held, **self._given}
        if self._recorder is None and self._warmed < WARM_UP:
            outputs = self._run(state, self._fed, monitor)
            self._warmed += 1
            return _copied(outputs, lambda x: _storage(x) in self._static)
        if self._recorder is None and not self._capture(held, state):
            return self._run(state, self._fed, monitor)
        assert self._recorder is not None
        ended = self._recorder.replay()
        if self._watch is not None:
            self._watch.replays(ended)
        return _copied(self._outputs, lambda x: _storage(x) not in self._held_storages)

    def _capture(self, held: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> bool:
        recorder = self._new_recorder()
        try:
            # Without a monitor: that a step cannot be captured is no failure of the rank.
            self._outputs = recorder.capture(lambda: self._run(state, self._fed, None))
        except Exception as failure:
            self.refuse(_why(failure))
            return False
        self._recorder = recorder
        self._held = {name: (x, x.data_ptr(), x.shape, x.stride()) for name, x in held.items()}
        self._held_storages = {_storage(x) for x in held.values()}
        return True

    def refuse(self, why: str) -> None:
        """Run steps as without graphs from now on, and say why."""
        self.forget()
        self.refusal = why
        warn_not_captured(why)

    def forget(self) -> None:
        """The captured step, and what it holds; the next steps are captured anew."""
        self._recorder: Recorder | None = None
        self._outputs: Outputs = {}
        self._held: dict[str, tuple[Tensor, int, torch.Size, tuple[int, ...]]] = {}
        self._held_storages: set[int] = set()
        self._warmed = 0

    def _at_the_same_addresses(self, held: Mapping[str, Tensor]) -> bool:
        if held.keys() != self._held.keys():
            return False
        for name, x in held.items():
            known, address, shape, strides = self._held[name]
            if known is not x or x.data_ptr() != address or x.shape != shape or x.stride() != strides:
                return False
        return True

    def _stage(self, state: Mapping[str, Tensor], fed: Sequence[Feed]) -> bool:
        """Copy feeds and rates to the static tensors. False if these are new, because there were none of such forms."""
        rates = {name: x for name, x in state.items() if name in self._rates}
        fits = [_form(feed) for feed in (rates, *fed)] == [_form(feed) for feed in (self._given, *self._fed)]
        if not fits:
            self._given = {name: x.clone() for name, x in rates.items()}
            self._fed = [{name: x.clone() for name, x in feed.items()} for feed in fed]
            self._static = {_storage(x) for feed in (self._given, *self._fed) for x in feed.values()}
            return False
        for static, new in zip((self._given, *self._fed), (rates, *fed), strict=True):
            for name, x in new.items():
                static[name].copy_(x, non_blocking=True)
        return True


@dataclass
class Graphs:
    """Step graphs of a trainer's programs, which are never replayed at once. `refusal` is why there are to be none."""

    refusal: str = ""
    pool: Any = None
    made: list[StepGraph] = field(default_factory=list[StepGraph])

    def of(self, executor: Executor, device: torch.device, watch: Watch) -> StepGraph:
        program = executor.program
        rates = [port.name for port in program.body.inputs if port.role == "hyper"]
        recorder = RECORDERS.get(device.type)
        graph = StepGraph(executor.run, rates, partial(self._record, recorder or CudaRecorder, device), watch)
        refusal = self.refusal
        if recorder is None:
            refusal = refusal or f"they run on a {device.type.upper()}"
        elif program.axis:
            refusal = refusal or "transfers between the stages of a pipeline are not captured"
        if refusal:
            graph.refuse(refusal)
        self.made.append(graph)
        return graph

    def release(self) -> None:
        """Keep no captured step: NCCL's communicators, which captured collectives use, wait for them at their end."""
        for graph in self.made:
            graph.forget()

    def _record(self, recorder: type[CudaRecorder], device: torch.device) -> Recorder:
        if self.pool is None:
            self.pool = recorder.new_pool()
        return recorder(device, self.pool)


def are_captured(device: str | None) -> bool:
    """Whether steps on such a device can be; None is a GPU where there is one."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device or default).type in RECORDERS


def is_never_captured(program: StagedProgram, nonfinite: str | None) -> bool:
    """Whether steps are not, on any device: of a pipeline, with `nonfinite: raise`, and where the host reads how many
    rows go to experts."""
    reads = (given(call).get("reads", True) for g in program.graphs() for call in g.calls_of(EXCHANGE_COUNTS))
    return bool(program.axis) or nonfinite == "raise" or any(reads)


def warn_not_captured(why: str) -> None:
    hint = "steps run as without graphs; leave graphs= out of launch, or change what is named here"
    warn(str(Diagnostic("SC518", f"steps are not replayed from a CUDA graph: {why}", "warning", hint=hint)))


def _why(failure: BaseException) -> str:
    """What made a capture fail: the first error, and the instruction that it came from."""
    first = failure
    while (earlier := first.__cause__ or first.__context__) is not None:
        first = earlier
    message = f"{type(first).__name__}: {str(first).strip().partition(chr(10))[0]}"
    where = next((note for note in getattr(first, "__notes__", ()) if note.startswith("in instruction")), "")
    return f"{where}: {message}" if where else message


def _form(feed: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype, torch.device]]:
    return {name: (x.shape, x.dtype, x.device) for name, x in feed.items()}


def _copied(outputs: Outputs, needs_copy: Callable[[Tensor], bool]) -> Outputs:
    return {port: x.clone() if needs_copy(x) else x for port, x in outputs.items()}


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
