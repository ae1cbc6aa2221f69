"""Plain models of each client's own rows: those of scikit-learn, and training together is held against them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.linear_model import LogisticRegression, PoissonRegressor, RidgeCV
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import piebald
from piebald import models, partition, recipes
from piebald.advice import advise
from piebald.core.objective import OBJECTIVES, objective_for
from piebald.engines.scoring import value_of
from piebald.report.paired import Scores
from piebald.report.verdict import ScoreVerdict, compared
from piebald.runs.plain_models import PlainModels, _fitted


def clients_of(rows: int, regression: bool = False, clients: int = 4) -> Any:
    """Clients with a linear rule of their own each."""
    rng, given = np.random.default_rng(0), {}
    for number in range(clients):
        x, rule = rng.normal(size=(rows, 5)).astype("float32"), rng.normal(size=5)
        amount = x @ rule + 0.3 * rng.normal(size=rows)
        given[f"s{number}"] = (x, amount.astype("float32") if regression else (amount > 0).astype(int))
    return partition.clients_from(given, validation=0.2, test=0.3, seed=1)


def plain(clients: Any) -> PlainModels:
    return PlainModels(clients, objective_for(clients.rows(0, "train").y))


def score(models_alone: PlainModels, name: str, client: int) -> float:
    """The metric of a plain model on a client's test rows."""
    judged = models_alone.judged(name, client, models_alone.clients.rows(client, "test"))
    assert judged is not None
    objective, outputs, targets = judged
    return float(value_of(objective.metrics[objective.metric], outputs, targets))


def test_shrunken_lda_is_that_of_scikit_learn_on_each_clients_training_rows() -> None:
    clients = clients_of(60)
    found = plain(clients)
    assert set(found.makers) == {"shrunken LDA", "logistic regression", "boosted trees"}
    for client in range(len(clients)):
        train, test = (clients.rows(client, split) for split in ("train", "test"))
        own = LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto").fit(train.x.numpy(), train.y.numpy())
        expected = own.score(test.x.numpy(), test.y.numpy())
        assert score(found, "shrunken LDA", client) == pytest.approx(expected)


def test_numbers_are_predicted_by_ridge_regression_in_their_unit() -> None:
    clients = clients_of(60, regression=True)
    models_alone = plain(clients)
    metric = models_alone.objective.metrics[models_alone.objective.metric]
    for client in range(len(clients)):
        train, test = (clients.rows(client, split) for split in ("train", "test"))
        scaler = StandardScaler().fit(train.x.numpy())
        own = RidgeCV(np.logspace(-3, 3, 13)).fit(scaler.transform(train.x.numpy()), train.y.numpy().ravel())
        said = torch.tensor(own.predict(scaler.transform(test.x.numpy())), dtype=torch.float32).reshape(test.y.shape)
        assert score(models_alone, "ridge regression", client) == pytest.approx(
            float(value_of(metric, said, test.y)), rel=1e-4
        )


