"""Options that commands share: --optimizer, --json, --fold, plans of ours; doctor; what does not fit is refused.

Longer than 400 lines: a command that lacks one of them is seen beside those that have it.
"""

from __future__ import annotations

import json
import re
import tomllib
from importlib.metadata import PathDistribution
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from typer.testing import CliRunner

import shardc
from shardc.cli import doctor, host_memory, main
from shardc.cli.optimizers import OPTIMIZERS, make_optimizer
from shardc.plan import packaged
from tests.cli.test_cli import MODEL, PLAN, ROOT, Golden, shardc_cli

PIPELINE = ["--plan", "tests/cli/mlp_pp.yaml"]
DEEP = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(32))

    def forward(self, x):
        for block in self.h:
            x = x + block(x)
        return x.square().mean()


def net():
    return Net(), torch.ones(4, 8)
"""
DEEP_PLAN = 'mesh: dp=2, tp=2\nparams:\n  "h.*.0.weight": "tp, -"\ninputs:\n  x: dp\nbucket: false\n'


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


FOLDED_ROW = re.compile(r"(\S+)\s+(?:x (\d+): (\d+) to (\d+)\s+)?(.*)")


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A program of 32 layers, compiled once."""
    folder = tmp_path_factory.mktemp("deep")
    (folder / "deep.py").write_text(DEEP)
    (folder / "deep.yaml").write_text(DEEP_PLAN)
    arguments = ["compile", f"{folder}/deep.py:net", "--plan", f"{folder}/deep.yaml", "-o", f"{folder}/deep.json"]
    assert shardc_cli(*arguments).code == 0
    return f"{folder}/deep.json"


def data(*arguments: str, code: int = 0) -> Any:
    """The one JSON document that a command prints."""
    ran = shardc_cli(*arguments, "--json")
    assert ran.code == code, ran.err
    return json.loads(ran.out)


# ---------------------------------------------------------------------- --optimizer
def test_the_optimizer_is_counted(golden: Golden) -> None:
    plain = data("cost", MODEL, *PLAN, "--memory")["memory"]["categories"]
    counted = data("cost", MODEL, *PLAN, "--memory", "--optimizer", "adamw")["memory"]["categories"]
    parameters = plain["parameters"]["stored_bytes"]
    steps = 4 * 8  # a count for each of four parameters, in float64
    assert plain["optimizer state"]["stored_bytes"] == 0
    assert counted["optimizer state"]["stored_bytes"] == 2 * parameters + steps
    ran = shardc_cli("cost", MODEL, *PLAN, "--memory", "--top", "0", "--optimizer", "adamw")
    assert "not counted" not in ran.out
    golden("cost_adamw.txt", ran.out)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_is_compiled_and_verified(name: str) -> None:
    ran = shardc_cli("verify", MODEL, *PLAN, "--optimizer", name)
    assert ran.code == 0, ran.out + ran.err
    assert "4 parameters" in ran.out


