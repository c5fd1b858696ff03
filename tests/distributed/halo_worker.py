"""What one rank of `test_halo.py` does: `python halo_worker.py train FOLDER`. Images are sharded over their rows."""

import json
import os
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import shardc

STEPS, RATE = 3, 0.05
PLANS = {
    "sp4": ("sp=4", "-, -, sp, -", {}),
    "dp2 x sp2": ("dp=2, sp=2", "dp, -, sp, -", {"storage": {"zero": 3, "axes": ["dp"]}, "bucket": True}),
    "a2 x b2": ("a=2, b=2", "-, -, a, b", {"recompute": "full", "accumulate": 2}),
}


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.third = nn.Conv2d(4, 2, (3, 1), padding=(1, 0))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.third(h).square().mean()


def model() -> Images:
    torch.manual_seed(0)
    return Images().double()


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(4, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))}


def trained(case: str) -> dict[str, object]:
    mesh, placed, plan = PLANS[case]
    made = model()
    optimizer = torch.optim.SGD(made.parameters(), RATE)
    program = shardc.compile(made, batch(), mesh=mesh, plan={"inputs": {"x": placed}, **plan}, optimizer=optimizer)
    with program.launch(timeout=60) as trainer:
        losses = [float(trainer.step(batch()).loss) for _ in range(STEPS)]
        norms = {name: float(t.norm()) for name, t in trainer.state_dict().items() if name.endswith(("weight", "bias"))}
    return {"losses": losses, "norms": norms}


def main() -> None:
    torch.set_num_threads(1)
    found = {case: trained(case) for case in PLANS}
    (Path(sys.argv[2]) / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
