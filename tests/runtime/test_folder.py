"""The place of a save: through a symbolic link, and where the new folder cannot be renamed to it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardc.ir.diagnostic import ShardcError
from shardc.runtime.checkpoint.checkpoint import load_state_dict
from shardc.runtime.checkpoint.folder import begin_export, publish, temporary
from tests.runtime.test_checkpoint_safety import small


def test_a_link_to_the_folder_stays_a_link(tmp_path: Path) -> None:
    link, trainer, reader = tmp_path / "link", small(), small()
    link.symlink_to("disk/real")
    for steps in (1, 2, 3):
        trainer.step(torch.ones(4, 4))
        trainer.save(link, asynchronous=steps == 2)
        trainer.checkpoints.settle()
        reader.load(link)
        assert reader.steps == steps
        assert torch.equal(reader.state_dict()["weight"], trainer.state_dict()["weight"])
        assert os.readlink(link) == "disk/real"
        assert sorted(p.name for p in tmp_path.iterdir()) == ["disk", "link"]
        assert sorted(p.name for p in (tmp_path / "disk").iterdir()) == ["real", "real.lock"]
    assert load_state_dict(link).keys() == {"weight", "bias"}
    trainer.close()
    link.unlink()
    link.symlink_to("weights")
    trainer = small()
    trainer.export_safetensors(link)
    assert [p.name for p in (tmp_path / "weights").iterdir()] == ["model.safetensors"]


def test_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    reader = small()
    (tmp_path / "link").symlink_to("link")
    acts: list[Callable[[Path], object]] = [reader.save, reader.load, reader.export_safetensors, load_state_dict]
    for act in acts:
        with pytest.raises(ShardcError, match="symbolic link that leads back to itself") as caught:
            act(tmp_path / "link")
        assert caught.value.code == "SC408"
    assert os.readlink(tmp_path / "link") == "link"


@pytest.mark.parametrize("fails", [{2}, {2, 3}], ids=["rename", "rename and back"])
def test_a_new_checkpoint_that_cannot_take_its_place(
    fails: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, reader, path, rename, calls = small(), small(), tmp_path / "ck", os.rename, 0
    trainer.save(path)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    trainer.step(torch.ones(4, 4))

    def failing(source: Any, target: Any) -> None:
        nonlocal calls
        calls += Path(source).is_dir()
        if Path(source).is_dir() and calls in fails:
            raise PermissionError(13, "Permission denied", str(target))
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", failing)
        with pytest.raises(ShardcError, match="Permission denied") as caught:
            trainer.save(path)
    assert (caught.value.code, calls) == ("SC408", 3)
    lying = path if fails == {2} else tmp_path / "ck.tmp-replaced"
    assert path.exists() == (fails == {2})
    assert {file.name: file.read_bytes() for file in lying.iterdir()} == before
    assert (f"the one before at {lying}" in str(caught.value)) == (fails != {2})
    reader.load(path)
    assert reader.steps == 1  # the whole draft is the newest
    trainer.step(torch.ones(4, 4))
    trainer.save(path)
    reader.load(path)
    assert reader.steps == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ck", "ck.lock"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_read_only_folder_is_replaced_and_removed() -> None:
    """Of a user's: root may remove everything."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o777)
        child = os.fork()
        if not child:
            try:
                if os.getuid() == 0:
                    os.setuid(65534)
                os._exit(_replaced_thrice(Path(name) / "out"))
            finally:
                os._exit(100)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        assert sorted(path.name for path in Path(name).iterdir()) == ["out"]


def _replaced_thrice(path: Path) -> int:
    """Export a folder with a read-only one in it three times, a failed draft before each: how often that worked."""
    for turn in range(3):
        begin_export(path)
        _keep(path)
        draft = begin_export(path)
        assert [entry.name for entry in draft.iterdir()] == []
        _keep(path)
        publish(draft, path)
        if [entry.name for entry in path.parent.iterdir()] != ["out"]:
            return turn
    return 3


def _keep(path: Path) -> None:
    draft = temporary(path, 0)
    (draft / "runs").mkdir()
    (draft / "config.json").touch()
    (draft / "runs/log").touch()
    (draft / "runs").chmod(0o555)
