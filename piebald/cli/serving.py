"""The running of a federation's server, as several commands do it: its settings, log, lock, and status page."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from piebald.cli.app import LOG, LOOPBACK, PAGE, SharedOptions, end_on_term
from piebald.core.errors import SettingError
from piebald.core.plain_text import printable

_RELAY = 0.2  # seconds between two looks at what sites on this machine have printed

if TYPE_CHECKING:
    from piebald.experiments.file import ExperimentSettings
    from piebald.federation.operate.page_server import PageAddress
    from piebald.report.callbacks import Callback


def with_sites(
    file: Path, sets: Sequence[str] | None, sites: list[str], kind: type[ExperimentSettings] | None = None
) -> list[str]:
    """Return the settings of the user, with the sites that credentials list where the experiment takes any."""
    from piebald.experiments.file import ExperimentSettings

    flags = list(sets or ())
    return [*flags, *sites_flags((kind or ExperimentSettings).load(file, flags), sites)]


def sites_flags(settings: ExperimentSettings, sites: Sequence[str]) -> list[str]:
    """Return the setting that names an experiment's sites where it takes any, else none."""
    partition = settings.partition if settings.rows_at_sites else None
    takes_any = partition is not None and partition.model_dump().get("clients") == "any"
    return [f"partition.clients={json.dumps([*sites])}"] if takes_any else []


def federation_flags(file: Path | None, sets: Sequence[str] | None, **settings: str) -> list[str]:
    """Return settings that choose the federation where the file does not, then those of the user, who may change it."""
    from piebald.experiments.file import ExperimentSettings

    experiment = ExperimentSettings.load(file)
    if "credentials" in experiment.component_class("runtime", experiment.runtime).model_fields:
        chosen = [f"runtime.{name}={json.dumps(value)}" for name, value in settings.items()]
    else:
        fields = "".join(f", {name} = {json.dumps(value)}" for name, value in settings.items())
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
        # under the lock: without it they could be those of a process that is writing
        clear_parts(credentials)
        end_on_term()
        yield
    finally:
        lock.release()


def page_address(options: SharedOptions) -> PageAddress | None:
    """Return the address of the status page, None where no page is wanted.

    Raises:
        SettingError: an extra is missing, or there is a host and no port.
    """
    from piebald.federation.operate.page_server import PageAddress, check_installed

    if options.status_port is None:
        if options.status_host != LOOPBACK:
            raise SettingError(f"--status-host is {options.status_host!r} and there is no page: add --status-port PORT")
        return None
    check_installed()
    return PageAddress(options.status_host, options.status_port)


@contextmanager
def relayed(run: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """Relay what the sites of a federation on this machine print, each line after its site's name.

    Args:
        run: the run folder, or one with several, in which the sites' logs are.
        tell: takes a line.
    """
    over, read = threading.Event(), dict[Path, int]()

    def relay() -> None:
        for path in sorted(run.glob("**/federation/*/log.txt")):
            with path.open("rb") as file:
                file.seek(read.setdefault(path, 0))
                # whole lines only, as a site may be in the middle of one
                whole, end, _ = file.read().rpartition(b"\n")
            read[path] += len(whole) + len(end)
            for line in whole.decode(errors="replace").split("\n") if end else ():
                words = (part if part.isspace() else printable(part) for part in re.split("( +)", line))  # a table's
                tell(f"{path.parent.name} | {''.join(words)}".rstrip())

    def follow() -> None:
        while not over.wait(_RELAY):
            relay()

    thread = threading.Thread(target=follow, name="sites", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        # once more, for what came after the thread's last look
        relay()


@contextmanager
def serving(credentials: Path, run: Path, page: PageAddress | None = None) -> Iterator[list[Callback]]:
    """Run a federation's server: one at a time for its credentials, which name the run folder from then on.

    Args:
        credentials: the server's.
        run: the run folder.
        page: the address of its status page.

    Yields:
        The listeners of the run that write its steps into the log.
    """
    from piebald.federation.link.heartbeat import at_work
    from piebald.federation.operate.logs import StepLog
    from piebald.federation.operate.page_server import serving_page

    with locked(credentials):
        name_run(credentials, run)
        page_server = nullcontext() if page is None else serving_page(page, credentials)
        with page_server, at_work("preparing the run"):
            yield [StepLog()]


def name_run(credentials: Path, run: Path) -> None:
    """Write the name of the run folder that a server writes into its credentials."""
    from piebald.core.private_files import write_private
    from piebald.federation.operate.status import RUN

    write_private(credentials / RUN, json.dumps({"folder": str(run.resolve())}) + "\n")


@contextmanager
def resumed(run: Path, options: SharedOptions) -> Iterator[list[Callback]]:
    """Run the server of a run that goes on, if it is a federation's.

    Raises:
        SettingError: it is not, and the options speak of a log or a page.
    """
    from piebald.federation.operate.status import server_credentials

    credentials = server_credentials(run)
    if credentials is None:
        if any(getattr(options, name) != getattr(SharedOptions(), name) for name in (*LOG, *PAGE)):
            raise SettingError(
                f"{run} is not a run of a federation, which --log-... and --status-... are for: leave them out"
            )
        yield []
        return
    page = page_address(options)
    options.start_log()
    with serving(credentials, run, page) as callbacks:
        yield callbacks
