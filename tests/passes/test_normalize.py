"""normalize changes how a graph is spelled, never what it computes.

Longer than 400 lines: a few lines for each rewriting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from examples.cnn import cnn
from examples.gpt2 import gpt2
from examples.llama import llama
from shardc.frontend.ingest import ingest
from shardc.frontend.trace import trace
from shardc.ir.graph import KEY, Graph, Port, ValueInfo, info, op_name, operands, set_info, type_of, update
from shardc.ir.mesh import Mesh
from shardc.ir.ops.kernels import KERNELS
from shardc.ir.types import TensorType
from shardc.passes.normalize.normalize import Normalize, only_core_ops

aten = torch.ops.aten


# ---------------------------------------------------------------------- building and running graphs
class Run(fx.Interpreter):
    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_function(KERNELS.get(target, target), args, kwargs)


class RunWide(Run):
    """Casts to float32, which Hugging Face's code is full of, go to float64."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        wide = {k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()}
        return super().call_function(target, args, wide)


def run(graph: fx.Graph, inputs: tuple[Tensor, ...], runner: type[Run] = Run) -> tuple[Tensor | None, ...]:
    return runner(fx.GraphModule({}, graph)).run(*inputs)


def traced(function: Callable[..., Any], *inputs: Tensor) -> Graph:
    """The ATen graph of a function of tensors, types unplaced."""
    source = make_fx(function)(*inputs).graph
    for node in source.nodes:
        value = node.meta.get("val")
        if node.op == "output":
            out = node.args[0]
            node.args = (tuple(out) if isinstance(out, (list, tuple)) else (out,),)
        elif isinstance(value, Tensor):
            set_info(node, ValueInfo(node.name, TensorType.of(value)))
        elif value is not None:
            types = tuple(TensorType.of(v) if isinstance(v, Tensor) else None for v in value)
            set_info(node, ValueInfo(node.name, None, results=types))
    for node in reversed([n for n in source.nodes if KEY not in n.meta and n.op == "call_function"]):
        assert not node.users  # the result that an output_mask leaves out
        source.erase_node(node)
    return Graph(source, Mesh(), [Port("input", f"x{i}") for i in range(len(inputs))], [])


def copied(graph: Graph) -> fx.Graph:
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph.fx, {}))
    return copy


def normalized(graph: Graph) -> Graph:
    Normalize().run(graph)
    graph.fx.lint()
    assert only_core_ops(graph) == []
    return graph


def agree(function: Callable[..., Any], *inputs: Tensor, tolerance: float = 1e-13) -> Graph:
    """The normalised graph of the function, having seen that it computes the same and that its types are true."""
    graph = traced(function, *inputs)
    before = run(copied(graph), inputs)
    normalized(graph)
    after = run(graph.fx, inputs)
    assert len(before) == len(after)
    for value, a, b in zip(graph.output_values, before, after, strict=True):
        if a is None:
            assert b is None
            continue
        assert b is not None
        assert a.dtype == b.dtype
        assert a.shape == b.shape == type_of(value).shape
        torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance, equal_nan=True)
    return graph


def with_gradients(function: Callable[..., Tensor], count: int) -> Callable[..., Any]:
    """The function's value, and the gradient of (a fixed mix of) it in its first `count` arguments."""

    def joint(*inputs: Tensor) -> Any:
        leaves = [x.detach().requires_grad_() for x in inputs[:count]]
        out = function(*leaves, *inputs[count:])
        weights = torch.linspace(-1.0, 2.0, out.numel(), dtype=out.dtype).reshape(out.shape)
        return (out, *torch.autograd.grad((out * weights).sum(), leaves))

    return joint


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def ops(graph: Graph) -> Counter[str]:
    return Counter(op_name(node.target) for node in graph.calls())


