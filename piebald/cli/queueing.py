"""The server that takes experiments from its queue, and the commands that fill it: queue add, list, stop, resume."""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Self

import typer

from piebald.cli.app import Interrupted, Json, Out, Sets, StartFrom, app, check_run
from piebald.cli.printing import print_json, print_table
from piebald.cli.serving import federation_flags, locked, name_run, sites_flags, with_sites
from piebald.core.errors import DeviceLost, PiebaldError, SettingError

if TYPE_CHECKING:
    from piebald.experiments.file import ExperimentSettings
    from piebald.federation.credentials.provisioning import Credentials
    from piebald.federation.operate.experiment_queue import ExperimentQueue, Queued
    from piebald.federation.operate.page_server import PageAddress

_LOOK = 0.5  # seconds between two looks at the queue

log = logging.getLogger("piebald.federation")
queue = typer.Typer(help="Experiments that a federation's server takes one after another.", no_args_is_help=True)
app.add_typer(queue, name="queue")

_SERVER = typer.Argument(metavar="CREDENTIALS", help="The server's credentials.")
_NUMBER = typer.Argument(metavar="NUMBER", help="Its number in the queue.")


@queue.command()
def add(
    credentials: Annotated[Path, _SERVER],
    file: Annotated[Path, typer.Argument(metavar="EXPERIMENT", help="A TOML file.")],
    sets: Sets = None,
    out: Out = None,
    start_from: StartFrom = None,
    as_json: Json = False,
) -> None:
    """Put an experiment at the end of the queue of a server."""
    from piebald.experiments.file import ExperimentSettings
    from piebald.federation.operate.machine_checks import refuse_crosses, server_run

    own, waiting = _opened(credentials)
    flags = federation_flags(file, with_sites(file, sets, own.sites()), credentials=str(own.folder))
    found = ExperimentSettings.load(file, federation_flags(file, sets, credentials=str(own.folder)))
    if found.compares:
        raise SettingError(f"{file} describes several runs: add one file for each")
    folder = Path(out or found.out or _free_folder(own.folder, found, waiting)).resolve()
    refuse_crosses(server_run(own, file, flags, str(folder)), f"piebald server {credentials} {file} --check")
    start = None if start_from is None else start_from.resolve()
    if start is not None and str(start) not in {one.out for one in waiting.entries()}:
        _check_finished(start)
    text = found.model_copy(update={"out": None}).text()
    entry = waiting.add(_label(found), text, folder, start)
    if as_json:
        return print_json({"number": entry.number, "run": entry.out})
    print(f"experiment {entry.number} of the queue: {entry.label}, to {entry.out}")


@queue.command("list")
def list_(credentials: Annotated[Path, _SERVER], as_json: Json = False) -> None:
    """List the experiments of a server's queue, those that have ended as well."""
    from piebald.federation.operate.status import running_process

    _, waiting = _opened(credentials)
    serves = running_process(credentials) is not None
    rows = [
        {
            "number": one.number,
            "experiment": one.label,
            "state": "interrupted" if one.state == "running" and not serves else one.state,
            "added": one.added,
            "ended": one.ended or None,
            "run": one.out,
            "why": one.why or None,
        }
        for one in waiting.entries()
    ]
    if as_json:
        return print_json({"server": serves, "experiments": rows})
    if rows:
        print_table(tuple(rows[0]), [tuple(row.values()) for row in rows])
    else:
        print("the queue is empty")
    if not serves and any(row["state"] in ("waiting", "interrupted") for row in rows):
        print(f"\nNo server runs: start it with piebald server {credentials}")


@queue.command()
def stop(credentials: Annotated[Path, _SERVER], number: Annotated[int, _NUMBER]) -> None:
    """Stop an experiment of the queue, or take it off before it begins; the server goes on with the next."""
    _, waiting = _opened(credentials)
    entry = waiting.ask_to_stop(number)
    print(f"experiment {number} {'will not begin' if entry.state == 'waiting' else 'is being stopped'}")


@queue.command()
def resume(credentials: Annotated[Path, _SERVER], number: Annotated[int, _NUMBER], as_json: Json = False) -> None:
    """Put an experiment that was stopped or has failed at the end again; it goes on where it was."""
    _, waiting = _opened(credentials)
    entry = waiting.take_up(number)
    print_json({"number": entry.number, "run": entry.out}) if as_json else print(
        f"experiment {number} goes on as experiment {entry.number} of the queue"
    )


def _opened(credentials: Path) -> tuple[Credentials, ExperimentQueue]:
    """A server's credentials, and its queue."""
    from piebald.federation.credentials.provisioning import read
    from piebald.federation.link.flare_link import SERVER
    from piebald.federation.operate.experiment_queue import ExperimentQueue

    own = read(credentials)
    if own.party != SERVER:
        raise SettingError(f"{credentials} holds the credentials of {own.party}: the queue is in those of the server")
    return own, ExperimentQueue(own.folder)


