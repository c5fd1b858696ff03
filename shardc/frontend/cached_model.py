"""A causal model with a cache of keys and values, as one step of generation calls it: what is traced is this module.

    prefill    the prompts of all rows, left-padded, into an empty cache      tokens [rows, prompt]
    decode     the last token of each row, behind what the cache holds        tokens [rows, 1]

Both return what chooses the next token of each row. The cache is the library's own static one, whose tensors are
buffers of this module, `_cache.0.keys`: a program takes them, sharded as propagation places them, and returns them.
How far they are filled is an input, so that one decode program serves every step. The model itself is not changed:
this module stands beside it and has the same parameters under the same names.

An encoder-decoder model reads the prompts by its encoder, once, in the prefill: keys and values of cross attention are
in `_cache.0.cross_keys`, and the decode program has no encoder.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shardc.frontend.evaluation_mode import evaluating
from shardc.frontend.trace import trace
from shardc.ir.diagnostic import ShardcError, error
from shardc.ir.microbatch import CACHE
from shardc.ir.ops.gathered import whole_dim

Chosen = Literal["token", "logits"]
CacheTensors = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # shape and dtype, by name
ATTENTION = {"full_attention", "sliding_attention"}  # layers whose state is keys and values, token by token
ENCODED = "encoded"
# What a model of the library may do by itself, and no step here does.
OVERRIDDEN = (
    "generate",
    "prepare_inputs_for_generation",
    "_update_model_kwargs_for_generation",
    "_prepare_position_ids_for_generation",
    "create_masks_for_generate",
)
STATES = ("cache_params", "state", "mems", "past_buckets_states")  # of forwards that keep no keys and values
OF_ATTENTION = "shardc generates with models of full or sliding-window attention"
HINT = "shardc generates with causal language models of transformers, and with its encoder-decoder models of text"


@dataclass(frozen=True)
class Form:
    """What a pair of programs is compiled for. `source` is the encoder's length, 0 where there is none."""

    rows: int
    prompt: int
    length: int  # of the cache
    source: int = 0
    chosen: Chosen = "token"

    def __str__(self) -> str:
        read = f"encoder inputs of {self.source}" if self.source else f"prompts of {self.prompt}"
        return f"{self.rows} rows, {read} and a cache of {self.length} tokens"


