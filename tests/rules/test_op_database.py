"""torch's database of ops: each, with its first operand split along any of its dims, is what eager PyTorch computes, or
is refused with a code. An op without a rule is one that `WITHOUT` gives the reason for.

In the ordinary tier a sample is compiled and run; `pytest -m long` tries all of the database.
"""

from __future__ import annotations

import pytest
import torch

from shardc.rules import find_rule
from tests.rules.op_database import arguments_of, entries, outcome

PARTS = 160  # of the database, of which the ordinary tier tries one
UNINITIALISED = ("empty_like", "new_empty", "new_empty_strided")  # eager PyTorch says something else each time
# op -> why the operands of a call are gathered (SC301)
WITHOUT = {
    "aten.cholesky.default": "it raises for the zeros that pad a batch; torch.linalg.cholesky has a rule",
    "aten._embedding_bag.default": "of maxima, and of gradients by frequency, which depend on all indices",
    "aten._embedding_bag_backward.default": "of maxima, and of gradients by frequency, which depend on all indices",
    "aten._embedding_bag_per_sample_weights_backward.default": "of maxima, which have none",
    "aten._batch_norm_with_update_functional.default": "a backend's form of what is traced as an op that has a rule",
    "aten.batch_norm_backward.default": "of the one before",
    "aten._pdist_forward.default": "of every pair of rows",
    "aten._pdist_backward.default": "of every pair of rows",
    "aten._unsafe_masked_index.default": "of decompositions that a trace does not use",
    "aten._unsafe_masked_index_put_accumulate.default": "of decompositions that a trace does not use",
    "aten.hash_tensor.default": "a hash of bits, whose order counts",
    "aten._efficientzerotensor.default": "the gradient of a constant, of which there is nothing to split",
    "aten.nonzero_static.default": "which positions come first depends on the whole tensor",
    "aten.repeat_interleave.Tensor": "which row comes where depends on all numbers of repeats",
    "aten.renorm.default": "the example, in the documentation, of an op that gets its rule from the user",
    "aten._conj_physical.default": "of complex numbers that are marked as conjugates, which tracing makes at once",
    "torch_nn._linear_cross_entropy_batch_chunked.default": "a library's op: without chunks, the loss is sharded",
    "torch_nn._linear_cross_entropy_batch_chunked_no_reduction.default": "a library's op, as the one before",
    "aten.zero.default": "zeros, of which there is nothing to split",
}


def tried(name: str) -> list[str]:
    """What is wrong with an op of the database."""
    faults: list[str] = []
    for k, arguments in enumerate(arguments_of(name)):
        for dim in arguments.dims:
            result = outcome(name, arguments, dim)
            if result.fault:
                shape = list(arguments.tensor.shape)
                faults.append(f"{name}, arguments {k}, dim {dim} of {shape}: {result.verdict}")
            faults += [f"{name}: {op} has no rule, and no reason why not" for op in result.missing - WITHOUT.keys()]
    return faults


def op_of(name: str) -> object:
    """None where this version of torch has no such op."""
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet, None), overload, None)


@pytest.mark.sampled(PARTS)
@pytest.mark.parametrize("part", range(PARTS))
def test_right_or_refused(part: int) -> None:
    faults: list[str] = []
    for name in sorted(entries().keys() - set(UNINITIALISED))[part::PARTS]:
        faults += tried(name)
    assert not faults, "\n".join(faults)


def test_few_are_without_a_rule() -> None:
    """The cases above hold every op to this table."""
    assert len(WITHOUT) <= 20
    assert all(find_rule(op_of(name)) is None for name in WITHOUT if op_of(name) is not None)
