"""Loops over time: which become one op, that it computes what the loop does, and which are left as they are.

Longer than 400 lines: each form of a loop is a method of one module.
"""

from __future__ import annotations

import importlib
import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.frontend import rolled_loops
from shardc.frontend.rolled_loops import active
from shardc.ir.ops.scan import SCAN, SCAN_BACKWARD

STEPS, WIDTH, HIDDEN = 20, 4, 5


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)
        self.lin, self.act = nn.Linear(WIDTH, WIDTH), nn.Tanh()

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.lin(x) + h @ self.w)
        return self.act(gate * h + (1.0 - gate) * x)


class Noisy(nn.Module):
    """A cell that keeps a count of its calls."""

    calls = 0

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        self.calls += 1
        return h * 0.5 + x * self.calls


class Loops(nn.Module):
    """A method for each form; forward calls one."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.wx, self.wh = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.rnn, self.gru, self.lstm = (
            nn.RNNCell(WIDTH, HIDDEN),
            nn.GRUCell(WIDTH, HIDDEN),
            nn.LSTMCell(WIDTH, HIDDEN),
        )
        self.a, self.u = nn.Parameter(torch.rand(HIDDEN)), nn.Parameter(torch.randn(HIDDEN, HIDDEN))
        self.cell, self.noisy = Cell(), Noisy()
        self.hooked = nn.Linear(WIDTH, WIDTH)
        self.hooked.register_forward_hook(lambda _module, _args, out: out * 2)
        self.count = 0

    def forward(self, x: Tensor) -> Any:
        self.noisy.calls = 0
        return getattr(self, self.form)(x)

    # -------------------------------------------------------------- one op
    def leaky(self, x: Tensor) -> Any:
        z = self.wx(x)
        h = torch.zeros_like(z[:, 0])
        ys = []
        for t in range(x.shape[1]):
            h = torch.sigmoid(self.a) * h + (1 - torch.sigmoid(self.a)) * z[:, t]
            ys.append(h)
        return torch.stack(ys, 1)

    def elman(self, x: Tensor) -> Any:
        z = self.wx(x)
        h = torch.zeros(x.shape[0], HIDDEN, dtype=x.dtype)
        ys = []
        for t in range(x.shape[1]):
            h = torch.tanh(z[:, t] + self.wh(h))
            ys.append(h)
        return torch.stack(ys, dim=1), h

    def widened(self, x: Tensor) -> Any:
        z = self.wx(x)
        h = torch.zeros(HIDDEN, dtype=x.dtype)  # the first step broadcasts it
        out = torch.empty_like(z)
        for t in range(x.shape[1]):
            h = torch.tanh(z[:, t] + h @ self.u)
            out[:, t] = h
        return out

    def cells(self, x: Tensor) -> Any:
        h = x.new_zeros(x.shape[0], HIDDEN)
        g = x.new_zeros(x.shape[0], HIDDEN)
        ys = []
        for t in range(x.size(1)):
            h = self.gru(x[:, t], h)
            g = self.rnn(x[:, t], g)
            ys.append((h * g).unsqueeze(1))
        return torch.cat(ys, dim=1)

    def lstm_states(self, x: Tensor) -> Any:
        state = (x.new_zeros(x.shape[0], HIDDEN), x.new_zeros(x.shape[0], HIDDEN))
        ys = []
        for t in range(x.size(1)):
            state = self.lstm(x[:, t], state)
            ys.append(state[0])
        return torch.stack(ys, -1), state[1]

    def submodule(self, x: Tensor) -> Any:
        h = x.new_zeros(x.shape[0], WIDTH)
        ys = []
        for t in range(x.size(1)):
            h = self.cell(h, x[:, t : t + 1].squeeze(1))
            ys.append(h)
        return ys[-1] + torch.stack(ys, 1).sum(1) * len(ys)

    def shifted(self, x: Tensor) -> Any:
        before = x[:, 0]
        ys = []
        for t in range(x.size(1)):
            current = x[:, t]
            ys.append(current * before + before.exp())
            before = current
        return torch.stack(ys, 1), before

    def later(self, x: Tensor) -> Any:
        h = x[:, 0]
        ys = [h]
        for t in range(x.size(1) - 1):
            h = h * 0.5 + x[:, t + 1]
            ys.append(h)
        return torch.stack(ys, 1)

    def outer_products(self, x: Tensor) -> Any:
        s = x.new_zeros(x.shape[0], WIDTH, WIDTH)
        out = torch.zeros_like(x)
        for t in range(x.size(1)):
            s = 0.9 * s + x[:, t].unsqueeze(-1) * x[:, t].unsqueeze(-2)
            out[:, t] = (s @ x[:, t].unsqueeze(-1)).squeeze(-1)
        return out

    def numbers(self, x: Tensor) -> Any:
        h = x[:, 0]
        ys = []
        for t in range(x.size(1)):
            a, b = x[:, t].sigmoid(), x[:, t].exp()
            h = h * (1 - a) / 2 + 2**a - b**2 / 3 + 1 / b - (h.tanh() - 1) ** 2 + (3 - h) * 0.1
            ys.append(h.clone())
        return torch.stack(ys, 1)

    def windows(self, x: Tensor) -> Any:
        h = x.new_zeros(x.shape[0], WIDTH)
        out = torch.ones(x.shape[0], x.size(1) + 2, WIDTH, dtype=x.dtype)
        for t in range(x.size(1) // 2):
            part = x[:, t * 2 : (t + 1) * 2]
            out[:, t * 2 : (t + 1) * 2] = part + h[:, None]
            h = h * 0.5 + torch.where(part > 0, part, 0.0).sum(1)
        return out

    def known_by_two_names(self, x: Tensor) -> Any:
        ys: list[Tensor] = []
        zs = ys
        h = x[:, 0]
        for t in range(x.size(1)):
            h = h * 0.5 + x[:, t]
            ys.append(h)
        return torch.stack(zs, 1)

    # -------------------------------------------------------------- left as it is
    def counted(self, x: Tensor) -> Any:
        h = x[:, 0]
        n = 0
        for t in range(x.size(1)):
            n = n + 1
            h = h * 0.5 + x[:, t] / n
        return h

    def branching(self, x: Tensor) -> Any:
        h = x[:, 0]
        for t in range(x.size(1)):
            h = h * 0.5 + (x[:, t] if t % 2 else -x[:, t])
        return h

    def none_at_first(self, x: Tensor) -> Any:
        h: Any = None
        for t in range(x.size(1)):
            h = x[:, t] if h is None else h * 0.5 + x[:, t]
        return h

    def attribute(self, x: Tensor) -> Any:
        h = x[:, 0]
        self.count = 0
        for t in range(x.size(1)):
            self.count += 1
            h = h * 0.5 + x[:, t] * self.count
        self.count = 0
        return h

    def stateful_module(self, x: Tensor) -> Any:
        h = x[:, 0]
        for t in range(x.size(1)):
            h = self.noisy(h, x[:, t])
        self.noisy.calls = 0
        return h

    def hook(self, x: Tensor) -> Any:
        h = x[:, 0]
        for t in range(x.size(1)):
            h = h * 0.5 + self.hooked(x[:, t])
        return h

    def in_place(self, x: Tensor) -> Any:
        h = x[:, 0].clone()
        ys = []
        for t in range(x.size(1)):
            h += x[:, t]
            ys.append(h)
        return torch.stack(ys, 1)

    def read_back(self, x: Tensor) -> Any:
        out = x.clone()
        for t in range(x.size(1) - 1):
            out[:, t + 1] = out[:, t] * 0.5 + x[:, t]
        return out

    def read_by_another_name(self, x: Tensor) -> Any:
        out = torch.cat([x, x[:, :1]], 1)
        view = out.view(out.shape)
        h = torch.zeros_like(x[:, 0])
        for t in range(x.size(1)):
            h = h * 0.5 + view[:, t]
            out[:, t + 1] = h
        return out

    def length_of_list(self, x: Tensor) -> Any:
        h = x[:, 0]
        ys = []
        for t in range(x.size(1)):
            h = h + x[:, t] * len(ys)
            ys.append(h)
        return torch.stack(ys, 1)

    def cut_gradient(self, x: Tensor) -> Any:
        h = x[:, 0]
        for t in range(x.size(1)):
            h = h.detach() * 0.5 + x[:, t]
        return h

    def few_steps(self, x: Tensor) -> Any:
        h = x[:, 0]
        for t in range(5):
            h = h * 0.5 + x[:, t]
        return h

    def values_of_list(self, x: Tensor) -> Any:
        h = x[:, 0]
        parts = x.unbind(1)
        for t in range(x.size(1)):
            h = h * 0.5 + parts[t]
        return h


ONE_OP = ("leaky", "elman", "widened", "cells", "lstm_states", "submodule", "shifted", "later", "outer_products",
          "numbers", "windows", "known_by_two_names")  # fmt: skip
LEFT = ("counted", "branching", "none_at_first", "attribute", "stateful_module", "hook", "in_place", "read_back",
        "read_by_another_name", "length_of_list", "cut_gradient", "few_steps", "values_of_list")  # fmt: skip


def gradients(run: Callable[..., Any], leaves: list[Any]) -> list[Tensor]:
    """What a function returns, and the gradients of all it depends on."""
    found = run()
    outs = [t for t in (found if isinstance(found, (tuple, list)) else [found]) if isinstance(t, Tensor)]
    generator = torch.Generator().manual_seed(1)
    total = sum((t * torch.randn(t.shape, dtype=t.dtype, generator=generator)).sum() for t in outs)
    assert isinstance(total, Tensor)
    grads = torch.autograd.grad(total, [t for t in leaves if t.requires_grad], allow_unused=True)
    return [*outs, *(torch.zeros(()) if g is None else g for g in grads)]


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The bodies of the scans that loops have become."""
    bodies: list[str] = []
    scan = rolled_loops.scan
    monkeypatch.setattr(rolled_loops, "scan", lambda body, *rest: bodies.append(str(body)) or scan(body, *rest))
    return bodies


