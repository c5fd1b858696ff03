"""A step of a long sequence, by shardc and by each peer: what `long_context.py` measures.

A run is made from a setting, and then called with the whole batch, of which every rank takes its part. A step leaves
gradients summed over the ranks; `found` says some of them, whole, beside the loss.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import lookup_backend
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import shardc
from benchmarks import long_context_peers as peers
from shardc.cli.summary import divided_attention
from shardc.ir.ops.fused_attention import kernel_for
from shardc.passes.context.divide_attention import Divided

Batch = Mapping[str, Tensor]
LAYERS = 32  # of the whole model
READ = (
    "lm_head.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.1.self_attn.v_proj.weight",
)
KERNELS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def slice_of(layers: int, tiny: bool) -> LlamaConfig:
    """Llama-3-8B with fewer layers, and a vocabulary as much smaller."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4}
    if not tiny:
        sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    return LlamaConfig(
        **sizes,
        num_hidden_layers=layers,
        vocab_size=128 if tiny else 128256 * layers // LAYERS,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        attn_implementation="sdpa",
        tie_word_embeddings=False,
        use_cache=False,
    )


@dataclass
class Run:
    """A way to compute gradients, ready to step."""

    step: Callable[[Batch], Tensor]
    gradients: Callable[[], Mapping[str, Tensor]]
    close: Callable[[], None] = lambda: None
    about: dict[str, object] = field(default_factory=dict[str, object])

    def found(self, loss: Tensor) -> dict[str, Tensor]:
        grads = self.gradients()
        return {"loss": loss.detach(), **{name: grads[name].detach() for name in READ}}


@dataclass(frozen=True)
class Setting:
    """What every run is made from."""

    config: LlamaConfig
    tokens: int
    state: Mapping[str, Tensor]  # on the CPU
    batch: Batch
    device: torch.device

    @classmethod
    def of(cls, config: LlamaConfig, tokens: int, device: torch.device) -> Setting:
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        with device:
            model = LlamaForCausalLM(config).to(dtype)
            ids = torch.randint(config.vocab_size, (1, tokens))
        state = {name: value.cpu() for name, value in model.state_dict().items()}
        return cls(config, tokens, state, {"input_ids": ids, "labels": ids.clone()}, device)

    @property
    def dtype(self) -> torch.dtype:
        return self.state["lm_head.weight"].dtype

    def kernel(self) -> str:
        """Which kernel shardc takes for a square of these heads, chosen when it runs; hand-written runs take it too."""
        if self.device.type == "cpu":
            return "reference"
        heads = (self.config.num_attention_heads, self.config.num_key_value_heads)
        q, k = (torch.empty(1, 256, n, 128, dtype=self.dtype, device=self.device).transpose(1, 2) for n in heads)
        return kernel_for(q, k, k, None, True)

    @property
    def compiler(self) -> str:
        """What torch.compile takes for layers; nothing on the CPU, where it would need a C++ compiler."""
        return "inductor" if self.device.type == "cuda" else ""

    def model(self) -> LlamaForCausalLM:
        """On this rank's device, from the first weights. Layers read from its config which attention they call, so it
        has one of its own."""
        with self.device:  # not on meta and then to_empty, which loses the rotary frequencies
            model = LlamaForCausalLM(copy.deepcopy(self.config)).to(self.dtype)
        model.load_state_dict(self.state)
        return model


