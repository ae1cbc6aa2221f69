"""`piebald ui`: a folder of runs in a browser, on this machine only, read only."""

from __future__ import annotations

import http.server
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qs, urlsplit

import typer

from piebald.cli.app import LOOPBACK, SharedOptions, command, end_on_term
from piebald.core.errors import PiebaldError, SettingError

_LONGEST = 1 << 14  # letters of an address
_HOSTS = ("localhost", "127.0.0.1")  # a page of another host could ask in the name of its reader (DNS rebinding)
_HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}


@command()
def ui(
    _: SharedOptions,
    runs: Annotated[Path, typer.Argument(metavar="RUNS", help="A folder that contains run folders.")] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port on this machine; 0 takes a free one.")] = 8080,
) -> None:
    """Show a folder of runs in a browser: list, filter, open and compare them; nothing can be changed."""
    end_on_term()
    with serving_runs(runs, port) as server:
        print(f"http://{LOOPBACK}:{server.server_port}/ shows {runs}; Ctrl-C ends it", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return


def serving_runs(folder: Path, port: int) -> http.server.ThreadingHTTPServer:
    """Return a server of the pages of a folder, which listens on the loopback interface.

    Args:
        folder: contains run folders, at any depth.
        port: 0 for a free one.

    Raises:
        SettingError: there is no such folder, or the port is used.
    """
    if not folder.is_dir():
        raise SettingError(f"there is no folder {folder}: give one that contains run folders")

    class Handler(_Handler):
        root = folder

    try:
        return http.server.ThreadingHTTPServer((LOOPBACK, port), Handler)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise SettingError(f"port {port} cannot be listened on ({reason}): give another --port") from None


def listed(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what the list shows of each run, by its path in the folder, the latest first."""
    from piebald.report.tables import History
    from piebald.storage.schema import DATABASE

    databases = sorted(folder.rglob(DATABASE), key=lambda path: -path.stat().st_mtime)
    found: dict[str, dict[str, Any]] = {}
    for database in databases:
        changed = f"{datetime.fromtimestamp(database.stat().st_mtime):%Y-%m-%d %H:%M}"
        path = str(database.parent.relative_to(folder))
        try:
            with History(database.parent) as run:
                final = run.final
                facts = {"label": run.label, "state": final["status"], "rounds": final["rounds"], "seed": run.seed}
                score = {"metric": run.metric, "score": final["mean"], "clients": run.meta.get("clients")}
                found[path] = {**facts, **score, "data": run.meta.get("data"), "changed": changed}
        except PiebaldError as error:  # a damaged run stops no other
            found[path] = {"state": str(error), "changed": changed}
    return found


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers GET for the list, one run, and a comparison; a run is named as the list names it."""

    root: Path
    server_version, sys_version = "piebald", ""
    timeout = 30

    def do_GET(self) -> None:
        host = (self.headers.get("Host") or "").rpartition(":")[0] or (self.headers.get("Host") or "")
        if host not in _HOSTS:
            return self._answer(421, "this page is for this machine only: open it under localhost")
        asked = urlsplit(self.path[:_LONGEST])
        values = parse_qs(asked.query)
        if asked.path == "/":
            return self._list(values.get("words", [""])[0])
        if asked.path in ("/run", "/compare"):
            return self._open(values.get("run", []))
        self._answer(404, "there is no such page")

    def _list(self, words: str, trouble: str = "", code: int = 200) -> None:
        from piebald.report.page.runs_page import content_policy, runs_page

        runs = listed(self.root)
        shown = [path for path, run in runs.items() if _fits(path, run, words)]
        self._answer(code, runs_page(str(self.root), runs, shown, words, trouble), content_policy())

    def _open(self, paths: Sequence[str]) -> None:
        from piebald.report.comparison import Comparison
        from piebald.report.page.report_page import render
        from piebald.report.tables import History

        runs = listed(self.root)
        if not paths or any(path not in runs for path in paths):  # what is not listed names no folder
            return self._list("", "Mark runs of the list." if not paths else "There is no such run.", 404)
        histories = []
        try:
            histories = [History(self.root / path) for path in paths]
            page = render(Comparison(histories))
        except PiebaldError as error:
            return self._list("", str(error), 422)
        finally:
            for history in histories:
                history.close()
        self._answer(200, page, None)

    def _answer(self, code: int, text: str, policy: str | None = "default-src 'none'") -> None:
        content = text.encode()
        self.send_response(code)
        kind = "html" if text.startswith("<!doctype") else "plain"
        headers = {"Content-Type": f"text/{kind}; charset=utf-8", "Content-Length": str(len(content)), **_HEADERS}
        # a report has its own policy within, with the digests of its scripts
        for name, value in (headers | ({} if policy is None else {"Content-Security-Policy": policy})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing for each request."""


def _fits(path: str, run: Mapping[str, Any], words: str) -> bool:
    """Return whether every word stands in the path or the values of a run."""
    text = " ".join([path, *(str(value) for value in run.values())]).lower()
    return all(word in text for word in words.lower().split())
