"""Plain models that a client fits to its own rows alone, by scikit-learn: what training together is held against.

A table of few rows is often served best by a linear model, which no network that is trained alone shows.  Shrunken
linear discriminant analysis, logistic regression and boosted trees are fitted for classes, ridge regression and boosted
trees for numbers, Poisson regression and boosted trees for counts, whose exposures are weights of rates, with their
usual settings, to training rows alone.

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
from torch import Tensor, nn

from piebald.contracts import Clients, InMemory, Rows, Split
from piebald.core import pytree
from piebald.core.errors import SettingError
from piebald.core.objective import Objective
from piebald.core.targets import counts_and_exposures, known
from piebald.engines.scoring import value_of, values_of_rows
from piebald.report.row_noise import CHOOSING, PLAIN
from piebald.runs.finished_run import Run

Floats = NDArray[np.float64]
MOST_COLUMNS = 300  # of a table; pictures and signals as long rows of numbers are none
MOST_CLIENTS = 100  # of a comparison: of more, fitting theirs would take longer than training
TREES = ("feature", "threshold", "left", "right", "value")  # arrays [trees, nodes]
_FOLDS = 5  # of the cross-validation of a client without validation rows
_LEAST_SHARE = 1e-6  # of a class that a client has no row of


class PlainModel(nn.Module):
    """A fitted model of scikit-learn as tensors, which are stored, exported and averaged as those of networks are.

    Args:
        state: either "weight" [k, d] and "bias" [k] of linear scores, or arrays of trees [trees, nodes]: "feature",
            "threshold", "left" and "right" (a leaf goes on to itself) and "value", with their "base" [k] and their
            "depth".  Of classes also "columns" [classes], the score of each; k is that of a class without rows.
    """

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in state.items():
            self.register_buffer(name, tensor)
        self._names = frozenset(state)
        self._depth = int(state.get("depth", 0))  # a number of the program that is exported

    @classmethod
    def of(cls, state: Mapping[str, Tensor]) -> PlainModel:
        """The model of tensors that were read from a file.

        Raises:
            ValueError: they are those of no plain model.
        """
        scores = {name: tensor for name, tensor in state.items() if name != "columns"}
        count = _scores_of_line(scores) or _scores_of_trees(scores)
        columns = state.get("columns")
        if not count or not (columns is None or (columns.dim() == 1 and _are_indices(columns, max(count, 2) + 1))):
            raise ValueError("the tensors are those of no plain model")
        return cls(state)

    def forward(self, x: Tensor) -> Tensor:
        """Return logarithms of shares [n, classes], or numbers or logarithms of rates [n, 1], of inputs [n, d]."""
        own: Any = self
        wide = x.double()
        scores = self._grown(wide) if "depth" in self._names else wide @ own.weight.T + own.bias
        if "columns" not in self._names:
            return scores.float()
        if scores.shape[1] == 1:  # of two classes, the second one's lead
            scores = torch.cat([torch.zeros_like(scores), scores], 1)
        shares = scores.log_softmax(1).clamp_min(math.log(_LEAST_SHARE))
        rest = torch.full_like(shares[:, :1], math.log(_LEAST_SHARE))
        return torch.cat([shares, rest], 1)[:, own.columns].float()

    def _grown(self, x: Tensor) -> Tensor:
        """The sums of trees [n, k] of inputs [n, d]."""
        own: Any = self
        trees = torch.arange(len(own.feature))
        at = torch.zeros(x.shape[0], len(trees), dtype=torch.int64)  # `len` would fix the number of rows
        for _ in range(self._depth):
            goes_left = x.gather(1, own.feature[trees, at]) <= own.threshold[trees, at]
            at = torch.where(goes_left, own.left[trees, at], own.right[trees, at])
        grown: Tensor = own.value[trees, at].reshape(x.shape[0], -1, len(own.base)).sum(1) + own.base
        return grown


def _scores_of_line(state: Mapping[str, Tensor]) -> int:
    """The number of linear scores of a stored state, 0 where it is that of none."""
    if state.keys() != {"weight", "bias"} or {tensor.dtype for tensor in state.values()} != {torch.float64}:
        return 0
    weight, bias = state["weight"], state["bias"]
    return len(bias) if weight.dim() == 2 and bias.shape == weight.shape[:1] else 0


def _scores_of_trees(state: Mapping[str, Tensor]) -> int:
    """The number of scores of stored trees, 0 where the state is that of none."""
    if state.keys() != {*TREES, "base", "depth"}:
        return 0
    shape, base, depth = state["feature"].shape, state["base"], state["depth"]
    are_numbers = {state[name].dtype for name in ("threshold", "value", "base")} == {torch.float64}
    if not are_numbers or len(shape) != 2 or any(state[name].shape != shape for name in TREES):
        return 0
    # a walk takes as many steps as it is deep, and no tree is deeper than it has nodes
    bounds = {"feature": MOST_COLUMNS, "left": shape[1], "right": shape[1]}
    inside = all(_are_indices(state[name], bound) for name, bound in bounds.items())
    is_sound = inside and depth.dim() == 0 and _are_indices(depth, shape[1] + 1)
    return len(base) if is_sound and base.dim() == 1 and len(base) and shape[0] % len(base) == 0 else 0


def _are_indices(tensor: Tensor, stop: int) -> bool:
    return tensor.dtype == torch.int64 and bool(((tensor >= 0) & (tensor < stop)).all())


class PlainModels:
    """The plain models of each client, fitted when they are first asked for.

    Args:
        clients: by whose training rows they are fitted.
        objective: by whose metric they are scored.
    """

    def __init__(self, clients: Clients, objective: Objective) -> None:
        self.clients, self.objective = clients, objective
        self.makers = _makers(clients, objective)
        self._fitted: dict[tuple[str, int], PlainModel | None] = {}
        self._crossed: dict[tuple[str, int, str], float | None] = {}

    def model(self, name: str, client: int) -> PlainModel | None:
        """A client's model, None where it has no rows to learn from."""
        if (name, client) not in self._fitted:
            own = self.clients.rows(client, "train")
            self._fitted[name, client] = self._model_of(name, own) if len(own) else None
        return self._fitted[name, client]

    def _model_of(self, name: str, rows: Rows) -> PlainModel:
        classes = len(self.clients.classes or ()) if self.objective.classifies else None
        return _as_tensors(_fitted(self.makers[name], rows, self.objective.name == "counts"), classes)

    def judged(self, name: str, client: int, rows: Rows) -> tuple[Objective, Tensor, Any] | None:
        """The objective, the outputs of a client's model on rows, and their targets; None where it has no model."""
        model = self.model(name, client) if len(rows) else None
        if model is None:
            return None
        return self.objective, self._outputs(model, rows), rows.targets

    def _outputs(self, model: PlainModel, rows: Rows) -> Tensor:
        outputs: Tensor = model(pytree.single(rows.x, "a plain model"))
        return outputs if self.objective.classifies else outputs.reshape(-1, *[1] * (rows.y.dim() - 1))  # type: ignore[union-attr]

    def cross_validated(self, name: str, client: int, metric: str) -> float | None:
        """A metric of a client's training rows, each predicted by a model of the other folds; None of fewer than two
        rows.

        Folds are alike in classes, or in the size of numbers.
        """
        key, rows = (name, client, metric), self.clients.rows(client, "train")
        if key not in self._crossed:
            order = pytree.single(rows.y, "a plain model").reshape(len(rows), -1)[:, 0].argsort(stable=True)
            fold = torch.empty(len(rows), dtype=torch.int64)
            fold[order] = torch.arange(len(rows)) % _FOLDS
            outputs, indices = list[Tensor](), list[Tensor]()
            for index in (fold == number for number in range(min(_FOLDS, len(rows)) if len(rows) > 1 else 0)):
                outputs.append(self._outputs(self._model_of(name, rows[~index]), rows[index]))
                indices.append(index.nonzero()[:, 0])
            self._crossed[key] = None
            if outputs:
                function = self.objective.metrics[metric]
                self._crossed[key] = float(value_of(function, torch.cat(outputs), rows[torch.cat(indices)].targets))
        return self._crossed[key]


