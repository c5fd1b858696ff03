"""What a plan says of kernels: `fuse: true`, or `fuse: {exclude: [tanh, '**.mlp.act'], templates: [cross_entropy]}`.

A plan that says nothing leaves it to the device: `shardc.compiler.fusion_default`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator

from kernels_triton import ops
from kernels_triton.match.table import NAMES
from shardc.ir.annotation import Annotation
from shardc.ir.diagnostic import error
from shardc.ir.placement import P
from shardc.plan.values import source_of

AUTO = "auto"


class Fusing(BaseModel):
    """Whether calls become kernels; see passes/fuse. `exclude` are patterns over ops, modules and values, of what stays
    calls; `templates` those of the hand-tuned kernels that are used where one computes just what a kernel does (all of
    them).

    In short: true, false or `auto`, the default, where `enabled` is None: the device decides. What says how to fuse
    need not say that it is enabled; what says nothing is refused.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    enabled: bool | None = None
    exclude: tuple[Annotation, ...] = ()
    templates: tuple[str, ...] = NAMES

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        if isinstance(value, Fusing) or value == {}:
            return value
        options: object = {"enabled": value} if isinstance(value, bool) or value == AUTO else value
        if not isinstance(options, Mapping):
            hint = "write fuse: true, or fuse: {enabled: true, exclude: [tanh]}"
            raise error("SC208", f"'fuse' should be true, false or auto, not {value!r}", hint=hint)
        return {"enabled": True, **cast(Mapping[str, object], options)}

    @field_validator("enabled", mode="before")
    @classmethod
    def _read_enabled(cls, value: Any) -> Any:
        if not isinstance(value, bool) and value != AUTO:
            hint = "write enabled: true, or enabled: false"
            raise error("SC208", f"'fuse.enabled' should be true, false or auto, not {value!r}", hint=hint)
        return None if value == AUTO else value

    @field_validator("exclude", mode="before")
    @classmethod
    def _read_exclude(cls, value: Any, info: ValidationInfo) -> Any:
        origin = source_of(info).origin("fuse", "exclude")
        patterns = (value,) if isinstance(value, (str, Annotation)) else value
        if not isinstance(patterns, (list, tuple)) or not all(
            isinstance(pattern, (str, Annotation)) for pattern in patterns
        ):
            hint = "write exclude: [tanh, '**.mlp.act']"
            raise error("SC208", f"what is not fused should be a list of patterns, not {value!r}", hint=hint)
        return tuple(Annotation(pattern, P(), origin) if isinstance(pattern, str) else pattern for pattern in patterns)

    @property
    def without_kernels(self) -> str:
        """The message for a program that has no kernels."""
        if not self.enabled:
            return "no call is fused: write fuse: true in the plan"
        if not self.exclude:
            return "no call is fused: the plan asks for kernels, and none is worth it"
        return f"no call is fused of those that the plan leaves: it excludes {', '.join(map(repr, self.left))}"

    @property
    def left(self) -> tuple[str, ...]:
        """The patterns of calls that are not fused."""
        return tuple(annotation.pattern for annotation in self.exclude)

    @field_validator("templates", mode="before")
    @classmethod
    def _read_templates(cls, value: Any) -> Any:
        names: object = (value,) if isinstance(value, str) else value
        if not isinstance(names, (list, tuple)):
            hint = "write templates: [layer_norm, cross_entropy], or templates: [] for none"
            raise error("SC208", f"'fuse.templates' should be a list of names, not {value!r}", hint=hint)
        for name in cast(tuple[object, ...], names):
            if name not in NAMES:
                raise error("SC208", f"'fuse' knows no template '{name}'", hint=_instead(name))
        return names

    def dumped(self) -> object:
        """As plain data, in its short form if it has one."""
        options: dict[str, object] = {"exclude": list(self.left)} if self.exclude else {}
        options |= {"templates": list(self.templates)} if self.templates != NAMES else {}
        enabled = AUTO if self.enabled is None else self.enabled
        return {"enabled": enabled, **options} if options else enabled


def says_something(value: Any) -> Any:
    """Of what a plan has under `fuse`: an empty mapping may mean kernels as well as none."""
    if isinstance(value, Mapping) and not value:
        raise error("SC208", "'fuse' is empty: it asks neither for kernels nor for none", hint="write fuse: true")
    return cast(object, value)


def _instead(name: object) -> str:
    """The hint for a name that is not a template's."""
    known = f"known are {', '.join(NAMES)}"
    if name in ops.__all__:
        plain = f"kernels_triton.ops.{name} is a plain function; in a graph the generator writes what it computes"
        return f"leave it out: {plain}, with what is around it, as one kernel; {known}"
    return f"{known}; templates: [] for none"
