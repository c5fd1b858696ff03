"""From a folder of `save_pretrained` to a trainer, and back into one that `from_pretrained` loads."""

import json
import os
import shutil
import warnings
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

import shardc
from shardc.ir.diagnostic import ShardcError
from shardc.runtime.checkpoint.hugging_face import sources_of
from shardc.runtime.train.trainer import Trainer
from tests.decoder import DECODER

T = transformers
MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: T.LlamaForCausalLM(T.LlamaConfig(**DECODER)),
    "llama, tied": lambda: T.LlamaForCausalLM(T.LlamaConfig(**DECODER, tie_word_embeddings=True)),
    "qwen3": lambda: T.Qwen3ForCausalLM(T.Qwen3Config(**DECODER, head_dim=8)),
    "mixtral": lambda: T.MixtralForCausalLM(T.MixtralConfig(**DECODER, num_local_experts=4)),
    "gpt2": lambda: T.GPT2LMHeadModel(
        T.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=131, n_positions=64, use_cache=False,
                     resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    ),
    "t5": lambda: T.T5ForConditionalGeneration(
        T.T5Config(vocab_size=131, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, use_cache=False,
                   dropout_rate=0.0, decoder_start_token_id=0)
    ),
    "bert": lambda: T.BertForMaskedLM(
        T.BertConfig(vocab_size=131, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
                     max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    ),
}  # fmt: skip
TOKENS = torch.arange(1, 65).reshape(4, 16)
BATCH = {"input_ids": TOKENS, "labels": TOKENS}
INPUTS = {"inputs": dict.fromkeys(BATCH, "dp, -")}


def full(name: str = "llama") -> Any:
    torch.manual_seed(0)
    return MODELS[name]().train()


def on_meta(name: str = "llama") -> nn.Module:
    with torch.device("meta"):
        return MODELS[name]().train()


def compiled(model: nn.Module, mesh: str = "dp=2, tp=2", **plan: Any) -> shardc.Program:
    return shardc.compile(model, BATCH, mesh=mesh, plan={**INPUTS, **plan})


def saved(model: Any, folder: Path, size: str = "20KB") -> Path:
    model.save_pretrained(folder, max_shard_size=size)
    return folder


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def logits(model: Any) -> Tensor:
    return model.eval()(**BATCH).logits.detach()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def refusal(code: str, act: Callable[[], object]) -> str:
    with pytest.raises(ShardcError) as caught:
        act()
    assert caught.value.code == code
    return str(caught.value)


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return compiled(full()).launch()


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", MODELS)
def test_from_a_folder_and_back(name: str, tmp_path: Path) -> None:
    model = full(name)
    folder = saved(model, tmp_path / "in")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers
        trainer = compiled(on_meta(name)).launch(state=folder)
    own = {key: value.clone() for key, value in model.state_dict().items()}
    assert same(trainer.state_dict(), own)
    trainer.export_hf(tmp_path / "out", max_shard_size="20KB")
    trainer.export_hf(tmp_path / "whole")
    read = type(model).from_pretrained(tmp_path / "out")
    assert same(read.state_dict(), own)
    assert torch.equal(logits(read), logits(model))
    assert same(type(model).from_pretrained(tmp_path / "whole").state_dict(), own)
    # What `save_pretrained` writes: names, configuration, index.
    saved(model, tmp_path / "reference", "5GB")
    assert names(tmp_path / "whole") == names(tmp_path / "reference")
    for file in tmp_path.glob("reference/*.json"):
        assert file.read_text() == (tmp_path / "whole" / file.name).read_text()
    assert (
        load_file(tmp_path / "whole/model.safetensors").keys()
        == load_file(tmp_path / "reference/model.safetensors").keys()
    )
    indices = [json.loads((each / "model.safetensors.index.json").read_text()) for each in (tmp_path / "out", folder)]
    assert indices[0]["metadata"] == indices[1]["metadata"]
    assert indices[0]["weight_map"].keys() == indices[1]["weight_map"].keys()
    for file in set(indices[0]["weight_map"].values()):
        written = load_file(tmp_path / "out" / file)
        assert len(written) == 1 or sum(t.numel() * t.element_size() for t in written.values()) <= 20_000
        assert {key for key, of in indices[0]["weight_map"].items() if of == file} == written.keys()
    loss = float(trainer.step(BATCH).loss)
    assert loss == pytest.approx(float(full(name)(**BATCH).loss.detach()), rel=0, abs=1e-6)


