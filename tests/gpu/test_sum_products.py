"""Products of 16-bit operands that are added in float32 to the sums over microbatches, by the GPU's products alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import shardc
from examples.gpt2 import gpt2
from shardc.ir.graph import Port
from shardc.ir.ops.accumulate import ACCUMULATE_WGRAD, add_wgrad, write_wgrad
from shardc.passes.sum_products import SumProducts
from shardc.runtime.execute.body_code import BodyCode
from shardc.runtime.execute.instructions import rank_context

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
LAYOUTS = ["matrices", "batches", "odd", "sliced", "transposed", "expanded", "empty"]


def operands(layout: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A gradient and an input as backward has them."""
    torch.manual_seed(0)
    match layout:
        case "matrices":
            g, x = torch.randn(64, 96), torch.randn(64, 32)
        case "batches":
            g, x = torch.randn(4, 16, 96), torch.randn(4, 16, 32)
        case "odd":
            g, x = torch.randn(3, 7, 13), torch.randn(3, 7, 5)
        case "sliced":  # columns of wider matrices, as a gradient of q, k and v is cut
            g, x = torch.randn(4, 16, 96).to(CUDA, dtype)[..., 32:64], torch.randn(4, 16, 64).to(CUDA, dtype)[..., 1:9]
        case "transposed":
            g, x = torch.randn(96, 64).t(), torch.randn(4, 32, 16).movedim(1, -1).flatten(0, 1)
        case "expanded":  # the gradient of a sum
            g, x = torch.ones(1, 1).to(CUDA, dtype).expand(64, 96), torch.randn(64, 32)
        case _:
            g, x = torch.randn(0, 96), torch.randn(0, 32)
    return g.to(CUDA, dtype), x.to(CUDA, dtype)


def close(found: Tensor, exact: Tensor, g: Tensor, x: Tensor, before: float = 0.0) -> None:
    """As near as sums in float32 are: a result that was rounded to 16 bits is not."""
    sizes = g.double().abs().flatten(0, -2).t() @ x.double().abs().flatten(0, -2) + abs(before)
    assert ((found.double() - exact).abs() <= 3e-5 * sizes + 1e-9).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_made_written_and_added(layout: str, dtype: torch.dtype) -> None:
    g, x = operands(layout, dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    exact = g.double().flatten(0, -2).t() @ x.double().flatten(0, -2)
    term = ACCUMULATE_WGRAD(g, x, wide)
    assert term.dtype == wide
    assert term.is_contiguous()
    close(term, exact, g, x)

    flat = torch.full((term.numel() + 8,), 7.0, dtype=wide, device=CUDA)  # from an odd element on, as in a bucket
    place = flat[3:-5].view(term.shape)
    assert write_wgrad(g, x, wide, out=place).data_ptr() == place.data_ptr() == flat.data_ptr() + 3 * flat.itemsize
    close(place, exact, g, x)
    for added in (2, 3):
        assert add_wgrad(place, g, x).data_ptr() == place.data_ptr()
        close(place, added * exact, g, x, 2 * float(exact.abs().max()))
    assert flat[:3].eq(7).all()
    assert flat[-5:].eq(7).all()


class Called(TorchDispatchMode):
    """The names of all calls that make tensors of memory of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_one_call_and_no_memory(dtype: torch.dtype) -> None:
    g, x = (torch.randn(2, 64, 2048, device=CUDA, dtype=dtype) for _ in range(2))
    total = torch.zeros(2048, 2048, device=CUDA)
    add_wgrad(total, g, x)  # cuBLAS allocates its workspace
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with Called() as called:
        add_wgrad(total, g, x)
    assert [name for name in called.names if "view" not in name] == ["aten.addmm.dtype_out"]
    assert torch.cuda.max_memory_allocated() - before < 1 << 20


def test_a_captured_product_is_added_at_each_replay() -> None:
    g, x = operands("batches", torch.bfloat16)
    total = torch.zeros(96, 32, device=CUDA)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        add_wgrad(total, g, x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add_wgrad(total, g, x)
    total.zero_()
    graph.replay()
    graph.replay()
    close(total, 2 * g.double().flatten(0, -2).t() @ x.double().flatten(0, -2), g, x)


def step(program: shardc.Program, device: torch.device) -> dict[str, Tensor]:
    """The loss, gradients and new parameters of one step."""
    trainer = program.launch()
    held = {name: x.to(device, copy=True) for name, x in (trainer.state | trainer.rates()).items()}
    feeds = trainer._programs.first.feeding.feeds(program.sample, trainer.seed, trainer.steps)  # pyright: ignore[reportPrivateUsage]
    code = BodyCode(program.body, rank_context(program.mesh, 0, None), 0, device)  # type: ignore[arg-type]
    outputs: dict[Port, Tensor] = code.run(held, [{name: x.to(device) for name, x in feed.items()} for feed in feeds])
    return {f"{port.role} {port.name}": x.cpu() for port, x in outputs.items() if x is not None}


@pytest.mark.parametrize(("precision", "most"), [(None, 1e-4), ("bf16", 3e-2), ("fp16", 1e-2)])
@pytest.mark.parametrize("fuse", [False, True])
def test_a_step_of_several_microbatches_is_the_cpus(
    fuse: bool, precision: str | None, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-2 of two layers; each gradient by its relative error, also beside terms that are made and then added."""

    def compiled() -> shardc.Program:
        model, batch = gpt2(batch=8, seq=32, layers=2, vocab=128, heads=4, width=64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
        plan = {"accumulate": 4, "precision": precision, "fuse": fuse}
        return shardc.compile(model, batch, mesh="dp=1", plan=plan, optimizer=optimizer)

    program = compiled()
    assert len(program.body.calls_of(ACCUMULATE_WGRAD)) >= 8
    here, there = step(program, torch.device("cpu")), step(program, CUDA)
    monkeypatch.setattr(SumProducts, "run", lambda _, graph: graph)
    plain = compiled()
    assert not plain.body.calls_of(ACCUMULATE_WGRAD)
    added = step(plain, CUDA)
    assert here.keys() == there.keys() == added.keys()
    assert sum(name.startswith("param ") for name in here) > 20
    for name, exact in here.items():
        for found in (there[name], added[name]):
            error = float((found.double() - exact.double()).norm() / (exact.double().norm() + 1e-6))
            assert error < most, f"{name}: {error:.2g}"
