"""What one rank of `test_scans.py` does: `python scans_worker.py CASE FOLDER`. The sequence of a model with recurrences
lies over two ranks: a loop whose states are gathered, one whose states go by turns, and states of chunks."""

import json
import os
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardc

STEPS, LENGTH, WIDTH, CHUNK = 3, 18, 4, 4  # the last chunk has two rows
CASES = ("none", "zigzag")  # how the sequence lies


def segment_sum(x: Tensor) -> Tensor:
    size = x.shape[-1]
    x = x[..., None].expand(*x.shape, size)
    x = x.masked_fill(~torch.tril(torch.ones(size, size, dtype=torch.bool), diagonal=-1), 0)
    return x.cumsum(-2).masked_fill(~torch.tril(torch.ones(size, size, dtype=torch.bool)), -torch.inf)


class Recurrences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, 16)
        self.decay, self.start = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))
        self.taps = nn.Parameter(torch.randn(WIDTH, WIDTH, 3) / 3)

    def of_chunks(self, x: Tensor, a: Tensor) -> Tensor:
        batch, steps, _ = x.shape
        pad = (0, 0, 0, -steps % CHUNK)
        x, a = (F.pad(t, pad).reshape(batch, -1, CHUNK, WIDTH) for t in (x, a.log()))
        a = a.permute(0, 3, 1, 2)
        sums = a.cumsum(-1)
        within = torch.einsum("bwcls,bcsw->bclw", segment_sum(a).exp(), x)
        states = torch.einsum("bwcl,bclw->bcw", (sums[..., -1:] - sums).exp(), x)
        states = torch.cat([self.start.expand(batch, 1, WIDTH), states], 1)
        states = torch.einsum("bwcz,bzw->bcw", segment_sum(F.pad(sums[..., -1], (1, 0))).exp(), states)
        y = within + torch.einsum("bcw,bwcl->bclw", states[:, :-1], sums.exp())
        return y.reshape(batch, -1, WIDTH)[:, :steps]

    def loop(self, x: Tensor, a: Tensor) -> Tensor:
        h = m = self.start.expand(x.shape[0], WIDTH)
        ys = []
        for t in range(x.shape[1]):
            h = a[:, t] * h + x[:, t]
            ys.append(h)
        zs = []
        for t in range(x.shape[1]):
            m = torch.tanh(a[:, t] * m + x[:, t])
            zs.append(m)
        return torch.stack(ys, 1) + torch.stack(zs, 1)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids)
        a = torch.sigmoid(self.decay(x))
        y = self.of_chunks(x, a) + self.loop(x, a)
        shorter = F.conv1d(y.mT, self.taps, stride=2)
        return F.cross_entropy(self.head(x + y).flatten(0, 1), labels.flatten()) + shorter.pow(2).mean()


def model() -> nn.Module:
    torch.manual_seed(0)
    return Recurrences().double()


def batches() -> list[dict[str, Tensor]]:
    parts = torch.randint(0, 16, (STEPS, 2, 4, LENGTH), generator=torch.Generator().manual_seed(0))
    return [{"ids": ids, "labels": labels} for ids, labels in parts]


def trained(case: str) -> list[float]:
    made, data = model(), batches()
    plan = {"inputs": {"ids": "-, cp", "labels": "-, cp"}, "context": {"balance": case}}
    optimizer = torch.optim.SGD(made.parameters(), 0.1)
    program = shardc.compile(made, data[0], mesh="cp=2", plan=plan, optimizer=optimizer)
    with program.launch(timeout=60) as trainer:
        return [float(trainer.step(batch).loss) for batch in data]


def main() -> None:
    torch.set_num_threads(1)
    (Path(sys.argv[2]) / f"{os.environ['RANK']}.json").write_text(json.dumps(trained(sys.argv[1])))


if __name__ == "__main__":
    main()
