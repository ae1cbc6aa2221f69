"""Clients that are asked for sums of a model, on this machine or at sites, and the model's columns by their names."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from piebald.contracts import Clients, Query, Runtime, Split
from piebald.core.errors import RuntimeFault, SettingError, shown, unknown
from piebald.core.moments import Floats, merged
from piebald.data.clients.prepared import preparation_of
from piebald.data.preparation.column_models import NumericColumn
from piebald.data.preparation.columns import are_classes, in_order
from piebald.data.preparation.preparation import PrepareSettings
from piebald.inference.columns import (
    MOST_CODES,
    STEP,
    TARGET,
    as_text,
    asked_owners,
    check_codes,
    client_names,
    columns_of,
)
from piebald.inference.models.formula import CLIENT, Column, Computed, Formula, Term, terms_of_column
from piebald.inference.models.rows import MOST_COLUMNS, Ask, ModelPlan, ModelRows, model_rows
from piebald.inference.queries.columns import (
    MaskedModelSumsQuery,
    ModelSumsQuery,
    NoisyModelSumsQuery,
    from_limbs,
    table_columns,
)
from piebald.inference.queries.columns import columns as rows_columns
from piebald.inference.simulated import AskedSites, TableClients, simulated
from piebald.inference.statistics_at_sites import AskedColumns, ExactAnswers
from piebald.methods.client_work import ClientWork
from piebald.privacy import SecureAggregation

T = TypeVar("T", bound=Column)
log = logging.getLogger("piebald.statistics")
_MOST_LEVELS = 20  # of a target
_CODED = re.compile(r"C\((.+)\)")  # a column whose values are categories, as in formulas of R and statsmodels


def _is_number(word: str) -> bool:
    return bool(re.fullmatch(r"-?[\d.]+(e[+-]?\d+)?", word))


class ModelColumns:
    """The columns of clients who are asked, the numbers of inputs and then of targets, as plans name them.

    Args:
        clients: the form of their rows.
        features: names of the inputs.
        target: a further name of the target, if it has one.
        split: the split of the rows.
        categories: the categories of columns of codes, and of text where they are not those that occur.
        secure: whether sums leave under masks.
        client: the column that names the client of a row, None where there is none.

    Attributes:
        numbers: names of columns of numbers.
        categories: the categories of columns of text, and of the client of a row, in order.
        present: the columns that there are, without that of the client.
        split, secure: as given.
    """

    def __init__(
        self, clients: Clients, features: Sequence[str] | None = None, target: str | None = None,
        split: Split = "train", categories: Mapping[str, Sequence[str]] | None = None, secure: bool = False,
        client: str | None = None,
    ) -> None:  # fmt: skip
        self._columns, self._clients = AskedColumns.of(clients, features), clients
        # a model takes the number of a class
        self.numbers = [name for name in self._columns.names if name not in self._columns.coded]
        self.categories: dict[str, Sequence[str]] = {**self._columns.coded, **(categories or {})}
        # columns of numbers that have categories: a misspelt code would be a coefficient of no row
        for name in {*self.categories} & {*self.numbers}:
            check_codes(name, self.categories[name])
        self.present, self._stated = list(dict.fromkeys([*self.numbers, *self.categories])), {**(categories or {})}
        self._places = {name: str(index) for index, name in enumerate(self._columns.names)}
        # an input that has this name keeps it
        if target is not None and TARGET in self._places:
            self._places.setdefault(target, self._places[TARGET])
        if clients.classes is not None:
            self.categories |= dict.fromkeys({TARGET, target or TARGET}, tuple(clients.classes)) | self._stated
        for name in client_names(client) - {*self._places}:
            self._places[name], self.categories[name] = CLIENT, sorted(map(str, clients.names))
        self.split, self.secure, self._kind = split, secure, MaskedModelSumsQuery if secure else ModelSumsQuery

    def place(self, name: str) -> str:
        """Return the name of a column in plans."""
        if name not in self._places:
            raise unknown("column", name, self._places)
        return self._places[name]

    def term(self, name: str, value: str | None) -> Term:
        """Return a column, or whether it has a category, as a term of plans: clients number categories from 0."""
        place = self.place(name)
        known = TARGET if place == self._places.get(TARGET) else name  # a class may have two names
        return place, None if value is None else self._columns.codes(known, [value])[0]

    def terms(self, columns: Sequence[str], first: int = 1) -> tuple[list[str], tuple[Term, ...]]:
        """Return the names and terms of regressors: columns of numbers, then each category from the first on.

        Raises:
            SettingError: they are too many, or of clients that masks are to hide.
        """
        named: list[Term] = [(name, None) for name in columns if name not in self.categories]
        named += [(name, value) for name in columns for value in [*self.categories.get(name, ())][first:]]
        names = [name if value is None else f"{name}={value}" for name, value in named]
        return names, self.checked([self.term(name, value) for name, value in named])

    def checked(self, columns: Sequence[T]) -> tuple[T, ...]:
        """Return the regressors of a model.

        Raises:
            SettingError: they are too many, or of clients that masks are to hide.
        """
        if len(columns) > MOST_COLUMNS:
            raise SettingError(f"a model has at most {MOST_COLUMNS} coefficients of columns, got {len(columns):,}")
        if self.secure and any(name == CLIENT for column in columns for name, _ in terms_of_column(column)):
            raise SettingError(
                "a coefficient of each client is of sums that masks are to hide: leave secure out, or the column of "
                "clients, and take a random intercept of each client or a stratified model"
            )
        return tuple(columns)

    def regressor(self, text: str) -> str:
        """Return the name of a regressor, which may be written as C(name): its values are categories.

        Raises:
            SettingError: it holds numbers that nobody here can list.
        """
        coded = _CODED.fullmatch(text)
        if coded is None or text in self._places:
            return text
        name = coded[1].strip()
        self.categories[name] = self.values_of(name)
        return name

    def values_of(self, name: str) -> Sequence[str]:
        """Return the categories of a column, in order, also where they are numbers.

        Raises:
            SettingError: it holds numbers that nobody here can list, or too many.
        """
        if self.place(name) == CLIENT or name in self.categories:
            return self.categories[name]
        if not isinstance(self._clients, TableClients):
            raise SettingError(f"sites do not list values of {name!r}: name them, categories={{{name!r}: [...]}}")
        words = in_order(as_text(self._clients.values(name)).tolist())
        if len(words) > MOST_CODES:
            raise SettingError(f"{name!r} has {len(words):,} different values, at most {MOST_CODES} are categories")
        return words

    def pooled(self, name: str, shares: Sequence[float]) -> tuple[float, float, Floats]:
        """Return the mean and the deviation of a column over all clients, as scikit-learn's, and quantiles.

        Args:
            name: the column.
            shares: of the quantiles; sites tell none.

        Raises:
            SettingError: there are none, or sites have not agreed on them before the first question.
        """
        place = self.place(name)
        if isinstance(self._clients, TableClients):
            with simulated(self._clients) as (runtime, work):
                answers = ExactAnswers(AskedSites(runtime, work, self._clients.names), "train", 0)
                moments, index = merged(answers.moments), int(place)
                if not (count := int(moments.present[index])):
                    raise SettingError(f"column {name!r} has no numbers: leave it out of the formula")
                deviation = math.sqrt(float(moments.scatter[index]) / count)
                return float(moments.mean[index]), deviation, answers.quantiles(moments.present, shares)[index]
        agreed = preparation_of(self._clients)
        for column in () if agreed is None or len(shares) else agreed.columns:
            if isinstance(column, NumericColumn) and column.name == name:
                values = column.values
                # where gaps are filled the mean is another
                if not column.gaps and values.scale == "standard":
                    return values.mean, values.deviation, np.zeros(0)
        raise SettingError(
            f"sites tell no mean and no quantiles of {name!r} before the first question: write the numbers, as in "
            f"I({name} - 50), or bs({name}, knots=(40, 60), lower_bound=18, upper_bound=100)"
        )

    def is_binary(self, name: str) -> bool:
        """Return whether a target is known to have two values."""
        if isinstance(self._clients, TableClients) and name in self.numbers and name not in self.categories:
            return len(self._clients.values(name)) == 2
        return len(self.classes(name)) == 2

    def event(self, name: str, value: str | None) -> str:
        """Return the class of a target that counts as 1, by default the second of two.

        Raises:
            SettingError: there is no such class.
        """
        values = [*self.classes(name)] or ["0", "1"]
        if value is not None and value not in values:
            raise unknown(f"value of {name!r}", value, values)
        # numbers that are neither 0 nor 1 are refused by the clients that have them
        return value or (values[1] if len(values) == 2 else "1")

    def levels(self, name: str, ordered: bool) -> list[str]:
        """Return the values of a target of several levels: as they are stated, numbers by their size, or by alphabet.

        Args:
            name: the target.
            ordered: whether their order says more than their names.

        Raises:
            SettingError: they are too many or too few, or their order is not known.
        """
        words, stated, present = [*self.classes(name)], name in self._stated, list[str]()
        if isinstance(self._clients, TableClients):
            present = [*self._columns.coded.get(name, ())] or as_text(self._clients.values(name)).tolist()
        words = words if stated else in_order(words or present)
        # here, by their names: clients know their numbers alone
        if stated and (strange := next((word for word in present if word not in words), None)) is not None:
            raise SettingError(
                f"the target {name!r} has {shown(strange, 30)}, which is none of the levels {', '.join(words)}: name "
                "all of them in categories, or leave such rows out"
            )
        if len({*words}) < len(words):
            raise SettingError(f"the levels of {name!r} must be different, got {', '.join(words)}")
        if not 2 <= len(words) <= _MOST_LEVELS:
            raise SettingError(
                f"the target {name!r} has {len(words) or 'no'} known levels, 2 to {_MOST_LEVELS} are allowed: name "
                f"them in order, categories={{{name!r}: [...]}}, or take another family"
            )
        if ordered and not stated and not all(map(_is_number, words)):
            raise SettingError(
                f"the order of words like {shown(words[0], 30)} is not known: name the levels of {name!r} from low to "
                f"high, categories={{{name!r}: [...]}}"
            )
        return words

    def classes(self, name: str) -> Sequence[str]:
        """Return the classes of a target in order, () of amounts, and of numbers that are 0 and 1 already."""
        if name in self.categories or not isinstance(self._clients, TableClients):
            return self.categories.get(name, ())
        self.place(name)
        values = self._clients.values(name)
        # 0 and 1 need no mapping; other two numbers are classes whose larger one counts as 1
        return in_order(as_text(values).tolist()) if are_classes(values) and not {*values} <= {0.0, 1.0} else ()

    def name_truths(self, name: str) -> None:
        """Give a column of 0 and 1 of clients on this machine these two as categories."""
        if isinstance(self._clients, TableClients) and name in self.numbers and name not in self.categories:
            values = self._clients.values(name)
            if {*values} <= {0.0, 1.0}:
                self.categories[name] = as_text(values).tolist()

    def query(self, plan: ModelPlan, ask: Ask = "moments", numbers: int = 0) -> ModelSumsQuery:
        """Return a question, with so many numbers besides those of the columns' scale."""
        return self._kind(plan=plan, ask=ask, numbers=numbers, split=self.split)


