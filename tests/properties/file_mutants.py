"""Program files broken by structure: what `test_file_fuzz.py` feeds to `Program.from_json`.

A mutant is a change at one place of a file's content: something dropped, doubled, put elsewhere, taken from a like
place, another number, name, type, text, or a value of a wrong kind.
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
import re
from collections.abc import Iterator
from typing import Any

Path = tuple[str | int, ...]
JUNK: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 2**31, 2**63, 10**30, 1.5, float("nan"), float("inf"), "", "x", "\u2028\ud800é"),
    *([], {}, [[]], {"ref": "nobody"}, {"float": "nan"}, {"torch": "strided"}, {"device": "cuda:7"}, {"dtype": "f64"}),
]
WORDS = [
    "sum",
    "max",
    "min",
    "dp",
    "tp",
    "pp",
    "f32",
    "f64",
    "bf16",
    "i64",
    "bool",
    "fwd",
    "bwd",
    "opt",
    "value",
    "grad",
]


def forged(text: str, content: Any) -> str:
    """A file of another content, with its checksum right."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    head = json.loads(text) | {"sha256": hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()}
    return json.dumps(head | {"content": content})


def places(data: Any, path: Path = ()) -> Iterator[Path]:
    """Every place of nested data."""
    yield path
    items: Any = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield from places(value, (*path, key))


def there(data: Any, path: Path) -> Any:
    for key in path:
        data = data[key]
    return data


class Mutants:
    """Mutants of one content, as a seeded random number generator draws them."""

    def __init__(self, content: Any, seed: int) -> None:
        self.content, self.draw = content, random.Random(seed)
        # Diagnostics and sources say nothing of what is computed.
        dull = {"source", "source_text", "fqn", "cause", "diagnostics", "annotations", "costs"}
        every = [path for path in places(content) if path]
        self.places = [path for path in every if dull.isdisjoint(path)]
        self.dull = [path for path in every if not dull.isdisjoint(path)]
        self.alike: dict[Any, list[Path]] = {}
        for path in self.places:
            self.alike.setdefault(self.key(path), []).append(path)
        self.keys = sorted(self.alike, key=str)

    def key(self, path: Path) -> Any:
        """Places of one key mean the same: `type`, `args`, `ref`."""
        return next((key for key in reversed(path) if isinstance(key, str)), ""), path[0]

    def place(self) -> Path:
        """Rare kinds of places come up as often as frequent ones."""
        if self.draw.random() < 0.03 and self.dull:
            return self.draw.choice(self.dull)
        if self.draw.random() < 0.5:
            return self.draw.choice(self.places)
        return self.draw.choice(self.alike[self.draw.choice(self.keys)])

    def mutant(self) -> tuple[str, Any]:
        """What was changed, and the changed content."""
        while True:
            path = self.place()
            kind = self.draw.choice(["drop", "double", "swap", "alike", "tweak", "tweak", "tweak", "junk", "rename"])
            changed = copy.deepcopy(self.content)
            holder, key = there(changed, path[:-1]), path[-1]
            if self.change(kind, path, holder, key) and changed != self.content:
                return f"{kind} {'.'.join(map(str, path))}", changed

    def change(self, kind: str, path: Path, holder: Any, key: Any) -> bool:
        draw, value = self.draw, holder[key]
        if kind == "drop":
            del holder[key]
        elif kind == "double" and isinstance(holder, list):
            holder.insert(draw.randrange(len(holder) + 1), copy.deepcopy(value))
        elif kind == "swap" and isinstance(holder, list):
            other = draw.randrange(len(holder))
            holder[key], holder[other] = holder[other], value
        elif kind == "alike":
            holder[key] = copy.deepcopy(there(self.content, draw.choice(self.alike.get(self.key(path), [path]))))
        elif kind == "junk":
            holder[key] = copy.deepcopy(draw.choice(JUNK)) if draw.random() < 0.95 else deep(draw.randrange(300))
        elif kind == "rename" and isinstance(holder, dict) and len(holder) > 1:
            holder[draw.choice([*holder, "unknown"])] = holder.pop(key)
        elif kind == "tweak":
            holder[key] = self.tweaked(value)
        else:
            return False
        return True

    def tweaked(self, value: Any) -> Any:
        draw = self.draw
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            return draw.choice([value + 1, value - 1, -value, value * 2, 0, 1, 10**9, 2**62])
        if isinstance(value, float):
            return draw.choice([value * 2, -value, value + 1, 0.0])
        if not isinstance(value, str) or not value:
            return value
        words = [*re.finditer(r"\w+", value)]
        if not words:
            return value + "."
        word = draw.choice(words)
        number = word.group().isdigit()
        other = str(int(word.group()) + draw.choice([1, -1, 2, 10**9])) if number else draw.choice([*WORDS, "", "é"])
        return value[: word.start()] + other + value[word.end() :]


def deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def damaged(text: str, draw: random.Random) -> str:
    """A file's text cut short, or with some characters others."""
    kind, at = draw.randrange(4), draw.randrange(len(text))
    if kind == 0:
        return text[:at]
    if kind == 1:
        return text[:at] + text[at + draw.randrange(1, 30) :]
    if kind == 2:
        return text[:at] + draw.choice(["0", "9", '"', "}", "[", "\0", "é", "\ud800", "@tp", "[" * 5000]) + text[at:]
    other = draw.randrange(len(text))
    return text[:at] + text[other : other + 20] + text[at + 20 :]
