"""What the machine is: rates, delays and sizes that passes weigh choices by, in one value.

    Hardware()                        the default, which is configs/hardware/default.yaml
    DEFAULT.flops_per_memory_byte     256      1.024e15 FLOPs a second, 4e12 bytes a second
    DEFAULT.start_bytes(("tp",))      10 MB    which 500 GB/s send in the 20 us that a collective takes to begin

A plan picks one by name, or changes single quantities (`shardc.plan.hardware`). A pass takes it as an option, and reads
the ratios that are derived here; it has no figures of its own. Costs are compared in one unit each: FLOPs of 16-bit
products that take as long, or bytes over a link inside a node that take as long.

Predictions ask for seconds. Tables refine the quantities: products and attention by shape (`ir.device_rates`), memory
by size (`ir.curve`), collectives by kind, group and message (`ir.links`). What no table tells follows from the
quantities.

The default is no machine: it prices all floats alike, and links between nodes as those inside one. So what it leads to
does not depend on the dtype that a model is tested in, nor on how many ranks a node has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, Self

import torch
from pydantic import Field, ValidationError

from shardc.ir.curve import Points, seconds_at
from shardc.ir.device_rates import AttentionRate, ProductRate, Table
from shardc.ir.diagnostic import Diagnostic, ShardcError, did_you_mean
from shardc.ir.links import Group, Level, collective_seconds, extents_of, sent_share
from shardc.ir.mesh import Mesh
from shardc.ir.slowdowns import Calls, Contention, Elements, Meetings, Power

Number = int | float


class Range(NamedTuple):
    """What a quantity may be. `whole` numbers that are `binary` are powers of two."""

    least: Number
    most: Number
    whole: bool = False
    binary: bool = False

    def __str__(self) -> str:
        kind = "a power of two" if self.binary else "a whole number" if self.whole else "a number"
        return f"{kind} from {self.least:g} to {self.most:g}"

    def holds(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return False
        return self.least <= value <= self.most and not (self.binary and int(value) & (int(value) - 1))


RATE = Range(1e6, 1e18)
DELAY = Range(1e-9, 1.0)


def _rate(default: float) -> float:
    return dataclasses.field(default=default, metadata={"range": RATE})


def _delay(default: float) -> float:
    return dataclasses.field(default=default, metadata={"range": DELAY})


def _whole(default: int, least: int, most: int, *, binary: bool = False) -> int:
    return dataclasses.field(default=default, metadata={"range": Range(least, most, whole=True, binary=binary)})


class CacheRate(Table):
    """The last-level cache: how many bytes of tensors it holds, and the seconds of an elementwise kernel whose operands
    and results it holds."""

    bytes: Annotated[int, Field(ge=1, le=2**40)]
    seconds: Points


class Tables(Table):
    """What refines the quantities. Of two entries of `products` or `attention` for a dtype the first counts; `memory`
    has the seconds of an elementwise kernel by the bytes that it reads and writes, `elements` those of an element of an
    op that computes for longer than it moves, beside `calls` of a CPU; `links` begin inside the node."""

    products: tuple[ProductRate, ...] = ()
    attention: tuple[AttentionRate, ...] = ()
    memory: Points | None = None
    cache: CacheRate | None = None
    links: tuple[Level, ...] = ()
    contention: Contention = Contention()
    power: Power = Power()
    meetings: Meetings = Meetings()
    elements: Elements = ()
    calls: Calls = Calls()

    def without(self, quantity: str) -> Tables:
        """The tables that still hold where a quantity has another value: those that it refines do not."""
        if quantity in DTYPES:
            rates = {
                name: tuple(rate for rate in getattr(self, name) if not DTYPES[quantity] & set(rate.dtypes))
                for name in ("products", "attention")
            }
            limit = {"power": Power()} if quantity == "bf16_flops_per_second" else {}
            return self.model_copy(update=rates | limit)
        if quantity == "memory_bytes_per_second":
            return self.model_copy(update={"memory": None, "cache": None, "calls": Calls()})
        levels = {
            "link_bytes_per_second": slice(0, 1),
            "network_bytes_per_second": slice(1, None),
            "collective_start_seconds": slice(None),
        }.get(quantity)
        if levels is None:
            return self
        left = self.links[levels]
        links = [level.changed(series=()) if level in left else level for level in self.links]
        return self.changed(links=tuple(links))


DEVICES = ("gpu", "cpu")  # kinds of accelerators
DTYPES = {
    "bf16_flops_per_second": {"bfloat16", "float16"},
    "fp32_flops_per_second": {"float32", "complex64"},
    "fp64_flops_per_second": {"float64", "complex128"},
    "fp8_flops_per_second": {"float8_e4m3fn", "float8_e5m2"},
}


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One accelerator, and how it reaches the others. Rates are those that programs reach, for one direction.

    `bf16_flops_per_second` is of products of bfloat16 and float16, `fp8_flops_per_second` of 8-bit floats,
    `peak_flops_per_second` the data sheet's, which MFU divides by. `link_bytes_per_second` is what an accelerator sends
    inside its node, `network_bytes_per_second` what it sends to other nodes. `collective_start_seconds` passes before a
    collective moves its
    first byte. `kernel_launch_seconds` is the time of the CPU for one launch,
    `kernel_gap_seconds` that of the accelerator between two kernels, `call_seconds` what a call of a program takes the
    CPU at the least, whatever it launches. `bucket_bytes` are those of a full bucket.
    `storage_bytes_per_second` is what an accelerator writes to, or reads from, the checkpoints' storage while all do.
    `host_bytes_per_second` is what it copies to pinned memory of its host, or from it, over PCIe.
    Products whose rows are no multiples of `row_alignment_bytes` take `unaligned_slowdown` times as long at the least.
    `device` is the kind of accelerator, one of `DEVICES`; None where it is not known.
    """

    bf16_flops_per_second: float = _rate(1.024e15)
    peak_flops_per_second: float = _rate(1.024e15)
    fp32_flops_per_second: float = _rate(1.024e15)
    fp64_flops_per_second: float = _rate(1.024e15)
    fp8_flops_per_second: float = _rate(1.024e15)
    memory_bytes_per_second: float = _rate(4e12)
    link_bytes_per_second: float = _rate(5e11)
    network_bytes_per_second: float = _rate(5e11)
    accelerators_per_node: int = _whole(8, 1, 2**20)
    collective_start_seconds: float = _delay(20e-6)
    kernel_launch_seconds: float = _delay(5e-6)
    kernel_gap_seconds: float = _delay(1.05e-6)
    call_seconds: float = dataclasses.field(default=0.0, metadata={"range": Range(0, 1.0)})
    storage_bytes_per_second: float = _rate(1.25e8)
    host_bytes_per_second: float = _rate(5e10)
    bucket_bytes: int = _whole(25 * 2**20, 1, 2**40)
    row_alignment_bytes: int = _whole(16, 2, 256, binary=True)
    unaligned_slowdown: float = dataclasses.field(default=4.0, metadata={"range": Range(1, 100)})
    device: str | None = None
    tables: Tables = dataclasses.field(default_factory=Tables)
    network_axes: frozenset[str] = frozenset()  # of a mesh, whose groups span nodes: see `on`

    def __post_init__(self) -> None:
        problems = problems_of({name: getattr(self, name) for name in RANGES} | self._kind)
        if problems:
            raise ShardcError(*problems.values())

    # ------------------------------------------------------------------ its quantities as plain data
    def quantities(self) -> dict[str, Any]:
        """As a file has them, the tables that it has included."""
        tables = self.tables.model_dump(mode="json", exclude_defaults=True)
        return self._kind | {name: getattr(self, name) for name in RANGES} | tables

    @property
    def _kind(self) -> dict[str, str]:
        return {} if self.device is None else {"device": self.device}

    @classmethod
    def of(cls, quantities: Mapping[str, Any]) -> Self:
        """The default with other quantities and tables. Raises ShardcError (SC208) for what is none, or out of its
        range."""
        problems = problems_of(quantities)
        if problems:
            raise ShardcError(*problems.values())
        tables = {name: table for name, table in quantities.items() if name in TABLES}
        flat = {name: value for name, value in quantities.items() if name not in TABLES}
        return cls(**flat, tables=Tables.model_validate(tables))

    def changed(self, quantities: Mapping[str, Any]) -> Hardware:
        """The same with other quantities or tables. A table that refines a quantity which is changed is left out: its
        figures would contradict it. Raises ShardcError (SC208)."""
        tables = self.tables
        for name in quantities:
            tables = tables.without(name)
        return self.of({**dataclasses.replace(self, tables=tables).quantities(), **quantities})

    # ------------------------------------------------------------------ arithmetic and memory
    @property
    def flops_per_memory_byte(self) -> float:
        """FLOPs of 16-bit products in the time that one byte of memory is read or written."""
        return self.bf16_flops_per_second / self.memory_bytes_per_second

    def bf16_flops(self, flops: int, dtype: torch.dtype) -> int:
        """The FLOPs of 16-bit products that take as long as these of products of `dtype`."""
        rate = {
            torch.bfloat16: self.bf16_flops_per_second,
            torch.float16: self.bf16_flops_per_second,
            torch.float64: self.fp64_flops_per_second,
            torch.complex128: self.fp64_flops_per_second,
            torch.float8_e4m3fn: self.fp8_flops_per_second,
            torch.float8_e5m2: self.fp8_flops_per_second,
        }.get(dtype, self.fp32_flops_per_second)
        return flops if rate == self.bf16_flops_per_second else round(flops * self.bf16_flops_per_second / rate)

    @property
    def launch_flops(self) -> float:
        """FLOPs of 16-bit products in the time that launching a kernel takes."""
        return self.kernel_launch_seconds * self.bf16_flops_per_second

    @property
    def gap_bytes(self) -> float:
        """Bytes that memory moves in the time between two kernels."""
        return self.kernel_gap_seconds * self.memory_bytes_per_second

    # ------------------------------------------------------------------ communication
    def on(self, mesh: Mesh) -> Hardware:
        """The same, which knows the axes of a mesh whose groups span nodes.

        Ranks are numbered along the last axis first, and fill one node after another: with 8 ranks a node, of
        mesh(dp=4, tp=4) those of a tp group are in one node, and those of a dp group in two.
        """
        node, extent, spans = self.accelerators_per_node, 1, set[str]()
        for name, size in reversed(mesh.axes):
            extent *= size
            # If whole groups do not fill a node, some group begins in one and ends in another.
            if size > 1 and mesh.world_size > node and node % extent:
                spans.add(name)
        return dataclasses.replace(self, network_axes=frozenset(spans))

    def bytes_per_second(self, axes: Iterable[str]) -> float:
        """What a rank sends to the others of its group along these axes; `dp:0` is a part of the axis `dp`."""
        spans = any(axis.partition(":")[0] in self.network_axes for axis in axes)
        return self.network_bytes_per_second if spans else self.link_bytes_per_second

    def start_bytes(self, axes: Iterable[str]) -> float:
        """Bytes that a rank would send along these axes in the time that a collective takes to begin."""
        return self.collective_start_seconds * self.bytes_per_second(axes)

    @property
    def link_start_bytes(self) -> float:
        """The same inside a node: what starting a collective adds to `link_bytes`."""
        return self.collective_start_seconds * self.link_bytes_per_second

    def link_bytes(self, size: float, axes: Iterable[str]) -> float:
        """The bytes over a link inside a node that take as long as these along the axes."""
        rate = self.bytes_per_second(axes)
        return size if rate == self.link_bytes_per_second else size * self.link_bytes_per_second / rate

    def flops_per_sent_byte(self, axes: Iterable[str]) -> float:
        """FLOPs of 16-bit products in the time that a rank sends one byte along these axes."""
        return self.bf16_flops_per_second / self.bytes_per_second(axes)

    # ------------------------------------------------------------------ seconds, which predictions are made of
    def product_seconds(
        self, batch: int, rows: int, columns: int, depth: int, dtype: torch.dtype, *, contended: bool = False
    ) -> float:
        """`batch` products of rows x depth by depth x columns, in one call of the accelerator; `contended` beside a
        collective. Where a table tells, they take no less than reading the operands and writing the result does. Those
        of 8-bit floats have the tiles of bfloat16, at a rate of their own, where no table is of them. One of
        complex numbers is one of real numbers with twice the rows and twice the depth."""
        if dtype.is_complex:
            return self.product_seconds(batch, 2 * rows, columns, 2 * depth, dtype.to_real(), contended=contended)
        flops = 2 * batch * rows * columns * depth
        slowdown = self.tables.contention.product if contended else 1.0
        rate, faster = self._products_of(dtype), 1.0
        if rate is None and _name(dtype) in DTYPES["fp8_flops_per_second"]:
            rate, faster = self._products_of(torch.bfloat16), self.fp8_flops_per_second / self.bf16_flops_per_second
        if rate is None or not flops:
            return slowdown * self.bf16_flops(flops, dtype) / self.bf16_flops_per_second
        computing = rate.seconds(batch, rows, columns, depth, self.memory_bytes_per_second) / faster
        if contended and (taken := self.tables.contention.units) and rate.units > 1:
            slowdown = rate.slowdown(batch, rows, columns, depth, self.memory_bytes_per_second, taken)
        step = max(1, self.row_alignment_bytes // dtype.itemsize)
        if dtype.itemsize == 2 and any(extent % step for extent in (rows, columns, depth) if extent > step):
            computing *= self.unaligned_slowdown
        written = max(2, dtype.itemsize)  # a byte is too narrow for a sum
        moved = batch * ((rows * depth + depth * columns) * dtype.itemsize + rows * columns * written)
        return max(slowdown * computing, self.memory_seconds(moved, contended=contended))

    def _products_of(self, dtype: torch.dtype) -> ProductRate | None:
        return next((rate for rate in self.tables.products if _name(dtype) in rate.dtypes), None)

    def attention_seconds(
        self,
        flops: int,
        dtype: torch.dtype,
        *,
        backward: bool = False,
        sequence: int = 0,
        width: int = 0,
        backend: str = "",
        contended: bool = False,
    ) -> float:
        """A fused attention that computes so many FLOPs, of keys that are not masked away. `sequence` are the keys of a
        causal one, `width` the elements of a head; `backend` is one of those that the table names."""
        slowdown = self.tables.contention.attention if contended else 1.0
        for rate in self.tables.attention:
            if rate.backward == backward and _name(dtype) in rate.dtypes and backend in ("", rate.backend):
                return slowdown * rate.seconds(flops, sequence, width)
        return slowdown * self.bf16_flops(flops, dtype) / self.bf16_flops_per_second

    def memory_seconds(self, size: float, *, cached: float = 0.0, contended: bool = False) -> float:
        """A kernel that reads and writes so many bytes, of which the last-level cache has `cached`."""
        slowdown = self.tables.contention.memory if contended else 1.0
        if cached and self.tables.cache is not None:
            quick = seconds_at(self.tables.cache.seconds, min(size, cached))
            left = self.memory_seconds(size - cached) - self.memory_seconds(0) if size > cached else 0.0
            return slowdown * (quick + left)
        if self.tables.memory is not None:
            return slowdown * seconds_at(self.tables.memory, size)
        return slowdown * size / self.memory_bytes_per_second

    def group_of(self, mesh: Mesh, axes: Iterable[str]) -> Group:
        """Where the ranks of a group along these axes are, of the group that spans most of the network."""
        units = (self.accelerators_per_node, *(level.ranks for level in self.tables.links[1:] if level.ranks))
        return Group(extents_of(mesh, tuple(axes), units))

    def collective_seconds(
        self, kind: str, size: float, group: Group, *, graph: bool = False, contended: bool = False
    ) -> float:
        """From the moment when all ranks have begun it. `kind` and `size` are those of `ir.collectives`: an all_reduce,
        all_gather or reduce_scatter of the whole tensor's bytes, an all_to_all or permute of what a rank holds;
        besides, a `send` from one rank to another. `graph`: it is replayed from a CUDA graph; without, what the CPU
        takes to issue it counts, which alone bounds small ones. `contended`: beside a product."""
        slowdown = self.tables.contention.collective if contended else 1.0
        if group.size == 1:
            return 0.0
        if self.tables.links:
            return slowdown * collective_seconds(self.tables.links, kind, size, group, graph, self._untabled)
        return slowdown * self._untabled(len(group.extents) - 1, kind, size, group.size)

    def _untabled(self, level: int, kind: str, size: float, group: int) -> float:
        rate = self.network_bytes_per_second if level else self.link_bytes_per_second
        return self.collective_start_seconds + sent_share(kind, group) * size / rate


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


RANGES: Mapping[str, Range] = {
    field.name: field.metadata["range"] for field in dataclasses.fields(Hardware) if "range" in field.metadata
}


def problems_of(quantities: Mapping[str, Any]) -> dict[str, Diagnostic]:
    """What is wrong with quantities (SC208), by name; in tables, by the place: `links.0.series.3`."""
    problems = _problems_of_tables({name: value for name, value in quantities.items() if name in TABLES})
    for name, value in quantities.items():
        if name in TABLES:
            continue
        if name == "device":
            if value not in DEVICES:
                message = f"'hardware.device' should be {' or '.join(DEVICES)}, not {value!r}"
                problems[name] = Diagnostic("SC208", message, hint="leave it out where the kind is not known")
        elif name not in RANGES:
            hint = did_you_mean(name, ("device", *RANGES, *TABLES), "quantities")
            problems[name] = Diagnostic("SC208", f"hardware has no quantity '{name}'", hint=hint)
        elif not RANGES[name].holds(value):
            message = f"'hardware.{name}' should be {RANGES[name]}, not {value!r}"
            default = getattr(Hardware, name)
            hint = f"write {name}: {default if RANGES[name].whole else f'{default:g}'}, which is the default"
            problems[name] = Diagnostic("SC208", message, hint=hint)
    return problems


def _problems_of_tables(tables: Mapping[str, Any]) -> dict[str, Diagnostic]:
    """The problems of tables by their places: `links.0.series.3`."""
    try:
        Tables.model_validate(tables)
    except ValidationError as wrong:
        problems: dict[str, Diagnostic] = {}
        for error in wrong.errors(include_url=False):
            place = ".".join(map(str, error["loc"]))
            said = error["msg"].removeprefix("Value error, ")
            message = f"'hardware.{place}': {said[:1].lower()}{said[1:]}"
            hint = f"docs/reference/hardware.md says what {error['loc'][0]} has"
            problems[place] = Diagnostic("SC208", message, hint=hint)
        return problems
    return {}


TABLES = tuple(Tables.model_fields)
DEFAULT = Hardware()
