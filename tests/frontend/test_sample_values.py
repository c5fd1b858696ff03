"""What forward asks of a batch is answered by the sample, and checked in every step; or refused while compiling."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc import ShardcError

TOKENS = torch.arange(32).reshape(4, 8) % 16
MESHES = {
    "dp2": ("dp=2", {"inputs": {"*": "dp"}}),
    "accumulate": ("dp=2", {"inputs": {"*": "dp"}, "accumulate": 2}),
    "tp2": ("tp=2", {"params": {"table.weight": "tp, -"}}),
    "pp2": ("pp=2", {"pipeline": {"microbatches": 2, "stages": 2}}),
}


class Asks(nn.Module):
    def __init__(self, asked: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.last, self.asked = nn.Embedding(16, 6), nn.Linear(6, 6), asked

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.asked(tokens, self.table(tokens)).tanh()).square().mean()


def bounded(tokens: Tensor, h: Tensor) -> Tensor:
    if tokens.max() >= 16:
        raise ValueError("there are 16 words")
    return h


def by_least(tokens: Tensor, h: Tensor) -> Tensor:
    return h * 2 if tokens[:, 0].min().item() % 2 == 0 else h


def by_list(tokens: Tensor, h: Tensor) -> Tensor:
    scale = sum(tokens.ge(0).sum(1).tolist()) / tokens.numel()
    return h * scale


def by_repeats(tokens: Tensor, h: Tensor) -> Tensor:
    rows = torch.ones_like(tokens[0]) * 2
    return h * torch.repeat_interleave(rows, rows).sum()


def written_in_place(tokens: Tensor, h: Tensor) -> Tensor:
    counts = torch.zeros(2, dtype=torch.long)
    counts[0] = tokens.ge(0).all()
    counts += 1
    return h * int(counts[0])


def as_numbers(tokens: Tensor, h: Tensor) -> Tensor:
    return h + torch.tensor([tokens.ge(0).sum() // tokens.numel(), 2]).sum()


def without_padding(tokens: Tensor, h: Tensor) -> Tensor:
    return h[tokens >= 0].reshape(h.shape)


def finite(tokens: Tensor, h: Tensor) -> Tensor:
    return h if torch.isfinite(h).all() else h.clamp(-1, 1)


def unbounded(tokens: Tensor, h: Tensor) -> Tensor:
    return h.clamp(-1, 1) if (torch.isinf(h) | torch.isnan(h)).any() else h


def never_dropped(tokens: Tensor, h: Tensor) -> Tensor:
    return h if torch.rand([]) < 0.0 else h * 3


HOLD = (bounded, by_list, by_repeats, written_in_place, as_numbers, without_padding, finite, unbounded, never_dropped)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("layout", MESHES)
@pytest.mark.parametrize("asked", HOLD, ids=lambda asked: asked.__name__)
def test_steps_are_those_of_eager_training(asked: Callable[[Tensor, Tensor], Tensor], layout: str) -> None:
    torch.manual_seed(0)
    model = Asks(asked).double()
    mesh, plan = MESHES[layout]
    program = shardc.compile(model, TOKENS, mesh=mesh, plan=plan)
    assert program.verify().ok
    other = (TOKENS * 5 + 3) % 16
    result = program.launch().step(other)
    model(other).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(result.grads[name], parameter.grad, rtol=0, atol=1e-12)


def test_a_note_names_each_line() -> None:
    program = shardc.compile(Asks(bounded), TOKENS, mesh="dp=2")
    (note,) = [d for d in program.diagnostics if d.code == "SC128"]
    assert note.severity == "note"
    assert "test_sample_values.py:" in (note.location or "")
    assert note.source_text == "if tokens.max() >= 16:"
    never = shardc.compile(Asks(never_dropped), TOKENS, mesh="dp=2")
    assert not [d for d in never.diagnostics if d.code == "SC128"], "it is so in every step"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", MESHES)
@pytest.mark.parametrize(
    ("asked", "batch"),
    [(by_least, TOKENS + TOKENS.eq(0).long()), (without_padding, TOKENS - 1)],
    ids=["another branch", "a mask with holes"],
)
def test_a_batch_that_answers_otherwise_is_refused(
    asked: Callable[[Tensor, Tensor], Tensor], batch: Tensor, layout: str
) -> None:
    mesh, plan = MESHES[layout]
    if layout == "accumulate" or layout == "pp2":  # each microbatch answers
        batch = torch.cat([batch[:2], batch[:2]])
    trainer = shardc.compile(Asks(asked), TOKENS, mesh=mesh, plan=plan).launch()
    trainer.step(TOKENS)
    with pytest.raises(ShardcError) as caught:
        trainer.step(batch % 16 if asked is by_least else batch.clamp(min=-1))
    assert caught.value.code in ("SC512", "SC507")  # an index of -1 is refused before
    if asked is by_least:
        assert caught.value.code == "SC512"
        assert "test_sample_values.py:" in (caught.value.diagnostics[0].location or "")
    assert trainer.step(TOKENS).loss.isfinite(), "no rank has begun the step that is refused"


def test_a_sample_whose_microbatches_answer_differently_is_refused_while_compiling() -> None:
    for plan in ({"accumulate": 2}, {"pipeline": {"microbatches": 2, "stages": 2}}):
        mesh = "pp=2" if "pipeline" in plan else "dp=2"
        with pytest.raises(ShardcError) as caught:
            shardc.compile(Asks(by_least), torch.cat([TOKENS[:2], TOKENS[:2] | 1]), mesh=mesh, plan=plan)
        assert caught.value.code == "SC512"
        assert "microbatch 1 of the sample" in str(caught.value)
        assert "test_sample_values.py:" in (caught.value.diagnostics[0].location or "")


def test_numbers_that_are_no_longer_finite_are_refused() -> None:
    model = Asks(finite)
    trainer = shardc.compile(model, TOKENS, mesh="dp=2", plan=MESHES["dp2"][1]).launch()
    trainer.state["table.weight"][0].fill_(float("inf"))
    with pytest.raises(ShardcError) as caught:
        trainer.step(TOKENS)
    assert caught.value.code == "SC512"


def of_weights(tokens: Tensor, h: Tensor) -> Tensor:
    return h if h.sum() > 0 else -h


def of_draws(tokens: Tensor, h: Tensor) -> Tensor:
    return h if torch.rand([]) < 0.5 else -h


def with_holes(tokens: Tensor, h: Tensor) -> Tensor:
    return h[tokens > 3].cumsum(0)


@pytest.mark.parametrize("asked", [of_weights, of_draws, with_holes], ids=lambda asked: asked.__name__)
def test_what_steps_answer_differently_is_refused_while_compiling(asked: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(ShardcError) as caught:
        shardc.compile(Asks(asked), TOKENS, mesh="dp=2")
    assert caught.value.code == "SC101"


class Floats(nn.Linear):
    def __init__(self, asked: Callable[[Tensor], Any]) -> None:
        super().__init__(6, 6)
        self.asked = asked

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input if self.asked(input) else -input).square().mean()


def test_of_floating_point_inputs_only_equality_is_asked() -> None:
    x = torch.randn(4, 6)
    assert shardc.compile(Floats(lambda x: (x == 0).sum() == 0), x, mesh="dp=2").verify().ok
    with pytest.raises(ShardcError) as caught:
        shardc.compile(Floats(lambda x: x.sum() > 0), x, mesh="dp=2")
    assert caught.value.code == "SC101"
    with pytest.raises(ShardcError) as caught:
        shardc.compile(Floats(lambda x: (x == 0).sum() == 0), x.to("meta"), mesh="dp=2")
    assert caught.value.code == "SC101", "a sample without values answers nothing"


def test_masks_of_torchs_own_modules_are_constants() -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True), 2)
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2)

        def forward(self, x: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            return self.decoder(x, self.encoder(x, mask=mask), tgt_mask=mask).square().mean()

    program = shardc.compile(Layers(), torch.randn(4, 5, 8), mesh="dp=2", plan={"inputs": {"*": "dp"}})
    assert program.verify().ok
    assert not [d for d in program.diagnostics if d.code == "SC128"]


@lru_cache(maxsize=1)
def ramp(n: int) -> Tensor:
    return torch.linspace(0, 1, n)


def test_a_full_cache_is_emptied_too() -> None:
    class Ramp(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return (super().forward(input) * ramp(6)).square().mean()

    ramp(5)
    shardc.compile(Ramp(6, 6), torch.randn(4, 6), mesh="dp=2")
    assert type(ramp(6)) is Tensor


class Scalars(nn.Module):
    """A tensor made of scalars that no step has in common."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        largest = torch.tensor([x[0].max(), x[1].max()])
        return (self.a(x) * largest[0]).square().mean() + largest.sum()


def test_scalars_of_a_step_stay_its_own() -> None:
    torch.manual_seed(0)
    batches = [{"x": torch.randn(4, 4, dtype=torch.float64)} for _ in range(2)]
    program = shardc.compile(Scalars().double(), batches[0], mesh="dp=2", plan={"inputs": {"x": "dp, -"}})
    assert all(program.verify(batch=batch).ok for batch in batches)
