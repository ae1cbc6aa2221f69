"""An answer is named by everything that it follows from, and one ledger beside the rows counts all that leaves.

Before, a server that changed the terms asked "the same" question for nothing and got the same noise, a row more had the
noise of the rows before, and new credentials or a restored backup began to count anew.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from piebald import recipes
from piebald.contracts import Rows, Split, Task, Update
from piebald.contracts.component import Component
from piebald.core.errors import PiebaldError, SettingError
from piebald.core.moments import keys_of
from piebald.data.partition import clients_from
from piebald.experiments.recipes import ExperimentFields
from piebald.experiments.run_settings import RunSettings
from piebald.federation.credentials.audit import FILE as LOG
from piebald.federation.credentials.audit import AuditLog
from piebald.federation.credentials.provisioning import read
from piebald.federation.hub.run_terms import RunTerms, terms
from piebald.federation.link.wire_format import digest
from piebald.federation.operate.audit_check import check_log
from piebald.federation.site.policy import ONE_ROW, Policy, RowBudget
from piebald.federation.site.site_check import check_site
from piebald.federation.site.site_process import site_work
from piebald.federation.site.site_rows import SiteClient, SiteRows, SiteSource, place_of, rows_before_a_run, rows_of
from piebald.federation.site.task_runner import TaskRunner
from piebald.inference.queries.columns import NoisySumsQuery, StatisticsQuery
from piebald.methods.queries import Confusion, Evaluate
from piebald.methods.queries.scores import Validate
from piebald.methods.transforms.gaussian import Gaussian
from piebald.models import Logistic
from piebald.privacy import ledger as ledgers
from piebald.privacy.accounting import gaussian_epsilon
from piebald.privacy.ledger import (
    ANSWERS,
    FILE,
    FOLDER,
    TRAINING,
    Ledger,
    Limit,
    OverBudget,
    OverLimit,
    RowLedger,
    noise_for,
)
from piebald.runs.prepare import prepare
from tests.federation.conftest import provisioned

RNG = np.random.default_rng(5)
X = RNG.normal(size=(300, 3)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int64)
CLIENTS = clients_from({name: (X[k::3], Y[k::3]) for k, name in enumerate("abc")}, test=0.4, validation=0.2)
PLAN = prepare(recipes.fedavg(lr=0.1), CLIENTS, Logistic([3], 2), RunSettings(seed=1))
WORK = PLAN.work
MODEL = torch.linspace(-0.5, 0.5, WORK.layout.shared)  # a model as drawn may have one row in a cell, by chance
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
HIDES = Policy(queries=["evaluate", "confusion", "validate"], least_rows=2, questions={"evaluate": 50})
RECORDS = np.arange(1, 9, dtype=np.uint64)


def own_rows(**changed: Any) -> SiteRows:
    """The rows of the first client, with some fields changed."""
    rows = {split: CLIENTS.rows(0, split) for split in SPLITS}
    fields = {
        "names": ["a", "b", "c"],
        "number": 0,
        "rows": rows,
        "classes": ["0", "1"],
        "records": rows_of(CLIENTS, 0),
    }
    return SiteRows(**{**fields, **changed})


def site(
    folder: Path, policy: Policy = HIDES, work: Any = WORK, rows: Any = None, named: str = "", place: Path | None = None
) -> TaskRunner:
    """A site, which keeps its ledger in a folder and beside its rows."""
    rows = own_rows() if rows is None else rows
    client = SiteClient(work, rows, 0, records=rows.records, place=place)
    return TaskRunner(client, policy, "cpu", terms=named, ledger=client.ledger(folder))


def ask(
    where: TaskRunner, query: Any = None, version: int = 0, model: Any = MODEL, state: Any = None, **more: Any
) -> Any:
    """The answer and the reason why there is none."""
    vectors = {"model": model, **more}
    return where.serve(Task(1, 0, version, vectors, query or Evaluate()), state)[:2]


# ----------------------------------------------------------------- an answer is named by all that it follows from


def changes(value: Any) -> Iterator[Any]:
    """The value with each leaf changed, one at a time."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from ({**value, name: changed} for changed in changes(part))
        yield {**value, "another": 1}
    elif isinstance(value, list | tuple):
        for place, part in enumerate(value):
            yield from ([*value[:place], changed, *value[place + 1 :]] for changed in changes(part))
        yield [*value, 1]
    elif isinstance(value, bool) or value is None:
        yield not value
    elif isinstance(value, int | float):
        yield value + 1
    else:
        yield f"{value}x"


