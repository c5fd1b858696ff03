"""What a user can get wrong, through the doors that users come in by, and what they are told, word for word.

Each case raises or prints a diagnostic with a code, a place and a way out.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typer.testing import CliRunner

import shardc
from shardc import Mesh, Plan, ShardcError
from shardc.cli.main import app

ROOT = Path(__file__).parent.parent.parent
MESH = Mesh(dp=2, tp=2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).pow(2).sum()


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.conv(images)).sum()


class Mixes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x.float()).sum()


class Interpolates(Mixes):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.lerp(self.up.weight.float(), self.up.weight, 0.5).sum() + x.sum()


class Branches(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


class Picks(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[x[:, 0] > 0].cumsum(0))


class Renorms(Net):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.head.weight
        return super().forward(x) + torch.renorm(weight, 2, 0, 1.0).sum()


class Prints(Net):
    def forward(self, x: Tensor) -> Any:
        return float(super().forward(x))


class Number(Net):
    def forward(self, x: Tensor) -> Any:
        super().forward(x)
        return 0.5


class Remembers(Net):
    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.last is not None:
            x = x + self.last
        self.last = x.detach()
        return super().forward(x)


class Averages(Net):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(16)

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.mean(0), 0.1)
        return super().forward(x - self.mean)


def batch() -> Tensor:
    return torch.randn(8, 16)


def yaml(text: str, model: type[nn.Module] = Net, *, strict: bool = False, **sample: Tensor) -> shardc.Program:
    """Compile with a plan as it stands in a file."""
    given: Any = sample or batch()
    return shardc.compile(model(), given, mesh=MESH, plan=Plan.parse(text, "plan.yaml"), strict=strict)


def images(text: str) -> shardc.Program:
    return yaml(text, Conv, strict=True, images=torch.randn(4, 3, 8, 8))


def strict(model: nn.Module) -> shardc.Program:
    return shardc.compile(model, batch(), mesh=MESH, plan={"inputs": {"x": "dp"}}, strict=True)


def losing(loss: Any) -> shardc.Program:
    return shardc.compile(Net(), batch(), mesh=MESH, plan={"inputs": {"x": "dp"}}, loss=loss)


def misnamed() -> shardc.Program:
    batch_with_labels = {"x": batch(), "label": torch.ones(())}
    return shardc.compile(Net(), batch_with_labels, mesh=MESH, loss=lambda output, _: output.mean())


def program() -> shardc.Program:
    return yaml('inputs:\n  x: "dp"')


NORM = 'inputs:\n  x: "dp"\nparams:\n  "blocks.*.norm.weight": "tp"'
CASES: dict[str, tuple[str, Callable[[], object]]] = {
    "unknown_axis": ("SC201", lambda: yaml('params:\n  "blocks.*.up.weight": "tq, -"')),
    "glob_matches_nothing": ("SC202", lambda: yaml('params:\n  "block.*.up.weight": "tp, -"')),
    "module_matches_nothing": ("SC202", lambda: yaml('activations:\n  blocks.2: "dp, -"')),
    "axis_used_twice": ("SC204", lambda: yaml('params:\n  "blocks.*.up.weight": "tp, tp"')),
    "too_many_dims": ("SC205", lambda: yaml('params:\n  "blocks.*.up.weight": "tp, -, -"')),
    "too_many_dims_activation": ("SC205", lambda: yaml('activations:\n  blocks.0: "dp, -, tp"')),
    "conflicting_annotations": (
        "SC206",
        lambda: yaml('params:\n  "blocks.*.up.weight": "tp, -"\n  "block*.0.up.weight": "-, tp"'),
    ),
    "conv_kernel_dim": ("SC209", lambda: images('inputs:\n  images: "dp"\nparams:\n  conv.weight: "-, -, tp, -"')),
    "conv_spatial_dim": ("SC209", lambda: images('inputs:\n  images: "dp, -, -, tp"')),
    "layer_norm_weight": ("SC209", lambda: yaml(NORM, strict=True)),
    "plan_key": ("SC208", lambda: yaml('parms:\n  "blocks.*.up.weight": "tp, -"')),
    "placement_text": ("SC212", lambda: yaml('params:\n  "blocks.*.up.weight": "tp; -"')),
    "mesh": ("SC210", lambda: shardc.compile(Net(), batch(), mesh={"tp": 0})),
    "control_flow": ("SC101", lambda: yaml('inputs:\n  x: "dp"', Branches)),
    "data_dependent_shape": ("SC101", lambda: yaml('inputs:\n  x: "dp"', Picks)),
    "mixed_dtypes": ("SC104", lambda: yaml("precision: bf16", Mixes)),
    "mixed_dtypes_found_by_torch": ("SC104", lambda: yaml("precision: bf16", Interpolates)),
    "kept_matches_nothing": ("SC202", lambda: yaml("precision: {compute: bf16, keep: blok}", Mixes)),
    "no_rule_under_strict": ("SC301", lambda: strict(Renorms())),
    "model_fails": ("SC104", lambda: shardc.compile(Net(), torch.randn(8, 15), mesh=MESH)),
    "batch_does_not_fit_forward": ("SC103", lambda: shardc.compile(Net(), {"y": batch()}, mesh=MESH)),
    "loss_is_no_scalar": (
        "SC102",
        lambda: shardc.compile(nn.Linear(16, 4), batch(), mesh=MESH, loss=lambda output, _: output),
    ),
    "loss_is_a_float": ("SC102", lambda: losing(lambda output, _: 0.5)),
    "loss_is_none": ("SC102", lambda: losing(lambda output, _: None)),
    "loss_calls_item": ("SC101", lambda: losing(lambda output, _: output.item())),
    "loss_is_no_function": ("SC102", lambda: losing(7)),
    "loss_takes_one_argument": ("SC102", lambda: losing(lambda output: output)),
    "model_returns_a_float": ("SC101", lambda: yaml("", Prints)),
    "model_returns_no_tensor": ("SC102", lambda: yaml("", Number)),
    "labels_without_a_loss": ("SC103", lambda: shardc.compile(Net(), {"x": batch(), "labels": batch()}, mesh=MESH)),
    "input_that_nobody_reads": ("SC103", misnamed),
    "batch_is_none": ("SC103", lambda: shardc.compile(Net(), None, mesh=MESH)),
    "batch_is_numpy": ("SC103", lambda: shardc.compile(Net(), {"x": batch().numpy()}, mesh=MESH)),
    "model_is_a_function": ("SC110", lambda: shardc.compile(lambda x: x, batch(), mesh=MESH)),  # type: ignore[arg-type]
    "model_is_a_class": ("SC110", lambda: shardc.compile(Net, batch(), mesh=MESH)),  # type: ignore[arg-type]
    "annotated_function": ("SC110", lambda: shardc.annotate(lambda x: x, {})),  # type: ignore[arg-type]
    "plan_is_a_number": ("SC208", lambda: shardc.compile(Net(), batch(), mesh=MESH, plan=7)),  # type: ignore[arg-type]
    "verify_in_integers": ("SC508", lambda: program().verify(dtype=torch.int32)),
    "state_carried_in_python": ("SC109", lambda: strict(Remembers())),
    "plain_tensor_changed_in_place": ("SC109", lambda: yaml("", Averages)),
    "nothing_placed_under_strict": ("SC215", lambda: shardc.compile(Net(), batch(), mesh=MESH, strict=True)),
    "problems_of_every_kind": (
        "SC202",
        lambda: yaml(
            'params:\n  nothing: "tp"\n  head.bias: "tp, -"\ninputs:\n  y: "dp"\n  x: "pp"\n'
            'activations:\n  block.0: "dp"\n  "blocks.*": "-, -, -"'
        ),
    ),
    "simulated_batch_shape": ("SC501", lambda: program().simulate(torch.randn(8, 15))),
    "simulated_batch_dtype": ("SC501", lambda: program().simulate(torch.ones(8, 16, dtype=torch.int64))),
    "stepped_batch_shape": ("SC501", lambda: program().launch().step(torch.randn(8, 16, 1))),
    "batch_without_its_input": ("SC501", lambda: program().simulate({"y": batch()})),
    "over_budget": ("SC213", lambda: yaml('budget:\n  dp: 1KiB\ninputs:\n  x: "dp"')),
}


UNDER_STRICT = (  # warnings otherwise
    *("state_carried_in_python", "nothing_placed_under_strict"),
    *("conv_kernel_dim", "conv_spatial_dim", "layer_norm_weight"),
)


@pytest.mark.parametrize("case", CASES)
def test_compile(case: str, golden: Callable[[str, str], None]) -> None:
    code, act = CASES[case]
    with pytest.raises(ShardcError) as raised:
        act()
    first = raised.value.diagnostics[0]
    assert first.code == code
    assert first.severity == ("warning" if case in UNDER_STRICT else "error")
    assert first.hint
    golden(f"bad_input/{case}.txt", _clean(str(raised.value)))


@pytest.mark.parametrize("case", ["cut_short", "cut_in_the_middle", "altered", "other_file", "version"])
def test_program_files(case: str, tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    path = tmp_path / "program.json"
    program().save(path)
    text = path.read_text()
    path.write_text(
        {
            "cut_short": text[:-2],
            "cut_in_the_middle": text[: len(text) // 2],
            "altered": text.replace('"dp"', '"tp"', 1),
            "other_file": "mesh: dp=2\n",
            "version": re.sub(r'"version": \d+', '"version": 99', text),
        }[case]
    )
    with pytest.raises(ShardcError) as raised:
        shardc.Program.load(path)
    first = raised.value.diagnostics[0]
    assert first.location == str(path)
    assert first.hint
    said = _clean(str(raised.value)).replace(str(tmp_path), "")
    golden(f"bad_input/file_{case}.txt", re.sub(r"after \d+ characters", "after N characters", said))


@pytest.mark.parametrize(
    ("case", "plan", "options"),
    [
        ("cli_unknown_axis", 'mesh: dp=2, tp=2\nparams:\n  up.weight: "tq, -"\n', []),
        ("cli_mesh_without_axis", 'params:\n  up.weight: "tp, -"\n', ["--mesh", "dp=4"]),
        ("cli_mesh_text", 'params:\n  up.weight: "tp, -"\n', ["--mesh", "dp4"]),
        ("cli_several_at_once", 'mesh: tp=2\nparams:\n  ip.weight: "tp"\n  up.bias: "tp, -"\ninputs:\n  y: "tp"\n', []),
    ],
)
def test_command_line(
    case: str,
    plan: str,
    options: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    golden: Callable[[str, str], None],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plan.yaml").write_text(plan)
    target = f"{ROOT}/examples/mlp.py:mlp"
    result = CliRunner().invoke(app, ["compile", target, "--plan", "plan.yaml", *options])
    assert result.exit_code == 2
    assert result.stdout == ""
    golden(f"bad_input/{case}.txt", _clean(result.stderr))


def _clean(text: str) -> str:
    return text.replace(f"{ROOT}/", "")
