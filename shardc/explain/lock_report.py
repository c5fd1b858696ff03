"""What a lockfile says against what a program costs: what got worse, by how much, where, and by which annotation.

    all_reduce over tp in forward: 6 instead of 4 (+50.0%)
      2 more in h.*.mlp
        %h.0.mlp.sum.all_reduce, model.py:31: h.0.mlp.up.weight = "tp, -"   (plan.yaml:9)

A module that had some before has more values than the new ones: a line is given for each place in the model that it has
them from.

Worse is more of any amount: communication by phase, axes and kind; FLOPs by phase; kernels, calls that are in none, and
bytes that they move; memory at the peak, and stored; the predicted step. One that grew by no more than its tolerance
allows is not. What got better is reported, and is no failure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from shardc.cost.flops import human_flops
from shardc.explain.lockfile import AMOUNTS, Key, Lock, Reason
from shardc.ir.collectives import human_bytes
from shardc.ir.diagnostic import did_you_mean, error, listed

MOST_PLACES = 4  # of an amount
MOST_REASONS = 3  # of a place
UNFUSED: Key = ("kernels", "unfused")


@dataclass(frozen=True)
class Place:
    """A module that has more of something than before, and what of that it has, a reason for each line and cause."""

    module: str
    change: float
    reasons: tuple[Reason, ...]


@dataclass(frozen=True)
class Change:
    """An amount that is another than the lockfile's. `places` are the modules that have more, most first."""

    key: Key
    before: float
    after: float
    places: tuple[Place, ...]

    @property
    def grew(self) -> bool:
        return self.after > self.before

    def __str__(self) -> str:
        amount = _amount(self.key, self.after), _amount(self.key, self.before)
        share = f" ({self.after / self.before - 1:+.1%})" if self.before else ""
        lines = [f"{_name(self.key)}: {amount[0]} instead of {amount[1]}{share}"]
        for place in self.places[:MOST_PLACES]:
            lines.append(f"  {_amount(self.key, place.change)} more in {place.module}")
            for reason in place.reasons[:MOST_REASONS]:
                text = ", ".join(filter(None, (reason.value and f"%{reason.value}", reason.source)))
                lines.append("    " + ": ".join(filter(None, (text, reason.cause))))
        if more := len(self.places) - MOST_PLACES:
            lines += [f"  and in {more} more modules"] if more > 0 else []
        return "\n".join(lines)


@dataclass(frozen=True)
class LockReport:
    """The comparison. `worse` and `better` are amounts that changed by more than is tolerated."""

    worse: tuple[Change, ...]
    better: tuple[Change, ...]
    notes: tuple[str, ...] = ()
    origin: str = "the lockfile"

    @property
    def ok(self) -> bool:
        return not self.worse

    def __str__(self) -> str:
        blocks: list[str] = []
        for changes, heading in ((self.worse, "worse"), (self.better, "better")):
            if changes:
                lines = "\n".join(str(change) for change in changes).splitlines()
                blocks.append("\n".join([f"{heading} than {self.origin} says:", *(f"  {line}" for line in lines)]))
        if not blocks:
            blocks.append(f"as {self.origin} says")
        elif self.worse:
            blocks.append("if this is meant, run `shardc lock` without --check, and commit the file")
        else:
            blocks.append("run `shardc lock` without --check to keep what was won: the file still allows the former")
        return "\n".join([*blocks, *(f"note: {note}" for note in self.notes)])


def compare(before: Lock, after: Lock, tolerance: float | Mapping[str, float] = 0.0, origin: str = "") -> LockReport:
    """A lockfile against a program's lock. `tolerance` is the share by which amounts may grow, of all or by kind.

    Kinds are those of `AMOUNTS`: collectives, flops, kernels, memory, prediction. Raises ShardcError: SC412 where the
    file is of another version, mesh, plan, batch, mode, optimizer or hardware; SC413 for a tolerance that is none.
    """
    origin = origin or "the lockfile"
    shares = _tolerances(tolerance)
    _refuse_other(before, after, origin)
    old, new = before.amounts(), after.amounts()
    changes: list[Change] = []
    for key in sorted({*old, *new}):
        was, now = old.get(key, 0), new.get(key, 0)
        if abs(now - was) > shares[key[0]] * was:
            changes.append(Change(key, was, now, _places(before, after, key) if now > was else ()))
    torch_versions = before.facts.get(("of", "torch")), after.facts.get(("of", "torch"))
    note = f"torch {torch_versions[0]} traced what {origin} says, this is torch {torch_versions[1]}"
    return LockReport(
        tuple(change for change in changes if change.grew),
        tuple(change for change in changes if not change.grew),
        (note,) if torch_versions[0] != torch_versions[1] else (),
        origin,
    )


