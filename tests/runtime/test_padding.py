"""`pad: true`: a padded step is the step on the batch itself; where it could not be, it is refused."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardc
from shardc.ir.diagnostic import ShardcError
from shardc.runtime.train.trainer import Trainer

VOCAB, WIDTH = 11, 8
DP = {"*": "dp, -"}
TOKENS = {"tokens": "labels"}


class Reader(nn.Module):
    """One layer of attention over all positions, or those before; `flaw` is what sees padding."""

    def __init__(self, causal: bool = True, flaw: str = "", drop: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.causal, self.flaw, self.drop = causal, flaw, drop
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(12, WIDTH)
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCAB)
        self.norm = nn.BatchNorm1d(WIDTH) if flaw == "batch norm" else nn.LayerNorm(WIDTH)
        self.double()
        if flaw == "hidden":  # at this point of training the loss does not depend on it, but gradients do
            nn.init.zeros_(self.head.weight)

    def forward(self, ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        x = x + F.dropout(self.attend(x, attention_mask), self.drop, self.training)
        if self.flaw in ("mean", "hidden"):
            x = x + x.mean(1, keepdim=True)
        elif self.flaw == "size":
            x = x * ids.shape[1]
        x = self.norm(x.flatten(0, 1)) if self.flaw == "batch norm" else self.norm(x).flatten(0, 1)
        if self.flaw == "sum":
            return F.cross_entropy(self.head(x), labels.flatten(), reduction="sum") / labels.numel()
        return F.cross_entropy(self.head(x), labels.flatten())

    def attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        if mask is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).squeeze(1)
        return F.scaled_dot_product_attention(q, k, v, mask.bool()[:, None, None, :]).squeeze(1)


def batch(rows: int, length: int, seed: int = 0, masked: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    given = {name: torch.randint(VOCAB, (rows, length), generator=generator) for name in ("ids", "labels")}
    given["labels"][0, 0] = -100
    if masked:
        given["attention_mask"] = torch.ones_like(given["ids"])
        given["attention_mask"][0, -1] = 0
    return given


def launched(model: nn.Module, mesh: str = "dp=2", masked: bool = False, **plan: Any) -> Trainer:
    plan = {"inputs": DP, "loss": TOKENS, "pad": True, **plan}
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-4)
    return shardc.compile(model, batch(8, 6, masked=masked), mesh=mesh, plan=plan, optimizer=optimizer).launch()


def eager(model: nn.Module, given: list[dict[str, Tensor]]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-4)
    losses: list[float] = []
    for one in given:
        optimizer.zero_grad()
        loss = model(**one)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def counted(trainer: Trainer) -> list[tuple[int, ...]]:
    """The shapes that programs with an update are compiled for from now on."""
    seen: list[tuple[int, ...]] = []
    inner = trainer._programs._compile
    assert inner is not None

    def compile(given: dict[str, Tensor], updates: bool) -> Any:
        seen.extend([tuple(given["ids"].shape)] * updates)
        return inner(given, updates)

    trainer._programs._compile = compile
    return seen


FEW = [(8, 6), (5, 6), (3, 4), (8, 6), (8, 3)]
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "dp2": ("dp=2", {}),
    "zero 3": ("dp=2", {"storage": {"zero": 3, "axes": ["dp"]}, "clip_grad_norm": 1e3}),
    "accumulate": ("dp=2", {"accumulate": 4}),
    "pp2 dp2": ("pp=2, dp=2", {"pipeline": {"microbatches": 4, "stages": 2}}),
    "tp2": ("tp=2", {"inputs": {}, "params": {"head.weight": "tp, -"}}),
}


@pytest.mark.parametrize(
    "name", [name if name == "accumulate" else pytest.param(name, marks=pytest.mark.long) for name in PLANS]
)
def test_padded_steps_are_those_of_plain_training(name: str) -> None:
    mesh, plan = PLANS[name]
    trainer = launched(Reader(), mesh, **plan)
    compiled = counted(trainer)
    given = [batch(*shape, seed=k) for k, shape in enumerate(FEW)]
    model = Reader()
    losses = eager(model, given)
    for one, loss in zip(given, losses, strict=True):
        assert float(trainer.step(one).loss) == pytest.approx(loss, rel=1e-12)
    for key, value in trainer.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[key], rtol=1e-10, atol=1e-12)
    assert compiled == []


def test_a_mask_hides_what_is_added_from_attention_over_all_positions() -> None:
    given = [batch(*shape, seed=k, masked=True) for k, shape in enumerate(FEW[:3])]
    trainer = launched(Reader(causal=False), masked=True)
    losses = eager(Reader(causal=False), given)
    assert [float(trainer.step(one).loss) for one in given] == pytest.approx(losses, rel=1e-12)


def test_a_mask_of_another_name_is_named_by_the_plan() -> None:
    class Named(Reader):
        def forward(self, ids: Tensor, labels: Tensor, valid: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(ids, labels, valid)

    def named(shape: tuple[int, int]) -> dict[str, Tensor]:
        one = batch(*shape, masked=True)
        return {"ids": one["ids"], "labels": one["labels"], "valid": one["attention_mask"]}

    model = Named(causal=False)
    plan = {"inputs": DP, "loss": TOKENS, "pad": "valid"}
    trainer = shardc.compile(model, named((8, 6)), mesh="dp=2", plan=plan).launch()
    assert float(trainer.step(named((5, 4))).loss) == pytest.approx(float(model(**named((5, 4))).detach()), rel=1e-12)
    with pytest.raises(ShardcError, match="SC202"):
        shardc.compile(model, named((8, 6)), mesh="dp=2", plan={**plan, "pad": "vallid"})


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("flaw", "shape", "what"),
    [
        ("not causal", (8, 4), "in the place of what is added, the loss"),
        ("mean", (8, 4), "in the place of what is added, the loss"),
        ("hidden", (8, 4), "in the place of what is added, the gradient of head.weight would"),
        ("batch norm", (5, 6), "in the place of what is added, the loss"),
        ("size", (8, 4), "of a part of the batch, the loss"),
        ("sum", (7, 6), "of a part of the batch, the loss"),
    ],
)
def test_padding_that_would_be_seen_is_refused(flaw: str, shape: tuple[int, int], what: str) -> None:
    model = Reader(causal=False) if flaw == "not causal" else Reader(flaw=flaw)
    trainer = launched(model)
    if flaw != "hidden":
        trainer.step(batch(8, 6))
    before = {name: t.clone() for name, t in trainer.state.items()}
    with pytest.raises(ShardcError, match=rf"SC548(.|\n)*{what}"):
        trainer.step(batch(*shape))
    assert all(torch.equal(t, trainer.state[name]) for name, t in before.items())
    assert trainer.intact
    trainer.step(batch(8, 6))
    if flaw in ("not causal", "mean"):  # rows are no matter
        trainer.step(batch(5, 6))


def test_dropout_of_added_rows_changes_nothing() -> None:
    """Masks go by an element's place, and rows stand last: those of the batch are what they are without the others."""
    padded, plain = launched(Reader(drop=0.4)), launched(Reader(drop=0.4), pad=False)
    for k, shape in enumerate(((8, 6), (5, 6), (8, 6))):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            losses = [float(trainer.step(batch(*shape, seed=k)).loss) for trainer in (padded, plain)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    with pytest.raises(ShardcError, match="SC548"):
        launched(Reader(drop=0.4, flaw="size")).step(batch(8, 4))


def test_what_is_larger_has_a_program_of_its_own_and_others_are_padded_to_the_smallest() -> None:
    trainer = launched(Reader())
    compiled = counted(trainer)
    model = Reader()
    given = [batch(*shape, seed=k) for k, shape in enumerate([(8, 9), (8, 7), (8, 5), (9, 6)])]
    losses = eager(model, given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert [float(trainer.step(one).loss) for one in given] == pytest.approx(losses, rel=1e-12)
    assert compiled == [(8, 9), (9, 6)]


def test_pad_needs_a_loss_that_is_a_mean_over_tokens() -> None:
    with pytest.raises(ShardcError, match="SC548"):
        shardc.compile(Reader(), batch(8, 6), mesh="dp=2", plan={"inputs": DP, "pad": True})
    for wrong in (1, 0.5, ["ids"]):
        with pytest.raises(ShardcError, match="SC208"):
            shardc.compile(Reader(), batch(8, 6), mesh="dp=2", plan={"inputs": DP, "pad": wrong})


def test_a_batch_without_any_counted_token_gives_no_loss_and_no_gradient() -> None:
    trainer = launched(Reader(), accumulate=2)
    given = batch(4, 6)
    given["labels"][:] = -100
    trainer.step(batch(3, 6))
    assert float(trainer.step(given).loss) == 0.0


class Measured(Reader):
    """It returns a scalar beside its loss: of all positions, or of those that are labelled."""

    def __init__(self, labelled: bool, drop: float = 0.0) -> None:
        super().__init__(drop=drop)
        self.labelled = labelled

    def logits(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        return self.head(self.norm(x + F.dropout(self.attend(x, None), self.drop, self.training)))

    def predicted(self, ids: Tensor) -> Tensor:
        return self.logits(ids).argmax(-1)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits = self.logits(ids)
        right = (logits.argmax(-1) == labels).double()
        right = right.sum() / (labels != -100).sum() if self.labelled else right.mean()
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "right": right}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("drop", [0.0, 0.3])
def test_a_scalar_that_would_count_what_is_added_is_refused(drop: float) -> None:
    """The loss does not see it; the metric would be another one."""
    trainer, given = launched(Measured(False, drop), outputs={"right": ""}), batch(5, 6)
    given["labels"][1:] = Measured(False).predicted(given["ids"])[1:]
    with pytest.raises(ShardcError, match=r"SC548(.|\n)*of a part of the batch, the output right would"):
        trainer.step(given)
    launched(Measured(False, drop)).step(given)  # which returns none
    if not drop:
        found = launched(Measured(True), outputs={"right": ""}).step(given).scalars["right"]
        expected = float(Measured(True)(**given)["right"])
        assert expected > 0
        assert float(found) == pytest.approx(expected, rel=1e-12)


def test_a_scalar_that_is_zero_is_tried_again() -> None:
    model = Measured(False)
    trainer, given = launched(model, outputs={"right": ""}), batch(5, 6)
    given["labels"] = (model.predicted(given["ids"]) + 1) % VOCAB
    trainer.step(given)
    trainer.sync_to(model)
    given["labels"] = model.predicted(given["ids"])
    with pytest.raises(ShardcError, match=r"SC548(.|\n)*the output right would"):
        trainer.step(given)


def test_what_stays_zero_is_said() -> None:
    class Zero(Reader):
        def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            loss = super().forward(ids, labels)
            return {"loss": loss, "nothing": (loss * 0).detach()}

    trainer = launched(Zero(), outputs={"nothing": ""})
    what = "could not tell whether padding leaves the output nothing what it is: it was 0, or not finite"
    for step in range(6):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            trainer.step(batch(5, 6, seed=step))
        found = [str(w.message) for w in said if "could not tell" in str(w.message)]
        assert found == [f"4 padded batches {what}"] * (step == 3)


@pytest.mark.parametrize("labels", ["second half", "none"])
def test_padding_is_tried_on_tokens_that_count(labels: str) -> None:
    """Of a prompt that is ignored, the loss is 0, whatever it is divided by."""
    trainer, given = launched(Reader(flaw="sum")), batch(8, 4)
    if labels == "none":
        given["labels"][:] = -100
        assert float(trainer.step(given).loss) == 0.0
        given = batch(8, 4, seed=1)
    given["labels"][:, :2] = -100
    with pytest.raises(ShardcError, match=r"SC548(.|\n)*of a part of the batch, the loss"):
        trainer.step(given)
