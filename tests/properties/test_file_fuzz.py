"""Program files and texts from anywhere: refused with a code, or the same program, or found by `verify`.

A file that was damaged has the wrong checksum. One that was forged has the right one; then its types say what is wrong
with it, or its body computes something else than its reference, which `verify` finds, or nothing that counts was
changed. Numbers that are the author's to choose (rates, seeds, what state starts from, a constant's elements) make
another program, as other weights would. Reading and simulating opens nothing for writing and runs nothing.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import random
import sys
from collections import Counter
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc import Program, ShardcError
from shardc.runtime.train.result import StepResult
from tests.experts import Experts
from tests.properties.file_mutants import Mutants, damaged, forged

pytestmark = pytest.mark.audited
CHOSEN = {("plan", "rates"), ("plan", "fills"), ("plan", "seed"), ("constants",)}
WATCHED: list[str] = []  # while not empty, what happened against the rules is noted
ACTIVE: list[bool] = []
FORBIDDEN = ("os.system", "os.exec", "os.fork", "os.posix_spawn", "subprocess.", "socket.", "os.remove", "os.rename")


@cache
def load_everything() -> None:
    """Import all that reading and running a program may: afterwards, a module's own code is no excuse."""
    for module in pkgutil.walk_packages(shardc.__path__, "shardc."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    importlib.import_module("torch._subclasses.schema_check_mode")  # torch 2.11 does when an op first leaves its modes


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if not ACTIVE:
        return
    if event == "open":
        path, mode, flags = args
        if (isinstance(mode, str) and set(mode) & set("wax+")) or (mode is None and flags & 0o1103):
            WATCHED.append(f"open {path} {mode}")
    elif event == "import":
        WATCHED.append(f"import {args[0]}")
    elif event == "compile" and args[0] is not None and str(args[1]).startswith("<"):
        WATCHED.append(f"compile {args}")
    elif event == "exec" and args[0].co_filename.startswith("<") and not args[0].co_filename.startswith("<frozen"):
        WATCHED.append(f"exec {args[0].co_filename}")
    elif event.startswith(FORBIDDEN):
        WATCHED.append(f"{event} {args}")


@cache
def watch() -> None:
    """Python has no way to take an audit hook back."""
    sys.addaudithook(_hook)


class Small(nn.Module):
    """A table, a product, a norm, dropout, a buffer, and a loss over classes."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(8, 4)
        self.up, self.norm, self.drop = nn.Linear(4, 8), nn.LayerNorm(8), nn.Dropout(dropout)
        self.down, self.head = nn.Linear(8, 4), nn.Linear(4, 8, bias=False)
        self.register_buffer("count", torch.zeros(()))
        self.count: Tensor

    def forward(self, ids: Tensor) -> Tensor:
        self.count += 1
        h = self.drop(self.norm(torch.relu(self.up(self.table(ids)))))
        logits = self.head(self.down(h))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.roll(1, 1).flatten())


PARAMS = {
    "table.weight": "tp, -",
    "up.weight": "tp, -",
    "up.bias": "tp",
    "down.weight": "-, tp",
    "head.weight": "tp, -",
}
SHARDED = {"params": PARAMS, "inputs": {"ids": "dp, -"}, "mesh": "dp=2, tp=2"}


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def _small(plan: dict[str, Any], dropout: float = 0.0) -> tuple[nn.Module, Tensor, dict[str, Any]]:
    ids = torch.randint(8, (8, 4), generator=torch.Generator().manual_seed(1))
    return Small(dropout), ids, SHARDED | plan


def _chain(plan: dict[str, Any]) -> tuple[nn.Module, Tensor, dict[str, Any]]:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    return Chain(), x, {"mesh": "pp=2, dp=2", "inputs": {"x": "dp, -"}} | plan


class Routed(nn.Module):
    """Tokens that are sent to two of four experts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.experts = nn.Linear(8, 4), Experts(hidden=8, width=8, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        scale, ids = self.router(x).softmax(-1).topk(2)
        return (x + self.experts(x, ids, scale)).square().mean()


def _routed(plan: dict[str, Any]) -> tuple[nn.Module, Tensor, dict[str, Any]]:
    x = torch.randn(4, 4, 8, generator=torch.Generator().manual_seed(1))
    placed = {"experts.*": "ep"}
    return Routed(), x, {"mesh": "dp=2, ep=2", "inputs": {"x": "dp"}, "params": placed} | plan


BASES = {
    "tp": lambda: _small({"clip_grad_norm": 0.5}),
    "zero3": lambda: _small({"storage": {"zero": 3, "axes": ["dp"]}, "accumulate": 2, "bucket": True}),
    "fused": lambda: _small({"fuse": True}, dropout=0.25),
    "experts": lambda: _routed({"storage": {"zero": 1, "axes": ["dp"]}}),
    "zb": lambda: _chain({"pipeline": {"microbatches": 2, "schedule": "zb-h1"}, "clip_grad_norm": 0.5}),
    "pp": lambda: _chain(
        {"pipeline": {"microbatches": 2, "schedule": "1f1b"}, "storage": {"zero": 3, "axes": ["dp"]}, "bucket": True}
    ),
}


class Base(NamedTuple):
    text: str
    program: Program  # as it was read
    batch: Any
    params: dict[str, Tensor]
    result: StepResult


@cache
def base(name: str) -> Base:
    load_everything()
    model, batch, plan = BASES[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    program = shardc.compile(model, batch, plan=plan, optimizer=optimizer)
    text = program.to_json()
    params = {n: t.detach().clone() for n, t in (*model.named_parameters(), *model.named_buffers())}
    read = Program.from_json(text)
    assert read.verify(batch, params=params).ok
    return Base(text, read, batch, params, read.simulate(batch, params=params))


def equal(a: StepResult, b: StepResult) -> bool:
    if not close(a.loss, b.loss):
        return False
    outputs = [{name: output.full() for name, output in result.outputs.items()} for result in (a, b)]
    tables = [(a.grads, b.grads), (a.buffers, b.buffers), (outputs[0], outputs[1]), (a.updates, b.updates)]
    return all(x.keys() == y.keys() and all(close(x[k], y[k]) for k in x) for x, y in tables)


def close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, 1e-5, 1e-7, equal_nan=True)


def outcome(of: Base, text: str, chosen: bool) -> str:
    """What becomes of a file. AssertionError where it is accepted, computes something else, and `verify` sees none."""
    try:
        program = Program.from_json(text)
    except ShardcError as refused:
        return refused.code
    try:
        result = program.simulate(of.batch, params=of.params)
    except ShardcError as refused:
        return f"run {refused.code}"
    if equal(result, of.result):
        return "same"
    if not program.verify(of.batch, params=of.params).ok:
        return "found by verify"
    assert chosen, "accepted and wrong"
    return "chosen"


def fuzz(name: str, count: int, seed: int) -> Counter[str]:
    watch()
    of = base(name)
    content = json.loads(of.text)["content"]
    mutants = Mutants(content, seed)
    found: Counter[str] = Counter()
    for number in range(count):
        said, changed = mutants.mutant()
        chosen = any(said.partition(" ")[2].startswith(".".join(path)) for path in CHOSEN)
        ACTIVE.append(True)
        try:
            stale = json.dumps(json.loads(of.text) | {"content": changed})
            with pytest.raises(ShardcError):
                Program.from_json(stale)
            result = outcome(of, forged(of.text, changed), chosen)
        except BaseException as wrong:
            raise AssertionError(f"mutant {number} of {name} ({said}): {type(wrong).__name__}: {wrong}") from wrong
        finally:
            ACTIVE.clear()
            happened = WATCHED.copy()
            WATCHED.clear()
        assert not happened, f"mutant {number} of {name} ({said}): {happened}"
        found[result] += 1
    return found


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", BASES)
def test_forged_files(name: str) -> None:
    found = fuzz(name, 20, seed=7)
    assert sum(count for code, count in found.items() if code.startswith("SC")) > 8, found


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", BASES)
def test_ten_thousand_forged_files(name: str, seed: int) -> None:
    assert fuzz(name, 500, seed)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", BASES)
def test_damaged_files(name: str) -> None:
    """What is no longer the text that was written is refused, or says the same."""
    of, draw = base(name), random.Random(3)
    for _ in range(10):
        text = damaged(of.text, draw)
        try:
            program = Program.from_json(text)
        except ShardcError:
            continue
        assert program.to_json() == of.text


@pytest.mark.parametrize("depth", [17, 5000])
def test_lists_in_lists_in_lists(depth: int) -> None:
    """Deeper than Python calls itself, too."""
    text = base("tp").program.text()
    at = text.index(", ", text.index(" = shardc.")) + 2
    with pytest.raises(ShardcError, match="lists lie in 16 others at most"):
        shardc.parse(text[:at] + "[" * depth + text[at:])


def test_damaged_texts() -> None:
    """A text has no checksum and no reference: what is read is well typed."""
    of, draw = base("tp"), random.Random(5)
    text, refused = of.program.text(), 0
    for _ in range(60):
        try:
            shardc.parse(damaged(text, draw))
        except ShardcError:
            refused += 1
    assert refused > 30
