"""Continuous batches: each sequence is that of the library for its prompt alone, whenever it joins."""

import random
import re
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import shardc
from examples.gpt2 import gpt2
from examples.llama import llama
from shardc.frontend.cached_model import Form
from shardc.ir.diagnostic import ShardcError
from shardc.runtime.train.trainer import Trainer
from tests.runtime.generating import ATTENTION, DP, GPT2, HEAD, LIMITS, MLP, alone, launched, made, spread
from tests.runtime.generating import MORE as PROMPTS

LENGTHS = [len(prompt) for prompt in PROMPTS]


@cache
def ready(name: str, mesh: str) -> tuple[nn.Module, Trainer]:
    return launched(name, mesh)


@pytest.fixture(scope="module", autouse=True)
def programs() -> Any:
    """Trainers are shared by the tests of the module."""
    yield
    ready.cache_clear()


def tokens_of(stream: Iterator[Any]) -> dict[int, list[int]]:
    return {finished.prompt: list(finished.tokens) for finished in stream}


# ---------------------------------------------------------------------- the library's tokens, for each prompt alone
@pytest.mark.sampled(8)
@pytest.mark.parametrize("mesh", ["tp=2", "dp=2, tp=2"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "mixtral"])
def test_sequences_are_those_of_the_library_for_each_prompt_alone(name: str, mesh: str) -> None:
    model, trainer = ready(name, mesh)
    free = [alone(model, prompt, limit, eos_token_id=[]) for prompt, limit in zip(PROMPTS, LIMITS, strict=True)]
    ends = [free[1][4], free[3][2], free[5][6]]  # some end by a token, others by their limit
    exact = [alone(model, prompt, limit, eos_token_id=ends) for prompt, limit in zip(PROMPTS, LIMITS, strict=True)]
    assert 0 < sum(len(row) < limit for row, limit in zip(exact, LIMITS, strict=True)) < len(PROMPTS)
    result = trainer.generate(PROMPTS, LIMITS, rows=3, eos_token_id=ends, pad_token_id=0)
    assert [list(row) for row in result.tokens] == exact
    assert result.sequences.shape == (len(PROMPTS), max(LENGTHS) + max(map(len, exact)))
    for row, prompt, new in zip(result.sequences.tolist(), PROMPTS, exact, strict=True):
        padding = [0] * (max(LENGTHS) - len(prompt))
        assert row[: max(LENGTHS) + len(new)] == padding + prompt + new
        assert not any(row[max(LENGTHS) + len(new) :])


@pytest.mark.long  # what is drawn has tests of its own here and in `test_generate.py`
@pytest.mark.sampled(24)
@pytest.mark.parametrize("number", range(24))
def test_random_streams(number: int) -> None:
    pick = random.Random(number)
    mesh = pick.choice(["tp=2", "dp=2, tp=2", "dp=3", "dp=4", "pp=2, tp=2", "pp=2, dp=2"])
    if pick.random() < 0.5:
        (model, batch), params = gpt2(batch=12, seq=6, vocab=61, heads=4, width=32), GPT2
    else:
        (model, batch), params = llama(12, 6, 2, 61, 4, pick.choice([1, 2]), width=32), ATTENTION | MLP | HEAD
    spread(model)
    plan: dict[str, Any] = {"inputs": DP if "dp" in mesh else {}, "params": params if "tp" in mesh else {}}
    plan |= {"pipeline": {"microbatches": 2}} if "pp" in mesh else {}
    plan |= {"storage": {"zero": 3, "axes": ["dp"]}} if "dp" in mesh and pick.random() < 0.4 else {}
    trainer = shardc.compile(model, batch, mesh=mesh, plan=plan, mode=pick.choice(["train", "eval"])).launch()
    prompts = [[pick.randrange(1, 61) for _ in range(pick.randint(1, 20))] for _ in range(pick.randint(1, 9))]
    limits = [pick.randint(1, 12) for _ in prompts]
    options: dict[str, Any] = {"eos_token_id": pick.sample(range(61), pick.choice([0, 3, 8])), "pad_token_id": 0}
    options |= pick.choice([{}, {"repetition_penalty": 2.0}, {"no_repeat_ngram_size": 2}, {"min_new_tokens": 3}])
    options |= {"max_cache_len": 31} if pick.random() < 0.5 else {}
    one_by_one = pick.random() < 0.5
    given = (iter(prompts), iter(limits)) if one_by_one else (prompts, limits)
    found = tokens_of(trainer.generate_stream(*given, rows=pick.randint(1, 5), **options))
    options.pop("max_cache_len", None)
    exact = {i: alone(model, p, n, **options) for i, (p, n) in enumerate(zip(prompts, limits, strict=True))}
    assert found == exact, (mesh, plan, prompts, limits, options, one_by_one)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 3.0, "no_repeat_ngram_size": 2, "bad_words_ids": [[17], [5, 60]]},
        {"min_new_tokens": 5, "eos_token_id": list(range(40)), "suppress_tokens": [7, 9]},
        {"max_length": 13, "forced_eos_token_id": 3, "encoder_repetition_penalty": 2.5},
    ],
    ids=["repetition", "end", "length"],
)
def test_what_changes_scores_reads_a_sequence_alone(options: dict[str, Any]) -> None:
    model, trainer = ready("gpt2", "dp=2, tp=2")
    prompts = [prompt for prompt in PROMPTS if len(prompt) < 12]
    limit = None if "max_length" in options else 9
    exact = [alone(model, prompt, limit, **options) for prompt in prompts]
    result = trainer.generate(prompts, limit, rows=3, pad_token_id=0, **options)
    assert [list(row) for row in result.tokens] == exact


