"""The collectives of an emitted program. Each is written once, as what one rank does before and after the ranks meet.

    atoms = x.reshape(atoms).contiguous()               before: what is sent lies in one piece
    chunks = yield Exchange("all_gather", atoms, axes)  the ranks of a group meet
    return chunks.movedim(0, pos).flatten(pos, pos + 1) after: chunks are put where they belong

Where few large pieces lie before the dim that is gathered or scattered, as the sequences of a batch do, each piece is
sent on its own (`Exchange.pos`): it lies in one piece already, and nothing is copied on either side.

`yield` hands the exchange to whoever runs the rank: a communicator over real processes, or the simulator, which holds
every rank's generator at once. Before it a collective reads its operand and the mesh alone, after it what it received
alone: never its coordinate. Tensors arrive as local dims; `atoms` lists the local sizes of all flat atoms of x.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch._ops import OpOverload
from torch.nn.functional import pad

from kernels_triton.base.library import define
from shardc.ir.blocks import Blocks
from shardc.ir.ops.context import Communicator, Sizes, current
from shardc.ir.ops.local import told_blocks

ExchangeKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "all_to_all_uneven"]


NO_ROWS = Sizes((), ())
MOST_PIECES = 32  # of a collective, which a group begins together
LEAST_PIECE = 2**18  # bytes that a rank has of one; smaller ones are copied


@dataclass(slots=True)
class Exchange:
    """What a rank brings to a meeting of its group along `axes`; `Communicator` says what each kind gives back.

    Not frozen: a frozen one takes Python three times as long to make, once a collective of every step."""

    kind: ExchangeKind
    x: torch.Tensor
    axes: tuple[str, ...]
    op: str = ""  # of all_reduce and reduce_scatter
    source: tuple[int, ...] = ()  # of permute
    sizes: Sizes = NO_ROWS  # of all_to_all_uneven
    spent: bool = False  # x is read by nobody else: an all_reduce may write its result over it
    pos: int = (
        0  # where the group's dim lies in memory, of all_gather what arrives, of reduce_scatter x; before, pieces
    )
    late: bool = False  # nothing reads the result before the step ends: it need not hold up other exchanges

    def through(self, comm: Communicator) -> torch.Tensor:
        match self.kind:
            case "all_reduce":
                return comm.all_reduce(self.x, self.op, self.axes)
            case "all_gather":
                return comm.all_gather(self.x, self.axes)
            case "reduce_scatter":
                return comm.reduce_scatter(self.x, self.op, self.axes)
            case "all_to_all":
                return comm.all_to_all(self.x, self.axes)
            case "permute":
                return comm.permute(self.x, self.axes, self.source)
            case "all_to_all_uneven":
                return comm.all_to_all_uneven(self.x, self.axes, self.sizes)


def landing(exchange: Exchange, members: int) -> torch.Tensor:
    """The tensor in which a rank of several gets what its group sends; of a spent operand, that one."""
    x = exchange.x
    match exchange.kind:
        case "all_reduce":
            return x if exchange.spent else x.clone(memory_format=torch.contiguous_format)
        case "all_gather":
            return x.new_empty((*x.shape[: exchange.pos], members, *x.shape[exchange.pos :])).movedim(exchange.pos, 0)
        case "reduce_scatter":
            return x.new_empty(x.shape[1:])
        case "all_to_all" | "permute":
            return torch.empty_like(x, memory_format=torch.contiguous_format)
        case "all_to_all_uneven":
            return x.new_empty((sum(exchange.sizes.received), *x.shape[1:]))


Steps = Generator[Exchange, torch.Tensor, torch.Tensor]


def _all_reduce(x: torch.Tensor, op: str, axes: list[str]) -> Steps:
    reduced = yield Exchange("all_reduce", x.contiguous(), tuple(axes), op)
    return reduced


def all_reduce_over(x: torch.Tensor, op: str, axes: list[str]) -> Steps:
    """The same, of a tensor that may be written over."""
    reduced = yield Exchange("all_reduce", x.contiguous(), tuple(axes), op, spent=True)
    return reduced


def late(steps: Callable[..., Steps], *args: Any) -> Steps:
    """A collective whose result is read at the end of the step alone."""
    generator = steps(*args)
    exchange = next(generator)
    exchange.late = True
    received = yield exchange
    try:
        generator.send(received)
    except StopIteration as done:
        result: torch.Tensor = done.value
        return result
    raise AssertionError("a collective meets its group once")


def _all_gather(x: torch.Tensor, axes: list[str], atoms: list[int], pos: int, size: int, shape: list[int]) -> Steps:
    chunk = without_gaps(x.reshape(atoms))
    full = atoms[pos] * current().mesh.size(axes) == size
    at = sent_at(chunk.shape, pos, chunk.element_size()) if full else 0
    chunks = yield Exchange("all_gather", chunk, tuple(axes), pos=at)
    return joined_chunks(chunks, pos, size, shape)


def _gather_blocks(
    x: torch.Tensor,
    axes: list[str],
    atoms: list[int],
    pos: int,
    counts: list[int],
    units: list[int],
    shape: list[int],
    reverse: Sequence[str] | None = None,
) -> Steps:
    """The same of an atom of blocks: `counts` are those of the gathered atom, negative where a block is not cut."""
    pieces = _pieces(axes, told_blocks(counts, units, reverse))
    chunks = yield Exchange("all_gather", without_gaps(x.reshape(atoms)), tuple(axes))
    return _join(chunks, pieces, pos, shape)


class _Piece(NamedTuple):
    """Elements of an atom of blocks that one member of a group has: from `start` on in the atom, `held` in its part.
    `copied`: the members before it have them too."""

    member: int
    start: int
    size: int
    held: int
    copied: bool


def _pieces(axes: Sequence[str], blocks: Blocks) -> list[_Piece]:
    """What each member of a group along these axes has of each block: of one that is not cut, all."""
    mesh = current().mesh
    along = mesh.resolve(axes)
    pieces: list[_Piece] = []
    members = torch.arange(mesh.size(axes)).view([mesh.size(axis) for axis in along])
    start = held = 0
    for block in blocks.parts:
        local = block.local(axes, mesh).size
        turned = [i for i, axis in enumerate(along) if block.cut and block.reverses(axis)]
        for place, member in enumerate(members.flip(turned).flatten().tolist()):
            begin = place * local if block.cut else 0
            if begin < block.size:
                size, copied = min(local, block.size - begin), not block.cut and place > 0
                pieces.append(_Piece(member, start + begin, size, held, copied))
        start, held = start + block.size, held + local
    return pieces


def _join(chunks: torch.Tensor, pieces: Sequence[_Piece], pos: int, shape: list[int]) -> torch.Tensor:
    """What the members of a group have of an atom at `pos`, [group, ..., its local size, ...], as the whole."""
    own = [piece for piece in pieces if not piece.copied]
    sizes = [*chunks.shape[1:]]
    sizes[pos] = sum(piece.size for piece in own)
    whole = chunks.new_empty(shape)
    atoms = whole.view(sizes)
    for piece in own:
        _copy(chunks[piece.member].narrow(pos, piece.held, piece.size), atoms.narrow(pos, piece.start, piece.size))
    return whole


def _cut_blocks(x: torch.Tensor, pos: int, axes: list[str], blocks: Blocks) -> torch.Tensor:
    """Dim `pos`, an atom of blocks, as what each group member has of it: [group, ..., its local size, ...]. Zero where
    a member's share of a block is shorter than the longest."""
    mesh = current().mesh
    group, local = mesh.size(axes), int(blocks.local(axes, mesh))
    sizes = [*x.shape]
    sizes[pos] = local
    pieces = _pieces(axes, blocks)
    full = sum(piece.size for piece in pieces) == group * local
    cut = (x.new_empty if full else x.new_zeros)((group, *sizes))
    for piece in pieces:
        _copy(x.narrow(pos, piece.start, piece.size), cut[piece.member].narrow(pos, piece.held, piece.size))
    return cut


