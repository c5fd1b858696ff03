"""Products that gather their operand, or scatter their result, piece by piece: found, and the same to the bit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import shardc
from benchmarks.measured_models import SIZES
from shardc.cli.pipeline_summary import pipeline_summary
from shardc.cli.summary import predicted_choices, summary
from shardc.compiler.decompose_auto import MARGIN, DecomposeChoice
from shardc.cost.beside import beside
from shardc.ir.diagnostic import ShardcError
from shardc.ir.graph import info, op_name, operands, results, type_of
from shardc.ir.ops.decomposed import DECOMPOSED, GATHER_LINEAR
from shardc.ir.parse import parse
from shardc.ir.schema import given
from shardc.ir.text import print_graph
from shardc.passes.bias_products import BiasProducts
from shardc.passes.communication.decompose import Decompose
from shardc.passes.infer_placement import placement_faults
from tests.api.test_communication import compiled
from tests.passes.test_late_gradients import COLUMNS, GATED, PLANS, SEQUENCE, SMALL, large, results_of, small
from tests.replanned import replanned

DECOMPOSE: dict[str, Any] = {"overlap": {"decompose": True}}
WHOLE: dict[str, Any] = {"overlap": {"decompose": False}}


def counted(program: shardc.Program) -> Counter[tuple[str, str, int]]:
    """Decomposed calls by op, phase and number of products."""
    calls = [call for call in program.body.calls() if call.target in DECOMPOSED]
    return Counter((op_name(c.target).split(".")[1], info(c).phase, len(given(c).get("ws", "1"))) for c in calls)


def without_bias_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decomposed products take no biases, and what a whole one adds to its bias is rounded as its processor does."""
    monkeypatch.setattr(BiasProducts, "run", lambda self, graph: graph)


def sent(program: shardc.Program) -> Counter[tuple[object, ...]]:
    """What is communicated, in whatever order."""
    return Counter((c.value, c.kind, c.axes, c.bytes_per_rank, c.phase, c.cause) for c in program.collectives())


LAYERS = 2
# By model: of a layer, the products of forward's gathers, and how many are scattered in forward and in backward. A
# Llama's gradients of queries, keys and values, and of gate and up, are added up before they are scattered.
MODELS = {"gpt2": ((1, 1), 2, 2), "llama": ((3, 2), 2, 0)}


@pytest.mark.parametrize("model", MODELS)
def test_a_layer_has_four_in_forward_and_as_many_pairs_in_backward(model: str) -> None:
    gathered, scattered, returned = MODELS[model]
    whole = compiled(model, f"{model}_sp", LAYERS)
    program = replanned(whole, **DECOMPOSE)
    expected = Counter({("linear_scatter", "fwd", 1): LAYERS * scattered})
    expected[("linear_scatter", "bwd", 1)] = LAYERS * returned + 1  # and of the head
    expected[("gather_linear", "bwd", 1)] = LAYERS * scattered  # what forward scatters, backward gathers
    expected[("gather_linear", "fwd", 1)] = 1
    for products in gathered:
        expected[("gather_linear", "fwd", products)] += LAYERS
    assert counted(program) == expected
    assert counted(whole) == Counter()
    assert sent(program) == sent(whole)
    assert program.flops().total == whole.flops().total


