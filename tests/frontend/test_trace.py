"""Traced graphs compute what eager autograd computes, keep composites whole and know where they come from.

Longer than 400 lines: all that one trace has to keep of a step.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from kernels_triton.base.random import RANDOM_UNIFORM
from shardc.frontend.trace import Traced, trace
from shardc.ir.diagnostic import ShardcError
from shardc.ir.ops.attention import SDPA, SDPA_BWD
from shardc.ir.ops.linear import LINEAR, LINEAR_DGRAD, LINEAR_WGRAD

aten = torch.ops.aten
Case = tuple[nn.Module, Any]
VOCAB = 64


# ------------------------------------------------------------------ models
def ids(b: int = 2, s: int = 12) -> Tensor:
    return torch.randint(3, VOCAB, (b, s))


def decoder(cls: str, config: str, **options: Any) -> Case:
    T = pytest.importorskip("transformers")
    model = getattr(T, cls)(getattr(T, config)(vocab_size=VOCAB, bos_token_id=0, eos_token_id=1, **options))
    x = ids()
    return model, {"input_ids": x, "labels": x}


DIMS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def gpt2(p: float = 0.0) -> Case:
    return decoder(
        "GPT2LMHeadModel", "GPT2Config", n_layer=2, n_embd=32, n_head=4, n_positions=32,
        resid_pdrop=p, embd_pdrop=p, attn_pdrop=p,
    )  # fmt: skip


def llama() -> Case:
    return decoder("LlamaForCausalLM", "LlamaConfig", **DIMS, intermediate_size=64, num_key_value_heads=2)


def mixtral() -> Case:
    return decoder(
        "MixtralForCausalLM", "MixtralConfig", **DIMS, intermediate_size=64, num_key_value_heads=2,
        num_local_experts=4, num_experts_per_tok=2, experts_implementation="grouped_mm",
    )  # fmt: skip


def bert() -> Case:
    model, batch = decoder("BertForMaskedLM", "BertConfig", **DIMS, **QUIET, intermediate_size=64, pad_token_id=2)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 9:] = 0
    return model, batch | {"attention_mask": mask}


def t5() -> Case:
    return decoder(
        "T5ForConditionalGeneration", "T5Config", d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
        decoder_start_token_id=0, pad_token_id=0, dropout_rate=0.0,
    )  # fmt: skip


def vit() -> Case:
    T = pytest.importorskip("transformers")
    config = T.ViTConfig(**DIMS, **QUIET, intermediate_size=64, image_size=16, patch_size=8, num_labels=10)
    return T.ViTForImageClassification(config), {
        "pixel_values": torch.randn(2, 3, 16, 16),
        "labels": torch.tensor([1, 2]),
    }


def resnet() -> Case:
    T = pytest.importorskip("transformers")
    config = T.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], num_labels=10)
    return T.ResNetForImageClassification(config), {
        "pixel_values": torch.randn(4, 3, 32, 32),
        "labels": torch.tensor([1, 2, 3, 0]),
    }


def whisper() -> Case:
    T = pytest.importorskip("transformers")
    config = T.WhisperConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=VOCAB, num_mel_bins=8, max_source_positions=16,
        max_target_positions=16, pad_token_id=0, bos_token_id=0, eos_token_id=1, decoder_start_token_id=1,
        dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
    )  # fmt: skip
    return T.WhisperForConditionalGeneration(config), {"input_features": torch.randn(2, 8, 32), "labels": ids()}


class Squared(nn.Module):
    """Any module, with the mean of its squared output as loss."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).pow(2).mean()


def encoder() -> Case:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
    return Squared(nn.TransformerEncoder(layer, 2)), torch.randn(2, 12, 32)


def mlp() -> Case:
    return Squared(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4, bias=False))), torch.randn(5, 8)


def cnn() -> Case:
    body = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(8 * 16, 4),
    )  # fmt: skip
    return Squared(body), (torch.randn(4, 3, 8, 8),)


