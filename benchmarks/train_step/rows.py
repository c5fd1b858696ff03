"""What is measured: the rows of the issue's table, and their contestants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.train_step import context_peers, jax_peer, ours, peers, pipeline_peers, switches, tensor_parallel_peers
from benchmarks.train_step.setting import Run, Setting

CONTESTANTS: dict[str, Callable[[Setting], Run]] = {
    **ours.CONTESTANTS,
    **peers.CONTESTANTS,
    **tensor_parallel_peers.CONTESTANTS,
    **context_peers.CONTESTANTS,
    **jax_peer.CONTESTANTS,
    **pipeline_peers.CONTESTANTS,
}
SHARES = "shares-"
ALONE = ("ours-fused", "compiled", "eager", "ours", "ours-fused-graphs", "jax", "autotuned")
TENSOR = (
    *("ours-tp", "ours-tp-sp"),
    *("dtensor-tp-sp-async", "dtensor-tp-sp", "dtensor-tp", "megatron-tp-sp", "megatron-tp"),
    *("ours-tp-plain", "ours-tp-graphs", "jax-tp", "jax-tp-sp"),
)
DATA = ("ours-dp", "ddp-compiled", "ddp", "ours-dp-plain", "ours-dp-graphs")
ZERO = ("ours-zero3", "fsdp2-compiled", "fsdp2", "fsdp2-compiled-prefetch", "ours-zero3-plain")
PIPELINE = (
    *("ours-pp-1f1b", "ours-pp-zb-h1", "ours-pp-auto", "ours-pp-interleaved"),
    *("torch-pp-1f1b-compiled", "torch-pp-1f1b", "torch-pp-interleaved", "torch-pp-zbv"),
)


CONTEXT = ("ours-cp", "hand-ring", "hand-gather", "torch-cp-allgather", "torch-cp-alltoall")
EXPERTS = ("ours-ep", "ours-ep-gathered", "ours-dp", "ddp", "fsdp2")


def later(name: str) -> bool:
    """Whether a contestant is measured when the others are done, beside the first of ours: ours in other forms, each of
    which keeps its memory of activations, and what is slow to build."""
    slow = name in ("ours", "autotuned") or name.startswith("jax")
    return slow or name in switches.OFF or name.endswith("-graphs")


@dataclass(frozen=True)
class Row:
    """`batch` sequences a replica (where there are several microbatches: one's); `bar` is the least ratio of the best
    peer's step to the best of ours, `seen_ms` the best peer's step that was recorded. `master`: ours has parameters of
    float32, and computes in bfloat16, on CPUs, too."""

    name: str
    model: str
    gpus: int
    batch: int
    contestants: tuple[str, ...]
    bar: float | None = None
    seen_ms: float | None = None
    microbatches: int = 1
    replicas: int = 1
    optimizer: bool = False
    master: bool = False

    @property
    def of_shares(self) -> bool:
        """Whether it has no peers: it tells what single passes of ours are worth."""
        return self.name.startswith(SHARES)

    @property
    def sequences(self) -> int:
        return self.batch * self.microbatches * self.replicas

    def tiny(self, ranks: int) -> Row:
        """As a rehearsal has it."""
        pipelined = self.microbatches > 1
        replicas = ranks if self.replicas > 1 else 1
        return replace(
            self, gpus=ranks, batch=1 if pipelined else 2, microbatches=4 if pipelined else 1, replicas=replicas
        )


def rehearsal() -> list[Row]:
    """Each contestant in the first row that has it, and again what it is held against there."""
    seen: set[str] = set()
    rows: list[Row] = []
    for row in (ROWS[name] for name in REHEARSED):
        names = [name for name in row.contestants if name not in seen]
        forms = {switches.OFF[name][0] for name in names if name in switches.OFF}
        rows.append(replace(row, contestants=tuple(n for n in row.contestants if n in names or n in forms)))
        seen |= set(row.contestants)
    return rows


def _rows() -> list[Row]:
    alone = [
        Row("1-gpt-6.7b-slice", "gpt-6.7b-slice", 1, 4, ALONE, 1.03, 151.4),
        Row("1-llama3-8b-slice", "llama3-8b-slice", 1, 2, ALONE, 1.04, 195.3),
        Row("1-gpt-1.3b", "gpt-1.3b", 1, 4, ALONE, 1.06, 125.2),
        Row("1-gpt2", "gpt2", 1, 16, ALONE, 1.08, None),
    ]
    tensor = [
        Row("tp4-gpt-6.7b-slice", "gpt-6.7b-slice", 4, 4, TENSOR, 1.14, 50.8),
        Row("tp4-gpt-6.7b-slice-mb1", "gpt-6.7b-slice", 4, 1, TENSOR, 1.2, 16.5),
        Row("tp4-llama3-8b-slice", "llama3-8b-slice", 4, 2, TENSOR, 1.12, 64.5),
        Row("tp4-gpt-1.3b", "gpt-1.3b", 4, 4, TENSOR, 1.3, 54.8),
    ]
    pipelines = [
        Row("pp4-gpt-1.3b-m8", "gpt-1.3b", 4, 1, PIPELINE, 1.25, 107.9, microbatches=8),
        Row("pp4-gpt-1.3b-m32", "gpt-1.3b", 4, 1, PIPELINE, 1.2, 360.7, microbatches=32),
    ]
    data = [
        Row("dp4-gpt-6.7b-slice", "gpt-6.7b-slice", 4, 4, DATA, 1.05, 171.7, replicas=4),
        Row("zero4-gpt-6.7b-slice", "gpt-6.7b-slice", 4, 4, ZERO, 1.06, 178.8, replicas=4),
    ]
    rest = [
        Row("tp2-gpt-1.3b", "gpt-1.3b", 2, 4, TENSOR),
        Row("dp2-gpt-1.3b", "gpt-1.3b", 2, 4, DATA, replicas=2),
        Row("zero2-gpt-1.3b", "gpt-1.3b", 2, 4, ZERO, replicas=2),
        Row("cp4-llama3-8b-slice", "llama3-8b-slice", 4, 1, CONTEXT),
        Row("ep4-mixtral", "mixtral", 4, 4, EXPERTS, replicas=4),
    ]
    return [*alone, *tensor, *pipelines, *data, *rest, *_shares()]


def _shares() -> list[Row]:
    """Ours with a pass switched off, or on, beside the same as it is by default."""

    def row(name: str, model: str, gpus: int, batch: int, form: str, **more: Any) -> Row:
        off = tuple(f"{form}-{switch}" for switch in switches.SWITCHED[form])
        return Row(f"{SHARES}{name}", model, gpus, batch, (form, *off), **more)

    gpt, slice_, llama = "gpt-1.3b", "gpt-6.7b-slice", "llama3-8b-slice"
    rows: list[Row] = []
    for model, batch in ((slice_, 4), (llama, 2), (gpt, 4)):
        rows.append(row(f"tp4-{model}", model, 4, batch, "ours-tp"))
        rows.append(row(f"sp4-{model}", model, 4, batch, "ours-tp-sp"))
    rows.append(row(f"dp4-{slice_}", slice_, 4, 4, "ours-dp", replicas=4))
    rows.append(row(f"zero4-{slice_}", slice_, 4, 4, "ours-zero3", replicas=4))
    rows.append(row(f"pp4-{gpt}-m8-master", gpt, 4, 1, "ours-pp-1f1b", microbatches=8, master=True))
    for gpus in (4, 2):
        rows.append(
            row(f"dp{gpus}-{gpt}-m8-master", gpt, gpus, 1, "ours-dp", microbatches=8, replicas=gpus, master=True)
        )
        rows.append(row(f"zero{gpus}-{gpt}-master", gpt, gpus, 4, "ours-zero3", replicas=gpus, master=True))
    rows.append(row(f"tp2-{gpt}", gpt, 2, 4, "ours-tp"))
    rows.append(row(f"sp2-{gpt}", gpt, 2, 4, "ours-tp-sp"))
    return rows


# In a rehearsal, each contestant is rehearsed once, in the first of these rows that has it.
REHEARSED = (
    *("1-gpt2", "tp4-llama3-8b-slice", "pp4-gpt-1.3b-m8", "dp4-gpt-6.7b-slice", "zero4-gpt-6.7b-slice"),
    *("cp4-llama3-8b-slice", "ep4-mixtral"),
    *("shares-tp4-llama3-8b-slice", "shares-sp4-llama3-8b-slice", "shares-pp4-gpt-1.3b-m8-master"),
    *("shares-dp4-gpt-1.3b-m8-master", "shares-zero4-gpt-1.3b-master"),
)
ROWS = {row.name: row for row in _rows()}
