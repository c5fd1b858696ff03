"""`shardc.json`: what a checkpoint's folder holds, checked against a schema before anything else of it is read.

    step, seed, mesh, extra      where training stood
    tensors                      name -> role, other names
    files, checks                name -> bytes; name -> [offset, bytes, CRC-32] of every piece

A checkpoint may come from anywhere. Its names are those of files in its folder and lead nowhere else; its index, which
torch's tools want as a pickle, may name the classes of such an index and nothing that runs.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from shardc.ir.diagnostic import Diagnostic, ShardcError, error
from shardc.torch_compat import ForeignIndexError, read_index, stored_at

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

FORMAT, VERSION = "shardc-checkpoint", 1
MANIFEST, METADATA = "shardc.json", ".metadata"
BLOCK = 1 << 20
LARGEST = 1 << 28  # bytes of a manifest: some 100 of a tensor and rank
DIMS = 64

Bytes = Annotated[int, Field(ge=0, lt=1 << 62)]
FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.][A-Za-z0-9_.\-]*$", max_length=255)]
TensorName = Annotated[str, StringConstraints(min_length=1, max_length=4096)]


class Piece(NamedTuple):
    """A range of bytes of a file, and the tensor that they are a part of."""

    file: str
    offset: int
    length: int
    tensor: str


@dataclass(frozen=True)
class Stored:
    """What the manifest says of a tensor."""

    role: str
    aliases: tuple[str, ...] = ()


class _Schema(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _Stored(_Schema):
    role: Literal["param", "buffer", "state", "average"]
    aliases: list[TensorName]


class _Body(_Schema):
    step: Annotated[int, Field(ge=0, lt=1 << 53)]
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
    mesh: Annotated[str, StringConstraints(max_length=4096)]
    extra: dict[str, Any]
    tensors: dict[TensorName, _Stored]
    files: dict[FileName, Bytes]
    checks: dict[FileName, list[Annotated[list[Bytes], Field(min_length=3, max_length=3)]]]


class _File(_Schema):
    format: Literal["shardc-checkpoint"]
    version: int
    crc32: int
    body: dict[str, Any]


@dataclass(frozen=True)
class Manifest:
    """What makes a folder a checkpoint."""

    step: int
    seed: int
    mesh: str
    extra: dict[str, Any]
    tensors: dict[str, Stored]
    files: dict[str, int] = field(default_factory=dict[str, int])  # name -> bytes
    checks: dict[str, list[list[int]]] = field(default_factory=dict[str, list[list[int]]])  # name -> offset, bytes, CRC

    def write(self, folder: Path) -> None:
        body = asdict(self)
        data = {"format": FORMAT, "version": VERSION, "crc32": _crc_of(body), "body": body}
        with (folder / MANIFEST).open("w", encoding="utf-8") as file:
            json.dump(data, file)
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest, where all that it lists is there in full. Contents are checked as they are needed.

        Raises ShardcError: SC405 for damage, SC403 for another version, SC408 where it cannot be read.
        """
        body = _body(folder)
        tensors = {name: Stored(record.role, tuple(record.aliases)) for name, record in body.tensors.items()}
        manifest = cls(body.step, body.seed, body.mesh, body.extra, tensors, body.files, body.checks)
        if METADATA not in manifest.files:
            raise damaged(folder, f"{MANIFEST} does not list {METADATA}")
        for name, size in manifest.files.items():
            file = folder / name
            length = file.stat().st_size if file.is_file() and not file.is_symlink() else None
            if length != size:
                what = "is missing" if length is None else f"has {length} bytes, not the {size} that were written"
                raise damaged(folder, f"{name} {what}")
        manifest.verify(folder, [Piece(METADATA, 0, manifest.files[METADATA], "the index of all tensors")])
        return manifest

    def verify(self, folder: Path, pieces: Iterable[Piece]) -> None:
        """Raise SC405 unless all of these pieces are what was written. All damage is listed."""
        known = {(name, offset): (length, crc) for name, rows in self.checks.items() for offset, length, crc in rows}
        by_file: dict[str, list[Piece]] = {}
        for piece in sorted(set(pieces)):
            by_file.setdefault(piece.file, []).append(piece)
        damages: list[str] = []
        for name, written in by_file.items():
            with (folder / name).open("rb") as file:
                for piece in written:
                    if known.get((name, piece.offset)) != (piece.length, crc_of(file, piece.offset, piece.length)):
                        damages.append(f"{name} is altered, in {piece.tensor}")
        if damages:
            raise damaged(folder, *damages)

    def index(self, folder: Path) -> Metadata:
        """torch's index of the tensors: nothing but tensors, in files of this folder, within their bounds.

        Raises ShardcError (SC405) for anything else.
        """
        try:
            index = read_index(folder / METADATA)
        except ForeignIndexError as failure:
            raise damaged(folder, f"{METADATA} {failure}") from None
        try:
            problem = self._problem_of(index)
        except Exception:  # of an object that lacks what its class has: a pickle fills it in, or does not
            problem = "is no index of tensors"
        if problem:
            raise damaged(folder, f"{METADATA} {problem}")
        return index

    def _problem_of(self, index: Metadata) -> str | None:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata  # seconds of imports

        stored, data = index.state_dict_metadata, index.storage_data
        if not isinstance(stored, dict) or not isinstance(data, dict):  # pyright: ignore[reportUnnecessaryIsInstance]
            return "is no index of tensors"
        total_bytes = sum(self.files.values())
        for name, tensor in stored.items():
            if type(name) is not str or not isinstance(tensor, TensorStorageMetadata):
                return f"has something under {name!r} that is no tensor"
            if not _is_tensor(tensor):
                return f"describes '{name}' in a way that no tensor is"
            if tensor.size.numel() * tensor.properties.dtype.itemsize > total_bytes:
                return f"gives '{name}' {list(tensor.size)}, more than its files hold"
            if not _are_all_of(tensor):
                return f"describes '{name}' in a way that no tensor is"
        for position, info in data.items():
            if not isinstance(position, MetadataIndex) or position.fqn not in stored:
                return "places a tensor that it does not describe"
            file, offset, length = stored_at(info)
            if [type(field) for field in (file, offset, length)] != [str, int, int] or min(offset, length) < 0:
                return f"places '{position.fqn}' nowhere"
            if offset + length > self.files.get(file, -1):
                return f"places '{position.fqn}' in {file!r}, which has no such piece"
        for name, tensor in stored.items():
            chunks = tensor.chunks if isinstance(tensor, TensorStorageMetadata) else []
            if any(MetadataIndex(name, chunk.offsets) not in data for chunk in chunks):
                return f"does not say where all of '{name}' is"
        return self._shared_piece(data)

    def _shared_piece(self, data: Mapping[MetadataIndex, Any]) -> str | None:
        """Two parts of tensors that lie in the same bytes, though they are not one tensor under several names."""
        first = {alias: name for name, record in self.tensors.items() for alias in (name, *record.aliases)}
        pieces = sorted(
            (*stored_at(info), first.get(index.fqn, index.fqn), tuple(index.offset or ()))
            for index, info in data.items()
        )
        for (file, start, length, *piece), (other_file, other_start, _, *other_piece) in pairwise(pieces):
            if file == other_file and start + length > other_start and piece != other_piece:
                return f"places '{piece[0]}' and '{other_piece[0]}' in the same bytes of {file}"
        return None