class ModelClients:
    """Clients who are asked about a model through a runtime.

    The first question says who takes part, and they must answer all further ones.

    Args:
        columns: their columns.
        runtime: the runtime that reaches the clients.
        work: the run; where it masks, with 64 bits, only sums over all clients are seen.
        clients: their names.
        say: called with a sentence about each client that is left out.
        joined: opens a federation of one client with the rows of all, where they are on this machine.

    Attributes:
        columns: as given.
        left_out: why clients do not take part, by name.
    """

    def __init__(
        self, columns: ModelColumns, runtime: Runtime, work: ClientWork, clients: Clients,
        say: Callable[[str], None] = log.warning, joined: Callable[[], AskedSites] | None = None,
    ) -> None:  # fmt: skip
        self._masking = work.masking if isinstance(work.masking, SecureAggregation) else None
        self._sites, self._clients, self.columns = AskedSites(runtime, work, clients.names, say), clients, columns
        self._joined, self._taking_part, self._noisy_questions = joined, list[int](), 0
        self.left_out = self._sites.left_out

    def sums(self, plan: ModelPlan, ask: Ask, numbers: Floats) -> Floats:
        """Return the sum of all clients' answers, see `sums.client_sums`.

        Raises:
            RuntimeFault: a site answers the first question and not the next.
        """
        count = len(numbers) - 2 * len(plan.columns)
        # moments are sums over rows in any case, but they count clients, so they are taken from each by itself
        across = plan.family == "cox" and not plan.stratified and ask != "moments"
        if self._joined is not None and (across or (ask == "scores" and plan.cluster)):
            # risk sets or clusters with rows of several clients
            query = self.columns.query(self._of_all(plan), ask, count)
            return self._joined().sums(query, None, _vectors(numbers))[1]
        # whoever is left out of the first question has no part in the model, whatever it would answer later
        answered, total = self._summed(self.columns.query(plan, ask, count), numbers, among=self._taking_part)
        # sums of other rows would move the likelihood between two steps, and Newton's method would converge to nothing
        if answered != self._taking_part:
            lost = next(iter({*self._taking_part} ^ {*answered}))
            raise RuntimeFault(
                f"{self._sites.names[lost]} answers some questions about the model and not others "
                f"({self._sites.reasons.get(lost, 'it was away')}): ask again, or for less"
            )
        return total if self._masking is None else from_limbs(total)

    def open_sums(self) -> dict[str, Floats]:
        """Return each client's sums of the last question by its name; none under masks."""
        return {self._sites.names[client]: sums for client, sums in self._sites.open_sums.items()}

    def noisy_sums(self, query: NoisyModelSumsQuery, point: Floats) -> tuple[Floats, int]:
        """Return the sum of all clients' noisy answers at parameters [q], and how many answered."""
        # in a simulation noise follows from the version, and the same noise twice would hide nothing
        self._noisy_questions += 1
        answered, total = self._summed(query, point, self._noisy_questions)
        return total * STEP, len(answered)

    def _summed(
        self, query: Query, numbers: Floats, version: int = 0, among: Collection[int] = ()
    ) -> tuple[list[int], Floats]:
        """Return who answered, and the sum of the answers."""
        answered, total = self._sites.sums(query, self._masking, _vectors(numbers), version, among)
        self._taking_part = self._taking_part or answered
        self._sites.leave_out(answered)
        return answered, total

    def pooled(self, plan: ModelPlan) -> ModelRows | None:
        """Return the rows of all clients, None where they are not here."""
        if not isinstance(self._clients, TableClients):
            return None
        rows = self._clients.joined.rows(0, "train")
        return model_rows(self._of_all(plan), table_columns(rows_columns(rows)))

    def _of_all(self, plan: ModelPlan) -> ModelPlan:
        """Return the plan of one client with the rows of all, whose last column is the number of a row's client."""
        owner = str(len(self._clients.features)) if isinstance(self._clients, TableClients) else ""
        numbers = {str(name): str(number) for number, name in enumerate(self._clients.names)}

        def owned(term: Term) -> Term:
            return (owner, numbers[str(term[1])]) if term[0] == CLIENT else term

        return plan.model_copy(update={
            "cluster": owner if plan.cluster == CLIENT else plan.cluster,
            "strata": owner if plan.stratified else None,
            "columns": tuple(column.with_terms(owned) if isinstance(column, Computed) else owned(column)
                             for column in plan.columns),
        })  # fmt: skip


