"""What is imported for what: by the modules that are loaded, not by seconds, which depend on the machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import shardc
from shardc.ir.version import VERSION

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "numpy", "sympy", "networkx", "yaml", "triton", "transformers")


def loaded_after(code: str) -> set[str]:
    """The modules that a fresh process has after some code; what that prints is dropped."""
    report = "import sys, json; sys.__stderr__.write(json.dumps(sorted(sys.modules)))"
    script = f"import contextlib\nwith contextlib.suppress(SystemExit):\n    {code}\n{report}"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(json.loads(done.stderr))


@pytest.mark.parametrize("arguments", ["--help", "--version", "compile --help", "run --help", "nothing"])
def test_help_imports_neither_torch_nor_what_commands_run(arguments: str) -> None:
    from_typer = "import io, contextlib; from shardc.cli.main import app"
    code = f"{from_typer}; contextlib.redirect_stderr(io.StringIO()).__enter__(); app({arguments.split()!r})"
    modules = loaded_after(code)
    assert modules & set(HEAVY) == set()
    assert modules.isdisjoint(("shardc.api", "shardc.cli.commands", "shardc.plan.schema"))


def test_import_shardc_imports_its_api_at_its_first_use() -> None:
    modules = loaded_after("import shardc; dir(shardc); shardc.__version__")
    assert modules.isdisjoint(HEAVY)
    assert "shardc.api" in loaded_after("import shardc; shardc.Mesh")


def test_the_api_leaves_checkpoints_and_libraries_of_models_to_those_who_use_them() -> None:
    modules = loaded_after("import shardc; shardc.compile")
    assert modules.isdisjoint(("torch.distributed.checkpoint", "torch.distributed.tensor", "sympy", "transformers"))


@pytest.mark.parametrize(
    "which",
    [
        "['shardc.ir.mesh', 'shardc.rules', 'shardc.plan.schema', 'shardc.runtime.train.trainer']",
        pytest.param("every", marks=pytest.mark.long),
    ],
)
def test_any_module_can_be_imported_first(which: str) -> None:
    """Each in a process of its own, forked where torch is loaded and nothing of ours."""
    code = f"""
import os, pathlib, sys, torch
every = {{".".join(p.with_suffix("").parts).removesuffix(".__init__") for p in pathlib.Path("shardc").rglob("*.py")}}
failed = []
for name in sorted(set({which}) - {{"shardc.__main__"}}):
    if (child := os.fork()) == 0:
        try:
            __import__(name)
        except BaseException as problem:
            print(name, repr(problem))
            sys.stdout.flush()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        failed.append(name)
print("failed:", failed)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "failed: []", done.stdout


def test_python_m_shardc_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shardc", "--version"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"shardc {VERSION}\n"
    assert shardc.__version__ == VERSION
