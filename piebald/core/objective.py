"""Objectives: the loss that clients minimize, and the metrics of evaluation.

A loss maps (outputs, targets) to one value per example, [batch], so that engines can mask and batch them; a loss that
returns a single mean is also accepted and runs without masks.  A metric maps (outputs, targets) to one value per
example and is averaged; objects with `update`, `compute` and `reset` (torchmetrics) are also accepted and run client by
client.  Those by name are in `losses` and `metrics`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from piebald.core.errors import SettingError, shown, unknown
from piebald.core.metrics import (
    ELSEWHERE,
    AttackSuccess,
    Auc,
    Concordance,
    Loss,
    OfAllRows,
    Perplexity,
    absolute_error,
    accuracy,
    balanced_accuracy,
    binary_cross_entropy,
    brier,
    calibration_error,
    count_events,
    count_loss,
    cross_entropy,
    huber_loss,
    label_accuracy,
    macro_f1,
    model_loss,
    next_token_accuracy,
    next_token_loss,
    ordinal_loss,
    over_classes,
    poisson_deviance,
    r2,
    rank_error,
    recall,
    rmse,
    squared_error,
    survival_loss,
    token_accuracy,
    token_cross_entropy,
)
from piebald.core.pytree import Tree, count, described, logits
from piebald.core.targets import (
    ClassNumbers,
    Counts,
    Labels,
    Misfit,
    TargetDomain,
    TimesAndEvents,
    Weighted,
    counts_and_exposures,
    is_one_hot,
    parted,
    survival_pair,
)

Constants = float | tuple[float, ...]  # of one target, or of each of several


@dataclass(frozen=True)
class Objective:
    """A loss and named metrics.  The first metric is the main one, shown in progress bars and tables.

    Attributes:
        name: one of `OBJECTIVES`, or "custom".
        loss: function of (outputs, targets).
        metrics: metrics by name.
        higher_is_better: whether higher values of the first metric are better.
        compares_rows: whether the loss compares the rows of a batch with one another, so that a row alone has none.
        domain: the targets that the loss takes, None where nobody says.
        count: returns how much a client's targets count in averages of losses; None for the number, or the weights, of
            rows.
    """

    name: str
    loss: Loss
    metrics: Mapping[str, Any] = field(default_factory=dict)
    higher_is_better: bool = True
    compares_rows: bool = False
    domain: TargetDomain | None = None
    count: Callable[[Tree], float] | None = None

    def weight(self, targets: Any) -> float | None:
        """Return how much rows count in averages of losses over clients, None for the number of those with a target.

        Args:
            targets: as engines train on them, perhaps `Weighted`.
        """
        if self.count is not None:
            return self.count(targets)
        plain, weights = parted(targets)
        if weights is None:
            return None
        return float((weights if self.domain is None else weights * self.domain.known_rows(plain)).double().sum())

    @property
    def classifies(self) -> bool:
        """True if each row has one class, as far as that is known: a loss of the user's own may take others."""
        return self.name in ("classification", "ordinal", "model") or self.name not in OBJECTIVES

    def in_unit(self, mean: Constants, deviation: Constants) -> Objective:
        """Return the objective for targets that are standard scores, in the targets' own unit.

        Metrics are told in it, and so is the delta of the Huber loss: that of scores with a delta as many times smaller
        is the same loss but for a factor.

        Args:
            mean, deviation: of the targets, by which the scores were made; of each where there are several.
        """
        told = {name: InUnit(metric, mean, deviation) for name, metric in self.metrics.items()}
        loss, settings = self.loss, getattr(self.loss, "keywords", {})
        if isinstance(loss, functools.partial) and "delta" in settings:
            if not isinstance(deviation, float | int):
                raise SettingError("delta of the loss 'huber' is in the unit of one target, and there are several: set "
                                   "scale of the targets in [prepare] to 'none', or leave delta out")  # fmt: skip
            loss = functools.partial(loss.func, *loss.args, **{**settings, "delta": settings["delta"] / deviation})
        return replace(self, metrics=told, loss=loss)

    @property
    def own_metrics(self) -> frozenset[str]:
        """The names of metrics that are the user's own, whatever the package has under these names."""
        tables = (METRICS, *_MEANT.values(), *(objective.metrics for objective in OBJECTIVES.values()))
        known = [metric for table in tables for metric in table.values()]

        def is_known(metric: Any) -> bool:
            metric = metric.metric if isinstance(metric, InUnit) else metric
            return isinstance(metric, AttackSuccess) or any(metric is one for one in known)

        return frozenset(name for name, metric in self.metrics.items() if not is_known(metric))

    @property
    def metric(self) -> str:
        """Name of the main metric."""
        return next(iter(self.metrics), "loss")

    def check_targets(self, targets: Tree, outputs: Sequence[int], who: str) -> None:
        """Refuse targets that the loss cannot take.

        Args:
            targets: of some rows.
            outputs: the shape of the model's outputs for one row, empty where it is not known.
            who: whose rows they are, for the message.

        Raises:
            SettingError: a target is outside of the loss's domain; the message names its row.
        """
        misfit = self.misfit(targets, outputs) if count(targets) else None
        if misfit is not None:
            raise SettingError(misfit.sentence(who))

    def misfit(self, targets: Tree, outputs: Sequence[int]) -> Misfit | None:
        """Return the first target that the loss cannot take, or None; arguments are as in `check_targets`.

        A loss of the user's own is tried on the first class number that has no output, and on one that has.
        """
        if self.domain is not None or self.name != "custom":
            return None if self.domain is None else self.domain.misfit(targets, outputs)
        if not isinstance(targets, Tensor) or targets.dim() != 1 or targets.is_floating_point() or len(outputs) != 1:
            return None
        misfit = ClassNumbers().misfit(targets, outputs)
        # a loss that refuses class 0 as well, which every model has an output for, tells nothing about the number
        if misfit is None or self._takes(targets[misfit.row], outputs) or not self._takes(targets[0] * 0, outputs):
            return None
        return misfit

    def _takes(self, target: Tensor, outputs: Sequence[int]) -> bool:
        """Return whether torch has a place for a row's target; other errors of the loss leave out who has such rows."""
        with contextlib.suppress(Exception):
            try:
                self.loss(torch.zeros(1, *outputs), target[None])
            except (IndexError, RuntimeError):
                return False
        return True