def score_beside(run: Run, models: PlainModels) -> None:
    """Score the plain models on the rows that a run of Local was judged by, and keep the scores in its folder.

    Beside them it keeps the scores by which `Comparison` chooses between them and Local: on validation rows, or, where
    there are none but those that models are judged by, of plain models by cross-validation of training rows.

    A run whose single rows were not scored, or whose noise hides rows, has none, nor has one with very many clients or
    with rows that no plain model fits.
    """
    own = [row for row in run.row_scores if row["model"] == "rows" and row["metric"] == run.metric]
    is_there = any(str(row["model"]).startswith(PLAIN) for row in run.row_scores)
    if not (own and models.makers) or is_there or run.spent or len(models.clients) > MOST_CLIENTS:
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
    for row in [row for row in own if row["version"] == version]:
        scores = _choosing(run, models, row["client"], row["split"])
        rows += [{**row, "model": model, "metric": CHOOSING, "value": value, "row_values": None}
                 for model, value in scores.items() if value is not None and math.isfinite(value)]  # fmt: skip
    run._keep_row_scores(rows)


def _choosing(run: Run, models: PlainModels, client: int, judged_by: Split) -> dict[str, float | None]:
    """The scores of a client's models, by which one of them is chosen, on other rows than they are judged by."""
    metric, clients = models.objective.metrics[run.metric], models.clients
    if judged_by == "validation" or not any(clients.size(number, "validation") for number in range(len(clients))):
        return {f"{PLAIN}{name}": models.cross_validated(name, client, run.metric) for name in models.makers}
    rows = clients.rows(client, "validation")
    if not len(rows):
        return {}
    judged = {f"{PLAIN}{name}": models.judged(name, client, rows) for name in models.makers}
    scores = {name: None if own is None else float(value_of(metric, *own[1:])) for name, own in judged.items()}
    try:
        outputs, _ = run.outputs(client, "validation")
    except SettingError:  # a run without a folder does not keep clients' own models
        return scores
    return {"rows": float(value_of(metric, outputs, rows.targets)), **scores}


