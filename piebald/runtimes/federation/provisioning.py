"""Credentials: one folder a party, with its certificate, its key and what it may settle itself.

    <folder>/
      federation.toml        the description that the credentials were made from
      authority/             the authority's own key: it makes further credentials, and belongs in a safe
      server/, site-1/, ...  credentials: authority.pem, certificate.pem, key.pem, credentials.json, and for sites site.toml

Keys are made in their credentials and are never anywhere else; files that hold or settle anything are readable by their owner
alone (mode 0600).
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from piebald.errors import SettingError
from piebald.runtimes.federation.flare_link import INSTALL, SERVER

KIT = "credentials.json"
SITES = "sites.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
_EARLY = timedelta(minutes=5)  # clocks differ


class Description(BaseModel):
    """What `federation.toml` says.

    Attributes:
        name: of the federation, a word.
        host, port: where sites find the server.
        days: how long certificates are valid.
        sites: names of the sites; their order numbers the clients.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str = "federation"
    host: str = "localhost"
    port: int = Field(default=8400, ge=1, le=65535)
    days: int = Field(default=365, ge=1, le=3650)
    sites: list[str] = Field(min_length=1, max_length=1000)


@dataclass(frozen=True, slots=True)
class Credentials:
    """A party's credentials.

    Attributes:
        folder: where it is.
        federation: the federation's name.
        party: the party's name.
        host, port: where the server is.
        expires: when the certificate ends.
    """

    folder: Path
    federation: str
    party: str
    host: str
    port: int
    expires: datetime

    def sites(self) -> list[str]:
        """The sites, as the server's credentials lists them now; none in a site's credentials."""
        try:
            return [str(name) for name in json.loads((self.folder / SITES).read_text())]
        except FileNotFoundError:
            return []


def describe(path: Path) -> Description:
    """Read a federation's description.

    Raises:
        SettingError: it cannot be read, or something in it cannot be.
    """
    try:
        made = Description.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise SettingError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from None
    except tomllib.TOMLDecodeError as error:
        raise SettingError(f"{path} is not TOML: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(word) for word in first["loc"])
        raise SettingError(
            f"{path}: {where}: {first['msg'].lower()}, got {first['input']!r}; "
            "it takes name, host, port, days and sites"
        ) from None
    _check_names(path, made.sites)
    return made


def _check_names(path: Path, sites: Sequence[str]) -> None:
    for name in sites:
        if not _NAME.fullmatch(name) or name in (SERVER, "authority"):
            raise SettingError(
                f"{path}: sites are named by letters, digits, - and _, at most 63, and not server, got {name!r}"
            )
    if len({name.lower() for name in sites}) < len(sites):
        raise SettingError(f"{path}: two sites have the same name: give each one of its own")


def provision(description: Description, out: Path) -> list[Credentials]:
    """Make the sets of credentials that are not there yet, and let those that are there be.

    Returns:
        The new ones.

    Raises:
        SettingError: the folder holds credentials of another federation.
    """
    try:
        from piebald.runtimes.federation.certificates import Authority
    except ImportError:
        raise SettingError(INSTALL) from None
    _check_same(description, out)
    out.mkdir(parents=True, exist_ok=True)
    authority = Authority.at(out / "authority", description.name, description.days)
    made = []
    for party in (SERVER, *description.sites):
        folder = out / party
        if (folder / KIT).exists():
            continue
        folder.mkdir(mode=0o700, exist_ok=True)
        expires = authority.issue(folder, party, description.host, description.days)
        about = {"federation": description.name, "party": party, "host": description.host, "port": description.port}
        if party != SERVER:
            private(folder / "site.toml", _SITE_TOML)
        private(
            folder / KIT, json.dumps({**about, "expires": expires.isoformat()}) + "\n"
        )  # last: the credentials is whole
        made.append(read(folder))
    private(out / SERVER / SITES, json.dumps(list(description.sites)) + "\n")
    private(out / "federation.json", json.dumps(description.model_dump()) + "\n")
    return made


def _check_same(description: Description, out: Path) -> None:
    """Refuse to mix two federations, or to renumber clients."""
    try:
        before = json.loads((out / "federation.json").read_text())
    except FileNotFoundError:
        if out.exists() and any(out.iterdir()):
            raise SettingError(f"{out} holds something that is no credentials: choose a new folder") from None
        return
    now = description.model_dump()
    for name in ("name", "host", "port"):
        if before[name] != now[name]:
            raise SettingError(
                f"the credentials in {out} were made with {name} = {before[name]!r}, now it is {now[name]!r}: "
                "choose a new folder, since every site would need a new credentials"
            )
    if now["sites"][: len(before["sites"])] != before["sites"]:
        raise SettingError(
            f"the credentials in {out} are of the sites {', '.join(before['sites'])}: list these first, as they are, and new "
            "ones behind them, since the order numbers the clients"
        )


def read(folder: Path) -> Credentials:
    """A credentials from its folder.

    Raises:
        SettingError: there is none, or its certificate has ended.
    """
    try:
        about: dict[str, Any] = json.loads((folder / KIT).read_text())
        credentials = Credentials(
            folder.resolve(), about["federation"], about["party"], about["host"], int(about["port"]),
            datetime.fromisoformat(about["expires"]),
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError):
        raise SettingError(f"{str(folder)!r} is no credentials: give a folder that piebald provision made") from None
    if credentials.expires < datetime.now(UTC):
        raise SettingError(
            f"the certificate of {credentials.party} in {folder} ended on {credentials.expires:%Y-%m-%d}: make new credentials with "
            "piebald provision, into a new folder"
        )
    if loose := [name for name in ("key.pem",) if (folder / name).stat().st_mode & 0o077]:
        raise SettingError(f"{folder / loose[0]} can be read by others: chmod 600 {folder / loose[0]}")
    return credentials


def private(path: Path, text: str | bytes, lasting: bool = True) -> None:
    """Write a file that its owner alone can read, whole or not at all; `lasting`: also if the power fails."""
    data = text.encode() if isinstance(text, str) else text
    aside = path.with_name(path.name + ".part")
    handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        if lasting:
            os.fsync(file.fileno())
    os.replace(aside, path)


_SITE_TOML = """\
# What this site settles itself.  Nothing in it leaves the site.

# device = "cpu"          # or "cuda"

# [data]                  # without it the rows are those that the experiment's own partition gives this site
# source = "patients.csv" # .csv, .parquet, .npz (arrays x and y), a folder of images, or "my_data.py:load"
# target = "diagnosis"    # a table's column to predict
# test = 0.2              # share of the rows that is for testing only
# validation = 0.1        # share of the rows that chooses

# [policy]                 # what this site agrees to at the most; other recipes are refused
# private = ["classifier"]      # layers that must stay here
# clip = 1.0                    # updates are clipped to at most this norm
# noise = 0.5                   # and get noise of at least so many clips, here, from numbers that only this site knows
# uploads = ["model"]           # what an update may carry
# questions = ["evaluate"]      # what may be asked beside training
# secure_aggregation = 3                # updates leave only inside secure aggregation of at least so many clients
"""
