"""A recurrence over time as one op forward and one backward, whatever one step computes (`scan_body`).

    yields..., last states..., starts... = scan(carried, inputs, body, segments)
    gradients... = scan_backward(gradients given, starts, inputs, body, given, needed, segments)

Steps are taken in blocks of 64. What no state reaches is computed for a block at once, and so is what only the results
need: between two steps is what the next state depends on, for a Mamba a product and a sum. All is computed in float32,
or in float64 if a tensor is.

Forward keeps the states at the start of each block, `starts`, and not those of each step, nor what a step computes: of
S steps that is S / 64 states. Backward goes through the blocks from the last to the first, and computes each again
from its start. That costs one more forward, of which the states' part is small, and the steps of one block are all that
is held at a time: a Mamba's state is 16 times as large as what goes in, and keeping all would be most of its memory.

Blocks begin anew behind each of `segments`, numbers of steps: where ranks have segments of the steps each, every rank
then has the starts of its own (`scan_parts`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch import Tensor

from kernels_triton.base.library import define
from shardc.ir.ops.scan_body import TIME, Body, Statement, parse_body
from shardc.ir.ops.scan_steps import evaluate, gradient, reordered

BLOCK_STEPS = 64
Values = dict[str, Tensor]


def wide(tensors: Sequence[Tensor]) -> torch.dtype:
    """What a scan of these tensors is computed in."""
    return wide_of([t.dtype for t in tensors])


def wide_of(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """The same of their dtypes."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def sizes_of(body: Body, carried: Sequence[Sequence[int]], inputs: Sequence[Sequence[int]]) -> dict[str, int]:
    """The size of each dim, from the shapes of a call. Raises ValueError where they do not fit the body."""
    sizes: dict[str, int] = {}
    named = [*zip(body.carried, carried, strict=True), *zip(body.inputs, inputs, strict=True)]
    for (name, letters), shape in named:
        if len(letters) != len(shape) or any(sizes.setdefault(x, n) != n for x, n in zip(letters, shape, strict=True)):
            raise ValueError(f"{name}:{letters} has the shape {tuple(shape)}, where {sizes}")
    if TIME not in sizes:
        raise ValueError(f"no input has a dim of time: {body}")
    return sizes


class _Scan:
    """One call: the inputs as values, of a block of steps at a time."""

    def __init__(self, body: Body, inputs: Sequence[Tensor], dtype: torch.dtype) -> None:
        self.body, self.inputs, self.dtype = body, inputs, dtype
        whole = [(name, dims, x) for (name, dims), x in zip(body.inputs, inputs, strict=True) if TIME not in dims]
        self.same = {name: reordered(x, dims, body.letters[name]).to(dtype) for name, dims, x in whole}
        self.step_outs = [(st, [body.letters[o] for o in st.operands], body.letters[st.name]) for st in body.inside]

    def dims(self, name: str) -> str:
        """Of a value that holds the steps of a block."""
        return (TIME if name in self.body.timed else "") + self.body.letters[name]

    def block(self, start: int, steps: int) -> Values:
        """The inputs of some steps, and what no state reaches."""
        values = dict(self.same)
        for (name, dims), x in zip(self.body.inputs, self.inputs, strict=True):
            if TIME in dims:
                part = x.narrow(dims.index(TIME), start, steps)
                values[name] = reordered(part, dims, self.dims(name)).to(self.dtype)
        self.run(self.body.before, values)
        return values

    def run(self, statements: Sequence[Statement], values: Values) -> None:
        for st in statements:
            operands = [values[name] for name in st.operands]
            values[st.name] = evaluate(st, operands, [self.dims(o) for o in st.operands], self.dims(st.name))

    def steps(self, values: Values, states: Values, steps: int, keep: Sequence[str]) -> Values:
        """Take the steps of a block: the states behind it. `values` gets those of `keep`, one for each step."""
        read = {o for st, _, _ in self.step_outs for o in st.operands} | {value for _, value in self.body.next}
        of_step = {n: v.unbind(0) for n, v in values.items() if n in read and n in self.body.timed}
        same = {n: v for n, v in values.items() if n in read and n not in of_step}
        kept: dict[str, list[Tensor]] = {name: [] for name in keep}
        for step in range(steps):
            local = same | states
            local.update((name, parts[step]) for name, parts in of_step.items())
            for st, dims, to in self.step_outs:
                local[st.name] = evaluate(st, [local[o] for o in st.operands], dims, to)
            for name, found in kept.items():
                found.append(local[name])
            states = {name: local[value] for name, value in self.body.next}
        values.update((name, torch.stack(found)) for name, found in kept.items())
        return states

    def read_after(self) -> list[str]:
        """States and values of steps that are read for a whole block."""
        read = {o for st in self.body.after for o in st.operands} | {value for value, _ in self.body.yields}
        return sorted(read & ({name for name, _ in self.body.carried} | {st.name for st in self.body.inside}))


