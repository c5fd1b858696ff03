"""CONTRIBUTING.md is executed: the Python blocks of a section, joined, are a program that runs.

Programs register rules, ops and kernels, so they run in processes of their own: one for all that need no Triton, each
in a namespace of its own, and one for the kernel, which runs in Triton's interpreter.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

import pytest

from tests.distributed.ranks import METHOD, serve

ROOT = Path(__file__).parent.parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
SECTIONS = {
    title: "\n\n".join(re.findall(r"^```python\n(.*?)^```$", body, re.M | re.S))
    for title, body in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S)
}
PROGRAMS = {title.removeprefix("Add a").strip("n "): code for title, code in SECTIONS.items() if code}
KERNEL = "hand-written kernel"
RUNNER = """
import runpy, sys, traceback
from pathlib import Path
for file in sys.argv[1:]:
    try:
        runpy.run_path(file)
    except BaseException:
        Path(file + ".failed").write_text(traceback.format_exc())
    else:
        Path(file + ".passed").touch()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the programs have run, but that of the kernel."""
    folder = tmp_path_factory.mktemp("contributing")
    _run(folder, [title for title in PROGRAMS if title != KERNEL])
    return folder


def _run(folder: Path, titles: list[str]) -> None:
    files = [folder / f"{title.replace(' ', '_')}.py" for title in titles]
    for file, title in zip(files, titles, strict=True):
        file.write_text(PROGRAMS[title], encoding="utf-8")
    if titles == [KERNEL]:  # Triton is imported as the interpreter, or not
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, "-c", RUNNER, *map(str, files)], env=environment, cwd=folder, timeout=300)
        return
    serve()
    process = get_context(METHOD).Process(target=_run_all, args=(folder, files), daemon=True)
    process.start()
    process.join(300)
    process.kill()


def _run_all(folder: Path, files: list[Path]) -> None:
    os.chdir(folder)
    sys.argv = ["", *map(str, files)]
    exec(RUNNER, {})


def _passed(folder: Path, title: str) -> None:
    file = folder / f"{title.replace(' ', '_')}.py"
    failed = Path(f"{file}.failed")
    assert not failed.exists(), failed.read_text()
    assert Path(f"{file}.passed").exists(), "its process died"


def test_every_kind_of_extension_has_its_program() -> None:
    kinds = ["op", "fusable pointwise op", "pass", KERNEL, "pipeline schedule", "diagnostic"]
    assert list(PROGRAMS) == kinds


@pytest.mark.parametrize("title", [title for title in PROGRAMS if title != KERNEL])
def test_the_program_of_a_section_runs(folder: Path, title: str) -> None:
    _passed(folder, title)


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernel_runs_in_tritons_interpreter(tmp_path: Path) -> None:
    _run(tmp_path, [KERNEL])
    _passed(tmp_path, KERNEL)


def test_what_it_names_exists() -> None:
    tops = r"\.ci|docs|tests|configs|examples|shardc|kernels_triton|benchmarks"
    paths = re.findall(rf"`(?:\S+ )*((?:{tops})/[\w/.]+)", TEXT)
    assert len(paths) > 20
    for path in paths:
        assert (ROOT / path).exists(), path
    targets = re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert set(re.findall(r"`?make\s+(test|format|fuzz|gate-kernels)\b", TEXT)) <= set(targets)
