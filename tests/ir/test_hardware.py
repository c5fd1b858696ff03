"""The machine as one value: its files, its ranges, the ratios derived from it, the choices that passes make by it."""

from __future__ import annotations

import json
import tomllib
from importlib.metadata import PathDistribution
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardc
from shardc import Plan, ShardcError
from shardc.ir.hardware import DEFAULT, RANGES, TABLES, Hardware
from shardc.ir.mesh import Mesh
from shardc.ir.ops.buckets import PACK
from shardc.plan import hardware as files
from shardc.plan import packaged

ROOT = Path(__file__).parents[2]
INSTALLED = "share/shardc/hardware"
FILES = sorted((ROOT / "configs/hardware").glob("*.yaml"))


# ---------------------------------------------------------------------- files
def test_the_default_is_its_file() -> None:
    path = ROOT / "configs/hardware/default.yaml"
    assert files.read_file(path) == DEFAULT
    assert all(f"\n{name}: " in path.read_text() for name in RANGES), "the file leaves a quantity out"


def test_the_page_has_every_key() -> None:
    page = (ROOT / "docs/reference/hardware.md").read_text()
    assert [name for name in RANGES if f"`{name}`" not in page] == []
    assert [name for name in TABLES if f"## {name}\n" not in page] == []
    assert [name for name in files.names() if f"`{name}`" not in page] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_is_known_by_its_name(path: Path) -> None:
    chosen = Plan.from_dict({"hardware": path.stem})
    assert chosen.hardware.value == files.read_file(path)
    assert Plan.parse(chosen.dump()) == chosen
    assert Plan.parse(chosen.self_contained().dump()).hardware.value == chosen.hardware.value
    assert path.stem == "default" or path.stem not in chosen.self_contained().dump()


def test_a_wheel_brings_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (pattern,) = project["tool"]["setuptools"]["data-files"][INSTALLED]
    assert sorted(ROOT.glob(pattern)) == FILES
    (tmp_path / INSTALLED).mkdir(parents=True)
    for path in FILES:
        (tmp_path / INSTALLED / path.name).write_text(path.read_text())
    info = tmp_path / "lib" / "site-packages" / "shardc-0.dist-info"
    info.mkdir(parents=True)
    (info / "RECORD").write_text("".join(f"../../{INSTALLED}/{path.name},,\n" for path in FILES))
    monkeypatch.setattr(packaged, "distribution", lambda name: PathDistribution(info))
    monkeypatch.setattr(packaged, "REPOSITORY", tmp_path / "none")
    assert set(files.names()) == {path.stem for path in FILES} | set(files.ALIASES)
    assert files.named("h200") == files.read_file(ROOT / "configs/hardware/h200-nvlink.yaml")


@pytest.mark.parametrize("text", ["a: {", "- 1", "memory_bytes_per_second: fast", "memory: 4e12", "\0"])
def test_what_is_no_file_of_hardware_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text(text)
    with pytest.raises(ShardcError) as caught:
        files.read_file(path)
    assert caught.value.code == "SC208"
    assert (caught.value.diagnostics[0].location or "").startswith(str(path))


# ---------------------------------------------------------------------- plans
@pytest.mark.parametrize(
    ("said", "value", "dumped"),
    [
        ("default", DEFAULT, ""),
        ({}, DEFAULT, ""),
        ({"bucket_bytes": "1 MiB"}, Hardware(bucket_bytes=2**20), "hardware:\n  bucket_bytes: 1048576\n"),
        ({"like": "default", "kernel_gap_seconds": "2e-6"}, Hardware(kernel_gap_seconds=2e-6), None),
        (Hardware(unaligned_slowdown=3), Hardware(unaligned_slowdown=3.0), "hardware:\n  unaligned_slowdown: 3\n"),
    ],
    ids=str,
)
def test_what_a_plan_says(said: Any, value: Hardware, dumped: str | None) -> None:
    plan = Plan.of(hardware=said)
    assert plan.hardware.value == value
    assert Plan.parse(plan.dump()).hardware.value == value
    assert dumped is None or plan.dump() == dumped


def test_of_two_plans_the_later_says_the_hardware() -> None:
    first, second = Plan.of(hardware="h200"), Plan.of(hardware={"bucket_bytes": 4096})
    assert first.merge(Plan.of(strict=True)).hardware == first.hardware
    assert first.merge(second).hardware == second.hardware
    assert first.merge(Plan.of(hardware="default")).hardware.value == DEFAULT


OUTSIDE = {
    name: [True, "much", None, [1], float("nan"), range_.least / 2 or -1.0, range_.most * 2]
    for name, range_ in RANGES.items()
}
OUTSIDE["row_alignment_bytes"].append(24)
OUTSIDE["bucket_bytes"].append(1.5)


@pytest.mark.parametrize("name", RANGES)
def test_a_quantity_has_a_range(name: str) -> None:
    for value in OUTSIDE[name]:
        for refused in (lambda: Plan.from_dict({"hardware": {name: value}}), lambda: Hardware.of({name: value})):  # noqa: B023
            with pytest.raises(ShardcError) as caught:
                refused()
            assert caught.value.code == "SC208"
            assert f"hardware.{name}" in caught.value.diagnostics[0].message, value


