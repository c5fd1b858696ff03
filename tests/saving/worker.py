"""Savings that go wrong at every call: `python worker.py FOLDER STRIDE FAULT...` under `disk_faults.c`.

A child of this process saves step 1 where a job that died has left something, and comes to harm at a call. Then the
newest whole checkpoint is read by all who read one, and a job goes on from it. Each `STRIDE`-th call is tried, from
another one on for each fault and start. `FOLDER/report.json` says which calls there are, and what went wrong.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import shardc
from shardc.ir.diagnostic import ShardcError
from shardc.runtime.checkpoint.checkpoint import load_state_dict
from shardc.runtime.checkpoint.manifest import Manifest
from shardc.runtime.train.trainer import Trainer
from tests.saving.disk_faults import WRITES, Disk, Fault

ALL = ("param", "buffer", "state")
BATCH = torch.arange(16.0).reshape(4, 4)
START = {"older": {0, 1}, "between": {0, 1}, "nothing": {None, 1}}  # -> the steps that may be found afterwards


def program_of() -> shardc.Program:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    return shardc.compile(model, BATCH, mesh="dp=2", loss=lambda y, _: y.square().sum(), optimizer=optimizer)


def copied(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.state.items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def whole(folder: Path) -> list[str]:
    """The folders that are complete checkpoints, whatever their names."""
    complete: list[str] = []
    for path in sorted(folder.iterdir()):
        with suppress(ShardcError):
            Manifest.read(path)
            complete.append(path.name)
    return complete


def forked(act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `act` returns in a child of this process; {} where the child was killed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            result = act()
        except BaseException:
            result = {"raised": traceback.format_exc()}
        with os.fdopen(writing, "w") as out:
            json.dump(result, out)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {}


class Savings:
    def __init__(self, folder: Path) -> None:
        self.disk, self.folder, self.program = Disk(), folder, program_of()
        self.work, self.path = folder / "work", folder / "work/ck"
        self.trainer, self.reader = self.program.launch(), self.program.launch()
        self.states = [copied(self.trainer)]
        for number in range(3):
            self.trainer.step(BATCH)
            self.states.append(copied(self.trainer))
            if number == 0:
                self.first = self.program.launch()  # stands at step 1, and has saved nothing
                self.first.step(BATCH)
        self.starts = {name: folder / f"start-{name}" for name in START}
        self._make_starts()

    def _make_starts(self) -> None:
        for start in self.starts.values():
            start.mkdir()

        def save_older() -> dict[str, Any]:
            self.program.launch().save(self.starts["older"] / "ck")  # and is gone: its lock is stale
            return {}

        forked(save_older)
        shutil.copytree(self.starts["older"], self.starts["between"], dirs_exist_ok=True)
        between = self.starts["between"] / "ck"
        between.rename(between.with_name("ck.tmp-replaced"))  # as a crash between the two renames leaves it
        half = between.with_name("ck.tmp-1-00c0ffee")
        half.mkdir()
        (half / "__0_0.distcp").write_bytes(b"half")

    def begin(self, start: str) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.starts[start], self.work)

    def calls(self, start: str) -> list[str]:
        """The calls of a whole saving, the lock's release included; all bytes on disk have passed through them."""
        self.begin(start)

        def save() -> dict[str, Any]:
            self.disk.arm(self.work, Fault.COUNT, 0)
            self.first.save(self.path)
            on_disk = sum(p.stat().st_size for p in self.work.rglob("*") if p.is_file())
            counted = self.disk.bytes
            self.first.close()
            return {"calls": self.disk.disarm(), "on disk": on_disk, "counted": counted}

        result = forked(save)
        if start == "nothing":  # elsewhere a stale lock makes it write its own twice
            assert result["counted"] == result["on disk"], result
        return result["calls"]

    def harmed(self, start: str, fault: Fault, number: int) -> None:
        """Save with a fault at a call; raises AssertionError for what must not be so afterwards."""
        self.begin(start)
        copy = self.folder / "copy"

        def save() -> dict[str, Any]:
            self.disk.arm(self.work, fault, number)
            try:
                self.first.save(self.path)
                result: dict[str, Any] = {"saved": True}
            except ShardcError as refused:
                result = {"code": refused.code, "message": str(refused)}
            if "saved" in result:
                self.first.close()
            calls = self.disk.disarm()
            result |= {"harmed": len(calls) > number, "left": sorted(names(self.work)), "whole": whole(self.work)}
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(self.work, copy)
            if "code" in result:
                self.first.save(self.path)  # the disk is well again
                result["again"] = sorted(names(self.work))
            return result

        result = forked(save)
        assert "raised" not in result, result["raised"]
        if fault in (Fault.KILL, Fault.HALF):
            assert result == {}, result
            self.gone_on_with(start, self.path, saved=False)
            return
        assert result["harmed"], result
        if "code" in result:
            assert result["code"] == "SC408", result
            assert str(self.path) in result["message"], result
            assert result["again"] == ["ck", "ck.lock"], result
            if fault is not Fault.BROKEN:  # then it can be removed at once
                assert set(result["left"]) <= {"ck", "ck.lock", *names(self.starts[start]), *result["whole"]}, result
            self.gone_on_with(start, self.path, saved=True)
        shutil.rmtree(self.work)
        copy.rename(self.work)
        self.gone_on_with(start, self.path, saved="saved" in result)

    def export_calls(self) -> list[str]:
        """The calls of `export_safetensors` over weights that are there, on a disk that is well."""
        self.begin("nothing")

        def export() -> dict[str, Any]:
            self.reader.export_safetensors(self.work / "weights")
            self.disk.arm(self.work, Fault.COUNT, 0)
            self.first.export_safetensors(self.work / "weights")
            return {"calls": self.disk.disarm()}

        return forked(export)["calls"]

    def export_harmed(self, fault: Fault, number: int) -> None:
        """Weights are the old or the new ones, whatever happens; of a refused export nothing half written stays."""
        self.begin("nothing")
        folder = self.work / "weights"

        def export() -> dict[str, Any]:
            self.program.launch().export_safetensors(folder)
            self.disk.arm(self.work, fault, number)
            result: dict[str, Any] = {}
            try:
                self.first.export_safetensors(folder)
            except ShardcError as refused:
                result = {"code": refused.code, "message": str(refused)}
            calls = self.disk.disarm()
            return {**result, "harmed": len(calls) > number, "left": sorted(names(folder))}

        result = forked(export)
        if result:
            assert "raised" not in result, result["raised"]
            assert result["harmed"], result
            if fault is not Fault.BROKEN:
                assert result["left"] == ["model.safetensors"], result
            assert ("code" in result) <= (result.get("code") == "SC408" and str(folder) in result["message"]), result
        else:
            assert fault in (Fault.KILL, Fault.HALF)
        read = load_file(folder / "model.safetensors")
        states = self.states[1:2] if result and "code" not in result else self.states[:2]
        assert any(all(torch.equal(value, state[name]) for name, value in read.items()) for state in states)
        self.reader.export_safetensors(folder)
        assert names(folder) == {"model.safetensors"}, names(folder)

    def gone_on_with(self, start: str, path: Path, saved: bool) -> None:
        """All who read a checkpoint find the same whole one; the next job goes on from it, and leaves no rubbish."""
        step: int | None
        try:
            self.reader.load(path)
            step = self.reader.steps
        except ShardcError as refused:
            if refused.code != "SC407":  # of a folder that holds no checkpoint
                raise
            step = None
        assert step in ({1} if saved else START[start]), step
        if step is not None:
            assert equal(self.reader.state, self.states[step])
            read = load_state_dict(path, roles=ALL)
            assert all(torch.equal(read[name], value) for name, value in self.states[step].items())
        with self.program.launch() as job:
            steps = [metrics.step for metrics in job.train([BATCH] * 3, 2, checkpoint=path, progress=False)]
            assert steps == list(range((step or 0) + 1, 3)), steps
            assert names(path.parent) == {"ck", "ck.lock"}, names(path.parent)
        assert names(path.parent) == {"ck"}, names(path.parent)
        self.reader.load(path)
        assert self.reader.steps == 2
        assert equal(self.reader.state, self.states[2])


def main() -> None:
    torch.set_num_threads(1)
    folder, stride, faults = Path(sys.argv[1]), int(sys.argv[2]), [Fault[name] for name in sys.argv[3:]]
    savings = Savings(folder)
    report: dict[str, Any] = {"calls": {}, "tried": 0, "wrong": []}
    harms = {start: partial(savings.harmed, start) for start in START} | {"export": savings.export_harmed}
    for start, harm in harms.items():
        calls = report["calls"][start] = savings.export_calls() if start == "export" else savings.calls(start)
        for fault in faults:
            offset = (7 * int(fault) + 3 * len(start)) % stride
            for number, call in list(enumerate(calls))[offset::stride]:
                if fault is Fault.HALF and not call.startswith(WRITES):
                    continue
                report["tried"] += 1
                try:
                    harm(fault, number)
                except Exception as wrong:
                    what = "".join(traceback.format_exception(wrong)[-2:])[-1500:]
                    report["wrong"].append(f"{start}, {fault.name} at {number} ({call}): {what}")
    (folder / "report.json").write_text(json.dumps(report))
    os._exit(0)


if __name__ == "__main__":
    main()