def told_of(work: Any = WORK, **changed: Any) -> dict[str, Any]:
    """A run's terms as they leave the server."""
    experiment = {name: None for name in ExperimentFields.model_fields}
    experiment |= {
        "recipe": {"name": "fedavg", "lr": 0.1}, "model": {"name": "logistic"}, "rounds": 3, "prepare": "none",
        "data": {"standardise": {"mean": [0.0, 0.5], "deviation": [1.0, 2.0]}, "features": ["x0"], "positive": "1"},
        "split": {"test": 0.4}, "evaluate": {"every": 1, "metrics": ["accuracy"]}, "extractor": "resnet18",
    }  # fmt: skip
    return {**json.loads(terms(work, experiment, ["a", "b", "c"], ["a", "b", "c"], ["0", "1"])), **changed}


@pytest.mark.full
def test_every_field_of_the_terms_names_another_answer_and_costs(tmp_path: Path) -> None:
    """Fields are found by introspection, so one that is added later is among them."""
    told = told_of()
    assert told.keys() == RunTerms.model_fields.keys()
    assert told["experiment"].keys() == ExperimentFields.model_fields.keys()
    variants = [told, *({**told, name: part} for name, value in told.items() for part in changes(value))]
    names = [digest(json.dumps(variant, sort_keys=True).encode()) for variant in variants]
    assert len({*names}) == len(names) > 60
    where = site(tmp_path, HIDES.model_copy(update={"questions": {"evaluate": 10_000}}))
    digests = set()
    for number, name in enumerate(names, 1):
        where._terms = name
        digests.add(where._digest(Task(1, 0, 0, {"model": MODEL}, Evaluate()), Evaluate(), None))
        for _ in range(2):  # each is charged, and once
            assert ask(where)[1] is None
            assert where.ledger.counts == {"evaluate": number}
    assert len(digests) == len(names)


def works() -> dict[str, Any]:
    """The run with each field of what a client computes changed, by the field's name."""
    other = prepare(recipes.fedavg(lr=0.1), CLIENTS, Logistic([3], 2), RunSettings(seed=2)).work
    deeper = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3, 2), torch.nn.Tanh())
    return {
        "model": deeper,
        "layout": dataclasses.replace(WORK.layout, shared=6),
        "initial": other.initial + 1,
        "objective": dataclasses.replace(WORK.objective, metrics={}),
        "seed": 2,
        "shape": (3, 1),
        "outputs": (3,),
        "public_rows": 1,
        "public_digest": "x",
        "trainer": recipes.fedavg(lr=0.2).training,
        "transforms": (Gaussian(clip=9.0, where="client"),),
        "own_query": Evaluate(),
        "choice": None,  # a question that a site asks itself
        "own_models": None,  # `ClientWork.of` has put the client's own model in place of the run's
        "questions": ({"kind": "evaluate", "split": "validation"},),
        "trains": False,
        "noise_key": None,  # of a simulation
        "own_trainers": None,  # of clients of a simulation
        "weighted": False,
    }


def test_every_field_of_what_a_site_computes_names_another_answer(tmp_path: Path) -> None:
    """Also where a site's process is given no terms."""
    changed = works()
    assert changed.keys() == {field.name for field in dataclasses.fields(WORK)}
    task = Task(1, 0, 0, {"model": MODEL}, Evaluate())
    digests = [site(tmp_path)._digest(task, Evaluate(), None)]
    for name, value in changed.items():
        if value is not None:
            runner = site(tmp_path)
            runner.work = dataclasses.replace(WORK, **{name: value})
            digests.append(runner._digest(task, Evaluate(), None))
    assert len({*digests}) == len(digests)


def queries() -> list[Component]:
    """One question of each kind that a site may be asked, with all that can be left out."""
    asked = []
    for name, kind in Component.registry["query"].items():
        if getattr(kind, "asked_of", "") == "clients" and kind.__module__.startswith("piebald."):
            asked.append(kind.model_construct(None, **{"kind": name}))
    return asked


