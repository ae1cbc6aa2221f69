"""The names of clients in tables and figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any


class ClientNames(dict[int, str]):
    """Names of clients by number; the run folder of very many clients names none."""

    def __missing__(self, client: int) -> str:
        return f"client {client}"


def client_names(rows: Iterable[Mapping[str, Any]], others: Iterable[int]) -> ClientNames:
    """The name of each client, with its number where several share it.

    Args:
        rows: the table of clients of a run.
        others: numbers of clients that the table may not have.
    """
    given = {row["client"]: str(row["name"] or row["client"]) for row in rows}
    named = {client: given.get(client, str(client)) for client in dict.fromkeys([*given, *others])}
    known = {client: f"client {name}" if name.isdigit() else name for client, name in named.items()}
    often = Counter(known.values())
    return ClientNames({client: name if often[name] == 1 else f"{name} ({client})" for client, name in known.items()})
