"""What a transfer must beat: models that need no partner, or no alignment, scored on the target's held-out rows.

Their scores lie in the target's run folder (`row_score`), with values of rows from a jackknife, so that the package's
verdict compares them row by row (`report.verdict`).  The joined table is what no transfer is expected to beat: it is
shown, and takes no part in the verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from piebald.core.metrics import Auc
from piebald.engines.scoring import value_of, values_of_rows
from piebald.report.paired import Scores
from piebald.report.verdict import ScoreVerdict
from piebald.storage.schema import unpacked_values
from piebald.vertical.party_data import PartyHolding
from piebald.vertical.protocol import Role

TRANSFER, CONSTANT = "the transfer", "the most frequent class"
OWN, SHARED = "own labels alone", "labels of co-occurring rows alone"
COMMON, JOINED = "the source's model on common columns", "the joined table"
METRIC = "AUC"


def plain_models(data: Mapping[Role, PartyHolding]) -> dict[str, Tensor]:
    """Return the scores of the target's test rows by logistic regressions, as far as the data at hand allow them.

    Args:
        data: of both parties, as in a simulation, or the target's alone, which has only the labels of its own table.
    """
    target = data["target"]
    found = {CONSTANT: torch.zeros(len(target.test))}
    if target.own_y is not None:
        known = target.own_y != 0
        found |= _fitted(OWN, target.x[known], target.own_y[known], target.test)
    source = data.get("source")
    if source is None or source.y is None:
        return found
    shared = source.y[source.overlap]
    found |= _fitted(SHARED, target.x[target.overlap], shared, target.test)
    if common := [name for name in source.features if name in target.features]:
        there, here = ([one.features.index(name) for name in common] for one in (source, target))
        found |= _fitted(COMMON, source.x[:, there], source.y, target.test[:, here])
    if len(source.test) == len(target.test):  # of a data set that was divided: rows of files that nobody shares
        joined = torch.cat([source.x[source.overlap], target.x[target.overlap]], 1)
        found |= _fitted(JOINED, joined, shared, torch.cat([source.test, target.test], 1))
    return found


def _fitted(name: str, x: Tensor, y: Tensor, rows: Tensor) -> dict[str, Tensor]:
    """Return the scores of a model by its name; none where the labels it would learn from are all alike."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    if len(torch.unique(y)) < 2:
        return {}
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)).fit(x.numpy(), y.numpy())
    return {name: torch.from_numpy(model.decision_function(rows.numpy()))}


def scored(found: Mapping[str, Tensor], labels: Tensor, version: int) -> list[dict[str, Any]]:
    """Return scores [n] by name as rows of the table `row_score`; none without labels -1 or 1 [n] of both kinds."""
    if len(torch.unique(labels)) < 2:
        return []
    targets = (labels > 0).double()
    return [
        {
            "version": version, "client": 0, "model": name, "split": "test", "metric": METRIC,
            "value": float(value_of(Auc(), scores, targets)),
            "row_values": values_of_rows(Auc(), scores, targets).tolist(),
        }
        for name, scores in found.items()
    ]  # fmt: skip


def tables_of(judged: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[str, Scores]:
    """Return the scores of each model that all runs have, by its name.

    Args:
        judged: rows of the table `row_score` of each run, by its seed, which has drawn the held-out rows.
    """
    cells = {(row["model"], seed): row for seed, rows in judged.items() for row in rows}
    names = [name for name in dict.fromkeys(name for name, _ in cells) if all((name, x) in cells for x in judged)]
    tables = {}
    for name in names:
        of_rows = {(seed, "target"): unpacked_values(cells[name, seed]["row_values"]) for seed in judged}
        values = np.array([[cells[name, seed]["value"]] for seed in judged])
        sizes = [min(map(len, of_rows.values()))]
        tables[name] = Scores(values, ["target"], list(judged), sizes=sizes, rows=of_rows, redrawn=True)
    return tables


def verdict_of(tables: Mapping[str, Scores]) -> ScoreVerdict | None:
    """Return the verdict on the transfer and its baselines, from scores by name; None without any."""
    naive = {name: table for name, table in tables.items() if name == CONSTANT}
    rivals = {name: table for name, table in tables.items() if name not in (CONSTANT, JOINED)}
    alone = OWN if OWN in rivals else None
    return ScoreVerdict.of(rivals, METRIC, True, alone, naive) if rivals else None


def says_of(tables: Mapping[str, Scores]) -> str:
    """Return `verdict_of` in words, "" for none."""
    verdict = verdict_of(tables)
    return "" if verdict is None else f"{verdict.sentence()}. {verdict.meaning()}"
