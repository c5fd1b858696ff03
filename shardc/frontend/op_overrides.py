"""What a trace puts in the place of ATen ops: composites kept whole, random numbers made layout-proof.

Three tables. `overrides` acts above autograd and keeps `linear`, attention and grouped products one node each.
`random_decompositions` acts below it and turns every source of randomness into `shardc::random_uniform` and
ordinary arithmetic. `SMALL_DECOMPOSITIONS` takes apart a few ops that would only multiply the rules to write;
more would lose what backends know (silu, layer_norm, gelu, softmax stay whole).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from kernels_triton.base.random import RANDOM_UNIFORM
from shardc import torch_compat
from shardc.ir.diagnostic import ShardcError, error
from shardc.ir.graph import op_name
from shardc.ir.ops.attention import SDPA, SDPA_BWD, attention
from shardc.ir.ops.carried_states import CARRIED_STATES
from shardc.ir.ops.grouped import GROUPED_MM, GROUPED_MM_WGRAD, grouped_mm
from shardc.ir.ops.linear import LINEAR, LINEAR_DGRAD, LINEAR_WGRAD, linear
from shardc.ir.ops.scan import SCAN, SCAN_BACKWARD

aten = torch.ops.aten

# Not addmm: torch widens halves for it, and the product then runs in float32. Normalize takes it apart.
SMALL_DECOMPOSITIONS = (
    "addcdiv", "addcmul", "dot", "linalg_vector_norm", "log_sigmoid_forward", "masked_fill", "mse_loss",
    "mse_loss_backward", "mv", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "rsub", "softplus_backward",
    "stack", "unsafe_split", "zeros", "zeros_like",
)  # fmt: skip


# Autograd knows these by the functions of `overrides` alone; called by themselves they would be constants to it.
WHOLE_OPS = (
    LINEAR, LINEAR_DGRAD, LINEAR_WGRAD, SDPA, SDPA_BWD, GROUPED_MM, GROUPED_MM_WGRAD, SCAN, SCAN_BACKWARD,
    CARRIED_STATES,
)  # fmt: skip


def undifferentiated(op: OpOverload) -> ShardcError:
    """The error for an op of `WHOLE_OPS` whose gradient would be lost."""
    message = f"{op_name(op)} has no derivative here, and its gradient is asked for"
    return error("SC104", message, op=op_name(op), hint="report the model: each such op should have one")


SEEDED = "draw from torch's generator as it is: every step draws anew, the same under every layout, by the plan's seed"
# The op numbers of a trace, as seeds of torch's own generator: far from those that a user takes.
_FIRST_NUMBER = 0x5EED << 40


_FINE = 1 << 16  # whole numbers, of which each is drawn equally often but for one in 256 times


def _refused_seed(*_: Any, **__: Any) -> Any:
    """In the place of what sets the seed of torch's generator."""
    raise error("SC111", "forward seeds torch's generator, of which a program knows nothing", hint=SEEDED)


class SeedText:
    """The seed of torch's generator, as forward reads it: to print and to log. As a number it would be a constant of
    the program, and another run's seed would change nothing."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __str__(self) -> str:
        return str(self._seed)

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return format(self._seed, spec)

    def _refused(self, *_: Any) -> Any:
        message = "forward computes with the seed of torch's generator, which would be a constant of the program"
        hint = 'print or log it as text (f"{seed}", "%s"), and pass a number that the step depends on as an input'
        raise error("SC111", message, hint=hint)

    __int__ = __index__ = __float__ = __bool__ = __hash__ = _refused  # type: ignore[assignment]
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refused  # type: ignore[assignment]
    __neg__ = __pos__ = __abs__ = __invert__ = __divmod__ = __rdivmod__ = _refused
    __add__ = __sub__ = __mul__ = __truediv__ = __floordiv__ = __mod__ = __pow__ = _refused
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rfloordiv__ = __rmod__ = __rpow__ = _refused
    __and__ = __or__ = __xor__ = __lshift__ = __rshift__ = _refused
    __rand__ = __ror__ = __rxor__ = __rlshift__ = __rrshift__ = _refused


def _refuse_generator(generator: Any) -> None:
    """Raise ShardcError (SC111) for a draw from another generator than torch's own."""
    if generator is not None and not torch_compat.is_default_generator(generator):
        message = "forward draws from a generator of its own: a program would draw other numbers, anew in every step"
        raise error("SC111", message, hint="leave out generator=; " + SEEDED)


def dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """aten.dropout, with nothing left of it where it does nothing."""
    return aten.native_dropout(x, p, train)[0] if train and p > 0.0 else x


