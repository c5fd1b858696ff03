"""What a trace may read, changed behind the back of a cache: each case yields a request, changes one thing, and yields
again. Each is the program that compiling gives, or the error, whatever the one before has left on the disk.

Longer than 400 lines: all cases are of one kind, and go through the same few functions.
"""

import abc
import enum
import functools
import itertools
import logging
import operator
import os
import sys
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
from tests.program_cache import hostile_settings as settings
from tests.program_cache.models import outcome

Requests = Iterator[Request]
CASES: dict[str, Callable[[pytest.MonkeyPatch], Requests]] = {}


def case(build: Callable[[pytest.MonkeyPatch], Requests]) -> Callable[[pytest.MonkeyPatch], Requests]:
    CASES[build.__name__] = build
    return build


def of(model: nn.Module, **options: Any) -> Request:
    return Request(model, torch.ones(4, 8), "dp=2", loss=lambda output, _: output.square().mean(), **options)


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
    limit = torch.ones(8)
    model = Scaled(lambda: limit)
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


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Custom.apply(x)  # type: ignore[no-any-return]


@case
def what_a_backward_of_autograd_reads(patch: pytest.MonkeyPatch) -> Requests:
    model = nn.Sequential(nn.Linear(8, 8), Doubled())
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


class Times:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, x: Tensor, approximate: str) -> Tensor:
        return x * self.factor


@case
def a_partial_in_the_place_of_torch_s(patch: pytest.MonkeyPatch) -> Requests:
    for factor in (2.0, 3.0):
        patch.setattr(F, "gelu", functools.partial(Times.__call__, Times(factor)))
        yield of(GELU)


@case
def an_object_in_the_place_of_torch_s(patch: pytest.MonkeyPatch) -> Requests:
    for factor in (2.0, 3.0):
        patch.setattr(F, "gelu", Times(factor))
        yield of(GELU)


class Normed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(super().forward(x), (8,))


@case
def a_default_of_torch_s_function(patch: pytest.MonkeyPatch) -> Requests:
    model = Normed(8, 8)
    yield of(model)
    patch.setattr(F.layer_norm, "__defaults__", (None, None, 0.5))
    yield of(model)


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


class Taking(nn.Linear):
    def forward(self, batch: Any) -> Tensor:
        return super().forward(batch.x).square().mean()


@case
def how_a_batch_is_taken_apart(patch: pytest.MonkeyPatch) -> Requests:
    request = Request(Taking(8, 8), (Batch(torch.ones(4, 8)),), "dp=2")
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


# ---------------------------------------------------------------------- what no line of the user's code names
@case
def a_class_attribute_of_a_library(patch: pytest.MonkeyPatch) -> Requests:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0))
    yield of(model)
    patch.setattr(nn.Dropout, "forward", property(lambda self: lambda x: x * 3), raising=False)
    yield of(model)


@case
def a_partial_in_a_registry_of_transformers(patch: pytest.MonkeyPatch) -> Requests:
    from transformers.activations import ACT2FN

    for approximate in ("none", "tanh"):
        patch.setitem(ACT2FN, "made", (nn.GELU, {"approximate": approximate}))
        yield of(nn.Sequential(nn.Linear(8, 8), ACT2FN["made"]))


@case
def what_is_registered_as_of_an_abstract_class(patch: pytest.MonkeyPatch) -> Requests:
    class Abstract(abc.ABC):  # noqa: B024
        pass

    class Plain:
        pass

    model = Scaled(lambda: 3.0 if isinstance(Plain(), Abstract) else 2.0)
    yield of(model)
    Abstract.register(Plain)
    yield of(model)


@case
def a_set_that_forward_goes_through(patch: pytest.MonkeyPatch) -> Requests:
    names = {2.0}
    model = Scaled(lambda: sum(names))
    yield of(model)
    names.add(3.0)
    yield of(model)


