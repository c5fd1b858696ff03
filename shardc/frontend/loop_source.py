"""Functions with loops over a number of steps, rewritten so that a loop may be one op.

    for t in range(n):            _steps0 = range(n)
        h = f(h, x[:, t])         def _step0(t, h, x): h = _call(f, h, x[:, t]); return locals()
        ys.append(h)       ->     _done0 = roll(_step0, _steps0, locals(), ...)
                                  if _done0 is None:  the loop as it was
                                  else: t = _done0["t"]; h = _done0["h"]; ...

Only a loop whose body assigns to local names, stores into tensors at the step's index and appends to lists is
rewritten. What else a body calls is looked into when it is called (`called` in `loop_body`): a Python function must
be as plain, `plain_function` rewrites it. Line numbers stay what they are, so that sources of values do.
"""

from __future__ import annotations

import ast
import copy
import dis
import linecache
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

PLAIN = (
    ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.If, ast.For, ast.Pass, ast.Return, ast.Name, ast.Load,
    ast.Store, ast.Constant, ast.Tuple, ast.List, ast.Dict, ast.Attribute, ast.Subscript, ast.Slice, ast.Call,
    ast.keyword, ast.Starred, ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.operator, ast.unaryop,
    ast.boolop, ast.cmpop, ast.JoinedStr, ast.FormattedValue, ast.Raise, ast.Assert,
)  # fmt: skip
ROLLED = "shardc.frontend.rolled_loops"
BODY = "shardc.frontend.loop_body"


@dataclass(frozen=True)
class Loop:
    """What is known of a loop from its source: names that its body assigns and reads, tensors that it stores into,
    lists that it appends to, names that are read elsewhere in the function, and what it indexes by the step."""

    assigned: tuple[str, ...]
    read: tuple[str, ...]
    stored: tuple[str, ...]
    appended: tuple[str, ...]
    wanted: tuple[str, ...]
    indexed: tuple[str, ...]  # names that its body indexes by the number of the step
    stacked: tuple[tuple[str, int], ...]  # lists that are only stacked or concatenated, and along which dim


@lru_cache(maxsize=64)
def _tree(filename: str) -> tuple[ast.Module | None, frozenset[CodeType]]:
    """A file, and the codes that it is compiled to."""
    source = "".join(linecache.getlines(filename))
    try:
        return ast.parse(source), frozenset(_codes(compile(source, filename, "exec", dont_inherit=True)))
    except (SyntaxError, ValueError):
        return None, frozenset()


@lru_cache(maxsize=1024)
def _definition(code: CodeType) -> ast.FunctionDef | None:
    """The source of a function; None if its file says something else by now."""
    tree, codes = _tree(code.co_filename)
    if code not in codes:
        return None
    for node in ast.walk(tree) if tree is not None else ():
        first = min([d.lineno for d in node.decorator_list] + [node.lineno]) if isinstance(node, ast.FunctionDef) else 0
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name and first == code.co_firstlineno:
            return copy.deepcopy(node)
    return None


def _names(nodes: ast.AST | list[ast.stmt], context: type[ast.expr_context]) -> list[str]:
    """Names that are read, or assigned, in order and once each."""
    several = nodes if isinstance(nodes, list) else [nodes]
    found = [n for stmt in several for n in ast.walk(stmt) if isinstance(n, ast.Name) and isinstance(n.ctx, context)]
    return list(dict.fromkeys(name.id for name in found))


def _appends(stmt: ast.AST) -> str | None:
    """The list that a statement appends to."""
    call = stmt.value if isinstance(stmt, ast.Expr) else None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "append":
        return call.func.value.id if isinstance(call.func.value, ast.Name) and len(call.args) == 1 else None
    return None


def _is_plain(body: list[ast.stmt], *, in_loop: bool) -> bool:
    for stmt in body:
        for node in ast.walk(stmt):
            if not isinstance(node, PLAIN) or (in_loop and isinstance(node, ast.Return)):
                return False
            if isinstance(node, ast.AugAssign) and not isinstance(node.target, ast.Name):
                return False
            stores = isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, ast.Store)
            if stores and not (in_loop and isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name)):
                return False
            acts = isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)
            if acts and not (in_loop and _appends(node) is not None):
                return False
    return True


