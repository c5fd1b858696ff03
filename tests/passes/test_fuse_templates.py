"""Hand-tuned templates in graphs: found where they are due and nowhere else, and what they are found for is right."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardc
from benchmarks.fusion_census import MODELS
from kernels_triton import ops
from kernels_triton.ir import reference
from kernels_triton.ir.kernel import Kernel
from kernels_triton.ir.text import parse
from kernels_triton.match.match import match_template
from kernels_triton.match.op import KERNELS, OPS, kernel_of
from kernels_triton.match.table import NAMES
from shardc.cli.kernel_sources import emit_triton
from shardc.ir.diagnostic import ShardcError
from shardc.ir.graph import Graph, op_name
from shardc.ir.parse import parse as parse_graph
from shardc.ir.plain import graph_from_plain, graph_to_plain
from shardc.ir.text import print_graph
from shardc.passes.fusion.analysis.traffic import traffic
from shardc.passes.fusion.fuse import fuse
from shardc.plan.fuse import Fusing
from tests import before_kernels
from tests.models.zoo import PLANS, make
from tests.passes.template_twins import operands, results
from tests.replanned import replanned

SIZES = {"width": 64, "heads": 4, "inner": 160, "batch": 2, "seq": 24, "vocab": 96}


def counted(graph: Graph) -> Counter[str]:
    names = Counter(op_name(node.target).removeprefix("shardc.") for node in graph.calls() if node.target in KERNELS)
    del names["fused"]
    return names


@cache
def body_of(name: str, precision: str) -> Graph:
    """Two layers, forward and backward, before fusion."""
    with torch.device("meta"):
        model, batch = MODELS[name](SIZES, 2)
    return before_kernels.compiled(model, batch, {"precision": precision} if precision else {}, mesh="dp=1")[1]


LOSS = {"cross_entropy": 1}
# Norms whose gradient is the sum of three or more (of q, k, v, a residual) are kernels of the generator's where there
# is memory for one: a sum beforehand and a template would move more. So are losses with a decoder's bias.
GPT = Counter({"add_layer_norm": 4, "layer_norm_backward": 5, **LOSS})
SUMMED = Counter({"add_layer_norm": 4, "layer_norm_backward": 3})
LLAMA = T5 = Counter(LOSS)
EXPECTED: dict[str, dict[str, Counter[str]]] = {  # by precision
    "gpt2": {"": GPT, "bf16": GPT},
    "llama": {"": LLAMA, "bf16": LLAMA},
    "bert": {"": GPT - Counter(LOSS), "bf16": SUMMED},
    "t5": {"": T5, "bf16": T5},
    "vit": {"": SUMMED, "bf16": SUMMED},
}


@pytest.mark.parametrize("precision", ["", "bf16"])
@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.sampled(10)
def test_each_models_templates(name: str, precision: str) -> None:
    body = body_of(name, precision)
    plain, ours = fuse(body, templates=()), fuse(body)
    assert not counted(plain)
    assert counted(ours) == EXPECTED[name][precision]
    assert traffic(ours) == traffic(plain)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", EXPECTED)
def test_a_template_computes_what_its_kernel_says(name: str) -> None:
    """In float64, against the templates' own references: they agree with the kernel's text to the last digits."""
    torch.manual_seed(0)
    kernels = {k for node in fuse(body_of(name, "bf16")).calls() if (k := kernel_of(node.target, node.args))}
    for kernel in sorted(kernels, key=lambda one: one.name):
        match = match_template(kernel)
        if match is not None:
            agree(kernel)


def agree(kernel: Kernel) -> None:
    match = match_template(kernel)
    assert match is not None
    inputs = [
        torch.randn(given.shape, dtype=torch.float64)
        if given.dtype.is_floating_point
        else torch.randint(0, kernel.cols, given.shape)
        for given in kernel.inputs
    ]
    if isinstance(at := match.binding.get("rstd"), int):
        inputs[at] = inputs[at].abs() + 0.5
    expected = results(match, *operands(kernel, match, inputs))
    for name, y in zip(match.results, reference.run(kernel, inputs), strict=True):
        want = expected[name].reshape(y.shape)
        assert torch.allclose(y, want, rtol=1e-9, atol=1e-11), (kernel.name, name)


class Mlp(nn.Module):
    """Norms without a weight, GeLUs, gates."""

    def __init__(self, act: str) -> None:
        super().__init__()
        self.act = act
        self.norm, self.up, self.gate = nn.LayerNorm(24, elementwise_affine=False), nn.Linear(24, 40), nn.Linear(24, 40)
        self.down = nn.Linear(40, 24, bias=False)
        self.rms, self.head = nn.RMSNorm(24), nn.Linear(24, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        gate = self.gate(h)
        if self.act == "silu":
            acted = functional.silu(gate)
        else:
            acted = functional.gelu(gate, approximate="tanh" if self.act == "gelu_tanh" else "none")
        return self.head(self.rms(x + self.down(acted * self.up(h)))).square().mean()


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh"])
def test_norms_without_weights_and_gates(act: str) -> None:
    torch.manual_seed(0)
    program = shardc.compile(Mlp(act), torch.randn(6, 24), mesh="dp=1", plan={"fuse": True})
    names = counted(program.body)
    assert names == {"layer_norm": 1}
    for node in program.body.calls():
        if node.target in OPS.values():
            agree(parse(str(node.args[1])))
    assert program.verify().ok


NEAR = {
    "layer_norm": (
        (
            "%2=rsum(%0); %3=div(%2, 16.0); %4=sub(%0, %3); %5=square(%4); %6=rsum(%5); %7=div(%6, 16.0); "
            "%8=add(%7, 1e-05); %9=rsqrt(%8); %10=mul(%4, %9); %11=mul(%10, %1)"
        ),
        "f32[8,16]=%11, f32[8]=%3@0:1,0",
        "f32[8,16], f32[16]@0:0,1",
    ),
    "cross_entropy": (
        (
            "%3=rmax(%0); %4=sub(%0, %3); %5=exp(%4); %6=rsum(%5); %7=iota{1}(); %8=eq(%7, %1); %9=where(%8, %4, 0.0); "
            "%10=rsum(%9); %11=div(1.0, %2); %12=ne(%1, -100); %13=where(%12, %11, 0.0); %14=div(%13, %6); "
            "%15=mul(%5, %14); %16=where(%8, %13, 0.0); %17=sub(%15, %16)"
        ),
        "f32[8,1]=%6@0:1,0, f32[8,1]=%10@0:1,0, f32[8,16]=%17",
        "f32[8,16], i64[8]@0:1,0, f32[]@0:0,0",
    ),
}


def near(name: str, old: str = "", new: str = "") -> str | None:
    """The template that is found once a kernel's text was changed."""
    steps, outputs, inputs = NEAR[name]
    line = f"k[8|16]({inputs}){{{steps}}}->{outputs}"
    assert old in line
    match = match_template(parse(line.replace(old, new)))
    return None if match is None else match.template.name