def cumprod_backward(g: Tensor, x: Tensor, dim: int, y: Tensor) -> Tensor:
    """The gradient of `y = cumprod(x, dim)`, of x's shape, by prefix sums and products alone.

    Before the first zero it is the sum of g y from there on, over x; at it the same sum, of products without it; after
    it 0. Of fakes, torch 2.11 takes a product for each element; with scatter and gather, 2.13 does as much as here.
    A gradient that is differentiated in turn, and that of complex numbers, is torch's own.
    """
    if torch.is_grad_enabled() or x.is_complex() or y.is_complex():
        return aten.cumprod_backward.default.decompose(g, x, dim, y)
    if x.numel() <= 1 or x.shape[dim] == 1:
        return g

    def from_here_on(t: Tensor) -> Tensor:
        return t.flip(dim).cumsum(dim).flip(dim)

    zero = x == 0
    zeros = zero.cumsum(dim)
    before, first = zeros == 0, zero & (zeros == 1)
    without = torch.where(first, 1.0, x).cumprod(dim, dtype=y.dtype)
    at_first = from_here_on(torch.where(zeros == 1, g * without, 0.0))
    return torch.where(before, from_here_on(torch.where(before, g * y, 0.0)) / x, torch.where(first, at_first, 0.0))


def overrides() -> dict[str, Callable[..., Any]]:
    """ATen op -> stand-in, for `torch_compat.override_aten`."""
    return {
        "linear": linear, "scaled_dot_product_attention": attention, "_grouped_mm": grouped_mm, "dropout": dropout,
        "cumprod_backward": cumprod_backward,
    }  # fmt: skip


