"""Batches as trees: leaves in lists, tuples and mappings, a few levels deep."""

from __future__ import annotations

from typing import Any

from shardc import torch_compat
from shardc.ir.diagnostic import ShardcError, error


def flatten(tree: Any) -> tuple[list[Any], torch_compat.Structure]:
    """As torch_compat.flatten. Raises ShardcError (SC103) for a tree that is nested without an end."""
    try:
        return torch_compat.flatten(tree)
    except RecursionError:
        raise _endless() from None


def flatten_with_paths(tree: Any) -> list[tuple[str, Any]]:
    """As torch_compat.flatten_with_paths. Raises ShardcError (SC103) for a tree that is nested without an end."""
    try:
        return torch_compat.flatten_with_paths(tree)
    except RecursionError:
        raise _endless() from None


def _endless() -> ShardcError:
    message = "the batch is nested too deeply, or contains itself"
    return error("SC103", message, hint="give tensors, or lists and mappings of them a few levels deep")
