"""A buffer goes from microbatch to microbatch in one stage's memory: what backward has of it, and what to say of one
that two stages would share."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from shardc.ir.diagnostic import ShardcError, error
from shardc.ir.graph import Graph, info, producer, type_of
from shardc.stages.anatomy import Anatomy

SHOWN = 3  # places to cut


def keep_for_backward(graph: Graph) -> None:
    """Let backward read a copy, made in forward, of each buffer that forward changes: by the time that it runs, the
    forward of later microbatches has changed the buffer again. Edits the graph, which computes what it did.

    Raises ShardcError (SC221) for a buffer that backward changes (a checkpoint that runs forward again, a hook): the
    forward of later microbatches does not wait for it.
    """
    anatomy = Anatomy(graph)
    for buffer, changed in anatomy.carried.items():
        if producer(changed)[0] in anatomy.backward:
            raise _changed_in_backward(buffer, changed)
        late = [call for call in buffer.users if call in anatomy.backward]
        early = [call for call in anatomy.calls if call in buffer.users and call not in anatomy.backward]
        if late:
            like = early[0] if early else producer(changed)[0]
            with graph.fx.inserting_before(like):
                name = f"{info(buffer).name}.kept"
                copy = graph.call(torch.ops.aten.clone.default, (buffer,), like=like, type=type_of(buffer), name=name)
            for call in late:
                call.replace_input_with(buffer, copy)


def _changed_in_backward(buffer: fx.Node, changed: fx.Node) -> ShardcError:
    name = info(buffer).name
    message = f"backward changes buffer '{name}', {_place(producer(changed)[0])}, when later microbatches have read it"
    hint = "change it in forward, outside of what a checkpoint runs again; or compile without `pipeline`"
    return error("SC221", message, tensor=name, hint=hint)


def in_two_stages(anatomy: Anatomy, buffer: fx.Node, stage_of: Mapping[fx.Node, int]) -> ShardcError:
    """The error for a buffer that is read where another stage changes it: the two calls, and where cuts may be."""
    changing = producer(anatomy.carried[buffer])[0]
    home = stage_of.get(changing, 0)
    reading = next(call for call in anatomy.calls if call in buffer.users and stage_of.get(call, 0) != home)
    message = (
        f"buffer '{info(buffer).name}' is read {_place(reading)}, in stage {stage_of.get(reading, 0)}, "
        f"and changed {_place(changing)}, in stage {home}"
    )
    all_of_it = [anatomy.unit_of.get(call, 0) for call in anatomy.calls if call in buffer.users or call is changing]
    first: dict[str, int] = {}
    for at, unit in enumerate(anatomy.units):
        first.setdefault(unit.name, at)
    places = [name for name, at in first.items() if name and at and not min(all_of_it) < at <= max(all_of_it)]
    hint = "one stage must have all that reads and changes it: "
    hint += f"split at {' or '.join(places[-SHOWN:])}" if places else "compile without `pipeline`"
    return error("SC221", message, tensor=info(buffer).name, hint=hint)


def _place(call: fx.Node) -> str:
    about = info(call)
    return f"in {about.fqn or 'the model itself'}" + (f" ({about.source})" if about.source else "")
