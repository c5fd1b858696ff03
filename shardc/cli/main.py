"""The command line: every command with its options, exit codes and help. `commands.py` is what they do.

What was asked for goes to stdout; diagnostics, progress and, where stdout carries a program, the summary go to stderr.
All options stand in this one file, which is why it is long. Nothing here imports torch, so that `--help`, `--version`
and a mistyped option answer at once: a command imports what it runs when it runs.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ParamSpec

import typer

from shardc.cli.optimizers import OPTIMIZERS
from shardc.ir.diagnostic import ShardcError
from shardc.ir.version import VERSION

if TYPE_CHECKING:
    from shardc.cli.commands import Asked

P = ParamSpec("P")
BAD_INPUT, FAILURE, INTERRUPTED = 2, 3, 130
RUNTIME_CODES = {"SC502", "SC503"}  # a rank died, a collective hung
EPILOG = (
    "\b\nTARGET is file.py:factory, whose factory() returns (model, batch) or (model, batch, loss);\n"
    "hf:MODEL_TYPE[?key=value&...], built small from its configuration alone; hf:config.json; or a program.json.\n\n"
    "\b\nExit codes: 0 ok; 1 the program differs from the single device, or costs more than its lock;\n"
    "2 bad input; 3 a failure while running."
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
            if kwargs.get("as_json"):
                from shardc.cli import as_json, console

                console.write_json({"diagnostics": as_json.diagnostics(wrong.diagnostics)})
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


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"shardc {VERSION}")
        raise typer.Exit


@app.callback()
def shardc(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version, and nothing else.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Compile an unmodified PyTorch model and a plan of placements into a distributed program."""


class Emit(StrEnum):
    """The forms of a program."""

    text = "text"
    json = "json"
    python = "python"
    dot = "dot"
    triton = "triton"
    html = "html"


class Device(StrEnum):
    """What is measured."""

    cpu = "cpu"
    cuda = "cuda"


