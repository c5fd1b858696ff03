"""The version of shardc, where every layer can read it; pyproject.toml has the same."""

VERSION = "0.1.0"
