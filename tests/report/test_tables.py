from __future__ import annotations

import math

import numpy as np
import pytest

import piebald
from piebald import data, models, partition, recipes
from piebald.core.errors import RunFolderError, SettingError
from piebald.report import findings
from piebald.report.chart import Band
from piebald.report.comparison import Comparison, Interval
from piebald.report.page import details, wording
from piebald.report.page.report_page import render
from piebald.report.page.wording import BEHIND, NOT_BEHIND
from piebald.report.tables import History, load, quantile, spread
from piebald.storage.store import RunStore


def tiny(label, seed, values, *, sent=500_000, recipe=None, **meta):
    """A run in memory; values[v] are the clients' metric after step v + 1; a step sends 1 MB and takes 2 s."""
    described = {"recipe": {"name": recipe or label}, "label": label, "seed": seed, "metric": "accuracy"} | meta
    store = RunStore.create(None, described)
    for version, row in enumerate(values, 1):
        step = {"version": version, "time": 2.0 * version, "wall": 1.0, "bytes_down": sent, "bytes_up": sent}
        store.commit(step, [])
        head = {"version": version, "model": "global", "split": "test", "metric": described["metric"]}
        store.scores([head | {"client": client, "value": value} for client, value in enumerate(row)])
    return History(store)


def test_a_history_has_the_tables_and_the_final_figures():
    store = RunStore.create(None, {"recipe": {"name": "hdafl"}, "seed": 4, "metric": "accuracy", "status": "finished"})
    store.clients([{"client": c, "name": f"c{c}"} for c in range(20)])
    for version in (1, 2):
        store.commit(
            {"version": version, "time": 5.0 * version, "wall": version, "bytes_down": 100, "bytes_up": 30}, []
        )
    row = {"version": 2, "split": "test", "metric": "accuracy"}
    store.scores([row | {"client": c, "model": "global", "value": c / 20} for c in range(20)])
    store.scores(
        [row | {"client": 19, "model": "personal", "value": 1.0}]
    )  # counts in place of the global model's 0.95
    store.scores([row | {"client": 3, "model": "global", "split": "validation", "value": 0.0}])
    store.scores([row | {"client": 3, "model": "global", "metric": "loss", "value": 9.0}])
    store.scores([row | {"client": None, "model": "global", "value": 0.7}])
    history = History(store)
    final = history.final
    mean = (sum(c / 20 for c in range(19)) + 1) / 20
    assert history.accuracy == pytest.approx(mean)
    assert final["worst_decile"] == pytest.approx((0 + 0.05) / 2)
    sorted_values = [c / 20 for c in range(19)] + [1.0]
    for name, share in (("q10", 0.1), ("median", 0.5), ("q90", 0.9)):
        assert final[name] == pytest.approx(np.quantile(sorted_values, share))
    assert final["per_client"][19] == 1.0
    assert final["sd"] == pytest.approx(
        math.sqrt((sum((c / 20 - mean) ** 2 for c in range(19)) + (1 - mean) ** 2) / 20)
    )
    expected = {
        "recipe": "hdafl",
        "label": "hdafl",
        "seed": 4,
        "rounds": 2,
        "common": 0.7,
        "seconds": 10.0,
        "wall": 2.0,
    }
    assert expected.items() <= final.items()
    assert (final["bytes_down"], final["bytes_up"]) == (200, 60)
    assert len(history.scores) == 24
    assert history.frame("rounds")["bytes_up"].sum() == 60
    assert list(history.frame("results").columns)[:3] == ["id", "version", "client"]
    with pytest.raises(SettingError, match="did you mean 'scores'"):
        history.frame("score")


def test_an_empty_run_has_no_figures_and_no_errors():
    history = History(RunStore.create(None, {}))
    assert history.accuracy is None
    assert history.curve == []
    assert history.final["mean"] is None
    assert history.final["common"] is None
    assert history.to_target(0.5) is None
    assert history.frame("clients").empty


