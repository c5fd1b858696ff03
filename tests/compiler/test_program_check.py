"""What loading refuses of a program that was changed, by instruction; and that nothing compiled is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import yaml

import shardc
from shardc import Program, ShardcError
from shardc.compiler.program_check import RECORD, parse
from shardc.ir.graph import operands, producer
from shardc.ir.ops.experts import GROUP_ROWS
from shardc.ir.ops.host_copies import BEGIN_OFFLOAD
from shardc.ir.program import PlanRecord
from tests.models.zoo import MODELS, Model
from tests.properties.file_mutants import forged
from tests.properties.test_file_fuzz import Routed, base

Content = dict[str, Any]


def node(graph: Content, call: str, which: int = 0) -> Content:
    return [n for n in graph["nodes"] if n.get("call", "").partition(".default")[0] == call][which]


def refused(name: str, change: Callable[[Content], Any]) -> ShardcError:
    content = json.loads(base(name).text)["content"]
    change(content)
    with pytest.raises(ShardcError) as caught:
        Program.from_json(forged(base(name).text, content))
    return caught.value


def edited(call: str, which: int = 0, /, **fields: Any) -> Callable[[Content], Any]:
    return lambda content: node(content["body"], call, which).update(fields)


def argument(call: str, at: int, value: Any, which: int = 0) -> Callable[[Content], Any]:
    return lambda content: node(content["body"], call, which)["args"].__setitem__(at, value)


def bypassed(call: str, which: int = 0) -> Callable[[Content], Any]:
    """A call is dropped: who reads its result reads its operand."""

    def change(content: Content) -> None:
        graph = content["body"]
        gone = node(graph, call, which)
        graph["nodes"].remove(gone)
        graph["origins"].pop(gone["name"], None)
        (ref,) = (arg for arg in gone["args"] if isinstance(arg, dict))

        def reads(value: Any) -> Any:
            if isinstance(value, list):
                return [reads(item) for item in value]
            return ref if value == {"ref": gone["name"]} else value

        for other in graph["nodes"]:
            other.update({key: reads(other[key]) for key in ("args",) if key in other})
        graph["returns"] = [ref["ref"] if name == gone["name"] else name for name in graph["returns"]]
        graph["activations"] = {}

    return change


def grad_reduce(content: Content) -> int:
    """Which all-reduce is that of a gradient: the first over dp in backward or after."""
    every = [n for n in content["body"]["nodes"] if n.get("call") == "shardc.all_reduce"]
    return next(i for i, n in enumerate(every) if n["args"][2] == ["dp"] and n.get("phase") != "fwd")


REFUSED: Mapping[str, tuple[Callable[[Content], Any], str]] = {
    "no sum of a gradient": (lambda c: bypassed("shardc.all_reduce", grad_reduce(c))(c), "sum dp"),
    "another dtype": (edited("relu", type="bf16[8@dp, 4, 8@tp]"), "bf16"),
    "another shape": (edited("relu", type="f32[8@dp, 4, 16@tp]"), r"is f32\[4, 4, 4\] on a rank"),
    "another placement": (edited("relu", type="f32[8@tp, 4, 8@dp]"), "lies over dp, and over tp"),
    "nothing pending": (edited("shardc.linear_wgrad", type="f32[8@tp, 4]"), "pending in its result is sum dp"),
    "a kind of reduction": (argument("shardc.all_reduce", 1, "max"), "reduces by max over"),
    "another axis": (
        lambda c: argument("shardc.all_reduce", 2, ["tp"], grad_reduce(c))(c),
        "over tp, pending is sum dp",
    ),
    "an axis of no mesh": (argument("shardc.all_reduce", 2, ["xy"]), "no axis 'xy'"),
    "an op without a rule": (edited("relu", call="cholesky"), "relu"),
    "random numbers of torch": (edited("relu", call="rand_like"), "no sharding rule here"),
    "a port's role": (lambda c: c["body"]["inputs"][0].update(role="buffer"), "is param 'table.weight'"),
    "a port's name": (lambda c: c["body"]["inputs"][0].update(name="other"), "other"),
    "the mesh": (lambda c: c.update(mesh=[["dp", 4]]), "the program's mesh is"),
    "the reference's types": (lambda c: node(c["reference"], "relu").update(type="f32[8, 4, 9]"), "on a rank"),
    "a rate that is none": (lambda c: c["plan"]["rates"].update({"lr.0": "fast"}), "'rates'"),
    "a field of its own": (lambda c: c.update(model="os"), "'model'"),
    "a value beyond memory": (edited("relu", type=f"f32[{2**50}]"), "more than a rank can hold|on a rank"),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_instruction(name: str) -> None:
    change, said = REFUSED[name]
    found = refused("tp", change)
    assert found.code in ("SC402", "SC403", "SC410", "SC201")
    assert re.search(said, str(found)), str(found)


FLAT: Mapping[str, tuple[int, Any]] = {"another size": (4, 0), "another dim": (3, 1), "other atoms": (2, [5])}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FLAT)
def test_refused_of_a_bucket(name: str) -> None:
    at, value = FLAT[name]

    def change(content: Content) -> None:
        gathers = (n for n in content["body"]["nodes"] if n.get("call") == "shardc.all_gather")
        next(n for n in gathers if "bucket" in n["name"])["args"][at] = value

    assert refused("zero3", change).code == "SC410"


def test_an_index_beyond_the_rows_of_a_rank_is_named() -> None:
    """Which index a call reads is the program's; that it is none of a rank's rows shows when it runs."""
    content, of = json.loads(base("tp").text)["content"], base("tp")
    node(content["body"], "lt.Scalar")["args"][1] = 8  # the table's rows, and not those of a rank
    with pytest.raises(ShardcError) as caught:
        Program.from_json(forged(of.text, content)).simulate(of.batch, params=of.params)
    assert caught.value.code == "SC507"
    assert "the values there may be 0 to 3" in str(caught.value)


def stage(change: Callable[[Content], Any]) -> Callable[[Content], Any]:
    return lambda content: change(content["pipelined"])


def sends(pipelined: Content, kind: str) -> list[list[Any]]:
    return [i for own in pipelined["lists"]["ranks"] for i in own if i[0] == kind]


def retyped(pipelined: Content) -> None:
    """Both ends of a transfer say the same false type."""
    value = sends(pipelined, "Send")[0][1]
    for part in [p for s in pipelined["stages"] for p in s.values() if isinstance(p, dict) and "nodes" in p]:
        for one in part["nodes"]:
            if one["name"] == value:
                one["type"] = one["type"].replace("f32", "f64")


def other_bytes(pipelined: Content) -> None:
    for own in pipelined["lists"]["ranks"]:
        for i in own:
            if i[0] in ("Send", "Recv"):
                i[4] = 8


STAGES: Mapping[str, tuple[Callable[[Content], Any], str]] = {
    "another peer": (lambda p: sends(p, "Send")[0].__setitem__(3, 0), "SC521"),
    "other bytes": (other_bytes, "SC410"),
    "other bytes at one end": (lambda p: sends(p, "Recv")[0].__setitem__(4, 8), "SC521"),
    "a transfer left out": (lambda p: p["lists"]["ranks"][0].remove(sends(p, "Send")[0]), "SC521"),
    "a call of a stage": (lambda p: node(p["stages"][0]["forward"], "tanh").update(type="f32[9]"), "SC410"),
    "a type on both sides": (retyped, "SC410"),
    "a port of a stage": (lambda p: p["stages"][1]["forward"]["inputs"][-1].update(name="none"), "SC410"),
    "stages that change places": (lambda p: p["stages"].reverse(), "SC410"),
    "an end without its update": (lambda p: p["finishes"][0]["update"].update(outputs=[], returns=[]), "SC410"),
    "the end of a rank that is not the last": (
        lambda p: next(n for n in p["finishes"][0]["update"]["nodes"] if "call" in n and "type" in n).update(
            type="f64[4, 9]"
        ),
        "SC410",
    ),
    "a sum of one half of backward": (lambda p: p["stages"][0]["wgrad"]["outputs"][0].update(name="other"), "SC410"),
    "an axis of no name": (lambda p: p.update(axis=""), "SC402"),
    "work beyond the lists": (lambda p: p["lists"].update(microbatches=60000), "SC410"),
    "no part for a stage": (lambda p: p["stages"][0].pop("dgrad"), "SC402"),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", STAGES)
def test_refused_of_a_pipeline(name: str) -> None:
    change, code = STAGES[name]
    assert refused("zb", stage(change)).code == code


# ---------------------------------------------------------------------- what was compiled is never refused
PLANS: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "fused": {"fuse": True, "precision": "bf16", "clip_grad_norm": 1.0, "storage": {"zero": 3, "axes": ["dp"]}},
    "zero1": {"storage": {"zero": 1, "axes": ["dp"]}, "clip_grad_norm": 1.0},
    "zero2": {"storage": {"zero": 2, "axes": ["dp"]}, "accumulate": 2, "bucket": True, "precision": "fp16"},
    "recomputed": {"recompute": {"mode": "full"}, "accumulate": 2},
    "zb-h1": {
        "pipeline": {"microbatches": 4, "schedule": "zb-h1"},
        "mesh": "pp=2, dp=2, tp=2",
        "clip_grad_norm": 1.0,
        "storage": {"zero": 3, "axes": ["dp"]},
    },
    "1f1b": {
        "pipeline": {"microbatches": 4, "schedule": "1f1b"},
        "mesh": "pp=2, dp=2, tp=2",
        "bucket": True,
        "fuse": True,
    },
}


@pytest.mark.long
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_nothing_compiled_is_refused(model: Model, plan: str) -> None:
    made, batch, loss = model.make()
    with open(model.plan, encoding="utf-8") as file:
        wanted = yaml.safe_load(file) | PLANS[plan]
    optimizer = torch.optim.AdamW(made.parameters()) if PLANS[plan] else None
    program = shardc.compile(made, batch, plan=wanted, loss=loss, optimizer=optimizer)
    program.refuse_false()
    Program.from_json(program.to_json())


def test_each_field_of_the_record_is_checked() -> None:
    assert RECORD.keys() == PlanRecord.__annotations__.keys()


class Softmax(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).softmax(-1).square().mean()


@pytest.mark.parametrize("width", [7, 8])
def test_a_kernel_may_lay_pending_statistics_side_by_side(width: int) -> None:
    """The terms of a split softmax's sum become a dim, one a rank, in the kernel that concatenates them."""
    program = shardc.compile(
        Softmax(width), torch.randn(3, 8), mesh="dp=2", plan={"params": {"up.weight": "dp, -"}, "fuse": True}
    )
    assert any("fused_cat" in str(node.args) for node in program.body.calls())
    assert Program.from_json(program.to_json()).body


