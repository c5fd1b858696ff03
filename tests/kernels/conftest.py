"""One interpreter worker for each test process. Without Triton no kernels are tested (a Mac runs the references)."""

import sys
from collections.abc import Generator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from interpreter import Interpreter

from kernels_triton.launch.launch import HAS_TRITON


@pytest.fixture(scope="session")
def interpreted() -> Generator[Interpreter]:
    if not HAS_TRITON:
        pytest.skip("Triton is not installed: its kernels cannot be interpreted here")
    worker = Interpreter()
    yield worker
    worker.close()
