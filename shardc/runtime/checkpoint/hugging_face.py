"""Folders of `transformers`: read with its renamings, written as `save_pretrained` writes them.

    launch(state="out/hf")      the names and the stacking of the model's class, of whatever the files have
    trainer.export_hf("out/hf")  config.json, generation_config.json, safetensors and index, the tokenizer's files

`transformers` keeps some models otherwise in files than in memory: each expert of a Mixtral is a tensor on disk, and
all experts of a layer are one in the model. Its own conversions are applied, tensor by tensor, in both directions.

A folder is written beside its place and renamed when it is whole, as a checkpoint is: a crash leaves the one before. A
kill between the two renames leaves it at `out/hf.tmp-replaced`, where `launch(state="out/hf")` finds it and the next
export moves it back from; `from_pretrained("out/hf")` finds nothing until then.
"""

from __future__ import annotations

import copy
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from shardc.ir.diagnostic import error
from shardc.plan.values import read_bytes
from shardc.runtime.checkpoint.export import Written, as_they_are, cast_to, drafted, sync_file, write_weights
from shardc.runtime.checkpoint.folder import begin_export, place_of, publish, temporary
from shardc.runtime.checkpoint.held import Held
from shardc.runtime.checkpoint.weights import Read, Source, Weights, source_of

if TYPE_CHECKING:
    from shardc.runtime.checkpoint.checkpoint import Checkpoints

TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("vocab.txt", "merges.txt", "spiece.model", "tokenizer.model", "sentencepiece.bpe.model"),
    *("chat_template.jinja", "chat_template.json"),
)
WEIGHTS = re.compile(r".*\.safetensors(\.index\.json)?|pytorch_model.*\.bin(\.index\.json)?")


# ---------------------------------------------------------------------- reading
def sources_of(state: Weights | Sequence[Weights] | None, model: nn.Module | None) -> list[Source]:
    """What `launch(state=)` was given; of files, under the names that the model has for them."""
    given: Any = state
    parts: Sequence[Any] = () if given is None else given if isinstance(given, list | tuple) else (given,)
    return [_converted(source_of(part), model) if isinstance(part, str | Path) else source_of(part) for part in parts]


def _converted(source: Source, model: nn.Module | None) -> Source:
    """A source by the names of a model of `transformers`; as it is, for any other."""
    loading, conversions = _conversions(model)
    if loading is None:
        return source
    model_names: Mapping[str, Any] = cast(Any, model).state_dict()
    renamings = [entry for entry in conversions if isinstance(entry, loading.WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, loading.WeightConverter)]
    converter_of = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    prefix = cast(Any, model).base_model_prefix
    direct: dict[str, str] = {}
    parts: dict[str, list[tuple[str, str]]] = {}  # what a converter reads: keys of files with their patterns
    for key in sorted(source.names, key=loading.dot_natural_key):
        name, pattern = loading.rename_source_key(key, renamings, converters, prefix, model_names)
        if name not in model_names and key in model_names:
            name, pattern = key, None
        if pattern is None:
            direct[name] = key
        else:
            parts.setdefault(name, []).append((key, pattern))
    first_of = {
        target: name
        for name, keys in parts.items()
        for target in _targets(name, converter_of[keys[0][1]].target_patterns)
    }
    last: dict[str, Mapping[str, Any]] = {}  # of one conversion: a tensor is read slice by slice

    def convert(first: str) -> Mapping[str, Any]:
        if first not in last:
            converter = copy.deepcopy(converter_of[parts[first][0][1]])
            for key, pattern in parts[first]:
                converter.add_tensor(first, key, pattern, lambda key=key: source.read(key)(()))
            last.clear()
            last[first] = converter.convert(first, model=model, config=cast(Any, model).config)
        return last[first]

    def read(name: str) -> Read:
        if name in direct:
            return source.read(direct[name])

        def sliced(slices: tuple[slice, ...]) -> torch.Tensor:
            value = convert(first_of[name])[name]
            return (value[0] if isinstance(value, list) else cast(torch.Tensor, value))[slices]

        return sliced

    return Source([*direct, *first_of], read)


