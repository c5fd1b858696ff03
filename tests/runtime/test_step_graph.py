"""Steps replayed from a graph, without a GPU: a recorder of ops stands for a CUDA graph, and refuses what one does.

It watches each op while a step is captured. A replay runs the same ops on the same tensors, whatever is held by then,
and writes each result where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardc
from benchmarks.gpt import GPT
from kernels_triton.base import library
from shardc.ir.graph import Port
from shardc.runtime.execute import step_graph
from shardc.runtime.execute.arena import Arena
from shardc.runtime.execute.body_code import BodyCode
from shardc.runtime.execute.instructions import rank_context
from shardc.runtime.execute.microbatches import Feed, feeds
from shardc.runtime.execute.step_graph import WARM_UP, StepGraph
from tests.ports import free_port

aten = torch.ops.aten
CPU = torch.device("cpu")
STEPS = WARM_UP + 4
SYNCHRONISES = (
    aten._local_scalar_dense.default,
    aten.is_nonzero.default,
    aten.nonzero.default,
    aten.equal.default,
    aten.masked_select.default,
)


class Watching(TorchDispatchMode):
    """Notes each op with its tensors, and what memory held before it was written to. Raises where a GPU's host would
    wait for a result."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[Any, Any, Any, Any]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in SYNCHRONISES:
            raise RuntimeError(f"{func} is not permitted when the stream is capturing")
        kwargs = kwargs or {}
        for argument, value in [*zip(func._schema.arguments, args, strict=False), *_named(func, kwargs)]:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for x in tree_leaves(value):
                    whole = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
                    self.before.setdefault(whole.data_ptr(), (whole, whole.clone()))
        results = func(*args, **kwargs)
        self.ops.append((func, args, kwargs, results))
        return results


