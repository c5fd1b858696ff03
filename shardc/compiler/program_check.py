"""A program that was read, against itself: refused unless it is what compiling leaves, instruction by instruction.

    structure    names, ports, schemas, counts                     ir.verify, SC402
    calls        ops with a meaning; dtypes, shapes, placements    passes.type_check, SC410
    step         the body takes and returns what the reference does, with nothing pending
    stages       lists proved; parts, transfers and ends fit       partition.staged_check, schedule.prove
                 calls of all stages, as those of one graph        partition.joined_stages
    data         constants, and the record of what was asked for, are of the kinds that `compile` writes

What a type cannot say is whether the body computes what the reference does, of the same types: `Program.verify` runs
both. And the reference is what the file says that the model is: numbers of it are the author's, as weights are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast, get_args

import torch

from shardc.ir.diagnostic import Diagnostic, ShardcError
from shardc.ir.graph import Graph, Port, type_of
from shardc.ir.hardware import problems_of
from shardc.ir.microbatch import GIVEN
from shardc.ir.parse import parse as read
from shardc.ir.program import SHOWN, PlanRecord, Program, refuse_unsound
from shardc.partition.joined_stages import joined_faults
from shardc.partition.staged_check import bound_faults, stage_faults
from shardc.partition.staged_program import StagedProgram
from shardc.passes.normalize.limit_experts import LOAD, limits_differ
from shardc.passes.type_check import Fault, single_faults, step_faults, type_faults
from shardc.plan.schema import Plan
from shardc.plan.values import Nonfinite
from shardc.schedule.prove import prove

HINT = "compile the program anew; what was saved says otherwise, so the file was changed since"


def refuse_false(program: Program, staged: StagedProgram) -> None:
    """Raise ShardcError with what is wrong with a program that was read: SC402, SC410, or the code of a proof."""
    body, reference = program.body, program.reference
    _refuse(bound_faults(staged))
    # By number too: the ends of all ranks have one name.
    numbered = {f"pipeline's graph {i}, @{g.name}": g for i, g in enumerate((staged.body, *staged.graphs()))}
    graphs = {"body": body, "reference": reference, **{name: g for name, g in numbered.items() if g is not body}}
    refuse_unsound(graphs)
    faults: list[Fault] = []
    in_stages = {graph for stage in staged.stages for graph in (*stage.parts.values(), *stage.gathers.values())}
    for graph in graphs.values():
        faults += [] if graph in in_stages and graph is not body else type_faults(graph)
        if len(faults) >= SHOWN:
            break
    faults += single_faults(reference) + step_faults(reference)
    for whole in dict.fromkeys((body, staged.body)):
        faults += step_faults(whole) + list(_interface(whole, reference))
    faults += list(_constants(reference, program.constants)) + list(_meshes(program, staged))
    _refuse(faults)
    refuse_record(program.plan, reference)
    proof = prove(staged.lists)
    if not proof.ok:
        raise ShardcError(*proof.errors[:SHOWN])
    _refuse(stage_faults(staged))
    if staged.axis:
        _refuse(joined_faults(staged))


def parse(text: str, filename: str = "<text>") -> Graph:
    """The graph that a program's text describes: one rank's body, a part of one, or a graph for one device.

    Raises ShardcError (SC404) where it cannot be read, and SC402 or SC410 where it says what its calls do not compute.
    """
    graph = read(text, filename)
    refuse_unsound({graph.name: graph})
    _refuse(type_faults(graph))
    return graph


def _refuse(faults: list[Fault]) -> None:
    if faults:
        raise ShardcError(*(fault.diagnostic(HINT) for fault in faults[:SHOWN]))


def _interface(body: Graph, reference: Graph) -> Iterator[Fault]:
    """The same inputs and outputs, in order: roles, names and global types."""
    if (body.microbatches * body.halves, body.tokens) != (reference.microbatches, reference.tokens):
        yield Fault(body.name, "its microbatches, or what they are weighted by, are not the reference's")
    yield from (Fault(body.name, line) for line in limits_differ(reference, body))
    inputs = [port.name for port in reference.inputs if port.role == "input"]
    if body.tokens is not None and body.tokens.input not in inputs:
        yield Fault(body.name, f"its loss is weighted by '{body.tokens.input}', which is no input")
    for side, values, other in (
        (
            "input",
            zip(body.inputs, body.placeholders, strict=True),
            zip(reference.inputs, reference.placeholders, strict=True),
        ),
        (
            "output",
            zip(body.outputs, body.output_values, strict=True),
            zip(reference.outputs, reference.output_values, strict=True),
        ),
    ):
        reference_ports = [(port, type_of(value)) for port, value in other]
        ports = [(port, type_of(value), value) for port, value in values]
        if len(ports) != len(reference_ports):
            yield Fault(body.name, f"{len(ports)} {side}s, and {len(reference_ports)} of the reference")
            return
        for (port, type, value), (twin, global_type) in zip(ports, reference_ports, strict=True):
            if port != twin:
                yield Fault(
                    body.name, f"{side} {port.role} '{port.name}' is {twin.role} '{twin.name}' to the reference", value
                )
            elif type.dtype != global_type.dtype or type.shape not in _shapes(body, port, global_type.shape):
                yield Fault(body.name, f"{side} '{port.name}' is {type}, to the reference {global_type}", value)
    losses = [port.name for port in body.outputs if port.role == "loss"]
    if len(losses) != 1 and not (body.is_forward_only and not losses and body.outputs):
        yield Fault(body.name, f"it returns {len(losses)} losses")


def _shapes(body: Graph, port: Port, shape: tuple[int, ...]) -> set[tuple[int, ...]]:
    """Those that a body's input or output may have, of a shape in a microbatch of the reference."""
    halves = body.halves
    if halves == 1 or port.role not in (*GIVEN, "output"):
        return {shape}
    if port.role == "input":
        return {shape, *([(halves * shape[0], *shape[1:])] if shape else [])}
    return {(halves, *shape), *([shape] if port.role == "output" else [])}


