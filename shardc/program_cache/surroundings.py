"""What compiling depends on beside its arguments: versions, shardc's own files, torch's switches, variables, rules."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch.nn.modules import module as module_hooks

from kernels_triton.launch.launch import HAS_TRITON
from kernels_triton.launch.tables import VARIABLE as TABLES
from shardc import torch_compat
from shardc.compiler.fusion_default import job_has_gpus
from shardc.ir.version import VERSION
from shardc.program_cache.code import Code
from shardc.program_cache.libraries import refuse_newer, sources_of_shardc
from shardc.program_cache.origins import UncacheableError
from shardc.rules.registry import all_rules

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
_ABOUT_PACKAGES = (".dist-info", ".egg-info", ".egg-link", ".pth")
_NO_CODE = ("include", "lib", "share", "bin", "test", "testing", "__pycache__")
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


def add_surroundings(code: Code) -> None:
    """Raises UncacheableError where a mode, a rule or a file stands against it."""
    token = code.fingerprint.token
    token("shardc", VERSION, own_digest(), HAS_TRITON, sys.version, sys.platform, os.getcwd(), sys.flags)
    for path, size, time_of_change in installed():
        token(path, size, time_of_change)
    token(*_answers())
    if modes := torch_compat.active_modes():
        raise UncacheableError(f"a mode of torch is active: {modes[0]}")
    if torch_compat.saves_by_hooks():
        raise UncacheableError("hooks for what autograd saves are active")
    for op in torch_compat.replaced_ops():
        if op.startswith("aten/") and op.rpartition("/")[2] not in ("Meta", "CUDA", "MPS"):
            raise UncacheableError(f"somebody registered an implementation of {op}")
        token(op)
    for place in (module_hooks, sys.modules["torch.optim.optimizer"]):
        for name in sorted(vars(place)):
            if name.startswith("_global_") and name.endswith("hooks"):
                code.fingerprint.add(vars(place)[name], name)
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


@functools.lru_cache(maxsize=1)
def installed() -> list[tuple[str, int, int]]:
    """Each package that Python finds, by the folder of its version, with the size and time of its list of files; and
    torch's own files, which some edit where they lie. Raises UncacheableError where one was written after this process
    had started."""
    paths: list[str] = []
    for folder in dict.fromkeys(os.path.abspath(path) for path in sys.path):
        with suppress(OSError):
            names = sorted(name for name in os.listdir(folder) if name.endswith(_ABOUT_PACKAGES))
            paths += [_listing(os.path.join(folder, name)) for name in names]
    for parent, folders, files in os.walk(os.path.dirname(torch.__file__)):
        folders[:] = sorted(name for name in folders if name not in _NO_CODE)
        paths += [os.path.join(parent, name) for name in sorted(files) if name.endswith(".py")]
    found: list[tuple[str, int, int]] = []
    for path in paths:
        about = os.stat(path)
        refuse_newer(path, about)
        found.append((path, about.st_size, about.st_mtime_ns))
    return found


def _listing(path: str) -> str:
    """The list of a package's files; of an old or an editable one, what there is."""
    listing = os.path.join(path, "RECORD")
    return listing if os.path.exists(listing) else path


@functools.lru_cache(maxsize=1)
def own_digest() -> str:
    """Of the contents of shardc's files. Raises UncacheableError where one was written after they were imported."""
    digest = hashlib.sha256()
    for path in sources_of_shardc():
        refuse_newer(path, os.stat(path))
        digest.update(f"{path}\0".encode())
        digest.update(Path(path).read_bytes())
    return digest.hexdigest()
