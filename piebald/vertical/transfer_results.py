"""The result of a transfer, from the records and predictions of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from piebald.core.arguments import PathLike, checked, checked_class
from piebald.core.errors import RunFolderError
from piebald.core.private_files import write_private
from piebald.vertical.baselines import TransferScore, transfer_score
from piebald.vertical.disclosure_ledger import ToldLedger
from piebald.vertical.party import Party
from piebald.vertical.party_store import TOLD, read, read_partner, read_settings, read_steps
from piebald.vertical.protocol import ROLES, Role
from piebald.vertical.secrecy import is_simulated, secrecy
from piebald.vertical.transfer_settings import TransferSettings


@checked_class
@dataclass(frozen=True, slots=True)
class TransferResult:
    """A finished transfer.

    Attributes:
        score: score of the target's own predictions on held-out rows; None if this process ran the source only, or if
            no labels of the target's rows are known.
        first: losses at the first step, by name; `mmd2` is MMD^2.
        last: losses at the last step.
        steps: number of steps.
        seconds: mean seconds per step.
        bytes_to_target: mean bytes per step from source to target.
        bytes_to_source: mean bytes per step from target to source.
        statement: the statement about differential privacy.
        secrecy: keys in use and their security level, randomness, connection, other party and method, in sentences.
        folder: the run folder, if there is one.
    """

    score: TransferScore | None
    first: dict[str, float]
    last: dict[str, float]
    steps: int
    seconds: float
    bytes_to_target: float
    bytes_to_source: float
    statement: str
    secrecy: dict[str, str]
    folder: Path | None

    def table(self) -> dict[str, Any]:
        """Plain values, as in `result.json`."""
        return asdict(self) | {"folder": None if self.folder is None else str(self.folder)}


@checked
def result(folder: PathLike) -> TransferResult:
    """The result of a finished run, from both parties' folders."""
    folder = Path(folder)
    settings = read_settings(folder)
    if not is_finished(settings, folder, "target"):
        raise RunFolderError(f"{folder} has not finished: continue with piebald resume {folder}")
    predictions = read(folder / "target" / "after.safetensors")
    score = None
    if len(predictions["labels"]):
        score = transfer_score(predictions["scores"], predictions["labels"], float(predictions["rate"]))
    ledgers: dict[Role, ToldLedger] = {
        role: ToldLedger({}, folder / role / TOLD) for role in ROLES if (folder / role / TOLD).exists()
    }
    partner = None if "source" in ledgers else read_partner(folder / "target")
    made = make_result(settings, ledgers, read_steps(folder / "target"), score, folder, partner)
    write_result(made)
    return made


def is_finished(settings: TransferSettings, folder: Path, role: Role) -> bool:
    """Whether a party has finished all steps and written its results."""
    return (folder / role / "after.safetensors").exists() and len(read_steps(folder / role)) == settings.steps


def score_target(target: Party) -> TransferScore | None:
    """Score the target's predictions; None if it has no labels of held-out rows."""
    if not len(target.holding.test_y):
        return None
    return transfer_score(target.predict(target.holding.test), target.holding.test_y, target.rate)


def make_result(
    settings: TransferSettings,
    ledgers: Mapping[Role, ToldLedger],
    lines: list[dict[str, Any]],
    score: TransferScore | None,
    folder: Path | None,
    partner: str | None = None,
) -> TransferResult:
    """The result of a run, from one party's records of its steps.

    Args:
        settings: settings of the run.
        ledgers: what the parties that are known here have told; the records are the target's if it is among them.
        lines: records of the steps.
        score: score of the target's predictions.
        folder: the run folder.
        partner: the name in the other party's certificate, if it has one.
    """
    watched = [line["losses"] for line in lines if line["losses"]]
    count = max(len(lines), 1)
    mean = {name: sum(line[name] for line in lines) / count for name in ("seconds", "sent", "received")}
    to_target, to_source = ("received", "sent") if "target" in ledgers else ("sent", "received")
    releases = {role: told.uses("own", "gradient") + told.uses("whole") for role, told in ledgers.items()}
    return TransferResult(
        score=score,
        first=watched[0] if watched else {},
        last=watched[-1] if watched else {},
        steps=len(lines),
        seconds=mean["seconds"],
        bytes_to_target=mean[to_target],
        bytes_to_source=mean[to_source],
        statement="; ".join(dict.fromkeys(settings.method.statement(*told) for told in sorted(releases.items()))),
        secrecy=secrecy(settings, is_simulated(folder), partner),
        folder=folder,
    )


def write_result(made: TransferResult) -> None:
    """Write result.json into the run folder, if there is one."""
    if made.folder is not None:
        write_private(made.folder / "result.json", json.dumps(made.table(), indent=1) + "\n")
