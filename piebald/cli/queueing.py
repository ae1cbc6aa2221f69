"""The server that takes experiments from its queue, and the commands that fill it: queue add, list, stop, resume."""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from piebald.cli import app
from piebald.cli.predicting import federation_flags, locked, name_run, sites_flags, with_sites
from piebald.core.errors import DeviceLost, PiebaldError, SettingError
from piebald.core.result_table import ResultTable

if TYPE_CHECKING:
    from piebald.experiments.file import ExperimentSettings
    from piebald.federation.credentials.provisioning import Credentials
    from piebald.federation.operate.experiment_queue import ExperimentQueue, Queued, State
    from piebald.federation.operate.page_server import PageAddress

_LOOK = 0.5  # seconds between two looks at the queue

log = logging.getLogger("piebald.federation")
group = typer.Typer(help="Experiments that a federation's server takes one after another.", no_args_is_help=True)
app.app.add_typer(group, name="queue")

_SERVER = typer.Argument(metavar="CREDENTIALS", help="The server's credentials.")
_NUMBER = typer.Argument(metavar="NUMBER", help="Its number in the queue.")


@app.command("sets", "out", "start_from", "as_json", group=group, lists_keys=True)
def add(
    options: app.SharedOptions,
    credentials: Annotated[Path, _SERVER],
    file: Annotated[Path, typer.Argument(metavar="EXPERIMENT", help="A TOML file.")],
) -> None:
    """Put an experiment at the end of the queue of a server."""
    from piebald.experiments.file import ExperimentSettings
    from piebald.federation.operate.machine_checks import refuse_crosses, server_run

    server, queue = _opened(credentials)
    flags = federation_flags(file, with_sites(file, options.sets, server.sites()), credentials=str(server.folder))
    # without the sites: the server adds those that it has when the experiment's turn comes (`_settings`)
    settings = ExperimentSettings.load(file, federation_flags(file, options.sets, credentials=str(server.folder)))
    if settings.compares:
        raise SettingError(f"{file} describes several runs: add one file for each")
    label, folders = app.label_of(settings, "experiment"), {entry.out for entry in queue.entries()}
    # by default beside the queue, where a service can write wherever it keeps its state
    folder = Path(options.out or settings.out or app.free_folder(server.folder / "runs", label, folders)).resolve()
    refuse_crosses(server_run(server, file, flags, str(folder)), f"piebald server {credentials} {file} --check")
    start = None if options.start_from is None else options.start_from.resolve()
    # a run that is still in the queue is not finished yet, and will be when this one's turn comes
    if start is not None and str(start) not in folders:
        _check_finished(start)
    entry = queue.add(label, settings.model_copy(update={"out": None}).text(), folder, start)
    line = f"experiment {entry.number} of the queue: {entry.label}, to {entry.out}"
    app.print_result(options, {"number": entry.number, "run": entry.out}, line)


@app.command("as_json", "wide", name="list", group=group)
def list_(options: app.SharedOptions, credentials: Annotated[Path, _SERVER]) -> None:
    """List the experiments of a server's queue, those that have ended as well."""
    from piebald.federation.operate.status import running_process

    _, queue = _opened(credentials)
    serves = running_process(credentials) is not None
    rows = [
        {
            "number": entry.number,
            "experiment": entry.label,
            "state": "interrupted" if entry.state == "running" and not serves else entry.state,
            "added": entry.added,
            "ended": entry.ended or None,
            "run": entry.out,
            "why": entry.why or None,
        }
        for entry in queue.entries()
    ]
    if options.as_json:
        return app.print_json({"server": serves, "experiments": rows})
    if rows:
        app.print_table(ResultTable(rows), options.wide)
    else:
        print("the queue is empty")
    if not serves and any(row["state"] in ("waiting", "interrupted") for row in rows):
        print(f"\nNo server runs: start it with piebald server {credentials}")


@app.command(group=group)
def stop(_: app.SharedOptions, credentials: Annotated[Path, _SERVER], number: Annotated[int, _NUMBER]) -> None:
    """Stop an experiment of the queue, or take it off before it begins; the server goes on with the next."""
    entry = _opened(credentials)[1].ask_to_stop(number)
    print(f"experiment {number} {'will not begin' if entry.state == 'waiting' else 'is being stopped'}")


