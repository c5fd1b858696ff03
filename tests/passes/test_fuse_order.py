"""Merging keeps a graph acyclic and its barriers in place; a space is found where calls agree on one, only there."""

from __future__ import annotations

import math
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardc.passes.fusion.analysis.iteration_space import (
    Prim,
    Read,
    SpaceConstraint,
    StridedRuns,
    contiguous_runs,
    find_space,
    merged_constraint,
    space_constraint,
    strided_runs,
    strides_along,
)
from shardc.passes.fusion.clustering.cluster_dag import ClusterDag

F32 = torch.float32


@st.composite
def graphs(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]], list[int], list[tuple[int, int]]]:
    count = draw(st.integers(2, 40))
    node = st.integers(0, count - 1)
    edges = draw(st.lists(st.tuples(node, node).filter(lambda e: e[0] < e[1]), max_size=80))
    barriers = sorted(draw(st.sets(node, max_size=count // 4)))
    return count, edges, barriers, draw(st.lists(st.tuples(node, node), max_size=60))


@given(graphs())
@settings(max_examples=150)
def test_no_merge_makes_a_cycle_or_moves_a_barrier(
    case: tuple[int, list[tuple[int, int]], list[int], list[tuple[int, int]]],
) -> None:
    count, edges, barriers, tries = case
    clusters = ClusterDag(count, edges, barriers)
    fixed = set(barriers)
    for a, b in tries:
        a, b = clusters.find(a), clusters.find(b)
        if a != b and a not in fixed and b not in fixed:
            clusters.merge(a, b)
    heads = {clusters.find(n) for n in range(count)}
    assert len({clusters.position[h] for h in heads}) == len(heads)
    for source, target in (*edges, *pairwise(barriers)):
        one, other = clusters.find(source), clusters.find(target)
        assert one == other or clusters.position[one] < clusters.position[other]
    number = {node: i for i, node in enumerate(barriers)}
    for source, target in edges:
        if source in number and target not in number:
            assert clusters.earliest[clusters.find(target)] >= number[source]
        if target in number and source not in number:
            assert clusters.latest[clusters.find(source)] <= number[target]
    assert all(clusters.earliest[h] < clusters.latest[h] for h in heads if h not in fixed)


def test_a_path_through_a_third_forbids_a_merge_until_that_is_merged() -> None:
    clusters = ClusterDag(3, [(0, 1), (1, 2), (0, 2)], [])
    assert clusters.merge(0, 2) is None
    assert clusters.merge(0, 1) == 0
    assert clusters.merge(0, 2) == 0


def test_what_a_barrier_needs_is_not_kept_waiting() -> None:
    # 0 -> barrier 1;  barrier 1 -> 2: the sum 2 may not run with 0, which 1 waits for.
    clusters = ClusterDag(4, [(0, 1), (1, 2), (3, 2)], [1])
    assert not clusters.share_window(0, 2)
    assert clusters.merge(0, 2) is None
    assert clusters.merge(0, 3) is not None


# ---------------------------------------------------------------------- spaces
def prim(out: str, size: int, *reads: Read, over: str = "point", cols: int = 0) -> Prim:
    return Prim(out, "add", reads, size, F32, over, cols)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "strides", "runs"),
    [
        ((8, 16, 64), (1024, 64, 1), ((8192, 1),)),
        ((8, 16, 64), (0, 0, 1), ((128, 0), (64, 1))),
        ((8, 16, 64), (16, 1, 0), ((128, 1), (64, 0))),
        ((8, 16, 64), (0, 64, 1), ((8, 0), (1024, 1))),
        ((8, 4, 16, 16), (1024, 16, 64, 1), ((8, 1024), (4, 16), (16, 64), (16, 1))),
        ((1, 1), (5, 7), ((1, 0),)),
    ],
)
def test_strided_runs(shape: tuple[int, ...], strides: tuple[int, ...], runs: tuple[tuple[int, int], ...]) -> None:
    assert strided_runs(shape, strides) == runs


def test_along_follows_a_view_of_other_dims() -> None:
    whole_of_it = (64, 1)  # strides of the element number over (128, 64)
    assert strides_along(((128, 0), (64, 1)), (128, 64), whole_of_it) == (0, 1)
    assert strides_along(((8192, 1),), (8, 16, 64), (1024, 64, 1)) == (1024, 64, 1)
    assert strides_along(((8, 0), (1024, 1)), (8, 16, 64), (1024, 64, 1)) == (0, 64, 1)
    assert strides_along(((8, 0), (1024, 1)), (128, 64), whole_of_it) is None  # repeats every 16 rows


parts = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=3).map(tuple)


