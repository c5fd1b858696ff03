"""What torch's operations are on the stand-ins of `loop_values`.

On a `Same`, an operation is done at once, before the loop. So is one on a `Step` alone that is pointwise or only
changes its shape: it is done on the whole tensor. All others become statements of the step. A statement computes in
float32 at least, so that what a step rounds to half precision is not rounded; a step that casts to float64, or from it,
is refused.

What changes shapes or takes parts is in `loop_shapes`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardc.frontend.loop_values import (
    OPERATIONS,
    Dim,
    Recorder,
    Same,
    Step,
    Symbol,
    Value,
    as_value,
    operation,
    refuse,
)

Number = (int, float)
HOISTED = (
    "exp", "log", "abs", "sigmoid", "tanh", "relu", "softplus", "sqrt", "rsqrt", "neg", "silu", "gelu", "logsigmoid",
    "square", "log1p", "expm1", "sin", "cos", "clamp", "elu", "leaky_relu", "hardtanh", "bitwise_not", "logical_not",
    "reciprocal", "negative", "relu6", "mish", "softsign",
)  # fmt: skip
STATEMENTS = ("exp", "log", "abs", "sigmoid", "tanh", "relu", "sqrt", "rsqrt", "neg")


def _recorder(*values: Any) -> Recorder:
    return next(v.recorder for v in values if isinstance(v, Symbol))


def _of(x: Symbol, change: Callable[[Tensor], Tensor]) -> Symbol:
    """A pointwise change of a tensor, before the loop."""
    if isinstance(x, Same):
        return Same(x.recorder, change(x.tensor))
    assert isinstance(x, Step)
    return Step(x.recorder, change(x.base), x.time)


# ------------------------------------------------------------------ one operand
def _pointwise(name: str) -> None:
    whole = getattr(torch, name, None) or getattr(F, name)

    def operation(x: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(x, Symbol) or any(isinstance(a, (Symbol, Tensor)) for a in (*args, *kwargs.values())):
            refuse()
        if kwargs.get("inplace") or any(a is True for a in args):  # which says so by its place
            refuse()
        if not isinstance(x, Value):
            return _of(x, lambda t: whole(t, *args, **kwargs))
        plain = not args and not any(kwargs.values())
        if name in STATEMENTS and plain:
            return x.recorder.emit(name, [x], x.dims, x.dtype)
        if name == "softplus" and not args and kwargs.get("beta", 1) == 1 and kwargs.get("threshold", 20) == 20:
            return x.recorder.emit(name, [x], x.dims, x.dtype)
        if name == "silu" and plain:
            return binary("mul", x, x.recorder.emit("sigmoid", [x], x.dims, x.dtype))
        if name == "square" and plain:
            return binary("mul", x, x)
        if name == "negative" and plain:
            return x.recorder.emit("neg", [x], x.dims, x.dtype)
        return refuse()

    OPERATIONS[name] = operation


for _name in HOISTED:
    _pointwise(_name)
OPERATIONS["log_sigmoid"] = OPERATIONS["logsigmoid"]  # as torch's function calls itself


@operation("contiguous", "clone", "identity")
def same(x: Any, **_: Any) -> Any:
    return x


@operation("dropout")
def dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    return x if not training or p == 0.0 else refuse()


@operation("to", "type", "type_as", "float", "double", "half", "bfloat16")
def to(x: Any, *args: Any, **kwargs: Any) -> Any:
    return cast_to(x, *args, **kwargs)


def cast_to(x: Any, *args: Any, **kwargs: Any) -> Any:
    dtype = x.dtype
    for given in (*args, *(kwargs[key] for key in ("dtype", "other") if key in kwargs)):
        if isinstance(given, (Symbol, Tensor)):
            dtype = given.dtype
        elif isinstance(given, torch.dtype):
            dtype = given
        elif not isinstance(given, (torch.device, str, bool)):
            refuse()
    if not isinstance(x, Value):
        return _of(x, lambda t: t.to(dtype))
    if (x.dtype == torch.float64) != (dtype == torch.float64) or not dtype.is_floating_point:
        refuse()
    return Value(x.recorder, dtype, x.dims, x.name)


for _name, _dtype in (("float", torch.float32), ("double", torch.float64), ("half", torch.float16),
                      ("bfloat16", torch.bfloat16)):  # fmt: skip
    OPERATIONS[_name] = lambda x, dtype=_dtype: cast_to(x, dtype)


# ------------------------------------------------------------------ two operands
def promoted(a: Symbol, b: Symbol) -> torch.dtype:
    if bool(a.shape) != bool(b.shape) and a.dtype.is_floating_point == b.dtype.is_floating_point:
        return a.dtype if a.shape else b.dtype
    return torch.promote_types(a.dtype, b.dtype)


def _with_number(name: str, x: Value, number: float, swapped: bool) -> Any:
    def emit(op: str, operand: Value, note: Any = "") -> Value:
        return operand.recorder.emit(op, [operand], operand.dims, operand.dtype, note)

    number = float(number)
    if name == "add":
        return emit("shift", x, repr(number))
    if name == "mul":
        return emit("scale", x, repr(number))
    if name == "sub":
        return emit("shift", emit("neg", x), repr(number)) if swapped else emit("shift", x, repr(-number))
    if name == "div" and not swapped and number:
        return emit("scale", x, repr(1.0 / number))
    if name == "pow" and not swapped and number == 2.0:
        return binary("mul", x, x)
    return refuse()


PYTHON: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "pow": operator.pow,
}


def binary(name: str, a: Any, b: Any) -> Any:
    whole = getattr(torch, name)
    if isinstance(a, Number) or isinstance(b, Number):
        x, number = (b, a) if isinstance(a, Number) else (a, b)
        if not isinstance(x, Symbol):
            refuse()
        if not isinstance(x, Value):
            plain = PYTHON.get(name) or refuse()
            return _of(x, lambda t: plain(number, t) if x is b else plain(t, number))
        return _with_number(name, x, number, swapped=x is b)
    if not all(isinstance(v, (Symbol, Tensor)) for v in (a, b)):
        refuse()
    recorder = _recorder(a, b)
    if not any(isinstance(v, (Value, Step)) for v in (a, b)):
        return Same(recorder, whole(*(v.tensor if isinstance(v, Same) else v for v in (a, b))))
    if name not in ("add", "sub", "mul", "div", "maximum"):
        refuse()
    x, y = as_value(recorder, a), as_value(recorder, b)
    x, y, dims = broadcast(x, y)
    return recorder.emit(name, [x, y], dims, promoted(x, y))


def broadcast(a: Value, b: Value) -> tuple[Value, Value, list[Dim]]:
    """Two values with their dims lined up from the right, and the dims of both."""
    for back in range(1, min(a.ndim, b.ndim) + 1):
        a, b = a.recorder.lined_up(a, a.ndim - back, b, b.ndim - back)
    longer, shorter = (a.dims, b.dims) if a.ndim >= b.ndim else (b.dims, a.dims)
    padded = [None] * (len(longer) - len(shorter)) + list(shorter)
    return a, b, [x if x is not None else y for x, y in zip(longer, padded, strict=True)]


def _binary_operation(name: str, *names: str) -> None:
    def operation(a: Any, b: Any, **kwargs: Any) -> Any:
        if any(value not in (None, 1) for value in kwargs.values()):
            refuse()
        return binary(name, a, b)

    OPERATIONS.update(dict.fromkeys((name, *names), operation))


_binary_operation("add")
_binary_operation("sub", "subtract")
_binary_operation("mul", "multiply")
_binary_operation("div", "divide", "true_divide")
_binary_operation("maximum")
_binary_operation("pow")


def _comparison(name: str) -> None:
    def operation(x: Any, number: Any) -> Any:
        known = isinstance(x, (Step, Same)) and type(number) in Number
        return _of(x, lambda t: getattr(torch, name)(t, number)) if known else refuse()

    OPERATIONS[name] = operation


for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _comparison(_name)


@operation("max")
def larger(a: Any, b: Any = None, **kwargs: Any) -> Any:
    return binary("maximum", a, b) if isinstance(b, (Symbol, Tensor)) and not kwargs else refuse()


@operation("minimum", "min")
def smaller(a: Any, b: Any = None, **kwargs: Any) -> Any:
    if not isinstance(b, (Symbol, Tensor)) or kwargs:
        refuse()
    return OPERATIONS["neg"](binary("maximum", *(OPERATIONS["neg"](_symbol(_recorder(a, b), v)) for v in (a, b))))


def _symbol(recorder: Recorder, x: Any) -> Symbol:
    return x if isinstance(x, Symbol) else Same(recorder, x) if isinstance(x, Tensor) else refuse()


def keep(x: Any, mask: Symbol) -> Any:
    value, kept, dims = broadcast(as_value(x.recorder, x), as_value(x.recorder, mask))
    return x.recorder.emit("keep", [value, kept], dims, value.dtype)


@operation("masked_fill")
def masked_fill(x: Any, mask: Any, value: Any) -> Any:
    mask = _symbol(_recorder(x, mask), mask)
    if not isinstance(x, (Value, Step)) or isinstance(mask, Value) or type(value) not in Number or value:
        refuse()
    return keep(x, OPERATIONS["logical_not"](mask))


@operation("where")
def where(mask: Any, x: Any, y: Any) -> Any:
    recorder = _recorder(mask, x, y)
    mask = _symbol(recorder, mask)
    if isinstance(mask, Value) or mask.dtype != torch.bool:
        refuse()
    sides = [(x, mask), (y, OPERATIONS["logical_not"](mask))]
    kept = [keep(_symbol(recorder, v), m) for v, m in sides if not (type(v) in Number and v == 0)]
    return binary("add", *kept) if len(kept) == 2 else kept[0] if kept else refuse()


# ------------------------------------------------------------------ sums
@operation("sum")
def summed(x: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    if kwargs or not isinstance(x, (Value, Step)):
        refuse()
    value = as_value(x.recorder, x)
    dims = range(value.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    places = {d % max(1, value.ndim) for d in dims}
    kept = [None if d in places else label for d, label in enumerate(value.dims) if keepdim or d not in places]
    labels = tuple(label for d, label in enumerate(value.dims) if d in places and label is not None)
    if not labels:
        return Value(value.recorder, value.dtype, tuple(kept), value.name)
    product = next((st for st in value.recorder.statements if st[0] == value.name and st[1] == "mul"), None)
    if product is None:
        return value.recorder.emit("sum", [value], kept, value.dtype, labels)
    factors = [Value(value.recorder, value.dtype, (), name) for name in product[2]]
    return value.recorder.emit("dot", factors, kept, value.dtype, labels)


@operation("mean")
def mean(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    total = summed(x, dim, keepdim)
    return binary("mul", total, (total.shape.numel() or 1) / x.shape.numel())


def contracted(a: Any, at: int, b: Any, place: int, dims: Callable[[Value, Value], Sequence[Dim]]) -> Any:
    """The product of two values, summed over a dim of both; `dims` are the others, in the result's order."""
    recorder = _recorder(a, b)
    x, y = as_value(recorder, a), as_value(recorder, b)
    if x.shape[at] != y.shape[place]:
        refuse()
    x, y = recorder.lined_up(x, at, y, place)
    result, label = dims(x, y), x.dims[at]
    if label is None:
        return recorder.emit("mul", [x, y], result, promoted(x, y))
    return recorder.emit("dot", [x, y], result, promoted(x, y), (label,))


