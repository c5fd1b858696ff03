"""Reads a graph's text, `text.print_graph` backwards: recursive descent with one cursor, one function a construct.

Errors (SC404) point at the character they mean and say what was expected there:

    error[SC404 graph-text]: no value is named %fc.mn here
      --> <text>:4:15
       |   %act = relu(%fc.mn) : f32[4, 12@tp]
       |               ^
      hint:   did you mean %fc.mm?

Ops are looked up by name (see `schema`), never imported. Lines may be broken anywhere. Longer than 400 lines: the
functions of one grammar, which call each other.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn, TypeVar, cast, get_args

from torch import fx
from torch._ops import OpOverload

from shardc.ir.derive_provenance import derive_origins, module_of, parameter_of_state
from shardc.ir.diagnostic import ShardcError, did_you_mean, error, suggest
from shardc.ir.graph import Graph, Phase, Port, Role, Tokens, ValueInfo, info, op_name, set_info
from shardc.ir.mesh import AXIS_NAME, Mesh
from shardc.ir.microbatch import HALVES, checked_count
from shardc.ir.schema import WORDS, arrange, find_op, schema_of, unfit, yields_one_tensor
from shardc.ir.text import BARE_NAME
from shardc.ir.types import DTYPES, Axes, TensorType

BLANK = re.compile(r"(?:\s|#[^\n]*)*")
STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
NUMBER = re.compile(r"-?(?:\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|inf\b)")
WORD = re.compile(r"[A-Za-z_][\w.]*")
KEYWORD = re.compile(r"[A-Za-z_]\w*(?=\s*=)")
FACTOR = re.compile(r"[^\s,:{}]+")
TYPE = re.compile(r"\w+\[[^\]\n]*\](?: *\|\w+ [\w:]+)*")
LABEL = re.compile(r"(?:fwd|bwd|opt)(?=:)")
NOTHING = re.compile(r"_(?![\w.])")
NESTED = 16  # lists, one in another
ROLES: tuple[Role, ...] = get_args(Role)
T = TypeVar("T")


def parse(text: str, filename: str = "<text>") -> Graph:
    """The graph that a text describes. Names give the modules: `%d.h.0.mlp.mm` lies in h.0.mlp."""
    return _Parser(text, filename).graph()


class _Parser:
    def __init__(self, text: str, filename: str) -> None:
        self.text, self.filename = text, filename
        self.position = self.nested = 0  # in so many lists
        self.fx = fx.Graph()
        self.values: dict[str, fx.Node] = {}
        self.inputs: list[Port] = []
        self.phase: Phase = "fwd"
        self.several: list[fx.Node] = []  # calls of several results, which the text does not name

    # ------------------------------------------------------------------ statements
    def graph(self) -> Graph:
        self.expect("graph")
        self.expect("@")
        name = self.name("a name for the graph")
        mesh = self.mesh()
        microbatches, halves, gathers_once = self.microbatches(), self.halves(), self.gathers_once()
        tokens = self.tokens()
        self.expect("{")
        while not self.take(r"return\b"):
            if label := self.take(LABEL):
                self.phase = cast(Phase, label)
                self.expect(":")
            else:
                self.statement()
        outputs: list[tuple[Port, fx.Node]] = []
        while not self.take(r"\}"):
            if outputs:
                self.expect(",", "',' or '}'")
            port = self.port()
            self.expect("=")
            outputs.append((port, self.value()))
        if self.peek():
            self.fail("the end of the text")
        self.fx.output(tuple(node for _, node in outputs))
        self.name_calls()
        graph = Graph(self.fx, mesh, self.inputs, [port for port, _ in outputs], name)
        graph.microbatches, graph.halves, graph.tokens = microbatches, halves, tokens
        graph.gathers_once = gathers_once
        derive_origins(graph)
        return graph

    def microbatches(self) -> int:
        if not self.take(r"microbatches\b"):
            return 1
        self.expect("(")
        count = self.take(r"[1-9]\d*") or self.fail("a number of microbatches")
        self.expect(")")
        return checked_count(int(count[:20]))

    def halves(self) -> int:
        if not self.take(r"halves\b"):
            return 1
        self.expect("(")
        self.expect(str(HALVES))
        self.expect(")")
        return HALVES

    def gathers_once(self) -> bool:
        if not self.take(r"gathers\b"):
            return False
        for part in "(1)":
            self.expect(part)
        return True

    def tokens(self) -> Tokens | None:
        if not self.take(r"tokens\b"):
            return None
        self.expect("(")
        name = json.loads(self.take(STRING) or self.fail("an input in quotes"))
        numbers: list[int] = []
        for word in ("ignore", "shift"):
            self.expect(",")
            self.expect(word)
            self.expect("=")
            numbers.append(int(self.take(r"-?\d+") or self.fail("a whole number")))
        self.expect(")")
        return Tokens(name, *numbers)

    def mesh(self) -> Mesh:
        self.expect("mesh")
        self.expect("(")
        start = self.skip()
        try:
            mesh = Mesh.parse(self.take(r"[^)\n]*") or "")
        except ShardcError as wrong:
            self.refuse(wrong.diagnostics[0].message, start, wrong.diagnostics[0].hint)
        self.expect(")")
        return mesh

    def statement(self) -> None:
        start = self.skip()
        targets = self.list_of(self.target)
        self.expect("=")
        word_start = self.skip()
        word = self.take(WORD) or self.fail("an op, or the role of an input")
        if self.peek() == '"':
            self.position = word_start
            self.placeholder(targets, start)
        else:
            self.call(targets, word, start, word_start)

    def target(self) -> str | None:
        if self.take(NOTHING):
            return None
        self.expect("%", "a value, '_', a label or 'return'")
        return self.name("the name of a value")

    def placeholder(self, targets: list[str | None], start: int) -> None:
        port = self.port()
        self.expect(":")
        if len(targets) != 1 or targets[0] is None:
            self.refuse("an input is one named value", start)
        about = ValueInfo(targets[0], self.type(), phase=self.phase, constant=self.constant())
        node = self.fx.placeholder(f"in_{len(self.inputs)}")
        self.inputs.append(port)
        self.define(node, about, start)

    def port(self) -> Port:
        start = self.skip()
        role = self.take(WORD) or self.fail("the role of an input or output")
        if role not in ROLES:
            self.refuse(f"'{role}' is no role of an input or output", start, did_you_mean(role, ROLES, "roles"))
        name = self.string("its name in quotes")
        aliases: list[str] = []
        if self.take(r"aliases\b"):
            self.expect("(")
            aliases = self.list_of(lambda: self.string("a name in quotes"))
            self.expect(")")
        parameter = parameter_of_state(name) if role == "state" else ""
        return Port(role, name, tuple(aliases), not self.take(r"frozen\b"), parameter)

    def call(self, targets: list[str | None], word: str, start: int, position: int) -> None:
        op = find_op(word)
        if op is None:
            self.refuse(f"there is no op '{word}'", position, "ops are those of torch.ops.aten and torch.ops.shardc")
        if reason := unfit(op):
            self.refuse(
                f"no program may call '{word}', which {reason}", position, "a program's ops are functions of tensors"
            )
        args, kwargs = self.arguments(op, position)
        about = ValueInfo(
            "",
            None,
            phase=self.phase,
            assignment=tuple(self.braced(self.factor, self.split)) if self.peek() == "{" else (),
            passes=self.axes() if self.take(r"passes\b") else (),
            fallback=tuple(self.braced(self.axis, self.factor)) if self.take(r"fallback\b") else (),
        )
        self.expect(":")
        types = self.list_of(lambda: None if self.take(NOTHING) else self.type())
        about = replace(about, constant=self.constant())
        if len(types) != len(targets):
            self.refuse(f"{len(targets)} results have {len(types)} types", start)
        node = self.fx.call_function(op, args, kwargs)
        if yields_one_tensor(op):
            if len(targets) != 1 or targets[0] is None or types[0] is None:
                self.refuse(f"{op_name(op)} yields one tensor", start, "name it, and give its type")
            fqn = module_of(targets[0], self.phase)
            self.define(node, replace(about, name=targets[0], type=types[0], fqn=fqn), start)
            return
        named = zip(targets, types, strict=True)
        declared = tuple(t if t is None or name is None else t.replicated() for name, t in named)
        set_info(node, replace(about, name=_call_name(op, targets), results=declared))
        self.several.append(node)
        for i, (name, type) in enumerate(zip(targets, types, strict=True)):
            if name is None:
                continue
            if type is None:
                self.refuse(f"%{name} has no type", start, "a result that is no tensor has no name: write '_'")
            item = ValueInfo(name, type, fqn=module_of(name, self.phase), phase=about.phase, constant=about.constant)
            self.define(self.fx.call_function(operator.getitem, (node, i)), item, start)

    def name_calls(self) -> None:
        """Calls of several results are named last, so that they never take a name that the text gives."""
        used = set(self.values)
        for node in self.several:
            base = name = info(node).name
            count = 0
            while name in used:
                count += 1
                name = f"{base}_{count}"
            used.add(name)
            about = info(node)
            set_info(node, replace(about, name=name, fqn=module_of(name, about.phase)))

    def define(self, node: fx.Node, about: ValueInfo, start: int) -> None:
        if about.name in self.values:
            self.refuse(f"%{about.name} is defined twice", start)
        self.values[about.name] = node
        set_info(node, about)

    # ------------------------------------------------------------------ arguments
    def arguments(self, op: OpOverload, position: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        self.expect("(")
        while not self.take(r"\)"):
            if args or kwargs:
                self.expect(",", "',' or ')'")
            start = self.skip()
            name = self.take(KEYWORD)
            if name is None:
                if kwargs:
                    self.refuse("an argument by position follows one by name", start)
                args.append(self.argument())
            else:
                self.expect("=")
                if name in kwargs:
                    self.refuse(f"'{name}' is given twice", start)
                kwargs[name] = self.argument()
        try:
            return arrange(op, args, kwargs)
        except ValueError as wrong:
            self.refuse(str(wrong), position, str(schema_of(op)))

    def argument(self) -> Any:
        match self.peek():
            case "%":
                return self.value()
            case '"':
                return self.string("a string")
            case "[":
                self.expect("[")
                if self.nested == NESTED:
                    self.refuse(f"lists lie in {NESTED} others at most", self.position)
                self.nested += 1
                items = [] if self.peek() == "]" else self.list_of(self.argument)
                self.nested -= 1
                self.expect("]", "',' or ']'")
                return items
            case _:
                return self.scalar()

    def scalar(self) -> Any:
        number = self.take(NUMBER)
        if number is not None:
            return int(number) if re.fullmatch(r"-?\d{1,40}", number) else float(number)
        start = self.skip()
        word = self.take(WORD)
        if word not in WORDS:
            self.position = start
            near = suggest(word, WORDS) if word else None
            self.fail("an argument", f"did you mean {near}?" if near else None)
        return WORDS[word]

    def value(self) -> fx.Node:
        start = self.skip()
        self.expect("%", "a value")
        name = self.name("the name of a value")
        if name not in self.values:
            near = suggest(name, self.values)
            self.refuse(f"no value is named %{name} here", start, f"did you mean %{near}?" if near else None)
        return self.values[name]

    def braced(self, key: Callable[[], str], item: Callable[[], T]) -> list[tuple[str, T]]:
        def pair() -> tuple[str, T]:
            left = key()
            self.expect(":")
            return left, item()

        self.expect("{")
        pairs = self.list_of(pair)
        self.expect("}", "',' or '}'")
        return pairs

    # ------------------------------------------------------------------ words
    def type(self) -> TensorType:
        start = self.skip()
        text = self.take(TYPE)
        if text is None:
            self.fail("a type as f32[8@dp, (3 8@tp 64)]", None if self.peek() else "the text ends too early")
        dtype = text.partition("[")[0]
        if dtype not in DTYPES:
            self.refuse(f"there is no dtype '{dtype}'", start, did_you_mean(dtype, DTYPES, "dtypes"))
        try:
            type = TensorType.parse(text)
        except ValueError:
            self.refuse(f"'{text}' is no type", start, "write a type as f32[8@dp, (3 8@tp 64)] |sum tp")
        if str(type).replace(" ", "") != text.replace(" ", ""):
            self.refuse(f"'{text}' is no type", start, f"do you mean {type}?")
        return type

    def constant(self) -> bool:
        return self.take(r"!const\b") is not None

    def axis(self) -> str:
        return self.take(AXIS_NAME) or self.fail("a mesh axis")

    def axes(self) -> Axes:
        names = [self.axis()]
        while self.take(r"\."):
            names.append(self.axis())
        return tuple(names)

    def split(self) -> Axes:
        return () if self.take(r"-") else self.axes()

    def factor(self) -> str:
        return self.take(FACTOR) or self.fail("a factor of the op's rule")

    def name(self, what: str) -> str:
        return self.string(what) if self.peek() == '"' else self.take(BARE_NAME) or self.fail(what)

    def string(self, what: str) -> str:
        start = self.skip()
        text = self.take(STRING) or self.fail(what)
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            self.refuse(f"{text} is no string", start, "strings are written as in JSON")

    # ------------------------------------------------------------------ the cursor
    def list_of(self, item: Callable[[], T]) -> list[T]:
        items = [item()]
        while self.take(r","):
            items.append(item())
        return items

    def skip(self) -> int:
        """Pass blanks and comments; the position after them."""
        match = BLANK.match(self.text, self.position)
        assert match is not None, "BLANK matches nothing too"
        self.position = match.end()
        return self.position

    def peek(self) -> str:
        """The character under the cursor, or nothing at the end."""
        self.skip()
        return self.text[self.position : self.position + 1]

    def take(self, pattern: str | re.Pattern[str]) -> str | None:
        self.skip()
        match = re.compile(pattern).match(self.text, self.position)
        if match is None:
            return None
        self.position = match.end()
        return match.group()

    def expect(self, literal: str, what: str | None = None) -> None:
        self.skip()
        if not self.text.startswith(literal, self.position):
            self.fail(what or f"'{literal}'")
        self.position += len(literal)

    def fail(self, expected: str, hint: str | None = None) -> NoReturn:
        self.skip()
        word = re.compile(r"[\w.]+|.").match(self.text, self.position)
        actual = f"'{word.group()}'" if word else "the end"
        self.refuse(f"expected {expected}, found {actual}", self.position, hint)

    def refuse(self, message: str, position: int, hint: str | None = None) -> NoReturn:
        """Stop with a caret under the character at `position`."""
        first = self.text.rfind("\n", 0, position) + 1
        line = self.text[first:].partition("\n")[0]
        number = self.text.count("\n", 0, position) + 1
        location = f"{self.filename}:{number}:{position - first + 1}"
        quoted = f"{line}\n{' ' * (position - first)}^"
        raise error("SC404", message, location=location, source_text=quoted, hint=hint)


def _call_name(op: OpOverload, targets: list[str | None]) -> str:
    """`h.0.ln` when its results are `h.0.ln.0`, `h.0.ln.1`, as `ingest` has it; else the op's name in their module."""
    for i, name in enumerate(targets):
        if name is not None and name.endswith(f".{i}"):
            return name.removesuffix(f".{i}")
    first = next((name for name in targets if name is not None), "")
    return ".".join(filter(None, (first.rpartition(".")[0], op_name(op).partition(".")[0])))
