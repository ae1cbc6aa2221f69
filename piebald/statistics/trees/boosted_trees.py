"""Boosted trees: what they predict, how good they are at each client, and the file of xgboost."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from piebald.core.arguments import PathLike, checked, checked_class
from piebald.core.errors import SettingError
from piebald.report.page.markup import html_table
from piebald.statistics.boosting.clients import fresh
from piebald.statistics.boosting.rounds import Boosted
from piebald.statistics.boosting.targets import SCORES, Target
from piebald.statistics.boosting.xgboost_file import model_of
from piebald.statistics.columns import columns_of, is_frame
from piebald.statistics.trees.encoding import Encoding
from piebald.storage.tensor_files import write_bytes

Scores = Mapping[str, Any]  # numbers by name, NaN where a score is not defined


@checked_class
@dataclass(frozen=True, slots=True, eq=False)
class BoostedTrees:
    """Gradient-boosted trees over clients.

    Attributes:
        boosted: the trees, and where they start.
        encoding: the columns that they see.
        target: the objective.
        name: of the column that is predicted.
        classes: names of the classes, empty for a regression; of two, the second has the probability.
        clients: the clients' names.
        rows: training rows of each client, None where it told its sums under masks.
        together: scores of these trees on each client's own rows, by name; NaN where they are not defined.
        alone: scores of the trees that each client grows by itself, empty where nobody asked.
        pooled: scores of the trees of all training rows in one place, empty where they are not in one place.
        dropped: rows without a target, which are left out.
    """

    boosted: Boosted
    encoding: Encoding
    target: Target
    name: str
    classes: tuple[str, ...]
    clients: Sequence[str]
    rows: Sequence[int | None]
    together: Sequence[Scores]
    alone: Sequence[Scores] = ()
    pooled: Sequence[Scores] = ()
    dropped: int = 0

    def __repr__(self) -> str:
        """How much there is, in one line."""
        return (
            f"<BoostedTrees, {self.target.objective}: {len(self.boosted.forest)} trees in {self.rounds} rounds of "
            f"{len(self.clients)} clients, {self.metric} {mean(self.together, self.metric):.4g}>"
        )

    def _repr_html_(self) -> str:
        heading, *rows = self.table()
        return html_table(heading, rows)

    @property
    def rounds(self) -> int:
        """Rounds that were kept."""
        return len(self.boosted.ends)

    @property
    def training_rows(self) -> int:
        """Training rows of all clients."""
        return sum(self.boosted.start.rows)

    @property
    def metric(self) -> str:
        """The main score: "auc", or "rmse" for a regression."""
        return SCORES[self.target.objective][0]

    @property
    def importances(self) -> dict[str, float]:
        """The share of each column in the gain of all splits, those of most gain first.

        A client's gains are sums over its rows, so clients with more rows count more.
        """
        table = self.boosted.forest.table
        inner = table[:, :, 0] >= 0
        columns = table[:, :, 0][inner].astype(np.int64) >> 1
        gains = np.bincount(columns, table[:, :, 2][inner].astype(np.float64), len(self.encoding.columns))
        shares = gains / max(float(gains.sum()), 1e-300)
        order = np.argsort(-shares, kind="stable")
        return {self.encoding.columns[place]: float(shares[place]) for place in order}

    @checked
    def predict(self, rows: Any) -> NDArray[np.float64]:
        """Predictions for rows.

        Args:
            rows: a pandas DataFrame with the columns of the clients' tables, or inputs [n, d].

        Returns:
            Probabilities of the classes [n, C], or numbers [n] for a regression.

        Raises:
            SettingError: a column is missing, or there is another number of inputs.
        """
        names = [*self.encoding.numbers, *self.encoding.categories]
        if is_frame(rows):
            found = columns_of({"rows": rows}, None, names, "train")[0]
            for name in self.encoding.categories:
                if name not in found.texts:
                    raise SettingError(f"column {name!r} must hold text, as at the clients")
            x = self.encoding.of(found)
        else:
            x = np.asarray(rows, dtype=np.float32)
            if x.ndim != 2 or x.shape[1] != len(self.encoding.columns):
                raise SettingError(f"rows must be [n, {len(self.encoding.columns)}], got {list(x.shape)}")
        return self.target.probabilities(fresh(x, self.boosted.forest, self.boosted.start))

    @checked
    def save(self, path: PathLike) -> Path:
        """Write the model as xgboost's own JSON file, which `xgboost.Booster(model_file=...)` reads.

        What xgboost calls cover is a node's training rows; columns have the names of `encoding.columns`.
        """
        found = Path(path)
        if found.suffix != ".json":
            raise SettingError(f"path must end in .json, by which xgboost knows the format, got {found}")
        try:
            write_bytes(found.parent, found.name, self.xgboost_model())
        except OSError as error:
            raise SettingError(f"{found} cannot be written: {error.strerror or error}") from None
        return found

    def xgboost_model(self) -> bytes:
        """The content of that file."""
        return json.dumps(model_of(self.boosted, self.target, self.encoding.columns)).encode()

    def table(self) -> list[list[Any]]:
        """A table of the main score of each client, with its heading as the first row and means as the last one."""
        compared = {"together": self.together, "alone": self.alone, "pooled": self.pooled}
        held = {name: scores for name, scores in compared.items() if scores}
        heading = ["client", "rows", *(f"{self.metric} {name}" for name in held)]
        rows: list[list[Any]] = [
            [client, count, *(_known(scores[place][self.metric]) for scores in held.values())]
            for place, (client, count) in enumerate(zip(self.clients, self.rows, strict=True))
        ]
        means = [_known(mean(scores, self.metric)) for scores in held.values()]
        return [heading, *rows, ["(mean)", self.training_rows, *means]]

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        compared = {"together": self.together, "alone": self.alone, "pooled": self.pooled}
        return {
            "target": self.name,
            "objective": self.target.objective,
            "classes": list(self.classes),
            "columns": self.encoding.columns,
            "rounds": self.rounds,
            "trees": len(self.boosted.forest),
            "dropped": self.dropped,
            "validation_loss": list(self.boosted.losses),
            "importances": self.importances,
            "mean": {name: _known(mean(scores, self.metric)) for name, scores in compared.items() if scores},
            "clients": {
                client: {"rows": self.rows[place]}
                | {
                    name: {score: _known(value) for score, value in scores[place].items()}
                    for name, scores in compared.items()
                    if scores
                }
                for place, client in enumerate(self.clients)
            },
        }


def mean(scores: Sequence[Scores], name: str) -> float:
    """The mean of a score over the clients where it is defined, NaN where it is at none."""
    known = [one[name] for one in scores if not math.isnan(one[name])]
    return math.fsum(known) / len(known) if known else math.nan


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
