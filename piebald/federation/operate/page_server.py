"""The web server of the package, on loopback, or by TLS and with a token; the status page, and a person's own page.

Starlette and uvicorn serve it, since a page that others can reach for months needs limits to connections, and a parser
of requests that is looked after; the standard library's server says of itself that it has neither.  The status page is
served from a thread of its own.

A person's page of a server elsewhere (submit, look, logs, abort and fetch, by the rights of `remote`) is served on this
machine alone, to whoever has the token in the person's credentials; what it is asked to do it does by a call with the
person's certificate, so that the server decides and notes it as for `piebald submit`.  Whatever it is asked to do is a
POST with a key that only the page itself has: no page of another origin can send it.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import ipaddress
import json
import logging
import math
import secrets
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from markupsafe import Markup

from piebald.core.errors import PiebaldError, SettingError, install
from piebald.core.files import os_reason, read_text
from piebald.core.plain_text import printable
from piebald.core.private_files import write_private
from piebald.federation.credentials.provisioning import Credentials
from piebald.federation.link.tls import is_loopback
from piebald.federation.operate.remote import MOST_SETTINGS, called, pieces
from piebald.federation.operate.run_view import RunView, Viewer, content_policy, exposition, page
from piebald.federation.operate.status import STALLED, silence_here, status_values
from piebald.report.page import markup
from piebald.report.page.markup import Section

INSTALL = f"the status page and piebald serve need starlette, uvicorn and prometheus-client: {install('page')}"
TOKEN = "status-token"  # in the server's credentials: what a browser or Prometheus must know
FREE = 10  # wrong tokens of an address, after which it waits
_LONGEST_WAIT = 60.0  # seconds
_MOST_ADDRESSES = 1024  # that are remembered for wrong tokens
_LONGEST_TOKEN = 1024  # bytes
MOST_CONNECTIONS = 32  # at a time; files and connections that a process may have open are as few as 1,024, and shared

log = logging.getLogger("piebald.federation")


@dataclass(frozen=True, slots=True)
class PageAddress:
    """Address of the status page.

    Attributes:
        host, port: the address to listen on.
    """

    host: str
    port: int

    @property
    def loopback(self) -> bool:
        """True if only this machine can reach it."""
        return is_loopback(self.host)


def check_installed() -> None:
    """Raise a `SettingError` where the extra is not installed."""
    try:
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        raise SettingError(INSTALL) from None


def token_of(credentials: Path) -> str:
    """The token of the page, made where there is none.

    Raises:
        SettingError: others can read it, or it is too short to keep anybody out.
    """
    path = credentials / TOKEN
    if not path.exists():
        write_private(path, secrets.token_urlsafe(32) + "\n")
    if path.stat().st_mode & 0o077:
        raise SettingError(f"{path} can be read by others: chmod 600 {path}")
    token = read_text(path, _LONGEST_TOKEN).strip()
    if len(token) < 16:
        raise SettingError(f"{path} must hold at least 16 characters: remove it, and another one is made")
    return token


class Token:
    """The token of the page, read anew at each request, so that another one counts at once.

    Args:
        credentials: the server's credentials.
        loopback: whether only this machine can reach the page, which then needs a token only where there is a file.

    Raises:
        SettingError: it cannot be used.
    """

    def __init__(self, credentials: Path, loopback: bool) -> None:
        self._credentials, self._warned = credentials, False
        self._needed = not loopback or (credentials / TOKEN).exists()
        if self._needed:
            token_of(credentials)

    @property
    def needed(self) -> bool:
        """True if a request must bring it."""
        self._needed = self._needed or (self._credentials / TOKEN).exists()
        return self._needed

    def fits(self, given: str) -> bool:
        """Return whether this is the token; False while there is none that can be used."""
        try:
            if not (self._credentials / TOKEN).exists():
                raise SettingError(f"{self._credentials / TOKEN} is gone")
            token = token_of(self._credentials)
        except (OSError, ValueError) as error:
            if not self._warned:
                log.warning("the status page refuses everybody: %s", error)
            self._warned = True
            return False
        self._warned = False
        # in a time that does not depend on how much agrees; as bytes, since it takes no text beyond ASCII
        return secrets.compare_digest(given.encode(), token.encode())


class WrongTokens:
    """Addresses that have brought wrong tokens: after some of them one waits, each time twice as long.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: OrderedDict[str, tuple[int, float]] = OrderedDict()  # how many, and until when it waits

    def wait(self, address: str) -> float:
        """Seconds until an address may bring another token."""
        return max(0.0, self._known.get(_network(address), (0, 0.0))[1] - self._clock())

    def add(self, address: str) -> None:
        """Count a wrong token; the log has the first of an address, and then each time that they have doubled."""
        count = self._known.pop(_network(address), (0, 0.0))[0] + 1
        # the exponent is bounded, as a count without limit would overflow the float
        wait = 0.0 if count < FREE else min(_LONGEST_WAIT, 2.0 ** min(count - FREE, 10))
        self._known[_network(address)] = count, self._clock() + wait
        while len(self._known) > _MOST_ADDRESSES:
            self._known.popitem(last=False)
        # at powers of two: a million attempts are twenty lines of the log
        if not count & (count - 1):
            fields = {"event": "wrong token", "address": address, "count": count}
            log.warning("%(address)s has asked for the status page with wrong tokens: %(count)d so far", fields)

    def forgive(self, address: str) -> None:
        """Forget those of an address that has brought the token."""
        self._known.pop(_network(address), None)


