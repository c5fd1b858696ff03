"""Three launches in one process, the last of which ends by an error: `ending_worker.py raised|open`.

The monitor of a rank that fails lives on until the process exits. Here it does not wait between two beats, so that it
is in a call of the store when Python finalizes.
"""

import sys
import time

import torch
from torch import nn

import shardc
from shardc.runtime.execute import monitor


def beat_without_pause() -> None:
    beat, monitor.BEAT = monitor.BEAT, 0.0
    time.sleep(1.2 * beat)


def main(how: str) -> None:
    x = torch.zeros(2, 2)
    program = shardc.compile(nn.Linear(2, 2), x, mesh="dp=1", loss=lambda output, _: output.sum())
    for _ in range(2):
        with program.launch(device="cpu") as trainer:
            trainer.step(x)
    if how == "open":
        program.launch(device="cpu").step(x)
        beat_without_pause()
        return
    with program.launch(device="cpu"):
        beat_without_pause()
        raise ValueError("the batch is bad")


main(sys.argv[1])
