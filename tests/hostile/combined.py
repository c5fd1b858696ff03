"""Runs of training in which several features meet, drawn by a seed, and the same runs in plain eager PyTorch.

    Combination.drawn(17)        what meets: mesh, optimizers, microbatches, shapes, averages, an interruption, ...
    sharded(drawn, folder)       what `trainer.train` left after each step: loss, parameters, averages, rates, ...
    eagerly(drawn)               the same of a loop that is written here
    on_one_device(drawn, folder) the same of shardc's own program for one device, where dropout is drawn

An interrupted run is given up after a step, and gone on with by new objects, perhaps on another mesh, from its
checkpoint. Nothing of shardc is used in the eager loop. Longer than 400 lines: a run as it is drawn, in shardc and in
plain PyTorch, has to be read side by side.
"""

from __future__ import annotations

import copy
import math
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

import shardc

Batch = dict[str, Tensor]
VOCAB, WIDTH, LENGTH, ROWS = 7, 4, 5, 8
IGNORED = -100
DECAY, CLIP, SEED = 0.6, 0.3, 11


# ---------------------------------------------------------------------- models
class Tokens(nn.Module):
    """A causal reader of tokens: attention over those before, and a loss over those that are labelled."""

    def __init__(self, drop: float, shift: int) -> None:
        super().__init__()
        self.drop, self.shift = drop, shift
        self.embed, self.b = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        before = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True).squeeze(1)
        logits = self.head(self.norm(x + F.dropout(self.b(before), self.drop, self.training)))
        kept, target = (logits[:, :-1], labels[:, 1:]) if self.shift else (logits, labels)
        return {"loss": F.cross_entropy(kept.flatten(0, 1), target.flatten()), "size": logits.square().mean()}