def _label(settings: ExperimentSettings) -> str:
    return settings.label or (settings.recipe.name if settings.recipe else "experiment")


def _free_folder(credentials: Path, settings: ExperimentSettings, waiting: ExperimentQueue) -> Path:
    """A run folder beside the queue, which a service can write to wherever it keeps its state."""
    stem = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in _label(settings))
    taken, folder, number = {one.out for one in waiting.entries()}, credentials / "runs" / stem, 1
    while folder.exists() or str(folder) in taken:
        number += 1
        folder = credentials / "runs" / f"{stem}-{number}"
    return folder


def _check_finished(run: Path) -> None:
    check_run(run)
    from piebald.runs.lineage import FinishedRun

    FinishedRun.at(run)


def serve_queue(
    credentials: Path,
    page: PageAddress | None,
    as_json: bool,
    quiet: bool,
    turns: float | None = None,
    plugins: Sequence[str] = (),
) -> None:
    """Take the experiments of the queue, and wait for others, until this process is stopped.

    Args:
        credentials: the server's.
        page: where its status page is.
        as_json, quiet: how the results are printed.
        turns: seconds after which an experiment makes room for others that wait, at its next server step; None has it
            end first.
        plugins: modules that experiments of the queue may name; they are found on Python's path and in this folder.
    """
    from piebald.core.references import search
    from piebald.federation.operate.machine_checks import check_space, refuse_crosses, server_machine
    from piebald.federation.operate.page_server import serving_page

    search(Path.cwd())

    own, waiting = _opened(credentials)
    with locked(credentials), nullcontext() if page is None else serving_page(page, own.folder):
        refuse_crosses([*server_machine(own), check_space(own.folder)], f"piebald server {credentials} --check")
        try:
            while True:
                entry = waiting.next()
                if entry is not None:
                    _serve(own, waiting, entry, Serving(as_json, quiet, plugins), turns)
                else:
                    _wait(own, waiting)
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted; the queue goes on with: piebald server {credentials}") from None


def _wait(own: Credentials, waiting: ExperimentQueue) -> None:
    """Wait until there is an experiment."""
    from piebald.federation.operate.status import give_sign

    log.info("the queue is empty: waiting for piebald queue add %s", own.folder)
    while waiting.next() is None:
        give_sign(own.folder)
        time.sleep(_LOOK)


class Serving(NamedTuple):
    """How results are printed, and which plugins experiments may name."""

    as_json: bool
    quiet: bool
    plugins: Sequence[str]


def _serve(own: Credentials, waiting: ExperimentQueue, entry: Queued, serving: Serving, turns: float | None) -> None:
    """Carry out one experiment, or the rest of it, or its turn, and write down how it ended."""
    if waiting.stop_wanted(entry):  # while no server was there
        waiting.change(entry, state="stopped")
        return
    about = {"event": "experiment", "number": entry.number, "experiment": entry.label, "run": entry.out}
    log.info("experiment %(number)d of the queue: %(experiment)s, to %(run)s", about)
    ended: dict[str, Any] = {}
    try:
        while not ended:
            entry, ended = _part(own, waiting, entry, serving, turns)
    except DeviceLost:
        raise  # the next experiment would fail as well, and this one goes on in a new process
    except PiebaldError as error:
        if lacking := _without_room(own, entry):
            raise SettingError(f"{error} ({lacking}); then go on with: piebald server {own.folder}") from None
        ended = {"state": "failed", "why": str(error)}
    except Exception as error:  # the next experiment has nothing to do with it
        log.exception("experiment %d of the queue has failed", entry.number)
        ended = {"state": "failed", "why": f"{type(error).__name__}; the server's log says more"}
    waiting.change(waiting.entry(entry.number), **ended)
    about |= {"state": ended["state"], "why": ended.get("why", "")}
    told = "experiment %(number)d of the queue is %(state)s" if not about["why"] else "experiment %(number)d: %(why)s"
    log.log(logging.WARNING if about["why"] else logging.INFO, told, about)


def _without_room(own: Credentials, entry: Queued) -> str:
    """Where the disk is so full that the next experiment would fail as well, "" where it is not."""
    from piebald.federation.operate.machine_checks import check_space

    checks = [check_space(Path(entry.out)), check_space(own.folder)]
    return next((one.told for one in checks if one.fine is False), "")


