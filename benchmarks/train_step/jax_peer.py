"""A step by JAX: the recorded decoders, jitted, tensor parallel by GSPMD's annotations, attention by cuDNN's kernel.

Its processes are this job's. JAX has streams and an allocator of its own: times are those of the host's clock up to
the loss, and the peak is what its allocator says.
"""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.train_step.models import Batch
from benchmarks.train_step.setting import LeftOutError, Run, Setting

COLUMNS, ROWS = ("q.", "k.", "v.", "up.", "gate."), ("out.weight", "down.weight")


@cache
def started(on_gpu: bool) -> Any:
    """jax, joined to a job of its own of the same processes."""
    if importlib.util.find_spec("jax") is None:
        raise LeftOutError("jax is not installed")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    jax.config.update("jax_platforms", "cuda" if on_gpu else "cpu")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    if ranks > 1:
        if not on_gpu:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            said: list[Any] = [free.getsockname()[1]]
        dist.broadcast_object_list(said)
        own = [torch.cuda.current_device()] if on_gpu else None
        jax.distributed.initialize(f"127.0.0.1:{said[0]}", ranks, rank, local_device_ids=own)
    return jax


def placed(name: str, sequence: bool) -> tuple[Any, ...]:
    """Over which axis each dim of a parameter is split."""
    if name in ("tok.weight", "head.weight") or any(f".{part}weight" in name for part in COLUMNS):
        return ("tp", None)
    if any(f".{part}bias" in name for part in COLUMNS):
        return ("tp",)
    return (None, "tp") if name.endswith(ROWS) else ()


def gspmd(setting: Setting, sequence: bool = False) -> Run:
    if setting.model.sizes is None:
        raise LeftOutError("written for the recorded models alone")
    if setting.optimizer:
        raise LeftOutError("JAX has no optimizer of its own")
    jax = started(setting.on_gpu)
    jnp, s = jax.numpy, setting.model.sizes
    mesh = jax.sharding.Mesh(jax.devices()[: setting.ranks], ("tp",))

    def sharding(*dims: Any) -> Any:
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*dims))

    def given(t: Tensor, dims: tuple[Any, ...]) -> Any:
        t = t.detach().cpu()
        host = t.float().numpy().astype(jnp.bfloat16) if t.dtype == torch.bfloat16 else t.numpy()
        return jax.make_array_from_callback(host.shape, sharding(*dims), lambda index: host[index])

    state = {name: given(t, placed(name, sequence)) for name, t in setting.state.items()}
    constants = {name: state.pop(name) for name in ("cos", "sin") if name in state}

    def between(x: Any) -> Any:
        return jax.lax.with_sharding_constraint(x, sharding(None, "tp" if sequence else None, None))

    def norm(p: Mapping[str, Any], at: str, x: Any) -> Any:
        y = x.astype(jnp.float32)
        if s.gated:
            y = y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + float(torch.finfo(setting.dtype).eps))
            return y.astype(x.dtype) * p[f"{at}.weight"]
        y = (y - y.mean(-1, keepdims=True)) * jax.lax.rsqrt(y.var(-1, keepdims=True) + 1e-5)
        return y.astype(x.dtype) * p[f"{at}.weight"] + p[f"{at}.bias"]

    def linear(p: Mapping[str, Any], at: str, x: Any) -> Any:
        y = jnp.einsum("bsi,oi->bso", x, p[f"{at}.weight"])
        return y if s.gated else y + p[f"{at}.bias"]

    def rotated(x: Any, cos: Any, sin: Any) -> Any:
        first, second = jnp.split(x, 2, -1)
        return x * cos[:, None] + jnp.concatenate((-second, first), -1) * sin[:, None]

    def attended(p: Mapping[str, Any], at: str, x: Any) -> Any:
        q, k, v = (linear(p, f"{at}.{name}", x) for name in "qkv")
        q = q.reshape(*q.shape[:2], s.heads, -1)
        k, v = (t.reshape(*t.shape[:2], s.kv_heads, -1) for t in (k, v))
        if s.gated:
            q, k = (rotated(t, constants["cos"], constants["sin"]) for t in (q, k))
        kernel = "cudnn" if setting.on_gpu else "xla"
        o = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=kernel)
        return linear(p, f"{at}.out", o.reshape(*o.shape[:2], -1))

    def loss_of(p: Mapping[str, Any], tokens: Any, targets: Any) -> Any:
        x = p["tok.weight"][tokens]
        x = between(x if s.gated else x + p["pos"])
        for n in range(s.layers):
            x = between(x + attended(p, f"blocks.{n}.attn", norm(p, f"blocks.{n}.n1", x)))
            h = norm(p, f"blocks.{n}.n2", x)
            if s.gated:
                h = jax.nn.silu(linear(p, f"blocks.{n}.mlp.gate", h)) * linear(p, f"blocks.{n}.mlp.up", h)
            else:
                h = jax.nn.gelu(linear(p, f"blocks.{n}.mlp.up", h), approximate=True)
            x = between(x + linear(p, f"blocks.{n}.mlp.down", h))
        logits = jnp.einsum("bsi,oi->bso", norm(p, "norm", x), p["head.weight"]).astype(jnp.float32)
        hit = jax.nn.one_hot(targets, s.vocabulary, dtype=bool)
        return (jax.nn.logsumexp(logits, -1) - jnp.where(hit, logits, 0.0).sum(-1)).mean()

    compiled = jax.jit(jax.value_and_grad(loss_of))
    fed: dict[int, tuple[Any, ...]] = {}  # a batch's tensors, as JAX has them
    last: list[Any] = [None]

    def step(batch: Batch) -> Tensor:
        key = id(batch)
        if key not in fed:
            fed[key] = tuple(given(batch[name].int(), ()) for name in setting.model.inputs)
        last[0] = None
        last[0] = compiled(state, *fed[key])
        return torch.zeros(())  # read by `loss`: a step does not wait for it

    def settle() -> None:
        jax.block_until_ready(last[0])

    def gradients() -> dict[str, Tensor]:
        whole = jax.jit(lambda t: t.astype(jnp.float32), out_shardings=sharding())
        grads = last[0][1]
        return {name: torch.tensor(jax.device_get(whole(grads[name]))) for name in setting.model.checked}

    def close() -> None:
        last[0] = None
        fed.clear()
        state.clear()

    def loss() -> float:
        return float(last[0][0])

    def peak() -> int:
        stats = jax.local_devices()[0].memory_stats() or {}
        return int(stats.get("peak_bytes_in_use", 0))

    return Run(
        step, gradients, rest=lambda: last.__setitem__(0, None), close=close, settle=settle, peak=peak, loss=loss
    )


CONTESTANTS: dict[str, Callable[[Setting], Run]] = {
    "jax": gspmd,
    "jax-tp": gspmd,
    "jax-tp-sp": partial(gspmd, sequence=True),
}
