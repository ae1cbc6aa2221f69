"""The headline of the dots beside clients' names claims a difference at a client only where it is beyond chance."""

from __future__ import annotations

import numpy as np
import pytest

from piebald.report.comparison import Comparison
from piebald.report.findings import client_gaps, headline, noise
from piebald.report.page.client_section import dots
from piebald.report.tables import History
from piebald.storage.store import RunStore

HOSPITALS = {"cleveland": 76, "hungarian": 74, "switzerland": 31, "va": 50}


def one_run(label, seed, values, *, rows=HOSPITALS, metric="accuracy", higher=True, trained=None):
    """A run in memory of the recipe `label`; the clients' scores by name, on so many test rows."""
    store = RunStore.create(
        None,
        {"recipe": {"name": label}, "label": label, "seed": seed, "metric": metric, "higher_is_better": higher},
    )
    names = list(values)
    store.clients([{"client": c, "name": name, "test": rows.get(name)} for c, name in enumerate(names)])
    took_part = [c for c, name in enumerate(names) if trained is None or name in trained]
    tasks = [{"id": 9 * seed + c, "client": c, "kind": "train", "status": "ok"} for c in took_part]
    store.commit({"version": 1, "time": 1.0, "wall": 1.0}, tasks)
    head = {"version": 1, "model": "global", "split": "test", "metric": metric}
    store.scores([head | {"client": c, "value": values[name]} for c, name in enumerate(names)])
    return History(store)


def said(*runs):
    made = Comparison(runs)
    gaps = client_gaps(made)
    return headline(made, gaps), noise(gaps)


def hospitals(**scores):
    """A run of each label with two seeds, of equal scores."""
    return [one_run(label, seed, values) for label, values in scores.items() for seed in (0, 1)]


ALONE = {"cleveland": 0.747, "hungarian": 0.873, "switzerland": 0.935, "va": 0.836}


def test_a_wide_gap_on_few_rows_is_named_and_not_claimed():
    """The tutorial's hospitals: 15.5 points at one hospital, on 31 test patients."""
    fedavg = ALONE | {"cleveland": 0.792, "switzerland": 0.78}
    title, caption = said(*hospitals(local=ALONE, fedavg=fedavg))
    assert title == (
        "No client gains or loses beyond chance; methods differ most at switzerland, where fedavg is 15.5 points below "
        "local"
    )
    assert "multiplying by 4 differences" in caption
    chart = dots(Comparison(hospitals(local=ALONE, fedavg=fedavg)))
    assert chart is not None
    assert (chart.title, caption in chart.caption) == (title, True)


def test_a_gap_beyond_chance_is_claimed_even_where_a_wider_one_is_not():
    rows = HOSPITALS | {"cleveland": 2_000}
    fedavg = ALONE | {"cleveland": 0.847, "switzerland": 0.78}
    both = [one_run("local", 0, ALONE, rows=rows), one_run("fedavg", 0, fedavg, rows=rows)]
    assert said(*both)[0] == (
        "1 of 4 clients gains or loses beyond chance; methods differ most at cleveland, where fedavg is 10.0 points "
        "above local"
    )


def test_without_training_alone_every_two_methods_are_compared():
    apart = dict.fromkeys(ALONE, 0.5)
    runs = hospitals(fedavg=ALONE, ditto=ALONE, hdafl=apart)
    title, caption = said(*runs)
    assert title.startswith("At 4 of 4 clients methods differ clearly; they differ most at switzerland, where ")
    assert title.endswith("is 43.5 points above hdafl")
    assert "multiplying by 12 differences" in caption  # four clients, three pairs
    near = {name: value - 0.01 for name, value in ALONE.items()}
    title, _ = said(*hospitals(fedavg=ALONE, ditto=near))
    assert title.startswith("At no client do methods differ clearly; they differ most at ")


def test_seeds_that_disagree_prove_nothing_however_many_rows_there_are():
    rows = dict.fromkeys(ALONE, 1_000_000)
    runs = []
    for seed, shift in enumerate((0.05, -0.05, 0.05)):
        runs.append(one_run("local", seed, ALONE, rows=rows))
        runs.append(one_run("fedavg", seed, {name: value + shift for name, value in ALONE.items()}, rows=rows))
    assert said(*runs)[0].startswith("No client gains or loses beyond chance")


def test_a_client_that_never_trained_has_no_gap():
    fedavg = ALONE | {"switzerland": 0.0}
    runs = [one_run("local", 0, ALONE), one_run("fedavg", 0, fedavg, trained={"cleveland", "va", "hungarian"})]
    assert "switzerland" not in {gap.client for gap in client_gaps(Comparison(runs))}
    assert said(*runs)[0] == "All methods score the same at every client"


@pytest.mark.parametrize(("metric", "higher"), [("mae", False), ("balanced_accuracy", True)])
def test_of_a_metric_whose_noise_is_not_known_nothing_is_claimed(metric, higher):
    other = ALONE | {"va": 0.1}
    kind = {"metric": metric, "higher": higher}
    title, caption = said(one_run("local", 0, ALONE, **kind), one_run("ditto", 0, other, **kind))
    size = "0.736" if metric == "mae" else "73.6 points"
    assert title == f"Methods differ most at va, where ditto is {size} below local"
    assert caption == " How far chance moves the score of a single client is not known."


def test_rows_that_are_hidden_leave_chance_unknown():
    """A federation's sites may keep to themselves how many test rows they have."""
    title, caption = said(one_run("local", 0, ALONE, rows={}), one_run("ditto", 0, ALONE | {"va": 0.1}, rows={}))
    assert title == "Methods differ most at va, where ditto is 73.6 points below local"
    assert caption == " How far chance moves the score of a single client is not known."


def test_one_method_alone_has_no_gap():
    assert said(one_run("fedavg", 0, ALONE)) == ("Final accuracy of each client", "")


@pytest.mark.full
def test_equal_methods_are_told_apart_in_at_most_one_headline_of_twenty():
    """Scores of equal methods on rows of their own, which differ more than scores on the same rows do."""
    clients, wrong = [f"site {number}" for number in range(6)], 0
    rng = np.random.default_rng(5)
    rows = dict.fromkeys(clients, 40)
    for _ in range(60):
        level = rng.uniform(0.5, 0.95, 6)
        runs = [
            one_run(label, 0, dict(zip(clients, rng.binomial(40, level) / 40, strict=True)), rows=rows)
            for label in ("local", "fedavg", "ditto")
        ]
        wrong += not said(*runs)[0].startswith("No client gains or loses beyond chance")
    assert wrong <= 6  # 3 are expected at most; 6 is two standard errors more
