"""A site's consent to an experiment: by the name of its recipe, or by a person at the site.

    <credentials>/pending.json    what the server offers and nobody has approved yet
    <credentials>/approved.json   the digests of the terms that were approved, with the time

Terms are named by their digest, so what is approved is what was offered, to the byte.  Until then the server gets
nothing: no rows are read, and no numbers of them are told.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from piebald.contracts.component import Component
from piebald.core.errors import SettingError
from piebald.federation.credentials.party_files import read_table, write_table
from piebald.federation.site.policy import ASK, Policy

_PENDING, _APPROVED = "pending.json", "approved.json"
# what a person looks at besides the experiment; questions that are not named here are not answered
_SHOWN = ("plugins", "training", "transforms", "private", "own_query", "choice", "questions", "trains", "lineage")


class Consent:
    """Consent of a running site to experiments.

    Args:
        folder: the site's credentials.
        policy: the site's policy, of which `accept` matters here.
    """

    def __init__(self, folder: Path, policy: Policy) -> None:
        self._folder, self._policy = folder, policy
        self._waiting = ""  # digest of the terms that wait

    def reject_reason(self, digest: str, terms: Mapping[str, Any]) -> str | None:
        """Return why the site does not take part under these terms, "" while it waits for a person, None if it does."""
        name = str(recipe_in(terms).get("name"))
        accepted = self._policy.accept
        named = accepted is not None and name in accepted and not (ASK in accepted and _asks(terms))
        if accepted is None or named or (ASK in accepted and digest in approved(self._folder)):
            self._settle()
            return None
        if ASK not in accepted:
            self._settle()
            return f"this site accepts the recipes {', '.join(accepted) or 'of nobody'}, the run has {name[:80]!r}"
        self._waiting = digest
        sections = {**experiment_in(terms), **{name: terms.get(name) for name in _SHOWN}}
        since = datetime.now(UTC).isoformat(timespec="seconds")
        write_table(self._folder / _PENDING, {"terms": digest, "since": since, **sections})
        return ""

    def was_given(self) -> bool:
        """Return whether a person has approved the terms that wait; True once only."""
        # read from the disk each time, as another process writes the approval
        if not self._waiting or self._waiting not in approved(self._folder):
            return False
        self._settle()
        return True

    @property
    def waits(self) -> bool:
        """True if an experiment waits for a person."""
        return bool(self._waiting)

    def _settle(self) -> None:
        self._waiting = ""
        (self._folder / _PENDING).unlink(missing_ok=True)


def _asks(terms: Mapping[str, Any]) -> bool:
    """Return whether a run asks a question that policies must name: the name of its recipe does not tell."""
    questions = terms.get("questions")
    kinds = (
        [question.get("kind") for question in questions if isinstance(question, Mapping)]
        if isinstance(questions, list)
        else []
    )
    # a kind that is unknown here may be a plugin's that policies must name
    registry = Component.registry["query"]
    return any(kind not in registry or registry[kind].by_name for kind in kinds)  # type: ignore[attr-defined]


def experiment_in(terms: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the experiment in a run's terms, {} where there is none."""
    experiment = terms.get("experiment")
    return experiment if isinstance(experiment, Mapping) else {}


def recipe_in(terms: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the table of the recipe in a run's terms, {} where there is none."""
    recipe = experiment_in(terms).get("recipe")
    return recipe if isinstance(recipe, Mapping) else {}


def pending(folder: Path) -> dict[str, Any] | None:
    """Return the terms that wait for approval at a site, None where none do."""
    return read_table(folder / _PENDING)


def approved(folder: Path) -> dict[str, Any]:
    """Return the digests of the terms that were approved at a site, with the time."""
    return read_table(folder / _APPROVED) or {}


def approve(folder: Path, digest: str) -> None:
    """Approve the terms that wait at a site, by their digest.

    Raises:
        SettingError: something else waits, or nothing does.
    """
    waiting = pending(folder)
    # by digest, so that nobody approves terms that have changed since somebody looked at them
    if waiting is None or waiting["terms"] != digest:
        state = "nothing waits" if waiting is None else f"{waiting['terms']} waits"
        raise SettingError(f"{state} for approval in {folder}, got {digest[:80]}: approve what waits by its digest")
    at = datetime.now(UTC).isoformat(timespec="seconds")
    write_table(folder / _APPROVED, {**approved(folder), digest: at})
