"""Hooks: of modules, of tensors and parameters, of gradients, of what autograd saves, of optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.hostile.harness import LAYOUTS, MICROBATCHES, Net, case


@case()
class OutputReplaced(Net):
    def __init__(self) -> None:
        super().__init__()
        self.a.register_forward_hook(lambda _m, _args, out: out * 2 + 1)


@case()
class InputReplaced(Net):
    def __init__(self) -> None:
        super().__init__()
        self.b.register_forward_pre_hook(lambda _m, args: (args[0].sin(),))


@case()
class OutputKeptAndReadLater(Net):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []
        self.a.register_forward_hook(lambda _m, _args, out: self.found.append(out))

    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x)
        return loss + self.found.pop().square().mean()


@case()
class GradientsScaledByAModulesHook(Net):
    def __init__(self) -> None:
        super().__init__()
        self.b.register_full_backward_hook(lambda _m, grads, _out: (grads[0] * 0.5,))


@case()
class GradientsOfOutputsScaled(Net):
    def __init__(self) -> None:
        super().__init__()
        self.a.register_full_backward_pre_hook(lambda _m, grads: (grads[0].clamp(-0.01, 0.01),))


@case()
class HookOfAnActivation(Net):
    def between(self, h: Tensor) -> Tensor:
        h.register_hook(lambda g: g * 3)
        return h.tanh()


@case()
class HookReadsAnActivation(Net):
    def between(self, h: Tensor) -> Tensor:
        out = h.tanh()
        out.register_hook(lambda g: g + 0.1 * h.detach())
        return out


@case()
class HookOfAnActivationReadsAWeight(Net):
    def between(self, h: Tensor) -> Tensor:
        h.register_hook(lambda g: g + self.b.weight.detach().sum(0))
        return h.tanh()


@case()
class HookOfANode(Net):
    def between(self, h: Tensor) -> Tensor:
        out = h * 2
        assert out.grad_fn is not None
        out.grad_fn.register_prehook(lambda grads: (grads[0] * 0.5,))
        return out.tanh()


@case()
class HookOfAParameter(Net):
    def __init__(self) -> None:
        super().__init__()
        self.a.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))


@case()
class HookOfATiedParameter(Net):
    def __init__(self) -> None:
        super().__init__()
        self.b.weight = self.a.weight
        self.a.weight.register_hook(lambda g: g.sign() * 0.1)


@case()
class HookReadsAnotherParameter(Net):
    def __init__(self) -> None:
        super().__init__()
        self.a.bias.register_hook(lambda g: g + 0.01 * self.b.bias)


@case(refused=dict.fromkeys(MICROBATCHES, "SC122"))
class DecayAfterAccumulation(Net):
    def __init__(self) -> None:
        super().__init__()

        def decayed(p: Tensor) -> None:
            assert p.grad is not None
            p.grad.add_(p.detach(), alpha=0.1)

        self.a.weight.register_post_accumulate_grad_hook(decayed)


@case(warned="SC109")
class HookCounts(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

        def counted(g: Tensor) -> Tensor:
            self.seen += 1
            return g * self.seen

        self.a.weight.register_hook(counted)


@case(refused=dict.fromkeys(LAYOUTS, "SC104") | dict.fromkeys(MICROBATCHES, "SC122"))
class OptimizerInBackward(Net):
    def __init__(self) -> None:
        super().__init__()

        def update(p: Tensor) -> None:
            assert p.grad is not None
            p.data.add_(p.grad, alpha=-0.1)
            p.grad = None

        self.a.weight.register_post_accumulate_grad_hook(update)


@case()
class HookRemovedAgain(Net):
    def __init__(self) -> None:
        super().__init__()
        self.a.weight.register_hook(lambda g: g * 100).remove()
        self.b.register_forward_pre_hook(lambda _m, args: (args[0] * 100,)).remove()


@case()
class HookOfAParameterMadeInForward(Net):
    def forward(self, x: Tensor) -> Tensor:
        handle = self.b.weight.register_hook(lambda g: g * 2)
        loss = super().forward(x)
        handle.remove()
        return loss


@case()
class RetainedGradient(Net):
    def between(self, h: Tensor) -> Tensor:
        h.retain_grad()
        return h.tanh()


@case()
class HookOfSeveralGradients(Net):
    def between(self, h: Tensor) -> Tensor:
        left, right = h.sin(), h.cos()
        torch.autograd.graph.register_multi_grad_hook((left, right), lambda grads: None)
        return left * right


@case()
class SavedTensorsPacked(Net):
    def between(self, h: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t):
            return h.tanh()


@case()
class SavedTensorsRounded(Net):
    """What autograd keeps is rounded to half as many bits, and gradients with it."""

    def between(self, h: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.float(), lambda t: t.double()):
            return (h * h.detach().cos()).tanh()


@case()
class HooksOfStateDicts(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(lambda *_: None)
        self.register_load_state_dict_pre_hook(lambda *_: None)


def _with_pre_hook(params: Any) -> torch.optim.Optimizer:
    made = torch.optim.SGD(params, lr=0.05)

    def clipped(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        nn.utils.clip_grad_value_(optimizer.param_groups[0]["params"], 0.001)

    made.register_step_pre_hook(clipped)
    return made


def _with_post_hook(params: Any) -> torch.optim.Optimizer:
    made = torch.optim.SGD(params, lr=0.05)

    @torch.no_grad()
    def bounded(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        for p in optimizer.param_groups[0]["params"]:
            p.clamp_(-0.1, 0.1)

    made.register_step_post_hook(bounded)
    return made


@case(optimizer=_with_pre_hook, refused="SC107")
class HookBeforeTheOptimizersStep(Net):
    """Gradients are clipped by a hook of the optimizer."""


@case(optimizer=_with_post_hook, refused="SC107")
class HookAfterTheOptimizersStep(Net):
    """Parameters are bounded by a hook of the optimizer."""


def _patched(params: Any) -> torch.optim.Optimizer:
    made = torch.optim.SGD(params, lr=0.05)
    step = made.step

    def twice(closure: Any = None) -> Any:
        step(closure)
        return step(closure)

    made.step = twice
    return made


@case(optimizer=_patched, refused="SC107")
class StepOfTheOptimizerReplaced(Net):
    """Each step is two."""


@case(refused="SC122")
class AHookReadsAnotherGradient(Net):
    """Which gradients are there already depends on autograd's order."""

    def __init__(self) -> None:
        super().__init__()
        self.a.weight.register_hook(lambda g: g if self.b.weight.grad is None else g * self.b.weight.grad.sum())


@case(refused="SC122")
class AnOptimizerStepsInHooks(Net):
    def __init__(self) -> None:
        super().__init__()
        steps = {p: torch.optim.SGD([p], lr=0.1) for p in self.parameters()}
        for p in self.parameters():
            p.register_post_accumulate_grad_hook(lambda p: steps[p].step())


@case(refused={"pp2": "SC221"})
class AHookAveragesGradientsInABuffer(Net):
    """In a pipeline backward would change it between the forwards of other microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(6, 6))
        self.a.weight.register_hook(lambda g: self.average.mul_(0.9).add_(g, alpha=0.1) * 1.0)
