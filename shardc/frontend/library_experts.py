"""Experts of `transformers` that do not go through the library's interface, in the grouped form while they are traced.

    DBRX           a loop over the experts that some token is routed to
    JetMoE         rows split by numbers of tokens that Python reads
    LongCat-Flash  a loop, and experts behind the last one that hand a token on as it is
    Llama 4        every expert for every token, with what is not routed multiplied by zero
    Switch         a loop over modules, a token beyond an expert's capacity to none of them

Each function here computes what the library's forward does, for any routing, and gives the same gradients; its
results differ by rounding alone, since rows meet their expert in another order. `Rows` writes what
`passes.normalize.group_experts` understands.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from shardc.frontend.model_changes import HOOKS
from shardc.frontend.model_tree import modules_of
from shardc.ir.ops.grouped import grouped_mm


class Rows:
    """Tokens in the order of their experts. `ids`: [tokens, k], an expert each; one that is `experts` is none."""

    def __init__(self, ids: Tensor, experts: int) -> None:
        self.tokens, self.each = ids.shape
        self.ordered, self.perm = torch.sort(ids.reshape(-1))
        counts = torch.histc(self.ordered.float(), bins=experts, min=0, max=experts - 1)
        self.ends = torch.cumsum(counts, 0, dtype=torch.int32)

    def of_tokens(self, x: Tensor) -> Tensor:
        """[tokens, h] -> [tokens * k, h]"""
        return x[self.perm // self.each]

    def of_slots(self, x: Tensor) -> Tensor:
        """[tokens, k, ...] -> [tokens * k, ...]"""
        return x.reshape(-1, *x.shape[2:])[self.perm]

    def product(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Each row by the matrix of its expert: [rows, n], [experts, n, m] -> [rows, m]; zeros for those of none."""
        return grouped_mm(rows.to(weight.dtype), weight, self.ends)

    def slots(self, rows: Tensor) -> Tensor:
        """[tokens * k, h] -> [tokens, k, h], where they came from."""
        back = torch.empty_like(self.perm)
        back[self.perm] = torch.arange(self.perm.shape[0], device=self.perm.device)
        return rows[back].view(self.tokens, self.each, -1)


