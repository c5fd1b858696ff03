"""Products add biases that no kernel would add on its way: what attention reads is written once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import shardc
from benchmarks.gpt import GPT
from examples.gpt2 import gpt2
from shardc.ir.graph import Graph, info, op_name, operands, type_of
from shardc.ir.ops.linear import LINEAR, LINEAR_BIAS, write_linear_bias
from shardc.passes.bias_products import BiasProducts
from shardc.passes.fusion.analysis.traffic import bytes_by_call, traffic
from shardc.runtime.oracle.simulate import simulate
from tests.replanned import replanned

TP = {"params": {"wte.weight": "tp, -", "**.qkv.weight": "3*tp, -", "**.up.weight": "tp, -"}}
DP = {"inputs": {"*": "dp, -"}}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "alone": ("dp=1", {}),
    "dp": ("dp=2", DP),
    "tp": ("tp=2", TP),
    "sp": ("tp=2", {**TP, "activations": {"blocks.0": "-, tp, -"}}),
    "zero3": ("dp=2", {**DP, "storage": {"zero": 3, "axes": ["dp"]}, "bucket": "1MiB"}),
    "full": ("dp=1", {"recompute": "full"}),
    "accumulate": ("dp=2", {**DP, "accumulate": 2}),
}


def compiled(layout: str, precision: str | None = "bf16", **more: Any) -> shardc.Program:
    torch.manual_seed(0)
    mesh, plan = LAYOUTS[layout]
    model = GPT(vocab=64, width=32, heads=4, layers=2, seq=8)
    batch = {name: torch.randint(64, (8, 8)) for name in ("input_ids", "labels")}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    plan = {"fuse": True, "precision": precision, **plan, **more}
    return shardc.compile(model, batch, mesh=mesh, plan=plan, optimizer=optimizer)


def joined(body: Graph) -> list[str]:
    return [info(call).name for call in (*body.calls_of(LINEAR_BIAS), *body.calls_of(torch.ops.aten.addmm.default))]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("precision", ["bf16", None])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_layouts(layout: str, precision: str | None) -> None:
    program = compiled(layout, precision)
    forward = [f"blocks.{i}.qkv.add" for i in range(2)]
    assert joined(program.body)[:2] == forward
    assert all("qkv" in name for name in joined(program.body))
    report = program.verify()
    assert report, str(report)
    assert (report.eager_error or 0.0) < 1e-12


def test_a_bias_that_is_gathered_behind_its_product_is_joined_too() -> None:
    """In forward as where it is computed again, and where gathers are packed: all are rounded alike."""
    apart = compiled("zero3", bucket=False, recompute="full")
    packed = replanned(apart, bucket="1MiB")
    assert len(packed.collectives()) < len(apart.collectives())
    expected = {f"{again}blocks.{i}.qkv.add" for i in range(2) for again in ("", "r.")}
    assert {*joined(apart.body)} == {*joined(packed.body)} == expected
    assert apart.verify().ok


class Sum(nn.Module):
    """Forward reads `y` for a sum too; backward computes it again for products alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return self.c(torch.tanh(self.b(y))) + y


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Sum() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


@pytest.mark.parametrize("halves", [1, 2])
def test_what_is_computed_again_is_rounded_as_the_first_time(halves: int) -> None:
    torch.manual_seed(0)
    plan: dict[str, Any] = {"precision": "bf16", "fuse": True, "recompute": "full", "overlap": {"split": halves}}
    plan["params"] = {"**.b.weight": "tp, -", "**.c.weight": "-, tp"}
    program = shardc.compile(Sums(), torch.randn(64, 16), mesh="tp=2", plan=plan)
    seen: dict[str, Tensor] = {}

    def watch(node: fx.Node, values: Sequence[Tensor]) -> None:
        seen[info(node).name] = values[0].clone()

    simulate(program.body, program.inputs(), observe=watch)
    again = [name for name in seen if name.startswith("r.") and ".a.add" in name]
    names = {f"r.layers.{i}.a.add{half}" for i in range(2) for half in ("", "/2")[:halves]}
    assert {*again} == names
    assert all(seen[name].equal(seen[name.removeprefix("r.")]) for name in again)


