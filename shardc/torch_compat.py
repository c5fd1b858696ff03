# pyright: reportPrivateUsage=false
"""The one file that uses torch's private or version-dependent APIs. Supports torch 2.11 to 2.13.

Everything else in shardc is written against public torch; what a new torch release breaks, it breaks here. Each
function does one thing that its caller needs and says why the public API does not do. It is over 400 lines because it
is the one such file: what depends on torch's insides is found here and nowhere else.
"""

from __future__ import annotations

import copy
import gc
import inspect
import operator
import os
import pickle
import sys
import warnings
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import FrameType, GeneratorType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, cast

import torch
import torch.fx.config
import torch.utils._device
from torch import Tensor, fx, nn
from torch._decomp import get_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.func import functionalize
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, PythonKeyTracer, get_proxy_mode, make_fx
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

Decompositions = Mapping[OpOverload, Callable[..., Any]]

# Dropped from graphs: they are identities once there is neither autograd nor mutation.
IDENTITIES: tuple[OpOverload, ...] = tuple(
    getattr(torch.ops.aten, name).default for name in ("detach", "alias", "lift", "lift_fresh", "lift_fresh_copy")
)


# ------------------------------------------------------------------ nodes of graphs
# Of a node: the properties `args` and `kwargs` are functions in Python, and take five times as long; `all_input_nodes`
# makes a list, and takes twenty times as long.
target_of = operator.attrgetter("target")
args_of = operator.attrgetter("_args")
kwargs_of = operator.attrgetter("_kwargs")
inputs_of = operator.attrgetter("_input_nodes")  # what `all_input_nodes` lists, as the keys of a dict


def add_node(
    graph: fx.Graph, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str | None = None
) -> fx.Node:
    """A node at the graph's insertion point, as `Graph.create_node` makes it. That also looks through the arguments for
    symbolic sizes, which no body has, and takes twice as long. A `name` is that of another graph's node."""
    namespace = graph._graph_namespace
    if name is None or name in namespace._used_names:
        name = namespace.create_name(graph._target_to_str(target) if name is None else name, None)
    else:  # as `create_name` does it for the name of a node
        base, _, number = name.rpartition("_")
        if base and number.isdigit():
            namespace._base_count[base] = int(number)
        else:
            namespace._base_count.setdefault(name, 0)
        namespace._used_names.add(name)
    node = fx.Node(graph, name, op, target, args, kwargs)
    namespace._obj_to_name[node] = name
    graph._insert(node)
    graph._find_nodes_lookup_table.table[op, target if op == "call_function" else None][node] = None
    graph._len += 1
    return node


