"""Context parallelism around the recorded Llama: attention by hand, in a ring or with gathered keys, and torch's own.

A rank has two chunks of each sequence, so that causal work is equal. Gradients are summed as they come, compiled layers
are as their users have them.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import long_context_peers as by_hand_ops
from benchmarks.measured_models import Attention, Decoder, rotated
from benchmarks.train_step.models import Batch
from benchmarks.train_step.peers import stepping
from benchmarks.train_step.setting import LeftOutError, Run, Setting, compiler


def zigzag(t: Tensor, dim: int) -> Tensor:
    """A rank's two chunks of 2n."""
    rank, size = dist.get_rank(), dist.get_world_size()
    chunks = t.chunk(2 * size, dim)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim)


def _llama(setting: Setting) -> Decoder:
    model = setting.build()
    if not isinstance(model, Decoder) or not model.size.gated:
        raise LeftOutError("written for the recorded Llama alone: its positions are no parameter")
    return model


def _spread(setting: Setting, model: Decoder, parts: Callable[[Batch], Any]) -> Run:
    """`parts` is a context that gives a rank's part of a batch."""
    works: list[Any] = []

    def summed(p: Tensor) -> None:
        assert p.grad is not None
        works.append(dist.all_reduce(p.grad, async_op=True))

    def received() -> None:
        for work in works:
            work.wait()
        works.clear()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(summed)
    backend = compiler(setting)
    for block in model.blocks:
        block.compile(fullgraph=True, dynamic=False, backend=backend)
    return stepping(setting, model, parts=parts, divided=True, summed=received)


def by_hand(setting: Setting, op: str) -> Run:
    model = _llama(setting)
    call = {"ring": by_hand_ops.ring, "gather": by_hand_ops.gather}[op]
    kernel = "cudnn" if setting.on_gpu else "reference"

    def attend(self: Attention, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        s = self.size
        q = self.q(x).unflatten(-1, (s.heads, -1)).transpose(1, 2)
        k, v = (part(x).unflatten(-1, (s.kv_heads, -1)).transpose(1, 2) for part in (self.k, self.v))
        q, k = rotated(q, *angles), rotated(k, *angles)
        return self.out(call(q, k, v, kernel)[0].transpose(1, 2).flatten(2))

    for block in model.blocks:
        block.attn.forward = types.MethodType(attend, block.attn)  # type: ignore[union-attr]
    model.cos, model.sin = zigzag(model.cos, 0), zigzag(model.sin, 0)

    @contextmanager
    def parts(batch: Batch) -> Generator[Batch]:
        yield {name: zigzag(x, 1) for name, x in batch.items()}

    return _spread(setting, model, parts)


def by_torch(setting: Setting, rotate: str) -> Run:
    if not setting.on_gpu:
        raise LeftOutError("torch's context parallelism replaces GPU kernels of attention alone")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    model = _llama(setting)
    mesh = init_device_mesh(setting.device.type, (setting.ranks,), mesh_dim_names=("cp",))
    whole = model.cos, model.sin

    @contextmanager
    def parts(batch: Batch) -> Generator[Batch]:
        set_rotate_method(rotate)
        given = {name: x.clone() for name, x in batch.items()}
        model.cos, model.sin = (t.clone() for t in whole)
        buffers = [*given.values(), model.cos, model.sin]
        dims = [1] * len(given) + [0, 0]
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims, no_restore_buffers={*buffers}):
            yield given

    return _spread(setting, model, parts)


CONTESTANTS: dict[str, Callable[[Setting], Run]] = {
    "hand-ring": partial(by_hand, op="ring"),
    "hand-gather": partial(by_hand, op="gather"),
    "torch-cp-allgather": partial(by_torch, rotate="allgather"),
    "torch-cp-alltoall": partial(by_torch, rotate="alltoall"),
}