def _reduce_scatter(
    x: torch.Tensor,
    op: str,
    axes: list[str],
    atoms: list[int],
    pos: int,
    shape: list[int],
    counts: Sequence[int] = (),
    units: Sequence[int] = (),
    reverse: Sequence[str] | None = None,
) -> Steps:
    """`counts`, `units` and `reverse` are those of an atom of blocks, each of which is cut."""
    whole = x.reshape(atoms)
    cut = _cut_blocks(whole, pos, axes, told_blocks(counts, units, reverse)) if counts else _cut(whole, pos, axes)
    even = cut.movedim(0, pos).is_contiguous()
    at = sent_at(cut.shape[1:], pos, cut.element_size()) if even else 0
    row = yield Exchange("reduce_scatter", cut if at else without_gaps(cut), tuple(axes), op, pos=at)
    return row.view(shape)


def sent_at(chunk: Sequence[int], pos: int, itemsize: int) -> int:
    """Where the group's dim lies in memory, for a member's chunk of dim `pos`: there if pieces are few and large."""
    count = math.prod(chunk[:pos])
    fits = 1 < count <= MOST_PIECES and math.prod(chunk) * itemsize >= count * LEAST_PIECE
    return pos if fits else 0


def _all_to_all(
    x: torch.Tensor,
    axes: list[str],
    atoms: list[int],
    split: int,
    concat: int,
    size: int,
    shape: list[int],
    counts: Sequence[int] = (),
    units: Sequence[int] = (),
    reverse: Sequence[str] | None = None,
    splits_blocks: bool = False,
) -> Steps:
    """`counts`, `units` and `reverse` are those of an atom of blocks: of `split` if it `splits_blocks`, or `concat`."""
    whole, blocks = x.reshape(atoms), told_blocks(counts, units, reverse)
    cut = _cut_blocks(whole, split, axes, blocks) if splits_blocks else _cut(whole, split, axes)
    joins_blocks = bool(counts) and not splits_blocks
    pieces = _pieces(axes, blocks) if joins_blocks else ()
    received = yield Exchange("all_to_all", without_gaps(cut), tuple(axes))
    if joins_blocks:
        return _join(received, pieces, concat, shape)
    return joined_chunks(received, concat, size, shape)


