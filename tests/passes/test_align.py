"""16-bit products of odd sizes are padded where that is faster, and all equals the single device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import shardc
from shardc.cost.memory import memory
from shardc.ir.graph import Graph, info, op_name, operands, producer, results, type_of
from shardc.passes import gemm_padding as module
from shardc.passes.fusion.analysis.traffic import traffic
from shardc.passes.fusion.fuse import fuse
from shardc.passes.gemm_padding import FORMS, align, worth

aten = torch.ops.aten


class Model(nn.Module):
    """A GPT's ends, tied, around an MLP; every width odd."""

    def __init__(self, vocab: int = 37, width: int = 12, hidden: int = 27) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        logits = self.head(x + self.down(nn.functional.gelu(self.up(x))))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Decoder(nn.Module):
    """BERT's end: a head of a [vocab] bias, tied to the embedding, written in one of the ways in which models do."""

    def __init__(self, how: str, vocab: int = 37, width: int = 12) -> None:
        super().__init__()
        self.how, self.embed = how, nn.Embedding(vocab, width)
        self.head = nn.Linear(width, vocab)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x, w, b = self.embed(tokens).tanh(), self.head.weight, self.head.bias
        match self.how:
            case "linear":
                logits = self.head(x).flatten(0, 1)
            case "addmm":
                logits = torch.addmm(b, x.flatten(0, 1), w.t())
            case "matmul":
                logits = x.flatten(0, 1) @ w.t() + b
            case _:
                logits = (self.head(x) * 0.5 - b).flatten(0, 1)  # read twice, and scaled between
        return nn.functional.cross_entropy(logits, labels.flatten())


class Products(nn.Module):
    """`mm` and `bmm`, one of them with its first operand turned."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(13, 9))

    def forward(self, x: Tensor) -> Tensor:
        y = x.flatten(0, 1) @ self.w.to(x.dtype)
        y = y.view(*x.shape[:2], 9)
        return (y.transpose(1, 2) @ x).square().mean()


TOKENS = torch.randint(0, 37, (4, 6), generator=torch.Generator().manual_seed(0))
BATCH = {"tokens": TOKENS, "labels": TOKENS.roll(-1, 1)}
DP = {"inputs": {"tokens": "dp, -", "labels": "dp, -"}}
TP = {"embed.weight": "tp, -", "up.weight": "tp, -", "up.bias": "tp", "down.weight": "-, tp"}
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "dp": ("dp=2", DP),
    "dp bucketed": ("dp=2", DP | {"bucket": True}),
    "dp fused": ("dp=2", DP | {"bucket": True, "fuse": True}),
    "tp": ("tp=2", {"params": TP}),
    "tp fused": ("tp=2", {"params": TP, "fuse": True}),
    "zero-3": ("dp=3", DP | {"storage": {"zero": 3, "axes": ["dp"]}, "fuse": True}),
    "accumulate": ("dp=2", DP | {"accumulate": 2, "fuse": True}),
    "pipeline": ("pp=2", {"pipeline": {"microbatches": 2}, "fuse": True}),
}


# However small: products of so slow a machine take longer than two launches, and longer than copies.
SLOW = {"hardware": {"bf16_flops_per_second": 1e6, "kernel_launch_seconds": 1e-9}}


@pytest.fixture
def everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much larger they get."""
    for name in ("GROWTH", "SLACK"):
        monkeypatch.setattr(module, name, 100.0)


def compiled(model: nn.Module, batch: Any, mesh: str, plan: dict[str, Any]) -> shardc.Program:
    model = model.bfloat16()
    return shardc.compile(model, batch, mesh=mesh, plan=plan, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1))


def rows(graph: Graph) -> set[int]:
    """How many elements the rows of products' operands and results have."""
    found: set[int] = set()
    for node in graph.calls():
        if node.target in FORMS:
            found |= {type_of(value).local_shape(graph.mesh)[-1] for value in (*operands(node), node)}
    return found


