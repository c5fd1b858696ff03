"""What is told to the user: one frozen value a finding, one code a kind of finding.

A diagnostic names the user's own line, the tensor, the annotation that led there and the cheapest way out. It is plain
data (strings only), so a program file can carry it. Errors are `ShardcError`, a ValueError that carries diagnostics;
violations of our own invariants are asserts and never come through here. Kernels' codes are declared here, the
compiler's in `shardc.ir.diagnostic`: both raise the one class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Severity = Literal["error", "warning", "note"]


class Code(NamedTuple):
    """The kebab-name that is printed beside a code, and its meaning in one line."""

    name: str
    meaning: str


CODES: dict[str, Code] = {
    "SC530": Code("kernel-operand", "a kernel is given an operand that it does not take, or whose gradient is lost"),
    "SC531": Code("kernel-text", "the text of a fused kernel cannot be read, or does not make sense"),
    "SC532": Code("not-tunable", "kernels are to be tuned where they cannot be, or which have nothing to choose"),
    "SC533": Code("kernel-table", "a table of kernels' schedules is not there, or is none"),
}


@dataclass(frozen=True)
class Diagnostic:
    """One finding. `location` is "model.py:11", `fqn` the module it lies in, `op` the op and its rule.

    `source_text` may have several lines (a caret line under the text, say); each is quoted behind a bar.
    """

    code: str
    message: str
    severity: Severity = "error"
    location: str | None = None
    source_text: str | None = None
    fqn: str | None = None
    tensor: str | None = None
    placement: str | None = None
    op: str | None = None
    cause: str | None = None
    hint: str | None = None
    also: str | None = None  # the other tensors of which the same is to be said

    def __post_init__(self) -> None:
        assert self.code in CODES, f"diagnostic code {self.code} is not in CODES"

    @property
    def name(self) -> str:
        return CODES[self.code].name

    def render(self) -> str:
        lines = [f"{self.severity}[{self.code} {self.name}]: {self.message}"]
        place = [self.location] if self.location else []
        if self.fqn:
            place.append(f"in {self.fqn}")
        if place:
            lines.append("  --> " + ", ".join(place))
        if self.source_text:
            lines += [f"   | {line}".rstrip() for line in self.source_text.splitlines()]
        tensor, placed = self.tensor, None if self.placement is None else f'"{self.placement}"'
        if tensor and placed:
            tensor, placed = f"{tensor} = {placed}", None
        details = (
            ("tensor", tensor),
            ("placed", placed),
            ("also", self.also),
            ("op", self.op),
            ("cause", self.cause),
            ("hint", self.hint),
        )
        for label, text in details:
            if text:
                # Continuation lines align under the first, so that a cause may be a chain of several steps.
                lines.append(f"  {label + ':':<8}" + text.replace("\n", "\n" + " " * 10))
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.render()


class ShardcError(ValueError):
    """What the user did cannot be compiled or run; the diagnostics say why and what to do instead."""

    def __init__(self, *diagnostics: Diagnostic) -> None:
        assert diagnostics, "an error needs at least one diagnostic"
        # The diagnostics are the exception's args, and not the text, so that it survives pickling between processes.
        super().__init__(*diagnostics)
        self.diagnostics: tuple[Diagnostic, ...] = diagnostics

    @property
    def code(self) -> str:
        return self.diagnostics[0].code

    def __str__(self) -> str:
        return "\n".join(diagnostic.render() for diagnostic in self.diagnostics)


def error(code: str, message: str, **details: str | None) -> ShardcError:
    """`raise error("SC201", "...", hint="...")`: an error of one diagnostic; details are Diagnostic's own fields."""
    return ShardcError(Diagnostic(code, message, "error", **details))
