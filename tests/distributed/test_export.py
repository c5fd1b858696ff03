"""A Llama on the meta device, from a folder of `save_pretrained`, trained by four processes, and given back."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.decoder import DECODER
from tests.distributed.ranks import start

WORKER = Path(__file__).parent / "export_worker.py"
CONFIG = LlamaConfig(**DECODER, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4})


@pytest.mark.slow
@pytest.mark.parametrize("layout", [pytest.param("zero3", marks=pytest.mark.long), "pipeline"])
def test_from_a_folder_and_back(layout: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    tokens = torch.randint(1, 131, (4, 16))
    batch = {"input_ids": tokens, "labels": tokens}
    torch.save(batch, tmp_path / "batch.pt")
    model.save_pretrained(tmp_path / "in")
    (tmp_path / "in/tokenizer.json").write_text("{}")
    results = start(layout, 4, tmp_path, limit=240, worker=WORKER)
    expected = float(model(**batch).loss.detach())
    for result in results:
        assert result is not None
        assert result["losses"][0] == pytest.approx(expected, rel=0, abs=1e-6)
        assert result["losses"][2] == pytest.approx(result["eager"], rel=0, abs=1e-6)
        assert result["losses"][2] < result["losses"][0] - 0.01
        assert result["refusals"] == ["SC563", "SC408"]
    out = tmp_path / f"out-{layout}"
    started = LlamaForCausalLM.from_pretrained(out / "started")
    assert _same(started.state_dict(), model.state_dict())
    assert torch.equal(started(**batch).logits, model.eval()(**batch).logits)
    assert (out / "started/tokenizer.json").read_text() == "{}"
    trained = torch.load(out / "state.pt")
    assert _same(LlamaForCausalLM.from_pretrained(out / "trained").state_dict(), trained)
    model.load_state_dict(trained, strict=True)


def _same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[key], b[key]) and a[key].dtype == b[key].dtype for key in a)
