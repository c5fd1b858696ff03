"""What one rank of `test_loop.py` does: `python loop_worker.py CASES FOLDER`.

In each case it runs the training loop until rank 1 alone gets a reason to end, then a second time, from the checkpoint;
it writes how both went.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from shardc import Metrics
from tests.runtime.looped import HELD_OUT, batches, plateau, started

CASES, FOLDER, RANK = sys.argv[1].split(","), Path(sys.argv[2]), int(os.environ["RANK"])
LAST, END = 12, 5  # steps of a whole run; the step after which rank 1 has its reason


def run(case: str, folder: Path) -> dict[str, Any]:
    def ends(metrics: Metrics, _: Any) -> Any:
        if RANK != 1 or metrics.step != END:
            return None
        if "error" in case:
            raise LookupError("nothing there")
        if case.startswith("SIG"):
            os.kill(os.getpid(), signal.Signals[case.split(maxsplit=1)[0]])
        return case == "stop"

    trainer, optimizer = started(timeout=120.0)
    losses: list[float] = []
    rates: list[float] = []
    began, end = time.monotonic(), ""
    try:
        with trainer:
            for metrics in trainer.train(
                batches(), LAST, checkpoint=folder, every=1, scheduler=plateau(optimizer), monitor="evaluated.loss",
                evaluate=HELD_OUT, evaluate_every=2, callbacks=[] if "caller" in case else [ends], progress=False,
            ):  # fmt: skip
                losses.append(metrics.loss)
                rates.append(metrics.learning_rates[0])
                if "caller" in case:
                    ends(metrics, trainer)
    except BaseException as failure:
        end = f"{type(failure).__name__}: {failure}"
    return {"losses": losses, "rates": rates, "end": end, "steps": trainer.steps, "seconds": time.monotonic() - began}


def main() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    results: dict[str, list[dict[str, Any]]] = {}
    for case in CASES:
        results[case] = [run(case, FOLDER / case)]
        if case != "error in the caller's loop":
            results[case].append(run("", FOLDER / case))
    (FOLDER / f"{RANK}.json").write_text(json.dumps(results))


main()