@pytest.mark.parametrize("weighted", [False, True])
def test_rates_are_predicted_by_poisson_regression_with_exposures_as_weights(weighted: bool) -> None:
    rng, pieces = np.random.default_rng(3), list[Any]()
    for client in "abc":
        x, days = rng.normal(size=(80, 2)), rng.integers(1, 20, 80)
        falls = rng.poisson(days * np.exp(-2 + x[:, 0])) * (client != "c")  # nobody falls there
        pieces.append(pandas.DataFrame({"ward": client, "x": x[:, 0], "z": x[:, 1], "falls": falls, "days": days}))
    table = pandas.concat(pieces).assign(w=rng.integers(1, 4, 240))
    target = {"count": "falls", "exposure": "days"}
    clients = partition.clients_from(table, client="ward", target=target, test=0.3, seed=1, features=["x", "z"],
                                     weights="w" if weighted else None)  # fmt: skip
    models_alone = PlainModels(clients, OBJECTIVES["counts"])
    assert list(models_alone.makers) == ["Poisson regression", "boosted trees"]
    for client in range(2):
        train, test = (clients.rows(client, split) for split in ("train", "test"))
        (count, exposure), rows = train.y.double().numpy().T, train.x.numpy()
        weights = exposure * (train.weight.numpy() if weighted else 1)
        scaler = StandardScaler().fit(rows, sample_weight=weights)
        own = PoissonRegressor(alpha=0.01, max_iter=1000).fit(scaler.transform(rows), count / exposure, weights)
        said = torch.tensor(np.log(own.predict(scaler.transform(test.x.numpy())))).float()
        judged = models_alone.judged("Poisson regression", client, test)
        assert judged is not None
        assert judged[1][:, 0].numpy() == pytest.approx(said.numpy(), abs=1e-4)
        trees = models_alone.judged("boosted trees", client, test)
        grown = HistGradientBoostingRegressor(loss="poisson", min_samples_leaf=5, early_stopping=False, random_state=0)
        assert trees is not None
        assert trees[1].exp()[:, 0].numpy() == pytest.approx(
            grown.fit(rows, count / exposure, weights).predict(test.x.numpy()), rel=1e-4
        )
        assert models_alone.cross_validated("Poisson regression", client, "poisson_deviance") == pytest.approx(
            score(models_alone, "Poisson regression", client), rel=1
        )
    (nobody,) = {*models_alone.judged("boosted trees", 2, clients.rows(2, "test"))[1].flatten().tolist()}  # type: ignore[index]
    own = clients.rows(2, "train")
    weights = own.y[:, 1] * (own.weight if weighted else 1)
    assert np.exp(nobody) == pytest.approx(0.5 / float(weights.sum()), rel=1e-5)


def test_a_comparison_of_rates_names_the_plain_models() -> None:
    rng = np.random.default_rng(4)
    x, days = rng.normal(size=120), rng.integers(1, 20, 120)
    table = pandas.DataFrame({"ward": list("ab") * 60, "x": x, "falls": rng.poisson(days * np.exp(x)), "days": days})
    clients = partition.clients_from(table, client="ward", target={"count": "falls", "exposure": "days"}, test=0.3)
    made = [recipes.fedavg(lr=0.001), recipes.local(lr=0.001)]
    compared = piebald.compare(made, clients, models.build_model("mlp", (1,), 1, hidden=[]), rounds=2)
    assert "Poisson regression" in str(compared)


def test_clients_with_one_class_or_no_rows_do_not_end_it() -> None:
    rng = np.random.default_rng(0)
    given = {
        "one class": (rng.normal(size=(20, 3)), np.zeros(20, int)),
        "both": (rng.normal(size=(20, 3)), rng.integers(0, 2, 20)),
    }
    clients = partition.clients_from(given, validation=0.2, test=0.3, classes=["no", "yes"])
    assert score(plain(clients), "shrunken LDA", 0) == 1.0  # the only class that it knows


def test_pictures_have_no_plain_models() -> None:
    rng = np.random.default_rng(0)
    clients = partition.clients_from({f"s{n}": (rng.normal(size=(20, 1, 4, 4)), rng.integers(0, 2, 20)) for n in "ab"},
                                     validation=0.2)  # fmt: skip
    assert not plain(clients).makers


@pytest.mark.full
def test_whether_it_pays_is_said_against_the_best_of_those_alone() -> None:
    """Each client has a linear rule of its own: one step of a network shows little of it."""
    clients = clients_of(80)
    found = advise(
        clients, models.build_model("mlp", (5,), 2, hidden=(4,)), rounds=2, families=["fedavg"], seeds=(0,),
        training={"batch": 40}, more_data=False,
    )  # fmt: skip
    assert found.plain_alone is not None
    assert found.evidence.against == found.plain_alone.name
    assert found.pays == "no"
    test = found.plain_alone.test
    assert test is not None
    assert f"{found.plain_alone.name} of each client alone {100 * test.mean:.1f}%" in " ".join(found.text().split())


