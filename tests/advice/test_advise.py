"""The adviser: known answers on small federations, one look at test rows, and an answer that can be run."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import piebald
from piebald import models, partition, recipes
from piebald.advice import Advice, advise
from piebald.advice.adviser import choose
from piebald.advice.answer_page import curve
from piebald.advice.more_data import _with_as_many_steps, outlook
from piebald.advice.race import ALONE_SETTINGS, MOST, RATES, entrants, portfolio
from piebald.advice.tuning import Budget
from piebald.advice.tuning.space import Cost
from piebald.advice.tuning.trial_runs import PartOfRows
from piebald.cli import main
from piebald.core.errors import SettingError
from piebald.core.result_table import plain_cell
from piebald.data.partition import Lists, PooledClients
from piebald.report.paired import Difference, Scores
from piebald.report.tables import History
from piebald.storage.store import RunStore

FORK = multiprocessing.get_context("fork")
FILE = """\
rounds = 4
data = { name = "digits" }
model = { name = "mlp", hidden = [16] }
partition = { kind = "disjoint", clients = 5, classes_each = 2, limit = 500, validation = 0.2, test = 0.2, pool = true }

[advise]
families = ["hdafl"]
budget = { rounds = 44 }
seeds = [0, 1]
"""


def network(seed: int) -> Any:
    return models.build_model("mlp", (1, 8, 8), 10, seed, hidden=(32,))


def alike(rows: int = 36, clients: int = 6) -> PooledClients:
    """Clients with few rows of the same distribution."""
    split = partition.Iid(clients=clients, validation=0.3, test=0.3, limit=rows * clients)
    return split.split(piebald.data.digits())


def changed(clients: PooledClients, y: torch.Tensor, x: torch.Tensor | None = None) -> PooledClients:
    parts = {split: clients.lists(split) for split in ("train", "validation", "test")}
    return PooledClients(clients.x if x is None else x, y, parts, names=clients.names, classes=clients.classes)  # type: ignore[arg-type]


def swapped() -> PooledClients:
    """Half of the clients call every digit by another name."""
    clients = alike(rows=90)
    y = clients.y.clone()
    for client in range(3, 6):
        for split in ("train", "validation", "test"):
            own = clients.indices(client, split)  # type: ignore[arg-type]
            y[own] = 9 - y[own]
    return changed(clients, y)


def timeless(advice: Advice) -> dict[str, Any]:
    table = advice.plain()
    table.pop("answer")  # which has times as well
    table.pop("processor_seconds")
    for row in (table["cost"], table["spent"]):
        row.pop("minutes")
    for row in table["methods"]:
        row.pop("seconds")
    return table


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Mapping[str, Any]]:
    """The folder of an advice from a file, and what the command has said."""
    place = tmp_path_factory.mktemp("advice")
    (place / "experiment.toml").write_text(FILE)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(stack.enter_context((place / "out.txt").open("w"))))
        stack.enter_context(contextlib.redirect_stderr(stack.enter_context((place / "err.txt").open("w"))))
        assert main(["advise", str(place / "experiment.toml"), "--out", str(place / "answer")]) == 0
    # as it is now: a search that goes on appends to it
    (place / "log.txt").write_text((place / "answer" / "log.txt").read_text())
    return place / "answer", json.loads((place / "answer" / "answer.json").read_text())


@pytest.mark.full
def test_the_recommendation_runs_unchanged(answered: tuple[Path, Mapping[str, Any]], tmp_path: Path) -> None:
    folder, answer = answered
    assert main(["run", str(folder / "recommended.toml"), "--out", str(tmp_path / "run"), "--quiet"]) == 0
    with History(tmp_path / "run") as history:
        assert recipes.rebuild(history.meta["recipe"]["table"]) == recipes.rebuild(answer["recipe"])
        assert history.final["rounds"] == answer["rounds"] == 4


@pytest.mark.full
def test_test_rows_are_opened_for_three_methods_at_most(answered: tuple[Path, Mapping[str, Any]]) -> None:
    folder, answer = answered
    assert set(answer["tested"]) == {answer["recommended"], "local", "fedavg"}
    for database in folder.rglob("run.db"):
        with History(database.parent) as history:
            splits = {row["split"] for row in history.scores} - {"common"}
            seen = history.meta["evaluate"][2]
        allowed = {"check": ({"validation", "test"}, "test"), "fit": ({"validation", "train"}, "train")}
        scored, last = allowed.get(database.relative_to(folder).parts[0], ({"validation"}, "validation"))
        # nothing is scored where validation rows were trained on
        assert (splits, seen) == (scored if splits else set(), last)


@pytest.mark.full
def test_the_answer_says_what_was_measured(answered: tuple[Path, Mapping[str, Any]]) -> None:
    folder, answer = answered
    assert {row["method"] for row in answer["methods"]} == {"local", "fedavg", "hdafl"}
    near = [answer["verdict"]["leader"], *answer["verdict"]["not_clearly_behind"]]
    assert answer["recommended"] in near
    assert 0 <= answer["probability_within_one_point"] <= 1
    assert answer["spent"]["rounds"] <= 44
    for label in answer["tested"]:
        with History(folder / "check" / label / "seed-0") as history:
            assert history.split == "test"
            mean = np.mean(list(history.per_client.values()))
            assert len(answer["tested"][label]["clients"]) == 5
            assert history.meta["status"] == "finished"
            assert 0 <= mean <= 1
    said = (folder / "answer.html").read_text()
    assert "Test rows were opened once" in said.replace("\n", " ")
    drawn = {name: points for name, points in curves_of(answer).items() if len(points) > 1}
    assert said.count("<svg") == len(drawn) >= 2
    assert "://" not in said  # no address of anything
    assert "<script" not in said


@pytest.mark.full
def test_the_look_comes_first_and_once_and_each_client_is_told_what_it_gains(
    answered: tuple[Path, Mapping[str, Any]],
) -> None:
    folder, answer = answered
    log, err, out = ((folder.parent / name).read_text() for name in ("log.txt", "err.txt", "out.txt"))
    assert log.startswith(answer["look"].replace("\n\n", "\n"))  # with its indentation
    assert log.count("What can be seen at all") == 1
    assert len(err.splitlines()) <= 2  # one line a minute
    assert len(out.splitlines()) <= 24
    tested = answer["tested"]
    for one in answer["clients"]:
        own = {label: found["clients"][one["client"]] for label, found in tested.items()}
        assert one["scores"] == own
        if answer["recommended"] != "local":
            assert one["gain"] == pytest.approx(own[answer["recommended"]] - own["local"])
    assert len(answer["clients"]) == 5
    page = (folder / "answer.html").read_text()
    assert page.index("<h1>") < page.index(">Each client</h2>")
    for one in answer["clients"]:
        cells = "".join(f"<td>{plain_cell(round(100 * score, 1))}</td>" for score in one["scores"].values())
        assert cells in page
        if one["gain"] is not None:
            assert f"{cells}<td>{plain_cell(round(100 * one['gain'], 1))}</td>" in page


def curves_of(answer: Mapping[str, Any]) -> dict[str, Any]:
    return {"rounds": answer["curve"]} | {one["what"]: one["points"] for one in answer["more_data"]}


def test_a_learning_curve_is_drawn_with_all_its_points_and_nothing_is_markup() -> None:
    """Points go up where values do, a flat line is drawn as well, and a metric's name is text."""
    axis = (0.0, "{:.2g}".format, "")
    drawn = curve("<b>auc</b>", {"25 %": 0.5, "50 %": 0.75, "all": 1.0}, axis)
    heights = [float(one.split(",")[1]) for one in drawn.split('points="')[1].split('"')[0].split()]
    assert heights == sorted(heights, reverse=True)
    assert len(set(heights)) == drawn.count("<circle") == 3
    assert "<b>" not in drawn
    assert curve("flat", {"1": 0.0, "2": 0.0}, axis).count("<circle") == 2


