"""Functions of transformers' modelling files that remember tensors: a compile leaves none of its own in them.

A program is traced with tensors that have no memory. What a cache kept of these, the model would meet in its next call,
and so would every other model of its kind.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
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
CONFIGS = T.models.auto.configuration_auto.CONFIG_MAPPING
ORDINARY = ("beit", "sapiens2")
Cache = type(lru_cache(lambda: None))


def of_file(entry: Any) -> str:
    return CONFIGS[entry.type].__module__.split(".")[2]


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
    assert {of_file(entry) for entry in CASES} >= {*ORDINARY, "data2vec", "detr", "rt_detr", "mask2former"}


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
    for kind in (model, entry.build()):
        kind.train()
        with contextlib.suppress(ShardcError):  # what is refused leaves nothing either
            shardc.compile(kind, batch, mesh="dp=2", plan={"inputs": {"*": "dp"}}, loss=models.loss_of)
        assert not [t for t in remembered() if is_fake(t)]
        for later in (kind, entry.build()):
            outputs = output_tensors(later(**batch))
            assert outputs
            assert not [name for name, t in outputs.items() if is_fake(t)]


def tables(folder: str) -> list[Callable[[], Tensor]]:
    """Calls of the functions of a file that remember tables of positions."""
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    cpu = torch.device("cpu")
    found: list[Callable[[], Tensor]] = []
    for kind in vars(module).values():
        sines = vars(kind).get("build_sine_position_embedding") if isinstance(kind, type) else None
        if isinstance(sines, staticmethod) and kind.__module__ == module.__name__:
            call: Any = kind.build_sine_position_embedding  # type: ignore[attr-defined]
            found.append(lambda call=call: call(torch.Size((2, 3, 4, 4)), cpu, torch.float32, 8))
    if (centers := getattr(module, "get_patches_center_coordinates", None)) is not None:
        found.append(lambda: centers(4, 4, torch.float32, cpu))
    return found


WITH_TABLES = [folder for folder in FILES if tables(folder)]


def test_most_files_have_tables() -> None:
    covered = {*map(of_file, CASES), *WITH_TABLES}
    missing = set(FILES) - covered
    assert missing <= {"efficientloftr", "higgs_audio_v2_tokenizer", "omdet_turbo", "xcodec"}, (
        "of arguments of their own"
    )


@pytest.mark.parametrize("folder", WITH_TABLES)
def test_a_table_is_real_after_a_compile(folder: str) -> None:
    class Positions(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).square().mean() * sum(call().abs().mean() for call in tables(folder))

    program = shardc.compile(Positions(6, 6), torch.randn(4, 6), mesh="dp=2", plan={"inputs": {"*": "dp"}})
    assert program.verify().ok
    assert not [t for t in remembered() if is_fake(t)]
    assert not [call for call in tables(folder) if is_fake(call())]