@pytest.mark.usefixtures("everything")
@pytest.mark.parametrize(
    ("tables", "padded"),
    [
        ({"memory": {0: 1e-9}}, True),
        ({"memory": {0: 1e3}}, False),  # a copy takes longer than any product
        ({"products": [{"dtypes": ["bfloat16"], "flops_per_second": 1e18}], "memory": {0: 1e-4}}, False),
    ],
    ids=["quick copies", "slow copies", "quick products"],
)
def test_the_tables_of_the_hardware_are_asked(tables: dict[str, Any], padded: bool) -> None:
    program = compiled(Model(), BATCH, "dp=1", {"hardware": {**SLOW["hardware"], **tables}})
    assert any(info(node).name.endswith(".even") for node in program.body.calls()) == padded


@pytest.mark.sampled(8)
@pytest.mark.usefixtures("everything")
@pytest.mark.parametrize("name", PLANS)
def test_equal_to_the_single_device(name: str) -> None:
    mesh, plan = PLANS[name]
    program = compiled(Model(), BATCH, mesh, plan | SLOW)
    report = program.verify()
    assert report.ok, str(report)
    if "pipeline" not in plan:
        assert all(n % 8 == 0 for n in rows(program.body)), rows(program.body)
    else:
        assert program.pipelined is not None
        graphs = [graph for one in program.pipelined.stages for graph in (one["forward"], one["backward"])]
        assert all(n % 8 == 0 for graph in graphs for n in rows(graph))


WAYS = ["linear", "addmm", "matmul", "scaled"]


@pytest.mark.sampled(12)
@pytest.mark.usefixtures("everything")
@pytest.mark.parametrize("name", ["dp", "dp fused", "tp", "tp fused", "zero-3", "accumulate"])
@pytest.mark.parametrize("how", WAYS)
def test_a_bias_after_the_product(how: str, name: str) -> None:
    """It is added to what is left when the padding is cut off, so that no loss and no gradient sees padded columns; the
    parameters are the user's."""
    mesh, plan = PLANS[name]
    if "params" in plan:
        plan = plan | {"params": {"embed.weight": "tp, -", "head.bias": "tp"}}
    program = compiled(Decoder(how), BATCH, mesh, plan | SLOW)
    report = program.verify()
    assert report.ok, str(report)
    assert all(n % 8 == 0 for n in rows(program.body)), rows(program.body)
    given = program.body.input_nodes()
    assert (type_of(given["embed.weight"]).shape, type_of(given["head.bias"]).shape) == ((37, 12), (37,))


@pytest.mark.usefixtures("everything")
@settings(max_examples=4, deadline=None)
@given(st.integers(9, 40), st.integers(9, 20), st.integers(9, 40), st.sampled_from(["dp", "tp fused", "accumulate"]))
def test_any_sizes(vocab: int, width: int, hidden: int, name: str) -> None:
    mesh, plan = PLANS[name]
    batch = {key: value % vocab for key, value in BATCH.items()}
    report = shardc.compile(Model(vocab, width, hidden).bfloat16(), batch, mesh=mesh, plan=plan | SLOW).verify()
    assert report.ok, str(report)


@pytest.mark.usefixtures("everything")
def test_turned_operands() -> None:
    """Of an operand that is read across its rows the other dim counts, too."""
    x = torch.randn(4, 11, 13)
    program = compiled(Products(), (x.bfloat16(),), "dp=2", {"inputs": {"x": "dp"}} | SLOW)
    report = program.verify()
    assert report.ok, str(report)
    turned = [node for node in program.body.calls() if node.target is aten.bmm.default]
    assert turned
    for node in turned:
        shapes = [type_of(value).local_shape(program.body.mesh)[-2:] for value in (*operands(node), node)]
        assert all(shape[-1] % 8 == 0 for shape in shapes), shapes


def big(**plan: Any) -> shardc.Program:
    """A head whose padding is worth it, and an MLP with nothing to pad."""
    with torch.device("meta"):
        model = Model(vocab=5001, width=256, hidden=1024)
        tokens = torch.empty(8, 1024, dtype=torch.int64)
    return compiled(model, {"tokens": tokens, "labels": tokens}, "dp=1", plan)


