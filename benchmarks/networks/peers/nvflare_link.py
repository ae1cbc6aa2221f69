"""A model to a site and an update back over NVIDIA FLARE's own messages, as its jobs send them.

The site asks for the model and gets it as the reply, then sends the update: two requests of its streaming cell, over
its TCP driver, without TLS, with its defaults.  What fails is tried again, as its clients do.  The server is a process
of its own; no job layer and no training are in the way.  Piebald does not depend on it: `pip install "nvflare<2.10"`.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bad_link import BadLink, Conditions
from links import Link, parameters
from links import Watched

CHANNEL, LIMIT, QUIET, DONE = "aux_communication", 1200.0, 60.0, b"ok"


def measured(link: Link, size: str) -> dict[str, Any]:
    """Seconds and bytes of the second exchange, since the first one makes the connection."""
    from nvflare.fuel.f3.message import Message

    from piebald.federation.hub.local_federation import free_port

    port, nbytes = free_port(), 4 * parameters(size)
    server = subprocess.Popen([sys.executable, __file__, str(port), str(nbytes)], stdin=subprocess.PIPE)
    bad = BadLink(("127.0.0.1", port))
    cell = _cell("site-1", bad.port)
    cell.start()

    def ask(topic: str, body: bytes, answer: int, quiet: float = QUIET) -> int:
        tries, until = 0, time.monotonic() + LIMIT
        while time.monotonic() < until:
            tries += 1
            reply = cell.send_request(
                channel=CHANNEL, target="server", topic=topic, request=Message({}, body), timeout=quiet, optional=True
            )
            if len(reply.payload or b"") == answer:  # what failed has none
                return tries
            time.sleep(1.0)
        raise TimeoutError(f"nothing got through in {LIMIT:.0f} s")

    try:
        ask("model", b"", nbytes, 3.0)  # the server may not listen yet
        watched = Watched(link, bad)
        tries = ask("model", b"", nbytes) + ask("update", bytes(nbytes), len(DONE))
        return watched.found() | {"nbytes": nbytes, "lost": 0, "tries": tries - 2}
    finally:
        bad.conditions = Conditions()
        server.kill()
        server.wait()
        cell.stop()
        bad.close()


def _cell(name: str, port: int) -> Any:
    from nvflare.fuel.f3.cellnet.cell import Cell

    logging.disable(logging.ERROR)
    return Cell(name, f"tcp://127.0.0.1:{port}", False, {}, create_internal_listener=False)


def main() -> None:
    """The server, until standard input ends."""
    from nvflare.fuel.f3.message import Message

    port, nbytes = int(sys.argv[1]), int(sys.argv[2])
    cell, model = _cell("server", port), bytes(nbytes)
    answers = {"model": model, "update": DONE}
    for topic, answer in answers.items():
        cell.register_request_cb(channel=CHANNEL, topic=topic, cb=lambda _, answer=answer: Message({}, answer))
    cell.start()
    sys.stdin.read()


if __name__ == "__main__":
    main()
