"""The models that a run ends with (`keep`): a name, or the table of a choice that each client makes for itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from piebald.contracts import OwnChoice, Split
from piebald.contracts.component import Component, build
from piebald.core.errors import SettingError, unknown

Keep = Literal["last", "best", "best_for_each", "knn_per"]


KEEPS: tuple[str, ...] = get_args(Keep)


_OF_ALL = ("last", "best")


_OF_RUN = ("split", "tasks", "passes")  # settings that are no user's


def own_choice(keep: str | Mapping[str, Any], split: Split | None) -> OwnChoice | None:
    """Return the query by which each client finds its own model, None where all take what the run ends with.

    Args:
        keep: one of `KEEPS`, or a table with a kind, such as {"kind": "knn_per", "k": [5]}; also that of an `OwnChoice`
            of the user's.
        split: the rows on which the models are judged afterwards, None for no judgement.

    Raises:
        SettingError: there is no such choice or setting.

    Examples:
        >>> own_choice("last", "test") is None
        True
        >>> own_choice({"kind": "knn_per", "k": [5]}, "test").k
        (5,)
    """
    # these concern the run's models and put no question to clients
    if keep in _OF_ALL:
        return None
    table = {"kind": keep} if isinstance(keep, str) else dict(keep)
    kind = str(table.get("kind"))
    query = Component.registry["query"].get(kind) if kind not in KEEPS else OwnChoice
    if kind in _OF_ALL or query is None or not issubclass(query, OwnChoice):
        raise unknown("version to keep called", kind, KEEPS)
    # which rows judge and which work was done follow from the run: a table that sets them would contradict it
    for name in _OF_RUN:
        if name in table:
            raise SettingError(f"keep cannot set {name}, which the run says: leave it out")
    choice = build("query", table)
    assert isinstance(choice, OwnChoice)
    # last, as rows to judge by are the run's matter and no setting of a table
    return choice.model_copy(update={"split": split})