@app.command("as_json", group=group)
def resume(options: app.SharedOptions, credentials: Annotated[Path, _SERVER], number: Annotated[int, _NUMBER]) -> None:
    """Put an experiment that was stopped or has failed at the end again; it goes on where it was."""
    _, queue = _opened(credentials)
    entry = queue.take_up(number)
    line = f"experiment {number} goes on as experiment {entry.number} of the queue"
    app.print_result(options, {"number": entry.number, "run": entry.out}, line)


def _opened(credentials: Path) -> tuple[Credentials, ExperimentQueue]:
    """Return a server's credentials, and its queue."""
    from piebald.federation.credentials.provisioning import read
    from piebald.federation.link.messaging import SERVER
    from piebald.federation.operate.experiment_queue import ExperimentQueue

    server = read(credentials)
    if server.party != SERVER:
        raise SettingError(
            f"{credentials} holds the credentials of {server.party}: the queue is in those of the server"
        )
    return server, ExperimentQueue(server.folder)


def _check_finished(run: Path) -> None:
    app.check_run(run)
    from piebald.runs.lineage import FinishedRun

    FinishedRun.at(run)


def serve_queue(credentials: Path, page: PageAddress | None, options: app.SharedOptions) -> None:
    """Take the experiments of the queue, and wait for others, until this process is stopped.

    Args:
        credentials: the server's.
        page: the address of its status page.
        options: of its process; experiments may name the plugins among them.
    """
    from piebald.federation.operate.machine_checks import check_space, refuse_crosses, server_machine
    from piebald.federation.operate.page_server import serving_page

    server, queue = _opened(credentials)
    with locked(credentials), nullcontext() if page is None else serving_page(page, server.folder):
        refuse_crosses([*server_machine(server), check_space(server.folder)], f"piebald server {credentials} --check")
        try:
            while True:
                entry = queue.next()
                if entry is not None:
                    _serve(server, queue, entry, options)
                else:
                    _wait(server, queue)
        except KeyboardInterrupt:
            raise app.Interrupted(f"interrupted; the queue goes on with: piebald server {credentials}") from None


def _wait(server: Credentials, queue: ExperimentQueue) -> None:
    """Wait until there is an experiment."""
    from piebald.federation.operate.status import give_sign

    log.info("the queue is empty: waiting for piebald queue add %s", server.folder)
    while queue.next() is None:
        # the status does not change meanwhile, and a check of health would take the process for ill after a minute
        give_sign(server.folder)
        time.sleep(_LOOK)


def _serve(server: Credentials, queue: ExperimentQueue, entry: Queued, options: app.SharedOptions) -> None:
    """Carry out one experiment, or the rest of it, and write down how it ended."""
    if queue.stop_wanted(entry):  # while no server was there
        queue.change(entry, state="stopped")
        return
    fields = {"event": "experiment", "number": entry.number, "experiment": entry.label, "run": entry.out}
    log.info("experiment %(number)d of the queue: %(experiment)s, to %(run)s", fields)
    reason = ""
    try:
        state = _carry_out(server, queue, entry, options)
    except DeviceLost:
        raise  # the next experiment would fail as well, and this one goes on in a new process
    except PiebaldError as error:
        if full_disk := _full_disk(server, entry):
            raise SettingError(f"{error} ({full_disk}); then go on with: piebald server {server.folder}") from None
        state, reason = "failed", str(error)
    except Exception as error:  # the next experiment has nothing to do with it
        log.exception("experiment %d of the queue has failed", entry.number)
        state, reason = "failed", f"{type(error).__name__}; the server's log says more"
    queue.change(queue.entry(entry.number), state=state, why=reason)
    fields |= {"state": state, "why": reason}
    sentence = "experiment %(number)d: %(why)s" if reason else "experiment %(number)d of the queue is %(state)s"
    log.log(logging.WARNING if reason else logging.INFO, sentence, fields)


