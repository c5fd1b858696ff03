"""torch's own modules, with the arguments that torch tests them with: none trains otherwise than eager PyTorch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PARTS, SAMPLE = 64, 640  # a sample is of so many parts one
# What is refused, and is right to be: by the module's name.
REFUSED = {
    # momentum=None divides by a count that is a tensor; CTC reads lengths, a transformer its mask, and the Gaussian
    # loss the signs of its variances, from tensors.
    "SC101": ("nn.BatchNorm", "nn.LazyBatchNorm", "nn.CTCLoss", "nn.Transformer", "nn.GaussianNLLLoss"),
    # A batch of no elements.
    "SC103": tuple(f"nn.{norm}" for norm in ("BatchNorm", "LayerNorm 5", "RMSNorm 5")),
    "SC104": ("nn.LinearCrossEntropyLoss",),  # in chunks, by an op of torch's that is none of ATen
    "SC112": ("nn.Lazy",),
}


def outcomes(part: int, of: int) -> dict[str, str]:
    command = [sys.executable, "-m", "tests.hostile.torch_modules", str(part), str(of)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return {one["case"]: one["outcome"] for one in map(json.loads, ran.stdout.splitlines())}


def unexpected(found: dict[str, str]) -> dict[str, str]:
    return {
        case: outcome
        for case, outcome in found.items()
        if outcome not in ("right", "nothing to shard", "eager refuses")
        and not case.startswith(REFUSED.get(outcome, ("none",)))
    }


def test_a_sample() -> None:
    found = outcomes(0, SAMPLE)
    assert not unexpected(found)
    assert list(found.values()).count("right") > len(found) // 2


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_all(part: int) -> None:
    assert not unexpected(outcomes(part, PARTS))
