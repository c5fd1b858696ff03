"""Megatron-LM's tensor and sequence parallelism by hand, for the recorded decoders.

Activations are [sequence, batch, width], so that sequences are gathered and scattered without a copy. q, k and v are
one product, gate and up another. In backward, the collective of an input's gradient runs beside the product of the
weight's. Norms, activations, rotary embeddings and the loss's pointwise parts are compiled.

Sources: Shoeybi et al., 2019, arXiv:1909.08053; Korthikanti et al., 2022, arXiv:2205.05198.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.measured_models import rotated
from benchmarks.train_step.setting import Gradients, Setting, compiler


def gathered(x: Tensor, asynchronous: bool = False) -> tuple[Tensor, Any]:
    whole = x.new_empty(x.shape[0] * dist.get_world_size(), *x.shape[1:])
    return whole, dist.all_gather_into_tensor(whole, x.contiguous(), async_op=asynchronous)


def scattered(x: Tensor, asynchronous: bool = False) -> tuple[Tensor, Any]:
    part = x.new_empty(x.shape[0] // dist.get_world_size(), *x.shape[1:])
    return part, dist.reduce_scatter_tensor(part, x.contiguous(), async_op=asynchronous)


def product_of_weight(g: Tensor, x: Tensor) -> Tensor:
    return g.flatten(0, 1).t() @ x.flatten(0, 1)


class Column(torch.autograd.Function):
    """x @ weight.T of a weight split by rows; x is split by sequence if `sequence`, else whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sequence: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sequence, ctx.biased = sequence, bias is not None
        return F.linear(gathered(x)[0] if sequence else x, weight, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        g = g.contiguous()
        again = None
        if ctx.sequence:
            x, again = gathered(x, asynchronous=True)
        dx = g @ weight
        if ctx.sequence:
            again.wait()
            dx, sent = scattered(dx, asynchronous=True)
        else:
            sent = dist.all_reduce(dx, async_op=True)
        dw = product_of_weight(g, x)
        db = g.flatten(0, 1).sum(0) if ctx.biased else None
        sent.wait()
        return dx, dw, db, None


class RowSum(torch.autograd.Function):
    """x @ weight.T of a weight split by columns, summed over ranks: whole, or a rank's part of the sequence."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sequence: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sequence = sequence
        y = F.linear(x, weight)
        if sequence:
            return scattered(y)[0]
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        g = gathered(g)[0] if ctx.sequence else g.contiguous()
        return g @ weight, product_of_weight(g, x), None


class Embedded(torch.autograd.Function):
    """Rows of an embedding split by rows: those of other ranks are zeros, then summed."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, sequence: bool) -> Tensor:
        first = dist.get_rank() * weight.shape[0]
        away = (ids < first) | (ids >= first + weight.shape[0])
        own = (ids - first).masked_fill(away, 0)
        ctx.save_for_backward(own, away)
        ctx.rows, ctx.sequence = weight.shape[0], sequence
        x = F.embedding(own, weight).masked_fill_(away.unsqueeze(-1), 0)
        if sequence:
            return scattered(x)[0]
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        own, away = ctx.saved_tensors
        g = gathered(g)[0] if ctx.sequence else g
        g = g.masked_fill(away.unsqueeze(-1), 0)
        return None, torch.ops.aten.embedding_dense_backward(g, own, ctx.rows, -1, False), None


def _largest(logits: Tensor) -> Tensor:
    return logits.float().amax(-1)


def _sums(logits: Tensor, most: Tensor, own: Tensor, away: Tensor) -> Tensor:
    shifted = logits.float() - most.unsqueeze(-1)
    at = shifted.gather(-1, own.unsqueeze(-1)).squeeze(-1).masked_fill(away, 0.0)
    return torch.stack([shifted.exp().sum(-1), at])


def _gradient(logits: Tensor, most: Tensor, total: Tensor, own: Tensor, away: Tensor, g: Tensor) -> Tensor:
    p = (logits.float() - most.unsqueeze(-1)).exp() / total.unsqueeze(-1)
    columns = torch.arange(logits.shape[-1], device=logits.device)
    hit = (columns == own.unsqueeze(-1)) & ~away.unsqueeze(-1)
    return ((p - hit.to(p.dtype)) * (g / own.numel())).to(logits.dtype)


class Loss(torch.autograd.Function):
    """Mean cross-entropy of logits [S, B, V] split by vocabulary: Megatron's, with two collectives of rows."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, compiled: Callable[..., Any]) -> Tensor:
        first = dist.get_rank() * logits.shape[-1]
        away = (targets < first) | (targets >= first + logits.shape[-1])
        own = (targets - first).masked_fill(away, 0)
        most = compiled(_largest)(logits)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        sums = compiled(_sums)(logits, most, own, away)
        dist.all_reduce(sums)
        ctx.save_for_backward(logits, most, sums[0], own, away)
        ctx.compiled = compiled
        return (sums[0].log() - sums[1]).mean()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        return ctx.compiled(_gradient)(*ctx.saved_tensors, g), None, None


class Megatron(nn.Module):
    """A rank's part of a decoder, from the whole one's weights."""

    def __init__(self, setting: Setting, sequence: bool) -> None:
        super().__init__()
        assert setting.model.sizes is not None
        self.s, self.sequence, self.ranks, self.rank = setting.model.sizes, sequence, setting.ranks, setting.rank
        self.dtype, self.device_, self.state = setting.dtype, setting.device, setting.state
        self.layers = nn.ModuleList([self._layer(n) for n in range(self.s.layers)])
        self.tok, self.head = self._kept(self._part("tok.weight")), self._kept(self._part("head.weight"))
        self.norm_w, self.norm_b = self._norm("norm")
        if self.s.gated:
            self.cos, self.sin = (setting.state[name].to(setting.device) for name in ("cos", "sin"))
        else:
            pos = setting.state["pos"]
            self.pos = self._kept(pos.chunk(self.ranks)[self.rank] if sequence else pos)
        backend, made = compiler(setting), dict[Any, Any]()

        def compiled(call: Any) -> Any:
            if call not in made:
                made[call] = torch.compile(call, fullgraph=True, dynamic=False, backend=backend)
            return made[call]

        self.compiled = compiled
        s = self.s

        def normed(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
            return F.rms_norm(x, (s.width,), w) if b is None else F.layer_norm(x, (s.width,), w, b)

        def added(x: Tensor, y: Tensor, bias: Tensor | None, w: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor]:
            x = x + y if bias is None else x + (y + bias)
            return x, normed(x, w, b)

        def active(up: Tensor, bias: Tensor | None) -> Tensor:
            if bias is not None:
                return F.gelu(up + bias, approximate="tanh")
            gate, up = up.chunk(2, -1)
            return F.silu(gate) * up

        self.normed, self.added, self.active = normed, added, active

    # ------------------------------------------------------------------ weights
    def _kept(self, t: Tensor) -> nn.Parameter:
        return nn.Parameter(t.detach().to(self.device_, self.dtype, copy=True).contiguous())

    def _part(self, name: str, dim: int = 0) -> Tensor:
        return self.state[name].chunk(self.ranks, dim)[self.rank]

    def _norm(self, name: str) -> tuple[nn.Parameter, nn.Parameter | None]:
        bias = None if self.s.gated else self._kept(self.state[f"{name}.bias"])
        return self._kept(self.state[f"{name}.weight"]), bias

    def _layer(self, n: int) -> nn.Module:
        layer, at, biased = nn.Module(), f"blocks.{n}", not self.s.gated
        layer.n1_w, layer.n1_b = self._norm(f"{at}.n1")
        layer.n2_w, layer.n2_b = self._norm(f"{at}.n2")
        layer.qkv = self._kept(torch.cat([self._part(f"{at}.attn.{p}.weight") for p in "qkv"]))
        ups = ("gate", "up") if self.s.gated else ("up",)
        layer.up = self._kept(torch.cat([self._part(f"{at}.mlp.{name}.weight") for name in ups]))
        layer.out, layer.down = (self._kept(self._part(f"{at}.{name}.weight", 1)) for name in ("attn.out", "mlp.down"))
        layer.qkv_b = self._kept(torch.cat([self._part(f"{at}.attn.{p}.bias") for p in "qkv"])) if biased else None
        layer.up_b = self._kept(self._part(f"{at}.mlp.up.bias")) if biased else None
        layer.out_b = self._kept(self.state[f"{at}.attn.out.bias"]) if biased else None
        layer.down_b = self._kept(self.state[f"{at}.mlp.down.bias"]) if biased else None
        return layer

    # ------------------------------------------------------------------ a step
    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        ids, targets = tokens.t().contiguous(), targets.t().contiguous()
        x = Embedded.apply(ids, self.tok, self.sequence)
        if not self.s.gated:
            x = x + self.pos.unsqueeze(1)
        bias, y = None, None
        for layer in self.layers:
            norm = (layer.n1_w, layer.n1_b)
            x, h = (
                (x, self.compiled(self.normed)(x, *norm)) if y is None else self.compiled(self.added)(x, y, bias, *norm)
            )
            h = self._attended(Column.apply(h, layer.qkv, layer.qkv_b, self.sequence))
            y = RowSum.apply(h, layer.out, self.sequence)
            x, h = self.compiled(self.added)(x, y, layer.out_b, layer.n2_w, layer.n2_b)
            up = Column.apply(h, layer.up, None, self.sequence)
            y, bias = RowSum.apply(self.compiled(self.active)(up, layer.up_b), layer.down, self.sequence), layer.down_b
        x, h = self.compiled(self.added)(x, y, bias, self.norm_w, self.norm_b)
        logits = Column.apply(h, self.head, None, self.sequence)
        return Loss.apply(logits, targets, self.compiled)

    def _attended(self, qkv: Tensor) -> Tensor:
        s, wide = self.s, self.s.width // self.s.heads
        heads, narrow = s.heads // self.ranks, s.kv_heads // self.ranks
        q, k, v = qkv.unflatten(-1, (-1, wide)).permute(1, 2, 0, 3).split([heads, narrow, narrow], 1)
        if s.gated:
            q, k = (self.compiled(rotated)(t, self.cos, self.sin) for t in (q, k))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != narrow)
        return o.permute(2, 0, 1, 3).flatten(2)

    # ------------------------------------------------------------------ gradients
    def _replicated(self) -> list[nn.Parameter]:
        """Parameters that each rank has used for its part of the sequence."""
        names = ("norm_w", "norm_b", "n1_w", "n1_b", "n2_w", "n2_b", "out_b", "down_b")
        return [p for name, p in self.named_parameters() if name.rpartition(".")[2] in names]

    def sum_replicated(self) -> None:
        """In one collective, as Megatron's `allreduce_sequence_parallel_grads`."""
        if not self.sequence:
            return
        grads = [p.grad for p in self._replicated() if p.grad is not None]
        flat = torch.cat([g.flatten() for g in grads])
        dist.all_reduce(flat)
        sums = flat.split([g.numel() for g in grads])
        torch._foreach_copy_(grads, [part.view_as(g) for part, g in zip(sums, grads, strict=True)])

    def gradients(self) -> Gradients:
        s, last, found = self.s, self.s.layers - 1, dict[str, Tensor]()
        first, end = self.layers[0], self.layers[last]
        wide = s.width // s.heads
        parts = [s.heads * wide // self.ranks, *[s.kv_heads * wide // self.ranks] * 2]
        q, k, _ = first.qkv.grad.split(parts)
        found["tok.weight"], found["norm.weight"] = _whole(self.tok.grad), self.norm_w.grad
        found["blocks.0.n1.weight"] = first.n1_w.grad
        found["blocks.0.attn.q.weight"], found["blocks.0.attn.k.weight"] = _whole(q), _whole(k)
        found[f"blocks.{last}.attn.out.weight"] = _whole(end.out.grad, 1)
        found[f"blocks.{last}.mlp.down.weight"] = _whole(end.down.grad, 1)
        found[f"blocks.{last}.mlp.up.weight"] = _whole(end.up.grad[-s.hidden // self.ranks :])
        if not s.gated:
            found["pos"] = _whole(self.pos.grad) if self.sequence else self.pos.grad
            found["blocks.0.attn.v.bias"] = _whole(first.qkv_b.grad.split(parts)[2])
            found[f"blocks.{last}.mlp.down.bias"] = end.down_b.grad
        return found


def _whole(t: Tensor, dim: int = 0) -> Tensor:
    parts = [torch.empty_like(t, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t.contiguous())
    return torch.cat(parts, dim)
