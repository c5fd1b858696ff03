"""The training loop of real processes over gloo: a reason to end that one rank has ends all after the same step, and
the checkpoint of that step leads to what a whole run does."""

from pathlib import Path

import pytest

from tests.distributed.ranks import start
from tests.runtime.looped import HELD_OUT, batches, plateau, started

WORKER = Path(__file__).parent / "loop_worker.py"
LAST, END = 12, 5  # as in the worker
# By case: the step after which all end, and what each rank ends with.
CASES = {
    "SIGTERM": (END, "SystemExit: 143", "SystemExit: 143"),
    "SIGINT": (END, "KeyboardInterrupt: ", "KeyboardInterrupt: "),
    "SIGTERM in the caller's loop": (END + 1, "SystemExit: 143", "SystemExit: 143"),
    "stop": (END, "", ""),
    "error": (
        END,
        "ShardcError: error[SC502 dead-rank]: rank 1 failed after a step, of an error of its own: LookupError: nothing",
        "LookupError: nothing there",
    ),
}


def test_what_one_rank_ends_for_ends_all_after_the_same_step_and_is_resumed(tmp_path: Path) -> None:
    trainer, optimizer = started()
    with trainer:
        whole = list(
            trainer.train(
                batches(), LAST, scheduler=plateau(optimizer), monitor="evaluated.loss",
                evaluate=HELD_OUT, evaluate_every=2, progress=False,
            )
        )  # fmt: skip
    ranks = start(",".join(CASES), 2, tmp_path, limit=240, worker=WORKER)
    for case, (steps, *ends) in CASES.items():
        for rank, end in zip(ranks, ends, strict=True):
            assert rank is not None
            first, rest = rank[case]
            assert (first["steps"], rest["steps"], rest["end"]) == (steps, LAST, ""), case
            assert first["end"] == end or (end and first["end"].startswith(end)), case
            assert first["seconds"] < 60, case
            # The metrics of the step after which they are interrupted do not reach the caller.
            made = [*range(steps if case == "stop" else steps - 1), *range(steps, LAST)]
            for key, expected in (
                ("losses", [m.loss for m in whole]),
                ("rates", [m.learning_rates[0] for m in whole]),
            ):
                assert first[key] + rest[key] == pytest.approx([expected[i] for i in made], rel=1e-5), (case, key)


@pytest.mark.long
def test_an_error_of_one_rank_s_own_code_ends_the_others_soon(tmp_path: Path) -> None:
    """Nobody can ask the others to stop: they are at the next step. The job's limit is 120 seconds."""
    case = "error in the caller's loop"
    for rank, end in zip(
        start(case, 2, tmp_path, worker=WORKER), ("rank 1 died, of an error of its own", ""), strict=True
    ):
        assert rank is not None
        (first,) = rank[case]
        assert "LookupError: nothing there" in first["end"]
        assert end in first["end"]
        assert first["seconds"] < 60