@case
def what_a_function_remembers(patch: pytest.MonkeyPatch) -> Requests:
    remembered = functools.lru_cache(lambda: settings.FACTOR)
    model = Scaled(remembered)
    yield of(model)
    patch.setattr(settings, "FACTOR", 3.0)
    yield of(model)  # compiling asks anew


@case
def how_often_forward_ran(patch: pytest.MonkeyPatch) -> Requests:
    calls = itertools.count(1)
    model = Scaled(lambda: float(next(calls)))
    yield of(model)
    yield of(model)


@case
def a_file_that_forward_reads(patch: pytest.MonkeyPatch) -> Requests:
    model = Scaled(lambda: float(Path("factor").read_text()))
    for factor in ("2", "3"):
        Path("factor").write_text(factor)
        yield of(model)


@case
def a_variable_of_the_environment(patch: pytest.MonkeyPatch) -> Requests:
    model = Scaled(lambda: float(os.environ["FACTOR"]))
    for factor in ("2", "3"):
        patch.setenv("FACTOR", factor)
        yield of(model)


@case
def a_hook_of_a_gradient(patch: pytest.MonkeyPatch) -> Requests:
    model = nn.Linear(8, 8)
    model.weight.register_hook(lambda gradient: gradient * settings.FACTOR)
    yield of(model)
    patch.setattr(settings, "FACTOR", 3.0)
    yield of(model)


@case
def what_a_second_step_of_an_optimizer_does(patch: pytest.MonkeyPatch) -> Requests:
    """One step is as before, the third is not: that is checked before anything is taken from the disk."""
    model = nn.Linear(8, 8)
    yield of(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer = Later(model.parameters(), lr=0.1)
    yield of(model, optimizer=optimizer)


class Later(torch.optim.SGD):
    steps = 0

    def step(self, closure: Any = None) -> Any:
        Later.steps += 1
        return super().step(closure) if Later.steps < 3 else None


@case
def a_method_of_an_optimizer_s_class(patch: pytest.MonkeyPatch) -> Requests:
    model = nn.Linear(8, 8)
    step = torch.optim.AdamW.step
    yield of(model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1))

    def twice(self: Any, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None if p.grad is None else p.grad * 2
        return step(self, closure)

    patch.setattr(torch.optim.AdamW, "step", twice)
    yield of(model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1))


class Asking(nn.Linear):
    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        return super().forward(x)[:, : counts.max().item()].square().mean()  # type: ignore[misc]


@case
def a_microbatch_that_answers_otherwise(patch: pytest.MonkeyPatch) -> Requests:
    """Both samples have one trace, that of their first microbatch; the second is refused."""
    for last in (3, 5):
        batch = {"x": torch.ones(4, 8), "counts": torch.tensor([3, 1, 2, last])}
        yield Request(Asking(8, 8), batch, "dp=2", {"accumulate": 2})


@case
def what_a_buffer_on_the_meta_device_is_computed_of(patch: pytest.MonkeyPatch) -> Requests:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 64}
    tokens = torch.zeros(4, 8, dtype=torch.int64)
    for theta in (10_000.0, 500.0):
        rope = {"rope_type": "default", "rope_theta": theta}
        with torch.device("meta"):
            config = LlamaConfig(**sizes, num_hidden_layers=1, use_cache=False, rope_parameters=rope)
            model = LlamaForCausalLM(config)
        yield Request(model, {"input_ids": tokens, "labels": tokens}, "dp=2")


SAME = {  # what changes nothing that a program holds
    "the_value_of_a_member_in_a_set",
    "an_op_of_torch_that_is_implemented_anew",
}


@pytest.mark.parametrize("name", CASES)
def test_a_change_behind_the_cache_s_back(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARDC_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)
    fresh: list[Any] = []
    for request in CASES[name](monkeypatch):
        said, found = outcome(request, cached=True)
        fresh.append(outcome(request, cached=False)[1])
        if name == "how_often_forward_ran":
            assert said != "hit"
        else:
            assert found == fresh[-1], said
    assert (fresh[0] == fresh[1]) == (name in SAME)
