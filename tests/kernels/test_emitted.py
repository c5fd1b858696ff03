"""The text of a template from `--emit triton`: its launches, and each function that they run, once."""

import ast

import pytest

from kernels_triton.ir.text import parse
from kernels_triton.launch.launch import HAS_TRITON
from kernels_triton.match.source import WIDTH, template_source

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed: ops do not launch here")
GATED = "k[5|24](bf16[5,24], bf16[5,24]){%2=sigmoid(%0); %3=mul(%0, %2); %4=mul(%3, %1)}->bf16[5,24]=%4"
NORM = (
    "k[5|24](bf16[5,24], f32[24]@0:0,1, f32[24]@0:0,1){%3=rsum(%0); %4=div(%3, 24.0); %5=sub(%0, %4); %6=square(%5); "
    "%7=rsum(%6); %8=div(%7, 24.0); %9=add(%8, 1e-05); %10=rsqrt(%9); %11=mul(%5, %10); %12=mul(%11, %1); "
    "%13=add(%12, %2)}->bf16[5,24]=%13"
)


def test_every_function_is_printed_before_it_is_called_and_once() -> None:
    shown: set[tuple[str, str]] = set()
    text = "\n\n".join(template_source(parse(line), shown) for line in (GATED, NORM, GATED))
    functions = [one for one in ast.parse(text).body if isinstance(one, ast.FunctionDef)]
    names = [one.name for one in functions]
    assert len(names) == len(set(names))
    assert {"gated_forward", "_act", "normal", "norm_forward", "moments"} <= set(names)
    for at, one in enumerate(functions):
        called = {
            part.func.id for part in ast.walk(one) if isinstance(part, ast.Call) and isinstance(part.func, ast.Name)
        }
        assert called <= {*names[:at], "range"}, one.name
    assert text.count("# activation.gated_forward: grid") == 2
    assert text.count("# Its source is above.") == 1
    assert max(len(line) for line in text.splitlines() if line.startswith("#")) <= WIDTH + 2
