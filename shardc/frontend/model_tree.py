"""The modules of a model, and its parameters and buffers, which a compile asks for a dozen times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn

_WALKS = ("named_parameters", "named_buffers", "_named_members")
_NAMED_MODULES = nn.Module.named_modules


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """What `model.named_modules()` yields, whose generators within generators take several times as long."""
    found: list[tuple[str, nn.Module]] = []
    seen: set[nn.Module] = set()
    todo: list[tuple[str, nn.Module]] = [("", model)]
    while todo:
        name, module = todo.pop()
        if module in seen:
            continue
        seen.add(module)
        if type(module).named_modules is not _NAMED_MODULES or "named_modules" in vars(module):
            return [*model.named_modules()]  # of which one has a method of its own
        found.append((name, module))
        if inner := vars(module)["_modules"]:
            prefix = f"{name}." if name else ""
            todo += [(prefix + key, child) for key, child in reversed(inner.items()) if child is not None]
    return found


def modules_of(model: nn.Module) -> list[nn.Module]:
    """What `model.modules()` yields."""
    return [module for _, module in named_modules(model)]


def named_tensors(model: nn.Module, remove_duplicate: bool = True) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What `model.named_parameters()` and `model.named_buffers()` yield, as dicts."""
    if not _is_plain(model):
        parameters = model.named_parameters(remove_duplicate=remove_duplicate)
        return dict(parameters), dict(model.named_buffers(remove_duplicate=remove_duplicate))
    modules = named_modules(model) if remove_duplicate else [*model.named_modules(remove_duplicate=False)]
    tables = (dict(_members(modules, table, remove_duplicate)) for table in ("_parameters", "_buffers"))
    return next(tables), next(tables)


def own_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """As `module.named_buffers(recurse=False)`, which most have none of."""
    if not vars(module)["_buffers"] and _is_plain(module):
        return []
    return [*module.named_buffers(recurse=False)]


def _is_plain(module: nn.Module) -> bool:
    """Has it torch's own methods for what it holds?"""
    own, cls = vars(module), type(module)
    return all(getattr(cls, walk) is getattr(nn.Module, walk) and walk not in own for walk in _WALKS)


def _members(
    modules: Sequence[tuple[str, nn.Module]], table: str, remove_duplicate: bool
) -> Iterator[tuple[str, Tensor]]:
    seen: set[Tensor] = set()
    for name, module in modules:
        tensors: Mapping[str, Tensor | None] = getattr(module, table)
        if not tensors:
            continue
        for key, t in tensors.items():
            if t is None or t in seen:
                continue
            if remove_duplicate:
                seen.add(t)
            yield (f"{name}.{key}" if name else key), t
