"""Models that are no dense transformers: a plan compiles and verifies, or an error says why there is none."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    TimesformerConfig,
    TimesformerForVideoClassification,
)

import shardc
from shardc import Plan, ShardcError


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.norm2(self.second(torch.relu(self.norm1(self.first(x))))))


class ResNet(nn.Module):
    """Three equal blocks, whose batch norm takes its statistics from all ranks' rows."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 2, 1)
        self.blocks = nn.Sequential(*(Residual(width) for _ in range(3)))
        self.head = nn.Linear(width, 4)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)).mean((2, 3))).square().mean()


class UNet(nn.Module):
    """One level: what goes down is concatenated with what comes up."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down, self.low = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 2 * width, 3, padding=1)
        self.norm = nn.GroupNorm(4, 2 * width)
        self.up, self.out = nn.Conv2d(3 * width, width, 3, padding=1), nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = torch.relu(self.down(x))
        b = torch.relu(self.norm(self.low(F.max_pool2d(a, 2))))
        up = F.interpolate(b, scale_factor=2.0)
        return (self.out(torch.relu(self.up(torch.cat([up, a], 1)))) - x).square().mean()


def mixtral() -> nn.Module:
    config = MixtralConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        num_local_experts=4,
        vocab_size=64,
        max_position_embeddings=16,
        use_cache=False,
    )
    return AutoModelForCausalLM.from_config(config)


def images(device: str) -> tuple[Tensor]:
    return ((torch.ones(16, 3, 8, 8) if device == "meta" else torch.randn(16, 3, 8, 8)).to(device),)


def tokens(device: str) -> dict[str, Tensor]:
    ids = torch.randint(64, (16, 16)).to(device)
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize(
    ("make", "batch", "keep"),
    [
        pytest.param(ResNet, images, {"mesh": "dp=4"}, marks=pytest.mark.long),
        (ResNet, images, {"mesh": "dp=2, tp=2"}),
        (UNet, images, {"mesh": "dp=4"}),
        pytest.param(mixtral, tokens, {"mesh": "ep=2, tp=2"}, marks=pytest.mark.long),
    ],
)
def test_plans_compile_and_verify(
    make: Callable[[], nn.Module], batch: Callable[[str], object], keep: dict[str, str]
) -> None:
    with torch.device("meta"):
        model = make()
    ranking = shardc.autoplan(model, batch("meta"), gpus=4, keep=keep, precision=None, top=1, confirm=0)
    program = shardc.compile(make(), batch("cpu"), plan=Plan.parse(ranking.best.yaml()))
    assert program.mesh.world_size == 4
    assert program.verify().ok


class Placeholders(nn.Module):
    """Features take the places of the tokens that say so: as many as there are, which forward asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(8, 16), nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, ids: Tensor, features: Tensor) -> Tensor:
        if int((ids == 7).sum()) != features.shape[0] * features.shape[1]:
            raise ValueError("features and their places do not match")
        x = self.embed(ids).masked_scatter((ids == 7)[..., None], features)
        for block in self.blocks:
            x = torch.relu(block(x))
        return x.square().mean()


def timesformer() -> nn.Module:
    """Which reshapes rows and frames to each other."""
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": 1}
    return TimesformerForVideoClassification(TimesformerConfig(image_size=16, patch_size=8, num_frames=8, **sizes))


def placeholders() -> dict[str, Tensor]:
    ids = torch.randint(7, (8, 6))
    ids[:, 1:3] = 7
    return {"ids": ids, "features": torch.randn(8, 2, 16)}


@pytest.mark.parametrize("keep", [{}, {"mesh": "pp=2"}])
def test_what_forward_asks_of_the_batch_is_answered_by_its_rows(keep: dict[str, str]) -> None:
    """Of few rows and of many; two equal blocks are enough for two stages."""
    ranking = shardc.autoplan(Placeholders(), placeholders(), gpus=4, keep=keep, precision=None, top=1)
    program = shardc.compile(Placeholders(), placeholders(), plan=ranking.best.plan)
    assert (program.mesh.world_size, program.mesh.size(("pp",)) if keep else 2) == (4, 2)
    assert program.verify().ok


def test_rows_and_frames_of_one_class_are_not_both_divided() -> None:
    model, batch = timesformer(), {"pixel_values": torch.randn(4, 8, 3, 16, 16), "labels": torch.zeros(4).long()}
    ranking = shardc.autoplan(model, batch, gpus=4, keep={"mesh": "dp=4"}, precision=None, top=1, confirm=0)
    assert str(ranking.best.plan.inputs["pixel_values"].placement).startswith("dp, -")
    assert shardc.compile(model, batch, plan=ranking.best.plan).verify().ok


def test_a_model_that_needs_two_rows_says_so() -> None:
    """A batch norm over one place of one row has no variance."""
    with pytest.raises(ShardcError) as caught:
        shardc.autoplan(ResNet(), torch.randn(8, 3, 2, 2), gpus=4, precision=None)
    assert caught.value.code == "SC251"
    assert "not on one" in str(caught.value)


@pytest.mark.parametrize(("mesh", "words"), [("dp=2, tp=2", "over the kept tp=2"), ("pp=4", "the kept pp=4 has more")])
def test_a_kept_axis_that_takes_nothing_is_refused_by_its_name(mesh: str, words: str) -> None:
    with pytest.raises(ShardcError) as caught:
        shardc.autoplan(UNet(), images("cpu"), gpus=4, keep={"mesh": mesh}, precision=None)
    assert caught.value.code == "SC251"
    assert words in str(caught.value)


def test_an_axis_that_only_the_kept_plan_uses_is_planned_for() -> None:
    keep = {"mesh": "dp=2, tp=2", "params": {"low.weight": "tp, -, -, -"}}
    ranking = shardc.autoplan(UNet(), images("cpu"), gpus=4, keep=keep, precision=None, top=1, confirm=0)
    mesh = ranking.best.plan.mesh
    assert mesh is not None
    assert dict(mesh.axes) == {"dp": 2, "tp": 2}
    assert str(ranking.best.plan.params["low.weight"].placement) == "tp, -, -, -"
    assert shardc.compile(UNet(), images("cpu"), plan=Plan.parse(ranking.best.yaml())).verify().ok
