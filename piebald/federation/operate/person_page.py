"""A person's own page of a server elsewhere: submit, look, logs, abort and fetch, by the rights of `remote`.

The page is served on this machine alone, to whoever has the token in the person's credentials; what it is asked to do
it does by a call with the person's certificate, so that the server decides and notes it as for `piebald submit`.
Whatever it is asked to do is a POST with a key that only the page itself has: no page of another origin can send it.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any
from urllib.parse import parse_qs

from markupsafe import Markup

from piebald.core.errors import PiebaldError, SettingError
from piebald.core.plain_text import printable
from piebald.federation.credentials.provisioning import Credentials
from piebald.federation.operate.page_server import (
    Guarded,
    PageAddress,
    Token,
    check_installed,
    serve_until_stopped,
    token_of,
)
from piebald.federation.operate.remote import MOST_SETTINGS, called, pieces
from piebald.report.page import markup
from piebald.report.page.markup import Section

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
