"""The command line. Every command is a call of the API and a way to show what it returns.

What was asked for goes to stdout; diagnostics, progress and, where stdout carries a program, the summary go to stderr.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import typer
from rich.console import Console, RenderableType

from kernels_triton.gate import tuning
from shardc import api
from shardc.api import Program
from shardc.cli.ir_printer import Printer, keep_only
from shardc.cli.kernel_list import kernel_list
from shardc.cli.kernel_sources import emit_triton
from shardc.cli.local_launch import run_processes, state_of, step_inputs
from shardc.cli.pipeline_summary import communication_list, graphs, pipeline_summary, rank_text
from shardc.cli.summary import rank_view, summary, uncounted
from shardc.cli.targets import Target, load
from shardc.explain.fusion import asked_of
from shardc.ir.diagnostic import Diagnostic, ShardcError, error
from shardc.ir.dot import emit_dot
from shardc.ir.files import check_suffix, write_text
from shardc.ir.graph import Graph
from shardc.ir.mesh import Mesh
from shardc.ir.python import emit_python
from shardc.ir.text import print_graph
from shardc.passes.base import Pass

P = ParamSpec("P")
MISMATCH, BAD_INPUT, FAILURE, INTERRUPTED = 1, 2, 3, 130
RUNTIME_CODES = {"SC502", "SC503"}  # a rank died, a collective hung
QUIET = 1.0  # seconds before progress is shown
EPILOG = (
    "\b\nTARGET is file.py:factory, whose factory() returns (model, batch) or (model, batch, loss);\n"
    "hf:MODEL_TYPE[?key=value&...], built small from its configuration alone; hf:config.json; or a program.json.\n\n"
    "\b\nExit codes: 0 ok; 1 the program differs from the single device; 2 bad input; 3 a failure while running."
)


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """The user's errors are printed as diagnostics; whatever else goes wrong is ours, and says so."""

    @wraps(command)
    def run_it(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except typer.Exit:
            raise
        except ShardcError as wrong:
            typer.echo(str(wrong), err=True)
            raise typer.Exit(FAILURE if wrong.code in RUNTIME_CODES else BAD_INPUT) from None
        except BrokenPipeError:  # whoever reads us, `head` say, has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(FAILURE) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except Exception:
            traceback.print_exc()
            typer.echo("this is a fault of shardc, not of your input", err=True)
            raise typer.Exit(FAILURE) from None

    return run_it


app = typer.Typer(
    help="Compile an unmodified PyTorch model and a plan of placements into a distributed program.",
    epilog=EPILOG,
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Emit(StrEnum):
    """The forms of a program."""

    text = "text"
    json = "json"
    python = "python"
    dot = "dot"
    triton = "triton"


EMITTERS: dict[Emit, Callable[[Program], str]] = {
    Emit.text: lambda program: _text(program, None),
    Emit.json: lambda program: program.to_json(),
    Emit.python: lambda program: "\n\n".join(map(emit_python, graphs(program.staged))),
    Emit.dot: lambda program: "\n".join(map(emit_dot, graphs(program.staged))),
    Emit.triton: lambda program: emit_triton(list(graphs(program.staged)), asked_of(program)),
}
SUFFIXES = {".json": Emit.json, ".py": Emit.python, ".dot": Emit.dot, ".txt": Emit.text}
SUFFIX = {form: suffix for suffix, form in SUFFIXES.items()} | {Emit.triton: ".py"}

TargetText = Annotated[
    str, typer.Argument(metavar="TARGET", help="file.py:factory, hf:MODEL_TYPE, or a saved program.json.")
]
PlanPath = Annotated[Path | None, typer.Option("--plan", metavar="FILE", help="The plan, a YAML file.")]
MeshText = Annotated[str | None, typer.Option("--mesh", metavar="dp=2,tp=2", help="The mesh; overrides the plan's.")]
ModeText = Annotated[str, typer.Option("--mode", metavar="train|eval", help="A training step, or an evaluation.")]
Strict = Annotated[bool, typer.Option("--strict", help="What cannot be honoured is an error, not a warning.")]


@app.command("compile", epilog=EPILOG)
@guarded
def compile_command(
    target: TargetText,
    plan: PlanPath = None,
    mesh: MeshText = None,
    print_after: Annotated[
        list[str] | None, typer.Option(metavar="PASS", help="Print the graph after this pass; repeatable.")
    ] = None,
    diff: Annotated[
        bool, typer.Option("--diff", help="Print what passes change: all, or those of --print-after.")
    ] = False,
    rank: Annotated[int | None, typer.Option(help="Print what one rank holds and runs, in its local shapes.")] = None,
    emit: Annotated[Emit | None, typer.Option(help="Write the program in this form.")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Where to; the suffix is that of the form.")
    ] = None,
    check: Annotated[bool, typer.Option("--verify", help="Simulate all ranks against the single device.")] = False,
    mode: ModeText = "train",
    strict: Strict = False,
    module_filter: Annotated[
        str | None, typer.Option(metavar="GLOB", help="Print only calls of modules whose names match.")
    ] = None,
) -> None:
    """Compile, and print a summary; or print the program, the graph after a pass, or one rank's view."""
    printer = Printer(tuple(print_after or ()), diff, module_filter)
    if output is not None:
        check_suffix(output, [*SUFFIXES] if emit is None else [SUFFIX[emit]])
    program, batch = _program(target, plan, mesh, strict, meta=not check, printer=printer, mode=mode)
    printer.check()
    form = emit or (None if output is None else SUFFIXES.get(output.suffix, Emit.text))
    piped = printer.used or rank is not None or (form is not None and output is None)
    if form is not None:
        _write(_text(program, module_filter) if form is Emit.text else EMITTERS[form](program), output)
    if rank is not None:
        _show_rank(program, rank, module_filter)
    shown = _err() if piped else _out()
    for part in _summary(program):
        shown.print(part)
    _diagnose(program.diagnostics)
    if check:
        _verify(program, batch, shown)


@app.command(epilog=EPILOG)
@guarded
def explain(
    target: TargetText,
    value: Annotated[
        str | None,
        typer.Argument(metavar="[VALUE]", help="A collective's or transfer's name or number, or a kernel's or call's."),
    ] = None,
    plan: PlanPath = None,
    mesh: MeshText = None,
    kernels: Annotated[bool, typer.Option("--kernels", help="Without VALUE: list kernels, not communication.")] = False,
    strict: Strict = False,
) -> None:
    """Say why a collective exists and the cheapest change that removes it; or what a kernel fuses and what it saves."""
    program, _ = _program(target, plan, mesh, strict, meta=True)
    if value is None:
        for part in kernel_list(program) if kernels else communication_list(program):
            _out().print(part)
        return
    with _progress("trying changes of the plan"):
        explanation = program.explain(value)
    typer.echo(str(explanation))


@app.command(epilog=EPILOG)
@guarded
def cost(
    target: TargetText,
    plan: PlanPath = None,
    mesh: MeshText = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="What a rank holds: by category, at which call most, and what then.")
    ] = False,
    top: Annotated[int, typer.Option(min=0, help="With --memory: how many of the largest values to list.")] = 10,
    strict: Strict = False,
) -> None:
    """Say what a step costs a rank: its work, its communication, and with --memory what it holds."""
    program, _ = _program(target, plan, mesh, strict, meta=True)
    _diagnose(program.diagnostics)
    for part in _summary(program):
        _out().print(part)
    if memory:
        report = program.memory()
        typer.echo(f"{report}\n" + (f"\n{report.listing(top)}\n" if top else "") + uncounted(program))