@pytest.mark.parametrize("longer", [False, pytest.param(True, marks=pytest.mark.long)])
def test_rows_are_moved_where_the_cache_ends_and_where_a_long_prompt_comes(longer: bool) -> None:
    model, trainer = ready("gpt2", "dp=2, tp=2")
    prompts = [[5], [9, 4], [3] * 3, list(range(1, 19)), [8], [2] * 15, [6, 1]]
    limits = [15, 17, 9, 2, 12, 5, 14]
    exact = {i: alone(model, p, n, eos_token_id=[]) for i, (p, n) in enumerate(zip(prompts, limits, strict=True))}
    length = 40 if longer else max(len(p) + n - 1 for p, n in zip(prompts, limits, strict=True))
    stream = trainer.generate_stream(prompts, limits, rows=2, eos_token_id=[], pad_token_id=0, max_cache_len=length)
    assert tokens_of(stream) == exact


@pytest.mark.long  # in a batch, `test_generate.py` compares windows
def test_sliding_windows_see_what_the_library_lets_them_see() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1, intermediate_size=32,
        vocab_size=96, sliding_window=4, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = spread(MistralForCausalLM(config))
    plan = {"params": ATTENTION, "inputs": {"input_ids": "dp, -"}}
    batch = {"input_ids": torch.randint(96, (4, 8))}
    trainer = shardc.compile(model, batch, mesh="dp=2, tp=2", plan=plan, mode="eval").launch()
    result = trainer.generate(PROMPTS, LIMITS, rows=2, eos_token_id=[], pad_token_id=0, max_cache_len=18)
    exact = [alone(model, p, n, eos_token_id=[]) for p, n in zip(PROMPTS, LIMITS, strict=True)]
    assert [list(row) for row in result.tokens] == exact


# ---------------------------------------------------------------------- sampling
def test_a_draw_is_of_its_prompt_and_position_on_every_mesh_in_every_order() -> None:
    options = {
        "do_sample": True,
        "temperature": 0.9,
        "top_k": 20,
        "seed": 5,
        "eos_token_id": [3, 50],
        "pad_token_id": 0,
    }
    together = ready("gpt2", "dp=1")[1].generate(PROMPTS, 9, **options)
    for mesh, rows in (("dp=1", 1), ("dp=2, tp=2", 3)):
        result = ready("gpt2", mesh)[1].generate(PROMPTS, 9, rows=rows, **options)
        assert result.tokens == together.tokens, (mesh, rows)
        assert torch.equal(result.sequences, together.sequences)
    other = ready("gpt2", "dp=1")[1].generate(PROMPTS, 9, rows=3, **options | {"seed": 6})
    assert other.tokens != together.tokens


def test_several_sequences_of_a_prompt_are_those_of_a_batch() -> None:
    _, trainer = ready("gpt2", "dp=1")
    options = {"do_sample": True, "num_return_sequences": 2, "seed": 3, "pad_token_id": 0}
    together = trainer.generate(PROMPTS[:3], 5, **options)
    result = trainer.generate(PROMPTS[:3], 5, rows=2, **options)
    assert torch.equal(result.sequences, together.sequences)
    found = {(f.prompt, f.copy): f.tokens for f in trainer.generate_stream(iter(PROMPTS[:3]), 5, rows=2, **options)}
    assert [found[prompt, copy] for prompt in range(3) for copy in range(2)] == list(together.tokens)


