"""Predicted steps beside measured ones: `python -m benchmarks.predicted_steps`.

Our unfused program of the model, batch and parallelism of each eager run in `benchmarks/measurements` is compiled on
the meta device, and predicted on `h200-nvlink`, whose tables were fitted to collectives, attention, copies and steps of
one GPU; then our own recorded steps (`benchmarks.own_steps`). Printed are the times, the errors, and the pairs of eager
runs of one model that are predicted in the wrong order.

    --only WORD     runs whose peer or model has the word; ours are of the peer `ours`
    --trace FOLDER  a trace of each, for ui.perfetto.dev

Runs that cannot be mirrored are listed with the reason.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import fx

import shardc
from benchmarks import own_steps
from benchmarks.measured_models import SIZES
from benchmarks.torch_pipeline import Work, step_seconds
from shardc.cost.prediction import Prediction
from shardc.ir.graph import Graph, ValueInfo, info, op_name, operands
from shardc.ir.hardware import Group, Hardware
from shardc.ir.ops.accumulate import ADDS
from shardc.passes.sum_products import single_term
from shardc.plan.hardware import hardware
from shardc.schedule.instructions import Backward, Forward, Send

MEASUREMENTS = Path(__file__).parent / "measurements"
HARDWARE = "h200-nvlink"
COLUMNS = ("q", "k", "v", "up")
TENSOR_PARALLEL: Mapping[str, str] = {"tok.weight": "tp, -", "head.weight": "tp, -"} | {
    f"**.{name}.weight": "tp, -" for name in COLUMNS
}
LEFT_OUT = {
    "torch-dtensor_sp": "DTensor's dispatcher takes Python longer than the GPU: 111 ms, 52 when compiled",
    "megatron-core-tp_sp-native": "attention by single operations, with dropout's masks",
    "torch-pp-ZBVZeroBubble": "Python records its backward in two parts anew: 2.7 times 1F1B's time",
    "torch-pp-InterleavedZeroBubble": "the same",
    "megatron-core-pp": "waits for the host: 2.5 times as long as torch's with the same schedule",
}
ADAMW = 0.854  # torch's fused AdamW, over GPT-2's parameters, by the speed of ours: README.md
MEAN = ("mul.Tensor", "div.Tensor", "mul.Scalar", "div.Scalar", "_to_copy")
HOST_BOUND = "Python launches collectives slower than the GPU runs them"


@dataclass(frozen=True)
class Run:
    """A measured run, and how we mirror it."""

    row: Mapping[str, Any]
    mesh: str
    plan: Mapping[str, Any]
    replicas: int = 1

    @property
    def name(self) -> str:
        row = self.row
        more = [f"M={row['microbatches']}"] if "microbatches" in row else []
        more += ["AdamW"] if row.get("opt") else []
        more += [f"connections={row['max_conn']}"] if row.get("max_conn") else []
        return " ".join([row["peer"], row["config"], f"mb={row['mb']}", *more])


def rows() -> list[dict[str, Any]]:
    """The measured steps and pipelines of eager runs."""
    lines = [line for name in ("h200.jsonl", "h200_steps.jsonl") for line in (MEASUREMENTS / name).open()]
    read = [json.loads(line) for line in lines]
    return [row for row in read if row["kind"] in ("step", "pipeline") and row.get("compile", "none") == "none"]


def why_left_out(row: Mapping[str, Any]) -> str:
    """Why a run cannot be mirrored; "" for one that can."""
    for peer, why in LEFT_OUT.items():
        if row["peer"].startswith(peer):
            return why
    return HOST_BOUND if row["gpus"] > 1 and row["mb"] == 1 and row["kind"] == "step" else ""


def mirrored(row: Mapping[str, Any]) -> Run:
    """The mesh and the plan of a run."""
    peer, gpus = row["peer"], row["gpus"]
    if row["kind"] == "pipeline":
        starts = [sum(row["layers"][:stage]) for stage in range(1, len(row["layers"]))]
        pipeline = {
            "schedule": "interleaved" if "Interleaved" in peer else "1f1b",
            "microbatches": row["microbatches"],
            "split": [f"blocks.{start}" for start in starts],
        }
        return Run(row, f"pp={gpus}", {"pipeline": pipeline}, row["microbatches"])
    if "tp" in peer:
        sequence = {"activations": {"blocks.*": "-, tp, -", "tok": "-, tp, -"}} if "tp_sp" in peer else {}
        return Run(row, f"tp={gpus}", {"overlap": False, "params": dict(TENSOR_PARALLEL), **sequence, "bucket": True})
    batch = {"inputs": {"tokens": "dp, -", "targets": "dp, -"}}
    if peer == "torch-fsdp":
        return Run(row, f"dp={gpus}", {**batch, "storage": {"zero": 3, "axes": "dp"}, "bucket": True}, gpus)
    if peer == "torch-ddp":
        return Run(row, f"dp={gpus}", {**batch, "bucket": True}, gpus)
    return Run(row, "tp=1", {})


def compiled(run: Run) -> shardc.Program:
    """The program, unfused but for what eager PyTorch too runs as one kernel, and our graphs have as several calls:
    RMSNorm, an update by AdamW, and Megatron's rotary embedding, which it compiles."""
    size = SIZES[run.row["config"]]
    with torch.device("meta"):
        model = size.model()
        ids = torch.zeros(run.row["mb"] * run.replicas, size.sequence, dtype=torch.long)
    batch = {"tokens": ids, "targets": ids}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4) if run.row.get("opt") else None
    single = {**run.plan, "bucket": False}  # buckets have names of their own
    program = shardc.compile(model, batch, mesh=run.mesh, plan=single, optimizer=optimizer)
    alone = [info(node).name for node in program.body.calls() if not _in_one_kernel(info(node), run.row)]
    if sum(1 for _ in program.body.calls()) == len(alone):
        return shardc.compile(model, batch, mesh=run.mesh, plan=run.plan) if "bucket" in run.plan else program
    ops = {op_name(node.target) for node in program.body.calls()}
    plan = {**run.plan, "fuse": {"exclude": sorted({*alone} - ops)}}  # `_to_copy` as a name would be the op's too
    return shardc.compile(model, batch, mesh=run.mesh, plan=plan, optimizer=optimizer)