def _named(func: Any, kwargs: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    return [(argument, kwargs[argument.name]) for argument in func._schema.arguments if argument.name in kwargs]


class RecordedOps:
    """A recorder of ops. What runs while they are recorded is undone."""

    made: list[RecordedOps] = []  # noqa: RUF012  (reset by each test)

    def __init__(self, *_: Any) -> None:
        self.ops: list[tuple[Any, Any, Any, Any]] = []
        self.replays = 0
        self.made.append(self)

    @staticmethod
    def new_pool() -> str:
        return "pool"

    def capture(self, act: Callable[[], dict[Port, Tensor]]) -> dict[Port, Tensor]:
        watching = Watching()
        try:
            with watching:
                return act()
        finally:
            self.ops = watching.ops
            for memory, before in watching.before.values():
                memory.copy_(before)

    @torch.no_grad()
    def replay(self) -> Callable[[], bool]:
        self.replays += 1
        for func, args, kwargs, results in self.ops:
            for old, new in zip(tree_leaves(results), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
        return lambda: True


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check of indices does not wait for its result."""
    RecordedOps.made = []
    monkeypatch.setitem(library._KERNELS, ("check_index", "CPU"), lambda index, *_: index.clone())


class Normed(nn.Module):
    """Buffers, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.BatchNorm1d(6), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(self.first(self.norm(x)).tanh(), 0.25, self.training)
        return (self.second(hidden) - x).square().mean()


class Case:
    """A model's body, what is held, and the batches of its steps."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        plan: dict[str, Any] = {}
        if kind == "norm":
            model: nn.Module = Normed()
            batches: list[Any] = [torch.randn(8, 6) for _ in range(STEPS)]
        else:
            model = GPT(32, 32, 2, 2, 16)
            plan = {"fuse": True} if kind == "fuse" else {"accumulate": 2, "clip_grad_norm": 0.1}
            batches = [{n: torch.randint(32, (4, 16)) for n in ("input_ids", "labels")} for _ in range(STEPS)]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.program = program = shardc.compile(model, batches[0], mesh="dp=1", plan=plan, optimizer=optimizer)
        ports = {port.name: port.role for port in program.body.inputs}
        self.rates = [name for name, role in ports.items() if role == "hyper"]
        seeds = [name for name, role in ports.items() if role == "seed"]
        whole = program.inputs()
        self.steps: list[list[Feed]] = []
        for step, batch in enumerate(batches):
            given = (
                batch if isinstance(batch, dict) else {name: batch for name, role in ports.items() if role == "input"}
            )
            seeded = {name: torch.full_like(whole[name], step) for name in seeds}
            self.steps.append(feeds(program.body, {**whole, **given, **seeded}))
        self.held = {name: x for name, x in whole.items() if name not in self.steps[0][0]}

    def executor(self) -> BodyCode:
        body = self.program.body
        from shardc.ir.arena import planned

        arena = Arena({body: planned(body, 1 << 40)}, CPU)
        return BodyCode(body, rank_context(self.program.mesh, 0, None), 0, CPU, arena)  # type: ignore[arg-type]

    def state(self) -> dict[str, Tensor]:
        return {name: x.detach().clone() for name, x in self.held.items()}

    def at(self, step: int, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """What a trainer gives: rates are other tensors in each step."""
        return {**state, **{name: torch.full_like(state[name], 1e-2 / (step + 1)) for name in self.rates}}


def keep(state: dict[str, Tensor], outputs: Mapping[Port, Tensor]) -> None:
    """What a trainer does after a step."""
    for port, value in outputs.items():
        if port.role in ("param", "state", "buffer") and value is not state[port.name]:
            state[port.name].copy_(value)


def run(case: Case, act: Callable[..., dict[Port, Tensor]], change: Callable[[int, dict[str, Tensor]], Any]) -> Any:
    """All results of all steps, read when the last has ended, and what is held then."""
    state, results = case.state(), list[dict[Port, Tensor]]()
    for step, fed in enumerate(case.steps):
        change(step, state)
        results.append(act(case.at(step, state), fed, None))
        keep(state, results[-1])
    outputs = [x for made in results for port, x in made.items() if port.role not in ("param", "state")]
    return [*outputs, *state.values()]


def unchanged(step: int, state: dict[str, Tensor]) -> None: ...


def graph_of(case: Case) -> StepGraph:
    return StepGraph(case.executor().run, case.rates, RecordedOps)


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", ["norm", "fuse", "accumulate"])
def test_replayed_steps_are_bitwise_those_without_graphs(kind: str) -> None:
    case = Case(kind)
    graph = graph_of(case)
    found = run(case, graph.run, unchanged)
    assert_same(found, run(case, case.executor().run, unchanged))
    (recorder,) = RecordedOps.made
    assert recorder.replays == STEPS - WARM_UP
    assert len({x.sum().item() for x in found if x.dim() == 0}) >= STEPS


def replace(state: dict[str, Tensor]) -> None:
    state |= {name: x * 0.5 for name, x in state.items() if x.is_floating_point() and x.dim() == 2}


def give_other_memory(state: dict[str, Tensor]) -> None:
    for x in state.values():
        x.data = x.data.clone()


def transpose(state: dict[str, Tensor]) -> None:
    """The same memory, read otherwise."""
    for x in state.values():
        if x.dim() == 2 and x.shape[0] == x.shape[1]:
            x.data = x.data.t()


def write(state: dict[str, Tensor]) -> None:
    for x in state.values():
        if x.is_floating_point():
            x.mul_(0.75)


CHANGES: dict[str, tuple[Callable[[dict[str, Tensor]], None], int]] = {
    "replaced": (replace, 2),
    "other memory": (give_other_memory, 2),
    "transposed": (transpose, 2),
    "written to": (write, 1),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_is_held_may_change_between_steps(what: str) -> None:
    """What lies elsewhere is captured anew, in time to be replayed again; what is written to is not."""
    change, captures = CHANGES[what]
    case = Case("fuse")
    case.steps += case.steps

    def after_two_replays(step: int, state: dict[str, Tensor]) -> None:
        if step == WARM_UP + 2:
            change(state)

    graph = graph_of(case)
    found = run(case, graph.run, after_two_replays)
    assert_same(found, run(case, case.executor().run, after_two_replays))
    assert [recorder.replays > 1 for recorder in RecordedOps.made] == [True] * captures


def test_a_batch_of_another_form_is_captured_for_itself() -> None:
    case = Case("norm")
    graph, state = graph_of(case), case.state()
    for fed in case.steps:
        graph.run(state, fed, None)
    other = [{name: x.double() if name == "x" else x for name, x in feed.items()} for feed in case.steps[0]]
    graph.run(state, other[:0] + case.steps[0], None)
    assert graph.captured
    with pytest.raises(shardc.ShardcError):
        graph.run(state, other, None)  # the executor refuses it, as without graphs
    assert not graph.captured


def test_what_cannot_be_captured_says_why_and_runs() -> None:
    """An op that waits for its result: the warning names its instruction and the user's line, once."""
    case = Case("norm")
    executor = case.executor()
    expected = run(case, case.executor().run, unchanged)
    for code in (executor._first_microbatch, executor._later_microbatches, executor._once_per_step):
        for index, (number, call, *rest) in enumerate(code):
            if "add" in getattr(call, "__name__", ""):
                code[index] = (number, _asking(call), *rest)  # type: ignore[misc]
                break
    graph = StepGraph(executor.run, case.rates, RecordedOps)
    with pytest.warns(UserWarning, match=r"SC518.*in instruction %.*test_step_graph.py:\d+.*not permitted") as told:
        found = run(case, graph.run, unchanged)
    assert len(told) == 1
    assert_same(found, expected)
    assert "not permitted" in graph.refusal


def _asking(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def asks(*args: Any, **kwargs: Any) -> Tensor:
        result = call(*args, **kwargs)
        assert result.sum().item() != 1e9
        return result

    return asks


# ---------------------------------------------------------------------- in a job
@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", **place}.items():
        monkeypatch.setenv(key, value)


def trained(graphs: bool, **plan: Any) -> tuple[list[Tensor], set[tuple[str, int]]]:
    """Losses and the final state of a job of one rank, and where its tensors lay between steps."""
    torch.manual_seed(0)
    model = Normed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    batches = [torch.randn(8, 6) for _ in range(STEPS)]
    program = shardc.compile(model, batches[0], mesh="dp=1", plan=plan, optimizer=optimizer)
    places: set[tuple[str, int]] = set()
    with program.launch(device="cpu", timeout=30, graphs=graphs) as trainer:
        results = []
        for batch in batches:
            results.append(trainer.step(batch))
            places |= {(name, x.data_ptr()) for name, x in trainer.state.items()}
            optimizer.step()
            schedule.step()
        return [*(result.loss for result in results), *trainer.state.values()], places


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_trainer_replays_and_its_state_stays_where_it_is(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds, rates, buffers, and fp16's loss scale."""
    monkeypatch.setitem(step_graph.RECORDERS, "cpu", RecordedOps)  # type: ignore[arg-type]
    plan = {} if precision == "fp32" else {"precision": precision}
    found, places = trained(True, **plan)
    (recorder,) = RecordedOps.made
    assert recorder.replays == STEPS - WARM_UP
    assert len(places) == len({name for name, _ in places})
    expected, _ = trained(False, **plan)
    assert_same(found, expected)


@pytest.mark.usefixtures("job")
def test_a_trainer_that_is_closed_holds_no_captured_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's communicators would wait for it when the caller ends them."""
    monkeypatch.setitem(step_graph.RECORDERS, "cpu", RecordedOps)  # type: ignore[arg-type]
    graphs: list[step_graph.StepGraph] = []
    of = step_graph.Graphs.of
    monkeypatch.setattr(step_graph.Graphs, "of", lambda *given: graphs.append(of(*given)) or graphs[-1])
    batch = torch.randn(8, 6)
    with shardc.compile(Normed(), batch, mesh="dp=1").launch(device="cpu", timeout=30, graphs=True) as trainer:
        for _ in range(STEPS):
            trainer.step(batch)
        assert [graph.captured for graph in graphs] == [True]
    assert [graph.captured for graph in graphs] == [False]


@pytest.mark.usefixtures("job")
def test_a_cpu_says_that_it_has_no_graphs() -> None:
    with pytest.warns(UserWarning, match="SC518.*they run on a CPU"):
        found, _ = trained(True)
    assert_same(found, trained(False)[0])


@pytest.mark.usefixtures("job")
def test_a_plan_that_raises_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(step_graph.RECORDERS, "cpu", RecordedOps)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="SC518.*nonfinite: raise"):
        trained(True, nonfinite="raise")
    assert not RecordedOps.made


def test_a_simulation_says_that_it_has_no_graphs() -> None:
    with pytest.warns(UserWarning, match="SC518.*simulated"):
        trained(True)