@app.command(epilog=EPILOG)
@guarded
def timeline(
    target: TargetText,
    plan: PlanPath = None,
    mesh: MeshText = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it.")] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write it for ui.perfetto.dev or chrome://tracing.")
    ] = None,
    width: Annotated[int, typer.Option(min=20, help="Columns for the longest row.")] = 120,
    strict: Strict = False,
) -> None:
    """Say when each rank of a pipeline would do what, where it idles, and how many microbatches it holds."""
    program, _ = _program(target, plan, mesh, strict, meta=True)
    _diagnose(program.diagnostics)
    measured = program.timeline()
    typer.echo(measured.text(width))
    for path, write in ((svg, measured.to_svg), (trace, measured.to_trace)):
        if path is not None:
            write(path)


@app.command(epilog=EPILOG)
@guarded
def verify(
    target: TargetText, plan: PlanPath = None, mesh: MeshText = None, mode: ModeText = "train", strict: Strict = False
) -> None:
    """Simulate all ranks and compare the loss, every gradient and buffer, or outputs, with the single device."""
    program, batch = _program(target, plan, mesh, strict, meta=False, mode=mode)
    _diagnose(program.diagnostics)
    _verify(program, batch, _out())


@app.command(epilog=EPILOG)
@guarded
def run(
    target: TargetText,
    plan: PlanPath = None,
    mesh: MeshText = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of plain gradient descent on the one batch.")] = 5,
    lr: Annotated[float, typer.Option(help="The step size.")] = 0.1,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Start this many real processes; without, ranks are simulated.")
    ] = None,
    strict: Strict = False,
) -> None:
    """Train for a few steps and print the losses."""
    if not 0 <= lr < math.inf:
        raise error("SC105", f"--lr {lr:g} is no step size", hint="give a number from 0, as in --lr 0.1")
    program, batch = _program(target, plan, mesh, strict, meta=False)
    _diagnose(program.diagnostics)

    def report(step: int, loss: float) -> None:
        typer.echo(f"step {step}  loss {loss:.6f}")

    if nproc is not None:
        run_processes(program, batch, nproc=nproc, steps=steps, lr=lr, report=report)
        return
    inputs = step_inputs(program, batch)
    with program.launch(state=state_of(program)) as trainer:
        for step in range(steps):
            with _progress(f"step {step}"):
                loss = float(trainer.step(inputs).loss)
            report(step, loss)
            trainer.sgd(lr)


