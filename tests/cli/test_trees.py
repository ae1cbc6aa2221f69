"""`piebald trees`: a table for people, one JSON object for programs, a folder to go on from, errors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas
import pytest

pytest.importorskip("xgboost", reason="needs the extra: pip install '.[trees]'")

FILE = """\
model = {{ name = "logistic" }}

[data]
source = "rows.csv"
client = "site"
target = "sick"
features = ["age", "dose"]

[trees]
rounds = {rounds}
max_depth = 2
"""


@pytest.fixture
def table(tmp_path: Path) -> str:
    rng = np.random.default_rng(0)
    frame = pandas.DataFrame({"site": list("abc") * 20, "age": rng.normal(50, 9, 60), "dose": rng.normal(0, 1, 60)})
    frame["sick"] = np.where(frame.age + 5 * frame.dose > 50, "yes", "no")
    frame.loc[::7, "dose"] = np.nan
    frame.to_csv(tmp_path / "rows.csv", index=False)
    return str(tmp_path / "rows.csv")


def test_a_table_and_a_file_of_it_have_the_same_trees(command, table, tmp_path: Path) -> None:
    (tmp_path / "file.toml").write_text(FILE.format(rounds=2))
    flags = ["--client", "site", "--target", "sick", "--set", "trees.rounds=2", "--set", "trees.max_depth=2"]
    said = command("trees", table, *flags, "--out", "runs/one")
    assert (said.code, said.err) == (0, "")
    assert max(map(len, said.out.splitlines())) <= 80
    assert "sick, binary: 6 trees in 2 rounds on 48 rows." in said.out
    found = json.loads(command("trees", tmp_path / "file.toml", "--json", "--out", tmp_path / "two").out)
    assert found["columns"] == ["age", "dose"]
    assert set(found["clients"]["a"]) == {"rows", "together", "alone", "pooled"}
    models = [(tmp_path / name / "trees.json").read_bytes() for name in ("runs/one", "two")]
    assert models[0] == models[1]
    assert (tmp_path / "two").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--set", "trees.rounds=0"], "trees.rounds must be at least 1, got 0"),
        (["--set", "trees.round=1"], "there is no setting of trees called 'round': did you mean 'rounds'?"),
        (["--set", "recipe.name=dp_sgd"], "trees cannot be hidden by 'dp_sgd'"),
        (["--runtime", "ray"], "--runtime must be 'federation', or be left out where rows are on this machine"),
        (["--runtime", "federation", "--target", "sick"], "--target is for tables on this machine"),
        (["--column", "ages"], "no column 'ages'"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(command, table, tmp_path: Path, words: list[str], sentence: str) -> None:
    (tmp_path / "file.toml").write_text(FILE.format(rounds=1))
    said = command("trees", tmp_path / "file.toml", *words)
    assert (said.code, said.out) == (2, "")
    assert sentence in said.err
    assert len(said.err.splitlines()) == 1


def test_settings_of_a_table_are_of_trees(command, table) -> None:
    said = command("trees", table, "--client", "site", "--target", "sick", "--set", "rounds=2")
    assert (said.code, said.out) == (2, "")
    assert "--set of a table must be about trees, the split or the seed" in said.err
