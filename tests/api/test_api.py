"""What users call: `compile` takes batches, meshes and placements as they come; `annotate` and `shard` say it early."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F

import shardc
from shardc import Mesh, P, Plan, ShardcError
from shardc.api import Program
from shardc.ir.graph import type_of
from tests.models.zoo import make

MESH = Mesh(dp=2, tp=2)


class MLP(nn.Module):
    """up, relu, down; `forward` of the subclasses below says how it is called and what it returns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)

    def reconstruct(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.reconstruct(x)


def squared(output: Tensor, batch: Any) -> Tensor:
    return (output**2).sum()


def inputs(rows: int = 4) -> Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(1))


UP = {"up.weight": P("tp", None)}
DP = {"x": P("dp", None)}


def checked(program: Program) -> Program:
    report = program.verify()
    assert report.ok, str(report)
    assert report.eager_error is not None
    assert report.eager_error <= 1e-12
    return program


def placed(program: Program, name: str) -> str:
    return str(type_of(program.body.input_nodes()[name]))


def is_tensor_parallel(program: Program) -> None:
    assert placed(program, "up.weight") == "f32[8@tp, 6]"
    assert placed(program, "down.weight") == "f32[6, 8@tp]"
    assert sum(c.axes == ("tp",) for c in program.collectives()) == 1


# ---------------------------------------------------------------------------------------------------- batches
def test_a_tensor() -> None:
    program = checked(shardc.compile(MLP(), inputs(), mesh=MESH, plan={"params": UP, "inputs": DP}, loss=squared))
    is_tensor_parallel(program)
    assert program.simulate(inputs()).loss == program.simulate().loss


def test_a_tuple() -> None:
    class Two(MLP):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return F.mse_loss(self.reconstruct(x), target)

    plan = {"params": UP, "inputs": {**DP, "target": P("dp")}}
    is_tensor_parallel(checked(shardc.compile(Two(), (inputs(), inputs() + 1), mesh=MESH, plan=plan)))


def test_a_tuple_with_a_loss_of_ones_own() -> None:
    def distance(output: Tensor, batch: tuple[Tensor]) -> Tensor:
        return F.l1_loss(output, batch[0])

    checked(shardc.compile(MLP(), (inputs(),), mesh=MESH, plan={"params": UP, "inputs": DP}, loss=distance))


def test_a_dict_of_keywords() -> None:
    class Keywords(MLP):
        def forward(self, x: Tensor, *, scale: float = 1.0, **more: Tensor) -> Tensor:
            return ((self.reconstruct(x) - more["target"]) ** 2).sum() * scale

    batch = {"x": inputs(), "target": inputs() + 1, "scale": 0.5}
    plan = {"params": UP, "inputs": {**DP, "target": P("dp")}}
    is_tensor_parallel(checked(shardc.compile(Keywords(), batch, mesh=MESH, plan=plan)))


def test_a_nested_batch() -> None:
    class Nested(MLP):
        def forward(self, pair: tuple[Tensor, dict[str, Tensor]]) -> Tensor:
            return ((self.reconstruct(pair[0]) - pair[1]["y"]) ** 2).mean()

    plan = {"params": UP, "inputs": {"pair.0": P("dp"), "pair.1.y": P("dp")}}
    checked(shardc.compile(Nested(), {"pair": (inputs(), {"y": inputs() + 1})}, mesh=MESH, plan=plan))


@dataclass
class Output:
    loss: Tensor
    prediction: Tensor


def test_a_dataclass_as_output() -> None:
    class Structured(MLP):
        def forward(self, x: Tensor) -> Output:
            y = self.reconstruct(x)
            return Output(F.mse_loss(y, x), y)

    is_tensor_parallel(checked(shardc.compile(Structured(), inputs(), mesh=MESH, plan={"params": UP, "inputs": DP})))


@pytest.mark.parametrize("kind", [dict, tuple, list])
def test_other_outputs(kind: type) -> None:
    class Structured(MLP):
        def forward(self, x: Tensor) -> Any:
            y = self.reconstruct(x)
            return {"y": y, "loss": F.mse_loss(y, x)} if kind is dict else kind([F.mse_loss(y, x), y])

    checked(shardc.compile(Structured(), inputs(), mesh=MESH, plan={"params": UP, "inputs": DP}))


def test_an_output_that_is_no_loss() -> None:
    with pytest.raises(ShardcError, match="SC102"):
        shardc.compile(MLP(), inputs(), mesh=MESH, plan={"params": UP})


# ---------------------------------------------------------------------------------------------------- buffers
class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mlp = MLP()
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("largest", torch.zeros(6))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.mlp(x))
        with torch.no_grad():
            self.largest.copy_(torch.maximum(self.largest, y.abs().amax(0)))
            self.steps += 1
        return (y**4).mean()


