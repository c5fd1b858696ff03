"""torch's database of ops as test cases: each op with its first operand split along each dim over two ranks.

A case is a model whose only layer is one call of the database. Its loss is a weighted sum of all that the call returns,
so that a wrong element shows. Where the op has a derivative, the first operand is a parameter, and its gradient counts
too; where not, it is an input of an evaluation.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import shardc
from shardc.ir.diagnostic import ShardcError
from tests.rules.database_model import Called

SAMPLES = 3  # of an op's arguments: the first, the one with the most dims and the last
LARGEST = 4096  # elements


@dataclass(frozen=True)
class Arguments:
    """One way to call an op: leaves in order, of which `tensors` are tensors."""

    leaves: tuple[Any, ...]
    spec: Any
    first: int  # among the leaves

    @staticmethod
    def of(sample: Any) -> Arguments | None:
        """None of a call without a tensor that could be split, or one that is too large to try."""
        leaves, spec = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        count = len(pytree.tree_flatten(sample.input)[0])
        if not places or places[0] >= count or sum(leaves[i].numel() for i in places) > LARGEST:
            return None
        if any(leaves[i].layout != torch.strided or not leaves[i].numel() for i in places):
            return None
        return Arguments(tuple(leaves), spec, places[0])

    @property
    def tensor(self) -> Tensor:
        return self.leaves[self.first]

    @property
    def dims(self) -> list[int]:
        return [d for d, size in enumerate(self.tensor.shape) if size > 1]


@dataclass(frozen=True)
class Outcome:
    """`verdict`: right, refused, or what is wrong. `codes`: of the refusal, or of the diagnostics."""

    verdict: str
    codes: frozenset[str] = frozenset()
    missing: frozenset[str] = frozenset()  # ops that have no rule

    @property
    def fault(self) -> bool:
        return self.verdict not in ("right", "refused", "not run")


@cache
def entries() -> dict[str, Any]:
    """The database's entries by name; several of one op have a variant's name too."""
    from torch.testing._internal.common_methods_invocations import op_db  # slow, and of tests alone

    return {entry.name + (f".{entry.variant_test_name}" if entry.variant_test_name else ""): entry for entry in op_db}


def dtype_of(entry: Any) -> torch.dtype | None:
    supported = entry.dtypes
    return next((t for t in (torch.float64, torch.int64, torch.bool, torch.complex128) if t in supported), None)


def arguments_of(name: str) -> list[Arguments]:
    """Up to `SAMPLES` ways to call an op."""
    entry = entries()[name]
    dtype = dtype_of(entry)
    if dtype is None:
        return []
    torch.manual_seed(0)
    known: list[Arguments] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for sample in entry.sample_inputs("cpu", dtype, requires_grad=False):
                arguments = Arguments.of(sample)
                if arguments is not None and arguments.dims:
                    known.append(arguments)
                if len(known) == 40:
                    break
        except (RuntimeError, NotImplementedError):  # of a library that this build of torch lacks
            return []
    if len(known) <= SAMPLES:
        return known
    widest = max(range(len(known)), key=lambda i: (known[i].tensor.ndim, -i))
    return [known[i] for i in sorted({0, widest, len(known) - 1})]


def outcome(name: str, arguments: Arguments, dim: int) -> Outcome:
    """What becomes of one call under dp=2."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _outcome(entries()[name].op, arguments, dim)


def _outcome(op: Callable[..., Any], arguments: Arguments, dim: int) -> Outcome:
    tensors = {i: leaf for i, leaf in enumerate(arguments.leaves) if isinstance(leaf, Tensor)}
    first = arguments.tensor
    placement = ", ".join("dp" if d == dim else "-" for d in range(first.ndim))
    model = Called(op, arguments.leaves, arguments.spec, arguments.first)
    batch = {f"x{i}": t.detach().clone() for i, t in tensors.items() if i != arguments.first}
    batch["unit"] = torch.ones((), dtype=torch.float64)
    trained = False
    try:
        if first.is_floating_point():
            trained = bool(_with_parameter(model, first)(**batch).requires_grad)
        if not trained:
            model.first = None
            batch[f"x{arguments.first}"] = first.detach().clone()
            model(**batch)
    except Exception:
        return Outcome("not run")
    plan: dict[str, Any] = (
        {"params": {"first": placement}} if trained else {"inputs": {f"x{arguments.first}": placement}}
    )
    missing: frozenset[str] = frozenset()
    try:
        program = shardc.compile(model, batch, mesh="dp=2", plan=plan, mode="train" if trained else "eval")
        codes = frozenset(d.code for d in program.diagnostics)
        missing = frozenset(str(d.op) for d in program.diagnostics if d.code == "SC301")
        report = program.verify()
    except ShardcError as refusal:
        return Outcome("refused", frozenset(d.code for d in refusal.diagnostics))
    except Exception as failure:
        return Outcome(f"{type(failure).__name__}: {str(failure)[:300]}", missing=missing)
    return Outcome("right" if report.ok else f"wrong\n{report}", codes, missing)


def _with_parameter(model: Called, first: Tensor) -> Called:
    model.first = nn.Parameter(first.detach().clone())
    return model
