"""Small models of every type of the installed `transformers`, with a batch for each: what `zoo.py` compiles.

    entries()                    masked/bert, causal/llama, vision/vit, ...: each model type once
    entry.build()                the model, from its own configuration with small sizes; nothing is downloaded
    entry.ready()                the model, a batch, and what a step of it gave: of the first variant that trains

A configuration says how large a model is under some three hundred names. `zoo_sizes.py` has those that libraries use;
what is not in it keeps its default. A variant is a rule that some configurations need and others do not take: sizes
that are None are given, there are as many heads of keys as of queries, images are larger.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from benchmarks.zoo_batches import batch_of, loss_of
from benchmarks.zoo_sizes import BY_TYPE, DROP, SIZES

# A kind, and the library's tables for it. A type that several have is of the first.
KINDS: dict[str, tuple[str, ...]] = {
    "audio": ("SPEECH_SEQ_2_SEQ", "CTC", "AUDIO_CLASSIFICATION"),
    "multimodal": (
        "IMAGE_TEXT_TO_TEXT",
        "ZERO_SHOT_IMAGE_CLASSIFICATION",
        "MULTIMODAL_LM",
        "VISUAL_QUESTION_ANSWERING",
    ),
    "seq2seq": ("SEQ_TO_SEQ_CAUSAL_LM",),
    "masked": ("MASKED_LM",),
    "causal": ("CAUSAL_LM",),
    "vision": (
        *("IMAGE_CLASSIFICATION", "SEMANTIC_SEGMENTATION", "OBJECT_DETECTION", "MASKED_IMAGE_MODELING"),
        *("VIDEO_CLASSIFICATION", "DEPTH_ESTIMATION", "UNIVERSAL_SEGMENTATION"),
    ),
}
DERIVED = (
    *("layer_types", "mlp_layer_types", "layers_block_type", "mlp_only_layers", "no_rope_layers", "stage_names"),
    *("id2label", "label2id", "transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype"),
)
OFF = ("dropout", "drop", "layerdrop", "jitter", "mask_time_prob", "mask_feature_prob")
LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "encoder_layers")


class Variant(NamedTuple):
    """A rule that some configurations need, on top of their small sizes."""

    attention: str = "sdpa"
    fill: bool = False
    """Sizes that are None are given too."""
    heads_of_keys: bool = False
    """As many as of queries."""
    image: int = 32
    kinds: bool = False
    """A layer of each kind that the configuration lists, and not the first two of its default."""
    mrope: bool = False
    """Positions of three axes, whose default sections do not fit a small head."""
    masks: bool = False
    """The batch has a mask of ones."""
    labels: bool = True
    """The batch has labels."""


VARIANTS = (
    Variant(kinds=True),
    Variant("eager", kinds=True),
    Variant(),
    Variant("eager"),
    Variant("eager", fill=True),
    Variant("eager", heads_of_keys=True),
    Variant("eager", fill=True, heads_of_keys=True),
    Variant("eager", masks=True, kinds=True),
    Variant("eager", kinds=True, labels=False),
    Variant("eager", kinds=True, mrope=True),
    Variant("eager", image=64),
    Variant("eager", image=224),
)


class Ready(NamedTuple):
    model: nn.Module
    batch: dict[str, torch.Tensor]
    has_loss: bool
    """The model's output has a scalar loss of its own."""
    variant: Variant
    """Of which it was built."""


class NotReadyError(Exception):
    """No variant of a model trains. `stage` is what the first one stopped at: "not built" or "not trained"."""

    def __init__(self, stage: str, cause: Exception) -> None:
        super().__init__(str(cause))
        self.stage, self.cause = stage, cause
        self.later: list[Exception] = []


@dataclass(frozen=True)
class Entry:
    """One model type: its kind, and the class that has a head of this kind."""

    kind: str
    type: str
    model_class: str

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.type}"

    def build(self, variant: Variant = VARIANTS[0]) -> nn.Module:
        torch.manual_seed(0)
        model_class: Any = getattr(transformers, self.model_class)
        config_class: Any = getattr(transformers, CONFIG_MAPPING_NAMES[self.type])
        own = getattr(model_class, "config_class", None)
        if own is not None and own is not config_class and not issubclass(own, config_class):
            config_class = own  # a decoder of a model that has a configuration of several parts
        default = config_class()
        if getattr(default, "use_timm_backbone", False):
            default = config_class(use_timm_backbone=False, backbone_config=transformers.ResNetConfig())
        config = config_class(**shrunk(default.to_dict(), variant))
        config.use_cache = False
        if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
        has_sdpa = variant.attention == "sdpa" and getattr(model_class, "_supports_sdpa", False)
        config._attn_implementation = "sdpa" if has_sdpa else "eager"
        return model_class(config).train()

    def ready(self) -> Ready:
        """What trains one step eagerly. Raises NotReadyError with the furthest variant's error where none does."""
        first: NotReadyError | None = None
        for variant in VARIANTS:
            stage = "not built"
            try:
                model = self.build(variant)
                stage = "not trained"
                batch = batch_of(self, model, masks=variant.masks, labels=variant.labels)
                output = model(**batch)
                loss_of(output, batch).backward()
            except Exception as error:  # of the library: a small configuration or a batch that it does not take
                if first is None or (first.stage, stage) == ("not built", "not trained"):
                    first = NotReadyError(stage, error)
                first.later.append(error)
                if isinstance(error, ImportError):
                    break
                continue
            model.zero_grad()
            loss = getattr(output, "loss", None)
            return Ready(model, batch, isinstance(loss, torch.Tensor) and loss.ndim == 0, variant)
        assert first is not None
        raise first


