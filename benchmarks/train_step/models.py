"""The models of the training benchmark, each with the names that plans and checks need.

`gpt-1.3b`, `gpt-6.7b-slice` and `llama3-8b-slice` are those whose peers' steps are recorded
(`benchmarks.measured_models`); `gpt2` and `mixtral` are Hugging Face's own.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
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
        sizes,
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


MODELS = {name: decoder(name, sizes) for name, sizes in SIZES.items()} | {"gpt2": gpt2(GPTS["gpt2"])}
TINY_SIZES = {
    "gpt-1.3b": Sizes(4, 32, 4, 4, 64, 16, 64),
    "gpt-6.7b-slice": Sizes(2, 32, 4, 4, 64, 16, 64),
    "llama3-8b-slice": Sizes(2, 32, 4, 2, 48, 16, 64, gated=True),
}
TINY_MODELS = {name: decoder(name, sizes) for name, sizes in TINY_SIZES.items()} | {"gpt2": gpt2(TINY["gpt2"])}
