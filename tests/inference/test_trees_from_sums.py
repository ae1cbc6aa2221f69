"""Trees from sums over clients: those of pooled rows, the same under masks, and nothing told but totals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch

import piebald
from piebald import recipes
from piebald.contracts import SUM, Task
from piebald.core.errors import PiebaldError, SettingError
from piebald.inference.queries.trees import MaskedTreeSumsQuery
from piebald.inference.simulated import AskedSites
from piebald.inference.trees.encoding import TreeRows
from piebald.inference.trees.forest import Forest, Target, TreeSettings
from piebald.inference.trees.rounds import NOWHERE, Growing, SummedBoosting, SummedRows, summed_loss, thresholds_of
from piebald.inference.trees.site_clients import SiteSums
from piebald.privacy import SecureAggregation
from piebald.privacy.secure_aggregation.server_side import SecureRound

pytest.importorskip("xgboost", reason="needs the extra: pip install '.[trees]'")

from piebald.federation.site.policy import Policy
from piebald.federation.site.site_rows import SiteClient
from piebald.federation.site.task_runner import TaskRunner
from piebald.inference.trees.site_clients import trees_at_sites
from tests.inference.sites import InProcess

from .test_trees import KINDS, rows
from .test_trees_at_sites import plan

BOUNDS = (-6.0, 12.0)
ALLOWED = Policy(queries=["masked_tree_sums", "tree_scores"], questions={"tree_scores": "any"}, least_rows=1)
SETTINGS = TreeSettings(form="histogram", secure=True, rounds=2, max_depth=2, max_bin=8)
SECURE = plan(recipe=recipes.fedavg().with_(transforms=SecureAggregation(bits=64)))


def clients(objective: str, n: int = 180) -> tuple[pandas.DataFrame, dict[str, Any]]:
    """Rows of three clients with gaps, and the bounds that a regression needs."""
    table = rows(objective, n)
    table["who"] = np.array(list("abc"))[np.arange(n) % 7 % 3]
    return table, {"target_bounds": BOUNDS} if objective == "regression" else {}


@pytest.mark.parametrize("objective", KINDS)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"gamma": 0.4, "reg_lambda": 2.0, "max_delta_step": 0.5, "balanced": True},
        {"reg_alpha": 0.5, "min_child_weight": 4.0, "learning_rate": 0.7},
    ],
)
def test_they_are_the_trees_that_xgboost_grows_on_pooled_rows(objective: Any, more: dict[str, Any]) -> None:
    """With no more numbers in a column than thresholds, both choose among the same splits.

    A split between gaps and all numbers has two forms, of which xgboost takes another one; such trees have the same
    leaves on other sides.
    """
    table, bounds = clients(objective)
    if objective == "regression":
        more = {name: value for name, value in more.items() if name != "balanced"}
    given: dict[str, Any] = {"target": "y", "objective": objective, "rounds": 4, "max_depth": 4, "test": 0.0, **more}
    found = piebald.trees(table, client="who", form="histogram", compare=False, **bounds, **given)
    pooled = piebald.trees({"all": table.drop(columns="who")}, compare=False, **given)
    ours, theirs = found.boosted.forest.table, pooled.boosted.forest.table
    assert ours.shape == theirs.shape
    assert ours[:, :, 2].sum(1) == pytest.approx(theirs[:, :, 2].sum(1), rel=1e-4)
    assert found.predict(table) == pytest.approx(pooled.predict(table), abs=2e-6 * (18 if bounds else 1))
    between = [(one[:, 1] > 5.0).any() for one in theirs]  # above all numbers of these rows
    assert sum(between) <= len(between) / 2
    ours, theirs = (
        np.stack([one for one, no in zip(table, between, strict=True) if not no]) for table in (ours, theirs)
    )
    assert (ours[:, :, [0, 3]] == theirs[:, :, [0, 3]]).all()  # columns, sides of gaps, and rows
    inner = ours[:, :, 0] >= 0
    assert inner.sum() >= 10
    assert (ours[:, :, 1][inner] == theirs[:, :, 1][inner]).all()  # thresholds
    assert ours[:, :, 1][~inner] == pytest.approx(theirs[:, :, 1][~inner], abs=2e-5)
    assert ours[:, :, 2] == pytest.approx(theirs[:, :, 2], rel=1e-3, abs=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("objective", KINDS)
def test_masks_change_no_bit(objective: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more numbers than thresholds, subsamples of rows and columns, and validation rows to be patient by."""
    table, bounds = clients(objective)
    given: dict[str, Any] = {"rounds": 6, "max_depth": 3, "max_bin": 12, "subsample": 0.7, "colsample_bytree": 0.7}
    given |= {"target": "y", "client": "who", "objective": objective, "validation": 0.2, "patience": 2, **bounds}
    plain = piebald.trees(table, form="histogram", compare=False, **given)
    sums = []
    total = SecureRound.total
    monkeypatch.setattr(
        SecureRound, "total", lambda told, answers, sites: sums.append(len(answers)) or total(told, answers, sites)
    )
    hidden = piebald.trees(table, form="histogram", secure=True, **given)
    assert hidden.xgboost_model() == plain.xgboost_model()
    assert hidden.boosted.losses == plain.boosted.losses
    assert hidden.together == plain.together
    assert set(sums) == {3}
    # targets, thresholds, and in each round 3 levels and a loss
    assert len(sums) <= 1 + 9 + 4 * len(hidden.boosted.losses)
    splits = hidden.boosted.forest.table
    used = [{*one[one >= 0].astype(int) >> 1} for one in splits[:, :, 0]]
    assert all(len(one) <= 2 for one in used)  # of three columns a tree sees two


