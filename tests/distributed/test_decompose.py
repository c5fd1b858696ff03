"""Decomposed products over two gloo processes: the same step to the bit."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import decompose_worker
from tests.distributed.decompose_worker import CASES
from tests.distributed.ranks import cases_of, start
from tests.passes.test_decompose import without_bias_products


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("decompose")
    with pytest.MonkeyPatch.context() as monkeypatch:
        without_bias_products(monkeypatch)
        decompose_worker.prepare(folder, cases_of(request))
    found = start("decompose", 2, folder, limit=400, worker=Path(decompose_worker.__file__))
    return [one for one in found if one is not None]


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_a_step_is_the_same_to_the_bit(case: str, ranks: list[dict[str, Any]]) -> None:
    assert len(ranks) == 2
    for rank in ranks:
        assert rank[case]["differ"] == []
        assert rank[case]["tensors"]
        whole, decomposed = rank[case]["losses"]
        assert whole == decomposed
