"""The how-to "Extend Piebald from outside", in processes of its own: a module outside the tree, wherever it runs."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import pages

from piebald import write_report
from tests import processes

PAGE = pages.ROOT / "docs" / "howto" / "extend.md"
BLOCKS = pages.blocks(PAGE)


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    """A folder with the files of the page: its module and its experiment."""
    return with_files(tmp_path)


def with_files(folder: Path) -> Path:
    for block in BLOCKS:
        if named := re.match(r"# ([\w-]+\.(?:py|toml))\n", block.text):
            (folder / named[1]).write_text(block.text, "utf-8")
    return folder


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Such a folder with a run whose process died after its first checkpoint; tests take copies of it."""
    folder = with_files(tmp_path_factory.mktemp("stopped"))
    stop_after_one_round(folder)
    return folder


def piebald(folder: Path, *words: str, code: int = 0) -> str:
    """Run a command in a folder; returns what it printed."""
    done = processes.run(processes.command(*words), cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout if code == 0 else done.stderr


@pytest.mark.full
def test_the_module_is_found_beside_the_file(lab: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    piebald(elsewhere, "run", str(lab / "mine.toml"), "--set", "rounds=1", "--out", "run", "--quiet")
    (page, *_) = write_report([elsewhere / "run"], elsewhere / "report")  # this process does not know the module
    assert page.is_file()


@pytest.mark.full
def test_python_on_the_page_runs(lab: Path) -> None:
    text = "\n".join(b.text for b in BLOCKS if b.language == "python" and not b.text.startswith("# mylab.py"))
    done = processes.run([sys.executable, "-c", text], cwd=lab, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_a_folder_from_a_stranger_brings_no_code(stopped: Path, tmp_path: Path) -> None:
    """Neither a module in the run folder nor one that it names is imported where it is not in reach by itself."""
    lab = Path(shutil.copytree(stopped, tmp_path / "lab"))
    shutil.copy(lab / "mylab.py", lab / "run" / "mylab.py")
    marker = tmp_path / "was_here"
    with (lab / "run" / "mylab.py").open("a") as file:
        file.write(f"\nopen({str(marker)!r}, 'w').close()\n")
    (lab / "mylab.py").unlink()
    for place, run in ((lab, "run"), (lab / "run", "."), (lab / "run", str(lab / "run"))):
        said = piebald(place, "resume", run, code=2)
        assert "the plugin 'mylab' is not allowed here: allow it with --plugin" in said
        said = piebald(place, "resume", run, "--plugin", "mylab", code=2)
        assert "needs the plugin mylab" in said
        assert "there is no module 'mylab': install its package, or name its file" in said
        assert said.count("\n") == 1
    assert not marker.exists()


@pytest.mark.full
def test_a_run_that_was_stopped_is_resumed(stopped: Path, tmp_path: Path) -> None:
    lab = Path(shutil.copytree(stopped, tmp_path / "lab"))
    resumed = json.loads(piebald(lab, "resume", "run", "--plugin", "mylab.py", "--json"))
    whole = json.loads(piebald(lab, "run", "mine.toml", "--set", "runtime.engine=sequential", "--out", "o", "--json"))
    assert resumed["accuracy"] == whole["accuracy"]
    assert resumed["rounds"] == 3


def stop_after_one_round(lab: Path) -> None:
    """A run in the folder "run" whose process died after its first checkpoint."""
    words = ["run", "mine.toml", "--out", "run", "--set", "runtime.engine=sequential", "--set", "checkpoint_every=1"]
    code = f"""
import os
from piebald.storage.store import RunStore
before = RunStore.commit
def commit(self, *arguments, **named):
    before(self, *arguments, **named)
    if self.last_checkpoint() is not None:
        os._exit(9)
RunStore.commit = commit
from piebald.cli import main
main({words!r})
"""
    done = processes.run([sys.executable, "-c", code], cwd=lab, capture_output=True, text=True, timeout=300)
    assert done.returncode == 9, done.stderr


@pytest.mark.long
def test_workers_and_ray_give_the_same_run(lab: Path) -> None:
    pytest.importorskip("ray")
    ends: list[float] = []
    for runtime in (
        '{ engine = "sequential" }',
        '{ engine = "sequential", workers = 2 }',
        '{ kind = "ray", engine = "sequential", workers = 1 }',
    ):
        said = piebald(lab, "run", "mine.toml", "--out", f"run-{len(ends)}", "--json", "--set", f"runtime={runtime}")
        ends.append(json.loads(said)["accuracy"])
    assert ends == [pytest.approx(ends[0], abs=1e-3)] * 3


@pytest.mark.long
def test_a_federation_on_this_machine(lab: Path) -> None:
    said = piebald(lab, "up", "mine.toml", "--local", "2", "--out", "up", "--json")
    assert json.loads(said)["rounds"] == 3
