"""`piebald look`: what a table holds by site and column, what may mislead, and an experiment that runs."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from piebald.advice.table_look import TableLook, look_at_table
from piebald.cli import main
from piebald.core.errors import SettingError
from piebald.data.preparation import PrepareSettings


def patients(rows: int = 240) -> pd.DataFrame:
    """Three hospitals: one without a lab, one without a ward of the others; several rows of each patient."""
    rng = np.random.default_rng(1)
    hospital = np.array(["east", "north", "west"])[np.arange(rows) % 3]
    own = rng.normal(size=(rows // 3, 2)).repeat(3, 0)
    table = pd.DataFrame({"hospital": np.sort(hospital), "a": own[:, 0] + 0.01 * rng.normal(size=rows), "b": own[:, 1]})
    table["chol"] = np.where(table.hospital == "west", 0.0, rng.normal(200, 20, rows).round())
    table["lab"] = np.where(table.hospital == "east", np.nan, rng.normal(size=rows))
    table["ward"] = np.where(table.hospital == "west", "icu", rng.choice(["icu", "er"], rows))
    table["patient"] = [f"p{number}" for number in np.arange(rows) // 3]
    table["ill"] = np.where(rng.random(rows) < 0.5, "yes", "no")
    table["code"] = np.where(table.ill == "yes", "I20", "Z00")  # is written down after the diagnosis
    return table


@pytest.fixture
def file(tmp_path: Path) -> Path:
    patients().to_csv(tmp_path / "patients.csv", index=False)
    return tmp_path / "patients.csv"


@pytest.fixture
def seen(file: Path) -> TableLook:
    return look_at_table(file, client="hospital", target="ill")


def test_sites_have_their_rows_classes_and_gaps(seen: TableLook) -> None:
    whole = patients()
    for site in seen.sites:
        own = whole[whole.hospital == site["site"]]
        assert (site["rows"], site["ill"]) == (len(own), own.ill.value_counts().sort_index().to_dict())
        assert site["gaps"] == pytest.approx(1 / 7 if site["site"] == "east" else 0.0)


def test_columns_have_their_kind_and_gaps(seen: TableLook) -> None:
    by_name = {row["column"]: row for row in seen.columns}
    assert {name: row["kind"] for name, row in by_name.items()} == {
        **dict.fromkeys(["a", "b", "chol", "lab"], "number"), **dict.fromkeys(["ward", "code"], "category"),
        "patient": "identifier",
    }  # fmt: skip
    assert (by_name["lab"]["gaps"], by_name["lab"]["most gaps"]) == (80, "east 100%")
    assert by_name["ward"]["preparation"] == "2 columns of 0 and 1"


def test_what_may_mislead_is_told_once_each(seen: TableLook) -> None:
    for part in (
        "column 'lab' has no value at east, so that a gap names the site",
        "column 'ward' lacks er at west",
        "column 'chol' has one value in all rows at west: is it a code for a gap?",
        "column 'patient' looks like an identifier of what several rows belong to (80 values)",
        "column 'code' tells 'ill' in 100.0% of the rows: is it known beforehand?",
    ):
        assert sum(part in sentence for sentence in seen.warnings) == 1, part
    assert not any("'a'" in sentence or "'b'" in sentence for sentence in seen.warnings)


def test_the_experiment_that_is_told_runs(file: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.chdir(file.parent)
    assert main(["look", str(file), "--client", "hospital", "--target", "ill", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    (file.parent / "told.toml").write_text(told["experiment"])
    assert 'group = "patient"' in told["experiment"]
    assert main(["run", "told.toml", "--json", "--set", "rounds=1"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "finished"
    assert [row["client"] for row in told["clients"]["clients"]] == ["east", "north", "west"]


def test_it_is_printed_within_80_columns_but_for_sentences(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["look", str(file), "--client", "hospital", "--target", "ill"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].split() == ["site", "rows", "gaps", "ill", "no", "ill", "yes"]
    assert "! column 'ward' lacks er at west" in out
    assert "3 clients with" in out  # the look at clients that `advise` has, too


def test_amounts_have_means_and_columns_that_tell_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"town": list("ab") * 60, "size": rng.normal(size=120), "sold": rng.integers(0, 900, 120)})
    table = table.assign(tax=table.sold * 2.0)
    table.to_csv(tmp_path / "t.csv", index=False)
    seen = look_at_table(tmp_path / "t.csv", client="town", target="sold")
    assert seen.sites[0]["sold"]["mean"] == pytest.approx(table[table.town == "a"].sold.mean())
    assert "regression = true" in seen.experiment
    assert any("column 'tax' tells 'sold'" in sentence for sentence in seen.warnings)


def test_one_class_and_a_class_that_a_site_lacks(tmp_path: Path) -> None:
    table = patients().assign(ill="yes")
    table.to_csv(tmp_path / "t.csv", index=False)
    seen = look_at_table(tmp_path / "t.csv", client="hospital", target="ill")
    assert "target 'ill' has one value alone: there is nothing to learn from it" in seen.warnings
    table.assign(ill=np.where(table.hospital == "east", "yes", table.ward)).to_csv(tmp_path / "t.csv", index=False)
    warnings = look_at_table(tmp_path / "t.csv", client="hospital", target="ill").warnings
    assert "class 'er' of 'ill' has no row at east, west" in warnings


@pytest.mark.parametrize(
    ("change", "message"),
    [({"client": "hospitl"}, "did you mean 'hospital'"), ({"target": "sick"}, "there is no column 'sick'")],
)
def test_an_unknown_column_is_one_sentence(file: Path, change: dict[str, str], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        look_at_table(file, **{"client": "hospital", "target": "ill"} | change)


@pytest.mark.full
def test_a_table_is_asked_about_in_one_line(
    file: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch
) -> None:
    """Columns, gaps and groups of rows are treated as the experiment says that `piebald look` prints."""
    monkeypatch.chdir(file.parent)
    table = patients()
    table.loc[:9, "chol"] = -999
    table.to_csv(file, index=False)
    columns = ["--client", "hospital", "--target", "ill"]
    assert main(["look", str(file), *columns]) == 0
    assert capsys.readouterr().out.count("'chol' has -999 in 10 rows") == 1
    cheap = ["rounds=2", "advise.seeds=[0]", 'advise.families=["fedavg"]', "advise.more_data=false"]
    sets = [word for setting in cheap for word in ("--set", setting)]
    assert main(["advise", str(file), *columns, "--budget", "6 rounds", *sets, "--out", "answer", "--more"]) == 0
    printed, said = capsys.readouterr()
    assert printed.startswith("Answer")
    assert "On validation rows: " in printed
    assert "column 'code' tells 'ill'" in said
    assert said.count("'chol' has -999 in 10 rows") == 1
    assert "'chol' has -999" not in caplog.text  # clients do not say again what a look has said
    told = tomllib.loads((file.parent / "answer" / "recommended.toml").read_text())
    assert {"test": 0.25, "validation": 0.25, "group": "patient"}.items() <= told["split"].items()
    assert "patient" not in told["data"]["features"]
    assert main(["run", "answer/recommended.toml"]) == 0
    assert caplog.text.count("'chol' has -999 in 10 rows") == 1
    assert main(["advise", str(file), "--client", "hospital"]) == 2
    assert "name its columns with --client COLUMN --target COLUMN" in capsys.readouterr().err
    (file.parent / "some.toml").write_text("rounds = 1\n")
    assert main(["advise", "some.toml", *columns]) == 2
    assert "are for a table, which some.toml is not: leave them out" in capsys.readouterr().err


def test_columns_are_prepared_as_clients_agree_on(tmp_path: Path) -> None:
    """Few rows of each site have a rare value, and names of rows are no targets that a column could tell."""
    codes = [f"c{row % 120}" for row in range(240)]
    towns = ["rare" if row % 60 == 0 else "big" for row in range(240)]
    ill = [f"k{row}" for row in range(240)]
    patients().assign(code=codes, town=towns, ill=ill).to_csv(tmp_path / "t.csv", index=False)
    seen = look_at_table(tmp_path / "t.csv", client="hospital", target="ill")
    told = {row["column"]: row["preparation"] for row in seen.columns}
    assert told["code"] == "none: left out (nearly each row has another value)"
    assert told["town"] == "2 columns of 0 and 1; those in fewer than 5 rows of each site together"
    assert told["ward"] == "2 columns of 0 and 1"


def test_free_text_is_left_out_and_told_how_it_is_read(tmp_path: Path) -> None:
    note = "the patient has pain in the left arm since the fall of last week and sleeps badly at night"
    texts = [" ".join(np.random.default_rng(row).permutation(note.split())) for row in range(240)]
    patients().assign(note=texts).to_csv(tmp_path / "t.csv", index=False)
    seen = look_at_table(tmp_path / "t.csv", client="hospital", target="ill")
    (told,) = [sentence for sentence in seen.warnings if "'note'" in sentence]
    assert "note" not in tomllib.loads(seen.experiment)["data"]["features"]
    assert "'note' has free text and is left out: features = ['note'] in [data]" in told
    (asked,) = re.findall(r"prepare = \{.*?\}", told)
    settings = PrepareSettings(**tomllib.loads(asked)["prepare"])
    assert settings.tokenizer == "distilbert-base-uncased"
    assert settings.length == 32  # of 18 words, each of which is a token at least


@pytest.mark.parametrize(
    ("column", "row", "value", "sentence"),
    [
        ("a", 12, "low", "before this is mended: {file}: column 'a' must have a number in each row, got 'low' in row"),
        ("a", 12, "inf", "column 'a' must have a finite number in each row, got inf in row 14"),
        ("a", 12, "1e300", "column 'a' must have a number below 1e+150 in each row, got 1e+300 in row 14"),
        ("ill", 3, "", "target 'ill' has no value in 1 of 240 rows (row 5, ...): these rows are left out"),
        ("ill", 3, "?", "target 'ill' has no value in 1 of 240 rows (row 5, ...): these rows are left out"),
        ("chol", slice(0, 30), "-9", "column 'chol' has -9 in 31 rows, far from all other numbers: if it stands"),
        ("ward", 5, "ICU", "column 'ward' has 'ICU' and 'icu', which differ in blanks or capitals alone"),
        ("b", slice(0, 239), "1", "column 'b' has one value alone: 1"),
    ],
)  # fmt: skip
def test_what_is_odd_is_told_beside_the_rest(tmp_path: Path, column: str, row, value: str, sentence: str) -> None:
    table = patients().astype({column: object})
    table["chol"] = np.random.default_rng(0).normal(200, 20, len(table)).round().astype(object)
    table.loc[row, column] = value
    table.to_csv(tmp_path / "t.csv", index=False)
    seen = look_at_table(tmp_path / "t.csv", client="hospital", target="ill")
    assert any(sentence.format(file=tmp_path / "t.csv") in told for told in seen.warnings), seen.warnings
    assert seen.sites
    assert seen.experiment


def test_one_far_amount_is_told_and_no_column_is_said_to_know_it(tmp_path: Path) -> None:
    """A tree tells the far row by its input, and with it nearly all of the variance."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"site": np.repeat(["a", "b"], 60), "dose": rng.normal(size=120)})
    frame["euros"] = (3000 + rng.normal(0, 300, 120)).round(2)
    frame.to_csv(tmp_path / "plain.csv", index=False)
    assert look_at_table(tmp_path / "plain.csv", client="site", target="euros", clients=False).warnings == []
    frame.loc[70, "euros"] = 9e6
    frame.to_csv(tmp_path / "far.csv", index=False)
    (said,) = look_at_table(tmp_path / "far.csv", client="site", target="euros", clients=False).warnings
    assert said.startswith("target 'euros' has 9,000,000 in row 72 at b, over 20 times as far from the median as 95%")