# ---------------------------------------------------------------------- one op at a time
CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "mean": (lambda x: (x.mean(), x.mean(1), x.mean((0, -1), keepdim=True)), (normal(4, 3, 5),)),
    "mean of ints": (lambda x: x.mean(0, dtype=torch.float64), (torch.arange(12).view(4, 3),)),
    "sum": (lambda x: (x.sum(), x.sum(-1), x.sum([])), (normal(4, 3),)),
    "sum of bools": (lambda x: ((x > 0).sum(), (x[0, 0] > 0).sum()), (normal(4, 3),)),
    "addmm": (lambda b, x, w: torch.addmm(b, x, w, beta=0.5, alpha=2), (normal(3), normal(4, 5), normal(5, 3))),
    "addmm without bias": (lambda b, x, w: torch.addmm(b, x, w, beta=0), (normal(3) / 0, normal(4, 5), normal(5, 3))),
    "baddbmm": (lambda b, x, y: torch.baddbmm(b, x, y), (normal(2, 4, 3), normal(2, 4, 5), normal(2, 5, 3))),
    "mv, dot": (lambda a, v: (a @ v, v @ v), (normal(4, 5), normal(5))),
    "var": (lambda x: (x.var(), x.var(1), x.var((0, 2), correction=0, keepdim=True)), (normal(4, 3, 5),)),
    "std": (lambda x: (x.std(-1), *torch.var_mean(x, 0), *torch.std_mean(x, (1, 2))), (normal(4, 3, 5),)),
    "norm": (
        lambda x: tuple(torch.linalg.vector_norm(x, p, 1) for p in (0, 1, 2, 3, float("inf"), -float("inf")))
        + (x.norm(), x.norm(2, dim=(0, 1))),
        (normal(4, 3, 5),),
    ),
    "nansum": (lambda x: (torch.nansum(x, 1), torch.nansum(torch.where(x > 0, x, torch.nan))), (normal(4, 3),)),
    "truth over no dims": (
        lambda x: (torch.any(x > 0, dim=()), torch.all(x, dim=()), torch.any(x > 0, dim=None, keepdim=True)),
        (normal(4, 3),),
    ),
    "nonzero": (lambda x: (torch.count_nonzero(x > 0, 1), torch.count_nonzero(x)), (normal(4, 3),)),
    "norm in a dtype": (
        lambda x: (torch.norm(x, 2, 1, dtype=torch.float64), torch.norm(x, dtype=torch.float64)),
        (normal(4, 3),),
    ),
    "logsumexp": (lambda x: (x.logsumexp(1), x.logsumexp((0, 1), keepdim=True)), (normal(4, 3) * 300,)),
    "logsumexp of nothing": (lambda x: x.logsumexp(0), (torch.full((3, 2), -torch.inf, dtype=torch.float64),)),
    "pool": (with_gradients(lambda x: F.adaptive_avg_pool2d(x, 1), 1), (normal(2, 3, 4, 5),)),
    "pool to 2x2": (with_gradients(lambda x: F.adaptive_avg_pool2d(x, 2), 1), (normal(2, 3, 4, 5),)),
    "masked_fill": (lambda x, v: (x.masked_fill(x > 0, -torch.inf), x.masked_fill(x < 0, v)), (normal(4, 3), normal())),
    "rsub, stack": (lambda x, y: torch.stack([1 - x, torch.rsub(x, y, alpha=2)], -1), (normal(4, 3), normal(4, 3))),
    "addcmul": (lambda x, y: (torch.addcmul(x, x, y, value=0.5), torch.addcdiv(x, x, y)), (normal(4), normal(4) + 9)),
    "constants": (
        lambda x: (torch.zeros_like(x) + torch.ones(3), torch.full_like(x, 2), x.new_zeros(2), x.new_full((2,), 3.0)),
        (normal(4, 3),),
    ),
    "conv": (
        with_gradients(lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1, groups=2), 3),
        (normal(2, 4, 6, 5), normal(6, 2, 3, 3), normal(6)),
    ),
    "conv transposed": (
        with_gradients(lambda x, w, b: F.conv_transpose1d(x, w, b, stride=2), 3),
        (normal(2, 4, 6), normal(4, 3, 3), normal(3)),
    ),
    "index": (lambda x, i: aten._unsafe_index(x, [None, i]), (normal(4, 3), torch.tensor([0, 2, 2]))),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_op_means_the_same(name: str) -> None:
    function, inputs = CASES[name]
    agree(function, *inputs)


