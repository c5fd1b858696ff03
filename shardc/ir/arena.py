"""Memory planned beforehand for what kernels make: one arena, in which each result has a place as long as it lives.

    %y, %mean = layer_norm(%x, ...)      %y in bytes 0..1023, %mean in 1024..1151
    %z = gelu(%y)                        %z in 1152..2175
    %u = norm(%z)                        %u in 0..1023: %y is dead

A call whose results have places allocates nothing, and knows their addresses. Placed are results that never leave the
body: no output is one or a view of one, none is written over what is held. So are the flat tensors of buckets, from
their first member on, and between kernels the results of products and of other ops that can write into a given tensor:
of these, views and the kernels that read them know the addresses. What a collective reads may be under way until its
result is read, and lives until then.

An arena is there all the time, so not everything is placed: the smallest first, since one costs Python as much time as
a large one, and as many as leave the peak where it was, but for 1 %; none so large that it keeps a GPU busy for longer
than its allocation takes Python. In the graph's order each takes the smallest gap that it fits in. Several graphs that
never run at once can share an arena; of them, each places what fits in so much.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import fx

from kernels_triton.base.inplace import INTO
from shardc.ir.account import Account, account_of
from shardc.ir.buckets import layout_of, pieces, with_buckets, writes_out
from shardc.ir.collectives import KINDS
from shardc.ir.graph import Graph, op_name, operands, results
from shardc.ir.in_place import writes
from shardc.ir.microbatch import Sections, sections
from shardc.ir.ops.accumulate import SUMS
from shardc.ir.ops.buckets import PACK
from shardc.ir.ops.host_copies import ENDS
from shardc.ir.schema import schema_of
from shardc.ir.storages import Storage, storages, yields

LINE = 128  # bytes: where a result of as many begins, a line of a GPU's cache
ALIGNMENT = 16  # and where a smaller one does, as kernels want it
LARGEST = 64 << 20  # bytes that are placed; to write as many takes a GPU some 15 microseconds
SPARE = 100  # an arena may add one part in so many to the peak


@dataclass(frozen=True, slots=True)
class Slot:
    """The bytes of a result, its own from the call that makes it to the last that may read it."""

    value: fx.Node
    born: int
    dies: int
    bytes: int
    offset: int = 0

    @property
    def end(self) -> int:
        return self.offset + self.bytes


@dataclass(frozen=True)
class Plan:
    slots: tuple[Slot, ...]

    @property
    def bytes(self) -> int:
        return max((slot.end for slot in self.slots), default=0)

    @cached_property
    def values(self) -> dict[fx.Node, Slot]:
        return {slot.value: slot for slot in self.slots}


def planned(body: Graph, most: int | None = None) -> Plan:
    """The plan of a localized body, of `most` bytes if it is to share an arena."""
    run = sections(body)
    of = with_buckets(body, storages(body), run)
    candidates = _candidates(body, run, of)
    if not candidates:
        return Plan(())
    account = account_of(body, overlap=True)
    stored = sum(storage.bytes for _, storage in account.inputs)
    total_peak = max(_timeline(account, set()), default=0)
    best = Plan(())
    for size in sorted({slot.bytes for slot in candidates}):
        plan = placed([slot for slot in candidates if slot.bytes <= size])
        if most is not None:
            fits = plan.bytes <= most
        else:
            unplaced_peak = max(_timeline(account, set(plan.values)), default=0)
            fits = SPARE * (plan.bytes + unplaced_peak - total_peak) <= stored + total_peak
        best = plan if fits else best
    return best


def _candidates(body: Graph, run: Sections, of: dict[fx.Node, Storage]) -> list[Slot]:
    """Slots for results of kernels that are not outputs, and for flat tensors, in order of birth."""
    members, calls = pieces(body, run), run.in_order(body)
    excluded = {write.value for write in writes(body, of, run)} | set(members)
    excluded |= {call for call in calls if call.target in SUMS}  # which later microbatches add to
    until = _read_until(body, calls, of)
    early, repeated, _ = run
    last_microbatch = max((index for index, call in enumerate(calls) if call in repeated), default=0)
    has_kernels = any(map(_is_kernel, calls))
    first: dict[fx.Node, int] = {}  # flat tensor -> where its first member is made
    slots: list[Slot] = []
    for index, call in enumerate(calls):
        values = [value for value, _ in yields(call)]
        for value in values:
            if value in members:
                first.setdefault(members[value].layout.pack, index)
        if call.target is PACK:
            values = [call] if _lasts(body, call) else []
        elif not _is_kernel(call) and not (has_kernels and writes_out(call)):
            values = []
        for value in values:
            born, dies, size = first.get(value, index), until.get(value, index), of[value].bytes
            if dies is not None and call in early:  # each microbatch may read it
                dies = max(dies, last_microbatch)
            if dies is not None and value not in excluded and of[value].value is value and 0 < size <= LARGEST:
                slots.append(Slot(value, born, dies, _rounded(size, ALIGNMENT if size < LINE else LINE)))
    return sorted(slots, key=lambda slot: slot.born)


def _is_kernel(call: fx.Node) -> bool:
    return call.target in INTO and INTO[call.target].prepare is not None


def _lasts(body: Graph, pack: fx.Node) -> bool:
    """Is a flat tensor all written in each step, and kept for no sums over microbatches?"""
    layout = layout_of(body, pack)
    return body.microbatches == 1 and layout is not None and not layout.padded


def _read_until(body: Graph, calls: Sequence[fx.Node], of: dict[fx.Node, Storage]) -> dict[fx.Node, int | None]:
    """The last call that may read a value's memory, also through a possible view of it; None for outputs."""
    index_of = {node: i for i, node in enumerate(calls)}
    read_until: dict[fx.Node, int | None] = dict.fromkeys(body.output_values)
    for call in reversed(calls):
        result_values = [value for value, _ in yields(call)]
        until: int | None = index_of[call]
        if op_name(call.target) in KINDS:
            readers = [
                index_of[user]
                for value in results(call)
                if value is not None
                for user in value.users
                if user in index_of
            ]
            until = max(index_of[call], min(readers, default=len(calls)))
        for value in operands(call):
            ends = [read_until.get(value, until), until]
            copied = call.target in ENDS and value is not operands(call)[0]  # nothing views what was copied
            if (views(call) and not copied) or any(of[y] is of[value] for y in result_values):
                ends += [read_until.get(y, until) for y in result_values]
            read_until[value] = None if None in ends else max(end for end in ends if end is not None)
    return read_until


