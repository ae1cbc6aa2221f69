"""Options of the commands that write a log."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"],
    typer.Option("--log-level", help="What the log holds at least: debug, info, warning or error."),
]
LogJson = Annotated[bool, typer.Option("--log-json", help="Write the log as JSON, one object a line.")]
LogFile = Annotated[
    Path | None, typer.Option("--log-file", help="Write the log to this file, put aside at 10 MB, up to five times.")
]
