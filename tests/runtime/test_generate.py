"""`trainer.generate`: the tokens of the library's own `generate`, under every plan, and none of it in the training.

Longer than 400 lines: every case is compared with the library by the same few helpers.
"""

import re
import warnings
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from examples.gpt2 import gpt2
from examples.llama import llama
from shardc.frontend.cached_model import CausalModel, Form
from shardc.ir.diagnostic import ShardcError
from shardc.ir.graph import info, type_of
from shardc.ir.in_place import writes
from shardc.ir.microbatch import CACHE
from shardc.ir.ops.streams import step_key, token_key
from shardc.runtime.generate import programs as generate_programs
from shardc.runtime.generate.sampling import draw, uniforms
from shardc.runtime.train.trainer import Trainer
from tests.runtime.generating import ATTENTION, DP, GPT2, HEAD, MLP, MODELS, PROMPTS, launched, library, made, spread

NEW = 12


@cache
def ready(name: str, mesh: str) -> tuple[nn.Module, Trainer]:
    return launched(name, mesh)


@pytest.fixture(scope="module", autouse=True)
def programs() -> Any:
    """Trainers are shared by the tests of the module."""
    yield
    ready.cache_clear()


# ---------------------------------------------------------------------- the library's tokens
SHORT = ("gpt2",)  # whose trainer on dp=2, tp=2 other tests use too; T5's tokens are compared under changed scores


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(name, mesh, marks=() if name in SHORT and "dp" in mesh else pytest.mark.long)
        for name in MODELS
        for mesh in ("tp=2", "dp=2, tp=2")
    ],
)
def test_greedy_tokens_are_those_of_the_library(name: str, mesh: str) -> None:
    model, trainer = ready(name, mesh)
    exact = library(model, max_new_tokens=NEW, eos_token_id=[])
    result = trainer.generate(PROMPTS, NEW, eos_token_id=[], pad_token_id=0)
    assert torch.equal(result.sequences, exact)
    new = exact[:, -NEW:]
    assert [list(row) for row in result.tokens] == new.tolist()
    assert len(new.unique()) > 4, "the model says something"
    ends = [int(new[0, 2]), int(new[1, 5]), int(new[2, 3])]  # rows end at different times, and not all of them
    exact = library(model, max_new_tokens=NEW, eos_token_id=ends)
    result = trainer.generate(PROMPTS, NEW, eos_token_id=ends, pad_token_id=0)
    assert torch.equal(result.sequences, exact)
    for row, tokens in zip(new.tolist(), result.tokens, strict=True):
        first = next((i for i, token in enumerate(row) if token in ends), NEW - 1)
        assert tokens == row[: first + 1]


SCORED: dict[str, dict[str, Any]] = {
    "of the encoder": {"encoder_repetition_penalty": 2.5, "begin_suppress_tokens": [4], "forced_eos_token_id": 3},
    "repetition": {"repetition_penalty": 3.0, "no_repeat_ngram_size": 2, "bad_words_ids": [[17], [5, 60]]},
    "end": {"min_new_tokens": 5, "eos_token_id": [17, 60, 42, 3, 90, 8], "suppress_tokens": [7, 9]},
}


@pytest.mark.sampled(6)  # `test_generate_stream.py` has one of GPT-2
@pytest.mark.parametrize("name", ["t5", "llama"])
@pytest.mark.parametrize("changed", SCORED)
def test_scores_are_changed_by_the_library_on_the_rows_of_a_rank(name: str, changed: str) -> None:
    model, trainer = ready(name, "dp=2, tp=2")
    exact = library(model, max_new_tokens=NEW, **SCORED[changed])
    assert torch.equal(trainer.generate(PROMPTS, NEW, pad_token_id=0, **SCORED[changed]).sequences, exact)


