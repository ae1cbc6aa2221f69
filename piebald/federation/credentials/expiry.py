"""Warnings before a certificate expires, in the log of a process that runs for months."""

from __future__ import annotations

import logging
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509

from piebald.core.reading import read_bytes
from piebald.federation.credentials.party_files import stamp_of

_SOON = timedelta(days=30)
_SHARE = 5  # of short lives, the last fifth is soon
_PAUSE = 60.0  # seconds between two looks at the file
_DAY = timedelta(days=1)

log = logging.getLogger("piebald.federation")


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
