"""The models that must compile unmodified, the plan of each, and what Megatron-LM would communicate for it.

`forward` and `backward` count the collectives of activations over tp: two a layer, three where a decoder attends to an
encoder as well, and those named beside the figure. Gradients of weights are reduced besides, once each.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

ROOT = Path(__file__).parents[2]
PLANS = ROOT / "configs" / "plans"

Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Model:
    """`attention` counts attention calls, `sharded` are globs of every parameter that tp must shard.

    `eager` is how closely the traced step must match the model itself in float64: where the library hard-codes float32,
    which our float64 does not follow, less closely.
    """

    name: str
    forward: int
    backward: int
    attention: int
    sharded: tuple[str, ...]
    eager: float = 1e-12
    arguments: dict[str, int] = field(default_factory=dict[str, int])

    def make(self) -> tuple[nn.Module, Any, Loss | None]:
        return make(self.name, **self.arguments)

    @property
    def plan(self) -> str:
        return str(PLANS / f"{self.name}.yaml")


def make(name: str, **arguments: Any) -> tuple[nn.Module, Any, Loss | None]:
    """A model of examples/, its batch, and its loss where it has none of its own."""
    if str(ROOT / "examples") not in sys.path:
        sys.path.append(str(ROOT / "examples"))
    found = getattr(importlib.import_module(name), name)(**arguments)
    return found[0], found[1], found[2] if len(found) > 2 else None


HEADS = ("**.q_proj.*", "**.k_proj.*", "**.v_proj.*")
GATED = ("**.gate_proj.*", "**.up_proj.*", "**.down_proj.*")
LLAMA = (*HEADS, "**.o_proj.weight", *GATED, "**.embed_tokens.*", "lm_head.*")
GPT2 = ("**.wte.weight", "**.c_attn.*", "**.attn.c_proj.weight", "**.c_fc.*", "**.mlp.c_proj.weight")
BERT = (
    *("**.query.*", "**.key.*", "**.value.*", "**.attention.output.dense.weight"),
    *("**.intermediate.dense.*", "**.layer.*.output.dense.weight"),
    *("**.word_embeddings.*", "**.predictions.bias"),
)
T5 = (
    *("shared.*", "**.q.*", "**.k.*", "**.v.*", "**.o.*", "**.relative_attention_bias.*"),
    *("**.wi.*", "**.wo.*"),
)
WHISPER = (*HEADS, "**.out_proj.weight", "**.fc1.*", "**.fc2.weight", "**.embed_tokens.*")
PACKED = ("**.in_proj_weight", "**.in_proj_bias", "**.out_proj.weight", "**.linear1.*", "**.linear2.weight")

MODELS = [
    # Forward: embedding; the loss's one gather. Backward: the output projection.
    # float32 in transformers/loss/loss_utils.py: ForCausalLMLoss casts the logits.
    Model("gpt2", 2 * 2 + 2, 2 * 2 + 1, 2, GPT2, 1e-6),
    # float32 in the loss as GPT-2's, and in modeling_llama.py: LlamaRMSNorm, LlamaRotaryEmbedding.
    Model("llama", 2 * 2 + 2, 2 * 2 + 1, 2, LLAMA, 1e-6, {"kv_heads": 4}),
    # float32 in the loss as GPT-2's, and in modeling_qwen3.py: Qwen3RMSNorm, Qwen3RotaryEmbedding.
    Model("qwen3", 2 * 2 + 2, 2 * 2 + 1, 2, LLAMA, 1e-6),
    Model("bert", 2 * 2 + 2, 2 * 2 + 1, 2, BERT),
    # Both embeddings; backward, the encoder's output as the decoder's layers attend to it. float32 in modeling_t5.py:
    # T5LayerNorm takes its variance in it.
    Model("t5", 2 * 2 + 3 * 2 + 3, 2 * 2 + 3 * 2 + 2, 6, T5, 1e-6),
    Model("vit", 2 * 2, 2 * 2, 2, (*HEADS, "**.o_proj.weight", "**.fc1.*", "**.fc2.weight")),
    Model("whisper", 2 * 2 + 3 * 2 + 2, 2 * 2 + 3 * 2 + 2, 6, WHISPER),
    # Nothing before the first layer wants a gradient, so one all-reduce less.
    Model("encoder", 2 * 2, 2 * 2 - 1, 2, PACKED),
    # One a bottleneck block, in each direction.
    Model("resnet", 4, 4, 0, ("**.layer.0.*.*", "**.layer.1.convolution.weight")),
    Model("cnn", 1, 0, 0, ("conv1.*", "norm1.*", "conv2.weight")),
    Model("mlp", 1, 0, 0, ("up.*", "down.weight")),
]
