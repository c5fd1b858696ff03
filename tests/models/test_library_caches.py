"""Functions of transformers' modelling files that remember tensors: a compile leaves none of its own in them.

A program is traced with tensors that have no memory. What a cache kept of these, the model would meet in its next call,
and so would every other model of its kind. Each cached function is called by a small net; the long tier compiles a
model of each file that has one.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc import ShardcError
from shardc.frontend.model_outputs import output_tensors
from shardc.torch_compat import is_fake

T = pytest.importorskip("transformers", minversion="5.24")
models = pytest.importorskip("benchmarks.zoo_models")
cached = pytest.importorskip("tests.models.cached_functions")

folder_of = T.models.auto.configuration_auto.model_type_to_module_name  # without an import of the model
FUNCTIONS = cached.cached_functions()
FILES = sorted({function.file for function in FUNCTIONS})
ZOO = {folder_of(entry.type): entry for entry in models.entries()}
ZOO["data2vec"] = next(entry for entry in models.entries() if entry.type == "data2vec-vision")
BARE = {  # without a loss, which needs further packages; of images
    "dinov3_vit": "DINOv3ViTModel",
    "mask2former": "Mask2FormerModel",
    "maskformer": "MaskFormerModel",
    "sam3": "Sam3VisionModel",
}
NONE = {  # whose cached functions are compiled in a small net alone
    "edgetam": "a backbone of timm",
    "edgetam_video": "a session of frames",
    "efficientloftr": "a backbone whose widths have to fit together",
    "higgs_audio_v2_tokenizer": "torchaudio",
    "omdet_turbo": "a backbone of timm",
    "sam2": "a backbone whose widths have to fit together",
    "sam2_video": "a session of frames",
    "sam3_lite_text": "prompts of text and of boxes",
    "sam3_tracker_video": "a session of frames",
    "xcodec": "a codec and a model of speech whose widths have to fit together",
}
Cache = type(lru_cache(lambda: None))


pytestmark = pytest.mark.slow  # first in its process: each case looks at all objects, and these grow more


@pytest.fixture(autouse=True)
def _no_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest keeps what torch logs, and with it the tensors that a record speaks of."""
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)


def tensors_left() -> list[Tensor]:
    """The tensors without memory that anything holds: attributes, dicts, caches."""
    gc.collect()
    return [o for o in gc.get_objects() if issubclass(type(o), Tensor) and is_fake(o)]


def empty_caches() -> None:
    for function in [o for o in gc.get_objects() if type(o) is Cache and "transformers" in str(o.__module__)]:
        function.cache_clear()


def leaves_nothing(build: Callable[[], nn.Module], batch: Any, loss: Any = None) -> None:
    """Afterwards the model, and another, compute what they did; nothing is left; and it compiles a second time."""
    expected = computed(build(), batch)
    empty_caches()
    model = build()
    before = tensors_left()  # of other tests
    known = {*map(id, before)}
    for _ in range(2):
        with contextlib.suppress(ShardcError):  # what is refused leaves nothing either
            shardc.compile(model, batch, mesh="dp=2", plan={"inputs": {"*": "dp"}}, loss=loss)
    assert [t for t in tensors_left() if id(t) not in known] == []
    del before  # until then, an id is of one tensor
    for later in (model, build()):
        outputs = computed(later, batch)
        assert outputs.keys() == expected.keys()
        wrong = [name for name, t in outputs.items() if not torch.allclose(t, expected[name], equal_nan=True)]
        assert not wrong


def computed(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: t.detach().clone() for name, t in output_tensors(call(model, batch)).items()}


def call(model: nn.Module, batch: Any) -> Any:
    return model(**batch) if isinstance(batch, dict) else model(batch)


def test_every_cached_function_is_called() -> None:
    """Of a new version of transformers too: what it caches under a new name needs a call in cached_functions.py."""
    assert len(FILES) >= 29
    unknown = [f"{function.file}: {function}" for function in FUNCTIONS if function.name not in cached.CALLS]
    assert not unknown, f"cached by transformers {T.__version__}, and not called in this test: {unknown}"
    assert cached.CALLS.keys() == {function.name for function in FUNCTIONS}
    assert {"beit", "detr", "rt_detr", "sam3", "xcodec"} <= set(FILES)


@pytest.mark.sampled(48)
@pytest.mark.parametrize("function", FUNCTIONS, ids=str)
def test_a_compile_leaves_nothing_in_a_cached_function(function: Any) -> None:
    try:
        function.module()
    except ImportError as missing:
        pytest.skip(str(missing).strip().partition("\n")[0])
    leaves_nothing(lambda: cached.Calls(function), torch.randn(4, 6))


def test_every_file_has_a_model_or_a_reason() -> None:
    without = set(FILES) - ZOO.keys() - BARE.keys()
    assert without == NONE.keys(), f"in transformers {T.__version__}: a model for BARE, or a reason for NONE"


@pytest.mark.long
@pytest.mark.parametrize("file", sorted(set(FILES) - NONE.keys()))
def test_a_compile_leaves_nothing_in_caches_of_models(file: str) -> None:
    if file in BARE:
        leaves_nothing(lambda: bare(BARE[file]), {"pixel_values": torch.randn(4, 3, 32, 32)}, models.loss_of)
        return
    try:
        ready = ZOO[file].ready()
    except models.NotReadyError as problem:
        pytest.skip(f"does not train small in eager PyTorch: {str(problem).strip().partition(chr(10))[0]}")
    leaves_nothing(lambda: ZOO[file].build(ready.variant), ready.batch, None if ready.has_loss else models.loss_of)


def bare(name: str) -> nn.Module:
    model_class = getattr(T, name)
    config_class = model_class.config_class
    torch.manual_seed(0)
    return model_class(config_class(**models.shrunk(config_class().to_dict(), models.Variant("eager")))).train()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["Beit", "Data2VecVision"])
def test_indices_of_positions(kind: str) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    options = {"image_size": 32, "patch_size": 8, "use_relative_position_bias": True}
    config = getattr(T, f"{kind}Config")(**sizes, **options, num_labels=4)

    def build() -> nn.Module:
        torch.manual_seed(0)
        return getattr(T, f"{kind}ForImageClassification")(config)

    leaves_nothing(build, {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.arange(4)})
