"""The sizes of a small causal model of Hugging Face's."""

from typing import Any

DECODER: dict[str, Any] = {
    "vocab_size": 131,  # does not divide
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "use_cache": False,
}
