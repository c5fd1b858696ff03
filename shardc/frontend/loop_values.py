"""What a loop over time computes, found by running one step of it on stand-ins for tensors.

    h = a[:, t] * h + x[:, t]          carried h:bd, inputs a:btd x:btd, mul(a, h), add(.., x)

A stand-in has a shape, a dtype and the label of each dim. Where an operation lines two dims up they are one dim from
then on. If some tensor has both (the k and n of `h @ w`, whose result is the next h), one is renamed and neither can be
split. Three kinds: `Same` is a tensor that every step reads, `Step` is its part of one step, `Value` is computed.
What reshapes a `Same` or a `Step`, or casts it, happens to the whole tensor before the loop.

Whatever is not known here raises `UnrolledError`, and the loop then runs as it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from shardc.ir.ops.scan_body import LETTERS, RENAME, TIME, Body, Statement

Dim = int | None  # a label; None for a dim of size 1


class UnrolledError(Exception):
    """A loop that is not one op. `why` is for the user; "" where the line of the body that did it says enough."""

    def __init__(self, why: str = "") -> None:
        super().__init__(why)
        self.why = why


def refuse(*_: Any, **__: Any) -> NoReturn:
    raise UnrolledError


class Index:
    """The number of the step, times a factor and plus an offset. It can only index tensors."""

    def __init__(self, factor: int = 1, offset: int = 0) -> None:
        self.factor, self.offset = factor, offset

    def __mul__(self, by: Any) -> Index:
        if type(by) is not int:
            refuse()
        return Index(self.factor * by, self.offset * by)

    def __add__(self, by: Any) -> Index:
        if type(by) is not int:
            refuse()
        return Index(self.factor, self.offset + by)

    def __sub__(self, by: Any) -> Index:
        return self + -by if type(by) is int else refuse()

    __rmul__, __radd__ = __mul__, __add__
    __index__ = __int__ = __float__ = __bool__ = __hash__ = __eq__ = __ne__ = refuse  # type: ignore[assignment]
    __lt__ = __le__ = __gt__ = __ge__ = __mod__ = __floordiv__ = __truediv__ = __neg__ = __rsub__ = refuse
    __pow__ = __rpow__ = __and__ = __or__ = __divmod__ = __rmod__ = __rfloordiv__ = __getattr__ = refuse
    __str__ = __repr__ = __format__ = refuse  # type: ignore[assignment]

    def in_step(self, step: int) -> int:
        """What it is in one step."""
        return self.factor * step + self.offset


class Recorder:
    """The step that is being run: its labels, statements and inputs."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.over_time = False  # has the step indexed a tensor by its number?
        self.statements: list[tuple[str, str, tuple[str, ...], Any]] = []
        self.sizes: list[int] = []
        self.parents: list[int] = []
        self.held: list[tuple[int, ...]] = []  # labels that a tensor has together
        self.inputs: list[tuple[str, Tensor, tuple[int | str, ...]]] = []
        self.known: dict[tuple[Any, ...], tuple[str, tuple[Dim, ...]]] = {}
        self.alive: list[Tensor] = []  # the keys of `known` are their identities

    def label(self, size: int) -> Dim:
        if size == 1:
            return None
        self.sizes.append(size)
        self.parents.append(len(self.parents))
        return len(self.parents) - 1

    def root(self, label: int) -> int:
        while self.parents[label] != label:
            label = self.parents[label]
        return label

    def has_twice(self, dims: Sequence[Dim]) -> bool:
        """Whether two of these dims are one: a letter of a value stands for one dim alone."""
        roots = [self.root(d) for d in dims if d is not None]
        return len(set(roots)) != len(roots)

    def hold(self, dims: Sequence[Dim]) -> None:
        self.held.append(tuple(d for d in dims if d is not None))

    def unify(self, a: int, b: int) -> bool:
        """Make two labels one; False if a tensor has both."""
        a, b = self.root(a), self.root(b)
        if a == b:
            return True
        if self.sizes[a] != self.sizes[b]:
            refuse()
        if any({a, b} <= {self.root(x) for x in held} for held in self.held):
            return False
        self.parents[b] = a
        return True

    def input(self, base: Tensor, time: int | None) -> tuple[str, tuple[Dim, ...]]:
        """The name of a tensor as an input, and the labels of its dims but time."""
        key = (id(base), time)
        if key not in self.known:
            name = f"i{len(self.inputs)}"
            dims = tuple(self.label(size) for d, size in enumerate(base.shape) if d != time)
            self.hold(dims)
            spec: list[int | str | None] = list(dims)
            given = base
            if time is not None:
                spec.insert(time, TIME)
            for place in reversed([d for d, x in enumerate(spec) if x is None]):
                given = given.squeeze(place)
            self.alive.append(base)
            self.inputs.append((name, given, tuple(x for x in spec if x is not None)))
            self.known[key] = name, dims
        return self.known[key]

    def state(self, name: str, initial: Tensor) -> Value:
        dims = tuple(map(self.label, initial.shape))
        self.hold(dims)
        return Value(self, initial.dtype, dims, name)

    def emit(
        self, op: str, operands: Sequence[Value], dims: Sequence[Dim], dtype: torch.dtype, note: Any = ""
    ) -> Value:
        if not dtype.is_floating_point or self.has_twice(dims):
            refuse()
        name = f"v{len(self.statements)}"
        self.statements.append((name, op, tuple(v.name for v in operands), note))
        self.hold(dims)
        return Value(self, dtype, tuple(dims), name)

    def renamed(self, value: Value, place: int, label: int) -> Value:
        """A value one of whose dims is lined up with a dim that it cannot be."""
        old = value.dims[place]
        assert old is not None
        if any(d is not None and self.root(d) == self.root(label) for d in value.dims):
            refuse()
        dims = [*value.dims[:place], label, *value.dims[place + 1 :]]
        self.hold((old, label))
        return self.emit(RENAME, [value], dims, value.dtype, (old, label))

    def lined_up(self, a: Value, at: int, b: Value, place: int) -> tuple[Value, Value]:
        """Two values, of which a dim of one is a dim of the other. Dims of size 1 are lined up with any."""
        first, second = a.dims[at], b.dims[place]
        if first is None or second is None or self.unify(first, second):
            return a, b
        if any(d is not None and self.root(d) == self.root(first) for d in b.dims):
            return self.renamed(a, at, second), b
        return a, self.renamed(b, place, first)

    def body(
        self, states: Sequence[tuple[Value, Value]], yields: Sequence[tuple[Value, int]]
    ) -> tuple[Body, list[Tensor]]:
        """The step as a body, and its inputs. What a step yields has time before the dim of this number."""
        letters: dict[int, str] = {}

        def letter(label: int | str) -> str:
            if isinstance(label, str):
                return label
            root = self.root(label)
            if root not in letters:
                if len(letters) == len(LETTERS):
                    refuse()
                letters[root] = LETTERS[len(letters)]
            return letters[root]

        def text(labels: Sequence[Dim | str]) -> str:
            return "".join(letter(x) for x in labels if x is not None)

        needed = {after.name for _, after in states} | {value.name for value, _ in yields}
        for name, _, operands, _ in reversed(self.statements):
            needed.update(operands if name in needed else ())
        carried = tuple((before.name, text(before.dims)) for before, _ in states)
        read = [(name, given, labels) for name, given, labels in self.inputs if name in needed]
        inputs = tuple((name, text(labels)) for name, _, labels in read)
        statements = tuple(
            Statement(name, op, operands, text(note) if isinstance(note, tuple) else str(note))
            for name, op, operands, note in self.statements
            if name in needed
        )
        following = tuple((before.name, after.name) for before, after in states)
        results = tuple((v.name, text((*v.dims[:place], TIME, *v.dims[place:]))) for v, place in yields)
        body = Body(carried, inputs, statements, following, results)
        return body, [given for _, given, _ in read]


