"""Warnings about targets that can be used and look like a mistake: they are read as documented."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from piebald.data.clients.convert import kind

_FEW = 20  # whole numbers that are different: more than that are amounts rather than classes

_log = logging.getLogger(__name__)


def warn_of_odd_targets(y: Any, what: str, classes: Sequence[str] | None, amounts: bool) -> None:
    """Log a warning where targets may not be what was meant.

    Args:
        y: targets as models train on them, see `convert.targets`.
        what: where the rows come from.
        classes: the names of all classes, None where targets are numbers to predict.
        amounts: whether the user has said that they are numbers to predict.
    """
    if (oddity := _oddity(y, classes, amounts)) is not None:
        _log.warning("%s: %s", what, oddity)


def _oddity(y: Any, classes: Sequence[str] | None, amounts: bool) -> str | None:
    """Return a sentence about targets that look like a mistake, or None."""
    if not isinstance(y, np.ndarray) or y.ndim != 1:
        return None
    values = np.unique(y)
    if len(values) == 1:
        name = values[0] if classes is None else classes[values[0]]
        return f"all {len(y)} targets are the same, {str(name)!r}: there is nothing to learn from them"
    if kind(y) == "real" and not amounts and len(values) <= _FEW and (values == np.round(values)).all():
        return (
            f"targets are real numbers and all of them are whole ({_some(values)}), so they are predicted as amounts: "
            "give whole numbers or text to predict classes, or set regression = true if amounts are meant"
        )
    if classes is not None and 2 * len(values) < len(classes):
        named = _some([classes[number] for number in values.tolist()])
        return (
            f"only {len(values)} of {len(classes)} classes have rows ({named}), and the model has an output for each "
            "of the others as well: number classes from 0, or give their names as text"
        )
    return None


def _some(values: Any) -> str:
    listed = [str(value) for value in values]
    return ", ".join(listed[:4]) + (", ..." if len(listed) > 4 else "")
