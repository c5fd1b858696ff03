"""A model with few of its equal layers, which costs as much to trace as it has different ones.

    model.layers   32 elements of one form         layers 0 and 1 are kept, and each stands for 16
    model.layers   [window, window, full] x 8      a run of period 3: 6 are kept, and each stands for 4
    layer3         [down, block x 22]              down and two blocks are kept

Two elements of a list are of one form when their modules, their parameters' shapes and their plain attributes are the
same. Numbers that count the elements (`layer_idx`) do not matter, and of floats only whether they are 0: a rate of
dropout changes no cost, and none at all does. The reduced model shares modules and parameters with the model, which
stays as it is; elements keep their names.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from shardc.torch_compat import with_children

KEPT = 2  # repetitions that stay
LONGEST_PERIOD = 12
PLAIN = (int, str, bool, type(None))


@dataclass(frozen=True)
class Run:
    """Elements of the list `path`: `count` repetitions of `period` elements, from the element `start` on."""

    path: str
    start: int
    period: int
    count: int

    @property
    def removed(self) -> int:
        return (self.count - KEPT) * self.period

    def unit(self, fqn: str) -> int | None:
        """Which repetition a module is in, by its name; None for those outside."""
        prefix = f"{self.path}." if self.path else ""
        if not fqn.startswith(prefix):
            return None
        segment = fqn[len(prefix) :].partition(".")[0]
        index = int(segment) - self.start if segment.isdecimal() else -1
        return index // self.period if 0 <= index < self.count * self.period else None


def equal_runs(model: nn.Module) -> tuple[Run, ...]:
    """The runs of equal elements, two repetitions or more, of the outermost lists that have one."""
    return tuple(_runs(model, ""))


def reduced(model: nn.Module, runs: Sequence[Run], kept: int = KEPT) -> nn.Module:
    """The model with the first repetitions of each run alone."""
    for run in runs:
        gone = {str(run.start + i) for i in range(kept * run.period, run.count * run.period)}
        model = _replaced(model, run.path.split(".") if run.path else [], gone)
    return model


def _replaced(module: nn.Module, path: Sequence[str], gone: set[str]) -> nn.Module:
    if not path:
        return with_children(module, {}, gone)
    child = module.get_submodule(path[0])
    return with_children(module, {path[0]: _replaced(child, path[1:], gone)})


def _runs(module: nn.Module, path: str) -> Iterator[Run]:
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    run = _longest(path, list(module.children())) if is_list else None
    if run is not None:
        yield run
        return
    for name, child in module.named_children():
        yield from _runs(child, f"{path}.{name}" if path else name)


def _longest(path: str, elements: Sequence[nn.Module]) -> Run | None:
    forms = _forms(elements)
    best: Run | None = None
    for period in range(1, min(LONGEST_PERIOD, len(forms) // KEPT) + 1):
        start = 0
        while start + period <= len(forms):
            end = start
            while end + period < len(forms) and forms[end] == forms[end + period]:
                end += 1
            count = (end - start) // period + 1
            run = Run(path, start, period, count)
            if count >= KEPT and (best is None or run.removed > best.removed):
                best = run
            start = end + 1
    return best


def _forms(elements: Sequence[nn.Module]) -> list[Hashable]:
    """A value an element, equal for those of one form."""
    described = [_described(element) for element in elements]
    counting = {
        key
        for key, first in (described[0].items() if described else ())
        if type(first) is int and len(described) > 1 and [d.get(key) for d in described] == _from(first, len(described))
    }
    return [frozenset((key, value) for key, value in d.items() if key not in counting) for d in described]


def _from(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


def _described(element: nn.Module) -> Mapping[str, Hashable]:
    about: dict[str, Hashable] = {}
    for name, module in element.named_modules():
        about[f"{name}:class"] = type(module)
        for key, value in vars(module).items():
            if key.startswith("_") or key == "training":
                continue
            if isinstance(value, PLAIN):
                about[f"{name}:{key}"] = value
            elif isinstance(value, float):
                about[f"{name}:{key}"] = value == 0.0
            elif isinstance(value, tuple) and all(isinstance(v, (*PLAIN, float)) for v in value):  # type: ignore[misc]
                about[f"{name}:{key}"] = value
    for name, tensor in (*element.named_parameters(), *element.named_buffers()):
        about[f"{name}:tensor"] = (tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
    return about
