"""AdamW's and Adam's updates are one call: the same numbers as PyTorch's own optimizers, wherever parameters lie."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.ir.graph import info, op_name, type_of
from shardc.ir.in_place import writes
from shardc.ir.ops.adamw import ADAMW, write_adamw
from shardc.ir.text import print_graph
from shardc.passes.merge_updates import MergeUpdates

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
MERGED: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.3),
    "no decay": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.0),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, eps=1e-3, betas=(0.5, 0.6)),
    "l2": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.2),
    "maximize": lambda p: torch.optim.AdamW(p, lr=0.1, maximize=True),
    "groups": lambda p: torch.optim.AdamW([{"params": p[:2], "lr": 0.2}, {"params": p[2:], "weight_decay": 0.5}]),
}
SINGLE: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "alone": ("dp=1", {}),
    "clipped": ("dp=1", {"clip_grad_norm": 0.1}),
    "accumulate": ("dp=1", {"accumulate": 2}),
    "dp": ("dp=2", {"inputs": {"x": "dp, -"}}),
    "tp": ("tp=2", {"params": {"w": "-, tp", "u": "tp, -"}}),
    "zero-1": ("dp=2", {"inputs": {"x": "dp, -"}, "storage": {"zero": 1, "axes": ["dp"]}, "bucket": True}),
    "zero-3": ("dp=2", {"inputs": {"x": "dp, -"}, "storage": {"zero": 3, "axes": ["dp"]}, "bucket": True}),
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


def program_of(
    make: Make, layout: str = "alone", dtype: torch.dtype = torch.float64, **more: Any
) -> tuple[nn.Module, shardc.Program, Tensor]:
    torch.manual_seed(0)
    model = Model().to(dtype)
    mesh, plan = LAYOUTS[layout]
    x = torch.randn(8, 6, dtype=dtype)
    optimizer = make(list(model.parameters()))
    eager = copy.deepcopy(model)
    return eager, shardc.compile(model, x, mesh=mesh, plan={**plan, **more}, optimizer=optimizer), x


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MERGED)
def test_one_call_does_what_the_optimizer_does(name: str, layout: str) -> None:
    eager, program, x = program_of(MERGED[name], layout)
    assert len(program.body.calls_of(ADAMW)) == 4
    calls = [op_name(call.target) for call in program.body.calls() if info(call).phase == "opt"]
    assert not {"lerp.Scalar", "pow.Scalar"} & set(calls)
    optimizer, plan = MERGED[name](list(eager.parameters())), LAYOUTS[layout][1]
    trainer = program.launch()
    for _ in range(4):
        optimizer.zero_grad()
        for part in x.chunk(plan.get("accumulate", 1)):
            (eager(part) / plan.get("accumulate", 1)).backward()
        if "clip_grad_norm" in plan:
            torch.nn.utils.clip_grad_norm_(eager.parameters(), 0.1)
        optimizer.step()
        trainer.step(x)
    held = trainer.state_dict(("param", "state"))
    for key, parameter in eager.named_parameters():
        torch.testing.assert_close(held[key], parameter.detach(), rtol=1e-11, atol=1e-12)
        for state, value in optimizer.state[parameter].items():
            right = value.to(held[f"{key}:{state}"].dtype)
            torch.testing.assert_close(held[f"{key}:{state}"], right, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_program_is_verified_and_its_text_is_read_back(layout: str) -> None:
    _, program, _ = program_of(MERGED["adamw"], layout)
    report = program.verify()
    assert report, str(report)
    assert (report.eager_error or 0.0) < 1e-12
    text = print_graph(program.body, comments=False)
    assert print_graph(shardc.parse(text), comments=False) == text


def test_all_that_a_rank_holds_is_updated_in_place() -> None:
    _, program, _ = program_of(MERGED["adamw"], "dp")
    over = {info(write.over).name: write for write in writes(program.body)}
    assert len(over) == 4 * 4
    assert all(write.op is not None for write in over.values())


@pytest.mark.parametrize("name", SINGLE)
def test_other_updates_stay_single_calls(name: str) -> None:
    _, program, _ = program_of(SINGLE[name])
    assert not program.body.calls_of(ADAMW)


@pytest.mark.parametrize(
    ("dtype", "plan"),
    [(torch.bfloat16, {}), (torch.float32, {"fuse": True})],
    ids=["short floats", "kernels"],
)
def test_updates_that_one_call_does_not_make(dtype: torch.dtype, plan: dict[str, Any]) -> None:
    _, program, _ = program_of(MERGED["adamw"], "alone", dtype, **plan)
    assert not program.body.calls_of(ADAMW)


def test_an_update_that_something_else_reads_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(MergeUpdates, "run", lambda _, graph: graph)
        _, program, _ = program_of(MERGED["adamw"])
    body = program.body
    assert len(MergeUpdates().run(body.copy()).calls_of(ADAMW)) == 4
    root = next(call for call in body.calls() if op_name(call.target) == "sqrt" and type_of(call).ndim == 2)
    with body.fx.inserting_after(root):
        body.call(torch.ops.aten.neg.default, (root,), like=root, type=type_of(root))
    assert len(MergeUpdates().run(body.copy()).calls_of(ADAMW)) == 3


def operands(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    w, g, m, v = torch.randn(4, 4, 6, dtype=dtype)
    return [w, g, m, v.abs(), torch.tensor(3.0, dtype=dtype), torch.tensor(0.1, dtype=dtype)]


NUMBERS = (0.9, 0.99, 0.3, 1e-8)


def by_formula(w: Tensor, g: Tensor, m: Tensor, v: Tensor, step: Tensor, lr: Tensor) -> tuple[Tensor, ...]:
    beta1, beta2, decay, eps = NUMBERS
    m, v = m + (g - m) * (1 - beta1), beta2 * v + (1 - beta2) * g * g
    change = lr / (1 - beta1**step) * m / ((v / (1 - beta2**step)).sqrt() + eps)
    return w * (1 - lr * decay) - change, m, v


@pytest.mark.parametrize("turned", [(), (0,), (1,), (2, 3), (0, 1, 2, 3)])
@pytest.mark.parametrize("places", [(), (0, 1, 2), (1,), "elsewhere"], ids=str)
def test_the_op_is_the_formula_wherever_its_results_go(turned: tuple[int, ...], places: Any) -> None:
    given = operands()
    for at in turned:
        given[at] = given[at].t().contiguous().t()
    before, expected = [x.clone() for x in given], by_formula(*given)
    olds = [given[at] for at in (0, 2, 3)]
    over = dict(enumerate(map(torch.empty_like, olds))) if places == "elsewhere" else {i: olds[i] for i in places}
    made = write_adamw(*given, *NUMBERS, over=over)
    for position, (value, right) in enumerate(zip(made, expected, strict=True)):
        torch.testing.assert_close(value, right, rtol=1e-12, atol=1e-14)
        if position in over:
            assert value is over[position]
    written = {id(x) for x in over.values()}
    assert all(torch.equal(x, y) for x, y in zip(given, before, strict=True) if id(x) not in written)


def test_the_op_gives_the_strides_of_its_fake() -> None:
    given = [x.t() if x.dim() else x for x in operands(torch.float32)]
    real, fake = ADAMW(*given, *NUMBERS), ADAMW(*(x.to("meta") for x in given), *NUMBERS)
    assert [(x.shape, x.stride(), x.dtype) for x in real] == [(x.shape, x.stride(), x.dtype) for x in fake]