def _targets(name: str, patterns: Sequence[str]) -> list[str]:
    """The tensors that a conversion makes, of which `name` is the first."""
    return [name, *(name.replace(patterns[0], other) for other in patterns[1:])]


def _conversions(model: nn.Module | None) -> tuple[Any, list[Any]]:
    """`transformers.core_model_loading`, and what turns files into a model of the class; (None, []) without either."""
    if not _is_pretrained(model):
        return None, []
    try:
        from transformers import core_model_loading
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # before version 5 files are as models are
        return None, []
    return core_model_loading, get_model_conversion_mapping(cast(Any, model))


def _is_pretrained(model: nn.Module | None) -> bool:
    """Without importing `transformers`, which takes seconds: a model of it has."""
    return any(c.__module__ == "transformers.modeling_utils" for c in type(model).__mro__)


# ---------------------------------------------------------------------- writing
def export_hf(
    checkpoints: Checkpoints,
    path: str | Path,
    model: nn.Module | None,
    tensors: Mapping[str, Held],
    own_dtypes: Mapping[str, torch.dtype],
    dtype: torch.dtype | None,
    tokenizer: Any,
    max_shard_size: int | str,
) -> None:
    """Write what `from_pretrained` loads; every rank must call it. Raises ShardcError (SC562) where no class does."""
    _refuse_foreign(model)
    checkpoints.settle()
    folder, limit, first = place_of(path), read_bytes(max_shard_size), checkpoints.job_rank == 0
    if dtype is not None and not dtype.is_floating_point:
        raise error("SC553", f"weights are not exported as {dtype}", hint="give a floating dtype: torch.bfloat16")
    hf: Any = model
    tensors = {name: entry for name, entry in tensors.items() if name not in (hf._keys_to_ignore_on_save or ())}
    names = {name: _written_name(hf, name, entry) for name, entry in tensors.items()}
    tensors = {names[name]: entry for name, entry in tensors.items()}
    dtypes = {names[n]: cast_to(tensors[names[n]], dtype, own_dtypes.get(n)) for n in names}

    def begin() -> Path | None:
        if first:
            _check_tokenizer(tokenizer)
            with drafted(temporary(folder, 0), folder):
                return begin_export(folder)
        return None

    draft = checkpoints.agreed(begin) or folder

    def describe() -> None:
        if first:
            with drafted(draft, folder):
                _write_description(hf, draft, dtypes, dtype)
                _write_tokenizer(tokenizer, draft)

    checkpoints.agreed(describe)
    counted = {"total_parameters": sum(p.numel() for p in hf.parameters())}
    write_weights(checkpoints, draft, folder, tensors, _units(hf, tensors, dtypes), dtypes, limit, counted)

    def finish() -> None:
        if first:
            with drafted(draft, folder):
                _keep_others(folder, draft)
                for file in draft.rglob("*"):
                    if file.is_file():
                        sync_file(file)
                publish(draft, folder)

    checkpoints.agreed(finish)


def _refuse_foreign(model: nn.Module | None) -> None:
    hint = "trainer.export_safetensors(path) writes the weights of any model"
    if model is None:
        message = "a program from a file has no model, so nothing is known of its configuration"
        raise error("SC562", message, hint=hint)
    if not _is_pretrained(model) or getattr(model, "config", None) is None:
        message = f"{type(model).__name__} is no model of transformers: from_pretrained could not load it"
        raise error("SC562", message, hint=hint)


def _written_name(model: Any, name: str, entry: Held) -> str:
    """Of the names of a tied weight, the one that the library ties the others to."""
    tied = getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or ()
    return next((n for n in (name, *entry.aliases) if n not in tied), name)


