"""Checks of a server's or a site's machine before it takes part: a tick, or one sentence that says what to do."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from piebald.core.errors import PiebaldError, SettingError
from piebald.core.files import os_reason, read_bytes
from piebald.federation.credentials import provisioning
from piebald.federation.hub.member_list import sites_of
from piebald.federation.link.messaging import SERVER
from piebald.federation.link.tls import Listener

SPACE = 100 << 20  # bytes that must be free where little is known about what will be written
_SOON = 30  # days before a certificate expires from which it is mentioned


@dataclass(frozen=True, slots=True)
class Check:
    """The outcome of one check.

    Attributes:
        what: its name.
        fine: whether it is as it must be; None where that cannot be known yet.
        told: what was found; where it is not fine, one sentence with what to do.
    """

    what: str
    fine: bool | None
    told: str

    @property
    def mark(self) -> str:
        """A tick, a cross, or a dash."""
        return "-" if self.fine is None else "\N{CHECK MARK}" if self.fine else "\N{BALLOT X}"


def refuse_crosses(checks: Sequence[Check], again: str) -> None:
    """Raise a `SettingError` about the first check that failed.

    Args:
        checks: what was looked at.
        again: the command that shows all of them.
    """
    crosses = [check for check in checks if check.fine is False]
    if crosses:
        rest = f" (and {len(crosses) - 1} more: {again})" if len(crosses) > 1 else ""
        raise SettingError(f"{crosses[0].what}: {crosses[0].told}{rest}")


def check_certificate(folder: Path, name: str = "certificate") -> Check:
    """Check that the certificate in a folder of credentials is valid now, the authority's, and of the key."""
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import serialization

    form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    try:
        certificate = x509.load_pem_x509_certificate(read_bytes(folder / "certificate.pem"))
        authority = x509.load_pem_x509_certificate(read_bytes(folder / "authority.pem"))
        key = serialization.load_pem_private_key(read_bytes(folder / "key.pem"), None)
        certificate.verify_directly_issued_by(authority)
    except (OSError, ValueError, TypeError, InvalidSignature) as error:
        return Check(name, False, f"it cannot be used ({type(error).__name__}): get the folder {folder} again")
    if certificate.public_key().public_bytes(*form) != key.public_key().public_bytes(*form):
        return Check(name, False, f"it belongs to another key than {folder / 'key.pem'}: get the folder again")
    now, ends = datetime.now(UTC), certificate.not_valid_after_utc
    if now < certificate.not_valid_before_utc:
        begins = f"{certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
        return Check(name, False, f"it is valid from {begins} on, and here it is {now:%Y-%m-%d %H:%M}: set the clock")
    days = (ends - now).days
    if ends < now:
        here = f"{now:%Y-%m-%d}"
        return Check(name, False, f"it expired on {ends:%Y-%m-%d}, and here it is {here}: ask for new credentials")
    soon = " (ask for new credentials soon)" if days < _SOON else ""
    left = "1 day" if days == 1 else f"{days} days"
    return Check(name, True, f"{left} left{soon}, until {ends:%Y-%m-%d}")


def check_space(folder: Path, needed: int = SPACE) -> Check:
    """Check that the disk of a folder, or of the nearest one that exists, has this many bytes."""
    place = _existing(folder)
    free = shutil.disk_usage(place).free
    if free < needed:
        return Check("disk", False, f"{free / 1e6:,.0f} MB are free in {place}, {needed / 1e6:,.0f} MB may be needed")
    return Check("disk", True, f"{free / 1e9:,.1f} GB free, at most {needed / 1e6:,.0f} MB needed")


def server_disks(credentials: Path, run: Path) -> list[Check]:
    """Check the room for a run folder, and for results in the server's credentials where these lie elsewhere."""
    checks = [check_space(run)]
    if _existing(run).stat().st_dev != _existing(credentials).stat().st_dev:
        checks.append(check_space(credentials))
    return checks


def _existing(folder: Path) -> Path:
    """Return a folder, or the nearest one above it that exists, as the root always does."""
    return next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())


def check_port(port: int) -> Check:
    """Check that this machine can listen on a port."""
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
        try:
            tried.bind((Listener.host, port))
        except OSError as error:
            return Check("port", False, f"port {port} cannot be listened on ({os_reason(error)}): stop what uses it")
    return Check("port", True, f"port {port} is free")


def server_machine(credentials: provisioning.Credentials) -> list[Check]:
    """Check what a server needs to start: its certificates and its port.

    Args:
        credentials: the server's.
    """
    folder = credentials.folder
    checks = [_party(credentials), check_certificate(folder)]
    for name in credentials.sites():  # where they were made, the credentials of sites lie beside
        if (folder.parent / name / "certificate.pem").exists():
            check = check_certificate(folder.parent / name, f"certificate of {name}")
            checks += [] if check.fine else [check]
    return [*checks, check_port(credentials.port)]


def server_run(
    credentials: provisioning.Credentials, file: Path | None, flags: Sequence[str], out: str | None
) -> list[Check]:
    """Check an experiment before it starts: that it can be read, its sites, and its folder.

    Args:
        credentials: the server's.
        file, flags: the experiment file, and the settings of the command line.
        out: the run folder, None for a new one under runs/.
    """
    from piebald.experiments.file import ExperimentSettings
    from piebald.storage.run_folder import refuse_occupied

    checks = []
    try:
        settings = ExperimentSettings.load(file, flags)
        agree = ", whose tables are prepared alike" if settings.asks_sites else ""  # which the start asks first as well
        plan = settings.plan()
        recipe = next(iter(plan.recipes))
        summary = f"{recipe}, {settings.rounds} server steps, {len(plan.clients)} clients{agree}"
        checks.append(Check("experiment", True, summary))
        sites = sites_of(credentials, plan.clients)
        checks.append(Check("sites", True, ", ".join(sites)))
    except PiebaldError as error:
        # what was being looked at when it failed
        checks.append(Check("sites" if checks else "experiment", False, str(error)))
    if out is None:
        return checks
    try:
        refuse_occupied(Path(out))
        checks.append(Check("run folder", True, f"{out} is new"))
    except PiebaldError as error:
        checks.append(Check("run folder", False, str(error)))
    return checks


def _party(credentials: provisioning.Credentials) -> Check:
    if credentials.party != SERVER:
        sentence = f"they are those of {credentials.party}: the server needs the credentials of the server"
        return Check("credentials", False, sentence)
    return Check("credentials", True, f"{credentials.party} of {credentials.federation}")