@pytest.mark.full
def test_compare_keeps_plain_models_beside_local_and_holds_the_leader_against_the_best_that_is_alone(
    tmp_path: Path,
) -> None:
    """Each client has a linear rule of its own, of which two rounds of a small network learn little."""
    clients, model = clients_of(80), models.build_model("mlp", (5,), 2, hidden=(4,))
    made = piebald.compare(["fedavg", "local"], clients, model, rounds=2, seeds=(0, 1), out=tmp_path / "runs")
    assert set(made.plain_alone) == {"shrunken LDA", "logistic regression", "boosted trees"}
    alone, table = plain(clients), made.plain_alone["shrunken LDA"]
    assert table.values == pytest.approx(np.array([[score(alone, "shrunken LDA", x) for x in range(4)]] * 2))
    verdict = made.verdict
    assert verdict is not None
    assert verdict.strong is not None
    assert verdict.strong[1] == made.plain_alone[verdict.strong[0]].mean
    assert f"No method is clearly better than {verdict.strong[0]} of each client alone" in made.headline()
    again = piebald.open(tmp_path / "runs")  # from the folders alone
    assert again.headline() == made.headline()
    assert len(made.by_label["local"][0].row_scores) == len(again.by_label["local"][0].row_scores)


def test_the_leader_is_better_than_those_alone_only_if_it_is_better_than_each() -> None:
    rng, clients = np.random.default_rng(0), [f"s{number}" for number in range(30)]
    base = rng.uniform(0.4, 0.6, (3, 30))
    noisy = Scores(base + 0.2 + rng.normal(0, 0.3, (3, 30)), clients)
    scores = {"local": Scores(base, clients), "ditto": Scores(base + 0.25, clients)}
    clear = ScoreVerdict.of(scores, "accuracy", True, "local")
    held_against = {"local": scores["local"], "boosted trees": noisy}
    both = ScoreVerdict.of(scores, "accuracy", True, "local", best_alone=held_against)
    assert clear is not None
    assert both is not None
    assert (clear.strong, both.leader) == (None, "ditto")
    gap = compared(scores["ditto"], noisy, both.comparisons)
    assert gap is not None
    assert clear.over_alone is not None
    assert both.over_alone is not None
    assert both.over_alone.p == max(gap.p, clear.over_alone.p)
    assert both.over_alone.mean == gap.mean  # of two the better is the one to beat
    assert "the better of training alone and boosted trees of each client alone" in both.sentence()
    one = ScoreVerdict.of(scores, "accuracy", True, "local", best_alone={"boosted trees": noisy})
    assert one is not None
    assert "better of" not in one.sentence()


@pytest.mark.full
@pytest.mark.parametrize("validation", [0.3, 0.0])
def test_the_best_that_is_alone_is_chosen_without_test_rows(validation: float, tmp_path: Path) -> None:
    """By validation rows or, without any, by cross-validation; under no labels of test rows otherwise."""
    rng, given = np.random.default_rng(3), dict[str, Any]()
    makers = {
        "shrunken LDA": LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto"),
        "logistic regression": make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)),
        "boosted trees": HistGradientBoostingClassifier(min_samples_leaf=5, early_stopping=False, random_state=0),
    }
    means, train = dict.fromkeys(makers, 0.0), 100 if validation else 140
    for name in "abc":
        x = rng.normal(size=(200, 4)).astype(np.float32)
        y = (np.abs(x[:, 0]) + 0.2 * rng.normal(size=200) > 0.7).astype(int)  # what no linear model tells
        given[name] = {"train": (x[:train], y[:train]), "validation": (x[train:140], y[train:140])}
        given[name]["test"] = (x[140:], y[140:])
        for title, maker in makers.items():
            if validation:
                means[title] += maker.fit(x[:train], y[:train]).score(x[train:140], y[train:140])
            else:
                means[title] += cross_val_score(maker, x[:train], y[:train], cv=5).mean()
    best = max(means, key=lambda title: means[title])
    linear = {}
    for name, splits in given.items():  # the labels of test rows that a linear model would have
        x, _ = splits["test"]
        rule = makers["shrunken LDA"].fit(*splits["train"])
        linear[name] = {**splits, "test": (x, rule.predict(x))}
    strong = []
    for rows in (given, linear):
        made = piebald.compare(["fedavg", "local"], piebald.clients_from(rows), models.build_model("logistic", (4,), 2),
                               rounds=1, out=tmp_path / str(rows is given))  # fmt: skip
        assert made.verdict is not None
        assert made.verdict.strong is not None
        strong.append(made.verdict.strong[0])
        assert made.verdict.is_beside == (not validation and made.verdict.leader != "local")
        tested = max(made.plain_alone, key=lambda title: made.plain_alone[title].mean)
        assert (tested == best) == (rows is given)
    assert strong == [best, best]


