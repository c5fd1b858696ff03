"""Models that use positions, lengths or masks in odd ways, their sequence plain or in zigzag over an axis: loss and
each gradient as eager PyTorch has them, and what they return in the order of the user's rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardc
from shardc.ir.text import print_graph

VOCAB, WIDTH = 24, 8


class Host(nn.Module):
    """A layer of attention, and what a case does with it."""

    def __init__(self, case: str, heads: int = 2) -> None:
        super().__init__()
        self.case, self.heads = case, heads
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head, self.score = nn.Linear(WIDTH, VOCAB), nn.Linear(WIDTH, 1)
        self.first, self.prefix = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Parameter(torch.randn(1, 3, WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.taps = nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH, padding=3)

    def attend(self, x: Tensor, mask: Tensor | None = None, causal: bool = True) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        o = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal and mask is None)
        return x + self.out(o.transpose(1, 2).flatten(2))

    def embed(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.places(torch.arange(ids.shape[1]))

    def hidden(self, ids: Tensor) -> Tensor:
        return self.attend(self.embed(ids))

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

    def pooled(self, x: Tensor) -> Tensor:
        return self.head(x).square().mean()

    def prefixed(self, ids: Tensor, before: Tensor) -> Tensor:
        return torch.cat([before.expand(ids.shape[0], -1, -1), self.embed(ids)], 1)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return CASES[self.case](self, ids, labels)


Case = Callable[[Host, Tensor, Tensor], Tensor]
CASES: dict[str, Case] = {}


def case(body: Case) -> Case:
    CASES[body.__name__] = body
    return body


def rows(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0])


def of_state(name: str, body: Callable[[Host, Tensor], Tensor]) -> None:
    """A case that makes one tensor of hidden states, which the head reads."""
    CASES[name] = lambda m, ids, labels: m.pooled(body(m, m.hidden(ids)))


def of_rows(name: str, body: Callable[[Host, Tensor], Tensor]) -> None:
    """A case that makes as many rows as there are labels."""
    CASES[name] = lambda m, ids, labels: m.loss(body(m, m.hidden(ids)), labels)


# ---------------------------------------------------------------------- one row, some rows, all rows as one
of_state("last_row", lambda m, x: x[:, -1])
of_state("first_row", lambda m, x: x[:, 0])
of_state("last_row_as_a_section", lambda m, x: x[:, -1:])
of_state("some_rows", lambda m, x: x[:, 2:5] * x[:, -3:])
of_state("rows_beside_all_rows", lambda m, x: x * x[:, 3:4] - x[:, -2, None])
of_state("mean_over_rows", lambda m, x: x.mean(1))
of_state("greatest_of_rows", lambda m, x: x.amax(1))
of_state("median_of_rows", lambda m, x: x.median(1).values)
of_state("weighted_by_a_softmax", lambda m, x: (m.score(x).softmax(1) * x).sum(1))
of_state("logsumexp_over_rows", lambda m, x: x.logsumexp(1))
of_state("differences_of_rows", lambda m, x: x.diff(dim=1))
of_state("windows_of_rows", lambda m, x: x.unfold(1, 3, 1).mean(-1))
of_state("pairs_of_rows", lambda m, x: x[:, : x.shape[1] // 2 * 2].unflatten(1, (-1, 2)).mean(2))
of_state("best_rows", lambda m, x: x.gather(1, m.score(x).topk(4, 1).indices.expand(-1, -1, WIDTH)))
of_state("product_of_rows", lambda m, x: torch.tanh(x).cumprod(1))
of_state("row_by_row", lambda m, x: torch.tanh(torch.tanh(x[:, 0] + x[:, 1]) + x[:, 2]))
of_state("half_as_many", lambda m, x: F.interpolate(x.mT, scale_factor=0.5, mode="linear").mT)
of_state("pooled_in_windows", lambda m, x: F.avg_pool1d(x.mT, 2).mT)
of_state("twice_as_many", lambda m, x: m.attend(F.interpolate(x.mT, size=2 * x.shape[1]).mT))
of_rows("pooled_with_neighbours", lambda m, x: F.max_pool1d(x.mT, 3, 1, 1).mT)
of_rows("backwards", lambda m, x: x.flip(1) + m.attend(x.flip(1)).flip(1))
of_rows("halves_swapped", lambda m, x: torch.cat(x.tensor_split(2, 1)[::-1], 1))
of_rows("rolled", lambda m, x: x.roll(1, 1) + x.roll(-2, 1))
of_rows("taken_apart", lambda m, x: torch.stack(x.unbind(1)[::-1], 1))
of_rows("permuted", lambda m, x: x[:, (torch.arange(x.shape[1]) * 3) % x.shape[1]])
of_rows("running_greatest", lambda m, x: x.cummax(1).values)
of_rows("running_products_with_zeros", lambda m, x: x.masked_fill(x < -0.5, 0.0).cumprod(1))
of_rows("running_products_of_one_zero", lambda m, x: (x * (torch.arange(x.shape[1]) != 5)[:, None]).cumprod(1))
of_rows("running_products_from_behind", lambda m, x: x.flip(1).cumprod(1).flip(1))
of_rows("running_log_sum_exp", lambda m, x: x.logcumsumexp(1) - x.flip(1).logcumsumexp(1).flip(1))
of_rows("where_the_running_least_is", lambda m, x: x.cummin(1).values * x.cummin(1).indices)
of_rows("running_greatest_of_equal_rows", lambda m, x: (x * 2).round().sub(x).detach().add(x).cummax(1).values * x)
of_rows("running_greatest_from_behind", lambda m, x: x.flip(1).cummax(1).values.flip(1))
of_rows("running_greatest_of_a_running_sum", lambda m, x: x.cumsum(1).cummax(1).values.diff(dim=1, prepend=x[:, :1]))
of_rows("running_mean_of_some", lambda m, x: (x * (x > 0)).cumsum(1) / (x > 0).cumsum(1).clamp(min=1))
of_rows("gathered_by_the_running_greatest", lambda m, x: x.gather(1, x.cummax(1).indices))
of_state("greatest_row_and_where", lambda m, x: x.max(1).values * x.argmin(1) + x.min(1).values)
of_state("every_third_row", lambda m, x: x[:, 1::3] * x[:, 1::3].cumsum(1))
of_state("every_other_row_backwards", lambda m, x: x.flip(1)[:, ::2].cumprod(1))
of_state("overlapping_means", lambda m, x: F.avg_pool1d(x.mT, 3, 2, 1, count_include_pad=False).mT.cummax(1).values)
of_state("overlapping_maxima", lambda m, x: F.max_pool1d(x.mT, 4, 3, 2, ceil_mode=True).mT)
of_state("rows_named_twice", lambda m, x: x[:, torch.tensor([3, -1, 3])] * x.index_select(1, torch.tensor([0, 0, 5])))
of_rows("normalised_over_rows", lambda m, x: (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True))
of_rows("batch_norm", lambda m, x: m.norm(x.mT).mT)
of_rows("causal_taps", lambda m, x: F.silu(m.taps(x.mT)[..., : x.shape[1]]).mT)
of_rows("products_of_rows", lambda m, x: (x @ x.mT).tril().softmax(-1) @ x)
of_rows("scaled_by_position", lambda m, x: x * torch.arange(x.shape[1], dtype=x.dtype)[:, None])
of_rows("buckets", lambda m, x: x * torch.bucketize(torch.arange(x.shape[1]), torch.tensor([2, 5, 9]))[:, None])
of_rows("noise", lambda m, x: F.dropout(x + torch.randn_like(x) + torch.rand(1, x.shape[1], 1), 0.25))
of_rows("next_and_last", lambda m, x: torch.cat([x[:, 1:], x[:, :1]], 1) * torch.cat([x[:, :1] * 0, x[:, :-1]], 1))


@case
def where_of_positions(m: Host, ids: Tensor, labels: Tensor) -> Tensor:
    x, position = m.hidden(ids), torch.arange(ids.shape[1])
    x = torch.where((position % 3 == 0)[None, :, None], x, x * position[None, :, None] * 0.1)
    return m.loss(torch.where((position < ids.shape[1] // 2)[None, :, None], x, -x), labels)


@case
def rows_of_a_mask(m: Host, ids: Tensor, labels: Tensor) -> Tensor:
    x, seen = m.hidden(ids), ids != 3
    last = (seen * torch.arange(ids.shape[1])).argmax(-1)
    return m.pooled(x[rows(x), last]) + m.pooled(x[rows(x), -1 - seen.int().argmin(-1)]) + m.loss(x, labels)


@case
def positions_that_are_an_input(m: Host, ids: Tensor, labels: Tensor) -> Tensor:
    x = m.hidden(ids)
    return m.pooled(x.gather(1, (ids[:, :3] % ids.shape[1])[..., None].expand(-1, -1, WIDTH)))


@case
def row_of_the_greatest_score(m: Host, ids: Tensor, labels: Tensor) -> Tensor:
    x = m.hidden(ids)
    return m.pooled(x[rows(x), m.score(x).squeeze(-1).argmax(1)]) + m.loss(x, labels)


@case
def row_of_the_greatest_token(m: Host, ids: Tensor, labels: Tensor) -> Tensor:
    return m.pooled(m.hidden(ids)[rows(ids), ids.argmax(-1)])


@case
def last_of_a_mask(m: Host, ids: Tensor, labels: Tensor) -> Tensor:
    return m.pooled(m.hidden(ids)[rows(ids), (labels > 5).sum(1) - 1])


@case
def last_that_is_no_padding(m: Host, ids: Tensor, labels: Tensor) -> Tensor:
    last = (torch.arange(ids.shape[1], dtype=torch.int32) * (ids != 3).int()).argmax(-1)
    return m.score(m.hidden(ids))[rows(ids), last].square().mean()


@case
def masked_mean(m: Host, ids: Tensor, labels: Tensor) -> Tensor:
    x, mask = m.hidden(ids), (labels > 5).double()
    return m.pooled((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1))


@case
def sorted_rows(m: Host, ids: Tensor, labels: Tensor) -> Tensor:
    x = m.hidden(ids)
    scores, order = m.score(x).squeeze(-1).sort(1)
    return (scores * torch.arange(ids.shape[1])).mean() + m.loss(x.gather(1, order[..., None].expand_as(x)), labels)


@case
def scattered_rows(m: Host, ids: Tensor, labels: Tensor) -> Tensor:
    x = m.hidden(ids)
    return m.loss(torch.zeros_like(x).scatter_add(1, (ids * 7 % x.shape[1])[..., None].expand_as(x), x), labels)


@case
def written_rows(m: Host, ids: Tensor, labels: Tensor) -> Tensor:
    x = m.hidden(ids).clone()
    x[:, 0] = 0
    x[:, -2:] = x[:, -2:] * 2
    return m.loss(x, labels)


@case
def shifted_tokens(m: Host, ids: Tensor, labels: Tensor) -> Tensor:
    shifted = ids.new_zeros(ids.shape)
    shifted[:, 1:] = ids[:, :-1].clone()
    shifted[:, 0] = 2
    return m.loss(m.hidden(shifted.masked_fill_(shifted == 7, 1)), labels)


@case
def middle_rows(m: Host, ids: Tensor, labels: Tensor) -> Tensor:
    return m.loss(m.hidden(ids)[:, 3:10], labels[:, 3:10])


@case
def last_rows(m: Host, ids: Tensor, labels: Tensor) -> Tensor:
    return m.loss(m.hidden(ids)[:, -5:], labels[:, -5:])


@case
def every_third_row(m: Host, ids: Tensor, labels: Tensor) -> Tensor:
    return m.loss(m.hidden(ids)[:, 1::3], labels[:, 1::3])


@case
def halves_multiplied(m: Host, ids: Tensor, labels: Tensor) -> Tensor:
    x, half = m.hidden(ids), ids.shape[1] // 2
    return m.loss(x[:, :half] * x[:, -half:], labels[:, :half])


@case
def prefix_of_three(m: Host, ids: Tensor, labels: Tensor) -> Tensor:
    return m.loss(m.attend(m.attend(m.prefixed(ids, m.prefix)))[:, 3:], labels)


@case
def class_token(m: Host, ids: Tensor, labels: Tensor) -> Tensor:
    x = m.attend(m.attend(m.prefixed(ids, m.first), causal=False), causal=False)
    return m.pooled(x[:, 0]) + m.loss(x[:, 1:], labels)


@case
def class_token_behind(m: Host, ids: Tensor, labels: Tensor) -> Tensor:
    return m.pooled(m.attend(torch.cat([m.embed(ids), m.first.expand(ids.shape[0], -1, -1)], 1))[:, -1])


@case
def two_sequences_as_one(m: Host, ids: Tensor, labels: Tensor) -> Tensor:
    return m.loss(m.attend(torch.cat([m.embed(ids), m.embed(labels)], 1))[:, ids.shape[1] :], labels)


@case
def two_sequences_in_turns(m: Host, ids: Tensor, labels: Tensor) -> Tensor:
    return m.loss(m.attend(torch.stack([m.embed(ids), m.embed(labels)], 2).flatten(1, 2))[:, ::2], labels)


@case
def each_row_twice(m: Host, ids: Tensor, labels: Tensor) -> Tensor:
    return m.loss(m.attend(m.embed(ids).repeat_interleave(2, 1))[:, 1::2], labels)


@case
def blocks_attend_alone(m: Host, ids: Tensor, labels: Tensor) -> Tensor:
    length = ids.shape[1] // 4 * 4
    x = m.attend(m.embed(ids)[:, :length].unflatten(1, (4, -1)).flatten(0, 1))
    return m.loss(x.unflatten(0, (-1, 4)).flatten(1, 2), labels[:, :length])


@case
def documents(m: Host, ids: Tensor, labels: Tensor) -> Tensor:
    document = (ids == 3).long().cumsum(1)
    seen = (document[:, :, None] == document[:, None]) & torch.ones(ids.shape[1], ids.shape[1]).tril().bool()
    return m.loss(m.attend(m.embed(ids), seen[:, None]), labels)


@case
def positions_of_a_mask(m: Host, ids: Tensor, labels: Tensor) -> Tensor:
    return m.loss(m.attend(m.tokens(ids) + m.places(((ids != 3).long().cumsum(1) - 1).clamp(min=0))), labels)


@case
def positions_from_the_end(m: Host, ids: Tensor, labels: Tensor) -> Tensor:
    return m.loss(m.attend(m.tokens(ids) + m.places(ids.shape[1] - 1 - torch.arange(ids.shape[1]))), labels)


@case
def positions_between_positions(m: Host, ids: Tensor, labels: Tensor) -> Tensor:
    places = F.interpolate(m.places.weight.T[None], size=ids.shape[1], mode="linear")[0].T
    return m.loss(m.attend(m.tokens(ids) + places), labels)


@case
def distances(m: Host, ids: Tensor, labels: Tensor) -> Tensor:
    position = torch.arange(ids.shape[1])
    bias = -(position[:, None] - position).abs().double() * 0.3
    return m.loss(m.attend(m.embed(ids), bias.masked_fill(position > position[:, None], -torch.inf)), labels)


@case
def learned_distances(m: Host, ids: Tensor, labels: Tensor) -> Tensor:
    position = torch.arange(ids.shape[1])
    bias = m.places((position[:, None] - position).clamp(0, 63)).permute(2, 0, 1)[None, : m.heads]
    return m.loss(m.attend(m.embed(ids), bias), labels)


@case
def weighted_rows(m: Host, ids: Tensor, labels: Tensor) -> Tensor:
    each = F.cross_entropy(m.head(m.hidden(ids)).mT, labels, reduction="none")
    weights = torch.linspace(0.1, 2, ids.shape[1], dtype=each.dtype)
    return (each * weights).sum() / weights.sum() + (each[:, -1] - each[:, 0]).mean()


@case
def both_ways(m: Host, ids: Tensor, labels: Tensor) -> Tensor:
    return m.loss(m.hidden(ids) + m.hidden(ids.flip(1)).flip(1), labels)


# ---------------------------------------------------------------------- the tests
def tokens(length: int, count: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randint(0, VOCAB, (count, length), generator=generator) for name in ("ids", "labels")}


def plan_of(mesh: str, balance: str) -> dict[str, Any]:
    placed = "dp, cp" if "dp" in mesh else "-, cp"
    return {"mesh": mesh, "inputs": dict.fromkeys(("ids", "labels"), placed), "context": {"balance": balance}}


@pytest.mark.sampled(144)
@pytest.mark.parametrize("balance", ["zigzag", "none"])
@pytest.mark.parametrize(("mesh", "length"), [("cp=2", 16), ("cp=4", 17), ("dp=2, cp=2", 18)])
@pytest.mark.parametrize("name", CASES)
def test_equals_eager(name: str, mesh: str, length: int, balance: str) -> None:
    torch.manual_seed(0)
    program = shardc.compile(Host(name).double(), tokens(length), plan=plan_of(mesh, balance))
    report = program.verify()
    assert report.ok, str(report)
    assert max(max(row.error, row.eager_error or 0.0) for row in report.rows) < 1e-12
    assert program.prove().ok


class Returns(Host):
    """All that a model may return of its rows."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        x = self.hidden(ids)
        logits = self.head(x)
        return {
            "loss": self.loss(x, labels),
            "hidden": x,
            "logits": logits,
            "tokens": logits.argmax(-1),
            "shifted": logits[:, 1:],
            "last": x[:, -1],
            "sums": x.cumsum(1),
            "positions": torch.arange(ids.shape[1]),
            "longer": torch.cat([x, x], 1),
        }


