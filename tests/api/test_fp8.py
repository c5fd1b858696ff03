"""8-bit products: what is rounded and what stays wide, one scale on all ranks, bytes, and losses near bfloat16's.

In float64 nothing is rounded, so that programs are exact. In their own dtypes the ranks' 8-bit numbers and scales are
compared with those of a single device.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import shardc
from examples import train_gpt2
from shardc.cost.flops import flops
from shardc.ir.diagnostic import ShardcError
from shardc.ir.graph import info, op_name, operands, type_of
from shardc.ir.ops.scaled import QUANTIZE, SCALE, SCALED_DGRAD, SCALED_LINEAR, SCALED_MM, SCALED_WGRAD
from shardc.passes.fusion.analysis.traffic import bytes_by_call
from shardc.plan.schema import Plan
from shardc.runtime.oracle.compare import relative_error
from shardc.runtime.oracle.simulate import run_reference, simulate
from tests.api.test_precision import along, compiled

SCALED = (SCALED_LINEAR, SCALED_DGRAD, SCALED_WGRAD, SCALED_MM)
FP8 = {"linear": "fp8"}
ROW = {"linear": {"scale": "row"}}


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Two blocks and a head; `again` runs blocks again in backward."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.again = again
        self.embed = nn.Embedding(48, 32)
        self.blocks = nn.ModuleList(Block(32, 64) for _ in range(2))
        self.head = nn.Linear(32, 48, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


IDS = {"ids": torch.arange(64).reshape(8, 8) * 7 % 48}
TP = {"inputs": {"ids": "dp"}, "params": {"blocks.*.up.weight": "tp", "blocks.*.down.weight": "-, tp"}}


def program_of(
    precision: object, mesh: str = "dp=2, tp=2", model: nn.Module | None = None, **more: Any
) -> shardc.Program:
    torch.manual_seed(0)
    return shardc.compile(model or Net(), IDS, mesh=mesh, plan={**TP, "precision": precision, **more})


def products(program: shardc.Program) -> dict[str, str]:
    """The op of each product with a weight, by the node's name."""
    ops = [n for n in program.body.calls() if op_name(n.target).startswith(("shardc.linear", "shardc.scaled", "mm"))]
    return {info(n).name: op_name(n.target).removeprefix("shardc.") for n in ops}


def modules(program: shardc.Program, scaled: bool) -> set[str]:
    """The modules that have a product of 8-bit floats, or a wide one."""
    wide = ("shardc.linear", "mm")
    return {
        info(n).fqn
        for n in program.body.calls()
        if (n.target in SCALED if scaled else op_name(n.target).startswith(wide))
    }


# ---------------------------------------------------------------------------------------------- what is rounded
BLOCKS = {f"blocks.{i}.{name}" for i in range(2) for name in ("up", "down")}


@pytest.mark.parametrize("precision", [FP8, ROW], ids=["tensor", "row"])
def test_layers_are_rounded_and_the_head_is_not(precision: object) -> None:
    program = program_of(precision)
    assert modules(program, True) == BLOCKS
    assert modules(program, False) == {"head"}
    assert Counter(products(program).values()) == {
        **dict.fromkeys(("scaled_linear", "scaled_linear_dgrad", "scaled_linear_wgrad"), 4),
        **dict.fromkeys(("linear", "linear_dgrad", "linear_wgrad"), 1),
    }
    for node in program.body.calls():
        if node.target in SCALED:
            dtypes = [type_of(v).dtype for v in operands(node)[:2]]
            first = torch.float8_e4m3fn if node.target is SCALED_LINEAR else torch.float8_e5m2
            assert dtypes == [first, torch.float8_e4m3fn]  # a gradient leads, where there is one
    assert program.verify()


def test_gradients_may_be_rounded_as_weights_are() -> None:
    program = program_of({"linear": {"gradients": "e4m3"}})
    assert {type_of(n).dtype for n in program.body.calls_of(QUANTIZE)} == {torch.float8_e4m3fn}


def test_what_is_kept_stays_wide() -> None:
    program = program_of({"linear": {"keep": ["blocks.0", "**.down"]}})
    assert modules(program, True) == {"blocks.1.up"}
    with pytest.raises(ShardcError, match=r"SC202(.|\n)*'blocks.7' of what linear keeps"):
        program_of({"linear": {"keep": "blocks.7"}})