def test_a_kernel_that_drops_a_pending_sum_is_refused() -> None:
    program = shardc.compile(
        Softmax(8), torch.randn(3, 8), mesh="dp=2", plan={"params": {"up.weight": "dp, -"}, "fuse": True}
    )
    content = json.loads(program.to_json())["content"]
    said, wanted = "f32[2@dp, 2, 3, 1]", "f32[1, 2, 3, 1]"  # no longer one term a rank, but a sum
    nodes = content["body"]["nodes"]
    (call,) = [n for n in nodes if said in n.get("results", ())]
    (statistics,) = [n for n in nodes if n.get("item") == [call["name"], 0]]
    call["results"], statistics["type"] = [wanted], wanted
    with pytest.raises(ShardcError, match="loses what is pending: sum dp"):
        Program.from_json(forged(program.to_json(), content))


def test_rows_are_known_that_lie_on_the_host_in_between() -> None:
    """Backward sends rows to their experts by the grouping of forward, which it brings from the host."""
    model, x = Routed(), torch.randn(4, 4, 8, generator=torch.Generator().manual_seed(1))
    placed = {
        "mesh": "ep=2",
        "inputs": {"x": "ep"},
        "params": {"experts.*": "ep"},
        "experts": {"dispatch": "all_to_all"},
    }
    program = shardc.compile(model, x, plan={**placed, "offload": {"activations": "all", "least": 1}})
    copied = [operands(call)[0] for call in program.body.calls_of(BEGIN_OFFLOAD)]
    assert any(producer(value)[0].target is GROUP_ROWS for value in copied)
    assert Program.from_json(program.to_json()).verify(x, params=dict(model.named_parameters())).ok


@pytest.mark.parametrize(
    ("said", "wrong"), [("(%most) : f32[] |max", "(%most) : f32[] |sum"), ("(%out, %most)", "(%out, %all)")]
)
def test_a_copy_to_the_host_is_of_the_type_of_all_that_it_reads_pending_or_not(said: str, wrong: str) -> None:
    text = """graph @step mesh(tp=2) {
  %x = input "x" frozen : f32[4@tp]
  %most = amax(%x, [0]) {self0: tp} : f32[] |max tp
  %all = shardc.all_reduce(%most, op="max", axes=["tp"]) : f32[]
  %out = shardc.begin_offload(%most) : f32[] |max tp
  %host = shardc.end_offload(%out, %most) : f32[] |max tp
  return output "y" = %all
}
"""
    parse(text)
    with pytest.raises(ShardcError, match=r"yields f32\[\].*, the result says f32\[\] \|"):
        parse(text.replace(said, wrong))
