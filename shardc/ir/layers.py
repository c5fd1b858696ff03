"""Layers: which module of a model is a layer, by its FQN. Recompute, buckets, the cut and summaries all ask here.

A *layer* is the outermost element of a list of modules. Its FQN ends at the first segment that is a list index:

    transformer.h.3.mlp.act             transformer.h.3         the block of GPT-2
    encoder.layers.0.experts.3.w1       encoder.layers.0        experts are parallel branches of one layer
    decoder.block.1.layer.2.wo          decoder.block.1         T5 calls the attention and the MLP of a block layers
    h.0.mlp.2                           h.0                     an nn.Sequential inside of a layer
    layer1.0.downsample.0               layer1.0                a block of torchvision's ResNet, with its shortcut
    stages.2.blocks.4.attn              stages.2                Swin: a stage; it contains the layer stages.2.blocks.4
    ln_f                                (none)

The first index counts, because an index further inside is as often no layer: an expert, a branch, one Linear of an MLP.
Nothing in an FQN tells those from the blocks of a stage. The outermost element is what Hugging Face lists as
`_no_split_modules` (T5Block, SwinStage, MixtralDecoderLayer), and what FSDP plans wrap. A layer that is too large is
cheap to correct and one that is too small is not: the cut divides a layer of more than a stage's share of the cost at
the index that comes next (`layers_of`), and so does a plan that names a module inside of it under `pipeline.split`.

An index is a segment of decimal digits. `fc1`, `layer1` and `x_1` have none.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache


@lru_cache(maxsize=65536)
def layers_of(fqn: str) -> tuple[str, ...]:
    """The list elements that a module lies in, outermost first: `stages.2`, `stages.2.blocks.4`."""
    segments = fqn.split(".")
    return tuple(".".join(segments[: i + 1]) for i, segment in enumerate(segments) if _is_index(segment))


def layer_of(fqn: str, divided: Collection[str] = ()) -> str:
    """The layer that a module lies in; "" for none. Where a layer is divided, the next one inside, if there is one."""
    nested = layers_of(fqn)
    return next((layer for layer in nested if layer not in divided), nested[-1] if nested else "")


def layer_or_module(fqn: str, divided: Collection[str] = ()) -> str:
    """The layer that a module lies in; a module in no list stands for itself."""
    return layer_of(fqn, divided) or fqn


def in_every_layer(name: str) -> str:
    """One name for a module or parameter in all layers: `h.*.mlp.weight` of `h.3.mlp.weight`."""
    return ".".join("*" if _is_index(segment) else segment for segment in name.split("."))


def list_and_index(layer: str) -> tuple[str, int]:
    """`transformer.h` and 3 of `transformer.h.3`; -1 where the name is no list element's."""
    name, _, last = layer.rpartition(".")
    return (name, int(last)) if _is_index(last) else (layer, -1)


def _is_index(segment: str) -> bool:
    return segment.isascii() and segment.isdecimal()