PLANS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "zero 3": ("dp=2, tp=2", {"params": GPT2, "inputs": DP, "storage": {"zero": 3, "axes": ["dp"]}}, {}),
    "pp2 tp2": ("pp=2, tp=2", {"params": GPT2, "pipeline": {"microbatches": 4}}, {}),
    "pp2 dp2 zero 3": (
        "pp=2, dp=2",
        {"inputs": DP, "pipeline": {"microbatches": 2}, "storage": {"zero": 3, "axes": ["dp"]}},
        {},
    ),
    "interleaved": (
        "pp=2",
        {"pipeline": {"microbatches": 4, "stages": 4, "schedule": "interleaved"}},
        {"layers": 4},
    ),
    "zb-v": ("pp=2", {"pipeline": {"microbatches": 4, "schedule": "zb-v"}}, {"layers": 4}),
    "sequence parallel": (
        "dp=2, tp=2",
        {"params": GPT2, "inputs": DP, "activations": {"transformer.h.0": "dp, tp, -"}},
        {},
    ),
    "fuse": ("dp=2, tp=2", {"params": GPT2, "inputs": DP, "fuse": True, "bucket": True}, {}),
    "of training": (
        "dp=2, tp=2",
        {
            "params": GPT2,
            "inputs": DP,
            "accumulate": 2,
            "budget": {"total": "64MiB"},
            "outputs": {"logits": "dp, -, tp"},
            "clip_grad_norm": 1.0,
            "recompute": "full",
            "loss": {"tokens": "labels", "shift": 1},
        },
        {},
    ),
    "vocabulary of 61": ("dp=2, tp=2", {"params": GPT2, "inputs": DP}, {"vocab": 61}),
    "dropout": ("tp=2", {"params": GPT2}, {"dropout": 0.5}),
}
SMALL = [[p % 61 for p in prompt] for prompt in PROMPTS]


@pytest.mark.sampled(20)
@pytest.mark.parametrize("rows", [4, 3])
@pytest.mark.parametrize("name", PLANS)
def test_tokens_under_a_plan_of_training(name: str, rows: int) -> None:
    mesh, plan, sizes = PLANS[name]
    model, batch = gpt2(**{"layers": 2, "vocab": 64, "seq": 8, "width": 32, "batch": 8} | sizes)
    spread(model)
    options: dict[str, Any] = {}
    if "clip_grad_norm" in plan:  # with an optimizer that takes what is clipped, or without a step of training
        options = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)} if rows == 4 else {"mode": "eval"}
    trainer = shardc.compile(model, batch, mesh=mesh, plan=plan, **options).launch()
    prompts = SMALL[:rows]
    result = trainer.generate(prompts, 9, eos_token_id=[], pad_token_id=0)
    assert torch.equal(result.sequences, library(model, prompts, max_new_tokens=9, eos_token_id=[]))
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("kv_heads", [2, pytest.param(1, marks=pytest.mark.long)])
def test_heads_of_keys_and_values_that_ranks_share(kv_heads: int) -> None:
    model, batch = llama(layers=1, batch=4, seq=8, vocab=96, width=32, kv_heads=kv_heads)
    spread(model)
    plan = {"params": ATTENTION | MLP | HEAD}
    trainer = shardc.compile(model, batch, mesh="tp=4", plan=plan, mode="eval").launch()
    result = trainer.generate(PROMPTS, 9, eos_token_id=[], pad_token_id=0)
    assert torch.equal(result.sequences, library(model, max_new_tokens=9, eos_token_id=[]))


@pytest.mark.parametrize("dtype", [pytest.param(d, marks=pytest.mark.long) for d in (torch.float64, torch.bfloat16)])
def test_dtypes_of_the_model(dtype: torch.dtype) -> None:
    model, batch, _ = made("llama")
    model.to(dtype)
    trainer = shardc.compile(model, batch, mesh="dp=2", plan={"inputs": DP}, mode="eval").launch()
    result = trainer.generate(PROMPTS, 6, eos_token_id=[], pad_token_id=0)
    exact = library(model, max_new_tokens=6, eos_token_id=[])
    if dtype == torch.float64:
        assert torch.equal(result.sequences, exact)
    else:  # attention is another kernel, and rounds otherwise: the first tokens are the same
        assert torch.equal(result.sequences[:, :8], exact[:, :8])
    body = trainer._generator.programs._pairs[next(iter(trainer._generator.programs._pairs))].decode.inputs
    assert {type.dtype for name, (_, type) in body.items() if name.startswith(CACHE)} == {dtype}


def test_sliding_windows_see_what_the_library_lets_them_see() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1, intermediate_size=32,
        vocab_size=96, sliding_window=4, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = spread(MistralForCausalLM(config))
    tokens = torch.randint(96, (4, 8))
    plan = {"params": ATTENTION, "inputs": {"input_ids": "dp, -"}}
    trainer = shardc.compile(model, {"input_ids": tokens}, mesh="dp=2, tp=2", plan=plan, mode="eval").launch()
    result = trainer.generate(PROMPTS, NEW, eos_token_id=[], pad_token_id=0)
    assert torch.equal(result.sequences, library(model, max_new_tokens=NEW, eos_token_id=[]))


