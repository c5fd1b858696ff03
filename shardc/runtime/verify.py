"""Is the distributed program the single-device one? Run both, compare the loss, every gradient and updated buffer.

Errors are relative (see `compare`), and allowed up to the tolerance or what rounding explains (see `rounding`), which
is measured when one exceeds it. Ranks that should hold the same value and do not count as an error too. When something
differs, both runs are repeated instruction by instruction: passes keep the names of values, so the first one that
differs from its namesake on the single device is where the compiler went wrong.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import fx

from shardc.ir.diagnostic import Diagnostic
from shardc.ir.graph import Graph, Port, ValueInfo, info, op_name, producer, type_of
from shardc.ir.mesh import Mesh
from shardc.runtime.compare import SMALL_GRADIENT, floor_of, largest_gradient, magnitude, relative_error
from shardc.runtime.layout import assemble, replica_spread, shard
from shardc.runtime.rounding import rounding
from shardc.runtime.simulate import run_reference, simulate

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
PLURALS = {
    "loss": "losses",
    "grad": "gradients",
    "param": "parameters",
    "state": "states",
    "buffer": "buffers",
    "output": "outputs",
}
WITNESSED = ("loss", "grad", "buffer")  # roles of what eager PyTorch finds before an optimizer's step
OPTIMIZER_SLACK = 10.0  # Adam divides a gradient by its own size, and with it the rounding of the smallest
EAGER_TOLERANCE = 1e-5  # libraries hard-code float32 in places, where our graph computes in float64 throughout
EAGER_OWN = 1e-2  # of a model that runs in its own float32 alone: it rounds, and small gradients show it
EAGER_HALF = 1e-1  # of a model that casts to half precision itself


@dataclass(frozen=True)
class Row:
    """One output compared. `eager_error` is the reference's own error against eager PyTorch, where that was given."""

    role: str
    name: str
    error: float
    shape: tuple[int, ...]
    eager_error: float | None = None
    explained: float = 0.0  # by rounding alone


@dataclass(frozen=True)
class Mismatch:
    """The first instruction whose value is not that of its namesake on one device, and the ranks that hold it wrong."""

    name: str
    op: str
    type: str
    error: float
    ranks: tuple[int, ...]
    source: str = ""
    source_text: str = ""
    fqn: str = ""
    cause: str = ""

    def diagnostic(self) -> Diagnostic:
        ranks = ", ".join(map(str, self.ranks))
        return Diagnostic(
            "SC505",
            f"%{self.name} is the first value that is not the single device's, by {self.error:.1e}, on ranks {ranks}",
            location=self.source or None,
            source_text=self.source_text or None,
            fqn=self.fqn or None,
            tensor=f"%{self.name} : {self.type}",
            op=self.op,
            cause=self.cause or None,
        )


@dataclass(frozen=True)
class Report:
    """What `verify` found; true when every row is within the tolerance."""

    rows: tuple[Row, ...]
    tolerance: float
    dtype: torch.dtype
    ranks: int
    first_mismatch: Mismatch | None = None
    absent: str = ""  # why eager PyTorch was not asked
    eager_tolerance: float = EAGER_TOLERANCE

    @property
    def ok(self) -> bool:
        return self.equal and (
            self.eager_error is None or self.eager_error <= max(self.eager_tolerance, self.tolerance)
        )

    @property
    def equal(self) -> bool:
        """The distributed program is the single-device one, whatever eager PyTorch says."""
        return all(self.within(row) for row in self.rows)

    def within(self, row: Row) -> bool:
        return row.error <= max(self.tolerance, row.explained)  # a NaN is not

    @property
    def max_rel_error(self) -> float:
        """The worst error; infinite where one is not a number."""
        return max((_number(row.error) for row in self.rows), default=0.0)

    @property
    def eager_error(self) -> float | None:
        """The reference's worst error against eager PyTorch; None where that did not run."""
        found = [_number(row.eager_error) for row in self.rows if row.eager_error is not None]
        return max(found) if found else None

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        equal = self.equal
        verdict = "equal to the single device" if equal else "DIFFERENT from the single device"
        if equal and not self.ok:
            verdict = "equal to the traced graph, but that is NOT what eager PyTorch computes"
        error = f"error {self.max_rel_error:.1e}, tolerance {self.tolerance:.0e}"
        lines = [f"{self.ranks} ranks in {name}: {verdict}; {error}{self._beyond() if equal else ''}"]
        for role, many in PLURALS.items():
            rows = sorted((row for row in self.rows if row.role == role), key=lambda row: -row.error)
            if not rows:
                continue
            label = role if len(rows) == 1 else many
            lines.append(f"  {len(rows):>4} {label:<10} {rows[0].error:.1e} at worst ({rows[0].name})")
            if not self.ok:
                wrong = [row for row in rows if not self.within(row)]
                lines += [f"       {row.error:.1e}  {row.name} {list(row.shape)}" for row in wrong[:10]]
                if len(wrong) > 10:
                    lines.append(f"       and {len(wrong) - 10} more")
        if self.eager_error is not None:
            lines.append(f"  the single device against eager PyTorch: {self.eager_error:.1e}")
            wrong = [row for row in self.rows if (row.eager_error or 0.0) > max(self.eager_tolerance, self.tolerance)]
            lines += [f"       {row.eager_error:.1e}  {row.role} {row.name} {list(row.shape)}" for row in wrong[:10]]
        elif self.absent:
            lines.append(f"  eager PyTorch was not asked: {self.absent}")
        if self.first_mismatch is not None:
            lines += ["", self.first_mismatch.diagnostic().render()]
        return "\n".join(lines)

    def _beyond(self) -> str:
        """Of a report that is equal: how much of the error beyond the tolerance rounding explains."""
        beyond = [row for row in self.rows if row.error > self.tolerance]
        return f", or up to {max(row.explained for row in beyond):.1e} where rounding explains it" if beyond else ""


