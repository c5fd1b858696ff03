"""Ranks that are not alike: what one rank of `test_agreement.py` does.

One pair of processes takes all faults in turn (`agree`): the error is the same on both, so that the next launch meets
again. Or a pair takes the one that is named, and ends as a user's script does, by the error.
"""

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardc
from shardc.runtime.train import agreement
from shardc.runtime.train.trainer import Trainer

RANK = int(os.environ["RANK"])
ODD = int(os.environ["WORLD_SIZE"]) - 1 == RANK
ZERO = {"storage": {"params": {"**.*": "dp"}}}
TWO_STAGES = {"pipeline": {"stages": 2, "microbatches": 2}}


class Model(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(8, 16), nn.Linear(16, 4), act
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.dropout(self.act(self.up(x))))
        return y.square().mean()


def job(
    *,
    act: Callable[[Tensor], Tensor] = torch.relu,
    weights: int = 0,
    lr: float = 0.1,
    momentum: float = 0.9,
    clip: float = 1.0,
    data: int = 0,
    seed: int = 0,
    plan: Mapping[str, object] | None = None,
    mesh: str = "dp=2",
    adam: bool = False,
    not_a_number: bool = False,
    steps: int = 4,
    before: Callable[[Trainer, torch.optim.Optimizer, int], None] | None = None,
) -> list[float]:
    """Losses of some steps."""
    torch.manual_seed(weights)
    model = Model(act)
    if not_a_number:
        with torch.no_grad():
            model.up.weight[0, 0] = float("nan")
    params = model.parameters()
    optimizer = torch.optim.Adam(params, lr) if adam else torch.optim.SGD(params, lr, momentum)
    batch = torch.randn(4, 8)
    wanted = {"clip_grad_norm": clip, "inputs": {"*": "dp"} if "dp" in mesh else {}, **(plan or {})}
    program = shardc.compile(model, batch, mesh=mesh, plan=wanted, optimizer=optimizer)
    losses: list[float] = []
    trainer = program.launch(seed=seed, timeout=30)
    for step in range(steps):
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * data + step))
        if before is not None:
            before(trainer, optimizer, step)
        losses.append(float(trainer.step(batch).loss))
    if sys.argv[1] != "agree":
        trainer.close()
    return losses


def rate_later(trainer: Trainer, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.param_groups[0]["lr"] = 0.1 + 0.1 * (ODD and step == 2)


def written(trainer: Trainer, optimizer: torch.optim.Optimizer, step: int) -> None:
    if ODD and step == 1:
        trainer.state["up.weight"][3] += 0.5


def not_a_number(trainer: Trainer, optimizer: torch.optim.Optimizer, step: int) -> None:
    if ODD and step == 1:
        trainer.state["up.weight"][3] = float("nan")


def rounded(trainer: Trainer, optimizer: torch.optim.Optimizer, step: int) -> None:
    if ODD and step == 1:
        trainer.state["up.weight"] *= 1 + 1e-6


def moved(trainer: Trainer, optimizer: torch.optim.Optimizer, step: int) -> None:
    if ODD and step == 1:
        trainer.steps += 1


def other_version() -> list[float]:
    known = agreement.VERSION
    agreement.VERSION = "0.0.9" if ODD else known
    try:
        return job()
    finally:
        agreement.VERSION = known


CASES: dict[str, Callable[[], list[float]]] = {
    "alike": job,
    "alike_sharded": lambda: job(plan=ZERO),
    "alike_tensor_parallel": lambda: job(mesh="tp=2", plan={"params": {"up.weight": "tp, -"}}),
    "alike_pipeline": lambda: job(mesh="pp=2", plan=TWO_STAGES),
    "seed": lambda: job(seed=int(ODD)),
    "rate": lambda: job(lr=0.2 if ODD else 0.1),
    "rate_later": lambda: job(before=rate_later),
    "plan": lambda: job(clip=2.0 if ODD else 1.0),
    "version": other_version,
    "data": lambda: job(data=int(ODD)),
    "data_pipeline": lambda: job(mesh="pp=2", plan=TWO_STAGES, data=int(ODD)),
    "optimizer": lambda: job(momentum=0.8 if ODD else 0.9),
    "weights": lambda: job(weights=int(ODD)),
    "weights_sharded": lambda: job(weights=int(ODD), plan=ZERO),
    "forward": lambda: job(act=torch.tanh if ODD else torch.relu),
    "written": lambda: job(before=written),
    "kind": lambda: job(adam=ODD),
    "nan": lambda: job(not_a_number=ODD),
    "nan_later": lambda: job(before=not_a_number),
    "rounded": lambda: job(before=rounded),
    "moved": lambda: job(before=moved),
}


ALONE = {"twice": lambda: job(steps=8 if ODD else 4)}  # one rank trains again when the other has closed


def by_itself(name: str, folder: Path) -> None:
    """One fault, and the script's own end: by the error, which torch's threads must not hold up."""
    started = time.monotonic()
    said: dict[str, object] = {"error": None, "code": None}
    try:
        said["losses"] = {**CASES, **ALONE}[name]()
    except shardc.ShardcError as failure:
        said |= {"error": str(failure), "code": failure.code}
        raise
    finally:
        said["seconds"] = time.monotonic() - started
        (folder / f"{RANK}.json").write_text(json.dumps(said))


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1] != "agree":
        by_itself(sys.argv[1], Path(sys.argv[2]))
        return
    dist.init_process_group("gloo")
    found: dict[str, dict[str, object]] = {}
    for name, run in CASES.items():
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                found[name] = {"losses": run()}
            except shardc.ShardcError as failure:
                found[name] = {"error": str(failure)}
        found[name]["warnings"] = [str(one.message) for one in said]
    (Path(sys.argv[2]) / f"{RANK}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


main()
