"""Options of the commands that run a federation: its log, and its status page."""

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
    Path | None,
    typer.Option("--log-file", help="Write the log to this file, rotated at 10 MB; five rotated files are kept."),
]
StatusPort = Annotated[
    int | None, typer.Option("--status-port", min=1, max=65535, help="Serve a read-only status page on this port.")
]
StatusHost = Annotated[
    str,
    typer.Option("--status-host", help="The page's address; other than loopback it is HTTPS and needs a token."),
]
