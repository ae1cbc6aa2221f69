"""Plain models of each client's own rows: those of scikit-learn, and training together is held against them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import RidgeCV
from sklearn.preprocessing import StandardScaler

from piebald import models, partition
from piebald.advice import advise
from piebald.advice.plain_models import PlainModels
from piebald.advice.tuning.trial_runs import TrialRuns
from piebald.core.objective import objective_for
from piebald.engines.scoring import value_of


def clients_of(rows: int, regression: bool = False, clients: int = 4) -> Any:
    """Clients with a linear rule of their own each."""
    rng, given = np.random.default_rng(0), {}
    for number in range(clients):
        x, rule = rng.normal(size=(rows, 5)).astype("float32"), rng.normal(size=5)
        amount = x @ rule + 0.3 * rng.normal(size=rows)
        given[f"s{number}"] = (x, amount.astype("float32") if regression else (amount > 0).astype(int))
    return partition.clients_from(given, validation=0.2, test=0.3, seed=1)


def plain(clients: Any, model: Any) -> PlainModels:
    runs = TrialRuns.of({}, clients, model, (1,), {})
    return PlainModels(runs, objective_for(clients.rows(0, "train").y))


def test_shrunken_lda_is_that_of_scikit_learn_on_each_clients_training_rows() -> None:
    clients = clients_of(60)
    scores = plain(clients, models.build_model("logistic", (5,), 2)).scores(clients, "test")
    assert set(scores) == {"shrunken LDA", "logistic regression", "boosted trees"}
    for client in range(len(clients)):
        train, test = (clients.rows(client, split) for split in ("train", "test"))
        own = LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto").fit(train.x.numpy(), train.y.numpy())
        expected = own.score(test.x.numpy(), test.y.numpy())
        assert scores["shrunken LDA"].values[0, client] == pytest.approx(expected)


def test_numbers_are_predicted_by_ridge_regression_in_their_unit() -> None:
    clients = clients_of(60, regression=True)
    models_alone = plain(clients, models.build_model("logistic", (5,), 1))
    table = models_alone.scores(clients, "test")["ridge regression"]
    metric = models_alone.objective.metrics[models_alone.objective.metric]
    for client in range(len(clients)):
        train, test = (clients.rows(client, split) for split in ("train", "test"))
        scaler = StandardScaler().fit(train.x.numpy())
        own = RidgeCV(np.logspace(-3, 3, 13)).fit(scaler.transform(train.x.numpy()), train.y.numpy().ravel())
        said = torch.tensor(own.predict(scaler.transform(test.x.numpy())), dtype=torch.float32).reshape(test.y.shape)
        assert table.values[0, client] == pytest.approx(float(value_of(metric, said, test.y)), rel=1e-4)


def test_clients_with_one_class_or_no_rows_do_not_end_it() -> None:
    rng = np.random.default_rng(0)
    given = {
        "one class": (rng.normal(size=(20, 3)), np.zeros(20, int)),
        "both": (rng.normal(size=(20, 3)), rng.integers(0, 2, 20)),
    }
    clients = partition.clients_from(given, validation=0.2, test=0.3, classes=["no", "yes"])
    scores = plain(clients, models.build_model("logistic", (3,), 2)).scores(clients, "test")
    assert scores["shrunken LDA"].values[0, 0] == 1.0  # the only class that it knows


def test_pictures_have_no_plain_models() -> None:
    rng = np.random.default_rng(0)
    clients = partition.clients_from({f"s{n}": (rng.normal(size=(20, 1, 4, 4)), rng.integers(0, 2, 20)) for n in "ab"},
                                     validation=0.2)  # fmt: skip
    assert not plain(clients, models.build_model("mlp", (1, 4, 4), 2)).makers


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
