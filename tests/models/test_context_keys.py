"""Attention whose keys lie over an axis that its rows do not: gathered, or merged from each rank's softmax."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardc
from shardc import Program
from shardc.cost.flops import flops
from shardc.ir.graph import info, type_of
from shardc.ir.ops.attention_keys import (
    MERGE_LSE,
    MERGE_PARTS,
    SDPA_PART,
    SDPA_PART_BWD,
    SPLIT_PARTS,
    WEIGH_PART,
)
from shardc.ir.ops.collectives import all_reduce
from shardc.ir.schema import given
from shardc.ir.types import TensorType
from shardc.passes.type_check import type_faults

QUICK = {"collective_start_seconds": 1e-9, "link_bytes_per_second": 1e9}  # starts are free: 4 ranks pack no parts
FORMS = pytest.mark.parametrize("hardware", [{}, QUICK], ids=["packed", "apart"])


class Cross(nn.Module):
    """Rows that attend to a memory. `how`: by SDPA, or written out, where `dropout` is of the probabilities."""

    def __init__(
        self, heads: int = 4, kv: int = 2, width: int = 4, *, causal: bool = False, dropout: float = 0.0, how: str = ""
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.kv, self.width, self.causal, self.dropout, self.how = heads, kv, width, causal, dropout, how
        self.q, self.o = nn.Linear(16, heads * width), nn.Linear(heads * width, 16)
        self.k, self.v = nn.Linear(16, kv * width), nn.Linear(16, kv * width)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        def split(t: Tensor, heads: int) -> Tensor:
            return t.unflatten(-1, (heads, self.width)).transpose(1, 2)

        q, k, v = split(self.q(x), self.heads), split(self.k(memory), self.kv), split(self.v(memory), self.kv)
        if self.how == "written":
            k, v = (t.repeat_interleave(self.heads // self.kv, 1) for t in (k, v))
            scores = q @ k.transpose(-1, -2) * self.width**-0.5
            if mask is not None:
                scores = scores.masked_fill(~mask, -1e9)
            o = F.dropout(scores.softmax(-1), self.dropout) @ v
        else:
            o = F.scaled_dot_product_attention(
                q, k, v, mask, self.dropout, self.causal, enable_gqa=self.heads != self.kv
            )
        return self.o(o.transpose(1, 2).flatten(2)).square().mean()


def compiled(model: nn.Module, rows: int, keys: int, mesh: str = "cp=4", **said: Any) -> Program:
    """`said`: the rest of the plan, `mask`, and how `x` and `memory` lie."""
    generator = torch.Generator().manual_seed(3)
    dtype = next(model.parameters()).dtype
    batch: dict[str, Any] = {
        "x": torch.randn(2, rows, 16, generator=generator).to(dtype),
        "memory": torch.randn(2, keys, 16, generator=generator).to(dtype),
    }
    inputs = {"memory": said.pop("memory", "-, cp, -")} | ({"x": said.pop("x")} if "x" in said else {})
    if (mask := said.pop("mask", None)) is not None:
        batch["mask"] = mask
        if "lies" in said:
            inputs["mask"] = said.pop("lies")
    return shardc.compile(model, batch, plan={"mesh": mesh, "inputs": inputs, "context": {"keys": "merge"}} | said)


def exact(program: Program) -> None:
    report = program.verify()
    assert report.ok, str(report)
    assert program.prove().ok
    assert not type_faults(program.body)


def merged(program: Program) -> Program:
    """The program, which sends neither keys nor values."""
    count = Counter(node.target for node in program.body.calls())
    assert count[SDPA_PART] == count[WEIGH_PART] + count[SPLIT_PARTS] > 0
    assert (count[MERGE_LSE], count[MERGE_PARTS]) == (count[WEIGH_PART], count[SPLIT_PARTS])
    sent = [c for c in program.collectives() if c.kind == "all_gather" and ".merge_" not in c.value]
    assert not [c for c in sent if c.value.startswith(("k.", "v."))], sent
    return program


# ---------------------------------------------------------------------- values
@pytest.mark.sampled(12)
@pytest.mark.parametrize("keys", [16, 17, 50, 5])  # 5 over 4: one rank has none
@pytest.mark.parametrize("mesh", ["cp=2", "cp=4"])
@pytest.mark.parametrize("kv", [4, 2, 1])
@FORMS
def test_few_rows_and_many_keys(keys: int, mesh: str, kv: int, hardware: Any) -> None:
    exact(merged(compiled(Cross(4, kv), 3, keys, mesh, hardware=hardware)))


@pytest.mark.parametrize("rows", [1, 7, 24])
@pytest.mark.parametrize("keys", [17, 6])
@FORMS
def test_causal(rows: int, keys: int, hardware: Any) -> None:
    exact(merged(compiled(Cross(causal=True), rows, keys, hardware=hardware)))


@pytest.mark.parametrize(("mesh", "x", "memory"), [
    ("dp=2, cp=2", "dp, -, -", "dp, cp, -"),
    ("rows=2, cp=2", "-, rows, -", "-, cp, -"),
    ("a=2, b=2", "-, -, -", "-, a.b, -"),
    ("a=2, b=2", "-, -, -", "-, b.a, -"),
])  # fmt: skip
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("keys", [17, 12])
def test_meshes(mesh: str, x: str, memory: str, causal: bool, keys: int) -> None:
    program = compiled(Cross(causal=causal), 12, keys, mesh, x=x, memory=memory)
    exact(merged(program))


def test_heads_over_another_axis() -> None:
    tp = {"q.*": "tp", "k.*": "tp", "v.*": "tp"}
    exact(merged(compiled(Cross(), 5, 17, "cp=2, tp=2", params=tp)))


class Windowed(Cross):
    """Each row sees keys from so many places before its own to so many behind, and in chunks those of its own."""

    window: tuple[int, ...] = (-2, 0)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        row, key = torch.arange(x.shape[1])[:, None], torch.arange(memory.shape[1])
        first, last, *chunk = self.window
        seen = (key - row >= first) & (key - row <= last)
        return super().forward(x, memory, seen & (row // chunk[0] == key // chunk[0]) if chunk else seen)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mesh", ["cp=4", "cp=2"])
@pytest.mark.parametrize("window", [(-2, 0), (-2, 3), (2, 5), (-5, 0, 6), (-4, 4, 5)])
@FORMS
def test_a_window_of_keys(mesh: str, window: tuple[int, ...], hardware: Any) -> None:
    model = Windowed()
    model.window = window
    program = compiled(model, 17, 17, mesh, hardware=hardware)
    parts = [node for node in program.body.calls() if node.target in (SDPA_PART, SDPA_PART_BWD)]
    assert [tuple(given(node)["window"]) for node in parts] == [window, window]
    exact(merged(program))


@pytest.mark.parametrize("balance", ["zigzag", "none"])
def test_keys_in_zigzag(balance: str) -> None:
    exact(merged(compiled(Cross(causal=True), 20, 18, context={"keys": "merge", "balance": balance})))


def masks(kind: str, rows: int, keys: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if kind == "bias":
        return torch.randn(1, 4, rows, keys, generator=generator)
    mask = torch.rand(2, 1, 1 if kind == "keys" else rows, keys, generator=generator) < 0.5
    if kind == "first rank":
        mask[..., keys // 4 :] = False
    mask[0, :, 0] = kind == "first rank"  # a row that sees nothing, or sees one rank's keys alone
    if kind == "first rank":
        mask[..., keys // 4 :] = False
    return mask


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", ["rows", "keys", "first rank", "bias"])
@pytest.mark.parametrize("lies", ["-, -, -, cp", "-, -, -, -"])
@FORMS
def test_masks(kind: str, lies: str, hardware: Any) -> None:
    exact(merged(compiled(Cross(), 5, 17, mask=masks(kind, 5, 17), lies=lies, hardware=hardware)))


class Biased(Cross):
    """A bias that is learned, one number a head and key or one a head alone."""

    def __init__(self, keys: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4, 1, keys))

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, memory, self.bias)


@pytest.mark.parametrize("keys", [17, 1])
def test_the_gradient_of_a_mask(keys: int) -> None:
    exact(merged(compiled(Biased(keys), 5, 17)))


class Learned(nn.Module):
    """Queries that are parameters, as of a Perceiver or a Q-Former, in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(1, 3, 16))
        self.layers = nn.ModuleList(nn.MultiheadAttention(16, 4, batch_first=True) for _ in range(2))

    def forward(self, memory: Tensor) -> Tensor:
        x = self.queries.expand(memory.shape[0], -1, -1)
        for layer in self.layers:
            x = x + layer(x, memory, memory, need_weights=False)[0]
        return x.square().mean()


