"""Prompts in every form, and options of the library: each is honoured, refused, or known to change nothing."""

from typing import Any

import pytest
import torch
from torch import nn

import shardc
from examples.gpt2 import gpt2
from shardc.ir.diagnostic import ShardcError
from shardc.runtime.generate.programs import series
from shardc.runtime.generate.settings import ARGUMENTS, HONOURED, REFUSED, WITHOUT_EFFECT
from shardc.runtime.train.trainer import Trainer
from tests.runtime.generating import library, spread

VOCABULARY = 32
PROMPTS = [[7, 5, 3], [9], [2, 2, 8, 1]]


@pytest.fixture(scope="module")
def ready() -> tuple[nn.Module, Trainer]:
    model, batch = gpt2(layers=1, batch=4, seq=8, vocab=VOCABULARY, width=16)
    spread(model)
    return model, shardc.compile(model, batch, mesh="dp=1", plan={}, mode="eval").launch()


def code_of(act: Any) -> ShardcError:
    with pytest.raises(ShardcError) as caught:
        act()
    assert all(d.hint for d in caught.value.diagnostics)
    return caught.value


# ---------------------------------------------------------------------- options
def test_every_field_of_the_library_is_honoured_or_refused_or_without_effect(ready: Any) -> None:
    model, _ = ready
    fields = {name for name in vars(type(model.generation_config)()) if not name.startswith("_")}
    kinds = [HONOURED, WITHOUT_EFFECT, REFUSED.keys()]
    assert fields <= frozenset().union(*kinds)
    assert sum(map(len, kinds)) == len(frozenset().union(*kinds)), "and is of one kind"
    # The library may drop a field: what it knows no more is said here.
    assert frozenset().union(*kinds) - fields <= {"dola_layers", "low_memory", "penalty_alpha", "constraints"}


def test_arguments_of_the_library_are_all_taken_or_refused() -> None:
    import inspect

    from transformers import GenerationMixin

    taken = {"self", "kwargs", "generation_config"}
    names = set(inspect.signature(GenerationMixin.generate).parameters) - taken
    assert names <= ARGUMENTS.keys()