def _units(model: Any, tensors: Mapping[str, Held], dtypes: Mapping[str, torch.dtype]) -> list[Written]:
    """What is gathered together, because a file's tensor is made of it: most tensors are written as they are."""
    alone = as_they_are(tensors, dtypes)
    loading, _ = _conversions(model)
    conversions = [] if loading is None else _saved_with(model, loading)
    if loading is None or not conversions:
        return alone
    types = {name: t for unit in alone for name, t in unit.outputs.items()}
    converters = [c.reverse_transform() for c in conversions if isinstance(c, loading.WeightConverter)]
    groups: dict[str, list[str]] = {}
    apply = getattr(loading, "apply_converters", None)
    for name in sorted(types, key=loading.dot_natural_key):
        # A version of transformers that does not tell which tensors belong together has them all converted at once.
        target, pattern = ("all", "") if apply is None else apply(name, converters)
        groups.setdefault(name if pattern is None else f"{target} ", []).append(name)

    def convert(wholes: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(loading.revert_weight_conversion(model, dict(wholes)))

    return [Written(names, convert({name: types[name] for name in names}), convert) for names in groups.values()]


def _saved_with(model: Any, loading: Any) -> list[Any]:
    """The conversions that `revert_weight_conversion` reverts."""
    known = getattr(model, "_weight_conversions", None)
    if known is None:
        from transformers.conversion_mapping import get_model_conversion_mapping

        known = get_model_conversion_mapping(model, add_legacy=False)
    return [entry for entry in known[::-1] if not isinstance(entry, getattr(loading, "PrefixChange", ()))]


def _write_description(model: Any, draft: Path, dtypes: Mapping[str, torch.dtype], dtype: torch.dtype | None) -> None:
    """config.json and generation_config.json, of copies: the model is not changed."""
    config = copy.deepcopy(model.config)
    classes = [c for c in type(model).__mro__ if c.__module__.startswith("transformers.models.")]
    config.architectures = [(classes[0] if classes else type(model)).__name__]
    floats = [dtypes[name] for name in dtypes if dtypes[name].is_floating_point]
    config.dtype = str(dtype or (floats[0] if floats else torch.float32)).removeprefix("torch.")
    config.save_pretrained(draft)
    if model.can_generate() and getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(draft)


def _check_tokenizer(tokenizer: Any) -> None:
    if tokenizer is None or hasattr(tokenizer, "save_pretrained"):
        return
    if not isinstance(tokenizer, str | Path):
        message = f"tokenizer= is a {type(tokenizer).__name__}, and cannot be saved"
        raise error("SC553", message, hint="pass a tokenizer of transformers, or the folder with its files")
    if not any((Path(tokenizer) / name).is_file() for name in TOKENIZER):
        raise error(
            "SC553", f"there is no tokenizer in {tokenizer}", hint=f"one has {TOKENIZER[0]}, or another of its files"
        )


def _write_tokenizer(tokenizer: Any, draft: Path) -> None:
    if isinstance(tokenizer, str | Path):
        for name in TOKENIZER:
            if (Path(tokenizer) / name).is_file():
                shutil.copyfile(Path(tokenizer) / name, draft / name)
    elif tokenizer is not None:
        tokenizer.save_pretrained(draft)


def _keep_others(folder: Path, draft: Path) -> None:
    """What lies in the folder that is replaced, other weights aside, lies in the new one too."""
    for existing in folder.iterdir() if folder.is_dir() else ():
        target = draft / existing.name
        if target.exists() or WEIGHTS.fullmatch(existing.name):
            continue
        if existing.is_dir():
            shutil.copytree(existing, target, symlinks=True, copy_function=_linked)
        else:
            _linked(existing, target)


def _linked(existing: str | Path, target: str | Path) -> None:
    try:
        os.link(existing, target, follow_symlinks=False)
    except OSError:  # a file system without links
        shutil.copy2(existing, target, follow_symlinks=False)
