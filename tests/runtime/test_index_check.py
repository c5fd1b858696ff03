"""An index outside its table is an error on every rank alike, where eager raises one too; padding is none."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardc
from shardc import ShardcError
from shardc.api import Program
from shardc.cli.local_launch import run_processes
from shardc.ir.graph import Graph
from shardc.ir.mesh import Mesh
from shardc.ir.ops.assumed import assume
from shardc.runtime.execute.body_code import BodyCode
from shardc.runtime.execute.index_check import IndexCheck
from shardc.runtime.execute.instructions import rank_context
from shardc.runtime.execute.layout import shard
from shardc.runtime.oracle.simulate import run_reference, simulate
from tests.distributed.ranks import fork_ranks
from tests.handmade import Builder, aten

VOCAB = 12


class Language(nn.Module):
    """Labels are shifted, as language models do: what is looked up is computed from the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCAB, 8)
        self.head = nn.Linear(8, VOCAB, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
        return F.cross_entropy(self.head(self.wte(tokens)).flatten(0, 1), shifted.flatten())


class Routed(nn.Module):
    """Indices that depend on the weights: no look at the batch finds them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, VOCAB + 1, bias=False)
        self.table = nn.Embedding(VOCAB, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(self.router(x).argmax(-1)).pow(2).sum()


class Picks(nn.Module):
    """One parameter, of which positions are picked in some way."""

    def __init__(self, pick: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.rand(*shape))
        self.pick = pick

    def forward(self, at: Tensor) -> Tensor:
        return self.pick(self.table, at).pow(2).sum()


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randint(VOCAB, (3, 5), generator=generator) for name in ("tokens", "labels")}


@pytest.fixture(scope="module")
def language() -> Program:
    """Vocabulary over tp, a batch of 3 over dp."""
    plan = {
        "params": {"wte.weight": "tp, -", "head.weight": "tp, -"},
        "inputs": {"tokens": "dp, -", "labels": "dp, -"},
    }
    return shardc.compile(Language(), batch(), mesh="dp=2, tp=2", plan=plan)


RUNS: dict[str, Callable[[Program, Any], object]] = {
    "simulate": lambda program, batch: program.simulate(batch),
    "verify": lambda program, batch: program.verify(batch),
    "step": lambda program, batch: program.launch().step(batch),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("name", "bad"), [("tokens", VOCAB), ("tokens", -1), ("labels", VOCAB), ("labels", -2)])
def test_what_eager_refuses_is_refused(language: Program, run: str, name: str, bad: int) -> None:
    given = batch()
    given[name][2, 3] = bad
    assert language.model is not None
    with pytest.raises(IndexError):
        language.model(**given)
    with pytest.raises(ShardcError) as raised:
        RUNS[run](language, given)
    (found,) = raised.value.diagnostics
    assert found.code == "SC507"
    assert f"input '{name}' holds {bad} at [2, 3]" in found.message
    assert "0 to 11" in found.message
    assert found.tensor == name
    assert "test_index_check.py:" in str(found.location)
    assert found.fqn == {"tokens": "wte", "labels": None}[name]


def test_what_eager_ignores_is_ignored(language: Program) -> None:
    given = batch()
    given["labels"][0, 2:] = -100
    given["labels"][2, 0] = 99  # shifted out
    assert language.verify(given).ok
    assert language.verify(given).eager_error is not None


def test_all_bad_inputs_are_named_at_once(language: Program) -> None:
    given = {name: value + VOCAB for name, value in batch().items()}
    with pytest.raises(ShardcError) as raised:
        language.simulate(given)
    assert [d.tensor for d in raised.value.diagnostics] == ["tokens", "labels"]


def test_the_kernel_refuses_what_nobody_looked_at(language: Program) -> None:
    """Without the look at the batch, the call that meets the index is named, sharded or not."""
    for name in ("tokens", "labels"):
        given = language.inputs(batch())
        given[name] = given[name].clone()
        given[name][2, 3] = 50
        for run, graph in ((simulate, language.body), (run_reference, language.reference)):
            with pytest.raises(ShardcError, match=r"SC507.*holds 50 on rank"):
                run(graph, given)


def test_computed_indices_are_checked_in_the_step() -> None:
    x = torch.ones(4, 4)
    plan = {"params": {"table.weight": "tp, -"}, "inputs": {"x": "dp, -"}}
    model = Routed()
    with torch.no_grad():
        model.router.weight[:-1] = -1.0
        model.router.weight[-1] = 1.0  # all go to a row that there is not
    program = shardc.compile(model, x, mesh="dp=2, tp=2", plan=plan)
    for run in RUNS.values():
        with pytest.raises(ShardcError, match=f"SC507.*holds {VOCAB} on rank 0.*0 to {VOCAB - 1}"):
            run(program, x)
    with torch.no_grad():
        model.router.weight[3] = 2.0
    assert program.verify().ok


class Telling:
    """Stands for a rank's monitor: what it would say to the others."""

    at = 0

    def __init__(self) -> None:
        self.said: list[str] = []

    def report_own_failure(self, why: str) -> None:
        self.said.append(why)


def test_a_rank_tells_the_others_which_index_it_failed_of() -> None:
    """Of a batch sharded over dp only one rank has the bad row; the others hear why they wait in vain."""
    b = Builder(Mesh(dp=2, tp=2))
    table = b.input("table", "f32[6@tp, 2]")
    at = b.input("at", "i64[4@dp]", "input")
    checked = b.call("check", "i64[4@dp]", torch.ops.shardc.check_index.default, at, 6)
    b.output("output", "y", b.call("pick", "f32[4@dp, 2]", aten.embedding.default, table, checked))
    graph = b.graph()
    held = {"table": torch.zeros(3, 2)}
    for rank in range(4):
        own = Telling()
        executor = BodyCode(graph, rank_context(graph.mesh, rank, None), rank, torch.device("cpu"))  # type: ignore[arg-type]
        feed = {"at": shard(torch.tensor([0, 1, 2, 7]), b.type("i64[4@dp]"), graph.mesh, rank)}
        if rank < 2:
            assert executor.run(held, [feed], own)  # type: ignore[arg-type]
            assert not own.said
            continue
        with pytest.raises(ShardcError, match=f"SC507.*holds 7 on rank {rank}.*0 to 5"):
            executor.run(held, [feed], own)  # type: ignore[arg-type]
        assert own.said[0].startswith("error[SC507 index-out-of-range]")
        assert "%check (mlp.py:" in own.said[0]


def test_a_rank_tells_the_others_that_its_batch_answers_otherwise() -> None:
    b = Builder(Mesh(pp=2))
    b.output("output", "y", b.call("holds", "bool[]", assume, b.input("asked", "bool[]", "input")))
    graph, own = b.graph(), Telling()
    executor = BodyCode(graph, rank_context(graph.mesh, 0, None), 0, torch.device("cpu"))  # type: ignore[arg-type]
    with pytest.raises(ShardcError, match="SC512"):
        executor.run({}, [{"asked": torch.tensor(False)}], own)  # type: ignore[arg-type]
    assert own.said[0].startswith("error[SC512 assumption-broken]")


def test_every_process_raises_before_it_sends_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bad label lies in the shard of one rank; all are given the batch, all say the same, none waits."""
    fork_ranks(monkeypatch)
    plan = {"inputs": {"tokens": "dp, -", "labels": "dp, -"}}
    language = shardc.compile(Language(), batch(), mesh="dp=2", plan=plan)
    given = batch()
    given["labels"][2, 4] = 77
    with pytest.raises(ShardcError, match=r"SC507.*input 'labels' holds 77 at \[2, 4\]"):
        run_processes(language, given, nproc=2, steps=1, lr=0.1, report=lambda *_: None)


WAYS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "index_select": (lambda x, at: x.index_select(0, at.flatten()), "tp, -"),
    "gather": (lambda x, at: x.gather(0, at), "tp, -"),
    "index": (lambda x, at: x[at], "-, tp"),
    "scatter": (lambda x, at: x.scatter(0, at, 0.5), "-, tp"),  # of 5 columns over 2: padding is looked up too
    "index_add": (lambda x, at: x.index_add(0, at.flatten(), torch.ones(15, 5)), "tp, -"),
    "index_put": (
        lambda x, at: x * torch.zeros(8).index_put((at,), torch.ones(3, 5), accumulate=True)[:, None],
        "-, -",
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_other_ways_to_index(way: str) -> None:
    pick, placement = WAYS[way]
    given = torch.randint(8, (3, 5), generator=torch.Generator().manual_seed(1))
    program = shardc.compile(Picks(pick, 8, 5), given, mesh="tp=2", plan={"params": {"table": placement}})
    assert program.verify(given).ok
    wrong = given.clone()
    wrong[1, 2] = 8
    for run in RUNS.values():
        with pytest.raises(ShardcError, match=r"SC507.*input 'at' holds 8 at \[1, 2\].* 0 to 7|SC507.* -8 to 7"):
            run(program, wrong)


@pytest.mark.parametrize("placement", ["-, -", "tp, -"])
@pytest.mark.parametrize("value", [2.5, torch.tensor(2.5)])
def test_positions_to_fill_count_from_either_end(placement: str, value: Any) -> None:
    given = torch.tensor([0, -1, -8, 7])
    model = Picks(lambda x, at: x.index_fill(0, at, value), 8, 5).double()
    program = shardc.compile(model, given.abs(), mesh="tp=2", plan={"params": {"table": placement}})
    report = program.verify(given)
    assert report.ok
    assert report.eager_error == 0
    for run in RUNS.values():
        with pytest.raises(ShardcError, match=r"SC507.* -8 to 7"):
            run(program, torch.tensor([0, -1, -9, 7]))


@pytest.mark.parametrize("placement", ["-, -", "tp, -"])
def test_padding_is_no_index(placement: str) -> None:
    """0 stands in the padding of a batch of 3 over 2, and what is computed of it is no row."""
    model = Picks(lambda x, at: F.embedding(at - 1, x), 8, 6)
    given = torch.randint(1, 9, (3, 5), generator=torch.Generator().manual_seed(2))
    plan = {"params": {"table": placement}, "inputs": {"at": "dp, -"}}
    program = shardc.compile(model, given, mesh="dp=2, tp=2", plan=plan)
    assert program.verify(given).ok
    program.launch().step(given)


def test_only_what_leads_to_a_lookup_is_repeated(language: Program) -> None:
    """Of the step, the shift of the labels and no more."""
    check = IndexCheck(language.reference)
    assert len(check._code) <= 4, [one.name for one in check._code]
    graph: Graph = language.body
    assert sum(node.target is torch.ops.shardc.check_index.default for node in graph.calls()) == 2
