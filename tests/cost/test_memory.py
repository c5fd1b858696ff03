"""The memory report against real tensors: what one rank holds while each call of its body runs."""

import gc
import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.cost.memory import CATEGORIES, memory
from shardc.ir.graph import Graph, info, type_of
from shardc.ir.in_place import writes
from shardc.ir.mesh import Mesh
from shardc.ir.ops.accumulate import ACCUMULATE_MORE_ROWS, add_row_sums
from shardc.ir.ops.collectives import COLLECTIVES, run_collective
from shardc.ir.ops.context import running
from shardc.partition.memory import ProgramMemory
from shardc.runtime.execute.instructions import Numerics, list_calls, rank_context
from shardc.runtime.execute.layout import load_shard
from tests.models.zoo import PLANS, make

CASES = ["gpt2", "gpt2_sp", "llama", "llama_sp", "cnn", "resnet", "t5", "vit"]
UNEVEN: dict[str, int] = {"batch": 7, "seq": 15}


class Alone:
    """A communicator of one rank that gets what it gives, in tensors of the size that the others would send."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def all_reduce(self, x: Tensor, *_: Any) -> Tensor:
        return x.clone()

    def all_gather(self, x: Tensor, axes: Any) -> Tensor:
        return torch.stack([x] * self.mesh.size(tuple(axes)))

    def reduce_scatter(self, x: Tensor, *_: Any) -> Tensor:
        return x[0].clone()

    def all_to_all(self, x: Tensor, *_: Any) -> Tensor:
        return x.clone()

    def all_to_all_uneven(self, x: Tensor, *_: Any) -> Tensor:
        return x.clone()

    def permute(self, x: Tensor, *_: Any) -> Tensor:
        return x.clone()


@torch.no_grad()
def measured(body: Graph) -> list[int]:
    """Bytes of the distinct storages that rank 0 holds besides its inputs, while each call runs.

    Of several microbatches, in the second: the sums that the first began are there, and what is made before both.
    """
    listing = list_calls(body, Numerics())
    over = {write.value: write for write in writes(body)}
    places = dict(zip(body.placeholders, listing.inputs, strict=True))
    inputs = [torch.ones(type_of(n).local_shape(body.mesh), dtype=type_of(n).dtype) for n in body.placeholders]
    env: list[Any] = [None] * listing.size
    for slot, value in zip(listing.inputs, inputs, strict=True):
        env[slot] = value
    held = {value.untyped_storage().data_ptr() for value in inputs}
    found: list[int] = []
    with running(rank_context(body.mesh, 0, Alone(body.mesh))):
        start = listing.repeated.start
        first = listing.instructions[start : listing.repeated.stop] if body.microbatches > 1 else ()
        kept: list[Any] = []
        order = (*listing.instructions[:start], *first, *listing.instructions[start:])
        for at, instruction in enumerate(order):
            if at == start + len(first) and first:
                kept = [env[listing.outputs[i]] for i in listing.stacked]
                carried = [(into, env[slot]) for slot, into in listing.buffer_slots]
                for into, value in carried:
                    env[into] = value
            if at - len(first) not in listing.first:  # else a later microbatch finds what the first has gathered
                args, kwargs = instruction.arguments(env)
                steps = COLLECTIVES.get(instruction.target)
                call = instruction.target if steps is None else partial(run_collective, steps)
                call = add_row_sums if instruction.target is ACCUMULATE_MORE_ROWS else call
                result = call(*args, **kwargs)
                if instruction.total is not None:  # the memory of the sum so far
                    env[instruction.total] = result
            for value, position, slot in instruction.yields if at - len(first) not in listing.first else ():
                env[slot] = result if position is None else result[position]
                if value in over and over[value].op is not None:
                    env[slot] = inputs[places[over[value].over]]
            homes = [value.untyped_storage() for value in (*env, *kept) if value is not None]
            found.append(sum({h.data_ptr(): h.nbytes() for h in homes if h.data_ptr() not in held}.values()))
            for slot in instruction.free:
                env[slot] = None
            for value, _, slot in instruction.yields:
                if value in over:
                    env[slot] = inputs[places[over[value].over]]
    return found[:start] + found[start + len(first) :]


def compiled(plan: str, storage: dict[str, Any] | None = None, **arguments: int) -> shardc.Program:
    """A model of the zoo by its plan, at the plan's dp=2, tp=2; without buckets, whose members executors allocate."""
    model, batch, loss = make(plan.removesuffix("_sp"), **arguments)
    wanted = shardc.Plan.load(PLANS / f"{plan}.yaml").merge(shardc.Plan.of(bucket=False))
    if storage is not None:
        wanted = wanted.merge(shardc.Plan.from_dict({"storage": storage}))
    return shardc.compile(model, batch, plan=wanted, loss=loss)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("plan", CASES)
def test_every_instruction_holds_what_the_report_says(plan: str) -> None:
    """Not only the peak, and not within 5 %: all of the timeline, to the byte."""
    program = compiled(plan)
    report = memory(program.body)
    real = measured(program.body)
    assert list(report.timeline) == real
    assert report.peak - report.stored == max(real)
    assert report.peak_at is not None
    assert report.peak_at.index == real.index(max(real))
    assert report.peak_at.name == [info(n).name for n in program.body.calls()][report.peak_at.index]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("plan", ["gpt2", "gpt2_sp"])
def test_uneven_shards(plan: str) -> None:
    program = compiled(plan, **UNEVEN)
    assert max(memory(program.body).timeline) == pytest.approx(max(measured(program.body)), rel=0.01)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("plan", ["gpt2", "cnn"])
