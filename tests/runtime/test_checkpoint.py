"""Checkpoints in one process: what one plan saves is what another loads; no crash and no damage gets through."""

import json
import os
import resource
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._pytree import tree_map

import shardc
from examples.gpt2 import gpt2
from shardc.ir.diagnostic import ShardcError
from shardc.ir.mesh import Mesh
from shardc.ir.types import Atom, TensorType
from shardc.partition.staged_program import one_stage
from shardc.plan.schema import Plan
from shardc.runtime.checkpoint import planners
from shardc.runtime.checkpoint.checkpoint import Checkpoints, Position, load_state_dict
from shardc.runtime.checkpoint.export import export
from shardc.runtime.checkpoint.held import Held, writes
from shardc.runtime.checkpoint.manifest import MANIFEST
from shardc.runtime.checkpoint.planners import chunks_of
from shardc.runtime.execute.layout import shard
from shardc.runtime.train.trainer import Trainer, launch
from tests.handmade import mlp, mlp_inputs

PARAMS = {"**.wte.weight": "tp, -", "**.attn.c_attn.weight": "-, 3*tp", "**.mlp.c_fc.weight": "-, tp"}


def small(width: int = 12) -> Trainer:
    body, inputs = mlp(width=width), mlp_inputs(width=width)
    return launch(SimpleNamespace(staged=one_stage(body), constants=inputs), seed=3)


def stepped(trainer: Trainer, steps: int) -> list[float]:
    losses: list[float] = []
    for _ in range(steps):
        losses.append(float(trainer.step({"x": mlp_inputs()["x"]}).loss))
        trainer.sgd(1e-3)
    return losses


def copied(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.state.items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def model() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    return gpt2(layers=1, batch=4, vocab=255, seq=8)


@pytest.fixture
def trainer_of(model: tuple[torch.nn.Module, dict[str, torch.Tensor]]) -> Callable[..., Trainer]:
    def made(mesh: str, zero: int, axes: list[str]) -> Trainer:
        network, batch = model
        plan = Plan.of(mesh=mesh, params=PARAMS, storage={"zero": zero, "axes": axes})
        return shardc.compile(
            network, batch, plan=plan, optimizer=torch.optim.AdamW(network.parameters(), 1e-3)
        ).launch()

    return made


def test_training_goes_on_under_another_plan(
    tmp_path: Path, trainer_of: Callable[..., Trainer], model: tuple[torch.nn.Module, dict[str, torch.Tensor]]
) -> None:
    network, batch = model
    first = trainer_of("dp=2,tp=2", 3, ["dp"])
    for _ in range(2):
        first.step(batch)
    first.save(tmp_path / "a", extra={"scheduler": {"last_epoch": 2}})
    second = trainer_of("tp=4", 0, [])
    assert second.load(tmp_path / "a") == {"scheduler": {"last_epoch": 2}}
    assert second.steps == 2
    assert same(first.state, second.state)
    assert "transformer.wte.weight:exp_avg" in second.state
    for _ in range(2):
        torch.testing.assert_close(second.step(batch).loss, first.step(batch).loss, rtol=1e-6, atol=0)

    # Stock torch reads it into the model's own state_dict, the tied name too, and turns it into a file of torch.save.
    found = tree_map(torch.zeros_like, dict(network.state_dict()))
    assert "lm_head.weight" in found
    dcp.load(found, checkpoint_id=tmp_path / "a", no_dist=True)
    dcp_to_torch_save(tmp_path / "a", tmp_path / "a.pt")
    saved = torch.load(tmp_path / "a.pt")
    own = load_state_dict(tmp_path / "a")
    assert own.keys() == found.keys()
    assert own["lm_head.weight"].data_ptr() == own["transformer.wte.weight"].data_ptr()
    for name, value in found.items():
        assert torch.equal(value, own[name]), name
        assert torch.equal(value, saved[name]), name
    moments = load_state_dict(tmp_path / "a", roles=("state",))
    assert len(moments) == 3 * sum(1 for _ in network.parameters())


def test_safetensors_out_and_in(
    tmp_path: Path, trainer_of: Callable[..., Trainer], model: tuple[torch.nn.Module, dict[str, torch.Tensor]]
) -> None:
    network, batch = model
    trainer = trainer_of("dp=2,tp=2", 3, ["dp"])
    trainer.step(batch)
    whole = trainer.state_dict()
    want = {name: whole[name] for name in network.state_dict()}
    for limit, files in ((1 << 30, 1), (100_000, 4), (1 << 30, 1)):
        export(trainer.checkpoints, tmp_path / "hf", trainer._held("param", "buffer"), limit)
        assert len(list((tmp_path / "hf").glob("*.safetensors"))) == files
        network.config.save_pretrained(tmp_path / "hf")
        read = type(network).from_pretrained(tmp_path / "hf").state_dict()
        assert same(read, want)
    with launch(
        SimpleNamespace(staged=one_stage(trainer.body), model=None, optimizer_state=lambda: trainer.state),
        state=tmp_path / "hf",
    ) as again:
        assert same(again.state, trainer.state)


@st.composite
def placed(draw: st.DrawFn) -> TensorType:
    """Any type over a=2, b=3: several atoms a dim, uneven and nested shards, sizes of 0 and 1."""
    axes = draw(st.permutations(["a", "b"]))
    dims = [
        [draw(st.integers(0 if depth == 1 else 2, 7)) for _ in range(depth)]
        for depth in draw(st.lists(st.integers(0, 3), max_size=3))
    ]
    split: dict[tuple[int, int], tuple[str, ...]] = {}
    places = [(i, j) for i, dim in enumerate(dims) for j in range(len(dim))]
    for axis in axes[: draw(st.integers(0, 2))] if places else []:
        at = draw(st.sampled_from(places))
        split[at] = (*split.get(at, ()), axis)
    return TensorType(
        torch.float32,
        tuple(tuple(Atom(n, split.get((i, j), ())) for j, n in enumerate(dim)) for i, dim in enumerate(dims)),
    )


@given(type=placed(), limit=st.sampled_from([4, 40, 1 << 20]))
def test_written_chunks_are_every_element_once(type: TensorType, limit: int) -> None:
    mesh = Mesh(a=2, b=3)
    seen = torch.zeros(type.shape, dtype=torch.int64)
    whole = torch.arange(float(type.numel())).reshape(type.shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planners, "CHUNK_BYTES", limit)
        for rank in range(mesh.world_size):
            held = planners.shard_slices(type, mesh, rank)
            for chunk, local in chunks_of(type, mesh, rank).values():
                at = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
                if type.numel():
                    part = shard(whole, type, mesh, rank)
                    assert torch.equal(part[local], whole[at]), held
                if writes(type, mesh, rank):
                    seen[at] += 1
    assert bool((seen == 1).all())


def test_a_save_replaces_the_one_before(tmp_path: Path) -> None:
    trainer = small()
    trainer.save(tmp_path / "ck")
    stepped(trainer, 2)
    trainer.save(tmp_path / "ck")
    want = copied(trainer)
    other = small(12)
    other.seed = 8
    other.load(str(tmp_path / "ck"))
    assert same(other.state, want)
    assert (other.steps, other.seed) == (2, 3)
    assert {one.name for one in tmp_path.iterdir()} == {"ck", "ck.lock"}
    assert stepped(other, 2) == stepped(trainer, 2)


def test_what_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("all my work")
    with pytest.raises(ShardcError, match="exists, and is no checkpoint: it is not replaced") as caught:
        small().save(tmp_path)
    assert caught.value.code == "SC408"
    assert (tmp_path / "thesis.tex").exists()


def killed(trainer: Trainer, path: Path, arm: Callable[[], None]) -> int:
    """Save in a fork of this process that `arm` makes die; the status it ended with."""
    child = os.fork()
    if child == 0:
        try:
            arm()
            trainer.save(path)
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1]


