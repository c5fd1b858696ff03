"""A program compiled at other sizes: the batch that it was compiled for, stretched or cut, on a mesh of other sizes.

What the batch holds is repeated along an extent, so values that forward asks about stay of the same kind; a batch on
the meta device stays there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from shardc.compiler.binding import collect_plan, read_mesh
from shardc.compiler.request import Compiled, Request, compiled
from shardc.frontend.sample_call import Call
from shardc.ir.diagnostic import error
from shardc.ir.mesh import Mesh
from shardc.ir.types import Axes
from shardc.plan.schema import Plan
from shardc.symbolic.expression import Expression, Point

Dims = tuple[tuple[str, int], ...]


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
    def of(cls, request: Request) -> Samples:
        """Raises ShardcError: SC208 for symbols that the batch has no such dims for, SC232 where there are none."""
        plan = collect_plan(request.model, request.plan)
        mesh = read_mesh(request.mesh if request.mesh is not None else plan.mesh)
        if not plan.symbols:
            hint = "add symbols: {B: input_ids.0, S: input_ids.1} to the plan"
            raise error("SC232", "the plan names no extents", hint=hint)
        if plan.pipeline is not None:
            hint = "leave the pipeline out of the plan: formulas are those of a stage without it"
            raise error("SC232", "a program with a pipeline has no formulas", hint=hint)
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
            request = replace(self.request, batch=self.batch(point), mesh=self.mesh_at(point))
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
DEFAULT = 16  # times its own size is as far as an extent is tried, unless ranges say more


def spread(units: Mapping[str, int], ranges: Mapping[str, tuple[int, int]], base: Point) -> list[dict[str, int]]:
    """Sizes of extents, each a multiple of its unit: both ends of its range, and sizes between. No two are equal."""
    points: list[dict[str, int]] = [{} for _ in range(SPREAD)]
    for place, (name, unit) in enumerate(units.items()):
        low, high = ranges.get(name, (1, DEFAULT * base[name]))
        first = max(-(-low // unit), 1 if unit > 1 else 2)
        last = max(high // unit, first + SPREAD + 2)
        inner = [first + 1 + (place % 2), first + (last - first) // 3, first + (last - first) // 2 + 1]
        order = [first, last, *inner]
        order = order[-place % SPREAD :] + order[: -place % SPREAD]
        for point, multiple in zip(points, order, strict=True):
            while unit * multiple in point.values():
                multiple += 1 if multiple < last else -1
            point[name] = unit * multiple
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
