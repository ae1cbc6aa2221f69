"""Distribution knowledge: synthesis, responses, divergences, clusters, and their numbers from round to round."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import adjusted_rand_score, silhouette_score
from torch import Tensor, nn

from piebald.core.errors import SettingError
from piebald.core.moments import InputHooks, mean_and_variance
from piebald.core.parameters import Layout
from piebald.methods.clustering.distribution_knowledge import (
    batch_norm_targets,
    distance,
    largest,
    moment_targets,
    synthesise,
)
from piebald.methods.clustering.partitioning import by_gap, by_silhouette, dissolved, renumbered, silhouette, tracked
from piebald.methods.clustering.response_divergence import divergences, responses, symmetric

few = settings(max_examples=25, deadline=None, derandomize=True)


def images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(1), nn.Linear(216, 3))


def series() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 5, 3), nn.BatchNorm1d(5), nn.Tanh(), nn.Flatten(1), nn.Linear(50, 3))


def vectors() -> nn.Module:
    first = [nn.Linear(7, 9), nn.BatchNorm1d(9), nn.ReLU()]
    return nn.Sequential(*first, nn.Linear(9, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


FORMS: dict[str, tuple[tuple[int, ...], Any]] = {
    "images": ((2, 8, 8), images),
    "series": ((2, 12), series),
    "vectors": ((7,), vectors),
}


def fitted(form: str, seed: int = 0) -> tuple[nn.Module, Tensor]:
    """A network whose batch norms have seen some data, in evaluation mode, and that data."""
    shape, make = FORMS[form]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model, x = make(), 2 * torch.randn(400, *shape) + 1
        for layer in model.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                layer.momentum = None  # running statistics are plain means over what was seen
                nn.init.uniform_(layer.weight, 0.5, 2)
        with torch.no_grad():
            model.train()(x)
    return model.eval(), x


@pytest.mark.parametrize("form", FORMS)
def test_synthesis_fits_the_statistics_of_any_input(form: str) -> None:
    model, x = fitted(form)
    targets = batch_norm_targets(model, 1.0)
    start = torch.randn(60, *x.shape[1:], generator=torch.Generator().manual_seed(1))
    before = distance(start, model, targets)[1]
    made = synthesise(model, targets, start, steps=300, lr=0.05, fit=0.1)
    assert made.mismatch <= 0.1 < before
    assert distance(made.x, model, targets)[1] == pytest.approx(made.mismatch)
    assert made.steps < 300
    warm = synthesise(model, targets, made.x, steps=300, lr=0.05, fit=0.1)
    assert warm.steps == 0
    assert torch.equal(warm.x, made.x)


def test_the_loss_is_that_of_the_paper() -> None:
    """Eq. 2, layer by layer and channel by channel, with numpy."""
    model, x = fitted("vectors")
    targets = batch_norm_targets(model, 1.0)
    probes = x[:30] * 0.5
    first = model[0](probes).detach().numpy()
    second = model[3](torch.relu(model[1](model[0](probes)))).detach().numpy()
    wanted, norms = 0.0, [model[1], model[4]]
    for inputs, norm in zip((first, second), norms, strict=True):
        wanted += ((inputs.mean(0) - norm.running_mean.numpy()) ** 2).sum()
        wanted += ((inputs.var(0) - norm.running_var.numpy()) ** 2).sum()
    assert distance(probes, model, targets)[0].item() == pytest.approx(wanted, rel=1e-4)


@few
@given(st.lists(st.floats(0, 9), min_size=1, max_size=20), st.floats(0.01, 1))
def test_the_largest_scaling_factors_are_matched(values: list[float], share: float) -> None:
    chosen = largest(torch.tensor(values, dtype=torch.float64), share).tolist()
    assert len(chosen) == max(1, math.ceil(share * len(values) - 1e-9))
    assert chosen == sorted(chosen)
    left = [values[place] for place in range(len(values)) if place not in chosen]
    assert not left or min(values[place] for place in chosen) >= max(left)


def test_moments_replace_batch_norm() -> None:
    """A network without batch norm: uploaded statistics of its layers' inputs are what synthesis fits."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
        x = torch.randn(200, 6) + 2
    with InputHooks(model, ["0", "2"]) as seen, torch.no_grad():
        model(x)
    moments = torch.cat([torch.cat(mean_and_variance(seen.seen[name])) for name in ("0", "2")])
    targets = moment_targets(model, ["0", "2"], moments, 0.5)
    assert [len(target.chosen) for target in targets] == [3, 4]
    start = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
    made = synthesise(model, targets, start, 300, 0.05, 0.1)
    assert made.mismatch < 0.25 * distance(start, model, targets)[1]
    with pytest.raises(SettingError, match="no layer of this model"):
        InputHooks(model, ["7"])


def test_responses_are_each_models_own() -> None:
    model, x = fitted("images")
    layout = Layout.of(model)
    other, _ = fitted("images", seed=1)
    vectors = [layout.flatten(model), layout.flatten(other)]
    answers = responses(fitted("images", seed=2)[0], layout, vectors, x[:9])
    for answer, own in zip(answers, (model, other), strict=True):
        torch.testing.assert_close(answer, own(x[:9]).softmax(1).detach())