def _number(error: float) -> float:
    return math.inf if math.isnan(error) else error


Returned = Callable[[Port, fx.Node, Sequence[torch.Tensor]], None]  # an output as ranks hold it


class Subject(Protocol):
    """What is compared with the single device: a body, or whatever else runs on a mesh and returns the same ports."""

    @property
    def mesh(self) -> Mesh: ...
    @property
    def ranks(self) -> int: ...
    def run(
        self, inputs: Mapping[str, torch.Tensor], dtype: torch.dtype, returned: Returned
    ) -> dict[Port, torch.Tensor]: ...
    def first_mismatch(
        self, reference: Graph, inputs: Mapping[str, torch.Tensor], dtype: torch.dtype, floor: float
    ) -> Mismatch | None: ...


@dataclass(frozen=True)
class Body:
    """A body that all ranks of its mesh run."""

    body: Graph

    @property
    def mesh(self) -> Mesh:
        return self.body.mesh

    @property
    def ranks(self) -> int:
        return self.body.mesh.world_size

    def run(
        self, inputs: Mapping[str, torch.Tensor], dtype: torch.dtype, returned: Returned
    ) -> dict[Port, torch.Tensor]:
        ports: dict[fx.Node, list[Port]] = {}
        for port, node in zip(self.body.outputs, self.body.output_values, strict=True):
            ports.setdefault(node, []).append(port)

        def watch(node: fx.Node, values: Sequence[torch.Tensor]) -> None:
            for port in ports.get(node, ()):
                returned(port, node, values)

        return simulate(self.body, inputs, dtype=dtype, observe=watch)

    def first_mismatch(
        self, reference: Graph, inputs: Mapping[str, torch.Tensor], dtype: torch.dtype, floor: float
    ) -> Mismatch | None:
        """Compare value by value, in the body's order, everything that has a namesake in the reference."""
        namesakes = Namesakes.of(reference, inputs, dtype, floor, {info(node).name for node in self.body.values()})
        found: list[Mismatch] = []
        seen: dict[fx.Node, int] = {}

        def compare(node: fx.Node, values: Sequence[torch.Tensor]) -> None:
            at = seen[node] = seen.get(node, -1) + 1
            # Nothing after the first find matters.
            if not found and (wrong := namesakes.differs(node, values, at, self.mesh)) is not None:
                found.append(wrong)

        simulate(self.body, inputs, dtype=dtype, observe=compare)
        return found[0] if found else None


