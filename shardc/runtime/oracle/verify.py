"""Is the distributed program the single-device one? Run both, compare the loss, every gradient and all that is updated.

Errors are relative (see `compare`), and allowed up to the tolerance or what rounding explains (see `rounding`), which
is measured when one exceeds it. Ranks that should hold the same value and do not count as an error too. When something
differs, both runs are repeated instruction by instruction: passes keep the names of values, so the first one that
differs from its namesake on the single device is where the compiler went wrong.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from shardc.ir.graph import Graph, Port, ValueInfo, info, op_name, producer, type_of
from shardc.ir.mesh import Mesh
from shardc.ir.microbatch import SCALE
from shardc.partition.staged_program import StagedProgram, one_stage
from shardc.runtime.execute.instructions import Numerics
from shardc.runtime.execute.layout import assemble, replica_spread, shard
from shardc.runtime.oracle.compare import SMALL_GRADIENT, floor_of, largest_gradient, magnitude, relative_error
from shardc.runtime.oracle.report import EAGER_TOLERANCE, TOLERANCE, Mismatch, Report, Row, number
from shardc.runtime.oracle.rounding import rounding
from shardc.runtime.oracle.simulate import Returned, run_reference
from shardc.runtime.oracle.simulate_stages import Choose, first, simulate_stages
from shardc.torch_compat import version_of

CHANGED = "changed"  # role of a buffer that a step of eager PyTorch changed
ROUNDED = 1e3  # times its own rounding: what an update is not measured below
ALLOWED = 10.0  # times its own rounding: by how much a parameter may differ, though a step adds nothing to it
OPTIMIZER_SLACK = 10.0  # Adam divides a gradient by its own size, and with it the rounding of the smallest


def in_order(seed: int | None) -> Choose:
    """The choice of the next move among the possible ones: the first, or a seeded random one."""
    return first if seed is None else random.Random(seed).randrange


@dataclass(frozen=True)
class _Ranks:
    """All ranks of a program, simulated. `order` seeds the choice among the interleavings that its lists allow."""

    program: StagedProgram
    order: int | None

    @property
    def mesh(self) -> Mesh:
        return self.program.body.mesh

    def run(
        self, inputs: Mapping[str, torch.Tensor], dtype: torch.dtype, returned: Returned
    ) -> dict[Port, torch.Tensor]:
        consumed = Consumed(self.program.body)
        named = {info(node).name: node for node in self.program.body.gradients.values()}

        def watch(_: int, microbatch: int, node: fx.Node, values: Sequence[torch.Tensor]) -> None:
            known = named.get(info(node).name) if microbatch < 0 else node  # of a body, the node itself
            if known is not None and type_of(known) == type_of(node):
                consumed(known, values)

        outputs = simulate_stages(
            self.program,
            inputs,
            dtype=dtype,
            choose=in_order(self.order),
            buffered=self.order is not None,
            returned=returned,
            observe=watch,
        )
        return consumed.found(inputs) | outputs  # returned gradients are clipped, and consumed ones are not

    def first_mismatch(
        self, reference: Graph, inputs: Mapping[str, torch.Tensor], dtype: torch.dtype, floor: float
    ) -> Mismatch | None:
        """The first value that differs from its namesake in the reference, with the ranks of the whole mesh that make
        it wrong. If none does, the body is asked that the stages were cut from."""
        graphs = list(self.program.graphs())
        names = {info(node).name for graph in graphs for node in graph.values()}
        namesakes = Namesakes.of(reference, inputs, dtype, floor, names)
        mismatches: list[Mismatch] = []

        def compare(c: int, microbatch: int, node: fx.Node, values: Sequence[torch.Tensor]) -> None:
            if mismatches:
                return
            single = microbatch < 0 or len(namesakes.references.get(info(node).name, ())) == 1
            wrong = namesakes.differs(node, values, 0 if single else microbatch, self.mesh)
            if wrong is not None:
                mismatches.append(replace(wrong, ranks=tuple(self.program.rank_of(c, i) for i in wrong.ranks)))

        simulate_stages(self.program, inputs, dtype=dtype, choose=in_order(self.order), observe=compare)
        if mismatches or self.program.body in graphs:
            return mismatches[0] if mismatches else None
        return _Ranks(one_stage(self.program.body), None).first_mismatch(reference, inputs, dtype, floor)


class Consumed:
    """The gradients that an update consumes, which are no outputs; an observer of a run.

    Those of a loss that was scaled are divided by its scale. A body that fuses a gradient into a kernel has it no more.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._nodes = set(graph.gradients.values())  # one may be the gradient of several parameters
        self._values: dict[fx.Node, Sequence[torch.Tensor]] = {}

    def __call__(self, node: fx.Node, values: Sequence[torch.Tensor]) -> None:
        if node in self._nodes:
            self._values[node] = values  # of several microbatches the last: the sum

    def found(self, inputs: Mapping[str, torch.Tensor]) -> dict[Port, torch.Tensor]:
        scale = float(inputs[SCALE]) if SCALE in inputs else 1.0
        ranks = {node: dict(enumerate(values)) for node, values in self._values.items()}
        mesh, gradients = self._graph.mesh, self._graph.gradients.items()
        return {
            Port("grad", name): assemble(ranks[node], type_of(node), mesh) / scale
            for name, node in gradients
            if node in ranks
        }


