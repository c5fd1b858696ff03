"""Train Hugging Face's GPT-2, unmodified, on the text of Python's own documentation.

    python examples/train_gpt2.py                                    all ranks simulated in this process
    torchrun --nproc-per-node 4 examples/train_gpt2.py               four processes: gloo, or NCCL where there are GPUs
    ... --zero 1 --precision bf16 --accumulate 4 --checkpoint run    ZeRO, mixed precision, microbatches; run it again,
                                                                     with more --steps, and it goes on

No process ever holds the whole model: it is compiled on the meta device, and each rank loads its own slices of
`--weights` (safetensors), or draws one tensor at a time and keeps its shard. Tokens are bytes.
"""

import argparse
import math
import pydoc_data.topics
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import shardc

PLAN = Path(__file__).parents[1] / "configs/plans/gpt2.yaml"


def options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="dp=2, tp=2")
    parser.add_argument("--plan", default=str(PLAN))
    parser.add_argument("--weights", help="a safetensors file or a folder of them; without, weights are drawn")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16", "float64"))
    parser.add_argument("--device", help="cpu or cuda; by default a GPU where there is one")
    parser.add_argument("--optimizer", default="adamw", choices=("adamw", "sgd"), help="sgd is plain, at one rate")
    parser.add_argument("--precision", choices=("bf16", "fp16"), help="compute in it; weights stay float32")
    parser.add_argument("--checkpoint", help="a folder to save to, and to go on from where it exists")
    for name, value in {"zero": 0, "accumulate": 1, "every": 100}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in {"steps": 20, "layers": 2, "heads": 8, "width": 512, "batch": 4, "seq": 32}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=0.001)
    return parser.parse_args(argv)


def gpt2(args: argparse.Namespace) -> GPT2LMHeadModel:
    """The model of these options, on the default device: under `torch.device("meta")` it has shapes alone."""
    config = GPT2Config(
        n_layer=args.layers,
        n_head=args.heads,
        n_embd=args.width,
        n_positions=args.seq,
        vocab_size=256,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config).to(getattr(torch, args.dtype))


def initial(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """GPT-2's own initialisation of one tensor; it depends on the name alone, and so is the same on every rank."""
    if len(shape) == 1:
        return (torch.ones if ".ln_" in name and name.endswith("weight") else torch.zeros)(shape, dtype=dtype)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return (torch.randn(shape, generator=generator) * 0.02).to(dtype)


def batches(args: argparse.Namespace) -> Iterator[dict[str, Tensor]]:
    """Random stretches of the documentation, the same on every rank."""
    text = "\n".join(pydoc_data.topics.topics.values()).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    for _ in range(args.steps):
        starts = torch.randint(len(data) - args.seq, (args.batch,), generator=generator)
        tokens = torch.stack([data[start : start + args.seq] for start in starts.tolist()])
        yield {"input_ids": tokens, "labels": tokens}


def plan(args: argparse.Namespace) -> shardc.Plan:
    """The plan's file, with what the options add to it."""
    more: dict[str, Any] = {"accumulate": args.accumulate}
    if args.zero:
        more["storage"] = {"zero": args.zero, "axes": ["dp"]}
    if args.precision:
        more["precision"] = args.precision
    if args.optimizer == "adamw":
        more["clip_grad_norm"] = 1.0
    return shardc.Plan.load(args.plan).merge(shardc.Plan.from_dict(more))


def main(args: argparse.Namespace) -> list[float]:
    torch.manual_seed(0)
    with torch.device("meta"):
        model = gpt2(args)
    if args.optimizer == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    program = shardc.compile(model, next(batches(args)), plan=plan(args), mesh=args.mesh, optimizer=optimizer)
    losses: list[float] = []
    with program.launch(state=args.weights, init=initial, device=args.device, timeout=120) as trainer:
        mine, whole = program.parameter_bytes()
        if trainer.leads:
            print(f"{program.mesh}: a rank holds {mine / 2**20:.1f} of {whole / 2**20:.1f} MiB of parameters")
        run = {"checkpoint": args.checkpoint, "every": args.every if args.checkpoint else 0, "scheduler": scheduler}
        for metrics in trainer.train(batches(args), args.steps, **run):
            assert math.isfinite(metrics.loss), f"the loss of step {metrics.step} is {metrics.loss}"
            losses.append(metrics.loss)
    return losses


if __name__ == "__main__":
    main(options())
