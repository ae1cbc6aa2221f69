"""An archive of a stranger, in which a user runs commands: no Python code in it runs, whatever its name is.

Before, `cd archive; piebald export run` imported each optional package from a file of that name beside the run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import typer.main

from piebald.cli import main
from piebald.cli.program import app
from piebald.core import references
from piebald.core.errors import SettingError
from piebald.core.module_path import forget_current_folder
from piebald.core.references import Outside, Users
from tests.federation.conftest import provisioned
from tests.security import audited_commands

EXPERIMENT = """
rounds = 1
measure = "none"
data = { source = "rows.csv", client = "hospital", target = "ill" }
model = { name = "logistic" }
recipe = { name = "fedavg" }
runtime = { workers = 2, engine = "sequential" }
"""
TRANSFER = """
steps = 2
batch = 64
overlap_batch = 100
data = { name = "breast_cancer", overlap = 150 }
network = { hidden = [4], aligned = [4] }
method = { kind = "smmd" }
backend = { kind = "plain" }
"""
# the words of each command, which are run in this order; "" where another one runs the same code, or none of its own
COMMANDS = {
    "export": "export run --out model.safetensors",
    "resume": "resume run --rounds 2 --quiet",
    "predict": "predict run rows.csv --out predicted.csv",
    "ensemble": "ensemble run run --out joined",
    "report": "report run --out report",
    "adapt": "adapt run --data rows.csv --quiet",
    "errors": "errors run",
    "audit": "audit credentials/north",
    "backup": "backup run backup.tar",
    "restore": "restore backup.tar restored",
    "run": "run e.toml --out again --quiet",
    "train": "train e.toml --out trained --quiet",
    "compare": "compare e.toml --out both --quiet --set seeds=[0]",
    "tune": "tune e.toml --out tuned --quiet --set tune.budget={rounds=2}",
    "advise": "advise e.toml --out advised --quiet --set advise.budget={rounds=4}",
    "look": "look rows.csv --client hospital --target ill",
    "transfer": "transfer t.toml --out moved --quiet",
    "match": "",  # by `transfer`: it takes a second party, and the link is the same
    "serve": "",  # by `predict`, whose function it is; it ends when it is stopped
    **dict.fromkeys(("submit", "logs", "abort", "fetch"), ""),  # the link of `client`, to a server that runs
    "statistics": "statistics rows.csv --client hospital",
    "glm": "glm rows.csv --client hospital --target dose",
    "cox": "cox rows.csv --client hospital --time days --event dead",
    "survival": "survival rows.csv --client hospital --time days --event dead",
    "trees": "trees rows.csv --client hospital --target ill --out trees --set trees.rounds=2",
    "data": "data show rows.csv --client hospital --target ill",
    "recipes": "recipes",
    "version": "version",
    "new": "new ../made",
    "schema": "schema",
    "provision": "provision made.toml --out provisioned",
    "approve": "approve credentials/north",
    "client": "client credentials/north --data rows.csv --target ill --check",
    "server": "server credentials/server --check",
    "queue add": "queue add credentials/server e.toml",
    "queue list": "queue list credentials/server",
    "queue stop": "queue stop credentials/server 1",
    "queue resume": "queue resume credentials/server 1",
    "up": "up e.toml --local 3 --out federated --quiet",
    "status": "status federated",
    "site up": "",  # by `up`
    "stop": "",  # of a run that runs
}


def leaves(group: Any, *before: str) -> Iterator[str]:
    """The commands of the program."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from leaves(command, *before, name)
        else:
            yield " ".join([*before, name])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run, its experiment, its rows and credentials, and no code."""
    folder, rng = tmp_path_factory.mktemp("archive"), np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(120, 3)), columns=["age", "dose", "height"]).round(3)
    frame["hospital"], frame["ill"] = ["north", "south", "east"] * 40, rng.choice(["yes", "no"], 120)
    frame["days"], frame["dead"] = rng.integers(1, 50, 120), rng.integers(0, 2, 120)
    frame.to_csv(folder / "rows.csv", index=False)
    (folder / "e.toml").write_text(EXPERIMENT)
    (folder / "t.toml").write_text(TRANSFER)
    (folder / "made.toml").write_text('name = "f"\nhost = "127.0.0.1"\nport = 20001\nsites = ["a", "b"]\n')
    provisioned(folder / "credentials", ["north", "south", "east"])
    assert main(["run", str(folder / "e.toml"), "--out", str(folder / "run"), "--quiet"]) == 0
    return folder


@pytest.fixture
def archive(finished: Path, tmp_path: Path) -> Path:
    """A copy with a file of code for each package that is installed, and for some that are not."""
    folder = tmp_path / "archive"
    subprocess.run(["cp", "-r", str(finished), str(folder)], check=True)
    absent = {"pynvml", "cuda", "monkeytype", "pydot", "sitecustomize", "usercustomize", "piebald_x", "cupy", "nvidia"}
    names = {name.partition(".")[0] for name in metadata.packages_distributions()} | absent
    for name in names - set(sys.stdlib_module_names) - {"piebald", "tests"}:
        for place in (folder, folder / "run"):
            (place / f"{name}.py").write_text(f"with open({str(tmp_path / 'ran')!r}, 'a') as f: f.write(__file__)\n")
    installed = folder / "piebald_x-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Name: piebald-x\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[piebald.components]\nx = piebald_x\n")
    (folder / "x.pth").write_text("import piebald_x\n")
    return folder


def started(archive: Path, *words: str, given: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program of Python in the archive, and see that no code of it ran."""
    root, seen = Path(__file__).parents[2], archive.parent / "seen"
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "SEEN": str(seen)} | variables
    done = subprocess.run(
        [sys.executable, *words], cwd=archive, input=given, capture_output=True, text=True, env=environment,
        timeout=900, check=False,
    )  # fmt: skip
    assert not (archive.parent / "ran").exists(), (archive.parent / "ran").read_text() + done.stderr
    assert not seen.exists() or seen.read_text() == ""
    return done


