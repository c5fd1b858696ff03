"""Sums and means of embedding rows, a bag of them for each row of the input: rows looked up, then added up.

Where all bags are of one length, as for an input of two dims, [bags, length], that is a sum over a dim. Where they
begin at offsets, each index knows the number of its bag, and its row is added to that bag, as in an embedding's
gradient:

    bag_of = bucketize(arange(n), offsets, right=True) - 1          0, 2, 2, 5 of 7 indices: 0 0 2 2 2 3 3
    bags   = embedding_dense_backward(embedding(w, indices), bag_of)

Maxima and gradients by frequency stay one call.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardc.passes.normalize.decompositions.table import KEEP, Emit, Node, Result, aten, decompose, dtype_of, shape_of

SUM, MEAN = 0, 1


@dataclass(frozen=True)
class _Bags:
    """Indices as [bags, length]; those that are padding count for nothing."""

    e: Emit
    indices: Node
    mean: bool
    padding: int

    @property
    def shape(self) -> tuple[int, ...]:
        return shape_of(self.indices)

    def along(self, x: Node) -> Node:
        """One number for each index, for all of its row."""
        return self.e.view(x, (*self.shape, 1))

    def real(self) -> Node:
        return self.e(aten.ne.Scalar, self.indices, self.padding)

    def counted(self, x: Node, like: Node) -> Node:
        """A bag's sum, or a gradient of it, over how many rows a mean is of."""
        if not self.mean:
            return x
        if self.padding < 0:
            return self.e.div(x, self.shape[1])
        count = self.e.sum(self.e.cast(self.real(), dtype_of(like)), [1], True)
        return self.e.div(x, self.e(aten.clamp_min.default, count, 1))


