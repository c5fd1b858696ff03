"""`experts`: how the rows of tokens come to experts, and how many an expert takes; see docs/experts.md.

    experts: all_to_all                       each row is sent to the rank of its expert, and its result is sent back
    experts: {dispatch: all_gather}           each rank gets all tokens, and results are reduce-scattered
    experts: {capacity: 1.25}                 of a rank's rows, an expert takes at most 1.25 times its even part
    experts: {capacity: 2, overflow: error}   a step in which one would take more fails
    experts: {load: true}                     steps say how many rows each expert was given

Experts over an axis along which tokens are replicated need no dispatch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, Self, cast, get_args

from pydantic import ValidationInfo, field_validator, model_validator

from shardc.ir.diagnostic import Diagnostic, ShardcError, did_you_mean, error
from shardc.plan.values import FrozenValue, source_of

Dispatch = Literal["auto", "all_to_all", "all_gather"]
Overflow = Literal["drop", "error"]
LARGEST = 2**20  # of a capacity: more than any number of experts, with which nothing can be dropped


class Experts(FrozenValue):
    """How rows come to experts over an axis of theirs, and how many each takes: `exact` takes all. In short: the
    dispatch."""

    dispatch: Dispatch = "auto"
    capacity: Literal["exact"] | float = "exact"
    overflow: Overflow = "drop"
    load: bool = False

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        if isinstance(value, Experts) or value == {}:
            return value
        if isinstance(value, str):
            return {"dispatch": value}
        if not isinstance(value, Mapping):
            hint = "write experts: {dispatch: all_to_all}"
            raise error("SC208", f"'experts' should be a mapping, not {value!r}", hint=hint)
        return cast(Any, value)

    @field_validator("dispatch", mode="before")
    @classmethod
    def _read_dispatch(cls, value: Any, info: ValidationInfo) -> Any:
        return _one_of("dispatch", get_args(Dispatch), value, info, "forms of dispatch")

    @field_validator("overflow", mode="before")
    @classmethod
    def _read_overflow(cls, value: Any, info: ValidationInfo) -> Any:
        value = _one_of("overflow", get_args(Overflow), value, info, "forms of overflow")
        if value == "error" and info.data.get("capacity", "exact") == "exact":
            message = "'experts.overflow' is error, and experts without a capacity take every row"
            raise _located("overflow", message, "add capacity: 1.25, or leave overflow out", info)
        return value

    @field_validator("capacity", mode="before")
    @classmethod
    def _read_capacity(cls, value: Any, info: ValidationInfo) -> Any:
        if value == "exact":
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= LARGEST:
            message = f"'experts.capacity' should be exact, or a factor of 1 or more, not {value!r}"
            low = isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value) and value < 1
            hint = "below 1 rows are dropped however evenly they are routed; 1.25 is usual" if low else "write 1.25"
            raise _located("capacity", message, hint, info)
        return float(value)

    @field_validator("load", mode="before")
    @classmethod
    def _read_load(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, bool):
            message = f"'experts.load' should be true or false, not {value!r}"
            raise _located("load", message, "write load: true", info)
        return value

    @property
    def factor(self) -> float | None:
        """By how much more than its even part of a rank's rows an expert takes at most; None: every row."""
        return None if self.capacity == "exact" else self.capacity

    @property
    def refuses_drops(self) -> bool:
        return self.overflow == "error" and self.factor is not None

    @property
    def without_refusal(self) -> Self:
        """The same, where a step that drops rows does not fail."""
        return self.model_copy(update={"overflow": "drop"})

    def dumped(self) -> object:
        """As plain data, in its short form."""
        fields = type(self).model_fields
        said = {name: value for name in fields if (value := getattr(self, name)) != fields[name].default}
        return said if said.keys() - {"dispatch"} else self.dispatch


def _one_of(key: str, choices: tuple[str, ...], value: Any, info: ValidationInfo, kind: str) -> Any:
    if value not in choices:
        message = f"'experts.{key}' should be one of {', '.join(choices)}, not {value!r}"
        raise _located(key, message, did_you_mean(str(value), choices, kind), info)
    return value


def _located(key: str, message: str, hint: str, info: ValidationInfo) -> ShardcError:
    source, path = source_of(info), ("experts", key)
    wrong = Diagnostic("SC208", message, hint=hint)
    return ShardcError(source.locate(wrong, *(path if path in source.lines else path[:1])))  # else in short
