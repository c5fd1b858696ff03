"""Each pass alone: a few lines of text, one pass, the text after it. Nothing that another pass does can move these.

A file `single/<pass>.txt`, or `single/<pass>-<what>.txt` for a second one, has three parts, with `---` between them:

    does: what it shows                        a header, in YAML: beside `does`,
    options: {zero: 1, axes: [dp]}               the pass's fields,
    annotations: {param w: "-, tp"}              the annotations that were bound before (of `seed`: that it binds),
    ---
    graph @step mesh(dp=2) { ... }             the graph before
    ---
    graph @step mesh(dp=2) { ... }             the graph after, and what the pass noted of it that no text has

`pytest tests/passes/test_single_passes.py --update-golden` writes the third part. The driver's checks run too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import yaml
from torch import nn

import shardc
from shardc.compiler.pass_pipeline import Options, run
from shardc.frontend.join_loads import JoinLoads
from shardc.frontend.optimizer import AppendUpdates
from shardc.ir.graph import Graph, info, type_of
from shardc.ir.parse import parse
from shardc.ir.placement import Placement
from shardc.ir.text import print_graph, value_name
from shardc.partition.cut import cut
from shardc.partition.staged_program import scheduled
from shardc.passes.accumulate import Accumulate
from shardc.passes.base import Pass
from shardc.passes.bias_products import BiasProducts
from shardc.passes.cheaper_calls import CheaperCalls
from shardc.passes.communication.bucket import Bucket
from shardc.passes.communication.causes import NameCauses
from shardc.passes.communication.combine import Combine
from shardc.passes.communication.decompose import Decompose
from shardc.passes.communication.late_gradients import LateGradients
from shardc.passes.communication.overlap import Overlap
from shardc.passes.communication.prefetch import Prefetch
from shardc.passes.communication.report_gathers import ReportGathers
from shardc.passes.communication.split_batch import SplitBatch
from shardc.passes.context.divide_attention import DivideAttention
from shardc.passes.context.merge_keys import MergeKeys
from shardc.passes.context.pack_parts import PackParts
from shardc.passes.fusion.fuse import Fuse
from shardc.passes.gemm_padding import Align
from shardc.passes.join_squares import JoinSquares
from shardc.passes.join_sums import JoinSums
from shardc.passes.memory.offload import Offload
from shardc.passes.memory.offload_states import OffloadStates
from shardc.passes.memory.recompute import Recompute
from shardc.passes.merge_updates import MergeUpdates
from shardc.passes.normalize.group_experts import GroupExperts
from shardc.passes.normalize.imply_masks import ImplyMasks
from shardc.passes.normalize.limit_experts import LimitExperts
from shardc.passes.normalize.normalize import Normalize
from shardc.passes.normalize.quantize import Quantize
from shardc.passes.normalize.sum_parts import SumParts
from shardc.passes.pick_columns import PickColumns
from shardc.passes.sharding.assign import Assign
from shardc.passes.sharding.atomize import Atomize
from shardc.passes.sharding.find_blocks import FindBlocks, ShardedDim
from shardc.passes.sharding.find_sequences import FindSequences, ShardedSequence
from shardc.passes.sharding.group_sums import GroupSums
from shardc.passes.sharding.insert_reshards import InsertReshards
from shardc.passes.sharding.localize import Localize
from shardc.passes.sharding.lower_reshards import LowerReshards
from shardc.passes.sharding.propagate import Propagate
from shardc.passes.sharding.seed import Bound, SeedAnnotations
from shardc.passes.sharding.settle_partials import SettlePartials
from shardc.passes.sharding.spread_taps import SpreadTaps
from shardc.passes.sharding.store import Store
from shardc.passes.softmax.online_softmax import OnlineSoftmax
from shardc.passes.softmax.split_softmax import SplitSoftmax
from shardc.passes.sum_products import SumProducts
from shardc.plan.context import Balance
from shardc.plan.values import DTYPES

FOLDER = Path(__file__).parent / "single"
FILES = sorted(path.stem for path in FOLDER.glob("*.txt"))
LINE = "\n---\n"


def updates(momentum: float) -> AppendUpdates:
    """Of the one weight of these files' models, `fc.weight`."""
    model = nn.ModuleDict({"fc": nn.Linear(8, 6, bias=False)})
    return AppendUpdates(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum))


def atomize(cuts: list[list[Any]]) -> Atomize:
    return Atomize(tuple((name, dim, tuple(sizes)) for name, dim, sizes in cuts))


def find_blocks(sharded: list[list[Any]]) -> FindBlocks:
    return FindBlocks(tuple(ShardedDim(name, dim, ranks, tuple(sizes)) for name, dim, ranks, sizes in sharded))


def find_sequences(sequences: list[list[Any]], balance: Balance) -> FindSequences:
    return FindSequences(tuple(ShardedSequence(*given) for given in sequences), balance)


