"""Do the planner's plans compile and verify, for every model type of the installed `transformers`?

    python -m benchmarks.zoo_planned --out planned.jsonl --jobs 64    all; goes on where an earlier run was ended
    python -m benchmarks.zoo_planned --only bert --only causal/llama  these, whatever the file says
    python -m benchmarks.zoo_planned --summary planned.jsonl          counts, and what did not verify

For four ranks, and thrice: as the planner likes, with `tp=2` kept, and with `pp=2` kept. Models are those of
`benchmarks.zoo` with four layers; they are so small that a planner left alone divides rows, and the kept axes show what
it finds beside them. The best plan is compiled in the model's own precision, and verified: all ranks, forward and
backward, against one device.

    kept     what was kept: "-", "tp=2" or "pp=2"
    status   as in `benchmarks.zoo`, and `no plan`: SC250 or SC251
    best     the plan's mesh, storage and recomputation; `plan_s` what it took to find, `predicted_ms` of its program
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import shardc
from benchmarks.zoo import LIMIT, Line, add_run_options, chosen, in_process, read, run_all, said, verified
from benchmarks.zoo_batches import loss_of
from benchmarks.zoo_models import Entry, NotReadyError, entries
from benchmarks.zoo_sizes import SIZES
from shardc.ir.diagnostic import ShardcError

RANKS, LAYERS, HARDWARE = 4, 4, "h200-nvlink"
KEPT = {"-": {}, "tp=2": {"mesh": "tp=2"}, "pp=2": {"mesh": "pp=2"}}
NO_PLAN = ("SC250", "SC251")
SIZES.update(dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS))


def plan_and_verify(entry: Entry) -> Iterable[Line]:
    """A line for each plan that is kept, in this process."""
    line: Line = {"name": entry.name, "class": entry.model_class}
    for kept, keep in KEPT.items():
        try:
            model, batch, has_loss, _ = entry.ready()
        except NotReadyError as wrong:
            yield line | {"kept": kept, "status": wrong.stage, **said(wrong.cause)}
            return
        loss = None if has_loss else loss_of
        started = time.perf_counter()
        try:
            ranking = shardc.autoplan(
                model, batch, gpus=RANKS, hardware=HARDWARE, loss=loss, keep=keep, precision=None, top=3
            )
            planned: Line = {
                "plan_s": round(time.perf_counter() - started, 2),
                "best": str(ranking.best.candidate),
                "considered": ranking.considered,
            }
            program = shardc.compile(model, batch, plan=ranking.best.plan, loss=loss, cache=False)
            planned["predicted_ms"] = round(program.predict(HARDWARE).step_ms, 4)
            yield line | {"kept": kept} | planned | verified(program)
        except ShardcError as refused:
            first = refused.diagnostics[0]
            status = "no plan" if first.code in NO_PLAN else "refused"
            yield line | {"kept": kept, "status": status, "code": first.code, "error": first.message[:200]}
        except Exception as wrong:  # a defect of ours
            yield line | {"kept": kept, "status": "crashed", **said(wrong)}


def summary(lines: Iterable[Line]) -> str:
    """Counts by what was kept; then every line that did not verify, by cause."""
    last = {(line["name"], line.get("kept", "")): line for line in lines}
    counts: dict[str, Counter[str]] = {}
    causes: dict[str, list[str]] = {}
    for (name, kept), line in sorted(last.items()):
        counts.setdefault(kept, Counter())[line["status"]] += 1
        if line["status"] != "verified":
            said_ = [line["status"], line.get("code", ""), line.get("error", "").partition("\n")[0][:110]]
            causes.setdefault(" ".join(filter(None, said_)), []).append(f"{name} ({kept})")
    rows = [f"{kept or 'ended'}: " + ", ".join(f"{n} {s}" for s, n in c.most_common()) for kept, c in counts.items()]
    return "\n".join([*rows, "", *(f"- {cause}: {', '.join(names)}" for cause, names in sorted(causes.items()))])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_run_options(parser, Path("planned.jsonl"), 2 * LIMIT)
    options = parser.parse_args(arguments)
    if options.summary:
        print(summary(read(options.summary)))
        return
    if options.here:
        for line in plan_and_verify(chosen(entries(), [options.here], "")[0]):
            print(json.dumps(line), flush=True)
        return
    try:
        wanted = chosen(entries(), options.only, options.shard)
    except ValueError as wrong:
        parser.error(str(wrong))
    run_all(wanted, options, lambda entry: in_process(entry, options.limit, "benchmarks.zoo_planned"))
    print(summary(read(options.out)))


if __name__ == "__main__":
    main()