def _permute_ranks(x: torch.Tensor, axes: list[str], source: list[int]) -> Steps:
    received = yield Exchange("permute", x.contiguous(), tuple(axes), source=tuple(source))
    return received


def _cut(x: torch.Tensor, pos: int, axes: list[str]) -> torch.Tensor:
    """Dim `pos`, zero padded, as one chunk a group member: [..., n, ...] -> [group, ..., ceil(n / group), ...]."""
    group = current().mesh.size(axes)
    return chunks_of(x, pos, group, -(-x.shape[pos] // group))


def chunks_of(x: torch.Tensor, pos: int, group: int, chunk: int) -> torch.Tensor:
    missing = group * chunk - x.shape[pos]
    if missing:
        x = pad(x, [0, 0] * (x.ndim - 1 - pos) + [0, missing])
    if pos == 0:
        return x.view(group, chunk, *x.shape[1:])
    return x.unflatten(pos, (group, chunk)).movedim(pos, 0)


def joined_chunks(chunks: torch.Tensor, pos: int, size: int, shape: list[int]) -> torch.Tensor:
    """Chunks of dim `pos`, [group, ..., n, ...] -> [..., size, ...], without what was padded, as dims."""
    if pos == 0 and chunks.shape[0] * chunks.shape[1] == size and chunks.is_contiguous():
        return chunks.view(shape)
    front = chunks.movedim(0, pos)
    return without_gaps(front).flatten(pos, pos + 1).narrow(pos, 0, size).reshape(shape).contiguous()


def without_gaps(x: torch.Tensor) -> torch.Tensor:
    """The same elements without gaps, in the order of the dims."""
    if x.is_contiguous():
        return x
    whole = x.new_empty(x.shape)
    _copy(x, whole)
    return whole


def _copy(x: torch.Tensor, into: torch.Tensor) -> None:
    """Kernels that copy strided tensors move an element at a time, so pieces of rows are taken for elements of 16 bytes
    where they can be."""
    each = 16 // x.element_size()
    if each > 1 and all(_in_units(t, each) for t in (x, into)):
        x, into = x.view(torch.complex128), into.view(torch.complex128)
    into.copy_(x)


def _in_units(x: torch.Tensor, each: int) -> bool:
    """Does x consist of aligned runs of so many elements?"""
    if x.ndim == 0 or x.stride(-1) != 1 or x.is_conj() or x.is_neg():
        return False
    return not any(n % each for n in (x.shape[-1], x.storage_offset(), *x.stride()[:-1]))


def run_collective(steps: Callable[..., Steps], *args: Any) -> torch.Tensor:
    """A collective as one rank of several runs it: through the communicator of the current context."""
    generator = steps(*args)
    exchange = next(generator)
    received = exchange.through(current().comm)
    try:
        generator.send(received)
    except StopIteration as done:
        result: torch.Tensor = done.value
        return result
    raise AssertionError("a collective meets its group once")


def _shaped(x: torch.Tensor, *args: Any) -> torch.Tensor:
    return x.new_empty(args[-1])


def _same(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


def _collective(schema: str, steps: Callable[..., Steps], fake: Callable[..., torch.Tensor]) -> OpOverload:
    return define(schema, partial(run_collective, steps), fake)


all_reduce = _collective("all_reduce(Tensor x, str op, str[] axes) -> Tensor", _all_reduce, _same)
all_gather = _collective(
    "all_gather(Tensor x, str[] axes, int[] atoms, int pos, int size, int[] shape) -> Tensor", _all_gather, _shaped
)
gather_blocks = _collective(
    "gather_blocks(Tensor x, str[] axes, int[] atoms, int pos, int[] counts, int[] units, int[] shape,"
    " str[]? reverse=None) -> Tensor",
    _gather_blocks,
    lambda x, axes, atoms, pos, counts, units, shape, reverse=None: x.new_empty(shape),
)
reduce_scatter = _collective(
    "reduce_scatter(Tensor x, str op, str[] axes, int[] atoms, int pos, int[] shape, int[] counts=[], int[] units=[],"
    " str[]? reverse=None) -> Tensor",
    _reduce_scatter,
    lambda x, op, axes, atoms, pos, shape, *blocks, **_: x.new_empty(shape),
)
all_to_all = _collective(
    "all_to_all(Tensor x, str[] axes, int[] atoms, int split, int concat, int size, int[] shape, int[] counts=[],"
    " int[] units=[], str[]? reverse=None, bool splits_blocks=False) -> Tensor",
    _all_to_all,
    lambda x, axes, atoms, split, concat, size, shape, *blocks, **_: x.new_empty(shape),
)
permute_ranks = _collective("permute_ranks(Tensor x, str[] axes, int[] source) -> Tensor", _permute_ranks, _same)

# A change of placement that is not yet lowered; the node's type says to what. Where nothing is sharded it is identity.
reshard = define("reshard(Tensor x) -> Tensor", lambda x: x.clone(memory_format=torch.contiguous_format), _same)

COLLECTIVES: dict[Any, Callable[..., Steps]] = {
    all_reduce: _all_reduce,
    all_gather: _all_gather,
    gather_blocks: _gather_blocks,
    reduce_scatter: _reduce_scatter,
    all_to_all: _all_to_all,
    permute_ranks: _permute_ranks,
}
