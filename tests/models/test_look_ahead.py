"""Attention over an axis whose rows see by where keys are, ahead too or in chunks: sent and computed by reach.

Longer than 400 lines: all kinds of windows go through the same few functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardc
from shardc import Program
from shardc.explain.collective import explain
from shardc.ir.blocks import zigzag
from shardc.ir.graph import type_of
from shardc.ir.mesh import Mesh
from shardc.ir.ops.attention import SDPA
from shardc.ir.ops.attention_rows import (
    NEXT_KEYS,
    REACH_ROWS,
    REACH_SUM,
    SDPA_ROWS,
    SDPA_ROWS_BWD,
    layout,
    reach,
    reached,
)
from shardc.ir.schema import given
from shardc.passes.type_check import type_faults
from tests.decoder import DECODER
from tests.models.test_context import STRATEGIES, attention_flops, exact
from tests.models.test_windows import calls, change, sent_keys

# As calls of attention have them: from, to; chunks of, moved by, those before and behind.
AHEAD = ((-2, 2), (-1, 4), (0, 3), (-9, 9), (0, 0), (0, 99), (-99, 1), (2, 4), (-5, -1), (-99, -1), (3, 99))
CHUNKS = ((-99, 0, 8), (-99, 99, 4), (-99, 0, 5), (-99, 99, 16, 3), (-2, 1, 8), (-99, 99, 4, 0, 1), (-99, 99, 4, 2, 9))


class Seeing(nn.Module):
    """Attention alone, whose mask is written of positions."""

    def __init__(
        self, window: Sequence[int], heads: int = 4, keys: int = 2, width: int = 4, dropout: float = 0.0
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.window, self.width, self.dropout = tuple(window), width, dropout
        self.q = nn.Linear(16, heads * width)
        self.k, self.v = nn.Linear(16, keys * width), nn.Linear(16, keys * width)

    def seen(self, length: int) -> Tensor:
        i, j = torch.arange(length)[:, None], torch.arange(length)
        first, last, chunk, shift, earlier, later = (*self.window, 0, 0, 0, 0)[:6]
        seen = (j - i >= first) & (j - i <= last)
        if chunk:
            apart = (j + shift) // chunk - (i + shift) // chunk
            seen = seen & (apart >= -earlier) & (apart <= later)
        return seen

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        seen = self.seen(x.shape[1])
        if mask is not None:
            seen = seen & mask if mask.dtype == torch.bool else mask.masked_fill(~seen, float("-inf"))
        p = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, seen, dropout_p=p, enable_gqa=True).square().mean()


def alone(
    window: Sequence[int], length: int, mesh: str, context: Any, mask: str = "", rows: str = "cp", **said: Any
) -> Program:
    generator = torch.Generator().manual_seed(0)
    batch: dict[str, Any] = {"x": torch.randn(2, length, 16, generator=generator)}
    inputs = {"x": f"-, {rows}, -"}
    if mask:
        keep = torch.ones(2, 1, 1, length, dtype=torch.bool)
        keep[0, :, :, : length // 3] = False  # rows of padding see nothing
        keep[1, :, :, length // 2] = False
        if mask == "documents":
            document = torch.arange(length).expand(2, -1) // torch.tensor([[5], [length // 2 + 1]])
            keep = (document[:, :, None] == document[:, None, :])[:, None]
        batch["mask"], inputs["mask"] = keep, f"-, -, {rows if mask == 'documents' else '-'}, -"
    model = said.pop("model", Seeing(window))
    plan = {"mesh": mesh, "inputs": inputs, "context": context, **said}
    return shardc.compile(model, batch, plan=plan)


def windows_of(program: Program) -> list[Any]:
    return [list(given(node).get("window", ())) for node in program.reference.calls() if node.target is SDPA]


@pytest.mark.sampled(128)
@pytest.mark.parametrize("mask", ["", "padding", "documents"])
@pytest.mark.parametrize("balance", ["none", "zigzag"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("length", "mesh"), [(16, "cp=2"), (17, "cp=2"), (50, "cp=4"), (7, "cp=4")])
@pytest.mark.parametrize("window", AHEAD + CHUNKS)
def test_every_window(window: Any, length: int, mesh: str, strategy: str, balance: str, mask: str) -> None:
    """Back and ahead, of a rank's rows and of more; chunks that ranks share, and that lie between them."""
    program = alone(window, length, mesh, {"attention": strategy, "balance": balance}, mask)
    (said,) = windows_of(program)
    assert said or window in ((-99, 0, 8), (-99, 99, 16, 3)) or length == 7
    exact(program)