@operation("matmul", "bmm", "mm", "mv", "dot")
def matmul(a: Any, b: Any) -> Any:
    recorder = _recorder(a, b)
    if not any(isinstance(v, (Value, Step)) for v in (a, b)):
        return Same(recorder, torch.matmul(*(v.tensor if isinstance(v, Same) else v for v in (a, b))))
    a, b = as_value(recorder, a), as_value(recorder, b)
    rows, columns = a.ndim > 1, b.ndim > 1
    lead = min(max(a.ndim - 2, 0), max(b.ndim - 2, 0))
    for back in range(3, 3 + lead):
        a, b = recorder.lined_up(a, a.ndim - back, b, b.ndim - back)
    if rows and columns and a.dims[-2] is not None and b.dims[-1] is not None:
        row, column = recorder.root(a.dims[-2]), recorder.root(b.dims[-1])
        if row == column:
            fresh = recorder.label(b.shape[-1])
            assert fresh is not None
            b = recorder.renamed(b, b.ndim - 1, fresh)

    def dims(x: Value, y: Value) -> list[Dim]:
        mine, other = list(x.dims[:-2]), list(y.dims[:-2])
        width = max(len(mine), len(other))
        padded = [[None] * (width - len(some)) + some for some in (mine, other)]
        batch = [p if p is not None else q for p, q in zip(*padded, strict=True)]
        return [*batch, *([x.dims[-2]] if rows else []), *([y.dims[-1]] if columns else [])]

    return contracted(a, a.ndim - 1, b, b.ndim - 2 if columns else 0, dims)


