"""Every command, every form of output, every exit code: golden text, from the repository's own examples."""

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import pytest
import typer
from typer.testing import CliRunner

import shardc
from shardc.cli import commands, main
from shardc.ir.diagnostic import error
from shardc.runtime.oracle.report import TOLERANCE
from tests.distributed.ranks import fork_ranks

ROOT = Path(__file__).parent.parent.parent
MODEL = "examples/mlp.py:mlp"
PLAN = ["--plan", "configs/plans/mlp.yaml"]
Golden = Callable[[str, str], None]


@dataclass
class Ran:
    code: int
    out: str
    err: str


def shardc_cli(*args: str) -> Ran:
    result = CliRunner().invoke(main.app, list(args), prog_name="shardc")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return Ran(result.exit_code, _clean(result.stdout), _clean(result.stderr))


def _clean(text: str) -> str:
    """Paths as seen from the repository, and tables whatever the length of those paths was."""
    text = re.sub("─+", "───", text.replace(f"{ROOT}/", ""))
    return "\n".join(line.rstrip() for line in text.splitlines())


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("cli") / "mlp.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        assert shardc_cli("compile", MODEL, *PLAN, "-o", str(path)).code == 0
    return str(path)


# ---------------------------------------------------------------------- compile
def test_summary(golden: Golden) -> None:
    ran = shardc_cli("compile", MODEL, *PLAN)
    assert (ran.code, ran.err) == (0, "")
    golden("summary.txt", ran.out)


@pytest.mark.parametrize("form", ["text", "python", "dot"])
def test_emit(form: str, golden: Golden) -> None:
    ran = shardc_cli("compile", MODEL, *PLAN, "--emit", form)
    assert ran.code == 0
    assert "4 ranks" in ran.err, "the summary makes way for the program"
    golden(f"emit_{form}.txt", ran.out)


def test_emitted_text_parses_back() -> None:
    ran = shardc_cli("compile", MODEL, *PLAN, "--emit", "text")
    assert "all_reduce" in ran.out
    shardc.parse(ran.out + "\n")


def test_emitted_json_is_a_program(tmp_path: Path) -> None:
    ran = shardc_cli("compile", MODEL, *PLAN, "--emit", "json")
    assert json.loads(ran.out)["format"] == "shardc-program"


@pytest.mark.parametrize(
    ("suffix", "start"),
    [(".json", '{\n"format"'), (".py", "# 'step' for mesh"), (".dot", "digraph"), (".txt", "# batch: ")],
)
def test_the_suffix_tells_the_form(suffix: str, start: str, tmp_path: Path) -> None:
    path = tmp_path / f"out{suffix}"
    ran = shardc_cli("compile", MODEL, *PLAN, "-o", str(path))
    assert ran.code == 0
    assert "4 ranks" in ran.out
    assert path.read_text().startswith(start)


def test_print_after(golden: Golden) -> None:
    ran = shardc_cli("compile", MODEL, *PLAN, "--print-after", "propagate")
    assert ran.code == 0
    golden("print_after.txt", ran.out)


def test_print_after_several_passes() -> None:
    ran = shardc_cli("compile", MODEL, *PLAN, "--print-after", "normalize", "--print-after", "localize")
    assert [line for line in ran.out.splitlines() if line.startswith("#")] == ["# after normalize", "# after localize"]


def test_diff(golden: Golden) -> None:
    ran = shardc_cli("compile", MODEL, *PLAN, "--diff", "--print-after", "lower_reshards")
    assert ran.code == 0
    golden("diff.txt", ran.out)


def test_diff_of_all_passes() -> None:
    ran = shardc_cli("compile", MODEL, *PLAN, "--diff")
    heads = [line for line in ran.out.splitlines() if line.startswith("+++ ")]
    assert "+++ insert_reshards" in heads
    assert "+++ lower_reshards" in heads


def test_rank(golden: Golden) -> None:
    ran = shardc_cli("compile", MODEL, *PLAN, "--rank", "3")
    assert ran.code == 0
    golden("rank.txt", ran.out)


def test_module_filter() -> None:
    ran = shardc_cli("compile", MODEL, *PLAN, "--emit", "text", "--module-filter", "down")
    assert "%down.linear =" in ran.out
    assert "%up.linear =" not in ran.out


def test_compile_and_verify() -> None:
    ran = shardc_cli("compile", MODEL, *PLAN, "--verify")
    assert ran.code == 0
    assert "4 ranks in float64: equal to the single device" in ran.out


def test_the_mesh_of_the_command_line_wins() -> None:
    ran = shardc_cli("compile", MODEL, *PLAN, "--mesh", "dp=1,tp=8")
    assert ran.out.startswith("8 ranks, mesh dp=1, tp=8")


