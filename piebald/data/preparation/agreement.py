"""The agreement: from the answers of clients to the preparation, the same in a simulation and in a federation.

ComBat: differences of location and scale between clients are taken out of columns of numbers.

Johnson, Li, Rabinovic 2007, "Adjusting batch effects in microarray expression data using empirical Bayes methods",
without covariates.  All that it needs of a client are moments of its columns, so nobody's rows leave
(Bostami et al. 2022, dCombat).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from piebald.core.errors import PiebaldError, SettingError
from piebald.core.moments import Floats, Moments, merged
from piebald.core.targets import IGNORED
from piebald.data.preparation import column_models
from piebald.data.preparation.answers import (
    CountsQuestion,
    KindsAnswer,
    KindsQuestion,
    NumbersAnswer,
    PowersQuestion,
    Question,
    ValuesQuestion,
    agreed_kinds,
    answer,
    date_forms,
    refuse_long,
    signed_logarithms,
    yeo_johnson,
)
from piebald.data.preparation.columns import are_classes, are_labels, classes_of, in_order, numbers_of
from piebald.data.preparation.preparation import Preparation, PrepareSettings
from piebald.data.preparation.tokens import text_column
from piebald.data.preparation.units import LEVELS as COMPARED
from piebald.data.preparation.units import Spread, units_at_sites
from piebald.data.preparation.written_forms import VALUES_LOG, common_units, warn_of_like_names, warn_of_unlike_classes

if TYPE_CHECKING:
    import pandas as pd


_CONVERGED, _STEPS = 1e-10, 10_000
_FEWEST_COLUMNS = 3  # whose effects have a distribution, from which the priors are taken

Lines = dict[str, dict[str, tuple[float, float]]]  # by client and column: a number x becomes slope x + offset


def harmonised(moments: Mapping[str, Sequence[Moments]], clients: Sequence[str]) -> Lines:
    """Return by client and column the slope and offset that give all clients one mean and deviation, shrunk.

    With three columns or more the effects of a client are shrunk towards those of its other columns (section 3.2 of
    Johnson et al.); with fewer they are taken out as they are.

    Args:
        moments: of each column, one for each client.
        clients: the names of the clients, in this order.

    Raises:
        SettingError: there is one client, or one with fewer than two numbers in a column.
    """
    names = list(moments)
    if len(clients) < 2:
        raise SettingError("harmonise = 'combat' compares clients, and there is one: leave it out")
    fields = [
        [getattr(one, field)[0] for one in moments[name]] for field in ("present", "mean", "scatter") for name in names
    ]
    count, mean, scatter = np.array(fields, dtype=np.float64).reshape(3, len(names), len(clients))
    if (count < 2).any():
        column, client = np.argwhere(count < 2)[0]
        raise SettingError(
            f"harmonise = 'combat' needs two numbers of each client in each column, and {clients[client]!r} has fewer "
            f"in {names[column]!r}: leave the column or the client out"
        )
    rows = count.sum(1, keepdims=True)
    grand = (count * mean).sum(1, keepdims=True) / rows
    pooled = np.sqrt(scatter.sum(1, keepdims=True) / rows)
    pooled = np.where(pooled > 0, pooled, 1.0)
    shift = (mean - grand) / pooled
    spread = scatter / (count - 1) / pooled**2
    spread = np.where(spread > 0, spread, 1.0)
    if len(names) >= _FEWEST_COLUMNS:
        for client in range(len(clients)):
            shift[:, client], spread[:, client] = _shrunk(count[:, client], shift[:, client], spread[:, client])
    slope = 1 / np.sqrt(spread)
    # from (x - grand) / pooled, less the shift and over the root of the spread, back to units of the column
    offset = grand - slope * (grand + pooled * shift)
    return {
        client: {name: (float(slope[j, i]), float(offset[j, i])) for j, name in enumerate(names)}
        for i, client in enumerate(clients)
    }


def _shrunk(count: Floats, location: Floats, spread: Floats) -> tuple[Floats, Floats]:
    """Return the posterior means of a client's effects in its columns, by iteration (equations 3.1 and 3.2)."""
    centre, width = location.mean(), location.var(ddof=1)
    middle, around = spread.mean(), spread.var(ddof=1)
    if not around > 0:  # all columns have one spread, so nothing is to be shrunk
        return (count * width * location + spread * centre) / np.maximum(count * width + spread, 1e-300), spread
    # the inverse gamma distribution with the mean and the variance of the client's spreads
    shape, rate = 2 + middle**2 / around, middle + middle**3 / around
    new_location, new_spread = location, spread
    for _ in range(_STEPS):
        before: tuple[NDArray[np.float64], NDArray[np.float64]] = new_location, new_spread
        new_location = (count * width * location + new_spread * centre) / (count * width + new_spread)
        squares = (count - 1) * spread + count * (location - new_location) ** 2
        new_spread = (rate + squares / 2) / (count / 2 + shape - 1)
        if max(np.abs(new_location - before[0]).max(), np.abs(new_spread - before[1]).max()) < _CONVERGED:
            break
    return new_location, new_spread


