"""Every function of transformers' modelling files that is cached, found in their source, and a call of each.

    @compile_compatible_method_lru_cache(maxsize=1)      CachedFunction("detr", "DetrSinePositionEmbedding",
    def build_sine_position_embedding(shape, ...)                       "build_sine_position_embedding")

The library copies functions from file to file, so that a dozen names are nearly all there is; a name that is not in
`CALLS` is one that nobody has looked at yet.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

DECORATORS = ("lru_cache", "cache", "compile_compatible_method_lru_cache")
DECORATED = re.compile(rf"^ *@(\w+\.)*({'|'.join(DECORATORS)})\b", re.MULTILINE)  # parsing all files takes seconds
FOLDER = Path(transformers.__file__).parent / "models"


class CachedFunction(NamedTuple):
    file: str
    """The folder of its modelling file."""
    owner: str
    """Its class, or ""."""
    name: str

    def __str__(self) -> str:
        return ".".join(filter(None, self))

    def module(self) -> Any:
        (file,) = (path for path in (FOLDER / self.file).glob("modeling_*.py") if self in _of_file(path))
        return importlib.import_module(f"transformers.models.{self.file}.{file.stem}")

    def function(self) -> Any:
        """As its module or its class has it: for a method, it takes what is in the place of the object first."""
        owner = getattr(self.module(), self.owner) if self.owner else self.module()
        return getattr(owner, self.name)


def cached_functions() -> list[CachedFunction]:
    return sorted({cached for path in FOLDER.glob("*/modeling_*.py") for cached in _of_file(path)})


def _of_file(path: Path) -> list[CachedFunction]:
    source = path.read_text()
    return list(_of_body(path.parent.name, "", ast.parse(source).body)) if DECORATED.search(source) else []


def _of_body(file: str, owner: str, body: list[ast.stmt]) -> Iterator[CachedFunction]:
    for statement in body:
        if isinstance(statement, ast.ClassDef):
            yield from _of_body(file, statement.name, statement.body)
        elif isinstance(statement, ast.FunctionDef) and any(map(_is_cache, statement.decorator_list)):
            yield CachedFunction(file, owner, statement.name)


def _is_cache(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return (called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")) in DECORATORS


# --------------------------------------------------------------------------------------------------------------- calls
ON = {"device": torch.device("cpu"), "dtype": torch.float32}
SHAPE = torch.Size((2, 8, 3, 4))


CALLS: dict[str, Callable[[CachedFunction, nn.Module], Any]] = {
    "build_sine_position_embedding": lambda c, _: c.function()(
        SHAPE, **ON, num_position_features=8, normalize=True, scale=6.28, temperature=10000
    ),
    "forward": lambda _, net: net.positions(SHAPE, **ON),  # of learned positions
    "generate_relative_position_index": lambda c, _: c.function()((3, 4)).float(),
    "_cached_build_2d_sinusoidal_position_embedding": lambda c, _: c.function()(width=3, height=4, embed_dim=8, **ON),
    "_cached_generate_anchors": lambda c, _: c.function()(((3, 4), (2, 2)), 0.05, **ON)[0].clamp(-9, 9),
    "generate_anchors": lambda c, _: c.function()(SimpleNamespace, ((3, 4), (2, 2)), 0.05, **ON)[0].clamp(-9, 9),
    "get_patches_center_coordinates": lambda c, _: c.function()(3, 4, **ON),
    "compute_embeddings": lambda c, net: c.function()(net.frequencies, 3, 4, 8),
    "_get_coords": lambda c, _: c.function()(SimpleNamespace, 3, 4, **ON)[1],
    # Of modules, from which no tensor comes: the cache holds modules whose weights are traced.
    "_get_conv1d_layers": lambda c, net: torch.tensor(c.function()(SimpleNamespace, net)[0].kernel_size) * 1.0,
}
"""By the name of the function: what it gives a small net, of which one tensor is asked."""


class Calls(nn.Module):
    """A small net that reads what a cached function gives."""

    def __init__(self, cached: CachedFunction) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cached, self.positions = cached, None
        if cached.name == "forward":
            self.positions = getattr(cached.module(), cached.owner)(8)
        self.a, self.convolution = nn.Linear(6, 6), nn.Conv1d(1, 1, 3)
        self.register_buffer("frequencies", torch.linspace(0.5, 1, 2))

    def forward(self, x: Tensor) -> Tensor:
        kept = CALLS[self.cached.name](self.cached, self)
        return (self.convolution(self.a(x)[:, None]) * kept.square().mean()).square().mean()
