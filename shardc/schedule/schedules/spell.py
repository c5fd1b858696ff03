"""A notation for orders of work that take microbatches in increasing order: `F0 F0 F1 D1 W1 F0 B0 ...`

F, B, D, W are forward, backward, dgrad and wgrad; the digit is the index of the stage on its rank. Each word takes the
next microbatch of its stage; B and D share one count. A W without a digit belongs to the oldest pending dgrad of any
stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count

from shardc.schedule.instructions import Backward, Compute, Dgrad, Forward, Wgrad


def spell(words: Iterable[str], stages: Sequence[int], microbatches: int) -> list[Compute]:
    """Parse words into work. Work of microbatches beyond the last one is dropped."""
    forward, backward = ([count() for _ in stages] for _ in range(2))
    waiting: list[Wgrad] = []
    order: list[Compute] = []
    for word in words:
        which = int(word[1:] or 0)
        match word[0]:
            case "F":
                order.append(Forward(stages[which], next(forward[which])))
            case "B":
                order.append(Backward(stages[which], next(backward[which])))
            case "D":
                work = Dgrad(stages[which], next(backward[which]))
                waiting.append(Wgrad(work.stage, work.microbatch))
                order.append(work)
            case _:
                index = next(index for index, work in enumerate(waiting) if word == "W" or work.stage == stages[which])
                order.append(waiting.pop(index))
    return [work for work in order if work.microbatch < microbatches]
