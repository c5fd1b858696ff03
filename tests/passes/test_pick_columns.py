"""Cross-entropy picks labels' columns, with the same numbers bit by bit as masks of whole rows give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardc
from shardc.cost.memory import memory
from shardc.ir.graph import op_name
from shardc.ir.ops.columns import PICK_COLUMN, SUBTRACT_AT
from shardc.ir.text import print_graph
from shardc.passes.pick_columns import PickColumns

aten = torch.ops.aten
LABELS = [3, -100, 0, 6, 6, -100, 1, 2]


class Model(nn.Module):
    """Logits that also others read, where `watched`."""

    def __init__(self, watched: str = "", **options: Any) -> None:
        super().__init__()
        self.linear, self.watched, self.options = nn.Linear(5, 7), watched, options

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.linear(x)
        loss = F.cross_entropy(logits, labels, **self.options)
        match self.watched:
            case "log probabilities":
                return loss, logits.log_softmax(-1)
            case "shared":
                shifted = logits - logits.amax(-1, keepdim=True)
                return F.nll_loss(shifted - shifted.exp().sum(-1, keepdim=True).log(), labels) + shifted.sin().mean()
            case "more loss":
                return loss + logits.exp().mean() + logits.softmax(-1).square().sum()
            case "masked rows":
                own = torch.arange(7).view(1, 7) == labels.unsqueeze(1)
                return loss + torch.where(own, logits, 0.0).square().sum() + (logits * own).sum()
            case _:
                return loss


MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "ignored": {"ignore_index": 6},
    "smoothed": {"label_smoothing": 0.1},
    "weighted": {"weight": torch.arange(7) + 1.0},
    "log probabilities": {"watched": "log probabilities"},
    "more loss": {"watched": "more loss"},
    "shared": {"watched": "shared"},
    "masked rows": {"watched": "masked rows"},
}
DP = {"inputs": {"x": "dp, -", "labels": "dp"}}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "alone": ("dp=1", {}),
    "accumulate": ("dp=1", {"accumulate": 2}),
    "dp": ("dp=2", DP),
    "uneven": ("dp=3", DP),
    "zero-3": ("dp=2", {**DP, "storage": {"zero": 3, "axes": ["dp"]}, "bucket": True}),
    "recompute": ("dp=1", {"recompute": "full"}),
}


def compiled(model: str, layout: str, dtype: torch.dtype, **more: Any) -> shardc.Program:
    torch.manual_seed(0)
    options = dict(MODELS[model])
    if "weight" in options:
        options["weight"] = options["weight"].to(dtype)
    made = Model(**options).to(dtype)
    labels = [label if label >= 0 else options.get("ignore_index", label) for label in LABELS]
    batch = {"x": torch.randn(8, 5, dtype=dtype) * 3, "labels": torch.tensor(labels)}
    loss = (lambda out, _: out[0]) if made.watched == "log probabilities" else None
    mesh, plan = LAYOUTS[layout]
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    return shardc.compile(made, batch, mesh=mesh, plan={**plan, **more}, optimizer=optimizer, loss=loss)


def trained(program: shardc.Program) -> dict[str, Tensor]:
    trainer = program.launch()
    losses = {f"loss {step}": torch.as_tensor(trainer.step(program.sample).loss) for step in range(2)}
    return losses | {name: value.clone() for name, value in trainer.state_dict(("param", "state")).items()}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_the_numbers_are_those_of_masks(
    model: str, layout: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(PickColumns, "run", lambda _, graph: graph)
        before = compiled(model, layout, dtype)
    program = compiled(model, layout, dtype)
    assert program.body.calls_of(PICK_COLUMN)
    assert program.body.calls_of(SUBTRACT_AT) or model in ("smoothed", "shared")
    assert not before.body.calls_of(PICK_COLUMN)
    expected, found = trained(before), trained(program)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_program_is_verified_and_its_text_is_read_back(layout: str) -> None:
    program = compiled("plain", layout, torch.float32)
    report = program.verify()
    assert report, str(report)
    assert (report.eager_error or 0.0) < 1e-12
    text = print_graph(program.body, comments=False)
    assert print_graph(shardc.parse(text), comments=False) == text


def test_no_mask_of_columns_is_left() -> None:
    body = compiled("plain", "dp", torch.float32).body
    assert not body.calls_of(aten.eq.Tensor)
    assert not body.calls_of(aten.arange.default)


def test_what_others_read_of_a_mask_stays() -> None:
    body = compiled("masked rows", "dp", torch.float32).body
    assert body.calls_of(aten.eq.Tensor)


def test_split_vocabularies_and_kernels_keep_their_masks() -> None:
    split = {"params": {"linear.weight": "dp, -", "linear.bias": "dp"}}
    for layout, more in (("zero-3", {"fuse": True}), ("alone", {"mesh": "dp=1", "fuse": True})):
        assert not compiled("plain", layout, torch.float32, **more).body.calls_of(PICK_COLUMN)
    LAYOUTS["split"] = ("dp=2", split)
    try:
        body = compiled("plain", "split", torch.float32).body
    finally:
        del LAYOUTS["split"]
    assert body.calls_of(aten.eq.Tensor)
    assert not body.calls_of(PICK_COLUMN)


def test_rows_without_a_column() -> None:
    values, columns = torch.arange(12.0).view(3, 4), torch.tensor([[3], [-100], [4]])
    assert PICK_COLUMN(values, columns).tolist() == [[3.0], [0.0], [0.0]]
    less = SUBTRACT_AT(values, columns, torch.full((3, 1), 0.5))
    assert (values - less).tolist() == [[0, 0, 0, 0.5], [0, 0, 0, 0], [0, 0, 0, 0]]


def test_the_ops_give_the_strides_of_their_fakes() -> None:
    values, columns = torch.randn(4, 3).t(), torch.tensor([[3], [-100], [0]])
    amount = torch.randn(1, 3).t()
    for op, args in ((PICK_COLUMN, (values, columns)), (SUBTRACT_AT, (values, columns, amount))):
        real, fake = op(*args), op(*(x.to("meta") for x in args))
        assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)


# ---------------------------------------------------------------------- when a column is picked
def order(lines: str) -> list[str]:
    """The ops of a graph, after the pass. It holds no more than before."""
    graph = shardc.parse(f"""graph @step mesh(tp=2) {{
  %x = input "x" : f32[8, 7]
  %labels = input "labels" : i64[8, 1]
  %part = input "part" : i64[8@tp, 1]
  %large = input "large" : i64[8, 70]
  %early = shardc.all_gather(%part, axes=["tp"], atoms=[4], pos=0, size=8, shape=[8, 1]) : i64[8, 1]
  %shifted = mul.Scalar(%x, 0.5) : f32[8, 7]
{lines}
}}""")
    after = PickColumns().run(graph)
    for overlap in (False, True):
        assert memory(after, overlap=overlap).peak <= memory(graph, overlap=overlap).peak
    return [op_name(call.target) for call in after.calls()]


EXP = """  %exp = exp(%shifted) : f32[8, 7]
  %sum = sum.dim_IntList(%exp, [1], keepdim=True) : f32[8, 1]
