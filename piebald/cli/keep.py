"""Commands that keep runs and federations for months: backup, restore, approve, audit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from piebald.cli.app import SharedOptions, check_run, command
from piebald.cli.printing import print_facts, print_json, print_result


@command("as_json")
def backup(
    options: SharedOptions,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder; the run may go on meanwhile.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A new file, which only you can read.")],
) -> None:
    """Write a run folder into one file, without stopping the run."""
    check_run(run)
    from piebald.storage.backup import backup

    summary = backup(run, file)
    print_result(options, summary, f"{summary['file']} holds {run} as of server step {summary['step']}")


@command("as_json")
def restore(
    options: SharedOptions,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that piebald backup wrote.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder that does not exist.")],
) -> None:
    """Make a run folder from a backup; piebald resume goes on from there."""
    from piebald.storage.backup import restore

    summary = restore(file, folder)
    step = summary["step"]
    line = f"{folder} holds the run as of server step {step}; go on with: piebald resume {folder}"
    print_result(options, summary, line)


@command("as_json")
def approve(
    options: SharedOptions,
    credentials: Annotated[Path, typer.Argument(metavar="CREDENTIALS", help="The credentials of a site.")],
    digest: Annotated[str | None, typer.Argument(help="The digest of the terms to approve; shown without it.")] = None,
) -> None:
    """Show the experiment that waits for approval at a site, or approve it."""
    from piebald.federation.credentials.provisioning import read
    from piebald.federation.site import consent

    # says what is wrong with the folder, where `consent` would only find nothing in it
    read(credentials)
    if digest is not None:
        consent.approve(credentials, digest)
        return print_result(options, {"approved": digest}, f"approved {digest}")
    waiting = consent.pending(credentials)
    if options.as_json:
        return print_json({"pending": waiting})
    if waiting is None:
        return print(f"nothing waits for approval in {credentials}")
    waiting["questions"] = waiting["questions"] or "none: nothing is answered, sites only train"
    print_facts({name: value for name, value in waiting.items() if value})
    print(f"\napprove it with: piebald approve {credentials} {waiting['terms']}")


@command("as_json")
def audit(
    options: SharedOptions,
    folder: Annotated[
        Path, typer.Argument(metavar="RUN|CREDENTIALS", help="A run folder, or a folder of credentials.")
    ],
    head: Annotated[str | None, typer.Option(help="A head that was noted before: it must still be in the log.")] = None,
    against: Annotated[
        Path | None, typer.Option(help="The credentials of the other side: nothing that it tells of may be missing.")
    ] = None,
    archive: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where rotated files of the log were moved to.")
    ] = None,
) -> None:
    """Check the chain of a party's audit log: no line was changed, removed, added or moved."""
    from piebald.federation.operate.audit_check import check_log

    path, log, agrees = check_log(folder, head, against, archive)
    facts = {"log": str(path), "lines": log.lines, "first": log.first, "last": log.last, "head": log.head}
    if options.as_json:
        return print_json({**facts, "agrees": agrees})
    print_facts(facts)
    if not log.lines:
        return print(f"\nNothing has been written yet: {path.parent} has not taken part in anything.")
    print(f"\nThe chain holds{', and agrees with ' if agrees else ''}{'; '.join(agrees)}.")
    if head is None and against is None:
        print(
            "Whoever can write all of this folder could make such a log: compare the head with one kept elsewhere "
            "(--head), or the log with that of the other side (--against)."
        )
