"""Where the program of a request lies in the cache: found when it is traced, and filled once it is compiled.

    place.find()                  trace, key, read: the program, if there is one
    compiled(request, place)      compiles what was traced, and notes what else it traces
    place.write(...)              keeps the program, with the keys of all traces

A program that took a second trace to compile is a hit if that one is equal too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardc.compiler.compiled import Compiled, Preparing, in_parts
from shardc.compiler.preparation import Prepared
from shardc.compiler.request import Request
from shardc.ir.diagnostic import ShardcError
from shardc.ir.graph import Graph
from shardc.passes.type_check import unknown_ops
from shardc.plan.schema import Plan
from shardc.program_cache.digest import UncacheableError
from shardc.program_cache.folder import Folder
from shardc.program_cache.key import key_of
from shardc.program_cache.surroundings import foreign
from shardc.rules.registry import find_rule

_Seen = list[tuple[int, bool, str]]  # of each trace: parts of the batch, whether of all layers, its key


class Place(Preparing):
    """Of one request. `reason` says why its program is not kept, where it is not."""

    def __init__(self, request: Request) -> None:
        folder = Folder.of_environment()
        self.reason = folder if isinstance(folder, str) else ""
        self._folder = None if isinstance(folder, str) else folder
        self._request = request
        self._asked: tuple[Plan, str] | None = None
        self._ready: dict[int, tuple[Prepared, str]] = {}  # by parts, with its key; each is compiled once at most
        self._seen: _Seen = []

    # ------------------------------------------------------------------ before
    def find(self) -> tuple[Prepared, dict[str, Any]] | None:
        """What `write` was given for an equal request, and what this one is prepared as. Raises ShardcError where it
        cannot be prepared."""
        if self._folder is None:
            return None
        plan, fused_on = self.asked(self._request)
        first = in_parts(plan, plan.overlap.parts)
        prepared = super().way(self._request, first, fused_on)
        key = self._key(prepared)
        self._ready[first.overlap.parts] = prepared, key
        content = self._folder.read(key) if key else None
        if content is None:
            return None
        same = all(self._has(*each) for each in content["seen"][1:])
        return (prepared, content["program"]) if same else None

    def _has(self, parts: int, all_layers: bool, key: str) -> bool:
        """Is another trace of the request what it was?"""
        plan, fused_on = self.asked(self._request)
        try:
            ready = self._ready.get(parts)
            prepared = super().way(self._request, in_parts(plan, parts), fused_on) if ready is None else ready[0]
            return self._key(super().of_all_layers(prepared) if all_layers else prepared) == key
        except ShardcError:
            return False

    def _key(self, prepared: Prepared) -> str:
        """An empty text where there is none, of which `reason` is then told."""
        try:
            return key_of(prepared, self.asked(self._request)[0])
        except UncacheableError as unknown:
            self._refuse(str(unknown))
        except Exception as wrong:  # of the user's objects; or an optimizer that compiling will refuse
            self._refuse(f"{type(wrong).__name__} when its content was asked for: {wrong}")
        return ""

    def _refuse(self, reason: str) -> None:
        if self._folder is not None and not self.reason:
            self.reason = reason
            self._folder.note_refusal(type(self._request.model).__qualname__, reason)

    # ------------------------------------------------------------------ while compiling
    def asked(self, request: Request) -> tuple[Plan, str]:
        if self._asked is None:
            self._asked = super().asked(request)
        return self._asked

    def way(self, request: Request, plan: Plan, fused_on: str) -> Prepared:
        ready = self._ready.pop(plan.overlap.parts, None)
        if ready is not None and ready[0].options.watch is request.watch:
            prepared, key = ready
        else:
            try:
                prepared, key = super().way(request, plan, fused_on), ""
            except ShardcError as refused:
                self._refuse(f"a part of the batch cannot be traced: {refused.diagnostics[0].message}")
                raise
        self._note(prepared, key, all_layers=False)
        return prepared

    def of_all_layers(self, prepared: Prepared) -> Prepared:
        prepared = super().of_all_layers(prepared)
        self._note(prepared, "", all_layers=True)
        return prepared

    def _note(self, prepared: Prepared, key: str, *, all_layers: bool) -> None:
        if not self.reason:
            self._seen.append((prepared.task.plan.overlap.parts, all_layers, key or self._key(prepared)))

    # ------------------------------------------------------------------ after
    def write(self, compiled: Compiled, content: Callable[[], dict[str, Any]]) -> str:
        """Keep a program, where `content` gives it as plain data; why that is not done, or an empty text."""
        if self._folder is None or self.reason:
            return self.reason
        try:
            for graph in (compiled.graphs.body, compiled.graphs.reference):
                _check(graph)
            about = {"model": type(self._request.model).__qualname__, "mesh": str(compiled.mesh)}
            about["mode"] = self._request.mode
            if self._folder.write(self._seen[0][2], about, {"program": content(), "seen": self._seen}):
                return ""
            if why := self._folder.distrust():
                return why
            return f"nothing can be written to {self._folder.path}, or the program is larger than its bound"
        except UncacheableError as unknown:
            self._refuse(str(unknown))
        except Exception as wrong:  # of a program that no file can have: it is compiled all the same
            self._refuse(f"{type(wrong).__name__} when it was to be written: {wrong}")
        return self.reason


def _check(graph: Graph) -> None:
    """Raise UncacheableError where a graph depends on what no key tells."""
    if unknown_ops(graph):
        raise UncacheableError("the program calls ops that no file can have")
    for node in graph.calls():
        if (rule := find_rule(node.target)) is not None and (function := foreign(rule)):
            raise UncacheableError(f"{function}, the rule of {rule.op}, is not shardc's own")
