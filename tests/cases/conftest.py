"""Runs of an experiment file beside a table, as a user starts them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest

import piebald
from piebald.experiments.file import ExperimentSettings

FromFile = Callable[..., piebald.Run]


@pytest.fixture
def from_file(tmp_path: Path) -> FromFile:
    """Return the run of a file's text, on a table that lies beside it as rows.csv."""

    def run(text: str, table: pandas.DataFrame | None = None, *overrides: str, **options: Any) -> piebald.Run:
        if table is not None:
            table.to_csv(tmp_path / "rows.csv", index=False)
        (tmp_path / "case.toml").write_text(text)
        settings = ExperimentSettings.load(tmp_path / "case.toml", overrides)
        plan = settings.plan()
        given = {"rounds": settings.rounds, "stop": plan.stop, "unseen": settings.unseen, "measure": "none"}
        return piebald.run(next(iter(plan.recipes.values())), plan.clients, plan.model, **{**given, **options})

    return run
