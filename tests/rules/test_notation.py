"""Factor notation: what text means on shapes, and what it refuses."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardc.ir.types import TensorType
from shardc.rules import registry
from shardc.rules.notation import Dims, FactorRule, Notation, RuleError, fit
from shardc.rules.projection import group, overlay, refine
from shardc.rules.registry import rule


def plain(*shape: int) -> TensorType:
    return TensorType.plain(torch.float32, shape)


# ------------------------------------------------------------------------------------------------ what text means
@pytest.mark.parametrize(
    ("notation", "operands", "results", "shown"),
    [
        (Notation("b m k, b k n -> b m n", sum="k"), [(2, 3, 4), (2, 4, 5)], [(2, 3, 5)], "b m k, b k n -> b m n"),
        (Notation("a b -> b a"), [(2, 3)], [(3, 2)], "a b -> b a"),
        (Notation("a -> ()", sum="a"), [(4,)], [()], "a -> ()"),
        (Notation("-> n"), [], [(4,)], " -> n"),
        # A dim of size 1 has no factor, whatever it is called.
        (Notation("a b -> b a"), [(1, 3)], [(3, 1)], "1 b -> b 1"),
        # Compounds, majors first; the one factor that no dim tells follows from the product.
        (Notation("(a b) c -> a b c"), [(6, 4)], [(2, 3, 4)], "(a b) c -> a b c"),
        (Notation("a (b c) -> (a b) c"), [(2, 12)], [(6, 4)], "a (b c) -> (a b) c"),
        (Notation("(3 d) -> d"), [(12,)], [(4,)], "(3 d) -> d"),
        (Notation("(3 d) -> (3 d)"), [(12,)], [(12,)], "(3 d) -> (3 d)"),
        (Notation("(s d) -> d", whole="s"), [(12,)], [(1,)], "s -> 1"),
        # `...` is aligned on the right and broadcast.
        (Notation("..., ... -> ..."), [(2, 3), (3,)], [(2, 3)], "~1 ~0, ~0 -> ~1 ~0"),
        (Notation("..., ... -> ..."), [(2, 1), (4, 1, 3)], [(4, 2, 3)], "~1 1, ~2 1 ~0 -> ~2 ~1 ~0"),
        (Notation("..., ... -> ..."), [(), (3,)], [(3,)], "(), ~0 -> ~0"),
        (Notation("..., ... -> ..."), [(2, 1), (2, 0)], [(2, 0)], "~1 1, ~1 1 -> ~1 1"),
        (Notation("... k, n k -> ... n", sum="k"), [(5, 2, 3), (4, 3)], [(5, 2, 4)], "~1 ~0 k, n k -> ~1 ~0 n"),
        (Notation("... -> ()", sum="..."), [(2, 3)], [()], "~1 ~0 -> ()"),
    ],
)
def test_text_fitted_to_shapes(notation: Notation, operands: list, results: list, shown: str) -> None:
    assert str(fit(notation, operands, results)) == shown


def test_what_a_fitted_rule_knows() -> None:
    fitted = fit(Notation("... n, (3 n) k -> ... k", sum="n", linear="each"), [(5, 4), (12, 7)], [(5, 7)])
    assert fitted.sizes == {"~0": 5, "n": 4, "3": 3, "k": 7}
    assert fitted.reduces == {"n": "sum"}
    assert fitted.whole == {"3"}
    assert fitted.linear == (0, 1)


def test_the_spread_dims_can_be_named_together() -> None:
    fitted = fit(Notation("... n, ... k -> n k", sum="..."), [(2, 3, 4), (2, 3, 5)], [(4, 5)])
    assert fitted.reduces == {"~1": "sum", "~0": "sum"}
    assert fit(Notation("... -> ...", whole="..."), [(2, 3)], [(2, 3)]).whole == {"~0", "~1"}


# ------------------------------------------------------------------------------------------------ what it refuses
@pytest.mark.parametrize(
    ("notation", "operands", "results", "message"),
    [
        (Notation("a b"), [(2, 3)], [], "has no '->'"),
        (Notation("a -> a"), [(2,), (2,)], [(2,)], "1 -> 1 tensors, the call 2 -> 1"),
        (Notation("a -> a"), [(2, 3)], [(2, 3)], "1 dims against shape"),
        (Notation("a, a -> a"), [(2,), (3,)], [(2,)], "factor 'a' is 2 and 3"),
        (Notation("a b -> a"), [(2, 3)], [(2,)], r"\['b'\] missing from a result"),
        (Notation("a b -> a, b"), [(2, 3)], [(2,), (3,)], "missing from a result"),
        (Notation("(a 4) -> a"), [(6,)], [(2,)], "'a', '4'"),
        (Notation("(a b) -> (b a)"), [(6,)], [(6,)], "'a', 'b'"),
        (Notation("... a ... -> a"), [(6,)], [(6,)], r"at most one '...'"),
        (Notation("(... a) -> a"), [(6,)], [(6,)], "not inside a dim"),
        (Notation("(a b -> a"), [(6,)], [(6,)], "cannot read"),
        (Notation("a) b -> a"), [(6, 2)], [(6,)], "cannot read"),
        (Notation("a-b -> a"), [(6,)], [(6,)], "cannot read"),
        (Notation("1 -> 1"), [(6,)], [(6,)], "factor '1' is 1 and 6"),
    ],
)
def test_text_that_does_not_fit(notation: Notation, operands: list, results: list, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        fit(notation, operands, results)


@pytest.fixture
def empty_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_RULES", {})


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("m k, k n", {"sum": "k"}, "has no '->'"),
        ("m k, k n -> m n", {}, r"\['k'\] missing from a result"),
        ("m k, k n -> m n", {"sum": "k", "whole": "q"}, "'q' is not in the rule"),
        ("a a -> a", {}, "'a' twice in one tensor"),
        ("... -> a", {}, r"missing from a result"),
    ],
)
def test_a_malformed_rule_is_refused_at_registration(
    text: str, options: dict[str, str], message: str, empty_registry: None
) -> None:
    with pytest.raises(RuleError, match=message):
        rule("op", text, **options)


def test_an_op_has_one_rule(empty_registry: None) -> None:
    rule(torch.ops.aten.relu.default, "a -> a")
    with pytest.raises(RuleError, match="has a rule already"):
        rule(torch.ops.aten.relu.default, "b -> b")


# ------------------------------------------------------------------------------------------------ dims and pieces
def test_dims_print_as_factors() -> None:
    x = Dims("x", (4, 6, 2))
    assert str(x) == "x0 x1 x2"
    assert str(x.swap(0, 2)) == "x2 x1 x0"
    assert str(x.permute((-1, 0, 1))) == "x2 x0 x1"
    assert str(x.replace(-2, "(3 y)")) == "x0 (3 y) x2"
    assert str(x.replace(1, None)) == "x0 x2"
    assert (x[1], x.dim(-1), x.ndim) == ("x1", 2, 3)


def linear_rule() -> FactorRule:
    return fit(Notation("s k, n k -> s n", sum="k", linear="each"), [(10, 64), (1536, 64)], [(10, 1536)])


def test_pieces_are_the_atoms_of_all_tensors() -> None:
    atoms = TensorType.parse("f32[(3 8 64), 64]"), TensorType.parse("f32[10, (3 8 64)]")
    projection = overlay(linear_rule(), [plain(10, 64), atoms[0]], [atoms[1]])
    named = [[projection.names[p] for p in t] for t in (*projection.operands, *projection.results)]
    assert named == [["s", "k"], ["n.0", "n.1", "n.2", "k"], ["s", "n.0", "n.1", "n.2"]]
    assert projection.blocked == frozenset()
    k = projection.names.index("k")
    assert projection.partial({k: ("a", "b")}, 0) == [("a", "sum"), ("b", "sum")]
    assert projection.partial({projection.names.index("n.1"): ("a",)}, 0) == []


def test_tensors_that_disagree_block_the_factor() -> None:
    projection = overlay(
        linear_rule(), [plain(10, 64), TensorType.parse("f32[(3 512), 64]")], [TensorType.parse("f32[10, (4 384)]")]
    )
    result = projection.results[0]
    assert {projection.names[p] for p in projection.operands[0]} == {"s", "k"}
    assert set(result[1:]) <= projection.blocked
    assert set(projection.operands[1][:2]) <= projection.blocked


def test_atoms_that_straddle_factors_block_them() -> None:
    fitted = fit(Notation("a b -> (a b)"), [(2, 3)], [(6,)])
    projection = overlay(fitted, [plain(2, 3)], [plain(6)])
    assert projection.blocked >= set(projection.operands[0]) | set(projection.results[0])


@given(st.lists(st.integers(2, 4), max_size=4), st.data())
def test_runs_of_atoms_make_up_the_factors(atoms: list[int], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(atoms) - 1)))) if atoms else [])
    runs = [tuple(atoms[i:j]) for i, j in zip([0, *cuts], [*cuts, len(atoms)], strict=True) if atoms[i:j]]
    sizes = [torch.Size(run).numel() for run in runs]
    assert group(atoms, sizes) == runs


@given(st.lists(st.integers(2, 6), max_size=3), st.lists(st.integers(2, 6), max_size=3))
def test_refining_nests_in_both(a: list[int], b: list[int]) -> None:
    total = torch.Size(a).numel() * torch.Size(b).numel()
    left, right = [*a, total // torch.Size(a).numel()], [total // torch.Size(b).numel(), *b]
    left, right = [n for n in left if n > 1], [n for n in right if n > 1]
    common = refine(left, right)
    if common is not None:
        assert group(common, left) is not None
        assert group(common, right) is not None
        assert 1 not in common
