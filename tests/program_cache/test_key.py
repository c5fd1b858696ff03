"""The key of a cached program: the same in equal circumstances, another where anything is changed alone, or none."""

import functools
import logging
import random
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardc
from shardc.compiler.request import Request
from shardc.program_cache import surroundings
from shardc.program_cache.key import key_of
from shardc.program_cache.origins import UncacheableError
from tests.program_cache.models import FILES, PLAN, imported, written

WEIGHTS = [2.0, 3.0]
LIMIT = torch.ones(3)


@pytest.fixture
def request_of(tmp_path: Path) -> Callable[[], Request]:
    written(tmp_path)

    def make() -> Request:
        torch.manual_seed(0)
        model = imported(tmp_path).Net()
        return Request(model, torch.ones(4, 8), "dp=2, tp=2", dict(PLAN))

    return make


def digest(request: Request) -> str:
    return key_of(request).digest


def test_equal_requests_have_one_key(request_of: Callable[[], Request]) -> None:
    assert digest(request_of()) == digest(request_of())
    request = request_of()
    with torch.no_grad():
        request.model.up.weight.add_(1)  # type: ignore[union-attr, operator]
    assert digest(request) == digest(request_of()), "no program depends on what parameters hold"


def scaled_loss(factor: float) -> Callable[[Any, Any], Any]:
    return lambda output, batch: output * factor


def weighted_loss(output: Any, batch: Any) -> Any:
    return output * WEIGHTS[0]


def test_the_attribute_of_a_name_in_a_loss_counts(request_of: Callable[[], Request]) -> None:
    before = digest(replace(request_of(), loss=weighted_loss))
    WEIGHTS[0] = 5.0
    try:
        assert digest(replace(request_of(), loss=weighted_loss)) != before
    finally:
        WEIGHTS[0] = 2.0


def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def set_attribute(name: str, value: Any) -> Callable[[Request], Request]:
    def change(request: Request) -> Request:
        setattr(request.model, name, value)
        return request

    return change


def with_model(change: Callable[[Any], object]) -> Callable[[Request], Request]:
    def changed(request: Request) -> Request:
        change(request.model)
        return request

    return changed


def _tie(model: Any) -> None:
    model.again = model.up


def _freeze(model: Any) -> None:
    model.up.weight.requires_grad_(False)


def _fill(model: Any) -> None:
    model.offset[3] = 1e-9


def _instance_forward(model: Any) -> None:
    model.up.forward = lambda x: nn.functional.linear(x, model.up.weight) + 1


