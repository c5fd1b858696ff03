"""Loops over time that one step does not stand for, or only on a closer look: each computes what eager PyTorch does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardc.frontend import rolled_loops
from shardc.frontend.loop_source import with_rolled_loops
from shardc.frontend.rolled_loops import active

STEPS, WIDTH = 16, 4


class Hostile(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.lin, self.cell = nn.Linear(WIDTH, WIDTH), nn.LSTMCell(WIDTH, WIDTH)
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.4)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(3, WIDTH))

    def forward(self, x: Tensor) -> Any:
        return getattr(self, self.form)(x)

    # -------------------------------------------------------------- operations
    def power_of_number(self, x: Tensor) -> Any:
        h = x[:, 0]
        for t in range(x.size(1)):
            h = h * 0.5 + 2.0 ** x[:, t] + torch.pow(3.0, x[:, t])
        return h

    def product_with_itself(self, x: Tensor) -> Any:
        h = self.w
        for t in range(x.size(1)):
            u = self.lin(x[:, t]).transpose(0, 1)
            h = h * 0.5 + F.linear(u, u) * 0.1
        return h

    def double_precision(self, x: Tensor) -> Any:
        x = x.float()
        h = x[:, 0]
        for t in range(x.size(1)):
            h = h.double() * 0.9 + x[:, t]
        return h

    def sum_before_broadcast(self, x: Tensor) -> Any:
        h = x[0, 0]
        ys = []
        for t in range(x.size(1)):
            ys.append(h.sum())
            h = torch.tanh(h * 0.5 + x[:, t])
        return torch.stack(ys), h

    # -------------------------------------------------------------- what is known of a loop behind it
    def last_step(self, x: Tensor) -> Any:
        h = x[:, 0]
        for t in range(x.size(1)):
            h = h * 0.5 + x[:, t]
            last = t + 1
        return h * x[:, last - 1] * last + t

    def containers(self, x: Tensor) -> Any:
        h = x[:, 0]
        for t in range(x.size(1)):
            h = h * 0.5 + x[:, t]
            pair, named = [h, h * 2], {"a": h}
        return pair[0] + pair[1] * named["a"]

    def text_of_step(self, x: Tensor) -> Any:
        h = x[:, 0]
        name = ""
        for t in range(x.size(1)):
            name = f"{t}"
            h = h * 0.5 + x[:, t]
        return h * len(name)

    def state_of_outer_loop(self, x: Tensor) -> Any:
        h = torch.zeros_like(x[:, 0])
        for layer in self.layers:
            out = torch.zeros_like(x)
            for t in range(x.size(1)):
                h = torch.tanh(layer(h)) + x[:, t]
                out[:, t] = h
            x = out
        return x

    def list_of_outer_loop(self, x: Tensor) -> Any:
        h = torch.zeros_like(x[:, 0])
        ys = []
        for part in x.split(STEPS // 2, 1):
            for t in range(part.size(1)):
                h = h * 0.5 + part[:, t]
                ys.append(h)
        return torch.stack(ys, 1)

    def chunks(self, x: Tensor) -> Any:
        h = torch.zeros_like(x[:, 0])
        ys = []
        for c in range(2):
            for t in range(STEPS // 2):
                h = h * 0.5 + x[:, c * (STEPS // 2) + t]
                ys.append(h)
        return torch.stack(ys, 1)

    # -------------------------------------------------------------- one value by several names
    def two_orders(self, x: Tensor) -> Any:
        h = self.w
        ys, zs = [], []
        for t in range(x.size(1)):
            h = torch.tanh(h @ self.lin.weight) + x[0, t]
            ys.append(h)
            zs.append(h.transpose(0, 1))
            last = h.transpose(0, 1).unsqueeze(0)
        return torch.stack(ys, 1), torch.stack(zs, 1), last

    def one_list_twice(self, x: Tensor) -> Any:
        h = x[:, 0]
        ys = zs = []
        for t in range(x.size(1)):
            h = h * 0.5 + x[:, t]
            ys.append(h)
            zs.append(-h)
        return torch.stack(ys, 1)

    def view_of_what_is_stored(self, x: Tensor) -> Any:
        out = torch.cat([x, x[:, :1]], 1)
        view = out.view(out.shape)
        h = torch.zeros_like(x[:, 0])
        for t in range(x.size(1)):
            h = h * 0.5 + view[:, t].exp()
            out[:, t + 1] = h * 0.1
        return out

    def variable_of_inner_function(self, x: Tensor) -> Any:
        h = x[:, 0]

        def step(part: Tensor) -> Tensor:
            return torch.tanh(h) + part

        for t in range(x.size(1)):
            h = step(x[:, t])
        return h

    # -------------------------------------------------------------- what is changed in place
    def tensor_in_place(self, x: Tensor) -> Any:
        scales = [self.scale.clone()]
        h = x[:, 0].detach()
        for t in range(x.size(1)):
            scale = scales[0]
            scale *= 0.9
            h = h.detach() * 0.5 + scale + x[:, t]
        return h

    def list_in_place(self, x: Tensor) -> Any:
        h = x[:, 0]
        ys = []
        for t in range(x.size(1)):
            h = h * 0.5 + x[:, t]
            ys += [h]
        return torch.stack(ys, 1)

    def append_as_value(self, x: Tensor) -> Any:
        h = x[:, 0]
        ys = []
        for t in range(x.size(1)):
            h = h * 0.5 + x[:, t]
            _ = ys.append(h)  # type: ignore[func-returns-value]
        return torch.stack(ys, 1)

    # -------------------------------------------------------------- around the loop
    def checkpointed(self, x: Tensor) -> Any:
        return checkpoint(self._cells, x, use_reentrant=False)

    def _cells(self, x: Tensor) -> Any:
        h = c = torch.zeros_like(x[:, 0])
        ys = []
        for t in range(x.size(1)):
            h, c = self.cell(x[:, t], (h, c))
            ys.append(h)
        return torch.stack(ys, 1)


FORMS = [name for name, value in vars(Hostile).items() if callable(value) and name[0] != "_" and name != "forward"]
ROLLED = ("power_of_number", "last_step", "state_of_outer_loop", "list_of_outer_loop", "chunks", "two_orders",
          "checkpointed")  # fmt: skip


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    bodies: list[str] = []
    scan = rolled_loops.scan
    monkeypatch.setattr(rolled_loops, "scan", lambda body, *rest: bodies.append(str(body)) or scan(body, *rest))
    return bodies


def results(run: Callable[[], Any], leaves: list[Tensor]) -> list[Tensor]:
    found = run()
    outs: list[Tensor] = list(found) if isinstance(found, tuple) else [found]
    generator = torch.Generator().manual_seed(1)
    total = torch.stack([(t * torch.randn(t.shape, dtype=t.dtype, generator=generator)).sum() for t in outs]).sum()
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    return [*outs, *(torch.zeros(()) if g is None else g for g in grads)]


@pytest.mark.parametrize("form", FORMS)
def test_as_eager(form: str, scans: list[str]) -> None:
    torch.manual_seed(0)
    model = Hostile(form).double()
    x = torch.randn(3, STEPS, WIDTH, dtype=torch.float64, requires_grad=True)
    leaves = [x, *model.parameters()]
    expected = results(lambda: model(x), leaves)
    with active(model):
        actual = results(lambda: model(x), leaves)
    assert bool(scans) == (form in ROLLED)
    for mine, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def test_a_file_that_has_changed_since_it_was_imported(tmp_path: Path) -> None:
    path = tmp_path / "changed.py"
    text = "def f(x):\n    h = x[:, 0]\n    for t in range(x.size(1)):\n        h = h * 0.5 + x[:, t]\n    return h\n"
    names: dict[str, Any] = {}
    path.write_text(text)
    exec(compile(text.replace("0.5", "0.7"), str(path), "exec", dont_inherit=True), names)
    assert with_rolled_loops(names["f"].__code__) is None
    exec(compile(text, str(path), "exec", dont_inherit=True), names)
    assert with_rolled_loops(names["f"].__code__) is not None
