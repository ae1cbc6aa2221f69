"""From raw tables to a transfer: the rows that both have are named by a match of their keys, and all is checked before.

The table with the names lies in the run folder, so a run that goes on, or a command that is given again, matches no
second time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from piebald.core.errors import SettingError, unknown
from piebald.data.clients.owner import read_owners, records_of
from piebald.data.clients.row_identity import SHARED_ID
from piebald.federation.credentials.provisioning import Credentials
from piebald.vertical.chunks import exposures, warning
from piebald.vertical.key_matching import KeyMatch, begun, ristretto, write_named
from piebald.vertical.match_keys import keys_of
from piebald.vertical.party_data import PartyHolding, load_one
from piebald.vertical.party_store import is_transfer, private_folder
from piebald.vertical.protocol import ROLES, PartySession, Role
from piebald.vertical.spelling import nearest_here, spellings
from piebald.vertical.transfer_settings import PartyFile, PartyFiles, TransferSettings


def named(settings: TransferSettings, columns: Sequence[str], kinds: Sequence[str], folder: Path) -> TransferSettings:
    """Return settings whose tables have a column `shared_id`, with the keys of both compared on this machine.

    Args:
        settings: settings with both raw tables as files.
        columns, kinds: of the key, as of `match`.
        folder: the run folder, for the tables.

    Raises:
        SettingError: as for `match`; or no key is in both tables, or the folder has a table that is no part of its run.
    """
    tables = {role: _table(settings, role, columns, folder) for role in ROLES}
    if not all(table.exists for table in tables.values()):
        frames = {role: read_owners(Path(_file(settings, role).path))[0].frame for role in ROLES}
        keys = {role: keys_of(frames[role], columns, kinds) for role in ROLES}
        names = nearest_here([{key: spellings(key, kinds) for key in keys[role] if key} for role in ROLES])
        if not names[0]:
            raise _nothing_shared(columns)
        private_folder(folder)
        for role, own in zip(ROLES, names, strict=True):
            write_named(frames[role], [own.get(key, "") for key in keys[role]], Path(tables[role].file.path))
    return _with_files(settings, {role: table.file for role, table in tables.items()})


class RawTable:
    """A party's raw table in a transfer: the rows that both have are named by a match, over the link of the run.

    Args:
        settings: settings with the raw table as file.
        role: the party.
        columns, kinds: of the key, as of `match`.
        credentials: the party's.
        folder: the run folder, for the table with the names.
        tell: called with a sentence about empty and repeated keys.

    Attributes:
        settings: settings with the named table as file.
        is_named: whether that is there already, from an earlier match.

    Raises:
        SettingError: as for `named`.
    """

    def __init__(
        self, settings: TransferSettings, role: Role, columns: Sequence[str], kinds: Sequence[str],
        credentials: Credentials, folder: Path, tell: Callable[[str], None],
    ) -> None:  # fmt: skip
        table, raw = _table(settings, role, columns, folder), _file(settings, role).path
        self.settings, self.is_named = _with_files(settings, {role: table.file}), table.exists
        self._columns, self._path = columns, Path(table.file.path)
        self._match = KeyMatch(Path(raw), columns, kinds, credentials, self._path, tell=tell)

    def match(self, session: PartySession) -> None:
        """Name the rows, unless both parties have done so; either may have been stopped at any message before."""
        if not both_named(session, self.settings, self._match.steps) and not self._match.run(session).names:
            self._path.unlink(missing_ok=True)
            self.end()
            raise _nothing_shared(self._columns)

    def end(self) -> None:
        """Forget what the match was drawn from, once the run goes on with its result."""
        self._match.end()


def both_named(session: PartySession, settings: TransferSettings, steps: tuple[int, int] = (1, 1)) -> int:
    """Return whether both parties of a transfer from raw tables have named their rows: 1, or 0 for a match to come."""
    return session.handshake({"rows": settings.agreed()}, steps)


def was_raw(settings: TransferSettings, role: Role, folder: Path) -> bool:
    """Return whether a party's table was named by a match of this run, as where it is resumed."""
    file = getattr(settings.files, role, None)
    return file is not None and Path(file.path) == _named_path(folder, role)


def _named_path(folder: Path, role: Role) -> Path:
    return folder.resolve() / f"{role}.csv"  # from the root: the run is gone on with in any folder


@dataclass(frozen=True, slots=True)
class _NamedTable:
    file: PartyFile
    exists: bool


