"""`piebald statistics` and `piebald glm`: tables for people within 80 columns, one JSON object for programs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pandas
import pytest

from piebald.data.clients.prepared import constants_of
from piebald.experiments.file import ExperimentSettings


@pytest.fixture
def table(tmp_path: Path) -> str:
    """A table with a gap, a long name, and a name that means something to a terminal."""
    frame = pandas.DataFrame({"site": list("aabbcc"), "dose [bold]": [1.5, 2.5, -1e9, 4.0, 5.0, None]})
    frame["a column whose name is longer than most names of columns"] = range(6)
    frame["sex"] = list("fmfmfm")
    frame["y"] = [0, 1, 1, 0, 1, 0]
    frame.to_csv(tmp_path / "rows.csv", index=False)
    return str(tmp_path / "rows.csv")


def test_tables_fit_the_screen(command, table) -> None:
    said = command("statistics", table, "--client", "site", "--bins", 3, "--table", "sex,y", "--by-client",
                   *[word for share in range(1, 10) for word in ("--quantile", share / 10)])  # fmt: skip
    assert (said.code, said.err) == (0, "")
    assert max(map(len, said.out.splitlines())) <= 80
    assert "dose [bold]" in said.out
    assert "6 rows of 3 clients, exact." in said.out


def test_json_is_one_object(command, table) -> None:
    said = command("statistics", table, "--client", "site", "--json")
    found = json.loads(said.out)
    assert found["rows"] == [2, 2, 2]
    assert found["columns"]["dose [bold]"]["missing"] == 1
    assert found["columns"]["sex"]["counts"] == {"f": 3.0, "m": 3.0}
    assert found["by_client"] == {}
    fitted = json.loads(command("glm", table, "--client", "site", "--target", "y", "--column", "sex", "--json").out)
    assert fitted["coefficients"]["sex=m"]["coefficient"] == pytest.approx(math.log(1 / 2) - math.log(2))  # of the odds


def test_sites_count_categories_with_noise_or_under_masks_alone(command, good) -> None:
    said = command("statistics", good, "--runtime", "federation", "--categories", "x0=0,1", "--table", "x0,target")
    assert (said.code, said.out) == (2, "")
    assert said.err.strip().endswith("sites count categories with noise or under masks: give epsilon, or secure")


def test_constants_are_settings_of_an_experiment(command, good) -> None:
    said = command("statistics", good, "--standardise")
    assert said.code == 0
    good.write_text(f"{good.read_text()}\n{said.out}")
    assert command("statistics", good, "--column", "x1", "--json").code == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--bounds", "y"], "--bounds must be COLUMN=LOW:HIGH"),
        (["--categories", "sex"], "--categories must be COLUMN=A,B"),
        (["--ledger", "x.json"], "belong together"),
        (["--epsilon", "1"], "epsilon needs a delta"),
        (["--epsilon", "1", "--delta", "1e-5"], "epsilon needs bounds of column"),
        (["--set", "seed=1"], "--set changes an experiment file"),
        (["--column", "ses"], "has no column 'ses'"),
        (["--runtime", "ray"], "--runtime must be 'federation', or be left out where rows are on this machine"),
        (["--runtime", "simulator", "--credentials", "server"], "--credentials asks sites"),
        (["--runtime", "federation", "--secure"], "--client is for rows on this machine"),
    ],
)
def test_bad_input_is_one_sentence(command, table, words, sentence: str) -> None:
    said = command("statistics", table, "--client", "site", *words)
    assert (said.code, said.out) == (2, "")
    assert sentence in said.err
    assert len(said.err.splitlines()) == 1


def test_an_experiment_names_the_target_and_the_columns(command, table, tmp_path: Path) -> None:
    """Before, `piebald glm experiment.toml` looked for a column called 'target', and `features` had no effect."""
    file = tmp_path / "experiment.toml"
    long = "a column whose name is longer than most names of columns"
    data = f'data = {{ source = "rows.csv", client = "site", target = "y", features = ["{long}"] }}'
    file.write_text(data + '\nmodel = { name = "mlp" }\n')
    found = json.loads(command("statistics", file, "--json").out)
    assert list(found["columns"]) == [long, "y"]
    assert list(json.loads(command("statistics", file, "--column", "sex", "--json").out)["columns"]) == ["sex"]
    fitted = json.loads(command("glm", file, "--json").out)
    assert (fitted["target"], list(fitted["coefficients"])) == ("y", ["(intercept)", long])
    other = json.loads(command("glm", file, "--target", long, "--column", "sex", "--json").out)
    assert (other["target"], list(other["coefficients"])) == (long, ["(intercept)", "sex=m"])


@pytest.mark.full
def test_no_flag_is_without_effect(command, table, good, tmp_path: Path) -> None:
    """Before, a table was read whole whatever --split said, and sites added noise whatever --noise-at said."""
    file = tmp_path / "table.toml"
    file.write_text('data = { source = "rows.csv", client = "site", target = "y" }\nmodel = { name = "mlp" }\n')
    private = ("--epsilon", 1, "--delta", 1e-6)
    for words, sentence in (
        (
            ("statistics", table, "--client", "site", "--split", "test"),
            "--split test chooses among rows that are divided",
        ),
        (("statistics", file, "--split", "train"), "rows.csv is taken whole: leave it out"),
        (("glm", file, "--split", "validation"), "rows.csv is taken whole: leave it out"),
        (
            ("statistics", table, "--client", "site", "--noise-at", "client"),
            "--noise-at belongs to noise: give --epsilon",
        ),
        (
            ("statistics", good, "--runtime", "federation", "--noise-at", "server", *private),
            "--noise-at server is for rows on this machine: each site adds noise to its own sums",
        ),
    ):
        said = command(*words)
        assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
        assert sentence in said.err
    whole, part = (json.loads(command("statistics", good, *more, "--json").out) for more in ((), ("--split", "test")))
    assert sum(part["rows"]) < sum(whole["rows"])


def test_constants_of_a_table_are_those_of_training_rows_and_of_inputs(command, tmp_path: Path) -> None:
    """Before, they were of all rows, and had one more for the target, so that no experiment took them."""
    rows = {"site": list("ab") * 20, "dose": range(40), "age": [7.0 * (row % 5) for row in range(40)]}
    pandas.DataFrame(rows | {"y": ["no", "yes", "yes", "no"] * 10}).to_csv(tmp_path / "rows.csv", index=False)
    file = tmp_path / "experiment.toml"
    source = '[data]\nsource = "rows.csv"\nclient = "site"\ntarget = "y"\n'
    others = 'model = { name = "logistic" }\nrecipe = { name = "fedavg" }\n'
    others = f'prepare = "none"\n{others}'
    file.write_text(f'{others}{source}standardise = "federated"\n')
    wanted = constants_of(ExperimentSettings.load(file).clients())
    assert wanted is not None
    file.write_text(others + source)
    said = command("statistics", file, "--standardise")
    assert (said.code, said.err) == (0, "")
    assert said.out.startswith("[data.standardise]  # of the inputs in the order dose, age\n")
    file.write_text(others + source + said.out)
    given = constants_of(ExperimentSettings.load(file).clients())
    assert given is not None
    assert given.mean == pytest.approx(wanted.mean)
    assert given.deviation == pytest.approx(wanted.deviation)
    refused = command("statistics", file, "--standardise", "--client", "site")
    assert (refused.code, refused.err.count("\n")) == (2, 1)


def test_questions_read_a_table_as_prepare_says(command, tmp_path: Path) -> None:
    """A value that stands for a gap counts nowhere, codes are categories, and a column is left out."""
    lines = [f"{site},{age},{ward},{note},{dose}" for site in "ab" for age, ward, note, dose in
             ((-9, 1, 3, 0.5), (50, 2, 4, 1.5), (70, 1, 5, 2.0), (60, 2, 6, -9))]  # fmt: skip
    (tmp_path / "rows.csv").write_text("\n".join(["site,age,ward,note,dose", *lines]))
    (tmp_path / "file.toml").write_text(
        "model = { name = 'logistic' }\nrecipe = { name = 'fedavg' }\n"
        "data = { source = 'rows.csv', client = 'site', target = 'dose' }\n"
        "[prepare]\ngaps = ['-9']\ncolumns = { ward = 'category', note = 'leave out' }\n"
    )
    told = json.loads(command("statistics", "file.toml", "--json").out)["columns"]
    assert (told["age"]["missing"], told["age"]["mean"]) == (2, 60.0)
    assert told["ward"]["counts"] == {"1": 4.0, "2": 4.0}
    assert "note" not in told
    fitted = json.loads(
        command("glm", "file.toml", "--family", "gaussian", "--json", "--column", "age", "--column", "ward").out
    )
    assert {*fitted["coefficients"]} == {"(intercept)", "age", "ward=2"}
    assert fitted["dropped"] == 2