def test_thresholds_are_order_statistics_of_the_pooled_numbers() -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(500, 4)).astype(np.float32) * np.float32([1, 1e30, 1e-40, 1])
    x[:, 3] = rng.random(500) < 0.01  # a rare 1
    x[rng.random(x.shape) < 0.2] = np.nan
    parts = np.split(x, [100, 101, 350])
    asked = []

    def count(limits: Any) -> Any:
        asked.append(limits)
        return sum((part[:, :, None] <= limits).sum(0) for part in parts)  # a gap is at most nothing

    few = thresholds_of(count, 4, 16)
    assert len(asked) <= 9
    for column in range(4):
        known = np.sort(x[:, column][~np.isnan(x[:, column])])
        ranks = np.arange(16) * (len(known) - 1) // 15
        expected = np.unique(known[ranks])
        assert few[column, : len(expected)].tolist() == expected.tolist()
        assert (few[column, len(expected) :] == NOWHERE).all()
    assert few[3, :3].tolist() == [0, 1, NOWHERE]
    every = thresholds_of(count, 4, 500)
    assert every[0, : (~np.isnan(x[:, 0])).sum()].tolist() == np.sort(x[:, 0][~np.isnan(x[:, 0])]).tolist()
    none = thresholds_of(lambda limits: np.zeros(limits.shape, dtype=np.int64), 2, 4)
    assert (none == NOWHERE).all()


def test_a_client_without_rows_or_numbers_adds_nothing() -> None:
    table, _ = clients("binary", 60)
    gaps = table.assign(a=np.nan)
    given: dict[str, Any] = {"target": "y", "objective": "binary", "rounds": 2, "max_depth": 2, "test": 0.0}
    given |= {"compare": False, "form": "histogram"}
    parts = {name: part.drop(columns="who") for name, part in table.groupby("who")}
    alone = piebald.trees(parts, **given)
    tested = {**parts, "none": table.drop(columns="who")}
    more = piebald.trees(tested, **given | {"test": None, "split": {"test": 0.0, "test_only": ["none"]}})
    assert alone.xgboost_model() == more.xgboost_model()
    assert more.rows[-1] == 0
    blind = piebald.trees(gaps, client="who", **given)
    assert "a" not in {name for name, share in blind.importances.items() if share}


def test_targets_of_a_regression_count_as_the_nearer_bound() -> None:
    y = np.array([-100.0, 0.5, 3.0])
    own = SummedRows(np.zeros((3, 1), np.float32), y, Target("regression"),
                     TreeSettings(form="histogram", target_bounds=(0, 2)))  # fmt: skip
    assert own.targets().tolist() == [3, round((0 + 0.25 + 1) * 2**30)]
    grown = Forest(np.zeros((1, 3, 2), np.float32), 1)
    grown.table[0, :, 0] = -1, -2, -2
    told = own.histograms(np.full((3, 1), 90, np.float32), grown, 0, np.zeros((1, 1), np.float32), None, 1)
    assert told[0, 0].tolist() == [[0] * 3, [3 << 30, 3 << 30, 3], [0] * 3]  # no derivative above the bounds' width
    far = summed_loss(np.full((3, 1), 1e9, np.float32), y, Target("regression"),
                      TreeSettings(form="histogram", target_bounds=(0, 2)))  # fmt: skip
    assert far.tolist() == [3 * 1024 << 20, 3]