Ask = Callable[[Question], Sequence[Any]]
LEVELS = np.linspace(0.0, 1.0, 101)  # of the quantiles that ranks are read from
_MOST_RANGES = 256  # columns of which more than the median is asked for, as answers have a longest length
_RESOLUTION = 2.0**-25  # of the interval in which a median is looked for
_FURTHER = 4  # questions about columns whose quantiles lie nearer to one another than that
_EXPONENTS, _ZOOMS = 21, 7  # exponents in a question, and questions, each of which looks ten times closer
_CLOSEST = (-4.0, 4.0)


def agree(
    ask: Ask, settings: PrepareSettings, target: str | Sequence[str], classes: Sequence[str] | None,
    clients: Callable[[], Sequence[str]] = tuple,
) -> Preparation:  # fmt: skip
    """Return the preparation that clients agree on.

    Args:
        ask: asks all clients a question and returns their answers, in one order.
        settings: what is asked for.
        target: the column to predict, or several, which are numbers.
        classes: the names of the classes; None to ask for them, and to take targets as numbers where there are none.
        clients: returns the names of those who have answered, in their order.

    Raises:
        SettingError: a setting names a column that is not there, or no column is left.
    """
    ask, clients = _by_name(ask, clients)
    goals = [target] if isinstance(target, str) else list(target)
    of_loss = _target_scale(settings.scale, goals)
    settings = settings.model_copy(update={"scale": {k: v for k, v in settings.scale.items() if k not in goals}})
    kinds_of = ask(KindsQuestion(gaps=settings.gaps, target=classes is None and len(goals) == 1))
    kinds, left_out = agreed_kinds(kinds_of, settings.columns, settings.scale, settings.tokenizer)
    if classes is None:
        classes = _common_classes(kinds_of)
        warn_of_like_names(classes or (), f"target {goals[0]!r}: ", "classes")
        warn_of_unlike_classes({client: reply.classes or () for client, reply in zip(clients(), kinds_of)}, goals[0])  # noqa: B905
    scale = {column: scaling for column, scaling in settings.scale.items() if kinds.get(column) == "number"}
    # rows in one place have no client with a name
    units_by_client = {
        client: reply.units for client, reply in zip(clients() or map(str, range(len(kinds_of))), kinds_of, strict=True)
    }
    forms = {
        column: forms
        for column, kind in kinds.items()
        if kind == "date" and (forms := date_forms(column, units_by_client))
    }
    question = ValuesQuestion(
        kinds=kinds,
        forms=forms,
        scale=scale,
        gaps=settings.gaps,
        least_rows=settings.least_rows,
        # of labels, events and counts no moment is used
        targets=len(goals) if classes is None and not (len(goals) > 1 and of_loss == "none") else 0,
    )
    answers = ask(question)
    moments_of = {parsed: [reply.numbers[parsed].moments for reply in answers] for parsed in answers[0].numbers}
    of_targets = {
        goal: [reply.targets[index] for reply in answers] for index, goal in enumerate(goals[: question.targets])
        if all(reply.targets for reply in answers)
    }  # fmt: skip
    moments_of_targets = {goal: [reply.moments for reply in replies] for goal, replies in of_targets.items()}
    numeric = {column: moments_of[column] for column, kind in kinds.items() if kind == "number"}
    units = common_units({**numeric, **moments_of_targets}, units_by_client)
    replies_of = {column: [reply.numbers[column] for reply in answers] for column in numeric} | of_targets
    by_client = {column: dict(zip(units_by_client, (Spread.of_moments(reply.moments, reply.quantiles) for reply in of),
                                  strict=True))
                 for column, of in replies_of.items() if len(of) == len(units_by_client)}  # fmt: skip
    for sentence in units_at_sites(by_client):
        logging.getLogger(VALUES_LOG).warning("%s", sentence)
    lines: Lines = {}
    if settings.harmonise is not None:
        numbers = [column for column, kind in kinds.items() if kind == "number"]
        if unlike := next((column for column in numbers if settings.scale.get(column, "standard") != "standard"), None):
            raise SettingError(f"harmonise is for standard scores, got scale = {scale[unlike]!r} of column {unlike!r}")
        lines = harmonised({column: moments_of[column] for column in numbers}, clients())
        for column in numbers:
            each = zip(clients(), moments_of[column], strict=True)
            moments_of[column] = [_on_line(moments, *lines[client][column]) for client, moments in each]
    # merged after the change, so that mean and deviation are those of harmonised numbers
    pooled = {parsed: merged(moments) for parsed, moments in moments_of.items()}
    columns: list[column_models.Column] = []
    learnt = _Numbers(ask, question, pooled, {*next(iter(lines.values()), {})})
    for column, kind in kinds.items():
        if kind == "category":
            named = sorted({word for reply in answers for word in reply.categories[column].names})
            if not named:
                left_out[column] = f"no value is in {settings.least_rows} rows"
            elif len(named) > column_models.MOST_CATEGORIES:
                left_out[column] = f"{len(named):,} categories"
            else:
                columns.append(column_models.CategoryColumn(
                    name=column, categories=named, coding="one-hot" if len(named) <= settings.one_hot else "embedding",
                    gaps=any(reply.categories[column].gaps for reply in answers),
                    # a category of one client may be too rare at another, whose rows have it nevertheless
                    rare=any(reply.categories[column].others for reply in answers),
                ))  # fmt: skip
        elif kind == "text":
            assert settings.tokenizer is not None
            assert settings.length is not None
            columns.append(text_column(column, settings.tokenizer, settings.length))
        elif kind == "boolean":
            moments = pooled[column]
            true = round(float(moments.mean[0] * moments.present[0]))
            columns.append(column_models.BooleanColumn(
                # a tie is false, as `SimpleImputer` takes the smaller of two values that are as frequent
                name=column, gaps=bool(moments.missing[0]), common=2 * true > int(moments.present[0])
            ))  # fmt: skip
        elif kind == "date":
            prefix = f"{column}: "
            parts: dict[Any, column_models.Numbers] = {
                part.removeprefix(prefix): numbers for part, numbers in learnt.items() if part.startswith(prefix)
            }
            columns.append(column_models.DateColumn(
                name=column, gaps=bool(pooled[f"{column}: days"].missing[0]), forms=forms.get(column, []), values=parts
            ))  # fmt: skip
        else:
            columns.append(column_models.NumericColumn(
                name=column, gaps=bool(pooled[column].missing[0]), unit=units[column], values=learnt[column]
            ))  # fmt: skip
    return Preparation(
        columns=columns, target=_target(goals, classes, moments_of_targets, of_loss), left_out=left_out,
        gaps=settings.gaps, least_rows=settings.least_rows, cleaning=settings.cleaning,
        harmonised={client: {name: list(line) for name, line in of.items()} for client, of in lines.items()},
    )  # fmt: skip


