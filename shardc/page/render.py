"""The page as HTML: one file with its script, its style and its content in it, which needs no network."""

from __future__ import annotations

import html
import json
from importlib.resources import files
from typing import Any

TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header id="head"></header>
<nav id="tabs" role="tablist"></nav>
<main>
<section id="view" tabindex="-1"></section>
<aside id="details" aria-live="polite"></aside>
</main>
<script type="application/json" id="content">{content}</script>
<script>{script}</script>
</body>
</html>
"""  # noqa: E501


def render(content: dict[str, Any], title: str) -> str:
    """The page of a program's content, as `content.py` has it."""
    ours = files("shardc.page")
    return TEMPLATE.format(
        title=html.escape(title),
        style=(ours / "page.css").read_text(encoding="utf-8"),
        script=(ours / "page.js").read_text(encoding="utf-8"),
        content=_embedded(content),
    )


def frame(page: str, height: int = 640) -> str:
    """The page as a notebook shows it: in a frame of its own, whose script cannot reach the notebook's."""
    style = "width: 100%; border: 1px solid #d0d7de; border-radius: 6px"
    return f'<iframe sandbox="allow-scripts" srcdoc="{html.escape(page)}" height="{height}" style="{style}"></iframe>'


def _embedded(content: dict[str, Any]) -> str:
    """JSON that no text in it can end: names, files and annotations are whatever a user wrote."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
