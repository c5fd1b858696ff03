"""Weights as Hugging Face stores them: safetensors, with an index where they are more than one file.

Tensors are gathered one at a time, on rank 0, which holds no more than one file of them. Tied names are left out, as
`save_pretrained` leaves them: the model ties them again. `export` writes into a folder that may hold other things, in
its `.weights.tmp`, and renames when all are there. This is no checkpoint: a crash between two renames leaves files of
both. `write_weights` fills a folder that nobody reads yet.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardc.ir.diagnostic import ShardcError, error
from shardc.runtime.checkpoint.folder import NotMovedBackError, place_of, sync
from shardc.runtime.checkpoint.held import Held, writes
from shardc.runtime.checkpoint.weights import INDEX
from shardc.runtime.execute.layout import assemble

if TYPE_CHECKING:
    from shardc.runtime.checkpoint.checkpoint import Checkpoints

FILE_BYTES = 5 << 30
DRAFTS = ".weights.tmp"  # a folder, since safetensors writes under names of its own
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Written:
    """Tensors that are gathered together, and what is written of them: `outputs` are its types, on the meta device."""

    names: Sequence[str]
    outputs: Mapping[str, torch.Tensor]
    convert: Callable[[Tensors], Mapping[str, torch.Tensor]]


def cast_to(entry: Held, dtype: torch.dtype | None, own: torch.dtype | None) -> torch.dtype:
    """The dtype that a tensor is written in: the one asked for, if it holds floats; else the model's."""
    model_dtype = own or entry.type.dtype
    return dtype if dtype is not None and model_dtype.is_floating_point else model_dtype


def as_they_are(tensors: Mapping[str, Held], dtypes: Mapping[str, torch.dtype]) -> list[Written]:
    """Each tensor under its own name."""
    return [
        Written([name], {name: torch.empty(entry.type.shape, dtype=dtypes[name], device="meta")}, dict)
        for name, entry in tensors.items()
    ]


