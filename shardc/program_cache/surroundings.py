"""What passes depend on beside what they are given: versions, shardc's files, torch's switches, variables, rules."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from kernels_triton.launch.launch import HAS_TRITON
from kernels_triton.launch.tables import VARIABLE as TABLES
from shardc import torch_compat
from shardc.compiler.fusion_default import job_has_gpus
from shardc.ir.version import VERSION
from shardc.program_cache.digest import Digest, UncacheableError
from shardc.rules.registry import OpRule, all_rules

_OWN, _OF_FOLDERS = "SHARDC_", "SHARDC_CACHE"  # variables that we read; and such that change no program
_INTERPRETED = "TRITON_INTERPRET"
_LIBRARIES = ("sympy", "networkx", "numpy", "triton")  # that passes call
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
    torch.is_autocast_cache_enabled,
    lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
    lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    lambda: torch.backends.cuda.matmul.fp32_precision,
    lambda: torch.backends.mkldnn.enabled,
    torch_compat.attention_order,
    lambda: torch.utils.deterministic.fill_uninitialized_memory,  # pyright: ignore[reportAttributeAccessIssue]
    torch.is_anomaly_enabled,
    torch.is_anomaly_check_nan_enabled,
    torch.cuda.device_count,  # by NVML: `is_available` would spoil forks that use CUDA
    job_has_gpus,
)
_ABOVE = ("cli", "explain", "page", "planner", "symbolic")  # packages that compiling never calls: imports point down
_STARTED = time.time()


def add_surroundings(digest: Digest) -> None:
    """Raises UncacheableError where a mode, an implementation of an op or a file stands against it."""
    if modes := torch_compat.active_modes():
        raise UncacheableError(f"a mode of torch is active: {modes[0]}")
    if torch_compat.saves_by_hooks():
        raise UncacheableError("hooks for what autograd saves are active")
    # Torch registers how ops go under `vmap` when somebody first calls that.
    ops = [op for op in torch_compat.replaced_ops() if not op.rpartition("/")[2].startswith("FuncTorch")]
    for op in ops:
        if op.startswith("aten/") and op.rpartition("/")[2] not in ("Meta", "CUDA", "MPS"):
            raise UncacheableError(f"somebody registered an implementation of {op}")
    digest.add(VERSION, own_digest(), versions(), HAS_TRITON, sys.version, sys.platform, " ".join(ops))
    digest.add(list(_answers()), "\n".join(map(_said, all_rules())))
    named = [name for name in sorted(os.environ) if name.startswith(_OWN) and not name.startswith(_OF_FOLDERS)]
    named += [_INTERPRETED] if _INTERPRETED in os.environ else []
    digest.add([(name, os.environ[name]) for name in named])
    for path in filter(None, os.environ.get(TABLES, "").split(os.pathsep)):
        digest.add(path, Path(path).read_text("utf-8") if Path(path).is_file() else "")


def foreign(rule: OpRule) -> str:
    """The function of a rule that is not shardc's own: what it does is not known. An empty text where there is none."""
    for function in filter(None, (rule.function, rule.localize, rule.unfit)):
        if not function.__module__.startswith("shardc."):
            return function.__qualname__
    return ""


def _said(rule: OpRule) -> str:
    flags = rule.shape_arg, rule.kind, rule.exact, rule.ragged, rule.padding
    return f"{rule.op} {rule.defaults!r} {flags!r} {foreign(rule)}"


def _answers() -> Iterator[str]:
    for ask in _SWITCHES:
        try:
            yield repr(ask())
        except (AttributeError, RuntimeError):  # of a torch that has no such switch
            yield "none"


@functools.lru_cache(maxsize=1)
def versions() -> tuple[str, ...]:
    """Of the libraries that passes call, where there are."""
    found = [f"torch {torch.__version__}"]
    for name in _LIBRARIES:
        try:
            version = getattr(sys.modules.get(name), "__version__", None) or importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        found.append(f"{name} {version}")
    return tuple(found)


@functools.lru_cache(maxsize=1)
def own_digest() -> str:
    """Of the contents of shardc's files. Raises UncacheableError where one was written after they were imported."""
    digest = hashlib.sha256()
    for path in _sources():
        file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))  # several hundred: half of the time of `open`
        try:
            about = os.fstat(file)
            content = os.read(file, about.st_size)
        finally:
            os.close(file)
        if about.st_mtime > _STARTED:
            raise UncacheableError(f"{path} was written after this process had started")
        digest.update(f"{path}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _sources() -> Iterator[str]:
    """The paths of shardc's own files that compiling may depend on: code and tables, in order."""
    for package in ("shardc", "kernels_triton"):
        for root in sys.modules[package].__path__:
            for parent, folders, files in os.walk(root):
                skipped = ("__pycache__", *(_ABOVE if parent == root else ()))
                folders[:] = sorted(name for name in folders if name not in skipped)
                yield from (os.path.join(parent, name) for name in sorted(files))