def test_a_base_model_and_a_fresh_head(tmp_path: Path) -> None:
    model = full()
    folder = saved(model.model, tmp_path / "base")
    trainer = compiled(on_meta()).launch(state=folder, init="model", seed=1)
    state = trainer.state_dict()
    assert all(torch.equal(t, state[f"model.{key}"]) for key, t in model.model.state_dict().items())
    assert float(state["lm_head.weight"].std()) == pytest.approx(0.02, rel=0.1)


def test_values_before_a_folders(tmp_path: Path) -> None:
    folder = saved(full(), tmp_path / "in")
    other = torch.ones(32)
    trainer = compiled(on_meta()).launch(state=[{"model.norm.weight": 2 * other}, folder])
    assert torch.equal(trainer.state_dict()["model.norm.weight"], 2 * other)


def test_dtypes(tmp_path: Path) -> None:
    model = full().bfloat16()
    trainer = compiled(model, precision="bf16").launch()
    trainer.step(BATCH)
    trainer.export_hf(tmp_path / "own")
    trainer.export_hf(tmp_path / "master", dtype=torch.float32)
    trainer.export_safetensors(tmp_path / "half", dtype=torch.float16)
    own, master = (T.LlamaForCausalLM.from_pretrained(tmp_path / name) for name in ("own", "master"))
    assert same(own.state_dict(), trainer.state_dict())
    assert own.dtype == torch.bfloat16
    assert master.dtype == torch.float32
    assert all(torch.equal(t, trainer.state[key]) for key, t in master.state_dict().items())
    assert {t.dtype for t in load_file(tmp_path / "half/model.safetensors").values()} == {torch.float16}
    assert model.config.dtype != torch.float32, "the model's own configuration is not changed"
    assert "as torch.int8" in refusal("SC553", lambda: trainer.export_hf(tmp_path / "no", dtype=torch.int8))


def test_the_class_of_the_library_is_named(tmp_path: Path) -> None:
    class Own(T.LlamaForCausalLM):
        pass

    torch.manual_seed(0)
    model = Own(T.LlamaConfig(**DECODER))
    model.resize_token_embeddings(140)
    compiled(model).launch().export_hf(tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["architectures"], config["vocab_size"], config["dtype"]) == (["LlamaForCausalLM"], 140, "float32")
    read = T.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert same(read.state_dict(), dict(model.state_dict()))


