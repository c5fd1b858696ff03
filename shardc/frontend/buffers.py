"""What forward has made of the model's buffers, and what of that no program can keep.

A buffer may be changed in place, or be another tensor after the step: a new value, or another buffer's old one

    self.previous = self.current; self.current = x.mean(0)

Each is an input and an output of the program, of one shape, with memory of its own. So a buffer that forward lets grow,
removes, or makes a second name of something that changes in place, is refused (SC121, SC123).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from shardc import torch_compat
from shardc.frontend.provenance import about_tensor
from shardc.ir.diagnostic import ShardcError


def buffers_after(
    model: nn.Module,
    initial: Mapping[str, Tensor],
    params: Mapping[str, Tensor],
    places: Mapping[str, tuple[nn.Module, str]],
) -> dict[str, Tensor]:
    """Each buffer's tensor at the end of a traced step, by name, while the model holds the traced tensors.

    `initial` and `params` are the tensors that it held at the start; `places` says which module holds which buffer.
    """
    after: dict[str, Tensor] = {}
    for name, start in initial.items():
        module, key = places[name]
        buffer = torch_compat.held(module, "_buffers", key)
        if buffer is None:
            parameter = torch_compat.held(module, "_parameters", key)  # what torch makes of a parameter assigned to it
            owner = next((of for of, p in params.items() if p is parameter), None)
            if owner is not None:
                raise _second_name(model, name, owner)
            raise _unkept(
                model, name, "removes", "let it keep a tensor; a buffer that is None from the start is no input"
            )
        if buffer.shape != start.shape or buffer.dtype != start.dtype:
            old_type, new_type = (f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in (start, buffer))
            hint = "give it its full size from the start and write into a part of it; or keep it out of the step"
            raise _unkept(model, name, f"makes {new_type} of the {old_type} of", hint)
        if buffer.grad_fn is not None and torch_compat.is_read(start):
            hint = f"assign what has no history: self.{name.rpartition('.')[2]} = ....detach()"
            raise _unkept(model, name, "leaves its gradient's history, which the next step would follow, in", hint)
        after[name] = buffer
    with torch_compat.unobserved():
        _refuse_second_names(model, after, initial, params)
    return after


def refuse_asked(model: nn.Module, changing: Sequence[str]) -> None:
    """Raise ShardcError (SC101) where forward asks for the value of a buffer that it changes: the next one differs."""
    if changing:
        message = f"forward asks for the value of the buffer '{changing[0]}', which it changes in each step"
        hint = "decide by torch.where, or count in Python between the steps and compile again when it changes"
        raise about_tensor(model, "SC101", changing[0], message, hint)


def _refuse_second_names(
    model: nn.Module, after: Mapping[str, Tensor], initial: Mapping[str, Tensor], params: Mapping[str, Tensor]
) -> None:
    """Raise where a buffer has become a view of what changes in place: of a parameter, or of another such buffer."""
    changing = {torch_compat.storage_of(p): name for name, p in params.items() if p.requires_grad}
    changing |= {torch_compat.storage_of(t): name for name, t in initial.items() if torch_compat.was_written(t)}
    first_names: dict[int | None, str] = {}
    for name, buffer in after.items():
        storage = torch_compat.storage_of(buffer)
        owner = changing.get(storage)
        first = first_names.setdefault(storage, name)
        if owner is not None and owner != name:
            raise _second_name(model, name, owner)
        if first != name and torch_compat.was_written(buffer):
            raise _second_name(model, name, first)


def _second_name(model: nn.Module, name: str, owner: str) -> ShardcError:
    message = f"forward makes the buffer '{name}' a second name of '{owner}', which changes in place"
    hint = f"assign a copy: self.{name.rpartition('.')[2]} = ....detach().clone()"
    return about_tensor(model, "SC121", name, message, hint)


def _unkept(model: nn.Module, name: str, what: str, hint: str) -> ShardcError:
    message = f"forward {what} the buffer '{name}': a program's buffers are values of one shape and dtype"
    return about_tensor(model, "SC123", name, message, hint)
