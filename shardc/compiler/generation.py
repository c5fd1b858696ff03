"""The requests for the two programs of generation: of the model, plan and mesh of the program that holds its state.

decode     compiled first: propagation places the cache
prefill    fills the cache as it lies there
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from shardc.compiler.binding import bind_precision, collect_plan
from shardc.compiler.request import Request
from shardc.compiler.step_plan import Held, step_plan
from shardc.frontend.cached_model import CachedModel, CausalModel, Form, cache_tensors
from shardc.ir.graph import Graph, type_of
from shardc.ir.microbatch import CACHE
from shardc.partition.staged_program import StagedProgram


class StepRequests(NamedTuple):
    """What compiles the two programs; the prefill once it is told how the cache is held."""

    prefill: Request
    decode: Request

    @classmethod
    def of(cls, request: Request, form: Form, like: StagedProgram) -> StepRequests:
        """Raises ShardcError (SC571) for a model that does not generate."""
        causal = CausalModel.of(request.model)
        plan = step_plan(collect_plan(request.model, request.plan))
        tensors = cache_tensors(causal, form, precision=bind_precision(plan)[0])
        request = Request(request.model, None, request.mesh, plan, mode="eval", like=like, generates=True)

        def step(decodes: bool) -> Request:
            model = CachedModel(causal, form, decodes, tensors)
            return replace(request, model=model, batch=model.sample())

        return cls(step(False), step(True))

    def filling(self, cache: Held) -> Request:
        """The prefill, with a cache that is held so."""
        return replace(self.prefill, cache=cache)


def held_cache(body: Graph) -> Held:
    """How a program takes the tensors of the cache."""
    pairs = zip(body.inputs, body.placeholders, strict=True)
    return tuple((port.name, type_of(node)) for port, node in pairs if port.name.startswith(CACHE))
