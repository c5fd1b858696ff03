# pyright: reportPrivateUsage=false, reportCallIssue=false, reportArgumentType=false
"""How many kernels run beside products and attention, and how many bytes they move: ours, Inductor's, unfused.

    python -m benchmarks.fusion_census                        GPT-2, Llama, BERT, T5 and ViT, a JSON line each
    python -m benchmarks.fusion_census --models gpt2 --toy    sizes for a test

Joint graphs of forward and backward on one device, width 768, 4 x 512 tokens (ViT 16 images of 197), bfloat16 over
float32 parameters. Inductor is given the very graph (decomposed as it wants it), schedules it, and is asked for its own
count of each kernel's reads and writes; nothing is compiled, and no GPU is needed. It is asked in four ways, and the
fewest bytes count (`scheduled`). `layer` is what a third layer adds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from torch import fx, nn

import shardc
from shardc.ir.graph import Graph, type_of
from shardc.ir.ops.kernels import KERNELS
from shardc.passes.fusion.analysis.traffic import Traffic, traffic
from shardc.passes.fusion.fuse import fuse

Batch = dict[str, Any]


def sizes(toy: bool) -> dict[str, int]:
    return {"width": 64, "heads": 4, "inner": 128, "batch": 2, "seq": 32, "vocab": 128} if toy else {
        "width": 768, "heads": 12, "inner": 3072, "batch": 4, "seq": 512, "vocab": 32000}  # fmt: skip


def gpt2(s: dict[str, int], layers: int) -> tuple[nn.Module, Batch]:
    from transformers import GPT2Config, GPT2LMHeadModel

    drop = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    config = GPT2Config(n_layer=layers, n_head=s["heads"], n_embd=s["width"], n_positions=s["seq"],
                        vocab_size=s["vocab"], use_cache=False, **drop)  # fmt: skip
    return GPT2LMHeadModel(config), tokens(s)


def llama(s: dict[str, int], layers: int) -> tuple[nn.Module, Batch]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(num_hidden_layers=layers, num_attention_heads=s["heads"], num_key_value_heads=s["heads"] // 2,
                         hidden_size=s["width"], intermediate_size=s["inner"], vocab_size=s["vocab"],
                         use_cache=False)  # fmt: skip
    return LlamaForCausalLM(config), tokens(s)


def bert(s: dict[str, int], layers: int) -> tuple[nn.Module, Batch]:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(num_hidden_layers=layers, num_attention_heads=s["heads"], hidden_size=s["width"],
                        intermediate_size=s["inner"], vocab_size=s["vocab"], max_position_embeddings=s["seq"],
                        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
    return BertForMaskedLM(config), tokens(s)


def t5(s: dict[str, int], layers: int) -> tuple[nn.Module, Batch]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(num_layers=layers, num_heads=s["heads"], d_model=s["width"], d_kv=s["width"] // s["heads"],
                      d_ff=s["inner"], vocab_size=s["vocab"], dropout_rate=0.0, decoder_start_token_id=0,
                      use_cache=False)  # fmt: skip
    return T5ForConditionalGeneration(config), tokens(s)


def vit(s: dict[str, int], layers: int) -> tuple[nn.Module, Batch]:
    from transformers import ViTConfig, ViTForImageClassification

    side, patch = (32, 8) if s["width"] < 100 else (224, 16)
    config = ViTConfig(num_hidden_layers=layers, num_attention_heads=s["heads"], hidden_size=s["width"],
                       intermediate_size=s["inner"], image_size=side, patch_size=patch, num_labels=10)  # fmt: skip
    images = 4 * s["batch"]
    labels = torch.zeros(images, dtype=torch.int64)
    return ViTForImageClassification(config), {"pixel_values": torch.zeros(images, 3, side, side), "labels": labels}


def tokens(s: dict[str, int]) -> Batch:
    given = torch.zeros(s["batch"], s["seq"], dtype=torch.int64)
    return {"input_ids": given, "labels": given}


MODELS: dict[str, Callable[[dict[str, int], int], tuple[nn.Module, Batch]]] = {
    "gpt2": gpt2, "llama": llama, "bert": bert, "t5": t5, "vit": vit}  # fmt: skip


def body_of(name: str, layers: int, toy: bool) -> Graph:
    """The joint graph, per rank of one rank, before fusion."""
    with torch.device("meta"):
        model, batch = MODELS[name](sizes(toy), layers)
    return shardc.compile(model, batch, mesh="dp=1", plan={"precision": "bf16"}).body


# ---------------------------------------------------------------------- Inductor: its private parts, all of them here
WAYS = tuple((gpu, passes) for gpu in (False, True) for passes in (False, True))


def inductor(bodies: Sequence[Graph], ways: Sequence[tuple[bool, bool]] = WAYS) -> list[Traffic]:
    """Inductor's kernels for some graphs and their bytes: of some ways to ask it (`scheduled`), that with the fewest
    for the first."""
    first, best = min(((scheduled(bodies[0], *way), way) for way in ways), key=lambda found: found[0].bytes)
    return [first, *(scheduled(body, *best) for body in bodies[1:])]


def scheduled(body: Graph, gpu: bool, passes: bool) -> Traffic:
    """By Inductor's scheduler; what it calls out for is not counted.

    The device is a CPU, so that this needs no GPU. With `gpu` its rule of GPUs holds: what is read more than once is
    computed in each kernel that reads it, where for a CPU heavy results are stored. `passes`: its rewriting of graphs
    comes first (biases into products, among others), or the graph is scheduled as it is.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor import ir, scheduler
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        inputs = [torch.empty(type_of(n).shape, dtype=type_of(n).dtype) for n in body.placeholders]
    root = fx.GraphModule({}, body.fx)

    class Run(fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            return super().call_function(KERNELS.get(target, target), args, kwargs)

    with mode:
        run = make_fx(lambda *given: tuple(Run(root).run(*given)), decomposition_table=dict(select_decomp_table()))
        graph = run(*inputs)
    rule = mock.patch.object(ir, "is_cpu", return_value=False) if gpu else nullcontext()
    with V.set_fake_mode(mode), V.set_debug_handler(DebugContext()), tracing(TracingContext(mode)), rule:
        if passes:
            joint_graph_passes(graph)
            post_grad_passes(graph, is_inference=True)
        else:
            view_to_reshape(graph)
        lowering = GraphLowering(graph, example_inputs=inputs, is_inference=True, shape_env=None)
        with V.set_graph_handler(lowering):
            lowering.run(*inputs)
            lowering.init_wrapper_code()
            lowering._update_scheduler()
            others = (scheduler.ExternKernelSchedulerNode, scheduler.NopKernelSchedulerNode)
            kernels = [node for node in lowering.scheduler.nodes if not isinstance(node, others)]
            return Traffic(len(kernels), sum(int(node.get_read_write_buffers_sizes()) for node in kernels))


# ---------------------------------------------------------------------- the table
def census(name: str, toy: bool = False, ways: Sequence[tuple[bool, bool]] = WAYS) -> dict[str, object]:
    """Whole graphs of two layers, and what a third adds."""
    bodies = {layers: body_of(name, layers, toy) for layers in (2, 3)}
    found: dict[str, dict[int, Traffic]] = {
        "unfused": {layers: traffic(body) for layers, body in bodies.items()},
        "shardc": {layers: traffic(fuse(body)) for layers, body in bodies.items()},
        "inductor": dict(zip(bodies, inductor([*bodies.values()], ways), strict=True)),
    }
    row: dict[str, object] = {"model": name}
    for who, by in found.items():
        row[who] = {"kernels": by[2].kernels, "MB": round(by[2].bytes / 1e6, 2),
                    "layer kernels": by[3].kernels - by[2].kernels,
                    "layer MB": round((by[3].bytes - by[2].bytes) / 1e6, 2)}  # fmt: skip
    row["bytes of Inductor's"] = round(found["shardc"][2].bytes / found["inductor"][2].bytes, 3)
    return row


class Deep(nn.Module):
    """Blocks of a norm, a product, a softmax and pointwise ops, small ones: kernels that hold rows, in long chains."""

    def __init__(self, blocks: int, width: int = 16) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(width, width) * 0.1) for _ in range(blocks)])
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(blocks)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight, norm in zip(self.weights, self.norms, strict=True):
            h = norm(x)
            a = h @ weight
            b = torch.sigmoid(nn.functional.gelu(a + h)) * torch.tanh(a) - torch.relu(h)
            c = torch.log1p(torch.exp(b * b + a))
            x = x + c * torch.cos(b) + torch.softmax(c, -1)
        return x.square().mean()


CALLS_OF_BLOCK = 52  # forward and backward


def traced(calls: int) -> Graph:
    """The joint graph of about so many calls of a model."""
    blocks = max(1, round(calls / CALLS_OF_BLOCK))
    return shardc.compile(Deep(blocks), {"x": torch.zeros(4, 8, 16)}, mesh="dp=1").body


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args(argv)
    rows: list[dict[str, object]] = []
    inductor([body_of("gpt2", 1, True)])  # the first graph that it schedules in a process, it fuses less of
    for name in options.models:
        rows.append(census(name, options.toy))
        print(json.dumps(rows[-1]), flush=True)
    return int(any(float(str(row["bytes of Inductor's"])) >= 1 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
