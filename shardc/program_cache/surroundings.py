"""What compiling depends on beside its arguments: versions, shardc's own files, torch's switches, variables, rules."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.modules import module as module_hooks

from kernels_triton.launch.launch import HAS_TRITON
from kernels_triton.launch.tables import VARIABLE as TABLES
from shardc import torch_compat
from shardc.ir.version import VERSION
from shardc.program_cache.code import Code
from shardc.program_cache.libraries import sources_of_shardc
from shardc.program_cache.origins import UncacheableError
from shardc.rules.registry import all_rules

PACKAGES = ("torch", "triton", "transformers", "numpy", "pydantic", "networkx", "sympy", "pyyaml")
_VARIABLES = ("SHARDC_", "TORCH_", "PYTORCH_", "TRITON_", "TRANSFORMERS_", "HF_", "CUDA_", "CUBLAS_", "NVIDIA_")
_OTHERWISE = (
    "SHARDC_CACHE",
    "TORCH_NCCL",
    "TORCH_SHOW_CPP",
    "TORCH_ELASTIC",
    "HF_HOME",
    "HF_TOKEN",
    "CUDA_VISIBLE",
)  # change nothing
_STARTED = time.time()
_GLOBAL_HOOKS = [name for name in vars(module_hooks) if name.startswith("_global_") and name.endswith("hooks")]
_SWITCHES: tuple[Callable[[], object], ...] = (
    torch.get_default_dtype,
    torch.get_default_device,
    torch.is_grad_enabled,
    torch.is_inference_mode_enabled,
    lambda: [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")],
    torch.are_deterministic_algorithms_enabled,
    torch.is_deterministic_algorithms_warn_only_enabled,
    torch.get_float32_matmul_precision,
    lambda: torch.backends.cuda.matmul.allow_tf32,
    lambda: torch.backends.cudnn.allow_tf32,
    lambda: (torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
    torch.backends.mha.get_fastpath_enabled,
    torch.autograd.is_multithreading_enabled,
    lambda: torch.__config__.show(),
    torch.cuda.is_available,
    torch.cuda.device_count,
)


def add_surroundings(code: Code) -> None:
    """Raises UncacheableError where a mode, a rule or a file stands against it."""
    token = code.fingerprint.token
    token("shardc", VERSION, own_digest(), HAS_TRITON, sys.version, sys.platform, os.getcwd(), sys.flags)
    for package in PACKAGES:
        token(package, _version(package))
    token(*_answers())
    if modes := torch_compat.active_modes():
        raise UncacheableError(f"a mode of torch is active: {modes[0]}")
    for name in _GLOBAL_HOOKS:
        code.fingerprint.add(vars(module_hooks)[name], name)
    for name in sorted(os.environ):
        if name.startswith(_VARIABLES) and not name.startswith(_OTHERWISE):
            token(name, os.environ[name])
    for path in filter(None, os.environ.get(TABLES, "").split(os.pathsep)):
        token(path, Path(path).read_text("utf-8") if Path(path).is_file() else "")
    _rules(code)


def _rules(code: Code) -> None:
    for entry in all_rules():
        code.fingerprint.token(str(entry.op), repr(entry.defaults), entry.kind, entry.shape_arg, entry.exact)
        code.fingerprint.token(entry.ragged, entry.padding)
        for function in (entry.function, entry.localize, entry.unfit):
            code.fingerprint.add(function, f"the rule of {entry.op}")


def _answers() -> list[str]:
    answers: list[str] = []
    for ask in _SWITCHES:
        try:
            answers.append(repr(ask()))
        except (AttributeError, RuntimeError):  # of a torch that has no such switch
            answers.append("none")
    return answers


@functools.lru_cache
def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


@functools.lru_cache(maxsize=1)
def own_digest() -> str:
    """Of the contents of shardc's files. Raises UncacheableError where one was written after they were imported."""
    digest = hashlib.sha256()
    for path in sources_of_shardc():
        if os.stat(path).st_ctime > _STARTED:
            raise UncacheableError(f"{path} was written after this process had started")
        digest.update(f"{path}\0".encode())
        digest.update(Path(path).read_bytes())
    return digest.hexdigest()
