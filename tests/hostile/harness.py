"""Modules that do in Python what a tracer may forget, and plain eager training, written here, to hold them against.

Each case is compiled under a layout and trained for three steps of different batches; losses, gradients, parameters and
buffers are those of eager PyTorch, or the program is refused with the code that the case names.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import shardc
from shardc.ir.diagnostic import ShardcError

M = TypeVar("M", bound=type[nn.Module])
TOLERANCE = 1e-11
STEPS = 3

BATCH, COLUMNS = {"inputs": {"x": "dp"}}, {"params": {"a.weight": "tp, -"}}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dp2": ("dp=2", BATCH),
    "tp2": ("tp=2", COLUMNS),
    "dp2 tp2": ("dp=2, tp=2", BATCH | COLUMNS),
    "dp3": ("dp=3", BATCH),
    "zero1": ("dp=2", BATCH | {"storage": {"zero": 1, "axes": ["dp"]}}),
    "zero2": ("dp=2", BATCH | {"storage": {"zero": 2, "axes": ["dp"]}}),
    "zero3": ("dp=2", BATCH | {"storage": {"zero": 3, "axes": ["dp"]}}),
    "pp2": ("pp=2", {"pipeline": {"microbatches": 2}}),
    "accumulate": ("dp=2", BATCH | {"accumulate": 2}),
    "recompute": ("dp=2", BATCH | {"recompute": "full"}),
    "fuse": ("dp=2", BATCH | {"fuse": True}),
}
MICROBATCHES = {"pp2": 2, "accumulate": 2}
Make = Callable[[Any], torch.optim.Optimizer | list[torch.optim.Optimizer]]
OPTIMIZERS: dict[str, Make | None] = {
    "none": None,
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-3),  # smaller ones make updates of rounding
}


@dataclass(frozen=True)
class Case:
    """A module, and what becomes of it.

    `refused` is the code of the error under every layout, or under those it names; `warned`, that of a warning which
    says that steps are not eager's. A `random` module draws numbers: its steps are those of one rank, not eager's.
    `loss` makes the loss function for a model, where that returns none; where halves are computed with, `tolerance` is
    that of their rounding.
    """

    name: str
    build: Callable[[], nn.Module]
    refused: str | Mapping[str, str] | None = None
    warned: str | None = None
    random: bool = False
    shape: tuple[int, ...] = (4, 6)
    optimizer: Make | None = None
    loss: Callable[[nn.Module], Callable[[Any, Any], Any]] | None = None
    tolerance: float = TOLERANCE

    def code(self, layout: str) -> str | None:
        return self.refused if isinstance(self.refused, str) or self.refused is None else self.refused.get(layout)

    def model(self) -> nn.Module:
        """In float64 from the start: `.double()` would make other tensors of those that it holds by the way."""
        before = torch.get_default_dtype()
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)
        try:
            return self.build()
        finally:
            torch.set_default_dtype(before)

    def loss_of(self, model: nn.Module, x: Tensor) -> Any:
        """Of one batch, as a user's own loop takes it from what forward returns."""
        output: Any = model(x)
        if self.loss is not None:
            return self.loss(model)(output, x)
        while isinstance(output, tuple | list):
            output = output[0]
        if isinstance(output, Mapping):
            return output["loss"]
        return output if isinstance(output, Tensor) else output.loss

    def batches(self) -> list[Tensor]:
        draw = torch.Generator().manual_seed(7)
        return [torch.randn(*self.shape, generator=draw, dtype=torch.float64) for _ in range(STEPS)]


CASES: dict[str, Case] = {}


def case(**options: Any) -> Callable[[M], M]:
    """Enter a module, made without arguments, under its class's name."""

    def enter(build: M) -> M:
        assert build.__name__ not in CASES
        CASES[build.__name__] = Case(build.__name__, build, **options)
        return build

    return enter


class Net(nn.Module):
    """Two linear layers; cases differ in what lies between."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def between(self, h: Tensor) -> Tensor:
        return h.tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self.a(x))).square().mean()


@dataclass
class Trace:
    """What training left behind: each step's loss and gradients, the last parameters and buffers."""

    values: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def of_step(self, step: int, loss: Tensor, gradients: Mapping[str, Tensor]) -> None:
        self.values[f"loss {step}"] = loss.detach().clone()
        self.values |= {f"gradient {step} of {name}": g.detach().clone() for name, g in gradients.items()}

    def differences(self, other: Trace, tolerance: float) -> list[str]:
        """A line for each value that is missing in one, or differs by more than the tolerance."""
        found = [f"{key}: only one has it" for key in self.values.keys() ^ other.values.keys()]
        for key in self.values.keys() & other.values.keys():
            mine, its = self.values[key], other.values[key]
            if mine.shape != its.shape or not torch.allclose(mine, its, rtol=tolerance, atol=tolerance, equal_nan=True):
                found.append(f"{key}: {mine.flatten()[:3].tolist()}... is not {its.flatten()[:3].tolist()}...")
        return sorted(found)


