"""The models of the training benchmark, each with the names that plans and checks need.

`gpt-1.3b`, `gpt-6.7b-slice` and `llama3-8b-slice` are those whose peers' steps are recorded
(`benchmarks.measured_models`); `gpt2` and `mixtral` are Hugging Face's own.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpt import GPT2_PLAN, TINY, Shape
from benchmarks.gpt import SHAPES as GPTS
from benchmarks.measured_models import SIZES, Decoder, Sizes

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Model:
    """`made` builds the module on the default device; `checked` are the parameters whose gradients are compared."""

    name: str
    made: Any
    inputs: tuple[str, str]
    sequence: int
    vocabulary: int
    blocks: str  # the list of layers
    layers: int
    active: int  # parameters that a token meets in a product
    attended: int  # layers * width
    checked: tuple[str, ...]
    params: Mapping[str, str] = field(default_factory=dict[str, str])  # of tensor parallelism by shardc
    sequence_parallel: Mapping[str, str] = field(default_factory=dict[str, str])
    experts: Mapping[str, str] = field(default_factory=dict[str, str])  # the same of expert parallelism
    sizes: Sizes | None = None

    def build(self, dtype: torch.dtype) -> nn.Module:
        return self.made().to(dtype)

    def batches(self, count: int, sequences: int, device: torch.device) -> list[dict[str, Tensor]]:
        """Tokens drawn from the whole vocabulary, the same on every rank."""
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(self.vocabulary, (count, sequences, self.sequence + 1), generator=generator)
        shifts = self.sizes is not None  # Hugging Face's models shift labels themselves
        found: list[dict[str, Tensor]] = []
        for tokens in drawn:
            ids = tokens[:, :-1].contiguous().to(device)
            targets = tokens[:, 1:].contiguous().to(device) if shifts else ids.clone()
            found.append(dict(zip(self.inputs, (ids, targets), strict=True)))
        return found

    def flops(self, sequences: int) -> float:
        """Of a step: forward and twice that for backward; causal attention counts as half."""
        return 3.0 * sequences * self.sequence * (2 * self.active + 2 * self.sequence * self.attended)


def skip_masks() -> None:
    """Hugging Face's models leave a mask to `is_causal`, also while torch.compile captures them.

    They would be given one of [batch, 1, sequence, sequence], since they find out by values whether sequences are
    packed, and dynamo before torch 2.14 says that it exports. Ours is traced without one, too.
    """
    library: Any = sys.modules.get("transformers.masking_utils")
    if library is not None:
        library.find_packed_sequence_indices = lambda position_ids: None
        library.is_torchdynamo_exporting = lambda: False


def loss_of(output: Any) -> Tensor:
    """What a model returned: the loss, or an output that has it."""
    return output if isinstance(output, Tensor) else output.loss


def decoder(name: str, sizes: Sizes) -> Model:
    columns = ("q", "k", "v", "up", "gate") if sizes.gated else ("q", "k", "v", "up")
    s, narrow = sizes, sizes.width // sizes.heads * sizes.kv_heads
    layer = 2 * s.width * s.width + 2 * s.width * narrow + (3 if s.gated else 2) * s.width * s.hidden
    last = s.layers - 1
    return Model(
        name,
        lambda: Decoder(sizes),
        ("tokens", "targets"),
        s.sequence,
        s.vocabulary,
        "blocks",
        s.layers,
        s.layers * layer + s.vocabulary * s.width,
        s.layers * s.width,
        (
            "tok.weight",
            "blocks.0.n1.weight",
            "blocks.0.attn.q.weight",
            "blocks.0.attn.k.weight",
            f"blocks.{last}.attn.out.weight",
            f"blocks.{last}.mlp.up.weight",
            f"blocks.{last}.mlp.down.weight",
            "norm.weight",
            *(() if s.gated else ("pos", "blocks.0.attn.v.bias", f"blocks.{last}.mlp.down.bias")),
        ),
        {"tok.weight": "tp, -", "head.weight": "tp, -"} | {f"**.{name}.weight": "tp, -" for name in columns},
        {"blocks.*": "-, tp, -", "tok": "-, tp, -"},
        sizes=sizes,
    )


def gpt2(shape: Shape) -> Model:
    last = shape.layers - 1
    return Model(
        "gpt2",
        shape._model,
        ("input_ids", "labels"),
        shape.seq,
        shape.vocab,
        "transformer.h",
        shape.layers,
        12 * shape.layers * shape.width**2 + shape.vocab * shape.width,
        shape.layers * shape.width,
        (
            "transformer.wte.weight",
            "transformer.h.0.attn.c_attn.weight",
            f"transformer.h.{last}.mlp.c_proj.weight",
            "transformer.ln_f.weight",
        ),
        GPT2_PLAN,
    )


def mixtral(sizes: Mapping[str, int], sequence: int) -> Model:
    """Experts of Mixtral's form, few and small enough for one GPU."""

    def made() -> nn.Module:
        from transformers import MixtralConfig, MixtralForCausalLM

        return MixtralForCausalLM(MixtralConfig(**sizes, use_cache=False))

    width, layers, hidden = (sizes[key] for key in ("hidden_size", "num_hidden_layers", "intermediate_size"))
    narrow = width // sizes["num_attention_heads"] * sizes["num_key_value_heads"]
    layer = 2 * width * (width + narrow) + 3 * sizes["num_experts_per_tok"] * width * hidden
    return Model(
        "mixtral",
        made,
        ("input_ids", "labels"),
        sequence,
        sizes["vocab_size"],
        "model.layers",
        layers,
        layers * layer + sizes["vocab_size"] * width,
        layers * width,
        (
            "model.layers.0.self_attn.q_proj.weight",
            "model.layers.0.mlp.experts.gate_up_proj",
            f"model.layers.{layers - 1}.mlp.experts.down_proj",
            "model.norm.weight",
        ),
        experts={"**.experts.gate_up_proj": "ep, -, -", "**.experts.down_proj": "ep, -, -"},
    )


MIXTRAL = {
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
}
TINY_MIXTRAL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 64,
}
MODELS = {name: decoder(name, sizes) for name, sizes in SIZES.items()} | {
    "gpt2": gpt2(GPTS["gpt2"]),
    "mixtral": mixtral(MIXTRAL, 2048),
}
TINY_SIZES = {
    "gpt-1.3b": Sizes(4, 32, 4, 4, 64, 16, 64),
    "gpt-6.7b-slice": Sizes(1, 32, 4, 4, 64, 16, 64),
    "llama3-8b-slice": Sizes(1, 32, 4, 2, 48, 16, 64, gated=True),
}
TINY_MODELS = {name: decoder(name, sizes) for name, sizes in TINY_SIZES.items()} | {
    "gpt2": gpt2(replace(TINY["gpt2"], layers=1)),
    "mixtral": mixtral(TINY_MIXTRAL, 16),
}
