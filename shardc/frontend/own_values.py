"""Values that a model's own code gives its tensors: buffers that no file holds, and parameters of a fresh model.

A model on the meta device has no values. Its parameters and persistent buffers come from a file. A buffer that is not
persistent (the frequencies of a rotary embedding) is in no file, so the model's own code has to compute it:

    rotary._init_weights, reset_parameters, init_weights      run on a copy of the model that has memory for this alone
    type(rotary)(rotary.config)                               the module made anew, its parameters on the meta device

Each runs twice, over memory with unequal contents and with unequal random numbers. Only what is equal both times was
computed; all else is refused, with the reason. So there is never a zero, nor a random number, that nobody asked for.

A module around the owner may have changed the buffer later (`self.rotary.freq /= 2`). So the outermost module that its
class makes anew decides, as it runs the constructors of all inside it. Two things tell whether somebody wrote after it:
the version of the meta tensor, which each write in place raises, against that of a module made anew on the meta device;
and for modules around that are not made anew, whether their code names the buffer. Then the buffer is refused. A script
that assigns another tensor to an attribute of the finished model leaves no trace.
"""

from __future__ import annotations

import inspect
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from shardc.frontend.buffer_writers import INITIALIZERS, functions_of, may_write, names_in
from shardc.frontend.made_anew import CONTENTS, Anew, takes_config_alone
from shardc.frontend.model_tree import modules_of, own_buffers
from shardc.ir.default_device import on_cpu

Compute = Callable[[float, int], "Tensor | None"]  # of the contents of the memory, and the seed of random numbers
UNSET = "its own code leaves elements unset, or draws them at random"
WRITTEN = "written after its module made it"
_UNSAVED = "_non_persistent_buffers_set"  # of a module: the keys of such buffers


@dataclass
class ComputedBuffers:
    """Buffers that are in no `state_dict`, by name: their values, and why others on the meta device have none."""

    values: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    reasons: dict[str, str] = field(default_factory=dict[str, str])


@on_cpu
def computed_buffers(model: nn.Module) -> ComputedBuffers:
    """Every buffer that is not persistent: its tensor, or where that lies on the meta device what its code computes."""
    result = ComputedBuffers()
    shell: nn.Module | None = None
    anew = Anew(max((b.numel() for b in model.buffers()), default=0))
    again: Anew | None = None
    for name, buffer in non_persistent_buffers(model).items():
        if not buffer.is_meta:
            result.values[name] = buffer.detach()
            continue
        shell = shell or _shell(model)
        value, reason = _computed(model, shell, name, anew)
        default = torch.get_default_dtype()
        if value is not None and buffer.dtype.is_floating_point and buffer.dtype != default:
            # It was made with another default dtype, or cast later: these may round differently.
            again = again or Anew(anew.numel)
            torch.set_default_dtype(buffer.dtype)
            try:
                other, _ = _computed(model, shell, name, again)
            finally:
                torch.set_default_dtype(default)
            if not _same(value, other):
                value, reason = None, f"it is another in {buffer.dtype} than cast from {default}"
        if value is None:
            result.reasons[name] = reason
        else:
            result.values[name] = value
    return result