# ---------------------------------------------------------------------- what a decode step sends and holds
@pytest.mark.long  # `test_generate_stream.py` counts what the steps of a stream send
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_a_decode_step_sends_what_tensor_parallelism_must(name: str) -> None:
    model, batch, params = made(name)
    program = shardc.compile(model, batch, mesh="dp=2, tp=2", plan={"params": params, "inputs": DP}, mode="eval")
    source, layers = 16 if name == "t5" else 0, 1 if name == "gpt2" else 2
    each = 3 if name == "t5" else 2  # cross attention has a product of its own
    choices = {"token": ["all_reduce", "all_reduce"], "logits": ["all_gather"]}
    for chosen, choice in choices.items() if name != "t5" else [("logits", choices["logits"])]:
        prompt = 1 if source else 8
        prefill, decode = program.generation(Form(4, prompt, 16, source, chosen))  # type: ignore[arg-type]
        kinds = [c.kind for c in decode.collectives()]
        assert kinds == ["all_reduce"] * (1 + each * layers) + choice  # of the embedding, of the layers, of the choice
        assert {tuple(c.axes) for c in decode.collectives()} == {("tp",)}
        width = 32 if name != "t5" else model.config.d_model
        of_layers = [c.payload_bytes for c in decode.collectives()][: 1 + each * layers]
        assert set(of_layers) == {2 * width * 4}, "a token of each of the rank's two rows"
        assert decode.body.is_forward_only
        assert {info(node).phase for node in decode.body.calls()} == {"fwd"}
        assert {tuple(c.axes) for c in prefill.collectives()} == {("tp",)}


def test_sequence_parallelism_is_left_out_where_there_is_one_token() -> None:
    mesh, plan, _ = PLANS["sequence parallel"]
    model, batch = gpt2(layers=2, vocab=64, seq=8, width=32)
    program = shardc.compile(model, batch, mesh=mesh, plan=plan)
    _, decode = program.generation(Form(4, 8, 16))
    assert [c.kind for c in decode.collectives()] == ["all_reduce"] * 7


@pytest.mark.parametrize("name", [pytest.param("gpt2", marks=pytest.mark.long), "t5"])
def test_the_cache_is_placed_once_and_written_in_place(name: str) -> None:
    model, batch, params = made(name)
    program = shardc.compile(model, batch, mesh="dp=2, tp=2", plan={"params": params, "inputs": DP}, mode="eval")
    prefill, decode = program.generation(Form(4, 8, 16) if name == "gpt2" else Form(4, 1, 16, 8))
    filled, read = (_cache(one.body.inputs, one.body.placeholders) for one in (prefill, decode))
    assert filled == {key: read[key] for key in filled}
    assert read.keys() - filled.keys() == ({f"{CACHE}encoded"} if name == "t5" else set()), "what no decode step reads"
    placements = {tuple(axes for dim in type.dims for atom in dim for axes in [atom.axes]) for type in filled.values()}
    assert placements == {(("dp",), ("tp",), (), ())}
    made_ = _cache(decode.body.outputs, decode.body.output_values)
    assert made_ == {key: read[key] for key in made_}
    assert len(made_) == (2 if name == "gpt2" else 4), "keys and values of each layer; those of the encoder are read"
    into = {info(write.over).name: write.op for write in writes(decode.body)}
    assert sorted(into) == sorted(made_)
    assert set(into.values()) == {torch.ops.aten.index_copy.out}


def _cache(ports: Any, nodes: Any) -> dict[str, Any]:
    pairs = zip(ports, nodes, strict=True)
    return {port.name: type_of(node) for port, node in pairs if port.name.startswith(CACHE)}


