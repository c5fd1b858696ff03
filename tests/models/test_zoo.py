"""benchmarks/zoo.py: three model types through it, a file that it goes on with, and what becomes of those that fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

T = pytest.importorskip("transformers")
zoo = pytest.importorskip("benchmarks.zoo")
models = pytest.importorskip("benchmarks.zoo_models")

EVERY = models.entries()


@pytest.mark.parametrize("name", ["masked/bert", "causal/mixtral", pytest.param("vision/vit", marks=pytest.mark.long)])
def test_a_model_type_compiles_and_verifies(name: str) -> None:
    if name == "causal/mixtral":
        pytest.importorskip("transformers", minversion="5.24")  # before, experts are traced as they are written
    (entry,) = zoo.chosen(EVERY, [name], "")
    lines = list(zoo.train_and_compile(entry))
    assert [line["mesh"] for line in lines] == [zoo.TENSOR, zoo.EXPERT][: 2 if "mixtral" in name else 1]
    for line in lines:
        assert line["status"] == "verified", line
        kinds = {kind for kind in line["collectives"] if not kind.startswith("all_reduce")}
        # One scalar of each token in the loss, where the vocabulary is split; of experts over ep, nothing.
        assert kinds <= ({"all_gather tp"} if line["mesh"] == zoo.TENSOR else set()), line
        assert any(kind.endswith(("tp", "ep")) for kind in line["collectives"]), line
        json.dumps(line)


def test_each_type_is_there_once_and_in_one_shard() -> None:
    assert len({entry.type for entry in EVERY}) == len(EVERY) > 250
    assert {entry.kind for entry in EVERY} == set(models.KINDS)
    shards = [zoo.chosen(EVERY, [], f"{i}/4") for i in range(1, 5)]
    assert sorted(entry.name for shard in shards for entry in shard) == sorted(entry.name for entry in EVERY)
    assert all({entry.kind for entry in shard} == set(models.KINDS) for shard in shards)


@pytest.mark.parametrize("shard", ["0/4", "5/4", "x", "1"])
def test_a_shard_that_is_none(shard: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        zoo.main(["--shard", shard])
    assert f"--shard is i/n, counted from 1, not '{shard}'" in capsys.readouterr().err


def test_a_type_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        zoo.main(["--only", "llamma"])
    assert "no model type llamma" in capsys.readouterr().err


def test_it_goes_on_where_a_run_was_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def in_process(entry: Any, limit: float) -> list[dict[str, Any]]:
        ran.append(entry.name)
        return [{"name": entry.name, "mesh": zoo.TENSOR, "status": "timeout", "limit_s": limit}]

    monkeypatch.setattr(zoo, "in_process", in_process)
    monkeypatch.setattr(zoo, "entries", lambda: EVERY[:5])
    out = str(tmp_path / "zoo.jsonl")
    zoo.main(["--out", out, "--shard", "1/2", "--limit", "7"])
    assert ran == [entry.name for entry in EVERY[:5:2]]
    zoo.main(["--out", out])
    assert sorted(ran) == sorted(entry.name for entry in EVERY[:5])
    zoo.main(["--out", out, "--only", EVERY[0].name])
    assert ran[-1] == EVERY[0].name
    assert {line["limit_s"] for line in zoo.read(Path(out))} == {7.0, zoo.LIMIT}


def test_a_process_that_takes_too_long_is_ended() -> None:
    (line,) = zoo.in_process(zoo.chosen(EVERY, ["bert"], "")[0], 0.2)
    assert (line["status"], line["limit_s"], line["name"]) == ("timeout", 0.2, "masked/bert")


class Fails(nn.Module):
    """A model whose forward looks at values."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        y = self.fc(x)
        return y.sum() if y.sum() > 0 else y.mean()


def test_a_refusal_has_its_code() -> None:
    import torch

    line = zoo.compiled(Fails(), {"x": torch.randn(4, 4)}, zoo.TENSOR, has_loss=False)
    assert (line["status"], line["code"]) == ("refused", "SC101")


def test_the_summary_counts_the_last_line_of_each() -> None:
    first = {"name": "causal/llama", "mesh": zoo.TENSOR, "status": "timeout"}
    lines = [
        first,
        first | {"status": "verified"},
        first | {"name": "causal/opt", "status": "refused", "code": "SC101", "error": "it looks\nat values"},
        first | {"name": "masked/bert", "status": "not trained", "error": "ValueError: no"},
        first | {"name": "causal/opt", "mesh": zoo.EXPERT, "status": "not built", "error": "ValueError: no"},
    ]
    text = zoo.summary(lines).splitlines()
    assert "| causal | dp=2, tp=2 | 2 | 2 | 2 | 1 | 1 | 50 % |" in text
    assert "| masked | dp=2, tp=2 | 1 | 1 | 0 | 0 | 0 |  |" in text
    assert "| all | dp=2, tp=2 | 3 | 3 | 2 | 1 | 1 | 50 % |" in text
    assert text[-3:] == [
        "- not built ValueError: no: causal/opt (dp=2, ep=2)",
        "- not trained ValueError: no: masked/bert",
        "- refused SC101 it looks: causal/opt",
    ]
