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


AFTER_TORCH = {
    "its api": "import shardc; shardc.Mesh",
    "compile": "import shardc; shardc.compile",
    "a name that needs few modules": "import shardc; shardc.Mesh; torch.ops.shardc.all_reduce; torch.ops.shardc.sdpa",
    "kernels before the compiler": "import kernels_triton.match.op",
    "rules": "import shardc.rules",
    "planning": "import shardc; shardc.autoplan, shardc.Ranking",
    "planning, then compile": """
import shardc
shardc.autoplan
from shardc.rules.registry import _RULES
known = set(_RULES)
shardc.compile
assert known == set(_RULES), "planning goes by other rules than compiling"
""",
    "trainer": "import shardc.runtime.train.trainer",
}
FORKS = """
import json, os, sys, torch, traceback
for name, code in json.loads(sys.argv[1]).items():
    if os.fork() == 0:
        try:
            exec(code)
            print(json.dumps([name, "", sorted(sys.modules)]), flush=True)
        except BaseException:
            print(json.dumps([name, traceback.format_exc(), []]), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def after_torch() -> dict[str, tuple[str, set[str]]]:
    """What each code ended with, and the modules there were then: each in a process of its own, forked where torch is
    loaded and nothing of ours."""
    return forked(AFTER_TORCH)


def forked(codes: dict[str, str]) -> dict[str, tuple[str, set[str]]]:
    command = [sys.executable, "-c", FORKS, json.dumps(codes)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    ended = [json.loads(line) for line in done.stdout.splitlines()]
    return {name: (failure, set(modules)) for name, failure, modules in ended}


def test_import_shardc_imports_its_api_at_its_first_use(after_torch: dict[str, tuple[str, set[str]]]) -> None:
    modules = loaded_after("import shardc; dir(shardc); shardc.__version__")
    assert modules.isdisjoint(HEAVY)
    assert "shardc.api" in after_torch["its api"][1]


def test_the_api_leaves_checkpoints_and_libraries_of_models_to_those_who_use_them(
    after_torch: dict[str, tuple[str, set[str]]],
) -> None:
    modules = after_torch["compile"][1]
    assert "shardc.api" in modules
    assert modules.isdisjoint(("torch.distributed.checkpoint", "torch.distributed.tensor", "sympy", "transformers"))


def test_planning_loads_nothing_that_runs_programs(after_torch: dict[str, tuple[str, set[str]]]) -> None:
    modules = after_torch["planning"][1]
    assert modules.isdisjoint(("shardc.api", "shardc.runtime.train.trainer", "shardc.program_cache", "shardc.explain"))
    assert after_torch["planning, then compile"][1] > modules | {"shardc.api"}


@pytest.mark.parametrize("code", AFTER_TORCH)
def test_any_part_can_be_imported_first(code: str, after_torch: dict[str, tuple[str, set[str]]]) -> None:
    """Rules and ops are registered by importing them; a name that needs few modules must not leave others out."""
    failure, _ = after_torch[code]
    assert not failure, failure


@pytest.mark.long
def test_any_module_can_be_imported_first() -> None:
    names = {
        ".".join(path.with_suffix("").parts) for path in (p.relative_to(ROOT) for p in (ROOT / "shardc").rglob("*.py"))
    }
    modules = {name.removesuffix(".__init__") for name in names} - {"shardc.__main__"}
    ended = forked({name: f"import {name}" for name in sorted(modules)})
    assert {name: failure for name, (failure, _) in ended.items() if failure} == {}
    assert len(ended) > 200


def test_python_m_shardc_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shardc", "--version"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"shardc {VERSION}\n"
    assert shardc.__version__ == VERSION