def _add_named(
    graph: fx.Graph, name: str, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> fx.Node:
    """A node of a name that the graph's namespace has given out for it."""
    node = fx.Node(graph, name, op, target, args, kwargs)
    graph._graph_namespace._obj_to_name[node] = name
    graph._insert(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
    return node


# ------------------------------------------------------------------ fake tensors
def fake_mode(*, remembers: bool = True) -> FakeTensorMode:
    """A mode in which real tensors that the model holds on to are constants, not errors. Whether it `remembers` what
    calls return pays where they are many: to remember one takes a third of a millisecond."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.cache_enabled = mode.cache_enabled and remembers
    return mode


def fake_like(mode: FakeTensorMode, t: Tensor) -> Tensor:
    """A fake CPU tensor of the same geometry, whatever device `t` is on (meta too).

    Never a fake CUDA tensor: without a GPU, autograd on those aborts the process.
    """
    with mode:
        return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="cpu")


class FakeParameters:
    """What `fake_like` makes of parameters as `torch.empty_like` lays them out: of one geometry it is asked once."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._strides: dict[object, tuple[int, ...]] = {}
        self._cpu = torch.device("cpu")

    def make(self, p: Tensor, dtype: torch.dtype) -> Tensor:
        if type(p) not in (Tensor, torch.nn.Parameter):
            like = torch.empty_like(p, dtype=dtype, device="meta")
            return fake_like(self._mode, like).requires_grad_(p.requires_grad)
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            size, key = p.size(), (p.size(), p.stride(), p.layout)
            strides = self._strides.get(key)
            if strides is None:
                strides = self._strides[key] = torch.empty_like(p, device="meta").stride()
            memory = torch.empty_strided(size, strides, dtype=dtype, device="meta")
            return FakeTensor(self._mode, memory, self._cpu).requires_grad_(p.requires_grad)


_W = TypeVar("_W", bound=Tensor)


def wrapper(cls: type[_W], like: Tensor) -> _W:
    """A tensor of a class of ours, without memory, that says of itself what `like` does."""
    make: Any = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
    return make(cls, like.shape, dtype=like.dtype, device=like.device, requires_grad=like.requires_grad)


def is_fake(t: Tensor) -> bool:
    return isinstance(t, FakeTensor)


# ------------------------------------------------------------------ recording
def record(
    fn: Callable[..., Any],
    inputs: Sequence[Tensor],
    mode: FakeTensorMode,
    decompositions: Decompositions,
    on_node: Callable[[fx.Node], None],
) -> fx.GraphModule:
    """Run `fn(*inputs)` on fakes and return what ATen saw, autograd's backward included."""
    options: dict[str, Any] = {"decomposition_table": dict(decompositions)}
    if "_disable_torch_fn_metadata_mode" in inspect.signature(make_fx).parameters:
        options["_disable_torch_fn_metadata_mode"] = True  # a mode that only labels nodes with torch functions
    with ExitStack() as stack:
        stack.enter_context(mode)
        # Composite ops resolve through Python kernels and so decompose the same way on every device.
        stack.enter_context(enable_python_dispatcher())
        stack.enter_context(_plain_rnns())
        stack.enter_context(_node_hook(on_node))
        stack.enter_context(_quiet_stacks())
        stack.enter_context(_no_tensor_meta())
        stack.enter_context(_shared_descriptions())
        stack.enter_context(_remembered_calls(mode, on_node))
        stack.enter_context(_use_lazy_graph_module(True))  # nobody runs its code: the graph is changed first
        gm = make_fx(fn, **options)(*inputs)
    for node in reversed(gm.graph.nodes):  # an op that raised, and whose error `fn` caught, has computed nothing
        raised = isinstance(node.target, OpOverload) and node.target._schema.returns and "val" not in node.meta
        if raised and not node.users:
            gm.graph.erase_node(node)
    return gm


def functionalized(
    gm: fx.GraphModule,
    inputs: Sequence[Tensor],
    mode: FakeTensorMode,
    run_node: Callable[[fx.Node, Callable[[], Any]], Any],
    on_node: Callable[[fx.Node], None],
) -> fx.GraphModule:
    """Retrace without mutation. In-place changes of an input end as `copy_` into its placeholder.

    `run_node(node, run)` surrounds the execution of each old node, so that the caller can carry things over.
    """

    class Replay(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            return run_node(n, lambda: fx.Interpreter.run_node(self, n))

        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            # Without mutation a value may come out in other strides, of which a view is no longer a view.
            view = target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
            return super().call_function(torch.ops.aten.reshape.default if view else target, args, kwargs)

    def replay(*args: Tensor) -> Any:
        return Replay(gm, garbage_collect_values=True).run(*args)

    # Not `functionalize` around the joint function itself: requires_grad_ is refused inside the transform.
    with torch.no_grad():
        return record(functionalize(replay, remove="mutations"), inputs, mode, {}, on_node)


def node_of(t: Tensor) -> fx.Node | None:
    """The node that computed `t` in the recording under way; None for constants, or outside a recording."""
    proxy_mode = get_proxy_mode()
    if proxy_mode is None:
        return None
    if torch._is_functional_tensor(t):
        torch._sync(t)
        t = torch._from_functional_tensor(t)
    slot = proxy_mode.tracer.tensor_tracker.get(t)
    return None if slot is None else slot.proxy.node


def recorded_constant(target: str) -> Tensor:
    """The real tensor that the recording under way holds as a constant."""
    proxy_mode = get_proxy_mode()
    assert proxy_mode is not None
    return cast("Tensor", getattr(proxy_mode.tracer.root, target))


@contextmanager
def untraced() -> Generator[None]:
    """Compute with real tensors in the middle of a recording: no mode sees it, and no gradient is kept."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch._C._AutoDispatchBelowAutograd():
        yield


class Recorded:
    """The tensors of recordings: those that something still holds."""

    def __init__(self) -> None:
        self._tensors: list[weakref.ref[Tensor]] = []
        self._tracked: Any = ()

    def begin(self) -> None:
        proxy_mode = get_proxy_mode()
        assert proxy_mode is not None, "nothing is being recorded"
        self._tracked = proxy_mode.tracer.tensor_tracker  # holds its keys weakly, and by its values the graph

    def end(self) -> None:
        self._tensors += [weakref.ref(t) for t in self._tracked]
        self._tracked = ()

    def held(self, but: Sequence[Tensor]) -> list[Tensor]:
        """Those that are still held, but for some. Collects garbage only if there are any: first among young objects,
        as all are that a compile makes (`shardc.ir.gc_pause`), then among a process's millions."""
        known = {id(t) for t in but}
        for generation in (0, 2):
            if any(id(t) not in known for t in self.tensors()):
                gc.collect(generation)
        return [t for t in self.tensors() if id(t) not in known]

    def tensors(self) -> list[Tensor]:
        return [t for reference in self._tensors if (t := reference()) is not None]


def builtin_of(op: OpOverload) -> Callable[..., Any]:
    """An op's C function, without the Python method that calls it."""
    return op._op


def is_mutable(op: OpOverload) -> bool:
    """Does an op write to one of its arguments?"""
    return op._schema.is_mutable


def mutates(node: fx.Node) -> bool:
    """Does a call write to one of its arguments?"""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def changes_shapes(node: fx.Node) -> bool:
    """Does a call give one of its arguments another shape, as `unsqueeze_` does?"""
    return isinstance(node.target, OpOverload) and torch.Tag.inplace_view in node.target.tags


def written_by(node: fx.Node) -> list[fx.Node]:
    """The arguments that a call writes to; those in a list too."""
    if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
        return []
    written: list[fx.Node] = []
    for place, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            fx.map_arg(value, written.append)
    return written


def shares_memory(node: fx.Node) -> bool:
    """Is what a call returns its first argument, or a view of it?"""
    if not isinstance(node.target, OpOverload):
        return node.target is operator.getitem
    arguments, results = node.target._schema.arguments, node.target._schema.returns
    return bool(arguments and results and arguments[0].alias_info and results[0].alias_info)


@contextmanager
def _node_hook(on_node: Callable[[fx.Node], None]) -> Generator[None]:
    """Call `on_node` for every node as it is made, deep inside the op that made it.

    make_fx can record stacks and module paths itself, at more than twice the cost of the rest of a trace.
    """
    original = PythonKeyTracer.create_node

    def create_node(self: PythonKeyTracer, *args: Any, **kwargs: Any) -> fx.Node:
        node = original(self, *args, **kwargs)
        on_node(node)
        return node

    PythonKeyTracer.create_node = create_node
    try:
        yield
    finally:
        PythonKeyTracer.create_node = original


@contextmanager
def _no_tensor_meta() -> Generator[None]:
    """make_fx describes each value twice: as a fake tensor, `val`, and as `tensor_meta`, for a twentieth of a trace.
    Nothing here reads the second."""
    module: Any = proxy_tensor
    original = module._extract_tensor_metadata
    module._extract_tensor_metadata = lambda _: None
    try:
        yield
    finally:
        module._extract_tensor_metadata = original


@contextmanager
def _shared_descriptions() -> Generator[None]:
    """make_fx describes each value by a fake tensor of its own, `val`, for a tenth of a trace. Nothing here writes to
    one, or asks what memory it lies in: values of one geometry share one. A value that is more than its geometry (a
    subclass's, a view of conjugates, one that a real tensor stands behind) is described as torch does."""
    module: Any = proxy_tensor
    original = module.snapshot_fake
    known: dict[object, Any] = {}

    def snapshot(value: Any, *args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            if (
                type(value) is not FakeTensor
                or value.real_tensor is not None
                or value.layout != torch.strided
                or value.is_complex()
                or value.is_neg()
            ):
                return original(value, *args, **kwargs)
            key = id(value.fake_mode), value.shape, value.stride(), value.storage_offset(), value.dtype, value.device
            found = known.get(key)
            if found is None:
                found = known[key] = original(value, *args, **kwargs)
            return found

    module.snapshot_fake = snapshot
    try:
        yield
    finally:
        module.snapshot_fake = original


@contextmanager
def _remembered_calls(mode: FakeTensorMode, on_node: Callable[[fx.Node], None]) -> Generator[None]:
    """Record a call without torch's machinery where an equal one has been recorded.

    Equal are calls of one op with the same constants and with tensors of the same geometry, dtype and device: what they
    make has one geometry, which the first call, recorded by torch, has told. Torch's own cache of such results is read
    below the proxies and takes longer than making the node. Whatever is more than that is torch's: ops that write,
    draw, read values, are decomposed, or are neither ATen's nor ours; tensors that are constants, complex, or of
    another class.
    """
    memory = _CallMemory(mode, on_node)
    original = ProxyTorchDispatchMode.__torch_dispatch__

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return torch.device("meta") if args[0].fake_mode.in_kernel_invocation else args[0].fake_device
        if func in memory.refused or not memory.serves(self, func):
            return original(self, func, types, args, kwargs)
        with torch._C.DisableTorchFunction():
            arguments: list[Any] = []
            try:
                key = memory.key(func, args, kwargs, arguments)
                known = memory.results.get(key)
            except (_UnlikeError, TypeError):  # TypeError: what has no hash
                key = known = None
            if known is not None:
                return memory.recorded(func, args, kwargs or {}, arguments, known)
        if key is None or key in memory.results:
            return original(self, func, types, args, kwargs)
        graph = self.tracer.graph
        last = graph._root._prev
        result = original(self, func, types, args, kwargs)
        with torch._C.DisableTorchFunction():
            memory.results[key] = memory.learnt(func, arguments, result, last)
        return result

    ProxyTorchDispatchMode.__torch_dispatch__ = dispatch  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        ProxyTorchDispatchMode.__torch_dispatch__ = original  # type: ignore[method-assign]


_DEVICE = torch.ops.prim.device.default
_UNLIKE_TAGS = frozenset(
    tag
    for name in ("data_dependent_output", "dynamic_output_shape", "nondeterministic_seeded", "inplace_view")
    if (tag := getattr(torch.Tag, name, None)) is not None
)
_PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))


def _as_node(value: Any, proxies: Iterator[Any]) -> Any:
    """An argument with nodes for its tensors, which `proxies` yields in order. One function inside of another, that
    calls itself, would be a cycle that holds them."""
    kind = type(value)
    if kind is FakeTensor:
        return next(proxies)[1].node
    return kind([_as_node(v, proxies) for v in value]) if kind is list or kind is tuple else value


def _decomposed_by(proxies: Any) -> Mapping[Any, Any]:
    """The ops that a recording takes apart: its mode's, or before torch 2.12 the module's."""
    own = getattr(proxies, "decomposition_table", None)
    return getattr(proxy_tensor, "CURRENT_DECOMPOSITION_TABLE", {}) if own is None else own


class _UnlikeError(Exception):
    """A call has an argument by which no other call is known."""


class _Made(NamedTuple):
    """A result: its geometry, which of the tensors among the call's arguments it is a view of (None: of none), and what
    a fake tensor of it has as attributes, and a node of it as `val`."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    view_of: int | None
    described: Any
    attributes: dict[str, Any]


class _Results(NamedTuple):
    """What a call makes: one tensor, or a list or tuple of them."""

    kind: type[list[Any]] | type[tuple[Any, ...]] | None
    made: tuple[_Made, ...]


class _CallMemory:
    """What calls of ops made, in one recording, by op, constants and geometries."""

    def __init__(self, mode: FakeTensorMode, on_node: Callable[[fx.Node], None]) -> None:
        self.mode = mode
        self.on_node = on_node
        self.tracer: Any = None
        self.tracked: Any = None
        self.admitted: dict[Any, str] = {}  # ops whose calls are remembered, and what nodes of theirs are called
        self.refused: set[Any] = set()
        self.results: dict[Any, _Results | None] = {}

    def serves(self, proxies: Any, op: Any) -> bool:
        """Is the op one whose calls may be remembered, and this the recording that they are of?"""
        if self.tracer is None:
            self.tracer, self.tracked = proxies.tracer, proxies.tracer.tensor_tracker
        if proxies.tracer is not self.tracer or torch.is_inference_mode_enabled():
            return False
        if op not in self.admitted:
            if (
                not isinstance(op, OpOverload)
                or op.namespace not in ("aten", "prims", "shardc")
                or op._schema.is_mutable
                or op.name().startswith(("aten::lift", "aten::as_strided"))
                or not _UNLIKE_TAGS.isdisjoint(op.tags)
            ):
                self.refused.add(op)
                return False
            self.admitted[op] = proxies.tracer.graph._target_to_str(op.overloadpacket.__name__)
        return op not in _decomposed_by(proxies)

    def key(self, op: OpOverload, args: Any, kwargs: Any, tensors: list[Any]) -> Any:
        """By what a call is known; the slots of its tensors go to `tensors`. Raises _UnlikeError, TypeError."""
        parts: list[Any] = [op, torch.get_default_dtype(), torch.is_grad_enabled()]
        self._extend(parts, args, tensors)
        for name, value in kwargs.items() if kwargs else ():
            parts.append(name)
            self._extend(parts, (value,), tensors)
        if not tensors:
            raise _UnlikeError
        return tuple(parts)

    def _extend(self, parts: list[Any], values: Any, tensors: list[Any]) -> None:
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                slot = self.tracked.get(value)
                if slot is None or slot.constant is not None or not self._is_plain(value) or value.is_inference():
                    raise _UnlikeError
                geometry = value.shape, value.stride(), value.storage_offset()
                parts.append((*geometry, value.dtype, value.fake_device, value.requires_grad))
                tensors.append((value, slot.proxy))
            elif kind in _PLAIN:
                parts += (kind, value)
            elif kind is list or kind is tuple:
                parts += (kind, len(value))
                self._extend(parts, value, tensors)
            else:
                raise _UnlikeError

    def _is_plain(self, t: FakeTensor) -> bool:
        """Is a tensor of the recording's mode known by its geometry, dtype and device?"""
        return (
            t.fake_mode is self.mode
            and t.constant is None
            and t.real_tensor is None
            and t.layout is torch.strided
            and not (t.is_complex() or t.is_neg() or t._is_zerotensor())
        )

    def learnt(self, op: OpOverload, tensors: list[Any], result: Any, last: fx.Node) -> _Results | None:
        """What a call made that torch has recorded behind the node `last`; None where another could not be known by it.

        It must have added one node of this op, and one for each of its results if these are several.
        """
        kind = type(result) if type(result) in (tuple, list) else None
        results = [result] if kind is None else list(result)
        nodes: list[fx.Node] = []
        node = last._next
        while node is not node.graph._root:
            nodes.append(node)
            node = node._next
        if [node.target for node in nodes] != [op, *([operator.getitem] * len(results) if kind else [])]:
            return None
        if not all(type(t) is FakeTensor and self._is_plain(t) and not t.requires_grad for t in results):
            return None
        storages = [t.untyped_storage()._cdata for t, _ in tensors]
        own = [t.untyped_storage()._cdata for t in results]
        if len(set(own)) < len(own) or (kind and not set(own).isdisjoint(storages)):
            return None
        made: list[_Made] = []
        for t, node, storage in zip(results, nodes[1:] if kind else nodes, own, strict=True):
            slot = self.tracked.get(t)
            if slot is None or slot.constant is not None or slot.proxy.node is not node or storages.count(storage) > 1:
                return None
            view_of = storages.index(storage) if storage in storages else None
            if view_of is not None and t is tensors[view_of][0]:
                return None
            geometry = tuple(t.shape), t.stride(), t.storage_offset()
            one = _Made(*geometry, t.dtype, t.fake_device, view_of, node.meta["val"], {})
            twin = FakeTensor(self.mode, self._geometry(one, tensors), one.device)
            one.attributes.update(twin.__dict__)
            same_keys = torch._C._dispatch_key_set(twin) == torch._C._dispatch_key_set(t)
            if not same_keys or twin.untyped_storage().nbytes() != t.untyped_storage().nbytes():
                return None
            made.append(one)
        return _Results(kind, tuple(made))

    def _geometry(self, made: _Made, tensors: list[Any]) -> Tensor:
        """A result on the meta device, as the mode's own cache makes one that it knows."""
        with torch._C._DisableTorchDispatch():
            empty = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta")
            if made.view_of is not None:
                empty.set_(tensors[made.view_of][0].untyped_storage(), made.offset, made.shape, made.stride)
        return empty

    def recorded(self, op: OpOverload, args: Any, kwargs: Any, tensors: list[Any], known: _Results) -> Any:
        """Record a call, and return what it makes."""
        proxies = iter(tensors)
        read = tuple(_as_node(value, proxies) for value in args)
        node = self._node(op, self.admitted[op], read, {k: _as_node(v, proxies) for k, v in kwargs.items()})
        if known.kind is None:
            return self._tracked(node, known.made[0], tensors)
        node.meta["val"] = known.kind([made.described for made in known.made])
        results: list[Tensor] = []
        for place, made in enumerate(known.made):
            element = self._node(operator.getitem, "getitem", (node, place), {})
            results.append(self._tracked(element, made, tensors))
        return known.kind(results)

    def _node(self, target: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        graph = self.tracer.graph
        name = graph._graph_namespace.create_name(name, None)
        node = _add_named(graph, name, "call_function", target, args, kwargs)
        self.on_node(node)
        return node

    def _tracked(self, node: fx.Node, made: _Made, tensors: list[Any]) -> Tensor:
        """A result of a node. `FakeTensor(...)` would set each attribute anew, in four times as long."""
        node.meta["val"] = made.described
        make: Any = Tensor._make_subclass  # type: ignore[attr-defined]
        elem = self._geometry(made, tensors)
        result: Any = make(FakeTensor, elem, False, dispatch_device=True, device_for_backend_keys=made.device)
        if not self.mode._allow_unsafe_data_ptr_access:
            torch._C._set_throw_on_mutable_data_ptr(result)
        else:
            torch._C._set_warn_deprecated_on_mutable_data_ptr(result)
        result.__dict__.update(made.attributes)
        self.tracked[result] = proxy_tensor._ProxyTensor(self.tracer.proxy(node), None)
        return result


@contextmanager
def _plain_rnns() -> Generator[None]:
    """LSTM, GRU and RNN as the ops that they are made of, with the dropout between their layers.

    mkldnn's fused LSTM is of the CPU and of float32 alone; the public `mkldnn.flags` would set the precision of its
    products besides. torch's own decompositions run all layers in one go and forget the dropout (`num_layers < i - 1`,
    up to 2.13): here they run one layer at a time.
    """
    import torch._decomp.decompositions as table

    all_layers: Callable[..., tuple[Tensor, list[Any]]] = table._rnn_helper

    def layer_by_layer(
        x: Tensor, hidden: Sequence[Any], params: Sequence[Any], has_biases: bool, num_layers: int, dropout: float,
        train: bool, bidirectional: bool, batch_first: bool, layer_fn: Callable[..., Any],
    ) -> tuple[Tensor, list[Any]]:  # fmt: skip
        directions = 2 if bidirectional else 1
        last: list[Any] = []
        x = x.transpose(0, 1) if batch_first else x
        for first in range(0, num_layers * directions, directions):
            if first and train and dropout:
                x = torch.dropout(x, dropout, True)
            own = slice(first, first + directions)
            x, ends = all_layers(x, hidden[own], params[own], has_biases, 1, 0.0, train, bidirectional, False, layer_fn)
            last += ends
        return x.transpose(0, 1) if batch_first else x, last

    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    table._rnn_helper = layer_by_layer
    try:
        yield
    finally:
        table._rnn_helper = all_layers
        torch._C._set_mkldnn_enabled(enabled)


@contextmanager
def _quiet_stacks() -> Generator[None]:
    config: Any = torch.fx.config
    saved = getattr(config, "do_not_emit_stack_traces", None)
    if saved is None:  # before torch 2.12 there were none to emit
        yield
        return
    config.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        config.do_not_emit_stack_traces = saved


def decompositions(names: Iterable[str]) -> dict[OpOverload, Callable[..., Any]]:
    """torch's own decompositions of the ATen ops of these names."""
    table = get_decompositions([getattr(torch.ops.aten, name) for name in names])
    return {op: how for op, how in table.items() if isinstance(op, OpOverload)}


def like_ops(name: str) -> list[OpOverload]:
    """`rand_like`, `randn_like`: the overload without a generator, and that with one, which younger torches have."""
    packet = getattr(torch.ops.aten, name)
    return [getattr(packet, overload) for overload in ("default", "generator") if overload in packet.overloads()]


class _Unseeded:
    """Torch's own generator, but for its seed."""

    def __init__(self, set_seed: Callable[..., Any], read_seed: Callable[[], Any]) -> None:
        self.manual_seed = self.seed = set_seed
        self.initial_seed = read_seed

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.default_generator, name)


@contextmanager
def seeding(set_seed: Callable[..., Any], read_seed: Callable[[], Any]) -> Generator[None]:
    """Call these where torch's functions set or read the seed of its generator. What these functions work on is
    replaced, and not they: dynamo, which an op of forward may be the first to import, makes a table of torch's."""
    original = torch.random.default_generator
    torch.random.default_generator = _Unseeded(set_seed, read_seed)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.random.default_generator = original


# ------------------------------------------------------------------ dispatcher
@contextmanager
def override_aten(implementations: Mapping[str, Callable[..., Any]]) -> Generator[None]:
    """Replace composite ATen ops above autograd, for C++ callers too (a TorchFunctionMode misses those)."""

    def flush() -> None:  # the Python dispatcher remembers which kernel an op resolved to
        for name in implementations:
            getattr(torch.ops.aten, name).default._dispatch_cache.clear()

    library = torch.library.Library("aten", "IMPL")
    for name, implementation in implementations.items():
        library.impl(name, implementation, "AutogradCPU")
    flush()
    try:
        yield
    finally:
        library._destroy()
        flush()


# ------------------------------------------------------------------ the model's own tensors
def tensors_by_node() -> dict[fx.Node, Tensor]:
    """The tensors of the recording under way that something still holds, by the node that computed each."""
    proxy_mode = get_proxy_mode()
    tracked: list[Tensor] = [] if proxy_mode is None else list(proxy_mode.tracer.tensor_tracker)
    return {node: t for t in tracked if (node := node_of(t)) is not None}


def storage_of(t: Tensor) -> int | None:
    """The identity of the memory that a tensor lies in, on meta too; None where it has no storage (sparse tensors)."""
    try:
        return t.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


@contextmanager
def swapped(entries: Sequence[tuple[nn.Module, str, str, Tensor]]) -> Generator[None]:
    """Let modules hold other tensors: `(module, "_parameters" or "_buffers", key, tensor)` each.

    `functional_call` ends its swap when forward returns; backward may run forward again (activation checkpointing).
    Afterwards every entry is what it was, whatever forward assigned to it.
    """
    original = [(getattr(module, kind), key, getattr(module, kind)[key]) for module, kind, key, _ in entries]
    for module, kind, key, tensor in entries:
        getattr(module, kind)[key] = tensor
    try:
        yield
    finally:
        for holder, key, tensor in original:
            holder[key] = tensor


@contextmanager
def checkpoints_ended() -> Generator[None]:
    """End the activation checkpoints that an exception leaves, in a context or a decorated function.

    Before torch 2.13, `checkpoint` that its function's exception leaves stays suspended, as long as the exception or a
    cycle holds its frame. Its hooks are in force until then, and pack what anybody saves for backward.
    """
    try:
        yield
    except BaseException as problem:
        for suspended in reversed(list(_suspended_checkpoints(problem))):
            suspended.close()
        raise


def _suspended_checkpoints(problem: BaseException) -> Iterator[GeneratorType[Any, Any, Any]]:
    """The generators in the frames of `checkpoint` that an exception, or what led to it, went through; outer first."""
    chain: dict[int, BaseException] = {}
    todo = [problem]
    while todo:
        one = todo.pop()
        if id(one) not in chain:
            chain[id(one)] = one
            todo += [other for other in (one.__cause__, one.__context__) if other is not None]
    for one in chain.values():
        for frame, _ in walk_tb(one.__traceback__):
            if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
                yield from (local for local in frame.f_locals.values() if isinstance(local, GeneratorType))


def held(module: nn.Module, kind: str, key: str) -> Tensor | None:
    """What a module holds under a name now; `kind` is "_parameters" or "_buffers"."""
    return getattr(module, kind).get(key)


def unobserved() -> AbstractContextManager[object]:
    """A context in which no mode sees what is asked of tensors."""
    return torch._C.DisableTorchFunction()


def version_of(t: Tensor) -> int:
    """How often a tensor was changed in place; a view's count is that of its base. 0 for one that keeps no count."""
    return 0 if t.is_inference() else t._version


def was_written(t: Tensor) -> bool:
    """Was a tensor, made for a trace, changed in place since?"""
    return version_of(t) > 0


def is_read(t: Tensor) -> bool:
    """Does anything that was recorded so far read this input?"""
    node = node_of(t)
    return node is not None and bool(node.users)


def mark_parameter(t: Tensor) -> None:
    """Let `isinstance(t, nn.Parameter)` be true of a traced tensor that stands for a parameter."""
    t._is_param = True  # type: ignore[attr-defined]


class _NoGradient(TorchFunctionMode):
    def __init__(self, refuse: Callable[[], Exception]) -> None:
        self._refuse = refuse

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == cast(Any, torch.Tensor).grad.__get__:
            raise self._refuse()
        return func(*args, **(kwargs or {}))


def without_gradients(refuse: Callable[[], Exception]) -> TorchFunctionMode:
    """A mode under which nobody reads a `.grad`."""
    return _NoGradient(refuse)


@contextmanager
def converting(converted: Callable[[str, str, Tensor, Tensor], None]) -> Generator[None]:
    """While a model is traced, `module.to(...)` in forward converts nothing: `converted` is told of each tensor what it
    is called, `to` or `half`, and what it would become. torch would put traced tensors in the place of each other."""
    original = nn.Module._apply

    def apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        with torch.no_grad():
            for name, t in (*self.named_parameters(recurse=recurse), *self.named_buffers(recurse=recurse)):
                converted(type(self).__name__, name, t, fn(t))
        return self

    nn.Module._apply = apply
    try:
        yield
    finally:
        nn.Module._apply = original


def without_device(function: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Arguments that name a GPU, naming the CPU: traced tensors lie there, and a program is for no device."""

    if "device" in kwargs:
        kwargs = {**kwargs, "device": _on_cpu(kwargs["device"])}
    if function is Tensor.to and len(args) > 1:
        args = (args[0], _on_cpu(args[1]), *args[2:])
    return args, kwargs


def _on_cpu(value: Any) -> Any:
    gpu = isinstance(value, torch.device | str) and str(value).partition(":")[0] in ("cuda", "xpu", "mps")
    return torch.device("cpu") if gpu else value


_T: Any = Tensor
_GEOMETRY: frozenset[Any] = frozenset(  # what torch itself asks of each tensor, many times over
    [getattr(Tensor, name).__get__ for name in ("shape", "layout", "dtype", "device", "ndim", "requires_grad")]
    + [_T.is_quantized.__get__, Tensor.stride, Tensor.numel, Tensor.storage_offset, Tensor.dim]
)


# Functions that return no tensor, and say of one no more than its geometry, dtype and device; and one that changes what
# `surroundings` tells.
DESCRIBING: frozenset[Any] = _GEOMETRY.union(
    [getattr(_T, name).__get__ for name in ("is_cpu", "is_cuda", "is_meta", "is_sparse", "is_nested", "is_mkldnn")]
    + [_T.itemsize.__get__, _T.nbytes.__get__, _T.size, _T.ndimension, _T.nelement, _T.element_size, _T.__len__]
    + [_T.is_contiguous, _T.is_floating_point, _T.is_complex, _T.is_signed, _T.get_device]
    + [torch.is_floating_point, torch.is_complex, torch.numel]
    + [torch._C._set_grad_enabled, torch.device]  # before 2.12 torch tells modes of the second
)


_autocasts: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def surroundings() -> tuple[object, ...] | None:
    """What a call of torch depends on beside its arguments. None where autograd's saved tensors are packed, as within
    `torch.utils.checkpoint`."""
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:  # pyright: ignore[reportAttributeAccessIssue]
        return None
    always = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
    )
    if not _autocasts():  # each of the questions below takes as long as all of those above
        return always
    return (
        *always,
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
    )


@contextmanager
def settings_kept() -> Generator[None]:
    """An error leaves torch's settings as they were: forward may have been about to set them back."""
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    kinds = ("cpu", "cuda")
    autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    try:
        yield
    except BaseException:
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)
        torch.use_deterministic_algorithms(deterministic, warn_only=warns)
        for kind, enabled, of_kind in autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, of_kind)
        raise


def modes() -> int:
    """How many modes and transforms (`TorchDispatchMode`, `vmap`) see what a call of torch dispatches."""
    transforms = torch._C._functorch.get_interpreter_stack() or []  # pyright: ignore[reportAttributeAccessIssue]
    return torch._C._len_torch_dispatch_stack() + len(transforms)


class Geometry(NamedTuple):
    """All that is known of a tensor of a recording but what computed it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, t: Tensor) -> Geometry | None:
        """None for a tensor that is more than that, or of no recording."""
        with torch._C.DisableTorchFunction():
            plain = (
                type(t) is FakeTensor
                and t.constant is None
                and t.real_tensor is None
                and t.layout is torch.strided
                and not (t.is_complex() or t.is_neg() or t._is_zerotensor() or t.is_inference())
            )
            if not plain:
                return None
            fake: Any = t
            return cls(tuple(t.shape), t.stride(), fake.storage_offset(), t.dtype, fake.fake_device, t.requires_grad)


class Imitations:
    """Tensors that look like those of a recording, and that it knows nothing of."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._known: dict[Geometry, tuple[Tensor, dict[str, Any]]] = {}
        self._made: list[weakref.ref[Tensor]] = []

    def make(self, of: Geometry) -> Tensor:
        known = self._known.get(of)
        if known is None:
            with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
                last = sum((size - 1) * step for size, step in zip(of.shape, of.stride, strict=True))
                memory = torch.empty(of.offset + max(last + 1, 0), dtype=of.dtype, device="meta")
                elem = memory.as_strided(of.shape, of.stride, of.offset)
                twin = FakeTensor(self._mode, elem, of.device)
            known = self._known[of] = elem, {**twin.__dict__, "imitation": True}
        elem, attributes = known
        make: Any = Tensor._make_subclass  # type: ignore[attr-defined]
        t: Any = make(FakeTensor, elem, of.requires_grad, dispatch_device=True, device_for_backend_keys=of.device)
        t.__dict__.update(attributes)
        self._made.append(weakref.ref(t))
        return t

    def held(self) -> bool:
        """Does anybody still hold one?"""
        if any(made() is not None for made in self._made):
            gc.collect(0)
        return any(made() is not None for made in self._made)


def is_imitation(t: Tensor) -> bool:
    return type(t) is FakeTensor and "imitation" in t.__dict__


class Answers(Protocol):
    """`answer` gives what a function that wants a tensor's values returns, or its own token `refused`; `instead` what
    is computed in place of a call, or `refused` where it is to run."""

    refused: object

    def instead(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any: ...
    def observe(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None: ...
    def answer(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any: ...


@contextmanager
def substituting(
    stand_in: Callable[[Tensor], Tensor | None],
    asked: list[Exception],
    assigned: Callable[[Tensor], None],
    answers: Answers,
) -> Generator[None]:
    """Replace tensors among the arguments of torch functions and of `autograd.Function.apply`, as `stand_in` says.

    A mode sees every torch function that Python calls; `Function.apply` is none of them. Those that want a tensor's
    values get them from `answers`; to `asked` go the errors of those that are refused, which the caller of the function
    may catch; `assigned` is told of each tensor whose `.data` is set.
    """

    def replaced(value: Any) -> Any:
        if isinstance(value, Tensor):
            new = stand_in(value)
            return value if new is None else new
        if type(value) in (list, tuple) and value:
            return type(value)(replaced(item) for item in value)
        return value

    assigns = cast(Any, torch.Tensor).data.__set__

    class Substitute(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if len(args) == 1 and not kwargs and type(args[0]) is FakeTensor and func in _GEOMETRY:
                return func(args[0])
            named: dict[str, Any] = {key: replaced(value) for key, value in kwargs.items()} if kwargs else {}
            if func == assigns:
                assigned(args[0])
            args, named = without_device(func, replaced(args), named)
            if func is Tensor.cuda:
                return args[0]
            if (result := answers.instead(func, args, named)) is not answers.refused:
                return result
            try:
                result = func(*args, **named)
            except Exception as problem:
                if not is_data_dependent(problem):
                    raise
                answer = answers.answer(func, args, named)
                if answer is answers.refused:
                    asked.append(problem)
                    raise
                return answer
            answers.observe(func, args, named, result)
            return result

    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        answers.instead(cls, args, kwargs)  # which is told of it; it stands for none of them
        return original.__get__(None, cls)(*replaced(args), **kwargs)

    # `autograd.grad` and `backward` are torch functions themselves, within which the mode is off; checkpoints and hooks
    # run the model's code there.
    engine = torch.autograd._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        with Substitute():
            return engine(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign]
    torch.autograd._engine_run_backward = run_backward
    try:
        with Substitute():
            yield
    finally:
        torch.autograd.Function.apply = original
        torch.autograd._engine_run_backward = engine


# ------------------------------------------------------------------ autograd
def gradient_hooks(p: Tensor) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """A leaf's hooks: those of `register_hook`, and those of `register_post_accumulate_grad_hook`."""
    before: dict[int, Any] = getattr(p, "_backward_hooks", None) or {}
    after: dict[int, Any] = getattr(p, "_post_accumulate_grad_hooks", None) or {}
    return list(before.values()), list(after.values())


def runs_python(root: Any, own: str) -> bool:
    """Is the backward of a custom `autograd.Function` reached from `root`, other than one of the package `own`?"""
    seen: set[Any] = set()
    todo = [root]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo.extend(parent for parent, _ in node.next_functions)
        function = getattr(node, "_forward_cls", None)
        if function is not None and (function.__module__ or "").partition(".")[0] != own:
            return True
    return False


@contextmanager
def undifferentiable(ops: Iterable[OpOverload], refuse: Callable[[OpOverload], Exception]) -> Generator[None]:
    """Raise where autograd would have to differentiate one of these ops, which have no formula at the dispatcher.

    Without this, autograd takes the result of such an op for a constant, and the gradient is lost without a word.
    """
    named = {op.name().partition("::")[2]: op for op in ops}
    library = torch.library.Library("shardc", "IMPL")

    def guard(op: OpOverload) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            values = (*args, *kwargs.values())
            leaves = (leaf for value in values for leaf in (value if isinstance(value, (list, tuple)) else [value]))
            tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor))
            if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
                raise refuse(op)
            with torch._C._AutoDispatchBelowAutograd():
                return op(*args, **kwargs)

        return run

    for name, op in named.items():
        library.impl(name, guard(op), "AutogradCPU")
    try:
        yield
    finally:
        library._destroy()
        for op in named.values():
            op._dispatch_cache.clear()


def sequence_number() -> int:
    """The number of the autograd node made last: what a forward op and its backward have in common."""
    return torch._C._autograd._get_sequence_nr() - 1  # pyright: ignore[reportAttributeAccessIssue]


def on_backward(root: Any, before: Callable[[int], None], after: Callable[[], None]) -> None:
    """Call `before(sequence number)` and `after()` around the execution of every autograd node under `root`."""
    seen: set[Any] = set()
    todo = [root]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo.extend(parent for parent, _ in node.next_functions)
        number = node._sequence_nr()

        def pre(_: Any, number: int = number) -> None:
            before(number)

        def post(_grad_inputs: Any, _grad_outputs: Any) -> None:
            after()

        node.register_prehook(pre)
        node.register_hook(post)


# ------------------------------------------------------------------ optimizers
def record_in_place(fn: Callable[..., Any], inputs: Sequence[Tensor], mode: FakeTensorMode) -> fx.GraphModule:
    """Record a function that changes its inputs in place, without the mutation; what it changed it must return."""
    with torch.no_grad():
        gm = record(functionalize(fn, remove="mutations"), inputs, mode, {}, lambda _: None)
    for node in reversed(list(gm.graph.nodes)):
        target: Any = node.target
        # What is left of the mutation is written back at the end; and steps announce themselves to the profiler.
        written_back = target is torch.ops.aten.copy_.default
        if node.op == "call_function" and (written_back or getattr(target, "namespace", "") == "profiler"):
            gm.graph.erase_node(node)
    return gm


def count_optimizer_step(optimizer: torch.optim.Optimizer) -> None:
    """Tell schedulers that the optimizer stepped: its step ran in a graph, and they warn of an order that is right."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def step_hooks(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """What runs before or after the optimizer's step, or in its place: hooks, its own and all optimizers', and a `step`
    that was put into the instance, other than that by which schedulers count."""
    found: list[Callable[..., Any]] = []
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        found += optimizer.__dict__.get(name, {}).values()
    for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
        found += getattr(sys.modules[torch.optim.Optimizer.__module__], name, {}).values()
    patched = optimizer.__dict__.get("step")
    if patched is not None and not hasattr(patched, "_wrapped_by_lr_sched"):
        found.append(patched)
    return found


def bare_optimizer(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], state: Mapping[Tensor, dict[str, Any]]
) -> tuple[torch.optim.Optimizer, Callable[[], Any]]:
    """The same optimizer with one group and a state of its own, and its step: no hooks, scheduler or profiler in it."""
    bare = object.__new__(type(optimizer))  # not copy.copy, which goes through pickling and loses attributes
    bare.__dict__.update(optimizer.__dict__)
    bare.__dict__.pop("step", None)  # lr_scheduler puts a counting one into the instance
    bare.param_groups = [dict(group)]
    bare.state = defaultdict(dict, state)
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        bare.__dict__[hooks] = OrderedDict()
    step: Any = type(bare).step
    if hasattr(step, "hooked"):
        step = step.__wrapped__
    return bare, lambda: step(bare)


@contextmanager
def compiling() -> Generator[None]:
    """Say that a compiler is at work, for which torch's `capturable` optimizers take tensors on the CPU, fakes too."""
    original = torch.compiler.is_compiling
    torch.compiler.is_compiling = lambda: True
    try:
        yield
    finally:
        torch.compiler.is_compiling = original


# ------------------------------------------------------------------ trees of tensors
Structure = pytree.TreeSpec


def flatten(tree: Any) -> tuple[list[Any], Structure]:
    return pytree.tree_flatten(tree)


def unflatten(leaves: Iterable[Any], structure: Structure) -> Any:
    return pytree.tree_unflatten(leaves, structure)


def flatten_with_paths(tree: Any) -> list[tuple[str, Any]]:
    """("x.0.key", leaf) for every leaf. Hugging Face's outputs and caches count as trees, as they do in torch. Children
    of a kind that was registered without keys go by their places."""

    def text(key: Any) -> str:
        for attribute in ("key", "idx", "name"):
            if hasattr(key, attribute):
                return str(getattr(key, attribute))
        return str(key)

    def leaves(path: str, tree: Any) -> Iterator[tuple[str, Any]]:
        kind = pytree.SUPPORTED_NODES.get(pytree._get_node_type(tree))
        if kind is None:
            yield path, tree
            return
        with_keys = kind.flatten_with_keys_fn
        children = enumerate(kind.flatten_fn(tree)[0]) if with_keys is None else with_keys(tree)[0]
        for key, child in children:
            yield from leaves(f"{path}.{text(key)}" if path else text(key), child)

    return list(leaves("", tree))


# ------------------------------------------------------------------ errors
def is_default_generator(generator: torch.Generator) -> bool:
    """Is it torch's own of the CPU? Dispatch hands on another Python object of the same generator."""
    return generator._cdata == torch.default_generator._cdata  # type: ignore[attr-defined]


def is_control_flow(error: BaseException) -> bool:
    """Did the model call cond, while_loop, scan or map? torch captures their functions with its compiler, and cannot
    while it traces for us."""
    return type(error).__name__ == "UncapturedHigherOrderOpError"


def stops_recomputation(error: BaseException) -> bool:
    """Whether a checkpoint raised it where it has all that it wanted of the forward that it runs again."""
    return type(error).__name__ == "_StopRecomputationError"


def is_data_dependent(error: BaseException) -> bool:
    """Did the model ask a fake tensor for its values, or for a shape that depends on values?"""
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return True
    text = str(error)
    if "() is not supported for tensor subclasses" in text or "its data is not allocated yet" in text:
        return True
    return "_local_scalar_dense" in text or "get value out of a tracing tensor" in text or "data-dependent" in text


# ------------------------------------------------------------------ Hugging Face
@contextmanager
def hugging_face_patches(modules: Iterable[nn.Module]) -> Generator[None]:
    """What keeps transformers' models from taking their slow path when they see fakes. No import if there is none.

    A training step has no use for a key-value cache.
    """
    configs: dict[int, Any] = {}
    for module in modules:
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True:
            configs[id(config)] = config
    dynamo: Any = sys.modules.get("torch._dynamo.config")
    nested = getattr(dynamo, "error_on_nested_fx_trace", None)
    for config in configs.values():
        config.use_cache = False
    if nested is not None:  # a torch.compile inside the model runs uncompiled
        dynamo.error_on_nested_fx_trace = False
    try:
        yield
    finally:
        for config in configs.values():
            config.use_cache = True
        if nested is not None:
            dynamo.error_on_nested_fx_trace = nested


@contextmanager
def unvalidated_distributions() -> Generator[None]:
    """torch.distributions do not look at the values of their arguments, which is only a check."""
    distribution = torch.distributions.Distribution
    before = distribution._validate_args
    distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        distribution.set_default_validate_args(before)


# ------------------------------------------------------------------ fused attention
class FusedKernels(NamedTuple):
    """Which of torch's attention kernels take a call on this GPU."""

    cudnn: bool
    flash: bool
    efficient: bool


def fused_kernels(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, gqa: bool) -> FusedKernels:
    """Public; what it decides on is not: `scaled_dot_product_attention` gives no lse to a backward of one's own."""
    cuda = torch.backends.cuda
    call = cuda.SDPAParams(q, k, v, bias, 0.0, causal, gqa)
    can = (cuda.can_use_cudnn_attention, cuda.can_use_flash_attention, cuda.can_use_efficient_attention)
    return FusedKernels(*(takes(call) for takes in can))


def attention_switches() -> tuple[bool, ...]:
    """What the user has switched on of what decides which of these kernels take a call."""
    cuda = torch.backends.cuda
    return (
        cuda.cudnn_sdp_enabled(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        torch.backends.cudnn.enabled,
        torch.are_deterministic_algorithms_enabled(),
    )


def _no_dropout(q: Tensor) -> tuple[Tensor, Tensor]:
    """The random state that backward asks for and, without dropout, does not read."""
    return q.new_empty(2, dtype=torch.int64), q.new_empty((), dtype=torch.int64)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    o, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    return o, lse


def flash_attention_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        g, q, k, v, o, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, *_no_dropout(q), scale=scale
    )


@cache
def flash_attention_on_cpu_takes_groups() -> bool:
    """Does the CPU's kernel take fewer heads of keys and values than of queries? torch chooses it where it does."""
    with _disable_current_modes():
        q, k = (torch.empty(1, heads, 1, 8, device="cpu") for heads in (4, 2))
        chosen = torch._fused_sdp_choice(q, k, k, None, 0.0, False, scale=None, enable_gqa=True)  # pyright: ignore[reportPrivateUsage]
    return chosen == SDPBackend.FLASH_ATTENTION.value


def flash_attention_on_cpu(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def flash_attention_on_cpu_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        g, q, k, v, o, lse, 0.0, causal, scale=scale
    )


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    o, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return o, lse


def cudnn_attention_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        g, q, k, v, o, lse, *_no_dropout(q), None, None, None, q.shape[2], k.shape[2], 0.0, causal, scale=scale
    )


def efficient_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    o, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, causal, scale=scale)
    return o, lse


def efficient_attention_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, o: Tensor, lse: Tensor,
    causal: bool, scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        g, q, k, v, bias, o, lse, *_no_dropout(q), 0.0, [True, True, True, False], causal, scale=scale
    )
    return dq, dk, dv


