"""Logs of a federation's processes: text for people, JSON lines for programs, and never a row or a key in them."""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from piebald.core.errors import PiebaldError, SettingError
from piebald.core.files import os_reason
from piebald.core.plain_text import printable
from piebald.core.private_files import make_private
from piebald.report.callbacks import Callback, RunStart

if TYPE_CHECKING:
    from piebald.report.tables import History

Level = Literal["debug", "info", "warning", "error"]

_BYTES = 10 << 20  # of a log file before it is rotated
_KEPT = 5  # rotated log files
_LOGGER = "piebald"

log = logging.getLogger(f"{_LOGGER}.federation")


class OneLine(logging.Formatter):
    """Formats records as text: one line each without control characters, since messages may contain others' text.

    Of an error that something else raised, it names the type and the places, and not the message, which may quote a row
    (`could not convert string to float: 'Miller'`); the messages of Piebald's own errors are in the record's sentence.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return printable(without_message(ei[1]))


class JsonLines(OneLine):
    """Formats records as JSON: time (UTC), level, event, message, and the numbers and names of the message."""

    def format(self, record: logging.LogRecord) -> str:
        fields = dict(record.args) if isinstance(record.args, Mapping) else {}
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": fields.pop("event", "message"),
            "message": printable(record.getMessage()),
        }
        # a field of a message cannot take the place of the time or the level
        line |= {name: _plain(value) for name, value in fields.items() if name not in line}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class _StandardError(logging.StreamHandler[Any]):
    """Writes to what standard error is at the time, so that a progress bar makes room for a line."""

    def __init__(self) -> None:
        # not that of StreamHandler, which assigns `stream`, a property here
        logging.Handler.__init__(self)

    @property
    def stream(self) -> IO[str]:
        return sys.stderr


class _PrivateFile(RotatingFileHandler):
    """A log file that only its owner can read."""

    def _open(self) -> Any:
        make_private(Path(self.baseFilename))
        return super()._open()


def start_log(level: Level = "info", as_json: bool = False, file: Path | None = None) -> None:
    """Write the package's log to standard error, or to a file.

    Args:
        level: what is written at least.
        as_json: one JSON object a line.
        file: the file, rotated at 10 MB to FILE.1, ..., FILE.5.

    Raises:
        SettingError: the file cannot be written.
    """
    logger = logging.getLogger(_LOGGER)
    # only those of an earlier call: a program around this may have handlers of its own
    for old in [
        handler_of_log
        for handler_of_log in logger.handlers
        if isinstance(handler_of_log, _StandardError | _PrivateFile)
    ]:
        logger.removeHandler(old)
        old.close()
    handler: logging.Handler
    if file is None:
        handler = _StandardError()
    else:
        try:
            handler = _PrivateFile(file, maxBytes=_BYTES, backupCount=_KEPT)
        except OSError as error:
            raise SettingError(
                f"the log {str(file)!r} cannot be written ({os_reason(error)}): name another file"
            ) from None
    handler.setFormatter(JsonLines() if as_json else OneLine("%(asctime)s %(message)s"))
    logger.addHandler(handler)
    # other parts of the package tell at INFO what `piebald run --verbose` shows
    logger.setLevel("WARNING" if level == "info" else level.upper())
    log.setLevel(level.upper())


def also_log(file: Path) -> None:
    """Write the federation's log to a further file, as text, beside where it goes already."""
    handler = _PrivateFile(file, maxBytes=_BYTES, backupCount=1)
    handler.setFormatter(OneLine("%(asctime)s %(message)s"))
    log.addHandler(handler)


class StepLog(Callback):
    """Logs each server step and each evaluation."""

    def __init__(self) -> None:
        self._rounds: int | None = None

    def on_start(self, run: RunStart) -> None:
        """See `Callback`."""
        self._rounds = run.meta.get("rounds")
        if run.version:
            log.info("the run goes on after step %(step)s", {"event": "resumed", "step": self._place(run.version)})

    def on_server_step(self, step: Mapping[str, Any]) -> None:
        """See `Callback`."""
        loss = step.get("loss")
        fields = {"event": "step", "step": step["version"], "rounds": self._rounds, "loss": loss}
        fields |= {"arrived": step["arrived"], "failed": step["failed"], "place": self._place(step["version"])}
        shown = "step %(place)s" if loss is None else "step %(place)s: loss %(loss).4g"
        log.info(f"{shown}, %(arrived)d updates, %(failed)d without", fields)

    def on_evaluation(self, version: int, scores: Sequence[Mapping[str, Any]]) -> None:
        """See `Callback`."""
        metric = next((row["metric"] for row in scores if row["metric"] != "loss"), None)
        for model in ("global", "personal"):
            values = [
                row["value"]
                for row in scores
                if (row["model"], row["metric"]) == (model, metric)
                and row["client"] is not None
                and row["value"] is not None
            ]
            if values:
                fields = {"event": "evaluation", "step": version, "place": self._place(version), "metric": metric}
                fields |= {"value": sum(values) / len(values), "clients": len(values), "model": model}
                log.info(
                    "step %(place)s: %(metric)s %(value).4g of the %(model)s model, mean of %(clients)d clients", fields
                )

    def on_end(self, history: History, status: str) -> None:
        """See `Callback`."""
        log.info("the run has ended: %(status)s", {"event": "ended", "status": status})

    def _place(self, version: int) -> str:
        return f"{version}" if self._rounds is None else f"{version}/{self._rounds}"


def without_message(error: BaseException | None) -> str:
    """Return the type of an error and where it was raised, without its message, which may quote a row.

    The message of Piebald's own errors is kept.
    """
    if error is None:
        return ""
    frames = traceback.extract_tb(error.__traceback__)[-6:]
    places = "; ".join(f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}" for frame in frames)
    message = f": {error}" if isinstance(error, PiebaldError) else ""
    return f"{type(error).__name__}{message}{f' at {places}' if places else ''}"


def _plain(value: object) -> object:
    return value if value is None or isinstance(value, bool | int | float) else printable(value)