def views(call: fx.Node) -> bool:
    """May a result be a view of an operand? Whether it is may depend on strides."""
    if call.target is torch.ops.aten._unsafe_view.default:
        return True
    return any(result.alias_info is not None for result in schema_of(call.target).returns)


def placed(slots: Sequence[Slot]) -> Plan:
    """Slots in order of birth; the small ones are in front of the others, so that these begin with a line."""
    small = _packed([slot for slot in slots if slot.bytes < LINE])
    start = _rounded(max((slot.end for slot in small), default=0), LINE)
    large = _packed([slot for slot in slots if slot.bytes >= LINE])
    return Plan((*small, *(replace(slot, offset=start + slot.offset) for slot in large)))


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _packed(slots: Sequence[Slot]) -> list[Slot]:
    """Best fit: each slot takes the smallest gap that holds it."""
    gaps: list[tuple[int, int]] = []  # (offset, bytes), in order
    top = 0
    live: list[tuple[int, int, int]] = []  # (dies, offset, bytes), in order
    packed: list[Slot] = []
    for slot in slots:
        while live and live[0][0] < slot.born:
            _, offset, size = live.pop(0)
            top = _freed(gaps, offset, size, top)
        fits = [gap for gap in gaps if gap[1] >= slot.bytes]
        if fits:
            offset, size = min(fits, key=lambda gap: gap[1])
            gaps.remove((offset, size))
            if size > slot.bytes:
                insort(gaps, (offset + slot.bytes, size - slot.bytes))
        else:
            offset, top = top, top + slot.bytes
        insort(live, (slot.dies, offset, slot.bytes))
        packed.append(replace(slot, offset=offset))
    return packed


def _freed(gaps: list[tuple[int, int]], offset: int, size: int, top: int) -> int:
    """Add a gap, merged with its neighbours; a gap at the end lowers the top instead. Returns the top."""
    beside = [gap for gap in gaps if gap[0] + gap[1] == offset or gap[0] == offset + size]
    for gap in beside:
        gaps.remove(gap)
        offset, size = min(offset, gap[0]), size + gap[1]
    if offset + size == top:
        return offset
    insort(gaps, (offset, size))
    return top


def _timeline(account: Account, excluded: set[fx.Node]) -> list[int]:
    """Bytes beyond what is stored during each action."""
    change = [0] * (account.moments + 2)
    for life in account.lives:
        if life.storage.value not in excluded:
            change[life.born] += life.storage.bytes
            change[life.dies + 1] -= life.storage.bytes
    total, live_bytes = 0, list[int]()
    for moment in range(account.moments):
        total += change[moment]
        live_bytes.append(total)
    return live_bytes
