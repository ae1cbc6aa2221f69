"""Reports: the tables of a run, comparisons of runs with their statistics, figures, pages, exports and callbacks.

Everything is read from run folders or told by a run as it goes on; nothing here trains a model or changes a run.  All
pages of the package are drawn by `report.page`, and all comparisons of methods are made by `report.paired`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from piebald.core.arguments import PathLike, checked
from piebald.core.errors import RunFolderError
from piebald.core.private_files import write_private

__all__ = ["write_report"]


@checked
def write_report(run_paths: Sequence[PathLike], out: PathLike, target: float | None = None) -> list[Path]:
    """Write an HTML page and figures about runs.

    Args:
        run_paths: run folders, or folders that contain run folders at any depth.
        out: a folder for `report.html` and PNG figures, created if it does not exist.
        target: the value of the metric whose cost is shown, by default the final value of FedAvg's worst seed.

    Returns:
        The files written, the page first.

    Raises:
        RunFolderError: a path is not a folder or holds no run, or `out` cannot be written.
        SettingError: the runs are judged by different metrics.

    Examples:
        >>> import piebald, tempfile
        >>> clients = piebald.partition.Iid(clients=3, test=0.2, limit=60).split(piebald.data.digits())
        >>> model = piebald.models.build_model("mlp", (1, 8, 8), 10, hidden=(4,))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = piebald.run("fedavg", clients, model, rounds=1, out=f"{folder}/runs/fedavg")
        ...     paths = write_report([f"{folder}/runs"], f"{folder}/report")
        ...     print(paths[0].name, len(paths) > 1)
        report.html True
    """
    # plotting packages are heavy, and most of Piebald does without them
    from piebald.report.chart import Chart, draw
    from piebald.report.comparison import Comparison
    from piebald.report.page.report_page import render
    from piebald.report.tables import load
    from piebald.storage.schema import explained

    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise RunFolderError(f"{folder} is a file: choose a folder for the report")
    histories = load(run_paths)
    try:
        comparison = Comparison(histories)
        charts: list[Chart] = []
        page = render(comparison, target, charts)
        with explained(f"the report cannot be written to {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            write_private(folder / "report.html", page, lasting=False)
            return [folder / "report.html", *draw(charts, folder)]
    finally:
        for history in histories:
            history.close()
