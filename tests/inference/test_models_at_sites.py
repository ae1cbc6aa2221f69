"""Models of sites are those of their pooled rows, in the open and under masks, as far as policies allow."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch

import piebald
from piebald import recipes
from piebald.cli import main
from piebald.contracts import SUM, Update
from piebald.core.errors import PiebaldError, RuntimeFault, SettingError
from piebald.data.partition import clients_from
from piebald.experiments.file import ExperimentSettings
from piebald.experiments.run_settings import RunSettings
from piebald.inference.linear_models import GlmOptions, fit_glm
from piebald.inference.models.clients import ModelClients, ModelColumns
from piebald.inference.queries.columns import MaskedModelSumsQuery, ModelSumsQuery, from_limbs, to_limbs
from piebald.inference.survival import CoxOptions, SurvivalOptions, fit_cox, fit_survival
from piebald.models import Logistic
from piebald.privacy import SecureAggregation
from piebald.runs.prepare import PreparedRun, prepare

from .sites import Change, InProcess, Policy

FEATURES = ["x", "logdays", "arm", "time", "died"]
CODES = {"arm": ["0", "1"]}
ALLOWED = Policy(queries=["model_sums", "masked_model_sums"], least_rows=1)
TIMES = tuple(map(float, range(61)))


def plan(
    secure: bool, rows: tuple[int, ...] = (30, 50, 70), change: Callable[[int, Any], None] = lambda place, inputs: None
) -> PreparedRun:
    rng, parts = np.random.default_rng(5), {}
    for place, count in enumerate(rows):
        x, days, arm = rng.normal(place, 2, count), rng.integers(1, 50, count), rng.integers(0, 2, count)
        time, died = np.ceil(rng.exponential(10, count)).clip(max=60), rng.random(count) < 0.7
        inputs = np.stack([x, np.log(days), arm, time, died], 1).astype(np.float32)
        change(place, inputs)
        falls = rng.poisson(days * np.exp(-2 + 0.2 * x) * rng.gamma(2, 0.5, count))
        parts["abc"[place]] = inputs, falls.astype(np.float32) + np.float32(0.0)
    masks = (SecureAggregation(bits=64),) if secure else ()
    clients = clients_from(parts, test=0.0, validation=0.0, regression=True)
    return prepare(recipes.fedavg().with_(transforms=masks), clients, Logistic([5], 1), RunSettings(seed=1))


PLANS = {secure: plan(secure) for secure in (False, True)}


def pooled(run: PreparedRun) -> pandas.DataFrame:
    """The rows of all sites in one table."""
    parts = []
    for place, name in enumerate(run.clients.names):
        rows = run.clients.rows(place, "train")
        table = pandas.DataFrame(rows.x.double().numpy(), columns=FEATURES)  # type: ignore[union-attr]
        parts.append(table.assign(falls=rows.y.double().numpy().reshape(-1), site=str(name)))  # type: ignore[union-attr]
    return pandas.concat(parts)


def sites(
    secure: bool, folder: Path | None, policy: Policy = ALLOWED, change: Change | None = None, run: Any = None,
    say: Callable[[str], None] = lambda line: None,
) -> ModelClients:  # fmt: skip
    run = run or PLANS[secure]
    columns = ModelColumns(run.clients, FEATURES, "falls", "train", CODES, secure)
    runtime = InProcess(run, [policy] * 3, change, folder)
    return ModelClients(columns, runtime, run.work, run.clients, say)  # type: ignore[arg-type]


MODELS: dict[str, dict[str, Any]] = {
    "offset": {"family": "poisson", "columns": ["x", "arm"], "offset": "logdays"},
    "dispersion": {"family": "negative_binomial", "columns": ["x"], "offset": "logdays", "cluster": "client"},
    "weights": {"columns": ["x"], "weights": "time", "robust": True},
    "wards": {"columns": ["x"], "cluster": "died"},
    "one stage": {"columns": ["x"], "random_intercept": "one_stage"},
    "counts in one stage": {"columns": ["x"], "family": "poisson", "random_intercept": "one_stage"},
    "two stages": {"columns": ["x"], "family": "poisson", "random_intercept": "two_stage"},
}


@pytest.mark.parametrize("secure", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", MODELS)
def test_regressions_of_sites_are_those_of_their_pooled_rows(name: str, secure: bool, tmp_path: Path) -> None:
    wanted = MODELS[name]
    found = fit_glm(sites(secure, tmp_path), GlmOptions("falls", **wanted))
    table = pooled(PLANS[secure])
    if name == "wards":  # clusters of a column are within sites
        table["ward"] = table.site + table.died.astype(str)
        wanted = {**wanted, "cluster": "ward"}
    here = piebald.glm(table, client="site", target="falls", categories=CODES, **wanted)
    assert (found.names, found.rows, found.clients) == (here.names, 150, 3)
    np.testing.assert_allclose(found.coefficients, here.coefficients, rtol=0, atol=1e-10)
    np.testing.assert_allclose(found.errors, here.errors, rtol=0, atol=1e-10)


@pytest.mark.parametrize("secure", [False, pytest.param(True, marks=pytest.mark.full)])
def test_survival_of_sites_is_that_of_their_pooled_rows(secure: bool, tmp_path: Path) -> None:
    table = pooled(PLANS[secure])
    found = fit_cox(sites(secure, tmp_path), CoxOptions("time", "died", ["x", "arm"], robust=True))
    here = piebald.cox(
        table, client="site", time="time", event="died", columns=["x", "arm"], robust=True, categories=CODES
    )
    np.testing.assert_allclose([found.coefficients, found.errors], [here.coefficients, here.errors], atol=1e-10)
    assert found.proportional_overall.statistic == pytest.approx(here.proportional_overall.statistic, rel=1e-8)
    for stratified in (False, True):
        curves = fit_survival(
            sites(secure, tmp_path / f"{stratified}"), SurvivalOptions("time", "died", "arm", TIMES, stratified)
        )
        whole = piebald.survival(
            table, client="site", time="time", event="died", group="arm", categories=CODES, stratified=stratified
        )
        for name, curve in curves.curves.items():
            assert curve.plain() == whole.curves[name].plain()
        assert curves.test is not None
        assert whole.test is not None
        assert curves.test.statistic == pytest.approx(whole.test.statistic, rel=1e-12)


@pytest.mark.parametrize("secure", [False, pytest.param(True, marks=pytest.mark.full)])
def test_weights_and_entry_times_of_sites(secure: bool, tmp_path: Path) -> None:
    def entering(place: int, inputs: Any) -> None:
        inputs[:, 1] = 0.4 * inputs[:, 3] * (inputs[:, 2] > 0)

    run = plan(secure, change=entering)
    options: dict[str, Any] = {"entry": "logdays", "weights": "time", "cluster": "client"}
    found = fit_cox(sites(secure, tmp_path, run=run), CoxOptions("time", "died", ["x"], **options))
    here = piebald.cox(pooled(run), client="site", time="time", event="died", columns=["x"], **options)
    np.testing.assert_allclose([found.coefficients, found.errors], [here.coefficients, here.errors], atol=1e-10)
    tests = [model.proportional["x"].statistic for model in (found, here)]
    assert tests[0] == pytest.approx(tests[1], rel=1e-8)
    assert found.events == here.events == round(float(pooled(run).died.sum()))
    with pytest.raises(SettingError, match="transform 'km' needs the times of all rows: sites take 'identity' or"):
        fit_cox(sites(secure, tmp_path, run=run), CoxOptions("time", "died", ["x"], transform="km"))


def test_curves_without_groups_are_asked_for_without_numbers() -> None:
    found = fit_survival(sites(False, None), SurvivalOptions("time", "died", None, TIMES))
    here = piebald.survival(pooled(PLANS[False]), client="site", time="time", event="died")
    assert found.curves["all"].plain() == here.curves["all"].plain()


def test_sums_in_parts_are_exact() -> None:
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=(5, 40)) * 10.0 ** rng.integers(-9, 17, (5, 40))
    total = np.sum([to_limbs(row) for row in numbers], axis=0)
    np.testing.assert_allclose(from_limbs(total.astype(float)), numbers.sum(0), rtol=1e-12, atol=0)
    for large in (2.0**61, np.inf, np.nan):
        with pytest.raises(ValueError, match="below 2"):
            to_limbs(np.array([0.0, large]))


@pytest.mark.full
def test_nothing_but_sums_leaves_under_masks(tmp_path: Path) -> None:
    asked = sites(True, tmp_path)
    found = fit_glm(asked, GlmOptions("falls", ["x"]))
    here = piebald.glm(pooled(PLANS[True]), client="site", target="falls", columns=["x"])
    np.testing.assert_allclose(found.coefficients, here.coefficients, rtol=0, atol=1e-10)
    bodies = asked._sites.runtime.bodies  # type: ignore[attr-defined]
    assert bodies
    assert not any(b"support" in body or b'"examples":30' in body for body in bodies)


@pytest.mark.parametrize("secure", [False, True])
def test_a_site_that_does_not_name_the_question_answers_none(secure: bool, tmp_path: Path) -> None:
    with pytest.raises(PiebaldError, match="only if its policy names it"):
        fit_glm(sites(secure, tmp_path, Policy()), GlmOptions("falls", ["x"]))


def test_a_careful_site_tells_nothing_of_few_rows(tmp_path: Path) -> None:
    careful = Policy(queries=["model_sums", "masked_model_sums"], least_rows=10)

    def rare(place: int, inputs: Any) -> None:
        inputs[:, 1] = np.arange(len(inputs)) < 4

    large = plan(False, (130, 150, 170))
    found = fit_glm(sites(False, tmp_path / "a", careful, run=large), GlmOptions("falls", ["x", "arm"], "poisson"))
    assert found.rows == 450
    for name, options, fit in (
        ("few in an arm", GlmOptions("falls", ["x", "rare"]), fit_glm),
        ("few at a time", SurvivalOptions("time", "died", "arm", TIMES), fit_survival),
        ("few who count", GlmOptions("falls", ["x"], weights="rare"), fit_glm),
    ):
        run = plan(False, change=rare)
        columns = ModelColumns(run.clients, ["x", "rare", "arm", "time", "died"], "falls", "train", CODES, False)
        runtime = InProcess(run, [careful] * 3, None, tmp_path / name)
        asked = ModelClients(columns, runtime, run.work, run.clients, lambda line: None)  # type: ignore[arg-type]
        with pytest.raises(PiebaldError, match="too few rows contribute"):
            fit(asked, options)  # type: ignore[operator]
    with pytest.raises(PiebaldError, match="cannot know that a sum is about at least the 10 rows"):
        fit_glm(sites(True, tmp_path / "masked", careful), GlmOptions("falls", ["x"]))


def test_a_model_with_a_third_as_many_coefficients_as_rows_is_refused(tmp_path: Path) -> None:
    run = plan(False, (14, 14, 14))
    careful = Policy(queries=["model_sums"], least_rows=2)
    with pytest.raises(PiebaldError, match="too few rows contribute"):
        fit_glm(sites(False, tmp_path, careful, run=run), GlmOptions("falls", ["x", "logdays", "time", "died"]))


def test_questions_are_counted(tmp_path: Path) -> None:
    few = Policy(queries=["model_sums"], questions={"model_sums": 3}, least_rows=1)
    columns = ModelColumns(PLANS[False].clients, FEATURES, "falls", "train", CODES, False)
    runtime = InProcess(PLANS[False], [few, ALLOWED, ALLOWED], None, tmp_path)
    asked = ModelClients(columns, runtime, PLANS[False].work, PLANS[False].clients)  # type: ignore[arg-type]
    with pytest.raises(RuntimeFault, match=r"a answers some questions about the model and not others .*at most 3"):
        fit_glm(asked, GlmOptions("falls", ["x"]))


def test_a_site_whose_rows_the_model_does_not_take_is_left_out(tmp_path: Path) -> None:
    def change(place: int, inputs: Any) -> None:
        inputs[0, 4] = 1.0 + (place == 1)  # an event that is neither 0 nor 1

    run, said = plan(False, change=change), list[str]()
    found = fit_cox(sites(False, tmp_path, run=run, say=said.append), CoxOptions("time", "died", ["x"]))
    assert (found.clients, found.rows) == (2, 100)
    assert [*found.left_out] == ["b"]
    assert said == [f"b is left out: {found.left_out['b']}"]
    assert found.plain()["left_out"] == found.left_out


def test_a_site_that_refuses_the_first_question_is_asked_no_other(tmp_path: Path) -> None:
    """Its answers to later ones would be of other rows than the first, and there is no model of both."""

    def change(place: int, inputs: Any) -> None:
        if place == 0:
            inputs[0, 0] = 1e4  # one row decides the moments, which a site does not tell

    run, said = plan(False, (200, 200, 200), change=change), list[str]()
    careful = Policy(queries=["model_sums"])
    found = fit_glm(sites(False, tmp_path, careful, run=run, say=said.append), GlmOptions("falls", ["x"]))
    assert (found.clients, [*found.left_out]) == (2, ["a"])
    assert said == ["a is left out: refused by the site's policy: too few rows contribute to a sum, or one of them has "
                    "a large share of it"]  # fmt: skip


def changed(change: Callable[[torch.Tensor], Any]) -> Change:
    return lambda update: (
        dataclasses.replace(update, vectors={SUM: change(update.vectors[SUM])}) if SUM in update.vectors else update
    )


@pytest.mark.parametrize(
    "change", [lambda sums: sums[:-1], lambda sums: sums * torch.nan, lambda sums: sums.float()]
)  # fmt: skip
def test_hostile_sums_do_not_count(change: Callable[[torch.Tensor], Any], tmp_path: Path) -> None:
    found = fit_glm(sites(False, tmp_path, change=changed(change)), GlmOptions("falls", ["x"]))
    assert (found.clients, found.rows) == (2, 120)


def test_a_question_is_bounded_before_it_is_answered() -> None:
    wide = {"family": "gaussian", "target": ("0", None), "columns": [(str(k), None) for k in range(257)]}
    with pytest.raises(ValueError, match="256"):
        ModelSumsQuery(plan=wide, ask="moments")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="times"):
        MaskedModelSumsQuery(plan={"family": "cox", "target": ("0", None)}, ask="moments")  # type: ignore[arg-type]
    asked = sites(False, None)
    spec = {"family": "poisson", "target": ("99", None)}
    query = ModelSumsQuery(plan=spec, ask="moments")  # type: ignore[arg-type]
    answers = asked._sites.ask(query, [0, 1, 2], {"numbers": torch.zeros(0, dtype=torch.float64)})
    assert answers == {}
    assert isinstance(next(iter(asked._sites.refused.values())), str)


def test_counts_of_times_are_whole_numbers() -> None:
    spec = {"family": "survival", "target": ("4", None), "time": "3"}
    query = ModelSumsQuery(plan=spec, ask="counts", numbers=2)  # type: ignore[arg-type]
    for sums in ([1.0, 0.5, 0, 0], [-1.0, 0, 0, 0]):
        answer = Update({SUM: torch.tensor(sums, dtype=torch.float64)}, 30, 0, {})
        assert query.reject_reason(answer, PLANS[False].work) == "sent counts that are no whole numbers"


def test_an_approval_names_the_columns_and_not_the_coefficients() -> None:
    columns = ModelColumns(PLANS[True].clients, FEATURES, "falls", "train", CODES, True)
    model, names = GlmOptions("falls", ["x", "arm"], "poisson", "logdays").plan(columns)
    assert names == ["x", "arm=1"]
    query = columns.query(model)
    assert query.stated() == columns.query(model, "likelihood", 3).stated()
    assert query.stated()["plan"]["columns"] == (("0", None), ("2", "1"))


@pytest.mark.long
def test_commands_ask_three_sites_over_connections(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # so many rows that sites tell their sums by default
    table = pooled(plan(False, rows=(600, 700, 800))).drop(columns="arm").astype({"falls": int})
    table.to_csv(tmp_path / "rows.csv", index=False)
    file = tmp_path / "file.toml"
    file.write_text(
        f"data = {{ source = {json.dumps(str(tmp_path / 'rows.csv'))}, client = 'site', target = 'falls', regression = "
        "true, features = ['x', 'logdays', 'time', 'died'] }\nmodel = { name = 'mlp' }\nrounds = 1\n"
        "recipe = { name = 'fedavg' }\n"
    )
    clients = ExperimentSettings.load(file).source_clients()
    names = ["x", "logdays", "time", "died"]
    falls = piebald.glm(clients, family="poisson", columns=["x"], offset="logdays", features=names)
    hazards = piebald.cox(clients, time="time", event="died", columns=["x"], features=names)
    words = ["--runtime", "federation", "--json"]
    assert main(["glm", str(file), "--family", "poisson", "--column", "x", "--offset", "logdays", *words]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["coefficients"]["x"]["coefficient"] == pytest.approx(falls.coefficients[1], abs=1e-10)
    times = ["--time", "time", "--event", "died", "--secure", *words]
    assert main(["cox", str(file), "--column", "x", *times]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["coefficients"]["x"]["std. error"] == pytest.approx(hazards.errors[0], abs=1e-10)
    assert main(["survival", str(file), "--times", "5:15:5", *times]) == 0
    assert json.loads(capsys.readouterr().out)["curves"]["all"]["rows"] == hazards.rows
