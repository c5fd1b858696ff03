"""Ranks that bring parts of a batch make the steps of one device that was given their rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import shardc
from shardc import Parts
from shardc.ir.diagnostic import ShardcError
from shardc.ir.graph import type_of
from shardc.ir.mesh import Mesh
from shardc.runtime.execute.data_parts import DataParts, data_parts_of
from shardc.runtime.execute.layout import shard
from shardc.runtime.execute.microbatches import Counted, feeds
from shardc.runtime.train.feeding import Feeding
from shardc.runtime.train.rank_part import RankPart
from shardc.runtime.train.replicas import Peers

Batch = dict[str, Tensor]


class Tokens(nn.Module):
    """A loss over the tokens that are labelled, a scalar beside it, and positions that are not of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop, self.head = nn.Embedding(16, 8), nn.Dropout(0.2), nn.Linear(8, 16)

    def forward(self, ids: Tensor, labels: Tensor, positions: Tensor | None = None) -> dict[str, Tensor]:
        x = self.embed(ids)
        logits = self.head(self.drop(x if positions is None else x + positions))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits, "right": (logits.argmax(-1) == labels).double().mean()}


def batch(step: int, rows: int = 8, *, positions: bool = False) -> Batch:
    generator = torch.Generator().manual_seed(step)
    ids, labels = (torch.randint(16, (rows, 5), generator=generator) for _ in range(2))
    # Unequal numbers of tokens: by row, by part, and by microbatch, one of which has none.
    labels[0], labels[3, 1:], labels[rows // 2 :: 3] = -100, -100, -100
    if step == 1:
        labels[: rows // 2] = -100
    if step == 2:
        labels[:] = -100
    more = {"positions": torch.randn(5, 8, generator=generator, dtype=torch.float64)} if positions else {}
    return {"ids": ids, "labels": labels, **more}


LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dp2": ("dp=2", {}),
    "dp2 tp2": ("dp=2, tp=2", {"params": {"head.weight": "tp, -"}}),
    "dp2 accumulate": ("dp=2", {"accumulate": 2}),
    "two axes": ("dp=2, sp=2", {"inputs": {"ids": "dp.sp, -"}, "accumulate": 2}),
    "zero": ("dp=2", {"storage": {"zero": 3, "axes": ["dp"]}, "accumulate": 2}),
    "cp": ("dp=2, cp=5", {"inputs": {"ids": "dp, cp"}}),
    "pp2 dp2": ("pp=2, dp=2", {"pipeline": {"microbatches": 2}}),
}


def program(layout: str, data: str | None = "per_rank", **options: Any) -> shardc.Program:
    mesh, plan = LAYOUTS[layout]
    torch.manual_seed(0)
    model = Tokens().double()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    plan = {"inputs": {"ids": "dp, -"}, "loss": {"tokens": "labels"}, "seed": 3, **plan}
    plan |= {"data": data} if data else {}
    return shardc.compile(model, batch(0, **options), mesh=mesh, plan=plan, optimizer=optimizer)


def parts_of(compiled: shardc.Program) -> DataParts:
    parts = data_parts_of(compiled.plan, compiled.staged.body)
    assert parts is not None
    return parts


def in_parts(parts: DataParts, whole: Batch) -> Parts:
    return Parts(parts.part(whole, index) for index in range(parts.count))


@pytest.mark.sampled(9)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_make_the_steps_that_their_rows_make_on_one_device(layout: str) -> None:
    """To the bit, dropout included: with a microbatch that has no tokens, a part that has none, and a whole batch."""
    per_rank, whole = program(layout), program(layout, None)
    parts = parts_of(per_rank)
    mine, theirs = per_rank.launch(), whole.launch()
    assert (mine.data_rank, mine.data_ranks) == (0, 1)  # simulated: a sampler of the rank's own gives the whole batch
    for step in range(4):
        data = batch(step)
        given = in_parts(parts, data) if step else data  # what is given whole stays whole
        assert float(mine.step(given).loss) == float(theirs.step(data).loss)
    evaluated = [
        t.evaluate(b) for t, b in ((mine, [in_parts(parts, batch(s)) for s in (5, 1)]), (theirs, [batch(5), batch(1)]))
    ]
    assert evaluated[0].loss == evaluated[1].loss
    assert evaluated[0].scalars == evaluated[1].scalars
    assert evaluated[0].items == evaluated[1].items == 2 * 8 * 5
    outputs = [
        t.predict(b).outputs["logits"].full() for t, b in ((mine, in_parts(parts, batch(6))), (theirs, batch(6)))
    ]
    assert torch.equal(*outputs)


def ranks(parts: DataParts, wholes: list[Batch], compiled: shardc.Program) -> list[list[dict[str, Tensor]]]:
    """What each rank of the mesh is fed by its feeding, given its part; `gather` has the counts of all."""
    counts = [
        torch.stack(
            [(rows != -100).sum() for rows in parts.part(wholes[0], parts.index(m))["labels"].chunk(parts.microbatches)]
        )
        for m in range(parts.mesh.world_size)
    ]
    peers = Peers(parts.mesh, torch.device("cpu"), lambda _: counts, [(0, m) for m in range(parts.mesh.world_size)])
    coordinates = [parts.index(m) for m in range(parts.mesh.world_size)]
    body = compiled.staged.body
    fed: list[list[dict[str, Tensor]]] = []
    for member, index in enumerate(coordinates):
        own = RankPart(parts, index, coordinates, peers)
        feeding = Feeding(body, None, None, compiled.plan.get("split", ()), parts, own)
        types = {n: type_of(v) for n, v in body.input_nodes().items()} | parts.types
        feeds_ = feeding.feeds(parts.part(wholes[0], index), 3, 0)
        fed.append([{n: shard(x, types[n], parts.mesh, member) for n, x in feed.items()} for feed in feeds_])
    return fed


@pytest.mark.sampled(6)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "pp2 dp2"])
@pytest.mark.parametrize("step", [0, 1, 2])
def test_each_rank_is_fed_from_its_part_what_it_is_fed_from_the_whole(layout: str, step: int) -> None:
    compiled = program(layout, positions=True)
    parts, whole = parts_of(compiled), batch(step, positions=True)
    assert set(parts.inputs) == {"ids", "labels"}
    body = compiled.staged.body
    types = {n: type_of(v) for n, v in body.input_nodes().items()}
    expected = Feeding(body, split=compiled.plan.get("split", ())).feeds(whole, 3, 0)
    for member, fed in enumerate(ranks(parts, [whole], compiled)):
        assert len(fed) == len(expected)
        for mine, theirs in zip(fed, expected, strict=True):
            assert mine.keys() == theirs.keys()
            assert {"ids", "labels", "positions", "loss:share"} <= mine.keys()
            for name, value in theirs.items():
                assert torch.equal(mine[name], shard(value, types[name], parts.mesh, member)), (member, name)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(1, 3), st.integers(1, 3), st.data())
