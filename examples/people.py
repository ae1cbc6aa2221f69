"""Whom does it help to train together?  30 people with a phone at the waist, and the picture of the README.

python examples/people.py     reads UCI HAR (downloaded, 60 MB), trains for about five minutes and writes people.png

Each person alone has the best of a network and of scikit-learn's plain models, and each method of several rates, by
validation rows; what was chosen is trained on these as well.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression

import piebald
from piebald import data, models, partition, recipes

ROUNDS = 20
RATES = (0.01, 0.03, 0.1, 0.3)  # each method has its best of these, by validation rows of the first seed
SHARED = {
    "FedAvg": recipes.fedavg,
    "FedAvg, fine-tuned": recipes.fine_tuned,
    "Ditto": recipes.ditto,
    "FedBN": recipes.fedbn,
}


def signals() -> data.DataSet:
    """The windows of UCI HAR as vectors: mean, deviation and the sizes of eight frequencies of each signal."""
    rows = data.har()
    waves = torch.fft.rfft(rows.x - rows.x.mean(2, keepdim=True), dim=2).abs()[:, :, 1:9]
    x = torch.cat([rows.x.mean(2), rows.x.std(2), waves.log1p().flatten(1)], 1)
    return dataclasses.replace(rows, x=(x - x.mean(0)) / x.std(0).clamp_min(1e-3), train=None, test=None)


def plain_models() -> dict[str, Any]:
    """Models that need no network, for a person who trains alone."""
    return {
        "shrunken discriminant analysis": LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto"),
        "logistic regression": LogisticRegression(max_iter=1000),
        "boosted trees": HistGradientBoostingClassifier(min_samples_leaf=5, early_stopping=False, random_state=0),
    }


def of_each(model: Any, people: Any, trained: tuple[str, ...], split: str) -> np.ndarray:
    """The accuracy of a plain model on each person's rows of a split, fitted to that person's own rows of others."""
    scores = []
    for person in range(len(people)):
        parts = [people.rows(person, name) for name in trained]
        x, y = (np.concatenate([getattr(part, axis).numpy() for part in parts]) for axis in ("x", "y"))
        rows = people.rows(person, split)
        scores.append(model.fit(x, y).score(rows.x.numpy(), rows.y.numpy()))
    return np.array(scores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("people.png"), help="the picture")
    out = parser.parse_args().out
    people = partition.ByOwner(owner="subject", test=0.5, validation=0.2).split(signals())

    def network(seed: int) -> torch.nn.Module:
        return models.build_model("mlp_bn", tuple(people.x.shape[1:]), 6, seed=seed, hidden=[32])

    chosen, scores, by_person = {}, {}, {}
    for name, recipe in {"Alone": recipes.local, **SHARED}.items():
        made = {str(lr): recipe(lr=lr, batch=16) for lr in RATES}
        tried = piebald.compare(
            made, people, network, rounds=ROUNDS, evaluate_every=ROUNDS, evaluate_split="validation"
        )
        best = max(tried.summary(), key=lambda row: row["mean"])
        chosen[name], scores[name] = made[best["label"]], best["mean"]
        by_person[name] = np.array(list(tried.finals[best["label"]][0]["per_client"].values()))
        print(f"{name}: lr {best['label']}, {best['mean']:.1%} of validation rows", flush=True)
    tables = {name: of_each(model, people, ("train",), "validation") for name, model in plain_models().items()}
    plain = {name: table.mean() for name, table in tables.items()}
    print({name: f"{score:.1%} of validation rows" for name, score in plain.items()})
    together = max(SHARED, key=scores.__getitem__)  # test rows choose nothing
    shown = {name: chosen[name] for name in dict.fromkeys(("Alone", "FedAvg", together))}
    compared = piebald.compare(
        shown, people, network, rounds=ROUNDS, seeds=range(5), evaluate_every=ROUNDS, on_all_rows=list(shown)
    )
    print(compared.summary(), compared.paired("Alone"), sep="\n")

    counts = [(people.counts(number, "train"), people.counts(number, "test")) for number in range(len(people))]
    final = {"Most frequent activity": np.array([test[np.argmax(train)] / sum(test) for train, test in counts])}
    for name in shown:
        final[name] = np.mean([list(seed["per_client"].values()) for seed in compared.finals[name]], axis=0)
    strongest = max(plain, key=plain.__getitem__)
    if plain[strongest] > scores["Alone"]:
        print(f"alone, {strongest} is better than the network")
        final["Alone"] = of_each(plain_models()[strongest], people, ("train", "validation"), "test")
        by_person["Alone"] = tables[strongest]
    better = np.where(by_person[together] > by_person["Alone"], final[together], final["Alone"])
    print(f"each what is better on the person's own validation rows: {better.mean():.1%}")
    gains = final[together] - final["Alone"]
    print({name: round(float(values.mean()), 3) for name, values in final.items()}, np.sort(gains.round(3)))
    error = gains.std(ddof=1) / len(gains) ** 0.5
    print(f"gain {gains.mean():.3f}, over people {1.96 * error:.3f} to both sides")
    draw(final, together, np.argsort(-gains), out)


def draw(final: dict[str, np.ndarray], together: str, order: np.ndarray, out: Path) -> None:
    """Draw a column for each person, the one who gains most first."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes, places = figure.subplots(), np.arange(len(order))
    axes.vlines(places, 100 * final["Alone"][order], 100 * final[together][order], color="#4c5fd5", alpha=0.35, lw=4)
    looks = {
        "Most frequent activity": {"marker": "x", "color": "#999"},
        "Alone": {"marker": "o", "facecolors": "white", "edgecolors": "#333"},
        "FedAvg": {"marker": "_", "color": "#d08020"},
        together: {"marker": "o", "color": "#4c5fd5"},
    }
    for name, look in looks.items():
        mean = f"{name} ({100 * final[name].mean():.0f}% on average)"
        axes.scatter(places, 100 * final[name][order], s=34, label=mean, zorder=3, **look)
    axes.set(xlabel="30 people, the one who gains most first", ylabel="Test accuracy, %", ylim=(0, 103), xticks=[])
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 0.25), fontsize=9)
    figure.savefig(out, dpi=140)


if __name__ == "__main__":
    main()