TP = {"q.*": "tp", "k.*": "tp", "v.*": "tp"}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("window", [(-3, 2), (-99, 0, 6), (-99, 99, 5)])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        ("dp=2, cp=2", {}),
        ("cp=2, tp=2", {"params": TP}),
        ("cp=2", {"recompute": "full", "fuse": True}),
        ("cp=2", {"model": "dropout"}),
        ("cp=2", {"model": "one key head"}),
    ],
)
def test_with_everything_else(mesh: str, said: dict[str, Any], strategy: str, window: Any) -> None:
    models = {"dropout": Seeing(window, dropout=0.3), "one key head": Seeing(window, keys=1)}
    said = said | {"model": models[said["model"]]} if "model" in said else said
    exact(alone(window, 18, mesh, strategy, "padding", **said))


@pytest.mark.parametrize("window", [(-3, 2), (-99, 0, 6)])
@pytest.mark.parametrize("length", [16, 18])
def test_hierarchical(window: Any, length: int) -> None:
    program = alone(window, length, "out=2, in=2", "hierarchical", rows="out.in")
    assert {"permute", "all_to_all"} <= {c.kind for c in program.collectives()}
    exact(program)


# ---------------------------------------------------------------------- what is sent and computed
KEY = 2 * 2 * 4 * 4  # of keys or of values: batch, heads, width, bytes


@pytest.mark.parametrize(
    ("window", "hops"),
    [
        ((-4, 4), [4, 4]),  # of the rank before, and of the one behind
        ((-1, 3), [1, 3]),
        ((0, 2), [2]),
        ((-9, 2), [8, 1, 2]),  # of the rank behind and of the third before, which is another
        ((-99, 0, 8), []),  # chunks are ranks' own
        ((-99, 0, 4), []),
        ((-99, 0, 16), [8]),  # two ranks share one: the second reads the first's
        ((-99, 99, 16), [8, 8]),
        ((-99, 0, 12), [8]),  # of [12, 24) a rank has [12, 16), and the one behind it 8
        ((-99, 99, 8, 4), [4, 4]),
        ((-2, 1, 16), [2, 1]),
        ((-99, 99, 4, 0, 1), [4]),
    ],
)
def test_a_rank_is_sent_what_its_rows_reach(window: Any, hops: list[int]) -> None:
    program = alone(window, 32, "cp=4", {"attention": "ring", "balance": "none"})
    assert sent_keys(program, "fwd") == [KEY * rows for rows in hops for _ in range(2)]
    assert sum(sent_keys(program, "bwd")) == 2 * 2 * KEY * sum(hops)  # keys and values once more, and their gradients
    assert not [c for c in program.collectives() if c.kind in ("all_gather", "reduce_scatter")]
    (said,) = program.plan.get("context", ())
    costs = {cost[0]: cost[1] for cost in said[3]}
    assert costs["ring"] == 3 * 2 * KEY * sum(hops)
    exact(program)


def test_each_run_of_a_zigzag_reaches() -> None:
    """Chunks of 8 are two of a zigzag's runs of 4, which two ranks have: the second reads the first's."""
    program = alone((-99, 0, 8), 32, "cp=4", {"attention": "ring", "balance": "zigzag"})
    assert sent_keys(program, "fwd") == [KEY * 4] * 4  # of the rank before, and, of the last runs, of the one behind
    assert not sent_keys(alone((-99, 0, 4), 32, "cp=4", {"attention": "ring", "balance": "zigzag"}), "fwd")


