"""Boosted trees: predictions, scores at each client, the JSON file of xgboost's own models, and their folder.

The folder has the state after each round, from which a call goes on, and the model at the end.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from piebald.core.arguments import PathLike, checked, checked_class
from piebald.core.errors import RunFolderError, SettingError
from piebald.core.files import read_json
from piebald.core.result_table import ResultTable
from piebald.data.clients.owner import is_frame
from piebald.data.preparation.preparation import Tell, warn
from piebald.inference.pooled_statistics import PooledResult, plain_value
from piebald.inference.trees.client_rows import OBJECTIVES, margins_of
from piebald.inference.trees.encoding import Encoding, TreeRows
from piebald.inference.trees.forest import LEAF, SCORES, Floats32, Forest, Target, reject_reason
from piebald.inference.trees.rounds import Boosted, Start
from piebald.storage import tensor_files
from piebald.storage.lock import RunLock
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
        return {self.encoding.columns[index]: float(shares[index]) for index in order}

    @checked
    def predict(self, rows: Any, client: str | None = None, tell: Tell = warn) -> NDArray[np.float64]:
        """Return predictions for rows.

        Args:
            rows: a pandas DataFrame with the columns of the clients' tables, or inputs [n, d].
            client: whose they are, where clients have rules of cleaning of their own, or harmonised numbers.
            tell: takes sentences about how rows were cleaned, and how they are unlike those of training.

        Returns:
            Probabilities of the classes [n, C], or numbers [n] for a regression.

        Raises:
            SettingError: a column is missing, or there is another number of inputs.
        """
        prepared = self.encoding.preparation
        clean = prepared.cleaned(rows, client, tell) if prepared is not None and is_frame(rows) else rows
        x = self.encoding.inputs(clean, client)
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
            [client, count, *(plain_value(scores[index][self.metric]) for scores in self._scores.values())]
            for index, (client, count) in enumerate(zip(self.clients, self.rows, strict=True))
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
                    client: {"rows": self.rows[index], **{name: scores[index] for name, scores in self._scores.items()}}
                    for index, client in enumerate(self.clients)
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


_STATE, _ABOUT = "state.safetensors", "about.json"
MODEL, RESULT = "trees.json", "result.json"
Done = Callable[[Boosted], None]


class TreeFolder:
    """A folder that one process writes to.

    Args:
        path: the folder, which is created if it does not exist.
        about: settings and rows of the trees; a folder with trees of others is refused.

    Raises:
        RunFolderError: it cannot be written, another process writes to it, or it has trees of something else.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            # also for a folder that was there: thresholds of trees are numbers of clients' rows
            path.chmod(0o700)
            self._lock = RunLock(path)
        except OSError as error:
            raise RunFolderError(f"{path} cannot be written: {error.strerror or error}") from None
        try:
            # through JSON, so that tuples and lists compare equal with what is read back
            self._begin(json.loads(json.dumps(about)))
        # Ctrl-C included: a lock that stays would refuse the next call in this process
        except BaseException:
            self._lock.release()
            raise

    def _begin(self, about: dict[str, Any]) -> None:
        if not (self.path / _ABOUT).exists():
            # files of another program must not be mixed with these, and the lock is there by now
            if foreign := sorted(file.name for file in self.path.iterdir() if file.name != "run.lock"):
                raise RunFolderError(f"{self.path} has other files, like {foreign[0]}: choose another folder")
            self._write(_ABOUT, about)
            return
        try:
            stored = read_json(self.path / _ABOUT)
        except (OSError, ValueError) as error:
            raise RunFolderError(f"{self.path / _ABOUT} cannot be read: {type(error).__name__}") from None
        if not isinstance(stored, dict) or stored.keys() != about.keys():
            raise RunFolderError(f"{self.path} has trees of something else: choose another folder")
        if changed := next((name for name in about if stored[name] != about[name]), None):
            raise RunFolderError(f"{self.path} has trees of other {changed}: choose another folder")

    def read(self, columns: int, depth: int, groups: int) -> Boosted | None:
        """Return the state after the last round, None before the first.

        Raises:
            RunFolderError: it is damaged.
        """
        return _state_in(self.path, columns, depth, groups) if (self.path / _STATE).exists() else None

    def write(self, state: Boosted) -> None:
        """Write the state after a round."""
        tensors = {
            "forest": torch.from_numpy(state.forest.table),
            "ends": torch.tensor(state.ends, dtype=torch.int64),
            "losses": torch.tensor(state.losses, dtype=torch.float64),
            "margins": torch.from_numpy(state.start.margins),
            "class_weights": torch.tensor(state.start.class_weights or (), dtype=torch.float64),
            "rows": torch.tensor(state.start.rows, dtype=torch.int64),
        }
        # one file for all, so that a kill cannot leave trees of one round beside losses of another
        tensor_files.write(self.path, _STATE, tensors)

    def finish(self, trees: BoostedTrees) -> None:
        """Write the model and its scores."""
        trees.save(self.path / MODEL)
        self._write(RESULT, trees.plain())

    def close(self) -> None:
        """Release the folder for other processes."""
        self._lock.release()

    def _write(self, name: str, values: Mapping[str, Any]) -> None:
        tensor_files.write_bytes(self.path, name, json.dumps(values, indent=1).encode())