@contextmanager
def plain_attention() -> Generator[None]:
    """Let torch compute attention in ordinary ops. Its fused kernel on the CPU reads a float32 mask beside a float64
    query as if it were of float64 (up to 2.13), and has no second derivative."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        yield


# ------------------------------------------------------------------ distributed
def all_gather_single(out: Tensor, x: Tensor, group: Any, *, async_op: bool = False) -> Any:
    """One flat all-gather; torch 2.13 renamed it and warns of the old name."""
    import torch.distributed as dist

    old = "all_gather_into_tensor"
    gather = getattr(dist, "all_gather_single" if hasattr(dist, "all_gather_single") else old)
    return gather(out, x, group=group, async_op=async_op)


def reduce_scatter_single(out: Tensor, x: Tensor, op: Any, group: Any, *, async_op: bool = False) -> Any:
    """One flat reduce-scatter; torch 2.13 renamed it and warns of the old name."""
    import torch.distributed as dist

    old = "reduce_scatter_tensor"
    scatter = getattr(dist, "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else old)
    return scatter(out, x, op=op, group=group, async_op=async_op)


def all_gather_pieces(outs: Sequence[Tensor], xs: Sequence[Tensor], group: Any) -> Any:
    """All-gathers of flat pieces, which the group begins together; NCCL runs them as one kernel. Gives torch's handle,
    which waits for all."""
    return group.allgather_into_tensor_coalesced(list(outs), list(xs))


def reduce_scatter_pieces(outs: Sequence[Tensor], xs: Sequence[Tensor], op: Any, group: Any) -> Any:
    """The same of reduce-scatters."""
    import torch.distributed as dist

    options = dist.ReduceScatterOptions()
    options.reduceOp = op
    return group.reduce_scatter_tensor_coalesced(list(outs), list(xs), options)


def all_gather_into(group: Any) -> Callable[[Tensor, Tensor], Any]:
    """`all_gather_single` over one group, whose options are made once: begins it and returns its handle."""
    import torch.distributed as dist

    options: Any = dist.distributed_c10d.AllgatherOptions()
    options.asyncOp = True
    gather: Any = getattr(group, "all_gather_single", None) or group._allgather_base
    return lambda out, x: gather(out, x, options)


def reduce_scatter_into(group: Any, op: Any) -> Callable[[Tensor, Tensor], Any]:
    """`reduce_scatter_single` over one group, whose options are made once."""
    import torch.distributed as dist

    options: Any = dist.distributed_c10d.ReduceScatterOptions()
    options.reduceOp, options.asyncOp = op, True
    scatter: Any = getattr(group, "reduce_scatter_single", None) or group._reduce_scatter_base
    return lambda out, x: scatter(out, x, options)


def reaches_peers(group: Any, device: torch.device) -> bool:
    """Whether the GPUs of an NCCL group reach each other's memory, as torch's decomposed products need it: they are of
    one host, of which this process sees them all."""
    import torch.distributed as dist

    if device.type != "cuda" or dist.get_backend(group) != "nccl":
        return False
    ranks, devices = dist.get_process_group_ranks(group), torch.cuda.device_count()
    a_host = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    if a_host > devices or len({rank // a_host for rank in ranks}) > 1:
        return False
    own = torch.empty(0, device=device).device.index  # also of a device that says none
    return all(torch.cuda.can_device_access_peer(own, other) for other in range(devices) if other != own)


def register_shared_memory(group: Any) -> str:
    """The name of a group by which decomposed products know it. Torch 2.13 registers groups itself, and warns of the
    call that older ones need."""
    import torch.distributed._symmetric_memory as symmetric

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        getattr(symmetric, "enable_symm_mem_for_group")(group.group_name)  # noqa: B009  (pyright knows it as deprecated)
    return group.group_name


def gathered_products(x: Tensor, ws: Sequence[Tensor], dim: int, group: str) -> tuple[Tensor, list[Tensor]]:
    """`x` gathered along a dim over a group, and its products with `ws`, [in, out], in pieces: one is multiplied while
    others are on their way. The call is torch's own, and public nowhere."""
    return torch.ops.symm_mem.fused_all_gather_matmul(x, list(ws), dim, group, return_A=True)


