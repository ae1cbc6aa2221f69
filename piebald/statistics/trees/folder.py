"""The folder of boosted trees: the state after each round, from which a call goes on, and the model at the end."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from piebald.core.errors import RunFolderError
from piebald.core.reading.files import read_json
from piebald.statistics.boosting.clients import TreeRows
from piebald.statistics.boosting.forest import Forest, reject_reason
from piebald.statistics.boosting.rounds import Boosted, Start
from piebald.statistics.trees.boosted_trees import BoostedTrees
from piebald.storage import tensor_files
from piebald.storage.lock import RunLock

_STATE, _ABOUT = "state.safetensors", "about.json"
MODEL, RESULT = "trees.json", "result.json"


class TreeFolder:
    """A folder that one process writes to.

    Args:
        path: the folder, which is made if it is not there.
        about: what the trees are of; a folder of others is refused.

    Raises:
        RunFolderError: it cannot be written, another process writes to it, or it has trees of something else.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.chmod(0o700)
            self._lock = RunLock(path)
        except OSError as error:
            raise RunFolderError(f"{path} cannot be written: {error.strerror or error}") from None
        try:
            self._begin(json.loads(json.dumps(about)))
        except BaseException:
            self._lock.release()
            raise

    def _begin(self, about: dict[str, Any]) -> None:
        if not (self.path / _ABOUT).exists():
            if others := sorted(one.name for one in self.path.iterdir() if one.name != "run.lock"):
                raise RunFolderError(f"{self.path} has other files, like {others[0]}: choose another folder")
            self._write(_ABOUT, about)
            return
        try:
            found = read_json(self.path / _ABOUT)
        except (OSError, ValueError) as error:
            raise RunFolderError(f"{self.path / _ABOUT} cannot be read: {type(error).__name__}") from None
        if not isinstance(found, dict) or found.keys() != about.keys():
            raise RunFolderError(f"{self.path} has trees of something else: choose another folder")
        if other := next((name for name in about if found[name] != about[name]), None):
            raise RunFolderError(f"{self.path} has trees of other {other}: choose another folder")

    def read(self, columns: int, depth: int, groups: int) -> Boosted | None:
        """The state after the last round, None before the first.

        Raises:
            RunFolderError: it is damaged.
        """
        if not (self.path / _STATE).exists():
            return None
        try:
            held = {name: one.numpy() for name, one in tensor_files.pick(self.path, _STATE).items()}
            table = held["forest"].astype(np.float32)
            ends, losses = [int(one) for one in held["ends"]], tuple(held["losses"].astype(float).tolist())
            weights = tuple(held["class_weights"].astype(float).tolist()) or None
            rows = tuple(int(one) for one in held["rows"])
            start = Start(held["margins"].astype(np.float32), weights, rows)
        except (KeyError, ValueError, TypeError) as error:
            raise RunFolderError(f"{self.path / _STATE} is damaged ({type(error).__name__}): remove it") from None
        whole = bool(ends) and ends == sorted(ends) and ends[0] >= 0 and ends[-1] == len(table)
        reason = reject_reason(table[:, :, :2], columns, depth) if table.ndim == 3 and table.shape[2] == 4 else "form"
        if not whole or reason or len(start.margins) != groups or len(losses) not in (0, len(ends)):
            raise RunFolderError(f"{self.path / _STATE} is damaged: remove it")
        return Boosted(start, Forest(table, depth), tuple(ends), losses)

    def write(self, state: Boosted) -> None:
        """Keep the state after a round."""
        tensors = {
            "forest": torch.from_numpy(state.forest.table),
            "ends": torch.tensor(state.ends, dtype=torch.int64),
            "losses": torch.tensor(state.losses, dtype=torch.float64),
            "margins": torch.from_numpy(state.start.margins),
            "class_weights": torch.tensor(state.start.class_weights or (), dtype=torch.float64),
            "rows": torch.tensor(state.start.rows, dtype=torch.int64),
        }
        tensor_files.write(self.path, _STATE, tensors)

    def finish(self, found: BoostedTrees) -> None:
        """Keep the model and its scores."""
        found.save(self.path / MODEL)
        self._write(RESULT, found.plain())

    def close(self) -> None:
        """Let others write."""
        self._lock.release()

    def _write(self, name: str, values: Mapping[str, Any]) -> None:
        tensor_files.write_bytes(self.path, name, json.dumps(values, indent=1).encode())


@contextmanager
def kept_in(path: Path | None, about: Mapping[str, Any]) -> Iterator[TreeFolder | None]:
    """A folder for as long as it is written to, None where nothing is to be kept.

    Raises:
        RunFolderError: see `TreeFolder`.
    """
    if path is None:
        yield None
        return
    folder = TreeFolder(path, about)
    try:
        yield folder
    finally:
        folder.close()


def fingerprint(clients: Sequence[TreeRows]) -> str:
    """A digest of all clients' rows, by which a folder knows them again."""
    made = hashlib.blake2b(digest_size=16)
    for one in clients:
        made.update(one.name.encode() + b"\0")
        for split in one.x:
            made.update(np.ascontiguousarray(one.x[split]).tobytes() + np.ascontiguousarray(one.y[split]).tobytes())
    return made.hexdigest()
