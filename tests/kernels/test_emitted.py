"""The text of a template from `--emit triton`: its launches, and each function that they run, once."""

import ast

import pytest

from kernels_triton.ir.text import parse
from kernels_triton.launch.launch import HAS_TRITON
from kernels_triton.match.source import WIDTH, template_source

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed: ops do not launch here")
LOSS = (
    "k[5|24](bf16[5,24], i64[5]@0:1,0, f32[]@0:0,0){%3=rmax(%0); %4=sub(%0, %3); %5=exp(%4); %6=rsum(%5); "
    "%7=iota{1}(); %8=eq(%7, %1); %9=where(%8, %4, 0.0); %10=rsum(%9); %11=div(1.0, %2); %12=ne(%1, -100); "
    "%13=where(%12, %11, 0.0); %14=div(%13, %6); %15=mul(%5, %14); %16=where(%8, %13, 0.0); %17=sub(%15, %16)}"
    "->f32[5,1]=%6@0:1,0, f32[5,1]=%10@0:1,0, bf16[5,24]=%17"
)
NORM = (
    "k[5|24](bf16[5,24], f32[24]@0:0,1, f32[24]@0:0,1){%3=rsum(%0); %4=div(%3, 24.0); %5=sub(%0, %4); %6=square(%5); "
    "%7=rsum(%6); %8=div(%7, 24.0); %9=add(%8, 1e-05); %10=rsqrt(%9); %11=mul(%5, %10); %12=mul(%11, %1); "
    "%13=add(%12, %2)}->bf16[5,24]=%13"
)


def test_every_function_is_printed_before_it_is_called_and_once() -> None:
    shown: set[tuple[str, str]] = set()
    text = "\n\n".join(template_source(parse(line), shown) for line in (LOSS, NORM, LOSS))
    functions = [one for one in ast.parse(text).body if isinstance(one, ast.FunctionDef)]
    names = [one.name for one in functions]
    assert len(names) == len(set(names))
    assert {"cross_entropy_rows", "_logit", "_merge", "norm_forward", "moments"} <= set(names)
    for at, one in enumerate(functions):
        called = {
            part.func.id for part in ast.walk(one) if isinstance(part, ast.Call) and isinstance(part.func, ast.Name)
        }
        assert called <= {*names[:at], "range", "float"}, one.name
    assert text.count("# cross_entropy.cross_entropy_rows: grid") == 2
    assert text.count("# Its source is above.") == 1
    assert max(len(line) for line in text.splitlines() if line.startswith("#")) <= WIDTH + 2
