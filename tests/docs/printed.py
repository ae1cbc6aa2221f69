"""Compare what a page shows as printed with what is printed."""

from __future__ import annotations

import math
import re

VOLATILE = {"wall", "seconds"}  # rows whose values are times


def assert_alike(shown: str, printed: str, what: str) -> None:
    """Compare line by line and word by word; numbers may differ by what another machine's arithmetic changes."""
    wanted, found = ([line.split() for line in text.strip().splitlines()] for text in (shown, printed))
    assert len(found) >= len(wanted), f"{what}\nprints\n{printed}\nand the page shows\n{shown}"
    for mine, theirs in zip(wanted, found, strict=False):
        assert alike(mine, theirs), f"{what}\nprints {' '.join(theirs)}\nand the page shows {' '.join(mine)}"


def alike(mine: list[str], theirs: list[str]) -> bool:
    """Compare the words of two lines; the page may show the first columns alone."""
    if len(mine) > len(theirs):
        return False
    pairs = zip(mine, theirs, strict=False)
    return all(mine[0] in VOLATILE or one == two or _near(one, two) for one, two in pairs)


def _near(one: str, two: str) -> bool:
    if all(re.fullmatch(r"\d{4}-\d\d-\d\d", word) for word in (one, two)):
        return True  # dates of today or from today on
    numbers = [re.sub(r"[\[\],:%]", "", word) for word in (one, two)]
    try:
        a, b = map(float, numbers)
    except ValueError:
        return False
    return math.isclose(a, b, rel_tol=0.05, abs_tol=0.02)