def damaged(folder: Path, *what: str) -> ShardcError:
    hint = "load an earlier checkpoint"
    return ShardcError(
        *[Diagnostic("SC405", f"the checkpoint {folder} is damaged: {problem}", hint=hint) for problem in what]
    )


def crc_of(file: BinaryIO, offset: int, length: int) -> int:
    file.seek(offset)
    crc = 0
    while length > 0 and (block := file.read(min(BLOCK, length))):
        crc = zlib.crc32(block, crc)
        length -= len(block)
    return crc


def _body(folder: Path) -> _Body:
    file = folder / MANIFEST
    try:
        if file.is_symlink() or file.stat().st_size > LARGEST:
            raise damaged(folder, f"{MANIFEST} is none that was written")
        data = _File.model_validate(json.loads(file.read_text(encoding="utf-8")))
    except OSError as failure:
        raise error("SC408", f"cannot read {file}: {failure.strerror}") from failure
    except (ValueError, RecursionError):  # of JSON, of UTF-8, or of the schema
        raise damaged(folder, f"{MANIFEST} is cut short or altered") from None
    if data.version != VERSION:
        message = f"the checkpoint {folder} has version {data.version}, this shardc reads {VERSION}"
        raise error("SC403", message, hint="load it with the shardc that wrote it, and save it anew")
    if data.crc32 != _crc_of(data.body):
        raise damaged(folder, f"{MANIFEST} is altered")
    try:
        return _Body.model_validate(data.body)
    except ValidationError as failure:
        first = failure.errors(include_url=False)[0]
        location = ".".join(map(str, first["loc"]))
        raise damaged(folder, f"{MANIFEST} is none that was written: {location}: {first['msg']}") from None


def _is_tensor(tensor: TensorStorageMetadata) -> bool:
    """Whether the size, the dtype and the chunks of a tensor have valid types and bounds."""
    size = tensor.size
    if not _is_size(size) or not isinstance(tensor.properties.dtype, torch.dtype):  # pyright: ignore[reportUnnecessaryIsInstance]
        return False
    if not isinstance(tensor.chunks, list):  # pyright: ignore[reportUnnecessaryIsInstance]
        return False
    for chunk in tensor.chunks:
        if not _is_size(chunk.offsets) or not _is_size(chunk.sizes) or len(chunk.offsets) != len(size):
            return False
        if len(chunk.sizes) != len(size):
            return False
        if any(offset + n > whole for offset, n, whole in zip(chunk.offsets, chunk.sizes, size, strict=True)):
            return False
    return True


def _are_all_of(tensor: TensorStorageMetadata) -> bool:
    """Whether the chunks of a tensor cover each of its elements exactly once."""
    if sum(chunk.sizes.numel() for chunk in tensor.chunks) != tensor.size.numel():
        return False
    boxes = sorted(
        [(low, low + n) for low, n in zip(chunk.offsets, chunk.sizes, strict=True)]
        for chunk in tensor.chunks
        if chunk.sizes.numel()
    )
    for number, box in enumerate(boxes):
        for other in boxes[number + 1 :]:
            if not box or other[0][0] >= box[0][1]:
                break
            if all(
                low < end and other_low < other_end
                for (other_low, end), (low, other_end) in zip(box, other, strict=True)
            ):
                return False
    return True


def _is_size(size: object) -> bool:
    return isinstance(size, torch.Size) and len(size) <= DIMS and all(n >= 0 for n in size)


def _crc_of(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())
