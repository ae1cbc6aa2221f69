"""One distribution is one cluster, a far outlier is a cluster of one, few clients can split, and memory is bounded."""

from __future__ import annotations

import math
import resource
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.metrics import adjusted_rand_score

from piebald import data, recipes
from piebald.contracts import Cohort, Split, Update
from piebald.core.errors import SettingError
from piebald.core.tensor_store import places_of
from piebald.data.partition import FlipPairs, Iid, Lists, PooledClients
from piebald.methods.clustering import Distfl
from piebald.methods.clustering.distribution_knowledge import batch_norm_targets, distance
from piebald.methods.clustering.divergence_history import isolated, pair_means
from piebald.methods.clustering.partitioning import by_links, by_silhouette, evidence, gram_of, isolation, with_outliers

from .test_clustering import TRAINING, clusters_at, planted, trained
from .test_distribution_knowledge import fitted
from .test_trained_parameters import FakeContext

few = settings(max_examples=25, deadline=None, derandomize=True)


def cloud(sizes: list[int], apart: float, seed: int, wide: int = 30) -> tuple[np.ndarray, np.ndarray]:
    """Squared distances of points about centres that are `apart`, in a space whose axes have different lengths."""
    draw = np.random.default_rng(seed)
    truth = np.repeat(np.arange(len(sizes)), sizes)
    points = draw.normal(size=(len(truth), wide)) * np.linspace(2, 0.5, wide)
    points[:, : len(sizes)] += apart * np.eye(len(sizes))[truth]
    return ((points[:, None] - points[None]) ** 2).sum(2), truth


@pytest.mark.parametrize(
    "clouds", [pytest.param(50, marks=pytest.mark.full), pytest.param(200, marks=pytest.mark.long)]
)
def test_one_cloud_is_hardly_ever_taken_for_clusters(clouds: int) -> None:
    """Clouds of 50 points, whatever their axes: at most 2 in 100 reach 2.5 deviations, before halves are asked."""
    above = 0
    for seed in range(clouds):
        distances, _ = cloud([50], 0.0, seed, wide=[3, 10, 30, 100][seed % 4])
        gram = gram_of(distances)
        labels = by_silhouette(np.sqrt(distances), -1.0).labels
        above += evidence(gram, labels, np.random.default_rng(seed)) >= 2.5
    assert above <= clouds // 50


@pytest.mark.full
@few
@given(st.sampled_from([[25, 25], [40, 10], [10] * 5, [20, 12, 9, 6, 3]]), st.integers(0, 100))
def test_planted_clusters_are_told_from_a_cloud(sizes: list[int], seed: int) -> None:
    distances, truth = cloud(sizes, 9.0, seed)
    assert evidence(gram_of(distances), truth, np.random.default_rng(seed)) > 2.5


def test_half_of_the_rounds_may_find_the_same_cut_in_one_cloud() -> None:
    """Each client differs in the same way in every round, by the rows it holds.  Before, agreement was evidence: 50 IID
    clients fell into 33 and 17.
    """
    from piebald.methods.clustering.divergence_history import PairMeans, believed

    distances, _ = cloud([50], 0.0, seed=1, wide=3)
    unlike = np.sqrt(distances) / np.sqrt(distances).max()
    draw = np.random.default_rng(0)
    noise = [np.abs(draw.normal(size=(50, 50))) * 0.01 for _ in range(2)]
    halves = [unlike + (one + one.T) * (1 - np.eye(50)) for one in noise]
    means = PairMeans(unlike, (halves[0], halves[1]), gram_of(distances), 12)

    def cut(away: Any, accept: float) -> Any:
        return by_silhouette(away, accept)

    one = by_silhouette(unlike, 0.99)
    by_agreement = believed(one, means, cut, 0.99, 0.5, -math.inf, np.random.default_rng(0))
    assert by_agreement.agreement is not None
    assert by_agreement.agreement >= 0.5
    assert by_agreement.labels.any()
    assert not believed(one, means, cut, 0.99, 0.5, 2.5, np.random.default_rng(0)).labels.any()


def test_a_far_outlier_is_isolated_and_members_of_a_small_cluster_are_not() -> None:
    distances, _ = cloud([20, 9, 2], 20.0, seed=0)
    assert isolation(distances).max() < 3
    lone, _ = cloud([20, 1], 20.0, seed=0)
    assert isolation(lone)[:-1].max() < 3 < isolation(lone)[-1]