class Symbol:
    """A stand-in. Methods and torch's functions go through `call`."""

    recorder: Recorder
    shape: torch.Size
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def __len__(self) -> int:
        return self.shape[0] if self.shape else refuse()

    def __getattr__(self, name: str) -> Any:
        if name in ("mT", "T"):
            return call("transpose", self, -2, -1) if name == "mT" else call("t", self)
        return Method(name, self) if name in OPERATIONS else refuse()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call(func.__name__, *args, **(kwargs or {}))

    def __getitem__(self, key: Any) -> Any:
        return call("getitem", self, key)

    def __neg__(self) -> Any:
        return call("neg", self)

    def __invert__(self) -> Any:
        return call("bitwise_not", self)

    __iadd__ = __isub__ = __imul__ = __itruediv__ = __imatmul__ = __ipow__ = refuse  # they write to their tensor
    __bool__ = __int__ = __float__ = __index__ = __hash__ = __iter__ = __contains__ = refuse  # type: ignore[assignment]
    __eq__ = __ne__ = __setitem__ = __str__ = __repr__ = __format__ = refuse  # type: ignore[assignment]


def _operator(name: str, *, swapped: bool = False) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        return call(name, other, self) if swapped else call(name, self, other)

    return method


for _name, _op in (("add", "add"), ("sub", "sub"), ("mul", "mul"), ("truediv", "div"), ("matmul", "matmul"),
                   ("pow", "pow")):  # fmt: skip
    setattr(Symbol, f"__{_name}__", _operator(_op))
    setattr(Symbol, f"__r{_name}__", _operator(_op, swapped=True))


