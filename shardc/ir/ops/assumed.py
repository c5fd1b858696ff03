"""`assume`: a truth value that a program was compiled for. `after`: a tensor, unchanged, behind such a check.

What Python asks of a batch while it is traced, `if labels.max() >= size`, is answered by the sample batch, and is part
of the program from then on. A step whose batch answers otherwise would be another program, and is refused. Nothing
reads the result of a check, so the loss waits for it: else it would be dead code.

The host reads the truth value, on a GPU too, as eager PyTorch does where a module asks: a device-side assertion would
leave a process that can compute nothing more, and the job could not go on with the next batch. The questions are of
the batch, so they come first in a step, and what waits is only the little that was launched before them.
"""

from __future__ import annotations

import torch

from kernels_triton.base.library import define

BROKEN = "a value of the batch is another than in the batch that the program was compiled for"


def _assume(holds: torch.Tensor) -> torch.Tensor:
    if not holds:
        raise ValueError(BROKEN)
    return holds.clone()


assume = define("assume(Tensor holds) -> Tensor", _assume, lambda holds: holds.clone())
after = define(
    "after(Tensor self, Tensor checked) -> Tensor",
    lambda self, checked: self.clone(),
    lambda self, checked: self.clone(),
)
