"""What failures cost a job: how often to save, and which share of its time is then work that counts.

Nodes fail independently, at a constant rate. A failed node ends the job's attempt; all ranks restart from the last
checkpoint. M is the job's mean time between failures, d the seconds of a save, R those of a restart, t the work between
two saves. A segment of t + d is repeated until it passes without a failure (Daly 2006, equation 13):

    seconds of a segment    M exp(R / M) (exp((t + d) / M) - 1)
    goodput                 t divided by that
    t of the best goodput   sqrt(2 d M) by Young; by Daly, for d < 2 M,
                            sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + d / 18M) - d, and else M

J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974.
J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22(3), 2006.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardc.ir.collectives import human_bytes
from shardc.ir.diagnostic import error

HOUR = 3600.0


@dataclass(frozen=True)
class Recovery:
    """A save and a restart of one job, in seconds; bytes are of the rank that writes, or reads, most.

    Ranks write and read at once. What several ranks hold is written by one of them and read by all. `reshard_seconds`
    is the load of a job that restarts on another mesh, whose ranks read `reshard_bytes`; None where none was named.
    `relaunch_seconds` pass until a failure is noticed and new processes have met.
    """

    save_bytes: int
    load_bytes: int
    save_seconds: float
    load_seconds: float
    relaunch_seconds: float
    reshard_bytes: int | None = None
    reshard_seconds: float | None = None

    @property
    def restart_seconds(self) -> float:
        """On the other mesh, if one was named."""
        load = self.load_seconds if self.reshard_seconds is None else self.reshard_seconds
        return self.relaunch_seconds + load


@dataclass(frozen=True)
class FailureCost:
    """A job of so many nodes under failures. `interval_seconds` is the work between two saves."""

    nodes: int
    node_mtbf_seconds: float
    recovery: Recovery
    interval_seconds: float
    step_seconds: float = 0.0

    @property
    def mtbf_seconds(self) -> float:
        """Of the job."""
        return self.node_mtbf_seconds / self.nodes

    @property
    def goodput(self) -> float:
        """The share of time that is work which no failure undoes."""
        return self.goodput_at(self.interval_seconds)

    def goodput_at(self, interval: float) -> float:
        return goodput(interval, self.recovery.save_seconds, self.recovery.restart_seconds, self.mtbf_seconds)

    @property
    def shares(self) -> dict[str, float]:
        """Of all time, what is no goodput: saves that count, restarts that succeed, and what failures undo. With
        goodput they sum up to 1."""
        good, save = self.goodput, self.recovery.save_seconds
        failed = _growth((self.interval_seconds + save) / self.mtbf_seconds)  # attempts for one that passes
        saving = good * save / self.interval_seconds
        restarting = good * failed * self.recovery.restart_seconds / self.interval_seconds if good else 0.0
        return {"saves": saving, "restarts": restarting, "undone": max(0.0, 1 - good - saving - restarting)}

    def __str__(self) -> str:
        r, shares = self.recovery, self.shares
        young = duration(young_interval(r.save_seconds, self.mtbf_seconds))
        steps = f", {round(self.interval_seconds / self.step_seconds):,} steps" if self.step_seconds else ""
        load = f"load {duration(r.load_seconds)} ({human_bytes(r.load_bytes)})"
        if r.reshard_seconds is not None:
            load += f", onto the other mesh {duration(r.reshard_seconds)} ({human_bytes(r.reshard_bytes or 0)})"
        rate = f"one failure in {duration(self.node_mtbf_seconds)} each, one in {duration(self.mtbf_seconds)} in all"
        save = f"save {duration(r.save_seconds)} ({human_bytes(r.save_bytes)} by the rank that writes most)"
        lost = ", ".join(f"{share:.1%} {name}" for name, share in shares.items())
        return "\n".join(
            [
                f"{self.nodes:,} nodes, {rate}",
                f"{save}, {load}, relaunch {duration(r.relaunch_seconds)}",
                f"save every {duration(self.interval_seconds)}{steps} (Daly; Young: {young})",
                f"goodput {self.goodput:.1%}; {lost}",
            ]
        )


def failure_cost(recovery: Recovery, nodes: int, node_mtbf_hours: float, step_seconds: float = 0.0) -> FailureCost:
    """The cost at the best interval. Raises ShardcError (SC208) for a time between failures that is none."""
    if not (0 < node_mtbf_hours < math.inf and nodes > 0):
        hint = "give the mean hours between two failures of one node, as in 6000"
        raise error("SC208", f"{node_mtbf_hours!r} hours are no time between failures", hint=hint)
    mtbf = node_mtbf_hours * HOUR / nodes
    interval = daly_interval(recovery.save_seconds, mtbf)
    return FailureCost(nodes, node_mtbf_hours * HOUR, recovery, interval, step_seconds)


def young_interval(save: float, mtbf: float) -> float:
    return math.sqrt(2 * save * mtbf)


def daly_interval(save: float, mtbf: float) -> float:
    if save >= 2 * mtbf:
        return mtbf
    share = save / (2 * mtbf)
    return young_interval(save, mtbf) * (1 + math.sqrt(share) / 3 + share / 9) - save


def goodput(interval: float, save: float, restart: float, mtbf: float) -> float:
    segment = mtbf * _exp(restart / mtbf) * _growth((interval + save) / mtbf)
    return interval / segment if 0 < segment < math.inf else 0.0


MOST_EXPONENT = 700.0  # beyond it, exp is no float: such a job never ends


def _exp(x: float) -> float:
    return math.exp(x) if x < MOST_EXPONENT else math.inf


def _growth(x: float) -> float:
    return math.expm1(x) if x < MOST_EXPONENT else math.inf


def duration(seconds: float) -> str:
    """`850 ms`, `12 s`, `9.5 min`, `3.1 h`, `264 days`."""
    for size, unit in ((86400.0, "days"), (HOUR, "h"), (60.0, "min"), (1.0, "s")):
        if seconds >= 2 * size or (unit == "s" and seconds >= 1):
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e3:.3g} ms"
