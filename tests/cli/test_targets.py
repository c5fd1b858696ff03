"""What a TARGET names: every model type of the zoo compiles and verifies as it comes, and a factory's error has its
line."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardc
from shardc import ShardcError
from shardc.cli.targets import Target, load

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "bert", "t5", "vit", "resnet", "whisper"])
def test_a_model_type_as_it_comes(name: str) -> None:
    pytest.importorskip("transformers")
    target = load(f"hf:{name}?batch=4&seq=8" if name not in ("vit", "resnet") else f"hf:{name}?batch=4")
    assert isinstance(target, Target)
    assert sum(p.numel() for p in target.model.parameters()) < 500_000, "small, where the user does not say"
    plan = str(ROOT / "configs" / "plans" / f"{name}.yaml")
    program = shardc.compile(target.model, target.batch, mesh="dp=2, tp=2", plan=plan, loss=target.loss)
    report = program.verify()
    assert report.ok, str(report)
    assert {c.axes for c in program.collectives()} >= {("dp",), ("tp",)}


@pytest.mark.parametrize("spelling", ["model.py", "./model.py", "sub/../model.py", "absolute"])
def test_a_factory_that_raises_is_shown_at_its_line(
    spelling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sub").mkdir()
    Path("model.py").write_text("def build():\n    x = 1\n    return [][x]\n")
    path = str(tmp_path / "model.py") if spelling == "absolute" else spelling
    with pytest.raises(ShardcError) as raised:
        load(f"{path}:build")
    (found,) = raised.value.diagnostics
    assert found.code == "SC105"
    assert found.location is not None
    assert found.location.endswith("model.py:3")
    assert found.source_text == "return [][x]"


SIZES = {
    **dict.fromkeys(("seq=" + "1" + "0" * 12, "batch=1" + "0" * 30, "n_embd=1" + "0" * 10), r"no size(.|\n)*to 2,147"),
    **dict.fromkeys(("seq=true", "batch=false", "n_layer=true"), "True|False"),
    **dict.fromkeys(("seq=-1", "batch=0", "n_layer=-1", "n_layer=0", "batch=1e3", "seq=1.0"), "no size(.|\n)*from 1"),
    **dict.fromkeys(
        ("seq=NaN", "batch=Infinity", "seq=null", "seq=[4]", "seq=" + "9" * 5000), "no size(.|\n)*in digits"
    ),
    "n_layer=100000": r"no size(.|\n)*to 10,000",
    "resid_pdrop=NaN": "resid_pdrop",
    "batch=2147483647": r"larger than a command makes(.|\n)*at most 16,777,216",
    "batch=2&batch=4": "twice",
    "seq=65&n_positions=64": r"positions for 64 \(transformer.wpe\)(.|\n)*at most 64",
}


@pytest.mark.parametrize("query", SIZES, ids=lambda query: query[:20])
def test_sizes_that_are_none(query: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ShardcError, match=SIZES[query]) as raised:
        load(f"hf:gpt2?{query}")
    assert raised.value.code == "SC105"
    assert len(str(raised.value)) < 600


def test_a_small_model_has_as_many_positions_as_it_is_given() -> None:
    pytest.importorskip("transformers")
    target = load("hf:gpt2?seq=128&batch=2")
    assert isinstance(target, Target)
    assert target.model.get_parameter("transformer.wpe.weight").shape[0] == 128


@pytest.mark.parametrize("leaves", ["raise SystemExit(3)", "raise KeyboardInterrupt", "import sys; sys.exit('enough')"])
@pytest.mark.parametrize("where", ["factory", "file"])
def test_a_factory_that_leaves_the_process_is_an_error_like_any_other(leaves: str, where: str, tmp_path: Path) -> None:
    text = f"def build():\n    {leaves}\n" if where == "factory" else f"if True:\n    {leaves}\ndef build(): ...\n"
    (tmp_path / "leaving.py").write_text(text)
    with pytest.raises(ShardcError, match=r"SystemExit|KeyboardInterrupt") as raised:
        load(f"{tmp_path / 'leaving.py'}:build")
    (found,) = raised.value.diagnostics
    assert found.code == "SC105"
    assert found.source_text == leaves