def _meshes(program: Program, staged: StagedProgram) -> Iterator[Fault]:
    """The mesh of all ranks is that of the stages."""
    if program.mesh != staged.mesh:
        yield Fault(program.body.name, f"the program's mesh is ({program.mesh}), and ({staged.mesh}) of what it runs")
    if program.reference.mesh.world_size != program.body.mesh.world_size:
        yield Fault(program.reference.name, f"its mesh is ({program.reference.mesh}), the body's ({program.body.mesh})")
    if staged.body.mesh != program.body.mesh:
        yield Fault(staged.body.name, f"its mesh is ({staged.body.mesh}), the body's ({program.body.mesh})")


def _constants(reference: Graph, constants: Mapping[str, torch.Tensor]) -> Iterator[Fault]:
    types = {port.name: type_of(value) for port, value in zip(reference.inputs, reference.placeholders, strict=True)}
    for name, tensor in constants.items():
        type = types.get(name)
        if type is None:
            yield Fault(reference.name, f"constant '{name}' is no input")
        elif (type.dtype, type.shape) != (tensor.dtype, tuple(tensor.shape)):
            yield Fault(
                reference.name, f"constant '{name}' is {tensor.dtype} of {list(tensor.shape)}, the input {type}"
            )


# ---------------------------------------------------------------------- the record of what was asked for
def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _numbers(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(k, str) and _number(v) for k, v in value.items())


def _batch(value: object) -> bool:
    if not isinstance(value, dict) or value.keys() != {"by_name", "leaves", "written"}:
        return False
    leaves = value["leaves"]
    shaped = isinstance(leaves, list) and all(_texts(leaf) and len(leaf) >= 3 for leaf in leaves)
    return shaped and isinstance(value["by_name"], bool) and _texts(value["written"])


def _traffic(value: object) -> bool:
    pairs: Any = value if isinstance(value, list) else ()
    return len(pairs) == 2 and all(isinstance(v, list) and len(v) == 2 and all(map(_whole, v)) for v in pairs)


def _choice(value: object) -> bool:
    said: Any = value if isinstance(value, list | tuple) else ()
    return len(said) == 3 and isinstance(said[0], bool) and all(map(_number, said[1:]))


def _halves(value: object) -> bool:
    said: Any = value if isinstance(value, list | tuple) else ()
    return len(said) == 4 and _choice(said[:3]) and isinstance(said[3], str)


def _state(value: object) -> bool:
    rows: Any = value if isinstance(value, list | tuple) else ()
    return bool(rows) and all(isinstance(row, list | tuple) and len(row) == 3 and _texts(list(row)) for row in rows)


