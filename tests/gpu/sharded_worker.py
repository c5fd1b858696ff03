"""What one rank of `tests/gpu/test_sharded.py` does: `python sharded_worker.py CASE FOLDER`, under torchrun."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import shardc
from shardc.ir.diagnostic import ShardcError
from shardc.ir.ops import exchange
from tests.distributed import experts_worker, halo_worker
from tests.expert_loops import Stacked
from tests.expert_loops import rows as rows_of_loops

RANK, DEVICE = int(os.environ.get("RANK", "0")), os.environ.get("DEVICE", "cuda")
STEPS = 5
SENT: dict[str, Any] = {"mesh": "ep=2", "params": {"**.experts.*": "ep"}, "inputs": {"*": "ep"}}
EXACT = SENT | {"experts": "all_to_all"}


def limited(factor: float, overflow: str = "drop") -> dict[str, Any]:
    return SENT | {"experts": {"dispatch": "all_to_all", "capacity": factor, "overflow": overflow}}


class Case(NamedTuple):
    """`rows` are batches, one a step; `limited`: eager PyTorch drops nothing, so the single device is simulated."""

    model: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Tensor]]
    plan: dict[str, Any]
    tolerance: float
    limited: bool = False


def text(step: int) -> dict[str, Tensor]:
    ids = experts_worker.batches()[step]
    return {"input_ids": ids, "labels": ids}


def words(step: int, length: int = 16) -> dict[str, Tensor]:
    ids = torch.randint(3, 32, (4, length), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def images(step: int) -> dict[str, Tensor]:
    x = torch.randn(4, 3, 16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return {"x": x}


def positions(step: int) -> dict[str, Tensor]:
    return {"x": rows_of_loops(step).float()}


def mamba() -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "time_step_rank": 4}
    return MambaForCausalLM(MambaConfig(**sizes, use_cache=False)).train()


def qwen2() -> nn.Module:
    """With shared experts, whose products run while rows are under way."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 48, "moe_intermediate_size": 16, "num_experts": 4}
    sizes |= {"num_experts_per_tok": 2, "shared_expert_intermediate_size": 48, "max_position_embeddings": 32}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**sizes))


def loop() -> nn.Module:
    """A loop over experts that is written by hand."""
    torch.manual_seed(0)
    return Stacked()


MAMBA_TP = {"params": {"**.in_proj.weight": "2*tp, -", "**.out_proj.weight": "-, tp"}}
STACKED = {"params": {"up": "ep", "down": "ep", "bias": "ep"}}
CASES: dict[str, Case] = {
    "capacity": Case(experts_worker.mixtral, text, limited(1.0), 2e-3, True),
    "capacity of all": Case(experts_worker.mixtral, text, limited(4.0), 1e-4),
    "capacity fused, accumulated": Case(
        experts_worker.mixtral, text, limited(1.25) | {"fuse": True, "accumulate": 2, "recompute": "full"}, 2e-3, True
    ),
    "capacity bf16": Case(experts_worker.mixtral, text, limited(1.25) | {"precision": "bf16"}, 3e-2, True),
    "shared experts": Case(qwen2, words, EXACT, 1e-4),
    "shared experts fused": Case(qwen2, words, EXACT | {"fuse": True}, 1e-4),
    "shared experts, capacity": Case(qwen2, words, limited(4.0), 1e-4),
    "loop": Case(loop, positions, {"mesh": "ep=2", "inputs": {"x": "ep"}, **STACKED, "experts": "all_to_all"}, 1e-4),
    "loop, together": Case(loop, positions, {"mesh": "ep=2", **STACKED}, 1e-4),
    "scan dp2": Case(mamba, words, {"mesh": "dp=2", "inputs": {"*": "dp, -"}}, 1e-4),
    "scan tp2": Case(mamba, words, {"mesh": "tp=2", **MAMBA_TP}, 1e-4),
    "scan fused, recomputed": Case(mamba, words, {"mesh": "tp=2", **MAMBA_TP, "fuse": True, "recompute": "full"}, 1e-4),
    "halo rows": Case(halo_worker.model, images, {"mesh": "sp=2", "inputs": {"x": "-, -, sp, -"}}, 1e-9),
    "halo columns, fused": Case(
        halo_worker.model, images, {"mesh": "sp=2", "inputs": {"x": "-, -, -, sp"}, "fuse": True}, 1e-9
    ),
    "halo recomputed": Case(
        halo_worker.model,
        images,
        {"mesh": "sp=2", "inputs": {"x": "-, -, sp, -"}, "recompute": "full", "accumulate": 2},
        1e-9,
    ),
}
OVERFLOWS = Case(experts_worker.mixtral, text, limited(1.0, "error"), 0.0, True)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def compiled(case: Case) -> shardc.Program:
    model = case.model()
    return shardc.compile(model, case.batch(0), plan=case.plan, optimizer=optimizer_of(model))


def trained(trainer: Any, case: Case) -> dict[str, Any]:
    """The loss of each step, or the code of the error that it ends in; what was dropped; how often the host read."""
    losses, dropped, reads = list[float | str](), list[Any](), list[int]()
    read = exchange.read

    def counted(*given: Any) -> Any:
        reads.append(1)
        return read(*given)

    exchange.read = counted
    before = {name: value.clone() for name, value in trainer.state.items()}
    try:
        for step in range(STEPS):
            try:
                result = trainer.step(case.batch(step))
            except ShardcError as wrong:
                losses.append(wrong.diagnostics[0].code)
            else:
                losses.append(float(result.loss))
                dropped.append(None if result.dropped is None else torch.as_tensor(result.dropped).tolist())
    finally:
        exchange.read = read
    changed = sum(not torch.equal(value, before[name]) for name, value in trainer.state.items())
    device = str(next(iter(trainer.state.values())).device)
    return {"losses": losses, "dropped": dropped, "reads": len(reads), "changed": changed, "device": device}


def main() -> None:
    case = OVERFLOWS if sys.argv[1] == "overflow" else CASES[sys.argv[1]]
    with compiled(case).launch(timeout=120.0, device=DEVICE) as trainer:
        found = trained(trainer, case)
    Path(sys.argv[2], f"{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
