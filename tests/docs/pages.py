"""The project's Markdown pages and what is in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced piece of code: its language, its text, and the line of the page that it starts on."""

    language: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text("utf-8")
    return [Block(m[1], m[2], text.count("\n", 0, m.start(2)) + 1) for m in _FENCE.finditer(text)]


def links(page: Path) -> list[str]:
    text = _FENCE.sub("", page.read_text("utf-8"))
    return [first or second for first, second in _LINK.findall(re.sub(r"`[^`\n]*`", "", text))]


def anchors(page: Path) -> set[str]:
    """What headings can be linked to as, by GitHub's rule."""
    text = _FENCE.sub("", page.read_text("utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in _HEADING.findall(text)}


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))