@pytest.mark.parametrize("query", queries(), ids=lambda query: query.kind)
def test_every_field_of_every_question_names_another_answer(query: Any, tmp_path: Path) -> None:
    where = site(tmp_path)
    values: dict[str, Any] = {name: 0 for name in type(query).model_fields}
    tables = [values, *({**values, name: 1} for name in values)]
    digests = set()
    for table in tables:
        asked = type(query).model_construct(None, **table)
        object.__setattr__(asked, "table", lambda table=table, asked=asked: {"kind": asked.kind, **table})
        digests.add(where._digest(Task(1, 0, 0, {"model": MODEL}, asked), asked, None))
    assert len(digests) == len(tables)
    assert type(query).table is Component.table  # which has all fields


@pytest.mark.parametrize("change", ["version", "attempt", "committed", "model", "vector", "name", "state", "policy"])
def test_all_that_comes_with_a_question_names_another_answer(change: str, tmp_path: Path) -> None:
    task, where, state = Task(1, 0, 0, {"model": MODEL}, Evaluate()), site(tmp_path), None
    first = where._digest(task, Evaluate(), None)
    changed, then = task, where
    if change in ("version", "attempt", "committed"):
        changed = dataclasses.replace(task, **{change: 1})
    elif change == "state":
        state = {"control": torch.zeros(2)}
    elif change == "policy":
        then = site(tmp_path, HIDES.model_copy(update={"least_rows": 6}))
    else:
        vectors = {"model": {"model": MODEL + 1e-7}, "vector": {"model": MODEL, "forest": MODEL},
                   "name": {"model": MODEL, "other": MODEL}}[change]  # fmt: skip
        changed = dataclasses.replace(task, vectors=vectors)
    assert then._digest(changed, Evaluate(), state) != first
    assert where._digest(dataclasses.replace(task, id=7), Evaluate(), None) == first  # its number says nothing


def other_rows() -> dict[str, SiteRows]:
    """The site with its rows changed in one place."""
    rows = {split: CLIENTS.rows(0, split) for split in SPLITS}
    changed: dict[str, SiteRows] = {}
    for split, part in rows.items():
        x, y = part.x.clone(), part.y.clone()  # type: ignore[union-attr]
        x[0, 0] += 1
        y[0] = 1 - y[0]
        fewer, twice, turned = part[1:], part[[0, *range(len(part))]], part[list(range(len(part)))[::-1]]
        variants = {"x": Rows(x, part.y), "y": Rows(part.x, y), "fewer": fewer, "twice": twice, "order": turned}
        changed |= {f"{split} {name}": own_rows(rows={**rows, split: other}) for name, other in variants.items()}
    return changed | {
        "classes": own_rows(classes=["1", "0"]),
        "names": own_rows(names=["a", "b", "d"]),
        "public": own_rows(public=rows["train"]),
        "records": own_rows(records=RECORDS),
    }


@pytest.mark.parametrize("change", other_rows())
def test_other_rows_have_another_answer_which_costs(change: str, tmp_path: Path) -> None:
    """Prepared otherwise by the terms, or changed by their owner: the answer has noise of its own."""
    before, where = site(tmp_path), site(tmp_path, rows=other_rows()[change])
    assert ask(before)[1] is None
    assert ask(where)[1] is None
    task = Task(1, 0, 0, {"model": MODEL}, Evaluate())  # its digest draws the noise; noisy scores may both be cut at 1
    assert where._digest(task, Evaluate(), None) != before._digest(task, Evaluate(), None)
    if change != "records":  # which are other rows
        assert where.ledger.counts == {"evaluate": 2}


# ---------------------------------------------------------------------------------------------------- stored answers


@pytest.mark.parametrize("query", [Evaluate(), Confusion(classes=2)], ids=["scores", "counts"])
def test_what_was_answered_is_answered_the_same_way_for_ever_and_for_nothing(query: Any, tmp_path: Path) -> None:
    answer, _ = ask(site(tmp_path), query)
    for _ in range(3):  # the process starts again
        again, reason = ask(where := site(tmp_path), query)
        assert reason is None
        assert again.metrics == answer.metrics
        assert all(torch.equal(vector, answer.vectors[name]) for name, vector in again.vectors.items())
        assert where.ledger.counts == {query.kind: 1}
    (stored,) = (tmp_path / ANSWERS).iterdir()
    assert stored.stat().st_mode & 0o777 == 0o600
    stored.unlink()  # what made room for others is a new answer
    again, _ = ask(where, query)
    numbers = [[*update.metrics.values(), *(vector.tolist() for vector in update.vectors.values())]
               for update in (answer, again)]  # fmt: skip
    assert numbers[0] != numbers[1]
    assert where.ledger.counts == {query.kind: 2}


