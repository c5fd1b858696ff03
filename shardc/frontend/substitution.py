"""Traced tensors in the place of the model's own, wherever a step finds these.

A step must compute with the inputs of its graph, and never with the tensors that the model happens to hold while it is
traced: those would become constants of the program, and training would go on with stale weights. Modules hold the
traced tensors until backward has run (activation checkpointing calls forward once more then). Where Python reaches a
tensor of the model by another way, the traced one is put in its place, with the same view on it:

    self.weight                     swapped in the module
    [self.weight], closures         substituted, argument by argument
    self.w.T, kept since __init__   traced.permute(1, 0), which autograd follows

What still lies in the model's memory when the trace is done is refused (SC120), whatever way it came.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from shardc import torch_compat
from shardc.frontend.model_tree import named_modules, named_tensors
from shardc.frontend.precision import KEEP_HINT
from shardc.frontend.provenance import Origin, about_tensor
from shardc.frontend.selected_rows import SelectedRows
from shardc.ir.diagnostic import Diagnostic, error
from shardc.ir.overlap import Extent, extent_of, overlapping, refuse_overlap

Entry = tuple[nn.Module, str, str, Tensor]  # module, "_parameters" or "_buffers", key, the traced tensor


class _Base(NamedTuple):
    """A tensor of the model, and the traced tensor that stands for it."""

    name: str
    original: Tensor
    traced: Tensor
    trained: bool
    storage: int | None  # of the traced tensor, at the start


class StandIns:
    """What stands for each parameter and buffer of a model while a step is traced."""

    def __init__(
        self,
        model: nn.Module,
        traced: Mapping[str, Tensor],
        own_params: Mapping[str, Tensor],
        values: torch_compat.Answers,
        recorded: Callable[[Tensor], Tensor | None],
    ) -> None:
        """`traced` gives the stand-ins by the first name of each parameter and buffer; `own_params` tells by what name
        a parameter goes, also where forward has moved its module since; `values` what Python may know of tensors;
        `recorded` what stands in the recording for an imitation."""
        names = first_names(model) | {id(p): name for name, p in own_params.items()}
        self.model = model
        self.values = values
        self._recorded = recorded
        self.value_reads: list[Exception] = []  # of reads of a tensor's values, caught or not
        self._by_id: dict[int, _Base] = {}
        self._extents: list[tuple[Extent, _Base]] = []
        self.entries: list[Entry] = []
        self.places: dict[str, tuple[nn.Module, str]] = {}  # of each buffer, by all its names
        for prefix, module in model.named_modules(remove_duplicate=False):
            for kind in ("_parameters", "_buffers"):
                tensors: Mapping[str, Tensor | None] = getattr(module, kind)
                for key, tensor in tensors.items():
                    if tensor is None:
                        continue
                    name = names[id(tensor)]
                    if (twin := traced.get(name)) is None:
                        continue  # made by the first step; what the second one reads of it is compared
                    base = _Base(name, tensor, twin, tensor.requires_grad, torch_compat.storage_of(twin))
                    self.entries.append((module, kind, key, base.traced))
                    if kind == "_buffers":
                        self.places[f"{prefix}.{key}" if prefix else key] = (module, key)
                    if id(tensor) not in self._by_id:
                        self._by_id[id(tensor)] = base
                        if (extent := extent_of(tensor)) is not None:
                            self._extents.append((extent, base))

    @contextmanager
    def active(self) -> Generator[None]:
        """A context in which the model and its functions use the traced tensors."""
        with (
            torch_compat.swapped(self.entries),
            torch_compat.converting(_refuse_conversion),
            torch_compat.substituting(self.find, self.value_reads, self._refuse_assigned, self.values),
        ):
            yield

    def holds(self, t: Tensor) -> bool:
        """Does a tensor stand for one of the model's?"""
        return any(t is base.traced for base in self._by_id.values())

    def refuse_changed(self) -> None:
        """Raise ShardcError (SC104) where a step has overwritten a parameter, replaced it or made one more, or changed
        what is trained.

        Called while the traced tensors are in place.
        """
        with torch_compat.unobserved():
            self._refuse_changed()

    def _refuse_changed(self) -> None:
        self._refuse_new()
        assigned = {id(t) for m, kind, key, _ in self.entries if (t := torch_compat.held(m, kind, key)) is not None}
        for base in self._by_id.values():
            verb, hint = "", ""
            if torch_compat.storage_of(base.traced) != base.storage:
                message = f"forward assigns to the data of {base.name}"
                hint = f"write into it, where it is a buffer: self.{base.name.rpartition('.')[2]}.copy_(...)"
                raise about_tensor(self.model, "SC104", base.name, message, hint)
            if base.trained != base.traced.requires_grad and base.name not in self.places:
                verb, hint = "freezes or unfreezes", "do it between steps, and compile again"
            elif base.name in self.places:
                continue
            elif torch_compat.was_written(base.traced):
                verb, hint = "overwrites", "make it a buffer, or compute what is to be used: self.w.clamp(-1, 1)"
            elif id(base.traced) not in assigned:
                verb, hint = "replaces", "change parameters between steps; derive a weight by a parametrization"
            if verb:
                message = f"forward {verb} the parameter {base.name}"
                raise about_tensor(self.model, "SC104", base.name, message, hint)

    def _refuse_new(self) -> None:
        known = {id(base.traced) for base in self._by_id.values()}
        places = {(module, key) for module, _, key, _ in self.entries}
        for prefix, module in named_modules(self.model):
            if all(p is None or id(p) in known for p in vars(module)["_parameters"].values()):
                continue
            for key, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in known and (module, key) not in places:
                    name = f"{prefix}.{key}" if prefix else key
                    message = f"forward makes a parameter, {name}, which was not there to be compiled or trained"
                    hint = "make it in __init__, or run the model once on a batch before it is compiled"
                    raise about_tensor(self.model, "SC104", name, message, hint)

    def _refuse_assigned(self, t: Tensor) -> None:
        """Raise ShardcError (SC104) for `t.data = ...`, unless `t` is the model's: of that `refuse_changed` speaks."""
        if torch_compat.is_fake(t) and not self.holds(t):
            message = "forward assigns to the .data of a tensor, which autograd and a program know by its old value"
            raise error(
                "SC104", message, hint="compute another tensor; y + (z - y).detach() has z's value and y's gradient"
            )

    def find(self, tensor: Tensor) -> Tensor | None:
        """The traced tensor for one of the model's, or the same view of it; None for any other tensor."""
        if torch_compat.is_fake(tensor):
            return self._recorded(tensor) if torch_compat.is_imitation(tensor) else None
        base = self._by_id.get(id(tensor))
        if isinstance(tensor, SelectedRows):
            return None
        if base is not None:
            return base.traced
        if (extent := extent_of(tensor)) is None:
            return None
        for whole, base in self._extents:
            if whole.contains(extent) and (view := view_like(tensor, base, extent.start - whole.start)) is not None:
                return view
        return None