@pytest.mark.full
def test_a_call_that_was_stopped_goes_on(tmp_path: Path) -> None:
    table, _ = clients("binary")
    given: dict[str, Any] = {"client": "who", "target": "y", "form": "histogram", "secure": True, "rounds": 3,
                             "max_depth": 2, "max_bin": 8, "compare": False}  # fmt: skip

    def interrupt(state: Any) -> None:
        if len(state.ends) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        piebald.trees(table, out=tmp_path / "trees", done=interrupt, **given)
    again = piebald.trees(table, out=tmp_path / "trees", **given)
    assert again.xgboost_model() == piebald.trees(table, **given).xgboost_model()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"secure": True}, "masks hide sums, and form 'bagging' has none: take form = 'histogram'"),
        ({"form": "cyclic", "target_bounds": (0, 1)}, "target_bounds is for form 'histogram', got form 'cyclic'"),
        ({"form": "histogram", "target_bounds": (1, 1)}, "target_bounds must be a low and a higher number"),
        ({"form": "histogram", "local_rounds": 2}, "local_rounds must be 1 under form 'histogram', got 2"),
        ({"form": "histogram", "objective": "regression"}, "needs bounds of a target that is a number"),
        ({"form": "histogram", "max_depth": 10, "max_bin": 4096}, "smaller max_bin or max_depth"),
    ],
)
def test_bad_settings_are_one_sentence(given: dict[str, Any], sentence: str) -> None:
    table, _ = clients("binary", 30)
    with pytest.raises(SettingError, match=sentence) as caught:
        piebald.trees(table, client="who", target="y", **given)
    assert "\n" not in str(caught.value)


def test_two_clients_have_no_secure_sum() -> None:
    table = clients("binary", 30)[0].replace({"who": "c"}, "b")
    with pytest.raises(SettingError, match="secure sums are of 3 clients or more, got 2"):
        piebald.trees(table, client="who", target="y", form="histogram", secure=True)


# ------------------------------------------------------------------------------------------------------------ at sites


def at_sites(runtime: InProcess, settings: TreeSettings = SETTINGS, said: list[str] | None = None, **more: Any) -> Any:
    say = (said if said is not None else []).append
    more = {"compare": False, **more}
    return trees_at_sites(runtime, SECURE.work, SECURE.clients, settings, say=say, **more)  # type: ignore[arg-type]


@pytest.mark.full
def test_sites_under_masks_have_the_trees_that_would_be_grown_here(tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"subsample": 0.8, "balanced": True, "patience": 2})
    found = at_sites(InProcess(SECURE, [ALLOWED] * 3, folder=tmp_path), settings)
    fields = {name: value for name, value in settings.table().items() if name != "kind"}
    here = piebald.trees(SECURE.clients, compare=False, **{**fields, "secure": False})
    assert found.xgboost_model() == here.xgboost_model()
    assert found.boosted.losses == here.boosted.losses
    # beside masks, scores leave a site with four digits
    scores = [[one["auc"] for one in result.together] for result in (found, here)]
    assert scores[0] == pytest.approx(scores[1], abs=5e-5)
    assert found.rows == [None] * 3  # what a site's own rows are, masks hide, too
    assert found.training_rows == here.training_rows
    assert found.plain()["clients"]["a"]["rows"] is None


def test_no_sum_of_a_site_leaves_it_without_masks(tmp_path: Path) -> None:
    """The bytes of each site's own histograms are searched for in all that leaves the sites."""
    runtime = InProcess(SECURE, [ALLOWED] * 3, folder=tmp_path)
    asked = AskedSites(runtime, SECURE.work, "abc")  # type: ignore[arg-type]
    sites = SiteSums(asked, SECURE.work, 2, Target("binary", 2), SETTINGS, 0)
    train = [TreeRows(name, *split_rows(k)) for k, name in enumerate("abc")]
    own = [SummedRows(one.x["train"], one.y["train"], Target("binary", 2), SETTINGS) for one in train]
    start = SummedBoosting(sites, Target("binary", 2), SETTINGS, 0).started()
    thresholds = thresholds_of(lambda limits: np.sum([one.at_most(limits) for one in own], axis=0), 2, 8)
    root = Forest(np.zeros((1, 7, 4), np.float32), 2)
    root.table[0, :, 0] = -1, *[-2] * 6
    told = sites.histograms(Growing(start.forest, start.start, 0, root, 0, thresholds, 1))
    margins = [np.tile(start.start.margins, (len(one.y["train"]), 1)) for one in train]
    each = [
        one.histograms(margin, root, 0, thresholds, None, 0, "trees", k, 0)
        for k, (one, margin) in enumerate(zip(own, margins, strict=True))
    ]
    assert np.array_equal(np.sum(each, axis=0), told)
    left = b"".join(runtime.bodies)
    for one in each:
        assert one.tobytes() not in left
        assert all(part.tobytes() not in left for part in one.reshape(-1, 3) if part.any())