@pytest.mark.parametrize(
    ("text", "line", "said", "hint"),
    [
        ("seed: 1\nhardware: h20", 2, "there is no hardware named 'h20'", "did you mean 'h200'?"),
        ("hardware:\n  like: b200", 2, "there is no hardware named 'b200'", "did you mean"),
        ("hardware: [h200]", 1, "'hardware' should be a name or quantities", "write hardware: h200"),
        ("hardware:\n  like: h200\n  link_bandwidth: 1", 3, "no quantity 'link_bandwidth'", "link_bytes_per_second"),
        ("hardware: {bucket_bytes: 0}", 1, "a whole number from 1 to", "write bucket_bytes: 26214400"),
    ],
)
def test_what_a_plan_says_wrong_is_cited(text: str, line: int, said: str, hint: str) -> None:
    with pytest.raises(ShardcError) as caught:
        Plan.parse(text, "plan.yaml")
    (diagnostic,) = caught.value.diagnostics
    assert (diagnostic.code, diagnostic.location) == ("SC208", f"plan.yaml:{line}")
    assert said in diagnostic.message
    assert hint in (diagnostic.hint or "")


# ---------------------------------------------------------------------- ratios
def test_ratios_are_derived() -> None:
    known = Hardware(
        bf16_flops_per_second=8e14, fp32_flops_per_second=2e14, memory_bytes_per_second=4e12,
        link_bytes_per_second=4e11, network_bytes_per_second=5e10, collective_start_seconds=1e-5,
        kernel_gap_seconds=1e-6, kernel_launch_seconds=5e-6,
    ).on(Mesh(dp=2, tp=8))  # fmt: skip
    assert known.flops_per_memory_byte == 200
    assert (known.flops_per_sent_byte(("tp",)), known.flops_per_sent_byte(("dp",))) == (2000, 16000)
    assert (known.start_bytes(("tp",)), known.start_bytes(("tp", "dp:1"))) == pytest.approx((4e6, 5e5))
    assert known.link_start_bytes == pytest.approx(4e6)
    assert (known.link_bytes(3, ("tp",)), known.link_bytes(3, ("dp",))) == (3, 24)
    assert (known.gap_bytes, known.launch_flops) == pytest.approx((4e6, 4e9))
    assert [known.bf16_flops(6, dtype) for dtype in (torch.float16, torch.float32)] == [6, 24]


@pytest.mark.parametrize(
    ("mesh", "spanning"),
    [
        (Mesh(), ()),
        (Mesh(dp=2, tp=4), ()),
        (Mesh(dp=4, tp=8), ("dp",)),
        (Mesh(pp=2, dp=2, tp=4), ("pp",)),
        (Mesh(dp=16, tp=1), ("dp",)),
        (Mesh(dp=2, tp=6), ("dp", "tp")),  # the second group of tp is in both nodes
        (Mesh(dp=2, tp=16), ("dp", "tp")),
    ],
    ids=str,
)
def test_which_axes_span_nodes(mesh: Mesh, spanning: tuple[str, ...]) -> None:
    assert DEFAULT.on(mesh).network_axes == set(spanning)


