"""Checkpoints from anywhere: nothing runs, nothing outside of the folder is read; one job writes at a time."""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardc
from shardc.ir.diagnostic import ShardcError
from shardc.runtime import checkpoint_lock
from shardc.runtime.checkpoint import load_state_dict
from shardc.runtime.checkpoint_lock import FolderLock
from shardc.runtime.checkpoint_manifest import MANIFEST, METADATA
from shardc.runtime.launch import Trainer


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
ODD: tuple[Any, ...] = (None, True, -1, 1 << 70, 0.5, "", "..", "x" * 5000, [], {}, [[]], {"a": {}}, float("nan"))


def mutated(value: Any, draw: random.Random, depth: int = 0) -> Any:
    """A JSON value with one place of it changed: dropped, doubled, another type, another number."""
    if isinstance(value, dict) and value and draw.random() < 0.85:
        key = draw.choice(list(value))
        match draw.randrange(4):
            case 0:
                return {k: v for k, v in value.items() if k != key}
            case 1:
                return {**value, draw.choice(("..", "", "extra", "a/b", key + "x")): value[key]}
            case _:
                return {**value, key: mutated(value[key], draw, depth + 1)}
    if isinstance(value, list) and value and draw.random() < 0.85:
        at = draw.randrange(len(value))
        match draw.randrange(3):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return [*value, value[at]]
            case _:
                return [*value[:at], mutated(value[at], draw, depth + 1), *value[at + 1 :]]
    if isinstance(value, int) and not isinstance(value, bool) and draw.random() < 0.5:
        return value + draw.choice((-1, 1, 4, -value, 1 << 31))
    return draw.choice(ODD)


FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "os.remove", "os.rename", "subprocess", "socket")
WATCHED: dict[str, Any] = {"inside": None, "found": []}


def _hook(name: str, args: tuple[Any, ...]) -> None:
    """What must not happen while a forged file is read."""
    if WATCHED["inside"] is None:
        return
    writes = name == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
    if writes or name.startswith(
        ("os.system", "os.exec", "os.posix_spawn", "subprocess", "socket", "os.remove", "os.rename")
    ):
        WATCHED["found"].append((name, args))


sys.addaudithook(_hook)


def _fuzzed(folder: Path, reader: Trainer, count: int) -> dict[str, int]:
    draw = random.Random(17)
    manifest, index = (folder / MANIFEST).read_text(), (folder / METADATA).read_bytes()
    want = load_state_dict(folder)
    outcomes, codes = {"refused": 0, "same": 0}, set[str]()
    for _ in range(count):
        forged = draw.random() < 0.5
        if forged:
            data = json.loads(manifest)
            data["body"] = mutated(data["body"], draw)
            data["crc32"] = zlib.crc32(json.dumps(data["body"], sort_keys=True).encode())
            (folder / MANIFEST).write_text(json.dumps(data))
        else:
            raw = bytearray(index)
            for _ in range(draw.randint(1, 4)):
                at = draw.randrange(len(raw))
                raw[at : at + draw.randint(0, 3)] = draw.randbytes(draw.randint(0, 3))
            (folder / METADATA).write_bytes(raw)
            resealed(folder, lambda body: None)
        WATCHED["inside"] = folder
        try:
            found = load_state_dict(folder)
        except ShardcError as refused:
            codes.add(refused.code)
            outcomes["refused"] += 1
        else:
            known = {name: value for name, value in found.items() if name in want}
            assert all(torch.equal(value, want[name]) for name, value in known.items())
            outcomes["same"] += 1
        finally:
            WATCHED["inside"] = None
        (folder / MANIFEST).write_text(manifest)
        (folder / METADATA).write_bytes(index)
    assert WATCHED["found"] == []
    assert codes <= {"SC403", "SC405", "SC406", "SC407", "SC408"}
    return outcomes


def test_mutated_manifests_and_indices_are_refused_or_mean_the_same(folder: Path, reader: Trainer) -> None:
    outcomes = _fuzzed(folder, reader, 300)
    assert outcomes["refused"] > 150


@pytest.mark.long
def test_ten_thousand_of_each(folder: Path, reader: Trainer) -> None:
    assert _fuzzed(folder, reader, 20_000)["refused"] > 10_000


# --------------------------------------------------------------------------------------------------------- locks
def test_a_second_job_is_refused_and_told_who_writes(tmp_path: Path, reader: Trainer) -> None:
    code = (
        "import sys, pathlib; from shardc.runtime.checkpoint_lock import FolderLock;"
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
