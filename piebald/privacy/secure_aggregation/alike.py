"""Members of a sum are alike: what one of them contributes follows from terms that name no client.

Masks hide one contribution among others of its size.  Terms may be the same for all members, to the byte, and still say
of single clients that they train with another rate, send next to nothing, or hold all of their rows back: then the sum
is the contribution of those who are left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from piebald.contracts.component import Component
from piebald.methods.training.base import Trainer

# Settings of single clients, by number, name or pattern, wherever they stand.
CLIENT_FIELDS = frozenset({"by_number", "changes", "clients", "harmonised", "hold_out", "lacks", "shares", "test_only"})
_ALL_SITES = "experiment.partition.clients"  # the list of those who take part, which says nothing of any of them
_OF_OTHER_RUNS = {"recipes", "grid", "tune", "advise"}


def unlike_reason(
    training: Component, tables: Mapping[str, Any], experiment: Mapping[str, Any], works: Iterable[object]
) -> str | None:
    """Return why the members of a sum under masks would not all do the same, or None.

    Args:
        training: the trainer.
        tables: whatever else determines contributions, as plain values by the name of its setting.
        experiment: the experiment's settings, as plain values; empty where there are none.
        works: for each client, what is left of all this for that client alone.
    """
    settings = {key: value for key, value in experiment.items() if key not in _OF_OTHER_RUNS}
    named = next(_named_clients({"training": training.table(), **tables, "experiment": settings}), None)
    if named is not None:
        return (
            f"secure_aggregation hides contributions that are alike, and {named} says something of single clients: "
            "leave it out, or drop secure_aggregation"
        )
    if training.overrides(Trainer.own_models) or len({*works}) > 1:
        return (
            "secure_aggregation hides contributions that are alike, and here clients have models, inputs or settings "
            "of their own: give all of them the same, or drop secure_aggregation"
        )
    return None


def _named_clients(value: Any, path: str = "") -> Iterator[str]:
    """The settings of single clients in plain values, each by its path."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            place = f"{path}.{key}" if path else str(key)
            # a number says how many clients there are
            says = isinstance(inner, Mapping | list | tuple | str) and len(inner) > 0
            if key in CLIENT_FIELDS and says and place != _ALL_SITES:
                yield place.removeprefix("experiment.")
            else:
                yield from _named_clients(inner, place)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _named_clients(inner, f"{path}[{number}]")
