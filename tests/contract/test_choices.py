"""Every recipe lets its clients choose their models, in this process, in workers and on Ray."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import piebald
from piebald import partition
from piebald.methods.choice import FEWEST_ROWS
from piebald.runs.finished_run import Run
from piebald.runs.run import opened

from .conftest import TWO, carry_out, fitting, method, on_ray, vector

pytestmark = pytest.mark.full


def unlike() -> partition.PooledClients:
    """Five clients of 60 rows, whose labels mean something else at each, so that most need models of their own."""
    draw, pairs = torch.Generator().manual_seed(3), []
    for client in range(5):
        x = torch.randn(60, 6, generator=draw)
        pairs.append((x, (x[:, client] > 0).long() + 2 * (x[:, client - 1] > 0.5).long()))
    public = (torch.randn(9, 6, generator=draw), torch.arange(9) % 4)
    return partition.clients_from(pairs, test=0.2, validation=0.3, classes=list("abcd"), public_rows=public)


def assert_chosen(run: Run) -> None:
    """Every client has a choice, and its model has the score that the choice was judged by."""
    clients, objective = unlike(), run.work.objective
    assert min(one["rows"] for one in run.choices) >= FEWEST_ROWS
    assert [one["client"] for one in run.choices] == list(range(len(clients)))
    for one in run.choices:
        assert one["chosen"] in one["candidates"]
        rows = clients.rows(one["client"], "test")
        with torch.no_grad():
            loss = float(objective.loss(run.model(one["client"])(rows.x), rows.y).mean())
        if "judged" in one:
            assert loss == pytest.approx(one["judged"]["chosen"]["loss"], rel=1e-3, abs=1e-5)


def test_every_recipe_lets_its_clients_choose(name: str, tmp_path: Any) -> None:
    assert_chosen(carry_out(method(name), unlike(), keep="best_for_each", out=tmp_path / "run"))


def assert_alike(one: Run, other: Run) -> None:
    for mine, theirs in itertools.zip_longest(one.choices, other.choices):
        assert mine["chosen"] == theirs["chosen"]
        torch.testing.assert_close(vector(one, mine["client"]), vector(other, mine["client"]), atol=1e-5, rtol=1e-4)


@pytest.mark.long
def test_workers_and_ray_find_the_same_neighbours(cluster: Any) -> None:
    found = [
        run.choices
        for run in (
            carry_out(method("fedavg"), unlike(), keep="knn_per"),
            carry_out(method("fedavg"), unlike(), keep="knn_per", simulator=TWO),
            on_ray(method("fedavg"), unlike(), keep="knn_per"),
        )
    ]
    assert found[0] == found[1] == found[2]
    assert "neighbours" in {one["chosen"] for one in found[0]}


@pytest.mark.long
@pytest.mark.parametrize("name", ["hdafl", "ditto"])
def test_workers_and_ray_choose_the_same(cluster: Any, name: str) -> None:
    recipe = method(name, momentum=0.9, keep_momentum=True)
    here = carry_out(recipe, unlike(), keep="best_for_each")
    assert {one["chosen"] for one in here.choices} - {"global"}
    assert_alike(here, carry_out(recipe, unlike(), keep="best_for_each", simulator=TWO))
    assert_alike(here, on_ray(recipe, unlike(), keep="best_for_each"))


@pytest.mark.parametrize("name", ["hdafl", pytest.param("ifca", marks=pytest.mark.long)])
def test_a_newcomer_of_a_run_on_ray_gets_what_one_of_the_simulator_gets(
    cluster: Any, name: str, tmp_path: Path
) -> None:
    """From the run folder, where nothing of Ray is asked for."""
    rows = unlike().rows(0, "train")
    made = on_ray(method(name), unlike(), out=tmp_path / "run")
    again = opened(tmp_path / "run", unlike(), fitting(method(name)))
    found = [
        piebald.adapt(run, (rows.x, rows.y), validation=0.4, epochs=2)
        for run in (carry_out(method(name), unlike()), made, again)
    ]
    assert len({one.best for one in found}) == 1
    assert {"private" if name == "hdafl" else "cluster", "local", "mixed"} <= {one.name for one in found[0].methods}
    for other in found[1:]:
        torch.testing.assert_close(other.vector, found[0].vector, atol=1e-5, rtol=1e-4)
    assert torch.equal(found[1].vector, found[2].vector)
