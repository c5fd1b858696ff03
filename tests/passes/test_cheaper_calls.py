"""Calls that go through less memory give the same bits, and no rank holds more; what could change either stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import shardc
from shardc.cost.memory import memory
from shardc.ir.graph import Graph, update
from shardc.ir.parse import parse
from shardc.ir.provenance import Derivation
from shardc.ir.text import print_graph
from shardc.passes.cheaper_calls import CheaperCalls

aten = torch.ops.aten
DP = {"inputs": {"x": "dp, -, -"}}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "alone": ("dp=1", {}),
    "accumulate": ("dp=1", {"accumulate": 2}),
    "dp": ("dp=2", DP),
    "uneven": ("dp=3", DP),
    "zero-3": ("dp=2", {**DP, "storage": {"zero": 3, "axes": ["dp"]}}),
    "recompute": ("dp=1", {"recompute": "full"}),
    "tp": ("tp=2", {"params": {"up.weight": "tp, -"}}),
}


class Model(nn.Module):
    """A norm by the mean of squares, and positions that are rotated by halves: what Llama's layers have."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale = nn.Linear(6, 8), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h = self.scale * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6))
        angle = torch.arange(h.shape[1], dtype=h.dtype)[:, None] * torch.ones(8, dtype=h.dtype)
        turned = h * angle.cos() + torch.cat((-h[..., 4:], h[..., :4]), -1) * angle.sin()
        return turned.tanh().square().mean()


def compiled(layout: str, dtype: torch.dtype = torch.float32, **more: Any) -> shardc.Program:
    torch.manual_seed(0)
    model = Model().to(dtype)
    mesh, plan = LAYOUTS[layout]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = {"x": torch.randn(4, 5, 6, dtype=dtype)}
    return shardc.compile(model, batch, mesh=mesh, plan={**plan, **more}, optimizer=optimizer)


def trained(program: shardc.Program) -> dict[str, Tensor]:
    trainer = program.launch()
    losses = {f"loss {step}": torch.as_tensor(trainer.step(program.sample).loss) for step in range(3)}
    return losses | {name: value.clone() for name, value in trainer.state_dict(("param", "state")).items()}


