"""Mixed precision: where casts sit, what is sent, and that steps are those of eager torch.

In float64 all casts are nothing, so programs of any precision must be exact; in their own dtypes, as good as rounding.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import shardc
from examples import train_gpt2
from examples.cnn import cnn
from examples.gpt2 import gpt2
from examples.llama import llama
from examples.mlp import mlp
from shardc.ir.diagnostic import ShardcError
from shardc.ir.graph import Graph, info, op_name, operands, type_of
from shardc.plan.schema import Plan
from shardc.runtime.oracle.compare import relative_error
from shardc.runtime.oracle.simulate import run_reference, simulate
from tests.in_double import InDouble

PLANS = Path(__file__).parent.parent.parent / "configs" / "plans"
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SMALL: dict[str, Any] = {
    "gpt2": lambda: gpt2(batch=4, seq=8, layers=1, vocab=32, heads=2, width=16),
    "llama": lambda: llama(batch=4, seq=8, layers=1, vocab=32, heads=4, kv_heads=2, width=16),
    "mlp": mlp,
    "cnn": cnn,
}
REDUCE_HALF = {"compute": "bf16", "reduce": "bf16"}
KEPT = {"compute": "bf16", "keep": ["**.ln_*", "**.*norm"]}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups; a key bias has no gradient but rounding, of which a smaller eps would make a step."""
    decayed, plain = ([p for p in model.parameters() if (p.ndim > 1) is many] for many in (True, False))
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0, "lr": 3e-3}]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-5)


def compiled(
    name: str,
    precision: object,
    mesh: str = "dp=2, tp=2",
    zero: int = 0,
    sp: bool = False,
    train: bool = True,
    **more: Any,
) -> tuple[shardc.Program, Any]:
    model, batch, *loss = SMALL[name]()
    plan = Plan.load(PLANS / f"{name}{'_sp' * sp}.yaml")
    storage = {"zero": zero, "axes": ["dp"]} if zero else None
    if not train and more.get("clip_grad_norm") is not None:
        more["clip_grad_norm"] = {"norm": more["clip_grad_norm"], "returned": True}
    if precision == KEPT:
        precision = {**KEPT, "keep": KEPT["keep"][:1] if name == "gpt2" else KEPT["keep"][1:]}
    plan = plan.merge(Plan.of(mesh=mesh, precision=precision, storage=storage, **more))
    optimizer = adamw(model) if train else None
    return shardc.compile(model, batch, plan=plan, optimizer=optimizer, loss=(*loss, None)[0]), batch


def sent(program: shardc.Program) -> Counter[tuple[str, str, str, torch.dtype]]:
    """Bytes a rank sends, by kind, phase, axes and dtype."""
    found: Counter[tuple[str, str, str, torch.dtype]] = Counter()
    for one in program.collectives():
        dtype = type_of(program.body.by_name(one.value)).dtype
        found[one.kind, one.phase, ".".join(one.axes), dtype] += one.bytes_per_rank
    return found


def along(program: shardc.Program, axis: str, kind: str, phase: str) -> dict[torch.dtype, int]:
    found: Counter[torch.dtype] = Counter()
    for (k, p, axes, dtype), size in sent(program).items():
        if (k, p) == (kind, phase) and axis in axes.split(".") and size > 8:  # a loss and a count are no tensors
            found[dtype] += size
    return dict(found)


# ---------------------------------------------------------------------------------------------- where casts sit
def casts(graph: Graph) -> list[fx.Node]:
    return [n for n in graph.calls() if op_name(n.target) == "_to_copy"]


def test_one_cast_a_parameter_beside_its_use() -> None:
    program, _ = compiled("gpt2", "bf16", train=False)
    graph = program.reference
    order = {node: i for i, node in enumerate(graph.fx.nodes)}
    params = [n for p, n in zip(graph.inputs, graph.placeholders, strict=True) if p.role == "param"]
    for param in params:
        assert type_of(param).dtype == torch.float32
        (cast,) = param.users
        assert op_name(cast.target) == "_to_copy"
        assert type_of(cast).dtype == torch.bfloat16
        assert info(cast).name == f"{info(param).name.rpartition('.')[0]}._to_copy" + "_1" * (
            "bias" in info(param).name
        )
        # Nothing of another module lies between it and its first use.
        between = [n for n in graph.fx.nodes if order[cast] < order[n] < min(order[u] for u in cast.users)]
        assert {info(n).fqn for n in between} <= {info(cast).fqn}
    # The tied embedding is cast once, and read by the lookup, the logits and their backward.
    assert len(next(iter(params[0].users)).users) == 3
    for port, value in zip(graph.outputs, graph.output_values, strict=True):
        assert type_of(value).dtype == torch.float32, port.name
        if port.role == "grad":
            assert value.prev is operands(value)[0] or op_name(value.prev.target) in ("getitem", "_to_copy")