@pytest.mark.parametrize("form", [*ONE_OP, *LEFT])
def test_what_a_loop_computes(form: str, scans: list[str]) -> None:
    torch.manual_seed(0)
    model = Loops(form).double()
    x = torch.randn(3, STEPS, WIDTH, dtype=torch.float64, requires_grad=True)
    leaves = [x, *model.parameters()]
    expected = gradients(lambda: model(x), leaves)
    with active(model):
        actual = gradients(lambda: model(x), leaves)
    assert len(scans) == (form in ONE_OP)
    for mine, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def test_code_is_put_back() -> None:
    before = Loops.elman.__code__
    model = Loops("elman")
    with active(model):
        assert Loops.elman.__code__ is not before
        assert Loops.elman.__code__.co_firstlineno == before.co_firstlineno
    assert Loops.elman.__code__ is before


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", ["elman", "leaky", "cells", "widened"])
@pytest.mark.parametrize("mesh", ["dp=2", "dp=3"])
def test_compiled(form: str, mesh: str) -> None:
    torch.manual_seed(0)
    model = Loops(form)
    batch = torch.randn(6, STEPS, WIDTH)

    def loss(out: Any, _batch: Any) -> Tensor:
        return (out[0] if isinstance(out, tuple) else out).square().mean()

    program = shardc.compile(model, batch, mesh=mesh, plan={"inputs": {"*": "dp, -, -"}}, loss=loss)
    calls = Counter(node.target for node in program.body.calls())
    assert calls[SCAN] == calls[SCAN_BACKWARD] == 1
    assert program.verify().ok
    longer = shardc.compile(
        model, torch.randn(6, 5 * STEPS, WIDTH), mesh=mesh, plan={"inputs": {"*": "dp, -, -"}}, loss=loss
    )
    assert sum(1 for _ in longer.body.calls()) == sum(1 for _ in program.body.calls())