def with_fusion(report: LockReport, whys: Callable[[], Mapping[str, str]]) -> LockReport:
    """The report, with why calls are in no fused kernel where more are than before: by a call's name."""
    if all(change.key != UNFUSED for change in report.worse):
        return report
    known = whys()

    def explained(place: Place) -> Place:
        return replace(place, reasons=tuple(r._replace(cause=known.get(r.value, "")) for r in place.reasons))

    worse = (replace(c, places=tuple(map(explained, c.places))) if c.key == UNFUSED else c for c in report.worse)
    return replace(report, worse=tuple(worse))


def _tolerances(tolerance: float | Mapping[str, float]) -> dict[str, float]:
    given = tolerance if isinstance(tolerance, Mapping) else dict.fromkeys(AMOUNTS, tolerance)
    for kind, share in given.items():
        if kind not in AMOUNTS:
            raise error("SC413", f"nothing in a lockfile is '{kind}'", hint=did_you_mean(kind, AMOUNTS, "kinds"))
        if not 0 <= share < float("inf"):
            raise error("SC413", f"{share!r} is no tolerance", hint="give a share from 0: 0.02 allows 2 % more")
    return {kind: given.get(kind, 0.0) for kind in AMOUNTS}


def _refuse_other(before: Lock, after: Lock, origin: str) -> None:
    old, new = ({key: v for key, v in lock.facts.items() if key[0] == "of"} for lock in (before, after))
    keys = [key for key in sorted({*old, *new}) if key != ("of", "torch") and old.get(key) != new.get(key)]
    if ("of", "predicted_on") in keys:  # of other hardware, other figures are expected
        keys = [key for key in keys if key[1] != "figures"]
    if not keys:
        return
    texts = [f"{' '.join(key[1:])}: {old.get(key, 'none')!s}, here {new.get(key, 'none')!s}" for key in keys]
    what = listed(dict.fromkeys(key[1] for key in keys))
    raise error(
        "SC412",
        f"the lockfile was written for another {what}: the two cannot be compared",
        location=origin,
        cause="\n".join(texts),
        hint="give the same arguments as when it was written, or write it anew: run `shardc lock` without --check",
    )


def _places(before: Lock, after: Lock, key: Key) -> tuple[Place, ...]:
    old, new = before.places(key), after.places(key)
    grown = [
        Place(where[-2], value - old.get(where, 0), tuple(after.reasons.get(where, ())))
        for where, value in new.items()
        if value > old.get(where, 0)
    ]
    return tuple(sorted(grown, key=lambda place: (-place.change, place.module)))


def _name(key: Key) -> str:
    match key:
        case ("collectives", phase, axes, kind, what):
            return f"{kind} over {axes} in {phase}" + (", bytes that a rank sends" if what == "bytes" else "")
        case ("flops", phase):
            return f"work of a rank in {phase}"
        case ("kernels", what):
            names = {"bytes": "bytes that kernels move", "unfused": "calls in no fused kernel"}
            return names.get(what, "kernels that move data")
        case ("memory", what):
            return "memory at the peak" if what == "peak" else "memory that is stored"
        case (_, what):
            return "predicted step" if what == "step_ms" else "predicted time that collectives are waited for"
        case _:
            return " ".join(key)


def _amount(key: Key, value: float) -> str:
    if key[-1] == "bytes" or key[0] == "memory":
        return human_bytes(value)
    if key[0] == "flops":
        return human_flops(int(value))
    return f"{value:,.4g} ms" if key[0] == "prediction" else f"{value:,.0f}"
