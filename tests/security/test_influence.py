"""No row decides a sum that leaves a site without noise: disclosure control against questions that single rows out.

Each attack asks one site whose policy says nothing of it, or a floor of 10, and succeeded before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from piebald import recipes
from piebald.contracts import SUM, Task
from piebald.core.moments import keys_of
from piebald.data.clients.data_source import RunRows
from piebald.data.partition import clients_from
from piebald.data.preparation.answers import KindsAnswer, ValuesAnswer
from piebald.data.preparation.preparation import PrepareSettings
from piebald.experiments.run_settings import RunSettings
from piebald.federation.site.policy import Policy
from piebald.federation.site.site_rows import SiteClient, SiteSource, own_rows
from piebald.federation.site.task_runner import TaskRunner
from piebald.inference.models.rows import Ask, ModelPlan, ModelRows, Scale
from piebald.inference.models.sums import _CONTRIBUTIONS, client_sums
from piebald.inference.queries.columns import MaskedSumsQuery, ModelSumsQuery, StatisticsQuery
from piebald.inference.queries.prepare import PrepareNamesQuery, PrepareQuery, unpacked
from piebald.methods.queries import Confusion, Evaluate
from piebald.models import Logistic
from piebald.privacy.ledger import DisclosureRules, Withheld
from piebald.runs.prepare import prepare
from tests.inference.test_preparation_at_sites import Sites, table

ROWS, NUMBERS = 200, ["age", "dose", "arm", "time", "died", "log_days"]
POLICIES = [
    Policy(queries=["model_sums", "statistics", "prepare", "confusion", "evaluate"], **extra)  # type: ignore[arg-type]
    for extra in ({}, {"least_rows": 10})
]


def rows(seed: int = 3) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    age, dose, arm = rng.normal(60, 10, ROWS), rng.normal(0, 1, ROWS), rng.integers(0, 2, ROWS)
    time, died = np.ceil(rng.exponential(20, ROWS)).clip(1, 60), rng.random(ROWS) < 0.6
    inputs = np.stack([age, dose, arm, time, died, rng.normal(3, 0.3, ROWS)], 1).astype(np.float32)
    return inputs, rng.poisson(2.0, ROWS).astype(np.float32) + np.float32(0.0)


def site(policy: Policy, x: Any = None, y: Any = None) -> TaskRunner:
    own = rows() if x is None else (x, y)
    parts = {name: own if name == "a" else rows(7 + place) for place, name in enumerate("abc")}
    clients = clients_from(parts, test=0.0, validation=0.0, regression=True)
    run = prepare(recipes.fedavg(), clients, Logistic([len(NUMBERS)], 1), RunSettings(seed=1))
    return TaskRunner(SiteClient(run.work, run.clients, 0), policy, "cpu")


def ask(where: TaskRunner, query: Any, **vectors: Any) -> tuple[Any, str | None]:
    model = where.work.initial[: where.work.layout.shared]
    sent = {name: torch.as_tensor(np.asarray(vector, dtype=np.float64)) for name, vector in vectors.items()}
    return where.serve(Task(1, 0, 0, {"model": model, **sent}, query), None)[:2]


def of_model(
    where: TaskRunner, family: str, columns: list[str], ask_for: Ask, point: Any, scale: Any = None, **parts: Any
) -> tuple[Any, str | None]:
    """The answer about a model; its target is the count, or an event."""
    target = "died" if family in ("cox", "survival") else "target"
    places = {name: str(place) for place, name in enumerate([*NUMBERS, "target"])}
    named = {name: places.get(value, value) for name, value in parts.items()}
    if family in ("cox", "survival"):
        named["time"] = places["time"]
    plan = ModelPlan(
        family=family, columns=tuple((places[name], None) for name in columns), target=(places[target], None), **named
    )  # type: ignore[arg-type]
    numbers = np.concatenate([*(scale or (np.zeros(len(columns)), np.ones(len(columns)))), np.atleast_1d(point)])
    query = ModelSumsQuery(plan=plan, ask=ask_for, numbers=len(np.atleast_1d(point)))
    return ask(where, query, numbers=numbers)


def fitted_scale(columns: list[str]) -> tuple[Any, Any]:
    x = rows()[0][:, [NUMBERS.index(name) for name in columns]].astype(float)
    return x.mean(0), x.std(0)


# ------------------------------------------------------------------------------------------------ what is answered


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("family", "columns", "ask_for", "point"),
    [
        ("gaussian", ["age", "dose", "arm"], "moments", []),
        ("gaussian", ["age", "dose", "arm"], "likelihood", [2.0, 0.0, 0.0, 0.0]),
        ("poisson", ["age", "dose"], "likelihood", [0.7, 0.1, -0.1]),
        ("poisson", ["age", "dose"], "scores", [0.7, 0.0, 0.0]),
        ("poisson", ["dose"], "random", [0.7, 0.0, 0.3]),
        ("gaussian", ["dose"], "two_stage", [0.0] * 4),
        ("poisson", ["age", "dose"], "slopes", [0.7, 0.1, -0.1]),
        ("cox", ["dose", "arm"], "likelihood", [0.2, 0.1]),
        ("cox", ["dose"], "schoenfeld", [0.2, 0.0]),
        ("survival", ["arm"], "counts", [15.0, 60.0]),
    ],
)
def test_ordinary_models_are_answered(policy: Policy, family: str, columns: Any, ask_for: Ask, point: Any) -> None:
    """At 200 rows, by default and with the floor of 10."""
    scale = fitted_scale(columns) if family != "survival" else None
    answer, reason = of_model(site(policy), family, columns, ask_for, point, scale)
    assert reason is None
    assert np.isfinite(answer.vectors[SUM].numpy()).all()


# -------------------------------------------------------------------------------------------- models that single out


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("size", [1.0, 3.0, 30.0, -3.0])
def test_one_large_coefficient_gives_no_whole_row(policy: Policy, size: float) -> None:
    """Sixty directions, in each of which one row has nearly all of the sums of a Poisson model."""
    rng, where = np.random.default_rng(1), site(policy)
    scale = fitted_scale(["age", "dose", "log_days"])
    x = (rows()[0][:, [0, 1, 5]] - scale[0]) / scale[1]
    singled_out = 0
    for _ in range(60):
        direction = rng.normal(size=3)
        means = np.exp(np.clip(x @ direction * size, None, 700))
        answer, _ = of_model(where, "poisson", ["age", "dose", "log_days"], "likelihood", [0, *direction * size], scale)
        singled_out += answer is not None and means.max() > 0.4 * means.sum()
    assert singled_out == 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("family", "ask_for", "extra"), [("poisson", "random", [1.0]), ("poisson", "scores", []), ("cox", "likelihood", []),
                                     ("poisson", "slopes", []),
                                     ("cox", "scores", []), ("cox", "schoenfeld", [0.0])],
)  # fmt: skip
def test_large_coefficients_of_other_questions_are_refused(
    policy: Policy, family: str, ask_for: Ask, extra: list[float]
) -> None:
    point = [-10.0, 40.0, *extra] if family == "poisson" else [40.0, *extra]
    answer, _ = of_model(site(policy), family, ["dose"], ask_for, point, fitted_scale(["dose"]))
    assert answer is None


@pytest.mark.parametrize("policy", POLICIES)
def test_a_function_of_time_of_the_askers_choice_is_not_taken(policy: Policy) -> None:
    """A table that is 1 in one interval counts its events."""
    where = site(policy)
    for start in range(0, 50, 7):
        times = np.arange(1.0, 62.0)
        table = np.concatenate([[2.0], times, (times == start).astype(float)])
        assert of_model(where, "cox", ["dose"], "schoenfeld", [0.0, *table], fitted_scale(["dose"]))[0] is None


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_beyond_the_last_time_are_counted_as_well(policy: Policy) -> None:
    ends = np.sort(rows()[0][:, 3])
    # one row of each group, or two, is observed for longer than the last time
    for last in (ends[-2], ends[-4]):
        if (ends > last).sum():
            assert of_model(site(policy), "survival", ["arm"], "counts", [float(last)])[0] is None


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("column", ["log_days", "dose"])
@pytest.mark.parametrize("part", ["offset", "weights"])
def test_a_row_with_a_huge_offset_or_weight_is_not_told(policy: Policy, column: str, part: str) -> None:
    x, y = rows()
    x[:, NUMBERS.index(column)] = np.abs(x[:, NUMBERS.index(column)])
    x[17, NUMBERS.index(column)] = 1e6
    for question, point in (("moments", []), ("likelihood", [0.0, 0.0])):
        assert of_model(site(policy, x, y), "gaussian", ["age"], question, point, **{part: column})[0] is None  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("family", ["gaussian", "cox", "survival"])
@pytest.mark.parametrize("count", [1, 4, 9])
def test_a_regressor_of_few_rows_is_not_told(policy: Policy, family: str, count: int) -> None:
    """One-hot columns of chosen rows, as regressors, groups, clusters and weights."""
    x, y = rows()
    x[:, 1] = np.arange(ROWS) < count
    where = site(policy, x, y)
    question: Ask = "logrank" if family == "survival" else "likelihood"
    point = [] if family == "survival" else [0.0] * (1 + (family == "gaussian"))
    assert of_model(where, family, ["dose"], question, point)[0] is None
    if family == "gaussian":
        assert of_model(where, family, ["age"], "scores", [0.0, 0.0], cluster="dose")[0] is None
        assert of_model(where, family, ["age"], "likelihood", [0.0, 0.0], weights="dose")[0] is None


# ------------------------------------------------------------------------------------------------------ columns


@pytest.mark.parametrize("policy", POLICIES)
def test_a_histogram_with_moved_edges_has_no_small_cell(policy: Policy) -> None:
    from piebald.core.moments import keys_of

    values = np.sort(rows()[0][:, 0].astype(float))
    for edges in ([values[100], values[103]], [values[4]], [values[194]]):
        keys = [list(map(int, keys_of(np.array(edges))))] * (len(NUMBERS) + 1)
        query = StatisticsQuery(keys=tuple(map(tuple, keys)))
        assert ask(site(policy), query)[0] is None


def test_a_masked_histogram_obeys_the_floor_at_each_site() -> None:
    rules, x = DisclosureRules(), rows()[0][:, :1].astype(float)
    for bins, allowed in ((1, True), (50, False)):
        query = MaskedSumsQuery(bounds=((0.0, 120.0),), bins=bins)
        columns = query._columns(x)
        counts, contributions = query.plan.influences(columns, query.plan.vector(columns))
        rules.check(contributions)
        assert rules.allow_counts(counts) is allowed


def test_one_outlier_is_not_told_by_moments() -> None:
    x, y = rows()
    x[3, 1] = 1e7
    assert ask(site(POLICIES[0], x, y), StatisticsQuery())[0] is None
    assert ask(site(POLICIES[0]), StatisticsQuery())[0] is not None


# -------------------------------------------------------------------------------------------------- preparation


def prepared_site(tmp_path: Path, frame: pandas.DataFrame, policy: Policy) -> TaskRunner:
    tmp_path.mkdir(exist_ok=True)
    sites = Sites(tmp_path, {"north": frame, "south": table(60, "ab", 2), "east": table(40, "bc", 3)})
    ready = sites.ready(sites.settings.with_agreed(None))
    (north, *_) = sites.at(ready)
    return TaskRunner(north, policy, "cpu")


@pytest.mark.parametrize("exponent", [40.0, 70.0, -40.0, 6.0, 0.123456789])
def test_exponents_are_of_a_closed_list(exponent: float) -> None:
    with pytest.raises(Exception, match="exponents must be between"):
        PrepareQuery(question={"about": "powers", "exponents": {"age": [exponent]}})


def test_a_power_that_is_one_row_is_not_told(tmp_path: Path) -> None:
    frame = table(80, "ab", 1).fillna(60.0)
    query = PrepareQuery(question={"about": "powers", "exponents": {"age": [1.0, 4.0]}})
    assert ask(prepared_site(tmp_path / "even", frame, POLICIES[0]), query)[0] is not None
    frame.loc[5, "age"] = 900.0
    assert ask(prepared_site(tmp_path / "one", frame, POLICIES[0]), query)[0] is None


def test_classes_of_few_rows_are_not_named(tmp_path: Path) -> None:
    frame = table(80, "ab", 1)
    frame.loc[7, "ill"] = "leprosy"
    where = prepared_site(tmp_path, frame, POLICIES[0])
    answer, _ = ask(where, PrepareQuery(question={"about": "kinds", "target": True}))
    told = unpacked(answer.vectors["told"])
    assert isinstance(told, KindsAnswer)
    assert set(told.classes or ()) == {"no", "yes"}


@pytest.mark.parametrize("kind", [PrepareQuery, PrepareNamesQuery])
def test_names_are_told_above_the_sites_own_floor(tmp_path: Path, kind: type[PrepareQuery]) -> None:
    """A floor of 1 is the asker's: two hundred of two hundred names, salaries and dates came."""
    frame = table(80, "ab", 1)
    frame["ward"] = [f"patient {row}" if row % 2 else "ward" for row in range(len(frame))]
    where = prepared_site(tmp_path, frame, Policy(queries=["prepare", "prepare_names"]))
    question = {"about": "values", "kinds": {"ward": "category"}, "least_rows": 1}
    answer, reason = ask(where, kind(question=question))
    assert reason is None
    told = unpacked(answer.vectors["told"])
    assert isinstance(told, ValuesAnswer)
    assert told.categories["ward"].names == ["ward"]