def reference_step(
    reference: Graph,
    inputs: Mapping[str, torch.Tensor],
    dtype: torch.dtype | None = None,
    numerics: Numerics | None = None,
) -> dict[Port, torch.Tensor]:
    """What the single device returns, and the gradients that its update consumes."""
    consumed = Consumed(reference)
    outputs = run_reference(reference, inputs, dtype=dtype, numerics=numerics, observe=consumed)
    return consumed.found(inputs) | outputs


def verify(
    program: StagedProgram | Graph,
    reference: Graph,
    inputs: Mapping[str, torch.Tensor],
    dtype: torch.dtype = torch.float64,
    eager: Mapping[tuple[str, str], torch.Tensor] | None = None,
    absent: str = "",
    eager_tolerance: float = EAGER_TOLERANCE,
    expected: Mapping[Port, torch.Tensor] | None = None,
    order: int | None = None,
) -> Report:
    """Compare all simulated ranks of a program, or of a body, with `reference` on one device, in `dtype`.

    Both are given the same global inputs, which neither may change. `order` seeds one of the orders that lists allow.

    `eager` gives what PyTorch itself finds, by (role, name) of the output, to compare the reference with in turn. A
    gradient that only it finds is a failure, and so is a buffer of role "changed" that the program does not return.
    `absent` says why it is not given, for the report to say. `expected` is what `reference_step` has found already.
    """
    ranks = _Ranks(one_stage(program) if isinstance(program, Graph) else program, order)
    spreads: dict[Port, float] = {}

    def watch(port: Port, node: fx.Node, values: Sequence[torch.Tensor]) -> None:
        spreads[port] = replica_spread(dict(enumerate(values)), type_of(node), ranks.mesh)

    versions = {name: version_of(value) for name, value in inputs.items()}
    expected = reference_step(reference, inputs, dtype) if expected is None else expected
    actual = ranks.run(inputs, dtype, watch)
    scales = _Scales(reference, inputs, expected, dtype, eager_tolerance)
    rows: list[Row] = []
    for port, reference_value in expected.items():
        returned = port in scales.returned
        assert port in actual or not returned, f"nobody returns {port.role} '{port.name}'"
        floor = scales.floor(port)
        error = 0.0
        if port in actual:
            if port.role == "output" and ranks.program.body.halves > 1:  # of pairs of microbatches
                actual[port] = actual[port].reshape(reference_value.shape)
            spread = spreads.get(port, 0.0) / max(magnitude(reference_value), floor, sys.float_info.min)
            error = max(relative_error(actual[port], reference_value, floor), spread)
        checked = eager.get((port.role, port.name)) if eager else None
        eager_error = None if checked is None else scales.eager_error(port, checked)
        if port in actual or eager_error is not None:
            rows.append(Row(port.role, port.name, error, tuple(reference_value.shape), eager_error))
    written = [name for name, value in inputs.items() if version_of(value) != versions[name]]
    rows += [Row("input", name, math.inf, tuple(inputs[name].shape)) for name in written]
    rows += _lost(reference, rows, eager or {})
    slack = OPTIMIZER_SLACK if any(row.role == "param" for row in rows) else 1.0
    tolerance = TOLERANCE[dtype] * slack
    report = Report(tuple(rows), tolerance, dtype, ranks.program.mesh.world_size, None, absent, eager_tolerance)
    report = _explained(report, reference, inputs)
    if report.equal:
        overflows = dtype == torch.float16 and not report.ok
        return replace(report, overflow=_first_overflow(reference, inputs, dtype)) if overflows else report
    floor = SMALL_GRADIENT * scales.largest
    return replace(report, first_mismatch=ranks.first_mismatch(reference, inputs, dtype, floor))


