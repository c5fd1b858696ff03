"""The gradients of a traced loss, as `loss.backward()` would leave them: hooks, inner backward passes and all.

`autograd.grad` computes what leads to the parameters and nothing else, which makes the smallest graph. Two things ask
for more. The backward of a custom `autograd.Function` may run a backward pass of its own, which adds to `.grad`
(reentrant checkpointing does); then the whole of autograd's graph is run, as `.backward()` does. And hooks:

    register_hook                        acts on a gradient when it is complete; put on the traced parameter, it is run
    register_post_accumulate_grad_hook   acts on `.grad` after that; called at the end, it leaves there what it makes

Of several microbatches torch calls the second kind once each, on the sum so far; a program sums at the end (SC122).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardc import torch_compat
from shardc.ir.diagnostic import ShardcError, error

Hook = Callable[..., Any]


@dataclass(frozen=True)
class Hooks:
    """The hooks of a model's trainable parameters, by name."""

    on_gradient: Mapping[str, list[Hook]]
    after_accumulation: Mapping[str, list[Hook]]

    @classmethod
    def of(cls, params: Mapping[str, nn.Parameter | Tensor]) -> Hooks:
        hooks = {name: torch_compat.gradient_hooks(p) for name, p in params.items() if p.requires_grad}
        return cls({n: first for n, (first, _) in hooks.items()}, {n: second for n, (_, second) in hooks.items()})

    @property
    def functions(self) -> list[Hook]:
        """The hooks of all parameters."""
        return [
            hook for kind in (self.on_gradient, self.after_accumulation) for hooks in kind.values() for hook in hooks
        ]

    def refuse_groups(self) -> None:
        """Raise ShardcError (SC122) for torch's hooks on several gradients: they act on Python state alone."""
        for name, hooks in self.on_gradient.items():
            if any((getattr(hook, "__module__", None) or "").startswith("torch.autograd.graph") for hook in hooks):
                message = f"'{name}' is one of several parameters that a hook waits for: register_multi_grad_hook"
                hint = "what such a hook does is not seen by a program; register_hook on each parameter is"
                raise error("SC122", message, tensor=name, hint=hint)

    def attach(self, traced: Mapping[str, Tensor]) -> None:
        """Put the hooks on gradients on the traced parameters."""
        for name, hooks in self.on_gradient.items():
            for hook in hooks:
                traced[name].register_hook(_watched(hook, name))

    def refuse_microbatches(self, count: int) -> None:
        """Raise ShardcError (SC122) for hooks on sums of gradients, where there are sums over microbatches."""
        names = [name for name, hooks in self.after_accumulation.items() if hooks]
        if names and count > 1:
            raise error(
                "SC122",
                f"'{names[0]}' has a hook that acts after each accumulation, and a step accumulates {count} times",
                tensor=names[0],
                hint="register_hook acts on each microbatch's gradient alone, and can be part of the program",
            )


def gradients(root: Tensor, params: Mapping[str, Tensor], hooks: Hooks) -> dict[str, Tensor | None]:
    """The gradient of each of these traced leaves; None where `.backward()` would leave None."""
    leaves = list(params.values())
    grads: list[Tensor | None]
    if torch_compat.runs_python(root.grad_fn, own="shardc"):
        torch.autograd.backward(root)
        grads = [p.grad for p in leaves]
    else:
        grads = [*torch.autograd.grad(root, leaves, allow_unused=True)]
        # What a backward pass within forward has left is part of what the optimizer sees.
        grads = [_sum(p.grad, g) for p, g in zip(leaves, grads, strict=True)]
    by_name: dict[str, Tensor | None] = {}
    for (name, p), g in zip(params.items(), grads, strict=True):
        if g is not None and hooks.after_accumulation[name]:
            p.grad = g
            with torch.no_grad():
                for hook in hooks.after_accumulation[name]:
                    _called(hook, name, p)
            g = p.grad
        by_name[name] = g
    return by_name


def _watched(hook: Hook, name: str) -> Hook:
    """A hook that may not read other gradients: which of them are there already, is known to autograd alone."""

    def refuse() -> Exception:
        message = f"a hook on '{name}' reads a tensor's .grad, which a program has not while it makes gradients"
        hint = "let a hook make do with the gradient that it is given; clip_grad_norm in a plan sees all of them"
        return error("SC122", message, tensor=name, hint=hint)

    def watched(gradient: Tensor) -> Any:
        with torch_compat.without_gradients(refuse):
            return _called(hook, name, gradient)

    return watched


def _called(hook: Hook, name: str, value: Tensor) -> Any:
    try:
        return hook(value)
    except Exception as problem:
        if isinstance(problem, ShardcError) or torch_compat.is_data_dependent(problem):
            raise
        message = f"a hook on '{name}' raises {type(problem).__name__} when it is traced: {problem}".partition("\n")[0]
        hint = "a hook of a program acts on the gradient alone; an optimizer that steps in hooks goes to `optimizer=`"
        raise error("SC122", message, tensor=name, hint=hint) from problem


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b