@operation("linear")
def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    recorder = _recorder(x, weight)
    y = contracted(x, x.ndim - 1, weight, 1, lambda p, q: [*p.dims[:-1], q.dims[0]])
    return y if bias is None else binary("add", y, _symbol(recorder, bias))


# ------------------------------------------------------------------ cells
def _gates(x: Any, h: Any, count: int, weights: Sequence[Any]) -> list[tuple[Any, Any]]:
    """For each gate of a cell its part from the input, and that from the state."""
    parts = [(None,) * count if w is None else _plain(w).chunk(count) for w in weights]
    ih, hh, b_ih, b_hh = [*parts, (None,) * count, (None,) * count][:4]
    return [(linear(x, ih[g], b_ih[g]), linear(h, hh[g], b_hh[g])) for g in range(count)]


def _plain(w: Any) -> Tensor:
    return w.tensor if isinstance(w, Same) else w


@operation("rnn_tanh_cell", "rnn_relu_cell")
def rnn_cell(x: Any, h: Any, *weights: Any) -> Any:
    ((mine, other),) = _gates(x, h, 1, weights)
    return OPERATIONS["tanh"](binary("add", mine, other))


def rnn_relu_cell(x: Any, h: Any, *weights: Any) -> Any:
    ((mine, other),) = _gates(x, h, 1, weights)
    return OPERATIONS["relu"](binary("add", mine, other))


OPERATIONS["rnn_relu_cell"] = rnn_relu_cell


@operation("gru_cell")
def gru_cell(x: Any, h: Any, *weights: Any) -> Any:
    (r_in, r_state), (z_in, z_state), (n_in, n_state) = _gates(x, h, 3, weights)
    sigmoid = OPERATIONS["sigmoid"]
    reset, update = sigmoid(binary("add", r_in, r_state)), sigmoid(binary("add", z_in, z_state))
    new = OPERATIONS["tanh"](binary("add", n_in, binary("mul", reset, n_state)))
    return binary("add", new, binary("mul", update, binary("sub", h, new)))


@operation("lstm_cell")
def lstm_cell(x: Any, states: Any, *weights: Any) -> Any:
    h, c = states
    i, f, g, o = (binary("add", *parts) for parts in _gates(x, h, 4, weights))
    sigmoid, tanh = OPERATIONS["sigmoid"], OPERATIONS["tanh"]
    c = binary("add", binary("mul", sigmoid(f), c), binary("mul", sigmoid(i), tanh(g)))
    return binary("mul", sigmoid(o), tanh(c)), c
