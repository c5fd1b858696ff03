"""16,384 ranks: programs of them are compiled, proved, costed and reported by classes of equal ranks."""

import time
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

import pytest

import shardc
from benchmarks.at_scale import SHAPES, Shape, compiled
from shardc.ir.collectives import KINDS
from shardc.ir.graph import op_name
from shardc.ir.schema import given
from shardc.partition.program_counter import graphs_of
from shardc.partition.staged_program import StagedProgram
from shardc.schedule.instructions import COLLECTIVE, Recv, Send
from shardc.schedule.lists import split_batches

LLAMA = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 8,
         "vocab_size": 256, "num_hidden_layers": 4}  # fmt: skip
MIXTRAL = {**LLAMA, "num_local_experts": 8, "num_experts_per_tok": 2}
PLAN = {name: shape[2] for name, shape in SHAPES.items()}


def at(mesh: str, name: str) -> Shape:
    sizes, length = (LLAMA, 512) if name == "llama" else (MIXTRAL, 32)
    return mesh, sizes, PLAN[name], length


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "large", "small"),
    [
        ("llama", "dp=32, pp=4, cp=16, tp=8", "dp=2, pp=4, cp=16, tp=8"),
        ("mixtral", "dp=64, pp=4, ep=8, tp=8", "dp=2, pp=4, ep=8, tp=8"),
    ],
)
def test_what_a_program_of_16384_ranks_costs(name: str, large: str, small: str) -> None:
    few, many = (compiled(at(mesh, name), microbatches=4) for mesh in (small, large))
    assert many.mesh.world_size == 16384
    start = time.process_time()
    assert many.prove().ok
    memory, predicted = many.memory(), many.predict("h200")
    assert len(str(memory)) < 6000, "ranks are not listed one by one"
    assert time.process_time() - start < 60
    assert [len(coordinate.ranks) for coordinate in memory.coordinates] == [4096] * 4
    assert predicted.ranks == 16384
    # A rank has the same rows, the same weights and the same lists, with more replicas.
    assert memory.peak == few.memory().peak
    assert many.staged.lists.ranks == few.staged.lists.ranks
    assert many.flops().total == few.flops().total
    collectives = [[(c.kind, c.axes, c.payload_bytes) for c in one.collectives()] for one in (few, many)]
    assert collectives[0] == collectives[1]


# ---------------------------------------------------------------------- what classes stand for, rank by rank
Event = tuple[Any, ...]


def events(staged: StagedProgram, rank: int) -> Iterator[list[Event]]:
    """What one rank of the whole mesh waits for, batch by batch: its peers and groups by their own numbers."""
    c, i = staged.coordinates(rank)
    for batch in split_batches(staged.lists.ranks[c]):
        posted: list[Event] = []
        for instruction in batch:
            if isinstance(instruction, Send):
                target = staged.rank_of(instruction.peer, i)
                posted.append(("send", rank, target, instruction.value, instruction.microbatch))
            elif isinstance(instruction, Recv):
                source = staged.rank_of(instruction.peer, i)
                posted.append(("recv", source, rank, instruction.value, instruction.microbatch))
            else:
                for graph in graphs_of(staged, c, instruction):
                    for node in graph.calls():
                        if op_name(node.target) in KINDS:
                            members = graph.mesh.group_of(i, given(node)["axes"])
                            yield [("group", tuple(staged.rank_of(c, member) for member in members), str(node.target))]
                if isinstance(instruction, COLLECTIVE):
                    group = tuple(sorted(staged.rank_of(peer, i) for peer in instruction.group))
                    yield [("group", group, type(instruction).__name__)]
        if posted:
            yield posted


def deadlocks(staged: StagedProgram) -> bool:
    """Every rank of the mesh on its own, by blocking rendezvous."""
    waiting = {rank: deque(events(staged, rank)) for rank in range(staged.mesh.world_size)}
    posted: dict[int, list[Event]] = {rank: [] for rank in waiting}
    channels: dict[tuple[int, int], dict[str, deque[Event]]] = defaultdict(lambda: {"send": deque(), "recv": deque()})
    arrived: dict[tuple[int, ...], dict[int, str]] = defaultdict(dict)
    ready = deque(waiting)
    while ready:
        rank = ready.popleft()
        if posted[rank] or not waiting[rank]:
            continue
        posted[rank] = list(waiting[rank].popleft())
        for event in list(posted[rank]):
            if event[0] == "group":
                members, name = event[1], event[2]
                arrived[members][rank] = name
                if len(arrived[members]) == len(members):
                    assert len(set(arrived.pop(members).values())) == 1, "members reach another collective"
                    for member in members:
                        posted[member] = []
                        ready.append(member)
                continue
            ends = channels[event[1], event[2]]
            ends[event[0]].append(event)
            while ends["send"] and ends["recv"]:
                sent, received = ends["send"].popleft(), ends["recv"].popleft()
                assert sent[1:] == received[1:], "another value arrives"
                for member, met in ((sent[1], sent), (sent[2], received)):
                    posted[member].remove(met)
                    if not posted[member]:
                        ready.append(member)
        if not posted[rank]:
            ready.append(rank)
    return any(posted.values()) or any(waiting.values())


@pytest.mark.parametrize(
    ("name", "mesh"),
    [("llama", "dp=2, pp=2, cp=2, tp=2"), ("llama", "pp=2, dp=2, cp=2, tp=2"), ("mixtral", "tp=2, ep=2, pp=2, dp=2")],
)
def test_a_class_stands_for_its_ranks(name: str, mesh: str) -> None:
    """The proof looks at one list a class. Here each of 16 ranks meets its own peers and groups."""
    program = compiled(at(mesh, name), microbatches=4)
    assert program.prove().ok
    assert not deadlocks(program.staged)


def test_ranks_that_deadlock_are_seen() -> None:
    """The check above can fail: a list whose receives come in another order than they are sent."""
    program = compiled(at("dp=2, pp=2, cp=2, tp=2", "llama"), microbatches=4)
    staged = program.staged
    ranks = [list(instructions) for instructions in staged.lists.ranks]
    sends = [k for k, i in enumerate(ranks[0]) if isinstance(i, Send)]
    ranks[0].insert(0, ranks[0].pop(sends[-1]))
    broken = shardc.schedule.lists.RankLists(staged.lists.pipeline, staged.lists.microbatches, tuple(map(tuple, ranks)))
    changed = StagedProgram(**{**{f: getattr(staged, f) for f in staged.__dataclass_fields__}, "lists": broken})
    with pytest.raises(AssertionError, match="another value arrives"):
        assert deadlocks(changed)
