"""Generation by real processes over gloo: the library's tokens, from a cache of which each rank holds its part."""

from functools import cache
from pathlib import Path

import pytest
import torch

import shardc
from examples.gpt2 import gpt2
from tests.distributed.ranks import start
from tests.runtime.generating import LIMITS, MORE, PROMPTS, SAMPLED, library, spread
from tests.runtime.generating import alone as of_library

WORKER = Path(__file__).parent / "generation_worker.py"
LAYER = 2 * 4 * 32 * 32  # keys and values of a layer: four rows, 32 tokens, 32 wide
HELD = {"dp2tp2": LAYER // 4, "pp2tp2": 2 * LAYER // 4, "zero3": 2 * LAYER // 2}
LAYERS = {"dp2tp2": 1, "pp2tp2": 2, "zero3": 2}
RANKS = {"dp2tp2": 4, "pp2tp2": 4, "zero3": 2}


@cache
def alone(layers: int) -> list[list[int]]:
    """The tokens that one device samples."""
    model, batch = gpt2(layers=layers, batch=4, seq=8, vocab=96, width=32)
    trainer = shardc.compile(spread(model), batch, mesh="dp=1", plan={}, mode="eval").launch()
    return trainer.generate(PROMPTS, 12, **SAMPLED).sequences.tolist()


@pytest.mark.parametrize(
    "case", ["dp2tp2", *(pytest.param(case, marks=pytest.mark.long) for case in ("pp2tp2", "zero3"))]
)
def test_ranks_generate_what_the_library_does(case: str, tmp_path: Path) -> None:
    results = [result for result in start(case, RANKS[case], tmp_path, 180.0, WORKER) if result is not None]
    assert len(results) == RANKS[case]
    model, _ = gpt2(layers=LAYERS[case], batch=4, seq=8, vocab=96, width=32)
    spread(model)
    assert {str(r["before"]) for r in results} == {str(library(model, max_new_tokens=12, eos_token_id=[]).tolist())}
    model.load_state_dict(torch.load(tmp_path / "weights.0.pt"))
    assert {str(r["after"]) for r in results} == {str(library(model, max_new_tokens=12, eos_token_id=[]).tolist())}
    assert {str(r["sampled"]) for r in results} == {str(alone(LAYERS[case]))}
    assert results[0]["before"] != results[0]["after"], "two steps of training lie between them"
    assert [r["held"] for r in results] == [HELD[case]] * RANKS[case]
    assert [r["moved"] for r in results] == [[]] * RANKS[case], "a decode step writes into the cache in place"


@pytest.mark.long  # `test_agreement.py` and `test_shapes.py` name ranks that differ
def test_ranks_that_are_given_different_prompts_are_named(tmp_path: Path) -> None:
    first, second = start("differs", 2, tmp_path, 180.0, WORKER)
    assert first == second
    assert first == {"prompts": ["SC542", "prompts"], "settings": ["SC542", "settings"]}


@pytest.mark.long  # `test_generate_stream.py` shows it in a simulation
def test_prompts_join_where_their_row_is_held(tmp_path: Path) -> None:
    results = [result for result in start("streams", 4, tmp_path, 240.0, WORKER) if result is not None]
    model, batch = gpt2(batch=4, seq=8, vocab=96, width=32)
    spread(model)
    exact = [of_library(model, p, n, eos_token_id=[]) for p, n in zip(MORE, LIMITS, strict=True)]
    sampled = shardc.compile(model, batch, mesh="dp=1", plan={}, mode="eval").launch().generate(MORE, 9, **SAMPLED)
    for result in results:
        assert result["tokens"] == exact
        assert result["sampled"] == [list(row) for row in sampled.tokens]
        assert result["communicated"] == [], "keys and values lie where they were made"
        assert result["said"][0] == "SC542"
        assert "rank 1 was given another batch" in result["said"][1]
        whole = [2 * 2 * -(-rows // 2) * 2 * length * 32 for rows, length in result["forms"]]
        assert result["held"] == [size // 4 for size in whole]