class InUnit:
    """A metric of standard scores, told in the unit that they were made from.

    Args:
        metric: function of (outputs, targets), or an object that accumulates rows.
        mean, deviation: by which the scores were made.
    """

    def __init__(self, metric: Any, mean: Constants, deviation: Constants) -> None:
        self.metric, self._mean, self._deviation = metric, mean, deviation
        if accumulates(metric):
            self.update, self.compute, self.reset = self._update, metric.compute, metric.reset

    def __call__(self, outputs: Tensor, targets: Tensor) -> Any:
        """Return the metric of some rows."""
        return self.metric(self._told(outputs), self._told(targets))

    def __getattr__(self, name: str) -> Any:
        # copying and unpickling ask before `metric` is set, and looking it up here would recurse without end
        if name.startswith("__") or name == "metric":
            raise AttributeError(name)
        return getattr(self.metric, name)

    def _update(self, outputs: Tensor, targets: Any) -> None:
        plain, weights = parted(targets)
        told = self._told(plain)
        self.metric.update(self._told(outputs), told if weights is None else Weighted(told, weights))

    def _told(self, scores: Tensor) -> Tensor:
        values = logits(scores)
        if isinstance(self._mean, tuple) or isinstance(self._deviation, tuple):  # of several targets
            mean, deviation = (values.new_tensor(numbers) for numbers in (self._mean, self._deviation))
            return values * deviation + mean
        return values * self._deviation + self._mean


_ABSOLUTE: dict[str, Any] = {"absolute_error": absolute_error}

_NUMBERS = TargetDomain()