class Rows(nn.Module):
    """A regression over rows, with a batch norm, whose statistics go from microbatch to microbatch."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.drop = drop
        self.embed, self.b = nn.Linear(3, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.norm, self.head = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.norm(self.embed(x).transpose(1, 2)).transpose(1, 2).tanh()
        h = h + F.dropout(self.b(h), self.drop, self.training).tanh()
        error = self.head(h).squeeze(-1) - x.sum(-1)
        return {"loss": error.square().mean(), "size": error.abs().mean()}


# ---------------------------------------------------------------------- what is drawn
DP, ROWS_AND_TP = {"*": "dp"}, {"head.weight": "-, tp", "b.weight": "tp, -"}
ZERO = {z: {"storage": {"zero": z, "axes": ["dp"]}} for z in (1, 2, 3)}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dp2": ("dp=2", {"inputs": DP}),
    "dp3": ("dp=3", {"inputs": DP}),
    "dp4 zero1": ("dp=4", {"inputs": DP, **ZERO[1]}),
    "tp2": ("tp=2", {"params": {"head.weight": "-, tp"}}),
    "dp2 tp2": ("dp=2, tp=2", {"inputs": DP, "params": ROWS_AND_TP}),
    "zero1": ("dp=2", {"inputs": DP, **ZERO[1]}),
    "zero2": ("dp=2", {"inputs": DP, **ZERO[2]}),
    "zero3": ("dp=3", {"inputs": DP, **ZERO[3]}),
    "zero3 tp2": ("dp=2, tp=2", {"inputs": DP, "params": {"b.weight": "-, tp"}, **ZERO[3]}),
    "gpipe": ("pp=2", {"pipeline": {"schedule": "gpipe"}}),
    "1f1b": ("pp=2, dp=2", {"inputs": DP, "pipeline": {"schedule": "1f1b"}}),
    "zb": ("pp=2", {"pipeline": {"schedule": "zb-h1"}}),
    "interleaved": ("pp=2", {"pipeline": {"schedule": "interleaved"}}),
    "1f1b zero3": ("pp=2, dp=2", {"inputs": DP, "pipeline": {"schedule": "1f1b"}, **ZERO[3]}),
}
PARTS = {"dp2": 2, "dp2 tp2": 2, "zero1": 2, "zero2": 2, "zero3 tp2": 2, "1f1b": 2, "1f1b zero3": 2, "dp4 zero1": 4}
OPTIMIZERS = ("sgd", "adamw", "two", "partial", "nadam", "adafactor")
SCHEDULERS = (None, "step", "lambda", "plateau", "plateau of evaluations")
EVENTS = ("", "", "", "unfreeze", "freeze", "both", "group", "hyper")
LOADERS = ("list", "list", "loader", "stateful", "iterable", "global")
BETWEEN = ("", "", "", "predict", "sync", "swapped", "evaluate", "reload", "export")


@dataclass(frozen=True)
class Combination:
    """A run. `rows` are those of each batch of an epoch, `lengths` of its tokens; `stop` is the step after which it is
    given up, to be gone on with under `then`; `event` happens after step `at`, `between` after each even step."""

    seed: int
    tokens: bool
    layout: str
    then: str
    microbatches: int
    optimizer: str
    clip: bool
    per_rank: bool
    pad: bool
    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    loader: str
    epochs: int
    averages: bool
    scheduler: str | None
    evaluate_every: int
    stop: int
    every: int
    event: str
    at: int
    between: str
    drop: float
    infinite: int  # the batch of an epoch that has an infinity, or -1; such steps are skipped
    shift: int

    @classmethod
    def drawn(cls, seed: int) -> Combination:
        draw = random.Random(seed)
        tokens = draw.random() < 0.6
        layout = draw.choice(list(LAYOUTS))
        pipelined = "pipeline" in LAYOUTS[layout][1]
        microbatches = draw.choice((2, 4)) if pipelined else draw.choice((1, 1, 2, 4))
        per_rank = layout in PARTS and draw.random() < 0.4
        count = PARTS[layout] if per_rank else 1
        if per_rank and ROWS % (count * microbatches):
            microbatches = ROWS // count // draw.choice((1, 2)) if pipelined else 1
            microbatches = max(2, microbatches) if pipelined else microbatches
        few = [rows for rows in (ROWS - 3, ROWS - 2, 4, 3, 2, 1) if rows % count == 0]
        epoch = [ROWS, *draw.choice(((ROWS, ROWS), (ROWS, draw.choice(few)), (draw.choice(few), ROWS)))]
        lengths = [LENGTH, LENGTH, draw.choice((LENGTH, LENGTH, LENGTH - 2))] if tokens else [0, 0, 0]
        loader = "list" if per_rank else draw.choice(LOADERS)
        if loader in ("loader", "stateful", "global"):
            last = draw.choice(few)
            epoch, lengths = [ROWS, ROWS, last], [lengths[0]] * 3
        epochs = draw.choice((1, 2))
        steps = 3 * epochs
        stop = draw.choice((0, *range(1, steps)))
        same = [name for name in LAYOUTS if ("pipeline" in LAYOUTS[name][1]) == pipelined or microbatches > 1]
        alike = [name for name in same if not per_rank or (PARTS.get(name) == count)]
        evaluate_every = draw.choice((0, 0, 1, 2))
        scheduler = draw.choice(SCHEDULERS)
        if scheduler == "plateau of evaluations" and not evaluate_every:
            evaluate_every = 2
        event = draw.choice(EVENTS)
        drop, padded = draw.choice((0.0, 0.0, 0.0, 0.3)), tokens and draw.random() < 0.5
        if drop and per_rank and microbatches > 1 and not padded:
            epoch = [ROWS] * 3  # of others the parts have other microbatches than the whole
        return cls(
            seed, tokens, layout, draw.choice(alike) if stop else layout, microbatches, draw.choice(OPTIMIZERS),
            draw.random() < 0.4, per_rank, padded, tuple(epoch), tuple(lengths), loader, epochs,
            draw.random() < 0.5, scheduler, evaluate_every, stop, draw.choice((0, 1, 2)), event,
            draw.randrange(1, max(2, steps - 1)), draw.choice(BETWEEN), drop,
            -1 if tokens or draw.random() < 0.7 else draw.randrange(3), draw.choice((0, 1)) if tokens else 0,
        )  # fmt: skip

    @property
    def steps(self) -> int:
        return 3 * self.epochs

    @property
    def parts(self) -> int:
        return PARTS[self.layout] if self.per_rank else 1

    def plan(self, layout: str) -> tuple[str, dict[str, Any]]:
        mesh, placed = LAYOUTS[layout]
        plan: dict[str, Any] = {**placed, "seed": SEED, "outputs": {} if self.pad else {"size": ""}}
        if "pipeline" in plan:
            pipeline: dict[str, Any] = plan["pipeline"]
            plan["pipeline"] = {**pipeline, "microbatches": self.microbatches}
        else:
            plan["accumulate"] = self.microbatches
        if self.tokens:
            plan["loss"] = {"tokens": "labels", "shift": self.shift}
        if self.clip:
            plan["clip_grad_norm"] = CLIP
        if self.pad:
            plan["pad"] = True
        if self.infinite >= 0:
            plan["nonfinite"] = "skip"
        if self.per_rank:
            plan["data"] = "per_rank"
        return mesh, plan

    # ------------------------------------------------------------------ data
    def batches(self) -> list[Batch]:
        """Those of an epoch, whole; of one in parts, the parts one after the other."""
        return [
            self.batch(k, rows, length) for k, (rows, length) in enumerate(zip(self.rows, self.lengths, strict=True))
        ]

    def held_out(self) -> list[Batch]:
        sizes = [(ROWS, LENGTH), (self.rows[-1] if self.seed % 4 == 0 else ROWS, LENGTH)]
        return [self.batch(10 + k, rows, length) for k, (rows, length) in enumerate(sizes)]

    def batch(self, number: int, rows: int, length: int) -> Batch:
        draw = torch.Generator().manual_seed(100 * self.seed + number)
        if not self.tokens:
            x = torch.randn(rows, 3, 3, generator=draw, dtype=torch.float64)
            if number == self.infinite:
                x[0, 0, 0] = math.inf
            return {"x": x}
        ids, labels = (torch.randint(VOCAB, (rows, length), generator=draw) for _ in range(2))
        lengths = torch.randint(0, length + 1, (rows, 1), generator=draw)
        labels = labels.masked_fill(torch.arange(length) >= lengths, IGNORED)
        if number % 3 == 1:
            labels[: (rows + 1) // 2] = IGNORED  # a part, or a microbatch, without tokens
        elif not (labels[:, self.shift :] != IGNORED).any():
            labels[-1, -1] = 1
        return {"ids": ids, "labels": labels}

    def rows_of_data(self) -> list[Batch]:
        """The rows that a data loader deals."""
        whole = [self.batch(k, ROWS, LENGTH) for k in range(3)]
        count = 2 * ROWS + self.rows[-1]
        return [{name: t[i % ROWS] for name, t in whole[i // ROWS].items()} for i in range(count)]

    def source(self) -> Any:
        """What `train` is given, made anew."""
        if self.per_rank:
            return [self.in_parts(batch) for batch in self.batches()]
        if self.loader == "list":
            return self.batches()
        if self.loader == "iterable":
            return _Iterable(self.batches())
        if self.loader == "global":
            torch.manual_seed(5)
            return DataLoader(self.rows_of_data(), ROWS, shuffle=True)  # type: ignore[arg-type]
        kind: Any = DataLoader
        if self.loader == "stateful":
            from torchdata.stateful_dataloader import StatefulDataLoader

            kind = StatefulDataLoader
        return kind(self.rows_of_data(), ROWS, shuffle=True, generator=torch.Generator().manual_seed(5))

    def in_parts(self, batch: Batch) -> shardc.Parts:
        return shardc.Parts({n: t.chunk(self.parts)[i] for n, t in batch.items()} for i in range(self.parts))

    # ------------------------------------------------------------------ what is trained
    def model(self) -> nn.Module:
        torch.manual_seed(3)
        model = Tokens(self.drop, self.shift) if self.tokens else Rows(self.drop)
        if self.event in ("unfreeze", "both", "group"):
            model.embed.requires_grad_(False)
        return model.double()

    def optimizers(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        known = [p for n, p in model.named_parameters() if self.event != "group" or not n.startswith("embed")]
        matrices, vectors = [p for p in known if p.ndim > 1], [p for p in known if p.ndim == 1]
        if self.optimizer == "sgd":
            return [torch.optim.SGD(known, lr=0.05, momentum=0.9, weight_decay=0.01)]
        if self.optimizer == "adamw":
            return [torch.optim.AdamW(known, lr=0.01, eps=1e-3)]
        if self.optimizer == "nadam":
            return [torch.optim.NAdam(known, lr=0.01, eps=1e-3)]
        if self.optimizer == "adafactor":
            return [torch.optim.Adafactor(known, lr=0.01)]
        sgd = torch.optim.SGD(vectors[1 if self.optimizer == "partial" else 0 :], lr=0.02, momentum=0.5)
        return [torch.optim.AdamW(matrices, lr=0.01, eps=1e-3), sgd]

    def schedulers(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[Any]:
        kinds = torch.optim.lr_scheduler
        if self.scheduler is None:
            return []
        if self.scheduler == "step":
            return [kinds.StepLR(o, 2, 0.7) for o in optimizers]
        if self.scheduler == "lambda":
            return [kinds.LambdaLR(o, lambda step: 1 / (1 + step)) for o in optimizers]
        return [kinds.ReduceLROnPlateau(o, patience=0, factor=0.5, threshold=0.05) for o in optimizers]

    @property
    def monitor(self) -> str | None:
        return {"plateau": "loss", "plateau of evaluations": "evaluated.loss"}.get(self.scheduler or "")

    def change(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], schedulers: Sequence[Any], step: int
    ) -> bool:
        """What happens to the model after a step, if anything."""
        last = self.event == "both" and step == self.at + 1
        if step != self.at and not last:
            return False
        if self.event in ("unfreeze", "group"):
            model.embed.requires_grad_(True)  # type: ignore[union-attr]
        if self.event == "group":
            optimizers[0].add_param_group({"params": model.embed.parameters()})  # type: ignore[union-attr]
            if self.scheduler == "lambda":  # torch's own lists, which it does not add to
                schedulers[0].lr_lambdas.append(schedulers[0].lr_lambdas[0])
                schedulers[0].base_lrs.append(optimizers[0].param_groups[-1]["lr"])
        if self.event == "freeze":
            model.b.requires_grad_(False)  # type: ignore[union-attr]
        if self.event == "both":
            model.embed.requires_grad_(not last)  # type: ignore[union-attr]
        if self.event == "hyper":
            optimizers[0].param_groups[0]["weight_decay"] = 0.2
        return bool(self.event)


class _Iterable:
    """A stream that begins as it did, and knows nothing of its length."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