Scaling = Literal["standard", "none"] | None


def _target(
    names: Sequence[str], classes: Sequence[str] | None, moments: Mapping[str, Sequence[Moments]], scale: Scaling
) -> column_models.ClassTarget | column_models.NumberTarget | None:
    """Return what is agreed of the columns to predict, None where no client told anything of them."""
    if classes is not None:
        refuse_long(classes, f"column {names[0]!r}: the class", "shorten it")
        return column_models.ClassTarget(name=names[0], classes=list(classes))
    if scale == "none" and (moments or len(names) > 1):
        first, *others = (column_models.NumberTarget(name=name, scale=scale) for name in names)
    elif moments:
        pooled = {name: merged(of_clients) for name, of_clients in moments.items()}
        first, *others = (
            column_models.NumberTarget(name=name, mean=float(of.mean[0]), deviation=_deviation(of), scale=scale)
            for name, of in pooled.items()
        )
    else:
        return None
    return first.model_copy(update={"others": others})


def _target_scale(scale: Mapping[str, str], names: Sequence[str]) -> Scaling:
    """Return how targets of numbers are scaled, None where that follows from the loss."""
    named = list(dict.fromkeys(scale[name] for name in names if name in scale))
    if len(named) > 1:
        raise SettingError(f"scale in [prepare] must be the same for all targets, got {', '.join(named)}")
    if named in ([], ["standard"], ["none"]):
        return cast(Scaling, next(iter(named), None))
    raise SettingError(
        f"scale of the target {names[0]!r} in [prepare] must be 'standard', or 'none' for a loss in its own unit, got "
        f"{named[0]!r}: change the column itself, or take another one"
    )


