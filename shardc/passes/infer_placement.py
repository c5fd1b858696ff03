"""How a call's results lie, found anew from how its operands lie: by the op's rule, or by what a collective does.

    linear(x : f32[8@dp, 64@tp], w : f32[96, 64@tp])      rule  s k, n k -> s n, sum k
    pieces  s = dp, k = tp                            ->  f32[8@dp, 96] |sum tp

After `localize` a call's arguments are one rank's. A rule is asked about global shapes where arguments do not depend on
them, or hold a shape that the result has; elsewhere about local ones, where a dim of which a rank holds one element has
no factor, so that nothing is said of the axes that shard it.

A softmax over a sharded dim reads a shard's own maximum before the ranks meet (see `online_softmax`): a value that is
pending by max, made finite, may be subtracted; and a view may lay what is pending side by side, as a dim that the axes
shard. Nothing else may.

Of a generated kernel, whose text counts in elements alone, less is said: its results lie along axes of its operands,
and what is pending stays so. Longer than 400 lines: every kind of call is read by the same facts of its operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import fx
from torch._ops import OpOverload

from shardc.ir.attention_parts import SOFTMAX, merge_faults, pack_faults, split_faults, weigh_faults
from shardc.ir.blocks import Blocks
from shardc.ir.graph import info, operands, producer, type_of
from shardc.ir.mesh import Mesh
from shardc.ir.ops import collectives, local
from shardc.ir.ops.accumulate import ACCUMULATE, ACCUMULATE_MORE_ROWS, ACCUMULATE_ROWS
from shardc.ir.ops.attention_keys import MERGE_LSE, MERGE_PARTS, PACK_PART, SPLIT_PARTS, WEIGH_PART
from shardc.ir.ops.attention_rows import NEXT_KEYS, REACH_ROWS, REACH_SUM, SUM_KEYS
from shardc.ir.ops.buckets import PACK, UNPACK
from shardc.ir.ops.decomposed import GATHER_LINEAR, LINEAR_SCATTER
from shardc.ir.ops.exchange import EXCHANGE_COUNTS, ROW_MOVES
from shardc.ir.ops.host_copies import HOST_COPIES
from shardc.ir.ops.linear import LINEAR, LINEAR_DGRAD
from shardc.ir.ops.local import told
from shardc.ir.ops.pick import PICK_ROWS, PLACE_ROWS
from shardc.ir.ops.scan_parts import SCAN_PART
from shardc.ir.ops.squares import TOTAL_OF_SQUARES
from shardc.ir.ops.take import ADD_ROWS, TAKE_ROWS
from shardc.ir.schema import given, schema_of
from shardc.ir.types import Atom, Axes, TensorType, local_size
from shardc.passes.attention_keys import STANDS_FOR, as_of_whole, keys_faults
from shardc.passes.attention_rows import (
    ASKED,
    BY_ROWS,
    WHOLE,
    moved_faults,
    own_keys,
    reach_faults,
    rows_faults,
    stands_for,
    summed_faults,
    uncounted,
)
from shardc.passes.carried_states import CARRIED_FAULTS
from shardc.passes.cumulative_rows import CUMULATIVE_FAULTS
from shardc.passes.exchanged_rows import counts_faults, move_faults
from shardc.passes.halo_rows import HALO_FAULTS, PlainCall, plain_call
from shardc.passes.kernel_rows import KERNELS, counted_axes
from shardc.passes.scan_parts import PARTS, SCAN_PARTS, scan_faults
from shardc.passes.scan_parts import stands_for as scan_of
from shardc.passes.sharding.lower_reshards import transposition
from shardc.passes.shifted_rows import SHIFT_FAULTS
from shardc.passes.verify_groups import GROUPED
from shardc.rules.notation import Dims, RuleError
from shardc.rules.pick import pick_faults
from shardc.rules.projection import Projection, overlay
from shardc.rules.registry import MASKS, OpRule, find_rule, fit_call, notation_of
from shardc.rules.window import WINDOWED

SAME: frozenset[Any] = frozenset((ACCUMULATE, *HOST_COPIES))  # results are as all operands are, pending or not
aten = torch.ops.aten
FINITE: frozenset[Any] = frozenset((aten.clamp_min.default, aten.clamp.default))


class _RuleLayout(NamedTuple):
    """A call's rule with its factors mapped to the visible atoms, and the axes of the atoms that are not visible."""

    projection: Projection
    operands: tuple[tuple[Axes, ...], ...]
    results: tuple[tuple[Axes, ...], ...]
    unseen: frozenset[str]


