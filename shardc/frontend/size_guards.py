"""What a model's forward asks of the sizes of its batch: run once with sizes that are symbols.

    if x.shape[1] > 10:           S > 10
    for t in range(x.shape[1]):   S = 16: the loop is written out for that size alone
    x + self.table[: x.shape[1]]  S <= 64, where the table has so many rows

torch evaluates each question for the sample and notes it as a guard: forward takes the same way for every size that
answers alike. Forward and the loss alone are run; autograd's backward asks nothing that they have not.

Code may also tell a symbol from a number, `isinstance(n, int)`, and go another way than with numbers: no guard says so.
So `forward_calls` runs forward with whole numbers, and lists the calls of ATen that it makes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardc import torch_compat
from shardc.frontend.evaluation_mode import evaluating
from shardc.frontend.experts_form import grouped
from shardc.frontend.library_experts import library_experts
from shardc.frontend.library_masks import masks_as_eager, packed_as_eager
from shardc.frontend.op_overrides import overrides
from shardc.frontend.provenance import place
from shardc.frontend.sample_call import Call
from shardc.ir.diagnostic import Diagnostic

Dims = Mapping[str, tuple[tuple[str, int], ...]]


@dataclass(frozen=True)
class SizeGuard:
    """A condition on extents, in their names, and the line of the model that asked. Of extents that are divided into
    `parts`, microbatches, it is one on a part."""

    expression: Any  # of sympy
    location: str
    source_text: str
    parts: Mapping[str, int] = field(default_factory=dict[str, int])

    def holds(self, sizes: Mapping[str, int]) -> bool:
        values = {symbol: self._part(sizes, symbol) for symbol in self.expression.free_symbols}
        return bool(self.expression.subs(values) == True)  # noqa: E712 (sympy's own truth)

    def _part(self, sizes: Mapping[str, int], symbol: Any) -> int:
        return sizes[str(symbol)] // self.parts.get(str(symbol), 1)

    def __str__(self) -> str:
        divided = [str(s) for s in self.expression.free_symbols if self.parts.get(str(s), 1) > 1]
        return f"{self.expression}" + (f" ({', '.join(sorted(divided))} of a microbatch)" if divided else "")

    def diagnostic(self, sizes: Mapping[str, int]) -> Diagnostic:
        symbols = sorted(self.expression.free_symbols, key=str)
        said = ", ".join(f"{symbol}={self._part(sizes, symbol)}" for symbol in symbols)
        return Diagnostic(
            "SC232",
            f"the program holds for {self}, and {said}",
            location=self.location or None,
            source_text=self.source_text or None,
            hint="it is compiled anew for other sizes",
        )


@dataclass(frozen=True)
class Failure:
    """The error that forward came to, and the line of the model that led to it."""

    error: str
    location: str
    source_text: str


@dataclass(frozen=True)
class SizeGuards:
    """All of them; or why forward could not be run so."""

    guards: tuple[SizeGuard, ...] = ()
    failure: Failure | None = None

    def broken(self, sizes: Mapping[str, int]) -> SizeGuard | None:
        """The first guard that does not hold for these sizes."""
        return next((guard for guard in self.guards if not guard.holds(sizes)), None)

    def unknown(self, message: str, hint: str | None = None) -> Diagnostic | None:
        """What says, with the model's line, that it is not known what forward asks; None if it is."""
        if (why := self.failure) is None:
            return None
        return Diagnostic(
            "SC232",
            message,
            location=why.location or None,
            source_text=why.source_text or None,
            cause=f"forward cannot be run on sizes that are symbols: {why.error}",
            hint=hint,
        )


@dataclass(frozen=True)
class ForwardCall:
    """A call of ATen in forward: the op, and its arguments, of tensors their dtypes and shapes; and its line."""

    plain: list[Any]
    location: str
    source_text: str


@dataclass(frozen=True)
class Forward:
    """Forward and loss of a model, on batches that are like one but for the sizes of extents."""

    model: nn.Module
    call: Call
    loss: Callable[[Any, Any], Tensor] | None
    extents: Dims
    evaluates: bool = False  # as `model.eval()` makes the model

    def guards(self, sizes: Mapping[str, int], parts: Mapping[str, int]) -> SizeGuards:
        """What it asks of extents that have these sizes, each of them one of the parts of an extent of the plan's."""
        recorder = torch_compat.SizeRecorder()
        symbols = {name: recorder.symbol(name, sizes[name]) for name in self.extents}
        if (why := self._run(symbols, recorder.active())) is not None:
            return SizeGuards(failure=why)
        return SizeGuards(tuple(SizeGuard(g, *_line(frames), parts) for g, frames in recorder.guards))

    def calls(self, sizes: Mapping[str, int]) -> list[ForwardCall] | None:
        """The calls that it makes with these sizes; None where it cannot be run."""
        log = torch_compat.CallLog()
        if self._run(sizes, log.active()) is not None:
            return None
        return [ForwardCall(plain, *_line(frames)) for plain, frames in log.calls]

    def _run(self, sizes: Mapping[str, Any], recording: Any) -> Failure | None:
        """Run it; what failed, if it did."""
        with evaluating(self.model, on=self.evaluates), _as_traced(self.model), recording:
            own = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
            state = {name: torch.empty(t.shape, dtype=t.dtype, device="cpu") for name, t in own.items()}
            tensors = [self._fake(name, t, sizes) for name, t in zip(self.call.names, self.call.tensors, strict=True)]
            batch = self.call.batch(tuple(tensors))
            args, kwargs = self.call.arguments(batch)
            try:
                output = torch.func.functional_call(self.model, state, args, kwargs)
                if self.loss is not None:
                    self.loss(output, batch)
            except Exception as problem:  # whatever the model, or torch, cannot do so
                said = f"{type(problem).__name__}: {str(problem).split(chr(10))[0][:200]}"
                return Failure(said, *_line(torch_compat.frames_outside_of(problem)))
        return None

    def _fake(self, name: str, t: Tensor, sizes: Mapping[str, Any]) -> Tensor:
        shape: list[Any] = list(t.shape)
        for extent, dims in self.extents.items():
            for path, dim in dims:
                if path == name:
                    shape[dim] = sizes[extent]
        return torch.empty(shape, dtype=t.dtype, device="cpu")


@contextmanager
def _as_traced(model: nn.Module) -> Generator[None]:
    """What is put in the place of library code while a model is traced."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch_compat.hugging_face_patches(model.modules()))
        stack.enter_context(masks_as_eager(model))
        stack.enter_context(packed_as_eager())
        stack.enter_context(library_experts(model))
        stack.enter_context(grouped(model))
        stack.enter_context(torch_compat.override_aten(overrides()))
        yield


def _line(frames: list[tuple[str, int]]) -> tuple[str, str]:
    return place(*frames[0]) if frames else ("", "")