def test_validation_rows_judge_where_there_are_no_test_rows():
    store = RunStore.create(None, {"metric": "accuracy"})
    store.commit({"version": 1}, [])
    row = {"version": 1, "client": 0, "model": "global", "metric": "accuracy"}
    store.scores([row | {"split": "train", "value": 0.9}, row | {"split": "validation", "value": 0.5}])
    assert History(store).accuracy == 0.5


def test_the_target_is_first_reached_at():
    history = tiny("a", 1, [[0.2, 0.4], [0.5, 0.7], [0.4, 0.6], [0.9, 0.9]])
    assert history.to_target(0.55) == {"version": 2, "bytes": 2_000_000, "seconds": 4.0, "wall": 1.0, "mean": 0.6}
    assert history.to_target(0.95) is None
    error = tiny("a", 1, [[3.0], [2.0], [1.0]], metric="squared_error", higher_is_better=False)
    assert error.to_target(2.0)["version"] == 2
    assert error.final["worst_decile"] == 1.0
    errors = tiny("a", 1, [[3.0, 1.0, 2.0, 5.0, 4.0]], metric="squared_error", higher_is_better=False).final
    assert (errors["q10"], errors["median"], errors["q90"]) == pytest.approx((4.6, 3.0, 1.4))  # the worst first
    assert (
        History(RunStore.create(None, {"recipe": {"name": "a"}, "seed": 1, "metric": "accuracy"})).final["q10"] is None
    )


def test_one_round_is_a_round():
    best = [tiny("best", seed, [[0.9], [0.91], [0.92]]) for seed in range(2)]
    for later, words in (([[0.1], [0.5], [0.8]], "after 1 round"), ([[0.1], [0.5], [0.905]], "after 2 rounds")):
        made = Comparison([*best, *(tiny("other", seed, later) for seed in range(2))])
        assert findings.progress(made).endswith(words)


def test_runs_are_found_however_deep(runs, tmp_path):
    found = load([runs / "hdafl", runs])
    assert len(found) == 15
    assert found[0].label == "hdafl"
    with found[0] as history:
        assert history.name == "seed-1"
    (tmp_path / "empty").mkdir()
    for paths, message in (
        ([tmp_path / "empty"], "there is no run in"),
        ([tmp_path / "nowhere"], "is not a folder"),
        ([], "no run was named"),
    ):
        with pytest.raises(RunFolderError, match=message):
            load(paths)


# ------------------------------------------------------------------------------------------------------- side by side


def test_an_interval_by_students_t():
    assert Interval.of([]) is None
    assert Interval.of([0.5]) == Interval(0.5, None, None, 1)
    found = Interval.of([1.0, 2.0, 3.0])  # sd 1, t(2) = 4.3027
    assert (found.mean, found.count) == (2.0, 3)
    assert found.high - found.mean == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert found.mean - found.low == pytest.approx(found.high - found.mean)


@pytest.fixture
def two():
    return Comparison(
        [
            *(tiny("mine", seed, [[0.1, 0.1], [0.6 + 0.1 * seed, 0.8]], sent=100_000) for seed in (0, 1, 2)),
            *(tiny("fedavg", seed, [[0.1, 0.1], [0.5 + 0.1 * seed, 0.6]]) for seed in (0, 1, 5)),
        ]
    )


def test_baselines_come_first_and_the_best_is_ranked_first(two):
    assert two.labels == ["fedavg", "mine"]
    assert two.ranking() == ["mine", "fedavg"]


def test_differences_are_paired_by_seed(two):
    (row,) = two.paired("fedavg")
    assert row["seeds"] == 2  # 0 and 1; the others have no partner
    assert row["difference"] == pytest.approx(0.15)
    assert row["high"] - row["low"] == pytest.approx(0, abs=1e-9)  # the same difference in both pairs
    assert two.per_client("mine", "fedavg") == pytest.approx([0.1, 0.1, 0.2, 0.2])
    with pytest.raises(SettingError, match="there is no label 'fedavgg'"):
        two.paired("fedavgg")


