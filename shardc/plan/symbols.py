"""`symbols`: the extents of a batch that a program need not have fixed, by name.

    symbols: {B: input_ids.0, S: input_ids.1}             dim 0 and dim 1 of `input_ids`
    symbols: {B: [x.0, mask.0], S: x.1, T: mask.1}        several dims of one extent

Dims of other inputs that stand at the same place and have the same size in the sample go with them: those of `labels`
here. What an extent may be is seen by compiling at several sizes (shardc/symbolic).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from pydantic import Field, ValidationInfo, model_validator

from shardc.ir.diagnostic import Diagnostic, ShardcError, did_you_mean
from shardc.ir.mesh import Mesh
from shardc.plan.values import FrozenValue, source_of

NAME = re.compile(r"[A-Za-z]\w*")
LAYERS = "L"  # the number of equal layers, in formulas
MICROBATCHES = "M"  # in those of a pipeline
Shapes = Mapping[str, Sequence[int]]  # of the batch's tensors, by name


class Symbols(FrozenValue):
    """The extents: a name, and the dims of inputs that have it."""

    dims: dict[str, tuple[tuple[str, int], ...]] = Field(default_factory=dict[str, tuple[tuple[str, int], ...]])

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, Symbols) or value == {}:
            return value
        hint = "write symbols: {B: input_ids.0, S: input_ids.1}"
        if not isinstance(value, Mapping):
            raise ShardcError(
                Diagnostic("SC208", f"'symbols' maps names to dims of inputs, and is {value!r}", hint=hint)
            )
        dims: dict[str, tuple[tuple[str, int], ...]] = {}
        taken: dict[tuple[str, int], str] = {}
        for name, written in cast("Mapping[Any, Any]", value).items():

            def refused(message: str, hint: str = hint, name: Any = name) -> ShardcError:
                return ShardcError(
                    source_of(info).locate(Diagnostic("SC208", message, hint=hint), "symbols", str(name))
                )

            if not isinstance(name, str) or not NAME.fullmatch(name):
                raise refused(f"{name!r} is no name of an extent", "use letters, digits and underscores: B, seq")
            if name == LAYERS:
                raise refused(f"'{LAYERS}' is the number of equal layers", f"give the extent a name but {LAYERS}")
            listed = written if isinstance(written, list | tuple) else [written]
            read: list[tuple[str, int]] = []
            for text in cast("Sequence[Any]", listed):
                path, _, dim = str(text).rpartition(".")
                if not path or not dim.isdecimal():
                    raise refused(f"{text!r} is no dim of an input", "write the input's name, a dot, and the dim: x.0")
                if (other := taken.setdefault((path, int(dim)), name)) != name:
                    raise refused(f"{text} is '{other}' already, and '{name}' too", "an extent has one name")
                read.append((path, int(dim)))
            if not read:
                raise refused(f"'{name}' has no dim")
            dims[name] = tuple(read)
        return {"dims": dims}

    def __bool__(self) -> bool:
        return bool(self.dims)

    def dumped(self) -> dict[str, Any]:
        texts = {name: [f"{path}.{dim}" for path, dim in places] for name, places in self.dims.items()}
        return {name: places[0] if len(places) == 1 else places for name, places in texts.items()}

    def located(self, name: str, message: str, hint: str) -> ShardcError:
        """An error (SC208) that points at a symbol's line."""
        return ShardcError(self._written.source.locate(Diagnostic("SC208", message, hint=hint), "symbols", name))

    def bound(self, shapes: Shapes, mesh: Mesh) -> dict[str, tuple[tuple[str, int], ...]]:
        """Each extent with every dim of the batch that has it. Raises ShardcError (SC208) for an input or a dim that
        is not there, dims of one extent that differ, and a name that an axis of the mesh has."""
        explicit = {place for places in self.dims.values() for place in places}
        found: dict[str, tuple[tuple[str, int], ...]] = {}
        claimed: dict[tuple[str, int], str] = {}
        for name, places in self.dims.items():
            if name in mesh.names:
                raise self.located(name, f"'{name}' is an axis of the mesh ({mesh})", "give the extent another name")
            for path, dim in places:
                if path not in shapes:
                    raise self.located(name, f"the batch has no input '{path}'", did_you_mean(path, shapes, "inputs"))
                if dim >= len(shapes[path]):
                    has = f"{path} has {len(shapes[path])} dims"
                    raise self.located(name, f"{has}, and no dim {dim}", "dims count from 0")
            sizes = {shapes[path][dim] for path, dim in places}
            if len(sizes) > 1:
                said = ", ".join(f"{path}.{dim} of {shapes[path][dim]}" for path, dim in places)
                raise self.located(name, f"dims of one extent differ: {said}", "give each extent a name of its own")
            every = list(places)
            for path, shape in shapes.items():
                for dim, size in enumerate(shape):
                    alike = any(dim == d and size == shapes[p][d] and path != p for p, d in places)
                    if alike and (path, dim) not in explicit:
                        if (other := claimed.setdefault((path, dim), name)) != name:
                            message = f"{path}.{dim} may be '{other}' or '{name}', which are both {size} in the sample"
                            raise self.located(
                                name, message, f"list the dims of each: {name}: [{places[0][0]}.{dim}, {path}.{dim}]"
                            )
                        every.append((path, dim))
            found[name] = tuple(every)
        return found
