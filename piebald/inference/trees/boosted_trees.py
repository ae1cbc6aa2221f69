"""Boosted trees: predictions, scores at each client, and the JSON file of xgboost's own models."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from piebald.core.arguments import PathLike, checked, checked_class
from piebald.core.errors import SettingError
from piebald.core.result_table import ResultTable
from piebald.inference.pooled_statistics import PooledResult, plain_value
from piebald.inference.trees.client_rows import OBJECTIVES, margins_of
from piebald.inference.trees.encoding import Encoding
from piebald.inference.trees.forest import LEAF, Floats32
from piebald.inference.trees.rounds import Boosted
from piebald.inference.trees.settings import SCORES, Target
from piebald.storage.tensor_files import write_bytes

_VERSION = [3, 1, 0]  # of xgboost: the first whose models have a start for each class
_NO_PARENT = 2147483647  # in place of the parent of a root

Scores = Mapping[str, Any]  # numbers by name, NaN where a score is not defined


@checked_class
@dataclass(frozen=True, slots=True, eq=False)
class BoostedTrees(PooledResult):
    """Gradient-boosted trees over clients.

    Attributes:
        boosted: the trees, and the start of boosting.
        encoding: the columns that the trees see.
        target: the objective.
        name: name of the column that is predicted.
        classes: names of the classes, empty for a regression; of two, the second has the probability.
        clients: the clients' names.
        rows: training rows of each client, None where it sent its sums under masks.
        together: scores of these trees on each client's own rows, by name; NaN where they are not defined.
        alone: scores of the trees that each client grows by itself, empty without a comparison.
        pooled: scores of the trees of all training rows in one place, empty where they are not in one place.
        dropped: rows without a target, which are left out.
        left_out: the reasons why clients have no part in them, or not in all of them, by name.
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
    left_out: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Return the size and the main score in one line."""
        return (
            f"<BoostedTrees, {self.target.objective}: {len(self.boosted.forest)} trees in {self.rounds} rounds of "
            f"{len(self.clients)} clients{self._fewer}, {self.metric} {mean(self.together, self.metric):.4g}>"
        )

    @property
    def rounds(self) -> int:
        """The number of rounds."""
        return len(self.boosted.ends)

    @property
    def training_rows(self) -> int:
        """The training rows of all clients."""
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
        # a forest without a split has no gains to divide
        shares = gains / max(float(gains.sum()), 1e-300)
        # stable, so that columns without gains keep the table's order
        order = np.argsort(-shares, kind="stable")
        return {self.encoding.columns[place]: float(shares[place]) for place in order}

    @checked
    def predict(self, rows: Any) -> NDArray[np.float64]:
        """Return predictions for rows.

        Args:
            rows: a pandas DataFrame with the columns of the clients' tables, or inputs [n, d].

        Returns:
            Probabilities of the classes [n, C], or numbers [n] for a regression.

        Raises:
            SettingError: a column is missing, or there is another number of inputs.
        """
        x = self.encoding.inputs(rows)
        return self.target.probabilities(margins_of(x, self.boosted.forest, self.boosted.start))

    @checked
    def save(self, path: PathLike) -> Path:
        """Write the model as xgboost's own JSON file, which `xgboost.Booster(model_file=...)` reads.

        The cover of a node in that file is its training rows; columns have the names of `encoding.columns`.
        """
        file = Path(path)
        if file.suffix != ".json":
            raise SettingError(f"path must end in .json, by which xgboost knows the format, got {file}")
        try:
            write_bytes(file.parent, file.name, self.xgboost_model())
        except OSError as error:
            raise SettingError(f"{file} cannot be written: {error.strerror or error}") from None
        return file

    def xgboost_model(self) -> bytes:
        """Return the content of that file."""
        return json.dumps(_xgboost_values(self.boosted, self.target, self.encoding.columns)).encode()

    @property
    def _scores(self) -> dict[str, Sequence[Scores]]:
        """The scores that there are, by name."""
        scores = {"together": self.together, "alone": self.alone, "pooled": self.pooled}
        return {name: of_clients for name, of_clients in scores.items() if of_clients}

    def table(self) -> ResultTable:
        """Return a table of the main score of each client, with means as the last row."""
        heading = ["client", "rows", *(f"{self.metric} {name}" for name in self._scores)]
        rows: list[list[Any]] = [
            [client, count, *(plain_value(scores[place][self.metric]) for scores in self._scores.values())]
            for place, (client, count) in enumerate(zip(self.clients, self.rows, strict=True))
        ]
        means = [plain_value(mean(scores, self.metric)) for scores in self._scores.values()]
        return ResultTable([*rows, ["(mean)", self.training_rows, *means]], heading, notes=self.notes)

    def plain(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {
            "target": self.name,
            "objective": self.target.objective,
            "classes": list(self.classes),
            "columns": self.encoding.columns,
            "encoding": self.encoding.table(),
            "rounds": self.rounds,
            "trees": len(self.boosted.forest),
            "dropped": self.dropped,
            "left_out": dict(self.left_out),
            "validation_loss": list(self.boosted.losses),
            "importances": self.importances,
            "mean": plain_value({name: mean(scores, self.metric) for name, scores in self._scores.items()}),
            "clients": plain_value(
                {
                    client: {"rows": self.rows[place], **{name: scores[place] for name, scores in self._scores.items()}}
                    for place, client in enumerate(self.clients)
                }
            ),
        }


def mean(scores: Sequence[Scores], name: str) -> float:
    """Return the mean of a score over the clients where it is defined, NaN where it is at none."""
    defined = [of_client[name] for of_client in scores if not math.isnan(of_client[name])]
    return math.fsum(defined) / len(defined) if defined else math.nan


def _xgboost_values(boosted: Boosted, target: Target, columns: Sequence[str]) -> dict[str, Any]:
    """Return the model as xgboost's JSON values."""
    objective: dict[str, Any] = {"name": OBJECTIVES[target.objective]}
    if target.objective == "multiclass":
        objective["softmax_multiclass_param"] = {"num_class": str(target.classes)}
    else:
        objective["reg_loss_param"] = {"scale_pos_weight": "1"}
    trees = [_tree(table, number, len(columns)) for number, table in enumerate(boosted.forest.table)]
    base = ",".join(repr(number) for number in target.base_score(boosted.start.margins))
    model = {
        "gbtree_model_param": {"num_parallel_tree": "1", "num_trees": str(len(trees))},
        "cats": {"enc": [], "feature_segments": [], "sorted_idx": []},
        # rounds end here, so that xgboost's own `iteration_range` cuts at the same places
        "iteration_indptr": [0, *boosted.ends],
        "tree_info": [number % target.groups for number in range(len(trees))],
        "trees": trees,
    }
    return {
        "learner": {
            "attributes": {},
            "feature_names": list(columns),
            "feature_types": ["float"] * len(columns),
            "gradient_booster": {"model": model, "name": "gbtree"},
            "learner_model_param": {
                "base_score": f"[{base}]",
                "boost_from_average": "0",
                "num_class": str(target.classes if target.objective == "multiclass" else 0),
                "num_feature": str(len(columns)),
                "num_target": "1",
            },
            "objective": objective,
        },
        "version": _VERSION,
    }