def _makers(clients: Clients, objective: Objective) -> Mapping[str, Callable[[], Any]]:
    """The models that fit these clients' rows, none where they are no table in memory of one target that is known."""
    if not (isinstance(clients, InMemory) and clients.in_memory()):
        return {}
    pool = clients.pool()
    x, y = pool.x, pool.y
    if not isinstance(x, Tensor) or not isinstance(y, Tensor) or x.dim() != 2 or x.shape[1] > MOST_COLUMNS:
        return {}
    if not bool(torch.isfinite(x).all() and torch.isfinite(y).all() and known(y).all()):
        return {}
    if objective.name in ("classification", "ordinal") and y.dim() == 1 and bool((y >= 0).all()):
        lda = {} if pool.weight is not None else {"shrunken LDA": _lda}  # which knows no weights of rows
        return {**lda, "logistic regression": _logistic, "boosted trees": _trees}
    if objective.name in ("regression", "l1", "huber") and y[0].numel() == 1:
        return {"ridge regression": _ridge, "boosted trees": _regression_trees}
    if objective.name == "counts" and bool((y >= 0).all()):
        return {"Poisson regression": _poisson, "boosted trees": _count_trees}
    return {}


def _fitted(make: Callable[[], Any], rows: Rows, counts: bool = False) -> Any:
    """A model of a client's rows; the most frequent class or the mean where they are too few for it.

    Args:
        make: makes the model.
        rows: its training rows.
        counts: whether targets are counts, of which rates are fitted.
    """
    from sklearn.dummy import DummyClassifier, DummyRegressor

    x, y = (pytree.single(part, "a plain model").numpy() for part in (rows.x, rows.y))
    weights = None if rows.weight is None else rows.weight.numpy()
    if counts:  # the likelihood of counts is that of rates with exposures as weights
        count, exposure = (part.double().numpy() for part in counts_and_exposures(rows.y))
        y, weights = count / exposure, exposure * (1 if weights is None else weights)
    y = y.reshape(len(rows))
    model = make()
    steps = [f"{name}__sample_weight" for name, _ in model.steps] if hasattr(model, "steps") else ["sample_weight"]
    weight = {} if weights is None else dict.fromkeys(steps, weights)
    is_constant = len(np.unique(y)) == 1  # discriminant analysis would fail at its first prediction
    with warnings.catch_warnings():
        # columns that repeat each other and steps that run out are no news of a model that is only a measure
        warnings.simplefilter("ignore")
        try:
            if not is_constant:
                return model.fit(x, y, **weight)
        except ValueError:  # no more rows than classes
            pass
        plain = DummyClassifier(strategy="prior") if hasattr(model, "predict_proba") else DummyRegressor()
        if counts and weights is not None:  # half a count where nothing was counted, as in `row_scores.constant`
            y = np.full(len(rows), np.log(np.average(y, weights=weights) or 0.5 / weights.sum()))
        return plain.fit(x, y, sample_weight=weights)