def test_learned_queries() -> None:
    plan = {"mesh": "dp=2, cp=2", "inputs": {"memory": "dp, cp, -"}, "context": {"keys": "merge"}}
    exact(merged(shardc.compile(Learned(), torch.randn(4, 9, 16), plan=plan)))


@FORMS
def test_with_buckets(hardware: Any) -> None:
    exact(merged(compiled(Cross(causal=True), 5, 17, "cp=2", bucket=True, accumulate=2, fuse=True, hardware=hardware)))


class Decoding(nn.Module):
    """One token a row, and a cache that each row has filled to another length: its key and value are put into it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        columns = torch.arange(keys.shape[2], device=x.device)
        here = (columns == position[:, None])[:, None, :, None]
        keys, values = torch.where(here, k, keys), torch.where(here, v, values)
        seen = (columns <= position[:, None])[:, None, None]
        o = F.scaled_dot_product_attention(q, keys, values, seen)
        return self.o(o.transpose(1, 2).flatten(2)), keys, values


@pytest.mark.parametrize("length", [64, 18])
def test_decoding_with_a_cache_along_its_sequence(length: int) -> None:
    cache = "dp, -, cp, -"
    batch = {"x": torch.randn(4, 1, 16), "position": torch.tensor([0, 17, 5, 9])}
    batch |= {"keys": torch.randn(4, 4, length, 4), "values": torch.randn(4, 4, length, 4)}
    inputs = {"x": "dp, -, -", "position": "dp", "keys": cache, "values": cache}
    program = shardc.compile(Decoding(), batch, plan={"mesh": "dp=2, cp=4", "inputs": inputs}, mode="eval")
    exact(merged(program))
    assert [c.kind for c in program.collectives()] == ["all_gather"]
    assert sum(c.bytes_per_rank for c in program.collectives()) < length * 4 * 4 * 4


def test_an_encoder_and_a_decoder() -> None:
    """BART: the encoder attends along a sharded sequence, and the decoder's few rows to it."""
    import transformers as hf

    torch.manual_seed(0)
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4, "dropout": 0.0}
    sizes |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "vocab_size": 37}
    config = hf.BartConfig(**sizes, max_position_embeddings=64, use_cache=False)
    tokens = torch.randint(3, 37, (2, 21), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "decoder_input_ids": tokens[:, :4].clone(), "labels": tokens[:, 1:5].clone()}
    plan = {"mesh": "cp=2", "inputs": {"input_ids": "-, cp"}, "context": {"keys": "merge"}}
    program = shardc.compile(hf.BartForConditionalGeneration(config), batch, plan=plan)
    exact(program)
    parts = [info(node).fqn for node in program.body.calls() if node.target is SDPA_PART]
    assert parts == [f"model.decoder.layers.{i}.encoder_attn" for i in range(2)]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("how", ["written", "written mask"])
