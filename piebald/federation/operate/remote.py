"""Calls from elsewhere to a server with a queue: submit, status, logs, abort, fetch, over the link that sites use.

Who calls is proven by a certificate of the federation, and may do what the role in the server's `people.json` allows,
read at each call.  Each call is a line of an audit log of its own, `<server's credentials>/jobs/operate/audit.jsonl`.
What arrives is data: a text of settings, which is checked as by `piebald queue add` in a process of its own and names
no file, module or address, and numbers of experiments.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from piebald.core.errors import PiebaldError, SettingError, shown
from piebald.core.files import opened
from piebald.core.plain_text import printable
from piebald.federation.credentials.audit import AuditLog
from piebald.federation.credentials.provisioning import Credentials
from piebald.federation.credentials.slots import OPERATE, protocol_of, slot_folder
from piebald.federation.link.messaging import SERVER, Link
from piebald.federation.link.wire_format import PIECE, Hex, Id, Message, decode, digest, encode
from piebald.federation.operate.experiment_queue import ExperimentQueue, Queued
from piebald.federation.operate.status import status_values
from piebald.settings.toml_document import Document
from piebald.storage.backup import backup

Operation = Literal["submit", "status", "logs", "abort", "fetch"]

MOST_SETTINGS = 1 << 16  # bytes of an experiment
TAIL = 1 << 16  # bytes of a log, at most
_CHECKING = 120.0  # seconds for the check of an experiment
_CONNECTING = 15.0  # seconds until the server has answered
MAY: dict[str, tuple[Operation, ...]] = {
    "researcher": ("submit", "status", "logs", "abort", "fetch"),
    "operator": ("status", "logs", "abort"),
    "administrator": ("status",),
}
_OWN = "researcher"  # the role that reads and stops nothing of others
# settings that name what is on a machine, or what it imports
_OURS = {
    "source",
    "public",
    "out",
    "plugins",
    "credentials",
    "folder",
    "path",
    "file",
    "weights",
    "tokens",
    "extractor",
}
_RUNTIME = {"kind", "wait_for", "patience", "silence", "task_timeout", "needs"}
_NAMES_PLACE = ("/", "\\", ":", "~", ".py")

log = logging.getLogger("piebald.federation")


class Call(Message):
    """A call.

    Attributes:
        what: the operation.
        number: of the experiment, 0 where it is about none.
        start: offset of the piece that is wanted.
        priority: of an experiment that is submitted.
    """

    what: Operation
    number: Id = 0
    start: Id = 0
    priority: Annotated[int, Field(ge=-100, le=100)] = 0


class Answer(Message):
    """Answer to a call.

    Attributes:
        refused: why nothing was done, "" where it was.
        size, digest: of the whole of which the body is a piece; another digest where the whole is another one.
    """

    refused: Annotated[str, Field(max_length=2000)] = ""
    size: Id = 0
    digest: Hex = ""


def refuse_places(values: Mapping[str, Any]) -> None:
    """Refuse settings from elsewhere that name a file, a module or an address of this machine.

    Raises:
        SettingError: the first that does.
    """
    runtime = values.get("runtime")
    if isinstance(runtime, Mapping) and (strange := sorted({*runtime} - _RUNTIME)):
        raise SettingError(f"runtime.{printable(strange[0], 60)} is the server's: leave it out")
    level: list[tuple[str, Any]] = [("", dict(values))]
    while level:
        name, value = level.pop()
        if isinstance(value, Mapping):
            if ours := sorted(key for key in _OURS & {*value} if value[key]):
                raise SettingError(
                    f"{f'{name}.' if name else ''}{ours[0]} names what is on the server's machine, and whoever submits "
                    "from elsewhere has nothing there: leave it out, or have it added there with piebald queue add"
                )
            level += [(f"{name}.{key}" if name else str(key), inner) for key, inner in value.items()]
        elif isinstance(value, list | tuple):
            level += [(name, inner) for inner in value]
        elif isinstance(value, str) and any(sign in value for sign in _NAMES_PLACE) and name != "label":
            raise SettingError(
                f"{printable(name, 60)} = {shown(value[:80])} could name a file, a module or an address of the "
                "server's machine: leave it out, or have it added there with piebald queue add"
            )


class Desk:
    """Answers calls.

    Args:
        server: the server's credentials.
        queue: its queue.
    """

    def __init__(self, server: Credentials, queue: ExperimentQueue) -> None:
        self._server, self._queue = server, queue
        folder = slot_folder(server.folder, OPERATE)
        self._audit, self._checking, self._packing = AuditLog(folder), threading.Lock(), threading.Lock()
        self.link = Link(SERVER, ("", server.port), folder, self._knows, log.warning, protocol=protocol_of(OPERATE))
        self.link.last_word = "the server was stopped"
        self.link.on("call", Call, self.answer)

    def _knows(self, name: str) -> bool:
        return name in self._server.people()

    def answer(self, origin: str, call: Call, body: memoryview) -> bytes:
        """Return the answer to a call, which is noted before anything is done."""
        role = self._server.people().get(origin, "")
        about = {"by": origin, "role": role, "what": call.what, "number": call.number or None}
        entry: Queued | None = None
        try:
            if call.what not in MAY.get(role, ()):
                raise SettingError(f"{origin} is {role or 'nobody'} here, who may not {call.what}")
            if call.what not in ("submit", "status"):
                entry = self._entry(call.number, origin, role)
            if not call.start:  # further pieces are the same call
                self._audit.write("called", **about, settings=digest(bytes(body)) if body else None)
            return self._DO[call.what](self, origin, call, bytes(body), entry)
        except PiebaldError as error:
            reason = " ".join(str(error).split()).replace(str(self._server.folder), "the server's folder")
            self._audit.write("refused", **about, reason=printable(reason, 300))
            return encode(Answer(refused=printable(reason, 1500)))

    def _entry(self, number: int, origin: str, role: str) -> Queued:
        """Return an experiment that is the caller's business; of others they do not learn whether they exist."""
        entry = next((entry for entry in self._queue.entries() if entry.number == number), None)
        if entry is None or (role == _OWN and entry.by != origin):
            whose = " of yours" if role == _OWN else ""
            raise SettingError(f"the queue has no experiment {number}{whose}: piebald status shows their numbers")
        return entry

    def _submit(self, origin: str, call: Call, body: bytes, _: Queued | None) -> bytes:
        if len(body) > MOST_SETTINGS:
            raise SettingError(f"an experiment has at most {MOST_SETTINGS:,} bytes, got {len(body):,}")
        try:
            text = body.decode()
        except UnicodeDecodeError:
            raise SettingError("an experiment is a text in UTF-8, and this is none") from None
        refuse_places(Document(text, "the experiment").values)
        if not self._checking.acquire(blocking=False):
            raise SettingError("another experiment is being checked: try again in a minute")
        try:
            # a folder with nothing in it but the file: no name in the settings finds anything there
            with tempfile.TemporaryDirectory(prefix="piebald-") as empty:
                file = Path(empty) / "experiment.toml"
                file.write_text(text)
                words = [
                    "queue", "add", str(self._server.folder), str(file), "--json", "--by", origin,
                    f"--priority={call.priority}",
                ]  # fmt: skip
                said = _ran(words, empty)
        finally:
            self._checking.release()
        return _piece(json.dumps({"number": json.loads(said)["number"]}).encode(), 0)

    def _status(self, origin: str, call: Call, body: bytes, _: Queued | None) -> bytes:
        seen = self.seen() | {"may": MAY[self._server.people()[origin]]}
        return _piece(json.dumps(seen, default=str).encode(), call.start)

    def seen(self) -> dict[str, Any]:
        """Return the experiments of the queue and what those at work do, without a path of this machine."""
        entries = self._queue.entries()
        fields = ("number", "label", "by", "priority", "state", "added", "started", "ended", "why")
        rows = [{name: getattr(entry, name) or None for name in fields} for entry in entries[-100:]]
        runs = {}
        for entry in entries:
            if entry.state == "running" and entry.slot is not None:
                try:
                    values = status_values(slot_folder(self._server.folder, entry.slot))
                except SettingError:  # nothing was written yet
                    continue
                hidden = ("folder", "again", "process", "queue")
                runs[entry.number] = {name: value for name, value in values.items() if name not in hidden}
        return {"experiments": rows, "runs": runs}

    def _logs(self, origin: str, call: Call, body: bytes, entry: Queued | None) -> bytes:
        assert entry is not None
        try:
            with opened(self._queue.log_file(entry.number)) as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - TAIL))
                return _piece(file.read(TAIL), 0)
        except FileNotFoundError:
            return _piece(b"", 0)

    def _abort(self, origin: str, call: Call, body: bytes, entry: Queued | None) -> bytes:
        assert entry is not None
        self._queue.ask_to_stop(entry.number)
        return _piece(json.dumps({"number": entry.number, "state": entry.state}).encode(), 0)

    def _fetch(self, origin: str, call: Call, body: bytes, entry: Queued | None) -> bytes:
        assert entry is not None
        packed = self._queue.folder / f"{entry.number:04d}.tar"
        with self._packing:
            if not call.start:  # of the run as it is now
                packed.unlink(missing_ok=True)
                backup(Path(entry.out), packed)
            if not packed.exists():
                raise SettingError(f"experiment {entry.number} was not asked for from its beginning: fetch it again")
            with opened(packed) as file:
                size = file.seek(0, 2)
                file.seek(min(call.start, size))
                piece, about = file.read(PIECE), os.fstat(file.fileno())
            if call.start + len(piece) >= size:
                packed.unlink()
        # of the file and not of its bytes: whoever fetches the same run beside this call has it packed anew
        return encode(Answer(size=size, digest=digest(f"{about.st_ino} {about.st_mtime_ns}".encode())), piece)

    _DO = {"submit": _submit, "status": _status, "logs": _logs, "abort": _abort, "fetch": _fetch}  # noqa: RUF012


