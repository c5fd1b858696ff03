"""What a model's forward asks of the sizes of its batch: run once with sizes that are symbols.

    if x.shape[1] > 10:           S > 10
    for t in range(x.shape[1]):   S = 16: the loop is written out for that size alone
    x + self.table[: x.shape[1]]  S <= 64, where the table has so many rows

torch evaluates each question for the sample and notes it as a guard: forward takes the same way for every size that
answers alike. Forward and the loss alone are run; autograd's backward asks nothing that they have not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardc import torch_compat
from shardc.frontend.experts_form import grouped
from shardc.frontend.library_experts import library_experts
from shardc.frontend.library_masks import masks_as_eager, packed_as_eager
from shardc.frontend.op_overrides import overrides
from shardc.frontend.provenance import place
from shardc.frontend.sample_call import Call
from shardc.ir.diagnostic import Diagnostic


@dataclass(frozen=True)
class SizeGuard:
    """A condition on extents, in their names, and the line of the model that asked."""

    expression: Any  # of sympy
    location: str
    source_text: str

    def holds(self, sizes: Mapping[str, int]) -> bool:
        values = {symbol: sizes[str(symbol)] for symbol in self.expression.free_symbols}
        return bool(self.expression.subs(values) == True)  # noqa: E712 (sympy's own truth)

    def diagnostic(self, sizes: Mapping[str, int]) -> Diagnostic:
        said = ", ".join(f"{symbol}={sizes[str(symbol)]}" for symbol in sorted(self.expression.free_symbols, key=str))
        return Diagnostic(
            "SC232",
            f"the program holds for {self.expression}, and {said}",
            location=self.location or None,
            source_text=self.source_text or None,
            hint="it is compiled anew for other sizes",
        )


@dataclass(frozen=True)
class SizeGuards:
    """All of them; or why forward could not be run so."""

    guards: tuple[SizeGuard, ...] = ()
    failed: str = ""

    def broken(self, sizes: Mapping[str, int]) -> SizeGuard | None:
        """The first guard that does not hold for these sizes."""
        return next((guard for guard in self.guards if not guard.holds(sizes)), None)


def size_guards(
    model: nn.Module,
    call: Call,
    loss: Callable[[Any, Any], Tensor] | None,
    extents: Mapping[str, tuple[tuple[str, int], ...]],
    sizes: Mapping[str, int],
) -> SizeGuards:
    """The guards of forward and loss on the extents of a batch, which has these sizes of them."""
    recorder = torch_compat.SizeRecorder()
    symbols = {name: recorder.symbol(name, sizes[name]) for name in extents}

    def fake(name: str, t: Tensor) -> Tensor:
        shape: list[Any] = list(t.shape)
        for extent, dims in extents.items():
            for path, dim in dims:
                if path == name:
                    shape[dim] = symbols[extent]
        return torch.empty(shape, dtype=t.dtype, device="cpu")

    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch_compat.hugging_face_patches(model))
        stack.enter_context(masks_as_eager(model))
        stack.enter_context(packed_as_eager())
        stack.enter_context(library_experts(model))
        stack.enter_context(grouped(model))
        stack.enter_context(torch_compat.override_aten(overrides()))
        stack.enter_context(recorder.active())
        own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        state = {name: torch.empty(t.shape, dtype=t.dtype, device="cpu") for name, t in own.items()}
        tensors = [fake(name, t) for name, t in zip(call.names, call.tensors, strict=True)]
        batch = call.batch(tuple(tensors))
        args, kwargs = call.arguments(batch)
        try:
            output = torch.func.functional_call(model, state, args, kwargs)
            if loss is not None:
                loss(output, batch)
        except Exception as problem:  # whatever the model, or torch, cannot do with symbols
            return SizeGuards(failed=f"{type(problem).__name__}: {str(problem).splitlines()[0][:200]}")
    guards = [SizeGuard(g, *_line(frames)) for g, frames in recorder.guards]
    return SizeGuards(tuple(guards))


def _line(frames: list[tuple[str, int]]) -> tuple[str, str]:
    return place(*frames[0]) if frames else ("", "")