OBJECTIVES = {
    "classification": Objective("classification", cross_entropy, {"accuracy": accuracy}, domain=ClassNumbers()),
    "ordinal": Objective(
        "ordinal",
        ordinal_loss,
        {"rank_error": rank_error, "accuracy": accuracy},
        higher_is_better=False,
        domain=ClassNumbers(),
    ),
    "regression": Objective("regression", squared_error, _ABSOLUTE, higher_is_better=False, domain=_NUMBERS),
    "l1": Objective("l1", absolute_error, _ABSOLUTE, higher_is_better=False, domain=_NUMBERS),
    "huber": Objective("huber", huber_loss, _ABSOLUTE, higher_is_better=False, domain=_NUMBERS),
    "multilabel": Objective("multilabel", binary_cross_entropy, {"label_accuracy": label_accuracy}, domain=Labels()),
    "token_classification": Objective(
        "token_classification", token_cross_entropy, {"accuracy": token_accuracy}, domain=ClassNumbers(last=True)
    ),
    "language_modelling": Objective(
        "language_modelling",
        next_token_loss,
        {"perplexity": Perplexity(), "accuracy": next_token_accuracy},
        higher_is_better=False,
        domain=ClassNumbers(last=True, shifted=True),
    ),
    "survival": Objective(
        "survival",
        survival_loss,
        {"concordance": Concordance()},
        compares_rows=True,
        domain=TimesAndEvents(),
        count=count_events,
    ),
    "counts": Objective(
        "counts", count_loss, {"poisson_deviance": poisson_deviance}, higher_is_better=False, domain=Counts()
    ),
    "model": Objective("model", model_loss, {"accuracy": accuracy}),
}


OF_PAIRS = ("survival", "counts")  # objectives whose targets are two columns, and outputs one


def speaks_in_unit(loss: Any) -> bool:
    """Return whether a loss, as given to a run, takes targets as they are: one's own, and those of labels, counts and
    survival.

    Examples:
        >>> speaks_in_unit(torch.nn.functional.poisson_nll_loss), speaks_in_unit({"name": "huber", "delta": 2.0})
        (True, False)
    """
    named = loss.get("name") if isinstance(loss, Mapping) else loss
    return named is not None and (
        named in (*OF_PAIRS, "multilabel") or not (isinstance(named, str) and named in OBJECTIVES)
    )


_OF_NUMBERS = ("regression", "l1", "huber", "counts")

METRICS: dict[str, Any] = {
    "absolute_error": absolute_error,
    "accuracy": accuracy,
    "auc": Auc(),
    "average_precision": OfAllRows(functools.partial(over_classes, "average_precision_score")),
    "balanced_accuracy": OfAllRows(balanced_accuracy),
    "brier": OfAllRows(brier, higher_is_better=False),
    "calibration_error": OfAllRows(calibration_error, higher_is_better=False),
    "concordance": Concordance(),
    "f1": OfAllRows(macro_f1),
    "label_accuracy": label_accuracy,
    "log_loss": cross_entropy,
    "mae": absolute_error,
    "next_token_accuracy": next_token_accuracy,
    "perplexity": Perplexity(),
    "poisson_deviance": poisson_deviance,
    "r2": OfAllRows(r2),
    "rank_error": rank_error,
    "rmse": OfAllRows(rmse, higher_is_better=False),
    "sensitivity": OfAllRows(functools.partial(recall, True)),
    "specificity": OfAllRows(functools.partial(recall, False)),
    "squared_error": squared_error,
    "token_accuracy": token_accuracy,
}
# by the name in a table, whose other entries are arguments
_WITH_SETTINGS: dict[str, Callable[..., Any]] = {"attack_success": AttackSuccess.of_pairs}
# what a name of METRICS means for an objective, where it means something else
_MEANT: dict[str, dict[str, Any]] = {
    "multilabel": {"log_loss": binary_cross_entropy},
    "token_classification": {"accuracy": token_accuracy, "perplexity": Perplexity(shifted=False)},
    "language_modelling": {"accuracy": next_token_accuracy},
}


