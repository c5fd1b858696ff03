"""Lockfiles: a change of the model that costs more is caught, with its place and cause; one that does not is not."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardc
from shardc import Mesh, ShardcError
from shardc.explain.lock_report import LockReport
from shardc.explain.lockfile import Lock

MESH = Mesh(dp=2, tp=2)
PLAN = {
    "inputs": {"x": "dp"},
    "params": {"layers.*.up.weight": "tp, -", "layers.*.down.weight": "-, tp"},
    "fuse": True,
}
WIDTH = 32


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module] = Layer, count: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer() for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class NormOfHidden(Layer):
    """RMS over a sharded dim: its sum is a collective."""

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(self.norm(x)))
        return x + self.down(h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5))


class Unfusable(Layer):
    """A cumulative sum, which no kernel fuses, between what was one kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)).cumsum(0)))


class Keeps(Layer):
    """One more activation for backward."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(x))
        return x + self.down(F.gelu(h) * torch.tanh(self.up(torch.sin(x))))


class OtherOrder(Layer):
    """Modules are made, and terms are added, in another order."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x)))) + x


def program(layer: Callable[[], nn.Module] = Layer, count: int = 2, rows: int = 16, **more: object) -> shardc.Program:
    plan = {**PLAN, **more}
    return shardc.compile(Net(layer, count).to("meta"), torch.empty(rows, WIDTH, device="meta"), mesh=MESH, plan=plan)


@pytest.fixture(scope="module")
def locked() -> Lock:
    return program().lock()


def against(lock: Lock, layer: Callable[[], nn.Module], count: int = 2) -> LockReport:
    return program(layer, count).check(lock)


def kinds(report: LockReport) -> set[str]:
    return {change.key[0] for change in report.worse}


def test_the_text_is_read_back_and_has_one_fact_a_line(locked: Lock) -> None:
    text = locked.text()
    assert Lock.parse(text) == locked
    lines = text.splitlines()[1:]
    assert len(lines) == len(locked.facts)
    assert all(line.count(" = ") == 1 for line in lines)
    assert "/" not in text.partition("\n")[2], "no paths"


def test_two_compiles_write_the_same(locked: Lock) -> None:
    assert program().lock().text() == locked.text()


def test_facts_are_those_of_the_program(locked: Lock) -> None:
    one = program()
    facts = locked.facts
    forward = [c for c in one.collectives() if c.phase == "fwd" and c.axes == ("tp",) and c.kind == "all_reduce"]
    assert facts["collectives", "forward", "tp", "all_reduce", "count"] == len(forward) == 2
    assert facts["collectives", "forward", "tp", "all_reduce", "bytes"] == sum(c.bytes_per_step for c in forward)
    report = one.memory()
    assert facts["memory", "peak"] == report.peak
    assert sum(int(v) for k, v in facts.items() if k[:2] == ("memory", "at_peak")) == report.peak
    assert facts["flops", "forward"] == one.flops().of_phase("fwd")
    assert facts["kernels", "launches"], facts["kernels", "bytes"] == one.plan["traffic"][1]


def test_places_add_up_to_their_amounts(locked: Lock) -> None:
    for key, amount in locked.amounts().items():
        if key[0] in ("collectives", "kernels", "flops") and key != ("memory", "stored"):
            assert sum(locked.places(key).values()) == amount, key
    in_arena = locked.facts.get(("memory", "at_peak", "arena"), 0)
    assert sum(locked.places(("memory", "peak")).values()) == int(locked.facts["memory", "peak"]) - int(in_arena)


def test_the_same_model_passes(locked: Lock) -> None:
    report = against(locked, Layer)
    assert report.ok
    assert str(report) == "as the lockfile says"


def test_another_order_of_modules_and_terms_passes(locked: Lock) -> None:
    report = against(locked, OtherOrder)
    assert report.ok, report