LOSSES: dict[str, Callable[..., Tensor]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": lambda x, y, reduction: F.smooth_l1_loss(x, y, reduction=reduction, beta=0.7),
    "smooth_l1 sharp": lambda x, y, reduction: F.smooth_l1_loss(x, y, reduction=reduction, beta=0.0),
    "huber": lambda x, y, reduction: F.huber_loss(x, y, reduction=reduction, delta=0.7),
    "bce": lambda x, y, reduction: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), reduction=reduction),
    "bce weighted": lambda x, y, reduction: F.binary_cross_entropy(
        x.sigmoid(), y.sigmoid(), y.exp(), reduction=reduction
    ),
    "bce_with_logits": lambda x, y, reduction: F.binary_cross_entropy_with_logits(
        x * 50, y.sigmoid(), weight=y.exp(), pos_weight=y[0].exp(), reduction=reduction
    ),
    "soft_margin": lambda x, y, reduction: F.soft_margin_loss(x, y.sign(), reduction=reduction),
    "kl_div": lambda x, y, reduction: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction=reduction),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_and_its_gradient_mean_the_same(name: str, reduction: str) -> None:
    agree(
        with_gradients(lambda x, y: LOSSES[name](x, y, reduction=reduction), 1),
        normal(4, 3),
        normal(4, 3, seed=1),
        tolerance=1e-12,
    )


