"""The outputs that the tutorial shows are what its commands and its Python print, up to the arithmetic of a machine."""

from __future__ import annotations

import contextlib
import io
import math
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

PAGE = pages.ROOT / "docs" / "tutorial.md"
VOLATILE = {"wall", "seconds"}  # rows whose values are times


def outputs() -> Iterator[tuple[str, str, str]]:
    """What is run on the page, how, and what the page shows as its output ("" where nothing is shown)."""
    blocks = [block for block in pages.blocks(PAGE) if block.language in ("python", "console", "toml", "text")]
    for block, after in zip(blocks, [*blocks[1:], None], strict=True):
        following = after.text if after is not None and after.language == "text" else ""
        if block.language in ("python", "toml"):
            yield block.language, block.text, following
        elif block.language == "console":
            for command in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
                line, _, shown = command.partition("\n")
                if not shown.strip():  # shown below the commands
                    shown, following = following, ""
                yield "console", line, shown


@pytest.mark.full
def test_the_tutorial_prints_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = ModuleType("tutorial")
    monkeypatch.setitem(sys.modules, "tutorial", module)
    compared = 0
    for language, text, shown in outputs():
        if language == "toml":
            if named := re.match(r"# ([\w-]+\.toml)\n", text):
                Path(named[1]).write_text(text, "utf-8")
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            if language == "python":
                exec(compile(text, str(PAGE), "exec"), vars(module))
            elif text.startswith("piebald "):
                main(shlex.split(text.removeprefix("piebald "), comments=True))
        if shown:
            compared += 1
            assert_alike(shown, printed.getvalue(), text)
    assert compared >= 6


def assert_alike(shown: str, printed: str, what: str) -> None:
    """Compare line by line and word by word; numbers may differ by what another machine's arithmetic changes."""
    wanted, found = ([line.split() for line in text.strip().splitlines()] for text in (shown, printed))
    assert len(found) >= len(wanted), f"{what}\nprints\n{printed}\nand the page shows\n{shown}"
    for mine, theirs in zip(wanted, found, strict=False):
        assert len(mine) <= len(theirs), f"{what}\nprints {' '.join(theirs)}\nand the page shows {' '.join(mine)}"
        for one, two in zip(mine, theirs, strict=False):  # the page may show the first columns alone
            alike = mine[0] in VOLATILE or one == two or _near(one, two)
            assert alike, f"{what}\nprints {' '.join(theirs)}\nand the page shows {' '.join(mine)}"


def _near(one: str, two: str) -> bool:
    numbers = [re.sub(r"[\[\],:%]", "", word) for word in (one, two)]
    try:
        a, b = map(float, numbers)
    except ValueError:
        return False
    return math.isclose(a, b, rel_tol=0.05, abs_tol=0.02)