def _refuse_conversion(kind: str, name: str, t: Tensor, converted: Tensor) -> None:
    """Raise ShardcError (SC104) where forward converts a module's tensor to another dtype, for good."""
    if t.dtype != converted.dtype:
        message = f"forward converts {kind}.{name} from {t.dtype} to {converted.dtype}, and leaves it so"
        hint = "convert the module before it is compiled, or in forward what it is given and what it returns; under a "
        raise error("SC104", message.replace("torch.", ""), hint=f"{hint}plan's precision, {KEEP_HINT}")


def first_names(model: nn.Module) -> dict[int, str]:
    """The first name of each parameter and buffer, by the identity of the tensor."""
    parameters, buffers = named_tensors(model)
    return {id(t): name for name, t in (*buffers.items(), *parameters.items())}


def view_like(view: Tensor, base: _Base, start: int) -> Tensor | None:
    """What of the traced tensor `view` is of the model's own, `start` bytes into it. Detached, if `view` is.

    None where it is of another dtype, or no plain view of the model's tensor.
    """
    tensor, first = base.original, start // view.element_size()
    same = view.shape == tensor.shape and view.stride() == tensor.stride()
    if view.dtype != tensor.dtype or start % view.element_size() or not (same or tensor.is_contiguous()):
        return None
    traced = base.traced if view.requires_grad else base.traced.detach()
    if same:
        return traced
    order = sorted(range(view.dim()), key=lambda d: (-view.stride()[d], -view.shape[d]))
    if tuple(view.shape[d] for d in order) == tuple(tensor.shape):
        return traced.permute([order.index(d) for d in range(view.dim())])
    if view.is_contiguous() and view.numel() == tensor.numel():
        return traced.reshape(view.shape)
    return traced.as_strided(view.size(), view.stride(), first)


