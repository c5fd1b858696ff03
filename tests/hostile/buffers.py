"""Buffers and what a forward keeps elsewhere: exchanged, grown, assigned, averaged, read before and after."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.hostile.harness import Net, case


class Kept(Net):
    """Three buffers, read by the loss after `keep` changed them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("p", torch.zeros(6))
        self.register_buffer("q", torch.ones(6))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.p: Any
        self.q: Any
        self.count: Any

    def keep(self, h: Tensor) -> None:
        raise NotImplementedError

    def between(self, h: Tensor) -> Tensor:
        self.keep(h.detach())
        return (h + self.p - 0.5 * self.q + 0.1 * self.count).tanh()


@case()
class RunningMean(Kept):
    def keep(self, h: Tensor) -> None:
        self.p.mul_(0.9).add_(h.mean(0), alpha=0.1)


@case()
class Counted(Kept):
    def keep(self, h: Tensor) -> None:
        self.count += 1


@case()
class Exchanged(Kept):
    def keep(self, h: Tensor) -> None:
        self.p, self.q = self.q, self.p


@case()
class Shifted(Kept):
    def keep(self, h: Tensor) -> None:
        self.q = self.p
        self.p = h.mean(0)


@case()
class Assigned(Kept):
    def keep(self, h: Tensor) -> None:
        self.p = h.sum(0) * 0.1


@case()
class FollowsAWeight(Kept):
    """A moving average of a parameter."""

    def keep(self, h: Tensor) -> None:
        self.p = 0.9 * self.p + 0.1 * self.b.bias.detach()


@case()
class CopyOfAWeight(Kept):
    def keep(self, h: Tensor) -> None:
        self.q.copy_(self.b.bias.detach())


@case()
class Largest(Kept):
    def keep(self, h: Tensor) -> None:
        self.p = torch.maximum(self.p, h.abs().amax(0))


@case()
class Slices(Kept):
    def keep(self, h: Tensor) -> None:
        self.p[:3] = h.mean(0)[3:]
        self.q[3:] += self.p[:3]


@case()
class Ring(Net):
    """A queue whose place of writing is a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(3, 6))
        self.register_buffer("at", torch.zeros(1, dtype=torch.int64))
        self.queue: Any
        self.at: Any

    def between(self, h: Tensor) -> Tensor:
        self.queue.index_copy_(0, self.at, h.detach().mean(0, keepdim=True))
        self.at.copy_((self.at + 1) % 3)
        return h @ self.queue.t() @ self.queue


@case()
class ReadThenChanged(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(6))
        self.scale: Any

    def between(self, h: Tensor) -> Tensor:
        out = h * self.scale.clone()
        self.scale.mul_(0.5)
        return out.tanh()


@case()
class ChangedUnread(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("statistics", torch.zeros(6))
        self.statistics: Any

    def between(self, h: Tensor) -> Tensor:
        self.statistics.add_(h.detach().square().sum(0))
        return h.tanh()


@case()
class BatchNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def between(self, h: Tensor) -> Tensor:
        return self.norm(h)


@case(refused="SC101")
class BatchNormOfAllSteps(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6, momentum=None, affine=False)

    def between(self, h: Tensor) -> Tensor:
        return self.norm(h).tanh()


@case()
class BatchNormInEvaluation(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6).eval()

    def between(self, h: Tensor) -> Tensor:
        return self.norm(h).tanh()


@case()
class NotPersistent(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(6), persistent=False)
        self.total: Any

    def between(self, h: Tensor) -> Tensor:
        self.total = self.total + h.detach().mean(0)
        return h * self.total


@case()
class OfOtherKinds(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("on", torch.zeros(6, dtype=torch.bool))
        self.register_buffer("turn", torch.ones(6, dtype=torch.complex128))
        self.on: Any
        self.turn: Any

    def between(self, h: Tensor) -> Tensor:
        self.on |= h.detach().mean(0) > 0
        self.turn *= torch.tensor(1j)
        return h.where(self.on, 0.5 * h) + self.turn.imag


@case(refused="SC123")
class Grows(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("all", torch.zeros(1, 6))
        self.all: Any

    def between(self, h: Tensor) -> Tensor:
        self.all = torch.cat([self.all, h.detach().mean(0, keepdim=True)])
        return h * self.all.mean(0)


@case(refused="SC123")
class ChangesItsKind(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(6))
        self.scale: Any

    def between(self, h: Tensor) -> Tensor:
        self.scale = self.scale.float()
        return h * self.scale


@case(refused="SC123")
class Removed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("once", torch.ones(6))
        self.once: Any

    def between(self, h: Tensor) -> Tensor:
        if self.once is not None:
            h = h * self.once
            self.once = None
        return h


@case(refused="SC121")
class ViewsOfOneAnother(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("whole", torch.ones(6))
        self.whole: Any
        self.register_buffer("head", self.whole[:3])

    def between(self, h: Tensor) -> Tensor:
        self.whole.mul_(0.5)
        return h * self.whole


@case()
class OfTwoNames(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("one", torch.ones(6))
        self.one: Any
        self.register_buffer("same", self.one)
        self.same: Any

    def between(self, h: Tensor) -> Tensor:
        return h * self.one + self.same


@case()
class Table(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(0, 1, 12).view(2, 6))
        self.table: Any

    def between(self, h: Tensor) -> Tensor:
        return h * self.table[(h.detach() > 0).long()[:, 0]]


@case(warned="SC109")
class KeptInAttribute(Net):
    """A tensor that is no buffer, from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Any = None

    def between(self, h: Tensor) -> Tensor:
        out = h if self.last is None else h + self.last
        self.last = h.detach().mean(0)
        return out


@case(warned="SC109")
class KeptInAList(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def between(self, h: Tensor) -> Tensor:
        self.seen.append(1)
        return h * len(self.seen)


@case(warned="SC109")
class CountedInPython(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def between(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h / self.calls


@case()
class ForeachChangesBuffers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.zeros(6))
        self.register_buffer("high", torch.ones(6))

    def between(self, h: Tensor) -> Tensor:
        found = (h - self.low) * self.high.clone()
        torch._foreach_add_([self.low, self.high], [h.detach().mean(0), h.detach().square().mean(0)])
        return found


@case(refused="SC104")
class ForeachMovesATeacher(Net):
    """Its weights are parameters that are not trained, and forward writes to them."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(6, 6).requires_grad_(False)

    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            torch._foreach_lerp_(list(self.teacher.parameters()), list(self.a.parameters()), 0.1)
        return h - self.teacher(h)


@case(refused="SC109")
class ForeachChangesAPlainTensor(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(6)

    def between(self, h: Tensor) -> Tensor:
        torch._foreach_mul_([self.scale], 2.0)
        return h * self.scale


@case(refused="SC123")
class ABufferWithHistory(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(6))

    def between(self, h: Tensor) -> Tensor:
        found = h - self.last
        self.last = self.a.bias * 2
        return found