@dataclass
class Trace:
    """What a run left behind, step by step."""

    values: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def note(self, step: int, what: str, value: Any) -> None:
        self.values[f"step {step}: {what}"] = torch.as_tensor(value, dtype=torch.float64).detach().clone()

    def note_all(self, step: int, what: str, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            self.note(step, f"{what} {name}", value)

    def differences(self, other: Trace, tolerance: float) -> list[str]:
        found = [f"{key}: only one has it" for key in self.values.keys() ^ other.values.keys()]
        for key in self.values.keys() & other.values.keys():
            mine, its = self.values[key], other.values[key]
            if mine.shape != its.shape or not torch.allclose(mine, its, rtol=tolerance, atol=tolerance, equal_nan=True):
                found.append(f"{key}: {mine.flatten()[:3].tolist()}... is not {its.flatten()[:3].tolist()}...")
        return sorted(found)


# ---------------------------------------------------------------------- plain PyTorch
def eagerly(drawn: Combination) -> Trace:
    """The run, never interrupted."""
    trace, model = Trace(), drawn.model()
    optimizers = drawn.optimizers(model)
    schedulers, averaged = drawn.schedulers(optimizers), None
    if drawn.averages:
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    given, step = drawn.source(), 0
    for _ in range(drawn.epochs):
        for batch in given:
            count = microbatches_of(drawn, batch)
            batch = joined(batch, count) if drawn.per_rank else batch
            loss, norm, skipped = eager_step(drawn, model, optimizers, batch, count)
            step += 1
            trace.note(step, "loss", loss)
            trace.note(step, "skipped", skipped)
            if drawn.clip:
                trace.note(step, "norm", norm)
            if averaged is not None and not skipped:
                averaged.update_parameters(model)
            evaluated = None
            if drawn.evaluate_every and (step % drawn.evaluate_every == 0 or step == known_last(drawn)):
                evaluated = eager_evaluation(drawn, model)
                trace.note_all(step, "evaluated", evaluated)
            for scheduler in schedulers:
                scheduler.optimizer._opt_called = True  # of a step that is skipped
                if drawn.scheduler == "plateau":
                    scheduler.step(loss)
                elif drawn.scheduler != "plateau of evaluations":
                    scheduler.step()
                elif evaluated is not None:
                    scheduler.step(evaluated["loss"])
            note_rates(trace, step, optimizers)
            trace.note_all(step, "model's", model.state_dict())
            if averaged is not None:
                averages = dict(averaged.module.named_parameters())
                trace.note_all(step, "average of", averages if averaged.n_averaged else dict(model.named_parameters()))
            drawn.change(model, optimizers, schedulers, step)
    return trace


def known_last(drawn: Combination) -> int:
    """The last step, if the loader has a length."""
    return 0 if drawn.loader == "iterable" else drawn.steps


def microbatches_of(drawn: Combination, batch: Any) -> int:
    """As few as divide a batch, or each of its parts, and have no more rows than those of a whole batch."""
    rows = next(iter((batch[0] if drawn.per_rank else batch).values())).shape[0]
    most = ROWS // drawn.parts // drawn.microbatches
    return next(n for n in range(1, rows + 1) if rows % n == 0 and rows // n <= most) if drawn.microbatches > 1 else 1


def eager_step(
    drawn: Combination, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], batch: Batch, count: int
) -> tuple[float, float, bool]:
    """Loss, norm, and whether the step is skipped."""
    buffers = {name: t.clone() for name, t in model.named_buffers()}
    model.train()
    model.zero_grad(set_to_none=True)
    parts = [{name: t.chunk(count)[k] for name, t in batch.items()} for k in range(count)]
    weights = weights_of(drawn, parts)
    total = torch.zeros((), dtype=torch.float64)
    for part, weight in zip(parts, weights, strict=True):
        output = model(**part)["loss"]
        loss = output * weight if weight else output.nan_to_num() * 0.0
        loss.backward()
        total = total + loss.detach()
    for p in model.parameters():
        if p.requires_grad and p.grad is not None and not any(weights):
            p.grad.zero_()
    trained = [p for p in model.parameters() if p.requires_grad and p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in trained]))  # type: ignore[union-attr]
    if drawn.infinite >= 0 and not norm.isfinite():
        with torch.no_grad():
            for name, t in model.named_buffers():
                t.copy_(buffers[name])
        return float(total), float(norm), True
    if drawn.clip:
        nn.utils.clip_grad_norm_(trained, CLIP)
    for optimizer in optimizers:
        optimizer.step()
    return float(total), float(norm), False