def export(
    checkpoints: Checkpoints,
    path: str | Path,
    tensors: Mapping[str, Held],
    file_bytes: int = FILE_BYTES,
    *,
    dtypes: Mapping[str, torch.dtype] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the tensors as safetensors into the folder `path`; every rank must call it.

    `dtypes` are the model's, where it has others than the trainer.
    """
    checkpoints.settle()
    folder, first = place_of(path), checkpoints.job_rank == 0
    written_dtypes = {name: cast_to(entry, dtype, (dtypes or {}).get(name)) for name, entry in tensors.items()}

    def begin() -> None:
        if first:
            with drafted(folder / DRAFTS, folder):
                if (folder / DRAFTS).exists():  # of an export that was killed
                    shutil.rmtree(folder / DRAFTS)
                (folder / DRAFTS).mkdir(parents=True)

    checkpoints.agreed(begin)
    files = write_weights(
        checkpoints, folder / DRAFTS, folder, tensors, as_they_are(tensors, written_dtypes), written_dtypes, file_bytes
    )

    def finish() -> None:
        if first:
            with drafted(folder / DRAFTS, folder):
                _put_in_place(folder, files)

    checkpoints.agreed(finish)


def write_weights(
    checkpoints: Checkpoints,
    draft: Path,
    target: Path,
    tensors: Mapping[str, Held],
    units: Sequence[Written],
    dtypes: Mapping[str, torch.dtype],
    file_bytes: int,
    metadata: Mapping[str, Any] | None = None,
) -> list[str]:
    """Fill the folder `draft`, which becomes `target`, with the files of the weights and their index: their names."""
    save_file = checkpoints.agreed(_safetensors)
    types = {name: t for unit in units for name, t in unit.outputs.items()}
    files = file_names(types, file_bytes)
    file_of = {name: file for file, names in files.items() for name in names}
    waiting = {file: set(names) for file, names in files.items()}
    held: dict[str, Tensors] = {file: {} for file in files}
    first = checkpoints.job_rank == 0

    def write(file_name: str) -> None:
        if first:
            with drafted(draft, target):
                path = draft / file_name
                save_file({n: t.contiguous() for n, t in held.pop(file_name).items()}, str(path), {"format": "pt"})
                sync_file(path)

    def convert(unit: Written, wholes: Tensors) -> None:
        if first:
            converted = unit.convert({name: whole.to(dtypes[name]) for name, whole in wholes.items()})
            for name in unit.outputs:
                held[file_of[name]][name] = converted[name]

    def index() -> None:
        if first and len(files) > 1:
            with drafted(draft, target):
                size = sum(t.numel() * t.element_size() for t in types.values())
                data = {"metadata": {**(metadata or {}), "total_size": size}, "weight_map": file_of}
                (draft / INDEX).write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")
                sync_file(draft / INDEX)

    for unit in units:
        wholes = {n: whole for n in unit.names if (whole := gathered(checkpoints, n, tensors[n])) is not None}
        if len(unit.names) > 1 or list(unit.outputs) != list(unit.names):
            checkpoints.agreed(lambda unit=unit, wholes=wholes: convert(unit, wholes))
        else:
            convert(unit, wholes)
        for name in unit.outputs:
            file_name = file_of[name]
            waiting[file_name].discard(name)
            if not waiting[file_name]:
                checkpoints.agreed(lambda file_name=file_name: write(file_name))
    checkpoints.agreed(index)
    return [*files, *([INDEX] if len(files) > 1 else [])]


@contextmanager
def drafted(draft: Path, target: Path) -> Generator[None]:
    """Raise file errors, such as a full disk, as SC408, and remove the drafts.

    The error of a folder that could be moved neither in nor back leaves them: it says where the whole draft lies.
    """
    try:
        yield
    except ShardcError:
        raise
    except NotMovedBackError as failure:
        message = f"the weights could not be written to {target}: {failure}"
        raise error("SC408", message, hint="both folders are whole") from failure
    except Exception as failure:  # safetensors has a class of its own for what the system refuses
        with suppress(ValueError):  # a path that holds a NUL byte
            shutil.rmtree(draft, ignore_errors=True)
        message = f"the weights could not be written to {target}: {type(failure).__name__}: {failure}"
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


def file_names(types: Mapping[str, torch.Tensor], limit: int) -> dict[str, list[str]]:
    """Which tensors go into which file, in their order, as `save_pretrained` has it: a longer one into its own."""
    bins: list[list[str]] = []
    current: list[str] = []
    file_size = 0
    for name, t in types.items():
        size = t.numel() * t.element_size()
        if size > limit:
            bins.append([name])
            continue
        if current and file_size + size > limit:
            bins.append(current)
            current, file_size = [], 0
        current.append(name)
        file_size += size
    bins += [current] if current or not bins else []
    if len(bins) == 1:
        return {"model.safetensors": bins[0]}
    return {f"model-{i + 1:05d}-of-{len(bins):05d}.safetensors": names for i, names in enumerate(bins)}


def sync_file(path: Path) -> None:
    """Bring a file's content to disk. It may be read-only: a file of the user's that is kept."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _put_in_place(folder: Path, files: Sequence[str]) -> None:
    """Replace the weights in the folder. A configuration or a tokenizer beside them stays."""
    (folder / INDEX).unlink(missing_ok=True)
    for name in files:
        if name != INDEX:
            os.replace(folder / DRAFTS / name, folder / name)
    for existing in folder.glob("model*.safetensors"):
        if existing.name not in files:
            existing.unlink()
    if INDEX in files:
        os.replace(folder / DRAFTS / INDEX, folder / INDEX)
    (folder / DRAFTS).rmdir()
    sync(folder)


def _safetensors() -> Callable[..., Any]:
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise error("SC408", "safetensors is not installed", hint="pip install safetensors") from None
    return save_file
