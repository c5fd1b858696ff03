"""Detects indices out of range in a batch, before it runs.

Every rank gets the whole batch, so every rank finds the same bad token, reports the same error and stops before it has
sent anything. `IndexCheck` evaluates on the CPU the part of the single-device graph that leads from the batch's
integers to the ops that index with them: a shift of labels, a mask of padding. Indices that depend on weights exist
only during the step; `out_of_range` names the call that fails on one.

What forward asked of the sample's values (`assume`) is found out in the same way, where it depends on the batch alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import fx

from kernels_triton.base.random import RANDOM_UNIFORM
from shardc.ir.diagnostic import Diagnostic, ShardcError
from shardc.ir.graph import Graph, info, op_name, operands, type_of
from shardc.ir.index_operands import Positions, positions
from shardc.ir.ops.assumed import BROKEN, assume
from shardc.ir.ops.check_index import check_index
from shardc.runtime.execute.instructions import CallInstruction, Listing, Numerics, list_calls

HINT = "was the data made for another vocabulary or table?"
ANOTHER = "what this line reads is part of the program: compile another for such a batch, or use torch.where"
TOO_LONG = "the sequence is longer than the model's table of {} positions: cut it, or make the model for longer ones"


class IndexCheck:
    """The part of a single-device graph that leads from a batch's integers to the ops that index with them."""

    def __init__(self, reference: Graph) -> None:
        listing = list_calls(reference, Numerics())
        ports = zip(reference.inputs, reference.placeholders, listing.inputs, strict=True)
        self._inputs = {slot: (port, type_of(n)) for port, n, slot in ports if port.role == "input" and _is_integer(n)}
        self._size = listing.size
        # By slot: the inputs that its value depends on.
        input_names: dict[int, set[str]] = {slot: {port.name} for slot, (port, _) in self._inputs.items()}
        computed: list[CallInstruction] = []
        self._uses: list[tuple[CallInstruction, Positions, int, set[str]]] = []
        for instruction in listing.instructions:
            slots = dict(zip(operands(instruction.node), instruction.reads, strict=True))
            for p in positions(instruction.node):
                if input_names.get(slots[p.value]):
                    self._uses.append((instruction, p, slots[p.value], input_names[slots[p.value]]))
            if instruction.target is check_index or not all(slot in input_names for slot in instruction.reads):
                continue
            if all(_is_integer(value) for value, _, _ in instruction.yields):
                computed.append(instruction)
                names = set[str]().union(*(input_names[slot] for slot in instruction.reads))
                input_names |= {slot: names for _, _, slot in instruction.yields}
        self._code = _needed_for(computed, [slot for _, _, slot, _ in self._uses])
        self.assumptions = Assumptions(listing)

    @torch.no_grad()
    def __call__(self, feed: Mapping[str, torch.Tensor], *, whole: bool = True) -> None:
        """Raise ShardcError naming every use of an index of a microbatch that is out of range.

        Tensors on a device are left to the device's own checks. Wrong shapes and dtypes are checked elsewhere. What is
        assumed is checked of a `whole` microbatch, not of the part that a rank brings.
        """
        try:
            self._check_indices(feed)
        except ShardcError:
            if whole:
                with suppress(IndexError, RuntimeError):  # of what cannot be computed of such a batch
                    self.assumptions.check(feed)  # the better reason, where one is broken
            raise
        if whole:
            self.assumptions.check(feed)

    def _check_indices(self, feed: Mapping[str, torch.Tensor]) -> None:
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
        for instruction in self._code:
            args, kwargs = instruction.arguments(env)
            try:
                results = instruction.target(*args, **kwargs)
            except (IndexError, RuntimeError):
                break  # an index out of range: the uses below report it
            for _, position, slot in instruction.yields:
                env[slot] = results if position is None else results[position]
        diagnostics: dict[tuple[int, int], Diagnostic] = {}
        for instruction, p, slot, names in self._uses:
            value = env[slot]
            if value is None or (first_bad := p.first_outside(value)) is None:
                continue
            if (slot, p.size) not in diagnostics:
                what, name = self._describe_value(env, slot, p.value, first_bad, names)
                counts = counts_on(value, p, first_bad[1]) and (slot not in self._inputs or "position" in name)
                counts = counts and _is_table(operands(instruction.node)[0])
                diagnostics[slot, p.size] = index_diagnostic(instruction.node, p, what, name, counts=counts)
        if diagnostics:
            raise ShardcError(*diagnostics.values())

    def _describe_value(
        self, env: Sequence[Any], slot: int, index: fx.Node, first_bad: tuple[int, list[int]], names: set[str]
    ) -> tuple[str, str]:
        """The error text and the tensor to name: the user's input, if the bad value came from one unchanged."""
        bad, position = first_bad
        inputs = {port.name: env[s] for s, (port, _) in self._inputs.items() if port.name in names}
        bad_positions = {name: (x == bad).nonzero() for name, x in inputs.items()}
        matching = [name for name, positions in bad_positions.items() if len(positions)]
        if slot in self._inputs or len(matching) == 1:
            name = self._inputs[slot][0].name if slot in self._inputs else matching[0]
            return f"input '{name}' holds {bad} at {bad_positions[name][0].tolist()}", name
        name = f"%{info(index).name}"
        return f"{name}, computed from {' and '.join(sorted(names))}, holds {bad} at {position}", name


