"""Clients' columns as the numbers that trees see: gaps stay gaps, and text has a column for each category."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from piebald.contracts import Clients, HoldsRows, Split
from piebald.core.arguments import Share
from piebald.core.errors import SettingError, shown, unknown
from piebald.core.moments import Floats
from piebald.data.clients.lists import Lists
from piebald.data.partition.three_way_split import SPLITS, check_shares, three_ways
from piebald.statistics.boosting.clients import TreeRows, usable
from piebald.statistics.boosting.forest import MOST_COLUMNS, Floats32
from piebald.statistics.boosting.settings import Objective
from piebald.statistics.boosting.targets import Target
from piebald.statistics.bounded_sums import as_text
from piebald.statistics.columns import TARGET, ClientColumns, categories, columns_of

_MOST_CLASSES = 100


@dataclass(frozen=True, slots=True)
class Encoding:
    """What the columns of a table become.

    Attributes:
        numbers: columns of numbers.
        categories: the categories of columns of text; each becomes a column of 0 and 1, which is a gap where the text
            is missing.
        missing: a number that stands for a gap, None for none.
    """

    numbers: tuple[str, ...]
    categories: Mapping[str, tuple[str, ...]]
    missing: float | None

    @property
    def columns(self) -> list[str]:
        """The names of what trees see."""
        coded = [f"{name}={value}" for name, values in self.categories.items() for value in values]
        return [*self.numbers, *coded]

    def of(self, client: ClientColumns) -> Floats32:
        """Inputs [n, d] of a client.

        Raises:
            SettingError: a number is infinite.
        """
        parts = [client.numbers[name] for name in self.numbers]
        for name, values in self.categories.items():
            text = client.texts[name]
            gap = np.array([one is None for one in text], dtype=bool)
            parts += [np.where(gap, np.nan, (text == value).astype(np.float64)) for value in values]
        x = np.stack(parts, 1) if parts else np.zeros((client.rows, 0))
        with np.errstate(over="ignore"):
            return usable(x.astype(np.float32), self.missing, f"client {client.name!r}")


@dataclass(frozen=True, slots=True, eq=False)
class TreeData:
    """The rows of all clients as trees see them.

    Attributes:
        clients: each client's rows.
        encoding: what their columns became.
        target: the objective.
        name: of the column that is predicted.
        classes: names of the classes, empty for a regression.
        dropped: rows without a target, which are left out.
    """

    clients: list[TreeRows]
    encoding: Encoding
    target: Target
    name: str
    classes: tuple[str, ...]
    dropped: int


def tree_data(
    source: Any, *, client: str | None, target: str | None, columns: Sequence[str] | None,
    features: Sequence[str] | None, objective: Objective | None, validation: Share | None, test: Share | None,
    seed: int, missing: float | None,
) -> TreeData:  # fmt: skip
    """Read rows; the arguments are those of `trees`.

    Raises:
        SettingError: an argument is wrong, or the target does not fit the objective.
    """
    goal = TARGET if target is None else target
    if columns is not None and not columns:
        raise SettingError("columns must name at least one column to predict from, got none: leave them out for all")
    if columns is not None and goal in columns:
        raise SettingError(f"columns must not include the target {goal!r}: leave it out")
    wanted = None if columns is None else [*columns, goal]
    if isinstance(source, HoldsRows):
        for name, given in (("validation", validation), ("test", test)):
            if given is not None:
                raise SettingError(f"{name} divides the rows of tables, and these clients have theirs: leave it out")
        parts = {split: columns_of(source, client, wanted, split, features) for split in SPLITS}
        known = cast(Clients, source).classes
    else:
        check_shares(validation or 0.0, 0.2 if test is None else test)
        parts, known = {"train": columns_of(source, client, wanted, "train", features)}, None
    every = [one for held in parts.values() for one in held]
    names = [*every[0].numbers, *every[0].texts]
    if goal not in names:
        raise unknown("column", goal, names)
    numbers = tuple(name for name in every[0].numbers if name != goal)
    codes = categories(every, [name for name in every[0].texts if name != goal])
    encoding = Encoding(numbers, {name: tuple(values) for name, values in codes.items()}, missing)
    if not 0 < len(encoding.columns) <= MOST_COLUMNS:
        raise SettingError(f"trees are for 1 to {MOST_COLUMNS:,} columns, got {len(encoding.columns):,}")
    found, classes = _target(every, goal, objective, known)
    made = {split: [_rows(one, encoding, goal, classes) for one in held] for split, held in parts.items()}
    dropped = sum(one.rows for one in every) - sum(len(y) for held in made.values() for _, y in held)
    if len(made) == 1:
        made = _divided(made["train"], bool(classes), validation or 0.0, 0.2 if test is None else test, seed)
    clients = []
    for place, one in enumerate(parts["train"]):
        x: dict[Split, Floats32] = {split: held[place][0] for split, held in made.items()}
        y: dict[Split, Floats] = {split: held[place][1] for split, held in made.items()}
        clients.append(TreeRows(one.name, x, y))
    return TreeData(clients, encoding, found, goal, classes, dropped)


def _target(
    clients: Sequence[ClientColumns], goal: str, objective: Objective | None, known: Sequence[str] | None
) -> tuple[Target, tuple[str, ...]]:
    """The objective, and the names of the classes."""
    if goal in clients[0].texts:
        if objective == "regression":
            raise SettingError(f"the target {goal!r} holds text, so objective must be 'binary' or 'multiclass'")
        classes = tuple(known or categories(clients, [goal])[goal])
    else:
        values = np.unique(np.concatenate([one.numbers[goal] for one in clients]))
        values = values[~np.isnan(values)]
        if np.isinf(values).any():
            raise SettingError(f"the target {goal!r} has an infinite number: leave such rows out")
        if objective is None:
            objective = "binary" if set(values.tolist()) == {0.0, 1.0} else "regression"
        if objective == "regression":
            return Target("regression"), ()
        if (values != np.round(values)).any() or len(values) > _MOST_CLASSES:
            raise SettingError(
                f"under {objective!r} the target {goal!r} must be at most {_MOST_CLASSES} whole numbers or names, got "
                f"numbers like {shown(float(values[0]))}"
            )
        classes = tuple(map(str, as_text(values)))
    if len(classes) < 2 or (objective == "binary" and len(classes) != 2):
        raise SettingError(f"the target {goal!r} must have two classes, or more under 'multiclass', got {len(classes)}")
    chosen: Objective = objective or ("binary" if len(classes) == 2 else "multiclass")
    return Target(chosen, len(classes)), classes


def _rows(client: ClientColumns, encoding: Encoding, goal: str, classes: tuple[str, ...]) -> tuple[Floats32, Floats]:
    """A client's inputs and targets, without rows that have no target."""
    if not classes:
        y = client.numbers[goal]
    else:
        places = {name: float(place) for place, name in enumerate(classes)}
        y = np.array([np.nan if one is None else places[one] for one in client.text(goal)], dtype=np.float64)
    held = ~np.isnan(y)
    return encoding.of(client)[held], y[held]


def _divided(
    rows: Sequence[tuple[Floats32, Floats]], classes: bool, validation: float, test: float, seed: int
) -> dict[Split, list[tuple[Floats32, Floats]]]:
    """Rows of tables, divided as those of an experiment are."""
    y = np.concatenate([one for _, one in rows])
    owner = np.repeat(np.arange(len(rows)), [len(one) for _, one in rows])
    lists = Lists.of(owner, len(rows))
    parts = three_ways(lists, y.astype(np.int64) if classes else None, validation, test, seed)
    starts = np.cumsum([0, *(len(one) for _, one in rows)])
    return {
        split: [(x[held[k] - starts[k]], own[held[k] - starts[k]]) for k, (x, own) in enumerate(rows)]
        for split, held in parts.items()
    }
