"""The memory report of a pipelined program against the tensors that the ranks of its simulation really hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.multiprocessing.reductions import StorageWeakRef

from shardc.partition.cut import cut
from shardc.partition.memory import memory
from shardc.partition.staged_program import StagedProgram, scheduled
from shardc.runtime.oracle import simulate_stages as simulate
from shardc.runtime.oracle.simulate_stages import simulate_stages
from shardc.schedule.instructions import COMPUTE, Backward, Gather, Send
from shardc.schedule.lists import SENDS_IN_FLIGHT
from shardc.schedule.pipeline import PART_OF
from tests.models.zoo import make
from tests.partition.whole import SIZES, compiled, staged, step


class Meter:
    """Bytes of the distinct storages that the first rank of each coordinate holds, by instruction: the most while it
    runs. Storages that calls make are known by weak references; those between calls by who holds them."""

    def __init__(self, program: StagedProgram) -> None:
        self.found = [[0] * len(listed) for listed in program.lists.ranks]
        self.made: list[dict[int, tuple[StorageWeakRef, int]]] = [{} for _ in program.lists.ranks]
        self.machine: Any = None

    def run(self, program: StagedProgram, inputs: Any, patch: pytest.MonkeyPatch) -> None:
        meter = self

        class Machine(simulate._Machine):  # pyright: ignore[reportPrivateUsage]
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments)
                meter.machine = self

            def _receive(self, rank: int, i: Any) -> None:
                super()._receive(rank, i)
                c = self.coordinates[rank]
                for name, values in list(c.values[i.value, i.microbatch].items()):
                    c.values[i.value, i.microbatch] = {name: [value.clone() for value in values]}

            def _reduce(self, rank: int, i: Any) -> None:
                """A shard of a sum is a view of it here, and on a rank memory of its own."""
                before = set(self.coordinates[rank].sums)
                super()._reduce(rank, i)
                sums = self.coordinates[rank].sums
                sums |= {name: [x.clone() for x in values] for name, values in sums.items() if name not in before}

            def _done(self, rank: int, i: Any) -> None:
                meter.look(rank)
                super()._done(rank, i)

            def _work(self, rank: int, i: Any) -> None:
                super()._work(rank, i)
                self.coordinates[rank].at -= 1
                meter.look(rank)
                self.coordinates[rank].at += 1

        patch.setattr(simulate, "_Machine", Machine)
        simulate_stages(program, inputs, observe=self.watch)

    def watch(self, rank: int, microbatch: int, node: fx.Node, values: Sequence[Tensor]) -> None:
        storage = values[0].untyped_storage()
        self.made[rank][storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        self.look(rank)

    def look(self, rank: int) -> None:
        c = self.machine.coordinates[rank]
        alive = {at: (ref, size) for at, (ref, size) in self.made[rank].items() if not ref.expired()}
        self.made[rank] = alive
        sizes = {at: size for at, (_, size) in alive.items()}
        tables = (c.sums, c.buffers, *c.values.values())
        for storage in [values[0].untyped_storage() for table in tables for values in table.values()]:
            sizes[storage.data_ptr()] = storage.nbytes()
        stored = [values[0].untyped_storage().data_ptr() for values in self.machine.local.values()]
        total = sum(size for at, size in sizes.items() if at not in stored)
        at = sum(map(len, c.steps[: c.at]))
        self.found[rank][at] = max(self.found[rank][at], total)


@pytest.mark.parametrize(
    ("model", "variant", "microbatches", "ranks", "schedule", "virtual"),
    [
        ("gpt2", "alone", 3, 3, "1f1b", 1),
        ("gpt2", "tp2", 8, 2, "zb-v", 2),
        ("llama", "tp2", 3, 4, "zb-h1", 1),
        ("llama", "dp2", 3, 2, "interleaved", 2),
        ("t5", "alone", 3, 3, "gpipe", 1),
        ("t5", "tp2", 1, 2, "dualpipe-v", 2),
        ("llama", "zero1", 3, 2, "greedy", 1),
        ("gpt2", "zero3", 3, 2, "bfs", 2),
        ("llama", "zero3", 3, 2, "zb-v", 2),
        ("gpt2", "zero3", 3, 4, "1f1b", 1),
    ],
)
@pytest.mark.sampled(10)
def test_every_instruction_holds_what_the_report_says(
    model: str,
    variant: str,
    microbatches: int,
    ranks: int,
    schedule: str,
    virtual: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = scheduled(staged(model, variant, microbatches, ranks * virtual), schedule, virtual)
    agrees(program, compiled(model, variant, microbatches)[1], monkeypatch, peak=not variant.startswith("zero"))


def agrees(program: StagedProgram, inputs: Any, patch: pytest.MonkeyPatch, peak: bool = True) -> None:
    meter = Meter(program)
    meter.run(program, inputs, patch)
    report = memory(program, early=False)
    for one in report.coordinates:
        real, said = meter.found[one.number], one.report.timeline
        assert sum(real)
        for at, i in enumerate(program.lists.ranks[one.number]):
            if isinstance(i, (*COMPUTE, Gather)):
                assert said[at] == real[at], f"{at}: {i}"
        if peak:
            assert one.report.peak - one.report.stored == max(real)
            assert one.instruction == real.index(max(real))


def test_a_part_that_reads_some_members_of_a_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where tp divides a head's width, all stages read the tables of angles, and backward not both forms of them."""
    model, batch, loss = make("llama", **SIZES["llama"])
    rows = {"q": "4*tp, -", "k": "4*tp, -", "v": "tp, -"}
    params = {f"**.{name}_proj.weight": placed for name, placed in rows.items()}
    whole = step(model, batch, 1, "tp=2", loss, params=params)
    program = scheduled(cut(whole.body, 2), "1f1b")
    bundle = next(members for name, members in program.bundles.items() if name.startswith("params"))
    read = {port.name for stage in program.stages for port in stage[PART_OF[Backward]].inputs}
    assert read & set(bundle) < set(bundle)
    assert memory(program).peak <= memory(program, early=False).peak
    agrees(program, whole.inputs(), monkeypatch)