def _in_one_kernel(call: ValueInfo, row: Mapping[str, Any]) -> bool:
    module = call.fqn.rpartition(".")[2]
    if call.phase == "opt" or (SIZES[row["config"]].gated and module in ("n1", "n2", "norm")):
        return True
    return "jitrope" in row["peer"] and module == "attn" and "rotated" in call.source_text


def predictions(only: str = "") -> Iterator[tuple[Run, Prediction]]:
    for row in rows():
        if not why_left_out(row) and (only in row["peer"] or only in row["config"]):
            run = mirrored(row)
            yield run, prediction_of(run)


def prediction_of(run: Run) -> Prediction:
    return predicted(run, compiled(run))


def predicted(run: Run, program: shardc.Program) -> Prediction:
    """The prediction of a program of ours, changed by what torch runs otherwise (`torchs_terms`)."""
    if program.pipelined is not None:
        program = replace(program, pipelined=program.pipelined.transformed(with_narrow_sums))
    machine = hardware(HARDWARE).changed({"call_seconds": 0.0})  # that is of our runtime
    found = program.predict(machine)
    if "Interleaved" in run.row["peer"]:
        return replace(found, step_ms=_in_one_queue(program, found, machine))
    return replace(found, step_ms=found.step_ms + sum(torchs_terms(run, found, machine).values()))


def torchs_terms(run: Run, found: Prediction, machine: Hardware) -> dict[str, float]:
    """Milliseconds of what torch copies on the compute stream and our program does not, and of its slower AdamW.

    FSDP2 copies what it has gathered out of a flat buffer, of a block before forward and before backward, of what is in
    no block once, and gradients into one before they are scattered (`torch.distributed.fsdp._fully_shard`). DDP copies
    gradients into its buckets, as ours does, and back.
    """
    terms: dict[str, float] = {}
    size = SIZES[run.row["config"]]
    with torch.device("meta"):
        model = size.model()
    moved = {name: 2 * p.numel() * p.element_size() for name, p in model.named_parameters()}
    groups = [sum(n for name, n in moved.items() if name.startswith(f"blocks.{k}.")) for k in range(size.layers)]
    rest = sum(moved.values()) - sum(groups)
    if run.row["peer"] == "torch-fsdp":
        copies = [*groups * 3, rest, rest]
        terms["flat buffers"] = 1e3 * sum(map(machine.memory_seconds, copies))
    if run.row["peer"] == "torch-ddp":
        terms["buckets"] = 1e3 * machine.memory_seconds(sum(moved.values()))
    if run.row.get("opt"):
        updates = sum(time.ms for time in found.calls if time.call.startswith("opt."))
        terms["AdamW"] = updates * (1 / ADAMW - 1)
    return terms