@dataclass(frozen=True)
class CausalModel:
    """A model of transformers that can generate, and what of its forward a step uses."""

    model: nn.Module
    cache_argument: str  # "cache", or "past_key_values" of earlier versions
    encoder_decoder: bool
    takes_positions: bool
    takes_mask: bool
    keeps_logits: bool  # whether it can be told to compute those of the last position alone
    takes_decoder_mask: bool

    @classmethod
    def of(cls, model: nn.Module) -> CausalModel:
        """Raises ShardcError (SC571) for a model that this package does not generate with."""
        name, config = type(model).__name__, getattr(model, "config", None)
        arguments = set(inspect.signature(model.forward).parameters)
        cache = next((key for key in ("cache", "past_key_values") if key in arguments), None)
        can = getattr(model, "can_generate", None)
        state = next((key for key in STATES if key in arguments), None)
        if config is not None and callable(can):
            if cache is None and state is not None:
                message = f"{name} keeps more than keys and values: its forward takes '{state}'"
                raise error("SC571", message, hint=OF_ATTENTION)
            if not can():
                message = f"transformers does not generate with {name}: its can_generate() is False"
                raise error("SC571", message, hint=HINT)
        if config is None or cache is None or not callable(can):
            message = f"{name} does not generate: its forward takes no cache of keys and values"
            raise error("SC571", message, hint=HINT)
        if getattr(model, "main_input_name", "input_ids") != "input_ids":
            message = f"{name} reads '{model.main_input_name}', and generation is of prompts of tokens"
            raise error("SC571", message, hint=HINT)
        from transformers import GenerationMixin

        _refuse_layers(name, config)
        for method in OVERRIDDEN:
            if getattr(type(model), method, None) is not getattr(GenerationMixin, method, None):
                message = f"{name} prepares its steps by a {method} of its own, which no program runs"
                raise error("SC571", message, hint=HINT)
        if not getattr(model, "_can_compile_fullgraph", False):  # some take its length for that of what was read
            message = f"{name} is not made for a static cache, whose length is that of the cache"
            hint = "if its forward is: write _can_compile_fullgraph = True in its class, as transformers' models do"
            raise error("SC571", message, hint=hint)
        hooks = [kind for kind in ("_forward_hooks", "_forward_pre_hooks") if vars(model).get(kind)]
        if hooks:
            message = f"{name} has hooks of its own, which would see other arguments than in training"
            raise error("SC571", message, hint="remove them before generate, or put them on a module inside of it")
        encodes = bool(getattr(config, "is_encoder_decoder", False))
        optional = ("position_ids", "attention_mask", "logits_to_keep", "decoder_attention_mask")
        return cls(model, cache, encodes, *(argument in arguments for argument in optional))

    @property
    def vocabulary(self) -> int:
        """The number of tokens that the model can read."""
        embedding: Any = self.model.get_input_embeddings()  # type: ignore[operator]
        return int(embedding.weight.shape[0])

    def positions(self, part: Literal["encoder", "decoder"]) -> int | None:
        """How many positions the table of an encoder-decoder model's part has; None where it has no table."""
        owner: Any = getattr(self.model, f"get_{part}")()
        tables = [module for name, module in owner.named_modules() if name.endswith("embed_positions")]
        counts = [t.num_embeddings - getattr(t, "offset", 0) for t in tables if isinstance(t, nn.Embedding)]
        return min(counts, default=None)


def _refuse_layers(name: str, config: Any) -> None:
    """Raise ShardcError (SC571) for layers that keep anything but keys and values."""
    from transformers.cache_utils import StaticCache, StaticLayer

    try:
        layers = StaticCache(config=config, max_cache_len=1).layers
    except Exception as problem:
        message = f"transformers makes no static cache for {name}: {type(problem).__name__}: {problem}"
        raise error("SC571", message, hint=HINT) from problem
    kinds = set(getattr(config.get_text_config(decoder=True), "layer_types", None) or ["full_attention"])
    others = sorted(
        {type(layer).__name__ for layer in layers if not isinstance(layer, StaticLayer)} | kinds - ATTENTION
    )
    if others:
        message = f"{name} has layers that keep more than keys and values: {', '.join(others)}"
        raise error("SC571", message, hint=OF_ATTENTION)


class _Layer(nn.Module):
    """The cache of one layer: buffers, by name, with no memory of their own."""

    def __init__(self, tensors: CacheTensors) -> None:
        super().__init__()
        for name, (shape, dtype) in tensors.items():
            self.register_buffer(name, torch.empty(shape, dtype=dtype, device="meta"))


