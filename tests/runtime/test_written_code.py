"""A rank's code as one Python function: what it calls, how failures are named, and that nothing outlives a step."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from benchmarks.gpt import GPT
from shardc.runtime.execute import written_code
from shardc.runtime.execute.body_code import BodyCode
from shardc.runtime.execute.call_arguments import ALL_SLOTS, CallArguments, Made, Slot
from shardc.runtime.execute.instructions import rank_context
from shardc.runtime.execute.microbatches import feeds
from shardc.runtime.execute.written_code import Unwatched, write_code

CPU = torch.device("cpu")


def ready(model: nn.Module, batch: Any, **options: Any) -> tuple[BodyCode, dict[str, Tensor], list[dict[str, Tensor]]]:
    program = shardc.compile(model, batch, mesh="dp=1", **options)
    whole = program.inputs()
    fed = [dict(feed) for feed in feeds(program.body, whole)]
    held = {name: x.detach().clone() for name, x in whole.items() if name not in fed[0]}
    return BodyCode(program.body, rank_context(program.mesh, 0, None), 0, CPU), held, fed  # type: ignore[arg-type]


def frames(layers: int, **plan: Any) -> Counter[str]:
    """The Python functions that one step enters, without those that attention's do."""
    torch.manual_seed(0)
    batch = {name: torch.randint(16, (12, 8)) for name in ("input_ids", "labels")}
    executor, held, fed = ready(GPT(16, 16, 2, layers, 8), batch, plan=plan)
    executor.run(held, fed)
    entered: Counter[str] = Counter()

    def note(frame: Any, event: str, _: Any) -> None:
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_qualname.startswith("whole"):
            caller = caller.f_back
        if event == "call" and caller is None:
            entered[frame.f_code.co_qualname] += 1

    sys.setprofile(note)
    try:
        executor.run(held, fed)
    finally:
        sys.setprofile(None)
    return entered


def test_a_layer_enters_no_python_but_that_of_its_kernels() -> None:
    """Of a layer's 40 calls or so those of four products and attention. No op is called by Python's dispatcher, and no
    norm by way of Python that looks at dtypes, which are the same in every step."""
    entered = frames(3)
    entered.subtract(frames(2))
    a_layer = +entered
    assert (a_layer["_linear_bias"], a_layer["_dgrad"], a_layer["_wgrad"]) == (4, 4, 4)
    assert (a_layer["whole"], a_layer["whole_backward"]) == (1, 1)
    assert not {"OpOverload.__call__", "_statistics_exact.<locals>.run", "_contiguous_first.<locals>.run"} & {*a_layer}
    assert not [name for name in a_layer if "CallArguments" in name or "Routine" in name or "BodyCode" in name]


def test_what_a_microbatch_adds_to_a_layer() -> None:
    """Python of its products and of attention: of 40 calls or so 14 frames, 8 within the sums of products, and 4 that
    say where biases' gradients are made."""
    more = frames(3, accumulate=4)
    for other in (frames(2, accumulate=4), frames(3, accumulate=3)):
        more.subtract(other)
    more.update(frames(2, accumulate=3))
    products = dict.fromkeys(("_linear_bias", "_dgrad", "add_wgrad", "multiplies_wide", "_matrices"), 4)
    others = {"whole": 1, "whole_backward": 1, "FlatBuffer.member_view.<locals>.view": 4}
    assert {name: calls for name, calls in more.items() if calls} == products | others


