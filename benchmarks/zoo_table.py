"""The lines of a run of the zoo as tables: how many models of each kind verify, and the page with a row for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

Line = dict[str, Any]
TENSOR, EXPERT = "dp=2, tp=2", "dp=2, ep=2"
KINDS = {
    "causal": "Causal language models",
    "masked": "Masked language models",
    "seq2seq": "Sequence to sequence",
    "vision": "Vision",
    "audio": "Audio",
    "multimodal": "Multimodal",
}
HEAD = """# Models

<!-- Written by `python -m benchmarks.zoo --table FILE`. -->

Every model type of `transformers` {transformers} that builds small and trains eagerly, compiled unmodified with torch
{torch} over `dp=2, tp=2` and, where it has experts, over `dp=2, ep=2`. A model is *verified* where four simulated ranks
compute the loss and every gradient of one device and of eager PyTorch in float64; *alone* where eager PyTorch was not
there to be asked. `collectives` are those of a step; after the slash is how many its form needs, where these are fewer.

{totals}
"""
BEHIND = """
## Not tried

These types do not build or train eagerly with a small configuration, or need a package that was not there: {names}.
"""
TRIED = ("not built", "not trained")


def page(lines: Iterable[Line]) -> str:
    """docs/reference/models.md. Lines are those of one run: the last of a model and mesh counts."""
    last = {(line["name"], line["mesh"]): line for line in lines}
    names = sorted({name for name, _ in last}, key=lambda name: name.partition("/")[2])
    tried = [name for name in names if last[name, TENSOR]["status"] not in TRIED]
    versions = next((line for line in last.values() if "transformers" in line), {})
    parts = [
        HEAD.format(
            transformers=versions.get("transformers", "5"),
            torch=versions.get("torch", "2"),
            totals="\n".join(summary_table(last)),
        )
    ]
    for kind, title in KINDS.items():
        of = [name for name in tried if name.startswith(f"{kind}/")]
        if of:
            head = "| type | `dp=2, tp=2` | s | collectives | `dp=2, ep=2` | s | collectives |"
            rows = [row(name, last[name, TENSOR], last.get((name, EXPERT))) for name in of]
            parts.append("\n".join([f"\n## {title}\n", head, "|---|---|---|---|---|---|---|", *rows, ""]))
    rest = [name.partition("/")[2] for name in names if name not in tried]
    parts.append(BEHIND.format(names=", ".join(f"`{name}`" for name in rest)) if rest else "")
    return "".join(parts)


def row(name: str, tensor: Line, expert: Line | None) -> str:
    cells = [f"`{name.partition('/')[2]}`", *cells_of(tensor), *(cells_of(expert) if expert else ("", "", ""))]
    return f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")


def cells_of(line: Line) -> tuple[str, str, str]:
    """Status with its reason, seconds, and collectives against their ideal."""
    if "collectives" not in line:
        reason = line.get("error", "").partition("\n")[0][:80].replace("|", "\\|").replace("<", "`<`")
        return f"{line['status']} {line.get('code', '')} {reason}".replace("  ", " ").strip(), "", ""
    seconds = f"{line['compile_s'] + line['verify_s']:.1f}"
    count, ideal = sum(line["collectives"].values()), line.get("ideal")
    return line["status"], seconds, f"{count} / {ideal}" if ideal is not None and count > ideal else f"{count}"


def summary_table(last: Mapping[tuple[str, str], Line]) -> list[str]:
    """How many built, trained, compiled and verified, by kind and mesh."""
    rows = [
        "| kind | mesh | types | built | trained | compiled | verified | of those trained | at the ideal |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    groups = sorted({(name.partition("/")[0], mesh) for name, mesh in last})
    for kind, mesh in [*groups, ("all", TENSOR), ("all", EXPERT)]:
        of = [line for (name, m), line in last.items() if m == mesh and kind in ("all", name.partition("/")[0])]
        status = Counter(line["status"] for line in of)
        built = len(of) - status["not built"]
        trained = built - status["not trained"]
        ready = status["verified"] + status["alone"] + status["differs"]
        share = f"{100 * status['verified'] / trained:.0f} %" if trained else ""
        least = sum("ideal" in line and sum(line["collectives"].values()) <= line["ideal"] for line in of)
        cells = (kind, f"{mesh}", len(of), built, trained, ready, status["verified"], share, least)
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return rows
