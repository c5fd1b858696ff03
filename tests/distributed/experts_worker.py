"""What one rank of `test_experts.py` does: `python experts_worker.py CASE FOLDER`. A small Mixtral trains on a text."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardc
from shardc.ir.diagnostic import ShardcError
from shardc.ir.ops import exchange

TEXT = Path(__file__).parents[2] / "LICENSE"
STEPS, ROWS, LENGTH = 20, 8, 32
EXPERTS = {"params": {"**.experts.*": "ep"}, "inputs": {"input_ids": "dp, -", "labels": "dp, -"}}
SENT = EXPERTS | {"inputs": {"input_ids": "dp.ep, -", "labels": "dp.ep, -"}, "experts": "all_to_all"}


def capacity(factor: float, overflow: str = "drop") -> dict[str, Any]:
    return {"experts": {"dispatch": "all_to_all", "capacity": factor, "overflow": overflow}}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dp2ep2": ("dp=2, ep=2", EXPERTS),
    "all-to-all": ("dp=2, ep=2", SENT),
    "all-to-all zero3": ("dp=2, ep=2", SENT | {"storage": {"zero": 3, "axes": ["dp"]}}),
    "all-to-all ep4": ("ep=4", SENT | {"inputs": {"input_ids": "ep, -", "labels": "ep, -"}}),
    "all-to-all, turned": (  # torch has ranks in another order
        "dp=2, ep=2",
        SENT | {"params": {"**.experts.*": "ep.dp"}, "inputs": {"input_ids": "ep.dp, -", "labels": "ep.dp, -"}},
    ),
    "all-to-all pipeline": (
        "pp=2, ep=2",
        SENT | {"inputs": {"input_ids": "ep, -", "labels": "ep, -"}, "pipeline": {"axis": "pp", "microbatches": 2}},
    ),
    "zero3": ("dp=2, ep=2", EXPERTS | {"storage": {"zero": 3, "axes": ["dp"]}}),
    "capacity": ("dp=2, ep=2", SENT | capacity(1.0)),
    "capacity of all": ("dp=2, ep=2", SENT | capacity(4.0)),
    "capacity pipeline": (
        "pp=2, ep=2",
        SENT
        | capacity(1.25)
        | {"inputs": {"input_ids": "ep, -", "labels": "ep, -"}, "pipeline": {"axis": "pp", "microbatches": 2}},
    ),
    "capacity zero3": ("dp=2, ep=2", SENT | capacity(1.25) | {"storage": {"zero": 3, "axes": ["dp"]}}),
    "overflow": (
        "ep=2",
        SENT | capacity(1.0, overflow="error") | {"inputs": {"input_ids": "ep, -", "labels": "ep, -"}},
    ),
    "overflow dp2ep2": ("dp=2, ep=2", SENT | capacity(1.0, overflow="error")),
    "overflow pipeline": (
        "pp=2, ep=2",
        SENT
        | capacity(1.0, overflow="error")
        | {"inputs": {"input_ids": "ep, -", "labels": "ep, -"}, "pipeline": {"axis": "pp", "microbatches": 2}},
    ),
}


def layers_of(case: str) -> int:
    """A stage of a pipeline has one of its own."""
    return 2 if "pipeline" in case else 1


def mixtral(layers: int = 2) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers, "num_attention_heads": 4}
    experts = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(vocab_size=256, max_position_embeddings=LENGTH, **sizes, **experts))


def batches() -> list[Tensor]:
    """Bytes of the text, in its order."""
    tokens = torch.tensor(list(TEXT.read_bytes()[: STEPS * ROWS * LENGTH]))
    return list(tokens.view(STEPS, ROWS, LENGTH))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def compiled(case: str) -> shardc.Program:
    mesh, plan = CASES[case]
    model, ids = mixtral(layers_of(case)), batches()[0]
    batch = {"input_ids": ids, "labels": ids}
    return shardc.compile(model, batch, mesh=mesh, plan=plan, optimizer=optimizer_of(model))


def train(trainer: Any) -> dict[str, list[Any]]:
    """The loss of each step, or the code of the error that it ends in, and what experts were given."""
    losses, loads = list[float | str](), list[Any]()
    for ids in batches():
        try:
            result = trainer.step({"input_ids": ids, "labels": ids})
        except ShardcError as wrong:
            losses.append(wrong.diagnostics[0].code)
        else:
            losses.append(float(result.loss))
            loads.append(None if result.load is None else result.load.tolist())
    return {"losses": losses, "loads": loads}


def main() -> None:
    program = compiled(sys.argv[1])
    reads: list[int] = []
    read = exchange.read

    def counted(mine: Tensor, counts: Tensor) -> Any:
        reads.append(1)
        return read(mine, counts)

    exchange.read = counted
    with program.launch(timeout=60.0) as trainer:
        start = {name: value.clone() for name, value in trainer.state.items()}
        found = train(trainer)
        changed = sum(not torch.equal(value, start[name]) for name, value in trainer.state.items())
        held = sum(value.numel() for name, value in trainer.state.items() if name.endswith("experts.down_proj"))
    found |= {"held": held, "reads": len(reads), "changed": changed}
    Path(sys.argv[2], f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
