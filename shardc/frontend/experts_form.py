"""Hugging Face's experts in their grouped form while a model is traced, whatever form it runs in.

    eager         one expert after another, of those that some token is routed to: the values of a tensor decide
    batched_mm    the weights of its expert copied for every token
    grouped_mm    tokens sorted by expert, and one product for all: what `group_experts` understands

The three compute the same. The form is an attribute of a module's configuration; it is put back.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import nn

from shardc.frontend.model_tree import modules_of

FORM = "_experts_implementation_internal"
OTHERS = ("eager", "batched_mm")
DISPATCHER = "transformers.integrations.moe"  # where the forward of a module lies that has all forms


@contextmanager
def grouped(model: nn.Module) -> Generator[None]:
    """All experts of a model in the grouped form; those of a form that the user has written stay as they are."""
    changed: list[tuple[dict[str, Any], str]] = []
    try:
        for module in modules_of(model):
            if getattr(type(module).forward, "__globals__", {}).get("__name__") != DISPATCHER:
                continue
            attributes: dict[str, Any] = getattr(getattr(module, "config", None), "__dict__", {})
            form = attributes.get(FORM)
            if form in OTHERS:
                changed.append((attributes, form))
                attributes[FORM] = "grouped_mm"
        yield
    finally:
        for attributes, form in changed:
            attributes[FORM] = form
