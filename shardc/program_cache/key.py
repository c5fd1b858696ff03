"""The key of a program: a digest of everything that compiling a request depends on.

    model       classes with their code, attributes, hooks; parameters' forms; buffers with their values; ties
    batch       structure, shapes, dtypes, and values, which forward may ask for
    loss, optimizer, plan, mesh, mode, strict
    surroundings    versions, shardc's files, torch's switches, variables of the environment, rules

Where something is met whose content cannot be told, there is no key, and `UncacheableError` says what that was.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from types import FunctionType

from shardc.compiler.binding import collect_plan, read_mesh
from shardc.compiler.request import Compiled, Request
from shardc.frontend.own_values import non_persistent_buffers
from shardc.frontend.program_optimizers import stored_state
from shardc.ir.graph import info
from shardc.passes.type_check import unknown_ops
from shardc.program_cache.code import Code
from shardc.program_cache.origins import UncacheableError
from shardc.program_cache.surroundings import add_surroundings

_UNSTABLE = {  # codes of findings that say that a compile may end otherwise
    "SC109": "forward leaves something behind that its next step would read",
    "SC111": "forward draws numbers in Python",
}


@dataclass(frozen=True)
class Key:
    """`paths` are the files that it depends on, the user's and libraries'; `unknown` are methods that nothing
    names and whose reads are not known."""

    digest: str
    paths: frozenset[str]
    unknown: tuple[FunctionType, ...]

    def check(self, compiled: Compiled) -> None:
        """Raise UncacheableError where a compiled program shows that the key does not know all that it depends on."""
        if compiled.traced.constants:
            raise UncacheableError("forward makes tensors from data, whose later changes are watched")
        for diagnostic in compiled.graphs.body.diagnostics:
            if diagnostic.code in _UNSTABLE:
                raise UncacheableError(_UNSTABLE[diagnostic.code])
        if unknown_ops(compiled.graphs.body) or unknown_ops(compiled.graphs.reference):
            raise UncacheableError("the program calls ops that no file can have")
        graphs = (compiled.graphs.reference, compiled.graphs.body)
        sources = {info(n).source.rpartition(":")[0] for graph in graphs for n in graph.fx.nodes if n.op != "output"}
        files = {path.rpartition("/")[2] for path in self.paths}
        if others := {source.rpartition("/")[2] for source in sources if source} - files:
            raise UncacheableError(f"code of {min(others)} is run, which no value of the model leads to")


def key_of(request: Request) -> Key:
    """The key of a request that `compile` was given. Raises UncacheableError with the reason where there is none."""
    model, optimizer = request.model, request.optimizer
    unsaved = non_persistent_buffers(model).values()
    # No program depends on what parameters hold: where forward asks for it, compiling raises SC101.
    forms = {id(parameter) for parameter in model.parameters()}
    code = Code(forms, constructors=any(buffer.is_meta for buffer in unsaved))
    add = code.fingerprint.add
    code.fingerprint.token(request.mode, request.strict)
    add(model, "model")
    add(request.batch, "batch")
    add(request.loss, "loss")
    if optimizer is not None:
        if any(chain(stored_state(optimizer).values())):
            raise UncacheableError("the optimizer has state already")
        add(optimizer, "optimizer")
    plan = collect_plan(model, request.plan)
    add(plan, "plan")
    mesh = read_mesh(request.mesh if request.mesh is not None else plan.mesh)
    code.fingerprint.token("mesh", *mesh.axes)
    add_surroundings(code)
    digest = code.finish()
    return Key(digest, frozenset({*code.files, *code.libraries.files}), (*code.unknown.values(),))