class _Calls(ast.NodeTransformer):
    """Each call goes through `called`, but for appends to lists; `x += y` becomes `x = unshared(x) + y`."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        return ast.copy_location(ast.Call(_helper("called"), [node.func, *node.args], node.keywords), node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if _appends(node) is None:
            return self.generic_visit(node)
        assert isinstance(node.value, ast.Call)
        node.value.args = [self.visit(arg) for arg in node.value.args]
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        assert isinstance(node.target, ast.Name)
        before = ast.Call(_helper("unshared"), [ast.Name(node.target.id, ast.Load())], [])
        return ast.copy_location(ast.Assign([node.target], ast.BinOp(before, node.op, self.visit(node.value))), node)


def _helper(name: str) -> ast.expr:
    fromlist = ast.List([ast.Constant(name)], ast.Load())
    module = ast.Call(
        ast.Name("__import__", ast.Load()),
        [ast.Constant(ROLLED if name == "roll" else BODY), ast.Constant(None), ast.Constant(None), fromlist],
        [],
    )
    return ast.Attribute(module, name, ast.Load())


def _function(name: str, parameters: Sequence[str], body: list[ast.stmt]) -> ast.FunctionDef:
    (made,) = ast.parse(f"def {name}({', '.join(parameters)}): pass").body  # with the fields of this Python's version
    assert isinstance(made, ast.FunctionDef)
    for node in ast.walk(made):  # its lines are those of the loop
        for field in ("lineno", "col_offset", "end_lineno", "end_col_offset"):
            node.__dict__.pop(field, None)
    made.body = body
    return made


def _guarded(body: list[ast.stmt]) -> list[ast.stmt]:
    return [_Calls().visit(copy.deepcopy(stmt)) for stmt in body]


def _is_loop(node: ast.AST) -> bool:
    """`for NAME in range(...)`, whose body is plain."""
    return (
        isinstance(node, ast.For)
        and isinstance(node.target, ast.Name)
        and isinstance(node.iter, ast.Call)
        and isinstance(node.iter.func, ast.Name)
        and node.iter.func.id == "range"
        and len(node.iter.args) in (1, 2)
        and not node.iter.keywords
        and not node.orelse
        and _is_plain(node.body, in_loop=True)
    )


def _indexed(subscripts: Sequence[ast.Subscript], step: ast.expr) -> tuple[str, ...]:
    """The names that subscripts by the number of the step index."""
    by_step = [n for n in subscripts if isinstance(step, ast.Name) and step.id in _names(n.slice, ast.Load)]
    return tuple(dict.fromkeys(n.value.id for n in by_step if isinstance(n.value, ast.Name)))


class _Rewriter(ast.NodeTransformer):
    """The loops of one function."""

    def __init__(self, function: ast.FunctionDef, code: CodeType) -> None:
        self.function, self.count = function, 0
        self.local = frozenset(code.co_varnames + code.co_cellvars)
        self.shared = frozenset(code.co_cellvars)  # functions within read these, which a step does not change
        self.known = {id(n): self._known(n) for n in ast.walk(function) if isinstance(n, ast.For) and _is_loop(n)}

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self.generic_visit(node) if node is self.function else node

    def _as_it_is(self, node: Any) -> Any:
        return node

    visit_Lambda = visit_AsyncFunctionDef = visit_ClassDef = _as_it_is  # noqa: N815

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if _joined(node) is not None:
            return ast.copy_location(ast.Call(_helper("joined"), [node.func, *node.args], node.keywords), node)
        return node

    def visit_For(self, node: ast.For) -> ast.AST | list[ast.stmt]:
        loop = self.known.get(id(node))
        if loop is None or not self.local.issuperset(loop.assigned) or not self.shared.isdisjoint(loop.assigned):
            return self.generic_visit(node)
        number, self.count = self.count, self.count + 1
        steps, step, done = f"_steps{number}", f"_step{number}", f"_done{number}"
        assert isinstance(node.target, ast.Name)
        parameters = [node.target.id] + [
            name for name in dict.fromkeys((*loop.read, *loop.assigned)) if name != node.target.id
        ]
        returned = ast.Return(ast.Call(ast.Name("locals", ast.Load()), [], []))
        taken = _function(step, parameters, [*_guarded(node.body), returned])
        self.generic_visit(node)  # the loop as it was may hold others
        fields: Any = tuple(getattr(loop, field) for field in Loop.__dataclass_fields__)
        known = ast.Constant(fields)
        rolled = ast.Call(
            _helper("roll"),
            [
                ast.Name(step, ast.Load()),
                ast.Name(steps, ast.Load()),
                ast.Call(ast.Name("locals", ast.Load()), [], []),
                known,
            ],
            [],
        )
        results: list[ast.stmt] = []
        for name in dict.fromkeys((node.target.id, *loop.assigned, *loop.appended)):
            has = ast.Compare(ast.Constant(name), [ast.In()], [ast.Name(done, ast.Load())])
            value = ast.Subscript(ast.Name(done, ast.Load()), ast.Constant(name), ast.Load())
            results.append(ast.If(has, [ast.Assign([ast.Name(name, ast.Store())], value)], []))
        original = ast.For(node.target, ast.Name(steps, ast.Load()), node.body, [], None)
        nothing = ast.Compare(ast.Name(done, ast.Load()), [ast.Is()], [ast.Constant(None)])
        statements: list[ast.stmt] = [
            ast.Assign([ast.Name(steps, ast.Store())], node.iter),
            taken,
            ast.Assign([ast.Name(done, ast.Store())], rolled),
            ast.If(nothing, [original], results),
        ]
        for stmt in statements:
            for inner in ast.walk(stmt):
                if not hasattr(inner, "lineno"):
                    ast.copy_location(inner, node)
        return statements

    def _known(self, node: ast.For) -> Loop:
        outside = _reads_but(self.function, node)
        around = _loop_around(self.function, node)
        outside += _read_before(node.body) if around is not None else []
        appended = [name for stmt in node.body for n in ast.walk(stmt) if (name := _appends(n)) is not None]
        subscripts = [n for s in node.body for n in ast.walk(s) if isinstance(n, ast.Subscript)]
        stored = [n.value.id for n in subscripts if isinstance(n.ctx, ast.Store) and isinstance(n.value, ast.Name)]
        joins = [join for n in ast.walk(self.function) if (join := _joined(n)) is not None]
        stacked = tuple(
            (name, next(dim for joined, dim in joins if joined == name))
            for name in dict.fromkeys(appended)
            if outside.count(name) == sum(joined == name for joined, _ in joins) > 0 and self._is_fresh(name, around)
        )
        return Loop(
            tuple(_names(node.body, ast.Store)),
            tuple(name for name in _names(node.body, ast.Load) if name in self.local),
            tuple(dict.fromkeys(stored)),
            tuple(dict.fromkeys(appended)),
            tuple(dict.fromkeys(outside)),
            _indexed(subscripts, node.target),
            stacked,
        )

    def _is_fresh(self, name: str, around: ast.For | ast.While | None) -> bool:
        """Is a list made here, and known by no other name? In a loop `around` the loop, it is made each time."""
        statements = ast.walk(self.function) if around is None else around.body
        made = [n for n in statements if isinstance(n, ast.Assign) and isinstance(n.value, ast.List)]
        fresh = [n for n in made if len(n.targets) == 1 and isinstance(n.targets[0], ast.Name) and not _elements(n)]
        targets = [id(n.targets[0]) for n in fresh]
        stores = [n for n in ast.walk(self.function) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)]
        arguments = [n.arg for n in ast.walk(self.function) if isinstance(n, ast.arg)]
        return name not in arguments and all(id(n) in targets for n in stores if n.id == name)


def _loop_around(function: ast.FunctionDef, loop: ast.For) -> ast.For | ast.While | None:
    """The innermost of the loops that a loop lies in."""
    around = [n for n in ast.walk(function) if isinstance(n, (ast.For, ast.While)) and n is not loop]
    within = [n for n in around if any(inner is loop for inner in ast.walk(n))]
    return within[-1] if within else None  # `walk` comes to the outer ones first


def _read_before(body: Sequence[ast.stmt]) -> list[str]:
    """Names that a body may read before it assigns to them: what they are behind a loop, its next run reads."""
    read: list[str] = []
    assigned: set[str] = set()
    for stmt in body:
        plain = isinstance(stmt, (ast.Assign, ast.AnnAssign))
        added = [n.target.id for n in ast.walk(stmt) if isinstance(n, ast.AugAssign) and isinstance(n.target, ast.Name)]
        read += [name for name in (*_names(stmt, ast.Load), *added) if name not in assigned]
        assigned.update(_names(stmt, ast.Store) if plain else ())
    return read


def _elements(node: ast.Assign) -> list[ast.expr]:
    assert isinstance(node.value, ast.List)
    return node.value.elts


def _reads_but(function: ast.FunctionDef, loop: ast.For) -> list[str]:
    """Every read of a name in a function, but for those in a loop's body."""
    inside = {id(n) for stmt in loop.body for n in ast.walk(stmt)}
    added = {id(n.target) for n in ast.walk(function) if isinstance(n, ast.AugAssign)}
    names = [n for n in ast.walk(function) if isinstance(n, ast.Name)]
    return [n.id for n in names if (not isinstance(n.ctx, ast.Store) or id(n) in added) and id(n) not in inside]