def test_a_hugging_face_configuration(tmp_path: Path) -> None:
    ran = shardc_cli("compile", "hf:gpt2?n_layer=1&vocab_size=64", "--plan", "configs/plans/gpt2.yaml", "--verify")
    assert ran.code == 0, ran.err
    assert "16 parameters" in ran.out
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 32}))
    ran = shardc_cli("compile", f"hf:{config}", "--plan", "configs/plans/gpt2.yaml")
    assert ran.code == 0, ran.err


# ---------------------------------------------------------------------- explain, verify, run
def test_explain_lists(golden: Golden) -> None:
    ran = shardc_cli("explain", MODEL, *PLAN)
    assert ran.code == 0
    golden("explain_list.txt", ran.out)


def test_explain(golden: Golden) -> None:
    ran = shardc_cli("explain", MODEL, "down.linear.all_reduce", *PLAN)
    assert ran.code == 0
    golden("explain.txt", ran.out)


def test_explain_lists_kernels(golden: Golden, tmp_path: Path) -> None:
    """And where there are none, what to write."""
    plan = tmp_path / "plan.yaml"
    plan.write_text((ROOT / PLAN[1]).read_text() + "fuse: {exclude: [gelu_backward]}\n")
    ran = shardc_cli("explain", MODEL, "--plan", str(plan), "--kernels")
    assert ran.code == 0
    golden("explain_kernels.txt", ran.out)
    assert shardc_cli("explain", MODEL, *PLAN, "--kernels").out == "no call is fused: write fuse: true in the plan"


def test_cost(golden: Golden) -> None:
    ran = shardc_cli("cost", MODEL, *PLAN, "--memory", "--top", "3")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith(shardc_cli("cost", MODEL, *PLAN).out.rstrip())
    golden("cost.txt", ran.out)


def test_verify() -> None:
    ran = shardc_cli("verify", MODEL, *PLAN)
    assert ran.code == 0
    assert ran.out.startswith("4 ranks in float64: equal to the single device")


def test_run_simulates() -> None:
    ran = shardc_cli("run", MODEL, *PLAN, "--steps", "3", "--lr", "0.5")
    assert ran.code == 0
    losses = [float(line.split()[-1]) for line in ran.out.splitlines()]
    assert len(losses) == 3
    assert losses[0] > losses[1] > losses[2]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["forked", pytest.param("anew", marks=pytest.mark.long)])
