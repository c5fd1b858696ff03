"""A trainer's tensors under its model's names: `state_dict`, checkpoints, `sync_to`, and what a launch starts from."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.ir.diagnostic import ShardcError
from shardc.ir.types import TensorType
from shardc.runtime.checkpoint.checkpoint import Position, load_state_dict
from shardc.runtime.checkpoint.held import Held
from shardc.runtime.train.trainer import Trainer

BATCH = torch.linspace(-1, 1, 32).reshape(8, 4)
LAYOUTS = {
    "one": ("dp=1", {}),
    "zero3": ("dp=2, tp=2", {"params": {"fc.weight": "tp"}, "storage": {"zero": 3, "axes": ["dp"]}}),
    "tp3": ("tp=3", {"params": {"fc.weight": "tp"}}),  # 8 rows over 3
    "pipeline": ("pp=2, dp=2", {"pipeline": {"axis": "pp", "microbatches": 2, "split": ["head"]}}),
}


class Net(nn.Module):
    """Names in another order than parameters come in, a tied weight, and buffers of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.register_buffer("table", torch.arange(8.0).cos(), persistent=False)
        self.register_buffer("mean", torch.zeros(4), persistent=False)  # changed by forward, and in no state_dict
        self.fc = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.fc.weight
        self.register_buffer("second_scale", self.scale)
        self.gain = nn.Parameter(torch.ones(()), requires_grad=False)

    def reset_parameters(self) -> None:
        self.scale.fill_(2.0)
        self.table.copy_(torch.arange(8.0).cos())
        self.mean.zero_()
        self.gain.fill_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = (0.5 * self.mean + x.mean(0)).detach()
        hidden = self.norm(self.fc(x * self.scale - self.mean)) * self.table
        return (hidden * self.head(x + torch.tensor([1.0, 2.0, 3.0, 4.0]))).square().mean() * self.gain


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def on_meta() -> Net:
    with torch.device("meta"):
        return Net()


def compiled(model: nn.Module, layout: str = "zero3") -> shardc.Program:
    mesh, plan = LAYOUTS[layout]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    plan = {"inputs": {"x": "dp"} if "dp=2" in mesh else {}, **plan}
    return shardc.compile(model, BATCH, mesh=mesh, plan=plan, optimizer=optimizer)


def stepped(trainer: Trainer, steps: int = 2) -> list[float]:
    return [float(trainer.step(BATCH * (i + 1)).loss) for i in range(steps)]


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return list(a) == list(b) and all(
        torch.equal(a[key], b[key]) and (a[key].dtype, a[key].shape) == (b[key].dtype, b[key].shape) for key in a
    )


def refusal(code: str, act: Callable[[], object]) -> str:
    with pytest.raises(ShardcError) as caught:
        act()
    assert caught.value.code == code
    return str(caught.value)


# ---------------------------------------------------------------------- state_dict
@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_state_dict_is_the_models(layout: str) -> None:
    model = net()
    own = {key: value.clone() for key, value in model.state_dict().items()}
    assert next(iter(own)) == "gain"
    trainer = compiled(model, layout).launch()
    assert equal(trainer.state_dict(), own)
    stepped(trainer)
    state = trainer.state_dict()
    other = net(1)
    other.load_state_dict(state, strict=True)
    assert equal(dict(other.state_dict()), state)
    assert state["head.weight"].data_ptr() == state["fc.weight"].data_ptr()
    assert list(trainer.state_dict(("param",))) == [
        key for key in own if "weight" in key or "bias" in key or key == "gain"
    ]
    assert "mean" in trainer.state_dict(("state",))
    assert "table" not in trainer.state_dict(("param", "buffer", "state"))


def test_state_dict_has_the_models_dtype() -> None:
    model = Uncomputed().bfloat16()
    plan = {"inputs": {"x": "dp"}, "precision": "bf16"}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1e-2)
    program = shardc.compile(model, BATCH.bfloat16(), mesh="dp=2", plan=plan, optimizer=optimizer)
    trainer = program.launch()
    trainer.step(BATCH.bfloat16())
    assert trainer.state["fc.weight"].dtype == torch.float32
    state = trainer.state_dict()
    assert [(key, t.dtype) for key, t in state.items()] == [(key, torch.bfloat16) for key in model.state_dict()]
    assert torch.equal(state["fc.weight"], trainer.state["fc.weight"].bfloat16())
    model.load_state_dict(state, strict=True)


