"""Small models of every type of the installed `transformers`, with a batch for each: what `zoo.py` compiles.

    entries()                    masked/bert, causal/llama, vision/vit, ...: each model type once
    entry.build()                the model, from its own configuration with small sizes; nothing is downloaded
    batch_of(entry, model)       tensors that its forward takes, labels if it takes any

A configuration says how large a model is under some two hundred names. The table below has those that libraries use;
what is not in it keeps its default, and a model that cannot be built so is counted as not built.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

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
ROWS, LENGTH, IMAGE, EXPERTS = 4, 16, 32, 4
SMALL = """
32 hidden_size d_model n_embd embed_dim dim encoder_embed_dim embedding_size projection_dim model_dim hidden_dim
32 word_embed_proj_dim text_embed_dim output_hidden_size out_hidden_size encoder_hidden_size decoder_hidden_size
32 attention_hidden_size neck_hidden_sizes conv_dim cross_attention_hidden_size width emb_dim n_embed
32 decoder_embed_dim qformer_hidden_size mm_hidden_size lru_width
64 intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner ffn_hidden_size dim_feedforward
64 encoder_intermediate_size decoder_intermediate_size hidden_size_mlp mlp_dim shared_intermediate_size
64 mamba_intermediate_size intermediate_size_mlp
16 moe_intermediate_size shared_expert_intermediate_size expert_ffn_dim moe_shared_expert_intermediate_size
16 mamba_d_state state_size ssm_state_size mamba_d_head mamba_head_dim expert_hidden_size num_conv_pos_embeddings
16 block_size
4 num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads
4 encoder_num_attention_heads decoder_num_attention_heads n_routed_experts num_experts num_local_experts
4 moe_num_experts num_labels num_kv_shared_layers linear_num_value_heads mamba_n_heads encoder_num_heads
4 decoder_num_heads
2 num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers depth
2 num_decoder_layers num_key_value_heads num_experts_per_tok moe_k moe_topk top_k_experts n_group
2 encoder_num_hidden_layers decoder_num_hidden_layers attn_layer_period expert_layer_period conv_kernel_size
2 linear_num_key_heads num_conv_pos_embedding_groups attention_layers mamba_expand num_global_layers
2 encoder_num_layers decoder_num_layers num_blocks num_block_records
1 topk_group first_k_dense_replace attn_layer_offset expert_layer_offset n_shared_experts
1 num_nextn_predict_layers mamba_n_groups moe_layer_start_index
8 head_dim d_kv attention_head_dim v_head_dim qk_nope_head_dim qk_rope_head_dim kv_lora_rank q_lora_rank
8 patch_size linear_key_head_dim linear_value_head_dim adapter_attn_dim global_head_dim num_mel_bins
8 sliding_window local_attention attention_window mamba_chunk_size chunk_size time_step_rank
8 hidden_size_per_layer_input index_head_dim
32 image_size img_size crop_size
64 max_position_embeddings n_positions max_source_positions max_target_positions max_seq_len max_sequence_length
96 vocab_size vocab_size_per_layer_input text_vocab_size
"""  # sizes, and the names that have them
SIZES = {name: int(size) for size, *names in map(str.split, SMALL.strip().splitlines()) for name in names}
DERIVED = (
    *("layer_types", "mlp_layer_types", "layers_block_type", "mlp_only_layers", "no_rope_layers"),
    *("id2label", "label2id", "transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype"),
)
OFF = ("dropout", "drop", "layerdrop", "mask_time_prob", "mask_feature_prob")


@dataclass(frozen=True)
class Entry:
    """One model type: its kind, and the class that has a head of this kind."""

    kind: str
    type: str
    model_class: str

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.type}"

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        config_class = getattr(transformers, CONFIG_MAPPING_NAMES[self.type])
        model_class = getattr(transformers, self.model_class)
        config = config_class(**shrunk(config_class().to_dict()))
        config.use_cache = False
        if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
        config._attn_implementation = "sdpa" if getattr(model_class, "_supports_sdpa", False) else "eager"
        return model_class(config).train()


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


def shrunk(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration with small sizes, and those inside it."""
    small: dict[str, Any] = {}
    for key, value in config.items():
        if key in DERIVED or key == "model_type":
            continue
        if isinstance(value, dict) and "model_type" in value:
            small[key] = shrunk(value) | {"model_type": value["model_type"]}
        elif isinstance(value, bool) or value is None:
            small[key] = value
        elif isinstance(value, float) and any(word in key for word in OFF):
            small[key] = 0.0
        elif isinstance(value, int) and key in SIZES:
            small[key] = min(SIZES[key], value) if value > 0 else value
        elif isinstance(value, int) and key.endswith("token_id"):
            small[key] = value if value < 8 else 8 + value % 64
        elif isinstance(value, int) and key.endswith("token_index"):
            small[key] = 8 + value % 64
        elif isinstance(value, (list, tuple)) and key in ("depths", "num_attention_heads_per_stage", "layers"):
            small[key] = [1] * len(value)
        elif isinstance(value, (list, tuple)) and "heads" in key and all(isinstance(v, int) for v in value):
            small[key] = [2] * len(value)  # a width for each stage, which 3 heads need not divide
        elif isinstance(value, (list, tuple)) and key in SIZES and all(isinstance(v, int) for v in value):
            small[key] = [min(SIZES[key], v) for v in value]
        else:
            small[key] = value
    if "kv_lora_rank" in small and small.get("num_key_value_heads"):
        small["num_key_value_heads"] = small["num_attention_heads"]  # keys of all heads come of one latent
    if {"expand", "num_heads", "head_dim", "hidden_size"} <= small.keys():
        small["num_heads"] = small["hidden_size"] * small["expand"] // small["head_dim"]
    return small