HONOURS: list[dict[str, Any]] = [
    {"max_length": 9},
    {"max_length": 9, "min_length": 8, "eos_token_id": [3, 5, 7, 9, 11, 13]},
    {"min_new_tokens": 4, "eos_token_id": list(range(20))},
    {"repetition_penalty": 4.0},
    {"no_repeat_ngram_size": 1},
    {"bad_words_ids": [[n] for n in range(0, 30, 2)]},
    {"forced_bos_token_id": 4},
    {"forced_eos_token_id": 4},
    {"suppress_tokens": list(range(0, 30, 3))},
    {"begin_suppress_tokens": list(range(20))},
    {"sequence_bias": [[[5], 40.0]]},
    {"exponential_decay_length_penalty": (2, 3.0), "eos_token_id": 4},
    {"remove_invalid_values": True, "renormalize_logits": True},
    {"eos_token_id": 11, "pad_token_id": 30},
    {"eos_token_id": list(range(VOCABULARY))},
    {"use_cache": False, "length_penalty": 2.0, "early_stopping": True},
    {"return_dict_in_generate": False, "num_beams": 1, "guidance_scale": 1.0, "cache_implementation": "static"},
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", HONOURS, ids=lambda options: " ".join(options))
def test_options_are_those_of_the_library(ready: Any, options: dict[str, Any]) -> None:
    model, trainer = ready
    options = {"max_new_tokens": 6, "pad_token_id": 0} | options
    if "max_length" in options:
        del options["max_new_tokens"]
    exact = library(model, PROMPTS, options["pad_token_id"], **options)
    assert torch.equal(trainer.generate(PROMPTS, **options).sequences, exact)


@pytest.mark.parametrize("option", ["top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h"])
def test_what_narrows_sampling_to_one_token_makes_it_greedy(ready: Any, option: str) -> None:
    model, trainer = ready
    narrow = {"top_k": 1, "top_p": 1e-6, "min_p": 1.0, "typical_p": 1e-6, "epsilon_cutoff": 0.999, "top_h": 1e-3}
    value = narrow.get(option, 0.999)
    greedy = library(model, PROMPTS, max_new_tokens=6, eos_token_id=[])
    sampled = [
        trainer.generate(PROMPTS, 6, do_sample=True, eos_token_id=[], seed=seed, temperature=0.02, **{option: value})
        for seed in range(2)
    ]
    assert all(torch.equal(result.sequences[:, -6:], greedy[:, -6:]) for result in sampled) or option == "typical_p"
    assert torch.equal(sampled[0].sequences, sampled[1].sequences)


def test_the_models_own_config_counts_and_the_callers_counts_more(ready: Any) -> None:
    model, trainer = ready
    config = model.generation_config
    before = config.to_dict()
    try:
        config.repetition_penalty, config.max_new_tokens = 4.0, 5
        expected = library(model, PROMPTS)
        assert torch.equal(trainer.generate(PROMPTS, pad_token_id=0).sequences, expected)
        given = trainer.generate(PROMPTS, 3, repetition_penalty=1.0, pad_token_id=0).sequences
        assert torch.equal(given, library(model, PROMPTS, max_new_tokens=3, repetition_penalty=1.0))
        other = type(config)(max_new_tokens=4, no_repeat_ngram_size=1, pad_token_id=0, eos_token_id=0)
        assert torch.equal(
            trainer.generate(PROMPTS, generation_config=other).sequences,
            library(model, PROMPTS, generation_config=other),
        )
        config.num_beams = 3
        wrong = code_of(lambda: trainer.generate(PROMPTS, 3))
        assert "the model's generation config asks for num_beams=3" in str(wrong)
        config.num_beams, config.own_idea = 1, 7
        wrong = code_of(lambda: trainer.generate(PROMPTS, 3))
        assert wrong.code == "SC572"
        assert "model.generation_config.own_idea = None" in str(wrong)
    finally:
        vars(config).pop("own_idea", None)
        for name, value in before.items():
            setattr(config, name, value)
        for name in ("repetition_penalty", "max_new_tokens", "num_beams"):
            setattr(config, name, before.get(name))


def test_a_generation_config_is_no_part_of_a_program(recwarn: pytest.WarningsRecorder) -> None:
    model, batch = gpt2(layers=1, batch=4, seq=8, vocab=VOCABULARY, width=16)
    program = shardc.compile(model, batch, mesh="dp=1", plan={}, mode="eval")
    model.generation_config.max_new_tokens = 2  # type: ignore[union-attr]
    assert program.generate(PROMPTS, eos_token_id=[]).sequences.shape[1] == 6
    model.generation_config = type(model.generation_config)(max_new_tokens=3)
    assert program.generate(PROMPTS, eos_token_id=[]).sequences.shape[1] == 7
    assert not [w for w in recwarn if "compiled again" in str(w.message)]


WRONG: dict[str, Any] = {
    "num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 0.5, "penalty_alpha": 0.5, "guidance_scale": 2.0,
    "token_healing": True, "use_mtp": True, "prompt_lookup_num_tokens": 3, "assistant_early_exit": 1,
    "max_time": 1.0, "output_scores": True, "output_logits": True, "output_attentions": True,
    "output_hidden_states": True, "return_dict_in_generate": True, "cache_implementation": "quantized",
    "cache_config": {"nbits": 4}, "assistant_model": 1, "streamer": 1, "logits_processor": [], "input_ids": [[1]],
    "stopping_criteria": [], "beams": 3, "temprature": 0.5, "decoder_input_ids": [[1]], "past_key_values": 1,
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_supported_is_refused(ready: Any, name: str) -> None:
    wrong = code_of(lambda: ready[1].generate(PROMPTS, 3, **{name: WRONG[name]}))
    assert wrong.code == "SC572"
    assert name in str(wrong)
    if name == "temprature":
        assert "did you mean 'temperature'?" in str(wrong)


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 0},
        {"max_new_tokens": -3},
        {"max_new_tokens": 2.5},
        {"max_new_tokens": True},
        {"max_length": 9.5},
        {"min_new_tokens": 1.5},
        {"max_length": 3},
        {"max_length": 4},
        {"do_sample": True, "temperature": 0.0},
        {"do_sample": True, "temperature": -1.0},
        {"do_sample": True, "top_p": 1.5},
        {"do_sample": True, "top_k": -3},
        {"repetition_penalty": -1.0},
        {"num_return_sequences": 2},
        {"stop_strings": "end"},
        {"seed": 1.5},
        {"generation_config": {"max_new_tokens": 3}},
    ],
    ids=str,
)
def test_values_out_of_range(ready: Any, options: dict[str, Any]) -> None:
    given = options if "max_length" in options else {"max_new_tokens": 3} | options
    assert code_of(lambda: ready[1].generate(PROMPTS, **given)).code == "SC572"


