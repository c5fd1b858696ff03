"""Where the program of a request lies in the cache: found before it is compiled, and filled after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardc.compiler.request import Compiled, Request
from shardc.program_cache.folder import Folder
from shardc.program_cache.key import Key, key_of
from shardc.program_cache.origins import UncacheableError
from shardc.program_cache.witness import Witness


@dataclass(frozen=True)
class Place:
    """`key` is None where the request cannot be cached, and `reason` says why; `folder`, where the cache is off."""

    folder: Folder | None
    key: Key | None = None
    model: str = ""
    reason: str = ""
    witness: Witness | None = None

    @classmethod
    def of(cls, request: Request) -> Place:
        folder, model = Folder.of_environment(), type(request.model).__qualname__
        if isinstance(folder, str):
            return cls(None, reason=folder)
        try:
            key = key_of(request)
            return cls(folder, key, model, witness=Witness(key))
        except UncacheableError as unknown:
            reason = str(unknown)
        except Exception as wrong:  # of the user's objects; or of arguments that compiling will refuse
            reason = f"{type(wrong).__name__} when its content was asked for: {wrong}"
        folder.note_refusal(model, reason)
        return cls(folder, None, model, reason)

    def read(self) -> dict[str, Any] | None:
        """What `write` was given for an equal request."""
        return None if self.key is None or self.folder is None else self.folder.read(self.key.digest)

    def watched(self, compile: Callable[[], Compiled]) -> Compiled:
        """What `compile` returns, which is watched: `write` refuses it where it read what the key does not know.

        Methods that are watched have other code meanwhile, which one that asks for its caller would see. So where one
        has run, or compiling failed, it is compiled again, unwatched: that is what counts."""
        if self.witness is None:
            return compile()
        try:
            with self.witness.watching():
                made = compile()
        except Exception:
            if not self.witness.has_swapped:
                raise
        else:
            if not self.witness.has_run:
                return made
        return compile()

    def write(self, compiled: Compiled, mode: str, content: Callable[[], dict[str, Any]]) -> str:
        """Keep a program, where `content` gives it as plain data; why that is not done, or an empty text."""
        if self.key is None or self.folder is None:
            return self.reason
        try:
            self.key.check(compiled)
            if self.witness is not None:
                self.witness.check()
            about = {"model": self.model, "mesh": str(compiled.mesh), "mode": mode}
            if self.folder.write(self.key.digest, about, content()):
                return ""
            if why := self.folder.distrust():
                return why
            return f"nothing can be written to {self.folder.path}, or the program is larger than its bound"
        except UncacheableError as unknown:
            reason = str(unknown)
        except Exception as wrong:  # of a program that no file can have: it is compiled all the same
            reason = f"{type(wrong).__name__} when it was to be written: {wrong}"
        self.folder.note_refusal(self.model, reason)
        return reason