def dbrx(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    mlp, x = self.mlp, hidden_states.reshape(-1, self.hidden_size)
    rows = Rows(top_k_index, self.num_experts)
    w1, v1, w2 = (w.view(self.num_experts, self.ffn_hidden_size, self.hidden_size) for w in (mlp.w1, mlp.v1, mlp.w2))
    grouped = rows.of_tokens(x)
    inner = mlp.activation_fn(rows.product(grouped, w1.transpose(1, 2))) * rows.product(grouped, v1.transpose(1, 2))
    weighted = rows.product(inner, w2) * rows.of_slots(top_k_weights).unsqueeze(-1)
    return rows.slots(weighted).sum(1).to(x.dtype).view(hidden_states.shape[0], -1, self.hidden_size)


def longcat(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    real = self.num_routed_experts
    none = top_k_index >= real
    kept = hidden_states * torch.where(none, top_k_weights, 0).sum(-1, keepdim=True)
    if not real:
        return kept.to(hidden_states.dtype)
    rows = Rows(torch.where(none, real, top_k_index), real)
    first = self.gate_up_proj[:real] if self.total_experts > real else self.gate_up_proj
    weights = first.transpose(1, 2), self.down_proj.transpose(1, 2)
    gate, up = rows.product(rows.of_tokens(hidden_states), weights[0]).chunk(2, dim=-1)
    weighted = rows.product(self.act_fn(gate) * up, weights[1]) * rows.of_slots(top_k_weights).unsqueeze(-1)
    return (rows.slots(weighted).sum(1) + kept).to(hidden_states.dtype)


def llama4(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """A score of zero makes an expert's input zero, so its output, and what it adds to gradients, is zero, too."""
    experts, x = self.experts, hidden_states.reshape(-1, self.hidden_dim)
    scores, logits = self.router(x)
    chosen = torch.topk(logits, self.top_k, dim=1)[1]
    rows = Rows(chosen, self.num_experts)
    scored = rows.of_tokens(x) * rows.of_slots(scores.gather(1, chosen)).unsqueeze(-1)
    gate, up = rows.product(scored, experts.gate_up_proj).chunk(2, dim=-1)
    routed = rows.product(up * experts.act_fn(gate), experts.down_proj)
    return self.shared_expert(x) + rows.slots(routed).sum(1), logits


def jetmoe_gating(self: Any, hidden_states: Tensor) -> tuple[Tensor, ...]:
    """In the place of how many rows an expert has, `Rows`: what `jetmoe_linear` needs of them."""
    logits = self.layer(hidden_states).float()
    chosen, ids = logits.topk(self.top_k, dim=1)
    gates = torch.softmax(chosen, dim=1).type_as(hidden_states)
    rows: Any = Rows(ids, self.num_experts)
    return rows.perm, rows.perm // self.top_k, gates.flatten()[rows.perm], rows, logits


def jetmoe_linear(self: Any, inputs: Tensor, expert_size: Any) -> Tensor:
    return expert_size.product(inputs, self.weight.transpose(1, 2))


def switch(self: Any, hidden_states: Tensor, selected_experts: Tensor, routing_weights: Tensor) -> Tensor:
    selected = selected_experts[:, 0]
    experts: list[Any] = [self[f"expert_{e}"] for e in range(self.num_experts)]
    first = experts[0]
    ids = torch.where(selected.sum(-1) > 0, selected.argmax(-1), self.num_experts)
    rows = Rows(ids.unsqueeze(-1), self.num_experts)
    wi, wo = (torch.stack([getattr(e, name).weight for e in experts]).transpose(1, 2) for name in ("wi", "wo"))
    inner = first.dropout(first.act(rows.product(rows.of_tokens(hidden_states), wi)))
    weighted = rows.product(inner, wo) * rows.of_slots(routing_weights).unsqueeze(-1)
    return rows.slots(weighted).sum(1).to(hidden_states.dtype)


# Of each class its form, and which of its modules the form does not call, but computes with what they hold.
_LIBRARY = "transformers.models"
FORMS: dict[tuple[str, str], tuple[Callable[..., Any], tuple[str, ...]]] = {
    (f"{_LIBRARY}.dbrx.modeling_dbrx", "DbrxExperts"): (dbrx, ("mlp",)),
    (f"{_LIBRARY}.longcat_flash.modeling_longcat_flash", "LongcatFlashExperts"): (longcat, ("identity_expert",)),
    (f"{_LIBRARY}.llama4.modeling_llama4", "Llama4TextMoe"): (llama4, ("experts",)),
    (f"{_LIBRARY}.jetmoe.modeling_jetmoe", "JetMoeTopKGating"): (jetmoe_gating, ()),
    (f"{_LIBRARY}.jetmoe.modeling_jetmoe", "JetMoeParallelExperts"): (jetmoe_linear, ()),
    (f"{_LIBRARY}.switch_transformers.modeling_switch_transformers", "SwitchTransformersExperts"): (
        switch,
        ("expert_*", "expert_*.wi", "expert_*.wo"),
    ),
}


@contextmanager
def library_experts(model: nn.Module) -> Generator[None]:
    """Classes of the library in their grouped form, for what is traced meanwhile; their own is put back.

    A class that somebody has given another forward stays as it is, and so does one of whose modules one is changed: a
    hook or an adapter that the form would not call.
    """
    changed: list[tuple[type[nn.Module], Any]] = []
    by_class: dict[type[nn.Module], list[nn.Module]] = {}
    for module in modules_of(model):
        by_class.setdefault(type(module), []).append(module)
    try:
        for (name, kind), (form, skipped) in FORMS.items():
            cls: Any = getattr(sys.modules.get(name), kind, None)
            ours = by_class.get(cls, [])
            if ours and cls.forward.__module__ == name and not any(_is_changed(module, skipped) for module in ours):
                changed.append((cls, cls.forward))
                cls.forward = form
        yield
    finally:
        for cls, forward in changed:
            cls.forward = forward


def _is_changed(module: nn.Module, skipped: tuple[str, ...]) -> bool:
    within = [m for name, m in module.named_modules() if any(fnmatchcase(name, pattern) for pattern in skipped)]
    if any(not type(m).__module__.startswith(("transformers.", "torch.nn.")) for m in within):
        return True
    return any("forward" in vars(m) for m in [module, *within]) or any(vars(m).get(k) for m in within for k in HOOKS)
