"""A program as data: what it says of itself, and files that come back whole or are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import fx

from shardc.ir.collectives import human_bytes
from shardc.ir.diagnostic import Diagnostic, ShardcError
from shardc.ir.dot import emit_dot
from shardc.ir.graph import Graph, info
from shardc.ir.mesh import Mesh
from shardc.ir.ops.context import RankContext, running
from shardc.ir.parse import parse
from shardc.ir.plain import tensor_from_plain, tensor_to_plain
from shardc.ir.program import Program
from shardc.ir.python import emit_python
from shardc.ir.text import print_graph
from shardc.ir.types import DTYPE_NAMES
from tests.handmade import MESH, mlp, mlp_inputs
from tests.ir.grown import graphs


def program() -> Program:
    return Program(
        body=mlp(),
        reference=mlp(sharded=False),
        mesh=MESH,
        diagnostics=(
            Diagnostic("SC209", "an axis was dropped", "warning", location="model.py:3", hint="ask for less"),
        ),
        annotations=(("params", "w*", "-, tp", "plan.yaml:3"),),
        constants={"mask": torch.tensor([[True, False]]), "scale": torch.tensor(0.5, dtype=torch.bfloat16)},
        plan={"mesh": "dp=2,tp=2", "sizes": (1, 2), "by_rank": {10: "a", 9: "b"}},
    )


def test_parameter_bytes() -> None:
    assert program().parameter_bytes() == (2 * 8 * 6 * 4, 2 * 8 * 12 * 4)


def test_text_reads_back() -> None:
    text = program().text()
    assert print_graph(parse(text), comments=False) == print_graph(mlp(), comments=False)


# ---------------------------------------------------------------------- collectives
COLLECTIVES = """graph @step mesh(dp=2, tp:0=2, tp:1=2) {
  %x = input "x" : f32[10, 6]
  %a = shardc.all_reduce(%x, op="max", axes=["tp:0", "tp:1"]) : f32[10, 6]
  %s = shardc.shard_slice(%a, axes=["tp:0"], atoms=[10, 6], pos=0, shape=[5, 6]) : f32[10@tp:0, 6]
  %g = shardc.all_gather(%s, axes=["tp:0"], atoms=[5, 6], pos=0, size=10, shape=[10, 6]) : f32[10, 6]
bwd:
  %r = shardc.reduce_scatter(%g, op="sum", axes=["tp:0", "tp:1"], atoms=[10, 6], pos=0, shape=[3, 6])
    : f32[10@tp:0.tp:1, 6]
  %t = shardc.all_to_all(%r, axes=["tp:0", "tp:1"], atoms=[3, 6], split=1, concat=0, size=10, shape=[10, 2])
    : f32[10, 6@tp:0.tp:1]
  %p = shardc.permute_ranks(%t, axes=["dp"], source=[1, 0]) : f32[10, 6@tp:0.tp:1]
  return output "y" = %p
}"""


def test_collectives() -> None:
    found = Program(parse(COLLECTIVES), parse(COLLECTIVES), Mesh()).collectives()
    assert [(c.kind, c.axes, c.op, c.group_size, c.phase, c.value) for c in found] == [
        ("all_reduce", ("tp",), "max", 4, "fwd", "a"),
        ("all_gather", ("tp:0",), "", 2, "fwd", "g"),
        ("reduce_scatter", ("tp",), "sum", 4, "bwd", "r"),
        ("all_to_all", ("tp",), "", 4, "bwd", "t"),
        ("permute", ("dp",), "", 2, "bwd", "p"),
    ]
    # 10 rows over 4 are stored as 3 a rank, 6 columns over 4 as 2: padding travels too.
    assert [c.payload_bytes for c in found] == [10 * 6 * 4, 10 * 6 * 4, 12 * 6 * 4, 3 * 8 * 4, 10 * 2 * 4]
    assert [c.bytes_per_rank for c in found] == [2 * 3 * 60, 5 * 6 * 4, 3 * 3 * 6 * 4, 3 * 3 * 2 * 4, 80]


class Counting:
    """A communicator that counts what a rank would send under the algorithms of `collectives`' table."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.sent = mesh, 0.0

    def all_reduce(self, x: torch.Tensor, op: str, axes: Any) -> torch.Tensor:
        k = self.mesh.size(axes)
        self.sent += 2 * (k - 1) / k * x.nbytes
        return x

    def all_gather(self, x: torch.Tensor, axes: Any) -> torch.Tensor:
        self.sent += (self.mesh.size(axes) - 1) * x.nbytes
        return torch.stack([x] * self.mesh.size(axes))

    def reduce_scatter(self, x: torch.Tensor, op: str, axes: Any) -> torch.Tensor:
        self.sent += x[1:].nbytes
        return x[0]

    def all_to_all(self, x: torch.Tensor, axes: Any) -> torch.Tensor:
        self.sent += x[1:].nbytes
        return x

    def all_to_all_uneven(self, x: torch.Tensor, axes: Any, sizes: Any) -> torch.Tensor:
        self.sent += x.nbytes
        return x

    def permute(self, x: torch.Tensor, axes: Any, source: Any) -> torch.Tensor:
        self.sent += x.nbytes
        return x


