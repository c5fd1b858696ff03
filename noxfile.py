"""The tests over versions of Python and torch.

nox --session tests                                            all of them, in each environment
nox --session "tests-3.12(torch='2.11.0')" -- tests/api        what is given
nox --session sample                                           a few minutes of it in each: SAMPLE below
"""

import nox

nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["tests", "package"]

PYTHON, TORCH = ["3.11", "3.12", "3.13"], ["2.11.0", "2.12.1", "2.13.0"]
SAMPLE = [  # tracing, whose files torch's insides reach into; whole steps; checkpoints, of torch's format
    "tests/frontend/test_trace.py",
    "tests/frontend/test_trace_state.py",
    "tests/passes/test_normalize.py",
    "tests/api/test_training.py",
    "tests/runtime/test_checkpoint.py",
]


@nox.session(python=PYTHON)
@nox.parametrize("torch", TORCH)
def tests(session: nox.Session, torch: str) -> None:
    """Run pytest, on the whole suite or on what is given."""
    _install(session, torch)
    session.run("pytest", "-n", "2", "--dist", "worksteal", *session.posargs)


@nox.session(python=PYTHON)
@nox.parametrize("torch", TORCH)
def sample(session: nox.Session, torch: str) -> None:
    """Run the tests of SAMPLE, or what is given, in one process."""
    _install(session, torch)
    session.run("pytest", "-q", *(session.posargs or SAMPLE))


def _install(session: nox.Session, torch: str) -> None:
    session.install(f"torch=={torch}")
    session.install("-e", ".[test,examples]")


@nox.session(python="3.11")
def package(session: nox.Session) -> None:
    """Build wheel and source distribution, and check what an index would show of them."""
    session.install("build", "twine")
    session.run("python", "-m", "build", "--outdir", "build/dist")
    session.run("twine", "check", "--strict", "build/dist/*")
