"""A second start takes the program that the first one left: the same program, or none.

Longer than 400 lines: what becomes of one program on disk, from the first start to the last.
"""

import configparser
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import shardc
from shardc.api import Program
from shardc.cli.main import app
from shardc.ir.plain import beside
from shardc.program_cache import folder as folders
from shardc.program_cache.folder import Folder
from tests.program_cache.models import FILES, SCRIPT, written


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.setenv("SHARDC_CACHE", str(tmp_path / "cache"))
    return Folder(tmp_path / "cache")


def llama(device: str = "cpu") -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 64}
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, use_cache=False))
        tokens = torch.zeros(8, 16, dtype=torch.int64)
    return model, {"input_ids": tokens, "labels": tokens}


def gpt2() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=32, vocab_size=64, use_cache=False))
    tokens = torch.zeros(8, 16, dtype=torch.int64)
    return model, {"input_ids": tokens, "labels": tokens}


def compiled(
    build: Callable[[], tuple[nn.Module, Any]], plan: Any, mesh: str, optimizer: bool = False, **options: Any
) -> Program:
    model, batch = build()
    update = torch.optim.AdamW(model.parameters(), lr=1e-3) if optimizer else None
    return shardc.compile(model, batch, plan=plan, mesh=mesh, optimizer=update, **options)