def test_a_cache_that_is_too_short(ready: Any) -> None:
    model, trainer = ready
    exact = library(model, PROMPTS, max_new_tokens=6, eos_token_id=[])
    result = trainer.generate(PROMPTS, 6, max_cache_len=9, eos_token_id=[], pad_token_id=0)
    assert torch.equal(result.sequences, exact)
    wrong = code_of(lambda: trainer.generate(PROMPTS, 6, max_cache_len=8))
    assert wrong.code == "SC573"
    assert "9 tokens do not fit into a cache of max_cache_len=8" in str(wrong)
    assert "the longest prompt has 4 tokens, and 6 are to follow it" in str(wrong)


@pytest.mark.parametrize("kind", ["Bart", pytest.param("Pegasus", marks=pytest.mark.long)])
def test_positions_of_an_encoder_and_a_decoder(kind: str) -> None:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=64, max_position_embeddings=50, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None,
    )  # fmt: skip
    model = spread(getattr(transformers, f"{kind}ForConditionalGeneration")(config))
    tokens = torch.randint(3, 64, (2, 50))
    trainer = shardc.compile(model, {"input_ids": tokens, "labels": tokens}, mesh="dp=1", plan={}, mode="eval").launch()
    for prompts, new in ((tokens.tolist(), 2), ([[5, 6]], 50)):
        exact = library(model, prompts, max_new_tokens=new, eos_token_id=[])
        assert torch.equal(trainer.generate(prompts, new, eos_token_id=[]).sequences, exact)
    for prompts, new, said in (([[5] * 51], 2, "the encoder 50 positions"), ([[5]], 51, "decoder has 50 positions")):
        wrong = code_of(lambda prompts=prompts, new=new: trainer.generate(prompts, new, eos_token_id=[]))
        assert wrong.code == "SC573"
        assert said in str(wrong)


def test_lengths_that_are_compiled() -> None:
    assert [series(n) for n in (1, 8, 9, 33, 64, 65, 128, 129)] == [8, 8, 16, 64, 64, 128, 128, 192]


# ---------------------------------------------------------------------- prompts
def test_forms_of_prompts(ready: Any) -> None:
    model, trainer = ready
    exact = library(model, PROMPTS, max_new_tokens=4, eos_token_id=[])
    left = torch.tensor([[0, 7, 5, 3], [0, 0, 0, 9], [2, 2, 8, 1]])
    right = torch.tensor([[7, 5, 3, 0], [9, 0, 0, 0], [2, 2, 8, 1]])
    left_mask = torch.tensor([[0, 1, 1, 1], [0, 0, 0, 1], [1, 1, 1, 1]])
    right_mask = left_mask.flip(1)
    forms: list[tuple[Any, dict[str, Any]]] = [
        (PROMPTS, {}),
        (tuple(map(tuple, PROMPTS)), {}),
        ([torch.tensor(row) for row in PROMPTS], {}),
        (left, {"attention_mask": left_mask}),
        (right, {"attention_mask": right_mask}),
        (left.int(), {"attention_mask": left_mask.bool()}),
        ({"input_ids": left, "attention_mask": left_mask}, {}),
    ]
    for prompts, given in forms:
        result = trainer.generate(prompts, 4, eos_token_id=[], pad_token_id=0, **given)
        assert torch.equal(result.sequences, exact)
    # As the library infers it: the token for padding is padding, unless it may end a row.
    assert torch.equal(trainer.generate(left, 4, eos_token_id=31, pad_token_id=0).sequences[:2], exact[:2])
    whole = model.eval().generate(left, attention_mask=torch.ones_like(left), max_new_tokens=4, pad_token_id=0)
    assert torch.equal(trainer.generate(left, 4).sequences, whole)
    assert trainer.generate([7, 5, 3], 4, eos_token_id=[]).tokens == [exact[0, -4:].tolist()]


LEFT = torch.tensor([[0, 0, 0, 5, 6], [7, 8, 9, 10, 11]])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mapping", [False, True])
@pytest.mark.parametrize("options", [
    {"generation_config": {"pad_token_id": 0, "eos_token_id": 2}},
    {"pad_token_id": torch.tensor(0), "eos_token_id": 2},
    {"pad_token_id": 0, "eos_token_id": torch.tensor([2, 4])},
    {"pad_token_id": 0, "eos_token_id": torch.tensor([0, 2])},  # which may end a row: no mask
    {"pad_token_id": 0, "eos_token_id": 2},
], ids=str)  # fmt: skip
def test_a_mask_is_inferred_as_the_library_infers_it(ready: Any, options: dict[str, Any], mapping: bool) -> None:
    model, trainer = ready
    if "generation_config" in options:
        options = {"generation_config": type(model.generation_config)(**options["generation_config"])}
    exact = model.eval().generate(LEFT, max_new_tokens=6, **options)
    assert torch.equal(trainer.generate({"input_ids": LEFT} if mapping else LEFT, 6, **options).sequences, exact)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [{"no_repeat_ngram_size": 1}, {"repetition_penalty": 50.0}], ids=" ".join)
