"""Piebald's frames beside WebSockets (library `websockets`) over the same TLS: python benchmarks/networks/transports.py

Each server is a process of its own, and so are its sites.  Prints a table for docs/reference/protocol.md.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.extend([str(Path(__file__).parent), str(Path(__file__).parents[1])])

from shared.measured import in_turns, megabytes
from shared.measured import seconds as _timed
from shared.options import reader
from threads import provisioned

from piebald.federation.credentials import provisioning
from piebald.federation.link.messaging import SERVER, Link
from piebald.federation.link.tls import context
from piebald.federation.link.wire_format import PIECE, Reply, decode, encode

KINDS = ("frames", "websockets")
PIECES, AHEAD = 2400, 16  # of a body of 300 MB; under way at a time
HELLO = encode(Reply(status="done"))


def serve(kind: str, folder: Path) -> None:
    """Answer every message with the number of its bytes until the standard input ends."""
    credentials = provisioning.read(folder / SERVER)
    if kind == "frames":
        link = Link(SERVER, ("127.0.0.1", credentials.port), credentials.folder, lambda _: True, lambda _: None)
        link.on("result", Reply, lambda origin, head, body: encode(Reply(status="done", received=len(body))))
        link.start()
    else:
        threading.Thread(target=_serve_websockets, args=(credentials,), daemon=True).start()
    print("ready", flush=True)
    for line in sys.stdin:
        if line.strip() == "memory":
            print(round(1000 * megabytes("VmRSS")), flush=True)


def _serve_websockets(credentials: Any) -> None:
    import asyncio
    import ssl

    from websockets.asyncio.server import serve as listen

    async def answer(connection: Any) -> None:
        async for message in connection:
            received = len(decode(Reply, message)[1])
            await connection.send(encode(Reply(status="done", received=received)))

    async def run() -> None:
        made = context(credentials.folder, server=True)
        made.sslsocket_class = ssl.SSLSocket
        async with listen(
            answer, "127.0.0.1", credentials.port, ssl=made, max_size=1 << 22, compression=None, backlog=128
        ) as server:
            await server.serve_forever()

    asyncio.run(run())


def attend(kind: str, folder: Path, names: list[str]) -> None:
    """Connect as these sites, say when all are there, and stay until the standard input ends."""
    print("imported", flush=True)
    sys.stdin.readline()
    ask = [_connected(kind, folder, name).ask for name in names]
    until = time.monotonic() + 300
    with_answer = 0
    while with_answer < len(ask) and time.monotonic() < until:
        if ask[with_answer](b"", 1.0) is not None:
            with_answer += 1
        else:
            time.sleep(0.01)  # there is no connection yet
    print(with_answer, flush=True)
    for _ in sys.stdin:
        pass


def _connected(kind: str, folder: Path, name: str) -> _Frames | _WebSocket:
    credentials = provisioning.read(folder / name)
    made = _Frames if kind == "frames" else _WebSocket
    return made(credentials.folder, ("127.0.0.1", credentials.port))


class _Frames:
    def __init__(self, folder: Path, address: tuple[str, int]) -> None:
        self.link = Link(folder.name, address, folder, lambda _: True, lambda _: None)
        self.link.start()

    def ask(self, body: bytes, timeout: float) -> Any:
        return self.link.request(SERVER, "result", Reply(status="done"), body, timeout)

    def flood(self, piece: bytes) -> None:
        """Send pieces, several under way at a time."""
        with ThreadPoolExecutor(AHEAD) as pool:
            assert all(answer is not None for answer in pool.map(lambda _: self.ask(piece, 60.0), range(PIECES)))


class _WebSocket:
    def __init__(self, folder: Path, address: tuple[str, int]) -> None:
        self.folder, self.address = folder, address
        self.connection: Any = None

    def ask(self, body: bytes, timeout: float) -> Any:
        import ssl

        from websockets.exceptions import WebSocketException
        from websockets.sync.client import connect

        made = context(self.folder, server=False)
        made.sslsocket_class = ssl.SSLSocket
        try:
            if self.connection is None:
                host, port = self.address
                self.connection = connect(f"wss://{host}:{port}", ssl=made, compression=None, proxy=None, legacy=True)
            self.connection.send(HELLO + body)
            return self.connection.recv(timeout)
        except (OSError, TimeoutError, WebSocketException):
            self.connection = None
            return None

    def flood(self, piece: bytes) -> None:
        """Send pieces, several under way at a time."""
        for number in range(PIECES + AHEAD):
            if number < PIECES:
                self.connection.send(HELLO + piece)
            if number >= AHEAD:
                self.connection.recv(60.0)


def measured(kind: str, folder: Path, names: list[str]) -> dict[str, float]:
    """Return what one server of a kind takes: seconds, megabytes a second, and kilobytes for each idle site."""
    server, sites = _spawn("serve", kind, folder), list[subprocess.Popen[str]]()
    try:
        site = _connected(kind, folder, names[0])
        while site.ask(b"", 1.0) is None:
            time.sleep(0.05)
        times = [_timed(lambda: site.ask(b"", 10.0)) for _ in range(300)]
        body = _timed(lambda: site.flood(os.urandom(PIECE)))
        before, half = _told(server, "memory"), len(names) // 2
        sites += [_spawn("attend", kind, folder, *part) for part in (names[:half], names[half:])]
        began = time.monotonic()
        there = sum(_told(one, "go") for one in sites)
        return {
            "request_ms": 1000 * statistics.median(times),
            "mb_per_s": PIECE * PIECES / body / 1e6,
            "sites": there,
            "all_there_s": time.monotonic() - began,
            "kb_per_site": (_told(server, "memory") - before) / max(there, 1),
        }
    finally:
        for process in (server, *sites):
            process.kill()
            process.communicate()


def _spawn(*arguments: Any) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    assert process.stdout is not None
    process.stdout.readline()  # it has imported what it needs
    return process


def _told(server: subprocess.Popen[str], question: str) -> int:
    assert server.stdin is not None
    assert server.stdout is not None
    print(question, file=server.stdin, flush=True)
    return int(server.stdout.readline())


def main() -> None:
    """Measure both kinds in turn, several times, and print medians."""
    arguments = reader(__doc__, sites=1000, times=3, kinds=KINDS).parse_args()
    kinds: list[str] = list(arguments.kinds)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "credentials"
        names = provisioned(folder, arguments.sites)

        def one(kind: str) -> dict[str, float]:
            print(json.dumps({"kind": kind} | (made := measured(kind, folder, names))), flush=True)
            return made

        found = in_turns({kind: partial(one, kind) for kind in kinds}, arguments.times)
    print("| | " + " | ".join(kinds) + " |\n|---|" + "---|" * len(kinds))
    for name in found[kinds[0]][0]:
        cells = [f"{statistics.median(one[name] for one in found[kind]):.4g}" for kind in kinds]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2], Path(sys.argv[3]))
    elif sys.argv[1:2] == ["attend"]:
        attend(sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
    else:
        main()