CASES: dict[str, dict[str, Any]] = {
    "llama": {"build": llama, "plan": "shardc:llama", "mesh": "dp=2, tp=2"},
    "on the meta device": {"build": lambda: llama("meta"), "plan": "shardc:llama", "mesh": "dp=2, tp=2"},
    "an update": {"build": gpt2, "plan": "shardc:gpt2", "mesh": "dp=2, tp=2", "optimizer": True},
    "kernels": {"build": gpt2, "plan": {"inputs": {"*": "dp, -"}, "fuse": True}, "mesh": "dp=2"},
    "an evaluation": {"build": gpt2, "plan": "shardc:gpt2", "mesh": "dp=2, tp=2", "mode": "eval"},
    "a pipeline": {
        "build": gpt2,
        "plan": {"inputs": {"*": "dp, -"}, "pipeline": {"microbatches": 2, "axis": "pp"}},
        "mesh": "pp=2, dp=2",
        "optimizer": True,
    },
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_a_hit_is_the_program_that_compiling_gives(case: str, cache: Folder, tmp_path: Path) -> None:
    fresh = compiled(**CASES[case], cache=False)
    stored, hit = compiled(**CASES[case]), compiled(**CASES[case])
    assert (fresh.cached, stored.cached, hit.cached) == ("", "stored", "hit")
    assert repr(hit) == repr(fresh)
    assert hit.text() == fresh.text() == stored.text()
    assert hit.diagnostics == fresh.diagnostics
    assert [str(d) for d in hit.body.diagnostics] == [str(d) for d in fresh.body.diagnostics]
    for ours, theirs in ((hit.body, fresh.body), (hit.reference, fresh.reference)):
        assert beside(ours) == beside(theirs)
        differing = {name for name, value in vars(theirs).items() if bool(value) != bool(vars(ours)[name])}
        assert differing <= {"seeds", "priorities"}, "which only compiling reads"
    assert hit.annotations == fresh.annotations
    assert hit.uncomputed == fresh.uncomputed
    assert str(hit.memory()) == str(fresh.memory())
    assert hit.flops() == fresh.flops()
    assert hit.collectives() == fresh.collectives()
    for name, program in {"fresh": fresh, "hit": hit}.items():
        program.save(tmp_path / name)
    assert (tmp_path / "hit").read_bytes() == (tmp_path / "fresh").read_bytes()
    if hit.collectives():
        assert str(hit.explain(0)) == str(fresh.explain(0))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", ["an update", "an evaluation", "a pipeline"])
def test_a_hit_verifies_against_its_model_and_runs(case: str, cache: Folder) -> None:
    fresh, _ = compiled(**CASES[case], cache=False), compiled(**CASES[case])
    hit = compiled(**CASES[case])
    assert hit.cached == "hit"
    assert hit.verify().ok
    assert torch.equal(torch.as_tensor(hit.simulate().loss), torch.as_tensor(fresh.simulate().loss))


@pytest.mark.parametrize("case", ["an update", "a pipeline"])
def test_a_program_of_a_file_verifies_all_that_a_fresh_one_does(case: str, tmp_path: Path) -> None:
    """The gradients that an update consumes are no outputs: a file names them."""
    fresh = compiled(**CASES[case], cache=False)
    fresh.save(tmp_path / "program")
    loaded = Program.load(tmp_path / "program")
    assert beside(loaded.body) == beside(fresh.body)
    assert beside(loaded.reference) == beside(fresh.reference)
    assert beside(loaded.body)["gradients"]
    assert loaded.to_json() == fresh.to_json()
    report = loaded.verify()
    assert report.ok
    assert {(row.role, row.name) for row in report.rows} == {(row.role, row.name) for row in fresh.verify().rows}
    if case == "an update":
        assert any(row.role == "grad" for row in report.rows)


def test_a_hit_trains_and_evaluates_as_a_fresh_program(cache: Folder) -> None:
    def losses(program: Program) -> list[float]:
        trainer, batch = program.launch(), gpt2()[1]
        steps = [float(trainer.step(batch).loss) for _ in range(2)]
        return [*steps, float(trainer.evaluate([batch]).loss)]

    fresh = compiled(**CASES["an update"])
    hit = compiled(**CASES["an update"])
    assert hit.cached == "hit"
    assert losses(hit) == losses(fresh)


def test_a_hit_is_bound_to_its_own_model(cache: Folder) -> None:
    first = compiled(**CASES["an update"])
    model, batch = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    hit = shardc.compile(model, batch, plan="shardc:gpt2", mesh="dp=2, tp=2", optimizer=optimizer)
    assert (first.cached, hit.cached, hit.model, hit.optimizer) == ("stored", "hit", model, optimizer)
    model.eval()
    with pytest.raises(shardc.ShardcError, match="SC124"):
        hit.simulate()


def test_what_is_watched_is_compiled(cache: Folder) -> None:
    assert compiled(**CASES["llama"]).cached == "stored"
    passes: list[str] = []
    program = compiled(**CASES["llama"], watch=lambda pass_, graph, seconds: passes.append(pass_.name))
    assert (program.cached, "localize" in passes) == ("", True)
    assert compiled(**CASES["llama"], watch=print, cache=True).cached == "hit"
    assert compiled(**CASES["llama"], cache=False).cached == ""


def test_a_word_switches_it_off(cache: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDC_CACHE", "off")
    assert compiled(**CASES["llama"]).cached == compiled(**CASES["llama"]).cached == "the cache is off"
    assert not cache.path.exists()


class Constant(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (super().forward(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])).square().mean()


class Configured(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parser = configparser.ConfigParser()
        parser.read(f"{self.folder}/settings.ini")
        return (super().forward(x) * float(parser["model"]["factor"])).square().mean()


@pytest.mark.parametrize("kind", [Constant, Configured])
def test_whatever_forward_reads_its_trace_is_what_counts(kind: type[nn.Linear], cache: Folder, tmp_path: Path) -> None:
    torch.manual_seed(0)
    (tmp_path / "settings.ini").write_text("[model]\nfactor = 2\n")
    model = kind(8, 4)
    model.folder, model.held = str(tmp_path), iter([1])  # type: ignore[assignment]
    programs = [shardc.compile(model, torch.ones(4, 8), mesh="dp=2") for _ in range(2)]
    assert [program.cached for program in programs] == ["stored", "hit"]
    assert torch.equal(*(torch.as_tensor(program.simulate().loss) for program in programs))
    assert [*programs[0].constants] == [*programs[1].constants]


def test_a_program_that_no_file_can_have_is_compiled_all_the_same(
    cache: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Program) -> dict[str, Any]:
        raise AssertionError("an argument that a graph cannot hold")

    with monkeypatch.context() as patch:
        patch.setattr(Program, "to_plain", refuse)
        assert "an argument that" in compiled(**CASES["llama"]).cached
    assert not cache.entries()


# ---------------------------------------------------------------------- files
def content_of(size: int) -> dict[str, Any]:
    return {"program": {"text": "x" * size}}


ABOUT = {"model": "Net", "mesh": "dp=2", "mode": "train"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1],
        lambda data: b"",
        lambda data: b"\n",
        lambda data: data[:-5] + bytes([data[-5] ^ 1]) + data[-4:],
        lambda data: data.replace(b'"version": 3', b'"version": 0'),
        lambda data: data.replace(b"shardc-cached", b"shardc-catched"),
        lambda data: b"[]\n" + data,
    ],
)
def test_a_damaged_file_is_deleted_and_compiled_anew(damage: Callable[[bytes], bytes], cache: Folder) -> None:
    fresh = compiled(**CASES["llama"])
    (path,) = cache.path.glob("*.program")
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    anew = compiled(**CASES["llama"])
    assert anew.cached == "stored"
    assert anew.text() == fresh.text()
    assert path.read_bytes().partition(b"\n")[2] == whole.partition(b"\n")[2]


def test_a_file_under_another_s_name_is_no_hit(cache: Folder) -> None:
    assert cache.write("a", ABOUT, content_of(10))
    os.rename(cache.path / "a.program", cache.path / "b.program")
    assert cache.read("b") is None
    assert not (cache.path / "b.program").exists()


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    folder = Folder(tmp_path, limit=5500)
    for i, key in enumerate("abcd"):
        assert folder.write(key, ABOUT, content_of(1000))
        os.utime(tmp_path / f"{key}.program", (i, i))
    assert folder.read("a") == content_of(1000)
    folder.note_hit("a")  # which makes it the last that was used
    assert folder.write("e", ABOUT, content_of(1000))
    assert {entry.key for entry in folder.entries()} == {"a", "c", "d", "e"}
    assert sum(entry.size for entry in folder.entries()) <= folder.limit
    assert not folder.write("f", ABOUT, content_of(6000)), "larger than all room"
    assert folder.read("a") is not None


@pytest.mark.parametrize(("text", "limit"), [("1 KiB", 1024), ("much", 2 << 30), (None, 2 << 30)])
def test_the_bound_is_a_variable(text: str | None, limit: int, cache: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    if text is not None:
        monkeypatch.setenv("SHARDC_CACHE_LIMIT", text)
    assert Folder.of_environment() == Folder(cache.path, limit)


def test_a_folder_that_cannot_be_written_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHARDC_CACHE", str(tmp_path / "file"))
    program = compiled(**CASES["llama"])
    assert "is no folder" in program.cached


def test_a_folder_that_others_may_write_to_is_not_trusted(cache: Folder) -> None:
    """Whoever writes the file says what is trained."""
    assert cache.write("key", ABOUT, content_of(1))
    assert stat.S_IMODE(cache.path.stat().st_mode) == 0o700
    (path,) = cache.path.glob("*.program")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o666)
    assert cache.read("key") is None
    path.chmod(0o644)
    assert cache.read("key") == content_of(1)
    cache.path.chmod(0o777)
    assert cache.read("key") is None
    assert not cache.write("other", ABOUT, content_of(1))
    program = compiled(**CASES["llama"])
    assert "chmod 700" in program.cached
    assert "chmod 700" in " ".join(CliRunner().invoke(app, ["cache"]).stdout.split())


def test_a_file_of_another_user_is_not_trusted(cache: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache.write("key", ABOUT, content_of(1))
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert cache.read("key") is None
    assert not cache.write("other", ABOUT, content_of(1))


def test_writers_at_once_leave_whole_files(cache: Folder) -> None:
    with ThreadPoolExecutor(8) as pool:
        written = list(pool.map(lambda i: cache.write("key", ABOUT, content_of(10_000 + i)), range(40)))
        read = list(pool.map(lambda _: cache.read("key"), range(40)))
    assert all(written)
    assert all(content is not None and len(content["program"]["text"]) >= 10_000 for content in read)
    assert [path.suffix for path in cache.path.iterdir() if path.suffix != ".hits"] == [".program"]


def test_what_a_dead_writer_left_is_deleted(cache: Folder) -> None:
    cache.path.mkdir()
    (cache.path / ".a.1.b.tmp").write_text("half")
    assert cache.write("key", ABOUT, content_of(1))
    assert (cache.path / ".a.1.b.tmp").exists(), "its writer may be at it"
    os.utime(cache.path / ".a.1.b.tmp", (1, 1))
    assert cache.write("key", ABOUT, content_of(1))
    assert not (cache.path / ".a.1.b.tmp").exists()


# ---------------------------------------------------------------------- processes
def started(folder: Path, cache: Folder) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(Path(shardc.__file__).parents[1]), str(folder)])
    env = {**os.environ, "SHARDC_CACHE": str(cache.path), "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-P", "-c", SCRIPT]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, cwd=folder)


