"""The ensemble of the three best methods: what it scores, what is said of it, and a file that makes it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

from piebald import models, partition, recipes
from piebald.advice import advise
from piebald.advice.tuning.trial_runs import without_test_rows
from piebald.methods.recipe import Recipe
from piebald.models.prediction import mean_outputs
from piebald.report.tables import History
from piebald.runs.run import opened


def test_probabilities_and_numbers_are_averaged_as_what_they_are() -> None:
    drawn = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for kind, link in (("classes", lambda z: z.softmax(-1)), ("labels", torch.sigmoid), ("values", lambda z: z)):
        torch.testing.assert_close(link(mean_outputs(list(drawn), kind)), link(drawn).mean(0))  # type: ignore[arg-type]


def recipe_in(folder: Path) -> Recipe:
    with History(folder) as history:
        return recipes.rebuild(history.meta["recipe"]["table"])


def test_it_is_scored_on_validation_rows_and_offered_as_a_file(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6, 60, 4)).astype("float32")
    y = (x[..., 0] + rng.normal(size=(6, 60)) > 0).astype(int)
    clients = partition.clients_from({f"s{n}": (x[n], y[n]) for n in range(6)}, validation=0.4, test=0.2)
    model = models.build_model("mlp", (4,), 2, hidden=(4,))
    found = advise(
        clients, model, rounds=4, families=["ditto"], seeds=(0,), training={"batch": 8}, more_data=False,
        out=tmp_path / "advice",
    )  # fmt: skip
    assert found.ensemble is not None
    members = found.ensemble.recipes
    assert set(members) == {"local", "fedavg", "ditto"}
    shares = np.zeros((6, 24, 2))
    for label, recipe in members.items():
        folders = [
            place.parent
            for place in (tmp_path / "advice" / "runs" / label).rglob("run.db")
            if recipe_in(place.parent) == recipe
        ]
        with opened(folders[0], without_test_rows(clients), model) as run:
            for client in range(6):
                with torch.no_grad():
                    shares[client] += run.model(client)(clients.rows(client, "validation").x).softmax(1).numpy() / 3
    truth = np.stack([clients.rows(client, "validation").y.numpy() for client in range(6)])
    right = (shares.argmax(2) == truth).mean(1)
    assert found.ensemble.score == pytest.approx(right.mean())
    assert found.ensemble.gain.noise == "rows"
    chosen = next(row["score"] for row in found.tried if row["method"] == found.recommended)
    assert found.ensemble.gain.mean == pytest.approx(right.mean() - chosen)
    said = " ".join(found.details().split())
    assert "the mean of the predictions of " in said
    assert found.plain()["ensemble"]["members"] == list(members)
    table = tomllib.loads((tmp_path / "advice" / "ensemble.toml").read_text())
    named = {row.pop("label"): row for row in table["recipes"]}
    assert {label: recipes.make(row.pop("name"), **row) for label, row in named.items()} == members
