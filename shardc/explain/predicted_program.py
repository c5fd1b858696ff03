"""What a program is predicted to take: a step on a machine, its lock, more ranks, failures, and what holds it up.

class Program(PredictedProgram)     `shardc.api`: what users have; it compiles anew where a question asks for it
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardc.compiler.graphs_auto import GraphsChoice, choose_graphs
from shardc.compiler.request import Request
from shardc.cost.failures import FailureCost, failure_cost
from shardc.cost.prediction import Prediction
from shardc.explain.bottleneck import Bottlenecks, bottlenecks
from shardc.explain.fusion import why_unfused
from shardc.explain.lock_report import LockReport, compare, with_fusion
from shardc.explain.lockfile import Lock, lock_of
from shardc.explain.scaling import Scaling, StepParts, parts_of, scaling
from shardc.ir import program as data
from shardc.ir.diagnostic import did_you_mean, error
from shardc.ir.hardware import Hardware
from shardc.ir.mesh import Mesh
from shardc.partition.checkpoint_bytes import RELAUNCH_SECONDS, recovery
from shardc.partition.prediction import predict
from shardc.partition.staged_program import StagedProgram
from shardc.plan import hardware as machines
from shardc.plan.schema import Plan
from shardc.plan.values import read_bytes
from shardc.runtime.execute.step_graph import warn_not_captured


class PredictedProgram(data.Program):
    """A program with its stages, and the request that it was compiled by: None of one from a file."""

    request: Request | None

    @property
    @abstractmethod
    def staged(self) -> StagedProgram: ...

    @abstractmethod
    def recompiled(self, request: Request) -> PredictedProgram: ...

    def lock(self, hardware: str | Path | Hardware | None = None) -> Lock:
        """What a step costs, as facts to keep in a file: `program.lock().write("shardc.lock")`.

        With `hardware`, as of `predict`, the predicted step is one of them.
        """
        if hardware is None:
            return lock_of(self, self.staged)
        return lock_of(self, self.staged, self.predict(hardware), self._machine(hardware))

    def check(
        self,
        lock: Lock | str | Path,
        hardware: str | Path | Hardware | None = None,
        *,
        tolerance: float | Mapping[str, float] = 0.0,
        origin: str = "",
    ) -> LockReport:
        """Compare with a lock, or the lockfile at a path: what costs more, by how much, where, and why. The step is
        predicted as it was then, on the hardware that the lock names, unless another is given.

        `tolerance` is the share by which amounts may grow: of all, or by kind, as {"memory": 0.02}. Raises ShardcError:
        SC411 for what is no lockfile, SC412 for one of another version, plan, mesh or batch, SC413 for a tolerance.
        """
        before = lock if isinstance(lock, Lock) else Lock.read(lock)
        origin = origin or ("" if isinstance(lock, Lock) else str(lock))
        chosen = before.predicted_on if hardware is None else hardware
        if hardware is None and chosen is not None and chosen not in machines.names():
            message = f"the lockfile predicts a step on '{chosen}', which is no hardware that shardc brings"
            hint = "give the file that it was written with: --hardware FILE, or check(..., hardware=)"
            raise error("SC412", message, location=origin or None, hint=hint)
        report = compare(before, self.lock(chosen), tolerance, origin)
        return with_fusion(report, lambda: why_unfused(self, self.staged))

    def predict(self, hardware: str | Path | Hardware | None = None, *, graphs: bool = False) -> Prediction:
        """What a step takes on a machine: its time, tokens a second, MFU, exposed collectives, bubble, peak memory.

            print(program.predict("h200"))

        hardware    the name of a file in configs/hardware, the path of such a file, or a `Hardware`; None: the plan's
        graphs      of a step that is replayed from a CUDA graph, which does not wait for Python; whether `launch` can
                    capture it is not asked

        Raises ShardcError (SC208) for a name that is not known, or a file that describes no hardware.
        """
        if hardware is None:
            written: Mapping[str, Any] = self.plan.get("hardware", {})
            return predict(self.staged, self.reference, Hardware.of(written), "the plan's hardware", replayed=graphs)
        name = "this hardware" if isinstance(hardware, Hardware) else Path(hardware).stem
        return predict(self.staged, self.reference, machines.hardware(hardware), name, replayed=graphs)

    @property
    def graphs_choice(self) -> GraphsChoice:
        """What `launch(graphs="auto")` goes by: a step's predicted time on the plan's hardware with and without CUDA
        graphs. A pipeline's is not captured, whatever is predicted."""
        return choose_graphs(self.staged, self.reference, Hardware.of(self.plan.get("hardware", {})))

    def _replays(self) -> bool:
        """Whether steps are worth replaying (`graphs_choice`); where the plan names no GPU, a warning, and no."""
        if Hardware.of(self.plan.get("hardware", {})).device == "gpu":
            return self.graphs_choice.replayed
        warn_not_captured("the plan names no hardware that is a GPU, for which steps could be predicted")
        return False

    def failures(
        self,
        node_mtbf_hours: float,
        hardware: str | Path | Hardware | None = None,
        *,
        relaunch_seconds: float = RELAUNCH_SECONDS,
        restarted: PredictedProgram | None = None,
    ) -> FailureCost:
        """What nodes that fail cost: a save and a restart in seconds, how often to save, and the share of time that is
        work which counts, for nodes that run so many hours between two failures.

        hardware            as of `predict`; its `storage_bytes_per_second` is what a rank writes to and reads from
        relaunch_seconds    from a failure until new processes have met
        restarted           the program of the mesh that the job restarts on, if that is another

        Raises ShardcError (SC208) for hours that are none, and for hardware as `predict` does.
        """
        chosen = self._machine(hardware)
        other = None if restarted is None else restarted.staged
        nodes = -(-self.mesh.world_size // chosen.accelerators_per_node)
        step = self.predict(chosen).step_ms / 1e3
        return failure_cost(recovery(self.staged, chosen, relaunch_seconds, other), nodes, node_mtbf_hours, step)

    def scaling(self, axis: str, sizes: Sequence[int], hardware: str | Path | Hardware | None = None) -> Scaling:
        """Why more ranks along an axis are not as many times as fast: the step, compiled for each of these sizes, and
        where what is lost against the ideal went. `hardware` is that of `predict`.

        Raises ShardcError: SC201 for an axis that the mesh does not have, SC210 for a size, SC105 where the program
        came from a file, and what compiling for a size raises.
        """
        if self.request is None:
            message = "the program came from a file, without its model, so it cannot be compiled for another mesh"
            raise error("SC105", message, hint="give the model that it was compiled from")
        if axis not in self.mesh.names:
            hint = did_you_mean(axis, self.mesh.names, "axes of the mesh")
            raise error("SC201", f"the mesh ({self.mesh}) has no axis '{axis}'", hint=hint)
        meshes = [Mesh((name, size if name == axis else old) for name, old in self.mesh.axes) for size in sizes]
        steps: list[tuple[int, StepParts]] = []
        chosen, name = self._machine(hardware), ""
        for size, mesh in zip(sizes, meshes, strict=True):
            other = self if mesh == self.mesh else self.recompiled(replace(self.request, mesh=mesh, watch=None))
            predicted = other.predict(hardware)
            name = predicted.hardware
            steps.append((size, parts_of(other.staged, predicted, chosen)))
        return scaling(axis, name, steps)

    def bottlenecks(
        self, hardware: str | Path | Hardware | None = None, *, memory: int | str | None = None
    ) -> Bottlenecks:
        """What holds the step up, the worst first: slow links, an axis across nodes, odd sizes, small kernels,
        recompute that memory does not ask for. Each with the step that there would be without it, and what to change.

        hardware    as of `predict`
        memory      what a rank may hold, in bytes or as "80GiB": whether the program fits is said first; without it,
                    recompute is weighed as if all fitted
        """
        chosen = self._machine(hardware)

        def compiled_by(plan: Plan) -> StagedProgram:
            assert self.request is not None
            return self.recompiled(replace(self.request, plan=plan, watch=None)).staged

        return bottlenecks(
            self,
            self.staged,
            chosen,
            lambda staged, machine: predict(staged, self.reference, machine),
            None if self.request is None else compiled_by,
            None if memory is None else read_bytes(memory),
        )

    def _machine(self, hardware: str | Path | Hardware | None) -> Hardware:
        written: Mapping[str, Any] = self.plan.get("hardware", {})
        return Hardware.of(written) if hardware is None else machines.hardware(hardware)