def test_a_question_that_is_refused_by_its_answer_is_refused_again_for_nothing(tmp_path: Path) -> None:
    policy = Policy(queries=["confusion"], least_rows=60)  # of 40 rows
    for _ in range(3):
        answer, reason = ask(where := site(tmp_path, policy), Confusion(classes=2))
        assert answer is None
        assert "fewer than the 60 rows" in reason
        assert where.ledger.counts == {"confusion": 1}


def test_stored_answers_take_bounded_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledgers, "MOST_ANSWERS", 5)
    monkeypatch.setattr(ledgers, "MOST_BYTES", 1000)
    ledger = RowLedger(RECORDS, [tmp_path])
    for number in range(20):
        ledger.store(f"{number:032x}", bytes(10))
    assert len([*(tmp_path / ANSWERS).iterdir()]) == 5
    assert ledger.answer(f"{19:032x}") == bytes(10)
    for number in range(20, 30):
        ledger.store(f"{number:032x}", bytes(240))
    assert sum(path.stat().st_size for path in (tmp_path / ANSWERS).iterdir()) <= 1000
    ledger.store("f" * 32, bytes(800))  # more than a part of all room
    assert ledger.answer("f" * 32) is None


def test_an_answer_that_cannot_be_stored_does_not_leave(tmp_path: Path) -> None:
    (tmp_path / ANSWERS).write_text("no folder")
    assert ask(site(tmp_path))[0] is None


# --------------------------------------------------------------------------------------------------------- attacks


def test_moved_constants_of_the_terms_do_not_move_an_edge_for_nothing(tmp_path: Path) -> None:
    """Before, each of 601 questions was the first one: 78 of 100 rows were read."""
    policy = Policy(queries=["statistics"], least_rows=2)
    query = StatisticsQuery(keys=tuple(map(tuple, keys_of(np.array([[-9.0, 0.5, 9.0]] * 4)).tolist())))
    outcomes = []
    for shift in np.linspace(0, 1, 20):
        rows = {split: CLIENTS.rows(0, split) for split in SPLITS}
        moved = {split: Rows(part.x + np.float32(shift), part.y) for split, part in rows.items()}  # type: ignore[operator]
        where = site(tmp_path, policy, rows=own_rows(rows=moved), named=f"{shift}")
        outcomes.append(ask(where, query)[0])
    assert sum(answer is not None for answer in outcomes) == 1


@pytest.mark.full
def test_a_patient_more_a_day_has_noise_of_its_own(tmp_path: Path) -> None:
    """Before, the noise was that of the question, so the difference of two days was the class of one patient."""
    test = CLIENTS.rows(0, "test")
    shares, exact = [], []
    for day in range(2, len(test) + 1):
        rows = {split: CLIENTS.rows(0, split) for split in SPLITS} | {"test": test[:day]}
        shown, reason = ask(site(tmp_path, rows=own_rows(rows=rows)))
        assert reason is None
        shares.append(shown.metrics["global/accuracy"] * day)
        plain, _ = ask(site(tmp_path / "plain", Policy(least_rows=1), rows=own_rows(rows=rows)))
        exact.append(plain.metrics["global/accuracy"] * day)
    right = [round(one) == round(other) for one, other in zip(np.diff(shares), np.diff(exact), strict=True)]
    assert np.mean(right) < 0.9
    assert site(tmp_path).ledger.counts == {"evaluate": len(test) - 1}


def test_rows_that_nothing_identifies_answer_no_question(tmp_path: Path) -> None:
    where = site(tmp_path, rows=own_rows(records=np.zeros(0, dtype=np.uint64)))
    answer, reason = ask(where)
    assert answer is None
    assert "nothing identifies this site's rows" in reason
    assert ask(where, query=None, version=1)[0] is None
    assert where.serve(Task(2, 0, 0, {"model": MODEL}), None)[0] is not None  # it trains