# ------------------------------------------------------------------------------------------------------------ batches
def batch_of(entry: Entry, model: nn.Module) -> dict[str, Tensor]:
    """What the model's forward takes. Raises ValueError where it takes nothing that is known here."""
    takes = inspect.signature(model.forward).parameters
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    generator = torch.Generator().manual_seed(1)
    vocab = min(getattr(text, "vocab_size", None) or 96, 96)
    tokens = torch.randint(72, vocab, (ROWS, LENGTH), generator=generator) if vocab > 80 else None
    batch: dict[str, Tensor] = {}
    if entry.kind in ("vision", "multimodal") and "pixel_values" in takes:
        batch["pixel_values"] = pixels(config, generator, entry)
    if entry.kind == "audio":
        batch |= sound(config, takes, generator)
    if "input_ids" in takes and tokens is not None and "input_features" not in batch and "input_values" not in batch:
        images = placeholders(model, config, batch)
        batch["input_ids"] = tokens if images is None else torch.cat([images, tokens], 1)
        if entry.kind == "multimodal" and "attention_mask" in takes and "return_loss" in takes:
            batch["attention_mask"] = torch.ones_like(tokens)
    elif "decoder_input_ids" in takes and "labels" not in takes and tokens is not None:
        batch["decoder_input_ids"] = tokens
    if not batch:
        raise ValueError(f"no batch is known for forward({', '.join(takes)})")
    if "labels" in takes and (labels := labels_of(entry, batch, tokens, generator)) is not None:
        batch["labels"] = labels
    return batch


def labels_of(
    entry: Entry, batch: dict[str, Tensor], tokens: Tensor | None, generator: torch.Generator
) -> Tensor | None:
    if "ForConditionalGeneration" in entry.model_class and entry.kind == "audio":
        return tokens
    if "ForCTC" in entry.model_class:
        return None if tokens is None else tokens[:, :4]
    if "Classification" in entry.model_class:
        return torch.randint(0, 2, (ROWS,), generator=generator)
    return batch.get("input_ids") if entry.kind != "vision" else None


def pixels(config: Any, generator: torch.Generator, entry: Entry) -> Tensor:
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", IMAGE)
    height, width = (size, size) if isinstance(size, int) else tuple(size)[:2]
    channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3
    frames = (getattr(vision, "num_frames", 8),) if "Video" in entry.model_class else ()
    return torch.randn(ROWS, *frames, channels, height, width, generator=generator)


def placeholders(model: nn.Module, config: Any, batch: dict[str, Tensor]) -> Tensor | None:
    """As many tokens of an image as the model makes of its pixels, for those that put these into the text."""
    token = getattr(config, "image_token_id", None) or getattr(config, "image_token_index", None)
    if token is None or "pixel_values" not in batch or not hasattr(model, "get_image_features"):
        return None
    with torch.no_grad():
        features = model.get_image_features(pixel_values=batch["pixel_values"])  # pyright: ignore[reportCallIssue]
    features = getattr(features, "pooler_output", features)
    rows = list(features) if not isinstance(features, Tensor) else features.flatten(0, -2)
    count = len(rows) if isinstance(rows, Tensor) else sum(math.prod(row.shape[:-1]) for row in rows)
    return torch.full((ROWS, count // ROWS), token)


def sound(config: Any, takes: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """A spectrogram or a wave, by the name that forward has for it."""
    encoder = getattr(config, "encoder_config", None) or getattr(config, "audio_config", None) or config
    bins = getattr(encoder, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", 8)
    if "input_features" in takes:
        frames = 2 * getattr(encoder, "max_source_positions", 32)
        is_whisper = any(name in type(encoder).__name__ for name in ("Whisper", "Qwen2Audio", "Voxtral"))
        shape = (ROWS, bins, frames) if is_whisper else (ROWS, frames, bins)
        return {"input_features": torch.randn(shape, generator=generator)}
    if "input_values" in takes and hasattr(config, "max_length") and hasattr(config, "frequency_stride"):
        return {"input_values": torch.randn(ROWS, config.max_length, bins, generator=generator)}
    if "input_values" in takes:
        return {"input_values": torch.randn(ROWS, 4000, generator=generator)}
    return {}


def loss_of(output: Any, _: Any) -> Tensor:
    """The model's own loss, or the mean square of the first tensor that it returns."""
    loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss.square().mean() if loss is output else loss.mean()
    for value in output.values() if hasattr(output, "values") else output:
        if isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad:
            return value.square().mean()
    raise ValueError("the model returns nothing that has a gradient")
