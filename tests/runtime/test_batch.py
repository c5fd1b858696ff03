"""A batch that is not like the sample is refused, in a program from a file too; one that is like it is not."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc import ShardcError
from shardc.api import Program
from shardc.runtime.execute.batch import batch_inputs, describe_sample


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: float = 1.0, y: Tensor | None = None, mode: str = "sum") -> Tensor:
        out = self.up(x) * scale
        out = out if y is None else out + y
        return out.sum() if mode == "sum" else out.mean()


X, Y = torch.ones(2, 4), torch.zeros(2, 4)


@dataclass
class Config:
    factor: float
    bias: Tensor


class WithConfig(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor, config: Config) -> Tensor:
        return (self.up(x) * config.factor + config.bias.sum()).sum()


def compiled(batch: Any, model: type[nn.Module] = Scaled) -> Program:
    return shardc.compile(model(), batch, mesh="dp=2", plan={"inputs": {"x": "dp"}})


def refused(program: Program, batch: Any) -> str:
    """The same words from the simulation, from verify and from a step."""
    said: set[str] = set()
    for run in (program.simulate, program.verify, program.launch().step):
        with pytest.raises(ShardcError) as raised:
            run(batch)
        (found,) = raised.value.diagnostics
        assert found.code == "SC501"
        assert found.hint
        said.add(found.message)
    (message,) = said
    return message.rpartition("compiled for: ")[2]


CASES: dict[str, tuple[Any, Any, str]] = {
    "value": ({"x": X, "scale": 2.0}, {"x": X, "scale": 3.0}, "'scale' is 3.0, not 2.0"),
    "type": ({"x": X, "scale": 2.0}, {"x": X, "scale": 2}, "'scale' is 2, not 2.0"),
    "bool": ({"x": X, "scale": 1}, {"x": X, "scale": True}, "'scale' is True, not 1"),
    "text": ({"x": X, "mode": "sum"}, {"x": X, "mode": "mean"}, "'mode' is 'mean', not 'sum'"),
    "value lost": ({"x": X, "scale": 2.0}, {"x": X}, "it has no 'scale'"),
    "value new": ({"x": X}, {"x": X, "scale": 1.0}, "'scale' is new"),
    "tensor lost": ({"x": X, "y": Y}, {"x": X}, "it has no 'y'"),
    "tensor new": ({"x": X}, {"x": X, "y": Y}, "'y' is new"),
    "tensor for None": ({"x": X, "y": None}, {"x": X, "y": Y}, "'y' is a tensor, not None"),
    "None for tensor": ({"x": X, "y": Y}, {"x": X, "y": None}, "'y' is None, not a tensor"),
    "other name": ({"x": X, "y": Y}, {"x": X, "bias": Y}, "it has no 'y'; 'bias' is new"),
    "near name": ({"x": X, "scale": 2.0}, {"x": X, "scales": 2.0}, "no 'scale' (but 'scales'); 'scales' is new"),
    "tuple longer": ((X, 2.0), (X, 2.0, Y), "'2' is new"),
    "tuple shorter": ((X, 2.0, Y), (X, 2.0), "it has no 'y'"),
    "tuple value": ((X, 2.0, Y), (X, 3.0, Y), "'scale' is 3.0, not 2.0"),
    "two tensors for one": (X, (X, Y), "'1' is new"),
    "names dropped": ({"y": Y, "x": X}, (X, Y), "the program was compiled for a batch that is a mapping, of 'y', 'x'"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_differs_is_named(case: str) -> None:
    sample, other, words = CASES[case]
    assert words in refused(compiled(sample), other)


Pair = namedtuple("Pair", ["x", "scale"])
SAME: dict[str, tuple[Any, Any]] = {
    "another mapping": ({"x": X, "scale": 2.0}, UserDict(x=X + 1, scale=2.0)),
    "another order": ({"x": X, "y": Y}, OrderedDict(y=Y, x=X)),
    "a list": ((X, 2.0), [X, 2.0]),
    "a named tuple": ((X, 2.0), Pair(X, 2.0)),
    "alone or in a tuple": (X, (X,)),
    "one by position": ({"x": X}, X),
    "by forward's names": ((X, 2.0, Y), {"x": X, "scale": 2.0, "y": Y}),
    "nan": ({"x": X, "scale": float("nan")}, {"x": X, "scale": float("nan")}),
}


@pytest.mark.parametrize("case", SAME)
def test_what_is_the_same_passes(case: str) -> None:
    sample, other = SAME[case]
    program = compiled(sample)
    want = program.simulate(sample).loss if case != "another mapping" else program.simulate({**other}).loss
    for run in (program.simulate, program.launch().step):
        torch.testing.assert_close(run(other).loss, want, equal_nan=True)


def test_a_program_from_a_file_remembers(tmp_path: Path) -> None:
    program = compiled({"x": X, "scale": 2.0})
    program.save(tmp_path / "p.json")
    loaded = Program.load(tmp_path / "p.json")
    state = {name: t.detach() for name, t in program.model.state_dict().items()}  # type: ignore[union-attr]
    with pytest.raises(ShardcError, match=r"SC501.*'scale' is 3.0, not 2.0"):
        loaded.launch(state=state).step({"x": X, "scale": 3.0})
    with pytest.raises(ShardcError, match=r"SC501.*it has no 'scale'"):
        loaded.simulate({"x": X}, params=state)
    assert loaded.launch(state=state).step({"x": X, "scale": 2.0}).loss == program.simulate().loss


def test_tensors_of_an_object_are_part_of_the_program() -> None:
    sample = {"x": X, "config": Config(2.0, torch.ones(3))}
    program = compiled(sample, WithConfig)
    assert program.verify().ok
    program.simulate({"x": X, "config": Config(2.0, torch.ones(3))})
    assert "'config' holds other tensors" in refused(program, {"x": X, "config": Config(2.0, torch.zeros(3))})


def test_leaves_are_plain_data() -> None:
    leaves = describe_sample({"x": X, "pair": (1, None), "kind": torch.float16}, ["x", "pair.0", "pair.1", "kind"])[
        "leaves"
    ]
    assert leaves == [
        ["x", "x", "tensor"],
        ["pair.0", "pair.0", "value", "1"],
        ["pair.1", "pair.1", "value", "None"],
        ["kind", "kind", "value", "torch.float16"],
    ]


def test_inputs_are_taken_as_they_are() -> None:
    inputs = batch_inputs({"x": X, "scale": 2.0}, ["x"])
    assert batch_inputs(inputs, ["x"], {"by_name": True, "leaves": [["y", "y", "tensor"]]}) is inputs
