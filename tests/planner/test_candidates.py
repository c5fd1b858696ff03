"""Known answers come out of the graph, without a word about the model."""

import pytest
import torch

from shardc.cli.targets import load
from shardc.frontend.trace import trace
from shardc.ir.hardware import Hardware
from shardc.ir.mesh import Mesh
from shardc.planner.candidates import Candidate, candidate_plans

GPT2 = "hf:gpt2?n_embd=1024&n_head=16&n_positions=1024&seq=1024&vocab_size=50304&n_layer=2"


def candidates_of(target: str, mesh: str, **options: object) -> list[Candidate]:
    loaded = load(target)
    traced = trace(loaded.model, loaded.batch, loaded.loss)
    return candidate_plans(traced, Mesh.parse(mesh), Hardware(), **options)


@pytest.fixture(scope="module")
def gpt2() -> list[Candidate]:
    return candidates_of(GPT2, "dp=2, tp=4")


def test_gpt2_as_megatron_has_it(gpt2: list[Candidate]) -> None:
    params = gpt2[0].plan["params"]
    assert params["transformer.h.*.attn.c_attn.weight"] == "-, 3*tp"
    assert params["transformer.h.*.attn.c_proj.weight"] == "tp, -"
    assert params["transformer.h.*.mlp.c_fc.weight"] == "-, tp"
    assert params["transformer.h.*.mlp.c_proj.weight"] == "tp, -"
    assert params["transformer.wte.weight"] == "tp, -"
    assert gpt2[0].plan["inputs"] == {"input_ids": "dp, -", "labels": "dp, -"}


def test_sequence_parallelism_is_among_the_candidates(gpt2: list[Candidate]) -> None:
    assert any(c.plan.get("activations") == {"transformer.h.*": "dp, tp, -"} for c in gpt2)


def test_nothing_is_sharded_over_what_is_not_there() -> None:
    (best, *_) = candidates_of("hf:gpt2", "dp=2")
    assert set(best.plan) == {"inputs"}
    assert torch.isfinite(torch.tensor(best.seconds))
