"""The server that takes experiments from its queue, and the commands that fill it, here or from elsewhere."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from piebald.cli import app
from piebald.cli.predicting import federation_flags, locked, name_run, sites_flags, with_sites
from piebald.core.errors import DeviceLost, PiebaldError, SettingError
from piebald.core.plain_text import printable
from piebald.core.result_table import ResultTable

if TYPE_CHECKING:
    from piebald.experiments.file import ExperimentSettings
    from piebald.federation.credentials.provisioning import Credentials
    from piebald.federation.operate.experiment_queue import ExperimentQueue, Queued
    from piebald.federation.operate.page_server import PageAddress
    from piebald.federation.operate.remote import Operation

log = logging.getLogger("piebald.federation")
group = typer.Typer(help="Experiments that a federation's server takes one after another.", no_args_is_help=True)
app.app.add_typer(group, name="queue")

_SERVER = typer.Argument(metavar="CREDENTIALS", help="The server's credentials.")
_YOURS = typer.Argument(metavar="CREDENTIALS", help="Your own credentials, from piebald provision.")
_NUMBER = typer.Argument(metavar="NUMBER", help="Its number in the queue.")


@app.command("sets", "out", "start_from", "as_json", group=group, lists_keys=True)
def add(
    options: app.SharedOptions,
    credentials: Annotated[Path, _SERVER],
    file: Annotated[Path, typer.Argument(metavar="EXPERIMENT", help="A TOML file.")],
    priority: Annotated[int, typer.Option(help="Greater ones are taken first.")] = 0,
    by: Annotated[str, typer.Option(hidden=True)] = "",
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
    entry = queue.add(label, settings.model_copy(update={"out": None}).text(), folder, start, by, priority)
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
            "priority": entry.priority or None,
            "by": entry.by or None,
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


@app.command("sets", "as_json", lists_keys=True)
def submit(
    options: app.SharedOptions,
    credentials: Annotated[Path, _YOURS],
    file: Annotated[Path, typer.Argument(metavar="EXPERIMENT", help="A TOML file; it names no file of the server.")],
    priority: Annotated[int, typer.Option(help="Greater ones are taken first.")] = 0,
) -> None:
    """Submit an experiment to the queue of a federation's server, from elsewhere."""
    from piebald.experiments.file import ExperimentSettings

    # also what is wrong at once with the file, before it travels
    text = ExperimentSettings.load(file, options.sets or ()).text()
    number = json.loads(_called(credentials, "submit", text.encode(), priority=priority))["number"]
    app.print_result(options, {"number": number}, f"experiment {number} of the queue")


@app.command()
def logs(_: app.SharedOptions, credentials: Annotated[Path, _YOURS], number: Annotated[int, _NUMBER]) -> None:
    """Print the end of the log of an experiment at a federation's server, from elsewhere."""
    for line in _called(credentials, "logs", number=number).decode(errors="replace").splitlines():
        print(printable(line))


@app.command("as_json")
def abort(options: app.SharedOptions, credentials: Annotated[Path, _YOURS], number: Annotated[int, _NUMBER]) -> None:
    """Stop an experiment at a federation's server, from elsewhere; its finished steps are kept."""
    done = json.loads(_called(credentials, "abort", number=number))
    line = f"experiment {number} {'will not begin' if done['state'] == 'waiting' else 'is being stopped'}"
    app.print_result(options, {"number": number}, line)


@app.command("as_json")
def fetch(
    options: app.SharedOptions,
    credentials: Annotated[Path, _YOURS],
    number: Annotated[int, _NUMBER],
    out: Annotated[Path, typer.Option("--out", help="A new file, for piebald restore.")],
) -> None:
    """Fetch the run of an experiment from a federation's server, as a backup, from elsewhere."""
    from piebald.core.private_files import make_private

    if out.exists() or out.is_symlink():
        raise SettingError(f"{out} exists: choose another name")
    make_private(out)
    try:
        with out.open("r+b") as file:
            file.writelines(_pieces(credentials, "fetch", number=number))
    except BaseException:
        out.unlink()
        raise
    line = f"{out} holds the run of experiment {number}; unpack it with piebald restore {out} FOLDER"
    app.print_result(options, {"number": number, "file": str(out), "bytes": out.stat().st_size}, line)


def print_seen(credentials: Path, options: app.SharedOptions) -> None:
    """Print the experiments of a server's queue, as a person sees them from elsewhere."""
    seen = json.loads(_called(credentials, "status"))
    if options.as_json:
        return app.print_json(seen)
    if not seen["experiments"]:
        return print("the queue is empty")
    runs = {int(number): run for number, run in seen["runs"].items()}
    rows = [
        row | {name: runs.get(row["number"], {}).get(name) for name in ("steps", "rounds", "ends")}
        for row in seen["experiments"]
    ]
    app.print_table(ResultTable(rows), options.wide)
    return None


def serve_person(credentials: Path, address: PageAddress) -> None:
    """Serve a person's page of a server's queue until this process is stopped."""
    from piebald.federation.credentials.provisioning import read
    from piebald.federation.operate import page_server
    from piebald.federation.operate.page_server import TOKEN

    def tell(url: str) -> None:
        print(f"{url} asks for the token in {credentials / TOKEN}; Ctrl-C ends it", flush=True)

    page_server.serve_person(read(credentials), address, tell)


def _called(credentials: Path, what: Operation, body: bytes = b"", **fields: int) -> bytes:
    """Call a server as a person, and return the answer."""
    return b"".join(_pieces(credentials, what, body, **fields))


