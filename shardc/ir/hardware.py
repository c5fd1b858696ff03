"""What the machine is: rates, delays and sizes that passes weigh choices by, in one value.

    Hardware()                        the default, which is configs/hardware/default.yaml
    DEFAULT.flops_per_memory_byte     256      1.024e15 FLOPs a second, 4e12 bytes a second
    DEFAULT.start_bytes(("tp",))      10 MB    which 500 GB/s send in the 20 us that a collective takes to begin

A plan picks one by name, or changes single quantities (`shardc.plan.hardware`). A pass takes it as an option, and reads
the ratios that are derived here; it has no figures of its own. Costs are compared in one unit each: FLOPs of 16-bit
products that take as long, or bytes over a link inside a node that take as long.

The default is no machine: it prices all floats alike, and links between nodes as those inside one. So what it leads to
does not depend on the dtype that a model is tested in, nor on how many ranks a node has.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch

from shardc.ir.diagnostic import Diagnostic, ShardcError, did_you_mean
from shardc.ir.mesh import Mesh

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


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One accelerator, and how it reaches the others. Rates are those that programs reach, for one direction.

    `bf16_flops_per_second` is of products of bfloat16 and float16. `link_bytes_per_second` is what an accelerator sends
    inside its node, `network_bytes_per_second` what it sends to other nodes. `collective_start_seconds` passes before a
    collective moves its first byte. `kernel_launch_seconds` is the time of the CPU for one launch,
    `kernel_gap_seconds` that of the accelerator between two kernels. `bucket_bytes` are those of a full bucket.
    `storage_bytes_per_second` is what an accelerator writes to, or reads from, the checkpoints' storage while all do.
    Products whose rows are no multiples of `row_alignment_bytes` take `unaligned_slowdown` times as long at the least.
    """

    bf16_flops_per_second: float = _rate(1.024e15)
    fp32_flops_per_second: float = _rate(1.024e15)
    fp64_flops_per_second: float = _rate(1.024e15)
    memory_bytes_per_second: float = _rate(4e12)
    link_bytes_per_second: float = _rate(5e11)
    network_bytes_per_second: float = _rate(5e11)
    accelerators_per_node: int = _whole(8, 1, 2**20)
    collective_start_seconds: float = _delay(20e-6)
    kernel_launch_seconds: float = _delay(5e-6)
    kernel_gap_seconds: float = _delay(1.05e-6)
    storage_bytes_per_second: float = _rate(1.25e8)
    bucket_bytes: int = _whole(25 * 2**20, 1, 2**40)
    row_alignment_bytes: int = _whole(16, 2, 256, binary=True)
    unaligned_slowdown: float = dataclasses.field(default=4.0, metadata={"range": Range(1, 100)})
    network_axes: frozenset[str] = frozenset()  # of a mesh, whose groups span nodes: see `on`

    def __post_init__(self) -> None:
        problems = problems_of(self.quantities())
        if problems:
            raise ShardcError(*problems.values())

    # ------------------------------------------------------------------ its quantities as plain data
    def quantities(self) -> dict[str, Number]:
        return {name: getattr(self, name) for name in RANGES}

    @classmethod
    def of(cls, quantities: Mapping[str, Any]) -> Self:
        """The default with other quantities. Raises ShardcError (SC208) for what is none, or out of its range."""
        problems = problems_of(quantities)
        if problems:
            raise ShardcError(*problems.values())
        return cls(**quantities)

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
    def product_seconds(self, batch: int, rows: int, columns: int, depth: int, dtype: torch.dtype) -> float:
        """`batch` products of rows x depth by depth x columns, in one call of the accelerator."""
        flops = 2 * batch * rows * columns * depth
        return self.bf16_flops(flops, dtype) / self.bf16_flops_per_second

    def attention_seconds(self, flops: int, dtype: torch.dtype, *, backward: bool = False) -> float:
        """A fused attention that computes so many FLOPs, of keys that are not masked away."""
        return self.bf16_flops(flops, dtype) / self.bf16_flops_per_second

    def memory_seconds(self, size: float) -> float:
        """A kernel that reads and writes so many bytes."""
        return size / self.memory_bytes_per_second

    def group_of(self, mesh: Mesh, axes: Iterable[str]) -> Group:
        """Where the ranks of a group along these axes are: `self` must know the mesh (`on`)."""
        axes = tuple(axes)
        size = mesh.size(axes)
        if not any(axis.partition(":")[0] in self.network_axes for axis in axes):
            return Group((size,))
        members = mesh.group_of(0, axes)
        nodes = len({rank // self.accelerators_per_node for rank in members})
        return Group((max(1, size // nodes), nodes))

    def collective_seconds(self, kind: str, size: float, group: Group) -> float:
        """From the moment when all ranks have begun it. `kind` and `size` are those of `ir.collectives`: an all_reduce,
        all_gather or reduce_scatter of the whole tensor's bytes, an all_to_all or permute of what a rank holds."""
        k = group.size
        if k == 1:
            return 0.0
        share = {"permute": 1.0, "all_reduce": 2 * (k - 1) / k}.get(kind, (k - 1) / k)
        rate = self.link_bytes_per_second if len(group.extents) == 1 else self.network_bytes_per_second
        return self.collective_start_seconds + share * size / rate


class Group(NamedTuple):
    """How a group of ranks lies in the network: (8,) are 8 ranks of a node, (8, 4) 8 in each of 4 nodes, (1, 16) one in
    each of 16."""

    extents: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.extents)


RANGES: Mapping[str, Range] = {
    field.name: field.metadata["range"] for field in dataclasses.fields(Hardware) if "range" in field.metadata
}


def problems_of(quantities: Mapping[str, Any]) -> dict[str, Diagnostic]:
    """What is wrong with quantities (SC208), by name."""
    problems: dict[str, Diagnostic] = {}
    for name, value in quantities.items():
        if name not in RANGES:
            hint = did_you_mean(name, RANGES, "quantities")
            problems[name] = Diagnostic("SC208", f"hardware has no quantity '{name}'", hint=hint)
        elif not RANGES[name].holds(value):
            message = f"'hardware.{name}' should be {RANGES[name]}, not {value!r}"
            default = getattr(Hardware, name)
            hint = f"write {name}: {default if RANGES[name].whole else f'{default:g}'}, which is the default"
            problems[name] = Diagnostic("SC208", message, hint=hint)
    return problems


DEFAULT = Hardware()
