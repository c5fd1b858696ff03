"""A batch for each model of the zoo: tensors that its forward takes by name, with labels if it takes any.

batch_of(entry, model)       {"input_ids": ..., "pixel_values": ..., "labels": ...}
loss_of(output, batch)       the model's own loss, or the mean square of what it returns
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from benchmarks.zoo_sizes import IMAGE, LENGTH, ROWS


class Named(Protocol):
    @property
    def kind(self) -> str: ...
    @property
    def model_class(self) -> str: ...


def batch_of(entry: Named, model: nn.Module, *, masks: bool = False, labels: bool = True) -> dict[str, Tensor]:
    """What the model's forward takes; `masks` adds a mask of ones. Raises ValueError where nothing is known for it."""
    takes = inspect.signature(model.forward).parameters
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    generator = torch.Generator().manual_seed(1)
    vocab = min(getattr(text, "vocab_size", None) or 96, 96)
    first = 72 if vocab > 80 else vocab // 2  # ids of images and the like are below
    tokens = torch.randint(first, vocab, (ROWS, LENGTH), generator=generator) if vocab >= 16 else None
    batch: dict[str, Tensor] = {}
    if entry.kind in ("vision", "multimodal"):
        batch |= images(model, takes, generator, entry)
    if entry.kind == "audio":
        batch |= sound(config, takes, generator)
    is_encoder = "input_features" in batch or "input_values" in batch
    is_encoder &= not (hasattr(model, "get_audio_features") or "LM" in entry.model_class)
    if "input_ids" in takes and tokens is not None and not is_encoder:
        marks = placeholders(model, config, batch)
        batch["input_ids"] = tokens if marks is None else torch.cat([marks, tokens], 1)
        if entry.kind == "multimodal" and "attention_mask" in takes:
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    elif "decoder_input_ids" in takes and "labels" not in takes and tokens is not None:
        batch["decoder_input_ids"] = tokens
    for name, tensor in extras(config, batch, generator).items():
        if name in takes:
            batch[name] = tensor
    if not batch:
        raise ValueError(f"no batch is known for forward({', '.join(takes)})")
    if masks and "attention_mask" in takes:
        whole = batch.get("input_ids", batch.get("input_features", batch.get("input_values")))
        assert whole is not None
        batch["attention_mask"] = torch.ones(whole.shape[:2], dtype=torch.long)
    if labels and "labels" in takes and (truth := labels_of(entry, config, batch, tokens, generator)) is not None:
        batch["labels"] = truth.clone()  # forward may write to its inputs
    return batch


def labels_of(
    entry: Named, config: Any, batch: dict[str, Tensor], tokens: Tensor | None, generator: torch.Generator
) -> Tensor | None:
    if "ForConditionalGeneration" in entry.model_class and entry.kind == "audio":
        return batch.get("input_ids", tokens)
    if "ForSpeechToText" in entry.model_class or "EncoderDecoder" in entry.model_class:
        return tokens
    if "ForCTC" in entry.model_class:
        return None if tokens is None else tokens[:, :4]
    if "QuestionAnswering" in entry.model_class and "pixel_values" in batch:
        return torch.rand(ROWS, config.num_labels, generator=generator)
    if "Classification" in entry.model_class:
        return torch.randint(0, 2, (ROWS,), generator=generator)
    return batch.get("input_ids", tokens) if entry.kind != "vision" else None


