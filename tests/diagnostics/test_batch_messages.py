"""What a step says of a batch that is not what the program was compiled for, word for word.

(Shapes and dtypes: `test_bad_input.py`. What is found and what is not: `tests/runtime`.)
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardc
from shardc import Mesh, Plan, ShardcError
from shardc.runtime.oracle.simulate import simulate

ROOT = Path(__file__).parent.parent.parent
IDS = torch.zeros(4, 6, dtype=torch.int64)
SAMPLE = {"tokens": IDS, "labels": IDS, "scale": 2.0}


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(8, 16)

    def forward(self, tokens: Tensor, labels: Tensor, scale: float) -> Tensor:
        logits = self.wte(tokens.clamp(max=8)) @ self.wte.weight.T
        return F.cross_entropy(logits.flatten(0, 1) * scale, labels.flatten())


def program() -> shardc.Program:
    plan = Plan.parse('params:\n  wte.weight: "tp, -"\ninputs:\n  tokens: "dp, -"', "plan.yaml")
    return shardc.compile(Language(), SAMPLE, mesh=Mesh(dp=2, tp=2), plan=plan)


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wpe = nn.Embedding(8, 4)

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        ids = torch.arange(x.shape[1]).expand(x.shape) if position_ids is None else position_ids
        return (self.wpe(ids) * x.unsqueeze(2)).square().mean()


def too_long(given: bool) -> object:
    """A sequence of 10, of a table of 8 positions."""
    batch = {"x": torch.ones(4, 10)} | ({"position_ids": torch.arange(10).expand(4, 10).clone()} if given else {})
    return shardc.compile(Positions(), batch, mesh=Mesh(dp=2), plan={"inputs": {"x": "dp, -"}}).launch().step(batch)


def step(**changed: Any) -> object:
    return program().launch().step({**SAMPLE, **changed})


def unchecked() -> object:
    """As if the tokens were computed in the step: it is the call that names them."""
    inputs = program().inputs()
    return simulate(program().body, {**inputs, "tokens": IDS - 1})


def empty() -> object:
    return shardc.compile(nn.Linear(4, 2), (torch.zeros(0, 4),), mesh=Mesh(dp=2), loss=lambda y, _: y.sum())


CASES: dict[str, tuple[str, Callable[[], object]]] = {
    "another_value": ("SC501", lambda: step(scale=3.0, flag=True)),
    "no_names": ("SC501", lambda: program().simulate((IDS, IDS, 2.0))),
    "label": ("SC507", lambda: step(labels=IDS - 1)),
    "tokens_and_labels": ("SC507", lambda: step(tokens=IDS - 3, labels=IDS + 8)),
    "computed_token": ("SC507", lambda: step(tokens=IDS + 11)),
    "token_in_the_step": ("SC507", unchecked),
    "positions": ("SC507", lambda: too_long(False)),
    "position_ids": ("SC507", lambda: too_long(True)),
    "no_samples": ("SC103", empty),
    "nothing_supplied": ("SC504", lambda: simulate(program().body, {})),
}


@pytest.mark.parametrize("case", CASES)
def test_message(case: str, golden: Callable[[str, str], None]) -> None:
    code, act = CASES[case]
    with pytest.raises(ShardcError) as raised:
        act()
    assert raised.value.code == code
    assert all(d.hint for d in raised.value.diagnostics)
    golden(f"batch/{case}.txt", str(raised.value).replace(f"{ROOT}/", ""))
