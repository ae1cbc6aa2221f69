"""Slots: several runs at once of one party, each with a folder of its own beside the same credentials.

    <credentials>/jobs/1/   the second run at once: its audit log, status and model; links to certificate, key and lists

Slot 0 is the folder of the credentials itself, so a party with one run at a time has no other folder.  A site's slot k
talks to the server's slot k, by a protocol (ALPN) that the connection names before it is encrypted.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path

FOLDER = "jobs"
MOST = 16  # runs at once
OPERATE = "operate"  # in place of a slot: calls of people
_SHARED = (
    *("authority.pem", "certificate.pem", "key.pem", "credentials.json"),
    *("sites.json", "people.json", "revoked.json", "state"),
)


def protocol_of(slot: int | str) -> str:
    """Return the protocol that a connection to a slot names, "" for slot 0, whose connections name none."""
    return f"piebald/{slot}" if slot else ""


def slot_folder(credentials: Path, slot: int | str) -> Path:
    """Return the folder of a slot, made where it is not there.

    Args:
        credentials: the party's credentials.
        slot: from 0 to `MOST` - 1, or `OPERATE`.
    """
    if slot == 0:
        return credentials
    folder = credentials.resolve() / FOLDER / str(slot)
    for made in (folder.parent, folder):
        made.mkdir(mode=0o700, exist_ok=True)
    for name in _SHARED:  # also of what is not there yet, such as a list of revoked sites
        with suppress(FileExistsError):
            (folder / name).symlink_to(Path("..", "..", name))
    return folder


def slot_of(credentials: Path) -> int:
    """Return the slot that a folder is of."""
    return int(credentials.name) if credentials.parent.name == FOLDER and credentials.name.isdecimal() else 0


def first_protocol(hello: bytes) -> str | None:
    """Return the first protocol (ALPN) that the first record of a TLS connection names.

    Args:
        hello: bytes of a connection, from the first on.

    Returns:
        None while more bytes are needed; "" where it names none, or is no ClientHello (RFC 8446, section 4.1.2).
    """
    if len(hello) < 5:
        return None
    kind, size = hello[0], struct.unpack_from("!H", hello, 3)[0]
    if kind != 22:
        return ""
    if len(hello) < 5 + size:
        return None
    try:
        place = 5 + 4 + 2 + 32  # of record, handshake, version and random
        for width in ("!B", "!H", "!B"):  # session, ciphers, compression
            place += struct.calcsize(width) + struct.unpack_from(width, hello, place)[0]
        end, place = place + 2 + struct.unpack_from("!H", hello, place)[0], place + 2
        while place < end:
            extension, length = struct.unpack_from("!HH", hello, place)
            if extension == 16:
                first = hello[place + 7 : place + 7 + hello[place + 6]]
                return first.decode("ascii", errors="replace")
            place += 4 + length
    except (struct.error, IndexError):
        return ""
    return ""