def _table(settings: TransferSettings, role: Role, columns: Sequence[str], folder: Path) -> _NamedTable:
    """Return a party's file with the names of a match, and whether a run has it already.

    Raises:
        SettingError: what lies in its place is no part of a run, or was matched from other rows.
    """
    raw, path = _file(settings, role), _named_path(folder, role)
    exists = is_transfer(folder) and path.exists()
    tables = (Path(raw.path), path) if exists else ()
    if len({records_of(read_owners(table), role).tobytes() for table in tables}) > 1:
        raise SettingError(
            f"{path} was matched from other rows than those of {raw.path}: give another folder with --out, where the "
            "match is made again"
        )
    # a table of somebody else's must be neither trained on nor replaced
    if not is_transfer(folder) and (path.exists() or path.is_symlink()) and not begun(path).exists():
        raise SettingError(
            f"{path} is there, and {folder} holds no transfer that it was matched for: remove it, or give another "
            "folder with --out"
        )
    return _NamedTable(_features(raw, columns, path, SHARED_ID), exists)


def _with_files(settings: TransferSettings, changes: dict[str, PartyFile]) -> TransferSettings:
    return settings.model_copy(update={"files": (settings.files or PartyFiles()).model_copy(update=changes)})


def _nothing_shared(columns: Sequence[str]) -> SettingError:
    return SettingError(
        f"no key of the columns {', '.join(columns)} is in both tables: name the same columns at both parties with "
        "--key, in the same order, and how they are written alike with --kind"
    )


def check(
    settings: TransferSettings, roles: Sequence[Role], columns: Sequence[str] = (), kinds: Sequence[str] = ()
) -> dict[str, str]:
    """Return what each party would bring to a transfer, before anybody is met.

    Args:
        settings: settings with the tables as files.
        roles: the party that is here, or both.
        columns, kinds: of the key of raw tables; none for tables whose rows have their names already.

    Raises:
        SettingError: it could not begin; all that was found is in one sentence.
    """
    facts, problems = dict[str, str](), dict[str, None]()

    def tried(step: Callable[[], object]) -> None:
        try:
            step()
        except SettingError as error:
            problems[str(error)] = None

    if len(roles) == 1:
        tried(settings.runtime.own_credentials)
        if columns:
            tried(ristretto)
    for role in roles:
        tried(lambda role=role: facts.update(_facts(settings, role, columns, kinds)))  # type: ignore[misc]
    if problems:
        raise SettingError("; and ".join(problems))
    return facts


def _facts(settings: TransferSettings, role: Role, columns: Sequence[str], kinds: Sequence[str]) -> dict[str, str]:
    file, test, noise = _file(settings, role), settings.data.test, settings.method.hides_rows
    if not columns:
        held = load_one(PartyFiles(**{role: file}), role, test, settings.seed, noise, settings.method.joint)
        held.check(role, settings)
        told = {f"{role}, of both": f"{len(held.overlap):,} rows"}
        said = warning(role, exposures(role, held, settings))
        return _described(role, held) | told | ({f"{role}, beware": said} if said else {})
    keys = keys_of(read_owners(Path(file.path))[0].frame, columns, kinds)
    raw = _features(file, columns, Path(file.path), columns[0])
    # which rows are held out follows from the match, so nothing can be said of their labels
    raw = raw.model_copy(update={"label": None}) if role == "target" else raw
    held = load_one(PartyFiles(**{role: raw}), role, test, settings.seed, noise)
    return _described(role, held) | {f"{role}, keys": f"{len({*keys} - {''}):,} different, {keys.count(''):,} empty"}


def _described(role: Role, held: PartyHolding) -> dict[str, str]:
    return {f"{role}, table": f"{len(held.x):,} rows to train on, {len(held.features):,} inputs"}


def _file(settings: TransferSettings, role: Role) -> PartyFile:
    return (settings.files or PartyFiles()).of(role)


def _features(file: PartyFile, columns: Sequence[str], table: Path, key: str) -> PartyFile:
    """Return a file with another table and key, whose features are all columns but key, label and names of rows."""
    names = read_owners(Path(file.path))[0].columns
    if file.label is not None and file.label not in names:
        raise unknown(f"column of {file.path} called", file.label, names)
    others = tuple(name for name in names if name not in (*columns, file.label, SHARED_ID))
    changes = {
        "path": str(table),
        "key": key,
        "columns": file.columns or others,
        "rows": str(Path(file.path).resolve()),
    }
    return file.model_copy(update=changes)