def non_persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that no `state_dict` has, under the first of their names."""
    persistent = {
        id(t) for module in modules_of(model) for key, t in own_buffers(module) if key not in vars(module)[_UNSAVED]
    }
    return {name: buffer for name, buffer in model.named_buffers() if id(buffer) not in persistent}


def own_init(model: nn.Module, seed: int) -> Callable[[str, tuple[int, ...], torch.dtype], Tensor]:
    """`init` for `launch`: a tensor as the model's own code initialises it, from random numbers of its module's own.

    A module's numbers depend on the seed and on its name alone: every rank and every layout has the same model. Raises
    LookupError with the reason where the code leaves elements of a tensor as they were.
    """
    shell = _shell(model)
    last: dict[str, dict[str, Tensor]] = {}  # of one module: its tensors are asked for one after the other

    @on_cpu
    def init(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        owner, _, key = name.rpartition(".")
        if owner not in last:
            number = zlib.crc32(f"{seed}/{owner}".encode())
            first, second = (_initialized(shell, owner, contents, number) for contents in CONTENTS)
            last.clear()
            last[owner] = {k: t.detach() for k, t in first.items() if _same(t, second.get(k))}
        if key not in last[owner]:
            raise LookupError(f"the code of {_class_of(model, owner)} leaves '{name}' uninitialised")
        return last[owner][key]

    return init


# ---------------------------------------------------------------------- one buffer
def _computed(model: nn.Module, shell: nn.Module, name: str, anew: Anew) -> tuple[Tensor | None, str]:
    """The value of a buffer on the meta device, or None and the reason."""
    owner, _, key = name.rpartition(".")
    buffer = model.get_buffer(name)
    by_init, reason = _twice(buffer, lambda contents, seed: _initialized(shell, owner, contents, seed).get(key))
    parts = owner.split(".") if owner else []
    chain = [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts) + 1)]  # the root first
    for depth, module in enumerate(chain):
        if not takes_config_alone(module):
            continue
        inner = ".".join([*parts[depth:], key])
        value, problem = by_init, ""
        if by_init is None or not _same(by_init, _as(buffer, anew.value(module, inner, 0))):
            value, problem = _twice(buffer, lambda _, seed: anew.value(module, inner, seed))  # noqa: B023
        if value is None:
            reason = problem or reason
            if problem == UNSET:
                return None, problem
            continue
        if not anew.is_like(module, inner):
            return None, f"{type(module).__name__} does not make it as it is in this model"
        cast_later = buffer._version == 0 and anew.dtype(module, inner) != buffer.dtype
        same_as_init = buffer._version == 0 and value is by_init
        if not cast_later and not same_as_init and buffer._version != anew.version(module, inner):
            return None, WRITTEN
        return (None, WRITTEN) if any(may_write(type(outer), key) for outer in chain[:depth]) else (value, "")
    if by_init is None:
        return None, reason or f"{_class_of(model, owner)} has no code that computes it"
    if buffer._version != _initialized_version(shell, owner, key, chain):
        return None, WRITTEN
    return (None, WRITTEN) if any(may_write(type(outer), key) for outer in chain[:-1]) else (by_init, "")


def _twice(buffer: Tensor, compute: Compute) -> tuple[Tensor | None, str]:
    """What code computes for a buffer, where both runs agree; else None, and the reason if the code sets it at all."""
    try:
        first, second = (compute(contents, seed) for seed, contents in enumerate(CONTENTS))
    except Exception as problem:
        return None, f"{type(problem).__name__} in its own code: {problem}"
    value = _as(buffer, first)
    if value is None or first is None:
        return None, ""
    if _same(first, second):
        return value, ""
    untouched = all(_same(t, _filled(buffer, contents)) for t, contents in zip((first, second), CONTENTS, strict=True))
    return None, "" if untouched else UNSET


def _as(buffer: Tensor, value: Tensor | None) -> Tensor | None:
    """A value in the dtype of the buffer that it is of, or None if it is none of it."""
    if value is None or value.is_meta or value.shape != buffer.shape:
        return None
    return value.to(buffer.dtype) if value.dtype.is_floating_point == buffer.dtype.is_floating_point else None


def _same(first: Tensor | None, second: Tensor | None) -> bool:
    """Equal bit by bit, NaN included."""
    if first is None or second is None or first.shape != second.shape or first.dtype != second.dtype:
        return False
    a, b = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (first, second))
    return torch.equal(a, b)


def _class_of(model: nn.Module, owner: str) -> str:
    return type(model.get_submodule(owner)).__name__


# ---------------------------------------------------------------------- initialisers
def _initialized(shell: nn.Module, owner: str, contents: float | None, seed: int) -> dict[str, Tensor]:
    """The tensors that a module owns, after its own initialiser and those of the modules around it.

    Without contents, their memory is on the meta device.
    """
    root = module = _copied(shell)
    for name in owner.split(".") if owner else ():
        inner = vars(module)["_modules"]
        inner[name] = module = _copied(inner[name])
    for table in _tables(module):
        for key, t in table.items():
            if t is not None:
                memory = torch.empty_like(t, device="meta") if contents is None else _filled(t, contents)
                is_parameter = isinstance(t, nn.Parameter)
                table[key] = nn.Parameter(memory, requires_grad=t.requires_grad) if is_parameter else memory
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for call in _initializers(root, owner):
            call()
    return {key: t for table in _tables(module) for key, t in table.items() if t is not None}


def _initialized_version(shell: nn.Module, owner: str, key: str, chain: list[nn.Module]) -> int | None:
    """The version of a buffer that was made on the meta device, if nobody but initialisers wrote to it.

    They count only if the constructor of the module, or of one around it, calls them.
    """
    names = {name for m in chain for f in functions_of(type(m)) if f.__name__ == "__init__" for name in names_in(f)}
    if names.isdisjoint(INITIALIZERS):
        return 0
    try:
        with torch.device("meta"):
            return _initialized(shell, owner, None, 0)[key]._version
    except Exception:  # of the user's code
        return None


def _tables(module: nn.Module) -> tuple[dict[str, Tensor | None], ...]:
    """The parameters and the buffers that a module owns."""
    return vars(module)["_parameters"], vars(module)["_buffers"]


def _initializers(root: nn.Module, owner: str) -> Iterator[Callable[[], object]]:
    """What initialises a module: torch's `reset_parameters`, then `_init_weights`, which a model calls on each of its
    modules, first inner, then outer ones."""
    parts = owner.split(".") if owner else []
    chain = [root.get_submodule(".".join(parts[:depth])) for depth in range(len(parts), -1, -1)]
    module = chain[0]
    for name in INITIALIZERS:
        method = getattr(module, name, None)
        # Of a model that has `_init_weights(module)`, `init_weights` goes through all of its modules.
        if (
            callable(method)
            and not _takes_module(getattr(module, "_init_weights", None))
            and _needs_no_argument(method)
        ):
            yield method
            break
    for i, of in enumerate(chain):
        by = next((outer for outer in chain[i:] if _takes_module(getattr(outer, "_init_weights", None))), None)
        if by is not None:
            yield lambda by=by, of=of: cast(Any, by)._init_weights(of)


def _shell(module: nn.Module) -> nn.Module:
    """A copy of a module tree whose tensors all lie on the meta device: what is run on it does not touch the model."""
    return _Shells().of(module)


class _Shells:
    """Copies of modules, each of which is made once; `torch.empty_like` is asked once how it lays out a geometry."""

    def __init__(self) -> None:
        self._shells: dict[int, nn.Module] = {}
        self._strides: dict[object, tuple[int, ...]] = {}

    def of(self, module: nn.Module) -> nn.Module:
        if id(module) not in self._shells:
            shell = self._shells[id(module)] = _copied(module)
            for table in _tables(shell):
                table |= {key: self._meta(t) for key, t in table.items() if t is not None}
            vars(shell)["_modules"] = {k: m if m is None else self.of(m) for k, m in vars(module)["_modules"].items()}
        return self._shells[id(module)]

    def _meta(self, t: Tensor) -> Tensor:
        if type(t) not in (Tensor, nn.Parameter) or t.layout is not torch.strided:
            value = torch.empty_like(t, device="meta")
        else:
            key = t.size(), t.stride()
            strides = self._strides.get(key)
            if strides is None:
                strides = self._strides[key] = torch.empty_like(t, device="meta").stride()
            value = torch.empty_strided(key[0], strides, dtype=t.dtype, device="meta")
        return nn.Parameter(value, requires_grad=t.requires_grad) if isinstance(t, nn.Parameter) else value


def _copied(module: nn.Module) -> nn.Module:
    """The same module, to which other tensors and modules may be given."""
    copied = module.__class__.__new__(module.__class__)
    copied.__dict__ = dict(vars(module))
    for kind in ("_parameters", "_buffers", "_modules", _UNSAVED):
        vars(copied)[kind] = vars(module)[kind].copy()
    return copied


def _filled(t: Tensor, contents: float) -> Tensor:
    """Memory like a tensor's, with contents that no code would leave there."""
    if t.dtype.is_floating_point or t.dtype.is_complex:
        return torch.full_like(t, contents, device="cpu")
    return torch.full_like(t, math.isnan(contents), device="cpu") + (0 if t.dtype == torch.bool else 1)


def _needs_no_argument(method: Callable[..., object]) -> bool:
    try:
        inspect.signature(method).bind()
    except (TypeError, ValueError):
        return False
    return True


def _takes_module(method: Callable[..., object] | None) -> bool:
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind(None)
    except (TypeError, ValueError):
        return False
    return True
