"""`accumulate(x)`: the sum of x over the microbatches of a step.

Where a graph has several microbatches (`Graph.microbatches`), what leads to an `accumulate` runs once a microbatch and
what follows it runs once a step. Run alone, as a call on one microbatch, it is that microbatch's term: a copy of x,
which the runtime adds the others' to. It is linear, so the sum over microbatches of what is pending over an axis is
pending over it: one reduction a step, whatever the number of microbatches.
"""

from __future__ import annotations

import torch

from kernels_triton.base.library import define

ACCUMULATE = define("accumulate(Tensor x) -> Tensor", torch.clone, torch.clone)
