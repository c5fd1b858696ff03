"""Weights as Hugging Face stores them: safetensors, with an index where they are more than one file.

Tensors are gathered one at a time, on rank 0, which holds no more than one file of them. Tied names are left out, as
`save_pretrained` leaves them: the model ties them again. Files are written in the folder's `.weights.tmp`, and renamed
when all are there. This is no checkpoint: a crash between two renames leaves files of both.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardc.ir.diagnostic import ShardcError, error
from shardc.ir.types import TensorType
from shardc.runtime.checkpoint.checkpoint import Checkpoints
from shardc.runtime.checkpoint.folder import sync
from shardc.runtime.checkpoint.planners import Held, writes
from shardc.runtime.checkpoint.weights import INDEX
from shardc.runtime.execute.layout import assemble

FILE_BYTES = 5 << 30
DRAFTS = ".weights.tmp"  # a folder, since safetensors writes under names of its own


def export(
    checkpoints: Checkpoints, path: str | Path, tensors: Mapping[str, Held], file_bytes: int = FILE_BYTES
) -> None:
    """Write the tensors as safetensors into the folder `path`; every rank must call it."""
    checkpoints.settle()
    save_file = checkpoints.agreed(_safetensors)
    folder, first = Path(path), checkpoints.job_rank == 0
    files = _files({name: entry.type for name, entry in tensors.items()}, file_bytes)

    def begin() -> None:
        if first:
            with _written(folder):
                if (folder / DRAFTS).exists():  # of an export that was killed
                    shutil.rmtree(folder / DRAFTS)
                (folder / DRAFTS).mkdir(parents=True)

    def write(file_name: str, wholes: dict[str, torch.Tensor]) -> None:
        if first:
            with _written(folder):
                draft = folder / DRAFTS / file_name
                save_file(wholes, str(draft), {"format": "pt"})
                with draft.open("rb+") as file:
                    os.fsync(file.fileno())

    checkpoints.agreed(begin)
    for file_name, names in files.items():
        wholes = {name: whole for name in names if (whole := gathered(checkpoints, name, tensors[name])) is not None}
        checkpoints.agreed(lambda file_name=file_name, wholes=wholes: write(file_name, wholes))

    def finish() -> None:
        if first:
            with _written(folder):
                size = sum(entry.type.numel() * entry.type.dtype.itemsize for entry in tensors.values())
                _put_in_place(folder, files, size)

    checkpoints.agreed(finish)


@contextmanager
def _written(folder: Path) -> Generator[None]:
    """Raise file errors, such as a full disk, as SC408, and remove the drafts."""
    try:
        yield
    except ShardcError:
        raise
    except Exception as failure:  # safetensors has a class of its own for what the system refuses
        with suppress(ValueError):  # a path that holds a NUL byte
            shutil.rmtree(folder / DRAFTS, ignore_errors=True)
        message = f"the weights could not be written to {folder}: {type(failure).__name__}: {failure}"
        raise error(
            "SC408", message, hint="weights that were there before are as they were, or were replaced"
        ) from failure


def gathered(checkpoints: Checkpoints, name: str, entry: Held) -> torch.Tensor | None:
    """The whole tensor on the job's rank 0, on the CPU; None on the others."""
    local = None if entry.tensor is None else entry.tensor.detach().cpu().contiguous()
    if checkpoints.group is None:
        return local
    ranks = checkpoints.ranks(name)
    senders = {rank: i for i, rank in enumerate(ranks) if writes(entry.type, checkpoints.mesh, i)}
    if checkpoints.job_rank != 0:
        if checkpoints.job_rank in senders:
            assert local is not None
            dist.send(local, 0, group=checkpoints.group)
        return None
    rows: dict[int, torch.Tensor] = {}
    for rank, i in senders.items():
        if rank == 0:
            assert local is not None
            rows[i] = local
        else:
            rows[i] = torch.empty(entry.type.local_shape(checkpoints.mesh), dtype=entry.type.dtype)
            dist.recv(rows[i], rank, group=checkpoints.group)
    return assemble(rows, entry.type, checkpoints.mesh)


def _files(types: Mapping[str, TensorType], limit: int) -> dict[str, list[str]]:
    """Which tensors go into which file, in their order."""
    bins: list[list[str]] = [[]]
    file_size = 0
    for name, type in types.items():
        size = type.numel() * type.dtype.itemsize
        if bins[-1] and file_size + size > limit:
            bins.append([])
            file_size = 0
        bins[-1].append(name)
        file_size += size
    if len(bins) == 1:
        return {"model.safetensors": bins[0]}
    return {f"model-{i + 1:05d}-of-{len(bins):05d}.safetensors": names for i, names in enumerate(bins)}


def _put_in_place(folder: Path, files: Mapping[str, list[str]], size: int) -> None:
    """Replace the weights in the folder. A configuration or a tokenizer beside them stays."""
    (folder / INDEX).unlink(missing_ok=True)
    for name in files:
        os.replace(folder / DRAFTS / name, folder / name)
    for existing in folder.glob("model*.safetensors"):
        if existing.name not in files:
            existing.unlink()
    if len(files) > 1:
        file_of = {tensor: name for name, names in files.items() for tensor in names}
        data = {"metadata": {"total_size": size}, "weight_map": file_of}
        (folder / DRAFTS / INDEX).write_text(json.dumps(data, indent=2), encoding="utf-8")
        os.replace(folder / DRAFTS / INDEX, folder / INDEX)
    (folder / DRAFTS).rmdir()
    sync(folder)


def _safetensors() -> Callable[..., Any]:
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise error("SC408", "safetensors is not installed", hint="pip install safetensors") from None
    return save_file