def placement_faults(node: fx.Node, result_types: Sequence[TensorType | None], mesh: Mesh) -> list[str]:
    """The faults in the placements of a call's results; `result_types` holds None for results that nothing reads."""
    handler = _HANDLERS.get(node.target)
    if handler is not None:
        return handler(node, result_types, mesh)
    read = tuple(_own(value) if node.target is aten.sub.Tensor else type_of(value) for value in operands(node))
    if node.target in WINDOWED and (plain := plain_call(node, mesh)) is not None:
        return [plain] if isinstance(plain, str) else _windowed_faults(node, plain, read, result_types, mesh)
    if node.target in (PICK_ROWS, PLACE_ROWS, TAKE_ROWS, ADD_ROWS) and (wrong := pick_faults(node, result_types)):
        return wrong
    if node.target in (*WHOLE, *ASKED) and (wrong := uncounted(node)):
        return wrong
    if not any(t.axes or t.partial for t in (*read, *result_types) if t is not None):
        return []  # all of it is whole on every rank
    schema, key = _frozen(node)
    every = tuple(info(node).results) if info(node).type is None else (info(node).type,)
    return list(_by_rule(node.target, schema, key, read, tuple(result_types), every, mesh))


def _own(value: fx.Node) -> TensorType:
    """The type of what is subtracted: a shard's own maximum, made finite, is a number like any other."""
    type = type_of(value)
    return type.place(type.placement) if value.target in FINITE else type


def _windowed_faults(
    node: fx.Node, plain: PlainCall, read: tuple[TensorType, ...], result_types: Sequence[TensorType | None], mesh: Mesh
) -> list[str]:
    """Of a call with the neighbours' rows: those of the call on own rows, with padding, that it stands for."""
    names, values = _frozen(node)
    values = tuple([plain.changed.get(name, value) for name, value in zip(names, values, strict=True)])
    read = tuple([plain.operands.get(v, t) for v, t in zip(operands(node), read, strict=True)])
    declared, shown = list(info(node).results) or [info(node).type], list(result_types)
    if plain.first_result is not None:
        for types in (declared, shown):
            types[0] = types[0] and plain.first_result
    return list(_by_rule(node.target, names, values, read, tuple(shown), tuple(declared), mesh))


def _rows_faults(node: fx.Node, result_types: Sequence[TensorType | None], mesh: Mesh) -> list[str]:
    """Of attention of a rank's rows: those of the call on all ranks that it stands for, and of its ring."""
    if wrong := rows_faults(node, mesh):
        return wrong
    op, count = stands_for(node)
    named = [name for name, value in given(node).items() if isinstance(value, fx.Node)][:count]
    read = cast(tuple[TensorType, ...], own_keys(node, [type_of(value) for value in operands(node)[:count]], named))
    made = [result.name for result in schema_of(node.target).returns]
    shown, every = (own_keys(node, types, made[: len(types)]) for types in (result_types, info(node).results))
    return _of_whole(node, op, read, shown, every, mesh)


def _keys_faults(node: fx.Node, result_types: Sequence[TensorType | None], mesh: Mesh) -> list[str]:
    """Of attention of a rank's keys: those of the call on all ranks that it stands for, and of its merge."""
    if wrong := keys_faults(node, result_types, mesh):
        return wrong
    shown, every = (as_of_whole(node, types, mesh) for types in (result_types, info(node).results))
    return _of_whole(node, STANDS_FOR[node.target], tuple(map(type_of, operands(node))), shown, every, mesh)


def _of_whole(
    node: fx.Node,
    op: OpOverload,
    read: tuple[TensorType, ...],
    result_types: Sequence[TensorType | None],
    every: Sequence[TensorType | None],
    mesh: Mesh,
) -> list[str]:
    """The faults of the call on all ranks that a local call stands for."""
    frozen = dict(zip(*_frozen(node), strict=True))
    names = tuple(argument.name for argument in schema_of(op).arguments)
    values = tuple([frozen.get(name, ()) for name in names])
    return list(_by_rule(op, names, values, read, tuple(result_types), tuple(every), mesh))


