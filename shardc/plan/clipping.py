"""`clip_grad_norm`: the most that the norm of all gradients may be.

    clip_grad_norm: 1.0                            the gradients that an optimizer's update takes
    clip_grad_norm: {norm: 1.0, returned: true}    also those that a step without an optimizer returns

Gradients that are returned are changed only where the plan says so: the caller may take them for the loss's own, or
clip them himself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import model_validator

from shardc.ir.diagnostic import Diagnostic, ShardcError, error
from shardc.plan.values import Flag, FrozenValue, Length

KEY = "clip_grad_norm"


class Clipping(FrozenValue):
    """To which norm gradients are clipped, as torch.nn.utils.clip_grad_norm_ does. In short: the norm."""

    norm: Length
    returned: Flag = False

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        if isinstance(value, Clipping):
            return value
        if not isinstance(value, Mapping):
            return {"norm": value}
        if "norm" not in value:
            hint = f"write {KEY}: 1.0, or {{norm: 1.0, returned: true}}"
            raise error("SC208", f"'{KEY}' lacks the norm", hint=hint)
        return dict(value)  # pyright: ignore[reportUnknownArgumentType]

    def dumped(self) -> object:
        """As plain data, in its short form if it has one."""
        return {"norm": self.norm, "returned": True} if self.returned else self.norm

    def located(self, diagnostic: Diagnostic) -> Diagnostic:
        """The diagnostic, pointing at the key."""
        return self._written.source.locate(diagnostic, KEY)

    def refuse_returned(self) -> None:
        """Raise ShardcError (SC228), at the plan's line, where gradients that are returned would be clipped unasked."""
        if not self.returned:
            message = f"the plan clips gradients to the norm {self.norm:g}, and there is no optimizer that takes them"
            hint = (
                f"pass optimizer= to compile, or --optimizer; {KEY}: {{norm: {self.norm:g}, returned: true}} "
                "clips the gradients that a step returns"
            )
            raise ShardcError(self.located(Diagnostic("SC228", message, hint=hint)))