CHANGES: dict[str, Callable[[Request], Request]] = {
    "a number of a module": set_attribute("rate", 0.25),
    "its type": set_attribute("rate", 1),
    "a new attribute": set_attribute("more", {"a": [1, {2, 3}]}),
    "the mode": with_model(lambda model: model.eval()),
    "the mode of one module": with_model(lambda model: model.up.eval()),
    "a frozen parameter": with_model(_freeze),
    "a parameter's dtype": with_model(lambda model: model.up.double()),
    "a tied module": with_model(_tie),
    "a buffer's value": with_model(_fill),
    "a buffer that is not saved": with_model(lambda model: model.register_buffer("offset", model.offset, False)),
    "a forward of an instance": with_model(_instance_forward),
    "a hook": with_model(lambda model: model.up.register_forward_hook(hook)),
    "a hook before": with_model(lambda model: model.up.register_forward_pre_hook(lambda m, x: None)),
    "a hook of a parameter": with_model(lambda model: model.up.weight.register_hook(lambda g: g * 2)),
    "another module": set_attribute("down", nn.Linear(16, 8, bias=False)),
    "a function on the module": set_attribute("act", torch.tanh),
    "another one": set_attribute("act", torch.sin),
    "the batch's shape": lambda r: replace(r, batch=torch.ones(8, 8)),
    "the batch's dtype": lambda r: replace(r, batch=torch.ones(4, 8, dtype=torch.float64)),
    "the batch's layout": lambda r: replace(r, batch=torch.ones(8, 4).t()),
    "the batch's values": lambda r: replace(r, batch=torch.zeros(4, 8)),
    "the batch's structure": lambda r: replace(r, batch={"x": torch.ones(4, 8)}),
    "the batch on the meta device": lambda r: replace(r, batch=torch.ones(4, 8, device="meta")),
    "a number in the batch": lambda r: replace(r, batch=(torch.ones(4, 8), 3)),
    "another number in the batch": lambda r: replace(r, batch=(torch.ones(4, 8), 4)),
    "a loss": lambda r: replace(r, loss=scaled_loss(2.0)),
    "a variable of the loss": lambda r: replace(r, loss=scaled_loss(3.0)),
    "a default of the loss": lambda r: replace(r, loss=functools.partial(weighted_loss)),
    "an optimizer": lambda r: replace(r, optimizer=torch.optim.SGD(r.model.parameters(), lr=0.1)),
    "its rate": lambda r: replace(r, optimizer=torch.optim.SGD(r.model.parameters(), lr=0.2)),
    "its momentum": lambda r: replace(r, optimizer=torch.optim.SGD(r.model.parameters(), lr=0.1, momentum=0.9)),
    "its parameters": lambda r: replace(r, optimizer=torch.optim.SGD([*r.model.parameters()][:2], lr=0.1)),
    "a placement": lambda r: replace(r, plan={"params": {"up.weight": "-, tp"}}),
    "an option of the plan": lambda r: replace(r, plan={**PLAN, "seed": 3}),
    "the plan's hardware": lambda r: replace(r, plan={**PLAN, "hardware": {"bucket_bytes": 4096}}),
    "strict": lambda r: replace(r, strict=True),
    "the mesh": lambda r: replace(r, mesh="dp=4, tp=2"),
    "the order of the mesh": lambda r: replace(r, mesh="tp=2, dp=2"),
    "the mode of the program": lambda r: replace(r, mode="eval"),
    "a plan on the model": with_model(lambda model: shardc.annotate(model, {"params": {"down.weight": "-, tp"}})),
}


def test_what_is_changed_alone_has_another_key(request_of: Callable[[], Request]) -> None:
    digests = {"nothing": digest(request_of())}
    digests |= {what: digest(change(request_of())) for what, change in CHANGES.items()}
    alike = [(a, b) for a in digests for b in digests if a < b and digests[a] == digests[b]]
    assert not alike


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("scaling.py", "FACTOR = 2.0", "FACTOR = 3.0"),
        ("scaling.py", "return x * FACTOR", "return x + FACTOR"),
        ("scaling.py", "return x * FACTOR", "return x * FACTOR  # twice"),
        ("net.py", "relu", "tanh"),
        ("net.py", "'w'", "'a'"),
    ],
)
def test_a_line_of_any_file_counts(
    name: str, before: str, after: str, request_of: Callable[[], Request], tmp_path: Path
) -> None:
    first = digest(request_of())
    (tmp_path / name).write_text(FILES[name].replace(before, after))
    assert digest(request_of()) != first


def test_code_in_memory_counts_and_not_its_file_alone(request_of: Callable[[], Request], tmp_path: Path) -> None:
    """Else a process that runs old code would leave its program under the key of the new file."""
    old = request_of()
    (tmp_path / "net.py").write_text(FILES["net.py"].replace("relu", "tanh"))
    assert digest(old) != digest(request_of())