def test_bytes_are_those_that_the_kernels_move() -> None:
    graph = parse(COLLECTIVES)
    values: dict[fx.Node, torch.Tensor] = {graph.placeholders[0]: torch.ones(10, 6)}
    claimed = {c.value: c.bytes_per_rank for c in Program(graph, graph, graph.mesh).collectives()}
    for node in graph.calls():
        counting = Counting(graph.mesh)
        with running(RankContext(graph.mesh, graph.mesh.coordinate(0), counting)):
            values[node] = node.target(*fx.map_arg(node.args, values.__getitem__))  # type: ignore[operator,arg-type]
        assert claimed.get(info(node).name, 0) == counting.sent


def test_human_bytes() -> None:
    assert [human_bytes(n) for n in (0, 1023, 1024, 1536, 32 << 20, 5 << 50)] == [
        "0 B",
        "1023 B",
        "1 KiB",
        "1.5 KiB",
        "32 MiB",
        "5120 TiB",
    ]


# ---------------------------------------------------------------------- files
def same(a: Program, b: Program) -> None:
    assert a.text() == b.text()
    assert print_graph(a.reference) == print_graph(b.reference)
    assert (a.mesh, a.diagnostics, a.annotations) == (b.mesh, b.diagnostics, b.annotations)
    assert list(a.constants) == list(b.constants)
    for name, tensor in a.constants.items():
        assert tensor.dtype == b.constants[name].dtype
        assert torch.equal(tensor, b.constants[name])


def test_save_and_load(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    path.write_text("an older file")
    program().save(path)
    loaded = Program.load(path)
    same(loaded, program())
    assert loaded.plan == {"mesh": "dp=2,tp=2", "sizes": [1, 2], "by_rank": {"10": "a", "9": "b"}}
    assert loaded.to_json() == path.read_text()
    assert json.loads(path.read_text())["format"] == "shardc-program"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    program().save(path)
    before = path.read_text()
    broken = Program(mlp(), mlp(), MESH, plan={"loss": print})
    with pytest.raises(TypeError):
        broken.save(path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ShardcError, match=r"SC409.*cannot write .*none/step.json"):
        program().save(tmp_path / "none" / "step.json")
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ShardcError, match="SC409"):
        program().save(tmp_path / "file" / "step.json")


@settings(max_examples=30)
@given(graphs())
def test_any_program_reads_back(graph: Graph) -> None:
    text = Program(graph, graph, graph.mesh).to_json()
    content = json.loads(text)["content"]  # not by from_json, which refuses what is drawn here and is unsound
    assert Program(**Program.fields_of(content)).to_json() == text


@pytest.mark.parametrize("dtype", [d for d in DTYPE_NAMES if not d.is_complex], ids=DTYPE_NAMES.get)
def test_tensors_keep_every_bit(dtype: torch.dtype) -> None:
    every = (torch.arange(256) % (2 if dtype == torch.bool else 256)).to(torch.uint8).view(dtype)
    for tensor in (every.reshape(2, -1).T, every[3], every[:0].reshape(0, 3)):
        back = tensor_from_plain(json.loads(json.dumps(tensor_to_plain(tensor))))
        assert (back.dtype, back.shape) == (dtype, tensor.shape)
        assert tensor_to_plain(back) == tensor_to_plain(tensor)