def _scan_faults(node: fx.Node, result_types: Sequence[TensorType | None], mesh: Mesh) -> list[str]:
    """Of a rank's steps of a recurrence: how states travel, and the faults of the call that it stands for."""
    if (wrong := scan_faults(node, result_types, mesh)) or node.target not in PARTS:
        return wrong
    op, count = scan_of(node)
    frozen = dict(zip(*_frozen(node), strict=True))
    names = tuple(argument.name for argument in schema_of(op).arguments)
    values = tuple([frozen[name] for name in names])
    read, every = tuple(map(type_of, operands(node)[:count])), tuple(info(node).results)
    starts = len(given(node)["carried"]) if node.target is SCAN_PART else 0  # a rule sees not where single blocks lie
    shown = (*result_types[: len(every) - starts], *(None for _ in range(starts)))
    placed = tuple(m or e for m, e in zip(result_types, every, strict=True))
    return list(_by_rule(op, names, values, read, shown, placed, mesh))


# ---------------------------------------------------------------------- calls with a rule
class _Slot(NamedTuple):
    """Stands for an operand in a call's frozen arguments."""

    number: int


def _frozen(node: fx.Node) -> tuple[tuple[str, ...], tuple[Hashable, ...]]:
    """Arguments by schema name, each operand as its number."""
    count = 0

    def freeze(value: Any) -> Hashable:
        nonlocal count
        if isinstance(value, fx.Node):
            count += 1
            return _Slot(count - 1)
        return tuple([freeze(item) for item in value]) if isinstance(value, list | tuple) else value

    names: list[str] = []
    values: list[Hashable] = []
    for i, argument in enumerate(schema_of(node.target).arguments):
        if i < len(node.args) and not argument.kwarg_only:
            value: Any = node.args[i]
        elif argument.name in node.kwargs:
            value = node.kwargs[argument.name]
        else:
            value = argument.default_value if argument.has_default_value() else None
        names.append(argument.name)
        values.append(freeze(value))
    return tuple(names), tuple(values)


@lru_cache(maxsize=65536)
def _by_rule(
    op: OpOverload,
    names: tuple[str, ...],
    values: tuple[Hashable, ...],
    read: tuple[TensorType, ...],
    result_types: tuple[TensorType | None, ...],
    every: tuple[TensorType | None, ...],
    mesh: Mesh,
) -> tuple[str, ...]:
    entry = find_rule(op)
    assert entry is not None, f"{op} has no meaning"
    all_types = tuple(m or e for m, e in zip(result_types, every, strict=True) if e is not None)
    shown = tuple(m for m, e in zip(result_types, every, strict=True) if e is not None)
    first_faults: tuple[str, ...] = ()
    for local_shapes in (False, True) if entry.shape_arg else (entry.localize is not None,):
        try:
            layout = _laid(entry, names, values, read, all_types, mesh, local_shapes=local_shapes)
        except (RuleError, ValueError, IndexError, TypeError, ZeroDivisionError) as wrong:
            faults: tuple[str, ...] = (f"its rule does not fit it: {wrong}",)
        else:
            faults = tuple(_compared(entry, layout, read, shown))
        if not faults:
            return ()
        first_faults = first_faults or faults
    return first_faults


def _compared(
    entry: OpRule, layout: _RuleLayout, read: Sequence[TensorType], result_types: Sequence[TensorType | None]
) -> Iterator[str]:
    """Compares the types of the results with those that the rule derives from the operands."""
    projection = layout.projection
    split: dict[int, Axes] = {}
    for pieces, placement in zip(projection.operands, layout.operands, strict=True):
        for piece, axes in zip(pieces, placement, strict=True):
            if split.setdefault(piece, axes) != axes:
                yield f"its operands lie differently along {projection.names[piece]}"
    for piece in projection.blocked:
        if split.get(piece):
            yield f"{projection.names[piece]} must be whole, and lies over {'.'.join(split[piece])}"
            return
    passed: set[tuple[str, str]] = set()
    for axis, kind in dict.fromkeys(reduction for type in read for reduction in type.partial):
        having = [k for k, type in enumerate(read) if (axis, kind) in type.partial]
        joint = projection.linear == "joint" and len(having) == len(read)
        single_operand = projection.linear != "joint" and len(having) == 1 and having[0] in projection.linear
        if entry.kind == "view" and axis in layout.unseen:
            continue  # side by side
        if not ((kind == "sum" and (joint or single_operand)) or (kind == "max" and entry.op in FINITE)):
            yield f"it is not linear in what is pending by {kind} over {axis}"
        passed.add((axis, kind))
    for k, (type, placement) in enumerate(zip(result_types, layout.results, strict=True)):
        if type is None:
            continue
        for piece, axes in zip(projection.results[k], placement, strict=True):
            if piece in split and split[piece] != axes and not layout.unseen.issuperset({*split[piece]} ^ {*axes}):
                have, say = ".".join(split[piece]) or "no axis", ".".join(axes) or "no axis"
                yield f"{projection.names[piece]} lies over {have}, and over {say} in its result"
        pending = {*projection.partial(split, k), *passed}
        spoken = {reduction for reduction in type.partial if reduction[0] not in layout.unseen}
        if spoken - pending or pending - set(type.partial):
            yield f"pending in its result is {_listed(pending)}, not {_listed(type.partial)}"


