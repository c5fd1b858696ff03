"""Models and batches that no program can be made of, found before anything is traced."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.nn.parameter import is_lazy

from shardc import torch_compat
from shardc.frontend.model_tree import named_tensors
from shardc.frontend.provenance import Origin, Origins
from shardc.ir.diagnostic import ShardcError, error
from shardc.ir.graph import op_name
from shardc.ir.schema import OWN, admit, schema_of
from shardc.ir.types import kind_of


def refuse_unfit(model: nn.Module, batch: Mapping[str, Tensor]) -> None:
    """Raise ShardcError for tensors that have no shape yet, no elements, or no plain memory: of the model SC112, of the
    batch SC103."""
    parameters, buffers = named_tensors(model)
    for name, t in (*parameters.items(), *buffers.items()):
        if is_lazy(t):
            hint = "run the model once on a batch before it is compiled: that gives a lazy module its shapes"
            raise error(
                "SC112", f"'{name}' is not initialized yet: it belongs to a lazy module", tensor=name, hint=hint
            )
        if (kind := kind_of(t)) is not None:
            hint = "keep it as a plain tensor, and convert it in forward"
            raise error("SC112", f"'{name}' is a {kind} tensor", tensor=name, hint=hint)
    for name, p in parameters.items():
        if not p.numel():
            hint = "leave it out where its size is 0"
            raise error("SC112", f"parameter '{name}' of {list(p.shape)} has no elements", tensor=name, hint=hint)
        if any(step == 0 and size > 1 for size, step in zip(p.shape, p.stride(), strict=True)):
            message = f"parameter '{name}' of {list(p.shape)} is expanded: several of its elements are one in memory"
            raise error(
                "SC112", message, tensor=name, hint="give each its own memory, .clone(); or expand it in forward"
            )
    for name, t in batch.items():
        if (kind := kind_of(t)) is not None:
            hint = (
                "dequantize it first"
                if t.is_quantized
                else "give a dense one (to_dense(), to_padded_tensor()) and masks"
            )
            raise error("SC103", f"input '{name}' is a {kind} tensor", tensor=name, hint=hint)


def admit_foreign(origins: Origins) -> None:
    """Let the program call ops of other libraries, as `torch.library.custom_op` defines them. Raise ShardcError (SC104)
    for one that is no function from tensors to tensors: of what else it does, a graph of values would lose track."""
    for node in origins.of:  # also those that the trace has dropped, as nothing in it uses what they yield
        if isinstance(node.target, OpOverload) and node.target.namespace not in OWN:
            _admit(node, origins)


def _admit(node: fx.Node, origins: Origins) -> None:
    op: Any = node.target
    returns = schema_of(op).returns
    if torch_compat.mutates(node):
        wrong = "writes over its operands: a program is made of functions"
        hint = "define an op that returns the new value, mutates_args=(), and write that back: x.copy_(op(x))"
    elif not all("Tensor" in str(result.type) for result in returns):
        kinds = ", ".join(str(result.type) for result in returns)
        wrong = f"yields a value that is no tensor ({kinds}): the trace has only what its fake made up"
        hint = "return a tensor without dims instead, and compute with it"
    elif not admit(op):
        wrong = "is named as one of torch's own ops is, and a program could not tell them apart"
        hint = "define it in another namespace"
    else:
        return
    origin = origins.of.get(node, Origin())
    raise error(
        "SC104",
        f"the op {op_name(op)} of another library {wrong}",
        location=origin.source or None,
        source_text=origin.source_text or None,
        fqn=origin.fqn or None,
        op=op_name(op),
        hint=hint,
    )


def refuse_sparse(node: fx.Node, origins: Origins) -> None:
    """Raise ShardcError (SC112) for an op of a trace that yields a sparse tensor, as `Embedding(sparse=True)` has one
    for its gradient."""
    value = node.meta.get("val")
    if isinstance(value, Tensor) and (kind := kind_of(value)) is not None:
        origin = origins.of.get(node, Origin())
        raise error(
            "SC112",
            f"{node.target} makes a {kind} tensor",
            location=origin.source or None,
            source_text=origin.source_text or None,
            fqn=origin.fqn or None,
            hint="leave out sparse=True: the gradient is the same, and dense",
        )


def untrained(params: Collection[str]) -> ShardcError:
    """The error for a model that has nothing to train."""
    if not params:
        return error("SC102", "the model has no parameters, so there is nothing to train", hint="register some")
    message = "the model has no trainable parameter: all of them are frozen"
    hint = "unfreeze what is to be trained: model.requires_grad_(True), or parameter.requires_grad_(True)"
    return error("SC102", message, hint=hint)


def is_loss(value: object) -> bool:
    """Can it be the loss that a model returns, as it is?"""
    return isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point()


def refuse_no_scalar(
    loss: object,
    output: object,
    function: object,
    model: nn.Module,
    names: Collection[str],
    *,
    trained: bool = True,
) -> None:
    """Raise ShardcError (SC102) unless a step's `loss` is a scalar, that depends on a parameter if it is `trained`.
    `function` made it of the model's `output`, if there is one; `names` are the names of the batch's tensors."""
    hint = "pass `loss=`, a function (output, batch) -> scalar tensor"
    if not isinstance(loss, Tensor):
        message = f"no loss in the model's output, a {type(output).__name__}"
        labels = [name for name in inspect.signature(model.forward).parameters if "label" in name and name not in names]
        if function is not None:
            message = f"the loss function returned no tensor, but a value of type {type(loss).__name__}"
            hint = "let it return a scalar tensor"
        elif labels and "loss" in (output if isinstance(output, Mapping) else vars(type(output))):
            message += f", which has one where the batch has '{labels[0]}'"
            hint = f"add '{labels[0]}' to the batch, or {hint}"
        elif labels:
            hint = f"add '{labels[0]}' to the batch, if the model makes a loss of it, or {hint}"
        raise error("SC102", message, hint=hint)
    if loss.dim() != 0:
        hint = hint if function is None else "let the loss function return a scalar tensor, such as its mean()"
        raise error("SC102", f"the loss is not a scalar to differentiate: it is {list(loss.shape)}", hint=hint)
    if loss.is_complex():
        message = f"the loss is not a scalar to differentiate: it is complex, {loss.dtype}".replace("torch.", "")
        raise error("SC102", message, hint="take what of it is to be small: loss.real, or loss.abs()")
    if trained and not loss.requires_grad:
        message = "the loss is not a scalar to differentiate: it is independent of every trainable parameter"
        hint = "is it made under no_grad or from what was detached, or are all that it depends on frozen?"
        raise error("SC102", message, hint=hint)