@app.command(epilog=EPILOG)
@guarded
def tune(
    only: Annotated[list[str] | None, typer.Option(metavar="OP", help="Only this kernel; repeatable.")] = None,
    seconds: Annotated[float, typer.Option(min=1, help="What would start later is left out.")] = 600,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Where the table goes, instead of stdout.")
    ] = None,
) -> None:
    """Measure the kernels' schedules on the GPU at hand; kernels find the table if SHARDC_TABLES names its FILE."""
    _write(tuning.table(only, seconds), output)


# ---------------------------------------------------------------------- what the commands share
def _program(
    text: str, plan: Path | None, mesh: str | None, strict: bool, *, meta: bool, mode: str = "train",
    printer: Printer | None = None,
) -> tuple[Program, Any]:  # fmt: skip
    """The compiled target and its sample batch, which a saved program lacks."""
    with _progress(f"loading {text}"):
        target = load(text, meta=meta)
    if isinstance(target, Program):
        if plan is not None or mesh is not None or (printer is not None and printer.used) or mode != "train":
            message = f"{text} is compiled already: --plan, --mesh, --mode, --print-after and --diff do not apply"
            raise error("SC105", message, hint="give the model that it was compiled from")
        return target, None
    return _compile(target, plan, mesh, strict, printer, mode), target.batch


def _compile(
    target: Target, plan: Path | None, mesh: str | None, strict: bool, printer: Printer | None, mode: Any
) -> Program:
    with _progress("tracing") as say:

        def watch(pass_: Pass, graph: Graph, seconds: float) -> None:
            say(f"{pass_.name} done, {seconds:.1f} s")
            if printer is not None:
                printer.watch(pass_, graph, seconds)

        return api.compile(
            target.model, target.batch, mesh=_mesh(mesh), plan=plan, loss=target.loss, strict=strict, watch=watch,
            mode=mode,
        )  # fmt: skip


def _mesh(text: str | None) -> Mesh | None:
    try:
        return None if text is None else Mesh.parse(text)
    except ShardcError as wrong:
        raise ShardcError(*(replace(d, location=f"--mesh {text}") for d in wrong.diagnostics)) from None


def _verify(program: Program, batch: Any, shown: Console) -> None:
    with _progress("simulating all ranks"):
        has_values = program.model is not None and not any(p.is_meta for p in program.model.parameters())
        report = program.verify(batch, params=None if has_values else state_of(program))
    shown.print(str(report), markup=False, highlight=False, soft_wrap=True)
    if not report.ok:
        raise typer.Exit(MISMATCH)


def _show_rank(program: Program, rank: int, module_filter: str | None) -> None:
    staged = program.rank(rank).program
    c, _ = staged.coordinates(rank)
    for part in rank_view(program, rank, staged.held(c), (staged.axis,) if staged.axis else ()):
        _out().print(part)
    typer.echo(rank_text(staged, c, keep_only(module_filter)), nl=False)


def _summary(program: Program) -> list[RenderableType]:
    return pipeline_summary(program) if program.staged.axis else summary(program)


def _text(program: Program, module_filter: str | None) -> str:
    if module_filter is None:
        return program.text()
    return "\n".join(print_graph(graph, keep=keep_only(module_filter)) for graph in graphs(program.staged))


def _write(text: str, output: Path | None) -> None:
    if output is None:
        typer.echo(text, nl=False)
    else:
        write_text(output, text)


def _diagnose(diagnostics: tuple[Diagnostic, ...]) -> None:
    for diagnostic in diagnostics:
        typer.echo(diagnostic.render(), err=True)


@contextmanager
def _progress(doing: str) -> Generator[Callable[[str], None]]:
    """A line on stderr that says what is going on, if it takes long and someone is watching."""
    console = _err()
    if not console.is_terminal:
        yield lambda _: None
        return
    status = console.status(doing)
    start = threading.Timer(QUIET, status.start)
    start.daemon = True
    start.start()
    begun = time.monotonic()
    try:
        yield lambda text: status.update(f"{text} ({time.monotonic() - begun:.0f} s in all)")
    finally:
        start.cancel()
        start.join()
        status.stop()


def _out() -> Console:
    return _console(stderr=False)


def _err() -> Console:
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    """Made anew each time, so that it writes to where sys.stdout points now; a pipe is as wide as the text needs."""
    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=200)