def _network(address: str) -> str:
    """The address, or the network of 64 bits that it is in, of which anybody has all addresses who has one."""
    try:
        return str(ipaddress.ip_network(f"{address}/64", strict=False)) if ":" in address else address
    except ValueError:
        return address


class FewConnections(socket.socket):
    """A listening socket that ends its oldest connection where there would be more than `MOST_CONNECTIONS`.

    uvicorn waits without limit for the first request of a connection, and limits requests but not connections.  So
    whoever can reach the port could hold all that the process may have open, and sites could not connect any more.
    """

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self._accepted: list[socket.socket] = []

    @classmethod
    def at(cls, address: PageAddress) -> FewConnections:
        """Listen on an address."""
        listener = socket.create_server((address.host, address.port), family=_family(address.host))
        # detached, as the first object would close the file when it is collected
        return cls(fileno=listener.detach())

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection."""
        accepted = super().accept()
        # one that was closed has the number -1
        still = [connection for connection in self._accepted if connection.fileno() >= 0]
        ends = max(0, len(still) + 1 - MOST_CONNECTIONS)
        # shut down and not closed, as the event loop still watches their files, and closes them itself
        for oldest in still[:ends]:
            with contextlib.suppress(OSError):  # it has ended itself
                oldest.shutdown(socket.SHUT_RDWR)
        self._accepted = [*still[ends:], accepted[0]]
        return accepted


@contextlib.contextmanager
def serving_page(address: PageAddress, credentials: Path, run: Path | None = None) -> Iterator[None]:
    """Serve the page for as long as the block runs.  A page that cannot be served is one warning.

    Args:
        address: where to listen.
        credentials: the server's credentials.
        run: the run folder; by default the one that the credentials name at the time.

    Raises:
        SettingError: an extra is missing, or the token cannot be used.
    """
    check_installed()
    token = Token(credentials, address.loopback)
    app = page_app(Viewer(credentials, run), credentials, token, address.loopback)
    try:
        server, listening = web_server(app, address, credentials)
    except OSError as error:
        where = f"{address.host}:{address.port}"
        log.warning("there is no status page, since %s cannot be listened on: %s", where, os_reason(error))
        yield
        return
    thread = threading.Thread(target=_run, args=(server, listening), name="status page", daemon=True)
    thread.start()
    fields = {"event": "page", "url": url(address, listening)}
    fields |= {"token": f", with the token in {credentials / TOKEN}" if token.needed else ""}
    log.info("the status page is at %(url)s%(token)s", fields)
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(5)
        listening.close()


def web_server(app: Any, address: PageAddress, credentials: Path) -> tuple[Any, FewConnections]:
    """Return a server of an application (ASGI), and the socket that it is to listen on.

    Args:
        app: the application, which lets in whom it may (`Guarded`).
        address: where to listen.
        credentials: the folder with the certificate of a server that others than this machine can reach.

    Raises:
        OSError: the address cannot be listened on.
    """
    import uvicorn

    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # whatever others send is no news
    secured: dict[str, Any] = {}
    if not address.loopback:
        secured = {"ssl_certfile": credentials / "certificate.pem", "ssl_keyfile": credentials / "key.pem"}
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", ws="none", http="h11", server_header=False,
        loop="asyncio", timeout_keep_alive=5, timeout_graceful_shutdown=1, **secured,
    )  # fmt: skip
    return uvicorn.Server(config), FewConnections.at(address)


def serve_until_stopped(
    app: Any, address: PageAddress, credentials: Path, flag: str, tell: Callable[[str], object]
) -> None:
    """Serve an application until this process is stopped.

    Args:
        app, address, credentials: see `web_server`.
        flag: of the command line, for another address.
        tell: called with its URL, once there is an answer at it.

    Raises:
        SettingError: the address cannot be listened on.
    """
    try:
        server, listening = web_server(app, address, credentials)
    except OSError as error:
        taken = f"{address.host}:{address.port} cannot be listened on ({os_reason(error)})"
        raise SettingError(f"{taken}: give {flag}") from None
    with listening, contextlib.suppress(KeyboardInterrupt):
        tell(url(address, listening))
        server.run(sockets=[listening])


def url(address: PageAddress, listening: socket.socket) -> str:
    """Return where a server is reached."""
    host = f"[{address.host}]" if ":" in address.host else address.host
    return f"{'http' if address.loopback else 'https'}://{host}:{listening.getsockname()[1]}/"


def _run(server: Any, listening: socket.socket) -> None:
    try:
        server.run(sockets=[listening])
    except Exception as error:  # the run goes on without a page
        log.warning("the status page has ended: %s", type(error).__name__)


def page_app(viewer: Viewer, credentials: Path, token: Token, loopback: bool) -> Any:
    """The application (ASGI).

    Args:
        viewer: reads what is shown.
        credentials: the server's credentials.
        token: what a request must bring.
        loopback: whether requests must name this machine, so that no page of the web can have a browser read it
            under a name of its own.
    """
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
    from starlette.routing import Route

    warned = threading.Event()

    def answered(make: Callable[[RunView], Response]) -> Callable[[Request], Response]:
        def answer(request: Request) -> Response:
            try:
                return make(viewer.view())
            except Exception as error:  # the run does not notice
                if not warned.is_set():
                    warned.set()
                    log.warning(
                        "the status page cannot be made: %s; further failures are not logged", type(error).__name__
                    )
                return PlainTextResponse("the status cannot be read; the server's log says more\n", 500)

        return answer

    def metrics(view: RunView) -> Response:
        body, kind = exposition(view)
        return Response(body, media_type=kind)

    def healthz(request: Request) -> Response:
        fine = silence_here(credentials) < STALLED
        return PlainTextResponse("ok\n" if fine else "stalled\n", 200 if fine else 503)

    routes = [
        Route("/", answered(lambda view: HTMLResponse(page(view))), methods=["GET"]),
        Route("/metrics", answered(metrics), methods=["GET"]),
        Route("/status.json", answered(lambda view: JSONResponse(status_values(credentials))), methods=["GET"]),
        Route("/healthz", healthz, methods=["GET"]),
    ]
    return Guarded(Starlette(routes=routes), content_policy(), token, loopback)


class Guarded:
    """Passes allowed requests to an application, and puts headers for security on every answer.

    Args:
        app: the application (ASGI).
        content: what a page may load, for the header Content-Security-Policy.
        token, loopback: see `page_app`.
    """

    def __init__(self, app: Any, content: str, token: Token, loopback: bool) -> None:
        self._app, self._token, self._loopback = app, token, loopback
        self._wrong = WrongTokens()
        headers = {
            "Content-Security-Policy": content,
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
            "Cross-Origin-Resource-Policy": "same-origin",
        }
        self._headers = [(name.lower().encode(), value.encode()) for name, value in headers.items()]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *self._headers]}
            await send(message)

        # other kinds, such as websockets, would pass without a token
        if scope["type"] == "http":
            await (self._refusal(scope) or self._app)(scope, receive, sending)

    def _refusal(self, scope: Any) -> Any:
        """Return the refusal of a request that is not allowed, None for others."""
        from starlette.requests import Request
        from starlette.responses import PlainTextResponse

        headers = Request(scope).headers
        # DNS rebinding: a web page can have its name resolve to this machine, but not change the Host that is sent
        if self._loopback and not _names_this_machine(headers.get("host", "")):
            return PlainTextResponse("this page is read under the name localhost\n", 421)
        # it tells whether the server is alive and nothing else, so that a monitor needs no token
        if scope["path"] == "/healthz" or not self._token.needed:
            return None
        token, address = _token_of(headers), (scope.get("client") or ("an unknown address",))[0]
        # before it is compared: guesses that are not waited for would be free
        if token is not None and (wait := self._wrong.wait(address)):
            later = {"Retry-After": str(math.ceil(wait))}
            return PlainTextResponse("too many wrong tokens: try again later\n", 429, headers=later)
        if token is not None and self._token.fits(token):
            self._wrong.forgive(address)
            return None
        if token is not None:
            self._wrong.add(address)
        challenge = {"WWW-Authenticate": 'Basic realm="Piebald: the token is the password", charset="UTF-8"'}
        return PlainTextResponse("a token is needed\n", 401, headers=challenge)


def _token_of(headers: Mapping[str, str]) -> str | None:
    """Return the token that a request brings, as Bearer or as the password of Basic; None where it brings none."""
    kind, _, credential = headers.get("authorization", "").partition(" ")
    if kind.lower() == "basic":
        try:
            credential = base64.b64decode(credential, validate=True).decode().partition(":")[2]
        except (binascii.Error, ValueError):
            return ""
    elif kind and kind.lower() != "bearer":
        return ""  # which is no token
    return credential.strip() if kind else None


def _names_this_machine(host: str) -> bool:
    """Return whether a Host header names this machine by a name that nobody else can take."""
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    return name in ("localhost", "127.0.0.1", "[::1]")


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


# bytes of a form, which sends the end of a line as six and others as three at most, beside its key and numbers
_LONGEST = 6 * MOST_SETTINGS + 1000
_NO_PRIORITY = "0"


def person_app(person: Credentials) -> Any:
    """The application (ASGI).

    Args:
        person: the credentials of whoever uses it.
    """
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
    from starlette.routing import Route

    key, said, lock = secrets.token_urlsafe(32), list[str](), threading.Lock()

    class Fetched(StreamingResponse):
        async def stream_response(self, send: Any) -> None:
            try:
                await super().stream_response(send)
            except PiebaldError as error:  # the browser hears that it breaks off, and the page says why
                with lock:
                    said.append(f"the experiment was not fetched to its end: {error}")

    def look(request: Request) -> Response:
        return HTMLResponse(shown())

    def shown(*sections: Section) -> str:
        with lock:
            notices = [*said]
            said.clear()
        try:
            seen = json.loads(called(person, "status"))
        except PiebaldError as error:
            return _page(person, key, {}, [*notices, str(error)], *sections)
        return _page(person, key, seen, notices, *sections)

    def done(path: str, values: Mapping[str, str]) -> Response:
        number = 0 if path == "/submit" else _number("number", values.get("number", ""), 1, 1 << 53)
        if path == "/logs":
            return HTMLResponse(shown(_log(number, called(person, "logs", number=number))))
        if path == "/fetch":
            packed = pieces(person, "fetch", number=number)
            first = next(packed)  # or the server refuses, which is said on the page
            named = {"Content-Disposition": f'attachment; filename="experiment-{number}.tar"'}
            return Fetched(chain([first], packed), media_type="application/x-tar", headers=named)
        answer = f"experiment {number} is being stopped"
        if path == "/submit":
            answer = f"experiment {_submitted(person, values)} of the queue"
        else:
            called(person, "abort", number=number)
        with lock:
            said.append(answer)
        return RedirectResponse("/", 303)

    async def act(request: Request) -> Response:
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > _LONGEST:
                return PlainTextResponse(f"a form has at most {_LONGEST:,} bytes\n", 413)
        # characters that are none become others, and no key or number
        values = {name: given[-1] for name, given in parse_qs(body.decode(errors="replace")).items()}
        if not secrets.compare_digest(values.get("key", "").encode(), key.encode()) or not _own(request.headers):
            return PlainTextResponse("this was not sent by the page itself: open it, and try again\n", 403)
        try:
            return await run_in_threadpool(done, request.url.path, values)
        except PiebaldError as error:
            with lock:
                said.append(str(error))
            return RedirectResponse("/", 303)

    routes = [
        Route("/", look, methods=["GET"]),
        *(Route(path, act, methods=["POST"]) for path in ("/submit", "/abort", "/logs", "/fetch")),
    ]
    token_of(person.folder)  # made where there is none: without it, all users of this machine could act
    policy = f"{markup.content_policy(forms=True)}; frame-ancestors 'none'"
    return Guarded(Starlette(routes=routes), policy, Token(person.folder, loopback=False), loopback=True)


def serve_person(person: Credentials, address: PageAddress, tell: Callable[[str], object] = bool) -> None:
    """Serve the page until this process is stopped.

    Args:
        person, address: whose page, and where.
        tell: called with its URL once it is there.

    Raises:
        SettingError: an extra is missing, or the address cannot be listened on, or is not of this machine alone.
    """
    check_installed()
    if not address.loopback:
        raise SettingError(
            f"this page acts with the certificate of {person.party}, so it is served on this machine alone: leave "
            f"--status-host out, got {address.host!r}"
        )
    serve_until_stopped(person_app(person), address, person.folder, "--status-port", tell)


def _own(headers: Mapping[str, str]) -> bool:
    """Return whether a browser says nothing of another origin."""
    origin, fetched = headers.get("origin"), headers.get("sec-fetch-site", "same-origin")
    return fetched == "same-origin" and origin in (None, f"http://{headers.get('host')}")


def _submitted(person: Credentials, values: Mapping[str, str]) -> int:
    """Submit what a form holds, and return the number of the experiment."""
    priority = _number("priority", values.get("priority") or _NO_PRIORITY, -100, 100)
    text = values.get("experiment", "").replace("\r\n", "\n")  # as forms send lines
    return int(json.loads(called(person, "submit", text.encode(), priority=priority))["number"])


def _number(name: str, text: str, least: int, most: int) -> int:
    if text.removeprefix("-").isdecimal() and len(text) < 18 and least <= int(text) <= most:
        return int(text)
    raise SettingError(f"{name} must be a whole number from {least} to {most}, got {printable(text, 40)!r}")


def _log(number: int, log: bytes) -> Section:
    """Return the section with the end of a log."""
    lines = [printable(line) for line in log.decode(errors="replace").splitlines()]
    text = markup.verbatim("\n".join(lines) or "nothing yet")
    return "log", "Log", markup.section("log", f"Log of experiment {number}", "Its end.", text)


def _page(person: Credentials, key: str, seen: Mapping[str, Any], notices: list[str], *sections: Section) -> str:
    hidden = Markup('<input type="hidden" name="key" value="{}">').format(key)
    button = Markup('<form method="post" action="/{0}">{1}<button name="number" value="{2}">{0}</button></form>')
    may, runs = seen.get("may", ()), {int(number): run for number, run in seen.get("runs", {}).items()}

    def buttons(row: Mapping[str, Any]) -> Markup:
        offers = ["logs", *(["abort"] if row["state"] in ("waiting", "running") else []), "fetch"]
        return Markup("").join(button.format(name, hidden, row["number"]) for name in offers if name in may)

    rows = [
        [
            str(row["number"]), *(printable(row.get(name) or "", 200) for name in ("label", "by", "state", "added")),
            str(runs.get(row["number"], {}).get("steps", "")),
            printable(row.get("why") or runs.get(row["number"], {}).get("ends") or "", 300), buttons(row),
        ]
        for row in reversed(seen.get("experiments", ()))
    ]  # fmt: skip
    head = ("Number", "Experiment", "By", "State", "Added", "Steps", "Why, or until", "")
    submit = Markup(
        '<form method="post" action="/submit">{}<p><textarea name="experiment" rows="16" cols="100" required '
        'aria-label="the experiment, in TOML"></textarea></p><p><label>Priority <input type="number" name="priority" '
        'value="{}" min="-100" max="100"></label> <button>submit</button></p></form>'
    ).format(hidden, _NO_PRIORITY)
    both = [
        ("queue", "Queue", markup.section("queue", "Queue", "", markup.table("The last first.", head, rows))),
        ("submit", "Submit", markup.section("submit", "Submit", "An experiment, as in its TOML file.", submit)),
    ]
    about = printable(f"{person.federation}: {person.party} at {person.host}:{person.port}")
    top = markup.top(about, notices=[printable(notice, 600) for notice in notices])
    footer = "What is asked for here is done by the server as the role of this person allows, and noted there."
    return markup.document("status", f"Piebald: {about}", top, [*sections, *both], footer, forms=True)