def _ordered_states(body: Body, states: Sequence[Tensor], dtype: torch.dtype) -> Values:
    return {n: reordered(x, dims, body.letters[n]).to(dtype) for (n, dims), x in zip(body.carried, states, strict=True)}


def blocks_of_steps(steps: int, segments: Sequence[int] = ()) -> list[tuple[int, int]]:
    """Where each block of so many steps starts, and how many it has. Segments behind the last step have none."""
    bounds = [0, *(min(end, steps) for end in accumulate(segments or [steps]))]
    assert bounds[-1] == steps, f"{steps} steps in segments of {list(segments)}"
    return [(i, min(BLOCK_STEPS, end - i)) for first, end in pairwise(bounds) for i in range(first, end, BLOCK_STEPS)]


def forward(
    carried: Sequence[Tensor], inputs: Sequence[Tensor], text: str, segments: Sequence[int] = ()
) -> list[Tensor]:
    body = parse_body(text)
    sizes = sizes_of(body, [x.shape for x in carried], [x.shape for x in inputs])
    results = empty(body, sizes, inputs[0], wide([*carried, *inputs]), segments)
    count = len(body.yields), len(body.yields) + len(body.carried)
    yields, lasts, starts = results[: count[0]], results[count[0] : count[1]], results[count[1] :]
    scan = _Scan(body, inputs, yields[0].dtype if yields else lasts[0].dtype)
    states, keep = _ordered_states(body, carried, scan.dtype), scan.read_after()
    for number, (start, steps) in enumerate(blocks_of_steps(sizes[TIME], segments)):
        for (name, dims), saved in zip(body.carried, starts, strict=True):
            saved[number].copy_(reordered(states[name], body.letters[name], dims))
        values = scan.block(start, steps)
        states = scan.steps(values, states, steps, keep)
        scan.run(body.after, values)
        for (name, dims), y in zip(body.yields, yields, strict=True):
            part = reordered(y.narrow(dims.index(TIME), start, steps), dims, TIME + body.letters[name])
            part.copy_(values[name])
    for (name, dims), last in zip(body.carried, lasts, strict=True):
        last.copy_(reordered(states[name], body.letters[name], dims))
    return results


def last_states(carried: Sequence[Tensor], inputs: Sequence[Tensor], body: Body) -> list[Tensor]:
    """The states behind all steps, and nothing else of a scan."""
    steps = sizes_of(body, [x.shape for x in carried], [x.shape for x in inputs])[TIME]
    scan = _Scan(body, inputs, wide([*carried, *inputs]))
    states = _ordered_states(body, carried, scan.dtype)
    for start, count in blocks_of_steps(steps):
        states = scan.steps(scan.block(start, count), states, count, ())
    return [reordered(states[name], body.letters[name], dims) for name, dims in body.carried]


def empty(
    body: Body, sizes: Mapping[str, int], like: Tensor, dtype: torch.dtype, segments: Sequence[int] = ()
) -> list[Tensor]:
    """Tensors for the results of a scan whose dims have these sizes."""
    blocks = len(blocks_of_steps(sizes[TIME], segments))
    of_states = [dims for _, dims in body.carried]
    shapes = [[sizes[x] for x in dims] for dims in [dims for _, dims in body.yields] + of_states]
    shapes += [[blocks, *(sizes[x] for x in dims)] for dims in of_states]
    return [like.new_empty(shape, dtype=dtype) for shape in shapes]


def _fake(carried: Sequence[Tensor], inputs: Sequence[Tensor], text: str, segments: Sequence[int] = ()) -> list[Tensor]:
    body = parse_body(text)
    sizes = sizes_of(body, [x.shape for x in carried], [x.shape for x in inputs])
    return empty(body, sizes, inputs[0], wide([*carried, *inputs]), segments)


class _Sums:
    """Gradients as they come together."""

    def __init__(self) -> None:
        self.of: Values = {}

    def add(self, name: str, g: Tensor | None) -> None:
        if g is not None:
            self.of[name] = self.of[name] + g if name in self.of else g