# ---------------------------------------------------------------------- shardc
def program_of(config: LlamaConfig, dtype: torch.dtype, tokens: int, ranks: int, strategy: str) -> shardc.Program:
    """The unmodified model, compiled on the meta device for a sequence over so many ranks."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype)
        sample = {name: torch.empty(1, tokens, dtype=torch.int64) for name in ("input_ids", "labels")}
    plan: dict[str, Any] = {
        "inputs": dict.fromkeys(sample, "dp, cp"),
        "context": {"axis": "cp", "attention": strategy},
        "fuse": True,
        "bucket": True,
        "hardware": "h100",
    }
    return shardc.compile(model, sample, mesh=f"dp=1, cp={ranks}", plan=plan, cache=False)  # which is timed


def ours(setting: Setting, strategy: str) -> Run:
    """Each rank loads the weights into the compiled program."""
    start = time.perf_counter()
    program = program_of(setting.config, setting.dtype, setting.tokens, dist.get_world_size(), strategy)
    compile_s = time.perf_counter() - start
    trainer = program.launch(state=setting.state, device=setting.device.type, timeout=300)
    costs = [Divided.read(said) for said in program.plan["context"]]
    about: dict[str, object] = {
        "compile_s": round(compile_s, 1),
        "kernel": setting.kernel(),
        "collectives": len(program.collectives()),
        "reported_peak_gib": round(program.memory().peak / 2**30, 2),
        "predicted_ms": round(program.predict().step_ms, 2),
        "auto": min((cost for cost in costs[0].costs if not cost.why), key=lambda cost: cost.waits).strategy,
        "attention": " ".join(divided_attention(program)),
    }
    return Run(lambda batch: trainer.step(batch).loss, trainer.gather_grads, trainer.close, about)


# ---------------------------------------------------------------------- peers
def backend_of_its_own(compiler: str) -> Callable[..., Any]:
    """A backend of torch.compile that is no other one. Models share the code of their layers, and dynamo keeps what it
    has compiled by code: it takes an entry again only for the backend that the entry is of."""
    compiled = lookup_backend(compiler)

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        return compiled(graph, inputs)

    return backend


class Slice(nn.Module):
    """Of a rank's tokens: the model's own layers and its loss, with no mask but that attention is causal. Compiled,
    unless `compiler` is empty, for this run alone."""

    def __init__(self, model: LlamaForCausalLM, compiler: str) -> None:
        super().__init__()
        self.model = model
        self.loss: Callable[..., Tensor] = self._loss
        if compiler:
            backend = backend_of_its_own(compiler)
            for layer in model.model.layers:
                layer.compile(fullgraph=True, dynamic=False, backend=backend)
            self.loss = torch.compile(self._loss, fullgraph=True, dynamic=False, backend=backend)

    def forward(self, ids: Tensor, labels: Tensor, positions: Tensor, count: int) -> Tensor:
        x = self.model.model.embed_tokens(ids)
        angles = self.model.model.rotary_emb(x, position_ids=positions)
        for layer in self.model.model.layers:
            x = layer(x, attention_mask=None, position_embeddings=angles, position_ids=positions)
        return self.loss(x, labels, count)

    def _loss(self, x: Tensor, labels: Tensor, count: int) -> Tensor:
        """Of these tokens, their part of the mean over all."""
        logits = self.model.lm_head(self.model.model.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count


def shifted(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, what is to follow each, and their positions."""
    ids = batch["input_ids"]
    labels = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    return ids.clone(), labels, torch.arange(ids.shape[1], device=ids.device)[None]


def zigzag(t: Tensor) -> Tensor:
    """A rank's two chunks of a sequence."""
    rank, size = dist.get_rank(), dist.get_world_size()
    chunks = t.chunk(2 * size, dim=1)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim=1)


def _peer(
    setting: Setting, implementation: str, compiled: bool, parts: Callable[[Batch], Any], about: dict[str, object]
) -> Run:
    """`parts` is a context in which a rank's tokens, labels and positions are known and attention is theirs."""
    model = setting.model()
    model.config._attn_implementation = implementation
    run = Slice(model, setting.compiler if compiled else "")
    works: list[Any] = []

    def summed(p: Tensor) -> None:
        assert p.grad is not None
        works.append(dist.all_reduce(p.grad, async_op=True))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(summed)

    def step(batch: Batch) -> Tensor:
        model.zero_grad(set_to_none=True)
        with parts(batch) as (ids, labels, positions):
            loss = run(ids, labels, positions, setting.tokens - 1)
            loss.backward()
        loss = loss.detach()
        works.append(dist.all_reduce(loss, async_op=True))
        for work in works:
            work.wait()
        works.clear()
        return loss

    def gradients() -> dict[str, Tensor]:
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    def close() -> None:
        model.zero_grad(set_to_none=True)
        works.clear()

    return Run(step, gradients, close, about)


