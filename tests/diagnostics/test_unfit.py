"""Models, batches, optimizers, plans and meshes that no program can be made of: each error has a code and a hint."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.ir.diagnostic import ShardcError

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


@torch.library.custom_op("elsewhere::halved", mutates_args=())
def halved(x: Tensor) -> Tensor:
    return x / 2


@halved.register_fake
def _halved(x: Tensor) -> Tensor:
    return torch.empty_like(x)


halved.register_autograd(lambda _context, grad: grad / 2)


class CallsAnotherLibrary(Net):
    def forward(self, x: Tensor) -> Tensor:
        return halved(self.a(x)).square().mean()


class WritesElsewhere(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        ELSEWHERE.add_(h.detach().mean(0))
        return (h + ELSEWHERE).square().mean()


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
        r"SC104(.|\n)*elsewhere.halved(.|\n)*another library(.|\n)*return halved",
    ),
    "elsewhere": (WritesElsewhere(), X, r"SC109(.|\n)*outside of the model(.|\n)*ELSEWHERE.add_"),
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


def test_a_list_of_optimizers() -> None:
    model = Net()
    several: Any = [torch.optim.SGD(model.parameters(), lr=0.1)]
    with pytest.raises(ShardcError, match=r"SC107(.|\n)*is a list(.|\n)*groups"):
        compiled(model, optimizer=several)


LINES = ["a0: &a0 [x, x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))]
PLANS = {
    "params: &a\n  b: *a\n": "an anchor contains itself",
    'params: "\0"\n': "not YAML",
    "params: " + "[" * 3000 + "]" * 3000: "nested too deeply",
    "\n".join(LINES): "more than 1,000,000 values",
}


@pytest.mark.parametrize("text", PLANS, ids=["recursive", "nul", "deep", "aliases"])
def test_plans(text: str) -> None:
    with pytest.raises(ShardcError, match=f"SC208(.|\n)*{PLANS[text]}"):
        shardc.Plan.parse(text)


def test_a_mesh_of_too_many_ranks() -> None:
    with pytest.raises(ShardcError, match=r"SC210(.|\n)*more than 1,048,576 ranks"):
        shardc.Mesh.parse("dp=99999999999")
