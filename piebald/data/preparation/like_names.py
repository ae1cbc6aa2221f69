"""Warnings of names that clients may write in different ways: those of clients, and of classes."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations

from piebald.core.errors import shown

log = logging.getLogger("piebald.data")


def warn_of_like_names(names: Sequence[str], origin: str, what: str = "clients") -> None:
    """Log a warning where names differ in blanks and case alone."""
    by_form: dict[str, str] = {}
    for name in names:
        form = " ".join(name.split()).lower()
        if form in by_form:
            log.warning(
                "%s%s %r and %r differ in blanks or capitals alone: correct one if they are one",
                origin, what, by_form[form], name,
            )  # fmt: skip
            return
        by_form[form] = name


def warn_of_unlike_classes(classes: Mapping[str, Collection[str]], target: str) -> None:
    """Log a warning where two clients with several classes have none in common.

    Args:
        classes: that each client has, by its name.
        target: the column of them.
    """
    several = {client: {*names} for client, names in classes.items() if len(names) > 1}
    if pair := next((pair for pair in combinations(several, 2) if not several[pair[0]] & several[pair[1]]), None):
        first, second = (f"{client} ({shown(', '.join(sorted(several[client])), 40)})" for client in pair)
        log.warning(
            "target %r: %s and %s have no class in common: name classes alike where they are the same",
            target, first, second,
        )  # fmt: skip