def _laid(
    entry: OpRule,
    names: tuple[str, ...],
    values: tuple[Hashable, ...],
    read: tuple[TensorType, ...],
    all_types: tuple[TensorType | None, ...],
    mesh: Mesh,
    *,
    local_shapes: bool,
) -> _RuleLayout:
    def extents(type: TensorType) -> tuple[int, ...]:
        return type.local_extents(mesh) if local_shapes else type.extents

    made = next((t.in_blocks for t in all_types if t is not None), ())

    def thawed(name: str, value: Any) -> Any:
        if isinstance(value, _Slot):
            type = read[value.number]
            shape = extents(type) if entry.ragged else extents(type)[: type.ndim]
            return Dims(name, shape, boolean=type.dtype in MASKS, in_blocks=type.in_blocks, made_in_blocks=made)
        if isinstance(value, tuple):
            return [thawed(f"{name}{k}_", item) for k, item in enumerate(value)]
        return value

    arguments = {name: thawed(name, value) for name, value in zip(names, values, strict=True)}
    types = [t for t in all_types if t is not None]
    if entry.shape_arg and not local_shapes:
        arguments[entry.shape_arg] = list(types[0].shape)
    ragged = tuple(t.ragged for t in read), tuple(t.ragged for t in types)
    notation = notation_of(entry, arguments)
    rule = fit_call(notation, tuple(map(extents, read)), tuple(map(extents, types)), *ragged, of=entry)
    unseen: set[str] = set()

    def seen(type: TensorType) -> TensorType:
        """The atoms that a rule can tell apart, as large as it is told that they are."""
        if not local_shapes:
            return type
        unseen.update(axis for atom in type.atoms if atom.local(mesh) == 1 for axis in atom.axes)
        dims = [tuple([Atom(size, a.axes) for a in dim if (size := _held(a, mesh)) != 1]) for dim in type.dims]
        return TensorType(type.dtype, tuple(dims), type.partial, type.ragged)

    ins, outs = [seen(t) for t in read], [seen(t) for t in types]
    projection = overlay(rule, ins, outs)
    return _RuleLayout(projection, tuple(t.placement for t in ins), tuple(t.placement for t in outs), frozenset(unseen))


def _held(atom: Atom, mesh: Mesh) -> int:
    return atom.size.local(atom.axes, mesh) if isinstance(atom.size, Blocks) else atom.local(mesh)


