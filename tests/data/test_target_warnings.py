"""Targets that can be used and may not be what was meant: a warning for each, and none for all others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import piebald

X = np.arange(24.0).reshape(12, 2)
OWNER = np.repeat(["a", "b", "c"], 4)

ODD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "whole floats": (np.arange(12) % 2.0, {}, "targets are real numbers and all of them are whole (0.0, 1.0), so"),
    "one class": (np.full(12, 3), {}, "all 12 targets are the same, '3'"),
    "one name": (np.full(12, "ill"), {}, "all 12 targets are the same, 'ill'"),
    "from seven": (np.arange(12) % 2 * 5 + 7, {}, "only 2 of 13 classes have rows (7, 12)"),
    "one amount": (np.full(12, 0.5), {"regression": True}, "all 12 targets are the same, '0.5'"),
}

FINE: dict[str, tuple[Any, dict[str, Any]]] = {
    "classes": (np.arange(12) % 3, {}),
    "from one": (np.arange(12) % 2 + 1, {}),
    "names": (np.repeat(["ill", "well"], 6), {}),
    "amounts": (np.arange(12) / 8, {}),
    "amounts that are whole": (np.arange(12.0), {"regression": True}),
    "one class of known ones": (np.full(12, 1), {"classes": ["ill", "well"]}),
    "several": (np.eye(12), {}),
}


@pytest.mark.parametrize(("y", "options", "told"), ODD.values(), ids=ODD)
def test_what_is_odd_is_said(y: Any, options: dict[str, Any], told: str, caplog: pytest.LogCaptureFixture) -> None:
    piebald.clients_from((X, y, OWNER), **options)
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("piebald.data.clients.sources", "WARNING")
    assert told in record.getMessage()


@pytest.mark.parametrize(("y", "options"), FINE.values(), ids=FINE)
def test_what_is_usual_is_not(y: Any, options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    piebald.clients_from((X, y, OWNER), **options)
    assert not caplog.records


@pytest.mark.parametrize(("kind", "shape", "most"), [
    ("uint16", (1, 2, 2), 4095), ("int16", (1, 2, 2, 2), 1200), ("int32", (2, 2), 255), ("uint8", (3,), 255),
])  # fmt: skip
def test_intensities_that_are_not_scaled_are_said(
    kind: str, shape: tuple[int, ...], most: int, caplog: pytest.LogCaptureFixture
) -> None:
    clients = piebald.clients_from((np.full((12, *shape), most, kind), np.arange(12) % 2, OWNER))
    assert float(clients.rows(0, "train").x.max()) == most
    assert f"are taken as numbers up to {most}: divide them by" in caplog.text
    caplog.clear()
    piebald.clients_from((np.full((12, *shape), 100, kind), np.arange(12) % 2, OWNER))
    assert not caplog.text


def test_two_classes_of_one_name_are_refused() -> None:
    with pytest.raises(piebald.SettingError, match="classes must be different names, got 'a' twice"):
        piebald.clients_from((X, np.arange(12) % 2, OWNER), classes=["a", "a"])