def norms() -> Case:
    body = nn.Sequential(nn.GroupNorm(2, 6), nn.Conv1d(6, 6, 3), nn.LayerNorm(8), nn.SiLU())
    return Squared(body), torch.randn(3, 6, 10)


MODELS: list[Callable[[], Case]] = [
    gpt2, llama, mixtral, bert, t5, vit, resnet, whisper, encoder, mlp, cnn, norms,
]  # fmt: skip


# ------------------------------------------------------------------ running a traced graph
def execute(traced: Traced, model: nn.Module, batch: Any, seed: int = 0) -> dict[tuple[str, str], Any]:
    """Outputs by (role, name)."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers()), **traced.constants}
    given = batch if isinstance(batch, dict) else {"x": batch[0] if isinstance(batch, tuple) else batch}
    values = []
    for port in traced.inputs:
        if port.role == "seed":
            values.append(torch.tensor(seed))
        else:
            values.append((given if port.role == "input" else state)[port.name].detach())
    with torch.no_grad():
        results = fx.Interpreter(fx.GraphModule({}, traced.graph)).run(*values)
    return {(o.role, o.name): r for o, r in zip(traced.outputs, results, strict=True)}


def eager(model: nn.Module, batch: Any) -> dict[tuple[str, str], Any]:
    model = copy.deepcopy(model)
    before = {name: b.clone() for name, b in model.named_buffers()}
    output = model(**batch) if isinstance(batch, dict) else model(*batch) if isinstance(batch, tuple) else model(batch)
    loss = output if isinstance(output, Tensor) else output.loss
    loss.backward()
    results: dict[tuple[str, str], Any] = {("loss", "loss"): loss.detach()}
    results |= {("grad", n): p.grad for n, p in model.named_parameters() if p.grad is not None}
    return results | {("buffer", n): b for n, b in model.named_buffers() if not torch.equal(b, before[n])}


def doubled(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {k: doubled(v) for k, v in batch.items()}
    if isinstance(batch, tuple):
        return tuple(map(doubled, batch))
    return batch.double() if batch.is_floating_point() else batch


def counts(traced: Traced) -> Counter[Any]:
    return Counter(n.target for n in traced.graph.nodes if n.op == "call_function")


@pytest.mark.sampled(12)
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_traced_step_equals_eager_autograd(make: Callable[[], Case]) -> None:
    torch.manual_seed(0)
    model, batch = make()
    model.train()
    if make is not mixtral:  # torch's grouped product knows no float64
        model, batch = model.double(), doubled(batch)
    tolerance = {"rtol": 1e-4, "atol": 3e-6} if make is mixtral else {"rtol": 1e-5, "atol": 2e-7}
    traced = trace(model, batch)
    got, expected = execute(traced, model, batch), eager(model, batch)
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        # Hugging Face computes norms and softmax in float32 even in a float64 model.
        torch.testing.assert_close(got[key], value, **tolerance, msg=lambda m, key=key: f"{key}: {m}")
    assert not any(port.role == "seed" for port in traced.inputs)
    check_wellformed(traced)


def check_wellformed(traced: Traced) -> None:
    placeholders = [n for n in traced.graph.nodes if n.op == "placeholder"]
    assert [port.node for port in traced.inputs] == placeholders
    (output,) = (n for n in traced.graph.nodes if n.op == "output")
    assert output.args[0] == tuple(o.node for o in traced.outputs)
    names = {n.name for n in traced.graph.nodes}
    for node in traced.graph.nodes:
        assert node.meta.keys() == {"val", "fqn", "source", "source_text", "phase", "fwd_node"}
        assert node.meta["fwd_node"] is None or node.meta["fwd_node"] in names
        assert node.op != "get_attr"
        if node.op == "call_function":
            assert node.meta["val"] is not None, node
            schema = getattr(node.target, "_schema", None)
            assert schema is None or not schema.is_mutable, node
            assert node.meta["phase"] == "bwd" or node.meta["source"], node
    assert all(node in set(traced.graph.nodes) for node in traced.modules.values())


# ------------------------------------------------------------------ what is kept whole
def test_composites_stay_whole() -> None:
    ops = counts(trace(*llama()))
    assert (ops[SDPA], ops[SDPA_BWD]) == (2, 2)
    assert ops[LINEAR] == ops[LINEAR_DGRAD] == ops[LINEAR_WGRAD] == 15
    assert not any("softmax" in str(op) and "log" not in str(op) for op in ops)
    assert ops[aten.mm.default] == ops[aten.bmm.default] == 0


def test_products_of_halves_stay_halves() -> None:
    """torch's own decomposition of addmm widens its operands, and the product with them."""
    model, batch = decoder("GPT2LMHeadModel", "GPT2Config", n_layer=1, n_head=2, n_embd=16, n_positions=16)
    traced = trace(model.bfloat16(), batch)
    products = [n for n in traced.graph.nodes if n.target in (aten.mm.default, aten.addmm.default, LINEAR)]
    assert len(products) >= 12  # four and a head forward, twice that backward
    assert {n.meta["val"].dtype for n in products} == {torch.bfloat16}


