"""Which rows of a global batch a rank brings, where a plan says `data: per_rank`.

    x : f32[4@dp, 16], 2 microbatches, dp=2, tp=2        a batch of 8 rows, in 2 parts of 4

    ranks of dp 0 bring  a0 a1 a2 a3      of microbatch 0: a0 a1, of microbatch 1: a2 a3
    ranks of dp 1 bring  b0 b1 b2 b3
    the global batch is  a0 a1 b0 b1 | a2 a3 b2 b3

A part is cut into the microbatches, as a whole batch is; a microbatch has the slices of all parts, in the order of
their data coordinates, and so has each of two interleaved halves of it. Ranks of one data coordinate bring the same
rows: those of other axes (tp, cp) take what they hold of them, stages of a pipeline what they read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, cast

import torch

from shardc.ir.diagnostic import Diagnostic, ShardcError, error
from shardc.ir.graph import Graph, type_of
from shardc.ir.mesh import Mesh
from shardc.ir.program import PlanRecord
from shardc.ir.trees import flatten
from shardc.ir.types import Atom, TensorType
from shardc.runtime.execute.batch import leaves_of
from shardc.runtime.execute.layout import shard_slices
from shardc.torch_compat import unflatten


class Parts(list[Any]):
    """The parts of a global batch, by data coordinate: `trainer.step(Parts([part_0, part_1]))`.

    A simulation is given a batch in parts by them, as the ranks of a job bring it. A rank of a job takes its own.
    """


@dataclass(frozen=True)
class DataParts:
    """How the rows of a step's batch lie over a mesh.

    `axes` are those that cut the rows, `count` is the number of parts, `rows` what a microbatch has of one. `inputs`
    gives the type of each input that is brought in parts, as the program has it: of a whole microbatch. `names` are
    all inputs, in the order of a batch's tensors.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    count: int
    rows: int
    microbatches: int
    inputs: Mapping[str, TensorType]
    names: tuple[str, ...]
    halves: int = 1  # of a microbatch, each of which has slices of all parts

    @classmethod
    def of(cls, body: Graph, split: Collection[str] = ()) -> DataParts:
        """Those of a step. Raises ShardcError (SC226) where no rank could say which rows are its own.

        `split` are the inputs that are split into microbatches, of a step that has several. Of a step that has one, the
        first input whose dim 0 is sharded says how many rows a batch has.
        """
        whole = {p.name: type_of(n) for p, n in zip(body.inputs, body.placeholders, strict=True) if p.role == "input"}
        several = body.microbatches * body.halves
        types = {n: _of_half(type) if body.halves > 1 and n in split else type for n, type in whole.items()}
        cut = {name: type for name, type in types.items() if _rows_axes(type)}
        if several > 1:
            cut = {name: type for name, type in cut.items() if name in split}
        if not cut and any(size == 1 for _, size in body.mesh.axes):  # an axis of one rank shards nothing
            return cls(body.mesh, (), 1, 0, body.microbatches, {}, tuple(types), body.halves)
        if not cut:
            what = "`data: per_rank` is without parts: no input has its rows, dim 0, sharded"
            hint = 'place the batch over an axis, as in inputs: {input_ids: "dp, -"}; or leave `data` out'
            raise error("SC226", what, hint=hint)
        first_name, first_type = next(iter(cut.items()))
        axes, rows = _rows_axes(first_type), first_type.shape[0]
        count = body.mesh.size(axes)
        problems: list[Diagnostic] = []
        for name, type in types.items():
            if type.shape[:1] != (rows,) or (several > 1 and name not in split):
                cut.pop(name, None)  # every rank gives the whole of it
            elif not _rows_axes(type):
                what = f"'{name}' has {rows} rows, as '{first_name}' has, and they are not sharded: it has no parts"
                hint = f'place it as the other is: inputs: {{{name}: "{".".join(axes)}"}}'
                problems.append(Diagnostic("SC226", what, tensor=name, hint=hint))
            elif _rows_axes(type) != axes:
                over = f"'{first_name}' over {'.'.join(axes)}, '{name}' over {'.'.join(_rows_axes(type))}"
                hint = "place dim 0 of all of them over the same axes"
                problems.append(Diagnostic("SC226", f"rows lie over other axes: {over}", tensor=name, hint=hint))
            elif rows % count or not _in_order(type, body.mesh, axes):
                each = "" if several == 1 else " of a microbatch"
                what = f"the {rows} rows{each} of '{name}' are not {count} equal parts, one after the other: {type}"
                hint = f"give a batch of a multiple of {count * several} rows, and place dim 0 by axes alone"
                problems.append(Diagnostic("SC226", what, tensor=name, hint=hint))
        if problems:
            raise ShardcError(*problems)
        rows = rows // count * body.halves
        inputs = {name: whole[name] for name in cut}
        return cls(body.mesh, axes, count, rows, body.microbatches, inputs, tuple(types), body.halves)

    def index(self, member: int) -> int:
        """The data coordinate of a rank of the mesh: the part that it brings."""
        return self.mesh.index(member, self.axes)

    @property
    def types(self) -> dict[str, TensorType]:
        """What a rank brings of a microbatch: its rows whole, the other dims placed as the program has them."""
        dim = () if self.rows == 1 else (Atom(self.rows),)
        return {name: TensorType(type.dtype, (dim, *type.dims[1:])) for name, type in self.inputs.items()}

    @property
    def shared(self) -> dict[str, TensorType]:
        """By input, a type that is sharded as the parts lie over ranks, and no more: ranks that agree in its axes bring
        the same."""
        return {
            name: type.place([a.axes if a in type.dims[0] else () for a in type.atoms])
            for name, type in self.inputs.items()
        }

    def check(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Raise ShardcError (SC501) unless an input is of a part's rows: a whole batch is none."""
        part = self.rows * self.microbatches
        for name in self.inputs:
            shape = inputs[name].shape if name in inputs else None
            if shape and shape[0] != part:
                ranks = f"each of the {self.count} data ranks brings {part}"
                message = f"input '{name}' has {shape[0]} rows; of a batch of {part * self.count}, {ranks}"
                hint = (
                    f"give batches of {part}, from a sampler of the rank's own: DistributedSampler(dataset, "
                    "trainer.data_ranks, trainer.data_rank)"
                )
                raise error("SC501", message, tensor=name, hint=hint)

    def repeated(self, feed: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A microbatch of the program's shapes, with the rank's own rows in place of all others."""
        return {name: torch.cat([value] * self.count) if name in self.inputs else value for name, value in feed.items()}

    def check_count(self, parts: Sequence[Any]) -> None:
        """Raise ShardcError (SC501) unless there is one for each data coordinate."""
        if len(parts) != self.count:
            message = f"{len(parts)} parts are given, of a batch that has {self.count}"
            raise error("SC501", message, hint="give one for each data coordinate, in their order")

    def part(self, inputs: Mapping[str, torch.Tensor], index: int) -> dict[str, torch.Tensor]:
        """What the ranks of a data coordinate bring of a global batch."""
        part: dict[str, torch.Tensor] = {}
        for name, value in inputs.items():
            if name in self.inputs:
                each = self.rows // self.halves
                slices = value.chunk(self.microbatches * self.halves)
                value = torch.cat([rows.narrow(0, index * each, each) for rows in slices])
            part[name] = value
        return part

    def sample(self, part: Any) -> Any:
        """A batch of the shapes that a whole one has of which this is a part: made of copies of it."""
        return self.joined([part] * self.count, 1)

    def joined(self, parts: Sequence[Any], microbatches: int) -> Any:
        """The global batch of parts that are given by data coordinate, to be split into so many microbatches.

        Raises ShardcError: SC501 where there are not as many as data coordinates, or not all of one form, SC542 where
        they differ in what is not cut.
        """
        self.check_count(parts)
        named = [leaves_of(part) for part in parts]
        shapes = {tuple((path, *_form(leaf)) for path, leaf in leaves) for leaves in named}
        if len(shapes) > 1:
            raise error("SC501", "the parts of a batch have other leaves or shapes", hint="give parts of one form")
        cut = self._cut(parts[0])
        leaves = [
            _interleaved(column, microbatches) if is_cut else _same(paths[0], column)
            for is_cut, paths, column in zip(
                cut,
                zip(*([path for path, _ in leaves] for leaves in named), strict=True),
                zip(*([leaf for _, leaf in leaves] for leaves in named), strict=True),
                strict=True,
            )
        ]
        part = parts[0]
        _, structure = flatten(dict(cast("Mapping[str, Any]", part)) if isinstance(part, Mapping) else part)
        return unflatten(leaves, structure)

    def _cut(self, part: Any) -> list[bool]:
        """By leaf, whether it is brought in parts: what is an input of the program by its name, else by its rows."""
        leaves = leaves_of(part)
        tensors = [(path, leaf) for path, leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
        name_of = dict(zip((path for path, x in leaves if isinstance(x, torch.Tensor)), self.names, strict=False))
        if isinstance(part, Mapping):
            name_of = {path: path for path, _ in leaves if path in self.names}
        elif len(name_of) != len([leaf for _, leaf in leaves if isinstance(leaf, torch.Tensor)]):
            name_of = {}
        known = [path for path, _ in tensors if name_of.get(path) in self.inputs]
        rows = next((leaf.shape[0] for path, leaf in tensors if not known or path in known), -1)
        cut = {path for path, x in tensors if x.shape[0] == rows and (path not in name_of or path in known)}
        return [path in cut for path, _ in leaves]


def data_parts_of(plan: PlanRecord, body: Graph) -> DataParts | None:
    """Those of a program whose ranks bring parts; None where each is given the whole batch."""
    return DataParts.of(body, plan.get("split", ())) if plan.get("data") == "per_rank" else None


def _of_half(type: TensorType) -> TensorType:
    """The type that one of two halves of an input has."""
    return replace(type, dims=(type.dims[0][1:], *type.dims[1:]))


def _rows_axes(type: TensorType) -> tuple[str, ...]:
    """The axes that shard dim 0, major first."""
    return tuple(axis for atom in type.dims[0] for axis in atom.axes) if type.dims else ()


def _in_order(type: TensorType, mesh: Mesh, axes: tuple[str, ...]) -> bool:
    """Whether each rank has rows that follow each other, at the place that its coordinate says."""
    rows = type.shape[0] // mesh.size(axes)
    others = dict.fromkeys(mesh.names, 0)
    for position in product(*(range(mesh.size(axis)) for axis in axes)):
        rank = mesh.rank(others | dict(zip(axes, position, strict=True)))
        runs, start = shard_slices(type, mesh, rank)[0], mesh.index(rank, axes) * rows
        if [run.whole for run in runs] != [slice(start, start + rows)]:
            return False
    return True


def _form(leaf: Any) -> tuple[Any, ...]:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else ()


def _interleaved(parts: Sequence[torch.Tensor], microbatches: int) -> torch.Tensor:
    if parts[0].shape[0] % microbatches:
        message = f"a part of {parts[0].shape[0]} rows cannot be split into {microbatches} microbatches"
        raise error("SC501", message, hint="give parts of the sample batch's rows")
    slices = [part.chunk(microbatches) for part in parts]
    return torch.cat([piece for microbatch in zip(*slices, strict=True) for piece in microbatch])


def _same(path: str, leaves: Sequence[Any]) -> Any:
    first = leaves[0]
    for number, leaf in enumerate(leaves):
        if isinstance(first, torch.Tensor) and not torch.equal(first, leaf):
            message = f"part {number} has another '{path}' than part 0"
            raise error("SC542", message, tensor=path, hint="what is not cut into parts is the same in all")
    return first
