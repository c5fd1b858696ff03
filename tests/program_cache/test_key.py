"""The key of a cached program: the same in equal circumstances, another where what passes depend on is changed."""

import enum
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shardc.compiler.preparation import Prepared, prepare
from shardc.compiler.request import Request
from shardc.plan.schema import Plan
from shardc.program_cache import surroundings
from shardc.program_cache.digest import UncacheableError, text_of
from shardc.program_cache.key import key_of
from tests.program_cache.models import FILES, PLAN, imported, written


@pytest.fixture
def request_of(tmp_path: Path) -> Callable[[], Request]:
    written(tmp_path)

    def make() -> Request:
        torch.manual_seed(0)
        model = imported(tmp_path).Net()
        return Request(model, torch.ones(4, 8), "dp=2, tp=2", Plan.from_dict(PLAN))

    return make


def prepared(request: Request) -> Prepared:
    return prepare(request, *request.asked())


def digest(request: Request) -> str:
    return key_of(prepared(request), request.asked()[0])


def test_equal_requests_have_one_key(request_of: Callable[[], Request]) -> None:
    assert digest(request_of()) == digest(request_of())
    request = request_of()
    with torch.no_grad():
        request.model.up.weight.add_(1)  # type: ignore[union-attr, operator]
        request.model.offset.add_(1)  # type: ignore[operator]
    request.model.more = iter([1])  # type: ignore[assignment]
    assert digest(request) == digest(request_of()), "no program depends on what no trace reads"


def test_a_way_of_an_open_plan_has_a_key_of_its_own(request_of: Callable[[], Request]) -> None:
    """A step in one part, because a plan says so or because it is predicted to be faster, says so in its record."""
    whole = prepared(request_of())
    plan = request_of().asked()[0]
    auto = plan.model_copy(update={"overlap": plan.overlap.model_copy(update={"split": "auto"})})
    assert key_of(whole, plan) != key_of(whole, auto)


@pytest.mark.parametrize(
    ("name", "before", "after", "same"),
    [
        ("scaling.py", "FACTOR = 2.0", "FACTOR = 3.0", False),
        ("net.py", "relu", "tanh", False),
        ("net.py", "import torch\n", "import torch\n\n", False),  # lines that diagnostics cite
        ("net.py", "'w'", "'a'", True),  # of a method that no trace runs
    ],
)
def test_a_line_that_a_trace_runs_counts(
    name: str, before: str, after: str, same: bool, request_of: Callable[[], Request], tmp_path: Path
) -> None:
    first = digest(request_of())
    (tmp_path / name).write_text(FILES[name].replace(before, after, 1))
    assert (digest(request_of()) == first) == same


SWITCHES: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "default dtype": (lambda: torch.set_default_dtype(torch.float64), lambda: torch.set_default_dtype(torch.float32)),
    "gradients": (lambda: torch.set_grad_enabled(False), lambda: torch.set_grad_enabled(True)),
    "deterministic": (
        lambda: torch.use_deterministic_algorithms(True),
        lambda: torch.use_deterministic_algorithms(False),
    ),
    "precision of products": (
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: torch.set_float32_matmul_precision("highest"),
    ),
    "kernels of attention": (
        lambda: torch.backends.cuda.enable_flash_sdp(False),
        lambda: torch.backends.cuda.enable_flash_sdp(True),
    ),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_of_torch_counts(name: str, request_of: Callable[[], Request]) -> None:
    turn, turn_back = SWITCHES[name]
    turn_back()  # "highest" of products is not what torch starts with
    request = request_of()
    first = digest(request)
    turn()
    try:
        assert digest(request) != first
    finally:
        turn_back()
    with torch.autocast("cpu", torch.bfloat16):
        assert digest(request) != first
    assert digest(request) == first