TargetText = Annotated[
    str, typer.Argument(metavar="TARGET", help="file.py:factory, hf:MODEL_TYPE, or a saved program.json.")
]
PlanText = Annotated[
    str | None, typer.Option("--plan", metavar="FILE", help="The plan: a YAML file, or one of ours: shardc:gpt2.")
]
MeshText = Annotated[str | None, typer.Option("--mesh", metavar="dp=2,tp=2", help="The mesh; overrides the plan's.")]
ModeText = Annotated[str, typer.Option("--mode", metavar="train|eval", help="A training step, or an evaluation.")]
Strict = Annotated[bool, typer.Option("--strict", help="What cannot be honoured is an error, not a warning.")]
Optimizer = Annotated[
    str | None,
    typer.Option(
        "--optimizer",
        metavar="NAME",
        help=f"Make this optimizer's update and state part of the step: {', '.join(OPTIMIZERS)}.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]
Fold = Annotated[
    bool | None,
    typer.Option(
        "--fold/--no-fold", help="Print equal layers once, with their count; by default where stdout is a terminal."
    ),
]


def _asked(
    target: str,
    plan: str | None,
    mesh: str | None,
    strict: bool,
    optimizer: str | None = None,
    mode: str = "train",
) -> Asked:
    from shardc.cli.commands import Asked

    return Asked(target, plan, mesh, strict, optimizer, mode=mode)


@app.command("compile", epilog=EPILOG)
@guarded
def compile_command(
    target: TargetText,
    plan: PlanText = None,
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
    optimizer: Optimizer = None,
    fold: Fold = None,
    as_json: AsJson = False,
) -> None:
    """Compile, and print a summary; or print the program, the graph after a pass, or one rank's view."""
    from shardc.cli import commands

    form = None if emit is None else emit.value
    commands.compile_target(
        _asked(target, plan, mesh, strict, optimizer, mode),
        commands.Printed(tuple(print_after or ()), diff, rank, form, output, module_filter, fold),
        check=check,
        as_json=as_json,
    )


@app.command(epilog=EPILOG)
@guarded
def explain(
    target: TargetText,
    value: Annotated[
        str | None,
        typer.Argument(metavar="[VALUE]", help="A collective's or transfer's name or number, or a kernel's or call's."),
    ] = None,
    plan: PlanText = None,
    mesh: MeshText = None,
    kernels: Annotated[bool, typer.Option("--kernels", help="Without VALUE: list kernels, not communication.")] = False,
    strict: Strict = False,
    optimizer: Optimizer = None,
    fold: Fold = None,
    as_json: AsJson = False,
) -> None:
    """Say why a collective exists and the cheapest change that removes it; or what a kernel fuses and what it saves."""
    from shardc.cli import commands

    asked = _asked(target, plan, mesh, strict, optimizer)
    commands.explain(asked, value, kernels=kernels, fold=fold, as_json=as_json)


@app.command(epilog=EPILOG)
@guarded
def cost(
    target: TargetText,
    plan: PlanText = None,
    mesh: MeshText = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="What a rank holds: by category, at which call most, and what then.")
    ] = False,
    top: Annotated[int, typer.Option(min=0, help="With --memory: how many of the largest values to list.")] = 10,
    hardware: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="Predict the time of a step on it: h200-nvlink, or a YAML file."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --hardware: write the predicted step for ui.perfetto.dev.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --hardware: compare with what trainer.profile() measured.")
    ] = None,
    scaling: Annotated[
        str | None, typer.Option(metavar="tp=1,2,4,8", help="Predict each size; say where the ideal speed-up is lost.")
    ] = None,
    bottlenecks: Annotated[
        bool, typer.Option("--bottlenecks", help="Say what holds the predicted step up, and what to change.")
    ] = False,
    memory_limit: Annotated[
        str | None, typer.Option(metavar="80GiB", help="With --bottlenecks: what a rank may hold.")
    ] = None,
    node_mtbf: Annotated[
        float | None,
        typer.Option(metavar="HOURS", help="Say what failures cost, of nodes that run so long between two."),
    ] = None,
    restart_mesh: Annotated[
        str | None, typer.Option(metavar="dp=7,tp=8", help="With --node-mtbf: the mesh that a job restarts on.")
    ] = None,
    symbolic: Annotated[
        bool, typer.Option("--symbolic", help="Formulas of the plan's symbols, mesh axes and layers, not numbers.")
    ] = False,
    mode: ModeText = "train",
    strict: Strict = False,
    optimizer: Optimizer = None,
    fold: Fold = None,
    as_json: AsJson = False,
) -> None:
    """Say what a step costs a rank: its work, its communication, what it holds (--memory), its time (--hardware)."""
    from shardc.cli import commands, symbolic_cost
    from shardc.cli import scaling as questions

    asked = _asked(target, plan, mesh, strict, optimizer, mode)
    others = {"--memory": memory or None, "--trace": trace, "--profile": profile, "--symbolic": symbolic or None}
    beside = tuple(option for option, value in others.items() if value is not None)
    question = questions.Question(hardware, scaling, bottlenecks, memory_limit, node_mtbf, restart_mesh, beside)
    if question.asked:
        questions.answer(asked, question, as_json=as_json)
    elif symbolic:
        symbolic_cost.symbolic_cost(asked, hardware, beside, as_json=as_json)
    else:
        timed = commands.Timed(hardware, trace, profile)
        commands.cost(asked, timed, memory=memory, top=top, fold=fold, as_json=as_json)


