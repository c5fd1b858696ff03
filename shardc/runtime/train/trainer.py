"""`Trainer`: the steps of a program, on this rank of a running job, or on all ranks simulated in this process.

    trainer = launch(program)            # torchrun --nproc-per-node 4 train.py, or plain python
    for batch in batches:
        result = trainer.step(batch)     # loss, gradients; updated buffers are kept
        trainer.sgd(1e-3)

In a job each rank holds its shards alone, from the moment they are loaded: parameters are read slice by slice, or made
one at a time and cut. In simulation the tensors are whole, and the same calls give the same numbers.

Longer than 400 lines: it is the one list of what a trainer can do. What its methods do is in the modules beside it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardc.cost.profile import Profile
from shardc.ir.default_device import on_cpu
from shardc.ir.diagnostic import error
from shardc.ir.gc_pause import gc_paused
from shardc.ir.graph import Port, type_of
from shardc.ir.microbatch import GIVEN
from shardc.ir.types import TensorType
from shardc.runtime.checkpoint.export import export
from shardc.runtime.checkpoint.held import Held, Position
from shardc.runtime.checkpoint.hugging_face import export_hf
from shardc.runtime.checkpoint.weights import Init, Weights
from shardc.runtime.execute.microbatches import Feed
from shardc.runtime.execute.step_graph import Graphs, are_captured, is_never_captured, warn_not_captured
from shardc.runtime.generate.generator import Choosing, Generator
from shardc.runtime.generate.result import Finished, Generated
from shardc.runtime.train.agreement import facts_of
from shardc.runtime.train.callbacks import Callback
from shardc.runtime.train.consensus import Consensus
from shardc.runtime.train.device_copy import Copied, Copier
from shardc.runtime.train.ema import EMA, KEY, ROLE
from shardc.runtime.train.engine import Engine, Engines
from shardc.runtime.train.evaluate import Evaluator
from shardc.runtime.train.expert_load import ExpertLoad, overfull
from shardc.runtime.train.feeding import Feeding
from shardc.runtime.train.launched import Launchable, Launched
from shardc.runtime.train.loop import Run, train
from shardc.runtime.train.loop_state import Stateful
from shardc.runtime.train.lr_schedule import Schedulers
from shardc.runtime.train.metrics import Evaluated, Metrics
from shardc.runtime.train.model_state import ModelState, sync
from shardc.runtime.train.nonfinite import nonfinite
from shardc.runtime.train.rank_part import RankPart
from shardc.runtime.train.recompile import HandedOn, hand_on
from shardc.runtime.train.replicas import EVERY, FIRST, Item, corners
from shardc.runtime.train.result import Kept, StepResult, Tensors
from shardc.runtime.train.shapes import Step, Steps
from shardc.runtime.train.starting_values import StartingValues

if TYPE_CHECKING:
    from shardc.runtime.checkpoint.checkpoint import Checkpoints, Saving

STATE_ROLES = ("param", "buffer", "state")


class Trainer:
    """Holds the state of a program and steps it; see `launch`."""

    def __init__(
        self,
        program: Launched,
        engine: Engine,
        start: StartingValues,
        seed: int,
        check_every: int = EVERY,
        handed_on: HandedOn | None = None,
    ) -> None:
        body, plan = program.body, program.plan
        self._program, self.optimizers = program, tuple(program.optimizers)
        self.ema: EMA | None = None
        self.aside = handed_on.aside if handed_on is not None else {}
        parts = program.parts
        own = None if parts is None or parts.count == 1 else engine.brings(parts)
        self._feeding = Feeding(body, plan.get("batch"), program.check, plan.get("split", ()), parts, own)
        self._raises = plan.get("nonfinite") == "raise"
        self.expert_layers = plan.get("experts", ())
        self.rates = program.rates
        self.body, self.engine, self.seed, self.steps = body, engine, seed, 0
        self._inputs = {p.name: (p, type_of(n)) for p, n in zip(body.inputs, body.placeholders, strict=True)}
        kept = [(port, type) for port, type in self._inputs.values() if port.role in STATE_ROLES]
        self._kept = {port.name: (port, type) for port, type in kept}
        evaluated = lambda batch: self._evaluate(batch, "scalars")  # noqa: E731
        now = lambda: self.state  # noqa: E731
        self._programs = Steps(
            engine, self._feeding, plan.get("by_row", ()), program.training, program.batch, self._inputs,
            program.padding, now, evaluated,
        )  # fmt: skip
        self._last: Step = self._programs.first
        self._model_state = ModelState.of(plan.get("state"), self._kept, program.constants)
        known = handed_on.tensors if handed_on is not None else {}
        start.check([port for port, _ in kept if port.name not in known], self._model_state.unsaved)
        self._corners: Tensors = {}  # of the whole tensors that this rank holds shards of
        self.state = {
            n: engine.placed(n, held if (held := known.get(n)) is not None else self._loaded(port, type, start))
            for n, (port, type) in self._kept.items()
            if engine.holds(n)
        }
        self._check_every, self._taken = check_every, 0  # steps since the state was loaded
        self._evaluator = Evaluator(
            engine, program.evaluation, self._inputs, check_every, self._feeding, program.forward_part
        )
        self._generator = Generator(
            engine, program.generation, program.model, self._inputs, self._weights, self._compare_given
        )
        if handed_on is None:
            self._compare_launched()
        self._grads: Tensors | None = None  # of the last step, if one was made
        self._finite: torch.Tensor | None = None
        self._checkpoints: Checkpoints | None = None
        self.run = Run()
        self.gradients_used = False  # by the caller: `sgd` or `gather_grads`
        self.intact = True  # no step was left halfway: its error may have come after it wrote over the state
        self._consensus: Consensus | None = None
        self.interrupted = False  # with all other ranks, after the same step

    def __repr__(self) -> str:
        where = "all ranks simulated" if self.engine.peers is None else f"rank {self.engine.rank} of a job"
        return f"Trainer(step {self.steps}, {where}, on {self.device}, {len(self.state)} tensors of state)"

    @on_cpu
    def step(self, batch: Any) -> StepResult:
        """Loss and gradients of a global batch; every rank is given the whole of it and takes its part, or, where the
        plan says `data: per_rank`, brings its part."""
        self._refuse_swapped("step")
        self._program.refuse_changed_model()
        self._grads = None  # let the last step's go before this one's are made
        due = bool(self._check_every) and (self._taken < FIRST or self._taken % self._check_every == 0)
        if due and self._feeding.own is not None:
            self._feeding.own.agree(self._feeding.given(batch.host if isinstance(batch, Copied) else batch))
        rates = {name: self.engine.shards.hold(rate, self._inputs[name][1]) for name, rate in self.rates().items()}
        run, inputs = self._programs.of(batch, f"before step {self.steps}", due)
        state, fed = self.state | rates | run.constants, run.feeding.feeds(inputs, self.seed, self.steps)
        if due:
            self._compare(state, run.feeding.items(fed), fed)
        self._taken += 1
        self.intact = False
        result = StepResult.of(run.body, run.engine.run(state, fed, self.steps), run.engine.output, run.by_row)
        self._last = run
        if self._raises and result.finite is not None and not result.finite:
            self.intact = True
            raise nonfinite(self.steps, float(result.loss), run.engine.nonfinite(state, fed))
        if result.fits is not None and not result.fits:
            self.intact = True
            assert result.load is not None
            raise overfull(self.steps, ExpertLoad.of(result.load, self.expert_layers))
        self._grads = result.grads
        self._finite = result.finite
        self._keep(result)
        self.steps += 1
        self.intact = True
        if self.ema is not None and self.updates and (result.finite is None or bool(result.finite)):
            self.ema.update()
        return result

    def _keep(self, result: StepResult) -> None:
        """Take what a step returned as the state. What this rank holds stays where it is: a step of its own wrote most
        of it there, and the rest is copied. A simulation's tensors are new ones."""
        new: Tensors = {}
        for name, value in result.buffers.items():
            buffer, old = self._as_input("buffer", name, value), self.state[name]
            new[name] = buffer.clone() if result.finite is None else torch.where(result.finite, buffer, old)
        for name, value in result.updates.items():
            if value is not self.state[name]:
                new[name] = self._as_input(self._inputs[name][0].role, name, value)
        if not new:
            return
        if self.engine.peers is None:
            self.state |= new
            return
        held = {x.untyped_storage().data_ptr() for x in self.state.values()}
        new = {name: x.clone() if x.untyped_storage().data_ptr() in held else x for name, x in new.items()}
        for name, value in new.items():
            self.state[name].copy_(value)

    def train(
        self,
        batches: Iterable[Any],
        steps: int | None = None,
        *,
        epochs: int | None = None,
        checkpoint: str | Path | None = None,
        every: int = 0,
        scheduler: Schedulers = None,
        monitor: str | None = None,
        evaluate: Iterable[Any] | None = None,
        evaluate_every: int = 0,
        callbacks: Sequence[Callback] = (),
        stateful: Mapping[str, Stateful] | None = None,
        resume: bool = True,
        progress: bool = True,
        prefetch: bool = True,
    ) -> Iterator[Metrics]:
        """Steps up to the `steps`-th, or `epochs` passes over the batches, and the metrics of each; every rank must run
        it, with the same batches, or under `data: per_rank` with its part of them.

            for metrics in trainer.train(loader, epochs=3, checkpoint="out/run", every=100):
                print(metrics.loss)

        `checkpoint` is a folder, saved `every` so many steps in the background, when the caller is done with the step,
        and at the end: after the last step or batch, and where an error, a signal or the caller ends the loop. If a
        rank gets a signal (SIGINT, SIGTERM) or a callback fails on it, all ranks end after the same step. Where the
        folder exists, training goes on from it, unless `resume` is false: a loader that has a state is given the one
        that it had then; of all others the batches that were trained on are passed over. A later call of the same
        trainer trains on all that it is given. Before each epoch the sampler's `set_epoch` is called, if it has one. On
        a GPU the next batch is fetched and copied while a step is computed, unless `prefetch` is false.

        The `scheduler`, of torch.optim.lr_scheduler, or each of a list, steps after each step, or if it wants a metric,
        when there is one that `monitor` names: "loss", "grad_norm", a scalar of the outputs, or "evaluated.loss".
        `evaluate` are batches to evaluate `evaluate_every` so many steps and after the last (of `epochs` where the
        loader has a length): `metrics.evaluated`. `callbacks` are functions of (metrics, trainer) that all ranks call
        after each step; one that returns True ends the training. `stateful` are objects by name whose `state_dict` is
        saved and restored too, as are callbacks that have one. The leading rank shows `progress` on standard error: on
        a terminal a line that is renewed, else about twenty over the run.

        Raises ShardcError: SC551 where another job writes the checkpoint, SC552 for a metric that there is not, SC553
        for arguments that cannot be used, or could have no effect, SC557 for a loader whose state cannot be kept, or is
        another's.
        """
        self._refuse_forward_only("train")
        return train(
            self,
            batches,
            steps,
            epochs=epochs,
            checkpoint=checkpoint,
            every=every,
            scheduler=scheduler,
            monitor=monitor,
            evaluate=evaluate,
            evaluate_every=evaluate_every,
            callbacks=callbacks,
            stateful=stateful,
            resume=resume,
            progress=progress,
            prefetch=prefetch,
        )

    @on_cpu
    def evaluate(self, batches: Iterable[Any], steps: int | None = None) -> Evaluated:
        """The mean loss over batches, at most `steps`, and the means of the scalars among the model's outputs.

        Every rank must call it, with the same batches. The model is evaluated as `model.eval()` makes it, with the
        trainer's present parameters and buffers; nothing of the training changes. The loss is weighted by a batch's
        tokens if the plan's is, else by its rows. For each shape of batch a program is compiled, once; four are kept.
        Raises ShardcError (SC546) for no batches, or where the program came from a file.
        """
        return self._evaluator.mean(batches, steps, self.state, self.seed, self.steps)

    @on_cpu
    def predict(self, batch: Any) -> StepResult:
        """What the model returns for a batch, evaluated as in `evaluate`: all `outputs`, and the loss if it makes one.
        Labels for a loss function are not needed. Every rank must call it."""
        return self._evaluate(batch, "all")

    def _evaluate(self, batch: Any, kept: Kept) -> StepResult:
        return self._evaluator.run(batch, kept, self.state, self.seed, self.steps)

    @on_cpu
    def generate(
        self,
        prompts: Any,
        max_new_tokens: int | Iterable[int] | None = None,
        *,
        rows: int | None = None,
        attention_mask: Any = None,
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        seed: int | None = None,
        tokenizer: Any = None,
        generation_config: Any = None,
        **options: Any,
    ) -> Generated:
        """New tokens for each prompt, by the trainer's present weights; every rank must call it, with the same prompts.

        `prompts` are lists of token ids, of any lengths; a tensor, with its `attention_mask` if rows are padded, on
        either side; or texts, with a `tokenizer`. The options are those of a model's own `generate` in transformers,
        None for what its generation config says; `eos_token_id=[]` lets no token end a row. Sampled tokens depend on
        the `seed`, by default the trainer's, on a row's number and on a position, and on no layout.

            trainer.generate([[5, 6, 7], [8]], max_new_tokens=20).tokens

        With `rows`, so many sequences are generated at a time, and where one ends the next prompt takes its row; then
        `max_new_tokens` may be one number for each prompt. Each sequence is that of its prompt alone.

        The model is used as `model.eval()` makes it; nothing of the training changes. Raises ShardcError: SC571 for a
        model that does not generate, SC572 for an option that is not supported, SC573 for prompts.
        """
        named = {"do_sample": do_sample, "temperature": temperature, "top_k": top_k, "top_p": top_p}
        named |= {"eos_token_id": eos_token_id, "pad_token_id": pad_token_id}
        choosing = self._choosing(named | options, seed, tokenizer, generation_config)
        return self._generator.generate(prompts, attention_mask, max_new_tokens, choosing, rows)

    def generate_stream(
        self,
        prompts: Any,
        max_new_tokens: int | Iterable[int] | None = None,
        *,
        rows: int = 8,
        attention_mask: Any = None,
        seed: int | None = None,
        tokenizer: Any = None,
        generation_config: Any = None,
        **options: Any,
    ) -> Iterator[Finished]:
        """Each sequence when it ends, of which `rows` are generated at a time: where one ends, the next prompt takes
        its row. Every rank must take all of them, with the same prompts.

        `prompts` are those of `generate`, or an iterator of them, which is asked for the next one when a row is free;
        `max_new_tokens` is one number, or one for each prompt. All else is as in `generate`.

            for finished in trainer.generate_stream(prompts, max_new_tokens=200, rows=8):
                print(finished.prompt, finished.tokens)

        Raises ShardcError: those of `generate`, and SC574 where the weights change before the last sequence has ended.
        """
        choosing = self._choosing(options, seed, tokenizer, generation_config)
        return on_cpu(self._generator.stream)(prompts, attention_mask, max_new_tokens, choosing, rows)

    def _choosing(
        self, options: Mapping[str, Any], seed: int | None, tokenizer: Any, generation_config: Any
    ) -> Choosing:
        given = {name: value for name, value in options.items() if value is not None}
        return Choosing(given, self.seed if seed is None else seed, tokenizer, generation_config)

    def _weights(self) -> tuple[int, Tensors]:
        """The updates so far, and what they have made."""
        return self.steps if self.updates else 0, self.state

    def _refuse_forward_only(self, what: str) -> None:
        if self.body.is_forward_only:
            message = f"{what} is called on a program for evaluation, which has no gradients"
            hint = 'compile it without mode="eval"; trainer.step(batch) and trainer.evaluate(batches) evaluate'
            raise error("SC218", message, hint=hint)

    @on_cpu
    def timeline(self, batch: Any) -> Any:
        """Make a step with a clock on every instruction of a pipeline: its measured `schedule.timeline.Timeline`, of
        all ranks, on every rank. All must call it. Raises ShardcError (SC510) where there is none: in simulation, and
        without a pipeline."""
        run, _ = self._programs.of(batch, f"before step {self.steps}", due=False)
        return run.engine.timed(lambda: self.step(batch))

    @on_cpu
    def profile(self, batch: Any) -> Profile:
        """Make a step, and measure every call of this rank: of collectives how long compute waited for them. All must
        call it; `program.predict(hardware).diff(profile)` compares. Raises ShardcError (SC510) in simulation."""
        run, _ = self._programs.of(batch, f"before step {self.steps}", due=False)
        return run.engine.profiled(lambda: self.step(batch))

    @property
    def leads(self) -> bool:
        """The rank that speaks for all."""
        return self.engine.rank == 0

    @property
    def device(self) -> torch.device:
        return self.engine.device

    @property
    def data_ranks(self) -> int:
        """In how many parts the ranks bring a batch: 1 but in a job under `data: per_rank`."""
        return 1 if self._feeding.own is None else self._feeding.own.parts.count

    @property
    def own_part(self) -> RankPart | None:
        """The part of each batch that this rank brings; None where it is given all of it."""
        return self._feeding.own

    @property
    def copier(self) -> Copier | None:
        """What brings a batch to this rank's GPU ahead of its step; None on a CPU, and where the rank reads a part of
        what it is given, which is cut first."""
        sharded = any(type.axes for _, type in self._feeding.placed.values())
        if self.device.type != "cuda" or (sharded and self.own_part is None):
            return None
        return Copier(self.device)

    @property
    def data_rank(self) -> int:
        """Which of these parts this rank brings: what a DistributedSampler calls its rank."""
        return 0 if self._feeding.own is None else self._feeding.own.index

    @torch.no_grad()
    def sgd(self, lr: float) -> None:
        """Plain gradient descent with the last step's gradients, in place on the held parameters.

        None after a step that is skipped. Raises ShardcError (SC544) where there are no gradients: before the first
        step, and where the program has an optimizer, which has updated already.
        """
        if not math.isfinite(lr):
            raise error("SC553", f"sgd is given the step size {lr}", hint="give a finite number")
        self._refuse_forward_only("sgd")
        self._refuse_swapped("sgd")
        if self.updates:
            message = "the program has an optimizer, which updates in each step: sgd would do nothing"
            raise error("SC544", message, hint="leave sgd out, or compile without optimizer=")
        if self._grads is None:
            message = "there are no gradients to descend along: no step was made since the launch, or since load"
            raise error("SC544", message, hint="call sgd after step")
        self.gradients_used = True
        if self._finite is not None and not self._finite:
            return
        for name, grad in self._grads.items():
            self.state[name].add_(self._as_input("grad", name, grad), alpha=-lr)
        if self.ema is not None:
            self.ema.update()

    def _refuse_swapped(self, what: str) -> None:
        if self.ema is not None:
            self.ema.refuse_swapped(what)

    @on_cpu
    def recompile(self) -> None:
        """Go on with the model and the optimizers as they are now; every rank must call it, between two steps.

        It is for what eager PyTorch allows after some steps: `requires_grad_` of parameters that were frozen or are to
        be, `optimizer.add_param_group(...)`, other hyperparameters, the model's modes and numbers. Parameters, moments,
        step counts, seed and step are kept; state of what is frozen now is put aside until it is trained again, and is
        in no checkpoint. Raises ShardcError where `compile` does, and then nothing is changed.

            model.backbone.requires_grad_(True)
            trainer.recompile()
        """
        if self._program.again is None:
            message = "the program came from a file, without its model, so it cannot be compiled again"
            hint = "compile the model here; trainer.save and load hand the training state on"
            raise error("SC546", message, hint=hint)
        self._refuse_swapped("recompile")
        program = self._program.again()
        engine = self.engine.beside(program.staged, False)
        handed = hand_on(self, program.staged.body, engine)
        launched = Launched.of(program)
        after = Trainer(launched, engine, launched.start(), self.seed, self._check_every, handed)
        if self._checkpoints is not None:
            after.checkpoints.take_over(self._checkpoints)
        if self.ema is not None:
            self.ema.follow(after, self.engine)
        after.steps, after.run, after.gradients_used = self.steps, self.run, self.gradients_used
        after._consensus = self._consensus  # which counts how often ranks ended
        self.__dict__ = after.__dict__
        if self.ema is not None:
            self.ema.include()

    @property
    def held(self) -> Mapping[str, tuple[Port, TensorType]]:
        """The ports and types of what it holds: parameters, buffers, state. What lies on the host is up to date."""
        self.engine.settle()
        return self._kept

    @property
    def returned(self) -> Collection[tuple[str, str]]:
        """(role, name) of what a step returns."""
        return self._last.outputs.keys()

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The program's optimizer, of several the first: `optimizers` has them all."""
        return self.optimizers[0] if self.optimizers else None

    @property
    def updates(self) -> bool:
        """Does a step end in an optimizer's update?"""
        roles = {port.role for port in self.body.outputs}
        return "param" in roles and "grad" not in roles

    @on_cpu
    def gather_grads(self) -> Tensors:
        """The last step's gradients, whole; every rank must call it.

        {} before the first step, or where nothing is trained. Raises ShardcError (SC544) where the program has an
        optimizer: its gradients end in the update.
        """
        self._refuse_forward_only("gather_grads")
        types = {name: type for (role, name), type in self._last.outputs.items() if role == "grad"}
        if self.updates:
            message = "the program has an optimizer, so its gradients end in the update and are not returned"
            hint = (
                "compile without optimizer= to have gradients; step(batch).grad_norm is their norm under clip_grad_norm"
            )
            raise error("SC544", message, hint=hint)
        if self._grads is None:
            return {}
        self.gradients_used = True
        engine = self._last.engine
        return {name: engine.fetch(name, self._grads.get(name), type) for name, type in types.items()}

    @on_cpu
    def state_dict(self, roles: Sequence[str] = ("param", "buffer")) -> Tensors:
        """What the model's own `state_dict` holds, whole: its keys, order and dtypes. Every rank must call it.

        Role "state" adds what else a step changes: moments, and buffers that the model's has no key for.
        """
        if isinstance(roles, str) or not set(roles) <= set(STATE_ROLES):
            message = f"state_dict knows the roles {', '.join(STATE_ROLES)}, not {roles!r}"
            raise error("SC553", message, hint='write roles=("param", "buffer", "state")')
        tensors: Tensors = self._model_state.state_dict(self._kept, roles, self._fetch, self._program.model)
        if "state" in roles:
            tensors |= {name: self._fetch(name) for name, held in self._held("state").items() if held.role == "state"}
        return tensors

    def _fetch(self, name: str) -> torch.Tensor:
        """A whole tensor, and a copy, whatever the layout: the next step writes over what is held."""
        self.engine.settle()
        tensor = self.state.get(name)
        whole = self.engine.fetch(name, tensor, self._kept[name][1])
        return whole.clone() if whole is tensor else whole

    @on_cpu
    def sync_to(self, model: nn.Module | None) -> None:
        """Write parameters and buffers into the tensors of a model, whole; every rank must call it.

        The model is the compiled one or another of its class, on the CPU, a GPU or the meta device, where it gets
        memory; a rank that passes None takes part, and holds no more than one tensor. Raises ShardcError (SC563), and
        writes nothing, where names or shapes are not the program's.
        """
        sync(model, self._model_state, self._kept, self._fetch, self.checkpoints.agreed)
        self._program.accept_values()

    @property
    def checkpoints(self) -> Checkpoints:
        self._checkpoints = self._checkpoints or self.engine.checkpoints()
        return self._checkpoints

    @property
    def consensus(self) -> Consensus:
        self._consensus = self._consensus or self.engine.consensus()
        return self._consensus

    @on_cpu
    def save(self, path: str | Path, *, extra: Mapping[str, Any] | None = None, asynchronous: bool = False) -> Saving:
        """Write a checkpoint of all state, with `extra` (plain data) beside it; every rank must call it.

        It replaces the one at `path` when it is whole, not before. Asynchronous, it is written while training goes on:
        `wait()` on what is returned, or the next save, raises what went wrong.
        """
        self._refuse_swapped("save")
        own, averages = ({}, {}) if self.ema is None else (self.ema.position(), self.ema.held())
        position = Position(self.steps, self.seed, {**own, **(extra or {})})
        return self.checkpoints.save(path, self._held() | averages, position, asynchronous)

    @on_cpu
    def load(self, path: str | Path, *, strict: bool = True) -> dict[str, Any]:
        """Go on from a checkpoint, saved on whatever mesh and plan; returns its `extra`. Every rank must call it."""
        self._refuse_swapped("load")
        averaged = () if self.ema is None else self.checkpoints.names(path, ROLE)
        if self.ema is not None:
            self.ema.take_up(averaged)
        averages = {} if self.ema is None else self.ema.held()
        position = self.checkpoints.load(path, self._held() | averages, strict, self._model_state.unsaved)
        extra = dict(position.extra)
        about = extra.pop(KEY, {})
        if self.ema is not None:
            self.ema.resume(about, averaged)
        self.steps, self.seed, self._grads = position.step, position.seed, None
        self.intact, self.run, self.aside = True, Run(), {}
        self._taken = 0
        return extra

    @on_cpu
    def export_safetensors(self, path: str | Path, *, dtype: torch.dtype | None = None) -> None:
        """Write what `state_dict` holds as safetensors, into a folder; every rank must call it.

        Floats are written in the model's dtypes, or in `dtype`.
        """
        export(self.checkpoints, path, self._exported(), dtypes=self._model_state.dtypes(), dtype=dtype)

    @on_cpu
    def export_hf(
        self,
        path: str | Path,
        tokenizer: Any = None,
        *,
        max_shard_size: int | str = "5GB",
        dtype: torch.dtype | None = None,
    ) -> None:
        """Write a folder that `from_pretrained` loads: configuration, weights, their index; every rank must call it.

        `tokenizer` is one of `transformers`, or a folder with its files. A folder at `path` is replaced when the new
        one is whole; files in it that are not written anew stay. Weights are in the model's dtypes, or in `dtype`.
        """
        tensors, dtypes = self._exported(), self._model_state.dtypes()
        export_hf(self.checkpoints, path, self._program.model, tensors, dtypes, dtype, tokenizer, max_shard_size)

    def _exported(self) -> dict[str, Held]:
        held = self._held("param", "buffer")
        return {name: held[name] for name in self._model_state.names()}

    @property
    def parameter_bytes(self) -> int:
        """Bytes of parameters that one rank holds, the padding of uneven shards included."""
        types = (type for name, (port, type) in self._kept.items() if port.role == "param" and name in self.state)
        return sum(type.local_bytes(self.body.mesh) for type in types)

    def close(self, failure: BaseException | None = None) -> None:
        """Leave the job, when what is being saved is on disk; a trainer is also a context manager.

        The other ranks hear of a failure, if that is why. That it is raised, and not that a checkpoint could not be
        written either, often for the same reason: a note of the failure says so.
        """
        try:
            if self._checkpoints is not None:
                self._checkpoints.close()
        except Exception as unsaved:
            if not isinstance(failure, Exception):  # of an exit, which ends well, notes are not shown
                raise
            if unsaved is not failure:
                failure.add_note(f"{type(unsaved).__name__}: {unsaved}")
        finally:
            self.engine.close(None if self.interrupted else failure)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: object, failure: BaseException | None, trace: object) -> None:
        self.close(failure)

    def _held(self, *roles: str) -> dict[str, Held]:
        """What is saved. A buffer that the model's state_dict does not hold is state, if a step changes it."""
        self.engine.settle()
        held: dict[str, Held] = {}
        for name, (port, type) in self._kept.items():
            role = port.role
            if name in self._model_state.unsaved:
                if ("buffer", name) not in self._programs.first.outputs:
                    continue
                role = "state"
            if not roles or role in roles:
                held[name] = Held(self.state.get(name), type, role, tuple(port.aliases))
        return held

    def _compare(self, state: Tensors, given: Sequence[Item], fed: Sequence[Feed]) -> None:
        """Compare state and batch with the other ranks', where they share them."""
        if self.engine.peers is None:
            return
        self.engine.settle()
        ports = [(port, type) for port, type in self._inputs.values() if port.role not in GIVEN]
        items = [Item(port.name, port.role, type, state.get(port.name)) for port, type in ports]
        items.append(Item("step", "seed", TensorType.plain(torch.int64, ()), torch.tensor(self.steps)))
        items += given
        self.engine.peers.check(items, f"before step {self.steps}")
        if self._feeding.own is not None and not self._taken:
            self._feeding.own.warn_of_equal(fed)

    def _compare_launched(self) -> None:
        """What training starts from is the same on all ranks: what they share, and the corners of each whole tensor."""
        if self.engine.peers is None:
            return
        items = [Item(name, port.role, type, self.state.get(name)) for name, (port, type) in self._kept.items()]
        for name, (port, type) in self._kept.items():
            if type.axes:
                items.append(Item(name, port.role, TensorType.plain(type.dtype, (0,)), self._corners.get(name)))
        self.engine.peers.check(items, "at the launch", launching=True)

    def _compare_given(self, tensors: Mapping[str, torch.Tensor], where: str) -> None:
        """Compare what every rank is given the whole of."""
        if self._check_every and self.engine.peers is not None:
            types = {name: TensorType.plain(t.dtype, tuple(t.shape)) for name, t in tensors.items()}
            self.engine.peers.check([Item(name, "input", types[name], t) for name, t in tensors.items()], where)

    def _as_input(self, role: str, name: str, value: torch.Tensor) -> torch.Tensor:
        """A gradient or buffer in the layout of the input that it belongs to."""
        output_type, input_type = self._last.outputs[role, name], self._last.inputs[name]
        if output_type.dims == input_type.dims and not output_type.partial:
            return value
        shards = self._last.engine.shards
        return shards.hold(shards.whole(value, output_type), input_type)

    def _loaded(self, port: Port, type: TensorType, start: StartingValues) -> torch.Tensor:
        read = start.read(port, type)
        if type.axes and self.engine.peers is not None:
            parts = [read(slices).reshape(-1).to(type.dtype) for slices in corners(type.shape)]
            self._corners[port.name] = torch.cat(parts)
        return self.engine.shards.load(read, type)