def test_causal_attention_needs_no_mask_tensor() -> None:
    for node in trace(*llama()).graph.nodes:
        if node.target is SDPA:
            assert node.args[3] is None
            assert node.args[4] is True


def test_overrides_do_not_outlive_the_trace() -> None:
    trace(*mlp())
    x, w = torch.randn(2, 3), torch.randn(4, 3)
    with torch.profiler.profile() as profile:
        F.linear(x, w)
    assert not any("shardc" in event.key for event in profile.key_averages())


# ------------------------------------------------------------------ names, sources, sharing
def test_inputs_are_named_by_forwards_parameters() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x: tuple[Tensor, dict[str, Tensor]], flag: bool, **more: Tensor) -> Tensor:
            return (self.w * x[0] * x[1]["key"] * more["extra"]).sum() if flag else self.w.sum()

    batch = {"x": (torch.ones(3), {"key": torch.ones(3)}), "flag": True, "extra": torch.ones(3)}
    assert [i.name for i in trace(Nested(), batch).inputs if i.role == "input"] == ["x.0", "x.1.key", "extra"]


def test_nodes_know_module_source_and_forward_op() -> None:
    traced = trace(*gpt2())
    for node in traced.graph.nodes:
        if node.target is SDPA:
            assert node.meta["fqn"] in ("transformer.h.0.attn", "transformer.h.1.attn")
            assert node.meta["phase"] == "fwd"
            assert "sdpa_attention.py:" in node.meta["source"]
            assert "scaled_dot_product_attention" in node.meta["source_text"]
        if node.target is SDPA_BWD:
            assert node.meta["phase"] == "bwd"
            forward = next(n for n in traced.graph.nodes if n.name == node.meta["fwd_node"])
            assert forward.target is SDPA
            assert forward.meta["fqn"] == node.meta["fqn"]
    assert traced.modules["transformer.h.0"].meta["fqn"] == "transformer.h.0"
    assert traced.modules["lm_head"].target is LINEAR


def test_tied_weights_are_one_input_and_one_gradient() -> None:
    traced = trace(*gpt2())
    (wte,) = (i for i in traced.inputs if "lm_head.weight" in (i.name, *i.aliases))
    assert (wte.name, wte.aliases) == ("transformer.wte.weight", ("lm_head.weight",))
    assert [o.name for o in traced.outputs if "lm_head" in o.name] == []


def test_unused_and_frozen_parameters() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model["a"].bias.requires_grad_(False)

    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m = model

        def forward(self, x: Tensor) -> Tensor:
            return self.m["a"](x).sum()

    traced = trace(Uses(), torch.randn(2, 4))
    assert traced.unused == ("m.b.weight", "m.b.bias")
    assert [o.name for o in traced.outputs] == ["loss", "m.a.weight"]
    assert {i.name: i.trainable for i in traced.inputs}["m.a.bias"] is False


