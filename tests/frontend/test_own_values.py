"""What a model's own code gives its tensors: buffers that no file holds, and the parameters of a fresh model."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import shardc
from shardc.frontend.made_anew import Anew
from shardc.frontend.own_values import computed_buffers, own_init

ROPES = [
    {"rope_type": "default", "rope_theta": 1e4},
    {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
        "rope_theta": 1e4,
    },
]


class Table(nn.Module):
    """A buffer that no file holds; `code` is what the class has to compute it."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.size = config.size
        self.fc = nn.Linear(4, 4)
        self.register_buffer("table", self.values(), persistent=False)

    def values(self) -> Tensor:
        return torch.arange(self.size).float().sin()


class Resets(Table):
    def reset_parameters(self) -> None:
        self.table.copy_(self.values())


class Assigns(Table):
    def init_weights(self, buffer_device: str | None = None) -> None:  # as torchtitan has it
        with torch.device(buffer_device or "cpu"):
            self.table = self.values()
        nn.init.ones_(self.fc.weight)


class Rebuilt(Table):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.config = config


class HalfSet(Table):
    def reset_parameters(self) -> None:
        self.table[: self.size // 2] = 1.0


class Random(Table):
    def reset_parameters(self) -> None:
        self.table.normal_()


class RandomRebuilt(Rebuilt):
    def values(self) -> Tensor:
        return torch.randn(self.size)


class EmptyRebuilt(Rebuilt):
    def values(self) -> Tensor:
        return torch.empty(self.size)


class Raises(Table):
    def reset_parameters(self) -> None:
        raise ValueError("no values today")


class OtherArguments(Table):
    """The class is not made of its config alone: nobody knows what else it was given."""

    def __init__(self, config: Any, scale: float = 1.0) -> None:
        super().__init__(config)
        self.config = config
        self.table.mul_(scale)


class Outer(nn.Module):
    def __init__(self, inner: type[Table], size: int = 5) -> None:
        super().__init__()
        self.inner = inner(SimpleNamespace(size=size))

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner.fc(x).sum() * self.inner.table).sum()


