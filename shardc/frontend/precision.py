"""precision: which dtype each tensor of a step has. Casts are put in while a model is traced, and nowhere else.

    master     parameters as they are stored and updated, and their gradients        f32
    compute    what forward and backward work on: weights, inputs, activations       bf16
    reduce     in which the gradients of ranks are summed                            f32

A parameter is cast once, for all its uses; the cast's own backward brings the gradient back:

    %w.cast = _to_copy(%w, bf16)    ...    %d.w = _to_copy(%d.w.cast, f32)

All else follows from the types: storage is gathered after the cast, and a sum that is pending passes through it or not
as `reduce` says (settle_partials). Buffers, frozen parameters and batch norms stay as they are. A module that the plan
keeps computes in `master`: what enters it is cast up, what leaves it down. The loss is float32, and so is what a loss
function is given. In float16 the loss is scaled before backward, by a number that is an input;
shardc/frontend/gradients.py takes it out again and adapts it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from shardc import torch_compat
from shardc.frontend.model_tree import modules_of
from shardc.ir.annotation import Annotation
from shardc.ir.diagnostic import did_you_mean, error

Within = Callable[[str], AbstractContextManager[None]]
CAST = torch.ops.aten._to_copy.default
KEEP_HINT = "let a module that mixes dtypes stay in its own: precision: {compute: ..., keep: [its name]}"
HALF = (torch.bfloat16, torch.float16)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class Precision:
    """The dtypes of a step. `keep` are patterns over modules, parameters and inputs that stay in `master`.

    `loss_scale` is what float16 starts with; it doubles after `growth_interval` steps without an overflow.
    """

    compute: torch.dtype
    master: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32
    keep: tuple[Annotation, ...] = ()
    loss_scale: float = 2.0**16
    growth_interval: int = 2000

    @property
    def scaled(self) -> bool:
        """Whether the loss is scaled: float16 alone has too few exponents for gradients."""
        return self.compute == torch.float16

    def stored(self, p: Tensor) -> torch.dtype:
        """The dtype that a parameter is stored in. A frozen one is never updated, and keeps its dtype."""
        return self.master if p.is_floating_point() and p.requires_grad else p.dtype


class Casts:
    """The casts of one model. ShardcError (SC202) for a pattern of `keep` that matches nothing."""

    def __init__(self, precision: Precision, model: nn.Module, inputs: Sequence[str]) -> None:
        self.precision = precision
        modules = dict(model.named_modules(remove_duplicate=False))
        params = dict(model.named_parameters(remove_duplicate=False))
        kept_names = _kept(precision.keep, [*filter(None, modules), *params, *inputs])
        outermost = [n for n in modules if n in kept_names and not any(up in kept_names for up in _ancestors(n))]
        self.modules = list(dict.fromkeys(modules[name] for name in outermost))
        self.inputs = {name for name in inputs if name in kept_names}
        self.params: set[Tensor] = {p for name, p in params.items() if name in kept_names}
        for module in modules_of(model):
            if module in self.modules:
                self.params.update(module.parameters())
            elif isinstance(module, BATCH_NORMS):
                self.params.update(module.parameters(recurse=False))

    def cast(self, stored: Mapping[str, Tensor], params: Mapping[str, Tensor], within: Within) -> dict[str, Tensor]:
        """What the model computes with instead of each stored parameter; `within` a module, nodes are named for it."""
        used: dict[str, Tensor] = {}
        for name, p in stored.items():
            used[name] = p
            if p.is_floating_point() and params[name] not in self.params and p.dtype != self.precision.compute:
                with within(name.rpartition(".")[0]):
                    used[name] = p.to(self.precision.compute)
        return used

    def gradients(self, gradients: Mapping[str, Tensor], within: Within) -> dict[str, Tensor]:
        """The gradients, cast to the dtype of reductions if that is wider than their parameters' dtype."""
        widened = dict(gradients)
        for name, g in gradients.items():
            if g.dtype in HALF and self.precision.reduce not in HALF:
                with within(name.rpartition(".")[0]):
                    widened[name] = g.to(self.precision.reduce)
        return widened

    def batch(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        return tuple(t if name in self.inputs else self._to(t, self.precision.compute) for name, t in tensors.items())

    def wide(self, tree: Any) -> Any:
        """An output, or a loss, with its 16-bit tensors in float32."""
        return _mapped(tree, lambda t: t.float() if t.dtype in HALF else t)

    @contextmanager
    def keeping(self) -> Generator[None]:
        """Surround the kept modules with casts, while the model runs."""
        compute, master = self.precision.compute, self.precision.master

        def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
            return _mapped((args, kwargs), lambda t: t.to(master) if t.dtype == compute else t)

        def leave(_: nn.Module, _args: Any, output: Any) -> Any:
            return _mapped(output, lambda t: self._to(t, compute) if t.dim() else t)  # a scalar is a loss

        hooks = [
            hook
            for module in (self.modules if compute != master else [])
            for hook in (
                module.register_forward_pre_hook(enter, with_kwargs=True),
                module.register_forward_hook(leave),
            )
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _to(self, t: Tensor, dtype: torch.dtype) -> Tensor:
        return t.to(dtype) if t.is_floating_point() else t


def place_casts(graph: fx.Graph, params: Collection[fx.Node], gradients: Sequence[fx.Node]) -> None:
    """Cast each parameter where it is used first, and each gradient where it is made.

    As traced, parameters are cast before anything else, and so autograd casts their gradients after everything else:
    all would be held until then, and none reduced while backward goes on.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in [n for n in graph.nodes if n.target is CAST]:
        if node.args[0] in params and node.users:
            min(node.users, key=order.__getitem__).prepend(node)
    for node in gradients:
        if node.target is CAST:
            (producer,) = node.all_input_nodes
            while producer.next.target is operator.getitem:
                producer = producer.next
            producer.append(node)


# What wants its floating operands to be of one dtype, though tracing on fakes does not notice when they are not.
NORMS = ("aten::native_layer_norm", "aten::native_group_norm")
ALIKE = (
    *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addmv", "aten::dot", "aten::convolution"),
    *("shardc::linear", "shardc::linear_dgrad", "shardc::linear_wgrad", "shardc::sdpa", "shardc::grouped_mm"),
    *("aten::index_add", "aten::index_copy", "aten::index_put", "aten::_cdist_forward", "aten::linalg_cross"),
    *("aten::binary_cross_entropy", *NORMS),
)


def _alike_operands(name: str, node: fx.Node) -> Sequence[fx.Node]:
    """The operands that have to be of one dtype: not attention's mask, nor the one value that a mask is filled with."""
    if name == "shardc::sdpa":
        return [operand for operand in node.args[:3] if isinstance(operand, fx.Node)]
    if name == "aten::index_put":
        value, places = node.args[2], cast("list[fx.Node | None]", node.args[1])
        masks = all(place is not None and place.meta["val"].dtype == torch.bool for place in places)
        if masks and isinstance(value, fx.Node) and value.meta["val"].numel() == 1:
            return []
    return node.all_input_nodes


def refuse_mixed(graph: fx.Graph, cast: bool) -> None:
    """ShardcError (SC104) for a product of two dtypes, which would fail as late as when it is run. `cast` says that a
    plan's precision has chosen dtypes; eager PyTorch normalizes halves by weights of float32, where nothing is cast."""
    for node in graph.nodes:
        if node.op != "call_function" or getattr(node.target, "_schema", None) is None:
            continue
        name = node.target.name().partition(".")[0]
        tensors = [n for n in _alike_operands(name, node) if isinstance(n.meta["val"], Tensor)]
        dtypes = {dtype for n in tensors if (dtype := n.meta["val"].dtype).is_floating_point}
        halves = name in NORMS and not cast and node.args[0].meta["val"].dtype in HALF
        if name in ALIKE and len(dtypes) > 1 and not halves:
            raise error(
                "SC104",
                f"{node.target.name()} is given tensors of {' and '.join(sorted(map(str, dtypes)))}",
                location=node.meta["source"] or None,
                source_text=node.meta["source_text"] or None,
                fqn=node.meta["fqn"] or None,
                hint=KEEP_HINT if cast else "cast one of them to the other's dtype: y.to(x.dtype)",
            )


def _kept(patterns: Sequence[Annotation], names: Sequence[str]) -> set[str]:
    kept: set[str] = set()
    for annotation in patterns:
        matching = {name for name in names if annotation.matches(name)}
        if not matching:
            message = f"'{annotation.pattern}' of what is kept matches no module, parameter or input"
            hint = did_you_mean(annotation.pattern, names, "names")
            raise error("SC202", message, location=annotation.origin, hint=hint)
        kept |= matching
    return kept


def _ancestors(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(len(parts))] if name else []


def _mapped(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    leaves, structure = torch_compat.flatten(tree)
    return torch_compat.unflatten([change(t) if isinstance(t, Tensor) else t for t in leaves], structure)