def audited(archive: Path, commands: dict[str, str]) -> None:
    words = [line.split() for line in commands.values() if line]
    done = started(archive, "-P", audited_commands.__file__, given=json.dumps(words))
    assert done.returncode == 0, done.stderr
    codes = zip(words, json.loads(done.stdout.splitlines()[-1]), strict=True)
    assert [line for line, code in codes if code] == [], done.stderr


@pytest.mark.full
def test_commands_on_a_run_import_nothing_that_lies_beside_it(archive: Path) -> None:
    audited(archive, {name: COMMANDS[name] for name in ("export", "resume", "predict", "report")})


def test_every_command_is_tried() -> None:
    assert set(COMMANDS) == set(leaves(typer.main.get_command(app)))


@pytest.mark.long
def test_no_command_imports_anything_that_lies_in_the_current_folder(archive: Path) -> None:
    endings = ("client", "server")  # which end the process at once, whatever is left to do
    audited(archive, {name: line for name, line in COMMANDS.items() if name not in endings})
    for name in endings:
        started(archive, "-P", audited_commands.__file__, given=json.dumps([COMMANDS[name].split()]))


@pytest.mark.long
@pytest.mark.parametrize(
    "command",
    [
        ["-m", "piebald.cli"],
        ["-c", "import sys; sys.argv = sys.argv[1:]; from piebald.cli import main; sys.exit(main())", "piebald"],
    ],
    ids=["module", "code"],
)
def test_however_python_is_started(command: list[str], archive: Path) -> None:
    """An empty entry of PYTHONPATH is the current folder as well, from which Python itself then takes its hooks."""
    root = str(Path(__file__).parents[2])
    hooks = subprocess.run(
        [sys.executable, "-c", "import sys; print(*sys.modules)"], capture_output=True, text=True, check=True
    )
    for name in ("sitecustomize", "usercustomize", *hooks.stdout.split()):
        (archive / f"{name}.py").unlink(missing_ok=True)
    for path in (root, os.pathsep + root):
        done = started(archive, *command, *COMMANDS["export"].split(), PYTHONPATH=path)
        assert done.returncode == 0, done.stderr
        (archive / "model.safetensors").unlink()


@pytest.mark.long
def test_actors_of_ray_search_no_current_folder(archive: Path) -> None:
    pytest.importorskip("ray")
    words = ["run", "e.toml", "--out", "r", "--set", "runtime={ kind = 'ray', engine = 'sequential', workers = 1 }"]
    done = started(archive, "-m", "piebald.cli", *words)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("named", [False, True])
def test_what_is_installed_from_the_current_folder_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    """Before, nobody could work in the folder of a package of components that was installed from there."""
    monkeypatch.chdir(tmp_path)
    here, standard = str(tmp_path), str(Path(os.__file__).parent)
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{os.pathsep}relative{os.pathsep}{here if named else ''}")
    monkeypatch.setattr(sys, "path", ["", here, "/elsewhere", standard, "/site-packages", here])
    forget_current_folder()
    assert sys.path == [here] * named + ["/elsewhere", standard, "/site-packages", here]
    assert os.environ.get("PYTHONPATH") == (here if named else None)


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Files that a test lists are forgotten after it."""
    monkeypatch.setattr(references, "_files", {})
    yield
    for name in [name for name in sys.modules if name.startswith("lab_of_")]:
        del sys.modules[name]


def test_a_file_that_is_listed_brings_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: None
) -> None:
    """Not its neighbours, not a file of its name elsewhere, and none in place of a package that is installed."""
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "lab_of_mine.py").write_text("class Net: pass\n")
    (tmp_path / "lab" / "lab_of_others.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "lab_of_mine.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "torch.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.chdir(tmp_path)
    user = Users(tmp_path)
    assert user.find("lab/lab_of_mine.py:Net", "model").__module__ == "lab_of_mine"
    for name in ("lab_of_others:Net", "lab.lab_of_others:Net", "torch.py:Net", "lab_of_mine.py:Net"):
        with pytest.raises(SettingError):
            user.find(name, "model")
    stranger = Outside(["lab/lab_of_mine.py"], "list it", tmp_path / "run")
    assert stranger.find("elsewhere/lab_of_mine.py:Net", "model") is user.find("lab_of_mine:Net", "model")
    with pytest.raises(SettingError, match="not allowed"):
        stranger.find("lab_of_others.py:Net", "model")


def test_a_package_is_listed_by_its_first_file(tmp_path: Path, forgotten: None) -> None:
    package = tmp_path / "lab_of_parts"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "models.py").write_text("class Net: pass\n")
    Users(tmp_path).use(["lab_of_parts/__init__.py"])
    assert Users().find("lab_of_parts.models:Net", "model").__name__ == "Net"