@pytest.mark.parametrize("storage", [None, {"zero": 3, "axes": ["dp"]}])
def test_stored_bytes_are_what_every_rank_allocates(plan: str, storage: dict[str, Any] | None) -> None:
    """Each tensor that a trainer loads, cut as a rank of a job cuts it."""
    program = compiled(plan, storage)
    report = program.memory()
    body = program.body
    with program.launch() as trainer:
        for rank in range(program.mesh.world_size):
            real = {"param": 0, "buffer": 0}
            for port, node in zip(body.inputs, body.placeholders, strict=True):
                if port.role in real:
                    whole = trainer.state[port.name]
                    part = load_shard(lambda slices, whole=whole: whole[slices], type_of(node), body.mesh, rank)
                    real[port.role] += part.untyped_storage().nbytes()
            assert report.row("parameters", rank).stored == real["param"] == trainer.parameter_bytes
            assert report.row("buffers", rank).stored == real["buffer"]


def test_rows_add_up_to_the_peak() -> None:
    program = compiled("gpt2")
    report = program.memory()
    assert {row.rank for row in report.rows} == set(range(4))
    for rank in range(4):
        assert [row.category for row in report.of_rank(rank)] == list(CATEGORIES)
        assert sum(row.bytes for row in report.of_rank(rank)) == report.peak
    assert sum(one.bytes for one in report.live) == report.peak
    for row in report.of_rank(0):
        assert row.live <= row.most
        assert row.bytes == sum(one.bytes for one in report.live if one.category == row.category)


def test_categories() -> None:
    """Gradients as large as the parameters; activations that grow with the layers; under ZeRO-3, gathers."""
    report, deeper, deepest = (compiled("gpt2", layers=n).memory() for n in (2, 3, 4))
    assert report.row("gradients").most == report.row("parameters").stored
    one, two, three = (r.row("activations").most for r in (report, deeper, deepest))
    assert three - two == two - one > 0, "a layer more, a layer's activations more"
    gathered = compiled("gpt2", {"zero": 3, "axes": ["dp"]}).memory()
    assert gathered.row("parameters").stored == report.row("parameters").stored // 2
    assert gathered.row("communication").most > report.row("communication").most
    buffers = compiled("cnn").memory().row("buffers")
    assert buffers.stored > 0
    assert buffers.most > 0, "the new statistics"


def test_optimizer_state_is_stored_in_shards() -> None:
    """AdamW's two moments of each parameter, and a counter; over dp, half of it."""
    whole, half = (adamw(storage) for storage in ({}, {"zero": 1, "axes": ["dp"]}))
    parameters = whole.row("parameters").stored
    assert 2 * parameters <= whole.row("optimizer state").stored < 2.01 * parameters
    assert half.row("parameters").stored == parameters
    assert parameters <= half.row("optimizer state").stored < 1.01 * parameters
    assert half.row("gradients").most < whole.row("gradients").most


def adamw(storage: dict[str, Any]) -> ProgramMemory:
    model, batch, _ = make("gpt2")
    wanted = shardc.Plan.load(PLANS / "gpt2.yaml").merge(shardc.Plan.of(storage=storage, bucket=False))
    program = shardc.compile(model, batch, plan=wanted, optimizer=torch.optim.AdamW(model.parameters()))
    report = memory(program.body)
    assert list(report.timeline) == measured(program.body)
    return report


@pytest.mark.long  # `test_categories` counts activations
def test_sequence_parallelism_saves_activations() -> None:
    assert compiled("llama_sp").memory().row("activations").most < compiled("llama").memory().row("activations").most


def test_the_table_and_the_largest() -> None:
    report = compiled("gpt2").memory()
    text = str(report)
    assert "the same on all 4 ranks" in text
    assert f"peak at %{report.peak_at.name}" in text  # type: ignore[union-attr]
    assert [line.split("  ")[0] for line in text.splitlines()[4:]] == [
        "parameters", "gradients", "inputs", "activations", "communication", "temporaries", "total",
    ]  # fmt: skip
    largest = report.top(3)
    assert [one.bytes for one in largest] == sorted((one.bytes for one in report.live), reverse=True)[:3]
    saved = next(one for one in report.live if one.category == "activations" and one.fqn == "transformer.h.0.mlp.act")
    assert saved.source.startswith("transformers/activations.py:")
    assert len(report.listing(3).splitlines()) == 4


class Ranked(nn.Module):
    """Of sort and of median one result is read; the other, made at the peak, is not."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h = h * h.detach().sort(-1).values * h.detach().median(-1, keepdim=True).values
        return self.b(h).square().mean()


PLANS_OF_RANKED: dict[str, dict[str, Any]] = {
    "alone": {},
    "budget": {"recompute": {"mode": "budget", "budget": "1KiB"}},
    "pipeline": {"pipeline": {"microbatches": 2}, "mesh": "pp=2"},
}


@pytest.mark.parametrize("plan", PLANS_OF_RANKED)
def test_results_that_nobody_reads_are_named(plan: str) -> None:
    program = shardc.compile(Ranked(), torch.randn(512, 64), plan={"mesh": "dp=1", **PLANS_OF_RANKED[plan]})
    report = program.memory()
    assert report.peak > report.stored
    assert report.table()[-1].startswith("total")
    assert str(report)


@pytest.mark.long  # how time grows, not what is computed
def test_linear_time() -> None:
    """A graph of 13k calls takes well under a second: so much a call, in CPU time, and no more for the later ones."""
    body = compiled("gpt2", layers=12).body
    memory(body)  # whatever torch imports at its first meta call
    gc.collect()
    start = time.process_time()
    memory(body)
    spent = time.process_time() - start
    calls = len(memory(body).timeline)
    assert calls > 1300
    assert spent / calls < 75e-6, f"{spent:.2f} s for {calls} calls"
