"""The outputs that pages show are what their commands and their Python print, up to the arithmetic of a machine."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from piebald.cli import main

sys.path.insert(0, str(Path(__file__).parent))
import pages
from printed import assert_alike

ELSEWHERE = {
    "examples",
    "extend.md",
    "federation.md",
    "operate.md",
    "should-we-train-together.md",
    "tutorial-table.md",
}  # in their own tests


def outputs(page: Path) -> Iterator[tuple[str, str, str]]:
    """What is run on the page, how, and what the page shows as its output ("" where nothing is shown)."""
    blocks = [block for block in pages.blocks(page) if block.language in ("python", "console", "toml", "text")]
    for block, after in itertools.zip_longest(blocks, blocks[1:]):
        below = after is not None and after.language == "text" and not after.text.startswith("$ ")
        following = after.text if below else ""
        if block.language in ("python", "toml"):
            yield block.language, block.text, following if block.language == "python" else ""
        elif block.language == "console":
            for command in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
                line, _, shown = command.partition("\n")
                if not shown.strip():  # shown below the commands
                    shown, following = following, ""
                if line.startswith("piebald "):
                    yield "console", line, shown


SHOWING = [
    page
    for page in pages.PAGES
    if not {page.name, page.parent.name} & ELSEWHERE and any(shown.strip() for *_, shown in outputs(page))
]


@pytest.mark.full
@pytest.mark.parametrize("page", SHOWING, ids=pages.name)
def test_a_page_prints_what_it_shows(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    compared = 0
    for language, text, shown in outputs(page):
        if language == "toml":
            if named := re.match(r"# ([\w-]+\.toml)\n", text):
                Path(named[1]).write_text(text, "utf-8")
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            if language == "python":
                exec(compile(text, str(page), "exec"), vars(module))
            else:
                main(shlex.split(text.removeprefix("piebald "), comments=True))
        if shown:
            compared += 1
            assert_alike(shown, printed.getvalue(), text)
    assert compared >= (6 if page.name == "tutorial.md" else 1)