@app.command(epilog=EPILOG)
@guarded
def lock(
    target: TargetText,
    plan: PlanText = None,
    mesh: MeshText = None,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The lockfile.")] = Path("shardc.lock"),
    check: Annotated[
        bool, typer.Option("--check", help="Compare with FILE, and fail (exit code 1) where the program costs more.")
    ] = False,
    hardware: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Predict the step on it: a name, or a YAML file; by --check as FILE says."),
    ] = None,
    tolerance: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[KIND=]SHARE",
            help="With --check: what may grow by how much, as in memory=0.02; of all kinds without one; repeatable.",
        ),
    ] = None,
    mode: ModeText = "train",
    strict: Strict = False,
    optimizer: Optimizer = None,
    as_json: AsJson = False,
) -> None:
    """Write what a step costs to a file to commit, or --check that a change of the model makes it no worse."""
    from shardc.cli import locking

    asked = _asked(target, plan, mesh, strict, optimizer, mode)
    locking.lock(asked, output, hardware=hardware, check=check, tolerance=tolerance or [], as_json=as_json)


@app.command("plan", epilog=EPILOG)
@guarded
def plan_command(
    target: TargetText,
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="How many ranks.")],
    memory: Annotated[str, typer.Option(metavar="SIZE", help="What a rank may hold.")] = "80GiB",
    hardware: Annotated[
        str, typer.Option(metavar="NAME", help="A file of configs/hardware, or a path.")
    ] = "h200-nvlink",
    batch: Annotated[int | None, typer.Option(min=1, help="Rows of a step; without, the sample's.")] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="Tokens of a row, of an hf: target.")] = None,
    keep: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A plan that is kept: its mesh's axes, annotations and options.")
    ] = None,
    precision: Annotated[str, typer.Option(metavar="bf16|fp16|none", help="What to compute in.")] = "bf16",
    reduce: Annotated[
        list[str] | None, typer.Option(metavar="bf16", help="What gradients may be summed in, too; repeatable.")
    ] = None,
    optimizer: Annotated[str, typer.Option(metavar="NAME", help=f"Of the step: {', '.join(OPTIMIZERS)}.")] = "adamw",
    top: Annotated[int, typer.Option(min=1, help="How many plans.")] = 5,
    confirm: Annotated[int, typer.Option(min=0, help="How many of them are compiled in small, and ranked anew.")] = 1,
    folder: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Where plan.1.yaml ... go.")] = None,
    as_json: AsJson = False,
) -> None:
    """Find the fastest plans for a number of ranks, and say why each other one loses."""
    from shardc.cli import plan

    options = (gpus, memory, hardware, batch, seq, keep, precision, reduce or [], optimizer, top, confirm, folder)
    plan.plan(plan.Wanted(target, *options), as_json=as_json)


@app.command(epilog=EPILOG)
@guarded
def timeline(
    target: TargetText,
    plan: PlanText = None,
    mesh: MeshText = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it.")] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write it for ui.perfetto.dev or chrome://tracing.")
    ] = None,
    width: Annotated[int, typer.Option(min=20, help="Columns for the longest row.")] = 120,
    strict: Strict = False,
    optimizer: Optimizer = None,
    as_json: AsJson = False,
) -> None:
    """Say when each rank of a pipeline would do what, where it idles, and how many microbatches it holds."""
    from shardc.cli import commands

    commands.timeline(_asked(target, plan, mesh, strict, optimizer), svg=svg, trace=trace, width=width, as_json=as_json)


@app.command(epilog=EPILOG)
@guarded
def verify(
    target: TargetText,
    plan: PlanText = None,
    mesh: MeshText = None,
    mode: ModeText = "train",
    strict: Strict = False,
    optimizer: Optimizer = None,
    as_json: AsJson = False,
) -> None:
    """Simulate all ranks and compare the loss, every gradient and buffer, or outputs, with the single device."""
    from shardc.cli import commands

    commands.verify(_asked(target, plan, mesh, strict, optimizer, mode), as_json=as_json)


@app.command(epilog=EPILOG)
@guarded
def run(
    target: TargetText,
    plan: PlanText = None,
    mesh: MeshText = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps on the one batch.")] = 5,
    lr: Annotated[
        float | None, typer.Option(help="The step size: 0.1 for gradient descent, 0.001 for --optimizer.")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Start this many real processes; without, ranks are simulated.")
    ] = None,
    strict: Strict = False,
    optimizer: Optimizer = None,
    as_json: AsJson = False,
) -> None:
    """Train for a few steps and print the losses: by --optimizer, or else by plain gradient descent."""
    from shardc.cli import commands

    asked = _asked(target, plan, mesh, strict, optimizer)
    commands.run(asked, steps=steps, lr=lr, nproc=nproc, as_json=as_json)