def test_the_summary_has_a_row_a_label(two):
    mine, fedavg = two.summary()  # the best first
    assert (mine["label"], fedavg["label"]) == ("mine", "fedavg")
    assert mine["seeds"] == 3
    assert mine["mean"] == pytest.approx(0.75)
    assert mine["low"] < 0.75 < mine["high"]
    assert (mine["mb_up"], mine["mb_down"]) == pytest.approx((0.2, 0.2))
    assert fedavg["seconds"] == 4.0
    assert fedavg["common"] is None


def test_the_common_target_is_one_that_fedavg_reaches(two):
    assert two.target() == 0.55
    fedavg, mine = two.to_target(0.72)
    assert fedavg == {"label": "fedavg", "runs": 3, "reached": 1, "rounds": 2, "mb": 2.0, "seconds": 4.0, "wall": 1.0}
    assert (mine["reached"], mine["mb"]) == (2, pytest.approx(0.4))
    assert two.to_target(0.99)[0]["rounds"] is None


@pytest.mark.parametrize(
    ("ends", "better", "target"), [(0.6789, True, 0.67), (1234.5, False, 1300.0), (0.7, True, 0.7)]
)
def test_the_target_is_rounded_to_the_easy_side(ends, better, target):
    run = tiny("fedavg", 1, [[ends]], metric="number", higher_is_better=better)
    comparison = Comparison([run])
    assert comparison.target() == target
    assert comparison.to_target(target)[0]["reached"] == 1


def test_a_recipe_is_told_by_what_is_not_its_default():
    table = {
        "aggregation": {"kind": "dvw", "above_chance": True, "power": 1.0},
        "transforms": ["sign_flip", {"kind": "of_a_plugin", "size": 3}],  # as another program may write it
    }
    run = RunStore.create(None, {"recipe": {"name": "a", "table": table}, "seed": 1, "metric": "accuracy"})
    told = details.settings(Comparison([History(run)]))
    row = told[told.index("<td>transforms") if "<td>transforms" in told else told.index("transforms") :]
    assert "above_chance yes" in told
    assert "sign_flip; then of_a_plugin" in row
    assert "power" not in told[: told.index("transforms")]


def test_p_values_of_many_comparisons_stay_at_one():
    alike = [tiny(label, 1, [[0.5, 0.6, 0.7, 0.2 + place / 100]]) for place, label in enumerate("abcd")]
    assert [row["p"] for row in Comparison(alike).paired("a")] == [1.0] * 3


def test_a_method_whose_trained_clients_have_no_score_is_compared_with_nothing():
    """Its scores are those of clients that it never trained at: the verdict has no comparison, and they no interval."""
    other = tiny("other", 1, [[0.9, 0.9]])
    other.__dict__["judged"] = set()
    comparison = Comparison([tiny("fedavg", 1, [[0.5, 0.6]]), other])
    assert comparison.verdict.comparisons == 0
    assert comparison.paired("fedavg") == []


def test_the_communication_gain_is_told_where_all_seeds_were_evaluated_and_something_was_sent():
    told = Comparison(
        [
            *(tiny("centre", seed, [[0.5], [0.8]], gathered_bytes=4_000_000) for seed in (0, 1)),
            *(tiny("local", seed, [[0.3], [0.4]], sent=0) for seed in (0, 1)),
            tiny("mine", 0, [[0.4], [0.6]]),
            tiny("mine", 1, [[0.5]]),  # it ended after a round
        ]
    ).against_pooled()
    lost = pytest.approx((0.4 + 0.3) / 2)
    assert told == [{"label": "mine", "rounds": 1, "lost": lost, "mb": 1.0, "gain": 4.0, "seeds": 2}]