def test_written_out_no_keys_are_sent(how: str, dropout: float) -> None:
    mask = masks("rows", 3, 33) if "mask" in how else None
    program = compiled(Cross(how="written", dropout=dropout), 3, 33, mask=mask)
    exact(program)
    assert not [c for c in program.collectives() if c.kind == "all_gather" and c.value.startswith(("k.", "v."))]


def test_dropout_of_probabilities() -> None:
    exact(compiled(Cross(dropout=0.3), 3, 33, mask=masks("rows", 3, 33)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@FORMS
def test_halves_are_merged_in_float32(dtype: torch.dtype, hardware: Any) -> None:
    program = merged(compiled(Cross().to(dtype), 3, 17, hardware=hardware))
    exact(program)
    summed = next(n for n in program.body.calls() if n.target in (all_reduce, MERGE_PARTS) and info(n).phase == "fwd")
    assert "sdpa" in info(summed).name
    assert type_of(summed).dtype == torch.float32


def test_what_is_recomputed_gathers_no_log_sums_again() -> None:
    program = merged(compiled(Cross(), 3, 17, recompute="full"))
    exact(program)
    assert [c.phase for c in program.collectives() if ".merge_" in c.value] == ["fwd"]


# ---------------------------------------------------------------------- what is sent, and what is chosen
def sent(program: Program, *starts: str) -> int:
    return sum(c.bytes_per_rank for c in program.collectives() if c.value.startswith(starts))


def test_bytes() -> None:
    rows, keys, heads, kv, width, n = 3, 64, 4, 2, 4, 4
    log_sums, output = 2 * heads * rows * 4, 2 * heads * rows * width * 4
    packs, merges = (compiled(Cross(heads, kv, width), rows, keys, hardware=h) for h in ({}, QUICK))
    assert sent(packs, "sdpa") == (n - 1) * (log_sums + output)
    assert sent(merges, "sdpa.merge_lse") == (n - 1) * log_sums
    assert sent(merges, "sdpa.0") == sent(merges, "d.sdpa_bwd") == 2 * (n - 1) * output // n
    gathers = compiled(Cross(heads, kv, width), rows, keys, context={"keys": "all_gather"})
    assert sent(gathers, "k.", "v.") == 4 * (n - 1) * 2 * keys * kv * width * 4 // n
    for program in (packs, merges):
        ((_, axes, chosen, costs),) = program.plan["context"]
        assert (axes, chosen) == ("cp", "merge")
        assert {name: cost for name, cost, *_ in costs} == {
            "all_gather": sent(gathers, "k.", "v."),
            "merge": sent(program, "sdpa", "d.sdpa_bwd"),
        }


def test_a_rank_computes_its_share() -> None:
    merges, gathers = (compiled(Cross(), 4, 64, context={"keys": k}) for k in ("merge", "all_gather"))

    def of_attention(program: Program) -> int:
        return sum(n for _, op, n in flops(program.body).counts if op.startswith("shardc.sdpa"))

    assert 4 * of_attention(merges) == of_attention(gathers)


@pytest.mark.parametrize(("rows", "keys", "chosen"), [(2, 4096, "merge"), (1 << 17, 4, "all_gather")])
def test_auto_sends_less(rows: int, keys: int, chosen: str) -> None:
    program = compiled(Cross(1, 1), rows, keys, context={"keys": "auto"})
    assert [said[2] for said in program.plan["context"]] == [chosen]


@pytest.mark.parametrize(("slow", "chosen"), [("all_gather", "merge"), ("all_reduce", "all_gather")])
def test_auto_asks_the_tables_of_links(slow: str, chosen: str) -> None:
    """Of equal bytes: a machine whose collectives of one kind take a millisecond, and others none to speak of. Merging
    gathers the log-sums once, and all-gathering keys and values gathers four times."""
    kinds = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "permute")
    series = [{"kind": k, "group": 4, "seconds": {0: 1e-3 if k == slow else 1e-7}} for k in kinds]
    hardware = {"links": [{"name": "node", "series": series}], "collective_start_seconds": 1e-9}
    program = compiled(Cross(1, 1), 16, 16, context={"keys": "auto"}, hardware=hardware)
    assert [said[2] for said in program.plan["context"]] == [chosen]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rows", "keys"), [(5, 34), (8, 64)])
def test_rows_that_lie_over_the_axis_too_are_sent_instead(rows: int, keys: int, causal: bool) -> None:
    program = merged(compiled(Cross(causal=causal), rows, keys, x="-, cp, -"))
    exact(program)
    if not causal and rows == 8:
        ((*_, costs),) = program.plan["context"]
        told = next(cost[1] for cost in costs if cost[0] == "merge")
        moved = [c for c in program.collectives() if c.kind != "all_reduce"]
        assert told == sum(c.bytes_per_rank for c in moved), moved
        assert "sdpa.0.reduce_scatter" in [c.value for c in moved]


@pytest.mark.parametrize(("rows", "keys", "chosen"), [(8, 1 << 18, "merge"), (1 << 14, 8, "all_gather")])
def test_auto_of_rows_that_lie_over_the_axis_too(rows: int, keys: int, chosen: str) -> None:
    program = compiled(Cross(1, 1), rows, keys, x="-, cp, -", context={"keys": "auto"})
    assert [said[2] for said in program.plan["context"]] == [chosen]


# ---------------------------------------------------------------------- what is said of it
@FORMS
def test_it_is_said_and_explained(hardware: Any) -> None:
    from shardc.cli.summary import divided_attention

    program = compiled(Cross(), 3, 64, hardware=hardware)
    (line,) = divided_attention(program)
    assert line.startswith("attention of the model: merge ")
    assert "(all_gather 12 KiB" in line
    (merge,) = [c.value for c in program.collectives() if ".merge_" in c.value]
    text = str(program.explain(merge))
    assert "merges the softmax over each rank's keys" in text
    assert 'memory = "-, cp, -"' in text
    assert "context:  merge" in text
    if hardware:
        assert "context:  merge" in str(program.explain("sdpa.0.all_reduce"))


def test_text_and_files(tmp_path: Any) -> None:
    program = compiled(Cross(), 3, 17)
    text = program.text() if callable(getattr(program, "text", None)) else str(program)
    assert "|softmax cp" in text
    assert TensorType.parse("f32[2, 4] |softmax cp") == TensorType.parse("f32[2, 4]").place(
        [(), ()], [("cp", "softmax")]
    )
    program.save(tmp_path / "program.json")
    loaded = Program.load(tmp_path / "program.json")
    exact(loaded)


def test_a_strategy_that_no_keys_are_for_is_told() -> None:
    program = compiled(Cross(), 3, 8, memory="cp, -, -", mesh="cp=2")
    (said,) = [d for d in program.diagnostics if d.code == "SC240"]
    assert "context: {keys: merge}, and no attention is divided so" in said.message
