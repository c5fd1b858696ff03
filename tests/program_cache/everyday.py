"""Models as users write them, whose programs have to be kept: a config of each kind, and what stands in a module beside
its layers. As a script, it prints the key of each, or why it has none."""

import argparse
import enum
import functools
import json
import logging
import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from os import makedirs
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pydantic
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardc.compiler.preparation import prepare
from shardc.compiler.request import Request
from shardc.program_cache.digest import UncacheableError
from shardc.program_cache.key import key_of

logger = logging.getLogger(__name__)
WIDTH = 16


@dataclass(frozen=True)
class Frozen:
    width: int = WIDTH
    name: str = "small"


@dataclass
class Saved:
    width: int = WIDTH
    extra: dict[str, int] = field(default_factory=dict)

    def save(self, path: str) -> None:
        with open(path, "w") as file:
            json.dump(vars(self), file)


class Named(NamedTuple):
    width: int = WIDTH
    name: str = "small"


class Checked(pydantic.BaseModel):
    width: int = pydantic.Field(WIDTH, ge=1)
    names: list[str] = ["a"]

    @pydantic.field_validator("names")
    @classmethod
    def check(cls, names: list[str]) -> list[str]:
        return names


class FrozenChecked(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True)
    width: int = WIDTH


class Attributes(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)


class Activation(enum.Enum):
    GELU = "gelu"
    RELU = "relu"


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(self: Any, *args: Any, **kwargs: Any) -> Any:
        logger.debug("%s is called", function)
        return function(self, *args, **kwargs)

    return inner


class Block(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.norm, self.up = nn.LayerNorm(config.width), nn.Linear(config.width, 32)
        self.down, self.drop = nn.Linear(32, config.width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, config: Any, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList([block(config) for _ in range(2)])
        self.heads = nn.ModuleDict({"main": nn.Linear(config.width, 4)})
        self.register_buffer("mask", torch.tril(torch.ones(8, 8)), persistent=False)
        self.apply(self._start)

    def _start(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.heads["main"](x).square().mean()

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @classmethod
    def from_file(cls, path: str) -> Any:
        return torch.load(path)

    def save(self, path: str) -> None:
        makedirs(os.path.dirname(path), exist_ok=True)
        torch.save({"weights": self.state_dict(), "at": time.time()}, path)


class Acting(Block):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.act, self.kind = functools.partial(F.gelu, approximate="tanh"), Activation.GELU
        self.table = {"gelu": F.gelu, "relu": F.relu}

    @logged
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(x))
        h = self.act(h) if self.kind is Activation.GELU else self.table["relu"](h)
        return super().forward(x) + self.down(h)


class Attention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(config.width, 3 * config.width), nn.Linear(config.width, config.width)
        self.register_buffer("bias", torch.tril(torch.ones(8, 8)).view(1, 1, 8, 8))
        self.flash = hasattr(F, "scaled_dot_product_attention")

    @staticmethod
    @functools.lru_cache(maxsize=8)
    def angles(n: int, width: int) -> Tensor:
        return torch.arange(n)[:, None] / 10000 ** (torch.arange(0, width, 2) / width)

    def forward(self, x: Tensor) -> Tensor:
        samples, positions, width = x.size()
        first, second = x.chunk(2, dim=-1)
        angles = self.angles(positions, width).to(x)
        x = torch.cat((first * angles.cos() - second * angles.sin(), second), dim=-1)
        q, k, v = (part.view(samples, positions, 2, -1).transpose(1, 2) for part in self.qkv(x).split(width, dim=2))
        if self.flash:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
            y = scores.masked_fill(self.bias == 0, float("-inf")).softmax(-1) @ v
        return x + self.out(y.transpose(1, 2).contiguous().view(samples, positions, width))


class Holding(Block):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.slopes, self.scale, self.kind = np.array([0.5, 1.0]), np.float32(2.0), np.dtype("f4")
        self.folder, self.logger = Path("runs") / "first", logging.getLogger("a.b")
        self.history, self.counts = defaultdict(list), Counter("ab")

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(self.slopes[0])


class Trained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.metrics = Net(Frozen()), defaultdict(list)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, x: Tensor) -> Tensor:
        self.metrics["time"].append(time.time())
        return self.forward(x)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def images() -> nn.Module:
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 16, 10))


def classified(weight: float = 0.5) -> Request:
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def loss(output: Tensor, batch: Any) -> Tensor:
        return weight * criterion(output, batch[1])

    return Request(images(), (torch.randn(4, 3, 8, 8), torch.randint(0, 10, (4,))), "dp=2", loss=loss)


def of(model: nn.Module, **options: Any) -> Request:
    return Request(model, torch.randn(4, 8, WIDTH), "dp=2", **options)


def grouped() -> Request:
    model = Net(Frozen())
    groups = [[p for p in model.parameters() if (p.dim() > 1) == is_matrix] for is_matrix in (True, False)]
    decays = [{"params": group, "weight_decay": 0.1 * (i == 0)} for i, group in enumerate(groups)]
    return of(model, optimizer=torch.optim.AdamW(decays, lr=1e-3, betas=(0.9, 0.95)))


def scheduled() -> Request:
    model = Net(Frozen())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))
    return of(model, optimizer=optimizer)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=WIDTH)
    return parser.parse_args([])


MODELS: dict[str, Callable[[], Request]] = {
    "a frozen dataclass": lambda: of(Net(Frozen())),
    "a dataclass with a method that writes": lambda: of(Net(Saved())),
    "a named tuple": lambda: of(Net(Named())),
    "a namespace": lambda: of(Net(SimpleNamespace(width=WIDTH))),
    "parsed arguments": lambda: of(Net(parsed())),
    "a dict with attributes": lambda: of(Net(Attributes(width=WIDTH, inner=Attributes(a=[1])))),
    "a model of pydantic": lambda: of(Net(Checked())),
    "a frozen model of pydantic": lambda: of(Net(FrozenChecked())),
    "partials, enums, decorators, logs": lambda: of(Net(Frozen(), Acting)),
    "attention": lambda: of(Net(Frozen(), Attention)),
    "arrays, paths, loggers": lambda: of(Net(Frozen(), Holding)),
    "a module that trains itself": lambda: of(Trained()),
    "images and a loss with a variable": classified,
    "groups of AdamW": grouped,
    "SGD and a schedule": scheduled,
}


def key(build: Callable[[], Request]) -> str:
    torch.manual_seed(0)
    request = build()
    plan, fused_on = request.asked()
    try:
        return key_of(prepare(request, plan, fused_on), plan)
    except UncacheableError as refusal:
        return f"none: {refusal}"


if __name__ == "__main__":
    print(json.dumps({name: key(build) for name, build in MODELS.items()}))
