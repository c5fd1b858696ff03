import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from shardc.ir.diagnostic import ShardcError
from shardc.ir.mesh import Mesh
from shardc.ir.placement import OPEN, UNSHARDED, DimPlacement, P, Placement

SIZES = st.tuples(st.integers(1, 99), st.integers(-9, -1) | st.integers(1, 9), st.integers(1, 9))


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    axes = draw(st.permutations(["pp", "dp", "cp", "tp:0", "tp:1"]))
    dims: list[DimPlacement] = []
    for _ in range(draw(st.integers(0, 5))):
        count = draw(st.integers(0, len(axes)))
        taken, axes = tuple(axes[:count]), axes[count:]
        blocks = draw(st.integers(1, 3)) if taken else 1
        unequal = draw(SIZES) if taken and blocks == 1 and draw(st.booleans()) else ()
        dims.append(DimPlacement(taken, blocks, not taken and draw(st.booleans()), unequal))
    return Placement(tuple(dims))


@given(placements())
def test_text_round_trips(placement: Placement) -> None:
    assert Placement.parse(str(placement)) == placement
    assert Placement.parse(str(placement).replace(", ", " ,").replace(".", " . ")) == placement
    assert P(*placement.dims) == placement
    assert pickle.loads(pickle.dumps(placement)) == placement


@pytest.mark.parametrize(
    ("placement", "text"),
    [
        (P(), ""),
        (P("dp"), "dp"),
        (P(None, "tp"), "-, tp"),
        (P(("dp", "tp"), None), "dp.tp, -"),
        (P(None, (3, "tp")), "-, 3*tp"),
        (P((2, "dp", "tp")), "2*dp.tp"),
        (P((1, "tp")), "tp"),
        (P(([8, 2, -1], "tp")), "[8, 2, -1]*tp"),
        (P(None, ([5, 7], "dp", "tp")), "-, [5, 7]*dp.tp"),
        (P(OPEN, "tp"), "?, tp"),
        (P("dp.tp", "-"), "dp.tp, -"),
    ],
)
def test_python_and_text_agree(placement: Placement, text: str) -> None:
    assert str(placement) == text
    assert Placement.parse(text) == placement
    assert Placement.of(text) == Placement.of(placement) == Placement.of(list(placement.dims)) == placement


@pytest.mark.parametrize(
    "text", ["[8]*tp", "[-8, -2]*tp", "[8, 0]*tp", "[8, 2]", "[8, 2*tp", "[8, 2]*", "[8 2]*tp", "[]*tp"]
)
def test_sizes_of_blocks_that_are_none(text: str) -> None:
    with pytest.raises(ShardcError, match="SC212"):
        Placement.parse(text)


@pytest.mark.parametrize("sizes", [[], [8], [8, 0], [-8, -2], [8, 2.5], [8, True], [8, "2"]])
def test_a_list_that_is_no_blocks(sizes: list[object]) -> None:
    with pytest.raises(ShardcError, match="SC212"):
        P((sizes, "tp"))


def test_padded() -> None:
    assert P("dp").padded(3) == (DimPlacement(("dp",)), UNSHARDED, UNSHARDED)


@pytest.mark.parametrize(
    ("dtensor", "ndim", "text"),
    [
        ([Replicate(), Replicate()], None, ""),
        ([Shard(0), Replicate()], None, "dp"),
        ([Shard(1), Shard(0)], None, "tp, dp"),
        ([Shard(0), Shard(0)], None, "dp.tp"),
        ([Replicate(), Shard(-1)], 3, "-, -, tp"),
    ],
)
def test_dtensor_placements(dtensor: list[object], ndim: int | None, text: str) -> None:
    assert str(Placement.of(dtensor, ndim, Mesh(dp=2, tp=2))) == text


@pytest.mark.parametrize(
    ("dtensor", "mesh", "says"),
    [
        ([Shard(0)], None, "need a mesh"),
        ([Shard(0)], Mesh(dp=2, tp=2), "1 DTensor placements for a mesh of 2 axes"),
        ([Partial()], Mesh(dp=2), "cannot be annotated"),
        ([Shard(-1)], Mesh(dp=2), "number of dims"),
    ],
)
def test_dtensor_refusals(dtensor: list[object], mesh: Mesh | None, says: str) -> None:
    with pytest.raises(ShardcError, match=f"SC212.*{says}"):
        Placement.of(dtensor, mesh=mesh)


@pytest.mark.parametrize("value", [(3, None), (), (0, "tp"), 3, ("tp", 3), "a,b", "", torch.zeros(1), ("t p",)])
def test_malformed_dims(value: object) -> None:
    with pytest.raises(ShardcError, match="SC212"):
        P(value)


@given(st.text(alphabet="-?.,*tpd3 0:|", max_size=12))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        placement = Placement.parse(text)
    except ShardcError:
        return
    assert Placement.parse(str(placement)) == placement


def test_axis_and_its_sub_axis() -> None:
    with pytest.raises(ShardcError, match=r"SC204.*tp:0"):
        P("tp", "tp:0").check(Mesh(tp=4).split("tp", (2, 2)), 2, "w")