# ---------------------------------------------------------------------- when
def test_a_prompt_is_asked_for_when_a_row_is_free_and_a_sequence_given_out_when_it_ends() -> None:
    model, trainer = ready("gpt2", "dp=2, tp=2")
    asked: list[int] = []

    def prompts() -> Iterator[list[int]]:
        for number, prompt in enumerate(PROMPTS):
            assert torch.is_grad_enabled(), "the user's code runs as it does elsewhere"
            asked.append(number)
            yield prompt

    order: list[int] = []
    for finished in trainer.generate_stream(prompts(), iter(LIMITS), rows=2, eos_token_id=[], pad_token_id=0):
        assert torch.is_grad_enabled()
        order.append(finished.prompt)
        assert len(asked) <= len(order) + 2
        assert finished.sequence.tolist() == [*PROMPTS[finished.prompt], *finished.tokens]
        assert list(finished.tokens) == alone(model, PROMPTS[finished.prompt], LIMITS[finished.prompt], eos_token_id=[])
    assert sorted(order) == list(range(len(PROMPTS)))
    assert order.index(2) < order.index(1), "the shorter one joined later and ended earlier"
    assert order[0] == 0


def test_a_stream_without_end() -> None:
    _, trainer = ready("gpt2", "dp=1")

    def prompts() -> Iterator[list[int]]:
        while True:
            yield [5, 7]

    stream = trainer.generate_stream(prompts(), 3, rows=2, eos_token_id=[])
    found = [next(stream) for _ in range(7)]
    assert [finished.prompt for finished in found] == list(range(7))
    stream.close()  # type: ignore[attr-defined]
    assert trainer.generate([[5, 7]], 3, eos_token_id=[]).tokens[0] == found[0].tokens