def weights_of(drawn: Combination, parts: Sequence[Batch]) -> list[float]:
    """What the loss of each microbatch counts by."""
    if not drawn.tokens:
        return [1 / len(parts)] * len(parts)
    counts = [int((part["labels"][:, drawn.shift :] != IGNORED).sum()) for part in parts]
    return [count / max(1, sum(counts)) for count in counts]


def eager_evaluation(drawn: Combination, model: nn.Module) -> dict[str, float]:
    """Mean loss, by tokens or rows, and the mean of the scalar, by rows."""
    copied = copy.deepcopy(model).eval()
    losses, sizes = list[tuple[float, float]](), list[tuple[float, float]]()
    for batch in drawn.held_out():
        rows = float(next(iter(batch.values())).shape[0])
        tokens = float((batch["labels"][:, drawn.shift :] != IGNORED).sum()) if drawn.tokens else rows
        with torch.no_grad():
            output = copied(**batch)
        losses.append((float(output["loss"]) if tokens else 0.0, tokens))
        sizes.append((float(output["size"]), rows))
    return {"loss": _mean(losses), "size": _mean(sizes)}


def _mean(pairs: Sequence[tuple[float, float]]) -> float:
    return sum(value * weight for value, weight in pairs) / max(sum(weight for _, weight in pairs), 1.0)


