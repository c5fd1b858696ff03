"""Imports point down: ir <- rules <- passes <- stages <- api <- cli (design.md, section 4)."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BASE = {"ir", "torch_compat"}
# What each part may import of ours, besides itself. A part that is not listed belongs to the api: all but the cli.
MAY_IMPORT = {
    "torch_compat": set[str](),
    "ir": {"torch_compat"},
    "rules": BASE,
    "trace": BASE | {"precision"},
    "precision": BASE,
    "passes": BASE | {"rules", "trace", "cost", "kernels_triton"},
    "stages": BASE | {"rules", "passes", "cost", "runtime"},
    "cost": {"ir"},
    "kernels_triton": {"ir"},
    "runtime": BASE | {"kernels_triton"},
    "plan": {"ir", "hf_plan", "plan_values", "plan_fuse", "plan_pipeline"},
    "plan_pipeline": {"ir", "plan_values", "stages"},
    "plan_fuse": {"ir", "kernels_triton", "plan_values"},
    "plan_values": {"ir"},
    "hf_plan": {"ir"},
}


def part_of(module: str) -> str | None:
    """The part of the project that a dotted module name lies in; None if it is not ours."""
    first, _, rest = module.partition(".")
    if first == "kernels_triton":
        return first
    if first != "shardc":
        return None
    part = rest.partition(".")[0] or "api"
    # trace.py has helpers beside it: trace_ops.py, trace_origin.py.
    return "trace" if part.startswith("trace_") else part


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every import of a file, those inside functions too: they are as much a dependency."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write imports in full"
            # `from shardc import ir` names its module on the right.
            whole = node.module == "shardc"
            for alias in node.names:
                is_module = whole and (
                    (ROOT / "shardc" / alias.name).is_dir() or (ROOT / f"shardc/{alias.name}.py").exists()
                )
                yield node.lineno, f"shardc.{alias.name}" if is_module else str(node.module)


FILES = sorted([*(ROOT / "shardc").rglob("*.py"), *(ROOT / "kernels_triton").rglob("*.py")])


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    part = part_of(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")) or "api"
    for line, module in imports(path):
        target = part_of(module)
        if target is None or target == part:
            continue
        if part in MAY_IMPORT:
            assert target in MAY_IMPORT[part], f"{path}:{line}: {part} must not import {module}"
        else:
            assert target != "cli", f"{path}:{line}: only the command line imports the command line"