# ---------------------------------------------------------------------- what is sent, and what is compiled
@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.long)])
def test_a_decode_step_sends_what_tensor_parallelism_must_and_a_prompt_that_joins_no_more(name: str) -> None:
    _, trainer = ready(name, "dp=2, tp=2")
    reduces = 5 if name == "llama" else 3  # of the embedding, and two of each layer
    for sample, choice in ((False, ["all_reduce"] * 2), (True, ["all_gather"])):
        trainer.generate(PROMPTS, LIMITS, rows=4, do_sample=sample, pad_token_id=0)
        programs = list(trainer._generator.programs._by_row.values())[-1]
        assert programs.joining == 2, "a row for each data coordinate"
        for step, rows, width in ((programs.decode, 4, 1), (programs.prefill(11), 2, 16)):
            collectives = step.program.collectives()
            assert [c.kind for c in collectives] == ["all_reduce"] * reduces + choice
            assert {tuple(c.axes) for c in collectives} == {("tp",)}
            assert {c.payload_bytes for c in collectives[:reduces]} == {rows // 2 * width * 32 * 4}
        decode, prefill = (
            {n: [tuple(axis for atom in dim for axis in atom.axes) for dim in t.dims]
             for n, (_, t) in step.inputs.items() if n.startswith("_cache.")}
            for step in (programs.decode, programs.prefill(11))
        )  # fmt: skip
        assert all(dims == [("dp",), ("tp",), (), ()] for dims in decode.values())
        assert decode == prefill, "keys and values are made where they are held"


def test_a_row_of_one_data_coordinate_alone_is_written_there() -> None:
    """Under dp=2 rows 0 and 1 lie on the first coordinate: a prefill's first row is for them."""
    _, trainer = ready("gpt2", "dp=2, tp=2")
    trainer.generate(PROMPTS, LIMITS, rows=3, pad_token_id=0)
    forms = [form for form in trainer._generator.programs._by_row if form.rows == 3]
    programs = trainer._generator.programs._by_row[forms[0]]
    assert programs.form.rows == 4, "parts of equal size"
    assert [programs.joins_at(row) for row in range(4)] == [0, 0, 1, 1]


def test_programs_are_bounded_and_said_once() -> None:
    model, batch = gpt2(layers=1, batch=4, seq=8, vocab=32, width=16)  # 64 positions
    trainer = shardc.compile(model, batch, mesh="dp=1", plan={}, mode="eval").launch()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            list(trainer.generate_stream(iter([[1] * n for n in (1, 2, 9, 12, 3, 8)]), 3, rows=2, eos_token_id=[]))
    said = [str(one.message) for one in caught if "program" in str(one.message) or "compiled" in str(one.message)]
    assert len(said) == 2
    assert sum("for each power of two of tokens" in one for one in said) == 1
    programs = trainer._generator.programs
    assert sorted(form.prompt for form, _ in programs._prefills) == [8, 16]
    assert sorted(form.length for form in programs._by_row) == [8, 16]


# ---------------------------------------------------------------------- beside training
def test_a_stream_is_by_the_weights_that_it_began_with_or_says_so() -> None:
    model, batch = gpt2(batch=4, seq=8, layers=1, vocab=96, width=32, dropout=0.2)
    spread(model)
    adam = torch.optim.AdamW(model.parameters(), 1e-2)
    plan = {"params": GPT2, "inputs": DP}
    trainer = shardc.compile(model, batch, mesh="dp=2, tp=2", plan=plan, optimizer=adam).launch()
    options: dict[str, Any] = {"rows": 2, "eos_token_id": [], "pad_token_id": 0}
    before = trainer.generate(PROMPTS, 6, **options)
    assert [list(row) for row in before.tokens] == [alone(model, p, 6, eos_token_id=[]) for p in PROMPTS]
    stream = trainer.generate_stream(PROMPTS, 6, **options)
    first = next(stream)
    trainer.evaluate([batch])
    second = next(stream)
    trainer.generate(PROMPTS[:2], 3)
    trainer.step(batch)
    wrong = code_of(lambda: list(stream))
    assert wrong.code == "SC574"
    assert [first.tokens, second.tokens] == [before.tokens[first.prompt], before.tokens[second.prompt]]
    after = trainer.generate(PROMPTS, 6, **options)
    assert after.tokens != before.tokens
    trainer.sync_to(model)
    assert [list(row) for row in after.tokens] == [alone(model, p, 6, eos_token_id=[]) for p in PROMPTS]


# ---------------------------------------------------------------------- what is refused
def code_of(act: Any) -> ShardcError:
    with pytest.raises(ShardcError) as caught:
        act()
    assert all(d.hint for d in caught.value.diagnostics)
    return caught.value


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"rows": 0}, "SC572", "rows=0"),
    ({"rows": True}, "SC572", "rows=True"),
    ({"rows": 2.0}, "SC572", "rows=2.0"),
    ({"prompts": [[1], []]}, "SC573", "prompt 1 has no token"),
    ({"prompts": []}, "SC573", "there are no prompts"),
    ({"prompts": [[1], [2, 96]]}, "SC573", "prompt 1 has the token 96"),
    ({"prompts": iter([[1], []])}, "SC573", "prompt 1 has no token"),
    ({"prompts": iter([[1], [2, 96]])}, "SC573", "prompt 1 has the token 96"),
    ({"prompts": iter([5, 6])}, "SC573", "prompt 0 is no list of token ids"),
    ({"prompts": iter([[1], [[2], [3]]])}, "SC573", "prompt 1 is 2 prompts"),
    ({"prompts": iter(["a"])}, "SC573", "there is no tokenizer"),
    ({"prompts": 7}, "SC573", "the prompts are of type int"),
    ({"prompts": iter([[1]]), "attention_mask": [[1]]}, "SC573", "beside prompts that come one by one"),
    ({"max_new_tokens": 0}, "SC572", "transformers refuses"),
    ({"max_new_tokens": [1, 0]}, "SC572", "prompt 1: transformers refuses"),
    ({"max_new_tokens": [1]}, "SC572", "has 1 numbers, and there are 2 prompts"),
    ({"max_new_tokens": [1, 2, 3]}, "SC572", "has 3 numbers, and there are 2 prompts"),
    ({"max_new_tokens": [1, 2.5]}, "SC572", "of prompt 1 is 2.5"),
    ({"max_new_tokens": [1, True]}, "SC572", "of prompt 1 is True"),
    ({"prompts": iter([[1], [2]]), "max_new_tokens": iter([3])}, "SC572", "has 1 numbers, and there are more prompts"),
    ({"max_cache_len": 4, "prompts": [[1], [2] * 3]}, "SC573", "prompt 1: 6 tokens do not fit into a cache"),
    ({"max_cache_len": 4, "prompts": iter([[1], [2] * 3])}, "SC573", "prompt 1: 6 tokens do not fit into a cache"),
    ({"prompts": [[1], [2] * 62]}, "SC573", r"no position 64, which the last token that is read of prompt 1"),
    ({"prompts": iter([[1], [2] * 62])}, "SC573", "no position 64"),
    (
        {"max_length": 3, "max_new_tokens": None, "prompts": iter([[1], [2] * 3])},
        "SC572",
        "prompt 1: .* max_length is 3",
    ),
    ({"num_beams": 2}, "SC572", "num_beams=2"),
    ({"num_beams": 2, "prompts": iter([[1]])}, "SC572", "num_beams=2"),
]


