"""The lines of one generated function, and what has a name in them.

Variables are called after their op and value: `mul_7` is value %7. A value of columns has one variable for each chunk
of columns, `mul_7_0`, `mul_7_1`. Before every reduction, elements past the end are replaced by its neutral one.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kernels_triton.fused import addresses
from kernels_triton.fused.behind import end, readable
from kernels_triton.fused.expressions import TYPES, WORD, Variable, converted, expression, operand, word
from kernels_triton.fused.kernel import Kernel, Ref, Step, Store, Walk, reads
from kernels_triton.fused.schedules import Plan, needed
from kernels_triton.fused.table import OPS, Op, neutral
from shardc.ir.ops.random import least_word

Scope = dict[tuple[int, int], Variable]
SMALL = 2.0**-100  # such a number's reciprocal is as exact as others'


@dataclass
class Writer:
    """`scope` has a variable for each value and chunk of columns; chunk 0 is also a row value's and a scalar's.

    `finishing`: the second function, which adds the lines of partial sums.
    """

    kernel: Kernel
    plan: Plan
    lines: list[str] = field(default_factory=list)
    depth: int = 1
    scope: Scope = field(default_factory=dict)
    used: dict[str, None] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)  # of kernels_triton.kernels.functions, beside what ops call
    finishing: bool = False
    starts: dict[int, str] = field(default_factory=dict)  # of each chunk, its first column

    # ------------------------------------------------------------------------------------------------- the frame
    def function(self, name: str, about: str) -> list[str]:
        return ["@triton.jit", f"def {name}({', '.join(self.arguments)}):", f'    """{about}"""', *self.lines]

    @property
    def arguments(self) -> tuple[str, ...]:
        """Inputs, outputs, partial sums."""
        return tuple(sorted(self.used, key=lambda name: ("XYP".index(name[0]), int(name[1:]))))

    def put(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)

    @contextmanager
    def block(self, head: str) -> Generator[None]:
        self.put(head)
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    def pointer(self, name: str) -> str:
        self.used[name] = None
        return name

    @property
    def first(self) -> str:
        """The number of a program along the first axis, among those of its point of the batch dims."""
        return "i" if self.kernel.batch else "tl.program_id(0)"

    @property
    def program(self) -> str:
        """The number of a program among those that share the rows; of walks, neighbours are neighbours in memory."""
        return "tl.program_id(1)" if self.plan.style == "walk" else self.first

    @property
    def line(self) -> str:
        """The line of its partial sums."""
        line = f"(b * {self.plan.programs} + {self.program})" if self.kernel.batch else self.program
        return f"{line}{self.wide(self.plan.programs)}"

    def wide(self, programs: int) -> str:
        """What makes a line's number one of 64 bits, where the lines of so many programs reach beyond 32."""
        return ".to(tl.int64)" if self.kernel.batches * programs * self.kernel.cols > addresses.LIMIT else ""

    def put_batch(self, programs: int) -> None:
        """The point of the batch dims, for each of which there are so many programs along the first axis."""
        if self.kernel.batch:
            self.put(f"b = tl.program_id(0) // {programs}")
            self.put(f"i = tl.program_id(0) % {programs}")
            self.put_indices("b")

    def put_indices(self, of: str) -> None:
        for term in addresses.indices(self.kernel):
            if term.of == of:
                self.put(f"{term.name} = {term.definition}")

    @property
    def chunks(self) -> int:
        return max(1, self.plan.schedule.chunks) if self.plan.style == "rows" else 1

    def suffix(self, chunk: int) -> str:
        return f"_{chunk}" if self.chunks > 1 else ""

    def chunks_of(self, value: int) -> range:
        return range(self.chunks if self.kernel.varies[value][-1] else 1)

    # -------------------------------------------------------------------------------------------- masks and tiles
    def columns_masked(self, chunk: int) -> bool:
        block = self.plan.schedule.block
        if self.plan.style == "rows":
            return (chunk + 1) * block > self.kernel.cols
        return self.kernel.cols % block != 0

    @property
    def rows_masked(self) -> bool:
        return self.kernel.rows % self.plan.schedule.rows != 0

    @property
    def beyond(self) -> bool:
        """Are columns read or written behind a row's end?"""
        kernel = self.kernel
        return any(readable(given, kernel.space) for given in kernel.inputs) or any(o.padded for o in kernel.outputs)

    def mask(self, varies: Sequence[bool], chunk: int, *more: str, beyond: bool = False) -> str:
        """`, mask=...` for a tile, of rows or columns or both."""
        parts = list(more)
        if any(varies[self.kernel.batch : -1]) and self.rows_masked:
            parts.append("rm")
        if varies[-1] and self.columns_masked(chunk):
            parts.append(f"{'ce' if beyond else 'cm'}{self.suffix(chunk)}")
        return " & ".join(parts)

    def column_names(self, chunk: int) -> tuple[str, str]:
        return f"c{self.suffix(chunk)}", f"cm{self.suffix(chunk)}"

    def put_columns(self, base: str, wide: bool = False) -> None:
        block = self.plan.schedule.block
        for chunk in range(self.chunks):
            name, mask = self.column_names(chunk)
            first = base or (str(chunk * block) if chunk else "")
            self.starts[chunk] = first or "0"
            span = f"tl.arange(0, {block})[None, :]"
            self.put(f"{name} = {first} + {span}" if first else f"{name} = {span}")
            if self.columns_masked(chunk):
                self.put(f"{mask} = {name} < {self.kernel.cols}")
                if self.beyond:
                    self.put(f"ce{self.suffix(chunk)} = {name} < {end(self.kernel.cols)}")

    def is_sum(self, value: int) -> bool:
        step = self.kernel.step(value)
        return step is not None and OPS[step.op].reduces == "col"

    def closure(self, roots: Iterable[int]) -> list[int]:
        """What must be computed for these, in order; a reduction that is done already needs nothing."""
        found, todo = set[int](), list(roots)
        while todo:
            value = todo.pop()
            if value in found or self.is_sum(value):
                continue
            found.add(value)
            if (value, 0) not in self.scope:
                todo += self.kernel.values_read(value)
        return sorted(found)

    # -------------------------------------------------------------------------------------------- loads and steps
    def name(self, value: int, chunk: int, right: str, kind: str, note: str = "") -> None:
        step = self.kernel.step(value)
        name = f"x{value}" if step is None else f"{step.op}_{value}"
        if self.kernel.varies[value][-1]:
            name += self.suffix(chunk)
        self.put(f"{name} = {right}" + (f"  # {note}" if note else ""))
        self.scope[value, chunk] = Variable(name, kind)

    def only(self, value: int, chunk: int | None) -> Iterable[int]:
        """One chunk of a value, or all of them."""
        every = self.chunks_of(value)
        return every if chunk is None else every[chunk : chunk + 1]

    def load(self, values: Iterable[int], of: int | None = None) -> None:
        kernel = self.kernel
        for value in values:
            if value not in needed(kernel):
                continue
            given = kernel.inputs[value]
            kind = TYPES[given.dtype]
            for chunk in self.only(value, of):
                if (value, chunk) in self.scope:
                    continue
                at = self.address(f"X{value}", given.walk, chunk)
                mask = self.mask(kernel.varies[value], chunk, beyond=readable(given, kernel.space))
                other = f", mask={mask}, other=0{'.0' if given.dtype.is_floating_point else ''}" if mask else ""
                size = kind + "[" + ", ".join(map(str, given.shape)) + "]"
                self.name(value, chunk, f"tl.load({at}{other})", kind, size if chunk == 0 else "")

    def address(self, pointer: str, walk: Walk, chunk: int) -> str:
        text = addresses.offset(self.kernel, walk, self.column_names(chunk)[0])
        return f"{self.pointer(pointer)} + {text}" if text else self.pointer(pointer)

    def compute(self, value: int, of: int | None = None) -> None:
        """A step's variables, unless it has them, or those `of` one chunk; a sum over rows adds to its accumulator."""
        step = self.kernel.step(value)
        if step is None or (value, of or 0) in self.scope:
            return
        op = OPS[step.op]
        if op.reduces == "row":
            self.name(value, 0, self.reduced(value, self.terms_of(step)), self.type_of(value))
        elif op.reduces == "col":
            for chunk in self.only(value, of):
                self.add(op, f"total_{value}{self.suffix(chunk)}", self.masked_term(step, chunk, columns=False))
        else:
            step = self.without_quotient(value, step)
            for chunk in self.only(value, of):
                right, kind = self.right_side(step, chunk)
                self.name(value, chunk, right, kind)

    def without_quotient(self, value: int, step: Step) -> Step:
        """A row's quotient by a number, as a mean is, as a product: no farther off than the two units that a GPU's
        quotient is, and in fewer registers."""
        by = step.operands[1] if step.op == "div" else 0
        kernel, of = self.kernel, step.operands[0] if step.operands else 0
        if isinstance(by, Ref) or not SMALL < abs(by) < 1 / SMALL or not isinstance(of, Ref):
            return step
        if kernel.varies[value][-1] or kernel.late[value] or kernel.double or kernel.classes[of.index] != "f":
            return step
        return Step("mul", (of, 1 / float(by)))

    def add(self, op: Op, name: str, term: str) -> None:
        """One more term, or tile of them, to what a reduction has so far."""
        added = op.both == Op.both
        self.put(f"{name} += {term}" if added else f"{name} = {op.both.format(name, term)}")

    def neutral(self, op: Op, shape: str) -> str:
        """A tile of what a reduction over rows begins with."""
        return f"tl.full({shape}, {neutral(op)}, tl.float32)" if op.neutral else f"tl.zeros({shape}, tl.float32)"

    def reduction(self, value: int) -> Op:
        step = self.kernel.step(value)
        assert step is not None
        return OPS[step.op]

    def find(self, value: int, chunk: int) -> Variable:
        return self.scope[value, chunk if self.kernel.varies[value][-1] else 0]

    def right_side(self, step: Step, chunk: int) -> tuple[str, str]:
        kernel, column = self.kernel, self.column_names(chunk)[0]
        if step.op == "iota":
            dim = step.attributes[0]
            if kernel.space[dim] == 1:
                return "tl.zeros((1, 1), tl.int32)", "i32"
            if dim == len(kernel.space) - 1:
                return column, "i64" if kernel.cols > addresses.LIMIT else "i32"
            term = addresses.along(kernel.space, dim, kernel.batch)
            assert term is not None
            return term.name, "i64" if kernel.rows > addresses.LIMIT and term.of == "r" else "i32"
        if step.op == "uniform":
            return self.random_word(step, chunk), WORD
        if (least := self.least_kept(step, chunk)) is not None:
            return least, "i1"
        return expression(kernel, step, lambda v: self.find(v, chunk))

    def random_word(self, step: Step, chunk: int) -> str:
        """Neighbours share what is computed of their counter only if no thread has to hand it to another: then a tile
        that is walked as the words are, loaded before, says which thread holds what."""
        kernel, strides = self.kernel, step.attributes[1:]
        seed, offset = (operand(kernel, o, "i", lambda v: self.find(v, 0)) for o in step.operands)
        if not isinstance(step.operands[1], Ref):
            offset = f"tl.full((), {offset}, tl.int64)"
        row = addresses.offset(kernel, Walk(0, (*strides[:-1], 0)), "", wide=True)
        if row and not any(strides[kernel.batch : -1]):
            row += " + tl.zeros((1, 1), tl.int64)"
        across = strides[-1] if kernel.cols > 1 else 0
        start, block = (self.starts[chunk], self.plan.schedule.block) if across else ("0", 1)
        like = self.loaded_like(strides, chunk) if across == 1 else None
        aligned = all(s % 4 == 0 or n == 1 for s, n in zip(strides[:-1], kernel.space[:-1], strict=True))
        walk = f"{row or 'tl.zeros((1, 1), tl.int64)'}, {start}, {like}, {block}, {across}, {aligned}"
        return f"philox_word({seed}, {step.attributes[0]}, {offset}, {walk})"

    def loaded_like(self, strides: Sequence[int], chunk: int) -> str | None:
        """A loaded tile of as many elements as these strides make, contiguous along columns."""
        kernel = self.kernel
        inner = slice(kernel.batch, len(kernel.space) - 1)
        rows = any(s and n > 1 for s, n in zip(strides[inner], kernel.space[inner], strict=True))
        for value in range(len(kernel.inputs)):
            alike = kernel.of_rows(value) == rows and kernel.varies[value][-1]
            alike = alike and kernel.inputs[value].walk.strides[-1] == 1
            if alike and value in needed(kernel) and not self.finishing:
                self.load([value], chunk)
                return self.find(value, chunk).name
        return None

    def least_kept(self, step: Step, chunk: int) -> str | None:
        """A random number compared with a literal, as integers."""
        if step.op not in ("ge", "lt") or not isinstance(step.operands[0], Ref) or isinstance(step.operands[1], Ref):
            return None
        number = self.find(step.operands[0].index, chunk)
        if number.type != WORD:
            return None
        self.called.add("at_least")
        return f"{'~' if step.op == 'lt' else ''}at_least({number.name}, {least_word(float(step.operands[1]))})"

    def type_of(self, value: int) -> str:
        return word(self.kernel, self.kernel.classes[value])

    # ------------------------------------------------------------------------------------------------- reductions
    def masked_term(self, step: Step, chunk: int, rows: bool = True, columns: bool = True) -> str:
        """A reduction's operand, its elements past the end replaced by the neutral one."""
        kernel, op = self.kernel, OPS[step.op]
        integer = op.result == "n" and kernel.classes[reads(step)[0]] != "f"
        read = operand(kernel, step.operands[0], "i" if integer else "f", lambda v: self.find(v, chunk))
        masks: list[str] = []
        if rows and self.rows_masked:
            masks.append("rm")
        if columns and self.columns_masked(chunk):
            masks.append(self.column_names(chunk)[1])
        if not masks:
            return read
        return f"tl.where({' & '.join(masks)}, {read}, {'0' if integer else neutral(op)})"

    def terms_of(self, step: Step) -> list[str]:
        (value,) = reads(step)
        if not self.kernel.varies[value][-1]:
            return []
        return [self.masked_term(step, chunk, rows=False) for chunk in self.chunks_of(value)]

    def reduced(self, value: int, parts: list[str]) -> str:
        step = self.kernel.step(value)
        assert step is not None
        op = OPS[step.op]
        if not parts:  # the same in every column
            (read,) = reads(step)
            same = converted(self.find(read, 0), self.type_of(value))
            if step.op == "rprod":
                self.called.add("power")
                return f"power({same}, {float(self.kernel.cols)})"
            return f"{same} * {self.kernel.cols}" if step.op == "rsum" else same
        whole = parts[0]
        for part in parts[1:]:
            whole = op.both.format(whole, part)
        return op.triton.format(whole if step.op != "rmin" else f"({whole})")

    # ----------------------------------------------------------------------------------------------------- stores
    def store(self, value: int, of: int | None = None, outputs: Collection[int] | None = None) -> None:
        for at in range(len(self.kernel.outputs)) if outputs is None else outputs:
            for store in self.kernel.outputs[at].stores:
                if store.value.index == value and self.kernel.late[value] == self.finishing:
                    for chunk in self.only(value, of):
                        self.put_store(at, store, chunk)

    def put_store(self, output: int, store: Store, chunk: int) -> None:
        kernel, plan = self.kernel, self.plan
        value, made = store.value.index, kernel.outputs[output]
        varies = kernel.varies[value]
        assert varies == tuple(s != 0 for s in store.walk.strides), "a value is stored where it does not vary"
        once: list[str] = []
        # A value of columns is stored by the first tile of rows alone, one of rows by the first block of columns.
        if not any(varies[kernel.batch : -1]) and not self.finishing and kernel.rows > plan.schedule.rows:
            once.append("(tl.zeros((1, 1), tl.int32) + t == 0)")
        if not varies[-1] and (plan.blocks > 1 or self.finishing):
            block = f"{self.first} % {plan.blocks}" if plan.style == "tiles" and not self.finishing else self.first
            once.append(f"(tl.zeros((1, 1), tl.int32) + {block} == 0)")
        if kernel.batch and not any(varies[: kernel.batch]):
            once.append("(tl.zeros((1, 1), tl.int32) + b == 0)")
        at = self.address(f"Y{output}", store.walk, chunk)
        if not any(varies[kernel.batch :]):
            at += " + tl.zeros((1, 1), tl.int32)"
        found = self.find(value, chunk)
        right = found.name if found.type == TYPES[made.dtype] else converted(found, TYPES[made.dtype])
        if made.padded and self.columns_masked(chunk):
            right = f"tl.where({self.column_names(chunk)[1]}, {right}, 0)"
        mask = self.mask(varies, chunk, *once, beyond=made.padded)
        self.put(f"tl.store({at}, {right}{f', mask={mask}' if mask else ''})")
