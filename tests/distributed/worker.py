"""What one rank of the tests in `test_gloo.py` does: `python worker.py SCENARIO FOLDER`, with torchrun's environment.

Each scenario writes `FOLDER/RANK.json`; assertions that fail end the process with a traceback.
"""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from shardc.ir.diagnostic import ShardcError
from shardc.ir.graph import Graph, type_of
from shardc.ir.group_axes import axes_used
from shardc.ir.mesh import Mesh
from shardc.ir.ops import collectives as collective_ops
from shardc.ir.types import TensorType
from shardc.partition.staged_program import one_stage
from shardc.runtime.execute.body_code import BodyCode
from shardc.runtime.execute.instructions import rank_context
from shardc.runtime.execute.layout import shard
from shardc.runtime.execute.process_groups import ProcessGroupCommunicator
from shardc.runtime.oracle.simulate import simulate
from shardc.runtime.train.trainer import Trainer, launch
from tests.handmade import Builder, mlp, mlp_inputs
from tests.ir.test_ops import MOVES, OPS, REDUCTIONS, aten

RANK = int(os.environ["RANK"])
STEPS = 4
LIMIT = 8.0


def cases() -> dict[str, tuple[Graph, tuple[int, ...]]]:
    """Every move and reduction of the simulated tests, on four ranks: where only two take part, in two groups."""
    found: dict[str, tuple[Graph, tuple[int, ...]]] = {}
    for name, (mesh, before, calls) in MOVES.items():
        b = Builder(mesh if mesh.world_size == 4 else Mesh(other=2, tp=2))
        node = b.input("x", before, "input")
        for op, args, after in calls:
            node = b.call(op, after, getattr(OPS, op).default, node, *args)
        b.output("output", "y", node)
        found[name] = b.graph(), TensorType.parse(before).shape
    for name, (op, _, args, after) in REDUCTIONS.items():
        for kind in ("sum", "max"):
            b = Builder(Mesh(a=2, b=2))
            shape = TensorType.parse(after).shape
            x = b.input("x", f"f64[4@a.b, {shape[0]}, {shape[1]}]", "input")
            own = b.call("own", f"f64[{shape[0]}, {shape[1]}] |{kind} a |{kind} b", aten.view.default, x, list(shape))
            b.output("output", "y", b.call("y", after, getattr(OPS, op).default, own, kind, *args))
            found[f"{name}, {kind}"] = b.graph(), (4, *shape)
    return found


def collectives() -> dict[str, object]:
    """Each collective over gloo gives each rank what the simulator gives it, padding included; in pieces too."""
    dist.init_process_group("gloo")
    checked = prepared = 0
    pieces_or_copies = [(least, *case) for least in (collective_ops.LEAST_PIECE, 0) for case in cases().items()]
    for collective_ops.LEAST_PIECE, name, (graph, shape) in pieces_or_copies:
        mesh = graph.mesh
        comm = ProcessGroupCommunicator(mesh, RANK, axes_used(graph), timedelta(seconds=60))
        executor = BodyCode(graph, rank_context(mesh, RANK, comm), RANK, torch.device("cpu"))
        x = torch.arange(1.0, torch.Size(shape).numel() + 1, dtype=torch.float64).reshape(shape)
        (y,) = executor.run({}, [{graph.inputs[0].name: shard(x, type_of(graph.placeholders[0]), mesh, RANK)}]).values()
        seen: list[torch.Tensor] = []
        simulate(graph, {"x": x}, observe=lambda _, values, seen=seen: seen.append(values[RANK]))
        assert torch.equal(y, seen[-1]), f"{name}: {y} against {seen[-1]}"
        checked += 1
        prepared += len(executor.routine.collectives)
    mesh = Mesh(a=2, b=2)
    comm = ProcessGroupCommunicator(mesh, RANK, [("a",)], timedelta(seconds=60))
    half = torch.full((2, 3), RANK + 1.0, dtype=torch.bfloat16)
    for made in (comm.all_reduce(half, "sum", ["a"]), comm.reduce_scatter(half, "sum", ["a"])):
        assert made.dtype == torch.bfloat16
        assert set(made.flatten().tolist()) == {2.0 * (RANK % 2) + 4.0}
    dist.barrier()  # rank 0 holds the store through which the other group may still be meeting
    return {"checked": checked, "prepared": prepared}


