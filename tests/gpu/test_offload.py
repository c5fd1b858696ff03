"""What lies on the host of a GPU: the same bits as without, less memory of the GPU, pinned state, replayed steps."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardc
from benchmarks.measured_models import Decoder, Sizes
from tests.ports import free_port

pytestmark = pytest.mark.gpu
SIZES = Sizes(4, 256, 4, 4, 1024, 256, 512)
OFFLOAD = {"activations": "all", "optimizer": "all", "least": "64KiB"}


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", **place}.items():
        monkeypatch.setenv(key, value)


def trained(
    plan: dict[str, Any], steps: int, path: Path | None = None, *, load: bool = False, graphs: bool = False
) -> tuple[dict[str, Tensor], int, set[str]]:
    """Parameters and state after some steps, the GPU's peak, and where state lies."""
    torch.manual_seed(0)
    model = Decoder(SIZES)
    tokens = torch.randint(0, SIZES.vocabulary, (8, SIZES.sequence))
    batch = {"tokens": tokens, "targets": tokens.roll(-1, 1)}
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plan = {"mesh": "dp=1", "precision": "bf16", "fuse": True, **plan}
    program = shardc.compile(model, batch, plan=plan, optimizer=adam)
    on_gpu = {name: x.cuda() for name, x in batch.items()}
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()  # products' workspaces of the runs before, one a stream
    with program.launch(device="cuda", timeout=60, graphs=graphs) as trainer:
        if load and path is not None:
            trainer.load(path)
        for _ in range(steps):
            trainer.step(on_gpu)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        if path is not None and not load:
            trainer.save(path)
        moments = [x for name, x in trainer.state.items() if name.endswith((":exp_avg", ":exp_avg_sq"))]
        places = {("pinned" if x.is_pinned() else x.device.type) for x in moments if x.numel() >= 2**18}
        state = {name: x.cpu() for name, x in trainer.state_dict(("param", "state")).items()}
    return state, peak, places


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("plan", [{}, {"accumulate": 2}, {"recompute": "selective"}], ids=str)
def test_no_bit_changes_and_less_is_held(plan: dict[str, Any], graphs: bool) -> None:
    plain, had, everywhere = trained(plan, 6)
    again, _, _ = trained(plan, 6)
    moved, left, places = trained({**plan, "offload": OFFLOAD}, 6, graphs=graphs)
    assert everywhere == {"cuda"}
    assert places == {"pinned"}
    assert left < had or graphs
    for name, value in plain.items():
        if torch.equal(value, again[name]):  # of kernels that repeat their bits
            assert torch.equal(value, moved[name]), name
        else:
            torch.testing.assert_close(moved[name], value, rtol=1e-2, atol=1e-4)


def test_checkpoints_hold_the_same(tmp_path: Path) -> None:
    trained({"offload": OFFLOAD}, 3, tmp_path / "moved")
    there, _, places = trained({"offload": OFFLOAD}, 2, tmp_path / "moved", load=True)
    plain, _, _ = trained({}, 2, tmp_path / "moved", load=True)
    assert places == {"pinned"}
    for name, value in plain.items():
        torch.testing.assert_close(there[name], value, rtol=1e-2, atol=1e-4)
