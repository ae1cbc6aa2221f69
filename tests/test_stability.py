"""What is frozen is what docs/reference/stability.md says: a change of it is seen before it is released."""

from __future__ import annotations

import json
import re
from pathlib import Path

import piebald
from piebald.federation.link.wire_format import MINOR, PROTOCOL
from piebald.methods.recipe import Recipe
from tests.stable_surface import LISTING, surface

PAGE = (Path(__file__).parents[1] / "docs/reference/stability.md").read_text("utf-8")


def test_the_frozen_surface_is_the_stored_one() -> None:
    """After a change that is meant: `python -m tests.stable_surface`, and a line in CHANGELOG.md."""
    assert json.loads(json.dumps(surface())) == json.loads(LISTING.read_text("utf-8"))


def test_the_page_names_all_that_is_frozen() -> None:
    named = set(re.findall(r"`(\w+)`", PAGE))
    bases = {Recipe.model_fields[axis].annotation.__name__ for axis in Recipe.axes if axis != "transforms"}  # type: ignore[union-attr]
    assert {*dir(piebald), *bases, "Transform"} <= named
    assert f"protocol {PROTOCOL}, minor {MINOR}" in PAGE