def test_what_is_kept_computes_in_the_master_dtype() -> None:
    plan = {"compute": "bf16", "keep": ["transformer.h.*.ln_1", "transformer.wpe"]}
    graph = compiled("gpt2", plan, train=False)[0].reference
    for node in graph.calls():
        if op_name(node.target) == "native_layer_norm":
            wide = info(node).fqn.endswith("ln_1")
            assert {type_of(v).dtype for v in operands(node)} == {torch.float32 if wide else torch.bfloat16}
        if op_name(node.target) == "mm":  # what leaves a kept module is cast back
            assert {type_of(v).dtype for v in operands(node)} == {torch.bfloat16}
    named = graph.input_nodes()
    assert not any(op_name(user.target) == "_to_copy" for user in named["transformer.wpe.weight"].users)
    with pytest.raises(ShardcError, match=r"SC202(.|\n)*'transformer.h.\*.lm_1'"):
        compiled("gpt2", {"compute": "bf16", "keep": "transformer.h.*.lm_1"})


def test_batch_norms_and_buffers_stay() -> None:
    program, _ = compiled("cnn", "bf16", train=False)
    for port, node in zip(program.reference.inputs, program.reference.placeholders, strict=True):
        cast = any(type_of(user).dtype == torch.bfloat16 for user in node.users if op_name(user.target) == "_to_copy")
        assert cast == (
            port.role in ("param", "input") and type_of(node).dtype.is_floating_point and "norm" not in port.name
        )
    assert program.verify()