def trained_eagerly(case: Case, optimizer: str, microbatches: int = 1) -> Trace:
    """Plain PyTorch. Gradients of microbatches are added up here: `backward` adds in place, and counts terms twice
    where gradients are views of one another (of `torch.stack(parameters)`)."""
    model, trace = case.model(), Trace()
    make = case.optimizer or OPTIMIZERS[optimizer]
    made = make(model.parameters()) if make is not None else []
    steps = made if isinstance(made, list) else [made]
    for step, batch in enumerate(case.batches()):
        sums: dict[nn.Parameter, Tensor] = {}
        losses: list[Tensor] = []
        for part in batch.chunk(microbatches):
            model.zero_grad()
            with sdpa_kernel(SDPBackend.MATH):  # the others' kernels have no second derivatives
                loss = case.loss_of(model, part.clone()) / microbatches
                loss.backward()
            losses.append(loss.detach())
            for p in model.parameters():
                if p.grad is not None:
                    sums[p] = sums.get(p, 0) + p.grad.clone()
        for p in model.parameters():
            p.grad = sums.get(p)
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None and p.requires_grad}
        trace.of_step(step, torch.stack(losses).sum(), {} if steps else gradients)
        for each in steps:
            each.step()
    kept = dict(model.named_buffers(remove_duplicate=False)) | model.state_dict()  # also those that are not persistent
    trace.values |= {name: t.detach().clone() for name, t in kept.items() if isinstance(t, Tensor)}
    return trace


def compiled(case: Case, layout: str, optimizer: str) -> tuple[shardc.Program, list[Tensor]]:
    return compiled_on(case, *LAYOUTS[layout], optimizer)


def compiled_on(case: Case, mesh: str, plan: dict[str, Any], optimizer: str) -> tuple[shardc.Program, list[Tensor]]:
    model, data = case.model(), case.batches()
    make = case.optimizer or OPTIMIZERS[optimizer]
    made = make(model.parameters()) if make is not None else None
    loss = None if case.loss is None else case.loss(model)
    return shardc.compile(model, data[0].clone(), mesh=mesh, plan=plan, optimizer=made, loss=loss), data


def trained(program: shardc.Program, data: list[Tensor], optimizer: bool, target: nn.Module) -> Trace:
    """The program's steps; `target`, a model of its own, is given what they end with."""
    trace = Trace()
    trainer = program.launch()
    for step, batch in enumerate(data):
        loss = trainer.step(batch.clone()).loss
        trace.of_step(step, loss, {} if optimizer else trainer.gather_grads())
    state = trainer.state_dict()
    own = target.state_dict()
    assert list(state) == list(own)
    tensors = {key: (t, own[key]) for key, t in state.items() if isinstance(t, Tensor)}
    assert all((a.dtype, a.shape) == (b.dtype, b.shape) for a, b in tensors.values())
    target.load_state_dict(state, strict=True)
    trainer.sync_to(target)
    kept = dict(target.named_buffers(remove_duplicate=False)) | target.state_dict()
    trace.values |= {name: t.detach().clone() for name, t in kept.items() if isinstance(t, Tensor)}
    return trace


def outcome(case: Case, layout: str, optimizer: str) -> str:
    """ "right", the code of the error, or what is wrong; the same of `verify`, which has to agree.

    Raises whatever else compiling and training raise: an error without a code is a fault.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program, data = compiled(case, layout, optimizer)
            target = case.model()
            stepped = case.optimizer is not None or OPTIMIZERS[optimizer] is not None
            found = trained(program, data, stepped, target)
        except ShardcError as refusal:
            return refusal.code
        codes = {d.code for d in program.diagnostics}
        if case.warned is not None:
            return case.warned if case.warned in codes else f"no warning {case.warned}, but {sorted(codes)}"
        if case.random:
            alone = {"accumulate": MICROBATCHES.get(layout, 1)}  # each microbatch draws its own
            expected = trained(compiled_on(case, "dp=1", alone, optimizer)[0], data, stepped, case.model())
        else:
            expected = trained_eagerly(case, optimizer, MICROBATCHES.get(layout, 1))
        wrong = found.differences(expected, case.tolerance)
        report = program.verify()
    if wrong and report.ok:
        return "\n".join(["wrong, and verify does not find it:", *wrong])
    if wrong or not report.ok:
        return "\n".join(["wrong, as verify finds:" if wrong else f"right, but verify says:\n{report}", *wrong])
    return "right"
