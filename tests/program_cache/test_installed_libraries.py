"""A library's file that is edited where it is installed makes other keys, also one that only its other modules use."""

import os
import subprocess
import sys
from pathlib import Path

import shardc

LIBRARY = {
    "library/__init__.py": "from library.core import scaled\n",
    "library/core.py": "from beneath import same\nfrom . import helper\ndef scaled(x): return same(helper.scaled(x))\n",
    "library/helper.py": "def scaled(x):\n    return x * 2.0\n",
    "beneath.py": "def same(x):\n    return x\n",
}
SCRIPT = """
import site, sys
site.ENABLE_USER_SITE, site.getusersitepackages = True, lambda: sys.argv[1]
sys.path.append(sys.argv[1])
import torch, shardc
from net import Net
torch.manual_seed(0)
program = shardc.compile(Net(8, 8), torch.ones(4, 8), mesh="dp=2")
print(program.cached)
print(program.text())
"""
NET = """
import library
from torch import nn
class Net(nn.Linear):
    def forward(self, x):
        return library.scaled(super().forward(x)).square().mean()
"""


def test_an_edited_file_of_a_library_makes_another_key(tmp_path: Path) -> None:
    site, own = tmp_path / "site", tmp_path / "own"
    own.mkdir()
    (own / "net.py").write_text(NET)
    for name, text in LIBRARY.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)

    def started() -> list[str]:
        path = os.pathsep.join([str(Path(shardc.__file__).parents[1]), str(own)])
        env = {
            **os.environ,
            "SHARDC_CACHE": str(tmp_path / "cache"),
            "PYTHONPATH": path,
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = [sys.executable, "-P", "-c", SCRIPT, str(site)]
        run = subprocess.run(command, env=env, cwd=own, stdout=subprocess.PIPE, text=True, check=True)
        return run.stdout.split("\n", 1)

    first = started()
    assert first[0] == "stored"
    assert started() == ["hit", first[1]]
    for name, text in (("library/helper.py", "2.0"), ("beneath.py", "return x")):
        (site / name).write_text(LIBRARY[name].replace(text, f"{text} * 3.0"))
        cached, program = started()
        assert cached == "stored"
        assert program != first[1]
        first = [cached, program]
