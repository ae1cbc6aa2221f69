"""What the commands that run a federation's server share: its log, its lock, and its status page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from piebald.cli.app import end_on_term
from piebald.errors import SettingError

if TYPE_CHECKING:
    from piebald.callbacks import Callback
    from piebald.deploy.logs import Level
    from piebald.deploy.page_server import PageAddress

LOOPBACK = "127.0.0.1"


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


def page_address(host: str, port: int | None) -> PageAddress | None:
    """Where the status page is to be, None where it is not wanted.

    Raises:
        SettingError: an extra is missing, or there is a host and no port.
    """
    from piebald.deploy.page_server import PageAddress, check_installed

    if port is None:
        if host != LOOPBACK:
            raise SettingError(f"--status-host is {host!r} and there is no page: add --status-port PORT")
        return None
    check_installed()
    return PageAddress(host, port)


@contextmanager
def serving(credentials: Path, run: Path, page: PageAddress | None = None) -> Iterator[list[Callback]]:
    """Run a federation's server: one at a time for its credentials, which name the run folder from then on.

    Args:
        credentials: the server's.
        run: the run folder.
        page: where its status page is.

    Yields:
        The listeners of the run that write its steps into the log.
    """
    from piebald.deploy.page_server import serving_page
    from piebald.deploy.status import RUN
    from piebald.deploy.step_log import StepLog
    from piebald.runtimes.federation.private_files import write_private

    with locked(credentials):
        write_private(credentials / RUN, json.dumps({"folder": str(run.resolve())}) + "\n")
        with nullcontext() if page is None else serving_page(page, credentials, run):
            yield [StepLog()]


@contextmanager
def resumed(
    run: Path, level: Level, as_json: bool, file: Path | None, host: str, port: int | None
) -> Iterator[list[Callback]]:
    """The same for a run that goes on, if it is a federation's.

    Args:
        run: the run folder.
        level, as_json, file: see `deploy.logs.start_log`.
        host, port: of the status page.

    Raises:
        SettingError: it is not, and the options speak of a log or a page.
    """
    from piebald.deploy.logs import start_log
    from piebald.deploy.status import server_credentials

    credentials = server_credentials(run)
    if credentials is None:
        if (level, as_json, file, host, port) != ("info", False, None, LOOPBACK, None):
            raise SettingError(
                f"{run} is no federation's run, which --log-... and --status-... are for: leave them out"
            )
        yield []
        return
    page = page_address(host, port)
    start_log(level, as_json, file)
    with serving(credentials, run, page) as callbacks:
        yield callbacks