def test_a_collective_more_is_named_with_its_line_and_annotation(locked: Lock) -> None:
    report = against(locked, NormOfHidden)
    assert not report.ok
    key = ("collectives", "forward", "tp", "all_reduce", "count")
    change = next(change for change in report.worse if change.key == key)
    assert (change.before, change.after) == (2, 4)
    (place,) = change.places
    assert (place.module, place.change) == ("layers.*", 2)
    (reason,) = (reason for reason in place.reasons if reason.value == "layers.0.sum.all_reduce")
    line = next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "torch.rsqrt(" in text)
    assert reason.source.endswith(f"test_lockfile.py:{line}")
    assert 'layers.0.up.weight = "tp, -"' in reason.cause
    text = str(change).splitlines()
    assert text[0] == "all_reduce over tp in forward: 4 instead of 2 (+100.0%)"
    assert text[1] == "  2 more in layers.*"
    assert any(f"%{reason.value}, {reason.source}: {reason.cause}" in shown for shown in text)


def test_a_fused_kernel_that_is_dropped_is_named(locked: Lock) -> None:
    report = against(locked, Unfusable)
    changed = {change.key: change for change in report.worse}
    assert ("kernels", "unfused") in changed
    places = {place.module: place for place in changed["kernels", "unfused"].places}
    causes = {reason.value: reason.cause for reason in places["layers.*"].reasons}
    assert causes["layers.0.cumsum"], "why no kernel has it"
    assert "calls in no fused kernel" in str(report)


def test_memory_that_rises_is_named(locked: Lock) -> None:
    report = against(locked, Keeps)
    change = next(change for change in report.worse if change.key == ("memory", "peak"))
    assert change.places
    assert "memory at the peak: " in str(report)
    assert "flops" in kinds(report), "the second product"


def test_a_layer_less_is_better_and_passes(locked: Lock) -> None:
    report = against(locked, Layer, count=1)
    assert report.ok
    assert report.better
    assert "better than the lockfile says:" in str(report)
    assert "without --check to keep what was won" in str(report)


def test_a_tolerance_lets_amounts_grow(locked: Lock) -> None:
    more = program(NormOfHidden)
    report = more.check(locked, tolerance={"collectives": 1.0, "kernels": 1.0, "memory": 1.0})
    assert report.ok, report
    report = more.check(locked, tolerance={"kernels": 1.0, "memory": 1.0})
    assert kinds(report) == {"collectives"}
    # What was not there at all grew by more than any share of it.
    without = Lock({k: v for k, v in locked.facts.items() if k[:4] != ("collectives", "forward", "tp", "all_reduce")})
    assert not program().check(without, tolerance=100.0).ok


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (lambda: program(rows=32), "batch"),
        (lambda: program(fuse=False), "plan"),
        (lambda: shardc.compile(Net(), torch.randn(16, WIDTH), mesh=Mesh(dp=4, tp=2), plan=PLAN), "mesh"),
        (lambda: shardc.compile(Net(), torch.randn(16, WIDTH), mesh=MESH, plan=PLAN, mode="eval"), "mode"),
    ],
)
def test_a_lock_of_another_program_is_refused(other: Callable[[], shardc.Program], what: str, locked: Lock) -> None:
    with pytest.raises(ShardcError) as refused:
        other().check(locked)
    assert refused.value.code == "SC412"
    assert what in refused.value.diagnostics[0].message


def test_a_lock_of_another_version_is_refused(locked: Lock) -> None:
    older = Lock(dict(locked.facts) | {("of", "shardc"): "0.0.1"})
    with pytest.raises(ShardcError, match="another shardc"):
        program().check(older)
    with pytest.raises(ShardcError) as refused:
        Lock.parse(locked.text().replace("\nversion = 1\n", "\nversion = 2\n"))
    assert refused.value.code == "SC412"


def test_another_torch_is_a_note(locked: Lock) -> None:
    report = program().check(Lock(dict(locked.facts) | {("of", "torch"): "2.1.0"}))
    assert report.ok
    assert "torch 2.1.0 traced what the lockfile says" in str(report)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no toml",
        'format = "other"',
        "format = [1]",
        'format = "shardc-lock"\nversion = 1\nmemory.peak = "much"',
        'format = "shardc-lock"\nversion = 1\nmemory.peak = -1',
        'format = "shardc-lock"\nversion = 1\nmemory.peak = nan',
        'format = "shardc-lock"\nversion = 1\nmemory.peak = true',
    ],
)
def test_what_is_no_lockfile_is_refused(text: str) -> None:
    with pytest.raises(ShardcError) as refused:
        Lock.parse(text, "shardc.lock")
    assert refused.value.code == "SC411"
    assert refused.value.diagnostics[0].location == "shardc.lock"


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "none", tmp_path / "binary", tmp_path):
        with pytest.raises(ShardcError) as refused:
            Lock.read(path)
        assert refused.value.code == "SC411"


