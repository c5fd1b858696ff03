"""Marks every test here `gpu`, and skips tests that need more GPUs than are present: `@pytest.mark.gpu(2)`."""

import sys
from pathlib import Path

import pytest
import torch

# What the tests of kernels share; how results are judged is the interpreter's too.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "kernels")]


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return
    wanted, found = (*marker.args, 1)[0], torch.cuda.device_count()
    if found < wanted:
        pytest.skip(f"needs {wanted} GPU{'s' * (wanted > 1)}, this machine has {found or 'none'}")
