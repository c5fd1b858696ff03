"""Models, batches, optimizers, plans and meshes that no program can be made of: each error has a code and a hint."""

from __future__ import annotations

import sys
import threading
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed._composable import checkpoint

import shardc
from shardc.ir.diagnostic import ShardcError
from shardc.schedule.instructions import Forward
from shardc.schedule.schedules import registry

X = torch.ones(4, 6)
ELSEWHERE = torch.zeros(6)


class Net(nn.Module):
    def __init__(self, **parts: Any) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).square().mean()


class Looks(Net):
    def forward(self, x: Tensor) -> Tensor:
        table: Any = self.table
        return table(x).square().mean()


class WritesOut(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).detach().mean(0)
        torch.add(h, 1.0, out=ELSEWHERE)
        return (self.a(x) + ELSEWHERE).square().mean()


class WritesInAMethod(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.written()
        return super().forward(x)

    def written(self) -> None:
        ELSEWHERE.mul_(2)


class Dual(Net):
    def forward(self, x: Tensor) -> Tensor:
        with forward_ad.dual_level():
            pair: Any = forward_ad.unpack_dual(self.a(forward_ad.make_dual(x, torch.ones_like(x))))
            return (pair.primal * pair.tangent).mean()


class Complex(Net):
    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_complex(self.a(x).view(-1, 3, 2)).mean()


class TwoDtypes(Net):
    def forward(self, x: Tensor) -> Tensor:
        return (self.a(x) @ torch.ones(6, 6, dtype=torch.float64)).mean()


class Seeds(Net):
    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return (self.a(x) * torch.rand(6)).mean()


def composable() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), Net())
    checkpoint(model[1])
    return model


class Conditional(Net):
    def forward(self, x: Tensor) -> Tensor:
        chosen: Any = torch.cond(x.sum() > 0, torch.sin, torch.cos, (self.a(x),))
        return chosen.mean()


class Leaves(Net):
    def forward(self, x: Tensor) -> Tensor:
        sys.exit(3)


class Frozen(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return super().forward(x)


class Labelled(Net):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor | None]:
        y = self.a(x)
        return {"loss": None if labels is None else (y - labels).square().mean(), "logits": y}


class ReturnsNothing(Net):
    def forward(self, x: Tensor) -> Any:
        return None


def deep(levels: int) -> nn.Module:
    model: nn.Module = Net()
    for _ in range(levels):
        model = nn.Sequential(model)
    return model


@torch.library.custom_op("elsewhere::halve_", mutates_args={"x"})
def halve_(x: Tensor) -> None:
    x.mul_(0.5)


class CallsAnotherLibrary(Net):
    def forward(self, x: Tensor) -> Tensor:
        scale = x.clone()
        halve_(scale)
        return (self.a(x) * scale[0, 0]).square().mean()