def train() -> dict[str, object]:
    """Four ranks train an MLP whose sizes do not divide; losses and the final state equal the simulation's."""
    folder = Path(sys.argv[2])
    body = mlp(batch=3, width=13)
    inputs = mlp_inputs(batch=3, width=13)
    program = SimpleNamespace(staged=one_stage(body), model=None, optimizer_state=lambda: {"steps": inputs["steps"]})
    made: list[str] = []

    def init(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made.append(name)
        return inputs[name].to(dtype)

    losses = []
    with launch(program, state=folder / "weights.safetensors", init=init, timeout=60) as trainer:
        held = {name: list(t.shape) for name, t in trainer.state.items()}
        held_bytes = sum(t.untyped_storage().nbytes() for name, t in trainer.state.items() if name != "steps")
        for _ in range(STEPS):
            result = trainer.step({"x": inputs["x"]})
            losses.append(float(result.loss))
            trainer.sgd(1e-3)
        grads = {name: grad.double().sum().item() for name, grad in trainer.gather_grads().items()}
        state = trainer.state_dict()
        assert held_bytes == trainer.parameter_bytes, (held_bytes, trainer.parameter_bytes)
    if RANK == 0:
        torch.save(state, folder / "state.pt")
    return {"losses": losses, "held": held, "bytes": held_bytes, "grads": grads, "made": made}


def again() -> dict[str, object]:
    """Launch time after time in one process; now this rank is early, now the other. The losses are the same."""
    body, inputs = mlp(mesh=Mesh(dp=1, tp=2)), mlp_inputs()
    program = SimpleNamespace(staged=one_stage(body), model=None, constants=inputs)
    losses: list[float] = []
    trainers: list[Trainer] = []  # kept, and with them all that they hold of the job's store
    for turn in range(6):
        time.sleep(0.2 * (turn % 2 == RANK))
        trainers.append(launch(program, timeout=20))
        losses.append(float(trainers[-1].step({"x": inputs["x"]}).loss))
        trainers[-1].close()
    return {"losses": losses}


def missed() -> dict[str, object]:
    """The last rank misses a launch, for which the others wait in vain; all meet at the next, and at the one after."""
    body, inputs = mlp(mesh=Mesh(dp=1, tp=2)), mlp_inputs()
    program = SimpleNamespace(staged=one_stage(body), model=None, constants=inputs)
    codes: list[str] = []
    for turn in range(4):
        try:
            if turn == 1 and RANK == 1:
                time.sleep(LIMIT)
                continue
            with launch(program, timeout=LIMIT) as trainer:
                trainer.step({"x": inputs["x"]})
        except ShardcError as failure:
            codes.append(failure.code)
    return {"codes": codes, "trained": 4 - len(codes) - RANK}


def trainer_that_breaks(how: str) -> Trainer:
    """A trainer after its first step; on the last rank the second one ends in its middle."""
    world = int(os.environ["WORLD_SIZE"])
    body = mlp(mesh=Mesh(dp=world // 2, tp=2))
    program = SimpleNamespace(staged=one_stage(body), model=None, constants=mlp_inputs())
    trainer = launch(program, timeout=LIMIT)
    trainer.step({"x": mlp_inputs()["x"]})
    if world - 1 == RANK:
        body = trainer.engine.executor.body
        code = list(body._first_microbatch)
        at, _, *rest = code[1]

        def fail(*_: object) -> None:
            (Path(sys.argv[2]) / "broke_at").write_text(str(time.time()))
            if how == "dead":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "stuck":
                time.sleep(120)
            raise MemoryError("no memory for relu")

        code[1] = (at, fail, *rest)
        body._first_microbatch = code  # code that has run is not looked at again
    return trainer


def broken(how: str) -> dict[str, object]:
    """The last rank dies, fails or sleeps; the others report what they are told."""
    trainer = trainer_that_breaks(how)
    started = time.monotonic()
    try:
        trainer.step({"x": mlp_inputs()["x"]})
    except ShardcError as failure:
        return {"error": str(failure), "code": failure.code, "seconds": time.monotonic() - started}
    except MemoryError as failure:
        return {"own": str(failure), "notes": failure.__notes__}
    return {"error": None}


def uncaught(how: str) -> None:
    """The same in a script that catches nothing, as most do."""
    with trainer_that_breaks(how) as trainer:
        trainer.step({"x": mlp_inputs()["x"]})


def main() -> None:
    torch.set_num_threads(1)
    scenario, folder = sys.argv[1], Path(sys.argv[2])
    if "TORCHELASTIC_RUN_ID" in os.environ:
        uncaught(scenario)
        return
    run = {"collectives": collectives, "train": train, "again": again, "missed": missed}.get(scenario)
    found = run() if run else broken(scenario)
    (folder / f"{RANK}.json").write_text(json.dumps(found))
    # A dead peer would make an orderly shutdown wait.
    os._exit(0)


main()
