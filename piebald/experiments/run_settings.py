"""The settings of a run: one model, from which its keywords, file, record, help and schema come.

A setting is a line of `RunSettings` or of one of its sections, one in its docstring, and one among the keywords: in
`SearchKeywords` if all runs of a search may have it, in `ComparedKeywords` if all runs of a comparison may, or else in
`RunKeywords`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ParamSpec, Self, TypeVar, get_type_hints

from annotated_types import MinLen
from pydantic import AfterValidator, InstanceOf, PrivateAttr, ValidationError
from pydantic.json_schema import SkipJsonSchema
from typing_extensions import TypedDict

from piebald.contracts import Component, Split
from piebald.core.arguments import Count, Fraction, NotNegative, Positive, Seed, Whole, checked, sentence
from piebald.core.errors import SettingError, shown
from piebald.core.objective import accumulates
from piebald.core.references import USERS, Text
from piebald.data.measures.heterogeneity import Measure
from piebald.experiments.sections import Section
from piebald.methods.choice.final_models import Keep
from piebald.report.callbacks import Tracker
from piebald.server import StoppingCriteria
from piebald.server.result_checks import LONGEST_STEP
from piebald.settings.plugins import read

P = ParamSpec("P")
R = TypeVar("R")


def _computing(metrics: Mapping[str, Any]) -> Mapping[str, Any]:
    for name, metric in metrics.items():
        if not callable(metric) and not accumulates(metric):
            raise ValueError(f"must be a list of names, or a table of functions, got {shown(metric)} for {name!r}")
    return metrics


Loss = Text | Mapping[str, Any] | SkipJsonSchema[Callable[..., Any]] | None
_OwnMetrics = SkipJsonSchema[Annotated[Mapping[str, Any], AfterValidator(_computing)]]
Metrics = Annotated[Sequence[Text | Mapping[str, Any]], MinLen(1)] | _OwnMetrics | None
RuntimeChoice = Text | InstanceOf[Component] | Mapping[str, Any]
Stop = Mapping[str, Any] | InstanceOf[StoppingCriteria] | None
Trackers = Sequence[Text | InstanceOf[Tracker] | Mapping[str, Any]]
Unseen = Whole | NotNegative | Sequence[str]

# A run in a folder may differ in these from one that is asked for, and is still that run.
_MAY_DIFFER = frozenset(
    ("seed", "runtime", "label", "loss", "metrics", "per_class", "checkpoint_every", "trackers", "measure")
)


class ObjectiveKeywords(TypedDict, total=False):
    """The settings of a run that are given again where it goes on (`piebald.resume`), since they may be functions."""

    loss: Loss
    metrics: Metrics


class SearchKeywords(ObjectiveKeywords, total=False):
    """The settings of a run that all runs of a search may have (`piebald.tune`, `piebald.advise`)."""

    runtime: RuntimeChoice
    evaluate_clients: Count | None
    longest_step: Positive
    max_examples: Count | None
    max_weight: Fraction
    trackers: Trackers


class ComparedKeywords(SearchKeywords, total=False):
    """The settings of a run that all runs of a comparison may have (`piebald.compare`)."""

    rounds: Count | None
    stop: Stop
    evaluate_every: Whole
    evaluate_split: Split
    per_class: bool | None
    threshold: Text | None
    keep: Keep | Mapping[str, Any]
    unseen: Unseen
    checkpoint_every: Count | None
    measure: Measure


class RunKeywords(ComparedKeywords, total=False):
    """The settings of a run (`piebald.run`)."""

    seed: Seed
    label: str | None


class Evaluation(Section):
    """Evaluation of models during a run.

    Attributes:
        every: server steps between two evaluations, 0 for none.
        clients: the number of clients to evaluate on, all by default.
        split: the split to evaluate on.
        per_class: count each client's rows by class and by what its model takes them for, at the end, see
            `Run.class_errors`; by default in simulations of at most 1,000 clients and 100 classes.
        metrics: names of metrics ("accuracy", "auc"), or "module:name", or tables of a name and settings, the main
            metric first; in Python also a mapping from names to functions (outputs, targets) -> [batch] or torchmetrics
            objects; chosen by the targets by default.
        threshold: of two classes, score each client's model at the end beside a half at the threshold that is best on
            the client's validation rows by "accuracy", "balanced_accuracy" or "f1", or that leaves a least share,
            "sensitivity=0.9" or "specificity=0.9"; one for all clients with "pooled f1"; see `Run.at_thresholds`.
    """

    every: Whole = 1
    clients: Count | None = None
    split: Split = "test"
    per_class: bool | None = None
    metrics: Metrics = None
    threshold: Text | None = None


class RunSettings(Section):
    """The settings of a run besides its recipe, clients and model.

    They are the keywords of `piebald.run` and, as far as they fit all their runs, those of `compare`, `tune` and
    `advise`; the keys of an experiment file; and what the run folder records.  The settings of [evaluate] are keywords
    as `evaluate_every`, `evaluate_clients` and `evaluate_split`, the others under their own names.

    Attributes:
        rounds: server steps; 10 by default, or no limit where `stop` is given.
        stop: other limits, e.g. {"seconds": 3600, "target": 0.9}, see `server.StoppingCriteria`; the first one that is
            reached ends the run.
        seed: the seed of all randomness.
        runtime: where the run is computed: a runtime's name or table; in Python also a value, e.g.
            ``Simulator(engine="vmapped")``.
        loss: the name of an objective ("classification", "ordinal", "regression", "l1", "huber", "multilabel",
            "token_classification", "language_modelling", "survival", "counts", "model"), a table of its name and the
            settings of its loss, or "module:name" for a function (outputs, targets) -> [batch], which Python may give
            as it is; chosen by the targets by default.
        evaluate: when, where and by what models are scored.
        keep: the models that the run ends with: those after the "last" server step; the "best" ones, from the evaluated
            version with the lowest loss on all clients' validation rows; or "best_for_each" client the last global
            model, that of its cluster, its personal, a fine-tuned, a mixed, or a local one trained alone with the same
            work, whichever is best on its own validation rows by more than luck, see `Run.choices`; or "knn_per", which
            interpolates each client's model with its own nearest rows (`choice.KnnPer`), or its table with settings.
        unseen: a number of clients, a share of them, or their names: they are held out until the end, and the models
            are then adapted to each of them, see `adapt` and `Run.newcomers`.
        checkpoint_every: server steps between checkpoints; by default as often as costs at most 2 % of the run's time,
            and after every step where lost work cannot be repeated (a real federation).
        measure: heterogeneity measures to keep in the run folder: "data" for measures of data in memory
            (`partition.survey`), "weights" for weight divergence after one epoch as well (`heterogeneity.diverge`),
            or "none".
        label: the run's name in tables, the recipe's name by default.
        longest_step: an update is left out of its step if its norm exceeds this many times the model's.
        max_examples: the most rows that a client counts, no limit by default.
        max_weight: the largest share of one update in a step, in (0, 1].
        trackers: experiment trackers, each a name ("tensorboard", "mlflow", "wandb") or a table with a kind; kept with
            the run, so that a resumed run goes on with them.
    """

    rounds: Count | None = None
    stop: Stop = None
    seed: Seed = 0
    runtime: RuntimeChoice = "simulator"
    loss: Loss = None
    evaluate: Evaluation = Evaluation()
    keep: Keep | Mapping[str, Any] = "last"
    unseen: Unseen = 0
    checkpoint_every: Count | None = None
    measure: Measure = "data"
    label: str | None = None
    longest_step: Positive = LONGEST_STEP
    max_examples: Count | None = None
    max_weight: Fraction = 1.0
    trackers: Trackers = []  # noqa: RUF012 - a pydantic field

    _experiment: Mapping[str, Any] | None = PrivateAttr(default=None)

    @classmethod
    def of_keywords(cls, keywords: Mapping[str, Any], experiment: Mapping[str, Any] | None = None) -> Self:
        """Check settings that are given by keyword.

        Args:
            keywords: values of `RunKeywords`.
            experiment: plain values kept with the run, from which the command line rebuilds clients and model.
        """
        table: dict[str, Any] = {}
        for name, value in keywords.items():
            *sections, field = KEYS[name]
            place = table.setdefault(sections[0], {}) if sections else table
            place[field] = value
        try:
            settings = cls.model_validate(table)
        except ValidationError as error:
            raise SettingError(sentence(error, "run", cls.model_fields)) from None
        settings._experiment = experiment
        return settings

    @classmethod
    def of_call(cls, keywords: Mapping[str, Any], experiment: Mapping[str, Any] | None = None) -> Self:
        """Check the keywords of a call in Python, whose author may name modules, see `of_keywords`."""
        return cls.of_keywords(marked(keywords), experiment)

    @classmethod
    def of_folder(cls, meta: Mapping[str, Any], objective: Mapping[str, Any]) -> Self:
        """Read the settings of the run in a folder.

        Args:
            meta: what the folder says of its run.
            objective: loss and metrics, which are no plain values, as the user gives them again.
        """
        recorded = {**meta, **dict(zip(_TRIPLE, meta["evaluate"], strict=True))}
        recorded |= {name: value for name, value in objective.items() if value}
        # a setting that is not recorded was added to Piebald after this run
        given = {name: recorded[name] for name in KEYS if recorded.get(name) is not None}
        return cls.of_keywords(given, meta.get("settings"))

    @property
    def experiment(self) -> Mapping[str, Any] | None:
        """The experiment that the run belongs to, as plain values; None for a run that was started in Python."""
        return self._experiment

    def keywords(self, names: type[Any] = RunKeywords) -> dict[str, Any]:
        """Return these settings as keywords, those of one of the typed dictionaries above."""
        return {name: self.value(name) for name in names.__annotations__}

    def length(self) -> tuple[int | None, StoppingCriteria | None]:
        """Return the number of rounds and the stopping criteria; ten rounds if neither is given."""
        criteria = StoppingCriteria(**self.stop) if isinstance(self.stop, Mapping) else self.stop
        return (10 if self.rounds is None and criteria is None else self.rounds), criteria

    def record(self) -> dict[str, Any]:
        """Return the settings as plain values for the run folder, those of [evaluate] without a name of their own
        together.
        """
        rounds, stop = self.length()
        plain = {name: _plain(self.value(name)) for name in KEYS if name not in _TRIPLE}
        if isinstance(self.evaluate.metrics, Mapping):  # functions and objects
            plain["metrics"] = None
        limits = None if stop is None else stop.model_dump(exclude_none=True)
        experiment = None if self.experiment is None else dict(self.experiment)
        together = [self.value(name) for name in _TRIPLE]
        return {**plain, "rounds": rounds, "stop": limits, "evaluate": together, "settings": experiment}

    def repeated(self) -> dict[str, Any]:
        """Return the part of the record in which a run that is gone on with must agree."""
        return {name: value for name, value in self.record().items() if name not in {*_MAY_DIFFER, "settings"}}

    def value(self, name: str) -> Any:
        """Return a setting by its keyword."""
        value: Any = self
        for word in KEYS[name]:
            value = getattr(value, word)
        return value


def _keys() -> dict[str, tuple[str, ...]]:
    """Return the key of each keyword in an experiment file."""
    keys: dict[str, tuple[str, ...]] = {}
    for name, info in RunSettings.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            inner = info.annotation.model_fields
            keys |= {
                field if field in RunKeywords.__annotations__ else f"{name}_{field}": (name, field) for field in inner
            }
        else:
            keys[name] = (name,)
    return keys


KEYS = _keys()
_TRIPLE = ("evaluate_every", "evaluate_clients", "evaluate_split")  # as folders record them, in one list


def marked(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of a call in Python with what may name code marked as its user's."""
    values: dict[str, Any] = USERS.mark(dict(keywords))
    return values | {name: read(values[name], USERS) for name in ("runtime", "trackers") if name in values}


def _plain(value: Any) -> Any:
    """Return a setting as plain values; None for functions, which no folder keeps."""
    if isinstance(value, Component):
        return value.table()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(entry) for entry in value]
    return None if callable(value) else value


def takes(keywords: type[Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Check the arguments of a function, see `arguments.checked`, with settings of a run among them.

    Args:
        keywords: the settings that it takes as keywords, one of the typed dictionaries above; its signature shows them.
    """
    hints, usual = get_type_hints(keywords, include_extras=True), RunSettings()

    def settings(types: Mapping[str, Any]) -> list[inspect.Parameter]:
        kind = inspect.Parameter.KEYWORD_ONLY
        return [inspect.Parameter(n, kind, default=usual.value(n), annotation=types[n]) for n in KEYS if n in hints]

    def register(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        own = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
        function.__signature__ = signature.replace(parameters=[*own, *settings(hints)])  # type: ignore[attr-defined]
        call = checked(function)
        # as they are written: what the names of types stand for is long
        written = {name: reference.__forward_arg__ for name, reference in keywords.__annotations__.items()}
        call.__signature__ = signature.replace(parameters=[*own, *settings(written)])  # type: ignore[attr-defined]
        return call

    return register
