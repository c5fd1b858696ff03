"""Adam's updates on CPUs are one call: the same numbers as PyTorch's own optimizer, wherever the updates stand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import shardc
from shardc.runtime.execute import merged_updates, prepared_code
from shardc.runtime.execute.body_code import BodyCode
from shardc.runtime.execute.instructions import rank_context
from shardc.runtime.execute.merged_updates import Options, adam_update, merge_updates
from shardc.runtime.execute.written_code import CodeLine

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
MERGED: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.3),
    "no decay": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.0),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True, betas=(0.5, 0.6)),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, eps=1e-3),
    "l2": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.2),
    "maximize": lambda p: torch.optim.AdamW(p, lr=0.1, maximize=True),
    "groups": lambda p: torch.optim.AdamW([{"params": p[:2], "lr": 0.2}, {"params": p[2:], "weight_decay": 0.5}]),
}
SINGLE: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
}


class Model(nn.Module):
    """Weights whose gradients lie in memory as theirs do, transposed, and as one number seen many times."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.u = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(4, 6))
        self.b, self.s = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> Tensor:
        y = ((x @ self.w).tanh() @ self.u * self.s).square().mean() + (self.b.expand(3, 4) * self.u[:, 0]).sum()
        return y + (self.u @ x.t()).t().sin().mean()


def program_of(make: Make, dtype: torch.dtype = torch.float64, **plan: Any) -> tuple[nn.Module, shardc.Program, Tensor]:
    torch.manual_seed(0)
    model = Model().to(dtype)
    x = torch.randn(8, 6, dtype=dtype)
    optimizer = make(list(model.parameters()))
    return copy.deepcopy(model), shardc.compile(model, x, mesh="dp=1", plan=plan, optimizer=optimizer), x


def code_of(program: shardc.Program) -> BodyCode:
    return BodyCode(program.body, rank_context(program.mesh, 0, None), 0, torch.device("cpu"))  # type: ignore[arg-type]


def calls(code: BodyCode) -> list[CodeLine]:
    lines = code._first_microbatch + code._once_per_step  # pyright: ignore[reportPrivateUsage]
    return [line for line in lines if getattr(line[1], "func", None) is merged_updates._update]  # pyright: ignore[reportPrivateUsage]


def trained(program: shardc.Program, x: Tensor, steps: int) -> dict[str, Tensor]:
    """The state after steps of a rank's code with its own held tensors."""
    trainer, code = program.launch(), code_of(program)
    held = {name: value.clone().contiguous() for name, value in trainer.state.items()}
    homes = {name: value.data_ptr() for name, value in held.items()}
    rates = trainer.rates()
    for _ in range(steps):
        fed = trainer._programs.first.feeding.feeds(program.sample, trainer.seed, 0)  # pyright: ignore[reportPrivateUsage]
        for port, value in code.run(held | rates, fed).items():
            if port.role in ("param", "state"):
                held[port.name] = value
    assert {name: value.data_ptr() for name, value in held.items()} == homes, "updated in place"
    return held


@pytest.mark.parametrize("plan", [{}, {"clip_grad_norm": 0.1}, {"accumulate": 2}], ids=str)
@pytest.mark.parametrize("name", MERGED)
def test_one_call_does_what_the_optimizer_does(name: str, plan: dict[str, Any]) -> None:
    eager, program, x = program_of(MERGED[name], **plan)
    assert len(calls(code_of(program))) == (2 if name == "groups" else 1)
    optimizer = MERGED[name](list(eager.parameters()))
    for _ in range(4):
        optimizer.zero_grad()
        for part in x.chunk(plan.get("accumulate", 1)):
            (eager(part) / plan.get("accumulate", 1)).backward()
        if "clip_grad_norm" in plan:
            torch.nn.utils.clip_grad_norm_(eager.parameters(), 0.1)
        optimizer.step()
    held = trained(program, x, 4)
    for key, parameter in eager.named_parameters():
        torch.testing.assert_close(held[key], parameter.detach(), rtol=1e-11, atol=1e-12)
        for state, value in optimizer.state[parameter].items():
            torch.testing.assert_close(
                held[f"{key}:{state}"], value.to(held[f"{key}:{state}"].dtype), rtol=1e-11, atol=1e-12
            )


@pytest.mark.parametrize("name", SINGLE)
def test_other_updates_stay_single_calls(name: str) -> None:
    _, program, _ = program_of(SINGLE[name])
    assert not calls(code_of(program))


