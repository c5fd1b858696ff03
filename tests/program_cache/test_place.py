"""What a hit asks beside its key: all traces that its program was compiled from; and what is not kept, and why."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.compiler import compiled as compiling
from shardc.compiler.driver import Task, compile_step
from shardc.compiler.preparation import Sample
from shardc.frontend import few_layers
from shardc.frontend.few_layers import _Few
from shardc.ir.units import UnequalError
from shardc.program_cache.folder import Folder
from shardc.rules import registry
from tests.hostile.custom_ops import row_norm
from tests.program_cache.models import outcome

SLOW_LINKS = {"device": "gpu", "collective_start_seconds": 1e-6, "link_bytes_per_second": 1e8}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.setenv("SHARDC_CACHE", str(tmp_path / "cache"))
    return Folder(tmp_path / "cache")


class Block(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class Stack(nn.Module):
    """Equal layers; what each makes of a batch of two rows is `factor` times as much."""

    factor = 1.0
    rows = False  # is the result multiplied by the number of rows, as a tensor?

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(16, 16, bias=False) for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        x = x * (self.factor if x.shape[0] == 2 else 1.0)
        return (x * torch.tensor([float(x.shape[0])]) if self.rows else x).square().mean()


def request(model: nn.Module, plan: Any, rows: int = 4) -> Any:
    return shardc.api.Request(model, torch.ones(rows, 16), "dp=2, tp=2", plan)


# ---------------------------------------------------------------------- plans that are open
HALVES = {"params": {"**.weight": "tp, -"}, "overlap": {"split": "auto"}, "hardware": SLOW_LINKS}


def test_a_way_that_was_compared_counts(cache: Folder) -> None:
    """Halves were compiled too: the choice of the whole batch, or of halves, depends on their trace."""
    torch.manual_seed(0)
    model = Stack()
    said, first = outcome(request(model, HALVES), cached=True)
    (path,) = cache.path.glob("*.program")
    content = cache.read(path.stem)
    assert content is not None
    assert [parts for parts, _, _ in content["seen"]] == [1, 2]
    assert (said, outcome(request(model, HALVES), cached=True)) == ("stored", ("hit", first))
    assert first == outcome(request(model, HALVES), cached=False)[1]
    model.factor = 3.0  # of a batch of two rows, as halves have it: the whole batch has the trace that it had
    said, found = outcome(request(model, HALVES), cached=True)
    assert said == "stored"
    assert found == outcome(request(model, HALVES), cached=False)[1]


@pytest.mark.parametrize("hardware", [SLOW_LINKS, {**SLOW_LINKS, "link_bytes_per_second": 1e15}])
def test_a_program_has_the_constants_of_the_way_that_was_taken(hardware: dict[str, Any], cache: Folder) -> None:
    torch.manual_seed(0)
    model = Stack()
    model.rows = True
    fresh, stored, hit = (
        shardc.compile(model, torch.ones(4, 16), mesh="dp=2, tp=2", plan={**HALVES, "hardware": hardware}, cache=cached)
        for cached in (False, None, None)
    )
    assert (stored.cached, hit.cached) == ("stored", "hit")
    assert hit.plan["halves"] == fresh.plan["halves"]  # type: ignore[typeddict-item]
    (ours,), (theirs,) = hit.constants.values(), fresh.constants.values()
    assert torch.equal(ours, theirs)
    assert float(ours) == 4.0 / fresh.body.halves
    assert hit.verify().ok
    assert torch.equal(torch.as_tensor(hit.simulate().loss), torch.as_tensor(fresh.simulate().loss))


class Asking(Stack):
    def forward(self, x: Tensor, counts: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x[:, : counts.max().item()].repeat(1, 2))  # type: ignore[misc]


def test_values_that_decide_how_a_batch_runs(cache: Folder) -> None:
    """Halves of which the second answers otherwise cannot be compiled, and both samples have the same traces."""
    for last in (8, 6):
        batch = {"x": torch.ones(4, 16), "counts": torch.tensor([8, 8, last, last])}
        asked = shardc.api.Request(Asking(), batch, "dp=2, tp=2", HALVES)
        said, found = outcome(asked, cached=True)
        assert said == "values of the sample decide whether the batch runs in halves"
        assert outcome(asked, cached=False)[0] == ""
        assert found[0]
    assert not cache.entries()


class Whole(Stack):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 2:
            raise ValueError(f"{self.factor} is too few")
        return super().forward(x)


def test_halves_that_are_refused_are_no_choice_again(cache: Folder) -> None:
    torch.manual_seed(0)
    model = Whole()
    said, first = outcome(request(model, HALVES), cached=True)
    assert (said, outcome(request(model, HALVES), cached=True)) == ("stored", ("hit", first))
    model.factor = 3.0  # in the error's text, which the choice quotes
    said, found = outcome(request(model, HALVES), cached=True)
    assert (said, found) == ("stored", outcome(request(model, HALVES), cached=False)[1])
    assert found != first


def test_what_was_decided_is_not_what_was_said(cache: Folder) -> None:
    torch.manual_seed(0)
    model = Stack()
    for split in ("auto", 1, 2, "auto", 1, 2):
        plan = {**HALVES, "overlap": {"split": split}}
        assert outcome(request(model, plan), cached=True)[1] == outcome(request(model, plan), cached=False)[1]
    assert len(cache.entries()) == 3


# ---------------------------------------------------------------------- layers that are recorded after all
@pytest.fixture
def undecided(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Few layers never tell what all do; of each trace, whether all were recorded."""
    recorded: list[bool] = []
    traced = Sample.traced

    def unequal(task: Task, options: Any) -> Any:
        if task.traced.layers is not None:
            raise UnequalError("layers")
        return compile_step(task, options)

    def noted(self: Sample, request: Any, **how: bool) -> Any:
        recorded.append(how.get("all_layers", False))
        return traced(self, request, **how)

    monkeypatch.setattr(compiling, "compile_step", unequal)
    monkeypatch.setattr(Sample, "traced", noted)
    return recorded