@settings(max_examples=20)
@given(st.lists(st.sampled_from(["a", "b", "c", "state"]), min_size=1, max_size=6), st.integers(0, 5))
def test_whatever_copies_are_restored_the_greater_count_wins(
    tmp_path_factory: pytest.TempPathFactory, openings: list[str], backup_after: int
) -> None:
    """Credentials `a`, `b`, `c`, each beside the same rows; after one step their folders are put back as they were."""
    folder = tmp_path_factory.mktemp("ledger")
    beside, limit = folder / "rows", Limit(50.0, 1e-6)
    backup = folder / "backup"
    for step, name in enumerate(openings):
        ledger = RowLedger(RECORDS, [folder / name, beside])
        ledger.spend(TRAINING, 2.0, 1.0, 3, limit)
        ledger.add_update()
        ledger.count("evaluate", f"{step:032x}", 100)
        if step == backup_after:
            shutil.copytree(folder / name, backup)
    if backup.exists():  # an old state of the credentials comes back
        shutil.rmtree(folder / openings[backup_after])
        shutil.copytree(backup, folder / openings[backup_after])
    for name in ("new", *openings):
        ledger = RowLedger(RECORDS, [folder / name, beside])
        assert ledger.updates == len(openings)
        assert ledger.counts == {"evaluate": len(openings)}
        assert ledger.spent(1e-6) == pytest.approx(gaussian_epsilon(2 / math.sqrt(3 * len(openings)), 1e-6))
    shutil.rmtree(beside)  # the copies in credentials have it all, as far as they were opened since
    last = RowLedger(RECORDS, [folder / openings[-1], beside])
    if not backup.exists():
        assert last.updates == len(openings)


@pytest.mark.parametrize("lost", ["credentials", "rows", "backup"])
def test_a_budget_does_not_come_back_with_new_credentials_a_lost_folder_or_a_backup(lost: str, tmp_path: Path) -> None:
    """Before, 7.29 of 8 were spent twice, and 8 and 5 of 8 updates left."""
    plan = prepare(
        recipes.make("dp_sgd", lr=0.1, noise=2.0, batch=4, steps=2), CLIENTS, Logistic([3], 2), RunSettings(seed=1)
    )
    policy = Policy(training={"epsilon": 8.0, "delta": 1e-6}, updates=5)  # type: ignore[arg-type]
    place, state = tmp_path / "rows", tmp_path / "state"

    def trained(folder: Path, count: int) -> int:
        client = SiteClient(plan.work, CLIENTS, 0, records=rows_of(CLIENTS, 0), place=place)
        where = TaskRunner(client, policy, "cpu", ledger=client.ledger(folder))
        vectors = {"model": plan.work.initial[: plan.work.layout.shared]}
        return sum(where.serve(Task(number, 0, number, vectors), None)[0] is not None for number in range(count))

    assert trained(state, 2) == 2
    shutil.copytree(state, tmp_path / "backup")
    assert trained(state, 1) == 1
    if lost == "rows":
        shutil.rmtree(place / FOLDER)
    elif lost == "backup":
        shutil.rmtree(state)
        shutil.copytree(tmp_path / "backup", state)
    assert trained(tmp_path / "other" if lost == "credentials" else state, 10) == 2


def test_training_sums_and_scores_are_composed_in_one_place(tmp_path: Path) -> None:
    limit, delta = Limit(3.0, 1e-6), 1e-6
    ledger = RowLedger(RECORDS, [tmp_path])
    ledger.spend(TRAINING, 4.0, 1.0, 2, limit)
    ledger.spend("noisy_sums", noise_for(2.0, delta), limit=limit)
    assert ledger.spent(delta, TRAINING) == pytest.approx(gaussian_epsilon(4 / math.sqrt(2), delta))
    assert ledger.spent(delta, "evaluate") == pytest.approx(2.0, rel=1e-6)  # answers have one budget
    together = (2 / 16 + noise_for(2.0, delta) ** -2) ** -0.5
    assert ledger.spent(delta) == pytest.approx(gaussian_epsilon(together, delta))
    with pytest.raises(OverBudget):
        ledger.spend("evaluate", noise_for(2.5, delta), limit=limit)
    ledger.spend(TRAINING, 8.0, 1.0, 1, limit)  # of which there is some left
    part = RowLedger(RECORDS[:3], [tmp_path])
    assert part.spent(delta) == ledger.spent(delta)  # rows in common
    other = RowLedger(RECORDS + np.uint64(100), [tmp_path])
    assert other.spent(delta) == 0.0


