"""Scans over time: time is whole, and so is each dim that a step sums over; all others are free.

    h:bdn | a:bdnt x:bdnt C:bnt | v0=mul(a,h) v1=add(v0,x) v2=dot(v1,C:n) | h=v1 | bdt=v2

is `b d n, b d n t, b d n t, b n t -> b d t, b d n, c b d n`, with n and t whole; c counts the blocks whose starts
forward keeps. A dim that some result does not have is whole too, since each rank would compute that result. Backward
gives C a gradient that is a sum over d, and a tensor that is the same in every step one over b.
That holds where every gradient that comes in has the dim: what has it not would be counted on each rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardc.ir.ops.scan import SCAN, SCAN_BACKWARD
from shardc.ir.ops.scan_body import BLOCK, TIME, parse_body
from shardc.rules.notation import Dims, Notation
from shardc.rules.registry import rule

MAMBA = "h:bdn | a:bdnt x:bdnt C:bnt | v0=mul(a,h) v1=add(v0,x) v2=dot(v1,C:n) | h=v1 | bdt=v2"
SELECTIVE = (
    "h:bdn | d:dbt x:btd B:btn A:dn | p=mul(d,A) e=exp(p) q=mul(d,B) r=mul(q,x) v=mul(e,h) w=add(v,r) y=dot(w,B:n) "
    "| h=w | btd=y"
)
DELTA = (
    "h:bhkv | q:bthk k:bthk v:bthv z:bht | s=mul(h,z) m=dot(s,k:k) e=sub(v,m) u=mul(k,e) n=add(s,u) y=dot(n,q:k) "
    "| h=n | bhtv=y"
)
CHUNKS = (
    "h:bkv | q:tblk w:tblm u:tbmv | y=dot(q,h:k) z=dot(w,u:m) o=add(y,z) s=scale(h:0.5) e=sum(u:m) n=add(s,e) "
    "| h=n | tblv=o"
)  # its rows l are no dim of the state
RNN = "h:bk | x:tbn U:kn | s=dot(h,U:k) p=add(s,x) q=tanh(p) r=rename(q:nk) | h=r | tbn=q"


def _text(*tensors: str) -> str:
    return ", ".join(" ".join(letters) or "()" for letters in tensors)


@rule(
    SCAN,
    examples=[
        ([(4, 6, 3)], [(4, 6, 3, 5), (4, 6, 3, 5), (4, 3, 5)], MAMBA),
        ([(4, 6, 2)], [(6, 4, 70), (4, 70, 6), (4, 70, 2), (6, 2)], SELECTIVE),
        ([(2, 4, 3, 6)], [(2, 5, 4, 3), (2, 5, 4, 3), (2, 5, 4, 6), (2, 4, 5)], DELTA),
        ([(4, 3, 2)], [(3, 4, 6, 3), (3, 4, 6, 5), (3, 4, 5, 2)], CHUNKS),
        ([(4, 3)], [(5, 4, 3), (3, 3)], RNN),
    ],
)
def scan(carried: Sequence[Dims], inputs: Sequence[Dims], body: str) -> Notation:
    parsed = parse_body(body)
    states = [letters for _, letters in parsed.carried]
    ins = _text(*states, *(letters for _, letters in parsed.inputs))
    results = [*(letters for _, letters in parsed.yields), *states]
    outs = _text(*results, *(BLOCK + letters for letters in states))
    letters = {letter for _, dims in (*parsed.carried, *parsed.inputs) for letter in dims}
    everywhere = {letter for letter in letters if all(letter in dims for dims in results)}
    whole = {TIME, BLOCK, *parsed.summed, *(letters - everywhere)}
    return Notation(f"{ins} -> {outs}", whole=" ".join(sorted(whole)))


@rule(
    SCAN_BACKWARD,
    examples=[
        (
            [(4, 6, 5)], [(1, 4, 6, 3)], [(4, 6, 3, 5), (4, 6, 3, 5), (4, 3, 5)], MAMBA, [0],
            [True, True, True, True],
        ),
        (
            [(4, 70, 6), (4, 6, 2)], [(2, 4, 6, 2)], [(6, 4, 70), (4, 70, 6), (4, 70, 2), (6, 2)], SELECTIVE, [0, 1],
            [False, True, True, True, True],
        ),
        (
            [(2, 4, 5, 6)], [(1, 2, 4, 3, 6)], [(2, 5, 4, 3), (2, 5, 4, 3), (2, 5, 4, 6), (2, 4, 5)], DELTA, [0],
            [True, True, True, False, True],
        ),
        (
            [(3, 4, 6, 2)], [(1, 4, 3, 2)], [(3, 4, 6, 3), (3, 4, 6, 5), (3, 4, 5, 2)], CHUNKS, [0],
            [True, True, True, True],
        ),
        ([(4, 3)], [(1, 4, 3)], [(5, 4, 3), (3, 3)], RNN, [1], [True, True, True]),
    ],
)  # fmt: skip
def scan_backward(
    grads: Sequence[Dims], starts: Sequence[Dims], inputs: Sequence[Dims], body: str,
    given: Sequence[int], needed: Sequence[bool],
) -> Notation:  # fmt: skip
    parsed = parse_body(body)
    states, of_inputs = [dims for _, dims in parsed.carried], [dims for _, dims in parsed.inputs]
    results = [*(letters for _, letters in parsed.yields), *states]
    coming = [results[place] for place in given]
    ins = _text(*coming, *(BLOCK + letters for letters in states), *of_inputs)
    outs = [letters for letters, need in zip([*states, *of_inputs], needed, strict=True) if need]
    letters = {letter for tensor in (*states, *of_inputs) for letter in tensor}
    free = {x for x in letters if all(x in tensor for tensor in coming)} - parsed.summed - {TIME}
    whole = letters - free | {BLOCK, TIME}
    return Notation(
        f"{ins} -> {_text(*outs)}",
        sum=" ".join(sorted(free)),
        whole=" ".join(sorted(whole)),
        linear=(0,) if len(coming) == 1 else (),
    )