def test_near_misses() -> None:
    assert near("layer_norm") == "layer_norm"
    assert near("layer_norm", "div(%2, 16.0)", "div(%2, 15.0)") is None  # another mean
    assert near("layer_norm", "div(%6, 16.0)", "div(%6, 15.0)") is None  # the unbiased variance
    assert near("layer_norm", "add(%7, 1e-05)", "maximum(%7, 1e-05)") is None
    assert near("layer_norm", "mul(%10, %1)", "mul(%4, %1)") is None  # not divided
    assert near("layer_norm", "=%3@0", "=%7@0") is None  # a variance, which the template does not give
    assert near("layer_norm", "rsum(%5)", "rsum(%0)") is None
    assert near("layer_norm", "f32[16]@0:0,1", "f32[8,16]") is None  # a weight a row
    assert near("layer_norm", "f32[8,16], f32[16]", "f64[8,16], f32[16]") is None
    assert near("layer_norm", "f32[8,16], f32[16]@0:0,1", "f32[16,8]@0:1,8, f32[16]@0:0,1") is None  # columns apart
    assert near("cross_entropy") == "cross_entropy"
    assert near("cross_entropy", "iota{1}", "iota{0}") is None
    assert near("cross_entropy", "ne(%1", "eq(%1") is None
    assert near("cross_entropy", "where(%8, %13, 0.0)", "where(%8, %13, 1.0)") is None
    assert near("cross_entropy", "where(%8, %13, 0.0)", "where(%8, %11, 0.0)") is None  # ignored rows have a gradient
    assert near("cross_entropy", "=%10@0", "=%3@0") is None  # the maximum


