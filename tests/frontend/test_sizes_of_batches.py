"""Sizes that forward reads of its batch: where a call takes numbers, where values are counted, where a mask is known.

Each model equals eager PyTorch, forward and backward, and refuses a batch of other sizes.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc import ShardcError

COUNTS = torch.tensor([2, 1, 3, 2])
ROWS = 4


class Counts(nn.Module):
    def __init__(self, asked: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.last, self.asked = nn.Embedding(16, 6), nn.Linear(6, 6), asked

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        return self.last(self.asked(x, counts, self.table.weight)).tanh().square().mean()


def as_a_size(x: Tensor, counts: Tensor, table: Tensor) -> Tensor:
    return table[torch.arange(counts.sum()) % 16]


def as_a_bound(x: Tensor, counts: Tensor, table: Tensor) -> Tensor:
    return torch.cat([row[: count + 1] for row, count in zip(x, counts, strict=True)])


def of_interpolation(x: Tensor, counts: Tensor, table: Tensor) -> Tensor:
    return nn.functional.interpolate(table[None], size=counts[0] * 3)[0, :, :6]


def rows_by_counts(x: Tensor, counts: Tensor, table: Tensor) -> Tensor:
    return torch.repeat_interleave(table[:ROWS], counts, 0) + x.sum()


def rows_by_counts_named(x: Tensor, counts: Tensor, table: Tensor) -> Tensor:
    return torch.repeat_interleave(table[:, :ROWS], counts, dim=1)[:, :6] * 2


def without_repeats(x: Tensor, counts: Tensor, table: Tensor) -> Tensor:
    values, places = torch.unique(counts, return_inverse=True)
    return table[values] + x[:, 0][: values.shape[0]] + places.sum()


def without_neighbours(x: Tensor, counts: Tensor, table: Tensor) -> Tensor:
    return table[torch.unique_consecutive(counts.cumsum(0) // 3)]


def by_a_mask_of_constants(x: Tensor, counts: Tensor, table: Tensor) -> Tensor:
    places = nn.functional.pad(torch.arange(counts[2].item()), (0, 3), value=-1)
    return table[places[places != -1]]


ASKED = (as_a_size, as_a_bound, of_interpolation, rows_by_counts, rows_by_counts_named, without_repeats)
FURTHER = (without_neighbours, by_a_mask_of_constants)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("asked", [*ASKED, *FURTHER], ids=lambda function: function.__name__)
def test_what_a_call_reads_is_the_samples(asked: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    model = Counts(asked)
    batch = {"x": torch.randn(ROWS, 5, 6, generator=torch.Generator().manual_seed(1)), "counts": COUNTS}
    program = shardc.compile(model, batch, mesh="tp=2", plan={"params": {"last.weight": "tp, -"}})
    report = program.verify()
    assert report.ok
    assert report.eager_error is not None
    assert report.eager_error < 1e-6
    assert "SC128" in {d.code for d in program.diagnostics}
    with program.launch() as trainer:
        other = {"x": batch["x"] * 2 + 1, "counts": COUNTS}
        assert float(trainer.step(other).loss) == pytest.approx(model(**other).item(), rel=1e-5)
        with pytest.raises(ShardcError) as refused:
            trainer.step({"x": batch["x"], "counts": COUNTS.flip(0) + 1})
        assert refused.value.code == "SC512"


class Added(nn.Module):
    """Rows that a mask chooses, and as many rows of another tensor; a weight that happens to have as many."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.others, self.inner = nn.Embedding(16, 6), nn.Linear(3, 6), nn.Linear(6, 6, bias=False)

    def forward(self, tokens: Tensor, image: Tensor) -> Tensor:
        x = self.table(tokens)
        chosen = tokens == 3
        x[chosen, :] = self.inner(x[chosen, :].clone()) + self.others(image)
        return x.square().mean()


@pytest.mark.parametrize("mesh", ["dp=2", "dp=2, tp=2"])
def test_as_many_rows_as_a_mask_chooses(mesh: str) -> None:
    tokens = torch.tensor([[3, 1, 3], [2, 3, 5], [3, 3, 7], [8, 9, 3]])  # six places, as the inner weight has rows
    batch = {"tokens": tokens, "image": torch.randn(6, 3, generator=torch.Generator().manual_seed(1))}
    model = Added()
    plan = {"inputs": {"tokens": "dp"}, "params": {"inner.weight": "tp, -"} if "tp" in mesh else {}}
    program = shardc.compile(model, batch, mesh=mesh, plan=plan)
    report = program.verify()
    assert report.ok
    assert report.eager_error is not None
    assert report.eager_error < 1e-6
    with program.launch() as trainer:
        other = {"tokens": tokens.flip(0).flip(1), "image": batch["image"] * 2}
        assert float(trainer.step(other).loss) == pytest.approx(model(**other).item(), rel=1e-5)
        with pytest.raises(ShardcError) as refused:
            trainer.step({"tokens": torch.full_like(tokens, 3), "image": batch["image"]})
        assert refused.value.code == "SC512"
