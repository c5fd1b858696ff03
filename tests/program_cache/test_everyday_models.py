"""Programs of ordinary models are kept: no value that users put into their modules is refused without need."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import shardc
from tests.program_cache import everyday


def test_ordinary_models_have_the_same_keys_in_each_process() -> None:
    """Of another seed of hashes too, by which sets have another order."""

    def keys(seed: str) -> dict[str, str]:
        env = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-m", "tests.program_cache.everyday"]
        root = Path(shardc.__file__).parents[1]
        return json.loads(subprocess.run(command, env=env, cwd=root, capture_output=True, check=True).stdout)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(keys, ("1", "2"))
    assert not {name: key for name, key in first.items() if key.startswith("none")}
    assert first == second
    assert len({*first.values()}) > 5, "configs of several kinds make one model"


@pytest.mark.parametrize("name", ["a dataclass with a method that writes", "arrays, paths, loggers", "attention"])
def test_ordinary_models_are_kept(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What compiling does stands against none of them: methods that write files are watched, and not called."""
    monkeypatch.setenv("SHARDC_CACHE", str(tmp_path))

    def cached() -> str:
        torch.manual_seed(0)
        request = everyday.MODELS[name]()
        return shardc.compile(request.model, request.batch, mesh="dp=2").cached

    assert [cached() for _ in range(2)] == ["stored", "hit"]