def test_an_epsilon_that_is_a_tensor_is_none() -> None:
    assert near("layer_norm", "add(%7, 1e-05)", "add(%7, %3)") is None
    tensor = "f32[8,16], f32[16]@0:0,1, f32[]@0:0,0"
    steps, outputs, _ = NEAR["layer_norm"]
    for at in range(11, 1, -1):
        steps, outputs = steps.replace(f"%{at}", f"%{at + 1}"), outputs.replace(f"%{at}", f"%{at + 1}")
    kernel = f"k[8|16]({tensor}){{{steps}}}->{outputs}"
    assert match_template(parse(kernel)) is not None
    assert match_template(parse(kernel.replace("add(%8, 1e-05)", "add(%8, %2)"))) is None


def test_a_part_that_is_there_in_one_result_is_there_in_all() -> None:
    """dbias sums dy alone, dx is of dy + more: two formulas, and no template."""
    steps = (
        "%6=add(%0, %5); %7=sub(%1, %2); %8=mul(%7, %3); %9=mul(%6, %4); %10=rsum(%9); %11=div(%10, 16.0); "
        "%12=sub(%9, %11); %13=mul(%9, %8); %14=rsum(%13); %15=div(%14, 16.0); %16=mul(%8, %15); %17=sub(%12, %16); "
        "%18=mul(%17, %3); %19=csum({summed})"
    )
    inputs = "f32[8,16], f32[8,16], f32[8]@0:1,0, f32[8]@0:1,0, f32[16]@0:0,1, f32[8,16]"
    for order in ("f32[8,16]=%18, f32[16]=%19@0:0,1", "f32[16]=%19@0:0,1, f32[8,16]=%18"):
        both = parse(f"k[8|16]({inputs}){{{steps.format(summed='%6')}}}->{order}")
        assert match_template(both) is not None
        agree(both)
        assert match_template(parse(f"k[8|16]({inputs}){{{steps.format(summed='%0')}}}->{order}")) is None


# The kernels of norms that are templates or have an `rsqrt`, of two layers with two norms each, and the last norm: in
# forward and backward, and what runs again. GPT-2's first norm is in a kernel with the embeddings' sum.
NORMS = {"gpt2": Counter(fused=1, add_layer_norm=4, layer_norm_backward=4), "llama": Counter(fused=10)}
AGAIN = {"gpt2": Counter(layer_norm=4), "llama": Counter(fused=4)}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("plan", [{}, {"precision": "bf16"}, {"recompute": "full"}], ids=str)
def test_layouts(name: str, plan: dict[str, Any]) -> None:
    """Data, tensor and sequence parallelism, and ZeRO: layer norms are templates and RMSNorms generated kernels, as on
    one device, and so are those that run again; and the single device's values."""
    model, batch, loss = make(name)
    whole = shardc.Plan.load(PLANS / f"{name}.yaml").merge(shardc.Plan.of(fuse=True, **plan))
    program = shardc.compile(model, batch, mesh="dp=2,tp=2", plan=whole, loss=loss)
    body = program.body
    norms = NORMS[name] + AGAIN[name] if "recompute" in plan else NORMS[name]
    kernels = ((call, kernel_of(call.target, call.args)) for call in body.calls())
    assert norms == Counter(
        op_name(call.target).removeprefix("shardc.")
        for call, kernel in kernels
        if kernel is not None and (call.target in OPS.values() or any(step.op == "rsqrt" for step in kernel.steps))
    )
    assert program.verify().ok, str(program.verify())
    again = parse_graph(print_graph(body))
    assert print_graph(again, comments=False) == print_graph(body, comments=False)
    assert graph_to_plain(graph_from_plain(graph_to_plain(body))) == graph_to_plain(body)


