"""The proof: accepts what is right, refuses what is broken, and says why."""

import random
from collections.abc import Callable
from dataclasses import replace

from hypothesis import event, given
from hypothesis import strategies as st

from shardc.ir.diagnostic import Diagnostic
from shardc.schedule.build import build
from shardc.schedule.instructions import Dgrad, Forward, Free, Instruction, Optimizer, Recv, ReduceGrads, Send, Wgrad
from shardc.schedule.lists import RankLists
from shardc.schedule.pipeline import Pipeline, Stage, StagePart, chain_pipeline
from shardc.schedule.prove import prove
from tests.schedule.mutate import judged
from tests.schedule.oracle import Broken, Machine


def test_mutants() -> None:
    """All that a symbolic run finds broken are refused, and none that it finds whole."""
    found = judged(each=28)
    assert not found.missed + found.wronged, found.first
    print(f"\n{found.refused.total()} mutants broken, all refused: {dict(found.refused)}")
    print(f"{found.accepted.total()} mutants unbroken, none refused: {dict(found.accepted)}")
    print(f"codes: {dict(sorted(found.codes.items()))}")
    assert found.refused.total() >= 1000
    assert found.accepted.total() >= 100
    assert {"SC521", "SC522", "SC523", "SC524", "SC525", "SC526"} <= found.codes.keys()


# ---------------------------------------------------------------------- by hand
def changed(lists: RankLists, rank: int, change: Callable[[list[Instruction]], object]) -> RankLists:
    listed = list(lists.ranks[rank])
    change(listed)
    return replace(lists, ranks=(*lists.ranks[:rank], tuple(listed), *lists.ranks[rank + 1 :]))


def handmade(*ranks: list[Instruction]) -> RankLists:
    """Transfers of values that nobody makes, for the waits alone; WORK only keeps them apart."""
    return RankLists(
        Pipeline((Stage(StagePart(), StagePart(), StagePart()),), updates=False), 1, tuple(map(tuple, ranks))
    )


def deadlocks(lists: RankLists) -> list[Diagnostic]:
    return [error for error in prove(lists).errors if error.code == "SC523"]


WORK = Forward(0, 0)


def test_opposite_sends_need_a_batch() -> None:
    """Side by side on one of the two ranks is enough: a batch posts its receive before its send is done."""
    a, b = [Send("a", 0, 1), Recv("b", 0, 1)], [Send("b", 0, 0), Recv("a", 0, 0)]
    a_apart, b_apart = [a[0], WORK, a[1]], [b[0], WORK, b[1]]
    assert not deadlocks(handmade(a, b))
    assert not deadlocks(handmade(a_apart, b))
    assert not deadlocks(handmade(a, b_apart))
    assert deadlocks(handmade(a_apart, b_apart))


def test_smallest_cycle(golden: Callable[[str, str], None]) -> None:
    """Three ranks send around a ring before they receive; then two of them stand in each other's way as well."""
    zero: list[Instruction] = [Send("a", 0, 1), WORK, Recv("c", 0, 2)]
    one: list[Instruction] = [Send("b", 0, 2), WORK, Recv("a", 0, 0)]
    two: list[Instruction] = [Send("c", 0, 0), WORK, Recv("b", 0, 1)]
    (ring,) = deadlocks(handmade(zero, one, two))
    (pair,) = deadlocks(handmade([*zero, Recv("d", 0, 1)], [Send("d", 0, 0), *one], two))
    golden("deadlocks.txt", f"{ring}\n\n{pair}")
    one[1:2] = []  # a batch of one rank breaks the ring
    assert not deadlocks(handmade(zero, one, two))


@st.composite
def exchanges(draw: st.DrawFn) -> RankLists:
    """Transfers among a few ranks, in one order; then moved about on each rank, but for those of one channel."""
    ranks = draw(st.integers(2, 4))
    ends = st.tuples(st.integers(0, ranks - 1), st.integers(0, ranks - 1)).filter(lambda pair: pair[0] != pair[1])
    listed: list[list[Instruction]] = [[] for _ in range(ranks)]
    for number, (source, to) in enumerate(draw(st.lists(ends, min_size=1, max_size=10))):
        for rank, i in ((source, Send(f"v{number}", 0, to)), (to, Recv(f"v{number}", 0, source))):
            channel = [type(other) is type(i) and getattr(other, "peer", None) == i.peer for other in listed[rank]]
            after = max((at + 1 for at, same in enumerate(channel) if same), default=0)
            at = draw(st.integers(max(after, len(channel) - 3), len(channel)))
            listed[rank][at:at] = [*[Free((), 0)] * draw(st.integers(0, 1)), i]
    return handmade(*listed)


@given(exchanges())
def test_waits_are_those_of_the_machine(lists: RankLists) -> None:
    machine = Machine(lists, {})
    for state in machine.ranks:
        state.values = {(i.value, 0): 0 for i in state.listed if isinstance(i, Send)}
    try:
        machine.run(random.Random(0))
        stuck = False
    except Broken:
        stuck = True
    assert bool(deadlocks(lists)) == stuck
    event("deadlock" if stuck else "none")


def test_collectives_wait_too() -> None:
    """Rank 0 sends before the shared sum, rank 1 receives after it."""
    both = ReduceGrads("shared", (0, 1))
    assert not deadlocks(handmade([Send("a", 0, 1), both], [Recv("a", 0, 0), both]))
    assert deadlocks(handmade([Send("a", 0, 1), both], [both, Recv("a", 0, 0)]))


def test_codes(golden: Callable[[str, str], None]) -> None:
    """One fault of each kind, and every line that it leads to."""
    lists = build(chain_pipeline(2, tied=True, clips=True), "zb-h1", 2)
    send = next(i for i in lists.ranks[0] if isinstance(i, Send))
    free = next(i for i in lists.ranks[0] if isinstance(i, Free))
    shared, own = ReduceGrads("tied", (0, 1), 1), ReduceGrads("grads0", (0,), 1)
    faults = {
        "nothing is wrong": lists,
        "a send is lost": changed(lists, 0, lambda i: i.remove(send)),
        "receives are in another order": changed(lists, 1, swap(Recv("x1", 0, 0, 1), Recv("x1", 1, 0, 1))),
        "a wgrad runs twice": changed(lists, 0, lambda i: i.insert(i.index(Wgrad(0, 1)), Wgrad(0, 1))),
        "a dgrad is forgotten": changed(lists, 1, lambda i: i.remove(Dgrad(1, 1))),
        "one of two sums shared gradients": changed(lists, 1, lambda i: i.remove(shared)),
        "a sum comes before a wgrad": changed(lists, 0, swap(own, Wgrad(0, 1))),
        "the optimizer runs alone": changed(lists, 0, lambda i: i.append(Optimizer((0,)))),
        "a value is kept": changed(lists, 0, lambda i: i.remove(free)),
        "there is no such peer": changed(lists, 0, lambda i: i.append(Send("x1", 0, 5, 1))),
    }
    golden("codes.txt", "\n\n".join(f"--- {name}\n{prove(lists)}" for name, lists in faults.items()))


def swap(a: Instruction, b: Instruction) -> Callable[[list[Instruction]], None]:
    def change(listed: list[Instruction]) -> None:
        i, j = listed.index(a), listed.index(b)
        listed[i], listed[j] = b, a

    return change
