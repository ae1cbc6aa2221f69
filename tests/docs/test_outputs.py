"""The outputs that the tutorial shows are what its commands and its Python print, up to the arithmetic of a machine."""

from __future__ import annotations

import contextlib
import io
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

PAGE = pages.ROOT / "docs" / "tutorial.md"


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
