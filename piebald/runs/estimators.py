"""Estimators with scikit-learn's conventions: federated training behind `fit`, `predict` and `score`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import Tags, check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d, validate_data
from torch import Tensor, nn

from piebald.contracts import Clients
from piebald.core import pytree
from piebald.core.errors import SettingError, shown
from piebald.data.clients.owner import is_frame
from piebald.data.clients.sources import clients_from
from piebald.methods.catalog import recipes
from piebald.methods.choice.final_models import Keep
from piebald.methods.recipe import Recipe
from piebald.models import build_model
from piebald.models.prediction import Predictor
from piebald.report.page.wording import names
from piebald.runs.finished_run import Run
from piebald.runs.run import run

_ALONE = "all"  # the one client of rows without groups
_LARGEST_SEED = 2**31 - 1


class _FederatedEstimator(BaseEstimator):  # type: ignore[misc]
    """What `FederatedClassifier` and `FederatedRegressor` have in common."""

    def __init__(
        self,
        recipe: str | Recipe = "fedavg",
        model: str | Mapping[str, Any] | nn.Module | Callable[[int], nn.Module] = "mlp",
        *,
        rounds: int = 20,
        settings: Mapping[str, Any] | None = None,
        prepare: Literal["federated", "none"] | Mapping[str, Any] = "federated",
        validation: float = 0.0,
        keep: Keep | Mapping[str, Any] = "last",
        calibrate: bool = False,
        runtime: Any = "simulator",
        out: str | Path | None = None,
        random_state: Any = None,
    ) -> None:
        self.recipe = recipe
        self.model = model
        self.rounds = rounds
        self.settings = settings
        self.prepare = prepare
        self.validation = validation
        self.keep = keep
        self.calibrate = calibrate
        self.runtime = runtime
        self.out = out
        self.random_state = random_state

    def _fitted(self, frame: pd.DataFrame, y: NDArray[Any], groups: Any, classes: Sequence[str] | None) -> Self:
        """Train on the rows of a table and keep the models; targets are class numbers, or numbers to predict."""
        check_consistent_length(frame, y)
        if groups is not None and (gaps := pd.isna(np.asarray(groups))).any():
            raise SettingError(f"groups must name the client of each row, got none in row {int(gaps.argmax()) + 1}")
        owners = np.full(len(y), _ALONE) if groups is None else np.asarray(groups).astype(str)
        check_consistent_length(y, owners)
        seed = int(check_random_state(self.random_state).randint(_LARGEST_SEED))
        client, target = (_unused(name, frame) for name in ("client", "target"))
        clients = clients_from(
            frame.assign(**{client: owners, target: y}), client=client, target=target, features=list(frame.columns),
            test=0.0, validation=self.validation, seed=seed, classes=classes, regression=classes is None,
            prepare=self.prepare,
        )  # fmt: skip
        recipe = self.recipe if isinstance(self.recipe, Recipe) else recipes.make(self.recipe, **(self.settings or {}))
        if isinstance(self.recipe, Recipe) and self.settings:
            raise SettingError("settings are those of a recipe by name: change the recipe itself, or leave them out")
        with tempfile.TemporaryDirectory(prefix="piebald-") as folder:
            finished = run(
                recipe, clients, self._model_of(clients, 1 if classes is None else len(classes)), rounds=self.rounds,
                seed=seed, keep=self.keep, runtime=self.runtime, out=self.out or Path(folder) / "run",
                measure="none", evaluate_every=0,
            )  # fmt: skip
            with finished:
                # while the folder is there, in which clients' own models lie
                self._keep_models(finished)
                self.n_iter_ = finished.final["rounds"]
        self.clients_ = np.array([str(name) for name in clients.names])
        return self

    def _model_of(self, clients: Clients, outputs: int) -> Any:
        if not isinstance(self.model, str | Mapping):
            return self.model
        settings = {"name": self.model} if isinstance(self.model, str) else dict(self.model)
        name, shape = settings.pop("name", "mlp"), pytree.form(clients.rows(0, "train").x)
        return lambda seed: build_model(name, shape, outputs, seed, **settings)

    def _keep_models(self, finished: Run) -> None:
        """Keep the global model, where there is one, and those of single clients, where they have their own."""
        kept: list[str | None] = [] if finished.work.layout.private else [None]
        kept += finished.client_names if finished.has_personal_models else []
        self.predictors_ = {name: finished.predictor(name, calibrate=self.calibrate) for name in kept}
        if isinstance(self.model, str | Mapping):  # a network of ours scores a row alike in any batch in float64
            self.predictors_ = {
                name: replace(predictor, module=_InFloat64(predictor.module))
                for name, predictor in self.predictors_.items()
            }

    def _predictions(self, x: Any, groups: Any) -> NDArray[np.float64]:
        """Return the answers of the models [n, columns], each row by that of its group."""
        check_is_fitted(self)
        frame = self._table(x, reset=False)
        if groups is None:
            return self._predictor(None).predict(frame).to_numpy()
        owners = np.asarray(groups).astype(str)
        check_consistent_length(frame, owners)
        parts = {str(name): np.flatnonzero(owners == name) for name in np.unique(owners)}
        answers = [self._predictor(name).predict(frame.iloc[rows]).to_numpy() for name, rows in parts.items()]
        # answers come by group, and argsort of a permutation is its inverse: back to the order of rows
        return np.concatenate(answers)[np.argsort(np.concatenate([*parts.values()]))]

    def _predictor(self, client: str | None) -> Predictor:
        if client is None and None not in self.predictors_ and len(self.predictors_) == 1:
            return next(iter(self.predictors_.values()))
        if client is not None and client not in self.clients_:
            raise SettingError(
                f"groups must be clients that were fitted ({names(list(self.clients_))}), got {shown(client)}: leave "
                "groups out for the global model"
            )
        predictor = self.predictors_.get(client, self.predictors_.get(None))
        if predictor is None:
            raise SettingError(f"{self.recipe} has no global model: give groups, the client of each row")
        return predictor

    def _table(self, x: Any, reset: bool) -> pd.DataFrame:
        """Return rows [n, d] as a table, after scikit-learn's checks: an array has numbers, a table may have text."""
        if is_frame(x):
            validate_data(self, x, reset=reset, skip_check_array=True)
        else:
            x = pd.DataFrame(validate_data(self, x, reset=reset, dtype="numeric", ensure_all_finite="allow-nan"))
        names = getattr(self, "feature_names_in_", [f"x{index}" for index in range(x.shape[1])])
        return pd.DataFrame(x).set_axis(list(names), axis=1)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = self.prepare != "none"
        return tags


