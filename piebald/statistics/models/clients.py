"""Clients that are asked for sums of a model, on this machine or at sites, and the model's columns by their names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from piebald.contracts import Clients, Runtime, Split
from piebald.core.errors import RuntimeFault, SettingError, shown, unknown
from piebald.core.moments import Floats
from piebald.core.plain_text import printable
from piebald.data.preparation.columns import are_classes, in_order
from piebald.methods.client_work import ClientWork
from piebald.privacy import SecureAggregation
from piebald.statistics.columns import TARGET, ClientColumns, as_text, categories_of, check_codes, columns_of
from piebald.statistics.models.rows import Ask, ModelPlan, ModelRows, Term, joined, model_rows
from piebald.statistics.models.sums import client_sums
from piebald.statistics.queries.models import MaskedModelSumsQuery, ModelSumsQuery, from_limbs
from piebald.statistics.sites import AskedSites
from piebald.statistics.statistics_at_sites import categories_at_sites, code_words, column_names, say_left_out

log = logging.getLogger("piebald.statistics")


class ModelClients(Protocol):
    """Clients that answer questions about a model, and the names of their columns.

    Attributes:
        numbers: names of columns of numbers.
        categories: the categories of columns of text, in order.
        client: the column that names the client of a row, None where there is none.
    """

    @property
    def numbers(self) -> Sequence[str]: ...
    @property
    def categories(self) -> Mapping[str, Sequence[str]]: ...
    @property
    def client(self) -> str | None: ...

    def place(self, name: str) -> str:
        """Return the name of a column in plans."""

    def term(self, name: str, value: str | None) -> Term:
        """Return a column, or whether it has a category, as a term of plans."""

    def classes(self, name: str) -> Sequence[str]:
        """Return the classes of a target in order, () of amounts, and of numbers that are 0 and 1 already."""

    def sums(self, plan: ModelPlan, ask: Ask, numbers: Floats) -> Floats:
        """Return the sum of all clients' answers, see `sums.client_sums`."""

    def pooled(self, plan: ModelPlan) -> ModelRows | None:
        """Return the rows of all clients, None where they are not here."""


class LocalModelClients:
    """Clients on this machine (`ModelClients`).

    Args:
        source, client, columns, split, features: as of `columns.columns_of`.
        categories: the categories of columns of codes, and of text where they are not those that occur.
    """

    def __init__(
        self, source: Any, client: str | None, columns: Sequence[str] | None, split: Split,
        features: Sequence[str] | None, categories: Mapping[str, Sequence[str]] | None = None,
    ) -> None:  # fmt: skip
        self._tables: list[ClientColumns] = columns_of(source, client, columns, split, features)
        self.client = client
        self.numbers = list(self._tables[0].numbers)
        self.categories = {**categories_of(self._tables, list(self._tables[0].texts)), **(categories or {})}
        # columns of numbers that have categories: a misspelt code would be a coefficient of no row
        for name in {*self.categories} & {*self.numbers}:
            check_codes(name, self.categories[name])
        self._rows: dict[ModelPlan, list[ModelRows]] = {}

    def place(self, name: str) -> str:
        """See `ModelClients`."""
        if name not in self.numbers and name not in self.categories:
            raise unknown("column", name, [*self.numbers, *self.categories])
        return name

    def term(self, name: str, value: str | None) -> Term:
        """See `ModelClients`."""
        return self.place(name), value

    def classes(self, name: str) -> Sequence[str]:
        """See `ModelClients`."""
        if name not in self.numbers:
            return self.categories[name]
        values = self.values(name)
        # 0 and 1 need no mapping; other two numbers are classes whose larger one counts as 1
        return in_order(as_text(values).tolist()) if are_classes(values) and not {*values} <= {0.0, 1.0} else ()

    def values(self, name: str) -> Floats:
        """Return the different numbers of a column, sorted."""
        # NaN is a gap and no value, and np.unique keeps it
        values = np.unique(np.concatenate([table.numbers[name] for table in self._tables]))
        return np.asarray(values[~np.isnan(values)])

    def rows(self, plan: ModelPlan) -> list[ModelRows]:
        """Return each client's rows."""
        # a fit asks 10 to 30 times about the same rows
        if plan not in self._rows:
            self._rows[plan] = [model_rows(plan, table, place) for place, table in enumerate(self._tables)]
        return self._rows[plan]

    def sums(self, plan: ModelPlan, ask: Ask, numbers: Floats) -> Floats:
        """See `ModelClients`."""
        rows = self.rows(plan)
        # moments are sums over rows in any case, but they count clients, so they are taken from each by itself
        across = plan.family == "cox" and not plan.stratified and ask != "moments"
        if across or (ask == "scores" and plan.cluster):  # risk sets or clusters with rows of several clients
            rows = [joined(rows)]
        return np.asarray(np.sum([client_sums(plan, ask, part, numbers) for part in rows], axis=0))

    def pooled(self, plan: ModelPlan) -> ModelRows | None:
        """See `ModelClients`."""
        return joined(self.rows(plan))


