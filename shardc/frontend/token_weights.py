"""Whether a step's loss is the mean over its microbatches, or weighted by the tokens that each of them counts.

    loss: {tokens: labels, shift: 1}     microbatch k's loss, a mean over its n_k tokens, counts n_k / (n_0 + n_1 + ...)

With it a step of several microbatches computes what the same batch in one piece does, however uneven they are. What
counts is an element of a batch's input that is not `ignore`. A causal model of Hugging Face's shifts its labels inside:
it counts them from position 1 on, and a plan for it says so.
"""

from __future__ import annotations

from torch import Tensor

from shardc.frontend.sample_call import Call
from shardc.ir.diagnostic import Diagnostic, ShardcError, did_you_mean, error
from shardc.ir.graph import Tokens
from shardc.plan.values import LossOver


def bind_tokens(loss: LossOver, batch: Call) -> Tokens | None:
    """What a plan's loss goes by, given the sample batch.

    Raises ShardcError where the batch has no such input (SC202), or where tokens cannot be counted in it (SC222).
    """
    if loss.tokens is None:
        return None
    tensors = dict(zip(batch.names, batch.tensors, strict=True))
    if loss.tokens not in tensors:
        message = f"the loss counts tokens in '{loss.tokens}', which is no tensor of the batch"
        hint = did_you_mean(loss.tokens, tensors, "inputs")
        raise ShardcError(loss.located(Diagnostic("SC202", message, hint=hint)))
    shape = tuple(tensors[loss.tokens].shape)
    size = next((t.shape[0] for t in batch.tensors if t.dim()), 0)  # which microbatches are split by
    problem = hint = None
    if not shape or shape[0] != size:
        problem = f"which is not split into microbatches: its dim 0 is not the batch's {size}"
        hint = "name the labels: a tensor of [samples, positions], or of [samples]"
    elif len(shape) == 1 and loss.shift:
        problem, hint = "whose only dim is that of the samples: there is nothing to shift", "leave `shift` out"
    elif shape[-1] <= loss.shift:
        problem, hint = f"which has no position after the first {loss.shift}", "write a smaller `shift`, 0 or 1"
    if problem:
        message = f"the loss counts tokens in '{loss.tokens}' of {list(shape)}, {problem}"
        raise ShardcError(loss.located(Diagnostic("SC222", message, tensor=loss.tokens, hint=hint)))
    return Tokens(loss.tokens, loss.ignore, loss.shift)


def refuse_unpaddable(pad: bool | str, tokens: Tokens | None, batch: Call, capacity: float | None = None) -> None:
    """Raise ShardcError where batches cannot be padded: SC548 for a loss that is no mean over tokens, or experts with a
    capacity, SC202 for a mask that the batch does not have."""
    if capacity is not None:
        message = f"a plan with 'pad' and experts of a capacity of {capacity:g}: what is added takes the room of tokens"
        raise error("SC548", message, hint="write capacity: exact; or leave pad out: a program a shape")
    if tokens is None:
        message = "a plan with 'pad' needs a loss that is a mean over tokens: what is added is ignored by its label"
        raise error(
            "SC548", message, hint="write loss: {tokens: labels}, with the name of the labels; or leave pad out"
        )
    if isinstance(pad, str) and pad not in batch.names:
        hint = did_you_mean(pad, batch.names, "inputs")
        raise error("SC202", f"'pad' names the mask '{pad}', which is no tensor of the batch", hint=hint)


def counted(labels: Tensor, tokens: Tokens) -> int:
    """How many tokens count, one by one: for the eager witness, which is to owe the compiled step nothing."""
    rows = labels.reshape(-1, labels.shape[-1]).tolist()
    return sum(value != tokens.ignore for row in rows for value in row[tokens.shift :])