class FederatedClassifier(ClassifierMixin, _FederatedEstimator):  # type: ignore[misc]
    """A classifier that is trained over clients, which are the groups of rows.

    Args:
        recipe: a recipe or the name of one.
        model: the name of a network, a table of its name and settings, a module, or a function of the seed.
        rounds: server steps, at least 1.
        settings: those of a recipe by name, like ``{"lr": 0.1}``.
        prepare: how the columns of X become inputs, see `piebald.clients_from`; "none" takes them as they are.
        validation: share of each client's rows for validation, in [0, 1), for `keep` and `calibrate`.
        keep: see `piebald.run`.
        calibrate: divide scores by a temperature that is fitted to validation rows.
        runtime: see `piebald.run`.
        out: the run folder; None keeps the models alone.
        random_state: the seed of all randomness, as scikit-learn has it.

    Attributes:
        classes_: the classes, sorted.
        clients_: names of the clients.
        n_features_in_, feature_names_in_: number and names of the columns of X.
        n_iter_: server steps made.
        predictors_: the models by client; None has the global one.

    Examples:
        >>> from sklearn.datasets import load_breast_cancer
        >>> from piebald import FederatedClassifier
        >>> X, y = load_breast_cancer(return_X_y=True)
        >>> hospitals = ["a", "b"] * 284 + ["a"]
        >>> FederatedClassifier(rounds=3, random_state=0).fit(X, y, groups=hospitals).score(X, y) > 0.9
        True
    """

    def fit(self, X: Any, y: Any, groups: Any = None) -> Self:
        """Train on rows X [n, d] with classes y [n]; `groups` [n] names the client of each, one for all by default.

        Raises:
            SettingError: a setting is wrong; or a ValueError, as scikit-learn raises them.
        """
        frame, y = self._table(X, reset=True), column_or_1d(y, warn=True)
        if (gaps := pd.isna(y)).any():
            raise SettingError(
                f"y must have a class in each row, got {y[gaps][0]} (NaN) in row {int(gaps.argmax()) + 1}: leave it out"
            )
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        return self._fitted(frame, codes.astype(np.int64), groups, [str(name) for name in self.classes_])

    def predict_proba(self, X: Any, groups: Any = None) -> NDArray[np.float64]:
        """Return probabilities [n, classes] by the global model, or by that of each row's client in `groups` [n]."""
        return self._predictions(X, groups)

    def predict(self, X: Any, groups: Any = None) -> NDArray[Any]:
        """Return classes [n], see `predict_proba`."""
        shares = self.predict_proba(X, groups)
        return np.asarray(self.classes_[shares.argmax(1)])


class FederatedRegressor(RegressorMixin, _FederatedEstimator):  # type: ignore[misc]
    """A regressor that is trained over clients, which are the groups of rows; arguments as of `FederatedClassifier`.

    Attributes:
        clients_: names of the clients.
        n_features_in_, feature_names_in_: number and names of the columns of X.
        n_iter_: server steps made.
        predictors_: the models by client; None has the global one.

    Examples:
        >>> import numpy as np
        >>> from piebald import FederatedRegressor
        >>> X = np.linspace(-1, 1, 60)[:, None]
        >>> y = 1000 * X[:, 0]
        >>> round(FederatedRegressor(model="logistic", random_state=0).fit(X, y).score(X, y), 1)
        1.0
    """

    def fit(self, X: Any, y: Any, groups: Any = None) -> Self:
        """Train on rows X [n, d] with numbers y [n]; `groups` [n] names the client of each, one for all by default.

        Raises:
            SettingError: a setting is wrong; or a ValueError, as scikit-learn raises them.
        """
        frame, y = self._table(X, reset=True), column_or_1d(y, warn=True)
        return self._fitted(frame, y.astype(np.float64), groups, None)

    def predict(self, X: Any, groups: Any = None) -> NDArray[np.float64]:
        """Return numbers [n] by the global model, or by that of each row's client in `groups` [n]."""
        return self._predictions(X, groups)[:, 0]


class _InFloat64(nn.Module):
    """A model that computes in float64 what it computed in float32."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module.double()

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.module(x.double() if x.is_floating_point() else x)
        return scores


def _unused(name: str, frame: pd.DataFrame) -> str:
    """Return a name that no column has."""
    return _unused(f"{name}_", frame) if name in frame.columns else name
