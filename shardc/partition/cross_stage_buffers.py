"""Buffers that forward changes: each microbatch's forward reads the value that the previous microbatch wrote. Such a
buffer lives in the memory of one stage. Backward reads a copy of it; sharing it between two stages is an error."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from shardc.ir.diagnostic import ShardcError, error
from shardc.ir.graph import Graph, info, producer, type_of
from shardc.ir.provenance import Derivation
from shardc.partition.step_analysis import StepAnalysis, finest_analysis

SHOWN = 3  # split points that the hint lists


def keep_buffers_for_backward(graph: Graph) -> None:
    """Let backward read a copy, made in forward, of each buffer that forward changes: by the time that it runs, the
    forward of later microbatches has changed the buffer again. Edits the graph, which computes what it did.

    Raises ShardcError (SC221) for a buffer that backward changes (a checkpoint that runs forward again, a hook): the
    forward of later microbatches does not wait for it.
    """
    analysis = StepAnalysis(graph)
    for buffer, changed in analysis.buffer_updates.items():
        if producer(changed)[0] in analysis.backward:
            raise _changed_in_backward(buffer, changed)
        backward_readers = [call for call in buffer.users if call in analysis.backward]
        forward_readers = [call for call in analysis.calls if call in buffer.users and call not in analysis.backward]
        if backward_readers:
            like = forward_readers[0] if forward_readers else producer(changed)[0]
            with graph.fx.inserting_before(like):
                name = info(buffer).name
                origin, type = Derivation("copy", name), type_of(buffer)
                clone = torch.ops.aten.clone.default
                copy = graph.call(clone, (buffer,), like=like, type=type, name=f"{name}.kept", origin=origin)
            for call in backward_readers:
                call.replace_input_with(buffer, copy)


def _changed_in_backward(buffer: fx.Node, changed: fx.Node) -> ShardcError:
    name = info(buffer).name
    message = f"backward changes buffer '{name}', {_location(producer(changed)[0])}, after later microbatches read it"
    hint = "change it in forward, outside of what a checkpoint runs again; or compile without `pipeline`"
    return error("SC221", message, tensor=name, hint=hint)


def buffer_in_two_stages(analysis: StepAnalysis, buffer: fx.Node, stage_of: Mapping[fx.Node, int]) -> ShardcError:
    """The error for a buffer that is read where another stage changes it: the two calls, and where cuts may be."""
    changing = producer(analysis.buffer_updates[buffer])[0]
    home = stage_of.get(changing, 0)
    reading = next(call for call in analysis.calls if call in buffer.users and stage_of.get(call, 0) != home)
    message = (
        f"buffer '{info(buffer).name}' is read {_location(reading)}, in stage {stage_of.get(reading, 0)}, "
        f"and changed {_location(changing)}, in stage {home}"
    )
    finest = finest_analysis(analysis.body)  # a split may name a layer inside of another one
    buffer_units = [finest.unit_of.get(call, 0) for call in finest.calls if call in buffer.users or call is changing]
    first_unit: dict[str, int] = {}
    for index, unit in enumerate(finest.units):
        first_unit.setdefault(unit.name, index)
    split_points = [
        name
        for name, index in first_unit.items()
        if name and index and not min(buffer_units) < index <= max(buffer_units)
    ]
    hint = "one stage must have all that reads and changes it: "
    hint += f"split at {' or '.join(split_points[-SHOWN:])}" if split_points else "compile without `pipeline`"
    return error("SC221", message, tensor=info(buffer).name, hint=hint)


def _location(call: fx.Node) -> str:
    call_info = info(call)
    return f"in {call_info.fqn or 'the model itself'}" + (f" ({call_info.source})" if call_info.source else "")
