"""What a trace may read, changed behind the back of a key: each case yields a request, changes one thing, and yields
again. The two keys differ, or there is none; one key for both would be a wrong program.

Longer than 400 lines: all cases are of one kind, and go through the same few functions.
"""

import enum
import functools
import logging
import operator
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from shardc.compiler.request import Request
from shardc.program_cache.key import key_of
from shardc.program_cache.origins import UncacheableError
from tests.program_cache import hostile_settings as settings

Requests = Iterator[Request]
CASES: dict[str, Callable[[pytest.MonkeyPatch], Requests]] = {}


def case(build: Callable[[pytest.MonkeyPatch], Requests]) -> Callable[[pytest.MonkeyPatch], Requests]:
    CASES[build.__name__] = build
    return build


def of(model: nn.Module, **options: Any) -> Request:
    return Request(model, torch.ones(4, 8), "dp=2", **options)


class Scaled(nn.Linear):
    """Calls what it holds."""

    def __init__(self, factor: Callable[[], Any]) -> None:
        super().__init__(8, 8)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor()


# ---------------------------------------------------------------------- modules and names
class HoldsModule(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.settings.FACTOR  # type: ignore[operator, union-attr]


@case
def a_value_of_a_module_that_the_model_holds(patch: pytest.MonkeyPatch) -> Requests:
    model = HoldsModule(8, 8)
    object.__setattr__(model, "settings", settings)
    yield of(model)
    patch.setattr(settings, "FACTOR", 3.0)
    yield of(model)


@case
def a_value_of_a_module_that_a_helper_is_given(patch: pytest.MonkeyPatch) -> Requests:
    model = Scaled(lambda: settings.factor_of(settings))
    yield of(model)
    patch.setattr(settings, "FACTOR", 3.0)
    yield of(model)


@case
def a_value_of_a_module_in_a_closure(patch: pytest.MonkeyPatch) -> Requests:
    held = settings
    model = Scaled(lambda: held.FACTOR)
    yield of(model)
    patch.setattr(settings, "FACTOR", 3.0)
    yield of(model)


@case
def a_value_of_a_module_by_a_name_that_is_put_together(patch: pytest.MonkeyPatch) -> Requests:
    model = Scaled(lambda: settings.by_name(settings, "TOR"))
    yield of(model)
    patch.setattr(settings, "FACTOR", 3.0)
    yield of(model)


@case
def a_name_that_a_module_computes(patch: pytest.MonkeyPatch) -> Requests:
    """PEP 562: the module has no such name, and its `__getattr__` answers."""
    module = types.ModuleType("computed")
    values = {"FACTOR": 2.0}

    def value_of(name: str) -> float:
        if name not in values:
            raise AttributeError(name)
        return values[name]

    module.__getattr__ = value_of  # type: ignore[method-assign]
    model = Scaled(lambda: module.FACTOR)
    yield of(model)
    values["FACTOR"] = 3.0
    yield of(model)


@case
def a_class_attribute_behind_a_module(patch: pytest.MonkeyPatch) -> Requests:
    model = Scaled(lambda: settings.Inner.factor)
    yield of(model)
    patch.setattr(settings.Inner, "factor", 3.0)
    yield of(model)


@case
def the_globals_of_a_function(patch: pytest.MonkeyPatch) -> Requests:
    model = Scaled(lambda: settings.factor_of.__globals__["FAC" + "TOR"])
    yield of(model)
    patch.setattr(settings, "FACTOR", 3.0)
    yield of(model)


# ---------------------------------------------------------------------- methods that no user's code names
class Keyed:
    """`{**keyed}` calls `keys`, of which no code speaks."""

    def keys(self) -> list[str]:
        return settings.KEYS

    def __getitem__(self, key: str) -> float:
        return 2.0


@case
def a_method_that_python_calls(patch: pytest.MonkeyPatch) -> Requests:
    keyed: Any = Keyed()
    model = Scaled(lambda: sum({**keyed}.values()))
    yield of(model)
    patch.setattr(settings, "KEYS", ["a", "b"])
    yield of(model)


class Matched:
    @property
    def factor(self) -> float:
        return settings.FACTOR


def by_pattern(value: object) -> float:
    match value:
        case Matched(factor=factor):
            return factor
    return 0.0


@case
def a_property_that_a_pattern_reads(patch: pytest.MonkeyPatch) -> Requests:
    matched = Matched()
    model = Scaled(lambda: by_pattern(matched))
    yield of(model)
    patch.setattr(settings, "FACTOR", 3.0)
    yield of(model)


class Built(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = settings.FACTOR


@case
def a_module_that_forward_makes(patch: pytest.MonkeyPatch) -> Requests:
    model = Scaled(lambda: Built().value)
    yield of(model)
    patch.setattr(settings, "FACTOR", 3.0)
    yield of(model)


@case
def a_method_by_an_operator(patch: pytest.MonkeyPatch) -> Requests:
    matched = Matched()
    model = Scaled(lambda: operator.attrgetter("fac" + "tor")(matched))
    yield of(model)
    patch.setattr(settings, "FACTOR", 3.0)
    yield of(model)


class Meta(type):
    @property
    def factor(cls) -> float:
        return settings.FACTOR

    def __getattr__(cls, name: str) -> float:
        return settings.FACTOR


class OfMeta(metaclass=Meta):
    pass


@case
def a_property_of_a_metaclass(patch: pytest.MonkeyPatch) -> Requests:
    model = Scaled(lambda: OfMeta.factor)
    yield of(model)
    patch.setattr(settings, "FACTOR", 3.0)
    yield of(model)


@case
def an_attribute_that_a_metaclass_makes_up(patch: pytest.MonkeyPatch) -> Requests:
    model = Scaled(lambda: OfMeta.anything)
    yield of(model)
    patch.setattr(settings, "FACTOR", 3.0)
    yield of(model)


# ---------------------------------------------------------------------- values
class Slotted(nn.Linear):
    __slots__ = ("rate",)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.rate  # type: ignore[has-type]


@case
def a_slot_of_a_module(patch: pytest.MonkeyPatch) -> Requests:
    for rate in (2.0, 3.0):
        model = Slotted(8, 8)
        object.__setattr__(model, "rate", rate)
        yield of(model)


class Listing(nn.Linear, list):  # type: ignore[type-arg]
    __hash__ = object.__hash__

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * list.__getitem__(self, 0)


@case
def an_item_of_a_module_that_is_a_list(patch: pytest.MonkeyPatch) -> Requests:
    for rate in (2.0, 3.0):
        model = Listing(8, 8)
        list.append(model, rate)
        yield of(model)


class Mode(enum.Enum):
    A = 2.0


@case
def what_a_member_of_an_enum_holds(patch: pytest.MonkeyPatch) -> Requests:
    model = Scaled(lambda: Mode.A.weight)  # type: ignore[attr-defined]
    for weight in (2.0, 3.0):
        patch.setattr(Mode.A, "weight", weight, raising=False)
        yield of(model)


@case
def the_value_of_a_member_in_a_set(patch: pytest.MonkeyPatch) -> Requests:
    for value in (2.0, 3.0):
        kind: Any = enum.Enum("Kind", {"A": value}, module=__name__, qualname="Kind")
        model = nn.Linear(8, 8)
        model.kinds = {kind.A}  # type: ignore[assignment]
        yield of(model)


@case
def a_dict_that_is_written_to(patch: pytest.MonkeyPatch) -> Requests:
    table: dict[str, Any] = {"a": {"b": [2.0]}}
    model = Scaled(lambda: table["a"]["b"][0])
    yield of(model)
    table["a"]["b"][0] = 3.0
    yield of(model)


@case
def a_tensor_that_is_written_to(patch: pytest.MonkeyPatch) -> Requests:
    limit = torch.ones(3)
    model = Scaled(lambda: float(limit[0]))
    yield of(model)
    limit[0] = 3.0
    yield of(model)


@case
def a_default_of_a_function(patch: pytest.MonkeyPatch) -> Requests:
    def factor(value: float = 2.0) -> float:
        return value

    model = Scaled(factor)
    yield of(model)
    factor.__defaults__ = (3.0,)
    yield of(model)


@case
def an_argument_of_a_partial_of_a_method(patch: pytest.MonkeyPatch) -> Requests:
    inner = Matched()
    for value in (2.0, 3.0):
        yield of(Scaled(functools.partial(functools.partial(max, value), float(type(inner) is Matched))))


# ---------------------------------------------------------------------- code
@case
def code_that_was_made_of_text(patch: pytest.MonkeyPatch) -> Requests:
    for text in ("lambda: 2.0", "lambda: 3.0"):
        yield of(Scaled(eval(text, {"__name__": "made"})))


@case
def code_of_text_in_a_library(patch: pytest.MonkeyPatch) -> Requests:
    for constant in ("1", "2"):
        patch.setattr(F, "gelu", eval(f"lambda x, approximate='none': x * {constant}", vars(F)))
        yield of(nn.Sequential(nn.Linear(8, 8), nn.GELU()))


class Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * settings.FACTOR


@case
def what_a_backward_of_autograd_reads(patch: pytest.MonkeyPatch) -> Requests:
    model = Scaled(lambda: Custom.apply(torch.ones(8)))
    yield of(model)
    patch.setattr(settings, "FACTOR", 3.0)
    yield of(model)


# ---------------------------------------------------------------------- torch
GELU = nn.Sequential(nn.Linear(8, 8), nn.GELU())


@case
def one_function_of_torch_for_another(patch: pytest.MonkeyPatch) -> Requests:
    yield of(GELU)
    patch.setattr(F, "gelu", F.silu)
    yield of(GELU)


@case
def forward_of_one_class_of_torch_for_another(patch: pytest.MonkeyPatch) -> Requests:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    yield of(model)
    patch.setattr(nn.ReLU, "forward", nn.Tanh.forward)
    yield of(model)


@case
def one_builtin_of_torch_for_another(patch: pytest.MonkeyPatch) -> Requests:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    yield of(model)
    patch.setattr(torch, "relu", torch.sigmoid)
    yield of(model)


@case
def a_partial_in_the_place_of_torch_s(patch: pytest.MonkeyPatch) -> Requests:
    real = F.gelu
    for approximate in ("none", "tanh"):
        patch.setattr(F, "gelu", functools.partial(real, approximate=approximate))
        yield of(GELU)


@case
def an_object_in_the_place_of_torch_s(patch: pytest.MonkeyPatch) -> Requests:
    for size in (0.0, 0.5):
        patch.setattr(F, "gelu", nn.LeakyReLU(size))
        yield of(GELU)


@case
def a_default_of_torch_s_function(patch: pytest.MonkeyPatch) -> Requests:
    yield of(nn.LayerNorm(8))
    patch.setattr(F.layer_norm, "__defaults__", (None, None, 0.5))
    yield of(nn.LayerNorm(8))


@case
def a_function_of_an_optimizer(patch: pytest.MonkeyPatch) -> Requests:
    model = nn.Linear(8, 8)
    yield of(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    patch.setattr(sys.modules["torch.optim.sgd"], "sgd", lambda *args, **kwargs: None)
    yield of(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


@case
def hooks_of_what_autograd_saves(patch: pytest.MonkeyPatch) -> Requests:
    yield of(GELU)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
        yield of(GELU)


@case
def an_op_of_torch_that_is_implemented_anew(patch: pytest.MonkeyPatch) -> Requests:
    yield of(GELU)
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("gelu", lambda x, approximate="none": x, "AutogradCPU")
        yield of(GELU)


@case
def the_call_of_all_modules(patch: pytest.MonkeyPatch) -> Requests:
    yield of(GELU)
    patch.setattr(nn.Module, "_call_impl", lambda self, *args: self.forward(*args) * 2)
    yield of(GELU)


class Batch:
    def __init__(self, x: Tensor) -> None:
        self.x = x


@case
def how_a_batch_is_taken_apart(patch: pytest.MonkeyPatch) -> Requests:
    request = Request(nn.Linear(8, 8), (torch.ones(4, 8),), "dp=2")
    yield request
    pytree.register_pytree_node(Batch, lambda b: ([b.x * settings.FACTOR], None), lambda values, _: Batch(values[0]))
    try:
        yield request
    finally:
        pytree._deregister_pytree_node(Batch)


@case
def a_registry_of_transformers_with_another_of_its_own(patch: pytest.MonkeyPatch) -> Requests:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.integrations.flex_attention import flex_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, use_cache=False)).to("meta")
    request = Request(model, {"input_ids": torch.zeros(4, 8, dtype=torch.int64)}, "dp=2")
    yield request
    patch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", flex_attention_forward)
    yield request


# ---------------------------------------------------------------------- files
@case
def a_plan_s_file(patch: pytest.MonkeyPatch) -> Requests:
    for name in ("-, dp", "dp, -"):
        Path("plan.yaml").write_text(f"params: {{weight: '{name}'}}\n")
        yield of(nn.Linear(8, 8), plan="plan.yaml")


@case
def a_loggers_level(patch: pytest.MonkeyPatch) -> Requests:
    logger = logging.getLogger(__name__)
    model = Scaled(lambda: 3.0 if logger.isEnabledFor(logging.DEBUG) else 2.0)
    yield of(model)
    patch.setattr(logger, "level", logging.DEBUG)
    yield of(model)


@pytest.mark.parametrize("name", CASES)
def test_a_change_behind_the_key_s_back(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    keys: list[str] = []
    for i, request in enumerate(CASES[name](monkeypatch)):
        try:
            keys.append(key_of(request).digest)
        except UncacheableError as refusal:
            keys.append(f"{i}: {refusal}")
    assert len(keys) == len({*keys}) == 2


# ---------------------------------------------------------------------- what has no key
@pytest.mark.parametrize(
    ("factor", "reason"),
    [
        (lambda: torch.load("weights.pt"), "torch.load"),
        (lambda: torch.cuda.get_device_capability()[0], "get_device_capability"),
        (lambda: torch.distributed.get_rank(), "torch.distributed"),
        (lambda: float(Path("factor").read_text()), "pathlib"),
        (lambda: len(Matched.__subclasses__()), "__subclasses__"),
    ],
    ids=["weights", "capability", "rank", "path", "subclasses"],
)
def test_what_asks_the_world_has_no_key(factor: Callable[[], Any], reason: str) -> None:
    with pytest.raises(UncacheableError, match=reason):
        key_of(of(Scaled(factor)))


def test_a_set_that_is_gone_through_has_no_key_and_one_that_is_only_held_has() -> None:
    names = {"a", "b"}
    with pytest.raises(UncacheableError, match="order that differs"):
        key_of(of(Scaled(lambda: len(list(names)))))
    with pytest.raises(UncacheableError, match="goes through a set"):
        key_of(of(Scaled(lambda: [name for name in {"a", "b"}])))  # noqa: C416, PLC0208
    assert key_of(of(Scaled(lambda: "a" in {"a", "b"}))).digest
    model = nn.Linear(8, 8)
    model.names = names  # type: ignore[assignment]
    assert key_of(of(model)).digest


def test_a_function_that_remembers_what_it_returned_has_no_key() -> None:
    factor = functools.lru_cache(lambda: 2.0)
    model = Scaled(factor)
    assert key_of(of(model)).digest
    factor()
    with pytest.raises(UncacheableError, match="remembers what it returned"):
        key_of(of(model))


class TwoReaders:
    """No code names either method, and both read what has no content: a library may call either."""

    def first(self) -> object:
        return settings.LOCK

    def second(self) -> object:
        return settings.LOCK

    def third(self) -> float:
        return settings.FACTOR


def test_each_reader_of_what_is_not_known_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "LOCK", threading.Lock(), raising=False)
    model = nn.Linear(8, 8)
    model.held = TwoReaders()  # type: ignore[assignment]
    watched = {method.__name__ for method in key_of(of(model)).unknown}
    assert watched == {"first", "second"}
