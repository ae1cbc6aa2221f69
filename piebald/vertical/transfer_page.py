"""The page of a transfer: losses, scores, discrepancy before and after, and a picture of both parties' aligned layers.

It is made from both parties' folders, so only where both are: in a simulation or a demonstration on one machine.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from piebald.report import markup
from piebald.report.charts import LIGHT
from piebald.report.figures import LOOK
from piebald.report.markup import Cell
from piebald.report.page import frame
from piebald.report.schema import explained
from piebald.report.wording import duration
from piebald.vertical.kernels import PolynomialKernel, mmd2
from piebald.vertical.party_store import read, read_settings, read_steps
from piebald.vertical.protocol import ROLES
from piebald.vertical.transfer_methods import Smmd
from piebald.vertical.transfer_runs import TransferResult, result
from piebald.vertical.transfer_settings import TransferSettings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKS = {"source": "o", "target": "^"}
NAMES = {
    "loss": "Loss on co-occurring rows (Taylor logistic)",
    "mmd2": "MMD\N{SUPERSCRIPT TWO} of a batch",
    "alignment": "Alignment, \N{MINUS SIGN}mean product",
}


def write_page(run: Path, out: Path | None = None) -> list[Path]:
    """Write report.html and the figures of a finished transfer.

    Args:
        run: the run folder, with both parties' folders in it.
        out: where to write, by default there.

    Returns:
        The files, the page first.
    """
    made, folder = result(run), out or run
    figures = {
        "losses": _figure(lambda axes: _losses(axes, run), made),
        "layers": _figure(lambda a: _layers(a, run), made),
    }
    with explained(f"the page cannot be written to {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        page = folder / "report.html"
        page.write_text(_page(run, made, figures), "utf-8")
        files = [page]
        for name, data in figures.items():
            (folder / f"{name}.png").write_bytes(data)
            files.append(folder / f"{name}.png")
    return files


def _page(run: Path, made: TransferResult, figures: dict[str, bytes]) -> str:
    settings = read_settings(run)
    score = made.score
    tiles: list[tuple[str, Cell]] = (
        []
        if score is None
        else [
            ("AUC of the target alone", markup.small(f"{score.auc:.3f}", "on rows nobody trained on")),
            ("F1", markup.small(f"{score.f1:.3f}", f"precision {score.precision:.3f}")),
        ]
    )
    tiles += [
        ("A step", markup.small(duration(made.seconds), f"{made.steps} steps, backend {settings.backend.kind}")),
        ("Bytes a step", markup.small(
            f"{made.bytes_to_target / 1e6:.3g} MB", f"to the target, {made.bytes_to_source / 1e6:.3g} MB back")),
    ]  # fmt: skip
    known = "no label of its rows is known" if score is None else f"with an AUC of {score.auc:.3f}"
    title = f"The target predicts alone{',' if score is None else ''} {known}"
    lead = f'<p class="lead">{markup.text(_lead(run, made))}</p>'
    top = f"<h1>{markup.text(title)}</h1>{lead}{markup.facts('tiles', tiles)}"
    losses: list[list[Cell]] = [
        [NAMES.get(name, name), f"{made.first[name]:.4g}", f"{value:.4g}"] for name, value in made.last.items()
    ]
    table = markup.table("Values that were opened while training", ["Term", "First step", "Last step"], losses)
    curves, privacy = _image(figures["losses"], "Losses over steps"), _privacy(settings, made.statement)
    sections = [
        ("losses", "Losses", markup.section("losses", _found(made), "", curves, table)),
        ("layers", "Layers", markup.section(
            "layers", "Both parties' aligned layers, before and after",
            "Rows of each party, shown by the two main directions of all of them together (PCA). "
            "Both parties' rows are in one picture only because both folders are on this machine.",
            _image(figures["layers"], "Aligned layers before and after training"))),
        ("privacy", "RowPrivacy", markup.section("privacy", "What may be claimed", "", privacy)),
        ("settings", "TransferSettings", markup.section(
            "settings", "TransferSettings", "", f"<pre>{markup.text(settings.text())}</pre>")),
    ]  # fmt: skip
    return frame(title, top, sections, "Made by Piebald from one transfer.", [])


def _lead(run: Path, made: TransferResult) -> str:
    before, after = _discrepancy(run, "before"), _discrepancy(run, "after")
    if before is None or after is None:
        return ""
    return (
        f"MMD\N{SUPERSCRIPT TWO} of 500 rows of each party went from {before:.3g} before training to {after:.3g} after."
    )


def _found(made: TransferResult) -> str:
    if "mmd2" not in made.last:
        return "Losses"
    first, last = made.first["mmd2"], made.last["mmd2"]
    return f"MMD\N{SUPERSCRIPT TWO} went from {first:.3g} at the first step to {last:.3g} at the last"


def _privacy(settings: TransferSettings, statement: str) -> str:
    said = [
        "No raw feature was sent, and the owner of a key saw only uniform numbers."
        if settings.backend.hides
        else "This backend encrypts nothing: it is for experiments."
    ]
    if isinstance(settings.method, Smmd):
        said.append("Gradients tell each party the moments of the other's batches.")
        if isinstance(settings.method.kernel, PolynomialKernel) and settings.method.kernel.degree == 3:
            said.append("With degree 3 these are third moments, from which single hidden rows may be recovered.")
    else:
        said.append("FTL's gradients are the other party's hidden rows of co-occurring samples.")
    said.append("The target can infer the labels of the co-occurring rows. See docs/explanation/transfer.md.")
    said.append(f"Of the moments: {statement}.")
    return "".join(f"<p>{markup.text(line)}</p>" for line in said)


def _discrepancy(run: Path, when: str) -> float | None:
    """MMD^2 of the rows that both parties kept, with the exact kernel."""
    method = read_settings(run).method
    if not isinstance(method, Smmd):
        return None
    source, target = (read(run / role / f"{when}.safetensors")["rows"] for role in ROLES)
    return float(mmd2(method.kernel, source, target))


def _image(data: bytes, about: str) -> str:
    source = base64.b64encode(data).decode()
    look = 'style="max-width: 100%"'
    return f'<figure class="wide"><img alt="{markup.text(about)}" {look} src="data:image/png;base64,{source}"></figure>'


def _figure(plan: Callable[[Any], None], made: TransferResult) -> bytes:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(LOOK):  # type: ignore[arg-type]
        figure = Figure(figsize=(9.6, 4.2), layout="constrained")
        plan(figure.subplots(1, 2))
        data = BytesIO()
        figure.savefig(data, dpi=140, format="png")
    return data.getvalue()


def _losses(axes: Any, run: Path) -> None:
    watched = [line for line in read_steps(run / "target") if line["losses"]]
    steps = [line["step"] + 1 for line in watched]
    for place, name in enumerate(watched[0]["losses"]):
        ax: Axes = axes[place]
        values = [line["losses"][name] for line in watched]
        ax.plot(steps, values, color=LIGHT[place + 1], linewidth=1.8, marker="o", markersize=3)
        ax.set_title(NAMES.get(name, name), loc="left", fontsize=11)
        ax.set_xlabel("ServerOptimizer")
        if name == "mmd2" and min(values) > 0:
            ax.set_yscale("log")


def _layers(axes: Any, run: Path) -> None:
    for ax, when in zip(axes, ("before", "after"), strict=True):
        rows = [read(run / role / f"{when}.safetensors")["rows"].numpy() for role in ROLES]
        middle = np.concatenate(rows).mean(0)
        turn = np.linalg.svd(np.concatenate(rows) - middle, full_matrices=False)[2][:2].T
        for place, (role, own) in enumerate(zip(ROLES, rows, strict=True)):
            flat = (own - middle) @ turn
            ax.scatter(*flat.T, s=12, alpha=0.55, marker=MARKS[role], color=LIGHT[place + 1], linewidths=0, label=role)
        ax.set_title(f"{when.capitalize()} training", loc="left", fontsize=11)
        ax.set_xlabel("First direction")
        ax.set_ylabel("Second direction")
    axes[0].legend(markerscale=1.8)
