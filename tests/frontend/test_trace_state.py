"""After a trace the model is as it was, whatever forward keeps on it; and what steps would hand on is said."""

from __future__ import annotations

import gc
from collections import OrderedDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardc
from shardc.frontend.python_state import reachable
from shardc.frontend.trace import trace
from shardc.ir.diagnostic import ShardcError
from shardc.ir.gc_pause import gc_paused
from shardc.torch_compat import is_fake

X = torch.ones(2, 3)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3, 3))
        self.last: Any = None
        self.calls = 0


def state_of(model: nn.Module) -> list[tuple[str, Any]]:
    """Everything by its place: tensors by identity, containers by what they hold."""
    found: list[tuple[str, Any]] = []
    for at, value in reachable(model):
        container = isinstance(value, list | dict | set | deque)
        found.append((at.path, (type(value), len(value)) if container else id(value)))
    return found


# ------------------------------------------------------------------ what is left behind
class Keeps(Base):
    """Leaves tensors in every kind of place; nothing of it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.log: list[Tensor] = []
        self.table = {"old": 1}
        self.order = OrderedDict(a=1, b=2)
        self.seen = {1}
        self.ring = deque([0], maxlen=1)
        self.nested = {"deep": [[1]]}
        self.other = SimpleNamespace(hidden=None)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x) @ self.w
        self.cache, self.pair, self.inner.seen = h, (x, [h]), h
        self.log.append(h)
        self.table["new"] = h
        del self.table["old"]
        self.order.move_to_end("a")
        self.seen.add(2)
        self.ring.append(h)
        self.nested["deep"][0].append(h)
        self.other.hidden = h
        self.register_buffer("late", h.detach())
        self.added = nn.Identity()
        self.calls += 1
        self.train(False)
        return h.sum()


class Raises(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        raise RuntimeError("too late")


@pytest.mark.parametrize("cls", [Keeps, Raises])
def test_the_model_is_as_it_was(cls: type[Keeps]) -> None:
    model = cls()
    before, order = state_of(model), list(model.order)
    if cls is Raises:
        with pytest.raises(ShardcError, match="too late"):
            trace(model, X)
    else:
        trace(model, X)
    assert state_of(model) == before
    assert list(model.order) == order
    assert not any(is_fake(value) for _, value in reachable(model) if isinstance(value, Tensor))
    assert (model.calls, model.training, model.log, hasattr(model, "cache")) == (0, True, [], False)


def test_what_is_set_anew_by_every_call_comes_back() -> None:
    """Old-style weight norm keeps the product on the module, and recomputes it before each forward."""
    model = nn.utils.weight_norm(nn.Linear(3, 3))  # type: ignore[no-untyped-call]
    weight = model.weight
    traced = trace(model, X, loss=lambda y, _: y.sum())
    assert model.weight is weight
    assert traced.diagnostics == ()


# ------------------------------------------------------------------ what a later step would read
class Cached(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.w
        if self.last is not None:
            h = h + self.last
        self.last = h.detach()
        return h.sum()


class Counted(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return (x @ self.w).sum() * (2 if self.calls > 100 else 1)


class Logged(Base):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(x)
        return (x @ self.w).sum() * (2 if len(self.log) > 100 else 1)


class LateBuffer(Base):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "mean"):
            self.register_buffer("mean", x.mean(0))
        return ((x - self.mean) @ self.w).sum()


class FailsTheSecondTime(Base):
    def forward(self, x: Tensor) -> Tensor:
        if self.last is not None:
            raise RuntimeError("once is enough")
        self.last = x
        return (x @ self.w).sum()


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    ("cls", "attribute", "line"),
    [
        (Cached, "inner.last", "if self.last is not None:"),
        (Counted, "inner.calls", "self.calls += 1"),
        (Logged, "inner.log", "self.log.append(x)"),
        (LateBuffer, "inner.mean", 'self.register_buffer("mean", x.mean(0))'),
        (FailsTheSecondTime, "inner.last", "if self.last is not None:"),
    ],
)
@pytest.mark.parametrize("steps_before", [0, 1])
def test_carried_state_is_a_warning(cls: type[Base], attribute: str, line: str, steps_before: int) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = cls()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    model = Outer()
    for _ in range(steps_before):
        model(X)
    if steps_before and cls is LateBuffer:
        assert trace(model, X).diagnostics == ()  # by now it is a buffer like any other
        return
    if steps_before and cls is FailsTheSecondTime:
        return
    before = state_of(model)
    (warning,) = trace(model, X).diagnostics
    assert state_of(model) == before
    assert (warning.code, warning.severity, warning.fqn) == ("SC109", "warning", "inner")
    assert attribute in warning.message
    assert warning.source_text == line
    with pytest.raises(ShardcError, match="SC109"):
        shardc.compile(model, X, mesh="dp=2", plan={"inputs": {"x": "dp"}}, strict=True)


def test_a_plain_tensor_changed_in_place_is_refused() -> None:
    class Average(Base):
        def __init__(self) -> None:
            super().__init__()
            self.mean = torch.zeros(3)

        def forward(self, x: Tensor) -> Tensor:
            h = x @ self.w
            with torch.no_grad():
                self.mean[:2].mul_(0.9).add_(h.mean(0)[:2])
            return (h - self.mean).sum()

    with pytest.raises(ShardcError, match="changes mean in place") as raised:
        trace(Average(), X)
    assert raised.value.code == "SC109"


# ------------------------------------------------------------------ what no step reads
class Table(Base):
    """Made once, from no input: made again in every step it is the same."""

    def forward(self, x: Tensor) -> Tensor:
        if self.last is None:
            table = torch.zeros(3)
            table[1] = 4.0
            self.last, self.calls = (torch.arange(3.0).cos(), table.mul_(2.0)), 1
        return (x @ self.w * self.last[0] + self.last[1]).sum()


class TableAsBuffer(Base):
    """As Table, and registered in the first step."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.arange(3.0).cos(), persistent=False)
        return (x @ self.w * self.table).sum()


