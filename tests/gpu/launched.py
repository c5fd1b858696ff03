"""Starts a worker under torchrun on this machine, and reads what each rank wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run(worker: Path, ranks: int, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """What the ranks left in `folder`, the worker's last argument, as `RANK.json`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [*command, str(worker), *arguments, str(folder)],
        env=env,
        cwd=ROOT,
        timeout=300,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
