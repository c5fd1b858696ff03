"""What a command's TARGET names: a factory in a Python file, a Hugging Face configuration, or a saved program.

    examples/gpt2.py:gpt2            factory() returns (model, batch) or (model, batch, loss)
    hf:llama                         a model type, small: 2 layers, 64 wide
    hf:llama?num_hidden_layers=32    with the configuration's own keys set, and `batch` and `seq`
    hf:path/to/config.json           a configuration as it is
    program.json                     what `compile -o program.json` or Program.save wrote

A Hugging Face model is built from its configuration alone: nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

from shardc.api import Program
from shardc.cli.host_memory import refuse_model
from shardc.ir.diagnostic import ShardcError, did_you_mean, error

FORMS = "write file.py:factory, hf:MODEL_TYPE, hf:config.json, or the path of a saved program"
_FACTORY = "set the keys that it asks for, or write a factory that returns (model, batch): file.py:factory"
# What an unqualified model type is made with, where its configuration has such a key.
SMALL: dict[str, int] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "d_kv": 16,
    "d_ff": 128,
    "image_size": 32,
    "patch_size": 8,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "num_mel_bins": 8,
    "max_source_positions": 16,
    "max_target_positions": 64,
    "embedding_size": 16,
}
SMALL_POSITIONS = ("max_position_embeddings", "max_target_positions")
SMALL_STAGES = {"hidden_sizes": [32, 64], "depths": [1, 2]}  # of convolutional models, which have both

MOST = 2**31 - 1  # of a size
MOST_LAYERS = 10_000  # each of which is made, though without weights
MOST_ELEMENTS = 2**28  # of a batch, which is made whole: 2 GiB of tokens


@dataclass(frozen=True)
class Target:
    """A model to compile, with what `compile` needs beside the plan."""

    model: nn.Module
    batch: Any
    loss: Callable[[Any, Any], Tensor] | None = None


def load(text: str, *, meta: bool = True) -> Target | Program:
    """The target that a command names; `meta` builds Hugging Face models without weights. Raises SC105."""
    if text.startswith("hf:"):
        return _hugging_face(text, meta)
    path, colon, factory = text.rpartition(":")
    if colon and path.endswith(".py"):
        return _from_file(Path(path), factory)
    if text.endswith(".py"):
        known = _factories(_module(Path(text)))
        hint = f"write {text}:{known[0]}" if known else "write file.py:factory; the factory returns (model, batch)"
        raise error("SC105", f"'{text}' names no factory", hint=hint)
    if text.endswith(".json"):
        if not Path(text).is_file():
            raise error("SC105", f"there is no file {text}", hint=FORMS)
        return Program.load(text)
    raise error("SC105", f"cannot tell what '{text}' is", hint=FORMS)


# ---------------------------------------------------------------------- files
def _from_file(path: Path, name: str) -> Target:
    module = _module(path)
    factory = getattr(module, name, None)
    if not callable(factory):
        hint = did_you_mean(name, _factories(module), f"functions in {path}")
        raise error("SC105", f"{path} has no function '{name}'", location=str(path), hint=hint)
    try:
        result: object = factory()
    except ShardcError:
        raise
    except BaseException as problem:  # also what asks to leave: sys.exit in a factory ends no command without a word
        raise _failed(f"{name}() failed", path, problem) from problem
    parts: list[Any] = [*cast("tuple[Any, ...]", result)] if isinstance(result, tuple) else []
    if len(parts) not in (2, 3) or not isinstance(parts[0], nn.Module):
        message = f"{name}() returned {_shape(result)}, not (model, batch) or (model, batch, loss)"
        raise error("SC105", message, location=str(path), hint="return the nn.Module first, then a sample batch")
    return Target(parts[0], parts[1], parts[2] if len(parts) == 3 else None)


def _module(path: Path) -> ModuleType:
    if not path.is_file():
        raise error("SC105", f"there is no file {path}", hint=FORMS)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickling look a class's module up by name
    sys.path.insert(0, str(path.parent.resolve()))  # as python file.py does, so that it may import its neighbours
    try:
        spec.loader.exec_module(module)
    except BaseException as problem:
        raise _failed("importing it failed", path, problem) from problem
    finally:
        sys.path.pop(0)
    return module


def _factories(module: ModuleType) -> list[str]:
    """Functions that the file defines itself and that can be called without arguments."""

    def fits(value: object) -> bool:
        if not isinstance(value, FunctionType) or value.__module__ != module.__name__:
            return False
        return all(p.default is not p.empty for p in inspect.signature(value).parameters.values())

    return [name for name, value in vars(module).items() if fits(value)]


def _failed(what: str, path: Path, problem: BaseException) -> ShardcError:
    """The user's own line in the file that raised."""
    own_file = path.resolve()  # as Python names the file that it loads, however the user named it
    frames = [f for f in traceback.extract_tb(problem.__traceback__) if Path(f.filename).resolve() == own_file]
    location, line = (f"{path}:{frames[-1].lineno}", frames[-1].line) if frames else (str(path), None)
    message = f"{what}: {type(problem).__name__}" + (f": {problem}" if str(problem) else "")
    hint = "does it run under python by itself?"
    return error("SC105", message, location=location, source_text=line or None, hint=hint)


