"""What a template launches, as text: each kernel with its grid and constants, its source and what that calls."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

from kernels_triton import launch
from kernels_triton.fused.kernel import Kernel
from kernels_triton.launch import H200, Device
from kernels_triton.templates.launcher import launcher

FILES = Path(launch.__file__).parent / "kernels"
WIDTH = 118


def launches(kernel: Kernel, device: Device = H200) -> list[launch.Launch]:
    """The launches of a kernel that is a template's; nothing runs."""
    found: list[launch.Launch] = []
    with launch.assuming(device), launch.recording(found.append):
        launcher(kernel)([torch.empty(given.shape, dtype=given.dtype, device="meta") for given in kernel.inputs])
    return found


def source(kernel: Kernel, shown: set[tuple[str, str]], device: Device = H200) -> str:
    """As `shardc compile --emit triton` prints it; functions that are `shown` already are not repeated."""
    parts: list[str] = []
    for one in launches(kernel, device):
        words = [f"{one.name}: grid {one.grid}, {one.warps} warps", *(f"{k}={v}" for k, v in one.constants.items())]
        functions = [at for at in _needed(*one.name.split(".")) if at not in shown]
        shown.update(functions)
        text = "" if functions else "# Its source is above.\n"
        parts.append(_comment(words) + text + "\n\n".join(_function(*at)[0] for at in functions))
    return "\n\n".join(parts)


def _comment(words: list[str]) -> str:
    lines = ["# " + words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(word) + 2 > WIDTH:
            lines.append("#    " + word)
        else:
            lines[-1] += ", " + word
    return "\n".join(lines) + "\n"


def _needed(module: str, name: str) -> list[tuple[str, str]]:
    """A function and all that it calls, that first."""
    found: dict[tuple[str, str], None] = {}

    def visit(at: tuple[str, str]) -> None:
        for other in _function(*at)[1]:
            if other not in found:
                visit(other)
        found[at] = None

    visit((module, name))
    return list(found)


@cache
def _function(module: str, name: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Its text, and the functions of these files that it calls."""
    text = (FILES / f"{module}.py").read_text(encoding="utf-8")
    body = ast.parse(text).body
    known = {one.name: (module, one.name) for one in body if isinstance(one, ast.FunctionDef)} | dict(_imported(body))
    for one in body:
        if isinstance(one, ast.FunctionDef) and one.name == name:
            first = min([one.lineno, *(mark.lineno for mark in one.decorator_list)])
            lines = "\n".join(text.splitlines()[first - 1 : one.end_lineno]) + "\n"
            used = [part.id for part in ast.walk(one) if isinstance(part, ast.Name) and part.id != name]
            return lines, tuple(known[used_name] for used_name in dict.fromkeys(used) if used_name in known)
    raise AssertionError(f"{module}.py has no {name}")


def _imported(body: list[ast.stmt]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Of other files of kernels, by the names that they have here: functions, which constants are not."""
    for one in body:
        if isinstance(one, ast.ImportFrom) and one.module and one.module.startswith("kernels_triton.kernels."):
            file = one.module.rpartition(".")[2]
            yield from ((name.asname or name.name, (file, name.name)) for name in one.names if name.name.islower())
