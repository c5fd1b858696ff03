"""The calls of ATen that forward makes, for sizes of extents: at each size those of one template, or another program.

    x[:, : n // 2 * 2]    with isinstance(n, int)    slice(.., 16)  slice(.., 24)  ->  slice(.., S)    and for 9 it is 8

Guards see what is asked of symbols. What code does with numbers alone is seen by running it with numbers, on tensors
without data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardc.frontend.size_guards import ForwardCall
from shardc.ir.diagnostic import Diagnostic, ShardcError, error
from shardc.symbolic.expression import Fitter, Point
from shardc.symbolic.samples import Samples
from shardc.symbolic.template import filled, merged

HINT = "it is compiled for itself"


@dataclass(frozen=True)
class Calls:
    """Each call with holes for what depends on the extents."""

    templates: list[Any]

    @classmethod
    def of(cls, samples: Samples, points: Sequence[Point]) -> Calls:
        """Raises ShardcError (SC232) with the first call that differs between the points in more than numbers."""
        every = [_run(samples, point) for point in points]
        fitter = Fitter(points, list(samples.extents))
        templates: list[Any] = []
        for alike in zip(*every, strict=False):
            template = merged([call.plain for call in alike], fitter)
            if template is None:
                said = " and ".join(dict.fromkeys(str(call.plain) for call in (alike[0], alike[-1])))
                message = f"a call has no formula: {said[:200]}"
                raise ShardcError(_placed(message, alike[0]))
            templates.append(template)
        if len({len(calls) for calls in every}) > 1:
            longest = max(every, key=len)
            message = "forward makes more calls at one size than at another"
            raise ShardcError(_placed(message, longest[len(templates)]))
        return cls(templates)

    def other(self, samples: Samples, point: Point) -> Diagnostic | None:
        """What says that forward makes other calls for these sizes; None if it makes these."""
        try:
            calls = _run(samples, point)
        except ShardcError as wrong:
            return wrong.diagnostics[0]
        said = ", ".join(f"{name}={point[name]}" for name in samples.extents)
        for template, call in zip(self.templates, calls, strict=False):
            try:
                if filled(template, point) == call.plain:
                    continue
            except ValueError:
                pass  # no whole number
            return _placed(f"forward takes another way for {said}, which no condition of the model says", call)
        if len(calls) != len(self.templates):
            return Diagnostic("SC232", f"forward makes more calls, or fewer, for {said}", hint=HINT)
        return None


def _run(samples: Samples, point: Point) -> list[ForwardCall]:
    """Raises ShardcError (SC232) where forward cannot be run."""
    calls = samples.forward.calls(samples.of_a_part(point))
    if calls is None:
        raise error("SC232", "forward cannot be run with these sizes on tensors without data", hint=HINT)
    return calls


def _placed(message: str, call: ForwardCall) -> Diagnostic:
    return Diagnostic("SC232", message, location=call.location or None, source_text=call.source_text or None, hint=HINT)