def test_a_function_in_the_place_of_a_library_s_counts(
    request_of: Callable[[], Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = digest(request_of())
    monkeypatch.setattr(nn.functional, "linear", lambda x, w, b=None: x @ w.t())
    second = digest(request_of())
    monkeypatch.setattr(nn.functional, "linear", lambda x, w, b=None: x @ w.t() + 1)
    assert len({first, second, digest(request_of())}) == 3
    monkeypatch.undo()
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x @ self.weight.t())
    assert digest(request_of()) != first
    monkeypatch.undo()
    assert digest(request_of()) == first


def test_functions_within_transformers_count(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.llama import modeling_llama

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, use_cache=False)).to("meta")
    tokens = torch.zeros(4, 8, dtype=torch.int64)
    request = Request(model, {"input_ids": tokens, "labels": tokens}, "dp=2")
    digests = [digest(request)]
    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q * cos, k * cos))
        digests.append(digest(request))
        patch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q * cos, k * sin))
        digests.append(digest(request))
    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: self.down_proj(self.up_proj(x)))
        digests.append(digest(request))
    with monkeypatch.context() as patch:
        patch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", lambda module, q, k, v, *a, **kw: (v, None))
        digests.append(digest(request))
    model.config._attn_implementation = "eager"
    digests.append(digest(request))
    assert len(set(digests)) == len(digests)


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


def test_versions_variables_and_the_folder_count(
    request_of: Callable[[], Request], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    request = request_of()
    digests = [digest(request)]
    for change in (
        lambda patch: patch.setattr(surroundings, "installed", lambda: [("torch", 1, 2)]),
        lambda patch: patch.setattr(surroundings, "VERSION", "9"),
        lambda patch: patch.setattr(surroundings, "own_digest", lambda: "other sources"),
        lambda patch: patch.setattr(surroundings, "HAS_TRITON", None),
        lambda patch: patch.setenv("SHARDC_TABLES", "tables.yaml"),
        lambda patch: patch.setenv("TORCH_SOMETHING", "1"),
        lambda patch: patch.chdir(tmp_path),
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
    monkeypatch.setattr(surroundings, "all_rules", lambda: [replace(rules[0], ragged=not rules[0].ragged), *rules[1:]])
    assert digest(request_of()) != first


# ---------------------------------------------------------------------- what has no key
class Clock(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * time.time()


class Drawing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * random.random()


class Reading(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with open("factor") as file:
            return super().forward(x) * float(file.read())


class Behind(nn.Linear):
    """What its method reads is run through a name in a text."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, "_" + "factor")() * super().forward(x)

    def _factor(self) -> float:
        return time.perf_counter()


class Logging(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logging.getLogger(__name__)
        return super().forward(x)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Clock(8, 8), "'time'"),
        (Drawing(8, 8), "'random'"),
        (Reading(8, 8), r"open\(\)"),
        (Behind(8, 8), "'time'"),
    ],
)
def test_a_forward_that_reads_the_world_has_no_key(model: nn.Module, reason: str) -> None:
    with pytest.raises(UncacheableError, match=reason):
        key_of(Request(model, torch.ones(4, 8), "dp=2"))


@pytest.mark.parametrize(
    "value",
    [
        random.Random(0),
        iter([1]),
        (i for i in range(3)),
        object(),
        torch.Generator(),
        {object},
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_without_stable_content_has_no_key(value: Any, request_of: Callable[[], Request]) -> None:
    request = request_of()
    request.model.held = value
    with pytest.raises(UncacheableError, match="held"):
        key_of(request)


def test_no_key_with_state_modes_or_code_that_is_compiled(request_of: Callable[[], Request]) -> None:
    request = request_of()
    optimizer = torch.optim.AdamW(request.model.parameters())
    request.model(torch.ones(4, 8)).backward()
    optimizer.step()
    with pytest.raises(UncacheableError, match="state already"):
        key_of(replace(request, optimizer=optimizer))
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False), pytest.raises(UncacheableError, match="mode of torch"):
        key_of(request_of())
    with pytest.raises(UncacheableError, match=re.escape("torch.jit")):
        key_of(replace(request_of(), model=torch.jit.script(nn.Linear(8, 8))))


def test_what_names_nothing_of_it_may_read_the_world(request_of: Callable[[], Request]) -> None:
    """`Net.save` opens a file and reads the clock: nothing that a trace runs speaks of it."""
    assert "save" in vars(type(request_of().model))
    assert digest(replace(request_of(), model=Logging(8, 8)))
