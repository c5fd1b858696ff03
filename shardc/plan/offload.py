"""The plan's `offload`: what lies in the memory of the host while no call needs it.

    offload: all                                  what backward reads of forward, and the optimizer's state
    offload: {activations: 2GiB}                  so many bytes of what backward reads, a rank
    offload: {optimizer: all, least: 256KiB}      all state, but for tensors that are smaller

Bytes are those of one rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

from pydantic import ValidationInfo, model_validator

from shardc.ir.diagnostic import Diagnostic, ShardcError, did_you_mean
from shardc.ir.ops.host_copies import LEAST
from shardc.plan.values import FrozenValue, bytes_text, read_bytes, source_of

Amount = int | Literal["all"]  # bytes a rank
AMOUNTS = ("activations", "optimizer")


class Offloading(FrozenValue):
    """`activations` that backward reads, up to so many bytes a rank; see passes/memory/offload.py. `optimizer`: its
    state, up to so many; see passes/memory/offload_states.py. Tensors smaller than `least` stay. In short: all, or
    false, which is nothing."""

    activations: Amount = 0
    optimizer: Amount = 0
    least: int = LEAST

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, Offloading):
            return value
        if value in ("all", "none") or isinstance(value, bool):
            return dict.fromkeys(AMOUNTS, "all" if value in ("all", True) else 0)
        if not isinstance(value, Mapping):
            raise _located(f"'offload' should be all, none or a mapping, not {value!r}", info)
        fields: dict[str, object] = {}
        for key, said in cast("Mapping[object, object]", value).items():
            if key not in cls.model_fields:
                hint = did_you_mean(str(key), cls.model_fields, "keys of offload")
                raise _located(f"offload has no key '{key}'", info, str(key), hint=hint)
            if key in AMOUNTS and said in ("all", "none"):
                fields[str(key)] = said if said == "all" else 0
            elif key in AMOUNTS and isinstance(said, bool):
                fields[str(key)] = "all" if said else 0
            else:
                fields[str(key)] = _bytes(said, info, str(key))
        return fields

    def dumped(self) -> object:
        """As plain data, in its short form if it has one; None where nothing is offloaded."""
        if not any(getattr(self, name) for name in AMOUNTS):
            return None
        if self == Offloading.model_validate("all"):
            return "all"
        data: dict[str, object] = {}
        for name in AMOUNTS:
            if amount := cast(Amount, getattr(self, name)):
                data[name] = amount if isinstance(amount, str) else bytes_text(amount)
        return data | ({"least": bytes_text(self.least)} if self.least != LEAST else {})


def _bytes(said: object, info: ValidationInfo, key: str) -> int:
    try:
        return read_bytes(said)
    except ShardcError:
        words = "a number of bytes" if key == "least" else "all, none or a number of bytes"
        raise _located(f"'offload.{key}' should be {words}, not {said!r}", info, key) from None


def _located(
    message: str, info: ValidationInfo, *key: str, hint: str = "write offload: {activations: 2GiB}, or offload: all"
) -> ShardcError:
    return ShardcError(source_of(info).locate(Diagnostic("SC208", message, hint=hint), "offload", *key))
