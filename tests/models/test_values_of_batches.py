"""Models that ask for values of their batch: places of images, sizes of grids, labels, finite numbers, layer drop of 0.

They compile as they are, and equal eager PyTorch; what they asked is noted (SC128), and checked in each step.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc

Case = tuple[nn.Module, dict[str, Tensor]]
TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 16,
}
IMAGE = 63  # the token in whose places an image lies


def tokens(image: int = IMAGE) -> Tensor:
    ids = torch.arange(48).reshape(4, 12) % 50 + 4
    ids[:, 2:6] = image
    return ids


def llava() -> Case:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(**VISION, patch_size=8, projection_dim=32)
    sizes = {"image_token_index": IMAGE, "vision_feature_layer": -1}
    model = LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=LlamaConfig(**TEXT), **sizes))
    return model, {"input_ids": tokens(), "pixel_values": torch.randn(4, 3, 16, 16), "labels": tokens()}


def idefics3() -> Case:
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, LlamaConfig

    text = LlamaConfig(**TEXT, pad_token_id=0)
    sizes = {"image_token_id": IMAGE, "scale_factor": 2, "pad_token_id": 0}
    config = Idefics3Config(text_config=text, vision_config=VISION | {"patch_size": 4}, **sizes)
    model = Idefics3ForConditionalGeneration(config)
    return model, {"input_ids": tokens(), "pixel_values": torch.randn(4, 1, 3, 16, 16), "labels": tokens()}


def qwen2_vl() -> Case:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    text = TEXT | {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    patches = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, **patches}
    ids = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": IMAGE}
    model = Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision, **ids))
    found = tokens(60)
    found[:, 1], found[:, 6] = 62, IMAGE
    pixels, grid = torch.randn(64, 96), torch.tensor([[1, 4, 4]] * 4)
    kinds = found.eq(60).long()
    return model, {
        "input_ids": found,
        "pixel_values": pixels,
        "image_grid_thw": grid,
        "labels": found,
        "mm_token_type_ids": kinds,
    }


def detr() -> Case:
    from transformers import DetrConfig, DetrModel, ResNetConfig

    backbone = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    config = DetrConfig(
        use_timm_backbone=False, backbone=None, backbone_config=backbone, num_queries=5, num_labels=4, **heads, **sizes
    )
    return DetrModel(config), {"pixel_values": torch.randn(4, 3, 32, 32)}


def bart() -> Case:
    from transformers import BartConfig, BartForConditionalGeneration

    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    config = BartConfig(vocab_size=64, max_position_embeddings=32, **heads, **sizes)
    return BartForConditionalGeneration(config), {"input_ids": tokens(), "labels": tokens()}


MODELS: dict[str, tuple[Callable[[], Case], bool]] = {
    "llava": (llava, True),
    "bart": (bart, False),
    "detr": (detr, True),
    "idefics3": (idefics3, True),
    "qwen2_vl": (qwen2_vl, True),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "name", [n if n in ("llava", "bart") else pytest.param(n, marks=pytest.mark.long) for n in MODELS]
)
def test_trains_as_eager_pytorch(name: str) -> None:
    pytest.importorskip("transformers", minversion="5.24")
    torch.manual_seed(0)
    make, asks = MODELS[name]
    model, batch = make()

    def loss(output: Any, _: Any) -> Tensor:
        return output.last_hidden_state.square().mean() if name == "detr" else output.loss

    model.train()
    inputs = {key: "dp" for key in batch if key not in ("image_grid_thw", "mm_token_type_ids")}
    program = shardc.compile(model, batch, mesh="dp=2, tp=2", plan={"inputs": inputs}, loss=loss)
    assert program.verify().ok
    assert asks == any(d.code == "SC128" for d in program.diagnostics)
    output = loss(model(**batch), batch)
    assert type(output) is Tensor, "a compile leaves no fakes in caches of the library"


def test_a_causal_mask_that_is_left_out_makes_another_model() -> None:
    """PaliGemma attends both ways to a batch without padding, and one way to others, in eager PyTorch too."""
    models = pytest.importorskip("benchmarks.zoo_models")
    (entry,) = (entry for entry in models.entries() if entry.type == "paligemma")
    model, batch, _, _ = entry.ready()
    program = shardc.compile(model, batch, mesh="dp=2", plan={"inputs": {"*": "dp"}})
    report = program.verify()
    assert report.ok, report
    assert report.eager_error is not None
    assert report.eager_error < 1e-12
    padded = batch["attention_mask"].clone()
    padded[:, :2] = 0
    with pytest.raises(shardc.ShardcError, match="SC512"):
        program.launch().step(batch | {"attention_mask": padded})
    other = shardc.compile(model, batch | {"attention_mask": padded}, mesh="dp=2", plan={"inputs": {"*": "dp"}})
    assert other.verify().ok
