"""What a plan says of compute that runs beside collectives: `overlap: false`, or `overlap: {late_gradients: false}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

from pydantic import ValidationInfo, model_validator

from shardc.ir.diagnostic import Diagnostic, ShardcError, did_you_mean
from shardc.ir.microbatch import HALVES
from shardc.plan.values import FrozenValue, source_of

FLAGS = ("late_gradients", "prefetch")  # which are on by default
WORDS = (*FLAGS, "decompose")
AUTO = "auto"


class Overlapping(FrozenValue):
    """`late_gradients`: products that make gradients of weights run behind the collectives of backward; see
    passes/communication/late_gradients.py. `prefetch`: what gathers of parameters send is made when they may begin; see
    passes/communication/prefetch.py. `split`: in how many parts the batch runs, interleaved, 1 or 2; see
    passes/communication/split_batch.py; `auto`: in two where a step is predicted to be faster so, see
    compiler/split_auto.py. `decompose`: whether products gather their operands, or scatter their results,
    piece by piece; see passes/communication/decompose.py; `auto` where a step is predicted to be faster so, see
    compiler/decompose_auto.py. In short: false, which is nothing of this, or true, which
    leaves the batch and the products whole."""

    late_gradients: bool = True
    prefetch: bool = True
    split: int | Literal["auto"] = 1
    decompose: bool | Literal["auto"] = False

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, Overlapping):
            return value
        if isinstance(value, bool):
            return dict.fromkeys(FLAGS, value)
        if not isinstance(value, Mapping):
            raise _located(f"'overlap' should be true, false or a mapping, not {value!r}", info)
        for key, said in cast("Mapping[object, object]", value).items():
            if key not in cls.model_fields:
                hint = did_you_mean(str(key), cls.model_fields, "keys of overlap")
                raise _located(f"overlap has no key '{key}'", info, str(key), hint=hint)
            if key == "split" and said != AUTO and not (type(said) is int and said in (1, HALVES)):
                hint = f"write overlap: {{split: {HALVES}}} or {{split: {AUTO}}}; accumulate takes any number"
                message = f"'overlap.split' should be 1, {HALVES} or auto, not {said!r}"
                raise _located(message, info, "split", hint=hint)
            if key in WORDS and not isinstance(said, bool) and (key, said) != ("decompose", AUTO):
                words = "true, false or auto" if key == "decompose" else "true or false"
                raise _located(f"'overlap.{key}' should be {words}, not {said!r}", info, str(key))
        return cast(Any, value)

    def decided(self, decompose: bool) -> Overlapping:
        """As it is compiled, where `decompose` was left to a prediction."""
        return self.model_copy(update={"decompose": decompose})

    def in_parts(self, split: int) -> Overlapping:
        """In so many parts, whatever was said."""
        return self.model_copy(update={"split": split})

    @property
    def parts(self) -> int:
        """Of the batch; 1 where a prediction has not decided yet."""
        return 1 if self.split == AUTO else int(self.split)

    def dumped(self) -> object:
        """As plain data, in its short form; None where it is the default."""
        off = {name: False for name in FLAGS if not getattr(self, name)}
        said: dict[str, object] = {**off, **({"split": self.split} if self.split != 1 else {})}
        said |= {"decompose": self.decompose} if self.decompose else {}
        return False if len(off) == len(FLAGS) and len(said) == len(off) else said or None


def _located(
    message: str, info: ValidationInfo, *key: str, hint: str = "write overlap: {late_gradients: false}"
) -> ShardcError:
    return ShardcError(source_of(info).locate(Diagnostic("SC208", message, hint=hint), "overlap", *key))
