"""A person's own page of a server elsewhere: submit, look, and abort, over the link and by the rights of `remote`.

The page is served on this machine alone, to whoever has the token in the person's credentials; what it is asked to do
it does by a call with the person's certificate, so that the server decides and notes it as for `piebald submit`.
Whatever changes something is a POST with a key that only the page itself has: no page of another origin can send it.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs

from markupsafe import Markup

from piebald.core.errors import PiebaldError, SettingError
from piebald.core.plain_text import printable
from piebald.federation.credentials.provisioning import Credentials
from piebald.federation.operate.page_server import Guarded, PageAddress, Token, check_installed, token_of, web_server
from piebald.federation.operate.remote import MOST_SETTINGS, called
from piebald.report.page import markup

_LONGEST = 4 * MOST_SETTINGS  # bytes of a form, whose characters may take three each
_NO_PRIORITY = "0"


def person_app(person: Credentials) -> Any:
    """The application (ASGI).

    Args:
        person: the credentials of whoever uses it.
    """
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
    from starlette.routing import Route

    key, said, lock = secrets.token_urlsafe(32), list[str](), threading.Lock()

    def look(request: Request) -> Response:
        with lock:
            notices = [*said]
            said.clear()
        try:
            seen = json.loads(called(person, "status"))
        except PiebaldError as error:
            return HTMLResponse(_page(person, key, {}, [*notices, str(error)]))
        return HTMLResponse(_page(person, key, seen, notices))

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
            answer = await run_in_threadpool(_done, person, request.url.path, values)
        except PiebaldError as error:
            answer = str(error)
        with lock:
            said.append(answer)
        return RedirectResponse("/", 303)

    routes = [
        Route("/", look, methods=["GET"]),
        *(Route(path, act, methods=["POST"]) for path in ("/submit", "/abort")),
    ]
    token_of(person.folder)  # made where there is none: without it, all users of this machine could act
    policy = f"{markup.content_policy(forms=True)}; frame-ancestors 'none'"
    return Guarded(Starlette(routes=routes), policy, Token(person.folder, loopback=False), loopback=True)


def serve_person(person: Credentials, address: PageAddress) -> None:
    """Serve the page until this process is stopped.

    Raises:
        SettingError: an extra is missing, or the address cannot be listened on, or is not of this machine alone.
    """
    check_installed()
    if not address.loopback:
        raise SettingError(
            f"this page acts with the certificate of {person.party}, so it is served on this machine alone: leave "
            f"--status-host out, got {address.host!r}"
        )
    try:
        server, listening = web_server(person_app(person), address, person.folder)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise SettingError(f"{address.host}:{address.port} cannot be listened on ({why}): give --status-port") from None
    with listening:
        server.run(sockets=[listening])


def _own(headers: Mapping[str, str]) -> bool:
    """Return whether a browser says nothing of another origin."""
    origin, fetched = headers.get("origin"), headers.get("sec-fetch-site", "same-origin")
    return fetched == "same-origin" and origin in (None, f"http://{headers.get('host')}")


def _done(person: Credentials, path: str, values: Mapping[str, str]) -> str:
    """Call the server as a form says, and return what it did."""
    if path == "/submit":
        priority = _number("priority", values.get("priority") or _NO_PRIORITY, -100, 100)
        text = values.get("experiment", "").replace("\r\n", "\n")  # as forms send lines
        number = json.loads(called(person, "submit", text.encode(), priority=priority))["number"]
        return f"experiment {number} of the queue"
    number = _number("number", values.get("number", ""), 1, 1 << 53)
    called(person, "abort", number=number)
    return f"experiment {number} is being stopped"


def _number(name: str, text: str, least: int, most: int) -> int:
    if text.removeprefix("-").isdecimal() and len(text) < 18 and least <= int(text) <= most:
        return int(text)
    raise SettingError(f"{name} must be a whole number from {least} to {most}, got {printable(text, 40)!r}")


def _page(person: Credentials, key: str, seen: Mapping[str, Any], notices: list[str]) -> str:
    hidden = Markup('<input type="hidden" name="key" value="{}">').format(key)
    abort = Markup('<form method="post" action="/abort">{}<button name="number" value="{}">abort</button></form>')
    runs = {int(number): run for number, run in seen.get("runs", {}).items()}
    rows = [
        [
            str(row["number"]), *(printable(row.get(name) or "", 200) for name in ("label", "by", "state", "added")),
            str(runs.get(row["number"], {}).get("steps", "")),
            printable(row.get("why") or runs.get(row["number"], {}).get("ends") or "", 300),
            abort.format(hidden, row["number"]) if row["state"] in ("waiting", "running") else "",
        ]
        for row in reversed(seen.get("experiments", ()))
    ]  # fmt: skip
    head = ("Number", "Experiment", "By", "State", "Added", "Steps", "Why, or until", "")
    submit = Markup(
        '<form method="post" action="/submit">{}<p><textarea name="experiment" rows="16" cols="100" required '
        'aria-label="the experiment, in TOML"></textarea></p><p><label>Priority <input type="number" name="priority" '
        'value="{}" min="-100" max="100"></label> <button>submit</button></p></form>'
    ).format(hidden, _NO_PRIORITY)
    sections = [
        ("queue", "Queue", markup.section("queue", "Queue", "", markup.table("The last first.", head, rows))),
        ("submit", "Submit", markup.section("submit", "Submit", "An experiment, as in its TOML file.", submit)),
    ]
    about = printable(f"{person.federation}: {person.party} at {person.host}:{person.port}")
    top = markup.top(about, notices=[printable(notice, 600) for notice in notices])
    footer = "What is asked for here is done by the server as the role of this person allows, and noted there."
    return markup.document("status", f"Piebald: {about}", top, sections, footer, forms=True)
