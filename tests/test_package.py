"""The package as it is distributed: wheel and sdist in environments of their own, beside a package of somebody else."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

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
        from piebald.training import Sgd

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


def output(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    output(sys.executable, "-m", "hatchling", "build", "-d", folder, cwd=ROOT)
    return folder


def environment(folder: Path) -> Path:
    """The Python of a new environment that has what Piebald needs, and not Piebald."""
    output(sys.executable, "-m", "venv", folder / "env", cwd=folder)
    python = folder / "env" / "bin" / "python"
    place = Path(output(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=folder).strip())
    needed = Path(torch.__file__).parents[1]  # the files there are seen, but their .pth files are not read
    (place / "needed.pth").write_text(f"{needed}\n")
    return python


@pytest.mark.full
@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
def test_in_an_environment_of_its_own(built: Path, tmp_path: Path, kind: str) -> None:
    """Another package's trainer, model and data set are found by its entry point; the run is resumed."""
    python = environment(tmp_path)
    for name, text in LAB.items():
        (tmp_path / "lab" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lab" / name).write_text(textwrap.dedent(text))
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    output(*install, next(built.glob(kind)), tmp_path / "lab", cwd=tmp_path)
    where = output(python, "-c", "import piebald; print(piebald.__file__)", cwd=tmp_path)
    assert str(tmp_path) in where
    piebald = tmp_path / "env" / "bin" / "piebald"
    version = output(piebald, "--version", cwd=tmp_path).split()[1]
    assert version == __import__("piebald").__version__
    said = output(piebald, "run", tmp_path / "lab" / "try.toml", "--out", "run", "--json", cwd=tmp_path)
    assert said == output(piebald, "resume", "run", "--json", cwd=tmp_path)
    output(piebald, "report", "run", "--out", "page", cwd=tmp_path)


@pytest.mark.full
def test_the_wheel_has_what_is_no_code(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
    in_tree = {str(path.relative_to(ROOT)) for path in (ROOT / "piebald").rglob("*") if path.is_file()}
    in_tree = {name for name in in_tree if "__pycache__" not in name}
    assert {name for name in names if not name.split("/")[0].endswith(".dist-info")} == in_tree
    assert {"piebald/py.typed", "piebald/experiment_default.toml"} <= names