def joined(parts: Sequence[Batch], count: int) -> Batch:
    """The whole batch of parts: microbatch by microbatch, of each its slice of every part."""
    return {name: torch.cat([part[name].chunk(count)[k] for k in range(count) for part in parts]) for name in parts[0]}


def padded(part: Batch, rows: int) -> Batch:
    """A part with what `pad` adds to it."""
    ids, labels = part["ids"], part["labels"]
    for dim, size in ((0, rows), (1, LENGTH)):
        more = size - ids.shape[dim]
        last = ids.narrow(dim, ids.shape[dim] - 1, 1)
        ids = torch.cat([ids, *[last] * more], dim)
        labels = torch.cat([labels, *[torch.full_like(last, IGNORED)] * more], dim)
    return {"ids": ids, "labels": labels}


def note_rates(trace: Trace, step: int, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    rates = [float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    trace.note_all(step, "rate of group", dict(zip(map(str, range(len(rates))), rates, strict=True)))


# ---------------------------------------------------------------------- shardc
def sharded(drawn: Combination, folder: Path) -> Trace:
    """The run, given up and gone on with as is drawn."""
    trace = Trace()
    run_sharded(drawn, drawn.layout, folder, trace, 0, drawn.stop)
    if drawn.stop:
        run_sharded(drawn, drawn.then, folder, trace, drawn.stop, 0)
    return trace


def on_one_device(drawn: Combination, folder: Path) -> Trace:
    """The run on a mesh of one rank, which nothing is sharded over, not interrupted. Parts are padded here."""
    alone = replace(drawn, per_rank=False, stop=0, every=0, between="")
    trace, given = Trace(), None
    if drawn.per_rank:
        wholes = drawn.source()
        if drawn.pad:
            wholes = [[padded(part, ROWS // drawn.parts) for part in parts] for parts in wholes]
        given = [joined(parts, microbatches_of(drawn, parts)) for parts in wholes]
    run_sharded(alone, None, folder, trace, 0, 0, given)
    return trace


def run_sharded(
    drawn: Combination, layout: str | None, folder: Path, trace: Trace, done: int, stop: int, given: Any = None
) -> None:
    """Steps until `stop`, after `done` ones of an earlier process."""
    mesh, plan = drawn.plan(layout or drawn.layout)
    if layout is None:
        plan = {k: v for k, v in plan.items() if k in ("seed", "outputs", "loss", "clip_grad_norm", "pad", "nonfinite")}
        mesh, plan["accumulate"] = "dp=1", drawn.microbatches
    model = drawn.model()
    optimizers = drawn.optimizers(model)
    schedulers = drawn.schedulers(optimizers)
    for step in range(1, done + 1):  # as the script of a user who resumes does
        drawn.change(model, optimizers, schedulers, step)
    sample = drawn.batch(0, ROWS, LENGTH)
    program = shardc.compile(model, sample, mesh=mesh, plan=plan, optimizer=optimizers)
    trainer = program.launch()
    ema = shardc.EMA(trainer, DECAY) if drawn.averages else None
    options: dict[str, Any] = {"scheduler": schedulers or None, "monitor": drawn.monitor}
    if drawn.evaluate_every:
        held_out = [drawn.in_parts(b) for b in drawn.held_out()] if drawn.per_rank else drawn.held_out()
        options |= {"evaluate": held_out, "evaluate_every": drawn.evaluate_every}
    if drawn.stop or drawn.every:
        options |= {"checkpoint": folder / "run", "every": drawn.every}
    given = drawn.source() if given is None else given
    for metrics in trainer.train(given, epochs=drawn.epochs, progress=False, **options):
        step = metrics.step
        trace.note(step, "loss", metrics.loss)
        trace.note(step, "skipped", metrics.skipped)
        if drawn.clip:
            trace.note(step, "norm", metrics.grad_norm)
        if metrics.evaluated is not None:
            trace.note_all(step, "evaluated", {"loss": metrics.evaluated.loss, **metrics.evaluated.scalars})
        note_rates(trace, step, optimizers)
        trace.note_all(step, "model's", trainer.state_dict())
        if ema is not None:
            averages = ema.state_dict()
            trace.note_all(step, "average of", {name: averages[name] for name, _ in model.named_parameters()})
        if drawn.between and step % 2 == 0:
            between(drawn, trainer, ema, model, folder)
        if drawn.change(model, optimizers, schedulers, step):
            trainer.recompile()
        if step == stop:
            break
    trainer.close()


def between(drawn: Combination, trainer: shardc.Trainer, ema: Any, model: nn.Module, folder: Path) -> None:
    """What leaves training as it is."""
    batch = drawn.held_out()[1]
    batch = drawn.in_parts(batch) if drawn.per_rank else batch
    if drawn.between == "predict":
        trainer.predict(batch)
    elif drawn.between == "evaluate":
        trainer.evaluate([batch])
    elif drawn.between == "sync":
        trainer.sync_to(model)
    elif drawn.between == "export":
        trainer.export_safetensors(folder / "exported")
    elif drawn.between == "swapped" and ema is not None:
        with ema.swapped():
            trainer.evaluate([batch])
            trainer.state_dict()
    elif drawn.between == "reload":
        trainer.save(folder / "other")
        trainer.load(folder / "other")


def compared(drawn: Combination, folder: Path, tolerance: float = 1e-9) -> list[str]:
    """What differs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = sharded(drawn, folder)
        expected = on_one_device(drawn, folder / "one") if drawn.drop else eagerly(drawn)
    return found.differences(expected, tolerance)