def test_what_is_worth_it_is_padded() -> None:
    """The head's three products, and no copy of the logits or their gradient for it: kernels read the ones where they
    lie, and write the other in rows that are padded already."""
    before, after = big(fuse=True, align=False), big(fuse=True)
    assert rows(before.body) == {256, 1024, 5001}
    assert rows(after.body) == {256, 1024, 5008}
    pads = [node for node in after.body.calls() if node.target is aten.constant_pad_nd.default]
    assert {info(operands(node)[0]).name for node in pads} == {"embed.weight"}
    assert after.memory().peak <= before.memory().peak * module.SLACK
    (loss,) = (node for node in after.body.calls() if "cross_entropy" in str(node.target))
    assert info(operands(loss)[0]).name == "head.linear.even"
    readers = {op_name(user.target) for value in results(loss) if value is not None for user in value.users}
    assert readers >= {"shardc.linear_dgrad", "shardc.linear_wgrad"}
    calls = big().body
    saved = traffic(fuse(calls, exclude=("constant_pad_nd",))).bytes - traffic(fuse(calls)).bytes
    assert saved == 2 * 8 * 1024 * 5001 * 2, "the copy read all of it, and so wrote it once more"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("how", WAYS)
def test_a_bias_takes_no_copy_of_the_logits(how: str) -> None:
    """The kernel of the loss reads rows that are padded, adds the bias, and writes the gradient in such rows."""
    with torch.device("meta"):
        model = Decoder(how, vocab=30522, width=256)
        tokens = torch.empty(8, 512, dtype=torch.int64)
    body = compiled(model, {"tokens": tokens, "labels": tokens}, "dp=1", {"fuse": True}).body
    products = [node for node in body.calls() if node.target in FORMS]
    read = [type_of(value).shape for node in products for value in (*operands(node), node)]
    assert sum(30528 in shape for shape in read) == 2 * 3, "of each product two of three"
    assert not any(30522 in shape for shape in read)
    pads = [node for node in body.calls() if node.target is aten.constant_pad_nd.default]
    assert {type_of(node).shape for node in pads} == {(30528, 256)}, "the weight, as it lies"


def test_a_shard_of_the_vocabulary_has_one_gradient() -> None:
    """Both products read it, padded and with the vocabulary's padding made 0, as one kernel makes it."""
    with torch.device("meta"):
        model = Model(vocab=5001, width=256, hidden=1024)
        tokens = torch.empty(8, 1024, dtype=torch.int64)
    plan = {"params": {"embed.weight": "tp, -"}, "fuse": True}
    body = compiled(model, {"tokens": tokens, "labels": tokens}, "tp=2", plan).body
    assert rows(body) == {256, 1024, 2504}
    made = [value for value in body.values() if type_of(value).local_shape(body.mesh) == (8, 1024, 2504)]
    assert [op_name(producer(value)[0].target) for value in made] == ["shardc.linear", "shardc.fused"]
    pads = [node for node in body.calls() if node.target is aten.constant_pad_nd.default]
    assert {info(operands(node)[0]).name for node in pads} == {"embed.weight"}


def test_what_is_not_worth_it_stays() -> None:
    small, wide = compiled(Model(), BATCH, "dp=1", {}), big(align=False)
    assert all(n % 8 for n in rows(small.body) - {1})
    for node in wide.body.calls():
        found = worth(wide.body, node)
        assert (found is None) == (5001 not in rows_of(wide.body, node)), info(node).name
    with torch.device("meta"):
        model = Model(vocab=5001, width=256, hidden=1024)
        tokens = torch.empty(8, 1024, dtype=torch.int64)
    exact = shardc.compile(model, {"tokens": tokens, "labels": tokens}, mesh="dp=1")
    assert align(exact.body) is exact.body, "32-bit products are not fed 16 bytes at a time"


def rows_of(graph: Graph, node: torch.fx.Node) -> set[int]:
    if node.target not in FORMS:
        return set()
    return {type_of(value).local_shape(graph.mesh)[-1] for value in (*operands(node), node)}


def test_memory_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where copies would be held at the peak, the largest are not made."""
    plain = big(align=False).body
    allowed = memory(plain).peak
    monkeypatch.setattr(module, "SLACK", 1.0)
    made = align(plain)
    assert memory(made).peak <= allowed


def test_the_plan_says_so() -> None:
    plan = shardc.Plan.of(align=False)
    assert "align: false" in plan.dump()
    assert shardc.Plan.from_dict({"align": False}) == plan
    assert "align" not in shardc.Plan().dump()
