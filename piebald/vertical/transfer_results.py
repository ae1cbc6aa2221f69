"""The result of a transfer, from the records and predictions of a run, and its statements about secrecy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from piebald.core.arguments import PathLike, checked, checked_class
from piebald.core.errors import RunFolderError
from piebald.core.private_files import write_private
from piebald.vertical.disclosure_ledger import LEDGER, DisclosureLedger
from piebald.vertical.party import Party
from piebald.vertical.party_store import SECRET, read, read_partner, read_settings, read_steps
from piebald.vertical.protocol import ROLES, Role
from piebald.vertical.transfer_settings import TransferSettings


@dataclass(frozen=True, slots=True)
class TransferScore:
    """Quality of predictions on held-out rows.

    Attributes:
        auc: area under the ROC curve.
        f1: F1 score of the positive class; as many rows are predicted positive as the source has positives, in
            proportion.
        precision: precision of the positive class, with the same predictions.
    """

    auc: float
    f1: float
    precision: float


def transfer_score(scores: Tensor, labels: Tensor, rate: float) -> TransferScore:
    """Compare scores [n] with labels -1 or 1 [n]; the highest share `rate` of them is predicted positive."""
    from sklearn.metrics import f1_score, precision_score, roc_auc_score

    predicted = np.zeros(len(scores), dtype=bool)
    # a stable order, so that equal scores are cut in the same way in each run
    predicted[np.argsort(-scores.numpy(), kind="stable")[: round(rate * len(scores))]] = True
    true = (labels > 0).numpy()
    return TransferScore(
        auc=float(roc_auc_score(true, scores.numpy())),
        f1=float(f1_score(true, predicted, zero_division=0)),
        precision=float(precision_score(true, predicted, zero_division=0)),
    )


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
        """Return plain values, as in `result.json`."""
        return asdict(self) | {"folder": None if self.folder is None else str(self.folder)}


@checked
def result(folder: PathLike) -> TransferResult:
    """Return the result of a finished run, from both parties' folders."""
    folder = Path(folder)
    settings = read_settings(folder)
    if not is_finished(settings, folder, "target"):
        raise RunFolderError(f"{folder} has not finished: continue with piebald resume {folder}")
    predictions = read(folder / "target" / "after.safetensors")
    score = None
    if len(predictions["labels"]):
        score = transfer_score(predictions["scores"], predictions["labels"], float(predictions["rate"]))
    ledgers: dict[Role, DisclosureLedger] = {
        role: DisclosureLedger({}, folder / role / LEDGER) for role in ROLES if (folder / role / LEDGER).exists()
    }
    partner = None if "source" in ledgers else read_partner(folder / "target")
    finished = make_result(settings, ledgers, read_steps(folder / "target"), score, folder, partner)
    write_result(finished)
    return finished


def is_finished(settings: TransferSettings, folder: Path, role: Role) -> bool:
    """Return whether a party has finished all steps and written its results."""
    return (folder / role / "after.safetensors").exists() and len(read_steps(folder / role)) == settings.steps


def score_target(target: Party) -> TransferScore | None:
    """Score the target's predictions; None if it has no labels of held-out rows."""
    if not len(target.data.test_y):
        return None
    return transfer_score(target.predict(target.data.test), target.data.test_y, target.rate)


def make_result(
    settings: TransferSettings, ledgers: Mapping[Role, DisclosureLedger], lines: list[dict[str, Any]],
    score: TransferScore | None, folder: Path | None, partner: str | None = None,
) -> TransferResult:  # fmt: skip
    """Return the result of a run, from one party's records of its steps.

    Args:
        settings: settings of the run.
        ledgers: the ledgers of the parties that ran here; the records are the target's if it is among them.
        lines: records of the steps.
        score: score of the target's predictions.
        folder: the run folder.
        partner: the name in the other party's certificate, if it has one.
    """
    watched = [line["losses"] for line in lines if line["losses"]]
    count = max(len(lines), 1)
    mean = {name: sum(line[name] for line in lines) / count for name in ("seconds", "sent", "received")}
    to_target, to_source = ("received", "sent") if "target" in ledgers else ("sent", "received")
    releases = {role: ledger.uses("own", "gradient") + ledger.uses("whole") for role, ledger in ledgers.items()}
    statements = [settings.method.statement(role, count) for role, count in sorted(releases.items())]
    return TransferResult(
        score=score,
        first=watched[0] if watched else {},
        last=watched[-1] if watched else {},
        steps=len(lines),
        seconds=mean["seconds"],
        bytes_to_target=mean[to_target],
        bytes_to_source=mean[to_source],
        statement="; ".join(dict.fromkeys(statements)),
        secrecy=secrecy(settings, is_simulated(folder), partner),
        folder=folder,
    )


def write_result(finished: TransferResult) -> None:
    """Write result.json into the run folder, if there is one."""
    if finished.folder is not None:
        write_private(finished.folder / "result.json", json.dumps(finished.table(), indent=1) + "\n")


def secrecy(settings: TransferSettings, simulated: bool, partner: str | None = None) -> dict[str, str]:
    """Return the statements of a run about its own secrecy, by subject: keys, randomness, connection, method.

    Args:
        settings: settings of the run.
        simulated: whether one user runs both parties, with secrets that follow from the seed.
        partner: the name in the other party's certificate, once it is known.
    """
    named = {} if partner is None else {"other party": f"{partner}, by its certificate"}
    return {
        "keys": settings.backend.security,
        "weights, batches, noise": (
            "from the seed, as both parties are simulated by one user: this run protects nobody"
            if simulated
            else "from each party's own secret"
        ),
        "connection": settings.runtime.connection,
        **named,
        "method": settings.method.disclosure,
    }


def is_simulated(folder: Path | None) -> bool:
    """Return whether a run folder was made by one user for both parties."""
    if folder is None:
        return True
    alone = sum((folder / role).is_dir() for role in ROLES) == 1  # before it has a secret
    return not alone and not any((folder / role / SECRET).exists() for role in ROLES)