def test_parts_and_the_whole_are_two_forms_of_one_batch(
    sizes: list[int], microbatches: int, rows: int, data: st.DataObject
) -> None:
    names = [f"a{i}" for i in range(len(sizes))]
    mesh, axes = Mesh(zip(names, sizes, strict=True)), data.draw(st.permutations(names))
    axes = tuple(axes[: data.draw(st.integers(1, len(axes)))])
    count = mesh.size(axes)
    x = torch.arange(microbatches * rows * count * 2).view(-1, 2)
    parts = DataParts(mesh, axes, count, rows, microbatches, {"x": type_of_rows(rows * count, axes)}, ("x", "y"))
    given_parts = [parts.part({"x": x, "y": x[0]}, index) for index in range(count)]
    joined = parts.joined(given_parts, microbatches)
    assert torch.equal(joined["x"], x)
    assert torch.equal(joined["y"], x[0])  # though it may have as many elements as a part has rows
    by_position = parts.joined([(part["x"], part["y"]) for part in given_parts], microbatches)
    assert torch.equal(by_position[0], x)
    assert torch.equal(by_position[1], x[0])
    own_types, types = parts.types, parts.inputs
    for member in range(mesh.world_size):
        for mine, theirs in zip(
            given_parts[parts.index(member)]["x"].chunk(microbatches), x.chunk(microbatches), strict=True
        ):
            assert torch.equal(shard(mine, own_types["x"], mesh, member), shard(theirs, types["x"], mesh, member))


def type_of_rows(rows: int, axes: tuple[str, ...]) -> Any:
    from shardc.ir.types import Atom, TensorType

    return TensorType(torch.int64, ((Atom(rows, axes),), (Atom(2),)))


def test_token_counts_are_those_of_all_parts() -> None:
    """A microbatch whose tokens are all in another part has its share, and no label made up but on the first part."""
    compiled = program("dp2 accumulate")
    parts, body = parts_of(compiled), compiled.staged.body
    part = {"ids": torch.zeros(4, 5, dtype=torch.long), "labels": torch.full((4, 5), -100)}
    for counts, first in ((torch.tensor([3, 0]), True), (torch.tensor([3, 0]), False), (torch.tensor([0, 0]), True)):
        counted = Counted(lambda mine, counts=counts: counts + 0 * mine, first)
        fed = feeds(body, part, types=parts.types, counted=counted)
        total = max(1, int(counts.sum()))
        assert [float(feed["loss:share"]) for feed in fed] == [int(n) / total for n in counts]
        labelled = [int((feed["labels"] != -100).sum()) for feed in fed]
        assert labelled == [int(first and n == 0) for n in counts]


def test_an_index_out_of_range_is_found_in_a_part() -> None:
    compiled = program("dp2 accumulate")
    parts = parts_of(compiled)
    trainer = compiled.launch()
    check = trainer._feeding.check  # pyright: ignore[reportPrivateUsage]
    assert check is not None
    part = parts.part(batch(0), 1)
    part["ids"][3, 2] = 16
    fed = feeds(compiled.staged.body, part, types=parts.types)
    with pytest.raises(ShardcError, match=r"SC507.*'ids' holds 16 at \[1, 2\]"):
        check(parts.repeated(fed[1]))
    check(parts.repeated(fed[0]))