def entries() -> list[Entry]:
    """Every model type, in an order that spreads kinds over shards."""
    found: dict[str, Entry] = {}
    classes = set(dir(transformers))  # `hasattr` would import the module of each
    for kind, tables in KINDS.items():
        for table in tables:
            for type, names in getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES").items():
                name = names if isinstance(names, str) else names[0]
                if type in CONFIG_MAPPING_NAMES and name in classes:
                    found.setdefault(type, Entry(kind, type, name))
    return sorted(found.values(), key=lambda entry: entry.type)


def shrunk(config: Mapping[str, Any], variant: Variant = VARIANTS[0]) -> dict[str, Any]:
    """A configuration with small sizes, and those inside it."""
    layers = {value for key, value in config.items() if key in LAYERS and isinstance(value, int)}
    kept = kept_layers(config, layers) if variant.kinds else []
    small = {
        key: smaller(key, value, layers, variant)
        for key, value in config.items()
        if key not in DERIVED and key != "model_type"
    }
    for key, value in config.items():
        if kept and key in LAYERS and value in layers:
            small[key] = len(kept)
        elif kept and isinstance(value, (list, tuple)) and len(value) in layers and len(value) > 4:
            small[key] = [smaller(key, value[index], set(), variant) for index in kept]
    if "num_hidden_layers" in small and "depths" not in small and (stages := small.get("out_indices")):
        small["num_hidden_layers"] = max(2, len(stages))  # a backbone of one width: a stage is a layer
        small["out_indices"] = list(range(1, 1 + len(stages)))
    if "depths" not in small:
        small.pop("out_features", None)
    if ("kv_lora_rank" in small and small.get("num_key_value_heads")) or variant.heads_of_keys:
        small["num_key_value_heads"] = small.get("num_attention_heads")  # keys of all heads come of one latent
        if small["num_key_value_heads"] is None:
            del small["num_key_value_heads"]
    if {"expand", "num_heads", "head_dim", "hidden_size"} <= small.keys():
        small["num_heads"] = small["hidden_size"] * small["expand"] // small["head_dim"]
    for place, value in BY_TYPE.get(config.get("model_type", ""), {}).items():
        *outer, key = place.split(".")
        part = small
        for name in outer:
            part = part.get(name, {})
        if value is DROP:
            part.pop(key, None)
        else:
            part[key] = value
    return small


def kept_layers(config: Mapping[str, Any], layers: set[int]) -> list[int]:
    """A layer of each kind, two at least; none where layers are all of one kind."""
    kinds = [v for k, v in config.items() if k in DERIVED and isinstance(v, (list, tuple)) and len(v) in layers]
    of = list(zip(*kinds, strict=False))
    first = sorted(of.index(kind) for kind in dict.fromkeys(of))[:4]
    return first if len(first) > 1 else []


def smaller(key: str, value: Any, layers: set[int], variant: Variant) -> Any:
    """One value of a configuration."""
    if key == "per_layer_config" and isinstance(value, Mapping):  # what single layers have, by their index
        return {1: dict(smaller("", next(iter(value.values())), layers, variant))} if value else {}
    if isinstance(value, Mapping) and "model_type" in value:
        return shrunk(value, variant) | {"model_type": value["model_type"]}
    if key == "rope_parameters" and variant.mrope and isinstance(value, Mapping):
        value = {**value, "mrope_section": [2, 1, 1]}
    if isinstance(value, Mapping):
        return {k: smaller(str(k), v, layers, variant) for k, v in value.items()} if key != "backbone_kwargs" else value
    if key == "rope_theta" and value is None:
        return 10000.0
    if value is None:
        return SIZES.get(key) if variant.fill else None
    if isinstance(value, bool):
        return value
    if isinstance(value, float):
        return 0.0 if any(word in key for word in OFF) else value
    if isinstance(value, int):
        if key in ("image_size", "img_size"):
            return min(variant.image, value)
        if key in SIZES:
            return min(SIZES[key], value) if value > 0 else value
        if key.endswith("token_id"):
            return value if value < 8 else 8 + value % 64
        if key.endswith("token_index"):
            return 8 + value % 64
        return -1 if key == "vision_feature_layer" and value > 0 else value
    if isinstance(value, (list, tuple)):
        return shorter(key, list(value), layers, variant)
    return value


def shorter(key: str, value: list[Any], layers: set[int], variant: Variant) -> list[Any]:
    """A list of a configuration: of layers, of stages, or of sizes."""
    whole = all(isinstance(v, int) and not isinstance(v, bool) for v in value)
    if key == "image_grid_pinpoints":
        return [[variant.image, variant.image]]
    if key == "mrope_section" and whole:
        return [2, 1, 1][: len(value)]
    if key == "vision_feature_layer" and whole:
        return [-1] * len(value)
    if "deepstack" in key and whole:
        return list(range(min(2, len(value))))
    if key in ("depths", "num_attention_heads_per_stage", "layers", "depth"):
        return [1] * len(value)
    if "heads" in key and whole and (len(value) <= 4 or len(value) not in layers):
        return [2] * len(value)  # a width for each stage, which 3 heads need not divide
    if len(value) in layers and len(value) > 4:
        return [smaller(key, v, set(), variant) for v in (value[0], value[-1])]
    if key in ("image_size", "img_size") and whole:
        return [min(variant.image, v) for v in value]
    if key in SIZES and whole:
        return [min(SIZES[key], v) for v in value]
    return value
