"""Plain models that a client fits to its own rows alone, by scikit-learn: what training together is held against.

A table of few rows is often served best by a linear model, which no network that is trained alone shows.  Shrunken
linear discriminant analysis, logistic regression and boosted trees are fitted for classes, ridge regression and boosted
trees for numbers, with their usual settings, to training rows alone.

Source: Ledoit and Wolf, *Honey, I shrunk the sample covariance matrix*, Journal of Portfolio Management 2004.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from piebald.contracts import Clients, InMemory, Rows
from piebald.core import pytree
from piebald.core.objective import Objective
from piebald.engines.scoring import value_of, values_of_rows
from piebald.report.row_noise import PLAIN
from piebald.runs.finished_run import Run

Floats = NDArray[np.float64]
MOST_COLUMNS = 300  # of a table; pictures and signals as long rows of numbers are none
MOST_CLIENTS = 100  # of a comparison: of more, fitting theirs would take longer than training
_LEAST_SHARE = 1e-6  # of a class that a client has no row of


class PlainModels:
    """The plain models of each client, fitted when they are first asked for.

    Args:
        clients: by whose training rows they are fitted.
        objective: by whose metric they are scored.
    """

    def __init__(self, clients: Clients, objective: Objective) -> None:
        self.clients, self.objective = clients, objective
        self.makers = _makers(clients, objective)
        self._fitted: dict[tuple[str, int], Any] = {}

    def judged(self, name: str, client: int, rows: Rows) -> tuple[Objective, Tensor, Any] | None:
        """The objective, the outputs of a client's model on rows, and their targets; None where it has no model."""
        outputs = self._outputs(name, client, rows) if len(rows) else None
        return None if outputs is None else (self.objective, outputs, rows.y)

    def _outputs(self, name: str, client: int, judged: Rows) -> Tensor | None:
        """Return a client's outputs as a network has them; None where it has no rows to learn from."""
        if (name, client) not in self._fitted:
            own = self.clients.rows(client, "train")
            self._fitted[name, client] = _fitted(self.makers[name], own) if len(own) else None
        model = self._fitted[name, client]
        if model is None:
            return None
        x, y = (pytree.single(part, "a plain model") for part in (judged.x, judged.y))
        if not hasattr(model, "predict_proba"):
            return torch.from_numpy(np.asarray(model.predict(x.numpy()), np.float32)).reshape(y.shape)
        shares = np.full((len(x), len(self.clients.classes or ())), _LEAST_SHARE)
        shares[:, model.classes_] = np.maximum(model.predict_proba(x.numpy()), _LEAST_SHARE)
        return torch.from_numpy(shares).log().float()


def score_beside(run: Run, models: PlainModels) -> None:
    """Score the plain models on the rows that a run of Local was judged by, and keep the scores in its folder.

    A run whose single rows were not scored, or whose noise hides rows, has none, nor has one with very many clients.
    """
    own = [row for row in run.row_scores if row["model"] == "rows" and row["metric"] == run.metric]
    is_there = any(str(row["model"]).startswith(PLAIN) for row in run.row_scores)
    if not own or is_there or run.spent or len(models.clients) > MOST_CLIENTS:
        return
    version, metric = max(row["version"] for row in own), models.objective.metrics[run.metric]
    rows = []
    for name, row in itertools.product(models.makers, [row for row in own if row["version"] == version]):
        judged = models.judged(name, row["client"], models.clients.rows(row["client"], row["split"]))
        if judged is None or not math.isfinite(value := float(value_of(metric, *judged[1:]))):
            continue
        single = values_of_rows(metric, *judged[1:]).double()
        values = single.tolist() if bool(single.isfinite().all()) else None
        rows.append({**row, "model": f"{PLAIN}{name}", "value": value, "row_values": values})
    run.keep_row_scores(rows)


def _makers(clients: Clients, objective: Objective) -> Mapping[str, Callable[[], Any]]:
    """The models that fit these clients' rows, none where they are no table in memory of one target."""
    if not (isinstance(clients, InMemory) and clients.in_memory()):
        return {}
    pool = clients.pool()
    x, y = pool.x, pool.y
    if not isinstance(x, Tensor) or not isinstance(y, Tensor) or x.dim() != 2 or x.shape[1] > MOST_COLUMNS:
        return {}
    if not bool(torch.isfinite(x).all() and torch.isfinite(y).all()):
        return {}
    if objective.name == "classification" and y.dim() == 1 and bool((y >= 0).all()):
        return {"shrunken LDA": _lda, "logistic regression": _logistic, "boosted trees": _trees}
    if objective.name in ("regression", "l1", "huber") and y[0].numel() == 1:
        return {"ridge regression": _ridge, "boosted trees": _regression_trees}
    return {}


def _fitted(make: Callable[[], Any], rows: Rows) -> Any:
    """A model of a client's rows; the most frequent class or the mean where they are too few for it."""
    from sklearn.dummy import DummyClassifier, DummyRegressor

    x, y = (pytree.single(part, "a plain model").numpy() for part in (rows.x, rows.y))
    y = y.reshape(len(rows))
    model = make()
    is_constant = len(np.unique(y)) == 1  # discriminant analysis would fail at its first prediction
    with warnings.catch_warnings():
        # columns that repeat each other and steps that run out are no news of a model that is only a measure
        warnings.simplefilter("ignore")
        try:
            if not is_constant:
                return model.fit(x, y)
        except ValueError:  # no more rows than classes
            pass
        plain = DummyClassifier(strategy="prior") if hasattr(model, "predict_proba") else DummyRegressor()
        return plain.fit(x, y)


def _lda() -> Any:
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    return LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto")


def _logistic() -> Any:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))


def _trees() -> Any:
    from sklearn.ensemble import HistGradientBoostingClassifier

    return HistGradientBoostingClassifier(min_samples_leaf=5, early_stopping=False, random_state=0)


def _ridge() -> Any:
    from sklearn.linear_model import RidgeCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), RidgeCV(np.logspace(-3, 3, 13)))


def _regression_trees() -> Any:
    from sklearn.ensemble import HistGradientBoostingRegressor

    return HistGradientBoostingRegressor(min_samples_leaf=5, early_stopping=False, random_state=0)