@pytest.mark.parametrize("pad", [None, 30])
def test_padding_of_ones_own_is_kept(ready: Any, options: dict[str, Any], pad: int | None) -> None:
    model, trainer = ready
    options = options | {"attention_mask": (LEFT != 0).long(), "eos_token_id": 2, "pad_token_id": pad}
    exact = model.eval().generate(LEFT, max_new_tokens=6, **options)
    result = trainer.generate(LEFT, 6, **options)
    assert torch.equal(result.sequences, exact)
    right = torch.tensor([[5, 6, 0, 0, 0], [7, 8, 9, 10, 11]])
    options["attention_mask"] = (right != 0).long()
    assert torch.equal(trainer.generate(right, 6, **options).sequences, exact), "as if it were on the left"


class Words:
    """A tokenizer of words w0, w1, ..."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [int(word[1:]) for word in text.split()]}

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return " ".join(f"w{token}" for token in tokens)


def test_text_in_and_text_out(ready: Any) -> None:
    _, trainer = ready
    texts = ["w7 w5 w3", "w9", "w2 w2 w8 w1"]
    result = trainer.generate(texts, 4, tokenizer=Words(), eos_token_id=[], pad_token_id=0)
    plain = trainer.generate(PROMPTS, 4, eos_token_id=[], pad_token_id=0)
    assert result.tokens == plain.tokens
    assert result.text == [Words().decode(list(row)) for row in plain.tokens]
    assert plain.text is None
    assert "3 rows, 12 new tokens" in repr(plain)
    assert trainer.generate("w7 w5 w3", 4, tokenizer=Words(), eos_token_id=[]).tokens == result.tokens[:1]


@pytest.mark.parametrize(("prompts", "given", "said"), [
    ([], {}, "there are no prompts"),
    ([[]], {}, "prompt 0 has no token"),
    ([[1], [VOCABULARY]], {}, f"prompt 1 has the token {VOCABULARY}; the model's are 0 to {VOCABULARY - 1}"),
    ([[-1]], {}, "prompt 0 has the token -1"),
    ([[1.5]], {}, "prompt 0 is no list of token ids"),
    ([[True]], {}, "prompt 0 is no list of token ids"),
    (["a", "b"], {}, "the prompts are text, and there is no tokenizer"),
    ("a", {}, "the prompts are text, and there is no tokenizer"),
    (3, {}, "the prompts are of type int"),
    (torch.ones(2, 3), {}, "a tensor of float32[2, 3]"),
    (torch.ones(2, 3, dtype=torch.bool), {}, "a tensor of bool[2, 3]"),
    (torch.ones(2, 3, 4, dtype=torch.int64), {}, "a tensor of int64[2, 3, 4]"),
    (torch.ones(2, 3, dtype=torch.int64, device="meta"), {}, "meta device"),
    (torch.ones(1, 3, dtype=torch.int64), {"attention_mask": torch.tensor([[1, 0, 1]])}, "has zeros between ones"),
    (torch.ones(1, 3, dtype=torch.int64), {"attention_mask": torch.tensor([[0, 0, 0]])}, "prompt 0 has no token"),
    (torch.ones(1, 3, dtype=torch.int64), {"attention_mask": torch.ones(1, 4)}, "has the shape [1, 4]"),
    ([[1]], {"attention_mask": torch.ones(1, 1)}, "an attention_mask is given beside prompts that are no tensor"),
    ({"ids": [[1]]}, {}, "a mapping without 'input_ids'"),
])  # fmt: skip
def test_prompts_that_are_none(ready: Any, prompts: Any, given: dict[str, Any], said: str) -> None:
    wrong = code_of(lambda: ready[1].generate(prompts, 2, **given))
    assert wrong.code == "SC573"
    assert said in str(wrong)


def test_strings_that_end_a_row(ready: Any) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    letters = {chr(ord("a") + i): i for i in range(26)} | {chr(ord("A") + i): 26 + i for i in range(6)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
    inner.decoder = tokenizers.decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    model, trainer = ready
    new = library(model, PROMPTS, max_new_tokens=6, eos_token_id=[])[:, -6:]
    stop = tokenizer.decode(new[0, 2:4])
    options = {"max_new_tokens": 6, "stop_strings": [stop], "eos_token_id": 31}
    result = trainer.generate(PROMPTS, tokenizer=tokenizer, pad_token_id=0, **options)
    assert len(result.tokens[0]) < 6
    assert torch.equal(result.sequences, library(model, PROMPTS, tokenizer=tokenizer, **options))
