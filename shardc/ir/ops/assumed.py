"""`assume`: a truth value that a program was compiled for. `after`: a tensor, unchanged, behind such a check.

What Python asks of a batch while it is traced, `if labels.max() >= size`, is answered by the sample batch, and is part
of the program from then on. A step whose batch answers otherwise would be another program, and is refused. Nothing
reads the result of a check, so the loss waits for it: else it would be dead code.

On a GPU nothing is read back: an assumption that does not hold is a device-side assertion.
"""

from __future__ import annotations

import torch

from kernels_triton.base.library import define
from shardc.torch_compat import assert_async

BROKEN = "a value of the batch is another than in the batch that the program was compiled for"


def _assume(holds: torch.Tensor) -> torch.Tensor:
    if holds.is_cuda:
        assert_async(holds, BROKEN)
    elif not holds:
        raise ValueError(BROKEN)
    return holds.clone()


assume = define("assume(Tensor holds) -> Tensor", _assume, lambda holds: holds.clone())
after = define(
    "after(Tensor self, Tensor checked) -> Tensor",
    lambda self, checked: self.clone(),
    lambda self, checked: self.clone(),
)
