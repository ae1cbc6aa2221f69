"""From raw tables to a transfer: the rows that both have are named by a match of their keys, and all is checked before.

The table with the names lies in the run folder, so a run that goes on, or a command that is given again, matches no
second time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from piebald.core.errors import SettingError, unknown
from piebald.data.clients.owner import read_owners, records_of
from piebald.data.clients.row_identity import SHARED_ID
from piebald.federation.credentials.provisioning import read as read_credentials
from piebald.vertical.chunks import exposures, warning
from piebald.vertical.key_matching import begun, match, sodium, write_named
from piebald.vertical.match_keys import keys_of
from piebald.vertical.party_data import PartyHolding, load_one
from piebald.vertical.party_store import is_transfer, private_folder
from piebald.vertical.protocol import Role
from piebald.vertical.transfer_settings import PartyFile, PartyFiles, TransferSettings


def named(
    settings: TransferSettings, roles: Sequence[Role], columns: Sequence[str], kinds: Sequence[str], folder: Path,
    tell: Callable[[str], None] = print,
) -> TransferSettings:  # fmt: skip
    """Return settings whose tables have a column `shared_id`, by a match of keys.

    Args:
        settings: settings with the raw tables as files.
        roles: the party that is here, which meets the other one, or both, whose keys are compared on this machine.
        columns, kinds: of the key, as of `match`.
        folder: the run folder, for the tables.
        tell: called with a sentence about empty and repeated keys.

    Raises:
        SettingError: as for `match`; or no key is in both tables, or the folder has a table that is no part of its run.
        RuntimeFault: as for `match`; the same command starts the match again.
    """
    # from the root: the run is gone on with in any folder
    paths = {role: folder.resolve() / f"{role}.csv" for role in roles}
    files = {role: _file(settings, role) for role in roles}
    owners = {role: read_owners(Path(files[role].path)) for role in roles}
    if is_transfer(folder) and all(path.exists() for path in paths.values()):
        for role, path in paths.items():
            if not np.array_equal(records_of(owners[role], role), records_of(read_owners(path), role)):
                raise SettingError(
                    f"{path} was matched from other rows than those of {files[role].path}: give another folder with "
                    "--out, where the match is made again"
                )
    else:
        for path in paths.values():  # a table of somebody else's must be neither trained on nor replaced
            if not is_transfer(folder) and (path.exists() or path.is_symlink()) and not begun(path).exists():
                raise SettingError(
                    f"{path} is there, and {folder} holds no transfer that it was matched for: remove it, or give "
                    "another folder with --out"
                )
        keys = {role: keys_of(owners[role][0].frame, columns, kinds) for role in roles}
        if len(roles) == 1:
            runtime = settings.runtime
            if runtime.credentials is None:
                raise SettingError("a party alone needs credentials: --set runtime.credentials=FOLDER")
            private_folder(folder)
            names = match(
                files[roles[0]].path,
                columns,
                runtime.credentials,
                paths[roles[0]],
                kinds=kinds,
                partner=runtime.partner,
                timeout=runtime.timeout,
                tell=tell,
            ).names
            if not names:
                paths[roles[0]].unlink(missing_ok=True)
        else:
            both = sorted(set.intersection(*map(set, keys.values())) - {""})
            names = {key: str(number) for number, key in enumerate(both, 1)}
        if not names:
            raise SettingError(
                f"no key of the columns {', '.join(columns)} is in both tables: name the same columns at both parties "
                "with --key, in the same order, and how they are written alike with --kind"
            )
        private_folder(folder)
        for role in roles if len(roles) > 1 else ():  # a match of two has written its own
            write_named(owners[role][0].frame, [names.get(key, "") for key in keys[role]], paths[role])
    changes: dict[str, PartyFile] = {role: _features(files[role], columns, paths[role], SHARED_ID) for role in roles}
    return settings.model_copy(update={"files": (settings.files or PartyFiles()).model_copy(update=changes)})


def check(
    settings: TransferSettings, roles: Sequence[Role], columns: Sequence[str] = (), kinds: Sequence[str] = ()
) -> dict[str, str]:
    """Return what each party would bring to a transfer, before anybody is met.

    Args:
        settings, roles: as of `named`.
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
        tried(lambda: read_credentials(Path(settings.runtime.credentials or "no folder of credentials")))
        if columns:
            tried(sodium)
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
    file: PartyFile | None = getattr(settings.files, role, None)
    if file is None:
        raise SettingError(f"files.{role} is missing: give path and key of the {role}'s table under [files.{role}]")
    return file


def _features(file: PartyFile, columns: Sequence[str], table: Path, key: str) -> PartyFile:
    """Return a file with another table and key, whose features are all columns but key, label and names of rows."""
    names = read_owners(table)[0].columns
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