class SiteColumns:
    """The columns of sites, the numbers of inputs and then of targets.

    Args:
        clients: the form of their rows.
        features: names of the inputs.
        target: a further name of the target, if it has one.
        split: the split of the rows.
        categories: the categories of columns of codes.
        secure: whether sums leave under masks.
    """

    client = None

    def __init__(
        self, clients: Clients, features: Sequence[str] | None, target: str | None, split: Split,
        categories: Mapping[str, Sequence[str]], secure: bool,
    ) -> None:  # fmt: skip
        names, _ = column_names(clients, features)
        self._coded = {name: words for name, words in categories_at_sites(clients).items() if name != TARGET}
        self.numbers = [name for name in names if name not in self._coded]
        self.categories = {**self._coded, **categories}
        self._places = {name: str(place) for place, name in enumerate(names)}
        # setdefault: an input that has this name keeps it
        if target is not None and TARGET in self._places:
            self._places.setdefault(target, self._places[TARGET])
        self.split, self._kind = split, MaskedModelSumsQuery if secure else ModelSumsQuery

    def place(self, name: str) -> str:
        """See `ModelClients`."""
        if name not in self._places:
            raise unknown("column", name, self._places)
        return self._places[name]

    def term(self, name: str, value: str | None) -> Term:
        """See `ModelClients`: sites number categories from 0."""
        return self.place(name), None if value is None else code_words(self._coded.get(name), [value])[0]

    def classes(self, name: str) -> Sequence[str]:
        """See `ModelClients`: sites number classes from 0."""
        return self.categories.get(name, ())

    def query(self, plan: ModelPlan, ask: Ask = "moments", numbers: int = 0) -> ModelSumsQuery:
        """Return a question, with so many numbers besides those of the columns' scale."""
        return self._kind(plan=plan, ask=ask, numbers=numbers, split=self.split)


class SiteModelClients:
    """Clients who are asked through a runtime (`ModelClients`).

    The first question says who takes part, and they must answer all further ones.

    Args:
        columns: their columns.
        runtime: the runtime that reaches the clients.
        work: the run; where it masks, with 64 bits, only sums over all clients are seen.
        clients: their names.
        say: called with a sentence about each client that is left out.
    """

    def __init__(
        self, columns: SiteColumns, runtime: Runtime, work: ClientWork, clients: Clients,
        say: Callable[[str], None] = log.warning,
    ) -> None:  # fmt: skip
        self.numbers, self.categories, self.client, self.place, self.term, self.classes = (
            columns.numbers, columns.categories, columns.client, columns.place, columns.term, columns.classes,
        )  # fmt: skip
        self._masking = work.masking if isinstance(work.masking, SecureAggregation) else None
        self._sites, self._clients, self._columns, self._say = AskedSites(runtime, work), clients, columns, say
        self._taking_part: list[int] = []

    def sums(self, plan: ModelPlan, ask: Ask, numbers: Floats) -> Floats:
        """See `ModelClients`.

        Raises:
            RuntimeFault: a site answers the first question and not the next.
        """
        query = self._columns.query(plan, ask, len(numbers) - 2 * len(plan.columns))
        vectors = {"numbers": torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.float64))}
        answered, total = self._sites.sums(query, self._masking, vectors)
        # only the first time, so that each client that is left out is named once
        if not self._taking_part:
            self._taking_part = answered
            say_left_out(self._sites, self._clients, answered, self._say)
        # sums of other rows would move the likelihood between two steps, and Newton's method would converge to nothing
        if answered != self._taking_part:
            lost = next(iter({*self._taking_part} ^ {*answered}))
            name = printable(str(self._clients.names[lost]))
            raise RuntimeFault(
                f"{name} answers some questions about the model and not others "
                f"({self._sites.reasons.get(lost, 'it was away')}): ask again, or for less"
            )
        return total if self._masking is None else from_limbs(total)

    def pooled(self, plan: ModelPlan) -> ModelRows | None:
        """See `ModelClients`."""
        return None