def test_versions_and_variables_count(
    request_of: Callable[[], Request], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    request = request_of()
    digests = [digest(request)]
    for change in (
        lambda patch: patch.setattr(surroundings, "versions", lambda: ("torch 9",)),
        lambda patch: patch.setattr(surroundings, "VERSION", "9"),
        lambda patch: patch.setattr(surroundings, "own_digest", lambda: "other sources"),
        lambda patch: patch.setattr(surroundings, "HAS_TRITON", None),
        lambda patch: patch.setenv("SHARDC_TABLES", "tables.yaml"),
        lambda patch: patch.setenv("TRITON_INTERPRET", "2"),
    ):
        with monkeypatch.context() as patch:
            change(patch)
            digests.append(digest(request))
    monkeypatch.setenv("SHARDC_CACHE", str(tmp_path))
    assert digest(request) == digests[0]
    assert len(set(digests)) == len(digests)


def test_a_rule_of_a_user_counts(request_of: Callable[[], Request], monkeypatch: pytest.MonkeyPatch) -> None:
    first = digest(request_of())
    rules = surroundings.all_rules()
    digests = [first]
    for other in (replace(rules[0], ragged=not rules[0].ragged), replace(rules[0], function=written)):
        monkeypatch.setattr(surroundings, "all_rules", lambda other=other: [other, *rules[1:]])
        digests.append(digest(request_of()))
    assert len({*digests}) == 3
    assert surroundings.foreign(other) == "written"
    assert not any(map(surroundings.foreign, rules))


def test_a_file_of_shardc_that_is_newer_than_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs is not what the file says."""
    monkeypatch.setattr(surroundings, "_STARTED", 0.0)
    with pytest.raises(UncacheableError, match="was written after this process had started"):
        surroundings.own_digest.__wrapped__()


def test_no_key_under_a_mode(request_of: Callable[[], Request]) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    request = prepared(request_of())
    with FlopCounterMode(display=False), pytest.raises(UncacheableError, match="mode of torch"):
        key_of(request, request.task.plan)


# ---------------------------------------------------------------------- values
class Kind(enum.Enum):
    A = 1


@dataclass(frozen=True)
class Pair:
    first: Any
    second: Any = None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0), (1, True), (1, "1"), (None, "None"), ("a", b"a"), (0.0, -0.0), ((1, 2), (2, 1)), ((1,), ((1,),)),
        ({"a": 1}, {"a": 2}), ({1, 2}, {1, 3}), (("a", "b"), ("a, b",)), (Pair(1), Pair(2)), (Pair(1), Pair(None, 1)),
        (torch.float32, torch.float16), (Path("a"), Path("b")), (Kind.A, 1), (Kind.A, "A"), ({"a": 1}, [("a", 1)]),
        (torch.ones(2), torch.zeros(2)), (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (torch.ones(2, 3), torch.ones(3, 2)), (torch.ones(2, 2), torch.ones(2, 2).t()), (torch.ones(1), [1.0]),
        (Plan.of(seed=1), Plan.of(seed=2)), (Plan.of(bucket=True), Plan()),
        (Plan.parse("params: {w: tp}", "a.yaml"), Plan.parse("params: {w: tp}", "b.yaml")),
    ],
)  # fmt: skip
def test_texts_of_different_values_differ(one: Any, other: Any) -> None:
    assert text_of(one) != text_of(other)
    assert text_of(one) == text_of(one)


def test_a_set_has_one_text_in_each_order() -> None:
    names = [f"name{i}" for i in range(50)]
    assert text_of({*names}) == text_of({*reversed(names)}) == text_of(frozenset(names)).replace("frozenset", "set")


@pytest.mark.parametrize(
    "value",
    [
        random.Random(0),
        iter([1]),
        object(),
        torch.Generator(),
        {object},
        lambda: 1,
        SimpleNamespace(a=1),
        torch.ones(2, device="meta"),
        Pair(object()),
        [1, [nn.Linear(1, 1)]],
        torch.ones(2).to_sparse(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_without_content_that_can_be_told_has_no_text(value: Any) -> None:
    with pytest.raises(UncacheableError, match=r"can be told|no bytes to tell"):
        text_of(value)