@given(parts, st.lists(st.integers(1, 6), min_size=1, max_size=3), st.sampled_from((0, 1, 2, 3, 4, 6)))
@settings(max_examples=400)
def test_what_is_read_along_dims_is_what_the_elements_numbers_say(
    read: StridedRuns, dims: list[int], step: int
) -> None:
    """Of a call whose element number is `step` along the last of these dims."""
    own = tuple(step * math.prod(dims[index + 1 :]) for index in range(len(dims)))
    strides = strides_along(read, tuple(dims), own)
    if strides is None:
        return
    elements = [
        sum(i * s for i, (_, s) in zip(index, read, strict=True)) for index in product(*(range(n) for n, _ in read))
    ]
    for index in product(*map(range, dims)):
        number = sum(i * s for i, s in zip(index, own, strict=True))
        assert elements[number] == sum(i * s for i, s in zip(index, strides, strict=True))


def test_a_norm_shares_a_space_with_a_bias_and_not_with_another_width() -> None:
    x = Read("x", contiguous_runs(8192))
    bias = prim("h", 8192, x, Read("b", ((128, 0), (64, 1))))
    mean = prim("m", 8192, Read("h", contiguous_runs(8192)), over="row", cols=64)
    centred = prim("c", 8192, Read("h", contiguous_runs(8192)), Read("m", ((128, 1), (64, 0))))
    wanted = space_constraint([bias, mean, centred])
    assert wanted is not None
    assert wanted == SpaceConstraint(8192, frozenset({64}), 64)
    found_space = find_space([bias, mean, centred], wanted)
    assert found_space is not None
    assert (found_space.dims, found_space.access_maps["m"]) == ((128, 64), (1, 0))
    other = prim("w", 8192, Read("c", contiguous_runs(8192)), over="row", cols=128)
    assert space_constraint([bias, mean, centred, other]) is None


def test_rows_of_two_lengths_have_no_space_in_common() -> None:
    """One of them would be summed in parts, or past its end."""
    x = Read("x", contiguous_runs(8192))
    short, long = (prim(f"of {n}", 8192, x, over="row", cols=n) for n in (64, 128))
    assert space_constraint([short, long]) is None
    turned = Read("y", ((64, 1), (8, 1024), (16, 64)))  # whose blocks end within a row
    assert space_constraint([prim("s", 8192, turned, over="row", cols=64)]) is None


def test_a_smaller_reduction_has_rows_of_its_own() -> None:
    large = SpaceConstraint(8192, frozenset({64}), 64)
    assert merged_constraint(large, SpaceConstraint(512, frozenset(), 64)) is None
    assert merged_constraint(large, SpaceConstraint(512, frozenset({64}))) == large


def test_a_sum_over_some_of_the_rows_dims_is_a_kernel_of_its_own() -> None:
    """Over all of them it would add what is the same in each as often as it is read."""
    made = prim("v", 60, Read("w", contiguous_runs(60)))
    user = prim("y", 120, Read("x", contiguous_runs(120)), Read("v", ((2, 0), (60, 1))))
    total = Prim("s", "sum", (Read("v", contiguous_runs(60)),), 60, F32, "all", index=((3, 0), (4, 1), (5, 0)))
    wanted = SpaceConstraint(120, frozenset({60, 20, 5}))
    assert find_space([made, user], wanted) is not None
    assert find_space([made, user, total], wanted) is None
    assert find_space([made, total], SpaceConstraint(60, frozenset({20, 5}))) is not None


def test_what_sums_over_rows_leave_is_reduced_no_more() -> None:
    x, wanted = Read("x", contiguous_runs(8192)), SpaceConstraint(8192, frozenset({64}), 64)
    total = prim("s", 8192, x, over="col", cols=64)
    assert find_space([total, prim("t", 64, Read("s", contiguous_runs(64)), over="all")], wanted) is None
    row = prim("r", 8192, x, over="row", cols=64)
    first = prim("y", 1, Read("r", ((1, 0),)), Read("s", ((1, 0),)))
    assert find_space([total, row, first], wanted) is None, "the rows are gone when their sum is there"


def test_a_sum_over_rows_is_not_read_by_rows() -> None:
    total = prim("s", 8192, Read("x", contiguous_runs(8192)), over="col", cols=64)
    again = prim("y", 8192, Read("x", contiguous_runs(8192)), Read("s", ((128, 0), (64, 1))))
    halved = prim("z", 64, Read("s", contiguous_runs(64)))
    assert find_space([total, again], SpaceConstraint(8192, frozenset({64}), 64)) is None
    assert find_space([total, halved], SpaceConstraint(8192, frozenset(), 64)) is not None


def test_a_value_made_here_is_read_as_it_lies() -> None:
    """A transposed operand from outside is a walk; one made in the kernel would have to be stored first."""
    turned = Read("x", ((64, 1), (128, 64)))
    made = prim("x", 8192, Read("in", contiguous_runs(8192)))
    reader = prim("y", 8192, turned)
    assert find_space([reader], SpaceConstraint(8192, frozenset({128}))) is not None
    assert find_space([made, reader], SpaceConstraint(8192, frozenset({128}))) is None