def dies_at(event: int, folder: Path) -> Callable[[], None]:
    """Die before the nth thing that is done to the file system."""
    numbers = count()

    def hook(name: str, args: tuple[object, ...]) -> None:
        touches = name == "open" or name.startswith(("os.", "shutil."))
        if touches and any(str(folder) in str(arg) for arg in args) and next(numbers) == event:
            os._exit(1)

    return lambda: sys.addaudithook(hook)


def dies_at_byte(byte: int) -> Callable[[], None]:
    """The kernel kills the process in the write that would make a file longer than this."""

    def arm() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (byte, byte))

    return arm


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize("points", [10, pytest.param(50, marks=pytest.mark.long)])
def test_a_crash_at_any_moment_leaves_a_whole_checkpoint(points: int, tmp_path: Path) -> None:
    trainer, reader, path = small(), small(), tmp_path / "ck"
    before = copied(trainer)
    trainer.save(path)
    longest = max(one.stat().st_size for one in path.iterdir())
    stepped(trainer, 1)
    after = copied(trainer)
    assert not same(before, after)
    seen: set[int] = set()

    def check(what: str) -> None:
        reader.load(path)
        assert reader.steps in (0, 1), what
        assert same(reader.state, after if reader.steps else before), what
        seen.add(reader.steps)

    for byte in range(0, longest, longest // points):
        assert os.WIFSIGNALED(killed(trainer, path, dies_at_byte(byte))), byte
        check(f"killed at byte {byte}")
        assert reader.steps == 0
    moments = 0
    for event in count():
        if not killed(trainer, path, dies_at(event, tmp_path)):
            break
        check(f"killed before event {event}")
        if seen == {0, 1}:  # begin again from the one before, to kill at the rest
            for folder in tmp_path.glob("ck*"):
                shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
            with small() as start:
                start.save(path)
        moments = event
    assert moments > 12
    assert seen == {0, 1}
    check("not killed")
    assert reader.steps == 1
    assert {one.name for one in tmp_path.iterdir()} == {"ck", "ck.lock"}
    trainer.close()
    assert {one.name for one in tmp_path.iterdir()} == {"ck"}


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = small()
    trainer.save(tmp_path / "ck")
    stepped(trainer, 1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(ShardcError, match=r"on rank 0, OSError: .*No space left on device") as caught:
        trainer.save(tmp_path / "ck")
    assert caught.value.code == "SC408"
    monkeypatch.undo()
    trainer.load(tmp_path / "ck")
    assert trainer.steps == 0


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", MANIFEST])
@pytest.mark.parametrize("how", ["cut", "altered", "removed"])
def test_damage_is_refused_by_name(tmp_path: Path, name: str, how: str) -> None:
    trainer = small()
    trainer.save(tmp_path / "good")
    stepped(trainer, 1)
    trainer.save(tmp_path / "bad")
    stepped(trainer, 1)
    file = tmp_path / "bad" / name
    data = bytearray(file.read_bytes())
    if how == "cut":
        del data[-1:]
    else:
        data[len(data) // 2] ^= 1
    file.unlink()
    if how != "removed":
        file.write_bytes(data)
    want = copied(trainer)
    with pytest.raises(ShardcError) as caught:
        trainer.load(tmp_path / "bad")
    assert caught.value.code == "SC405"
    assert name in str(caught.value)
    assert same(trainer.state, want)
    assert trainer.steps == 2
    trainer.load(tmp_path / "good")
    assert trainer.steps == 0


def test_every_altered_tensor_is_named(tmp_path: Path) -> None:
    trainer = small()
    trainer.save(tmp_path / "ck")
    checks = json.loads((tmp_path / "ck" / MANIFEST).read_text())["body"]["checks"]["__0_0.distcp"]
    data = bytearray((tmp_path / "ck/__0_0.distcp").read_bytes())
    for offset, length, _ in checks:
        data[offset + length // 2] ^= 255
    (tmp_path / "ck/__0_0.distcp").write_bytes(data)
    with pytest.raises(ShardcError) as caught:
        trainer.load(tmp_path / "ck")
    assert [one.message.rpartition(" in ")[2] for one in caught.value.diagnostics] == ["'w1'", "'w2'", "'steps'"]


def test_all_that_does_not_fit_is_said(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    disk = Checkpoints(Mesh(), 0)

    def held(**tensors: torch.Tensor) -> dict[str, Held]:
        return {name: Held(tensor, TensorType.of(tensor)) for name, tensor in tensors.items()}

    saved = held(a_weight=torch.zeros(3, 4), b=torch.zeros(3), c=torch.zeros(2), old=torch.zeros(1))
    disk.save(tmp_path / "ck", saved, Position(0, 0))
    wanted = held(a_weigth=torch.ones(3, 4), b=torch.ones(4), c=torch.ones(2).bfloat16(), z=torch.ones(1))
    with pytest.raises(ShardcError) as caught:
        disk.load(tmp_path / "ck", wanted)
    golden("checkpoint_mismatch.txt", str(caught.value).replace(str(tmp_path), "."))
    with pytest.raises(ShardcError, match="no checkpoint at") as caught:
        disk.load(tmp_path / "kc", wanted)
    assert caught.value.code == "SC407"
    assert "did you mean 'ck'?" in str(caught.value)
    del wanted["b"], wanted["c"]
    disk.load(tmp_path / "ck", wanted, strict=False)
    assert all(bool((one.tensor == 1).all()) for one in wanted.values())


def test_the_background_saves_what_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, gate = small(), threading.Event()
    save = torch.save

    def late(*args: object, **kwargs: object) -> None:
        assert gate.wait(30)
        save(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(torch, "save", late)
    want = copied(trainer)
    first = trainer.save(tmp_path / "a", asynchronous=True)
    stepped(trainer, 2)
    assert not first.done
    assert not (tmp_path / "a").exists()
    gate.set()
    second = trainer.save(tmp_path / "b", asynchronous=True)
    assert first.done  # it was waited for
    assert second.wait() == tmp_path / "b"
    after = copied(trainer)
    trainer.load(tmp_path / "a")
    assert same(trainer.state, want)
    trainer.load(tmp_path / "b")
    assert same(trainer.state, after)

    (tmp_path / "file").write_text("")
    failing = trainer.save(tmp_path / "file/c", asynchronous=True)
    with pytest.raises(ShardcError, match="could not be written"):
        failing.wait()
    trainer.save(tmp_path / "d").wait()  # that failure was told of already
    trainer.save(tmp_path / "file/c", asynchronous=True)
    with pytest.raises(ShardcError, match="could not be written"):
        trainer.close()


def test_extra_is_plain_data(tmp_path: Path) -> None:
    with pytest.raises(ShardcError, match="`extra` is not plain data"):
        small().save(tmp_path / "ck", extra={"rng": torch.zeros(2)})
