"""What a plan says of compute that runs beside collectives: `overlap: false`, or `overlap: {late_gradients: false}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from pydantic import ValidationInfo, model_validator

from shardc.ir.diagnostic import Diagnostic, ShardcError, did_you_mean
from shardc.plan.values import FrozenValue, source_of


class Overlapping(FrozenValue):
    """`late_gradients`: products that make gradients of weights run behind the collectives of backward; see
    passes/communication/late_gradients.py. `prefetch`: what gathers of parameters send is made when they may begin; see
    passes/communication/prefetch.py. In short: false, which is nothing of this, or true."""

    late_gradients: bool = True
    prefetch: bool = True

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, Overlapping):
            return value
        if isinstance(value, bool):
            return dict.fromkeys(cls.model_fields, value)
        if not isinstance(value, Mapping):
            raise _located(f"'overlap' should be true, false or a mapping, not {value!r}", info)
        for key, said in cast("Mapping[object, object]", value).items():
            if key not in cls.model_fields:
                hint = did_you_mean(str(key), cls.model_fields, "keys of overlap")
                raise _located(f"overlap has no key '{key}'", info, str(key), hint=hint)
            if not isinstance(said, bool):
                raise _located(f"'overlap.{key}' should be true or false, not {said!r}", info, str(key))
        return cast(Any, value)

    def dumped(self) -> object:
        """As plain data, in its short form; None where it is the default."""
        off = {name: False for name in type(self).model_fields if not getattr(self, name)}
        return False if len(off) == len(type(self).model_fields) and len(off) > 1 else off or None


def _located(
    message: str, info: ValidationInfo, *key: str, hint: str = "write overlap: {late_gradients: false}"
) -> ShardcError:
    return ShardcError(source_of(info).locate(Diagnostic("SC208", message, hint=hint), "overlap", *key))