def test_odd_names_of_modules_are_read_back() -> None:
    facts: dict[tuple[str, ...], int | float | str] = {("format",): "shardc-lock", ("version",): 1}
    facts["where", "kernels", 'a "b" \\ \n\t é 😀 \x7f', "bytes"] = 5
    facts["prediction", "step_ms"] = 1.25
    assert Lock.parse(Lock(facts).text()).facts == facts


@pytest.mark.parametrize("tolerance", [{"memroy": 0.1}, -1.0, float("nan"), float("inf")])
def test_tolerances_that_are_none(tolerance: float | dict[str, float], locked: Lock) -> None:
    with pytest.raises(ShardcError) as refused:
        program().check(locked, tolerance=tolerance)
    assert refused.value.code == "SC413"


def test_the_predicted_step_is_compared_on_the_hardware_of_the_lock() -> None:
    one = program()
    lock = one.lock("h200")
    predicted = one.predict("h200")
    assert lock.facts["prediction", "step_ms"] == pytest.approx(predicted.step_ms, rel=1e-3)
    assert one.check(Lock.parse(lock.text())).ok
    slower = program(Keeps).check(lock)
    change = next(change for change in slower.worse if change.key == ("prediction", "step_ms"))
    assert change.places
    assert "predicted step: " in str(slower)
    with pytest.raises(ShardcError, match="another predicted_on"):
        one.check(lock, "default")
    with pytest.raises(ShardcError, match="another predicted_on"):
        one.check(one.lock(), "h200")


def test_other_figures_of_the_same_hardware_are_refused(tmp_path: Path) -> None:
    one, file = program(), tmp_path / "mine.yaml"
    file.write_text("like: h200-nvlink\nmemory_bytes_per_second: 4.0e+12\n")
    lock = Lock.parse(one.lock(file).text())
    assert one.check(lock, file).ok
    file.write_text("like: h200-nvlink\nmemory_bytes_per_second: 3.0e+12\n")
    with pytest.raises(ShardcError, match="another figures") as refused:
        one.check(lock, file)
    assert refused.value.diagnostics[0].cause == (
        "figures memory_bytes_per_second: 4000000000000.0, here 3000000000000.0"
    )


def test_other_tables_of_the_same_hardware_are_refused(tmp_path: Path) -> None:
    one, file = program(), tmp_path / "mine.yaml"
    file.write_text("memory: {0: 1.0e-06, 1048576: 2.0e-06}\n")
    lock = Lock.parse(one.lock(file).text())
    file.write_text("memory: {0: 1.0e-06, 1048576: 3.0e-06}\n")
    with pytest.raises(ShardcError, match="figures memory: "):
        one.check(lock, file)


@pytest.mark.parametrize("plan", [{"accumulate": 4}, {"pipeline": {"microbatches": 4}}], ids=["accumulate", "pipeline"])
def test_the_batch_is_the_whole_one(plan: dict[str, object]) -> None:
    mesh = Mesh(pp=2, dp=2) if "pipeline" in plan else Mesh(dp=2)
    model, x = Net(count=2).to("meta"), torch.empty(16, WIDTH, device="meta")
    found = shardc.compile(model, x, mesh=mesh, plan={"inputs": {"x": "dp"}, **plan})
    assert found.lock().facts["of", "batch", "x"] == "float32[16, 32]"


def test_a_pipeline_has_its_transfers() -> None:
    piped = shardc.compile(
        Net(count=2).to("meta"),
        torch.empty(16, WIDTH, device="meta"),
        mesh=Mesh(pp=2, dp=2),
        plan={"inputs": {"x": "dp"}, "pipeline": {"microbatches": 4}},
    )
    lock = piped.lock()
    sent = sum(t.bytes_per_step for t in piped.transfers() if t.phase == "fwd")
    assert lock.facts["collectives", "forward", "pp", "send", "bytes"] == sent > 0
    assert piped.check(lock).ok
    assert Lock.parse(lock.text()) == lock