# ---------------------------------------------------------------------- cross entropy
def targets(shape: tuple[int, ...], classes: int, ignore: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(classes, shape, generator=generator)
    dropped = torch.rand(shape, generator=generator) < 0.4
    if shape:
        dropped.view(-1)[0] = False  # of no targets at all, the mean is NaN
    return torch.where(dropped, ignore, found) if shape else found


@given(
    lead=st.sampled_from([(1,), (5,), (3, 2), (2, 3, 2), ()]),
    classes=st.integers(1, 9),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    ignore=st.sampled_from([-100, 1]),
    weighted=st.booleans(),
    smoothing=st.sampled_from([0.0, 0.0, 0.1]),
    seed=st.integers(0, 99),
)
def test_cross_entropy_and_its_gradient_mean_the_same(
    lead: tuple[int, ...], classes: int, reduction: str, ignore: int, weighted: bool, smoothing: float, seed: int
) -> None:
    shape = (*lead[:1], classes, *lead[1:])
    weight = [normal(classes, seed=seed + 1).exp()] if weighted else []

    def loss(x: Tensor, target: Tensor, *weight: Tensor) -> Tensor:
        return F.cross_entropy(x, target, *weight, ignore_index=ignore, reduction=reduction, label_smoothing=smoothing)

    inputs = [normal(*shape, seed=seed) * 5, targets(lead, classes, ignore, seed), *weight]
    agree(with_gradients(loss, 1), *inputs, tolerance=1e-12)


def test_nll_of_any_log_probabilities() -> None:
    target = targets((4, 3), 5, -100, 0)
    agree(with_gradients(lambda x, t: F.nll_loss(x, t), 1), normal(4, 5, 3), target)


def cross_entropy_graph(dtype: torch.dtype = torch.float64) -> Graph:
    logits, target = normal(6, 11, dtype=dtype), targets((6,), 11, -100, 0)
    return agree(
        with_gradients(F.cross_entropy, 1), logits, target, tolerance=1e-13 if dtype == torch.float64 else 1e-6
    )


def test_a_sharded_vocabulary_is_reduced_three_times_forward_and_never_backward() -> None:
    graph = cross_entropy_graph()
    reductions = [
        op_name(node.target)
        for node in graph.calls()
        if op_name(node.target) in ("amax", "sum.dim_IntList") and type_of(operands(node)[0]).shape == (6, 11)
    ]
    assert reductions == ["amax", "sum.dim_IntList", "sum.dim_IntList"]
    whole = [op_name(n.target) for n in graph.calls() if info(n).type is not None and type_of(n).shape == (6, 11)]
    # forward: x - max, exp, the one-hot mask, what it picks; backward: softmax, the one-hot's part, their difference
    assert whole == [
        "sub.Tensor",
        "exp",
        "eq.Tensor",
        "where.ScalarOther",
        "mul.Tensor",
        "where.ScalarOther",
        "sub.Tensor",
    ]


def test_float32_cross_entropy_is_as_accurate_as_torchs() -> None:
    target = targets((64,), 1000, -100, 0)
    joint = with_gradients(F.cross_entropy, 1)
    logits = normal(64, 1000, dtype=torch.float32) * 10
    graph = normalized(traced(joint, logits, target))
    exact = joint(logits.double(), target)
    for ours, torchs, truth in zip(run(graph.fx, (logits, target)), joint(logits, target), exact, strict=True):
        scale = truth.abs().max()
        error = ((ours - truth).abs().max() / scale).item()
        assert error < 2 * ((torchs - truth).abs().max() / scale).item() + 1e-7


def test_half_precision_is_computed_in_float32() -> None:
    target = targets((8,), 50, -100, 0)
    logits = normal(8, 50, dtype=torch.bfloat16)
    agree(with_gradients(F.cross_entropy, 1), logits, target, tolerance=1e-2)
    agree(lambda x: x.half().mean(0), torch.full((70000, 2), 60000.0), tolerance=1e-3)  # whose sum overflows


# ---------------------------------------------------------------------- batch norm
@given(
    space=st.sampled_from([(), (5,), (4, 3), (2, 3, 2)]),
    batch=st.integers(2, 5),
    affine=st.booleans(),
    training=st.booleans(),
    seed=st.integers(0, 99),
)
def test_batch_norm_means_the_same(space: tuple[int, ...], batch: int, affine: bool, training: bool, seed: int) -> None:
    x, weight, bias = normal(batch, 3, *space, seed=seed), normal(3, seed=seed + 1), normal(3, seed=seed + 2)

    def outputs(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, g: Tensor) -> Any:
        scale = (weight, bias) if affine else (None, None)
        out = aten._native_batch_norm_legit_functional(x, *scale, mean, var, training, 0.1, 1e-5)
        grads = aten.native_batch_norm_backward(
            g, x, scale[0], mean, var, out[1], out[2], training, 1e-5, [True, affine, affine]
        )
        return (out[0], out[3], out[4], grads[0], *(grads[1:] if affine else ()))

    mean, var = normal(3, seed=3), normal(3, seed=4).exp()
    graph = agree(outputs, x, weight, bias, mean, var, normal(*x.shape, seed=seed + 3), tolerance=1e-12)
    assert not any("batch_norm" in op for op in ops(graph))


def test_batch_norm_of_a_module_in_training() -> None:
    graph = agree(
        with_gradients(lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), 3),
        normal(4, 3, 2, 2),
        normal(3),
        normal(3, seed=1),
        tolerance=1e-12,
    )
    assert not any("batch_norm" in op for op in ops(graph))


# ---------------------------------------------------------------------- what the walk itself does
def test_calls_that_change_nothing_are_dropped() -> None:
    def nothing(x: Tensor) -> Tensor:
        x = x.clone()[:].expand(4, 3).view(4, 3).permute(0, 1).transpose(1, 1)
        return F.pad(x.to(torch.float64), (0, 0)).contiguous().repeat(1, 1) * 2

    assert ops(agree(nothing, normal(4, 3))) == Counter({"mul.Tensor": 1})


def test_a_layout_that_was_dropped_is_not_missed() -> None:
    agree(with_gradients(lambda x: F.group_norm(x.transpose(1, 2), 2), 1), normal(2, 5, 4), tolerance=1e-12)
    agree(lambda x: x.t().contiguous().view(-1), normal(4, 3))


