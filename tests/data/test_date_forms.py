"""Dates that may be read in two ways are read as other clients' and training rows are, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import piebald
from piebald.core.errors import SettingError
from piebald.data.clients.table_files import read_table
from piebald.data.preparation import written_forms
from piebald.data.preparation.agreement import fitted
from piebald.inference.statistics_at_sites import statistics
from piebald.report.export import score

pd = pytest.importorskip("pandas")
CLEAR = [f"2024-{1 + day % 12:02}-{1 + day % 28:02}" for day in range(60)]
UNCLEAR = [f"2023-{1 + day % 11:02}-{1 + day % 12:02} 08:30" for day in range(60)]
FORMS = {"iso": "%Y-%m-%d", "dmy": "%d/%m/%Y", "mdy": "%m/%d/%Y", "points": "%d.%m.%Y"}


def files(folder: Path, clear: str, unclear: str) -> dict[str, Path]:
    """The tables of a client whose dates fit one order of day and month alone, and of one whose dates fit both."""
    for name, dates, form in (("a", CLEAR, FORMS[clear]), ("b", UNCLEAR, f"{FORMS[unclear]} %H:%M")):
        written = pd.to_datetime(pd.Series(dates)).dt.strftime(form)
        pd.DataFrame({"seen": written, "ill": ["no", "yes"] * 30}).to_csv(folder / f"{name}.csv", index=False)
    return {name: folder / f"{name}.csv" for name in "ab"}


def rows(sources: Any) -> Any:
    clients = piebald.clients_from(sources, target="ill", test=0.0)
    return clients.preparation, [clients.rows(client, "train").x.tolist() for client in range(2)]


@pytest.mark.full
@pytest.mark.parametrize("form", ["dmy", "mdy"])
def test_dates_of_one_client_are_read_as_those_of_another(tmp_path: Path, form: str) -> None:
    _, expected = rows(files(tmp_path, "iso", "iso"))
    days = statistics(files(tmp_path, "iso", "iso"), columns=["seen"])["seen"].mean
    agreed, made = rows(sources := files(tmp_path, form, form))
    assert made == expected
    assert agreed.columns[0].forms == ["day/month/year" if form == "dmy" else "month/day/year"]
    assert statistics(sources, columns=["seen"])["seen"].mean == days


@pytest.mark.parametrize("clear", ["iso", "points"])
def test_dates_that_nobody_can_tell_are_refused(tmp_path: Path, clear: str) -> None:
    with pytest.raises(SettingError, match="'seen' has dates at b that may be day/month/year or month/day/year: write"):
        rows(files(tmp_path, clear, "mdy"))


@pytest.mark.parametrize("form", ["dmy", "mdy"])
def test_predictions_read_dates_as_those_of_training(tmp_path: Path, form: str) -> None:
    sources = files(tmp_path, form, form)
    agreed = fitted(read_table(sources["a"]), "ill")
    new = read_table(sources["b"]).head(3)
    plain = files(tmp_path, "iso", "iso")
    expected = fitted(read_table(plain["a"]), "ill").transform(read_table(plain["b"]))
    np.testing.assert_array_equal(agreed.transform(new), expected[:3])
    np.testing.assert_allclose(score.prepared(agreed.model_dump(mode="json"), new), expected[:3], atol=1e-6)


@pytest.mark.full
def test_an_exported_program_knows_the_same_forms(tmp_path: Path) -> None:
    assert score.DATE_FORMS == written_forms.DATE_FORMS
    agreed = fitted(read_table(files(tmp_path, "points", "iso")["a"]), "ill")
    plain, moments = agreed.model_dump(mode="json"), pd.to_datetime(pd.Series(CLEAR))
    for style in (style for styles in score.DATE_FORMS.values() for style in styles):
        table = pd.DataFrame({"seen": moments.dt.strftime(style)})
        np.testing.assert_allclose(score.prepared(plain, table), agreed.transform(table), atol=1e-6)
    with pytest.raises(score.UnfitValue, match="'seen' must have a date like 2024-05-31, got '01/02/2024' in row 1"):
        score.prepared(plain, {"seen": ["01/02/2024", "03/02/2024"]})