def backward(
    grads: Sequence[Tensor], starts: Sequence[Tensor], inputs: Sequence[Tensor], text: str,
    given: Sequence[int], needed: Sequence[bool], segments: Sequence[int] = (),
) -> list[Tensor]:  # fmt: skip
    body = parse_body(text)
    dtype = wide([*starts, *inputs])
    scan = _Scan(body, inputs, dtype)
    sizes = sizes_of(body, [x.shape[1:] for x in starts], [x.shape for x in inputs])
    by_place = dict(zip(given, grads, strict=True))
    of_yields = [(v, d, by_place[i].to(dtype)) for i, (v, d) in enumerate(body.yields) if i in by_place]
    of_states: Values = {}
    for i, (name, dims) in enumerate(body.carried):
        g = by_place.get(len(body.yields) + i)
        g = starts[i].new_zeros(starts[i].shape[1:], dtype=dtype) if g is None else g.to(dtype)
        of_states[name] = reordered(g, dims, body.letters[name])
    wanted = {n for (n, _), need in zip(body.inputs, needed[len(body.carried) :], strict=True) if need}
    results = {
        name: x.new_zeros(x.shape, dtype=dtype)
        for (name, _), x in zip(body.inputs, inputs, strict=True)
        if name in wanted
    }
    for number, (start, steps) in reversed(list(enumerate(blocks_of_steps(sizes[TIME], segments)))):
        states = _ordered_states(body, [saved[number] for saved in starts], dtype)
        values = scan.block(start, steps)
        scan.steps(values, states, steps, [n for n, _ in body.carried] + [st.name for st in body.inside])
        scan.run(body.after, values)
        sums = _Sums()
        for value, dims, g in of_yields:
            part = reordered(g.narrow(dims.index(TIME), start, steps), dims, TIME + body.letters[value])
            sums.add(value, part if value in body.timed else part.sum(0))
        _through(scan, body.after, values, sums)
        of_states = _through_steps(scan, values, sums, of_states, steps)
        if not wanted:
            continue
        _through(scan, body.before, values, sums)
        for name, dims in body.inputs:
            g = sums.of.get(name)
            if name not in results or g is None:
                continue
            place = results[name]
            place = place.narrow(dims.index(TIME), start, steps) if TIME in dims else place
            reordered(place, dims, scan.dims(name)).add_(g)
    initial = [
        reordered(of_states[name], body.letters[name], dims).contiguous()
        for (name, dims), need in zip(body.carried, needed, strict=False)
        if need
    ]
    return [*initial, *(results[n].to(x.dtype) for (n, _), x in zip(body.inputs, inputs, strict=True) if n in wanted)]


def _through(scan: _Scan, statements: Sequence[Statement], values: Values, sums: _Sums) -> None:
    """From the gradients of statements' results to those of their operands, for the steps of a block at once."""
    for st in reversed(statements):
        g = sums.of.get(st.name)
        if g is None:
            continue
        operands, dims = [values[o] for o in st.operands], [scan.dims(o) for o in st.operands]
        for place, name in enumerate(st.operands):
            sums.add(name, gradient(st, place, g, scan.dims(st.name), operands, dims, values[st.name]))


def _through_steps(scan: _Scan, values: Values, sums: _Sums, of_states: Values, steps: int) -> Values:
    """Step by step back through a block: only from state to state. What else a step reads gets its gradient at the
    end, for all steps at once."""
    body, letters = scan.body, scan.body.letters
    stepwise = {name for name, _ in body.carried} | {st.name for st in body.inside}
    unbound = {n: v.unbind(0) for n, v in values.items() if n in body.timed}
    behind = {name: g.unbind(0) for name, g in sums.of.items() if name in stepwise}
    found: dict[str, list[Tensor]] = {st.name: [] for st in body.inside}
    read: dict[str, list[Tensor]] = {value: [] for _, value in body.next if value not in stepwise}
    for step in reversed(range(steps)):
        here = _Sums()
        for name, value in body.next:
            if value in stepwise:
                here.add(value, of_states[name])
            else:
                read[value].append(of_states[name])
        for st, dims, to in reversed(scan.step_outs):
            here.add(st.name, behind[st.name][step] if st.name in behind else None)
            g = here.of.get(st.name)
            assert g is not None, "each statement inside the loop is needed by a state"
            found[st.name].append(g)
            operands = [unbound[o][step] if o in unbound else values[o] for o in st.operands]
            for place, name in enumerate(st.operands):
                if name in stepwise:
                    here.add(name, gradient(st, place, g, to, operands, dims, unbound[st.name][step]))
        for name, _ in body.carried:
            here.add(name, behind[name][step] if name in behind else None)
        of_states = {n: here.of[n] if n in here.of else torch.zeros_like(g) for n, g in of_states.items()}
    for value, parts in read.items():
        g = torch.stack(parts[::-1])
        sums.add(value, g if value in body.timed else g.sum(0))
    for st in body.inside:
        g = torch.stack(found[st.name][::-1])
        operands, dims = [values[o] for o in st.operands], [scan.dims(o) for o in st.operands]
        for place, name in enumerate(st.operands):
            if name not in stepwise:
                sums.add(name, gradient(st, place, g, TIME + letters[st.name], operands, dims, values[st.name]))
    return of_states


