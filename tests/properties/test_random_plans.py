"""Real models, unmodified, trained or evaluated, under random plans on random meshes: traced once, distributed anew for
every example."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, event, given, note, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shardc.api import complete_inputs, model_state
from shardc.compiler import driver
from shardc.compiler.pass_pipeline import Options
from shardc.frontend.evaluation_mode import evaluating
from shardc.frontend.trace import trace
from shardc.ir.graph import Graph, type_of
from shardc.ir.mesh import Mesh
from tests.decoder import DECODER
from tests.properties.check import Refused, check, compiled
from tests.properties.plans import Shapes, meshes, plans

pytest.importorskip("transformers")

EXAMPLES = max(3, settings().max_examples // 5)
Model = tuple[nn.Module, dict[str, Tensor]]
Case = tuple[str, bool, Mesh, dict[str, dict[str, str]]]


def gpt2() -> Model:
    """Tied embeddings, fused queries, keys and values, three heads, dropout, an odd vocabulary."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, n_head=3, n_embd=12, n_positions=8, vocab_size=11, use_cache=False)
    tokens = torch.randint(11, (4, 5))
    return GPT2LMHeadModel(config).train(), {"input_ids": tokens, "labels": tokens}


def llama() -> Model:
    """Four heads on two of keys and values, rotary positions, gated MLP."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 20, "vocab_size": 13}
    tokens = torch.randint(13, (3, 6))
    return LlamaForCausalLM(LlamaConfig(**(DECODER | sizes))), {"input_ids": tokens, "labels": tokens}


def bert() -> Model:
    """Bidirectional attention under a mask, with padding in the batch."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        num_hidden_layers=1,
        num_attention_heads=2,
        hidden_size=8,
        intermediate_size=12,
        max_position_embeddings=8,
        vocab_size=17,
    )
    tokens = torch.randint(17, (3, 5))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
    return BertForMaskedLM(config).train(), {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def resnet() -> Model:
    """Convolutions, batch norms whose statistics every step updates, pools."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        num_channels=3, embedding_size=4, hidden_sizes=[6, 8], depths=[1, 1], layer_type="basic", num_labels=5
    )
    batch = {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.randint(5, (4,))}
    return ResNetForImageClassification(config).train(), batch


MODELS = {made.__name__: made for made in (gpt2, llama, bert, resnet)}


class Prepared(NamedTuple):
    reference: Graph
    inputs: dict[str, Tensor]
    shapes: Shapes


@cache
def prepared(name: str, evaluates: bool) -> Prepared:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, batch = MODELS[name]()
    with evaluating(model, on=evaluates):
        traced = trace(model, batch, with_outputs=evaluates, forward_only=evaluates)
    reference = driver.single_device(traced, Mesh(), Options())
    given: dict[str, Any] = {**traced.constants, **model_state(model), **batch}
    ports = list(zip(reference.inputs, reference.placeholders, strict=True))
    shapes = {
        "params": {port.name: type_of(node).shape for port, node in ports if port.role == "param"},
        "inputs": {port.name: type_of(node).shape for port, node in ports if port.role == "input"},
        "activations": {fqn: type_of(node).shape for fqn, node in reference.activations.items() if fqn},
    }
    return Prepared(reference, complete_inputs(reference, given, seed=3), shapes)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    name, evaluates, mesh = draw(st.sampled_from(list(MODELS))), draw(st.booleans()), draw(meshes)
    return name, evaluates, mesh, draw(plans(prepared(name, evaluates).shapes, mesh))


@pytest.mark.slow
@given(cases())
@settings(
    max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink], deadline=None
)
def test_a_model_under_a_random_plan_equals_the_single_device(case: Case) -> None:
    name, evaluates, mesh, plan = case
    note(f"{name}, {'evaluated' if evaluates else 'trained'}\nmesh {mesh}\nplan {plan}")
    reference, inputs, _ = prepared(name, evaluates)
    body = compiled(reference, plan, mesh)
    if isinstance(body, Refused):
        event(f"refused: {', '.join(sorted(set(body.codes)))}")
        assume(False)
        return
    event(f"{name}, {'evaluated' if evaluates else 'trained'}")
    check(body, reference, inputs)
