"""What a program's file or text may not hold: ops with effects, counts beyond all bounds, graphs that are no graphs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardc
from shardc import Program
from shardc.ir.diagnostic import ShardcError
from shardc.ir.parse import parse
from shardc.ir.schema import find_op, unfit
from shardc.rules.registry import all_rules

EFFECTS = ["from_file", "_print", "resize_", "add_.Tensor", "set_", "add.out", "copy_", "item", "zero_", "fill_.Scalar"]


@pytest.mark.parametrize("name", EFFECTS)
def test_ops_with_effects(name: str) -> None:
    op = find_op(name)
    assert op is not None
    assert unfit(op)
    text = f'graph @f mesh() {{\n  %x = input param "x" : f32[4]\n  %y = {name}(%x) : f32[4]\n}}'
    with pytest.raises(ShardcError):
        parse(text)


def test_every_op_with_a_rule_is_fit() -> None:
    assert not [str(rule.op) for rule in all_rules() if unfit(rule.op)]


@pytest.fixture(scope="module")
def program() -> Program:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    plan = {"inputs": {"input": "dp"}, "accumulate": 2}
    return shardc.compile(model, torch.ones(8, 4), mesh="dp=2", plan=plan, loss=lambda y, _: y.square().mean())


def forged(program: Program, change: Callable[[dict[str, Any]], object]) -> str:
    """The file of a program that somebody changed, with its checksum right."""
    content = json.loads(program.to_json())["content"]
    change(content)
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    head = json.loads(program.to_json()) | {"sha256": hashlib.sha256(canonical.encode()).hexdigest()}
    return json.dumps(head | {"content": content})


def calls(content: dict[str, Any]) -> list[dict[str, Any]]:
    return [node for node in content["body"]["nodes"] if "call" in node]


@pytest.mark.parametrize("name", EFFECTS)
def test_a_file_that_calls_them_is_refused_by_instruction(program: Program, tmp_path: Path, name: str) -> None:
    def change(content: dict[str, Any]) -> None:
        calls(content)[3] |= {"call": name, "args": [str(tmp_path / "written"), True, 4]}

    with pytest.raises(ShardcError, match=f"the program calls '{name}', which") as caught:
        Program.from_json(forged(program, change))
    assert caught.value.diagnostics[0].tensor == calls(json.loads(program.to_json())["content"])[3]["name"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("count", [10**9, 0, -1, True, "2", 2.0, None])
def test_microbatches_have_a_bound(program: Program, count: object) -> None:
    with pytest.raises(ShardcError, match="1 to 65536 microbatches") as caught:
        Program.from_json(forged(program, lambda content: content["body"].update(microbatches=count)))
    assert caught.value.code == "SC402"


def test_a_graph_that_is_none_is_refused(program: Program) -> None:
    def change(content: dict[str, Any]) -> None:
        content["body"]["outputs"] = content["body"]["outputs"][1:]

    with pytest.raises(ShardcError, match="the content is no program"):
        Program.from_json(forged(program, change))
    assert Program.from_json(forged(program, lambda content: None)).text() == program.text()
