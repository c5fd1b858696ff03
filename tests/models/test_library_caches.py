"""Functions of transformers' modelling files that remember tensors: a compile leaves none of its own in them.

A program is traced with tensors that have no memory. What a cache kept of these, the model would meet in its next call,
and so would every other model of its kind.
"""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
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

FOLDER = Path(T.__file__).parent / "models"
CACHED = re.compile(r"^\s*@(functools\.)?(compile_compatible_method_)?(lru_cache|cache)\b", re.MULTILINE)
FILES = sorted({file.parent.name for file in FOLDER.glob("*/modeling_*.py") if CACHED.search(file.read_text())})
folder_of = T.models.auto.configuration_auto.model_type_to_module_name
ORDINARY = ("rt_detr", "maskformer")
Cache = type(lru_cache(lambda: None))


def of_file(entry: Any) -> str:
    return folder_of(entry.type)  # without an import of the model


CASES = [entry for entry in models.entries() if of_file(entry) in FILES]


def remembered() -> list[Tensor]:
    """The tensors in the caches of functions of the library."""
    caches = [o for o in gc.get_objects() if isinstance(o, Cache) and "transformers" in str(o.__module__)]
    tensors: list[Tensor] = []
    for cache in caches:
        todo = gc.get_referents(cache)
        for _ in range(4):  # links, results, tuples of them
            tensors += [o for o in todo if isinstance(o, Tensor)]
            todo = [o for held in todo if type(held) in (tuple, list, dict) for o in gc.get_referents(held)]
    return tensors


def test_so_many_files_have_one() -> None:
    assert len(FILES) >= 25
    assert {of_file(entry) for entry in CASES} >= {*ORDINARY, "beit", "data2vec", "detr", "mask2former"}


@pytest.mark.parametrize(
    "entry",
    [pytest.param(e, id=e.name, marks=[] if of_file(e) in ORDINARY else [pytest.mark.long]) for e in CASES],
)
def test_a_compile_leaves_nothing_in_caches(entry: Any) -> None:
    torch.manual_seed(0)
    try:
        model = entry.build()
        batch = models.batch_of(entry, model)
        models.loss_of(model(**batch), batch)
    except Exception as problem:
        pytest.skip(f"does not run small in eager PyTorch: {problem}")
    leaves_nothing(model, entry.build, batch)


def leaves_nothing(model: nn.Module, build: Callable[[], nn.Module], batch: dict[str, Tensor]) -> None:
    for trained in (model, build()):
        trained.train()
        with contextlib.suppress(ShardcError):  # what is refused leaves nothing either
            shardc.compile(trained, batch, mesh="dp=2", plan={"inputs": {"*": "dp"}}, loss=models.loss_of)
        assert not [t for t in remembered() if is_fake(t)]
        for later in (trained, build()):
            outputs = output_tensors(later(**batch))
            assert outputs
            assert not [name for name, t in outputs.items() if is_fake(t)]


@pytest.mark.parametrize("kind", ["Beit", pytest.param("Data2VecVision", marks=pytest.mark.long)])
def test_indices_of_positions(kind: str) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    options = {"image_size": 32, "patch_size": 8, "use_relative_position_bias": True}
    config = getattr(T, f"{kind}Config")(**sizes, **options, num_labels=4)

    def build() -> nn.Module:
        return getattr(T, f"{kind}ForImageClassification")(config)

    leaves_nothing(build(), build, {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.arange(4)})
