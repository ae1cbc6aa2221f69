"""A site's own disk: what it remembers between tasks, and finished work until the server has it safe.

    <folder>/
      memory.safetensors        what the site remembers, as of the last training that the server has safe
      done-<id>.safetensors     finished training: its result and what the site remembers after it
      secrets.safetensors       keys of a secure aggregation that is under way, and what was done with them

Training that the server may still forget (it dies before its next checkpoint) does not touch `memory.safetensors`: it
stays a link of the chain memory -> done-3 -> done-5, and can be taken back or handed in again.  Each file is written
aside and renamed, so whenever the process dies there is a whole one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from piebald.errors import RuntimeFault
from piebald.runtimes.federation.provisioning import private

_MEMORY = "memory/"


@dataclass(frozen=True, slots=True)
class FinishedTask:
    """Finished training.

    Attributes:
        id: of the task.
        asked: digest of the task's body, which tells it from another of the same number.
        epoch: of the server's process that asked.
        size: bytes of the result.
    """

    id: int
    asked: str
    epoch: str
    size: int


class ClientStore:
    """What one site keeps for one run.

    Args:
        folder: the site's own, made if it is not there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        self._base = self._read(folder / "memory.safetensors")
        self._chain: dict[int, tuple[FinishedTask, dict[str, Tensor] | None]] = {}
        for path in sorted(folder.glob("done-*.safetensors")):
            done, memory = self._open(path)
            self._chain[done.id] = (done, memory)
        self._chain = dict(sorted(self._chain.items()))

    @property
    def done(self) -> list[FinishedTask]:
        """Finished training, by number."""
        return [done for done, _ in self._chain.values()]

    def memory(self, before: int) -> dict[str, Tensor] | None:
        """What the site remembered when a number was given out, None before its first training."""
        memories = [memory for id, (_, memory) in self._chain.items() if memory is not None and id < before]
        return memories[-1] if memories else self._base

    def result(self, id: int) -> bytes:
        """The body of a result."""
        with safe_open(str(self._path(id)), framework="pt") as file:
            return bytes(file.get_tensor("result").numpy().tobytes())

    def finish(self, done: FinishedTask, result: bytes, memory: Mapping[str, Tensor] | None) -> None:
        """Keep a result, and what is remembered from now on (None: as before)."""
        self._write(done, result, memory)
        self._chain[done.id] = (done, None if memory is None else dict(memory))

    def adopt(self, id: int, epoch: str) -> None:
        """Another process of the server asked for the same."""
        done, memory = self._chain[id]
        done = replace(done, epoch=epoch)
        self._write(done, self.result(id), memory)
        self._chain[id] = (done, memory)

    def settle(self, id: int) -> None:
        """The server has this training and all before it safe."""
        for number in [number for number in self._chain if number <= id]:
            _, memory = self._chain[number]
            if memory is not None:
                private(self.folder / "memory.safetensors", save(dict(memory), {"id": str(number)}))
                self._base = memory
            del self._chain[number]
            self._path(number).unlink(missing_ok=True)

    def take_back(self, id: int) -> None:
        """Forget this training and all after it: it never happened."""
        for number in sorted((number for number in self._chain if number >= id), reverse=True):
            del self._chain[number]
            self._path(number).unlink(missing_ok=True)

    def secrets(self) -> dict[str, Tensor]:
        """What the site keeps from everybody, for secure aggregation."""
        return dict(self._read(self._secrets) or {})

    def keep(self, secrets: Mapping[str, Tensor]) -> None:
        """Keep that from now on."""
        private(self._secrets, save({name: tensor.contiguous() for name, tensor in secrets.items()}))

    # -- files

    @property
    def _secrets(self) -> Path:
        return self.folder / "secrets.safetensors"

    def _path(self, id: int) -> Path:
        return self.folder / f"done-{id}.safetensors"

    def _write(self, done: FinishedTask, result: bytes, memory: Mapping[str, Tensor] | None) -> None:
        import torch

        tensors = {"result": torch.frombuffer(bytearray(result), dtype=torch.uint8)}
        tensors |= {_MEMORY + name: tensor.contiguous() for name, tensor in (memory or {}).items()}
        about = {"id": done.id, "asked": done.asked, "epoch": done.epoch, "remembers": memory is not None}
        private(self._path(done.id), save(tensors, {"about": json.dumps(about)}))

    def _open(self, path: Path) -> tuple[FinishedTask, dict[str, Tensor] | None]:
        try:
            with safe_open(str(path), framework="pt") as file:
                about = json.loads(file.metadata()["about"])
                size = file.get_slice("result").get_shape()[0]
                names = [name for name in file.keys() if name.startswith(_MEMORY)]  # noqa: SIM118 - not a mapping
                memory = {name.removeprefix(_MEMORY): file.get_tensor(name) for name in names}
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise RuntimeFault(f"{path} cannot be read: {type(error).__name__}: restore it from a backup") from None
        return FinishedTask(about["id"], about["asked"], about["epoch"], size), memory if about["remembers"] else None

    def _read(self, path: Path) -> dict[str, Tensor] | None:
        if not path.exists():
            return None
        try:
            with safe_open(str(path), framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        except (OSError, SafetensorError) as error:
            raise RuntimeFault(f"{path} cannot be read: {type(error).__name__}: restore it from a backup") from None


def secret(folder: Path) -> int:
    """A random number that only this site knows, the same at every start."""
    path = folder / "secret"
    if not path.exists():
        folder.mkdir(mode=0o700, exist_ok=True)
        private(path, os.urandom(32).hex())
    return int(path.read_text(), 16)
