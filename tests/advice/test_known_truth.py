"""What is said of federations whose truth is known: it pays, it does not, it cannot be known; and who is named."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import piebald
from piebald import recipes
from piebald.advice.adviser import _same_rung
from piebald.advice.evidence import own_methods
from piebald.advice.odd_sites import far_targets, misfits, odd_sites, over_rows
from piebald.report.paired import Scores

FILE = Path(__file__).parents[2] / "benchmarks" / "advise" / "simulated.py"
SMALL: dict[str, Any] = {"rounds": 4, "seeds": (0, 1), "budget": 80, "families": ["scaffold", "ifca"]}


@pytest.fixture(scope="module")
def simulated() -> Any:
    """The federations of the benchmark."""
    spec = importlib.util.spec_from_file_location("simulated", FILE)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["simulated"] = module  # where its dataclasses look for it
    assert spec.loader is not None
    spec.loader.exec_module(module)
    yield module
    del sys.modules["simulated"]


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [
        "alike, few rows", "a rule for each site, plenty of rows", "one site contradicts",
        "hardly any rows to judge by", "a site of twenty rows contradicts", "two groups", "one site with random labels",
        "one huge among tiny", "pure noise",
    ],
)  # fmt: skip
def test_what_is_said_is_true(name: str, simulated: Any) -> None:
    made = simulated.MADE[name]
    answer = simulated.advise(made, **SMALL)
    assert answer.pays in made.pays
    named = simulated.sites_named(answer, [f"s{number}" for number in range(8)])
    assert set(made.named) <= set(named)
    # one innocent site in twenty federations may be named by chance, and a huge one may well be better off alone
    assert len(set(named) - set(made.named)) <= 1


def test_nobody_is_told_that_it_pays_where_nobody_gains(simulated: Any) -> None:
    said = simulated.without_gain(60)
    assert said["pays"] <= 6  # 5 % of 60 are 3
    assert said["does not pay"] <= 6
    assert said["wrongly named"] <= 0.04 * said["sites"]


NAMES = [f"s{number}" for number in range(8)]


def scores(*shares: float, rows: int = 200) -> Scores:
    return Scores([list(shares)], NAMES, sizes=[rows] * 8, counted=True)


ALONE = scores(*[0.7] * 8)
CONSTANT = {"the most frequent class": scores(*[0.5] * 8)}


def test_a_site_is_odd_where_one_model_for_all_is_far_worse_than_its_own() -> None:
    (said,) = odd_sites(ALONE, scores(*[0.75] * 7, 0.3), CONSTANT, "accuracy")
    assert said.startswith("At odds with the others: s7, where one model for all is up to 40.0 points worse")
    assert odd_sites(ALONE, scores(*[0.75] * 7, 0.65), CONSTANT, "accuracy") == []  # within the chance of 200 rows
    assert odd_sites(ALONE, scores(*[0.75] * 4, *[0.3] * 4), CONSTANT, "accuracy") == []  # two kinds, and nobody is odd
    # two kinds, of which only one site is beyond the chance of its rows by all sites' bound
    assert odd_sites(ALONE, scores(*[0.75] * 4, *[0.6] * 3, 0.3), CONSTANT, "accuracy") == []
    assert odd_sites(None, ALONE, CONSTANT, "accuracy") == []


def small_site(share: float, others: tuple[float, ...] = (0.8, 0.85, 0.75, 0.8, 0.9, 0.8, 0.85)) -> list[str]:
    """What is said of s7, which has 5 validation rows and 15 in all, of which one model for all is right on a share."""

    def table(rows: tuple[int, int], *shares: float) -> Scores:
        return Scores([[*shares]], NAMES, sizes=[rows[0]] * 7 + [rows[1]], counted=True)

    judged, fit = table((60, 5), *others, share), table((180, 10), *others, share)
    seen, constants = over_rows(judged, fit), [table((240, 15), *[0.5] * 8)]
    assert list(seen.sizes) == [240] * 7 + [15]
    return misfits(judged, seen, constants)


def test_a_site_of_twenty_rows_is_named_where_one_model_for_all_is_right_on_hardly_any() -> None:
    """A model of its own is no measure there, and five validation rows alone say little."""
    asked = "as at no other site: do labels or inputs mean the same?"
    assert small_site(0.2) == [f"One model for all fails at s7 (3 of 15 rows right), {asked}"]
    assert small_site(0.6) == []  # harder, but better than one answer for every row
    assert small_site(0.4, (0.6, 0.65, 0.7, 0.65, 0.6, 0.7, 0.65)) == []  # 6 of 15 rows may well be chance
    assert small_site(0.2, (0.9, 0.3, 0.8, 0.35, 0.9, 0.4, 0.8)) == []  # others are as unlike one another
    errors = Scores([[0.1] * 7 + [0.9]], NAMES, sizes=[60] * 8)
    assert misfits(errors, errors, []) == []  # no shares of rows


def test_sites_alike_are_named_in_one_federation_of_twenty_at_most_and_small_ones_that_contradict_in_most() -> None:
    draw, innocent, guilty, sizes = np.random.default_rng(0), 0, 0, np.array([60] * 7 + [5])
    for _ in range(200):
        shares = np.clip(draw.normal(0.82, 0.05, 8), 0.5, 0.98)
        for turned in (False, True):
            right = np.where([False] * 7 + [turned], 1 - shares, shares)
            judged, fit = (draw.binomial(rows, right) / rows for rows in (sizes, 2 * sizes))
            tables = [
                Scores([part], NAMES, sizes=rows, counted=True) for part, rows in ((judged, sizes), (fit, 2 * sizes))
            ]
            said = misfits(tables[0], over_rows(*tables), [scores(*[0.5] * 8)])
            guilty, innocent = guilty + (turned and "s7 (" in " ".join(said)), innocent + (not turned and bool(said))
    assert innocent <= 10  # 5 % of 200
    assert guilty >= 160


def test_one_model_for_all_that_was_dropped_early_is_compared_where_local_was_at_that_time() -> None:
    """A site that contradicts the others makes one model for all bad, and so has it dropped before the end."""

    def runner(recipe: Any, *rungs: int) -> Any:
        return SimpleNamespace(
            recipe=recipe, scores={rung: f"{recipe.name} {rung}" for rung in rungs}, reached=max(rungs)
        )

    alone = runner(recipes.local(), 5, 10, 20)
    tried = [alone, runner(recipes.fedprox(), 5), runner(recipes.fedavgm(), 5, 10), runner(recipes.ditto(), 5, 10, 20),
             runner(recipes.ifca(k=2), 5, 10, 20), runner(recipes.hdafl(), 5, 10, 20)]  # fmt: skip
    assert _same_rung(alone, tried) == ("local 10", "fedavgm 10")
    assert _same_rung(alone, tried[3:]) == (None, None)


def test_a_site_is_blank_where_no_method_beats_a_constant() -> None:
    (said,) = odd_sites(scores(*[0.9] * 7, 0.5), scores(*[0.9] * 7, 0.52), CONSTANT, "accuracy")
    assert said == "Not better than one answer for every row by any method: s7: are the labels right?"
    hard = scores(*[0.9] * 7, 0.65)  # what is learned there is little, and not nothing
    assert odd_sites(hard, hard, CONSTANT, "accuracy") == []
    # where one class has nine rows of ten nobody is as much better than it as elsewhere
    rare = {"constant": scores(*[0.5] * 7, 0.9)}
    assert odd_sites(scores(*[0.9] * 8), scores(*[0.9] * 8), rare, "accuracy") == []
    errors = {"constant": scores(*[0.5] * 7, 0.1)}
    assert odd_sites(scores(*[0.1] * 8), scores(*[0.1] * 8), errors, "brier", higher_is_better=False) == []
    few = [scores(*[0.9] * 7, 0.5, rows=10)] * 2
    assert odd_sites(*few, {"constant": scores(*[0.5] * 8, rows=10)}, "accuracy") == []


@pytest.mark.parametrize(("rows", "named"), [(6, False), (60, True)])
def test_few_rows_say_little_of_their_own_noise(rows: int, named: bool) -> None:
    """The gain of s7 is 3.3 standard errors below half of what is usual, which six rows may well be by chance."""
    draw = np.random.default_rng(0)
    single = {(0, name): 5 + draw.normal(0, 0.1, 200) for name in NAMES[:7]}
    noise = draw.normal(size=rows)
    noise = (noise - noise.mean()) / noise.std(ddof=1) * rows**0.5 * 0.6  # a standard error of 0.6
    single[0, "s7"] = 0.5 + noise
    sizes = [200] * 7 + [rows]
    learned = Scores([[single[0, name].mean() for name in NAMES]], NAMES, sizes=sizes, rows=single)
    blank = {cell: np.zeros(len(values)) for cell, values in single.items()}
    constant = Scores(np.zeros((1, 8)), NAMES, sizes=sizes, rows=blank)
    said = odd_sites(learned, learned, {"the typical value": constant}, "r2")
    assert said == ["Not better than one answer for every row by any method: s7: are the labels right?"] * named


@pytest.mark.full
def test_the_answer_names_sites_with_targets_far_from_all_others() -> None:
    """The look says it, too, and before training; who reads the answer alone must know why all methods are alike."""
    draw = np.random.default_rng(0)
    parts = {
        name: {split: (draw.normal(size=(20, 2)).astype("float32"), draw.normal(size=20).astype("float32"))
               for split in ("train", "validation", "test")}
        for name in ("north", "south")
    }  # fmt: skip
    parts["south"]["test"][1][[3, 5]] = 999_999.0
    given = piebald.advise(
        piebald.clients_from(parts), piebald.models.build_model("logistic", (2,), 1), rounds=1, budget=4,
        families=["fedavg"], more_data=False,
    )  # fmt: skip
    said = (
        "Targets over 20 times as far from the median as 95 % of all: 2 rows at south: if they are errors, correct "
        "them."
    )
    assert given.odd[0] == said
    beware = next(text for heading, text, _ in given.parts() if heading == "Beware")
    assert beware.startswith(said)
    labels = {
        name: {split: (x, (y > 0).astype("int64")) for split, (x, y) in splits.items()}
        for name, splits in parts.items()
    }
    assert far_targets(piebald.clients_from(labels), ["north", "south"]) == []


def test_a_client_leaves_the_others_only_where_it_differs_beyond_noise() -> None:
    """Eight alike with noise stay together, and one that is far better off alone leaves."""
    rng = np.random.default_rng(0)
    joined = scores(*(0.8 + rng.normal(0, 0.02, 8)))
    alone = scores(*(0.75 + rng.normal(0, 0.02, 8)))
    assert set(own_methods({"fedavg": joined, "local": alone}, "fedavg").values()) == {"fedavg"}
    odd = scores(*joined.values[0, :7], 0.4)
    left = own_methods({"fedavg": odd, "local": alone}, "fedavg", errors=2)
    assert left == dict.fromkeys(NAMES[:7], "fedavg") | {"s7": "local"}
    of_error = own_methods({"fedavg": alone, "local": odd}, "fedavg", higher_is_better=False)
    assert of_error["s7"] == "local"
