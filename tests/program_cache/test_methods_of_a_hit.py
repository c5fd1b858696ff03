"""A program of the disk answers every question as one that was compiled: all public methods, and those of trainers."""

import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import shardc
from shardc.api import Program
from shardc.cli.pipeline_summary import pipeline_summary
from shardc.cli.summary import summary

HARDWARE = "h200-nvlink"
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "stages": ("pp=2, dp=2", {"inputs": {"*": "dp, -"}, "pipeline": {"microbatches": 2, "axis": "pp"}}),
    "ranks": (
        "dp=2, tp=2",
        {"inputs": {"*": "dp, -"}, "params": {"*.up.weight": "tp, -"}, "fuse": True, "symbols": {"B": "x.0"}},
    ),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.up(self.norm(x)).relu())
        return y


class Net(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return y.square().mean()


def batch_of(rows: int = 8) -> dict[str, Tensor]:
    return {"x": torch.linspace(-1, 1, rows * 8).reshape(rows, 8)}


def compiled(plan: str, **options: Any) -> Program:
    torch.manual_seed(0)
    model, (mesh, content) = Net(Block(), Block()), PLANS[plan]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return shardc.compile(model, batch_of(), mesh=mesh, plan=content, optimizer=optimizer, **options)


def generating(**options: Any) -> Program:
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_head": 4, "n_embd": 32, "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(**sizes))
    tokens = torch.zeros(4, 8, dtype=torch.int64)
    return shardc.compile(model, {"input_ids": tokens, "labels": tokens}, mesh="dp=2", **options)


def tensors(values: Any) -> Any:
    return {name: value.tolist() for name, value in values.items()}


def of_lock(program: Program, folder: Path) -> Any:
    lock = program.lock(HARDWARE)
    program.check(lock, HARDWARE)
    return lock


def pickled(program: Program, _: Path) -> str:
    try:
        return cast("Program", pickle.loads(pickle.dumps(program))).text()
    except RuntimeError as refusal:  # whose text has an address
        return type(refusal).__name__


# A method, and what it answers. Those that trainers call are asked through these.
QUESTIONS: dict[str, Callable[[Program, Path], Any]] = {
    "bottlenecks": lambda p, _: p.bottlenecks(HARDWARE),
    "check": of_lock,
    "collectives": lambda p, _: p.collectives(),
    "explain": lambda p, _: str(p.explain(0)),
    "failures": lambda p, _: p.failures(100.0, HARDWARE),
    "flops": lambda p, _: p.flops(),
    "from_json": lambda p, _: Program.from_json(p.to_json()).text(),
    "inputs": lambda p, _: tensors(p.inputs()),
    "learning_rates": lambda p, _: tensors(p.learning_rates()),
    "load": lambda p, folder: (p.save(folder / "program"), Program.load(folder / "program").text())[1],
    "lock": lambda p, _: p.lock(),
    "memory": lambda p, _: p.memory(),
    "optimizer_state": lambda p, _: tensors(p.optimizer_state()),
    "parameter_bytes": lambda p, _: p.parameter_bytes(),
    "predict": lambda p, _: p.predict(HARDWARE),
    "prove": lambda p, _: p.prove(),
    "rank": lambda p, _: [p.rank(i) for i in range(4)],
    "resized": lambda p, _: p.resized(batch_of(12)).text(),
    "rounded_products": lambda p, _: p.rounded_products(),
    "save": lambda p, folder: (p.save(folder / "saved"), (folder / "saved").read_bytes())[1],
    "scaling": lambda p, _: p.scaling("dp", [2, 4], HARDWARE),
    "page, show": lambda p, folder: p.show(folder / "page.html").read_text(),
    "simulate": lambda p, _: p.simulate().loss,
    "stage_formulas": lambda p, _: p.stage_formulas(),
    "symbolic": lambda p, _: p.symbolic({"B": (4, 16)}),
    "text": lambda p, _: (p.text(), p.text(fold=True)),
    "timeline": lambda p, _: p.timeline(),
    "to_json": lambda p, _: p.to_json(),
    "to_plain": lambda p, _: p.to_plain(),
    "transfers": lambda p, _: p.transfers(),
    "verify": lambda p, _: p.verify(),
    # beside methods
    "summary": lambda p, _: [str(part) for part in (pipeline_summary if p.staged.axis else summary)(p)][:1],
    "its fields": lambda p, _: [getattr(p, name) for name in ("mode", "saved", "graphs_choice", "plan", "mesh")],
    "pickle": pickled,
}
OF_TRAINERS = {"generate", "evaluation", "training", "generation", "generation_step", "accept_values", "launch"}
OF_COMPILING = {"recompiled", "refuse", "refuse_changed_model", "refuse_false", "fields_of"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDC_CACHE", str(tmp_path / "cache"))


def answer(program: Program, name: str, folder: Path) -> str:
    """As it prints itself; or the error, which is to be the same one."""
    folder.mkdir(parents=True)
    try:
        value = QUESTIONS[name](program, folder)
    except Exception as refusal:
        return f"{type(refusal).__name__}: {refusal}"
    return value if isinstance(value, str) else repr(value)


def test_each_method_has_its_question() -> None:
    public = {name for name, value in vars(Program).items() if callable(getattr(Program, name))}
    public |= {name for base in Program.__mro__[1:-1] for name in vars(base)}
    public = {name for name in public if name[0] != "_" and callable(getattr(Program, name, None))}
    fields = {field.name for field in dataclasses.fields(Program)}
    assert public - fields - OF_TRAINERS - OF_COMPILING <= {*", ".join(QUESTIONS).split(", ")}


@pytest.mark.parametrize("plan", PLANS)
def test_a_hit_answers_as_a_compiled_program(plan: str, cache: None, tmp_path: Path) -> None:
    assert compiled(plan).cached == "stored"
    programs = {"fresh": compiled(plan, cache=False), "hit": compiled(plan)}
    assert programs["hit"].cached == "hit"
    for name in QUESTIONS:
        fresh, hit = (answer(program, name, tmp_path / of / name) for of, program in programs.items())
        assert hit == fresh, name


def test_a_hit_generates_as_a_compiled_program(cache: None) -> None:
    assert generating().cached == "stored"
    programs = generating(cache=False), generating()
    assert programs[1].cached == "hit"
    fresh, hit = (repr(program.generate([[1, 2, 3]], 4)) for program in programs)
    assert hit == fresh


def test_checkpoints_of_a_hit_are_those_of_a_compiled_program(cache: None, tmp_path: Path) -> None:
    compiled("ranks")
    batch, losses = batch_of(), dict[str, list[float]]()
    for name, program in {"fresh": compiled("ranks", cache=False), "hit": compiled("ranks")}.items():
        with program.launch() as trainer:
            losses[name] = [float(trainer.step(batch).loss)]
            trainer.save(tmp_path / name)
    for name, other in (("fresh", "hit"), ("hit", "fresh")):
        program = compiled("ranks", cache=None if other == "hit" else False)
        with program.launch() as trainer:
            trainer.load(tmp_path / name)
            losses[other].append(float(trainer.step(batch).loss))
    assert losses["fresh"] == losses["hit"]