def _in_one_queue(program: shardc.Program, found: Prediction, machine: Hardware) -> float:
    """Milliseconds of a pipeline whose ranks have one queue of transfers each, as torch's."""
    assert program.pipelined is not None
    assert found.costs is not None
    lists = program.pipelined.lists.ranks
    orders = [
        [Work(isinstance(i, Backward), i.stage, i.microbatch) for i in ours if isinstance(i, (Forward, Backward))]
        for ours in lists
    ]
    stages = found.costs.stages

    def seconds(work: Work) -> float:
        cost = stages[work.stage]
        return (cost.backward or cost.dgrad + cost.wgrad) if work.backward else cost.forward

    sends = [i for ours in lists for i in ours if isinstance(i, Send)]
    transfer = machine.collective_seconds("send", max(i.bytes for i in sends), Group((2,)), graph=True)
    return 1e3 * step_seconds(orders, seconds, transfer)


def with_narrow_sums(graph: Graph) -> Graph:
    """Peers add up the gradients of microbatches in bfloat16, in calls of their own, of losses that they have divided;
    a pipeline of ours in float32, by the products, and it divides the sums. The graph with its terms as they are made,
    and without its means."""
    copies: dict[fx.Node, fx.Node] = {}
    narrow = graph.copy(copies)
    terms = [v for port, v in zip(graph.outputs, graph.output_values, strict=True) if port.role == "sum"]
    for cast in (copies[value] for value in terms if op_name(value.target) == "_to_copy"):
        cast.replace_all_uses_with(operands(cast)[0])
    for term in (copies[value] for value in terms if value.target in ADDS):
        with narrow.fx.inserting_before(term):
            made = single_term(narrow, term)
        term.replace_all_uses_with(made)
    for port, total in zip(narrow.inputs, narrow.placeholders, strict=True):
        while port.role == "sum" and len(total.users) == 1:
            (user,) = total.users
            if user.op == "output" or op_name(user.target) not in MEAN:
                break
            user.replace_all_uses_with(total)
            narrow.fx.erase_node(user)
    narrow.erase_dead()
    return narrow


def wrong_pairs(pairs: Sequence[tuple[Run, Prediction]], apart: float = 1.05) -> list[tuple[str, str]]:
    """Runs of one model and as many tokens, measured more than 5 % apart, that are predicted in the other order."""
    wrong: list[tuple[str, str]] = []
    for (one, of_one), (two, of_two) in combinations(pairs, 2):
        alike = all(one.row[key] == two.row[key] for key in ("config", "kind"))
        slow, fast = (one, two) if one.row["step_ms"] > two.row["step_ms"] else (two, one)
        if alike and slow.row["step_ms"] > apart * fast.row["step_ms"]:
            predicted = {id(one): of_one.step_ms, id(two): of_two.step_ms}
            if predicted[id(slow)] <= predicted[id(fast)]:
                wrong.append((slow.name, fast.name))
    return wrong


def _print(row: Mapping[str, Any], predicted: Prediction, name: str) -> None:
    measured, held = row["step_ms"], f"{row['mem_gib']:.2f} {predicted.peak_bytes / 2**30:.2f}"
    error = predicted.step_ms / measured - 1
    print(f"{measured:9.2f} {predicted.step_ms:9.2f} {error:+7.1%} {held:>12}  {name}", flush=True)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--trace", type=Path)
    asked = parser.parse_args(arguments)
    pairs: list[tuple[Run, Prediction]] = []
    print(f"{'measured':>9} {'predicted':>9} {'error':>7} {'GiB':>12}  run")
    for run, predicted in predictions(asked.only):
        pairs.append((run, predicted))
        _print(run.row, predicted, run.name)
        if asked.trace is not None:
            predicted.to_trace(asked.trace / f"{run.name.replace(' ', '_')}.json")
    for name, measured, predicted in own_steps.predictions(HARDWARE, asked.only):
        for row in measured:
            _print(row, predicted, f"{name}, {row['date']}")
    for slow, fast in wrong_pairs(pairs):
        print(f"wrong order: {slow} took longer than {fast}")
    for row in rows():
        if why := why_left_out(row):
            print(f"not mirrored: {row['peer']} {row['config']} mb={row['mb']}, {row['step_ms']:.1f} ms: {why}")


if __name__ == "__main__":
    main(sys.argv[1:])