def _vectors(numbers: Floats) -> dict[str, Tensor]:
    return {"numbers": torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.float64))}


@contextmanager
def asked_tables(
    source: Any, client: str | None, options: ModelOptions, split: Split, features: Sequence[str] | None,
    categories: Mapping[str, Sequence[str]] | None = None, prepare: PrepareSettings | Mapping[str, Any] | None = None,
) -> Iterator[ModelClients]:  # fmt: skip
    """Open clients on this machine, in the simulator.

    Args:
        source, client, split, features: as of `columns.columns_of`.
        options: of the model, whose columns are read.
        categories: as of `ModelColumns`.
        prepare: as of `columns.asked_owners`.

    Raises:
        SettingError: a column has too many categories.
    """
    roles, wanted, optional = options.roles(), None, client_names(client)
    if options.columns is not None:
        # a table may have a column that is called C(name) itself
        coded = {name: match[1].strip() for name in options.columns if (match := _CODED.fullmatch(name))}
        wanted, optional = [*options.columns, *coded.values(), *roles.names], {*optional, *coded, *coded.values()}
    owners = asked_owners(source, client, prepare, (client,))
    tables = columns_of(owners, client, wanted, split, features, optional)
    labels = () if roles.cluster is None else (roles.cluster,)
    clients = TableClients.of(tables, categories, MOST_CODES, labels)
    with ExitStack() as stack:

        @cache
        def joined() -> AskedSites:
            return AskedSites(*stack.enter_context(simulated(clients.joined)))

        asked = ModelColumns(clients, categories=categories, client=client)
        yield ModelClients(asked, *stack.enter_context(simulated(clients)), clients, joined=joined)


