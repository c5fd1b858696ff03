"""What a template launches, as text: each kernel with its grid and constants, and its source."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import torch

from kernels_triton import launch
from kernels_triton.fused.kernel import Kernel
from kernels_triton.launch import H200, Device
from kernels_triton.templates.launcher import launcher

FILES = Path(launch.__file__).parent / "kernels"


def launches(kernel: Kernel, device: Device = H200) -> list[launch.Launch]:
    """The launches of a kernel that is a template's; nothing runs."""
    found: list[launch.Launch] = []
    with launch.assuming(device), launch.recording(found.append):
        launcher(kernel)([torch.empty(given.shape, dtype=given.dtype, device="meta") for given in kernel.inputs])
    return found


def source(kernel: Kernel, device: Device = H200) -> str:
    """As `shardc compile --emit triton` prints it."""
    parts: list[str] = []
    for one in launches(kernel, device):
        constants = ", ".join(f"{name}={value}" for name, value in one.constants.items())
        text = f"# {one.name}: grid {one.grid}, {one.warps} warps, {constants}\n"
        parts.append(text + _function(*one.name.split(".")))
    return "\n\n".join(parts)


@cache
def _function(module: str, name: str) -> str:
    text = (FILES / f"{module}.py").read_text(encoding="utf-8")
    for one in ast.parse(text).body:
        if isinstance(one, ast.FunctionDef) and one.name == name:
            first = min([one.lineno, *(mark.lineno for mark in one.decorator_list)])
            return "\n".join(text.splitlines()[first - 1 : one.end_lineno]) + "\n"
    raise AssertionError(f"{module}.py has no {name}")
