"""Modules that their class makes anew of their config: with values in their buffers alone, or on the meta device."""

from __future__ import annotations

import inspect
import math
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

CONTENTS = (math.nan, 0.5)  # of memory that no code has written, the first and the second time
# What initialises a tensor, by name: libraries put functions of their own in the place of torch's.
_FILLS = frozenset(
    [name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")]
    + ["uniform_", "random_", "exponential_", "zero_", "fill_"]
)


@contextmanager
def meta_parameters() -> Generator[None]:
    """Build a model whose parameters have no memory, and whose buffers have the values that the model computes.

        with shardc.meta_parameters():
            model = Llama(config)

    Under `torch.device("meta")` buffers that no file holds would have no values either.
    """

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or isinstance(parameter, nn.UninitializedParameter):
            return None
        with torch.no_grad():
            meta = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        vars(meta).update(vars(parameter))
        twins = memo.setdefault(id(parameter), (parameter, meta))  # a tensor that two modules share stays one
        return twins[1]

    memo: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    handle = register_module_parameter_registration_hook(cast(Any, on_meta))
    try:
        yield
    finally:
        handle.remove()


def takes_config_alone(module: nn.Module) -> bool:
    """Whether the module is what its class makes of `module.config`: nothing else is known of how it was made."""
    if module.__dict__.get("config") is None:
        return False
    try:
        parameters = list(inspect.signature(type(module)).parameters.values())
    except (TypeError, ValueError):
        return False
    return (
        bool(parameters) and parameters[0].name == "config" and {p.name for p in parameters[1:]} <= {"device", "dtype"}
    )


class Anew:
    """The modules that classes make anew of their config, each of them once for each purpose."""

    def __init__(self, numel: int) -> None:
        self.numel = numel  # of the largest buffer
        self.outcomes: dict[tuple[int, int | None], nn.Module | Exception] = {}  # by the module and the seed

    def module(self, module: nn.Module, seed: int | None) -> nn.Module:
        """The module as its class makes it; without a seed, on the meta device."""
        key = id(module), seed
        if key not in self.outcomes:
            try:
                self.outcomes[key] = (
                    _on_meta(module) if seed is None else _rebuilt(module, CONTENTS[seed], seed, self.numel)
                )
            except Exception as problem:  # of the user's code
                self.outcomes[key] = problem
        outcome = self.outcomes[key]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def value(self, module: nn.Module, name: str, seed: int) -> Tensor | None:
        """A buffer of the module made anew, or None where it has none or the code raises with the first seed."""
        try:
            return _buffer(self.module(module, seed), name)
        except Exception:
            if seed == 0 and (id(module), 1) not in self.outcomes:
                self.outcomes[id(module), 1] = self.outcomes[id(module), 0]
                return None
            raise

    def dtype(self, module: nn.Module, name: str) -> torch.dtype:
        """The dtype of a buffer of the module made anew."""
        return self.module(module, 0).get_buffer(name).dtype

    def version(self, module: nn.Module, name: str) -> int | None:
        """How often the class writes to a buffer that it makes on the meta device."""
        try:
            buffer = _buffer(self.module(module, None), name)
        except Exception:  # of the user's code
            return None
        return None if buffer is None else buffer._version

    def is_like(self, module: nn.Module, name: str) -> bool:
        """Whether the owner of the buffer is what the class puts in that place: nobody has put another one there."""
        rebuilt = self.module(module, 0)
        for part in name.split(".")[:-1]:
            module, rebuilt = module.get_submodule(part), rebuilt.get_submodule(part)
            if type(module) is not type(rebuilt):
                return False
        return _plain(vars(module)) == _plain(vars(rebuilt))


def _rebuilt(module: nn.Module, contents: float, seed: int, numel: int) -> nn.Module:
    """The module that the class makes anew. Memory that is not written holds NaN the first time."""
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with torch.no_grad(), torch.random.fork_rng(devices=[]), meta_parameters(), _LargeOnMeta(numel):
        torch.manual_seed(seed)
        torch.use_deterministic_algorithms(math.isnan(contents), warn_only=True)  # fills what `empty` gives
        try:
            return type(module)(cast(Any, module).config)
        finally:
            torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])


def _on_meta(module: nn.Module) -> nn.Module:
    with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.device("meta"):
        return type(module)(cast(Any, module).config)


class _LargeOnMeta(TorchFunctionMode):
    """What `torch.empty` gives that is larger than every buffer is a parameter, and needs no memory.

    Nothing is done to initialise what has no memory: that takes no random numbers, but a third of a millisecond."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel = numel

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and "size" not in kwargs:
            size = args[0] if args and not isinstance(args[0], int) else args
            if math.prod(size) > self.numel:
                kwargs = {**kwargs, "device": "meta"}
        if getattr(func, "__name__", None) in _FILLS:
            tensor = args[0] if args else kwargs.get("tensor")
            if isinstance(tensor, Tensor) and tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


def _buffer(module: nn.Module, name: str) -> Tensor | None:
    return dict(module.named_buffers(remove_duplicate=False)).get(name)


def _plain(value: Any, depth: int = 0) -> Any:
    """Numbers, strings and what holds them; of a config without an `==` of its own, its attributes."""
    if isinstance(value, (int, float, complex, str, bytes, torch.dtype, torch.device, type(None))):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(v, depth) for v in cast(Any, value)]
    if isinstance(value, dict):
        skipped = ("training", "gradient_checkpointing") if depth == 0 else ()
        return {
            k: _plain(v, depth + 1)
            for k, v in cast(Any, value).items()
            if k not in skipped and not (isinstance(k, str) and k.startswith("_"))
        }
    if isinstance(value, (Tensor, nn.Module)) or callable(value) or depth > 4 or not hasattr(value, "__dict__"):
        return None
    return _plain(vars(value), depth + 1)