def by_hand(setting: Setting, op: str, kernel: str = "", compiled: bool = True) -> Run:
    kernel = kernel or setting.kernel()
    call = {"ring": peers.ring, "gather": peers.gather}[op]

    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **_: Any) -> tuple[Tensor, None]:
        return call(q, k, v, kernel)[0].transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS.register(f"hand_{op}_{kernel}", attend)

    @contextmanager
    def parts(batch: Batch) -> Generator[tuple[Tensor, ...]]:
        yield tuple(zigzag(t) for t in shifted(batch))

    return _peer(setting, f"hand_{op}_{kernel}", compiled, parts, {"kernel": kernel})


def _repeated(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **_: Any) -> tuple[Tensor, None]:
    times = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(times, 1) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register("repeated", _repeated)


def torch_context(
    setting: Setting, rotate: str, kernel: str = "cudnn", compiled: bool = True, repeated: bool = False
) -> Run:
    """The model as it is: torch replaces `scaled_dot_product_attention`, and shards what it is given.

    `repeated`: keys and values have as many heads as queries, where torch takes no others.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    mesh = init_device_mesh(setting.device.type, (dist.get_world_size(),), mesh_dim_names=("cp",))

    @contextmanager
    def parts(batch: Batch) -> Generator[tuple[Tensor, ...]]:
        set_rotate_method(rotate)
        buffers = list(shifted(batch))
        chosen = sdpa_kernel(KERNELS[kernel]) if setting.device.type == "cuda" else nullcontext()
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers={*buffers}), chosen:
            yield tuple(buffers)

    return _peer(setting, "repeated" if repeated else "sdpa", compiled, parts, {"kernel": kernel, "rotate": rotate})


def reference(setting: Setting) -> dict[str, Tensor]:
    """The whole sequence on each rank, with layers computed again in backward."""
    model = setting.model()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    kernels = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    with sdpa_kernel(kernels) if setting.device.type == "cuda" else nullcontext():
        loss = Slice(model, "")(*shifted(setting.batch), setting.tokens - 1)
        loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Run(lambda _: loss, lambda: grads).found(loss)


# By name. The first are what is run unless others are asked for, in the order of what they tell.
RUNS: dict[str, Callable[[Setting], Run]] = {
    "ours-ring": partial(ours, strategy="ring"),
    "hand-ring": partial(by_hand, op="ring"),
    "ours-all_to_all": partial(ours, strategy="all_to_all"),
    "hand-gather": partial(by_hand, op="gather"),
    "ours-all_gather": partial(ours, strategy="all_gather"),
    "torch-allgather": partial(torch_context, rotate="allgather"),
    "torch-alltoall": partial(torch_context, rotate="alltoall"),
}
# What a run that fails is tried as.
INSTEAD = {
    "torch-allgather": "torch-allgather-repeated",
    "torch-alltoall": "torch-alltoall-repeated",
    "torch-allgather-eager": "torch-allgather-eager-repeated",
}
OPTIONAL: dict[str, Callable[[Setting], Run]] = {
    "ours-auto": partial(ours, strategy="auto"),
    "torch-allgather-eager": partial(torch_context, rotate="allgather", compiled=False),
    "torch-allgather-flash": partial(torch_context, rotate="allgather", kernel="flash"),
    "torch-alltoall-eager": partial(torch_context, rotate="alltoall", compiled=False),
    "torch-allgather-repeated": partial(torch_context, rotate="allgather", repeated=True),
    "torch-alltoall-repeated": partial(torch_context, rotate="alltoall", repeated=True),
    "torch-allgather-eager-repeated": partial(torch_context, rotate="allgather", repeated=True, compiled=False),
    "torch-alltoall-flash": partial(torch_context, rotate="alltoall", kernel="flash"),
    "hand-ring-flash": partial(by_hand, op="ring", kernel="flash"),
    "hand-gather-flash": partial(by_hand, op="gather", kernel="flash"),
    "hand-ring-eager": partial(by_hand, op="ring", compiled=False),
}