class Tied(Net):
    """The embedding is multiplied with before the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(48, 32, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.mix(nn.functional.linear(self.embed(ids), self.embed.weight))
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def test_a_weight_that_is_an_embedding_too_stays_wide() -> None:
    program = program_of(FP8, model=Tied())
    assert modules(program, True) == {*BLOCKS, "mix"}
    assert modules(program, False) == {"", "head"}


class Checkpointed(nn.Module):
    """By matrices, [k, n], whose recomputed products look as those of gradients do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(16, 16) / 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(lambda x: torch.relu(torch.mm(torch.relu(torch.mm(x, self.a)), self.b)), x, use_reentrant=False)
        return torch.mm(y, self.c).square().mean()


@pytest.mark.parametrize("form", ["linear", "mm"])
def test_what_runs_again_in_backward_is_rounded_as_in_forward(form: str) -> None:
    """Not as a gradient: a product of two tensors in e5m2 no GPU has."""
    if form == "mm":
        plan = {"inputs": {"x": "dp"}, "precision": FP8}
        program = shardc.compile(Checkpointed(), torch.randn(8, 16), mesh="dp=2", plan=plan)
    else:
        program = program_of(FP8, model=Net(again=True))
    again = 0
    for node in program.body.calls():
        if node.target in SCALED:
            dtypes = [type_of(v).dtype for v in operands(node)[:2]]
            assert dtypes.count(torch.float8_e5m2) <= 1
            again += info(node).phase == "bwd" and torch.float8_e5m2 not in dtypes
    assert again == 2
    wide = [n for n in program.body.calls() if op_name(n.target) in ("mm", "shardc.linear_wgrad")]
    assert {info(n).fqn for n in wide} == ({""} if form == "mm" else {"head"})
    assert len(wide) == (3 if form == "mm" else 1)
    report = program.verify()
    assert report, str(report)


class HalfSquares(torch.autograd.Function):
    """Whose gradient is the operand itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.float().square().sum() / 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return ctx.saved_tensors[0]


class Echo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = (nn.Linear(16, 16, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return HalfSquares.apply(h) + self.head(self.second(h.detach())).square().mean()  # type: ignore[no-any-return]


def test_a_value_that_is_a_gradient_too_is_rounded_in_both_formats() -> None:
    program = shardc.compile(Echo(), torch.randn(8, 16), mesh="dp=2", plan={"inputs": {"x": "dp"}, "precision": FP8})
    of_first = [n for n in program.body.calls() if n.target in SCALED and info(n).fqn == "first"]
    formats = [[type_of(v).dtype for v in operands(n)[:2]] for n in of_first]
    assert formats == [[torch.float8_e4m3fn] * 2, [torch.float8_e5m2, torch.float8_e4m3fn]]
    rounded = [operands(n)[0] for n in program.body.calls_of(QUANTIZE)]
    assert max(Counter(rounded).values()) == 2
    assert program.verify()


class Routed(nn.Module):
    """What ranks experts is no 8-bit product, although others follow it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.router, self.second, self.head = (nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        best, _ = torch.topk(self.router(x).softmax(-1), 2)
        return self.head(self.second(x * best.sum(-1, keepdim=True))).square().mean()


def test_a_router_stays_wide() -> None:
    program = shardc.compile(Routed(), torch.randn(8, 16), mesh="dp=2", plan={"inputs": {"x": "dp"}, "precision": FP8})
    assert modules(program, True) == {"first", "second"}
    assert program.verify()


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24, bias=False), nn.Linear(24, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x)).square().mean()


def test_a_plan_that_rounds_nothing_is_told_so() -> None:
    program = shardc.compile(Odd(), torch.randn(8, 16), mesh="dp=2", plan={"inputs": {"x": "dp"}, "precision": FP8})
    assert not modules(program, True)
    assert [d.code for d in program.diagnostics] == ["SC233"]


def test_without_the_option_nothing_is_rounded() -> None:
    assert not modules(program_of("bf16"), True)


