"""Convolutions with a stride, and windows, along a sequence that ranks have parts of: rows go to where they are read.

Loss and every gradient are those of eager PyTorch, in any layout; what comes of the rows is a sequence of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardc
from shardc.ir.ops.pick import PICK_ROWS
from shardc.passes.type_check import type_faults
from tests.models.test_sequence_scans import VOCAB, WIDTH, assert_equals_eager, compiled
from tests.models.test_speech import SIZES, STILL

Function = Callable[[Tensor, Tensor], Tensor]


class Strided(nn.Module):
    """Tokens, a function of them and of a weight of three taps, and a loss of what it yields, whose rows differ."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.taps, self.function = nn.Parameter(torch.randn(WIDTH, WIDTH, 3) / 3), function

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        y = self.head(self.function(torch.tanh(self.tokens(ids)), self.taps))
        weights = torch.arange(y.shape[1]).to(y.dtype)[:, None] + torch.linspace(0, 1, VOCAB, dtype=y.dtype)
        return (y * weights).pow(2).mean() + 0 * labels.sum()


def audio(x: Tensor, w: Tensor) -> Tensor:
    """Layers like those of wav2vec2: no padding, and each is shorter."""
    y = F.gelu(F.conv1d(x.mT, w, stride=2))
    return F.conv1d(F.gelu(F.conv1d(y, w, stride=1)), w[..., :2], stride=2).mT


