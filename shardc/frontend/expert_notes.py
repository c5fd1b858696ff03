"""What is said of loops over experts once a step is traced: which compute all tokens, what an answer decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from shardc.frontend.expert_rows import ExpertLoops
from shardc.frontend.layer_drop import key_of
from shardc.frontend.provenance import Origin
from shardc.ir.diagnostic import Diagnostic, error

ALIKE = (
    "let experts be alike, of products (F.linear, nn.Linear) and what goes element by element, chosen by topk: then "
    "each computes its own tokens"
)
SKIPPED = "skip an expert without tokens only where it then adds nothing; or leave the condition out"


def computed_for_all(loops: ExpertLoops, origin_of: Callable[[fx.Node], Origin]) -> list[Diagnostic]:
    """A note for each line where experts are given that compute all tokens."""
    notes: dict[str, Diagnostic] = {}
    for node, experts, each in loops.masked:
        origin = origin_of(node)
        times = f"{experts / each:.3g}"
        notes.setdefault(
            origin.source,
            Diagnostic(
                "SC129",
                f"{experts} experts are not one grouped product: each computes all tokens, {times} times as many as are"
                " routed to them",
                "note",
                location=origin.source or None,
                source_text=origin.source_text or None,
                fqn=origin.fqn or None,
                hint=ALIKE,
            ),
        )
    return list(notes.values())


def refuse_other(
    graphs: Sequence[fx.Graph],
    results: Sequence[Mapping[Any, fx.Node]],
    loops: Sequence[ExpertLoops],
    origin_of: Callable[[fx.Node], Origin],
) -> None:
    """Raise ShardcError (SC101) unless a trace in which no expert has tokens is the first one without their rows."""
    keys: dict[Any, int] = {}
    for role, node in results[0].items():
        other = results[1].get(role)
        same = other is not None and (
            key_of(graphs[0], node, loops[0].kept, keys) == key_of(graphs[1], other, loops[1].kept, keys)
        )
        if not same:
            origin = origin_of(loops[0].asked[0])
            raise error(
                "SC101",
                "forward asks whether an expert has tokens, and more depends on it than the rows that it adds",
                location=origin.source or None,
                source_text=origin.source_text or None,
                fqn=origin.fqn or None,
                hint=SKIPPED,
            )
