"""The instruction set of a rank: ten instructions of a pipeline, as plain values, and that of a step without one.

    Forward   2 #5         run stage 2's forward on microbatch 5
    Backward  2 #5         run its whole backward; or, in two parts:
    Dgrad     2 #5         the gradients of the stage's inputs, which the previous stage waits for
    Wgrad     2 #5         the gradients of its parameters, which no other stage waits for
    Send      x3#5 -> 3    send x3 of microbatch 5 to peer 3
    Recv      dx3#5 <- 3   receive dx3 of microbatch 5 from peer 3
    Gather    2: params2   all-gather the sharded parameters that stage 2 reads, for all microbatches until their Free
    ReduceGrads grads2     sum accumulated gradients over the ranks of `group`
    Optimizer              update the rank's parameters; the ranks of `group` first sum the gradients' norm. Of an
                           evaluation, which has neither: complete the loss of all microbatches
    Free      x2, kept2 #5 free values of microbatch 5
    RunBody   0            run the whole step of the only stage: all microbatches, reductions and the update

**Adjacent Sends and Recvs are one batch**: they are posted together and none of them waits for another. Opposite sends
are therefore safe if no other instruction separates them. All other instructions run in list order. Peers and group
members are coordinates on the pipeline's axis; all ranks of one coordinate run the same list. A Gather communicates
along the other axes, over which the parameters are stored. It needs no group: all ranks of its coordinate reach it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, get_args

from shardc.ir.plain import listed, text_of, texts_of, whole_of

CoordinateGroup = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _StageWork:
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{type(self).__name__:<11} {self.stage} #{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Forward(_StageWork):
    short: ClassVar[str] = "F"


@dataclass(frozen=True, slots=True)
class Backward(_StageWork):
    """Dgrad and Wgrad together, with their calls in the graph's order."""

    short: ClassVar[str] = "B"


@dataclass(frozen=True, slots=True)
class Dgrad(_StageWork):
    short: ClassVar[str] = "D"


@dataclass(frozen=True, slots=True)
class Wgrad(_StageWork):
    short: ClassVar[str] = "W"


@dataclass(frozen=True, slots=True)
class Send:
    value: str
    microbatch: int
    peer: int
    bytes: int = 0

    def __str__(self) -> str:
        return f"{'Send':<11} {self.value}#{self.microbatch} -> {self.peer}, {self.bytes} B"


@dataclass(frozen=True, slots=True)
class Recv:
    value: str
    microbatch: int
    peer: int
    bytes: int = 0

    def __str__(self) -> str:
        return f"{'Recv':<11} {self.value}#{self.microbatch} <- {self.peer}, {self.bytes} B"


@dataclass(frozen=True, slots=True)
class Gather:
    """`bytes` is the size of the gathered values on one rank."""

    stage: int
    values: tuple[str, ...]
    bytes: int = 0

    def __str__(self) -> str:
        return f"{'Gather':<11} {self.stage}: {', '.join(self.values)}, {self.bytes} B"


@dataclass(frozen=True, slots=True)
class ReduceGrads:
    value: str
    group: CoordinateGroup
    bytes: int = 0

    def __str__(self) -> str:
        return f"{'ReduceGrads':<11} {self.value} over {_group_text(self.group)}, {self.bytes} B"


@dataclass(frozen=True, slots=True)
class Optimizer:
    group: CoordinateGroup

    def __str__(self) -> str:
        return f"{'Optimizer':<11} over {_group_text(self.group)}"


@dataclass(frozen=True, slots=True)
class Free:
    """`microbatch` is None for values of the whole step: gathered parameters."""

    values: tuple[str, ...]
    microbatch: int | None

    def __str__(self) -> str:
        suffix = "" if self.microbatch is None else f" #{self.microbatch}"
        return f"{'Free':<11} {', '.join(self.values)}{suffix}"


@dataclass(frozen=True, slots=True)
class RunBody:
    """The list of a step without a pipeline. No file has it: its list follows from the body."""

    stage: int

    def __str__(self) -> str:
        return f"{'RunBody':<11} {self.stage}"


Compute = Forward | Backward | Dgrad | Wgrad
Transfer = Send | Recv
PipelineCollective = ReduceGrads | Optimizer  # over ranks of the pipeline's axis
Instruction = Compute | Transfer | PipelineCollective | Gather | Free | RunBody
# Tuples for isinstance: checking against a union is slow in loops.
COMPUTE: tuple[type[Compute], ...] = get_args(Compute)
TRANSFER: tuple[type[Transfer], ...] = get_args(Transfer)
COLLECTIVE: tuple[type[PipelineCollective], ...] = get_args(PipelineCollective)
STAGE_WORK = (*COMPUTE, RunBody)
BY_NAME: dict[str, type[Instruction]] = {
    kind.__name__: kind for kind in (*COMPUTE, *TRANSFER, *COLLECTIVE, Gather, Free)
}


def instruction_to_plain(instruction: Instruction) -> list[Any]:
    """`["Send", "x3", 5, 3, 4096]`: the name, then the fields in order."""
    values = [getattr(instruction, f.name) for f in fields(instruction)]
    return [type(instruction).__name__, *(list(v) if isinstance(v, tuple) else v for v in values)]


def instruction_from_plain(data: list[Any]) -> Instruction:
    """ValueError, KeyError for what `instruction_to_plain` does not write."""
    name, *values = listed(data)
    kind: Any = BY_NAME[text_of(name)]
    names = [f.name for f in fields(kind)]
    return kind(**{name: _READ[name](value) for name, value in zip(names, values, strict=True)})


def _microbatch(data: Any) -> int | None:
    return None if data is None else whole_of(data)


_READ: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("stage", "peer", "bytes"), whole_of),
    "microbatch": _microbatch,
    "value": text_of,
    "values": texts_of,
    "group": lambda data: tuple(map(whole_of, listed(data))),
}


def instruction_text(instruction: Instruction) -> str:
    """The line of a list without column padding: `Forward 2 #5`."""
    return " ".join(str(instruction).split())


def _group_text(group: CoordinateGroup) -> str:
    return "{" + ", ".join(map(str, group)) + "}"
