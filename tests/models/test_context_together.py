"""A sequence over an axis together with all else that plans say, and with all that losses do with tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardc
from tests.models.long_models import SMALL
from tests.models.test_context_hostile import VOCAB, Host, plan_of, tokens

WAYS = ("all_gather", "ring", "all_to_all")


def llama(dropout: float = 0.0) -> nn.Module:
    import transformers as hf

    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, attention_dropout=dropout))


# ---------------------------------------------------------------------- plans
@pytest.mark.sampled(1152)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("bucket", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
def test_a_step_with_all_of_a_plan(
    way: str, zero: int, recompute: str, accumulate: int, precision: str | None, bucket: bool, fuse: bool
) -> None:
    model = llama()
    batch = {"input_ids": torch.randint(1, 37, (4, 17), generator=torch.Generator().manual_seed(1))}
    batch["labels"] = batch["input_ids"]
    said: dict[str, Any] = {"recompute": recompute, "bucket": bucket, "fuse": fuse, "context": way}
    said |= {"accumulate": accumulate} if accumulate > 1 else {}
    said |= {"precision": precision} if precision else {}
    said |= {"storage": {"zero": zero, "axes": ["dp", "cp"]}} if zero else {}
    plan = {"mesh": "dp=2, cp=2", "inputs": dict.fromkeys(batch, "dp, cp"), **said}
    program = shardc.compile(model, batch, plan=plan, optimizer=torch.optim.AdamW(model.parameters(), 1e-2))
    report = program.verify()
    assert report.ok, str(report)
    assert program.prove().ok
    assert program.memory().peak > program.memory().stored


@pytest.mark.sampled(32)
@pytest.mark.parametrize("balance", ["none", "zigzag"])
@pytest.mark.parametrize("mesh", ["cp=2", "cp=4", "dp=2, cp=2", "cp=2, pp=2"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_dropout_drops_what_one_device_drops(mesh: str, recompute: str, balance: str) -> None:
    """Of probabilities, and of the residual stream: masks are counted by element, so each layout has the same."""
    import transformers as hf

    torch.manual_seed(0)
    sizes: Any = {"vocab_size": 37, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 4, "use_cache": False}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.2)
    model = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **drops))
    batch = dict.fromkeys(("input_ids", "labels"), torch.randint(1, 37, (4, 17)))
    plan = plan_of(mesh, balance) | {"recompute": recompute}
    plan["inputs"] = dict.fromkeys(batch, plan["inputs"]["ids"])
    if "pp" in mesh:
        plan["pipeline"] = {"axis": "pp", "microbatches": 2}
    report = shardc.compile(model, batch, plan=plan).verify()
    assert report.ok, str(report)
    assert max(row.error for row in report.rows) < 1e-12


# ---------------------------------------------------------------------- losses
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def _flat(logits: Tensor, labels: Tensor, **said: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **said)


def _shifted(labels: Tensor) -> Tensor:
    return F.pad(labels, (0, 1), value=-100)[:, 1:]


def _weighted(logits: Tensor, labels: Tensor, given: Tensor) -> Tensor:
    each = F.cross_entropy(logits.mT, labels, reduction="none")
    return (each * given).sum() / given.sum()


def _soft(logits: Tensor, labels: Tensor, given: Tensor) -> Tensor:
    wanted = F.one_hot(labels.clamp(min=0), VOCAB).double() * 0.7 + 0.3 / VOCAB
    both = F.kl_div(logits.log_softmax(-1), wanted, reduction="batchmean")
    return both + F.cross_entropy(logits.flatten(0, 1), wanted.flatten(0, 1), label_smoothing=0.2)


def _preferred(logits: Tensor, labels: Tensor, given: Tensor) -> Tensor:
    """The first half of a batch over the second: a mean over each sequence's own tokens."""
    known = labels[:, 1:] != -100
    scores = logits[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
    good, bad = ((scores * known).sum(1) / known.sum(1).clamp(min=1)).chunk(2)
    return -F.logsigmoid(good - bad).mean()


LOSSES: dict[str, Loss] = {
    "mean": lambda x, y, w: _flat(x, y),
    "sum": lambda x, y, w: _flat(x, y, reduction="sum"),
    "smooth": lambda x, y, w: _flat(x, y, label_smoothing=0.1),
    "classes": lambda x, y, w: _flat(x, y, weight=torch.linspace(0.5, 2, VOCAB).double(), label_smoothing=0.2),
    "shifted inside": lambda x, y, w: _flat(x, _shifted(y)),
    "cut short": lambda x, y, w: _flat(x[:, :-1], y[:, 1:], label_smoothing=0.1),
    "items of a batch": lambda x, y, w: _flat(x, _shifted(y), reduction="sum") / w.sum(),
    "weights of tokens": _weighted,
    "with a z-loss": lambda x, y, w: _flat(x, y) + 1e-2 * x.logsumexp(-1).square().mean(),
    "soft": _soft,
    "preferred": _preferred,
}
# Labels that are ignored, of a sequence: those of whole ranks, in some layouts.
IGNORED: dict[str, Callable[[int], slice]] = {
    "none": lambda n: slice(0, 0),
    "first half": lambda n: slice(0, n // 2),
    "last quarter": lambda n: slice(n - n // 4, n),
    "middle": lambda n: slice(n // 4, n - n // 4),
    "all but one": lambda n: slice(0, n - 1),
}


class Scored(Host):
    def forward(self, ids: Tensor, labels: Tensor, given: Tensor) -> Tensor:  # type: ignore[override]
        return LOSSES[self.case](self.head(self.hidden(ids)), labels, given)


@pytest.mark.sampled(880)
@pytest.mark.parametrize(("mesh", "length"), [("cp=2", 17), ("cp=4", 16), ("dp=2, cp=2", 18), ("cp=2, pp=2", 17)])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("balance", ["none", "zigzag"])
@pytest.mark.parametrize("ignored", IGNORED)
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str, ignored: str, balance: str, accumulate: int, mesh: str, length: int) -> None:
    torch.manual_seed(0)
    batch = tokens(length, 4 * accumulate)
    batch["labels"][:, IGNORED[ignored](length)] = -100
    batch["given"] = torch.rand(4 * accumulate, length).double() * (batch["labels"] != -100)
    plan = plan_of(mesh, balance)
    plan["inputs"]["given"] = plan["inputs"]["ids"]
    if "pp" in mesh:
        plan["pipeline"] = {"axis": "pp", "microbatches": 2 * accumulate}
    elif accumulate > 1:
        plan["accumulate"] = accumulate
    report = shardc.compile(Scored(name).double(), batch, plan=plan).verify()
    assert report.ok, str(report)
    assert max(max(row.error, row.eager_error or 0.0) for row in report.rows) < 1e-12