@pytest.mark.parametrize("rows", [4, 5])
def test_buffers_that_forward_changes(rows: int) -> None:
    model = Counting()
    plan = {"params": {"mlp.up.weight": P("tp")}, "inputs": DP}
    program = checked(shardc.compile(model, inputs(rows), mesh=Mesh(dp=4, tp=2), plan=plan))
    changed = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "largest", "steps"}
    result = program.simulate()
    assert result.buffers.keys() == changed
    # The statistics are of the whole batch, and the model itself is as it was.
    assert int(model.steps) == 0
    model(inputs(rows))
    for name, value in model.named_buffers():
        torch.testing.assert_close(result.buffers[name], value)


# ------------------------------------------------------------------------------------------------------- meta
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["gpt2", "llama", "resnet"])
def test_a_model_on_meta_compiles_without_being_materialised(name: str) -> None:
    with torch.device("meta"):
        model, batch, _ = make(name)
    real = make(name)
    path = f"configs/plans/{name}.yaml"
    program = shardc.compile(model, batch, plan=path, mesh="dp=2, tp=2")
    assert all(p.is_meta for p in model.parameters())
    want = shardc.compile(real[0], real[1], plan=path, mesh="dp=2, tp=2")
    assert program.text() == want.text()
    report = program.verify(real[1])  # with parameters drawn at random
    assert report.ok, str(report)
    assert report.eager_error is None
    assert {row.name for row in report.rows if row.role == "grad"} == {n for n, _ in model.named_parameters()}


@pytest.mark.parametrize("plan", [{"accumulate": 2}, {"pipeline": {"axis": "dp", "microbatches": 2}}], ids=str)
def test_a_sample_on_meta_is_drawn_to_verify(plan: dict[str, Any]) -> None:
    with torch.device("meta"):
        model, rows = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.empty(4, 4)
    program = shardc.compile(model, (rows,), mesh="dp=2", plan=plan, loss=lambda y, _: y.square().mean())
    assert program.verify().ok
    assert float(program.simulate().loss) > 0


# ------------------------------------------------------------------------------------------------------ meshes
def test_every_way_to_give_a_mesh() -> None:
    plan = {"params": UP, "inputs": DP}
    want = shardc.compile(MLP(), inputs(), mesh=MESH, plan=plan, loss=squared).text()
    for mesh in ("dp=2, tp=2", {"dp": 2, "tp": 2}, Mesh((("dp", 2), ("tp", 2)))):
        assert shardc.compile(MLP(), inputs(), mesh=mesh, plan=plan, loss=squared).text() == want
    assert shardc.compile(MLP(), inputs(), plan={**plan, "mesh": "dp=2, tp=2"}, loss=squared).text() == want
    with pytest.raises(ShardcError, match="SC210"):
        shardc.compile(MLP(), inputs(), plan=plan, loss=squared)


def test_a_device_mesh() -> None:
    from torch.distributed.device_mesh import DeviceMesh

    class Stub(DeviceMesh):
        """What DeviceMesh offers to read, without a running job."""

        def __init__(self) -> None:
            pass

        mesh = torch.arange(4).reshape(2, 2)
        mesh_dim_names = ("dp", "tp")

    program = shardc.compile(MLP(), inputs(), mesh=Stub(), plan={"params": UP, "inputs": DP}, loss=squared)
    assert program.mesh == MESH


def test_the_argument_wins_over_the_plans_mesh() -> None:
    plan = {"mesh": "dp=2, tp=2", "params": UP, "inputs": DP}
    assert shardc.compile(MLP(), inputs(), mesh="dp=2, tp=4", plan=plan, loss=squared).mesh == Mesh(dp=2, tp=4)


# -------------------------------------------------------------------------------------------------- placements
def test_dtensors_placements() -> None:
    plan = Plan.of(mesh=MESH, params={"up.weight": [Replicate(), Shard(0)]}, inputs={"x": [Shard(0), Replicate()]})
    is_tensor_parallel(checked(shardc.compile(MLP(), inputs(), plan=plan, loss=squared)))


def test_text_and_tuples() -> None:
    plan = Plan.of(mesh=MESH, params={"up.weight": "tp, -"}, inputs={"x": ("dp", None)})
    is_tensor_parallel(checked(shardc.compile(MLP(), inputs(), plan=plan, loss=squared)))


def test_annotate() -> None:
    model = shardc.annotate(MLP(), {"params": UP, "inputs": DP})
    assert list(model.state_dict()) == list(MLP().state_dict()), "the plan is no part of the model's state"
    is_tensor_parallel(checked(shardc.compile(model, inputs(), mesh=MESH, loss=squared)))


def test_a_plan_is_heard_over_an_annotation() -> None:
    model = shardc.annotate(MLP(), {"params": UP, "inputs": DP})
    program = shardc.compile(model, inputs(), mesh=MESH, plan={"params": {"up.weight": P(None, "tp")}}, loss=squared)
    assert placed(program, "up.weight") == "f32[8, 6@tp]"
    assert placed(program, "x").startswith("f32[4@dp")


