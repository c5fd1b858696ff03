"""A plan's `offload`: its forms, how it is written back and merged, and what is said of values that it cannot have."""

from __future__ import annotations

from typing import Any

import pytest

import shardc
from shardc.plan.offload import LEAST, Offloading

FORMS: dict[str, tuple[Any, Offloading]] = {
    "all": ("all", Offloading(activations="all", optimizer="all")),
    "true": (True, Offloading(activations="all", optimizer="all")),
    "none": ("none", Offloading()),
    "false": (False, Offloading()),
    "bytes": ({"activations": "2GiB"}, Offloading(activations=2**31)),
    "one": ({"optimizer": "all"}, Offloading(optimizer="all")),
    "flag": ({"optimizer": True, "activations": False}, Offloading(optimizer="all")),
    "least": ({"activations": "all", "optimizer": 4096, "least": "64 KiB"}, Offloading(
        activations="all", optimizer=4096, least=2**16
    )),
    "zero": ({"activations": 0}, Offloading()),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_each_form_reads_as_it_says_and_is_written_back(form: str) -> None:
    said, meant = FORMS[form]
    plan = shardc.Plan.of(offload=said)
    assert plan.offload == meant
    assert shardc.Plan.parse(plan.dump()).offload == meant
    assert ("offload" in plan.dump()) == bool(meant.activations or meant.optimizer)


def test_by_default_nothing_is_moved() -> None:
    assert shardc.Plan().offload == Offloading(activations=0, optimizer=0, least=LEAST)


def test_a_plan_that_says_nothing_leaves_what_another_says() -> None:
    first = shardc.Plan.of(offload={"activations": "1GiB"})
    assert first.merge(shardc.Plan.of(fuse=True)).offload == first.offload
    assert first.merge(shardc.Plan.of(offload="none")).offload == Offloading()


WRONG = {
    "offload: 3": ("'offload' should be all, none or a mapping, not 3", "p.yaml:1"),
    "offload: some": ("'offload' should be all, none or a mapping, not 'some'", "p.yaml:1"),
    "mesh: dp=2\noffload:\n  activation: all": ("offload has no key 'activation'", "p.yaml:3"),
    "offload:\n  activations: many": (
        "'offload.activations' should be all, none or a number of bytes, not 'many'",
        "p.yaml:2",
    ),
    "offload: {optimizer: -1}": ("'offload.optimizer' should be all, none or a number of bytes, not -1", "p.yaml:1"),
    "offload: {optimizer: all, least: all}": ("'offload.least' should be a number of bytes, not 'all'", "p.yaml:1"),
}


@pytest.mark.parametrize("text", WRONG)
def test_what_it_cannot_be_is_said_with_its_line(text: str) -> None:
    with pytest.raises(shardc.ShardcError) as failure:
        shardc.Plan.parse(text, "p.yaml")
    (wrong,) = failure.value.diagnostics
    message, location = WRONG[text]
    assert (wrong.code, wrong.message, wrong.location) == ("SC208", message, location)
    assert wrong.hint is not None
    assert "activations" in wrong.hint
