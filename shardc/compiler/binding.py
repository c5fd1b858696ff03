"""What `compile` is given, checked and bound to the traced model: patterns to tensors, options to passes.

All that is wrong with a plan's annotations is said at once, whatever kinds of tensor they are of.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from torch import nn

from shardc.compiler.pass_pipeline import Options
from shardc.frontend.ingest import rank_of
from shardc.frontend.model_tree import named_modules
from shardc.frontend.precision import Precision
from shardc.frontend.trace import Traced
from shardc.ir.annotation import Annotation, match, matches
from shardc.ir.diagnostic import Diagnostic, ShardcError, error
from shardc.ir.graph import Graph
from shardc.ir.hardware import Hardware
from shardc.ir.mesh import Mesh
from shardc.ir.microbatch import CACHE
from shardc.ir.placement import P
from shardc.passes.communication.bucket import Bucket
from shardc.passes.communication.decompose import Decompose
from shardc.passes.communication.late_gradients import LateGradients
from shardc.passes.communication.prefetch import Prefetch
from shardc.passes.communication.split_batch import SplitBatch
from shardc.passes.context.divide_attention import DivideAttention
from shardc.passes.context.merge_keys import MergeKeys
from shardc.passes.fusion.fuse import Fuse
from shardc.passes.gemm_padding import Align
from shardc.passes.memory.offload import Offload
from shardc.passes.memory.offload_states import OffloadStates
from shardc.passes.memory.recompute import Recompute
from shardc.passes.normalize.limit_experts import LimitExperts
from shardc.passes.normalize.quantize import Quantize
from shardc.passes.sharding.assign import Assign
from shardc.passes.sharding.seed import Bound
from shardc.passes.sharding.store import Store
from shardc.plan.schema import Plan, Storage
from shardc.plan.values import DTYPES, FP8_DTYPES

PLAN = "__shardc_plan__"  # the attribute of a module, or of its class, that holds its own plan


def collect_plan(model: nn.Module, plan: Plan | Mapping[str, Any] | str | Path | None) -> Plan:
    """The plans of the model's classes, of the model and of the argument, merged in this order: later ones win."""
    merged = Plan()
    for fqn, module in named_modules(model):
        class_plan = getattr(type(module), PLAN, None)
        if class_plan is not None:
            merged = merged.merge(_under(fqn, class_plan))
        attached = module.__dict__.get(PLAN)
        if attached is not None:
            merged = merged.merge(_under(fqn, attached))
    return merged if plan is None else merged.merge(read_plan(plan))


def bind_passes(plan: Plan, hardware: Hardware, options: Options, split: Iterable[str] = ()) -> Options:
    """Options with the passes that a plan asks for, and the hardware that they weigh their choices for. `split` are the
    inputs that are split into microbatches."""
    offload = Offload(plan.offload.activations, plan.offload.least, hardware)
    return replace(
        options,
        context=plan.context,
        hardware=hardware,
        limit=LimitExperts(plan.experts.factor, plan.experts.load or plan.experts.factor is not None),
        quantize=bind_quantize(plan),
        attention=DivideAttention(plan.context.axis, plan.context.attention, hardware),
        keys=MergeKeys(plan.context.axis, plan.context.keys, plan.context.attention, hardware),
        assign=Assign(plan.experts.dispatch, hardware),
        recompute=Recompute(
            **plan.recompute.model_dump(), hardware=hardware, halves=plan.overlap.parts, offload=offload
        ),
        offload=offload,
        states=OffloadStates(plan.offload.optimizer, plan.offload.least, hardware),
        split=SplitBatch(plan.overlap.parts > 1 and bool(split), frozenset(split), hardware, by_time=not plan.symbols),
        align=Align(plan.align, hardware),
        late=LateGradients(plan.overlap.late_gradients, hardware, by_time=not plan.symbols),
        decompose=Decompose(plan.overlap.decompose is True, any_size=bool(plan.symbols)),
        bucket=Bucket(plan.bucket_bytes),
        prefetch=Prefetch(plan.overlap.prefetch),
        fuse=Fuse(bool(plan.fuse.enabled), plan.fuse.left, plan.fuse.templates, hardware),
    )