def test_of_equal_validation_scores_local_is_what_others_are_held_against(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 2)).astype(np.float32), np.zeros(60, int)
    splits = {"train": (x[:20], y[:20]), "validation": (x[20:40], y[20:40]), "test": (x[40:], y[40:])}
    clients = piebald.clients_from({"a": splits, "b": splits}, classes=["no", "yes"])
    methods = {"fedavg": recipes.fedavg(), "local": recipes.local(lr=1.0)}
    made = piebald.compare(methods, clients, models.build_model("logistic", (2,), 2), rounds=20, out=tmp_path)
    assert made.verdict is not None
    assert made.by_label["local"][0].accuracy == 1.0
    assert made.verdict.strong is None


@pytest.mark.full
def test_a_comparison_of_rows_with_unknown_numbers_has_no_plain_models(tmp_path: Path) -> None:
    """They would learn -100 as a number; and Local's outputs on validation rows are those of known ones alone."""
    x = np.random.default_rng(0).normal(size=(60, 2)).astype(np.float32)
    y = x[:, 0].copy()
    y[25] = -100  # a validation row
    splits = {"train": (x[:20], y[:20]), "validation": (x[20:40], y[20:40]), "test": (x[40:], y[40:])}
    network = models.build_model("logistic", (2,), 1)
    made = piebald.compare(["local"], piebald.clients_from({"a": splits, "b": splits}), network, rounds=1, out=tmp_path)
    assert made.plain_alone == {}
    y[25] = 0
    made = piebald.compare(["local"], piebald.clients_from({"a": splits, "b": splits}), network, rounds=1)
    assert {*made.plain_alone} == {"ridge regression", "boosted trees"}


def test_where_a_plain_model_is_best_local_pays_no_more_than_it() -> None:
    clients = [f"s{number}" for number in range(10)]
    scores = {"local": Scores(np.full((3, 10), 0.7), clients), "fedavg": Scores(np.full((3, 10), 0.6), clients)}
    better = {"shrunken LDA": Scores(np.full((3, 10), 0.8), clients)}
    verdict = ScoreVerdict.of(scores, "accuracy", True, "local", best_alone=better)
    assert verdict is not None
    assert verdict.strong == ("shrunken LDA", pytest.approx(0.8))
    assert verdict.over_alone is not None
    assert verdict.over_alone.mean == pytest.approx(-0.1)


@pytest.mark.parametrize(("classes", "rows"), [(3, 60), (4, 90), (4, 6), (2, 10), (0, 60)])
def test_tensors_answer_as_scikit_learn_does(classes: int, rows: int) -> None:
    """Probabilities, or numbers, of all plain models; of four classes one has no rows."""
    rng = np.random.default_rng(classes)
    x, new = rng.normal(size=(rows, 5)).astype("float32"), rng.normal(size=(40, 5)).astype("float32")
    y = x[:, 0] + rng.normal(size=rows) if classes == 0 else rng.choice([0, 2, 3][: classes - 1], rows)
    objective = objective_for(torch.from_numpy(y if classes else y.astype("float32")))
    own = (x, y if classes else y.astype("float32"))
    clients = partition.clients_from({"a": own, "b": own}, classes=["a", "b", "c", "d"] if classes else None)
    found = PlainModels(clients, objective)
    assert found.makers
    for name, make in found.makers.items():
        fitted, model = _fitted(make, clients.rows(0, "train")), found.model(name, 0)
        assert model is not None
        outputs = model(torch.from_numpy(new)).double().numpy()
        if not classes:
            assert outputs[:, 0] == pytest.approx(fitted.predict(new), rel=1e-4, abs=1e-5)
            continue
        expected = np.full((40, 4), 1e-6)
        expected[:, fitted.classes_] = np.maximum(fitted.predict_proba(new), 1e-6)
        assert np.exp(outputs) == pytest.approx(expected, rel=1e-3, abs=2e-6)
