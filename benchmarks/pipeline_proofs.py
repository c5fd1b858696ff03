"""How long do a pipeline's instruction lists take to make and to prove, and does the proof tell right from wrong?

    python -m benchmarks.pipeline_proofs              every built-in schedule, p up to 16 ranks, m up to 64 microbatches
    python -m benchmarks.pipeline_proofs --ranks 16 --microbatches 64      the largest alone

A JSON line a schedule, ranks p, stages a rank v and microbatches m: seconds (of a CPU, whatever else it does) to order
the work and emit the lists, and to prove them. Then a line for the proof itself: randomly changed lists, which a
symbolic run of all ranks calls broken or whole, and how many of each the proof refuses. The last line says whether the
bars hold: every proof in under a second, 1,000 broken lists at least, all refused, and no whole one.
"""

from __future__ import annotations

import argparse
import json
import time

from shardc.schedule.emit import emit
from shardc.schedule.pipeline import chain_pipeline
from shardc.schedule.prove import prove
from shardc.schedule.schedules import order
from tests.schedule.mutate import judged

SCHEDULES = {
    **dict.fromkeys(("gpipe", "1f1b", "zb-h1"), (1,)),
    **dict.fromkeys(("interleaved", "bfs"), (2, 4)),
    **dict.fromkeys(("zb-v", "dualpipe-v"), (2,)),
    **dict.fromkeys(("greedy", "auto"), (1, 2)),
}
SECONDS, BROKEN = 1.0, 1000


def measure(schedule: str, p: int, v: int, m: int) -> dict[str, object]:
    """Make and prove the lists of a model whose first and last stage share a weight, with clipping."""
    pipeline = chain_pipeline(p * v, tied=p > 1, clips=True)
    start = time.process_time()
    orders = order(schedule, p * v, v, m)
    ordered = time.process_time()
    lists = emit(orders, pipeline, m)
    emitted = time.process_time()
    took: list[float] = []
    for _ in range(3):  # of which the best is told: other work of the machine is not the proof's
        before = time.process_time()
        proof = prove(lists)
        took.append(time.process_time() - before)
    return {
        "schedule": schedule,
        "p": p,
        "v": v,
        "m": m,
        "instructions": sum(map(len, lists.ranks)),
        "order_seconds": round(ordered - start, 3),
        "build_seconds": round(emitted - start, 3),
        "prove_seconds": round(min(took), 3),
        "proved": proof.ok,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--mutants", type=int, default=28, help="of each of 6 kinds, of each of 11 lists")
    asked = parser.parse_args()
    slowest, proved = 0.0, True
    for schedule, virtual in SCHEDULES.items():
        for v in virtual:
            for p in asked.ranks:
                for m in asked.microbatches:
                    found = measure(schedule, p, v, m)
                    slowest = max(slowest, float(str(found["prove_seconds"])))
                    proved = proved and bool(found["proved"])
                    print(json.dumps(found), flush=True)
    counts = judged(asked.mutants)
    broken, whole = counts.refused + counts.missed, counts.accepted + counts.wronged
    mutants = {
        "mutants_broken": broken.total(),
        "of_these_refused": counts.refused.total(),
        "mutants_unbroken": whole.total(),
        "of_these_refused_too": counts.wronged.total(),
        "by_kind": {kind: [broken[kind], whole[kind]] for kind in sorted(broken | whole)},
        "codes": dict(sorted(counts.codes.items())),
    }
    print(json.dumps(mutants), flush=True)
    held = {
        "slowest_proof_seconds": slowest,
        "all_proved_in_a_second": proved and slowest < SECONDS,
        "broken_all_refused": not counts.missed and broken.total() >= BROKEN,
        "unbroken_none_refused": not counts.wronged,
    }
    print(json.dumps(held), flush=True)


if __name__ == "__main__":
    main()
