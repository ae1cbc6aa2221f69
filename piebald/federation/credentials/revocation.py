"""Certificates in use: whom the server admits, and warnings before one expires.

The server refuses every certificate that a site was given up to its revocation.

    <server's credentials>/revoked.json   the time of each site's revocation

A certificate that is issued later is accepted again.  The file is read again whenever it changes, so a site can be
revoked while the server runs.
"""

from __future__ import annotations

import json
import logging
import ssl
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509

from piebald.core.errors import SettingError
from piebald.core.files import read_bytes, read_json
from piebald.core.private_files import write_private
from piebald.federation.credentials.party_files import stamp_of

EARLY = timedelta(minutes=5)  # certificates are valid from a little before they are issued, since clocks differ


_FILE = "revoked.json"

log = logging.getLogger("piebald.federation")


def read_revoked(folder: Path) -> dict[str, datetime]:
    """Return the time at which each site was revoked, from the server's credentials.

    Raises:
        SettingError: the list cannot be read, so nobody can tell who is revoked.
    """
    path = folder / _FILE
    try:
        revoked = {str(site): datetime.fromisoformat(at) for site, at in read_json(path).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise SettingError(f"{path} cannot be read: {type(error).__name__}: restore it from a backup") from None
    if any(at.tzinfo is None for at in revoked.values()):
        # it could not be compared with the times in certificates
        raise SettingError(f"{path} has a time without a zone: restore it from a backup")
    return revoked


def write_revoked(folder: Path, sites: list[str]) -> dict[str, datetime]:
    """Add sites to the list, with the present time, and return the whole list."""
    # certificates are dated in whole seconds: one of this very second is revoked as well
    now = datetime.now(UTC).replace(microsecond=0)
    revoked = read_revoked(folder) | dict.fromkeys(sites, now)
    write_private(folder / _FILE, json.dumps({site: at.isoformat() for site, at in sorted(revoked.items())}) + "\n")
    return revoked


EXPIRED = "its certificate expired"  # how a reason begins that a renewed certificate ends


class Admission:
    """Decisions of a running server on who may connect.

    Args:
        folder: the server's credentials.

    Raises:
        SettingError: the list of revoked sites cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stamp = stamp_of(folder / _FILE)  # before it is read: a change in between is seen at the next look
        self._revoked = read_revoked(folder)

    def reject_reason(self, certificate: Any) -> str | None:
        """Return why a party with this certificate (`ssl.SSLSocket.getpeercert`) is not admitted, or None."""
        revoked = self._current().get(name_in(certificate))
        if (ends := ssl.cert_time_to_seconds(certificate["notAfter"])) < time.time():
            return f"{EXPIRED} on {datetime.fromtimestamp(ends, UTC):%Y-%m-%d at %H:%M} UTC"
        # a certificate that was made after the revocation, for a site that is trusted again, is admitted
        issued = ssl.cert_time_to_seconds(certificate["notBefore"]) + EARLY.total_seconds()
        if revoked is not None and issued <= revoked.timestamp():
            return f"its certificate was revoked on {revoked:%Y-%m-%d at %H:%M} UTC"
        return None

    def _current(self) -> dict[str, datetime]:
        """Return the list as it is now; while it cannot be read, the last one that could."""
        if (stamp := stamp_of(self._folder / _FILE)) != self._stamp:
            try:
                self._revoked = read_revoked(self._folder)
            except SettingError:
                return self._revoked  # it is tried again
            self._stamp = stamp
        return self._revoked


def name_in(certificate: Any) -> str:
    """Return the common name in a certificate (`ssl.SSLSocket.getpeercert`)."""
    names = [value for part in certificate["subject"] for kind, value in part if kind == "commonName"]
    return str(names[0]) if names else ""


_SOON = timedelta(days=30)


_SHARE = 5  # of short lives, the last fifth is soon


_PAUSE = 60.0  # seconds between two looks at the file


_DAY = timedelta(days=1)


def certificate_expires(folder: Path) -> datetime | None:
    """Return when the certificate of a party's credentials expires, None while there is none that can be read."""
    try:
        return x509.load_pem_x509_certificate(read_bytes(folder / "certificate.pem")).not_valid_after_utc
    except (OSError, ValueError):
        return None


class ExpiryWatch:
    """Warns once a day that a party's certificate expires soon, and says at once that it has, or that it was renewed.

    Args:
        folder: the party's credentials.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "certificate.pem"
        self._looked, self._stamp = -_PAUSE, (0, 0)
        self._warned: datetime | None = None
        self._known: datetime | None = None
        self._told = False  # that it has expired

    def look(self) -> None:
        """Look at the certificate, if a minute has passed since the last time, or it is another one or has expired."""
        if (stamp := stamp_of(self._path)) is None:  # it is being replaced
            return
        now = datetime.now(UTC)
        due = time.monotonic() >= self._looked + _PAUSE
        if not due and stamp == self._stamp and (self._known is None or self._told or now < self._known):
            return
        self._looked, self._stamp = time.monotonic(), stamp
        try:
            certificate = x509.load_pem_x509_certificate(read_bytes(self._path))
        except (OSError, ValueError):  # it is being replaced
            return
        self.judge(certificate, now)

    def judge(self, certificate: x509.Certificate, now: datetime) -> None:
        """Say what is to be said of a certificate at a time."""
        ends, begins = certificate.not_valid_after_utc, certificate.not_valid_before_utc
        if self._known is not None and ends > self._known:
            log.info("the certificate in %s was renewed: it is valid until %s", self._path, f"{ends:%Y-%m-%d}")
            self._warned = None
        self._known, self._told = ends, ends <= now
        # a certificate of a few days, as in a trial, is not about to expire all its life
        soon = ends - now <= min(_SOON, (ends - begins) / _SHARE)
        # it has expired since the last warning, which a day's pause must not hide
        expired = self._warned is not None and self._warned < ends <= now
        if soon and (self._warned is None or expired or now - self._warned >= _DAY):
            self._warned = now
            if ends <= now:
                log.error(
                    "the certificate in %s expired on %s UTC (this machine's clock says %s), and nobody accepts it: "
                    "make a new one with piebald provision --renew, and copy it here, while this process runs",
                    self._path, f"{ends:%Y-%m-%d at %H:%M}", f"{now:%Y-%m-%d at %H:%M}",
                )  # fmt: skip
                return
            log.warning(
                "the certificate in %s expires on %s, in %d days: make a new one with piebald provision --renew, and "
                "copy it here, while this process runs", self._path, f"{ends:%Y-%m-%d}", max(0, (ends - now).days),
            )  # fmt: skip