# ---------------------------------------------------------------------- sampling
@pytest.mark.long  # `test_generate_stream.py` draws on every mesh, in every order
def test_sampled_tokens_are_the_same_on_every_mesh() -> None:
    options = {"do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.95, "seed": 5, "pad_token_id": 0}
    found = [ready("gpt2", mesh)[1].generate(PROMPTS, NEW, **options).sequences for mesh in ("dp=1", "dp=2, tp=2")]
    assert torch.equal(*found)
    _, trainer = ready("gpt2", "dp=1")
    assert not torch.equal(found[0], trainer.generate(PROMPTS, NEW, **options | {"seed": 6}).sequences)
    alone = trainer.generate(PROMPTS[:1], NEW, **options)
    assert torch.equal(alone.sequences[0, -NEW:], found[0][0, -NEW:]), "a row's numbers are its own"


@pytest.mark.long
def test_sampled_tokens_of_a_pipeline() -> None:
    """Those of one device with the same model, of two layers."""
    model, batch = gpt2(layers=2, batch=4, seq=8, vocab=96, width=32)
    spread(model)
    plan = {"params": GPT2, "pipeline": {"microbatches": 2}}
    plans: dict[str, dict[str, Any]] = {"dp=1": {}, "pp=2, tp=2": plan}
    trainers = [shardc.compile(model, batch, mesh=mesh, plan=plan).launch() for mesh, plan in plans.items()]
    options: dict[str, Any] = {"do_sample": True, "top_k": 20, "seed": 5, "eos_token_id": [], "pad_token_id": 0}
    alone, pipelined = (trainer.generate(PROMPTS, NEW, **options).sequences for trainer in trainers)
    assert torch.equal(pipelined, alone)
    assert not torch.equal(trainers[1].generate(PROMPTS, NEW, **options | {"seed": 6}).sequences, alone)


def test_sequences_of_one_prompt_differ() -> None:
    _, trainer = ready("gpt2", "dp=1")
    result = trainer.generate(PROMPTS[:2], 8, do_sample=True, num_return_sequences=2, pad_token_id=0)
    assert result.sequences.shape[0] == 4
    assert torch.equal(result.sequences[0, :5], result.sequences[1, :5])
    assert result.tokens[0] != result.tokens[1]


def test_draws_have_the_probabilities_of_the_scores() -> None:
    scores = torch.tensor([0.0, -torch.inf, 1.0, 2.0, -3.0]).repeat(1 << 15, 1)
    numbers = uniforms(3, torch.arange(1 << 15), torch.zeros(1 << 15, dtype=torch.int64))
    counts = draw(scores, numbers).bincount(minlength=5).double()
    expected = torch.softmax(scores[0].double(), 0) * (1 << 15)
    assert counts[1] == 0
    kept = expected > 0
    assert float(((counts - expected)[kept].square() / expected[kept]).sum()) < 16.3  # of 3 degrees, one in a thousand


def test_numbers_are_of_seed_row_and_position() -> None:
    rows = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])
    positions = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    numbers = uniforms(7, rows, positions)
    assert len(numbers.unique()) == 8
    assert torch.equal(numbers.flip(0), uniforms(7, rows.flip(0), positions.flip(0)))
    assert not torch.equal(numbers, uniforms(8, rows, positions))
    assert bool(((numbers >= 0) & (numbers < 1)).all())
    assert token_key(7) not in {step_key(7, step) for step in range(100)}


def test_the_last_number_picks_a_token_that_has_a_probability() -> None:
    scores = torch.tensor([[1.0, 2.0, -torch.inf, -torch.inf], [-torch.inf, 1.0, 1.0, -torch.inf]])
    below_one = torch.tensor([1.0 - 2.0**-53, 1.0 - 2.0**-53], dtype=torch.float64)
    assert draw(scores, below_one).tolist() == [1, 2]
    assert draw(scores, torch.zeros(2, dtype=torch.float64)).tolist() == [0, 1]


# ---------------------------------------------------------------------- beside training
@pytest.mark.long  # `test_generate_stream.py` generates before and after a step
def test_generation_is_by_the_present_weights_and_leaves_training_alone() -> None:
    def trained(generates: bool) -> tuple[list[float], list[Tensor], nn.Module, Trainer]:
        model, batch = gpt2(layers=1, batch=4, seq=8, vocab=96, width=32, dropout=0.2)
        spread(model)
        adam = torch.optim.AdamW(model.parameters(), 1e-2)
        plan = {"params": GPT2, "inputs": DP}
        trainer = shardc.compile(model, batch, mesh="dp=2, tp=2", plan=plan, optimizer=adam).launch()
        losses, found = [], []
        for _ in range(2):
            losses.append(float(trainer.step(batch).loss))
            if generates:
                found.append(trainer.generate(PROMPTS, 8, eos_token_id=[], pad_token_id=0).sequences)
        return losses, found, model, trainer

    losses, _, _, _ = trained(False)
    again, found, model, trainer = trained(True)
    assert losses == again
    assert not torch.equal(found[0], found[-1]), "training has changed what is said"
    trainer.sync_to(model)
    assert torch.equal(found[-1], library(model, max_new_tokens=8, eos_token_id=[]))


@pytest.mark.long  # `cli/test_generate_cli.py` generates by the weights of a folder
def test_program_generate_launches_with_the_weights_of_a_folder(tmp_path: Any) -> None:
    model, batch, params = made("llama")
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    with shardc.meta_parameters():
        empty = type(model)(model.config)
    program = shardc.compile(empty, batch, mesh="tp=2", plan={"params": params}, mode="eval")
    result = program.generate(PROMPTS, 6, eos_token_id=[], pad_token_id=0, state=tmp_path)
    assert torch.equal(result.sequences, library(model, max_new_tokens=6, eos_token_id=[]))