"""
COLUMN = "  %column = clamp(%labels, 0, 6) : i64[8, 1]\n"
OWN = """  %columns = arange(7, dtype=i64) : i64[7] !const
  %row = view(%columns, [1, 7]) : i64[1, 7] !const
  %hit = eq.Tensor(%row, %column) : bool[8, 7]
  %own = where.ScalarOther(%hit, %shifted, 0.0) : f32[8, 7]
  %picked = sum.dim_IntList(%own, [1], keepdim=True) : f32[8, 1]
  %both = mul.Tensor(%sum, %picked) : f32[8, 1]
"""
RETURN = '  return output "both" = %both'
READ = "  %d = mul.Tensor(%exp, %both) : f32[8, 7]\n" + RETURN + ', output "d" = %d'


def test_a_column_is_picked_before_its_values_are_written_over() -> None:
    calls = order(EXP + COLUMN + OWN + READ)
    assert calls == ["mul.Scalar", "clamp", "shardc.pick_column", "exp", "sum.dim_IntList", "mul.Tensor", "mul.Tensor"]


PICKED_LATE = {
    "nothing reads what the other reader makes": EXP + COLUMN + OWN + RETURN,
    "values are read later": EXP
    + COLUMN
    + OWN
    + "  %late = neg(%shifted) : f32[8, 7]\n"
    + READ
    + ', output "l" = %late',
    "an input is read": (EXP + COLUMN + OWN + READ).replace("%shifted", "%x"),
    "columns of what is made of the values": EXP + "  %column = argmax(%exp, 1, True) : i64[8, 1]\n" + OWN + READ,
    "columns that are awaited": EXP
    + '  %whole = shardc.all_gather(%part, axes=["tp"], atoms=[4], pos=0, size=8, shape=[8, 1]) : i64[8, 1]\n'
    + COLUMN.replace("%labels", "%whole")
    + OWN
    + READ,
    "columns that are brought before": EXP + COLUMN.replace("%labels", "%early") + OWN + READ,
    "columns of larger values": EXP
    + "  %twice = mul.Scalar(%large, 2) : i64[8, 70]\n  %column = amax(%twice, [1], True) : i64[8, 1]\n"
    + OWN
    + READ,
    "columns that are one of two results": EXP
    + "  %most, %column = max.dim(%large, 1, True) : i64[8, 1], i64[8, 1]\n"
    + OWN
    + READ.replace('"both" = %both', '"both" = %both, output "most" = %most'),
}


@pytest.mark.parametrize("case", PICKED_LATE)
def test_other_columns_are_picked_where_they_were(case: str) -> None:
    calls = order(PICKED_LATE[case])
    assert calls.index("exp") < calls.index("shardc.pick_column")