def _piece(whole: bytes, start: int) -> bytes:
    return encode(Answer(size=len(whole), digest=digest(whole)), whole[start : start + PIECE])


def _ran(words: list[str], folder: str) -> str:
    """Return what a command of Piebald prints, run in a folder.

    Raises:
        SettingError: it failed, with what it said.
    """
    command = [sys.executable, "-P", "-m", "piebald.cli", *words]
    try:
        ran = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=_CHECKING,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise SettingError(f"its check took more than {_CHECKING:g} seconds: make it smaller") from None
    if ran.returncode == 2:
        raise SettingError((ran.stderr.strip().splitlines() or ["it was refused"])[-1].replace(folder + "/", ""))
    if ran.returncode:
        log.error("the check of an experiment from elsewhere failed: %s", printable(ran.stderr[-2000:]))
        raise SettingError("its check failed; the server's log says more")
    return ran.stdout


def called(credentials: Credentials, what: Operation, body: bytes = b"", **fields: int) -> bytes:
    """Call a server, and return the answer; see `pieces`."""
    return b"".join(pieces(credentials, what, body, **fields))


def pieces(credentials: Credentials, what: Operation, body: bytes = b"", **fields: int) -> Iterator[bytes]:
    """Call a server, and yield the answer, which may be long, in pieces.

    Args:
        credentials: of whoever calls.
        what: the operation.
        body: what is sent.
        fields: others of `Call`.

    Raises:
        SettingError: the server does not answer, or refuses; with what it says.
    """
    link = Link(
        credentials.party, (credentials.host, credentials.port), credentials.folder, SERVER.__eq__, _say_nothing,
        protocol=protocol_of(OPERATE), quiet=_CHECKING + 10,
    )  # fmt: skip
    link.start()
    try:
        until, start, whole_digest = time.monotonic() + _CONNECTING, 0, ""
        while True:
            reply = link.request(SERVER, "call", Call(what=what, start=start, **fields), body, timeout=_CHECKING + 10)
            if reply is None and time.monotonic() < until:
                time.sleep(0.1)
                continue
            if reply is None:
                address = f"{credentials.host}:{credentials.port}"
                raise SettingError(
                    f"{address} does not answer ({link.trouble or 'the connection ended'}): calls need a server with a "
                    f"queue (piebald server CREDENTIALS), whose people.json lists {credentials.party}"
                )
            answer, piece = decode(Answer, reply)
            if answer.refused:
                raise SettingError(answer.refused)
            if start and answer.digest != whole_digest:
                raise SettingError("what was asked for has changed meanwhile: ask again")
            start, whole_digest = start + len(piece), answer.digest
            yield bytes(piece)
            if start >= answer.size or not piece:
                return
            until = time.monotonic() + _CONNECTING
    finally:
        link.stop()


def _say_nothing(_: str) -> None:
    """Say nothing: what is wrong with a connection is in the error."""


def is_person(folder: Path) -> bool:
    """Return whether a folder holds the credentials of a person, and not of a server or a site."""
    has = {name: (folder / name).exists() for name in ("credentials.json", "site.toml", "sites.json")}
    return [*has.values()] == [True, False, False]
