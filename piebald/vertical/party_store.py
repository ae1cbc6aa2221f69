"""A party's own run folder: a run of the package's own, of one party.

    RUN/transfer.toml          the settings
    RUN/source.csv, target.csv   a party's raw rows with the names of a match, where one command does both
    RUN/source/, RUN/target/   the folder of each party; on two machines, each has only one of them
        run.db, vectors-*          steps, losses, scores, a value of each test row for the verdict, the ledger, and the
                                   last two checkpoints, see `storage.store`
        scores.csv                 the target's scores of all rows of its file

Among the values that describe the run are the party's secret, which a simulation has not, the name in the other
party's certificate, and at the target all that it predicts with.  Only the owner can read the folder and its files,
whatever the umask.  Keys, masks and messages of the other party are never written.  The secret stays after the run: if
the other party has not finished, both take their last step again.

A checkpoint is passed when both parties have a later one, and then it is deleted: a partner that could make this party
go back again and again would learn more each time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

from piebald.contracts import Checkpoint
from piebald.core.errors import RunFolderError
from piebald.core.files import read_text
from piebald.core.private_files import write_private
from piebald.core.tensor_store import under
from piebald.settings.toml_document import Document
from piebald.storage.schema import DATABASE, explained
from piebald.storage.store import KEPT, RunStore
from piebald.version import __version__
from piebald.vertical.party import Party, TransferStep
from piebald.vertical.party_secret import PartySecret
from piebald.vertical.protocol import ROLES, Role
from piebald.vertical.transfer_settings import TransferSettings

SETTINGS, SCORES = "transfer.toml", "scores.csv"
WEIGHTS = "network."  # begins the names of a network's tensors in a checkpoint


class PartyStore(RunStore):
    """One party's folder, or the same in memory; `of` opens it."""

    @classmethod
    def of(cls, run: Path | None, role: Role) -> Self:
        """Open a party's folder for writing, or make it; None keeps the run in memory.

        Raises:
            RunFolderError: the folder cannot be written, or another process writes to it.
        """
        folder = None if run is None else run / role
        if folder is None or not (folder / DATABASE).exists():
            return cls.create(folder, {"piebald": __version__, "label": role})
        with explained(f"{folder} cannot be written"):
            private_folder(folder)
            for path in folder.iterdir():
                if not path.is_symlink():  # a link may lead to a file that is not the run's
                    path.chmod(0o600)
        return cls.open(folder)

    def secret(self) -> PartySecret:
        """Return this party's secret, from the operating system where it has none yet.

        Raises:
            RunFolderError: it is damaged.
        """
        if (text := self.meta.get("secret")) is None:
            # before anything is drawn from it: with another secret, resumed steps would tell new sums of the same rows
            self.set_meta(secret=(text := PartySecret.fresh().key.hex()))
        try:
            return PartySecret(bytes.fromhex(text))
        except (ValueError, TypeError):
            raise RunFolderError(f"the secret in {self.path} is damaged: start the run in a new folder") from None

    def last_steps(self) -> tuple[int, int]:
        """Return the steps from which a run can be resumed, at most two."""
        steps = [row["version"] for row in self.query("SELECT version FROM checkpoint ORDER BY version")] or [0]
        # the parties' newest checkpoints are at most one apart, so the last two have one in common
        return steps[-1], steps[-KEPT:][0]

    def record(self, party: Party, step: TransferStep) -> None:
        """Record a step, with a checkpoint where one is due; else delete those that are passed."""
        settings = party.settings
        # the last step has a checkpoint, from which a lost handover is repeated
        due = party.done % settings.checkpoint_every == 0 or party.done == settings.steps
        before = self.query("SELECT coalesce(max(time), 0.0) AS time FROM step")[0]["time"]
        row = {"version": party.done, "time": before + step.seconds, "bytes_up": step.sent, "bytes_down": step.received}
        losses = [{"axis": "loss", "name": name, "value": value} for name, value in (step.losses or {}).items()]
        self.commit(row, [], _checkpoint(party) if due else None, losses)
        if not due and len({*self.last_steps()}) > 1:  # a later step is done, so the other party has that one, too
            self.go_back(party.done)

    def restore(self, party: Party, step: int) -> None:
        """Reset a party to a checkpoint that both parties have, and delete all other ones and later records."""
        self.set_meta(status="running")
        if not self.lasts:
            return
        if not self.query("SELECT version FROM checkpoint"):
            self.commit({"version": 0, "time": 0.0}, [], _checkpoint(party))
        tensors = self.server_checkpoint(step).tensors
        # later ones as well: a partner could otherwise have this party take other steps in place of them
        self.go_back(step)
        party.done = step
        try:
            party.network.load_state_dict(under(tensors, WEIGHTS))
            moments = [under(tensors, f"adam.{number}.") for number, _ in enumerate(party.network.parameters())]
            # no optimizer has a state before its first step, and plain gradient descent none at all
            if step and party.settings.optimizer == "adam" and not all(moments):
                raise KeyError("adam")
            of_optimizer = {number: of_layer for number, of_layer in enumerate(moments) if of_layer}
            party.optimizer.load_state_dict(party.optimizer.state_dict() | {"state": of_optimizer})
        except (RuntimeError, KeyError, ValueError):
            raise RunFolderError(f"{self.path} holds a checkpoint of another network: start again") from None

    def steps(self) -> list[dict[str, Any]]:
        """Return the records of all steps, see `TransferStep`."""
        losses = defaultdict[int, dict[str, float]](dict)
        for note in self.rows("note"):
            if note["axis"] == "loss":
                losses[note["version"]][note["name"]] = note["value"]
        records, before = [], 0.0
        for row in self.rows("step"):
            step = TransferStep(
                row["version"] - 1, row["time"] - before, row["bytes_up"], row["bytes_down"], losses.get(row["version"])
            )
            before = row["time"]
            if row["version"]:
                records.append(step.table())
        return records


@contextmanager
def opened(run: Path) -> Iterator[dict[Role, PartyStore]]:
    """The folders of the parties that are here, opened for reading."""
    with ExitStack() as closing:
        here = [role for role in ROLES if (run / role / DATABASE).exists()]
        yield {role: closing.enter_context(PartyStore.open_read_only(run / role)) for role in here}


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """Read the steps that a party recorded in its folder."""
    with PartyStore.open_read_only(folder) as store:
        return store.steps()


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
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if is_transfer(path) or is_transfer(path.parent) or not any(path.iterdir()):
        path.chmod(0o700)


def read_settings(run: Path) -> TransferSettings:
    """Read the settings of a run folder."""
    try:
        return TransferSettings.of(Document(read_text(run / SETTINGS), str(run / SETTINGS)))
    except (OSError, UnicodeDecodeError) as error:
        raise RunFolderError(f"{run} is not the folder of a transfer: {error}") from None


def is_transfer(run: Path) -> bool:
    """Return whether a folder is the run folder of a transfer."""
    return (run / SETTINGS).is_file()


def _checkpoint(party: Party) -> Checkpoint:
    tensors = {f"{WEIGHTS}{name}": tensor for name, tensor in party.network.state_dict().items()}
    for number, state in party.optimizer.state_dict()["state"].items():
        tensors |= {f"adam.{number}.{name}": tensor for name, tensor in state.items()}
    return Checkpoint(tensors, {})
