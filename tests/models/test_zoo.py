"""benchmarks/zoo.py: three model types through it, a file that it goes on with, and what becomes of those that fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

T = pytest.importorskip("transformers")
ideal_collectives = pytest.importorskip("benchmarks.zoo_ideal").ideal_collectives
zoo = pytest.importorskip("benchmarks.zoo")
models = pytest.importorskip("benchmarks.zoo_models")

EVERY = models.entries()


# One of each form: 24 that compile in seconds.
IN_CI = [
    *("causal/gpt2", "causal/gpt_neox", "causal/gpt_bigcode", "causal/llama", "causal/mixtral", "causal/mpt"),
    *("causal/olmo2", "causal/opt", "masked/albert", "masked/bert", "masked/deberta-v2", "masked/modernbert"),
    *("masked/roberta", "seq2seq/bart", "seq2seq/t5", "vision/dinov2", "vision/beit", "vision/videomae"),
    *("vision/vit", "audio/audio-spectrogram-transformer", "audio/whisper"),
    *("multimodal/clip", "multimodal/llava", "multimodal/tipsv2"),
]
# Collectives beyond what the form needs. Norms over a split width are sums; T5's layers share a table of positions; a
# contrastive loss is of pairs of rows that are split; that CLIP's mask leaves out no token is asked of all rows, since
# ranks refuse a batch together; features of images take the places of tokens one after the other.
EXCESS = {"causal/olmo2": 8, "seq2seq/t5": 1, "multimodal/clip": 5, "multimodal/tipsv2": 4, "multimodal/llava": 6}


# Of each kind; other tests compile and verify GPT-2, Llama and T5.
ORDINARY = ("causal/mixtral", "causal/olmo2", "masked/deberta-v2", "masked/modernbert", "seq2seq/bart", "vision/beit")
ORDINARY += ("audio/whisper", "multimodal/llava")


@pytest.mark.parametrize(
    "name", [name if name in ORDINARY else pytest.param(name, marks=pytest.mark.long) for name in IN_CI]
)
def test_a_model_type_compiles_and_verifies(name: str) -> None:
    pytest.importorskip("transformers", minversion="5.24")  # before, some are traced otherwise
    (entry,) = zoo.chosen(EVERY, [name], "")
    lines = list(zoo.train_and_compile(entry))
    assert [line["mesh"] for line in lines] == [zoo.TENSOR, zoo.EXPERT][: 2 if "mixtral" in name else 1]
    for line in lines:
        assert line["status"] == "verified", line
        assert line["eager_error"] < 1e-10, line  # it is asked in float64 throughout
        assert sum(line["collectives"].values()) <= line["ideal"] + EXCESS.get(name, 0), line
        json.dumps(line)


def test_the_24_are_of_every_kind() -> None:
    assert len(set(IN_CI)) == 24
    assert {name.partition("/")[0] for name in IN_CI} == {name.partition("/")[0] for name in ORDINARY}
    assert {name.partition("/")[0] for name in IN_CI} == set(models.KINDS)
    assert set(ORDINARY) <= set(IN_CI)


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
    assert "| causal | dp=2, tp=2 | 2 | 2 | 2 | 1 | 1 | 50 % | 0 |" in text
    assert "| masked | dp=2, tp=2 | 1 | 1 | 0 | 0 | 0 |  | 0 |" in text
    assert "| all | dp=2, tp=2 | 3 | 3 | 2 | 1 | 1 | 50 % | 0 |" in text
    assert text[-3:] == [
        "- not built ValueError: no: causal/opt (dp=2, ep=2)",
        "- not trained ValueError: no: masked/bert",
        "- refused SC101 it looks: causal/opt",
    ]


def test_what_forms_need() -> None:
    """Of a Llama: 1 for embeddings, 2 and 2 a layer, 1 for the head, 1 in the loss; gradients, loss, tokens over dp."""
    import torch

    import shardc

    (entry,) = zoo.chosen(EVERY, ["causal/llama"], "")
    model, batch, has_loss, _ = entry.ready()
    assert has_loss
    compiled = zoo.compiled_program(model, batch, zoo.TENSOR, loss=None)
    ideal = ideal_collectives(model, batch, compiled.body, has_loss=True)
    assert ideal == 1 + 2 * (2 + 2) + 1 + 1 + len(list(model.parameters())) + 2
    alone = shardc.compile(model, batch, mesh="dp=2", plan={"inputs": dict.fromkeys(batch, "dp")})
    assert ideal_collectives(model, batch, alone.body, has_loss=True) == len(list(model.parameters())) + 2
    assert all(not hook for m in model.modules() for hook in [m._forward_hooks])
    assert torch.is_grad_enabled()


class Loops(nn.Module):
    """A model that asks for the rows of an input one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Any, kinds: Any) -> Any:
        return (self.fc(x) * kinds[0]).square().mean() + sum(row.sum() for row in kinds)


def test_an_input_whose_rows_are_asked_for_is_gathered() -> None:
    import torch

    batch = {"x": torch.randn(4, 4), "kinds": torch.randn(4, 4)}
    line = zoo.compiled(Loops(), batch, zoo.TENSOR, has_loss=False)
    assert line["status"] == "verified", line
    assert "SC209" in line["warnings"], line


def test_layers_of_each_kind_are_kept() -> None:
    config = {"num_hidden_layers": 6, "layer_types": ["a", "a", "b", "a", "a", "c"], "scales": [1, 2, 3, 4, 5, 6]}
    small = models.shrunk(config, models.Variant(kinds=True))
    assert small == {"num_hidden_layers": 3, "layer_types": ["a", "b", "c"], "scales": [1, 3, 6]}
    assert models.shrunk(config, models.Variant()) == {"num_hidden_layers": 2, "scales": [1, 6]}