# ---------------------------------------------------------------------------------------------- one scale on all ranks
class Uneven(nn.Module):
    """Each row, and each column of the weights, is of a size of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(16, 48, bias=False), nn.Linear(48, 32, bias=False), nn.Linear(32, 16)
        with torch.no_grad():
            self.up.weight.copy_(torch.randn(48, 16) * 2.0 ** torch.arange(48)[:, None].div(4).floor())
            self.down.weight.copy_(torch.randn(32, 48) * 2.0 ** -torch.arange(48).div(4).floor())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(self.up(x))).square().mean()


def rounded(node: fx.Node) -> bool:
    return node.target in (SCALE, QUANTIZE)


@pytest.mark.parametrize("scale", ["tensor", "row"])
@pytest.mark.parametrize(
    ("mesh", "zero", "more"),
    [
        ("dp=2, tp=2", 0, {}),
        ("dp=3, tp=1", 0, {}),  # rows of padding
        ("dp=2, tp=2", 3, {}),
        ("dp=2, tp=2", 1, {"recompute": "full"}),
        ("dp=2, tp=2", 3, {"fuse": True, "bucket": True}),
    ],
)
def test_all_ranks_have_the_single_devices_scales(scale: str, mesh: str, zero: int, more: dict[str, Any]) -> None:
    """To the bit, also where ranks hold rows of different sizes: of inputs, and of weights."""
    torch.manual_seed(1)
    x = torch.randn(8, 16) * 4.0 ** torch.arange(8)[:, None]
    plan = {
        "inputs": {"x": "dp"}, "params": {"up.weight": "tp", "down.weight": "-, tp"},
        "precision": {"linear": {"scale": scale}}, **more,
    }  # fmt: skip
    plan |= {"storage": {"zero": zero, "axes": ["dp"]}} if zero else {}
    optimizer = None
    model = Uneven()
    if zero:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = shardc.compile(model, x, mesh=mesh, plan=plan, optimizer=optimizer)
    inputs = program.inputs()
    want: dict[str, Tensor] = {}
    found: dict[str, list[Tensor]] = {}

    def note(node: fx.Node, values: Any) -> None:
        if node.target is SCALE:
            want[info(node).name] = values[0].clone()

    def see(node: fx.Node, values: Any) -> None:
        if node.target is SCALE:
            found.setdefault(info(node).name, []).extend(v.clone() for v in values)

    run_reference(program.reference, inputs, observe=note)
    simulate(program.body, inputs, observe=see)
    checked = 0
    for name, whole in want.items():
        if not name.startswith("d.") and name in found and whole.numel() == 1:
            assert {float(part) for part in found[name]} == {float(whole)}, name
            checked += len(found[name]) > 1
    if scale == "tensor":
        assert checked >= 3
    else:  # of rows, each rank has its own: together they are those of the single device
        for name, whole in want.items():
            if name in found and not name.startswith("d."):
                assert {float(v) for part in found[name] for v in part.flatten()} >= {float(v) for v in whole.flatten()}
    wide = program.verify()
    assert wide, str(wide)


@pytest.mark.parametrize(
    ("name", "scale", "mesh", "zero", "more"),
    [
        ("llama", "tensor", "dp=2, tp=2", 0, {}),
        ("llama", "row", "dp=3, tp=2", 3, {}),
        ("gpt2", "row", "dp=2, tp=2", 3, {"recompute": "full", "accumulate": 2}),
        ("gpt2", "tensor", "dp=2, tp=2", 1, {"sp": True}),
        ("llama", "tensor", "dp=2, tp=2", 1, {"fuse": True, "bucket": True}),
        ("gpt2", "tensor", "dp=3, tp=2", 0, {}),
    ],
)
@pytest.mark.sampled(3)
def test_models_verify_and_are_near_the_single_device(
    name: str, scale: str, mesh: str, zero: int, more: dict[str, Any]
) -> None:
    program, _ = compiled(name, {"linear": {"scale": scale}}, mesh, zero, train=False, **more)
    assert any(node.target in SCALED for node in program.body.calls())
    report = program.verify()
    assert report, str(report)
    inputs = program.inputs()
    wanted, found = run_reference(program.reference, inputs), simulate(program.body, inputs)
    for port, want in wanted.items():
        if port.role in ("loss", "grad"):
            assert relative_error(found[port], want, floor=2e-2) < 0.08, port.name


def test_a_pipeline_rounds_each_microbatch() -> None:
    plan = {**TP, "params": {}, "precision": FP8, "pipeline": {"microbatches": 4, "split": ["blocks.1"]}}
    program = shardc.compile(Net(), IDS, mesh="pp=2, dp=2", plan=plan)
    report = program.verify()
    assert report, str(report)


# ---------------------------------------------------------------------------------------------- bytes and FLOPs
@pytest.mark.parametrize("zero", [1, 3])
def test_weights_are_gathered_as_8_bit_numbers(zero: int) -> None:
    """A half of bfloat16's bytes, in forward and in backward, but for what stays wide."""
    storage = {"storage": {"zero": zero, "axes": ["dp"]}}
    programs = []
    for precision in ("bf16", FP8):
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters())
        plan = {"inputs": {"ids": "dp"}, "precision": precision, **storage}
        programs.append(shardc.compile(model, IDS, mesh="dp=4", plan=plan, optimizer=optimizer))
    half, eight = programs
    weights = 4 * 32 * 64 * 3 // 4  # elements that a rank sends of the blocks' weights
    for phase in ("fwd", "bwd") if zero == 3 else ("fwd",):
        before, after = along(half, "dp", "all_gather", phase), along(eight, "dp", "all_gather", phase)
        assert after[torch.float8_e4m3fn] == weights
        assert before[torch.bfloat16] - after[torch.bfloat16] == 2 * weights
    assert not (zero == 1 and along(eight, "dp", "all_gather", "bwd"))  # kept from forward


