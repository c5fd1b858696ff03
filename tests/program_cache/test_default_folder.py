"""Programs are kept in the user's own folder, unless a word says otherwise; where there is none, they are compiled."""

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import shardc
from shardc.cli.main import app
from shardc.program_cache.folder import Folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home in which nothing is yet, and no variable of ours."""
    for name in ("SHARDC_CACHE", "SHARDC_CACHE_LIMIT", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


class Net(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


def cached(**options: Any) -> str:
    torch.manual_seed(0)
    program = shardc.compile(Net(8, 8), torch.ones(4, 8), mesh="dp=2", **options)
    assert program.simulate().loss is not None
    return program.cached


def test_programs_are_kept_in_the_users_own_folder(home: Path) -> None:
    assert [cached() for _ in range(2)] == ["stored", "hit"]
    folder = home / ".cache" / "shardc"
    assert Folder.of_environment() == Folder(folder)
    assert [path.suffix for path in sorted(folder.iterdir())] == [".hits", ".program"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert "1 program" in CliRunner().invoke(app, ["cache"]).stdout
    assert cached(cache=False) == ""


@pytest.mark.parametrize("word", ["off", "0", "no", "false", "OFF", "", " off "])
def test_a_word_switches_it_off(word: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDC_CACHE", word)
    assert cached() == "the cache is off"
    assert not [*home.iterdir()]


def test_variables_name_other_folders(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "caches"))
    for word in ("on", "1", "YES"):
        monkeypatch.setenv("SHARDC_CACHE", word)
        assert Folder.of_environment() == Folder(home / "caches" / "shardc")
    monkeypatch.setenv("SHARDC_CACHE", "~/programs")
    assert Folder.of_environment() == Folder(home / "programs")
    monkeypatch.setenv("SHARDC_CACHE", "on")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert Folder.of_environment() == Folder(home / ".cache" / "shardc"), "the standard says that it does not count"


# ---------------------------------------------------------------------- what stands in the way
def test_without_a_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", unknown)
    assert cached() == "no folder is known: Could not determine home directory.; SHARDC_CACHE may name one"
    monkeypatch.setenv("SHARDC_CACHE", "~nobody-of-this-name/programs")
    assert cached().startswith("no folder is known")
    assert "no folder is known" in CliRunner().invoke(app, ["cache"]).stdout


def test_a_home_that_is_a_file_or_is_not_there(home: Path) -> None:
    home.rmdir()
    home.write_text("")
    assert "cannot be made" in cached()
    assert home.read_text() == ""


def test_a_cache_that_is_a_file(home: Path) -> None:
    (home / ".cache").mkdir()
    (home / ".cache" / "shardc").write_text("")
    assert "is no folder" in cached()
    (home / ".cache" / "shardc").unlink()
    (home / ".cache" / "shardc").symlink_to(home / "gone")
    assert "is no folder" in cached()


def deny(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """As for a user who may not write there: tests may run as root, who may."""
    real = os.access
    denied = lambda path, mode, **more: not Path(path).is_relative_to(folder) and real(path, mode, **more)  # noqa: E731
    monkeypatch.setattr(os, "access", denied)


def test_a_home_that_cannot_be_written(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deny(monkeypatch, home)
    assert f"{home} is not writable; SHARDC_CACHE may name another folder" in cached()
    assert not [*home.iterdir()]
    monkeypatch.setenv("SHARDC_CACHE", str(home / "programs"))
    assert "is not writable" in cached()


def test_a_folder_that_cannot_be_read(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cached() == "stored"
    folder = home / ".cache" / "shardc"
    real = Path.open

    def refuse(self: Path, *arguments: Any, **options: Any) -> Any:
        if self.parent == folder:
            raise PermissionError(errno.EACCES, "denied", str(self))
        return real(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    assert cached() == "stored", "it is compiled anew"
    monkeypatch.setattr(os, "replace", lambda *paths: refuse(folder / "file"))
    assert "nothing can be written" in cached()


def test_a_disk_that_is_full(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*paths: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        assert "nothing can be written" in cached()
    assert not [*(home / ".cache" / "shardc").iterdir()], "nothing half written is left"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", full)
        (home / ".cache" / "shardc").rmdir()
        assert "nothing can be written" in cached()
    assert cached() == "stored"


def test_a_home_of_another_user(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As root has it under `sudo`: a folder of root's there would shut its owner out."""
    monkeypatch.setattr(os, "getuid", lambda: os.stat(home).st_uid + 1)
    assert "is another user's" in cached()
    assert not [*home.iterdir()]
    (home / ".cache" / "shardc").mkdir(parents=True, mode=0o700)
    assert "is not trusted" in cached()
    assert not [*(home / ".cache" / "shardc").iterdir()]


def test_a_named_folder_may_lie_in_that_of_another_user(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.stat
    owner = home.stat().st_uid
    monkeypatch.setenv("SHARDC_CACHE", str(home / "named"))

    def foreign(path: Any, **options: Any) -> os.stat_result:
        about = real(path, **options)
        fields = [*about]
        fields[4] = owner + 1 if path == home else about.st_uid
        return os.stat_result(fields)

    monkeypatch.setattr(os, "stat", foreign)
    assert Folder.of_environment() == Folder(home / "named")
    monkeypatch.setenv("SHARDC_CACHE", "on")
    assert "is another user's" in str(Folder.of_environment())


def test_a_bound_of_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDC_CACHE_LIMIT", "0")
    assert cached() == "the cache is off: SHARDC_CACHE_LIMIT is 0"
    assert not [*home.iterdir()]
    monkeypatch.setenv("SHARDC_CACHE_LIMIT", "100")
    assert "larger than its bound" in cached()
