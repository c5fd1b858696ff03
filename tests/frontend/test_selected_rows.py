"""Rows that a mask chooses, in masked form: as eager PyTorch has them, whatever their number, under every layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from shardc import ShardcError

SIZES = 4, 6, 11  # batch, sequence, words
FIRST = torch.tensor([[1, 2, 3, 4, 5, 6], [7, 0, 0, 0, 0, 0], [1, 1, 9, 8, 0, 0], [2, 3, 0, 0, 0, 0]])
OTHER = torch.tensor([[5, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [3, 0, 8, 8, 0, 2], [10, 10, 10, 10, 10, 10]])
LAYOUTS = {
    "dp2": ("dp=2", {"inputs": {"*": "dp"}}),
    "dp2 tp2": ("dp=2, tp=2", {"inputs": {"*": "dp"}, "params": {"head.weight": "tp, -"}}),
    "uneven": ("dp=3", {"inputs": {"*": "dp"}}),
}


class Masked(nn.Module):
    def __init__(self, chosen: Callable[[Masked, Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.head, self.norm = nn.Embedding(11, 8), nn.Linear(8, 11), nn.LayerNorm(8)
        self.square = nn.Linear(8, 8)
        self.fill, self.chosen = nn.Parameter(torch.randn(8)), chosen

    def forward(self, tokens: Tensor) -> Tensor:
        return self.chosen(self, tokens, tokens != 0, self.table(tokens))


def mean(m: Masked, tokens: Tensor, mask: Tensor, h: Tensor) -> Tensor:
    return m.head(h[mask]).square().mean()


def total(m: Masked, tokens: Tensor, mask: Tensor, h: Tensor) -> Tensor:
    return torch.sum(m.norm(h[mask]).tanh()) + h[mask].sum(0).square().sum() + h[mask].mean(dim=0).norm()


def cross_entropy(m: Masked, tokens: Tensor, mask: Tensor, h: Tensor) -> Tensor:
    return F.cross_entropy(m.head(h)[mask], tokens[mask])


def cross_entropy_sums(m: Masked, tokens: Tensor, mask: Tensor, h: Tensor) -> Tensor:
    rows = F.cross_entropy(m.head(h[mask]), tokens[mask], reduction="none", label_smoothing=0.1)
    return rows.sum() / rows.numel() + rows.mean()


def sparse_prediction(m: Masked, tokens: Tensor, mask: Tensor, h: Tensor) -> Tensor:
    labels = tokens.view(-1)
    flat = h.view(labels.shape[0], -1)
    keep = labels != 0
    logits = m.head(F.gelu(m.norm(flat[keep])))
    return F.cross_entropy(logits.view(-1, 11), labels[keep].view(-1))


def losses(m: Masked, tokens: Tensor, mask: Tensor, h: Tensor) -> Tensor:
    x, y = h[mask], m.norm(h)[mask]
    pairs = F.mse_loss(x, y) + F.l1_loss(x, y, reduction="sum") + F.smooth_l1_loss(x, y)
    return (
        pairs
        + F.binary_cross_entropy_with_logits(x, y.sigmoid())
        + F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean")
    )


def scattered(m: Masked, tokens: Tensor, mask: Tensor, h: Tensor) -> Tensor:
    x = h.clone()
    x[mask] = m.norm(h[mask]) * 2
    return m.head(x).square().mean()


def scattered_by_index(m: Masked, tokens: Tensor, mask: Tensor, h: Tensor) -> Tensor:
    where = mask.nonzero(as_tuple=True)
    x = m.head(h)
    x[where] = x[where].tanh()
    return x.square().mean()


def masked_scatter(m: Masked, tokens: Tensor, mask: Tensor, h: Tensor) -> Tensor:
    wide = mask.unsqueeze(-1).expand_as(h)
    return m.head(h.masked_scatter(wide, m.norm(h)[mask])).square().mean()


def one_row(m: Masked, tokens: Tensor, mask: Tensor, h: Tensor) -> Tensor:
    x = h.clone()
    x[mask] = m.fill
    return m.head(x).square().mean()


def indices(m: Masked, tokens: Tensor, mask: Tensor, h: Tensor) -> Tensor:
    kept = torch.nonzero(mask.flatten(), as_tuple=False).flatten()
    return m.head(h.reshape(-1, 8)[kept]).square().sum()


def of_logarithms(m: Masked, tokens: Tensor, mask: Tensor, h: Tensor) -> Tensor:
    p = torch.where(mask[..., None], h.sigmoid(), 0.0)
    return m.head(p[mask].log()).square().mean()


def twice(m: Masked, tokens: Tensor, mask: Tensor, h: Tensor) -> Tensor:
    x = h[mask]
    even = tokens[mask] % 2 == 0
    return m.head(x[even]).square().sum()


def columns(m: Masked, tokens: Tensor, mask: Tensor, h: Tensor) -> Tensor:
    return h[mask][:, 1:5].square().mean() + h[mask, :3].sum() + torch.masked_select(h[..., 0], mask).exp().mean()


def joined(m: Masked, tokens: Tensor, mask: Tensor, h: Tensor) -> Tensor:
    return m.head(torch.cat([h[mask][:, :4], m.norm(h)[mask][:, 4:]], -1)).square().mean()


def in_place(m: Masked, tokens: Tensor, mask: Tensor, h: Tensor) -> Tensor:
    x = h[mask]
    x *= 2
    x[:, 0] = 1.0
    return m.head(x).square().mean() + h.square().mean()


def extremes(m: Masked, tokens: Tensor, mask: Tensor, h: Tensor) -> Tensor:
    return h[mask].max() - h[mask].amin(0).sum() + (tokens[mask] > 9).any()


def sorted_columns(m: Masked, tokens: Tensor, mask: Tensor, h: Tensor) -> Tensor:
    x = h[mask]
    return x.topk(2, 1)[0].mean() + x.max(-1).values.mean() + (x.sort(-1)[0] * m.fill).mean() + x.min(dim=1)[0].mean()


def larger_of_two(m: Masked, tokens: Tensor, mask: Tensor, h: Tensor) -> Tensor:
    return (torch.max(h[mask], m.norm(h[mask])) + torch.min(h[mask], m.fill)).square().mean()


def infinite_slopes(m: Masked, tokens: Tensor, mask: Tensor, h: Tensor) -> Tensor:
    harmless = m.square(torch.full((8,), 0.5, dtype=h.dtype)).detach()  # where rows that are not chosen become zero
    x = m.square(h[mask]) - harmless
    return x.square().sum(-1).sqrt().mean() + x.square().log().mean() + x.norm(dim=-1).mean() + (1 / x).tanh().mean()


def places_of_a_part(m: Masked, tokens: Tensor, mask: Tensor, h: Tensor) -> Tensor:
    rows, columns = mask[:, 1:].nonzero(as_tuple=True)  # of tokens but the first: positions of the part
    return m.head(h[rows, columns]).square().mean() + h[rows, columns + 1].square().mean() + h[rows].sum()


def views_in_place(m: Masked, tokens: Tensor, mask: Tensor, h: Tensor) -> Tensor:
    x = h[mask] * 1
    x.view(-1, 2, 4)[:, 0] = 0.0
    x[:, :6].mul_(2).add_(m.fill[:6])
    x[x > 1] = 0.0
    return x.square().mean()


def rows_behind(m: Masked, tokens: Tensor, mask: Tensor, h: Tensor) -> Tensor:
    """The places of some tokens, and those behind: of tokens that are not chosen there may be none."""
    first = tokens[0]
    behind = torch.argwhere(first[:-1] > 4).squeeze(1) + 1
    wide = torch.argwhere(first > 4).squeeze(1) * 2 - 3  # no place, where a token is not chosen
    return m.head(h[0][behind]).square().sum() + m.square(h[0][wide.clamp(0, 3)]).sum()


def by_python_count(m: Masked, tokens: Tensor, mask: Tensor, h: Tensor) -> Tensor:
    x = m.head(h[mask])
    return x.square().sum() / x.shape[0] if x.shape[0] > 0 else h.sum() * 0


def mask_written_between(m: Masked, tokens: Tensor, mask: Tensor, h: Tensor) -> Tensor:
    before = h[mask.clone()]  # which backward needs as it was
    mask[0] = False
    return before.square().sum() + m.head(h[mask]).square().sum()


def by_another_mask(m: Masked, tokens: Tensor, mask: Tensor, h: Tensor) -> Tensor:
    x = h.clone()
    x[mask.flip(0)] = m.norm(h[mask])
    return m.head(x).square().mean()


def by_two_equal_masks(m: Masked, tokens: Tensor, mask: Tensor, h: Tensor) -> Tensor:
    return F.mse_loss(h[tokens != 0], m.norm(h)[tokens != 0].detach(), reduction="sum")


WORK = [
    *(mask_written_between, by_another_mask, by_two_equal_masks),
    *(mean, total, cross_entropy, cross_entropy_sums, sparse_prediction, losses, scattered, scattered_by_index),
    *(masked_scatter, one_row, indices, of_logarithms, twice, columns, joined, in_place, extremes, by_python_count),
    *(sorted_columns, larger_of_two, infinite_slopes, views_in_place, rows_behind),
]


def equals_eager(model: nn.Module, trainer: shardc.Trainer, batch: Tensor) -> None:
    model.zero_grad()
    loss = model(batch)
    loss.backward()
    result = trainer.step(batch)
    torch.testing.assert_close(result.loss, loss.detach(), rtol=1e-12, atol=1e-12)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(result.grads[name], parameter.grad, rtol=0, atol=1e-12, msg=name)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("chosen", WORK, ids=lambda chosen: chosen.__name__)
def test_steps_are_those_of_eager_training(
    chosen: Callable[[Masked, Tensor, Tensor, Tensor], Tensor], layout: str
) -> None:
    torch.manual_seed(0)
    model = Masked(chosen).double()
    mesh, plan = LAYOUTS[layout]
    program = shardc.compile(model, FIRST, mesh=mesh, plan=plan)
    assert program.verify().ok
    trainer = program.launch()
    equals_eager(model, trainer, FIRST)
    equals_eager(model, trainer, OTHER)


def test_a_mask_that_leaves_out_nothing_is_no_mask_and_each_step_checks_it() -> None:
    def running(m: Masked, tokens: Tensor, mask: Tensor, h: Tensor) -> Tensor:
        return h[tokens < 10].cumsum(0).tanh().mean()

    model = Masked(running).double()
    program = shardc.compile(model, FIRST, mesh="dp=2", plan={"inputs": {"*": "dp"}})
    assert [d.code for d in program.diagnostics if d.code == "SC128"]
    trainer = program.launch()
    equals_eager(model, trainer, FIRST)
    with pytest.raises(ShardcError) as caught:
        trainer.step(OTHER)
    assert caught.value.code == "SC512"


def running_sum(m: Masked, tokens: Tensor, mask: Tensor, h: Tensor) -> Tensor:
    return h[mask].cumsum(0).mean()


def batch_norm(m: Masked, tokens: Tensor, mask: Tensor, h: Tensor) -> Tensor:
    return F.batch_norm(h[mask], None, None, training=True).mean()


def attention(m: Masked, tokens: Tensor, mask: Tensor, h: Tensor) -> Tensor:
    return (h[mask] @ h[mask].T).softmax(-1).square().mean()


def reversed_rows(m: Masked, tokens: Tensor, mask: Tensor, h: Tensor) -> Tensor:
    return (h[mask] * h[mask].flip(0)).sum()


def one_of_them(m: Masked, tokens: Tensor, mask: Tensor, h: Tensor) -> Tensor:
    return h[mask][0].sum()


def positions(m: Masked, tokens: Tensor, mask: Tensor, h: Tensor) -> Tensor:
    return (h[mask] * torch.arange(24)[:, None]).sum()


def less_the_mean(m: Masked, tokens: Tensor, mask: Tensor, h: Tensor) -> Tensor:
    return (h[mask] - h[mask].std(0)).sum()


def two_masks(m: Masked, tokens: Tensor, mask: Tensor, h: Tensor) -> Tensor:
    return (h[mask] * h[h[..., 0] > 0]).sum()


def written_by_two_masks(m: Masked, tokens: Tensor, mask: Tensor, h: Tensor) -> Tensor:
    x = h.clone()
    x[mask] = h[h[..., 0] > 0]
    return x.sum()


REFUSED = [running_sum, batch_norm, attention, reversed_rows, one_of_them, positions, less_the_mean, two_masks]


@pytest.mark.parametrize("chosen", [*REFUSED, written_by_two_masks], ids=lambda chosen: chosen.__name__)
def test_what_does_not_go_row_by_row_is_refused(chosen: Callable[[Masked, Tensor, Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(ShardcError) as caught:
        shardc.compile(Masked(chosen), FIRST, mesh="dp=2")
    (found,) = caught.value.diagnostics
    assert found.code == "SC101"
    assert "test_selected_rows.py:" in (found.location or "")
    assert "h[" in (found.source_text or "")
    assert "torch.where" in (found.hint or "")


# ---------------------------------------------------------------------- calls that hold for the sample's number alone
def as_many_rows(m: Masked, tokens: Tensor, mask: Tensor, h: Tensor) -> Tensor:
    x = h[mask]
    targets = m.fill.expand(x.shape[0], -1)
    return F.mse_loss(x, torch.zeros(x.size(0), 8, dtype=h.dtype)) + torch.cat([x, targets], -1).tanh().mean()


def added_in_place(m: Masked, tokens: Tensor, mask: Tensor, h: Tensor) -> Tensor:
    total = torch.zeros(h[mask].shape[0], 8, dtype=h.dtype)
    same = total
    total += h[mask]
    total.index_add_(0, tokens[mask], h[mask])
    return (total.tanh() + same.sigmoid()).mean()


def cumulated_in_place(m: Masked, tokens: Tensor, mask: Tensor, h: Tensor) -> Tensor:
    x = h[mask].clone()
    x.cumsum_(0)
    return x.square().mean()


def rows_of_another_number(m: Masked, tokens: Tensor, mask: Tensor, h: Tensor) -> Tensor:
    x = h[tokens[:, 1] != 0].sum(1)  # three of four rows
    return x.view(4, -1).softmax(-1).square().sum()


def picked(m: Masked, tokens: Tensor, mask: Tensor, h: Tensor) -> Tensor:
    x = m.head(h[mask])
    return x[torch.arange(x.shape[0]), tokens[mask]].mean()


def step_or_refusal(chosen: Callable[[Masked, Tensor, Tensor, Tensor], Tensor], sample: Tensor, batch: Tensor) -> str:
    """The code of the refusal, of the model or of a batch; what is computed is what eager PyTorch computes."""
    torch.manual_seed(0)
    model = Masked(chosen).double()
    try:
        trainer = shardc.compile(model, sample, mesh="dp=2", plan={"inputs": {"*": "dp"}}).launch()
        equals_eager(model, trainer, batch)
    except shardc.ShardcError as refusal:
        return refusal.code
    return ""


EVERY = torch.ones_like(FIRST)


@pytest.mark.parametrize(
    ("chosen", "sample", "other"),
    [(as_many_rows, "", "SC512"), (places_of_a_part, "", ""), (cumulated_in_place, "SC101", "SC101"),
     (rows_of_another_number, "SC101", "SC101"), (picked, "SC101", "SC101")],
    ids=lambda value: getattr(value, "__name__", value),
)  # fmt: skip
def test_of_some_rows(chosen: Callable[[Masked, Tensor, Tensor, Tensor], Tensor], sample: str, other: str) -> None:
    assert step_or_refusal(chosen, FIRST, FIRST) == sample
    assert step_or_refusal(chosen, FIRST, torch.where(OTHER == 10, 1, OTHER)) == other


@pytest.mark.parametrize(
    ("chosen", "code"), [(added_in_place, ""), (cumulated_in_place, "SC101"), (picked, "")],
    ids=lambda value: getattr(value, "__name__", value),
)  # fmt: skip
def test_of_all_rows(chosen: Callable[[Masked, Tensor, Tensor, Tensor], Tensor], code: str) -> None:
    assert step_or_refusal(chosen, EVERY, EVERY) == code
    assert step_or_refusal(chosen, EVERY, FIRST) == (code or "SC512")