def _listed(pending: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{kind} {axis}" for axis, kind in sorted(pending)) or "nothing"


# ---------------------------------------------------------------------- ops of ours without a rule
def _moved(node: fx.Node, result_types: Sequence[TensorType | None], mesh: Mesh) -> list[str]:
    """For a collective or a slice: its arguments and its operand's placement determine the placement of its result."""
    args, after = given(node), result_types[0]
    before = type_of(args["x"])
    assert after is not None
    if is_flat(node):
        return _flat_moved(node, before, after, mesh, mesh.resolve(args["axes"]))
    return _move_faults(node.target, args, before, after, mesh)


def _move_faults(op: Any, args: dict[str, Any], before: TensorType, after: TensorType, mesh: Mesh) -> list[str]:
    axes: Axes = mesh.resolve(args["axes"])
    placement, pending = list(before.placement), dict(before.partial)
    if "atoms" in args and list(args["atoms"]) != list(before.local_atoms(mesh)):
        return [f"atoms are {list(before.local_atoms(mesh))}, not {args['atoms']}"]
    for name in ("pos", "split", "concat"):
        if name in args and not 0 <= args[name] < len(placement):
            return [f"{name} is {args[name]}, of {len(placement)} atoms"]
    if op in (collectives.all_reduce, collectives.reduce_scatter):
        lacking = [axis for axis in axes if pending.pop(axis, None) != args["op"] or args["op"] == SOFTMAX]
        if lacking:
            return [f"reduces by {args['op']} over {', '.join(lacking)}, pending is {_listed(before.partial)}"]
    elif set(axes) & before.partial_axes:
        return [f"moves what is pending over {', '.join(sorted(set(axes) & before.partial_axes))}"]
    if op in (local.slice_blocks, collectives.gather_blocks):
        slices = op is local.slice_blocks
        if not slices and placement[args["pos"]][-len(axes) :] != axes:
            return [f"gathers over {'.'.join(axes)} what lies over {'.'.join(placement[args['pos']]) or 'no axis'}"]
        was = placement[args["pos"]]
        placement[args["pos"]] = (*was, *axes) if slices else was[: -len(axes)]
        size = before.atoms[args["pos"]].size
        unsplit = was if slices else placement[args["pos"]]
        declared = (args["counts"], args["units"], list(args.get("reverse") or ()))
        if not isinstance(size, Blocks) or declared != told(size.local(unsplit, mesh)):
            return [f"takes {args['counts']} pieces of {args['units']} for the blocks of {size}"]
    elif op in (collectives.reduce_scatter, local.shard_slice):
        if (wrong := _other_blocks(args, before, args["pos"], placement[args["pos"]], mesh)) is not None:
            return [wrong]
        placement[args["pos"]] += axes
    elif op in (collectives.all_gather, collectives.all_to_all):
        source = args["pos"] if op is collectives.all_gather else args["concat"]
        if placement[source][-len(axes) :] != axes:
            return [f"gathers over {'.'.join(axes)} what lies over {'.'.join(placement[source]) or 'no axis'}"]
        placement[source] = placement[source][: -len(axes)]
        moved = args["split"] if args.get("splits_blocks") else source
        if (wrong := _other_blocks(args, before, moved, placement[moved], mesh)) is not None:
            return [wrong]
        if any(
            isinstance(before.atoms[args[name]].size, Blocks)
            for name in ("pos", "split", "concat")
            if name in args and args[name] != moved
        ):
            return [f"moves the blocks of {before} side by side"]
        if op is collectives.all_to_all:
            placement[args["split"]] += axes
        if args["size"] != local_size(before.atoms[source].size, placement[source], mesh):
            return [f"gathers {args['size']} elements of {before.atoms[source]}"]
    elif op is collectives.permute_ranks:
        ends = [i for i, now in enumerate(placement) if now == axes[:1] or (len(axes) == 2 and now[-2:] == axes)]
        if len(axes) != 2 or len(ends) != 1:
            return [f"permutes ranks of {'.'.join(axes)} as nothing lies"]
        swaps, atom = placement[ends[0]] != axes[:1], before.atoms[ends[0]]
        fits = not atom.uneven(mesh) if swaps else mesh.size(axes[:1]) == mesh.size(axes[1:])
        fits = fits and not (isinstance(atom.size, Blocks) and atom.size.zigzag)
        if not fits or list(args["source"]) != transposition(mesh.size(axes[:1]), mesh.size(axes[1:])):
            return [f"permutes ranks of {'.'.join(axes)} as nothing lies"]
        placement[ends[0]] = (*placement[ends[0]][:-2], axes[1], axes[0]) if swaps else axes[1:]
    if len({axis for atom_axes in placement for axis in atom_axes}) != sum(map(len, placement)):
        return [f"shards by {'.'.join(axes)} what lies over it already"]
    want = before.place(placement, pending.items())
    return [] if want == after else [f"yields {want}, the result says {after}"]


def _gathered_product(node: fx.Node, result_types: Sequence[TensorType | None], mesh: Mesh) -> list[str]:
    """The faults of the gather, then those of each product with what it yields."""
    args, (*_, whole) = given(node), info(node).results
    x, ws = type_of(args["x"]), list(map(type_of, args["ws"]))
    if whole is None or len(result_types) != len(ws) + 1 or len(args["turned"]) != len(ws):
        return [f"multiplies by {len(ws)} matrices, {len(args['turned'])} of them turned or not"]
    if result_types[-1] not in (None, whole):
        return [f"yields {whole}, the result says {result_types[-1]}"]
    if wrong := _move_faults(collectives.all_gather, args, x, whole, mesh):
        return wrong
    products = zip(ws, args["turned"], result_types, info(node).results, strict=False)
    faults = [_product_faults(whole, w, turned, shown, declared, mesh) for w, turned, shown, declared in products]
    return [fault for each in faults for fault in each]


def _scattered_product(node: fx.Node, result_types: Sequence[TensorType | None], mesh: Mesh) -> list[str]:
    """The faults of the product, then those of the reduction of what it yields."""
    args, declared = given(node), info(node).results
    rows, product = declared if len(declared) == 2 else (None, None)
    if rows is None or product is None:
        return [f"yields {len(declared)} results"]
    x, w, shown = type_of(args["x"]), type_of(args["w"]), [m or e for m, e in zip(result_types, declared, strict=True)]
    wrong = _product_faults(x, w, args["turned"], shown[1], product, mesh)
    return wrong or _move_faults(collectives.reduce_scatter, args, product, shown[0] or rows, mesh)


def _product_faults(
    x: TensorType, w: TensorType, turned: bool, shown: TensorType | None, declared: TensorType | None, mesh: Mesh
) -> list[str]:
    op = LINEAR if turned else LINEAR_DGRAD
    names = tuple(argument.name for argument in schema_of(op).arguments)
    return list(_by_rule(op, names, (_Slot(0), _Slot(1)), (x, w), (shown,), (declared,), mesh))


def _other_blocks(args: dict[str, Any], before: TensorType, pos: int, axes: Axes, mesh: Mesh) -> str | None:
    """What is wrong with the blocks that a collective tells, of an atom that lies over `axes` where it is whole."""
    size = before.atoms[pos].size
    blocks = size if isinstance(size, Blocks) else Blocks(())
    declared = tuple(list(args.get(name) or ()) for name in ("counts", "units", "reverse"))
    if declared == told(blocks.local(axes, mesh)) and not blocks.copied:
        return None
    return f"cuts {before.atoms[pos]} in other pieces than its blocks" if blocks else f"cuts {size} in blocks"


def is_flat(node: fx.Node) -> bool:
    """A collective of a bucket, or a sum of several: `passes.verify.buckets_match` knows its members' layout."""
    return any(operand.target is PACK for operand in operands(node))


def _layout_fault(node: fx.Node, before: TensorType, after: TensorType, mesh: Mesh, axes: Axes) -> str | None:
    """For a collective on a flat tensor: checks its numbers against the local element counts of operand and result."""
    args = given(node)
    if not {"atoms", "pos"} <= args.keys():
        return None
    atoms, pos, operand_numel = args["atoms"], args["pos"], math.prod(before.local_shape(mesh))
    if math.prod(atoms) != operand_numel or not 0 <= pos < len(atoms):
        return f"takes {operand_numel} elements as {atoms}, dim {pos}"
    size, group = atoms[pos], mesh.size(axes)
    moved = args["size"] if "size" in args else -(-size // group)
    if "size" in args and not size * (group - 1) < moved <= size * group:
        return f"gathers {group} times {size} as {moved}"
    result_numel = math.prod(atoms[:pos]) * moved * math.prod(atoms[pos + 1 :])
    if math.prod(args["shape"]) != result_numel or tuple(args["shape"]) != after.local_shape(mesh):
        return f"yields {result_numel} elements, in the shape {args['shape']}, and {after}"
    return None


def _flat_moved(node: fx.Node, before: TensorType, after: TensorType, mesh: Mesh, axes: Axes) -> list[str]:
    if (wrong := _layout_fault(node, before, after, mesh, axes)) is not None:
        return [wrong]
    pending = dict(before.partial)
    if "op" in given(node):
        lacking = [axis for axis in axes if pending.pop(axis, None) != given(node)["op"]]
        if lacking:
            return [f"reduces by {given(node)['op']} over {', '.join(lacking)}, pending is {_listed(before.partial)}"]
    gathers = node.target is collectives.all_gather
    expected = before.axes - set(axes) if gathers else before.axes | (set(axes) if "pos" in given(node) else set())
    if gathers and not set(axes) <= before.axes:
        return [f"gathers over {'.'.join(axes)} what lies over {'.'.join(sorted(before.axes)) or 'no axis'}"]
    if after.partial != tuple(sorted(pending.items())) or after.axes != expected:
        return [f"yields what lies over {sorted(expected)}, pending {_listed(pending.items())}; it says {after}"]
    return []


def _packed(node: fx.Node, result_types: Sequence[TensorType | None], mesh: Mesh) -> list[str]:
    """A bucket's members are pending alike, and lie along the axes of the flat tensor."""
    after, read = result_types[0], list(map(type_of, operands(node)))
    assert after is not None
    if any(type.partial != after.partial for type in read):
        return [f"packs what is pending otherwise than {_listed(after.partial)}"]
    along = {axis for type in read for axis in type.axes}
    return [] if along <= set(after.axes) else [f"packs what lies over {sorted(along)} as {after}"]


def _squared(node: fx.Node, result_types: Sequence[TensorType | None], mesh: Mesh) -> list[str]:
    """What each tensor lies over is what its squares are pending over; all count alike."""
    after = result_types[0]
    assert after is not None
    for value in operands(node):
        type = type_of(value)
        if type.partial:
            return [f"squares what is pending: {_listed(type.partial)}"]
        copied = any(isinstance(atom.size, Blocks) and atom.size.copied for atom in type.atoms)
        if copied and producer(value)[0].target not in (local.mask_blocks, *KERNELS):  # which leave one copy
            return [f"counts the copies of {type}"]
        if {*after.partial} != {(axis, "sum") for axis in type.axes}:
            return [f"adds up squares of what lies over {sorted(type.axes)}, the result says {after}"]
    return []


def _unpacked(node: fx.Node, result_types: Sequence[TensorType | None], mesh: Mesh) -> list[str]:
    """Each member is its operand of the `pack` after the collective, or sum, between the two."""
    flat = operands(node)[0]
    if flat.op != "call_function" or not is_flat(flat):
        return ["unpacks what was not packed"]
    (pack,) = operands(flat)
    members, args = operands(pack), given(flat)
    if len(members) != len(result_types):
        return [f"unpacks {len(result_types)} of {len(members)} members"]
    axes: Axes = mesh.resolve(args.get("axes", ()))  # none of a sum over microbatches
    faults: list[str] = []
    for member, after in zip(map(type_of, members), result_types, strict=True):
        if after is None:
            continue
        pending = {reduction for reduction in member.partial if not ("op" in args and reduction[0] in axes)}
        moved = "pos" in args
        lies = [
            (tuple(a for a in b if a not in axes), a_) for b, a_ in zip(member.placement, after.placement, strict=False)
        ]
        same_placement = (
            all(b == (tuple(a for a in c if a not in axes)) for b, c in lies)
            if moved
            else member.placement == after.placement
        )
        gathers = flat.target is collectives.all_gather
        present_axes = set(axes) & set((member if gathers else after).axes)
        if (
            (after.dtype, after.shape) != (member.dtype, member.shape)
            or not same_placement
            or set(after.partial) != pending
        ):
            faults.append(f"unpacks {after} of {member}")
        elif moved and (present_axes != set(axes) or set(axes) & set((after if gathers else member).axes)):
            faults.append(f"unpacks {after} of {member}, moved over {'.'.join(axes)}")
    return faults


def _masked(node: fx.Node, result_types: Sequence[TensorType | None], mesh: Mesh) -> list[str]:
    args = given(node)
    type, pos = type_of(args["x"]), args["pos"]
    if result_types[0] != type:
        return [f"yields {type}, the result says {result_types[0]}"]
    if not 0 <= pos < len(type.atoms):
        return [f"pos is {pos}, of {len(type.atoms)} atoms"]
    atom, declared = type.atoms[pos], (args["size"], tuple(args["axes"]), tuple(args["atoms"]))
    fits = declared == (atom.size, atom.axes, type.local_atoms(mesh))
    return [] if fits else [f"masks the padding of {args['size']}@{'.'.join(args['axes'])}, where {atom} lies"]


def _masked_blocks(node: fx.Node, result_types: Sequence[TensorType | None], mesh: Mesh) -> list[str]:
    args = given(node)
    type, pos = type_of(args["x"]), args["pos"]
    if result_types[0] != type:
        return [f"yields {type}, the result says {result_types[0]}"]
    if not 0 <= pos < len(type.atoms) or not isinstance(size := type.atoms[pos].size, Blocks):
        return [f"masks blocks of atom {pos} of {type}"]
    declared = (*map(list, told(size)), list(type.atoms[pos].axes), list(type.local_atoms(mesh)))
    fits = declared == tuple(list(args.get(name) or ()) for name in ("counts", "units", "reverse", "axes", "atoms"))
    return [] if fits else [f"masks other blocks than those of {type.atoms[pos]}"]


def _offset(node: fx.Node, result_types: Sequence[TensorType | None], mesh: Mesh) -> list[str]:
    args = given(node)
    axes, strides = args["axes"], args["strides"]
    if len(axes) != len(strides) or not {*axes} <= {*mesh.names}:
        return [f"counts {strides} along {axes}"]
    return []


def _unchanged(node: fx.Node, result_types: Sequence[TensorType | None], mesh: Mesh) -> list[str]:
    read = [type_of(value) for value in operands(node)]
    return [f"yields {type}, the result says {result_types[0]}" for type in read if type != result_types[0]]


def _more_rows(node: fx.Node, result_types: Sequence[TensorType | None], mesh: Mesh) -> list[str]:
    """A sum that an embedding's rows are added to: it lies, and is pending, as the sum of the rows alone would."""
    total, grad, indices, padding = given(node).values()
    type = type_of(total)
    if type != result_types[0]:
        return [f"adds to {type}, the result says {result_types[0]}"]
    names = tuple(argument.name for argument in schema_of(ACCUMULATE_ROWS).arguments)
    values = (_Slot(0), _Slot(1), type.local_shape(mesh)[0], padding, type.dtype)
    return list(_by_rule(ACCUMULATE_ROWS, names, values, (type_of(grad), type_of(indices)), (type,), (type,), mesh))


def _kernel(node: fx.Node, result_types: Sequence[TensorType | None], mesh: Mesh) -> list[str]:
    read = list(map(type_of, operands(node)))
    pending = {reduction for type in read for reduction in type.partial}
    lies = {axis for type in read for axis in type.axes} | {axis for axis, _ in pending}
    results = [type for type in result_types if type is not None]
    if any(not type.axes | type.partial_axes <= lies for type in results):
        lies |= counted_axes(node)
    faults = [f"makes {t} of what lies over {sorted(lies)}" for t in results if not t.axes | t.partial_axes <= lies]
    # A softmax's own maximum goes (see above). Terms that a view lays side by side, one a rank, are no sum any more.
    side_by_side = {axis for type in results for atom in type.atoms if atom.local(mesh) == 1 for axis in atom.axes}
    kept = {reduction for type in results for reduction in type.partial}
    lost = {(axis, kind) for axis, kind in pending - kept if kind != "max" and axis not in side_by_side}
    return faults + ([f"loses what is pending: {_listed(lost)}"] if lost and results else [])


_Handler = Callable[[fx.Node, Sequence[TensorType | None], Mesh], list[str]]
_HANDLERS: Mapping[Any, _Handler] = {
    **dict.fromkeys((*collectives.COLLECTIVES, local.shard_slice, local.slice_blocks), _moved),
    EXCHANGE_COUNTS: counts_faults,
    **dict.fromkeys(ROW_MOVES, move_faults),
    **HALO_FAULTS,
    **SHIFT_FAULTS,
    **CARRIED_FAULTS,
    **CUMULATIVE_FAULTS,
    NEXT_KEYS: moved_faults,
    **dict.fromkeys((REACH_ROWS, REACH_SUM), reach_faults),
    SUM_KEYS: summed_faults,
    **dict.fromkeys(BY_ROWS, _rows_faults),
    **dict.fromkeys(STANDS_FOR, _keys_faults),
    **dict.fromkeys((MERGE_LSE, MERGE_PARTS), merge_faults),
    WEIGH_PART: weigh_faults,
    GATHER_LINEAR: _gathered_product,
    LINEAR_SCATTER: _scattered_product,
    **dict.fromkeys(SCAN_PARTS, _scan_faults),
    PACK_PART: pack_faults,
    SPLIT_PARTS: split_faults,
    local.mask_pad: _masked,
    local.mask_blocks: _masked_blocks,
    local.axis_offset: _offset,
    PACK: _packed,
    UNPACK: _unpacked,
    TOTAL_OF_SQUARES: _squared,
    **dict.fromkeys(SAME, _unchanged),
    ACCUMULATE_MORE_ROWS: _more_rows,
    **dict.fromkeys(KERNELS, _kernel),
}
MEANT: frozenset[Any] = frozenset(_HANDLERS)  # the ops of ours that a program may hold without a rule
# Calls of which it counts where their operands come from, and who reads their results, over more than one call.
LINKED: frozenset[Any] = frozenset(
    (
        *(NEXT_KEYS, REACH_ROWS, REACH_SUM, SUM_KEYS, *BY_ROWS),
        *(MERGE_LSE, MERGE_PARTS, WEIGH_PART, PACK_PART, SPLIT_PARTS, *STANDS_FOR),
        *(*HALO_FAULTS, *SHIFT_FAULTS, *CARRIED_FAULTS, *CUMULATIVE_FAULTS, *SCAN_PARTS),
        *GROUPED,
    )
)