class Applies(Outer):
    """As nanoGPT initialises: the root does, module by module."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Table):
            module.table.copy_(module.values())


def on_meta(make: Any, *args: Any) -> nn.Module:
    with torch.device("meta"):
        return make(*args)


@pytest.mark.parametrize("inner", [Resets, Assigns, Rebuilt])
def test_computed_by_the_modules_code(inner: type[Table]) -> None:
    model = on_meta(Outer, inner)
    before = {name: id(t) for name, t in (*model.named_parameters(), *model.named_buffers())}
    attributes = {name: dict(vars(m)) for name, m in model.named_modules()}
    state = torch.random.get_rng_state()
    computed = computed_buffers(model)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not computed.reasons
    assert torch.equal(computed.values["inner.table"], Outer(inner).inner.table)
    assert {name: id(t) for name, t in (*model.named_parameters(), *model.named_buffers())} == before
    assert {name: dict(vars(m)) for name, m in model.named_modules()} == attributes


def test_computed_by_the_root() -> None:
    computed = computed_buffers(on_meta(Applies, Table))
    assert torch.equal(computed.values["inner.table"], Outer(Table).inner.table)


@pytest.mark.parametrize(
    ("inner", "reason"),
    [
        (Table, "Table has no code that computes it"),
        (OtherArguments, "OtherArguments has no code"),
        (HalfSet, "leaves elements unset, or draws"),
        (Random, "leaves elements unset, or draws"),
        (RandomRebuilt, "leaves elements unset, or draws"),
        (EmptyRebuilt, "leaves elements unset, or draws"),
        (Raises, "ValueError in its own code: no values today"),
    ],
)
def test_all_else_has_a_reason(inner: type[Table], reason: str) -> None:
    computed = computed_buffers(on_meta(Outer, inner))
    assert not computed.values
    assert reason in computed.reasons["inner.table"]


def test_real_parameters_are_not_touched() -> None:
    model = Outer(Assigns)
    model.inner.table = model.inner.table.to("meta")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert torch.equal(computed_buffers(model).values["inner.table"], Outer(Assigns).inner.table)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert model.inner.table.is_meta


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
def test_rotary_frequencies(rope: dict[str, Any]) -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=1, vocab_size=16, intermediate_size=8)
    config.rope_parameters = rope
    computed, full = computed_buffers(on_meta(LlamaForCausalLM, config)), LlamaForCausalLM(config)
    assert computed.values.keys() == dict(full.named_buffers()).keys() != set()
    assert all(torch.equal(value, full.get_buffer(name)) for name, value in computed.values.items())


def test_parameters_without_memory_are_not_initialised() -> None:
    """By torch's or a library's own functions: it takes time, and changes nothing."""

    class Initialises(Rebuilt):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            nn.init.normal_(self.fc.weight)
            nn.init.kaiming_uniform_(tensor=self.fc.weight)
            with torch.no_grad():
                self.fc.bias.fill_(1.0).uniform_()
            nn.init.constant_(self.table, 3.0)

    written: list[tuple[str, torch.device]] = []  # of what is initialised, where it lies

    class Writes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if str(func).split(".")[1] in ("normal_", "uniform_", "fill_"):
                written.append((str(func), args[0].device))
            return func(*args, **(kwargs or {}))

    with torch.device("meta"):
        model = Initialises(SimpleNamespace(size=3))
    with Writes():
        built = Anew(3).module(model, 0)
    assert torch.equal(built.get_buffer("table"), torch.full((3,), 3.0))
    assert built.get_parameter("fc.weight").is_meta
    assert {device.type for _, device in written} == {"cpu"}


def test_positions() -> None:
    config = BertConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=1, vocab_size=16, intermediate_size=8)
    computed, full = computed_buffers(on_meta(BertModel, config)), BertModel(config)
    assert "embeddings.position_ids" in computed.values
    assert all(torch.equal(value, full.get_buffer(name)) for name, value in computed.values.items())


def test_the_buffers_dtype_is_the_models() -> None:
    model = on_meta(Outer, Resets).to(torch.bfloat16)
    assert torch.equal(computed_buffers(model).values["inner.table"], Outer(Resets).to(torch.bfloat16).inner.table)


def test_a_dtype_that_rounds_otherwise_is_refused() -> None:
    class Fractions(Rebuilt):
        def values(self) -> Tensor:
            return torch.arange(0, 1, 1 / self.size) * torch.pi

    model = on_meta(Outer, Fractions).to(torch.bfloat16)
    assert "it is another in torch.bfloat16 than cast" in computed_buffers(model).reasons["inner.table"]


# ---------------------------------------------------------------------- written after the module made it
class Resetting(Table):
    """Its constructor calls its initialiser, as torch's own modules do."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("table", torch.empty(self.size), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.table.copy_(self.values() + 2)


def halve(inner: Any) -> None:
    inner.table = inner.table / 2


class WritesInPlace(Outer):
    def __init__(self, inner: type[Table]) -> None:
        super().__init__(inner)
        for buffer in self.buffers():
            buffer.mul_(0.5)


class Divides(Outer):
    def __init__(self, inner: type[Table]) -> None:
        super().__init__(inner)
        self.inner.table /= 2


class Replaces(Outer):
    def __init__(self, inner: type[Table]) -> None:
        super().__init__(inner)
        self.inner.table = self.inner.table * 0.5


class CallsAFunction(Outer):
    def __init__(self, inner: type[Table]) -> None:
        super().__init__(inner)
        halve(self.inner)


