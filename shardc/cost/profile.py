"""A `Profile`: how long each call of a step took on one rank, measured; a JSON file, and compared with a prediction.

    {"profile": 1, "device": "cuda", "rank": 0, "step_ms": 35.8,
     "calls": [{"within": "", "call": "h.0.mlp.mm", "times": 1, "ms": 0.412}, ...]}

`ms` are those of all the runs of a call in one step, on the compute stream: of a collective what is copied for it, and
how long compute waited for it. `within` is the instruction of a pipeline's list that ran the call, `Forward 2`; ""
without one. `trainer.profile(batch)` measures one; `prediction.diff(profile)` compares, call by call.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from shardc.cost.call_seconds import KINDS, Kind
from shardc.ir.diagnostic import error
from shardc.ir.files import write_text

VERSION = 1


class CallTime(NamedTuple):
    """All runs of one call in a step: predicted or measured."""

    within: str
    call: str
    times: int
    ms: float


@dataclass(frozen=True)
class Profile:
    """What one rank's calls took in a step."""

    device: str
    rank: int
    step_ms: float
    calls: tuple[CallTime, ...]

    def save(self, path: str | Path) -> None:
        """Raises ShardcError (SC409) where the file cannot be written, or is no .json."""
        data = {"profile": VERSION, **asdict(self), "calls": [call._asdict() for call in self.calls]}
        write_text(path, json.dumps(data), [".json"])

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Raises ShardcError (SC402) for a file that is no profile."""
        hint = "write one by trainer.profile(batch).save(path)"
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            if data["profile"] != VERSION:
                raise ValueError(f"a profile of version {data['profile']}; this is {VERSION}")
            calls = (CallTime(str(c["within"]), str(c["call"]), int(c["times"]), float(c["ms"])) for c in data["calls"])
            return cls(str(data["device"]), int(data["rank"]), float(data["step_ms"]), tuple(calls))
        except (OSError, ValueError, TypeError, KeyError) as why:
            reason = f"{type(why).__name__}: {' '.join(str(why).split())}"
            raise error("SC402", f"no profile can be read from '{path}': {reason}", hint=hint) from None


class CallDifference(NamedTuple):
    """One call: None where only the other side has it."""

    within: str
    call: str
    kind: Kind | None
    predicted_ms: float | None
    measured_ms: float | None

    @property
    def more_ms(self) -> float:
        """How much longer it took than predicted."""
        return (self.measured_ms or 0.0) - (self.predicted_ms or 0.0)


@dataclass(frozen=True)
class ProfileDiff:
    """A profile beside a prediction: the calls, the largest differences first; and sums by kind."""

    predicted_ms: float
    measured_ms: float
    calls: tuple[CallDifference, ...]

    @classmethod
    def of(cls, predicted_ms: float, predicted: Mapping[CallTime, Kind], profile: Profile) -> ProfileDiff:
        known: dict[tuple[str, str], tuple[CallTime, Kind]] = {
            (time.within, time.call): (time, kind) for time, kind in predicted.items()
        }
        measured = {(time.within, time.call): time for time in profile.calls}
        rows: list[CallDifference] = []
        for key in dict.fromkeys([*known, *measured]):
            time, took = known.get(key), measured.get(key)
            kind = None if time is None else time[1]
            expected = None if time is None else time[0].ms
            rows.append(CallDifference(*key, kind, expected, None if took is None else took.ms))
        rows.sort(key=lambda row: -abs(row.more_ms))
        return cls(predicted_ms, profile.step_ms, tuple(rows))

    def by_kind(self) -> dict[str, tuple[float, float]]:
        """Predicted and measured milliseconds of each kind; "unknown" of calls that the prediction does not have."""
        sums: dict[str, tuple[float, float]] = {}
        for row in self.calls:
            kind = row.kind or "unknown"
            predicted, measured = sums.get(kind, (0.0, 0.0))
            sums[kind] = predicted + (row.predicted_ms or 0.0), measured + (row.measured_ms or 0.0)
        return {kind: sums[kind] for kind in (*KINDS, "unknown") if kind in sums}

    def text(self, shown: int = 20) -> str:
        lines = [f"step {self.predicted_ms:.3f} ms predicted, {self.measured_ms:.3f} measured"]
        lines += [_line(kind, *of) for kind, of in self.by_kind().items() if any(of)]
        lines += _rows(self.calls[:shown])
        rest = self.calls[shown:]
        if rest:
            lines.append(f"and {len(rest)} calls with {sum(row.more_ms for row in rest):+.3f} ms")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()


def _line(name: str, predicted: float | None, measured: float | None) -> str:
    def number(value: float | None) -> str:
        return f"{'-':>10}" if value is None else f"{value:10.3f}"

    return f"{number(predicted)} {number(measured)} {(measured or 0.0) - (predicted or 0.0):+10.3f}  {name}"


def _rows(calls: Iterable[CallDifference]) -> list[str]:
    def name(row: CallDifference) -> str:
        return f"%{row.call}" + (f" of {row.within}" if row.within else "") + (f" ({row.kind})" if row.kind else "")

    return [_line(name(row), row.predicted_ms, row.measured_ms) for row in calls]