def _pieces(credentials: Path, what: Operation, body: bytes = b"", **fields: int) -> Iterator[bytes]:
    """Call a server as a person, and return the pieces of the answer."""
    from piebald.federation.credentials.provisioning import read
    from piebald.federation.operate.remote import is_person, pieces

    person = read(credentials)
    if not is_person(credentials):
        raise SettingError(
            f"{credentials} holds the credentials of {person.party}: calls need those of a person, whom people of "
            "federation.toml names"
        )
    return pieces(person, what, body, **fields)


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


def serve_queue(credentials: Path, page: PageAddress | None, options: app.SharedOptions, expiry: float | None) -> None:
    """Take the experiments of the queue, each in a process of its own, until this process is stopped.

    Args:
        credentials: the server's.
        page: the address of its status page.
        options: of its process; experiments may name the plugins among them.
        expiry: seconds without a sign of life after which it takes the credentials from another process, for whose end
            it waits; None for an error in place of that.
    """
    from piebald.federation.operate.job_processes import JobProcesses
    from piebald.federation.operate.machine_checks import check_space, refuse_crosses, server_machine
    from piebald.federation.operate.page_server import serving_page
    from piebald.federation.operate.takeover import leased

    server, queue = _opened(credentials)
    app.end_on_term()
    shows = nullcontext() if page is None else serving_page(page, server.folder)
    with leased(server.folder, expiry) as held, locked(credentials), shows:
        refuse_crosses([*server_machine(server), check_space(server.folder)], f"piebald server {credentials} --check")
        jobs = JobProcesses(server, queue, partial(_job_words, options), held)
        try:
            jobs.serve()
        except KeyboardInterrupt:
            raise app.Interrupted(f"interrupted; the queue goes on with: piebald server {credentials}") from None
        finally:
            jobs.close()


def _job_words(options: app.SharedOptions, slot: int) -> list[str]:
    """Return the options of the process of an experiment, which are those of the server."""
    words = ["--log-level", options.log_level, *(["--log-json"] if options.log_json else [])]
    if (file := options.log_file) is not None:  # of its own: two processes cannot rotate one file
        words += ["--log-file", str(file.with_name(f"{file.stem}.job-{slot}{file.suffix}"))]
    words += [word for plugin in options.plugins or () for word in ("--plugin", plugin)]
    return [*words, *(["--json"] if options.as_json else []), *(["--quiet"] if options.quiet else [])]


def serve_job(credentials: Path, number: int, door: int, token: int, options: app.SharedOptions) -> None:
    """Carry out one experiment of the queue, or the rest of it, and write down how it ended.

    This is the process that `JobProcesses` starts, and ends with it.

    Args:
        credentials: the server's.
        number: of the experiment.
        door: the file over which the connections of sites come.
        token: of the server's lease, without which nothing is written; 0 for none.
        options: of the process.
    """
    from piebald.federation.operate.job_processes import await_writer, end_with_parent, take_connections
    from piebald.federation.operate.logs import also_log
    from piebald.storage.lease import Lease

    server, queue = _opened(credentials)
    if token:
        Lease(server.folder, token)
    take_connections(door)
    end_with_parent()
    also_log(queue.log_file(number))
    entry, state, reason = queue.entry(number), "finished", ""
    try:
        await_writer(Path(entry.out))
        _carry_out(server, queue, entry, options)
    except (KeyboardInterrupt, app.Interrupted, DeviceLost):
        raise  # it goes on in another process
    except PiebaldError as error:
        if full_disk := _full_disk(server, entry):  # the next experiment would fail as well
            raise SettingError(f"{error} ({full_disk}); then go on with: piebald server {server.folder}") from None
        state, reason = "failed", str(error)
    except Exception as error:  # the next experiment has nothing to do with it
        log.exception("experiment %d of the queue has failed", entry.number)
        state, reason = "failed", f"{type(error).__name__}; the server's log says more"
    queue.change(queue.entry(number), state=state, why=reason)


def _full_disk(server: Credentials, entry: Queued) -> str:
    """Return what is wrong with the disk where the next experiment would fail as well, "" where nothing is."""
    from piebald.federation.operate.machine_checks import check_space

    checks = [check_space(Path(entry.out)), check_space(server.folder)]
    return next((check.told for check in checks if check.fine is False), "")


def _carry_out(server: Credentials, queue: ExperimentQueue, entry: Queued, options: app.SharedOptions) -> None:
    """Carry out an experiment, or go on with it where its run folder holds what was done before."""
    from piebald.cli.train import carry_out
    from piebald.federation.credentials.slots import slot_folder
    from piebald.federation.link.supervision import at_work
    from piebald.federation.operate.logs import StepLog
    from piebald.runs.run import resume

    folder, credentials = Path(entry.out), slot_folder(server.folder, entry.slot or 0)
    with at_work(f"preparing experiment {entry.number}"):
        name_run(credentials, folder)
        if (folder / "run.db").exists():
            app.end_on_term()
            history = resume(folder, progress=options.progress, callbacks=[StepLog()], plugins=options.plugins or ())
            app.print_run(history, options)
        else:
            start = replace(options, start_from=Path(entry.start_from) if entry.start_from else None)
            carry_out(_settings(entry, options, credentials, server.sites()), None, start, [StepLog()], folder)


def _settings(entry: Queued, options: app.SharedOptions, credentials: Path, sites: Sequence[str]) -> ExperimentSettings:
    """Return the settings of an experiment, with the credentials and, where it takes any, the sites of a server."""
    from piebald.core.references import Outside
    from piebald.experiments.file import ExperimentSettings
    from piebald.settings.toml_document import Document

    author = Outside(options.plugins or (), "allow it with --plugin")
    document = Document(entry.experiment, f"experiment {entry.number} of the queue")
    document.set(f"runtime.credentials={json.dumps(str(credentials))}")
    for flag in sites_flags(ExperimentSettings.of(document, author), sites):
        document.set(flag)
    return ExperimentSettings.of(document, author)
