"""`experts`: how the rows of tokens come to experts that lie over an axis of tokens; see docs/experts.md.

    experts: all_to_all                 each row is sent to the rank of its expert, and its result is sent back
    experts: {dispatch: all_gather}     each rank gets all tokens, and results are reduce-scattered

Experts over an axis along which tokens are replicated need neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast, get_args

from pydantic import ValidationInfo, field_validator, model_validator

from shardc.ir.diagnostic import Diagnostic, ShardcError, did_you_mean, error
from shardc.plan.values import FrozenValue, source_of

Dispatch = Literal["auto", "all_to_all", "all_gather"]


class Experts(FrozenValue):
    """How rows come to experts over an axis of theirs. `auto` is all_gather. In short: the dispatch."""

    dispatch: Dispatch = "auto"

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
        if value not in get_args(Dispatch):
            message = f"'experts.dispatch' should be one of {', '.join(get_args(Dispatch))}, not {value!r}"
            wrong = Diagnostic("SC208", message, hint=did_you_mean(str(value), get_args(Dispatch), "forms of dispatch"))
            source, path = source_of(info), ("experts", "dispatch")
            raise ShardcError(source.locate(wrong, *(path if path in source.lines else path[:1])))  # else in short
        return value

    def dumped(self) -> object:
        """As plain data, in its short form."""
        return self.dispatch
