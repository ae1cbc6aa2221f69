"""Every result says what the target can do without the transfer, and whether the transfer is better than that."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import StandardScaler

from piebald import vertical
from piebald.core.errors import SettingError
from piebald.vertical.baselines import (
    COMMON,
    CONSTANT,
    JOINED,
    OWN,
    SHARED,
    TRANSFER,
    plain_models,
    scored,
    tables_of,
    verdict_of,
)
from piebald.vertical.party_data import load, load_files
from piebald.vertical.party_store import PartyStore
from piebald.vertical.transfer_runs import run

from .conftest import small
from .test_files import folder, own, pytestmark  # noqa: F401

BOTH = ("mean radius", "mean texture")


def holdings(common=()):
    settings = small(data={"name": "breast_cancer", "overlap": 100, "common": common})
    return load(settings.data, 0)


def by_hand(x, y, rows) -> list[float]:
    scale = StandardScaler().fit(x)
    return LogisticRegression(max_iter=1000).fit(scale.transform(x), y).decision_function(scale.transform(rows))


def test_each_baseline_learns_from_the_rows_and_columns_that_its_name_says():
    held = holdings(BOTH)
    source, target = held["source"], held["target"]
    found = plain_models(held)
    assert set(found) == {CONSTANT, SHARED, COMMON, JOINED}
    shared = source.y[source.overlap]
    both = torch.cat([source.x[source.overlap], target.x[target.overlap]], 1)
    there, here = ([one.features.index(name) for name in BOTH] for one in (source, target))
    for name, expected in {
        SHARED: by_hand(target.x[target.overlap], shared, target.test),
        COMMON: by_hand(source.x[:, there], source.y, target.test[:, here]),
        JOINED: by_hand(both, shared, torch.cat([source.test, target.test], 1)),
    }.items():
        torch.testing.assert_close(found[name], torch.as_tensor(expected), rtol=1e-9, atol=1e-9)


def test_without_common_columns_or_without_the_partner_there_are_fewer():
    held = holdings()
    assert set(plain_models(held)) == {CONSTANT, SHARED, JOINED}
    assert set(plain_models({"target": held["target"]})) == {CONSTANT}
    labels = torch.zeros(len(held["target"].x), dtype=torch.float64)
    assert set(plain_models({"target": replace(held["target"], own_y=labels)})) == {CONSTANT}  # it has no label
    labels[:40] = held["target"].test_y[:40]
    assert set(plain_models({"target": replace(held["target"], own_y=labels)})) == {CONSTANT, OWN}


def test_the_verdict_is_the_packages_over_rows_and_leaves_the_joined_table_out():
    target = holdings()["target"]
    labels = target.test_y
    noise = torch.randn(len(labels), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    given = {TRANSFER: labels + noise, SHARED: noise, CONSTANT: torch.zeros(len(labels)), JOINED: labels}
    rows = scored(given, labels, 3)
    assert {row["model"]: row["value"] for row in rows} == {
        name: pytest.approx(roc_auc_score(labels > 0, scores), abs=1e-6) for name, scores in given.items()
    }
    with PartyStore.of(None, "target") as store:
        store.row_scores(rows)
        verdict = verdict_of(tables_of({0: store.rows("row_score")}))
    assert verdict.leader == TRANSFER
    assert verdict.behind == [SHARED]
    assert verdict.beats_naive
    assert JOINED not in verdict.leads
    assert "other rows" in verdict.meaning()


def test_labels_of_one_kind_alone_say_nothing():
    assert scored({TRANSFER: torch.ones(4)}, torch.ones(4), 1) == []
    assert verdict_of(tables_of({0: []})) is None


@pytest.mark.full
def test_a_simulation_prints_what_it_is_without_alignment_and_by_ftl(tmp_path):
    settings = small(method={"kind": "smmd", "kernel": "linear"}, runtime={"compare": True}, steps=2)
    made = run(settings, out=tmp_path / "run")
    bare = run(small(method={"kind": "smmd", "kernel": "linear", "alpha": 0.0}, steps=2))
    assert made.baselines["alpha = 0"] == pytest.approx(bare.score.auc, abs=1e-6)
    assert set(made.baselines) == {CONSTANT, SHARED, JOINED, "alpha = 0", "FTL"}
    assert made.baselines[CONSTANT] == 0.5
    assert vertical.result(tmp_path / "run") == made
    printed = {row["name"]: row["value"] for row in made.table()}
    assert printed[f"AUC of {SHARED}"] == f"{made.baselines[SHARED]:.4f}"
    assert printed["does it pay"] == made.verdict


@pytest.mark.full
def test_several_seeds_are_so_many_runs_with_one_verdict_and_finished_ones_are_not_trained_again(tmp_path):
    settings, steps = small(steps=2, watch_every=1, seed=5), []
    found = vertical.compare(settings, (0, 3), tmp_path / "runs", watch=steps.append)
    alone = [run(small(steps=2, watch_every=1, seed=seed)) for seed in (0, 3)]
    for place, one in enumerate(alone):
        assert found.scores[TRANSFER].values[place, 0] == pytest.approx(one.score.auc, abs=1e-6)
        assert found.scores[SHARED].values[place, 0] == pytest.approx(one.baselines[SHARED], abs=1e-12)
    by_name = {row["model"]: row for row in found.table()}
    assert by_name[SHARED]["minus the transfer"] == pytest.approx(
        sum(one.baselines[SHARED] - one.score.auc for one in alone) / 2, abs=1e-6
    )
    assert (by_name[CONSTANT]["AUC"], found.plain()["seeds"]) == (0.5, [0, 3])
    count = len(steps)
    assert count == 4
    again = vertical.compare(settings, (0, 3), tmp_path / "runs", watch=steps.append)
    assert (again.verdict, len(steps)) == (found.verdict, count)


def test_one_party_alone_is_not_repeated_with_seeds(tmp_path):
    settings = small(runtime={"credentials": str(tmp_path)})
    with pytest.raises(SettingError, match="credentials belong to one party"):
        vertical.compare(settings, (0, 1))


@pytest.mark.full
def test_a_target_with_labels_of_its_own_is_told_what_these_alone_give(folder):  # noqa: F811
    made = run(own())
    held = load_files(own().files, ("target",), own().data.test, own().seed)["target"]
    known = held.own_y != 0
    assert 0 < int(known.sum()) <= len(held.x)
    expected = roc_auc_score(held.test_y > 0, by_hand(held.x[known], held.own_y[known], held.test))
    assert made.baselines[OWN] == pytest.approx(expected, abs=1e-6)
    assert JOINED not in made.baselines  # nobody has both parties' columns of the rows that score it
