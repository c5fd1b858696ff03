"""Connectionist temporal classification: sequence by sequence."""

from __future__ import annotations

from shardc.ir.ops.ctc import CTC, CTC_GRAD
from shardc.rules.registry import example, rule

_RANGES = {"targets": range(1, 5), "input_lengths": range(4, 7), "target_lengths": range(3)}

rule(
    CTC,
    "t n c, n s, n, n -> n",
    whole="t c s",
    examples=[example((6, 4, 5), (4, 2), (4,), (4,), 0, ints=_RANGES)],
)
rule(
    CTC_GRAD,
    "n, t n c, n s, n, n -> t n c",
    whole="t c s",
    linear=(0,),
    examples=[
        example((4,), (6, 4, 5), (4, 2), (4,), (4,), 0, zero_infinity, ints=_RANGES) for zero_infinity in (False, True)
    ],
)
