"""Checkpoints from anywhere: nothing runs, nothing outside of the folder is read; one job writes at a time."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

import shardc
from shardc.ir.diagnostic import ShardcError
from shardc.runtime.checkpoint import lock as checkpoint_lock
from shardc.runtime.checkpoint.checkpoint import load_state_dict
from shardc.runtime.checkpoint.folder import temporary
from shardc.runtime.checkpoint.lock import FolderLock
from shardc.runtime.checkpoint.manifest import MANIFEST, METADATA
from shardc.runtime.train.trainer import Trainer
from tests.files.mutations import mutated, nothing_done

pytestmark = pytest.mark.audited


def small() -> Trainer:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    program = shardc.compile(
        model, torch.ones(4, 4), mesh="dp=2", loss=lambda y, _: y.square().sum(), optimizer=optimizer
    )
    return program.launch()


@pytest.fixture(scope="module")
def reader() -> Trainer:
    return small()


@pytest.fixture
def folder(tmp_path: Path, reader: Trainer) -> Path:
    reader.save(tmp_path / "ck")
    return tmp_path / "ck"


def resealed(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """A manifest that somebody forged, with every check sum right."""
    data = json.loads((folder / MANIFEST).read_text())
    change(data["body"])
    for name in list(data["body"].get("files", ())) if isinstance(data["body"].get("files"), dict) else ():
        place = folder / str(name)
        if name == METADATA and place.is_file():
            data["body"]["files"][name] = place.stat().st_size
            crc = zlib.crc32(place.read_bytes())
            data["body"]["checks"][name] = [[0, place.stat().st_size, crc]]
    data["crc32"] = zlib.crc32(json.dumps(data["body"], sort_keys=True).encode())
    (folder / MANIFEST).write_text(json.dumps(data))


class Bomb:
    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return subprocess.call, (["touch", str(self.place)],)


class Opens(Bomb):
    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.place), "w")


@pytest.mark.parametrize("bomb", [Bomb, Opens])
def test_an_index_that_runs_something_is_refused(
    tmp_path: Path, folder: Path, reader: Trainer, bomb: type[Bomb]
) -> None:
    (folder / METADATA).write_bytes(pickle.dumps(bomb(tmp_path / "ran")))
    resealed(folder, lambda body: None)
    for read in (reader.load, load_state_dict):
        with pytest.raises(ShardcError, match="which is no part of an index") as caught:
            read(folder)
        assert caught.value.code == "SC405"
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["../ck2/__0_0.distcp", "/etc/passwd", "..", "a/b", "a\\b", "a\0b", ""])
def test_names_lead_nowhere_else(folder: Path, reader: Trainer, name: str) -> None:
    def change(body: dict[str, Any]) -> None:
        body["files"][name] = body["files"].pop("__0_0.distcp")

    resealed(folder, change)
    with pytest.raises(ShardcError) as caught:
        reader.load(folder)
    assert caught.value.code == "SC405"


def test_the_index_names_files_of_the_manifest_alone(tmp_path: Path, folder: Path, reader: Trainer) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes((folder / "__0_0.distcp").read_bytes())
    index = pickle.loads((folder / METADATA).read_bytes())
    for one in index.storage_data.values():
        one.relative_path = "../secret"
    (folder / METADATA).write_bytes(pickle.dumps(index))
    resealed(folder, lambda body: None)
    with pytest.raises(ShardcError, match="which has no such piece"):
        reader.load(folder)


def test_a_link_is_not_followed(tmp_path: Path, folder: Path, reader: Trainer) -> None:
    file = folder / "__0_0.distcp"
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ShardcError, match="is missing"):
        reader.load(folder)


def test_a_size_that_no_file_holds_is_not_allocated(folder: Path) -> None:
    index = pickle.loads((folder / METADATA).read_bytes())
    for one in index.state_dict_metadata.values():
        one.size = torch.Size([1 << 25] * len(one.size))
    (folder / METADATA).write_bytes(pickle.dumps(index))
    resealed(folder, lambda body: None)
    with pytest.raises(ShardcError, match="more than its files hold"):
        load_state_dict(folder)


# ---------------------------------------------------------------------------------------------------- mutations
def _forged_manifest(folder: Path, draw: random.Random) -> None:
    data = json.loads((folder / MANIFEST).read_text())
    data["body"] = mutated(data["body"], draw)
    data["crc32"] = zlib.crc32(json.dumps(data["body"], sort_keys=True).encode())
    if draw.random() < 0.1:
        data = mutated(data, draw)
    (folder / MANIFEST).write_text(json.dumps(data))


def _forged_index(folder: Path, draw: random.Random) -> None:
    """Torch's index with a byte, or a part of what it says, changed; and a manifest that agrees."""
    raw = bytearray((folder / METADATA).read_bytes())
    if draw.random() < 0.5:
        for _ in range(draw.randint(1, 4)):
            start = draw.randrange(len(raw))
            raw[start : start + draw.randint(0, 3)] = draw.randbytes(draw.randint(0, 3))
    else:
        index = pickle.loads(raw)
        name, place = draw.choice(list(index.state_dict_metadata)), draw.choice(list(index.storage_data))
        tensor, info = index.state_dict_metadata[name], index.storage_data[place]
        number = draw.choice((-1, 0, 1, 2, 3, 4, 5, 16, 64, 1 << 40))
        match draw.randrange(9):
            case 0:
                tensor.size = torch.Size([number] * draw.randint(0, 3))
            case 1:
                tensor.properties.dtype = draw.choice((torch.int8, torch.float64, torch.bfloat16, torch.int32))
            case 2:
                info.offset = draw.choice([one.offset for one in index.storage_data.values()] + [number])
            case 3:
                info.length = draw.choice((number, info.length + number))
            case 4:
                info.relative_path = draw.choice(("../ck", "/etc/passwd", MANIFEST, METADATA, "", "__1_0.distcp"))
            case 5:
                tensor.chunks = draw.choice(([], tensor.chunks * 2, None, tensor.chunks[:-1], [tensor]))
            case 6:
                chunk = tensor.chunks[0]
                chunk.sizes, chunk.offsets = draw.choice(
                    (
                        (chunk.sizes[:-1], chunk.offsets),
                        (chunk.sizes, chunk.sizes),
                        (torch.Size([number]), chunk.offsets),
                    )
                )
            case 7:
                del index.storage_data[place]
            case _:
                del index.state_dict_metadata[name]
        raw = bytearray(pickle.dumps(index))
    (folder / METADATA).write_bytes(raw)
    resealed(folder, lambda body: None)


