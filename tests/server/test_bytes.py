"""Bytes are counted where they are sent, and agree with arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from piebald import recipes
from piebald.core.parameters import Layout
from piebald.methods.sharing import AllExcept
from tests.fakes import classified, few, simulate


def network(widths: list[int], norm: bool) -> nn.Module:
    """4 inputs, hidden layers, 2 classes."""
    layers: list[nn.Module] = []
    before = 4
    for width in widths:
        layers += [nn.Linear(before, width), *([nn.BatchNorm1d(width)] if norm else []), nn.Tanh()]
        before = width
    return nn.Sequential(*layers, nn.Linear(before, 2))


def expected(results: list[dict[str, Any]], layout: Layout, control: bool) -> list[tuple[int, int]]:
    """Down: the shared numbers, at first contact the private ones, and the control variate.  Up: no private number."""
    met: set[int] = set()
    costs = []
    for row in results:
        down = layout.shared * (2 if control else 1)
        if row["client"] not in met and layout.shared:  # where nothing is shared nothing goes out
            down += layout.size - layout.shared
        met.add(row["client"])
        costs.append((4 * down, 4 * layout.shared * (2 if control else 1)))
    return costs


@pytest.mark.full
@settings(few, max_examples=15)
@given(st.data())
def test_every_number_sent_costs_four_bytes(data: st.DataObject) -> None:
    with torch.random.fork_rng():
        model = network(data.draw(st.lists(st.integers(1, 5), max_size=2)), data.draw(st.booleans()))
    names = [slot.name for slot in Layout.of(model).slots]
    private = data.draw(st.sets(st.sampled_from(names)).map(sorted))
    layout = Layout.of(model, private)
    method = data.draw(st.sampled_from(["fedavg", "scaffold", "ditto", "fedadam"]))
    recipe = recipes.make(method, cohort=data.draw(st.integers(1, 4)), batch=3)
    recipe = recipe.with_(sharing=AllExcept(private_layers=tuple(private)))
    run = simulate(recipe, classified(5, 2, 8, 4), model, rounds=3, evaluate_every=data.draw(st.integers(0, 2)))
    costs = expected(run.results, layout, control=method == "scaffold")
    assert [(row["bytes_down"], row["bytes_up"]) for row in run.results] == costs
    for step in run.rounds:
        rows = [row for row in run.results if row["version"] == step["version"]]
        assert step["bytes_down"] == sum(row["bytes_down"] for row in rows)
        assert step["bytes_up"] == sum(row["bytes_up"] for row in rows)


def test_local_sends_nothing_either_way() -> None:
    run = simulate(recipes.local(cohort=1.0), classified(5, 4), network([3], norm=False), rounds=3)
    assert len(run.results) == 6
    assert not any(row["bytes_up"] or row["bytes_down"] for row in run.results)


@pytest.mark.parametrize("every", [0, 1])
def test_evaluation_costs_nothing(every: int) -> None:
    run = simulate(recipes.fine_tuned(cohort=1), classified(5, 4), network([3], True), rounds=3, evaluate_every=every)
    size = Layout.of(run.work.model).size
    assert sum(row["bytes_down"] + row["bytes_up"] for row in run.rounds) == 3 * 2 * 4 * size
    assert bool(run.scores) == bool(every)


def test_evaluation_does_not_count_as_the_first_contact() -> None:
    """Clients are scored before they take part; the private numbers are still counted at their first task."""
    model = network([3], norm=False)
    run = simulate(recipes.hdafl(cohort=1), classified(5, 4, 6, 7), model, rounds=6)
    layout = Layout.of(model, ["2.weight", "2.bias"])
    assert [(r["bytes_down"], r["bytes_up"]) for r in run.results] == expected(run.results, layout, control=False)
    assert len({row["client"] for row in run.results}) < 6
