"""One rank's body as a flat list of calls: what a process of a job runs every step.

Everything that can be known beforehand is: argument templates, slots, what dies when, offsets that depend on the rank
alone. A step is then one loop over plain calls; an error in it names the instruction, the user's line and the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

import shardc.ir.ops.fused_attention  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers what GPUs run)
from shardc.ir.diagnostic import ShardcError
from shardc.ir.graph import Graph, Port
from shardc.ir.in_place import Write, writes
from shardc.ir.ops.accumulate import ACCUMULATE
from shardc.ir.ops.collectives import COLLECTIVES, run_collective
from shardc.ir.ops.context import RankContext, running
from shardc.ir.ops.local import axis_offset
from shardc.runtime.index_check import out_of_range
from shardc.runtime.instructions import Instruction, Numerics, flatten
from shardc.runtime.monitor import Monitor
from shardc.runtime.overlap import Action, arranged, begin

Single = int  # the slot of a call's only result
Many = tuple[tuple[int, int], ...]  # (position among the results, slot)
Code = tuple[int, Callable[..., Any], Any, Single | Many, tuple[int, ...]]


class Executor:
    """Runs a localized body as the rank of `context`. Tensors in and out are this rank's shards."""

    def __init__(self, body: Graph, context: RankContext, rank: int, device: torch.device) -> None:
        self.body, self.context, self.rank = body, context, rank
        self.listing = listing = flatten(body, Numerics(device))
        self.names = [instruction.where for instruction in listing.instructions]
        self._empty: list[Any] = [None] * listing.size
        self._micro: list[Code] = []  # of the first microbatch,
        self._again: list[Code] = []  # of any other, which adds to the sums of the first,
        self._rest: list[Code] = []  # and what runs once a step
        constant: set[int] = set()
        for instruction in listing.instructions:
            if instruction.target is axis_offset:
                args, kwargs = instruction.arguments(self._empty)
                into = _into(instruction)
                assert isinstance(into, int)
                with running(context):
                    self._empty[into] = axis_offset(*args, **kwargs).to(device)
                constant.add(into)
        over = {write.value: write for write in writes(body)}
        slots = dict(zip(body.placeholders, listing.inputs, strict=True))
        staying = constant | {slots[write.over] for write in over.values()}
        once = arranged(listing.instructions, listing.repeated, len(listing.instructions))
        for actions, code in ((arranged(listing.instructions, 0, listing.repeated), self._micro), (once, self._rest)):
            for action in actions:
                free = tuple(slot for slot in action.free if slot not in staying)
                instruction = listing.instructions[action.at]
                if instruction.target is axis_offset:
                    continue
                code.append(_code(instruction, action, free))
                if action.kind not in ("run", "wait"):
                    continue
                for value, _, slot in instruction.yields:
                    if value in over:
                        code[-1:] = _written(code[-1], over[value], slots[over[value].over], slot)
        for at, *rest in self._micro:
            instruction = listing.instructions[at]
            if instruction.node.target is ACCUMULATE:
                into = instruction.yields[0][2]
                rest = [torch.Tensor.add_, _sum_of(into, instruction.reads[0]), into, rest[-1]]
            self._again.append((at, *rest))  # type: ignore[arg-type]

    @torch.no_grad()
    def run(
        self,
        held: Mapping[str, torch.Tensor],
        feeds: Sequence[Mapping[str, torch.Tensor]],
        monitor: Monitor | None = None,
    ) -> dict[Port, torch.Tensor]:
        """One step: what it holds and what each microbatch is fed, by the names of inputs.

        New parameters and state are written over those held, where nothing reads these any more (`ir.in_place`).
        Outputs of the model's that each microbatch has of its own come back stacked. Raises ShardcError naming the
        rank to blame when a collective fails.
        """
        listing, env = self.listing, self._empty.copy()
        stacks: dict[int, list[torch.Tensor]] = {i: [] for i in listing.stacked}
        with running(self.context):
            for k, feed in enumerate(feeds):
                after = [(into, env[slot]) for slot, into in listing.carried] if k else []
                for port, slot in zip(self.body.inputs, listing.inputs, strict=True):
                    if port.name in feed:
                        env[slot] = feed[port.name]
                    elif not k:
                        env[slot] = held[port.name]
                for into, value in after:
                    env[into] = value
                self._loop(self._micro if k == 0 else self._again, env, monitor)
                for i, stack in stacks.items():
                    stack.append(env[listing.outputs[i]])
            self._loop(self._rest, env, monitor)
        for i, stack in stacks.items():
            env[listing.outputs[i]] = torch.stack(stack)
        return {port: env[slot] for port, slot in zip(self.body.outputs, listing.outputs, strict=True)}

    def _loop(self, code: Sequence[Code], env: list[Any], monitor: Monitor | None) -> None:
        at = 0
        try:
            for at, call, arguments, into, free in code:
                if monitor is not None:
                    monitor.at = at
                args, kwargs = arguments(env)
                result = call(*args, **kwargs)
                if type(into) is int:
                    env[into] = result
                else:
                    for position, slot in into:  # type: ignore[union-attr]
                        env[slot] = result[position]
                for slot in free:
                    env[slot] = None
        except Exception as failure:
            explained = self._explained(failure, at, monitor, env)
            if explained is failure:
                raise
            raise explained from failure

    def _explained(self, failure: Exception, at: int, monitor: Monitor | None, env: Sequence[Any]) -> Exception:
        failure.add_note(f"in instruction {self.names[at]}, on rank {self.rank}")
        if isinstance(failure, ShardcError):
            return failure
        one = self.listing.instructions[at]
        if one.target in COLLECTIVES:
            return failure if monitor is None else monitor.blame(failure)
        named = out_of_range(one, self.rank, [env[slot] for slot in one.reads])
        why = f"{type(failure).__name__}: {failure}" if named is None else str(named).partition("\n")[0]
        if monitor is not None:
            monitor.failed_alone(f"{why} in instruction {self.names[at]}")
        return named or failure


def _code(one: Instruction, action: Action, free: tuple[int, ...]) -> Code:
    steps, into = COLLECTIVES.get(one.target), _into(one)
    match action.kind:
        case "run":
            call = one.target if steps is None else partial(run_collective, steps)
            return action.at, call, one.arguments, into, free
        case "begin":
            assert steps is not None
            return action.at, partial(begin, steps), one.arguments, into, free
        case "wait":
            assert isinstance(into, int)
            return action.at, _arrived, lambda env: ((env[into],), {}), into, free
        case "free":
            return action.at, _arrived, lambda env: ((tuple,), {}), (), free


def _written(code: Code, write: Write, over: int, slot: int) -> list[Code]:
    """A call whose result takes the place of what slot `over` holds, which then is in `slot` as well."""
    at, _, arguments, into, free = code
    if write.op is None:
        return [code, (at, torch.Tensor.copy_, lambda env: ((env[over], env[slot]), {}), slot, ())]

    def placed(env: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        args, kwargs = arguments(env)
        return args, {**kwargs, "out": env[over]}

    return [(at, write.op, placed, into, free)]


def _arrived(arrival: Callable[[], Any]) -> Any:
    return arrival()


def _into(one: Instruction) -> Single | Many:
    places = one.yields
    return places[0][2] if len(places) == 1 and places[0][1] is None else tuple((p or 0, s) for _, p, s in places)


def _sum_of(total: int, term: int) -> Callable[[Sequence[Any]], tuple[Sequence[Any], dict[str, Any]]]:
    """The arguments that add a slot to another in place: `accumulate` copied its first term, so none else sees it."""
    return lambda env: ((env[total], env[term]), {})
