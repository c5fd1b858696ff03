"""One row: each contestant is built and checked, then all take steps in turn.

Truth is eager torch in float32, one sequence at a time. A contestant's loss and gradients may be as far from it as
twice what eager torch in the contestants' dtype is (`bounds`; in float32 1e-4 and 1e-3). With an optimizer the losses
of four steps are compared with those of eager torch and torch's default AdamW instead (0.02; in float32 1e-4): the
gradients end in the update.
"""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.train_step.job import Agreement, clear, clock, say, synchronize
from benchmarks.train_step.models import MODELS, TINY_MODELS, loss_of
from benchmarks.train_step.rows import CONTESTANTS, Row, later
from benchmarks.train_step.setting import LeftOutError, Run, Setting, attention, optimizer_of, whole_loss

PEAK = 989e12  # FLOP/s, dense bfloat16, of an H100 and H200
LOSSES = 4
Errors = dict[str, float]


@dataclass
class Kept:
    """A contestant that is ready, and what was found of it so far."""

    run: Run
    held: int  # bytes
    row: dict[str, object]
    each: list[list[float]] = field(default_factory=list[list[float]])  # seconds of synchronised steps, by round
    free: list[float] = field(default_factory=list[float])  # seconds of a step without synchronising, by round
    peak: int = 0
    clocks: list[int] = field(default_factory=list[int])


