"""The reference of the plan has every key of its schema, with the default that the schema has, and no other key."""

from __future__ import annotations

import re

import pytest
import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from shardc.plan.clipping import Clipping
from shardc.plan.context import Context
from shardc.plan.experts import Experts
from shardc.plan.fuse import Fusing
from shardc.plan.hardware import HardwareChoice
from shardc.plan.pipeline import Pipelining
from shardc.plan.schema import Plan
from shardc.plan.values import Dtypes, LossOver, Recomputing, Storage
from tests.repository.pages import ROOT, Page

PAGE = Page(ROOT / "docs/reference/plan.md")
SECTIONS: dict[str, type[BaseModel]] = {
    "": Plan,
    "storage": Storage,
    "recompute": Recomputing,
    "hardware": HardwareChoice,
    "fuse": Fusing,
    "experts": Experts,
    "context": Context,
    "precision": Dtypes,
    "pipeline": Pipelining,
    "loss": LossOver,
    "clip_grad_norm": Clipping,
}
DERIVED = {"changes", "value"}  # of the hardware: what is beside `like`, and the result


def rows(section: str) -> dict[str, str]:
    """By key, the default that the page gives."""
    heading = f"## {section}" if section else "# The plan"
    body = PAGE.text.split(f"{heading}\n", 1)[1].split("\n## ", 1)[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", body, re.M))


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_has_its_row_and_default(section: str) -> None:
    fields = {name: field for name, field in SECTIONS[section].model_fields.items() if name not in DERIVED}
    shown = rows(section)
    assert shown.keys() == fields.keys()
    for name, field in fields.items():
        default = field.get_default(call_default_factory=True)
        text = shown[name].strip("`")
        if default is PydanticUndefined:
            assert text == "required"
        elif isinstance(default, BaseModel):
            # The short form, which must mean the same as leaving the key out.
            assert getattr(Plan.from_dict({name: yaml.safe_load(text)}), name) == default, name
        elif text == "none":
            assert default in (None, (), {}, "none"), name
        elif text == "all":
            assert default
        else:
            assert yaml.safe_load(text) == default, name