def _altered_folder(folder: Path, draw: random.Random) -> None:
    """Files cut, lengthened, changed, removed, swapped, turned into links or folders, and new ones beside them."""
    files = sorted(folder.iterdir())
    file, other = draw.choice(files), draw.choice(files)
    data = bytearray(file.read_bytes())
    file.unlink()
    match draw.randrange(8):
        case 0:
            file.write_bytes(data[: draw.randrange(len(data))])
        case 1:
            file.write_bytes(data + draw.randbytes(draw.randint(1, 9)))
        case 2:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            file.write_bytes(data)
        case 3:
            pass
        case 4:
            file.write_bytes(other.read_bytes() if other != file else b"")
        case 5:
            file.symlink_to(other if other != file else "/etc/passwd")
        case 6:
            file.mkdir()
        case _:
            file.write_bytes(data)
            (folder / draw.choice(("extra", ".metadata.tmp", "__9_0.distcp", "shardc.json~"))).write_bytes(bytes(data))


FORGE = {"manifest": _forged_manifest, "index": _forged_index, "folder": _altered_folder}


def _fuzzed(folder: Path, reader: Trainer, kind: str, count: int, seed: int = 17) -> Counter[str]:
    """What became of mutated checkpoints: a code, or `same`. Only one that says less may load to fewer tensors."""
    draw, outcomes = random.Random(seed), Counter[str]()
    whole = folder.with_name("whole")
    shutil.copytree(folder, whole)
    want = load_state_dict(folder, roles=("param", "buffer", "state"))
    for number in range(count):
        FORGE[kind](folder, draw)
        beside = sorted(folder.parent.iterdir())
        for tensor in reader.state.values():
            tensor.fill_(7)
        with nothing_done():
            try:
                values = load_state_dict(folder, roles=("param", "buffer", "state"))
                reader.load(folder)
            except ShardcError as refused:
                outcomes[refused.code] += 1
            else:
                outcomes["same"] += 1
                assert all(torch.equal(value, want[name]) for name, value in values.items() if name in want), number
                assert all(torch.equal(value, want[name]) for name, value in reader.state.items()), number
        assert sorted(folder.parent.iterdir()) == beside
        shutil.rmtree(folder)
        shutil.copytree(whole, folder)
    shutil.rmtree(whole)
    assert outcomes.keys() <= {"SC403", "SC405", "SC406", "SC407", "SC408", "same"}
    return outcomes


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", FORGE)
def test_mutated_checkpoints_are_refused_or_mean_the_same(folder: Path, reader: Trainer, kind: str) -> None:
    outcomes = _fuzzed(folder, reader, kind, 150)
    assert outcomes["same"] < 75
    assert outcomes["SC405"] > 50