# ---------------------------------------------------------------------- functions of a library
def of_library(model: str, name: str) -> Any:
    pytest.importorskip("transformers")
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    function = getattr(module, name, None)
    return function if function is not None else pytest.skip(f"this transformers has no {name}")


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape)


LIBRARY: dict[tuple[str, str], tuple[Callable[[int], list[Any]], dict[str, Any]]] = {
    ("mamba", "mamba_selective_scan"): (
        lambda s: [drawn(2, 6, s), drawn(2, 6, s), -torch.rand(6, 4), drawn(2, 4, s), drawn(2, 4, s), drawn(6)],
        {"delta_softplus": True, "return_last_state": True},
    ),
    ("qwen3_next", "torch_recurrent_gated_delta_rule"): (
        lambda s: [drawn(2, s, 2, 4), drawn(2, s, 2, 4), drawn(2, s, 4, 6), -torch.rand(2, s, 4), torch.rand(2, s, 4)],
        {"output_final_state": True, "use_qk_l2norm_in_kernel": True},
    ),
    ("qwen3_next", "torch_chunk_gated_delta_rule"): (
        lambda s: [drawn(2, s, 2, 4), drawn(2, s, 2, 4), drawn(2, s, 4, 6), -torch.rand(2, s, 4), torch.rand(2, s, 4)],
        {"output_final_state": True, "use_qk_l2norm_in_kernel": True, "chunk_size": 2},
    ),
    ("kimi_linear", "recurrent_kimi_delta_attention"): (
        lambda s: [drawn(2, s, 2, 4), drawn(2, s, 2, 4), drawn(2, s, 2, 6), -torch.rand(2, s, 2, 4),
                   torch.rand(2, s, 2), None, True],
        {"use_qk_l2norm_in_kernel": True},
    ),
    ("kimi_linear", "chunk_kimi_delta_attention"): (
        lambda s: [drawn(2, s, 2, 4), drawn(2, s, 2, 4), drawn(2, s, 2, 6), -torch.rand(2, s, 2, 4),
                   torch.rand(2, s, 2)],
        {"use_qk_l2norm_in_kernel": True, "chunk_size": 2},
    ),
    ("rwkv", "rwkv_linear_attention_cpu"): (
        lambda s: [drawn(6), drawn(6), drawn(2, s, 6), drawn(2, s, 6)],
        {},
    ),
    ("xlstm", "mlstm_recurrent_sequence_native"): (
        lambda s: [drawn(2, 2, s, 4), drawn(2, 2, s, 4), drawn(2, 2, s, 6), drawn(2, 2, s), drawn(2, 2, s)],
        {"return_last_states": False},
    ),
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("model", "name"), LIBRARY, ids=lambda name: str(name))
@pytest.mark.parametrize("steps", [20, 71])
def test_functions_of_transformers(model: str, name: str, steps: int, scans: list[str]) -> None:
    """In float32, which most of them ask for by name."""
    function = of_library(model, name)
    torch.manual_seed(0)
    arguments, options = LIBRARY[model, name][0](steps), LIBRARY[model, name][1]
    leaves = [t.requires_grad_() for t in arguments if isinstance(t, Tensor)]
    expected = gradients(lambda: function(*arguments, **options), leaves)
    holder = types.new_class("Holder", (nn.Module,), exec_body=lambda body: body.update(__module__=function.__module__))
    with active(holder()):
        actual = gradients(lambda: function(*arguments, **options), leaves)
    assert len(scans) == 1
    for mine, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4 * float(other.detach().abs().max()) + 1e-6)