def spread_taps(lengths: list[int]) -> SpreadTaps:
    return SpreadTaps(frozenset(lengths))


def quantize(compute: str, scale: Literal["tensor", "row"], history: int = 0) -> Quantize:
    return Quantize(DTYPES[compute], scale, history=history)


PASSES: Mapping[str, Callable[..., Pass]] = {
    "divide_attention": DivideAttention,
    "merge_keys": MergeKeys,
    "normalize": Normalize,
    "imply_masks": ImplyMasks,
    "group_experts": GroupExperts,
    "limit_experts": LimitExperts,
    "quantize": quantize,
    "sum_parts": SumParts,
    "accumulate": Accumulate,
    "join_loads": JoinLoads,
    "append_updates": updates,
    "atomize": atomize,
    "find_blocks": find_blocks,
    "find_sequences": find_sequences,
    "spread_taps": spread_taps,
    "propagate": Propagate,
    "split_softmax": SplitSoftmax,
    "store": Store,
    "assign": Assign,
    "group_sums": GroupSums,
    "settle_partials": SettlePartials,
    "insert_reshards": InsertReshards,
    "lower_reshards": LowerReshards,
    "combine": Combine,
    "name_causes": NameCauses,
    "report_gathers": ReportGathers,
    "recompute": Recompute,
    "localize": Localize,
    "online_softmax": OnlineSoftmax,
    "pack_parts": PackParts,
    "split_batch": SplitBatch,
    "join_squares": JoinSquares,
    "align": Align,
    "overlap": Overlap,
    "late_gradients": LateGradients,
    "sum_products": SumProducts,
    "decompose": Decompose,
    "bucket": Bucket,
    "prefetch": Prefetch,
    "bias_products": BiasProducts,
    "pick_columns": PickColumns,
    "cheaper_calls": CheaperCalls,
    "merge_updates": MergeUpdates,
    "fuse": Fuse,
    "join_sums": JoinSums,
    "offload": Offload,
    "offload_states": OffloadStates,
}


def bound(annotations: Mapping[str, str]) -> tuple[Bound, ...]:
    """`{"param w": "-, tp"}`."""
    named = [(*key.split(" ", 1), text) for key, text in annotations.items()]
    return tuple(Bound(kind, name, Placement.parse(text)) for kind, name, text in named)


def noted(graph: Graph) -> list[str]:
    """What passes leave for each other, and for the user, that stands in no graph's text."""
    alive = set(graph.fx.nodes)
    return [
        *(f"seed {value_name(v)} : {type_of(v).place(s.placement)}" for v, s in graph.seeds.items() if v in alive),
        *(f"stored {value_name(v)} : {type_of(v).place(placed)}" for v, placed in graph.stored.items()),
        *(f"cause {value_name(v)} : {info(v).cause}" for v in graph.values() if info(v).cause),
        *(found.render() for found in graph.diagnostics),
    ]


def after(name: str, header: Mapping[str, Any], before: str) -> str:
    """The text that a pass leaves, and what it noted."""
    graph, options = parse(before), dict(header.get("options", {}))
    annotated = SeedAnnotations(bound(header.get("annotations", {})))
    if name == "cut":
        parts = scheduled(cut(graph, **options), "1f1b").graphs()
        return "".join(print_graph(part, comments=False) for part in parts if part.outputs)
    if name == "seed":
        todo: Pass = annotated
    else:
        graph, todo = annotated.run(graph), PASSES[name](**options)
    known = noted(graph)
    graph = run(graph, [todo], Options())
    lines = [line for line in noted(graph) if line not in known]
    return "".join([print_graph(graph, comments=False), *(f"{line}\n" for line in lines)])


@pytest.mark.parametrize("file", FILES)
def test_text_after_one_pass(file: str, request: pytest.FixtureRequest) -> None:
    path = FOLDER / f"{file}.txt"
    head, before, *wanted = path.read_text(encoding="utf-8").split(LINE)
    text = after(file.partition("-")[0], yaml.safe_load(head), before)
    assert print_graph(parse(before), comments=False).strip() == before.strip(), "written as it is printed"
    if request.config.getoption("--update-golden"):
        path.write_text(f"{head}{LINE}{before.strip()}{LINE}{text}", encoding="utf-8")
    else:
        assert [text] == wanted, f"{path} differs: see the diff, then --update-golden"


def test_every_pass_of_the_driver_has_a_file() -> None:
    seen: set[str] = set()
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    shardc.compile(
        model,
        torch.randn(4, 4),
        mesh="pp=2",
        plan={"pipeline": {"microbatches": 2}},
        optimizer=torch.optim.SGD(model.parameters()),
        loss=lambda y, _: y.square().mean(),
        watch=lambda one, *_: seen.add(one.name),
    )
    assert len(seen) > 20
    assert {file.partition("-")[0] for file in FILES} == seen
