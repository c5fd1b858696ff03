"""shardc: a declarative sharding compiler for PyTorch.

Take an unmodified `nn.Module`, say where a few tensors are placed, and get a distributed program.
"""

from shardc.api import Program, annotate, compile, shard
from shardc.compiler.program_check import parse
from shardc.frontend.own_values import meta_parameters
from shardc.ir.diagnostic import Diagnostic, ShardcError
from shardc.ir.mesh import Mesh
from shardc.ir.placement import OPEN, P, Placement
from shardc.ir.version import VERSION
from shardc.plan.schema import Plan
from shardc.rules.registry import rule
from shardc.schedule import schedules

__all__ = [
    "OPEN",
    "Diagnostic",
    "Mesh",
    "P",
    "Placement",
    "Plan",
    "Program",
    "ShardcError",
    "annotate",
    "compile",
    "meta_parameters",
    "parse",
    "rule",
    "schedules",
    "shard",
]

__version__ = VERSION