@pytest.mark.parametrize("layout", ["alone", "tp", "sp"])
def test_a_product_that_only_attention_reads_is_written_once(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body = compiled(layout).body
    monkeypatch.setattr(BiasProducts, "run", lambda _, graph: graph)
    before = compiled(layout).body
    assert not joined(before)
    products = [type_of(call).local_bytes(body.mesh) for call in body.calls_of(LINEAR_BIAS)]
    biases = [type_of(operands(call)[2]).local_bytes(body.mesh) for call in body.calls_of(LINEAR_BIAS)]
    # A kernel read a product and a bias in float32, and wrote their sum; now the bias is read, and written in bfloat16.
    assert traffic(before).bytes - traffic(body).bytes == sum(2 * size for size in products) - sum(biases)
    kernels = [size for call, size in bytes_by_call(before).items() if op_name(call.target) == "shardc.fused"]
    assert products
    assert all(2 * size + 2 * bias in kernels for size, bias in zip(products, biases, strict=True))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("precision", ["bf16", None])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_kernels_each_bias_is_its_products(layout: str, precision: str | None) -> None:
    """One call a product, as eager PyTorch has; products that are pending sums add none."""
    program = compiled(layout, precision, fuse=False)
    summed = {"out", "down"} if layout in ("tp", "sp") else set[str]()
    names = {f"blocks.{i}.{name}.add" for i in range(2) for name in ("qkv", "out", "up", "down")}
    forward = {name for name in joined(program.body) if not name.startswith("r.")}
    expected = names - {name for name in names if name.split(".")[2] in summed}
    assert forward == (set() if precision else expected)  # short ones are rounded as before
    report = program.verify()
    assert report, str(report)
    assert (report.eager_error or 0.0) < 1e-12


@pytest.mark.parametrize(
    ("mesh", "plan"),
    [
        ("dp=1", {}),
        ("dp=2,tp=2", {"params": {"**.attn.c_attn.weight": "-, 3*tp", "**.mlp.c_fc.weight": "-, tp"}, **DP}),
    ],
)
def test_products_of_matrices(mesh: str, plan: dict[str, Any]) -> None:
    model, batch = gpt2(batch=8, seq=8, layers=1, vocab=32, heads=4, width=16)
    program = shardc.compile(model, batch, mesh=mesh, plan={"precision": "bf16", "fuse": True, **plan})
    assert joined(program.body) == ["transformer.h.0.attn.c_attn.addmm"]
    report = program.verify()
    assert report, str(report)
    assert (report.eager_error or 0.0) < 1e-12


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_stages(schedule: str) -> None:
    torch.manual_seed(0)
    model = GPT(vocab=64, width=32, heads=4, layers=4, seq=8)
    batch = {name: torch.randint(64, (8, 8)) for name in ("input_ids", "labels")}
    pipeline = {"axis": "pp", "schedule": schedule, "microbatches": 4}
    plan = {"precision": "bf16", "fuse": True, "pipeline": pipeline}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    program = shardc.compile(model, batch, mesh="pp=2", plan=plan, optimizer=optimizer)
    found = {name for stage in program.staged.stages for graph in stage.parts.values() for name in joined(graph)}
    assert found == {f"blocks.{i}.qkv.add" for i in range(4)}
    report = program.verify()
    assert report, str(report)
    program.launch().step(batch)


class Hostile(nn.Module):
    """Biases of other products than those that are joined: each must be added exactly once, whoever reads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 16, bias=False), nn.Linear(16, 16)
        self.row, self.twice, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (4, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        y = self.row(y)
        z = F.linear(y, self.twice.weight)
        z = F.linear(z + self.twice.bias, self.k.weight) + z.square()  # the product is read without its bias, too
        return (self.last(z) @ x.mT).square().mean()


@pytest.mark.parametrize("precision", ["bf16", None])
@pytest.mark.parametrize(
    ("mesh", "plan", "expected"),
    [
        ("dp=1", {}, "q v row last"),
        ("tp=2", {"params": {f"{n}.weight": "tp, -" for n in "qkv"} | {"row.weight": "-, tp"}}, "q v"),
        ("dp=2,tp=2", {"inputs": {"x": "dp, tp, -"}, "params": {"last.weight": "-, tp"}}, "q v row"),
        ("tp=3", {"params": {"last.weight": "tp, -", "q.weight": "tp, -"}}, ""),  # blocks of several sizes
    ],
)
def test_each_bias_is_added_once(mesh: str, plan: dict[str, Any], expected: str, precision: str | None) -> None:
    torch.manual_seed(0)
    model = Hostile()
    batch = {"x": torch.randn(4, 6, 16)}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    asked = {"precision": precision, "fuse": True, **plan}
    program = shardc.compile(model, batch, mesh=mesh, plan=asked, optimizer=optimizer)
    assert {*joined(program.body)} == {f"{name}.add" for name in expected.split()}
    report = program.verify()
    assert report, str(report)
    assert (report.eager_error or 0.0) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rows", [(2, 3), (4,), (0,)])
def test_made_and_written(dtype: torch.dtype, rows: tuple[int, ...]) -> None:
    x, w, b = torch.randn(5, *rows).movedim(0, -1).to(dtype), torch.randn(6, 5).to(dtype), torch.randn(6).to(dtype)
    made = LINEAR_BIAS(x, w, b)
    rtol, atol = (1e-2, 2e-2) if dtype == torch.bfloat16 else (1e-5, 1e-5)
    torch.testing.assert_close(made, LINEAR(x, w) + b, rtol=rtol, atol=atol)
    assert made.is_contiguous()
    place = torch.full((*rows, 6), torch.nan, dtype=dtype)
    assert write_linear_bias(x, w, b, out=place) is place
    assert place.equal(made)