def test_module_output_before_an_in_place_change() -> None:
    traced = trace(*cnn())
    assert traced.modules["body.1"].target is not aten.relu.default
    assert traced.modules["body.2"].target is aten.relu.default


def test_reassigned_buffer_and_constant() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))
            self.register_buffer("steps", torch.zeros(()))
            self.register_buffer("idle", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.steps = self.steps + 1
            return (self.w * x * torch.tensor([2.0, 3.0])).sum() + self.idle

    model, x = Counts(), torch.ones(2)
    traced = trace(model, x)
    got = execute(traced, model, x)
    assert [key for key in got if key[0] == "buffer"] == [("buffer", "steps")]
    assert got["buffer", "steps"] == 1
    assert model.steps == 0
    assert got["grad", "w"].tolist() == [2.0, 3.0]
    assert list(traced.constants) == ["_constant.0"]
    check_wellformed(traced)


def test_loss_function_and_outputs() -> None:
    model = nn.Linear(4, 3)
    batch = (torch.randn(5, 4),)
    traced = trace(model, batch, loss=lambda y, batch: F.mse_loss(y, batch[0][:, :3]), with_outputs=True)
    got = execute(traced, model, {"input": batch[0]})
    torch.testing.assert_close(got["loss", "loss"], F.mse_loss(model(batch[0]), batch[0][:, :3]).detach())
    torch.testing.assert_close(got["output", "output"], model(batch[0]).detach())


def test_meta_device_model_traces_like_a_real_one() -> None:
    model, batch = llama()
    with torch.device("meta"):
        ghost, _ = llama()
    batch = {k: v.to("meta") for k, v in batch.items()}
    traced = trace(ghost, batch)
    assert counts(traced) == counts(trace(model, batch))
    assert all(n.meta["val"].device.type == "cpu" for n in traced.graph.nodes if n.op == "placeholder")


def test_activation_checkpointing_recomputes_the_same_masks() -> None:
    class Checkpointed(nn.Module):
        def __init__(self, on: bool) -> None:
            super().__init__()
            self.on, self.a, self.b = on, nn.Linear(8, 8), nn.Linear(8, 8)

        def block(self, x: Tensor) -> Tensor:
            return F.dropout(self.b(F.dropout(self.a(x).relu(), 0.5)), 0.5)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False) if self.on else self.block(x)
            return F.dropout(y, 0.5).pow(2).sum()

    on, off, x = Checkpointed(True), Checkpointed(False), torch.randn(4, 8)
    off.load_state_dict(on.state_dict())
    first, second = (execute(trace(m, x), m, x, seed=3) for m in (on, off))
    for key, value in second.items():
        torch.testing.assert_close(first[key], value)


# ------------------------------------------------------------------ errors
class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.inner.forward = self.branch  # type: ignore[method-assign]

    def branch(self, x: Tensor) -> Tensor:
        w = self.inner.weight
        if x.sum() > 0:
            return x @ w
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).sum()


def test_data_dependent_branch_is_a_diagnostic() -> None:
    with pytest.raises(ShardcError) as caught:
        trace(Branches(), torch.randn(2, 4))
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "SC101"
    assert diagnostic.location is not None
    assert "test_trace.py:" in diagnostic.location
    assert diagnostic.source_text == "if x.sum() > 0:"
    assert diagnostic.fqn == "inner"
    trace(*mlp())  # the failure leaves nothing behind


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_layers_dropped_at_random(rate: float) -> None:
    """As transformers 5.17 has it in Whisper: drawn in training, whatever the rate."""

    class LayerDrop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                dropout_probability = torch.rand([])
                if not dropout_probability < rate:
                    x = layer(x)
            return x.sum()

    traced = trace(LayerDrop(), torch.randn(2, 4))
    assert counts(traced)[LINEAR] == 2
    roles = {i.role for i in traced.inputs}
    assert roles == {"param", "input", *(["seed"] if rate else [])}, "at a rate of 0 nothing random is left"


