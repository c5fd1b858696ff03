"""shardc: a declarative sharding compiler for PyTorch.

Take an unmodified `nn.Module`, say where a few tensors are placed, and get a distributed program:

    program = shardc.compile(model, batch, mesh=shardc.Mesh(dp=2, tp=2), plan="shardc:gpt2")
    print(program.text())                # what every rank runs, with its collectives
    assert program.verify().ok           # all ranks simulated here, against the single device
    trainer = program.launch()           # this rank under torchrun; all ranks simulated otherwise
    loss = trainer.step(batch).loss

`dir(shardc)` lists the API. It is imported at its first use: `import shardc` itself does not import torch.
"""

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from shardc.ir.gc_pause import gc_paused
from shardc.ir.version import VERSION

if TYPE_CHECKING:
    from shardc.api import Program, annotate, compile, shard
    from shardc.compiler.program_check import parse
    from shardc.frontend.made_anew import meta_parameters
    from shardc.ir.collectives import Collective
    from shardc.ir.diagnostic import Diagnostic, ShardcError
    from shardc.ir.mesh import Mesh
    from shardc.ir.placement import OPEN, P, Placement
    from shardc.plan.schema import Plan
    from shardc.planner.autoplan import autoplan
    from shardc.planner.ranking import RankedPlan, Ranking
    from shardc.rules.registry import rule
    from shardc.runtime.execute.data_parts import Parts
    from shardc.runtime.generate.result import Finished, Generated
    from shardc.runtime.oracle.report import Report
    from shardc.runtime.train.callbacks import EarlyStopping
    from shardc.runtime.train.ema import EMA
    from shardc.runtime.train.metrics import Metrics
    from shardc.runtime.train.result import StepResult
    from shardc.runtime.train.trainer import Trainer
    from shardc.schedule import schedules

__all__ = [
    "EMA",
    "OPEN",
    "Collective",
    "Diagnostic",
    "EarlyStopping",
    "Finished",
    "Generated",
    "Mesh",
    "Metrics",
    "P",
    "Parts",
    "Placement",
    "Plan",
    "Program",
    "RankedPlan",
    "Ranking",
    "Report",
    "ShardcError",
    "StepResult",
    "Trainer",
    "annotate",
    "autoplan",
    "compile",
    "meta_parameters",
    "parse",
    "rule",
    "schedules",
    "shard",
]

__version__ = VERSION

# The modules that define what `__all__` names.
_HOMES = {
    "shardc.api": "Program annotate compile shard",
    "shardc.compiler.program_check": "parse",
    "shardc.frontend.made_anew": "meta_parameters",
    "shardc.ir.collectives": "Collective",
    "shardc.ir.diagnostic": "Diagnostic ShardcError",
    "shardc.ir.mesh": "Mesh",
    "shardc.ir.placement": "OPEN P Placement",
    "shardc.plan.schema": "Plan",
    "shardc.planner.autoplan": "autoplan",
    "shardc.planner.ranking": "RankedPlan Ranking",
    "shardc.rules.registry": "rule",
    "shardc.runtime.execute.data_parts": "Parts",
    "shardc.runtime.generate.result": "Finished Generated",
    "shardc.runtime.oracle.report": "Report",
    "shardc.runtime.train.callbacks": "EarlyStopping",
    "shardc.runtime.train.metrics": "Metrics",
    "shardc.runtime.train.ema": "EMA",
    "shardc.runtime.train.result": "StepResult",
    "shardc.runtime.train.trainer": "Trainer",
    "shardc.schedule": "schedules",
}
_PLANNING = ("shardc.planner.autoplan", "shardc.planner.ranking")  # with all that compiles; nothing that runs
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}
_PARTS = {part.name for part in iter_modules(__path__)}  # the packages and modules of shardc


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        with gc_paused():
            if _HOME_OF[name] not in _PLANNING:
                import_module("shardc.api")  # registers every op and rule, whichever name is asked for first
            value = getattr(import_module(_HOME_OF[name]), name)
        globals()[name] = value
        return value
    if name in _PARTS:
        return import_module(f"shardc.{name}")
    raise AttributeError(f"module 'shardc' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*__all__, "__doc__", "__version__"])
