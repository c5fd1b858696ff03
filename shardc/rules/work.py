"""How much arithmetic one rank does in a call: FLOPs, from the factors of the op's rule at their local sizes.

    mm            m k, k n -> m n                    2 m k n
    sdpa          b h s d, b h t d, b h t e          2 b h s t (d + e), half of that if causal
    convolution   n c h w, o c kh kw -> n o p q      2 n o p q c kh kw
    others        one for each element they make: little, but not nothing
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import fx

from shardc.ir.graph import Graph, info, operands, results, type_of
from shardc.ir.ops.attention import SDPA
from shardc.ir.ops.grouped import GROUPED_MM, GROUPED_MM_WGRAD
from shardc.ir.ops.linear import LINEAR, LINEAR_DGRAD, LINEAR_WGRAD
from shardc.ir.schema import given
from shardc.ir.types import local_size
from shardc.rules.projection import Piece, project

aten = torch.ops.aten

CONVOLUTION = aten.convolution.default
BATCHED = {aten.bmm.default, SDPA}  # products of activations: attention's own
WEIGHTED = {
    CONVOLUTION,
    LINEAR,
    LINEAR_DGRAD,
    LINEAR_WGRAD,
    GROUPED_MM,
    GROUPED_MM_WGRAD,
    *(getattr(aten, name).default for name in ("mm", "mv", "dot", "vdot")),
}


def flops(graph: Graph, call: fx.Node) -> int:
    """Floating-point operations of one rank in a call that is not localized yet."""
    if call.target is CONVOLUTION:
        return _convolution(graph, call)
    if call.target not in BATCHED and call.target not in WEIGHTED:
        mesh = graph.mesh
        return sum(math.prod(type_of(v).local_shape(mesh)) for v in results(call) if v is not None)
    projection = project(call)
    axes = dict(info(call).assignment)

    def product(*tensors: Iterable[Piece]) -> int:
        pieces = {piece for tensor in tensors for piece in tensor}
        return 2 * math.prod(
            local_size(projection.sizes[p], axes.get(projection.names[p], ()), graph.mesh) for p in pieces
        )

    ins, outs = projection.operands, projection.results
    if call.target is SDPA:
        both = product(ins[0], ins[1]) + product(outs[0], ins[2])
        return both // 2 if given(call)["causal"] else both
    if call.target in (GROUPED_MM, GROUPED_MM_WGRAD):  # a row meets the matrix of its own group alone
        experts = set(ins[2])
        return product(set(ins[0]) - experts, set(ins[1]) - experts)
    return product(*ins)


def _convolution(graph: Graph, call: fx.Node) -> int:
    x, weight = (type_of(v).local_shape(graph.mesh) for v in operands(call)[:2])
    walked = x if given(call)["transposed"] else type_of(call).local_shape(graph.mesh)
    return 2 * math.prod(walked) * math.prod(weight[1:])
