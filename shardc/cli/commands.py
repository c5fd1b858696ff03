"""What commands do: calls of the API, and ways to show what it returns. `main.py` has their options and help."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console, RenderableType
from torch import nn

from shardc import api
from shardc.api import Program
from shardc.cli import as_json as plain
from shardc.cli.console import diagnose, err, for_terminal, out, progress, show, write, write_json
from shardc.cli.host_memory import refuse_program
from shardc.cli.ir_printer import Printer, keep_only
from shardc.cli.kernel_list import kernel_list
from shardc.cli.kernel_sources import emit_triton
from shardc.cli.left_out import left_out
from shardc.cli.local_launch import run_processes, state_of, step_inputs
from shardc.cli.optimizers import check_name, make_optimizer, step_size
from shardc.cli.pipeline_summary import communication_list, graphs, pipeline_summary, rank_text
from shardc.cli.prediction import predicted, prediction_data, show_prediction
from shardc.cli.summary import rank_view, summary, uncounted
from shardc.cli.targets import Target, load
from shardc.cost.profile import Profile
from shardc.explain.fusion import asked_of, fusions
from shardc.ir.diagnostic import ShardcError, error
from shardc.ir.dot import emit_dot
from shardc.ir.files import check_suffix
from shardc.ir.graph import Graph
from shardc.ir.mesh import Mesh
from shardc.ir.python import emit_python
from shardc.ir.text import print_graph
from shardc.passes.base import Pass
from shardc.plan import hardware as machines
from shardc.runtime.oracle.report import Report

MISMATCH = 1  # the exit code of a program that differs from the single device
EMITTERS: dict[str, Callable[[Program], str]] = {
    "json": lambda program: program.to_json(),
    "python": lambda program: "\n\n".join(map(emit_python, _graphs(program))),
    "dot": lambda program: "\n".join(map(emit_dot, _graphs(program))),
    "triton": lambda program: emit_triton(_graphs(program), asked_of(program)),
    "html": lambda program: program.page(),
}
SUFFIXES = {".json": "json", ".py": "python", ".dot": "dot", ".txt": "text", ".html": "html"}
SUFFIX = {form: suffix for suffix, form in SUFFIXES.items()} | {"triton": ".py"}


@dataclass(frozen=True)
class Asked:
    """What the options that commands share say."""

    target: str
    plan: str | None
    mesh: str | None
    strict: bool
    optimizer: str | None = None  # of optimizers.OPTIMIZERS
    lr: float | None = None  # of the optimizer; None for a default
    mode: str = "train"


@dataclass(frozen=True)
class Timed:
    """What `cost` is to predict: on which hardware, written and compared where."""

    hardware: str | None
    trace: Path | None = None
    profile: Path | None = None

    def check(self) -> None:
        if self.hardware is None and (self.trace or self.profile):
            message = "--trace and --profile are of a predicted step"
            raise error("SC105", message, hint="add --hardware h200-nvlink, or the path of a YAML file")
        if self.hardware is not None:
            machines.hardware(self.hardware)  # what cannot be read is told before anything is compiled, or printed
        if self.profile is not None:
            Profile.load(self.profile)


@dataclass(frozen=True)
class Printed:
    """What `compile` is to print beside its summary, and where."""

    print_after: tuple[str, ...]
    diff: bool
    rank: int | None
    emit: str | None  # main.Emit
    output: Path | None
    module_filter: str | None
    fold: bool | None


def compile_target(asked: Asked, printed: Printed, *, check: bool, as_json: bool) -> None:
    printer = Printer(printed.print_after, printed.diff, printed.module_filter)
    output = printed.output
    if output is not None:
        check_suffix(output, [*SUFFIXES] if printed.emit is None else [SUFFIX[printed.emit]])
    form = printed.emit or (None if output is None else SUFFIXES.get(output.suffix, "text"))
    piped = printer.used or printed.rank is not None or (form is not None and output is None)
    if as_json and piped:
        message = "--json prints the summary, and stdout is to have something else"
        raise error("SC105", message, hint="write --emit json for the program, or -o FILE beside --json")
    if output is not None and printed.fold:
        raise error("SC105", "--fold is for reading: a file has every layer", hint="leave --fold or -o FILE out")
    program, batch = compiled(asked, meta=not check, printer=printer, cache=not check)
    printer.check()
    folds = _folds(printed.fold) and output is None
    if form == "text":
        write(_text(program, printed.module_filter, folds), output)
    elif form is not None:
        write(EMITTERS[form](program), output)
    if printed.rank is not None:
        _show_rank(program, printed.rank, printed.module_filter, _folds(printed.fold))
    shown = err() if piped else out()
    if not as_json:
        show(_summary(program), shown)
    diagnose(program.diagnostics)
    report = _verified(program, batch) if check else None
    if as_json:
        write_json(plain.program(program) | ({} if report is None else {"verify": plain.verification(report)}))
    elif report is not None:
        _show_report(report, shown)
    if report is not None and not report.ok:
        raise typer.Exit(MISMATCH)


def explain(asked: Asked, value: str | None, *, kernels: bool, fold: bool | None, as_json: bool) -> None:
    program, _ = compiled(asked, meta=True)
    if value is not None:
        with progress("trying changes of the plan"):
            explanation = program.explain(value)
        if as_json:
            write_json(plain.explanation(explanation))
        else:
            typer.echo(for_terminal(str(explanation)))
    elif as_json:
        data = plain.program(program)
        chosen = {key: data[key] for key in ("collectives", "transfers") if key in data}
        write_json(plain.kernels(fusions(program, program.staged)) if kernels else chosen)
    else:
        folds = _folds(fold)
        show(kernel_list(program, folds) if kernels else communication_list(program, folds), out())


def cost(asked: Asked, timed: Timed, *, memory: bool, top: int, fold: bool | None, as_json: bool) -> None:
    timed.check()
    program, _ = compiled(asked, meta=True)
    diagnose(program.diagnostics)
    report = program.memory() if memory else None
    prediction = None if timed.hardware is None else predicted(program, timed.hardware, timed.trace)
    if as_json:
        data = plain.program(program) | ({} if report is None else {"memory": plain.memory(report, top)})
        write_json(data | ({} if prediction is None else {"predicted": prediction_data(prediction, timed.profile)}))
        return
    show(_summary(program), out())
    if prediction is not None:
        show_prediction(prediction, timed.profile)
    if report is not None:
        listing = f"\n{report.listing(top, fold=_folds(fold))}\n" if top else ""
        typer.echo(f"{report}\n{listing}{uncounted(program)}")


def timeline(asked: Asked, *, svg: Path | None, trace: Path | None, width: int, as_json: bool) -> None:
    program, _ = compiled(asked, meta=True)
    diagnose(program.diagnostics)
    predicted = program.timeline()
    if as_json:
        write_json(plain.timeline(predicted))
    else:
        typer.echo(predicted.text(width))
    for path, draw in ((svg, predicted.to_svg), (trace, predicted.to_trace)):
        if path is not None:
            draw(path)


def verify(asked: Asked, *, as_json: bool) -> None:
    program, batch = compiled(asked, meta=False, cache=False)
    diagnose(program.diagnostics)
    report = _verified(program, batch)
    if as_json:
        write_json(plain.verification(report))
    else:
        _show_report(report, out())
    if not report.ok:
        raise typer.Exit(MISMATCH)


def run(asked: Asked, *, steps: int, lr: float | None, nproc: int | None, as_json: bool) -> None:
    if lr is not None and not 0 <= lr < math.inf:
        raise error("SC105", f"--lr {lr:g} is no step size", hint="give a number from 0, as in --lr 0.1")
    lr = step_size(asked.optimizer) if lr is None else lr
    program, batch = compiled(replace(asked, lr=lr), meta=False)
    diagnose(program.diagnostics)
    refuse_program(program)
    notes = left_out(program, processes=nproc is not None)
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    losses: list[float] = []

    def report(step: int, loss: float) -> None:
        losses.append(loss)
        if not as_json:
            typer.echo(f"step {step}  loss {loss:.6f}")

    if nproc is not None:
        run_processes(program, batch, nproc=nproc, steps=steps, lr=lr, report=report)
    else:
        inputs = step_inputs(program, batch)
        with program.launch(state=state_of(program)) as trainer:
            for step in range(steps):
                with progress(f"step {step}"):
                    loss = float(trainer.step(inputs).loss)
                report(step, loss)
                if not trainer.updates:
                    trainer.sgd(lr)
    if as_json:
        write_json({"losses": [loss if math.isfinite(loss) else str(loss) for loss in losses], "notes": notes})


def tune(only: list[str] | None, seconds: float, output: Path | None, *, as_json: bool) -> None:
    from kernels_triton.gate import tuning  # brings Triton's launcher

    table = tuning.table(only, seconds)
    if as_json:
        import yaml

        write_json(yaml.safe_load(table))
    if output is not None or not as_json:
        write(table, output)


# ---------------------------------------------------------------------- what the commands share
def compiled(
    asked: Asked,
    *,
    meta: bool,
    printer: Printer | None = None,
    prepare: Callable[[nn.Module], None] | None = None,
    cache: bool = True,
) -> tuple[Program, Any]:
    """The compiled target and its sample batch, which a saved program lacks. `prepare` is given the model before.
    Without `cache` it is compiled in any case."""
    check_name(asked.optimizer)
    with progress(f"loading {asked.target}"):
        target = load(asked.target, meta=meta)
    if isinstance(target, Program):
        options_of_compile = (asked.plan, asked.mesh, asked.optimizer, asked.mode)
        if options_of_compile != (None, None, None, "train") or (printer is not None and printer.used):
            options = "--plan, --mesh, --mode, --optimizer, --print-after and --diff"
            message = f"{asked.target} is compiled already: {options} do not apply"
            raise error("SC105", message, hint="give the model that it was compiled from")
        return target, None
    if prepare is not None:
        prepare(target.model)
    return _compile(target, asked, printer, cache=cache), target.batch


def _compile(target: Target, asked: Asked, printer: Printer | None, *, cache: bool) -> Program:
    with progress("tracing") as say:

        def watch(pass_: Pass, graph: Graph, seconds: float) -> None:
            say(f"{pass_.name} done, {seconds:.1f} s")
            if printer is not None:
                printer.watch(pass_, graph, seconds)

        return api.compile(
            target.model,
            target.batch,
            mesh=_mesh(asked.mesh),
            plan=asked.plan,
            loss=target.loss,
            optimizer=make_optimizer(asked.optimizer, target.model, asked.lr),
            strict=asked.strict,
            watch=watch,
            cache=cache and (printer is None or not printer.used),  # which prints what passes do
            mode=asked.mode,  # pyright: ignore[reportArgumentType]  # compile refuses another
        )


def _mesh(text: str | None) -> Mesh | None:
    try:
        return None if text is None else Mesh.parse(text)
    except ShardcError as wrong:
        raise ShardcError(*(replace(d, location=f"--mesh {text}") for d in wrong.diagnostics)) from None


def _verified(program: Program, batch: Any) -> Report:
    refuse_program(program, verify=True)
    with progress("simulating all ranks"):
        has_values = program.model is not None and not any(p.is_meta for p in program.model.parameters())
        return program.verify(batch, params=None if has_values else state_of(program))


def _show_report(report: Report, shown: Console) -> None:
    shown.print(str(report), markup=False, highlight=False, soft_wrap=True)


def _show_rank(program: Program, rank: int, module_filter: str | None, fold: bool) -> None:
    staged = program.rank(rank).program
    c, _ = staged.coordinates(rank)
    show(rank_view(program, rank, staged.held(c), (staged.axis,) if staged.axis else (), fold_layers=fold), out())
    typer.echo(rank_text(staged, c, keep_only(module_filter), fold=fold), nl=False)


def _summary(program: Program) -> list[RenderableType]:
    lines = pipeline_summary(program) if program.staged.axis else summary(program)
    return [*lines, "from the disk, as it was compiled before"] if program.cached == "hit" else lines


def _graphs(program: Program) -> list[Graph]:
    """What ranks run."""
    return list(graphs(program.staged))


def _text(program: Program, module_filter: str | None, fold: bool) -> str:
    head = "# equal layers are printed once; --no-fold prints all, as shardc.parse reads it\n" if fold else ""
    if module_filter is None:
        return head + program.text(fold=fold)
    return head + "\n".join(print_graph(graph, keep=keep_only(module_filter), fold=fold) for graph in _graphs(program))


def _folds(fold: bool | None) -> bool:
    """As the user says; else where somebody reads."""
    return out().is_terminal if fold is None else fold
