"""Questions about rows are counted on the site's disk over all runs, and an approval is of one question.

Before, a question that was approved once let any other one pass, each run began to count anew, and a server that
scored forests of its own choice read a row in 58 questions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from piebald import recipes
from piebald.cli.app import SharedOptions
from piebald.cli.statistics import site_flags
from piebald.contracts import Query, Task
from piebald.contracts.component import Component
from piebald.core.errors import PiebaldError, SettingError
from piebald.core.moments import keys_of
from piebald.core.randomness import NoiseSource
from piebald.data.partition import clients_from
from piebald.experiments.run_settings import RunSettings
from piebald.federation.site import consent
from piebald.federation.site.policy import UNTRAINED, Policy
from piebald.federation.site.site_rows import SiteClient, SiteSource, rows_before_a_run, rows_of
from piebald.federation.site.task_runner import TaskRunner
from piebald.inference.columns import statistics_request
from piebald.inference.experiment import open_sites, question_recipe
from piebald.inference.queries.columns import StatisticsQuery
from piebald.inference.queries.prepare import PrepareQuery
from piebald.inference.queries.trees import TreeScoresQuery
from piebald.inference.statistics_at_sites import stated_questions, statistics_at_sites
from piebald.inference.trees.forest import TreeSettings
from piebald.methods.queries import Confusion, Evaluate
from piebald.methods.queries.row_scores import NaiveScores, TrainingTotals
from piebald.methods.queries.scores import Validate
from piebald.methods.recipe import Recipe
from piebald.models import Logistic
from piebald.privacy import SecureAggregation
from piebald.privacy.ledger import FILE, OverLimit, RowLedger
from piebald.runs.prepare import prepare
from piebald.server.client_queries import ClientQueries
from tests import processes
from tests.federation.conftest import ENVIRONMENT, Sites, provisioned, until
from tests.inference.sites import InProcess

RNG = np.random.default_rng(3)
X = RNG.normal(size=(200, 3)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int64)
CLIENTS = clients_from({name: (X[k::3], Y[k::3]) for k, name in enumerate("abc")}, test=0.4, validation=0.1)
PLAN = prepare(recipes.fedavg(lr=0.1), CLIENTS, Logistic([3], 2), RunSettings(seed=1))
MODEL = torch.linspace(-0.5, 0.5, PLAN.work.layout.shared)  # a model as drawn has other counts in each process


def pending(process: subprocess.Popen[bytes], folder: Path) -> dict[str, Any]:
    """What waits at a site, once something does."""

    def waiting() -> Any:
        assert process.poll() is None, process.communicate()
        return consent.pending(folder)

    return until(waiting)  # type: ignore[no-any-return]


def records(*rows: int) -> Any:
    return np.array(sorted(rows), dtype=np.uint64)


def site(policy: Policy, folder: Path | None = None, rows: Any = None, **more: Any) -> TaskRunner:
    """A site in this process; with a folder it counts on disk."""
    ledger = None if folder is None else RowLedger(rows_of(CLIENTS, 0) if rows is None else rows, [folder])
    return TaskRunner(SiteClient(PLAN.work, CLIENTS, 0), policy, "cpu", ledger=ledger, **more)


def ask(where: TaskRunner, query: Any, model: torch.Tensor = MODEL, version: int = 0, **vectors: torch.Tensor) -> Any:
    """The answer and the reason why there is none."""
    return where.serve(Task(1, 0, version, {"model": model, **vectors}, query), None)[:2]


# ---------------------------------------------------------------------------------------------------------- the count


def test_what_was_asked_counts_under_whatever_run_name_or_file(tmp_path: Path) -> None:
    first = RowLedger(records(1, 2, 3), [tmp_path / "a", tmp_path / "rows"])
    first.count("evaluate", "q1", 2)
    again = RowLedger(records(3, 2, 1), [tmp_path / "b", tmp_path / "rows"])  # new credentials beside the rows
    again.count("evaluate", "q2", 2)
    moved = RowLedger(records(1, 2, 3), [tmp_path / "b", tmp_path / "elsewhere"])  # the rows, elsewhere
    with pytest.raises(OverLimit, match="answered 2 questions 'evaluate' about its rows, in all runs together"):
        moved.count("evaluate", "q3", 2)
    moved.count("confusion", "q3", 1)
    assert moved.summary == "evaluate 2 of 2, confusion 1 of 1"


@given(st.sets(st.integers(0, 9), min_size=1), st.sets(st.integers(0, 9), min_size=1))
def test_sets_that_share_a_row_count_as_one(tmp_path_factory: pytest.TempPathFactory, one: Any, other: Any) -> None:
    folder = tmp_path_factory.mktemp("ledger")
    RowLedger(records(*one), [folder]).count("statistics", "q1", 1)
    further = RowLedger(records(*other), [folder])
    with pytest.raises(OverLimit) if one & other else contextlib.nullcontext():
        further.count("statistics", "q2", 1)


@pytest.mark.parametrize(("common", "one"), [(9, True), (8, False), (10, True)])
def test_another_name_takes_no_site_out_of_the_count(common: int, one: bool, tmp_path: Path) -> None:
    """Rows of few categories repeat at other sites, whose tables may lie in the same folder."""
    RowLedger(records(*range(10)), [tmp_path], "north").count("statistics", "q1", 1)
    other = RowLedger(records(*range(10 - common, 20 - common)), [tmp_path], "south")
    assert other.counts == ({"statistics": 1} if one else {})


def _spend(folder: Path, who: int) -> None:
    ledger = RowLedger(records(1, 2), [folder / f"{who}", folder / "rows"])
    for number in range(20):
        try:
            ledger.count("evaluate", f"{who}/{number}", 25)
        except OverLimit:
            continue


def test_two_processes_have_one_count(tmp_path: Path) -> None:
    """Each has credentials of its own, and the rows are the same."""
    context = multiprocessing.get_context("fork")
    both = [context.Process(target=_spend, args=(tmp_path, who)) for who in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
        assert process.exitcode == 0
    for folder in ("rows", "0", "1"):  # the copies of each are merged whenever one of them is opened
        assert RowLedger(records(1, 2), [tmp_path / folder, tmp_path / "rows"]).counts == {"evaluate": 25}


def test_a_count_that_cannot_be_read_or_written_answers_nothing(tmp_path: Path) -> None:
    where = site(Policy(), tmp_path)
    assert ask(where, Evaluate())[1] is None
    (tmp_path / FILE).write_text("{}")
    answer, reason = ask(where, Evaluate(), MODEL + 1)
    assert answer is None
    assert reason == "this site's ledger cannot be read or written, its log says more"
    with pytest.raises(SettingError, match="restore it from a backup"):
        RowLedger(records(1), [tmp_path])
    (tmp_path / FILE).unlink()
    (tmp_path / FILE).mkdir()
    assert ask(where, Evaluate(), MODEL + 1)[1] == reason


@pytest.mark.parametrize("rows", ["../../elsewhere", "x/../../elsewhere", "0" * 31, "A" * 32])
def test_a_count_that_came_with_rows_names_no_file_elsewhere(rows: str, tmp_path: Path) -> None:
    """The copy of the count lies beside the rows, where somebody else may have put it."""
    RowLedger(records(1), [tmp_path]).count("evaluate", "q", 10)
    text = (tmp_path / FILE).read_text()
    (tmp_path / FILE).write_text(text.replace(RowLedger(records(1)).rows, rows))
    with pytest.raises(SettingError, match="no ledger that can be read"):
        RowLedger(records(1), [tmp_path])


@pytest.mark.parametrize("kind", ["pipe", "short", "long"])
def test_rows_of_a_count_that_cannot_be_read_answer_nothing_more(kind: str, tmp_path: Path) -> None:
    ledger = RowLedger(records(1, 2), [tmp_path], "site")
    ledger.count("evaluate", "q", 1)
    path = tmp_path / f"rows-{ledger.rows}"
    path.unlink()
    {
        "pipe": lambda: os.mkfifo(path),
        "short": lambda: path.write_bytes(records(2).astype("<u8").tobytes() + b"123"),
        "long": lambda: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 1 << 30),
    }[kind]()
    with pytest.raises((OSError, OverLimit)):
        RowLedger(records(2, 3), [tmp_path], "site").count("evaluate", "other", 1)


def test_a_question_is_counted_before_it_is_answered(tmp_path: Path) -> None:
    """A kill gives no free answer, and what was told to the audit log cannot be written later."""
    told: list[dict[str, Any]] = []

    def die(**about: Any) -> None:
        told.append(about)
        raise OSError(28, "no space")

    assert ask(site(Policy(), tmp_path, asks=die), Evaluate())[0] is None
    assert told[0]["question"] == "evaluate"
    assert (told[0]["count"], told[0]["most"]) == (1, 1000)
    assert RowLedger(rows_of(CLIENTS, 0), [tmp_path]).counts == {"evaluate": 1}


def records_in(folder: Path, source: str) -> Any:
    """What a site knows its rows by before a run."""
    return rows_before_a_run(SiteSource(source=source, target="c"), folder, "s").records


@pytest.mark.parametrize("change", ["columns", "order", "names", "file"])
def test_rows_are_known_by_what_they_hold(change: str, tmp_path: Path) -> None:
    table = pandas.DataFrame({"a": [1.5, 2.0, 3.0], "b": [4, 5, 6], "c": ["x", "y", "z"]})
    changed = {
        "columns": table[["c", "a", "b"]], "order": table.iloc[::-1], "file": table,
        "names": table.rename(columns={"a": "d"}),
    }[change]  # fmt: skip
    table.to_csv(tmp_path / "one.csv", index=False)
    changed.to_csv(tmp_path / "other.csv", index=False)
    found = [records_in(tmp_path, name) for name in ("one.csv", "other.csv")]
    assert found[0].tolist() == found[1].tolist()
    table.iloc[1:].to_csv(tmp_path / "part.csv", index=False)
    part = records_in(tmp_path, "part.csv")
    assert set(part.tolist()) < set(found[0].tolist())


# ------------------------------------------------------------------------------------------------------- what is asked


def thresholds(edge: float) -> StatisticsQuery:
    limits = np.tile(np.array([[-9.0, edge, 9.0]]), (4, 1))
    return StatisticsQuery(keys=tuple(map(tuple, keys_of(limits).tolist())))


def test_a_moved_edge_is_another_question_for_ever(tmp_path: Path) -> None:
    policy = Policy(queries=["statistics"], least_rows=2)
    assert ask(site(policy, tmp_path), thresholds(0.0))[1] is None
    again = site(policy, tmp_path)  # another run, after the site was started again
    assert ask(again, thresholds(0.0))[1] is None
    assert "answered 1 questions 'statistics: counts'" in ask(again, thresholds(0.0001))[1]
    assert "answered 1 questions 'statistics: counts'" in ask(again, StatisticsQuery(
        split="test", keys=thresholds(0.0).keys))[1]  # fmt: skip
    more = site(policy.model_copy(update={"questions": {"statistics": 2}}), tmp_path)
    assert ask(more, thresholds(0.0001))[1] is None
    assert ask(more, thresholds(0.0002))[0] is None


@pytest.mark.full
def test_a_run_that_is_evaluated_in_each_of_100_rounds_is_answered(tmp_path: Path) -> None:
    for policy in (Policy(), Policy(queries=["evaluate"], least_rows=10)):
        where = site(policy, tmp_path / f"{policy.least_rows}")
        assert all(ask(where, Evaluate(), MODEL + version, version)[1] is None for version in range(100))


def box(low: float, high: float) -> torch.Tensor:
    """A model that takes rows with the first column above `low` for class 1: two of them count a box."""
    weights = torch.zeros(MODEL.shape)
    weights[3], weights[-1] = 1.0, -low
    return weights


def test_a_network_that_is_a_counting_box_tells_no_row() -> None:
    """Differences of accuracies of two models, whose boxes differ by one row, have the noise of many rows."""
    where = site(Policy(queries=["evaluate"], least_rows=10))
    rows = CLIENTS.rows(0, "test")
    edges = np.sort(rows.x[:, 0].numpy())  # type: ignore[union-attr]
    middles = [float(a + b) / 2 for a, b in itertools.pairwise(edges)]
    exact, told = [], []
    for edge in middles:
        answer, reason = ask(where, Evaluate(), box(edge, 0.0))
        assert reason is None
        assert answer.metrics.keys() == {"global/accuracy"}  # a loss has no bound
        told.append(answer.metrics["global/accuracy"] * len(rows))
        plain, _ = ask(site(Policy()), Evaluate(), box(edge, 0.0))
        exact.append(plain.metrics["global/accuracy"] * len(rows))
    steps, guesses = np.diff(exact), np.diff(told)
    assert set(np.abs(steps.round())) == {1.0}  # without noise each difference is the class of one row
    right = np.mean(np.sign(steps) == np.sign(guesses))
    assert right < 0.8
    again, _ = ask(where, Evaluate(), box(middles[0], 0.0))
    assert again.metrics["global/accuracy"] * len(rows) == told[0]  # asking again takes no noise away


# of 17, 21 and 22 the noise adds more rows than the largest count has
@pytest.mark.parametrize("seed", [0, 17, 21, 22])
def test_counts_of_chosen_models_have_noise_where_rows_are_hidden(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = itertools.count(1000 * seed)
    monkeypatch.setattr(NoiseSource, "fresh", lambda: NoiseSource.repeatable(next(keys)))
    where = site(Policy(queries=["confusion"], least_rows=2))
    exact = ask(site(Policy(queries=["confusion"], least_rows=1)), Confusion(classes=2), box(0.0, 0.0))[0]
    answers = [ask(where, Confusion(classes=2), box(0.001 * k, 0.0)) for k in range(12)]
    given = [one for one, _ in answers if one is not None]
    assert len(given) == 10
    assert len({tuple(one.vectors["confusion"].tolist()) for one in given}) > 3
    form = Confusion(classes=2).answer_form(PLAN.work, where.rows)
    for one in given:
        assert Confusion(classes=2).reject_reason(one, PLAN.work) is None
        assert form.reject_reason(one.vectors, one.examples, 0, {}) is None  # no more than there are rows
    # rounded to whole rows, an answer may be the exact one by chance
    assert sum(torch.equal(one.vectors["confusion"], exact.vectors["confusion"]) for one in given) <= 3


@pytest.mark.full
def test_versions_that_a_server_invents_are_not_believed_for_ever() -> None:
    """Before, 500 models at 500 versions passed where a policy examines one of each version."""
    for examined in (1, 2):
        where = site(Policy(queries=["evaluate"], models_per_version=examined))
        answers = [ask(where, Evaluate(), MODEL + k, version=k)[0] for k in range(500)]
        assert sum(one is not None for one in answers) == examined * UNTRAINED
        assert ask(where, None)[0] is not None  # it has trained: there may be a new version
        assert ask(where, Evaluate(), MODEL + 1000, version=1000)[0] is not None


def test_an_approved_run_answers_what_its_terms_name_and_nothing_else() -> None:
    policy = Policy(queries=["statistics", "evaluate"], accept=["ask"])
    asking = dataclasses.replace(PLAN.work, questions=(json.loads(json.dumps(thresholds(0.0).stated())),), trains=False)
    where = TaskRunner(SiteClient(asking, CLIENTS, 0), policy, "cpu")
    assert ask(where, thresholds(0.0))[1] is None
    for other in (thresholds(0.1), StatisticsQuery(), Evaluate(), Evaluate(split="train")):
        assert "with these arguments: the run's terms do not name them" in ask(where, other)[1]
    assert ask(where, None) == (None, "the run's terms say that nothing is trained")
    training = TaskRunner(SiteClient(PLAN.work, CLIENTS, 0), policy, "cpu")
    assert ask(training, Evaluate())[1] is None
    assert "do not name them" in ask(training, Evaluate(split="train"))[1]
    assert "do not name them" in ask(training, thresholds(0.0))[1]


def test_an_approval_of_terms_without_questions_approves_none() -> None:
    """Before, a run that trains and names no question was asked anything that the policy does not forbid by name."""
    silent = dataclasses.replace(PLAN.work, questions=())
    where = TaskRunner(SiteClient(silent, CLIENTS, 0), Policy(accept=["ask"]), "cpu")
    for query in (Evaluate(), Evaluate(split="train"), Validate(), NaiveScores(), TrainingTotals(naive="classes")):
        assert ask(where, query)[0] is None
    assert ask(where, None)[0] is not None  # training was approved


@pytest.mark.parametrize(
    ("recipe", "component", "kind"),
    [
        (recipes.fedavg().with_(aggregation="dvw"), "aggregation", "validate"),
        (recipes.distfl(normal="vote"), "clustering", "validate"),
        (recipes.heterofl(static_batch_norm=True), "training", "batch_statistics"),
    ],
)
def test_what_components_ask_is_in_the_terms(recipe: Recipe, component: str, kind: str) -> None:
    asked = {query.kind for query in getattr(recipe, component).asks(PLAN.work)}
    assert kind in asked


def asked_kinds() -> list[type[Query]]:
    """All kinds of questions that a server may ask."""
    kinds = Component.registry["query"].values()
    return [kind for kind in kinds if kind.asked_of == "clients" and kind.__module__.startswith("piebald.")]  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", asked_kinds(), ids=lambda kind: kind.kind)
def test_an_approval_names_each_argument_or_says_that_it_follows(kind: type[Query]) -> None:
    """Before, of questions about columns only their kind was approved, and of trees five fields."""
    fields = type.__getattribute__(kind, "model_fields")
    assert kind.later.keys() <= {*fields, "forest", "grown", "numbers"}  # and vectors that come with it
    values: dict[str, Any] = {name: 0 for name in fields}
    if issubclass(kind, PrepareQuery):
        values["question"] = QUESTIONS["values"]

    def approved_by(table: dict[str, Any]) -> dict[str, Any]:
        query = kind.model_construct(None, **table)
        object.__setattr__(query, "table", lambda: {"kind": kind.kind, **table})
        return query.stated()

    stated = approved_by(values)
    for name in fields:
        if name not in kind.later:
            assert approved_by({**values, name: QUESTIONS["kinds"] if name == "question" else 1}) != stated
    if kind.later:
        assert stated["at_most"] is not None
        assert all(words in stated["later"].values() for name, words in kind.later.items() if name != "question")


QUESTIONS: dict[str, dict[str, Any]] = {
    "kinds": {"about": "kinds", "gaps": ["?"], "target": True},
    "values": {"about": "values", "kinds": {"age": "number"}, "gaps": ["?"], "least_rows": 7},
    "counts": {"about": "counts", "kinds": {"age": "number"}, "gaps": ["?"], "thresholds": {"age": [1.0]}},
    "powers": {"about": "powers", "gaps": ["?"], "exponents": {"age": [0.5]}},
}


@pytest.mark.parametrize("about", QUESTIONS)
def test_of_a_question_about_columns_all_is_approved_that_is_known_before(about: str) -> None:
    """Also what gaps are, and from how many rows on a category is named."""
    stated = PrepareQuery(question=QUESTIONS[about]).stated()
    fields = {*PrepareQuery(question=QUESTIONS[about]).asked.model_dump()}
    assert {*stated["question"]} | {*stated.get("later", {})} == fields
    assert {*stated["question"]}.isdisjoint(stated.get("later", {}))
    assert PrepareQuery(question={**QUESTIONS[about], "gaps": ["-"]}).stated() != stated
    if about == "values":
        assert PrepareQuery(question={**QUESTIONS[about], "least_rows": 1}).stated() != stated


def test_what_follows_later_is_asked_no_more_often_than_was_approved() -> None:
    """Whatever the policy says of the kind."""
    totals = [TrainingTotals(naive="median", edges=(float(edge),)) for edge in range(200)]
    policy = Policy(queries=["training_totals"], accept=["ask"], least_rows=1, questions={"training_totals": "any"})
    approved = totals[0].stated()
    work = dataclasses.replace(PLAN.work, questions=(json.loads(json.dumps(approved)),), trains=False)
    where = TaskRunner(SiteClient(work, CLIENTS, 0), policy, "cpu")
    refusals = [ask(where, query)[1] for query in totals]
    assert refusals[: approved["at_most"]] == [None] * approved["at_most"]
    assert None not in refusals[approved["at_most"] :]


@pytest.mark.parametrize("quantiles", [(), (0.5,)])
def test_terms_name_the_questions_that_are_asked(quantiles: tuple[float, ...]) -> None:
    """Statistics with bins and bounds at a site that answers what it has approved."""
    bounds: dict[str, Any] = {name: (-9.0, 9.0) for name in ("x0", "x1", "x2")}
    wanted = statistics_request(quantiles, 2, bounds, False)
    stated = tuple(json.loads(json.dumps(one.stated())) for one in stated_questions(CLIENTS, wanted))
    assert len(stated) == 2
    work = dataclasses.replace(PLAN.work, questions=stated, trains=False)
    runtime = InProcess(
        dataclasses.replace(PLAN, work=work), [Policy(queries=["statistics"], accept=["ask"], least_rows=1)] * 3
    )
    assert statistics_at_sites(runtime, work, CLIENTS, wanted).clients == ["a", "b", "c"]  # type: ignore[arg-type]
    with pytest.raises(PiebaldError, match="do not name them"):
        statistics_at_sites(runtime, work, CLIENTS, dataclasses.replace(wanted, split="test"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "masked"),
    [  # in the quick tier each recipe once, by turns under masks
        pytest.param(name, masked, marks=() if place % 2 == masked else pytest.mark.full)
        for place, name in enumerate(recipes.names())
        for masked in (False, True)
    ],
)
def test_what_is_asked_trains_as_the_files_recipe(name: str, masked: bool) -> None:
    """Before, sites that accept the recipe refused: its training was not that of its name."""
    made = recipes.make(name)
    masks = (SecureAggregation(bits=64),) if masked else ()
    recipe = question_recipe(made, masks)
    assert recipe is None or recipe.training == made.training
    assert recipe is not None or masked


# ------------------------------------------------------------------------------------------------------- forests


BOOSTING = TreeSettings(form="histogram", secure=True, rounds=1, max_depth=1)


def counting_box(column: int, threshold: float) -> torch.Tensor:
    """A forest of one tree: class 1 above a threshold."""
    forest = torch.zeros(1, 3, 2)
    forest[0, :, 0] = torch.tensor([2.0 * column, -1.0, -1.0])
    forest[0, :, 1] = torch.tensor([threshold, -8.0, 8.0])
    return forest


@pytest.mark.parametrize("policy", [
    Policy(queries=["masked_tree_sums", "tree_scores"], least_rows=1),
    Policy(queries=["trees", "tree_scores"], least_rows=10, secure_aggregation=3),
])  # fmt: skip
def test_forests_of_a_servers_choice_read_no_row(policy: Policy) -> None:
    """Before, each of 58 was scored to the bit."""
    pytest.importorskip("xgboost", reason="needs the extra: pip install '.[trees]'")
    where, rows = site(policy), CLIENTS.rows(0, "test")
    query = TreeScoresQuery(ask="scores", boosting=BOOSTING, objective="binary", classes=2, start=(0.0,))
    edges = np.linspace(-1, 1, 58)
    answers = [ask(where, query, version=k, forest=counting_box(0, float(edge)))[0] for k, edge in enumerate(edges)]
    given = [one for one in answers if one is not None]
    assert len(given) == 10
    assert all("loss" not in one.metrics for one in given)
    apart = []
    for edge, one in zip(edges, given, strict=False):
        right = float(((rows.x[:, 0] >= edge) == (rows.y == 1)).double().mean())  # type: ignore[union-attr, operator, call-overload]
        apart.append((one.metrics["accuracy"] - right) * len(rows))
    assert np.std(apart) > 1  # rows


# ------------------------------------------------------------------------------------------- real processes


class Federation:
    """Three hospitals with tables of their own, each a process that stays."""

    def __init__(self, folder: Path, policy: str, rows: Path, name: str = "one") -> None:
        self.credentials = provisioned(folder / name, ["a", "b", "c"], name)
        self.sites, self.file = Sites(self.credentials), folder / f"{name}.toml"
        self.file.write_text(
            "data = { name = 'digits' }\nmodel = { name = 'logistic' }\nrounds = 1\n"
            "recipe = { name = 'fedavg', lr = 0.05 }\n"
            "partition = { kind = 'sites', clients = 'any', inputs = [2], classes = ['0', '1'] }\n"
        )
        for site in "abc":
            settings = self.credentials / site / "site.toml"
            source = json.dumps(str(rows / f"{site}.csv"))
            settings.write_text(f"[data]\nsource = {source}\ntarget = 'y'\n[policy]\n{policy}\n")
            self.sites.start(site)

    def ask(self, high: float, *more: str) -> subprocess.Popen[bytes]:
        """Start to ask for statistics."""
        words = ["statistics", str(self.file), "--credentials", str(self.credentials / "server"), "--json", *more]
        bounds = [part for name in ("x0", "x1") for part in ("--bounds", f"{name}=-9:{high}")]
        return processes.Popen(
            processes.command(*words, *bounds, "--bins", "2"), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=ENVIRONMENT,
        )  # fmt: skip

    def told(self, high: float, *more: str) -> tuple[int, str]:
        """The exit code, and what was said."""
        output, errors = (process := self.ask(high, *more)).communicate(timeout=300)
        return process.returncode, (output + errors).decode()

    def close(self) -> None:
        self.sites.close()


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Tables of three hospitals."""
    folder = tmp_path / "rows"
    folder.mkdir()
    for site in "abc":
        table = pandas.DataFrame(RNG.normal(0, 2, (160, 2)), columns=["x0", "x1"])
        table.assign(y=(table.x0 > 0).astype(int)).to_csv(folder / f"{site}.csv", index=False)
    return folder


