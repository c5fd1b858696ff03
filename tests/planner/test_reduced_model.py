"""Equal layers of a list, and the model with the first of them."""

import torch
from torch import Tensor, nn

from shardc.planner.reduced_model import Run, equal_runs, reduced


class Block(nn.Module):
    def __init__(self, index: int, width: int = 8, kind: str = "full", rate: float = 0.0) -> None:
        super().__init__()
        self.layer_idx, self.kind = index, kind
        self.up = nn.Linear(8, width)
        self.drop = nn.Dropout(rate)
        self.down = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(self.up(x)))


class Net(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).sum()


def test_a_list_of_one_form_is_a_run_whatever_counts_its_elements() -> None:
    net = Net([Block(i) for i in range(6)])
    assert equal_runs(net) == (Run("blocks", 0, 1, 6),)


def test_other_elements_before_the_run_stay() -> None:
    net = Net([Block(0, width=16), *(Block(i) for i in range(1, 6))])
    (run,) = equal_runs(net)
    assert (run.start, run.period, run.count) == (1, 1, 5)
    small = reduced(net, [run])
    assert [name for name, _ in small.blocks.named_children()] == ["0", "1", "2"]  # type: ignore[union-attr, operator]


def test_kinds_that_alternate_are_a_run_of_that_period() -> None:
    net = Net([Block(i, kind="full" if i % 3 == 2 else "window") for i in range(12)])
    assert equal_runs(net) == (Run("blocks", 0, 3, 4),)


def test_rates_of_dropout_do_not_matter_but_none_at_all_does() -> None:
    assert equal_runs(Net([Block(i, rate=0.1 * i + 0.1) for i in range(4)])) == (Run("blocks", 0, 1, 4),)
    assert equal_runs(Net([Block(i, rate=0.1 * (i % 2)) for i in range(8)])) == (Run("blocks", 0, 2, 4),)


def test_of_two_elements_none_is_removed_and_a_shape_ends_a_run() -> None:
    two = Net([Block(0), Block(1)])
    assert equal_runs(two) == (Run("blocks", 0, 1, 2),)
    assert [name for name, _ in reduced(two, equal_runs(two)).blocks.named_children()] == ["0", "1"]  # type: ignore[union-attr, operator]
    assert equal_runs(Net([Block(0), Block(1, width=16)])) == ()
    assert equal_runs(Net([Block(i, width=8 + 8 * (i >= 4)) for i in range(7)])) == (Run("blocks", 0, 1, 4),)


def test_the_reduced_model_runs_and_the_model_stays_as_it_is() -> None:
    net = Net([Block(i) for i in range(6)])
    small = reduced(net, equal_runs(net))
    x = torch.randn(3, 8)
    expected = net.head(net.blocks[1](net.blocks[0](x))).sum()
    assert torch.equal(small(x), expected)
    assert len(net.blocks) == 6
    assert small.blocks[0] is net.blocks[0]  # type: ignore[union-attr, index]


def test_a_module_is_in_the_repetition_of_its_element() -> None:
    run = Run("model.layers", 1, 2, 3)
    names = [
        "model.layers.0.up",
        "model.layers.1",
        "model.layers.2.up",
        "model.layers.3.a",
        "model.layers.7",
        "model.x",
    ]
    assert [run.unit(name) for name in names] == [None, 0, 0, 1, None, None]
    assert Run("", 0, 1, 4).unit("2.weight") == 2