def test_a_program_from_a_file_knows_its_models_state(tmp_path: Path) -> None:
    model = net()
    compiled(model).save(tmp_path / "program.json")
    program = shardc.Program.load(tmp_path / "program.json")
    trainer = program.launch(state=model.state_dict())
    assert equal(trainer.state_dict(), dict(model.state_dict()))
    assert torch.equal(trainer.state["table"], model.table)
    assert stepped(trainer) == stepped(compiled(model).launch())


def test_extra_state_is_the_models_own() -> None:
    class Counted(Net):
        def get_extra_state(self) -> dict[str, int]:
            return {"version": 7}

        def set_extra_state(self, state: Any) -> None:
            self.loaded = state

    model = Counted()
    state = compiled(model).launch().state_dict()
    assert list(state) == list(model.state_dict())
    other = Counted()
    other.load_state_dict(state, strict=True)
    assert other.loaded == {"version": 7}


def test_what_a_hook_computes_is_refused(tmp_path: Path) -> None:
    model = net()

    def add(module: nn.Module, state: dict[str, Tensor], prefix: str, *rest: object) -> None:
        state["norms"] = torch.stack([p.norm() for p in module.parameters()])

    model.register_state_dict_post_hook(add)
    trainer = compiled(model).launch()
    assert "'norms' of the model's state_dict is neither" in refusal("SC562", trainer.state_dict)
    refusal("SC562", lambda: trainer.export_safetensors(tmp_path))
    stepped(trainer)
    trainer.sync_to(model)
    assert torch.equal(model.state_dict()["norms"], torch.stack([p.norm() for p in model.parameters()]))


