"""Right and wrong answers by class, as rows for tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from piebald.core.errors import RunFolderError

Counts = NDArray[np.int64]
_MOST_ROWS = 2**40
ClassRow = TypedDict(
    "ClassRow",
    {"class": str, "rows": int, "right": int, "share": float, "taken_for": str | None, "mistaken": int, "wrong": int},
)


def matrices(rows: Iterable[Mapping[str, Any]], version: int, classes: int) -> dict[int, Counts]:
    """The counts [true, predicted] of each client at a version, from the table `confusion`.

    Raises:
        RunFolderError: a row is about no such class.
    """
    matrix_of: dict[int, Counts] = {}
    for row in rows:
        if row["version"] != version:
            continue
        actual, predicted, count = (-1 if row[name] is None else row[name] for name in ("actual", "predicted", "count"))
        # a folder from elsewhere may hold anything; the counts become an index and a size of memory
        if row["client"] is None or not (0 <= actual < classes and 0 <= predicted < classes and 0 < count < _MOST_ROWS):
            raise RunFolderError(
                f"the table confusion counts {count} rows of class {actual} taken for class {predicted}, which cannot "
                f"be with {classes} classes: restore the folder from a copy"
            )
        matrix = matrix_of.setdefault(row["client"], np.zeros((classes, classes), dtype=np.int64))
        matrix[actual, predicted] = count
    return dict(sorted(matrix_of.items()))


def class_rows(matrix: Counts, names: Sequence[str]) -> list[ClassRow]:
    """A row for each class that has rows, from counts [true, predicted].

    `class`; `rows`: how many there are; `right`: how many of them are recognised, and `share`, the same as a share;
    `taken_for`: the class that they are most often mistaken for, None where they are not, and `mistaken`: how many of
    them; `wrong`: rows of other classes that are taken for this one.

    Examples:
        >>> for row in class_rows(np.array([[8, 2], [0, 5]]), ["cat", "dog"]):
        ...     print(row["class"], row["right"], "of", row["rows"], "mistaken for", row["taken_for"])
        cat 8 of 10 mistaken for dog
        dog 5 of 5 mistaken for None
    """
    rows: list[ClassRow] = []
    for index, name in enumerate(names):
        count, right = int(matrix[index].sum()), int(matrix[index, index])
        if not count:
            continue
        wrong = matrix[index].copy()
        wrong[index] = 0
        # ties go to the class that comes first, so that a page does not change from run to run
        likeliest = int(wrong.argmax())
        mistaken = int(wrong[likeliest])
        rows.append(
            {
                "class": str(name),
                "rows": count,
                "right": right,
                "share": right / count,
                "taken_for": str(names[likeliest]) if mistaken else None,
                "mistaken": mistaken,
                "wrong": int(matrix[:, index].sum()) - right,
            }
        )
    return rows
