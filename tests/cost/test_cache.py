"""Kernels whose operands the last-level cache holds, what a call takes the host, and casts to a wider dtype."""

import dataclasses

import pytest
import torch

from shardc.cost.cache import Cache
from shardc.cost.call_seconds import call_costs
from shardc.cost.streams import run
from shardc.ir.graph import Graph
from shardc.ir.hardware import Hardware
from shardc.ir.mesh import Mesh
from tests.handmade import Builder, aten

MIB = 2**20
COLD, WARM = 1e12, 4e12  # bytes a second
HARDWARE = Hardware.of(
    {
        "memory": {0: 1e-6, 2**30: 1e-6 + 2**30 / COLD},
        "cache": {"bytes": 48 * MIB, "seconds": {0: 1e-6, 2**30: 1e-6 + 2**30 / WARM}},
        "kernel_launch_seconds": 1e-9,
    }
)


def negated(rows: int, times: int) -> Graph:
    """y = -x of so many MiB, again and again, from x and y in turn."""
    builder = Builder(Mesh(one=1))
    value = builder.input("x", f"f32[{rows}, {MIB // 4}]", "input")
    for number in range(times):
        value = builder.call(f"y{number}", f"f32[{rows}, {MIB // 4}]", aten.neg.default, value)
    builder.output("output", "y", value)
    return builder.graph()


def seconds(graph: Graph, hardware: Hardware = HARDWARE) -> list[float]:
    return [cost.seconds for cost in call_costs(graph, hardware).values()]


def test_the_last_used_tensors_that_fit_are_held() -> None:
    cache = Cache(10)
    cache.use("a", 4)
    cache.use("b", 4)
    cache.use("a", 4)
    cache.use("c", 4)
    assert [cache.holds(key) for key in "abc"] == [True, False, True]
    cache.use("d", 11)
    assert not any(cache.holds(key) for key in "abcd")


@pytest.mark.parametrize(("size", "cold", "warm"), [(16, 16, 16), (32, 32, 32), (64, 128, 0)])
def test_a_kernel_reads_from_the_cache_what_it_still_holds(size: int, cold: int, warm: int) -> None:
    """What is written has to go to memory, too."""
    first, *_, last = seconds(negated(size, 4))
    assert first == pytest.approx(1e-6 + 2 * size * MIB / COLD)
    assert last == pytest.approx(1e-6 + cold * MIB / COLD + warm * MIB / WARM)


def test_without_a_table_of_it_there_is_no_cache() -> None:
    plain = HARDWARE.changed({"memory_bytes_per_second": COLD})
    assert plain.tables.cache is None
    assert seconds(negated(1, 3), plain) == [2 * MIB / COLD] * 3


def test_a_call_takes_the_host_a_time_of_its_own() -> None:
    builder = Builder(Mesh(one=1))
    x = builder.input("x", "f32[8, 8]", "input")
    viewed = builder.call("v", "f32[64]", aten.view.default, x, [64])
    builder.output("output", "y", builder.call("y", "f32[64]", aten.neg.default, viewed))
    graph = builder.graph()
    slow = dataclasses.replace(HARDWARE, call_seconds=1e-3)
    timed = run(graph, call_costs(graph, slow), slow)
    assert timed.host == pytest.approx(2e-3)  # the view's too
    assert timed.seconds == pytest.approx(2e-3, rel=1e-2)
    assert run(graph, call_costs(graph, HARDWARE), HARDWARE).host == pytest.approx(1e-9)


@pytest.mark.parametrize(("source", "target", "slower"), [("bf16", "f32", True), ("f32", "bf16", False)])
def test_a_cast_to_a_wider_dtype_is_slower(source: str, target: str, slower: bool) -> None:
    builder = Builder(Mesh(one=1))
    x = builder.input("x", f"{source}[{MIB}]", "input")
    dtype = {"bf16": torch.bfloat16, "f32": torch.float32}[target]
    cast = builder.call("y", f"{target}[{MIB}]", aten._to_copy.default, x, dtype=dtype)
    builder.output("output", "y", cast)
    flat = Hardware(memory_bytes_per_second=COLD)
    (spent,) = seconds(builder.graph(), flat)
    assert (spent > 1.5 * 6 * MIB / COLD) == slower
    assert spent >= 6 * MIB / COLD
