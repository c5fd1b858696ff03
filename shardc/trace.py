"""`trace`: an `nn.Module`, a sample batch and a loss become one graph of ATen ops, forward and backward.

The model runs once on fake tensors (shapes without data, so meta-device models of any size do) as an ordinary
function of its parameters, its buffers and the batch:

    joint(params, buffers, batch, seed) = loss, d loss / d params, buffers afterwards

and what ATen sees of it, autograd's backward included, is the graph. If anything was mutated, the graph is traced
once more without mutation; changed buffers are outputs then. Tied parameters are one input and one gradient.
`trace_ops` says which ops are substituted, `trace_origin` how nodes know their module and source line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.func import functional_call

from shardc import torch_compat
from shardc.ir.diagnostic import ShardcError, error
from shardc.trace_call import Call
from shardc.trace_ops import SMALL_DECOMPOSITIONS, RandomOps, overrides
from shardc.trace_origin import Origin, Origins, first_tensor

aten = torch.ops.aten


@dataclass(frozen=True)
class TracedInput:
    """A placeholder. `name`: the tensor's FQN, or the path of an input ("input_ids", "x.0.key")."""

    role: Literal["param", "buffer", "input", "seed"]
    name: str
    aliases: tuple[str, ...]  # the other FQNs of a tied parameter or buffer
    trainable: bool
    node: fx.Node


@dataclass(frozen=True)
class TracedOutput:
    """An element of the output node. `name`: "loss", the FQN of the parameter or buffer, or the output's path."""

    role: Literal["loss", "grad", "buffer", "output"]
    name: str
    node: fx.Node


@dataclass(frozen=True)
class Traced:
    """A joint graph: `inputs` pairs with its placeholders in order, `outputs` with its output node's tuple.

    The meta of each node holds `val` (fakes), `fqn`, `source`, `source_text`, `phase`, `fwd_node`, and nothing else.
    """

    graph: fx.Graph
    inputs: tuple[TracedInput, ...]
    outputs: tuple[TracedOutput, ...]
    modules: dict[str, fx.Node]  # FQN of a module -> the first tensor that it returned (when it was called last)
    constants: dict[str, Tensor]  # tensors that the model made from data: real, inputs of role "buffer"
    unused: tuple[str, ...]  # trainable parameters that the loss does not depend on


def trace(
    model: nn.Module, batch: Any, loss: Callable[[Any, Any], Tensor] | None = None, *, with_outputs: bool = False
) -> Traced:
    """The joint graph of one training step of `model` in its present mode (train or eval).

    `batch` is what forward takes: a tensor, a tuple of positional arguments, or a dict of keyword arguments; its
    tensors may be real, meta or fake. `loss(output, batch)` returns the scalar to differentiate; without it, the
    model must (alone, first, or as `loss`).
    """
    call = Call(model, batch)
    step = _Step(model, call, loss, with_outputs)
    gm, origins = step.record()
    return _finish(step, gm, origins)


