"""The tracker TensorBoard: event files in a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from piebald.core.result_table import ResultTable
from piebald.report.callbacks.callback import RunStart
from piebald.report.callbacks.tracker import Tracker, Writer

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter


class Tensorboard(Tracker):
    """Writes event files: `tensorboard --logdir runs` shows all runs below a folder.

    Attributes:
        folder: where to; by default a folder "tensorboard" inside the run folder, or beside it for a run in memory.
    """

    package: ClassVar[str] = "tensorboard"

    folder: str | None = None

    def open(self, run: RunStart) -> Writer:
        """Write event files; those of steps that a resumed run repeats no longer count."""
        from torch.utils.tensorboard.writer import SummaryWriter

        name = f"{run.meta.get('label')}-seed-{run.meta.get('seed')}"
        inside = run.folder / "tensorboard" if run.folder is not None else Path("tensorboard") / name
        folder = inside if self.folder is None else Path(self.folder) / name
        return _Events(SummaryWriter(str(folder), purge_step=run.version + 1 if run.version else None))


class _Events:
    def __init__(self, writer: SummaryWriter) -> None:
        self._writer, self._version = writer, 0

    def describe(self, parameters: Mapping[str, str | int | float | bool]) -> None:
        settings = ResultTable(parameters.items(), ("setting", "value"))
        self._writer.add_text("settings", settings.markdown())

    def scalars(self, values: Mapping[str, float], version: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, version)
        self._version = version
        # so that a board that is open shows each step, and a kill loses none
        self._writer.flush()

    def artifacts(self, folder: Path) -> None:
        import matplotlib.image

        for picture in sorted(folder.glob("*.png")):
            pixels = matplotlib.image.imread(picture)
            self._writer.add_image(f"report/{picture.stem}", pixels, self._version, dataformats="HWC")

    def close(self, status: str) -> None:
        self._writer.close()