def extras(config: Any, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Tensors besides tokens, images and sound that single models ask for, by the names they have for them."""
    length = batch["input_ids"].shape[1] if "input_ids" in batch else LENGTH
    made: dict[str, Tensor] = {"qformer_input_ids": torch.randint(3, 90, (ROWS, 8), generator=generator)}
    if "pixel_values" in batch and "input_ids" in batch and image_token(config) is not None:
        made["mm_token_type_ids"] = (batch["input_ids"] == image_token(config)).long()
    if "layout" in str(getattr(config, "model_type", "")) or hasattr(config, "max_2d_position_embeddings"):
        made["bbox"] = torch.tensor([1, 2, 5, 7]).expand(ROWS, length, 4).contiguous()
    if "input_features" in batch:
        frames = batch["input_features"].shape[-1 if "oxtral" in type(config).__name__ else 1]
        made["input_features_mask"] = torch.ones(ROWS, frames, dtype=torch.long)
    if hasattr(getattr(config, "vision_config", None), "max_num_tiles"):
        tiles = config.vision_config.max_num_tiles
        made["aspect_ratio_ids"] = torch.ones(ROWS, 1, dtype=torch.long)
        made["aspect_ratio_mask"] = torch.ones(ROWS, 1, tiles, dtype=torch.long)
        made["cross_attention_mask"] = torch.ones(ROWS, length, 1, tiles, dtype=torch.long)
    if hasattr(config, "latent_query_num"):
        made["image_embeds_position_mask"] = (
            (torch.arange(length) < config.latent_query_num).expand(ROWS, length).long()
        )
    if "pixel_values" in batch and batch["pixel_values"].ndim == 5:
        made["image_attention_mask"] = torch.ones(ROWS, length, batch["pixel_values"].shape[1], dtype=torch.long)
    if hasattr(config, "max_state_dim"):
        made["state"] = torch.randn(ROWS, config.max_state_dim, generator=generator)
    return made


# ------------------------------------------------------------------------------------------------------------- images
def images(model: nn.Module, takes: Mapping[str, Any], generator: torch.Generator, entry: Named) -> dict[str, Tensor]:
    """Pixels, in the form that forward has for them: pictures, tiles of a picture, frames, or rows of patches."""
    config: Any = model.config
    if getattr(config, "vision_config", config) is None:
        return {}  # without one, the model is of text alone
    vision = part(config, "vision_config", "vision_tower_config", "image_config", "encoder")
    size = getattr(vision, "image_size", None) or IMAGE
    height, width = (size, size) if isinstance(size, int) else tuple(size)[:2]
    channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3
    channels = channels if isinstance(channels, int) else 3
    patch = getattr(vision, "patch_size", 8)
    patch = patch if isinstance(patch, int) else tuple(patch)[-1]

    def random(*shape: int) -> Tensor:
        return torch.randn(ROWS, *shape, generator=generator)

    side = 4 if height // patch < 1 else height // patch
    inside: dict[str, inspect.Parameter] = {}
    for holder in (getattr(model, "model", None), model):
        if (method := getattr(holder, "get_image_features", None)) is not None:
            inside |= inspect.signature(method).parameters
    asks = {**inside, **takes}
    grid = next((name for name in ("image_grid_thw", "grid_thw", "image_grid_hws") if name in asks), None)
    if "pixel_values_videos" in takes and "pixel_values" not in takes:
        frames = next((getattr(vision, n) for n in ("num_frames", "frames_per_clip") if hasattr(vision, n)), 4)
        return {"pixel_values_videos": random(frames, channels, height, width)}
    if "flattened_patches" in takes:
        row = torch.arange(16)
        places = torch.stack([row // 4 + 1, row % 4 + 1], 1).float().expand(ROWS, 16, 2)
        return {"flattened_patches": torch.cat([places, random(16, channels * patch * patch)], 2)}
    if "pixel_values" not in takes:
        return {}
    if grid is not None:
        merge = getattr(vision, "spatial_merge_size", None) or getattr(vision, "merge_size", None) or 2
        count = merge * 2
        depth = getattr(vision, "temporal_patch_size", 1) or 1
        flat = torch.randn(ROWS * count * count, channels * depth * patch * patch, generator=generator)
        if any(word in entry.model_class for word in ("Kimi", "PaddleOCR")):
            flat = flat.reshape(-1, channels, patch, patch)
        made = {"pixel_values": flat, grid: torch.tensor([[1, count, count]] * ROWS)}
        if "image_merge_sizes" in asks:
            made["image_merge_sizes"] = torch.full((ROWS,), merge)
        return made
    if "spatial_shapes" in asks:
        shape = torch.tensor([[side, side]] * ROWS)
        mask = torch.ones(ROWS, side * side, dtype=torch.long)
        made = {"pixel_values": random(side * side, channels * patch * patch), "spatial_shapes": shape}
        return made | {name: mask for name in ("pixel_attention_mask",) if name in asks}
    if "aspect_ratio_ids" in takes:
        return {"pixel_values": random(1, getattr(vision, "max_num_tiles", 4), channels, height, width)}
    tiled = "LlavaNext" in entry.model_class or "LlavaOnevision" in entry.model_class or "Idefics" in entry.model_class
    tiled |= entry.model_class in ("InstructBlipVideoForConditionalGeneration",)
    if tiled or "SmolVLM" in entry.model_class or "Granite4Vision" in entry.model_class:
        tiles = 1 if "Idefics" in entry.model_class or "SmolVLM" in entry.model_class else 2
        made = {"pixel_values": random(tiles, channels, height, width)}
    elif "Video" in entry.model_class and entry.kind == "vision":
        made = {"pixel_values": random(getattr(vision, "num_frames", 8), channels, height, width)}
    else:
        made = {"pixel_values": random(channels, height, width)}
    if "image_sizes" in inside and inside["image_sizes"].default is inspect.Parameter.empty:
        made["image_sizes"] = torch.tensor([[height, width]] * ROWS)
    if "high_res_pixel_values" in takes:
        high: Any = part(config, "high_res_vision_config")
        made["high_res_pixel_values"] = random(3, high.image_size, high.image_size)
    return made


def part(config: Any, *names: str) -> Any:
    """The first of a configuration's parts that is there, or the configuration."""
    for name in names:
        if getattr(config, name, None) is not None and not isinstance(getattr(config, name), (dict, int, str)):
            inner = getattr(config, name)
            return part(inner, *names)
    return config


def image_token(config: Any) -> int | None:
    return getattr(config, "image_token_id", None) or getattr(config, "image_token_index", None)


def placeholders(model: nn.Module, config: Any, batch: dict[str, Tensor]) -> Tensor | None:
    """As many tokens of an image or sound as the model makes of it, for those that put these into the text."""
    holder: Any = model if hasattr(model, "get_image_features") else getattr(model, "model", model)
    source, method = "pixel_values", getattr(holder, "get_image_features", None)
    token = image_token(config)
    if source not in batch:
        source = "input_features" if "input_features" in batch else "input_values"
        method = getattr(model, "get_audio_features", None)
        token = getattr(config, "audio_token_id", None) or getattr(config, "audio_token_index", None)
    if token is None or source not in batch or method is None:
        return None
    asks = inspect.signature(method).parameters
    known = extras(config, batch, torch.Generator()) | batch
    given = {name: value for name, value in known.items() if name in asks or name == source}
    with torch.no_grad():
        features = method(**given)
    if not isinstance(features, (Tensor, list, tuple)):
        pooled = getattr(features, "pooler_output", None)
        features = features.last_hidden_state if pooled is None else pooled
    rows = list(features) if not isinstance(features, Tensor) else features.flatten(0, -2)
    count = len(rows) if isinstance(rows, Tensor) else sum(math.prod(row.shape[:-1]) for row in rows)
    return torch.full((ROWS, count // ROWS), token)


# -------------------------------------------------------------------------------------------------------------- sound
def sound(config: Any, takes: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """A spectrogram or a wave, by the name that forward has for it."""
    encoder = part(config, "encoder_config", "audio_config", "encoder")
    bins = getattr(encoder, "num_mel_bins", None) or getattr(encoder, "input_feat_per_channel", None)
    bins = bins or getattr(encoder, "feature_projection_input_dim", None) or getattr(encoder, "input_dim", None) or 8
    if "input_features" in takes and not hasattr(encoder, "conv_dim"):
        frames = 2 * getattr(encoder, "max_source_positions", 32)
        is_whisper = any(name in type(encoder).__name__ for name in ("Whisper", "Qwen2Audio", "Voxtral"))
        shape = (ROWS, bins, frames) if is_whisper else (ROWS, frames, bins)
        made = {"input_features": torch.randn(shape, generator=generator)}
    elif "input_values" in takes and hasattr(config, "max_length") and hasattr(config, "frequency_stride"):
        made = {"input_values": torch.randn(ROWS, config.max_length, bins, generator=generator)}
    elif "input_values" in takes:
        made = {"input_values": torch.randn(ROWS, 4000, generator=generator)}
    else:
        return {}
    return made


def loss_of(output: Any, _: Any) -> Tensor:
    """The model's own loss, or the mean square of the first tensor that it returns."""
    loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss.square().mean() if loss is output else loss.mean()
    for value in output.values() if hasattr(output, "values") else output:
        if isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad:
            return value.square().mean()
    raise ValueError("the model returns nothing that has a gradient")
