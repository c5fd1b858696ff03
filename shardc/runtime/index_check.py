"""Indices that lie outside what they count in: found in a batch before it is run, and named when a call meets one.

Every rank is given the whole batch, so every rank finds the same bad token, says the same and stops before it has sent
anything. `IndexCheck` repeats, on the CPU, what the single-device graph makes of the batch's integers until an op looks
them up: a shift of labels, a mask of padding. Indices that depend on weights are computed in the step alone; the call
that refuses one is named by `out_of_range`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from shardc.ir.diagnostic import Diagnostic, ShardcError
from shardc.ir.graph import Graph, info, op_name, operands, type_of
from shardc.ir.ops.check_index import check_index
from shardc.ir.positions import Positions, positions
from shardc.runtime.instructions import Instruction, Numerics, flatten

HINT = "was the data made for another vocabulary or table?"


class IndexCheck:
    """The part of a single-device graph that leads from a batch's integers to the ops that look them up."""

    def __init__(self, reference: Graph) -> None:
        listing = flatten(reference, Numerics())
        ports = zip(reference.inputs, reference.placeholders, listing.inputs, strict=True)
        self._inputs = {slot: (port, type_of(n)) for port, n, slot in ports if port.role == "input" and _counts(n)}
        self._size = listing.size
        behind: dict[int, set[str]] = {slot: {port.name} for slot, (port, _) in self._inputs.items()}  # slot -> inputs
        made: list[Instruction] = []
        self._uses: list[tuple[Instruction, Positions, int, set[str]]] = []
        for one in listing.instructions:
            slots = dict(zip(operands(one.node), one.reads, strict=True))
            for p in positions(one.node):
                if behind.get(slots[p.value]):
                    self._uses.append((one, p, slots[p.value], behind[slots[p.value]]))
            if one.target is check_index or not all(slot in behind for slot in one.reads):
                continue
            if all(_counts(value) for value, _, _ in one.yields):
                made.append(one)
                found = set[str]().union(*(behind[slot] for slot in one.reads))
                behind |= {slot: found for _, _, slot in one.yields}
        self._code = _needed(made, [slot for _, _, slot, _ in self._uses])

    @torch.no_grad()
    def __call__(self, feed: Mapping[str, torch.Tensor]) -> None:
        """ShardcError naming every use of an index of a microbatch that lies outside.

        What is not on the CPU is left to the device, and a tensor that does not fit to those who check that.
        """
        env: list[torch.Tensor | None] = [None] * self._size
        for slot, (port, type) in self._inputs.items():
            value = feed.get(port.name)
            if (
                value is None
                or value.device.type != "cpu"
                or (tuple(value.shape), value.dtype) != (type.shape, type.dtype)
            ):
                return
            env[slot] = value.detach()
        for one in self._code:
            args, kwargs = one.arguments(env)
            try:
                results = one.target(*args, **kwargs)
            except (IndexError, RuntimeError):
                break  # one of the uses below, of integers that are looked up
            for _, position, slot in one.yields:
                env[slot] = results if position is None else results[position]
        found: dict[tuple[int, int], Diagnostic] = {}
        for one, p, slot, names in self._uses:
            value = env[slot]
            outside = None if value is None else p.first_outside(value)
            if outside is not None and (slot, p.size) not in found:
                found[slot, p.size] = _diagnostic(one.node, p, *self._described(env, slot, p.value, outside, names))
        if found:
            raise ShardcError(*found.values())

    def _described(
        self, env: Sequence[Any], slot: int, index: fx.Node, outside: tuple[int, list[int]], names: set[str]
    ) -> tuple[str, str]:
        """What is wrong, and the tensor to name: the user's own, if the value came through from one as it was."""
        bad, at = outside
        held = {port.name: env[s] for s, (port, _) in self._inputs.items() if port.name in names}
        places = {name: (x == bad).nonzero() for name, x in held.items()}
        found = [name for name, where in places.items() if len(where)]
        if slot in self._inputs or len(found) == 1:
            name = self._inputs[slot][0].name if slot in self._inputs else found[0]
            return f"input '{name}' holds {bad} at {places[name][0].tolist()}", name
        name = f"%{info(index).name}"
        return f"{name}, computed from {' and '.join(sorted(names))}, holds {bad} at {at}", name


def out_of_range(one: Instruction, rank: int, held: Sequence[torch.Tensor | None]) -> ShardcError | None:
    """The error for an instruction that failed on a rank, if it met an index outside; `held` are its operands."""
    operand = dict(zip(operands(one.node), held, strict=True))
    for p in positions(one.node):
        value = operand[p.value]
        if value is None or value.device.type != "cpu":  # after an assertion on a GPU nothing can be read from it
            continue
        outside = p.first_outside(value)
        if outside is not None:
            name = f"%{info(p.value).name}"
            return ShardcError(_diagnostic(one.node, p, f"{name} holds {outside[0]} on rank {rank}", name))
    return None


def _diagnostic(node: fx.Node, p: Positions, what: str, name: str) -> Diagnostic:
    about = info(node)
    loss = node.target is check_index and p.ignored is not None
    return Diagnostic(
        "SC507",
        f"{what}; the values there may be {p}",
        location=about.source or None,
        source_text=about.source_text or None,
        fqn=about.fqn or None,
        tensor=name,
        op="cross entropy" if loss else op_name(node.target) if node.target is not check_index else None,
        hint=HINT,
    )


def _counts(value: fx.Node) -> bool:
    dtype = type_of(value).dtype
    return not dtype.is_floating_point and not dtype.is_complex


def _needed(made: Sequence[Instruction], wanted: Iterable[int]) -> tuple[Instruction, ...]:
    """Those of some instructions that lead to the wanted slots."""
    slots, found = set(wanted), list[Instruction]()
    for one in reversed(made):
        if any(slot in slots for _, _, slot in one.yields):
            slots.update(one.reads)
            found.append(one)
    return tuple(reversed(found))
