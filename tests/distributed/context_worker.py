"""What one rank of `test_context.py` does: `python context_worker.py CASE FOLDER`. A Llama reads text of this project,
byte by byte, and its sequence lies over ranks."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardc

STEPS, RATE, LENGTH = 20, 1e-3, 34  # two rows more than 4 ranks divide
TEXT = Path(__file__).parents[2] / "docs" / "glossary.md"
TP = {f"**.{name}_proj.weight": "tp, -" for name in ("q", "k", "v", "gate", "up")}
TP |= {f"**.{name}_proj.weight": "-, tp" for name in ("o", "down")}
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "cp4, ring": ("cp=4", {"context": "ring"}),
    "cp4, all_to_all": ("cp=4", {"context": {"attention": "all_to_all", "balance": "none"}}),
    "cp4, all_gather": ("cp=4", {"context": "all_gather", "recompute": "full", "bucket": True}),
    "cp2 x tp2": ("cp=2, tp=2", {"params": TP}),
    "cp2 x tp2, sp": ("cp=2, tp=2", {"params": TP, "context": "ring", "activations": {"**.o_proj": "-, cp.tp, -"}}),
    "out2 x in2": ("out=2, in=2", {"context": "hierarchical", "storage": {"zero": 3, "axes": ["out", "in"]}}),
}


def model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: Any = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads: Any = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False))


def batches() -> list[dict[str, Tensor]]:
    text = torch.frombuffer(bytearray(TEXT.read_bytes()[: STEPS * 2 * LENGTH]), dtype=torch.uint8).long()
    return [{"input_ids": part, "labels": part} for part in text.view(STEPS, 2, LENGTH)]


def trained(case: str) -> list[float]:
    mesh, plan = PLANS[case]
    made, data = model(), batches()
    optimizer = torch.optim.AdamW(made.parameters(), RATE)
    rows = "out.in" if "out" in mesh else "cp"
    inputs = {"input_ids": f"-, {rows}", "labels": f"-, {rows}"}
    program = shardc.compile(made, data[0], mesh=mesh, plan={"inputs": inputs, **plan}, optimizer=optimizer)
    with program.launch(timeout=60) as trainer:
        return [float(trainer.step(batch).loss) for batch in data]


def main() -> None:
    torch.set_num_threads(1)
    (Path(sys.argv[2]) / f"{os.environ['RANK']}.json").write_text(json.dumps(trained(sys.argv[1])))


if __name__ == "__main__":
    main()