@pytest.mark.sampled(24)
@pytest.mark.parametrize("balance", ["none", "zigzag"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("window", AHEAD + CHUNKS)
@pytest.mark.parametrize("length", [16, 17, 50])
def test_reach_is_what_rows_see(length: int, window: Any, ranks: int, balance: str) -> None:
    """By counting: the keys that a rank's rows see and that are of the rank so many places before."""
    mesh = Mesh(cp=ranks)
    rows = str(zigzag(length, "cp", ranks) if balance == "zigzag" else length)
    seen = Seeing(window).seen(length)
    runs = [layout(rows, ("cp",), mesh, {"cp": r}) for r in range(ranks)]
    held = [[i for run in of_rank for i in range(run.start, run.start + run.extent)] for of_rank in runs]
    for places in range(1, ranks):
        most = 0
        for r in range(ranks):
            needs = {*seen[held[r]].any(0).nonzero().flatten().tolist()} & {*held[(r - places) % ranks]}
            parts = reached(rows, ("cp",), places, window, mesh, {"cp": r})
            assert {j for part in parts for j in range(part.start, part.start + part.extent)} == needs
            most = max(most, len(needs))
        assert reach(rows, ("cp",), window, mesh).get(places, 0) == most


@pytest.mark.parametrize("window", [(-16, 15), (-99, 0, 32), (-999, 999, 64), (-999, 0, 48), (-9, 9, 32)])
def test_what_is_hidden_is_not_computed(window: Any) -> None:
    """All ranks together compute the pairs that see each other, forward and backward, and none of them much more."""
    seen = int(Seeing(window).seen(256).sum())
    whole = alone(window, 256, "cp=1", {})
    assert attention_flops(whole) == 2 * 2 * 4 * seen * 7 * 4  # batch, heads; two products of forward, five of backward
    for strategy in ("ring", "all_gather"):
        for balance in ("none", "zigzag"):
            divided = alone(window, 256, "cp=4", {"attention": strategy, "balance": balance})
            each = [attention_flops(divided, rank) for rank in range(4)]
            assert sum(each) == attention_flops(whole)
            assert max(each) <= (1.4 if window[2:] == (48,) else 1.1) * attention_flops(whole) / 4


@pytest.mark.parametrize(
    ("window", "turned"),
    [((-5, 5), False), ((-99, 0, 16), False), ((-99, 0, 8), False), ((-999, 0, 64), False), ((-999, 1), True)],
)
def test_a_zigzag_is_for_work_that_is_not_equal(window: Any, turned: bool) -> None:
    program = shardc.compile(
        Seeing(window, 32, 2, 64).to("meta"),
        torch.empty(2, 2**9, 16, device="meta"),
        plan={"mesh": "cp=8", "inputs": {"x": "-, cp, -"}},
    )
    assert ("~cp" in str(type_of(program.body.input_nodes()["x"]))) == turned


@pytest.mark.parametrize(("size", "turned"), [(2**13, False), (2**14, False), (2**15, True), (2**17 - 1, True)])
def test_chunks_of_several_ranks_are_laid_by_the_account(size: int, turned: bool) -> None:
    """Of ranks that share a chunk the last has most to do; a zigzag of it sends more, and in more steps."""
    model = Seeing((-(2**20), 0, size), 32, 8, 128).to("meta", torch.bfloat16)
    x = torch.empty(1, 2**17, 16, device="meta", dtype=torch.bfloat16)
    plan = {"mesh": "cp=8", "inputs": {"x": "-, cp, -"}, "hardware": "h200-nvlink"}
    program = shardc.compile(model, x, plan=plan)
    assert ("~cp" in str(type_of(program.body.input_nodes()["x"]))) == turned


def test_auto_knows_what_is_sent() -> None:
    plan = {"mesh": "cp=8", "inputs": {"x": "-, cp, -"}}
    x = torch.empty(1, 2**15, 16, device="meta")
    for window, keys in (((-512, 256), 768), ((-(2**20), 0, 2**12), 0)):
        program = shardc.compile(Seeing(window, 8, 8, 128).to("meta"), x, plan=plan)
        (said,) = program.plan.get("context", ())
        costs = {cost[0]: cost for cost in said[3]}
        assert said[2] == "ring"
        assert costs["ring"][1] == 3 * 2 * keys * 8 * 128 * 4


# ---------------------------------------------------------------------- models
@cache
def model_of(name: str) -> nn.Module:
    import transformers as hf

    torch.manual_seed(0)
    small: dict[str, Any] = {**DECODER, "hidden_size": 16, "intermediate_size": 24, "vocab_size": 37}
    if name == "modernbert":
        sizes: dict[str, Any] = {
            name: small[name] for name in ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads")
        }
        ends: dict[str, Any] = dict.fromkeys(
            ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0
        )
        layers: dict[str, Any] = {"num_hidden_layers": 3, "local_attention": 8, "global_attn_every_n_layers": 3}
        config: Any = hf.ModernBertConfig(**sizes, **ends, **layers)
        return hf.ModernBertForMaskedLM(config)
    small |= {"num_hidden_layers": 3, "head_dim": 4, "intermediate_size_mlp": 24, "num_local_experts": 2}
    config = hf.Llama4TextConfig(
        **small, attention_chunk_size=8, interleave_moe_layer_step=5, no_rope_layers=[1, 1, 0], pad_token_id=0
    )
    return hf.Llama4ForCausalLM(config)


def of_model(name: str, mesh: str, length: int, rows: str = "-, cp", more: Any = None, **said: Any) -> Program:
    tokens = torch.randint(1, 37, (4, length), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens, **(more or {})}
    plan = {"mesh": mesh, "inputs": dict.fromkeys(batch, rows), **said}
    return shardc.compile(model_of(name), batch, plan=plan)


LAYERS = {"modernbert": [[], [-4, 4], [-4, 4]], "llama4": [[-7, 0, 8], [-7, 0, 8], []]}
LLAMA_TP = {f"**.{name}_proj.weight": "tp, -" for name in "qkv"} | {"**.o_proj.weight": "-, tp"}


@pytest.mark.sampled(16)
@pytest.mark.parametrize("balance", ["none", "zigzag"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("length", "mesh"), [(17, "cp=2"), (50, "cp=4")])
@pytest.mark.parametrize("name", ["modernbert", "llama4"])
def test_models(name: str, length: int, mesh: str, strategy: str, balance: str) -> None:
    """Every third layer sees all, without positions in Llama 4; the others see a few keys."""
    program = of_model(name, mesh, length, context={"attention": strategy, "balance": balance})
    assert windows_of(program) == LAYERS[name]
    exact(program)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("name", "mesh", "rows", "said"),
    [
        ("modernbert", "dp=2, cp=2", "dp, cp", {"storage": {"zero": 3, "axes": ["dp", "cp"]}, "bucket": True}),
        ("llama4", "dp=2, cp=2", "dp, cp", {"storage": {"zero": 3, "axes": ["dp", "cp"]}}),
        ("llama4", "cp=2, tp=2", "-, cp", {"params": LLAMA_TP, "activations": {"**.o_proj": "-, cp.tp, -"}}),
        ("llama4", "cp=2, pp=2", "-, cp", {"pipeline": {"axis": "pp", "microbatches": 2}, "recompute": "full"}),
        ("modernbert", "cp=2", "-, cp", {"accumulate": 2, "recompute": "full", "fuse": True}),
    ],
)
def test_models_with_everything_else(name: str, mesh: str, rows: str, said: dict[str, Any]) -> None:
    exact(of_model(name, mesh, 18, rows, context="ring", **said))


@pytest.mark.parametrize("name", ["modernbert", "llama4"])
def test_layers_send_each_their_own(name: str) -> None:
    program = of_model(name, "cp=4", 32, context="ring")
    heads = {"modernbert": 4, "llama4": 2}[name]
    one = 2 * 4 * heads * 4 * 4  # a key and a value, for four samples
    attention = {"modernbert": "layers.{}.attn", "llama4": "layers.{}.self_attn"}[name]
    each = [
        sum(c.bytes_per_step for c in program.collectives() if attention.format(i) in c.fqn and c.kind == "permute"
            and c.phase == "fwd")
        for i in range(3)
    ]  # fmt: skip
    # Four keys of each neighbour. Of Llama 4's zigzag runs of four keys, two make a chunk; see above.
    assert each == {"modernbert": [3 * 8 * one, 8 * one, 8 * one], "llama4": [8 * one, 8 * one, 3 * 8 * one]}[name]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", ["padding", "documents"])
@pytest.mark.parametrize("name", ["modernbert", "llama4"])
def test_models_with_masks_of_the_batch(name: str, kind: str, strategy: str) -> None:
    """Llama 4's chunks begin behind padding, or with each document: no rank knows where, but how far they reach."""
    keep = torch.ones(4, 50, dtype=torch.int64)
    keep[1, :7] = keep[2, :30] = keep[3, -4:] = 0
    positions = torch.cat([torch.arange(21), torch.arange(29)]).expand(4, -1).contiguous()
    more = {"attention_mask": keep} if kind == "padding" else {"position_ids": positions}
    program = of_model(name, "cp=4", 50, more=more, context=strategy)
    narrow = LAYERS[name] if name == "modernbert" else [[-7, 0], [-7, 0], []]
    assert windows_of(program) == narrow
    exact(program)
    batch = program.sample
    eager = model_of(name)(**batch).loss
    torch.testing.assert_close(program.launch().step(batch).loss, eager, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------- mutants
def _nearer_ahead(program: Program) -> None:
    for sent in calls(program.body, REACH_ROWS):
        change(sent, window=[given(sent)["window"][0], given(sent)["window"][1] - 1])


def _farther_ahead(program: Program) -> None:
    for step in (*calls(program.body, SDPA_ROWS), *calls(program.body, SDPA_ROWS_BWD)):
        change(step, window=[given(step)["window"][0], given(step)["window"][1] + 1])


def _shorter(program: Program) -> None:
    for sent in calls(program.body, REACH_ROWS):
        change(sent, length=given(sent)["length"] - 1)


def _not_behind(program: Program) -> None:
    """What comes of the rank behind is taken from the rank before."""
    for moved in calls(program.body, NEXT_KEYS):
        change(moved, places=1)


def _without_one(program: Program) -> None:
    """The last step continues the first: what lies ahead is left out."""
    first, _, last = calls(program.body, SDPA_ROWS)
    results = {given_to: value for value in first.users for given_to in (value.args[1],)}  # type: ignore[index]
    change(last, o=results[0], lse=results[1])


def _not_back(program: Program) -> None:
    total = calls(program.body, REACH_SUM)[0]
    change(total, parts=list(reversed(given(total)["parts"])))


def _in_chunks(program: Program) -> None:
    for step in calls(program.body, SDPA_ROWS):
        change(step, window=[*given(step)["window"], 8])


def _of_one_number(program: Program) -> None:
    change(calls(program.body, SDPA_ROWS)[0], window=[-3])


def _of_nothing(program: Program) -> None:
    change(calls(program.body, SDPA_ROWS)[0], window=[3, -3])


MUTANTS = (_nearer_ahead, _farther_ahead, _shorter, _not_behind, _without_one, _not_back, _in_chunks, _of_one_number,
           _of_nothing)  # fmt: skip


@pytest.mark.parametrize("mutate", MUTANTS)
def test_a_broken_exchange_is_refused(mutate: Callable[[Program], None]) -> None:
    program = alone((-3, 2), 16, "cp=4", {"attention": "ring", "balance": "none"})
    assert program.prove().ok
    assert not type_faults(program.body)
    mutate(program)
    assert not program.prove().ok
    assert type_faults(program.body)


def test_a_call_that_looks_less_far_ahead_is_seen() -> None:
    """Of all steps and what is sent alike: another attention, exactly divided, which the numbers show."""
    program = alone((-3, 2), 16, "cp=4", {"attention": "ring", "balance": "none"})
    for target in (REACH_ROWS, REACH_SUM, SDPA_ROWS, SDPA_ROWS_BWD):
        for node in calls(program.body, target):
            change(node, window=[-3, 1], **({"length": 1} if given(node).get("length") == 2 else {}))
    assert not program.verify().ok


def test_explain_says_what_rows_see() -> None:
    for window, words in (((-3, 2), "the 3 before and the 2 behind their own"), ((-99, 0, 6), "in chunks of 6")):
        program = alone(window, 16, "cp=4", {"attention": "ring", "balance": "none"})
        for phase in ("fwd", "bwd"):
            moved = next(c for c in program.collectives() if c.kind == "permute" and c.phase == phase)
            text = str(explain(program, moved.value, seconds=0))
            assert words in text
            assert "those of other ranks that its window reaches" in text
