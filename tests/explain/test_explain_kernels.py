"""Kernels are explained by what the program itself is: calls, bytes and reasons add up to it, and goldens show them."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardc
from kernels_triton.match.op import KERNELS
from shardc import ShardcError
from shardc.explain.collective import Explanation
from shardc.explain.fusion import KernelExplanation, fusions, unfused
from shardc.ir.graph import info
from shardc.passes.fusion.analysis.traffic import traffic
from tests.passes.test_fuse_legal import Scaled


class Layer(nn.Module):
    """A norm that is a template's, products, a GELU, and what no template is."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(functional.gelu(self.up(self.norm(x))))
        return torch.sin(x).cumsum(-1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.h:
            x = layer(x)
        return x.square().mean()


def net(mesh: str = "dp=2", optimizer: bool = False, **plan: Any) -> shardc.Program:
    torch.manual_seed(0)
    model = Net()
    made = torch.optim.AdamW(model.parameters()) if optimizer else None
    wanted = {"fuse": True, "bucket": False, "inputs": {"x": "dp, -"}, **plan}
    return shardc.compile(model, (torch.ones(16, 8),), mesh=mesh, plan=wanted, optimizer=made)


EVERYTHING = {"optimizer": True, "accumulate": 2, "clip_grad_norm": 1.0, "precision": "bf16", "bucket": True}
PLANS: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {**EVERYTHING, "recompute": "full", "storage": {"zero": 3, "axes": ["dp"]}},
    "part of it": {"fuse": {"exclude": ["sin", "h.0.norm"], "templates": ["layer_norm"]}},
}


@cache
def planned(name: str) -> shardc.Program:
    return net(**PLANS[name])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", PLANS)
def test_calls_and_bytes_add_up_to_the_program(name: str) -> None:
    """Each call of the body without kernels is in one place; all bytes are those that the summary counts."""
    program = planned(name)
    (found,) = fusions(program, program.staged)
    kernels, calls = list(found.kernels.values()), [*found.stayed.values(), *found.gone.values()]
    assert set(found.kernels) == {info(node).name for node in program.body.calls() if node.target in KERNELS}
    (_, before), (_, after) = program.plan["traffic"]
    assert sum(one.before for one in (*kernels, *calls)) == before
    assert sum(one.after for one in (*kernels, *calls)) == after
    own = [info(node).name for node in unfused(program).body.calls()]
    assert sorted([*(part.name for one in kernels for part in one.calls), *(one.name for one in calls)]) == sorted(own)
    assert all(one.why for one in calls)


def test_text(golden: Any) -> None:
    """A template; generated kernels, one that rematerialises; calls that are none, for several reasons."""
    kernels = ("d.h.1.norm.layer_norm_backward", "d.h.1.fused_add_gelu_backward", "d.h.1.fused_cos_mul_sum")
    shown = [planned("plain").explain(name) for name in (*kernels, "d.h.1.up.sum", "h.1.cumsum", "sum.all_reduce")]
    assert isinstance(shown.pop(), Explanation)  # a collective is explained as one
    shown += [planned("part of it").explain(name) for name in ("h.0.sin", "h.0.norm.native_layer_norm")]
    text = "\n\n".join(map(str, shown))
    golden("kernels.txt", re.sub(r"\S*(test_explain_kernels.py):\d+", r"\1:N", text))


def test_a_call_is_explained_by_the_kernel_that_it_is_in() -> None:
    program = planned("plain")
    whole = program.explain("d.h.1.fused_add_gelu_backward")
    assert isinstance(whole, KernelExplanation)
    for part in whole.calls:
        assert program.explain(f"%{part.name}") == whole
    assert str(program.explain("h.1.gelu")).startswith("%h.1.up.fused_add_gelu: 2 calls as one kernel, forward")


def test_a_template_that_the_plan_leaves_out_is_named() -> None:
    found = planned("part of it").explain("d.h.1.norm.native_layer_norm_backward")
    assert isinstance(found, KernelExplanation)
    assert not found.template
    assert found.generated == "the template layer_norm_backward would compute it, and the plan leaves that out"


def test_a_loaded_program_explains_its_kernels_the_same(tmp_path: Path) -> None:
    planned("part of it").save(tmp_path / "p.json")
    loaded = shardc.Program.load(tmp_path / "p.json")
    assert fusions(loaded, loaded.staged) == fusions(loaded, planned("part of it").staged)


def test_stages_have_kernels_of_their_own() -> None:
    program = net("pp=2, dp=2", optimizer=True, clip_grad_norm=1.0, pipeline={"microbatches": 2})
    assert program.pipelined is not None
    found = {one.graph: one for one in fusions(program, program.staged)}
    assert {"forward0", "backward1", "update0", "update1"} <= found.keys()
    for at, stage in enumerate(program.pipelined.stages):
        one = found[f"forward{at}"]
        after = sum(it.after for it in (*one.kernels.values(), *one.stayed.values()))
        assert after == traffic(stage.forward).bytes
        assert set(one.kernels) == {info(node).name for node in stage.forward.calls() if node.target in KERNELS}
    assert program.explain("h.1.gelu") == found["forward1"].of("h.1.gelu")
    shared = found["update0"].kernels.keys() & found["update1"].kernels.keys()
    assert shared
    for name in shared:
        with pytest.raises(ShardcError, match=rf"SC106(.|\n)*'update0:{name}' or 'update1:{name}'"):
            program.explain(name)
        assert program.explain(f"update1:{name}") == found["update1"].kernels[name]


def test_where_nothing_is_fused_the_peak_is_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardc.passes.fusion.fuse.MAX_ROUNDS", 1)
    plan = {"fuse": True, "inputs": {"x": "dp"}}
    program = shardc.compile(Scaled(), (torch.randint(30, (4, 8)),), mesh="dp=2", plan=plan)
    (found,) = fusions(program, program.staged)
    assert not found.kernels
    assert "nothing is fused (SC217)" in found.stayed["gelu"].why
    assert found.stayed["up.linear"].why.startswith("it is a product")


def test_what_is_nothing_is_refused() -> None:
    with pytest.raises(ShardcError, match=r"SC106(.|\n)*no collective, kernel or call(.|\n)*did you mean 'h.1.gelu'"):
        planned("plain").explain("h.1.gelo")
    with pytest.raises(ShardcError, match="SC106"):
        net(fuse=False).explain("h.1.gelu")


def test_another_compilers_kernels_are_not_explained() -> None:
    plan = {**planned("plain").plan, "text": planned("part of it").plan["text"]}
    with pytest.raises(ShardcError, match="SC403"):
        fusions(replace(planned("plain"), plan=plan), planned("plain").staged)