@shardc.shard(params={"up.weight": P("tp", None)}, inputs={"x": P("dp", None)}, activations={"": P("dp", None)})
class Decorated(MLP):
    pass


def test_a_decorated_class() -> None:
    assert type(Decorated()) is Decorated, "itself untouched"
    is_tensor_parallel(checked(shardc.compile(Decorated(), inputs(), mesh=MESH, loss=squared)))


def test_a_decorated_block_wherever_it_is_used() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Decorated(), Decorated()])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x + block(x)
            return (x**2).sum()

    program = checked(shardc.compile(Stack(), inputs(), mesh=MESH, plan={"inputs": DP}))
    for i in range(2):
        assert placed(program, f"blocks.{i}.up.weight") == "f32[8@tp, 6]"
        assert placed(program, f"blocks.{i}.down.weight") == "f32[6, 8@tp]"
    assert sum(c.axes == ("tp",) and c.phase == "fwd" for c in program.collectives()) == 2


class Twice(MLP):
    """One block, called twice: weights shared by calling."""

    def __init__(self) -> None:
        super().__init__()
        self.block = MLP()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + self.block(x)
        return (x**2).sum()


def test_an_annotated_module_is_placed_in_every_call() -> None:
    plan = {"params": {"block.up.weight": P("tp", None)}, "inputs": DP, "activations": {"block": P("dp", "tp")}}
    program = checked(shardc.compile(Twice(), inputs(), mesh=MESH, plan=plan))
    assert [name for kind, name, *_ in program.annotations if kind == "activation"] == ["block", "block#2"]
    assert placed_activations(program) == {"block": "f32[4@dp, 6@tp]", "block#2": "f32[4@dp, 6@tp]"}
    scatters = [c for c in program.collectives() if c.kind == "reduce_scatter" and c.phase == "fwd"]
    assert len(scatters) == 2, "the sum of each call ends where the annotation wants it"


def placed_activations(program: Program) -> dict[str, str]:
    found = program.body.activations
    return {name: str(type_of(found[name])) for name in found if name.startswith("block") and "." not in name}


def test_a_module_called_twice_under_a_placement_that_does_not_fit_is_said_once() -> None:
    with pytest.raises(ShardcError) as raised:
        shardc.compile(Twice(), inputs(), mesh=MESH, plan={"activations": {"block": P("dp", None, "tp")}})
    assert [d.code for d in raised.value.diagnostics] == ["SC205"]


# ---------------------------------------------------------------------------------------------------- nothing placed
def test_a_mesh_of_which_nothing_makes_use_is_a_warning() -> None:
    program = shardc.compile(MLP(), inputs(), mesh=MESH, loss=squared)
    (warning,) = program.diagnostics
    assert (warning.code, warning.severity) == ("SC215", "warning")
    assert "4 ranks" in warning.message
    assert '"x": "dp"' in (warning.hint or "")
    with pytest.raises(ShardcError, match="SC215"):
        shardc.compile(MLP(), inputs(), mesh=MESH, loss=squared, strict=True)


def test_one_rank_needs_no_annotation() -> None:
    for mesh in ("dp=1", "dp=1, tp=1"):
        assert shardc.compile(MLP(), inputs(), mesh=mesh, loss=squared, strict=True).diagnostics == ()


def test_an_axis_of_which_nothing_makes_use_is_a_warning() -> None:
    for plan in ({"storage": {"zero": 3, "axes": ["dp"]}}, {"inputs": DP}):
        program = shardc.compile(MLP(), inputs(), mesh=MESH, plan=plan, loss=squared)
        (warning,) = (d for d in program.diagnostics if d.code == "SC215")
        assert "axis 'tp'" in warning.message
        alone = shardc.compile(MLP(), inputs(), mesh="dp=2", plan=plan, loss=squared)
        assert not any(d.code == "SC215" for d in alone.diagnostics)


# ---------------------------------------------------------------------------------------- Hugging Face's tp_plan
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_hugging_faces_own_plan_is_ours(name: str) -> None:
    """Their row-parallel weights and ours, which follow from the columns, are the same, and so is the program."""
    model, batch, _ = make(name, **({"kv_heads": 4} if name == "llama" else {}))
    data = Plan.of(inputs={"input_ids": "dp, -", "labels": "dp, -"}, params={"**.embed_tokens.weight": "tp, -"})
    theirs = shardc.compile(model, batch, mesh=MESH, plan=Plan.from_hf(model).merge(data))
    ours = shardc.compile(model, batch, mesh=MESH, plan=f"configs/plans/{name}.yaml")
    assert theirs.verify().ok
    assert [(c.kind, c.axes, c.value, c.bytes_per_rank) for c in theirs.collectives()] == [
        (c.kind, c.axes, c.value, c.bytes_per_rank) for c in ours.collectives()
    ]
    assert theirs.parameter_bytes() == ours.parameter_bytes()


def test_a_model_without_a_plan() -> None:
    with pytest.raises(ShardcError, match="SC208"):
        Plan.from_hf(MLP())
