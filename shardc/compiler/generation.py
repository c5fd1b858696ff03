"""The requests for the two programs of generation: of the model, plan and mesh of the program that holds its state.

decode     compiled first: propagation places the cache
prefill    fills the cache as it lies there
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardc.compiler.binding import bind_precision, collect_plan
from shardc.compiler.request import Request
from shardc.compiler.step_plan import Held, step_plan
from shardc.frontend.cached_model import CachedModel, CacheTensors, CausalModel, Form, cache_tensors
from shardc.ir.graph import Graph, type_of
from shardc.ir.microbatch import CACHE
from shardc.partition.staged_program import StagedProgram


@dataclass(frozen=True)
class StepRequests:
    """What compiles the two programs, of which the decode program says how the prefill finds the cache."""

    request: Request  # but for its model and batch
    causal: CausalModel
    form: Form
    tensors: CacheTensors

    @classmethod
    def of(cls, request: Request, form: Form, like: StagedProgram) -> StepRequests:
        """Raises ShardcError (SC571) for a model that does not generate."""
        causal = CausalModel.of(request.model)
        plan = step_plan(collect_plan(request.model, request.plan))
        tensors = cache_tensors(causal, form, precision=bind_precision(plan)[0])
        common = Request(request.model, None, request.mesh, plan, mode="eval", like=like, generates=True)
        return cls(common, causal, form, tensors)

    def decode(self) -> Request:
        return self._step(True, self.tensors, ())

    def prefill(self, decode: Graph) -> Request:
        """The prefill fills what the decode program reads, as it lies there."""
        pairs = zip(decode.inputs, decode.placeholders, strict=True)
        held = tuple((port.name, type_of(n)) for port, n in pairs if port.name.startswith(CACHE) and n.users)
        return self._step(False, {name: self.tensors[name] for name, _ in held}, held)

    def _step(self, decodes: bool, tensors: CacheTensors, held: Held) -> Request:
        model = CachedModel(self.causal, self.form, decodes, tensors)
        return replace(self.request, model=model, batch=model.sample(), cache=held)
