"""What four gloo processes really allocate for parameters and AdamW's state is what `program.memory()` says, to the
byte, and 1/N of what is sharded: before a step and after."""

import re
from pathlib import Path

import pytest

from tests.distributed import bytes_worker
from tests.distributed.bytes_worker import CASES, STEPS, program_of
from tests.distributed.ranks import cases_of, start

Held = dict[str, list[dict[str, int]]]
SAMPLED = ("dp4 zero-1", "dp2 tp2 zero-3")
ROLES = {"param": "parameters", "state": "optimizer state", "buffer": "buffers"}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[Held]:
    folder = tmp_path_factory.mktemp("bytes")
    bytes_worker.prepare(folder, cases_of(request))
    found = start("bytes", 4, folder, limit=300, worker=Path(bytes_worker.__file__))
    assert all(one is not None for one in found)
    return [one for one in found if one is not None]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [*SAMPLED, *(pytest.param(c, marks=pytest.mark.long) for c in CASES if c not in SAMPLED)]
)
def test_memory_is_what_is_allocated(case: str, ranks: list[Held]) -> None:
    program, _ = program_of(case)
    for rank, held in enumerate(ranks):
        report = program.memory()
        want = {role: report.row(category, rank).stored for role, category in ROLES.items()}
        for now in held[case]:
            assert {role: now.get(role, 0) for role in ROLES} == want, f"rank {rank}"
        assert len(held[case]) == STEPS + 1


@pytest.mark.parametrize(
    ("case", "of_params", "of_state"),
    [
        ("dp4 zero-1", 1, 4),
        pytest.param("dp4 zero-0", 1, 1, marks=pytest.mark.long),
        pytest.param("dp4 zero-2", 1, 4, marks=pytest.mark.long),
        pytest.param("dp4 zero-3", 4, 4, marks=pytest.mark.long),
    ],
)
def test_a_rank_holds_its_share(case: str, of_params: int, of_state: int, ranks: list[Held]) -> None:
    """Every size of the model divides by 4, so a share is exact; the step counts, a scalar a parameter, are not cut."""
    program, _ = program_of(case)
    assert program.model is not None
    sizes = [p.numel() for p in program.model.parameters()]
    counts = 8 * len(sizes)
    for rank, one in enumerate(ranks):
        for now in one[case]:
            assert now["param"] * of_params == 4 * sum(sizes), f"rank {rank}"
            assert (now["state"] - counts) * of_state == 8 * sum(sizes), f"rank {rank}"


def test_axes_multiply(ranks: list[Held]) -> None:
    """Under dp2 x tp2 with zero-3, what tensor parallelism shards is cut in four, and the rest in two."""
    program, _ = program_of("dp2 tp2 zero-3")
    assert program.model is not None
    replicated = re.compile(r"ln_|wpe|c_proj.bias")
    sizes = {name: p.numel() for name, p in program.model.named_parameters()}
    want = sum(4 * size // (2 if replicated.search(name) else 4) for name, size in sizes.items())
    for one in ranks:
        for now in one["dp2 tp2 zero-3"]:
            assert now["param"] == want
            assert now["state"] == 2 * want + 8 * len(sizes)
