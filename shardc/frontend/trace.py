"""`trace`: an `nn.Module`, a sample batch and a loss become one graph of ATen ops, forward and backward.

The model runs once on fake tensors (shapes without data) as a function of its parameters, its buffers and the batch:

    joint(params, buffers, batch, seed) = loss, d loss / d params, buffers afterwards

and what ATen sees of it, autograd's backward included, is the graph. If anything was mutated, the graph is traced
once more without mutation; changed buffers are outputs then. Tied parameters are one input and one gradient.
Beside it, `substitution` puts the graph's inputs in the place of the model's own tensors, `op_overrides` says which ops
are substituted, `loss_gradients` how gradients and hooks become part of the graph, `buffers` what forward makes of
buffers, `traced_graph` what nodes and calls of modules are called, `provenance` how nodes know their module and source
line, `python_state`, `state_holders` and `carried_state` what becomes of Python values that a step leaves behind,
`python_random` that Python's random numbers are in no graph. Longer than 400 lines: what is recorded once, or tried
again with other decisions, is one sequence of calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, fx, nn

from shardc import torch_compat
from shardc.frontend.buffers import buffers_after, refuse_asked
from shardc.frontend.carried_state import carried, kept_in_caches, refuse_written_constants
from shardc.frontend.chunk_states import CarriedChunks, written_in
from shardc.frontend.cleanup import clean, constants_as_inputs
from shardc.frontend.expert_notes import computed_for_all, refuse_other
from shardc.frontend.experts_form import grouped
from shardc.frontend.few_layers import Unrecorded, long_lists
from shardc.frontend.function_caches import forget, nodes_remembered
from shardc.frontend.layer_drop import LayerDrop, patterns
from shardc.frontend.library_experts import library_experts
from shardc.frontend.library_masks import masks_as_eager, packed_as_eager
from shardc.frontend.local_mutation import rewritten
from shardc.frontend.loop_notes import noting
from shardc.frontend.loss_gradients import Hooks, gradients
from shardc.frontend.model_outputs import output_tensors
from shardc.frontend.model_tree import named_modules, named_tensors
from shardc.frontend.op_overrides import SMALL_DECOMPOSITIONS, WHOLE_OPS, RandomOps, overrides, undifferentiated
from shardc.frontend.precision import Casts, Precision, place_casts, refuse_mixed
from shardc.frontend.provenance import Origin, Origins, first_tensor
from shardc.frontend.python_random import Generators
from shardc.frontend.python_state import Snapshot, left_tensors, refuse_kept
from shardc.frontend.rolled_loops import active
from shardc.frontend.sample_call import Call
from shardc.frontend.sample_values import SampleValues, assumed
from shardc.frontend.spec_augment import drawn_in_each_step
from shardc.frontend.substitution import StandIns, refuse_arrays, refuse_frozen, refuse_shared_memory, written_inputs
from shardc.frontend.traced import Traced, TracedInput, TracedOutput
from shardc.frontend.traced_graph import calls_of, copied, rewrite_meta
from shardc.frontend.unrecorded_layers import UnrecordedLayers
from shardc.frontend.unsupported import admit_foreign, is_loss, refuse_no_scalar, refuse_unfit, untrained
from shardc.ir.diagnostic import Diagnostic, ShardcError, error
from shardc.ir.microbatch import SCALE, SHARE
from shardc.ir.program import CONSTANT
from shardc.ir.units import UnequalError

aten = torch.ops.aten
NOTHING = "return what is to be seen: a tensor, or a tuple, a dict or a dataclass of tensors"


def trace(
    model: nn.Module,
    batch: Any,
    loss: Callable[[Any, Any], Tensor] | None = None,
    *,
    with_outputs: bool | Literal["scalars"] = False,
    microbatches: int = 1,
    weighted: bool = False,
    precision: Precision | None = None,
    forward_only: bool = False,
    all_layers: bool = False,
    checked: bool = True,
) -> Traced:
    """The joint graph of one training step of `model` in its present mode (train or eval).

    `batch` is what forward takes: a tensor, a tuple of positional arguments, or a dict of keyword arguments; what
    forward does not take is for `loss` alone. Its tensors may be real, meta or fake. `loss(output, batch)` returns the
    scalar to differentiate; without it, the model must (alone, first, or as `loss`). Of a step of several
    `microbatches` the batch is one, and the loss its term of their mean; `weighted`, it is multiplied by an input, the
    microbatch's share. Without `precision` every tensor has the dtype that the model gives it. `forward_only`, as under
    `no_grad`: there are no gradients, and a loss only where there is one. `with_outputs` keeps the tensors that the
    model returns, or their scalars.

    Of many equal layers few are recorded (`unrecorded_layers`), unless `all_layers` are. Where that fails, forward
    runs once more, to record all: what it changes then that no `Snapshot` sees (of other modules than the model's, say)
    is changed twice. What is not `checked` may fail later: `traced.layers.check()`.
    """

    def traced(unrecorded: Unrecorded) -> Traced:
        call = Call(model, batch, loss)
        refuse_unfit(model, dict(zip(call.names, call.tensors, strict=True)))
        return _traced(
            _Step(model, call, loss, with_outputs, microbatches, weighted, precision, forward_only, unrecorded)
        )

    if not all_layers and (lists := long_lists(model)):
        unrecorded = Unrecorded(lists)
        try:
            with torch_compat.settings_kept():
                found = traced(unrecorded)
                if checked and found.layers is not None:
                    found.layers.check()
                return found
        except Exception:  # also errors of the model's own, which are told as they are where all layers are recorded
            unrecorded.layers = None  # the tensors of this trace
    return traced(Unrecorded({}))


def _traced(step: _Step) -> Traced:
    """The graph of a step. Raises UnequalError where layers that are left out have to be recorded."""
    model, call = step.model, step.call
    generators = Generators(model, step.before)
    try:
        gm, inputs, origins = step.record()
        admit_foreign(origins)
        step.before.clear_caches()
        changed_attributes = frozenset(change.attribute for change in step.before.changes())
        notes = [*assumed(gm.graph, lambda node: origins.of.get(node, Origin())), *step.loops.values()]
        notes += computed_for_all(step.values.loops, lambda node: origins.of.get(node, Origin()))
        diagnostics = notes + kept_in_caches(model, gm, step.remembered, step.constant())
        step.refuse_single(diagnostics)
        diagnostics += carried(model, step.before, gm, origins, step.left, lambda: copy(step).record()[0])
        _try_decisions(step, gm)
        _try_without_rows(step, gm, origins)
        diagnostics += [] if step.forward_only else step.layers.notes()
    except BaseException:
        forget(step.recorded.tensors())
        raise
    finally:
        step.before.restore()
        random_diagnostics = generators.drawn()
        generators.restore()
    diagnostics += random_diagnostics
    refuse_kept(step.recorded.held(but=[*inputs, *([] if (seed := step.random.seed) is None else [seed])]))
    batch_tensors = dict(zip(call.names, call.tensors, strict=True))
    if written := [*step.written_buffers, *step.written]:
        refuse_shared_memory(model, batch_tensors, written)
    diagnostics += written_inputs(step.written, batch_tensors)
    if any(torch_compat.mutates(node) for node in gm.graph.nodes):
        refuse_written_constants(gm, origins)
        if not rewritten(gm.graph, step.mode, origins.replaced, set(step.decompositions())):
            # Fresh ones: forward may have changed the shape of an input (`unsqueeze_`).
            gm, origins = _without_mutation(gm, step.fakes(), step.mode, origins)
    found = {"diagnostics": tuple(diagnostics), "changed_attributes": changed_attributes, "before": step.restored()}
    return replace(_finish(step, gm, origins), **found)


def _try_decisions(step: _Step, gm: fx.GraphModule) -> None:
    """Where layers are dropped at random, see that a trace without them is the graph without them."""
    for forced in patterns() if step.layers.asked else ():
        tried = copy(step)
        tried.forced, tried.forward_only = forced, True  # without any layer, there may be nothing to train
        other, _, _ = tried.record()
        first, second = (cast("list[fx.Node]", one.graph.output_node().args[0])[0] for one in (gm, other))
        step.layers.refuse_other(gm.graph, first, other.graph, second, forced)


def _try_without_rows(step: _Step, gm: fx.GraphModule, origins: Origins) -> None:
    """Where forward asks whether experts have tokens, see that a trace in which none has is this one without rows."""
    if step.values.loops.asked:
        tried = copy(step)
        tried.without_rows, tried.forward_only = True, True
        other, _, _ = tried.record()
        results = [
            {role: node for role, node in zip(one.results, nodes_of(graph), strict=True) if role[0] != "grad"}
            for one, graph in ((step, gm.graph), (tried, other.graph))
        ]
        loops = step.values.loops, tried.values.loops
        refuse_other((gm.graph, other.graph), results, loops, lambda node: origins.of.get(node, Origin()))


def nodes_of(graph: fx.Graph) -> list[fx.Node]:
    """What a recording returns."""
    return list(cast("list[fx.Node]", graph.output_node().args[0]))


class _Step:
    """The joint function and its inputs."""

    def __init__(
        self,
        model: nn.Module,
        call: Call,
        loss: Callable[[Any, Any], Tensor] | None,
        with_outputs: bool | Literal["scalars"],
        microbatches: int,
        weighted: bool,
        precision: Precision | None,
        forward_only: bool,
        unrecorded: Unrecorded,
    ) -> None:
        self.unrecorded = unrecorded
        self.model, self.call, self.loss, self.with_outputs = (model, call, loss, with_outputs)
        self.microbatches, self.weighted, self.forward_only = microbatches, weighted, forward_only
        self.precision = precision
        self.casts = Casts(precision, model, call.names) if precision is not None else None
        self.scaled = precision is not None and precision.scaled and not forward_only
        self.mode = torch_compat.fake_mode(remembers=not unrecorded.lists)
        self.random = RandomOps()
        self.recorded = torch_compat.Recorded()  # also of copies of this step
        self.params, self.buffers = named_tensors(model)
        self.trainable = [name for name, p in self.params.items() if p.requires_grad]
        self.results: list[tuple[Literal["loss", "grad", "buffer", "output"], str]] = []  # of joint, in order
        self.in_loss = False  # the loss function is being called
        self.unused: tuple[str, ...] = ()
        self.written: tuple[str, ...] = ()  # inputs that forward changes in place
        self.written_buffers: list[str] = []
        self.hooks = Hooks.of({} if forward_only else self.params)
        self.before = Snapshot(model, loss, *self.hooks.functions)
        self.forced: Callable[[int], bool] | None = None  # which of the layers are dropped that are so at random
        self.without_rows = False  # no expert has tokens, wherever forward asks
        self.left: dict[int, fx.Node] = {}  # what computed the tensors that forward left on the model, by their id
        if not self.trainable and not forward_only:
            raise untrained(self.params)
        if self.hooks.functions or not self.before.restores_all():  # a second trace would go on where this one ends
            self.unrecorded.lists = {}
        self.hooks.refuse_microbatches(microbatches)
        self.hooks.refuse_groups()
        refuse_shared_memory(model, dict(zip(call.names, call.tensors, strict=True)))
        refuse_arrays(model, self.before.arrays())

    def fakes(self) -> list[Tensor]:
        def fake(t: Tensor) -> Tensor:
            return torch_compat.fake_like(self.mode, t)

        make, stored = torch_compat.FakeParameters(self.mode).make, self.precision and self.precision.stored
        params = [make(p, p.dtype if stored is None else stored(p)) for p in self.params.values()]
        buffers = map(fake, self.buffers.values())
        scale = [fake(torch.empty((), device="meta", dtype=torch.float32))] if self.scaled else []
        share = [fake(torch.empty((), device="meta", dtype=torch.float64))] if self.weighted else []
        seed = fake(torch.empty((), dtype=torch.int64, device="meta"))
        return [*params, *buffers, *map(fake, self.call.tensors), *scale, *share, seed]

    def constant(self) -> list[bool]:
        """Of parameters and then of buffers, whether steps leave them as they are."""
        changing = {*self.trainable, *self.written_buffers}
        return [name not in changing for name in (*self.params, *self.buffers)]

    def restored(self) -> Snapshot | None:
        """What the model and the loss are before the step and after it, where all could be put back."""
        others = self.forward_only or self.hooks.functions  # other modes, or more than the two
        return self.before if not others and self.before.restores_all() else None

    def decompositions(self) -> torch_compat.Decompositions:
        return torch_compat.decompositions(SMALL_DECOMPOSITIONS) | self.random.decompositions()

    @torch_compat.checkpoints_ended()
    def record(self) -> tuple[fx.GraphModule, list[Tensor], Origins]:
        names = {module: name for name, module in named_modules(self.model)}
        inputs = self.fakes()

        def joint(*tensors: Tensor) -> list[Tensor]:
            return self.joint(tensors, origins)

        origins = Origins(names, joint.__code__)
        decompositions = self.decompositions()
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(not self.forward_only))  # whatever the caller's mode
            stack.enter_context(torch_compat.hugging_face_patches(names))
            stack.enter_context(torch_compat.unvalidated_distributions())
            stack.enter_context(masks_as_eager(self.model))
            stack.enter_context(packed_as_eager())
            stack.enter_context(grouped(self.model))
            stack.enter_context(library_experts(self.model))
            self.loops = stack.enter_context(noting())
            stack.enter_context(active(self.model))
            if written_in(self.model):
                stack.enter_context(CarriedChunks())
            stack.enter_context(drawn_in_each_step(self.model))
            stack.enter_context(torch_compat.override_aten(overrides()))
            stack.enter_context(torch_compat.undifferentiable(WHOLE_OPS, undifferentiated))
            stack.enter_context(self.random.numbered())
            stack.enter_context(origins.watching())
            if self.casts is not None:
                stack.enter_context(self.casts.keeping())
            try:
                gm = torch_compat.record(joint, inputs, self.mode, decompositions, self.on_node(origins))
            except KeyboardInterrupt:
                raise
            except ShardcError as refusal:
                raise origins.placed(refusal) from refusal.__cause__
            except BaseException as problem:  # also what asks to leave: sys.exit in forward
                diagnosed = origins.diagnosed(problem, self.precision is not None)
                if self.in_loss:
                    diagnosed = self.call.lacking(problem, diagnosed, trained=not self.forward_only)
                raise diagnosed from problem
            finally:
                self.recorded.end()
        return gm, inputs, origins

    def on_node(self, origins: Origins) -> Callable[[fx.Node], None]:
        """What is to be done with each node as it is made."""
        if not self.unrecorded.lists:
            return origins.on_node

        def on_node(node: fx.Node) -> None:
            self.unrecorded.on_node(node)
            origins.on_node(node)

        return on_node

    def refuse_single(self, told: Sequence[Diagnostic]) -> None:
        """Raise UnequalError where something is told of single layers, or changed in them, and some are left out."""
        if self.unrecorded.units and (
            told or self.before.changes() or self.written or self.layers.asked or self.values.loops.asked
        ):
            raise UnequalError("what single layers do is told of, or lasts")

    def joint(self, tensors: tuple[Tensor, ...], origins: Origins) -> list[Tensor]:
        count = len(self.params), len(self.params) + len(self.buffers)
        params = dict(zip(self.params, tensors[: count[0]], strict=True))
        buffers = dict(zip(self.buffers, tensors[count[0] : count[1]], strict=True))
        self.recorded.begin()
        self.random.seed = tensors[-1]
        inputs = dict(zip(self.call.names, tensors[count[1] :], strict=False))
        batch = self.call.batch(tuple(inputs.values()))
        used, fed = params, batch
        if self.casts is not None:
            with torch.enable_grad():  # what stands for a trained parameter is trained, also while none is
                used = self.casts.cast(params, self.params, origins.within)
            fed = self.call.batch(self.casts.batch(inputs))
        self.hooks.attach(params)
        for stand_in in used.values():
            torch_compat.mark_parameter(stand_in)
        self.layers = LayerDrop(lambda node: origins.of.get(node, Origin()), self.forced)
        own = [(buffers[name], real) for name, real in self.buffers.items()]
        samples = list(zip(inputs.values(), self.call.tensors, strict=True))
        self.values = SampleValues(samples, self.layers, own, without_rows=self.without_rows)
        nodes = {name: torch_compat.node_of(t) for name, t in buffers.items()}  # before a step writes to them
        answers: torch_compat.Answers = self.values
        if self.unrecorded.lists:
            named = (params, used, buffers)
            self.unrecorded.layers = answers = UnrecordedLayers(
                self.values, self.model, self.unrecorded, origins, self.random, self.mode, named
            )
        stand_ins = StandIns(self.model, used | buffers, self.params, answers, self.unrecorded.recorded)
        with stand_ins.active(), self.layers.watching():  # until backward has run: checkpointing runs forward again
            args, kwargs = self.call.arguments(fed)
            output = self.model(*args, **kwargs)
            self.values.loops.flush()
            self.layers.finish()
            returned = self._outputs(output, scalar := self._scalar(output, batch))
            loss = self._term(scalar, tensors)
            self.unrecorded.finish()
            stand_ins.refuse_changed()
            grads: dict[str, Tensor | None] = {}
            if loss is not None and not self.forward_only:
                root = loss * tensors[-2 - self.weighted] if self.scaled else loss
                origins.phase = "bwd"
                torch_compat.on_backward(root.grad_fn, origins.before_backward, origins.after_backward)
                trained = [name for name in self.trainable if not self.unrecorded.leaves_out(name)]
                grads = gradients(root, {name: params[name] for name in trained}, self.hooks)
                stand_ins.refuse_changed()
            changed_buffers = buffers_after(self.model, buffers, used, stand_ins.places)
            changing = (n for n, t in buffers.items() if changed_buffers[n] is not t or torch_compat.was_written(t))
            refuse_asked(self.model, [name for name in changing if nodes[name] in self.values.asked])
        if stand_ins.value_reads:  # and caught: forward has gone on as it would not in eager PyTorch
            raise stand_ins.value_reads[0]

        self.unused = tuple(name for name, grad in grads.items() if grad is None)
        param_gradients = {name: grad for name, grad in grads.items() if grad is not None}
        param_gradients = (
            param_gradients if self.casts is None else self.casts.gradients(param_gradients, origins.within)
        )
        losses = [] if loss is None else [loss]
        self.results = [("loss", "loss")] * len(losses)
        self.results.extend(("grad", name) for name in param_gradients)
        self.results.extend(("buffer", name) for name in changed_buffers)
        self.results.extend(("output", path) for path in returned)
        nodes_left = [(id(t), torch_compat.node_of(t)) for t in left_tensors(self.before.changes())]
        self.left = {key: node for key, node in nodes_left if node is not None}
        self.values.loops.finish()
        self.remembered = nodes_remembered(self.before.caches(), stand_ins.holds)
        self._refuse_reshaped(inputs)
        batch_tensors = zip(self.call.names, tensors[count[1] :], strict=False)
        self.written = tuple(name for name, t in batch_tensors if torch_compat.was_written(t))
        self.written_buffers = [name for name, t in buffers.items() if torch_compat.was_written(t)]
        if losses:
            losses = [self.values.behind_checks(losses[0])]
        elif returned:
            first = next(iter(returned))
            returned[first] = self.values.behind_checks(returned[first])
        return [*losses, *param_gradients.values(), *changed_buffers.values(), *returned.values()]

    def _outputs(self, output: Any, loss: Tensor | None) -> dict[str, Tensor]:
        """The tensors among what the model returns that the program is to return too, but for the loss itself."""
        tensors = output_tensors(output) if self.with_outputs else {}
        if self.forward_only:
            tensors = {name: leaf for name, leaf in tensors.items() if leaf is not loss}
        return {name: t for name, t in tensors.items() if self.with_outputs != "scalars" or not t.dim()}

    def _term(self, loss: Tensor | None, tensors: tuple[Tensor, ...]) -> Tensor | None:
        """A microbatch's term of the step's loss."""
        if loss is None:
            return None
        term: Tensor = loss if self.casts is None else self.casts.wide(loss)
        if self.weighted:
            return term * tensors[-2].to(term.dtype)
        return term / self.microbatches if self.microbatches > 1 else term

    def _refuse_reshaped(self, inputs: Mapping[str, Tensor]) -> None:
        for (name, traced), original in zip(inputs.items(), self.call.tensors, strict=False):
            stride = torch_compat.fake_like(self.mode, original).stride()
            if traced.shape != original.shape or traced.stride() != stride:
                message = f"forward changes the shape of its input '{name}' in place"
                raise error("SC104", message, tensor=name, hint="compute another: x = x.unsqueeze(1), x.mT")

    def _scalar(self, output: Any, batch: Any) -> Tensor | None:
        """What the loss function, or else the model, returns as the loss; None where an evaluation has none."""
        if self.loss is not None:
            self.in_loss = True
            loss: Any = self.loss(output if self.casts is None else self.casts.wide(output), batch)
            self.in_loss = False
        elif isinstance(output, Tensor):
            loss = output
        elif isinstance(output, Mapping) and "loss" in output:
            loss = cast("Mapping[str, Any]", output)["loss"]
        elif isinstance(output, tuple | list):
            loss = first_tensor(output)
        else:
            loss = getattr(output, "loss", None)
        if self.forward_only and self.loss is None and not is_loss(loss):
            return None
        refuse_no_scalar(loss, output, self.loss, self.model, self.call.names, trained=not self.forward_only)
        return cast("Tensor", loss)


def _without_mutation(
    gm: fx.GraphModule, inputs: list[Tensor], mode: Any, origins: Origins
) -> tuple[fx.GraphModule, Origins]:
    """Retrace, carrying each node's origin over to what it becomes."""
    new_origins = Origins(origins.names, origins.root)
    returned: dict[fx.Node, list[str]] = {}
    for name, node in origins.module_outputs:
        returned.setdefault(node, []).append(name)
    current = Origin()

    def on_node(node: fx.Node) -> None:
        new_origins.of[node] = current

    def run_node(node: fx.Node, run: Callable[[], Any]) -> Any:
        nonlocal current
        current = origins.of.get(node, current)
        result = run()
        if node in returned:
            # Looked up now: a later op may mutate this value, and then it is no longer what the module returned.
            new_node = torch_compat.node_of(result)
            if new_node is not None:
                new_origins.module_outputs += [(name, new_node) for name in returned[node]]
        return result

    inputs = [t.detach() for t in inputs]
    return torch_compat.functionalized(gm, inputs, mode, run_node, on_node), new_origins


def _finish(step: _Step, gm: fx.GraphModule, origins: Origins) -> Traced:
    """Clean the graph up, then name its inputs and outputs and rewrite every node's meta."""
    graph = gm.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    inputs = _named_inputs(step, placeholders)
    replaced = clean(graph, inputs, origins)
    graph.eliminate_dead_code(lambda node: bool(node.users) or node.is_impure())  # the second takes long
    captured = {n: cast("Tensor", getattr(gm, str(n.target))) for n in graph.nodes if n.op == "get_attr"}
    refuse_frozen(step.model, captured, lambda node: origins.of.get(node, Origin()))
    by_target = constants_as_inputs(graph, placeholders[-1])
    constants: dict[str, Tensor] = {}
    for number, (target, node) in enumerate(by_target.items()):
        name = f"{CONSTANT}{number}"
        constants[name] = cast("Tensor", getattr(gm, target)).detach()
        node.meta["val"] = torch_compat.fake_like(step.mode, constants[name])
        inputs.append(TracedInput("buffer", name, (), False, node))

    for unread in [i for i in inputs if i.role in ("seed", "share") and not i.node.users]:
        inputs.remove(unread)
        graph.erase_node(unread.node)

    (output,) = (node for node in graph.nodes if node.op == "output")
    results = [TracedOutput(role, name, node) for (role, name), node in zip(step.results, output.args[0], strict=True)]
    buffer_nodes = {i.name: i.node for i in inputs if i.role == "buffer"}
    outputs = tuple(
        copied(graph, r) for r in results if not (r.role == "buffer" and r.node is buffer_nodes.get(r.name))
    )
    if step.forward_only and not outputs:
        raise error("SC127", "the model returns no tensor, so there is nothing to evaluate", hint=NOTHING)
    output.args = (tuple(r.node for r in outputs),)
    inputs, every_input = step.unrecorded.recorded_inputs(inputs)
    place_casts(graph, {i.node for i in inputs if i.role == "param"}, [o.node for o in outputs if o.role == "grad"])
    rewrite_meta(graph, inputs, origins)
    refuse_mixed(graph, step.casts is not None)
    graph.lint()

    modules = calls_of(graph, origins, replaced)
    traced = Traced(graph, tuple(inputs), outputs, modules, constants, step.unused, written=step.written)
    return step.unrecorded.of_all_layers(traced, every_input, step.trainable)


def _named_inputs(step: _Step, placeholders: list[fx.Node]) -> list[TracedInput]:
    model = step.model
    aliases: dict[Tensor, list[str]] = {}
    parameters, buffers = named_tensors(model, remove_duplicate=False)
    for name, t in (*parameters.items(), *buffers.items()):
        aliases.setdefault(t, []).append(name)
    nodes = iter(placeholders)
    inputs = [
        TracedInput("param", name, tuple(aliases[p][1:]), p.requires_grad, next(nodes))
        for name, p in step.params.items()
    ]
    inputs += [
        TracedInput("buffer", name, tuple(aliases[b][1:]), False, next(nodes)) for name, b in step.buffers.items()
    ]
    inputs += [TracedInput("input", name, (), False, next(nodes)) for name in step.call.names]
    inputs += [TracedInput("state", SCALE, (), False, next(nodes))] if step.scaled else []
    inputs += [TracedInput("share", SHARE, (), False, next(nodes))] if step.weighted else []
    return [*inputs, TracedInput("seed", "seed", (), False, next(nodes))]
