"""Checkpoints: the state of a trainer on disk, in the format of `torch.distributed.checkpoint`, whole or not there.

    trainer.save("out/step-1000", extra={"scheduler": scheduler.state_dict()})
    extra = trainer.load("out/step-1000")            # on any mesh and plan, in a job or in simulation
    model.load_state_dict(load_state_dict("out/step-1000"))

A rank writes its own shards and reads its own (`planners`). A crash never costs the previous checkpoint (`folder`). All
ranks must call each of these functions; what fails on one rank fails on all.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from shardc.ir.collectives import human_bytes
from shardc.ir.diagnostic import Diagnostic, ShardcError, error, suggest
from shardc.ir.mesh import Mesh
from shardc.ir.program import CONSTANT
from shardc.ir.types import DTYPE_NAMES, TensorType
from shardc.runtime.checkpoint.folder import discard, find, place_of, temporary
from shardc.runtime.checkpoint.held import Held, Position, writes
from shardc.runtime.checkpoint.lock import FolderLock
from shardc.runtime.checkpoint.manifest import LARGEST, Manifest, Piece, Stored
from shardc.runtime.checkpoint.planners import LoadShards, Reader, SaveShards, Writer, names_of
from shardc.torch_compat import stored_at

T = TypeVar("T")
SHOWN = 12  # tensors that do not fit, of hundreds


class Saving:
    """A checkpoint that is being written, or has been."""

    def __init__(self, path: Path, outcome: Future[None]) -> None:
        self.path, self._outcome, self._reported = path, outcome, False

    def wait(self) -> Path:
        """Until it is on disk under its name; raises what went wrong."""
        self._reported = True
        self._outcome.result()
        return self.path

    @property
    def done(self) -> bool:
        return self._outcome.done()

    def settle(self) -> None:
        """Wait, and raise the error of the save if it was not raised before."""
        if not self._reported:
            self.wait()
        self._outcome.exception()


class Checkpoints:
    """Writes and reads the shards of one process, and agrees with the other ranks. Without a group there are none.

    The group is gloo's, and for checkpoints alone: while one is written in the background, steps go on. A job may have
    several copies of the mesh, which hold different tensors (a pipeline's stages). `ranks` then gives for each tensor
    the ranks of the job that write it, in the order of the mesh's ranks. `job_rank` is this rank's number in the job,
    and `whole` is the job's mesh.
    """

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        group: Any = None,
        blame: Callable[[Exception], Exception] | None = None,
        job_rank: int | None = None,
        ranks: Callable[[str], Sequence[int]] | None = None,
        whole: Mesh | None = None,
    ) -> None:
        self.mesh, self.rank, self.group, self._blame = mesh, rank, group, blame
        self.job_rank = rank if job_rank is None else job_rank
        self.ranks = ranks or (lambda _: range(mesh.world_size))
        self._job = whole or mesh
        self._pending: Saving | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._locks: dict[Path, FolderLock] = {}  # of the job's first rank

    def reserve(self, path: str | Path) -> None:
        """Take the folder for this job, until `close`. Raises ShardcError (SC551) on every rank if another has it."""
        folder = place_of(path)

        def acquire() -> None:
            if self.job_rank == 0:
                with suppress(OSError):  # where no lock can be written nothing can: the save says so
                    self._locks.setdefault(folder, FolderLock(folder)).acquire()

        self.agreed(acquire)

    def save(
        self, path: str | Path, tensors: Mapping[str, Held], position: Position, asynchronous: bool = False
    ) -> Saving:
        """Write a checkpoint, in place of the one at `path` if there is one."""
        self.settle()
        folder = place_of(path)
        self.reserve(folder)
        tensors = {name: self._entry_held(entry) for name, entry in tensors.items()}
        extra = _plain(position.extra)
        stored = {name: Stored(tensor.role, tensor.aliases) for name, tensor in tensors.items()}
        manifest = Manifest(position.step, position.seed, str(self._job), extra, stored)
        outcome: Future[None] = Future()
        if asynchronous:
            self._thread = self._thread or ThreadPoolExecutor(1, "shardc-checkpoint")
            outcome = self._thread.submit(self._write, folder, self._snapshot(tensors), manifest, None)
            self._pending = Saving(folder, outcome)
            return self._pending
        self._write(folder, tensors, manifest, self._blame)
        outcome.set_result(None)
        return Saving(folder, outcome)

    def load(
        self,
        path: str | Path,
        tensors: Mapping[str, Held],
        strict: bool = True,
        unsaved: Collection[str] = (),
    ) -> Position:
        """Read a checkpoint into tensors that are there; they change only if all of it is in order on all ranks.

        `unsaved` may be in it, and are not read: checkpoints of shardc 0.1 held buffers that are not persistent. From
        a checkpoint without averages none are read.
        """
        self.settle()
        folder_path = place_of(path)
        held = {name: self._entry_held(entry) for name, entry in tensors.items()}

        def opened() -> tuple[Path, Manifest, LoadShards, Reader, dict[str, torch.Tensor]]:
            folder = find(folder_path)
            manifest = Manifest.read(folder)
            tensors = held
            if all(record.role != "average" for record in manifest.tensors.values()):
                tensors = {name: entry for name, entry in held.items() if entry.role != "average"}
            metadata = manifest.index(folder)
            reader = Reader(folder, metadata)
            named = names_of(list(metadata.state_dict_metadata), tensors)
            _check_fit(folder_path, tensors, named, manifest, metadata, strict, unsaved)
            planner = LoadShards(
                {stored_name: tensors[name] for name, stored_name in named.items()}, self.mesh, self.rank
            )
            places: Any = metadata.storage_data
            spots = [
                (item.storage_index.fqn, stored_at(places[item.storage_index])) for item in planner.items(metadata)
            ]
            manifest.verify(folder, [Piece(*spot, f"'{fqn}'") for fqn, spot in spots])
            return folder, manifest, planner, reader, _tensors(tensors)

        folder, manifest, planner, reader, state_dict = self.agreed(opened)
        with _explained(f"the checkpoint {folder} could not be read", self._blame), _quietly():
            dcp.load(
                state_dict, storage_reader=reader, planner=planner, process_group=self.group, no_dist=self.group is None
            )
        return Position(manifest.step, manifest.seed, manifest.extra)

    def names(self, path: str | Path, role: str) -> list[str]:
        """The tensors of a role that a checkpoint has; all must call it."""
        self.settle()
        stored = self.agreed(lambda: Manifest.read(find(place_of(path))).tensors)
        return [name for name, tensor in stored.items() if tensor.role == role]

    def agreed(self, act: Callable[[], T]) -> T:
        """Run an action that can fail on some ranks only. It then fails on all, with the first failing rank's error."""
        result: list[T] = []
        failure: Exception | None = None
        try:
            result.append(act())
        except Exception as raised:
            failure = raised
        failures: list[Exception | None] = [failure]
        if self.group is not None:
            failures = [None] * dist.get_world_size(self.group)
            with _explained("a rank was lost", self._blame):
                dist.all_gather_object(failures, failure, group=self.group)
        first = failure or next((reported for reported in failures if reported is not None), None)
        if first is not None:
            raise first
        return result[0]

    def gathered(self, value: T) -> list[T]:
        """What every rank of the job gives, in order; all must call it."""
        self.settle()
        if self.group is None:
            return [value]
        values: list[T] = [value] * dist.get_world_size(self.group)
        with _explained("a rank was lost", self._blame):
            dist.all_gather_object(values, value, group=self.group)
        return values

    def settle(self) -> None:
        """Wait for a save in the background."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.settle()

    def close(self) -> None:
        try:
            self.settle()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            for lock in self._locks.values():
                lock.release()
            self._locks.clear()

    def take_over(self, other: Checkpoints) -> None:
        """Hold the folders that another one of this job has reserved, which ends; all ranks must call it."""
        other.settle()
        self._locks, other._locks = other._locks, {}
        other.close()

    def _entry_held(self, entry: Held) -> Held:
        """The entry with the layout that this process holds: without a group, every tensor is whole."""
        return entry if self.group is not None else replace(entry, type=entry.type.replicated())

    def _writes(self, name: str, entry: Held) -> bool:
        """Whether this rank writes its shard: no lower rank holds the same shard."""
        return (
            entry.tensor is not None
            and self.ranks(name)[self.rank] == self.job_rank
            and writes(entry.type, self.mesh, self.rank)
        )

    def _snapshot(self, tensors: Mapping[str, Held]) -> dict[str, Held]:
        """Copies of what this rank writes, made before the next step changes it."""
        return {
            name: replace(entry, tensor=entry.tensor.detach().to("cpu", copy=True))
            if entry.tensor is not None and self._writes(name, entry)
            else entry
            for name, entry in tensors.items()
        }

    def _write(
        self,
        path: Path,
        tensors: Mapping[str, Held],
        manifest: Manifest,
        blame: Callable[[Exception], Exception] | None,
    ) -> None:
        written = {name: entry for name, entry in tensors.items() if self._writes(name, entry)}
        planner, state_dict = SaveShards(written, self.mesh, self.rank), _tensors(tensors)
        with _explained(f"the checkpoint {path} could not be written", blame), _quietly():
            try:
                dcp.save(
                    state_dict, storage_writer=Writer(path, manifest), planner=planner,
                    process_group=self.group, no_dist=self.group is None,
                )  # fmt: skip
            except BaseException:
                if self.job_rank == 0:
                    discard(temporary(path, manifest.step))
                raise


def load_state_dict(path: str | Path, roles: Sequence[str] = ("param", "buffer")) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, whole, under all the model's names; `roles` may ask for "state", the optimizer's."""
    folder = find(place_of(path))
    manifest = Manifest.read(folder)
    stored = manifest.index(folder).state_dict_metadata
    tensors: dict[str, Held] = {}
    for name, stored_tensor in manifest.tensors.items():
        kind = stored.get(name)
        if stored_tensor.role in roles and isinstance(kind, TensorStorageMetadata):
            tensor = torch.empty(kind.size, dtype=kind.properties.dtype)
            tensors[name] = Held(tensor, TensorType.of(tensor), stored_tensor.role, stored_tensor.aliases)
    Checkpoints(Mesh(), 0).load(folder, tensors, strict=False)
    by_name = {name: entry.tensor for first, entry in tensors.items() for name in (first, *entry.aliases)}
    return {name: tensor for name, tensor in by_name.items() if tensor is not None}


def _tensors(tensors: Mapping[str, Held]) -> dict[str, torch.Tensor]:
    """The state dict for torch, with the same names on every rank. A tensor that the rank lacks is an empty one."""
    return {name: torch.empty(0) if entry.tensor is None else entry.tensor for name, entry in tensors.items()}


def _plain(extra: Mapping[str, Any]) -> dict[str, Any]:
    try:
        text = json.dumps(dict(extra))
    except (TypeError, ValueError) as failure:
        hint = "numbers, text, lists and mappings of them; turn tensors into lists"
        raise error("SC408", f"`extra` is not plain data: {failure}", hint=hint) from None
    if len(text) > LARGEST // 4:  # a manifest beyond LARGEST would not be read
        message = f"`extra` is {human_bytes(len(text))} of text, a checkpoint has at most {human_bytes(LARGEST // 4)}"
        raise error("SC408", message, hint="it is for plain data that says where training stands, loaders' states too")
    return json.loads(text)


def _check_fit(
    path: Path,
    tensors: Mapping[str, Held],
    named: Mapping[str, str],
    manifest: Manifest,
    metadata: Metadata,
    strict: bool,
    unsaved: Collection[str],
) -> None:
    """Raise SC406, listing the first tensors that do not fit, unless every tensor can be read unchanged."""
    taken = set(named.values())
    skipped = {n for n in manifest.tensors if n in unsaved or n.startswith(CONSTANT)}
    unused = [
        n for n, record in manifest.tensors.items() if n not in skipped and taken.isdisjoint((n, *record.aliases))
    ]
    missing = [name for name in tensors if name not in named]
    shapes: list[str] = []
    dtypes: list[str] = []
    for name, stored_name in named.items():
        kind, type = metadata.state_dict_metadata[stored_name], tensors[name].type
        assert isinstance(kind, TensorStorageMetadata)
        if tuple(kind.size) != type.shape:
            shapes.append(f"{name}: {list(kind.size)} in the checkpoint, {list(type.shape)} in the program")
        if kind.properties.dtype != type.dtype:
            saved = DTYPE_NAMES.get(kind.properties.dtype, str(kind.properties.dtype))
            dtypes.append(f"{name}: {saved} in the checkpoint, {DTYPE_NAMES[type.dtype]} in the program")
    reasons = [("another shape", shapes, None), ("another dtype", dtypes, "compile for the same precision")]
    if strict:
        lines = [f"{n} (did you mean '{suggestion}'?)" if (suggestion := suggest(n, unused)) else n for n in missing]
        hint = missing_hint = "load(strict=False) reads what there is, and leaves the rest as it was"
        if missing and all(tensors[name].role == "state" for name in missing):
            missing_hint = (
                "it was saved without an optimizer, or with another: load(strict=False) starts the optimizer afresh"
            )
        if unused and all(manifest.tensors[name].role == "state" for name in unused):
            hint = "it was saved with an optimizer, or with another: load(strict=False) leaves that one's state out"
        averages = "moving averages (shardc.EMA): "
        if unused and all(manifest.tensors[name].role == "average" for name in unused):
            hint = f"it was saved with {averages}make the EMA before load; load(strict=False) leaves them out"
        reasons += [("no values in it", lines, missing_hint), ("no place in the program", unused, hint)]
    problems = [
        Diagnostic(
            "SC406",
            f"the checkpoint {path} does not fit: {len(lines)} tensor{'s have' if len(lines) > 1 else ' has'} {what}",
            cause="\n".join([*lines[:SHOWN], *([f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else [])]),
            hint=hint,
        )
        for what, lines, hint in reasons
        if lines
    ]
    if problems:
        raise ShardcError(*problems)


@contextmanager
def _explained(what: str, blame: Callable[[Exception], Exception] | None) -> Generator[None]:
    """Turn torch's exceptions into shardc's errors: the cause of an agreed failure, or the rank to blame."""
    try:
        yield
    except CheckpointException as failure:
        rank, (cause, _) = min(failure.failures.items())
        if isinstance(cause, ShardcError) or not isinstance(cause, Exception):
            raise cause from None
        message = f"{what}: on rank {rank}, {type(cause).__name__}: {cause}"
        raise error("SC408", message, hint="the checkpoint before, if there is one, is whole") from cause
    except ShardcError:
        raise
    except Exception as failure:
        if blame is not None:
            raise blame(failure) from failure
        raise error("SC408", f"{what}: {type(failure).__name__}: {failure}") from failure


@contextmanager
def _quietly() -> Generator[None]:
    """Without torch's warning that there is no process group: in simulation there is none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