def split_rows(client: int) -> tuple[Any, Any]:
    """Inputs and targets of a client of `SECURE`."""
    held = SECURE.clients.rows(client, "train")
    x = held.x.numpy().astype(np.float32)  # type: ignore[union-attr]
    return {"train": x, "validation": x[:0]}, {"train": held.y.double().numpy(), "validation": np.zeros(0)}  # type: ignore[union-attr]


@pytest.mark.full
def test_a_policy_decides(tmp_path: Path) -> None:
    few = [
        Policy(),
        Policy(queries=["trees", "masked_sums"], least_rows=1),
        Policy(queries=["masked_tree_sums"], least_rows=5),
    ]
    reasons = ["only if its policy names it", "does not answer 'masked_tree_sums'", "cannot know that a sum is about"]
    for number, (policy, reason) in enumerate(zip(few, reasons, strict=True)):
        with pytest.raises(PiebaldError, match=reason):
            at_sites(InProcess(SECURE, [policy, ALLOWED, ALLOWED], folder=tmp_path / f"{number}"))
    said: list[str] = []
    unscored, one = (
        Policy(queries=["masked_tree_sums"], least_rows=1),
        SETTINGS.model_copy(update={"rounds": 1, "max_depth": 1}),
    )
    found = at_sites(InProcess(SECURE, [unscored, ALLOWED, ALLOWED], folder=tmp_path / "unscored"), one, said)
    assert [np.isnan(one["auc"]) for one in found.together] == [True, False, False]
    assert ["does not answer 'tree_scores'" in line for line in said] == [True]
    assert "does not answer 'tree_scores'" in found.left_out["a"]


def test_sites_tell_no_sums_in_the_open(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"under masks alone: write trees\.secure = true"):
        at_sites(InProcess(SECURE, [ALLOWED] * 3, folder=tmp_path), SETTINGS.model_copy(update={"secure": False}))
    bare = plan()
    with pytest.raises(PiebaldError, match="under masks alone"):
        trees_at_sites(InProcess(bare, [ALLOWED] * 3), bare.work, bare.clients, SETTINGS)  # type: ignore[arg-type]


def test_a_site_that_goes_away_leaves_no_sum_of_too_few(tmp_path: Path) -> None:
    runtime = InProcess(SECURE, [ALLOWED] * 3, folder=tmp_path)
    runtime.away = {1}
    with pytest.raises(PiebaldError, match=r"no secure aggregation: .* site 2 says: gone"):
        at_sites(runtime)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"nodes": 2}, "ValueError at the site"),
        ({"level": 1}, "ValueError at the site"),
        ({"columns": 3}, "ValueError at the site"),
        ({"start": ()}, "ValueError at the site"),
        ({"nodes": 1 << 20, "thresholds": 1 << 13}, "ValueError at the site"),
        ({"grown": (0, 0, 99.0)}, "ValueError at the site"),
        ({"forest": (0, 0, 99.0)}, "1 of the models of one version"),
        ({"thresholds_of": -1.0}, "ValueError at the site"),
    ],
)
def test_a_site_checks_what_a_server_asks(change: dict[str, Any], sentence: str) -> None:
    site = TaskRunner(SiteClient(SECURE.work, SECURE.clients, 0), ALLOWED, "cpu")
    grown, forest = torch.zeros(1, 7, 2), torch.zeros(1, 7, 2)
    grown[0, :, 0] = forest[0, :, 0] = torch.tensor([-1.0, *[-2.0] * 6])
    thresholds = torch.tensor([[0.0, 1.0]] * 2)
    asked: dict[str, Any] = {"ask": "histograms", "columns": 2, "thresholds": 2, "nodes": 1, "start": (0.0,)}
    vectors = {"model": SECURE.work.initial[: SECURE.work.layout.shared], "forest": forest, "grown": grown}
    vectors["thresholds"] = thresholds

    def served() -> Any:
        query = MaskedTreeSumsQuery(boosting=SETTINGS, objective="binary", classes=2, **asked)
        return site.serve(Task(0, 0, 0, vectors, query), None)

    update, why, _ = served()
    assert why is None
    assert update.vectors[SUM].shape == (1 * 2 * 4 * 3,)
    for name, value in change.items():
        if name in ("grown", "forest"):
            vectors[name][value[:2]] = value[2]
        elif name == "thresholds_of":
            thresholds[0, 1] = value
        else:
            asked[name] = value
    update, why, _ = served()
    assert update is None
    assert sentence in str(why)
