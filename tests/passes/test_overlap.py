"""Products that need no rows run while rows are under way: shared experts, forward and backward, and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import shardc
from shardc.api import Program
from shardc.compiler import pass_pipeline
from shardc.cost.memory import memory
from shardc.ir.call_slots import slotted_calls
from shardc.ir.graph import Graph, info, op_name, type_of
from shardc.ir.ops.exchange import COMBINE_ROWS, DISPATCH_ROWS, ROW_MOVES
from shardc.ir.overlap_schedule import schedule_of
from shardc.passes.communication.overlap import TRANSFERS, Overlap
from shardc.passes.verify import same_calls
from shardc.runtime.oracle.simulate import simulate

T = pytest.importorskip("transformers", minversion="5.24")
SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 24, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "max_position_embeddings": 32,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = SMALL | {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_shared_experts": 2,
    "first_k_dense_replace": 0, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4,
    "v_head_dim": 4, "topk_group": 1,
}  # fmt: skip
QWEN2: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 24,
}  # fmt: skip
LLAMA4: dict[str, Any] = {
    "intermediate_size_mlp": 24, "num_local_experts": 4, "num_experts_per_tok": 1, "head_dim": 4,
}  # fmt: skip
MODELS: dict[str, Callable[[], nn.Module]] = {
    "qwen2": lambda: T.Qwen2MoeForCausalLM(T.Qwen2MoeConfig(**SMALL, **QWEN2)),
    "deepseek v2": lambda: T.DeepseekV2ForCausalLM(T.DeepseekV2Config(**DEEPSEEK, n_group=1)),
    "deepseek v3": lambda: T.DeepseekV3ForCausalLM(T.DeepseekV3Config(**DEEPSEEK, n_group=2)),
    "llama4": lambda: T.Llama4ForCausalLM(T.Llama4TextConfig(**SMALL, **LLAMA4)),
}
PLANS: dict[str, dict[str, Any]] = {
    "exact": {"experts": "all_to_all"},
    "capacity": {"experts": {"dispatch": "all_to_all", "capacity": 4.0}},
    "fuse": {"experts": "all_to_all", "fuse": True},
    "recompute": {"experts": "all_to_all", "recompute": "full", "accumulate": 2},
}


@cache
def program(name: str, plan: str) -> Program:
    torch.manual_seed(0)
    model = MODELS[name]()
    for p in model.parameters():
        if p.ndim == 3:
            nn.init.normal_(p, std=0.1)  # some are of memory that nobody wrote
    tokens = torch.randint(3, 64, (8, 8))
    given = {"mesh": "ep=2", "inputs": {"*": "ep"}, "params": {"**.experts.*": "ep"}, **PLANS[plan]}
    return shardc.compile(model, {"input_ids": tokens, "labels": tokens}, plan=given)


def without(monkeypatch: pytest.MonkeyPatch, name: str, plan: str) -> Program:
    monkeypatch.setattr(Overlap, "run", lambda self, graph: graph)
    try:
        return program.__wrapped__(name, plan)
    finally:
        monkeypatch.undo()


def meanwhile(graph: Graph, exchanges: Sequence[Any] = ROW_MOVES) -> dict[fx.Node, list[fx.Node]]:
    """For each exchange of rows, or such calls, what a rank runs from where it begins to where it waits."""
    listed = slotted_calls(graph)
    run: dict[fx.Node, list[fx.Node]] = {}
    under_way: list[fx.Node] = []
    for action in schedule_of(listed):
        call = listed.calls[action.at].node
        if action.kind == "begin" and call.target in exchanges:
            under_way.append(call)
            run[call] = []
        elif action.kind == "wait" and call in under_way:
            under_way.remove(call)
        elif action.kind == "run":
            for exchange in under_way:
                run[exchange].append(call)
    return run


def products(calls: list[fx.Node]) -> set[str]:
    return {
        f"{info(call).phase} {info(call).fqn.rpartition('.')[2]} {op_name(call.target).rpartition('.')[2]}"
        for call in calls
        if "shared_expert" in info(call).fqn and "linear" in op_name(call.target)
    }


@pytest.mark.sampled(4)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_shared_experts_run_while_rows_are_under_way(name: str, plan: str) -> None:
    compiled = program(name, plan)
    run = meanwhile(compiled.body)
    assert {call.target for call in run} == {DISPATCH_ROWS, COMBINE_ROWS}
    covered = {phase: set[str]() for phase in ("fwd", "bwd")}
    for exchange, calls in run.items():
        covered[info(exchange).phase] |= products(calls)
    names = ("gate_proj", "up_proj", "down_proj")
    assert covered["fwd"] >= {f"fwd {n} linear" for n in names}
    assert covered["bwd"] >= {f"bwd {n} linear_dgrad" for n in names}
    # The gradient of the rows comes back while those of the experts' weights are computed.
    (back,) = [c for c in run if c.target is COMBINE_ROWS and info(c).phase == "bwd"]
    assert [op_name(call.target) for call in run[back]].count("shardc.expert_wgrad") == 2


@pytest.mark.parametrize("name", ["qwen2", "deepseek v3"])
def test_the_printed_program_has_them_in_between(name: str) -> None:
    """In the order of the text: the exchange, the shared expert's products, the routed experts'."""
    lines = program(name, "exact").text().splitlines()
    at = {
        what: next(i for i, line in enumerate(lines) if what in line and " = " in line)
        for what in ("= shardc.dispatch_rows(", "shared_expert", "= shardc.expert_mm(")
    }
    last = max(
        i for i, line in enumerate(lines)
        if "shared_expert" in line.partition(" = ")[0] and " = shardc.linear(" in line
    )  # fmt: skip
    assert at["= shardc.dispatch_rows("] < last < at["= shardc.expert_mm("]


@pytest.mark.parametrize("name", ["qwen2", "deepseek v2"])
@pytest.mark.parametrize("plan", ["exact", "capacity", "recompute"])
def test_results_are_the_same_to_the_bit(name: str, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    moved, unmoved = program(name, plan), without(monkeypatch, name, plan)
    order = [[info(call).name for call in p.body.calls()] for p in (moved, unmoved)]
    assert order[0] != order[1]
    assert sorted(order[0]) == sorted(order[1])
    tokens = torch.randint(3, 64, (8, 8), generator=torch.Generator().manual_seed(3))
    results = [simulate(p.body, p.inputs({"input_ids": tokens, "labels": tokens})) for p in (moved, unmoved)]
    for one, other in zip(*(flat(result) for result in results), strict=True):
        assert torch.equal(one, other)


def flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    return [leaf for item in items for leaf in flat(item)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("plan", PLANS)
def test_programs_equal_the_single_device(plan: str) -> None:
    report = program("deepseek v3", plan).verify()
    assert report.ok, str(report)


def test_what_is_under_way_is_counted() -> None:
    """An exchange of exact counts holds all that may come, and a copy of what it sends back."""
    graph = program("deepseek v2", "exact").body
    (sent,) = [c for c in graph.calls() if c.target is DISPATCH_ROWS and info(c).phase == "fwd"]
    (back,) = [c for c in graph.calls() if c.target is COMBINE_ROWS and info(c).phase == "bwd"]
    report = memory(graph, overlap=True)
    held = type_of(sent).local_bytes(graph.mesh), type_of(back.all_input_nodes[0]).local_bytes(graph.mesh)
    assert report.row("in flight").most >= max(held[0], held[1] + type_of(back).local_bytes(graph.mesh))


def test_a_graph_without_rows_stays_as_it_is() -> None:
    compiled = shardc.compile(nn.Linear(4, 4), {"input": torch.ones(4, 4)}, mesh="dp=2", loss=lambda y, _: y.sum())
    assert Overlap().run(compiled.body) is compiled.body


def test_a_call_that_is_lost_or_changed_is_noticed() -> None:
    graph = program("qwen2", "exact").body
    changed = graph.copy()
    assert same_calls(graph, changed) == []
    exchanges = [call for call in changed.calls() if call.target in ROW_MOVES]
    exchanges[0].target = COMBINE_ROWS
    assert same_calls(graph, changed)


def test_the_pass_runs_before_kernels_are_made() -> None:
    options = pass_pipeline.Options()
    names = [each.name for each in (*pass_pipeline.call_passes(options), *pass_pipeline.kernel_passes(options))]
    assert names == [
        "join_squares",
        "align",
        "overlap",
        "late_gradients",
        "sum_products",
        "decompose",
        "bucket",
        "prefetch",
        "bias_products",
        "pick_columns",
        "cheaper_calls",
        "merge_updates",
        "fuse",
        "join_sums",
        "offload",
        "offload_states",
    ]


# By strategy, of a layer at cp = 4: how many transfers a product or a part of attention covers.
COVERED = {
    "ring": {"fwd next_keys": 6, "bwd next_keys": 12},
    "all_to_all": {"fwd all_to_all": 2, "bwd all_to_all": 2},
    "all_gather": {"fwd gather_blocks": 2, "bwd gather_blocks": 2, "bwd reduce_scatter": 1},
}


@pytest.mark.parametrize("strategy", COVERED)
def test_products_run_while_attention_exchanges(strategy: str) -> None:
    """Queries, keys and values on their way to attention, and their gradients back, have a product to cover them."""
    config = T.LlamaConfig(**{**SMALL, "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 32})
    model = T.LlamaForCausalLM(config)
    tokens = torch.randint(3, 64, (2, 32))
    batch = {"input_ids": tokens, "labels": tokens}
    plan = {"inputs": dict.fromkeys(batch, "-, cp"), "context": {"axis": "cp", "attention": strategy}}
    compiled = shardc.compile(model, batch, mesh="cp=4", plan=plan)
    found: dict[str, int] = {}
    for sent, calls in meanwhile(compiled.body, TRANSFERS).items():
        if any("linear" in op_name(call.target) or "sdpa" in op_name(call.target) for call in calls):
            kind = f"{info(sent).phase} {op_name(sent.target).removeprefix('shardc.')}"
            found[kind] = found.get(kind, 0) + 1
    assert found == COVERED[strategy]
    report = compiled.verify()
    assert report.ok, str(report)


def test_layers_that_are_computed_again_among_the_calls_of_others() -> None:
    """What one layer's placing moved is where it is for the next one."""
    config = T.LlamaConfig(**{**SMALL, "num_hidden_layers": 2, "num_key_value_heads": 2}, num_labels=3)
    tokens = torch.randint(3, 64, (4, 16))
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": torch.tensor([0, 1, 2, 1])}
    params = {f"**.{name}_proj.weight": "tp, -" for name in "qkv"}
    params |= {"**.o_proj.weight": "-, tp", "**.down_proj.weight": "-, tp"}
    plan = {
        "mesh": "cp=2, tp=2",
        "inputs": dict.fromkeys(("input_ids", "attention_mask"), "-, cp"),
        "params": params,
        "activations": {"**.o_proj": "-, cp.tp, -", "**.down_proj": "-, cp.tp, -"},
        "recompute": {"budget": 4000},
    }
    report = shardc.compile(T.LlamaForSequenceClassification(config), batch, plan=plan).verify()
    assert report.ok, str(report)
