"""The result of a transfer, its statements about secrecy, and its page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from piebald.core.arguments import PathLike, checked, checked_class
from piebald.core.errors import RunFolderError, SettingError
from piebald.core.private_files import write_private
from piebald.core.result_table import ResultTable, Tabular
from piebald.report.page import markup
from piebald.report.page.markup import document
from piebald.report.paired import Scores
from piebald.storage.schema import explained
from piebald.vertical.baselines import JOINED, METRIC, TRANSFER, says_of, tables_of
from piebald.vertical.disclosure_ledger import DisclosureLedger
from piebald.vertical.party import Party
from piebald.vertical.party_store import PartyStore, opened, read_settings, read_steps
from piebald.vertical.protocol import Role
from piebald.vertical.transfer_settings import TransferSettings


@checked_class
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
class TransferResult(Tabular):
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
        baselines: AUC on the same rows of what needs no partner or no alignment, by name, see `baselines`.
        verdict: whether the transfer pays beside them, in a sentence; "" without labels of held-out rows.
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
    baselines: dict[str, float]
    verdict: str
    statement: str
    secrecy: dict[str, str]
    folder: Path | None

    def table(self) -> ResultTable:
        """Return the score, the losses, the costs and what is said about secrecy."""
        facts: dict[str, str] = {}
        if self.score is not None:
            facts |= {"AUC": f"{self.score.auc:.4f}", "F1": f"{self.score.f1:.4f}"}
            facts["precision"] = f"{self.score.precision:.4f}"
            facts |= {f"AUC of {name}": f"{value:.4f}" for name, value in self.baselines.items()}
            facts["does it pay"] = self.verdict
        for name, value in self.last.items():
            facts[f"{name}, first to last"] = f"{self.first[name]:.4g} to {value:.4g}"
        facts |= {
            "steps": str(self.steps),
            "seconds per step": f"{self.seconds:.3f}",
            "kB per step to the target": f"{self.bytes_to_target / 1000:,.1f}",
            "kB per step to the source": f"{self.bytes_to_source / 1000:,.1f}",
            "privacy": self.statement,
            **self.secrecy,
        }
        return ResultTable.of_facts(facts if self.folder is None else facts | {"run": str(self.folder)})

    def plain(self) -> dict[str, Any]:
        """Return plain values, as in `result.json`."""
        return asdict(self) | {"folder": None if self.folder is None else str(self.folder)}


@checked_class
@dataclass(frozen=True, slots=True)
class TransferComparison(Tabular):
    """A simulated transfer with several seeds, each with other held-out rows and other co-occurring ones.

    Attributes:
        results: of the runs, in the order of their seeds.
        scores: AUC of the transfer, and of what it must beat, under each seed, by name.
        verdict: whether the transfer pays beside them, in a sentence; "" without labels of held-out rows.
        folder: the folder of the runs, if there is one.
    """

    results: Sequence[TransferResult]
    scores: dict[str, Scores]
    verdict: str
    folder: Path | None

    def table(self) -> ResultTable:
        """Return the mean AUC of each model over seeds, and its mean difference to the transfer's."""
        ours = self.scores[TRANSFER].values if TRANSFER in self.scores else np.zeros((1, 1))
        rows = [
            {"model": name, METRIC: float(table.values.mean()), "least": float(table.values.min()),
             "largest": float(table.values.max()), "minus the transfer": float((table.values - ours).mean())}
            for name, table in sorted(self.scores.items(), key=lambda item: -item[1].values.mean())
        ]  # fmt: skip
        notes = [f"{JOINED} is what no transfer is expected to reach"] if JOINED in self.scores else []
        return ResultTable(rows, title=f"AUC over {len(self.results)} seeds", notes=[*notes, self.verdict])

    def plain(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        values = {name: table.values[:, 0].tolist() for name, table in self.scores.items()}
        seeds = [list(table.seeds) for table in self.scores.values()][:1]
        return {"auc": values, "seeds": seeds[0] if seeds else [], "verdict": self.verdict,
                "folder": None if self.folder is None else str(self.folder)}  # fmt: skip


@checked
def result(folder: PathLike) -> TransferResult:
    """Return the result of a finished run, from both parties' folders."""
    folder = Path(folder)
    settings = read_settings(folder)
    with opened(folder) as stores:
        if "target" not in stores or stores["target"].meta.get("status") != "finished":
            raise RunFolderError(f"{folder} has not finished: continue with piebald resume {folder}")
        return result_of(settings, stores, folder)


def score_rows(target: Party) -> list[dict[str, Any]]:
    """Return the score of the target's predictions as rows of the table `score`; none without labels of held-out rows.

    Args:
        target: the target, after training.
    """
    if not len(labels := target.data.test_y):
        return []
    score = asdict(transfer_score(target.test_scores(), labels, target.rate))
    row = {"version": target.done, "model": "target", "split": "test", "examples": len(labels)}
    return [{**row, "metric": name, "value": value} for name, value in score.items()]


def result_of(settings: TransferSettings, stores: Mapping[Role, PartyStore], folder: Path | None) -> TransferResult:
    """Return the result of a run, and write it to result.json in its folder.

    Args:
        settings: settings of the run.
        stores: the parties that ran here; the records of steps are the target's if it is among them.
        folder: the run folder, if there is one.
    """
    with _as_recorded(folder):
        role: Role = "target" if "target" in stores else "source"
        lines, told = stores[role].steps(), stores[role].meta
        watched = _watched(lines)
        count = max(len(lines), 1)
        mean = {name: sum(line[name] for line in lines) / count for name in ("seconds", "sent", "received")}
        to_target, to_source = ("received", "sent") if role == "target" else ("sent", "received")
        releases = {one: DisclosureLedger({}, store).releases for one, store in stores.items()}
        statements = [settings.method.statement(one, count) for one, count in sorted(releases.items())]
        scored = {row["metric"]: row["value"] for row in stores[role].rows("score")}
        judged = stores[role].rows("row_score")
        finished = TransferResult(
            score=TransferScore(**scored) if scored else None,
            first=watched[0]["losses"] if watched else {},
            last=watched[-1]["losses"] if watched else {},
            steps=len(lines),
            seconds=mean["seconds"],
            bytes_to_target=mean[to_target],
            bytes_to_source=mean[to_source],
            baselines={row["model"]: row["value"] for row in judged if row["model"] != TRANSFER},
            verdict=says_of(tables_of({settings.seed: judged})),
            statement="; ".join(dict.fromkeys(statements)),
            secrecy=secrecy(settings, "secret" not in told, told.get("partner") if len(stores) == 1 else None),
            folder=folder,
        )
    if folder is not None:
        write_private(folder / "result.json", json.dumps(finished.plain(), indent=1) + "\n")
    return finished


@contextmanager
def _as_recorded(folder: Path | None) -> Iterator[None]:
    """Refuse records that no transfer makes: a run folder may come from anybody."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, SettingError):
        if folder is None:  # what lay in memory alone is no stranger's
            raise
        raise RunFolderError(f"{folder} holds records that no transfer makes: restore it from a copy") from None


def _watched(steps: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the records of steps with losses, which have the same names in all of them."""
    watched = [step for step in steps if step["losses"]]
    if any(step["losses"].keys() != watched[0]["losses"].keys() for step in watched):
        raise KeyError("losses")
    return watched


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


def is_simulated(folder: Path) -> bool:
    """Return whether a run folder was made by one user for both parties."""
    with opened(folder) as stores:
        return not any("secret" in store.meta for store in stores.values())


NAMES = {
    "loss": "Loss on co-occurring rows (Taylor logistic)",
    "mmd2": "MMD\N{SUPERSCRIPT TWO} of a batch",
    "alignment": "Alignment, \N{MINUS SIGN}mean product",
}


def write_page(run: Path, out: Path | None = None) -> list[Path]:
    """Write report.html of a finished transfer, where its target ran; return the file.

    Args:
        run: the run folder.
        out: folder to write to, by default the run folder.
    """
    page, folder = _page(run, result(run)), out or run
    with explained(f"the page cannot be written to {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        write_private(folder / "report.html", page)
    return [folder / "report.html"]


def _page(run: Path, transfer: TransferResult) -> str:
    settings, score = read_settings(run), transfer.score
    who = "Both parties predict together" if settings.method.joint else "The target predicts alone"
    title = f"{who}, no label of its rows is known"
    if score is not None:
        title = f"{who} with an AUC of {score.auc:.3f}"
    losses = "Losses" if transfer.last else "No losses were computed, since rows are hidden by noise"
    facts = [[row["name"], row["value"]] for row in transfer.table()]
    sections = [
        ("result", "Result", markup.section("result", "Result", "", markup.table("Result", ["", ""], facts))),
        ("losses", "Losses", markup.section("losses", losses, "", *_losses(run))),
        ("settings", "Settings", markup.section("settings", "Settings", "", markup.verbatim(settings.text()))),
    ]
    return document("transfer", title, markup.top(title), sections, "Generated by Piebald from one transfer.")


def _losses(run: Path) -> list[str]:
    watched = _watched(read_steps(run / "target"))
    curves = {
        name: [(float(line["step"] + 1), float(line["losses"][name])) for line in watched]
        for name in (watched[0]["losses"] if watched else ())
    }
    ends = {name: {x: f"{x:.0f}" for x in (curve[0][0], curve[-1][0])} for name, curve in curves.items()}
    return [
        markup.line_chart(NAMES.get(name, name), "By step", {name: curve}, ends[name], "{:.4g}".format)
        for name, curve in curves.items()
    ]