class CachedModel(nn.Module):
    """One step of generation. `tensors` are those of the cache by name; without, the step returns what they would be.

    Root tables are the model's own, so names of parameters and buffers are, too; the model hangs below no name.
    """

    # Kept past nn.Module, which would make the model a part of this one.
    source: Any
    causal: CausalModel
    form: Form
    decodes: bool
    probes: bool

    def __init__(
        self,
        causal: CausalModel,
        form: Form,
        decodes: bool,
        tensors: CacheTensors | None,
    ) -> None:
        super().__init__()
        source = causal.model
        self.training = source.training
        tables = vars(self)
        for kind in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
            tables[kind] = vars(source)[kind]
        cache = nn.Module()
        by_layer: dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]] = {}
        for name, tensor in (tensors or {}).items():
            layer, _, key = name.removeprefix(CACHE).rpartition(".")
            by_layer.setdefault(layer, {})[key] = tensor
        for layer, own in by_layer.items():
            if layer:
                cache.register_module(layer, _Layer(own))
            else:
                cache.register_buffer(ENCODED, torch.empty(own[ENCODED][0], dtype=own[ENCODED][1], device="meta"))
        tables["_modules"] = {**vars(source)["_modules"], CACHE.rstrip("."): cache}
        tables |= {"source": source, "causal": causal, "form": form, "decodes": decodes, "probes": tensors is None}

    @property
    def _own_cache(self) -> Any:
        return vars(self)["_modules"][CACHE.rstrip(".")]

    def train(self, mode: bool = True) -> CachedModel:
        """The mode of the model, which may override how it is set."""
        self.source.train(mode)
        for module in vars(self)["_modules"].values():
            module.train(mode)
        self.training = mode
        return self

    def forward(
        self,
        tokens: Tensor,
        length: Tensor,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        source_tokens: Tensor | None = None,
        source_mask: Tensor | None = None,
    ) -> dict[str, Tensor]:
        causal = self.causal
        cache = self._library_cache(length)
        keywords: dict[str, Any] = {causal.cache_argument: cache, "use_cache": True}
        keywords |= {"logits_to_keep": 1} if causal.keeps_logits else {}
        if causal.encoder_decoder:
            keywords |= {"decoder_input_ids": tokens, "attention_mask": source_mask}
            keywords |= self._encoded(source_tokens)
            if causal.takes_decoder_mask:
                seen = tokens.shape[1] if self.probes else self.form.length
                keywords["decoder_attention_mask"] = tokens.new_ones(tokens.shape[0], seen)
        else:
            keywords |= {"input_ids": tokens}
            keywords |= {"attention_mask": mask} if causal.takes_mask else {}
            keywords |= {"position_ids": positions} if causal.takes_positions else {}
        with _finite_masks(self.source):
            output = self.source.forward(**keywords, return_dict=True)
        if self.probes:
            return self._tensors(cache, output)
        if (
            causal.encoder_decoder
            and not self.decodes
            and ENCODED in dict(self._own_cache.named_buffers(recurse=False))
        ):
            self._own_cache.encoded.copy_(output.encoder_last_hidden_state)
        logits = output.logits[:, -1].float()  # as the library chooses
        if self.form.chosen == "logits":
            return {"logits": whole_dim(logits, 1)}
        return {"token": _first_largest(logits)}

    def _encoded(self, source_tokens: Tensor | None) -> dict[str, Any]:
        """What the encoder reads, or in the decode program what it has read."""
        if not self.decodes:
            return {"input_ids": source_tokens}
        from transformers.modeling_outputs import BaseModelOutput

        encoded = self._own_cache.encoded
        return {"encoder_outputs": BaseModelOutput(last_hidden_state=encoded)}

    # ------------------------------------------------------------------ the library's cache
    def _library_cache(self, length: Tensor) -> Any:
        from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache, StaticLayer

        kinds = 2 if self.causal.encoder_decoder else 1
        if self.probes:  # a layer is added when it is first met
            caches = [Cache(layer_class_to_replicate=DynamicLayer) for _ in range(kinds)]
            return EncoderDecoderCache(*caches) if kinds == 2 else caches[0]
        count = len(list(self._own_cache.children()))
        sizes = (self.form.length, self.form.source)[:kinds]
        caches = [Cache(layers=[StaticLayer(max_cache_len=size) for _ in range(count)]) for size in sizes]
        cache: Any = EncoderDecoderCache(*caches) if kinds == 2 else caches[0]
        own = self._own_cache
        for number in range(count):
            held = own.get_submodule(str(number))
            _fill(caches[0].layers[number], held.keys, held.values, length.clone())
            if kinds == 2:
                start = torch.zeros((), dtype=torch.int64)
                _fill(caches[1].layers[number], held.cross_keys, held.cross_values, start)
                cache.is_updated[number] = self.decodes
        return cache

    def _tensors(self, cache: Any, output: Any) -> dict[str, Tensor]:
        """What the layers of the cache hold after a step, and the encoder's states."""
        found: dict[str, Tensor] = {}
        if not self.causal.encoder_decoder:
            parts = {"": cache}
        else:
            parts = {"": cache.self_attention_cache, "cross_": cache.cross_attention_cache}
            found[f"{CACHE}{ENCODED}"] = output.encoder_last_hidden_state.clone()
        for prefix, part in parts.items():
            for number, layer in enumerate(part.layers):
                found |= {f"{CACHE}{number}.{prefix}{key}": getattr(layer, key).clone() for key in ("keys", "values")}
        return found

    # ------------------------------------------------------------------ what is compiled
    def sample(self) -> dict[str, Tensor]:
        """A batch of the form, for a trace: on the meta device."""
        form, causal = self.form, self.causal
        width = 1 if self.decodes else form.prompt

        def tokens(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int64, device="meta")

        batch = {"tokens": tokens(form.rows, width), "length": tokens()}
        if causal.encoder_decoder:
            batch |= {} if self.decodes else {"source_tokens": tokens(form.rows, form.source)}
            return batch | {"source_mask": tokens(form.rows, form.source)}
        batch |= {"mask": tokens(form.rows, width if self.probes else form.length)} if causal.takes_mask else {}
        return batch | ({"positions": tokens(form.rows, width)} if causal.takes_positions else {})