def _as_tensors(fitted: Any, classes: int | None) -> PlainModel:
    """A fitted model of scikit-learn as tensors; of so many classes, or of a number."""
    scaler, model = (fitted[0], fitted[-1]) if hasattr(fitted, "steps") else (None, fitted)
    if hasattr(model, "_predictors"):
        state = _trees_of(model)
    elif hasattr(model, "coef_"):
        weight, bias = np.atleast_2d(model.coef_), np.atleast_1d(model.intercept_)
        if scaler is not None:  # scores of standardised columns are linear in the columns as well
            weight = weight / scaler.scale_
            bias = bias - weight @ scaler.mean_
        state = {"weight": weight, "bias": bias}
    else:  # a constant answer
        # of a single class, the second column is that of all others
        shares = None if classes is None else np.append(model.class_prior_, [0.0] * (len(model.classes_) == 1))
        constant = np.ravel(model.constant_) if shares is None else np.log(np.maximum(shares, _LEAST_SHARE))
        state = {"weight": np.zeros((len(constant), model.n_features_in_)), "bias": constant}
    if classes is not None:
        state["columns"] = np.full(classes, len(model.classes_))
        state["columns"][model.classes_] = np.arange(len(model.classes_))
    tensors = {name: torch.from_numpy(np.array(values)) for name, values in state.items()}
    return PlainModel({name: x.double() if x.is_floating_point() else x for name, x in tensors.items()})


def _trees_of(model: Any) -> dict[str, Any]:
    """The trees of scikit-learn's boosting by histograms as arrays [trees, nodes], those of an iteration in turn."""
    trees = [predictor.nodes for step in model._predictors for predictor in step]
    most = max(map(len, trees))
    state: dict[str, Any] = {
        name: np.zeros((len(trees), most), float if name in ("threshold", "value") else np.int64) for name in TREES
    }
    for number, nodes in enumerate(trees):
        itself, count = np.arange(len(nodes)), len(nodes)
        leaf = nodes["is_leaf"].astype(bool)
        state["feature"][number, :count] = np.where(leaf, 0, nodes["feature_idx"])
        state["threshold"][number, :count] = np.where(leaf, 0.0, nodes["num_threshold"])
        for side in ("left", "right"):
            state[side][number, :count] = np.where(leaf, itself, nodes[side])
        state["value"][number, :count] = nodes["value"]
    depth = max(int(nodes["depth"].max()) for nodes in trees)
    return {**state, "base": np.ravel(model._baseline_prediction), "depth": np.array(depth)}


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


def _poisson() -> Any:
    from sklearn.linear_model import PoissonRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    # of a mean over rows: of a hundred rows the penalty of `LogisticRegression`, and not a hundred times it
    return make_pipeline(StandardScaler(), PoissonRegressor(alpha=0.01, max_iter=1000))


def _count_trees() -> Any:
    from sklearn.ensemble import HistGradientBoostingRegressor

    return HistGradientBoostingRegressor(loss="poisson", min_samples_leaf=5, early_stopping=False, random_state=0)


def _regression_trees() -> Any:
    from sklearn.ensemble import HistGradientBoostingRegressor

    return HistGradientBoostingRegressor(min_samples_leaf=5, early_stopping=False, random_state=0)
