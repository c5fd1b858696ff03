"""What a rank of a pipeline can be told to do: ten instructions, as plain values.

    Forward   2 #5         run stage 2's forward on microbatch 5
    Backward  2 #5         its whole backward; or, in two parts,
    Dgrad     2 #5         the gradients of what the stage was given, which the stage before waits for, and
    Wgrad     2 #5         the gradients of its parameters, which nobody waits for
    Send      x3#5 -> 3    hand microbatch 5's x3 to peer 3
    Recv      dx3#5 <- 3   take microbatch 5's dx3 from peer 3
    Gather    2: params2   collect the sharded parameters that stage 2 reads, for all microbatches until their Free
    ReduceGrads grads2     sum accumulated gradients over the ranks of `group`
    Optimizer              update the rank's parameters; ranks of `group` agree on the gradients' norm first
    Free      x2, kept2 #5 forget microbatch 5's values

**Adjacent Sends and Recvs are one batch**: they are posted together and none of them waits for another, so opposite
sends are safe when nothing stands between. Everything else happens in the order of the list. Peers and members of
groups are coordinates on the pipeline's axis: all ranks that share one run the same list. So a Gather, which is among
these alone, along the axes that the parameters are stored over, needs no group: whoever reaches it, all of them do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, get_args

from shardc.ir.plain import listed, text_of, texts_of, whole_of

Group = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _OnMicrobatch:
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{type(self).__name__:<11} {self.stage} #{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Forward(_OnMicrobatch):
    short: ClassVar[str] = "F"


@dataclass(frozen=True, slots=True)
class Backward(_OnMicrobatch):
    """Dgrad and Wgrad at once, in the order that suits the graph."""

    short: ClassVar[str] = "B"


@dataclass(frozen=True, slots=True)
class Dgrad(_OnMicrobatch):
    short: ClassVar[str] = "D"


@dataclass(frozen=True, slots=True)
class Wgrad(_OnMicrobatch):
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
    """`bytes` are those that a rank holds of the values from then on."""

    stage: int
    values: tuple[str, ...]
    bytes: int = 0

    def __str__(self) -> str:
        return f"{'Gather':<11} {self.stage}: {', '.join(self.values)}, {self.bytes} B"


@dataclass(frozen=True, slots=True)
class ReduceGrads:
    value: str
    group: Group
    bytes: int = 0

    def __str__(self) -> str:
        return f"{'ReduceGrads':<11} {self.value} over {_ranks(self.group)}, {self.bytes} B"


@dataclass(frozen=True, slots=True)
class Optimizer:
    group: Group

    def __str__(self) -> str:
        return f"{'Optimizer':<11} over {_ranks(self.group)}"


@dataclass(frozen=True, slots=True)
class Free:
    """`microbatch` is None for values of the whole step: gathered parameters."""

    values: tuple[str, ...]
    microbatch: int | None

    def __str__(self) -> str:
        at = "" if self.microbatch is None else f" #{self.microbatch}"
        return f"{'Free':<11} {', '.join(self.values)}{at}"


Compute = Forward | Backward | Dgrad | Wgrad
Transfer = Send | Recv
Collective = ReduceGrads | Optimizer  # over ranks of the pipeline's axis
Instruction = Compute | Transfer | Collective | Gather | Free
# For isinstance, in loops where a union's own check is slow.
COMPUTE: tuple[type[Compute], ...] = get_args(Compute)
TRANSFER: tuple[type[Transfer], ...] = get_args(Transfer)
COLLECTIVE: tuple[type[Collective], ...] = get_args(Collective)
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


def in_words(instruction: Instruction) -> str:
    """As in a list, without its columns: `Forward 2 #5`."""
    return " ".join(str(instruction).split())


def _ranks(group: Group) -> str:
    return "{" + ", ".join(map(str, group)) + "}"