class Scaled(nn.Module):
    """Frozen, and of half precision already."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 4).bfloat16().requires_grad_(False)
        self.trained = nn.Linear(4, 4).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.trained(self.frozen(x))


def square(output: Tensor, batch: Any) -> Tensor:
    assert output.dtype == torch.float32
    return (output - batch["x"]).square().mean()


def test_a_half_model_gets_a_master_and_frozen_parameters_do_not() -> None:
    model, batch = Scaled(), {"x": torch.randn(4, 4)}
    optimizer = torch.optim.AdamW(model.trained.parameters(), lr=1e-2)
    program = shardc.compile(model, batch, mesh="dp=2", plan={"precision": "bf16"}, loss=square, optimizer=optimizer)
    found = {p.name: type_of(n).dtype for p, n in zip(program.body.inputs, program.body.placeholders, strict=True)}
    assert found["trained.weight"] == found["trained.weight:exp_avg"] == torch.float32
    assert found["frozen.weight"] == torch.bfloat16
    trainer = program.launch()
    before = trainer.state["trained.weight"].clone()
    torch.testing.assert_close(before, model.trained.weight.detach().float(), rtol=0, atol=0)
    trainer.step(batch)
    # A step that bfloat16 could not hold.
    assert not torch.equal(trainer.state["trained.weight"], before)
    assert not torch.equal(trainer.state["trained.weight"].bfloat16().float(), trainer.state["trained.weight"])
    assert program.verify()
    # Without a master copy, gradients are still reduced in float32, and rounded for the update.
    plan = {"precision": {"compute": "bf16", "master": "bf16"}, "inputs": {"x": "dp"}}
    pure = shardc.compile(model, batch, mesh="dp=2", plan=plan, loss=square, optimizer=optimizer)
    assert set(along(pure, "dp", "all_reduce", "bwd")) == {torch.float32}
    assert {type_of(n).dtype for n in pure.body.placeholders if "trained" in info(n).name and type_of(n).ndim} == {
        torch.bfloat16
    }
    assert pure.verify()


# ---------------------------------------------------------------------------------------------- what is sent
@lru_cache
def looked_at(name: str, precision: str, zero: int) -> shardc.Program:
    """A program that is read, not run: several tests share it."""
    return compiled(name, {"none": None, "reduced": REDUCE_HALF}.get(precision, precision), zero=zero)[0]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("zero", [1, 0, 2, 3])
@pytest.mark.sampled(8)  # of llama under ZeRO 1, whose programs the next test reads too
def test_gradients_are_reduced_as_the_plan_says(name: str, zero: int) -> None:
    """In float32 not a byte in bfloat16; in bfloat16 half as many, and as many collectives."""
    kind = "reduce_scatter" if zero else "all_reduce"
    wide, narrow = (looked_at(name, precision, zero) for precision in ("bf16", "reduced"))
    assert set(along(wide, "dp", kind, "bwd")) == {torch.float32}
    assert set(along(narrow, "dp", kind, "bwd")) == {torch.bfloat16}
    assert along(narrow, "dp", kind, "bwd")[torch.bfloat16] <= along(wide, "dp", kind, "bwd")[torch.float32] / 2
    if name == "llama":  # of GPT-2's positions a float32 program reduces those that occur, before they are looked up
        assert along(wide, "dp", kind, "bwd") == along(looked_at(name, "none", zero), "dp", kind, "bwd")
    # Activations over tp are none of this: they are sent as computed.
    assert set(along(wide, "tp", "all_reduce", "bwd")) == {torch.bfloat16}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_what_is_gathered_is_the_cast(zero: int) -> None:
    """Half the bytes of a step in float32; under ZeRO 1 and 2 as often, and of no new parameter."""
    half, whole = looked_at("llama", "bf16", zero), looked_at("llama", "none", zero)
    forward = along(half, "dp", "all_gather", "fwd")
    assert set(forward) == {torch.bfloat16}
    assert not along(half, "dp", "all_gather", "opt")
    if zero == 3:
        assert forward[torch.bfloat16] == along(whole, "dp", "all_gather", "fwd")[torch.float32] / 2
        assert (
            along(half, "dp", "all_gather", "bwd")[torch.bfloat16]
            == along(whole, "dp", "all_gather", "bwd")[torch.float32] / 2
        )
    else:
        assert forward[torch.bfloat16] == along(whole, "dp", "all_gather", "opt")[torch.float32] / 2
        assert not along(half, "dp", "all_gather", "bwd")  # kept from forward
    assert not half.diagnostics  # nothing of it is an annotation that was not honoured
    # The master copy is a shard, as the rest of the optimizer's state.
    params = [type_of(n) for p, n in zip(half.body.inputs, half.body.placeholders, strict=True) if p.role == "param"]
    assert all("dp" in type.axes for type in params)


def test_recomputing_a_layer_casts_its_weights_again() -> None:
    """So that they are not kept for backward."""
    kept, again = (compiled("gpt2", "bf16", recompute=mode, train=False)[0] for mode in ("none", "full"))
    assert not [n for n in casts(kept.body) if info(n).is_recomputed]
    assert [n for n in casts(again.body) if info(n).is_recomputed and info(n).fqn == "transformer.h.0.mlp.c_fc"]
    assert again.verify()


# ---------------------------------------------------------------------------------------------- steps are eager's
@lru_cache
def eager_history(name: str) -> list[dict[str, Tensor]]:
    """The parameters after each of five steps of torch's own AdamW and clipping, in float64."""
    model, batch, *_ = SMALL[name]()
    optimizer = adamw(model.double())
    found: list[dict[str, Tensor]] = []
    for _ in range(5):
        optimizer.zero_grad()
        with InDouble():
            model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        found.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return found


LAYOUTS = [("dp=2, tp=2", False), ("dp=2, tp=2", True), ("dp=3, tp=1", False)]
KINDS = {"bf16": "bf16", "fp16": "fp16", "reduced": REDUCE_HALF, "kept": KEPT}
CASES = list(product(["gpt2", "llama"], LAYOUTS, range(4)))


