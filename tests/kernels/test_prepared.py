"""Prepared calls pass addresses to compiled kernels in the order of their arguments, and return fresh results."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import shardc
from kernels_triton.base.inplace import INTO
from kernels_triton.codegen.schedules import choose_plan
from kernels_triton.gate.corpus import CORPUS
from kernels_triton.generated import inplace_call
from kernels_triton.generated.launcher import DeviceKernel, define_kernel
from kernels_triton.generated.op import FUSED
from kernels_triton.generated.prepared_call import PreparedKernelCall, launch_sequence
from kernels_triton.ir.text import text
from kernels_triton.launch import fast_launch, launch
from kernels_triton.launch.launch import H200
from shardc.runtime.execute.body_code import BodyCode
from shardc.runtime.execute.instructions import rank_context

BF16 = torch.bfloat16


class Launched:
    """In the place of compiled kernels on a GPU: notes what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[int, ...]]] = []

    def kernel(self, name: str) -> fast_launch.DirectLaunch:
        return fast_launch.DirectLaunch(lambda stream, *addresses: self.calls.append((name, addresses)))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    def maker(shape: Any, dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
        return lambda: torch.empty(tuple(shape), dtype=dtype)

    monkeypatch.setattr(fast_launch, "allocator", maker)
    monkeypatch.setattr(fast_launch, "stream_of", lambda: lambda index: 0)
    monkeypatch.setattr(fast_launch, "current_device", lambda: lambda: 0)
    return Launched()


def prepared(
    launched: Launched, name: str, operands: Any, places: Any, slow: Any = None, scratch: Any = None
) -> tuple[PreparedKernelCall, DeviceKernel]:
    kernel = CORPUS[name](64, 128, BF16)
    made = define_kernel(kernel, choose_plan(kernel, H200))
    ready = DeviceKernel(made, [launched.kernel("main"), launched.kernel("finish") if made.finish else None])
    found = lambda kernel, device: launch_sequence(ready)  # noqa: E731
    one = PreparedKernelCall(slow, operands, text(kernel), places, torch.device("cuda", 0), scratch, found)
    one.ready = one.write_call(launch_sequence(ready))
    return one, ready


def test_addresses_are_in_the_order_of_the_arguments(launched: Launched) -> None:
    call, ready = prepared(launched, "layer_norm_backward", [5, 4, 3, 2, 1, 0], {})
    inputs = [torch.zeros(one.shape, dtype=one.dtype) for one in call.kernel.inputs]
    results = call(inputs[::-1])
    assert [(tuple(y.shape), y.dtype) for y in results] == [(o.shape, o.dtype) for o in call.kernel.outputs]
    (_, main), (_, finish) = launched.calls
    order, named = ready.program.arguments, [x.data_ptr() for x in (*inputs, *results)]
    for at, address in zip(order, main, strict=True):
        assert at >= len(named) or address == named[at]
    partials = [address for at, address in zip(order, main, strict=True) if at >= len(named)]
    lines = [4 * ready.program.plan.programs * cols for _, cols in ready.program.source.partials]
    assert len(partials) == 2
    assert partials[1] - partials[0] >= lines[0], "two lines of partial sums lie over one another"
    assert all(address % 16 == 0 for address in partials)
    assert set(partials) <= set(finish)
    assert call(inputs[::-1])[0].data_ptr() != results[0].data_ptr()


def test_results_go_where_they_are_told(launched: Launched) -> None:
    here = torch.empty(64, 128, dtype=BF16)
    call, _ = prepared(launched, "bias_gelu", [0, 1], {0: lambda env: env[2]})
    (result,) = call([torch.zeros(64, 128, dtype=BF16), torch.zeros(128, dtype=BF16), here])
    assert result is here
    assert here.data_ptr() in launched.calls[0][1]


def test_what_has_a_place_for_good_is_written_into_the_call(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is allocated, and the addresses are those that an ordinary call would have read."""
    kernel = CORPUS["layer_norm_backward"](64, 128, BF16)
    inputs = [torch.zeros(one.shape, dtype=one.dtype) for one in kernel.inputs]
    outputs = [torch.zeros(one.shape, dtype=one.dtype) for one in kernel.outputs]
    scratch, asked = torch.empty(1 << 22, dtype=torch.uint8), list[int]()

    def lasting(size: int) -> Tensor:
        asked.append(size)
        return scratch

    def never(*_: Any) -> Any:
        raise AssertionError("allocated")

    monkeypatch.setattr(fast_launch, "allocator", never)
    mixed = [x if at % 2 else at for at, x in enumerate(inputs)]
    call, ready = prepared(launched, "layer_norm_backward", mixed, dict(enumerate(outputs)), None, lasting)
    results = call(inputs)
    assert all(y is given for y, given in zip(results, outputs, strict=True))
    named = [x.data_ptr() for x in (*inputs, *outputs)]
    (_, main), (_, finish) = launched.calls
    for order, found in ((ready.program.arguments, main), (ready.program.finish_arguments, finish)):
        assert [a for at, a in zip(order, found, strict=True) if at < len(named)] == [
            named[at] for at in order if at < len(named)
        ]
        sums = [a for at, a in zip(order, found, strict=True) if at >= len(named)]
        assert all(0 <= a - scratch.data_ptr() < asked[0] for a in sums)


def test_a_place_that_is_across_memory_is_for_the_launcher(launched: Launched) -> None:
    seen: list[Any] = []
    across = torch.zeros(128, 64, dtype=BF16).T
    call, _ = prepared(launched, "bias_gelu", [0, 1], {0: across}, lambda *given: seen.append(given) or [across])
    call([torch.zeros(64, 128, dtype=BF16), torch.zeros(128, dtype=BF16)])
    assert not launched.calls
    assert len(seen) == 1


def test_what_is_not_contiguous_is_copied_and_what_is_not_aligned_is_for_the_launcher(launched: Launched) -> None:
    seen: list[int] = []

    def slow(inputs: Any, line: str, over: Any) -> list[Tensor]:
        seen.append(inputs[0].data_ptr())
        return []

    call, _ = prepared(launched, "bias_gelu", [0, 1], {}, slow)
    across, b = torch.zeros(128, 64, dtype=BF16).T, torch.zeros(128, dtype=BF16)
    call([across, b])
    assert across.data_ptr() not in launched.calls[0][1]
    assert not seen
    odd = torch.zeros(64 * 128 + 1, dtype=BF16)[1:].view(64, 128)
    call([odd, b])
    assert seen == [odd.data_ptr()]
    with launch.recording(lambda one: None):
        call([across, b])
    assert len(seen) == 2


class Compiled:
    """A compiled kernel of Triton's, of which each version's launcher wants other arguments."""

    function, packed_metadata = 11, (4, 1, 0)

    def __init__(self, **needs: int) -> None:
        self.seen: list[tuple[Any, ...]] = []
        options = {"launch_cooperative_grid": False, "launch_pdl": False, "global_scratch_size": 0} | needs
        types = {"arg_annotations": "annotations", "kernel_signature": "signature"}
        self.run = SimpleNamespace(launch=lambda *args: self.seen.append(args), **options, **types)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, stream: self.seen.append((*grid, stream, "through Triton", *args))


@pytest.mark.parametrize(
    ("version", "needs", "expected"),
    [
        ((3, 6), {}, (False, False, None, None, (4, 1, 0), None, None, None, 64, 128)),
        ((3, 9), {}, (False, False, (4, 1, 0), *[None] * 5, "annotations", "signature", (64, 128))),
        ((3, 7), {}, None),
        ((3, 9), {"global_scratch_size": 8}, None),
    ],
)
def test_each_triton_gets_the_arguments_that_it_wants(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], needs: dict[str, int], expected: tuple[Any, ...] | None
) -> None:
    monkeypatch.setattr(launch, "triton_version", lambda: version)
    compiled = Compiled(**needs)
    fast_launch.direct_launch(compiled, (2, 3, 1))(7, 64, 128)
    assert compiled.seen == [(2, 3, 1, 7, *(("through Triton", 64, 128) if expected is None else (11, *expected)))]


def test_nothing_is_prepared_for_a_cpu() -> None:
    assert inplace_call.prepare([0, 1], text(CORPUS["bias_gelu"](8, 16, BF16)), {}, torch.device("cpu")) is None


def test_a_launched_program_calls_what_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands by slots, new parameters and state over the old ones: the same step, bit for bit."""
    model, x = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4)), torch.randn(8, 16)
    program = shardc.compile(
        model,
        {"input": x},
        mesh="dp=1",
        plan={"fuse": True},
        loss=lambda out, batch: out.square().mean(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.1),
    )

    def step() -> dict[str, Tensor]:
        executor = BodyCode(program.body, rank_context(program.mesh, 0, None), 0, torch.device("cpu"))  # type: ignore[arg-type]
        held = {name: value.clone() for name, value in program.inputs().items()}
        return {f"{port.role} {port.name}": y for port, y in executor.run(held, [held]).items()}

    expected, calls = step(), list[int]()

    def prepare(
        slots: Any, line: str, places: Any, device: torch.device, scratch: Any
    ) -> Callable[[list[Any]], list[Tensor]]:
        def call(env: list[Any]) -> list[Tensor]:
            calls.append(len(places))
            return inplace_call.run([env[s] for s in slots], line, {at: place(env) for at, place in places.items()})

        return call

    monkeypatch.setitem(INTO, FUSED, replace(INTO[FUSED], prepare=prepare))
    found = step()
    assert max(calls) > 1, "no call of the optimizer's writes its results over what it reads"
    assert found.keys() == expected.keys()
    for name, y in found.items():
        assert torch.equal(y, expected[name]), name
