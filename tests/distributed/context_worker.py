"""What one rank of `test_context.py` does: `python context_worker.py CASE FOLDER`. A Llama reads text of this project,
byte by byte, and its sequence lies over ranks; or a BART, whose encoder's does."""

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
    "keys, dp2 x cp2": ("dp=2, cp=2", {"context": {"keys": "merge"}}),
    "cp2 x tp2, sp": ("cp=2, tp=2", {"params": TP, "context": "ring", "activations": {"**.o_proj": "-, cp.tp, -"}}),
    "out2 x in2": ("out=2, in=2", {"context": "hierarchical", "storage": {"zero": 3, "axes": ["out", "in"]}}),
}


def model(case: str) -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if case.startswith("keys"):
        layers: Any = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
        heads: Any = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 256, "d_model": 32}
        return BartForConditionalGeneration(BartConfig(**layers, **heads, dropout=0.0, use_cache=False))
    sizes: Any = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False))


def batches(case: str) -> list[dict[str, Tensor]]:
    text = torch.frombuffer(bytearray(TEXT.read_bytes()[: STEPS * 2 * LENGTH]), dtype=torch.uint8).long()
    parts = text.view(STEPS, 2, LENGTH)
    if case.startswith("keys"):
        decoded = [(part[:, :5].clone(), part[:, 1:6].clone()) for part in parts]
        names = ("input_ids", "decoder_input_ids", "labels")
        return [dict(zip(names, (part, *pair), strict=True)) for part, pair in zip(parts, decoded, strict=True)]
    return [{"input_ids": part, "labels": part} for part in parts]


def trained(case: str) -> list[float]:
    mesh, plan = PLANS[case]
    made, data = model(case), batches(case)
    optimizer = torch.optim.AdamW(made.parameters(), RATE)
    rows = "out.in" if "out" in mesh else "cp"
    inputs = {"input_ids": f"-, {rows}", "labels": f"-, {rows}"}
    if case.startswith("keys"):
        inputs = {"input_ids": "dp, cp", "decoder_input_ids": "dp", "labels": "dp"}
    program = shardc.compile(made, data[0], mesh=mesh, plan={"inputs": inputs, **plan}, optimizer=optimizer)
    with program.launch(timeout=60) as trainer:
        return [float(trainer.step(batch).loss) for batch in data]


def main() -> None:
    torch.set_num_threads(1)
    (Path(sys.argv[2]) / f"{os.environ['RANK']}.json").write_text(json.dumps(trained(sys.argv[1])))


if __name__ == "__main__":
    main()
