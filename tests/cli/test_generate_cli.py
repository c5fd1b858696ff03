"""`shardc generate`: tokens and text from the command line, weights of a folder, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from examples.llama import llama
from shardc.cli import main
from tests.runtime.generating import alone, library, spread

ROOT = Path(__file__).parent.parent.parent
TARGET = ["hf:llama?vocab_size=32&hidden_size=32&num_hidden_layers=1&batch=2&seq=4"]
PLAN = ["--plan", "configs/plans/llama.yaml", "--mesh", "dp=1,tp=2"]
PROMPTS = ["--prompt", "5 6 7", "--prompt", "8"]


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def ran(*args: str, code: int = 0) -> str:
    result = CliRunner().invoke(main.app, ["generate", *args], prog_name="shardc")
    assert result.exit_code == code, result.stderr
    return result.stderr if code else result.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A model as `save_pretrained` writes it, with a generation config that changes tokens, and a tokenizer."""
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("generate")
    model, _ = llama(layers=1, vocab=32, width=32)
    spread(model)
    model.generation_config.repetition_penalty = 2.0  # type: ignore[union-attr]
    model.save_pretrained(path)  # type: ignore[operator]
    letters = {chr(ord("a") + i): i for i in range(26)} | {chr(ord("A") + i): 26 + i for i in range(6)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
    inner.decoder = tokenizers.decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(path)
    return path, model


def test_weights_of_a_folder_give_the_tokens_of_the_library(folder: tuple[Path, Any]) -> None:
    path, model = folder
    target = f"hf:{path}/config.json"
    exact = library(model, [[5, 6, 7], [8]], max_new_tokens=4)[:, -4:].tolist()
    exact = [row[: row.index(0) + 1] if 0 in row else row for row in exact]
    common = [target, *PLAN, "--weights", str(path), "--max-new-tokens", "4"]
    printed = ran(*common, *PROMPTS)
    assert [list(map(int, line.split())) for line in printed.splitlines()] == exact
    rows = json.loads(ran(*common, "--prompt", "fgh", "--tokenizer", str(path), "--json"))["rows"]
    text = "".join(chr(ord("a") + t) if t < 26 else chr(ord("A") + t - 26) for t in exact[0])
    assert rows == [{"prompt": "fgh", "tokens": exact[0], "text": text}]
    assert ran(*common, "--prompt", "fgh", "--tokenizer", str(path)) == f"{text}\n"


def test_a_folder_is_no_target(folder: tuple[Path, Any]) -> None:
    path, _ = folder
    found = " ".join(ran(f"hf:{path}", "--mesh", "dp=1", "--prompt", "5 6 7", code=2).split())
    assert f"write hf:{path}/config.json" in found
    assert f"--weights {path}" in found


def test_sampling_is_by_its_seed(folder: tuple[Path, Any]) -> None:
    path, _ = folder
    common = [f"hf:{path}/config.json", "--weights", str(path), "--prompt", "5 6 7", "--sample", "--top-k", "20"]
    assert len({ran(*common, "--mesh", "dp=1", "--seed", seed) for seed in "01"}) == 2


@pytest.mark.parametrize(("args", "said"), [
    ([*TARGET, "--prompt", "5 six"], "'six' in --prompt is no token id"),
    ([*TARGET, "--prompt", ""], "prompt 0 has no token"),
    ([*TARGET], "there are no prompts"),
    ([*TARGET, "--prompt", "99"], "prompt 0 has the token 99"),
    ([*TARGET, "--prompt", "5", "--tokenizer", "nowhere"], "there is no folder nowhere with a tokenizer"),
    ([*TARGET, "--prompt", "5", "--tokenizer", "configs"], "transformers reads no tokenizer from configs"),
    ([*TARGET, "--prompt", "5", "--sample", "--temperature", "0"], "transformers refuses the options"),
    (["examples/mlp.py:mlp", "--prompt", "5"], "its forward takes no cache"),
])  # fmt: skip
def test_what_is_refused(args: list[str], said: str) -> None:
    found = ran(*args, "--mesh", "dp=1", code=2)
    assert said in found
    assert "hint:" in found


@pytest.mark.long  # in ranks, `distributed/test_generation.py` generates; a command's processes, `test_cli.py` runs
def test_processes_print_what_a_simulation_does() -> None:
    command = [*TARGET, *PLAN, *PROMPTS, "--prompt", "3 9", "--max-new-tokens", "4", "--rows", "2"]
    simulated = ran(*command)
    assert len(simulated.splitlines()) == 3
    assert ran(*command, "--nproc", "2") == simulated


@pytest.mark.long
def test_processes_read_weights_of_a_folder_and_print_json(folder: tuple[Path, Any]) -> None:
    path, _ = folder
    command = [f"hf:{path}/config.json", *PLAN, "--weights", str(path), "--tokenizer", str(path), "--prompt", "fgh"]
    rows = ran(*command, "--json", "--max-new-tokens", "4", "--sample")
    assert json.loads(rows)["rows"][0]["text"]
    assert ran(*command, "--json", "--max-new-tokens", "4", "--sample", "--nproc", "2") == rows


@pytest.mark.parametrize(("args", "said"), [
    pytest.param(["--prompt", "99", "--nproc", "2"], "SC573", marks=pytest.mark.long),
    (["--prompt", "9", "--nproc", "4"], "SC506"),
    (["--prompt", "five", "--nproc", "2"], "SC573"),
])  # fmt: skip
def test_what_ranks_refuse(args: list[str], said: str) -> None:
    found = ran(*TARGET, *PLAN, *args, code=2)
    assert found.count("error[") == 1
    assert said in found


def test_rows_are_generated_so_many_at_a_time(folder: tuple[Path, Any]) -> None:
    """Each is that of the library for its prompt alone, with the folder's penalty of repeated tokens."""
    path, model = folder
    exact = [alone(model, prompt, 4) for prompt in ([5, 6, 7], [8], [1, 2])]
    command = [f"hf:{path}/config.json", *PLAN, "--weights", str(path), *PROMPTS, "--prompt", "1 2"]
    printed = ran(*command, "--max-new-tokens", "4", "--rows", "2")
    assert [list(map(int, line.split())) for line in printed.splitlines()] == exact


def test_a_saved_program_has_no_model(tmp_path: Path) -> None:
    path = tmp_path / "mlp.json"
    made = ["compile", "examples/mlp.py:mlp", "--plan", "configs/plans/mlp.yaml", "--mode", "eval", "-o", str(path)]
    assert CliRunner().invoke(main.app, made).exit_code == 0
    assert "is a program without its model" in ran(str(path), "--prompt", "5", code=2)