class OfConfig(nn.Module):
    """The same by a root that its config makes."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.body = config.outer(config.inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


WRITERS = [WritesInPlace, Divides, Replaces, CallsAFunction]


@pytest.mark.parametrize("outer", WRITERS)
@pytest.mark.parametrize("inner", [Resets, Assigns, Rebuilt, Resetting])
def test_an_owners_write_is_computed_or_refused(inner: type[Table], outer: type[Outer]) -> None:
    alone = computed_buffers(on_meta(outer, inner))
    assert alone.reasons == {"inner.table": "written after its module made it"}
    assert not alone.values
    config = SimpleNamespace(outer=outer, inner=inner)
    computed = computed_buffers(on_meta(OfConfig, config))
    assert not computed.reasons
    assert torch.equal(computed.values["body.inner.table"], OfConfig(config).body.inner.table)


def test_no_owners_write() -> None:
    config = SimpleNamespace(outer=Outer, inner=Resetting)
    expected = Resetting(SimpleNamespace(size=5)).table
    assert torch.equal(computed_buffers(on_meta(Outer, Resetting)).values["inner.table"], expected)
    assert torch.equal(computed_buffers(on_meta(OfConfig, config)).values["body.inner.table"], expected)


@pytest.mark.parametrize("inner", [Resets, Rebuilt, Resetting])
@pytest.mark.parametrize("make", [lambda inner: Outer(inner), lambda inner: made_of_config(Outer, inner)])
def test_a_write_to_the_finished_model_is_refused(make: Any, inner: type[Table]) -> None:
    model = on_meta(make, inner)
    next(iter(model.buffers())).mul_(0.5)
    assert set(computed_buffers(model).reasons.values()) == {"written after its module made it"}


def test_a_replaced_module_is_refused() -> None:
    model = on_meta(OfConfig, SimpleNamespace(outer=Outer, inner=Rebuilt))
    with torch.device("meta"):
        model.body.inner = Rebuilt(SimpleNamespace(size=5, other=1))
    assert "OfConfig does not make it" in computed_buffers(model).reasons["body.inner.table"]


def made_of_config(outer: type[Outer], inner: type[Table]) -> nn.Module:
    return OfConfig(SimpleNamespace(outer=outer, inner=inner))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("outer", WRITERS)
@pytest.mark.parametrize("inner", [Rebuilt, Resetting])
def test_launched_as_eager_or_refused(inner: type[Table], outer: type[Outer]) -> None:
    x = torch.ones(2, 4)
    for make, refused in ((lambda: outer(inner), True), (lambda: made_of_config(outer, inner), False)):
        torch.manual_seed(0)
        full = make()
        program = shardc.compile(on_meta(make), x, mesh="dp=2", plan={"inputs": {"x": "dp"}})
        if refused:
            with pytest.raises(shardc.ShardcError, match="written after its module made it") as caught:
                program.launch(state=full.state_dict())
            assert caught.value.code == "SC561"
        else:
            loss = float(program.launch(state=full.state_dict()).step(x).loss)
            assert loss == pytest.approx(float(full(x).detach()), rel=1e-5)


# ---------------------------------------------------------------------- parameters
def test_parameters_of_a_fresh_model() -> None:
    config = GPT2Config(n_layer=8, n_embd=64, n_head=2, vocab_size=512, n_positions=64)
    torch.manual_seed(0)
    full, model = GPT2LMHeadModel(config), on_meta(GPT2LMHeadModel, config)
    init, again, other = (own_init(model, seed) for seed in (3, 3, 4))
    for name, p in reversed(list(full.named_parameters())):  # in any order
        value = init(name, tuple(p.shape), p.dtype)
        assert (value.shape, value.dtype) == (p.shape, p.dtype)
        assert float(value.std(correction=0)) == pytest.approx(float(p.detach().std(correction=0)), rel=0.1)
    names = [name for name, p in full.named_parameters() if p.ndim > 1]
    values = {name: again(name, (), torch.float32) for name in names}
    assert all(torch.equal(init(name, (), torch.float32), value) for name, value in values.items())
    assert not any(torch.equal(other(name, (), torch.float32), value) for name, value in values.items())
    # The blocks initialise these again, with a smaller deviation.
    residual = values["transformer.h.0.mlp.c_proj.weight"]
    assert float(residual.std()) == pytest.approx(0.02 / 4, rel=0.1)
    assert not torch.equal(residual, values["transformer.h.1.mlp.c_proj.weight"])


def test_what_the_code_leaves_out_is_said() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3))

    with pytest.raises(LookupError, match="the code of Bare leaves 'weight' uninitialised"):
        own_init(on_meta(Bare), 0)("weight", (3,), torch.float32)


# ---------------------------------------------------------------------- meta_parameters
def test_parameters_on_meta_and_buffers_computed() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
            self.head.weight = self.embed.weight
            self.norm = nn.BatchNorm1d(4)
            self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
            self.table = nn.Buffer(torch.arange(4.0), persistent=False)

    with shardc.meta_parameters():
        model = Tied()
    assert all(p.is_meta for p in model.parameters())
    assert model.head.weight is model.embed.weight
    assert not model.frozen.requires_grad
    assert model.embed.weight.requires_grad
    assert torch.equal(model.table, torch.arange(4.0))
    assert torch.equal(model.norm.running_var, torch.ones(4))
    assert not any(p.is_meta for p in Tied().parameters()), "what comes after is as ever"