def _explained(report: Report, reference: Graph, inputs: Mapping[str, torch.Tensor]) -> Report:
    """The report, with what rounding explains where something differs."""
    if report.ok or report.dtype != torch.float64:
        return report
    bounds = {(port.role, port.name): most for port, most in rounding(reference, inputs).items()}
    rows = tuple(replace(row, explained=bounds.get((row.role, row.name), 0.0)) for row in report.rows)
    return replace(report, rows=rows)


def _first_overflow(reference: Graph, inputs: Mapping[str, torch.Tensor], dtype: torch.dtype) -> str:
    """The first value that overflows on the single device, or "". A mask's -inf, in forward, is none."""
    overflown: list[str] = []

    def watch(node: fx.Node, values: Sequence[torch.Tensor]) -> None:
        value = values[0]
        if not overflown and value.is_floating_point():
            bad = ~value.isfinite() if info(node).phase == "bwd" else value.isnan() | (value == math.inf)
            if bad.any():
                overflown.append(info(node).name)

    run_reference(reference, inputs, dtype=dtype, observe=watch)
    return "".join(overflown)


def beside_another(
    report: Report,
    reference: Graph,
    inputs: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    expected: Mapping[Port, torch.Tensor],
    eager: Mapping[tuple[str, str], torch.Tensor],
) -> Report:
    """The report of a step, compared with another step of eager PyTorch too, which should do the same again."""
    scales = _Scales(reference, inputs, expected, dtype, report.eager_tolerance)
    ports = {(port.role, port.name): port for port in expected}
    rows: list[Row] = []
    for row in report.rows:
        checked = eager.get((row.role, row.name))
        if checked is not None:
            eager_error = scales.eager_error(ports[row.role, row.name], checked)
            row = replace(row, eager_error=max(row.eager_error or 0.0, eager_error, key=number))
        rows.append(row)
    report = replace(report, rows=(*rows, *_lost(reference, rows, eager)))
    return _explained(report, reference, inputs)


class _Scales:
    """The scales by which the errors of each output are divided."""

    def __init__(
        self,
        reference: Graph,
        inputs: Mapping[str, torch.Tensor],
        expected: Mapping[Port, torch.Tensor],
        dtype: torch.dtype,
        eager_tolerance: float,
    ) -> None:
        self.returned = set(reference.outputs)
        self._inputs, self._expected, self._dtype = inputs, expected, dtype
        self._rounded = max(ROUNDED, ALLOWED / eager_tolerance)
        self.largest = largest_gradient({port: value for port, value in expected.items() if port in self.returned})
        self._largest_of_all = largest_gradient(expected)

    def floor(self, port: Port) -> float:
        largest = self.largest if port in self.returned else self._largest_of_all
        return floor_of(self._expected[port], largest, self._dtype)

    def eager_error(self, port: Port, checked: torch.Tensor) -> float:
        """How far the reference is from eager PyTorch: of a parameter, in what the step adds to it."""
        exact = self._expected[port]
        lowest = torch.finfo(checked.dtype).eps if checked.is_floating_point() else 0.0
        checked = checked.to(exact.dtype).reshape(exact.shape) if checked.numel() == exact.numel() else checked
        if checked.shape != exact.shape:
            return math.inf
        if port.role != "param" or port.name not in self._inputs:
            return relative_error(exact, checked, self.floor(port))
        initial = self._inputs[port.name].to(exact.dtype)
        return relative_error(exact - initial, checked - initial, self._rounded * lowest * magnitude(initial))


