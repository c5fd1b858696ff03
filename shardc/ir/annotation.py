"""An annotation is a pattern over names, a placement, and where it was written; `match` finds the one for each tensor.

    h.*.mlp.c_fc.weight     `*` stays within one dotted segment
    **.c_fc.weight          `**` is any number of segments, none included

The most specific pattern wins: more literal segments, then fewer `**`, then more literal characters, then fewer `*`.
A tie between different placements is an error, and so is a pattern that matches nothing: both are how a plan silently
comes to mean something else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from shardc.ir.diagnostic import Diagnostic, ShardcError, nearest
from shardc.ir.mesh import Mesh
from shardc.ir.placement import UNSHARDED, DimPlacement, Placement

KINDS = {"params": "parameter or buffer", "inputs": "input", "activations": "module", "outputs": "output"}


@dataclass(frozen=True)
class Annotation:
    """One line of a plan. `origin` is "configs/plans/gpt2.yaml:9"; two annotations are equal wherever they stand."""

    pattern: str
    placement: Placement
    origin: str | None = field(default=None, compare=False)

    def cause(self, name: str | None = None) -> str:
        """How a diagnostic cites the annotation, for the tensor that it was applied to."""
        location = f"   ({self.origin})" if self.origin else ""
        return f'{name or self.pattern} = "{self.placement}"{location}'

    def matches(self, name: str) -> bool:
        return _regex(self.pattern).fullmatch(name) is not None

    def check(self, mesh: Mesh, ndim: int, name: str) -> None:
        """Refuse a placement that does not fit the mesh or the tensor; the error points at the annotation."""
        self.placement.on(ndim).check(mesh, ndim, name, cause=self.cause(name), location=self.origin)

    @property
    def specificity(self) -> tuple[int, int, int, int]:
        """Compared as a tuple, greater is more specific; a pattern without wildcards is beaten by none."""
        segments = self.pattern.split(".")
        literal = sum("*" not in segment for segment in segments)
        deep, stars = segments.count("**"), self.pattern.count("*")
        letters = sum(map(len, segments)) - stars
        return literal, -deep, letters, 2 * deep - stars


def match(
    annotations: Iterable[Annotation],
    names: Iterable[str],
    kind: str,
    aliases: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Annotation]:
    """The annotation of each name that has one; `kind` is a key of KINDS and only words the errors."""
    matched, problems = matches(annotations, names, kind, aliases)
    if problems:
        raise ShardcError(*problems)
    return matched


def matches(
    annotations: Iterable[Annotation],
    names: Iterable[str],
    kind: str,
    aliases: Mapping[str, Sequence[str]] | None = None,
) -> tuple[dict[str, Annotation], list[Diagnostic]]:
    """`match`, with its errors beside what does match.

    A tied tensor goes by one name and has others, its `aliases`. An annotation of any of them counts, and two that
    disagree conflict.
    """
    everything = list(annotations)
    names_of = {name: (name, *(aliases or {}).get(name, ())) for name in names}
    matched: dict[str, Annotation] = {}
    problems: list[Diagnostic] = []
    used: set[str] = set()
    for name, known_as in names_of.items():
        winners: dict[str, list[Annotation]] = {}
        beaten: set[str] = set()
        for alias in known_as:
            matching = [annotation for annotation in everything if annotation.matches(alias)]
            used.update(annotation.pattern for annotation in matching)
            best = max((annotation.specificity for annotation in matching), default=None)
            winners[alias] = [annotation for annotation in matching if annotation.specificity == best]
            beaten.update(annotation.pattern for annotation in matching if annotation.specificity != best)
        # A glob that loses under one name of a tied tensor loses under all: its rival is the more specific one.
        final = [
            (alias, candidate)
            for alias, winning in winners.items()
            for candidate in winning
            if candidate.pattern not in beaten
        ]
        if not final:
            continue
        matched[name] = final[0][1]
        rival = next((pair for pair in final if _trim(pair[1].placement) != _trim(matched[name].placement)), None)
        if rival is not None:
            problems.append(_conflict(name, final[0], rival))
    everyone = [alias for known_as in names_of.values() for alias in known_as]
    problems += [
        _unmatched(candidate, everyone, KINDS[kind]) for candidate in everything if candidate.pattern not in used
    ]
    return matched, problems


def _trim(placement: Placement) -> tuple[DimPlacement, ...]:
    """A placement's dims without trailing unsharded ones, which say nothing."""
    dims = placement.dims
    while dims and dims[-1] == UNSHARDED:
        dims = dims[:-1]
    return dims


_PARTS = re.compile(r"(?:^|(?<=\.))\*\*\.|\.\*\*$|\*+|\.|[^*.]+")


@lru_cache(maxsize=4096)
def _regex(pattern: str) -> re.Pattern[str]:
    """`**.` may be nothing or whole segments with their dots; a last `**` takes the dot before it along."""

    def regex_of(part: re.Match[str]) -> str:
        text = part[0]
        if text.strip(".*"):
            return re.escape(text)
        patterns = {".": r"\.", "*": r"[^.]*", "**.": r"(?:[^.]+\.)*", ".**": r"(?:\.[^.]+)*"}
        return patterns.get(text, ".*")

    return re.compile(_PARTS.sub(regex_of, pattern), re.DOTALL)


def _conflict(name: str, first: tuple[str, Annotation], second: tuple[str, Annotation]) -> Diagnostic:
    lines = (
        f'{annotation.pattern} = "{annotation.placement}"' + (f"   ({annotation.origin})" if annotation.origin else "")
        for _, annotation in (first, second)
    )
    if first[0] == second[0]:
        message = f"two equally specific annotations place {name} differently"
        hint = f"make one of them more specific, or write {name} in full"
    else:
        message = f"{first[0]} and {second[0]} are one tied tensor, placed differently"
        hint = "annotate one of its names, or give both the same placement"
    return Diagnostic("SC206", message, location=second[1].origin, tensor=name, cause="\n".join(lines), hint=hint)


def _unmatched(annotation: Annotation, names: Sequence[str], noun: str) -> Diagnostic:
    pattern = annotation.pattern
    anywhere = Annotation(f"**.{pattern}", annotation.placement)
    deeper = next((name for name in names if anywhere.matches(name)), None)
    # Layers differ in their number only: offered once, as the glob that takes them all.
    shapes = dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names)
    near = nearest(pattern, shapes) or nearest(pattern.removeprefix("**."), shapes)
    if deeper is not None:
        hint = f"write '{anywhere.pattern}': it matches {deeper}"
    elif near:
        hint = "did you mean " + " or ".join(f"'{name}'" for name in near) + "?"
    elif shapes:
        shown = list(shapes)[:8]
        hint = "there are: " + ", ".join(shown) + (", ..." if len(shapes) > len(shown) else "")
    else:
        hint = "the model has none"
    message = f"'{pattern}' matches no {noun} of the model"
    return Diagnostic("SC202", message, location=annotation.origin, cause=annotation.cause(), hint=hint)
