"""On a GPU an index outside its table raises a device-side assertion; a valid index costs no synchronisation."""

import subprocess
import sys

import pytest
import torch

from shardc.ir.ops.check_index import check_index

pytestmark = pytest.mark.gpu

BAD = """
import torch
from shardc.ir.ops.check_index import check_index
check_index(torch.tensor([0, 8, 1], device="cuda"), 8)
torch.cuda.synchronize()
"""


def test_what_lies_inside_passes_without_a_synchronisation() -> None:
    index = torch.tensor([0, 7, -100], device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = check_index(index, 8, -100)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, index)


def test_what_lies_outside_is_an_assertion() -> None:
    """In a process of its own: the context does not survive."""
    ran = subprocess.run([sys.executable, "-c", BAD], capture_output=True, text=True, check=False)
    assert ran.returncode != 0
    assert "device-side assert" in ran.stderr
