"""The package as it is distributed: the wheel in an environment of its own, beside a package of somebody else.

test_container.py installs from the sdist, by the commands of the container file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]

LAB = {
    "pyproject.toml": """
        [project]
        name = "otherlab"
        version = "1.2"
        dependencies = ["piebald"]
        [project.entry-points."piebald.components"]
        otherlab = "otherlab"
        [build-system]
        requires = ["hatchling"]
        build-backend = "hatchling.build"
        """,
    "otherlab/__init__.py": '''
        """Trainer, model and data set of another lab."""
        from torch import nn
        from pydantic import Field
        from piebald import data
        from piebald.methods.training import Sgd

        class Careful(Sgd):
            """SGD near the global model.

            Attributes:
                care: weight of the distance to the global model.
            """
            care: float = Field(default=0.1, ge=0)
            def train(self, inputs, context):
                return self.output(self.run_sgd(inputs, context, prox=self.care))

        class Flat(nn.Sequential):
            def __init__(self, input_shape, outputs):
                super().__init__(nn.Flatten(), nn.Linear(64, outputs))

        def rows():
            return data.digits()
        ''',
    "try.toml": """
        rounds = 2
        data = { name = "otherlab:rows" }
        partition = { kind = "iid", clients = 2, limit = 100 }
        model = { name = "otherlab:Flat" }
        recipe = { name = "fedavg", training = { kind = "careful", care = 0.2 } }
        runtime = { engine = "sequential", workers = 2 }
        """,
}


ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}


def output(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel."""
    folder = tmp_path_factory.mktemp("dist")
    output(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    return folder


def environment(folder: Path) -> Path:
    """The Python of a new environment that has what Piebald needs, and not Piebald."""
    output(sys.executable, "-m", "venv", folder / "env", cwd=folder)
    python = folder / "env" / "bin" / "python"
    place = Path(output(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=folder).strip())
    needed = Path(torch.__file__).parents[1]  # the files there are seen, but their .pth files are not read
    (place / "needed.pth").write_text(f"{needed}\n")
    return python


@pytest.mark.long
@pytest.mark.full
def test_in_an_environment_of_its_own(built: Path, tmp_path: Path) -> None:
    """Another package's trainer, model and data set are found by its entry point, wherever a recipe runs."""
    python = environment(tmp_path)
    for name, text in LAB.items():
        (tmp_path / "lab" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lab" / name).write_text(textwrap.dedent(text))
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    output(*install, next(built.glob("*.whl")), tmp_path / "lab", cwd=tmp_path)
    where = output(python, "-c", "import piebald; print(piebald.__file__)", cwd=tmp_path)
    assert str(tmp_path) in where
    piebald = tmp_path / "env" / "bin" / "piebald"
    version = output(piebald, "--version", cwd=tmp_path).split()[1]
    assert version == __import__("piebald").__version__
    file = tmp_path / "lab" / "try.toml"
    said = output(piebald, "run", file, "--out", "run", "--json", cwd=tmp_path)
    assert json.loads(said)["rounds"] == 2
    output(piebald, "report", "run", "--out", "page", cwd=tmp_path)
    is_resumed(piebald, file, json.loads(said), tmp_path)
    runs_on_ray(piebald, file, json.loads(said), tmp_path)
    is_for_sites_that_allow_it(piebald, file, tmp_path)


def is_resumed(piebald: Path, file: Path, whole: dict[str, Any], folder: Path) -> None:
    """A run that is stopped by its budget goes on with the other package."""
    output(piebald, "run", file, "--out", "short", "--set", "rounds=1", "--quiet", cwd=folder)
    resumed = json.loads(
        output(piebald, "resume", "short", "--rounds", "2", "--plugin", "otherlab", "--json", cwd=folder)
    )
    assert (resumed["rounds"], resumed["accuracy"]) == (2, whole["accuracy"])


def runs_on_ray(piebald: Path, file: Path, whole: dict[str, Any], folder: Path) -> None:
    pytest.importorskip("ray")
    runtime = 'runtime={ kind = "ray", engine = "sequential", workers = 1 }'
    said = json.loads(output(piebald, "run", file, "--out", "ray", "--json", "--set", runtime, cwd=folder))
    assert said["accuracy"] == pytest.approx(whole["accuracy"], abs=1e-3)


def is_for_sites_that_allow_it(piebald: Path, file: Path, folder: Path) -> None:
    """Of two sites that have the package, the one that does not allow it takes no part, and both ends say so."""
    from piebald.federation.credentials.provisioning import Description, provision
    from piebald.federation.hub.local_federation import free_port

    credentials, sites = folder / "credentials", ["east", "west"]
    provision(Description(name="two", host="127.0.0.1", port=free_port(), days=2, sites=sites), credentials)
    (credentials / "east" / "site.toml").write_text('[policy]\nplugins = ["otherlab"]\n')
    pipes: Any = {"env": ENVIRONMENT, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    clients = {name: subprocess.Popen([piebald, "client", credentials / name], cwd=folder, **pipes) for name in sites}
    try:
        server = [piebald, "server", credentials / "server", file, "--out", "federated"]
        done = subprocess.run([*map(str, server)], cwd=folder, timeout=300, check=False, **pipes)
    finally:
        for process in clients.values():
            process.terminate()
        said = {name: process.communicate(timeout=60)[0] for name, process in clients.items()}
    refused = "the plugin 'otherlab' is not allowed here: name it in plugins of the policy, if you trust it"
    assert refused in done.stdout
    assert refused in said["west"]
    assert refused not in said["east"]
    assert "Traceback" not in done.stdout + said["east"] + said["west"]


@pytest.mark.full
def test_the_wheel_has_what_is_no_code(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
    in_tree = {str(path.relative_to(ROOT)) for path in (ROOT / "piebald").rglob("*") if path.is_file()}
    in_tree = {name for name in in_tree if "__pycache__" not in name}
    assert {name for name in names if not name.split("/")[0].endswith(".dist-info")} == in_tree
    assert {"piebald/py.typed", "piebald/experiments/default.toml"} <= names