def test_other_user_errors_have_codes() -> None:
    for code, model, batch in (
        ("SC102", nn.Linear(4, 4), torch.randn(2, 4)),
        ("SC103", nn.Linear(4, 4), {"y": torch.randn(2, 4)}),
        ("SC104", nn.Linear(4, 4), torch.randn(2, 5)),
        ("SC102", nn.ReLU(), torch.randn(2, 5)),
    ):
        with pytest.raises(ShardcError) as caught:
            trace(model, batch)
        assert caught.value.code == code


def test_random_op_without_a_counter_based_form_is_refused() -> None:
    class Shuffles(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).cauchy_().sum()

    with pytest.raises(ShardcError, match="cauchy") as caught:
        trace(Shuffles(4, 4), torch.randn(4, 4))
    assert "test_trace.py:" in str(caught.value)


# ------------------------------------------------------------------ random numbers
class Dropped(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.scale, self.p = nn.Parameter(torch.ones(64, 1000)), p

    def forward(self, x: Tensor) -> Tensor:
        return (F.dropout(self.scale, self.p, self.training) * x).sum()


def test_dropout_mask_follows_the_seed_and_the_gradient_the_mask() -> None:
    model, x = Dropped(0.3), torch.ones(64, 1000)
    traced = trace(model, x)
    assert [i.role for i in traced.inputs] == ["param", "input", "seed"]
    assert [n.name for n in traced.graph.nodes if n.target is RANDOM_UNIFORM]
    first, again, other = (execute(traced, model, x, seed) for seed in (1, 1, 2))
    grad = first["grad", "scale"]
    assert torch.equal(grad, again["grad", "scale"])
    assert not torch.equal(grad, other["grad", "scale"])
    assert abs(float((grad == 0).float().mean()) - 0.3) < 0.01
    torch.testing.assert_close(grad[grad != 0], torch.full_like(grad[grad != 0], 1 / 0.7))
    torch.testing.assert_close(first["loss", "loss"], grad.sum())  # the loss is linear in scale


def test_no_trace_of_dropout_that_does_nothing() -> None:
    for model in (Dropped(0.0).train(), Dropped(0.3).eval()):
        assert set(counts(trace(model, torch.ones(64, 1000)))) <= {
            aten.mul.Tensor, aten.sum.default, aten.full_like.default, aten.full.default, aten.expand.default,
        }  # fmt: skip


def test_attention_dropout_is_spelled_out() -> None:
    model, batch = gpt2(p=0.1)
    traced = trace(model, batch)
    ops = counts(traced)
    assert ops[SDPA] == 0
    assert ops[RANDOM_UNIFORM] == 7
    op_ids = [n.args[1] for n in traced.graph.nodes if n.target is RANDOM_UNIFORM]
    assert op_ids == list(range(7))
    assert execute(traced, model, batch)["loss", "loss"].isfinite()


def test_every_source_of_randomness_is_counter_based() -> None:
    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(400, 50))
            self.channels = nn.Dropout2d(0.5)

        def forward(self, x: Tensor) -> Any:
            path = (0.9 + torch.rand(400, 1)).floor_()
            noise = torch.randn_like(x) + torch.empty_like(x).normal_()
            coins = torch.bernoulli(torch.full_like(x, 0.25)) + torch.empty_like(x).bernoulli_(0.25)
            waits = torch.empty_like(x).exponential_(2.0)
            w = self.channels(self.w[None, :, :, None])[0, :, :, 0]
            return {"loss": (w * x).sum(), "path": path, "noise": noise, "coins": coins, "waits": waits}

    model, x = Draws(), torch.ones(400, 50)
    traced = trace(model, x, with_outputs=True)
    got = execute(traced, model, x)
    for name, mean, variance in (("noise", 0, 2), ("coins", 0.5, 0.375), ("waits", 0.5, 0.25), ("path", 0.9, 0.09)):
        value = got["output", name].float()
        assert abs(value.mean() - mean) < 0.05, name
        assert abs(value.var() - variance) < 0.1, name
    assert not any(torch.Tag.nondeterministic_seeded in getattr(op, "tags", ()) for op in counts(traced))
    check_wellformed(traced)