def objective_for(
    targets: Tree,
    loss: Loss | str | Mapping[str, Any] | None = None,
    metrics: Mapping[str, Any] | Sequence[str] | None = None,
) -> Objective:
    """Choose the objective for targets: classification for whole numbers and one-hot rows, regression for other real
    numbers, or that of `loss`.

    Args:
        targets: any client's targets.
        loss: None, the name of an objective, a table of its name and the settings of its loss, like {"name":
            "classification", "label_smoothing": 0.1}, or a callable (outputs, targets) -> [batch] or a mean.
        metrics: names from `METRICS`, or metrics by name, instead of the objective's own.

    Examples:
        >>> objective = objective_for(torch.tensor([0, 2, 1]))
        >>> objective.name, objective.metric
        ('classification', 'accuracy')
        >>> objective_for(torch.tensor([0.5, 1.5]), "l1", ["squared_error"]).metric
        'squared_error'
    """
    if isinstance(loss, Mapping):
        objective = _with_settings(dict(loss))
    elif isinstance(loss, str):
        objective = _named_objective(loss)
    else:
        objective = _for_targets(targets, loss)
    if metrics is not None:
        metrics = named_metrics(metrics, objective.name)
        for name, metric in metrics.items():
            if not callable(metric) and not accumulates(metric):
                raise SettingError(f"metric {name!r} must be a function or a torchmetrics object, got {shown(metric)}")
        objective = replace(objective, metrics=dict(metrics), higher_is_better=_higher_is_better(metrics))
    if objective.name in ("classification", "ordinal", "token_classification", "language_modelling"):
        _check_classes(objective.name, targets)
    if objective.name == "survival":
        survival_pair(targets)  # refuses another form
    if objective.name == "counts":
        counts_and_exposures(targets)
    return objective


def unfit_classes(loss: Any, classes: Sequence[str] | None, stated: bool) -> str | None:
    """Return why a loss does not fit targets that are classes, or None.

    Args:
        loss: as given to a run, or as its file has it.
        classes: their names in order, None where targets are numbers.
        stated: whether they are named in an order of their own.
    """
    name = loss.get("name") if isinstance(loss, Mapping) else loss
    if name == "ordinal" and classes is not None and not stated and (words := in_no_order(classes)):
        return f"{words}: name them from low to high, classes = [...] in [data]"
    if classes is None or name not in _OF_NUMBERS:
        return None
    return (
        f"loss {name!r} predicts numbers, but the targets are {len(classes)} classes: set regression = true in [data], "
        "or of clients_from, if their whole numbers are no classes"
    )


def in_no_order(classes: Sequence[str]) -> str:
    """Return that nobody knows the order of classes where they are words by alphabet, "" where there is an order."""
    words = any(not name.lstrip("-").replace(".", "", 1).isdigit() for name in classes)
    if not words or list(classes) != sorted(classes):
        return ""
    return f"the order of the classes {shown(', '.join(classes))} is taken from the alphabet"


def _named_objective(name: str) -> Objective:
    if name not in OBJECTIVES:
        raise unknown("loss", name, OBJECTIVES)
    return OBJECTIVES[name]


def _with_settings(table: dict[str, Any]) -> Objective:
    """An objective from its name and the settings of its loss."""
    name = table.pop("name", None)
    if not isinstance(name, str):
        raise SettingError(f"loss must be a table with a name, like {{ name = 'classification' }}, got {shown(table)}")
    objective = _named_objective(name)
    # `on_logits` wraps losses, and only the wrapped function names its settings
    parameters = inspect.signature(inspect.unwrap(objective.loss)).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
    for setting, value in table.items():
        if setting not in names:
            raise unknown(f"setting of loss {name!r} called", setting, names)
        allowed, fits = _SETTINGS[setting]
        if not fits(value):
            raise SettingError(f"{setting} of loss {name!r} must be {allowed}, got {shown(value)}")
    return replace(objective, loss=functools.partial(objective.loss, **table)) if table else objective


def _is_number(value: object) -> bool:
    # bool is a subclass of int: without it `true` would pass for 1
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _are_weights(value: object) -> bool:
    return (
        isinstance(value, list | tuple) and bool(value) and all(_is_number(weight) and weight >= 0 for weight in value)
    )


_WEIGHTS = "a list of numbers of at least 0"
_SETTINGS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "label_smoothing": ("a number in [0, 1)", lambda value: _is_number(value) and 0 <= value < 1),
    "class_weights": (f"{_WEIGHTS}, one for each class", _are_weights),
    "positive_weights": (f"{_WEIGHTS}, one for each label", _are_weights),
    "delta": ("a number above 0", lambda value: _is_number(value) and value > 0),
}