class Turned(nn.Module):
    """Norms of what lies in another order than its dims say, as do the gradients that they get."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.rows, self.groups = nn.Parameter(torch.ones(6, 5)), nn.LayerNorm(6), nn.GroupNorm(2, 6)

    def forward(self, x: Tensor, g: Tensor) -> Tensor:
        y = self.rows((x * self.scale).transpose(1, 2)).transpose(1, 2)
        return (self.groups(y).transpose(1, 2) * g).sum()


def test_norms_read_operands_in_order() -> None:
    torch.manual_seed(0)
    model, batch = Turned(), (torch.randn(4, 6, 5), torch.randn(4, 5, 6))
    model(*batch).backward()
    executor, held, fed = ready(model, batch)
    outputs = {port.name: x for port, x in executor.run(held, fed).items() if port.role == "grad"}
    for name, p in model.named_parameters():
        assert p.grad is not None
        (found,) = (x for output, x in outputs.items() if output.endswith(name))
        torch.testing.assert_close(found, p.grad)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(8, 4), nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.table(ids)).tanh().square().mean()


def test_a_step_after_a_failure_is_as_if_there_had_been_none() -> None:
    torch.manual_seed(0)
    model = Model()
    executor, held, fed = ready(model, torch.randint(8, (6,)), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    fresh = {name: x.clone() for name, x in held.items()}
    bad = [{name: torch.full_like(x, 99) for name, x in feed.items()} for feed in fed]
    with pytest.raises(shardc.ShardcError, match="SC507") as caught:
        executor.run(held, bad)
    assert any("embedding" in note for note in caught.value.__cause__.__notes__)  # type: ignore[union-attr]
    found, expected = executor.run(held, fed), executor.run(fresh, fed)
    assert all(torch.equal(x, y) for x, y in zip(found.values(), expected.values(), strict=True))


def test_a_step_reads_the_tensors_that_it_is_given() -> None:
    """Parameters that were replaced, loaded or moved between steps."""
    torch.manual_seed(0)
    executor, held, fed = ready(Model(), torch.randint(8, (6,)))
    first = next(iter(executor.run(held, fed).values())).clone()
    executor.run({name: x * 2 for name, x in held.items()}, fed)
    again = next(iter(executor.run({name: x.clone() for name, x in held.items()}, fed).values()))
    assert torch.equal(first, again)
    for x in held.values():
        x.data = x.data + 1.0 if x.is_floating_point() else x.data
    assert not torch.equal(first, next(iter(executor.run(held, fed).values())))


def test_lines_write_slots_free_them_and_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written_code, "LINES", 2)
    seen: list[Any] = []

    def take(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        seen.append((args, kwargs))
        return len(seen), "second", "third"

    code: list[Any] = [
        (3, take, CallArguments((Slot(0), [Slot(1), 2.5], "word"), {"out": Slot(1)}), 2, (0,)),
        (4, take, CallArguments((), {"over": {1: Made(lambda env: env[1] * 10), 2: "fixed"}}), ((2, 3), (0, 4)), ()),
        (4, take, CallArguments((Slot(3),), {"more": Slot(4)}), (), (1, 3)),
        (5, len, CallArguments((ALL_SLOTS,), {}), 1, ()),
    ]
    env: list[Any] = ["zero", 1, None, None, None]
    monitor = Unwatched()
    write_code(code)(env, monitor, 100)
    assert seen == [
        (("zero", [1, 2.5], "word"), {"out": 1}),
        ((), {"over": {1: 10, 2: "fixed"}}),
        (("third",), {"more": 2}),
    ]
    assert env == [None, 5, (1, "second", "third"), None, 2]
    assert monitor.counter == 105


def test_nothing_but_slots_keeps_an_operand() -> None:
    """An operand that is freed is gone before the next call begins."""
    gone: list[bool] = []
    x = torch.ones(3)
    watched = weakref.ref(x)
    env: list[Any] = [x, None, None]
    del x
    code: list[Any] = [
        (0, torch.neg, CallArguments((Slot(0),), {}), 1, (0,)),
        (1, lambda y: gone.append(watched() is None), CallArguments((Slot(1),), {}), 2, ()),
    ]
    write_code(code)(env, Unwatched(), 0)
    assert gone == [True]


def test_arguments_are_the_same_filled_and_written() -> None:
    arguments = CallArguments((Slot(1), [Slot(0), 3], (1, 2), None), {"x": Made(sum), "y": torch.float32})
    env = [4, 5]
    bound: dict[str, Any] = {}

    def bind(value: Any) -> str:
        name = f"k{len(bound)}"
        bound[name] = value
        return name

    args, kwargs = eval(f"(lambda *a, **k: (a, k))({arguments.text(bind)})", {**bound, "env": env})
    filled, named = arguments(env)
    assert list(args) == list(filled)
    assert kwargs == named
