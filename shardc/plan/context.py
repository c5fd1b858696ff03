"""`context`: how attention runs where the sequence lies over an axis; see docs/context.md.

    context: ring                                         keys and values travel round the ranks of the axis
    context: {attention: all_to_all}                      heads are divided instead, for the time of attention
    context: {axis: cp, attention: all_gather}            of this axis alone
    context: {axis: out.in, attention: hierarchical}      all-to-all along `in`, ring along `out`
    context: {keys: merge}                                keys that lie over an axis and rows do not stay there
    context: {balance: zigzag}                            each rank has a run of rows from the front, one from the back

What shards the sequence is said where anything is placed: `inputs: {input_ids: "dp, cp"}`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, cast, get_args

from pydantic import ValidationInfo, field_validator, model_validator

from shardc.ir.diagnostic import Diagnostic, ShardcError, did_you_mean, error
from shardc.ir.mesh import Mesh
from shardc.plan.values import FrozenValue, source_of

Attention = Literal["auto", "ring", "all_gather", "all_to_all", "hierarchical"]
Balance = Literal["auto", "zigzag", "none"]
Keys = Literal["auto", "all_gather", "merge"]


class Context(FrozenValue):
    """Of the axes that shard a sequence, major first (none said: whichever do): how its attention runs, and whether its
    rows lie so that causal attention is as much work on all ranks. `keys`: how it runs where an axis shards keys alone.
    In short: the strategy."""

    axis: tuple[str, ...] = ()
    attention: Attention = "auto"
    balance: Balance = "auto"
    keys: Keys = "auto"

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        if isinstance(value, Context) or value == {}:
            return value
        if isinstance(value, str):
            return {"attention": value}
        if not isinstance(value, Mapping):
            hint = "write context: {axis: cp, attention: ring}"
            raise error("SC208", f"'context' should be a mapping, not {value!r}", hint=hint)
        return cast(Any, value)

    @field_validator("axis", mode="before")
    @classmethod
    def _read_axis(cls, value: Any, info: ValidationInfo) -> Any:
        axes = value.split(".") if isinstance(value, str) else value
        names = [str(axis).strip() for axis in cast(Sequence[object], axes)] if isinstance(axes, list | tuple) else []
        if not names or not all(names) or len({*names}) < len(names):
            message = f"'context.axis' should be an axis, or several, major first, not {value!r}"
            raise _located("axis", message, "write axis: cp, or axis: out.in", info)
        return tuple(names)

    @field_validator("attention", mode="before")
    @classmethod
    def _read_attention(cls, value: Any, info: ValidationInfo) -> Any:
        axes = info.data.get("axis", ())
        value = _one_of("attention", get_args(Attention), value, info, "strategies")
        if value == "hierarchical" and len(axes) == 1:
            message = f"'context.attention' is hierarchical, which needs two axes, and 'context.axis' is {axes[0]}"
            raise _located("attention", message, "name both, the outer one first: axis: out.in", info)
        return value

    @field_validator("balance", mode="before")
    @classmethod
    def _read_balance(cls, value: Any, info: ValidationInfo) -> Any:
        return _one_of("balance", get_args(Balance), value, info, "balances")

    @field_validator("keys", mode="before")
    @classmethod
    def _read_keys(cls, value: Any, info: ValidationInfo) -> Any:
        return _one_of("keys", get_args(Keys), value, info, "strategies")

    def on(self, mesh: Mesh) -> Self:
        """Itself; ShardcError (SC201) where the mesh lacks one of the axes."""
        for axis in self.axis:
            mesh.resolve(axis)
        return self

    def dumped(self) -> object:
        """As plain data, in its short form."""
        said: dict[str, object] = {"axis": ".".join(self.axis)} if self.axis else {}
        if self.attention != "auto":
            said["attention"] = self.attention
        if self.balance != "auto":
            said["balance"] = self.balance
        if self.keys != "auto":
            said["keys"] = self.keys
        return said if said.keys() - {"attention"} else self.attention


def _one_of(key: str, choices: tuple[str, ...], value: Any, info: ValidationInfo, kind: str) -> Any:
    if value not in choices:
        message = f"'context.{key}' should be one of {', '.join(choices)}, not {value!r}"
        raise _located(key, message, did_you_mean(str(value), choices, kind), info)
    return value


def _located(key: str, message: str, hint: str, info: ValidationInfo) -> ShardcError:
    source, path = source_of(info), ("context", key)
    wrong = Diagnostic("SC208", message, hint=hint)
    return ShardcError(source.locate(wrong, *(path if path in source.lines else path[:1])))  # else in short