@pytest.mark.long  # every instruction's bytes are an ordinary test
def test_buffers_and_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulation keeps every buffer that a microbatch leaves, until the end; a rank keeps the last."""
    program = scheduled(staged("resnet", "alone", 8, 3), "1f1b")
    meter = Meter(program)
    meter.run(program, compiled("resnet", "alone", 8)[1], monkeypatch)
    for one in memory(program, early=False).coordinates:
        real = max(meter.found[one.number])
        assert one.report.peak - one.report.stored == pytest.approx(real, rel=0.05)


def test_1f1b_holds_as_many_microbatches_as_there_are_ranks_left() -> None:
    """Rank r of p holds the activations of p - r microbatches, however many there are; under GPipe it holds all."""
    for microbatches in (3, 8):
        cutup = staged("gpt2", "alone", microbatches, 4)
        some, every = (memory(scheduled(cutup, schedule)) for schedule in ("1f1b", "gpipe"))
        for rank in range(4):
            few, all_of_them = (found.row("activations", rank).most for found in (some, every))
            each, arrives = all_of_them // microbatches, 24 // microbatches * 4 * 16 * 4
            assert all_of_them == each * microbatches
            assert 0 <= few - each * min(microbatches, 4 - rank) <= arrives


def test_a_rank_that_forgets_while_it_works_holds_less() -> None:
    """Values and terms of sums go one by one: less at the peak, and at no time more, but for what is being sent."""
    program = scheduled(staged("gpt2", "alone", 8, 3), "1f1b")
    early, late = memory(program), memory(program, early=False)
    for a, b in zip(early.coordinates, late.coordinates, strict=True):
        sent = max(i.bytes for i in program.lists.ranks[a.number] if isinstance(i, Send))
        under_way = SENDS_IN_FLIGHT * sent
        assert all(x <= y + under_way for x, y in zip(a.report.timeline, b.report.timeline, strict=True))
        assert a.report.peak < b.report.peak


def test_rows_add_up() -> None:
    program = scheduled(staged("gpt2", "zero1", 8, 4), "1f1b")
    found = memory(program)
    assert {row.rank for row in found.rows} == set(range(8))
    assert all(found.of_rank(2 * c) != found.of_rank(2 * (c - 1)) for c in range(1, 4))
    for one in found.coordinates:
        for rank in one.ranks:
            assert sum(row.bytes for row in found.of_rank(rank)) == one.report.peak
            assert sum(row.stored for row in found.of_rank(rank)) == one.report.stored
        assert one.report.peak == sum(value.bytes for value in one.report.live)
        assert one.report.peak - one.report.stored == max(one.report.timeline)
    assert found.peak == max(one.report.peak for one in found.coordinates)
    # Parameters, stored once, the tied one on both of its ranks; moments on halves.
    of_stages = sum(found.row("parameters", rank).stored for rank in (0, 2, 4, 6))
    model = compiled("gpt2", "zero1", 8)[0].model
    assert model is not None
    tied = model.get_parameter("transformer.wte.weight").nbytes
    assert of_stages == sum(p.nbytes for p in model.parameters()) + tied


def test_text(golden: Callable[[str, str], None]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters())
    program = step(model, torch.randn(8, 4), 4, "dp=2", lambda y, _: (y * y).mean(), optimizer, inputs={"input": "dp"})
    found = memory(scheduled(cut(program.body, 2), "1f1b"))
    golden("memory.txt", f"{found}\n\n{found.listing(4)}\n")
