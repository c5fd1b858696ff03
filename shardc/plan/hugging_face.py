"""Hugging Face's `tp_plan` and `ep_plan` in our words: a style a module ("colwise") becomes placements of its
parameters.

Their styles also say where to communicate (`colwise_gather_output`, `rowwise_split_input`, `ep_dispatch_experts`); we
read only where the weights lie and derive the rest. A style's dims are counted from the back, because expert weights
are stacked: `colwise` is the second to last dim of an nn.Linear's [out, in], and the last of a Conv1D's [in, out].
`grouped_gemm` is the first dim, the experts'. As in the library, what `ep_plan` places is not placed by `tp_plan`.
"""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from shardc.ir.annotation import Annotation
from shardc.ir.diagnostic import did_you_mean, error
from shardc.ir.placement import UNSHARDED, DimPlacement, Placement

# Which dim of the weight is sharded, from the back, and in how many packed blocks.
SHARDED: dict[str, tuple[int, int]] = {
    "colwise": (-2, 1),
    "colwise_rep": (-2, 1),
    "colwise_gather_output": (-2, 1),
    "packed_colwise": (-2, 2),
    "embedding_rowwise": (-2, 1),
    "embedding_colwise": (-1, 1),
    "rowwise": (-1, 1),
    "rowwise_rep": (-1, 1),
    "rowwise_split_input": (-1, 1),
    "packed_rowwise": (-1, 2),
    "grouped_gemm": (0, 1),
}
# Nothing is sharded: these place collectives, and those we derive.
UNPLACED = frozenset(
    {
        "replicate",
        "replicated_with_grad_allreduce",
        "sequence_parallel",
        "all_reduce",
        "mla_kv_a_proj",
        "moe_tp_experts",
        "moe_identity_expert",
        "local_params",
        "ep_dispatch_experts",
        "ep_router",
    }
)
KINDS = {"tp": "tensor", "ep": "expert"}


def library_placements(model: object, axis: str | None, experts: str | None) -> dict[str, Placement]:
    """Patterns over parameters, and their placements, for a Hugging Face model that brings a plan.

    Its tp_plan goes over `axis`, its ep_plan over `experts`; either may be None.
    """
    if axis is None and experts is None:
        raise error("SC208", "from_hf is given no axis", hint="name one for the tp_plan, or `experts=` for the ep_plan")
    by_expert = {} if experts is None else _plan_of(model, "ep")
    within = {} if axis is None else _plan_of(model, "tp")
    within = {name: style for name, style in within.items() if not any(_lies_in(name, e) for e in by_expert)}
    placed = {} if axis is None else _placements(model, within, "tp", axis)
    return placed if experts is None else placed | _placements(model, by_expert, "ep", experts)


def _plan_of(model: object, kind: str) -> dict[str, str]:
    attribute = f"{kind}_plan"
    plan: dict[str, str] = getattr(model, attribute, None) or getattr(model, f"_{attribute}", None) or {}
    if not isinstance(model, nn.Module) or not plan:
        name = type(model).__name__
        hint = "write a plan; `shardc doctor` lists those that shardc brings"
        raise error("SC208", f"{name} brings no {attribute}", hint=hint)
    return plan


def _lies_in(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def _placements(model: object, plan: dict[str, str], kind: str, axis: str) -> dict[str, Placement]:
    assert isinstance(model, nn.Module)
    placements: dict[str, Placement] = {}
    for pattern, style in plan.items():
        if style in UNPLACED:
            continue
        if style not in SHARDED:
            hint = did_you_mean(style, SHARDED.keys() | UNPLACED, "styles")
            raise error("SC208", f"{pattern}: unknown {KINDS[kind]}-parallel style '{style}'", hint=hint)
        # An entry names a module, whose weight it means (biases follow by propagation), or a bare parameter.
        for candidate in (f"{pattern}.weight", pattern):
            match = _first(model, candidate)
            # A family's plan also lists parameters that this configuration does not have.
            if match is not None and (placed := _placement(*match, style, axis)) is not None:
                placements[candidate] = placed
    return placements


def _first(model: nn.Module, pattern: str) -> tuple[nn.Module, int] | None:
    """The owner and the number of dims of the first parameter that a pattern matches."""
    sought = Annotation(pattern, Placement())
    # Tied parameters go by every one of their names here.
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if sought.matches(name):
            return model.get_submodule(name.rpartition(".")[0]), parameter.ndim
    return None


def _placement(owner: nn.Module, ndim: int, style: str, axis: str) -> Placement | None:
    dim, blocks = SHARDED[style]
    if ndim == 1 and dim < 0:
        # A bare vector (an attention sink, a bias) has only its output dim.
        return Placement((DimPlacement(tuple(axis.split("."))),)) if dim == -2 else None
    if isinstance(owner, nn.Embedding) and style == "rowwise":
        dim = -2  # an older name of embedding_rowwise
    elif type(owner).__name__ == "Conv1D" and dim < 0 and not cast(Any, style).startswith("embedding"):
        dim = -3 - dim  # stored [in, out]
    dims = [UNSHARDED] * ndim
    dims[dim] = DimPlacement(tuple(axis.split(".")), blocks)
    return Placement(tuple(dims))