@pytest.fixture
def opened() -> Iterator[list[Federation]]:
    made: list[Federation] = []
    yield made
    for one in made:
        one.close()


@pytest.mark.long
def test_an_approval_is_of_one_question(tmp_path: Path, rows: Path, opened: list[Federation]) -> None:
    policy = "queries = ['statistics']\nleast_rows = 10\naccept = 'ask'\nquestions = { statistics = 10 }"
    opened.append(made := Federation(tmp_path, policy, rows))
    folders = [made.credentials / site for site in "abc"]
    process = made.ask(9.0)
    for folder in folders:
        waiting = pending(process, folder)
        assert [one["kind"] for one in waiting["questions"]] == ["statistics", "statistics"]
        consent.approve(folder, waiting["terms"])
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert made.told(9.0)[1].startswith(output.decode())  # approved once, and the same question
    process = made.ask(9.1)
    try:
        for folder in folders:
            assert pending(process, folder)["terms"] not in consent.approved(folder)
        assert process.poll() is None  # it waits, and nobody answers
    finally:
        process.kill()
        process.communicate()


@pytest.mark.long
def test_new_runs_credentials_and_processes_have_one_count(
    tmp_path: Path, rows: Path, opened: list[Federation]
) -> None:
    policy = "queries = ['statistics']\nleast_rows = 10\naccept = ['fedavg']"
    opened.append(first := Federation(tmp_path, policy, rows))
    code, said = first.told(9.0)  # the recipe of the file is not fedavg's defaults, and sites that accept it answer
    assert code == 0, said
    assert first.told(9.0)[0] == 0
    refused = "answered 1 questions 'statistics: moments' about its rows"  # which other terms ask for anew
    assert refused in first.told(9.1)[1]
    for site in "abc":  # started again, with the table under another name
        first.sites.kill(site)
        (rows / f"{site}.csv").rename(rows / f"{site}2.csv")
        settings = first.credentials / site / "site.toml"
        settings.write_text(settings.read_text().replace(f"{site}.csv", f"{site}2.csv") + "\n")
        first.sites.start(site)
    assert refused in first.told(9.2)[1]
    for site in "abc":
        (rows / f"{site}2.csv").rename(rows / f"{site}.csv")
    opened.append(second := Federation(tmp_path, policy, rows, "two"))  # beside the first one
    assert refused in second.told(9.3)[1]
    assert second.told(9.0)[0] == 0
    entries = [json.loads(line) for line in (first.credentials / "a" / "audit.jsonl").read_text().splitlines()]
    assert [one["question"] for one in entries if one["event"] == "asked"] == [
        "statistics: moments",
        "statistics: counts",
    ]
    status = json.loads((second.credentials / "a" / "status.json").read_text())
    assert status["questions"] == "statistics: moments 1 of 1, statistics: counts 1 of 1"
    second.sites.kill("a")
    said = processes.run(
        processes.command("client", second.credentials / "a", "--check"), capture_output=True, env=ENVIRONMENT
    ).stdout.decode()
    assert "statistics: counts 1 of 1" in " ".join(said.split())
    assert "beside the rows" in " ".join(said.split())


