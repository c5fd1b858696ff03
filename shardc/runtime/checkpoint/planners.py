"""How shards become items of torch.distributed.checkpoint, and items shards.

A shard of an interleaved placement is several chunks of its tensor, and each is an item of its own:

    f32[(3 8@tp 4)], tp=2     rank 1 writes, or reads, [16:32], [48:64] and [80:96] of 96

What several ranks hold is written by the lowest of them. Reading takes from every chunk that was written, on whatever
mesh, the part that overlaps; neither side ever has a whole tensor that is not its shard.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shardc.ir.mesh import Mesh
from shardc.ir.types import TensorType
from shardc.runtime.checkpoint.folder import begin, publish, temporary
from shardc.runtime.checkpoint.held import Held
from shardc.runtime.checkpoint.manifest import METADATA, Manifest, crc_of
from shardc.runtime.execute.layout import shard_slices
from shardc.torch_compat import stored_at

CHUNK_BYTES = 64 << 20  # of a longer one a reader that needs a part would have to read it all at once
Local = tuple[slice, ...]


def chunks_of(type: TensorType, mesh: Mesh, rank: int) -> dict[torch.Size, tuple[ChunkStorageMetadata, Local]]:
    """A rank's shard as chunks of the whole tensor, by their offsets: each with its place in the shard."""
    dims = [[(run.whole, run.local) for run in runs] for runs in shard_slices(type, mesh, rank)]
    if not type.numel():
        dims = [[(slice(0, n), slice(0, n))] for n in type.shape]
    elif dims and all(dims):
        row = math.prod(max(whole.stop - whole.start for whole, _ in runs) for runs in dims[1:]) * type.dtype.itemsize
        dims[0] = [part for run in dims[0] for part in _cut(*run, max(1, CHUNK_BYTES // row))]
    chunks: dict[torch.Size, tuple[ChunkStorageMetadata, Local]] = {}
    for runs in product(*dims):
        offsets = torch.Size([whole.start for whole, _ in runs])
        sizes = torch.Size([whole.stop - whole.start for whole, _ in runs])
        chunks[offsets] = ChunkStorageMetadata(offsets, sizes), tuple(local for _, local in runs)
    return chunks


def _cut(whole: slice, local: slice, rows: int) -> list[tuple[slice, slice]]:
    starts = range(0, whole.stop - whole.start, rows)
    ends = [min(start + rows, whole.stop - whole.start) for start in starts]
    return [
        (slice(whole.start + start, whole.start + end), slice(local.start + start, local.start + end))
        for start, end in zip(starts, ends, strict=True)
    ]


class SaveShards(DefaultSavePlanner):
    """Plans the chunks that this rank writes: its shards of the given tensors."""

    def __init__(self, tensors: Mapping[str, Held], mesh: Mesh, rank: int) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._held = tensors
        self._chunks = {name: chunks_of(entry.type, mesh, rank) for name, entry in tensors.items()}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.is_coordinator = state_dict, is_coordinator

    def create_local_plan(self) -> SavePlan:
        items: list[WriteItem] = []
        for name, chunks in self._chunks.items():
            type = self._held[name].type
            for offsets, (chunk, _) in chunks.items():
                data = TensorWriteData(chunk, TensorProperties(type.dtype), torch.Size(type.shape))
                items.append(WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        name, offsets = write_item.index.fqn, write_item.index.offset
        tensor = self._held[name].tensor
        assert offsets is not None
        assert tensor is not None
        return tensor.detach()[self._chunks[name][offsets][1]]


class LoadShards(LoadPlanner):
    """Plans what this rank reads, into tensors that are there. `named` says under which name each was stored."""

    def __init__(self, named: Mapping[str, Held], mesh: Mesh, rank: int) -> None:
        self._mesh = mesh
        self._tensors = {name: entry.tensor.detach() for name, entry in named.items() if entry.tensor is not None}
        self._types = {name: named[name].type for name in self._tensors}
        self._chunks = {name: chunks_of(type, mesh, rank) for name, type in self._types.items()}
        self._metadata: Metadata | None = None

    def items(self, metadata: Metadata) -> list[ReadItem]:
        items: list[ReadItem] = []
        for name, chunks in self._chunks.items():
            stored = metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, stored, [chunk for chunk, _ in chunks.values()])
        return items

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        assert self._metadata is not None
        return LoadPlan(self.items(self._metadata))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        for name, type in self._types.items():
            if type.uneven_atoms(self._mesh):
                self._tensors[name].zero_()  # of the padding nothing is read
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError(f"{read_item.dest_index.fqn} is a tensor")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        name, offsets = read_item.dest_index.fqn, read_item.dest_index.offset
        assert offsets is not None
        tensor = self._tensors[name][self._chunks[name][offsets][1]]
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass


@dataclass(frozen=True)
class Checked(WriteResult):
    """An item that was written, and the CRC of its bytes."""

    crc: int = 0


class Writer(FileSystemWriter):
    """Writes beside `path`, and moves there when all is on disk. A tied tensor is indexed under all its names."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        super().__init__(temporary(path, manifest.step), per_thread_copy_ahead=0)
        self._place, self._manifest = path, manifest

    @property
    def _folder(self) -> Path:
        return temporary(self._place, self._manifest.step)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # before this, none may make the folder: the first rank does, when it has tidied

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        begin(self._place, self._manifest.step)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = super().write_data(plan, planner).value()
        future: Future[list[WriteResult]] = Future()
        future.set_result([self._checked(result) for result in results])
        return future

    def _checked(self, result: WriteResult) -> Checked:
        name, offset, length = stored_at(result.storage_data)
        with (self._folder / name).open("rb") as file:
            crc = crc_of(file, offset, length)
        return Checked(result.index, result.size_in_bytes, result.storage_data, crc)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        tensors = metadata.state_dict_metadata
        rows: dict[str, list[list[int]]] = {}
        tied: list[WriteResult] = []
        for result in (result for results_of_rank in results for result in results_of_rank):
            assert isinstance(result, Checked)
            name, offset, length = stored_at(result.storage_data)
            rows.setdefault(name, []).append([offset, length, result.crc])
            for alias in self._manifest.tensors[result.index.fqn].aliases:
                tensors[alias] = tensors[result.index.fqn]
                tied.append(replace(result, index=replace(result.index, fqn=alias)))
        super().finish(metadata, [*results, tied])
        size = (self._folder / METADATA).stat().st_size
        with (self._folder / METADATA).open("rb+") as file:
            os.fsync(file.fileno())  # torch does so before the last of it is written
            rows[METADATA] = [[0, size, crc_of(file, 0, size)]]
        files = {file.name: file.stat().st_size for file in sorted(self._folder.iterdir())}
        replace(self._manifest, files=files, checks=rows).write(self._folder)
        publish(self._folder, self._place)


class Reader(FileSystemReader):
    """Reads with a checked index, instead of the one that torch would unpickle."""

    def __init__(self, folder: Path, index: Metadata) -> None:
        super().__init__(folder)
        self._index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._index


def names_of(stored: Sequence[str], tensors: Mapping[str, Held]) -> dict[str, str]:
    """The name under which each tensor was stored. Tensors that were not stored are left out."""
    known = set(stored)
    stored_names = {
        name: next((n for n in (name, *entry.aliases) if n in known), None) for name, entry in tensors.items()
    }
    return {name: stored_name for name, stored_name in stored_names.items() if stored_name is not None}