@pytest.mark.parametrize(
    ("mean", "error", "p", "higher", "said"),
    [
        (0.03, 0.01, 0.01, True, "more rows may help"),
        (0.03, 0.01, 0.01, False, "more rows did not help"),
        (-0.03, 0.01, 0.01, False, "more rows may help"),
        (0.001, 0.005, 0.8, True, "more rows would change little"),
        (0.03, 0.02, 0.06, True, "what more rows would change is within noise"),
        (0.01, None, 1.0, True, "what more rows would change cannot be told"),
    ],
)
def test_what_a_learning_curve_says_follows_from_its_noise(
    mean: float, error: float | None, p: float, higher: bool, said: str
) -> None:
    assert outlook("more rows", Difference(mean, mean, mean, 1, 8, "range", error, p), higher, 0.01) == said


@pytest.mark.long
def test_a_finished_search_says_the_same_again(
    answered: tuple[Path, Mapping[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, answer = answered
    assert main(["resume", str(folder), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert {name: again[name] for name in ("recommended", "tested", "gain", "verdict", "reasons")} == {
        name: answer[name] for name in ("recommended", "tested", "gain", "verdict", "reasons")
    }


@pytest.mark.long
def test_together_where_clients_are_alike_and_have_few_rows() -> None:
    found = advise(alike(), network, rounds=12, training={"batch": 5, "epochs": 2}, families=["fine_tuned"],
                   more_data=False)  # fmt: skip
    assert found.pays == "yes"
    assert found.recommended != "local"
    assert found.gain_alone is not None
    assert found.gain_alone.low > 0
    gain = found.tested_gain("local")
    assert gain is not None
    assert gain.mean > 0.05


@pytest.mark.long
def test_not_one_model_where_labels_are_swapped() -> None:
    found = advise(swapped(), network, rounds=12, training={"batch": 10, "epochs": 2}, families=["ifca"],
                   more_data=False)  # fmt: skip
    assert found.recommended != "fedavg"
    assert "fedavg" not in found.verdict.near
    gain = found.tested_gain("fedavg")
    assert gain is not None
    assert gain.mean > 0.1


@pytest.mark.full
def test_the_simplest_of_equals_is_recommended() -> None:
    """FedProx with mu = 0 is FedAvg, to the bit."""
    found = advise(
        alike(), network, rounds=4, families=["fedavg"], methods={"twin": recipes.fedprox(mu=0.0, lr=0.05, batch=5)},
        seeds=(0,), training={"batch": 5}, budget=24, more_data=False,
    )  # fmt: skip
    scores = {row["method"]: row["score"] for row in found.tried}
    assert scores["twin"] == scores["fedavg"]
    assert found.recommended != "twin"


SMALL: dict[str, Any] = {"rounds": 4, "families": ["hdafl"], "seeds": (0, 1), "budget": 40, "more_data": False}


@pytest.fixture(scope="module")
def small() -> Advice:
    """A race that nothing has interrupted."""
    return advise(alike(clients=4), network, **SMALL)


@pytest.mark.full
def test_test_rows_do_not_change_the_choice(small: Advice) -> None:
    clients = alike(clients=4)
    held = np.concatenate([clients.indices(client, "test") for client in range(len(clients))])
    x, y = clients.x.clone(), clients.y.clone()
    x[held], y[held] = 1e6, 3
    ours, theirs = timeless(small), timeless(advise(changed(clients, y, x), network, **SMALL))
    assert ours.pop("tested") != theirs.pop("tested")
    assert ours.pop("clients") != theirs.pop("clients")
    for answer in (ours, theirs):  # whether it pays is said after the choice, by the test rows that were opened
        rest = {name: answer.pop(name) for name in ("pays", "evidence", "headline", "against_naive", "imbalance")}
        assert rest["evidence"]["rows"] == ("validation" if answer["recommended"] == "local" else "test")
        answer["ensemble"] = answer["ensemble"] and answer["ensemble"]["members"]  # its score is of test rows
    assert ours == theirs


@pytest.mark.full
@pytest.mark.parametrize("call", [7, pytest.param(30, marks=pytest.mark.long)])
def test_a_race_that_was_killed_ends_as_one_that_was_not(call: int, tmp_path: Path, small: Advice) -> None:
    def child() -> None:
        calls, real = [0], RunStore.commit

        def commit(self: RunStore, *args: Any, **kwargs: Any) -> None:
            calls[0] += 1
            if calls[0] == call:
                os.kill(os.getpid(), signal.SIGKILL)
            real(self, *args, **kwargs)

        RunStore.commit = commit  # type: ignore[method-assign]
        advise(alike(clients=4), network, out=tmp_path / "killed", **SMALL)

    process = FORK.Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    again = advise(alike(clients=4), network, out=tmp_path / "killed", **SMALL)
    assert timeless(again) == timeless(small)


@pytest.mark.full
def test_a_client_that_loses_is_named() -> None:
    """Client "odd" has other labels than the nine others: what it gets is its own model."""
    data = piebald.data.digits()
    parts = {
        split: Lists(np.arange(start, start + 10 * size), np.arange(0, 10 * size + 1, size))
        for split, start, size in (("train", 0, 60), ("validation", 600, 60), ("test", 1200, 40))
    }
    y = data.y.clone()
    for split in parts.values():
        y[split[9]] = 9 - y[split[9]]
    names = [*(f"site {number}" for number in range(9)), "odd"]
    clients = PooledClients(data.x, y, parts, names=names, classes=data.classes)  # type: ignore[arg-type]
    found = advise(clients, network, rounds=6, families=["fedavg"], seeds=(0,), training={"batch": 10, "epochs": 3},
                   more_data=False)  # fmt: skip
    assert found.recommended == "fedavg"
    assert [(one.client, one.instead) for one in found.losers] == [("odd", "local")]
    assert "odd loses" in " ".join(found.details().split())
    assert max(len(line) for line in found.text().splitlines()) <= 80


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"training": {"lr": 0.1}}, "lr is chosen for each method: leave it out of training"),
        ({"training": {"batsh": 2}}, "no setting of recipe 'fedavg' called 'batsh'.*'batch'"),
        ({"families": ["hdafll"]}, "no family called 'hdafll': did you mean 'hdafl'"),
        ({"budget": {"minutes": -1}}, "budget: minutes must be a number above 0, got -1"),
        ({"seeds": ()}, "seeds must be a list of different seeds"),
        ({"stop": {"updates": 3}}, "no argument of advise called 'stop'"),
    ],
)
def test_a_bad_argument_is_refused_in_one_sentence(options: dict[str, Any], why: str) -> None:
    with pytest.raises(SettingError, match=why):
        advise(alike(), network, **options)


def test_the_field_is_the_portfolio_without_what_cannot_run_there() -> None:
    """Local with all its settings leads it, and what cannot be trained is replaced by the next of the portfolio."""
    field, reasons = entrants(alike(), None, {"batch": 7}, {}, refused=lambda one, _: "none" * (one.name == "fedbn"))
    assert reasons == {"fedbn": "none"}
    alone = len(ALONE_SETTINGS)
    assert [(one.label, one.settings) for one in field[:alone]] == [("local", settings) for settings in ALONE_SETTINGS]
    raced = [{"recipe": one.label, **one.settings} for one in field[alone:] if not one.late]
    left = [{"recipe": "fedbn"}, *({"recipe": "local", **settings} for settings in ALONE_SETTINGS)]
    known = [point for point in portfolio() if point["recipe"] != "fedbn" and point not in left]
    assert raced == known[:MOST]
    assert len(raced) == MOST
    assert [one.label for one in field if one.late] == ["fedavg"]  # a measure that costs the race nothing
    assert all(one.recipe.training.batch == 7 for one in field)  # type: ignore[attr-defined]
    few, reasons = entrants(alike(clients=3), None, {}, {})
    assert reasons == {"ifca": "it needs at least 4 clients, and there are 3"}
    assert "ifca" not in {one.label for one in few}


def test_named_recipes_take_the_place_of_the_portfolio() -> None:
    field, _ = entrants(alike(), None, {"batch": 7}, {"mine": recipes.ditto(lr=0.3)}, ["fedala", "ditto"])
    labels = ("local", "mine", "fedala")
    rates = {label: [one.settings["lr"] for one in field if one.label == label] for label in labels}
    assert rates["fedala"] == list(RATES)
    assert rates["local"] == [settings["lr"] for settings in ALONE_SETTINGS]
    # a recipe of one's own is raced as it is first, and stands for that of its name
    assert rates["mine"][:3] == [0.3, *RATES]
    assert "ditto" not in {one.label for one in field}
    assert {one.settings.get("lam") for one in field if one.label == "mine"} == {
        None, *(point["lam"] for point in portfolio() if point["recipe"] == "ditto")
    }  # fmt: skip


def test_buffered_steps_are_raced_where_devices_are_unequal() -> None:
    slow = partition.FastSlow(share_slow=0.5, slow_factor=5.0)
    assert "fedbuff" in {one.label for one in entrants(alike(), slow, {}, {})[0]}
    assert "fedbuff" not in {one.label for one in entrants(alike(), None, {}, {})[0]}


def test_budgets_in_words() -> None:
    assert Budget.parse("300") == Budget.parse("300 rounds") == Budget(300)
    assert Budget.parse("1.5 minutes") == Budget(1.5, "minutes")
    assert Budget.parse("2e9 bytes") == Budget(2 * 10**9, "bytes")
    for text in ("", "ten rounds", "3 hours", "1.5 rounds", "nan minutes"):
        with pytest.raises(SettingError):
            Budget.parse(text)


@pytest.mark.full
def test_numbers_to_predict_and_what_more_data_would_change(tmp_path: Path) -> None:
    """An error is better if it is smaller, and nobody is said to lose beyond noise."""
    rng = np.random.default_rng(1)
    slope = np.array([1.0, 2.0, -1.0, 0.5])

    def rows(sign: float) -> tuple[Any, Any]:
        x = rng.normal(size=(80, 4))
        return x.astype("float32"), (sign * x @ slope + 0.3 * rng.normal(size=80)).astype("float32")

    given = {f"site {number}": rows(1.0) for number in range(5)} | {"odd": rows(-1.0)}
    clients = partition.clients_from(given, validation=0.25, test=0.25)
    line = models.build_model("logistic", (4,), 1)
    found = advise(
        clients, line, rounds=4, budget=80, families=["fedavg"], seeds=(0,), training={"batch": 10},
        methods={"joined": recipes.fedavg(batch=10, epochs=4)}, out=tmp_path / "advice",
    )  # fmt: skip
    errors = {row["method"]: row["score"] for row in found.tried}
    assert not found.higher_is_better
    assert found.best == min(errors, key=lambda label: errors[label])
    text = " ".join(found.details().split())
    assert "No client loses" not in text
    assert found.losers == []
    assert found.spent.rounds <= 80
    rows_of, clients_of = found.more or ()
    assert "With all training rows in place of half of them" in text
    assert rows_of.gain is not None
    assert rows_of.clients == 6
    assert list(rows_of.points) == [0.25, 0.5, 1.0]
    assert rows_of.gain.mean == pytest.approx(rows_of.points[1.0] - rows_of.points[0.5])
    assert rows_of.before is not None
    assert rows_of.before.mean == pytest.approx(rows_of.points[0.5] - rows_of.points[0.25])
    assert (clients_of.clients == 3) if found.recommended == "joined" else "trains alone" in clients_of.why
    made = tmp_path / "advice" / "more-data"
    folders = {path.relative_to(made).parts[0] for path in made.rglob("run.db")}
    assert folders == ({"rows", "clients"} if found.recommended == "joined" else {"rows"})


@pytest.mark.parametrize("rows", [40, 42, 61])
@pytest.mark.parametrize("share", [0.5, 0.25])
def test_a_part_of_the_rows_has_as_many_steps_as_all(rows: int, share: float) -> None:
    """But for what batches of whole rows leave over in each of its epochs."""
    for recipe in (recipes.fedavg(batch=10), recipes.fedrep(batch=10), recipes.fedavg(batch=10, steps=7)):
        longer = _with_as_many_steps(recipe, share).training
        whole, part = recipe.training.max_steps(rows), longer.max_steps(round(rows * share))  # type: ignore[attr-defined]
        assert abs(whole - part) <= 1 / share


def test_traffic_decides_only_where_it_is_dear() -> None:
    """Ditto leads by half a point, and Local sends nothing."""
    names, sizes = [f"c{n}" for n in range(6)], [50] * 6

    def one(label: str, score: float, sent: int) -> Any:
        spread = 0.01 if label == "local" else -0.01
        table = Scores(score + spread * np.array([[1, -1] * 3] * 2), names, (0, 1), sizes=sizes, counted=True)
        return SimpleNamespace(
            label=label, last=table, mean=score, run=Cost(bytes=sent), entrant=SimpleNamespace(rank=0)
        )

    finished, runs = (
        [one("local", 0.8, 0), one("ditto", 0.803, 10**6)],
        SimpleNamespace(metric="accuracy", higher_is_better=True),
    )
    assert choose(finished, "local", {}, runs)[0].label == "ditto"  # type: ignore[arg-type]
    assert choose(finished, "local", {}, runs, is_dear=True)[0].label == "local"  # type: ignore[arg-type]


def test_what_cannot_be_learned_is_refused_before_any_training() -> None:
    rng = np.random.default_rng(0)
    one_class = partition.clients_from({f"s{n}": (rng.normal(size=(30, 3)), np.zeros(30, int)) for n in range(3)},
                                       classes=["no", "yes"], validation=0.2)  # fmt: skip
    with pytest.raises(SettingError, match="all training rows have the class 'no': there is nothing to learn"):
        advise(one_class, models.build_model("mlp", (3,), 2), rounds=2)
    each = partition.clients_from({f"p{n}": (rng.normal(size=(1, 3)), [n % 2]) for n in range(30)}, test=0.0)
    with pytest.raises(SettingError, match="30 of 30 clients have fewer than two training rows: name as client who"):
        advise(each, models.build_model("mlp", (3,), 2), rounds=2)


@pytest.mark.full
def test_training_alone_is_stopped_where_validation_rows_are_best(tmp_path: Path) -> None:
    """With this rate it diverges from its best model, and the answer has it as it was then."""
    rng = np.random.default_rng(8)
    x, y = rng.normal(size=(4, 40, 12)).astype("float32"), rng.integers(0, 2, (4, 40))
    clients = partition.clients_from({f"s{n}": (x[n], y[n]) for n in range(4)}, validation=0.4, test=0.2)
    found = advise(clients, models.build_model("mlp", (12,), 2, hidden=(16,)), rounds=8, families=["local"], seeds=(0,),
                   training={"batch": 4}, more_data=False, out=tmp_path / "advice")  # fmt: skip
    assert found.folder is not None
    stopped = list((tmp_path / "advice" / "stopped").rglob("run.db"))
    folders = [path.parent for path in (tmp_path / "advice" / "runs" / "local").rglob("run.db")]
    alone = next(row["score"] for row in found.tried if row["method"] == "local")
    whole = []
    for folder in folders:
        with History(folder) as history:
            if history.final["rounds"] == 8:
                whole.append(max(np.mean(list(history.values_at(step).values())) for step in (2, 4, 6, 8)))
    assert stopped
    assert alone == pytest.approx(max(whole))
    assert {row["rounds"] for row in found.tried if row["method"] == "local"} == {_rounds(stopped[0].parent)}
    assert found.recommended == "local"
    assert found.curve[_rounds(stopped[0].parent)] == pytest.approx(alone)
    assert 8 not in found.curve  # of which the answer says nothing
    assert not any("to 8 rounds" in reason for reason in found.reasons)
    trained = [
        path for name in ("runs", "stopped", "all-rows") for path in (tmp_path / "advice" / name).rglob("run.db")
    ]
    assert found.spent.rounds == sum(_rounds(path.parent) for path in trained)  # none of it is forgotten


def _rounds(folder: Path) -> int:
    with History(folder) as history:
        return int(history.final["rounds"])


def test_half_of_the_rows_are_rows_of_the_whole() -> None:
    clients = alike()
    quarter = set(PartOfRows(clients, 0.25).indices(2, "train").tolist())
    half, whole = PartOfRows(clients, 0.5), set(clients.indices(2, "train").tolist())
    assert quarter < set(half.indices(2, "train").tolist()) < whole
    assert half.size(2, "train") == len(whole) // 2 == len(half.rows(2, "train")) == sum(half.counts(2, "train") or ())
    assert torch.equal(half.rows(2, "train").x, half.pool().x[torch.from_numpy(half.indices(2, "train"))])
    for split in ("validation", "test"):
        assert half.indices(2, split).tolist() == clients.indices(2, split).tolist()  # type: ignore[arg-type]
