"""The planner as a whole: its plans compile and verify, none of its own candidates is better, and it says why."""

import dataclasses
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

import shardc
from shardc import Mesh, Plan, ShardcError
from shardc.cost.call_seconds import COMPUTE, call_costs
from shardc.cost.streams import run
from shardc.plan.hardware import hardware
from shardc.planner.autoplan import _Ranker  # pyright: ignore[reportPrivateUsage]
from shardc.planner.candidate import Candidate
from shardc.planner.inner import Inner
from shardc.planner.layer_costs import LayerCosts
from shardc.planner.reasons import causes, reason
from shardc.planner.reduced_model import KEPT
from shardc.planner.search import SLACK, Priced, search
from shardc.planner.small_program import Subject
from shardc.planner.space import Limits, candidates
from shardc.planner.step_costs import estimate

MACHINE = hardware("h200-nvlink")


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def llama(hidden: int = 1024, layers: int = 8, device: str = "meta") -> nn.Module:
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=16 * hidden,
        use_cache=False,
    )
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config)


def tokens(rows: int, length: int, device: str = "meta") -> dict[str, Tensor]:
    ids = torch.ones(rows, length, dtype=torch.long, device=device)
    return {"input_ids": ids, "labels": ids}


class Mixer(nn.Module):
    """An MLP-Mixer: no transformer, no tokens."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 32, 4, 4)
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                [nn.LayerNorm(32), nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(32, 64), nn.Linear(64, 32)]
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(32, 4)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        for norm, up, down, wide, narrow in self.blocks:
            x = x + down(torch.relu(up(norm(x).transpose(1, 2)))).transpose(1, 2)
            x = x + narrow(torch.relu(wide(norm(x))))
        return self.head(x.mean(1)).square().mean()


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject(llama(), tokens(1, 1024), None, MACHINE, Plan.of(precision="bf16"), adamw)


def priced(subject: Subject, candidate: Candidate) -> Priced | None:
    """A candidate by its own compiled layers; None where it cannot be placed so."""
    costs = subject.costs(candidate.inner)
    if not isinstance(costs, LayerCosts):
        return None
    return Priced(candidate, estimate(candidate, costs, subject.hardware, subject.numbers))


def test_layers_have_the_seconds_of_a_microbatch_and_nothing_of_what_runs_once_a_step(subject: Subject) -> None:
    """Casts of weights and zeroed sums come before the first microbatch."""
    inner = Inner(rows=1)
    body, costs = subject.body(inner), subject.costs(inner)
    assert isinstance(costs, LayerCosts)
    computed = [s for s in run(body, call_costs(body, MACHINE), MACHINE).spans if s.stream == COMPUTE]
    first, second = ([s for s in computed if s.microbatch == number] for number in (0, 1))
    assert first[0].start > 0
    few = dataclasses.replace(costs, runs=tuple((part, KEPT) for part, _ in costs.runs)).total()
    assert few.forward + few.backward == pytest.approx(first[-1].end - first[0].start)
    assert few.forward + few.backward == pytest.approx(second[-1].end - second[0].start, rel=0.02)
    assert few.products == pytest.approx(sum(s.end - s.start for s in first if s.kind == "product"))
    assert 0 < few.products < few.forward + few.backward


def test_nothing_of_a_small_space_is_better(subject: Subject) -> None:
    for memory in (80e9, 3.2e9):
        limits = Limits(2, memory, 4, 1024, {"cp": (1,)})
        best = search(subject, limits).fitting(memory)[0]
        every = [p for c in candidates(subject, limits) if (p := priced(subject, c)) is not None]
        fitting = [p.seconds for p in every if p.estimate.memory.total <= memory]
        assert len(fitting) < len(every) or memory == 80e9
        assert min(fitting) >= best.seconds / (1 + SLACK)


@pytest.mark.long
def test_none_of_500_random_plans_is_better(subject: Subject) -> None:
    for gpus, memory in ((16, 80e9), (16, 2e9)):
        limits = Limits(gpus, memory, 64, 1024)
        best = search(subject, limits).fitting(memory)[0]
        drawn = random.Random(0).sample(list(candidates(subject, limits)), 500)
        tried = [p for c in drawn if (p := priced(subject, c)) is not None and p.estimate.memory.total <= memory]
        assert min(p.seconds for p in tried) >= best.seconds / (1 + SLACK)


def test_memory_alone_asks_for_recomputation(subject: Subject) -> None:
    limits = Limits(2, 80e9, 64, 1024, {"pp": (1,), "tp": (1,), "cp": (1,), "rows": (16,)})
    best = search(subject, limits).fitting(80e9)[0]
    assert best.candidate.recompute == "none"
    tight = 0.9 * best.estimate.memory.total
    for fitting in search(subject, dataclasses.replace(limits, memory=tight)).fitting(tight)[:1]:
        assert fitting.candidate.recompute != "none" or fitting.candidate.zero != best.candidate.zero


@pytest.mark.long
def test_tensor_parallelism_comes_with_sequence_parallelism_and_stays_in_a_node() -> None:
    wide = Subject(llama(8192), tokens(1, 4096), None, MACHINE, Plan.of(precision="bf16"), adamw)
    limits = Limits(16, 80e9, 16, 4096, {"tp": (8, 16), "cp": (1,), "rows": (1,), "recompute": ("none",)})
    outcome = search(wide, limits, top=8)
    best = outcome.fitting(80e9)[0]
    assert best.candidate.tp == 8
    assert best.candidate.sequence
    across = priced(wide, Candidate(tp=16, sequence=True, microbatches=16, reduce="fp32"))
    assert across is not None
    assert across.seconds > best.seconds
    assert reason(across, best, 80e9, MACHINE).startswith("tp=16 spans nodes")


def test_what_loses_says_why(subject: Subject) -> None:
    one = Candidate(dp=2, rows=2, zero=1, reduce="fp32")
    best = priced(subject, one)
    slow = priced(subject, dataclasses.replace(one, recompute="full"))
    piped = priced(subject, Candidate(pp=2, rows=2, microbatches=2, schedule="1f1b", reduce="fp32"))
    assert best is not None
    assert slow is not None
    assert piped is not None
    assert reason(slow, best, 80e9, MACHINE).startswith("recomputes for ")
    assert reason(piped, best, 80e9, MACHINE).startswith("bubble 3")
    for loser in (slow, piped):
        whole = sum(seconds for seconds, _ in causes(loser, best, MACHINE))
        assert whole == pytest.approx(loser.seconds - best.seconds)
    # A bubble is a share of what fills it: of one mesh and as many microbatches, it is not why more work takes longer.
    again = priced(subject, dataclasses.replace(piped.candidate, recompute="full"))
    assert again is not None
    assert again.estimate.bubble > piped.estimate.bubble
    (most, first), *rest = sorted(causes(again, piped, MACHINE), reverse=True)
    assert first.startswith("recomputes for ")
    assert all(abs(seconds) < most / 3 for seconds, _ in rest)
    assert reason(best, best, 80e9, MACHINE).startswith("as fast as the best")
    words = reason(slow, best, 1e9, MACHINE)
    assert words.startswith("does not fit: ")
    assert "of 953.7 MiB, of which the optimizer's state" in words


@pytest.mark.parametrize(
    "keep",
    [
        pytest.param({}, marks=pytest.mark.long),
        {"mesh": "pp=2, tp=2"},
        {"mesh": "dp_replicate=2, dp=2", "storage": {"zero": 3, "axes": ["dp"]}},
        pytest.param(
            {"mesh": "pp=2, dp=2", "pipeline": {"schedule": "zb-v", "microbatches": 4}}, marks=pytest.mark.long
        ),
        pytest.param({"mesh": "dp=2, tp=2", "storage": {"zero": 3, "axes": ["dp"]}}, marks=pytest.mark.long),
    ],
)
def test_plans_compile_and_verify(keep: dict[str, object]) -> None:
    model, batch = llama(32, 4, "cpu"), tokens(8, 16, "cpu")
    ranking = shardc.autoplan(model, batch, gpus=4, keep=keep, precision=None, top=2, confirm=1)
    plan = Plan.parse(ranking.best.yaml())
    program = shardc.compile(model, batch, plan=plan, optimizer=torch.optim.AdamW(model.parameters()))
    assert program.mesh.world_size == 4
    if "mesh" in keep:
        assert dict(program.mesh.axes) == dict(Mesh.parse(str(keep["mesh"])).axes)
    if "storage" in keep:
        assert plan.storage.zero == 3
    assert program.verify().ok
    assert ranking.best.fits
    assert ranking[0] is ranking.best
    assert "compiled" in ranking.best.basis


@pytest.mark.parametrize(
    ("hardware", "keep", "fuse"),
    [("h200", {}, True), ("h200", {"fuse": False}, False), ("h200", {"hardware": "cpu-gloo"}, False)],
    ids=str,
)
def test_a_plan_fuses_as_it_was_predicted(hardware: str, keep: dict[str, object], fuse: bool) -> None:
    """Read from its file it is the program that was predicted, whatever device the model lies on."""
    model, batch = llama(32, 2, "cpu"), tokens(8, 16, "cpu")
    kept = {"mesh": "dp=4", "recompute": "none", **keep}
    ranking = shardc.autoplan(model, batch, gpus=4, hardware=hardware, keep=kept, precision=None, top=1)
    plan = Plan.parse(ranking.best.yaml())
    assert plan.fuse.enabled is fuse
    program = shardc.compile(model, batch, plan=plan, optimizer=adamw(model))
    assert any("fused" in str(call.target) for call in program.body.calls()) == fuse
    assert ranking.best.basis == "compiled and predicted as a step of the whole model"
    assert ranking.best.step_ms == pytest.approx(program.predict(hardware).step_ms, rel=1e-9)


def test_a_split_backward_that_recomputes_is_predicted() -> None:
    """A part may let go of a value that its graph does not read."""
    placed = {f"**.{n}_proj.weight": "tp, -" for n in ("q", "k", "v", "gate", "up")}
    placed |= {f"**.{n}_proj.weight": "-, tp" for n in ("o", "down")}
    data = {
        "mesh": "pp=2, tp=2",
        "params": placed,
        "activations": {"model.layers.*": "-, tp, -"},
        "precision": "bf16",
        "recompute": "selective",
        "pipeline": {"schedule": "zb-h1", "microbatches": 4},
    }
    program = shardc.compile(llama(64, 2), tokens(8, 16), plan=Plan.from_dict(data))
    prediction = program.predict(MACHINE)
    assert prediction.peak_bytes > 0
    assert prediction.step_ms > 0


WIDE = {"mesh": "dp=4", "storage": {"zero": 3, "axes": ["dp"]}, "accumulate": 4}
PIPELINES = [
    {"mesh": "pp=2, dp=2", "storage": {"zero": 1, "axes": ["dp"]}, "pipeline": {**how, "microbatches": 8}}
    for how in ({"schedule": "1f1b"}, {"schedule": "interleaved", "virtual": 2}, {"schedule": "zb-h1"})
]


@pytest.mark.long  # `test_plan_time` compares what is confirmed with the closed form
@pytest.mark.parametrize("hidden", [1024, 4096])
@pytest.mark.parametrize("keep", [WIDE, *PIPELINES])
def test_a_plan_that_is_confirmed_takes_as_long_as_the_whole_model(keep: dict[str, object], hidden: int) -> None:
    """What is compiled has few of the layers; the step that is predicted has all of them."""
    model, batch = llama(hidden, 16), tokens(16, 2048)
    ranking = shardc.autoplan(model, batch, gpus=4, keep={**keep, "recompute": "none"}, top=1)
    program = shardc.compile(model, batch, plan=ranking.best.plan, optimizer=adamw(model))
    assert ranking.best.basis.startswith("compiled and predicted as a step of ")
    assert "of 16 equal layers" in ranking.best.basis
    assert ranking.best.step_ms == pytest.approx(program.predict(MACHINE).step_ms, rel=0.09)


def test_the_first_plan_is_one_that_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Candidate] = []

    def confirmed(_: object, p: Priced) -> tuple[float, int, str]:
        asked.append(p.candidate)
        return (3.0 if len(asked) == 1 else 1.0) * p.seconds, 0, "compiled"

    monkeypatch.setattr(_Ranker, "_confirmed", confirmed)
    monkeypatch.setattr(_Ranker, "_extrapolated", lambda _, p, scale: (1.5 * p.seconds, 0, "extrapolated"))
    ranking = shardc.autoplan(Mixer(1), torch.randn(8, 3, 16, 16), gpus=4, precision=None, top=5, confirm=1)
    assert ranking.best.candidate == asked[1]
    assert ranking.best.basis == "compiled"
    assert len(asked) == 2
    assert len(set(asked)) == 2


@pytest.mark.long
def test_a_model_that_is_no_transformer(tmp_path: Path) -> None:
    model, images = Mixer(), torch.randn(8, 3, 16, 16)
    ranking = shardc.autoplan(model, images, gpus=4, precision=None)
    assert ranking.save(tmp_path)[0].name == "plan.1.yaml"
    program = shardc.compile(model, images, plan=tmp_path / "plan.1.yaml", optimizer=adamw(model))
    assert program.mesh.world_size == 4
    assert program.verify().ok


def refused(**options: object) -> ShardcError:
    arguments: dict[str, object] = {"gpus": 4, "precision": None, **options}
    with pytest.raises(ShardcError) as caught:
        shardc.autoplan(Mixer(2), torch.randn(8, 3, 16, 16), **arguments)  # type: ignore[arg-type]
    return caught.value


def test_buckets_of_a_small_model_are_small() -> None:
    model, images = Mixer(1), torch.randn(8, 3, 16, 16)
    ranking = shardc.autoplan(model, images, gpus=2, keep={"mesh": "dp=2"}, precision=None, confirm=0)
    assert ranking.best.peak_bytes < 2**20 < MACHINE.bucket_bytes
    assert ranking.rows()[0][6] == "samples/s", "images are no tokens"
    assert " samples/s" in ranking.best.yaml()


def test_errors_say_what_would_help() -> None:
    assert refused(gpus=0).code == "SC251"
    assert refused(top=0).code == "SC251"
    assert refused(hardware="h201").code == "SC208"
    assert refused(keep={"mesh": "dp=3"}).code == "SC251"
    assert refused(keep={"mesh": "data=4"}).code == "SC251"
    small = refused(memory="10KiB")
    assert small.code == "SC250"
    assert "KiB" in str(small)
    assert "the smallest needs" in str(small)
    seven = refused(rows=7, keep={"mesh": "dp=4"})
    assert seven.code == "SC251"
    assert "7 rows" in str(seven)
