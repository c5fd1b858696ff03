"""Every value of a program lies on the rank's device: shown on meta, where a tensor made on the CPU cannot hide."""

import importlib
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import shardc
from shardc.ir.graph import type_of
from shardc.ir.ops.context import running
from shardc.ir.ops.local import axis_offset
from shardc.runtime.execute.instructions import Numerics, list_calls, rank_context

META = torch.device("meta")
PLANS = Path(__file__).parents[2] / "configs/plans"


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "cnn"])
def test_no_value_is_made_elsewhere(name: str) -> None:
    model, batch, *loss = getattr(importlib.import_module(f"examples.{name}"), name)()
    program = shardc.compile(model, batch, plan=PLANS / f"{name}.yaml", loss=(*loss, None)[0])
    body, mesh = program.body, program.mesh
    listing = list_calls(body, Numerics(META))
    env: list[Tensor | None] = [None] * listing.size
    for slot, node in zip(listing.inputs, body.placeholders, strict=True):
        type = type_of(node)
        env[slot] = torch.empty(type.local_shape(mesh), dtype=type.dtype, device=META)
    with running(rank_context(mesh, 0, cast(Any, None))):  # on meta, collectives move nothing
        for instruction in listing.instructions:
            args, kwargs = instruction.arguments(env)  # type: ignore[arg-type]
            result = instruction.target(*args, **kwargs)
            if instruction.target is axis_offset:  # the executor computes these beforehand, and moves them
                result = result.to(META)
            for _, position, slot in instruction.yields:
                value = result if position is None else result[position]
                assert value.device == META, f"{instruction.where} made a tensor on the {value.device.type}"
                env[slot] = value
    for slot, node in zip(listing.outputs, body.output_values, strict=True):
        value = env[slot]
        assert value is not None
        assert tuple(value.shape) == type_of(node).local_shape(mesh)


def test_a_result_that_was_not_asked_for_stays_none() -> None:
    assert Numerics(META).cast(None) is None
