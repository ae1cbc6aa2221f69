"""What is kept of a run and how it is shown: the run folder, tables over many runs, figures, and the page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

__all__ = ["write_report"]


def write_report(run_paths: Sequence[Path | str], out: Path | str, target: float | None = None) -> list[Path]:
    """Write a page and figures about runs.

    Args:
        run_paths: run folders, or folders that contain run folders however deep.
        out: folder for `report.html` and PNG figures; made if it does not exist.
        target: the value of the metric whose cost is tabled; where FedAvg's worst seed ends if not given.

    Returns:
        The files written, the page first.

    Raises:
        RunFolderError: a path is no folder or holds no run, or `out` cannot be written.
        SettingError: the runs are judged by different metrics.
    """
    from piebald.report.comparison import Comparison  # what draws is heavy, and most of Piebald does without it
    from piebald.report.figures import draw
    from piebald.report.page import render
    from piebald.report.schema import explained
    from piebald.report.tables import load

    histories = load(run_paths)
    try:
        comparison = Comparison(histories)
        page = render(comparison, target)
        folder = Path(out)
        with explained(f"the report cannot be written to {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "report.html").write_text(page, "utf-8")
            return [folder / "report.html", *draw(comparison, folder)]
    finally:
        for history in histories:
            history.close()