def _tree(table: Floats32, number: int, columns: int) -> dict[str, Any]:
    order, queue = [], [0]  # nodes in the order of their depth, as xgboost numbers them
    while queue:
        place = queue.pop(0)
        order.append(place)
        if table[place, 0] >= 0:
            queue += [2 * place + 1, 2 * place + 2]
    numbered = {place: node for node, place in enumerate(order)}
    rows = table[order]
    splits = [int(split) for split in rows[:, 0]]
    inner = [split > LEAF for split in splits]
    numbers = [float(number) for number in rows[:, 1]]
    return {
        "base_weights": [0.0 if is_inner else number for number, is_inner in zip(numbers, inner, strict=True)],
        "categories": [],
        "categories_nodes": [],
        "categories_segments": [],
        "categories_sizes": [],
        "default_left": [split & 1 if is_inner else 0 for split, is_inner in zip(splits, inner, strict=True)],
        "id": number,
        "left_children": [numbered[2 * p + 1] if is_inner else -1 for p, is_inner in zip(order, inner, strict=True)],
        "loss_changes": [float(gain) for gain in rows[:, 2]],
        "parents": [numbered[(place - 1) // 2] if place else _NO_PARENT for place in order],
        "right_children": [numbered[2 * p + 2] if is_inner else -1 for p, is_inner in zip(order, inner, strict=True)],
        "split_conditions": numbers,
        "split_indices": [split >> 1 if is_inner else 0 for split, is_inner in zip(splits, inner, strict=True)],
        "split_type": [0] * len(order),
        "sum_hessian": [float(count) for count in rows[:, 3]],
        "tree_param": {
            "num_deleted": "0",
            "num_feature": str(columns),
            "num_nodes": str(len(order)),
            "size_leaf_vector": "1",
        },
    }
