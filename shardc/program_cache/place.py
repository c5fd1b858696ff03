"""Where the program of a request lies in the cache: found when it is traced, and filled once it is compiled.

    place.find()                  trace, key, read: the program, if there is one
    compiled(request, place)      compiles what was traced, and notes what else it traces
    place.write(...)              keeps the program, with the keys of all traces

A program that took a second trace to compile is a hit if that one is equal too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardc.compiler.compiled import Compiled, Preparing, asks, in_parts
from shardc.compiler.preparation import Prepared
from shardc.compiler.request import Request
from shardc.ir.diagnostic import ShardcError
from shardc.ir.graph import Graph
from shardc.passes.type_check import unknown_ops
from shardc.plan.overlap import AUTO
from shardc.plan.schema import Plan
from shardc.program_cache.digest import UncacheableError
from shardc.program_cache.folder import Folder
from shardc.program_cache.key import key_of
from shardc.program_cache.surroundings import foreign
from shardc.rules.registry import find_rule

_Seen = list[tuple[int, bool, str]]  # of each trace: parts of the batch, whether of all layers; its key, or why none is


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
        """What `write` was given for an equal request, and what this one is prepared as, in the way that was taken.
        Raises ShardcError where it cannot be prepared."""
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
        ways = [prepared]
        for each in content["seen"][1:]:
            way = self._same(*each)
            if way is None:
                return None
            ways += [way] if isinstance(way, Prepared) else []
        self._folder.note_hit(key)
        return next(way for way in ways if _form(way) == content["taken"]), content["program"]

    def _same(self, parts: int, all_layers: bool, key: str) -> Prepared | str | None:
        """Another way of the request, or why it is refused, if that is what it was; else None."""
        plan, fused_on = self.asked(self._request)
        try:
            ready = self._ready.get(parts)
            prepared = super().way(self._request, in_parts(plan, parts), fused_on) if ready is None else ready[0]
            prepared = super().of_all_layers(prepared) if all_layers else prepared
        except ShardcError as refused:
            return str(refused) if str(refused) == key else None
        return prepared if self._key(prepared) == key else None

    def _key(self, prepared: Prepared) -> str:
        """An empty text where there is none, of which `reason` is then told."""
        plan = self.asked(self._request)[0]
        if plan.overlap.split == AUTO and asks(prepared):
            self._refuse("values of the sample decide whether the batch runs in halves")
            return ""
        try:
            return key_of(prepared, plan)
        except UncacheableError as unknown:
            self._refuse(str(unknown))
        except Exception as wrong:  # of the user's objects; or an optimizer that compiling will refuse
            self._refuse(f"{type(wrong).__name__} when its content was asked for")
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
            except ShardcError as refused:  # of halves, which are then no choice
                self._seen.append((plan.overlap.parts, False, str(refused)))
                raise
        self._note(prepared, key)
        return prepared

    def of_all_layers(self, prepared: Prepared) -> Prepared:
        prepared = super().of_all_layers(prepared)
        self._note(prepared)
        return prepared

    def _note(self, prepared: Prepared, key: str = "") -> None:
        if not self.reason:
            self._seen.append((*_form(prepared), key or self._key(prepared)))

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
            kept = {"program": content(), "seen": self._seen, "taken": _form(compiled.prepared)}
            if self._folder.write(self._seen[0][2], about, kept):
                return ""
            if why := self._folder.distrust():
                return why
            return f"nothing can be written to {self._folder.path}, or the program is larger than its bound"
        except UncacheableError as unknown:
            self._refuse(str(unknown))
        except Exception as wrong:  # of a program that no file can have: it is compiled all the same
            self._refuse(f"{type(wrong).__name__} when it was to be written: {wrong}")
        return self.reason


def _form(way: Prepared) -> tuple[int, bool]:
    """In how many parts the batch is, and whether all layers had to be recorded."""
    return way.task.plan.overlap.parts, way.all_layers


def _check(graph: Graph) -> None:
    """Raise UncacheableError where a graph depends on what no key tells."""
    if unknown_ops(graph):
        raise UncacheableError("the program calls ops that no file can have")
    for node in graph.calls():
        if (rule := find_rule(node.target)) is not None and (function := foreign(rule)):
            raise UncacheableError(f"{function}, the rule of {rule.op}, is not shardc's own")
