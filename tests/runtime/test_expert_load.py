"""What steps say of the rows that experts were given, and padding beside experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import shardc
from shardc.ir.diagnostic import ShardcError
from shardc.ir.graph import info, update
from shardc.ir.ops.expert_capacity import LIMIT_ROWS
from shardc.ir.provenance import Derivation
from shardc.passes.normalize.limit_experts import limits_differ
from shardc.runtime.train.expert_load import ExpertLoad, LayerLoad
from tests.experts import routed
from tests.passes.test_dispatch import CHOSEN, TOKENS, Moved, mean_of_squares

LAID: dict[str, dict[str, Any]] = {
    "dp": {"mesh": "dp=2", "inputs": {"*": "dp"}},
    "ep, tokens whole": {"mesh": "ep=2", "params": {"experts.*": "ep"}},
    "sent": {
        "mesh": "ep=2",
        "params": {"experts.*": "ep"},
        "inputs": {"*": "ep"},
        "experts": {"dispatch": "all_to_all"},
    },
    "dp2 x ep2": {"mesh": "dp=2, ep=2", "params": {"experts.*": "ep"}, "inputs": {"*": "dp.ep"}},
    "accumulated": {"mesh": "dp=2", "inputs": {"*": "dp"}, "accumulate": 2},
}


def trainer(laid: dict[str, Any], ids: Tensor, **experts: Any) -> Any:
    torch.manual_seed(0)
    model, sample = Moved(4, bias=True), routed(ids)
    plan = laid | {"experts": laid.get("experts", {}) | experts}
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return shardc.compile(model, sample, plan=plan, loss=mean_of_squares, optimizer=adamw).launch()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", LAID)
def test_the_load_is_that_of_the_whole_batch(name: str) -> None:
    ids = torch.tensor([0, 0, 0, 1, 3, 3] * 4).view(4, TOKENS, CHOSEN)
    (metrics,) = trainer(LAID[name], ids, load=True).train([routed(ids)], 1, progress=False)
    load = metrics.experts.layers["experts"]
    assert (load.rows, load.dropped) == ((12, 4, 0, 8), 0)
    ranks = 2 if "ep" in LAID[name]["mesh"] else 1
    assert load.of_ranks == ((16, 8) if ranks == 2 else (24,))
    assert metrics.experts.imbalance == pytest.approx(16 / 12 if ranks == 2 else 1.0)
    assert "imbalance" in str(metrics)
    assert "dropped" not in str(metrics)


def test_without_the_word_nothing_is_counted() -> None:
    ids = torch.zeros(4, TOKENS, CHOSEN).long()
    found = trainer(LAID["sent"], ids)
    (metrics,) = found.train([routed(ids)], 1, progress=False)
    assert metrics.experts is None
    assert not any("load" in str(node) for node in found.body.calls())
    with pytest.raises(ShardcError, match=r"there is no metric 'experts\.imbalance'"):
        metrics.value("experts.imbalance")


@pytest.mark.parametrize(
    ("sizes", "ranks", "of_ranks"),
    [
        ((4,), (2,), (3, 12)),
        ((2, 2), (1, 2), (5, 10)),  # 2 ep: experts 0 and 2 are the first rank's
        ((2, 2), (2, 2), (1, 2, 4, 8)),
        ((4,), (3,), (3, 12, 0)),  # of an uneven share the last rank has none
        ((4,), (1,), (15,)),
    ],
)
def test_ranks_have_the_rows_of_their_experts(
    sizes: tuple[int, ...], ranks: tuple[int, ...], of_ranks: tuple[int, ...]
) -> None:
    load = LayerLoad((1, 2, 4, 8), 0, sizes, ranks)
    assert load.of_ranks == of_ranks
    assert load.imbalance == pytest.approx(max(of_ranks) * len(of_ranks) / 15)


def test_layers_with_fewer_experts_and_modules_that_are_called_again() -> None:
    table = torch.tensor([[1, 2, 0, 0, 1], [4, 4, 4, 4, 0], [0, 0, 0, 0, 0]])
    load = ExpertLoad.of(table, [["a", [2], [1]], ["b", [4], [2]], ["b", [4], [2]]])
    assert list(load.layers) == ["a", "b", "b#1"]
    assert load.layers["a"].rows == (1, 2)
    assert (load.dropped, load.routed, load.imbalance) == (1, 19, 1.0)
    assert load.where_dropped() == "1 of 19 rows were dropped: 1 in a"


class Tagger(torch.nn.Module):
    """Tokens with labels behind experts, whose router balances them, or does not."""

    def __init__(self, *, balances: bool) -> None:
        super().__init__()
        self.table, self.moved, self.balances = torch.nn.Embedding(10, 6), Moved(4, bias=True), balances
        self.router = torch.nn.Linear(6, 4)

    def forward(self, words: Tensor, tags: Tensor) -> Tensor:
        x = self.table(words)
        scale, ids = self.router(x).softmax(-1).topk(CHOSEN)
        y = self.moved(x, ids, scale)
        loss = torch.nn.functional.cross_entropy(y.flatten(0, 1), tags.flatten())
        return loss + self.router(x).logsumexp(-1).square().mean() if self.balances else loss


def tagging(*, balances: bool, **more: Any) -> tuple[Any, dict[str, Tensor], Tagger]:
    torch.manual_seed(0)
    model = Tagger(balances=balances)
    words = torch.randint(10, (8, 6))
    batch = {"words": words, "tags": words % 6}
    plan = {"mesh": "ep=2", "params": {"moved.experts.*": "ep"}, "inputs": {"*": "ep"}, "experts": "all_to_all"}
    plan |= {"loss": {"tokens": "tags"}, "pad": True} | more
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    program = shardc.compile(model, batch, plan=plan, optimizer=adamw)
    return program.launch(), {name: value[:5, :4] for name, value in batch.items()}, model


def test_shorter_batches_are_padded_beside_experts() -> None:
    """Tokens in the place of what is added go to other experts, whose sums have another order: that is no fault."""
    found, short, model = tagging(balances=False)
    loss = found.step(short).loss
    other, words = tagging(balances=False, pad=False)[0], short["words"]  # a program of that shape
    assert float(loss) == pytest.approx(float(other.step({"words": words, "tags": words % 6}).loss), rel=1e-5)
    assert model.training


def test_a_router_that_balances_what_is_added_is_refused_with_the_way_out() -> None:
    found, short, _ = tagging(balances=True)
    with pytest.raises(ShardcError) as refused:
        found.step(short)
    (wrong,) = refused.value.diagnostics
    assert wrong.code == "SC548"
    assert wrong.hint is not None
    assert "a router's loss counts rows that are added" in wrong.hint


def test_padding_would_take_the_room_of_tokens() -> None:
    with pytest.raises(ShardcError, match="what is added takes the room of tokens") as refused:
        tagging(balances=False, experts={"dispatch": "all_to_all", "capacity": 1.25})
    (wrong,) = refused.value.diagnostics
    assert wrong.code == "SC548"
    assert wrong.hint == "write capacity: exact; or leave pad out: a program a shape"


def test_rows_that_only_ranks_limit_are_a_fault() -> None:
    """But for calls that run one of them again."""
    ids = torch.zeros(4, TOKENS, CHOSEN).long()
    limited, free = (trainer(LAID["sent"], ids, **capacity) for capacity in ({"capacity": 2.0}, {}))
    assert limits_differ(free.body, free.body) == []
    (fault,) = limits_differ(free.body, limited.body)
    assert fault.endswith("limits rows, and not on one device")
    (limit,) = limited.body.calls_of(LIMIT_ROWS)
    update(limit, origin=Derivation("half", info(limit).name))
    assert limits_differ(free.body, limited.body) == []