def _fake_backward(
    grads: Sequence[Tensor], starts: Sequence[Tensor], inputs: Sequence[Tensor], text: str,
    given: Sequence[int], needed: Sequence[bool], segments: Sequence[int] = (),
) -> list[Tensor]:  # fmt: skip
    dtype = wide([*starts, *inputs])
    initial = [x.new_empty(x.shape[1:], dtype=dtype) for x, need in zip(starts, needed, strict=False) if need]
    return [*initial, *(x.new_empty(x.shape) for x, n in zip(inputs, needed[len(starts) :], strict=True) if n)]


SCAN = define("scan(Tensor[] carried, Tensor[] inputs, str body, int[] segments=[]) -> Tensor[]", forward, _fake)
SCAN_BACKWARD = define(
    "scan_backward(Tensor[] grads, Tensor[] starts, Tensor[] inputs, str body, int[] given, bool[] needed,"
    " int[] segments=[]) -> Tensor[]",
    backward,
    _fake_backward,
)


def one_by_one(body: Body, carried: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The yields and the last states in ordinary ops, step by step: autograd follows them to any order."""
    dtype = wide([*carried, *inputs])
    steps = sizes_of(body, [x.shape for x in carried], [x.shape for x in inputs])[TIME]
    scan = _Scan(body, inputs, dtype)
    values = scan.block(0, steps)
    states = scan.steps(values, _ordered_states(body, carried, dtype), steps, scan.read_after())
    scan.run(body.after, values)
    yields = [reordered(values[name], TIME + body.letters[name], dims) for name, dims in body.yields]
    return [*yields, *(reordered(states[name], body.letters[name], dims) for name, dims in body.carried)]


class _ScanFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, text: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        body = parse_body(text)
        results = SCAN(list(tensors[:count]), list(tensors[count:]), text)
        given = len(body.yields) + count
        ctx.save_for_backward(*tensors, *results[given:])
        ctx.text, ctx.count = text, count
        ctx.set_materialize_grads(False)
        return tuple(results[:given])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        saved = ctx.saved_tensors  # which a checkpoint lets us ask for once
        count, total = ctx.count, len(saved) - ctx.count
        carried, inputs, starts = saved[:count], saved[count:total], saved[total:]
        needed = list(ctx.needs_input_grad[2:])
        places = [place for place, g in enumerate(grads) if g is not None]
        found: list[Tensor | None] = [None] * len(needed)
        if not places:
            return None, None, *found
        kept = [grads[place] for place in places]
        if torch.is_grad_enabled():  # create_graph: these gradients will be differentiated
            results = one_by_one(parse_body(ctx.text), carried, inputs)
            wanted = [t for t, need in zip([*carried, *inputs], needed, strict=True) if need]
            outs = [results[place] for place in places]
            made = torch.autograd.grad(outs, wanted, kept, create_graph=True, allow_unused=True)
        else:
            made = SCAN_BACKWARD(kept, list(starts), list(inputs), ctx.text, places, needed)
        gradients = iter(cast("Sequence[Tensor | None]", made))
        for place, need in enumerate(needed):
            if need:
                g = next(gradients)
                found[place] = None if g is None else g.to(saved[place].dtype)
        return None, None, *found


def scan(body: Body, carried: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """What the steps yield, and the last states; differentiable."""
    results: Any = _ScanFunction.apply(str(body), len(carried), *carried, *inputs)
    return list(results[: len(body.yields)]), list(results[len(body.yields) :])
