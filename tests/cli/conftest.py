"""A valid experiment file, and a command line that can be called."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from piebald.cli import main

GOOD = """\
rounds = 2
seed = 0

[data]
name = "digits"

[partition]
kind = "dirichlet"
clients = 10
alpha = 0.5

[model]
name = "mlp"

[recipe]
name = "fedavg"
lr = 0.1
"""


class Said(NamedTuple):
    """The result of a command: its exit code and its output."""

    code: int
    out: str
    err: str


Command = Callable[..., Said]


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A valid experiment in a folder of its own."""
    file = tmp_path / "experiment.toml"
    file.write_text(GOOD)
    return file


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Call `piebald` in an empty folder, in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PIEBALD_DEBUG", raising=False)

    def call(*words: object) -> Said:
        code = main([os.fspath(word) if isinstance(word, Path) else str(word) for word in words])
        said = capsys.readouterr()
        return Said(code, said.out, said.err)

    return call