def are_labels_alone(
    names: Sequence[str], numbers: Sequence[Floats], clients: Sequence[str], counts: bool = False
) -> bool:
    """Return whether targets that are predicted together are labels, and warn of clients who code some otherwise.

    Args:
        names: of their columns [k].
        numbers: of each client [n, k].
        clients: the names of the clients.
        counts: whether they are a count and an exposure, whose whole numbers are no labels.
    """
    for index, name in enumerate(() if counts else names):
        values = {client: np.unique(rows[:, index]) for client, rows in zip(clients, numbers, strict=True)}
        if all(are_classes(own) for own in values.values()):
            coded = {
                client: [f"{x:g}" for x in own[np.isfinite(own) & (own != IGNORED)]] for client, own in values.items()
            }
            warn_of_unlike_classes(coded, name)
    return all(are_labels(rows) for rows in numbers)


def fitted(frame: pd.DataFrame, target: str | None = None, **settings: Any) -> Preparation:
    """Return the preparation of rows in one place, as one client agrees on it with itself.

    Args:
        frame: the training rows.
        target: the column to predict.
        settings: those of `PrepareSettings`.
    """
    wanted, table, y, classes = PrepareSettings(**settings), frame, None, None
    if target is not None:
        table, series = frame.drop(columns=target), frame[target]
        classes = classes_of(series, wanted.gaps)
        y = numbers_of(series, wanted.gaps) if classes is None else None
    return agree(lambda question: [answer(question, table, y, classes)], wanted, target or "", None)


def _by_name(ask: Ask, clients: Callable[[], Sequence[str]]) -> tuple[Ask, Callable[[], Sequence[str]]]:
    """Return both in the order of the clients' names, so that sums do not depend on who came first."""

    def ordered(question: Question) -> Sequence[Any]:
        answers, names = ask(question), clients()
        return [answers[index] for index in sorted(range(len(answers)), key=names.__getitem__)] if names else answers

    return ordered, lambda: sorted(clients())


class Unanswered(PiebaldError):
    """A question about counts has no answer from all clients, as where one hides small numbers of rows."""


def _common_classes(answers: Sequence[KindsAnswer]) -> list[str] | None:
    """Return the classes of all clients in the order of their names, None where targets are numbers.

    Raises:
        SettingError: targets are classes at some clients only.
    """
    classes = [reply.classes for reply in answers]
    if all(names is None for names in classes):
        return None
    if any(names is None for names in classes):
        raise SettingError(
            "targets must be classes at all clients or amounts at all: set regression, or name all classes, in [data]"
        )
    return in_order(name for reply in classes for name in reply or ())


def _on_line(moments: Moments, slope: float, offset: float) -> Moments:
    """Return the moments of numbers after a change by a slope and an offset."""
    return replace(moments, mean=slope * moments.mean + offset, scatter=slope**2 * moments.scatter)