for _name in ("lt", "le", "gt", "ge"):
    setattr(Symbol, f"__{_name}__", _operator(_name))


class Method:
    """A method of a stand-in, not yet called."""

    def __init__(self, name: str, of: Symbol) -> None:
        self.name, self.of = name, of

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return call(self.name, self.of, *args, **kwargs)

    __bool__ = __hash__ = __eq__ = refuse  # type: ignore[assignment]


class Value(Symbol):
    """What a step computes, or a state: a name in the body."""

    def __init__(self, recorder: Recorder, dtype: torch.dtype, dims: tuple[Dim, ...], name: str) -> None:
        self.recorder, self.dtype, self.dims, self.name = recorder, dtype, dims, name
        self.shape = torch.Size(1 if d is None else recorder.sizes[d] for d in dims)


class Step(Symbol):
    """The part of a tensor that one step reads: `base` without its dim `time`."""

    def __init__(self, recorder: Recorder, base: Tensor, time: int) -> None:
        self.recorder, self.base, self.time, self.dtype = recorder, base, time, base.dtype
        self.shape = torch.Size(size for d, size in enumerate(base.shape) if d != time)

    @property
    def device(self) -> torch.device:
        return self.base.device


class Same(Symbol):
    """A tensor as a whole."""

    def __init__(self, recorder: Recorder, tensor: Tensor) -> None:
        self.recorder, self.tensor, self.dtype, self.shape = recorder, tensor, tensor.dtype, tensor.shape

    @property
    def device(self) -> torch.device:
        return self.tensor.device


def as_value(recorder: Recorder, x: Any) -> Value:
    """An operand by its name in the body."""
    if isinstance(x, Value):
        return x
    if isinstance(x, Step):
        name, dims = recorder.input(x.base, x.time)
    elif isinstance(x, (Same, Tensor)):
        tensor = x.tensor if isinstance(x, Same) else x
        name, dims = recorder.input(tensor, None)
    else:
        refuse()
    return Value(recorder, x.dtype, dims, name)


OPERATIONS: dict[str, Callable[..., Any]] = {}  # torch's name of an operation -> what it is on stand-ins


def operation(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A function as what operations of these names are on stand-ins."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        OPERATIONS.update(dict.fromkeys(names, function))
        return function

    return register


def call(name: str, *args: Any, **kwargs: Any) -> Any:
    """One operation, on at least one stand-in."""
    operation = OPERATIONS.get(name)
    if operation is None:
        refuse()
    return operation(*args, **kwargs)