def test_scores_of_all_kinds_and_numbers_together_spend_what_is_stated(tmp_path: Path) -> None:
    """Before, four kinds with two numbers each spent 15.5 where 4.38 was stated."""
    where = site(tmp_path, HIDES.model_copy(update={"questions": {"evaluate": 4, "validate": 4, "confusion": 4}}))
    for version, query in itertools.product(range(4), (Evaluate(), Validate(classes=2), Confusion(classes=2))):
        ask(where, query, version, MODEL + version)
    assert sum(where.ledger.counts.values()) == 4  # as many as are allowed of one kind alone
    assert where.ledger.spent(ONE_ROW.delta) == pytest.approx(ONE_ROW.epsilon, rel=1e-6)


@pytest.mark.parametrize("budget", [None, {"epsilon": 1.0, "delta": 1e-5}])
def test_the_noise_of_several_numbers_is_that_of_one_release(budget: Any, tmp_path: Path) -> None:
    """One row moves both accuracies, so each has the root of two more noise than one alone would have."""
    where = site(tmp_path, HIDES.model_copy(update={"budget": Policy(budget=budget).budget}))
    rows, draws = len(CLIENTS.rows(0, "test")), []
    exact = Update({}, rows, 0, {"global/accuracy": 0.5, "personal/accuracy": 0.5})
    influence = Evaluate().row_influence(CLIENTS.rows(0, "test"))
    assert influence is not None
    stated = where._policy.score_noise(Evaluate())
    wide = {name: value / 1000 for name, value in influence.items()}  # far from the ends of shares
    where.gate.influence = lambda query: wide  # type: ignore[method-assign]
    for _ in range(3000):
        answer, _ = where.gate._with_noise(Evaluate(), exact)
        assert answer is not None
        draws.append([answer.metrics[name] for name in exact.metrics])
    deviations = np.std(draws, axis=0)
    moved = np.array([wide[name] for name in exact.metrics])
    assert math.sqrt(((moved / deviations) ** 2).sum()) == pytest.approx(1 / stated, rel=0.06)
    allowed = gaussian_epsilon(stated / math.sqrt(50), where._policy.answers.delta)
    assert allowed <= where._policy.answers.epsilon * (1 + 1e-6)


PROTECTS = {
    "least_rows": (HIDES, recipes.fedavg(lr=0.1)),
    "clip": (Policy(queries=["evaluate"], clip=1.0, least_rows=1), recipes.fedavg(lr=0.1)),
    "noise": (Policy(queries=["evaluate"], noise=0.5, least_rows=1), recipes.fedavg(lr=0.1)),
    "masks": (Policy(queries=["evaluate"], secure_aggregation=3, least_rows=1), recipes.fedavg(lr=0.1)),
    "budget": (Policy(queries=["evaluate"], budget=RowBudget(epsilon=1, delta=1e-6), least_rows=1), recipes.fedavg()),
    "DP-SGD": (Policy(queries=["evaluate"], least_rows=1), recipes.dp_sgd(lr=0.1, batch=4)),
    "rules of disclosure": (Policy(), recipes.fedavg(lr=0.1)),
}


@pytest.mark.parametrize("protected", PROTECTS)
def test_scores_leave_with_four_digits_wherever_something_protects(protected: str, tmp_path: Path) -> None:
    """Before, sites that protect otherwise than by `least_rows` sent float64, whose last bits tell of single rows."""
    policy, recipe = PROTECTS[protected]
    where = site(tmp_path, policy, prepare(recipe, CLIENTS, Logistic([3], 2), RunSettings(seed=1)).work)
    for version in range(5):
        answer, reason = ask(where, version=version, model=MODEL + version)
        assert reason is None
        assert all(value == float(f"{value:.4g}") for value in answer.metrics.values())
    exact, _ = ask(site(tmp_path / "plain", Policy(least_rows=1)))
    assert any(value != float(f"{value:.4g}") for value in exact.metrics.values())


def test_each_source_of_rows_has_a_folder_for_their_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, what was asked about rows that a module makes was forgotten with the site's credentials."""
    monkeypatch.syspath_prepend(str(tmp_path / "installed"))
    package = tmp_path / "installed" / "rows_of_a_lab"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ValueError('imported')")
    (tmp_path / "installed" / "rows_of_a_site.py").write_text("")
    sources = {
        "rows_of_a_site:load": tmp_path / "installed",
        "rows_of_a_lab.tables:load": package,  # which is not imported for it
        "mine/my_data.py:load": tmp_path / "mine",
        "rows/rows.csv": tmp_path / "rows",
        "rows-*.csv": tmp_path,
        "no_such_module:load": None,
        "sys:argv": None,
    }
    for source, folder in sources.items():
        assert place_of(SiteSource(source=source), tmp_path) == folder
    assert place_of(SiteSource(name="rows_of_a_site:load"), tmp_path) == tmp_path / "installed"
    assert place_of(SiteSource(name="digits"), tmp_path) is None  # which anybody may download