@app.command(epilog=EPILOG)
@guarded
def generate(
    target: TargetText,
    plan: PlanText = None,
    mesh: MeshText = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(metavar="TOKENS", help="Token ids, as in '5 6 7', or text with --tokenizer; repeatable."),
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(metavar="FOLDER", help="A tokenizer: prompts are text.")] = None,
    weights: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Safetensors, or what save_pretrained or export_hf wrote.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The most tokens to add to a prompt.")] = 20,
    sample: Annotated[
        bool | None, typer.Option("--sample/--greedy", help="By default as the model's generation config says.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="What scores are divided by, with --sample.")] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="Sample from so many of the best tokens; 0: all.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the best tokens of this probability.")] = None,
    eos: Annotated[int | None, typer.Option(metavar="TOKEN", help="The token that ends a row.")] = None,
    seed: Annotated[int, typer.Option(help="Of random numbers: the same tokens on every mesh.")] = 0,
    rows: Annotated[
        int | None,
        typer.Option(min=1, help="How many prompts at a time: where one ends, the next takes its row; without, all."),
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Start this many real processes; without, ranks are simulated.")
    ] = None,
    strict: Strict = False,
    as_json: AsJson = False,
) -> None:
    """Generate tokens from prompts: all ranks simulated here, or each a process, by --nproc or under torchrun."""
    from shardc.cli import generation

    choosing = generation.Choosing(max_new_tokens, sample, temperature, top_k, top_p, eos, seed, rows)
    asked = _asked(target, plan, mesh, strict, mode="eval")
    given = generation.Given(asked, prompt or [], choosing, tokenizer, weights)
    generation.generate(given, nproc=nproc, as_json=as_json)


@app.command(epilog=EPILOG)
@guarded
def tune(
    only: Annotated[list[str] | None, typer.Option(metavar="OP", help="Only this kernel; repeatable.")] = None,
    seconds: Annotated[float, typer.Option(min=1, help="What would start later is left out.")] = 600,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Where the table goes, instead of stdout.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the kernels' schedules on the GPU at hand; kernels find the table if SHARDC_TABLES names its FILE."""
    from shardc.cli import commands

    commands.tune(only, seconds, output, as_json=as_json)


@app.command(epilog=EPILOG)
@guarded
def calibrate(
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Where the YAML goes, instead of stdout.")
    ] = None,
    rows: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Leave the measurements here, as JSON lines.")
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="Fit these measurements instead of measuring.")
    ] = None,
    device: Annotated[Device | None, typer.Option(help="By default GPUs, if there are any.")] = None,
    world: Annotated[int | None, typer.Option(min=1, help="Ranks: by default all GPUs, or two on a CPU.")] = None,
    seconds: Annotated[float, typer.Option(min=1, help="About how long to measure, once processes run.")] = 120,
    as_json: AsJson = False,
) -> None:
    """Measure this machine's products, memory, attention and collectives, and write a file of hardware."""
    from shardc.cli import calibrate as calibration

    calibration.run(output, rows, source, device and device.value, world, seconds, as_json=as_json)


@app.command("cache")
@guarded
def cache_command(
    clear: Annotated[bool, typer.Option("--clear", help="Delete them all.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the programs that compiling has kept on this disk. SHARDC_CACHE names their folder, or is off."""
    from shardc.cli import cache

    cache.cache(clear=clear, as_json=as_json)


@app.command()
@guarded
def doctor(as_json: AsJson = False) -> None:
    """Say which versions, devices and links are at hand, and what shardc would choose on them."""
    from shardc.cli import doctor as examination

    examination.run(as_json=as_json)