class Aux(Base):
    """Collected anew in every step."""

    def forward(self, x: Tensor) -> Tensor:
        self.losses: list[Tensor] = []
        for scale in (1.0, 2.0):
            self.losses.append((x @ self.w * scale).mean())
        return torch.stack(self.losses).sum()


class Once(Base):
    def forward(self, x: Tensor) -> Tensor:
        if self.calls == 0:
            self.calls = 1  # said once
        return (x @ self.w).sum()


class Norm(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return (self.norm(x) @ self.w).pow(2).sum() * self.steps


@pytest.mark.sampled(4)
@pytest.mark.parametrize("cls", [Table, TableAsBuffer, Aux, Once, Norm])
@pytest.mark.parametrize("steps_before", [0, 1])
def test_state_that_is_not_carried_is_no_warning(cls: type[Base], steps_before: int) -> None:
    model = cls()
    for _ in range(steps_before):
        model(X)
    before = state_of(model)
    assert trace(model, X).diagnostics == ()
    assert state_of(model) == before


# ------------------------------------------------------------------ checkpoints that an exception left
class NotThisOne(Exception):
    pass


class FailsInCheckpoints(Base):
    """Where `fails` says so, as it does of float64 to a verification, which tries that first."""

    def __init__(self, fails: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.fails = fails

    def inner(self, x: Tensor) -> Tensor:
        y = (x @ self.w).exp()
        if self.fails(x):
            raise NotThisOne("not this one")
        return y

    def outer(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x.sin(), use_reentrant=False)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.outer, x, use_reentrant=False).sum()


def differentiates_as_ever() -> bool:
    """With the hooks of a suspended checkpoint, it would be run again for what is saved here."""
    x = torch.ones(3, requires_grad=True)
    x.exp().sum().backward()
    return x.grad is not None and torch.equal(x.grad, x.detach().exp())


def test_a_trace_that_fails_in_checkpoints_leaves_no_hooks() -> None:
    with pytest.raises(ShardcError, match="not this one") as caught:
        trace(FailsInCheckpoints(lambda x: True), X)
    assert caught.value.__cause__ is not None  # its frames are held
    assert differentiates_as_ever()


def test_a_verification_whose_double_precision_fails_in_checkpoints_leaves_no_hooks() -> None:
    model = FailsInCheckpoints(lambda x: not is_fake(x) and x.dtype == torch.float64)
    inner = model.inner

    def in_a_cycle(x: Tensor) -> Tensor:
        try:
            return inner(x)
        except NotThisOne as problem:
            frame_holds = problem
            raise frame_holds from None

    model.inner = in_a_cycle  # type: ignore[method-assign]
    with gc_paused():
        assert shardc.compile(model, X, mesh="dp=2", plan={"inputs": {"*": "dp, -"}}).verify().ok
        assert any(type(left) is NotThisOne for left in gc.get_objects())
        assert differentiates_as_ever()