def test_an_audit_log_that_is_older_than_the_ledger_is_an_alarm(tmp_path: Path) -> None:
    """Also when the log has grown longer again than it was."""
    folder = provisioned(tmp_path / "credentials") / "site-1"
    place = tmp_path / "rows"
    place.mkdir()
    (place / "rows.csv").write_text("x,y\n1,0\n2,1\n")
    (folder / "site.toml").write_text(f"[data]\nsource = {json.dumps(str(place / 'rows.csv'))}\ntarget = 'y'\n")

    def works(tasks: int) -> None:
        log = AuditLog(folder)
        ledger = RowLedger(RECORDS, [folder / "state", place / FOLDER], "site-1", read(folder).log, lambda: log.head)
        for number in range(tasks):
            log.write("asked", number=number)
            ledger.add_update()
            log.write("delivered", number=number)

    works(3)
    shutil.copytree(folder, tmp_path / "backup")
    assert any("ledger" in line for line in check_log(folder)[2])
    works(3)
    check_log(folder)
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "backup", folder)  # with its state and its log
    for tasks in (0, 20):
        works(tasks)
        with pytest.raises(SettingError, match="ledger"):
            check_log(folder)
    assert (folder / LOG).exists()


def test_the_check_of_a_site_tells_what_was_spent(tmp_path: Path) -> None:
    folder = provisioned(tmp_path / "credentials") / "site-1"
    (tmp_path / "rows.csv").write_text("x,y\n" + "".join(f"{row},{row % 2}\n" for row in range(30)))
    (folder / "site.toml").write_text(f"[data]\nsource = {json.dumps(str(tmp_path / 'rows.csv'))}\ntarget = 'y'\n")
    work = site_work(folder, None, None)
    records = rows_before_a_run(work.settings.data, work.folder, "site-1").records  # type: ignore[arg-type]
    ledger = RowLedger(records, [folder / "state", tmp_path / FOLDER], "site-1")
    ledger.add_update()
    ledger.spend(TRAINING, 2.0)
    (check,) = (check for check in check_site(work, patience=0.1) if check.what == "questions")
    assert "1 updates left" in check.told
    assert f"epsilon {gaussian_epsilon(2.0, 1e-6):.3g} at delta 1e-06" in check.told


def test_a_ledger_of_a_user_is_counted_by_several_processes_at_once(tmp_path: Path) -> None:
    one, other = (Ledger(1.5, 1e-6, tmp_path / FILE) for _ in range(2))
    one.spend("a", noise_for(1.0, 1e-6))
    other.spend("b", noise_for(1.0, 1e-6))
    assert sorted(name for name, _ in Ledger(1.5, 1e-6, tmp_path / FILE).questions) == ["a", "b"]
    with pytest.raises(PiebaldError, match="the ledger allows"):
        one.spend("c", noise_for(1.0, 1e-6))


def test_noisy_sums_are_told_once_and_again_for_nothing(tmp_path: Path) -> None:
    policy = Policy(queries=["noisy_sums"], budget={"epsilon": 3.0, "delta": 1e-6})  # type: ignore[arg-type]
    query = NoisySumsQuery(bounds=((-3.0, 3.0),) * 3, classes=2, noise=noise_for(1.0, 1e-6))
    first, reason = ask(site(tmp_path, policy), query)
    assert reason is None
    for _ in range(50):
        again, _ = ask(where := site(tmp_path, policy), query)
        assert torch.equal(again.vectors["sum"], first.vectors["sum"])
    assert where.ledger.spent(1e-6) == pytest.approx(1.0, rel=1e-6)
    other, _ = ask(where, query, version=1)
    assert not torch.equal(other.vectors["sum"], first.vectors["sum"])
    assert where.ledger.spent(1e-6) > 1.3


def test_a_count_of_updates_is_one_over_all_processes(tmp_path: Path) -> None:
    for number in range(3):
        RowLedger(RECORDS, [tmp_path / f"{number}", tmp_path / "rows"]).add_update(most=3)
    with pytest.raises(OverLimit, match="has sent 3 updates in all runs"):
        RowLedger(RECORDS, [tmp_path / "new", tmp_path / "rows"]).add_update(most=3)