def test_backward_keeps_8_bit_numbers_and_flops_are_the_same() -> None:
    wide, narrow = (program_of(precision, mesh="dp=1, tp=1") for precision in ("bf16", FP8))
    assert flops(narrow.body).total == flops(wide.body).total
    assert flops(narrow.body).of_op("shardc.scaled_linear") == 2 * 64 * 32 * 64 * 4
    # relu's result is kept for its own backward in both; the norm's is read by the products alone.
    for program, kept in ((wide, 2), (narrow, 0)):
        read = {
            v for n in program.body.calls() if info(n).phase == "bwd" for v in operands(n) if info(v).phase == "fwd"
        }
        norms = [v for v in read if op_name(v.target) == "getitem" and info(v).fqn.endswith("norm") and v.args[1] == 0]
        assert len(norms) == kept
    sizes = bytes_by_call(narrow.body)
    made = [node for node in narrow.body.calls_of(QUANTIZE) if info(node).phase == "fwd"]
    for node in made:  # reads two bytes an element and a scale, and writes one
        assert sizes[node] == 3 * type_of(node).local_bytes(narrow.body.mesh) + 4
    assert len(made) == 8


# ---------------------------------------------------------------------------------------------- overflow
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_number_that_is_none_is_seen(value: float) -> None:
    model = Routed()
    x = torch.randn(8, 16)
    plan = {"inputs": {"x": "dp"}, "precision": FP8, "nonfinite": "skip"}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = shardc.compile(model, x, mesh="dp=2", plan=plan, optimizer=optimizer).launch()
    assert not trainer.step(x).skipped
    bad = x.clone()
    bad[5, 3] = value
    before = trainer.state["first.weight"].clone()
    assert trainer.step(bad).skipped
    assert torch.equal(trainer.state["first.weight"], before)