def test_complex_tensors() -> None:
    assert torch.equal(tensor_from_plain(tensor_to_plain(torch.tensor([1 + 2j]))), torch.tensor([1 + 2j]))


def refused(text: str) -> str:
    with pytest.raises(ShardcError) as caught:
        Program.from_json(text, "step.json")
    return caught.value.code


def test_every_cut_is_noticed() -> None:
    text = program().to_json()
    for at in (*range(200), *range(200, len(text) - 2, 97), len(text) - 3, len(text) - 2):
        assert refused(text[:at]) == "SC401"


def test_every_alteration_is_noticed() -> None:
    text = program().to_json()
    content = text.index('"content"') + len('"content": ')
    for at in range(content, len(text) - 2, 61):
        assert refused(text[:at] + ("x" if text[at] != "x" else "y") + text[at + 1 :]) == "SC402"


def forged(change: Callable[[dict[str, Any]], None]) -> str:
    """A file whose content was changed by someone who computes checksums."""
    from shardc.ir.program import _canonical, _checksum  # pyright: ignore[reportPrivateUsage]

    data = json.loads(program().to_json())
    change(data["content"])
    data["sha256"] = _checksum(_canonical(data["content"]))
    return json.dumps(data)


def call_of(content: dict[str, Any]) -> dict[str, Any]:
    return next(node for node in content["body"]["nodes"] if node.get("call") == "relu")


FILES: dict[str, Callable[[], str]] = {
    "cut_short": lambda: program().to_json()[:1000],
    "no_program": lambda: "a letter",
    "other_json": lambda: '{"a": 1}',
    "altered": lambda: program().to_json().replace('"relu"', '"sin"'),
    "damaged": lambda: program().to_json().replace('"relu"', '"relu'),
    "version": lambda: program().to_json().replace('"version": 3', '"version": 7'),
    "forged_op": lambda: forged(lambda content: call_of(content).update(call="os.system", args=["true"])),
    "forged_reference": lambda: forged(lambda content: call_of(content).update(args=[{"ref": "nobody"}])),
    "forged_field": lambda: forged(lambda content: content["diagnostics"][0].update(code="SC999")),
    "forged_tensor": lambda: forged(lambda content: content["constants"]["mask"].update(shape=[7])),
}


@pytest.mark.parametrize("name", FILES)
def test_refused_files(name: str, golden: Callable[[str, str], None]) -> None:
    with pytest.raises(ShardcError) as caught:
        Program.from_json(FILES[name](), "step.json")
    golden(f"program_errors/{name}.txt", str(caught.value).replace(torch.__version__, "VERSION"))


def test_a_binary_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"PK\x03\x04\xff\xfe")
    with pytest.raises(ShardcError) as caught:
        Program.load(tmp_path / "model.pt")
    assert caught.value.code == "SC401"


# ---------------------------------------------------------------------- other forms
def test_python_runs_and_agrees() -> None:
    graph = mlp(sharded=False)
    scope: dict[str, Any] = {}
    exec(emit_python(graph), scope)
    inputs = [mlp_inputs()[port.name] for port in graph.inputs]
    expected = fx.Interpreter(fx.GraphModule({}, graph.fx)).run(*inputs)
    for got, want in zip(scope["step"](*inputs), expected, strict=True):
        assert torch.equal(got, want)


@settings(max_examples=50)
@given(graphs())
def test_python_compiles(graph: Graph) -> None:
    compile(emit_python(graph), "step.py", "exec")


def test_golden_python(golden: Callable[[str, str], None]) -> None:
    golden("text/mlp.py.txt", emit_python(mlp()))


def test_golden_dot(golden: Callable[[str, str], None]) -> None:
    golden("text/mlp.dot", emit_dot(mlp()))


@settings(max_examples=30)
@given(graphs())
def test_dot_names_every_call_once(graph: Graph) -> None:
    text = emit_dot(graph)
    for i, node in enumerate(graph.fx.nodes):
        if node in list(graph.calls()):
            assert len(re.findall(rf"^ +n{i} \[label", text, re.MULTILINE)) == 1