def _shape(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(part).__name__ for part in cast('tuple[Any, ...]', value))})"
    return type(value).__name__


# ---------------------------------------------------------------------- Hugging Face
def _hugging_face(text: str, meta: bool) -> Target:
    try:
        import transformers
    except ImportError:
        raise error("SC105", f"'{text}' needs transformers", hint="pip install 'shardc[examples]'") from None
    name, _, query = text.removeprefix("hf:").partition("?")
    options: dict[str, Any] = {}
    for key, value in (_option(item, text) for item in query.split("&") if item):
        if key in options:
            raise error("SC105", f"'{key}' is given twice in '{text}'", hint="write it once")
        options[key] = value
    sizes = {key: options.pop(key, size) for key, size in (("batch", 8), ("seq", 16))}
    for key, size in sizes.items():
        _refuse_size(key, size)
    batch, seq = sizes["batch"], sizes["seq"]
    try:
        config = _config(transformers, name, options, seq)
        for key in SMALL:
            attribute, size = getattr(config, "attribute_map", {}).get(key, key), getattr(config, key, None)
            if isinstance(size, int) and (size > 1 or attribute in options or key in options):
                _refuse_size(attribute, size)
    except ShardcError:
        raise
    except Exception as problem:
        message = f"transformers refuses the configuration '{text}': {type(problem).__name__}: {problem}"
        raise error("SC105", message, hint=_FACTORY) from problem
    auto = _auto_class(transformers, config, text)
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    try:
        with torch.device("meta"):
            model = auto.from_config(config)
        if not meta:
            refuse_model(model, f"'{text}'")
            with torch.device("cpu"):
                model = auto.from_config(config)
    except ShardcError:
        raise
    except Exception as problem:
        message = f"transformers cannot build '{text}': {type(problem).__name__}: {problem}"
        raise error("SC105", message, hint=_FACTORY) from problem
    kind, padded = model.main_input_name, auto is transformers.AutoModelForMaskedLM
    if kind != "pixel_values":
        _refuse_positions(model, seq)
    return Target(model, _sample(config, kind, padded, batch, seq))


def _refuse_size(key: str, size: object) -> None:
    """Raise ShardcError (SC105) for what is no size of a model or a batch."""
    largest = MOST_LAYERS if "layers" in key or key == "n_layer" else MOST
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= largest:
        shown = repr(size) if len(repr(size)) < 30 else f"{repr(size)[:12]}..."
        hint = f"write a whole number from 1 to {largest:,}, in digits"
        raise error("SC105", f"'{key}' is {shown}, which is no size", hint=hint)


def _refuse_positions(model: nn.Module, seq: int) -> None:
    """Raise ShardcError (SC105) for sequences that are longer than the model's table of positions."""
    for name, module in model.named_modules():
        table = re.search(r"wpe$|embed_positions$|position_embeddings$", name)
        if table and isinstance(module, nn.Embedding) and seq > (count := module.num_embeddings):
            message = f"'seq' is {seq:,}, and the model has positions for {count:,} ({name})"
            raise error("SC105", message, hint=f"write a seq of at most {count:,}, or set the model's own key for it")


