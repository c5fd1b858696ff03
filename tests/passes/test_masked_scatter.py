"""Rows put where a mask is true: exact, and without a gather of what they are put into."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.ir.diagnostic import ShardcError
from shardc.ir.graph import op_name

IMAGE = 7  # the id of an image's tokens
WIDTH, ROWS, LENGTH = 8, 4, 6


class Multimodal(nn.Module):
    """Image features in the place of image tokens, as LLaVA puts them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.project, self.head = nn.Embedding(8, WIDTH), nn.Linear(5, WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, ids: Tensor, features: Tensor) -> Tensor:
        x = self.embed(ids)
        mask = (ids == IMAGE).unsqueeze(-1).expand_as(x)
        return torch.tanh(self.head(x.masked_scatter(mask, self.project(features)))).square().mean()


def batch_of(images: int = 6) -> dict[str, Tensor]:
    """Of the rows some have several image tokens, and one has none."""
    ids = torch.randint(0, IMAGE, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    for place in ((0, 1), (0, 4), (1, 0), (1, 1), (1, 2), (3, 5)):
        ids[place] = IMAGE
    return {"ids": ids, "features": torch.randn(images, 5, dtype=torch.float64)}


def compiled(plan: dict[str, object], mesh: str) -> shardc.Program:
    torch.manual_seed(0)
    return shardc.compile(Multimodal().double(), batch_of(), mesh=mesh, plan={"mesh": mesh, **plan})


def test_the_width_is_free() -> None:
    """Over the hidden dim: nothing but the reduction of the head's products."""
    program = compiled({"params": {"embed.weight": "-, tp", "project.weight": "tp, -", "project.bias": "tp"}}, "tp=2")
    forward = [c.kind for c in program.collectives() if c.phase == "fwd"]
    assert forward == ["all_reduce"]
    assert program.verify().ok


def test_over_dp_each_row_sends_a_number() -> None:
    """The features are gathered, and a count of each row; not the embeddings, nor the mask."""
    program = compiled({"inputs": {"ids": "dp, -", "features": "dp, -"}}, "dp=2")
    gathered = sorted(c.payload_bytes for c in program.collectives() if c.kind == "all_gather" and c.phase == "fwd")
    assert gathered == [ROWS * 8, 6 * WIDTH * 8]
    assert program.verify().ok


PLANS: dict[str, tuple[str, dict[str, object]]] = {
    "features whole": ("dp=2", {"inputs": {"ids": "dp, -"}}),
    "sequence": ("sp=2", {"inputs": {"ids": "-, sp"}}),
    "both": ("dp=2, sp=2", {"inputs": {"ids": "dp, sp", "features": "dp, -"}}),
    "uneven": ("dp=3", {"inputs": {"ids": "dp, -", "features": "dp, -"}}),
    "vocabulary": ("dp=2, tp=2", {"inputs": {"ids": "dp, -"}, "params": {"embed.weight": "tp, -"}}),
    "zero 3": ("dp=2", {"inputs": {"ids": "dp, -"}, "storage": {"zero": 3, "axes": ["dp"]}, "fuse": True}),
}


@pytest.mark.parametrize("name", PLANS)
def test_equals_eager(name: str) -> None:
    mesh, plan = PLANS[name]
    program = compiled(plan, mesh)
    assert not [node for node in program.body.calls() if op_name(node.target).startswith("masked_scatter")]
    assert program.verify().ok


def test_another_batch_has_its_mask_elsewhere() -> None:
    program = compiled({"inputs": {"ids": "dp, -", "features": "dp, -"}}, "dp=2")
    other = batch_of()
    other["ids"] = other["ids"].flip(0, 1)
    assert program.verify(batch=other).ok


FORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "elements": lambda x, m, y: x.masked_scatter(m, y),
    "a mask of columns": lambda x, m, y: x.masked_scatter(m[:1], y),
    "a mask of rows": lambda x, m, y: x.masked_scatter(m[:, :1], y),
    "a mask that widens": lambda x, m, y: x[:, :1].masked_scatter(m, y),
    "more than is needed": lambda x, m, y: x.masked_scatter(m, torch.cat((y, y)).flatten()[:25]),
    "one dim": lambda x, m, y: x[0].masked_scatter(m[0], y),
}


class Put(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.x, self.y = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(4, 6))

    def forward(self, mask: Tensor, scale: Tensor) -> Tensor:
        return (FORMS[self.form](torch.tanh(self.x), mask, torch.sin(self.y)) * scale[0]).square().sum()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("placed", ["dp, -", "-, dp"])
def test_any_mask(form: str, placed: str) -> None:
    torch.manual_seed(0)
    batch = {"mask": torch.rand(4, 6) < 0.5, "scale": torch.ones(1, dtype=torch.float64)}
    plan = {"mesh": "dp=2", "params": {"x": placed, "y": placed}, "inputs": {"mask": placed}}
    program = shardc.compile(Put(form).double(), batch, mesh="dp=2", plan=plan)
    assert program.verify().ok


def test_too_few_rows_are_refused() -> None:
    program = compiled({"inputs": {"ids": "dp, -"}}, "dp=2")
    batch = batch_of()
    batch["ids"][:] = IMAGE
    with pytest.raises((ShardcError, IndexError, RuntimeError)):
        program.verify(batch=batch)
