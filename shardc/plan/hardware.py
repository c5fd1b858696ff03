"""What a plan says of the machine: `hardware: h200`, or one that is like it but for some quantities.

    hardware: {like: h200, network_bytes_per_second: 2.5e10, bucket_bytes: 50 MiB}

Names are those of files in configs/hardware, which a wheel brings along in share/shardc/hardware, or shorter ones of
the same; `default` needs no file. `shardc.ir.hardware` says what the quantities and tables are, and what passes make of
them. A file has the same keys, and where one is wrong, its line is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import BaseModel, ConfigDict, ValidationInfo, model_validator

from shardc.ir.diagnostic import Diagnostic, ShardcError, did_you_mean
from shardc.ir.hardware import DEFAULT, TABLES, Hardware, problems_of
from shardc.plan.packaged import packaged
from shardc.plan.values import Source, read_bytes, read_exponent, source_of

DEFAULT_NAME = "default"
ALIASES = {"h200": "h200-nvlink", "h100": "h100-nvlink+ib", "a100": "a100-nvlink+ib"}  # names that plans may write
BYTES = ("bucket_bytes", "row_alignment_bytes")  # which may be written "25 MiB"


class HardwareChoice(BaseModel):
    """The machine to compile for: a known one by name, and the quantities in which it differs. In short: the name."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    like: str = DEFAULT_NAME
    changes: dict[str, Any] = {}
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
            located = (source.locate(wrong, *_nearest(place, source, "hardware")) for place, wrong in problems.items())
            raise ShardcError(*located)
        value = named(name).changed(changes)
        return {"like": name, "changes": changes, "value": value}

    def without_name(self) -> HardwareChoice:
        """The same quantities, for a reader who has no file of that name."""
        return HardwareChoice.model_validate(_differences(self.value))

    def dumped(self) -> object:
        """As plain data, in its short form if it has one."""
        if not self.changes:
            return self.like
        return {**({} if self.like == DEFAULT_NAME else {"like": self.like}), **self.changes}


def _differences(hardware: Hardware) -> dict[str, Any]:
    default = DEFAULT.quantities()
    return {name: value for name, value in hardware.quantities().items() if value != default.get(name)}


def read_quantity(name: str, value: Any) -> Any:
    """A quantity as YAML and people write it: 5e11, which YAML takes for text, and 25 MiB. The rest as it is. Tables
    are read by pydantic, which takes 5e11 as well."""
    if name in TABLES:
        return value
    if name in BYTES and isinstance(value, str):
        try:
            return read_bytes(value)
        except ShardcError:
            return value
    return read_exponent(value)


def names() -> list[str]:
    """The known names of hardware."""
    files = packaged("hardware")
    return sorted({DEFAULT_NAME, *files, *(name for name, file in ALIASES.items() if file in files)})


def named(name: str) -> Hardware:
    """The hardware of that name. Raises ShardcError (SC208) if its file has a value that is no quantity."""
    return DEFAULT if name == DEFAULT_NAME else read_file(packaged("hardware")[ALIASES.get(name, name)])


def hardware(what: str | Path | Hardware) -> Hardware:
    """Hardware by its name, by the path of a file, or itself. Raises ShardcError (SC208)."""
    if isinstance(what, Hardware):
        return what
    if str(what) in names():
        return named(str(what))
    if Path(what).suffix in (".yaml", ".yml"):
        return read_file(Path(what))
    hint = f"{did_you_mean(str(what), names(), 'hardware')}; or give the path of a YAML file"
    raise ShardcError(Diagnostic("SC208", f"there is no hardware named {str(what)!r}", hint=hint))


def read_file(path: Path) -> Hardware:
    """The hardware that a file describes. Raises ShardcError (SC208), with the line, where it describes none."""
    hint = "a file has a quantity a line, such as memory_bytes_per_second: 4.0e+12"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as why:
        message = f"no hardware can be read from the file: {' '.join(str(why).split())}"
        raise ShardcError(Diagnostic("SC208", message, location=str(path), hint=hint)) from None
    return _read_text(text, str(path), hint)


@lru_cache(maxsize=32)
def _read_text(text: str, path: str, hint: str) -> Hardware:
    try:
        content: object = yaml.safe_load(text)
        lines = _lines(yaml.compose(text, Loader=yaml.SafeLoader), ())
    except (ValueError, RecursionError, yaml.YAMLError) as why:
        message = f"no hardware can be read from the file: {' '.join(str(why).split())}"
        raise ShardcError(Diagnostic("SC208", message, location=path, hint=hint)) from None
    if not isinstance(content, dict):
        raise ShardcError(Diagnostic("SC208", "the file has no quantities", location=path, hint=hint))
    quantities = {str(key): read_quantity(str(key), value) for key, value in cast(dict[object, Any], content).items()}
    source = Source(path, lines, tuple(text.splitlines()))
    like = quantities.pop("like", DEFAULT_NAME)
    if like not in names() or ALIASES.get(like, like) == Path(path).stem != DEFAULT_NAME:
        message = f"there is no other hardware named {like!r}"
        wrong = Diagnostic("SC208", message, hint=did_you_mean(str(like), names(), "hardware"))
        raise ShardcError(source.locate(wrong, "like"))
    problems = problems_of(quantities)
    if problems:
        raise ShardcError(*(source.locate(wrong, *_nearest(place, source)) for place, wrong in problems.items()))
    return named(like).changed(quantities)


def _lines(node: yaml.Node | None, path: tuple[str, ...]) -> dict[tuple[str, ...], int]:
    """The line of every key and item of a list, by its path."""
    pairs: list[tuple[str, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        pairs = [(str(key.value), key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        pairs = [(str(index), item, item) for index, item in enumerate(node.value)]
    lines: dict[tuple[str, ...], int] = {}
    for name, begin, value in pairs:
        lines[(*path, name)] = begin.start_mark.line + 1
        lines |= _lines(value, (*path, name))
    return lines


def _nearest(place: str, source: Source, *above: str) -> tuple[str, ...]:
    """The path of the innermost key that has a line of its own, of a place such as `links.0.series`."""
    path = (*above, *place.split("."))
    return next((path[:n] for n in range(len(path), 0, -1) if path[:n] in source.lines), path)
