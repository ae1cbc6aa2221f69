"""The folder of boosted trees: the state after each round, from which a call goes on, and the model at the end."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from piebald.core.errors import RunFolderError, SettingError
from piebald.core.reading.files import read_json
from piebald.inference.trees.boosted_trees import BoostedTrees
from piebald.inference.trees.encoding import Encoding, TreeRows
from piebald.inference.trees.forest import Forest, reject_reason
from piebald.inference.trees.rounds import Boosted, Start
from piebald.inference.trees.settings import Target
from piebald.storage import tensor_files
from piebald.storage.lock import RunLock

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
    return digest.hexdigest()