@pytest.mark.parametrize("values", [[3.0], [1.0, 5.0], [0.0, 1.0, 10.0], [0.3, 0.4, 0.9, 2.0]])
def test_quantiles_and_spreads_are_numpys(values):
    for share in (0.0, 0.1, 0.25, 0.5, 1.0):
        assert quantile(values, share) == pytest.approx(np.quantile(values, share))
    assert spread(values) == pytest.approx(np.std(values))
    assert quantile([], 0.5) is None
    assert spread([]) is None


def test_a_time_is_told_in_a_unit_of_which_there_are_two():
    told = [wording.duration(seconds) for seconds in (119.0, 120.0, 7199.0, 7200.0)]
    assert told == [
        "119 s",
        "2 min",
        "120 min",
        "2 h",
    ]


def test_a_band_spans_the_seeds_version_by_version():
    one = tiny("a", 1, [[0.0], [0.2], [0.4]])
    other = tiny("a", 2, [[0.2], [0.4]], sent=1_500_000)
    band = Comparison([one, other]).band("a", "bytes")
    assert band.x == [2e6, 4e6]  # after one version they had sent 1 and 3 MB
    assert band.mean == pytest.approx([0.1, 0.3])
    assert band.low == pytest.approx([0.0, 0.2])
    assert band.high == pytest.approx([0.2, 0.4])
    assert band.seeds == 2


def test_what_sends_next_to_nothing_is_a_level():
    quiet, loud = tiny("local", 1, [[0.1], [0.6]], sent=0), tiny("fedavg", 1, [[0.1], [0.5]])
    comparison = Comparison([quiet, loud])
    assert comparison.bands("bytes")["local"] == Band([0.0, 2e6], [0.6, 0.6], [0.6, 0.6], [0.6, 0.6], 1, level=True)
    assert not comparison.bands("bytes")["fedavg"].level
    assert not comparison.bands("version")["local"].level


def test_seeds_evaluated_at_different_versions_have_one_point():
    """The mean of their last values."""
    stores = []
    for seed, versions in enumerate([(1, 3), (2, 4)]):
        store = RunStore.create(None, {"label": "a", "seed": seed, "metric": "accuracy"})
        for step in range(1, versions[-1] + 1):
            store.commit({"version": step, "time": float(step)}, [])
        row = {"client": 0, "model": "global", "split": "test", "metric": "accuracy"}
        store.scores([row | {"version": version, "value": version / 10} for version in versions])
        stores.append(store)
    band = Comparison([History(store) for store in stores]).band("a", "seconds")
    assert band.x == [3.5]
    assert band.mean == pytest.approx([0.35])


def test_a_long_curve_is_thinned():
    band = Comparison([tiny("a", 1, [[v / 1000] for v in range(1000)])]).band("a", "version", points=50)
    assert len(band.x) == 50
    assert (band.x[0], band.x[-1]) == (1, 1000)


def test_runs_of_different_metrics_are_not_compared():
    with pytest.raises(SettingError, match="must share a metric, got accuracy, squared_error"):
        Comparison([tiny("a", 1, [[0.1]]), tiny("b", 1, [[0.1]], metric="squared_error")])


def test_runs_say_what_they_are():
    """In one line, and in a notebook as a table in which names are text."""
    clients = partition.Iid(clients=2, limit=60).split(data.digits())
    made = piebald.compare(
        {"<b>plain</b>": recipes.fedavg(), "local": recipes.local()},
        clients,
        models.build_model("logistic", (1, 8, 8), 10),
        rounds=1,
    )
    run = made.by_label["<b>plain</b>"][0]
    assert repr(run).startswith("<Run '<b>plain</b>': 1 round, seed 0, accuracy 0")
    assert repr(run).endswith("finished, in memory>")
    assert repr(made).startswith("<Comparison of 2 labels, 2 runs, by accuracy: ")
    assert " leads at " in repr(made)
    for shown in (run._repr_html_(), made._repr_html_()):
        assert "&lt;b&gt;plain&lt;/b&gt;" in shown
        assert "<b>" not in shown


