"""Checks of a party's audit log: its chain, its end, and the other files that tell of lines that it must have."""

from __future__ import annotations

import json
from pathlib import Path

from piebald.core.errors import RunFolderError, SettingError
from piebald.federation.credentials.audit import FILE, HEAD, Verified, knows, missing, received, verify
from piebald.federation.credentials.provisioning import read
from piebald.federation.link.messaging import SERVER
from piebald.federation.operate.status import credentials_folder, run_of, was_started, written_head
from piebald.privacy.ledger import FOLDER, Head, log_heads
from piebald.storage.store import RunStore


def check_log(
    folder: Path, head: str | None = None, against: Path | None = None, archive: Path | None = None
) -> tuple[Path, Verified, list[str]]:
    """Check the audit log of a party.

    Args:
        folder: a party's credentials, or the run folder of a federation for those of its server.
        head: the digest of a line that was noted before.
        against: the credentials of the other side.
        archive: where rotated files have been moved to.

    Returns:
        The log, what its chain shows, and what else agrees with it, in words.

    Raises:
        SettingError: the chain does not hold, or something else tells of lines that the log has not.
    """
    credentials = credentials_folder(folder)
    path, agrees = credentials / FILE, list[str]()
    run = folder if (folder / "run.db").exists() else run_of(credentials)
    serves = read(credentials, connects=False).party == SERVER
    results = _results(run) if run is not None and serves else []  # before the log, which may grow meanwhile
    verified = verify(path, archive)
    if not verified.lines and was_started(credentials):
        raise SettingError(f"{path} is empty or gone, and {credentials} has run: restore it from a backup")
    if (last := written_head(credentials)) is not None:
        _check_status(path, Head(*last), archive)
        agrees.append("the party's status, which tells of no further line")
    if verified.lines and head is None and against is None:
        _check_heads(path, verified)
    if verified.noted:
        agrees.append(f"{HEAD} beside it, which tells of no further line")
    if not serves and (heads := _ledger_heads(credentials)):
        if not knows(path, [head.digest for head in heads], archive):
            raise SettingError(
                f"{path} is shorter than the ledger of the site's rows, which was written when the log had line "
                f"{max(heads).line}, or was written anew: restore it from a backup that is newer"
            )
        agrees.append("the ledger of the site's rows, each of whose notes it has")
    if run is not None and results:
        _check_results(path, run, results, archive)
        agrees.append(f"{run}, whose {len(results)} counted results it has")
    if head is not None:
        if not knows(path, [head], archive):
            raise SettingError(f"{path} has no line with digest {head}: it was cut at its end, or written anew")
        agrees.append("the head that was noted before")
    if against is not None:
        other_log = credentials_folder(against) / FILE
        if gaps := missing(path, other_log, archive):
            rest = f", and {len(gaps) - 1} more" if len(gaps) > 1 else ""
            raise SettingError(f"{gaps[0]}{rest}: one of the two logs was cut or written anew")
        agrees.append(f"{other_log}, all of whose results it has")
    return path, verified, agrees


def _check_status(path: Path, head: Head, archive: Path | None) -> None:
    """Refuse a log without the line that the party's status tells of."""
    lines = verify(path, archive).lines  # anew: it may have grown meanwhile
    if head.line > lines:
        raise SettingError(
            f"{path} has lost its end: it has {lines} lines, and the party's status tells of line {head.line}: "
            "restore it from a backup, or compare it with the other side (--against)"
        )
    if head.line and not knows(path, [head.digest], archive):
        raise SettingError(f"{path} was written anew: its line {head.line} is not the one that the status tells of")


def _check_results(path: Path, run: Path, results: list[tuple[str, int]], archive: Path | None) -> None:
    """Refuse a log without some results that a run has counted, each a site and the number of its task."""
    recorded = received(path, archive)
    lost = [result for result in results if result not in recorded]
    if lost:
        raise SettingError(
            f"{path} tells of {len(results) - len(lost)} of {len(results)} results that the run in {run} has "
            f"counted, not of task {lost[0][1]}: it was cut or written anew, or is not that of this run"
        )


def _ledger_heads(credentials: Path) -> list[Head]:
    """Return the ends that the ledger of a site's rows knows its audit log to have had, in all copies."""
    from piebald.federation.site.site_process import SiteSettings
    from piebald.federation.site.site_rows import place_of

    data = SiteSettings.load(credentials / "site.toml").data
    place = None if data is None else place_of(data, credentials)
    folders = [credentials / "state", *([] if place is None else [place / FOLDER])]
    return [head for folder in folders for head in log_heads(folder, read(credentials, connects=False).log)]


def _check_heads(path: Path, verified: Verified) -> None:
    """Refuse a log without its head, or a part of one: lines at the end may be gone with it."""
    ask = "compare the log with a head kept elsewhere (--head), or with the other side (--against)"
    if not verified.noted:
        raise SettingError(
            f"{HEAD} beside {path} is gone, and each line writes it, so lines at the end may be gone: {ask}"
        )
    if verified.headless is not None:
        raise SettingError(
            f"line {verified.headless} of {path} was written where {HEAD} was gone, so lines before it may be gone: "
            f"{ask}"
        )


def _results(run: Path) -> list[tuple[str, int]]:
    """Return the trainings that a run has counted: the number under which sites know the run, and the task's.

    Nothing where the run has no checkpoint yet: it begins anew then, under another number.
    """
    try:
        with RunStore.open_read_only(run) as store:
            checkpoints = store.query("SELECT values_json FROM checkpoint ORDER BY version DESC LIMIT 1")
            rows = store.query(
                "SELECT id FROM result WHERE kind = 'train' AND status = 'ok' AND client >= 0 ORDER BY id"
            )
        number = str(json.loads(checkpoints[0]["values_json"])["runtime"]["run"])
    except (RunFolderError, LookupError, ValueError, TypeError):
        return []
    return [(number, int(row["id"])) for row in rows]
