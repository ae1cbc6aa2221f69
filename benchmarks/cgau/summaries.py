"""Measured results by method and seed, and their 95 % intervals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jobs


def by_method(out: Path, part: str, setting: str) -> dict[str, dict[int, dict[str, Any]]]:
    """Return the results of one setting by method, then by seed."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for one in jobs.load(out, part):
        if one["job"]["setting"] == setting and one["job"]["rate"] is None:
            found.setdefault(one["job"]["method"], {})[one["job"]["seed"]] = one
    return found
