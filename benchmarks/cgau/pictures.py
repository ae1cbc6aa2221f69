"""Figures: what conditioning has learnt, and accuracy over shuffling."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import federations
import jobs
import numpy as np
import settings
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from shared.intervals import interval
from shared.pictures import clean

from piebald.data.clients.pooled_clients import PooledClients
from piebald.data.measures.heterogeneity import frechet
from piebald.data.partition import Statistics

WHERE = {"shuffle 0.0": "images, clusters in classes", "label-free": "images, clusters", "by subject": "HAR, people"}
COLOURS = {
    settings.CGAU: "#c8442d",
    settings.MATRIX: "#e3a08f",
    settings.BLIND: "#7d5aa6",
    settings.RELU: "#2f6fb4",
    settings.MATCHED: "#7fb0dd",
    settings.HEAD: "#2e8b57",
    settings.LOCAL: "#505a68",
}


def measure(out: Path) -> None:
    """Save the conditioning vectors of one run per setting, and the distances between the clients' data."""
    torch.set_num_threads(1)
    for setting in WHERE:
        file = out / "conditioning" / f"{setting.replace(' ', '-')}.npz"
        if file.exists():
            continue
        clients, task = jobs.federation(setting, 0)
        folder = out / "conditioning" / setting.replace(" ", "-")
        shutil.rmtree(folder, ignore_errors=True)
        run = jobs.run_of(jobs.Job("conditioning", setting, settings.CGAU, 0), clients, task, folder)
        layout = run.work.layout
        vectors = [layout.flatten(run.model(client))[layout.shared :].numpy() for client in range(len(clients))]
        to_rest = federations.frechet(clients, settings.FRECHET_COMPONENTS)
        np.savez(file, vectors=np.stack(vectors), pairs=_pairs(clients), rest=to_rest)


def _pairs(clients: PooledClients) -> NDArray[np.float64]:
    """Return squared Fréchet distances between the training rows of each two clients, on principal components."""
    from sklearn.decomposition import PCA

    rows = np.concatenate([clients.indices(client, "train") for client in range(len(clients))])
    axes = PCA(settings.FRECHET_COMPONENTS, random_state=0).fit(clients.x.numpy()[rows])
    own = [
        Statistics.of(embedding=axes.transform(clients.rows(client, "train").x.numpy()))
        for client in range(len(clients))
    ]
    return np.array([[frechet(a.mean, a.covariance, b.mean, b.covariance) for b in own] for a in own])


def correlation(vectors: NDArray, pairs: NDArray) -> tuple[float, float]:
    """Return Spearman's correlation of distances between vectors and between data, and p from 5,000 relabellings."""
    from scipy.stats import rankdata

    count = len(vectors)
    upper = np.triu_indices(count, 1)
    apart = np.linalg.norm(vectors[:, None] - vectors[None], axis=2)
    ranks = rankdata(pairs[upper])
    found = float(np.corrcoef(rankdata(apart[upper]), ranks)[0, 1])
    rng = np.random.default_rng(0)
    higher = 0
    for _ in range(5000):
        order = rng.permutation(count)
        higher += np.corrcoef(rankdata(apart[np.ix_(order, order)][upper]), ranks)[0, 1] >= found
    return found, (higher + 1) / 5001


def conditioning(out: Path, path: Path) -> dict[str, tuple[float, float]]:
    """Plot clients' vectors on two principal components, and their distances against those of the data."""
    found = {}
    figure = Figure(figsize=(4.3 * len(WHERE), 7.4), layout="constrained")
    panels = figure.subplots(2, len(WHERE))
    for place, (setting, title) in enumerate(WHERE.items()):
        kept = np.load(out / "conditioning" / f"{setting.replace(' ', '-')}.npz")
        vectors, pairs, rest = kept["vectors"], kept["pairs"], kept["rest"]
        centred = vectors - vectors.mean(0)
        _, strength, axes = np.linalg.svd(centred, full_matrices=False)
        at = centred @ axes[:2].T
        share = strength**2 / (strength**2).sum()
        above, below = panels[0][place], panels[1][place]
        shown = above.scatter(at[:, 0], at[:, 1], c=rest, cmap="viridis", s=46)
        for client, point in enumerate(at):
            above.annotate(str(client), point, xytext=(4, 4), textcoords="offset points", fontsize=7, color="#505a68")
        figure.colorbar(shown, ax=above, label="Fréchet distance to all others", shrink=0.8)
        above.set(title=title, xlabel=f"component 1 ({share[0]:.0%})", ylabel=f"component 2 ({share[1]:.0%})")
        upper = np.triu_indices(len(vectors), 1)
        apart = np.linalg.norm(vectors[:, None] - vectors[None], axis=2)
        found[setting] = correlation(vectors, pairs)
        below.scatter(pairs[upper], apart[upper], s=12, color=COLOURS[settings.CGAU], alpha=0.6, lw=0)
        rank, p_value = found[setting]
        below.set(
            xlabel="Fréchet distance of two clients' data", ylabel="distance of their conditioning",
            title=f"Spearman {rank:+.2f} (p = {p_value:.2g})",
        )  # fmt: skip
        for panel in (above, below):
            clean(panel)
    figure.savefig(path, dpi=110)
    return found


def shuffling(out: Path, path: Path) -> None:
    """Plot accuracy over the share of shuffled rows, with 95 % bands, and the distance between clients."""
    figure = Figure(figsize=(10.5, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    found = {shuffle: jobs.by_method(out, "images", f"shuffle {shuffle}") for shuffle in settings.SHUFFLES}
    shown = {
        name: colour for name, colour in COLOURS.items() if name != settings.MATRIX
    }  # measured at the two ends only
    whole = [set(found[shuffle].get(name, {})) for shuffle in settings.SHUFFLES for name in shown]
    seeds = sorted(set.intersection(*whole))  # each line needs the same seeds at all levels
    for name, colour in shown.items() if seeds else ():
        made = [
            interval([found[shuffle][name][seed]["mean"] for seed in seeds], least=3) for shuffle in settings.SHUFFLES
        ]
        left.plot(settings.SHUFFLES, [100 * one[0] for one in made], color=colour, label=name, marker="o", ms=4)
        low, high = [100 * (m - h) for m, h in made], [100 * (m + h) for m, h in made]
        left.fill_between(settings.SHUFFLES, low, high, color=colour, alpha=0.12, lw=0)
    left.set_title(f"mean of {len(seeds)} repetitions", fontsize=10)
    left.set(xlabel="share of shuffled rows", ylabel="accuracy on own test rows, %")
    left.legend(frameon=False, fontsize=8)
    kept = [json.loads(file.read_text()) for file in (out / "federations").glob("*.json")]
    rows = [[one["frechet"] for one in kept if one["setting"] == f"shuffle {shuffle}"] for shuffle in settings.SHUFFLES]
    if all(rows):
        middle = [float(np.mean(values)) for values in rows]
        right.plot(settings.SHUFFLES, middle, color="#505a68", marker="o", ms=4)
        right.fill_between(
            settings.SHUFFLES, [min(v) for v in rows], [max(v) for v in rows], color="#505a68", alpha=0.15, lw=0
        )
    right.set(xlabel="share of shuffled rows", ylabel="average Fréchet distance (32 components)", ylim=(0, None))
    for panel in (left, right):
        clean(panel)
    figure.savefig(path, dpi=120)
