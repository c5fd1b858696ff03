"""The simulator against the same step on one device and against autograd; its sharing of work; its refusals."""

from collections import Counter

import pytest
import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from shardc.ir.diagnostic import ShardcError
from shardc.ir.mesh import Mesh
from shardc.runtime.oracle.simulate import run_reference, simulate
from tests.handmade import MESH, Builder, aten, mlp, mlp_inputs


def expected(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    w1, w2 = (inputs[name].detach().double().requires_grad_() for name in ("w1", "w2"))
    loss = ((inputs["x"].double() @ w1).relu() @ w2).square().sum()
    g1, g2 = torch.autograd.grad(loss, [w1, w2])
    return {"loss": loss, "w1": g1, "w2": g2, "steps": inputs["steps"] + 1}


@pytest.mark.parametrize(("batch", "width"), [(4, 12), (3, 13), (1, 7)])
def test_simulated_ranks_equal_autograd(batch: int, width: int) -> None:
    inputs = mlp_inputs(batch, width)
    for found in (
        simulate(mlp(batch=batch, width=width), inputs, dtype=torch.float64),
        run_reference(mlp(False, batch=batch, width=width), inputs, dtype=torch.float64),
    ):
        want = expected(inputs)
        for port, value in found.items():
            assert value.dtype == want[port.name].dtype
            torch.testing.assert_close(value, want[port.name].detach(), rtol=1e-13, atol=1e-12)


def test_without_a_dtype_the_graph_runs_as_compiled() -> None:
    found = simulate(mlp(), mlp_inputs())
    assert {value.dtype for port, value in found.items() if port.role != "buffer"} == {torch.float32}


class Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.name()] += 1
        return func(*args, **(kwargs or {}))


def test_replicas_are_computed_once() -> None:
    with Count() as count:
        simulate(mlp(), mlp_inputs())
    # All five products differ on all four ranks; after the all-reduce over tp, y is one object in each of its groups.
    assert count.calls["aten::mm"] == 5 * 4
    assert count.calls["aten::mul.Tensor"] == 2 * 2
    assert count.calls["aten::t"] == 2 + 2 + 4  # w2 over tp, x over dp, a over both


def test_slices_share_what_their_axes_do_not_tell_apart() -> None:
    b = Builder(MESH)
    x = b.input("x", "f32[6]", "input")
    y = b.call("slice", "f32[6@tp]", torch.ops.shardc.shard_slice.default, x, ["tp"], [6], 0, [3])
    offset = b.call("offset", "i64[]", torch.ops.shardc.axis_offset.default, ["tp"], [3])
    b.output("output", "y", y)
    b.output("output", "offset", offset)
    seen: dict[str, list[torch.Tensor]] = {}
    found = simulate(
        b.graph(), {"x": torch.arange(6.0)}, observe=lambda node, values: seen.update({node.name: list(values)})
    )
    assert next(iter(found.values())).tolist() == list(range(6))
    y0, y1, y2, y3 = seen[y.name]
    assert y0 is y2
    assert y1 is y3
    assert [int(v) for v in seen[offset.name]] == [0, 3, 0, 3]


def test_several_results_and_nested_arguments() -> None:
    b = Builder(Mesh(dp=2))
    x = b.input("x", "f32[4@dp, 6]", "input")
    parts = b.call("split", None, aten.split_with_sizes.default, x, [2, 4], 1)
    left = b.call("left", "f32[4@dp, 2]", __import__("operator").getitem, parts, 0)
    right = b.call("right", "f32[4@dp, 4]", __import__("operator").getitem, parts, 1)
    swapped = b.call("cat", "f32[4@dp, 6]", aten.cat.default, [right, left], 1)
    b.output("output", "y", swapped)
    value = torch.randn(4, 6)
    (found,) = simulate(b.graph(), {"x": value}).values()
    assert torch.equal(found, torch.cat([value[:, 2:], value[:, :2]], 1))


def test_a_hard_coded_float32_is_lifted() -> None:
    b = Builder(Mesh(), sharded=False)
    x = b.input("x", "f64[3]", "input")
    y = b.call("cast", "f32[3]", aten._to_copy.default, x, dtype=torch.float32)
    third = b.call("full", "f32[]", aten.full.default, [], 1 / 3)
    z = b.call("mul", "f32[3]", aten.mul.Tensor, y, third)
    b.output("output", "z", z)
    value = torch.rand(3, dtype=torch.float64)
    (found,) = run_reference(b.graph(), {"x": value}, dtype=torch.float64).values()
    assert torch.equal(found, value * (1 / 3))


def test_values_die_after_their_last_use() -> None:
    import weakref

    b = Builder(Mesh(), sharded=False)
    x = b.input("x", "f32[3]", "input")
    for i in range(4):
        x = b.call(f"y{i}", "f32[3]", aten.neg.default, x)
    b.output("output", "y", x)
    alive: list[weakref.ref[torch.Tensor]] = []
    peak = 0

    def observe(_: fx.Node, values: object) -> None:
        nonlocal peak
        alive.append(weakref.ref(values[0]))  # type: ignore[index]
        peak = max(peak, sum(ref() is not None for ref in alive[1:]))

    run_reference(b.graph(), {"x": torch.ones(3)}, observe=observe)
    assert peak == 2


def test_a_missing_input_is_named() -> None:
    inputs = mlp_inputs()
    del inputs["w2"]
    with pytest.raises(ShardcError, match="param 'w2' was not supplied") as caught:
        simulate(mlp(), inputs)
    assert caught.value.code == "SC504"


def test_missing_inputs_are_counted() -> None:
    with pytest.raises(ShardcError) as caught:
        simulate(mlp(), {})
    (found,) = caught.value.diagnostics
    assert found.message == "input 'x' was not supplied, nor were 3 others"
    assert found.cause == "missing too: w1, w2, steps"


def test_a_wrong_shape_or_dtype_is_named() -> None:
    with pytest.raises(
        ShardcError, match=r"input 'x' has shape \[3, 8\], the program was compiled for \[4, 8\]"
    ) as caught:
        simulate(mlp(), mlp_inputs() | {"x": torch.zeros(3, 8)})
    assert caught.value.code == "SC501"
    with pytest.raises(ShardcError, match="input 'x' has dtype i64, the program was compiled for f32"):
        simulate(mlp(), mlp_inputs() | {"x": torch.zeros(4, 8, dtype=torch.int64)})


def test_a_failing_instruction_is_named() -> None:
    b = Builder(Mesh(tp=2))
    x = b.input("x", "f32[4@tp]", "input")
    b.output("output", "y", b.call("h.0.view", "f32[5]", aten.view.default, x, [5]))
    with pytest.raises(ShardcError, match=r"%h.0.view, simulated: RuntimeError: shape '\[5\]' is invalid") as caught:
        simulate(b.graph(), {"x": torch.ones(4)})
    assert caught.value.code == "SC511"
    assert "mlp.py:" in str(caught.value)
