"""Decomposed products on GPUs whose groups have memory in common: torch's kernels, looked up once per call site.

    gather_linear     x [lead, rows, K] of each rank, gathered along rows, by [K, N]: [lead, all rows, N]
    linear_scatter    x [lead, all rows, K] by [K, N], summed over ranks: [lead, rows, N]

Anywhere else (on CPUs, over gloo, by a single rank, over several hosts, in an order of ranks that is not torch's, and
of dims that the group does not divide) the call is what `ir.ops.decomposed` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from shardc.ir.graph import type_of
from shardc.ir.ops.decomposed import DECOMPOSED, GATHER_LINEAR
from shardc.ir.schema import given
from shardc.runtime.execute.process_groups import ProcessGroupCommunicator
from shardc.torch_compat import gathered_products, reaches_peers, register_shared_memory, scattered_product


def prepare_decomposed(
    call: fx.Node, comm: object, device: torch.device, read: Collection[int]
) -> Callable[..., Sequence[Tensor | None]] | None:
    """What runs a call in pieces, if something does. It takes the call's arguments, and gives its results as far as
    they are `read`, by position, each without gaps."""
    if call.target not in DECOMPOSED or not isinstance(comm, ProcessGroupCommunicator):
        return None
    args, dtype = given(call), type_of(given(call)["x"]).dtype
    members = comm.members(args["axes"])
    if members.count == 1 or not members.in_order or not reaches_peers(members.group, device):
        return None
    even = args["atoms"][args["pos"]] * members.count == args["size"] if "size" in args else True
    if not even or ("size" not in args and args["atoms"][args["pos"]] % members.count) or dtype == torch.float64:
        return None
    group = register_shared_memory(members.group)
    return _gathering(args, group, frozenset(read)) if call.target is GATHER_LINEAR else _scattering(args, group)


def _gathering(args: dict[str, Any], group: str, read: frozenset[int]) -> Callable[..., Sequence[Tensor | None]]:
    lead, shape, turned = math.prod(args["atoms"][: args["pos"]]), list(args["shape"]), list(args["turned"])
    rows, dim = _rows(lead)

    def run(x: Tensor, ws: Sequence[Tensor], *_: Any) -> Sequence[Tensor | None]:
        matrices = [w.t() if turn else w for w, turn in zip(ws, turned, strict=True)]
        whole, products = gathered_products(x.reshape(*rows, x.shape[-1]), matrices, dim, group)
        return [
            y.contiguous().view(*shape[:-1], y.shape[-1]) if index in read else None
            for index, y in enumerate((*products, whole))
        ]

    return run


def _scattering(args: dict[str, Any], group: str) -> Callable[..., Sequence[Tensor | None]]:
    lead, shape, turned = math.prod(args["atoms"][: args["pos"]]), list(args["shape"]), args["turned"]
    rows, dim = _rows(lead)

    def run(x: Tensor, w: Tensor, *_: Any) -> Sequence[Tensor | None]:
        y = scattered_product(x.reshape(*rows, x.shape[-1]), w.t() if turned else w, dim, group)
        return [y.contiguous().view(shape), None]

    return run


def _rows(lead: int) -> tuple[tuple[int, ...], int]:
    """The dims of rows, and which is divided: of one piece, they lie one after another."""
    return ((-1,), 0) if lead == 1 else ((lead, -1), 1)