@pytest.mark.long
@pytest.mark.parametrize("kind", FORGE)
def test_ten_thousand_of_each(folder: Path, reader: Trainer, kind: str) -> None:
    assert _fuzzed(folder, reader, kind, 10_000, seed=18)["SC405"] > 3_000


def _refused_index(folder: Path, change: Callable[[Any], None], what: str) -> None:
    index = pickle.loads((folder / METADATA).read_bytes())
    change(index)
    (folder / METADATA).write_bytes(pickle.dumps(index))
    resealed(folder, lambda body: None)
    with pytest.raises(ShardcError, match=what) as caught:
        load_state_dict(folder)
    assert caught.value.code == "SC405"


def test_an_object_of_the_index_that_lacks_what_its_class_has(folder: Path) -> None:
    def empty(index: Any) -> None:
        index.state_dict_metadata["weight"].chunks[0] = object.__new__(ChunkStorageMetadata)

    _refused_index(folder, empty, "is no index of tensors")


def test_a_tensor_of_which_a_part_is_nowhere(folder: Path) -> None:
    _refused_index(
        folder, lambda index: index.state_dict_metadata["weight"].chunks.clear(), "in a way that no tensor is"
    )


def test_two_tensors_in_the_same_bytes(folder: Path) -> None:
    def moved(index: Any) -> None:
        places = {place.fqn: info for place, info in index.storage_data.items()}
        places["weight:exp_avg"].offset = places["weight"].offset
        places["weight:exp_avg"].length = places["weight"].length

    _refused_index(folder, moved, "in the same bytes of __0_0.distcp")


# --------------------------------------------------------------------------------------------------------- locks
def test_a_second_job_is_refused_and_told_who_writes(tmp_path: Path, reader: Trainer) -> None:
    code = (
        "import sys, pathlib; from shardc.runtime.checkpoint.lock import FolderLock;"
        "FolderLock(pathlib.Path(sys.argv[1])).acquire(); print('mine', flush=True); sys.stdin.read()"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path / "ck")]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "mine\n"
        for attempt in (reader.save, lambda path: next(reader.train([], 5, checkpoint=path), None)):
            with pytest.raises(ShardcError, match=f"process {other.pid}") as caught:
                attempt(tmp_path / "ck")
            assert caught.value.code == "SC551"
        assert not (tmp_path / "ck").exists()
        other.kill()
    reader.save(tmp_path / "ck")  # its process is gone: the lock is stale
    assert not list(tmp_path.glob("ck.lock.*"))


def test_a_lock_that_nobody_renews_is_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "ck.lock"
    file.write_text(json.dumps({"id": "another", "host": "elsewhere", "pid": 1, "started": "1"}))
    with pytest.raises(ShardcError, match="process 1 on elsewhere"):
        FolderLock(tmp_path / "ck").acquire()
    os.utime(file, (0, time.time() - checkpoint_lock.STALE - 1))
    lock = FolderLock(tmp_path / "ck")
    lock.acquire()
    assert json.loads(file.read_text())["pid"] == os.getpid()
    lock.release()
    assert not file.exists()


def test_an_owner_renews_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_lock, "RENEWED", 0.01)
    lock, file = FolderLock(tmp_path / "ck"), tmp_path / "ck.lock"
    lock.acquire()
    os.utime(file, (0, 0))
    deadline = time.monotonic() + 20
    while file.stat().st_mtime == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert file.stat().st_mtime > 0
    lock.release()


def test_what_was_half_written_on_a_full_disk_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = small()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(ShardcError, match="No space left"):
        trainer.save(tmp_path / "ck")
    assert {one.name for one in tmp_path.iterdir()} == {"ck.lock"}
    monkeypatch.undo()
    import safetensors.torch

    def half(tensors: object, path: str, *_: object) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", half)
    with pytest.raises(ShardcError, match="No space left") as caught:
        trainer.export_safetensors(tmp_path / "weights")
    assert caught.value.code == "SC408"
    assert list((tmp_path / "weights").iterdir()) == []


def test_all_ranks_of_a_job_name_a_save_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of a machine that came back: its agent counts restarts anew, and may name rank 0 otherwise."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("MASTER_PORT", "29500")
    names: set[Path] = set()
    for restarts, address in (("1", "localhost"), ("0", "127.0.0.1")):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        monkeypatch.setenv("MASTER_ADDR", address)
        names.add(temporary(tmp_path / "run", 5))
    monkeypatch.setenv("MASTER_PORT", "29501")
    assert len(names) == 1
    assert temporary(tmp_path / "run", 5) not in names
