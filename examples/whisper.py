"""Hugging Face's Whisper, unmodified: a convolutional front end, an encoder, and a decoder tied to its embedding."""

import torch
from torch import Tensor, nn
from transformers import WhisperConfig, WhisperForConditionalGeneration


def whisper(batch: int = 8, seq: int = 16, layers: int = 2, vocab: int = 256) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    config = WhisperConfig(
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        d_model=64,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        vocab_size=vocab,
        num_mel_bins=8,
        max_source_positions=seq,
        max_target_positions=seq,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=1,
        dropout=0.0,
        use_cache=False,
    )
    sound = torch.randn(batch, 8, 2 * seq)  # mel bins, frames
    return WhisperForConditionalGeneration(config), {
        "input_features": sound,
        "labels": torch.randint(vocab, (batch, seq // 2)),
    }
