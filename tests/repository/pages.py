"""The pages of the documentation, and what is run of them.

A fenced block is run by what it is:

    python   in order, in one namespace, in an empty folder. A first line `# name.py` makes it a file of that folder
             instead; a first line with a path of the repository makes it an excerpt, word for word, of that file
    yaml     with a first line `# name.yaml`, a file of the folder, or an excerpt as above
    text     straight after a block of python: what this prints
    console  one `$ shardc ...`: what stands below is what it prints
    py       another library's code: read, not run

`--update-golden` writes what is printed into the page.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from shardc.cli import main

ROOT = Path(__file__).parent.parent.parent
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    language: str
    body: str
    line: int  # of the page, where the body begins
    follows: str  # the language of the block before, where only blank lines lie between

    @property
    def named(self) -> str | None:
        """The path in the block's first line."""
        found = re.match(r"# ([\w/.-]+\.(?:py|yaml))\s*$", self.body.partition("\n")[0])
        return found[1] if found else None

    @property
    def is_excerpt(self) -> bool:
        return self.named is not None and (ROOT / self.named).exists()

    @property
    def is_file(self) -> bool:
        return self.named is not None and not self.is_excerpt


def blocks(text: str) -> list[Block]:
    found: list[Block] = []
    end, before = 0, ""
    for match in FENCE.finditer(text):
        follows = before if not text[end : match.start()].strip() else ""
        found.append(Block(match[1], match[2], text.count("\n", 0, match.start(2)) + 1, follows))
        end, before = match.end(), match[1]
    return found


def shardc_cli(command: str) -> tuple[str, str]:
    """What a command prints on stdout and on stderr, paths as seen from here."""
    result = CliRunner().invoke(main.app, command.split(), prog_name="shardc")
    assert result.exit_code == 0, f"shardc {command}\n{result.output}\n{result.exception!r}"
    return _plain(result.stdout), _plain(result.stderr)


def _plain(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.splitlines()).strip()


def rounded(text: str) -> str:
    """Rounding errors, and where they are largest, differ between processors."""
    text = re.sub(r"at worst \(.*\)", "at worst", re.sub(r"\d\.\de-\d\d|0\.0e\+00", "1e-..", text))
    return re.sub(r"(single device against eager PyTorch: ).*", r"\1..", text)


@dataclass
class Page:
    path: Path

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def blocks(self) -> list[Block]:
        return blocks(self.text)

    def compare(self, number: int, shown: str, printed: str, request: pytest.FixtureRequest) -> None:
        """Compare what block `number` shows with what is printed, or write this over the block's last lines."""
        if rounded(printed) == rounded(shown.strip()):
            return
        if not request.config.getoption("--update-golden"):
            assert rounded(printed) == rounded(shown.strip())
        lines, block = self.text.splitlines(), self.blocks[number]
        end = block.line - 1 + len(block.body.splitlines())
        lines[end - len(shown.splitlines()) : end] = printed.splitlines()
        self.path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def run(self, folder: Path, request: pytest.FixtureRequest) -> None:
        """Run the page in an empty folder, which must be the current one."""
        copy = folder / self.path.name
        shutil.copy(self.path, copy)  # so that diagnostics find the line that they quote
        torch.manual_seed(0)
        scope: dict[str, object] = {"__name__": "page"}
        printed = ""
        with _importable(folder, [Path(str(block.named)).stem for block in self.blocks if block.is_file]):
            for number, block in enumerate(self.blocks):
                if block.is_file:
                    (folder / str(block.named)).write_text(block.body, encoding="utf-8")
                elif block.language == "python" and not block.is_excerpt:
                    code = "\n" * (block.line - 1) + block.body
                    with contextlib.redirect_stdout(io.StringIO()) as out:
                        exec(compile(code, str(copy), "exec"), scope)
                    printed = out.getvalue()
                elif block.language == "text" and block.follows == "python":
                    self.compare(number, block.body, _plain(printed), request)
                elif block.language == "console":
                    command, _, shown = block.body.partition("\n")
                    self.compare(number, shown, shardc_cli(command.removeprefix("$ shardc "))[0], request)


@contextlib.contextmanager
def _importable(folder: Path, names: Sequence[str]) -> Iterator[None]:
    """Modules of the folder can be imported, and are forgotten afterwards; what others imported of `names` is, too."""
    for name in names:
        sys.modules.pop(name, None)
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(folder)):
                del sys.modules[name]


def missing_names(code: str) -> list[str]:
    """What a block imports of libraries that are installed here, and which they do not have."""
    missing: list[str] = []
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        try:
            if importlib.util.find_spec(node.module.partition(".")[0]) is None:
                continue
            module = importlib.import_module(node.module)
        except ImportError:
            missing.append(node.module)
            continue
        missing += [f"{node.module}.{a.name}" for a in node.names if not hasattr(module, a.name)]
    return missing


PAGES = [Page(ROOT / "README.md"), *(Page(path) for path in sorted((ROOT / "docs").rglob("*.md")))]