def uploads(context: FakeContext, far: Sequence[int] = ()) -> Cohort:
    """Models that are hardly trained, and some that answer the other way round."""
    layout, rng = context.spec.layout, torch.Generator().manual_seed(0)
    matrix = torch.zeros(14, layout.shared)
    matrix[:, : layout.shared_trained] = 0.05 * torch.randn(14, layout.shared_trained, generator=rng)
    matrix[list(far), : layout.shared_trained] -= 2 * context.model[: layout.shared_trained]
    updates = [Update({"model": row}, 5, 2, {}) for row in matrix]
    return Cohort(range(14), [0] * 14, updates, matrix, 0, [context.model] * 14, layout.shared_trained)


def test_a_far_outlier_is_at_once_a_cluster_of_one() -> None:
    context: Any = FakeContext()
    assert len(set(Distfl(knowledge="noise").assign(uploads(context), {}, context))) == 1
    context.state.clear()
    labels = Distfl(knowledge="noise").assign(uploads(context, far=[5]), {}, context)
    assert labels.count(labels[5]) == 1
    assert len(set(labels)) == 2


def test_probes_are_made_from_the_mean_of_the_uploads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eq. 3."""
    from piebald.methods.clustering import distfl

    context: Any = FakeContext()
    seen, real, sent = list[torch.Tensor](), distfl.synthesise, uploads(context)

    def watched(module: Any, *arguments: Any) -> Any:
        seen.append(context.spec.layout.flatten(module))
        return real(module, *arguments)

    monkeypatch.setattr(distfl, "synthesise", watched)
    Distfl(probes=20, steps=1).assign(sent, {}, context)
    assert sent.matrix is not None
    trained = context.spec.layout.shared_trained
    torch.testing.assert_close(seen[0][:trained], (context.model + sent.matrix.mean(0))[:trained])


def test_two_far_outliers_belong_together_only_if_they_are_near_one_another() -> None:
    found = by_links(np.ones((4, 4)) * 0.1, 0.2)
    pairs = np.full((6, 6), 0.1)
    pairs[4:] = pairs[:, 4:] = 9.0
    apart = with_outliers(found, np.arange(4), pairs)
    assert apart.labels.tolist() == [0, 0, 0, 0, 1, 2]
    pairs[4, 5] = pairs[5, 4] = 1.0
    assert with_outliers(found, np.arange(4), pairs).labels.tolist() == [0, 0, 0, 0, 1, 1]


@pytest.mark.full
@pytest.mark.parametrize(
    "scale", [2.0, *(pytest.param(scale, marks=pytest.mark.long) for scale in (4.0, 8.0)), 16.0, 50.0]
)
def test_a_lone_attacker_is_isolated_at_every_scale(scale: float) -> None:
    """Label flips, scaled.  Before, `least = 2` put an attacker of scale 16 into the honest cluster in every round."""
    change = FlipPairs(pairs=((0, 4), (1, 5), (2, 6), (3, 7)), clients=(0,))
    clients = Iid(clients=20, changes=(change,)).split(data.digits())
    attack = {"kind": "model_replacement", "clients": [0], "scale": scale}
    run = trained(recipes.distfl(probes=60, **TRAINING).with_(transforms=[attack]), clients, rounds=4)
    for version in (3, 4):
        rows = {r["client"]: r["cluster"] for r in run.results if r["version"] == version and r["cluster"] is not None}
        assert 0 not in rows or list(rows.values()).count(rows[0]) == 1
        assert len({cluster for client, cluster in rows.items() if client}) == 1


@pytest.mark.full
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_twenty_iid_clients_stay_together(seed: int) -> None:
    """Before, they fell into six clusters in the first round, and these were never joined again."""
    run = trained(recipes.distfl(probes=60, **TRAINING), Iid(clients=20, seed=seed).split(data.digits()), rounds=4)
    for version in range(1, 5):
        assert set(clusters_at(run, version)) == {0}


def test_clusters_that_are_put_together_are_no_more() -> None:
    """Before, each of their clients went back to the old cluster, whose model was its own."""
    from piebald.methods.clustering.absent_clusters import absent_clusters

    known = {0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2, 6: 3}
    assert absent_clusters([0, 0, 0, 0], [0, 1, 2, 3], known) == [2, 3]
    assert absent_clusters([0, 0, 0], [0, 1, 2], known) == [1, 2, 3]
    assert absent_clusters([0, 0, 0], [0, 1, 6], known) == [1, 2]


@pytest.mark.full
@pytest.mark.parametrize(("sizes", "wanted"), [([1, 1], 2), ([2, 1], 2), ([1, 1, 1], 3)])
def test_two_or_three_clients_can_be_split(sizes: list[int], wanted: int) -> None:
    """Before, `least = 2` dissolved every cut of them."""
    whole = planted()
    kept = [4 * kind + place for kind, size in enumerate(sizes) for place in range(size)]
    parts = {}
    for split in ("train", "test"):
        own = [whole.indices(client, split) for client in kept]
        parts[split] = Lists(np.concatenate(own), np.cumsum([0, *map(len, own)]))
    clients = PooledClients(whole.x, whole.y, parts, classes=whole.classes)
    for clustering in ({}, {"find": "linked"}, {"clusters": wanted}):
        recipe = recipes.distfl(probes=40, **TRAINING).with_(clustering={"kind": "distfl", "probes": 40, **clustering})
        labels = clusters_at(trained(recipe, clients, rounds=3), 3)
        truth = np.repeat(np.arange(len(sizes)), sizes)
        assert adjusted_rand_score(truth, labels) == 1.0
        assert len(set(labels)) == wanted


@pytest.mark.full
@pytest.mark.parametrize("count", [2, 3])
def test_two_or_three_alike_clients_stay_together(count: int) -> None:
    clients = Iid(clients=count).split(data.digits())
    run = trained(recipes.distfl(probes=40, **TRAINING), clients, rounds=4)
    assert set(clusters_at(run, 4)) == {0}


# -------------------------------------------------------------------------------- the authors' rule, sentences


@pytest.mark.full
def test_the_authors_rule_groups_once_with_the_uploads_of_the_fifth_round() -> None:
    clustering = Distfl(find="linked", first=5, every=0, statistics="running", loss="published", probes=40)
    run = trained(recipes.distfl(**TRAINING).with_(clustering=clustering), planted(), rounds=7)
    assert [row["version"] for row in run.notes if row["name"] == "clusters"] == [5]
    assert set(clusters_at(run, 4)) == {0}
    assert clusters_at(run, 5) == clusters_at(run, 7)


@few
@given(st.integers(2, 12), st.integers(0, 1000), st.floats(0.05, 0.9))
def test_linked_is_union_find(count: int, seed: int, threshold: float) -> None:
    divergence = np.random.default_rng(seed).uniform(size=(count, count))
    parent = list(range(count))

    def root(one: int) -> int:
        return one if parent[one] == one else root(parent[one])

    for i in range(count):
        for j in range(count):
            if divergence[i, j] < threshold:
                parent[root(i)] = root(j)
    found = by_links(divergence, threshold).labels
    assert adjusted_rand_score([root(one) for one in range(count)], found) == 1.0


@pytest.mark.parametrize(
    ("settings_", "said"),
    [
        ({"find": "gap", "threshold": 0.2}, "makes no use of threshold"),
        ({"find": "gap", "clusters": 3}, "makes no use of clusters"),
        ({"find": "gap", "least": 1}, "makes no use of least"),
        ({"find": "linked", "clusters": 3}, "makes no use of clusters"),
        ({"find": "linked", "agree": 0.9}, "makes no use of agree"),
        ({"clusters": 3, "threshold": 0.5}, "leave one of them out"),
    ],
)
def test_settings_without_effect_are_refused(settings_: dict[str, Any], said: str) -> None:
    """Before, `find = "gap"` ignored them."""
    with pytest.raises(SettingError, match=said):
        Distfl(**settings_)
    assert Distfl(**Distfl(find="gap").model_dump(exclude_none=True)).find == "gap"


def test_the_published_loss_is_that_of_the_paper() -> None:
    """Eq. 2: lengths, not their squares; eq. 4: the largest factors, not the largest sizes of factors."""
    model, x = fitted("vectors")
    targets = batch_norm_targets(model, 1.0)
    with torch.no_grad():
        first = model[0](x)
        second = model[3](torch.relu(model[1](first)))
    wanted = 0.0
    for inputs, norm in ((first, model[1]), (second, model[4])):
        wanted += float((inputs.mean(0) - norm.running_mean).norm() + (inputs.var(0, False) - norm.running_var).norm())
    assert distance(x, model, targets, "published")[0].item() == pytest.approx(wanted, rel=1e-4)
    with torch.no_grad():
        model[4].weight.copy_(torch.tensor([-9.0, 1.0, 2.0, 3.0, 0.5]))
    assert batch_norm_targets(model, 0.4, signed=True)[1].chosen.tolist() == [2, 3]
    assert batch_norm_targets(model, 0.4)[1].chosen.tolist() == [0, 3]


# -------------------------------------------------------------------------------------------------------------- memory


def bytes_of(state: dict[str, Any]) -> int:
    return sum(one.numel() * one.element_size() for one in state.values() if isinstance(one, torch.Tensor))


def test_what_is_remembered_does_not_grow_with_the_clients_that_are_known() -> None:
    """100,000 clients, 20 in a step.  Before, four tables of 40 GB each were made at the first step."""
    state: dict[str, Any] = {}
    draw = np.random.default_rng(0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for version in range(40):
        clients = sorted(draw.choice(100_000, 20, replace=False).tolist())
        pairs = draw.uniform(size=(20, 20))
        isolated(state, pairs, clients, version, 200, 1.0)
        pair_means(state, pairs, clients, version, 200, 1.0)
    assert bytes_of(state) < 2e6
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def test_who_was_absent_longest_is_forgotten() -> None:
    state: dict[str, Any] = {}
    assert places_of(state, [5, 9], 0, 3).rows.tolist() == [0, 1]
    assert places_of(state, [9, 7], 1, 3).rows.tolist() == [1, 2]
    places = places_of(state, [9, 1], 2, 3)
    assert state["clients"].tolist() == [9, 7, 1]
    assert places.kept.tolist() == [1, 2]
    assert places_of(state, [1, 2, 3, 4], 3, 3).size == 4  # a step's own clients are never forgotten


def test_means_over_rounds_are_those_of_the_pairs() -> None:
    """Whoever came and went in between, as long as nobody was forgotten."""
    draw, state, met = np.random.default_rng(1), dict[str, Any](), dict[tuple[int, int], list[float]]()
    for version in range(9):
        clients = draw.permutation(12)[:7].tolist()
        points = draw.normal(size=(7, 4))
        pairs = ((points[:, None] - points[None]) ** 2).sum(2)
        means = pair_means(state, pairs, clients, version, 50, 1.0)
        from piebald.methods.clustering.response_divergence import unlikeness

        now = unlikeness(torch.from_numpy(pairs)).numpy()
        for i, a in enumerate(clients):
            for j, b in enumerate(clients):
                met.setdefault((a, b), []).append(float(now[i, j]))
                assert means.unlike[i, j] == pytest.approx(np.mean(met[a, b]), abs=1e-5)


def test_foolsgold_remembers_those_that_took_part() -> None:
    from piebald.contracts import Cohort, Update
    from piebald.methods.aggregation import Foolsgold

    context: Any = type("Context", (), {"known": 100_000, "state": {}})()
    draw = np.random.default_rng(0)
    for version in range(10):
        matrix = torch.from_numpy(draw.normal(size=(4, 1000)).astype(np.float32))
        clients = [version, version + 1, 99_000 + version, 50_000]
        updates = [Update({"model": row}, 1, 1, {}) for row in matrix]
        Foolsgold(remember=8).aggregate(Cohort(clients, [version] * 4, updates, matrix, version), context)
    assert context.state["sums"].shape == (8, 1000)


def test_too_many_pairs_are_refused_before_the_start_with_the_figure() -> None:
    why = Distfl().unsupported_cohort(300_000)
    assert why is not None
    assert "GB" in why
    assert "300,000" in why
    assert Distfl().unsupported_cohort(1000) is None
    huge = Iid(clients=4).split(data.digits())
    with pytest.raises(SettingError, match=r"takes .* GB, and this machine has"):
        trained(recipes.distfl(**TRAINING), Crowd(huge), rounds=1)


class Crowd(PooledClients):
    """As many clients as there are, and 300,000 by number."""

    def __init__(self, clients: PooledClients) -> None:
        vars(self).update(vars(clients))
        self.names = range(300_000)  # type: ignore[assignment]

    def __len__(self) -> int:
        return 300_000

    def indices(self, client: int, split: Split) -> NDArray[np.int64]:
        return super().indices(client % 4, split)