def trees_in(path: Path) -> BoostedTrees:
    """Return the trees that a finished call has written to a folder.

    Raises:
        RunFolderError: the folder has none, or they are damaged.
    """
    try:
        result, settings = read_json(path / RESULT), read_json(path / _ABOUT)["settings"]
        encoding = Encoding.of_table(result["encoding"])
        target = Target(result["objective"], len(result["classes"]))
        clients: Mapping[str, Any] = result["clients"]
        scores = {
            name: [
                {score: math.nan if value is None else float(value) for score, value in client[name].items()}
                for client in clients.values()
                if name in client
            ]
            for name in ("together", "alone", "pooled")
        }
        classes = tuple(map(str, result["classes"]))
        rows, rounds, dropped = [client["rows"] for client in clients.values()], result["rounds"], result["dropped"]
        left_out = {str(name): str(reason) for name, reason in result.get("left_out", {}).items()}
        depth = int(settings["max_depth"])
    except FileNotFoundError:
        raise RunFolderError(f"{path} has no finished trees: finish them with the call that began them") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SettingError) as error:
        raise RunFolderError(f"{path / RESULT} cannot be read: {type(error).__name__}") from None
    # outside the `try`, since its own errors say better what is damaged
    boosted = _state_in(path, len(encoding.columns), depth, target.groups)
    return BoostedTrees(
        boosted.cut(rounds), encoding, target, str(result["target"]), classes, [*clients], rows, scores["together"],
        scores["alone"], scores["pooled"], dropped, left_out,
    )  # fmt: skip


def _state_in(path: Path, columns: int, depth: int, groups: int) -> Boosted:
    try:
        arrays = {name: tensor.numpy() for name, tensor in tensor_files.pick(path, _STATE).items()}
        table = arrays["forest"].astype(np.float32)
        ends, losses = [int(end) for end in arrays["ends"]], tuple(arrays["losses"].astype(float).tolist())
        # no weights are written as an empty list, which files of tensors can hold
        weights = tuple(arrays["class_weights"].astype(float).tolist()) or None
        rows = tuple(int(count) for count in arrays["rows"])
        start = Start(arrays["margins"].astype(np.float32), weights, rows)
    except (KeyError, ValueError, TypeError) as error:
        raise RunFolderError(f"{path / _STATE} is damaged ({type(error).__name__}): remove it") from None
    # a file from elsewhere may have any form: rounds must end in order and at the last tree
    whole = bool(ends) and ends == sorted(ends) and ends[0] >= 0 and ends[-1] == len(table)
    reason = reject_reason(table[:, :, :2], columns, depth) if table.ndim == 3 and table.shape[2] == 4 else "form"
    if not whole or reason or len(start.margins) != groups or len(losses) not in (0, len(ends)):
        raise RunFolderError(f"{path / _STATE} is damaged: remove it")
    return Boosted(start, Forest(table, depth), tuple(ends), losses)


def open_folder(path: Path | None, about: Mapping[str, Any]) -> AbstractContextManager[TreeFolder | None]:
    """Open a folder for as long as it is written to; None without a path.

    Raises:
        RunFolderError: see `TreeFolder`.
    """
    return nullcontext() if path is None else closing(TreeFolder(path, about))


def each_round(folder: TreeFolder | None, done: Done | None) -> Done:
    """Return a function that writes the state after each round, and calls `done` with it."""

    def write_and_call(state: Boosted) -> None:
        if folder is not None:
            folder.write(state)
        if done is not None:
            done(state)

    return write_and_call


def fingerprint(clients: Sequence[TreeRows]) -> str:
    """Return a digest of all clients' rows, by which a folder recognises them."""
    digest = hashlib.blake2b(digest_size=16)
    for client in clients:
        # a zero byte ends the name, so that name and rows cannot be divided in two ways
        digest.update(client.name.encode() + b"\0")
        for split, x in client.x.items():
            digest.update(np.ascontiguousarray(x).tobytes() + np.ascontiguousarray(client.y[split]).tobytes())
            digest.update(client.weights[split].tobytes() if split in client.weights else b"")
    return digest.hexdigest()
