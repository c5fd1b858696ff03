"""imply_masks: what a mask of attention says of positions becomes an option of the call, the rest of it stays.

    sdpa(q, k, v, (kv <= q) & padding)              ->  sdpa(q, k, v, padding, causal=True)
    sdpa(q, k, v, (kv > q - 4) & (kv <= q))         ->  sdpa(q, k, v, None, causal=True, window=[-3, 0])
    sdpa(q, k, v, abs(kv - q) < 4)                  ->  sdpa(q, k, v, None, window=[-3, 3])
    sdpa(q, k, v, (q // 8 == kv // 8) & (kv <= q))  ->  sdpa(q, k, v, None, causal=True, window=[-7, 0, 8])

So what is hidden need not be computed, nor sent where a sequence lies over ranks. Of as many rows as keys alone, which
then count from the same place. Keys and values that are repeated once for each query head of theirs, as libraries do
for a call with a mask, are read as they are:

    sdpa(q, view(expand(unsqueeze(k, 2))), ..)      ->  sdpa(q, k, .., gqa=True)

Needs: a normalized graph. Ensures: calls of `sdpa` and `sdpa_bwd` yield what they did, up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from shardc.ir.graph import Graph, info, results, type_of, update
from shardc.ir.ops.attention import SDPA, SDPA_BWD
from shardc.ir.ops.attention_window import Window
from shardc.ir.schema import given
from shardc.ir.types import TensorType
from shardc.passes.base import Pass
from shardc.passes.normalize.decompositions.table import Emit
from shardc.passes.normalize.mask_positions import InChunks, Part, Positions, Seen

aten = torch.ops.aten


@dataclass(frozen=True)
class ImplyMasks(Pass):
    """Read the masks of all calls."""

    def run(self, graph: Graph) -> Graph:
        positions, emit = Positions(), Emit(graph, graph.output_node)
        calls = [node for node in graph.calls() if node.target in (SDPA, SDPA_BWD)]
        for node in calls:
            emit.at = node
            with graph.fx.inserting_before(node):
                _imply(emit, positions, node)
                _read_once(emit, node)
        if calls:
            graph.erase_dead()
            alive = set(graph.fx.nodes)
            graph.activations = {name: node for name, node in graph.activations.items() if node in alive}
        return graph


# ---------------------------------------------------------------------- masks
def _imply(emit: Emit, positions: Positions, node: fx.Node) -> None:
    args = given(node)
    mask, rows, keys = args["mask"], type_of(args["q"]).shape[-2], type_of(args["k"]).shape[-2]
    if mask is None or rows != keys or rows < 2 or args.get("need_mask") or args.get("window"):
        return
    seen = positions.seen(mask)
    if seen is None or seen.first > seen.last or (seen.lowest and seen.parts):
        return
    if args["causal"]:
        seen = seen & Seen(last=0)
    window, chunks = _window(seen, rows)
    says = (window.first, window.last, window.chunk) != (1 - rows, rows - 1, 0)
    sees = window.first <= 0 <= window.last and window.earlier >= 0 <= window.later  # each row its own key
    if (
        not says
        or window.first > window.last
        or -window.earlier > window.later
        or (seen.lowest and (not sees or chunks))
    ):
        return
    causal = window.last <= 0
    rest = _rest(emit, (*seen.parts, *(each.part for each in chunks)))
    more = {} if (window.first, window.last, window.chunk) == (1 - rows, 0, 0) else {"window": window.said}
    changed = {**args, "mask": rest, "causal": causal, **more}
    node.args, node.kwargs = tuple(changed.values()), {}


def _window(seen: Seen, rows: int) -> tuple[Window, list[InChunks]]:
    """What is seen of as many keys as rows, as a window; and of chunks of other sizes than its own, which it does not
    say."""
    first, last = int(max(seen.first, 1 - rows)), int(min(seen.last, rows - 1))
    of_size: dict[tuple[int, int], list[InChunks]] = {}
    for each in seen.chunks:
        of_size.setdefault((each.size, each.shift), []).append(each)
    known: list[tuple[Window, list[InChunks]]] = []
    for (size, shift), of in of_size.items():
        most = (rows - 1 + shift) // size  # so many chunks behind the first one
        back, ahead = (min(most, -(-n // size)) for n in (-first, last))
        earlier, later = min(back, -max(each.first for each in of)), min(ahead, min(each.last for each in of))
        if (earlier, later) != (back, ahead):
            known.append((Window(first, last, size, shift, int(earlier), int(later)), of))
    if not known:
        return Window(first, last), []
    known.sort(key=lambda pair: (pair[0].earlier + pair[0].later + 1) * pair[0].chunk)
    return known[0][0], [each for _, of in known[1:] for each in of]


def _rest(emit: Emit, parts: Sequence[Part]) -> fx.Node | None:
    mask: fx.Node | None = None
    for part in dict.fromkeys(parts):
        value = _made(emit, part)
        mask = value if mask is None else emit(aten.bitwise_and.Tensor, mask, value)
    return mask


def _made(emit: Emit, part: Part) -> fx.Node:
    value = emit(aten.bitwise_not.default, part.value) if part.negated else part.value
    for place in part.unsqueezed:
        if -place <= type_of(value).ndim + 1:  # further ahead a dim of size 1 is implied
            value = emit(aten.unsqueeze.default, value, place)
    return value


# ---------------------------------------------------------------------- keys that are repeated
def _read_once(emit: Emit, node: fx.Node) -> None:
    args = given(node)
    if args["gqa"] or type_of(args["q"]).ndim != 4:
        return
    once = [source for name in ("k", "v") if (source := _repeated(args[name])) is not None]
    if len(once) < 2 or type_of(once[0]).shape[1] != type_of(once[1]).shape[1]:
        return
    backward = node.target is SDPA_BWD
    read = list(zip(results(node)[1:3], once, strict=True)) if backward else []
    sums = [_gradient(value, type_of(source)) for value, source in read]
    if any(found is None for found in sums):
        return
    changed = {**args, "k": once[0], "v": once[1], "gqa": True}
    node.args, node.kwargs = tuple(changed.values()), {}
    declared = list(info(node).results)
    for i, ((value, source), its_sums) in enumerate(zip(read, sums, strict=True), 1):
        declared[i] = type_of(source)
        if value is None:
            continue
        update(value, type=type_of(source))
        for sum in its_sums or ():
            emit.at = sum
            with emit.graph.fx.inserting_before(sum):
                kept = emit(aten.view.default, value, list(type_of(sum).shape))
            sum.replace_all_uses_with(kept)
            update(kept, name=info(sum).name)
    update(node, results=tuple(declared))


def _repeated(value: fx.Node) -> fx.Node | None:
    """What a value repeats, each of its heads for several: [B, K, S, D] as [B, K R, S, D]."""
    if value.target is not aten.view.default:
        return None
    expanded = value.args[0]
    if not isinstance(expanded, fx.Node) or expanded.target is not aten.expand.default:
        return None
    single = expanded.args[0]
    if not isinstance(single, fx.Node) or single.target is not aten.unsqueeze.default:
        return None
    source, dim = single.args
    assert isinstance(source, fx.Node)
    shape, wide = type_of(source).shape, type_of(expanded).shape
    if len(shape) != 4 or int(dim) % 5 != 2 or wide[:2] + wide[3:] != shape:  # type: ignore[call-overload]
        return None
    b, k, s, d = shape
    return source if type_of(value).shape == (b, k * wide[2], s, d) and wide[2] > 1 else None


def _gradient(value: fx.Node | None, type: TensorType) -> list[fx.Node] | None:
    """The sums over repeated heads that are all that is read of a gradient; None where something else is."""
    if value is None:
        return []
    b, k, s, d = type.shape
    sums: list[fx.Node] = []
    for view in value.users:
        if view.target is not aten.view.default or type_of(view).shape != (b, k, type_of(value).shape[1] // k, s, d):
            return None
        for sum in view.users:
            if sum.target is not aten.sum.dim_IntList or [int(i) % 5 for i in given(sum)["dim"]] != [2]:
                return None
            if type_of(sum).dtype != type_of(value).dtype or math.prod(type_of(sum).shape) != b * k * s * d:
                return None
            sums.append(sum)
    return sums