def test_run_in_processes_agrees_with_the_simulation(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "forked":
        fork_ranks(monkeypatch)
    command = ["run", MODEL, "--steps", "3", *PLAN, "--mesh", "dp=1,tp=2"]
    simulated = shardc_cli(*command)
    real = shardc_cli(*command, "--nproc", "2")
    assert real.code == 0, real.err
    assert real.out == simulated.out


def test_a_saved_program_is_a_target(saved: str) -> None:
    summary = shardc_cli("compile", saved)
    assert (summary.code, summary.out) == (0, shardc_cli("compile", MODEL, *PLAN).out)
    assert shardc_cli("explain", saved, "0").out == shardc_cli("explain", MODEL, "0", *PLAN).out
    assert shardc_cli("verify", saved).code == 0
    assert shardc_cli("run", saved, "--steps", "1").code == 0


# ---------------------------------------------------------------------- exit codes
BAD_INPUT: dict[str, list[str]] = {
    "no_file": ["compile", "examples/none.py:mlp", *PLAN],
    "no_factory": ["compile", "examples/mlp.py:mpl", *PLAN],
    "no_colon": ["compile", "examples/mlp.py", *PLAN],
    "what_is_it": ["compile", "mlp", *PLAN],
    "no_model_type": ["compile", "hf:gtp2", *PLAN],
    "no_config_key": ["compile", "hf:gpt2?n_layers=2", *PLAN],
    "no_plan_file": ["compile", MODEL, "--plan", "configs/plans/none.yaml"],
    "no_mesh": ["compile", MODEL],
    "no_pass": ["compile", MODEL, *PLAN, "--print-after", "propagates"],
    "no_rank": ["compile", MODEL, *PLAN, "--rank", "4"],
    "no_collective": ["explain", MODEL, "down.linear.reduce", *PLAN],
    "no_folder": ["compile", MODEL, *PLAN, "-o", "none/program.json"],
    "unknown_suffix": ["compile", MODEL, *PLAN, "-o", "program.jsn"],
    "negative_lr": ["run", MODEL, *PLAN, "--lr", "-1"],
    "lr_that_is_no_number": ["run", MODEL, *PLAN, "--lr", "nan"],
    "wrong_nproc": ["run", MODEL, *PLAN, "--nproc", "2"],
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_a_diagnostic_and_exit_code_2(case: str, golden: Golden) -> None:
    ran = shardc_cli(*BAD_INPUT[case])
    assert ran.code == 2
    assert "Traceback" not in ran.err
    golden(f"bad/{case}.txt", ran.err)


def test_a_saved_program_is_not_compiled_again(saved: str) -> None:
    ran = shardc_cli("compile", saved, *PLAN)
    assert ran.code == 2
    assert "is compiled already" in ran.err


def test_usage_errors_exit_with_2() -> None:
    assert shardc_cli("compile").code == 2
    assert shardc_cli("compile", MODEL, "--emit", "html").code == 2
    assert shardc_cli("nothing").code == 2


def test_a_mismatch_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    # Below zero even what is bitwise equal counts as different.
    monkeypatch.setattr("shardc.runtime.oracle.verify.TOLERANCE", dict.fromkeys(TOLERANCE, -1.0))
    monkeypatch.setattr("shardc.runtime.oracle.verify.rounding", lambda *_: {})
    ran = shardc_cli("verify", MODEL, *PLAN)
    assert ran.code == 1
    assert "DIFFERENT from the single device" in ran.out


@pytest.mark.parametrize(
    ("failure", "says"),
    [
        (error("SC502", "rank 1 died"), "SC502 dead-rank"),
        (RuntimeError("oh no"), "a fault of shardc, not of your input"),
    ],
)
def test_failures_while_running_exit_with_3(failure: Exception, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr(commands, "run_processes", fail)
    ran = shardc_cli("run", MODEL, *PLAN, "--nproc", "4")
    assert ran.code == 3
    assert says in ran.err


def test_a_factory_that_fails_is_the_users_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("def make():\n    return {}['model']\n")
    ran = shardc_cli("compile", f"{path}:make", *PLAN)
    assert ran.code == 2
    assert "make() failed: KeyError: 'model'" in ran.err
    assert f"--> {path}:2" in ran.err


def test_the_console_script_of_a_process() -> None:
    """The exit code and the streams as a shell sees them."""
    code = "from shardc.cli.main import app; app()"
    done = subprocess.run(
        [sys.executable, "-c", code, "compile", "nothing.py:f"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error[SC105 bad-target]")


# ---------------------------------------------------------------------- the surface
def test_the_surface_is_frozen(golden: Golden) -> None:
    """Commands, arguments, options and defaults. Whoever changes them changes what people's scripts mean."""
    lines: list[str] = []
    for command in main.app.registered_commands:
        assert command.callback is not None
        lines.append(command.name or command.callback.__name__)
        for name, param in inspect.signature(command.callback, eval_str=True).parameters.items():
            kind, said = get_args(param.annotation)
            what = "argument" if isinstance(said, typer.models.ArgumentInfo) else "option"
            # Inside Annotated, typer keeps the first name given where a default would be.
            given = [word for word in (said.default, *(said.param_decls or ())) if isinstance(word, str)]
            words = " ".join(given or [("--" if what == "option" else "") + name.replace("_", "-")])
            kind = kind.__name__ if isinstance(kind, type) else str(kind).replace("pathlib._local.", "pathlib.")
            default = "required" if param.default is inspect.Parameter.empty else f"default {param.default}"
            lines.append(f"  {what} {words}: {kind}, {default}")
    golden("surface.txt", "\n".join(lines))


@pytest.mark.parametrize("command", ["", "compile", "explain", "cost", "verify", "run"])
def test_help_documents_exit_codes(command: str) -> None:
    ran = shardc_cli(*filter(None, [command]), "--help")
    assert ran.code == 0
    assert "Exit codes: 0 ok; 1 the program differs from the single device, or costs more than its lock;" in ran.out
    assert "2 bad input; 3 a failure while running." in ran.out


# ---------------------------------------------------------------------- evaluation
def test_an_evaluation_is_compiled_verified_saved_and_run_from_its_file(tmp_path: Path) -> None:
    ran = shardc_cli("compile", MODEL, *PLAN, "--mode", "eval", "--verify", "-o", str(tmp_path / "eval.json"))
    assert ran.code == 0
    assert "bwd" not in ran.out
    assert "equal to the single device" in ran.out
    assert shardc_cli("verify", MODEL, *PLAN, "--mode", "eval").code == 0
    assert shardc_cli("verify", str(tmp_path / "eval.json")).code == 0
    trained = shardc_cli("run", str(tmp_path / "eval.json"))
    assert trained.code == 2
    assert "SC218" in trained.err
    for wrong in (
        shardc_cli("verify", MODEL, *PLAN, "--mode", "evl"),
        shardc_cli("verify", str(tmp_path / "eval.json"), "--mode", "eval"),
    ):
        assert wrong.code == 2