def scattered_product(x: Tensor, w: Tensor, dim: int, group: str) -> Tensor:
    """`x w`, of w as [in, out], added up over a group, of which each rank has its part of a dim, in pieces."""
    return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w, "sum", dim, group)


def all_reduce_over(group: Any, op: Any) -> Callable[[Tensor], Any]:
    """`all_reduce` over one group, whose options are made once."""
    import torch.distributed as dist

    options: Any = dist.distributed_c10d.AllreduceOptions()
    options.reduceOp, options.asyncOp = op, True
    return lambda x: group.allreduce([x], options)


def high_priority(backend: str, timeout: timedelta) -> Any:
    """Options of a process group whose kernels go before compute's that wait for a place on the device: what compute
    waits for does not wait for compute. None where the backend has no such streams."""
    import torch.distributed as dist

    if backend != "nccl" or not hasattr(dist, "ProcessGroupNCCL"):
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout  # else torch warns that it is not the group's
    return options


def copy_all(into: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """Copy each tensor over another, in as few kernels as torch has for it."""
    if into:
        torch._foreach_copy_(list(into), list(given))


def wide_norms(xs: Sequence[Tensor]) -> Sequence[Tensor]:
    """The norm of each tensor in float64, without a copy of it, in as few kernels as torch has for it."""
    return torch._foreach_norm([x.detach() for x in xs], 2, torch.float64)


ADDED_AT_ONCE = 64  # tensors that one kernel of `add_all` takes


def add_all(totals: Sequence[Tensor], terms: Sequence[Tensor]) -> None:
    """Add each tensor to another, in place, in as few kernels as torch has for it."""
    if totals:
        torch._foreach_add_(list(totals), list(terms))


def fused_adamw(
    w: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    step: Tensor,
    lr: Tensor,
    betas: tuple[float, float],
    weight_decay: float,
    eps: float,
) -> None:
    """AdamW on contiguous tensors, in place; `step` counts this one. The kernel has no public name: torch has it behind
    optimizers, and parameters' own `.grad`. On GPUs it reads steps and rates as float32."""
    if w.is_cuda:
        step, lr = step.float(), lr.float()
    torch._fused_adamw_(
        [w], [g], [m], [v], [], [step], lr=lr, beta1=betas[0], beta2=betas[1], weight_decay=weight_decay, eps=eps,
        amsgrad=False, maximize=False,
    )  # fmt: skip


def assert_async(condition: Tensor, message: str) -> None:
    """Assert a truth value where it lies: on a GPU nothing waits for it, and the context fails when it is false."""
    torch._assert_async(condition, message)


def job_store() -> Any:
    """A connection of one's own to the store of the running job; torch has no public way from a group to its store."""
    import torch.distributed as dist

    store: Any = dist.distributed_c10d._get_default_store()
    return store.clone()


@contextmanager
def hosted_store() -> Generator[dict[str, str]]:
    """A store for a job of child processes, at a port that the system chose: the environment by which its ranks join
    it, as long as this is entered."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # As under torchrun, whose agent holds the store: otherwise rank 0 would listen at the port.
    yield {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    del store


def stored_at(info: Any) -> tuple[str, int, int]:
    """File, offset and length of an item of a distributed checkpoint; torch keeps the class of what says so private."""
    return info.relative_path, info.offset, info.length


# What an index of torch.distributed.checkpoint is made of; nothing of it runs when it is read.
_INDEX_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"Path", "PosixPath"},
    "pathlib._local": {"Path", "PosixPath"},
}


class ForeignIndexError(Exception):
    """An index that names something else than an index does, or is cut short. Its text ends "the index ..."."""


class _IndexReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _INDEX_CLASSES.get(module, ()):
            raise ForeignIndexError(f"names {module}.{name}, which is no part of an index")
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> Any:
        raise ForeignIndexError("refers to something outside of it")


def read_index(path: Path) -> Metadata:
    """The index that torch.distributed.checkpoint keeps as a pickle, by an allow-list of its classes.

    Raises ForeignIndexError for all that is none. What it says is not checked.
    """
    from torch.distributed.checkpoint.metadata import Metadata  # its package takes seconds to import

    try:
        with path.open("rb") as file:
            found = _IndexReader(file).load()
    except ForeignIndexError:
        raise
    except Exception as failure:
        raise ForeignIndexError(f"cannot be read: {type(failure).__name__}") from None
    if type(found) is not Metadata:
        raise ForeignIndexError("is no index of tensors")
    for name in ("state_dict_metadata", "storage_data"):
        if not hasattr(found, name):
            raise ForeignIndexError(f"has no {name}")
    return found


class SizeRecorder:
    """A mode of fake tensors whose sizes are symbols, and the conditions on them that code asked for: `guards`.

    Sizes that are no sums of products, such as `n // 2`, are conditions too: see `_pieces`. Each guard comes with the
    frames outside of torch and shardc that led to it, innermost first.
    """

    def __init__(self) -> None:
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        guards: list[tuple[Any, list[tuple[str, int]]]] = []
        self._own: dict[Any, Any] = {}  # torch's symbol -> one of the extent's name
        self._hints: dict[Any, int] = {}
        self._seen: set[Any] = set()

        class Recording(ShapeEnv):
            def _log_guard(self, prefix: str, g: Any, forcing_spec: bool) -> None:
                guards.append((g, _frames_outside()))

        self._guards = guards
        self._environment = Recording(duck_shape=False)
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=self._environment)

    @contextmanager
    def active(self) -> Generator[None]:
        """Composite ops resolve through Python kernels, which keep sizes symbols, as while a model is traced."""
        from torch.fx.experimental.sym_node import SymNode

        made = SymNode.__init__

        def noted(node: Any, expr: Any, *args: Any, **kwargs: Any) -> None:
            made(node, expr, *args, **kwargs)
            for piece in _pieces(expr, self._hints):
                if piece not in self._seen and _is_by_forward():
                    self._seen.add(piece)
                    self._guards.append((piece, _frames_outside()))

        SymNode.__init__ = cast(Any, noted)
        try:
            with self.mode, enable_python_dispatcher():
                yield
        finally:
            SymNode.__init__ = made

    def symbol(self, name: str, size: int) -> Any:
        """A size that is a symbol, `size` wherever code asks."""
        import sympy
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        source = ConstantSource(name)
        symbol = self._environment.create_symbol(size, source, DimDynamic.DYNAMIC, None)
        if isinstance(symbol, sympy.Symbol):  # 0 and 1 are no symbols to torch
            self._own[symbol] = sympy.Symbol(name, integer=True, positive=True)
            self._hints[symbol] = size
        return self._environment.create_symintnode(symbol, hint=size, source=source)

    @property
    def guards(self) -> list[tuple[Any, list[tuple[str, int]]]]:
        """First that each symbol is 2 or more, which torch takes for granted: `n == 1` is False, and asks nothing."""
        granted: list[tuple[Any, list[tuple[str, int]]]] = [(own >= 2, []) for own in self._own.values()]
        return [*granted, *((expression.xreplace(self._own), frames) for expression, frames in self._guards)]


class CallLog:
    """The calls of ATen that code makes on fake tensors, each with the frames outside of torch and shardc that led to
    it, innermost first: the op, and its arguments, of tensors their number in order of appearance, dtype and shape."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[Any], list[tuple[str, int]]]] = []
        self._seen: dict[int, tuple[int, Tensor]] = {}

    @contextmanager
    def active(self) -> Generator[None]:
        log = self

        class Logging(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                plain = [str(func), *(log._described(leaf) for leaf in pytree.tree_leaves((args, kwargs)))]
                log.calls.append((plain, _frames_outside()))
                return func(*args, **(kwargs or {}))

        with FakeTensorMode(allow_non_fake_inputs=True), enable_python_dispatcher(), Logging():
            yield

    def _described(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            number, _ = self._seen.setdefault(id(leaf), (len(self._seen), leaf))
            return [number, str(leaf.dtype), list(leaf.shape)]
        return leaf if leaf is None or isinstance(leaf, bool | int | float | str) else str(leaf)


def _pieces(expression: Any, sizes: Mapping[Any, int]) -> list[Any]:
    """The conditions under which a size is the same polynomial, or quotient of two, as for these sizes.

    Of `n // k` and `n % k` it is the remainder that stays, of a largest or smallest the one that is it; with any other
    function of pieces, rounding or bits, each size stands for itself.
    """
    import sympy
    from torch.utils._sympy import functions as of

    if not isinstance(expression, sympy.Expr):
        return []  # a condition: a guard, if code asks for it
    smooth = (of.PowByNatural, of.FloatPow, of.FloatTrueDiv, of.IntTrueDiv, of.ToFloat, of.Identity)
    found: list[Any] = []
    for function in expression.atoms(sympy.Function, of.Max, of.Min):
        if isinstance(function, smooth) or not function.free_symbols:
            continue
        if isinstance(function, of.FloorDiv):
            function = of.Mod(*function.args)
        if isinstance(function, (of.Mod, of.PythonMod)):
            found.append(sympy.Eq(function, function.subs(sizes)))
        elif isinstance(function, (of.Max, of.Min)):
            value = function.subs(sizes)
            found.append(sympy.Eq(function, next(a for a in function.args if a.subs(sizes) == value)))
        else:
            found += [sympy.Eq(symbol, sizes[symbol]) for symbol in function.free_symbols if symbol in sizes]
    return [piece for piece in found if piece != True]  # noqa: E712 (sympy's own truth)


def _is_by_forward() -> bool:
    """Is a size computed by code of the model or of torch.nn? What an op computes to lay out its result are types of
    the program, or guards."""
    root = os.path.dirname(torch.__file__) + os.sep
    sizes = (root + "__init__.py", os.path.join(root, "fx", ""), os.path.join(root, "utils", "_sympy", ""))
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(sizes):
        frame = frame.f_back
    path = "" if frame is None else frame.f_code.co_filename
    return not path.startswith(root) or path.startswith(os.path.join(root, "nn", ""))


def frames_outside_of(problem: BaseException) -> list[tuple[str, int]]:
    """Files and lines that an error came through and that are neither torch's nor ours, innermost first."""
    return _outside((f.f_code.co_filename, line) for f, line in reversed([*walk_tb(problem.__traceback__)]))


def _frames_outside() -> list[tuple[str, int]]:
    """The same of the stack."""
    return _outside((frame.f_code.co_filename, line) for frame, line in walk_stack(sys._getframe(1)))


def _outside(frames: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    roots = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.abspath(__file__)) + os.sep, "<")
    return [(path, line) for path, line in frames if not path.startswith(roots)]


def with_children(
    module: torch.nn.Module, others: Mapping[str, torch.nn.Module], gone: Collection[str] = ()
) -> torch.nn.Module:
    """A copy of a module that shares all it holds, but for other children and those that are gone.

    `copy.copy` shares the dict of children, and public methods put a child among its container's, or replace it there.
    """
    changed = copy.copy(module)
    children = module._modules.items()
    changed._modules = {name: others.get(name, child) for name, child in children if name not in gone}
    return changed


def multiplies_fp8(device: torch.device) -> bool:
    """Whether a device has products of 8-bit floats: GPUs from Ada and Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def scaled_mm(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`(a b^T) a_scale b_scale` on a GPU, of 8-bit matrices [M, K] and [N, K] that lie row by row.

    Scales have one element, or [M, 1] and [1, N]. There is no public call. It takes a second operand that lies column
    by column, and extents that are multiples of 16: what is short is padded with zeros. Scales of rows it takes from
    Hopper on and for bfloat16 results alone: else they are multiplied after a product in float32.
    """
    rows, columns = a.shape[0], b.shape[0]
    a, b = _padded_to_16(a), _padded_to_16(b)
    scales = a_scale.reshape(-1), b_scale.reshape(-1)
    if all(scale.numel() == 1 for scale in scales):
        y = torch._scaled_mm(a, b.t(), scale_a=scales[0], scale_b=scales[1], out_dtype=dtype)
        return y[:rows, :columns].contiguous()
    hopper = torch.cuda.get_device_capability(a.device) >= (9, 0)
    if hopper and dtype == torch.bfloat16 and all(scale.numel() > 1 for scale in scales):
        of_a, of_b = (
            torch.nn.functional.pad(scale, (0, x.shape[0] - scale.numel()), value=1.0)
            for scale, x in zip(scales, (a, b), strict=True)
        )
        y = torch._scaled_mm(a, b.t(), scale_a=of_a[:, None], scale_b=of_b[None], out_dtype=dtype)
        return y[:rows, :columns].contiguous()
    one = a_scale.new_ones(())
    y = torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
    return (y[:rows, :columns] * a_scale * b_scale).to(dtype)


def _padded_to_16(x: Tensor) -> Tensor:
    """A matrix of 8-bit floats with zeros up to the next multiples of 16. Bytes are padded: zero is the byte 0."""
    short = [-extent % 16 for extent in x.shape]
    if not any(short):
        return x
    return torch.nn.functional.pad(x.view(torch.uint8), (0, short[1], 0, short[0])).view(x.dtype)


# ---------------------------------------------------------------------- what compiling stands on
def storage_id(t: Tensor) -> int:
    """A number of a tensor's memory, while that lives: on the meta device, where there is no address, too."""
    return t.untyped_storage()._cdata


def is_op(value: object) -> bool:
    """Whether a value is an op of `torch.ops`, or one of its overloads."""
    return isinstance(value, OpOverload | torch._ops.OpOverloadPacket)


def active_modes() -> list[str]:
    """The modes that see torch's calls now, but for a default device: `with torch.device(...)` is one."""
    functions = [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]
    dispatch = [torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack())]
    functorch: Any = vars(torch._C)["_functorch"]
    transforms = ["torch.func"] if functorch.peek_interpreter_stack() is not None else []
    device = torch.utils._device.DeviceContext
    return [type(mode).__qualname__ for mode in (*functions, *dispatch) if not isinstance(mode, device)] + transforms


def attention_order() -> list[int]:
    """Which kernel of attention is asked first."""
    return torch._C._get_sdp_priority_order()


def saves_by_hooks() -> bool:
    """Whether `torch.autograd.graph.saved_tensors_hooks` are active."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None  # type: ignore[attr-defined]


def replaced_ops() -> list[str]:
    """Torch's ops of which Python registered an implementation, as "aten/gelu/CPU"; torch does for a few keys."""
    return sorted(name for name in torch.library._impls if name.startswith(("aten/", "prims/")))
