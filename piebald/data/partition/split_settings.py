"""The table `[split]`: which of a client's rows are for training, which for validation, and which for testing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, Self, runtime_checkable

from pydantic import Field, model_validator

from piebald.contracts.component import Settings
from piebald.core.errors import SettingError, shown, unknown

Amount = int | float
MOST_FOLDS = 1000  # a site divides its rows as a server says


class SplitSettings(Settings):
    """How each client's rows are divided, from these rows alone, so that a site divides its rows alike.

    Attributes:
        test: rows for testing, as a share of a client's rows in [0, 1), or as their number; 0.2 by default, and 0
            where clients are held out.  A client always keeps one row to train on.  With groups it counts groups.
        validation: rows for validation, likewise.
        seed: seed of the choice.
        group: the column, or columns, whose equal values mark rows that stay together, as a patient's visits do; across
            clients, too, where their rows are on one machine.  Of a data set with owners, a kind of owners.
        order: the column to sort by, numbers or dates: the last rows are for testing, those before for validation.
        stratify: true takes the same share of each class, as by default where targets are classes; false takes any
            rows; a column takes the same share of each of its values.
        column: the column that says of each row "train", "validation" or "test".
        folds: the number of divisions, 2 to 1000, in each of which another part of the rows is for testing.  With order
            they are forward chains: a fold trains on the rows before its part and leaves out those after it, and a
            client of as many rows as folds, or fewer, has none for testing.
        fold: the number of one of them, from 0, as one run has it.
        hold_out: names of clients that do not train, and on all of whose rows the models are scored; "each" holds one
            client after the other out.
        test_only: names of clients that do not train, and that are scored like the others.

    Raises:
        SettingError: a setting is unknown or out of range, or two do not fit together.

    Examples:
        >>> SplitSettings(group="patient", folds=5).repeats(["north", "south"])[4].fold
        4
    """

    test: Amount | None = None
    validation: Amount = 0
    seed: int = Field(default=0, ge=0)
    group: str | list[str] | None = None
    order: str | None = None
    stratify: bool | str | None = None
    column: str | None = None
    folds: int | None = Field(default=None, ge=2, le=MOST_FOLDS)
    fold: int | None = Field(default=None, ge=0)
    hold_out: Literal["each"] | list[str] | None = None
    test_only: list[str] = []  # noqa: RUF012 - a pydantic field

    @classmethod
    def in_words(cls) -> str:
        """See `Settings`."""
        return "split"

    @classmethod
    def of(cls, value: Self | Mapping[str, Any] | str | None) -> Self:
        """Return the settings in a table, or in the name of a column of parts; the default ones of None."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            return cls(column=value)
        if value is not None and not isinstance(value, Mapping):
            raise SettingError(f"split must be a table of settings, or the name of a column, got {shown(value)}")
        return cls(**value or {})

    @model_validator(mode="after")
    def _check(self) -> Self:
        validation, test = self.validation, self.test_amount
        _check_amount("validation", validation)
        _check_amount("test", test)
        if isinstance(validation, float) and isinstance(test, float) and validation + test >= 1:
            raise ValueError(
                f"validation = {validation} and test = {test} leave no rows to train on: their sum must be below 1"
            )
        if self.fold is not None and (self.folds is None or self.fold >= self.folds):
            raise ValueError(f"fold must be below folds, got {self.fold} of {self.folds}: they are numbered from 0")
        for first, second in (
            ("folds", "test"), ("folds", "hold_out"), ("order", "stratify"), ("column", "test"), ("column", "folds"),
            ("column", "order"),
        ):  # fmt: skip
            if getattr(self, first) is not None and getattr(self, second) not in (None, False):
                raise ValueError(f"{first} and {second} both say which rows are for testing: leave one of them out")
        if isinstance(self.hold_out, list) and not self.hold_out:
            raise ValueError("hold_out must name a client at least, or be 'each', got none")
        return self

    @property
    def test_amount(self) -> Amount:
        """The rows for testing, with the default filled in."""
        if self.test is not None:
            return self.test
        return 0 if self.hold_out is not None or self.column is not None else 0.2

    @property
    def several(self) -> bool:
        """True if the settings define more than one division."""
        return self.hold_out == "each" or (self.folds is not None and self.fold is None)

    @property
    def groups(self) -> list[str]:
        """The columns of groups."""
        return [self.group] if isinstance(self.group, str) else self.group or []

    @property
    def columns(self) -> list[str]:
        """The columns that say how rows are divided, and that models do not read unless features names them."""
        return [*self.groups, *(name for name in (self.order, self.column) if name is not None)]

    @property
    def held_out(self) -> list[str]:
        """Names of the clients that are held out."""
        return self.hold_out if isinstance(self.hold_out, list) else []

    def untrained(self, names: Sequence[str]) -> list[int]:
        """Return the numbers of the clients that do not train.

        Args:
            names: of all clients.

        Raises:
            SettingError: there is no client of such a name, or none is left to train.
        """
        number_of = {str(name): number for number, name in enumerate(names)} if self.held_out or self.test_only else {}
        for setting, listed in (("hold_out", self.held_out), ("test_only", self.test_only)):
            for name in listed:
                if name not in number_of:
                    raise unknown(f"client (split, {setting})", name, number_of)
        chosen = sorted({number_of[name] for name in [*self.held_out, *self.test_only]})
        if chosen and len(chosen) == len(names):
            raise SettingError(f"split holds out or only tests all {len(names)} clients: leave one to train")
        return chosen

    def refuse_several(self) -> None:
        """Refuse settings that define more than one division, where there is one run.

        Raises:
            SettingError: they do.
        """
        if self.several:
            raise SettingError(
                f"{'folds' if self.folds else 'hold_out'} of split asks for several runs: use piebald compare, in "
                "Python piebald.data.cross_validation, or choose one of them with fold = 0 or hold_out = ['a client']"
            )

    def repeats(self, names: Sequence[str]) -> list[Self]:
        """Return the settings of each division, by fold or by the client that is held out.

        Args:
            names: of all clients.
        """
        if self.hold_out == "each":
            return [self.with_(hold_out=[str(name)]) for name in names if str(name) not in self.test_only]
        if self.folds is not None and self.fold is None:
            return [self.with_(fold=fold) for fold in range(self.folds)]
        return [self]

    @property
    def title(self) -> str:
        """The division in words, "" where there is one alone."""
        if self.held_out:
            return f"without {', '.join(self.held_out)}"
        return "" if self.fold is None else f"fold {self.fold + 1} of {self.folds}"

    def with_(self, **changes: Any) -> Self:
        """Return the settings with some of them replaced."""
        # anew and not by `model_copy`, which checks nothing; fields that were left out stay so
        return type(self)(**self.model_dump(exclude_unset=True) | changes)


@runtime_checkable
class HasDivision(Protocol):
    """Clients that know how their rows are divided."""

    @property
    def division(self) -> SplitSettings | None:
        """The settings, None where rows came in parts or are divided at random by shares alone."""


def division_of(clients: Any) -> SplitSettings | None:
    """Return how the rows of clients are divided, None where they do not say it."""
    return clients.division if isinstance(clients, HasDivision) else None


def _check_amount(name: str, amount: Amount) -> None:
    """Refuse a share that is out of range, and a number of rows below 0."""
    if amount < 0 or (isinstance(amount, float) and not amount < 1):
        raise ValueError(
            f"{name} must be a share of a client's rows, at least 0 and below 1, or a number of rows, got {amount!r}"
        )
