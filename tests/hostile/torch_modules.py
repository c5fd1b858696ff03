"""Every module of torch's own test database, trained for two steps beside eager PyTorch; a JSON line for each case.

    python -m tests.hostile.torch_modules PART OF      part PART of OF, as even as their order makes them

A case is a module with the arguments that torch tests it with, in training or evaluation mode, its first input or its
first parameter sharded over two ranks. A process of its own runs this: torch's test code, where the database lies,
changes settings of torch for good when it is imported.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal import common_modules  # pyright: ignore[reportMissingModuleSource, reportMissingTypeStubs]
from torch.utils import _pytree as pytree

import shardc
from shardc.ir.diagnostic import ShardcError

TOLERANCE = 1e-10
MOST = 200  # of a module's arguments: one has more, which differ in little


class Wrapped(nn.Module):
    """The module with its inputs by name, a parameter even if it has none, and a loss."""

    def __init__(self, module: nn.Module, call: Callable[[list[Tensor]], Any]) -> None:
        super().__init__()
        self.module, self._call = module, (module, call)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, **tensors: Tensor) -> Tensor:
        found = [tensors[name] for name in sorted(tensors)]
        if found and found[0].is_floating_point():
            found[0] = found[0] * self.scale
        leaves = [leaf for leaf in pytree.tree_leaves(self._call[1](found)) if isinstance(leaf, Tensor)]
        wide = [leaf for leaf in leaves if leaf.is_floating_point()]
        return sum((leaf.square().mean() for leaf in wide), self.scale * 0.1)


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], tuple[Wrapped, dict[str, Tensor]]]
    sharded: str  # "input" or "parameter"


def cases() -> Iterator[Case]:
    for entry in common_modules.module_db:
        for training in (True, False):
            inputs = entry.module_inputs_func(
                entry, device="cpu", dtype=torch.float64, requires_grad=False, training=training
            )
            for at, given in enumerate(inputs[:MOST]):
                for sharded in ("input", "parameter"):
                    name = f"{entry.name} {at} {'train' if training else 'eval'} {sharded}"
                    yield Case(name, _builder(entry, given, training), sharded)


def _builder(entry: Any, given: Any, training: bool) -> Callable[[], tuple[Wrapped, dict[str, Tensor]]]:
    def build() -> tuple[Wrapped, dict[str, Tensor]]:
        torch.manual_seed(0)
        made = given.constructor_input
        module = entry.module_cls(*made.args, **made.kwargs).double().train(training)
        leaves, structure = pytree.tree_flatten((given.forward_input.args, given.forward_input.kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

        def call(tensors: list[Tensor]) -> Any:
            filled = list(leaves)
            for i, t in zip(places, tensors, strict=True):
                filled[i] = t
            args, kwargs = pytree.tree_unflatten(filled, structure)
            return module(*args, **kwargs)

        return Wrapped(module, call), {f"x{k}": leaves[i].detach().clone() for k, i in enumerate(places)}

    return build


def outcome(case: Case) -> str:
    """ "right", the code of the error, "nothing to shard", "eager refuses", or what is wrong."""
    model, batch = case.build()
    batches = [batch, {n: t * 0.5 if n == "x0" and t.is_floating_point() else t for n, t in batch.items()}]
    plan: dict[str, Any] = {"inputs": {"x0": "dp"}}
    if case.sharded == "parameter":
        named = model.named_parameters()
        first = next((n for n, p in named if n != "scale" and (nn.parameter.is_lazy(p) or p.dim())), None)
        if first is None:
            return "nothing to shard"
        plan = {"params": {first: "dp"}}
    elif not batch or not batch["x0"].dim():
        return "nothing to shard"
    try:
        expected = _by_eager(case, batches)
    except (RuntimeError, ValueError):
        if not any(nn.parameter.is_lazy(p) for p in model.parameters()):
            return "eager refuses"  # torch tests some modules by the error that they raise
        expected = None
    try:
        found = _by_program(case, "dp=2", plan, batches)
        if expected is None:
            expected = _by_program(case, "dp=1", {}, batches)
    except ShardcError as refusal:
        return refusal.code
    wrong = [name for name in expected if not torch.allclose(found[name], expected[name], TOLERANCE, TOLERANCE, True)]
    return f"wrong: {', '.join(wrong)}" if wrong else "right"


def _by_program(case: Case, mesh: str, plan: dict[str, Any], batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    model, _ = case.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trainer = shardc.compile(model, dict(batches[0]), mesh=mesh, plan=plan, optimizer=optimizer).launch()
    losses = {f"loss {i}": trainer.step(dict(batch)).loss.detach() for i, batch in enumerate(batches)}
    return losses | trainer.state_dict()


def _by_eager(case: Case, batches: list[dict[str, Tensor]]) -> dict[str, Tensor] | None:
    """None of a module that draws random numbers."""
    runs: list[dict[str, Tensor]] = []
    for seed in (1, 2):
        model, _ = case.build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        torch.manual_seed(seed)
        losses: dict[str, Tensor] = {}
        for i, batch in enumerate(batches):
            optimizer.zero_grad()
            loss = model(**{name: t.clone() for name, t in batch.items()})
            loss.backward()
            losses[f"loss {i}"] = loss.detach()
            optimizer.step()
        runs.append(losses | {name: t.detach().clone() for name, t in model.state_dict().items()})
    same = all(torch.equal(runs[0][n], runs[1][n]) or bool(runs[0][n].isnan().any()) for n in runs[0])
    return runs[0] if same else None


def main(part: int, of: int) -> None:
    warnings.simplefilter("ignore")
    for at, case in enumerate(cases()):
        if at % of != part:
            continue
        try:
            found = outcome(case)
        except Exception as problem:
            found = f"raw {type(problem).__name__}: {str(problem).partition(chr(10))[0]}"
        print(json.dumps({"case": case.name, "outcome": found}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