@pytest.mark.parametrize(("changed", "code", "said"), REFUSED)
def test_what_is_refused(changed: dict[str, Any], code: str, said: str) -> None:
    _, trainer = ready("gpt2", "dp=1")
    given = {"prompts": [[1], [2, 3]], "max_new_tokens": 4, "rows": 2, "eos_token_id": []} | changed
    if isinstance(given["prompts"], Iterator):  # what comes one by one is used up: a copy for the test's next run
        given["prompts"] = iter(list(given["prompts"]))
    wrong = code_of(lambda: list(trainer.generate_stream(**given)))
    assert wrong.code == code
    assert re.search(said, wrong.diagnostics[0].message)


def test_limits_of_each_prompt_need_rows() -> None:
    _, trainer = ready("gpt2", "dp=1")
    wrong = code_of(lambda: trainer.generate([[1], [2]], [3, 4]))
    assert wrong.code == "SC572"
    assert "pass rows=" in str(wrong)


def test_an_encoder_decoder_model_begins_its_rows_together() -> None:
    _, trainer = ready("t5", "tp=2")
    wrong = code_of(lambda: trainer.generate([[1], [2]], 3, rows=2))
    assert wrong.code == "SC571"
    assert "T5ForConditionalGeneration" in str(wrong)


def test_an_iterator_that_fails_ends_the_stream_and_nothing_else() -> None:
    _, trainer = ready("gpt2", "dp=1")

    def prompts() -> Iterator[list[int]]:
        yield [5, 7]
        yield [9]
        raise OSError("the disk is gone")

    stream = trainer.generate_stream(prompts(), iter([2, 9]), rows=2, eos_token_id=[])
    assert next(stream).prompt == 0
    with pytest.raises(OSError, match="the disk is gone"):
        next(stream)
    assert len(trainer.generate([[5, 7]], 3, rows=2, eos_token_id=[]).tokens[0]) == 3


def test_what_is_odd_and_allowed() -> None:
    model, trainer = ready("gpt2", "dp=1")
    exact = alone(model, [5, 7], 6, eos_token_id=[])
    end = exact[2]
    ended = exact[: exact.index(end) + 1]
    for rows in (1, 9):
        found = trainer.generate([[5, 7]], 6, rows=rows, eos_token_id=[end, end, end], pad_token_id=0)
        assert [list(row) for row in found.tokens] == [ended]
    assert [list(row) for row in trainer.generate([[5, 7], [5]], 1, rows=1).tokens] == [
        exact[:1], alone(model, [5], 1)
    ]  # fmt: skip
    assert list(trainer.generate_stream(iter([]), 6)) == []
    tensor = torch.tensor([[0, 5, 7], [4, 5, 7]])
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    masked = trainer.generate(tensor, torch.tensor([6, 2]), rows=2, attention_mask=mask, eos_token_id=[])
    assert [list(row) for row in masked.tokens] == [exact, alone(model, [4, 5, 7], 2, eos_token_id=[])]


@pytest.mark.parametrize("sample", [False, pytest.param(True, marks=pytest.mark.long)])
def test_scores_that_are_no_numbers_name_the_prompt(sample: bool) -> None:
    model, batch = gpt2(layers=1, batch=4, seq=8, vocab=32, width=16)
    with torch.no_grad():
        model.get_input_embeddings().weight[9] = float("nan")  # type: ignore[operator]
    trainer = shardc.compile(model, batch, mesh="dp=1", plan={}, mode="eval").launch()
    stream = trainer.generate_stream(
        [[1], [2], [3, 9]], [2, 1, 4], rows=2, do_sample=sample, eos_token_id=[], pad_token_id=0
    )
    wrong = code_of(lambda: list(stream))
    assert wrong.code == "SC509"
    assert "new token 0 of prompt" in str(wrong)


@pytest.mark.long  # what each sends: the decode step's test above, and that of `test_generate.py`
def test_the_form_of_a_batch_is_what_it_was() -> None:
    """A prefill of other rows than the decode program's is beside that of a batch."""
    model, batch, params = made("gpt2")
    program = shardc.compile(model, batch, mesh="dp=2, tp=2", plan={"params": params, "inputs": DP}, mode="eval")
    prefill, decode = program.generation(Form(4, 8, 16))
    joining = program.generation_step(Form(2, 8, 8), decode)
    assert [c.kind for c in joining.collectives()] == [c.kind for c in prefill.collectives()]
