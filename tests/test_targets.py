"""What a TARGET names: every model type of the zoo compiles and verifies as it comes, and a factory's error has its
line."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardc
from shardc import ShardcError
from shardc.cli.targets import Target, load

ROOT = Path(__file__).parent.parent


@pytest.mark.sampled(2)
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