def _lost(reference: Graph, rows: Sequence[Row], eager: Mapping[tuple[str, str], torch.Tensor]) -> list[Row]:
    """Rows for gradients and buffers that eager PyTorch changes and the program does not return."""
    names = {name: port.name for port in reference.inputs for name in (port.name, *port.aliases)}
    seen = {(row.role, row.name) for row in rows}
    rows_lost: list[Row] = []
    for (role, name), value in eager.items():
        gradient = role == "grad" and any(row.role == "grad" for row in rows) and magnitude(value) > 0
        kind = "buffer" if role == CHANGED else role
        if (gradient or role == CHANGED) and (kind, names.get(name, name)) not in seen:
            rows_lost.append(Row(kind, name, 0.0, tuple(value.shape), math.inf))
    return rows_lost


@dataclass(frozen=True)
class Namesakes:
    """The single device's values by name, one for each microbatch in turn."""

    references: Mapping[str, Sequence[torch.Tensor]]
    dtype: torch.dtype
    floor: float  # what backward's errors are measured against at the least

    @classmethod
    def of(
        cls,
        reference: Graph,
        inputs: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        floor: float,
        names: Container[str],
    ) -> Namesakes:
        """Of the values that have these names."""
        references: dict[str, list[torch.Tensor]] = {}

        def record(node: fx.Node, values: Sequence[torch.Tensor]) -> None:
            if info(node).name in names:
                references.setdefault(info(node).name, []).append(values[0])

        run_reference(reference, inputs, dtype=dtype, observe=record)
        return cls(references, dtype, floor)

    def differs(self, node: fx.Node, values: Sequence[torch.Tensor], microbatch: int, mesh: Mesh) -> Mismatch | None:
        """How the ranks' values of a microbatch differ from their namesake; None if they do not, or there is none.

        A namesake that a pass gave another shape is another value.
        """
        references = self.references.get(info(node).name, ())
        reference = references[microbatch] if microbatch < len(references) else None
        type = type_of(node)
        if reference is None or type.ragged or tuple(reference.shape) != type.shape:
            return None  # rows in the order of their experts lie otherwise on each rank
        shards = dict(enumerate(values))
        scale = self.floor if info(node).phase == "bwd" else 0.0
        gap = relative_error(assemble(shards, type, mesh), reference, scale)
        gap = max(gap, replica_spread(shards, type, mesh) / max(magnitude(reference), scale, sys.float_info.min))
        if gap <= TOLERANCE[self.dtype]:
            return None
        return _mismatch(node, info(node), gap, self._wrong_ranks(node, values, reference, mesh, scale))

    def _wrong_ranks(
        self, node: fx.Node, values: Sequence[torch.Tensor], reference: torch.Tensor, mesh: Mesh, floor: float
    ) -> tuple[int, ...]:
        """Ranks whose own shard is wrong; of a pending reduction no rank is right or wrong alone."""
        type = type_of(node)
        all_ranks = tuple(range(mesh.world_size))
        if type.partial:
            return all_ranks
        scale = max(magnitude(reference), floor)
        wrong: list[int] = []
        for rank in all_ranks:
            # Put the rank's shard into the right tensor: padding then falls away by itself.
            mixed = {r: shard(reference, type, mesh, r) for r in all_ranks} | {rank: values[rank]}
            replicas_gap = replica_spread(mixed, type, mesh)
            gap = relative_error(assemble(mixed, type, mesh), reference, scale)
            gap = max(gap, replicas_gap / max(scale, sys.float_info.min))
            if not gap <= TOLERANCE[self.dtype]:
                wrong.append(rank)
        return tuple(wrong)


def _mismatch(node: fx.Node, about: ValueInfo, gap: float, ranks: tuple[int, ...]) -> Mismatch:
    op = op_name(producer(node)[0].target) if node.op == "call_function" else "input"
    return Mismatch(
        about.name, op, str(about.type), gap, ranks, about.source, about.source_text, about.fqn, str(about.cause)
    )