# ---------------------------------------------------------------------- what passes decide
class Outer(nn.Module):
    """Two pending sums that are small, and one of both that is large."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 64, bias=False), nn.Linear(8, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.a(x)[:, None] + self.b(x)[None, :]).relu().sum()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.reshape(2, 8, 2, 8).transpose(1, 2) for part in self.qkv(x).split(16, 2))
        return F.scaled_dot_product_attention(q, k, v).sin().square().mean()


class Waist(nn.Module):
    """The narrow value lies behind the first of four layers."""

    def __init__(self) -> None:
        super().__init__()
        widths = (32, 2, 32, 32, 32)
        self.layers = nn.ModuleList(nn.Linear(n, m) for n, m in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(512, 5001, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x).float().square().mean()


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 64)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), labels)


def compiled(model: type[nn.Module], batch: Any, mesh: str, plan: dict[str, Any], hardware: Any = "default") -> Any:
    with torch.device("meta"):
        return shardc.compile(model(), batch(), mesh=mesh, plan={**plan, "hardware": hardware})


def sums(program: Any) -> int:
    """All-reduces of forward."""
    return sum(c.kind == "all_reduce" and c.phase == "fwd" for c in program.collectives())


def test_a_slow_start_is_worth_a_larger_sum() -> None:
    plan = {"params": {"a.weight": "-, tp", "b.weight": "-, tp"}}
    outer = [
        compiled(Outer, lambda: torch.empty(8), "tp=2", plan, {"collective_start_seconds": start})
        for start in (1e-9, DEFAULT.collective_start_seconds)
    ]
    assert [sums(program) for program in outer] == [2, 1]


def test_a_slow_start_is_worth_gathered_statistics() -> None:
    def batch() -> dict[str, Tensor]:
        return {"x": torch.empty(256, 8), "labels": torch.empty(256, dtype=torch.int64)}

    plan = {"params": {"head.weight": "tp, -"}}
    losses = [
        compiled(Loss, batch, "tp=8", plan, {"collective_start_seconds": start})
        for start in (1e-9, DEFAULT.collective_start_seconds)
    ]
    assert [any(c.kind == "all_gather" for c in program.collectives()) for program in losses] == [False, True]


def test_attention_is_recomputed_where_memory_is_slow() -> None:
    plan = {"recompute": "selective"}
    texts = [
        compiled(Attention, lambda: torch.empty(2, 8, 16), "dp=1", plan, {"memory_bytes_per_second": rate}).text()
        for rate in (4e12, 1e18)
    ]
    assert ["%r.sdpa" in text for text in texts] == [True, False], texts[0]


def test_a_slow_link_moves_the_cut_to_where_less_is_sent() -> None:
    plan = {"pipeline": {"microbatches": 2}}
    changes: list[dict[str, Any]] = [
        {"link_bytes_per_second": 1e15}, {"link_bytes_per_second": 1e9},
        {"link_bytes_per_second": 1e15, "network_bytes_per_second": 1e9},  # both ranks are in one node
        {"link_bytes_per_second": 1e15, "network_bytes_per_second": 1e9, "accelerators_per_node": 1},
    ]  # fmt: skip
    programs = [compiled(Waist, lambda: torch.empty(256, 32), "pp=2", plan, change) for change in changes]
    widest = [max(transfer.bytes_per_rank for transfer in program.transfers()) for program in programs]
    assert widest == [128 * width * 4 for width in (32, 2, 32, 2)]


def test_a_product_is_padded_where_copies_and_launches_are_cheap() -> None:
    changes: list[dict[str, Any]] = [
        {}, {"memory_bytes_per_second": 1e9}, {"kernel_launch_seconds": 1.0}, {"unaligned_slowdown": 1},
        {"row_alignment_bytes": 2}, {"row_alignment_bytes": 64},
    ]  # fmt: skip
    widths = [
        next((n for n in (5008, 5024) if f"{n}]" in program.text()), 5001)
        for change in changes
        for program in [compiled(Head, lambda: torch.empty(4096, 512, dtype=torch.bfloat16), "dp=1", {}, change)]
    ]
    assert widths == [5008, 5001, 5001, 5001, 5001, 5024]


def test_a_bucket_is_as_large_as_the_hardware_says() -> None:
    plan = {"inputs": {"x": "dp"}, "bucket": True}
    buckets = [
        sum(call.target is PACK for call in program.body.calls())
        for size in (4500, 2**20)
        for program in [compiled(Waist, lambda: torch.empty(256, 32), "dp=2", plan, {"bucket_bytes": size})]
    ]
    assert buckets == [3, 1]


def test_default_and_named_defaults_are_one() -> None:
    plan = {"inputs": {"x": "dp"}, "bucket": True, "recompute": "selective"}
    said = ["default", DEFAULT.quantities()]
    texts = {compiled(Waist, lambda: torch.empty(256, 32), "dp=2", plan, each).text() for each in said}
    assert len(texts) == 1


# ---------------------------------------------------------------------- programs and their files
def test_a_program_knows_what_it_was_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = {"inputs": {"x": "dp"}, "bucket": True, "fuse": True}
    program = compiled(Waist, lambda: torch.empty(256, 32), "dp=2", plan, "h200")
    assert Hardware.of(program.plan["hardware"]) == files.named("h200")
    monkeypatch.setattr(files, "packaged", lambda _: {})  # where nobody has that file
    again = shardc.Program.from_json(program.to_json())
    assert again.plan["hardware"] == files.DEFAULT.quantities() | program.plan["hardware"]
    assert str(again.explain(0)) == str(program.explain(0))


def test_a_file_of_an_earlier_version_has_no_hardware() -> None:
    program = compiled(Waist, lambda: torch.empty(256, 32), "dp=2", {"inputs": {"x": "dp"}, "fuse": True})
    content: dict[str, Any] = dict(program.plan)
    del content["hardware"]
    older = shardc.Program.from_json(shardc.Program(**{**vars(program), "plan": content}).to_json())
    assert "hardware" not in older.plan
    assert str(older.explain(0)) == str(program.explain(0))


FORGED = [{"link": 1.0}, {"link_bytes_per_second": -1.0}, ["h200"], "h200", {"links": 3}, {"memory": [[4, 2], [8, 1]]}]


@pytest.mark.parametrize("forged", FORGED, ids=json.dumps)
def test_a_forged_record_is_refused(forged: Any) -> None:
    program = compiled(Waist, lambda: torch.empty(256, 32), "dp=2", {"inputs": {"x": "dp"}})
    text = shardc.Program(**{**vars(program), "plan": {**program.plan, "hardware": forged}}).to_json()
    with pytest.raises(ShardcError, match="SC402"):
        shardc.Program.from_json(text)
