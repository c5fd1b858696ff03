"""The launches of a template as text: each kernel with its grid and constants, its source, and the functions it
calls."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

from kernels_triton.ir.kernel import Kernel
from kernels_triton.launch import launch
from kernels_triton.launch.launch import H200, Device
from kernels_triton.match.launcher import launcher

FILES = Path(__file__).parents[1] / "library" / "kernels"
WIDTH = 118


def recorded_launches(kernel: Kernel, device: Device = H200) -> list[launch.Launch]:
    """The launches of a kernel that a template runs; nothing is executed."""
    records: list[launch.Launch] = []
    with launch.assuming(device), launch.recording(records.append):
        launcher(kernel)([torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in kernel.inputs])
    return records


def template_source(kernel: Kernel, shown: set[tuple[str, str]], device: Device = H200) -> str:
    """The text that `shardc compile --emit triton` prints. Functions in `shown` are not repeated."""
    parts: list[str] = []
    for record in recorded_launches(kernel, device):
        words = [
            f"{record.name}: grid {record.grid}, {record.warps} warps",
            *(f"{k}={v}" for k, v in record.constants.items()),
        ]
        functions = [function for function in _called_functions(*record.name.split(".")) if function not in shown]
        shown.update(functions)
        text = "" if functions else "# Its source is above.\n"
        parts.append(_comment(words) + text + "\n\n".join(_function(*function)[0] for function in functions))
    return "\n\n".join(parts)


def _comment(words: list[str]) -> str:
    lines = ["# " + words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(word) + 2 > WIDTH:
            lines.append("#    " + word)
        else:
            lines[-1] += ", " + word
    return "\n".join(lines) + "\n"


def _called_functions(module: str, name: str) -> list[tuple[str, str]]:
    """A function and all functions that it calls, callees first."""
    ordered: dict[tuple[str, str], None] = {}

    def visit(function: tuple[str, str]) -> None:
        for callee in _function(*function)[1]:
            if callee not in ordered:
                visit(callee)
        ordered[function] = None

    visit((module, name))
    return list(ordered)


@cache
def _function(module: str, name: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """A function's text, and the functions of these files that it calls."""
    text = (FILES / f"{module}.py").read_text(encoding="utf-8")
    body = ast.parse(text).body
    origin_of = {
        statement.name: (module, statement.name) for statement in body if isinstance(statement, ast.FunctionDef)
    } | dict(_imported(body))
    for statement in body:
        if isinstance(statement, ast.FunctionDef) and statement.name == name:
            first = min([statement.lineno, *(mark.lineno for mark in statement.decorator_list)])
            lines = "\n".join(text.splitlines()[first - 1 : statement.end_lineno]) + "\n"
            used = [part.id for part in ast.walk(statement) if isinstance(part, ast.Name) and part.id != name]
            return lines, tuple(origin_of[used_name] for used_name in dict.fromkeys(used) if used_name in origin_of)
    raise AssertionError(f"{module}.py has no {name}")


def _imported(body: list[ast.stmt]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Functions imported from other kernel files, by their local names. Imported constants are left out."""
    for statement in body:
        if (
            isinstance(statement, ast.ImportFrom)
            and statement.module
            and statement.module.startswith("kernels_triton.library.kernels.")
        ):
            file = statement.module.rpartition(".")[2]
            yield from (
                (name.asname or name.name, (file, name.name)) for name in statement.names if name.name.islower()
            )
