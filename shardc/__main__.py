"""`python -m shardc` is the command `shardc`."""

from shardc.cli.main import app

if __name__ == "__main__":
    app(prog_name="shardc")
