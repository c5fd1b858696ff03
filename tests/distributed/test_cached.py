"""A rank that takes its program from the disk trains with one that compiles it: the two are the same program."""

from pathlib import Path

from tests.distributed.ranks import start

WORKER = Path(__file__).parent / "cached_worker.py"


def test_ranks_of_which_one_has_the_program_on_its_disk(tmp_path: Path) -> None:
    found = start("cached", 2, tmp_path, worker=WORKER)
    for name in ("data", "tensor", "pipeline"):
        said = [{turn: result["cached"] for turn, result in rank[name].items()} for rank in found if rank is not None]
        off = "the cache is off"
        assert said == [
            {"compiled": off, "stored": "stored", "one has it": "hit", "one is off": off, "both have it": "hit"},
            {"compiled": off, "stored": off, "one has it": "stored", "one is off": "hit", "both have it": "hit"},
        ]
        losses = [result["losses"] for rank in found if rank is not None for result in rank[name].values()]
        assert len(losses) == 10
        assert all(one == losses[0] for one in losses)
        assert len({*losses[0]}) == 4