FUNCTIONS: dict[str, Function] = {
    "padded by hand": lambda x, w: F.conv1d(F.pad(x.mT, (1, 0)), w, stride=2).mT,
    "as Whisper": lambda x, w: F.conv1d(F.gelu(F.conv1d(x.mT, w, padding=1)), w, stride=2, padding=1).mT,
    "as wav2vec2": audio,
    "dilated": lambda x, w: F.conv1d(x.mT, w[..., :2], stride=3, dilation=2, padding=1).mT,
    "depthwise": lambda x, w: F.conv1d(x.mT, w[:, :1], stride=2, padding=1, groups=WIDTH).mT,
    "in groups": lambda x, w: F.conv1d(x.mT, w[:, :2], stride=2, groups=2).mT,
    "rows left out": lambda x, w: F.conv1d(x.mT, w[..., :2], stride=3).mT,
    "every third row": lambda x, w: F.conv1d(x.mT, w[..., :1], stride=3).mT,
    "windows": lambda x, w: x.unfold(1, 3, 1).pow(2).mean(-1),
    "windows that overlap": lambda x, w: (x.unfold(1, 3, 2) * w[0, 0]).sum(-1),
    "windows side by side": lambda x, w: x.unfold(1, 4, 4).pow(3).mean(-1),
    "windows apart": lambda x, w: (x.unfold(1, 2, 3) * w[0, 0, :2]).sum(-1),
    "means": lambda x, w: F.avg_pool1d(x.mT, 3, 2, 1).mT,
    "means of rows alone": lambda x, w: F.avg_pool1d(x.mT, 4, 3, 2, count_include_pad=False).mT,
    "means at the end": lambda x, w: F.avg_pool1d(x.mT, 3, 2, 1, ceil_mode=True).mT,
    "means of neighbours": lambda x, w: F.avg_pool1d(x.mT, 5, 1, 2).mT,
    "means of planes": lambda x, w: F.avg_pool2d(x[:, None], (3, 2), (2, 1), (1, 1), True, False).sum(1)[..., 1:],
    "means by another number": lambda x, w: (
        F.avg_pool2d(x[:, None], (3, 2), (2, 2), 0, divisor_override=5).sum(1).repeat(1, 1, 2)
    ),
    "maxima": lambda x, w: F.max_pool1d(x.mT, 3, 2, 1).mT,
    "maxima of equal rows": lambda x, w: F.max_pool1d((x * 2).round().mT + x.mT * 0, 4, 3).mT,
    "maxima at the end": lambda x, w: F.max_pool1d(x.mT, 4, 3, 2, ceil_mode=True).mT,
    "maxima of neighbours": lambda x, w: F.max_pool1d(x.mT, 3, 1, 1).mT * x,
    "maxima of few": lambda x, w: F.max_pool1d(x.mT, 2, 3).mT,
    "maxima of rows of planes": lambda x, w: F.max_pool2d(x[:, None], (3, 1), (2, 1), (1, 0)).sum(1),
    "dilated maxima": lambda x, w: F.max_pool1d(x.mT, 2, 2, 0, dilation=2).mT,
    "every other row": lambda x, w: x[:, ::2],
    "every third row from one on": lambda x, w: x[:, 1::3].sin(),
    "every other row but some": lambda x, w: x[:, 2:-3:2],
    "every other row beside the next": lambda x, w: x[:, : x.shape[1] // 2 * 2 : 2] * x[:, 1::2],
    "pooled twice": lambda x, w: F.max_pool1d(F.avg_pool1d(x.mT, 3, 2, 1), 3, 1, 1).mT,
}
LAYOUTS = [("cp=2", 16, "none"), ("cp=4", 17, "none"), ("cp=4", 50, "zigzag"), ("dp=2, cp=2", 19, "zigzag"),
           ("cp=4", 11, "none"), ("cp=2, tp=2", 18, "none")]  # fmt: skip


@pytest.mark.sampled(24)
@pytest.mark.parametrize(("mesh", "length", "balance"), LAYOUTS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_equals_eager(name: str, mesh: str, length: int, balance: str) -> None:
    torch.manual_seed(0)
    model = Strided(FUNCTIONS[name]).double()
    params = {"taps": "tp, -, -"} if "tp" in mesh and "groups" not in name and name != "depthwise" else {}
    program = compiled(model, length, mesh, context={"balance": balance}, params=params)
    assert_equals_eager(model, program)
    assert not type_faults(program.body)
    if "tp" not in mesh and name != "as wav2vec2":
        assert {c.kind for c in program.collectives()} <= {"permute", "all_reduce"}
        assert not [d for d in program.diagnostics if d.severity == "warning"]


def test_other_strides_are_right() -> None:
    functions: list[Function] = [
        lambda x, w: F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).mean(-1),
        lambda x, w: F.conv_transpose1d(x.mT, w, stride=2).mT,
        lambda x, w: F.max_pool2d(x[:, None], 3, 2, 1).sum(1).repeat(1, 1, 2),
    ]
    for function in functions:
        torch.manual_seed(0)
        model = Strided(function).double()
        program = compiled(model, 18, "cp=4")
        assert_equals_eager(model, program)


@pytest.mark.parametrize("pooling", ["max", "mean"])
def test_poolings_of_equal_rows_of_infinite_and_of_no_numbers(pooling: str) -> None:
    """Of equal rows the first has the gradient, of NaNs the last; a window of -inf alone has one too."""

    class Marked(Strided):
        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            soft = self.tokens(ids) * (1 + torch.arange(ids.shape[1]))[:, None]
            x = self.tokens(ids).detach().round() + (soft - soft.detach())  # the gradient says which row it is of
            x = x.masked_fill((ids > 10)[..., None], -torch.inf).masked_fill((ids == 3)[..., None], torch.nan)
            pool = F.max_pool1d if pooling == "max" else F.avg_pool1d
            y = pool(x.mT, 3, 2, 1)
            return (y.nan_to_num(2.0, 3.0, -3.0) * torch.arange(y.shape[-1])).pow(2).sum() + 0 * labels.sum()

    for balance in ("none", "zigzag"):
        torch.manual_seed(0)
        model = Marked(audio).double()
        program = compiled(model, 35, "cp=2", context={"balance": balance})
        assert_equals_eager(model, program)
        assert {c.kind for c in program.collectives()} <= {"permute", "all_reduce"}


def test_a_pooling_fetches_its_reach() -> None:
    """Forward a window of 3 at each second row looks one row back, and backward as many gradients go there."""
    for length in (32, 128):
        torch.manual_seed(0)
        program = compiled(Strided(FUNCTIONS["means"]), length + 1, "cp=4", context={"balance": "none"})
        sent: dict[str, int] = {"fwd": 0, "bwd": 0}
        for c in program.collectives():
            if c.kind == "permute":
                sent[c.phase] += c.bytes_per_rank
        assert all(0 < n <= 4 * 4 * WIDTH * 4 for n in sent.values()), sent


@pytest.mark.parametrize(
    "plan", [{"fuse": True, "accumulate": 2}, {"recompute": "full"}, {"precision": "bf16"}], ids=str
)
def test_with_other_plans(plan: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Strided(audio) if "precision" in plan else Strided(audio).double()
    assert compiled(model, 37, "dp=2, cp=2", **plan).verify().ok


@pytest.mark.parametrize("stride", [1, 2])
def test_a_weight_that_is_trained(stride: int) -> None:
    """The gradient of a convolution's weight is what the optimizer reads."""
    torch.manual_seed(0)
    model = Strided(lambda x, w: F.conv1d(F.pad(x.mT, (1, 0)), w, stride=stride).mT).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ids, labels = torch.randint(0, VOCAB, (2, 4, 17))
    plan = {"inputs": {"ids": "-, cp", "labels": "-, cp"}}
    program = shardc.compile(model, {"ids": ids, "labels": labels}, mesh="cp=2", plan=plan, optimizer=optimizer)
    assert program.verify().ok


def test_rows_that_are_infinite_reach_no_other_window() -> None:
    """A tap that a window does not have is no product with 0."""

    class Marked(Strided):
        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            x = self.tokens(ids)
            x = torch.where(torch.arange(x.shape[1])[:, None] == 3, torch.inf, x)
            y = F.conv1d(x.mT, self.taps, stride=4)  # windows are rows 0 to 2, and 4 to 6
            return y.pow(2).mean() + 0 * labels.sum()

    torch.manual_seed(0)
    model = Marked(audio).double()
    program = compiled(model, 11, "cp=2")
    assert_equals_eager(model, program)


def last_rows(x: Tensor, w: Tensor) -> Tensor:
    """What a strided convolution yields, and its last rows and its first, picked."""
    y = F.conv1d(F.gelu(F.conv1d(x.mT, w, padding=1)), w, stride=2, padding=1).mT
    return y + y[:, -1:] + y[:, -3:].pow(2).mean(1, keepdim=True) + y[:, 0][:, None].sin()


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("mesh", "length", "balance"), [("cp=4", 33, "zigzag"), ("dp=2, cp=2", 51, "none")])
def test_last_rows_of_a_strided_sequence_are_picked(mesh: str, length: int, balance: str) -> None:
    """They are fewer rows than the chunks that the convolution reads, and lie as those do."""
    torch.manual_seed(0)
    model = Strided(last_rows).double()
    program = compiled(model, length, mesh, context={"balance": balance})
    assert_equals_eager(model, program)
    assert not type_faults(program.body)
    assert any(node.target is PICK_ROWS for node in program.body.calls())
    assert {c.kind for c in program.collectives()} <= {"permute", "all_reduce"}


class Frames(nn.Module):
    """Frames of sound, half as many, are added to tokens, or read by cross-attention; both lie over the axis."""

    def __init__(self, cross: bool) -> None:
        super().__init__()
        self.tokens, self.head, self.cross = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB), cross
        self.taps = nn.Parameter(torch.randn(WIDTH, WIDTH, 3) / 3)

    def forward(self, sound: Tensor, ids: Tensor) -> Tensor:
        frames = F.conv1d(F.gelu(F.conv1d(sound.mT, self.taps, padding=1)), self.taps, stride=2, padding=1).mT
        x = self.tokens(ids)
        q = x[:, None] if self.cross else (x + frames)[:, None]
        keys = frames[:, None] if self.cross else q
        y = self.head(F.scaled_dot_product_attention(q, keys, keys.sin(), is_causal=not self.cross)[:, 0] + x)
        return F.cross_entropy(y.flatten(0, 1), ids.flatten()) + frames[:, -1].pow(2).mean()


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("mesh", "length", "tokens", "cross", "balance"),
    [("dp=2, cp=2", 17, 9, False, "auto"), ("cp=2", 50, 25, False, "none"), ("cp=2", 50, 9, True, "zigzag"),
     ("cp=4", 33, 22, True, "auto")],
)  # fmt: skip
def test_frames_beside_tokens_in_a_ring(mesh: str, length: int, tokens: int, cross: bool, balance: str) -> None:
    """Tokens that frames are added to lie as frames do, though they are an input of their own."""
    torch.manual_seed(0)
    model, rows = Frames(cross).double(), "dp, cp" if "dp" in mesh else "-, cp"
    batch = {"sound": torch.randn(4, length, WIDTH).double(), "ids": torch.randint(0, VOCAB, (4, tokens))}
    plan = {"inputs": {"sound": f"{rows}, -", "ids": rows}, "context": {"attention": "ring", "balance": balance}}
    program = shardc.compile(model, batch, mesh=mesh, plan=plan)
    assert_equals_eager(model, program)
    assert not type_faults(program.body)
    assert {c.kind for c in program.collectives()} <= {"permute", "all_reduce"}