@few
@given(st.integers(0, 1000), st.booleans())
def test_divergences_are_plain_sums(seed: int, certain: bool) -> None:
    draw = np.random.default_rng(seed)
    logits = draw.normal(size=(4, 3, 5)) * (500 if certain else 1)
    answers = torch.from_numpy(logits).softmax(2)
    found = divergences(answers)
    p = answers.numpy() * (1 - 1e-6) + 1e-6 / 5
    for i, j in itertools.product(range(4), range(4)):
        wanted = np.mean([sum(a * math.log(a / b) for a, b in zip(p[i, z], p[j, z], strict=True)) for z in range(3)])
        assert float(found[i, j]) == pytest.approx(wanted, abs=1e-9)
    assert bool(torch.isfinite(found).all())
    assert torch.equal(symmetric(found), symmetric(found).T)


# ------------------------------------------------------------------------------------------------------------- clusters


def blobs(sizes: list[int], seed: int, apart: float = 8.0) -> tuple[np.ndarray, np.ndarray]:
    """Distances between points around distant centers, and the true clusters."""
    draw = np.random.default_rng(seed)
    truth = np.repeat(np.arange(len(sizes)), sizes)
    points = apart * np.eye(len(sizes))[truth] + draw.normal(size=(len(truth), len(sizes))) * 0.7
    order = draw.permutation(len(truth))
    points, truth = points[order], truth[order]
    return np.linalg.norm(points[:, None] - points[None], axis=2), truth


@few
@given(st.lists(st.integers(3, 9), min_size=2, max_size=6), st.integers(0, 1000))
def test_clear_clusters_are_found_without_their_number(sizes: list[int], seed: int) -> None:
    distances, truth = blobs(sizes, seed)
    found = by_silhouette(distances)
    assert adjusted_rand_score(truth, found.labels) == 1.0
    assert found.score == pytest.approx(silhouette_score(distances, truth, metric="precomputed"))
    assert found.tried[len(sizes)] == found.score


@few
@given(st.integers(4, 30), st.integers(0, 1000))
def test_one_cloud_is_one_cluster(count: int, seed: int) -> None:
    points = np.random.default_rng(seed).normal(size=(count, 20))
    found = by_silhouette(np.linalg.norm(points[:, None] - points[None], axis=2))
    assert not found.labels.any()
    assert found.threshold is None


def test_one_cluster_and_clients_each_alone_have_no_silhouette() -> None:
    distances, truth = blobs([4, 4], seed=0)
    assert silhouette(distances, np.zeros(8, dtype=np.int64)) == silhouette(distances, np.arange(8)) == 0
    assert silhouette(distances, renumbered(truth)) > 0.5


def test_an_outlier_neither_makes_nor_spoils_a_cut() -> None:
    distances, truth = blobs([6, 6, 1], seed=3)
    found = by_silhouette(distances, least=2)
    kept = truth < 2
    assert adjusted_rand_score(truth[kept], found.labels[kept]) == 1.0
    assert found.labels.max() == 1
    assert adjusted_rand_score(truth, by_silhouette(distances, least=1, clusters=3).labels) == 1.0


def test_the_number_or_the_threshold_can_be_set() -> None:
    distances, truth = blobs([5, 5, 5], seed=0)
    assert by_silhouette(distances, clusters=2).labels.max() == 1
    assert by_silhouette(distances, clusters=1).labels.max() == 0
    assert adjusted_rand_score(truth, by_silhouette(distances, threshold=6.0).labels) == 1.0
    assert by_silhouette(distances, threshold=100.0).labels.max() == 0
    assert by_silhouette(distances, accept=1.0).labels.max() == 0


def test_the_largest_gap_sets_the_threshold() -> None:
    divergence = np.full((5, 5), 9.0)
    divergence[:2, :2] = divergence[2:, 2:] = 1.0
    np.fill_diagonal(divergence, 0)
    found = by_gap(divergence)
    assert found.labels.tolist() == [0, 0, 1, 1, 1]
    assert found.threshold == 5.0


@few
@given(st.lists(st.integers(0, 5), min_size=2, max_size=15), st.integers(1, 4), st.integers(0, 99))
def test_no_cluster_is_too_small(labels: list[int], least: int, seed: int) -> None:
    points = np.random.default_rng(seed).normal(size=(len(labels), 2))
    distances = np.linalg.norm(points[:, None] - points[None], axis=2)
    found = dissolved(distances, np.array(labels), least)
    sizes = np.bincount(found)
    assert len(sizes) == 1 or sizes.min() >= least
    large = [label for label in set(labels) if labels.count(label) >= least]
    for label in large:
        members = {found[place] for place, own in enumerate(labels) if own == label}
        assert len(members) == 1  # a cluster that is large enough stays together
    for place, own in enumerate(labels):
        if large and own not in large:  # the others go where they are nearest on average
            means = {label: distances[place, np.array(labels) == label].mean() for label in large}
            nearest = min(means, key=means.__getitem__)
            assert found[place] == found[labels.index(nearest)]


@few
@given(st.lists(st.integers(0, 4), min_size=1, max_size=20), st.permutations(range(5)))
def test_clusters_keep_their_numbers(labels: list[int], names: list[int]) -> None:
    """However they were numbered anew, clusters of the same clients keep their old numbers."""
    known = [names[label] for label in labels]
    assert tracked(renumbered(labels), known, taken=range(5)) == known


def test_new_clusters_get_unused_numbers() -> None:
    labels = np.array([0, 0, 0, 1, 1, 2])
    assert tracked(labels, [4, 4, 4, 4, None, None], taken=[0, 4, 7]) == [4, 4, 4, 8, 8, 9]
    assert tracked(np.array([0, 0, 1]), [None] * 3, taken=[]) == [0, 0, 1]
