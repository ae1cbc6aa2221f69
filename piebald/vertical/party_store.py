"""A party's own run folder: its steps, its checkpoints, and its results.

    RUN/transfer.toml                      the settings
    RUN/source/, RUN/target/               each party's own folder; on two machines, each has only one of them
        steps.jsonl                        one line per step: seconds, bytes, losses
        checkpoint-00000040.safetensors    weights and optimizer; the last two are kept
        secret                                 the seed of the first weights and batches; not in a simulation
        told.jsonl                             the party's disclosures about its rows, counted before they were sent
        partner                                the name in the other party's certificate
        after.safetensors                      the target's translator, and scores of its test rows; empty at the source
        preparation.json                       how columns become inputs, at the target
        scores.csv                             the target's scores of all rows of its file

Only the owner can read the folder and its files, whatever the umask.  Keys, masks and messages of the other party are
never written.  The secret stays after the run: if the other party has not finished, both take their last step again.

A checkpoint is passed when both parties have a later one, and then it is deleted: a partner that could make this party
go back again and again would learn more each time.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from piebald.core.errors import RunFolderError
from piebald.core.files import read_bytes, read_text
from piebald.core.private_files import write_private
from piebald.settings.toml_document import Document
from piebald.storage.lock import RunLock
from piebald.storage.schema import explained
from piebald.vertical.disclosure_ledger import LEDGER
from piebald.vertical.party import Party, TransferStep
from piebald.vertical.party_secret import PartySecret
from piebald.vertical.protocol import Role
from piebald.vertical.transfer_settings import TransferSettings

SETTINGS = "transfer.toml"
SECRET, PARTNER, PREPARATION, SCORES = "secret", "partner", "preparation.json", "scores.csv"
KEPT = 2  # the parties' newest checkpoints are at most one apart, so the last two have one in common


class PartyStore:
    """One party's folder.

    Args:
        run: the run folder.
        role: role of the party.

    Raises:
        RunFolderError: the folder cannot be written, or another process writes to it.
    """

    def __init__(self, run: Path, role: Role) -> None:
        self.folder = run / role
        with explained(f"{self.folder} cannot be written"):
            private_folder(self.folder)
            # a link in place of the lock would have another file opened for writing
            os.close(os.open(self.folder / "run.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
            for path in self.folder.iterdir():
                if not path.is_symlink():  # a link may lead to a file that is not the run's
                    path.chmod(0o600)
        self._lock = RunLock(self.folder)

    @property
    def ledger_file(self) -> Path:
        """The file of the party's ledger.

        Raises:
            RunFolderError: it is missing although the run has begun.
        """
        path = self.folder / LEDGER
        if not path.exists() and self._checkpoints():
            raise RunFolderError(f"{path} is missing, so nobody knows what this run has told: start it in a new folder")
        return path

    def keep_to(self, partner: str) -> None:
        """Note the other party's name, so that the run goes on with no other one."""
        self._replace(PARTNER, partner)

    def close(self) -> None:
        """Release the folder for other processes."""
        self._lock.release()

    def secret(self, simulated: PartySecret | None = None) -> PartySecret:
        """Return this party's secret: the one in the folder, that of a simulation, or a new one, which is stored.

        Raises:
            RunFolderError: the secret is damaged, or missing although the run has begun.
        """
        path = self.folder / SECRET
        try:
            if path.exists():
                return PartySecret(read_bytes(path))
            if simulated is not None:
                return simulated
            if self._checkpoints():
                raise RunFolderError(f"{path} is missing, so this run cannot be continued: start it in a new folder")
            secret = PartySecret.fresh()
            # before anything is drawn from it: with another secret, resumed steps would tell new sums of the same rows
            write_private(path, secret.key)
        except ValueError:
            raise RunFolderError(
                f"{path} is damaged, so this run cannot be continued: start it in a new folder"
            ) from None
        except OSError as error:
            raise RunFolderError(f"{path} cannot be used: {(error.strerror or str(error)).lower()}") from None
        return secret

    def last_steps(self) -> tuple[int, int]:
        """Return the steps from which a run can be resumed, at most two."""
        steps = self._checkpoints() or [0]
        return steps[-1], steps[-KEPT:][0]

    def save(self, party: Party) -> None:
        """Write a checkpoint, and delete all but the last two."""
        tensors = {f"network.{name}": tensor for name, tensor in party.network.state_dict().items()}
        for number, state in party.optimizer.state_dict()["state"].items():
            tensors |= {f"adam.{number}.{name}": tensor for name, tensor in state.items()}
        self._write(checkpoint_file(party.done), tensors)
        self._forget(self._checkpoints()[:-KEPT])

    def passed(self) -> None:
        """Delete all checkpoints but the last: a later step is done, so the other party has that one, too."""
        self._forget(self._checkpoints()[:-1])

    def restore(self, party: Party, step: int) -> None:
        """Reset a party to a checkpoint that both parties have, and delete all other ones and later records."""
        # step 0 has a checkpoint, too: from then on a missing secret or ledger is a damage and not a beginning
        if step == 0 and not self._checkpoints():
            self.save(party)
        tensors = read(self.folder / checkpoint_file(step))
        # later ones as well: a partner could otherwise have this party take other steps in place of them
        self._forget([number for number in self._checkpoints() if number != step])
        remaining = [line for line in self.steps() if line["step"] < step]
        self._replace("steps.jsonl", "".join(json.dumps(line) + "\n" for line in remaining).encode())
        party.done = step
        try:
            party.network.load_state_dict(weights_in(tensors))
            # the optimizer has no state before its first step
            if step == 0:
                return
            state = party.optimizer.state_dict()
            numbers = range(len(list(party.network.parameters())))
            state["state"] = {number: _below(tensors, f"adam.{number}.") for number in numbers}
            party.optimizer.load_state_dict(state)
        except (RuntimeError, KeyError, ValueError):
            path = self.folder / checkpoint_file(step)
            raise RunFolderError(f"{path} belongs to another network: start again") from None

    def record(self, step: TransferStep) -> None:
        """Append the record of a step."""
        with open(self.folder / "steps.jsonl", "a", encoding="utf-8", opener=_private) as opened:
            opened.write(json.dumps(step.table()) + "\n")

    def steps(self) -> list[dict[str, Any]]:
        """Return the records of all steps, without one that a killed process left incomplete."""
        return read_steps(self.folder)

    def write(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors of the party's results."""
        self._write(f"{name}.safetensors", tensors)

    def write_text(self, name: str, text: str) -> None:
        """Write a file of text."""
        self._replace(name, text)

    def _forget(self, steps: list[int]) -> None:
        for step in steps:
            (self.folder / checkpoint_file(step)).unlink(missing_ok=True)

    def _checkpoints(self) -> list[int]:
        matches = (re.fullmatch(r"checkpoint-(\d+)\.safetensors", path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def _write(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        self._replace(name, save({key: tensor.detach().clone() for key, tensor in tensors.items()}))

    def _replace(self, name: str, data: str | bytes) -> None:
        with explained(f"{self.folder / name} cannot be written"):
            write_private(self.folder / name, data)


def read(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file.

    Raises:
        RunFolderError: the file is missing or damaged.
    """
    try:
        return load(read_bytes(path, most=None))
    except (OSError, SafetensorError) as error:
        raise RunFolderError(f"{path} cannot be read, it may be damaged: {error}") from None


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """Read the steps that a party recorded in its folder."""
    path = folder / "steps.jsonl"
    records = []
    for line in read_bytes(path, most=None).decode().splitlines() if path.exists() else ():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def read_partner(folder: Path) -> str | None:
    """Return the other party's name, as a party noted it in its folder."""
    try:
        return (folder / PARTNER).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise RunFolderError(f"{folder / PARTNER} cannot be read: {error}") from None


def write_settings(run: Path, settings: TransferSettings) -> None:
    """Create a run folder.

    Raises:
        RunFolderError: the folder cannot be written, or holds a run with other settings.
    """
    path = run / SETTINGS
    if path.exists() and read_settings(run).lasting() != settings.lasting():
        raise RunFolderError(f"{run} holds a transfer with other settings: give another folder with --out")
    with explained(f"{run} cannot be written"):
        private_folder(run)
        write_private(path, settings.text())


def private_folder(path: Path) -> None:
    """Create a folder that only its owner can use.

    A folder that is there already is closed to others if it is empty, a run folder, or a party's folder in one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    path.mkdir(mode=0o700, exist_ok=True)
    if new or is_transfer(path) or is_transfer(path.parent) or not any(path.iterdir()):
        path.chmod(0o700)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def read_settings(run: Path) -> TransferSettings:
    """Read the settings of a run folder."""
    try:
        return TransferSettings.of(Document(read_text(run / SETTINGS), str(run / SETTINGS)))
    except (OSError, UnicodeDecodeError) as error:
        raise RunFolderError(f"{run} is not the folder of a transfer: {error}") from None


def is_transfer(run: Path) -> bool:
    """Return whether a folder is the run folder of a transfer."""
    return (run / SETTINGS).is_file()


def checkpoint_file(step: int) -> str:
    """The name of the checkpoint after so many steps."""
    return f"checkpoint-{step:08d}.safetensors"


def weights_in(checkpoint: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a party's network in a checkpoint."""
    return _below(checkpoint, "network.")


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    part = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    if not part:
        raise KeyError(prefix)
    return part
