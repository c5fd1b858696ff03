"""Speech recognition with CTC losses: labels that a mask chooses, spans that SpecAugment masks.

The loss is computed in float32 whatever the model's dtype, so it agrees with eager PyTorch up to float32's rounding.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.frontend.spec_augment import mask_spans

SIZES = {
    "vocab_size": 12,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "conv_dim": (16, 16),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
STILL = {
    **dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout"), 0.0),
    **dict.fromkeys(("final_dropout", "mask_time_prob", "layerdrop"), 0.0),
}
OTHER_KINDS = ("Hubert", "WavLM", "SEW", "SEWD", "UniSpeech", "UniSpeechSat")
LOSS = {"ctc_loss_reduction": "mean", "ctc_zero_infinity": True, "pad_token_id": 0}
LABELS = torch.tensor([[1, 2, 3, -100], [4, 4, -100, -100], [5, 1, 2, 3], [-100, -100, -100, -100]])
OTHERS = torch.tensor([[1, -100, 2, -100], [4, -100, -100, -100], [5, -100, -100, -100], [1, 1, 2, 2]])


def plan(kind: str) -> dict[str, Any]:
    """Data parallelism, and the feed-forward layers over tp. SEW-D's have the names of DeBERTa's."""
    widened, narrowed = "**.intermediate_dense", "**.output_dense"
    if kind == "SEWD":
        widened, narrowed = "**.layer.*.intermediate.dense", "**.layer.*.output.dense"
    params = {f"{widened}.weight": "tp, -", f"{widened}.bias": "tp", f"{narrowed}.weight": "-, tp"}
    return {"inputs": {"*": "dp"}, "params": params}


def speech(kind: str, **options: Any) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **LOSS, **(STILL | options))
    return getattr(transformers, f"{kind}ForCTC")(config).double().train()


def batch(labels: Tensor) -> dict[str, Tensor]:
    return {"input_values": torch.randn(4, 400, dtype=torch.float64), "labels": labels}


@pytest.mark.parametrize("kind", ["Wav2Vec2", *(pytest.param(kind, marks=pytest.mark.long) for kind in OTHER_KINDS)])
def test_ctc_losses_are_those_of_eager_pytorch(kind: str) -> None:
    model, first = speech(kind), batch(LABELS)
    program = shardc.compile(model, first, mesh="dp=2, tp=2", plan=plan(kind))
    assert program.verify().ok
    trainer = program.launch()
    for given in (first, batch(OTHERS)):
        model.zero_grad()
        loss = model(**given).loss
        loss.backward()
        result = trainer.step(given)
        torch.testing.assert_close(result.loss, loss.detach(), rtol=1e-6, atol=1e-6)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(result.grads[name], parameter.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_spec_augment_masks_anew_in_each_step() -> None:
    augmented = {"mask_time_prob": 0.3, "mask_time_length": 4, "mask_feature_prob": 0.2, "mask_feature_length": 4}
    model, given = speech("Wav2Vec2", **augmented), batch(LABELS)
    state = np.random.get_state()
    losses: list[list[float]] = []
    for mesh in ("dp=2", "tp=2"):
        program = shardc.compile(model, given, mesh=mesh, plan={"inputs": {"*": "dp"}} if mesh == "dp=2" else None)
        assert program.verify().ok
        assert not [d for d in program.diagnostics if d.code == "SC111"], "numpy draws nothing"
        trainer = program.launch()
        losses.append([float(trainer.step(given).loss) for _ in range(3)])
    assert len(set(losses[0])) == 3
    assert losses[0] == pytest.approx(losses[1], rel=1e-5), "the same under every layout"
    assert repr(np.random.get_state()) == repr(state)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("share", "length", "least"), [(0.3, 4, 0), (0.65, 5, 2), (0.05, 10, 0), (0.9, 2, 0)])
@pytest.mark.parametrize("padded", [False, True])
def test_spans_are_drawn_as_the_library_draws_them(share: float, length: int, least: int, padded: bool) -> None:
    from transformers.models.wav2vec2.modeling_wav2vec2 import _compute_mask_indices

    torch.manual_seed(0)
    np.random.seed(0)
    real = torch.ones(4, 23, dtype=torch.long)
    real[1, 15:] = real[2, 3:] = real[3, 1:] = 0
    mask = real if padded else None
    args = (4, 23), share, length, mask, least
    ours = torch.stack([mask_spans(*args) for _ in range(1000)]).double().mean(0)
    theirs = torch.tensor(np.mean([_compute_mask_indices(*args) for _ in range(1000)], 0))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0.09)
    torch.testing.assert_close(ours.mean(1), theirs.mean(1), rtol=0, atol=0.03)
