"""Tables of measured schedules, one a GPU: where they are looked for, and whose they are.

A table is a YAML file that `shardc tune` wrote. Its `device` is the GPU's name as CUDA has it, and that decides;
what the file is called does not. Looked through, the first that is this GPU's counts:

    $SHARDC_TABLES       files, or folders of them
    configs/kernels      of the repository, if the package lies in one
    share/shardc/kernels  of the environment that a wheel was installed into

A GPU that none is for runs on what sizes say (kernels_triton.rows).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, cast

import yaml

VARIABLE = "SHARDC_TABLES"
REPOSITORY = Path(__file__).parent.parent / "configs" / "kernels"
INSTALLED = "share/shardc/kernels"  # pyproject.toml puts configs/kernels there


@cache
def schedules(device: str) -> dict[str, Any]:
    """Of each kernel the entries of the table for the GPU of this name; none if there is no such table.

    Raises SC533 if $SHARDC_TABLES names what is not there, or a file is no table.
    """
    for path in _files():
        found = _read(path)
        if found["device"] == device:
            return found["schedules"] or {}
    return {}


def _files() -> Iterator[Path]:
    for text in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        path = Path(text)
        if not path.exists():
            hint = f"name a table that `shardc tune -o FILE` wrote, or a folder of such, in {VARIABLE}"
            raise _error(f"{VARIABLE} names '{path}', which does not exist", hint)
        yield from _tables_in(path) if path.is_dir() else (path,)
    if REPOSITORY.is_dir():
        yield from _tables_in(REPOSITORY)
    else:
        yield from _installed()


def _tables_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.yaml"))


def _installed() -> Iterator[Path]:
    try:
        files = distribution("shardc").files or ()
    except PackageNotFoundError:  # a copy of the sources
        return
    for one in files:
        if one.parent.as_posix().endswith(INSTALLED) and one.suffix == ".yaml":
            yield Path(str(one.locate()))


def _read(path: Path) -> dict[str, Any]:
    hint = "`shardc tune -o FILE` writes one"
    try:
        found: object = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as why:
        line = "" if why.problem_mark is None else f":{why.problem_mark.line + 1}"
        raise _error(f"'{path}{line}' is no YAML: {why.problem}", hint) from why
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as why:
        raise _error(f"'{path}' cannot be read as a table of kernels' schedules: {why}", hint) from why
    if not isinstance(found, dict) or not {"device", "schedules"} <= cast(dict[str, Any], found).keys():
        raise _error(f"'{path}' is no table of kernels' schedules: it has no device or no schedules", hint)
    return cast(dict[str, Any], found)


def _error(text: str, hint: str) -> Exception:
    from shardc.ir.diagnostic import error  # shardc imports this module while it is imported itself

    return error("SC533", text, hint=hint)
