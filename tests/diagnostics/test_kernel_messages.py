"""What an op of `kernels_triton` says of an operand that it does not take, word for word."""

import re
from collections.abc import Callable

import pytest
import torch

from kernels_triton import ops
from kernels_triton.gate import tuning
from kernels_triton.gate.corpus import transposed_add
from kernels_triton.generated.launcher import launcher
from shardc import ShardcError

X = torch.zeros(4, 6)
SQUARE = torch.zeros(6, 6)
TARGET = torch.zeros(4, dtype=torch.int64)
CASES: dict[str, Callable[[], object]] = {
    "weight": lambda: ops.layer_norm_backward(X, X, torch.zeros(5), torch.zeros(4), torch.ones(4)),
    "activation": lambda: ops.bias_gelu(X, None, "gleu"),
    "packed": lambda: ops.gated(torch.zeros(4, 7)),
    "logits": lambda: ops.cross_entropy(torch.zeros(2, 4, 6), TARGET),
    "target": lambda: ops.cross_entropy(X, TARGET.int()),
    "in_place": lambda: ops.cross_entropy(torch.zeros(6, 4).T, TARGET, in_place=True),
    "padded": lambda: ops.cross_entropy(X, TARGET, in_place=True, padded=True),
    "angles": lambda: ops.rope(torch.zeros(1, 2, 3, 8), torch.zeros(5, 4), torch.zeros(5, 4)),
    "contiguous": lambda: ops.adamw(X[:, 0], *[torch.zeros(4)] * 3, torch.tensor(0.1), torch.tensor(1)),
    "gradient": lambda: ops.rms_norm(X, torch.nn.Parameter(torch.ones(6))),
    "kind": lambda: ops.rms_norm(X, None, torch.tensor(1e-6)),  # pyright: ignore[reportArgumentType]
    "past_the_classes": lambda: ops.cross_entropy_finish(X, TARGET, torch.ones(2, 4, 3), 9, 6),
    "groups": lambda: ops.group_norm(torch.zeros(2, 10, 3), 4, None, None),
    "text": lambda: torch.ops.shardc.fused([X], "fused_neg[4|6](f32[4,6]){%1=negate(%0)}->f32[4,6]=%1"),
    "operand": lambda: torch.ops.shardc.fused([X], "fused_neg[4|8](f32[4,8]){%1=neg(%0)}->f32[4,8]=%1"),
    "over": lambda: launcher(transposed_add(6, 6, torch.float32))([SQUARE, SQUARE], out=[SQUARE]),
    "no_gpu": lambda: tuning.table(),
    "probability": lambda: ops.bias_dropout_residual(X, None, None, 1.5, torch.tensor(1), 0),
}


@pytest.mark.parametrize("name", CASES)
def test_messages(name: str, golden: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ShardcError) as caught:
        CASES[name]()
    golden(f"kernel/{name}.txt", re.sub(r"(test_kernel_messages\.py):\d+", r"\1", str(caught.value)))  # lines move
