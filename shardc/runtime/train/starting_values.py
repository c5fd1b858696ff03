"""Where the values that a trainer starts from come from: in this order, each tensor from the first that has it.

    state=      a mapping, a path of safetensors, or several of them in turn
    the model   unless it lies on the meta device
    constants   tensors that the program has for its own: what forward made, buffers that are in no `state_dict`
    init=       makes what nothing else has; "model" has the model's own code initialise it

A buffer that no file holds is never given to `init`, which knows of it a name and a shape: what the model would have
computed is in `constants`, or the launch is refused (SC561).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from shardc.frontend.own_values import own_init
from shardc.frontend.provenance import named_at
from shardc.ir.diagnostic import Diagnostic, ShardcError, error, suggest
from shardc.ir.graph import Port
from shardc.ir.program import CONSTANT
from shardc.ir.types import TensorType
from shardc.runtime.checkpoint.weights import Init, Read, Source, find, initial
from shardc.runtime.oracle.simulate import missing

SHOWN = 5  # names in a message


@dataclass(frozen=True)
class StartingValues:
    """`reasons` says, by name, why the code of the `model`, if there is one, gives a buffer no value."""

    sources: Sequence[Source]
    init: Init | None = None
    model: nn.Module | None = None
    reasons: Mapping[str, str] = field(default_factory=dict[str, str])

    def check(self, ports: Collection[Port], unsaved: Collection[str]) -> None:
        """Better to miss a tensor now than after an hour of loading others. No file holds the `unsaved` buffers."""
        absent = [port for port in ports if self._find(port) is None]
        computed = [port for port in absent if port.role == "buffer" and port.name in unsaved]
        if computed:
            raise ShardcError(self._uncomputed(computed))
        if absent and self.init is None:
            weights = [name for source in self.sources for name in source.names if ":" not in name]  # no optimizer's
            guess = suggest(absent[0].name, weights)
            hint = (
                "pass state=, the path of safetensors or a mapping; or init=, a function that makes one tensor at a "
                'time, or "model", the model\'s own initialisation'
            )
            on_meta = self.model is not None and any(p.is_meta for p in self.model.parameters())
            if on_meta and guess is None:
                hint = f"the model lies on the meta device and has no values: {hint}; then trainer.load(...)"
            raise ShardcError(missing(absent, f"did you mean '{guess}'?" if guess else hint))

    def read(self, port: Port, type: TensorType) -> Read:
        read = self._find(port)
        if read is not None:
            return read
        assert self.init is not None, f"{port.name} was looked for already"
        return initial(self.init, port.name, type.shape, type.dtype).__getitem__

    def _find(self, port: Port) -> Read | None:
        return find(self.sources, (port.name, *port.aliases))

    def _uncomputed(self, ports: Sequence[Port]) -> Diagnostic:
        first, *others = (port.name for port in ports)
        if first.startswith(CONSTANT):
            message = "forward reads a tensor that is neither a parameter nor a buffer, and lies on the meta device"
            hint = "self.register_buffer(...) it, or build the model under shardc.meta_parameters()"
            return Diagnostic("SC561", message, hint=hint)
        message = f"the buffer '{first}' is in no state_dict, and has no value"
        message += f"; nor have {len(others)} others" if others else ""
        cause = self.reasons.get(first, "the program was compiled without its values")
        if others:
            cause += "\nwithout values too: " + ", ".join(others[:SHOWN]) + (", ..." if others[SHOWN:] else "")
        hint = (
            "build the model under shardc.meta_parameters() instead of torch.device('meta'); or give its module a "
            f"reset_parameters() that computes it; or pass the value: launch(state=[folder, {{'{first}': tensor}}])"
        )
        fqn, where = named_at(self.model, first) if self.model is not None else ("", dict[str, str | None]())
        return Diagnostic(
            "SC561",
            message,
            location=where.get("location"),
            source_text=where.get("source_text"),
            fqn=fqn or None,
            tensor=first,
            cause=cause,
            hint=hint,
        )


def init_of(init: Init | str | None, model: nn.Module | None, seed: int) -> Init | None:
    """What `launch(init=)` was given, as a function."""
    if init is None or callable(init):
        return init
    if init != "model":
        raise error("SC553", f"init={init!r} makes no tensors", hint='pass a function (name, shape, dtype), or "model"')
    if model is None:
        message = 'init="model" needs the model, and a program from a file has none'
        raise error("SC553", message, hint="compile the model here, or pass a function (name, shape, dtype)")
    own: Callable[[str, tuple[int, ...], torch.dtype], torch.Tensor] = own_init(model, seed)

    def by_model(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        try:
            return own(name, shape, dtype)
        except Exception as problem:
            reason = str(problem) if isinstance(problem, LookupError) else f"{type(problem).__name__}: {problem}"
            hint = "give its module a reset_parameters(), or pass init=, a function (name, shape, dtype)"
            raise error(
                "SC504", f"the model does not initialise '{name}'", tensor=name, cause=reason, hint=hint
            ) from problem

    return by_model
