"""Sources of parameters, read one tensor at a time, and of each tensor only the requested slices.

A source is a mapping of tensors, a safetensors file, or a directory of them with its index; several are asked in turn.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardc.ir.diagnostic import did_you_mean, error
from shardc.runtime.checkpoint.folder import find_model

Read = Callable[[tuple[slice, ...]], torch.Tensor]
Weights = Mapping[str, torch.Tensor] | str | Path
Init = Callable[[str, tuple[int, ...], torch.dtype], torch.Tensor]


@dataclass(frozen=True)
class Source:
    """Tensors by name. Each is read when it is requested."""

    names: Collection[str]
    read: Callable[[str], Read]


MANIFEST = "shardc.json"  # of a checkpoint
INDEX = "model.safetensors.index.json"


def source_of(weights: Weights) -> Source:
    if isinstance(weights, str | Path):
        return _safetensors(Path(weights))
    if not isinstance(weights, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        hint = "pass the path of safetensors, or a mapping from names to tensors"
        raise error("SC504", f"state= is a {type(weights).__name__}, and holds no weights", hint=hint)
    return _tensors(weights)


def initial(init: Init, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What `init` makes for a tensor of the model. Raises ShardcError (SC504) if that is something else."""
    value: Any = init(name, shape, dtype)
    if not isinstance(value, torch.Tensor):
        wrong = f"a {type(value).__name__}"
    elif tuple(value.shape) != shape or value.is_meta:
        wrong = f"a tensor of {list(value.shape)}" + (" without values" if value.is_meta else "")
    else:
        return value
    hint = "let init(name, shape, dtype) return a tensor of that shape"
    raise error("SC504", f"init made {wrong} for '{name}' of {list(shape)}", tensor=name, hint=hint)


def find(sources: Sequence[Source], names: Sequence[str]) -> Read | None:
    """The first source that has the tensor under one of its names."""
    return next((source.read(name) for source in sources for name in names if name in source.names), None)


def _tensors(tensors: Mapping[str, torch.Tensor]) -> Source:
    def read(name: str) -> Read:
        return lambda slices: tensors[name].detach()[slices]

    return Source({name: None for name, tensor in tensors.items() if not tensor.is_meta}, read)


def _safetensors(path: Path) -> Source:
    from safetensors import safe_open

    files = _files(find_model(path))
    opened: dict[Path, Any] = {}
    file_of: dict[str, Path] = {}
    for file in files:
        # Kept open: pages are mapped, not read, until a slice is asked for.
        opened[file] = safe_open(str(file), framework="pt")  # pyright: ignore[reportNoOverloadImplementation]
        file_of |= dict.fromkeys(opened[file].keys(), file)

    def read(name: str) -> Read:
        file = opened[file_of[name]]
        return lambda slices: file.get_slice(name)[slices] if slices else file.get_tensor(name)

    return Source(file_of, read)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    index = path / INDEX
    if index.is_file():
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return [path / name for name in sorted(set(weight_map.values()))]
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    if not files:
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = did_you_mean(path.name, [name for name in siblings if name != path.name], "files beside it")
        if (path / MANIFEST).is_file():
            hint = "it is a checkpoint: launch with init=, and then trainer.load(path)"
        raise error("SC504", f"there are no safetensors at {path}", hint=hint)
    return files