def test_a_trace_of_all_layers_counts(cache: Folder, undecided: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, plan = Stack(layers=20), {"params": {"**.weight": "tp, -"}}
    said, first = outcome(request(model, plan), cached=True)
    assert (said, undecided) == ("stored", [False, True])
    undecided.clear()
    assert outcome(request(model, plan), cached=True) == ("hit", first)
    assert undecided == [False, True]
    noted = Sample.traced

    def otherwise(self: Sample, request: Any, **how: bool) -> Any:
        request.model.factor = 5.0 if how.get("all_layers") else 1.0
        return noted(self, request, **how)

    monkeypatch.setattr(Sample, "traced", otherwise)
    said, found = outcome(request(model, plan, rows=2), cached=True)
    assert said == "stored"
    monkeypatch.setattr(Sample, "traced", noted)
    model.factor = 1.0
    said, other = outcome(request(model, plan, rows=2), cached=True)
    assert (said, other == found) == ("stored", False)


def test_what_is_prepared_anew_of_all_layers_is_what_the_program_has(
    undecided: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The optimizer's state starts from what the updates say that were compiled, not from those of few layers."""

    def unequal(_: _Few) -> None:
        raise UnequalError("layers")

    programs: list[shardc.Program] = []
    for check, recorded in ((_Few.check, [False, True]), (unequal, [False, True])):
        undecided.clear()
        monkeypatch.setattr(_Few, "check", check)
        torch.manual_seed(0)
        model = Stack(layers=20)
        optimizer = torch.optim.AdamW(model.parameters())
        programs += [shardc.compile(model, torch.ones(4, 16), mesh="dp=2", optimizer=optimizer, cache=False)]
        assert undecided == recorded
        assert len(programs[-1].plan["fills"]) == 60  # type: ignore[typeddict-item]
        assert programs[-1].verify().ok
    assert programs[0].to_plain() == programs[1].to_plain()


def test_what_is_refused_of_unequal_layers_is_refused_of_all(
    undecided: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few layers are checked when they are compiled: an error that is found before may be one of them alone."""

    def unequal(_: _Few) -> None:
        raise UnequalError("layers")

    plan: dict[str, Any] = {"params": {"nowhere": "tp, -"}}
    for check, recorded in ((_Few.check, [False]), (unequal, [False, True])):
        undecided.clear()
        monkeypatch.setattr(_Few, "check", check)
        with pytest.raises(shardc.ShardcError, match="nowhere"):
            shardc.compile(Stack(layers=20), torch.ones(4, 16), mesh="tp=2", plan=plan)
        assert undecided == recorded


@pytest.mark.parametrize("name", ["ingest", "lengthened_ports"])
def test_a_fault_where_few_layers_are_checked_is_no_fault(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("layers.3")

    torch.manual_seed(0)
    asked = request(Stack(layers=20), {"params": {"**.weight": "tp, -"}})
    expected = outcome(asked, cached=False)
    monkeypatch.setattr(few_layers, name, broken)
    assert outcome(asked, cached=False) == expected


# ---------------------------------------------------------------------- what changes no program
def test_what_changes_no_program_makes_no_other_key(cache: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, plan = Stack(), {"params": {"**.weight": "tp, -"}}
    assert outcome(request(model, plan), cached=True)[0] == "stored"
    for name in ("TRITON_CACHE_DIR", "TORCH_HOME", "TORCH_LOGS", "SHARDC_CACHE_LIMIT", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "1GiB")
    torch.vmap(torch.sin)(torch.ones(2))  # which registers implementations of ops
    assert outcome(request(model, plan), cached=True)[0] == "hit"


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="of a torch that has it")
def test_the_class_of_a_group_s_optimizer_counts(cache: Folder) -> None:
    """Updates of whole matrices are named by it."""

    class Other(torch.optim.Muon):
        pass

    for first in (1, 2):
        torch.manual_seed(0)
        model = Stack(layers=3)
        params = [layer.weight for layer in model.layers]
        optimizers = [torch.optim.Muon([{"params": [p]} for p in params[:first]])]
        optimizers += [Other([{"params": [p]} for p in params[first:]])]
        asked = shardc.api.Request(model, torch.ones(4, 16), "dp=2", optimizer=tuple(optimizers))
        found = [outcome(asked, cached=cached)[1] for cached in (True, False)]
        assert found[0] == found[1]


# ---------------------------------------------------------------------- what is not kept
class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(row_norm(self.a(x), 1e-3)).square().mean()


def norm_rule(x: Any, eps: float) -> str:
    return "m n -> m n"


def test_ops_and_rules_of_users_are_not_kept(cache: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """No key tells what a function does that says how an op is sharded."""
    program = shardc.compile(Rows(), torch.ones(4, 16), mesh="dp=2")
    assert program.cached == "the program calls ops that no file can have"
    assert cache.refused() == {"model": "Rows", "reason": program.cached}
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))
    monkeypatch.setattr(registry, "_FITTED", {})
    ops = torch.ops.hostile
    shardc.rule(ops.row_norm.default, whole="n", examples=[((4, 6), 1e-3)])(norm_rule)
    text, both = "... n, ... n -> ... n", [((4, 6), (4, 6), 1e-3)]
    shardc.rule(ops.row_norm_backward.default, text, whole="n", linear=(0,), examples=both)
    program = shardc.compile(Rows(), torch.ones(4, 16), mesh="dp=2")
    assert program.cached == "norm_rule, the rule of hostile.row_norm.default, is not shardc's own"
    assert not cache.entries()


def test_what_compiling_refuses_is_refused(cache: Folder) -> None:
    class Strange(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for p in self.param_groups[0]["params"]:
                p.data.add_(torch.randn_like(p))

    for cached in (None, False):
        model = Stack()
        with pytest.raises(shardc.ShardcError, match="Strange cannot be part of the program"):
            shardc.compile(model, torch.ones(4, 16), mesh="dp=2", optimizer=Strange(model.parameters()), cache=cached)
    assert not cache.entries()