class _Numbers(dict[str, column_models.Numbers]):
    """What is learnt of columns of numbers, by the names of parsed columns."""

    def __init__(
        self, ask: Ask, question: ValuesQuestion, pooled: Mapping[str, Moments], changed: Collection[str]
    ) -> None:
        # of harmonised columns, which each client changes in its own way, no counts are asked for
        truths = {name for name, kind in question.kinds.items() if kind == "boolean"}
        names = [name for name in pooled if name not in truths]
        ranked = {name for name in names if question.scale.get(name) == "rank"}
        usual = np.array(COMPARED if len(names) <= _MOST_RANGES else [0.5])
        levels = {name: LEVELS if name in ranked else usual for name in names if name not in changed}
        plain = _unlogged(ask, question, pooled, names)
        order_statistics = quantiles(
            lambda limits: ask(
                CountsQuestion(kinds=question.kinds, forms=question.forms, gaps=question.gaps, thresholds=limits)
            ),
            plain,
            levels,
        )
        order_statistics |= {name: _Intervals(pooled[name], np.array([0.5])).values() for name in changed}
        super().__init__()
        ranges = dict[str, list[float]]()
        for name in names:
            values, error = order_statistics[name]
            scale: column_models.Scale = question.scale.get(name, "standard")
            # the middle is the level 0.5, of 101 levels as of one
            median = float(values[len(values) // 2])
            low, high = float(values[len(values) // 20]), float(values[-1 - len(values) // 20])
            # without counts the intervals are as wide as the column
            ranges[name] = [low, high] if error < high - low else []
            if scale in ("standard", "log"):
                # the logarithm keeps the order, so that of the median is the median of the logarithms
                filled = _filled(pooled[name], math.log1p(median) if scale == "log" else median)
                self[name] = _scores(median, filled, error, scale=scale, range=ranges[name])
            elif scale == "rank":
                self[name] = column_models.Numbers(
                    median=median, scale=scale, quantiles=values.tolist(), error=error, range=ranges[name]
                )
            elif scale == "none":
                self[name] = column_models.Numbers(median=median, scale=scale, error=error, range=ranges[name])
        powers = {name: order_statistics[name] for name in names if question.scale.get(name) == "power"}
        for name, (exponent, step, moments) in _powers(ask, question, pooled, powers).items():
            values, error = powers[name]
            about: dict[str, Any] = {"scale": "power", "exponent": exponent, "range": ranges[name]}
            self[name] = _scores(float(values[len(values) // 2]), moments, max(step, error), **about)
        for name in [name for name in self if ": " in name and name not in question.kinds]:
            if not name.endswith(": days") and self[name].deviation == 1.0 and not pooled[name].scatter[0]:
                del self[name]  # a part of the date that is the same in all rows, such as the hour


def _unlogged(
    ask: Ask, question: ValuesQuestion, pooled: Mapping[str, Moments], names: Sequence[str]
) -> dict[str, Moments]:
    """Return moments from which intervals of order statistics follow: those of logarithms are asked for as they are."""
    logged = {name for name in names if question.scale.get(name) == "log"}
    if not logged:
        return {name: pooled[name] for name in names}
    plain = ask(question.model_copy(update={"scale": {}, "kinds": {name: "number" for name in logged}}))
    return {name: merged(reply.numbers[name].moments for reply in plain) if name in logged else pooled[name]
            for name in names}  # fmt: skip


def _scores(median: float, moments: Moments, error: float, **fields: Any) -> column_models.Numbers:
    return column_models.Numbers(
        median=median, mean=float(moments.mean[0]), deviation=_deviation(moments), error=error, **fields
    )


def _filled(moments: Moments, filler: float) -> Moments:
    """Return the moments of a column after gaps are filled in."""
    gaps = int(moments.missing[0])
    return moments.merge(NumbersAnswer(present=gaps, missing=0, mean=filler, scatter=0.0).moments)


def _deviation(moments: Moments, column: int = 0) -> float:
    """Return the deviation as `StandardScaler` has it: divided by the number of rows, and 1 for a constant column."""
    rows, mean = int(moments.present[column]), float(moments.mean[column])
    variance = float(moments.scatter[column]) / max(rows, 1)
    epsilon = np.finfo(np.float64).eps
    # the bound of scikit-learn's `_is_constant_feature`: a variance that rounding alone explains
    constant = variance <= rows * epsilon * variance + (rows * mean * epsilon) ** 2
    return 1.0 if constant else math.sqrt(variance)


def quantiles(
    count: Callable[[dict[str, list[float]]], Sequence[Any]], moments: Mapping[str, Moments],
    levels: Mapping[str, Floats],
) -> dict[str, tuple[Floats, float]]:  # fmt: skip
    """Return quantiles of each column, and the most by which they may be off, from counts below thresholds.

    Order statistics lie within a number of deviations of the mean that their rank allows (Wolkowicz, Styan 1979), the
    median within one.  Each question divides the interval of an order statistic, until it has the stated width; of the
    numbers in there the one with the fewest digits is taken, so that columns with few digits have exact quantiles.

    Args:
        count: asks all clients for their counts of numbers that are at most thresholds, by column.
        moments: of each column.
        levels: of the quantiles of each column, in [0, 1].
    """
    intervals: dict[str, _Intervals] = {}
    for name, shares in levels.items():
        intervals[name] = _Intervals(moments[name], shares)
    # 2 * 101 * 8 thresholds stay within the 2048 of a question; a few levels may have more parts and so fewer questions
    parts = 8 if any(len(shares) == len(LEVELS) for shares in levels.values()) else 32
    steps = math.ceil(math.log(1 / _RESOLUTION, parts))
    for step in range(steps + _FURTHER):
        asked = {name: interval for name, interval in intervals.items() if step < steps or interval.is_open}
        if not asked:
            break
        limits = {name: interval.thresholds(parts) for name, interval in asked.items()}
        try:
            answers = count({name: thresholds.ravel().tolist() for name, thresholds in limits.items()})
        except Unanswered as error:
            # only ranks have so few parts
            if parts == 8:
                raise SettingError(f"ranks need counts of each client: {error}") from None
            break  # the middle of an interval, whose ends are known
        for name, interval in asked.items():
            counts = np.sum([reply.counts[name] for reply in answers], axis=0)
            interval.narrow(limits[name], counts.reshape(limits[name].shape))
    return {name: interval.values() for name, interval in intervals.items()}


class _Intervals:
    """Intervals that hold the two order statistics around each quantile of a column.

    Of ranks, these are of the column with gaps filled in: its median lies in the middle as often as there
    are gaps.
    """

    def __init__(self, moments: Moments, shares: Floats) -> None:
        rows, mean = int(moments.present[0]), float(moments.mean[0])
        gaps = int(moments.missing[0]) if len(shares) == len(LEVELS) else 0
        deviation = math.sqrt(float(moments.scatter[0]) / rows) if rows else 0.0
        positions = max(rows + gaps - 1, 0) * shares
        self._fraction = positions - np.floor(positions)
        ranks, half = np.stack([np.floor(positions), np.ceil(positions)]).astype(np.int64), (rows + 1) // 2
        self._filled = (ranks >= half) & (ranks < half + gaps)
        middle = np.array([[(rows - 1) // 2], [rows // 2]])
        self._ranks = np.where(ranks < half, ranks, np.where(self._filled, middle, ranks - gaps))
        after = np.maximum(rows - self._ranks, 1)  # numbers that are at least as large
        reach = deviation * np.sqrt(np.maximum(np.maximum((after - 1) / (self._ranks + 1), self._ranks / after), 1.0))
        # a little more, for what rounding takes away
        reach = reach * (1 + 1e-9) + abs(mean) * 1e-12
        self._low, self._high = mean - reach, mean + reach
        self._narrowed = False

    @property
    def is_open(self) -> bool:
        """True if several quantiles are not told apart, as where one huge number makes the interval of all."""
        values, error = self.values()
        return 1 < len(values) < len(LEVELS) and not error < values[-1] - values[0]

    def thresholds(self, parts: int) -> Floats:
        """Return what divides each interval into equal parts, with its end [2, quantiles, parts]."""
        steps = (self._high - self._low)[..., None] * np.arange(1, parts + 1) / parts
        return np.asarray(self._low[..., None] + steps)

    def narrow(self, thresholds: Floats, counts: Floats) -> None:
        """Take the part of each interval in which its order statistic is."""
        self._narrowed = True
        reached = counts > self._ranks[..., None]
        index = np.where(reached.any(-1), np.argmax(reached, axis=-1), reached.shape[-1] - 1)[..., None]
        edges = np.concatenate([self._low[..., None], thresholds], axis=-1)
        self._low = np.take_along_axis(edges, index, -1)[..., 0]
        self._high = np.take_along_axis(thresholds, index, -1)[..., 0]

    def values(self) -> tuple[Floats, float]:
        """Return the quantiles, linear between order statistics, and the most by which they are off."""
        simple = np.vectorize(simplest, otypes=[float])
        # before any count is known, the mean stands for the median
        around = simple(self._low, self._high) if self._narrowed else (self._low + self._high) / 2
        around[self._filled] = around[:, len(self._fraction) // 2].mean()  # the median of the values that are there
        below, above = around
        # each quantile is rounded on its own and may fall below the one before, which `Numbers` refuses
        return np.maximum.accumulate(below + (above - below) * self._fraction), float((self._high - self._low).max())


def simplest(low: float, high: float) -> float:
    """Return the number above `low` and up to `high` that has the fewest decimal digits.

    Examples:
        >>> simplest(61.2999999, 61.3000001), simplest(-0.4, 0.2), simplest(2.0, 2.0)
        (61.3, 0.0, 2.0)
    """
    if not low < high:
        return high
    for digits in range(-math.ceil(math.log10(max(abs(low), abs(high), 1e-300))), 17 + 300):
        # in decimal, since powers of 1 / 10 are no floats
        rounded = float(round(Decimal(high).scaleb(digits).to_integral_value("ROUND_FLOOR")) * Decimal(10) ** -digits)
        if low < rounded <= high:
            return rounded
        # float64 has 17 digits that count
        if digits > 20 - math.log10(max(abs(high), 1e-300)):
            break
    return high


def _powers(
    ask: Ask, question: ValuesQuestion, pooled: Mapping[str, Moments], medians: Mapping[str, tuple[Floats, float]]
) -> dict[str, tuple[float, float, Moments]]:
    """Return the exponent of greatest likelihood of each column, how near it is, and the moments after the change.

    The likelihood is that of Yeo and Johnson (2000, section 4.1), as in scikit-learn's PowerTransformer.
    """
    spans = dict.fromkeys(medians, _CLOSEST)
    exponent_of: dict[str, tuple[float, float, Moments]] = {}
    for _ in range(_ZOOMS if medians else 0):
        exponents = {name: np.linspace(*span, _EXPONENTS).tolist() for name, span in spans.items()}
        answers = ask(PowersQuestion(gaps=question.gaps, exponents=exponents))
        for name, tried in exponents.items():
            values = medians[name][0]
            gaps, filler = int(pooled[name].missing[0]), np.array([float(values[len(values) // 2])])
            logarithms = sum(reply.logarithms[name] for reply in answers) + gaps * signed_logarithms(filler)
            # a constant column has no likelihood, and keeps the exponent 0
            best = (-math.inf, 0.0, pooled[name])
            for index, exponent in enumerate(tried):
                moments = _filled(
                    merged(reply.moments[name][index].moments for reply in answers),
                    float(yeo_johnson(filler, exponent)[0]) if gaps else 0.0,
                )
                rows = int(moments.present[0])
                variance = float(moments.scatter[0]) / max(rows, 1)
                likelihood = (exponent - 1) * logarithms - (rows / 2 * math.log(variance) if variance > 0 else math.inf)
                best = max(best, (likelihood, exponent, moments), key=lambda one: one[0])
            step = (tried[-1] - tried[0]) / (_EXPONENTS - 1)
            spans[name], exponent_of[name] = (best[1] - step, best[1] + step), (best[1], step, best[2])
    return exponent_of