@contextmanager
def _finite_masks(model: Any) -> Generator[None]:
    """Masks of eager attention that a softmax in float32 can read: the least float64 is -inf to it. A row of padding,
    which sees nothing, would be NaN, and make those behind it NaN."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask

    if getattr(model, "dtype", None) != torch.float64 or ALL_MASK_ATTENTION_FUNCTIONS["eager"] is not eager_mask:
        yield
        return

    def finite(*arguments: Any, **keywords: Any) -> Any:
        return eager_mask(*arguments, **keywords | {"dtype": torch.float32})

    ALL_MASK_ATTENTION_FUNCTIONS["eager"] = finite
    try:
        yield
    finally:
        del ALL_MASK_ATTENTION_FUNCTIONS["eager"]


def _fill(layer: Any, keys: Tensor, values: Tensor, length: Tensor) -> None:
    """Let a layer of the library's static cache hold these tensors, filled so far."""
    layer.keys, layer.values, layer.cumulative_length = keys, values, length
    layer.device, layer.is_initialized = keys.device, True
    layer.batch_size, layer.num_heads = keys.shape[:2]
    layer.k_head_dim, layer.v_head_dim = keys.shape[-1], values.shape[-1]


def _first_largest(logits: Tensor) -> Tensor:
    """`logits.argmax(-1)`, by two reductions that shards of the vocabulary combine: the largest, and the first place
    that has it. Scores with a NaN choose no token: -1."""
    size = logits.shape[-1]
    places = torch.arange(size, device=logits.device)
    first = torch.where(logits == logits.amax(-1, keepdim=True), places, size)
    return torch.where(logits.isnan(), -1, first).amin(-1)


def cache_tensors(causal: CausalModel, form: Form, **traced: Any) -> CacheTensors:
    """The shape and dtype of each tensor of the cache, by name: what the model hands to a cache that takes anything."""
    probe = CachedModel(causal, replace(form, prompt=1, length=1, chosen="token"), False, None)  # as little as tells
    with evaluating(probe):
        try:
            outputs = trace(probe, probe.sample(), with_outputs=True, forward_only=True, **traced).outputs
        except ShardcError as wrong:
            raise _untraced(causal, wrong) from wrong
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for output in outputs:
        value = output.node.meta["val"]
        shape = tuple(value.shape)
        name = output.name
        if name.endswith((".keys", ".values")):
            shape = (*shape[:2], form.length, *shape[3:])
        tensors[name] = (shape, value.dtype)
    return tensors


def _untraced(causal: CausalModel, wrong: ShardcError) -> ShardcError:
    first, *rest = wrong.diagnostics
    message = f"{type(causal.model).__name__} cannot be traced with a cache: {first.message}"
    return ShardcError(replace(first, message=message), *rest)
