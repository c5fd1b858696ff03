"""Files of `configs/` by name: hardware and plans. A wheel has them in share/shardc; a checkout, where they are."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from shardc.ir.diagnostic import did_you_mean, error

REPOSITORY = Path(__file__).parents[2] / "configs"
INSTALLED = "share/shardc"  # pyproject.toml puts folders of configs/ there
PREFIX = "shardc:"  # of the name of a plan of ours, where the path of a file may stand


def packaged(kind: str) -> dict[str, Path]:
    """The YAML files of a folder of configs/, by name: of the repository around the package, or of the wheel."""
    if (REPOSITORY / kind).is_dir():
        return {path.stem: path for path in sorted((REPOSITORY / kind).glob("*.yaml"))}
    try:
        files = distribution("shardc").files or ()
    except PackageNotFoundError:  # the sources are not installed
        return {}
    folder = f"{INSTALLED}/{kind}"
    known = [file for file in files if file.parent.as_posix().endswith(folder) and file.suffix == ".yaml"]
    return {file.stem: Path(str(file.locate())) for file in sorted(known)}


def plan_path(path: str | Path) -> Path:
    """The file of a plan: as it is written, or of ours by name, `shardc:gpt2`. Raises ShardcError (SC208)."""
    text = str(path)
    if not text.startswith(PREFIX):
        return Path(path)
    plans, name = packaged("plans"), text.removeprefix(PREFIX)
    if name not in plans:
        raise error("SC208", f"shardc brings no plan named '{name}'", hint=did_you_mean(name, plans, "plans"))
    return plans[name]
