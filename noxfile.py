"""The tests over versions of Python and torch: `nox`, or `nox --session "tests-3.12(torch='2.11.0')" -- tests/api`."""

import nox

nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True


@nox.session(python=["3.11", "3.12", "3.13"])
@nox.parametrize("torch", ["2.11.0", "2.12.0", "2.13.0"])
def tests(session: nox.Session, torch: str) -> None:
    """Run pytest, on the whole suite or on what is given."""
    session.install(f"torch=={torch}")
    session.install("-e", ".[test,examples]")
    session.run("pytest", "-n", "2", "--dist", "worksteal", *session.posargs)


@nox.session(python="3.11")
def package(session: nox.Session) -> None:
    """Build wheel and source distribution, and check what an index would show of them."""
    session.install("build", "twine")
    session.run("python", "-m", "build", "--outdir", "build/dist")
    session.run("twine", "check", "--strict", "build/dist/*")
