"""What a plan says of the machine: `hardware: h200`, or one that is like it but for some quantities.

    hardware: {like: h200, network_bytes_per_second: 2.5e10, bucket_bytes: 50 MiB}

Names are those of files in configs/hardware, which a wheel brings along in share/shardc/hardware; `default` needs no
file. `shardc.ir.hardware` says what the quantities are, and what passes make of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import BaseModel, ConfigDict, ValidationInfo, model_validator

from shardc.ir.diagnostic import Diagnostic, ShardcError, did_you_mean
from shardc.ir.hardware import DEFAULT, Hardware, Number, problems_of
from shardc.plan.packaged import packaged
from shardc.plan.values import read_bytes, read_exponent, source_of

DEFAULT_NAME = "default"
BYTES = ("bucket_bytes", "row_alignment_bytes")  # which may be written "25 MiB"


class HardwareChoice(BaseModel):
    """The machine to compile for: a known one by name, and the quantities in which it differs. In short: the name."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    like: str = DEFAULT_NAME
    changes: dict[str, Number] = {}
    value: Hardware = DEFAULT

    @model_validator(mode="before")
    @classmethod
    def _read(cls, written: Any, info: ValidationInfo) -> Any:
        if isinstance(written, HardwareChoice) or written == {}:
            return written
        source, forms = source_of(info), "write hardware: h200, or hardware: {like: h200, bucket_bytes: 50 MiB}"
        if not isinstance(written, str | Mapping | Hardware):
            wrong = Diagnostic("SC208", f"'hardware' should be a name or quantities, not {written!r}", hint=forms)
            raise ShardcError(source.locate(wrong, "hardware"))
        if isinstance(written, Hardware):
            written = _differences(written)
        changes = {} if isinstance(written, str) else dict(cast(Mapping[str, Any], written))
        name = written if isinstance(written, str) else changes.pop("like", DEFAULT_NAME)
        if not isinstance(name, str) or name not in names():
            hint = did_you_mean(str(name), names(), "hardware")
            wrong = Diagnostic("SC208", f"there is no hardware named {name!r}", hint=hint)
            key_path = ("hardware",) if isinstance(written, str) else ("hardware", "like")
            raise ShardcError(source.locate(wrong, *key_path))
        changes = {str(key): read_quantity(str(key), value) for key, value in changes.items()}
        if problems := problems_of(changes):
            raise ShardcError(*(source.locate(wrong, "hardware", key) for key, wrong in problems.items()))
        value = Hardware.of({**named(name).quantities(), **changes})
        return {"like": name, "changes": changes, "value": value}

    def without_name(self) -> HardwareChoice:
        """The same quantities, for a reader who has no file of that name."""
        return HardwareChoice.model_validate(_differences(self.value))

    def dumped(self) -> object:
        """As plain data, in its short form if it has one."""
        if not self.changes:
            return self.like
        return {**({} if self.like == DEFAULT_NAME else {"like": self.like}), **self.changes}


def _differences(hardware: Hardware) -> dict[str, Number]:
    default = DEFAULT.quantities()
    return {name: value for name, value in hardware.quantities().items() if value != default[name]}


def read_quantity(name: str, value: Any) -> Any:
    """A quantity as YAML and people write it: 5e11, which YAML takes for text, and 25 MiB. The rest as it is."""
    if name in BYTES and isinstance(value, str):
        try:
            return read_bytes(value)
        except ShardcError:
            return value
    return read_exponent(value)


def names() -> list[str]:
    """The known names of hardware."""
    return sorted({DEFAULT_NAME, *packaged("hardware")})


def named(name: str) -> Hardware:
    """The hardware of that name. Raises ShardcError (SC208) if its file has a value that is no quantity."""
    return DEFAULT if name == DEFAULT_NAME else read_file(packaged("hardware")[name])


def read_file(path: Path) -> Hardware:
    """The hardware that a file describes. Raises ShardcError (SC208) where it describes none."""
    hint = "a file has a quantity a line, such as memory_bytes_per_second: 4e12"
    try:
        content: object = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as why:
        message = f"no hardware can be read from the file: {' '.join(str(why).split())}"
        raise ShardcError(Diagnostic("SC208", message, location=str(path), hint=hint)) from None
    if not isinstance(content, dict):
        raise ShardcError(Diagnostic("SC208", "the file has no quantities", location=str(path), hint=hint))
    quantities = {str(key): read_quantity(str(key), value) for key, value in cast(dict[object, Any], content).items()}
    if problems := problems_of(quantities):
        raise ShardcError(*(replace(wrong, location=str(path)) for wrong in problems.values()))
    return Hardware.of(quantities)


def find_hardware(wanted: str | Path | Mapping[str, Any] | Hardware) -> tuple[Hardware, str]:
    """The hardware of a name, of a file's path, of its quantities, or itself; and what to call it.

    Raises ShardcError (SC208) for any other.
    """
    if isinstance(wanted, Hardware):
        return wanted, "this hardware"
    if isinstance(wanted, Mapping):
        return Hardware.of(wanted), DEFAULT_NAME
    if isinstance(wanted, Path) or Path(wanted).suffix in (".yaml", ".yml"):
        return read_file(Path(wanted)), Path(wanted).stem
    if wanted not in names():
        hint = did_you_mean(wanted, names(), "hardware")
        raise ShardcError(Diagnostic("SC208", f"there is no hardware named {wanted!r}", hint=hint))
    return named(wanted), wanted