class _Model(nn.Module):
    """Reads the buffers while functional_call's swap is alive: a buffer may have been re-assigned, not mutated."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
        output = self.model(*args, **kwargs)
        return output, dict(self.model.named_buffers())


class _Step:
    """The joint function and its inputs."""

    def __init__(
        self, model: nn.Module, call: Call, loss: Callable[[Any, Any], Tensor] | None, with_outputs: bool
    ) -> None:
        self.model, self.call, self.loss, self.with_outputs = (model, call, loss, with_outputs)
        self.wrapped = _Model(model)
        self.mode = torch_compat.fake_mode()
        self.random = RandomOps()
        self.params = dict(model.named_parameters())
        self.buffers = dict(model.named_buffers())
        self.trainable = [name for name, p in self.params.items() if p.requires_grad]
        self.results: list[tuple[Literal["loss", "grad", "buffer", "output"], str]] = []  # of joint, in order
        self.unused: tuple[str, ...] = ()
        if not self.trainable:
            raise error("SC102", "the model has no trainable parameter", hint="set requires_grad on some parameters")

    def fakes(self) -> list[Tensor]:
        def fake(t: Tensor) -> Tensor:
            return torch_compat.fake_like(self.mode, t)

        params = [fake(p).requires_grad_(p.requires_grad) for p in self.params.values()]
        seed = fake(torch.empty((), dtype=torch.int64, device="meta"))
        return [*params, *map(fake, self.buffers.values()), *map(fake, self.call.tensors), seed]

    def record(self) -> tuple[fx.GraphModule, Origins]:
        names = {module: name for name, module in self.model.named_modules()}
        inputs = self.fakes()

        def joint(*tensors: Tensor) -> list[Tensor]:
            return self.joint(tensors, origins)

        origins = Origins(names, joint.__code__)
        decompositions = torch_compat.decompositions(SMALL_DECOMPOSITIONS) | self.random.decompositions()
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())  # whatever the caller's mode
            stack.enter_context(torch_compat.hugging_face_patches(self.model))
            stack.enter_context(torch_compat.override_aten(overrides()))
            stack.enter_context(self.random.numbered())
            stack.enter_context(origins.watching())
            try:
                gm = torch_compat.record(joint, inputs, self.mode, decompositions, origins.on_node)
            except ShardcError:
                raise
            except Exception as problem:
                raise _diagnosed(problem, origins) from problem
        if any(_mutates(node) for node in gm.graph.nodes):
            return _without_mutation(gm, inputs, self.mode, origins)
        return gm, origins

    def joint(self, tensors: tuple[Tensor, ...], origins: Origins) -> list[Tensor]:
        count = len(self.params), len(self.params) + len(self.buffers)
        params = dict(zip(self.params, tensors[: count[0]], strict=True))
        buffers = dict(zip(self.buffers, tensors[count[0] : count[1]], strict=True))
        self.random.seed = tensors[-1]
        batch = self.call.batch(tensors[count[1] : -1])
        swap = {f"model.{name}": t for name, t in (params | buffers).items()}
        output, new_buffers = functional_call(self.wrapped, swap, self.call.arguments(batch))
        loss = self._scalar(output, batch)
        origins.phase = "bwd"
        torch_compat.on_backward(loss.grad_fn, origins.before_backward, origins.after_backward)
        wanted = [params[name] for name in self.trainable]
        grads = cast("tuple[Tensor | None, ...]", torch.autograd.grad(loss, wanted, allow_unused=True))

        self.unused = tuple(name for name, grad in zip(self.trainable, grads, strict=True) if grad is None)
        used = {name: grad for name, grad in zip(self.trainable, grads, strict=True) if grad is not None}
        kept = {name: new_buffers[name] for name in self.buffers if name in new_buffers}
        outputs = torch_compat.flatten_with_paths(output) if self.with_outputs else []
        seen = {path or "output": leaf for path, leaf in outputs if isinstance(leaf, Tensor)}
        self.results = [("loss", "loss")]
        self.results.extend(("grad", name) for name in used)
        self.results.extend(("buffer", name) for name in kept)
        self.results.extend(("output", path) for path in seen)
        return [loss, *used.values(), *kept.values(), *seen.values()]

    def _scalar(self, output: Any, batch: Any) -> Tensor:
        if self.loss is not None:
            found: Any = self.loss(output, batch)
        elif isinstance(output, Tensor):
            found = output
        elif isinstance(output, Mapping) and "loss" in output:
            found = cast("Mapping[str, Any]", output)["loss"]
        elif isinstance(output, tuple | list):
            found = first_tensor(output)
        else:
            found = getattr(output, "loss", None)
        hint = "pass trace's or compile's `loss`, a function (output, batch) -> scalar tensor"
        if not isinstance(found, Tensor):
            raise error("SC102", f"no loss in the model's output, a {type(output).__name__}", hint=hint)
        if found.dim() != 0 or not found.requires_grad:
            state = f"{list(found.shape)}" if found.dim() else "independent of every trainable parameter"
            raise error("SC102", f"the loss is not a scalar to differentiate: it is {state}", hint=hint)
        return found


def _mutates(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable  # pyright: ignore[reportPrivateUsage]


def _diagnosed(problem: Exception, origins: Origins) -> ShardcError:
    """The model's error, at the line and in the module where it was raised."""
    source, text = origins.where_raised(problem.__traceback__)
    where = {"location": source or None, "source_text": text or None, "fqn": origins.fqn or None}
    if torch_compat.is_data_dependent(problem):
        return error(
            "SC101",
            "this needs the values of a tensor, which are unknown while compiling",
            **where,
            cause=str(problem).strip().partition("\n")[0],
            hint="choose with torch.where, or by Python values; experts: set_experts_implementation('grouped_mm')",
        )
    message = f"{type(problem).__name__}: {str(problem).strip() or 'no message'}"
    return error("SC104", message, **where, hint="does the model run on this batch without shardc?")


def _without_mutation(
    gm: fx.GraphModule, inputs: list[Tensor], mode: Any, old: Origins
) -> tuple[fx.GraphModule, Origins]:
    """Retrace, carrying each node's origin over to what it becomes."""
    new = Origins(old.names, old.root)
    returned: dict[fx.Node, list[str]] = {}
    for name, node in old.module_outputs:
        returned.setdefault(node, []).append(name)
    current = Origin()

    def on_node(node: fx.Node) -> None:
        new.of[node] = current

    def run_node(node: fx.Node, run: Callable[[], Any]) -> Any:
        nonlocal current
        current = old.of.get(node, current)
        result = run()
        if node in returned:
            # Looked up now: a later op may mutate this value, and then it is no longer what the module returned.
            became = torch_compat.node_of(result)
            if became is not None:
                new.module_outputs += [(name, became) for name in returned[node]]
        return result

    inputs = [t.detach() for t in inputs]
    return torch_compat.functionalized(gm, inputs, mode, run_node, on_node), new


