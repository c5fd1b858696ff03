"""Decompositions and solvers of matrices: each matrix is whole, what stands before it is a batch.

    linalg_qr               ... m n -> ... m k, ... k n
    linalg_solve_triangular ... m n, ... m r -> ... m r      broadcast, as a product is

Most kernels fail on a matrix that is not finite, and pivots are addresses: where a batch is split unevenly, its padding
is filled with ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardc.rules.local import LocalCall, fill_padding
from shardc.rules.notation import Dims, Linear, Notation
from shardc.rules.registry import Example, by_block, example, rule

aten = torch.ops.aten


# ------------------------------------------------------------------------------------------------ padding
@by_block
def _finite(call: LocalCall) -> Any:
    """The same call on operands whose padding no kernel refuses: a triangle of ones is invertible.

    An operand that the call is linear in stays: where its padding is 0, that of the result has to be 0.
    """
    linear = call.projection.linear
    tensors = [name for name, value in call.args.items() if isinstance(value, torch.fx.Node)]
    refused = [name for i, name in enumerate(tensors) if linear != "joint" and i not in linear]
    return call.with_args(**{name: fill_padding(call, call.args[name], 1.0) for name in refused})


def _matrices(ops: Any, text: str, whole: str, *examples: tuple[Any, ...] | Example, linear: Linear = ()) -> None:
    rule(ops, text, whole=whole, linear=linear, localize=_finite, examples=examples)


def _by_matrix(ops: Any, *examples: tuple[Any, ...] | Example) -> Callable[[Callable[..., Notation]], Any]:
    return rule(ops, localize=_finite, examples=examples)


ONE, TALL, WIDE = (3, 3), (4, 5, 3), (4, 2, 3, 4)
SQUARES = [((3, 3),), ((4, 3, 3),), ((2, 3, 4, 4),)]
SHAPES = [(ONE,), (TALL,), (WIDE,)]


# ------------------------------------------------------------------------------------------------ one matrix
_matrices(aten.linalg_matrix_exp.default, "... m n -> ... m n", "m n", *SQUARES)
_matrices(aten._linalg_det.default, "... m n -> ..., ... m n, ... m", "m n", *SQUARES)
_matrices(aten._linalg_slogdet.default, "... m n -> ..., ..., ... m n, ... m", "m n", *SQUARES)
_matrices(aten.cholesky_inverse.default, "... m n -> ... m n", "m n", *SQUARES)
_matrices(aten.linalg_eig.default, "... m n -> ... k, ... m k", "m n k", *SQUARES)
_matrices(aten._linalg_eigvals.default, "... m n -> ... k", "m n k", *SQUARES)
_matrices(aten.geqrf.default, "... m n -> ... m n, ... k", "m n k", *SHAPES)
_matrices(aten.linalg_householder_product.default, "... m n, ... k -> ... m n", "m n k", ((4, 5, 3), (4, 2)))


def _checked(text: str, whole: str, check_errors: bool) -> Notation:
    """A call that raises for a matrix with an error raises for padding too, so it has the whole batch."""
    return Notation(text, whole=f"... {whole}" if check_errors else whole)


@_by_matrix(aten.linalg_inv_ex.default, *SQUARES)
def inverse(a: Dims, check_errors: bool) -> Notation:
    return _checked("... m n -> ... m n, ...", "m n", check_errors)


@_by_matrix(aten.linalg_cholesky_ex.default, *SQUARES)
def cholesky(self: Dims, upper: bool, check_errors: bool) -> Notation:
    return _checked("... m n -> ... m n, ...", "m n", check_errors)


@_by_matrix(aten.linalg_lu_factor_ex.default, *SHAPES)
def lu_factor(a: Dims, pivot: bool, check_errors: bool) -> Notation:
    return _checked("... m n -> ... m n, ... k, ...", "m n k", check_errors)


@_by_matrix(aten.linalg_ldl_factor_ex.default, *SQUARES)
def ldl_factor(self: Dims, hermitian: bool, check_errors: bool) -> Notation:
    return _checked("... m n -> ... m n, ... m, ...", "m n", check_errors)


def _some(operands: str, results: Sequence[str | None], whole: str) -> Notation:
    """Results that the call does not compute, None here, are vectors without elements: any sum of them is the same."""
    missing = [f"none{i}" for i, result in enumerate(results) if result is None]
    texts = ", ".join(f"none{i}" if result is None else result for i, result in enumerate(results))
    names = dict.fromkeys([*whole.split(), *missing])
    return Notation(f"{operands} -> {texts}", sum="..." if missing else "", whole=" ".join(names))


@_by_matrix(aten._linalg_eigh.default, *SQUARES, ((4, 3, 3), "U", False))
def eigh(a: Dims, uplo: str, compute_v: bool) -> Notation:
    return _some("... m n", ["... k", "... m k" if compute_v else None], "m n k")


@_by_matrix(aten._linalg_svd.default, *SHAPES, (TALL, True), (WIDE, True), (TALL, False, False))
def svd(a: Dims, full_matrices: bool, compute_uv: bool, driver: str | None) -> Notation:
    if not compute_uv:
        return _some("... m n", [None, "... k", None], "m n k")
    u, v = ("u", "v") if full_matrices else ("k", "k")
    return _some("... m n", [f"... m {u}", "... k", f"... {v} n"], f"m n k {u} {v}")


@_by_matrix(aten.linalg_qr.default, *SHAPES, (TALL, "complete"), (WIDE, "complete"), (TALL, "r"))
def qr(a: Dims, mode: str) -> Notation:
    return _some("... m n", [None if mode == "r" else "... m k", "... k n"], "m n k")


@_by_matrix(aten.linalg_lu.default, *SHAPES)
def lu(a: Dims, pivot: bool) -> Notation:
    return _some("... m n", ["... m p" if pivot else None, "... m k", "... k n"], "m n k p" if pivot else "m n k")


PIVOTS = {"LU_pivots": range(1, 4)}


@_by_matrix(
    aten.lu_unpack.default,
    *(example((4, 3, 3), (4, 3), *which, ints=PIVOTS) for which in ((), (True, False), (False, True))),
    example((5, 3), (3,), ints=PIVOTS),
    example((2, 2, 3, 4), (2, 2, 3), ints=PIVOTS),
)
def lu_unpack(lu_data: Dims, lu_pivots: Dims, unpack_data: bool, unpack_pivots: bool) -> Notation:
    results = ["... m p" if unpack_pivots else None, *(["... m k", "... k n"] if unpack_data else [None, None])]
    named = f"m n q{' p' if unpack_pivots else ''}{' k' if unpack_data else ''}"
    return _some("... m n, ... q", results, named)


# ------------------------------------------------------------------------------------------------ systems of equations
def _vectors(a: Dims, b: Dims) -> bool:
    """Is B, as torch sees it, a vector for each matrix?"""
    return b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])


def _alone(a: Dims, b: Dims, vectors: bool) -> str:
    """Batch dims of B that A has not: what is made of A alone is the same for all of them, so they are whole."""
    other = b.shape[: b.ndim - (1 if vectors else 2)]
    sizes = zip(reversed(other), [*reversed(a.shape[:-2]), *(1 for _ in other)], strict=False)
    return " ".join(f"~{i}" for i, (size, of_a) in enumerate(sizes) if size > of_a)


def _sides(a: Dims, b: Dims, left: bool) -> tuple[str, str, str]:
    """Spellings of B and of the solution, and what has to be whole for them to be solved by a shard."""
    if _vectors(a, b):
        return ("q", "... m", "m n q") if b.ndim == 1 else ("... m", "... m", "m n")
    # A matrix that a batch shares may look, where the batch is cut, like a vector for each.
    batch = "... " if b.ndim == a.ndim - 1 else ""
    side = "... m r" if left else "... r m"
    return side, side, f"{batch}m n r"


SYSTEMS = [((3, 3), (3, 2)), ((4, 3, 3), (4, 3, 2)), ((2, 4, 3, 3), (4, 3, 2)), ((4, 3, 3), (1, 3, 2))]
SHARED = [((4, 2, 2), (2, 2)), ((3, 3), (4, 3, 2)), ((4, 3, 3), (3, 2))]
VECTORS = [((3, 3), (3,)), ((4, 3, 3), (4, 3)), ((4, 3, 3), (3,)), ((2, 4, 3, 3), (2, 4, 3))]


@_by_matrix(aten._linalg_solve_ex.default, *SYSTEMS, *SHARED, *VECTORS, example((4, 3, 3), (4, 2, 3), left=False))
def solve(a: Dims, b: Dims, left: bool, check_errors: bool) -> Notation:
    given, found, whole = _sides(a, b, left)
    whole = f"{whole} {_alone(a, b, _vectors(a, b))}"
    return _checked(f"... m n, {given} -> {found}, ... m n, ... m, ...", whole, check_errors)


@_by_matrix(
    aten.linalg_lstsq.default, ((5, 3), (5, 2)), ((4, 5, 3), (4, 5, 2)), ((4, 5, 3), (4, 5)), ((4, 3, 5), (4, 3))
)
def least_squares(self: Dims, b: Dims, rcond: float | None, driver: str | None) -> Notation:
    vectors = _vectors(self, b)
    given, found = ("... m", "... n") if vectors else ("... m r", "... n r")
    columns = "" if vectors else " r"
    if driver in (None, "gelsy") and self.shape[:-2] == b.shape[: self.ndim - 2]:
        return _some(f"... m k, {given}", [found, None, "...", None], f"m k n{columns}")
    return Notation(f"... m k, {given} -> {found}, ..., ..., ...", whole=f"... m k n{columns}")


def _placed(matrix: str, rest: str, left: bool) -> str:
    """`matrix x = b`, or `x matrix = b`, for a b that may have as many columns, or rows, as it likes."""
    side = "... m r" if left else "... r m"
    return f"{matrix}, {rest}{side} -> {side}"


@rule(
    aten.linalg_lu_solve.default,
    localize=_finite,
    examples=[
        *(
            example(a, a[:-1], b, left=left, ints={"pivots": range(1, 4)})
            for a, b, left in [
                ((3, 3), (3, 2), True),
                ((4, 3, 3), (4, 3, 2), True),
                ((4, 3, 3), (3, 2), True),
                ((3, 3), (4, 3, 2), True),
                ((4, 3, 3), (4, 2, 3), False),
            ]
        ),
        example((4, 3, 3), (4, 3), (4, 3, 2), adjoint=True, ints={"pivots": range(1, 4)}),
    ],
)
def lu_solve(lu: Dims, pivots: Dims, b: Dims, left: bool, adjoint: bool) -> Notation:
    return Notation(_placed("... m n", "... m, ", left), whole="m n", linear=(2,))


@rule(
    aten.linalg_solve_triangular.default,
    localize=_finite,
    examples=[example(*shapes, upper=True) for shapes in (*SYSTEMS, *SHARED)]
    + [example((4, 3, 3), (4, 2, 3), upper=False, left=False, unitriangular=True)],
)
def solve_triangular(self: Dims, b: Dims, upper: bool, left: bool, unitriangular: bool) -> Notation:
    return Notation(_placed("... m n", "", left), whole="m n", linear=(1,))


COLUMNS = [(b, a) for a, b in (*SYSTEMS, *SHARED)]
_matrices(aten.cholesky_solve.default, "... m r, ... m n -> ... m r", "m n", *COLUMNS, linear=(0,))
_matrices(aten.triangular_solve.default, "... m r, ... m n -> ... m r, ... m n", "m n r", *COLUMNS)
_matrices(
    aten.linalg_ldl_solve.default,
    "... m n, ... m, ... m r -> ... m r",
    "m n",
    *(example(a, a[:-1], b, ints={"pivots": range(1, 4)}) for a, b in SYSTEMS[:2]),
    linear=(2,),
)


@rule(
    aten.ormqr.default,
    localize=_finite,
    examples=[((3, 3), (3,), (3, 2)), ((4, 3, 3), (4, 3), (4, 3, 2)), ((4, 3, 3), (4, 3), (4, 5, 3), False, True)],
)
def multiply_by_q(self: Dims, input2: Dims, input3: Dims, left: bool, transpose: bool) -> Notation:
    side = "... m r" if left else "... r m"
    return Notation(f"... m n, ... k, {side} -> {side}", whole="m n k", linear=(2,))


@_by_matrix(
    aten.linalg_pinv.atol_rtol_tensor,
    *(example(shape, atol=(), rtol=()) for shape in (ONE, TALL, WIDE)),
    example(TALL, rtol=(4,)),
)
def pseudo_inverse(self: Dims, atol: Dims | None, rtol: Dims | None, hermitian: bool) -> Notation:
    tolerances = ["..." if x.ndim else "()" for x in (atol, rtol) if x is not None]
    return Notation(f"{', '.join(['... m n', *tolerances])} -> ... n m", whole="m n")
