"""A model whose code lies in several files that a test may rewrite, and what compiles it in a process of its own. And
what becomes of a request with a cache and without."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import shardc
from shardc.compiler.request import Request

FILES = {
    "scaling.py": "FACTOR = 2.0\n\n\ndef scaled(x):\n    return x * FACTOR\n",
    "net.py": (
        "import torch\nfrom torch import nn\n\nimport scaling\n\n\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.up, self.down, self.rate = nn.Linear(8, 16), nn.Linear(16, 8), 0.5\n"
        "        self.register_buffer('offset', torch.zeros(8))\n\n"
        "    def forward(self, x):\n"
        "        return scaling.scaled(self.down(self.up(x).relu()) + self.offset).square().mean() * self.rate\n\n"
        "    def save(self, path):\n"
        "        import time\n"
        "        return open(path, 'w').write(str(time.time()))\n"
    ),
}
SCRIPT = """
import sys, torch, shardc
from net import Net
torch.manual_seed(0)
program = shardc.compile(Net(), torch.ones(4, 8), mesh="dp=2, tp=2", plan={"params": {"up.weight": "tp, -"}})
print(program.cached)
print(program.text())
"""
PLAN = {"params": {"up.weight": "tp, -"}}


def written(folder: Path) -> None:
    for name, text in FILES.items():
        (folder / name).write_text(text)


def imported(folder: Path) -> ModuleType:
    """The module `net` of a folder, as a fresh process has it."""
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode  # a file that is rewritten at once has its time
    try:
        return importlib.import_module("net")
    finally:
        sys.dont_write_bytecode = before
        sys.path.remove(str(folder))


def outcome(request: Request, *, cached: bool) -> tuple[str, Any]:
    """What became of the cache; and the program, or the error."""
    options = {name: getattr(request, name) for name in ("mesh", "plan", "loss", "optimizer", "strict", "mode")}
    try:
        program = shardc.compile(request.model, request.batch, **options, cache=None if cached else False)
    except shardc.ShardcError as refused:
        return "", str(refused)
    plain = json.dumps(program.to_plain(), sort_keys=True, default=str)
    return program.cached, (program.text(), plain, dict(program.uncomputed), program.annotations)