def printed(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What became of the cache, and the program."""
    text = process.communicate()[0]
    assert process.returncode == 0
    cached, _, program = text.partition("\n")
    return cached, program


def test_across_processes(cache: Folder, tmp_path: Path) -> None:
    written(tmp_path)
    both = [started(tmp_path, cache) for _ in range(2)]  # at once, as the ranks of a job
    first = [printed(process) for process in both]
    assert first[0][1] == first[1][1]
    assert printed(started(tmp_path, cache)) == ("hit", first[0][1])
    (tmp_path / "scaling.py").write_text(FILES["scaling.py"].replace("* FACTOR", "+ FACTOR"))
    cached, program = printed(started(tmp_path, cache))
    assert cached == "stored"
    assert program != first[0][1]
    assert printed(started(tmp_path, cache)) == ("hit", program)


# ---------------------------------------------------------------------- the command
def test_the_command_lists_and_clears(cache: Folder) -> None:
    program = compiled(**CASES["llama"])
    assert program.cached == "stored"
    assert compiled(**CASES["llama"]).cached == "hit"
    run = CliRunner().invoke
    text = run(app, ["cache"]).stdout
    assert text.startswith("1 program, ")
    assert all(word in text for word in ("LlamaForCausalLM", "train", "dp=2, tp=2", "0 s ago"))
    data = json.loads(run(app, ["cache", "--json"]).stdout)
    (entry,) = data["programs"]
    assert (entry["model"], entry["mesh"], entry["hits"]) == ("LlamaForCausalLM", "dp=2, tp=2", 1)
    assert (data["folder"], data["limit"], data["bytes"]) == (str(cache.path), folders.DEFAULT_LIMIT, entry["size"])
    assert "1 program deleted" in run(app, ["cache", "--clear"]).stdout
    assert json.loads(run(app, ["cache", "--json"]).stdout)["programs"] == []


def test_the_command_says_what_was_not_kept_and_that_it_is_off(cache: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.note_refusal("Net", "Net.forward calls open()")
    assert "Net: Net.forward calls open()" in CliRunner().invoke(app, ["cache"]).stdout
    monkeypatch.setenv("SHARDC_CACHE", "off")
    assert "off" in CliRunner().invoke(app, ["cache"]).stdout
    data = json.loads(CliRunner().invoke(app, ["cache", "--json"]).stdout)
    assert data == {"folder": None, "reason": "the cache is off"}


def test_the_summary_says_that_a_program_was_compiled_before(cache: Folder) -> None:
    target = ["compile", "hf:llama", "--plan", "shardc:llama", "--mesh", "dp=2, tp=2"]
    first, second = (CliRunner().invoke(app, target).stdout for _ in range(2))
    assert second == f"{first}from the disk, as it was compiled before\n"


def test_commands_take_programs_of_the_cache_but_where_they_print_or_verify(
    cache: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool | None] = []
    real = shardc.api.compile

    def watched(*arguments: Any, **options: Any) -> Program:
        seen.append(options["cache"])
        return real(*arguments, **options)

    monkeypatch.setattr(shardc.api, "compile", watched)
    target = ["compile", "hf:llama", "--plan", "shardc:llama", "--mesh", "dp=2, tp=2"]
    for more in ([], ["--print-after", "localize"], ["--diff"], ["--verify"]):
        assert CliRunner().invoke(app, [*target, *more]).exit_code == 0
    assert seen == [True, False, False, False]