_NUMBERS = ("time", "entry", "offset", "weights")  # parts that are columns of numbers
_PARTS = ("target", *_NUMBERS, "cluster")


@dataclass(frozen=True, slots=True)
class ColumnRoles:
    """The columns that a model names besides its regressors.

    Attributes:
        target: the column to explain, or of events.
        time, entry, offset, weights, cluster: as of `ModelPlan`, by name; a cluster may be "client".
    """

    target: str
    time: str | None = None
    offset: str | None = None
    weights: str | None = None
    cluster: str | None = None
    entry: str | None = None

    @property
    def names(self) -> list[str]:
        """The columns, without the client's."""
        return [name for name in (getattr(self, part) for part in _PARTS) if name is not None and name != "client"]


def planned(
    clients: ModelClients, family: Any, roles: ColumnRoles, columns: Sequence[str] | None, **fields: Any
) -> tuple[ModelPlan, list[str]]:
    """Return the plan of a model and the names of its regressors, of which a category's is "column=value".

    Args:
        clients: who has the columns.
        family: as of `ModelPlan`.
        roles: other columns.
        columns: the regressors; all others by default.
        fields: further fields of the plan.

    Raises:
        SettingError: there is no such column, or it does not hold what its part takes.
    """
    present = [*clients.numbers, *clients.categories]
    numbers = {part: getattr(roles, part) for part in _NUMBERS}
    for part, name in numbers.items():
        if name is not None and name in clients.categories:
            raise SettingError(f"{part} must be a column of numbers, and {name!r} holds text")
    # "" stands for the client itself, which is no column that a site could look up
    cluster = "" if roles.cluster == "client" else roles.cluster
    # by places, since the target of sites has two names
    places = {name: clients.place(name) for name in [*roles.names, *(columns or present)]}
    taken = {places[name] for name in roles.names}
    for name in columns or ():
        if places[name] in taken:
            part = next(part for part in _PARTS if places.get(getattr(roles, part)) == places[name])
            raise SettingError(f"columns must not include the {part} {name!r}: leave it out")
    # a column that was named twice would make the information singular
    regressors = [name for name in dict.fromkeys(present if columns is None else columns) if places[name] not in taken]
    terms: list[Term] = [(name, None) for name in regressors if name not in clients.categories]
    first = 0 if family == "survival" else 1  # all groups have a curve, and a first category has no coefficient
    for name in regressors:
        terms += [(name, value) for value in list(clients.categories.get(name, ()))[first:]]
    plan = ModelPlan(
        family=family, columns=tuple(clients.term(name, value) for name, value in terms),
        target=_target(clients, family, roles.target), **fields,
        **{part: None if name is None else clients.place(name) for part, name in numbers.items()},
        cluster=clients.place(cluster) if cluster else cluster,
    )  # fmt: skip
    return plan, [name if value is None else f"{name}={value}" for name, value in terms]


def _target(clients: ModelClients, family: str, name: str) -> Term:
    """Return the term of a target, of which the second of two categories counts as 1."""
    values = clients.classes(name)
    if family in ("binomial", "cox", "survival") and len(values) == 2:
        return clients.term(name, values[1])
    if name not in clients.categories:
        return clients.term(name, None)
    got = f"text with {len(values)} categories, like {shown(values[0], 30) if values else 'none'}"
    raise SettingError(f"the target {name!r} must hold numbers, or two categories under 'binomial', got {got}")
