"""Known answers come out of the graph, without a word about the model.

Sizes are those of real models, on the meta device, with two layers; nothing is computed.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardc.cli.targets import load
from shardc.frontend.trace import trace
from shardc.frontend.traced import Traced
from shardc.ir.hardware import Hardware
from shardc.ir.mesh import Mesh
from shardc.plan.schema import Plan
from shardc.planner.candidates import Candidate, candidate_plans

GPT2 = "hf:gpt2?n_embd=1024&n_head=16&n_positions=1024&seq=1024&n_layer=2&vocab_size=50304"
ODD_GPT2 = GPT2.replace("50304", "50257")
LLAMA = (
    "hf:llama?hidden_size=4096&num_attention_heads=32&num_key_value_heads=8&head_dim=128&intermediate_size=14336"
    "&vocab_size=128256&max_position_embeddings=8192&seq=4096&batch=2&num_hidden_layers=2"
)
FEW_KEYS = LLAMA.replace("num_key_value_heads=8", "num_key_value_heads=2")
BERT = (
    "hf:bert?hidden_size=2560&num_attention_heads=40&intermediate_size=10240&vocab_size=30522"
    "&max_position_embeddings=512&seq=512&batch=16&num_hidden_layers=2"
)
T5 = (
    "hf:t5?d_model=1024&num_heads=16&d_kv=64&d_ff=4096&vocab_size=32128&seq=1024&batch=4&num_layers=2"
    "&num_decoder_layers=2"
)
VIT = (
    "hf:vit?hidden_size=1024&num_attention_heads=16&intermediate_size=4096&image_size=224&patch_size=16&batch=16"
    "&num_hidden_layers=2"
)
MIXTRAL = (
    "hf:mixtral?hidden_size=1024&num_attention_heads=16&num_key_value_heads=4&head_dim=64&intermediate_size=3584"
    "&vocab_size=32000&max_position_embeddings=2048&seq=2048&batch=4&num_hidden_layers=2"
)


class MixerBlock(nn.Module):
    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.t1, self.t2 = nn.Linear(patches, 512), nn.Linear(512, patches)
        self.c1, self.c2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.t2(F.gelu(self.t1(self.n1(x).transpose(1, 2)))).transpose(1, 2)
        return x + self.c2(F.gelu(self.c1(self.n2(x))))


class Mixer(nn.Module):
    """An MLP-Mixer whose layers are no list."""

    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 16, 16)
        self.first, self.second = MixerBlock(196, width), MixerBlock(196, width)
        self.head = nn.Linear(width, 1000)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.second(self.first(self.patch(images).flatten(2).transpose(1, 2)))
        return F.cross_entropy(self.head(x.mean(1)), labels)


def block(inner: int, outer: int) -> nn.Sequential:
    parts = [nn.Conv2d(inner, outer, 3, padding=1), nn.GroupNorm(8, outer), nn.ReLU()]
    return nn.Sequential(*parts, nn.Conv2d(outer, outer, 3, padding=1), nn.GroupNorm(8, outer), nn.ReLU())


class UNet(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.down1, self.down2, self.low = block(3, width), block(width, 2 * width), block(2 * width, 4 * width)
        self.up2, self.up1, self.out = block(6 * width, 2 * width), block(3 * width, width), nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.low(F.max_pool2d(b, 2))
        b = self.up2(torch.cat([F.interpolate(c, scale_factor=2.0), b], 1))
        a = self.up1(torch.cat([F.interpolate(b, scale_factor=2.0), a], 1))
        return (self.out(a) - x).square().mean()


def resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(depths=[1, 1, 2, 1], num_labels=1000))


def images(count: int, size: int) -> Tensor:
    return torch.empty(count, 3, size, size, device="meta")


@lru_cache(maxsize=16)
def traced_target(target: str) -> Traced:
    classes = torch.empty(64, dtype=torch.long, device="meta")
    with torch.device("meta"):
        if target == "mixer":
            return trace(Mixer(), (images(64, 224), classes), None)
        if target == "unet":
            return trace(UNet(), (images(16, 128),), None)
        if target == "resnet":
            return trace(resnet(), {"pixel_values": images(64, 224), "labels": classes}, None)
    loaded = load(target)
    return trace(loaded.model, loaded.batch, loaded.loss)


FLOAT32 = Hardware(fp32_flops_per_second=6e13)  # of products without tensor cores


@lru_cache(maxsize=32)
def candidates_of(target: str, mesh: str, hardware: Hardware = FLOAT32) -> list[Candidate]:
    return candidate_plans(traced_target(target), Mesh.parse(mesh), hardware, top=9)


def params_of(target: str, mesh: str) -> Mapping[str, str]:
    return candidates_of(target, mesh)[0].plan.get("params", {})


def by_end(params: Mapping[str, str], **ends: str) -> None:
    for end, text in ends.items():
        matching = {name: p for name, p in params.items() if name.endswith((f"{end}.weight", end))}
        assert matching, f"{end} is not in {params}"
        assert set(matching.values()) == {text}, matching


@pytest.mark.parametrize("target", [GPT2, ODD_GPT2])
def test_gpt2_as_megatron_has_it(target: str) -> None:
    """A vocabulary that does not divide by four is padded: that costs less than tables on every rank."""
    params = params_of(target, "dp=2, tp=4")
    assert params["transformer.h.*.attn.c_attn.weight"] == "-, 3*tp"
    assert params["transformer.h.*.attn.c_proj.weight"] == "tp, -"
    assert params["transformer.h.*.mlp.c_fc.weight"] == "-, tp"
    assert params["transformer.h.*.mlp.c_proj.weight"] == "tp, -"
    assert params["transformer.wte.weight"] == "tp, -"
    assert candidates_of(target, "dp=2, tp=4")[0].plan["inputs"] == {"input_ids": "dp, -", "labels": "dp, -"}


@pytest.mark.parametrize(
    ("target", "tp"),
    [(FEW_KEYS, 8), pytest.param(LLAMA, 8, marks=pytest.mark.long), pytest.param(LLAMA, 4, marks=pytest.mark.long)],
)
def test_llama_as_megatron_has_it(target: str, tp: int) -> None:
    best = candidates_of(target, f"dp=2, tp={tp}")[0].plan
    columns = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"]
    by_end(best["params"], **dict.fromkeys(columns, "tp, -"), **dict.fromkeys(["o_proj", "down_proj"], "-, tp"))
    assert best["activations"] == {"model.layers.*": "dp, tp, -"}, "sequence parallelism"


@pytest.mark.long
def test_bert_as_megatron_has_it() -> None:
    best = candidates_of(BERT, "dp=2, tp=4")[0].plan
    columns = ["query", "key", "value", "intermediate.dense", "word_embeddings"]
    by_end(best["params"], **dict.fromkeys(columns, "tp, -"), **{"attention.output.dense": "-, tp"})
    assert best["params"]["bert.encoder.layer.*.output.dense.weight"] == "-, tp"
    assert best["activations"] == {"bert.encoder.layer.*": "dp, tp, -"}


@pytest.mark.long
def test_t5_as_megatron_has_it() -> None:
    best = candidates_of(T5, "dp=2, tp=4")[0].plan
    columns = ["Attention.q", "Attention.k", "Attention.v", "wi", "shared"]
    by_end(best["params"], **dict.fromkeys(columns, "tp, -"), **dict.fromkeys(["Attention.o", "wo"], "-, tp"))
    assert best["activations"] == {"encoder.block.*": "dp, tp, -", "decoder.block.*": "dp, tp, -"}


def test_vit_as_megatron_has_it() -> None:
    params = params_of(VIT, "dp=2, tp=4")
    columns = ["q_proj", "k_proj", "v_proj", "fc1"]
    by_end(params, **dict.fromkeys(columns, "tp, -"), **dict.fromkeys(["o_proj", "fc2"], "-, tp"))


def test_experts_lie_over_their_axis_and_divide_the_width_over_tp() -> None:
    best = candidates_of(MIXTRAL, "dp=2, ep=2, tp=2")[0].plan
    assert best["params"]["model.layers.*.mlp.experts.gate_up_proj"] == "ep, 2*tp, -"
    assert best["params"]["model.layers.*.mlp.experts.down_proj"] == "ep, -, tp"
    by_end(best["params"], q_proj="tp, -", o_proj="-, tp", embed_tokens="tp, -", lm_head="tp, -")
    assert best["inputs"] == {"input_ids": "dp.ep, -", "labels": "dp.ep, -"}


def test_positions_lie_over_the_axis_of_the_sequence() -> None:
    best = candidates_of(LLAMA, "dp=2, cp=2, tp=2")[0].plan
    assert best["inputs"] == {"input_ids": "dp, cp", "labels": "dp, cp"}
    by_end(best["params"], q_proj="tp, -", o_proj="-, tp")


def test_a_mixer_divides_its_wide_layers_as_an_mlp() -> None:
    params = params_of("mixer", "dp=2, tp=4")
    assert params["first.c1.weight"] == params["second.c1.weight"] == "tp, -"
    assert params["first.c2.weight"] == params["second.c2.weight"] == "-, tp"


@pytest.mark.parametrize("target", [pytest.param("resnet", marks=pytest.mark.long), "unet", "mixer"])
def test_images_are_divided_where_there_is_a_choice(target: str) -> None:
    """Data parallelism is faster than any division of so small weights."""
    data, tensor = candidates_of(target, "dp=8")[0], candidates_of(target, "tp=8")[0]
    assert list(data.plan) == ["inputs"]
    assert data.seconds < tensor.seconds


@pytest.mark.parametrize("target", [pytest.param("resnet", marks=pytest.mark.long), "unet"])
def test_channels_or_places_are_divided_where_tp_alone_is_offered(target: str) -> None:
    every = candidates_of(target, "tp=4")
    best = every[0].plan
    assert best.get("params") or best.get("inputs"), [c.plan for c in every]


def test_nothing_is_sharded_over_what_is_not_there() -> None:
    (best,) = candidates_of("hf:gpt2", "dp=2")
    assert set(best.plan) == {"inputs"}
    assert best.seconds > 0


# ---------------------------------------------------------------------- what the user has said
def pinned(target: str, mesh: str, **plan: Any) -> list[Candidate]:
    return candidate_plans(traced_target(target), Mesh.parse(mesh), Hardware(), pinned=Plan.of(**plan), top=9)


def test_what_the_user_places_is_kept_and_the_rest_follows() -> None:
    """Rows first, against the common way: the other matrix takes columns of what is then sharded."""
    for candidate in pinned(GPT2, "tp=4", params={"**.mlp.c_fc.weight": "-, -"}):
        params = candidate.plan["params"]
        assert not any("c_fc" in name for name in params), "the user's own line says it"
        assert "transformer.h.*.mlp.c_proj.weight" not in params or "tp" in params["transformer.h.*.mlp.c_proj.weight"]
        assert params["transformer.h.*.attn.c_attn.weight"] == "-, 3*tp"


def test_an_activation_of_the_users_is_a_condition() -> None:
    for candidate in pinned(LLAMA, "tp=8", activations={"model.layers.*": "-, -, -"}):
        assert "activations" not in candidate.plan


def test_memory_that_is_not_enough_puts_a_candidate_last() -> None:
    every = candidates_of(LLAMA, "dp=2, tp=8")
    least = min(c.bytes for c in every)
    ranked = candidate_plans(traced_target(LLAMA), Mesh.parse("dp=2, tp=8"), Hardware(), memory=least, top=9)
    fits = [c.bytes <= least for c in ranked]
    assert fits == sorted(fits, reverse=True)
    assert fits[0]
    assert not fits[-1]
