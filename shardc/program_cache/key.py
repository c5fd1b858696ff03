"""The key of a program: a digest of what its passes are given, and of what else they depend on.

    trace           of the model with this batch: each op with its arguments, types, module and source line
    updates         of the optimizer, traced in the same way
    plan, mesh      as bound to the trace, with the lines that diagnostics cite; options of passes
    surroundings    versions, shardc's files and variables, torch's switches

The model is traced at each start, and the key is made of the trace, not of the code behind it. So it does not matter
what forward reads: a file, a class attribute of a library, a clock. If the trace is another one, so is the key.
"""

from __future__ import annotations

from dataclasses import replace

from shardc.compiler.preparation import Prepared
from shardc.plan.schema import Plan
from shardc.program_cache.digest import Digest
from shardc.program_cache.surroundings import add_surroundings
from shardc.program_cache.traces import add_trace, add_updates

_LATER = ("rates", "fills")  # of a record: learning rates are values, and fills are those of updates


def key_of(prepared: Prepared, asked: Plan) -> str:
    """Of one way to compile the plan that is `asked` for. Raises UncacheableError with the reason where there is none,
    ShardcError for what compiling refuses."""
    task, digest = prepared.task, Digest()
    add_surroundings(digest)
    add_trace(digest, task.traced)
    add_updates(digest, task.updates, task.traced)
    digest.add(asked, task.plan, task.mesh, task.placed, task.bound, task.tokens, task.notes)
    digest.add(replace(prepared.options, watch=None), prepared.fused_on, prepared.request.mode)
    digest.add({name: value for name, value in prepared.record.items() if name not in _LATER})
    return digest.text()