def _for_targets(targets: Tree, loss: Loss | None) -> Objective:
    """The objective that targets mean, perhaps with a loss of the user's own."""
    if loss is not None and not callable(loss):
        raise SettingError(
            f"loss must be a function of (outputs, targets) or the name of an objective, got {shown(loss)}"
        )
    if not isinstance(targets, Tensor):
        if loss is None:
            raise SettingError(
                f"targets of several tensors ({described(targets)}) need a loss: name one, such as 'survival', or pass "
                "a function of (outputs, targets)"
            )
        return Objective("custom", loss, {}, higher_is_better=False)
    objective = OBJECTIVES["regression" if targets.dtype.is_floating_point else "classification"]
    if loss is None:
        return OBJECTIVES["classification"] if is_one_hot(targets) else objective
    return Objective("custom", loss, objective.metrics, objective.higher_is_better)


def _check_classes(name: str, targets: Tree) -> None:
    whole = (torch.int64, torch.int32, torch.uint8, torch.int16, torch.int8)
    if not isinstance(targets, Tensor) or (targets.dtype not in whole and not is_one_hot(targets)):
        got = targets.dtype if isinstance(targets, Tensor) else described(targets)
        raise SettingError(f"{name} needs whole-number targets, got {got}: pass loss='regression'")
    if name == "ordinal" and targets.dim() != 1:
        raise SettingError(f"ordinal needs one class number of each row, got rows {list(targets.shape[1:])}")
    if name not in ("classification", "ordinal") and targets.dim() != 2:
        raise SettingError(f"{name} needs targets [batch, length], got rows {list(targets.shape[1:])}")


def accumulates(metric: object) -> bool:
    """Return whether a metric accumulates examples and is computed at the end, as torchmetrics objects are."""
    return all(hasattr(metric, name) for name in ("update", "compute", "reset"))


def named_metrics(metrics: Mapping[str, Any] | Sequence[str | Mapping[str, Any]], objective: str) -> Mapping[str, Any]:
    """Metrics by name, looked up for an objective if only names are given, or tables of a name and settings."""
    if isinstance(metrics, Mapping):
        return metrics
    if isinstance(metrics, str):
        raise SettingError(f"metrics must be a list of names, got {shown(metrics)}: write metrics=[{shown(metrics)}]")
    return dict(_named_metric(metric, objective) for metric in metrics)


def _named_metric(metric: str | Mapping[str, Any], objective: str) -> tuple[str, Any]:
    """Return the name of a metric and the metric."""
    if isinstance(metric, Mapping):
        settings = dict(metric)
        name = settings.pop("name", None)
        if name not in _WITH_SETTINGS:
            raise unknown("metric with settings", name, _WITH_SETTINGS)
        try:
            return name, _WITH_SETTINGS[name](**settings)
        except SettingError:
            raise
        except (TypeError, ValueError):
            allowed = ", ".join(inspect.signature(_WITH_SETTINGS[name]).parameters)
            raise SettingError(f"metric {name} needs {allowed}, like pairs = [[0, 4]], got {shown(settings)}") from None
    if metric in _WITH_SETTINGS:
        raise SettingError(f"metric {metric} needs settings: write {{ name = {metric!r}, pairs = [[0, 4]] }}")
    if metric not in METRICS:
        raise unknown("metric", metric, METRICS, ELSEWHERE)
    return metric, _MEANT.get(objective, METRICS).get(metric, METRICS[metric])


def _higher_is_better(metrics: Mapping[str, Any]) -> bool:
    """Return whether higher values of the first metric are better: not for losses and errors, else as it declares."""
    first = next(iter(metrics.values()), None)
    # a loss as a metric falls where the model gets better, whatever it is called
    falls = (None, *(objective.loss for objective in OBJECTIVES.values()))
    return not any(first is metric for metric in falls) and getattr(first, "higher_is_better", True) is not False


def has_value_for_each(metric: object) -> bool:
    """Return whether a metric is known to have a value for each row that no other row changes.

    One of the user's own may compare the rows that it is given, so that it is given those of one client.
    """
    measured = metric.metric if isinstance(metric, InUnit) else metric
    return not hasattr(metric, "update") and any(measured is known_metric for known_metric in METRICS.values())