def _full_disk(server: Credentials, entry: Queued) -> str:
    """Return what is wrong with the disk where the next experiment would fail as well, "" where nothing is."""
    from piebald.federation.operate.machine_checks import check_space

    checks = [check_space(Path(entry.out)), check_space(server.folder)]
    return next((check.told for check in checks if check.fine is False), "")


def _carry_out(server: Credentials, queue: ExperimentQueue, entry: Queued, options: app.SharedOptions) -> State:
    """Carry out an experiment, or go on with it where its run folder holds what was done before.

    Returns:
        The state in which it has ended: finished, or stopped.
    """
    from piebald.cli.train import carry_out
    from piebald.federation.link.supervision import at_work
    from piebald.federation.operate.logs import StepLog
    from piebald.runs.run import resume
    from piebald.storage.run_folder import refuse_occupied

    folder = Path(entry.out)
    if not entry.begun:
        refuse_occupied(folder)
    queue.change(entry, state="running")
    watch = Watch(lambda: queue.stop_wanted(entry))
    try:
        # a stop is asked for by another process, which leaves a file: it ends this block as Ctrl-C would
        with watch, at_work(f"preparing experiment {entry.number}"):
            name_run(server.folder, folder)
            if (folder / "run.db").exists():
                history = resume(
                    folder, progress=options.progress, callbacks=[StepLog()], plugins=options.plugins or ()
                )
                app.print_run(history, options)
            else:
                start = replace(options, start_from=Path(entry.start_from) if entry.start_from else None)
                carry_out(_settings(entry, options, server), None, start, [StepLog()], folder)
    except (KeyboardInterrupt, app.Interrupted):
        # Ctrl-C or SIGTERM, which end the server: the experiment stays "running", and the next process goes on with it
        if not watch.interrupted:
            raise KeyboardInterrupt from None
        return "stopped"
    return "finished"


def _settings(entry: Queued, options: app.SharedOptions, server: Credentials | None = None) -> ExperimentSettings:
    """Return the settings of an experiment, with the credentials and, where it takes any, the sites of a server."""
    from piebald.core.references import Outside
    from piebald.experiments.file import ExperimentSettings
    from piebald.settings.toml_document import Document

    author = Outside(options.plugins or (), "allow it with --plugin")
    document = Document(entry.experiment, f"experiment {entry.number} of the queue")
    if server is not None:
        document.set(f"runtime.credentials={json.dumps(str(server.folder))}")
        for flag in sites_flags(ExperimentSettings.of(document, author), server.sites()):
            document.set(flag)
    return ExperimentSettings.of(document, author)


class Watch:
    """Interrupts the main thread, as Ctrl-C does, once a condition holds while the block runs.

    Args:
        condition: asked again and again by a thread.

    Attributes:
        interrupted: whether the block was interrupted by this.
    """

    def __init__(self, condition: Callable[[], bool]) -> None:
        self.interrupted = False
        self._condition, self._over = condition, threading.Event()
        self._armed = self._raised = False
        self._thread = threading.Thread(target=self._look, name="queue", daemon=True)
        self._before: Any = None

    def __enter__(self) -> Self:
        # the handler before the thread, whose signal would otherwise be taken for Ctrl-C
        self._before = signal.signal(signal.SIGINT, self._interrupt)
        self._armed = True
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # first, so that a signal that is under way interrupts nothing behind the block
        self._armed = False
        self._over.set()
        # before the old handler is back, which would take a late signal for Ctrl-C
        self._thread.join()
        signal.signal(signal.SIGINT, self._before)

    def _look(self) -> None:
        while not self._over.wait(_LOOK):
            if self._condition():
                self._raised = True
                if sys.platform == "win32":
                    return signal.raise_signal(signal.SIGINT)
                main = threading.main_thread().ident
                assert main is not None
                return signal.pthread_kill(main, signal.SIGINT)  # which also ends what it waits for

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """The handler, in the main thread: what comes too late, since the block has ended, is nothing."""
        if not self._raised:
            raise KeyboardInterrupt
        self._raised = False
        if self._armed:
            self.interrupted, self._armed = True, False
            raise KeyboardInterrupt
