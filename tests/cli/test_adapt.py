"""`piebald adapt`: a newcomer's rows from a file, the methods that were tried, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from piebald import data

CGAU = """\
rounds = 3
keep = "best"
unseen = 2

[data]
name = "digits"

[partition]
kind = "dirichlet"
clients = 8
alpha = 0.3
limit = 400
validation = 0.2

[model]
name = "gated_classifier"
units = [16]

[recipe]
name = "cgau"
lr = 0.5
"""


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the finished run is copied from, once one test has made it."""
    return tmp_path_factory.mktemp("adapt") / "run"


@pytest.fixture
def finished(command, tmp_path: Path, kept: Path) -> str:
    if kept.exists():
        shutil.copytree(kept, tmp_path / "run")
        return "run"
    (tmp_path / "cgau.toml").write_text(CGAU)
    said = command("run", "cgau.toml", "--out", "run", "--json")
    assert said.code == 0, said
    facts = json.loads(said.out)
    assert 1 <= facts["best"] <= 3
    assert 0 <= facts["unseen"] <= 1
    shutil.copytree(tmp_path / "run", kept)
    return "run"


@pytest.fixture
def rows(tmp_path: Path) -> tuple[np.ndarray, np.ndarray]:
    digits = data.digits()
    x, y = digits.x[:120].numpy(), digits.y[:120].numpy()
    np.savez(tmp_path / "new.npz", x=x, y=y)
    return x, y


@pytest.mark.full
def test_a_newcomer_from_arrays(command, finished, rows, tmp_path: Path) -> None:
    said = command("adapt", finished, "--data", "new.npz", "--json", "--epochs", 3, "--out", "new.safetensors")
    assert said.code == 0, said
    adapted = json.loads(said.out)
    assert [method["name"] for method in adapted["methods"]] == [
        "global",
        "private",
        "head",
        "fine_tune",
        "mixed",
        "local",
    ]
    assert adapted["best"] in [method["name"] for method in adapted["methods"]]
    with safe_open("new.safetensors", framework="np") as file:
        assert "classifier.weight" in set(file.keys())


def test_a_table_for_people(command, finished, rows) -> None:
    said = command("adapt", finished, "--data", "new.npz", "--epochs", 2)
    assert said.code == 0, said
    assert "fine_tune" in said.out
    assert "best on the validation rows: " in said.out
    assert command("adapt", finished, "--data", "new.npz", "--epochs", 2, "--quiet").out == ""


@pytest.mark.full
def test_a_newcomer_from_a_table(command, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    (tmp_path / "run.toml").write_text(
        CGAU.replace("gated_classifier", "mlp").replace("units", "hidden").replace("cgau", "fedavg")
    )
    assert command("run", "run.toml", "--out", "plain", "--quiet").code == 0
    digits = data.digits()
    lines = [",".join([*(f"p{place}" for place in range(64)), "digit"])]
    for row in draw.choice(len(digits), 60, replace=False):
        lines.append(
            ",".join([*(f"{value:.4f}" for value in digits.x[row].flatten().tolist()), str(int(digits.y[row]))])
        )
    (tmp_path / "new.csv").write_text("\n".join(lines))
    said = command("adapt", "plain", "--data", "new.csv", "--target", "digit", "--json", "--epochs", 2)
    assert said.code == 0, said
    assert [method["name"] for method in json.loads(said.out)["methods"]] == [
        "global",
        "head",
        "fine_tune",
        "mixed",
        "local",
    ]


def test_a_newcomer_from_folders_of_images(command, finished, tmp_path: Path) -> None:
    from PIL import Image

    digits = data.digits()
    for place in range(80):
        folder = tmp_path / "scans" / str(int(digits.y[place]))
        folder.mkdir(parents=True, exist_ok=True)
        image = (digits.x[place, 0].numpy() * 255).astype(np.uint8)
        Image.fromarray(image).save(folder / f"{place}.png")
    said = command("adapt", finished, "--data", "scans", "--json", "--epochs", 2)
    assert said.code == 0, said
    assert 0 <= json.loads(said.out)["methods"][0]["validation"] <= 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nowhere", "--data", "new.npz"), "there is no run folder 'nowhere'"),
        (("run", "--data", "gone.npz"), "there is no file or folder 'gone.npz'"),
        (("run", "--data", "new.txt"), "there is no file or folder 'new.txt'"),
        (("run", "--data", "empty.npz"), "must hold arrays x and y, and owner if wanted, got z"),
        (("run", "--data", "table.csv"), "name the column to predict with --target COLUMN"),
        (("run", "--data", "gone.csv", "--target", "y"), "there is no file or folder 'gone.csv'"),
        (("run", "--data", "table.csv", "--target", "z"), "there is no column 'z'"),
        (("run", "--data", "new.npz", "--epochs", "0"), "epochs must be a whole number of at least 1, got 0"),
        (("run", "--data", "new.npz", "--validation", "0"), "has no validation rows"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(command, finished, rows, tmp_path: Path, words, message: str) -> None:
    np.savez(tmp_path / "empty.npz", z=np.zeros(3))
    (tmp_path / "table.csv").write_text("a,y\n1,2\n3,4\n")
    said = command("adapt", *words)
    assert said.code == 2
    assert message in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""
