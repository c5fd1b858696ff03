"""Calls that a recording knows from equal ones are recorded as torch records them: names, arguments, results, origins.

Each model is traced twice, once with `torch_compat._remembered_calls` and once without. Layers differ in what a memory
could overlook: a constant, a branch by index, a shape, a dtype, a hook, what is shared between them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shardc import torch_compat
from shardc.frontend.trace import Traced, trace
from tests.frontend.test_trace import MODELS, Squared, gpt2, llama

Case = tuple[nn.Module, Any]
WIDTH = 8


class Block(nn.Module):
    """A layer of a transformer's kind, without attention."""

    def __init__(self, index: int = 0, inner: int = 16) -> None:
        super().__init__()
        self.index = index
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Scaled(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 + self.index) - self.index


class Alternating(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flip(-1) if self.index % 2 else x)[..., : WIDTH + self.index]


class Counting(Block):
    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1.0)
        return super().forward(x) / (1.0 + self.seen)


class _Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, limit: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.limit = limit
        return x.clamp(-limit, limit)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradients[0] * (x.abs() <= ctx.limit), None


class Clipping(Block):
    def forward(self, x: Tensor) -> Tensor:
        return _Clipped.apply(super().forward(x), 1.0 + self.index)


class Stack(nn.Module):
    """Layers one after the other: in a list, or attributes; `first` is given to all; each is checkpointed, or its
    output collected."""

    def __init__(
        self, *layers: nn.Module, listed: bool = True, first: bool = False, kept: bool = False, again: bool = False
    ) -> None:
        super().__init__()
        self.first, self.kept, self.again = first, kept, again
        self.names = [f"layer{i}" for i in range(len(layers))]
        self.layers = nn.ModuleList(layers) if listed else []
        if not listed:
            for name, layer in zip(self.names, layers, strict=True):
                setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        memory, outputs = None, list[Tensor]()
        for layer in self.layers or [getattr(self, name) for name in self.names]:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
            memory = x if memory is None else memory
            x = x + memory if self.first else x
            outputs.append(x)
        return torch.stack([t.mean() for t in outputs]).sum() + x.mean() if self.kept else x


def of(*layers: nn.Module, **options: Any) -> Case:
    return Squared(Stack(*layers, **options)), torch.randn(4, 5, WIDTH)


def shared() -> Case:
    block = Block()
    return of(block, Block(), block)


def tied() -> Case:
    layers = [Block() for _ in range(3)]
    layers[2].up.weight = layers[0].up.weight
    return of(*layers)


def hooked() -> Case:
    layers = [Block() for _ in range(3)]
    layers[1].register_forward_hook(lambda _module, _args, output: output * 2.0)
    layers[2].up.weight.register_hook(lambda gradient: gradient * 0.5)
    return of(*layers)


def frozen() -> Case:
    layers = [Block() for _ in range(3)]
    layers[1].requires_grad_(False)
    return of(*layers)


def halved() -> Case:
    class Half(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.bfloat16()).float()

    return of(Block(), Half().bfloat16(), Block(), Half().bfloat16())


CASES: dict[str, Callable[[], Case]] = {
    **{make.__name__: make for make in MODELS},
    "with dropout": lambda: gpt2(0.1),
    "a constant": lambda: of(*(Scaled(i) for i in range(4))),
    "a constant that is an int or a float": lambda: of(Scaled(0), Scaled(1), Scaled(1.0), Scaled(True)),  # type: ignore[arg-type]
    "a branch by index": lambda: of(*(Alternating(i) for i in range(4))),
    "a shape": lambda: of(Block(), Block(inner=12), Block(), Block(inner=12)),
    "a dtype": halved,
    "trained or not": frozen,
    "a hook": hooked,
    "a custom function": lambda: of(*(Clipping(i) for i in range(3))),
    "a buffer that each writes": lambda: of(*(Counting(i) for i in range(3))),
    "a layer that is called twice": shared,
    "a tied parameter": tied,
    "attributes, no list": lambda: of(*(Block() for _ in range(3)), listed=False),
    "one value for all": lambda: of(*(Block() for _ in range(4)), first=True),
    "outputs collected": lambda: of(*(Block() for _ in range(4)), kept=True),
    "checkpoints": lambda: of(*(Block() for _ in range(3)), again=True),
}


@contextmanager
def _nothing_remembered(*_: Any) -> Generator[None]:
    yield


def described(traced: Traced) -> list[tuple[Any, ...]]:
    """All that a trace says of its nodes, without the nodes themselves."""

    def geometry(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value), [geometry(item) for item in value]
        if not isinstance(value, Tensor):
            return value
        return tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, value.device

    lines: list[tuple[Any, ...]] = []
    for node in traced.graph.nodes:
        arguments = fx.map_arg((node.args, node.kwargs), lambda n: f"%{n.name}")
        meta = {key: geometry(value) for key, value in node.meta.items()}
        lines.append((node.name, node.op, str(node.target), repr(arguments), meta))
    ports = [(port.role, port.name, port.node.name) for port in (*traced.inputs, *traced.outputs)]
    return [*lines, *ports, *((name, node.name) for name, node in traced.modules.items())]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_trace_is_the_one_in_which_nothing_is_remembered(
    case: Callable[[], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = case()
    FakeTensorMode.cache_clear()  # what torch has in it lies elsewhere in its storage, now and then
    remembered = described(trace(model, batch))
    monkeypatch.setattr(torch_compat, "_remembered_calls", _nothing_remembered)
    FakeTensorMode.cache_clear()
    assert remembered == described(trace(model, batch))


@pytest.mark.parametrize("case", [llama, lambda: gpt2(0.1), hooked], ids=["llama", "gpt2", "hooked"])
def test_a_remembered_result_is_what_the_mode_makes(case: Callable[[], Case], monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch_compat._CallMemory
    record, compared = memory.recorded, 0

    def facts(t: Tensor, tensors: list[Any]) -> tuple[Any, ...]:
        storage = t.untyped_storage()
        views = [i for i, (other, _) in enumerate(tensors) if other.untyped_storage()._cdata == storage._cdata]
        geometry = tuple(t.shape), t.stride(), t.storage_offset(), t.dtype, t.device, storage.nbytes()
        return (*geometry, views, type(t), t.requires_grad, str(torch._C._dispatch_keys(t)), t.__dict__)

    def recorded(self: Any, op: Any, args: Any, kwargs: Any, tensors: list[Any], known: Any) -> Any:
        nonlocal compared
        result = record(self, op, args, kwargs, tensors, known)
        with self.mode:
            made = op(*args, **kwargs)
        assert type(result) is type(made)
        several = isinstance(made, tuple | list)
        for a, b in zip(result, made, strict=True) if several else [(result, made)]:
            assert facts(a, tensors) == facts(b, tensors), str(op)
            compared += 1
        return result

    monkeypatch.setattr(memory, "recorded", recorded)
    trace(*case())
    assert compared > 20


def test_torch_records_one_of_equal_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """So what it takes is the same however many there are, but for the ops that may not be remembered."""
    learn, learnt = torch_compat._CallMemory.learnt, list[Any]()

    def counted(self: Any, op: Any, *args: Any) -> Any:
        learnt.append(op)
        return learn(self, op, *args)

    monkeypatch.setattr(torch_compat._CallMemory, "learnt", counted)
    calls: list[int] = []
    for count in (3, 9):
        learnt.clear()
        trace(*of(*(Block() for _ in range(count))))
        calls.append(len(learnt))
    assert calls[0] == calls[1] > 0