def bind(plan: Plan, traced: Traced, mesh: Mesh) -> list[Bound]:
    """Match the plan's patterns against the traced names, and check that placements fit."""
    state = [i for i in traced.inputs if i.role in ("param", "buffer") and not i.name.startswith(CACHE)]
    aliases = {i.name: i.aliases for i in state}
    batch = [i.name for i in traced.inputs if i.role == "input"]
    calls: dict[str, list[str]] = {}  # of a module that is called more than once, each is annotated
    for call in traced.modules:
        base = call.partition("#")[0]
        calls.setdefault(base if base in traced.modules else call, []).append(call)
    shapes = {i.name: rank_of(i.node) for i in traced.inputs}
    shapes |= {name: rank_of(node) for name, node in traced.modules.items()}
    outputs = {o.name: rank_of(o.node) for o in traced.outputs if o.role == "output"}
    bounds: list[Bound] = []
    problems: list[Diagnostic] = []
    for kind, key, names in (
        ("param", "params", [i.name for i in state]),
        ("input", "inputs", batch),
        ("activation", "activations", list(calls)),
        ("output", "outputs", list(outputs)),
    ):
        by_pattern = plan.annotations(cast(Any, key))
        matched, wrong = matches(by_pattern, names, key, aliases if kind == "param" else None)
        problems += wrong
        refused: set[str] = set()  # a pattern that fits no layer is said once
        calls_of = calls if kind == "activation" else {}
        named = [(name, annotation) for base, annotation in matched.items() for name in calls_of.get(base, [base])]
        for name, annotation in named:
            ndim = (outputs if kind == "output" else shapes)[name]
            try:
                annotation.check(mesh, ndim, name)
            except ShardcError as unfit:
                problems += unfit.diagnostics if annotation.pattern not in refused else ()
                refused.add(annotation.pattern)
            bounds.append(Bound(kind, name, annotation.placement.on(ndim), annotation.origin, annotation.pattern))
    if problems:
        raise ShardcError(*problems)
    return bounds


def bind_precision(plan: Plan) -> tuple[Precision | None, bool]:
    """The dtypes that a plan asks for, and whether to look for gradients that are not finite."""
    dtypes, mode = plan.precision, plan.nonfinite
    if dtypes is None:
        return None, mode in ("skip", "raise")
    precision = Precision(
        DTYPES[dtypes.compute],
        DTYPES[dtypes.master],
        DTYPES[dtypes.reduce],
        dtypes.keep,
        dtypes.loss_scale,
        dtypes.growth_interval,
    )
    if precision.scaled and mode not in (None, "skip"):
        hint = "leave nonfinite out: an overflow is how the loss's scale finds its size"
        raise error("SC208", f"float16 skips steps that overflow, and cannot {mode} them", hint=hint)
    return precision, precision.scaled or mode in ("skip", "raise")


def bind_quantize(plan: Plan) -> Quantize:
    """The pass that makes products of 8-bit floats, where a plan asks for them."""
    if plan.precision is None or (linear := plan.precision.linear) is None:
        return Quantize()
    return Quantize(
        DTYPES[plan.precision.compute], linear.scale, FP8_DTYPES[linear.gradients], linear.history, linear.keep
    )


def bind_storage(storage: Storage, traced: Traced | Graph, mesh: Mesh) -> tuple[Store, frozenset[str]]:
    """The storage pass that a plan asks for, and the parameters that stay gathered for backward."""
    mesh.resolve(storage.axes)
    if storage.zero and not storage.axes:
        hint = "write storage: {zero: 3, axes: [dp]}"
        raise error("SC208", f"storage of zero {storage.zero} names no axes to shard over", hint=hint)
    params = [i for i in traced.inputs if i.role == "param"]
    names, aliases = [i.name for i in params], {i.name: i.aliases for i in params}
    placed = match(storage.params.values(), names, "params", aliases)
    bound = tuple(Bound("param", name, a.placement, a.origin) for name, a in placed.items())
    if isinstance(storage.regather, bool):
        keep = frozenset() if storage.regather else frozenset(names)
    else:
        patterns = [Annotation(pattern, P()) for pattern in storage.regather]
        keep = frozenset(
            n for n, a in match(patterns, names, "params", aliases).items() if not storage.regather[a.pattern]
        )
    if storage.zero in (1, 2):  # what these gather is the cast of a master copy, once a step
        keep |= frozenset(names) - placed.keys()
    return Store(storage.zero, storage.axes, bound), keep


def idle_axes(traced: Traced, mesh: Mesh, bound: Sequence[Bound], store: Store) -> list[Diagnostic]:
    """A warning for each axis of the mesh that no annotation uses, or one for the whole mesh."""
    axes = {axis for binding in (*bound, *store.bound) for axis in binding.placement.axes}
    axes |= set(store.axes) if store.zero else set()
    used = {axis.partition(":")[0] for axis in axes}
    idle = [axis for axis in mesh.names if axis not in used and mesh.size(axis) > 1]
    if not idle:
        return []
    name = next((i.name for i in traced.inputs if i.role == "input"), "x")
    if not used:
        message = f"nothing is placed: all {mesh.world_size} ranks of the mesh ({mesh}) compute one and the same step"
        return [Diagnostic("SC215", message, "warning", hint=_use(idle[0], name, None))]
    placed = next((str(b.placement) for b in bound if (b.kind, b.name) == ("input", name)), None)
    return [
        Diagnostic("SC215", f"nothing is placed over axis '{axis}': {_same(mesh.size(axis))}", "warning", hint=hint)
        for axis, hint in ((axis, _use(axis, name, placed)) for axis in idle)
    ]