# ---------------------------------------------------------------------- checkpoints and safetensors
def test_files_hold_what_the_models_state_dict_does(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = net()
    trainer = compiled(model).launch()
    stepped(trainer)
    trainer.save(tmp_path / "checkpoint")
    trainer.export_safetensors(tmp_path / "weights")
    state = trainer.state_dict()
    saved = load_state_dict(tmp_path / "checkpoint")
    assert saved.keys() == state.keys()
    assert all(torch.equal(saved[key], state[key]) for key in state)
    written = load_file(tmp_path / "weights/model.safetensors")
    assert written.keys() == state.keys() - {"head.weight", "second_scale"}
    assert all(torch.equal(value, state[key]) for key, value in written.items())
    expected = stepped(trainer)
    # What a step changes is gone on with, in no state_dict or not; what none changes comes from the model.
    again = compiled(on_meta(), "tp3").launch(init=lambda name, shape, dtype: torch.zeros(shape, dtype=dtype))
    again.load(tmp_path / "checkpoint")
    assert stepped(again) == pytest.approx(expected, rel=1e-5)


def test_a_checkpoint_of_before_is_read(tmp_path: Path) -> None:
    """One that holds constants of its program, and buffers that are not persistent."""
    trainer = compiled(net()).launch()
    held = trainer._held()
    more = {"table": torch.zeros(8), "_constant.0": torch.ones(4), "_constant.7": torch.ones(2)}
    held |= {name: Held(t, TensorType.of(t), "buffer") for name, t in more.items()}
    trainer.checkpoints.save(tmp_path / "old", held, Position(3, 0))
    trainer.load(tmp_path / "old")
    assert trainer.steps == 3
    assert torch.equal(trainer.state["table"], net().table)
    held["other"] = Held(torch.ones(2), TensorType.of(torch.ones(2)), "buffer")
    trainer.checkpoints.save(tmp_path / "foreign", held, Position(3, 0))
    assert "1 tensor has no place in the program" in refusal("SC406", lambda: trainer.load(tmp_path / "foreign"))


# ---------------------------------------------------------------------- sync_to
@pytest.mark.sampled(4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("target", [net, on_meta])
def test_into_another_model(layout: str, target: Callable[[], Net]) -> None:
    trainer = compiled(net(), layout).launch()
    stepped(trainer)
    model = target()
    before = [id(t) for t in (*model.parameters(), *model.buffers())]
    trainer.sync_to(model)
    assert equal(dict(model.state_dict()), trainer.state_dict())
    assert torch.equal(model.mean, trainer.state["mean"])
    assert torch.equal(model.table, net().table)
    assert model.head.weight is model.fc.weight
    assert model.second_scale is model.scale
    assert (model.fc.weight.requires_grad, model.gain.requires_grad) == (True, False)
    assert [id(t) for t in (*model.parameters(), *model.buffers())] == before
    (loss,) = stepped(trainer, 1)
    if layout != "pipeline":  # whose microbatches have statistics of their own
        assert float(model(BATCH).detach()) == pytest.approx(loss, rel=1e-5)


def test_into_the_compiled_model() -> None:
    model = on_meta()
    program = compiled(model)
    trainer = program.launch(state=net().state_dict())
    losses = stepped(trainer)
    trainer.sync_to(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses += stepped(trainer)
        again = program.launch()  # it has values now
    assert program.optimizer is not None
    assert {id(p) for group in program.optimizer.param_groups for p in group["params"]} <= set(
        map(id, model.parameters())
    )
    assert again.state_dict().keys() == trainer.state_dict().keys()
    other = compiled(net()).launch()
    assert stepped(other) + stepped(other) == losses


def test_a_model_that_is_another() -> None:
    trainer = compiled(net()).launch()

    class Renamed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.fc1 = self.fc
            del self.fc
            self.norm = nn.BatchNorm1d(6)
            self.gain = self.head.weight

    model = Renamed()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    message = refusal("SC563", lambda: trainer.sync_to(model))
    for line in (
        "1 tensor of the program: the model has none of that name",
        "did you mean 'fc1.bias'?",
        "1 tensor of the model: the program has none of that name",
        "6 tensors of the model cannot take the program's values",
        "gain: in the model one tensor with head.weight",
        "norm.weight: [6] in the model, [8] in the program",
    ):
        assert line in message, message
    assert equal(dict(model.state_dict()), before)
    assert "an nn.Module, not a dict" in refusal("SC563", lambda: trainer.sync_to({}))  # type: ignore[arg-type]


def test_tied_otherwise() -> None:
    trainer = compiled(net()).launch()
    untied = net()
    untied.head = nn.Linear(4, 8, bias=False)
    trainer.sync_to(untied)
    assert torch.equal(untied.head.weight, untied.fc.weight)
    trainer = compiled(untied).launch()
    assert "in the model one tensor with head.weight" in refusal("SC563", lambda: trainer.sync_to(net()))


# ---------------------------------------------------------------------- what a launch starts from
class Uncomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.fc(x) * self.table).square().mean()


def zeros(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def test_a_buffer_is_never_zeros_by_accident(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Uncomputed()
    full = Uncomputed()
    program = shardc.compile(model, BATCH, mesh="dp=2", plan={"inputs": {"x": "dp"}})
    program.save(tmp_path / "program.json")
    loaded = shardc.Program.load(tmp_path / "program.json")
    for each in (program, loaded):
        for options in ({}, {"init": zeros}, {"state": full.state_dict()}):
            assert "'table' is in no state_dict" in refusal(
                "SC561", lambda each=each, options=options: each.launch(**options)
            )
        given = [full.state_dict(), {"table": full.table}]
        loss = float(each.launch(state=given).step(BATCH).loss)
        assert loss == pytest.approx(float(full(BATCH).detach()), rel=1e-6)
    assert "init='none' makes no tensors" in refusal("SC553", lambda: program.launch(init="none"))
    with shardc.meta_parameters():
        model = Uncomputed()
    program = shardc.compile(model, BATCH, mesh="dp=2", plan={"inputs": {"x": "dp"}})
    assert float(program.launch(state=full.state_dict()).step(BATCH).loss) == pytest.approx(loss, rel=1e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_models_own_init_is_one_in_every_layout(layout: str) -> None:
    trainers = [compiled(on_meta(), each).launch(init="model", seed=5) for each in (layout, "one")]
    assert equal(trainers[0].state_dict(), trainers[1].state_dict())
    state = trainers[0].state_dict()
    assert float(state["fc.weight"].std()) == pytest.approx(0.29, rel=0.3)  # uniform in +-1/2, as nn.Linear's
    assert torch.equal(state["norm.running_var"], torch.ones(8))
    assert torch.equal(state["scale"], torch.full((4,), 2.0))
    other = compiled(on_meta(), layout).launch(init="model", seed=6)
    assert not torch.equal(other.state_dict()["fc.weight"], state["fc.weight"])


def test_a_model_without_init(tmp_path: Path) -> None:
    class Bare(Net):
        reset_parameters = None  # type: ignore[assignment]

    with torch.device("meta"):
        model = Bare()
    program = compiled(model)
    given = {"mean": torch.zeros(4), "table": torch.zeros(8)}
    message = refusal("SC504", lambda: program.launch(state=given, init="model"))
    assert "the model does not initialise '" in message
    program.save(tmp_path / "program.json")
    loaded = shardc.Program.load(tmp_path / "program.json")
    assert "needs the model" in refusal("SC553", lambda: loaded.launch(state=given, init="model"))
