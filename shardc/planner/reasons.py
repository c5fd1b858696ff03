"""Why a candidate is not the best, in plain words: the largest of what it spends more, or what it holds too much.

    does not fit: 93.0 GiB of 80, of which activations 51.2 (8 microbatches in flight)
    tp=16 spans nodes: its collectives take 41 ms more
    bubble 23 %: 16 microbatches in 8 stages

The difference of two steps is the sum of the differences of their terms (`step_costs.TERMS`), and work is what is
computed once, what is recomputed and what is waited for. A bubble is a share of the work: where the share is the same
and the work is more, the cause is the work. So each term of work counts with its share of the bubble, and as a bubble
counts what the share is more.
"""

from __future__ import annotations

from shardc.ir.collectives import human_bytes
from shardc.ir.hardware import Hardware
from shardc.planner.candidate import Candidate
from shardc.planner.network import network_of
from shardc.planner.search import Priced
from shardc.planner.step_costs import Estimate, Memory

NEXT_BEST = "as fast as the best, within what a prediction tells"
NEAR = 0.002


def reason(loser: Priced, best: Priced, memory: float, hardware: Hardware) -> str:
    """Why one loses against the other."""
    if loser.estimate.memory.total > memory:
        return does_not_fit(loser.estimate.memory, memory)
    more = loser.seconds - best.seconds
    if more <= NEAR * best.seconds:
        return NEXT_BEST
    told = sorted(causes(loser, best, hardware), reverse=True)
    spent, text = told[0]
    return text if spent >= 0.4 * more else "; ".join(text for _, text in told[:2])


def does_not_fit(held: Memory, memory: float) -> str:
    """What a rank would hold, of what it may, and the largest share."""
    shares = {
        "activations": held.activations,
        "weights": held.weights,
        "gradients": held.gradients,
        "the optimizer's state": held.state,
        "what one layer needs meanwhile": held.transient,
    }
    name = max(shares, key=lambda key: shares[key])
    flying = f" ({held.in_flight} microbatches in flight)" if name == "activations" and held.in_flight > 1 else ""
    return (
        f"does not fit: {human_bytes(held.total)} of {human_bytes(memory)}, of which {name} "
        f"{human_bytes(shares[name])}{flying}"
    )


def causes(loser: Priced, best: Priced, hardware: Hardware) -> list[tuple[float, str]]:
    """The terms of the difference, in seconds, with what each says. They sum up to the whole of it."""
    c, a, b = loser.candidate, loser.estimate, best.estimate
    share, before = a.bubble / _filled(a), b.bubble / _filled(b)
    more = {name: (1 + share) * (value - _terms(b)[name]) for name, value in _terms(a).items()}
    bubble = (share - before) * _filled(b)
    told = [
        (bubble, f"bubble {100 * a.bubble / a.seconds:.0f} %: {c.microbatches} microbatches in {c.stages} stages"),
        (more["alone"], f"computes for {_ms(more['alone'])} more: {_smaller(c, best.candidate)}"),
        (more["recomputed"], f"recomputes for {_ms(more['recomputed'])} more"),
        (more["uneven"], f"stages are uneven: the busiest takes {_ms(more['uneven'])} more"),
        (more["gathered"], f"zero 3 waits {_ms(more['gathered'])} more for weights, gathered each microbatch"),
        (a.transfers - b.transfers, f"transfers between stages take {_ms(a.transfers - b.transfers)} more"),
        (a.data - b.data, f"{_sums(c)} take {_ms(a.data - b.data)} more, with nothing to hide behind"),
        (a.update - b.update, f"the update takes {_ms(a.update - b.update)} more: {_update(c)}"),
    ]
    axis = max(("tp", "cp", "ep"), key=lambda name: _spent(a, name) - _spent(b, name))
    return [*told, (more["sent"], f"{_where(c, axis, hardware)}: its collectives take {_ms(more['sent'])} more")]


def _terms(e: Estimate) -> dict[str, float]:
    """Of the work of all microbatches, that of which a bubble is a share."""
    alone = e.work - e.sent - e.recomputed
    return {"alone": alone, "sent": e.sent, "recomputed": e.recomputed, "uneven": e.uneven, "gathered": e.gathered}


def _filled(estimate: Estimate) -> float:
    return estimate.work + estimate.uneven + estimate.gathered


def _spent(estimate: Estimate, axis: str) -> float:
    return sum(seconds for axes, seconds in estimate.collectives.items() if axis in axes.split("."))


def _where(c: Candidate, axis: str, hardware: Hardware) -> str:
    """An axis, and whether its groups leave a node."""
    size = getattr(c, axis)
    group = network_of(hardware).group(c, (axis,))
    spans = group is not None and len(group.extents) > 1
    whole = "" if axis != "tp" or c.sequence or size == 1 else ", without sequence parallelism"
    return f"{axis}={size}{' spans nodes' if spans else ''}{whole}"


def _sums(c: Candidate) -> str:
    return "sums of gradients" if c.zero in (0, 3) else "sums of gradients and gathers of weights"


def _update(c: Candidate) -> str:
    return "each rank updates all of its weights" if not c.zero else "more weights a rank"


def _smaller(c: Candidate, best: Candidate) -> str:
    divided, other = c.tp * c.cp, best.tp * best.cp
    if c.rows * other < best.rows * divided:
        return f"smaller products, of {c.rows} row{'s' if c.rows > 1 else ''} over {divided} ranks"
    return "its layers are slower so placed"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if abs(seconds) >= 0.01 else f"{seconds * 1e3:.2f} ms"
