"""Random meshes of up to three axes and eight ranks, and random placements of some of a model's tensors on them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from hypothesis import strategies as st

from kernels_triton.match.op import OPS
from shardc.ir.mesh import Mesh

Shape = tuple[int, ...]
Shapes = Mapping[str, Mapping[str, Shape]]  # kind ("params", "inputs", "activations") -> name -> shape

NAMES = ("dp", "tp", "cp")
MESHES = [
    Mesh(zip(NAMES, sizes, strict=False))
    for count in (1, 2, 3)
    for sizes in product((2, 3, 4, 1), repeat=count)
    if 2 <= Mesh(zip(NAMES, sizes, strict=False)).world_size <= 8 and sizes.count(1) <= 1
]
meshes = st.sampled_from(MESHES)
EXCLUDED = ("add", "mul", "where", "sum", "native_layer_norm", "tanh", "_to_copy", "exp", "shardc.mask_pad", "cat")


@st.composite
def unequal(draw: st.DrawFn, size: int) -> tuple[str, ...]:
    """Blocks of a dim, some of which every rank has; none of a dim that is too small."""
    if size < 4:
        return ()
    bounds = sorted(draw(st.sets(st.integers(1, size - 1), min_size=1, max_size=3)))
    sizes = [b - a for a, b in zip((0, *bounds), (*bounds, size), strict=True)]
    whole = draw(st.integers(0, len(sizes)))  # one of them, or none
    return (f"[{', '.join(f'-{n}' if i == whole else str(n) for i, n in enumerate(sizes))}]*",)


@st.composite
def placements(draw: st.DrawFn, shape: Shape, mesh: Mesh) -> str:
    """The text of one placement: axes in any order on any dims, several on one dim, blocks equal and not, OPEN."""
    free = list(draw(st.permutations(mesh.names)))
    dims: list[str] = ["-"] * len(shape)
    for dim in draw(st.permutations(range(len(shape)))):
        # Most dims of most tensors take no axis or one; what is left goes to the dims drawn later.
        count = min(len(free), draw(st.sampled_from((1, 0, 1, 2, 0, 3))))
        axes = [free.pop() for _ in range(count)]
        blocks = [n for n in (2, 3) if shape[dim] % n == 0 and shape[dim] > n]
        if axes:
            block = draw(st.sampled_from(("", "", *(f"{n}*" for n in blocks), *(draw(unequal(shape[dim]))))))
            dims[dim] = block + ".".join(axes)
        elif draw(st.integers(0, 5)) == 5:
            dims[dim] = "?"
    return ", ".join(dims)


@st.composite
def plans(draw: st.DrawFn, shapes: Shapes, mesh: Mesh, most: int = 5) -> dict[str, dict[str, str]]:
    """A plan in full names: a few of the tensors of each kind, placed at random."""
    plan: dict[str, dict[str, str]] = {}
    for kind, tensors in shapes.items():
        names = [name for name, shape in tensors.items() if shape]
        if not names:
            continue
        least = 1 if kind == "inputs" and not any(shapes["params"].values()) else 0
        chosen = draw(st.lists(st.sampled_from(names), unique=True, min_size=least, max_size=min(most, len(names))))
        plan[kind] = {name: draw(placements(tensors[name], mesh)) for name in chosen}
    return {kind: named for kind, named in plan.items() if named}


# What a plan says of kernels: none, all, the generator's alone, some templates, and some calls left as they are.
fusions = st.one_of(
    st.sampled_from((False, True, True)),
    st.fixed_dictionaries(
        {},
        optional={
            "templates": st.lists(st.sampled_from(sorted(OPS)), unique=True, max_size=3),
            "exclude": st.lists(st.sampled_from(EXCLUDED), unique=True, max_size=2),
        },
    ).filter(bool),
)
