"""Lists are proved before they run, and the same lists once."""

from dataclasses import replace

import pytest

import shardc
from shardc import ShardcError
from shardc.schedule import prove as proofs
from shardc.schedule.instructions import Send
from shardc.schedule.lists import RankLists
from tests.api.test_pipeline import net, rows


@pytest.fixture
def proved(monkeypatch: pytest.MonkeyPatch) -> list[RankLists]:
    seen: list[RankLists] = []
    whole = proofs.prove

    def prove(lists: RankLists) -> proofs.Proof:
        seen.append(lists)
        return whole(lists)

    monkeypatch.setattr(proofs, "prove", prove)
    return seen


def test_the_steps_of_one_program_are_proved_once(proved: list[RankLists]) -> None:
    program = net()
    for _ in range(3):
        program.simulate(rows())
    assert len(proved) == 1


def test_other_lists_are_proved_anew(proved: list[RankLists]) -> None:
    """Equal ones too: only the very same object is known."""
    program: shardc.Program = net()
    assert program.pipelined is not None
    program.simulate(rows())
    lists = program.pipelined.lists
    other = replace(program, pipelined=replace(program.pipelined, lists=replace(lists)))
    other.simulate(rows())
    assert len(proved) == 2
    lost = replace(lists, ranks=(tuple(i for i in lists.ranks[0] if not isinstance(i, Send)), lists.ranks[1]))
    wrong = replace(program, pipelined=replace(program.pipelined, lists=lost))
    for _ in range(2):
        with pytest.raises(ShardcError, match="SC521"):
            wrong.simulate(rows())
    assert len(proved) == 4