def _bags(e: Emit, indices: Node, offsets: Node, mode: int, by_frequency: bool, sparse: bool, pad: int) -> _Bags | None:
    """None where the bags are not of one length that is known, or the call has no form in simpler ones."""
    if mode not in (SUM, MEAN) or by_frequency or sparse or offsets.target is not aten.arange.start_step:
        return None
    (count,), (bags,) = shape_of(indices), shape_of(offsets)
    if not bags or count % bags or tuple(offsets.args) != (0, count, count // bags):
        return None
    return _Bags(e, e.view(indices, (bags, count // bags)), mode == MEAN, pad)


@dataclass(frozen=True)
class _Runs:
    """Indices [n] in bags that begin at offsets. An offset behind the last bag, if there is one, is the number of
    indices: torch's own kernels differ in what they make of another."""

    e: Emit
    indices: Node
    bag_of: Node  # [n]
    bags: int
    mean: bool
    padding: int

    def along(self, x: Node) -> Node:
        return self.e.view(x, (*shape_of(self.indices), 1))

    def real(self) -> Node:
        return self.e(aten.ne.Scalar, self.indices, self.padding)

    def sums(self, rows: Node) -> Node:
        """Of rows [n, d] the bags [bags, d]."""
        return self.e(aten.embedding_dense_backward.default, rows, self.bag_of, self.bags, -1, False)

    def of_bags(self, bags: Node) -> Node:
        """For each index what its bag has, [bags, d] -> [n, d]."""
        return self.e(aten.embedding.default, bags, self.bag_of)

    def counted(self, x: Node) -> Node:
        """Sums of bags, or gradients of them, over how many rows a mean is of; x is [bags, d]."""
        if not self.mean:
            return x
        ones = self.e.full((*shape_of(self.indices), 1), 1.0, dtype_of(x))
        if self.padding >= 0:
            ones = self.along(self.e.cast(self.real(), dtype_of(x)))
        return self.e.div(x, self.e(aten.clamp_min.default, self.sums(ones), 1))


def _runs(
    e: Emit, indices: Node, offsets: Node, mode: int, by_frequency: bool, sparse: bool, pad: int, bags: int
) -> _Runs | None:
    """None where the call has no form in simpler ones. Of n offsets, n - 1 may be bags."""
    if mode not in (SUM, MEAN) or by_frequency or sparse:
        return None
    if shape_of(offsets)[0] != bags:
        offsets = e(aten.slice.Tensor, offsets, 0, 0, bags)
    places = e(aten.arange.default, shape_of(indices)[0], dtype=dtype_of(offsets))
    begun = e(aten.bucketize.Tensor, places, offsets, right=True)  # how many bags begin at this index or before it
    return _Runs(e, indices, e.sub(begun, 1), bags, mode == MEAN, pad)


@decompose(aten._embedding_bag.default, aten._embedding_bag_forward_only.default, sometimes=True)
def embedding_bag(
    e: Emit, weight: Node, indices: Node, offsets: Node, by_frequency: bool, mode: int, sparse: bool,
    sample_weights: Node | None, include_last_offset: bool, padding: int,
) -> Result:  # fmt: skip
    bags = None if include_last_offset else _bags(e, indices, offsets, mode, by_frequency, sparse, padding)
    if bags is None:
        count = shape_of(offsets)[0] - int(include_last_offset)
        runs = _runs(e, indices, offsets, mode, by_frequency, sparse, padding, count)
        return KEEP if runs is None else _summed_runs(runs, weight, sample_weights)
    rows = e.wide(e(aten.embedding.default, weight, bags.indices))
    if sample_weights is not None:
        rows = e.mul(rows, bags.along(e.wide(sample_weights)))
    if padding >= 0:
        rows = e.where(bags.along(bags.real()), rows, 0.0)
    bag_sums = bags.counted(e.sum(rows, [1]), rows)
    return e.cast(bag_sums, dtype_of(weight)), None, None, None  # the rest is for a backward that is taken apart too


def _summed_runs(runs: _Runs, weight: Node, sample_weights: Node | None) -> Result:
    e = runs.e
    rows = e.wide(e(aten.embedding.default, weight, runs.indices))
    if sample_weights is not None:
        rows = e.mul(rows, runs.along(e.wide(sample_weights)))
    if runs.padding >= 0:
        rows = e.where(runs.along(runs.real()), rows, 0.0)
    return e.cast(runs.counted(runs.sums(rows)), dtype_of(weight)), None, None, None


@decompose(aten._embedding_bag_backward.default, sometimes=True)
def embedding_bag_backward(
    e: Emit, grad: Node, indices: Node, offsets: Node, bag_of: Node, size: Node, most: Node, num_weights: int,
    by_frequency: bool, mode: int, sparse: bool, sample_weights: Node | None, padding: int,
) -> Result:  # fmt: skip
    bags = _bags(e, indices, offsets, mode, by_frequency, sparse, padding)
    if bags is None or bags.shape[0] != shape_of(grad)[0]:
        runs = _runs(e, indices, offsets, mode, by_frequency, sparse, padding, shape_of(grad)[0])
        if runs is None:
            return KEEP
        rows = runs.of_bags(runs.counted(e.wide(grad)))
        if sample_weights is not None:
            rows = e.mul(rows, runs.along(e.wide(sample_weights)))
        rows = e.cast(rows, dtype_of(grad))
        return e(aten.embedding_dense_backward.default, rows, indices, num_weights, padding, False)
    wide = bags.counted(e.wide(grad), e.wide(grad))
    rows = e.expand(e(aten.unsqueeze.default, wide, 1), (*bags.shape, shape_of(grad)[1]))
    if sample_weights is not None:
        rows = e.mul(rows, bags.along(e.wide(sample_weights)))
    rows = e.cast(rows, dtype_of(grad))
    return e(aten.embedding_dense_backward.default, rows, bags.indices, num_weights, padding, False)


@decompose(aten._embedding_bag_per_sample_weights_backward.default, sometimes=True)
def per_sample_weights_backward(
    e: Emit, grad: Node, weight: Node, indices: Node, offsets: Node, bag_of: Node, mode: int, padding: int
) -> Result:
    bags = _bags(e, indices, offsets, mode, False, False, padding)
    if bags is None or bags.shape[0] != shape_of(grad)[0]:
        runs = _runs(e, indices, offsets, mode, False, False, padding, shape_of(grad)[0])
        if runs is None:
            return KEEP
        rows = e.wide(e(aten.embedding.default, weight, indices))
        products = e.sum(e.mul(rows, runs.of_bags(e.wide(grad))), [1])
        if padding >= 0:
            products = e.where(runs.real(), products, 0.0)
        return e.cast(products, dtype_of(grad))
    rows = e.wide(e(aten.embedding.default, weight, bags.indices))
    products = e.sum(e.mul(rows, e(aten.unsqueeze.default, e.wide(grad), 1)), [2])
    if padding >= 0:
        products = e.where(bags.real(), products, 0.0)
    return e.view(e.cast(products, dtype_of(grad)), shape_of(indices))