class Measured:
    """What one process measures of one row."""

    def __init__(
        self,
        row: Row,
        device: torch.device,
        agreement: Agreement,
        *,
        tiny: bool,
        end: float,
        about: Mapping[str, object],
    ) -> None:
        self.row, self.device, self.agreement, self.end, self.about = row, device, agreement, end, about
        self.turns = 0
        self.began, self.ranks = time.monotonic(), dist.get_world_size()
        model = (TINY_MODELS if tiny else MODELS)[row.model]
        dtype = torch.bfloat16 if device.type == "cuda" or row.master else torch.float32
        torch.manual_seed(0)
        with device:
            state = {name: t.cpu() for name, t in model.build(dtype).state_dict().items()}
        self.batches = model.batches(LOSSES, row.sequences, device)
        self.setting = Setting(
            model, state, self.batches[0], device, dtype, self.ranks, row.microbatches, row.optimizer, row.master
        )
        clear(device)
        self.truth = self._truth()
        clear(device)

    def all(self, names: Sequence[str], rounds: int, steps: int) -> None:
        torch._dynamo.config.recompile_limit = 64  # of one layer's code, of which each compiled contestant has entries
        kept: dict[str, Kept] = {}
        waiting = [name for name in names if later(name)]
        for name in names:
            if name not in waiting and self._begin(name, kept, last=False) is None:
                waiting.append(name)
        self._rounds(kept, rounds, steps)
        beside = next((name for name in kept if name.startswith("ours")), "")
        for name in [name for name in kept if name != beside]:
            self._end(kept, name)
        for name in waiting:
            if self._begin(name, kept, last=True):
                self._rounds(kept, rounds, steps, again=beside)
                self._end(kept, name)
        if beside:
            self._end(kept, beside)

    def _rounds(self, kept: dict[str, Kept], rounds: int, steps: int, again: str = "") -> None:
        for name, one in kept.items():
            kept[name] = replace(one, each=[], free=[], clocks=[])
        for _ in range(rounds):
            if any(one.each for one in kept.values()) and self.agreement.past(self.end):
                break
            for one in kept.values():
                self._turn(one, steps)
        self.turns += 1
        for name, one in kept.items():
            say(self._found(name, one, again=name == again))

    def _end(self, kept: dict[str, Kept], name: str) -> None:
        kept.pop(name).run.close()
        clear(self.device)

    # ------------------------------------------------------------------ truth
    def _truth(self) -> dict[str, object]:
        """Losses and gradients of eager torch in float32, and how far from them eager torch in the dtype is."""
        if self.row.optimizer:
            return {"losses": self._eager_losses()}
        loss, grads = self._eager(torch.float32)
        if self.setting.dtype == torch.float32:
            return {"loss": loss, "grads": grads, "bounds": {"loss": 1e-4, "grad": 1e-3}}
        near, nears = self._eager(self.setting.dtype)
        rounding = gaps(near, nears, loss, grads)
        bounds = {"loss": max(2 * rounding["loss"], 1e-3), "grad": max(2 * rounding["grad"], 1e-2)}
        return {"loss": loss, "grads": grads, "bounds": bounds}

    def _eager(self, dtype: torch.dtype) -> tuple[float, Mapping[str, Tensor]]:
        setting = replace(self.setting, dtype=dtype)
        model = setting.build()
        for block in model.get_submodule(setting.model.blocks).children():  # float32 has no attention that is fused
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        total, batch = 0.0, self.batches[0]
        with nullcontext() if dtype == torch.float32 else attention(self.device):
            for at in range(self.row.sequences):
                loss = loss_of(model(**{name: x[at : at + 1] for name, x in batch.items()})) / self.row.sequences
                loss.backward()
                total += float(loss.detach())
        grads = dict(model.named_parameters())
        return total, {name: grads[name].grad.cpu() for name in setting.model.checked}  # type: ignore[union-attr]

    def _eager_losses(self) -> list[float]:
        model = self.setting.build()
        optimizer = optimizer_of(model)
        losses: list[float] = []
        with attention(self.device):
            for batch in self.batches:
                loss = loss_of(model(**batch))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                losses.append(float(loss.detach()))
        return losses

    # ------------------------------------------------------------------ one contestant
    def _begin(self, name: str, kept: dict[str, Kept], last: bool) -> bool | None:
        """Whether it is ready: built, compiled and right. Else a line says why not; None if memory did not suffice
        beside the others, and it is to be tried again."""
        where = {"row": self.row.name, "contestant": name}
        share = 0.15 if last else 0.4  # of the time that has to be left
        if kept and self.agreement.past(self.end - (self.end - self.began) * share):
            say({**where, "left_out": "no time was left to build it"})
            return False
        say({**where, "begins": True})
        clear(self.device)
        before, start = self._allocated(), time.perf_counter()
        run, failed, left_out, full = None, "", "", False
        row: dict[str, object] = {}
        try:
            run = CONTESTANTS[name](self.setting)
            row = self._checked(run)
            row["begun_s"] = round(time.perf_counter() - start, 1)
        except LeftOutError as why:
            left_out = str(why)
        except torch.OutOfMemoryError as problem:
            failed, full = str(problem)[:300], not last
        except Exception as problem:
            failed = f"{type(problem).__name__}: {problem}".strip().splitlines()[0][:300]
            traceback.print_exc()
        if self.agreement.any(full):
            return None
        if self.agreement.any(bool(failed or left_out)):
            say({**where, **({"left_out": left_out} if left_out else {"failed": failed or "on another rank"})})
            if run is not None and not failed:
                run.close()
            return False
        assert run is not None
        run.rest()
        synchronize(self.device)
        kept[name] = Kept(run, self._allocated() - before, {**row, **run.about})
        if not row["correct"]:
            say({**where, "failed": "its results are wrong", **row})
            kept.pop(name).run.close()
            return False
        return True

    def _checked(self, run: Run) -> dict[str, object]:
        with attention(self.device), run.building():
            if self.row.optimizer:
                losses = [whole_loss(run, run.step(batch), self.ranks) for batch in self.batches]
                theirs = self.truth["losses"]
                gap = max(abs(a / b - 1) for a, b in zip(losses, theirs, strict=True))  # type: ignore[call-overload]
                bound = 1e-4 if self.setting.dtype == torch.float32 else 0.02
                return {"loss_gap": float(f"{gap:.3g}"), "loss_bound": bound, "correct": gap <= bound}
            loss = whole_loss(run, run.step(self.batches[0]), self.ranks)
            errors = gaps(loss, run.gradients(), self.truth["loss"], self.truth["grads"])  # type: ignore[arg-type]
            bounds: dict[str, float] = self.truth["bounds"]  # type: ignore[assignment]
            right = all(errors[key] <= bounds[key] for key in bounds)
            row = {
                f"{key}_{what}": float(f"{of[key]:.3g}")
                for what, of in (("gap", errors), ("bound", bounds))
                for key in bounds
            }
            return {**row, "correct": not self.agreement.any(not right)}

    def _turn(self, one: Kept, steps: int) -> None:
        """A step that warms up, steps that are synchronised, and as many in one go."""
        batch = self.batches[0]
        begun = self._allocated()
        with attention(self.device):
            for _ in range(2):
                one.run.step(batch)
            self._settle(one.run)
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            each: list[float] = []
            for _ in range(steps):
                self._meet()
                start = time.perf_counter()
                one.run.step(batch)
                self._settle(one.run)
                each.append(time.perf_counter() - start)
            self._meet()
            free = self._free(one.run, batch, steps)
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated() - begun + one.held if one.run.peak is None else one.run.peak()
            one.peak = max(one.peak, peak)
            if (rate := clock()) is not None:
                one.clocks.append(rate)
        one.run.rest()
        *each, free = self.agreement.most([*each, free])
        one.each.append(each)
        one.free.append(free)

    def _free(self, run: Run, batch: Mapping[str, Tensor], steps: int) -> float:
        if self.device.type != "cuda" or run.settle is not None:
            start = time.perf_counter()
            for _ in range(steps):
                run.step(batch)
            self._settle(run)
            return (time.perf_counter() - start) / steps
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(steps):
            run.step(batch)
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1e3 / steps

    def _meet(self) -> None:
        synchronize(self.device)
        dist.barrier(group=self.agreement.group)

    def _settle(self, run: Run) -> None:
        if run.settle is not None:
            run.settle()
        synchronize(self.device)

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else 0

    def _found(self, name: str, one: Kept, again: bool) -> dict[str, object]:
        medians = [statistics.median(each) for each in one.each]
        all_of = sorted(second for each in one.each for second in each)
        median = statistics.median(all_of)
        flops = self.setting.model.flops(self.row.sequences) / self.ranks
        row: dict[str, object] = {
            "median_ms": ms(median),
            "rounds_ms": [ms(each) for each in medians],
            "min_ms": ms(all_of[0]),
            "max_ms": ms(all_of[-1]),
            "free_ms": ms(statistics.median(one.free)),
            "free_rounds_ms": [ms(each) for each in one.free],
            "tokens_per_s": round(self.row.sequences * self.setting.model.sequence / median),
            "mfu": round(flops / median / PEAK, 4),
        }
        if self.device.type == "cuda":
            peak, held = self.agreement.most([one.peak, one.held])
            row |= {"peak_gib": round(peak / 2**30, 2), "held_gib": round(held / 2**30, 2), "clocks_mhz": one.clocks}
        about = {key: self.about[key] for key in ("device", "torch", "commit")}
        head = {"row": self.row.name, "contestant": name, "turns": self.turns, **({"again": True} if again else {})}
        return {**head, **row, **one.row, **about, "optimizer": self.row.optimizer, "bar": self.row.bar}


def ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)


def gaps(loss: float, grads: Mapping[str, Tensor], to: float, theirs: Mapping[str, Tensor]) -> Errors:
    """Relative: of the loss, and of the gradient that is furthest off, by norms. Infinite for one that is missing."""
    worst = 0.0
    for name, truth in theirs.items():
        if name not in grads:
            return {"loss": float("inf"), "grad": float("inf")}
        gradient = grads[name].detach().cpu().double()
        gap = float((gradient - truth.double()).norm() / truth.double().norm())
        worst = max(worst, gap if gap == gap else float("inf"))
    off = abs(loss / to - 1)
    return {"loss": off if off == off else float("inf"), "grad": worst}