def test_a_tie_is_no_win_in_any_headline():
    """Differences of at most 0.3 points in either direction, as seeds give them, are nobody's win."""
    ends = {"local": (0.994, 0.99, 0.996), "fedavg": (0.991, 0.994, 0.99), "hdafl": (0.995, 0.993, 0.994)}
    sent = {"local": 0, "fedavg": 500_000, "hdafl": 400_000}
    tie = Comparison(
        [
            tiny(label, seed, [[value, value - 0.01 * seed, value - 0.02]], sent=sent[label])
            for label, values in ends.items()
            for seed, value in enumerate(values)
        ]
    )
    said = tie.headline()
    assert set(tie.near) == set(ends)
    assert said in repr(tie)
    assert tie.title() == said  # no words to save
    assert tie._repr_html_().startswith(f"<p><strong>{said}.</strong></p>")
    assert tie._repr_html_().count("<th>") == 10
    assert BEHIND not in said.replace(NOT_BEHIND, "")
    assert NOT_BEHIND in findings.worst_tenth(tie)
    assert "is not clearly better than" in findings.gains(tie, "fedavg")
    assert all(0 <= row["low"] <= row["mean"] <= row["high"] <= 1 for row in tie.summary())


def test_clients_that_never_trained_are_left_out_of_means():
    def run(label, seed):
        history = tiny(label, seed, [[0.9, 0.8, 0.1]])
        row = {"version": 1, "kind": "train", "status": "ok", "weight": 1.0}
        history._store.commit(
            {"version": 2, "time": 1.0}, [row | {"id": 9 + c, "client": c, "version": 2} for c in (0, 1)]
        )
        return history

    (row,) = Comparison([run("ditto", seed) for seed in range(3)]).summary()
    assert (row["mean"], row["mean_all"]) == (pytest.approx(0.85), pytest.approx(0.6))
    assert row["untrained"] == 1
    final = run("ditto", 0).final
    assert (final["mean"], final["untrained"]) == (pytest.approx(0.6), 1)


def test_clients_without_a_score_are_named():
    def run(seed, **meta):
        history = tiny("fedavg", seed, [[0.9, 0.8]], **meta)
        history._store.clients([{"client": c, "name": name} for c, name in enumerate(("Ulm", "Bath", "Lund"))])
        return history

    one = run(0)
    assert (one.unscored, one.final["unscored"]) == (["Lund"], 1)
    assert Comparison([one, run(1)]).unscored == ["Lund"]
    assert run(0, evaluate=[1, 2, "test"]).unscored == []  # only two were to be evaluated
    assert tiny("fedavg", 0, []).unscored == []  # nobody was
    undefined = tiny("fedavg", 0, [[None, None]], metric="auc")  # as where each client has one class
    undefined._store.clients([{"client": c, "name": name} for c, name in enumerate(("Ulm", "Bath"))])
    assert undefined.unscored == ["Ulm", "Bath"]
    full = tiny("local", 0, [[0.9, 0.8, 0.7]])
    assert Comparison([one, full]).unscored == []  # one of two methods has a score for it
    page = render(Comparison([one]))
    assert "In no mean, since they have no score: Lund." in page


def test_an_interval_of_accuracies_does_not_leave_0_to_100_percent():
    runs = [tiny("a", seed, [[1.0, 1.0, 0.5 + 0.2 * seed, 0.1]]) for seed in range(3)]
    other = [tiny("b", seed, [[0.0, 0.1 * seed, 1.0, 0.3]]) for seed in range(3)]
    for row in Comparison([*runs, *other]).summary():
        assert 0 <= row["low"] < row["mean"] < row["high"] <= 1
    two_seeds = Comparison(runs[:2]).summary()[0]
    assert (two_seeds["kind"], two_seeds["low"], two_seeds["high"]) == (
        "range",
        pytest.approx(0.65),
        pytest.approx(0.7),
    )
    assert Comparison(runs[:1]).summary()[0]["kind"] == "one seed"