def _option(item: str, text: str) -> tuple[str, Any]:
    key, equals, value = item.partition("=")
    if not equals:
        raise error("SC105", f"'{item}' in '{text}' is no key=value", hint="write hf:gpt2?n_layer=4&batch=2")
    try:
        return key, json.loads(value, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return key, value


def _no_number(word: str) -> Any:
    """NaN and Infinity, which are no JSON, stay words."""
    raise ValueError(word)


def _config(transformers: Any, name: str, options: dict[str, Any], seq: int) -> Any:
    """The configuration of a model type, small where the user does not say but for `seq` positions, or of a file."""
    if name.endswith(".json"):
        if not Path(name).is_file():
            raise error("SC105", f"there is no file {name}", hint="give the path of a model's config.json")
        try:
            data = json.loads(Path(name).read_text(encoding="utf-8")) | options
            return transformers.AutoConfig.for_model(**data)
        except (ValueError, KeyError, TypeError) as wrong:
            hint = 'a configuration holds "model_type"'
            raise error("SC105", f"{name} is no model's configuration: {wrong}", location=name, hint=hint) from None
    types = list(transformers.CONFIG_MAPPING.keys())
    if name not in types:
        if (folder := Path(name)).is_dir():
            hint = f"write hf:{folder}/config.json, and for its weights, where a command reads some, --weights {folder}"
            raise error("SC105", f"'{name}' is a folder, and no model type of transformers", hint=hint)
        raise error("SC105", f"transformers has no model type '{name}'", hint=did_you_mean(name, types, "model types"))
    default = transformers.AutoConfig.for_model(name)
    attribute_map: dict[str, str] = getattr(default, "attribute_map", {})
    for key in options:
        if not hasattr(default, key):
            hint = did_you_mean(key, [k for k in default.to_dict() if not k.startswith("_")], "keys")
            raise error("SC105", f"the configuration of '{name}' has no key '{key}'", hint=hint)
    sizes = {k: n for k, n in SMALL.items() if isinstance(getattr(default, k, None), int)}
    small: dict[str, Any] = {attribute_map.get(k, k): n for k, n in sizes.items()}
    if hasattr(default, "num_key_value_heads"):
        small["num_key_value_heads"] = SMALL["num_key_value_heads"]
    if "num_key_value_heads" in attribute_map:  # another name for the heads, which are as many then
        small.pop("num_key_value_heads", None)
        small |= {attribute_map[k]: SMALL[k] for k in ("num_attention_heads",) if k in attribute_map}
    if all(isinstance(getattr(default, key, None), list | tuple) for key in SMALL_STAGES):
        small |= SMALL_STAGES
    small |= {attribute_map.get(k, k): max(SMALL[k], seq) for k in SMALL_POSITIONS if attribute_map.get(k, k) in small}
    quiet = {k: v for k, v in (("use_cache", False), ("num_labels", 10)) if hasattr(default, k)}
    tokens = {k: 0 for k in ("bos_token_id", "eos_token_id", "pad_token_id") if hasattr(default, k)}
    tokens |= {"decoder_start_token_id": 0} if getattr(default, "is_encoder_decoder", False) else {}
    chosen = {attribute_map.get(k, k): v for k, v in options.items()}
    return transformers.AutoConfig.for_model(name, **{**small, **quiet, **tokens, **chosen})


def _auto_class(transformers: Any, config: Any, text: str) -> Any:
    """The head to train with."""
    heads = [
        transformers.AutoModelForImageClassification,
        transformers.AutoModelForSpeechSeq2Seq,
        transformers.AutoModelForSeq2SeqLM,
        transformers.AutoModelForMaskedLM,
        transformers.AutoModelForCausalLM,
    ]
    for auto in heads:
        if type(config) in auto._model_mapping.keys():  # noqa: SIM118 (a lazy mapping: `in` imports every model)
            return auto
    raise error("SC105", f"'{text}' is no model of language or speech, and no image classifier", hint=_FACTORY)


def _sample(config: Any, kind: str, padded: bool, batch: int, seq: int) -> dict[str, Tensor]:
    """A batch with labels; `kind` is the model's main input. Where no mask is causal, a `padded` batch has one."""
    side, channels = getattr(config, "image_size", 32), getattr(config, "num_channels", 3)
    if kind == "pixel_values":
        sample_size = channels * side * side
    else:
        sample_size = max(seq, config.num_mel_bins * 2 * config.max_source_positions if kind == "input_features" else 0)
    if batch * sample_size > MOST_ELEMENTS:
        message = f"a batch of {batch:,} times {sample_size:,} elements is larger than a command makes"
        raise error(
            "SC105",
            message,
            hint=f"write a batch of at most {max(1, MOST_ELEMENTS // sample_size):,}, or a smaller seq",
        )
    if kind == "pixel_values":
        pixels = torch.randn(batch, channels, side, side)
        return {kind: pixels, "labels": torch.randint(config.num_labels, (batch,))}
    tokens = torch.randint(1, config.vocab_size, (batch, seq))
    if kind == "input_features":  # two frames a position: the encoder halves them
        return {kind: torch.randn(batch, config.num_mel_bins, 2 * config.max_source_positions), "labels": tokens}
    inputs = {"input_ids": tokens, "labels": tokens}
    return inputs | {"attention_mask": torch.ones_like(tokens)} if padded else inputs