# ------------------------------------------------------------------ what must not be
def refuse_shared_memory(model: nn.Module, batch: Mapping[str, Tensor], written: Iterable[str] = ()) -> None:
    """Raise ShardcError (SC121) where tensors of the model or the batch lie in the same memory and one of them changes.

    A program keeps each parameter, buffer and input by itself: what is written to one would not be seen in the other.
    Parameters that are trained change; `written` names buffers and inputs that do.
    """
    tensors, buffers = named_tensors(model)
    changing = {name for name, p in tensors.items() if p.requires_grad} | set(written)
    params = {id(p) for p in tensors.values()}
    tensors |= {name: b for name, b in buffers.items() if id(b) not in params}
    inputs = {name: t for name, t in batch.items() if name not in tensors}
    for a, b in overlapping({**tensors, **inputs}):
        if a in inputs and b in inputs:
            continue
        first, second = sorted((a, b), key=lambda name: name not in changing)
        if first in changing:
            message = f"'{first}' and '{second}' lie in the same memory, and a step changes '{first}'"
            hint = "let both be one parameter or buffer, or give the second its own memory: .clone()"
            if first in inputs or second in inputs:
                hint = "give the input its own memory, .clone(); what is trained belongs to the model alone"
            raise about_tensor(model, "SC121", second, message, hint)


def refuse_arrays(model: nn.Module, arrays: Iterable[tuple[str, Any]]) -> None:
    """Raise ShardcError (SC120) for an array of numpy in the memory of a parameter or buffer: what forward reads of it
    are Python's numbers, which a program has as they were while compiling."""
    cpu = torch.device("cpu")
    parameters, buffers = named_tensors(model)
    tensors = [(name, t) for name, t in (*parameters.items(), *buffers.items()) if t.device == cpu]
    extents = [(e, name) for name, t in tensors if (e := extent_of(t))]
    for path, array in arrays if extents else ():
        start: int = array.__array_interface__["data"][0]
        extent = Extent(cpu, start, start + array.nbytes)
        owner = next((name for other, name in extents if other.meets(extent)), None)
        if owner is not None:
            message = f"'{path}' is an array of numpy in the memory of '{owner}', which changes from step to step"
            raise about_tensor(model, "SC120", owner, message, f"read {owner} itself, or let the array be a .copy()")


def written_inputs(written: Sequence[str], batch: Mapping[str, Tensor]) -> list[Diagnostic]:
    """What is to be said of inputs that forward changes in place. Raises where another input lies in their memory."""
    if not written:
        return []
    refuse_overlap(written, batch)
    message = f"forward changes its input '{written[0]}' in place: a program works on a copy of its own"
    hint = "the tensor that a step is given stays as it is; change a clone, if nothing reads it after the step"
    return [Diagnostic("SC126", message, "note", tensor=written[0], also=", ".join(written[1:]) or None, hint=hint)]


def refuse_frozen(
    model: nn.Module, constants: Mapping[fx.Node, Tensor], origin_of: Callable[[fx.Node], Origin]
) -> None:
    """Raise ShardcError (SC120) for a constant of a graph that is a tensor of the model, or in a tensor's memory."""
    if not constants:
        return
    parameters, buffers = named_tensors(model)
    extents = [(extent_of(t), name) for name, t in (*parameters.items(), *buffers.items())]
    for node, constant in constants.items():
        extent = extent_of(constant)
        owner = next((name for other, name in extents if other and extent and other.meets(extent)), None)
        if owner is None and not constant.requires_grad:
            continue
        origin = origin_of(next(iter(node.users), node))
        what = f"{constant.dtype} {list(constant.shape)}".removeprefix("torch.")
        message = f"a tensor that requires a gradient is no parameter of the model: {what}"
        hint = "register it as an nn.Parameter, or detach it if it is not to be trained"
        if owner is not None:
            message = f"the step reads the memory of '{owner}' through a tensor that is not of the model: {what}"
            hint = f"read {owner} itself, in forward; a copy (.detach().clone()) is a constant of the program"
        raise error(
            "SC120",
            message,
            location=origin.source or None,
            source_text=origin.source_text or None,
            fqn=origin.fqn or None,
            tensor=owner,
            hint=hint,
        )
