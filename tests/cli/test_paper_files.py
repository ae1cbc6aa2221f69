"""The settings of the papers' tables in `examples/papers`: both scales are read, and each file trains."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from piebald.core.errors import SettingError
from piebald.experiments.file import ExperimentSettings
from piebald.vertical.transfer_settings import TransferSettings
from tests.cli.conftest import Command

FILES = sorted((Path(__file__).parents[2] / "examples" / "papers").glob("*.toml"))
FEW = ["rounds=2", "seeds=[0]"]
# fewer rounds, and fewer of CIFAR-10's rows where the partition allows, so that a file takes seconds
SMALLER = {
    **{
        name: [*FEW, "partition.limit=1200"]
        for name in ("cgau-figure-2a", "cgau-figure-2b", "distfl-table-5", "metis-table-1")
    },
    "metis-table-1-right": ["stop.seconds=200", "seeds=[0]", "partition.limit=1200"],
    **{f"smmd-table-{number}": ["steps=2"] for number in (1, 2, 3)},
}
SETTINGS = """\
[[recipes]]
name = "fedavg"
[data]
name = "digits"
[partition]
kind = "iid"
clients = 3
[model]
name = "mlp"
"""
prepared = pytest.mark.skipif(
    "PIEBALD_DATA" not in os.environ, reason="PIEBALD_DATA is not set: set it to the folder of prepared data sets"
)


def settings_class(file: Path) -> type[ExperimentSettings] | type[TransferSettings]:
    return TransferSettings if file.stem.startswith("smmd") else ExperimentSettings


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_file_has_the_papers_scale_and_says_how_to_ask_for_it(file: Path) -> None:
    small, full = settings_class(file).load(file), settings_class(file).load(file, scale="full")
    assert small.table() != full.table()
    assert "--scale full" in file.read_text()
    if isinstance(full, ExperimentSettings):
        assert full.built_recipes().keys() == small.built_recipes().keys()  # type: ignore[union-attr]


def test_flags_change_what_a_scale_says(tmp_path: Path) -> None:
    file = tmp_path / "table.toml"
    file.write_text(f"rounds = 2\n{SETTINGS}[scales.full]\nrounds = 9\npartition.clients = 5\nrecipes.lr = 0.3\n")
    full = ExperimentSettings.load(file, ["partition.clients=4"], scale="full")
    assert (full.rounds, full.table()["partition"]["clients"]) == (9, 4)
    assert full.built_recipes()["fedavg"].training.lr == 0.3  # type: ignore[attr-defined]
    assert ExperimentSettings.load(file).rounds == 2


@pytest.mark.parametrize(
    ("more", "scale", "message"),
    [
        ("[scales.full]\nrounds = 3", "ful", r"has no \[scales.ful\] for --scale ful; its scales are: 'full'"),
        ("", "full", "its scales are: none"),
        ("[scales]\nfull = 3", "full", r"table.toml:10: scales must be tables, such as \[scales.full\]"),
        ("[scales.full]\nrounds = 0", "full", "table.toml:11: rounds"),
        ("[scales.full]\nrecipes.lr = -1", "full", "table.toml:11: .*lr"),
    ],
)
def test_a_wrong_scale_is_told_with_its_line(tmp_path: Path, more: str, scale: str, message: str) -> None:
    file = tmp_path / "table.toml"
    file.write_text(SETTINGS + more)
    with pytest.raises(SettingError, match=message):
        ExperimentSettings.load(file, scale=scale).built_recipes()


@prepared
@pytest.mark.long
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_file_trains(file: Path, command: Command) -> None:
    flags = [word for change in SMALLER.get(file.stem, FEW) for word in ("--set", change)]
    word = "transfer" if settings_class(file) is TransferSettings else "compare"
    code, said, error = command(word, file, *flags, "--out", "run")
    assert code == 0, error
    assert "auc" in said.lower() if word == "transfer" or file.stem == "cgau-figure-2a" else "accuracy" in said