def test_forms_are_bounded_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate_programs, "PROGRAMS", 1)
    model, batch = gpt2(layers=1, batch=4, seq=8, vocab=32, width=16)
    trainer = shardc.compile(model, batch, mesh="dp=1", plan={}, mode="eval").launch()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in (1, 1, 2, 1):
            trainer.generate([[1, 2]] * rows, 2)
    said = [str(one.message) for one in caught if "generat" in str(one.message) or "forms" in str(one.message)]
    assert len(said) == 2
    assert "here is another, and the 1 used last are kept" in said[0]
    assert len(trainer._generator.programs._pairs) == 1


# ---------------------------------------------------------------------- what does not generate
def code_of(act: Any) -> ShardcError:
    with pytest.raises(ShardcError) as caught:
        act()
    assert all(d.hint for d in caught.value.diagnostics)
    return caught.value


def test_models_that_do_not_generate() -> None:
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        BloomConfig,
        BloomForCausalLM,
        GPTNeoConfig,
        GPTNeoForCausalLM,
        MambaConfig,
        MambaForCausalLM,
    )

    small = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 32}
    bert = BertForMaskedLM(BertConfig(**small, num_attention_heads=2, intermediate_size=16))
    mamba = MambaForCausalLM(MambaConfig(**small, state_size=4))
    bloom = BloomForCausalLM(BloomConfig(hidden_size=16, n_head=2, n_layer=1, vocab_size=32))
    local = {"attention_types": [[["local"], 1]], "window_size": 4}
    neo = GPTNeoForCausalLM(GPTNeoConfig(hidden_size=16, num_heads=2, num_layers=1, vocab_size=32, **local))
    hooked, _ = gpt2(layers=1, batch=4, seq=8, vocab=32, width=16)
    hooked.register_forward_hook(lambda *_: None)
    tokens = torch.randint(32, (2, 4))
    for model, said in (
        (bert, r"its can_generate\(\) is False"),
        (mamba, "keeps? more than keys and values"),
        (bloom, "of its own"),
        (neo, "is not made for a static cache"),
        (hooked, "has hooks"),
        (nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 32)), "its forward takes no cache"),
    ):
        batch: Any = {"input_ids": tokens} if not isinstance(model, nn.Sequential) else tokens
        trainer = shardc.compile(model, batch, mesh="dp=1", plan={}, mode="eval").launch()
        wrong = code_of(lambda trainer=trainer: trainer.generate([[1]], 2))
        assert wrong.code == "SC571"
        assert re.search(said, str(wrong))


def test_models_whose_state_is_an_argument_of_its_own() -> None:
    """As Mamba's was called in earlier versions of the library, whether or not it says that it generates."""
    from transformers import MambaConfig, MambaForCausalLM

    class Earlier(MambaForCausalLM):
        def forward(self, input_ids: Any = None, cache_params: Any = None) -> None: ...

    class Silent(Earlier):
        @classmethod
        def can_generate(cls) -> bool:
            return False

    config = MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=32, state_size=4)
    for kind in (Earlier, Silent):
        wrong = code_of(lambda kind=kind: CausalModel.of(kind(config)))
        assert wrong.code == "SC571"
        assert "keeps more than keys and values: its forward takes 'cache_params'" in str(wrong)


def test_a_program_from_a_file_has_no_model() -> None:
    model, batch = gpt2(layers=1, batch=4, seq=8, vocab=32, width=16)
    program = shardc.compile(model, batch, mesh="dp=1", plan={}, mode="eval")
    read = shardc.Program.from_json(program.to_json())
    assert code_of(lambda: read.generate([[1]], 2, state=model.state_dict())).code == "SC571"


def test_positions_beyond_the_table() -> None:
    model, batch = gpt2(layers=1, batch=4, seq=8, vocab=32, width=16)  # 64 positions
    trainer = shardc.compile(model, batch, mesh="dp=1", plan={}, mode="eval").launch()
    prompt = [[1] * 60, [2]]
    exact = library(model, prompt, max_new_tokens=5, eos_token_id=[])
    assert torch.equal(trainer.generate(prompt, 5, eos_token_id=[], pad_token_id=0).sequences, exact)
    wrong = code_of(lambda: trainer.generate(prompt, 6, eos_token_id=[]))
    assert wrong.code == "SC573"
    assert "no position 64" in str(wrong)