@pytest.mark.parametrize(("mesh", "length"), [("cp=2", 16), ("cp=4", 17)])
def test_what_is_returned_has_the_order_of_the_user(mesh: str, length: int) -> None:
    torch.manual_seed(0)
    model, batch = Returns("").double(), tokens(length, 2)
    wanted = {name: value.detach() for name, value in model(**batch).items() if name != "loss"}
    placed = {**dict.fromkeys(wanted, "?"), "hidden": "-, cp, -", "shifted": "-, cp, -"}
    plan = plan_of(mesh, "zigzag") | {"outputs": placed}
    program = shardc.compile(model, batch, plan=plan)
    assert "~cp@cp" in print_graph(program.body)
    trainer = program.launch()
    for result in (trainer.predict(batch), trainer.step(batch)):
        assert {*result.outputs} >= {*wanted}
        for name, value in wanted.items():
            torch.testing.assert_close(result.outputs[name].full().to(value.dtype), value)


@pytest.mark.parametrize("balance", ["zigzag", "none"])
def test_an_input_that_nothing_reads(balance: str) -> None:
    torch.manual_seed(0)
    program = shardc.compile(Host("last_row").double(), tokens(16), plan=plan_of("cp=2", balance))
    assert ("~cp" in print_graph(program.body)) == (balance == "zigzag")
    assert program.verify().ok
