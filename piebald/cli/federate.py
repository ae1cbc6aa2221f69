"""Commands for real federations: provision, server, client, up, status, stop."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from piebald.cli import app
from piebald.cli.predicting import federation_flags, locked, page_address, relayed, serving, with_sites
from piebald.cli.queueing import print_seen, serve_job, serve_person, serve_queue
from piebald.cli.train import carry_out
from piebald.core.errors import SettingError, shown
from piebald.core.plain_text import printable
from piebald.core.result_table import ResultTable

if TYPE_CHECKING:
    from piebald.federation.operate.machine_checks import Check
    from piebald.federation.site.site_process import SiteWork
    from piebald.federation.site.site_rows import SiteClient

_site = typer.Typer(help="A site of a federation, from its startup kit.", no_args_is_help=True)
app.app.add_typer(_site, name="site")
_EXPIRY = 30.0  # seconds without a sign of life before a server that hangs loses its lease
_CREDENTIALS = typer.Argument(metavar="CREDENTIALS", help="A folder that piebald provision made.")


@app.command("as_json")
def provision(
    options: app.SharedOptions,
    file: Annotated[Path, typer.Argument(metavar="FEDERATION", help="A TOML file: name, host, port, days, sites.")],
    out: Annotated[Path, typer.Option("--out", help="The folder for the credentials.")] = Path("credentials"),
    renew: Annotated[bool, typer.Option("--renew", help="Make new keys and certificates for all parties.")] = False,
    party: Annotated[list[str] | None, typer.Option(help="With --renew, only for this party; repeatable.")] = None,
    revoke: Annotated[list[str] | None, typer.Option(metavar="SITE", help="Shut a site out; repeatable.")] = None,
) -> None:
    """Create credentials for the server and for each site; existing ones stay as they are, unless renewed."""
    from piebald.federation.credentials import provisioning
    from piebald.federation.credentials.provisioning import write_kit

    description = provisioning.describe(file)
    if party and not renew:
        raise SettingError("--party says whose credentials are renewed: give it with --renew")
    if revoke:
        revoked = provisioning.revoke(description, out, revoke)
        times = {site: f"{at:%Y-%m-%d %H:%M:%S} UTC" for site, at in sorted(revoked.items())}
        if not renew:
            if options.as_json:
                return app.print_json({"revoked": times})
            return app.print_table(ResultTable(times.items(), ("revoked", "at")))
    kits: dict[str, Path] = {}

    def hand_out(credentials: provisioning.Credentials) -> None:
        kits[credentials.party] = write_kit(credentials, out / "kits")

    if renew:
        parties = provisioning.renew(description, out, party or (), hand_out)
    else:
        parties = provisioning.provision(description, out, hand_out)
    if options.as_json:
        rows = [
            {
                "party": p.party,
                "credentials": str(p.folder),
                "kit": str(kits[p.party].resolve()) if p.party in kits else None,
                "expires": p.expires.isoformat(),
            }
            for p in parties
        ]
        return app.print_json({"made": rows, "authority": str(out / "authority")})
    lines = [(p.party, f"{p.expires:%Y-%m-%d}", kits.get(p.party, out / p.party)) for p in parties]
    app.print_table(ResultTable(lines, ("new credentials of", "expires", "for its machine")))
    print(
        f"\nGive each kit to its own site only, which starts it with piebald site up KIT; keep {out / 'authority'} in "
        "a safe place: it makes further credentials."
    )


@app.command("sets", "out", "start_from", "plugins", *app.LOG, *app.PAGE, "as_json", "quiet", lists_keys=True)
def server(
    options: app.SharedOptions,
    credentials: Annotated[Path, _CREDENTIALS],
    file: Annotated[
        Path | None, typer.Argument(metavar="EXPERIMENT", help="A TOML file; without one, those of the queue.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Look whether the server can start, print a table, and end.")
    ] = False,
    standby: Annotated[
        bool, typer.Option("--standby", help="Wait until no other server has the credentials, and take over.")
    ] = False,
    expiry: Annotated[
        float | None,
        typer.Option(min=5, help="With --standby: seconds without a sign of life of a server that hangs [30]."),
    ] = None,
    listen: Annotated[str, typer.Option(help="The address to listen at; by default all of this machine.")] = "0.0.0.0",
    job: Annotated[tuple[int, int, int] | None, typer.Option(hidden=True)] = None,
) -> None:
    """Train with the sites of a federation, which the server's credentials list."""
    from piebald.federation.credentials.provisioning import read
    from piebald.federation.link.supervision import at_work
    from piebald.federation.link.tls import Listener
    from piebald.federation.operate.machine_checks import (
        check_space,
        refuse_crosses,
        server_disks,
        server_machine,
        server_run,
    )

    party, page = read(credentials), page_address(options)
    options.start_log()
    Listener.host = listen
    if expiry is not None and not standby:
        raise SettingError(
            f"--expiry {expiry:g} is how long a server may give no sign of life before one that stands by takes over: "
            "add --standby, or leave it out"
        )
    if job is not None:  # the process of an experiment of the queue
        return serve_job(credentials, *job, options)
    if file is None:
        if (options.sets, options.out, options.start_from) != (None, None, None):
            raise SettingError(
                "--set, --out and --from are about one experiment: name its file, or give them to piebald queue add"
            )
        if check:
            with locked(credentials):
                raise typer.Exit(_print_checks([*server_machine(party), check_space(credentials)]))
        return serve_queue(credentials, page, options, (expiry or _EXPIRY) if standby else None)
    if standby:
        raise SettingError("--standby is for a server that takes experiments from its queue: leave the file out")
    if options.plugins is not None:
        raise SettingError(
            "--plugin is for experiments of the queue: leave it out, or add the file with piebald queue add"
        )
    flags = federation_flags(
        file, with_sites(file, options.sets, party.sites()), credentials=str(credentials.resolve())
    )
    if check:
        with locked(credentials), at_work("reading the experiment", tell=_to_terminal):
            checks = [*server_machine(party), *server_run(party, file, flags, options.out)]
            raise typer.Exit(_print_checks([*checks, *server_disks(credentials, Path(options.out or "runs"))]))
    settings = app.load_settings(file, options, flags)
    folder = app.out_folder(settings)
    with serving(credentials, folder, page) as callbacks:
        refuse_crosses(
            [*server_machine(party), *server_disks(credentials, folder)], f"piebald server {credentials} {file} --check"
        )
        carry_out(settings, file, options, callbacks, folder)