# ----------------------------------------------------------------------------------------------------- scores


def scored(policy: Policy, rows_of_one: int, flipped: float | None = None) -> TaskRunner:
    """A site whose classes are told by its first column, but for one row, which has this number there."""
    rng = np.random.default_rng(4)
    x = rng.normal(size=(300, 2)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    if flipped is not None:
        y = np.where(np.isclose(x[:, 0], flipped), 1 - y, y)
    clients = clients_from({"a": (x[:rows_of_one], y[:rows_of_one]), "b": (x[100:], y[100:])}, test=0.5)
    run = prepare(recipes.fedavg(lr=0.1), clients, Logistic([2], 2), RunSettings(seed=1))
    return TaskRunner(SiteClient(run.work, run.clients, 0), policy, "cpu")


def test_scores_are_of_enough_rows_and_a_loss_that_one_row_makes_stays() -> None:
    assert ask(scored(Policy(), 10), Evaluate())[0] is None
    # a model that is sure of all rows, on which only the row of another class has a loss
    sure = np.array([0.0, 0.0, 500.0, 0.0, 0.0, 0.0], dtype=np.float32)
    plain = scored(Policy(), 100)
    first = plain._clients.rows(0, "test").x[:, 0]  # type: ignore[union-attr,index]
    where = scored(Policy(), 100, float(first[first.abs().argmax()]))
    assert "global/loss" in ask(where, Evaluate())[0].metrics
    told = where.serve(Task(1, 0, 0, {"model": torch.from_numpy(sure)}, Evaluate()), None)[0]
    assert told is not None
    assert "global/accuracy" in told.metrics
    assert "global/loss" not in told.metrics


def test_counts_of_mistakes_are_of_enough_rows() -> None:
    answer, _ = ask(scored(Policy(queries=["confusion"]), 100), Confusion(classes=2))
    told = [] if answer is None else answer.vectors["confusion"].tolist()
    assert all(count == 0 or count >= 10 for count in told)


# ------------------------------------------------------------------------------------------------------ the rules


def test_contributions_add_up_to_the_sums_that_leave() -> None:
    """Influence is measured in what is released."""
    x, y = (part.astype(float) for part in rows())
    nothing = np.zeros(ROWS)
    parts = {"offset": nothing, "weight": np.linspace(0.5, 2, ROWS), "time": x[:, 3], "entry": nothing - np.inf}
    labels = {"cluster": np.arange(ROWS).astype(object), "stratum": np.zeros(ROWS, dtype=int), "dropped": 0,
              "steps": np.zeros((ROWS, 0))}  # fmt: skip

    def checked(family: str, target: Any, ask_for: Ask, point: Any) -> None:
        timed = {"time": "3"} if family == "cox" else {}
        columns = (("1", None), ("2", None))
        levels = ("a", "b", "c") if family in ("ordinal", "multinomial") else ()
        plan = ModelPlan(family=family, columns=columns, target=("t", None), levels=levels, **timed)  # type: ignore[arg-type]
        own = ModelRows(x=x[:, 1:3], y=target, **parts, **labels)  # type: ignore[arg-type]
        numbers = np.concatenate([np.zeros(2), np.ones(2), point])
        sums = client_sums(plan, ask_for, own, numbers)
        scale = Scale(np.zeros(2), np.ones(2))
        totals = [
            block.sum(0) for block in _CONTRIBUTIONS[ask_for](plan, own, scale, np.array(point), DisclosureRules())
        ]
        width = plan.parameters
        score, information = sums[3 : 3 + width], sums[3 + width :].reshape(width, width)
        np.testing.assert_allclose(totals[1], score, atol=1e-8)
        lines = np.concatenate([information[line, line:] for line in range(width)])
        np.testing.assert_allclose(np.concatenate(totals[2:]), lines, atol=1e-8)
        if family != "cox":
            np.testing.assert_allclose(totals[0], sums[:3], atol=1e-8)

    for family in ("gaussian", "poisson", "negative_binomial"):
        point = [0.3, 0.1, -0.2] + ([0.1] if family == "negative_binomial" else [])
        checked(family, y, "likelihood", point)
    checked("binomial", x[:, 4], "likelihood", [0.3, 0.1, -0.2])
    checked("cox", x[:, 4], "likelihood", [0.3, -0.2])
    for family in ("gamma", "tweedie"):
        checked(family, np.abs(y) + 0.1, "likelihood", [0.3, 0.1, -0.2])
    checked("ordinal", np.arange(ROWS) % 3.0, "likelihood", [0.4, -0.4, 0.1, -0.2])
    checked("multinomial", np.arange(ROWS) % 3.0, "likelihood", [0.3, 0.1, -0.2, 0.1, 0.0, 0.2])


@pytest.mark.parametrize("rows_of_sum", [1, 3, 9, 10])
def test_equal_rows_count_one_each_and_small_ones_do_not(rows_of_sum: int) -> None:
    contributions = np.concatenate([np.ones(rows_of_sum), np.full(1000, 1e-6), np.zeros(1000)])[:, None]
    rules = DisclosureRules()
    if rows_of_sum < 10:
        with pytest.raises(Withheld):
            rules.check([contributions])
    else:
        rules.check([contributions])


@pytest.mark.parametrize("leading", range(1, 10))
def test_few_rows_with_most_of_a_sum_are_not_hidden_by_many(leading: int) -> None:
    """Before, rows with a hundredth of the largest one counted as much as it did: five with nearly all were told."""
    contributions = np.concatenate([np.ones(leading), np.full(100, 0.09 * leading / 100)])[:, None]
    assert not DisclosureRules().allow(contributions)
    assert DisclosureRules().allow(np.concatenate([np.ones(10), contributions[leading:, 0]])[:, None])


def test_what_two_rows_leave_of_a_sum_hides_a_third_one() -> None:
    """Who has two of the rows and subtracts them is left with an estimate of any other that is off by itself or more
    (the p-percent rule, for two who collude).
    """
    draw, rules, allowed = np.random.default_rng(3), DisclosureRules(), 0
    for _ in range(2000):
        sizes = np.sort(draw.pareto(draw.uniform(0.3, 3), 40))[::-1]
        if rules.allow(sizes[:, None]):
            allowed += 1
            assert sizes[3:].sum() >= sizes[0] * (1 - 1e-6)
            assert sizes[:9].sum() <= 0.9 * sizes.sum() * (1 + 1e-6)
    assert 200 < allowed < 1800
    pair = np.concatenate([[30.0, 25.0], np.ones(40)])
    assert not rules.allow(pair[:, None])


def test_rows_of_one_person_count_together() -> None:
    contributions, people = np.ones((30, 1)), np.repeat(np.arange(3), 10).astype(object)
    DisclosureRules().check([contributions])
    with pytest.raises(Withheld):
        DisclosureRules().check([contributions], people)


@given(
    arrays(np.float64, st.integers(12, 120), elements=st.floats(0, 1e6)), st.integers(1, 7), st.booleans(),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_whoever_has_the_rows_no_person_has_a_large_share(
    sizes: Any, rows_per_person: int, dominance_only: bool, random: Any
) -> None:
    """The rules hold for persons in whatever way rows belong to them, the largest to one person first of all."""
    rules, of_persons = DisclosureRules(rows_per_person=rows_per_person), DisclosureRules()
    if not rules.allow(sizes[:, None], dominance_only):
        return
    mixed = np.arange(len(sizes))
    random.shuffle(mixed)
    for order in (np.argsort(-sizes), mixed):
        persons = np.add.reduceat(sizes[order], np.arange(0, len(sizes), rows_per_person))
        assert of_persons.allow(persons[:, None], dominance_only)


def test_rows_of_a_person_count_as_one_row() -> None:
    """Of ten persons with three rows each, as of ten rows."""
    assert DisclosureRules(rows_per_person=3).allow(np.ones((30, 1)))
    assert not DisclosureRules(rows_per_person=3).allow(np.ones((27, 1)))
    assert DisclosureRules(rows_per_person=3).allow_counts(np.array([0, 28]))
    assert not DisclosureRules(rows_per_person=3).allow_counts(np.array([27]))


PERSONAL = {
    "a moment of which a person has most": StatisticsQuery(),
    "a count of one person": StatisticsQuery(keys=tuple(map(tuple, keys_of(np.full((2, 2), [50.0, 1e6])).tolist()))),
    "the name of a category of one person": PrepareNamesQuery(question={
        "about": "values", "kinds": {"ward": "category"}, "scale": {}, "gaps": [], "forms": {}, "least_rows": 1}),
    "scores of a model of one person's rows": Evaluate(),
}  # fmt: skip


@pytest.mark.parametrize("asked", PERSONAL)
def test_a_person_with_several_rows_is_hidden_where_the_site_names_the_column(asked: str, tmp_path: Path) -> None:
    """One patient has 12 of 140 rows, with most of each sum; without the column no row has much of it."""
    rng, one = np.random.default_rng(4), np.arange(140) < 12
    frame = pandas.DataFrame({
        "patient": np.where(one, "p0", [f"p{row}" for row in range(140)]),
        "dose": np.where(one, 100.0, rng.random(140)),
        "ward": np.where(one, "isolation", "main"), "y": np.where(one, 90.0, rng.random(140)),
    })  # fmt: skip
    frame.to_csv(tmp_path / "rows.csv", index=False)
    prepared, told = asked.startswith("the name"), {}
    blank = clients_from({"a": (np.ones((20, 1), np.float32), np.arange(20, dtype=np.float32))}, regression=True)
    plan = prepare(recipes.fedavg(), blank, Logistic([1], 1), RunSettings())
    for person in (None, "patient"):
        features = ["dose", "ward"] if prepared else ["dose"]
        source = SiteSource(source="rows.csv", target="y", regression=True, person=person, features=features, test=0.0,
                            validation=0.0)  # fmt: skip
        run = RunRows(numbers=True, prepare=PrepareSettings() if prepared else None)
        own = own_rows(source, tmp_path, "a", run, ["a"])
        assert own.rows_per_person == (1 if person is None else 12)
        policy = Policy(queries=["statistics", "prepare_names", "evaluate"])
        where = TaskRunner(
            SiteClient(plan.work, own, 0, records=own.records, rows_per_person=own.rows_per_person), policy, "cpu"
        )
        told[person] = ask(where, PERSONAL[asked])
    assert told[None][0] is not None
    answer, _ = told["patient"]
    if prepared:
        assert "isolation" in unpacked(told[None][0].vectors["told"]).categories["ward"].names
        assert unpacked(answer.vectors["told"]).categories["ward"].names == ["main"]
    else:
        assert answer is None or "global/loss" not in answer.metrics


def test_a_million_rows_are_checked_in_blocks() -> None:
    values = np.ones((1_000_000, 2))
    assert DisclosureRules().allow(values)
    values[:, 1] = 1e-9
    values[0, 1] = 1.0
    assert not DisclosureRules().allow(values)