# ---------------------------------------------------------------------------------------------- losses
@pytest.mark.long
@pytest.mark.parametrize("linear", [{}, {"scale": "row"}, {"history": 16}], ids=["tensor", "row", "history"])
def test_200_steps_follow_bfloat16(linear: dict[str, Any]) -> None:
    """GPT-2 on real text, sharded: every loss within 1 % of bfloat16's."""
    arguments = ["--width", "32", "--heads", "2", "--layers", "1", "--batch", "8", "--seq", "32", "--steps", "200"]
    options = train_gpt2.options(arguments)
    batches = list(train_gpt2.batches(options))

    def losses(precision: object) -> list[float]:
        torch.manual_seed(0)
        model = train_gpt2.gpt2(options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        plan = Plan.load(options.plan).merge(
            Plan.of(mesh="dp=2, tp=1", precision=precision, storage={"zero": 1, "axes": ["dp"]}, clip_grad_norm=1.0)
        )
        trainer = shardc.compile(model, batches[0], plan=plan, optimizer=optimizer).launch()
        return [float(trainer.step(batch).loss) for batch in batches]

    half, eight = losses("bf16"), losses({"linear": linear})
    assert half[-1] < 0.6 * half[0]
    assert eight != half
    assert max(abs(a - b) / a for a, b in zip(half, eight, strict=True)) < 0.01


@pytest.mark.parametrize(
    ("said", "dumped"),
    [
        ({"linear": "fp8"}, "precision:\n  compute: bf16\n  linear: fp8\n"),
        ({"compute": "fp16", "linear": {}}, "precision:\n  compute: fp16\n  linear: fp8\n"),
        (
            {"linear": {"scale": "row", "gradients": "e4m3", "keep": "**.down"}},
            "precision:\n  compute: bf16\n  linear:\n    scale: row\n    gradients: e4m3\n    keep:\n    - '**.down'\n",
        ),
        ({"linear": {"history": 16}}, "precision:\n  compute: bf16\n  linear:\n    history: 16\n"),
    ],
)
def test_plans_round_trip(said: object, dumped: str) -> None:
    plan = Plan.of(precision=said)
    assert plan.dump() == dumped
    assert Plan.parse(dumped).precision == plan.precision


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"linear": "fp4"}, "no 'fp4' to make linear products in"),
        ({"linear": {"scales": "row"}}, "'linear' has no key 'scales'"),
        ({"linear": {"scale": "block"}}, "'scale' of linear should be tensor or row, not 'block'"),
        ({"linear": {"history": -1}}, "'history' of linear should be a number of steps from 0 to 4096, not -1"),
        ({"linear": {"history": True}}, "'history' of linear should be a number of steps from 0 to 4096, not True"),
        ({"linear": {"scale": "row", "history": 16}}, "'history' of linear is of a whole tensor"),
    ],
)
def test_plans_are_refused(said: object, message: str) -> None:
    with pytest.raises(ShardcError, match=f"SC208(.|\n)*{message}"):
        Plan.of(precision=said)


# ---------------------------------------------------------------------------------------------- what rounding does
def test_a_program_tells_what_rounding_does_to_each_product() -> None:
    """By hand: of one product, its operands as they are rounded; of all, errors as 3 and 2 bits of a mantissa make."""
    torch.manual_seed(1)
    model, x = Uneven(), torch.randn(8, 16)
    x[0, 0], x[1] = 2.0**20, 2.0**-12 * x[1]  # one large element: the rest of the tensor underflows in part
    program = shardc.compile(model, x, mesh="dp=2", plan={"inputs": {"x": "dp"}, "precision": FP8, "accumulate": 2})
    report = program.rounded_products()
    assert [(one.module, one.phase) for one in report] == [
        *(("up", "fwd"), ("down", "fwd")), *(("down", "bwd"), ("down", "bwd"), ("up", "bwd")),
    ]  # fmt: skip
    first = report[0]
    parts = []
    for rows in x.bfloat16().split(4):
        scale = torch.ops.shardc.scale(rows.abs().amax(), torch.float8_e4m3fn)
        rounded = torch.ops.shardc.quantize(rows, scale, torch.float8_e4m3fn).float() * scale
        parts.append((rounded, rows.float()))
    rounded, whole = (torch.cat(part) for part in zip(*parts, strict=True))
    operand = first.operands[0]
    assert operand.underflown == float(((rounded == 0) & (whole != 0)).float().mean()) > 0.3
    assert operand.rounded == pytest.approx(float((rounded - whole).norm() / whole.norm()), rel=1e-6)
    assert operand.saturated == 0
    weight = model.up.weight.detach().bfloat16().float()
    scale = torch.ops.shardc.scale(weight.abs().amax(), torch.float8_e4m3fn)
    narrow = torch.ops.shardc.quantize(weight, scale, torch.float8_e4m3fn).float() * scale
    y, wanted = (rounded @ narrow.t()).bfloat16().float(), whole @ weight.t()
    assert first.error == pytest.approx(float((y - wanted).norm() / wanted.norm()), rel=1e-5)
    assert "f8e4m3 x f8e4m3, error" in str(first)
    assert all(one.operands[0].format == "f8e5m2" for one in report[2:])
    assert not program_of("bf16").rounded_products()


@pytest.mark.parametrize("scale", ["tensor", "row"])
def test_products_of_real_models_lose_little(scale: str) -> None:
    for name in ("gpt2", "llama"):
        program, _ = compiled(name, {"linear": {"scale": scale}}, "dp=2, tp=1", train=False)
        report = program.rounded_products()
        assert len(report) >= 12
        assert max(one.error for one in report) < 0.2
        assert min(one.error for one in report) > 1e-3