CASES: dict[str, dict[str, Any]] = {
    "tp": {"mesh": "tp=2", **SEQUENCE},
    "of four": {"mesh": "tp=4", **SEQUENCE},
    "dp": {**PLANS["dp tp"], **SEQUENCE},
    "zero": {**PLANS["zero"], **SEQUENCE},
    "recompute": {**PLANS["recompute"], **SEQUENCE},
    "selective": {"mesh": "tp=2", "recompute": "selective", **SEQUENCE},
    "accumulate": {"mesh": "tp=2", "accumulate": 2, **SEQUENCE},
    "clip": {**PLANS["clip"], **SEQUENCE},
    "fuse": PLANS["fuse"],
    "master": {**PLANS["master"], **SEQUENCE},
    "reduce": {"mesh": "tp=2", "precision": {"compute": "bf16", "master": "fp32", "reduce": "fp32"}, **SEQUENCE},
    "split": {"mesh": "tp=2", "overlap": {"split": 2}, **SEQUENCE},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("gated", [True, False])
def test_no_bit_changes(case: str, gated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all ranks, in forward, backward and the update; and of the program as a file holds it."""
    if gated and "precision" in CASES[case]:
        pytest.skip("of this model, rotated queries have another dtype than values")
    without_bias_products(monkeypatch)
    whole = small(GATED if gated else SMALL, CASES[case])
    program = replanned(whole, overlap={**CASES[case].get("overlap", {}), "decompose": True})
    kinds = {op for op, _, _ in counted(program)}
    assert kinds == {"gather_linear", "linear_scatter"}
    program.save(tmp_path / "program.json")
    loaded = shardc.Program.load(tmp_path / "program.json")
    assert loaded.text() == program.text()
    read = replace(program, body=loaded.body)
    for one, other, again in zip(*(results_of(p) for p in (program, whole, read)), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, again)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_of_a_pipeline(schedule: str) -> None:
    """Each stage's graphs have theirs."""
    pipeline = {"axis": "pp", "schedule": schedule, "microbatches": 2}
    program = small(GATED, {"mesh": "pp=2, tp=2", "pipeline": pipeline, **SEQUENCE, **DECOMPOSE})
    assert program.pipelined is not None
    graphs = [graph for graph in program.pipelined.graphs() if any(c.target in DECOMPOSED for c in graph.calls())]
    assert {info(c).phase for graph in graphs for c in graph.calls() if c.target in DECOMPOSED} == {"fwd", "bwd"}
    report = program.verify()
    assert report.ok, str(report)


def test_with_symbols_the_calls_do_not_depend_on_sizes() -> None:
    plan = {"mesh": "tp=2", "symbols": {"B": ["tokens.0", "targets.0"]}, **SEQUENCE, **DECOMPOSE}
    programs = [small(GATED, plan, rows) for rows in (4, 6)]
    assert counted(programs[0]) == counted(programs[1]) != Counter()
    report = programs[0].verify()
    assert report.ok, str(report)


def test_the_gathered_operand_is_there_meanwhile() -> None:
    """It counts whether something reads it or not, and so does a product before it is scattered."""
    whole = small(GATED, CASES["tp"])
    program = replanned(whole, **DECOMPOSE)
    assert 0.9 <= program.memory().peak / whole.memory().peak <= 1.1
    for call in program.body.calls():
        if call.target is GATHER_LINEAR:
            *_, gathered = info(call).results
            assert gathered is not None
            assert gathered.local_bytes(program.mesh) == 2 * type_of(operands(call)[0]).local_bytes(program.mesh)


def test_explain_says_that_a_collective_is_inside_its_products() -> None:
    program = replanned(compiled("llama", "llama_sp", 1), **DECOMPOSE)
    gather = next(c for c in program.collectives() if c.value.endswith("input_layernorm.mul_1.all_gather"))
    said = program.explain(gather.value)
    names = [f"%model.layers.0.self_attn.{name}_proj.linear" for name in "qkv"]
    assert said.beside == f"the products that gather their operand piece by piece: {', '.join(names)}"
    assert said.collective == gather
    assert any("llama_sp.yaml" in trail.cause for trail in said.trails)
    scatter = next(c for c in program.collectives() if c.value.endswith("o_proj.linear.reduce_scatter"))
    assert (
        program.explain(scatter.value).beside
        == f"the product that scatters its result piece by piece: %{scatter.value}"
    )


def test_a_call_covers_its_own_collective() -> None:
    program = replanned(small(GATED, CASES["tp"]), **DECOMPOSE)
    for row in beside(program.body):
        assert (row.node in row.products) == (row.node.target in DECOMPOSED)


def test_words_of_a_plan() -> None:
    plan = shardc.Plan.from_dict({"overlap": {"decompose": True}})
    assert shardc.Plan.parse(plan.dump()) == plan != shardc.Plan.from_dict({})
    auto = shardc.Plan.from_dict(AUTO)
    assert shardc.Plan.parse(auto.dump()) == auto != plan
    assert not shardc.Plan.from_dict({"overlap": True}).overlap.decompose
    with pytest.raises(ShardcError, match=r"SC208(.|\n)*'overlap.decompose' should be true, false or auto, not 2"):
        shardc.Plan.from_dict({"overlap": {"decompose": 2}})


def test_a_prediction_knows_what_pieces_hide() -> None:
    """Of products that take longer than what they send, as large ones do, nearly all is hidden."""
    whole = large("llama3-8b-slice", 2, sequence=True)
    program = replanned(whole, **DECOMPOSE)
    exposed, before = (sum(row.exposed_ms for row in p.predict("h200-nvlink").exposed_ms) for p in (program, whole))
    assert exposed < before


# ---------------------------------------------------------------------- by prediction
AUTO: dict[str, Any] = {"overlap": {"decompose": "auto"}, "hardware": "h200-nvlink"}
MASTER: dict[str, Any] = {"mesh": "tp=2", "precision": {"compute": "bf16", "master": "fp32"}, **SEQUENCE}


def choice_of(program: shardc.Program) -> DecomposeChoice:
    return DecomposeChoice(*program.plan.get("decompose", ()))


# Products of a step that waits for its links hide what they send; over NVLink they take longer than that is worth.
SLOW_LINKS: dict[str, Any] = {"like": "default", "device": "gpu", "link_bytes_per_second": 5e10}


@pytest.mark.parametrize(("hardware", "pays"), [(SLOW_LINKS, True), ("h200-nvlink", False)])
def test_a_large_step_is_decomposed_where_that_is_predicted_to_be_faster(hardware: object, pays: bool) -> None:
    sizes = replace(SIZES["llama3-8b-slice"], layers=1)
    with torch.device("meta"):
        model, ids = sizes.model().to(torch.bfloat16), torch.zeros(1, sizes.sequence, dtype=torch.long)
    plan = {"mesh": "tp=4", "params": COLUMNS, **SEQUENCE, "hardware": hardware}
    programs: dict[bool | str, shardc.Program] = {}
    for said in (False, True, "auto"):
        overlap = {"overlap": {"decompose": said}}
        programs[said] = shardc.compile(model, {"tokens": ids, "targets": ids}, plan={**plan, **overlap})
    ms = {said: program.predict().step_ms for said, program in programs.items()}
    auto, choice = programs["auto"], choice_of(programs["auto"])
    assert (choice.whole_ms, choice.decomposed_ms) == pytest.approx((ms[False], ms[True]))
    assert choice.decomposed == pays == (ms[True] < (1 - MARGIN) * ms[False])
    assert auto.text() == programs[pays].text()
    assert shardc.Plan.parse(auto.plan.get("text", "")).overlap.decompose is pays
    chosen, other = ("piece by piece", "whole") if pays else ("whole", "piece by piece")
    (line,) = predicted_choices(auto)
    assert f"{chosen}, predicted {ms[pays]:.2f} ms a step, {other} {ms[not pays]:.2f}" in line


@pytest.mark.parametrize("more", [{}, {"pipeline": {"axis": "pp", "microbatches": 2}, "mesh": "pp=2, tp=2"}])
def test_a_small_step_stays_whole(more: dict[str, Any]) -> None:
    """Its time is the host's: of what it launches no saving is believed."""
    program = small(SMALL, {**MASTER, **AUTO, **more})
    assert not choice_of(program).decomposed
    assert not any(call.target in DECOMPOSED for graph in program.staged.graphs() for call in graph.calls())
    console = Console(width=300, record=True, file=StringIO())
    console.print(*(pipeline_summary(program) if more else summary(program)))
    assert "products and their collectives: whole, predicted" in console.export_text()


@pytest.mark.parametrize(
    "said",
    [
        {"hardware": "cpu-gloo"},
        {"hardware": {"like": "h200-nvlink", "accelerators_per_node": 1}},
        {"symbols": {"B": ["tokens.0", "targets.0"]}},
    ],
)
def test_nothing_is_chosen_where_no_device_runs_it_in_pieces(said: dict[str, Any]) -> None:
    program = small(SMALL, {**MASTER, **AUTO, **said})
    assert "decompose" not in program.plan
    assert counted(program) == Counter()


def test_the_passes_of_one_way_are_watched() -> None:
    seen = list[str]()
    whole = small(SMALL, {**MASTER, **AUTO, "overlap": {"decompose": False}})
    assert whole.request is not None
    program = whole.recompiled(
        replace(
            whole.request,
            plan={"params": COLUMNS, **MASTER, **AUTO},
            watch=lambda pass_, *_: seen.append(pass_.name),
        )
    )
    assert "decompose" in program.plan
    assert seen.count("decompose") == 1
    assert program.text() == whole.text()


# ---------------------------------------------------------------------- what stays whole
ONE = """graph @step mesh(tp=2) {
  %x = input "x" : f32[4, 8@tp, 16]
  %w = param "w" : f32[32@tp, 16]
  %v = param "v" : f32[16, 32@tp]
  %r = input "r" : f32[4, 8, 16]
fwd:
  %x.all_gather = shardc.all_gather(%x, axes=["tp"], atoms=[4, 4, 16], pos=1, size=8, shape=[4, 8, 16]) : f32[4, 8, 16]
  %h = shardc.linear(%x.all_gather, %w) {n: tp} : f32[4, 8, 32@tp]
  %y = shardc.linear(%h, %v) {k: tp} : f32[4, 8, 16] |sum tp
  %sum = shardc.reduce_scatter(%y, op="sum", axes=["tp"], atoms=[4, 8, 16], pos=1, shape=[4, 4, 16]) : f32[4, 8@tp, 16]
  return output "y" = %sum
}
"""


def found(text: str, *, any_size: bool = False) -> list[str]:
    graph = Decompose(True, any_size=any_size).run(parse(text))
    for call in graph.calls():
        assert placement_faults(call, [v and type_of(v) for v in results(call)], graph.mesh) == []
    return [op_name(call.target).split(".")[1] for call in graph.calls() if call.target in DECOMPOSED]


def test_a_pair_of_each() -> None:
    assert found(ONE) == ["gather_linear", "linear_scatter"]


def test_a_sum_that_something_is_added_to_is_not_scattered_by_a_product() -> None:
    added = "  %z = add.Tensor(%y, %y) {~1: ()} : f32[4, 8, 16] |sum tp\n".replace(" {~1: ()}", "")
    text = ONE.replace("  %sum =", f"{added}  %sum =").replace("reduce_scatter(%y,", "reduce_scatter(%z,")
    assert found(text) == ["gather_linear"]


def test_a_product_that_something_else_reads_is_not_scattered() -> None:
    more = '  %more = shardc.all_reduce(%y, op="sum", axes=["tp"]) : f32[4, 8, 16]\n'
    text = ONE.replace("  return", f"{more}  return").replace('"y" = %sum', '"y" = %sum, output "more" = %more')
    assert found(text) == ["gather_linear"]


def test_dims_that_the_group_does_not_divide_stay_whole() -> None:
    """But where the choice must not depend on sizes: they are then gathered, and scattered, as a whole."""
    uneven = ONE.replace("4, 8@tp, 16", "4, 7@tp, 16").replace("4, 8, ", "4, 7, ").replace("size=8", "size=7")
    assert found(uneven) == []
    assert found(uneven, any_size=True) == ["gather_linear", "linear_scatter"]


def test_a_gathered_weight_is_no_gathered_operand() -> None:
    """ZeRO's gathers are of the other operand; and columns are no rows."""
    text = """graph @step mesh(tp=2) {
  %x = input "x" : f32[4, 8, 16]
  %w = param "w" : f32[32@tp, 16]
  %c = input "c" : f32[4, 8, 16@tp]
fwd:
  %w.all_gather = shardc.all_gather(%w, axes=["tp"], atoms=[16, 16], pos=0, size=32, shape=[32, 16]) : f32[32, 16]
  %c.all_gather = shardc.all_gather(%c, axes=["tp"], atoms=[4, 8, 8], pos=2, size=16, shape=[4, 8, 16]) : f32[4, 8, 16]
  %h = shardc.linear(%x, %w.all_gather) : f32[4, 8, 32]
  %g = shardc.linear(%c.all_gather, %w.all_gather) : f32[4, 8, 32]
  return output "h" = %h, output "g" = %g
}
"""
    assert found(text) == []


def test_eight_bit_products_stay_whole() -> None:
    precision = {"compute": "bf16", "master": "fp32", "linear": "fp8"}
    whole = small(SMALL, {"mesh": "tp=2", "precision": precision, **SEQUENCE})
    scaled, left = (
        Counter(name for call in program.body.calls() if "scaled" in (name := op_name(call.target)))
        for program in (whole, replanned(whole, **DECOMPOSE))
    )
    assert scaled == left != Counter()


def test_a_product_with_what_it_gathers_stays_whole() -> None:
    text = """graph @step mesh(tp=2) {
  %x = input "x" : f32[8@tp, 16]
  %x.all = shardc.all_gather(%x, axes=["tp"], atoms=[4, 16], pos=0, size=8, shape=[8, 16]) : f32[8, 16]
  %t = t(%x.all) : f32[16, 8]
  %y = mm(%x.all, %t) : f32[8, 8]
  return output "y" = %y
}
"""
    assert found(text) == []


def test_sums_of_gradients_stay_whole() -> None:
    """They hold nothing up: of weights that lie as GPT-2's, a gradient is a product like any other."""
    text = """graph @step mesh(dp=2) {
  %x = input "x" : f32[16, 8@dp]
  %g = input "g" : f32[8@dp, 32]
bwd:
  %dw = mm(%x, %g) {k: dp} : f32[16, 32] |sum dp
  %sum = shardc.reduce_scatter(%dw, op="sum", axes=["dp"], atoms=[16, 32], pos=0, shape=[8, 32]) : f32[16@dp, 32]
  return grad "w" = %sum
}
"""
    assert found(text) == []


def test_a_product_is_gathered_for_or_scattered() -> None:
    """Not both, where it is between a gather over one axis and a reduction over another."""
    text = """graph @step mesh(a=2, b=2) {
  %x = input "x" : f32[8@a, 16@b]
  %w = param "w" : f32[16@b, 32]
  %x.all = shardc.all_gather(%x, axes=["a"], atoms=[4, 8], pos=0, size=8, shape=[8, 8]) : f32[8, 16@b]
  %y = mm(%x.all, %w) {k: b} : f32[8, 32] |sum b
  %sum = shardc.reduce_scatter(%y, op="sum", axes=["b"], atoms=[8, 32], pos=0, shape=[4, 32]) : f32[8@b, 32]
  %z = exp(%sum) : f32[8@b, 32]
  return output "z" = %z
}
"""
    assert found(text) == ["gather_linear"]


def test_weights_that_are_made_late_are_made_before() -> None:
    """A cast or a gather of a weight moves before the call; a matrix that is made of a product does not."""
    late = """  %u.w = _to_copy(%u, dtype=f32) {n: tp} : f32[32@tp, 16]
  %g = shardc.linear(%x.all_gather, %u.w) {n: tp} : f32[4, 8, 32@tp]
  return output "g" = %g, """
    text = ONE.replace("  return ", late).replace("fwd:", "fwd:", 1)
    text = text.replace('  %r = input "r" : f32[4, 8, 16]', '  %u = param "u" : f64[32@tp, 16]')
    (call,) = Decompose(True).run(parse(text)).calls_of(GATHER_LINEAR)
    assert [info(w).name for w in given(call)["ws"]] == ["w", "u.w"]
    (call,) = Decompose(True).run(parse(text.replace("_to_copy(%u, dtype=f32)", "exp(%w)"))).calls_of(GATHER_LINEAR)
    assert [info(w).name for w in given(call)["ws"]] == ["w"]


# ---------------------------------------------------------------------- what a file may not say
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("turned=[True]", "turned=[False]"),
        ("turned=[True]", "turned=[True, True]"),
        ("pos=1, size=8", "pos=0, size=8"),
        ('turned=True, op="sum"', 'turned=True, op="max"'),
        ("%h, _ = ", "_, %h = "),
    ],
)
def test_false_calls_are_refused(old: str, new: str) -> None:
    graph = Decompose(True).run(parse(ONE))
    text = print_graph(graph)
    assert old in text
    assert _faults(text.replace(old, new))
    assert _faults(text) == []


def _faults(text: str) -> list[str]:
    try:
        graph = parse(text)
    except ShardcError as refused:
        return [str(refused)]
    shown = [(call, [v and type_of(v) for v in results(call)]) for call in graph.calls()]
    return [fault for call, types in shown for fault in placement_faults(call, types, graph.mesh)]