def _is_table(value: fx.Node) -> bool:
    """Is it a parameter or a buffer, perhaps cast, and not computed in the step?"""
    while value.target is torch.ops.aten._to_copy.default:
        value = value.all_input_nodes[0]
    return value.op == "placeholder"


class Assumptions:
    """The part of a single-device graph that leads from a batch to what is assumed of it."""

    def __init__(self, listing: Listing) -> None:
        graph = listing.graph
        ports = zip(graph.inputs, graph.placeholders, listing.inputs, strict=True)
        self._inputs = {slot: (port.name, type_of(n)) for port, n, slot in ports if port.role == "input"}
        self._size = listing.size
        known = set(self._inputs)
        computed: list[CallInstruction] = []
        self._assumed: list[CallInstruction] = []
        for instruction in listing.instructions:
            if not known.issuperset(instruction.reads) or instruction.target is RANDOM_UNIFORM:
                continue
            if instruction.target is assume:
                self._assumed.append(instruction)
            else:
                computed.append(instruction)
                known |= {slot for _, _, slot in instruction.yields}
        self._code = _needed_for(computed, [slot for one in self._assumed for slot in one.reads])

    @torch.no_grad()
    def check(self, feed: Mapping[str, torch.Tensor], which: str = "") -> None:
        """Raise ShardcError (SC512) for a microbatch that answers otherwise than the sample: `which` it is."""
        env: list[Any] = [None] * self._size
        for slot, (name, type) in self._inputs.items() if self._assumed else ():
            value = feed.get(name)
            if value is None or value.device.type != "cpu":
                return
            if (tuple(value.shape), value.dtype) != (type.shape, type.dtype):
                return
            env[slot] = value.detach()
        for instruction in self._code:
            args, kwargs = instruction.arguments(env)
            try:
                results = instruction.target(*args, **kwargs)
            except (IndexError, RuntimeError):
                return  # the step says which call fails
            for _, position, slot in instruction.yields:
                env[slot] = results if position is None else results[position]
        broken = [one for one in self._assumed if env[one.reads[0]] is not None and not env[one.reads[0]]]
        if broken:
            raise ShardcError(*(assumption_diagnostic(one.node, which) for one in broken))


def assumption_diagnostic(node: fx.Node, which: str = "") -> Diagnostic:
    """What is said of an assumption that does not hold."""
    about = info(node)
    return Diagnostic(
        "SC512",
        BROKEN + which,
        location=about.source or None,
        source_text=about.source_text or None,
        fqn=about.fqn or None,
        hint=ANOTHER,
    )


def counts_on(indices: torch.Tensor, p: Positions, position: Sequence[int]) -> bool:
    """Whether the first index outside is the one behind the table's last, in a row that counts up to it: positions of a
    sequence, and not tokens."""
    if len(position) == 0 or position[-1] < 1 or int(indices[tuple(position)]) != p.size:
        return False
    steps = indices[tuple(position[:-1])].diff()
    return bool(((steps == 1) | (steps == 0)).all())  # 0: of padding, all of which has one position


def index_diagnostic(node: fx.Node, p: Positions, what: str, name: str, *, counts: bool = False) -> Diagnostic:
    """`counts`: the indices are positions of a sequence."""
    node_info = info(node)
    loss = node.target is check_index and p.ignored is not None
    return Diagnostic(
        "SC507",
        f"{what}; the values there may be {p}",
        location=node_info.source or None,
        source_text=node_info.source_text or None,
        fqn=node_info.fqn or None,
        tensor=name,
        op="cross entropy" if loss else op_name(node.target) if node.target is not check_index else None,
        hint=TOO_LONG.format(p.size) if counts and not loss else HINT,
    )


def _is_integer(value: fx.Node) -> bool:
    dtype = type_of(value).dtype
    return not dtype.is_floating_point and not dtype.is_complex


def _needed_for(computed: Sequence[CallInstruction], results: Iterable[int]) -> tuple[CallInstruction, ...]:
    """The instructions among `computed` that lead to the slots `results`."""
    slots, needed = set(results), list[CallInstruction]()
    for instruction in reversed(computed):
        if any(slot in slots for _, _, slot in instruction.yields):
            slots.update(instruction.reads)
            needed.append(instruction)
    return tuple(reversed(needed))
