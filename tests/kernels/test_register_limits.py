"""Register limits: kernels that would spill a little get a higher limit, and others none."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels_triton.gate import gate
from kernels_triton.launch import launch, register_limits
from kernels_triton.launch.machine_code import MachineCode, machine_code
from kernels_triton.ops.registry import TEMPLATES

pytestmark = pytest.mark.skipif(not launch.HAS_TRITON, reason="Triton is not installed: nothing can be compiled here")


def compiler(monkeypatch: pytest.MonkeyPatch, needs: int, takes: int, limits: list[int]) -> Callable[[int], Any]:
    """Of a kernel that needs so many registers, and takes so many without a limit; which are tried is noted."""

    def read(cubin: int) -> MachineCode:
        registers = min(cubin, needs) if cubin else takes
        return MachineCode(registers, 8 * (registers < needs), b"")

    def compiled(registers: int) -> Any:
        limits.append(registers)
        return SimpleNamespace(asm={"cubin": registers})

    monkeypatch.setattr(register_limits, "machine_code", read)
    return compiled


@pytest.mark.parametrize(
    ("needs", "takes", "warps", "tried", "found"),
    [
        (80, 80, 4, [0], 0),  # it spills nothing
        (83, 80, 4, [0, 88], 88),
        (83, 77, 4, [0, 80, 88], 88),
        (250, 240, 4, [0, 248], 0),  # no thread has 256
        (140, 128, 16, [0], 0),  # nor do so many threads have more
        (140, 128, 8, [0, 136, 144], 144),
        (200, 80, 4, [0, 88, 96, 104, 112], 0),  # it is not a few that it lacks
    ],
)
def test_the_next_eight_registers_until_nothing_is_spilled(
    monkeypatch: pytest.MonkeyPatch, needs: int, takes: int, warps: int, tried: list[int], found: int
) -> None:
    limits: list[int] = []
    kernel, registers = register_limits.compile_without_spills(compiler(monkeypatch, needs, takes, limits), warps)
    assert (limits, registers) == (tried, found)
    assert kernel.asm["cubin"] == found


def test_what_a_schedule_says_is_compiled_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int] = []
    kernel, registers = register_limits.compile_without_spills(compiler(monkeypatch, 100, 80, limits), 4, registers=72)
    assert (kernel.asm["cubin"], registers, limits) == (72, 72, [72])


def test_a_launch_compiles_the_first_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """And again for what Triton makes another kernel of: 16 that divides, 1, a dtype, a constant, warps."""
    limits: list[int] = []
    compiled = compiler(monkeypatch, 83, 80, limits)

    def warmup(*args: Any, grid: tuple[int, int, int], maxnreg: int = 0, **constants: Any) -> Any:
        return compiled(maxnreg)

    monkeypatch.setattr(launch, "kernel", lambda name: SimpleNamespace(warmup=warmup))
    x = torch.empty(8)
    one = launch.Launch("test_spills.kernel", (1, 1, 1), (x, 3, 0.5, None), {"BLOCK": 8}, 4)
    assert [launch.register_limit(one), launch.register_limit(one)] == [88, 88]
    assert limits == [0, 88]
    others = (
        replace(one, args=(x.half(), 3, 0.5, None)),
        replace(one, args=(x, 3, 0.5, x)),
        replace(one, args=(x, 16, 0.5, None)),
        replace(one, args=(x, 1, 0.5, None)),
        replace(one, args=(x, 1 << 31, 0.5, None)),
        replace(one, args=(torch.empty(9)[1:], 3, 0.5, None)),
        replace(one, constants={"BLOCK": 16}),
        replace(one, warps=8),
    )
    assert launch.register_limit(replace(one, args=(x.clone(), 5, 1.5, None))) == 88
    assert limits == [0, 88]
    for at, other in enumerate(others, 2):
        assert launch.register_limit(other) == 88
        assert limits == [0, 88] * at


@pytest.mark.parametrize("asm", [{}, {"cubin": b"no machine code at all"}, {"hsaco": b""}])
def test_what_cannot_be_read_runs_as_it_is(asm: dict[str, bytes]) -> None:
    kernel = SimpleNamespace(asm=asm)
    assert register_limits.compile_without_spills(lambda registers: kernel, 4) == (kernel, 0)
    assert register_limits.compile_without_spills(lambda registers: None, 4) == (None, 0)


def test_where_triton_interprets_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "kernel", lambda name: SimpleNamespace())
    monkeypatch.setattr(launch, "is_interpreting", lambda: True)
    assert launch.register_limit(launch.Launch("test_spills.interpreted", (1, 1, 1), (torch.empty(8),), {}, 4)) == 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("arch", "template", "cols"), [(80, "layer_norm_backward", 1024), (90, "rms_norm_backward", 5001)]
)
def test_kernels_that_would_spill_a_little(
    monkeypatch: pytest.MonkeyPatch, arch: int, template: str, cols: int
) -> None:
    """Of bfloat16 with weights in float32, as mixed precision has, with the assembler of Triton 3.9. RMSNorm's backward
    is in no graph, and the gate compiles it of other widths: `kernels_triton.ops` takes any."""
    of_this_width = gate.template_jobs(TEMPLATES[template], cols, torch.bfloat16, {"weight": "f32[cols]"}, arch)
    found = [
        one
        for one in (*gate.compile_jobs(arch), *of_this_width)
        if (one.template, one.cols) == (template, cols)
        and {kind for _, kind in one.signature if kind.startswith("*")} == {"*bf16", "*fp32"}
        and "norm_backward" in one.kernel
    ]
    assert found
    assert [line["spills"] for line in gate.measure_jobs(found, arch)] == [0] * len(found)
    if launch.triton_version() == (3, 9):
        monkeypatch.setattr(register_limits, "TRIES", 0)
        assert any(machine_code(gate.compile_job(one, arch).asm["cubin"]).stack for one in found)
