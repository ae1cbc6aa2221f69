"""Why scores differ from the paper's: one change of our conditions at a time, each against the paper's figures.

The paper prints no split, no number of co-occurring rows, no optimiser, and neither how F is averaged.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import baselines
import numpy as np
import tables as shown
import torch
from shared.intervals import interval, plus_minus
from shared.markdown import table
from shared.stored import Lines, printed

from piebald.vertical import party_data
from piebald.vertical.party_data import PartyHolding
from piebald.vertical.protocol import Role
from piebald.vertical.transfer_results import transfer_score
from piebald.vertical.transfer_settings import TransferSettings

PAPER = printed("smmd")["tables"]  # tables 1 to 3: F-score, AUC, precision on credit, then on census
ROWS = {"credit": 10000, "census": 15000}  # co-occurring rows where there are many
BASE = "features as in reality, 5 and 8 in common"
CHANGES: dict[str, dict[str, Any]] = {
    BASE: {},
    "features divided by turns, none in common": {"divided": "by turns"},
    "source's and target's features exchanged": {"divided": "exchanged"},
    "2,000 co-occurring rows": {"overlap": 2000, "overlap_batch": 250},
    "10,000 or 15,000 co-occurring rows": {"overlap": None, "overlap_batch": 250},
    "600 steps": {"steps": 600},
    "learning rate 0.01": {"lr": 0.01},
    "translator not balanced": {"balanced": False},
    "no loss of the source's own": {"own": 0.0},
    "by turns, many co-occurring rows, 600 steps": {
        "divided": "by turns", "overlap": None, "overlap_batch": 250, "steps": 600,
    },
}  # fmt: skip


def settings(name: str, seed: int, change: dict[str, Any]) -> TransferSettings:
    """Our conditions with one change."""
    given = dict(change)
    overlap = given.pop("overlap", 300)
    data: dict[str, Any] = {"name": name, "overlap": ROWS[name] if overlap is None else overlap}
    if divided := given.pop("divided", None):
        data = _features(name, divided) | data
    return shown.settings(name, seed, data=data, method=shown.smmd(shown.KERNELS["Gaussian, sigma 1"]), **given)


def _features(name: str, divided: str) -> dict[str, Any]:
    table = shown.data.load(name)
    names = party_data.feature_names(table)
    if divided == "by turns":
        return shown.disjoint(name)
    own, both = party_data.division(table)
    return {"source": tuple(one for one in names if one not in own or one in both), "common": both}


def averages(scores: torch.Tensor, labels: torch.Tensor, rate: float) -> dict[str, float]:
    """AUC, and F and precision of the positives and averaged over both classes."""
    from sklearn.metrics import f1_score, precision_score

    made = transfer_score(scores, labels, rate)
    predicted = np.zeros(len(scores), dtype=bool)
    predicted[np.argsort(-scores.numpy(), kind="stable")[: round(rate * len(scores))]] = True
    true, found = (labels > 0).numpy(), {"auc": made.auc, "f1": made.f1, "precision": made.precision}
    for how in ("macro", "weighted"):
        found[f"f1 {how}"] = float(f1_score(true, predicted, average=how))
        found[f"precision {how}"] = float(precision_score(true, predicted, average=how))
    return found


def source_alone(held: dict[Role, PartyHolding], given: TransferSettings) -> dict[str, float]:
    """The source's model on the test rows as the target sees them."""
    source, target = held["source"], held["target"]
    assert source.y is not None
    model = baselines.supervised(source.x, source.y, given, "source only")
    return averages(model(baselines.as_seen(source, target)), target.test_y, float((source.y > 0).double().mean()))


def source_own(held: dict[Role, PartyHolding], given: TransferSettings) -> dict[str, float]:
    """The source's model on the source's features of the same test rows, as if the target had them."""
    return averages(*shown.source_on_its_features(held, given))


def run(seeds: int, raw: Path) -> None:
    """Run what is not in the file yet, and add a line for each."""
    torch.set_num_threads(1)
    kept = Lines(raw, "set", "seed", "change")
    done = kept.done()
    alone = {"source only, features that both have": source_alone, "source only, the source's features": source_own}
    for seed in range(seeds):
        for name in shown.SETS:
            for label, change in (CHANGES | {key: {} for key in alone}).items():
                if (name, seed, label) in done:
                    continue
                given = settings(name, seed, change)
                held = party_data.load(given.data, seed)
                if label in alone:
                    found = alone[label](held, given)
                else:
                    _, target = baselines.train_jointly(held, given, exact=False)
                    scores = target.predict(target.data.test)
                    found = averages(scores, target.data.test_y, target.rate)
                kept.add({"set": name, "seed": seed, "change": label} | found)


def tables(raw: Path) -> dict[str, str]:
    """Markdown by name: the paper's figures, and ours with one change at a time."""
    paper = [[name, *(f"{value:.3f}" for value in values)] for name, values in PAPER.items()]
    rows, found = Lines(raw).read(), []
    for name in shown.SETS:
        base = {row["seed"]: row["auc"] for row in rows if (row["set"], row["change"]) == (name, BASE)}
        for label in dict.fromkeys(row["change"] for row in rows):
            mine = [row for row in rows if (row["set"], row["change"]) == (name, label) and row["seed"] in base]
            if not mine:
                continue
            apart = interval([row["auc"] - base[row["seed"]] for row in mine])
            names = ("auc", "f1", "f1 macro", "f1 weighted")
            auc, *f = (f"{np.mean([row[what] for row in mine]):.3f}" for what in names)
            found.append([name, label, auc, plus_minus(*apart, "+.3f"), *f, len(mine)])
    averages = [f"F, {how}" for how in ("positives", "macro", "weighted")]
    return {
        "paper": table(["", "credit F", "AUC", "precision", "census F", "AUC", "precision"], paper),
        "gap": table(["set", "one change", "AUC", "difference to ours", *averages, "seeds"], found),
    }
