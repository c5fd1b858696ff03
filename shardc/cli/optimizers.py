"""`--optimizer NAME`: an optimizer of torch.optim at its defaults, over what the model trains.

    adamw    one over all parameters
    muon     Muon over the matrices of hidden layers; AdamW over all else: vectors, embeddings, and a head that
             `get_output_embeddings` names

The names are known without torch, which `--help` does not wait for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardc.ir.diagnostic import error

if TYPE_CHECKING:
    import torch
    from torch import nn

# By name: the class of torch.optim, and its options beside the step size.
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("AdamW", {}),
    "adam": ("Adam", {}),
    "sgd": ("SGD", {}),
    "momentum": ("SGD", {"momentum": 0.9}),
    "muon": ("Muon", {"adjust_lr_fn": "match_rms_adamw"}),  # so that one step size serves AdamW, too
    "adafactor": ("Adafactor", {}),
    "nadam": ("NAdam", {}),
    "radam": ("RAdam", {}),
    "adamax": ("Adamax", {}),
    "rmsprop": ("RMSprop", {}),
    "adagrad": ("Adagrad", {}),
    "adadelta": ("Adadelta", {}),
}
DESCENT = 0.1  # the step size of plain gradient descent
ADAPTIVE = 1e-3  # and of an optimizer


def check_name(name: str | None) -> None:
    """Raise ShardcError (SC105) for an optimizer that there is not."""
    if name is not None and name not in OPTIMIZERS:
        raise error("SC105", f"there is no --optimizer {name}", hint=f"write one of {', '.join(OPTIMIZERS)}")


def make_optimizer(name: str | None, model: nn.Module, lr: float | None) -> list[torch.optim.Optimizer] | None:
    """None where none is asked for, or where nothing is trained: that is for `compile` to say."""
    check_name(name)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if name is None or not trained:
        return None
    rate = step_size(name) if lr is None else lr
    if name != "muon":
        return [_made(name, trained, rate)]
    hidden = _hidden_matrices(model)
    matrices = [parameter for parameter in trained if id(parameter) in hidden]
    rest = [parameter for parameter in trained if id(parameter) not in hidden]
    return [_made(kind, some, rate) for kind, some in (("muon", matrices), ("adamw", rest)) if some]


def _made(name: str, parameters: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    import torch

    kind, options = OPTIMIZERS[name]
    return getattr(torch.optim, kind)(parameters, lr=rate, **options)


def _hidden_matrices(model: nn.Module) -> set[int]:
    """The ids of parameters with two dims that are neither an embedding's nor an output head's."""
    from torch import nn

    outer: list[nn.Module] = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    head_of = getattr(model, "get_output_embeddings", None)
    if callable(head_of) and isinstance(head := head_of(), nn.Module):
        outer.append(head)
    left = {id(parameter) for module in outer for parameter in module.parameters()}
    return {id(p) for p in model.parameters() if p.ndim == 2 and id(p) not in left}


def step_size(name: str | None) -> float:
    """The default."""
    return DESCENT if name is None else ADAPTIVE
