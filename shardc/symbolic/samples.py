"""A program compiled at other sizes: the batch that it was compiled for, stretched or cut, on a mesh of other sizes.

What the batch holds is repeated along an extent, so values that forward asks about stay of the same kind; a batch on
the meta device stays there.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shardc.compiler.binding import collect_plan, read_mesh
from shardc.compiler.compiled import Compiled, compiled
from shardc.compiler.preparation import split_inputs
from shardc.compiler.request import Request, rows_of
from shardc.frontend.sample_call import Call
from shardc.frontend.size_guards import Forward, SizeGuards
from shardc.ir.diagnostic import ShardcError, error
from shardc.ir.mesh import Mesh
from shardc.ir.types import Axes
from shardc.plan.schema import Plan
from shardc.plan.symbols import MICROBATCHES
from shardc.runtime.execute.microbatches import split
from shardc.symbolic.expression import Expression, Point

Dims = tuple[tuple[str, int], ...]
UNKNOWN = "no size is known to be like another"


def refuse_buckets(request: Request) -> None:
    """Raises ShardcError (SC232) where collectives travel in buckets: their padding and their number follow from sizes
    by no formula."""
    if collect_plan(request.model, request.plan).bucket_bytes:
        hint = "leave 'bucket' out of the plan: with symbols, collectives then travel alone"
        raise error("SC232", "collectives that travel in buckets have no formulas", hint=hint)


@dataclass(frozen=True)
class Samples:
    """The extents of a request, by name with the dims that have them; what was compiled at which point is kept."""

    request: Request
    plan: Plan
    mesh: Mesh
    call: Call
    extents: Mapping[str, Dims]
    known: dict[tuple[tuple[str, int], ...], Compiled] = field(default_factory=dict[Any, Compiled])

    @classmethod
    def of(cls, request: Request, *, pipelined: bool = False) -> Samples:
        """Raises ShardcError: SC208 for symbols that the batch has no such dims for, SC232 where there are none, and
        for a pipeline, unless that is asked for."""
        plan = collect_plan(request.model, request.plan)
        mesh = read_mesh(request.mesh if request.mesh is not None else plan.mesh)
        if not plan.symbols:
            hint = "add symbols: {B: input_ids.0, S: input_ids.1} to the plan"
            raise error("SC232", "the plan names no extents", hint=hint)
        if plan.pipeline is not None and not pipelined:
            hint = "compile one for each size"
            raise error("SC232", "a program with a pipeline is for batches of one size", hint=hint)
        call = Call(request.model, request.batch, request.loss)
        shapes = {name: tuple(t.shape) for name, t in zip(call.names, call.tensors, strict=True)}
        return cls(replace(request, watch=None), plan, mesh, call, plan.symbols.bound(shapes, mesh))

    @property
    def axes(self) -> dict[str, int]:
        """The axes with several ranks: one of one rank has no collectives, and is no symbol."""
        return {name: size for name, size in self.mesh.axes if size > 1}

    @property
    def units(self) -> dict[str, int]:
        """What sizes of extents are multiples of before it is known which axes divide them."""
        return dict.fromkeys(self.extents, self.plan.microbatches * math.prod(self.axes.values()))

    @cached_property
    def parts(self) -> dict[str, int]:
        """Into how many microbatches an extent is divided. Raises ShardcError (SC232) for one that is rows of some
        inputs, and no rows of others."""
        divided = split_inputs(self.call) if self.plan.microbatches > 1 else []
        parts: dict[str, int] = {}
        for name, dims in self.extents.items():
            kinds = {dim == 0 and path in divided for path, dim in dims}
            if len(kinds) > 1:
                said = ", ".join(f"{path}.{dim}" for path, dim in dims)
                message = f"microbatches divide some of the dims of '{name}' alone: {said}"
                raise self.plan.symbols.located(name, message, "give each a name of its own")
            parts[name] = self.plan.microbatches if True in kinds else 1
        return parts

    @cached_property
    def forward(self) -> Forward:
        """Forward as a step calls it: on a microbatch."""
        part = split(self.request.batch, self.plan.microbatches)[0]
        call = Call(self.request.model, part, self.request.loss)
        return Forward(self.request.model, call, self.request.loss, self.extents, not self.request.trains)

    @cached_property
    def guards(self) -> SizeGuards:
        """What forward asks of the extents, answered for the program's own; of one below 2, which no symbol is, for
        2: as a guard says, they do not hold for it."""
        own = self.of_a_part(self.sizes_of(self.call))
        return self.forward.guards({name: max(size, 2) for name, size in own.items()}, self.parts)

    def of_a_part(self, sizes: Point) -> dict[str, int]:
        """The extents of a microbatch."""
        return {name: sizes[name] // parts for name, parts in self.parts.items()}

    def ranges(self, asked: Mapping[str, tuple[int, int]] | None = None) -> dict[str, tuple[int, int]]:
        """From where to where each extent is tried: as asked, or far around its own size, as guards allow. Raises
        ShardcError (SC232) with the guard that leaves too few sizes."""
        sizes, ranges = self.sizes_of(self.call), dict[str, tuple[int, int]]()
        asked_at = {name: max(size, 2 * self.parts[name]) for name, size in sizes.items()}
        for name, size in sizes.items():
            low, high = (asked or {}).get(name, (2, DEFAULT * size))
            steps = (
                range(low, high + 1)
                if high - low <= MOST
                else [round(low * (high / low) ** (i / MOST)) for i in range(MOST + 1)]
            )
            answers = [(n, self.guards.broken({**asked_at, name: n})) for n in steps]
            fitting = [n for n, guard in answers if guard is None]
            unit = self.units[name]
            if len({n // unit for n in fitting if n >= unit}) < FEWEST:
                guard, n = next(((g, n) for n, g in answers if g is not None), (None, low))
                if guard is not None:
                    raise ShardcError(guard.diagnostic({**asked_at, name: n}))
                message = f"{name} from {low} to {high} has fewer than {FEWEST} multiples of {unit}"
                raise error("SC232", message, hint="ask for a wider range")
            limited = max(fitting) < high  # at the limit itself, such as a table's length, calls may fall away
            ranges[name] = (min(fitting), max(fitting) - limited)
        return ranges

    def points(self, units: Mapping[str, int], ranges: Mapping[str, tuple[int, int]]) -> list[dict[str, int]]:
        """The points to compile at. Raises ShardcError (SC232) for a guard that does not hold there."""
        points = self.candidates(units, ranges)
        for point in points:
            if (guard := self.guards.broken(point)) is not None:
                raise ShardcError(guard.diagnostic(point))
        return points

    def candidates(self, units: Mapping[str, int], ranges: Mapping[str, tuple[int, int]]) -> list[dict[str, int]]:
        """Points, whatever guards say."""
        # A size that divides one of the model's own would be a factor of it in types, by coincidence.
        own = {n for t in (*self.request.model.parameters(), *self.request.model.buffers()) for n in t.shape}
        most = max((high for _, high in ranges.values()), default=0)
        return spread(units, ranges, {n for n in range(2, most + 1) if any(size % n == 0 for size in own)})

    @property
    def base(self) -> dict[str, int]:
        """The sizes that the program was compiled for."""
        return {**self.sizes_of(self.call), **self.axes}

    def sizes_of(self, call: Call) -> dict[str, int]:
        """The extents of a batch. Raises ShardcError (SC501) where dims of one extent differ."""
        shapes = {name: t.shape for name, t in zip(call.names, call.tensors, strict=True)}
        sizes: dict[str, int] = {}
        for name, dims in self.extents.items():
            seen = {f"{path}.{dim}": shapes[path][dim] for path, dim in dims if path in shapes}
            if len(set(seen.values())) != 1:
                said = ", ".join(f"{place} of {size}" for place, size in seen.items())
                raise error("SC501", f"the dims of '{name}' differ: {said}", hint="they are one extent of the plan's")
            sizes[name] = next(iter(seen.values()))
        return sizes

    def batch(self, point: Point) -> Any:
        """The sample batch in the sizes of a point."""
        tensors: list[Tensor] = []
        for name, tensor in zip(self.call.names, self.call.tensors, strict=True):
            for extent, dims in self.extents.items():
                for path, dim in dims:
                    if path == name:
                        tensor = stretched(tensor, dim, point[extent])
            tensors.append(tensor)
        return self.call.batch(tuple(tensors))

    def mesh_at(self, point: Point) -> Mesh:
        return Mesh((name, point.get(name, size)) for name, size in self.mesh.axes)

    def at(self, point: Point) -> Compiled:
        """The program compiled for the sizes of a point. Raises what `compile` raises."""
        key = tuple(sorted(point.items()))
        if key not in self.known:
            batch = self.batch(point)
            request = replace(self.request, batch=batch, mesh=self.mesh_at(point))
            if self.plan.pipeline is not None and MICROBATCHES in point:
                pipeline = self.plan.pipeline.model_copy(update={"microbatches": point[MICROBATCHES]})
                request = replace(request, plan=self.plan.model_copy(update={"pipeline": pipeline}))
            if request.like is not None:  # with as many microbatches as it has
                request = replace(request, rows=rows_of(batch) // self.plan.microbatches)
            self.known[key] = compiled(request)
        return self.known[key]


def stretched(tensor: Tensor, dim: int, size: int) -> Tensor:
    """A tensor of another size along one dim: its values in turn."""
    if tensor.shape[dim] == size:
        return tensor
    if tensor.is_meta:
        return tensor.new_empty([*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]])
    return tensor.index_select(dim, torch.arange(size, device=tensor.device) % tensor.shape[dim])


SPREAD = 5  # points on the program's own mesh
FEWEST = 5  # sizes of an extent among them
MOST = 512  # sizes of a range that guards are asked about
DEFAULT = 16  # times its own size is as far as an extent is tried, unless ranges say more


def spread(
    units: Mapping[str, int], ranges: Mapping[str, tuple[int, int]], avoided: Collection[int] = ()
) -> list[dict[str, int]]:
    """Sizes of extents, each a multiple of its unit: both ends of its range, and sizes between. At a point no two are
    equal, and none is `avoided`, if the ranges allow it."""
    points: list[dict[str, int]] = [{} for _ in range(SPREAD)]
    for place, (name, unit) in enumerate(units.items()):
        low, high = ranges[name]
        first = max(-(-low // unit), 1 if unit > 1 else 2)
        every = list(range(first, max(high // unit, first) + 1))
        count = len(every)
        wanted = [0, count - 1, 1 + place % 2, count // 3 + 1, count // 2 + 1]
        wanted = wanted[-place % SPREAD :] + wanted[: -place % SPREAD]
        taken: set[int] = set()
        for point, want in zip(points, wanted, strict=True):
            nearest = sorted(
                range(count), key=lambda k: (k in taken, unit * every[k] in {*point.values(), *avoided}, abs(k - want))
            )
            taken.add(nearest[0])
            point[name] = unit * every[nearest[0]]
    return points


def units_of(
    extents: Mapping[str, Dims], shards: Sequence[tuple[Expression, Axes]], mesh: Mapping[str, int], microbatches: int
) -> dict[str, int]:
    """What each extent must be a multiple of for all shards of a mesh to be even; each of them, by itself."""
    units: dict[str, int] = {}
    for name in extents:
        ranks = [math.prod(mesh.get(axis, 1) for axis in axes) for atom, axes in shards if atom.depends_on(name)]
        units[name] = math.lcm(microbatches, *ranks)
    return units


def allowed_sizes(multiples: Sequence[int], base: int, most: int) -> list[int]:
    """Sizes of an axis, the base first, that divide what it shards of a fixed size; without such, any."""
    common = math.gcd(*multiples) if multiples else 0
    every = range(2, (common or 4 * base) + 1)
    fitting = [size for size in every if not common or common % size == 0]
    nearest = sorted(fitting, key=lambda size: (size != base, size))
    return nearest[:most]