@app.command(*app.LOG, *app.PAGE)
def client(
    options: app.SharedOptions,
    credentials: Annotated[Path, _CREDENTIALS],
    data: Annotated[
        str | None, typer.Option("--data", help="The site's rows: a file, a folder, my_data.py:load, or mylab:load.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="The column of a table to predict.")] = None,
    client: Annotated[
        str | None, typer.Option(help="The column that says whose a row is; the site takes those with its own name.")
    ] = None,
    stay: Annotated[bool, typer.Option("--stay", help="Wait for another run when one has ended.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Look whether this site can take part, print a table, and end.")
    ] = False,
    slot: Annotated[int, typer.Option(hidden=True)] = 0,
    with_parent: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run a site of a federation until the run has ended."""
    from piebald.federation.link.supervision import at_work
    from piebald.federation.operate.machine_checks import refuse_crosses
    from piebald.federation.site.site_check import site_machine
    from piebald.federation.site.site_process import site_work

    work, code = site_work(credentials, data, target, client=client, slot=slot), 0
    with locked(work.credentials.folder):
        if check:
            code = _checked(work, options)[1]
        else:
            options.start_log()
            with at_work(f"reading the rows {work.source}"):
                refuse_crosses(site_machine(work), f"piebald client {credentials} --check")
            own = {"--data": data, "--target": target, "--client": client}
            words = [word for name, value in own.items() if value is not None for word in (name, value)]
            code = _take_part(work, stay, with_parent, [*_log_words(options), *words], options)
    _end(code)


@app.command(*app.LOG, *app.PAGE, name="up", group=_site)
def site_up(
    options: app.SharedOptions,
    kit: Annotated[Path, typer.Argument(metavar="KIT", help="The archive of this site, or the folder made from it.")],
    into: Annotated[Path | None, typer.Option(help="The folder to unpack it to; beside the kit by default.")] = None,
    data: Annotated[str | None, typer.Option("--data", help="The site's rows, where site.toml names none.")] = None,
    target: Annotated[str | None, typer.Option(help="The column of a table to predict.")] = None,
    with_parent: Annotated[int | None, typer.Option(hidden=True)] = None,
    plugin_file: Annotated[list[Path] | None, typer.Option(hidden=True)] = None,
) -> None:
    """Unpack a site's kit, look whether it can take part, and take part until it is stopped."""
    from piebald.core.references import list_file
    from piebald.federation.credentials.provisioning import unpack_kit
    from piebald.federation.site.site_process import site_work

    folder = unpack_kit(kit, into)
    work = site_work(folder, data, target, local=with_parent is not None)
    for file in plugin_file or ():
        list_file(file)
    with locked(folder):
        checks, _ = _checked(work, options)
        crosses = [check.what for check in checks if check.fine is False]
        # that of a trial hears from the site itself why it refuses
        if with_parent is None and {*crosses} - {"server"}:
            _end(2)
        soon = " as soon as the server answers, for which it waits" if "server" in crosses else ""
        print(f"\n{folder} takes part{soon}; Ctrl-C ends it", flush=True)
        options.start_log()
        own = {"--data": data, "--target": target}
        words = [word for name, value in own.items() if value is not None for word in (name, value)]
        code = _take_part(work, with_parent is None, with_parent, [*_log_words(options), *words], options)
    _end(code)


def _log_words(options: app.SharedOptions) -> list[str]:
    return ["--log-level", options.log_level, *(["--log-json"] if options.log_json else [])]


def _take_part(work: SiteWork, stays: bool, parent: int | None, words: list[str], options: app.SharedOptions) -> int:
    """Run a site as `join` does, print why it ended, and return the exit code.

    Args:
        work, stays, parent: as of `join`.
        options: with the address of the site's own page.
        words: options of the processes of its further runs, which only a site that stays has.
    """
    from piebald.federation.operate.page_server import serving_page
    from piebald.federation.site.site_process import OtherSlots, join

    base = [sys.executable, "-P", "-m", "piebald.cli", "client", str(work.credentials.folder), "--stay", *words]
    slots = range(1, work.settings.policy.jobs.at_once) if stays and parent is None else ()
    page = page_address(options)
    shows = nullcontext() if page is None else serving_page(page, work.credentials.folder)
    with shows, OtherSlots([[*base, "--slot", str(slot)] for slot in slots]):
        ended = join(work, stays, parent)
    print(printable(ended))
    return 130 if ended == "stopped" else 0


def _checked(work: SiteWork, options: app.SharedOptions) -> tuple[list[Check], int]:
    """Look whether a site can take part, print what was found, and return it with the exit code."""
    from piebald.federation.link.supervision import at_work
    from piebald.federation.site.gate import declared, stated_rows
    from piebald.federation.site.site_check import check_site
    from piebald.federation.site.site_rows import SPLITS

    replace(options, log_level="error").start_log()
    policy = work.settings.policy
    lines, title = declared(policy), "What may leave this site, by its policy:"

    def met(run: SiteClient) -> None:
        nonlocal lines, title
        rows = {split: len(run.clients.rows(run.client, split)) for split in SPLITS}
        lines, title = declared(policy, run.work, stated_rows(run.work, rows)), "What leaves this site in this run:"

    with at_work(f"reading the rows {work.source}", tell=_to_terminal):
        checks = check_site(work, met=met)
    code = _print_checks(checks)
    print(f"\n{title}\n")
    app.print_table(ResultTable([line.cells for line in lines], ("release", "about", "mechanism", "when")))
    return checks, code


def _end(code: int) -> None:
    """End the process at once: threads of a connection may still wait for the other end."""
    sys.stdout.flush()
    os._exit(code)


@app.command("sets", "out", *app.LOG, "as_json", "quiet", lists_keys=True)
def up(
    options: app.SharedOptions,
    file: Annotated[Path | None, typer.Argument(help="A TOML file; the built-in experiment without one.")] = None,
    local: Annotated[int | None, typer.Option("--local", help="Sites on this machine, as many as clients.")] = None,
) -> None:
    """Try a federation on this machine: credentials, a server, and a process for each client.

    What each site prints, as piebald site up does, stands beside the server's log, after the site's name.
    """
    from piebald.experiments.file import ExperimentSettings
    from piebald.federation.operate.logs import StepLog

    flags = federation_flags(file, options.sets)
    if local is not None:
        # before the user's own settings, which come later and so prevail
        flags = [f"partition.clients={local}", *flags] if file is None else flags
        count = len(ExperimentSettings.load(file, flags).divisions()[0].plan().clients)
        if count != local:
            raise SettingError(
                f"the experiment has {count} clients, --local says {local}: give the same number, or leave it out"
            )
    (replace(options, log_level="warning") if options.quiet else options).start_log()
    settings = app.load_settings(file, options, flags)
    settings = settings.model_copy(update={"out": str(app.out_folder(settings))})
    shows = options.progress and options.log_level in ("debug", "info")
    with relayed(Path(str(settings.out)), partial(print, file=sys.stderr, flush=True)) if shows else nullcontext():
        carry_out(settings, file, options, [StepLog()])


@app.command(*app.PAGE, "as_json", "wide")
def status(
    options: app.SharedOptions,
    folder: Annotated[
        Path, typer.Argument(metavar="RUN|CREDENTIALS", help="A run folder, or a folder of credentials.")
    ],
    check: Annotated[
        bool, typer.Option("--check", help="Only look whether it runs and gives signs of life; exit code 2 if not.")
    ] = False,
) -> None:
    """Show which sites are present, when they were heard last, and what they do."""
    from piebald.federation.operate.remote import is_person
    from piebald.federation.operate.status import check_health, read_status, status_values

    page = page_address(options)
    if is_person(folder):
        return print_seen(folder, options) if page is None else serve_person(folder, page)
    if page is not None:
        raise SettingError(
            f"--status-port is for the credentials of a person, and {folder} holds none: give it to the server or site"
        )
    if check:
        return check_health(folder)
    if options.as_json:
        return app.print_json(status_values(folder))
    values = read_status(folder)
    sites = values.pop("sites", [])
    app.print_facts({"until" if name == "ends" else name: v for name, v in values.items() if v not in (None, [])})
    if sites:
        names = sorted(sites[0], key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))
        print()
        app.print_table(ResultTable(sites, names), options.wide)


@app.command()
def stop(
    _: app.SharedOptions,
    folder: Annotated[
        Path, typer.Argument(metavar="RUN|CREDENTIALS", help="A run folder, or a folder of credentials.")
    ],
    wait: Annotated[float, typer.Option(help="Seconds to wait for it to end.")] = 30.0,
) -> None:
    """Stop a run, a server or a site cleanly, also one in a container; finished rounds and tasks are saved."""
    from piebald.federation.operate.status import is_visible, running_process
    from piebald.storage.lock import ask_to_stop

    if not folder.is_dir():
        raise SettingError(f"there is no folder {shown(str(folder))}: give a run folder, or a folder of credentials")
    pid = running_process(folder)
    if pid is None:
        return print(f"nothing is running in {folder}")
    if is_visible(pid, folder):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(pid, signal.SIGTERM)
    elif running_process(folder) == pid:
        ask_to_stop(folder)  # in a container its number is a stranger's here, so it looks for a file
    until = time.monotonic() + wait
    # by its number: a service may have started another process meanwhile
    while running_process(folder) == pid:
        if time.monotonic() > until:
            raise SettingError(
                f"process {pid}, which may be in a container or on another machine, has not ended within {wait:g} "
                "seconds: it has been asked to, so wait longer, or inspect it there"
            )
        time.sleep(0.1)
    print(f"stopped process {pid}")


def _to_terminal(line: str) -> None:
    print(printable(line), file=sys.stderr, flush=True)


def _print_checks(checks: Sequence[Check]) -> int:
    """Print a table of ticks and crosses, and return the exit code."""
    rows = [(check.mark, check.what, check.told) for check in checks]
    app.print_table(ResultTable(rows, ("mark", "what", "told"), headed=False))
    return 2 if any(check.fine is False for check in checks) else 0


_FIRST = ("site", "state", "heard", "working", "finished", "rows", "refused", "seconds", "staleness")  # if not --wide
