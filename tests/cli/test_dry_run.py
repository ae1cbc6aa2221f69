"""`piebald run --dry-run`: what would be trained, from the same plan that trains, and nothing is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from piebald.report.tables import History
from tests.cli.conftest import Command
from tests.cli.test_paper_files import FILES, prepared

ONE = """\
rounds = 1
data = { name = "digits" }
model = { name = "logistic" }
partition = { kind = "iid", clients = 3, limit = 90, validation = 0.2 }
"""
RECIPE = '[recipe]\nname = "hdafl"\n'
SEVERAL = '[[recipes]]\nname = "fedavg"\nvalidation = false\n[[recipes]]\nname = "local"\n'


def test_its_numbers_are_those_of_the_run(tmp_path: Path, command: Command) -> None:
    (tmp_path / "one.toml").write_text(ONE + RECIPE.replace("hdafl", "local"))
    code, said, error = command("run", "one.toml", "--dry-run", "--json")
    assert code == 0, error
    (row,) = json.loads(said)
    assert not [*tmp_path.rglob("run.db")]
    assert command("run", "one.toml", "--out", "run")[0] == 0
    with History(tmp_path / "run") as history:
        assert {name: row[name] for name in ("clients", "parameters", "shared", "model", "metric", "rounds")} == {
            name: history.meta[name] for name in ("clients", "parameters", "shared", "model", "metric", "rounds")
        }
        assert row["train rows"] == sum(x["examples"] for x in history.results if x["kind"] == "train")


def test_each_method_of_several_files_has_a_row_with_its_own_rows(tmp_path: Path, command: Command) -> None:
    (tmp_path / "one.toml").write_text(ONE + RECIPE.replace("hdafl", "scaffold"))
    (tmp_path / "two.toml").write_text("seeds = [3, 4]\n" + ONE + SEVERAL)
    code, said, error = command("run", "one.toml", "two.toml", "--dry-run", "--json")
    assert code == 0, error
    rows = json.loads(said)
    assert [(row["file"], row["method"], row["seeds"]) for row in rows] == [
        ("one.toml", "scaffold", 1), ("two.toml", "fedavg", 2), ("two.toml", "local", 2)
    ]  # fmt: skip
    whole, held = rows[1:]
    assert (whole["train rows"], whole["validation rows"]) == (held["train rows"] + held["validation rows"], 0)
    assert held["shared"] == 0
    assert command("compare", "two.toml", "--dry-run", "--json")[1].count('"method"') == 2


@pytest.mark.parametrize("flag", [(), ("--dry-run",)], ids=["run", "dry run"])
def test_what_a_run_would_refuse_is_refused_with_the_same_words(
    flag: tuple[str, ...], tmp_path: Path, command: Command
) -> None:
    (tmp_path / "wrong.toml").write_text(ONE + RECIPE.replace("hdafl", "fedbn"))  # without batch norm
    code, said, error = command("run", "wrong.toml", *flag)
    assert (code, said) == (2, "")
    assert "batch-norm" in error


def test_one_file_is_trained_at_a_time(tmp_path: Path, command: Command) -> None:
    for name in ("a.toml", "b.toml"):
        (tmp_path / name).write_text(ONE + RECIPE)
    assert command("run", "a.toml", "b.toml")[0] == 2
    assert not [*tmp_path.rglob("run.db")]


@prepared
@pytest.mark.full
def test_the_networks_of_figure_2a_have_the_numbers_of_the_benchmark(command: Command) -> None:
    """Before, the file trained on raw windows: 155,778 numbers."""
    from piebald.models import build_model

    file = next(file for file in FILES if file.stem == "cgau-figure-2a")
    code, said, error = command("run", file, "--dry-run", "--json", "--scale", "full")
    assert code == 0, error
    numbers = {row["method"]: row["parameters"] for row in json.loads(said)}
    gated, plain = (build_model(name, (90,), 2, units=(64, 64)) for name in ("gated_classifier", "plain_classifier"))
    counted = [sum(value.numel() for value in model.parameters()) for model in (gated, plain)]
    assert (numbers["gated, no conditioning"], numbers["ReLU"]) == tuple(counted)