def test_the_tokenizer(trainer: Trainer, tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = Tokenizer(WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = Whitespace()
    tokenizer = T.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
    trainer.export_hf(tmp_path / "first", tokenizer)
    trainer.export_hf(tmp_path / "second", tmp_path / "first")
    for name in ("first", "second"):
        assert T.AutoTokenizer.from_pretrained(tmp_path / name)("b a c")["input_ids"] == [1, 0, 2]
    assert "no tokenizer in" in refusal("SC553", lambda: trainer.export_hf(tmp_path / "third", tmp_path))
    assert "is a int" in refusal("SC553", lambda: trainer.export_hf(tmp_path / "third", 7))
    assert names(tmp_path) == ["first", "second"]


# ---------------------------------------------------------------------- folders
def test_a_folder_is_replaced_and_what_is_others_stays(trainer: Trainer, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    trainer.export_hf(folder, max_shard_size="20KB")
    (folder / "README.md").write_text("mine")
    (folder / "runs").mkdir()
    (folder / "runs/log").write_text("also")
    (folder / "config.json").write_text("{}")
    trainer.export_hf(folder)
    kept = ["README.md", "config.json", "generation_config.json", "model.safetensors", "runs"]
    assert names(folder) == kept
    assert (folder / "README.md").read_text() == "mine"
    assert (folder / "runs/log").read_text() == "also"
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 131
    assert names(tmp_path) == ["out"]


def test_what_is_no_model_is_not_replaced(trainer: Trainer, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    assert "holds no model: it is not replaced" in refusal("SC408", lambda: trainer.export_hf(tmp_path))
    assert names(tmp_path) == ["mine.txt"]
    trainer.save(tmp_path / "checkpoint")
    refusal("SC408", lambda: trainer.export_hf(tmp_path / "checkpoint"))
    refusal("SC408", lambda: trainer.export_hf(tmp_path / "mine.txt"))
    refusal("SC208", lambda: trainer.export_hf(tmp_path / "out", max_shard_size="some"))
    assert [name for name in names(tmp_path) if not name.endswith(".lock")] == ["checkpoint", "mine.txt"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize("point", ["model.safetensors.index.json", "config.json", "rename 1", "rename 2"])
def test_a_crash_leaves_the_folder_before_or_the_new_one(point: str, trainer: Trainer, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    trainer.export_hf(folder)
    before = {name: (folder / name).read_bytes() for name in names(folder)}
    child = os.fork()
    if not child:
        try:
            _dies_at(point, tmp_path)
            trainer.export_hf(folder, max_shard_size="20KB", dtype=torch.bfloat16)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert folder.exists() == (point != "rename 2")
    lying = folder if folder.exists() else tmp_path / "out.tmp-replaced"
    source = sources_of(folder, None)[0]
    assert {name: source.read(name)(()).dtype for name in source.names} == dict.fromkeys(source.names, torch.float32)
    assert source.names
    if "model.safetensors" in names(lying):
        assert {name: (lying / name).read_bytes() for name in names(lying)} == before
    assert T.LlamaForCausalLM.from_pretrained(lying).dtype in (torch.float32, torch.bfloat16)
    trainer.export_hf(folder, dtype=torch.float16)
    assert T.LlamaForCausalLM.from_pretrained(folder).dtype == torch.float16
    assert names(tmp_path) == ["out"]


def _dies_at(point: str, folder: Path) -> None:
    """Have this process end without notice, before a rename, or when a file is brought to disk."""
    import shardc.runtime.checkpoint.export as export
    import shardc.runtime.checkpoint.folder as folders
    import shardc.runtime.checkpoint.hugging_face as hugging_face

    renames = ["rename 2", "rename 1"]
    rename, sync = os.rename, export.sync_file

    def dying_rename(*args: Any) -> None:
        if renames.pop() == point:
            os._exit(3)
        rename(*args)

    def dying_sync(path: Path) -> None:
        if path.name == point:
            os._exit(3)
        sync(path)

    folders.os.rename = dying_rename  # type: ignore[assignment]
    export.sync_file = hugging_face.sync_file = dying_sync


def test_a_link_to_the_folder_stays_a_link(trainer: Trainer, tmp_path: Path) -> None:
    link, real = tmp_path / "link", tmp_path / "disk/real"
    link.symlink_to("disk/real")
    for dtype in (torch.float16, torch.bfloat16, torch.float32):  # the first makes what the link leads to
        trainer.export_hf(link, dtype=dtype)
        assert os.readlink(link) == "disk/real"
        assert T.LlamaForCausalLM.from_pretrained(real).dtype == dtype
        assert (names(tmp_path), names(tmp_path / "disk")) == (["disk", "link"], ["real"])
        (tmp_path / "disk/real.tmp-replaced").symlink_to("real")  # as shardc 0.1 left it
    assert same(compiled(on_meta()).launch(state=link).state_dict(), trainer.state_dict())
    real.rename(tmp_path / "disk/aside")
    (tmp_path / "disk/real.tmp-replaced").unlink()
    (tmp_path / "disk/aside").rename(tmp_path / "disk/real.tmp-replaced")  # as a kill between the renames leaves it
    assert same(compiled(on_meta()).launch(state=link).state_dict(), trainer.state_dict())


@pytest.mark.parametrize("fails", [{2}, {2, 3}], ids=["rename", "rename and back"])
def test_a_new_folder_that_cannot_take_its_place(
    fails: set[int], trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, rename, renames = tmp_path / "out", os.rename, count(1)
    trainer.export_hf(folder)
    before = {name: (folder / name).read_bytes() for name in names(folder)}

    def failing(source: Path, target: Path) -> None:
        if next(renames) in fails:
            raise PermissionError(13, "Permission denied", str(target))
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", failing)
        message = refusal("SC408", lambda: trainer.export_hf(folder, dtype=torch.bfloat16))
    assert next(renames) == 4  # both renames and the one back
    assert "Permission denied" in message
    if fails == {2}:
        assert "weights that were there before are as they were" in message
        assert names(tmp_path) == ["out"]
    else:
        draft, replaced = sorted(tmp_path.iterdir())
        assert f"the new one lies at {draft}, the one before at {replaced}" in message
        assert T.LlamaForCausalLM.from_pretrained(draft).dtype == torch.bfloat16
        assert sources_of(folder, None)[0].names
        rename(replaced, folder)
    assert {name: (folder / name).read_bytes() for name in names(folder)} == before
    trainer.export_hf(folder, dtype=torch.float16)
    assert T.LlamaForCausalLM.from_pretrained(folder).dtype == torch.float16
    assert names(tmp_path) == ["out"]


def test_a_read_only_file_is_kept(trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, open_ = tmp_path / "out", Path.open
    trainer.export_hf(folder)
    (folder / "LICENSE").write_text("mine")
    (folder / "LICENSE").chmod(0o444)

    def open_as_a_user(self: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        """Root may write everything."""
        if self.exists() and not self.stat().st_mode & 0o200 and set(mode) & set("wa+"):
            raise PermissionError(13, "Permission denied", str(self))
        return open_(self, mode, *args, **options)

    monkeypatch.setattr(Path, "open", open_as_a_user)
    trainer.export_hf(folder, dtype=torch.float16)
    assert (folder / "LICENSE").read_text() == "mine"
    assert (folder / "LICENSE").stat().st_mode & 0o777 == 0o444
    assert T.LlamaForCausalLM.from_pretrained(folder).dtype == torch.float16


def test_a_full_disk_is_an_error(trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer.export_hf(tmp_path / "out")
    before = {name: (tmp_path / "out" / name).read_bytes() for name in names(tmp_path / "out")}

    def full_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    for place in ("safetensors.torch.save_file", "transformers.PreTrainedConfig.save_pretrained", "shutil.copy2"):
        with monkeypatch.context() as patch:
            patch.setattr(place, full_disk)
            if place == "shutil.copy2":
                (tmp_path / "out/notes").write_text("")
                before["notes"] = b""
                patch.setattr("os.link", full_disk)
            refusal("SC408", lambda: trainer.export_hf(tmp_path / "out"))
        assert {name: (tmp_path / "out" / name).read_bytes() for name in names(tmp_path / "out")} == before
        assert names(tmp_path) == ["out"]


# ---------------------------------------------------------------------- models that no class loads
def test_without_a_configuration(tmp_path: Path) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.config = {"size": 4}

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x).square().mean()

    program = shardc.compile(Own(), torch.ones(4, 4), mesh="dp=2", plan={"inputs": {"x": "dp"}})
    program.save(tmp_path / "program.json")
    message = refusal("SC562", lambda: program.launch().export_hf(tmp_path / "out"))
    assert "Own is no model of transformers" in message
    assert "export_safetensors" in message
    loaded = shardc.Program.load(tmp_path / "program.json").launch(state=Own().state_dict())
    assert "has no model" in refusal("SC562", lambda: loaded.export_hf(tmp_path / "out"))
    loaded.export_safetensors(tmp_path / "out")
    assert load_file(tmp_path / "out/model.safetensors").keys() == {"fc.weight", "fc.bias"}


def test_weights_without_their_configuration_are_not_mistaken(tmp_path: Path) -> None:
    """A folder that lacks a tensor is refused by the model's name of it, in files of other names too."""
    folder = saved(full("mixtral"), tmp_path / "in", "5GB")
    tensors = load_file(folder / "model.safetensors")
    from safetensors.torch import save_file

    save_file({k: t for k, t in tensors.items() if "experts" not in k}, folder / "model.safetensors", {"format": "pt"})
    message = refusal("SC504", lambda: compiled(on_meta("mixtral")).launch(state=folder))
    assert "mlp.experts.gate_up_proj" in message
    shutil.rmtree(folder)
