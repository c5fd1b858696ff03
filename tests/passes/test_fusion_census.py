"""Real graphs' kernels and bytes, beside Inductor's for the same graphs."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.fusion_census import body_of, census, inductor

BEST = ((True, False),)  # of language models: by the rule of GPUs, the graph as it is


@pytest.mark.long
def test_fewer_bytes_than_inductor() -> None:
    inductor([body_of("gpt2", 1, True)], BEST)
    for model in ("gpt2", "llama"):
        row: dict[str, Any] = census(model, toy=True, ways=BEST)
        ours, theirs = row["shardc"], row["inductor"]
        assert 0 < ours["MB"] < theirs["MB"] < row["unfused"]["MB"], model
        assert 0 < ours["layer MB"] < theirs["layer MB"], model
        assert ours["kernels"] <= theirs["kernels"], model