def whole_gradients(plan: Plan) -> list[Diagnostic]:
    """What ZeRO promises of gradients and several microbatches do not keep; stage 3 is asked for other things too."""
    count, zero = plan.microbatches, plan.storage.zero
    if zero < 2 or count == 1:
        return []
    message = f"'zero: {zero}' does not shard the gradients of a step of {count} microbatches"
    cause = "each rank adds them up whole, and they are reduced once, after the last microbatch"
    less = "leave out accumulate" if plan.accumulate > 1 else "add stages: a rank has the gradients of its own alone"
    hint = f"to hold less, {less}" if zero == 3 else f"write zero: 1, which holds as much; to hold less, {less}"
    diagnostic = Diagnostic("SC216", message, "warning" if zero == 2 else "note", cause=cause, hint=hint)
    return [diagnostic if plan.pipeline is None else plan.pipeline.located(diagnostic, "microbatches")]


def without_gradient(traced: Traced) -> list[Diagnostic]:
    """A note of the parameters that the loss does not depend on."""
    if not traced.unused:
        return []
    names = ", ".join(traced.unused[:4]) + (f" and {len(traced.unused) - 4} more" if len(traced.unused) > 4 else "")
    message = f"the loss does not depend on {names}: no gradient"
    hint = "freeze what is not trained: requires_grad_(False)"
    return [Diagnostic("SC108", message, "note", hint=hint)]


def _same(ranks: int) -> str:
    return f"its {ranks} ranks compute one and the same"


def _use(axis: str, name: str, placed: str | None) -> str:
    """The hint for the use of an idle axis, where the batch is placed over others already or not at all."""
    first, *rest = (placed or "-").split(", ")
    placement = ", ".join([axis if first in ("-", "?") else f"{first}.{axis}", *rest])
    placement_hint = f'place the batch, as in plan={{"inputs": {{"{name}": "{placement}"}}}}, or parameters'
    stages = f"put stages of the model along it: pipeline: {{axis: {axis}, microbatches: 8}}"
    return f"{stages}; or {placement_hint}" if axis.startswith(("pp", "pipe", "stage")) else placement_hint


def check_module(model: object) -> None:
    """Raise SC110 unless it is a module."""
    if not isinstance(model, nn.Module):
        what, hint = f"a {type(model).__name__}", "write it as the forward of a module"
        if isinstance(model, type):
            what, hint = f"{model.__name__}, a class,", "make an instance of it first"
        raise error("SC110", f"{what} is no nn.Module", hint=hint)
    try:
        deque(model.modules(), 0)
    except RecursionError:
        hint = "keep blocks in one nn.Sequential or nn.ModuleList"
        raise error("SC110", "the model's modules are nested too deeply, one in another", hint=hint) from None


def check_loss(loss: object) -> None:
    """Raise SC102 unless it can be called as a loss."""
    if loss is None:
        return
    hint = "pass a function (output, batch) -> scalar tensor"
    if not callable(loss):
        raise error("SC102", f"the loss is no function, but of type {type(loss).__name__}", hint=hint)
    try:
        takes = inspect.signature(loss)
    except (TypeError, ValueError):  # a builtin may have none
        return
    try:
        takes.bind(None, None)
    except TypeError as problem:
        raise error("SC102", f"the loss does not take (output, batch): {problem}", hint=hint) from None


def read_plan(plan: object) -> Plan:
    """A plan from any form that a user may give."""
    if isinstance(plan, Plan):
        return plan
    if isinstance(plan, Mapping):
        return Plan.from_dict(cast("Mapping[str, Any]", plan))
    if isinstance(plan, str | Path):
        return Plan.load(plan)
    raise error("SC208", f"{plan!r} is no plan", hint="pass a Plan, a dict of its keys, or the path of a YAML file")


def read_mesh(mesh: Any) -> Mesh:
    """A mesh from any form that a user may give."""
    if mesh is None:
        raise error(
            "SC210", "there is no mesh", hint='pass mesh=Mesh(dp=2, tp=2), or write "mesh: dp=2, tp=2" in the plan'
        )
    if isinstance(mesh, Mesh):
        return mesh
    bound = Plan.of(mesh=mesh).mesh
    assert bound is not None
    return bound


def _under(fqn: str, plan: Plan) -> Plan:
    """A module's own plan seen from the root: patterns get the module's FQN in front; inputs are the root's only."""
    if not fqn:
        return plan

    def prefixed(annotations: Iterable[Annotation]) -> dict[str, Annotation]:
        return {
            f"{fqn}.{a.pattern}" if a.pattern else fqn: Annotation(
                f"{fqn}.{a.pattern}" if a.pattern else fqn, a.placement, a.origin
            )
            for a in annotations
        }

    return Plan.of(params=prefixed(plan.annotations("params")), activations=prefixed(plan.annotations("activations")))
