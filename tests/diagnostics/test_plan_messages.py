"""Every way to get a plan or a placement wrong, and what we say about it, word for word."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from shardc.compiler.binding import bind_precision
from shardc.frontend.sample_call import Call
from shardc.frontend.token_weights import bind_tokens
from shardc.ir.diagnostic import ShardcError
from shardc.ir.mesh import Mesh
from shardc.ir.placement import P, Placement
from shardc.plan.schema import Plan, match

NAMES = [f"transformer.h.{i}.{name}.weight" for i in range(2) for name in ("attn.c_attn", "mlp.c_fc", "mlp.c_proj")]
TIED = 'params:\n  wte.weight: "tp"\n  lm_head.weight: "-, tp"'
ALIASES = {"wte.weight": ("lm_head.weight",)}
MESH = Mesh(dp=2, tp=2)


def plan(text: str) -> Plan:
    return Plan.parse(text, "gpt2.yaml")


def params(text: str) -> None:
    """Match the plan's parameters and check each against the mesh, as the compiler does."""
    for name, annotation in match(plan(text).annotations("params"), NAMES, "params").items():
        annotation.check(MESH, 2, name)


def inputs(text: str) -> None:
    match(plan(text).annotations("inputs"), ["input_ids", "labels"], "inputs")


class Model(nn.Module):
    def forward(self, input_ids: Tensor, labels: Tensor, positions: Tensor, classes: Tensor, scale: Tensor) -> None:
        pass


def tokens(text: str) -> None:
    """Bind the plan's loss to a batch of 4 sequences of 8."""
    batch = dict.fromkeys(("input_ids", "labels"), torch.zeros(4, 8, dtype=torch.int64))
    batch |= {"positions": torch.zeros(1, 8), "classes": torch.zeros(4), "scale": torch.tensor(1.0)}
    bind_tokens(plan(text).loss, Call(Model(), batch))


CASES: dict[str, Callable[[], object]] = {
    "unknown_axis": lambda: params('params:\n  "**.c_fc.weight": "-, tpp"'),
    "no_match_typo": lambda: params('params:\n  "**.attn.c_atn.weight": "-, tp"'),
    "no_match_prefix": lambda: params('params:\n  h.*.mlp.c_fc.weight: "-, tp"'),
    "no_match_input": lambda: inputs('inputs:\n  input_id: "dp"'),
    "axis_twice": lambda: plan('params:\n  "**.c_fc.weight": "tp, tp"'),
    "axis_twice_python": lambda: P("dp", ("tp", "dp")),
    "too_many_dims": lambda: params('params:\n  "**.c_fc.weight": "-, -, tp"'),
    "conflict": lambda: params('params:\n  "**.h.*.mlp.c_fc.weight": "-, tp"\n  "**.*.0.mlp.c_fc.weight": "dp"'),
    "conflict_tied": lambda: match(plan(TIED).annotations("params"), ["wte.weight"], "params", ALIASES),
    "key_typo": lambda: plan('mesh: tp=2\nparms:\n  "**.c_fc.weight": "-, tp"'),
    "key_twice": lambda: plan('params:\n  a: "tp"\n  a: "dp"'),
    "value_kind": lambda: plan("strict: maybe"),
    "not_a_map": lambda: plan("params: tp"),
    "not_yaml": lambda: plan('params:\n  "**.c_fc.weight: "-, tp"\n'),
    "no_file": lambda: Plan.load("no/such/plan.yaml"),
    "mesh": lambda: plan("mesh: dp=2,tp"),
    "mesh_size": lambda: Mesh(tp=0),
    "budget_axis": lambda: plan("mesh: tp=2\nbudget:\n  tq: 2MiB"),
    "budget_size": lambda: plan("budget:\n  tp: much"),
    "recompute_mode": lambda: plan("recompute: selectve"),
    "recompute_value": lambda: plan("recompute: 7"),
    "recompute_no_mode": lambda: plan("recompute: {collectives: true}"),
    "recompute_two_modes": lambda: plan("recompute: {mode: full, budget: 1GiB}"),
    "recompute_size": lambda: plan("recompute: {budget: little}"),
    "hardware_name": lambda: plan("mesh: tp=2\nhardware: h20"),
    "hardware_quantity": lambda: plan("hardware:\n  link_bandwidth: 4e11\n  memory_bytes_per_second: 4.8"),
    "fuse_value": lambda: plan("fuse: kernels"),
    "fuse_key": lambda: plan("fuse:\n  enabled: true\n  exlude: [tanh]"),
    "fuse_template": lambda: plan("fuse:\n  templates: [layer_norm, layernorm]"),
    "recompute_key": lambda: plan("recompute:\n  mode: full\n  colectives: true"),
    "precision_dtype": lambda: plan("precision: bf61"),
    "precision_key": lambda: plan("precision: {compute: bf16, redcue: fp32}"),
    "precision_no_compute": lambda: plan("precision: {master: fp32}"),
    "precision_reduce": lambda: plan("precision: {compute: bf16, reduce: fp16}"),
    "precision_master": lambda: plan("precision: {compute: fp16, master: bf16}"),
    "precision_scale_of_bf16": lambda: plan("precision: {compute: bf16, loss_scale: 4}"),
    "precision_scale": lambda: plan("precision: {compute: fp16, loss_scale: 1000}"),
    "nonfinite": lambda: plan("nonfinite: stop"),
    "nonfinite_fp16": lambda: bind_precision(plan("precision: fp16\nnonfinite: raise")),
    "loss_word": lambda: plan("loss: tokens"),
    "loss_key": lambda: plan("mesh: dp=2\nloss: {tokens: labels, ingore: 0}"),
    "loss_shift": lambda: plan("loss: {tokens: labels, shift: -1}"),
    "loss_no_input": lambda: tokens("loss: {tokens: label}"),
    "loss_scalar": lambda: tokens("loss: {tokens: scale}"),
    "loss_not_split": lambda: tokens("loss: {tokens: positions}"),
    "loss_nothing_left": lambda: tokens("loss: {tokens: labels, shift: 8}"),
    "loss_shift_of_samples": lambda: tokens("loss: {tokens: classes, shift: 1}"),
    "placement_text": lambda: plan('params:\n  "**.c_fc.weight": "-, 3**tp"'),
    "placement_text_end": lambda: Placement.parse("-, "),
    "placement_value": lambda: P(None, 3),
    "several_at_once": lambda: plan('parms: {}\nparams:\n  a: "tp,, -"\n  b: "tp, tp"\nmesh: 3'),
}


@pytest.mark.parametrize("case", CASES)
def test_message(case: str, golden: Callable[[str, str], None]) -> None:
    with pytest.raises(ShardcError) as raised:
        CASES[case]()
    golden(f"plan/{case}.txt", str(raised.value))