def test_the_state_of_muon_and_adafactor_is_counted() -> None:
    """Of two matrices, 64 x 16 and 16 x 64, over tp, and two vectors."""
    plain = data("cost", MODEL, *PLAN, "--memory")
    weights, biases = 2 * 64 * 16 // 2, 64 // 2 + 16  # elements a rank
    assert plain["memory"]["categories"]["parameters"]["stored_bytes"] == 4 * (weights + biases)
    muon = data("cost", MODEL, *PLAN, "--memory", "--optimizer", "muon")
    state = muon["memory"]["categories"]["optimizer state"]["stored_bytes"]
    assert state == 4 * weights + 2 * 4 * biases + 2 * 4 * 2  # one momentum; AdamW's two, and its counts
    added = [
        (c["value"], c["kind"], c["axes"], c["bytes_per_rank"]) for c in muon["collectives"] if c["phase"] == "opt"
    ]
    gathered = ["tp"], 2 * 64 * 16 // 2  # a shard in bfloat16; no two are of one shape, which would be dealt to ranks
    names = ("opt.up.weight._to_copy.all_gather", "opt.down.weight._to_copy.all_gather")
    assert added == [(name, "all_gather", *gathered) for name in names]
    rows_and_columns = 4 * ((64 // 2 + 16) + (16 + 64 // 2))
    adafactor = data("cost", MODEL, *PLAN, "--memory", "--optimizer", "adafactor")
    state = adafactor["memory"]["categories"]["optimizer state"]["stored_bytes"]
    assert state == rows_and_columns + 4 * biases + 4 * 8
    assert len(adafactor["collectives"]) > len(plain["collectives"])  # its means and norms are summed over tp


def test_muon_takes_the_matrices_of_hidden_layers() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.hidden, self.head = nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8, bias=False)
            self.frozen = nn.Linear(4, 4).requires_grad_(False)

        def get_output_embeddings(self) -> nn.Module:
            return self.head

    model = Model()
    optimizers = make_optimizer("muon", model, None)
    assert optimizers is not None
    names = {p: name for name, p in model.named_parameters()}
    of = [[names[p] for group in o.param_groups for p in group["params"]] for o in optimizers]
    assert [type(o).__name__ for o in optimizers] == ["Muon", "AdamW"]
    assert of == [["hidden.weight"], ["embed.weight", "hidden.bias", "head.weight"]]
    (only,) = make_optimizer("muon", nn.Linear(4, 4, bias=False), 0.5) or []
    assert (type(only).__name__, only.param_groups[0]["lr"]) == ("Muon", 0.5)


@pytest.mark.parametrize("command", ["cost", "compile", "verify", "run", "explain", "timeline"])
def test_an_unknown_optimizer_lists_the_names(command: str) -> None:
    ran = shardc_cli(command, MODEL, *PLAN, "--optimizer", "lion")
    assert ran.code == main.BAD_INPUT
    assert "error[SC105 bad-target]: there is no --optimizer lion" in ran.err
    assert all(name in ran.err for name in OPTIMIZERS)


def test_a_plan_that_clips_wants_an_optimizer(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text((ROOT / PLAN[1]).read_text() + "clip_grad_norm: 1.0\n")
    ran = shardc_cli("compile", MODEL, "--plan", str(plan))
    assert ran.code == main.BAD_INPUT
    assert "SC228" in ran.err
    assert "--optimizer" in ran.err
    assert shardc_cli("compile", MODEL, "--plan", str(plan), "--optimizer", "adamw").code == 0


def test_run_trains_by_the_optimizer() -> None:
    """The losses are those of torch's own optimizer on one device."""
    ran = shardc_cli("run", MODEL, *PLAN, "--optimizer", "adamw", "--lr", "0.01", "--steps", "3")
    losses = [float(line.split()[-1]) for line in ran.out.splitlines()]
    from shardc.cli.targets import Target, load

    target = load(MODEL)
    assert isinstance(target, Target)
    optimizer = torch.optim.AdamW(target.model.parameters(), lr=0.01)
    expected: list[float] = []
    assert target.loss is not None
    for _ in range(3):
        loss = target.loss(target.model(**target.batch), target.batch)
        expected.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses == pytest.approx(expected, abs=2e-6)


@pytest.mark.slow
@pytest.mark.long  # `test_cli.py` starts processes that train without one
def test_processes_train_by_the_optimizer_too() -> None:
    command = ["run", MODEL, "--steps", "2", *PLAN, "--mesh", "dp=1,tp=2", "--optimizer", "momentum"]
    real = shardc_cli(*command, "--nproc", "2")
    assert real.code == 0, real.err
    assert real.out == shardc_cli(*command).out


def test_run_says_what_it_leaves_out(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text((ROOT / PLAN[1]).read_text() + "storage: {zero: 1, axes: [dp]}\nfuse: true\n")
    ran = shardc_cli("run", MODEL, "--plan", str(plan), "--steps", "1")
    assert ran.code == 0
    assert "note: storage.zero: 1: there is no optimizer" in ran.err
    assert "note: fuse: CPUs run the kernels' references" in ran.err
    ran = shardc_cli("run", MODEL, "--plan", str(plan), "--steps", "1", "--optimizer", "adamw")
    assert "storage" not in ran.err


def test_a_saved_program_has_its_optimizer_or_none(tmp_path: Path) -> None:
    path = tmp_path / "program.json"
    assert shardc_cli("compile", MODEL, *PLAN, "--optimizer", "sgd", "-o", str(path)).code == 0
    assert "--optimizer" in shardc_cli("cost", str(path), "--optimizer", "sgd").err
    assert shardc_cli("run", str(path), "--steps", "2").code == 0


# ---------------------------------------------------------------------- --json
def test_the_summary_as_json() -> None:
    said = data("compile", MODEL, *PLAN, "--verify")
    assert said["mesh"] == {"dp": 2, "tp": 2}
    assert said["ranks"] == 4
    assert said["verify"]["ok"] is True
    assert said["parameters"]["sharded"] == 3
    assert [c["number"] for c in said["collectives"]] == list(range(3))
    assert said["flops_per_rank"]["total"] == sum(
        said["flops_per_rank"][p] for p in ("forward", "backward", "optimizer")
    )


def test_explain_as_json() -> None:
    listed = data("explain", MODEL, *PLAN)["collectives"]
    one = data("explain", MODEL, "0", *PLAN)
    assert one["collective"].items() <= listed[0].items()
    assert one["changes"]
    assert one["text"].startswith("%down.linear.all_reduce: ")


def test_kernels_as_json(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text((ROOT / PLAN[1]).read_text() + "fuse: true\n")
    said = data("explain", MODEL, "--plan", str(plan), "--kernels")
    assert said["kernels"]
    one = data("explain", MODEL, said["kernels"][0]["name"], "--plan", str(plan))
    assert one["kernel"] == said["kernels"][0]


def test_a_pipeline_as_json() -> None:
    said = data("compile", MODEL, *PIPELINE)
    assert said["pipeline"]["axis"] == "pp"
    assert said["transfers"]
    assert "from_stage" in data("explain", MODEL, said["transfers"][0]["name"], *PIPELINE)["transfer"]
    assert data("timeline", MODEL, *PIPELINE)["events"]
    assert len(data("cost", MODEL, *PIPELINE, "--memory")["memory"]["ranks"]) == said["pipeline"]["stages"]


def test_verify_and_run_as_json() -> None:
    assert data("verify", MODEL, *PLAN)["rows"]
    assert len(data("run", MODEL, *PLAN, "--steps", "2")["losses"]) == 2


def test_errors_as_json_have_their_code() -> None:
    said = data("compile", MODEL, "--plan", "none.yaml", code=2)
    assert said["diagnostics"][0]["code"] == "SC208"
    ran = shardc_cli("compile", MODEL, *PLAN, "--json", "--emit", "text")
    assert (ran.code, json.loads(ran.out)["diagnostics"][0]["code"]) == (2, "SC105")


# ---------------------------------------------------------------------- --fold
def test_explain_of_32_layers_fits_a_terminal(deep: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    folded, whole = shardc_cli("explain", deep, "--fold"), shardc_cli("explain", deep)
    lines = folded.out.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 80
    assert any("h.0 to 31: x 32 layers" in line for line in lines)
    assert len(whole.out.splitlines()) > 150, "what goes to a pipe is not folded"
    assert whole.out == shardc_cli("explain", deep, "--no-fold").out


def test_numbers_of_a_folded_list_are_those_of_its_layer(deep: str) -> None:
    listed = json.loads(shardc_cli("explain", deep, "--json").out)["collectives"]
    by_number = {c["number"]: c for c in listed}
    shown = [line.split() for line in shardc_cli("explain", deep, "--fold").out.splitlines()]
    rows = [cells for cells in shown if cells and cells[0].isdecimal()]
    assert rows
    for number, name, *_ in rows:
        value = by_number[int(number)]["value"]
        assert value.endswith(name.lstrip("%").removeprefix("d."))
        assert by_number[int(number)]["layer"] in (
            "",
            "h.0",
            "h.1",
            "h.2",
        )  # the last layers' products cover each other's


def test_text_to_a_terminal_folds_and_to_a_file_does_not(deep: str, tmp_path: Path) -> None:
    folded, whole = (
        shardc_cli("compile", deep, "--emit", "text", "--fold"),
        shardc_cli("compile", deep, "--emit", "text"),
    )
    assert "--no-fold prints all" in folded.out.splitlines()[0]
    assert len(folded.out.splitlines()) < len(whole.out.splitlines()) / 4
    shardc.parse(whole.out + "\n")
    path = tmp_path / "out.txt"
    assert shardc_cli("compile", deep, "-o", str(path)).code == 0
    assert path.read_text().rstrip() == whole.out.rstrip()
    refused = shardc_cli("compile", deep, "-o", str(path), "--fold")
    assert (refused.code, "SC105" in refused.err) == (2, True)


def test_the_largest_values_fold(deep: str) -> None:
    def rows(*options: str) -> list[str]:
        printed = shardc_cli("cost", deep, "--memory", "--top", "999", *options).out
        return printed[printed.index("largest at the peak") :].split("\n\n")[0].splitlines()[1:]

    folded, whole = rows("--fold"), rows()
    unfolded: list[str] = []
    for line in folded:
        name, count, first, last, rest = FOLDED_ROW.fullmatch(line).groups("")  # type: ignore[union-attr]
        layers = range(int(first), int(last) + 1) if count else [""]
        assert not count or len(layers) == int(count)
        unfolded += [f"{name.replace('*', str(layer), 1)} {' '.join(rest.split())}" for layer in layers]
    assert sorted(unfolded) == sorted(" ".join(line.split()) for line in whole)
    assert len(folded) < len(whole) / 8
    plain = shardc_cli("cost", "examples/mlp.py:mlp", "--memory", "--fold").out
    assert "layers" not in plain, "a model without layers has no column of them"


def test_one_ranks_view_folds(deep: str) -> None:
    folded, whole = shardc_cli("compile", deep, "--rank", "1", "--fold"), shardc_cli("compile", deep, "--rank", "1")
    assert "x 32 layers: h.0 to 31, all as h.0" in folded.out
    assert len(folded.out.splitlines()) < len(whole.out.splitlines()) / 4


# ---------------------------------------------------------------------- what does not fit
def test_what_does_not_fit_this_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available", lambda: 100)
    for command in (["verify"], ["run"], ["compile", "--verify"]):
        ran = shardc_cli(command[0], MODEL, *PLAN, *command[1:])
        assert (ran.code, ran.err.startswith("error[SC517 host-memory]")) == (2, True), ran.err
    assert shardc_cli("compile", MODEL, *PLAN).code == 0, "compiling holds no weights"
    assert shardc_cli("cost", MODEL, *PLAN).code == 0


def test_a_large_model_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")

    def made(tensor: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        assert tensor.is_meta, "weights were made"
        return tensor

    monkeypatch.setattr(host_memory, "available", lambda: 2**34)
    monkeypatch.setattr(nn.init, "normal_", made)
    target = "hf:llama?num_hidden_layers=80&hidden_size=8192&intermediate_size=28672"
    ran = shardc_cli("run", target, "--plan", "shardc:llama")
    assert ran.code == 2
    assert "SC517" in ran.err
    assert "and this host has 16 GiB free" in ran.err


def test_what_is_free_is_what_the_container_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path)
    host = host_memory.available()
    assert host is not None
    assert host > 2**20
    for name, text in {
        "memory.max": "1000\n",
        "memory.current": "600\n",
        "memory.stat": "anon 3\ninactive_file 50\n",
    }.items():
        (tmp_path / name).write_text(text)
    assert host_memory.available() == 450
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory.available() == pytest.approx(host, rel=0.5)


# ---------------------------------------------------------------------- plans of ours
def test_a_plan_goes_by_its_name() -> None:
    assert shardc_cli("compile", MODEL, "--plan", "shardc:mlp").out == shardc_cli("compile", MODEL, *PLAN).out
    assert shardc.Plan.load("shardc:gpt2").params == shardc.Plan.load(ROOT / "configs/plans/gpt2.yaml").params
    ran = shardc_cli("compile", MODEL, "--plan", "shardc:mlpp")
    assert (ran.code, "did you mean 'mlp'?" in ran.err) == (2, True)


def test_a_wheel_brings_the_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    files = sorted((ROOT / "configs/plans").glob("*.yaml"))
    (pattern,) = project["tool"]["setuptools"]["data-files"]["share/shardc/plans"]
    assert sorted(ROOT.glob(pattern)) == files
    folder = tmp_path / "share/shardc/plans"
    folder.mkdir(parents=True)
    for path in files:
        (folder / path.name).write_text(path.read_text())
    info = tmp_path / "lib" / "site-packages" / "shardc-0.dist-info"
    info.mkdir(parents=True)
    (info / "RECORD").write_text("".join(f"../../share/shardc/plans/{path.name},,\n" for path in files))
    monkeypatch.setattr(packaged, "distribution", lambda name: PathDistribution(info))
    monkeypatch.setattr(packaged, "REPOSITORY", tmp_path / "none")
    assert list(packaged.packaged("plans")) == [path.stem for path in files]
    assert shardc.Plan.load("shardc:llama").mesh == shardc.Plan.load(ROOT / "configs/plans/llama.yaml").mesh


# ---------------------------------------------------------------------- doctor
def test_doctor_says_what_there_is() -> None:
    said = data("doctor")
    assert said["versions"]["shardc"] == shardc.__version__
    assert said["versions"]["torch"] in torch.__version__ or torch.__version__ in said["versions"]["torch"]
    assert "shardc:gpt2" in said["chosen"]["plans"]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    assert len(said["devices"]) == count
    assert said["chosen"]["ranks under torchrun"] == ("NCCL on GPUs" if count else "gloo on CPUs")
    text = shardc_cli("doctor").out
    assert all(f"\n{part}\n" in f"\n{text}" for part in said)


def test_doctor_on_a_host_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """What CUDA would answer is given: two H200, linked."""
    card = SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
    answers = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_properties": lambda index: card,
        "get_device_name": lambda index: card.name,
        "mem_get_info": lambda index: (100 * 2**30, 141 * 2**30),
        "can_device_access_peer": lambda a, b: True,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(doctor.nccl, "version", lambda: (2, 27, 3))
    said = doctor.examine()
    assert said["devices"][1] == "cuda:1  NVIDIA H200  sm_90  100 GiB free of 141 GiB"
    assert said["links"] == ["cuda:0  peer access to cuda:1", "cuda:1  peer access to cuda:0"]
    assert said["versions"]["nccl"] == "2.27.3"
    chosen = said["chosen"]
    assert chosen["ranks under torchrun"] == "NCCL on GPUs"
    assert chosen["hardware of a plan"] == "write hardware: h200"
    assert chosen["kernels' schedules"] == "measured on NVIDIA H200"
    assert chosen["kernels (fuse: true)"] == "Triton"


def test_doctor_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.4.0+cpu")
    monkeypatch.setattr(doctor, "HAS_TRITON", False)
    said = doctor.examine()
    assert any("2.4.0+cpu is not one of those that shardc is tested with: 2.11 to 2.13" in p for p in said["problems"])
    assert said["chosen"]["kernels (fuse: true)"] == "references in plain torch (no Triton)"


def test_version_and_no_command() -> None:
    assert shardc_cli("--version").out == f"shardc {shardc.__version__}"
    runner = CliRunner().invoke(main.app, [], prog_name="shardc")
    assert "Commands:" in runner.output


def test_tune_as_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from kernels_triton.gate import tuning

    monkeypatch.setattr(tuning, "table", lambda only, seconds: "device: X\nschedules: {}\n")
    assert data("tune") == {"device": "X", "schedules": {}}
    path = tmp_path / "table.yaml"
    assert data("tune", "-o", str(path)) == yaml.safe_load(path.read_text())