@gc_paused()
def launch(
    program: Launchable,
    *,
    state: Weights | Sequence[Weights] | None = None,
    init: Init | str | None = None,
    seed: int | None = None,
    timeout: float = 600.0,
    device: str | None = None,
    check_every: int = EVERY,
    graphs: bool | Callable[[], bool] = False,
) -> Trainer:
    """The trainer of a program: `Program.launch`, which says what the arguments are, for any program. `graphs` may be
    a question, which is asked where steps can be captured."""
    engines, launched = Engines(program.staged), Launched.of(program)
    seed = launched.plan.get("seed", 0) if seed is None else seed
    start = launched.start(state, init, seed)
    in_job = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    facts = facts_of(launched.plan, launched.rates(), seed, check_every)
    wanted, raises = None, launched.plan.get("nonfinite") == "raise"
    if callable(graphs):
        never = is_never_captured(program.staged, launched.plan.get("nonfinite"))
        graphs = in_job and not never and are_captured(device) and graphs()
    if graphs:
        wanted = Graphs("the plan says `nonfinite: raise`, which reads in each step whether all is finite" * raises)
        if not in_job:
            warn_not_captured("all ranks are simulated")
    engine = engines.job(timeout, device, facts, wanted) if in_job else engines.simulation()
    try:
        return Trainer(launched, engine, start, seed, check_every)
    except BaseException as failure:
        engine.close(failure)
        raise