@pytest.mark.long
def test_a_server_that_scores_its_own_forests_at_processes_reads_no_row(
    tmp_path: Path, rows: Path, opened: list[Federation]
) -> None:
    """A server that lies about versions, too: one row's place is to be found between 58 thresholds."""
    pytest.importorskip("xgboost", reason="needs the extra: pip install '.[trees]'")
    opened.append(made := Federation(tmp_path, "queries = ['masked_tree_sums', 'tree_scores']\nleast_rows = 1", rows))
    server, masks = made.credentials / "server", (SecureAggregation(bits=64),)
    query = TreeScoresQuery(ask="scores", boosting=BOOSTING, objective="binary", classes=2, start=(0.0,))
    with open_sites(
        made.file, site_flags(made.file, SharedOptions(credentials=server)), server, "trees", masks, lambda *_: []
    ) as lying:
        model = lying.work.initial[: lying.work.layout.shared]
        queries = ClientQueries(lying.runtime, lying.work)
        tasks = [
            Task(k, 0, k, {"model": model, "forest": counting_box(0, float(edge))}, query)
            for k, edge in enumerate(np.linspace(-1, 1, 58))
        ]
        answers = [queries.ask([task], task.version)[0] for task in tasks]
    given = [one for one in answers if one is not None]
    assert len(given) == 10
    assert all(one.metrics.keys() == {"accuracy"} for one in given)
    assert len({one.metrics["accuracy"] * one.examples % 1 for one in given}) > 5  # no counts of rows
