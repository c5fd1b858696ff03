"""What holds a step up: causes, each with the step that there would be without it, the worst first.

    print(program.bottlenecks("h200"))

    tp across nodes: groups of tp span 2 nodes of 8 ranks, and their collectives the network
      41.214 ms instead of 96.046 (-57.1%) with tp inside of a node
      change: write mesh: dp=2, tp=8, the last axis lies closest

Each cause is a counterfactual: the step is predicted again with one thing changed, everything else as it is. What saves
less than LEAST of the step is no bottleneck, so a program may have none.

    slow link, slow network    links as fast as those of machines whose memory is as fast
    axis across nodes          the mesh's axes in another order, with this axis inside of a node
    odd sizes                  products of 16-bit tensors whose rows are all multiples of what matrix units are fed
    tiny microbatches          fewer and larger ones; many small kernels: those that cost nothing to start
    recompute                  the same plan without it, where memory allows
    shared cores               collectives that leave the compute's cores alone (ranks of CPUs)
    slower ranks               ranks that come to each collective at the same time
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from shardc.cost.prediction import Prediction
from shardc.ir.collectives import human_bytes
from shardc.ir.diagnostic import ShardcError
from shardc.ir.graph import info, op_name, operands, type_of
from shardc.ir.hardware import Hardware
from shardc.ir.mesh import Mesh
from shardc.ir.program import Program
from shardc.partition.rank_costs import graph_runs
from shardc.partition.staged_program import StagedProgram
from shardc.passes.fusion.analysis.traffic import PRODUCTS
from shardc.plan.schema import Plan
from shardc.plan.values import Recomputing

Predict = Callable[[StagedProgram, Hardware], Prediction]
LEAST = 0.1  # of the step
# Machines that are sold for training send a tenth of their memory's bytes a second inside a node, and a hundredth to
# other nodes: H100 SXM 3.35 TB/s, 450 and 50 GB/s; A100 SXM 2.0 TB/s, 300 and 25 GB/s; H200 4.8 TB/s, 450 and 50 GB/s.
LINK, NETWORK = 10, 100
FEWER = 8  # times as few microbatches as are tried
SLOWER = 0.7  # than such a machine's: what is above is as fast
DELAY = 1e-9  # of a kernel that costs nothing


@dataclass(frozen=True)
class Cause:
    """One thing that holds the step up. `step_ms` is the step without it, under the condition that `without` names."""

    name: str
    what: str
    step_ms: float
    saved_ms: float
    without: str
    change: str

    @property
    def share(self) -> float:
        """Of the step that there is."""
        return self.saved_ms / (self.step_ms + self.saved_ms)

    def __str__(self) -> str:
        before = self.step_ms + self.saved_ms
        text = f"{self.step_ms:.3f} ms instead of {before:.3f} (-{self.share:.1%}) {self.without}"
        return f"{self.name}: {self.what}\n  {text}\n  change: {self.change}"


@dataclass(frozen=True)
class Bottlenecks:
    """The causes of a step's time, the one that costs most first."""

    predicted: Prediction
    causes: tuple[Cause, ...]
    memory: int | None = None  # bytes that a rank may hold

    @property
    def fits(self) -> bool:
        return self.memory is None or self.predicted.peak_bytes <= self.memory

    def __str__(self) -> str:
        return "\n".join([*self._too_much(), *map(str, self.causes)] or [self._nothing()])

    def _too_much(self) -> list[str]:
        if self.memory is None or self.fits:
            return []
        peak = human_bytes(self.predicted.peak_bytes)
        change = "shard more, recompute, or smaller microbatches: `shardc plan` looks for what fits"
        return [
            f"does not fit: {peak} at the peak, of {human_bytes(self.memory)} that a rank may hold\n  change: {change}"
        ]

    def _nothing(self) -> str:
        p = self.predicted
        ms, kind = max(((ms, kind) for kind, ms in p.kinds_ms.items()), default=(0.0, "product"))
        share = ms / p.step_ms if p.step_ms else 0.0
        return f"no bottleneck: {share:.0%} of the step of {p.step_ms:.3f} ms is {kind}, by an MFU of {p.mfu:.1%}"


def bottlenecks(
    program: Program,
    staged: StagedProgram,
    hardware: Hardware,
    predict: Predict,
    compiled: Callable[[Plan], StagedProgram] | None = None,
    memory: int | None = None,
) -> Bottlenecks:
    """The bottlenecks of a program with these stages. `compiled` compiles it by another plan, where its model is at
    hand; `memory` are the bytes that a rank may hold, without which any peak is allowed."""
    found = _Causes(program, staged, hardware, predict, compiled, memory)
    found.slow_links()
    found.across_nodes()
    found.odd_sizes()
    found.small_kernels()
    found.recompute()
    found.shared_cores()
    found.slower_ranks()
    causes = sorted(found.causes, key=lambda cause: -cause.saved_ms)
    return Bottlenecks(found.predicted, tuple(cause for cause in causes if cause.share >= LEAST), memory)


