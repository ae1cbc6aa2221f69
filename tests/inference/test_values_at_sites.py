"""Sites that prepare their tables answer about the values of their columns as the simulator does, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

import piebald
from piebald.data.clients.client_tables import read_table
from piebald.data.preparation import Preparation, PrepareSettings
from piebald.data.preparation.column_models import TokenColumn
from piebald.federation.site.policy import Policy
from piebald.federation.site.task_runner import TaskRunner
from piebald.inference.columns import statistics_request
from piebald.inference.linear_models import GlmOptions, fit_glm
from piebald.inference.models.clients import ModelClients, ModelColumns
from piebald.inference.statistics_at_sites import stated_questions, statistics_at_sites
from piebald.privacy import SecureAggregation

from .sites import InProcess
from .test_preparation_at_sites import ALLOWED, NAMES, Sites

PREPARE: dict[str, Any] = {"columns": {"code": "category"}, "gaps": ["-9"], "least_rows": 1}
EXTRA = "prepare = { columns = { code = 'category' }, gaps = ['-9'], least_rows = 1 }\n"
WORDS = [("yes", "no"), ("ja", "nein"), ("true", "false")]


def german(value: float) -> str:
    return f"{value:,.1f}".replace(",", " ").replace(".", ",").replace(" ", ".")


def table(place: int) -> pandas.DataFrame:
    """Amounts that one site writes as 1.234,5, gaps of two kinds, codes, dates, and words in three languages."""
    rng, rows = np.random.default_rng(place), 70 - 10 * place
    pay = rng.normal(4000, 900, rows).round(1)
    age = np.where(rng.random(rows) < 0.15, -9, rng.integers(20, 90, rows))
    frame = pandas.DataFrame({"pay": pay, "age": age, "code": rng.integers(1, 4, rows)})
    frame["smoker"] = rng.choice(WORDS[place], rows)
    frame["ward"] = rng.choice(list("abc" if place else "ab"), rows)
    frame["seen"] = (pandas.Timestamp("2024-01-01") + pandas.to_timedelta(rng.integers(0, 99, rows), "D")).strftime(
        "%Y-%m-%d"
    )
    frame["ill"] = rng.choice(["sick", "well"], rows)
    frame.loc[::9, "ward"] = None
    return frame.assign(pay=frame.pay.map(german)) if place == 1 else frame


@pytest.fixture(scope="module")
def agreed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Sites, Any]:
    sites = Sites(tmp_path_factory.mktemp("values"), {name: table(k) for k, name in enumerate(NAMES)}, EXTRA)
    return sites, sites.agree([ALLOWED] * 3).as_values()


def test_text_has_no_values() -> None:
    column = TokenColumn(name="note", tokenizer="t.json", sha256="0" * 64, length=4, vocabulary=9)
    with pytest.raises(piebald.SettingError, match="column 'note' has text: leave tokenizer out"):
        Preparation(columns=[column]).as_values()


def runtime(agreed: tuple[Sites, Any], kind: str, folder: Path | None = None) -> tuple[InProcess, Any]:
    sites, preparation = agreed
    masks = () if folder is None else (SecureAggregation(bits=64),)
    ready, policies = (
        sites.ready(sites.settings.with_agreed(preparation), masks),
        [Policy(queries=[kind], least_rows=1)] * 3,
    )
    asked = InProcess(ready, policies, None, folder)
    asked._sites = [TaskRunner(site, policies[k], "cpu", asked._signers[k]) for k, site in enumerate(sites.at(ready))]
    return asked, ready


def here(sites: Sites) -> dict[str, pandas.DataFrame]:
    """The same files as a simulation reads them."""
    read = PrepareSettings(**PREPARE).read
    return {name: read(read_table(sites.folder / name / "rows.csv")) for name in NAMES}


@pytest.mark.full
def test_statistics_of_prepared_sites_are_those_of_the_simulator(agreed: tuple[Sites, Any]) -> None:
    asked, ready = runtime(agreed, "statistics")
    request = statistics_request((0.25, 0.5), None, {}, True)
    told = statistics_at_sites(asked, ready.work, ready.clients, request)  # type: ignore[arg-type]
    expected = piebald.statistics(here(agreed[0]), quantiles=(0.25, 0.5), by_client=True)
    assert {*told.numbers} == {"pay", "age", "smoker", "seen"}
    assert told.numbers == expected.numbers
    assert told.by_client == expected.by_client
    assert told.numbers["age"].missing > 0
    assert told.texts.pop("target") == expected.texts.pop("ill")  # type: ignore[attr-defined]
    assert told.texts == expected.texts
    assert {*told.texts["ward"].counts} == {"a", "b", "c"}
    bounds = {"pay": (0.0, 9000.0), "age": (0.0, 100.0), "smoker": (0.0, 1.0), "seen": (19000.0, 20000.0)}
    said: list[str] = []
    binned = statistics_request((), 4, bounds)
    told = statistics_at_sites(runtime(agreed, "statistics")[0], ready.work, ready.clients, binned, say=said.append)  # type: ignore[arg-type]
    assert {*told.numbers} == {"pay", "age", "smoker", "seen", "target"}
    assert said == ["categories of code, ward are not told beside histograms: ask for them without bins"]
    assert len(stated_questions(ready.clients, statistics_request((), None, {}))) == 2


@pytest.mark.full
def test_models_of_prepared_sites_are_those_of_the_simulator(agreed: tuple[Sites, Any]) -> None:
    asked, ready = runtime(agreed, "model_sums")
    columns = ModelColumns(ready.clients, None, "ill", "train", {}, False)
    options = GlmOptions("ill", columns=["pay", "age", "smoker", "ward", "code"], family="binomial")
    told = fit_glm(ModelClients(columns, asked, ready.work, ready.clients), options)  # type: ignore[arg-type]
    expected = piebald.glm(here(agreed[0]), target="ill", columns=options.columns, family="binomial")
    names = ("(intercept)", "pay", "age", "smoker", "ward=b", "ward=c", "code=2", "code=3")
    assert told.names == expected.names == names
    assert told.coefficients.tolist() == expected.coefficients.tolist()
    assert told.errors.tolist() == expected.errors.tolist()
    assert (told.rows, told.dropped) == (expected.rows, expected.dropped)
    assert told.dropped > 0


def test_categories_of_prepared_sites_are_counted_under_masks(agreed: tuple[Sites, Any], tmp_path: Path) -> None:
    asked, ready = runtime(agreed, "masked_sums", tmp_path)
    bounds = {"pay": (0.0, 9000.0), "age": (0.0, 100.0), "smoker": (0.0, 1.0), "seen": (19000.0, 20000.0)}
    request = statistics_request((), None, bounds, tables=[("ward", "target")], secure=True)
    told = statistics_at_sites(asked, ready.work, ready.clients, request)  # type: ignore[arg-type]
    pooled = pandas.concat(here(agreed[0]).values())
    assert told.texts["ward"].counts == pooled.ward.value_counts().to_dict()
    assert told.texts["ward"].missing == pooled.ward.isna().sum()
    crossed = pandas.crosstab(pooled.ward, pooled.ill)
    assert told.tables["ward", "target"] == {ward: crossed.loc[ward].to_dict() for ward in "abc"}
    wanted = statistics_request((), None, bounds, categories={"ward": ["a", "z"]}, secure=True)
    with pytest.raises(piebald.SettingError, match="'z'"):
        statistics_at_sites(asked, ready.work, ready.clients, wanted)  # type: ignore[arg-type]


def test_what_sites_with_a_floor_keep_is_named_and_the_rest_is_told(
    agreed: tuple[Sites, Any], caplog: pytest.LogCaptureFixture
) -> None:
    sites, preparation = agreed
    ready = sites.ready(sites.settings.with_agreed(preparation), ())
    policies = [Policy(queries=["statistics"], least_rows=3, questions={"statistics": 100})] * 3
    asked = InProcess(ready, policies, None, None)
    asked._sites = [TaskRunner(site, policies[k], "cpu", asked._signers[k]) for k, site in enumerate(sites.at(ready))]
    said: list[str] = []
    told = statistics_at_sites(asked, ready.work, ready.clients, statistics_request((0.5,), None, {}), say=said.append)  # type: ignore[arg-type]
    expected = piebald.statistics(here(sites), quantiles=())
    assert {name: column.mean for name, column in told.numbers.items()} == {
        name: column.mean for name, column in expected.numbers.items()
    }
    assert all(not column.quantiles for column in told.numbers.values())
    left = next(line for line in said if line.startswith("quantiles are left out: "))
    assert any(f": {name} answered" in left for name in NAMES)
    # the site's own log has the name of the column, and what is sent has not
    names = [line for line in caplog.text.splitlines() if "; column" in line]
    assert any(name in line for line in names for name in ("pay", "age", "smoker", "seen"))
    assert not any(name in line for line in said for name in ("pay", "'age'", "smoker", "seen"))