def test_identical_calls_are_one_and_constants_are_marked() -> None:
    def masks(x: Tensor) -> Tensor:
        return torch.where(torch.arange(3) > 0, x, 0.0) + torch.where(torch.arange(3) > 0, x * 2, 0.0) * (x * 2)

    graph = agree(masks, normal(4, 3))
    assert ops(graph)["arange"] == ops(graph)["gt.Scalar"] == 1
    assert ops(graph)["mul.Tensor"] == 2
    constants = {op_name(n.target) for n in graph.calls() if info(n).constant}
    assert {"arange", "gt.Scalar"} <= constants <= {"arange", "gt.Scalar", "full"}


def test_phases_are_not_merged_so_that_recomputation_stays() -> None:
    graph = traced(lambda x: (x.exp(), x.exp(), x.exp(), torch.arange(3), torch.arange(3)), normal(3))
    for node in list(graph.calls())[1:]:
        update(node, phase="bwd")
    normalized(graph)
    assert ops(graph) == Counter({"exp": 2, "arange": 1})


def test_what_has_no_elements_is_of_no_input() -> None:
    """As where a width that a model splits off is configured as 0: what is joined to it stays, as does its gradient."""

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        with torch.enable_grad():
            kept, nothing = torch.split(x @ w, [4, 0], dim=-1)
            turned = nothing.view(2, 3, 1, 0).transpose(1, 2) * 2 + 1
            joined = torch.cat([kept.unsqueeze(1), turned.expand(2, 1, 3, 0)], -1)
            loss = joined.pow(2).sum() + nothing.sum()
        return loss, *torch.autograd.grad(loss, (x, w))

    graph = agree(function, normal(2, 3, 5), normal(5, 4))
    assert "cat" not in "".join(ops(graph))
    values = [n for n in graph.calls() if info(n).type is not None]
    assert not [n for n in values if 0 in type_of(n).shape and n.target is not aten.full.default]


def test_random_draws_are_never_merged() -> None:
    graph = traced(lambda x: (aten.rand_like(x), aten.rand_like(x)), normal(3))
    assert ops(normalized(graph))["rand_like"] == 2


def test_replaced_values_keep_their_names_and_activations_follow() -> None:
    graph = traced(lambda x, w: torch.addmm(w[0], x, w).mean(), normal(4, 3), normal(3, 3))
    old = {op_name(n.target): n for n in graph.calls()}
    update(old["addmm"], name="fc.addmm", fqn="fc", source="model.py:3")
    graph.activations["fc"] = old["addmm"]
    normalized(graph)
    found = graph.by_name("fc.addmm")
    assert op_name(found.target) == "add.Tensor"
    assert graph.activations["fc"] is found
    assert info(found).source == info(operands(found)[0]).source == "model.py:3"
    assert info(operands(found)[0]).name == "fc.mm"
    assert op_name(graph.by_name("mean").target) == "div.Tensor"


def test_dead_code_and_devices_are_gone() -> None:
    graph = traced(lambda x: x + torch.arange(3, device="cpu") * 0 if x.exp().ndim else x, normal(3))
    normalized(graph)
    assert "exp" not in ops(graph)
    assert not any("device" in n.kwargs for n in graph.calls())


# ---------------------------------------------------------------------- whole models
@pytest.mark.sampled(3)
@pytest.mark.parametrize("make", [gpt2, llama, cnn])
def test_a_models_step_means_the_same(make: Callable[[], tuple[nn.Module, dict[str, Tensor]]]) -> None:
    model, batch = make()
    model = model.double()
    batch = {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}
    step = trace(model, batch)
    values: dict[str, Tensor] = {
        **dict(model.named_buffers()),
        **dict(model.named_parameters()),
        **batch,
        **step.constants,
    }
    inputs = tuple(torch.tensor(0) if port.role == "seed" else values[port.name] for port in step.inputs)
    graph = ingest(step, Mesh())
    before = run(copied(graph), inputs, RunWide)
    after = run(normalized(graph).fx, inputs, RunWide)
    for port, a, b in zip(step.outputs, before, after, strict=True):
        assert a is not None
        assert b is not None
        error = (a - b).abs().max() / a.abs().max().clamp(min=1e-6)
        assert error < 1e-12, f"{port.name}: {error}"