def _experts(value: object) -> bool:
    rows: Any = value if isinstance(value, list | tuple) else ((),)
    return all(isinstance(row, list | tuple) and len(row) == 3 and isinstance(row[0], str) for row in rows) and all(
        isinstance(sizes, list | tuple) and sizes and all(_whole(n) and n for n in sizes) and len(sizes) == len(row[1])
        for row in rows
        for sizes in row[1:]
    )


def _dispatch(value: object) -> bool:
    rows: Any = value if isinstance(value, list | tuple) else ()
    return bool(rows) and all(
        isinstance(row, list | tuple) and len(row) == 4 and _texts(list(row[:2])) and all(map(_whole, row[2:]))
        for row in rows
    )


def _context(value: object) -> bool:
    rows: Any = value if isinstance(value, list | tuple) else ()

    def cost(said: Any) -> bool:
        form = isinstance(said, list | tuple) and len(said) == 4
        return form and isinstance(said[0], str) and all(map(_whole, said[1:3])) and isinstance(said[3], str)

    def choice(row: Any) -> bool:
        if not (isinstance(row, list | tuple) and len(row) == 4 and _texts(list(row[:3]))):
            return False
        costs = row[3] if isinstance(row[3], list | tuple) else ()
        return all(map(cost, costs)) and row[2] in [said[0] for said in costs]

    return bool(rows) and all(map(choice, rows))


def _plan(value: object) -> bool:
    if not isinstance(value, str):
        return False
    Plan.parse(value)  # raises ShardcError where it is none
    return True


def _hardware(value: object) -> bool:
    return isinstance(value, dict) and not problems_of(cast(dict[str, Any], value))


RECORD: Mapping[str, Callable[[object], bool]] = {
    "text": _plan,
    "seed": _whole,
    "batch": _batch,
    "hardware": _hardware,
    "split": _texts,
    "data": lambda value: value == "per_rank",
    "by_row": _texts,
    "mode": lambda value: value == "eval",
    "cut": lambda value: isinstance(value, str),
    "precision": lambda value: isinstance(value, str),
    "fills": _numbers,
    "nonfinite": lambda value: value is None or value in get_args(Nonfinite),
    "clip_grad_norm": lambda value: value is None or _number(value),
    "optimizer": lambda value: isinstance(value, str),
    "rates": _numbers,
    "dispatch": _dispatch,
    "context": _context,
    "experts": _experts,
    "fused_on": lambda value: isinstance(value, str),
    "decompose": _choice,
    "halves": _halves,
    "traffic": _traffic,
    "state": _state,
}
NEEDED = ("text", "seed", "batch")


def refuse_record(record: PlanRecord, reference: Graph) -> None:
    """Raise ShardcError (SC402) for what `compile` does not write."""
    wrong = [
        f"'{key}' is not what compiling writes" for key in record if key not in RECORD or not RECORD[key](record[key])
    ]
    wrong += [f"'{key}' is missing" for key in NEEDED if key not in record]
    if not wrong and ("mode" in record) != reference.is_forward_only:
        wrong.append(f"'mode' is {record.get('mode', 'train')!r}, and its graphs are of the other")
    for key, role in (("fills", "state"), ("rates", "hyper")):
        names = {port.name for port in reference.inputs if port.role == role}
        if not wrong and {*record.get(key, {})} != names:
            wrong.append(f"'{key}' has {len(record.get(key, {}))} numbers, for {len(names)} inputs")
    layers = record.get("experts", ())
    returned = zip(reference.outputs, reference.output_values, strict=True)
    counted = sum(type_of(value).shape[0] for port, value in returned if port.name == LOAD)
    if not wrong and counted != len(layers):
        wrong.append(f"'experts' has {len(layers)} layers, and the count of their rows {counted}")
    if not wrong:
        names = {port.name for port in reference.inputs if port.role in ("param", "buffer")}
        wrong += [
            f"'state' names '{name}', which is no input"
            for _, name, _ in record.get("state", ())
            if name not in {"", *names}
        ]
    if wrong:
        message = "the program's record of its plan: " + "; ".join(wrong[:SHOWN])
        raise ShardcError(Diagnostic("SC402", message, hint=HINT))
