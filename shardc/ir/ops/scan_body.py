"""What one step of a recurrence computes, as a line of text: its tensors, with a letter for each dim, and statements.

    h:bdn | a:bdnt x:bdnt C:bnt | v0=mul(a,h) v1=add(v0,x) v2=dot(v1,C:n) | h=v1 | y:bdt=v2

are the carried state, the inputs, the statements, the state that the next step gets, and what each step yields. Equal
letters are equal dims, `t` is time: an input with a `t` is read step by step, one without is the same in every step.
Elementwise statements line dims up by their letters; `dot` multiplies and sums over the letters behind the colon.

Of a statement, `before` the loop are those that no state reaches: they are computed for many steps at once. Those that
the next state needs are `inside` it; those that only the results need are computed `after` it, for many steps again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

TIME, BLOCK = "t", "c"  # letters that no other dim has
LETTERS = "bdnkvhlmpqrsuwxyzaefgijo" + "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
UNARY = ("neg", "exp", "log", "abs", "sigmoid", "tanh", "relu", "softplus", "sqrt", "rsqrt")
BINARY = ("add", "sub", "mul", "div", "maximum", "keep")  # keep(x, m): x where m is not zero
WITH_NUMBER = ("scale", "shift")  # x * number, x + number
WITH_LETTERS = ("dot", "sum")  # summed over letters
RENAME = "rename"  # rename(x:kn): dim k is dim n of another statement

_STATEMENT = re.compile(r"(\w+)=(\w+)\(([\w,]+)(?::([^)]*))?\)")


@dataclass(frozen=True)
class Statement:
    """`name=op(operands:note)`; the note is a number, or letters."""

    name: str
    op: str
    operands: tuple[str, ...]
    note: str = ""

    def __str__(self) -> str:
        note = f":{self.note}" if self.note else ""
        return f"{self.name}={self.op}({','.join(self.operands)}{note})"


@dataclass(frozen=True, eq=False)
class Body:
    """One step. `carried` and `inputs` map names to letters, `next` a state to a value, `yields` are named by order."""

    carried: tuple[tuple[str, str], ...]
    inputs: tuple[tuple[str, str], ...]
    statements: tuple[Statement, ...]
    next: tuple[tuple[str, str], ...]
    yields: tuple[tuple[str, str], ...]  # value -> letters of the result, time among them

    def __str__(self) -> str:
        parts = (
            " ".join(f"{name}:{letters}" for name, letters in self.carried),
            " ".join(f"{name}:{letters}" for name, letters in self.inputs),
            " ".join(map(str, self.statements)),
            " ".join(f"{name}={value}" for name, value in self.next),
            " ".join(f"{letters}={value}" for value, letters in self.yields),
        )
        return " | ".join(parts)

    @cached_property
    def letters(self) -> Mapping[str, str]:
        """The dims of every value within a step, without time, in one order for all."""
        found = {name: letters.replace(TIME, "") for name, letters in (*self.carried, *self.inputs)}
        for st in self.statements:
            known = dict.fromkeys("".join(found[operand] for operand in st.operands))
            if st.op in WITH_LETTERS:
                found[st.name] = "".join(letter for letter in known if letter not in st.note)
            elif st.op == RENAME:
                found[st.name] = "".join(st.note[1] if letter == st.note[0] else letter for letter in known)
            else:
                found[st.name] = "".join(known)
        order = "".join(dict.fromkeys("".join(found.values())))
        return {name: "".join(sorted(letters, key=order.index)) for name, letters in found.items()}

    @cached_property
    def timed(self) -> frozenset[str]:
        """Values that differ from step to step."""
        timed = {name for name, _ in self.carried} | {name for name, letters in self.inputs if TIME in letters}
        for st in self.statements:
            if timed.intersection(st.operands):
                timed.add(st.name)
        return frozenset(timed)

    @cached_property
    def before(self) -> tuple[Statement, ...]:
        return tuple(st for st in self.statements if st.name not in self._stateful)

    @cached_property
    def inside(self) -> tuple[Statement, ...]:
        needed = {value for _, value in self.next}
        for st in reversed(self.statements):
            if st.name in needed:
                needed.update(st.operands)
        return tuple(st for st in self.statements if st.name in needed and st.name in self._stateful)

    @cached_property
    def after(self) -> tuple[Statement, ...]:
        inside = {st.name for st in self.inside}
        return tuple(st for st in self.statements if st.name in self._stateful and st.name not in inside)

    @cached_property
    def _stateful(self) -> frozenset[str]:
        reached = {name for name, _ in self.carried}
        for st in self.statements:
            if reached.intersection(st.operands):
                reached.add(st.name)
        return frozenset(reached)

    @cached_property
    def diagonal(self) -> bool:
        """Does each element of each state depend on that same element of the state before, and on no other?"""
        of: dict[str, str] = {name: name for name, _ in self.carried}
        for st in self.inside:
            states = {of[operand] for operand in st.operands if operand in of}
            (state, *others) = states
            if others or st.op in WITH_LETTERS or st.op == RENAME or self.letters[st.name] != self.letters[state]:
                return False
            of[st.name] = state
        return all(of.get(value, name) == name for name, value in self.next)

    @cached_property
    def homogeneous(self) -> Body | None:
        """The body by which a change of a state goes on to the next one, if that is a factor for each element.

        Of `h = a * h + b` it is `h = a * h`. None where the factor depends on the state, or mixes elements.
        """
        part: dict[str, str] = {name: name for name, _ in self.carried}  # value -> what is linear of it
        made: list[Statement] = []
        for st in self.inside if self.diagonal else ():
            stateful = [operand in part for operand in st.operands]
            linear = tuple(part.get(operand, operand) for operand in st.operands)
            part[st.name] = st.name
            if st.op == "shift" or (st.op in ("add", "sub") and stateful == [True, False]):
                part[st.name] = linear[0]
            elif st.op == "add" and stateful == [False, True]:
                part[st.name] = linear[1]
            elif st.op == "sub" and stateful == [False, True]:
                made.append(Statement(st.name, "neg", linear[1:]))
            elif st.op in ("neg", "scale", "add", "sub") or (
                (st.op == "mul" and not all(stateful)) or (st.op in ("div", "keep") and stateful == [True, False])
            ):
                made.append(Statement(st.name, st.op, linear, st.note))
            else:
                return None
        following: list[tuple[str, str]] = []
        for name, value in self.next:
            if value not in part:  # nothing of the state goes on
                made.append(Statement(f"{name}__gone", "scale", (name,), "0.0"))
            following.append((name, part.get(value, f"{name}__gone")))
        statements = (*self.before, *made)
        return Body(self.carried, self.inputs, statements, tuple(following), ()) if self.diagonal else None

    @cached_property
    def summed(self) -> frozenset[str]:
        """Dims that a statement sums over, or that are another dim elsewhere: no rank may have a part of them."""
        noted = (st.note for st in self.statements if st.op in WITH_LETTERS or st.op == RENAME)
        return frozenset("".join(noted))


def _pairs(text: str, mark: str) -> tuple[tuple[str, str], ...]:
    return tuple((left, right) for left, _, right in (word.partition(mark) for word in text.split()))


@lru_cache(maxsize=1024)
def parse_body(text: str) -> Body:
    """The body of a text. Raises ValueError for what is none."""
    parts = [part.strip() for part in text.split("|")]
    if len(parts) != 5:
        raise ValueError(f"a scan's body has five parts, divided by |: {text!r}")
    carried, inputs = _pairs(parts[0], ":"), _pairs(parts[1], ":")
    known = {name for name, _ in (*carried, *inputs)}
    statements: list[Statement] = []
    for word in parts[2].split():
        match = _STATEMENT.fullmatch(word)
        if match is None:
            raise ValueError(f"no statement of a scan's body: {word!r}")
        st = Statement(match[1], match[2], tuple(match[3].split(",")), match[4] or "")
        count = 2 if st.op in BINARY or st.op == "dot" else 1
        if st.op not in (*UNARY, *BINARY, *WITH_NUMBER, *WITH_LETTERS, RENAME) or len(st.operands) != count:
            raise ValueError(f"no op of a scan's body: {word!r}")
        if st.name in known or not known.issuperset(st.operands):
            raise ValueError(f"{word!r} names a value twice, or one that is not yet there")
        known.add(st.name)
        statements.append(st)
    next_values, yields = _pairs(parts[3], "="), tuple((value, dims) for dims, value in _pairs(parts[4], "="))
    if [name for name, _ in next_values] != [name for name, _ in carried]:
        raise ValueError(f"each state needs a next one: {text!r}")
    if not known.issuperset([value for _, value in next_values] + [value for value, _ in yields]):
        raise ValueError(f"a value that the body does not compute: {text!r}")
    body = Body(carried, inputs, tuple(statements), next_values, yields)
    for name, value in next_values:
        if set(body.letters[name]) != set(body.letters[value]):
            raise ValueError(f"the state {name} has other dims in the next step: {text!r}")
    for value, dims in yields:
        if set(dims) != {*body.letters[value], TIME}:
            raise ValueError(f"the result {dims} has other dims than {value}: {text!r}")
    return body
