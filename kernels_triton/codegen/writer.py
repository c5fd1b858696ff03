"""The lines of one generated function, and the variables in scope.

A variable is named after its op and value: `mul_7` is value %7. A value that varies by column has one variable for each
chunk of columns: `mul_7_0`, `mul_7_1`. Before every reduction, elements after the end are replaced by the neutral
element.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kernels_triton.base.random import least_word
from kernels_triton.codegen import addresses
from kernels_triton.codegen.expressions import TYPES, WORD, Variable, compute_type, converted, expression, operand
from kernels_triton.codegen.schedules import GridPlan, live_values
from kernels_triton.ir.access_map import AccessMap
from kernels_triton.ir.kernel import Kernel, KernelStep, OutputStore, Ref, value_operands
from kernels_triton.ir.row_padding import padded_columns, padding_is_readable
from kernels_triton.ir.table import OPS, Op, neutral_literal

Scope = dict[tuple[int, int], Variable]
SMALLEST_DIVISOR = 2.0**-100  # reciprocals of smaller numbers lose accuracy


@dataclass
class FunctionWriter:
    """`scope` has a variable for each value and chunk of columns. Row values and scalars use chunk 0.

    `finishing`: this is the second function, which adds the lines of partial sums.
    """

    kernel: Kernel
    plan: GridPlan
    lines: list[str] = field(default_factory=list)
    depth: int = 1
    scope: Scope = field(default_factory=dict)
    pointers_used: dict[str, None] = field(default_factory=dict)
    functions_called: set[str] = field(default_factory=set)  # library functions, in addition to those that ops call
    finishing: bool = False
    chunk_starts: dict[int, str] = field(default_factory=dict)  # the first column of each chunk

    # ------------------------------------------------------------------------------------------------- the frame
    def function(self, name: str, about: str) -> list[str]:
        return ["@triton.jit", f"def {name}({', '.join(self.arguments)}):", f'    """{about}"""', *self.lines]

    @property
    def arguments(self) -> tuple[str, ...]:
        """Inputs, outputs, partial sums."""
        return tuple(sorted(self.pointers_used, key=lambda name: ("XYP".index(name[0]), int(name[1:]))))

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
        self.pointers_used[name] = None
        return name

    @property
    def batch_program(self) -> str:
        """The program's index along the first axis, among the programs of its point of the batch dims."""
        return "i" if self.kernel.batch else "tl.program_id(0)"

    @property
    def program(self) -> str:
        """The program's index among those that share the rows. In the walk plan, neighbouring programs are neighbours
        in memory."""
        return "tl.program_id(1)" if self.plan.style == "walk" else self.batch_program

    @property
    def partial_sum_line(self) -> str:
        """The line of this program's partial sums."""
        line = f"(b * {self.plan.programs} + {self.program})" if self.kernel.batch else self.program
        return f"{line}{self.wide_line(self.plan.programs)}"

    def wide_line(self, programs: int) -> str:
        """The conversion of a line's number to 64 bits, if the lines of so many programs need more than 32."""
        return ".to(tl.int64)" if self.kernel.batches * programs * self.kernel.cols > addresses.INT32_MAX else ""

    def put_batch(self, programs: int) -> None:
        """The point of the batch dims, each of which has `programs` programs along the first axis."""
        if self.kernel.batch:
            self.put(f"b = tl.program_id(0) // {programs}")
            self.put(f"i = tl.program_id(0) % {programs}")
            self.put_indices("b")

    def put_indices(self, of: str) -> None:
        for term in addresses.derived_indices(self.kernel):
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
    def touches_padding(self) -> bool:
        """Whether row padding is read or written."""
        kernel = self.kernel
        return any(
            padding_is_readable(tensor.access_map, tensor.shape, tensor.dtype, kernel.space) for tensor in kernel.inputs
        ) or any(o.padded for o in kernel.outputs)

    def mask(self, varies: Sequence[bool], chunk: int, *more: str, beyond: bool = False) -> str:
        """The mask of a tile: of rows, of columns, or of both."""
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
            self.chunk_starts[chunk] = first or "0"
            span = f"tl.arange(0, {block})[None, :]"
            self.put(f"{name} = {first} + {span}" if first else f"{name} = {span}")
            if self.columns_masked(chunk):
                self.put(f"{mask} = {name} < {self.kernel.cols}")
                if self.touches_padding:
                    self.put(f"ce{self.suffix(chunk)} = {name} < {padded_columns(self.kernel.cols)}")

    def is_sum(self, value: int) -> bool:
        step = self.kernel.step(value)
        return step is not None and OPS[step.op].reduces == "col"

    def pending_values(self, roots: Iterable[int]) -> list[int]:
        """The values that must be computed for the roots, in order. Operands of values in scope are left out."""
        pending, todo = set[int](), list(roots)
        while todo:
            value = todo.pop()
            if value in pending or self.is_sum(value):
                continue
            pending.add(value)
            if (value, 0) not in self.scope:
                todo += self.kernel.values_read(value)
        return sorted(pending)

    # -------------------------------------------------------------------------------------------- loads and steps
    def define(self, value: int, chunk: int, expression_text: str, kind: str, note: str = "") -> None:
        step = self.kernel.step(value)
        name = f"x{value}" if step is None else f"{step.op}_{value}"
        if self.kernel.varies[value][-1]:
            name += self.suffix(chunk)
        self.put(f"{name} = {expression_text}" + (f"  # {note}" if note else ""))
        self.scope[value, chunk] = Variable(name, kind)

    def chunk_range(self, value: int, chunk: int | None) -> Iterable[int]:
        """One chunk of a value, or all its chunks."""
        every = self.chunks_of(value)
        return every if chunk is None else every[chunk : chunk + 1]

    def put_loads(self, values: Iterable[int], of: int | None = None) -> None:
        kernel = self.kernel
        for value in values:
            if value not in live_values(kernel):
                continue
            tensor = kernel.inputs[value]
            kind = TYPES[tensor.dtype]
            for chunk in self.chunk_range(value, of):
                if (value, chunk) in self.scope:
                    continue
                address = self.address(f"X{value}", tensor.access_map, chunk)
                mask = self.mask(
                    kernel.varies[value],
                    chunk,
                    beyond=padding_is_readable(tensor.access_map, tensor.shape, tensor.dtype, kernel.space),
                )
                other = f", mask={mask}, other=0{'.0' if tensor.dtype.is_floating_point else ''}" if mask else ""
                size = kind + "[" + ", ".join(map(str, tensor.shape)) + "]"
                self.define(value, chunk, f"tl.load({address}{other})", kind, size if chunk == 0 else "")

    def address(self, pointer: str, access_map: AccessMap, chunk: int) -> str:
        text = addresses.tile_offsets(self.kernel, access_map, self.column_names(chunk)[0])
        return f"{self.pointer(pointer)} + {text}" if text else self.pointer(pointer)

    def put_step(self, value: int, of: int | None = None) -> None:
        """Defines a step's variables, unless they are in scope: of all chunks, or of chunk `of`. A sum over rows adds
        to its accumulator."""
        step = self.kernel.step(value)
        if step is None or (value, of or 0) in self.scope:
            return
        op = OPS[step.op]
        if op.reduces == "row":
            self.define(value, 0, self.reduction_of(value, self.chunk_terms(step)), self.compute_type_of(value))
        elif op.reduces == "col":
            for chunk in self.chunk_range(value, of):
                self.put_combined(
                    op, f"total_{value}{self.suffix(chunk)}", self.masked_term(step, chunk, columns=False)
                )
        else:
            step = self.division_as_product(value, step)
            for chunk in self.chunk_range(value, of):
                right, kind = self.right_side(step, chunk)
                self.define(value, chunk, right, kind)

    def division_as_product(self, value: int, step: KernelStep) -> KernelStep:
        """A row value's quotient by a number, as in a mean, becomes a product. The error stays within the two units of
        a GPU's quotient, and fewer registers are needed."""
        divisor = step.operands[1] if step.op == "div" else 0
        kernel, dividend = self.kernel, step.operands[0] if step.operands else 0
        if isinstance(divisor, Ref) or not isinstance(dividend, Ref):
            return step
        if not SMALLEST_DIVISOR < abs(divisor) < 1 / SMALLEST_DIVISOR:
            return step
        if (
            kernel.varies[value][-1]
            or kernel.in_epilogue[value]
            or kernel.is_float64
            or kernel.classes[dividend.index] != "f"
        ):
            return step
        return KernelStep("mul", (dividend, 1 / float(divisor)))

    def put_combined(self, op: Op, name: str, term: str) -> None:
        """Combines one more term, or tile of terms, with a reduction's accumulator."""
        added = op.combine == Op.combine
        self.put(f"{name} += {term}" if added else f"{name} = {op.combine.format(name, term)}")

    def neutral(self, op: Op, shape: str) -> str:
        """A tile of the neutral elements that a reduction over rows starts with."""
        return (
            f"tl.full({shape}, {neutral_literal(op)}, tl.float32)" if op.neutral else f"tl.zeros({shape}, tl.float32)"
        )

    def reduction(self, value: int) -> Op:
        step = self.kernel.step(value)
        assert step is not None
        return OPS[step.op]

    def variable(self, value: int, chunk: int) -> Variable:
        return self.scope[value, chunk if self.kernel.varies[value][-1] else 0]

    def right_side(self, step: KernelStep, chunk: int) -> tuple[str, str]:
        kernel, column = self.kernel, self.column_names(chunk)[0]
        if step.op == "iota":
            dim = step.attributes[0]
            if kernel.space[dim] == 1:
                return "tl.zeros((1, 1), tl.int32)", "i32"
            if dim == len(kernel.space) - 1:
                return column, "i64" if kernel.cols > addresses.INT32_MAX else "i32"
            term = addresses.index_along(kernel.space, dim, kernel.batch)
            assert term is not None
            return term.name, "i64" if kernel.rows > addresses.INT32_MAX and term.of == "r" else "i32"
        if step.op == "uniform":
            return self.random_word(step, chunk), WORD
        if (least := self.dropout_comparison(step, chunk)) is not None:
            return least, "i1"
        return expression(kernel, step, lambda v: self.variable(v, chunk))

    def random_word(self, step: KernelStep, chunk: int) -> str:
        """Threads share the Philox counters of neighbouring elements only if no word must move between threads. A
        loaded tile with the same layout as the words tells which thread holds which element."""
        kernel, strides = self.kernel, step.attributes[1:]
        seed, offset = (operand(kernel, o, "i", lambda v: self.variable(v, 0)) for o in step.operands)
        if not isinstance(step.operands[1], Ref):
            offset = f"tl.full((), {offset}, tl.int64)"
        row = addresses.tile_offsets(kernel, AccessMap(0, (*strides[:-1], 0)), "", wide=True)
        if row and not any(strides[kernel.batch : -1]):
            row += " + tl.zeros((1, 1), tl.int64)"
        across = strides[-1] if kernel.cols > 1 else 0
        start, block = (self.chunk_starts[chunk], self.plan.schedule.block) if across else ("0", 1)
        like = self.tile_in_thread_layout(strides, chunk) if across == 1 else None
        aligned = all(s % 4 == 0 or n == 1 for s, n in zip(strides[:-1], kernel.space[:-1], strict=True))
        layout = f"{row or 'tl.zeros((1, 1), tl.int64)'}, {start}, {like}, {block}, {across}, {aligned}"
        return f"philox_word({seed}, {step.attributes[0]}, {offset}, {layout})"

    def tile_in_thread_layout(self, strides: Sequence[int], chunk: int) -> str | None:
        """A loaded tile with as many elements as these strides span, contiguous along columns."""
        kernel = self.kernel
        inner = slice(kernel.batch, len(kernel.space) - 1)
        rows = any(s and n > 1 for s, n in zip(strides[inner], kernel.space[inner], strict=True))
        for value in range(len(kernel.inputs)):
            same_layout = kernel.varies_by_row(value) == rows and kernel.varies[value][-1]
            same_layout = same_layout and kernel.inputs[value].access_map.strides[-1] == 1
            if same_layout and value in live_values(kernel) and not self.finishing:
                self.put_loads([value], chunk)
                return self.variable(value, chunk).name
        return None

    def dropout_comparison(self, step: KernelStep, chunk: int) -> str | None:
        """A random number compared with a literal, as integers."""
        if step.op not in ("ge", "lt") or not isinstance(step.operands[0], Ref) or isinstance(step.operands[1], Ref):
            return None
        word_variable = self.variable(step.operands[0].index, chunk)
        if word_variable.type != WORD:
            return None
        self.functions_called.add("at_least")
        return f"{'~' if step.op == 'lt' else ''}at_least({word_variable.name}, {least_word(float(step.operands[1]))})"

    def compute_type_of(self, value: int) -> str:
        return compute_type(self.kernel, self.kernel.classes[value])

    # ------------------------------------------------------------------------------------------------- reductions
    def masked_term(self, step: KernelStep, chunk: int, rows: bool = True, columns: bool = True) -> str:
        """A reduction's operand, with elements after the end replaced by the neutral element."""
        kernel, op = self.kernel, OPS[step.op]
        integer = op.result == "n" and kernel.classes[value_operands(step)[0]] != "f"
        term = operand(kernel, step.operands[0], "i" if integer else "f", lambda v: self.variable(v, chunk))
        masks: list[str] = []
        if rows and self.rows_masked:
            masks.append("rm")
        if columns and self.columns_masked(chunk):
            masks.append(self.column_names(chunk)[1])
        if not masks:
            return term
        return f"tl.where({' & '.join(masks)}, {term}, {'0' if integer else neutral_literal(op)})"

    def chunk_terms(self, step: KernelStep) -> list[str]:
        (value,) = value_operands(step)
        if not self.kernel.varies[value][-1]:
            return []
        return [self.masked_term(step, chunk, rows=False) for chunk in self.chunks_of(value)]

    def reduction_of(self, value: int, parts: list[str]) -> str:
        step = self.kernel.step(value)
        assert step is not None
        op = OPS[step.op]
        if not parts:  # the operand is the same in every column
            (read,) = value_operands(step)
            same = converted(self.variable(read, 0), self.compute_type_of(value))
            if step.op == "rprod":
                self.functions_called.add("power")
                return f"power({same}, {float(self.kernel.cols)})"
            return f"{same} * {self.kernel.cols}" if step.op == "rsum" else same
        whole = parts[0]
        for part in parts[1:]:
            whole = op.combine.format(whole, part)
        return op.triton.format(whole if step.op != "rmin" else f"({whole})")

    # ----------------------------------------------------------------------------------------------------- stores
    def put_stores(self, value: int, of: int | None = None, outputs: Collection[int] | None = None) -> None:
        for output in range(len(self.kernel.outputs)) if outputs is None else outputs:
            for store in self.kernel.outputs[output].stores:
                if store.value.index == value and self.kernel.in_epilogue[value] == self.finishing:
                    for chunk in self.chunk_range(value, of):
                        self.put_store(output, store, chunk)

    def put_store(self, output: int, store: OutputStore, chunk: int) -> None:
        kernel, plan = self.kernel, self.plan
        value, tensor = store.value.index, kernel.outputs[output]
        varies = kernel.varies[value]
        assert varies == tuple(s != 0 for s in store.access_map.strides), "a value is stored where it does not vary"
        conditions: list[str] = []
        # The first tile of rows alone stores a column value; the first block of columns alone stores a row value.
        if not any(varies[kernel.batch : -1]) and not self.finishing and kernel.rows > plan.schedule.rows:
            conditions.append("(tl.zeros((1, 1), tl.int32) + t == 0)")
        if not varies[-1] and (plan.blocks > 1 or self.finishing):
            tiled = plan.style == "tiles" and not self.finishing
            block = f"{self.batch_program} % {plan.blocks}" if tiled else self.batch_program
            conditions.append(f"(tl.zeros((1, 1), tl.int32) + {block} == 0)")
        if kernel.batch and not any(varies[: kernel.batch]):
            conditions.append("(tl.zeros((1, 1), tl.int32) + b == 0)")
        address = self.address(f"Y{output}", store.access_map, chunk)
        if not any(varies[kernel.batch :]):
            address += " + tl.zeros((1, 1), tl.int32)"
        variable = self.variable(value, chunk)
        stored = variable.name if variable.type == TYPES[tensor.dtype] else converted(variable, TYPES[tensor.dtype])
        if tensor.padded and self.columns_masked(chunk):
            stored = f"tl.where({self.column_names(chunk)[1]}, {stored}, 0)"
        mask = self.mask(varies, chunk, *conditions, beyond=tensor.padded)
        self.put(f"tl.store({address}, {stored}{f', mask={mask}' if mask else ''})")
