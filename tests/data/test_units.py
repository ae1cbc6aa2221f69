"""Numbers with a unit or a sign of per cent mean the same at all clients, in all files and at prediction."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import piebald
from piebald.core.errors import SettingError
from piebald.data.clients.table_files import read_table
from piebald.data.preparation.agreement import fitted
from piebald.inference.statistics_at_sites import statistics
from piebald.report.export import score

pd = pytest.importorskip("pandas")
SHARES = np.random.default_rng(0).normal(0.72, 0.08, 40).round(3)
FORMS = {
    "percent": [f"{share * 100:.1f}%" for share in SHARES],
    "share": [f"{share:.3f}" for share in SHARES],
    "bare": [f"{share * 100:.1f}" for share in SHARES],
    "mixed": [f"{share:.3f}" if row % 2 else f"{share * 100:.1f} %" for row, share in enumerate(SHARES)],
    "kg": [f"{share * 100:.1f} kg" for share in SHARES],
    "lb": [f"{share * 220:.1f} lb" for share in SHARES],
}


def files(folder: Path, **forms: str) -> dict[str, Path]:
    for name, form in forms.items():
        rows = {"v": FORMS[form], "other": range(40), "ill": ["no", "yes"] * 20, "site": [name] * 40}
        pd.DataFrame(rows).to_csv(folder / f"{name}.csv", index=False)
    return {name: folder / f"{name}.csv" for name in forms}


def clients(sources: Any, **asked: Any) -> Any:
    return piebald.clients_from(sources, target="ill", features=["v", "other"], test=0.0, **asked)


@pytest.mark.parametrize("forms", [{"a": "percent"}, {"a": "percent", "b": "share"}, {"a": "mixed", "b": "share"}])
def test_per_cent_are_shares(tmp_path: Path, forms: dict[str, str]) -> None:
    expected = clients(files(tmp_path, **dict.fromkeys(forms, "share"))).rows(0, "train").x
    assert clients(sources := files(tmp_path, **forms)).rows(0, "train").x.equal(expected)
    assert read_table(sources["a"]).v.tolist() == SHARES.tolist()


@pytest.mark.parametrize(
    ("forms", "why"),
    [
        (("percent", "bare"), "numbers in % at a, which are read as shares of 1, and numbers without % at b that are "
         "100 times as large: write it alike everywhere, or name it in columns of [prepare] as 'leave out'"),
        (("bare", "percent"), "numbers in % at b, which are read as shares of 1, and numbers without % at a that"),
        (("kg", "lb"), "the unit 'kg' at a and 'lb' at b"),
        (("percent", "kg"), "the unit '%' at a and 'kg' at b"),
    ],
)  # fmt: skip
def test_other_units_at_another_client_are_refused(tmp_path: Path, forms: tuple[str, str], why: str) -> None:
    sources = files(tmp_path, a=forms[0], b=forms[1])
    with pytest.raises(SettingError, match=re.escape(f"column 'v' has {why}")):
        clients(sources)
    with pytest.raises(SettingError, match=re.escape(f"column 'v' has {why}")):
        statistics(sources)
    kept = clients(sources, prepare={"columns": {"v": "leave out"}})
    assert kept.preparation.left_out == {"v": "as [prepare] says"}


def test_a_target_has_one_unit(tmp_path: Path) -> None:
    sources = files(tmp_path, a="percent", b="bare")
    with pytest.raises(SettingError, match="'v' has numbers in % at a"):
        piebald.clients_from(sources, target="v", features=["other"])


def test_files_of_one_client_have_one_unit(tmp_path: Path) -> None:
    files(tmp_path, a="kg", b="lb", c="percent", d="bare")
    whole = {"client": "site", "target": "ill"}
    with pytest.raises(SettingError, match="the unit 'kg' at a and 'lb' at b"):
        piebald.clients_from(tmp_path / "[ab].csv", **whole)
    with pytest.raises(SettingError, match="numbers in % at c"):
        piebald.clients_from(tmp_path / "[cd].csv", **whole)
    for path in (tmp_path / "c.csv", tmp_path / "d.csv"):
        path.write_text(re.sub(",[cd]\n", ",both\n", path.read_text()))
    with pytest.raises(SettingError, match="'v' has numbers with and without % in the files of both"):
        piebald.clients_from(tmp_path / "[cd].csv", **whole)


@pytest.mark.parametrize("bare", [["72.7", "0.5"], ["0.3", "0.5"]])
def test_per_cent_beside_what_may_be_some_is_refused(tmp_path: Path, bare: list[str]) -> None:
    signed = "70%" if "72.7" in bare else "0.7%"
    (tmp_path / "t.csv").write_text("v,ill\n" + "".join(f"{value},{value[-1]}\n" for value in (signed, *bare)))
    with pytest.raises(SettingError, match="per cent as shares of 1 or with per cent in all rows: write all of them"):
        clients(tmp_path / "t.csv")


def test_predictions_take_numbers_in_the_unit_of_training(tmp_path: Path) -> None:
    sources = files(tmp_path, percent="percent", share="share", bare="bare", kg="kg", lb="lb")
    frames = {name: read_table(path) for name, path in sources.items()}
    signed, plain, weight = (fitted(frames[name].drop(columns="site"), "ill") for name in ("percent", "share", "kg"))
    assert [(column.name, column.unit) for column in weight.columns] == [("v", "kg"), ("other", "")]  # type: ignore[union-attr]
    for agreed in (signed, plain):
        assert agreed.transform(frames["share"]).tolist() == agreed.transform(frames["percent"]).tolist()
        assert [*agreed.unlike_training(frames["share"])] == [*agreed.unlike_training(frames["percent"])] == []
        (told,) = agreed.unlike_training(frames["bare"])
        assert "in 40 of 40 rows, such as 73 in row 2: about 100 times those of training rows: cm (or %)" in told
        assert ("or without %" in told) == (agreed is signed)
    (told,) = weight.unlike_training(frames["share"])
    assert "about 0.01 times those of training rows: m (or shares of 1) for cm (or %)?" in told
    with pytest.raises(SettingError, match="column 'v' has the unit 'lb', and 'kg' in training rows: convert"):
        weight.transform(frames["lb"])


def test_an_exported_program_reads_the_unit_of_training(tmp_path: Path) -> None:
    for form in ("percent", "kg"):
        (path,) = files(tmp_path, a=form).values()
        frame = read_table(path).drop(columns="site")
        agreed = fitted(frame, "ill")
        made = score.prepared(agreed.model_dump(mode="json"), score.read(path))
        np.testing.assert_allclose(made, agreed.transform(frame), atol=1e-6)
    minus = [score.prepared(agreed.model_dump(mode="json"), {"v": [f"{sign}7 kg"], "other": [0]}) for sign in "-\u2212"]
    assert minus[0].tolist() == minus[1].tolist()
    with pytest.raises(score.UnfitValue, match=r"column 'v' must have a number in each row, got '.* lb'"):
        score.prepared(agreed.model_dump(mode="json"), score.read(files(tmp_path, a="lb")["a"]))