@pytest.mark.parametrize(
    ("name", "layout", "zero", "kind"),
    [(*case, kind) for i, case in enumerate(CASES) for kind in (list(KINDS)[(i + i // 4) % 4],)],
)
@pytest.mark.sampled(24)
def test_five_steps_equal_eager(name: str, layout: tuple[str, bool], zero: int, kind: str) -> None:
    """All ranks, in float64, on from their own state; dp=3 divides neither the batch nor most parameters."""
    mesh, sp = layout
    program, _ = compiled(name, KINDS[kind], mesh, zero, sp, clip_grad_norm=0.5)
    inputs = program.inputs()
    for want in eager_history(name):
        outputs = simulate(program.body, inputs, dtype=torch.float64)
        new = {port.name: value for port, value in outputs.items() if port.role in ("param", "state")}
        inputs |= new
        for param, value in want.items():
            assert relative_error(new[param], value, floor=1e-3) < 1e-10, param


storages = st.sampled_from([(0, "dp=2, tp=2"), (1, "dp=4, tp=1"), (2, "dp=2, tp=2"), (3, "dp=3, tp=2")])
dtypes = st.sampled_from([None, "bf16", "fp16", REDUCE_HALF, {"compute": "bf16", "master": "bf16"}])


@pytest.mark.slow
@settings(max_examples=max(8, settings().max_examples // 100))  # whole steps of other models are drawn in properties/
@given(
    st.sampled_from(["mlp", "gpt2", "cnn"]), storages, dtypes, st.sampled_from([1, 2]), st.sampled_from([None, 0.5]),
    st.sampled_from(["none", "full"]), st.sampled_from([None, "skip"]), st.booleans(),
)  # fmt: skip
@pytest.mark.long
def test_combinations_verify(
    name: str, storage: tuple[int, str], precision: object, accumulate: int, clip: float | None, recompute: str,
    nonfinite: Any, train: bool,
) -> None:  # fmt: skip
    zero, mesh = storage
    more: dict[str, Any] = {
        "accumulate": accumulate,
        "clip_grad_norm": clip,
        "recompute": recompute,
        "nonfinite": nonfinite,
    }
    program, _ = compiled(name, precision, mesh, zero, train=train, **more)
    report = program.verify()
    assert report, str(report)


# ---------------------------------------------------------------------------------------------- in their own dtypes
def test_the_reference_rounds_as_torch_does() -> None:
    """Loss and gradients of a model that was cast by hand, to the bit."""
    program, batch = compiled("gpt2", "bf16", train=False)
    assert program.model is not None
    by_hand = gpt2(batch=4, seq=8, layers=1, vocab=32, heads=2, width=16)[0].bfloat16()
    loss = by_hand(**batch).loss
    loss.backward()
    found = run_reference(program.reference, program.inputs())
    assert abs(float(next(v for p, v in found.items() if p.role == "loss")) - float(loss)) < 2e-3
    wanted = dict(by_hand.named_parameters())
    for port, value in found.items():
        if port.role == "grad":
            grad = wanted[port.name].grad
            assert grad is not None
            assert relative_error(value, grad.float(), floor=2e-2) < 0.05, port.name


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.sampled(6)
def test_in_its_own_dtypes_every_rank_is_near_the_single_device(precision: str, zero: int) -> None:
    program, _ = compiled("gpt2", precision, zero=zero, train=False)
    inputs = program.inputs()
    wanted, found = run_reference(program.reference, inputs), simulate(program.body, inputs)
    for port, want in wanted.items():
        if port.role in ("loss", "grad"):
            bound = 0.05 if precision == "bf16" else 0.01
            assert relative_error(found[port], want, floor=2e-2) < bound, port.name


@pytest.mark.slow
@pytest.mark.long
def test_200_steps_in_bfloat16_follow_float32() -> None:
    """GPT-2 on real text, with a float32 master, sharded: every loss within 1 % of eager PyTorch's in float32."""
    arguments = ["--width", "32", "--heads", "2", "--layers", "1", "--batch", "8", "--seq", "32", "--steps", "200"]
    options = train_gpt2.options(arguments)
    batches = list(train_gpt2.batches(options))

    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = train_gpt2.gpt2(options)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    wide: list[float] = []
    model, optimizer = fresh()
    for batch in batches:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        wide.append(loss.item())
    model, optimizer = fresh()
    plan = Plan.load(options.plan).merge(
        Plan.of(mesh="dp=2, tp=1", precision="bf16", storage={"zero": 1, "axes": ["dp"]}, clip_grad_norm=1.0)
    )
    trainer = shardc.compile(model, batches[0], plan=plan, optimizer=optimizer).launch()
    half = [float(trainer.step(batch).loss) for batch in batches]
    assert wide[-1] < 0.6 * wide[0]
    assert half != wide
    assert max(abs(a - b) / a for a, b in zip(wide, half, strict=True)) < 0.01


@pytest.mark.parametrize(
    ("said", "dumped"),
    [
        ("bf16", "precision: bf16\n"),
        (torch.float16, "precision: fp16\n"),
        ({"compute": "bfloat16", "reduce": "bf16"}, "precision:\n  compute: bf16\n  reduce: bf16\n"),
        ({"compute": "bf16", "keep": "**.norm"}, "precision:\n  compute: bf16\n  keep:\n  - '**.norm'\n"),
        ({"compute": "fp16", "growth_interval": 5}, "precision:\n  compute: fp16\n  growth_interval: 5\n"),
    ],
)
def test_plans_round_trip(said: object, dumped: str) -> None:
    plan = Plan.of(precision=said)
    assert plan.dump() == dumped
    assert Plan.parse(dumped).precision == plan.precision
    assert Plan.of(nonfinite="skip").merge(plan) == plan.merge(Plan.of(nonfinite="skip"))
