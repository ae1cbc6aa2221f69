"""What the commands that run a federation's server share: its log, its lock, and its status page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from piebald.cli.app import end_on_term
from piebald.errors import SettingError

if TYPE_CHECKING:
    from piebald.callbacks import Callback


@contextmanager
def locked(credentials: Path) -> Iterator[None]:
    """Lock credentials for this process, and end it on SIGTERM as on Ctrl-C."""
    from piebald.report.lock import RunLock

    lock = RunLock(credentials)
    try:
        end_on_term()
        yield
    finally:
        lock.release()


@contextmanager
def serving(credentials: Path, run: Path) -> Iterator[list[Callback]]:
    """Run a federation's server: one at a time for its credentials, which name the run folder from then on.

    Args:
        credentials: the server's.
        run: the run folder.

    Yields:
        The listeners of the run that write its steps into the log.
    """
    from piebald.deploy.status import RUN
    from piebald.deploy.step_log import StepLog
    from piebald.runtimes.federation.private_files import write_private

    with locked(credentials):
        write_private(credentials / RUN, json.dumps({"folder": str(run.resolve())}) + "\n")
        yield [StepLog()]


@contextmanager
def resumed(run: Path, *options: object) -> Iterator[list[Callback]]:
    """The same for a run that goes on, if it is a federation's.

    Args:
        run: the run folder.
        options: the level of the log, whether it is JSON, and its file.

    Raises:
        SettingError: it is not, and the options speak of a log.
    """
    from piebald.deploy.logs import start_log
    from piebald.deploy.status import server_credentials

    credentials = server_credentials(run)
    if credentials is None:
        if options != ("info", False, None):
            raise SettingError("--log-level, --log-json and --log-file are for runs of a federation: leave them out")
        yield []
        return
    start_log(*options)  # type: ignore[arg-type]
    with serving(credentials, run) as callbacks:
        yield callbacks