class Encoder(nn.Module):
    """An encoder of sound with a loss of what it yields."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, sound: Tensor) -> Tensor:
        y = self.encoder(sound).last_hidden_state
        return (y * torch.linspace(0, 1, y.shape[-1], dtype=y.dtype)).pow(3).mean()


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("mesh", "length"), [("cp=2", 400), ("cp=4", 401)])
@pytest.mark.parametrize("kind", ["Wav2Vec2", "Hubert"])
def test_encoders_of_sound(kind: str, mesh: str, length: int) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = SIZES | {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_conv_pos_embeddings": 4}
    layers = {"conv_dim": [8, 8, 8], "conv_kernel": [10, 3, 2], "conv_stride": [5, 2, 2], "num_feat_extract_layers": 3}
    config = getattr(transformers, f"{kind}Config")(**sizes | layers, **STILL, feat_extract_norm="layer")
    torch.manual_seed(0)
    model = Encoder(getattr(transformers, f"{kind}Model")(config)).double().train()
    batch = {"sound": torch.randn(2, length, dtype=torch.float64)}
    program = shardc.compile(model, batch, mesh=mesh, plan={"inputs": {"sound": "-, cp"}})
    assert_equals_eager(model, program)
    assert not type_faults(program.body)
    assert not [c for c in program.collectives() if c.kind == "all_gather" and "feature_extractor" in c.value]
