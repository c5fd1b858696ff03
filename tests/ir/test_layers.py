"""Which module of a model is a layer: one table for recompute, buckets, the cut and summaries."""

import pickle
from dataclasses import FrozenInstanceError

import pytest

from shardc.ir.graph import FIELD_VALUES, ValueInfo, info_of
from shardc.ir.layers import layer_of, layer_or_module, layers_of, list_and_index

TABLE = [
    ("transformer.h.3.mlp.act", "transformer.h.3"),
    ("transformer.h.3", "transformer.h.3"),
    ("transformer.h", ""),
    ("transformer.wte", ""),
    ("", ""),
    ("encoder.layers.0.experts.3.w1", "encoder.layers.0"),
    ("model.layers.11.mlp.experts.127.gate_proj", "model.layers.11"),
    ("decoder.block.1.layer.2.DenseReluDense.wo", "decoder.block.1"),
    ("stages.2.blocks.4.attn.qkv", "stages.2"),
    ("stages.0.layers.1.layer.2.convolution", "stages.0"),
    ("layer1.0.conv1", "layer1.0"),
    ("layer1.0.downsample.0", "layer1.0"),
    ("features.5.3.block.0", "features.5"),
    ("h.0.mlp.2", "h.0"),
    ("0", "0"),
    ("net.0.0.1", "net.0"),
    ("fc1", ""),
    ("conv2d_1.weight", ""),
    ("r.x_1.gather", ""),
    ("blocks.²", ""),
    ("blocks.٣.fc", ""),
]


@pytest.mark.parametrize(("fqn", "layer"), TABLE)
def test_layer(fqn: str, layer: str) -> None:
    assert layer_of(fqn) == layer
    assert ValueInfo("x", None, fqn=fqn).layer == layer
    assert layer_or_module(fqn) == (layer or fqn)


@pytest.mark.parametrize(("fqn", "layer"), TABLE)
def test_a_layer_is_the_layer_of_all_in_it(fqn: str, layer: str) -> None:
    assert not layer or (layer_of(layer) == layer and layer_of(f"{layer}.any.7") == layer)
    assert layers_of(fqn)[:1] == ((layer,) if layer else ())


def test_a_divided_layer_consists_of_those_inside() -> None:
    fqn = "encoder.stages.2.blocks.4.mlp.0"
    assert layers_of(fqn) == (
        "encoder.stages.2",
        "encoder.stages.2.blocks.4",
        "encoder.stages.2.blocks.4.mlp.0",
    )
    assert layer_of(fqn, {"encoder.stages.2"}) == "encoder.stages.2.blocks.4"
    assert layer_of("encoder.stages.2.norm", {"encoder.stages.2"}) == "encoder.stages.2", "nothing is inside"
    assert layer_of(fqn, {"encoder.stages.1"}) == "encoder.stages.2"


def test_list_and_index() -> None:
    assert list_and_index("transformer.h.12") == ("transformer.h", 12)
    assert list_and_index("ln_f") == ("ln_f", -1)


def test_what_is_known_of_a_value_may_be_made_at_once() -> None:
    about = ValueInfo("x", None, fqn="h.0", phase="bwd", passes=("dp",))
    made = info_of(FIELD_VALUES(about))
    assert type(made) is ValueInfo
    assert made == about
    assert hash(made) == hash(about)
    assert pickle.loads(pickle.dumps(made)) == about
    with pytest.raises(FrozenInstanceError):
        made.name = "y"  # type: ignore[misc]
    with pytest.raises(TypeError):
        info_of(["x"])
    with pytest.raises(TypeError):
        info_of([*FIELD_VALUES(about), 1])