# ---------------------------------------------------------------------- what is refused
class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.linear(x), y)


def two(inputs: dict[str, str], rows: int = 8, mesh: str = "dp=2, tp=2", **plan: Any) -> shardc.Program:
    sample = (torch.randn(rows, 4), torch.zeros(rows, dtype=torch.long))
    return shardc.compile(Two(), sample, mesh=mesh, plan={"inputs": inputs, "data": "per_rank", **plan})


@pytest.mark.parametrize(
    ("inputs", "options", "said"),
    [
        ({}, {}, "no input has its rows, dim 0, sharded"),
        ({"x": "dp", "y": "tp"}, {}, "rows lie over other axes: 'x' over dp, 'y' over tp"),
        ({"x": "dp"}, {"rows": 7}, "the 7 rows of 'x' are not 2 equal parts"),
        ({"x": "dp"}, {"rows": 6, "accumulate": 2}, "the 3 rows of a microbatch of 'x' are not 2 equal parts"),
        ({"x": "2*dp"}, {}, "the 8 rows of 'x' are not 2 equal parts, one after the other"),
        ({"x": "-", "y": "dp"}, {}, "'x' has 8 rows, as 'y' has, and they are not sharded"),
    ],
)
def test_what_ranks_cannot_bring_in_parts_is_refused(inputs: dict[str, str], options: Any, said: str) -> None:
    with pytest.raises(ShardcError) as caught:
        two(inputs, **options)
    assert said in str(caught.value)
    first = caught.value.diagnostics[0]
    assert first.code == "SC226"
    assert first.hint
    assert "test_data_parts.py" in (first.location or "")  # the plan's line
    whole: dict[str, Any] = {**options, "data": "whole"}
    assert two(inputs, **whole).verify().ok  # the same plan, of whole batches


def test_an_axis_of_one_rank_has_one_part() -> None:
    """A script that is run on fewer ranks stays as it is."""
    compiled = two({"x": "dp"}, mesh="dp=1, tp=2")
    assert parts_of(compiled).count == 1
    sample = (torch.randn(8, 4), torch.zeros(8, dtype=torch.long))
    trainer = compiled.launch()
    assert float(trainer.step(sample).loss) == float(trainer.step(Parts([sample])).loss)


def test_parts_that_do_not_fit_are_refused() -> None:
    compiled = program("dp2")
    parts, trainer = parts_of(compiled), compiled.launch()
    given_parts = in_parts(parts, batch(0))
    with pytest.raises(ShardcError, match=r"SC501.*1 parts are given, of a batch that has 2"):
        trainer.step(Parts(given_parts[:1]))
    with pytest.raises(ShardcError, match=r"SC501.*other leaves or shapes"):
        trainer.step(Parts([given_parts[0], {"ids": given_parts[0]["ids"]}]))
    with pytest.raises(ShardcError, match=r"SC501.*the batch is given in parts"):
        program("dp2", None).launch().step(given_parts)
    with pytest.raises(ShardcError, match=r"SC501.*0 parts are given"):
        trainer.evaluate([Parts()])
    other = program("dp2", positions=True)
    halves = in_parts(parts_of(other), batch(0, positions=True))
    halves[1]["positions"] = halves[1]["positions"] + 1
    with pytest.raises(ShardcError, match=r"SC542.*part 1 has another 'positions' than part 0"):
        other.launch().step(halves)


def test_the_program_s_file_says_whose_the_parts_are() -> None:
    compiled = program("dp2 accumulate")
    read = shardc.Program.from_json(compiled.to_json())
    assert (read.plan.get("data"), read.plan.get("split")) == ("per_rank", ["ids", "labels"])
    assert parts_of(read) == parts_of(compiled)
    step = in_parts(parts_of(read), batch(0))
    state = compiled.launch().state_dict()
    assert float(read.launch(state=state).step(step).loss) == float(compiled.launch().step(step).loss)
    assert shardc.Plan.parse("data: per_rank\n").dump() == "data: per_rank\n"
    assert shardc.Plan.of(data="per_rank").merge(shardc.Plan.of(data="whole")).dump() == ""
    for bad in ("rank", 3, None, ["per_rank"]):
        with pytest.raises(ShardcError, match="'data' should be whole or per_rank") as caught:
            shardc.Plan.from_dict({"data": bad})
        assert caught.value.code == "SC208"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("data", [None, "per_rank"])
def test_as_many_rows_as_a_microbatch_are_trained_on_once(data: str | None) -> None:
    """Of a program from a file, which can make no other, they are refused: it would take them for each microbatch."""
    compiled = program("dp2 accumulate", data)
    half = {name: value[:4] for name, value in batch(0).items()}
    alone = program("dp2", None).launch().step(half)  # in one microbatch
    assert float(compiled.launch().step(half).loss) == pytest.approx(float(alone.loss), rel=1e-12)
    from_file = shardc.Program.from_json(compiled.to_json())
    assert compiled.model is not None
    with pytest.raises(ShardcError, match=r"SC5(01|47)"):
        from_file.launch(state=compiled.model.state_dict()).step(half)
