"""Buckets over two gloo processes: the same step to the bit, in fewer collectives."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import bucket_worker
from tests.distributed.bucket_worker import CASES
from tests.distributed.ranks import cases_of, start


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("bucket")
    bucket_worker.prepare(folder, cases_of(request))
    found = start("bucket", 2, folder, limit=400, worker=Path(bucket_worker.__file__))
    return [one for one in found if one is not None]


@pytest.mark.slow
@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", CASES)
def test_a_step_is_the_same_to_the_bit(case: str, ranks: list[dict[str, Any]]) -> None:
    """Of two ranks the sum of each element is one addition, wherever the element lies."""
    assert len(ranks) == 2
    for rank in ranks:
        assert rank[case]["differ"] == []
        plain, bucketed = rank[case]["losses"]
        assert plain == bucketed
        before, after = rank[case]["collectives"]
        assert 2 * after <= before