def _joined(node: ast.AST) -> tuple[str, int] | None:
    """The list of `torch.stack(LIST, DIM)` or `torch.cat(LIST, DIM)`, and the dim."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or len(node.args) not in (1, 2):
        return None
    if node.func.attr not in ("stack", "cat") or not isinstance(node.args[0], ast.Name):
        return None
    if any(keyword.arg != "dim" for keyword in node.keywords):
        return None
    dims = [*node.args[1:], *(keyword.value for keyword in node.keywords)]
    try:
        dim = ast.literal_eval(dims[0]) if dims else 0
    except ValueError:
        return None
    return (node.args[0].id, dim) if type(dim) is int else None


def _compiled(function: ast.FunctionDef, code: CodeType) -> CodeType | None:
    """The code of a rewritten function, with the variables of enclosing scopes that the original has."""
    function.decorator_list, function.returns = [], None
    arguments = function.args
    for arg in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if arg is not None:
            arg.annotation = None
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [None if default is None else ast.Constant(None) for default in arguments.kw_defaults]
    outer = _function("_enclosing", code.co_freevars, [function])
    module = ast.fix_missing_locations(ast.Module([ast.copy_location(outer, function)], []))
    made = compile(module, code.co_filename, "exec", dont_inherit=True)
    for constant in _codes(made):
        if constant.co_name == code.co_name and constant.co_freevars == code.co_freevars:
            return constant.replace(co_firstlineno=code.co_firstlineno, co_qualname=code.co_qualname)
    return None


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def _can_be_rewritten(function: ast.FunctionDef | None, code: CodeType) -> bool:
    if function is None or code.co_flags & 0x2A0:  # generators and coroutines
        return False
    private = [n.id if isinstance(n, ast.Name) else n.attr for n in ast.walk(function)
               if isinstance(n, (ast.Name, ast.Attribute))]  # fmt: skip
    return not any(name.startswith("__") and not name.endswith("__") for name in private)


def has_loop(code: CodeType) -> bool:
    """Has a function a `for`? The bytecode alone says so: most functions that name `range` need no parsing."""
    return dis.opmap["FOR_ITER"] in code.co_code[::2]


@lru_cache(maxsize=1024)
def with_rolled_loops(code: CodeType) -> CodeType | None:
    """The code of a function whose loops may become one op; None if it has no such loop."""
    function = _definition(code)
    if not _can_be_rewritten(function, code):
        return None
    assert function is not None
    rewriter = _Rewriter(function, code)
    rewriter.visit(function)
    return _compiled(function, code) if rewriter.count else None


@lru_cache(maxsize=1024)
def _plain_code(code: CodeType) -> CodeType | None:
    function = _definition(code)
    if not _can_be_rewritten(function, code):
        return None
    assert function is not None
    if not _is_plain(function.body, in_loop=False):
        return None
    function.body = _guarded(function.body)
    return _compiled(function, code)


def plain_function(function: FunctionType) -> FunctionType | None:
    """A function that does nothing but compute its result, whose calls are looked into; None if it may do more."""
    code = _plain_code(function.__code__)
    if code is None or hasattr(function, "__wrapped__"):
        return None
    made = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made