def _part(
    own: Credentials, waiting: ExperimentQueue, entry: Queued, serving: Serving, turns: float | None
) -> tuple[Queued, dict[str, Any]]:
    """Carry out an experiment until it ends, its turn is over, or there are other sites; returns how it goes on, and
    how it ended.

    Where it takes any sites and others are provisioned meanwhile, the run ends after the server step that it is at, and
    the rest of its steps are a run that goes on from it with all sites.
    """
    from piebald.federation.link.heartbeat import at_work
    from piebald.federation.operate.turns import Turn
    from piebald.storage.run_folder import refuse_occupied

    document = _document(entry, serving)
    takes_any = bool(sites_flags(document, own.sites()))
    grows = takes_any and document.stop is None  # else nobody can say how many steps are left
    if entry.state != "running":
        if not entry.begun:
            refuse_occupied(Path(entry.out))
        entry = waiting.change(entry, state="running", sites=entry.sites or (own.sites() if takes_any else ()))
    turn = Turn(own.folder, waiting, entry, turns)
    watch = Watch(lambda: waiting.stop_wanted(entry) or (grows and len(own.sites()) > len(entry.sites)) or turn.over())
    try:
        with watch, at_work(f"preparing experiment {entry.number}"):
            _carry_out(own, entry, serving)
    except (KeyboardInterrupt, Interrupted):
        if not watch.came:
            raise KeyboardInterrupt from None
        if waiting.stop_wanted(entry):
            return entry, {"state": "stopped"}
        if turn.ended:
            return entry, {"state": "paused"}
        return waiting.change(entry, **_cut(entry), sites=own.sites()), {}
    if not entry.until:
        return entry, {"state": "finished"}
    parts = (*entry.parts, entry.out)
    more: dict[str, Any] = {"out": f"{parts[0]}-part-{len(parts) + 1}", "start_from": entry.out, "parts": parts}
    refuse_occupied(Path(more["out"]))
    log.info("there are other sites: the rest of experiment %d goes on in %s", entry.number, more["out"])
    return waiting.change(entry, **more, rounds=entry.rounds - entry.until, until=0), {}


def _cut(entry: Queued) -> dict[str, int]:
    """At which step a run that was interrupted ends, so that others can go on from it; nothing at its last step."""
    from piebald.storage.store import RunStore

    if not (Path(entry.out) / "run.db").exists():
        return {}  # it begins with all sites
    with RunStore.open_read_only(Path(entry.out)) as store:
        done, rounds = max(store.version, 1), entry.rounds or int(store.meta["rounds"])
    return {"rounds": rounds, "until": done} if done < rounds else {}


def _carry_out(own: Credentials, entry: Queued, serving: Serving) -> None:
    """Start a run, or go on with it where the run folder holds what was done before."""
    from piebald.cli.app import progress
    from piebald.cli.printing import print_run
    from piebald.cli.train import carry_out
    from piebald.federation.site.step_log import StepLog
    from piebald.runs.run import resume
    from piebald.storage.store import RunStore

    folder = Path(entry.out)
    name_run(own.folder, folder)
    if (folder / "run.db").exists():  # of this entry, which was refused otherwise
        if entry.until:
            with RunStore.open(folder) as store:
                store.set_meta(rounds=entry.until)
        bar = progress(serving.as_json, serving.quiet)
        history = resume(folder, progress=bar, callbacks=[StepLog()], plugins=serving.plugins)
        return print_run(history, serving.as_json, serving.quiet)
    start = Path(entry.start_from) if entry.start_from else None
    given, how = _document(entry, serving, own), {"as_json": serving.as_json, "quiet": serving.quiet}
    carry_out(given, None, **how, callbacks=[StepLog()], folder=folder, start_from=start)


def _document(entry: Queued, serving: Serving, own: Credentials | None = None) -> ExperimentSettings:
    """The settings of an experiment, with credentials as this server's now, with its sites where it takes any."""
    from piebald.core.references import Outside
    from piebald.experiments.file import ExperimentSettings
    from piebald.settings.toml_document import Document

    author = Outside(serving.plugins, "allow it with --plugin")
    document = Document(entry.experiment, f"experiment {entry.number} of the queue")
    if own is not None:
        moved = f"runtime.credentials={json.dumps(str(own.folder))}"
        steps = [f"rounds={entry.rounds}"] if entry.rounds else []
        for flag in [moved, *steps, *sites_flags(ExperimentSettings.of(document, author), entry.sites)]:
            document.set(flag)
    return ExperimentSettings.of(document, author)


class Watch:
    """Interrupts the main thread, as Ctrl-C does, once something has come true while the block runs.

    Args:
        wanted: whether it has come true; asked again and again by a thread.

    Attributes:
        came: whether the block was interrupted by this.
    """

    def __init__(self, wanted: Callable[[], bool]) -> None:
        self.came = False
        self._wanted, self._over = wanted, threading.Event()
        self._armed = self._raised = False
        self._thread = threading.Thread(target=self._look, name="queue", daemon=True)
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._interrupt)
        self._armed = True
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._armed = False
        self._over.set()
        self._thread.join()
        signal.signal(signal.SIGINT, self._before)

    def _look(self) -> None:
        while not self._over.wait(_LOOK):
            if self._wanted():
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
            self.came, self._armed = True, False
            raise KeyboardInterrupt
