"""`piebald new` makes folders that run at once."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import pytest

from piebald.cli import main
from piebald.core import references

KINDS = ("table", "images", "text", "sites", "method")


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_has_an_experiment_a_test_and_a_notebook_of_what_its_page_shows(kind: str, tmp_path: Path) -> None:
    assert main(["new", str(tmp_path / "a"), "--template", kind]) == 0
    files = {path.name: path.read_text("utf-8") for path in (tmp_path / "a").iterdir()}
    assert tomllib.loads(files["experiment.toml"])["rounds"] >= 3
    assert any(name.startswith("test_") and "def test_" in text for name, text in files.items())
    cells = json.loads(files["notebook.ipynb"])["cells"]
    for cell in cells:
        assert cell["source"] in files["README.md"] or "```" in cell["source"]
        if cell["cell_type"] == "code":
            compile(cell["source"], kind, "exec")
    assert cells[0]["source"].startswith("# ")
    assert "```python" not in "".join(cell["source"] for cell in cells)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["table", "text"])  # with Python of their own
def test_its_experiment_runs(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main(["new", str(tmp_path / "a"), "--template", kind])
    monkeypatch.chdir(tmp_path / "a")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(references, "_files", {})
    for path in (tmp_path / "a").glob("*.py"):  # modules of these names are of this folder alone
        monkeypatch.setitem(sys.modules, path.stem, None)  # afterwards it is as it was
        del sys.modules[path.stem]
    assert main(["run", "experiment.toml", "--set", "rounds=1", "--out", "run", "--quiet"]) == 0


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", str(tmp_path)]) == 2
    assert "give the name of a new folder" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