class WritesElsewhere(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        ELSEWHERE.add_(h.detach().mean(0))
        return (h + ELSEWHERE).square().mean()


class Renorms(Net):
    def forward(self, x: Tensor) -> Tensor:
        return torch.renorm(self.a(x), 2, 0, 1.0).square().mean()


def test_a_program_that_could_not_be_read_back(tmp_path: Path) -> None:
    program = compiled(Renorms())
    for write in (lambda: program.save(tmp_path / "program.json"), program.to_json):
        with pytest.raises(ShardcError, match=r"SC301(.|\n)*calls renorm(.|\n)*renorm\(self(.|\n)*shardc.rule"):
            write()
    assert not list(tmp_path.iterdir())


def compiled(model: nn.Module, x: Tensor = X, **options: Any) -> shardc.Program:
    return shardc.compile(model, x, mesh="dp=2", plan={"inputs": {"x": "dp"}}, **options)


MODELS: dict[str, tuple[nn.Module, Tensor, str]] = {
    "lazy": (Net(c=nn.LazyLinear(3)), X, r"SC112(.|\n)*c\.weight(.|\n)*run the model once"),
    "empty": (Net(c=nn.Parameter(torch.zeros(0, 6))), X, r"SC112(.|\n)*'c' of \[0, 6\] has no elements"),
    "sparse buffer": (Net(c=nn.Buffer(X.to_sparse())), X, "SC112(.|\\n)*'c' is a sparse tensor"),
    "sparse gradient": (
        Looks(table=nn.Embedding(5, 6, sparse=True)),
        torch.arange(4),
        r"SC112(.|\n)*sparse tensor(.|\n)*test_unfit.py(.|\n)*leave out sparse=True",
    ),
    "another library": (
        CallsAnotherLibrary(),
        X,
        r"SC104(.|\n)*elsewhere.halve_(.|\n)*another library(.|\n)*halve_\(scale\)(.|\n)*mutates_args=\(\)",
    ),
    "out": (
        WritesOut(),
        X,
        r"SC109(.|\n)*forward changes forward.ELSEWHERE in place(.|\n)*torch.add\(h(.|\n)*register_buffer",
    ),
    "cond": (Conditional(), X, r"SC101(.|\n)*control flow(.|\n)*torch.cond(.|\n)*torch.where"),
    "leaves": (Leaves(), X, r"SC104(.|\n)*SystemExit: 3(.|\n)*sys.exit"),
    "all frozen": (Net().requires_grad_(False), X, r"SC102(.|\n)*all of them are frozen(.|\n)*requires_grad_\(True\)"),
    "nothing to train": (nn.ReLU(), X, "SC102(.|\n)*no parameters, so there is nothing to train"),
    "no_grad": (Frozen(), X, "SC102(.|\n)*independent(.|\n)*no_grad"),
    "no labels": (Labelled(), X, "SC102(.|\n)*where the batch has 'labels'(.|\n)*add 'labels' to the batch"),
    "no loss": (ReturnsNothing(), X, "SC102(.|\n)*no loss in the model's output, a NoneType(.|\n)*pass `loss=`"),
    "deep": (deep(2000), X, "SC110(.|\n)*nested too deeply"),
    "elsewhere": (
        WritesElsewhere(),
        X,
        r"SC109(.|\n)*forward changes forward.ELSEWHERE in place(.|\n)*\| ELSEWHERE.add_(.|\n)*register_buffer",
    ),
    "elsewhere, by a method": (
        WritesInAMethod(),
        X,
        r"SC109(.|\n)*test_unfit.py(.|\n)*\| ELSEWHERE.mul_\(2\)",
    ),
    "composable": (
        composable(),
        X,
        r"SC104(.|\n)*leave _composable.checkpoint out(.|\n)*use_reentrant=False",
    ),
    "dual numbers": (Dual(), X, r"SC104(.|\n)*make_dual(.|\n)*take torch.autograd.functional.jvp"),
    "expanded": (
        Net(c=nn.Parameter(torch.ones(1, 6).expand(6, 6))),
        X,
        r"SC112(.|\n)*'c' of \[6, 6\] is expanded(.|\n)*clone",
    ),
    "complex": (Complex(), X, r"SC102(.|\n)*it is complex, complex64(.|\n)*loss.real"),
    "two dtypes": (TwoDtypes(), X, r"SC104(.|\n)*aten::mm(.|\n)*float32 and torch.float64(.|\n)*y.to\(x.dtype\)"),
    "seeds": (Seeds(), X, r"SC111(.|\n)*seeds torch's generator(.|\n)*\| torch.manual_seed\(3\)(.|\n)*plan's seed"),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    model, x, message = MODELS[name]
    with pytest.raises(ShardcError, match=message):
        compiled(model, x)


INPUTS = {
    "sparse": lambda: X.to_sparse(),
    "compressed": lambda: X.to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([X, X]),
    "jagged": lambda: torch.nested.nested_tensor([X, X], layout=torch.jagged),
    "quantized": lambda: torch.quantize_per_tensor(X, 0.1, 0, torch.qint8),
}


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.filterwarnings("ignore")
def test_inputs(name: str) -> None:
    kind = {"compressed": "sparse", "jagged": "nested"}.get(name, name)
    with pytest.raises(ShardcError, match=rf"SC103(.|\n)*'x' is a {kind} tensor"):
        compiled(Net(), INPUTS[name]())


@pytest.mark.parametrize("name", [*INPUTS, "meta"])
@pytest.mark.filterwarnings("ignore")
def test_batches_of_a_step(name: str) -> None:
    trainer = compiled(Net()).launch()
    with pytest.raises(ShardcError, match=r"SC501(.|\n)*'x' (is a \w+ tensor|lies on the meta device)"):
        trainer.step(INPUTS[name]() if name in INPUTS else X.to("meta"))


def test_batches_without_an_end() -> None:
    endless: dict[str, Any] = {}
    endless["x"] = endless
    for call in (lambda: shardc.compile(Net(), endless, mesh="dp=2"), lambda: compiled(Net()).launch().step(endless)):
        with pytest.raises(ShardcError, match=r"SC103(.|\n)*contains itself"):
            call()


def test_lists_of_optimizers() -> None:
    model = Net()
    weights, every = torch.optim.SGD([next(model.parameters())], lr=0.1), torch.optim.AdamW(model.parameters())
    nothing: Any = []
    strange: Any = [every, "adamw"]
    with pytest.raises(ShardcError, match=r"SC107(.|\n)*no optimizer in the list"):
        compiled(model, optimizer=nothing)
    with pytest.raises(ShardcError, match=r"SC107(.|\n)*the optimizer is a str(.|\n)*a list of several"):
        compiled(model, optimizer=strange)
    with pytest.raises(ShardcError, match=r"SC107(.|\n)* is a parameter of two optimizers, SGD and AdamW"):
        compiled(model, optimizer=[weights, every])
    with pytest.raises(ShardcError, match=r"SC107(.|\n)* is a parameter of two optimizers, AdamW and AdamW"):
        compiled(model, optimizer=[every, every])


LINES = ["a0: &a0 [x, x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))]
PLANS = {
    "params: &a\n  b: *a\n": "an anchor contains itself",
    'params: "\0"\n': "not YAML",
    "params: " + "[" * 3000 + "]" * 3000: "nested too deeply",
    "\n".join(LINES): "more than 1,000,000 values",
    "seed: 2001-99-99": "month must be",
    "seed: 0x_": "invalid literal",
    "seed: !!float x": "could not convert",
    "seed: " + "9" * 5000: "Exceeds the limit",
    "strict: !!bool maybe": "a value cannot be read",
}
IDS = ["recursive", "nul", "deep", "aliases", "date", "hexadecimal", "float", "digits", "flag"]


@pytest.mark.parametrize("text", PLANS, ids=IDS)
def test_plans(text: str) -> None:
    with pytest.raises(ShardcError, match=f"SC208(.|\n)*{PLANS[text]}"):
        shardc.Plan.parse(text)


def _spins(*_: object) -> Any:
    while True:
        pass


ENDLESS = {
    "work": (lambda stages, *_: [(Forward(r, 0) for _ in count()) for r in range(stages)], "more work for rank 0"),
    "ranks": (lambda *_: ([] for _ in count()), "more than the 2 ranks"),
    "function": (_spins, "within 0.5 seconds"),
    "leaving": (lambda *_: sys.exit(3), "SystemExit: 3"),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_schedules_without_an_end(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, message = ENDLESS[name]
    monkeypatch.setattr(registry, "SECONDS", 0.5)
    monkeypatch.setitem(registry._SCHEDULES, f"endless {name}", function)
    threads = threading.active_count()
    with pytest.raises(ShardcError, match=f"SC220(.|\n)*{message}"):
        registry.order(f"endless {name}", 2, 1, 4)
    deadline = time.monotonic() + 20
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == threads


def test_a_mesh_of_too_many_ranks() -> None:
    with pytest.raises(ShardcError, match=r"SC210(.|\n)*more than 1,048,576 ranks"):
        shardc.Mesh.parse("dp=99999999999")


def test_a_mesh_of_too_many_digits() -> None:
    with pytest.raises(ShardcError, match=r"SC210(.|\n)*cannot read 'dp=99") as caught:
        shardc.Mesh.parse("dp=" + "9" * 5000)
    assert len(str(caught.value)) < 300


def test_a_path_with_a_nul_byte() -> None:
    with pytest.raises(ShardcError, match=r"SC208(.|\n)*cannot read the plan(.|\n)*null byte"):
        shardc.Plan.load("a\0b")


def test_torchs_functions_stay_where_they_are_while_forward_runs() -> None:
    """What is imported then may make tables of them, as dynamo does for `torch.cond`."""
    kept = torch.manual_seed, torch.initial_seed, torch.random.seed

    class Looks(Net):
        def forward(self, x: Tensor) -> Tensor:
            assert kept == (torch.manual_seed, torch.initial_seed, torch.random.seed)
            return super().forward(x)

    compiled(Looks(), X)