class RandomOps:
    """The random ops of one trace: each draws its uniforms from `seed` under a number of its own.

    The running number lives in torch's own CPU generator, as its seed. Activation checkpointing saves and restores
    that generator to draw the same masks again when it recomputes, and so gets the same numbers again.
    """

    def __init__(self) -> None:
        self.seed: Tensor | None = None
        self.count = 0  # numbers that were given out

    @contextmanager
    def numbered(self) -> Generator[None]:
        self.count = 0
        seed = torch.initial_seed()
        with torch.random.fork_rng(devices=[]), torch_compat.seeding(_refused_seed, lambda: SeedText(seed)):
            torch.default_generator.manual_seed(_FIRST_NUMBER)
            yield

    @property
    def number(self) -> int:
        """What the next draw is called."""
        return torch.default_generator.initial_seed() - _FIRST_NUMBER

    def skip(self, draws: int) -> None:
        """Count some that are not recorded."""
        after = self.number + draws
        self.count = max(self.count, after)
        torch.default_generator.manual_seed(_FIRST_NUMBER + after)

    def uniform(self, shape: Sequence[int]) -> Tensor:
        """Float32 uniforms in [0, 1), one node; its op number is the next."""
        assert self.seed is not None, "random ops are traced under a seed"
        op_id = self.number
        if not 0 <= op_id <= self.count:
            _refused_seed()
        self.count = max(self.count, op_id + 1)
        torch.default_generator.manual_seed(_FIRST_NUMBER + op_id + 1)
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        offset = aten.full.default([], 0, dtype=torch.int64, device=torch.device("cpu"), pin_memory=False)
        return RANDOM_UNIFORM(self.seed, op_id, list(shape), strides, offset)

    def normal(self, shape: Sequence[int]) -> Tensor:
        """Float32 standard normals, by Box and Muller; 1 - u is in (0, 1] and has a logarithm."""
        radius = ((1.0 - self.uniform(shape)).log() * -2.0).sqrt()
        return radius * (self.uniform(shape) * (2.0 * math.pi)).cos()

    def whole(self, shape: Sequence[int], low: int, high: int) -> Tensor:
        """Whole numbers in [low, high). The product is exact in float64, so that it never rounds up to high."""
        fraction = self.uniform(shape).to(torch.float64)
        if high - low > _FINE:  # there are 2^24 uniforms
            fraction = fraction + self.uniform(shape).to(torch.float64) * 2.0**-24
        return (fraction * float(high - low)).floor().to(torch.int64) + low

    def permutation(self, count: int) -> Tensor:
        return self.uniform([count]).argsort(stable=True)

    def decompositions(self) -> dict[OpOverload, Callable[..., Any]]:
        def dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
            if train is False or p == 0.0:
                return x.clone(), aten.full.default(x.shape, True, dtype=torch.bool, device=x.device, pin_memory=False)
            keep = self.uniform(x.shape) >= p
            return x * keep * (0.0 if p == 1.0 else 1.0 / (1.0 - p)), keep

        def dropout_backward(g: Tensor, keep: Tensor, scale: float) -> Tensor:
            return g * keep * scale

        def uniform_(x: Tensor, low: float = 0.0, high: float = 1.0, generator: Any = None) -> Tensor:
            _refuse_generator(generator)
            return x.copy_(self.uniform(x.shape) * (high - low) + low)

        def normal_(x: Tensor, mean: float = 0.0, std: float = 1.0, generator: Any = None) -> Tensor:
            _refuse_generator(generator)
            return x.copy_(self.normal(x.shape) * std + mean)

        def exponential_(x: Tensor, lambd: float = 1.0, generator: Any = None) -> Tensor:
            _refuse_generator(generator)
            return x.copy_((1.0 - self.uniform(x.shape)).log() * (-1.0 / lambd))

        def bernoulli_(x: Tensor, p: Any = 0.5, generator: Any = None) -> Tensor:
            _refuse_generator(generator)
            return x.copy_(self.uniform(x.shape) < p)

        def bernoulli_p(x: Tensor, p: Any, generator: Any = None) -> Tensor:
            _refuse_generator(generator)
            return (self.uniform(x.shape) < p).to(x.dtype)

        def bernoulli(x: Tensor, generator: Any = None) -> Tensor:
            _refuse_generator(generator)
            return (self.uniform(x.shape) < x).to(x.dtype)

        def less(x: Tensor, bound: float) -> Tensor:
            """Layers dropped at a rate of 0, as some of transformers' models decide it: `if torch.rand([]) < 0.0:`."""
            node = torch_compat.node_of(x) if x.dim() == 0 and bound <= 0.0 else None
            if node is None or node.target is not RANDOM_UNIFORM or any(map(torch_compat.shares_memory, node.users)):
                return NotImplemented  # a view may have written another number
            return torch.tensor(False)

        def filled_by(draw: Callable[[Sequence[int]], Tensor]) -> Callable[..., Tensor]:
            def make(
                size: Sequence[int], *, dtype: torch.dtype | None = None, generator: Any = None, **_: Any
            ) -> Tensor:
                _refuse_generator(generator)
                return draw(size).to(dtype or torch.get_default_dtype())

            return make

        def filled_like(draw: Callable[[Sequence[int]], Tensor]) -> Callable[..., Tensor]:
            def make(x: Tensor, *, dtype: torch.dtype | None = None, generator: Any = None, **_: Any) -> Tensor:
                _refuse_generator(generator)
                return draw(x.shape).to(dtype or x.dtype)

            return make

        def randint(low: int, high: int, size: Sequence[int], *, dtype: Any = None, generator: Any = None, **_: Any):
            _refuse_generator(generator)
            return self.whole(size, low, high).to(dtype or torch.int64)

        def randint_to(high: int, size: Sequence[int], **options: Any) -> Tensor:
            return randint(0, high, size, **options)

        def randint_like(x: Tensor, low: int, high: int, *, dtype: Any = None, generator: Any = None, **_: Any):
            _refuse_generator(generator)
            return self.whole(x.shape, low, high).to(dtype or x.dtype)

        def randint_like_to(x: Tensor, high: int, **options: Any) -> Tensor:
            return randint_like(x, 0, high, **options)

        def random_(x: Tensor, low: int, high: int | None, *, generator: Any = None) -> Tensor:
            _refuse_generator(generator)
            if high is None:  # up to the largest of the dtype
                return NotImplemented
            return x.copy_(self.whole(x.shape, low, high))

        def random_to(x: Tensor, high: int, *, generator: Any = None) -> Tensor:
            return random_(x, 0, high, generator=generator)

        def randperm(n: int, *, dtype: Any = None, generator: Any = None, **_: Any) -> Tensor:
            _refuse_generator(generator)
            return self.permutation(n).to(dtype or torch.int64)

        return {
            aten.native_dropout.default: dropout,
            **dict.fromkeys((aten.randint.default, aten.randint.generator), randint_to),
            **dict.fromkeys((aten.randint.low, aten.randint.low_generator), randint),
            aten.randint_like.default: randint_like_to,
            aten.randint_like.low_dtype: randint_like,
            aten.random_.to: random_to,
            getattr(aten.random_, "from"): random_,
            **dict.fromkeys((aten.randperm.default, aten.randperm.generator), randperm),
            aten.native_dropout_backward.default: dropout_backward,
            aten.uniform_.default: uniform_,
            aten.normal_.default: normal_,
            aten.exponential_.default: exponential_,
            aten.bernoulli_.float: bernoulli_,
            aten.bernoulli_.Tensor: bernoulli_,
            aten.bernoulli.p: bernoulli_p,
            aten.bernoulli.default: bernoulli,
            aten.lt.Scalar: less,
            **dict.fromkeys((aten.rand.default, aten.rand.generator), filled_by(self.uniform)),
            **dict.fromkeys((aten.randn.default, aten.randn.generator), filled_by(self.normal)),
            **dict.fromkeys(torch_compat.like_ops("rand_like"), filled_like(self.uniform)),
            **dict.fromkeys(torch_compat.like_ops("randn_like"), filled_like(self.normal)),
        }