@pytest.mark.long  # `tests/passes/test_fuse.py` fuses those of a pipeline
def test_a_pipelines_parts() -> None:
    model, batch, _ = make("gpt2")
    plan = {"mesh": "pp=2", "pipeline": {"axis": "pp", "microbatches": 2}, "fuse": {"templates": ["add_layer_norm"]}}
    program = shardc.compile(model, batch, plan=plan, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))
    assert program.pipelined is not None
    stages = [counted(stage.forward) + counted(stage.backward) for stage in program.pipelined.stages]
    assert all(set(names) == {"add_layer_norm"} for names in stages)
    assert program.verify().ok


def test_a_plan_chooses() -> None:
    model, batch, _ = make("gpt2")
    plain = shardc.compile(model, batch, mesh="dp=1", plan={})

    def names(fuse: Any) -> set[str]:
        return set(counted(replanned(plain, fuse=fuse).body))

    every = {"add_layer_norm", "layer_norm_backward", "cross_entropy"}
    assert names(True) == every
    assert names({"templates": ["layer_norm", "cross_entropy"]}) == {"cross_entropy"}
    assert names({"templates": "cross_entropy"}) == {"cross_entropy"}
    assert not names({"templates": []})
    assert names({"exclude": ["shardc.cross_entropy", "add_layer_norm"]}) == {"layer_norm_backward"}


@pytest.mark.parametrize(
    ("fuse", "told", "hint"),
    [
        ({"templates": ["layernorm"]}, "no template 'layernorm'", "known are add_layer_norm"),
        ({"templates": "None"}, "no template 'None'", "templates: [] for none"),
        ({"templates": [3]}, "no template '3'", "known are add_layer_norm"),
        ({"templates": {"layer_norm": 1}}, "should be a list of names, not {'layer_norm': 1}", "write templates: ["),
        ({"templates": None}, "should be a list of names, not None", "templates: [] for none"),
        ({"enabled": "maybe"}, "'fuse.enabled' should be true, false or auto, not 'maybe'", "write enabled: true"),
        ({"enabled": None}, "'fuse.enabled' should be true, false or auto, not None", "write enabled: true"),
        *(
            ({"templates": [name]}, f"no template '{name}'", f"kernels_triton.ops.{name} is a plain function")
            for name in ops.__all__
            if name not in NAMES
        ),
    ],
)
def test_a_plan_that_makes_no_sense(fuse: Any, told: str, hint: str) -> None:
    with pytest.raises(ShardcError, match="SC208") as refused:
        shardc.Plan.of(fuse=fuse)
    assert told in str(refused.value)
    assert hint in str(refused.value.diagnostics[0].hint)


def test_a_plan_with_templates_is_written_back() -> None:
    plan = shardc.Plan.of(fuse={"templates": ["layer_norm"]})
    assert shardc.Plan.parse(plan.dump()).fuse == plan.fuse
    assert plan.fuse.templates == ("layer_norm",)
    assert shardc.Plan.of(fuse={"templates": list(NAMES)}).fuse.dumped() is True


def test_a_kernel_that_is_no_template_is_refused_as_one() -> None:
    x = torch.ones(8, 16)
    with pytest.raises(ShardcError, match=r"SC531.*layer_norm"):
        torch.ops.shardc.layer_norm([x], "k[8|16](f32[8,16]){%1=tanh(%0)}->f32[8,16]=%1")


def test_the_sources_of_templates_are_printed() -> None:
    text = emit_triton([fuse(body_of("gpt2", "bf16"))], Fusing(enabled=True))
    assert "# norm.norm_forward: grid" in text
    assert "def norm_forward(" in text
    assert "# norm.norm_backward: grid" in text
    assert "def fused_add_layer_norm(" in text, "and those of the generator"