class _Causes:
    def __init__(
        self,
        program: Program,
        staged: StagedProgram,
        hardware: Hardware,
        predict: Predict,
        compiled: Callable[[Plan], StagedProgram] | None,
        memory: int | None,
    ) -> None:
        self.program, self.staged, self.hardware, self.predict = program, staged, hardware, predict
        self.compiled, self.memory = compiled, memory
        self.predicted = predict(staged, hardware)
        self.plan = Plan.parse(program.plan.get("text", ""))
        self.causes: list[Cause] = []

    def add(self, name: str, what: str, other: Prediction, without: str, change: str) -> None:
        saved = self.predicted.step_ms - other.step_ms
        self.causes.append(Cause(name, what, other.step_ms, saved, without, change))

    # ------------------------------------------------------------------ links
    def slow_links(self) -> None:
        memory = self.hardware.memory_bytes_per_second
        levels = (
            ("slow link", "link_bytes_per_second", "inside a node", memory / LINK),
            ("slow network", "network_bytes_per_second", "between nodes", memory / NETWORK),
        )
        for name, quantity, where, usual in levels:
            rate = getattr(self.hardware, quantity)
            if rate >= SLOWER * usual:
                continue
            other = self.predict(self.staged, self.hardware.changed({quantity: usual}))
            gained = self._most_gained(other)
            if gained is None:
                continue
            kind, axes = gained
            what = f"{kind} over {axes} waits for links {where} that send {rate / 1e9:.3g} GB/s"
            without = f"with links of {usual / 1e9:.3g} GB/s"
            self.add(name, what, other, without, self._less_traffic(axes))

    def _most_gained(self, other: Prediction) -> tuple[str, str] | None:
        """The kind and the axes of the collectives that another prediction waits least for, against this one."""
        gained = Counter[tuple[str, str]]()
        for sign, predicted in ((1, self.predicted), (-1, other)):
            for row in predicted.exposed_ms:
                gained[row.kind, ".".join(row.axes)] += sign * row.exposed_ms  # type: ignore[assignment]
        best = max(gained, key=gained.__getitem__, default=None)
        if best is not None and gained[best] > 0:
            return best
        return ("send", self.staged.axis) if self.staged.axis else None

    def _less_traffic(self, axes: str) -> str:
        sent = f"give {axes} fewer ranks and another axis more"
        return f"{sent}, or hide it: more rows of the batch a rank for each byte that is sent"

    def shared_cores(self) -> None:
        contention = self.hardware.tables.contention
        if not contention.cores:
            return
        alone = {**contention.model_dump(), "cores": 0.0}
        other = self.predict(self.staged, self.hardware.changed({"contention": alone}))
        what = f"threads of collectives take the cores that compute for {self.predicted.taken_ms:.3f} ms"
        change = "fewer bytes to send, or cores beside those that compute"
        self.add("shared cores", what, other, "with cores of their own", change)

    def slower_ranks(self) -> None:
        if not self.hardware.tables.meetings.jitter_seconds:
            return
        other = self.predict(self.staged, self.hardware.changed({"meetings": {}}))
        what = f"ranks wait for those that come later to a collective, {self.predicted.met_ms:.3f} ms"
        change = "fewer collectives that compute waits for: buckets, or an axis whose collectives can be hidden"
        self.add("slower ranks", what, other, "with ranks that come at the same time", change)

    def across_nodes(self) -> None:
        """Axes whose groups span nodes although a node has room for them: each is laid innermost, in turn."""
        mesh, node = self.staged.mesh, self.hardware.accelerators_per_node
        spanning = self.hardware.on(mesh).network_axes
        best: tuple[Prediction, str, Mesh] | None = None
        for name, size in mesh.axes:
            if name not in spanning or size > node:
                continue
            moved = Mesh((*((other, n) for other, n in mesh.axes if other != name), (name, size)))
            if name in self.hardware.on(moved).network_axes:
                continue
            other = self.predict(dataclasses.replace(self.staged, mesh=moved), self.hardware)
            if best is None or other.step_ms < best[0].step_ms:
                best = other, name, moved
        if best is None:
            return
        other, name, moved = best
        nodes = len({rank // node for rank in mesh.group_of(0, name)})
        what = f"groups of {name} span {nodes} nodes of {node} ranks, and their collectives the network"
        without = f"with {name} inside of a node"
        self.add(f"{name} across nodes", what, other, without, f"write mesh: {moved}, the last axis lies closest")

    # ------------------------------------------------------------------ kernels
    def odd_sizes(self) -> None:
        even = self.predict(self.staged, self.hardware.changed({"unaligned_slowdown": 1.0}))
        padding = self._padding_ms()
        step = max(0.0, even.step_ms - padding)
        saved = self.predicted.step_ms - step
        if saved <= 0:
            return
        name, dim, size = self._odd_weight()
        multiple = max(1, self.hardware.row_alignment_bytes // 2)
        split = self.program.mesh.world_size if not name else self._split(name, dim)
        padded = -(-size // (multiple * split)) * multiple * split
        of = f"dim {dim} of {name} has {size:,} elements" if name else "rows of products have odd sizes"
        parts = f" in {split} shards" if split > 1 else ""
        what = (
            f"{of}{parts}, which is no multiple of {multiple}: matrix units run products of it slowly, or copies pad it"
        )
        change = f"pad it in the model, to {padded:,}" if name else "pad them in the model"
        align = "" if self.plan.align else "; or leave align: false out of the plan"
        self.causes.append(Cause("odd sizes", what, step, saved, f"with {padded:,}", change + align))

    def _padding_ms(self) -> float:
        """What copies take that pad the operands of products."""
        return sum(call.ms for call in self.predicted.calls if ".even" in call.call and self._pads(call.call))

    def _pads(self, name: str) -> bool:
        return any(
            info(node).name == name and node.target is torch.ops.aten.constant_pad_nd.default
            for graph, _ in graph_runs(self.staged, self.predicted.coordinate)
            for node in graph.calls()
        )

    def _odd_weight(self) -> tuple[str, int, int]:
        """The parameter with an odd dim that is largest, the dim and its size; "" where none has one."""
        multiple = max(1, self.hardware.row_alignment_bytes // 2)
        mesh, best = self.staged.body.mesh, ("", 0, 0)
        most = 0
        body = self.staged.body
        for port, value in zip(body.inputs, body.placeholders, strict=True):
            type = type_of(value)
            if port.role != "param" or type.ndim < 2 or type.numel() < most:
                continue
            for dim, (size, local) in enumerate(zip(type.shape, type.local_shape(mesh), strict=True)):
                if local % multiple and local > multiple:
                    best, most = (port.name, dim, size), type.numel()
        return best

    def _split(self, name: str, dim: int) -> int:
        body = self.staged.body
        for port, value in zip(body.inputs, body.placeholders, strict=True):
            if port.name == name:
                axes = [axis for atom in type_of(value).dims[dim] for axis in atom.axes]
                return body.mesh.size(axes) if axes else 1
        return 1

    def small_kernels(self) -> None:
        none = {"kernel_launch_seconds": DELAY, "kernel_gap_seconds": DELAY, "call_seconds": 0.0}
        free = self.hardware.changed(none)
        other, p, body = self.predict(self.staged, free), self.predicted, self.staged.body
        without = "with kernels that cost nothing to start"
        products = [node for node in body.calls() if op_name(node.target) in PRODUCTS]
        rows = max((type_of(operands(node)[0]).local_shape(body.mesh)[0] for node in products), default=0)
        each = p.step_ms / p.launches * 1e3 if p.launches else 0.0
        what = f"{p.launches:,} kernels, one in {each:.1f} us; products have {rows:,} rows"
        count = self.staged.lists.microbatches if self.staged.axis else body.microbatches
        if count == 1:
            change = "more rows a rank, fewer ranks, or fuse: true, where the plan lacks it"
            self.add("many small kernels", what, other, without, change)
            return
        # Larger ones also read weights less often. A pipeline of fewer stands still for longer.
        fewer = max(1, count // FEWER)
        if (larger := self._allowed(self._with_microbatches(fewer))) is not None and larger.step_ms < other.step_ms:
            other, without = larger, f"with {fewer} microbatches, each {count // fewer} times as large"
        change = f"fewer and larger microbatches: {count} now, of which each runs every kernel anew"
        self.add("tiny microbatches", what, other, without, change)

    def _with_microbatches(self, count: int) -> Plan:
        if self.plan.pipeline is None:
            return self.plan.model_copy(update={"accumulate": count})
        return self.plan.model_copy(update={"pipeline": self.plan.pipeline.model_copy(update={"microbatches": count})})

    # ------------------------------------------------------------------ recompute
    def recompute(self) -> None:
        if self.plan.recompute.mode == "none":
            return
        other = self._allowed(self.plan.model_copy(update={"recompute": Recomputing()}))
        if other is None:
            return
        peak = f"{human_bytes(other.peak_bytes)} at the peak instead of {human_bytes(self.predicted.peak_bytes)}"
        room = f", of {human_bytes(self.memory)}" if self.memory is not None else ""
        what = f"backward computes again what would fit: {peak}{room}"
        self.add("recompute", what, other, "without recompute", "leave recompute out of the plan")

    def _allowed(self, plan: Plan) -> Prediction | None:
        """The step by another plan; None where it cannot be compiled, or holds too much."""
        try:
            other = None if self.compiled is None else self.predict(self.compiled(plan), self.hardware)
        except ShardcError:
            return None
        return None if other is None or (self.memory is not None and other.peak_bytes > self.memory) else other
