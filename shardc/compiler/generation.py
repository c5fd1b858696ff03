"""The requests for the two programs of generation: of the model, plan and mesh of the program that holds its state.

decode     compiled first: propagation places the cache
prefill    fills the cache as it lies there; of the same rows, or of fewer that join those that are decoded
"""

from __future__ import annotations

from shardc.compiler.binding import bind_precision, collect_plan
from shardc.compiler.request import Request
from shardc.compiler.step_plan import Held, step_plan
from shardc.frontend.cached_model import CachedModel, CausalModel, Form, cache_tensors
from shardc.ir.graph import Graph, type_of
from shardc.ir.microbatch import CACHE
from shardc.ir.types import Atom, Dim, TensorType
from shardc.partition.staged_program import StagedProgram
from shardc.plan.schema import Plan


def decode_request(request: Request, form: Form, like: StagedProgram) -> Request:
    """Raises ShardcError (SC571) for a model that does not generate."""
    causal = CausalModel.of(request.model)
    plan = step_plan(collect_plan(request.model, request.plan))
    tensors = cache_tensors(causal, form, precision=bind_precision(plan)[0])
    return _step(request, plan, like, CachedModel(causal, form, True, tensors), ())


def prefill_request(request: Request, form: Form, like: StagedProgram, decode: Graph) -> Request:
    """The prefill fills what the decode program reads, as it lies there."""
    pairs = zip(decode.inputs, decode.placeholders, strict=True)
    held = [(port.name, type_of(n)) for port, n in pairs if port.name.startswith(CACHE) and n.users]
    sized = tuple((name, _sized(name, type, form)) for name, type in held)
    tensors = {name: (type.shape, type.dtype) for name, type in sized}
    plan = step_plan(collect_plan(request.model, request.plan))
    model = CachedModel(CausalModel.of(request.model), form, False, tensors)
    return _step(request, plan, like, model, sized)


def _sized(name: str, type: TensorType, form: Form) -> TensorType:
    """A tensor of a cache of the rows and the length of a form, placed as this one."""
    sizes = {0: form.rows} | ({2: form.length} if name.endswith((".keys", ".values")) else {})
    changed = {d: size for d, size in sizes.items() if size != type.shape[d]}
    dims = (_dim(dim, changed[d]) if d in changed else dim for d, dim in enumerate(type.dims))
    return TensorType(type.dtype, tuple(dims), type.partial)


def _dim(dim: Dim, size: int) -> Dim:
    axes = dim[0].axes if dim else ()
    return () if size == 1 else (Atom(size, axes),)


def _step(request: Request, plan: Plan, like: StagedProgram, model: CachedModel, held: Held) -> Request:
    batch = model.sample()
    return Request(model, batch, request.mesh, plan, mode="eval", like=like, generates=True, cache=held)
