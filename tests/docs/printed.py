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
        assert len(mine) <= len(theirs), f"{what}\nprints {' '.join(theirs)}\nand the page shows {' '.join(mine)}"
        for one, two in zip(mine, theirs, strict=False):  # the page may show the first columns alone
            alike = mine[0] in VOLATILE or one == two or _near(one, two)
            assert alike, f"{what}\nprints {' '.join(theirs)}\nand the page shows {' '.join(mine)}"


def _near(one: str, two: str) -> bool:
    numbers = [re.sub(r"[\[\],:%]", "", word) for word in (one, two)]
    try:
        a, b = map(float, numbers)
    except ValueError:
        return False
    return math.isclose(a, b, rel_tol=0.05, abs_tol=0.02)