_NUMBERS = ("time", "entry", "offset", "weights")  # roles of columns of numbers
_ROLES = ("target", *_NUMBERS, "cluster")


@dataclass(frozen=True, slots=True)
class ColumnRoles:
    """The columns that a model names besides its regressors.

    Attributes:
        target: the column to explain, or of events; "" for none.
        time, entry, offset, weights, cluster: as of `ModelPlan`, by name; a cluster may be the client of a row.
    """

    target: str
    time: str | None = None
    offset: str | None = None
    weights: str | None = None
    cluster: str | None = None
    entry: str | None = None

    @property
    def names(self) -> list[str]:
        """The columns."""
        return [name for name in (getattr(self, role) for role in _ROLES) if name]


class ModelOptions(Protocol):
    """What a user says of a model."""

    @property
    def columns(self) -> Sequence[str] | None:
        """The regressors; None for all columns."""

    def roles(self) -> ColumnRoles:
        """Return the other columns."""

    def questions(self, asked: ModelColumns, /) -> list[Query]:
        """Return the questions that terms name."""


def planned(
    asked: ModelColumns, family: Any, roles: ColumnRoles, columns: Sequence[str] | None, event: str | None = None,
    formula: Formula | None = None, **fields: Any,
) -> tuple[ModelPlan, list[str]]:  # fmt: skip
    """Return the plan of a model and the names of its regressors, of which a category's is "column=value".

    Args:
        asked: the columns of clients.
        family: as of `ModelPlan`.
        roles: other columns.
        columns: the regressors; all others by default.
        event: the class of the target that counts as 1, see `ModelColumns.event`.
        formula: says what is made of the columns; by default they are the regressors.
        fields: further fields of the plan.

    Raises:
        SettingError: there is no such column, or it does not hold what its role takes.
    """
    columns = None if columns is None else [*map(asked.regressor, columns)]
    numbers = {role: getattr(roles, role) for role in _NUMBERS}
    for role, name in numbers.items():
        if name is not None and name in asked.categories:
            raise SettingError(f"{role} must be a column of numbers, and {name!r} holds text")
    # by places, since the target of sites has two names, and the client as well
    places = {name: asked.place(name) for name in [*roles.names, *(columns or asked.present)]}
    taken = {places[name] for name in roles.names}
    for name in columns or ():
        if places[name] in taken - {CLIENT}:
            role = next(role for role in _ROLES if places.get(getattr(roles, role)) == places[name])
            raise SettingError(f"columns must not include the {role} {name!r}: leave it out")
    # a column that was named twice would make the information singular
    named = {places[name]: name for name in (asked.present if columns is None else columns)}
    regressors = [name for place, name in named.items() if place not in taken - {CLIENT}]
    # all groups have a curve, and a first category has no coefficient
    first = 0 if family == "survival" else 1
    names, terms = asked.terms(regressors, first) if formula is None else formula.columns(asked)
    if family in ("ordinal", "multinomial"):
        words = asked.levels(roles.target, family == "ordinal")
        target, fields["levels"] = asked.term(roles.target, None), [asked.term(roles.target, word)[1] for word in words]
    else:
        target = _target(asked, family, roles.target, event)
    plan = ModelPlan(
        family=family, columns=asked.checked(terms), target=target, **fields,
        **{role: None if name is None else asked.place(name) for role, name in numbers.items()},
        cluster=None if roles.cluster is None else asked.place(roles.cluster),
    )  # fmt: skip
    return plan, names


def _target(asked: ModelColumns, family: str, name: str, event: str | None) -> Term:
    """Return the term of a target, of which one class may count as 1."""
    values = asked.classes(name)
    if family in ("binomial", "cox", "survival") and (len(values) == 2 or event is not None):
        return asked.term(name, asked.event(name, event))
    # classes whose names are their numbers are amounts as well
    if name not in asked.categories or [*values] == [*map(str, range(len(values)))]:
        return asked.term(name, None)
    got = f"text with {len(values)} categories, like {shown(values[0], 30) if values else 'none'}"
    raise SettingError(
        f"the target {name!r} must hold numbers, or two categories or a stated event under 'binomial', got {got}"
        + (": choose the family 'multinomial', or 'ordinal' where they have an order" if len(values) > 2 else "")
    )
