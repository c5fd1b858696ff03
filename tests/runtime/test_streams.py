"""Random numbers of runs: every seed, step and microbatch draws from a stream of its own."""

import torch
from torch import Tensor, nn

import shardc
from shardc.ir.ops.streams import fold_in, step_key


class Dropped(nn.Module):
    """The mask of a dropout, as an output."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = nn.functional.dropout(x * self.scale, 0.5)
        return {"loss": y.sum(), "y": y}


def masks(seed: int, steps: int, mesh: str = "dp=2", count: int = 2) -> list[bytes]:
    """What is dropped, microbatch by microbatch."""
    batch = {"x": torch.ones(8, 64)}
    plan = {"accumulate": count, "inputs": {"x": "dp"}, "outputs": {"y": "dp"}}
    trainer = shardc.compile(Dropped(), batch, mesh=mesh, plan=plan).launch(seed=seed)
    found: list[bytes] = []
    for _ in range(steps):
        y = trainer.step(batch).outputs["y"].full()
        found += [(part != 0).numpy().tobytes() for part in y.chunk(count)]
    return found


def test_seeds_steps_and_microbatches_never_share_a_key() -> None:
    keys = {
        fold_in(step_key(seed, step), k)
        for seed in (*range(-3, 20), 1 << 31, 1 << 32, (1 << 63) - 1)
        for step in range(300)
        for k in range(16)
    }
    assert len(keys) == 26 * 300 * 16
    assert all(-(1 << 63) <= key < 1 << 63 for key in keys)


def test_a_key_depends_on_every_bit_of_its_words() -> None:
    """Each flipped bit flips about half of the 64."""
    for bit in range(64):
        for other in (fold_in(11, 5 ^ 1 << bit), fold_in(11 ^ 1 << bit, 5)):
            assert 12 <= ((fold_in(11, 5) ^ other) & (1 << 64) - 1).bit_count() <= 52


def test_neighbouring_seeds_draw_other_masks_on_any_layout() -> None:
    """Steps 1, 2 of seed 0 were steps 0, 1 of seed 1, and a microbatch's mask was another step's."""
    first, second = masks(0, 3), masks(1, 3)
    assert len({*first, *second}) == 12
    assert first == masks(0, 3, mesh="dp=4")
    assert len({*masks(0, 4, count=1), *first}) == 10


def test_a_simulated_step_is_the_first_of_a_run() -> None:
    batch = {"x": torch.ones(8, 64)}
    program = shardc.compile(
        Dropped(), batch, mesh="dp=2", plan={"inputs": {"x": "dp"}, "outputs": {"y": "dp"}, "seed": 3}
    )
    y = program.launch().step(batch).outputs["y"].full()
    assert torch.equal(program.simulate(batch).outputs["y"].full(), y)
