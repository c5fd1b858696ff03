"""Loops over experts that write in place: nothing that is written is lost, or moved past what reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardc
from tests.expert_loops import EXPERTS, HIDDEN, Mixture, rows

PLAN: dict[str, Any] = {"mesh": "dp=2", "inputs": {"x": "dp"}}
Write = Callable[[Tensor, Tensor, Tensor], Tensor]  # of an expert's rows, their weights, and what it read


def _in_place(y: Tensor, w: Tensor, h: Tensor) -> Tensor:
    y.mul_(w)
    return y


def _of_a_part(y: Tensor, w: Tensor, h: Tensor) -> Tensor:
    y = y * w
    y[:, 0] = 0.5
    return y


def _of_a_view(y: Tensor, w: Tensor, h: Tensor) -> Tensor:
    y.view(-1, 2, HIDDEN // 2).mul_(2)
    return y * w


def _to_what_was_read(y: Tensor, w: Tensor, h: Tensor) -> Tensor:
    h.add_(y)
    return h * w


WRITES: dict[str, Write] = {
    "in place": _in_place,
    "of a part": _of_a_part,
    "of a view": _of_a_view,
    "to what was read": _to_what_was_read,
}


class Writing(Mixture):
    write: Write

    def __init__(self, write: Write) -> None:
        super().__init__()
        self.write = write

    def moe(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, HIDDEN)
        weights, ids = self.route(flat)
        out = torch.zeros_like(flat)
        for e in range(EXPERTS):
            token, choice = torch.where(ids == e)
            y = self.experts[e](flat[token])
            out.index_add_(0, token, self.write(y, weights[token, choice, None], flat[token]))
        return out.view_as(x)


class Given(Mixture):
    """Rows change behind the call that gave them."""

    def moe(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, HIDDEN)
        weights, ids = self.route(flat)
        first, second = torch.zeros_like(flat), torch.zeros_like(flat)
        for e in range(EXPERTS):
            token, choice = torch.where(ids == e)
            y = self.experts[e](flat[token]) * weights[token, choice, None]
            first[token] += y
            y.mul_(2)
            second.index_add_(0, token, y)
        return (first.sin() + second).view_as(x)


class Biased(Mixture):
    """A bias for the result of each expert alone, whose gradient is that of the rows as they were given."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList([torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(EXPERTS)])

    def moe(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, HIDDEN)
        ids = self.gate(flat).argmax(-1)
        out = torch.zeros_like(flat)
        for e in range(EXPERTS):
            out[ids == e] = self.experts[e](flat[ids == e])
        return out.view_as(x)


class Busy(Mixture):
    """How many experts have tokens, counted in a part of a tensor."""

    def moe(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, HIDDEN)
        weights, ids = self.route(flat)
        out, busy = torch.zeros_like(flat), torch.zeros(EXPERTS, dtype=flat.dtype)
        for e in range(EXPERTS):
            token, choice = torch.where(ids == e)
            if token.numel() == 0:
                continue
            busy[e] = 1
            out.index_add_(0, token, self.experts[e](flat[token]) * weights[token, choice, None])
        return out.view_as(x) * busy.sum()


class Before(Mixture):
    """What the sum held before more was added to it."""

    def moe(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, HIDDEN)
        weights, ids = self.route(flat)
        out = torch.zeros_like(flat)
        for e in range(EXPERTS):
            token, choice = torch.where(ids == e)
            held = out[token]
            out.index_add_(0, token, self.experts[e](flat[token]) * weights[token, choice, None])
            out.index_add_(0, token, held)
        return out.view_as(x)


class Halved(Mixture):
    """The same, where the sum is changed as a whole meanwhile."""

    def moe(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, HIDDEN)
        weights, ids = self.route(flat)
        out = torch.zeros_like(flat)
        for e in range(EXPERTS):
            token, choice = torch.where(ids == e)
            held = out[token]
            out.mul_(0.5)
            out.index_add_(0, token, self.experts[e](flat[token] + held) * weights[token, choice, None])
        return out.view_as(x)


def verified(model: Mixture) -> None:
    report = shardc.compile(model, {"x": rows()}, plan=PLAN).verify()
    assert report.ok, str(report)
    assert report.eager_error is not None
    assert report.eager_error < 1e-12


def made(kind: Callable[[], Mixture]) -> Mixture:
    torch.manual_seed(0)
    return kind().double()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", WRITES)
def test_rows_that_are_written_to(name: str) -> None:
    verified(made(lambda: Writing(WRITES[name])))


@pytest.mark.parametrize("kind", [Given, Biased])
def test_rows_are_given_as_they_are_then(kind: type[Mixture]) -> None:
    verified(made(kind))


@pytest.mark.parametrize("kind", [Busy, Before, Halved])
def test_what_has_no_masked_form_is_refused(kind: type[Mixture]) -> None:
    with pytest.raises(shardc.ShardcError) as refused:
        shardc.compile(made(kind), {"x": rows()}, plan=PLAN)
    assert refused.value.code == "SC101"