def _finish(step: _Step, gm: fx.GraphModule, origins: Origins) -> Traced:
    """Clean the graph up, then name its inputs and outputs and rewrite every node's meta."""
    graph = gm.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    inputs = _named_inputs(step, placeholders)
    replaced = _clean(graph, inputs, origins)
    by_target = _constants_as_inputs(graph, placeholders[-1])
    constants: dict[str, Tensor] = {}
    for number, (target, node) in enumerate(by_target.items()):
        name = f"_constant.{number}"
        constants[name] = cast("Tensor", getattr(gm, target)).detach()
        node.meta["val"] = torch_compat.fake_like(step.mode, constants[name])
        inputs.append(TracedInput("buffer", name, (), False, node))

    seed = inputs[len(placeholders) - 1]
    if not seed.node.users:
        inputs.remove(seed)
        graph.erase_node(seed.node)

    (output,) = (node for node in graph.nodes if node.op == "output")
    results = [TracedOutput(role, name, node) for (role, name), node in zip(step.results, output.args[0], strict=True)]
    unchanged = {i.node for i in inputs if i.role == "buffer"}
    outputs = tuple(r for r in results if not (r.role == "buffer" and r.node in unchanged))
    output.args = (tuple(r.node for r in outputs),)
    graph.eliminate_dead_code()
    _rewrite_meta(graph, inputs, origins)
    graph.lint()

    alive = set(graph.nodes)
    modules: dict[str, fx.Node] = {}
    for name, node in origins.module_outputs:
        while node in replaced:
            node = replaced[node]
        if node in alive:
            modules[name] = node
    return Traced(graph, tuple(inputs), outputs, modules, constants, step.unused)


def _named_inputs(step: _Step, placeholders: list[fx.Node]) -> list[TracedInput]:
    model = step.model
    aliases: dict[Tensor, list[str]] = {}
    for name, t in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        aliases.setdefault(t, []).append(name)
    rest = iter(placeholders)
    inputs = [
        TracedInput("param", name, tuple(aliases[p][1:]), p.requires_grad, next(rest))
        for name, p in step.params.items()
    ]
    inputs += [
        TracedInput("buffer", name, tuple(aliases[b][1:]), False, next(rest)) for name, b in step.buffers.items()
    ]
    inputs += [TracedInput("input", name, (), False, next(rest)) for name in step.call.names]
    return [*inputs, TracedInput("seed", "seed", (), False, next(rest))]


def _clean(graph: fx.Graph, inputs: list[TracedInput], origins: Origins) -> dict[fx.Node, fx.Node]:
    """Erase what means nothing in a graph of values, and spell views one way. Returns erased node -> its stand-in."""
    role = {i.node: i for i in inputs}
    replaced: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        target = node.target
        if node.op != "call_function" or not isinstance(target, OpOverload):
            continue
        if target in torch_compat.IDENTITIES or (target is aten.t.default and node.meta["val"].dim() < 2):
            replaced[node] = node.args[0]
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif target is aten.t.default:
            node.target, node.args = aten.transpose.int, (node.args[0], 0, 1)
        elif target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.view.default
            node.args = (node.args[0], list(node.meta["val"].shape))  # no -1: sizes are rewritten per shard later
        elif target is aten.copy_.default and node.args[0] in role and not node.users:
            written = role[node.args[0]]
            if written.role == "param":
                raise error("SC104", f"forward overwrites the parameter {written.name}", hint="make it a buffer")
            graph.erase_node(node)
        elif target.name().startswith("aten::_assert"):
            graph.erase_node(node)
        else:
            assert not _mutates(node), f"{node.format_node()} survived functionalization"
            if torch.Tag.nondeterministic_seeded in target.tags:
                origin = origins.of.get(node, Origin())
                raise error(
                    "SC104",
                    f"the random op {target} has no layout-independent form yet",
                    location=origin.source or None,
                    source_text=origin.source_text or None,
                    fqn=origin.fqn or None,
                    hint="draw from torch.rand, randn, bernoulli or dropout instead",
                )
    return replaced


def _constants_as_inputs(graph: fx.Graph, after: fx.Node) -> dict[str, fx.Node]:
    """Turn each captured tensor into one placeholder; returns attribute of the GraphModule -> placeholder."""
    found: dict[str, fx.Node] = {}
    for node in [n for n in graph.nodes if n.op == "get_attr"]:
        target = str(node.target)
        if target not in found:
            with graph.inserting_after(after):
                after = found[target] = graph.placeholder(f"constant_{len(found)}")
        node.replace_all_uses_with(found[target])
        graph.erase_node(node)
    return found


def _rewrite_meta(graph: fx.Graph, inputs: list[TracedInput], origins: Origins) -> None:
    owner = {i.node: i.name.rpartition(".")[0] for i in inputs if i.role in ("param", "buffer")}
    first: dict[int, str] = {}
    for node in graph.nodes:
        origin = origins.of.get(node, Origin())
        fqn, fwd_node = origin.fqn, None
        if node.op in ("placeholder", "output"):
            origin = Origin(phase="bwd" if node.op == "output" else "fwd")
            fqn = owner.get(node, "")
        elif origin.number is not None and origin.phase == "fwd":
            first.setdefault(origin.number, node.name)
        elif origin.number is not None:
            fwd_node = first.get(origin.number)
        node.meta = {
            "val": node.meta.get("val"),
            "fqn": fqn,
            "source": origin.source,
            "source_text": origin.source_text,
            "phase": origin.phase,
            "fwd_node": fwd_node,
        }