def verify(
    subject: Graph | Subject,
    reference: Graph,
    inputs: Mapping[str, torch.Tensor],
    dtype: torch.dtype = torch.float64,
    eager: Mapping[tuple[str, str], torch.Tensor] | None = None,
    absent: str = "",
    eager_tolerance: float = EAGER_TOLERANCE,
) -> Report:
    """Compare all simulated ranks of a body, or of another subject, with `reference` on one device, in `dtype`.

    Both are given the same global inputs.

    `eager` gives what PyTorch itself finds, by (role, name) of the output, to compare the reference with in turn; a
    gradient that only it finds is a failure. `absent` says why it is not given, for the report to say.
    """
    subject = Body(subject) if isinstance(subject, Graph) else subject
    spreads: dict[Port, float] = {}

    def watch(port: Port, node: fx.Node, values: Sequence[torch.Tensor]) -> None:
        spreads[port] = replica_spread(dict(enumerate(values)), type_of(node), subject.mesh)

    expected = run_reference(reference, inputs, dtype=dtype)
    found = subject.run(inputs, dtype, watch)
    largest = largest_gradient(expected)
    rows: list[Row] = []
    for port, want in expected.items():
        assert port in found, f"nobody returns {port.role} '{port.name}'"
        floor = floor_of(want, largest, dtype)
        spread = spreads.get(port, 0.0) / max(magnitude(want), floor, sys.float_info.min)
        error = max(relative_error(found[port], want, floor), spread)
        checked = eager.get((port.role, port.name)) if eager and port.role in WITNESSED else None
        rows.append(
            Row(
                port.role,
                port.name,
                error,
                tuple(want.shape),
                None if checked is None else relative_error(want, checked.to(want.dtype), floor),
            )
        )
    if eager and any(row.role == "grad" for row in rows):
        seen = {(row.role, row.name) for row in rows}
        lost = [(name, g) for (role, name), g in eager.items() if role == "grad" and (role, name) not in seen]
        rows += [Row("grad", name, 0.0, tuple(g.shape), math.inf) for name, g in lost if magnitude(g)]
    slack = OPTIMIZER_SLACK if any(row.role == "param" for row in rows) else 1.0
    tolerance = TOLERANCE[dtype] * slack
    report = Report(tuple(rows), tolerance, dtype, subject.ranks, None, absent, eager_tolerance)
    if not report.equal and dtype == torch.float64:
        most = {(port.role, port.name): most for port, most in rounding(reference, inputs).items()}
        explained = tuple(replace(row, explained=most.get((row.role, row.name), 0.0)) for row in rows)
        report = replace(report, rows=explained)
    if report.equal:
        return report
    return replace(report, first_mismatch=subject.first_mismatch(reference, inputs, dtype, SMALL_GRADIENT * largest))


@dataclass(frozen=True)
class Namesakes:
    """What the single device makes of each value, by name: those of each microbatch in turn."""

    wanted: Mapping[str, Sequence[torch.Tensor]]
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
        wanted: dict[str, list[torch.Tensor]] = {}

        def record(node: fx.Node, values: Sequence[torch.Tensor]) -> None:
            if info(node).name in names:
                wanted.setdefault(info(node).name, []).append(values[0])

        run_reference(reference, inputs, dtype=dtype, observe=record)
        return cls(wanted, dtype, floor)

    def differs(self, node: fx.Node, values: Sequence[torch.Tensor], at: int, mesh: Mesh) -> Mismatch | None:
        """How the ranks' values of microbatch `at` differ from their namesake; None if they do not, or there is none.

        A namesake that a pass gave another shape is another value.
        """
        wants = self.wanted.get(info(node).name, ())
        want = wants[at] if at < len(wants) else None
        type = type_of(node)
        if want is None or tuple(want.shape) != type.shape:
            return None
        shards = dict(enumerate(values))
        scale = self.floor if info(node).phase == "bwd" else 0.0
        gap = relative_error(assemble(shards, type, mesh), want, scale)
        gap = max(gap, replica_spread(shards, type, mesh) / max(magnitude(want), scale, sys.float_info.min))
        if gap <= TOLERANCE[self.dtype]:
            return None
        return _mismatch(node, info(node), gap, self._wrong_ranks(node, values, want, mesh, scale))

    def _wrong_ranks(
        self, node: fx.Node, values: Sequence[torch.Tensor], want: torch.Tensor, mesh: Mesh, floor: float
    ) -> tuple[int, ...]:
        """Ranks whose own shard is wrong; of a pending reduction no rank is right or wrong alone."""
        type = type_of(node)
        everyone = tuple(range(mesh.world_size))
        if type.partial:
            return everyone
        scale = max(magnitude(want), floor)
        wrong: list[int] = []
        for rank in everyone:
            # Put the rank's shard into the right tensor: padding then falls away by itself.
            mixed = {r: shard(want, type, mesh, r) for r in everyone} | {rank: values[rank]}
            replicas_gap = replica_spread(mixed, type, mesh)
            gap = max(
                relative_error(assemble(mixed, type, mesh), want, scale), replicas_gap / max(scale, sys.float_info.min)
            )
            if not gap <= TOLERANCE[self.dtype]:
                wrong.append(rank)
        return tuple(wrong)


def _mismatch(node: fx.Node, found: ValueInfo, gap: float, ranks: tuple[int, ...]) -> Mismatch:
    op = op_name(producer(node)[0].target) if node.op == "call_function" else "input"
    return Mismatch(
        found.name, op, str(found.type), gap, ranks, found.source, found.source_text, found.fqn, found.cause
    )