def test_steps_that_may_be_skipped_stay_single_calls() -> None:
    _, program, _ = program_of(MERGED["adamw"], torch.float32, precision="fp16")
    assert not calls(code_of(program))


def test_short_floats_stay_single_calls() -> None:
    _, program, _ = program_of(MERGED["adamw"], torch.bfloat16)
    assert not calls(code_of(program))


def test_tensors_that_lie_otherwise_are_updated_as_well() -> None:
    torch.manual_seed(0)
    eager = nn.Parameter(torch.randn(4, 6, dtype=torch.float64))
    eager.grad = torch.randn(4, 6, dtype=torch.float64)
    parameter, gradient = (x.t().contiguous().t() for x in (eager.detach(), eager.grad))
    assert not parameter.is_contiguous()
    average, square = torch.zeros(4, 6, dtype=torch.float64), torch.zeros(6, 4, dtype=torch.float64).t()
    step, lr = torch.tensor(0.0, dtype=torch.float64), torch.tensor(0.1, dtype=torch.float64)
    options = Options(fx.Graph().placeholder("lr"), 0.9, 0.999, 0.01, 1e-8, False, torch.float64)
    held = [[parameter], [step], [average], [square]]
    made = merged_updates._update(options, [gradient], held, lr)  # pyright: ignore[reportPrivateUsage]
    assert [x is y for x, y in zip(made, (parameter, step, average, square), strict=True)] == [True] * 4
    optimizer = torch.optim.AdamW([eager], lr=0.1)
    optimizer.step()
    state = optimizer.state[eager]
    for value, right in zip(made, (eager, state["step"], state["exp_avg"], state["exp_avg_sq"]), strict=True):
        torch.testing.assert_close(value, right.detach().double(), rtol=1e-13, atol=1e-14)
    assert int(step) == 1


# ---------------------------------------------------------------------- where updates are made
class Listed:
    """The code of updates of weights by hand: `lines` are those of single calls."""

    def __init__(self) -> None:
        _, program, _ = program_of(MERGED["no decay"])
        self.code = code_of(program)
        listing = self.code.routine.listing
        self.lines = self._single()
        self.node_of = lambda index: listing.instructions[index].node
        self.slots = {value: slot for call in listing.instructions for value, _, slot in call.yields}
        self.slots |= self.code.routine._slots  # pyright: ignore[reportPrivateUsage]
        self.over = {w.value: w.over for w in self.code.routine._write_of.values()}  # pyright: ignore[reportPrivateUsage]

    def _single(self) -> list[CodeLine]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prepared_code, "merge_updates", lambda code, *_: list(code))
            return self.code.routine.code()

    def merged(self, size: int = 0, fixed: Callable[[int], bool] = lambda _: False) -> list[CodeLine]:
        sizes = {self.slots[value] for value in self.over}
        return merge_updates(
            self.lines, self.over, self.node_of, self.slots, lambda slot: 1 if slot in sizes else size, fixed
        )


def count(lines: list[CodeLine]) -> int:
    return sum(getattr(line[1], "func", None) is merged_updates._update for line in lines)  # pyright: ignore[reportPrivateUsage]


def test_updates_are_made_before_memory_with_a_place_is_written() -> None:
    listed = Listed()
    assert count(listed.merged()) == 1
    updates = {call for value in listed.over if (u := adam_update(value, listed.over)) for call in u.calls}
    others = [at for at, line in enumerate(listed.lines) if listed.node_of(line[0]) not in updates]
    first = listed.lines.index(next(line for line in listed.lines if listed.node_of(line[0]) in updates))
    # A call of another kind in the middle of the updates.
    stray = listed.lines.pop(others[0])
    last = max(at for at, line in enumerate(listed.lines) if listed.node_of(line[0]) in updates)
    listed.lines.insert((first + last) // 2, stray)
    assert count(listed.merged()) == 1
    assert count(listed.merged(fixed=lambda index: index == stray[0])) == 2
    assert count(listed.merged(size=100)) == 2, "what else is made would hold more than single calls did"


def test_nothing_that_an_update_reads_is_freed_before_it_is_made() -> None:
    listed = Listed()
    merged = listed.merged()
    (at,) = (i for i, line in enumerate(merged) if count([line]))
    reads = {arg.number for arg in merged[at][2].args[0]}
    assert not reads & {slot for line in merged[:at] for slot in line[4]}
    freed = [slot for line in listed.lines for slot in line[4]]
    assert reads & set(freed) <= set(merged[at][4])