def powers(program: shardc.Program) -> list[Any]:
    return [call.args[1] for call in program.body.calls_of(aten.pow.Tensor_Scalar)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_numbers_are_the_same(layout: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(CheaperCalls, "run", lambda _, graph: graph)
        before = compiled(layout, dtype)
    program = compiled(layout, dtype)
    assert 1.0 in powers(before)
    assert 1.0 not in powers(program)
    assert len(before.body.calls_of(aten.slice_backward.default)) >= 2
    if layout != "tp":
        assert not program.body.calls_of(aten.slice_backward.default)
    state_before, state = trained(before), trained(program)
    assert state.keys() == state_before.keys()
    for name, value in state.items():
        assert torch.equal(value, state_before[name]), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_program_is_verified_and_its_text_is_read_back(layout: str) -> None:
    program = compiled(layout)
    report = program.verify()
    assert report, str(report)
    text = print_graph(program.body, comments=False)
    assert print_graph(shardc.parse(text), comments=False) == text


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_rank_holds_more(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[tuple[Graph, Graph]] = []
    run = CheaperCalls.run

    def watched(self: CheaperCalls, graph: Graph) -> Graph:
        graphs.append((graph, run(self, graph)))
        return graphs[-1][1]

    monkeypatch.setattr(CheaperCalls, "run", watched)
    compiled(layout)
    assert any(before is not after for before, after in graphs)
    for before, after in graphs:
        hold_no_more(before, after)


def hold_no_more(before: Graph, after: Graph) -> None:
    for overlap in (False, True):
        was, now = (memory(graph, overlap=overlap).peak for graph in (before, after))
        assert now <= was, f"{was} -> {now} bytes\n{print_graph(after, comments=False)}"


# ---------------------------------------------------------------------- single graphs
def graph_of(lines: str, read: Callable[[str], Graph] = shardc.parse) -> Graph:
    return read(f"""graph @step mesh(tp=2) {{
  %p = param "p" : f32[4, 6]
  %x = input "x" : f32[4, 6]
  %t = input "t" : f32[6, 4]
  %l = input "l" : f32[8, 6]
  %s = input "s" : f32[4, 1]
  %g = input "g" : f32[4, 2]
  %h = input "h" : f32[4, 3]
  %k = input "k" : f32[4, 4]
  %w = input "w" : f32[4, 6@tp]
  %i = input "i" : f32[2, 5, 5, 3]
  %total = sum "total" : f32[4, 6]
bwd:
{lines}  return output "y" = %y
}}""")


def slice_backward(name: str, of: str, start: int, end: int, step: int = 1) -> str:
    arguments = f"%{of}, input_sizes=[4, 6], dim=1, start={start}, end={end}, step={step}"
    return f"  %{name} = slice_backward({arguments}) : f32[4, 6]\n"


TILES = slice_backward("a", "g", 0, 2) + slice_backward("b", "k", 2, 6)
SUM = "  %c = add.Tensor(%a, %b) : f32[4, 6]\n"
READ = "  %y = mul.Tensor(%c, %x) : f32[4, 6]\n"
WIDE = "  %e = expand(%s, [4, 6]) : f32[4, 6]\n"
DIVIDED = "  %d = div.Scalar(%e, 6) : f32[4, 6]\n"
TWICE = "  %y = mul.Tensor(%d, %x) : f32[4, 6]\n"
POWER = "  %q = mul.Scalar(%x, 3) : f32[4, 6]\n  %c = pow.Tensor_Scalar(%q, 1.0) : f32[4, 6]\n"
BROUGHT = (
    "  %q = sum.dim_IntList(%w, [1], True) {self1: tp} : f32[4, 1] |sum tp\n"
    '  %r = shardc.all_reduce(%q, op="sum", axes=["tp"]) : f32[4, 1]\n'
)
WHOLE = '  %w.whole = shardc.all_gather(%w, axes=["tp"], atoms=[4, 3], pos=1, size=6, shape=[4, 6]) : f32[4, 6]\n'
BETWEEN = "  %z = neg(%x) : f32[4, 6]\n"
CHANGED = {
    "tiles": TILES + SUM + READ,
    "the other way around": slice_backward("a", "k", 2, 6) + slice_backward("b", "g", 0, 2) + SUM + READ,
    "views of a value of their size": "  %x.g = slice.Tensor(%x, 1, 4, 6) : f32[4, 2]\n"
    + slice_backward("a", "x.g", 0, 2)
    + slice_backward("b", "k", 2, 6)
    + SUM
    + READ,
    "a number": WIDE + DIVIDED + TWICE,
    "of a constant": "  %o = full([], 1, dtype=f32) : f32[] !const\n  %e = expand(%o, [4, 6]) : f32[4, 6] !const\n"
    "  %d = div.Scalar(%e, 6) : f32[4, 6] !const\n" + TWICE,
    "of a constant that is cut": "  %o = full([], 1, dtype=f32) : f32[] !const\n"
    "  %e = expand(%o, [4, 6]) : f32[4, 6] !const\n  %d = div.Scalar(%e, 6) : f32[4, 6] !const\n"
    '  %d.cut = shardc.shard_slice(%d, axes=["tp"], atoms=[4, 6], pos=1, shape=[4, 3]) : f32[4, 6@tp] !const\n'
    "  %y = mul.Tensor(%d.cut, %w) {~0: tp} : f32[4, 6@tp]\n",
    "a sum that is awaited there": BROUGHT + "  %e = expand(%r, [4, 6]) : f32[4, 6]\n" + DIVIDED + TWICE,
    "a reader that lies as another operand does": WIDE
    + DIVIDED
    + "  %v = transpose.int(%t, 0, 1) : f32[4, 6]\n  %y = mul.Tensor(%v, %d) : f32[4, 6]\n",
    "another number of the narrow value": "  %n = div.Scalar(%s, 5) : f32[4, 1]\n"
    + WIDE
    + DIVIDED
    + "  %u = mul.Tensor(%d, %n) : f32[4, 6]\n  %y = mul.Tensor(%u, %x) : f32[4, 6]\n",
    "a power": POWER + READ,
    "a power of joined slices": TILES + SUM + "  %d = pow.Tensor_Scalar(%c, 1.0) : f32[4, 6]\n" + TWICE,
    "a power of an input's rows": "  %q = slice.Tensor(%l, 0, 4, 8) : f32[4, 6]\n"
    "  %c = pow.Tensor_Scalar(%q, 1.0) : f32[4, 6]\n" + READ,
    "a power of an input": "  %c = pow.Tensor_Scalar(%x, 1) : f32[4, 6]\n" + READ,
}
KEPT = {
    "a gap": slice_backward("a", "g", 0, 2) + slice_backward("b", "h", 3, 6) + SUM + READ,
    "an overlap": slice_backward("a", "h", 0, 3) + slice_backward("b", "k", 2, 6) + SUM + READ,
    "steps": slice_backward("a", "h", 0, 6, 2) + slice_backward("b", "h", 1, 6, 2) + SUM + READ,
    "a factor": TILES + SUM.replace("%b)", "%b, alpha=2)") + READ,
    "another reader": TILES + SUM + "  %y = mul.Tensor(%c, %a) : f32[4, 6]\n",
    "the same slice": slice_backward("a", "h", 0, 3) + SUM.replace("%b", "%a") + READ,
    "three slices": slice_backward("a", "g", 0, 2)
    + slice_backward("b", "g", 2, 4)
    + SUM
    + slice_backward("m", "g", 4, 6)
    + "  %y = add.Tensor(%c, %m) : f32[4, 6]\n",
    "slices in forward": "fwd:\n" + TILES + SUM + READ,
    "a sum that is returned": TILES + SUM.replace("%c", "%y"),
    "a slice of a larger value": "  %l.l = neg(%l) : f32[8, 6]\n  %l.g = slice.Tensor(%l.l, 0, 0, 4) : f32[4, 6]\n"
    "  %l.h = slice.Tensor(%l.g, 1, 0, 2) : f32[4, 2]\n"
    + slice_backward("a", "l.h", 0, 2)
    + slice_backward("b", "k", 2, 6)
    + SUM
    + READ,
    "a slice of what is written over": "  %p.g = slice.Tensor(%p, 1, 0, 2) : f32[4, 2]\n"
    + slice_backward("a", "p.g", 0, 2)
    + slice_backward("b", "k", 2, 6)
    + SUM
    + READ,
    "channels, which would lie last": "  %i.g = permute(%i, [0, 3, 1, 2]) : f32[2, 3, 5, 5]\n"
    "  %a = slice_backward(%i.g, input_sizes=[2, 6, 5, 5], dim=1, start=0, end=3, step=1) : f32[2, 6, 5, 5]\n"
    "  %b = slice_backward(%i.g, input_sizes=[2, 6, 5, 5], dim=1, start=3, end=6, step=1) : f32[2, 6, 5, 5]\n"
    "  %c = add.Tensor(%a, %b) : f32[2, 6, 5, 5]\n  %y = neg(%c) : f32[2, 6, 5, 5]\n",
    "a pending sum": "  %q = sum.dim_IntList(%w, [1], True) {self1: tp} : f32[4, 1] |sum tp\n"
    "  %e = expand(%q, [4, 6]) passes tp : f32[4, 6] |sum tp\n  %d = div.Scalar(%e, 6) passes tp : f32[4, 6] |sum tp\n"
    "  %u = neg(%d) passes tp : f32[4, 6] |sum tp\n"
    '  %y = shardc.all_reduce(%u, op="sum", axes=["tp"]) : f32[4, 6]\n',
    "another call reads it": WIDE + DIVIDED + "  %v = view(%d, [24]) : f32[24]\n  %y = mul.Tensor(%v, %v) : f32[24]\n",
    "it is returned": WIDE + DIVIDED.replace("%d", "%y"),
    "split columns": "  %e = expand(%s, [4, 3]) {~0: tp} : f32[4, 6@tp]\n"
    "  %d = div.Scalar(%e, 6) {~0: tp} : f32[4, 6@tp]\n  %y = neg(%d) {~0: tp} : f32[4, 6@tp]\n",
    "nothing grows": WIDE.replace("%s", "%x") + DIVIDED + TWICE,
    "the narrow value has the number": "  %n = div.Tensor(%s, 6) : f32[4, 1]\n"
    + WIDE
    + DIVIDED
    + "  %u = mul.Tensor(%d, %n) : f32[4, 6]\n  %y = mul.Tensor(%u, %x) : f32[4, 6]\n",
    "a reader that would lie otherwise": WIDE
    + DIVIDED
    + "  %v = transpose.int(%t, 0, 1) : f32[4, 6]\n  %y = mul.Tensor(%d, %v) : f32[4, 6]\n",
    "a sum that is awaited before": BROUGHT
    + "  %e = expand(%r, [4, 6]) : f32[4, 6]\n"
    + BETWEEN
    + DIVIDED
    + "  %u = mul.Tensor(%d, %z) : f32[4, 6]\n  %y = mul.Tensor(%u, %x) : f32[4, 6]\n",
    "a scaled number": WIDE + "  %d = add.Tensor(%e, 6, alpha=2) : f32[4, 6]\n" + TWICE,
    "squares": POWER.replace("1.0", "2.0") + READ,
    "a power that is returned": POWER.replace("%c", "%y"),
    "a power of a larger value's slice": "  %l.l = neg(%l) : f32[8, 6]\n"
    "  %q = slice.Tensor(%l.l, 0, 0, 4) : f32[4, 6]\n  %c = pow.Tensor_Scalar(%q, 1.0) : f32[4, 6]\n" + READ,
    "a power of columns": "  %q = slice.Tensor(%l, 1, 0, 3) : f32[8, 3]\n"
    "  %c = pow.Tensor_Scalar(%q, 1.0) : f32[8, 3]\n  %y = neg(%c) : f32[8, 3]\n",
    "a power of what is written over": "  %c = pow.Tensor_Scalar(%p, 1.0) : f32[4, 6]\n" + READ,
    "a power of a sum over microbatches": "  %c = pow.Tensor_Scalar(%total, 1.0) : f32[4, 6]\n" + READ,
    "a power of what is awaited": WHOLE + "  %c = pow.Tensor_Scalar(%w.whole, 1.0) : f32[4, 6]\n" + BETWEEN + READ,
}


@pytest.mark.parametrize("case", CHANGED)
def test_calls_are_replaced(case: str) -> None:
    before = graph_of(CHANGED[case])
    after = CheaperCalls().run(before)
    text = print_graph(after, comments=False)
    assert text != print_graph(before, comments=False)
    assert not [op for op in ("slice_backward", "pow", "div.Scalar(%e") if op in text]
    assert print_graph(shardc.parse(text), comments=False) == text
    hold_no_more(before, after)


@pytest.mark.parametrize("case", KEPT)
def test_other_calls_stay(case: str) -> None:
    graph = graph_of(KEPT[case])
    assert CheaperCalls().run(graph) is graph


def test_programs_with_kernels_keep_their_calls() -> None:
    assert CheaperCalls(enabled=False).run(graph := graph_of(CHANGED["tiles"])) is graph


def test_a_sum_of_slices_in_a_bucket_stays_where_it_is_made() -> None:
    """A sum is written into the bucket at once; joined slices would be copied there."""
    bucket = "  %flat = shardc.pack([%c, %z], leads=[1, 1], mids=[24, 24], rows=1, unit=2) : f32[48]\n"
    graph = graph_of(TILES + SUM + BETWEEN + bucket + "  %y = neg(%flat) : f32[48]\n", read=parse)
    assert CheaperCalls().run(graph) is graph


def test_slices_of_columns_that_ranks_split_stay() -> None:
    """Each rank has its own of them, and joined columns lie in another order than those of the ranks."""
    part, arguments = "f32[4, 6@tp]", "input_sizes=[4, 3], dim=1, start={}, end={}, step=1"
    lines = "".join(
        f"  %{name} = slice_backward(%{of}, {arguments.format(start, end)}) : {part}\n"
        for name, of, start, end in (("a", "s", 0, 1), ("b", "g", 1, 3))
    )
    total = f"  %c = add.Tensor(%a, %b) : {part}\n  %y = neg(%c) : {part}\n"
    graph = graph_of(lines + total, read=parse)
    assert CheaperCalls().run(graph) is graph


def test_sums_that_are_recomputed_stay() -> None:
    """Forward has them, perhaps in another graph."""
    graph = graph_of(CHANGED["tiles"])
    update(graph.by_name("c"), origin=Derivation("recomputed", "f.c"))
    assert CheaperCalls().run(graph) is graph


@pytest.mark.parametrize("second", [4, 3])
def test_both_halves_of_a_batch_are_joined_or_none_is(second: int) -> None:
    """The second half's slices have a gap, or none."""
    copies = slice_backward("a2", "g", 0, 2) + slice_backward("b2", "k" if second == 4 else "h", 6 - second, 6)
    lines = TILES + SUM + copies + "  %c2 = add.Tensor(%a2, %b2) : f32[4, 6]\n"
    graph = graph_of(lines + "  %z = mul.Tensor(%c, %c2) : f32[4, 6]\n" + WIDE + DIVIDED + TWICE.replace("%x", "%z"))
    update(graph.by_name("c2"), origin=Derivation("half", "c"))
    after = CheaperCalls().run(graph)
    assert len(after.calls_of(aten.cat.default)) == (2 if second == 4 else 0)


# ---------------------------------------------------------------------- any graph
SHAPES = {"m": (4, 6), "n": (6, 4), "l": (8, 6), "c": (4, 1), "h": (4, 3)}


def drawn_lines(data: st.DataObject) -> str:
    """Calls of a graph: the patterns, and what makes and reads views, layouts and sums."""
    values: dict[str, list[str]] = {shape: [f"%in.{shape}"] for shape in SHAPES}
    lines: list[str] = []

    def draw(shape: str) -> str:
        return data.draw(st.sampled_from(values[shape]))

    def call(text: str, shape: str) -> str:
        name = f"%v{len(lines)}"
        lines.append(f"  {name} = {text} : f32{list(SHAPES[shape])}\n")
        values[shape].append(name)
        return name

    def number(shape: str) -> str:
        ops = ("div.Scalar({}, 3)", "mul.Tensor({}, 0.7)", "add.Scalar({}, 1)", "neg({})", "pow.Tensor_Scalar({}, 1.0)")
        return call(data.draw(st.sampled_from(ops)).format(draw(shape)), shape)

    def joined() -> str:
        starts = data.draw(st.sampled_from([(0, 3), (3, 0), (0, 0)]))
        arguments = "input_sizes=[4, 6], dim=1, start={}, end={}, step=1"
        parts = [call(f"slice_backward({draw('h')}, {arguments.format(start, start + 3)})", "m") for start in starts]
        return call(f"add.Tensor({parts[0]}, {parts[1]})", "m")

    kinds = {
        "number": lambda: number(data.draw(st.sampled_from(list(SHAPES)))),
        "expand": lambda: call(f"expand({draw('c')}, [4, 6])", "m"),
        "joined": joined,
        "rows": lambda: call(f"slice.Tensor({draw('l')}, 0, 0, 4)", "m"),
        "columns": lambda: call(f"slice.Tensor({draw('m')}, 1, 3, 6)", "h"),
        "transpose": lambda: call(f"transpose.int({draw('m')}, 0, 1)", "n"),
        "back": lambda: call(f"transpose.int({draw('n')}, 0, 1)", "m"),
        "product": lambda: call(f"mul.Tensor({draw('m')}, {draw('m')})", "m"),
        "sum": lambda: call(f"sum.dim_IntList({draw('m')}, [1], True)", "c"),
        "stack": lambda: call(f"cat([{draw('m')}, {draw('m')}])", "l"),
    }
    for kind in data.draw(st.lists(st.sampled_from(list(kinds)), min_size=5, max_size=25)):
        kinds[kind]()
    names = [name for of_shape in values.values() for name in of_shape]
    returned = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
    ports = ", ".join(f'output "{name[1:]}" = {name}' for name in returned)
    return f"{''.join(lines)}  return {ports}"


@settings(max_examples=60)
@given(data=st.data())
def test_any_graph_holds_no_more_and_gives_the_same_bits(data: st.DataObject) -> None:
    inputs = "".join(f'  %in.{name} = input "{name}" : f32{list(shape)}\n' for name, shape in SHAPES.items())
    before = shardc.parse(f"graph @step mesh(dp=1) {{\n{inputs}bwd:\n{drawn_lines(data)}\n}}")
    after = CheaperCalls().run(before)
    hold_no_more(before, after)
    torch.manual_seed(0)
    batch = [torch.randn(shape) for shape in SHAPES.values()]
    was, now = (fx.Interpreter(fx.GraphModule({}, graph.fx)).run(*batch) for graph in (before, after))
    for a, b in zip(was, now, strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (7, 1)])
def test_a_number_of_few_elements_is_that_of_many(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """torch computes in other loops by size; they round alike."""
    torch.manual_seed(0)
    for _ in range(20):
        x, number = torch.randn(shape, dtype=dtype), float(torch.randn((), dtype=torch.float64)) * 100
        for op in (torch.add, torch.sub, torch.mul, torch.div):
            assert torch.equal(op(x, number).expand(7, 67), op(x.expand(7, 67), number))
