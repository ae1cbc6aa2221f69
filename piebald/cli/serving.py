"""What the commands that run a federation's server share: its settings, log, lock, and status page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from piebald.cli.app import end_on_term
from piebald.core.errors import SettingError

if TYPE_CHECKING:
    from piebald.experiments.file import ExperimentSettings
    from piebald.federation.operate.logs import Level
    from piebald.federation.operate.page_server import PageAddress
    from piebald.report.callbacks import Callback

LOOPBACK = "127.0.0.1"


def with_sites(
    file: Path, sets: Sequence[str] | None, sites: list[str], kind: type[ExperimentSettings] | None = None
) -> list[str]:
    """The settings of the user, with the sites that credentials list where the experiment takes any."""
    from piebald.experiments.file import ExperimentSettings

    own = list(sets or ())
    return [*own, *sites_flags((kind or ExperimentSettings).load(file, own), sites)]


def sites_flags(settings: ExperimentSettings, sites: Sequence[str]) -> list[str]:
    """The setting that names an experiment's sites where it takes any, else none."""
    partition = settings.partition
    takes_any = partition is not None and partition.kind == "sites" and partition.model_dump().get("clients") == "any"
    return [f"partition.clients={json.dumps([*sites])}"] if takes_any else []


def federation_flags(file: Path | None, sets: Sequence[str] | None, **more: str) -> list[str]:
    """Settings that choose the federation where the file does not, then those of the user, which may change them."""
    from piebald.experiments.file import ExperimentSettings

    if ExperimentSettings.load(file).runtime.kind == "federation":
        chosen = [f"runtime.{name}={json.dumps(value)}" for name, value in more.items()]
    else:
        fields = "".join(f", {name} = {json.dumps(value)}" for name, value in more.items())
        chosen = [f'runtime={{ kind = "federation"{fields} }}']
    return [*chosen, *(sets or ())]


@contextmanager
def locked(credentials: Path) -> Iterator[None]:
    """Lock credentials for this process, and end it on SIGTERM as on Ctrl-C."""
    from piebald.core.private_files import clear_parts
    from piebald.storage.lock import RunLock
    from piebald.storage.schema import explained

    with explained(f"{credentials} cannot be used"):
        lock = RunLock(credentials)
    try:
        clear_parts(credentials)
        end_on_term()
        yield
    finally:
        lock.release()


def page_address(host: str, port: int | None) -> PageAddress | None:
    """Where the status page is to be, None where it is not wanted.

    Raises:
        SettingError: an extra is missing, or there is a host and no port.
    """
    from piebald.federation.operate.page_server import PageAddress, check_installed

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
    from piebald.federation.link.heartbeat import at_work
    from piebald.federation.operate.page_server import serving_page
    from piebald.federation.site.step_log import StepLog

    with locked(credentials):
        name_run(credentials, run)
        shown = nullcontext() if page is None else serving_page(page, credentials)
        with shown, at_work("preparing the run"):
            yield [StepLog()]


def name_run(credentials: Path, run: Path) -> None:
    """Write down in a server's credentials which run folder it writes."""
    from piebald.core.private_files import write_private
    from piebald.federation.operate.status import RUN

    write_private(credentials / RUN, json.dumps({"folder": str(run.resolve())}) + "\n")


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
    from piebald.federation.operate.logs import start_log
    from piebald.federation.operate.status import server_credentials

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
